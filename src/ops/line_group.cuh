/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines (rows or columns) of logsumexp and softmax whose elements are spread over ranks. Each rank sends one
 * record per line, in the order of the lines of the call, which is the same on all ranks. One more record
 * follows, whose first 32 bits are a hash of the call, to detect ranks that make different calls. All ranks
 * merge the records of a line in rank order, and so get the same bits.
 */
#ifndef RAFTER_OPS_LINE_GROUP_CUH
#define RAFTER_OPS_LINE_GROUP_CUH

#include <initializer_list>

#include "core/group.h"
#include "cuda/launch.cuh"
#include "cuda/row_statistics.cuh"

/* The buffers of the all-gather. Record: lse, or statistics of a line. */
template <typename Record> struct LineExchange {
    Record *own;       /* lines + 1 records of this rank */
    const Record *all; /* those of rank 0, rank 1, ... */
    int64_t lines;
    int ranks;
    uint32_t hash;
    int *disagreed; /* on the device; set to 1 if the hashes differ */

    /* Bytes of `own` and `all` together. */
    static size_t workspace(int64_t lines, int ranks) {
        return static_cast<size_t>((lines + 1) * (1 + int64_t(ranks))) * sizeof(Record);
    }
    size_t bytes_sent() const {
        return static_cast<size_t>(lines + 1) * sizeof(Record);
    }
    DEVICE const Record &of(int rank, int64_t line) const {
        return all[rank * (lines + 1) + line];
    }
    /* Called by one thread of all. */
    DEVICE void put_hash() const {
        *reinterpret_cast<uint32_t *>(own + lines) = hash;
    }
    /* False if some rank made a different call: then the results must be NaN. */
    DEVICE bool agree() const {
        bool all_agree = true;
        for (int rank = 0; rank < ranks; rank++)
            all_agree = all_agree && *reinterpret_cast<const uint32_t *>(&of(rank, lines)) == hash;
        if (!all_agree)
            *static_cast<volatile int *>(disagreed) = 1;
        return all_agree;
    }
};

/* `values`: what must be the same on all ranks, and is hashed. */
template <typename Record>
LineExchange<Record> line_exchange(const rafter_context *context, const rafter_communicator &group, int64_t lines,
                                   Record *own, const Record *all, std::initializer_list<int64_t> values) {
    uint64_t hash = 1469598103934665603u;
    for (int64_t value : values)
        hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211u;
    return {own,
            all,
            lines,
            group.ranks,
            static_cast<uint32_t>(hash ^ hash >> 32),
            context->cuda_state->bad_labels_on_device + 1};
}

#endif

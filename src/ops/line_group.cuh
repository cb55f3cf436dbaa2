/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines of logsumexp and softmax that are spread over ranks. A rank sends one record per line, in the
 * order of the lines of the call, which all ranks share, and one more, whose first 32 bits are a hash of
 * the call. All ranks merge the records of a line alike, in rank order.
 */
#ifndef RAFTER_OPS_LINE_GROUP_CUH
#define RAFTER_OPS_LINE_GROUP_CUH

#include <initializer_list>

#include "core/group.h"
#include "cuda/launch.cuh"
#include "cuda/row_statistics.cuh"

/* Record: lse, or statistics of a line. */
template <typename Record> struct LineExchange {
    Record *own;
    const Record *all; /* of rank 0, rank 1, ... */
    int64_t lines;
    int ranks;
    uint32_t hash;
    int *disagreed; /* set to 1 if the hashes differ */

    static size_t workspace(int64_t lines, int ranks) {
        return static_cast<size_t>((lines + 1) * (1 + int64_t(ranks))) * sizeof(Record);
    }
    size_t bytes_sent() const {
        return static_cast<size_t>(lines + 1) * sizeof(Record);
    }
    DEVICE const Record &of(int rank, int64_t line) const {
        return all[rank * (lines + 1) + line];
    }
    /* By one thread of the call. */
    DEVICE void put_hash() const {
        *reinterpret_cast<uint32_t *>(own + lines) = hash;
    }
    /* False if some rank made another call: then the results are to be NaN. */
    DEVICE bool agree() const {
        bool all_agree = true;
        for (int rank = 0; rank < ranks; rank++)
            all_agree = all_agree && *reinterpret_cast<const uint32_t *>(&of(rank, lines)) == hash;
        if (!all_agree)
            *static_cast<volatile int *>(disagreed) = 1;
        return all_agree;
    }
};

/* `own` and `all` are adjacent. `values`: what must be the same on all ranks. */
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

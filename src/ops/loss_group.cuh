/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device side of loss_group.c: losses whose classes are spread over ranks. Each rank computes the
 * statistics of a row over its own classes. All ranks gather those of all ranks and merge them in rank
 * order. What follows is the same as on one rank.
 */
#ifndef RAFTER_OPS_LOSS_GROUP_CUH
#define RAFTER_OPS_LOSS_GROUP_CUH

#include <initializer_list>

#include "core/group.h"
#include "cuda/launch.cuh"
#include "ops/loss_classes.cuh"

/* What ranks send: a record per row of the call, in the order of the rows, and then a header, which says which classes
 * the rank has, and has a hash of the call. A record is LossStats<FULL>; without entropy, dentropy and argmax, only its
 * first 16 bytes. */
struct Exchange {
    char *send, *receive; /* records of this rank; of all ranks, in rank order */
    int64_t rows;
    int ranks;
    int bytes; /* of a record */
    uint32_t hash;
    int *disagreed; /* on the device; set to 1 if the hashes differ, or the shards do not follow one another */

    static int record_bytes(const struct rafter_loss &loss) {
        const bool more = loss.entropy.data || loss.dentropy.data || loss.argmax.data;
        return more ? int(sizeof(LossStats<FULL>)) : 16;
    }
    static int64_t workspace(const struct rafter_loss &loss) {
        return (loss.rows + 1) * record_bytes(loss) * (1 + int64_t(loss.class_group.ranks));
    }
    DEVICE const char *record(int from, int64_t row) const {
        return receive + (from * (rows + 1) + row) * bytes;
    }
};
static_assert(sizeof(LossStats<FULL>) == 32, "what goes over the wire");

namespace loss_group {

/* A hash of what must be the same on all ranks. `values`: what the op adds to that. */
inline uint64_t hash_call(const struct rafter_loss &loss, std::initializer_list<int64_t> values) {
    uint64_t hash = 1469598103934665603u;
    const auto add = [&](const void *data, size_t bytes) {
        for (size_t i = 0; i < bytes; i++)
            hash = (hash ^ static_cast<const unsigned char *>(data)[i]) * 1099511628211u;
    };
    const int64_t whole[] = {loss.rows,
                             loss.all_classes,
                             loss.ignore_index,
                             loss.reduction,
                             loss.direction,
                             loss.zero_if_all_ignored,
                             loss.class_weight.data != NULL};
    const float options[] = {loss.smoothing, loss.z_loss, loss.softcap, loss.scale};
    add(whole, sizeof whole);
    add(options, sizeof options);
    for (int64_t value : values)
        add(&value, sizeof value);
    return hash;
}

inline Exchange exchange_of(const rafter_context *context, const struct rafter_loss &loss, char *memory,
                            std::initializer_list<int64_t> values) {
    Exchange e = {};
    e.rows = loss.rows;
    e.ranks = loss.class_group.ranks;
    e.bytes = Exchange::record_bytes(loss);
    e.send = memory;
    e.receive = memory + (e.rows + 1) * e.bytes;
    const uint64_t hash = hash_call(loss, values);
    e.hash = static_cast<uint32_t>(hash ^ hash >> 32);
    e.disagreed = context->cuda_state->bad_labels_on_device + 1;
    return e;
}

/* The header has two words: the rank's first class, and how many it has, in the lower 48 bits; and 16 bits of the hash
 * in the upper bits of each. */
enum { CLASS_BITS = 48 };

DEVICE uint64_t header_word(int64_t classes, uint32_t hash) {
    return static_cast<uint64_t>(classes) | static_cast<uint64_t>(hash & 0xffff) << CLASS_BITS;
}

DEVICE int64_t classes_in(uint64_t word) {
    return static_cast<int64_t>(word & ((uint64_t(1) << CLASS_BITS) - 1));
}

/* Stores a row's statistics over this rank's classes. Called by one thread per row; that of row 0
 * also stores the header. */
DEVICE void publish(const Exchange &e, int64_t row, LossStats<FULL> g, const Loss &loss) {
    if (g.argmax >= 0)
        g.argmax += loss.first_class;
    const float4 *const from = reinterpret_cast<const float4 *>(&g);
    float4 *const to = reinterpret_cast<float4 *>(e.send + row * e.bytes);
    to[0] = from[0];
    if (e.bytes > 16)
        to[1] = from[1];
    if (row == 0) {
        uint64_t *const header = reinterpret_cast<uint64_t *>(e.send + e.rows * e.bytes);
        header[0] = header_word(loss.first_class, e.hash);
        header[1] = header_word(loss.classes, e.hash >> 16);
    }
}

/* A row's statistics over all classes. The sum is NaN if the ranks made different calls. */
DEVICE LossStats<FULL> merged(const Exchange &e, int64_t row, const Loss &loss) {
    LossStats<FULL> g = no_columns<FULL>();
    bool agree = true;
    int64_t next = 0; /* where the next shard must begin */
    for (int from = 0; from < e.ranks; from++) {
        LossStats<FULL> one = no_columns<FULL>();
        const float4 *const record = reinterpret_cast<const float4 *>(e.record(from, row));
        reinterpret_cast<float4 *>(&one)[0] = record[0];
        if (e.bytes > 16)
            reinterpret_cast<float4 *>(&one)[1] = record[1];
        g = merge(g, one, loss.scale);
        const uint64_t *const header = reinterpret_cast<const uint64_t *>(e.record(from, e.rows));
        const int64_t classes = classes_in(header[1]);
        agree = agree && header[0] == header_word(next, e.hash) && header[1] == header_word(classes, e.hash >> 16);
        next += classes;
    }
    if (!agree || next != loss.all_classes) {
        *static_cast<volatile int *>(e.disagreed) = 1;
        g.s.sum = NAN;
    }
    return g;
}

/* The all-gather of the records. */
inline rafter_status gather(rafter_context *context, const struct rafter_loss &loss, const Exchange &e) {
    return rafter_group_gather(context, "options.class_group", &loss.class_group, e.send, e.receive,
                               static_cast<size_t>((e.rows + 1) * e.bytes));
}

} // namespace loss_group

#endif

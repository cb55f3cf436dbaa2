/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A loss whose classes or rows are spread over ranks. A rank computes the statistics of its own
 * classes; one all-gather brings every rank those of all; each merges them in the same order, and
 * goes on as one rank does, with statistics of whole rows.
 *
 * The order of merging is that of a binary tree which halves a range of ranks, or of tiles, again and
 * again. A node is rounded to a struct rafter_row_record, whether it is sent or not. So if equal
 * shards of whole tiles are spread over 1, 2, 4, ... ranks, the same nodes are merged in the same
 * order, and the bits of the statistics do not depend on the number of ranks.
 */
#ifndef RAFTER_OPS_LOSS_GROUP_H
#define RAFTER_OPS_LOSS_GROUP_H

#include "core/variants.h"
#include "ops/loss.h"

/* struct rafter_row_stats of some columns, as it is sent. The second half only if the call needs
 * it: see rafter_loss_record_bytes. */
struct rafter_row_record {
    float max, sum, sum_rest; /* sum + sum_rest: 48 bits of it */
    float target;
    float moment;
    /* max * (the sum of w) - (the sum of w u), so that nothing cancels; or, if max is not finite, only
     * the negative of the second sum. */
    float deficit;
    float best;
    int32_t argmax; /* counted over all classes */
};
_Static_assert(sizeof(struct rafter_row_record) == 32, "32 bytes per row and rank");

static inline bool rafter_loss_grouped(const struct rafter_loss *loss) {
    return rafter_group_has(&loss->class_group) || rafter_group_has(&loss->row_group);
}

/* Bytes of a record on the wire: 16, or 32. */
size_t rafter_loss_record_bytes(const struct rafter_loss *loss);

/* What the ranks compare besides the options of the loss. */
struct rafter_loss_terms {
    int op; /* enum rafter_op_index */
    rafter_dtype dtype;
    int64_t depth; /* 0: none */
    int dx;        /* 0: not wanted; 1: all rows; 2: this rank's share */
    bool exchange; /* statistics will be exchanged */
};

/* The last step that can fail but for a collective: every rank of both groups takes it, with its
 * status so far. Then counted and mean_denominator are those of row_group. `prefix`: space for one
 * number more than class_group has ranks (not read without one): the sum of the class weights before
 * each rank's first class, and of all. */
rafter_status rafter_loss_agree(rafter_context *context, struct rafter_loss *loss,
                                const struct rafter_loss_terms *terms, rafter_status status, double *prefix);

/* Adds the weights of classes [from, to) to `sum`, one after the other. Only label smoothing needs
 * them; without it, 1 each. */
double rafter_loss_add_weights(const struct rafter_loss *loss, double sum, int64_t from, int64_t to);

/* To and from records. `weights`: the sum of the weights of the columns. */
struct rafter_row_record rafter_row_record_of(const struct rafter_row_stats *stats, double weights);
struct rafter_row_stats rafter_row_stats_of(const struct rafter_row_record *record, double weights);

/* The statistics of `count` parts of a row, merged as a tree. Part i, of which `bytes` bytes are
 * known, is at parts + i * stride; prefix[i] is the sum of the class weights before it. */
struct rafter_row_stats rafter_row_merge_tree(const char *parts, size_t stride, size_t bytes, const double *prefix,
                                              int64_t from, int64_t to);

/* Bytes of workspace for an exchange of the statistics of `rows` rows: first what is sent, then
 * what arrives. */
size_t rafter_loss_exchange_bytes(const struct rafter_loss *loss, int64_t rows);

/* Where row `row` is put before the exchange; then its merged statistics. */
void rafter_loss_put_record(const struct rafter_loss *loss, char *exchange, int64_t row,
                            const struct rafter_row_record *record);
rafter_status rafter_loss_exchange(rafter_context *context, const struct rafter_loss *loss, char *exchange,
                                   int64_t rows);
struct rafter_row_stats rafter_loss_merged(const struct rafter_loss *loss, const char *exchange, int64_t rows,
                                           int64_t row, const double *prefix);

/* rafter_run for a loss. On CUDA also what row_group needs before and after it. `loss`: the
 * call's. */
rafter_status rafter_loss_run(rafter_context *context, const struct rafter_op *op, const struct rafter_call *call,
                              struct rafter_loss *loss);

/* rafter_loss_write, with the sum over all ranks of row_group. */
rafter_status rafter_loss_write_sum(rafter_context *context, const struct rafter_loss *loss, double sum);

#endif

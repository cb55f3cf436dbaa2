/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A loss whose classes or rows are spread over ranks. A rank computes the statistics of its own
 * classes. One all-gather gives every rank the statistics of all ranks. Each rank merges them in the
 * same order and goes on as a single rank would, with statistics of whole rows.
 *
 * Statistics are merged as a binary tree that halves a range of ranks, or of tiles, again and again.
 * Each node is rounded to a struct rafter_row_record, whether it is sent or not. So if equal shards
 * of whole tiles are spread over 1, 2, 4, ... ranks, the same nodes are merged in the same order,
 * and the bits of the statistics do not depend on the number of ranks.
 */
#ifndef RAFTER_OPS_LOSS_GROUP_H
#define RAFTER_OPS_LOSS_GROUP_H

#include "core/variants.h"
#include "ops/loss.h"

/* A struct rafter_row_stats as it is sent. The second half is sent only if the call needs it: see
 * rafter_loss_record_bytes. */
struct rafter_row_record {
    float max, sum, sum_rest; /* sum + sum_rest has 48 bits of the sum */
    float target;
    float moment;
    /* Stands for `logit_sum`: max * (the sum of w) - logit_sum, the sum of w (max - u). The loss needs this difference,
     * and taking it before the rounding loses nothing to cancellation. If max is not finite: -logit_sum. */
    float deficit;
    float best;
    int32_t argmax; /* an index among all classes */
};
_Static_assert(sizeof(struct rafter_row_record) == 32, "32 bytes per row and rank");

static inline bool rafter_loss_grouped(const struct rafter_loss *loss) {
    return rafter_group_has(&loss->class_group) || rafter_group_has(&loss->row_group);
}

/* Bytes of a record on the wire: 16, or 32. */
size_t rafter_loss_record_bytes(const struct rafter_loss *loss);

/* What the ranks compare besides the loss and its options. */
struct rafter_loss_terms {
    int op; /* enum rafter_op_index */
    rafter_dtype dtype;
    int64_t depth; /* linear_cross_entropy's D; 0: none */
    int dx;        /* 0: not wanted; 1: all rows; 2: this rank's share */
    bool exchange; /* statistics will be exchanged */
};

/* Lets the ranks of both groups compare their calls. Every rank takes this step, with its status so
 * far; after it only collectives can fail. Afterwards counted, label_weight and mean_denominator
 * cover all ranks of row_group. `prefix` (only used with class_group) has room for one number more
 * than class_group has ranks: prefix[r] becomes the sum of the weights of the classes before rank
 * r's, and the last number the sum of all. */
rafter_status rafter_loss_agree(rafter_context *context, struct rafter_loss *loss,
                                const struct rafter_loss_terms *terms, rafter_status status, double *prefix);

/* Adds the weights of classes [from, to) to `sum`, one after the other. Only label smoothing needs
 * them: without it every class counts 1. */
double rafter_loss_add_weights(const struct rafter_loss *loss, double sum, int64_t from, int64_t to);

/* Conversion to a record and back. `weights`: the sum of the class weights of the record's columns. */
struct rafter_row_record rafter_row_record_of(const struct rafter_row_stats *stats, double weights);
struct rafter_row_stats rafter_row_stats_of(const struct rafter_row_record *record, double weights);

/* The statistics of parts [from, to) of a row, merged as a tree. The record of part i is at parts + i * stride, and its
 * first `bytes` bytes are known; prefix[i] is the sum of the class weights before the part. */
struct rafter_row_stats rafter_row_merge_tree(const char *parts, size_t stride, size_t bytes, const double *prefix,
                                              int64_t from, int64_t to);

/* Bytes of workspace (`exchange` below) for an exchange of the statistics of `rows` rows: first the
 * records that this rank sends, then those that arrive from all ranks. */
size_t rafter_loss_exchange_bytes(const struct rafter_loss *loss, int64_t rows);

/* The three steps of an exchange: every row's record is put into the workspace; the records are
 * gathered; the merged statistics of a row are read. */
void rafter_loss_put_record(const struct rafter_loss *loss, char *exchange, int64_t row,
                            const struct rafter_row_record *record);
rafter_status rafter_loss_exchange(rafter_context *context, const struct rafter_loss *loss, char *exchange,
                                   int64_t rows);
struct rafter_row_stats rafter_loss_merged(const struct rafter_loss *loss, const char *exchange, int64_t rows,
                                           int64_t row, const double *prefix);

/* rafter_run for a loss. On CUDA it also does what row_group needs before and after the run. `loss`
 * is the member of `call`. */
rafter_status rafter_loss_run(rafter_context *context, const struct rafter_op *op, const struct rafter_call *call,
                              struct rafter_loss *loss);

/* rafter_loss_write, with the sum over all ranks of row_group. */
rafter_status rafter_loss_write_sum(rafter_context *context, const struct rafter_loss *loss, double sum);

#endif

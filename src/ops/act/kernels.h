/* SPDX-License-Identifier: Apache-2.0 */
/* The interface between act's cpu_run.c and its CPU kernels. */
#ifndef RAFTER_ACT_KERNELS_H
#define RAFTER_ACT_KERNELS_H

#include "ops/act/call.h"

/* A block of rows x columns elements: the same part of every tensor of the call. */
struct act_block {
    rafter_dtype dtype;
    rafter_act_kind kind;
    bool stream; /* write past the caches. The output is aligned to its elements; the caller ends with v_fence() */
    int64_t rows, columns;
    int64_t inner; /* whole_rows: a row holds `inner` interleaved lines: element i belongs to line i % inner; else 1 */
    char *data[ACT_TENSORS];
    int64_t row_stride[ACT_TENSORS], column_stride[ACT_TENSORS]; /* in elements */
    uint8_t *mask; /* relu_mask at the first element, or NULL. With a mask, the block is one contiguous row */
};

/* Softmax normalises lines, which are the rows or the columns of a block. */
enum act_form { ACT_ROWS, ACT_COLUMNS, ACT_FORMS };

enum {
    /* The most elements of a row for whole_rows, including a margin after the row. */
    ACT_SHORT_MARGIN = 64,
    ACT_SHORT = 8192 + ACT_SHORT_MARGIN,
    /* Elements of rows, including margins, that are read twice and should stay in L1. */
    ACT_ROWS_BLOCK = 2048,
    /* Softmax over columns: if there are at least ACT_JOINED_BLOCKS contiguous blocks of fewer than ACT_JOINED_COLUMNS
     * columns and at most ACT_JOINED (backward: ACT_JOINED_BACKWARD) elements, each becomes one row of several lines,
     * and has a lane in whole_rows. */
    ACT_JOINED_COLUMNS = 32,
    ACT_JOINED_BLOCKS = 16,
    ACT_JOINED = 448,
    ACT_JOINED_BACKWARD = ACT_JOINED / 2,
    /* The most lines of a block of columns, unless it has few rows. */
    ACT_MOST_LINES = 512,
    /* The most rows (elements of a line) for few_rows. */
    ACT_FEW_ROWS = 16,
    /* Floats per line. Forward: the maximum, and the sum of exponentials relative to it. Backward: the
     * sum of y dy. A block has an array of the first number of all its lines, then an array of the
     * second. The statistics of several parts of the same lines follow one another. */
    ACT_STATISTICS = 2
};

struct act_kernels {
    /* The elementwise kinds, by direction. */
    void (*map[2])(const struct act_block *block);
    /* Softmax along any number of rows of up to ACT_SHORT elements (ACT_JOINED if a row holds several
     * lines) with column stride 1, in one step; by direction. */
    void (*whole_rows[2])(const struct act_block *block);
    /* Softmax along columns of up to ACT_FEW_ROWS rows, in one step; by direction. */
    void (*few_rows[2])(const struct act_block *block);
    /* Softmax by form and direction, in two steps: statistics of the lines, then the result from
     * them. */
    void (*statistics[ACT_FORMS][2])(const struct act_block *block, float *statistics);
    void (*apply[ACT_FORMS][2])(const struct act_block *block, const float *statistics);
    /* Merges the statistics of `parts` parts of the same lines into those of the first part; by
     * direction. */
    void (*merge[2])(float *statistics, int64_t lines, int64_t parts);
};

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which kernels take the rows of batch-invariant calls. Rows are divided into classes, each with one order of
 * summation. So the class of a row must not depend on the number of rows or on their addresses. It depends on
 * the length of a row and the distance between its elements only.
 */
#ifndef RAFTER_CUDA_ROW_CLASSES_CUH
#define RAFTER_CUDA_ROW_CLASSES_CUH

#include "cuda/row_chunks.cuh"
#include "cuda/tiny_rows.cuh"

enum RowClass {
    TINY_ROWS,    /* tiny_rows.cuh: a thread per row */
    CHUNKED_ROWS, /* row_chunks.cuh: several lanes of a warp per row; its elements are adjacent */
    COLUMN_ROWS,  /* row_threads.cuh: a thread per part of a row; its elements lie far apart */
    OTHER_ROWS,   /* slot_sums.cuh, indexed_rows.cuh */
};

/* Whether the elements of a row, `step` apart, are so far apart that adjacent threads should take adjacent rows. */
static inline bool lies_in_columns(int64_t length, int64_t step, rafter_dtype dtype) {
    constexpr int64_t FAR = 16; /* bytes */
    return length > 1 && length <= INT32_MAX / 2 && step * rafter_dtype_bytes(dtype) >= FAR;
}

static inline RowClass class_of_rows(int64_t length, int64_t step, rafter_dtype dtype) {
    if (length <= LONGEST_TINY)
        return TINY_ROWS;
    if (step == 1)
        return length * rafter_dtype_bytes(dtype) <= LONGEST_CHUNKED ? CHUNKED_ROWS : OTHER_ROWS;
    return lies_in_columns(length, step, dtype) ? COLUMN_ROWS : OTHER_ROWS;
}

/* COLUMN_ROWS: elements of a row that one thread takes. */
constexpr int64_t COLUMN_PART = 256;

/* Whether there are more rows, or parts of them, than the 31-bit counters of the class's kernels can count. Such calls
 * are refused: other kernels would sum in another order. Kernels of OTHER_ROWS have no such limit. */
static inline bool are_too_many(RowClass rows_are, int64_t rows, int64_t length) {
    const int64_t parts = rows_are == COLUMN_ROWS ? ceil_div(length, COLUMN_PART) : 1;
    return rows_are != OTHER_ROWS && rows > INT32_MAX / 2 / parts;
}

/* For the why_not of kernels of class `wanted`: why they do not take a batch-invariant call with rows of class
 * rows_are, or NULL. */
static inline const char *why_not_class(RowClass wanted, RowClass rows_are, int64_t rows, int64_t length) {
    if (rows_are != wanted)
        return "the call is batch invariant, and rows have another length or distance of elements";
    return are_too_many(rows_are, rows, length) ? "it counts rows, or parts of them, in 31 bits" : NULL;
}

#endif

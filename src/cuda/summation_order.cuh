/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order in which the elements of a row are added up in batch-invariant calls, and so which kernels take the row.
 * It depends on the length of the row and the distance between its elements only: it must not depend on the number of
 * rows or on their addresses.
 */
#ifndef RAFTER_CUDA_SUMMATION_ORDER_CUH
#define RAFTER_CUDA_SUMMATION_ORDER_CUH

#include "cuda/row_chunks.cuh"
#include "cuda/tiny_rows.cuh"

enum SummationOrder {
    TINY_ROWS,    /* tiny_rows.cuh: a thread per row */
    CHUNKED_ROWS, /* row_chunks.cuh: several lanes of a warp per row; its elements are adjacent */
    STRIDED_ROWS, /* row_threads.cuh: a thread per part of a row; its elements lie far apart */
    OTHER_ROWS,   /* slot_sums.cuh, indexed_rows.cuh */
};

/* Whether the elements of a row, `step` apart, are so far apart that adjacent threads should take adjacent rows. */
static inline bool lies_in_columns(int64_t length, int64_t step, rafter_dtype dtype) {
    constexpr int64_t FAR = 16; /* bytes */
    return length > 1 && length <= INT32_MAX / 2 && step * rafter_dtype_bytes(dtype) >= FAR;
}

static inline SummationOrder summation_order_of(int64_t length, int64_t step, rafter_dtype dtype) {
    if (length <= LONGEST_TINY)
        return TINY_ROWS;
    if (step == 1)
        return length * rafter_dtype_bytes(dtype) <= LONGEST_CHUNKED ? CHUNKED_ROWS : OTHER_ROWS;
    return lies_in_columns(length, step, dtype) ? STRIDED_ROWS : OTHER_ROWS;
}

/* STRIDED_ROWS: elements of a row that one thread takes. */
constexpr int64_t COLUMN_PART = 256;

/* Whether there are more rows, or parts of them, than the 31-bit counters of the kernels can count. Such calls
 * are refused: other kernels would sum in another order. Kernels of OTHER_ROWS have no such limit. */
static inline bool are_too_many(SummationOrder rows_are, int64_t rows, int64_t length) {
    const int64_t parts = rows_are == STRIDED_ROWS ? ceil_div(length, COLUMN_PART) : 1;
    return rows_are != OTHER_ROWS && rows > INT32_MAX / 2 / parts;
}

/* For the why_not of kernels that add up in the order `wanted`: why they do not take a batch-invariant call whose rows
 * have the order rows_are, or NULL. */
static inline const char *why_not_order(SummationOrder wanted, SummationOrder rows_are, int64_t rows, int64_t length) {
    if (rows_are != wanted)
        return "batch-invariant calls with such rows are summed by another kernel";
    return are_too_many(rows_are, rows, length) ? "it counts rows, or parts of them, in 31 bits" : NULL;
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batch-invariant calls: which kernels take the rows. Every class has one way to add up a row, so the class
 * must not depend on how many rows there are or where they lie. It depends on the length of a row, and on the
 * distance between its elements.
 */
#ifndef RAFTER_CUDA_ROW_CLASSES_CUH
#define RAFTER_CUDA_ROW_CLASSES_CUH

#include "cuda/row_chunks.cuh"
#include "cuda/tiny_rows.cuh"

enum RowClass {
    TINY_ROWS,    /* tiny_rows.cuh: a thread takes a row */
    CHUNKED_ROWS, /* row_chunks.cuh: lanes of a warp do; the elements of a row are adjacent */
    COLUMN_ROWS,  /* row_threads.cuh: a thread takes a part of a row; elements lie far apart */
    OTHER_ROWS,   /* slot_sums.cuh, indexed_rows.cuh */
};

/* Whether elements are so far apart that adjacent threads should take adjacent rows. `step`: their distance. */
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

/* Elements of a row that a thread takes, if it is a column. */
constexpr int64_t COLUMN_PART = 256;

/* Kernels of all classes but OTHER_ROWS count rows, or parts of columns, in 31 bits. More of them must be refused: in
 * other kernels they would be added up in another way. */
static inline bool are_too_many(RowClass rows_are, int64_t rows, int64_t length) {
    const int64_t parts = rows_are == COLUMN_ROWS ? ceil_div(length, COLUMN_PART) : 1;
    return rows_are != OTHER_ROWS && rows > INT32_MAX / 2 / parts;
}

/* Why a kernel for one class does not take the rows of a batch-invariant call, or NULL. */
static inline const char *why_not_class(RowClass wanted, RowClass rows_are, int64_t rows, int64_t length) {
    if (rows_are != wanted)
        return "the call is batch invariant, and rows have another length or distance of elements";
    return are_too_many(rows_are, rows, length) ? "it counts rows, or parts of them, in 31 bits" : NULL;
}

#endif

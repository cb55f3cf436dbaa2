/* SPDX-License-Identifier: Apache-2.0 */
/* Where the rows of a tensor are: numbers of any dtype, rows of any strides, spans of adjacent elements. */
#ifndef RAFTER_CUDA_ROWS_CUH
#define RAFTER_CUDA_ROWS_CUH

#include "core/tensor.h"
#include "cuda/division.cuh"
#include "cuda/primitives.cuh"

/* Element i of an array of any of the three dtypes. */
DEVICE float load_number(const void *data, rafter_dtype dtype, int64_t i) {
    return dtype == RAFTER_F32    ? static_cast<const float *>(data)[i]
           : dtype == RAFTER_BF16 ? to_float(static_cast<const bf16 *>(data)[i])
                                  : to_float(static_cast<const fp16 *>(data)[i]);
}
/* The same in two steps, load and conversion, so that more loads can be issued in between. With a branch per dtype, as
 * in load_number, each branch would end with the conversion and wait for its load. */
DEVICE unsigned load_bits_now(const void *data, rafter_dtype dtype, int64_t i) {
    const bool wide = dtype == RAFTER_F32;
    return load_2_or_4_bytes_now(static_cast<const char *>(data) + (i << (wide ? 2 : 1)), wide);
}
DEVICE float number_of_bits(unsigned bits, rafter_dtype dtype) {
    return number_of<RAFTER_F32, RAFTER_BF16>(bits, static_cast<unsigned>(dtype));
}
DEVICE float load_number_now(const void *data, rafter_dtype dtype, int64_t i) {
    return number_of_bits(load_bits_now(data, dtype, i), dtype);
}
DEVICE void store_number(void *data, rafter_dtype dtype, int64_t i, float value) {
    if (dtype == RAFTER_F32)
        static_cast<float *>(data)[i] = value;
    else if (dtype == RAFTER_BF16)
        static_cast<bf16 *>(data)[i] = from_float<bf16>(value);
    else
        static_cast<fp16 *>(data)[i] = from_float<fp16>(value);
}

/* Where the rows of a tensor begin, as a kernel argument. Rows are numbered in row-major order of the leading
 * dimensions of a view. The members that most calls need come first. */
struct Rows {
    char *data;
    int64_t step;  /* stride of the last of these dimensions, in most calls the only one */
    int64_t inner; /* its size */
    int64_t last;  /* offset of the last row */
    rafter_dtype dtype;
    int dims;
    /* Entry d describes the step from the d-th dimension, counted from the last, to the next one outwards. `jump` is
     * the outer stride minus (inner stride * inner size). The other two divide by the inner size: see Reciprocal. */
    int64_t jump[RAFTER_VIEW_DIMS - 1];
    uint64_t multiplier[RAFTER_VIEW_DIMS - 1];
    unsigned char shift[RAFTER_VIEW_DIMS - 1];

    /* The offset of a row's first element, in elements. */
    DEVICE int64_t offset(int64_t row) const {
        int64_t at = row * step;
#pragma unroll 1
        for (int d = 0; d < dims - 1; d++) {
            row = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(row), multiplier[d]) >> shift[d]);
            at += row * jump[d];
        }
        return at;
    }
    template <typename T> DEVICE T *at(int64_t row) const {
        return reinterpret_cast<T *>(data) + offset(row);
    }

    /* For tensors that have one number per row. */
    DEVICE float get(int64_t row) const {
        return load_number(data, dtype, offset(row));
    }
    DEVICE void put(int64_t row, float value) const {
        store_number(data, dtype, offset(row), value);
    }
    /* For tensors that have one number per row: whether the number of row i is element i. */
    bool contiguous() const {
        return dims == 1 && (step == 1 || inner == 1);
    }
    /* Whether all rows begin at multiples of 16 bytes. */
    bool aligned() const {
        const int64_t bytes = rafter_dtype_bytes(dtype);
        bool all = reinterpret_cast<uintptr_t>(data) % 16 == 0 && step * bytes % 16 == 0;
        for (int d = 0; d < dims - 1; d++)
            all = all && jump[d] * bytes % 16 == 0;
        return all;
    }
    /* Whether every row, of `elements` adjacent elements, consists of whole, aligned packs of 16
     * bytes, and they are evenly spaced. */
    bool whole_packs(int64_t elements) const {
        return dims == 1 && aligned() && elements * rafter_dtype_bytes(dtype) % 16 == 0;
    }
};

/* The first `dims` dimensions of the view, merged where strides allow. */
static inline Rows rows_of(const rafter_view &view, int dims) {
    rafter_view rows = view, *only = &rows;
    Rows out = {};
    out.data = view.data;
    out.dtype = view.dtype;
    out.dims = rafter_collapse(&only, 1, 0, dims);
    const int last = out.dims - 1;
    out.inner = rows.shape[last];
    out.step = rows.stride[last];
    for (int d = 0; d <= last; d++)
        out.last += (rows.shape[d] - 1) * rows.stride[d];
    for (int d = last; d > 0; d--) {
        const Reciprocal by_size = reciprocal_of(max(rows.shape[d], int64_t(2))); /* below 2: there are no rows */
        out.jump[last - d] = rows.stride[d - 1] - rows.shape[d] * rows.stride[d];
        out.multiplier[last - d] = by_size.multiplier;
        out.shift[last - d] = static_cast<unsigned char>(by_size.shift);
    }
    return out;
}

/* A span of adjacent elements: its body, which consists of aligned packs, and its edges, less than one pack at either
 * end. */
template <typename T, typename Size = int64_t> struct AlignedSpan {
    T *body;
    Size packs;
    int head, edges; /* elements before the body; elements before and after it */

    DEVICE AlignedSpan() {
    }
    DEVICE AlignedSpan(T *first, Size n) {
        const int ragged = static_cast<int>(reinterpret_cast<uintptr_t>(first) % 16 / sizeof(T));
        head = ragged == 0 ? 0 : WIDE<T> - ragged;
        if (head > n)
            head = static_cast<int>(n);
        body = first + head;
        packs = (n - head) / WIDE<T>;
        edges = static_cast<int>(n - packs * WIDE<T>);
    }
    /* The offset of edge element e from the body. Elements before the body come first, with negative offsets. */
    DEVICE Size edge(int e) const {
        return e < head ? e - head : e - head + packs * WIDE<T>;
    }
};

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transposes: rows become columns of a buffer and back ("turned"), so that vectors can run across
 * short rows, one lane per row. V_LANES rows are transposed at a time. Their elements are numbered
 * row by row; each step of v_unzip moves the lowest bit of an element's number to the top, so that
 * after log2(n) steps those of n columns are numbered column by column.
 */
#ifndef RAFTER_SIMD_TRANSPOSE_H
#define RAFTER_SIMD_TRANSPOSE_H

#include "core/sizes.h"
#include "simd/simd.h"

/* Puts the even elements of `count` vectors first, then the odd ones. `count` is a compile-time constant. */
V_INLINE void v_unzip(vf *a, int count) {
    vf b[V_LANES];
    for (int i = 0; i < count / 2; i++) {
        b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], V_EVEN);
        b[i + count / 2] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], V_ODD);
    }
    for (int i = 0; i < count; i++)
        a[i] = b[i];
}

/* The inverse of v_unzip. */
V_INLINE void v_zip(vf *a, int count) {
    vf b[V_LANES];
    for (int i = 0; i < count / 2; i++) {
        b[2 * i] = __builtin_shufflevector(a[i], a[i + count / 2], V_ZIP_LOW);
        b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + count / 2], V_ZIP_HIGH);
    }
    for (int i = 0; i < count; i++)
        a[i] = b[i];
}

#if !V_NEON /* neon.h has its own */

/* Lane i of the result is lane index[i] of a. */
V_INLINE vf v_permute(vf a, vi index) {
#if V_LANES == 16
    return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)a);
#elif V_LANES == 8
    return (vf)_mm256_permutevar8x32_ps((__m256)a, (__m256i)index);
#else
    return (vf){a[index[0]], a[index[1]], a[index[2]], a[index[3]]};
#endif
}

#endif

/* ---- packed rows of up to V_LANES / 2 elements ----------------------------------------------- */

/* A vector holds V_LANES / width rows, where width is the least power of two that is at least n. */

/* Transposes V_LANES rows at x, of which `rows` exist, into columns. `spread`: lane indices that move the rows of a
 * vector from n elements apart to `width` apart. `whole`: V_LANES more rows follow, so that whole vectors can be
 * read. */
V_INLINE void v_packed_to_columns(int dtype, int width, const char *x, int64_t rows, int64_t n, vi spread, bool whole,
                                  float *to, int64_t to_pitch) {
    const int per = V_LANES / width;
    vf a[V_LANES];
    for (int i = 0; i < width; i++) {
        const char *const p = x + i * per * n * v_bytes(dtype);
        const int64_t count = min64(max64(rows - i * per, 0), per) * n;
        a[i] = whole ? v_load(dtype, p) : v_load_part(dtype, p, count, 0.0f);
        if (n != width)
            a[i] = v_permute(a[i], spread);
    }
    for (int w = 1; w < width; w *= 2)
        v_unzip(a, width);
    for (int i = 0; i < width; i++)
        if (i < n)
            v_store(RAFTER_F32, to + i * to_pitch, a[i]);
}

V_INLINE void v_packed_rows_to_columns(int dtype, int width, const char *x, int64_t rows, int64_t n, float *to,
                                       int64_t to_pitch) {
    const int64_t step = V_LANES * n * v_bytes(dtype);
    vi spread = {0}; /* GCC for aarch64 does not see that the loop sets every lane */
    for (int i = 0; i < V_LANES; i++)
        spread[i] = (int32_t)(i / width * n + i % width) % V_LANES;
    for (; rows >= 2 * V_LANES; rows -= V_LANES, x += step, to += V_LANES)
        v_packed_to_columns(dtype, width, x, V_LANES, n, spread, true, to, to_pitch);
    for (; rows > 0; rows -= V_LANES, x += step, to += V_LANES)
        v_packed_to_columns(dtype, width, x, rows, n, spread, false, to, to_pitch);
}

/* The inverse. `pack`: the inverse of `spread`. `whole`: V_LANES more rows are written later. */
V_INLINE void v_columns_to_packed(int dtype, int width, const float *from, int64_t from_pitch, int64_t rows, int64_t n,
                                  vi pack, bool whole, char *y) {
    const int per = V_LANES / width;
    vf a[V_LANES];
    for (int i = 0; i < width; i++)
        a[i] = v_load(RAFTER_F32, from + min64(i, n - 1) * from_pitch);
    for (int w = 1; w < width; w *= 2)
        v_zip(a, width);
    for (int i = 0; i < width; i++) {
        char *const to = y + i * per * n * v_bytes(dtype);
        const int64_t count = min64(max64(rows - i * per, 0), per) * n;
        if (n != width)
            a[i] = v_permute(a[i], pack);
        if (whole)
            v_store(dtype, to, a[i]); /* elements past `count` are overwritten by the next vector, or the next rows */
        else
            v_store_part(dtype, to, a[i], count);
    }
}

V_INLINE void v_columns_to_packed_rows(int dtype, int width, const float *from, int64_t from_pitch, int64_t rows,
                                       int64_t n, char *y) {
    const int64_t step = V_LANES * n * v_bytes(dtype);
    vi pack = {0};
    for (int i = 0, row = 0, column = 0; i < V_LANES; i++) {
        pack[i] = (row * width + column) % V_LANES;
        column = column + 1 < n ? column + 1 : (row++, 0);
    }
    for (; rows >= 2 * V_LANES; rows -= V_LANES, y += step, from += V_LANES)
        v_columns_to_packed(dtype, width, from, from_pitch, V_LANES, n, pack, true, y);
    for (; rows > 0; rows -= V_LANES, y += step, from += V_LANES)
        v_columns_to_packed(dtype, width, from, from_pitch, rows, n, pack, false, y);
}

/* Runs `statement` with `width` bound to a constant. */
#define V_FOR_WIDTH(n, width, statement)                                                                               \
    do {                                                                                                               \
        if ((n) <= 2) {                                                                                                \
            enum { width = 2 };                                                                                        \
            statement;                                                                                                 \
        } else if ((n) <= 4 || V_LANES <= 8) {                                                                         \
            enum { width = V_LANES < 8 ? 2 : 4 };                                                                      \
            statement;                                                                                                 \
        } else {                                                                                                       \
            enum { width = V_LANES / 2 };                                                                              \
            statement;                                                                                                 \
        }                                                                                                              \
    } while (0)

/* ---- other rows ------------------------------------------------------------------------------ */

/* Transposes a square: V_LANES rows, of which `rows` exist, and up to V_LANES of their n columns. `whole`: all of it
 * can be read. */
V_INLINE void v_square_to_columns(int dtype, const char *x, int64_t pitch, int64_t rows, int64_t n, bool whole,
                                  float *to, int64_t to_pitch) {
    vf a[V_LANES];
    for (int i = 0; i < V_LANES; i++) {
        const char *const p = x + i * pitch * v_bytes(dtype);
        if (whole)
            a[i] = v_load(dtype, p);
        else
            a[i] = i < rows ? v_load_part(dtype, p, min64(n, V_LANES), 0.0f) : v_set(0.0f);
    }
    for (int w = 1; w < V_LANES; w *= 2)
        v_unzip(a, V_LANES);
    for (int i = 0; i < V_LANES; i++)
        if (i < n)
            v_store(RAFTER_F32, to + i * to_pitch, a[i]);
}

V_INLINE void v_columns_to_square(int dtype, const float *from, int64_t from_pitch, int64_t rows, int64_t n, char *y,
                                  int64_t pitch) {
    vf a[V_LANES];
    for (int i = 0; i < V_LANES; i++)
        a[i] = v_load(RAFTER_F32, from + min64(i, n - 1) * from_pitch);
    for (int w = 1; w < V_LANES; w *= 2)
        v_zip(a, V_LANES);
    for (int i = 0; i < V_LANES; i++) {
        char *const to = y + i * pitch * v_bytes(dtype);
        if (rows >= V_LANES && n >= V_LANES)
            v_store(dtype, to, a[i]);
        else if (i < rows)
            v_store_part(dtype, to, a[i], min64(n, V_LANES));
    }
}

/* ---- any rows -------------------------------------------------------------------------------- */

/* v_rows_to_columns: to[c * to_pitch + r] = x[r * pitch + c] for `rows` rows of n elements, as fp32.
 * Writes whole vectors, so to_pitch must be at least `rows` rounded up to V_LANES. */
V_INLINE void v_rows_to_columns_as(int dtype, const char *x, int64_t pitch, int64_t rows, int64_t n, float *to,
                                   int64_t to_pitch) {
    if (pitch == n && n <= V_LANES / 2) {
        V_FOR_WIDTH(n, width, v_packed_rows_to_columns(dtype, width, x, rows, n, to, to_pitch));
        return;
    }
    const int64_t bytes = v_bytes(dtype);
    for (int64_t r = 0; r < rows; r += V_LANES)
        for (int64_t c = 0; c < n; c += V_LANES) {
            const char *const from = x + (r * pitch + c) * bytes;
            float *const at = to + c * to_pitch + r;
            /* Reading past the end of a row is harmless if V_LANES more rows follow. */
            if (pitch > 0 && rows - r >= 2 * V_LANES)
                v_square_to_columns(dtype, from, pitch, V_LANES, n - c, true, at, to_pitch);
            else
                v_square_to_columns(dtype, from, pitch, rows - r, n - c, false, at, to_pitch);
        }
}

/* v_columns_to_rows, the inverse: y[r * pitch + c] = from[c * from_pitch + r]. Reads whole vectors. */
V_INLINE void v_columns_to_rows_as(int dtype, const float *from, int64_t from_pitch, int64_t rows, int64_t n, char *y,
                                   int64_t pitch) {
    if (pitch == n && n <= V_LANES / 2) {
        V_FOR_WIDTH(n, width, v_columns_to_packed_rows(dtype, width, from, from_pitch, rows, n, y));
        return;
    }
    for (int64_t r = 0; r < rows; r += V_LANES)
        for (int64_t c = 0; c < n; c += V_LANES)
            v_columns_to_square(dtype, from + c * from_pitch + r, from_pitch, rows - r, n - c,
                                y + (r * pitch + c) * v_bytes(dtype), pitch);
}

V_OUTLINE void v_rows_to_columns(int type, const char *x, int64_t pitch, int64_t rows, int64_t n, float *to,
                                 int64_t to_pitch);
V_OUTLINE void v_columns_to_rows(int type, const float *from, int64_t from_pitch, int64_t rows, int64_t n, char *y,
                                 int64_t pitch);
V_FUNCTION(v_rows_to_columns,
           (int type, const char *x, int64_t pitch, int64_t rows, int64_t n, float *to, int64_t to_pitch),
           (type, x, pitch, rows, n, to, to_pitch), type,
           ((void)type, v_rows_to_columns_as(dtype, x, pitch, rows, n, to, to_pitch)))
V_FUNCTION(v_columns_to_rows,
           (int type, const float *from, int64_t from_pitch, int64_t rows, int64_t n, char *y, int64_t pitch),
           (type, from, from_pitch, rows, n, y, pitch), type,
           ((void)type, v_columns_to_rows_as(dtype, from, from_pitch, rows, n, y, pitch)))

/* ---- without conversion ---------------------------------------------------------------------- */

/* Loads the bits of `count` elements, one lane each; the other lanes are undefined. */
V_INLINE vf v_load_bits(int dtype, const void *p, int64_t count) {
    if (dtype == RAFTER_F32)
        return count == V_LANES ? v_load(RAFTER_F32, p) : v_load_part(RAFTER_F32, p, count, 0.0f);
    vh h = {0};
    if (count == V_LANES)
        memcpy(&h, p, sizeof h);
    else
#if V_LANES == 16
        h = (vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), p);
#else
        memcpy(&h, p, (size_t)count * sizeof(uint16_t));
#endif
    return (vf) __builtin_convertvector(h, vu);
}

V_INLINE void v_store_bits(int dtype, void *p, vf a, int64_t count) {
    if (dtype == RAFTER_F32) {
        if (count == V_LANES)
            v_store(RAFTER_F32, p, a);
        else
            v_store_part(RAFTER_F32, p, a, count);
        return;
    }
    const vh h = __builtin_convertvector((vu)a, vh);
    if (count == V_LANES)
        memcpy(p, &h, sizeof h);
    else
#if V_LANES == 16
        _mm256_mask_storeu_epi16(p, (__mmask16)((1u << count) - 1), (__m256i)h);
#else
        memcpy(p, &h, (size_t)count * sizeof(uint16_t));
#endif
}

/* Transposes one square for v_turn. `whole`: it has V_LANES rows and columns; else `rows` and n. Pitches are in
 * bytes. */
V_INLINE void v_turn_square(int dtype, bool whole, const char *x, int64_t pitch, int64_t rows, int64_t n, char *to,
                            int64_t to_pitch) {
    vf a[V_LANES];
    for (int i = 0; i < V_LANES; i++)
        a[i] = whole || i < rows ? v_load_bits(dtype, x + i * pitch, whole ? V_LANES : n) : v_set(0.0f);
    for (int w = 1; w < V_LANES; w *= 2)
        v_unzip(a, V_LANES);
    for (int i = 0; i < V_LANES; i++)
        if (whole || i < n)
            v_store_bits(dtype, to + i * to_pitch, a[i], whole ? V_LANES : rows);
}

/* Transposes V_LANES rows of 2 V_LANES 16-bit elements. Two neighbours are moved as one 32-bit lane and split at the
 * end: half the steps of two squares. */
V_INLINE void v_turn_pairs(const char *x, int64_t pitch, char *to, int64_t to_pitch) {
    vf a[V_LANES];
    for (int i = 0; i < V_LANES; i++)
        a[i] = v_load(RAFTER_F32, x + i * pitch);
    for (int w = 1; w < V_LANES; w *= 2)
        v_unzip(a, V_LANES);
    for (int i = 0; i < V_LANES; i++) {
        v_store_bits(RAFTER_BF16, to + 2 * i * to_pitch, a[i], V_LANES);
        v_store_bits(RAFTER_BF16, to + (2 * i + 1) * to_pitch, (vf)((vu)a[i] >> 16), V_LANES);
    }
}

V_INLINE void v_turn_as(int dtype, const char *x, int64_t pitch, int64_t rows, int64_t n, char *to, int64_t to_pitch) {
    const int64_t bytes = v_bytes(dtype), from_step = pitch * bytes, to_step = to_pitch * bytes;
    for (int64_t r = 0; r < rows; r += V_LANES)
        for (int64_t c = 0, wide; c < n; c += wide) {
            const char *const from = x + r * from_step + c * bytes;
            char *const at = to + c * to_step + r * bytes;
            const int64_t there = min64(rows - r, V_LANES);
            wide = min64(n - c, V_LANES);
            if (dtype != RAFTER_F32 && there == V_LANES && n - c >= 2 * V_LANES) {
                wide = 2 * V_LANES;
                v_turn_pairs(from, from_step, at, to_step);
            } else if (there == V_LANES && wide == V_LANES)
                v_turn_square(dtype, true, from, from_step, V_LANES, V_LANES, at, to_step);
            else
                v_turn_square(dtype, false, from, from_step, there, wide, at, to_step);
        }
}

/* v_turn for packed rows of a few 16-bit elements, an even number. Two neighbours are moved as one 32-bit element, and
 * a vector holds several rows. */
V_INLINE void v_turn_packed(const char *x, int64_t rows, int64_t n, char *to, int64_t to_pitch) {
    enum { SOME = 256 }; /* rows at a time */
    float pairs[V_LANES / 2 * SOME];
    for (int64_t r = 0; r < rows; r += SOME) {
        const int64_t some = min64(rows - r, SOME);
        v_rows_to_columns(RAFTER_F32, x + r * n * 2, n / 2, some, n / 2, pairs, SOME);
        for (int64_t c = 0; c < n; c += 2)
            for (int64_t i = 0; i < some; i += V_LANES) {
                const vf a = v_load(RAFTER_F32, pairs + c / 2 * SOME + i);
                char *const at = to + (c * to_pitch + r + i) * 2;
                v_store_bits(RAFTER_BF16, at, a, min64(some - i, V_LANES));
                v_store_bits(RAFTER_BF16, at + to_pitch * 2, (vf)((vu)a >> 16), min64(some - i, V_LANES));
            }
    }
}

/* A transpose: to[c * to_pitch + r] = x[r * pitch + c] for `rows` rows of n elements of 2 or 4 bytes. */
V_OUTLINE void v_turn(int64_t bytes, const char *x, int64_t pitch, int64_t rows, int64_t n, char *to,
                      int64_t to_pitch) {
    if (bytes == 4)
        v_turn_as(RAFTER_F32, x, pitch, rows, n, to, to_pitch);
    else if (pitch == n && n % 2 == 0 && n <= V_LANES)
        v_turn_packed(x, rows, n, to, to_pitch);
    else
        v_turn_as(RAFTER_BF16, x, pitch, rows, n, to, to_pitch);
}

#endif

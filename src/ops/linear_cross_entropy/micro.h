/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Micro-kernels: out[rows, columns] (+)= left[rows, k] right[k, columns] on packed panels (see
 * kernels.h), with the whole micro-tile in registers. Everything that depends on the ISA level is
 * here and in micro_neon.h. All levels have fp32, written in the vector vocabulary or for NEON.
 * Levels that multiply bf16 pairs in hardware (LCE_PAIRS) have a second one: with AVX-512 dot
 * products, with AMX tiles, or with NEON's matrix products.
 */
#ifndef RAFTER_LCE_MICRO_H
#define RAFTER_LCE_MICRO_H

#include "ops/linear_cross_entropy/kernels.h"
#include "simd/simd.h"

/* ---- fp32 ------------------------------------------------------------------------------------ */

#if V_NEON

#include "ops/linear_cross_entropy/micro_neon.h"

#else

/* The sums fill all but a few of the vector registers. */
enum { F32_ROWS = V_LANES == 16 ? 12 : 6, F32_VECTORS = 2, F32_COLUMNS = F32_VECTORS * V_LANES, F32_STEP = 1 };

static void micro_f32(int64_t k, const char *left, const char *right, float *out, int64_t stride, bool accumulate) {
    const float *a = (const float *)left, *b = (const float *)right;
    enum { UNIT = LCE_UNIT_BYTES / 4 };
    vf sum[F32_ROWS][F32_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < F32_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < F32_VECTORS; j++)
            sum[i][j] = v_set(0.0f);
    for (int64_t unit = 0; unit < k; unit += UNIT, a += F32_ROWS * UNIT)
        for (int64_t p = 0; p < min64(UNIT, k - unit); p++, b += F32_COLUMNS) {
            vf row[F32_VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < F32_VECTORS; j++)
                row[j] = v_load(RAFTER_F32, b + j * V_LANES);
#pragma GCC unroll 16
            for (int i = 0; i < F32_ROWS; i++) {
                const vf factor = v_set(a[i * UNIT + p]);
#pragma GCC unroll 4
                for (int j = 0; j < F32_VECTORS; j++)
                    sum[i][j] = v_fma(factor, row[j], sum[i][j]);
            }
        }
#pragma GCC unroll 16
    for (int i = 0; i < F32_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < F32_VECTORS; j++) {
            float *p = out + i * stride + j * V_LANES;
            v_store(RAFTER_F32, p, accumulate ? v_load(RAFTER_F32, p) + sum[i][j] : sum[i][j]);
        }
}

#endif

#define F32_FORMAT                                                                                                     \
    { 4, F32_ROWS, F32_COLUMNS, F32_STEP }

/* ---- bf16 pairs ------------------------------------------------------------------------------ */

#if defined(__AMX_BF16__) && V_LANES == 16

/* 2 x 2 tiles of 16 x 16 sums. A step multiplies two tiles of 16 rows x 32 k by two of 32 k x 16
 * columns. K blocks are halved, so that a left panel (16 KiB) stays in L1 while the right panels
 * stream through. */
#define LCE_PAIRS 1
enum { PAIR_ROWS = 32, PAIR_COLUMNS = 32, PAIR_STEP = 32, PAIR_DEPTH = 256 };

static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config __attribute__((aligned(64))) = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* Tiles are thread state. A task configures them, and releases them so that a context switch need
 * not save them. */
V_INLINE void begin_pairs(void) {
    _tile_loadconfig(&tile_config);
}

V_INLINE void end_pairs(void) {
    _tile_release();
}

static void micro_pairs(int64_t k, const char *left, const char *right, float *out, int64_t stride, bool accumulate) {
    const int64_t out_bytes = stride * (int64_t)sizeof(float);
    float *const below = out + 16 * stride;
    /* The tile intrinsics do not tell the compiler which memory they read. */
    __asm__ volatile("" ::: "memory");
    if (accumulate) {
        _tile_loadd(0, out, out_bytes);
        _tile_loadd(1, out + 16, out_bytes);
        _tile_loadd(2, below, out_bytes);
        _tile_loadd(3, below + 16, out_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t p = 0; p < k; p += PAIR_STEP) {
        const char *a = left + p * PAIR_ROWS * 2, *b = right + p * PAIR_COLUMNS * 2;
        _tile_loadd(4, a, LCE_UNIT_BYTES);
        _tile_loadd(6, b, PAIR_COLUMNS * 4);
        _tile_loadd(7, b + 64, PAIR_COLUMNS * 4);
        _tile_loadd(5, a + 16 * LCE_UNIT_BYTES, LCE_UNIT_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    _tile_stored(2, below, out_bytes);
    _tile_stored(3, below + 16, out_bytes);
}

#elif defined(__AVX512BF16__) && V_LANES == 16

#define LCE_PAIRS 1
enum { PAIR_ROWS = 12, PAIR_VECTORS = 2, PAIR_COLUMNS = 32, PAIR_STEP = 32, PAIR_DEPTH = LCE_DEPTH_BYTES / 2 };

V_INLINE void begin_pairs(void) {
}

V_INLINE void end_pairs(void) {
}

static void micro_pairs(int64_t k, const char *left, const char *right, float *out, int64_t stride, bool accumulate) {
    __m512 sum[PAIR_ROWS][PAIR_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < PAIR_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < PAIR_VECTORS; j++)
            sum[i][j] = _mm512_setzero_ps();
    for (int64_t unit = 0; unit < k; unit += PAIR_STEP, left += PAIR_ROWS * LCE_UNIT_BYTES)
        for (int64_t p = 0; p < LCE_UNIT_BYTES; p += 4, right += PAIR_COLUMNS * 4) {
            __m512bh row[PAIR_VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < PAIR_VECTORS; j++)
                row[j] = (__m512bh)_mm512_loadu_si512(right + j * 64);
#pragma GCC unroll 16
            for (int i = 0; i < PAIR_ROWS; i++) {
                int32_t pair;
                memcpy(&pair, left + i * LCE_UNIT_BYTES + p, sizeof pair);
                const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                for (int j = 0; j < PAIR_VECTORS; j++)
                    sum[i][j] = _mm512_dpbf16_ps(sum[i][j], factor, row[j]);
            }
        }
#pragma GCC unroll 16
    for (int i = 0; i < PAIR_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < PAIR_VECTORS; j++) {
            float *p = out + i * stride + j * 16;
            _mm512_storeu_ps(p, accumulate ? _mm512_add_ps(_mm512_loadu_ps(p), sum[i][j]) : sum[i][j]);
        }
}

#elif V_NEON && V_NEON_BF16

#define LCE_PAIRS 1

V_INLINE void begin_pairs(void) {
}

V_INLINE void end_pairs(void) {
}

#else

#define LCE_PAIRS 0
enum { PAIR_DEPTH = LCE_DEPTH_BYTES / 4 };
#define PAIR_FORMAT F32_FORMAT
#define micro_pairs micro_f32

V_INLINE void begin_pairs(void) {
}

V_INLINE void end_pairs(void) {
}

#endif

#if LCE_PAIRS
#define PAIR_FORMAT                                                                                                    \
    { 2, PAIR_ROWS, PAIR_COLUMNS, PAIR_STEP }
#endif

#if !(V_NEON && LCE_PAIRS)
/* k rows of a right panel as the micro-kernel wants them: as they are. */
V_INLINE void order_right(char *panel, int64_t k) {
    (void)panel, (void)k;
}
#endif

/* V_LANES floats, rounded to bf16. */
V_INLINE vh round_halves(vf a) {
#if LCE_PAIRS && !V_NEON
    return (vh)_mm512_cvtneps_pbh((__m512)a);
#else
    return v_narrow(RAFTER_BF16, a);
#endif
}

/* Up to V_LANES bf16 elements, then zeros. NULL gives zeros. */
V_INLINE vh load_halves(const char *p, int64_t n) {
    vh h = {0};
    if (p && n == V_LANES)
        memcpy(&h, p, sizeof h);
    else if (p)
        memcpy(&h, p, (size_t)n * 2);
    return h;
}

/* bf16 pairs: the even element in the low half, the odd one in the high half. */
V_INLINE vf join_pairs(vh even, vh odd) {
    return (vf)(__builtin_convertvector(even, vu) | __builtin_convertvector(odd, vu) << 16);
}

/* Up to V_LANES pairs, n elements, then zeros; and sum + the products of the elements of two vectors of pairs. */
#if defined(__AVX512BF16__) && V_LANES == 16

#define LCE_FEW_PAIRS 1
enum { PAIRED_ROWS = PAIR_ROWS > 16 ? 8 : PAIR_ROWS }; /* whose sums of one vector stay in registers */

V_INLINE vf load_pairs(const char *p, int64_t n) {
    if (n >= 2 * V_LANES)
        return v_load(RAFTER_F32, p);
    return (vf)_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
}

/* The first n elements of two rows in pairs. NULL gives zeros. */
V_INLINE vf pair_rows(const char *even, const char *odd, int64_t n) {
    const __mmask16 mask = (__mmask16)(n >= V_LANES ? 0xffff : (1 << n) - 1);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(even ? mask : 0, even));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(odd ? mask : 0, odd));
    return (vf)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

V_INLINE vf add_pairs(vf sum, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

#else

#define LCE_FEW_PAIRS 0
enum { PAIRED_ROWS = 2 };

V_INLINE vf load_pairs(const char *p, int64_t n) {
    (void)p, (void)n;
    return v_set(0.0f);
}

V_INLINE vf pair_rows(const char *even, const char *odd, int64_t n) {
    (void)even, (void)odd, (void)n;
    return v_set(0.0f);
}

V_INLINE vf add_pairs(vf sum, vf a, vf b) {
    (void)a, (void)b;
    return sum;
}

#endif

/* ---- transposition --------------------------------------------------------------------------- */

/* Transposes V_LANES vectors: each EXCHANGE_ swaps one bit of the row index with the same bit of
 * the lane index. */
#define LOW_(lane, bit) ((lane) & (bit) ? V_LANES + (lane) - (bit) : (lane))
#define HIGH_(lane, bit) ((lane) & (bit) ? V_LANES + (lane) : (lane) + (bit))
#define LANES4_(f, l, bit) f(l, bit), f(l + 1, bit), f(l + 2, bit), f(l + 3, bit)
#if V_LANES == 16
#define LANES_(f, bit) LANES4_(f, 0, bit), LANES4_(f, 4, bit), LANES4_(f, 8, bit), LANES4_(f, 12, bit)
#elif V_LANES == 8
#define LANES_(f, bit) LANES4_(f, 0, bit), LANES4_(f, 4, bit)
#else
#define LANES_(f, bit) LANES4_(f, 0, bit)
#endif
#define EXCHANGE_(row, bit)                                                                                            \
    _Pragma("GCC unroll 16") for (int i = 0; i < V_LANES; i++) if ((i & (bit)) == 0) {                                 \
        const vf a = row[i], b = row[i + (bit)];                                                                       \
        row[i] = __builtin_shufflevector(a, b, LANES_(LOW_, bit));                                                     \
        row[i + (bit)] = __builtin_shufflevector(a, b, LANES_(HIGH_, bit));                                            \
    }

V_INLINE void transpose(vf row[V_LANES]) {
    EXCHANGE_(row, 1)
    EXCHANGE_(row, 2)
#if V_LANES >= 8
    EXCHANGE_(row, 4)
#endif
#if V_LANES >= 16
    EXCHANGE_(row, 8)
#endif
}

#endif

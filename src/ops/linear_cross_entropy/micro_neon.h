/* SPDX-License-Identifier: Apache-2.0 */
/* The micro-kernels of micro.h with NEON. Its multiply-add takes one factor from a lane of a
 * register, so a left row is loaded four k at a time and never broadcast. */
#ifndef RAFTER_LCE_MICRO_NEON_H
#define RAFTER_LCE_MICRO_NEON_H

#include "ops/linear_cross_entropy/kernels.h"
#include "simd/simd.h"

/* ---- fp32 ------------------------------------------------------------------------------------ */

/* 16 sums hide the latency of four multiply-adds a cycle. A step is one register of each left
 * row. */
enum { F32_ROWS = 8, F32_VECTORS = 2, F32_COLUMNS = F32_VECTORS * V_LANES, F32_STEP = V_LANES };

static void micro_f32(int64_t k, const char *left, const char *right, float *out, int64_t stride, bool accumulate) {
    const float *a = (const float *)left, *b = (const float *)right;
    enum { UNIT = LCE_UNIT_BYTES / 4 };
    float32x4_t sum[F32_ROWS][F32_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < F32_ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < F32_VECTORS; j++)
            sum[i][j] = vdupq_n_f32(0.0f);
    for (int64_t unit = 0; unit < k; unit += UNIT, a += F32_ROWS * UNIT)
        for (int64_t p = 0; p < min64(UNIT, k - unit); p += F32_STEP, b += F32_STEP * F32_COLUMNS) {
            float32x4_t factor[F32_ROWS];
#pragma GCC unroll 8
            for (int i = 0; i < F32_ROWS; i++)
                factor[i] = vld1q_f32(a + i * UNIT + p);
#define STEP_(q)                                                                                                       \
    do {                                                                                                               \
        const float32x4_t first = vld1q_f32(b + (q)*F32_COLUMNS), second = vld1q_f32(b + (q)*F32_COLUMNS + V_LANES);   \
        _Pragma("GCC unroll 8") for (int i = 0; i < F32_ROWS; i++) {                                                   \
            sum[i][0] = vfmaq_laneq_f32(sum[i][0], first, factor[i], q);                                               \
            sum[i][1] = vfmaq_laneq_f32(sum[i][1], second, factor[i], q);                                              \
        }                                                                                                              \
    } while (0)
            STEP_(0);
            STEP_(1);
            STEP_(2);
            STEP_(3);
#undef STEP_
        }
#pragma GCC unroll 8
    for (int i = 0; i < F32_ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < F32_VECTORS; j++) {
            float *p = out + i * stride + j * V_LANES;
            vst1q_f32(p, accumulate ? vaddq_f32(vld1q_f32(p), sum[i][j]) : sum[i][j]);
        }
}

/* ---- bf16 ------------------------------------------------------------------------------------ */

#if V_NEON_BF16

/* BFMMLA adds the product of 2 rows x 4 k and 4 k x 2 columns to 2 x 2 sums: twice the work of a
 * dot product instruction. Right panels are stored as its operands; those of the left are zipped
 * from two rows, at a cost of one instruction in nine. */
enum { PAIR_ROWS = 6, PAIR_COLUMNS = 16, PAIR_STEP = 8, PAIR_DEPTH = LCE_DEPTH_BYTES / 2 };
enum { PAIR_HEIGHT = PAIR_ROWS / 2, PAIR_WIDTH = PAIR_COLUMNS / 2 }; /* of a micro-tile, in 2 x 2 sums */

static void micro_pairs(int64_t k, const char *left, const char *right, float *out, int64_t stride, bool accumulate) {
    enum { UNIT = LCE_UNIT_BYTES / 2 };
    const bfloat16_t *b = (const bfloat16_t *)right;
    float32x4_t sum[PAIR_HEIGHT][PAIR_WIDTH];
#pragma GCC unroll 8
    for (int i = 0; i < PAIR_HEIGHT; i++)
#pragma GCC unroll 8
        for (int j = 0; j < PAIR_WIDTH; j++)
            sum[i][j] = vdupq_n_f32(0.0f);
    for (int64_t unit = 0; unit < k; unit += UNIT, left += PAIR_ROWS * LCE_UNIT_BYTES)
        for (int64_t p = 0; p < min64(UNIT, k - unit); p += PAIR_STEP, b += PAIR_STEP * PAIR_COLUMNS) {
            bfloat16x8_t a[2][PAIR_HEIGHT]; /* of the first and the second 4 k */
#pragma GCC unroll 8
            for (int i = 0; i < PAIR_HEIGHT; i++) {
                const char *const row = left + 2 * i * LCE_UNIT_BYTES + p * 2;
                const uint64x2_t even = vld1q_u64((const uint64_t *)row);
                const uint64x2_t odd = vld1q_u64((const uint64_t *)(row + LCE_UNIT_BYTES));
                a[0][i] = (bfloat16x8_t)vzip1q_u64(even, odd);
                a[1][i] = (bfloat16x8_t)vzip2q_u64(even, odd);
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
#pragma GCC unroll 8
                for (int j = 0; j < PAIR_WIDTH; j++) {
                    __asm__ volatile("" ::: "memory"); /* or GCC loads all columns first, and spills sums */
                    const bfloat16x8_t columns = vld1q_bf16(b + (half * PAIR_WIDTH + j) * 8);
#pragma GCC unroll 8
                    for (int i = 0; i < PAIR_HEIGHT; i++)
                        sum[i][j] = vbfmmlaq_f32(sum[i][j], a[half][i], columns);
                }
        }
#pragma GCC unroll 8
    for (int i = 0; i < PAIR_HEIGHT; i++)
#pragma GCC unroll 8
        for (int j = 0; j < PAIR_WIDTH; j += 2) {
            float *const p = out + 2 * i * stride + 2 * j, *const below = p + stride;
            const float64x2_t low = (float64x2_t)sum[i][j], high = (float64x2_t)sum[i][j + 1];
            const float32x4_t first = (float32x4_t)vzip1q_f64(low, high), second = (float32x4_t)vzip2q_f64(low, high);
            vst1q_f32(p, accumulate ? vaddq_f32(vld1q_f32(p), first) : first);
            vst1q_f32(below, accumulate ? vaddq_f32(vld1q_f32(below), second) : second);
        }
}

/* Brings k rows (a multiple of 4) of a right panel from pairs, [k / 2][columns][2], into the order of
 * BFMMLA's operands, [k / 4][columns][4], in place. */
static void order_right(char *panel, int64_t k) {
    for (int64_t i = 0; i < k; i += 4, panel += 4 * PAIR_COLUMNS * 2) {
        uint32_t *const at = (uint32_t *)panel;
        uint32x4_t first[PAIR_COLUMNS / 4], second[PAIR_COLUMNS / 4];
        for (int c = 0; c < PAIR_COLUMNS / 4; c++) {
            first[c] = vld1q_u32(at + 4 * c);
            second[c] = vld1q_u32(at + PAIR_COLUMNS + 4 * c);
        }
        for (int c = 0; c < PAIR_COLUMNS / 4; c++) {
            vst1q_u32(at + 8 * c, vzip1q_u32(first[c], second[c]));
            vst1q_u32(at + 8 * c + 4, vzip2q_u32(first[c], second[c]));
        }
    }
}

#endif

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * act on the CPU. An elementwise kind is one function of a vector, applied by v_map. Softmax has two
 * forms, depending on the memory layout of the lines that it normalises. Along rows, the elements of
 * a line are contiguous, or are gathered. Along columns, the lines are adjacent and their elements
 * one row apart; vectors run across the lines, so nothing is transposed.
 */
#include "core/variants.h"
#include "ops/act/cpu_elementwise.h"
#include "ops/act/cpu_softmax_lanes.h"

/* ---- merging parts of lines ------------------------------------------------------------------ */

static void merge_forward(float *statistics, int64_t lines, int64_t parts) {
    for (int64_t i = 0; i < lines; i++) {
        struct v_stats s = {-INFINITY, 0.0f};
        for (int64_t part = 0; part < parts; part++) {
            const float *const p = statistics + part * ACT_STATISTICS * lines;
            s = v_stats_merge(s, (struct v_stats){p[i], p[lines + i]});
        }
        statistics[i] = s.max;
        statistics[lines + i] = s.sum;
    }
}

static void merge_backward(float *sum, int64_t lines, int64_t parts) {
    for (int64_t part = 1; part < parts; part++)
        for (int64_t i = 0; i < lines; i++)
            sum[i] += sum[part * ACT_STATISTICS * lines + i];
}

/* ---- the table ------------------------------------------------------------------------------- */

#define SOFTMAX(form_direction)                                                                                        \
    V_FUNCTION(form_direction##_statistics_any, (const struct act_block *b, float *statistics), (b, statistics),       \
               b->dtype, form_direction##_statistics(dtype, b, statistics))                                            \
    V_FUNCTION(form_direction##_apply_any, (const struct act_block *b, const float *statistics), (b, statistics),      \
               b->dtype, form_direction##_apply(dtype, b, statistics))

SOFTMAX(rows_forward)
SOFTMAX(rows_backward)
SOFTMAX(columns_forward)
SOFTMAX(columns_backward)

#define FEW_COLUMNS(direction, is_forward)                                                                             \
    static void few_columns_##direction##_statistics(const struct act_block *b, float *statistics) {                   \
        V_FOR_DTYPE(b->dtype, dtype,                                                                                   \
                    few_columns_statistics(dtype, is_forward, b, statistics, columns_##direction##_statistics_any))    \
    }                                                                                                                  \
    static void few_columns_##direction##_apply(const struct act_block *b, const float *statistics) {                  \
        V_FOR_DTYPE(b->dtype, dtype,                                                                                   \
                    few_columns_apply(dtype, is_forward, b, statistics, columns_##direction##_apply_any))              \
    }

FEW_COLUMNS(forward, true)
FEW_COLUMNS(backward, false)

extern const struct act_kernels RAFTER_KERNELS(act);
const struct act_kernels RAFTER_KERNELS(act) = {
    .map = {map_forward, map_backward},
    .whole_rows = {whole_rows_forward, whole_rows_backward},
    .few_rows = {few_rows_forward, few_rows_backward},
    .statistics = {{rows_forward_statistics_any, rows_backward_statistics_any},
                   {few_columns_forward_statistics, few_columns_backward_statistics}},
    .apply = {{rows_forward_apply_any, rows_backward_apply_any},
              {few_columns_forward_apply, few_columns_backward_apply}},
    .merge = {merge_forward, merge_backward},
};

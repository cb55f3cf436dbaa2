/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What batch invariance costs on a GPU: device microseconds of a call without and with the option, in
 * turns, with cold caches, and how much longer the second takes.
 *
 *     rafter_batch_invariance
 */
#include <stdio.h>
#include <stdlib.h>

#include "row_calls.h"

enum { REPEATS = 15 };

static rafter_context *context;
static struct pace pace;

static void measure(const struct row_call *call, const struct row_shape *shape) {
    struct row_tensors tensors;
    struct samples samples[2] = {{0}};
    row_tensors_open(&tensors, context, shape);
    for (int i = -2; i < REPEATS; i++)
        for (int invariant = 0; invariant < 2; invariant++) {
            rafter_context_set_batch_invariant(context, invariant);
            const double time = row_call_seconds(&pace, context, call, &tensors);
            if (time < 0) {
                fprintf(stderr, "%s: %s\n", call->name, rafter_last_error(context));
                exit(1);
            }
            if (i >= 0)
                samples_add(&samples[invariant], time);
        }
    const double usual = 1e6 * samples_summary(&samples[0]).median, option = 1e6 * samples_summary(&samples[1]).median;
    printf("%-22s %s %s %6lld x %6lld x %5lld %10.1f %10.1f  %+6.1f %%\n", call->name,
           shape->are_side_by_side ? "columns" : "rows   ", shape->dtype == RAFTER_F32 ? "fp32" : "bf16",
           (long long)shape->rows, (long long)shape->length, (long long)shape->depth, usual, option,
           100.0 * (option / usual - 1.0));
    fflush(stdout);
    row_tensors_close(&tensors, context);
    samples_free(&samples[0]);
    samples_free(&samples[1]);
}

int main(void) {
    const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}};
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        fprintf(stderr, "%s\n", rafter_last_error(NULL));
        return 77;
    }
    if (!pace_create(&pace, false, context)) {
        fprintf(stderr, "no memory on the GPU\n");
        return 1;
    }
    static const struct {
        int64_t rows;
        int64_t lengths[12];
    } tables[] = {{64, {1000, 8192, 50257, 128256}},
                  {2048, {1000, 8192, 32000, 50257, 50304, 128256}},
                  {8192, {2, 10, 64, 100, 257, 512, 1000, 2048, 3001, 8192, 32000, 50257}},
                  {65536, {2, 10, 32, 60, 100, 257, 512, 777, 1000, 1501, 2048, 5001}},
                  {524288, {2, 10, 32, 60, 100, 257, 512, 1000}}},
      side_by_side[] = {{8192, {10, 100, 1000, 5000}}, {524288, {2, 21, 100, 300}}};
    static const int64_t lce_rows[] = {64, 2048, 8192}, depths[] = {1024, 2048, 4096}, classes[] = {32000, 128256};
    static const rafter_dtype dtypes[] = {RAFTER_BF16, RAFTER_F32};
    printf("%-22s %-35s %15s %10s\n", "call", "             rows x length x depth", "usual, us", "invariant");
    for (int t = 0; t < 2; t++)
        for (int k = 0; k < ROW_CALLS; k++) {
            for (int r = 0; r < 5; r++)
                for (int l = 0; l < 12 && tables[r].lengths[l]; l++)
                    measure(&row_calls[k], &(struct row_shape){.dtype = dtypes[t],
                                                               .rows = tables[r].rows,
                                                               .length = tables[r].lengths[l]});
            for (int r = 0; r < 2; r++)
                for (int l = 0; l < 12 && side_by_side[r].lengths[l]; l++)
                    measure(&row_calls[k], &(struct row_shape){.dtype = dtypes[t],
                                                               .rows = side_by_side[r].rows,
                                                               .length = side_by_side[r].lengths[l],
                                                               .are_side_by_side = true});
        }
    for (int r = 0; r < 3; r++)
        for (int d = 0; d < 3; d++)
            for (int c = 0; c < 2; c++)
                for (int k = 0; k < LINEAR_CALLS; k++)
                    measure(&linear_calls[k],
                            &(struct row_shape){
                                .dtype = RAFTER_BF16, .rows = lce_rows[r], .length = classes[c], .depth = depths[d]});
    for (int k = 0; k < LINEAR_CALLS; k++)
        measure(&linear_calls[k],
                &(struct row_shape){.dtype = RAFTER_F32, .rows = 2048, .length = 32000, .depth = 2048});
    pace_destroy(&pace, context);
    rafter_context_destroy(context);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* CPU calls that run in tiles, many rows at once: cpu_tiles.c plans and runs them, cpu_tile.h has the kernel. */
#ifndef RAFTER_CROSS_ENTROPY_CPU_TILES_H
#define RAFTER_CROSS_ENTROPY_CPU_TILES_H

#include "ops/cross_entropy/kernels.h"

/* How a call is cut into tiles. It depends on shapes and strides alone. */
struct cross_entropy_tiles {
    struct cross_entropy_tiling tiling;
    int64_t rows;     /* of a tile; the last one of a run, or of the call, may have fewer */
    int64_t per_run;  /* tiles per run; 0: a tile is several runs */
    int64_t tiles;    /* in all */
    int64_t per_task; /* tiles */
    int64_t tasks;
};

/* Whether tiles serve the call, and are the faster way. Fills in `tiles` if so. */
bool cross_entropy_plan_tiles(const struct cross_entropy_call *call, struct cross_entropy_tiles *tiles);

/* Runs the call. `sums`: in forward, space for a number per task. Returns the sum of the row
 * losses. */
double cross_entropy_run_tiles(const rafter_context *context, const struct cross_entropy_call *call,
                               const struct cross_entropy_tiles *tiles, const struct cross_entropy_kernels *kernels,
                               double *sums);

/* The largest |lse| from which backward computes gradients; beyond it, statistics are computed again.
 * The rounding error of a large lse would show in the gradient: at 1e30, a tie of two looks like no
 * tie. The bounds keep the relative error of p to 2^-13 (bf16), 2^-16 (fp16) and 2^-18 (fp32); for
 * the 16-bit dtypes that is a sixteenth of their own rounding. NaN and infinities are beyond them. */
static inline float cross_entropy_lse_bound(rafter_dtype dtype) {
    return dtype == RAFTER_BF16 ? 0x1p11f : dtype == RAFTER_F16 ? 0x1p8f : 0x1p6f;
}

#endif

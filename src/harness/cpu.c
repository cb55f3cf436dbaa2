/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/cpu.h"

#include <string.h>

#include "core/context.h"
#include "core/threads.h"
#include "ops/linear_cross_entropy/kernels.h"

enum cpu_level cpu_level(void) {
    enum cpu_level level = CPU_LEVEL_portable;
#define CPU_LEVEL_TAKE(what, isa)                                                                                      \
    if (rafter_cpu_isa() >= RAFTER_ISA_##isa)                                                                          \
        level = what##isa;
    CPU_LEVEL_LIST(CPU_LEVEL_TAKE, CPU_LEVEL_)
#undef CPU_LEVEL_TAKE
    return level;
}

struct peak {
    rafter_dtype dtype;
    int64_t iterations;
    const struct linear_cross_entropy_kernels *kernels;
    char *memory;
    double flops; /* of one thread */
};

static void peak_task(void *arg, int64_t task) {
    struct peak *const peak = arg;
    const double flops = peak->kernels->peak(peak->dtype, peak->iterations, peak->memory + task * LCE_PEAK_BYTES);
    if (task == 0)
        peak->flops = flops;
}

double cpu_matrix_flops(rafter_context *context, rafter_dtype dtype, int64_t iterations) {
    struct peak peak = {dtype, iterations, lce_kernels_of(context), NULL, 0.0};
    const size_t bytes = (size_t)context->threads * LCE_PEAK_BYTES;
    struct rafter_scratch scratch;
    if (rafter_scratch_take(context, NULL, 0, bytes, &scratch) != RAFTER_OK)
        return 0.0;
    memset(scratch.memory, 0, bytes);
    peak.memory = scratch.memory;
    rafter_parallel(context, context->threads, peak_task, &peak);
    rafter_scratch_release(context, &scratch);
    return peak.flops * context->threads;
}

struct block {
    rafter_dtype dtype;
    int64_t depth, iterations;
    const struct linear_cross_entropy_kernels *kernels;
    char *memory;
    int64_t bytes; /* of memory, for one thread */
};

static void block_task(void *arg, int64_t task) {
    const struct block *const block = arg;
    const struct lce_format *f = &block->kernels->format[block->dtype];
    char *const left = block->memory + task * block->bytes;
    char *const right = left + lce_left_bytes(f, LCE_ROWS, block->depth);
    float *const out = (float *)(right + lce_right_bytes(f, block->depth, LCE_COLUMNS));
    const struct lce_product job = {
        .left = left, .right = right, .out = out, .m = LCE_ROWS, .n = LCE_COLUMNS, .k = block->depth};
    for (int64_t i = 0; i < block->iterations; i++)
        block->kernels->product(block->dtype, &job, 0, 0);
}

double cpu_block_flops(rafter_context *context, rafter_dtype dtype, int64_t depth, int64_t iterations) {
    struct block block = {dtype, depth, iterations, lce_kernels_of(context), NULL, 0};
    const struct lce_format *f = &block.kernels->format[dtype];
    block.bytes = lce_left_bytes(f, LCE_ROWS, depth) + lce_right_bytes(f, depth, LCE_COLUMNS) +
                  lce_out_bytes(f, LCE_ROWS, LCE_COLUMNS);
    const size_t bytes = (size_t)(context->threads * block.bytes);
    struct rafter_scratch scratch;
    if (rafter_scratch_take(context, NULL, 0, bytes, &scratch) != RAFTER_OK)
        return 0.0;
    memset(scratch.memory, 0, bytes);
    block.memory = scratch.memory;
    rafter_parallel(context, context->threads, block_task, &block);
    rafter_scratch_release(context, &scratch);
    return 2.0 * LCE_ROWS * LCE_COLUMNS * (double)depth * (double)iterations * context->threads;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The naive baselines (src/ops/<op>/naive.c): the ops as an eager framework runs them. Each framework
 * operation is one plain loop that reads its operands from memory and writes its result to memory,
 * with OpenMP over rows or blocks. Where eager PyTorch has one kernel (silu, softmax,
 * log_softmax) there is one loop; where PyTorch composes (logsumexp, LRPE), temporaries are written
 * in the dtype that PyTorch gives them. Tensors are compact. Compiled at -O3 for the same
 * instruction sets as the library's kernels; never linked into the library.
 */
#ifndef RAFTER_HARNESS_NAIVE_H
#define RAFTER_HARNESS_NAIVE_H

#include <math.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/sizes.h"
#include "harness/cpu.h"
#include "harness/problem.h"

enum { NAIVE_SLOTS = 8, NAIVE_BLOCK = 512 };

/* One session: the problem and its temporaries, which the first call allocates and later calls
 * reuse. */
struct naive {
    const problem *problem;
    int threads;
    jmp_buf no_memory; /* where naive_slot jumps to if it cannot allocate */
    void *slot[NAIVE_SLOTS];
    size_t slot_bytes[NAIVE_SLOTS];
};

struct naive_op {
    bool (*serves)(const problem *p, enum problem_mode mode);
    /* Computes what an eager forward keeps for its backward, into slots; may be NULL. */
    void (*save)(struct naive *n);
    void (*forward)(struct naive *n);
    void (*backward)(struct naive *n);
};

/* In naive.c, which is compiled once per ISA level: the name of the op's table at this level. */
#define NAIVE_PASTE_(op, isa) naive_##op##_##isa
#define NAIVE_PASTE(op, isa) NAIVE_PASTE_(op, isa)
#define NAIVE_OP(op) NAIVE_PASTE(op, RAFTER_ISA)

#define NAIVE_DECLARE(name, isa) extern const struct naive_op naive_##name##_##isa;
#define RAFTER_OP(name) CPU_LEVEL_LIST(NAIVE_DECLARE, name)
#include "ops/ops.inc"
#undef RAFTER_OP

/* Temporary number `index`. Jumps to n->no_memory if it does not fit into memory, so it must not be
 * called from a parallel loop. */
void *naive_slot(struct naive *n, int index, size_t bytes);

/* A tensor's memory, by name. */
static inline void *naive_data(const struct naive *n, const char *name) {
    return problem_find(n->problem, name)->tensor.data;
}

/* ---- elements -------------------------------------------------------------------------------- */

static inline size_t naive_bytes(rafter_dtype dtype) {
    return dtype == RAFTER_F32 ? 4 : 2;
}

static inline float naive_half_to_float(uint16_t h) {
    const uint32_t body = (uint32_t)(h & 0x7fff) << 13;
    float scaled;
    memcpy(&scaled, &body, 4);
    scaled *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &scaled, 4);
    bits |= (uint32_t)(h & 0x8000) << 16;
    memcpy(&scaled, &bits, 4);
    return scaled;
}

/* Rounds to nearest even; only for finite values in the range of fp16, which benchmarks keep to. */
static inline uint16_t naive_float_to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, body = bits & 0x7fffffff;
    float magnitude;
    memcpy(&magnitude, &body, 4);
    magnitude += 0.5f; /* rounds at fp16's subnormal unit */
    uint32_t tiny;
    memcpy(&tiny, &magnitude, 4);
    const uint32_t normal = (body + 0xfff + (body >> 13 & 1) - (112u << 23)) >> 13;
    return (uint16_t)((body < 0x38800000 ? tiny - 0x3f000000 : normal) | sign);
}

/* Converts n elements, starting at element `from` or `to`, to floats and back. */
static inline void naive_load(float *to, rafter_dtype dtype, const void *tensor, int64_t from, int64_t n) {
    if (dtype == RAFTER_F32) {
        memcpy(to, (const float *)tensor + from, (size_t)n * 4);
        return;
    }
    const uint16_t *h = (const uint16_t *)tensor + from;
    if (dtype == RAFTER_BF16)
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = (uint32_t)h[i] << 16;
            memcpy(&to[i], &bits, 4);
        }
    else
        for (int64_t i = 0; i < n; i++)
            to[i] = naive_half_to_float(h[i]);
}

static inline void naive_store(rafter_dtype dtype, void *tensor, int64_t to, const float *from, int64_t n) {
    if (dtype == RAFTER_F32) {
        memcpy((float *)tensor + to, from, (size_t)n * 4);
        return;
    }
    uint16_t *h = (uint16_t *)tensor + to;
    if (dtype == RAFTER_BF16)
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits;
            memcpy(&bits, &from[i], 4);
            h[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        }
    else
        for (int64_t i = 0; i < n; i++)
            h[i] = naive_float_to_half(from[i]);
}

/* ---- rows ------------------------------------------------------------------------------------ */

struct naive_array {
    rafter_dtype dtype;
    void *data;
};

static inline struct naive_array naive_array(const struct naive *n, const char *name) {
    const problem_tensor *t = problem_find(n->problem, name);
    return (struct naive_array){t->dtype, t->tensor.data};
}

/* Below, a row is `length` elements starting at element `from`. */

static inline float naive_row_max(struct naive_array a, int64_t from, int64_t length) {
    float v[NAIVE_BLOCK], largest = -INFINITY;
    for (int64_t i = 0; i < length; i += NAIVE_BLOCK) {
        const int64_t size = min64(length - i, NAIVE_BLOCK);
        naive_load(v, a.dtype, a.data, from + i, size);
#pragma omp simd reduction(max : largest)
        for (int64_t k = 0; k < size; k++)
            largest = v[k] > largest ? v[k] : largest;
    }
    return largest;
}

static inline float naive_row_sum(struct naive_array a, int64_t from, int64_t length) {
    float v[NAIVE_BLOCK], sum = 0;
    for (int64_t i = 0; i < length; i += NAIVE_BLOCK) {
        const int64_t size = min64(length - i, NAIVE_BLOCK);
        naive_load(v, a.dtype, a.data, from + i, size);
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < size; k++)
            sum += v[k];
    }
    return sum;
}

/* The sum of exp(a - shift). */
static inline float naive_row_sum_exp(struct naive_array a, int64_t from, int64_t length, float shift) {
    float v[NAIVE_BLOCK], sum = 0;
    for (int64_t i = 0; i < length; i += NAIVE_BLOCK) {
        const int64_t size = min64(length - i, NAIVE_BLOCK);
        naive_load(v, a.dtype, a.data, from + i, size);
        for (int64_t k = 0; k < size; k++)
            sum += expf(v[k] - shift);
    }
    return sum;
}

/* out = factor * (a - shift) */
static inline void naive_row_linear(struct naive_array out, struct naive_array a, int64_t from, int64_t length,
                                    float factor, float shift) {
    float v[NAIVE_BLOCK];
    for (int64_t i = 0; i < length; i += NAIVE_BLOCK) {
        const int64_t size = min64(length - i, NAIVE_BLOCK);
        naive_load(v, a.dtype, a.data, from + i, size);
        for (int64_t k = 0; k < size; k++)
            v[k] = factor * (v[k] - shift);
        naive_store(out.dtype, out.data, from + i, v, size);
    }
}

/* ---- passes ---------------------------------------------------------------------------------- */

/* One elementwise pass over memory: f(out, a, b) on blocks of floats. A NULL b.data is not read. */
static inline void naive_pointwise(const struct naive *n, int64_t count, struct naive_array out, struct naive_array a,
                                   struct naive_array b,
                                   void (*f)(float *out, const float *a, const float *b, int64_t n)) {
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t block = 0; block < ceil_div(count, NAIVE_BLOCK); block++) {
        const int64_t from = block * NAIVE_BLOCK, size = min64(count - from, NAIVE_BLOCK);
        float x[NAIVE_BLOCK], y[NAIVE_BLOCK], z[NAIVE_BLOCK];
        naive_load(x, a.dtype, a.data, from, size);
        if (b.data)
            naive_load(y, b.dtype, b.data, from, size);
        f(z, x, y, size);
        naive_store(out.dtype, out.data, from, z, size);
    }
}

#endif

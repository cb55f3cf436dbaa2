/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The floating-point environment of a call. A call rounds and flushes subnormal numbers as its
 * caller does, on every thread. It masks all exceptions while it computes, and leaves the caller's
 * exception flags as they were: softmax of -inf logits is no error.
 */
#ifndef RAFTER_CORE_FP_H
#define RAFTER_CORE_FP_H

#include <stdint.h>

struct rafter_fp {
    uint64_t control, status;
};

#if defined(__x86_64__)
#include <xmmintrin.h>

static inline struct rafter_fp rafter_fp_get(void) {
    return (struct rafter_fp){.control = _mm_getcsr()}; /* MXCSR holds both */
}

static inline void rafter_fp_set(struct rafter_fp fp) {
    _mm_setcsr((unsigned)fp.control);
}

/* The same rounding and flushing, all exceptions masked, no flag set. */
static inline struct rafter_fp rafter_fp_quiet(struct rafter_fp fp) {
    enum { MASKS = 0x1f80, FLAGS = 0x3f };
    return (struct rafter_fp){.control = (fp.control | MASKS) & ~(uint64_t)FLAGS};
}

#elif defined(__aarch64__)

static inline struct rafter_fp rafter_fp_get(void) {
    struct rafter_fp fp;
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(fp.control), "=r"(fp.status));
    return fp;
}

static inline void rafter_fp_set(struct rafter_fp fp) {
    __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(fp.control), "r"(fp.status));
}

static inline struct rafter_fp rafter_fp_quiet(struct rafter_fp fp) {
    enum { ENABLES = 0x9f00, FLAGS = 0x9f };
    return (struct rafter_fp){fp.control & ~(uint64_t)ENABLES, fp.status & ~(uint64_t)FLAGS};
}

#else
#error "say here how this processor's floating-point environment is read and set"
#endif

/* For RAFTER_QUIET_FP: puts the caller's environment back. */
static inline void rafter_fp_restore(const struct rafter_fp *fp) {
    rafter_fp_set(*fp);
}

static inline struct rafter_fp rafter_fp_begin(void) {
    const struct rafter_fp fp = rafter_fp_get();
    rafter_fp_set(rafter_fp_quiet(fp));
    return fp;
}

/* Until the end of the scope, no floating-point operation traps, and flags are lost. */
#define RAFTER_QUIET_FP                                                                                                \
    __attribute__((cleanup(rafter_fp_restore), unused)) const struct rafter_fp fp_of_caller = rafter_fp_begin()

#endif

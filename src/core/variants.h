/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel variants: what they are, and how a call finds the one that runs it.
 *
 * An op's variants.inc lists its variants, in order of preference:
 *
 *     CPU(avx512)                 the op's cpu.c, compiled for that ISA level; rows of another
 *                                 architecture's levels are within #if
 *     CUDA(packed_rows, sm80)     the op's cuda/packed_rows.cu, for compute capability 8.0 and later
 *     CUDA(hopper_fast, sm90a)    for compute capability 9.0 exactly
 *
 * A call takes the first row of its device that can run there and serves it. A variant knows only
 * itself: it says whether it serves a call, never what another variant would do.
 */
#ifndef RAFTER_CORE_VARIANTS_H
#define RAFTER_CORE_VARIANTS_H

#include "core/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The part that all ops' checked calls share; their first member. */
struct rafter_call {
    rafter_direction direction;
    bool batch_invariant; /* see rafter_context_set_batch_invariant */
    bool empty;           /* valid, but there is nothing to compute: no variant is asked */
    size_t budget;        /* most bytes of workspace; 0: no limit */
    void *workspace;      /* the caller's, or NULL */
    size_t workspace_bytes;
};

/* The functions of a variant. `call` is the op's struct <op>_call. `plan` is the storage of a
 * struct rafter_plan: a variant keeps a struct of its own there. */
struct rafter_variant_functions {
    /* NULL if the variant serves the call in this context; else the reason, as a phrase such as
     * "rows are strided". May itself be NULL: the variant serves every call. */
    const char *(*why_not)(const rafter_context *context, const struct rafter_call *call);
    /* Fills in `plan` and returns the bytes of workspace that the call takes. Tries to stay within
     * call->budget; if it cannot, it returns the least it can do with. */
    size_t (*plan)(const rafter_context *context, const struct rafter_call *call, void *plan);
    /* Runs the planned call (CPU) or enqueues it on the context's stream (CUDA). `workspace` is
     * aligned to RAFTER_SCRATCH_ALIGNMENT. `kernels` is the row's. */
    rafter_status (*run)(rafter_context *context, const struct rafter_call *call, const void *plan, const void *kernels,
                         char *workspace);
};

struct rafter_variant {
    const char *name;
    int level;                                        /* CPU: enum rafter_isa. CUDA: RAFTER_LEVEL_... */
    const struct rafter_variant_functions *functions; /* NULL in librafter's CUDA rows: librafter_cuda has them */
    const void *kernels;                              /* CPU: the struct <op>_kernels compiled for `level` */
};

/* The ops, numbered in the order of ops.inc. */
enum rafter_op_index {
#define RAFTER_OP(name) RAFTER_OP_INDEX_##name,
#include "ops/ops.inc"
#undef RAFTER_OP
    RAFTER_OP_COUNT
};

struct rafter_op {
    const char *name;
    enum rafter_op_index index;
    int cpu_count, cuda_count;
    const struct rafter_variant *cpu, *cuda; /* in order of preference */
};

#define RAFTER_OP(name) extern const struct rafter_op rafter_op_##name;
#include "ops/ops.inc"
#undef RAFTER_OP

/* CUDA levels: the compute capability as 100 * major + 10 * minor, plus 1 if the row runs on no later device. */
#define RAFTER_LEVEL_sm80 800
#define RAFTER_LEVEL_sm90 900
#define RAFTER_LEVEL_sm90a 901

#define RAFTER_PASTE_(a, b) a##b
#define RAFTER_PASTE(a, b) RAFTER_PASTE_(a, b)
#define RAFTER_PASTE3_(a, b, c) a##b##_##c
#define RAFTER_PASTE3(a, b, c) RAFTER_PASTE3_(a, b, c)

/* In an op's cpu.c: the name of the table of kernels to define. */
#define RAFTER_KERNELS(op) RAFTER_PASTE3(rafter_, op, RAFTER_ISA)

/* Every op's folder defines rafter_<op>_on_cpu: how all of its CPU rows plan and run. */
#define RAFTER_OP(name) extern const struct rafter_variant_functions rafter_##name##_on_cpu;
#include "ops/ops.inc"
#undef RAFTER_OP

/* Every op's checks begin here: rafter_take_args for the op's struct, no memory noted so far, and a
 * `direction` that exists. */
rafter_status rafter_begin_call(rafter_context *context, const char *name, const void *args, void *copy, size_t size,
                                rafter_direction direction);

/* Checks that the caller's workspace overlaps nothing, picks the variant, takes the workspace, runs.
 * Every op's forward and backward end here. */
rafter_status rafter_run(rafter_context *context, const struct rafter_op *op, const struct rafter_call *call);

/* The bytes of workspace that rafter_run would take. Every rafter_<op>_workspace ends here. */
rafter_status rafter_ask_workspace(rafter_context *context, const struct rafter_op *op, const struct rafter_call *call,
                                   size_t *bytes);

/* Sets what the context may run from a variant's name (NULL: everything): a level of the CPU, or a
 * CUDA variant of at least one op. False if there is none of that name that this machine can
 * run. */
bool rafter_allow_variant(rafter_context *context, const char *name);

#ifdef __cplusplus
}
#endif

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The context behind rafter_context, error sentences, argument structs and scratch memory. */
#ifndef RAFTER_CORE_CONTEXT_H
#define RAFTER_CORE_CONTEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/cpu.h"
#include "rafter/rafter.h"

#ifdef __cplusplus
extern "C" {
#endif

struct rafter_cuda;
struct rafter_cuda_state;
struct rafter_phases;
struct rafter_variant;

/* A variant that the last call considered, and why it was passed over. */
enum { RAFTER_MOST_CONSIDERED = 32 }; /* rows of an op: variant_rows.c checks */
struct rafter_considered {
    const char *variant, *reason; /* reason: NULL for the variant that was taken */
};

/* The memory of one tensor of the call, [begin, end). Tensors without elements have none. */
enum { RAFTER_MOST_TAKEN = 24 };
struct rafter_taken {
    const char *name;
    uintptr_t begin, end;
};

/* A group that this rank still owes the exchange with which every call begins: see core/group.h. */
enum { RAFTER_MOST_OWED = 2 };
struct rafter_owed {
    const char *name;
    rafter_communicator group;
};

/* What a variant decided about one call, between `plan` and `run`. */
enum { RAFTER_PLAN_BYTES = 6144 };
struct rafter_plan {
    const struct rafter_variant *variant;
    size_t workspace_bytes;
    union {
        char storage[RAFTER_PLAN_BYTES]; /* the variant's own struct */
        double align_double;
        int64_t align_int;
        void *align_pointer;
    } own;
};

struct rafter_context {
    DLDevice device;
    const struct rafter_cuda *cuda;       /* NULL on the CPU */
    struct rafter_cuda_state *cuda_state; /* the backend's own */
    void *stream;
    int threads;
    enum rafter_isa isa;    /* CPU kernels above this level are not used */
    const char *forced;     /* the CUDA variant to use in ops that have it; NULL: none */
    int compute_capability; /* of a CUDA device: 90 for 9.0 */
    bool batch_invariant;
    struct rafter_considered considered[RAFTER_MOST_CONSIDERED]; /* by the last call */
    int considered_count;
    struct rafter_taken taken[RAFTER_MOST_TAKEN]; /* by the call whose arguments are being checked */
    int taken_count;
    struct rafter_owed owed[RAFTER_MOST_OWED]; /* by the call that is running */
    int owed_count;
    struct rafter_plan plan; /* of the call that runs: too large for the stack */
    /* CPU only: RAFTER_THREAD_BYTES for the calling thread, or, with `parallel`, for each of `threads` host threads.
     * See core/kernel_memory.h. */
    char *kernel_memory;
    /* Runs work on the host's threads; NULL: core/pool.c does. */
    void (*parallel)(void *user, int32_t count, void (*work)(void *arg, int32_t i), void *arg);
    void *parallel_user;
    void *(*allocate)(void *user, size_t bytes);
    void (*release)(void *user, void *memory, size_t bytes);
    void *user;
    size_t held, peak; /* scratch bytes: now, and the most since the last reset */
    /* The default CPU allocator keeps one large block for later calls: `spare` while no call uses
     * it, `lent` while one does. */
    void *spare, *lent;
    size_t spare_bytes;
    bool allow_self_overlap;      /* bench only: outputs with stride 0, so that all data of an op stays in L1 */
    struct rafter_phases *phases; /* bench only: where parallel phases add their times; NULL: nowhere */
    char error[512];
};

/* Records the message and returns the status, so that a check reads `return rafter_fail(...)`. */
rafter_status rafter_fail(rafter_context *context, rafter_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Returns from the calling function if `call` failed. */
#define RAFTER_TRY(call)                                                                                               \
    do {                                                                                                               \
        const rafter_status status_ = (call);                                                                          \
        if (status_ != RAFTER_OK)                                                                                      \
            return status_;                                                                                            \
    } while (0)

/* Copies a caller's struct, whose first member is its size, into `copy`, which has the size that
 * this library knows. Members that an older caller lacks become zero; members that only a newer
 * caller has must be zero. Clears the last error. `name`: of the struct, for messages. */
rafter_status rafter_take_args(rafter_context *context, const char *name, const void *args, void *copy, size_t size);

enum { RAFTER_SCRATCH_ALIGNMENT = 64 };

/* Scratch memory of one call, aligned. */
struct rafter_scratch {
    char *memory;
    size_t bytes;
    void *owned; /* from the allocator; NULL if the caller's workspace is used */
};

/* The size to report from rafter_<op>_workspace() for `bytes` of scratch: includes room to
 * align. */
size_t rafter_scratch_request(size_t bytes);

/* Takes `bytes` from the caller's workspace if there is one, else from the allocator. Zero bytes
 * succeed with no memory. */
rafter_status rafter_scratch_take(rafter_context *context, void *workspace, size_t workspace_bytes, size_t bytes,
                                  struct rafter_scratch *scratch);
void rafter_scratch_release(rafter_context *context, struct rafter_scratch *scratch);

#ifdef __cplusplus
}
#endif

#endif

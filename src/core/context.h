/* SPDX-License-Identifier: Apache-2.0 */
/* The context behind rafter_context, error sentences, argument structs and scratch memory. */
#ifndef RAFTER_CORE_CONTEXT_H
#define RAFTER_CORE_CONTEXT_H

#include <stdbool.h>
#include <stddef.h>

#include "core/cpu.h"
#include "rafter/rafter.h"

#ifdef __cplusplus
extern "C" {
#endif

struct rafter_cuda;
struct rafter_cuda_state;

struct rafter_context {
    DLDevice device;
    const struct rafter_cuda *cuda;       /* NULL on the CPU */
    struct rafter_cuda_state *cuda_state; /* the backend's own */
    void *stream;
    int threads;
    enum rafter_isa isa; /* kernels above this level are not used */
    void *(*allocate)(void *user, size_t bytes);
    void (*release)(void *user, void *memory, size_t bytes);
    void *user;
    size_t held, peak;  /* scratch bytes, now and at most */
    void *spare, *lent; /* the CPU's own allocator: a large block for the next call that it is enough for; out at one */
    size_t spare_bytes;
    bool allow_self_overlap; /* bench only: outputs with stride 0, so that a whole op runs on data that stays in L1 */
    char error[512];
};

/* Records the sentence and returns the status, so that a check reads `return rafter_fail(...)`. */
rafter_status rafter_fail(rafter_context *context, rafter_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Returns from the calling function if `call` failed. */
#define RAFTER_TRY(call)                                                                                               \
    do {                                                                                                               \
        const rafter_status status_ = (call);                                                                          \
        if (status_ != RAFTER_OK)                                                                                      \
            return status_;                                                                                            \
    } while (0)

/* Copies a caller's struct (whose first member is its size) into `copy`, of the size that this library knows: what an
 * older caller lacks is zero; what a newer caller has beyond it must be zero. Clears the last error. `name` is the
 * struct's. */
rafter_status rafter_take_args(rafter_context *context, const char *name, const void *args, void *copy, size_t size);

enum { RAFTER_SCRATCH_ALIGNMENT = 64 };

/* Scratch memory of one call, aligned. */
struct rafter_scratch {
    char *memory;
    size_t bytes;
    void *owned; /* what the allocator gave, NULL when the caller's workspace serves */
};

/* The size to report from rafter_<op>_workspace() for `bytes` of scratch: room to align is included. */
size_t rafter_scratch_request(size_t bytes);

/* Takes `bytes` from the caller's workspace if there is one, else from the allocator. Zero bytes succeed with no
 * memory. */
rafter_status rafter_scratch_take(rafter_context *context, void *workspace, size_t workspace_bytes, size_t bytes,
                                  struct rafter_scratch *scratch);
void rafter_scratch_release(rafter_context *context, struct rafter_scratch *scratch);

#ifdef __cplusplus
}
#endif

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA backend: a second shared library, librafter_cuda, that the first loads when a context for a CUDA device is
 * created. The two meet in one table of functions. An op's op.c checks the arguments, whatever the device, and hands
 * the checked call, struct <op>_call of its kernels.h, either to its CPU kernels or to the function of that name here.
 */
#ifndef RAFTER_CORE_BACKEND_H
#define RAFTER_CORE_BACKEND_H

#include "core/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Both libraries are built from one tree; the number keeps a stray older file from being used. */
enum { RAFTER_CUDA_INTERFACE = 4 };

#define RAFTER_OP(name) struct name##_call;
#include "ops/ops.inc"
#undef RAFTER_OP

struct rafter_cuda_facts {
    char name[256];
    int compute_capability; /* 90 for 9.0 */
    int multiprocessors;
    int64_t l2_bytes, memory_bytes;
    int driver, runtime; /* 13000 for 13.0 */
};

struct rafter_cuda {
    int interface;

    /* Makes the context's device state: the default scratch allocator, counters, the flag for bad labels. */
    rafter_status (*open)(rafter_context *context);
    void (*close)(rafter_context *context);
    void (*set_stream)(rafter_context *context); /* to context->stream */

    /* One function per op: enqueues the checked call on the context's stream, or, where call->ask is set, puts there
     * how many bytes of workspace it takes. Never synchronises. */
#define RAFTER_OP(name) rafter_status (*name)(rafter_context * context, const struct name##_call *call);
#include "ops/ops.inc"
#undef RAFTER_OP

    /* Waits for the stream; whether a kernel has met a label out of range since the last time this was asked. */
    rafter_status (*bad_labels)(rafter_context *context, bool *found);

    /* For tests and the bench. */
    void (*facts)(const rafter_context *context, struct rafter_cuda_facts *facts);
    void *(*allocate)(size_t bytes); /* plain device memory; NULL if there is none */
    void (*release)(void *memory);
    int64_t (*pool_bytes)(const rafter_context *context);   /* handed out by the pool that scratch memory comes from */
    bool (*copy)(void *to, const void *from, size_t bytes); /* between host and device, either way; waits for it */
    bool (*fill)(const rafter_context *context, void *memory, int value, size_t bytes);    /* enqueued */
    bool (*move)(const rafter_context *context, void *to, const void *from, size_t bytes); /* on the device; enqueued */
    /* to[i] = from[index[i]], elements of 1, 2, 4 or 8 bytes; all on the device; enqueued. */
    bool (*gather)(const rafter_context *context, void *to, const void *from, const int64_t *index, int64_t count,
                   int element);
    bool (*synchronize)(const rafter_context *context);
    void *(*stream)(bool urgent); /* a new one, for the options of a context; NULL if there is none. Urgent: of the
                                     highest priority, else of the lowest */
    void (*forget_stream)(void *stream);
    void (*launch_nothing)(const rafter_context *context); /* an empty kernel */
    void *(*event)(void);
    void (*record)(const rafter_context *context, void *event);
    float (*elapsed)(void *from, void *to); /* milliseconds, once both have passed; waits for them */
    void (*forget)(void *event);
    bool (*capture_begin)(const rafter_context *context);
    void *(*capture_end)(const rafter_context *context); /* an executable graph, or NULL */
    bool (*replay)(const rafter_context *context, void *graph);
    void (*forget_graph)(void *graph);
};

/* What librafter_cuda exports, and all that it exports. */
typedef const struct rafter_cuda *rafter_cuda_entry(void);
#define RAFTER_CUDA_ENTRY "rafter_cuda_backend"

#ifdef __cplusplus
}
#endif

#endif

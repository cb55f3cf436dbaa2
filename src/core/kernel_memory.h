/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Buffers of the thread that computes. They are not on the stack, so that calls work on the small
 * stacks of some hosts: see include/rafter/rafter.h. Workers have their own; a thread that calls,
 * and the host's threads that help it, use the context's.
 */
#ifndef RAFTER_CORE_KERNEL_MEMORY_H
#define RAFTER_CORE_KERNEL_MEMORY_H

#include <stddef.h>

enum {
    RAFTER_KERNEL_BYTES = 104 << 10, /* for the kernel that runs */
    RAFTER_TASK_BYTES = 32 << 10,    /* for the code that calls it */
    RAFTER_THREAD_BYTES = RAFTER_KERNEL_BYTES + RAFTER_TASK_BYTES
};

/* Of this thread: RAFTER_THREAD_BYTES, aligned to 64. Set while tasks run. */
extern __attribute__((visibility("hidden"), tls_model("initial-exec"))) _Thread_local char *rafter_thread_memory;

/* Contents are undefined, and kept until the kernel (or the task) returns. */
static inline void *rafter_kernel_memory(void) {
    return __builtin_assume_aligned(rafter_thread_memory, 64);
}

static inline void *rafter_task_memory(void) {
    return __builtin_assume_aligned(rafter_thread_memory + RAFTER_KERNEL_BYTES, 64);
}

#endif

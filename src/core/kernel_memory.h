/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Buffers for the thread that computes. They are not on the stack, because some hosts have small
 * stacks: see include/rafter/rafter.h. The library's workers have buffers of their own; the calling
 * thread, and host threads that run tasks for it, use those of the context.
 */
#ifndef RAFTER_CORE_KERNEL_MEMORY_H
#define RAFTER_CORE_KERNEL_MEMORY_H

#include <stddef.h>

enum {
    RAFTER_KERNEL_BYTES = 104 << 10, /* for the kernel (cpu.c) */
    RAFTER_TASK_BYTES = 32 << 10,    /* for the task that calls the kernel (cpu_run.c) */
    RAFTER_THREAD_BYTES = RAFTER_KERNEL_BYTES + RAFTER_TASK_BYTES
};

/* This thread's RAFTER_THREAD_BYTES, aligned to 64. Valid while tasks run. */
extern __attribute__((visibility("hidden"), tls_model("initial-exec"))) _Thread_local char *rafter_thread_memory;

/* Contents are undefined, and kept until the kernel (or the task) returns. */
static inline void *rafter_kernel_memory(void) {
    return __builtin_assume_aligned(rafter_thread_memory, 64);
}

static inline void *rafter_task_memory(void) {
    return __builtin_assume_aligned(rafter_thread_memory + RAFTER_KERNEL_BYTES, 64);
}

#endif

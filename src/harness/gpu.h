/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPU as tests and the bench need it: memory, copies, streams, events, graphs. Part of the
 * harness, not of the library. gpu.cu implements it with the CUDA runtime; gpu_stub.c takes its
 * place in builds without nvcc, and there every function fails.
 *
 * Functions without a context use the current device, which in tests and in the bench is device 0.
 * Those with a context enqueue on the context's stream.
 */
#ifndef RAFTER_HARNESS_GPU_H
#define RAFTER_HARNESS_GPU_H

#include <stdbool.h>
#include <stdint.h>

#include "rafter/rafter.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the device ------------------------------------------------------------------------------ */

struct gpu_facts {
    char name[256];
    int compute_capability; /* 90 for 9.0 */
    int multiprocessors;
    int64_t l2_bytes, memory_bytes;
    int driver, runtime; /* CUDA versions, 1000 * major + 10 * minor */
};

/* All zero if the device cannot be asked. */
void gpu_describe(const rafter_context *context, struct gpu_facts *facts);

/* ---- memory ---------------------------------------------------------------------------------- */

/* NULL: no memory. Zero bytes give a valid pointer. */
void *gpu_allocate(size_t bytes);
void gpu_release(void *memory);

/* Bytes that the device's default memory pool has handed out: cudaMallocAsync, which contexts
 * use. */
int64_t gpu_pool_bytes(const rafter_context *context);

/* Copies between host and device, in either direction. Returns when the copy is done. */
bool gpu_copy(void *to, const void *from, size_t bytes);

/* All of these enqueue. gpu_fill sets every byte to `value`; gpu_move copies within the device;
 * gpu_gather copies `count` elements of `element` bytes (1, 2, 4 or 8), to[i] = from[index[i]]. */
bool gpu_fill(const rafter_context *context, void *memory, int value, size_t bytes);
bool gpu_move(const rafter_context *context, void *to, const void *from, size_t bytes);
/* gpu_move by a kernel of one block on each of `blocks` multiprocessors, on this stream. */
bool gpu_copy_on(void *stream, void *to, const void *from, size_t bytes, int blocks);
/* gpu_move of a multiple of 16 bytes, by a kernel that lets the next kernel start 100 us before it copies: one that
 * does not wait for it sees what was there before. */
bool gpu_copy_late(const rafter_context *context, void *to, const void *from, size_t bytes);
bool gpu_gather(const rafter_context *context, void *to, const void *from, const int64_t *index, int64_t count,
                int element);

/* In stream order: fills the bytes of a tensor at t->device (t->memory_bytes) with numbers as
 * t->fill says, from a generator that only depends on the seed and the element's place. */
struct problem_tensor;
bool gpu_generate(const rafter_context *context, const struct problem_tensor *t, uint64_t seed);

/* ---- streams and events ---------------------------------------------------------------------- */

/* A stream that does not synchronise with the default stream, with the highest or the lowest
 * priority. */
void *gpu_new_stream(bool high_priority);
void gpu_release_stream(void *stream);

/* Waits for the context's stream. False: something on the device failed. */
bool gpu_synchronize(const rafter_context *context);

/* Launches an empty kernel. */
void gpu_launch_nothing(const rafter_context *context);

void *gpu_new_event(void);
void gpu_release_event(void *event);
void gpu_record(const rafter_context *context, void *event);
/* Milliseconds between two recorded events; waits for the second. Negative: they could not be
 * read. */
float gpu_elapsed(void *from, void *to);

/* ---- graphs ---------------------------------------------------------------------------------- */

bool gpu_capture_begin(const rafter_context *context);
/* An executable graph; NULL: the capture is invalid. */
void *gpu_capture_end(const rafter_context *context);
bool gpu_replay(const rafter_context *context, void *graph);
void gpu_release_graph(void *graph);

#ifdef __cplusplus
}
#endif

#endif

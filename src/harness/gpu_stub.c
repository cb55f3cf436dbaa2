/* SPDX-License-Identifier: Apache-2.0 */
/* gpu.h in builds without nvcc. No context for a GPU exists in these, so that only functions
 * without one are ever called. */
#include "harness/gpu.h"

#include <string.h>

void gpu_describe(const rafter_context *context, struct gpu_facts *facts) {
    (void)context;
    memset(facts, 0, sizeof *facts);
}

void *gpu_allocate(size_t bytes) {
    (void)bytes;
    return NULL;
}

void gpu_release(void *memory) {
    (void)memory;
}

int64_t gpu_pool_bytes(const rafter_context *context) {
    (void)context;
    return 0;
}

bool gpu_copy(void *to, const void *from, size_t bytes) {
    (void)to, (void)from, (void)bytes;
    return false;
}

bool gpu_fill(const rafter_context *context, void *memory, int value, size_t bytes) {
    (void)context, (void)memory, (void)value, (void)bytes;
    return false;
}

bool gpu_move(const rafter_context *context, void *to, const void *from, size_t bytes) {
    (void)context, (void)to, (void)from, (void)bytes;
    return false;
}

bool gpu_copy_late(const rafter_context *context, void *to, const void *from, size_t bytes) {
    (void)context, (void)to, (void)from, (void)bytes;
    return false;
}

bool gpu_copy_on(void *stream, void *to, const void *from, size_t bytes, int blocks) {
    (void)stream, (void)to, (void)from, (void)bytes, (void)blocks;
    return false;
}

bool gpu_gather(const rafter_context *context, void *to, const void *from, const int64_t *index, int64_t count,
                int element) {
    (void)context, (void)to, (void)from, (void)index, (void)count, (void)element;
    return false;
}

bool gpu_generate(const rafter_context *context, const struct problem_tensor *t, uint64_t seed) {
    (void)context, (void)t, (void)seed;
    return false;
}

void *gpu_new_stream(bool high_priority) {
    (void)high_priority;
    return NULL;
}

void gpu_release_stream(void *stream) {
    (void)stream;
}

bool gpu_synchronize(const rafter_context *context) {
    (void)context;
    return false;
}

void gpu_launch_nothing(const rafter_context *context) {
    (void)context;
}

void *gpu_new_event(void) {
    return NULL;
}

void gpu_release_event(void *event) {
    (void)event;
}

void gpu_record(const rafter_context *context, void *event) {
    (void)context, (void)event;
}

float gpu_elapsed(void *from, void *to) {
    (void)from, (void)to;
    return -1;
}

bool gpu_capture_begin(const rafter_context *context) {
    (void)context;
    return false;
}

void *gpu_capture_end(const rafter_context *context) {
    (void)context;
    return NULL;
}

bool gpu_replay(const rafter_context *context, void *graph) {
    (void)context, (void)graph;
    return false;
}

void gpu_release_graph(void *graph) {
    (void)graph;
}

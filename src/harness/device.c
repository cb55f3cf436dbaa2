/* SPDX-License-Identifier: Apache-2.0 */
/* A problem's tensors on a GPU. */
#include <stdlib.h>
#include <string.h>

#include "core/sizes.h"
#include "harness/context.h"
#include "harness/gpu.h"
#include "harness/internal.h"

/* The memory of small tensors comes from one block that is kept, because tests run thousands of
 * problems. With RAFTER_TEST_EXACT_MEMORY set every tensor has an allocation of its own, so that a
 * memory checker knows its bounds. */
enum { ARENA_BYTES = 64 << 20, ARENA_ALIGNMENT = 1024 };
static char *arena;
static size_t arena_used;

static bool in_arena(const void *memory) {
    return arena && (const char *)memory >= arena && (const char *)memory < arena + ARENA_BYTES;
}

static char *device_memory(size_t bytes) {
    if (getenv("RAFTER_TEST_EXACT_MEMORY") || bytes + ARENA_ALIGNMENT > ARENA_BYTES - arena_used)
        return gpu_allocate(bytes);
    if (!arena)
        arena = gpu_allocate(ARENA_BYTES);
    if (!arena)
        return NULL;
    char *memory = arena + arena_used;
    arena_used += (size_t)round_up((int64_t)bytes, ARENA_ALIGNMENT);
    return memory;
}

/* As on the host. */
static size_t offset_of(const problem *p, const problem_tensor *t) {
    return (size_t)(problem_offset(p, t) * t->tensor.dtype.bits / 8);
}

bool problem_to_device(problem *p, const rafter_context *context, enum problem_mode mode) {
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        const size_t offset = offset_of(p, t);
        if (t->in_place_of)
            continue;
        t->device = device_memory(t->memory_bytes + offset);
        if (!t->device)
            return false;
        if (problem_writes(t, mode) && t->plain && !t->accumulates
                ? !gpu_fill(context, t->device + offset, PROBLEM_POISON, t->memory_bytes)
                : t->memory_bytes > 0 && !gpu_copy(t->device + offset, t->memory, t->memory_bytes))
            return false;
        t->tensor.device = context_device(context);
        t->tensor.data = t->device + offset;
    }
    for (int i = 0; i < p->tensors; i++)
        if (p->tensor[i].in_place_of) {
            const DLTensor *other = problem_dl(p, p->tensor[i].in_place_of);
            p->tensor[i].tensor.device = other->device;
            p->tensor[i].tensor.data = other->data;
        }
    return true;
}

static bool fetch(const problem *p, const problem_tensor *t) {
    return !t->device || t->memory_bytes == 0 || gpu_copy(t->memory, t->device + offset_of(p, t), t->memory_bytes);
}

bool problem_from_device(const problem *p, const rafter_context *context) {
    bool good = gpu_synchronize(context);
    for (int i = 0; i < p->tensors && good; i++)
        good = fetch(p, &p->tensor[i]);
    return good;
}

/* Fetches only the elements that a sampled oracle has values for. */
static bool fetch_listed(const problem_tensor *t, const rafter_context *context) {
    const size_t count = (size_t)t->listed, element = (size_t)t->tensor.dtype.bits / 8;
    int64_t *index = malloc(count * sizeof *index + 1);
    char *values = malloc(count * element + 1);
    void *gpu_index = gpu_allocate(count * sizeof *index), *gpu_values = gpu_allocate(count * element);
    bool good = index && values && gpu_index && gpu_values;
    for (size_t k = 0; k < count && good; k++)
        index[k] = t->list[k].index;
    good = good && gpu_copy(gpu_index, index, count * sizeof *index) &&
           gpu_gather(context, gpu_values, t->device, gpu_index, t->listed, (int)element) && gpu_synchronize(context) &&
           gpu_copy(values, gpu_values, count * element);
    for (size_t k = 0; k < count && good; k++)
        memcpy(t->memory + (size_t)index[k] * element, values + k * element, element);
    gpu_release(gpu_index);
    gpu_release(gpu_values);
    free(index);
    free(values);
    return good;
}

bool problem_results_from_device(const problem *p, const rafter_context *context, enum problem_mode mode) {
    bool good = gpu_synchronize(context);
    for (int i = 0; i < p->tensors && good; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (problem_writes(t, mode))
            good = t->device && problem_is_sampled(t) ? fetch_listed(t, context) : fetch(p, t);
    }
    return good;
}

bool problem_tensor_from_device(const problem *p, const problem_tensor *t, const rafter_context *context) {
    return gpu_synchronize(context) && fetch(p, t);
}

bool problem_poison_device(const problem *p, const rafter_context *context, enum problem_mode mode) {
    bool good = true;
    for (int i = 0; i < p->tensors && good; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (problem_writes(t, mode) && t->device && t->memory_bytes > 0)
            good = gpu_fill(context, t->device + offset_of(p, t), PROBLEM_POISON, t->memory_bytes);
    }
    return good;
}

void problem_leave_device(problem *p) {
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (t->device && !in_arena(t->device))
            gpu_release(t->device);
        t->device = NULL;
        t->tensor.device = (DLDevice){kDLCPU, 0};
        t->tensor.data = t->memory;
    }
    arena_used = 0;
}

/* Fills the arena with garbage, and enqueues a kernel that lets the next kernel start before it copies the tensors
 * there. So a call whose first kernel does not wait for its inputs (cuda/primitives.cuh) gives wrong results. */
static bool inputs_come_late(const rafter_context *context) {
    enum { GARBAGE = 0xff };
    static char *copy;
    if (arena_used == 0)
        return true;
    if (!copy)
        copy = gpu_allocate(ARENA_BYTES);
    return copy && gpu_move(context, copy, arena, arena_used) && gpu_fill(context, arena, GARBAGE, arena_used) &&
           gpu_copy_late(context, arena, copy, arena_used);
}

rafter_status problem_call(problem *p, rafter_context *context, enum problem_mode mode) {
    if (!context_on_gpu(context))
        return p->op->call(p, context, mode);
    rafter_status status = RAFTER_OUT_OF_MEMORY;
    if (problem_to_device(p, context, mode) && inputs_come_late(context)) {
        status = p->op->call(p, context, mode);
        if (status == RAFTER_OK && !problem_from_device(p, context))
            status = RAFTER_DEVICE_ERROR;
    }
    problem_leave_device(p);
    return status;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/problem.h"

#include <stdlib.h>
#include <string.h>

#include "core/backend.h"

/* Device memory for small tensors, cut from one block that is kept: thousands of problems are run. With
 * RAFTER_TEST_EXACT_MEMORY set every tensor gets an allocation of its own, so that a memory checker sees its bounds. */
enum { ARENA_BYTES = 64 << 20, APART = 1024 };
static char *arena;
static size_t arena_used;

static bool in_arena(const void *memory) {
    return arena && (const char *)memory >= arena && (const char *)memory < arena + ARENA_BYTES;
}

static char *device_memory(const struct rafter_cuda *cuda, size_t bytes) {
    if (getenv("RAFTER_TEST_EXACT_MEMORY") || bytes + APART > ARENA_BYTES - arena_used)
        return cuda->allocate(bytes);
    if (!arena)
        arena = cuda->allocate(ARENA_BYTES);
    if (!arena)
        return NULL;
    char *memory = arena + arena_used;
    arena_used += (bytes + APART - 1) / APART * APART;
    return memory;
}

/* As on the host: one element past an aligned address in the unaligned layout. */
static size_t offset_of(const problem *p, const problem_tensor *t) {
    return p->layout == PROBLEM_UNALIGNED ? (size_t)t->tensor.dtype.bits / 8 : 0;
}

bool problem_to_device(problem *p, const rafter_context *context, enum problem_mode mode) {
    const struct rafter_cuda *cuda = context->cuda;
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        const size_t offset = offset_of(p, t);
        if (t->in_place_of)
            continue;
        t->device = device_memory(cuda, t->memory_bytes + offset);
        if (!t->device)
            return false;
        if (problem_writes(t, mode) && t->plain && !t->accumulates
                ? !cuda->fill(context, t->device + offset, PROBLEM_POISON, t->memory_bytes)
                : t->memory_bytes > 0 && !cuda->copy(t->device + offset, t->memory, t->memory_bytes))
            return false;
        t->tensor.device = context->device;
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

static bool fetch(const problem *p, const problem_tensor *t, const rafter_context *context) {
    return !t->device || t->memory_bytes == 0 ||
           context->cuda->copy(t->memory, t->device + offset_of(p, t), t->memory_bytes);
}

bool problem_from_device(const problem *p, const rafter_context *context) {
    bool good = context->cuda->synchronize(context);
    for (int i = 0; i < p->tensors && good; i++)
        good = fetch(p, &p->tensor[i], context);
    return good;
}

/* Only the elements that a sampled oracle has answers for. */
static bool fetch_listed(const problem_tensor *t, const rafter_context *context) {
    const struct rafter_cuda *cuda = context->cuda;
    const size_t count = (size_t)t->listed, element = (size_t)t->tensor.dtype.bits / 8;
    int64_t *index = malloc(count * sizeof *index + 1);
    char *values = malloc(count * element + 1);
    void *index_there = cuda->allocate(count * sizeof *index), *values_there = cuda->allocate(count * element);
    bool good = index && values && index_there && values_there;
    for (size_t k = 0; k < count && good; k++)
        index[k] = t->list[k].index;
    good = good && cuda->copy(index_there, index, count * sizeof *index) &&
           cuda->gather(context, values_there, t->device, index_there, t->listed, (int)element) &&
           cuda->synchronize(context) && cuda->copy(values, values_there, count * element);
    for (size_t k = 0; k < count && good; k++)
        memcpy(t->memory + (size_t)index[k] * element, values + k * element, element);
    cuda->release(index_there);
    cuda->release(values_there);
    free(index);
    free(values);
    return good;
}

bool problem_results_from_device(const problem *p, const rafter_context *context, enum problem_mode mode) {
    bool good = context->cuda->synchronize(context);
    for (int i = 0; i < p->tensors && good; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (problem_writes(t, mode))
            good = t->device && problem_is_sampled(t) ? fetch_listed(t, context) : fetch(p, t, context);
    }
    return good;
}

bool problem_tensor_from_device(const problem *p, const problem_tensor *t, const rafter_context *context) {
    return context->cuda->synchronize(context) && fetch(p, t, context);
}

bool problem_poison_device(const problem *p, const rafter_context *context, enum problem_mode mode) {
    bool good = true;
    for (int i = 0; i < p->tensors && good; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (problem_writes(t, mode) && t->device && t->memory_bytes > 0)
            good = context->cuda->fill(context, t->device + offset_of(p, t), PROBLEM_POISON, t->memory_bytes);
    }
    return good;
}

void problem_leave_device(problem *p, const rafter_context *context) {
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (t->device && !in_arena(t->device))
            context->cuda->release(t->device);
        t->device = NULL;
        t->tensor.device = (DLDevice){kDLCPU, 0};
        t->tensor.data = t->memory;
    }
    arena_used = 0;
}

rafter_status problem_call(problem *p, rafter_context *context, enum problem_mode mode) {
    if (!context->cuda)
        return p->op->call(p, context, mode);
    rafter_status status = RAFTER_OUT_OF_MEMORY;
    if (problem_to_device(p, context, mode)) {
        status = p->op->call(p, context, mode);
        if (status == RAFTER_OK && !problem_from_device(p, context))
            status = RAFTER_DEVICE_ERROR;
    }
    problem_leave_device(p, context);
    return status;
}

#include "harness/problem.h"

#include <stdlib.h>
#include <string.h>

#include "core/backend.h"

/* Device memory for small tensors, cut from one block that is kept: thousands of problems are run. With
 * RAFTER_TEST_EXACT_MEMORY set every tensor gets an allocation of its own, so that a memory checker sees its bounds. */
enum { ARENA_BYTES = 64 << 20, APART = 1024 };
static char *arena;
static size_t arena_used;

static char *device_memory(const struct rafter_cuda *cuda, size_t bytes, bool *own) {
    *own = getenv("RAFTER_TEST_EXACT_MEMORY") || bytes + APART > ARENA_BYTES - arena_used;
    if (*own)
        return cuda->allocate(bytes);
    if (!arena)
        arena = cuda->allocate(ARENA_BYTES);
    if (!arena)
        return NULL;
    char *memory = arena + arena_used;
    arena_used += (bytes + APART - 1) / APART * APART;
    return memory;
}

static rafter_status call_on_device(problem *p, rafter_context *context, enum problem_mode mode) {
    const struct rafter_cuda *cuda = context->cuda;
    char *memory[PROBLEM_TENSORS] = {NULL};
    bool own[PROBLEM_TENSORS] = {false}, good = true;
    arena_used = 0;
    for (int i = 0; i < p->tensors && good; i++) {
        problem_tensor *t = &p->tensor[i];
        int shared = -1; /* an in-place tensor uses the memory of its partner */
        for (int j = 0; j < p->tensors && t->in_place_of; j++)
            if (strcmp(p->tensor[j].name, t->in_place_of) == 0)
                shared = j;
        /* The same place within a line as on the host: one element off in the unaligned layout. */
        const size_t offset = p->layout == PROBLEM_UNALIGNED ? (size_t)t->tensor.dtype.bits / 8 : 0;
        if (shared < 0) {
            memory[i] = device_memory(cuda, t->memory_bytes + offset, &own[i]);
            good = memory[i] && (t->memory_bytes == 0 || cuda->copy(memory[i] + offset, t->memory, t->memory_bytes));
        }
        t->tensor.device = context->device;
        t->tensor.data = (shared < 0 ? memory[i] : memory[shared]) + offset;
    }
    rafter_status status = good ? p->op->call(p, context, mode) : RAFTER_OUT_OF_MEMORY;
    if (good && !cuda->synchronize(context))
        status = RAFTER_DEVICE_ERROR;
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (good && status == RAFTER_OK && t->memory_bytes > 0 && memory[i])
            good = cuda->copy(t->memory, t->tensor.data, t->memory_bytes);
        t->tensor.device = (DLDevice){kDLCPU, 0};
        t->tensor.data = t->memory;
    }
    for (int i = 0; i < p->tensors; i++)
        if (own[i])
            cuda->release(memory[i]);
    return good ? status : RAFTER_DEVICE_ERROR;
}

rafter_status problem_call(problem *p, rafter_context *context, enum problem_mode mode) {
    return context->cuda ? call_on_device(p, context, mode) : p->op->call(p, context, mode);
}

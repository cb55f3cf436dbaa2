/* SPDX-License-Identifier: Apache-2.0 */
#include "core/context.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <dlfcn.h>
#include <sys/mman.h>

#include "core/backend.h"
#include "core/kernel_memory.h"
#include "core/pool.h"
#include "core/threads.h"
#include "core/variants.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

const char *rafter_version(void) {
    return STRING(RAFTER_VERSION_MAJOR) "." STRING(RAFTER_VERSION_MINOR) "." STRING(RAFTER_VERSION_PATCH);
}

const char *rafter_status_name(rafter_status status) {
    switch (status) {
    case RAFTER_OK: return "ok";
    case RAFTER_INVALID_ARGUMENT: return "invalid argument";
    case RAFTER_UNSUPPORTED: return "unsupported";
    case RAFTER_LABEL_OUT_OF_RANGE: return "label out of range";
    case RAFTER_OUT_OF_MEMORY: return "out of memory";
    case RAFTER_WORKSPACE_TOO_SMALL: return "workspace too small";
    case RAFTER_DEVICE_ERROR: return "device error";
    case RAFTER_COLLECTIVE_FAILED: return "collective failed";
    case RAFTER_RANKS_DISAGREE: return "ranks disagree";
    }
    return "unknown status";
}

enum { ALIGNMENT = RAFTER_SCRATCH_ALIGNMENT, HUGE_PAGE = 2 << 20 };

/* The size to allocate: a multiple of the alignment, for large blocks of the huge page. 0 if it
 * overflows. */
static size_t block_size(size_t bytes) {
    const size_t alignment = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;
    return bytes > SIZE_MAX - alignment ? 0 : (bytes + alignment - 1) / alignment * alignment;
}

/* The context keeps the last large block that a call released. Training repeats its shapes, so the
 * next call usually fits into it; faulting in fresh pages can take over half of the time of
 * linear_cross_entropy. */
static void *default_allocate(void *user, size_t bytes) {
    rafter_context *const context = user;
    const size_t size = block_size(bytes);
    void *memory = context->spare;
    if (memory && size >= 2 * HUGE_PAGE && size <= context->spare_bytes) {
        context->lent = memory;
        context->spare = NULL;
        return memory;
    }
    if (size == 0)
        return NULL;
    if (size < 2 * HUGE_PAGE)
        return aligned_alloc(ALIGNMENT, size);
    free(context->spare);
    context->spare = NULL;
    memory = aligned_alloc(HUGE_PAGE, size);
#if defined(MADV_HUGEPAGE)
    if (memory)
        madvise(memory, size, MADV_HUGEPAGE); /* only a hint: fewer page faults */
#endif
    return memory;
}

static void default_release(void *user, void *memory, size_t bytes) {
    rafter_context *const context = user;
    const size_t size = block_size(bytes);
    if (size < 2 * HUGE_PAGE || context->spare) {
        free(memory);
        return;
    }
    if (memory != context->lent) /* a lent block keeps spare_bytes, which may be more than this call used */
        context->spare_bytes = size;
    context->lent = NULL;
    context->spare = memory;
}

/* Loads librafter_cuda, which the loader finds beside this library or in its search path, and opens
 * the device. The library is never unloaded: the CUDA runtime does not survive that. */
static rafter_status open_device(rafter_context *context) {
    const rafter_status no = RAFTER_UNSUPPORTED;
    if (context->device.device_type != kDLCUDA)
        return rafter_fail(context, no, "device_type is %d, wanted %d (CPU) or %d (CUDA)",
                           (int)context->device.device_type, (int)kDLCPU, (int)kDLCUDA);
    const char *path = secure_getenv("RAFTER_CUDA_LIBRARY"); /* it names code to run: not in setuid programs */
    void *library =
        dlopen(path && *path ? path : "librafter_cuda.so." STRING(RAFTER_VERSION_MAJOR), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        return rafter_fail(context, no, "the CUDA backend could not be loaded: %s",
                           reason ? reason : "no reason given");
    }
    rafter_cuda_entry *entry = NULL;
    *(void **)&entry = dlsym(library, RAFTER_CUDA_ENTRY);
    const struct rafter_cuda *cuda = entry ? entry() : NULL;
    if (!cuda || cuda->interface != RAFTER_CUDA_INTERFACE)
        return rafter_fail(context, no, "the CUDA backend that was found is of another build of rafter");
    if (strcmp(cuda->shared_headers, RAFTER_SHARED_HEADERS) != 0)
        return rafter_fail(context, no,
                           "the CUDA backend that was found has other structs (%.12s) than librafter (%.12s)",
                           cuda->shared_headers, RAFTER_SHARED_HEADERS);
    const rafter_status status = cuda->open(context);
    if (status == RAFTER_OK)
        context->cuda = cuda;
    return status;
}

static rafter_status set_up(rafter_context *context, const rafter_context_options *options) {
    rafter_context_options o = {0};
    if (options)
        RAFTER_TRY(rafter_take_args(context, "rafter_context_options", options, &o, sizeof o));
    if ((o.allocate != NULL) != (o.release != NULL))
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "%s is NULL, wanted both allocate and release, or neither",
                           o.allocate ? "release" : "allocate");
    RAFTER_TRY(rafter_context_set_batch_invariant(context, o.batch_invariant));
    if (o.threads < 0)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "threads is %d, wanted 0 or more", (int)o.threads);
    if (o.device.device_type != 0)
        context->device = o.device;
    context->stream = o.stream;
    context->threads = o.threads > 0 ? o.threads : rafter_default_threads();
    if (context->threads > RAFTER_MOST_THREADS)
        context->threads = RAFTER_MOST_THREADS;
    context->allocate = o.allocate;
    context->release = o.release;
    context->user = o.user;
    context->parallel = o.parallel;
    context->parallel_user = o.user;
    if (!o.allocate && context->device.device_type == kDLCPU) { /* the CUDA backend sets its own */
        context->allocate = default_allocate;
        context->release = default_release;
        context->user = context;
    }

    const char *variant = getenv("RAFTER_VARIANT");
    if (!variant || !*variant)
        variant = o.variant;
    if (!rafter_allow_variant(context, variant && *variant ? variant : NULL))
        return rafter_fail(context, RAFTER_UNSUPPORTED, "variant is '%s', wanted one that this machine can run",
                           variant);
    if (context->device.device_type != kDLCPU)
        return open_device(context);
    context->kernel_memory =
        aligned_alloc(64, (size_t)RAFTER_THREAD_BYTES * (size_t)(o.parallel ? context->threads : 1));
    return context->kernel_memory
               ? RAFTER_OK
               : rafter_fail(context, RAFTER_OUT_OF_MEMORY, "there is no memory for the context's buffers");
}

/* Why this thread's last rafter_context_create failed. */
static _Thread_local char creation_error[sizeof((rafter_context *)NULL)->error];

rafter_status rafter_context_create(rafter_context **context, const rafter_context_options *options) {
    if (!context)
        return RAFTER_INVALID_ARGUMENT;
    creation_error[0] = '\0';
    *context = malloc(sizeof **context);
    if (!*context) {
        strcpy(creation_error, "there is no memory for a context");
        return RAFTER_OUT_OF_MEMORY;
    }
    **context = (rafter_context){.device = {kDLCPU, 0}};
    const rafter_status status = set_up(*context, options);
    if (status != RAFTER_OK) {
        memcpy(creation_error, (*context)->error, sizeof creation_error);
        free(*context);
        *context = NULL;
    }
    return status;
}

void rafter_context_destroy(rafter_context *context) {
    if (context && context->cuda)
        context->cuda->close(context);
    if (context) {
        free(context->spare);
        free(context->kernel_memory);
    }
    free(context);
}

rafter_status rafter_context_set_stream(rafter_context *context, void *stream) {
    if (!context)
        return RAFTER_INVALID_ARGUMENT;
    if (!context->cuda)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "a stream is set on a CPU context, wanted one for CUDA");
    context->stream = stream;
    context->cuda->set_stream(context);
    return RAFTER_OK;
}

rafter_status rafter_context_set_batch_invariant(rafter_context *context, int32_t batch_invariant) {
    if (!context)
        return RAFTER_INVALID_ARGUMENT;
    if (batch_invariant != 0 && batch_invariant != 1)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "batch_invariant is %d, wanted 0 or 1",
                           (int)batch_invariant);
    context->batch_invariant = batch_invariant;
    return RAFTER_OK;
}

const char *rafter_last_error(const rafter_context *context) {
    if (context)
        return context->error;
    return *creation_error ? creation_error : "context is NULL";
}

rafter_status rafter_bad_labels(rafter_context *context, int32_t *found) {
    if (!context)
        return RAFTER_INVALID_ARGUMENT;
    context->error[0] = '\0';
    if (!found)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "found is NULL, wanted a place for the answer");
    bool any = false;
    if (context->cuda)
        RAFTER_TRY(context->cuda->bad_labels(context, &any));
    *found = any;
    return RAFTER_OK;
}

int rafter_context_threads(const rafter_context *context) {
    return context ? context->threads : 0;
}

size_t rafter_peak_workspace(const rafter_context *context) {
    return context ? context->peak : 0;
}

void rafter_reset_peak_workspace(rafter_context *context) {
    if (context)
        context->peak = context->held;
}

/* No struct of any version is larger. A larger size is a mistake, and reading so far may crash. */
enum { MOST_ARGS_BYTES = 512 };

rafter_status rafter_take_args(rafter_context *context, const char *name, const void *args, void *copy, size_t size) {
    if (!context)
        return RAFTER_INVALID_ARGUMENT;
    context->error[0] = '\0';
    if (!args)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "args is NULL, wanted a %s", name);
    size_t given;
    memcpy(&given, args, sizeof given);
    if (given < sizeof given || given > MOST_ARGS_BYTES)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "%s.size is %zu, wanted sizeof(%s) = %zu", name, given,
                           name, size);
    for (size_t i = size; i < given; i++)
        if (((const char *)args)[i] != 0)
            return rafter_fail(context, RAFTER_UNSUPPORTED,
                               "%s.size is %zu and byte %zu is set, but this library (%s) knows only %zu bytes", name,
                               given, i, rafter_version(), size);
    memset(copy, 0, size);
    memcpy(copy, args, given < size ? given / sizeof(void *) * sizeof(void *) : size); /* never half a pointer */
    return RAFTER_OK;
}

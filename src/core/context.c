#include "core/context.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <dlfcn.h>
#include <omp.h>
#include <sys/mman.h>

#include "core/backend.h"

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
    }
    return "unknown status";
}

enum { ALIGNMENT = RAFTER_SCRATCH_ALIGNMENT, HUGE_PAGE = 2 << 20 };

static void *default_allocate(void *user, size_t bytes) {
    (void)user;
    const size_t alignment = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;
    if (bytes > SIZE_MAX - alignment)
        return NULL;
    const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    void *memory = aligned_alloc(alignment, rounded);
#if defined(MADV_HUGEPAGE)
    if (memory && alignment == HUGE_PAGE)
        madvise(memory, rounded, MADV_HUGEPAGE); /* a wish: large scratch is fresh every time, and faults are costly */
#endif
    return memory;
}

static void default_release(void *user, void *memory, size_t bytes) {
    (void)user, (void)bytes;
    free(memory);
}

/* Loads librafter_cuda (from beside this library, or wherever the loader looks) and lets it adopt the context. It stays
 * loaded: the CUDA runtime does not survive being unloaded. */
static rafter_status open_device(rafter_context *context) {
    if (context->device.device_type != kDLCUDA)
        return RAFTER_UNSUPPORTED;
    const char *path = getenv("RAFTER_CUDA_LIBRARY");
    void *library =
        dlopen(path && *path ? path : "librafter_cuda.so." STRING(RAFTER_VERSION_MAJOR), RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return RAFTER_UNSUPPORTED;
    rafter_cuda_entry *entry = NULL;
    *(void **)&entry = dlsym(library, RAFTER_CUDA_ENTRY);
    const struct rafter_cuda *cuda = entry ? entry() : NULL;
    if (!cuda || cuda->interface != RAFTER_CUDA_INTERFACE)
        return RAFTER_UNSUPPORTED;
    const rafter_status status = cuda->open(context);
    if (status == RAFTER_OK)
        context->cuda = cuda;
    return status;
}

rafter_status rafter_context_create(rafter_context **context, const rafter_context_options *options) {
    if (!context)
        return RAFTER_INVALID_ARGUMENT;
    *context = NULL;

    rafter_context fresh = {.device = {kDLCPU, 0}};
    rafter_context_options o = {0};
    if (options)
        RAFTER_TRY(rafter_take_args(&fresh, "rafter_context_options", options, &o, sizeof o));
    if ((o.allocate != NULL) != (o.release != NULL) || o.threads < 0)
        return RAFTER_INVALID_ARGUMENT;
    if (o.device.device_type != 0)
        fresh.device = o.device;
    fresh.stream = o.stream;
    fresh.threads = o.threads > 0 ? o.threads : omp_get_max_threads();
    fresh.allocate = o.allocate;
    fresh.release = o.release;
    fresh.user = o.user;
    if (!o.allocate && fresh.device.device_type == kDLCPU) { /* another device brings its own */
        fresh.allocate = default_allocate;
        fresh.release = default_release;
    }

    const char *variant = getenv("RAFTER_VARIANT");
    if (!variant || !*variant)
        variant = o.variant;
    fresh.isa = variant ? rafter_isa_named(variant) : rafter_cpu_isa();
    if (fresh.isa > rafter_cpu_isa()) /* unknown names are past the last level */
        return RAFTER_UNSUPPORTED;

    *context = malloc(sizeof fresh);
    if (!*context)
        return RAFTER_OUT_OF_MEMORY;
    **context = fresh;
    if (fresh.device.device_type != kDLCPU) {
        const rafter_status status = open_device(*context);
        if (status != RAFTER_OK) {
            free(*context);
            *context = NULL;
            return status;
        }
    }
    return RAFTER_OK;
}

void rafter_context_destroy(rafter_context *context) {
    if (context && context->cuda)
        context->cuda->close(context);
    free(context);
}

const char *rafter_last_error(const rafter_context *context) {
    return context ? context->error : "context is NULL";
}

int rafter_context_threads(const rafter_context *context) {
    return context->threads;
}

size_t rafter_peak_workspace(const rafter_context *context) {
    return context->peak;
}

void rafter_reset_peak_workspace(rafter_context *context) {
    context->peak = context->held;
}

rafter_status rafter_take_args(rafter_context *context, const char *name, const void *args, void *copy, size_t size) {
    if (!context)
        return RAFTER_INVALID_ARGUMENT;
    context->error[0] = '\0';
    if (!args)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "args is NULL, wanted a %s", name);
    size_t given;
    memcpy(&given, args, sizeof given);
    if (given < sizeof given)
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

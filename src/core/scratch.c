/* SPDX-License-Identifier: Apache-2.0 */
/* In a file of its own because librafter_cuda carries a copy of it. */
#include "core/context.h"

#include <stdint.h>

enum { ALIGNMENT = RAFTER_SCRATCH_ALIGNMENT };

size_t rafter_scratch_request(size_t bytes) {
    return bytes ? bytes + ALIGNMENT - 1 : 0;
}

rafter_status rafter_scratch_take(rafter_context *context, void *workspace, size_t workspace_bytes, size_t bytes,
                                  struct rafter_scratch *scratch) {
    *scratch = (struct rafter_scratch){.bytes = bytes};
    if (bytes == 0)
        return RAFTER_OK;
    if (workspace) {
        const uintptr_t start = (uintptr_t)workspace, aligned = (start + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        if (workspace_bytes < aligned - start || workspace_bytes - (aligned - start) < bytes)
            return rafter_fail(context, RAFTER_WORKSPACE_TOO_SMALL, "workspace_bytes is %zu, wanted %zu",
                               workspace_bytes, rafter_scratch_request(bytes));
        scratch->memory = (char *)workspace + (aligned - start);
    } else {
        scratch->owned = context->allocate(context->user, bytes);
        if (!scratch->owned)
            return rafter_fail(context, RAFTER_OUT_OF_MEMORY, "the allocator returned NULL for %zu bytes of workspace",
                               bytes);
        scratch->memory = scratch->owned;
    }
    context->held += bytes;
    if (context->held > context->peak)
        context->peak = context->held;
    return RAFTER_OK;
}

void rafter_scratch_release(rafter_context *context, struct rafter_scratch *scratch) {
    if (!scratch->memory)
        return;
    context->held -= scratch->bytes;
    if (scratch->owned)
        context->release(context->user, scratch->owned, scratch->bytes);
    scratch->memory = NULL;
}

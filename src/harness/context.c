/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/context.h"

#include "core/context.h"

bool context_on_gpu(const rafter_context *context) {
    return context->cuda != NULL;
}

DLDevice context_device(const rafter_context *context) {
    return context->device;
}

void *context_stream(const rafter_context *context) {
    return context->stream;
}

void context_allow_self_overlap(rafter_context *context) {
    context->allow_self_overlap = true;
}

void context_set_phases(rafter_context *context, struct rafter_phases *phases) {
    context->phases = phases;
}

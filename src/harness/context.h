/* SPDX-License-Identifier: Apache-2.0 */
/* What tests and the bench need to know of a context and the public API does not tell. */
#ifndef RAFTER_HARNESS_CONTEXT_H
#define RAFTER_HARNESS_CONTEXT_H

#include <stdbool.h>

#include "core/threads.h"
#include "rafter/rafter.h"

bool context_on_gpu(const rafter_context *context);
DLDevice context_device(const rafter_context *context);
void *context_stream(const rafter_context *context);

/* Allows outputs with stride 0, so that all data of a call stays in L1. The bench measures the rate
 * of an op's own loops that way. */
void context_allow_self_overlap(rafter_context *context);

/* Lets the calls of the context add the times of their parallel phases; NULL: no longer. */
void context_set_phases(rafter_context *context, struct rafter_phases *phases);

#endif

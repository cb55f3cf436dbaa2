/* SPDX-License-Identifier: Apache-2.0 */
/* scale on the CPU. A row is the last dimension of the ordered and merged views. Rows are cut into parts, and a task
 * takes some rows or one part. */
#include <string.h>

#include "core/pages.h"
#include "core/sizes.h"
#include "core/threads.h"
#include "ops/scale/call.h"
#include "ops/scale/kernels.h"
#include "simd/simd.h"

/* ---- plan and run ---------------------------------------------------------------------------- */

struct plan {
    int64_t rows, length; /* length: of a row */
    int64_t part, parts;  /* elements of a part of a row; parts of a row */
    int64_t per_task;     /* parts per task */
    bool stream;          /* y is written past the caches */
};

static size_t make_plan(const rafter_context *context, const struct rafter_call *common, void *storage) {
    (void)context;
    const struct scale_call *const call = (const void *)common;
    const rafter_view *const y = &call->y;
    struct plan *const plan = storage;
    plan->length = y->shape[y->ndim - 1];
    plan->rows = y->numel / plan->length;
    const int64_t task = rafter_task_elements(y->numel);
    plan->part = min64(plan->length, task);
    plan->parts = ceil_div(plan->length, plan->part);
    plan->per_task = task / plan->part;
    /* In place, y's cache lines are already in the cache: streaming would gain nothing. */
    plan->stream = !call->in_place && (uintptr_t)y->data % (uintptr_t)rafter_dtype_bytes(y->dtype) == 0 &&
                   rafter_should_stream(y, (struct shortest_streamed){.of_others = 3 << 10});
    return 0;
}
_Static_assert(sizeof(struct plan) <= RAFTER_PLAN_BYTES, "raise RAFTER_PLAN_BYTES");

struct work {
    const struct scale_call *call;
    const struct plan *plan;
    const struct scale_kernels *kernels;
    float factor;
};

static void run_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct plan *const plan = work->plan;
    const rafter_view *const x = &work->call->x, *const y = &work->call->y;
    const int last = y->ndim - 1;
    const int64_t end = min64((task + 1) * plan->per_task, plan->rows * plan->parts);
    for (int64_t i = task * plan->per_task; i < end; i++) {
        const int64_t row = i / plan->parts, from = i % plan->parts * plan->part;
        work->kernels->multiply(&(struct scale_part){
            .dtype = y->dtype,
            .stream = plan->stream,
            .x = rafter_at(x, rafter_offset(x, 0, last, row) + from * x->stride[last]),
            .y = rafter_at(y, rafter_offset(y, 0, last, row) + from * y->stride[last]),
            .x_step = x->stride[last],
            .y_step = y->stride[last],
            .n = min64(plan->length - from, plan->part),
            .factor = work->factor,
        });
    }
    v_fence(); /* waits until streamed stores are done */
}

static rafter_status run(rafter_context *context, const struct rafter_call *common, const void *plan_storage,
                         const void *kernels, char *workspace) {
    (void)workspace;
    const struct scale_call *const call = (const void *)common;
    const struct plan *const plan = plan_storage;
    struct work work = {.call = call, .plan = plan, .kernels = kernels};
    memcpy(&work.factor, call->factor, sizeof work.factor); /* at any alignment */
    if (!(call->in_place && work.factor == 1.0f))
        rafter_parallel(context, ceil_div(plan->rows * plan->parts, plan->per_task), run_task, &work);
    return RAFTER_OK;
}

const struct rafter_variant_functions rafter_scale_on_cpu = {NULL, make_plan, run};

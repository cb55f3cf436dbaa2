/* SPDX-License-Identifier: Apache-2.0 */
#include "core/variants.h"

#include <stdio.h>
#include <string.h>

#include "core/backend.h"
#include "core/fp.h"
#include "core/kernel_memory.h"
#include "core/tensor.h"

static const struct rafter_op *const ops[RAFTER_OP_COUNT] = {
#define RAFTER_OP(name) &rafter_op_##name,
#include "ops/ops.inc"
#undef RAFTER_OP
};

/* The rows of the context's kind of device. CUDA rows with functions come from librafter_cuda. */
static const struct rafter_variant *rows_of(const rafter_context *context, const struct rafter_op *op, int *count) {
    *count = context->cuda ? op->cuda_count : op->cpu_count;
    return !context->cuda ? op->cpu : context->cuda->rows[op->index];
}

static const struct rafter_variant *find(const struct rafter_variant *rows, int count, const char *name) {
    for (int i = 0; name && i < count; i++)
        if (strcmp(rows[i].name, name) == 0)
            return &rows[i];
    return NULL;
}

/* NULL if the device can run the row at all. */
static const char *device_lacks(const rafter_context *context, const struct rafter_variant *row) {
    if (!context->cuda)
        return row->level > (int)context->isa ? "this CPU, or RAFTER_VARIANT, does not allow its instructions" : NULL;
    const int level = 10 * context->compute_capability;
    if (row->level % 10 != 0)
        return level == row->level - 1 ? NULL : "it runs on compute capability 9.0 only";
    return level >= row->level ? NULL : "the GPU's compute capability is too low";
}

static const char *why_not(const rafter_context *context, const struct rafter_call *call,
                           const struct rafter_variant *row, struct rafter_plan *plan, size_t *least_budget) {
    const char *reason = device_lacks(context, row);
    if (!reason && row->functions->why_not)
        reason = row->functions->why_not(context, call);
    if (reason)
        return reason;
    plan->variant = row;
    plan->workspace_bytes = row->functions->plan(context, call, plan->own.storage);
    const size_t request = rafter_scratch_request(plan->workspace_bytes);
    if (call->budget == 0 || request <= call->budget)
        return NULL;
    if (*least_budget == 0 || request < *least_budget)
        *least_budget = request;
    return "it takes more workspace than the budget";
}

/* No row serves the call. None of their reasons is better than the others, so the message has all,
 * each with the first row that gave it. */
static rafter_status fail_for_all_reasons(rafter_context *context, const struct rafter_op *op) {
    char reasons[400] = ": there is none for this device";
    size_t used = 0;
    for (int i = 0; i < context->considered_count; i++) {
        const struct rafter_considered *const row = &context->considered[i];
        bool said = false;
        for (int k = 0; k < i; k++)
            said |= strcmp(context->considered[k].reason, row->reason) == 0;
        const size_t wanted = said ? 0 : strlen(row->variant) + strlen(row->reason) + 5;
        if (wanted == 0 || used + wanted >= sizeof reasons)
            continue;
        used += (size_t)snprintf(reasons + used, sizeof reasons - used, "%s %s (%s)", used == 0 ? ":" : ",",
                                 row->variant, row->reason);
    }
    return rafter_fail(context, RAFTER_UNSUPPORTED, "no variant of %s serves this call%s", op->name, reasons);
}

/* Walks the op's rows in order of preference and plans the call with the first one that serves
 * it. */
static rafter_status pick(rafter_context *context, const struct rafter_op *op, const struct rafter_call *call,
                          struct rafter_plan *plan) {
    int count;
    const struct rafter_variant *const rows = rows_of(context, op, &count);
    const struct rafter_variant *const forced = find(rows, count, context->forced);
    size_t least_budget = 0;
    const char *reason = NULL;
    for (int i = 0; i < count; i++) {
        if (forced && forced != &rows[i])
            continue;
        reason = why_not(context, call, &rows[i], plan, &least_budget);
        if (context->considered_count < RAFTER_MOST_CONSIDERED)
            context->considered[context->considered_count++] = (struct rafter_considered){rows[i].name, reason};
        if (!reason)
            return RAFTER_OK;
    }
    if (least_budget > 0)
        return rafter_fail(context, RAFTER_WORKSPACE_TOO_SMALL,
                           "budget is %zu bytes of workspace, wanted at least %zu, or 0 for no limit", call->budget,
                           least_budget);
    if (forced)
        return rafter_fail(context, RAFTER_UNSUPPORTED, "variant '%s' of %s does not serve this call: %s", forced->name,
                           op->name, reason);
    return fail_for_all_reasons(context, op);
}

rafter_status rafter_begin_call(rafter_context *context, const char *name, const void *args, void *copy, size_t size,
                                rafter_direction direction) {
    if (context)
        context->owed_count = 0;
    RAFTER_TRY(rafter_take_args(context, name, args, copy, size));
    context->taken_count = 0;
    if (direction == RAFTER_FORWARD || direction == RAFTER_BACKWARD)
        return RAFTER_OK;
    return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "direction is %d, wanted 0 (forward) or 1 (backward)",
                       (int)direction);
}

rafter_status rafter_run(rafter_context *context, const struct rafter_op *op, const struct rafter_call *call) {
    RAFTER_QUIET_FP;
    context->considered_count = 0;
    if (call->empty)
        return RAFTER_OK;
    RAFTER_TRY(rafter_want_unused(context, "workspace", call->workspace, call->workspace_bytes));
    struct rafter_plan *const plan = &context->plan;
    RAFTER_TRY(pick(context, op, call, plan));
    if (context->cuda)
        return context->cuda->run(context, op->name, call, plan);
    struct rafter_scratch scratch;
    RAFTER_TRY(rafter_scratch_take(context, call->workspace, call->workspace_bytes, plan->workspace_bytes, &scratch));
    const struct rafter_variant *const row = plan->variant;
    rafter_thread_memory = context->kernel_memory;
    const rafter_status status = row->functions->run(context, call, plan->own.storage, row->kernels, scratch.memory);
    rafter_scratch_release(context, &scratch);
    return status;
}

rafter_status rafter_ask_workspace(rafter_context *context, const struct rafter_op *op, const struct rafter_call *call,
                                   size_t *bytes) {
    RAFTER_QUIET_FP;
    context->considered_count = 0;
    if (!bytes)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "bytes is NULL, wanted a place for the answer");
    context->plan.workspace_bytes = 0;
    if (!call->empty)
        RAFTER_TRY(pick(context, op, call, &context->plan));
    *bytes = rafter_scratch_request(context->plan.workspace_bytes);
    return RAFTER_OK;
}

bool rafter_allow_variant(rafter_context *context, const char *name) {
    context->isa = rafter_cpu_isa();
    context->forced = NULL;
    if (!name)
        return true;
    const enum rafter_isa isa = rafter_isa_named(name);
    if (isa < RAFTER_ISA_COUNT) {
        context->isa = isa;
        return isa <= rafter_cpu_isa();
    }
    for (int o = 0; o < RAFTER_OP_COUNT && !context->forced; o++) {
        const struct rafter_variant *const row = find(ops[o]->cuda, ops[o]->cuda_count, name);
        context->forced = row ? row->name : NULL;
    }
    return context->forced != NULL;
}

/* ---- for callers ----------------------------------------------------------------------------- */

const char *rafter_op_name(int index) {
    return index >= 0 && index < RAFTER_OP_COUNT ? ops[index]->name : NULL;
}

int rafter_describe_variant(const rafter_context *context, const char *op, int index, const char **variant,
                            const char **reason) {
    for (int o = 0; context && op && index >= 0 && o < RAFTER_OP_COUNT; o++) {
        if (strcmp(ops[o]->name, op) != 0)
            continue;
        int count;
        const struct rafter_variant *const rows = rows_of(context, ops[o], &count);
        if (index >= count)
            return 0;
        if (variant)
            *variant = rows[index].name;
        if (reason)
            *reason = device_lacks(context, &rows[index]);
        return 1;
    }
    return 0;
}

int rafter_considered_variant(const rafter_context *context, int index, const char **variant, const char **reason) {
    if (!context || index < 0 || index >= context->considered_count)
        return 0;
    if (variant)
        *variant = context->considered[index].variant;
    if (reason)
        *reason = context->considered[index].reason;
    return 1;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The library on a CUDA device, where the row's tensors are. */
#include "core/backend.h"
#include "provider.h"

static bool call_in(struct session *s, rafter_context *context) {
    rafter_reset_peak_workspace(context);
    const rafter_status status = s->problem.op->call(&s->problem, context, s->mode);
    s->scratch = rafter_peak_workspace(context);
    return status == RAFTER_OK || session_fail(s, "%s: %s", rafter_status_name(status), rafter_last_error(context));
}

static bool call(struct session *s) {
    return call_in(s, s->context);
}

static bool timed(struct session *s, double *seconds) {
    return time_call_on_device(s, call, seconds);
}

static bool collect(struct session *s) {
    return problem_results_from_device(&s->problem, s->context, s->mode) ||
           session_fail(s, "the results could not be copied from the device");
}

static bool serves(const struct provider *provider, const problem *p, enum problem_mode mode) {
    (void)provider;
    return p->op->algorithm_modes[p->algorithm] >> mode & 1;
}

/* By the library's own count, which must be what the device handed out: a context keeps its scratch memory, so a new
 * one is asked, for this call alone. */
static bool memory(struct session *s, double *bytes) {
    rafter_context *fresh = NULL;
    const rafter_context_options options = {.size = sizeof options, .device = s->context->device};
    if (rafter_context_create(&fresh, &options) != RAFTER_OK)
        return session_fail(s, "no second context");
    const int64_t before = fresh->cuda->pool_bytes(fresh);
    bool good =
        call_in(s, fresh) && (fresh->cuda->synchronize(fresh) || session_fail(s, "the call failed on the device"));
    const double taken = (double)(fresh->cuda->pool_bytes(fresh) - before), rounding = 2 << 20;
    rafter_context_destroy(fresh);
    if (good && (taken > (double)s->scratch + rounding || (double)s->scratch > taken + rounding))
        good = session_fail(s, "it counts %zu bytes of workspace, and the device handed out %.0f", s->scratch, taken);
    *bytes = result_bytes(s) + (double)s->scratch;
    return good;
}

const struct provider provider_cuda = {.name = "rafter",
                                       .exact = true,
                                       .ours = true,
                                       .device = true,
                                       .serves = serves,
                                       .time = timed,
                                       .memory = memory,
                                       .collect = collect};

/* SPDX-License-Identifier: Apache-2.0 */
/* Rafter on a GPU, where the row's tensors are. */
#include "harness/context.h"
#include "harness/gpu.h"
#include "harness/variants.h"
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

/* Uses the library's own count, and checks it against what the device's memory pool handed out. A
 * context keeps its scratch memory, so the call is made on a new one. */
static bool memory(struct session *s, double *bytes) {
    const rafter_context_options options = {.size = sizeof options, .device = context_device(s->context)};
    rafter_context *fresh = s->variant ? variant_context(s->variant, options) : NULL;
    if (!s->variant)
        rafter_context_create(&fresh, &options);
    if (!fresh)
        return session_fail(s, "a second context could not be created");
    const int64_t before = gpu_pool_bytes(fresh);
    bool good = call_in(s, fresh) && (gpu_synchronize(fresh) || session_fail(s, "the call failed on the device"));
    const double taken = (double)(gpu_pool_bytes(fresh) - before), rounding = 2 << 20;
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

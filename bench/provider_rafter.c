/* SPDX-License-Identifier: Apache-2.0 */
/* Rafter on the CPU, with the problem's algorithm and the session's variant. */
#include "provider.h"

static bool serves(const struct provider *provider, const problem *p, enum problem_mode mode) {
    (void)provider;
    return p->op->algorithm_modes[p->algorithm] >> mode & 1;
}

static bool call(struct session *s) {
    rafter_reset_peak_workspace(s->context);
    const rafter_status status = s->problem.op->call(&s->problem, s->context, s->mode);
    s->scratch = rafter_peak_workspace(s->context);
    if (status != RAFTER_OK)
        return session_fail(s, "%s: %s", rafter_status_name(status), rafter_last_error(s->context));
    return true;
}

static bool timed(struct session *s, double *seconds) {
    return time_call(s, call, seconds);
}

const struct provider provider_rafter = {
    .name = "rafter", .exact = true, .ours = true, .serves = serves, .time = timed};

/* The library on a CUDA device: the problem's tensors are copied there once, and calls are timed by the device's
 * events. */
#include <stdlib.h>

#include "core/backend.h"
#include "provider.h"

struct on_device {
    void *before, *after; /* events */
    void *other;          /* what fills L2 between repeats */
    size_t other_bytes;
};

static bool open_device(struct session *s) {
    const struct rafter_cuda *cuda = s->context->cuda;
    struct on_device *d = calloc(1, sizeof *d);
    if (!d)
        return session_fail(s, "no memory");
    s->state = d;
    struct rafter_cuda_facts facts;
    cuda->facts(s->context, &facts);
    d->before = cuda->event();
    d->after = cuda->event();
    d->other_bytes = 4 * (size_t)facts.l2_bytes;
    d->other = s->pace->warm ? NULL : cuda->allocate(d->other_bytes);
    if (!d->before || !d->after || (!d->other && !s->pace->warm) || !problem_to_device(&s->problem, s->context))
        return session_fail(s, "no memory on the device");
    return true;
}

static bool call(struct session *s) {
    rafter_reset_peak_workspace(s->context);
    const rafter_status status = s->problem.op->call(&s->problem, s->context, s->mode);
    s->scratch = rafter_peak_workspace(s->context);
    return status == RAFTER_OK || session_fail(s, "%s: %s", rafter_status_name(status), rafter_last_error(s->context));
}

static bool time_device(struct session *s, double *seconds) {
    const struct rafter_cuda *cuda = s->context->cuda;
    struct on_device *d = s->state;
    if (d->other)
        cuda->fill(s->context, d->other, 0, d->other_bytes);
    else if (!call(s))
        return false;
    cuda->record(s->context, d->before);
    const bool good = call(s);
    cuda->record(s->context, d->after);
    *seconds = 1e-3 * cuda->elapsed(d->before, d->after);
    return good && (*seconds > 0 || session_fail(s, "the device reported no time: a kernel failed"));
}

static void collect_device(struct session *s) {
    problem_from_device(&s->problem, s->context);
}

static void close_device(struct session *s) {
    const struct rafter_cuda *cuda = s->context->cuda;
    struct on_device *d = s->state;
    if (!d)
        return;
    cuda->synchronize(s->context);
    problem_leave_device(&s->problem, s->context);
    cuda->release(d->other);
    cuda->forget(d->before);
    cuda->forget(d->after);
    free(d);
    s->state = NULL;
}

static bool serves(const problem *p, enum problem_mode mode) {
    return p->op->algorithm_modes[p->algorithm] >> mode & 1;
}

const struct provider provider_cuda = {.name = "rafter",
                                       .exact = true,
                                       .ours = true,
                                       .device = true,
                                       .serves = serves,
                                       .open = open_device,
                                       .time = time_device,
                                       .collect = collect_device,
                                       .close = close_device};

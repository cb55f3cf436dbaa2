/* SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "harness/gpu.h"
#include "provider.h"

bool session_open(struct session *s) {
    if (s->provider->isolated)
        return child_open(s);
    return !s->provider->open || s->provider->open(s);
}

bool session_time(struct session *s, double *seconds) {
    return s->provider->isolated ? child_time(s, seconds) : s->provider->time(s, seconds);
}

bool session_collect(struct session *s) {
    if (s->provider->isolated)
        return child_collect(s);
    return !s->provider->collect || s->provider->collect(s);
}

void session_close(struct session *s) {
    if (s->provider->isolated)
        child_close(s);
    else if (s->provider->close)
        s->provider->close(s);
}

bool time_call(struct session *s, bool (*call)(struct session *), double *seconds) {
    if (s->pace->warm) {
        if (!call(s))
            return false;
    } else {
        pace_evict(s->pace, s->provider->ours ? s->context : NULL);
    }
    const double start = clock_seconds();
    const bool good = call(s);
    *seconds = s->host_seconds = clock_seconds() - start;
    return good;
}

bool time_call_on_device(struct session *s, bool (*call)(struct session *), double *seconds) {
    if (!s->pace->warm)
        pace_evict_device(s->pace, s->context);
    else if (!call(s))
        return false;
    gpu_record(s->context, s->pace->before);
    const double start = clock_seconds();
    const bool good = call(s);
    s->host_seconds = clock_seconds() - start;
    gpu_record(s->context, s->pace->after);
    *seconds = 1e-3 * gpu_elapsed(s->pace->before, s->pace->after);
    return good && (*seconds > 0 || session_fail(s, "the device reported no time: a kernel failed"));
}

double session_limit(const struct session *s, double otherwise) {
    return s->limit > 0 ? s->limit : s->provider->limit > 0 ? s->provider->limit : otherwise;
}

bool session_fail(struct session *s, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(s->reason, sizeof s->reason, format, values);
    va_end(values);
    return false;
}

bool process_wait(pid_t pid, double grace, int *status) {
    const double deadline = clock_seconds() + grace;
    const struct timespec pause = {.tv_nsec = 5000000};
    pid_t got;
    while ((got = waitpid(pid, status, WNOHANG)) == 0 && clock_seconds() < deadline)
        nanosleep(&pause, NULL);
    if (got != 0)
        return true;
    kill(pid, SIGKILL);
    waitpid(pid, status, 0);
    return false;
}

bool list_has(const char *list, const char *name) {
    const size_t length = strlen(name);
    while (list) {
        if (strncmp(list, name, length) == 0 && (list[length] == ',' || list[length] == '\0'))
            return true;
        list = strchr(list, ',');
        list = list ? list + 1 : NULL;
    }
    return false;
}

size_t tensor_bytes(const problem_tensor *t) {
    return (size_t)(t->numel * problem_dtype_bytes(t->dtype));
}

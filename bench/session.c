#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/tensor.h"
#include "provider.h"

bool session_open(struct session *s) {
    if (s->provider->isolated)
        return child_open(s);
    return !s->provider->open || s->provider->open(s);
}

bool session_time(struct session *s, double *seconds) {
    return s->provider->isolated ? child_time(s, seconds) : s->provider->time(s, seconds);
}

void session_collect(struct session *s) {
    if (s->provider->isolated)
        child_collect(s);
    else if (s->provider->collect)
        s->provider->collect(s);
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
        pace_evict(s->pace);
    }
    const double start = clock_seconds();
    const bool good = call(s);
    *seconds = clock_seconds() - start;
    return good;
}

bool session_fail(struct session *s, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(s->reason, sizeof s->reason, format, values);
    va_end(values);
    return false;
}

bool title_has(const problem *p, const char *field) {
    const size_t length = strlen(field);
    for (const char *at = p->title; (at = strstr(at, field)) != NULL; at++)
        if ((at == p->title || at[-1] == '-') && (at[length] == '-' || at[length] == '\0'))
            return true;
    return false;
}

bool writes_tensor(enum problem_mode mode, const problem_tensor *t) {
    return (t->role == PROBLEM_OUTPUT && mode != PROBLEM_BACKWARD) ||
           (t->role == PROBLEM_GRADIENT && mode != PROBLEM_FORWARD);
}

size_t tensor_bytes(const problem_tensor *t) {
    return (size_t)(t->numel * rafter_dtype_bytes(t->dtype));
}

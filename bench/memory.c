/* SPDX-License-Identifier: Apache-2.0 */
/* What a call takes beyond its inputs: what it writes for its caller, what forward left for backward, and scratch. The
 * inputs are the op's own and, in backward, the upstream gradients. */
#include <stdio.h>
#include <string.h>

#include "provider.h"

bool kept_for_backward(const problem *p, const problem_tensor *t) {
    const bool softmax = strcmp(p->op->op, "act") == 0 && title_has(p, "act_softmax");
    return t->role == PROBLEM_OUTPUT &&
           (strcmp(t->name, "lse") == 0 || strcmp(t->name, "relu_mask") == 0 || (softmax && strcmp(t->name, "y") == 0));
}

double result_bytes(const struct session *s) {
    double bytes = 0;
    for (int i = 0; i < s->problem.tensors; i++) {
        const problem_tensor *t = &s->problem.tensor[i];
        const bool kept = s->mode == PROBLEM_BACKWARD && kept_for_backward(&s->problem, t);
        if ((problem_writes(t, s->mode) || kept) && !t->in_place_of)
            bytes += (double)tensor_bytes(t);
    }
    return bytes;
}

/* "VmRSS" or "VmHWM", in bytes; 0 where the kernel does not say. */
static double process_bytes(const char *name) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[128], format[32];
    unsigned long long kibibytes = 0;
    snprintf(format, sizeof format, "%s: %%llu", name);
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, format, &kibibytes) == 1)
            break;
    if (file)
        fclose(file);
    return 1024.0 * (double)kibibytes;
}

/* From here on VmHWM is the peak since now. */
static bool reset_peak(void) {
    FILE *file = fopen("/proc/self/clear_refs", "w");
    const bool good = file && fputs("5", file) >= 0;
    return file && fclose(file) == 0 && good;
}

bool session_memory(struct session *s, double *bytes) {
    if (s->provider->memory)
        return s->provider->memory(s, bytes);
    *bytes = result_bytes(s) + (double)s->scratch; /* of the calls so far */
    const double long_call = 0.2;                  /* seconds; then one more to check the count is too much */
    if (!s->provider->ours || s->host_seconds > long_call)
        return true;
    const bool measured = reset_peak();
    const double before = process_bytes("VmRSS");
    double seconds;
    if (!session_time(s, &seconds))
        return false;
    *bytes = result_bytes(s) + (double)s->scratch;
    /* The results' pages are there already, so the process may grow by the scratch, and by stacks and the like. */
    const double grown = process_bytes("VmHWM") - before, slack = 16 << 20;
    if (measured && grown > (double)s->scratch + slack)
        return session_fail(s, "it counts %zu bytes of workspace, and the process grew by %.0f", s->scratch, grown);
    return true;
}

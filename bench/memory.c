/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of a call beyond its inputs: results, tensors that forward kept for backward, and
 * scratch. Inputs are the op's own and, in backward, the upstream gradients. */
#include <stdio.h>
#include <string.h>

#include "provider.h"

bool kept_for_backward(const problem *p, const problem_tensor *t) {
    const bool softmax = strcmp(p->op->op, "act") == 0 && p->options.act == RAFTER_ACT_SOFTMAX;
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

/* "VmRSS" or "VmHWM", in bytes; 0: the kernel does not tell. */
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

/* Resets VmHWM, the peak of the process's memory, to what it uses now. */
static bool reset_peak(void) {
    FILE *file = fopen("/proc/self/clear_refs", "w");
    const bool good = file && fputs("5", file) >= 0;
    return file && fclose(file) == 0 && good;
}

bool session_memory(struct session *s, double *bytes) {
    if (s->provider->memory)
        return s->provider->memory(s, bytes);
    *bytes = result_bytes(s) + (double)s->scratch; /* of the calls so far */
    const double long_call = 0.2;                  /* seconds; then one more call to check the count takes too long */
    if (!s->provider->ours || s->host_seconds > long_call)
        return true;
    const bool measured = reset_peak();
    const double before = process_bytes("VmRSS");
    double seconds;
    if (!session_time(s, &seconds))
        return false;
    *bytes = result_bytes(s) + (double)s->scratch;
    /* The results' pages exist already, so the process may grow only by the scratch, and by stacks
     * and such. */
    const double grown = process_bytes("VmHWM") - before, slack = 16 << 20;
    if (measured && grown > (double)s->scratch + slack)
        return session_fail(s, "it counts %zu bytes of workspace, and the process grew by %.0f", s->scratch, grown);
    return true;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A provider runs problems: Rafter with an algorithm or a variant, a naive C version, another
 * library. One column of a table is one provider (for Rafter, one algorithm or variant); one cell
 * is one session, from open to close.
 *
 * Every provider of a row works on the same tensors. It reads what to compute from the problem: the
 * op, the tensors by name, and the options (struct problem_options); the session has the mode.
 */
#ifndef RAFTER_BENCH_PROVIDER_H
#define RAFTER_BENCH_PROVIDER_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "harness/problem.h"
#include "measure.h"

struct session {
    const struct provider *provider;
    problem problem; /* shares tensors with the row's; `algorithm` is this column's */
    enum problem_mode mode;
    rafter_context *context; /* forced to `variant`, where that is not NULL */
    const char *variant;     /* Rafter: the variant of this column; NULL: the library chooses */
    const struct pace *pace;
    size_t scratch;      /* after a call: the most bytes it held beyond the problem's tensors */
    double host_seconds; /* after a timed call: seconds until the call returned */
    double first_call;   /* seconds of the first call, compiling included, if the provider measures it; else 0 */
    unsigned without;    /* after collecting, bit i set: it does not compute tensor i (torch has no lse) */
    double limit;        /* seconds for opening or a call, if it runs in another process; 0: the provider's */
    char reason[256];    /* why something failed */
    bool missing;        /* it failed because it is not installed, or cannot run here at all */
    bool overwrites;     /* it writes its gradient over its input (a copy of its own) */
    void *state;         /* the provider's own */
    struct child *child; /* the process of an isolated provider */
};

struct provider {
    const char *name;

    /* Held to the op's own error bounds. Others round intermediate results to the tensors' dtype,
     * as frameworks do, and get the tolerance of allow_peer_errors(). */
    bool exact;
    /* Runs in a child process with a time limit, so that a crash or a hang costs only its own
     * cell. */
    bool isolated;
    /* Rafter itself, with a column for each algorithm and, on request, for each variant. */
    bool ours;
    /* Rafter through its PyTorch package: one column, which reports count as Rafter's. */
    bool package;
    bool device;     /* for runs on a GPU; the others are for runs on the CPU */
    bool anywhere;   /* for both */
    int index;       /* among the Python columns */
    double limit;    /* isolated, or in the Python worker: seconds for opening or a call; 0: a minute or more */
    const char *ops; /* Python columns: the ops that have it, as in peers.inc */
    const char *early_gradient; /* ops whose forward also computes the gradient */

    /* Whether it has a column in the tables of this kind. */
    bool (*serves)(const struct provider *provider, const problem *p, enum problem_mode mode);
    /* Plans and allocates. False: it cannot, and `reason` says why. May be NULL. */
    bool (*open)(struct session *s);
    /* Prepares the caches as the pace says and times one call. False: `reason` says why. */
    bool (*time)(struct session *s, double *seconds);
    /* Makes one call and measures the most bytes that it held beyond its inputs. NULL: results,
     * kept tensors and scratch are counted. */
    bool (*memory)(struct session *s, double *bytes);
    /* Copies the last call's results into the problem's tensors; NULL: they are there already. */
    bool (*collect)(struct session *s);
    void (*close)(struct session *s); /* may be NULL */
};

extern const struct provider provider_rafter, provider_naive, provider_onednn, provider_cuda, provider_cudnn;
#define RAFTER_PEER(column, has, early) extern const struct provider provider_##column;
#include "peers.inc"
#undef RAFTER_PEER

/* All providers of this build, NULL-terminated; rafter is the first. */
extern const struct provider *const providers[];

/* ---- sessions -------------------------------------------------------------------------------- */

bool session_open(struct session *s);
bool session_time(struct session *s, double *seconds);
/* Copies the last call's results into the problem's tensors, if they are elsewhere. */
bool session_collect(struct session *s);
void session_close(struct session *s);

/* Implementations of `time` for providers in this process: by the host's clock, or by two events on
 * the context's GPU. */
bool time_call(struct session *s, bool (*call)(struct session *), double *seconds);
bool time_call_on_device(struct session *s, bool (*call)(struct session *), double *seconds);

/* The most bytes that a call holds beyond its inputs (memory.c). */
bool session_memory(struct session *s, double *bytes);

/* Whether backward reads this output of forward, so that a training step keeps it (rafter.h says so
 * op by op). */
bool kept_for_backward(const problem *p, const problem_tensor *t);

/* The part of it that is results, and tensors that forward kept for backward. */
double result_bytes(const struct session *s);

/* Flops per second of a large matrix product by PyTorch on the context's device; 0: there is no
 * PyTorch. */
double peers_matrix_rate(rafter_context *context, const struct pace *pace, rafter_dtype dtype);

/* Forgets the row that the Python worker was told about. */
void peers_forget_row(void);

/* Records why, printf-like, and returns false. */
bool session_fail(struct session *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The time limit of this session, or `otherwise` if neither it nor its provider has one. */
double session_limit(const struct session *s, double otherwise);

/* The same four for isolated providers. */
bool child_open(struct session *s);
bool child_time(struct session *s, double *seconds);
bool child_collect(struct session *s);
void child_close(struct session *s);

/* Waits for a child process to end by itself, and kills it after `grace` seconds. False: it was
 * killed. */
bool process_wait(pid_t pid, double grace, int *status);

/* ---- for providers --------------------------------------------------------------------------- */

/* Whether a list of names separated by commas holds this one. */
bool list_has(const char *list, const char *name);

/* Bytes of a tensor's elements. */
size_t tensor_bytes(const problem_tensor *t);

#endif

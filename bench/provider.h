/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A provider runs problems: Rafter with an algorithm, a plain C version, another library. One column of a table is one
 * provider (for Rafter: one algorithm of it); one cell is one session, from open to close.
 *
 * Every provider of a row works on the same tensors. What it is to compute it reads from the problem: the op, the mode,
 * the tensors by name, and the options from the title ("...-act_softmax-dim_-2-bf16"), which says all that a table
 * fixes.
 */
#ifndef RAFTER_BENCH_PROVIDER_H
#define RAFTER_BENCH_PROVIDER_H

#include <stdbool.h>
#include <stddef.h>

#include "harness/problem.h"
#include "measure.h"

struct session {
    const struct provider *provider;
    problem problem; /* shares tensors with the row's; `algorithm` is this column's */
    enum problem_mode mode;
    rafter_context *context;
    const struct pace *pace;
    size_t scratch;      /* after a call: the most bytes it held beyond the problem's tensors */
    double host_seconds; /* after a timed call: until it came back, where that is not when it was done */
    double first_call;   /* seconds, where the provider measures that itself: what compiles does so then */
    unsigned without;    /* after collecting: bit i set: it does not give the problem's tensor i (torch has no lse) */
    double limit;        /* seconds that a process of its own has for opening or a call; 0: the provider's */
    char reason[256];    /* why something failed */
    bool missing;        /* it failed because it is not installed, or cannot run here at all */
    bool overwrites;     /* its gradient takes the place of its input, of which it has a copy of its own */
    void *state;         /* the provider's own */
    struct child *child; /* where an isolated provider runs */
};

struct provider {
    const char *name;

    /* Held to the op's own error bounds. Others round intermediate results in the tensors' dtype, as frameworks do, and
     * get the tolerance of allow_peer_errors(). */
    bool exact;
    /* Runs in a child process, with a time limit, so that a crash or a hang takes only its own cell. */
    bool isolated;
    /* The library itself, with a column for each of its algorithms. */
    bool ours;
    /* Works on a CUDA device: it is there when the run is on one, and the others are when it is not. */
    bool device;
    bool anywhere; /* works on either */
    int index;     /* among those of its kind */
    double limit;  /* isolated, or in the Python worker: seconds that opening or a call may take; 0: a minute or more */
    const char *ops;            /* of the Python columns: the ops that have it, between commas */
    const char *early_gradient; /* ops whose forward does backward's work */

    /* Whether it has a column in the tables of this kind. */
    bool (*serves)(const struct provider *provider, const problem *p, enum problem_mode mode);
    /* Plans and allocates. False: it cannot, and `reason` says why. May be NULL. */
    bool (*open)(struct session *s);
    /* Brings the caches to the pace's state and makes one call, timed. False: `reason` says why. */
    bool (*time)(struct session *s, double *seconds);
    /* Makes one call and gives the most bytes that it held beyond its inputs; NULL: what is written, kept and scratch.
     */
    bool (*memory)(struct session *s, double *bytes);
    /* Makes the last call's results appear in the problem's tensors; NULL: they are there. */
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
/* Makes the last call's results appear in the problem's tensors, where they are not there already. */
bool session_collect(struct session *s);
void session_close(struct session *s);

/* What `time` is for a provider whose call runs in this process: on the host's clock, or between two events of the
 * context's device. */
bool time_call(struct session *s, bool (*call)(struct session *), double *seconds);
bool time_call_on_device(struct session *s, bool (*call)(struct session *), double *seconds);

/* The most bytes that a call holds beyond its inputs (memory.c). */
bool session_memory(struct session *s, double *bytes);

/* Whether backward reads this output of forward, so that a training step keeps it (rafter.h says so op by op). */
bool kept_for_backward(const problem *p, const problem_tensor *t);

/* Of that, what is written for the caller and what forward left for backward. */
double result_bytes(const struct session *s);

/* Flops per second of a large matrix product by PyTorch on the context's device; 0 where there is none to ask. */
double peers_matrix_rate(rafter_context *context, const struct pace *pace, rafter_dtype dtype);

/* The row that the Python worker knows is over. */
void peers_forget_row(void);

/* Records why, printf-like, and returns false. */
bool session_fail(struct session *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The seconds that this session has, or `otherwise` where neither it nor its provider says. */
double session_limit(const struct session *s, double otherwise);

/* The same four for isolated providers. */
bool child_open(struct session *s);
bool child_time(struct session *s, double *seconds);
bool child_collect(struct session *s);
void child_close(struct session *s);

/* ---- for providers --------------------------------------------------------------------------- */

/* Whether the title has this field: title_has(p, "act_silu"). */
bool title_has(const problem *p, const char *field);

/* Whether a list of names between commas holds this one. */
bool list_has(const char *list, const char *name);

/* Bytes of a tensor's elements. */
size_t tensor_bytes(const problem_tensor *t);

#endif

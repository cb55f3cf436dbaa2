/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A problem: one call of one op, with all of its tensors. Tests, `rafter check` and `rafter bench` all walk problems.
 *
 * An op's cases.c declares problems (shapes, options, inputs, error bounds, bytes and flops) and calls the public API
 * on them; tests/oracle/<op>.c computes what must come out, in fp64 and from scratch; this harness allocates, fills,
 * lays out and compares. None of it is part of the library.
 */
#ifndef RAFTER_PROBLEM_H
#define RAFTER_PROBLEM_H

#include <stdbool.h>
#include <stdint.h>

#include "rafter/rafter.h"

/* What a call does. BOTH is forward and backward, in one call where the op (or the problem's algorithm) has such a
 * form. */
enum problem_mode { PROBLEM_FORWARD, PROBLEM_BACKWARD, PROBLEM_BOTH, PROBLEM_MODES };
extern const char *const problem_mode_names[]; /* "fwd", "bwd", "fwd+bwd" */

enum problem_role {
    PROBLEM_INPUT,    /* read by forward and backward */
    PROBLEM_OUTPUT,   /* written by forward; backward may read it */
    PROBLEM_UPSTREAM, /* read by backward: the gradient of the output whose name follows the "d" ("dy" of "y") */
    PROBLEM_GRADIENT  /* written by backward: the gradient of the input whose name follows the "d" */
};

enum problem_fill {
    PROBLEM_NORMAL,  /* shift + scale * normal */
    PROBLEM_UNIFORM, /* shift + scale * uniform in [0, 1) */
    PROBLEM_LABELS,  /* integers, uniform in [low, high); one in eight is `ignored` where `some_ignored` */
    PROBLEM_COUNT    /* integers 0, 1, 2, ... modulo high, plus low */
};

/* How tensors lie in memory. Every problem is tested in every layout that its tensors have dimensions for. */
enum problem_layout {
    PROBLEM_COMPACT,
    PROBLEM_GUARDED,    /* ends where an unreadable page begins */
    PROBLEM_UNALIGNED,  /* starts one element past an aligned address */
    PROBLEM_PADDED,     /* rows wider than the last dimension; padding must stay as it was */
    PROBLEM_TRANSPOSED, /* the last two dimensions swapped in memory */
    PROBLEM_EXPANDED,   /* inputs: stride 0 in the first dimension */
    PROBLEM_LAYOUTS,
    PROBLEM_RESIDENT /* bench only: stride 0 in all but the last dimension, outputs too, so that data stays in L1 */
};
extern const char *const problem_layout_names[];

/* Values sprinkled over inputs that have `special` set. */
enum problem_values {
    PROBLEM_ORDINARY,
    PROBLEM_HUGE,         /* some +-1e30 (fp16: +-6e4) */
    PROBLEM_NEGATIVE_INF, /* some -inf, and the whole first row */
    PROBLEM_INFINITE,     /* some +inf */
    PROBLEM_NAN,          /* some NaN */
    PROBLEM_VALUES
};
extern const char *const problem_values_names[];

enum { PROBLEM_TENSORS = 20, PROBLEM_DIMS = 8 };

/* Written to every byte before a call: finite, huge, never an answer (bf16 and fp32 1.3e36, fp16 61280). */
enum { PROBLEM_POISON = 0x7b };

/* One answer of a sampled oracle. */
struct problem_answer {
    int64_t index; /* row-major */
    double value;
};

typedef struct problem_tensor {
    const char *name;
    enum problem_role role;
    rafter_dtype dtype;
    int ndim;
    int64_t numel, shape[PROBLEM_DIMS], stride[PROBLEM_DIMS];

    /* Inputs and upstream gradients: how to fill them. */
    enum problem_fill fill;
    double scale, shift; /* problem_add sets 1 and 0 */
    int64_t low, high, ignored;
    bool some_ignored;
    bool special;      /* takes special values */
    bool compact_only; /* keeps the compact layout (a mask, a scalar) */

    /* Outputs and gradients: |got - want| may be at most absolute + relative * |want|; bf16 and fp16 results may also
     * be one unit in the last place away from the correctly rounded value. */
    double relative, absolute;
    const char *in_place_of; /* name of the tensor whose memory this one shares, or NULL */
    bool accumulates;        /* starts from random values, which the oracle adds to (reads as problem_initial) */

    DLTensor tensor; /* what the call is given */

    /* Behind the scenes. */
    double *exact;    /* the values that the oracle reads, where they are not the stored ones */
    double *expected; /* the oracle's answers, row-major; where it is sampled, these: */
    struct problem_answer *list;
    int64_t listed;
    size_t list_bytes;
    double *initial; /* what an accumulating output held */
    bool plain;      /* row-major, without padding: element i is at i */
    void *mapping;   /* what was mapped: guard page and all */
    size_t mapping_bytes;
    char *memory; /* the tensor's own bytes, padding included */
    size_t memory_bytes;
    char *device;   /* its copy on a device, while it is there */
    char *original; /* an input's bytes, kept where an in-place call destroys them */
} problem_tensor;

typedef struct problem {
    const struct op_cases *op;
    char label[192];            /* options and shapes, for messages: "silu bf16 [3, 1025]" */
    char title[128];            /* bench: what follows "<prefix>-<metric>-<mode>-" in the table's title */
    _Alignas(16) char row[256]; /* the op's own options */
    int algorithm;              /* index into op->algorithms */
    int64_t sample; /* the oracle may answer only for every sample-th independent row or column; 1: all of them */
    enum problem_layout layout;
    enum problem_values values;
    bool finite_differences; /* small and smooth enough for them */
    bool large;              /* only run by the slow label */
    bool for_cuda;           /* of a size that only a GPU treats unlike smaller ones: others leave it out */
    int tensors;
    problem_tensor tensor[PROBLEM_TENSORS];
    rafter_loss_options loss_options; /* storage for the losses' calls */

    /* Of the next calls: the caller's workspace, if any; or, where `ask` is not NULL, only the bytes of workspace that
     * the call would take are wanted, there. A BOTH of two calls cannot be asked. */
    void *workspace;
    size_t workspace_bytes;
    size_t *ask;
} problem;

/* A table of the bench: the seeds' tables of one op differ in `table`. */
struct bench_row {
    int table;
    int64_t x;
    rafter_dtype dtype;
    bool quick;    /* a smaller batch, for `--preset quick` */
    bool resident; /* the same arithmetic per element with rows of at most 4 KiB, for the rate out of L1 */
};

struct bench_table {
    const char *x_name;     /* "v", "n" */
    unsigned modes;         /* bit m set: the table exists in problem_mode m */
    const int64_t *seeds_x; /* zero-terminated */
    const int64_t *quick_x; /* zero-terminated */
};

/* Everything the harness knows about an op; defined in src/ops/<op>/cases.c as rafter_cases_<op>. */
struct op_cases {
    const char *op;
    const char *prefix;            /* of table titles: "lce" */
    const char *const *algorithms; /* names, NULL-terminated; the first is "rafter": the automatic choice */
    unsigned algorithm_modes[8];   /* bit m set: algorithm exists in problem_mode m */

    /* Makes a problem its algorithm's: drops tensors that are for another, sets the bounds that it is held to. False:
     * the algorithm has nothing to do with this problem. NULL: all are for all. */
    bool (*adapt)(problem *p);

    /* Tests: problem number `index` in [0, count()). Declares tensors; the harness allocates. */
    int64_t (*count)(void);
    void (*make)(problem *p, int64_t index);

    /* Bench. */
    int tables;
    const struct bench_table *table;
    void (*make_bench)(problem *p, const struct bench_row *row);

    /* Calls the public API, with p->workspace. A BOTH that has no one-call form is forward and then backward. */
    rafter_status (*call)(const problem *p, rafter_context *context, enum problem_mode mode);

    /* Least bytes through memory and flops of matrix work, for one call. */
    void (*cost)(const problem *p, enum problem_mode mode, double *bytes, double *flops);

    /* Fills `expected` of every output (FORWARD) or gradient (BACKWARD), in fp64, by problem_value() of what is read.
     */
    void (*oracle)(problem *p, enum problem_mode mode);
};

#define RAFTER_OP(name) extern const struct op_cases rafter_cases_##name;
#include "ops/ops.inc"
#undef RAFTER_OP

/* What op->adapt says; to be asked between make (or make_bench) and whatever the problem's algorithm is to do. */
bool problem_adapt(problem *p);

/* All ops, in the order of ops.inc; NULL-terminated. */
extern const struct op_cases *const problem_ops[];

/* ---- for cases.c ----------------------------------------------------------------------------- */

problem_tensor *problem_add(problem *p, const char *name, enum problem_role role, rafter_dtype dtype, int ndim,
                            const int64_t *shape);
problem_tensor *problem_find(const problem *p, const char *name); /* NULL if there is none */
const DLTensor *problem_dl(const problem *p, const char *name);   /* for args; NULL if there is none */
const char *problem_dtype_name(rafter_dtype dtype);

/* ---- numbers --------------------------------------------------------------------------------- */

/* To and from an element of memory, however it is aligned. Rounded to nearest even; by way of fp32 for bf16, which can
 * differ from one rounding in the last place. */
void problem_store(rafter_dtype dtype, char *to, double x);
double problem_load(rafter_dtype dtype, const char *from);

/* Bits that look random, of any number; and of such, a number that looks normally distributed, the sum of four uniform
 * ones: no tails to speak of, and fast. */
uint64_t problem_mix(uint64_t x);
double problem_normal(uint64_t bits);

/* ---- for oracles ----------------------------------------------------------------------------- */

/* Element `index` (row-major) of a tensor as fp64. */
double problem_value(const problem_tensor *t, int64_t index);
/* What an accumulating output held before the call. */
double problem_initial(const problem_tensor *t, int64_t index);
/* Stores the answer. Skipped elements of a sampled oracle are left unset and are not compared. */
void problem_expect(problem_tensor *t, int64_t index, double value);

/* ---- for test and bench ---------------------------------------------------------------------- */

/* Allocates and fills everything in the problem's layout and values; the same seed gives the same data. False: no
 * memory. */
bool problem_allocate(problem *p, uint64_t seed);
void problem_free(problem *p);
/* Whether the layout says anything for this problem's tensors (a vector has no transpose). */
bool problem_has_layout(const problem *p, enum problem_layout layout);
/* Whether a call in this mode writes the tensor. */
bool problem_writes(const problem_tensor *t, enum problem_mode mode);
/* What a call in this mode writes goes back to poison (or to the initial values of accumulating outputs), and inputs
 * that an in-place call has overwritten come back. */
void problem_poison(problem *p, enum problem_mode mode);
/* Calls the oracle; BACKWARD reads the outputs of forward as they are stored, so store or compute them before. */
void problem_solve(problem *p, enum problem_mode mode);
/* Writes the oracle's answers for forward (all of them: sample is 1) into the outputs, for a backward that reads them.
 */
void problem_store_outputs(problem *p);
/* Largest disagreement of the oracle's gradients with finite differences of its forward, relative to the gradient's
 * size. */
double problem_finite_differences(problem *p);

/* Whether answers are so few that fetching those elements beats fetching the tensor. */
static inline bool problem_is_sampled(const problem_tensor *t) {
    return t->plain && t->list && t->listed < t->numel / 8;
}

/* Copies every tensor to the context's device (but poisons there what a call in this mode writes), where calls then
 * find them; copies them back, or one of them, or of what a call in this mode wrote the elements that will be compared
 * (waits for the device); and lets go of the device's memory, also after a failure. */
bool problem_to_device(problem *p, const rafter_context *context, enum problem_mode mode);
bool problem_from_device(const problem *p, const rafter_context *context);
bool problem_tensor_from_device(const problem *p, const problem_tensor *t, const rafter_context *context);
bool problem_results_from_device(const problem *p, const rafter_context *context, enum problem_mode mode);
void problem_leave_device(problem *p, const rafter_context *context);
/* On the device, what a call in this mode writes goes back to poison; nothing may be in place there. */
bool problem_poison_device(const problem *p, const rafter_context *context, enum problem_mode mode);
/* The direction that a call in this mode has; BOTH: of its one-call form. */
static inline rafter_direction problem_direction(enum problem_mode mode) {
    return mode == PROBLEM_BACKWARD ? RAFTER_BACKWARD : RAFTER_FORWARD;
}
/* op->call on the context's device. On CUDA: copies every tensor there, calls, waits, and copies the results back. */
rafter_status problem_call(problem *p, rafter_context *context, enum problem_mode mode);

struct problem_verdict {
    bool good;
    double worst;       /* largest error over its bound, over all compared elements; 1 is the limit */
    double max_error;   /* largest |got - want| / max(1, |want|) */
    char sentence[256]; /* of the worst element when not good: "dx[17] is 0.5, wanted 0.25 (bound 1e-6)" */
};
/* Compares outputs (FORWARD), gradients (BACKWARD) or both with what the oracle expects. */
struct problem_verdict problem_compare(const problem *p, enum problem_mode mode);
/* A digest of all output bytes, for bitwise comparisons. */
uint64_t problem_digest(const problem *p, enum problem_mode mode);

#endif

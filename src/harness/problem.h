/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A problem: one call of one op, with all of its tensors. Tests, `rafter check`, `rafter bench` and
 * `rafter info` all work on problems.
 *
 * An op's cases.c declares problems (shapes, options, inputs, error bounds, bytes and flops) and
 * calls the public API on them; its oracle.c computes the expected results in fp64; this harness
 * allocates, fills, lays out and compares. None of it is linked into the library.
 */
#ifndef RAFTER_HARNESS_PROBLEM_H
#define RAFTER_HARNESS_PROBLEM_H

#include <stdbool.h>
#include <stdint.h>

#include "rafter/rafter.h"

/* What a call does. BOTH is forward and backward, in one call where the op (or the problem's
 * algorithm) has such a form, else in two. */
enum problem_mode { PROBLEM_FORWARD, PROBLEM_BACKWARD, PROBLEM_BOTH, PROBLEM_MODES };
extern const char *const problem_mode_names[]; /* "fwd", "bwd", "fwd+bwd" */

enum problem_role {
    PROBLEM_INPUT,    /* read by forward and backward */
    PROBLEM_OUTPUT,   /* written by forward; backward may read it */
    PROBLEM_UPSTREAM, /* read by backward: "dy" is the gradient with respect to the output "y" */
    PROBLEM_GRADIENT  /* written by backward: "dx" is the gradient with respect to the input "x" */
};

enum problem_fill {
    PROBLEM_NORMAL,  /* shift + scale * normal */
    PROBLEM_UNIFORM, /* shift + scale * uniform in [0, 1) */
    PROBLEM_LABELS,  /* integers, uniform in [low, high); one in eight is `ignored` where `some_ignored` */
    PROBLEM_COUNT    /* integers 0, 1, 2, ... modulo high, plus low */
};

/* Memory layouts. Every problem is tested in every layout for which its tensors have enough dimensions. */
enum problem_layout {
    PROBLEM_COMPACT,
    PROBLEM_GUARDED,    /* ends where an unreadable page begins */
    PROBLEM_UNALIGNED,  /* starts one element past an aligned address */
    PROBLEM_PADDED,     /* rows wider than the last dimension; calls must not change the padding */
    PROBLEM_TRANSPOSED, /* the last two dimensions swapped in memory */
    PROBLEM_EXPANDED,   /* inputs: stride 0 in the first dimension */
    PROBLEM_CROSSED,    /* inputs and upstream gradients transposed, results compact */
    PROBLEM_BROADCAST,  /* upstream gradients: stride 0 in every dimension, as the gradient of a sum */
    PROBLEM_LAYOUTS,
    PROBLEM_RESIDENT, /* bench only: stride 0 in all but the last dimension, outputs too, so that data stays in L1 */
    PROBLEM_SHUFFLED  /* random problems only: any order of dimensions, gaps and offsets, drawn from problem.shuffle */
};
extern const char *const problem_layout_names[];

/* Special values that are scattered over inputs with `special` set. */
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

/* Written to every byte of a result before a call: finite, huge, never a correct result (1.3e36 in
 * bf16 and fp32, 61280 in fp16). */
enum { PROBLEM_POISON = 0x7b };

/* One expected element from a sampled oracle. */
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
    bool special;               /* takes special values */
    bool compact_only;          /* keeps the compact layout (a mask, a scalar) */
    enum problem_layout layout; /* this tensor's own; counts if the problem's is compact */

    const char *laid_out_as; /* name of the tensor whose strides this one has in PROBLEM_SHUFFLED too, or NULL */

    /* Outputs and gradients: |got - want| may be at most absolute + relative * |want|; bf16 and
     * fp16 results may also be one unit in the last place away from the correctly rounded value. */
    double relative, absolute;
    const char *in_place_of; /* name of the tensor whose memory this one shares, or NULL */
    bool accumulates;        /* starts from random values, to which the call adds (problem_initial) */

    DLTensor tensor; /* the argument of the call */

    /* Owned by the harness. */
    double *exact;               /* the values that the oracle reads, where they differ from the stored ones */
    double *expected;            /* the oracle's results, row-major; a sampled oracle has `list` instead */
    struct problem_answer *list; /* `listed` expected elements, in any order */
    int64_t listed;
    size_t list_bytes;
    double *initial; /* the values of an accumulating output before the call */
    bool plain;      /* row-major without padding: element i is at index i */
    void *mapping;   /* the whole mapping, guard page included */
    size_t mapping_bytes;
    char *memory; /* the tensor's bytes, padding included */
    size_t memory_bytes;
    char *device;   /* its copy on a device, or NULL */
    char *original; /* an input's bytes, kept if an in-place call overwrites them */
} problem_tensor;

/* Workspace budgets of linear_cross_entropy: no limit; the smallest that works; twice the
 * smallest. */
enum problem_budget { PROBLEM_NO_BUDGET, PROBLEM_SMALLEST_BUDGET, PROBLEM_SMALL_BUDGET, PROBLEM_BUDGETS };

/* The options of a call. Each op reads the fields that it has an argument for; the others are
 * zero. */
struct problem_options {
    rafter_act_kind act;              /* act, lrpe_cosine */
    int dim;                          /* act (softmax), logsumexp: as the caller gives it, so maybe negative */
    const rafter_communicator *group; /* the same: dim is spread over its ranks */
    rafter_softmax_over softmax_over; /* lrpe_cosine */
    int64_t offset;                   /* lrpe_cosine */
    rafter_loss_options loss;         /* losses; their tensors are found by name */
    bool backward_without_lse;        /* losses: backward gets no lse and computes it again */
    bool backward_without_entropy;    /* linear_cross_entropy: the same for entropy, with dentropy */
    bool native;                      /* linear_cross_entropy: RAFTER_ACCUMULATE_NATIVE */
    enum problem_budget budget;       /* linear_cross_entropy */
};
extern const char *const problem_act_names[];          /* by rafter_act_kind: "none", "relu", ... */
extern const char *const problem_softmax_over_names[]; /* by rafter_softmax_over: "feature", "sequence" */
extern const char *const problem_reduction_names[];    /* by rafter_reduction: "mean", "sum", "none" */

typedef struct problem {
    const struct op_cases *op;
    char label[192]; /* options and shapes, for messages: "silu bf16 [3, 1025]" */
    char title[128]; /* bench, for display only: the table's title after "<prefix>-<metric>-<mode>-" */
    struct problem_options options;
    int algorithm;  /* index into op->algorithms */
    int64_t sample; /* the oracle may answer for only every sample-th row or column; 1: all of them */
    enum problem_layout layout;
    uint64_t shuffle; /* random bits, for PROBLEM_SHUFFLED */
    enum problem_values values;
    bool finite_differences; /* small and smooth enough for them */
    bool large;              /* run only by tests with the label `large` */
    bool for_cuda;           /* of a size that only a GPU treats specially: CPU runs leave it out */
    bool generated;          /* filled by problem_generate: the inputs may be on the device only */
    int tensors;
    problem_tensor tensor[PROBLEM_TENSORS];

    /* The caller's workspace for the next calls, or NULL. If `ask` is not NULL, op->call makes no call: it
     * asks for the bytes of workspace and stores them there. A BOTH of two calls cannot be asked. */
    void *workspace;
    size_t workspace_bytes;
    size_t *ask;
} problem;

/* A row of a bench table. */
struct bench_row {
    int table; /* index into op->table */
    int64_t x;
    rafter_dtype dtype;
    bool quick;    /* a smaller batch, for `--preset quick` */
    bool resident; /* the same arithmetic per element with rows of at most 4 KiB, for the rate out of L1 */
};

struct bench_table {
    const char *x_name;     /* "v", "n" */
    unsigned modes;         /* bit m set: the table exists in problem_mode m */
    const int64_t *seeds_x; /* the rows of `--preset seeds`; zero-terminated */
    const int64_t *quick_x; /* those of `--preset quick`; zero-terminated */
};

/* A call as the command line describes it: `rafter info OP --shape 32768x4096 ...`. */
struct problem_request {
    int ndim; /* of the op's main input: x, or the logits */
    int64_t shape[PROBLEM_DIMS];
    rafter_dtype dtype;
    int64_t classes;   /* linear_cross_entropy */
    bool bias;         /* linear_cross_entropy */
    bool class_weight; /* losses */
    bool extras;       /* losses: row_loss, logprob, entropy, argmax; lrpe_cosine: dtheta */
    bool in_place;     /* results are written over inputs, where the op allows it */
    struct problem_options options;
};

struct dice; /* harness/dice.h */

/* Everything the harness knows about an op; defined in src/ops/<op>/cases.c as
 * rafter_cases_<op>. */
struct op_cases {
    const char *op;
    const char *prefix;            /* of table titles: "lce" */
    const char *const *algorithms; /* names, NULL-terminated; the first is "rafter": the automatic choice */
    unsigned algorithm_modes[8];   /* bit m set: the algorithm exists in problem_mode m */
    unsigned one_call;             /* bit a set: algorithm a does a BOTH in one call */

    /* Adapts a problem to its algorithm: drops tensors that another algorithm uses, sets the
     * bounds. False: the algorithm does not apply to this problem. NULL: every algorithm applies to
     * every problem. */
    bool (*adapt)(problem *p);

    /* Tests: problem number `index` in [0, count()). Declares tensors; the harness allocates. */
    int64_t (*count)(void);
    void (*make)(problem *p, int64_t index);

    /* Bench. */
    int tables;
    const struct bench_table *table;
    int models_from; /* the tables from here on are `--preset models`, with seeds_x as rows; 0: none are */
    void (*make_bench)(problem *p, const struct bench_row *row);

    /* Declares the problem that the request describes. Returns NULL, or a phrase that says what is
     * wrong with the request, such as "wanted a shape of at least 2 dimensions". */
    const char *(*make_request)(problem *p, const struct problem_request *request);

    /* The maps of `rafter bench --preset map`, one per kind of call; none: 0 and NULL. */
    int maps;
    const struct map_kind *map;

    /* Tests of an op without maps: a random problem for p's layout and algorithm. Its matrix products have about `most`
     * multiplications at most. */
    void (*make_random)(problem *p, struct dice *dice, int64_t most);

    /* Calls the public API, with p->workspace. A BOTH without a one-call form is forward, then
     * backward. */
    rafter_status (*call)(const problem *p, rafter_context *context, enum problem_mode mode);

    /* Minimum bytes of memory traffic, and flops of matrix products, of one call. */
    void (*cost)(const problem *p, enum problem_mode mode, double *bytes, double *flops);

    /* Gives problem_expect() every element of every output (FORWARD) or gradient (BACKWARD), in
     * fp64, computed from problem_value() of the tensors that the call reads. */
    void (*oracle)(problem *p, enum problem_mode mode);
};

#define RAFTER_OP(name) extern const struct op_cases rafter_cases_##name;
#include "ops/ops.inc"
#undef RAFTER_OP

/* Calls op->adapt, where there is one. Call it after make or make_bench, before the problem is
 * used. */
bool problem_adapt(problem *p);

/* All ops, in the order of ops.inc; NULL-terminated. */
extern const struct op_cases *const problem_ops[];

/* ---- for cases.c ----------------------------------------------------------------------------- */

problem_tensor *problem_add(problem *p, const char *name, enum problem_role role, rafter_dtype dtype, int ndim,
                            const int64_t *shape);
problem_tensor *problem_find(const problem *p, const char *name); /* NULL if there is none */
const DLTensor *problem_dl(const problem *p, const char *name);   /* for args; NULL if there is none */
const char *problem_dtype_name(rafter_dtype dtype);
int64_t problem_dtype_bytes(rafter_dtype dtype);

/* options.dim, counted from the front, for a tensor of `ndim` dimensions. */
static inline int problem_dim(const problem *p, int ndim) {
    return p->options.dim < 0 ? p->options.dim + ndim : p->options.dim;
}

/* Whether a loss has no option that changes logits or the loss of a row. */
static inline bool problem_is_plain_loss(const problem *p) {
    const rafter_loss_options *const o = &p->options.loss;
    return o->label_smoothing == 0 && o->z_loss == 0 && o->softcap == 0 && o->logit_scale == 0 &&
           !problem_find(p, "bias") && !problem_find(p, "class_weight") && !problem_find(p, "row_weight");
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* Conversions to and from an element in memory, at any alignment. Rounds to nearest even; bf16 is
 * rounded by way of fp32, which can differ from a single rounding in the last place. */
void problem_store(rafter_dtype dtype, char *to, double x);
double problem_load(rafter_dtype dtype, const char *from);

/* A hash of x; and a number made from such bits, about normally distributed: a scaled sum of four
 * uniform numbers, which is cheap and never beyond 3.5. */
uint64_t problem_mix(uint64_t x);
double problem_normal(uint64_t bits);

/* ---- for oracles ----------------------------------------------------------------------------- */

/* Element `index` (row-major) of a tensor as fp64. */
double problem_value(const problem_tensor *t, int64_t index);
/* The value of an accumulating output before the call. */
double problem_initial(const problem_tensor *t, int64_t index);
/* Stores the expected value. Elements that a sampled oracle skips are not compared. */
void problem_expect(problem_tensor *t, int64_t index, double value);

/* ---- for tests and bench --------------------------------------------------------------------- */

/* Allocates and fills all tensors in the problem's layout and values. The same seed gives the same
 * data. False: no memory. */
bool problem_allocate(problem *p, uint64_t seed);
/* Only gives the tensors addresses, for a question about the call (problem_ask): nothing is filled, and
 * pages take memory only once they are read or written. */
bool problem_reserve(problem *p);
void problem_free(problem *p);
/* Gives every tensor its layout and an address in `memory`, which is on `device` and stays the caller's.
 * Returns the bytes that the tensors take; with NULL it only counts them. */
size_t problem_place(problem *p, char *memory, DLDevice device);
/* Fills the inputs and upstream gradients of a placed problem, on its device. On a GPU a kernel draws
 * the numbers; on a CPU a million are drawn and repeated. False: the device failed. */
bool problem_generate(problem *p, const rafter_context *context, uint64_t seed);
/* Whether the layout differs from the compact one for this problem's tensors (a vector has no
 * transpose). */
bool problem_has_layout(const problem *p, enum problem_layout layout);
/* Whether a call in this mode writes the tensor. */
bool problem_writes(const problem_tensor *t, enum problem_mode mode);
/* Whether a call in this mode is one call of the library. */
bool problem_is_one_call(const problem *p, enum problem_mode mode);
/* Fills the results of this mode with poison (accumulating outputs with their initial values), and
 * restores inputs that an in-place call has overwritten. */
void problem_poison(problem *p, enum problem_mode mode);
/* Calls the oracle. BACKWARD reads the stored outputs of forward: store or compute them first. */
void problem_solve(problem *p, enum problem_mode mode);

/* The state of the oracle's results for one mode. They are computed once and serve all variants, except
 * in a BOTH: its gradients depend on the outputs that the call stored, so other outputs need new
 * results. */
struct problem_solution {
    bool solved;
    uint64_t outputs; /* digest of the outputs that a BOTH was solved for */
};

/* Solves the problem after a call, unless the solution is still right. */
void problem_solve_once(problem *p, enum problem_mode mode, struct problem_solution *solution);
/* Writes the oracle's forward results into the outputs, for a backward that reads them. With a sampled
 * oracle (sample > 1) the outputs stay what the last forward call has written. */
void problem_prepare_backward(problem *p);
/* The largest difference between the oracle's gradients and finite differences of its forward,
 * relative to the size of the gradient. */
double problem_finite_differences(problem *p);

/* Whether so few elements are expected that fetching only those beats fetching the tensor. */
static inline bool problem_is_sampled(const problem_tensor *t) {
    return t->plain && t->list && t->listed < t->numel / 8;
}

/* Copies every tensor to the context's device and fills the results of this mode with poison there.
 * Later calls use the copies, until problem_leave_device, which must also be called after a failure. */
bool problem_to_device(problem *p, const rafter_context *context, enum problem_mode mode);
void problem_leave_device(problem *p);
/* Each waits for the device and copies back: every tensor; one tensor; the elements of this mode's
 * results that problem_compare will look at. */
bool problem_from_device(const problem *p, const rafter_context *context);
bool problem_tensor_from_device(const problem *p, const problem_tensor *t, const rafter_context *context);
bool problem_results_from_device(const problem *p, const rafter_context *context, enum problem_mode mode);
/* Poisons this mode's results on the device. No tensor may be in place. */
bool problem_poison_device(const problem *p, const rafter_context *context, enum problem_mode mode);
/* The direction of a call in this mode; BOTH: of the one-call form. */
static inline rafter_direction problem_direction(enum problem_mode mode) {
    return mode == PROBLEM_BACKWARD ? RAFTER_BACKWARD : RAFTER_FORWARD;
}
/* op->call on the context's device. On CUDA: copies every tensor there, calls, waits, and copies
 * back. */
rafter_status problem_call(problem *p, rafter_context *context, enum problem_mode mode);
/* Asks for the workspace of a call whose tensors have been given addresses (problem_reserve, or
 * more). */
rafter_status problem_ask(problem *p, rafter_context *context, enum problem_mode mode, size_t *bytes);
/* The names of the variants that a call in this mode takes: "packed_rows", or, for two calls that
 * take different ones, "packed_rows+columns". The tensors must be on the context's device. Empty:
 * none serves it. */
void problem_variant(problem *p, rafter_context *context, enum problem_mode mode, char *text, size_t size);

struct problem_verdict {
    bool good;
    double worst;       /* largest error over its bound, over all compared elements; 1 is the limit */
    double max_error;   /* largest |got - want| / max(1, |want|) */
    char sentence[256]; /* if not good, the worst element: "dx[17] is 0.5, wanted 0.25 (bound 1e-6)" */
};
/* Compares outputs (FORWARD), gradients (BACKWARD) or both with the oracle's results. */
struct problem_verdict problem_compare(const problem *p, enum problem_mode mode);
/* A digest of all result bytes of this mode, for bitwise comparisons. */
uint64_t problem_digest(const problem *p, enum problem_mode mode);

#endif

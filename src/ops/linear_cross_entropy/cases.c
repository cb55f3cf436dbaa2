/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "harness/dice.h"
#include "harness/gpu.h"
#include "harness/oracle.h"
#include "ops/loss_cases.h"

/* ---- test cases ------------------------------------------------------------------------------ */

struct options {
    struct loss_case loss;
    enum problem_budget budget;
    bool bias;
    bool no_dx, no_dweight, no_dbias; /* gradients that are not requested; dbias needs a bias */
    bool main_gradient;               /* dweight is fp32 and is added to */
    bool f32_gradients;               /* all gradients are fp32 */
    bool native;                      /* accumulate */
    bool without_entropy;             /* with dentropy: backward gets no entropy and computes it again */
};

static const struct options plain = {.loss = {.name = "plain", .extras = true, .ignored = SOME_IGNORED}};

/* In addition to loss_cases. */
static const struct options option_sets[] = {
    {{.name = "bias", .extras = true, .ignored = SOME_IGNORED}, .bias = true},
    {{.name = "bias, dx only", .without_lse = true}, .bias = true, .no_dweight = true, .no_dbias = true},
    {{.name = "bias, dweight only"}, .bias = true, .no_dx = true, .no_dbias = true},
    {{.name = "bias, dbias only"}, .bias = true, .no_dx = true, .no_dweight = true, .budget = PROBLEM_SMALL_BUDGET},
    {{.name = "dx only", .dloss = true}, .no_dweight = true, .budget = PROBLEM_SMALLEST_BUDGET},
    {{.name = "dweight only", .ignored = SOME_IGNORED, .without_lse = true},
     .no_dx = true,
     .budget = PROBLEM_SMALLEST_BUDGET},
    {{.name = "fp32 gradients"}, .f32_gradients = true, .bias = true, .budget = PROBLEM_SMALLEST_BUDGET},
    {{.name = "fp32 gradients, no budget"}, .f32_gradients = true, .bias = true},
    {{.name = "smoothing, z_loss, bias", .smoothing = 0.1f, .z_loss = 0.01f, .ignored = SOME_IGNORED, .extras = true},
     .bias = true},
    {{.name = "dentropy, all, no budget",
      .dentropy = true,
      .smoothing = 0.1f,
      .z_loss = 0.001f,
      .softcap = 5,
      .scale = 2,
      .ignored = SOME_IGNORED,
      .class_weight = true,
      .row_weight = true,
      .denominator = true,
      .dloss = true,
      .extras = true},
     .bias = true},
    {{.name = "main gradient", .dloss = true, .ignored = SOME_IGNORED}, .main_gradient = true},
    {{.name = "main gradient, small budget", .reduction = RAFTER_SUM},
     .main_gradient = true,
     .budget = PROBLEM_SMALLEST_BUDGET},
    {{.name = "native"}, .native = true, .bias = true},
    {{.name = "native, small budget", .without_lse = true},
     .native = true,
     .bias = true,
     .budget = PROBLEM_SMALLEST_BUDGET},
    {{.name = "smallest budget", .ignored = SOME_IGNORED, .extras = true},
     .budget = PROBLEM_SMALLEST_BUDGET,
     .bias = true},
    {{.name = "small budget", .reduction = RAFTER_SUM, .extras = true, .without_lse = true},
     .budget = PROBLEM_SMALL_BUDGET},
    {.loss = {.name = "dentropy", .dentropy = true}},
    {{.name = "dentropy, none", .dentropy = true, .dloss = true, .reduction = RAFTER_NONE, .ignored = SOME_IGNORED},
     .bias = true},
    {{.name = "dentropy, sum, no lse", .dentropy = true, .reduction = RAFTER_SUM, .dloss = true, .without_lse = true},
     .budget = PROBLEM_SMALL_BUDGET},
    {{.name = "dentropy, no entropy", .dentropy = true, .extras = true, .ignored = SOME_IGNORED},
     .bias = true,
     .without_entropy = true,
     .budget = PROBLEM_SMALLEST_BUDGET},
    {.loss = {.name = "dentropy, all ignored", .dentropy = true, .ignored = ALL_IGNORED}},
    {.loss = {.name = "dentropy, softcap, scale", .dentropy = true, .softcap = 5, .scale = 1.5f, .narrow = true}},
    {{.name = "dentropy, scale, none", .dentropy = true, .scale = 0.7f, .reduction = RAFTER_NONE, .dloss = true},
     .main_gradient = true,
     .budget = PROBLEM_SMALLEST_BUDGET},
    {.loss = {.name = "dentropy, smoothing, z_loss",
              .dentropy = true,
              .smoothing = 0.1f,
              .z_loss = 0.01f,
              .class_weight = true,
              .ignored = SOME_IGNORED}},
    {{.name = "dentropy, all",
      .dentropy = true,
      .smoothing = 0.1f,
      .z_loss = 0.001f,
      .softcap = 5,
      .scale = 2,
      .ignored = SOME_IGNORED,
      .class_weight = true,
      .row_weight = true,
      .denominator = true,
      .dloss = true,
      .extras = true},
     .bias = true,
     .budget = PROBLEM_SMALLEST_BUDGET},
};

/* x, and V. */
struct shape {
    int ndim;
    int64_t x[4], classes;
};

/* Each with the plain options: sizes around vectors, panels, blocks and the steps of every
 * micro-kernel. */
static const struct shape shapes[] = {
    {2, {1, 1}, 1},      {2, {1, 3}, 1},     {2, {3, 5}, 7},      {2, {2, 1}, 9},         {2, {5, 0}, 4},
    {2, {0, 6}, 5},      {2, {17, 33}, 65},  {2, {31, 15}, 16},   {2, {32, 32}, 32},      {2, {33, 31}, 33},
    {2, {12, 64}, 12},   {2, {13, 65}, 191}, {2, {64, 64}, 1025}, {2, {130, 80}, 257},    {2, {3, 513}, 40},
    {2, {300, 24}, 193}, {1, {9}, 30},       {3, {2, 3, 9}, 11},  {4, {2, 1, 3, 17}, 40},
};

/* Each with every set of options; the first is also checked by finite differences. */
static const struct shape option_shapes[] = {{2, {5, 4}, 6}, {3, {3, 13, 21}, 67}, {2, {29, 33}, 10}};

/* Rows, classes or K take more than one block, and with a budget more than one group and slice. */
static const struct {
    const char *options;
    struct shape shape;
} large_shapes[] = {
    {"smallest budget", {2, {290, 40}, 420}},
    {"small budget", {2, {70, 530}, 260}},
    {"native, small budget", {2, {100, 40}, 300}},
    {"main gradient, small budget", {2, {100, 40}, 300}},
    {"all, none", {2, {100, 40}, 300}},
    {"dentropy, none", {2, {290, 40}, 420}},
    {"dentropy, all", {2, {100, 40}, 300}},
    /* few rows, few classes, in several blocks and parts of the CPU's kernels for them */
    {"main gradient", {2, {16, 40}, 1700}},
    {"dentropy, all, no budget", {2, {9, 300}, 500}},
    {"smoothing, z_loss, bias", {2, {1, 70}, 300}},
    {"fp32 gradients, no budget", {2, {600, 270}, 3}},
    {"dentropy, all, no budget", {2, {1700, 40}, 16}},
    {"all, none", {2, {27, 300}, 900}},
    {"smoothing, z_loss, bias", {2, {900, 40}, 26}},
    {"smoothing, z_loss, bias", {2, {1420, 37}, 2}}, /* so many rows are ignored that the rest is cut otherwise */
    /* more than 128 rows, and a depth from which CUDA's warpgroups may take tiles of logits in turns; several tiles */
    {"main gradient", {2, {132, 520}, 400}},
    {"all, none", {2, {132, 520}, 400}},
    /* more classes than one block of CUDA's logit kernels takes */
    {"dentropy, sum, no lse", {2, {20, 16}, 8300}},
};

enum {
    DTYPES = 3,
    SHAPES = sizeof shapes / sizeof *shapes,
    OPTION_SETS = LOSS_CASES + sizeof option_sets / sizeof *option_sets,
    OPTION_SHAPES = sizeof option_shapes / sizeof *option_shapes,
    LARGE_SHAPES = sizeof large_shapes / sizeof *large_shapes,
};
static const rafter_dtype dtypes[DTYPES] = {RAFTER_F32, RAFTER_BF16, RAFTER_F16};

/* The options of loss_cases are combined with the options of this op in turn. */
static struct options option_set(int64_t i) {
    if (i >= LOSS_CASES)
        return option_sets[i - LOSS_CASES];
    return (struct options){loss_cases[i], .budget = (enum problem_budget)(i % PROBLEM_BUDGETS), .bias = i % 2 == 0,
                            .main_gradient = i % 4 == 3};
}

/* ---- one problem ----------------------------------------------------------------------------- */

/* The algorithms: the values of rafter_lce_mode; fast with native accumulation; and forward that
 * saves exponentials, followed by backward. */
enum { NATIVE_ALGORITHM = 3, SAVED_ALGORITHM };

static bool is_native(const problem *p, const struct options *o) {
    return o->native || p->algorithm == NATIVE_ALGORITHM;
}

/*
 * Bounds. Products are accumulated in fp32 with unit e = 2^-24. x is normal, and so is W, with
 * standard deviation 2 / sqrt(D), so that logits before bias, scale and softcap have standard
 * deviation 2 and stay under 16. The harness draws no value beyond 3.5 standard deviations.
 *
 * Logits: D roundings of a sum that is at most 8, and 4 along the way, each with standard deviation
 * 0.6 e. Four standard deviations of their sum, and the roundings of bias, softcap and scale, give
 *     Z = scale * e * (8 + 9 sqrt(D) + max|z| (with a bias)) + 12 e max|u| (with softcap or scale).
 *
 * Statistics: the sum of exponentials has the relative error S = e (8 + 3 ln V + 192 / 4). Blocks
 * of 192 classes are summed in order, and the blocks of a slice in order again, in fp32; they are
 * few enough for the same term. lse, logprob and row losses are off by S + 2 Z.
 *
 * Gradients: dz is off by G = S + 2 Z + 2 e |lse| (p from lse) + 3 e max|u - max|, relative to its
 * terms, whose sum over a row is at most 2. Where bf16 operands (on CUDA also fp16) are multiplied
 * as such, every element of dz is rounded to that dtype: another independent relative error of 2^-9
 * (2^-12) each. So, with `most` the largest |W| or |x| and `upstream` the factor of a row's
 * gradient,
 *     dx: (G + 2^-9) * 2 * upstream * most
 *     dW: G * H * upstream * most + 2^-9 * 4 * sqrt(H) * upstream * most,
 * and a relative 2^-8 where terms are alike. H bounds the sum over rows of |p - onehot|: labels of
 * one class, and p, give 4 + 4 N / V, or N where all rows are alike. Products in fp32 add e (8 + 4
 * sqrt(K)) of the sum, or e (8 + K) where all rows, and so their roundings, are alike and summed in
 * order. dbias sums dz, all of which but the label's element Hopper's kernels have rounded. Native
 * accumulation rounds the partial sums after every chunk: another half unit of the gradient's dtype
 * per chunk, relative to the largest partial sum, which is the result where all rows are alike.
 *
 * The gradient of the entropy adds h p (log p + H) to dz, h = dentropy * scale. Its terms are at most
 * p (1 + ln V) if p is large, and p |log p| <= 1 / e in any case; their sum over a row is at most 2 (1
 * + ln V). Beside the errors of p, log p and H are off by 2 (S + 2 Z) + 2 e |lse|, and their products
 * with h by e (|u - max| + H) each. So these terms add 4 * scale (dentropy is at most 4) times 3 (1 +
 * ln V) to the factor `upstream`, without the loss's share, and need no bound of their own.
 */
static void set_bounds(problem *p, const struct options *o, rafter_dtype dtype, int64_t rows, int64_t depth,
                       int64_t classes) {
    const struct loss_case *const loss = &o->loss;
    const double e = 0x1p-24, n = fmax(1, (double)rows), v = fmax(2, (double)classes), d = fmax(1, (double)depth);
    const double huge = p->values == PROBLEM_HUGE && o->bias ? dtype == RAFTER_F16 ? 6e4 : 1e30 : 0;
    const double scale = loss->scale != 0 ? loss->scale : 1, largest_z = fmax(huge, 16);
    const double largest = scale * (loss->softcap != 0 ? fmin(loss->softcap, largest_z) : largest_z); /* bound on |u| */
    const double logit = scale * e * (8 + 9 * sqrt(d) + (o->bias ? largest_z : 0)) +
                         (loss->scale != 0 || loss->softcap != 0 ? 12 * e * largest : 0);
    const double sum = e * (8 + 3 * log(v) + 192 / 4);
    const double statistic = sum + 2 * logit;
    const double weight = loss->class_weight ? 1.5 : 1, row_weight = loss->row_weight ? 4 : 1, lse = largest + log(v);
    const double smoothing = loss->smoothing != 0 ? loss->smoothing * weight * largest * e * 64 : 0;
    const double row_loss =
        row_weight * (weight * statistic + smoothing + 2 * loss->z_loss * lse * statistic + e * lse);

    double share = 1; /* the factor of a row in the loss */
    if (loss->reduction == RAFTER_MEAN && loss->denominator)
        share = 1 / LOSS_CASE_DENOMINATOR;
    else if (loss->reduction == RAFTER_MEAN) /* at least half the rows count; class weights are at least 0.5 */
        share = (loss->class_weight ? 2 : 1) / fmax(1, n / 2);
    const double upstream =
        share * row_weight * (loss->dloss ? 4 : 1) * scale * (weight * (1 + loss->smoothing) + 2 * loss->z_loss * lse) +
        (loss->dentropy ? 4 * scale * 3 * (1 + log(v)) : 0);

    const bool narrow = dtype != RAFTER_F32;
    const double unit = dtype == RAFTER_BF16 ? 0x1p-8 : dtype == RAFTER_F16 ? 0x1p-11 : e;
    const double dz = fmin(1, statistic + 2 * e * lse + 3 * e * fmin(104, 2 * largest)),
                 rounding = narrow ? unit / 2 : 0;
    const double tiny = dtype == RAFTER_F16 ? 0x1p-25 : 0; /* half the smallest subnormal */
    const double most_w = 7 / sqrt(d), most_x = 3.5;
    /* If huge logits tie, lse does not tell how many do: every p of a row may be off by 1. One class in
     * 32 ties; their products with W have either sign, so dx adds a root of their number, with twice
     * four deviations. If rows are alike, all have the same label. */
    const double terms = huge != 0 ? fmax(2, sqrt(v / 8)) : 2;
    const double hits = huge != 0 || p->layout == PROBLEM_EXPANDED ? n : fmin(n, 4 + 4 * n / v);
    const double sums_v = e * (8 + 4 * sqrt(v)), sums_n = e * (8 + (p->layout == PROBLEM_EXPANDED ? n : 4 * sqrt(n)));
    /* Chunks have at least 32 rows or classes. */
    const double native = !is_native(p, o) || o->f32_gradients ? 0 : unit * (1 + fmax(n, v) / 32);

    const struct {
        const char *name;
        double relative, absolute;
    } bounds[] = {
        {"lse", e, statistic},
        {"logprob", e, statistic},
        {"row_loss", 2 * e, row_loss},
        {"loss", 2 * e, loss->reduction == RAFTER_NONE ? row_loss : n * share * row_loss},
        {"entropy", e, (1 + log(v)) * (sum + 8 * e + 2 * logit)},
        {"dx", (narrow ? unit : 4 * e) + native / 2,
         upstream * most_w * (terms * (dz + rounding + sums_v) + native * 2 + v * tiny)},
        {"dweight", (narrow ? unit : 4 * e) + native / 2,
         upstream * most_x * (hits * (dz + sums_n + native) + 4 * sqrt(hits) * rounding + n * tiny) +
             (o->main_gradient ? 8 * e : 0)},
        {"dbias", narrow ? unit : 4 * e, upstream * (hits * (dz + sums_n) + 4 * sqrt(hits) * rounding + n * tiny)},
    };
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        problem_tensor *t = problem_find(p, bounds[i].name);
        if (t) {
            t->relative = bounds[i].relative;
            t->absolute = bounds[i].absolute;
        }
    }
}

static void build(problem *p, rafter_dtype dtype, const struct options *o, const struct shape *shape) {
    const int rows_ndim = shape->ndim - 1;
    const int64_t depth = shape->x[rows_ndim], classes = shape->classes;
    p->options.budget = o->budget;
    p->options.native = is_native(p, o);
    p->options.backward_without_entropy = o->without_entropy;

    problem_tensor *t = problem_add(p, "x", PROBLEM_INPUT, dtype, shape->ndim, shape->x);
    t->special = p->values != PROBLEM_HUGE; /* products of huge numbers have no useful accuracy */
    t = problem_add(p, "weight", PROBLEM_INPUT, dtype, 2, (const int64_t[]){classes, depth});
    t->scale = 2 / sqrt(depth > 0 ? (double)depth : 1);
    if (o->bias) {
        t = problem_add(p, "bias", PROBLEM_INPUT, dtype, 1, &classes);
        t->special = true;
    }
    const int64_t rows = loss_case_declare(p, &o->loss, rows_ndim, shape->x, classes);
    const rafter_dtype gradient = o->f32_gradients ? RAFTER_F32 : dtype;
    if (!o->no_dx)
        problem_add(p, "dx", PROBLEM_GRADIENT, gradient, shape->ndim, shape->x);
    if (!o->no_dweight) {
        t = problem_add(p, "dweight", PROBLEM_GRADIENT, o->main_gradient ? RAFTER_F32 : gradient, 2,
                        (const int64_t[]){classes, depth});
        t->accumulates = o->main_gradient;
    }
    if (o->bias && !o->no_dbias)
        problem_add(p, "dbias", PROBLEM_GRADIENT, gradient, 1, &classes);
    set_bounds(p, o, dtype, rows, depth, classes);

    char suffix[32];
    snprintf(suffix, sizeof suffix, " x %lld classes", (long long)classes);
    loss_case_label(p, o->loss.name, dtype, shape->ndim, shape->x, suffix);
}

static int64_t count(void) {
    return DTYPES * (SHAPES + OPTION_SETS * OPTION_SHAPES + LARGE_SHAPES) + 2;
}

static void make(problem *p, int64_t index) {
    const rafter_dtype dtype = dtypes[index % DTYPES];
    int64_t i = index / DTYPES;
    if (i < SHAPES) {
        build(p, dtype, &plain, &shapes[i]);
        return;
    }
    i -= SHAPES;
    if (i < OPTION_SETS * OPTION_SHAPES) {
        const struct options o = option_set(i / OPTION_SHAPES);
        build(p, dtype, &o, &option_shapes[i % OPTION_SHAPES]);
        p->finite_differences = dtype == RAFTER_F32 && i % OPTION_SHAPES == 0;
        return;
    }
    i -= OPTION_SETS * OPTION_SHAPES;
    if (i < LARGE_SHAPES) {
        int64_t set = 0;
        while (strcmp(option_set(set).loss.name, large_shapes[i].options) != 0)
            set++;
        const struct options o = option_set(set);
        build(p, dtype, &o, &large_shapes[i].shape);
        return;
    }
    if (index == count() - 2) { /* no classes: every label must be ignored */
        build(p, RAFTER_F32, &(struct options){{.name = "no classes", .ignored = ALL_IGNORED}, .bias = true},
              &(struct shape){2, {2, 3}, 0});
        return;
    }
    build(p, RAFTER_BF16, &(struct options){.loss = {.name = "past 2^31"}}, &(struct shape){2, {12, 16400}, 131072});
    p->large = true;
    p->sample = 1031;
}

/* Which of the sizes is drawn first, and so is often the largest, is drawn too. */
static void make_random(problem *p, struct dice *dice, int64_t most) {
    int64_t size[3] = {0}; /* rows, depth, classes */
    for (int i = 0, first = (int)pick(dice, 3); i < 3; i++) {
        size[(first + i) % 3] = pick_size(dice, most);
        most /= size[(first + i) % 3];
    }
    const struct options o = one_in(dice, 2) ? plain : option_set(pick(dice, OPTION_SETS));
    build(p, dtypes[pick(dice, DTYPES)], &o, &(struct shape){2, {size[0], size[1]}, size[2]});
}

static rafter_status try_budget(rafter_context *context, rafter_linear_cross_entropy_args args,
                                rafter_direction direction, size_t budget) {
    size_t bytes;
    args.budget = budget;
    return rafter_linear_cross_entropy_workspace(context, &args, direction, &bytes);
}

/* The smallest budget that works; 0 if the call fails for another reason. */
static size_t smallest_budget(rafter_context *context, const rafter_linear_cross_entropy_args *args,
                              rafter_direction direction) {
    size_t low = 0, high = 1; /* low does not work */
    for (;; low = high, high *= 2) {
        const rafter_status status = try_budget(context, *args, direction, high);
        if (status == RAFTER_OK)
            break;
        if (status != RAFTER_WORKSPACE_TOO_SMALL)
            return 0;
    }
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        *(try_budget(context, *args, direction, middle) == RAFTER_OK ? &high : &low) = middle;
    }
    return high;
}

static rafter_status call_one(rafter_context *context, rafter_linear_cross_entropy_args *args,
                              enum problem_budget budget, rafter_direction direction, size_t *ask) {
    if (budget != PROBLEM_NO_BUDGET)
        args->budget = smallest_budget(context, args, direction) * (budget == PROBLEM_SMALL_BUDGET ? 2 : 1);
    if (ask)
        return rafter_linear_cross_entropy_workspace(context, args, direction, ask);
    rafter_reset_peak_workspace(context);
    const rafter_status status = direction == RAFTER_FORWARD ? rafter_linear_cross_entropy_forward(context, args)
                                                             : rafter_linear_cross_entropy_backward(context, args);
    if (status == RAFTER_OK && args->budget != 0 && rafter_peak_workspace(context) > args->budget)
        return RAFTER_WORKSPACE_TOO_SMALL; /* it took more than it was given */
    return status;
}

/* What forward saves for the backward that follows it. */
static struct {
    void *memory;
    size_t capacity, bytes; /* bytes: of the last forward; 0: it saved nothing */
} saved;

static bool use_saved(rafter_context *context, enum problem_mode mode, rafter_linear_cross_entropy_args *args) {
    const size_t least_capacity = 64 << 20; /* enough for tests, which capture calls: no allocation then */
    if (mode == PROBLEM_FORWARD && rafter_linear_cross_entropy_saved(context, args, &saved.bytes) != RAFTER_OK)
        saved.bytes = 0;
    if (saved.bytes > saved.capacity) {
        gpu_release(saved.memory);
        saved.capacity = saved.bytes > least_capacity ? saved.bytes : least_capacity;
        saved.memory = gpu_allocate(saved.capacity);
        saved.capacity = saved.memory ? saved.capacity : 0;
    }
    args->saved = saved.bytes > 0 ? saved.memory : NULL;
    args->saved_bytes = saved.bytes;
    return saved.bytes == 0 || saved.memory;
}

static bool has_gpu(void) {
    static int known = -1;
    if (known < 0) {
        void *const memory = gpu_allocate(1);
        known = memory != NULL;
        gpu_release(memory);
    }
    return known;
}

/* One call of the library. */
static rafter_status call_library(const problem *p, rafter_context *context, enum problem_mode mode) {
    const rafter_loss_options options = loss_case_options(p);
    rafter_linear_cross_entropy_args args = {
        .size = sizeof args,
        .options = &options,
        .mode = p->algorithm == NATIVE_ALGORITHM  ? RAFTER_LCE_FAST
                : p->algorithm == SAVED_ALGORITHM ? RAFTER_LCE_AUTO
                                                  : (rafter_lce_mode)p->algorithm,
        .accumulate = p->options.native ? RAFTER_ACCUMULATE_NATIVE : RAFTER_ACCUMULATE_F32,
        .x = problem_dl(p, "x"),
        .weight = problem_dl(p, "weight"),
        .bias = problem_dl(p, "bias"),
        .target = problem_dl(p, "target"),
        .loss = problem_dl(p, "loss"),
        .row_loss = problem_dl(p, "row_loss"),
        .lse = problem_dl(p, "lse"),
        .logprob = problem_dl(p, "logprob"),
        .entropy = problem_dl(p, "entropy"),
        .argmax = problem_dl(p, "argmax"),
        .dloss = problem_dl(p, "dloss"),
        .workspace = p->workspace,
        .workspace_bytes = p->workspace_bytes,
        .dentropy = problem_dl(p, "dentropy"),
    };
    if (mode != PROBLEM_FORWARD) {
        args.dx = problem_dl(p, "dx");
        args.dweight = problem_dl(p, "dweight");
        args.dbias = problem_dl(p, "dbias");
        args.accumulate_into_dweight = args.dweight && problem_find(p, "dweight")->accumulates;
    }
    if (mode == PROBLEM_BACKWARD && p->options.backward_without_lse)
        args.lse = NULL;
    if (mode == PROBLEM_BACKWARD && p->options.backward_without_entropy)
        args.entropy = NULL;
    if (p->algorithm == SAVED_ALGORITHM && !use_saved(context, mode, &args))
        return RAFTER_OUT_OF_MEMORY;
    return call_one(context, &args, p->options.budget, problem_direction(mode), p->ask);
}

static rafter_status call(const problem *p, rafter_context *context, enum problem_mode mode) {
    if (problem_is_one_call(p, mode))
        return call_library(p, context, mode);
    const rafter_status status = call_library(p, context, PROBLEM_FORWARD);
    return status == RAFTER_OK ? call_library(p, context, PROBLEM_BACKWARD) : status;
}

/* ---- bench ----------------------------------------------------------------------------------- */

static const int64_t seeds_classes[] = {1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 0};
static const int64_t seeds_rows[] = {1024, 2048, 4096, 8192, 16384, 32768, 0};
static const int64_t seeds_depth[] = {512, 1024, 2048, 4096, 8192, 0};
static const int64_t quick_classes[] = {1024, 4096, 16384, 32768, 0};
static const int64_t middle_classes[] = {1024, 32768, 0}, none[] = {0};

/* Sweeps over the vocabulary: the seeds', and one of a size where packing and softmax are small
 * beside the products. Sweeps over the batch and over the hidden size, with the vocabulary of
 * published figures. `--preset models`: sweeps over the batch for the output layers of models, and
 * one row for each option. */
enum { BY_CLASSES, MIDDLE, BY_ROWS, BY_DEPTH, BY_MODEL };

/* MODEL(D, V, rows, text of the option in the title, option): one table each. Every size, then every
 * option; Gemma 2 caps its logits at 30. */
#define MODELS(MODEL)                                                                                                  \
    MODEL(4096, 128256, model_rows, "", .bias = false)                                                                 \
    MODEL(2048, 151936, model_rows, "", .bias = false)                                                                 \
    MODEL(3584, 256000, model_rows, "", .bias = false)                                                                 \
    MODEL(5120, 151936, model_rows, "", .bias = false)                                                                 \
    MODEL(7168, 129280, model_rows, "", .bias = false)                                                                 \
    MODEL(768, 50257, model_rows, "", .bias = false)                                                                   \
    MODEL(2048, 50304, model_rows, "", .bias = false)                                                                  \
    MODEL(1024, 32000, model_rows, "", .bias = false)                                                                  \
    MODEL(3584, 256000, option_rows, "softcap30-", .loss.softcap = 30)                                                 \
    MODEL(4096, 128256, option_rows, "label_smoothing0.1-", .loss.smoothing = 0.1f)                                    \
    MODEL(4096, 128256, option_rows, "class_weight-", .loss.class_weight = true)                                       \
    MODEL(4096, 128256, option_rows, "row_weight-", .loss.row_weight = true)                                           \
    MODEL(4096, 128256, option_rows, "z_loss0.0001-", .loss.z_loss = 1e-4f)                                            \
    MODEL(4096, 128256, option_rows, "logit_scale0.5-", .loss.scale = 0.5f)                                            \
    MODEL(4096, 128256, option_rows, "bias-", .bias = true)

static const int64_t model_rows[] = {64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 0}, option_rows[] = {4096, 0};

#define MODEL(depth, classes, rows, text, option) {depth, classes, text, {option}},
static const struct model {
    int64_t depth, classes;
    const char *text;
    struct options options;
} models[] = {MODELS(MODEL)};
#undef MODEL

#define MODEL(depth, classes, rows, text, option) {"b", 1u << PROBLEM_BOTH, rows, none},
static const struct bench_table tables[] = {
    [BY_CLASSES] = {"v", 1u << PROBLEM_BOTH, seeds_classes, quick_classes},
    [MIDDLE] = {"v", 1u << PROBLEM_BOTH, none, middle_classes},
    [BY_ROWS] = {"b", 1u << PROBLEM_BOTH, seeds_rows, none},
    [BY_DEPTH] = {"d", 1u << PROBLEM_BOTH, seeds_depth, none},
    MODELS(MODEL) /* from BY_MODEL on */
};
#undef MODEL

/* A bench row is made once for all algorithms; a test problem is made for its own. */
static bool adapt(problem *p) {
    if (p->algorithm == SAVED_ALGORITHM) /* on a CPU it would be forward and backward, as otherwise */
        return has_gpu() && p->options.budget == PROBLEM_NO_BUDGET && !problem_find(p, "dentropy");
    if (p->algorithm == NATIVE_ALGORITHM && !p->options.native) {
        const problem_tensor *x = problem_find(p, "x"), *weight = problem_find(p, "weight");
        const rafter_loss_options *const loss = &p->options.loss;
        const struct options o = {.loss = {.smoothing = loss->label_smoothing,
                                           .z_loss = loss->z_loss,
                                           .softcap = loss->softcap,
                                           .scale = loss->logit_scale,
                                           .class_weight = problem_find(p, "class_weight"),
                                           .row_weight = problem_find(p, "row_weight")},
                                  .bias = problem_find(p, "bias")};
        p->options.native = true;
        set_bounds(p, &o, x->dtype, x->shape[0], x->shape[1], weight->shape[0]);
    }
    return true;
}

static void make_bench(problem *p, const struct bench_row *row) {
    const char *dtype = problem_dtype_name(row->dtype);
    const struct model *const model = row->table >= BY_MODEL ? &models[row->table - BY_MODEL] : NULL;
    struct options options = model ? model->options : (struct options){0};
    options.loss.name = "bench";
    long long n = row->quick ? 512 : 12288, d = row->quick ? 512 : 4096, v = row->x;
    if (model)
        n = row->x, d = model->depth, v = model->classes;
    else if (row->table == MIDDLE)
        n = d = 2048;
    else if (row->table == BY_ROWS)
        n = row->x, v = 128256;
    else if (row->table == BY_DEPTH)
        n = 4096, d = row->x, v = 128256;
    build(p, row->dtype, &options, &(struct shape){2, {n, d}, v});
    /* Logits of standard deviation 1, as in an untrained model: with larger ones dz is almost all
     * zeros, and the chip runs cooler. */
    problem_find(p, "weight")->scale = 1 / sqrt((double)d);
    p->sample = (int64_t)((double)n * (double)d * (double)v / 4e9) + 1;
    if (row->table == BY_ROWS || model)
        snprintf(p->title, sizeof p->title, "dim%lld-vocab%lld-%s%s", d, v, model ? model->text : "", dtype);
    else if (row->table == BY_DEPTH)
        snprintf(p->title, sizeof p->title, "batch%lld-vocab%lld-%s", n, v, dtype);
    else
        snprintf(p->title, sizeof p->title, "batch%lld-dim%lld-%s", n, d, dtype);
}

static const char *make_request(problem *p, const struct problem_request *r) {
    enum { MOST = sizeof((struct shape *)0)->x / sizeof(int64_t) };
    if (r->ndim < 1 || r->ndim > MOST)
        return "wanted the shape of x, of 1 to 4 dimensions";
    if (r->classes <= 0)
        return "wanted the number of classes (--classes)";
    struct shape shape = {.ndim = r->ndim, .classes = r->classes};
    memcpy(shape.x, r->shape, sizeof shape.x);
    build(p, r->dtype, &(struct options){.loss = loss_case_request(r), .bias = r->bias}, &shape);
    return NULL;
}

static void cost(const problem *p, enum problem_mode mode, double *bytes, double *flops) {
    const problem_tensor *x = problem_find(p, "x"), *weight = problem_find(p, "weight");
    const double depth = fmax(1, (double)weight->shape[1]);
    const double product = 2 * (double)x->numel / depth * (double)weight->numel;
    *flops = product;
    *bytes = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        const bool gradient = t->role == PROBLEM_GRADIENT || t->role == PROBLEM_UPSTREAM;
        if (gradient && mode == PROBLEM_FORWARD)
            continue;
        *bytes += (double)(t->numel * problem_dtype_bytes(t->dtype));
        if (t->role == PROBLEM_GRADIENT && t->ndim > 1) /* dx and dweight: a product each */
            *flops += product;
    }
}

static const char *const algorithms[] = {"rafter", "fast", "compact", "native", "saved", NULL};

const struct op_cases rafter_cases_linear_cross_entropy = {
    .op = "linear_cross_entropy",
    .prefix = "lce",
    .algorithms = algorithms,
    .algorithm_modes = {1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD | 1u << PROBLEM_BOTH,
                        1u << PROBLEM_BACKWARD | 1u << PROBLEM_BOTH, 1u << PROBLEM_BACKWARD | 1u << PROBLEM_BOTH,
                        1u << PROBLEM_BOTH, 1u << PROBLEM_BOTH},
    .one_call = 0xf, /* all but the last */
    .count = count,
    .make = make,
    .tables = sizeof tables / sizeof *tables,
    .table = tables,
    .models_from = BY_MODEL,
    .make_bench = make_bench,
    .make_request = make_request,
    .make_random = make_random,
    .adapt = adapt,
    .call = call,
    .cost = cost,
    .oracle = oracle_linear_cross_entropy,
};

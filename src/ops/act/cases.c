/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/act/cases.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const kind_names[] = {"none", "relu", "sigmoid", "silu", "softmax"};

enum variety {
    PLAIN,
    MASKED,           /* relu with its mask */
    FORWARD_IN_PLACE, /* y is x; there is no backward, which would want x */
    BACKWARD_IN_PLACE /* dx is dy */
};

/* What normally distributed inputs are scaled with, and a bound on the size of what the harness then draws. */
static const double x_scale = 3, dy_scale = 1;
static const double x_size = 3.5 * 3, dy_size = 3.5 * 1;

/* Error bounds of fp32 results; u is half a unit in the last place, relative. Results in 16 bits are held to them, or
 * to one unit in their own last place, whichever is more.
 *
 * sigmoid, silu: exponential (4 u), 1 + e, reciprocal (2 u), and one or two products: 10 u. The exponential's error
 * counts in full, and |x| times less in the slope, which is bounded by 10 u too; but 1 + x s(-x) has a root near -1.28,
 * where its error, of the size of s, is absolute: 8 u for |dy| = 1. Where e is subnormal its error is absolute too,
 * times |x| < 104 in silu.
 *
 * softmax over n: e^(x - m) has the error of the difference and of its product with log2(e), 3 u |x - m|, where |x - m|
 * is at most 2 |x|, and 6 u of its own; so have the terms of the sum, which adds n / 8 + 8 u (columns fold 8 rows at a
 * time); the reciprocal and the products make 4 u. Backward: the sum of y dy has n / 8 + 8 u of the sum of |y dy|,
 * which is |dy| at most. */
static const double u = 0x1p-24;

static void set_bounds(problem *p, rafter_act_kind kind, int64_t length) {
    problem_tensor *y = problem_find(p, "y"), *dx = problem_find(p, "dx");
    if (kind == RAFTER_ACT_SOFTMAX) {
        y->relative = (2 * (3 * 2 * x_size + 6) + (double)length / 8 + 8 + 4) * u;
        y->absolute = 0x1p-149; /* of subnormals */
        if (dx) {
            dx->relative = 4 * u;
            dx->absolute = ((double)length / 8 + 8) * u * dy_size;
        }
    } else if (kind == RAFTER_ACT_SIGMOID || kind == RAFTER_ACT_SILU) {
        y->relative = 10 * u;
        y->absolute = kind == RAFTER_ACT_SILU ? 0x1p-143 : 0x1p-149;
        if (dx) {
            dx->relative = 10 * u;
            dx->absolute = kind == RAFTER_ACT_SILU ? 8 * u * dy_size : 0x1p-149;
        }
    }
}

static void declare(problem *p, rafter_act_kind kind, int dim, rafter_dtype dtype, enum variety variety, int ndim,
                    const int64_t *shape) {
    static const char *const variety_names[] = {"", " mask", " y=x", " dx=dy"};
    struct act_row *row = (struct act_row *)p->row;
    *row = (struct act_row){kind, dim};
    problem_tensor *x = problem_add(p, "x", PROBLEM_INPUT, dtype, ndim, shape);
    x->scale = x_scale;
    x->special = true;
    problem_tensor *y = problem_add(p, "y", PROBLEM_OUTPUT, dtype, ndim, shape);
    if (variety == FORWARD_IN_PLACE) {
        y->in_place_of = "x";
    } else {
        problem_add(p, "dy", PROBLEM_UPSTREAM, dtype, ndim, shape)->scale = dy_scale;
        problem_tensor *dx = problem_add(p, "dx", PROBLEM_GRADIENT, dtype, ndim, shape);
        if (variety == BACKWARD_IN_PLACE)
            dx->in_place_of = "dy";
    }
    if (variety == MASKED) {
        const int64_t bytes = (x->numel + 7) / 8;
        problem_add(p, "relu_mask", PROBLEM_OUTPUT, RAFTER_U8, 1, &bytes);
    }
    const int64_t length = kind == RAFTER_ACT_SOFTMAX && ndim > 0 ? shape[dim < 0 ? dim + ndim : dim] : 1;
    set_bounds(p, kind, length);
    p->finite_differences = dtype == RAFTER_F32 && kind != RAFTER_ACT_RELU && variety == PLAIN && x->numel < 200;

    size_t used = (size_t)snprintf(p->label, sizeof p->label, "%s%s %s [", kind_names[kind], variety_names[variety],
                                   problem_dtype_name(dtype));
    for (int d = 0; d < ndim; d++)
        used += (size_t)snprintf(p->label + used, sizeof p->label - used, d ? ", %lld" : "%lld", (long long)shape[d]);
    snprintf(p->label + used, sizeof p->label - used, kind == RAFTER_ACT_SOFTMAX ? "] dim %d" : "]", dim);
}

/* ---- tests ----------------------------------------------------------------------------------- */

struct shape {
    int ndim;
    int64_t size[4];
};

/* The first dimension of 1 lets a masked problem, whose tensors must be contiguous, keep its shape in every layout. */
static const struct shape shapes[] = {
    {0, {0}},     {1, {0}},          {1, {1}},       {3, {3, 0, 5}}, {2, {2, 2}},    {2, {2, 3}},     {2, {2, 7}},
    {2, {2, 8}},  {2, {2, 9}},       {2, {2, 15}},   {2, {2, 16}},   {2, {2, 17}},   {2, {2, 31}},    {2, {2, 32}},
    {2, {2, 33}}, {4, {2, 3, 5, 7}}, {2, {3, 1023}}, {2, {3, 1024}}, {2, {3, 1025}}, {2, {1, 70001}}, {2, {3, 5000}},
};
static const struct {
    rafter_act_kind kind;
    enum variety variety;
} elementwise[] = {
    {RAFTER_ACT_NONE, PLAIN},    {RAFTER_ACT_RELU, PLAIN}, {RAFTER_ACT_RELU, MASKED},
    {RAFTER_ACT_SIGMOID, PLAIN}, {RAFTER_ACT_SILU, PLAIN},
};
/* Softmax, and the in-place forms of every kind. */
static const struct {
    int dim;
    struct shape shape;
} lines[] = {
    {-1, {0, {0}}},
    {0, {1, {0}}},
    {-1, {2, {0, 3}}},
    {1, {2, {3, 0}}},
    {0, {1, {1}}},
    {-1, {2, {3, 1}}},
    {0, {2, {1, 3}}},
    {-1, {2, {4, 2}}},
    {-1, {2, {5, 3}}},
    {-1, {2, {3, 7}}},
    {-1, {2, {3, 8}}},
    {-1, {2, {3, 9}}},
    {-1, {2, {3, 15}}},
    {-1, {2, {3, 16}}},
    {-1, {2, {3, 17}}},
    {-1, {2, {3, 31}}},
    {-1, {2, {3, 32}}},
    {-1, {2, {3, 33}}},
    {-1, {2, {600, 5}}},
    {-1, {2, {70, 128}}},
    {-1, {2, {2, 1023}}},
    {-1, {2, {2, 1024}}},
    {-1, {2, {2, 1025}}},
    {-1, {2, {3, 5000}}},
    {-1, {2, {2, 8192}}},
    {-1, {2, {2, 8193}}},
    {0, {1, {1025}}},
    {0, {2, {7, 1}}},
    {0, {2, {2, 3}}},
    {0, {2, {9, 17}}},
    {0, {2, {33, 5}}},
    {0, {2, {1025, 3}}},
    {0, {2, {16, 1030}}},
    {1, {3, {2, 8, 16}}},
    {1, {3, {3, 7, 31}}},
    {1, {3, {2, 1023, 9}}},
    {-2, {4, {2, 2, 40, 128}}},
    {1, {4, {2, 5, 3, 4}}},
    {-2, {4, {2, 3, 1, 5}}},
};
/* Lines so few and so long that they are cut into parts; and for GPUs, strips of one chunk and of
 * many. */
static const struct {
    rafter_dtype dtype;
    int dim;
    struct shape shape;
    bool for_cuda;
} long_lines[] = {{RAFTER_F32, -1, {2, {2, 140001}}, false},      {RAFTER_BF16, 0, {2, {5003, 70}}, false},
                  {RAFTER_BF16, -1, {2, {1, 1 << 20}}, true},     {RAFTER_BF16, -1, {2, {600, 2056}}, true},
                  {RAFTER_F32, -1, {2, {60, 5001}}, true},        {RAFTER_F16, 0, {2, {70001, 8}}, true},
                  {RAFTER_F32, 0, {2, {9001, 7}}, true},          {RAFTER_BF16, 1, {3, {3, 1100, 136}}, true},
                  {RAFTER_BF16, 1, {3, {40, 130, 72}}, true},     {RAFTER_BF16, 0, {2, {1 << 20, 1}}, true},
                  {RAFTER_BF16, -2, {4, {3, 4, 300, 128}}, true}, {RAFTER_F16, 0, {2, {9001, 72}}, true},
                  {RAFTER_F32, -2, {4, {2, 3, 2050, 36}}, true}};

static const struct {
    rafter_act_kind kind;
    enum variety variety;
    int dim;
    struct shape shape;
} in_place[] = {
    {RAFTER_ACT_NONE, FORWARD_IN_PLACE, 0, {2, {3, 100}}},
    {RAFTER_ACT_NONE, BACKWARD_IN_PLACE, 0, {2, {3, 100}}},
    {RAFTER_ACT_RELU, FORWARD_IN_PLACE, 0, {2, {3, 1025}}},
    {RAFTER_ACT_RELU, BACKWARD_IN_PLACE, 0, {2, {3, 1025}}},
    {RAFTER_ACT_SIGMOID, FORWARD_IN_PLACE, 0, {2, {3, 1025}}},
    {RAFTER_ACT_SIGMOID, BACKWARD_IN_PLACE, 0, {2, {3, 1025}}},
    {RAFTER_ACT_SILU, FORWARD_IN_PLACE, 0, {2, {3, 1025}}},
    {RAFTER_ACT_SILU, BACKWARD_IN_PLACE, 0, {2, {3, 1025}}},
    {RAFTER_ACT_SOFTMAX, FORWARD_IN_PLACE, -1, {2, {3, 130}}},
    {RAFTER_ACT_SOFTMAX, BACKWARD_IN_PLACE, -1, {2, {3, 130}}},
    {RAFTER_ACT_SOFTMAX, FORWARD_IN_PLACE, 1, {3, {2, 37, 21}}},
    {RAFTER_ACT_SOFTMAX, BACKWARD_IN_PLACE, 1, {3, {2, 37, 21}}},
    {RAFTER_ACT_SOFTMAX, FORWARD_IN_PLACE, 0, {2, {1030, 64}}},
    {RAFTER_ACT_SOFTMAX, BACKWARD_IN_PLACE, 0, {2, {1030, 64}}},
    {RAFTER_ACT_SOFTMAX, FORWARD_IN_PLACE, -1, {2, {1, 9001}}},
    {RAFTER_ACT_SOFTMAX, BACKWARD_IN_PLACE, -1, {2, {1, 9001}}},
};

static const rafter_dtype dtypes[] = {RAFTER_F32, RAFTER_BF16, RAFTER_F16};

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof *(array)))

static int64_t count(void) {
    return COUNT(dtypes) * (COUNT(elementwise) * COUNT(shapes) + COUNT(lines) + COUNT(in_place)) + COUNT(long_lines) +
           1;
}

static void make(problem *p, int64_t index) {
    const rafter_dtype dtype = dtypes[index % COUNT(dtypes)];
    int64_t i = index / COUNT(dtypes);
    if (i < COUNT(elementwise) * COUNT(shapes)) {
        struct shape shape = shapes[i / COUNT(elementwise)];
        i %= COUNT(elementwise);
        if (elementwise[i].variety == MASKED && shape.ndim == 2)
            shape = (struct shape){2, {1, shape.size[0] * shape.size[1]}};
        else if (elementwise[i].variety == MASKED && shape.ndim > 2)
            shape = (struct shape){3, {1, 1, 0}};
        declare(p, elementwise[i].kind, 0, dtype, elementwise[i].variety, shape.ndim, shape.size);
        return;
    }
    i -= COUNT(elementwise) * COUNT(shapes);
    if (i < COUNT(lines)) {
        declare(p, RAFTER_ACT_SOFTMAX, lines[i].dim, dtype, PLAIN, lines[i].shape.ndim, lines[i].shape.size);
        return;
    }
    i -= COUNT(lines);
    if (i < COUNT(in_place)) {
        declare(p, in_place[i].kind, in_place[i].dim, dtype, in_place[i].variety, in_place[i].shape.ndim,
                in_place[i].shape.size);
        return;
    }
    i = index - COUNT(dtypes) * (COUNT(elementwise) * COUNT(shapes) + COUNT(lines) + COUNT(in_place));
    if (i < COUNT(long_lines)) {
        declare(p, RAFTER_ACT_SOFTMAX, long_lines[i].dim, long_lines[i].dtype, PLAIN, long_lines[i].shape.ndim,
                long_lines[i].shape.size);
        p->for_cuda = long_lines[i].for_cuda;
        return;
    }
    const int64_t large[] = {3, 32771, 21851}; /* past 2^31 elements */
    declare(p, RAFTER_ACT_SOFTMAX, 1, RAFTER_BF16, PLAIN, 3, large);
    p->large = true;
    p->sample = 4001;
}

/* ---- bench ----------------------------------------------------------------------------------- */

static const int64_t seeds_n[] = {256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 0};
static const int64_t quick_n[] = {2048, 4096, 0};
enum { ALL_MODES = 1 << PROBLEM_FORWARD | 1 << PROBLEM_BACKWARD | 1 << PROBLEM_BOTH };

static const struct {
    rafter_act_kind kind;
    int dim;
} benched[] = {
    {RAFTER_ACT_RELU, 0}, {RAFTER_ACT_SIGMOID, 0},  {RAFTER_ACT_SILU, 0},
    {RAFTER_ACT_NONE, 0}, {RAFTER_ACT_SOFTMAX, -1}, {RAFTER_ACT_SOFTMAX, -2},
};
static const struct bench_table tables[] = {
    {"n", ALL_MODES, seeds_n, quick_n}, {"n", ALL_MODES, seeds_n, quick_n}, {"n", ALL_MODES, seeds_n, quick_n},
    {"n", ALL_MODES, seeds_n, quick_n}, {"n", ALL_MODES, seeds_n, quick_n}, {"n", ALL_MODES, seeds_n, quick_n},
};

static void make_bench(problem *p, const struct bench_row *row) {
    const rafter_act_kind kind = benched[row->table].kind;
    const int dim = benched[row->table].dim;
    const int64_t batch = row->quick ? 4 : 12, heads = 12, features = 128;
    int64_t shape[] = {batch, heads, row->x, features};
    int ndim = 4;
    if (row->resident &&
        kind != RAFTER_ACT_SOFTMAX) { /* rows of 4 KiB: where they end does not matter to these kinds */
        shape[1] = row->dtype == RAFTER_F32 ? 1024 : 2048;
        shape[0] = batch * heads * row->x * features / shape[1];
        ndim = 2;
    }
    declare(p, kind, dim, row->dtype, kind == RAFTER_ACT_RELU ? MASKED : PLAIN, ndim, shape);
    if (kind == RAFTER_ACT_NONE) { /* hands its input back */
        problem_find(p, "y")->in_place_of = "x";
        problem_find(p, "dx")->in_place_of = "dy";
    }
    p->sample = kind == RAFTER_ACT_SOFTMAX ? 509 : 4093;
    char dim_text[16] = "";
    if (kind == RAFTER_ACT_SOFTMAX)
        snprintf(dim_text, sizeof dim_text, "-dim_%d", dim);
    snprintf(p->title, sizeof p->title, "batch%d-head%d-dim%d-act_%s%s-%s", (int)batch, (int)heads, (int)features,
             kind_names[kind], dim_text, problem_dtype_name(row->dtype));
}

/* The mask costs forward something and saves backward much: a column of its own. */
static const char *const algorithms[] = {"rafter", "mask", NULL};
enum { WITHOUT_MASK, WITH_MASK };

static bool adapt(problem *p) {
    const bool has_mask = strcmp(p->tensor[p->tensors - 1].name, "relu_mask") == 0;
    if (p->algorithm == WITHOUT_MASK && has_mask)
        p->tensors--;
    return p->algorithm == WITHOUT_MASK || has_mask;
}

/* Of a relu that may have a mask: what is less, in forward without it and in backward with it. */
static void cost(const problem *p, enum problem_mode mode, double *bytes, double *flops) {
    const rafter_act_kind kind = ((const struct act_row *)p->row)->kind;
    const problem_tensor *x = problem_find(p, "x"), *y = problem_find(p, "y"), *dx = problem_find(p, "dx");
    const bool masked = problem_find(p, "relu_mask") != NULL, none = kind == RAFTER_ACT_NONE;
    const double tensor = (double)x->numel * (x->dtype == RAFTER_F32 ? 4 : 2), mask = masked ? (double)x->numel / 8 : 0;
    *bytes = *flops = 0;
    if (mode != PROBLEM_BACKWARD && !(none && y->in_place_of))
        *bytes += 2 * tensor + (mode == PROBLEM_BOTH ? mask : 0);
    if (mode != PROBLEM_FORWARD && dx && !(none && dx->in_place_of))
        *bytes += (none || masked ? 2 : 3) * tensor + mask;
}

/* ---- the call -------------------------------------------------------------------------------- */

static rafter_status call(const problem *p, rafter_context *context, enum problem_mode mode) {
    const struct act_row *row = (const struct act_row *)p->row;
    const rafter_act_args args = {.size = sizeof args,
                                  .kind = row->kind,
                                  .dim = row->dim,
                                  .x = problem_dl(p, "x"),
                                  .y = problem_dl(p, "y"),
                                  .dy = problem_dl(p, "dy"),
                                  .dx = problem_dl(p, "dx"),
                                  .relu_mask = problem_dl(p, "relu_mask"),
                                  .workspace = p->workspace,
                                  .workspace_bytes = p->workspace_bytes};
    if (mode == PROBLEM_BACKWARD && !args.dx)
        return RAFTER_OK;
    if (p->ask)
        return rafter_act_workspace(context, &args, problem_direction(mode), p->ask);
    rafter_status status = RAFTER_OK;
    if (mode != PROBLEM_BACKWARD)
        status = rafter_act_forward(context, &args);
    if (mode != PROBLEM_FORWARD && status == RAFTER_OK && args.dx)
        status = rafter_act_backward(context, &args);
    return status;
}

const struct op_cases rafter_cases_act = {
    .op = "act",
    .prefix = "act",
    .algorithms = algorithms,
    .algorithm_modes = {ALL_MODES, ALL_MODES},
    .adapt = adapt,
    .count = count,
    .make = make,
    .tables = COUNT(tables),
    .table = tables,
    .make_bench = make_bench,
    .call = call,
    .cost = cost,
    .oracle = oracle_act,
};

/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/sizes.h"
#include "harness/map.h"
#include "harness/oracle.h"

/* ---- problems -------------------------------------------------------------------------------- */

enum theta_shape { THETA_HD, THETA_H1, THETA_1D };
enum position_kind { FROM_OFFSET, POSITIONS_N, POSITIONS_BN };
enum dtheta_kind { NO_DTHETA, DTHETA_FP32, DTHETA_AS_THETA };

struct lrpe_case {
    int64_t b, n, h, d; /* h = 0: x has no head dimension */
    rafter_act_kind act;
    rafter_softmax_over over;
    rafter_dtype dtype, theta_dtype;
    enum theta_shape theta;
    enum position_kind positions;
    rafter_dtype position_dtype;
    int64_t offset; /* or the first position */
    enum dtheta_kind dtheta;
    bool only_dtheta;   /* no dx */
    bool special_theta; /* special values in theta too */
    bool small_theta;   /* as in models: between 1e-4 and 1; else normal */
    bool for_cuda;
};

static const struct {
    rafter_act_kind act;
    rafter_softmax_over over;
    const char *name;
} acts[] = {
    {RAFTER_ACT_NONE, RAFTER_OVER_FEATURE, "none"},
    {RAFTER_ACT_RELU, RAFTER_OVER_FEATURE, "relu"},
    {RAFTER_ACT_SIGMOID, RAFTER_OVER_FEATURE, "sigmoid"},
    {RAFTER_ACT_SILU, RAFTER_OVER_FEATURE, "silu"},
    {RAFTER_ACT_SOFTMAX, RAFTER_OVER_FEATURE, "softmax-dim_-1"},
    {RAFTER_ACT_SOFTMAX, RAFTER_OVER_SEQUENCE, "softmax-dim_1"},
};
enum { ACTS = sizeof acts / sizeof *acts };

static const rafter_dtype dtypes[] = {RAFTER_F32, RAFTER_BF16, RAFTER_F16};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

/* Each with every act and dtype; theta [H, D] in fp32, dtheta in fp32. */
static const struct {
    int64_t b, n, h, d;
} sizes[] = {
    {1, 1, 1, 1}, {2, 3, 2, 8}, {3, 5, 0, 17}, {2, 2, 3, 1}, {1, 19, 2, 15}, {5, 1, 1, 33}, {2, 37, 1, 64},
};
enum { SIZES = sizeof sizes / sizeof *sizes };

#define EACH_ACT(...)                                                                                                  \
    {__VA_ARGS__, .act = RAFTER_ACT_NONE}, {__VA_ARGS__, .act = RAFTER_ACT_SILU},                                      \
        {__VA_ARGS__, .act = RAFTER_ACT_SOFTMAX}, {                                                                    \
        __VA_ARGS__, .act = RAFTER_ACT_SOFTMAX, .over = RAFTER_OVER_SEQUENCE                                           \
    }

static const struct lrpe_case more[] = {
    /* empty sizes */
    {0, 3, 2, 4, .dtheta = DTHETA_FP32},
    {2, 0, 2, 4, .dtheta = DTHETA_FP32, .theta = THETA_H1},
    {2, 3, 2, 0, .dtheta = DTHETA_FP32, .theta = THETA_H1},
    {2, 0, 2, 4, .act = RAFTER_ACT_SOFTMAX, .over = RAFTER_OVER_SEQUENCE, .positions = POSITIONS_BN,
     .position_dtype = RAFTER_I64},
    {2, 3, 2, 0, .act = RAFTER_ACT_SOFTMAX},
    /* around vectors, tiles and the widest row */
    EACH_ACT(1, 2, 3, 7, .dtheta = DTHETA_FP32),
    EACH_ACT(1, 3, 2, 9, .dtheta = DTHETA_FP32),
    EACH_ACT(2, 2, 1, 16, .dtheta = DTHETA_FP32),
    EACH_ACT(2, 3, 3, 31, .dtheta = DTHETA_FP32, .dtype = RAFTER_BF16),
    EACH_ACT(1, 2, 2, 32, .dtheta = DTHETA_FP32, .dtype = RAFTER_F16),
    EACH_ACT(2, 1, 2, 1023, .dtheta = DTHETA_FP32),
    EACH_ACT(2, 1, 1, 1024, .dtype = RAFTER_BF16),
    EACH_ACT(1, 2, 1, 1025, .dtheta = DTHETA_FP32),
    EACH_ACT(2, 1, 1, 2048, .dtype = RAFTER_F16),
    EACH_ACT(2, 2, 1, 2049, .dtheta = DTHETA_FP32),
    EACH_ACT(1, 1, 2, 5000, .dtype = RAFTER_BF16, .dtheta = DTHETA_FP32),
    EACH_ACT(1, 1023, 1, 3, .dtheta = DTHETA_FP32),
    EACH_ACT(1, 1024, 1, 2, .dtype = RAFTER_BF16),
    EACH_ACT(2, 1025, 0, 5, .dtheta = DTHETA_FP32),
    EACH_ACT(40, 3, 2, 20, .dtheta = DTHETA_FP32),
    EACH_ACT(1, 600, 2, 40, .dtype = RAFTER_F16, .dtheta = DTHETA_FP32), /* the sequence in several parts */
    EACH_ACT(3, 40, 4, 80, .dtype = RAFTER_BF16),
    /* theta: shapes, dtypes */
    EACH_ACT(2, 6, 3, 10, .theta = THETA_H1, .dtheta = DTHETA_FP32),
    EACH_ACT(2, 6, 3, 10, .theta = THETA_1D, .dtheta = DTHETA_FP32),
    EACH_ACT(2, 5, 2, 24, .theta_dtype = RAFTER_BF16, .dtheta = DTHETA_AS_THETA),
    EACH_ACT(2, 5, 2, 24, .theta_dtype = RAFTER_F16, .dtheta = DTHETA_AS_THETA, .theta = THETA_1D),
    EACH_ACT(2, 5, 2, 24, .theta_dtype = RAFTER_F16, .dtheta = DTHETA_FP32, .dtype = RAFTER_BF16, .theta = THETA_H1),
    EACH_ACT(2, 5, 0, 24, .theta_dtype = RAFTER_BF16, .dtheta = DTHETA_FP32, .dtype = RAFTER_F16),
    EACH_ACT(2, 5, 3, 12, .dtheta = DTHETA_FP32, .only_dtheta = true),
    EACH_ACT(2, 5, 2, 12, .dtheta = DTHETA_FP32, .special_theta = true),
    /* positions: offsets, near and far, and per token */
    EACH_ACT(2, 4, 2, 33, .offset = -2),
    EACH_ACT(2, 4, 2, 33, .offset = 1000000, .small_theta = true),
    EACH_ACT(2, 4, 2, 33, .offset = 1000000),
    EACH_ACT(2, 4, 2, 33, .offset = ((int64_t)1 << 29) - 2), /* across the limit of the vector code */
    EACH_ACT(2, 4, 2, 33, .offset = -((int64_t)1 << 40), .dtheta = DTHETA_FP32),
    EACH_ACT(2, 4, 2, 33, .offset = ((int64_t)1 << 62) + 12345),
    EACH_ACT(1, 4, 1, 9, .offset = INT64_MAX - 3),
    EACH_ACT(1, 4, 1, 9, .offset = INT64_MIN),
    EACH_ACT(3, 7, 2, 20, .positions = POSITIONS_N, .position_dtype = RAFTER_I32, .offset = -3, .dtheta = DTHETA_FP32),
    EACH_ACT(3, 7, 2, 20, .positions = POSITIONS_N, .position_dtype = RAFTER_I64, .offset = 99, .dtheta = DTHETA_FP32),
    EACH_ACT(3, 7, 2, 20, .positions = POSITIONS_BN, .position_dtype = RAFTER_I32, .offset = 5, .dtheta = DTHETA_FP32),
    EACH_ACT(3, 7, 0, 20, .positions = POSITIONS_BN, .position_dtype = RAFTER_I64, .offset = (int64_t)1 << 40,
             .dtype = RAFTER_BF16, .dtheta = DTHETA_FP32),
    /* for GPUs: sequences of one chunk and of many chunks */
    EACH_ACT(1, 70001, 1, 8, .dtype = RAFTER_BF16, .small_theta = true, .for_cuda = true),
    EACH_ACT(3, 5000, 2, 64, .dtype = RAFTER_BF16, .small_theta = true, .dtheta = DTHETA_FP32, .for_cuda = true),
    EACH_ACT(5, 2100, 3, 40, .dtype = RAFTER_F16, .for_cuda = true),
    EACH_ACT(2, 1500, 2, 33, .for_cuda = true),
    EACH_ACT(4, 1000, 2, 64, .dtype = RAFTER_BF16, .positions = POSITIONS_BN, .position_dtype = RAFTER_I32,
             .for_cuda = true),
    EACH_ACT(600, 9, 2, 32, .dtype = RAFTER_BF16, .for_cuda = true),
    /* unaligned rows: chunks of some heads, of several tokens, and of one row */
    EACH_ACT(3, 30, 70, 33, .dtype = RAFTER_BF16, .dtheta = DTHETA_FP32, .for_cuda = true),
    EACH_ACT(2, 3000, 1, 33, .dtype = RAFTER_F16, .dtheta = DTHETA_FP32, .for_cuda = true),
    EACH_ACT(3, 50, 5, 513, .dtheta = DTHETA_FP32, .for_cuda = true),
    /* angles by the special-function unit */
    EACH_ACT(1, 1030, 32, 64, .dtype = RAFTER_BF16, .offset = -500, .for_cuda = true),
    EACH_ACT(2, 1030, 16, 64, .dtype = RAFTER_BF16, .positions = POSITIONS_BN, .position_dtype = RAFTER_I32,
             .offset = (1 << 18) - 5, .small_theta = true, .for_cuda = true),
    /* rows that are packs of 8 bytes */
    EACH_ACT(3, 150, 5, 100, .dtype = RAFTER_BF16, .for_cuda = true),
    EACH_ACT(9, 40, 3, 68, .dtype = RAFTER_F16, .dtheta = DTHETA_FP32, .for_cuda = true),
    /* if heads are adjacent in dy, chunks of some of the features */
    EACH_ACT(2, 40, 32, 160, .dtype = RAFTER_BF16, .dtheta = DTHETA_FP32, .for_cuda = true),
    /* gradients so large that they are transposed first: at once, and in slices of sequences */
    EACH_ACT(5, 220, 32, 64, .dtype = RAFTER_BF16, .dtheta = DTHETA_FP32, .for_cuda = true),
    {9, 256, 32, 64, .dtype = RAFTER_F32, .act = RAFTER_ACT_SILU, .for_cuda = true},
    /* past 2^31 elements of y */
    {2, 65537, 64, 128, .dtype = RAFTER_BF16, .act = RAFTER_ACT_SILU},
};
enum { MORE = sizeof more / sizeof *more };

static int64_t count(void) {
    return ACTS * DTYPES * SIZES + MORE;
}

/* The relative error of f(x) in fp32. Activations: a few units in the last place. Softmax: the
 * exponent x - max is rounded (inputs differ by less than 8), and a sum of L terms in at least four
 * lanes is off by at most L / 4 roundings. */
static double relative_error(rafter_act_kind act, double length) {
    return act != RAFTER_ACT_SOFTMAX ? 6e-7 : 2e-6 + length / 4 * 0x1p-24;
}

static void declare(problem *p, const struct lrpe_case *c) {
    p->options.act = c->act;
    p->options.softmax_over = c->over;
    p->options.offset = c->positions == FROM_OFFSET ? c->offset : 0;
    const int64_t heads = c->h ? c->h : 1;
    const int ndim = c->h ? 4 : 3;
    const int64_t four[] = {c->b, c->n, heads, c->d}, three[] = {c->b, c->n, c->d};
    const int64_t four_twice[] = {c->b, c->n, heads, 2 * c->d}, three_twice[] = {c->b, c->n, 2 * c->d};
    const int64_t *shape = c->h ? four : three, *twice = c->h ? four_twice : three_twice;
    const int64_t theta_shape[] = {c->theta == THETA_1D ? 1 : heads, c->theta == THETA_H1 ? 1 : c->d};
    const bool softmax = c->act == RAFTER_ACT_SOFTMAX;
    const double length = (double)(c->over == RAFTER_OVER_SEQUENCE ? c->n : c->d);

    /* Sines and cosines add 1.5 units in the last place, the product half a unit; 1e-8 near a zero
     * of the sine or cosine. */
    const double of_f = relative_error(c->act, length), of_y = of_f + 3e-7;
    problem_add(p, "x", PROBLEM_INPUT, c->dtype, ndim, shape)->special = true;
    problem_tensor *theta = problem_add(p, "theta", PROBLEM_INPUT, c->theta_dtype, 2, theta_shape);
    theta->special = c->special_theta;
    if (c->small_theta)
        theta->fill = PROBLEM_UNIFORM, theta->shift = 1e-4;
    if (c->positions != FROM_OFFSET) {
        problem_tensor *positions =
            problem_add(p, "positions", PROBLEM_INPUT, c->position_dtype, c->positions == POSITIONS_BN ? 2 : 1,
                        c->positions == POSITIONS_BN ? shape : shape + 1);
        positions->fill = PROBLEM_COUNT;
        positions->low = c->offset;
        positions->high = 11;
    }
    problem_tensor *y = problem_add(p, "y", PROBLEM_OUTPUT, c->dtype, ndim, twice);
    y->relative = of_y;
    y->absolute = 1e-8;
    problem_add(p, "dy", PROBLEM_UPSTREAM, c->dtype, ndim, twice);

    /* |g| is below 5 (|dy| is below 3.5), and g may cancel. The largest softmax of L ordinary
     * values is 20 / L. */
    const double peak = softmax ? fmin(1, 20 / fmax(length, 1)) : 1.1;
    if (!c->only_dtheta) {
        problem_tensor *dx = problem_add(p, "dx", PROBLEM_GRADIENT, c->dtype, ndim, shape);
        dx->relative = of_y;
        dx->absolute = 2e-6 + 2 * 5 * peak * of_f;
    }
    if (c->dtheta != NO_DTHETA) {
        const rafter_dtype dtype = c->dtheta == DTHETA_AS_THETA ? c->theta_dtype : RAFTER_F32;
        problem_tensor *dtheta = problem_add(p, "dtheta", PROBLEM_GRADIENT, dtype, 2, theta_shape);
        /* A sum of position * f(x) * (two products), each with the errors of f(x) and of y. */
        const double terms = (double)c->b * (double)c->n * (c->theta == THETA_1D ? (double)heads : 1.0) *
                             (c->theta == THETA_H1 ? (double)c->d : 1.0);
        dtheta->relative = 1e-6;
        const double largest_x = p->values == PROBLEM_HUGE && !softmax ? 1e30 : 3.5;
        dtheta->absolute = terms * (fabs((double)c->offset) + (double)c->n + 11) * peak * largest_x * (of_f + of_y);
    }

    const int64_t elements = c->b * c->n * heads * c->d;
    p->large = elements > (int64_t)1 << 28;
    p->sample = p->large ? 4099 : elements > 1 << 22 ? 31 : 1;
    p->for_cuda = c->for_cuda;
    p->finite_differences = c->dtype == RAFTER_F32 && elements > 0 && elements < 200 && llabs(c->offset) < 100 &&
                            c->act != RAFTER_ACT_RELU && !c->special_theta;
    const char *name = "";
    for (int i = 0; i < ACTS; i++)
        if (acts[i].act == c->act && (!softmax || acts[i].over == c->over))
            name = acts[i].name;
    snprintf(p->label, sizeof p->label, "%s %s [%lld, %lld, %lld, %lld] theta %s [%lld, %lld] from %lld%s", name,
             problem_dtype_name(c->dtype), (long long)c->b, (long long)c->n, (long long)c->h, (long long)c->d,
             problem_dtype_name(c->theta_dtype), (long long)theta_shape[0], (long long)theta_shape[1],
             (long long)c->offset,
             c->positions == FROM_OFFSET   ? ""
             : c->positions == POSITIONS_N ? ", positions [N]"
                                           : ", positions [B, N]");
}

static void make(problem *p, int64_t index) {
    if (index >= ACTS * DTYPES * SIZES) {
        declare(p, &more[index - ACTS * DTYPES * SIZES]);
        return;
    }
    const int64_t act = index % ACTS, dtype = index / ACTS % DTYPES, size = index / ACTS / DTYPES;
    const struct lrpe_case c = {sizes[size].b,          sizes[size].n,        sizes[size].h,
                                sizes[size].d,          .act = acts[act].act, .over = acts[act].over,
                                .dtype = dtypes[dtype], .dtheta = DTHETA_FP32};
    declare(p, &c);
}

/* ---- the call -------------------------------------------------------------------------------- */

static rafter_status call(const problem *p, rafter_context *context, enum problem_mode mode) {
    const rafter_lrpe_cosine_args args = {.size = sizeof args,
                                          .act = p->options.act,
                                          .softmax_over = p->options.softmax_over,
                                          .algorithm = (rafter_lrpe_algorithm)p->algorithm,
                                          .offset = p->options.offset,
                                          .x = problem_dl(p, "x"),
                                          .theta = problem_dl(p, "theta"),
                                          .positions = problem_dl(p, "positions"),
                                          .y = problem_dl(p, "y"),
                                          .dy = problem_dl(p, "dy"),
                                          .dx = problem_dl(p, "dx"),
                                          .dtheta = problem_dl(p, "dtheta"),
                                          .workspace = p->workspace,
                                          .workspace_bytes = p->workspace_bytes};
    if (p->ask)
        return rafter_lrpe_cosine_workspace(context, &args, problem_direction(mode), p->ask);
    rafter_status status = RAFTER_OK;
    if (mode != PROBLEM_BACKWARD)
        status = rafter_lrpe_cosine_forward(context, &args);
    if (mode != PROBLEM_FORWARD && status == RAFTER_OK)
        status = rafter_lrpe_cosine_backward(context, &args);
    return status;
}

static double bytes_of(const problem *p, const char *name) {
    const problem_tensor *t = problem_find(p, name);
    return t ? (double)(t->numel * problem_dtype_bytes(t->dtype)) : 0;
}

/* The backward of `none` reads x only for dtheta. */
static void cost(const problem *p, enum problem_mode mode, double *bytes, double *flops) {
    const double shared = bytes_of(p, "theta") + bytes_of(p, "positions");
    *bytes = *flops = 0;
    if (mode != PROBLEM_BACKWARD)
        *bytes += shared + bytes_of(p, "x") + bytes_of(p, "y");
    if (mode != PROBLEM_FORWARD) {
        *bytes += shared + bytes_of(p, "dy") + bytes_of(p, "dx") + bytes_of(p, "dtheta");
        if (p->options.act != RAFTER_ACT_NONE || problem_find(p, "dtheta"))
            *bytes += bytes_of(p, "x");
    }
}

/* ---- bench ----------------------------------------------------------------------------------- */

static const int64_t seeds_n[] = {256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 0};
static const int64_t quick_n[] = {512, 1024, 0};
enum { BENCH_MODES = 1 << PROBLEM_FORWARD | 1 << PROBLEM_BACKWARD | 1 << PROBLEM_BOTH };
static const struct bench_table tables[] = {
    {"n", BENCH_MODES, seeds_n, quick_n},
    {"n", BENCH_MODES, seeds_n, quick_n},
    {"n", BENCH_MODES, seeds_n, quick_n},
    {"n", BENCH_MODES, seeds_n, quick_n},
};
static const int table_acts[] = {0, 3, 4, 5}; /* of `acts`, in the order of the seeds */

static void make_bench(problem *p, const struct bench_row *bench) {
    const int act = table_acts[bench->table];
    const struct lrpe_case c = {.b = 12,
                                .n = bench->resident ? 64 : bench->x,
                                .h = 12,
                                .d = 128,
                                .act = acts[act].act,
                                .over = acts[act].over,
                                .dtype = bench->dtype,
                                .theta_dtype = bench->dtype};
    declare(p, &c);
    p->large = false;
    const int64_t lines = c.over == RAFTER_OVER_SEQUENCE ? c.b * c.h * c.d : c.b * c.n * c.h;
    p->sample = lines / 200 | 1; /* odd, so that all heads and features are sampled */
    snprintf(p->title, sizeof p->title, "batch12-head12-dim128-act_%s-%s", acts[act].name, problem_dtype_name(c.dtype));
}

static const char *make_request(problem *p, const struct problem_request *r) {
    if (r->ndim < 3 || r->ndim > 4)
        return "wanted the shape of x, BxNxHxD or BxNxD";
    const struct lrpe_case c = {.b = r->shape[0],
                                .n = r->shape[1],
                                .h = r->ndim == 4 ? r->shape[2] : 0,
                                .d = r->shape[r->ndim - 1],
                                .act = r->options.act,
                                .over = r->options.softmax_over,
                                .dtype = r->dtype,
                                .theta_dtype = r->dtype,
                                .offset = r->options.offset,
                                .dtheta = r->extras ? DTHETA_FP32 : NO_DTHETA};
    declare(p, &c);
    return NULL;
}

/* ---- the map --------------------------------------------------------------------------------- */

static const int64_t map_features[] = {16, 32, 33, 48, 64, 80, 96, 100, 127, 128, 160, 192, 256, 320, 512, 1024, 0};
static const char *const map_options[] = {
    "none",    "silu",         "softmax over D",         "softmax over N",  "relu",
    "sigmoid", "silu, dtheta", "softmax over D, dtheta", "silu, positions", NULL};
static const int map_acts[] = {0, 3, 4, 5, 1, 2, 3, 4, 3}; /* of `acts` */
enum { MAP_DTHETA = 6, MAP_POSITIONS = 8 };

/* outer is B N H. y has twice the elements of x, so that half of them fill the cell. */
static void make_map(problem *p, const struct map_cell *cell) {
    static const int64_t heads[] = {1, 8, 12, 16, 32, 64}, lengths[] = {128, 1000, 4096, 8191, 32768};
    const int act = map_acts[cell->option];
    const int64_t tokens = max64(cell->outer / 2, 1), h = min64(heads[cell->dice % 6], tokens);
    const int64_t n = min64(lengths[cell->dice / 6 % 5], tokens / h);
    const struct lrpe_case c = {.b = tokens / h / n,
                                .n = n,
                                .h = h,
                                .d = cell->length,
                                .act = acts[act].act,
                                .over = acts[act].over,
                                .dtype = cell->dtype,
                                .small_theta = true,
                                .positions = cell->option == MAP_POSITIONS ? POSITIONS_BN : FROM_OFFSET,
                                .position_dtype = RAFTER_I64,
                                .dtheta = cell->option >= MAP_DTHETA && cell->option < MAP_POSITIONS ? DTHETA_FP32
                                                                                                     : NO_DTHETA};
    declare(p, &c);
    p->large = false;
    const size_t used = strlen(p->label);
    snprintf(p->label + used, sizeof p->label - used, "%s", c.dtheta == NO_DTHETA ? "" : ", dtheta");
    map_lay_out(p, "x", cell->input);
    map_lay_out(p, "dy", cell->gradient);
}

static const struct map_kind map = {.name = "",
                                    .length_name = "D",
                                    .length = map_features,
                                    .dims = 1u << MAP_LAST,
                                    .option = map_options,
                                    .modes = 1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD,
                                    .make = make_map};

static const char *const algorithms[] = {"rafter", "sp", "bp", NULL};

const struct op_cases rafter_cases_lrpe_cosine = {
    .op = "lrpe_cosine",
    .prefix = "lrpe_cosine",
    .algorithms = algorithms,
    .algorithm_modes = {7, 7, 7},
    .count = count,
    .make = make,
    .tables = sizeof tables / sizeof *tables,
    .table = tables,
    .make_bench = make_bench,
    .make_request = make_request,
    .maps = 1,
    .map = &map,
    .call = call,
    .cost = cost,
    .oracle = oracle_lrpe_cosine,
};

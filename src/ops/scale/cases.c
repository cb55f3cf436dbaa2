/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "harness/map.h"
#include "harness/oracle.h"

/* ---- one problem ----------------------------------------------------------------------------- */

struct shape {
    int ndim;
    int64_t size[4];
};

/* Bounds: one product, rounded once, to half a unit in the last place; in the subnormal range that
 * is half of the smallest subnormal. */
static void build(problem *p, rafter_dtype dtype, const struct shape *shape, double factor, bool in_place) {
    problem_tensor *x = problem_add(p, "x", PROBLEM_INPUT, dtype, shape->ndim, shape->size);
    x->scale = 3;
    x->special = true;
    problem_tensor *f = problem_add(p, "factor", PROBLEM_INPUT, RAFTER_F32, 0, NULL);
    f->scale = 0; /* every element is `shift` */
    f->shift = factor;
    problem_tensor *y = problem_add(p, "y", PROBLEM_OUTPUT, dtype, shape->ndim, shape->size);
    y->in_place_of = in_place ? "x" : NULL;
    y->relative = 0x1p-24;
    y->absolute = 0x1p-150;

    size_t used = (size_t)snprintf(p->label, sizeof p->label, "%s [", problem_dtype_name(dtype));
    for (int d = 0; d < shape->ndim; d++)
        used +=
            (size_t)snprintf(p->label + used, sizeof p->label - used, d ? ", %lld" : "%lld", (long long)shape->size[d]);
    snprintf(p->label + used, sizeof p->label - used, "] by %g%s", factor, in_place ? ", in place" : "");
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* Around vector widths, and around the 1024 elements that are gathered at a time; with several
 * tasks. */
static const struct shape shapes[] = {
    {0, {0}},        {1, {0}},        {1, {1}},          {3, {3, 0, 5}}, {2, {2, 2}},    {2, {2, 3}},
    {2, {2, 7}},     {2, {2, 8}},     {2, {2, 9}},       {2, {2, 15}},   {2, {2, 16}},   {2, {2, 17}},
    {2, {2, 31}},    {2, {2, 32}},    {2, {2, 33}},      {2, {2, 63}},   {2, {2, 64}},   {2, {2, 65}},
    {2, {70, 3}},    {1, {257}},      {4, {2, 3, 5, 7}}, {2, {3, 1023}}, {2, {3, 1024}}, {2, {3, 1025}},
    {3, {5, 1, 40}}, {2, {1, 70001}}, {2, {3, 66000}},
};

/* Beside ordinary factors: 1, which in place does nothing; the zeros; factors that make x overflow,
 * and underflow into subnormals and to 0; inf and NaN. */
static const double factors[] = {1, -0.37, 2.5, 0, -0.0, 1e38, 3e-39, 1e-45, -INFINITY, NAN};
static const struct shape factor_shapes[] = {{2, {3, 37}}, {2, {2, 1025}}};

/* For GPUs: more packs than all threads of a grid have in flight. */
static const struct shape cuda_shapes[] = {{1, {(1 << 25) + 11}}, {2, {8200, 4099}}};

static const rafter_dtype dtypes[] = {RAFTER_F32, RAFTER_BF16, RAFTER_F16};

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof *(array)))

enum { PLACES = 2 }; /* out of place, in place */

static int64_t count(void) {
    return COUNT(dtypes) * PLACES * (COUNT(shapes) + COUNT(factors) * COUNT(factor_shapes)) +
           PLACES * COUNT(cuda_shapes) + 1;
}

static void make(problem *p, int64_t index) {
    const rafter_dtype dtype = dtypes[index % COUNT(dtypes)];
    const bool in_place = index / COUNT(dtypes) % PLACES;
    int64_t i = index / COUNT(dtypes) / PLACES;
    if (i < COUNT(shapes)) {
        build(p, dtype, &shapes[i], -0.37, in_place);
        return;
    }
    i -= COUNT(shapes);
    if (i < COUNT(factors) * COUNT(factor_shapes)) {
        build(p, dtype, &factor_shapes[i / COUNT(factors)], factors[i % COUNT(factors)], in_place);
        return;
    }
    i = index - COUNT(dtypes) * PLACES * (COUNT(shapes) + COUNT(factors) * COUNT(factor_shapes));
    if (i < PLACES * COUNT(cuda_shapes)) {
        build(p, dtype, &cuda_shapes[i / PLACES], -0.37, i % PLACES);
        p->for_cuda = true;
        p->sample = 257;
        return;
    }
    build(p, RAFTER_BF16, &(struct shape){2, {16391, 131101}}, -0.37, false); /* past 2^31 elements */
    p->large = true;
    p->sample = 4001;
}

static rafter_status call(const problem *p, rafter_context *context, enum problem_mode mode) {
    const rafter_scale_args args = {.size = sizeof args,
                                    .x = problem_dl(p, "x"),
                                    .factor = problem_dl(p, "factor"),
                                    .y = problem_dl(p, "y"),
                                    .workspace = p->workspace,
                                    .workspace_bytes = p->workspace_bytes};
    if (p->ask)
        return rafter_scale_workspace(context, &args, problem_direction(mode), p->ask);
    return rafter_scale_forward(context, &args);
}

/* ---- bench ----------------------------------------------------------------------------------- */

static const int64_t seeds_n[] = {1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 0};
static const int64_t quick_n[] = {2048, 8192, 0};
static const struct bench_table table = {"n", 1u << PROBLEM_FORWARD, seeds_n, quick_n};

/* Out of place: repeated in place, x would shrink to subnormals or grow to inf. */
static void make_bench(problem *p, const struct bench_row *row) {
    const int64_t dim = row->quick ? 1024 : 4096, resident = 4096 / problem_dtype_bytes(row->dtype);
    const struct shape whole = {2, {row->x, dim}}, in_l1 = {2, {row->x * dim / resident, resident}};
    build(p, row->dtype, row->resident ? &in_l1 : &whole, 0.37, false);
    p->sample = row->x * dim / (1 << 21) + 1;
    snprintf(p->title, sizeof p->title, "dim%d-%s", (int)dim, problem_dtype_name(row->dtype));
}

static const char *make_request(problem *p, const struct problem_request *r) {
    enum { MOST = sizeof((struct shape *)0)->size / sizeof(int64_t) };
    if (r->ndim > MOST)
        return "wanted a shape of at most 4 dimensions";
    struct shape shape = {.ndim = r->ndim};
    memcpy(shape.size, r->shape, sizeof shape.size);
    build(p, r->dtype, &shape, 0.37, r->in_place);
    return NULL;
}

/* ---- the map --------------------------------------------------------------------------------- */

static const char *const map_options[] = {"scale", NULL};

static void make_map(problem *p, const struct map_cell *cell) {
    build(p, cell->dtype, &(struct shape){2, {cell->outer, cell->length}}, 0.37, false);
    map_lay_out(p, "x", cell->input);
}

static const struct map_kind map = {.name = "",
                                    .length_name = "row length",
                                    .length = map_lengths,
                                    .dims = 1u << MAP_LAST,
                                    .option = map_options,
                                    .modes = 1u << PROBLEM_FORWARD,
                                    .make = make_map};

static void cost(const problem *p, enum problem_mode mode, double *bytes, double *flops) {
    const problem_tensor *x = problem_find(p, "x"), *y = problem_find(p, "y");
    *bytes = *flops = 0;
    if (mode == PROBLEM_FORWARD && !(y->in_place_of && problem_find(p, "factor")->shift == 1))
        *bytes = 2.0 * (double)(x->numel * problem_dtype_bytes(x->dtype));
}

static const char *const algorithms[] = {"rafter", NULL};

const struct op_cases rafter_cases_scale = {
    .op = "scale",
    .prefix = "scale",
    .algorithms = algorithms,
    .algorithm_modes = {1u << PROBLEM_FORWARD},
    .count = count,
    .make = make,
    .tables = 1,
    .table = &table,
    .make_bench = make_bench,
    .make_request = make_request,
    .maps = 1,
    .map = &map,
    .call = call,
    .cost = cost,
    .oracle = oracle_scale,
};

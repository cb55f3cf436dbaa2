/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "core/sizes.h"
#include "harness/map.h"
#include "harness/oracle.h"

enum variety {
    PLAIN,
    MASKED,           /* relu with its mask */
    FORWARD_IN_PLACE, /* y is x; no backward, which would need x */
    BACKWARD_IN_PLACE /* dx is dy */
};

/* Scales of the normally distributed inputs, and bounds on their absolute values. */
static const double x_scale = 3, dy_scale = 1;
static const double x_size = 3.5 * 3, dy_size = 3.5 * 1;

/* Error bounds of fp32 results, with u half a unit in the last place, relative. 16-bit results are
 * held to the larger of these bounds and one unit in their own last place.
 *
 * sigmoid, silu: the exponential (4 u), 1 + e, the reciprocal (2 u) and one or two products give 10
 * u. The slope is also within 10 u, except that 1 + x s(-x) has a root near -1.28: there the error
 * is absolute, of the size of s, 8 u for |dy| = 1. Where e is subnormal its error is absolute too;
 * silu multiplies it by |x| < 104.
 *
 * softmax over n: e^(x - m) has an error of 3 u |x - m| from the difference and its product with
 * log2(e), where |x - m| is at most 2 |x|, plus 6 u of its own. The terms of the sum have the same
 * error, and the sum adds n / 8 + 8 u (columns fold 8 rows at a time). The reciprocal and the
 * products add 4 u. Backward: the sum of y dy has an error of n / 8 + 8 u, relative to the sum of
 * |y dy|, which is at most |dy|. */
static const double u = 0x1p-24;

static void set_bounds(problem *p, rafter_act_kind kind, int64_t length) {
    problem_tensor *y = problem_find(p, "y"), *dx = problem_find(p, "dx");
    if (kind == RAFTER_ACT_SOFTMAX) {
        y->relative = (2 * (3 * 2 * x_size + 6) + (double)length / 8 + 8 + 4) * u;
        y->absolute = 0x1p-149; /* for subnormals */
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
    p->options.act = kind;
    p->options.dim = dim;
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
        const int64_t bytes = ceil_div(x->numel, 8);
        problem_add(p, "relu_mask", PROBLEM_OUTPUT, RAFTER_U8, 1, &bytes);
    }
    const int64_t length = kind == RAFTER_ACT_SOFTMAX && ndim > 0 ? shape[dim < 0 ? dim + ndim : dim] : 1;
    set_bounds(p, kind, length);
    p->finite_differences = dtype == RAFTER_F32 && kind != RAFTER_ACT_RELU && variety == PLAIN && x->numel < 200;

    size_t used = (size_t)snprintf(p->label, sizeof p->label, "%s%s %s [", problem_act_names[kind],
                                   variety_names[variety], problem_dtype_name(dtype));
    for (int d = 0; d < ndim; d++)
        used += (size_t)snprintf(p->label + used, sizeof p->label - used, d ? ", %lld" : "%lld", (long long)shape[d]);
    snprintf(p->label + used, sizeof p->label - used, kind == RAFTER_ACT_SOFTMAX ? "] dim %d" : "]", dim);
}

/* ---- tests ----------------------------------------------------------------------------------- */

struct shape {
    int ndim;
    int64_t size[4];
};

/* For elementwise kinds. A masked problem, whose tensors must be contiguous in every layout, has one
 * row of all elements instead. Transposed, the last shapes are tiles of many short rows, tiles of few
 * rows, and several tiles in both directions. */
static const struct shape shapes[] = {
    {0, {0}},        {1, {0}},          {1, {1}},       {3, {3, 0, 5}}, {2, {2, 2}},    {2, {2, 3}},     {2, {2, 7}},
    {2, {2, 8}},     {2, {2, 9}},       {2, {2, 15}},   {2, {2, 16}},   {2, {2, 17}},   {2, {2, 31}},    {2, {2, 32}},
    {2, {2, 33}},    {4, {2, 3, 5, 7}}, {2, {3, 1023}}, {2, {3, 1024}}, {2, {3, 1025}}, {2, {1, 70001}}, {2, {3, 5000}},
    {2, {70, 1100}}, {3, {2, 37, 70}},  {2, {700, 21}}, {2, {500, 3}},  {2, {24, 600}}, {2, {200, 136}},
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
    /* short rows, which are transposed into columns: for every number of rows in a vector, more rows
     * than are transposed at a time, and some left over */
    {-1, {2, {600, 5}}},
    {-1, {2, {1100, 2}}},
    {-1, {2, {601, 4}}},
    {-1, {2, {333, 8}}},
    {-1, {2, {150, 21}}},
    {-1, {2, {70, 40}}},
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
    /* a few columns of many rows, several of which are treated as one */
    {0, {2, {2000, 2}}},
    {0, {2, {515, 9}}},
    {0, {2, {300, 31}}},
    {1, {3, {3, 70, 5}}},
    /* many blocks of a few columns, which become rows of several lines: in forward, or in both
     * directions */
    {1, {3, {600, 2, 7}}},
    {1, {3, {40, 31, 7}}},
    {1, {3, {37, 127, 2}}},
    {1, {3, {20, 60, 7}}},
    {1, {4, {3, 7, 9, 3}}},
    {0, {2, {16, 1030}}},
    {1, {3, {2, 8, 16}}},
    {1, {3, {3, 7, 31}}},
    {1, {3, {2, 1023, 9}}},
    {-2, {4, {2, 2, 40, 128}}},
    {1, {4, {2, 5, 3, 4}}},
    {-2, {4, {2, 3, 1, 5}}},
};
/* Lines so few and so long that they are split into parts. For GPUs also column tiles of one chunk
 * and of many chunks; rows for a few lanes, a warp, a block, and clusters of 2, 4, 8 and 16 blocks,
 * one row per cluster and several; chunks of short lines; interleaved lines in a block and in
 * clusters, one slab per cluster and several; slabs that are read twice; short columns in packs of
 * 16 bytes, of two elements and of one; tiles of columns that are not aligned or very long; and many
 * rows in shared memory. */
static const struct {
    rafter_dtype dtype;
    int dim;
    struct shape shape;
    bool for_cuda;
} long_lines[] = {{RAFTER_F32, -1, {2, {2, 140001}}, false},
                  {RAFTER_BF16, 0, {2, {5003, 70}}, false},
                  {RAFTER_BF16, -1, {2, {1, 1 << 20}}, true},
                  {RAFTER_BF16, -1, {2, {600, 2056}}, true},
                  {RAFTER_F32, -1, {2, {60, 5001}}, true},
                  {RAFTER_F16, 0, {2, {70001, 8}}, true},
                  {RAFTER_F32, 0, {2, {9001, 7}}, true},
                  {RAFTER_BF16, 1, {3, {3, 1100, 136}}, true},
                  {RAFTER_BF16, 1, {3, {40, 130, 72}}, true},
                  {RAFTER_BF16, 0, {2, {1 << 20, 1}}, true},
                  {RAFTER_BF16, -2, {4, {3, 4, 300, 128}}, true},
                  {RAFTER_F16, 0, {2, {9001, 72}}, true},
                  {RAFTER_F32, -2, {4, {2, 3, 2050, 36}}, true},
                  {RAFTER_F16, -1, {2, {1001, 517}}, true},
                  {RAFTER_BF16, -1, {2, {300, 4096}}, true},
                  {RAFTER_F16, -1, {2, {31, 16392}}, true},
                  {RAFTER_BF16, -1, {2, {30, 50257}}, true},
                  {RAFTER_F32, -1, {2, {5, 20001}}, true},
                  {RAFTER_BF16, -1, {2, {9, 131072}}, true},
                  {RAFTER_BF16, -1, {2, {5, 262144}}, true},
                  {RAFTER_F16, -1, {2, {3, 524288}}, true},
                  {RAFTER_F32, -1, {2, {2, 700001}}, true},
                  {RAFTER_BF16, -1, {2, {999, 8}}, true},
                  {RAFTER_F16, -1, {2, {998, 16}}, true},
                  {RAFTER_BF16, -1, {2, {997, 24}}, true},
                  {RAFTER_BF16, -1, {2, {5001, 2}}, true},
                  {RAFTER_F16, -1, {2, {3001, 9}}, true},
                  {RAFTER_BF16, -1, {2, {1999, 33}}, true},
                  {RAFTER_BF16, 1, {3, {900, 21, 7}}, true},
                  {RAFTER_F16, 1, {3, {1500, 32, 2}}, true},
                  {RAFTER_F32, 1, {3, {700, 2, 64}}, true},
                  {RAFTER_BF16, 1, {3, {40, 257, 7}}, true},
                  {RAFTER_F16, 1, {3, {4, 1000, 513}}, true},
                  {RAFTER_F32, 1, {3, {3, 5000, 7}}, true},
                  {RAFTER_BF16, 1, {3, {2, 40000, 2}}, true},
                  {RAFTER_F16, 1, {3, {2, 130001, 7}}, true},
                  {RAFTER_BF16, 1, {3, {5, 600, 64}}, true},
                  {RAFTER_BF16, 1, {3, {3, 33, 4096}}, true},
                  {RAFTER_F16, 0, {2, {100, 5242}}, true},
                  {RAFTER_BF16, 0, {2, {9, 6393}}, true},
                  {RAFTER_F32, 0, {2, {21, 6391}}, true},
                  {RAFTER_BF16, 0, {2, {1031, 1302}}, true},
                  {RAFTER_F16, 0, {2, {2100, 1031}}, true},
                  {RAFTER_BF16, -1, {2, {1001, 130}}, true},
                  {RAFTER_BF16, -1, {2, {1003, 257}}, true},
                  {RAFTER_F32, -1, {2, {501, 65}}, true},
                  {RAFTER_F32, -1, {2, {301, 701}}, true},
                  {RAFTER_F32, -1, {2, {300, 1001}}, true},
                  {RAFTER_BF16, -1, {2, {200, 1501}}, true},
                  {RAFTER_F16, -1, {2, {150, 2001}}, true},
                  {RAFTER_F16, -1, {2, {205, 1001}}, true},
                  {RAFTER_BF16, 1, {3, {3400, 520, 2}}, true},
                  {RAFTER_F32, -1, {2, {1700, 4101}}, true},
                  {RAFTER_F16, -1, {2, {1100, 16390}}, true},
                  {RAFTER_BF16, 1, {3, {1200, 2100, 7}}, true},
                  {RAFTER_BF16, 0, {2, {20001, 513}}, true},
                  {RAFTER_BF16, 0, {2, {70001, 72}}, true},
                  {RAFTER_F16, -1, {2, {2, 1100001}}, true},
                  {RAFTER_F16, 1, {3, {10, 130001, 7}}, true},
                  {RAFTER_F32, 1, {3, {4, 400001, 3}}, true},
                  {RAFTER_BF16, 0, {2, {33001, 512}}, true},
                  {RAFTER_F16, 1, {3, {19, 65537, 14}}, true},
                  {RAFTER_F32, -1, {2, {1025, 16387}}, true},
                  /* large tensors of few steps, whose columns are not aligned: shifted packs; two, eight or four
                   * columns to a thread, and few of them side by side; and of some hundred steps */
                  {RAFTER_BF16, 0, {2, {5, 1700001}}, true},
                  {RAFTER_F16, 1, {3, {3, 40, 70003}}, true},
                  {RAFTER_F32, 0, {2, {2, 4200001}}, true},
                  {RAFTER_BF16, 0, {2, {2, 4200003}}, true},
                  {RAFTER_F32, 1, {3, {2, 21, 200003}}, true},
                  {RAFTER_F32, 1, {3, {3000, 22, 129}}, true},
                  {RAFTER_F32, 0, {2, {403, 20999}}, true}};

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
    {RAFTER_ACT_SOFTMAX, FORWARD_IN_PLACE, -1, {2, {300, 5}}},
    {RAFTER_ACT_SOFTMAX, BACKWARD_IN_PLACE, -1, {2, {300, 5}}},
    {RAFTER_ACT_SOFTMAX, FORWARD_IN_PLACE, 0, {2, {300, 5}}},
    {RAFTER_ACT_SOFTMAX, BACKWARD_IN_PLACE, 0, {2, {300, 5}}},
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
        if (p->tensor[0].numel > 1 << 21)
            p->sample = 31;
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
    if (row->resident && kind != RAFTER_ACT_SOFTMAX) { /* elementwise kinds: rows of 4 KiB of any shape */
        shape[1] = row->dtype == RAFTER_F32 ? 1024 : 2048;
        shape[0] = batch * heads * row->x * features / shape[1];
        ndim = 2;
    }
    declare(p, kind, dim, row->dtype, kind == RAFTER_ACT_RELU ? MASKED : PLAIN, ndim, shape);
    if (kind == RAFTER_ACT_NONE) { /* the result is the input itself */
        problem_find(p, "y")->in_place_of = "x";
        problem_find(p, "dx")->in_place_of = "dy";
    }
    p->sample = kind == RAFTER_ACT_SOFTMAX ? 509 : 4093;
    char dim_text[16] = "";
    if (kind == RAFTER_ACT_SOFTMAX)
        snprintf(dim_text, sizeof dim_text, "-dim_%d", dim);
    snprintf(p->title, sizeof p->title, "batch%d-head%d-dim%d-act_%s%s-%s", (int)batch, (int)heads, (int)features,
             problem_act_names[kind], dim_text, problem_dtype_name(row->dtype));
}

static const char *make_request(problem *p, const struct problem_request *r) {
    const rafter_act_kind kind = r->options.act;
    const int dims = r->ndim > 0 ? r->ndim : 1;
    if (kind == RAFTER_ACT_SOFTMAX && (r->options.dim < -dims || r->options.dim >= dims))
        return "wanted a dim of the shape";
    declare(p, kind, r->options.dim, r->dtype, kind == RAFTER_ACT_RELU ? MASKED : PLAIN, r->ndim, r->shape);
    if (r->in_place) {
        problem_find(p, "y")->in_place_of = "x";
        problem_find(p, "dx")->in_place_of = "dy";
    }
    return NULL;
}

/* ---- the map --------------------------------------------------------------------------------- */

static const char *const map_kinds[] = {"silu", "relu", "sigmoid", NULL};
static const rafter_act_kind map_acts[] = {RAFTER_ACT_SILU, RAFTER_ACT_RELU, RAFTER_ACT_SIGMOID};
static const char *const map_softmax[] = {"softmax", NULL};

static void make_map(problem *p, const struct map_cell *cell, rafter_act_kind kind) {
    int64_t shape[3];
    int dim;
    const int ndim = map_shape(cell, shape, &dim);
    declare(p, kind, dim, cell->dtype, PLAIN, ndim, shape);
    map_lay_out(p, "x", cell->input);
    map_lay_out(p, "dy", cell->gradient);
}

static void make_map_elementwise(problem *p, const struct map_cell *cell) {
    make_map(p, cell, map_acts[cell->option]);
}

static void make_map_softmax(problem *p, const struct map_cell *cell) {
    make_map(p, cell, RAFTER_ACT_SOFTMAX);
}

static const struct map_kind maps[] = {
    {.name = "elementwise",
     .length_name = "row length",
     .length = map_lengths,
     .dims = 1u << MAP_LAST,
     .option = map_kinds,
     .modes = 1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD,
     .make = make_map_elementwise},
    {.name = "softmax",
     .length_name = "length of the softmax",
     .length = map_lengths,
     .dims = (1u << MAP_DIMS) - 1,
     .option = map_softmax,
     .modes = 1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD,
     .make = make_map_softmax},
};

/* The mask costs forward a little and saves backward a lot, so it has a column of its own. */
static const char *const algorithms[] = {"rafter", "mask", NULL};
enum { WITHOUT_MASK, WITH_MASK };

static bool adapt(problem *p) {
    const bool has_mask = strcmp(p->tensor[p->tensors - 1].name, "relu_mask") == 0;
    if (p->algorithm == WITHOUT_MASK && has_mask)
        p->tensors--;
    return p->algorithm == WITHOUT_MASK || has_mask;
}

/* For a relu that may have a mask, the smaller cost: forward without it, backward with it. */
static void cost(const problem *p, enum problem_mode mode, double *bytes, double *flops) {
    const rafter_act_kind kind = p->options.act;
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
    const rafter_act_args args = {.size = sizeof args,
                                  .kind = p->options.act,
                                  .dim = p->options.dim,
                                  .x = problem_dl(p, "x"),
                                  .y = problem_dl(p, "y"),
                                  .dy = problem_dl(p, "dy"),
                                  .dx = problem_dl(p, "dx"),
                                  .relu_mask = problem_dl(p, "relu_mask"),
                                  .workspace = p->workspace,
                                  .workspace_bytes = p->workspace_bytes,
                                  .group = p->options.group};
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
    .make_request = make_request,
    .maps = COUNT(maps),
    .map = maps,
    .call = call,
    .cost = cost,
    .oracle = oracle_act,
};

/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "harness/map.h"
#include "harness/oracle.h"

/* ---- test cases ------------------------------------------------------------------------------ */

struct shape {
    int ndim, dim;
    int64_t size[4];
};

/* Around vector widths, and around the 1024 elements that are summed at a time. Each size is the
 * length of rows, the length of columns, and the number of columns. */
static const int64_t sizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 1023, 1024, 1025};

static const struct shape shapes[] = {
    /* middle dimensions, more of them, sizes of 1 */
    {3, 1, {2, 5, 3}},
    {3, 1, {3, 17, 33}},
    {3, 1, {2, 40, 65}},
    {3, 2, {2, 3, 50}},
    {3, 0, {9, 4, 10}},
    {4, 1, {2, 3, 4, 5}},
    {4, 2, {2, 3, 4, 5}},
    {4, 2, {2, 1, 7, 1}},
    {3, 1, {4, 1, 6}},
    {4, -1, {1, 1, 1, 9}},
    {2, -2, {6, 11}},
    /* vectors and a scalar */
    {1, 0, {1}},
    {1, 0, {300}},
    {1, -1, {5000}},
    {0, 0, {0}},
    {0, -1, {0}},
    /* empty lines, no lines */
    {2, 1, {3, 0}},
    {3, 1, {2, 0, 5}},
    {2, 0, {3, 0}},
    {1, 0, {0}},
    {3, 2, {0, 3, 4}},
    /* several blocks of lines, and lines long enough to be split into parts */
    {2, 1, {2100, 5}},
    {2, 1, {50, 49}},
    {2, 0, {5, 2100}},
    {2, 1, {3, 5000}},
    {2, 1, {1, 40000}},
    {2, 1, {3, 16385}},
    {2, 0, {2500, 7}},
    /* short rows, which are transposed into columns: for every number of rows in a vector, more rows
     * than are transposed at a time, and some left over */
    {2, 1, {601, 2}},
    {2, 1, {333, 4}},
    {2, 1, {300, 8}},
    {2, 1, {150, 21}},
    {2, 1, {90, 80}},
    /* a few columns of many rows, several of which are treated as one */
    {2, 0, {2000, 2}},
    {2, 0, {300, 31}},
    {3, 1, {3, 70, 5}},
    {2, 0, {300, 70}},
    {3, 1, {2, 1025, 9}},
    /* inner sizes of 2, 7, 64 and 513, with short and long lines */
    {3, 1, {3, 333, 2}},
    {3, 1, {2, 900, 7}},
    {3, 1, {2, 100, 64}},
    {3, 1, {2, 21, 70}},
    {2, 0, {70, 513}},
    /* short columns, four of which are adjacent and aligned */
    {3, 1, {3, 2, 64}},
    {3, 1, {2, 7, 100}},
    {3, 1, {3, 4, 32}},
    /* rows of whole packs, more of them than a warp of a GPU takes */
    {2, 1, {35, 128}},
    {2, 1, {35, 256}},
    /* so many rows that a warp of a GPU takes several, with every special value */
    {2, 1, {33001, 8}},
    /* short rows, in one layout with gaps between them: a thread of a GPU takes one, or four */
    {2, 1, {1203, 5}},
    {2, 1, {131075, 3}},
};

/* For GPUs: lines that several blocks share, so many lines that a block takes several, and many
 * short rows of whole packs. Dtypes take turns: fp32, bf16, fp16. */
static const struct shape cuda_shapes[] = {
    {2, 1, {1, 1 << 20}},
    {2, 1, {2, 400001}},
    {2, 0, {70001, 8}},
    {2, 0, {1 << 20, 1}},
    {2, 1, {70001, 9}},
    {2, 1, {2100, 300}},
    {2, 1, {70001, 1}},
    {3, 1, {3, 1500, 136}},
    {2, 1, {70001, 8}},
    {2, 1, {33001, 12}},
    {2, 1, {33001, 128}},
    {2, 1, {33001, 40}},
    {2, 1, {33001, 100}},
    {2, 1, {33001, 256}},
    {2, 1, {33001, 200}},
    {2, 1, {70001, 33}},
    {3, 1, {40, 20000, 7}},
    {3, 1, {3, 20000, 2}},
    {3, 1, {300, 9, 513}},
    {2, 1, {1001, 2053}},
    /* so many rows that a warp takes a batch of them: 4, 8 and 32 lanes per row, with edges */
    {2, 1, {100003, 61}},
    {2, 1, {30001, 133}},
    {2, 1, {9001, 1031}},
    {2, 1, {2101, 4111}},
    /* very short rows, which blocks copy into shared memory; every number of elements to a thread */
    {2, 1, {9001, 2}},
    {2, 1, {9001, 3}},
    {2, 1, {9001, 4}},
    {2, 1, {9001, 5}},
    {2, 1, {9001, 7}},
    {2, 1, {9001, 11}},
    {2, 1, {9001, 13}},
    {2, 1, {150001, 21}},
    {2, 1, {9001, 31}},
    /* a million of them: several to a thread */
    {2, 1, {1048601, 3}},
    {2, 1, {1048601, 5}},
    /* several to a pack of 16 bytes, and so many that a thread takes two packs */
    {2, 1, {1203, 4}},
    {2, 1, {2097203, 2}},
    /* columns that are not whole packs, so many that a block takes 128 or 256 of them */
    {2, 0, {35, 4099}},
    {2, 0, {300, 16387}},
    /* many short columns: a thread takes four */
    {3, 1, {5, 21, 26216}},
    {2, 0, {37, 131076}},
    {3, 1, {9, 13, 16388}},
    {3, 1, {3, 70, 2052}},
    {2, 0, {300, 4100}},
    /* long columns: in several windows, which blocks share; so many packs that a thread takes several */
    {3, 1, {3, 701, 513}},
    {2, 0, {5001, 264}},
    {3, 1, {2, 2501, 130}},
    {2, 0, {4003, 4099}},
    {2, 0, {4003, 4099}},
};

/* All options but the algorithm, which the harness chooses. */
struct options {
    bool keep;   /* lse and dlse have the dimension as 1 */
    bool narrow; /* lse in x's dtype, else fp32 */
    bool narrow_dlse;
    bool in_place; /* dx is x */
    bool rounded;  /* forward writes it too */
};
enum { OPTION_SETS = 32 };

static const struct shape option_shapes[] = {{2, 1, {4, 33}}, {3, 1, {5, 3, 37}}, {3, 1, {2, 5, 32}}, {2, 1, {37, 2}}};

enum {
    DTYPES = 3,
    SIZES = sizeof sizes / sizeof *sizes,
    SHAPES = sizeof shapes / sizeof *shapes,
    CUDA_SHAPES = sizeof cuda_shapes / sizeof *cuda_shapes,
    OPTION_SHAPES = sizeof option_shapes / sizeof *option_shapes,
};
static const rafter_dtype dtypes[DTYPES] = {RAFTER_F32, RAFTER_BF16, RAFTER_F16};

static struct options options_of(int64_t set) {
    return (struct options){
        .keep = set & 1, .narrow = set & 2, .narrow_dlse = set & 4, .in_place = set & 8, .rounded = set & 16};
}

/* ---- one problem ----------------------------------------------------------------------------- */

/*
 * Bounds. With e = 2^-24, the sum of e^(x - max) has the relative error
 *     E = e (14 + ln n).
 * A term, and the one that the sum is divided by, are accurate to 3 units each. The roundings of x
 * - max and of its product with log2(e) (without an FMA) are e |x - max| each. They are weighted by
 * e^(x - max); the weighted mean of |x - max| is at most ln n, and half of the roundings cancel. In
 * a block of 1024 elements at most 64 additions follow one another (4 lanes x 4 sums), and their
 * roundings grow like a random walk; sums of blocks are added without loss. lse is off by E and by
 * its own rounding.
 *
 * The gradient's exponential is accurate to 3 units; x - lse and its product with log2(e) add e |x
 * - lse| each; the product with dlse and the last rounding add 2 e. Where it underflows, the error
 * is a few units of the smallest subnormal.
 */
static void set_bounds(problem *p, int64_t n) {
    const double e = 0x1p-24, length = fmax(1, (double)n), largest = 3.5 * problem_find(p, "x")->scale;
    problem_tensor *lse = problem_find(p, "lse"), *rounded = problem_find(p, "rounded"), *dx = problem_find(p, "dx");
    lse->absolute = e * (14 + log(length));
    lse->relative = e;
    if (rounded) {
        rounded->absolute = lse->absolute;
        rounded->relative = lse->relative;
    }
    const double distance = p->values == PROBLEM_HUGE ? 104 : 2 * largest + log(length);
    dx->relative = e * (8 + 2 * distance);
    dx->absolute = 4 * 0x1p-149;
}

static void build(problem *p, rafter_dtype dtype, const struct shape *shape, struct options o) {
    const int ndim = shape->ndim, dims = ndim > 0 ? ndim : 1, dim = shape->dim < 0 ? shape->dim + dims : shape->dim;
    p->options.dim = shape->dim;
    int64_t reduced[4], n = ndim > 0 ? shape->size[dim] : 1;
    int left = 0;
    for (int d = 0; d < ndim; d++)
        if (d != dim || o.keep)
            reduced[left++] = d == dim ? 1 : shape->size[d];
    problem_tensor *x = problem_add(p, "x", PROBLEM_INPUT, dtype, ndim, shape->size);
    x->scale = 3;
    x->special = true;
    problem_add(p, "lse", PROBLEM_OUTPUT, o.narrow ? dtype : RAFTER_F32, left, reduced);
    if (o.rounded)
        problem_add(p, "rounded", PROBLEM_OUTPUT, dtype, left, reduced)->laid_out_as = "lse";
    problem_add(p, "dlse", PROBLEM_UPSTREAM, o.narrow_dlse ? dtype : RAFTER_F32, left, reduced);
    problem_add(p, "dx", PROBLEM_GRADIENT, dtype, ndim, shape->size)->in_place_of = o.in_place ? "x" : NULL;
    set_bounds(p, n);

    int used = snprintf(p->label, sizeof p->label, "%s [", problem_dtype_name(dtype));
    for (int d = 0; d < ndim; d++)
        used +=
            snprintf(p->label + used, sizeof p->label - (size_t)used, d ? ", %lld" : "%lld", (long long)shape->size[d]);
    snprintf(p->label + used, sizeof p->label - (size_t)used, "] dim %d%s%s%s%s%s", shape->dim, o.keep ? ", kept" : "",
             o.narrow ? ", lse as x" : "", o.rounded ? ", rounded" : "", o.narrow_dlse ? ", dlse as x" : "",
             o.in_place ? ", in place" : "");
}

static int64_t count(void) {
    return DTYPES * (3 * SIZES + SHAPES + OPTION_SETS * OPTION_SHAPES) + CUDA_SHAPES + 1;
}

static void make(problem *p, int64_t index) {
    const rafter_dtype dtype = dtypes[index % DTYPES];
    int64_t i = index / DTYPES;
    const struct options any = options_of(index * 7 % OPTION_SETS);
    if (i < 3 * SIZES) {
        const int64_t size = sizes[i / 3];
        const struct shape along_last = {2, 1, {3, size}}, along_first = {2, 0, {size, 3}}, across = {2, 0, {5, size}};
        build(p, dtype, i % 3 == 0 ? &along_last : i % 3 == 1 ? &along_first : &across, any);
        return;
    }
    i -= 3 * SIZES;
    if (i < SHAPES) {
        build(p, dtype, &shapes[i], any);
        return;
    }
    i -= SHAPES;
    if (i < OPTION_SETS * OPTION_SHAPES) {
        build(p, dtype, &option_shapes[i / OPTION_SETS], options_of(i % OPTION_SETS));
        p->finite_differences = dtype == RAFTER_F32;
        return;
    }
    i = index - DTYPES * (3 * SIZES + SHAPES + OPTION_SETS * OPTION_SHAPES);
    if (i < CUDA_SHAPES) {
        build(p, dtype, &cuda_shapes[i], any);
        p->for_cuda = true;
        return;
    }
    build(p, RAFTER_BF16, &(struct shape){3, 2, {4, 4100, 131072}}, (struct options){.keep = true});
    p->large = true;
    p->sample = 1031;
}

static rafter_status call(const problem *p, rafter_context *context, enum problem_mode mode) {
    rafter_logsumexp_args args = {.size = sizeof args,
                                  .algorithm = (rafter_logsumexp_algorithm)p->algorithm,
                                  .dim = p->options.dim,
                                  .x = problem_dl(p, "x"),
                                  .lse = problem_dl(p, "lse"),
                                  .rounded = problem_dl(p, "rounded"),
                                  .dlse = problem_dl(p, "dlse"),
                                  .dx = problem_dl(p, "dx"),
                                  .workspace = p->workspace,
                                  .workspace_bytes = p->workspace_bytes,
                                  .group = mode == PROBLEM_BACKWARD ? NULL : p->options.group};
    if (p->ask)
        return rafter_logsumexp_workspace(context, &args, problem_direction(mode), p->ask);
    if (mode != PROBLEM_BACKWARD) {
        const rafter_status status = rafter_logsumexp_forward(context, &args);
        if (status != RAFTER_OK || mode == PROBLEM_FORWARD)
            return status;
    }
    args.group = NULL; /* backward needs nothing of other ranks */
    return rafter_logsumexp_backward(context, &args);
}

/* ---- bench ----------------------------------------------------------------------------------- */

static const int64_t seeds_x[] = {1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 0};
static const int64_t quick_x[] = {4096, 16384, 65536, 131072, 0};
static const struct bench_table table = {"n", 1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD | 1u << PROBLEM_BOTH,
                                         seeds_x, quick_x};

static void make_bench(problem *p, const struct bench_row *row) {
    const int64_t batch = row->quick ? 1 : 4, dim = 1024, resident = 4096 / (row->dtype == RAFTER_F32 ? 4 : 2);
    const int64_t n = row->resident && row->x > resident ? resident : row->x;
    build(p, row->dtype, &(struct shape){3, -1, {batch, dim, n}}, (struct options){.narrow = false});
    p->sample = batch * dim * n / (1 << 21) + 1;
    snprintf(p->title, sizeof p->title, "batch%lld-dim%lld-%s", (long long)batch, (long long)dim,
             problem_dtype_name(row->dtype));
}

static const char *make_request(problem *p, const struct problem_request *r) {
    enum { MOST = sizeof((struct shape *)0)->size / sizeof(int64_t) };
    if (r->ndim > MOST)
        return "wanted a shape of at most 4 dimensions";
    const int dims = r->ndim > 0 ? r->ndim : 1;
    if (r->options.dim < -dims || r->options.dim >= dims)
        return "wanted a dim of the shape";
    struct shape shape = {.ndim = r->ndim, .dim = r->options.dim};
    memcpy(shape.size, r->shape, sizeof shape.size);
    build(p, r->dtype, &shape, (struct options){.in_place = r->in_place});
    return NULL;
}

/* ---- the map --------------------------------------------------------------------------------- */

static const char *const map_options[] = {"lse in fp32", "lse and dlse in x's dtype", NULL};

static void make_map(problem *p, const struct map_cell *cell) {
    struct shape shape = {0};
    shape.ndim = map_shape(cell, shape.size, &shape.dim);
    build(p, cell->dtype, &shape, (struct options){.narrow = cell->option, .narrow_dlse = cell->option});
    map_lay_out(p, "x", cell->input);
    map_lay_out(p, "dlse", cell->gradient);
}

static const struct map_kind map = {.name = "",
                                    .length_name = "length of the reduction",
                                    .length = map_lengths,
                                    .dims = (1u << MAP_DIMS) - 1,
                                    .option = map_options,
                                    .modes = 1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD,
                                    .make = make_map};

static void cost(const problem *p, enum problem_mode mode, double *bytes, double *flops) {
    *bytes = *flops = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (mode != PROBLEM_FORWARD || t->role == PROBLEM_INPUT || t->role == PROBLEM_OUTPUT)
            *bytes += (double)(t->numel * problem_dtype_bytes(t->dtype));
    }
}

static const char *const algorithms[] = {"rafter", "parallel", "recurrence", NULL};

const struct op_cases rafter_cases_logsumexp = {
    .op = "logsumexp",
    .prefix = "logsumexp",
    .algorithms = algorithms,
    /* Backward has one algorithm. */
    .algorithm_modes = {1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD | 1u << PROBLEM_BOTH,
                        1u << PROBLEM_FORWARD | 1u << PROBLEM_BOTH, 1u << PROBLEM_FORWARD | 1u << PROBLEM_BOTH},
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
    .oracle = oracle_logsumexp,
};

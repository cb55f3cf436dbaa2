/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/map.h"

#include <stdio.h>
#include <string.h>

#include "core/sizes.h"
#include "harness/dice.h"
#include "harness/internal.h"

const int64_t map_lengths[] = {2,     9,      21,     32,     33,     64,     100,    127,   128,   256,
                               257,   512,    768,    1000,   1024,   1031,   2048,   2053,  4096,  4099,
                               5000,  8191,   8192,   10007,  16384,  32000,  32768,  50257, 50304, 65536,
                               65537, 100003, 128256, 131072, 151936, 262139, 262144, 0};

/* Inner sizes of MAP_MIDDLE. MAP_FIRST takes one of these or what fills the cell's size. */
static const int64_t inners[] = {1, 2, 7, 64, 513, 4096};

/* Bytes of x. On a GPU there is one more size, counted in elements: past 2^31. */
static const int64_t sizes[] = {1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30};
static const int64_t past_elements = ((int64_t)1 << 31) + (1 << 20);
static const int64_t least_bytes = 1 << 16;

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof *(array)))
enum { SMALL_SIZES = 5 };

static int64_t count_of(const int64_t *list) {
    int64_t count = 0;
    while (list[count])
        count++;
    return count;
}

static int64_t power_of_two_below(int64_t x) {
    int64_t power = 1;
    while (2 * power <= x)
        power *= 2;
    return power;
}

static enum map_dim draw_dim(struct dice *d, unsigned dims) {
    /* Rows are what users have most: every second cell. */
    if (dims == 1u << MAP_LAST || pick(d, 2))
        return MAP_LAST;
    return one_in(d, 2) ? MAP_MIDDLE : MAP_FIRST;
}

/* Draws a shape for the cell's length and dtype. False: its size is out of range, so draw again. */
static bool draw_shape(struct map_cell *c, struct dice *d, const struct map_kind *kind, bool small) {
    const int64_t element = problem_dtype_bytes(c->dtype), size = pick(d, small ? SMALL_SIZES : COUNT(sizes) + 1);
    const bool past = size == COUNT(sizes);
    const int64_t elements = past ? past_elements : sizes[size] / element;
    c->dim = draw_dim(d, kind->dims);
    c->outer = c->inner = 1;
    const bool round = one_in(d, 2), few = one_in(d, 8);
    int64_t *const rest = c->dim == MAP_FIRST ? &c->inner : &c->outer; /* what is left to fill the size */
    if (c->dim == MAP_MIDDLE)
        c->inner = inners[1 + pick(d, COUNT(inners) - 1)];
    if (c->dim == MAP_FIRST && !past && one_in(d, 2)) {
        c->inner = inners[pick(d, COUNT(inners))];
    } else {
        const int64_t line = c->length * c->inner, count = past ? ceil_div(elements, line) : elements / line;
        *rest = few && c->dim == MAP_LAST && !past ? 1 + pick(d, 16) : count;
        if (round && !past && *rest > 1)
            *rest = power_of_two_below(*rest);
    }
    const int64_t bytes = c->outer * c->length * c->inner * element;
    return bytes >= least_bytes && (past || bytes <= sizes[small ? SMALL_SIZES - 1 : COUNT(sizes) - 1]);
}

/* A number for each list of cells. */
static uint64_t list_of(const struct op_cases *op, const struct map_kind *kind, uint64_t seed) {
    uint64_t list = problem_mix(seed);
    for (const char *c = op->op; *c; c++)
        list = problem_mix(list ^ (unsigned char)*c);
    for (const char *c = kind->name; *c; c++)
        list = problem_mix(list ^ (unsigned char)*c);
    return list;
}

static rafter_dtype draw_dtype(struct dice *d) {
    static const rafter_dtype dtypes[] = {RAFTER_BF16, RAFTER_BF16, RAFTER_F16, RAFTER_F32};
    return dtypes[pick(d, COUNT(dtypes))];
}

/* All but the dtype and the shape. */
static void draw_call(struct map_cell *c, struct dice *d, const struct map_kind *kind) {
    int options = 0;
    while (kind->option[options])
        options++;
    c->option = one_in(d, 2) ? 0 : (int)pick(d, options);
    c->input = PROBLEM_COMPACT;
    if (c->dim == MAP_LAST && one_in(d, 3))
        c->input = one_in(d, 2) ? PROBLEM_UNALIGNED : PROBLEM_PADDED;
    c->gradient = PROBLEM_COMPACT;
    if (one_in(d, 3))
        c->gradient = one_in(d, 2) ? PROBLEM_BROADCAST : PROBLEM_TRANSPOSED;
    c->dice = roll(d);
}

struct map_cell map_draw(const struct op_cases *op, const struct map_kind *kind, uint64_t seed, int64_t index,
                         bool small) {
    const uint64_t list = list_of(op, kind, seed);
    struct dice d = {list ^ problem_mix((uint64_t)index)};
    struct map_cell cell = {.dtype = draw_dtype(&d)};
    /* Lengths take turns, so that a few cells already have all of them. */
    const uint64_t lengths = (uint64_t)count_of(kind->length);
    cell.length = kind->length[(list % lengths + (uint64_t)index) % lengths];
    while (!draw_shape(&cell, &d, kind, small))
        ;
    draw_call(&cell, &d, kind);
    return cell;
}

struct map_cell map_draw_unlisted(const struct op_cases *op, const struct map_kind *kind, uint64_t seed, int64_t index,
                                  int64_t most) {
    enum { SHORT = 72 }; /* the kernels of short rows are made for single lengths, so every second row is short */
    struct dice d = {~list_of(op, kind, seed) ^ problem_mix((uint64_t)index)};
    struct map_cell cell = {.outer = 1, .inner = 1, .dtype = draw_dtype(&d), .dim = draw_dim(&d, kind->dims)};
    const int64_t elements = pick_size(&d, most);
    cell.length = one_in(&d, 2) ? 1 + pick(&d, SHORT) : pick_size(&d, elements);
    const int64_t lines = max64(elements / cell.length, 1);
    if (cell.dim != MAP_LAST)
        cell.inner = cell.dim == MAP_FIRST ? lines : pick_size(&d, lines);
    cell.outer = lines / cell.inner;
    draw_call(&cell, &d, kind);
    return cell;
}

int map_shape(const struct map_cell *cell, int64_t shape[3], int *dim) {
    const int64_t all[] = {cell->outer, cell->length, cell->inner};
    const int from = cell->dim == MAP_FIRST, to = cell->dim == MAP_LAST ? 2 : 3;
    memcpy(shape, all + from, (size_t)(to - from) * sizeof *shape);
    *dim = 1 - from;
    return to - from;
}

void map_lay_out(problem *p, const char *name, enum problem_layout layout) {
    problem_tensor *t = problem_find(p, name);
    if (t)
        t->layout = layout;
}

void map_layout_text(const struct map_cell *cell, char *text, size_t size) {
    static const char *const names[] = {"last", "middle", "first"};
    bool listed = false;
    for (int64_t i = 0; i < COUNT(inners); i++)
        listed |= inners[i] == cell->inner;
    if (cell->dim == MAP_LAST)
        snprintf(text, size, "last%s",
                 cell->input == PROBLEM_COMPACT     ? ""
                 : cell->input == PROBLEM_UNALIGNED ? ", at an odd offset"
                                                    : ", padded rows");
    else if (listed)
        snprintf(text, size, "%s, inner %lld", names[cell->dim], (long long)cell->inner);
    else
        snprintf(text, size, "%s, inner other", names[cell->dim]);
}

const char *map_gradient_text(const problem *p) {
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (t->role != PROBLEM_UPSTREAM)
            continue;
        return !problem_lays_out(t, t->layout)   ? "dense" /* a vector has no transpose */
               : t->layout == PROBLEM_BROADCAST  ? "expanded"
               : t->layout == PROBLEM_TRANSPOSED ? "transposed"
                                                 : "dense";
    }
    return "none";
}

double map_bytes(const problem *p, enum problem_mode mode) {
    double bytes, flops;
    p->op->cost(p, mode, &bytes, &flops);
    for (int i = 0; i < p->tensors && mode != PROBLEM_FORWARD; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (t->role == PROBLEM_UPSTREAM && t->layout == PROBLEM_BROADCAST && t->numel > 0)
            bytes -= (double)((t->numel - 1) * problem_dtype_bytes(t->dtype));
    }
    return bytes;
}

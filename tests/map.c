/* SPDX-License-Identifier: Apache-2.0 */
/* The lists of cells of `rafter bench --preset map`: every part of the grid is in the default
 * number of cells, sizes keep to the device's limits, and the same seed gives the same list. */
#include <stdio.h>
#include <string.h>

#include "harness/map.h"

enum { GPU_CELLS = 400, CPU_CELLS = 50 };

static int failures;

static void expect(bool good, const char *op, const char *kind, const char *what) {
    if (good)
        return;
    printf("FAIL: %s %s: %s\n", op, kind, what);
    failures++;
}

static bool same(const struct map_cell *a, const struct map_cell *b) {
    return a->dim == b->dim && a->outer == b->outer && a->length == b->length && a->inner == b->inner &&
           a->dtype == b->dtype && a->input == b->input && a->gradient == b->gradient && a->option == b->option &&
           a->dice == b->dice;
}

/* What the cells of a list have between them: bit sets by enum or index. */
struct seen {
    unsigned dims, dtypes, inputs, gradients, options, inners;
    uint64_t lengths;
    int past;
    int64_t largest; /* bytes of x */
};

static void look(struct seen *s, const struct map_kind *kind, const struct map_cell *c) {
    static const int64_t inners[] = {1, 2, 7, 64, 513, 4096};
    const int64_t elements = c->outer * c->length * c->inner, bytes = elements * problem_dtype_bytes(c->dtype);
    s->dims |= 1u << c->dim;
    s->dtypes |= 1u << c->dtype;
    s->inputs |= 1u << c->input;
    s->gradients |= 1u << c->gradient;
    s->options |= 1u << c->option;
    for (int i = 0; i < 6; i++)
        s->inners |= (unsigned)(c->inner == inners[i] && c->dim != MAP_LAST) << i;
    for (int i = 0; kind->length[i]; i++)
        s->lengths |= (uint64_t)(c->length == kind->length[i]) << i;
    s->past += elements > (int64_t)1 << 31;
    s->largest = bytes > s->largest ? bytes : s->largest;
}

static void test_list(const struct op_cases *op, const struct map_kind *kind) {
    struct seen gpu = {0}, cpu = {0};
    int differ = 0;
    for (int64_t i = 0; i < GPU_CELLS; i++) {
        const struct map_cell cell = map_draw(op, kind, 1, i, false), again = map_draw(op, kind, 1, i, false);
        const struct map_cell other = map_draw(op, kind, 2, i, false);
        expect(same(&cell, &again), op->op, kind->name, "the same seed gives another cell");
        differ += !same(&cell, &other);
        look(&gpu, kind, &cell);
    }
    for (int64_t i = 0; i < CPU_CELLS; i++) {
        const struct map_cell cell = map_draw(op, kind, 1, i, true);
        look(&cpu, kind, &cell);
    }
    int options = 0, lengths = 0;
    while (kind->length[lengths])
        lengths++;
    while (kind->option[options])
        options++;
    expect(differ > GPU_CELLS / 2, op->op, kind->name, "another seed gives the same cells");
    expect(gpu.dims == kind->dims, op->op, kind->name, "a position of the reduced dimension is missing");
    expect(gpu.inners == (kind->dims == 1u << MAP_LAST ? 0 : 63), op->op, kind->name, "an inner size is missing");
    expect(gpu.dtypes == 7, op->op, kind->name, "a dtype is missing");
    expect(gpu.inputs == (1u << PROBLEM_COMPACT | 1u << PROBLEM_UNALIGNED | 1u << PROBLEM_PADDED), op->op, kind->name,
           "a layout of x is missing");
    expect(gpu.gradients == (1u << PROBLEM_COMPACT | 1u << PROBLEM_BROADCAST | 1u << PROBLEM_TRANSPOSED), op->op,
           kind->name, "a layout of the gradient is missing");
    expect(gpu.options == (1u << options) - 1, op->op, kind->name, "an option is missing");
    expect(gpu.lengths == ((uint64_t)1 << lengths) - 1 && cpu.lengths == gpu.lengths, op->op, kind->name,
           "a length is missing");
    expect(gpu.past > 10, op->op, kind->name, "few cells have more than 2^31 elements");
    expect(cpu.largest <= 64 << 20 && cpu.largest > 32 << 20, op->op, kind->name, "the CPU's largest x is not 64 MiB");
}

/* The least bytes of a backward count one element of an expanded gradient. */
static void test_bytes(void) {
    const struct op_cases *const op = &rafter_cases_act;
    struct map_cell cell = {.dim = MAP_LAST, .outer = 1000, .length = 100, .inner = 1, .dtype = RAFTER_BF16};
    problem p = {.op = op};
    op->map[0].make(&p, &cell);
    expect(map_bytes(&p, PROBLEM_BACKWARD) == 3 * 200000, "act", "", "bytes of x, dy and dx");
    p = (problem){.op = op};
    cell.gradient = PROBLEM_BROADCAST;
    op->map[0].make(&p, &cell);
    expect(map_bytes(&p, PROBLEM_BACKWARD) == 2 * 200000 + 2, "act", "", "bytes of x, an expanded dy, and dx");
    expect(map_bytes(&p, PROBLEM_FORWARD) == 2 * 200000, "act", "", "bytes of x and y");
}

int main(void) {
    for (int i = 0; problem_ops[i]; i++)
        for (int k = 0; k < problem_ops[i]->maps; k++)
            test_list(problem_ops[i], &problem_ops[i]->map[k]);
    test_bytes();
    printf("%d failures\n", failures);
    return failures > 0;
}

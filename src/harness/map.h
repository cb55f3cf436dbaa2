/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The map of an op: cells drawn from a grid of shapes, dtypes, layouts and options. An op's cases.c
 * says what its grid holds (struct map_kind) and makes problems of its cells; the drawing is the
 * same for all ops. A cell depends on the seed and its number alone, so that the first N cells of a
 * seed are the same in every run.
 */
#ifndef RAFTER_HARNESS_MAP_H
#define RAFTER_HARNESS_MAP_H

#include "harness/problem.h"

/* The reduced dimension: x is [outer, length], [outer, length, inner] or [length, inner]. */
enum map_dim { MAP_LAST, MAP_MIDDLE, MAP_FIRST, MAP_DIMS };

struct map_cell {
    enum map_dim dim;
    int64_t outer, length, inner; /* MAP_LAST: inner is 1; MAP_FIRST: outer is 1 */
    rafter_dtype dtype;
    enum problem_layout input;    /* of x: compact, unaligned or padded */
    enum problem_layout gradient; /* of the upstream gradient: compact, broadcast or transposed */
    int option;                   /* index into map_kind.option */
    uint64_t dice;                /* random bits for what only one op has */
};

struct map_kind {
    const char *name;          /* "softmax", where an op has several maps; else "" */
    const char *length_name;   /* "row length" */
    const int64_t *length;     /* zero-terminated */
    unsigned dims;             /* bit d set: enum map_dim d is drawn */
    const char *const *option; /* NULL-terminated; half of the cells take the first */
    unsigned modes;            /* bit m set: measured in problem_mode m */
    void (*make)(problem *p, const struct map_cell *cell);
};

/* Lengths of rows and reductions: powers of two, vocabularies, odd and prime ones. */
extern const int64_t map_lengths[];

/* Cell number `index`. `small`: x has at most 64 MiB, as a CPU gets through in minutes. */
struct map_cell map_draw(const struct op_cases *op, const struct map_kind *kind, uint64_t seed, int64_t index,
                         bool small);

/* The same with sizes that no list has: x has at most about `most` elements. For tests. */
struct map_cell map_draw_unlisted(const struct op_cases *op, const struct map_kind *kind, uint64_t seed, int64_t index,
                                  int64_t most);

/* The shape of x; returns the number of dimensions. *dim: the reduced one. */
int map_shape(const struct map_cell *cell, int64_t shape[3], int *dim);

/* Sets a tensor's layout, where the problem has the tensor. */
void map_lay_out(problem *p, const char *name, enum problem_layout layout);

/* For the report: "last, padded rows" or "middle, inner 513"; and the upstream gradient as it is in
 * the problem made of the cell: "dense", "expanded", "transposed", or "none" (of a mean loss). */
void map_layout_text(const struct map_cell *cell, char *text, size_t size);
const char *map_gradient_text(const problem *p);

/* The least bytes of one call: as op->cost, with one element for a broadcast tensor. */
double map_bytes(const problem *p, enum problem_mode mode);

#endif

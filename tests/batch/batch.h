/* SPDX-License-Identifier: Apache-2.0 */
/* Batch invariance: the same rows in batches of every size. See main.c. */
#ifndef RAFTER_TESTS_BATCH_H
#define RAFTER_TESTS_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "rafter/rafter.h"

enum { CONTENTS = 4, MOST_TENSORS = 12, MOST_ROWS = 5000, NARROW_ROWS = 7 };

/* A kind of row: what it holds besides its numbers. Content 3 is a row that the losses ignore. */
enum { IGNORED_CONTENT = 3 };

enum layout {
    ROWS,        /* one after the other */
    SHIFTED,     /* the same, beginning one element after a multiple of 16 bytes */
    INTERLEAVED, /* the elements of a row are MOST_ROWS + 1 apart: other rows lie between them */
    NARROW,      /* the same, 7 apart, and at most 7 rows */
    GAPS,        /* one after the other, with gaps between them, and numbers per row 3 apart */
    LAYOUTS
};

struct setting {
    const char *title;
    rafter_dtype dtype;
    int64_t length, depth; /* of a row: columns or classes; linear_cross_entropy: also of x */
    int options;           /* what the call is given: a number that it knows */
    enum layout layout;
};

enum role { INPUT, OUTPUT, SHARED }; /* SHARED: not of a row, such as a weight */

/* A tensor of a call. [rows, shape ...], or [shape ...] if it is shared. */
struct tensor {
    DLTensor dl;
    int64_t shape[4], strides[4], elements; /* elements: of a row */
    enum role role;
    char *host, *memory; /* memory: the device's, or `host` */
    int64_t bytes, element;
};

/* A call with some rows. */
struct scene {
    rafter_context *context;
    const struct setting *setting;
    int64_t rows;
    int first; /* row r has content (first + 5 r) % CONTENTS */
    struct tensor tensor[MOST_TENSORS];
    int count;
    bool failed; /* no memory */
};

int content_of(const struct scene *scene, int64_t row);

/* Adds a tensor and fills it. The values of an input follow from `size` and its number among the
 * scene's tensors. labels > 0: integers below that instead; ignored rows have -100. Layouts other than
 * ROWS apply to tensors with one dimension besides the rows; GAPS also to those with none. */
const DLTensor *add(struct scene *scene, enum role role, rafter_dtype dtype, double size, int64_t labels, int ndim,
                    const int64_t *shape);
/* One number per row. */
const DLTensor *add_numbers(struct scene *scene, enum role role, rafter_dtype dtype, double size);

/* Brings outputs to the host, and gives back the memory of the device. False: the device failed. */
bool fetch(struct scene *scene);
void release(struct scene *scene);

/* The address of element e of row `row`, on the host. */
const char *element_at(const struct tensor *t, int64_t row, int64_t e);

/* Adds the tensors of a call and makes it. */
struct call {
    const char *name;
    rafter_status (*make)(struct scene *scene);
    int options; /* settings.options is below that */
    enum { ANY_LENGTH, WITH_DEPTH, SEQUENCES } kind;
};
extern const struct call calls[];
extern const int calls_count;

#endif

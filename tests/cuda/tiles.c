/* SPDX-License-Identifier: Apache-2.0 */
/* linear_cross_entropy on problems larger than the walk's, whose logits have more tiles than the
 * GPU runs at once, in odd sizes; with exponentials stored in dweight; with many rows of one label;
 * with many ignored rows, which are dropped before the products, or, in the smallest budgets, are
 * not; and with whole tiles of classes masked. The hopper variants are compared with the cublaslt
 * variants; the walk compares all of them with fp64. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

enum ignored { A_THIRD, NONE, HALF, FIRST_HALF, AROUND_TILES, ALL_BUT_ONE, ALL_BUT_FIRST, ALL_BUT_LAST, ALL };

/* Classes that a bias of -inf masks: none; the second of every three TILEs; the first two TILEs, with
 * all other logits below -80. */
enum masked { NOTHING, SECOND_TILES, FIRST_TILES };

struct size {
    int64_t rows, depth, classes;
    enum ignored ignored;
    int64_t x_gap, dx_gap; /* elements between rows */
    enum masked masked;
    bool bad_row; /* a NaN in row BAD_ROW of x, which is not ignored */
};

enum { BAD_ROW = 3, TILE = 768 }; /* TILE: classes of whole tiles, of 192 and of 256 */
enum { MANY_ROWS = 8192 };        /* from here on small groups lose too much in bf16 sums, and take too long */
/* Up to this size of weight: redoing non-finite results takes seconds beyond. */
enum { MOST_REDONE = 4000000 };

static const struct size sizes[] = {
    {1, 80, 50257, .ignored = A_THIRD},
    {1000, 80, 50257, .ignored = A_THIRD},
    {300, 83, 9001, .ignored = A_THIRD},
    {515, 80, 50257, .ignored = ALL},
    {2100, 520, 70001, .ignored = A_THIRD}, /* exponentials of all rows are stored in dweight; */
    {5000, 520, 70001, .ignored = A_THIRD}, /* native: those of a first group; */
    {515, 1024, 50257, .ignored = A_THIRD}, /* compact: dz */
    {1024, 264, 9001, .ignored = NONE},
    {1300, 264, 9001, .ignored = HALF},
    {1300, 264, 9001, .ignored = FIRST_HALF},
    {1300, 264, 9001, .ignored = AROUND_TILES},
    {1300, 264, 9001, .ignored = ALL_BUT_ONE},
    {1300, 264, 9001, .ignored = ALL},
    {2100, 520, 70001, .ignored = ALL},    /* none are stored there */
    {1000, 520, 1031, .ignored = A_THIRD}, /* at most twice as many classes as features */
    {1300, 1032, 1999, .ignored = HALF},
    {2600, 1032, 300, .ignored = NONE},
    {600, 2056, 1031, .ignored = HALF}, /* copies of x in many steps of 16 bytes, and a tail */
    /* Each block finds the active rows among some rows; in the last size, among so many that it
     * takes two steps. */
    {3000, 24, 300, .ignored = HALF},
    {5000, 24, 40, .ignored = ALL_BUT_FIRST},
    {70000, 24, 40, .ignored = HALF},
    {70000, 24, 40, .ignored = ALL_BUT_FIRST},
    {70000, 24, 40, .ignored = ALL_BUT_LAST},
    {70000, 24, 40, .ignored = ALL},
    {300001, 24, 40, .ignored = HALF},
    /* Smallest budgets that drop no rows: x is used in place, or copied. */
    {515, 264, 9001, .ignored = A_THIRD, .x_gap = 8, .dx_gap = 3},
    {515, 264, 9001, .ignored = A_THIRD, .x_gap = 3},
    /* With the first tile masked, nothing is known in advance about the size of a row's logits. */
    {300, 264, 9001, .ignored = A_THIRD, .masked = FIRST_TILES},
    {300, 264, 9001, .ignored = A_THIRD, .masked = SECOND_TILES},
    {300, 520, 3031, .ignored = A_THIRD, .masked = FIRST_TILES},
    {300, 520, 3031, .ignored = A_THIRD, .masked = SECOND_TILES, .bad_row = true},
    {300, 264, 9001, .ignored = A_THIRD, .masked = FIRST_TILES, .bad_row = true},
    {3000, 2056, 9001, .ignored = A_THIRD}, /* exponentials of warpgroups that take tiles together; */
    {300, 2056, 20001, .ignored = A_THIRD}, /* in turns, also the last, split tiles */
    {3000, 120, 9001, .ignored = A_THIRD},  /* statistics of warpgroups that take tiles together */
};

static bool is_ignored(const struct size *s, int64_t row) {
    const int64_t in_tile = row % 256;
    switch (s->ignored) {
    case A_THIRD: return row % 3 == 1;
    case NONE: return false;
    case HALF: return problem_mix((uint64_t)row) % 2;
    case FIRST_HALF: return row < s->rows / 2;
    case AROUND_TILES: return in_tile == 0 || in_tile == 127 || in_tile == 128 || in_tile == 255 || row >= 1024;
    case ALL_BUT_ONE: return row != s->rows * 2 / 3;
    case ALL_BUT_FIRST: return row != 0;
    case ALL_BUT_LAST: return row != s->rows - 1;
    default: return true;
    }
}

static bool is_masked(const struct size *s, int64_t class) {
    return s->masked == SECOND_TILES ? class / TILE % 3 == 1 : s->masked == FIRST_TILES && class < 2 * TILE;
}

/* Unmasked classes of neighbouring tiles are so far apart that they cannot share an exp pivot. */
static double bias_of(const struct size *s, int64_t class) {
    return is_masked(s, class) ? -INFINITY : s->masked == FIRST_TILES ? -100 - 90 * (double)(class / TILE % 2) : 0;
}

/* Loss, dx and dweight of one call, on the host. */
struct results {
    float loss;
    uint16_t *dx, *dweight;
};

static uint16_t *make_matrix(int64_t n, double scale, uint64_t seed) {
    uint16_t *m = malloc((size_t)n * sizeof *m);
#pragma omp parallel for
    for (int64_t i = 0; i < (m ? n : 0); i++)
        problem_store(RAFTER_BF16, (char *)&m[i], scale * problem_normal(problem_mix(seed + (uint64_t)i)));
    return m;
}

/* Every seventh row that is not ignored has class 5. */
static int64_t label_of(const struct size *s, int64_t row) {
    if (is_ignored(s, row))
        return -100;
    const int64_t class = row % 7 == 0 ? 5 : (int64_t)((uint64_t)row * 2654435761u % (uint64_t)s->classes);
    return is_masked(s, class) ? s->classes - 1 : class;
}

/* The distance of a and b, relative to b. NaN in both counts as equal. */
static double apart(const uint16_t *a, const uint16_t *b, int64_t n) {
    double difference = 0, size = 0;
#pragma omp parallel for reduction(+ : difference, size)
    for (int64_t i = 0; i < n; i++) {
        const double x = problem_load(RAFTER_BF16, (const char *)&a[i]);
        const double y = problem_load(RAFTER_BF16, (const char *)&b[i]);
        if (isnan(x) && isnan(y))
            continue;
        difference += (x - y) * (x - y);
        size += y * y;
    }
    return size > 0 ? sqrt(difference / size) : sqrt(difference);
}

/* Whether dx of ignored rows is 0, and the gaps between rows are unchanged. */
static bool others_are_zero(const struct size *s, const uint16_t *dx) {
    bool good = true;
    for (int64_t row = 0; row < s->rows; row++, dx += s->depth + s->dx_gap) {
        for (int64_t i = 0; i < s->depth && is_ignored(s, row); i++)
            good &= (dx[i] & 0x7fff) == 0;
        for (int64_t i = s->depth; i < s->depth + s->dx_gap; i++)
            good &= dx[i] == 0xffff;
    }
    return good;
}

/* The contexts, all on one stream: the library's choice, and one per variant, by mode (fast,
 * compact). */
static rafter_context *automatic, *hopper[2], *cublaslt[2];

static void open_contexts(void) {
    automatic = open_context();
    void *const stream = context_stream(automatic);
    hopper[0] = open_variant(stream, "hopper_fast");
    hopper[1] = open_variant(stream, "hopper_compact");
    cublaslt[0] = open_variant(stream, "cublaslt_fast");
    cublaslt[1] = open_variant(stream, "cublaslt_compact");
}

static void close_contexts(void) {
    for (int i = 0; i < 2; i++) {
        rafter_context_destroy(hopper[i]);
        rafter_context_destroy(cublaslt[i]);
    }
    close_context(automatic);
}

/* The two variants that are compared. */
enum kind { HOPPER, CUBLASLT };

static bool fits_in(rafter_context *context, const rafter_linear_cross_entropy_args *args) {
    size_t bytes;
    return rafter_linear_cross_entropy_workspace(context, args, RAFTER_FORWARD, &bytes) == RAFTER_OK;
}

/* The context for a call with args->mode. Where the hopper variant does not serve the call, or not
 * within its budget, the library chooses: small_budget runs the steps of the hopper variants in
 * smaller groups. */
static rafter_context *context_for(const rafter_linear_cross_entropy_args *args, enum kind kind) {
    const int compact = args->mode == RAFTER_LCE_COMPACT;
    if (kind == CUBLASLT)
        return cublaslt[compact];
    return fits_in(hopper[compact], args) ? hopper[compact] : automatic;
}

/* Whether the budget is large enough. */
static bool fits(const rafter_linear_cross_entropy_args *args, enum kind kind) {
    return fits_in(context_for(args, kind), args);
}

/* The smallest budget that works. */
static size_t smallest_budget(rafter_linear_cross_entropy_args args) {
    size_t low = 0, high = 1; /* low does not work */
    for (args.budget = high; !fits(&args, HOPPER); args.budget = high) {
        low = high;
        high *= 2;
    }
    while (high - low > 1) {
        args.budget = low + (high - low) / 2;
        *(fits(&args, HOPPER) ? &high : &low) = args.budget;
    }
    return high;
}

static size_t bytes_of(const DLTensor *matrix) {
    return (size_t)matrix->shape[0] * (size_t)(matrix->strides ? matrix->strides[0] : matrix->shape[1]) * 2;
}

/* Makes the call. The caller frees the results. False: it failed. */
static bool run(const rafter_linear_cross_entropy_args *args, enum kind kind, struct results *r) {
    rafter_context *const context = context_for(args, kind);
    const size_t dx = bytes_of(args->dx), dweight = bytes_of(args->dweight);
    r->dx = malloc(dx);
    r->dweight = malloc(dweight);
    const bool filled =
        gpu_fill(context, args->dx->data, 0xff, dx) && gpu_fill(context, args->dweight->data, 0xff, dweight);
    const rafter_status status = rafter_linear_cross_entropy_forward(context, args);
    expect(status == RAFTER_OK, "%s", rafter_last_error(context));
    return filled && status == RAFTER_OK && gpu_synchronize(context) && gpu_copy(&r->loss, args->loss->data, 4) &&
           gpu_copy(r->dx, args->dx->data, dx) && gpu_copy(r->dweight, args->dweight->data, dweight);
}

/* If the budget is too small for the cublaslt variant, that runs without one. */
static void compare(const struct size *s, const rafter_linear_cross_entropy_args *args, const char *what) {
    struct results ours = {.dx = NULL}, plain = {.dx = NULL};
    rafter_linear_cross_entropy_args other = *args;
    if (!fits(args, CUBLASLT))
        other.budget = 0;
    if (run(args, HOPPER, &ours) && run(&other, CUBLASLT, &plain)) {
        const long long n = s->rows, d = s->depth, v = s->classes;
        const double loss = fabs((double)ours.loss - (double)plain.loss) / fabs((double)plain.loss);
        const double dx = apart(ours.dx, plain.dx, s->rows * (s->depth + s->dx_gap));
        const double dweight = apart(ours.dweight, plain.dweight, s->classes * s->depth);
        const bool native = args->accumulate == RAFTER_ACCUMULATE_NATIVE;
        expect(s->ignored == ALL || s->bad_row ? isnan(ours.loss) && isnan(plain.loss) : loss < 1e-5,
               "%lld x %lld x %lld, %s: loss is %.9g (hopper) and %.9g (cublaslt)", n, d, v, what, (double)ours.loss,
               (double)plain.loss);
        /* A rounding to bf16 is a relative 1.7e-3; each variant has one or two. */
        expect(dx < 5e-3, "%lld x %lld x %lld, %s: dx is apart by %.2e", n, d, v, what, dx);
        expect(others_are_zero(s, ours.dx),
               "%lld x %lld x %lld, %s: dx of an ignored row is not 0, or a gap was written", n, d, v, what);
        expect(dweight < (native ? 1.5e-2 : 5e-3), "%lld x %lld x %lld, %s: dweight is apart by %.2e", n, d, v, what,
               dweight);
    }
    free(ours.dx);
    free(ours.dweight);
    free(plain.dx);
    free(plain.dweight);
}

static void test_size(const struct size *s) {
    rafter_context *const context = automatic;
    const int64_t stride = s->depth + s->x_gap;
    int64_t x_shape[] = {s->rows, s->depth}, w_shape[] = {s->classes, s->depth}, rows[] = {s->rows};
    int64_t x_strides[] = {stride, 1}, dx_strides[] = {s->depth + s->dx_gap, 1};
    const size_t x_bytes = (size_t)(s->rows * stride) * 2, w_bytes = (size_t)(s->classes * s->depth) * 2;
    uint16_t *x = make_matrix(s->rows * stride, 1, 1), *bias = malloc((size_t)s->classes * sizeof *bias);
    uint16_t *w = make_matrix(s->classes * s->depth, 2 / sqrt((double)s->depth), (uint64_t)1 << 40);
    int64_t *labels = malloc((size_t)s->rows * sizeof *labels);
    for (int64_t row = 0; row < s->rows; row++)
        labels[row] = label_of(s, row);
    /* NaN in ignored rows must not reach any result. Where these rows are not dropped, removing it
     * from large products takes seconds. */
    for (int64_t row = 0; row < s->rows && s->depth * s->classes < MOST_REDONE; row++)
        for (int64_t i = row % 5; i < s->depth && is_ignored(s, row); i += 5)
            x[row * stride + i] = 0x7fc0; /* NaN */
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t i = s->depth; i < stride; i++)
            x[row * stride + i] = 0x7fc0;
    if (s->bad_row)
        x[BAD_ROW * stride] = 0x7fc0;
    for (int64_t class = 0; class < s->classes; class ++)
        problem_store(RAFTER_BF16, (char *)&bias[class], bias_of(s, class));
    DLTensor tx = on_device(context, x, RAFTER_BF16, 2, x_shape, x_bytes);
    DLTensor tw = on_device(context, w, RAFTER_BF16, 2, w_shape, w_bytes);
    DLTensor target = on_device(context, labels, RAFTER_I64, 1, rows, (size_t)s->rows * sizeof *labels);
    DLTensor loss = on_device(context, NULL, RAFTER_F32, 0, NULL, 4);
    DLTensor dx = on_device(context, NULL, RAFTER_BF16, 2, x_shape, (size_t)(s->rows * dx_strides[0]) * 2);
    DLTensor dweight = on_device(context, NULL, RAFTER_BF16, 2, w_shape, w_bytes);
    DLTensor tbias = on_device(context, bias, RAFTER_BF16, 1, w_shape, (size_t)s->classes * sizeof *bias);
    tx.strides = x_strides;
    dx.strides = dx_strides;
    const rafter_linear_cross_entropy_args plain = {.size = sizeof plain,
                                                    .mode = RAFTER_LCE_FAST,
                                                    .x = &tx,
                                                    .weight = &tw,
                                                    .bias = s->masked != NOTHING ? &tbias : NULL,
                                                    .target = &target,
                                                    .loss = &loss,
                                                    .dx = &dx,
                                                    .dweight = &dweight};
    rafter_linear_cross_entropy_args args = plain;
    compare(s, &args, "fast");
    args.mode = RAFTER_LCE_COMPACT;
    compare(s, &args, "compact");
    args = plain;
    args.accumulate = RAFTER_ACCUMULATE_NATIVE;
    compare(s, &args, "native");
    /* Groups of about 128 rows, plus the memory to pack matrices, where needed. */
    args.budget = (size_t)128 * (size_t)s->classes * 5;
    while (!fits(&args, HOPPER))
        args.budget += (size_t)((s->classes + s->rows) * s->depth);
    if (s->rows < MANY_ROWS)
        compare(s, &args, "native, in small groups");
    args.accumulate = RAFTER_ACCUMULATE_F32;
    args.budget += (size_t)(s->classes * (s->depth + 8)) * 4;
    compare(s, &args, "fast, in small groups");
    if (s->rows < MANY_ROWS && s->depth * s->classes < MOST_REDONE) {
        args.budget = smallest_budget(args);
        compare(s, &args, "fast, smallest budget");
        args.mode = RAFTER_LCE_COMPACT;
        args.budget = smallest_budget(args);
        compare(s, &args, "compact, smallest budget");
    }
    const DLTensor *const all[] = {&tx, &tw, &target, &loss, &dx, &dweight, &tbias};
    release_all(all, sizeof all / sizeof *all);
    free(x);
    free(bias);
    free(w);
    free(labels);
}

/* ---- frequent labels ------------------------------------------------------------------------- */

/* Every third row is ignored. Half of the others have one class, spread over the call; other
 * classes have one row, two, a few, or just too many for one block. */
enum { FREQUENT_ROWS = 18000, FREQUENT_DEPTH = 267, FREQUENT_STRIDE = 272, FREQUENT_CLASSES = 9001 };
static const int rows_of_class[] = {1, 2, 3, 9, 127, 128, 700, 6000}; /* rows that are not ignored */
enum { COUNTED_CLASSES = sizeof rows_of_class / sizeof *rows_of_class };

/* Class 100 * i has the i-th count of rows. The remaining rows have (almost) distinct classes. */
static void make_frequent_labels(int64_t *labels) {
    int64_t active = 0, at[12000];
    for (int64_t row = 0; row < FREQUENT_ROWS; row++)
        if (row % 3 == 1)
            labels[row] = -100;
        else
            at[active++] = row;
    for (int64_t k = active - 1; k > 0; k--) {
        const int64_t other = (int64_t)(problem_mix((uint64_t)k) % (uint64_t)(k + 1)), row = at[k];
        at[k] = at[other];
        at[other] = row;
    }
    int64_t done = 0;
    for (int i = 0; i < COUNTED_CLASSES; i++)
        for (int k = 0; k < rows_of_class[i]; k++)
            labels[at[done++]] = 100 * i;
    for (; done < active; done++)
        labels[at[done]] = 1000 + done % 8000;
}

/* dweight of a class, from the inputs and the call's lse, in fp64. */
static void sum_dweight(const uint16_t *x, const uint16_t *w, const int64_t *labels, const float *lse, int64_t class,
                        double *sums) {
    double row_x[FREQUENT_DEPTH], of_class[FREQUENT_DEPTH];
    int64_t active = 0;
    for (int64_t i = 0; i < FREQUENT_DEPTH; i++) {
        of_class[i] = problem_load(RAFTER_BF16, (const char *)&w[class * FREQUENT_STRIDE + i]);
        sums[i] = 0;
    }
    for (int64_t row = 0; row < FREQUENT_ROWS; row++) {
        if (labels[row] < 0)
            continue;
        double z = 0;
        for (int64_t i = 0; i < FREQUENT_DEPTH; i++) {
            row_x[i] = problem_load(RAFTER_BF16, (const char *)&x[row * FREQUENT_STRIDE + i]);
            z += row_x[i] * of_class[i];
        }
        const double dz = exp(z - (double)lse[row]) - (labels[row] == class ? 1 : 0);
        for (int64_t i = 0; i < FREQUENT_DEPTH; i++)
            sums[i] += dz * row_x[i];
        active++;
    }
    for (int64_t i = 0; i < FREQUENT_DEPTH; i++)
        sums[i] /= (double)active;
}

static double apart_from(const uint16_t *a, const double *b, int64_t n) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        const double x = problem_load(RAFTER_BF16, (const char *)&a[i]);
        difference += (x - b[i]) * (x - b[i]);
        size += b[i] * b[i];
    }
    return sqrt(difference / size);
}

/* dweight at labels is rounded about once, however many rows share a label, and has the same bits
 * each time. */
static void test_frequent_labels(void) {
    rafter_context *const context = automatic;
    enum { ELEMENTS = FREQUENT_CLASSES * FREQUENT_STRIDE };
    int64_t x_shape[] = {FREQUENT_ROWS, FREQUENT_DEPTH}, w_shape[] = {FREQUENT_CLASSES, FREQUENT_DEPTH};
    int64_t rows[] = {FREQUENT_ROWS}, strides[] = {FREQUENT_STRIDE, 1};
    uint16_t *x = make_matrix(FREQUENT_ROWS * FREQUENT_STRIDE, 1, 1),
             *w = make_matrix(ELEMENTS, 2 / sqrt(FREQUENT_DEPTH), 1 << 30);
    uint16_t *first = calloc(ELEMENTS, sizeof *first), *second = calloc(ELEMENTS, sizeof *second);
    int64_t *labels = malloc(FREQUENT_ROWS * sizeof *labels);
    float *lse = malloc(FREQUENT_ROWS * sizeof *lse);
    make_frequent_labels(labels);
    DLTensor tx = on_device(context, x, RAFTER_BF16, 2, x_shape, FREQUENT_ROWS * FREQUENT_STRIDE * sizeof *x);
    DLTensor tw = on_device(context, w, RAFTER_BF16, 2, w_shape, ELEMENTS * sizeof *w);
    DLTensor target = on_device(context, labels, RAFTER_I64, 1, rows, FREQUENT_ROWS * sizeof *labels);
    DLTensor dweight = on_device(context, NULL, RAFTER_BF16, 2, w_shape, ELEMENTS * sizeof *first);
    DLTensor tlse = on_device(context, NULL, RAFTER_F32, 1, rows, FREQUENT_ROWS * sizeof *lse);
    double sums[COUNTED_CLASSES][FREQUENT_DEPTH];
    tx.strides = tw.strides = dweight.strides = strides;
    for (int way = 0; way < 4; way++) {
        const bool native = way % 2, groups = way / 2;
        rafter_linear_cross_entropy_args args = {.size = sizeof args,
                                                 .mode = RAFTER_LCE_FAST,
                                                 .accumulate =
                                                     native ? RAFTER_ACCUMULATE_NATIVE : RAFTER_ACCUMULATE_F32,
                                                 .budget = groups ? (size_t)64 << 20 : 0,
                                                 .x = &tx,
                                                 .weight = &tw,
                                                 .target = &target,
                                                 .lse = &tlse,
                                                 .dweight = &dweight};
        for (int time = 0; time < 2; time++) {
            const rafter_status status = rafter_linear_cross_entropy_forward(context_for(&args, HOPPER), &args);
            expect(status == RAFTER_OK && gpu_synchronize(context) &&
                       gpu_copy(time ? second : first, dweight.data, ELEMENTS * sizeof *first) &&
                       gpu_copy(lse, tlse.data, FREQUENT_ROWS * sizeof *lse),
                   "frequent labels: %s", rafter_last_error(context));
        }
        expect(memcmp(first, second, ELEMENTS * sizeof *first) == 0, "frequent labels, way %d: dweight has changed",
               way);
        if (way == 0) {
#pragma omp parallel for
            for (int i = 0; i < COUNTED_CLASSES; i++)
                sum_dweight(x, w, labels, lse, 100 * i, sums[i]);
        }
        for (int i = 0; i < COUNTED_CLASSES; i++) {
            const double off = apart_from(&first[(int64_t)100 * i * FREQUENT_STRIDE], sums[i], FREQUENT_DEPTH);
            expect(off < 2.5e-3, "a label of %d rows%s%s: dweight is off by %.2e", rows_of_class[i],
                   native ? ", native" : "", groups ? ", in groups" : "", off);
        }
    }
    const DLTensor *const all[] = {&tx, &tw, &target, &dweight, &tlse};
    release_all(all, sizeof all / sizeof *all);
    free(x);
    free(w);
    free(first);
    free(second);
    free(labels);
    free(lse);
}

/* With one class, loss and gradients are exactly 0. */
static void test_one_class(void) {
    rafter_context *const context = automatic;
    enum { ROWS = 300, DEPTH = 80 };
    int64_t x_shape[] = {ROWS, DEPTH}, w_shape[] = {1, DEPTH}, rows[] = {ROWS}, *labels = calloc(ROWS, sizeof *labels);
    uint16_t *x = make_matrix(ROWS * DEPTH, 3, 1), *w = make_matrix(DEPTH, 1, 2);
    DLTensor tx = on_device(context, x, RAFTER_BF16, 2, x_shape, ROWS * DEPTH * sizeof *x);
    DLTensor tw = on_device(context, w, RAFTER_BF16, 2, w_shape, DEPTH * sizeof *w);
    DLTensor target = on_device(context, labels, RAFTER_I64, 1, rows, ROWS * sizeof *labels);
    DLTensor loss = on_device(context, NULL, RAFTER_F32, 0, NULL, 4);
    DLTensor dx = on_device(context, NULL, RAFTER_BF16, 2, x_shape, ROWS * DEPTH * sizeof *x);
    DLTensor dweight = on_device(context, NULL, RAFTER_BF16, 2, w_shape, DEPTH * sizeof *w);
    for (int mode = RAFTER_LCE_FAST; mode <= RAFTER_LCE_COMPACT; mode++) {
        rafter_linear_cross_entropy_args args = {.size = sizeof args,
                                                 .mode = (rafter_lce_mode)mode,
                                                 .x = &tx,
                                                 .weight = &tw,
                                                 .target = &target,
                                                 .loss = &loss,
                                                 .dx = &dx,
                                                 .dweight = &dweight};
        struct results r = {.dx = NULL};
        if (run(&args, HOPPER, &r)) {
            int64_t others = 0;
            for (int64_t i = 0; i < ROWS * DEPTH; i++)
                others += (r.dx[i] & 0x7fff) != 0;
            for (int64_t i = 0; i < DEPTH; i++)
                others += (r.dweight[i] & 0x7fff) != 0;
            expect(r.loss == 0.0f && others == 0, "one class, mode %d: loss is %g, %lld gradients are not 0", mode,
                   (double)r.loss, (long long)others);
        }
        free(r.dx);
        free(r.dweight);
    }
    const DLTensor *const all[] = {&tx, &tw, &target, &loss, &dx, &dweight};
    release_all(all, sizeof all / sizeof *all);
    free(x);
    free(w);
    free(labels);
}

void test_tiles(void) {
    open_contexts();
    test_one_class();
    test_frequent_labels();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        test_size(&sizes[i]);
    close_contexts();
}

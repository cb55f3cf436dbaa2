/* SPDX-License-Identifier: Apache-2.0 */
/* linear_cross_entropy where the product that forms logits has more tiles than the GPU has room for at once, in sizes
 * that are multiples of nothing; where exponentials lie in dweight; where many rows share a label; where many are
 * ignored, which are dropped before anything is multiplied, or are not, in the smallest budgets; and where whole tiles
 * of classes are masked: with RAFTER_FUSED=0 in the environment and without. The walk's problems are smaller, and
 * checked against fp64. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

enum ignored { A_THIRD, NONE, HALF, FIRST_HALF, AROUND_TILES, ALL_BUT_ONE, ALL_BUT_FIRST, ALL_BUT_LAST, ALL };

/* Classes that a bias of -inf masks: none; of each three tiles of 256 the second; the first two tiles, and every other
 * logit is below -80. */
enum masked { NOTHING, SECOND_TILES, FIRST_TILES };

struct size {
    int64_t rows, depth, classes;
    enum ignored ignored;
    int64_t x_gap, dx_gap; /* elements between rows */
    enum masked masked;
    bool bad_row; /* a NaN in row BAD_ROW of x, which is not ignored */
};

enum { BAD_ROW = 3, TILE = 256 };
enum { MANY_ROWS = 8192 }; /* in small groups of which sums in bf16 lose too much, and all takes too long */
enum { MOST_MENDED = 4000000 };

static const struct size sizes[] = {
    {1, 80, 50257, .ignored = A_THIRD},
    {1000, 80, 50257, .ignored = A_THIRD},
    {300, 83, 9001, .ignored = A_THIRD},
    {515, 80, 50257, .ignored = ALL},
    {2100, 520, 70001, .ignored = A_THIRD}, /* dweight hosts exponentials of all rows; */
    {5000, 520, 70001, .ignored = A_THIRD}, /* native: of a first group; */
    {515, 1024, 50257, .ignored = A_THIRD}, /* compact: dz */
    {1024, 264, 9001, .ignored = NONE},
    {1300, 264, 9001, .ignored = HALF},
    {1300, 264, 9001, .ignored = FIRST_HALF},
    {1300, 264, 9001, .ignored = AROUND_TILES},
    {1300, 264, 9001, .ignored = ALL_BUT_ONE},
    {1300, 264, 9001, .ignored = ALL},
    {2100, 520, 70001, .ignored = ALL},    /* and hosts nothing */
    {1000, 520, 1031, .ignored = A_THIRD}, /* no more classes than twice the depth */
    {1300, 1032, 1999, .ignored = HALF},
    {2600, 1032, 300, .ignored = NONE},
    {600, 2056, 1031, .ignored = HALF}, /* copies of x in many steps of 16 bytes, and a tail */
    /* Blocks that each look for the kept ones of some rows, or, in the last, of so many that they take two turns. */
    {3000, 24, 300, .ignored = HALF},
    {5000, 24, 40, .ignored = ALL_BUT_FIRST},
    {70000, 24, 40, .ignored = HALF},
    {70000, 24, 40, .ignored = ALL_BUT_FIRST},
    {70000, 24, 40, .ignored = ALL_BUT_LAST},
    {70000, 24, 40, .ignored = ALL},
    {300001, 24, 40, .ignored = HALF},
    /* Smallest budgets that drop no rows: x is taken as it lies, or copied. */
    {515, 264, 9001, .ignored = A_THIRD, .x_gap = 8, .dx_gap = 3},
    {515, 264, 9001, .ignored = A_THIRD, .x_gap = 3},
    /* With the first tile masked nothing is known beforehand of how large a row's logits are. */
    {300, 264, 9001, .ignored = A_THIRD, .masked = FIRST_TILES},
    {300, 264, 9001, .ignored = A_THIRD, .masked = SECOND_TILES},
    {300, 520, 1031, .ignored = A_THIRD, .masked = FIRST_TILES},
    {300, 520, 1031, .ignored = A_THIRD, .masked = SECOND_TILES, .bad_row = true},
    {300, 264, 9001, .ignored = A_THIRD, .masked = FIRST_TILES, .bad_row = true},
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

/* Of the classes that are not masked, those of neighbouring tiles are so far apart that they have no pivot in common.
 */
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

/* Of the others every seventh is of class 5. */
static int64_t label_of(const struct size *s, int64_t row) {
    if (is_ignored(s, row))
        return -100;
    const int64_t class = row % 7 == 0 ? 5 : (int64_t)((uint64_t)row * 2654435761u % (uint64_t)s->classes);
    return is_masked(s, class) ? s->classes - 1 : class;
}

/* How far apart a and b are, relative to b; NaN is what NaN is. */
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

/* Whether dx of ignored rows is, and what lies between rows is as it was. */
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

static void choose(bool fused) {
    setenv("RAFTER_FUSED", fused ? "1" : "0", 1);
}

/* Whether the budget does. */
static bool fits(rafter_context *context, const rafter_linear_cross_entropy_args *args, bool fused) {
    size_t bytes;
    choose(fused);
    return rafter_linear_cross_entropy_workspace(context, args, RAFTER_FORWARD, &bytes) == RAFTER_OK;
}

/* The least that does, fused. */
static size_t smallest_budget(rafter_context *context, rafter_linear_cross_entropy_args args) {
    size_t low = 0, high = 1; /* low does not */
    for (args.budget = high; !fits(context, &args, true); args.budget = high) {
        low = high;
        high *= 2;
    }
    while (high - low > 1) {
        args.budget = low + (high - low) / 2;
        *(fits(context, &args, true) ? &high : &low) = args.budget;
    }
    return high;
}

static size_t bytes_of(const DLTensor *matrix) {
    return (size_t)matrix->shape[0] * (size_t)(matrix->strides ? matrix->strides[0] : matrix->shape[1]) * 2;
}

/* What `r` gets is the caller's. False: it could not be had. */
static bool run(rafter_context *context, const rafter_linear_cross_entropy_args *args, bool fused, struct results *r) {
    const size_t dx = bytes_of(args->dx), dweight = bytes_of(args->dweight);
    r->dx = malloc(dx);
    r->dweight = malloc(dweight);
    choose(fused);
    const bool filled =
        cuda->fill(context, args->dx->data, 0xff, dx) && cuda->fill(context, args->dweight->data, 0xff, dweight);
    const rafter_status status = rafter_linear_cross_entropy_forward(context, args);
    expect(status == RAFTER_OK, "%s", rafter_last_error(context));
    return filled && status == RAFTER_OK && cuda->synchronize(context) && cuda->copy(&r->loss, args->loss->data, 4) &&
           cuda->copy(r->dx, args->dx->data, dx) && cuda->copy(r->dweight, args->dweight->data, dweight);
}

/* Where the budget does not do without being fused, that has none. */
static void compare(rafter_context *context, const struct size *s, const rafter_linear_cross_entropy_args *args,
                    const char *what) {
    struct results fused = {.dx = NULL}, plain = {.dx = NULL};
    rafter_linear_cross_entropy_args other = *args;
    if (!fits(context, args, false))
        other.budget = 0;
    if (run(context, args, true, &fused) && run(context, &other, false, &plain)) {
        const long long n = s->rows, d = s->depth, v = s->classes;
        const double loss = fabs((double)fused.loss - (double)plain.loss) / fabs((double)plain.loss);
        const double dx = apart(fused.dx, plain.dx, s->rows * (s->depth + s->dx_gap));
        const double dweight = apart(fused.dweight, plain.dweight, s->classes * s->depth);
        const bool native = args->accumulate == RAFTER_ACCUMULATE_NATIVE;
        expect(s->ignored == ALL || s->bad_row ? isnan(fused.loss) && isnan(plain.loss) : loss < 1e-5,
               "%lld x %lld x %lld, %s: loss is %.9g fused, %.9g not", n, d, v, what, (double)fused.loss,
               (double)plain.loss);
        /* A rounding to bf16 is 1.7e-3 of all; each way has one or two. */
        expect(dx < 5e-3, "%lld x %lld x %lld, %s: dx is apart by %.2e", n, d, v, what, dx);
        expect(others_are_zero(s, fused.dx),
               "%lld x %lld x %lld, %s: dx of an ignored row is not 0, or a gap is not kept", n, d, v, what);
        expect(dweight < (native ? 1.5e-2 : 5e-3), "%lld x %lld x %lld, %s: dweight is apart by %.2e", n, d, v, what,
               dweight);
    }
    free(fused.dx);
    free(fused.dweight);
    free(plain.dx);
    free(plain.dweight);
}

static void test_size(rafter_context *context, const struct size *s) {
    const int64_t stride = s->depth + s->x_gap;
    int64_t x_shape[] = {s->rows, s->depth}, w_shape[] = {s->classes, s->depth}, rows[] = {s->rows};
    int64_t x_strides[] = {stride, 1}, dx_strides[] = {s->depth + s->dx_gap, 1};
    const size_t x_bytes = (size_t)(s->rows * stride) * 2, w_bytes = (size_t)(s->classes * s->depth) * 2;
    uint16_t *x = make_matrix(s->rows * stride, 1, 1), *bias = malloc((size_t)s->classes * sizeof *bias);
    uint16_t *w = make_matrix(s->classes * s->depth, 2 / sqrt((double)s->depth), (uint64_t)1 << 40);
    int64_t *labels = malloc((size_t)s->rows * sizeof *labels);
    for (int64_t row = 0; row < s->rows; row++)
        labels[row] = label_of(s, row);
    /* What ignored rows hold must reach nothing; but without dropping them, and in one product, it costs seconds to
     * keep it from large sums. */
    for (int64_t row = 0; row < s->rows && s->depth * s->classes < MOST_MENDED; row++)
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
    compare(context, s, &args, "fast");
    args.mode = RAFTER_LCE_COMPACT;
    compare(context, s, &args, "compact");
    args = plain;
    args.accumulate = RAFTER_ACCUMULATE_NATIVE;
    compare(context, s, &args, "native");
    /* Groups of about 128 rows; and what it takes to pack matrices, if they must be. */
    args.budget = (size_t)128 * (size_t)s->classes * 5;
    while (!fits(context, &args, false) || !fits(context, &args, true))
        args.budget += (size_t)((s->classes + s->rows) * s->depth);
    if (s->rows < MANY_ROWS)
        compare(context, s, &args, "native, in small groups");
    args.accumulate = RAFTER_ACCUMULATE_F32;
    args.budget += (size_t)(s->classes * (s->depth + 8)) * 4;
    compare(context, s, &args, "fast, in small groups");
    if (s->rows < MANY_ROWS && s->depth * s->classes < MOST_MENDED) {
        args.budget = smallest_budget(context, args);
        compare(context, s, &args, "fast, smallest budget");
        args.mode = RAFTER_LCE_COMPACT;
        args.budget = smallest_budget(context, args);
        compare(context, s, &args, "compact, smallest budget");
    }
    const DLTensor *const all[] = {&tx, &tw, &target, &loss, &dx, &dweight, &tbias};
    release_all(all, sizeof all / sizeof *all);
    free(x);
    free(bias);
    free(w);
    free(labels);
}

/* ---- frequent labels ------------------------------------------------------------------------- */

/* Every third row is ignored. Of the others half are of one class, spread over the call; other classes have one row,
 * or two, a few, or just too many for one block. */
enum { FREQUENT_ROWS = 18000, FREQUENT_DEPTH = 267, FREQUENT_STRIDE = 272, FREQUENT_CLASSES = 9001 };
static const int rows_of_class[] = {1, 2, 3, 9, 127, 128, 700, 6000}; /* of those that are not ignored */
enum { COUNTED_CLASSES = sizeof rows_of_class / sizeof *rows_of_class };

/* Class 100 * i of the i-th; rows that are left have classes of their own, or almost. */
static void make_frequent_labels(int64_t *labels) {
    int64_t kept = 0, at[12000];
    for (int64_t row = 0; row < FREQUENT_ROWS; row++)
        if (row % 3 == 1)
            labels[row] = -100;
        else
            at[kept++] = row;
    for (int64_t k = kept - 1; k > 0; k--) {
        const int64_t other = (int64_t)(problem_mix((uint64_t)k) % (uint64_t)(k + 1)), row = at[k];
        at[k] = at[other];
        at[other] = row;
    }
    int64_t done = 0;
    for (int i = 0; i < COUNTED_CLASSES; i++)
        for (int k = 0; k < rows_of_class[i]; k++)
            labels[at[done++]] = 100 * i;
    for (; done < kept; done++)
        labels[at[done]] = 1000 + done % 8000;
}

/* dweight of a class from the inputs and the call's lse, in double precision. */
static void sum_dweight(const uint16_t *x, const uint16_t *w, const int64_t *labels, const float *lse, int64_t class,
                        double *sums) {
    double row_x[FREQUENT_DEPTH], of_class[FREQUENT_DEPTH];
    int64_t kept = 0;
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
        kept++;
    }
    for (int64_t i = 0; i < FREQUENT_DEPTH; i++)
        sums[i] /= (double)kept;
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

/* dweight at labels is rounded about once, however many rows share one, and comes out the same each time. */
static void test_frequent_labels(rafter_context *context) {
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
    choose(true);
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
            const rafter_status status = rafter_linear_cross_entropy_forward(context, &args);
            expect(status == RAFTER_OK && cuda->synchronize(context) &&
                       cuda->copy(time ? second : first, dweight.data, ELEMENTS * sizeof *first) &&
                       cuda->copy(lse, tlse.data, FREQUENT_ROWS * sizeof *lse),
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

/* Of one class, loss and gradients are 0, and not only nearly. */
static void test_one_class(rafter_context *context) {
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
        if (run(context, &args, true, &r)) {
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
    rafter_context *context = open_context();
    test_one_class(context);
    test_frequent_labels(context);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        test_size(context, &sizes[i]);
    unsetenv("RAFTER_FUSED");
    close_context(context);
}

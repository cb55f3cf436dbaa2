/* linear_cross_entropy where the product that forms logits has more tiles than the GPU has room for at once, in sizes
 * that are multiples of nothing; where exponentials lie in dweight; where many rows share a label; and where many are
 * ignored, which are dropped before anything is multiplied: with RAFTER_FUSED=0 in the environment and without. The
 * walk's problems are smaller, and checked against fp64. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

enum ignored { A_THIRD, NONE, HALF, FIRST_HALF, AROUND_TILES, ALL_BUT_ONE, ALL };

struct size {
    int64_t rows, depth, classes;
    enum ignored ignored;
};

static const struct size sizes[] = {
    {1, 80, 50257, A_THIRD},         {1000, 80, 50257, A_THIRD},     {300, 83, 9001, A_THIRD},
    {515, 80, 50257, ALL},           {2100, 520, 70001, A_THIRD}, /* dweight hosts exponentials of all rows; */
    {5000, 520, 70001, A_THIRD},                                  /* native: of a first group; */
    {515, 1024, 50257, A_THIRD},                                  /* compact: dz */
    {1024, 264, 9001, NONE},         {1300, 264, 9001, HALF},        {1300, 264, 9001, FIRST_HALF},
    {1300, 264, 9001, AROUND_TILES}, {1300, 264, 9001, ALL_BUT_ONE}, {1300, 264, 9001, ALL},
    {2100, 520, 70001, ALL},    /* and hosts nothing */
    {1000, 520, 1031, A_THIRD}, /* no more classes than twice the depth */
    {1300, 1032, 1999, HALF},        {2600, 1032, 300, NONE},
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
    default: return true;
    }
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
    return row % 7 == 0 ? 5 : (int64_t)((uint64_t)row * 2654435761u % (uint64_t)s->classes);
}

static DLTensor on_device(rafter_context *context, const void *from, rafter_dtype dtype, int ndim, int64_t *shape,
                          size_t bytes) {
    DLTensor t = rafter_tensor(cuda->allocate(bytes), dtype, ndim, shape);
    t.device = context->device;
    expect(t.data && (from ? cuda->copy(t.data, from, bytes) : cuda->fill(context, t.data, 0xff, bytes)),
           "no memory for %zu bytes", bytes);
    return t;
}

/* How far apart a and b are, relative to b. */
static double apart(const uint16_t *a, const uint16_t *b, int64_t n) {
    double difference = 0, size = 0;
#pragma omp parallel for reduction(+ : difference, size)
    for (int64_t i = 0; i < n; i++) {
        const double x = problem_load(RAFTER_BF16, (const char *)&a[i]);
        const double y = problem_load(RAFTER_BF16, (const char *)&b[i]);
        difference += (x - y) * (x - y);
        size += y * y;
    }
    return size > 0 ? sqrt(difference / size) : sqrt(difference);
}

/* Whether dx of ignored rows is. */
static bool others_are_zero(const struct size *s, const uint16_t *dx) {
    bool zero = true;
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t i = 0; i < s->depth && is_ignored(s, row); i++)
            zero &= (dx[row * s->depth + i] & 0x7fff) == 0;
    return zero;
}

static void choose(bool fused) {
    setenv("RAFTER_FUSED", fused ? "1" : "0", 1);
}

/* Whether the budget does, either way. */
static bool fits(rafter_context *context, const rafter_linear_cross_entropy_args *args) {
    size_t bytes;
    bool good = true;
    for (int fused = 0; fused < 2; fused++) {
        choose(fused);
        good &= rafter_linear_cross_entropy_workspace(context, args, RAFTER_FORWARD, &bytes) == RAFTER_OK;
    }
    return good;
}

/* What `r` gets is the caller's. False: it could not be had. */
static bool run(rafter_context *context, rafter_linear_cross_entropy_args *args, bool fused, struct results *r) {
    const size_t dx = (size_t)args->dx->shape[0] * (size_t)args->dx->shape[1] * 2;
    const size_t dweight = (size_t)args->dweight->shape[0] * (size_t)args->dweight->shape[1] * 2;
    r->dx = malloc(dx);
    r->dweight = malloc(dweight);
    choose(fused);
    const rafter_status status = rafter_linear_cross_entropy_forward(context, args);
    expect(status == RAFTER_OK, "%s", rafter_last_error(context));
    return status == RAFTER_OK && cuda->synchronize(context) && cuda->copy(&r->loss, args->loss->data, 4) &&
           cuda->copy(r->dx, args->dx->data, dx) && cuda->copy(r->dweight, args->dweight->data, dweight);
}

static void compare(rafter_context *context, const struct size *s, rafter_linear_cross_entropy_args *args,
                    const char *what) {
    struct results fused = {.dx = NULL}, plain = {.dx = NULL};
    if (run(context, args, true, &fused) && run(context, args, false, &plain)) {
        const long long n = s->rows, d = s->depth, v = s->classes;
        const double loss = fabs((double)fused.loss - (double)plain.loss) / fabs((double)plain.loss);
        const double dx = apart(fused.dx, plain.dx, s->rows * s->depth);
        const double dweight = apart(fused.dweight, plain.dweight, s->classes * s->depth);
        const bool native = args->accumulate == RAFTER_ACCUMULATE_NATIVE;
        expect(s->ignored == ALL ? isnan(fused.loss) && isnan(plain.loss) : loss < 1e-5,
               "%lld x %lld x %lld, %s: loss is %.9g fused, %.9g not", n, d, v, what, (double)fused.loss,
               (double)plain.loss);
        /* A rounding to bf16 is 1.7e-3 of all; each way has one or two. */
        expect(dx < 5e-3, "%lld x %lld x %lld, %s: dx is apart by %.2e", n, d, v, what, dx);
        expect(others_are_zero(s, fused.dx), "%lld x %lld x %lld, %s: dx of an ignored row is not 0", n, d, v, what);
        expect(dweight < (native ? 1.5e-2 : 5e-3), "%lld x %lld x %lld, %s: dweight is apart by %.2e", n, d, v, what,
               dweight);
    }
    free(fused.dx);
    free(fused.dweight);
    free(plain.dx);
    free(plain.dweight);
}

static void test_size(rafter_context *context, const struct size *s) {
    int64_t x_shape[] = {s->rows, s->depth}, w_shape[] = {s->classes, s->depth}, rows[] = {s->rows};
    const size_t x_bytes = (size_t)(s->rows * s->depth) * 2, w_bytes = (size_t)(s->classes * s->depth) * 2;
    uint16_t *x = make_matrix(s->rows * s->depth, 1, 1);
    uint16_t *w = make_matrix(s->classes * s->depth, 2 / sqrt((double)s->depth), (uint64_t)1 << 40);
    int64_t *labels = malloc((size_t)s->rows * sizeof *labels);
    for (int64_t row = 0; row < s->rows; row++)
        labels[row] = label_of(s, row);
    /* What ignored rows hold must reach nothing; but without dropping them, and in one product, it costs seconds to
     * keep it from large sums. */
    for (int64_t row = 0; row < s->rows && s->depth * s->classes < 4000000; row++)
        for (int64_t i = row % 5; i < s->depth && is_ignored(s, row); i += 5)
            x[row * s->depth + i] = 0x7fc0; /* NaN */
    DLTensor tx = on_device(context, x, RAFTER_BF16, 2, x_shape, x_bytes);
    DLTensor tw = on_device(context, w, RAFTER_BF16, 2, w_shape, w_bytes);
    DLTensor target = on_device(context, labels, RAFTER_I64, 1, rows, (size_t)s->rows * sizeof *labels);
    DLTensor loss = on_device(context, NULL, RAFTER_F32, 0, NULL, 4);
    DLTensor dx = on_device(context, NULL, RAFTER_BF16, 2, x_shape, x_bytes);
    DLTensor dweight = on_device(context, NULL, RAFTER_BF16, 2, w_shape, w_bytes);
    const rafter_linear_cross_entropy_args plain = {.size = sizeof plain,
                                                    .mode = RAFTER_LCE_FAST,
                                                    .x = &tx,
                                                    .weight = &tw,
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
    while (!fits(context, &args))
        args.budget += (size_t)(s->classes * s->depth);
    compare(context, s, &args, "native, in small groups");
    args.accumulate = RAFTER_ACCUMULATE_F32;
    args.budget += (size_t)(s->classes * (s->depth + 8)) * 4;
    compare(context, s, &args, "fast, in small groups");
    const DLTensor *const all[] = {&tx, &tw, &target, &loss, &dx, &dweight};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        cuda->release(all[i]->data);
    free(x);
    free(w);
    free(labels);
}

void test_tiles(void) {
    rafter_context *context = open_context();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        test_size(context, &sizes[i]);
    unsetenv("RAFTER_FUSED");
    close_context(context);
}

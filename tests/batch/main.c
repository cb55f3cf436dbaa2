/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batch invariance (rafter_context_set_batch_invariant): every row is computed alone, and then in
 * batches of 1 to 20000 rows, at every place among them. The results must have the same bits.
 *
 *     test_batch [--device cuda] [--long] [--elements N] [--call NAME] [--without] [--against LEVEL]
 *
 * --long      also long rows and large products
 * --elements  the largest batch, in elements of the largest tensor; one has 64 times as many
 * --call      only calls whose name contains this
 * --without   without the option: prints what differs, and fails if nothing does
 * --against   rows alone are computed with the kernels of this level: the test must fail
 *
 * Without a GPU, --device cuda exits with 77, which ctest counts as skipped.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "batch.h"
#include "harness/problem.h"

static const int64_t row_counts[] = {1,   2,   3,    7,    31,   64,   65,   100,  127,  128,
                                     129, 500, 1000, 2047, 2048, 2049, 5000, 9000, 20000};
static int64_t most_elements = 50000, passed, failed;
static const char *only;
static bool without, large, on_gpu;

static rafter_context *open_context(const char *variant) {
    rafter_context_options options = {.size = sizeof options, .batch_invariant = !without, .variant = variant};
    if (on_gpu)
        options.device = (DLDevice){kDLCUDA, 0};
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) == RAFTER_OK)
        return context;
    printf("skipped: %s\n", rafter_last_error(NULL));
    exit(77);
}

static void fail(const struct setting *g, int64_t rows, const char *what) {
    if (failed++ >= 60)
        return;
    printf("%s %s, dtype %s, %lld x %lld, options %d, layout %d, %lld rows: %s\n", without ? "varies" : "FAIL",
           g->title, problem_dtype_name(g->dtype), (long long)g->length, (long long)g->depth, g->options,
           (int)g->layout, (long long)rows, what);
}

static bool same_row(const struct tensor *a, int64_t row, const struct tensor *b, int64_t other) {
    if (a->dl.ndim == 1 || a->strides[0] == a->elements || (a->dl.ndim == 2 && a->strides[1] == 1))
        return memcmp(element_at(a, row, 0), element_at(b, other, 0), (size_t)(a->elements * a->element)) == 0;
    for (int64_t e = 0; e < a->elements; e++)
        if (memcmp(element_at(a, row, e), element_at(b, other, e), (size_t)a->element) != 0)
            return false;
    return true;
}

/* Compares the rows of `all` with those that were computed alone. */
static void compare(const struct scene *all, const struct scene (*alone)[CONTENTS]) {
    char text[200];
    for (int64_t row = 0; row < all->rows; row++)
        for (int i = 0; i < all->count; i++)
            if (all->tensor[i].role == OUTPUT &&
                !same_row(&all->tensor[i], row, &(*alone)[content_of(all, row)].tensor[i], 0)) {
                snprintf(text, sizeof text, "row %lld has other bits than alone (tensor %d)", (long long)row, i);
                fail(all->setting, all->rows, text);
                return;
            }
    passed++;
}

/* False: it failed. */
static bool compute(const struct call *call, struct scene *scene) {
    const rafter_status status = call->make(scene);
    if (status != RAFTER_OK || !fetch(scene)) {
        fail(scene->setting, scene->rows, scene->failed ? "no memory" : rafter_last_error(scene->context));
        return false;
    }
    return true;
}

static int64_t elements_of_row(const struct setting *g, const struct call *call) {
    if (g->layout == INTERLEAVED || g->layout == NARROW)
        return 0; /* their tensors always have the same size */
    return call->kind == SEQUENCES              ? 4 * g->length * g->depth
           : call->kind == WITH_DEPTH && on_gpu ? g->depth
                                                : g->length;
}

static void test(rafter_context *context, rafter_context *reference, const struct call *call, struct setting setting) {
    struct scene alone[CONTENTS];
    bool good = true, differ = false;
    setting.title = call->name;
    for (int k = 0; k < CONTENTS; k++) {
        alone[k] = (struct scene){.context = reference, .setting = &setting, .rows = 1, .first = k};
        good = good && compute(call, &alone[k]);
        /* Rows with other contents must have other results, or nothing is compared. */
        for (int i = 0; good && k > 0 && i < alone[k].count; i++)
            differ = differ ||
                     (alone[k].tensor[i].role == OUTPUT && !same_row(&alone[k].tensor[i], 0, &alone[0].tensor[i], 0));
    }
    if (good && !differ)
        fail(&setting, 1, "all rows have the same results");
    for (size_t i = 0; good && i < sizeof row_counts / sizeof *row_counts; i++) {
        struct scene all = {.context = context, .setting = &setting, .rows = row_counts[i], .first = (int)i % CONTENTS};
        const bool one_is_large = large && setting.dtype == RAFTER_BF16 && setting.options % 3 == 0 &&
                                  setting.layout == ROWS && all.rows == 2048;
        /* So many rows that a CPU would cut the classes of this product into other slices. */
        const bool is_cut = setting.length == 9000 && setting.dtype == RAFTER_F32 && setting.options == 3;
        /* So many rows that CUDA calls without the option take other kernels. */
        const bool are_many = on_gpu && setting.length == 1000 && setting.dtype == RAFTER_BF16 &&
                              setting.options == 0 && setting.layout == ROWS && call->kind == ANY_LENGTH;
        const int64_t times = one_is_large || are_many ? 64 : is_cut ? 12 : 1;
        if (all.rows > 3 && all.rows * elements_of_row(&setting, call) > times * most_elements)
            continue;
        if (setting.layout == NARROW && all.rows > NARROW_ROWS)
            break;
        /* To save time, some of the counts. */
        const bool fewer = setting.layout == SHIFTED || setting.layout == INTERLEAVED || setting.layout == GAPS ||
                           setting.dtype == RAFTER_F16;
        if ((setting.layout == INTERLEAVED && all.rows > 1000) || (fewer && setting.layout != NARROW && i % 3 != 1))
            continue;
        if (compute(call, &all))
            compare(&all, (const struct scene(*)[CONTENTS]) & alone);
        release(&all);
    }
    for (int k = 0; k < CONTENTS; k++)
        if (alone[k].context)
            release(&alone[k]);
}

static void test_lengths(rafter_context *context, rafter_context *reference, const struct call *call,
                         rafter_dtype dtype) {
    static const int64_t lengths[] = {5, 32, 100, 257, 777, 1000, 1024, 4099, 4096, 32000, 50257},
                         products[][2] = {{1000, 64}, {4099, 100}, {257, 136}, {9000, 256}, {32000, 256}},
                         sequences[][2] = {{5, 33}, {70, 64}, {600, 16}, {3000, 64}, {3, 1024}};
    for (int o = 0; o < call->options; o++) {
        for (size_t i = 0; call->kind == ANY_LENGTH && i < sizeof lengths / sizeof *lengths; i++)
            for (int layout = 0; layout < LAYOUTS; layout++)
                if ((large || lengths[i] < 5000) && (layout != INTERLEAVED || lengths[i] <= 257))
                    test(context, reference, call,
                         (struct setting){
                             .dtype = dtype, .length = lengths[i], .options = o, .layout = (enum layout)layout});
        /* Rows of which a multiprocessor holds only a part. */
        if (large && on_gpu && dtype == RAFTER_F32 && strstr(call->name, "softmax"))
            test(context, reference, call,
                 (struct setting){.dtype = dtype, .length = 1 << 18, .options = o, .layout = ROWS});
        for (size_t i = 0; call->kind == WITH_DEPTH && i < sizeof products / sizeof *products; i++)
            if (large || i < 3 || (products[i][0] == 9000 && dtype == RAFTER_F32 && o == 3))
                test(context, reference, call,
                     (struct setting){.dtype = dtype, .length = products[i][0], .depth = products[i][1], .options = o});
        for (size_t i = 0; call->kind == SEQUENCES && i < sizeof sequences / sizeof *sequences; i++)
            if (large || i < 3)
                test(context, reference, call,
                     (struct setting){
                         .dtype = dtype, .length = sequences[i][0], .depth = sequences[i][1], .options = o});
    }
}

int main(int argc, char **argv) {
    const char *against = NULL;
    for (int i = 1; i < argc; i++) {
        const char *const value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--without") == 0)
            without = true;
        else if (strcmp(argv[i], "--long") == 0)
            large = true;
        else if (strcmp(argv[i], "--device") == 0 && i++)
            on_gpu = strcmp(value, "cuda") == 0;
        else if (strcmp(argv[i], "--elements") == 0 && i++)
            most_elements = atoll(value);
        else if (strcmp(argv[i], "--call") == 0 && i++)
            only = value;
        else if (strcmp(argv[i], "--against") == 0 && i++)
            against = value;
        else {
            fprintf(stderr, "test_batch: what is %s?\n", argv[i]);
            return 2;
        }
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    rafter_context *const context = open_context(NULL), *const reference = open_context(against);
    static const rafter_dtype dtypes[] = {RAFTER_F32, RAFTER_BF16, RAFTER_F16};
    for (int c = 0; c < calls_count; c++)
        for (int t = 0; t < 3 && (!only || strstr(calls[c].name, only)); t++)
            test_lengths(context, reference, &calls[c], dtypes[t]);
    rafter_context_destroy(reference);
    rafter_context_destroy(context);
    printf("%lld passed, %lld %s\n", (long long)passed, (long long)failed, without ? "vary" : "failed");
    return without ? failed == 0 : failed > 0;
}

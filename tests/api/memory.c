/* SPDX-License-Identifier: Apache-2.0 */
/* Scratch memory, in-place calls and zero sizes. */
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "fixture.h"

/* ---- scratch memory -------------------------------------------------------------------------- */

void test_allocator(void **state) {
    (void)state;
    struct ledger ledger = {0};
    with_ledger(&ledger);
    assert_int_equal(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_OK);
    assert_true(ledger.calls > 0);
    assert_int_equal(ledger.held, 0);
    assert_int_equal(ledger.most, rafter_peak_workspace(f.context));
    size_t bytes = 0;
    assert_int_equal(rafter_linear_cross_entropy_workspace(f.context, &f.lce, RAFTER_FORWARD, &bytes), RAFTER_OK);
    assert_true(bytes >= ledger.most && bytes < ledger.most + 64);
    rafter_reset_peak_workspace(f.context);
    assert_int_equal(rafter_peak_workspace(f.context), 0);

    setup(NULL);
    ledger = (struct ledger){.fail = 1};
    with_ledger(&ledger);
    expect_failure(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_OUT_OF_MEMORY, "allocator",
                   (char *)NULL);
    assert_int_equal(ledger.held, 0);
}

void test_workspace(void **state) {
    (void)state;
    size_t bytes = 0;
    assert_int_equal(rafter_linear_cross_entropy_workspace(f.context, &f.lce, RAFTER_FORWARD, &bytes), RAFTER_OK);
    assert_true(bytes > 0);
    char *memory = malloc(bytes + 64);
    struct ledger ledger = {.fail = 1}; /* with a workspace the allocator is not called */
    with_ledger(&ledger);
    f.lce.workspace = memory + 3; /* any alignment */
    f.lce.workspace_bytes = bytes - 64;
    expect_failure(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_WORKSPACE_TOO_SMALL,
                   "workspace_bytes", (char *)NULL);
    f.lce.workspace_bytes = bytes;
    assert_int_equal(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_OK);
    assert_int_equal(ledger.calls, 0);
    free(memory);
}

/* The largest |a - b| relative to the largest |b|. */
static double difference(const float *a, const float *b, int64_t n) {
    double most = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        most = fmax(most, fabs((double)a[i] - (double)b[i]));
        size = fmax(size, fabs((double)b[i]));
    }
    return most / size;
}

/* The linker redirects the library's aligned_alloc to this function (tests/CMakeLists.txt). */
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);

enum { LARGE_BLOCK = 4 << 20 }; /* a context keeps blocks of at least this size */
static int large_blocks;

void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
    large_blocks += bytes >= LARGE_BLOCK;
    return __real_aligned_alloc(alignment, bytes);
}

/* Without a caller's allocator, one large block serves every call that fits into it, and is
 * replaced by a larger one otherwise. Its former contents do not affect results. */
void test_kept_block(void **state) {
    (void)state;
    enum { TOKENS = 256, CLASSES = 32768 };
    int64_t tokens[] = {TOKENS}, shape_x[] = {TOKENS, 1}, shape_w[] = {CLASSES, 1};
    static float x[TOKENS], dx[TOKENS], w[CLASSES], dweight[CLASSES];
    static int64_t labels[TOKENS];
    for (int i = 0; i < CLASSES; i++)
        w[i] = 0x1p-10f * (float)(i * 7919 % 2048 - 1024);
    for (int i = 0; i < TOKENS; i++) {
        x[i] = 0.01f * (float)i;
        labels[i] = i * 7919 % CLASSES;
    }
    f.hidden = rafter_tensor(x, RAFTER_F32, 2, shape_x);
    f.weight = rafter_tensor(w, RAFTER_F32, 2, shape_w);
    f.target = rafter_tensor(labels, RAFTER_I64, 1, tokens);
    f.dhidden = rafter_tensor(dx, RAFTER_F32, 2, shape_x);
    f.dweight = rafter_tensor(dweight, RAFTER_F32, 2, shape_w);

    const struct {
        size_t mebibytes;
        int blocks; /* so far */
    } calls[] = {{8, 1}, {8, 1}, {20, 2}, {8, 2}, {20, 2}, {12, 2}};
    float first = 0;
    large_blocks = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        f.lce.budget = calls[i].mebibytes << 20;
        size_t bytes = 0;
        assert_int_equal(rafter_linear_cross_entropy_workspace(f.context, &f.lce, RAFTER_FORWARD, &bytes), RAFTER_OK);
        assert_true(bytes > f.lce.budget / 2 && bytes <= f.lce.budget);
        assert_int_equal(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_OK);
        assert_int_equal(large_blocks, calls[i].blocks);
        const float loss = f.small_data[3][0];
        first = i == 0 ? loss : first;
        assert_true(fabsf(loss - first) < 1e-5f * first);
    }
}

/* A large vocabulary within 64 MiB, as counted by the allocator, gives the results of the call
 * without a budget. */
void test_budget(void **state) {
    (void)state;
    enum { TOKENS = 384, WIDTH = 32, CLASSES = 131072 };
    const size_t budget = (size_t)64 << 20;
    int64_t tokens[] = {TOKENS}, shape_x[] = {TOKENS, WIDTH}, shape_w[] = {CLASSES, WIDTH};
    enum { X = TOKENS * WIDTH, W = CLASSES * WIDTH };
    float *const memory = malloc((size_t)(3 * X + 3 * W) * sizeof *memory);
    int64_t *const labels = malloc(TOKENS * sizeof *labels);
    assert_true(memory && labels);
    for (int64_t i = 0; i < X + W; i++) /* without a short period */
        memory[i] = (float)((uint64_t)i * 0x9e3779b97f4a7c15u >> 40) * 0x1p-23f - 1;
    for (int64_t i = 0; i < TOKENS; i++)
        labels[i] = i * 7919 % CLASSES;
    f.hidden = rafter_tensor(memory, RAFTER_F32, 2, shape_x);
    f.weight = rafter_tensor(memory + X, RAFTER_F32, 2, shape_w);
    f.target = rafter_tensor(labels, RAFTER_I64, 1, tokens);

    float loss[2], *const dx[] = {memory + X + W, memory + 2 * X + W},
                          *const dweight[] = {memory + 3 * X + W, memory + 3 * X + 2 * W};
    size_t peak[2];
    for (int i = 0; i < 2; i++) {
        struct ledger ledger = {0};
        with_ledger(&ledger);
        f.loss = rafter_tensor(&loss[i], RAFTER_F32, 0, NULL);
        f.dhidden = rafter_tensor(dx[i], RAFTER_F32, 2, shape_x);
        f.dweight = rafter_tensor(dweight[i], RAFTER_F32, 2, shape_w);
        f.lce.budget = i == 0 ? 0 : budget;
        assert_int_equal(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_OK);
        peak[i] = ledger.most;
    }
    assert_true(peak[0] > 2 * budget && peak[1] <= budget && peak[1] > budget / 2);
    assert_true(fabsf(loss[1] - loss[0]) < 1e-5f * loss[0]);
    assert_true(difference(dx[1], dx[0], X) < 1e-5 && difference(dweight[1], dweight[0], W) < 1e-5);
    free(memory);
    free(labels);
}

void test_interleaved_columns_do_not_overlap(void **state) {
    (void)state;
    int64_t shape[] = {4, 8}, strides[] = {16, 1};
    f.x = rafter_tensor(f.x_data, RAFTER_F32, 2, shape);
    f.y = rafter_tensor(f.x_data + 8, RAFTER_F32, 2, shape);
    f.x.strides = f.y.strides = strides;
    f.act.kind = RAFTER_ACT_RELU;
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 8; c++)
            assert_true(f.x_data[16 * r + 8 + c] == (f.x_data[16 * r + c] > 0 ? f.x_data[16 * r + c] : 0));
    f.y.data = f.x_data + 7;
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_INVALID_ARGUMENT);
}

void test_none_copies_nothing_in_place(void **state) {
    (void)state;
    f.act.kind = RAFTER_ACT_NONE;
    f.act.y = &f.x;
    f.act.dx = &f.dy;
    const float before = f.x_data[5];
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);
    assert_int_equal(rafter_act_backward(f.context, &f.act), RAFTER_OK);
    assert_true(f.x_data[5] == before);
}

/* x is memory that can be neither read nor written. */
void test_scaling_by_one_touches_nothing(void **state) {
    (void)state;
    enum { BYTES = 1 << 20 };
    float *const nothing = mmap(NULL, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(nothing != MAP_FAILED);
    int64_t shape[] = {BYTES / sizeof(float)};
    DLTensor x = rafter_tensor(nothing, RAFTER_F32, 1, shape);
    f.small_data[3][0] = 1;
    f.scale.x = f.scale.y = &x;
    assert_int_equal(rafter_scale_forward(f.context, &f.scale), RAFTER_OK);
    munmap(nothing, BYTES);
}

/* ---- zero sizes ------------------------------------------------------------------------------ */

void test_zero_sizes(void **state) {
    (void)state;
    int64_t empty[] = {B, 0, H, D}, empty_y[] = {B, 0, H, 2 * D}, empty_lse[] = {B, 0, H}, no_rows[] = {0},
            no_grid[] = {0, V}, no_hidden[] = {0, D};
    DLTensor x = rafter_tensor(NULL, RAFTER_F32, 4, empty), y = x, dy = x, dx = x;
    f.act.x = &x, f.act.y = &y, f.act.dy = &dy, f.act.dx = &dx;
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);
    assert_int_equal(rafter_act_backward(f.context, &f.act), RAFTER_OK);
    f.act.dim = 1; /* softmax over an empty dimension */
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);

    DLTensor lse = rafter_tensor(NULL, RAFTER_F32, 3, empty_lse);
    f.logsumexp.x = &x, f.logsumexp.lse = &lse;
    assert_int_equal(rafter_logsumexp_forward(f.context, &f.logsumexp), RAFTER_OK);
    f.logsumexp.dim = 1; /* over an empty dimension: -inf, as in PyTorch */
    int64_t reduced[] = {B, H, D};
    f.lse = rafter_tensor(f.small_data[1], RAFTER_F32, 3, reduced);
    f.logsumexp.lse = &f.lse;
    assert_int_equal(rafter_logsumexp_forward(f.context, &f.logsumexp), RAFTER_OK);
    for (int i = 0; i < B * H * D; i++)
        assert_true(f.small_data[1][i] == (float)-__builtin_inf());

    DLTensor logits = rafter_tensor(NULL, RAFTER_F32, 2, no_grid), target = rafter_tensor(NULL, RAFTER_I64, 1, no_rows);
    f.ce.logits = &logits, f.ce.target = &target, f.ce.lse = NULL;
    assert_int_equal(rafter_cross_entropy_forward(f.context, &f.ce), RAFTER_OK);
    assert_true(f.small_data[3][0] != f.small_data[3][0]); /* the mean over no rows is NaN */
    f.options.reduction = RAFTER_SUM;
    assert_int_equal(rafter_cross_entropy_forward(f.context, &f.ce), RAFTER_OK);
    assert_true(f.small_data[3][0] == 0);
    f.options.reduction = RAFTER_MEAN;
    f.options.zero_if_all_ignored = 1;
    f.small_data[3][0] = 5;
    assert_int_equal(rafter_cross_entropy_forward(f.context, &f.ce), RAFTER_OK);
    assert_true(f.small_data[3][0] == 0);

    DLTensor hidden = rafter_tensor(NULL, RAFTER_F32, 2, no_hidden), dhidden = hidden;
    f.lce.x = &hidden, f.lce.target = &target, f.lce.dx = &dhidden;
    assert_int_equal(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_OK);
    for (int i = 0; i < V * D; i++)
        assert_true(f.y_data[i] == 0); /* dweight of no rows */

    y = rafter_tensor(NULL, RAFTER_F32, 4, empty_y);
    f.lrpe.x = &x, f.lrpe.y = &y;
    assert_int_equal(rafter_lrpe_cosine_forward(f.context, &f.lrpe), RAFTER_OK);
}

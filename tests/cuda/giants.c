/* SPDX-License-Identifier: Apache-2.0 */
/* More rows, and longer rows, than 32 bits can count. The data is created and sampled on the
 * device: the host may not have the memory. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "parts.h"

enum { PATTERN = 0x3f };                                  /* every byte of an input: 0.746 in bf16 and in fp32 */
static const double pattern = 0x1.7e7e7ep-1;              /* 0x3f3f3f3f */
static const int64_t giant_rows = ((int64_t)1 << 31) + 7; /* not a multiple of blocks of 256 or packs of 8 */

static rafter_context *giant;

/* Device memory of n elements, filled with `byte`. */
static void *giant_memory(rafter_dtype dtype, int64_t n, int byte) {
    const size_t bytes = (size_t)n * (dtype == RAFTER_F32 || dtype == RAFTER_I32 ? 4 : 2);
    void *memory = gpu_allocate(bytes);
    expect(memory && gpu_fill(giant, memory, byte, bytes), "no memory for %lld elements", (long long)n);
    return memory;
}

static DLTensor giant_tensor(rafter_dtype dtype, int ndim, int64_t *shape, int byte) {
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    DLTensor t = rafter_tensor(giant_memory(dtype, n, byte), dtype, ndim, shape);
    t.device = context_device(giant);
    return t;
}

/* Compares elements at both ends, around powers of two and in between, of a tensor that repeats
 * with `period`. */
static void expect_giant(const char *name, const DLTensor *t, int64_t n, int64_t period, int64_t phase, double want) {
    const int64_t two = (int64_t)1 << 31;
    const int64_t near[] = {0, 1, 255, n / 3, n / 2, two - 1, two, two + 1, 2 * two - 1, 2 * two, n - period};
    for (size_t i = 0; i < sizeof near / sizeof *near; i++) {
        const int64_t at = near[i] / period * period + phase;
        unsigned char bytes[4] = {0};
        const size_t size = t->dtype.bits / 8;
        float got;
        if (at >= n)
            continue;
        gpu_copy(bytes + 4 - size, (const char *)t->data + (size_t)at * size, size); /* a bf16 is the high half */
        memcpy(&got, bytes, sizeof got);
        expect(fabs(got - want) <= 0x1p-8 * fabs(want), "%s[%lld] is %g, wanted %g", name, (long long)at, got, want);
    }
}

static void ran(rafter_status status, const char *what) {
    expect(status == RAFTER_OK, "%s: %s", what, rafter_last_error(giant));
    expect(gpu_synchronize(giant), "%s: the device failed", what);
}

static void test_giant_rows(void) {
    int64_t pairs[2] = {giant_rows, 2}, rows[1] = {giant_rows};
    const int64_t n = 2 * giant_rows;
    DLTensor x = giant_tensor(RAFTER_BF16, 2, pairs, PATTERN), out = giant_tensor(RAFTER_BF16, 2, pairs, 0xff);
    DLTensor row_value = giant_tensor(RAFTER_F32, 1, rows, 0xff), upstream = giant_tensor(RAFTER_F32, 1, rows, PATTERN);
    DLTensor labels = giant_tensor(RAFTER_I32, 1, rows, 0);

    const rafter_act_args softmax = {.size = sizeof softmax, .kind = RAFTER_ACT_SOFTMAX, .dim = 1, .x = &x, .y = &out};
    ran(rafter_act_forward(giant, &softmax), "softmax of 2^31 rows");
    expect_giant("y", &out, n, 1, 0, 0.5);
    const rafter_act_args silu = {.size = sizeof silu, .kind = RAFTER_ACT_SILU, .x = &x, .y = &out};
    ran(rafter_act_forward(giant, &silu), "silu of 2^32 elements");
    expect_giant("y", &out, n, 1, 0, pattern / (1 + exp(-pattern)));

    const rafter_logsumexp_args lse = {
        .size = sizeof lse, .dim = 1, .x = &x, .lse = &row_value, .dlse = &upstream, .dx = &out};
    ran(rafter_logsumexp_forward(giant, &lse), "logsumexp of 2^31 rows");
    expect_giant("lse", &row_value, giant_rows, 1, 0, pattern + log(2));
    ran(rafter_logsumexp_backward(giant, &lse), "backward of 2^31 rows");
    expect_giant("dx", &out, n, 1, 0, pattern / 2);

    const rafter_loss_options options = {.size = sizeof options, .reduction = RAFTER_NONE};
    const rafter_cross_entropy_args loss = {.size = sizeof loss,
                                            .options = &options,
                                            .logits = &x,
                                            .target = &labels,
                                            .row_loss = &row_value,
                                            .dloss = &upstream,
                                            .dlogits = &out};
    ran(rafter_cross_entropy_forward(giant, &loss), "cross_entropy of 2^31 rows");
    expect_giant("row_loss", &row_value, giant_rows, 1, 0, log(2));
    expect_giant("dlogits", &out, n, 2, 0, -pattern / 2);
    expect_giant("dlogits", &out, n, 2, 1, pattern / 2);

    int64_t shape_x[4] = {1, giant_rows, 1, 1}, shape_y[4] = {1, giant_rows, 1, 2}, shape_theta[2] = {1, 1};
    DLTensor tokens = x, theta = giant_tensor(RAFTER_F32, 2, shape_theta, 0);
    tokens.ndim = out.ndim = 4;
    tokens.shape = shape_x;
    out.shape = shape_y;
    const rafter_lrpe_cosine_args encode = {
        .size = sizeof encode, .act = RAFTER_ACT_RELU, .x = &tokens, .theta = &theta, .y = &out};
    ran(rafter_lrpe_cosine_forward(giant, &encode), "lrpe_cosine of 2^31 tokens");
    expect_giant("y", &out, n, 2, 0, pattern);
    expect_giant("y", &out, n, 2, 1, 0);
    const DLTensor *const all[] = {&x, &out, &row_value, &upstream, &labels, &theta};
    release_all(all, sizeof all / sizeof *all);
}

/* One line of that many elements, alone and beside another. */
static void test_giant_lines(void) {
    for (int64_t lines = 1; lines <= 2; lines++) {
        int64_t shape[2] = {giant_rows, lines}, one[1] = {lines}, shape_x[4] = {1, giant_rows, 1, lines},
                shape_y[4] = {1, giant_rows, 1, 2 * lines}, shape_theta[2] = {1, lines};
        const int64_t n = giant_rows * lines;
        DLTensor x = giant_tensor(RAFTER_BF16, 2, shape, PATTERN), y = giant_tensor(RAFTER_BF16, 2, shape, 0xff);
        DLTensor wide = giant_tensor(RAFTER_BF16, 4, shape_y, 0xff), sums = giant_tensor(RAFTER_F32, 1, one, 0xff);
        DLTensor theta = giant_tensor(RAFTER_F32, 2, shape_theta, 0), tokens = x;
        tokens.ndim = 4;
        tokens.shape = shape_x;
        const rafter_act_args softmax = {
            .size = sizeof softmax, .kind = RAFTER_ACT_SOFTMAX, .dim = 0, .x = &x, .y = &y};
        ran(rafter_act_forward(giant, &softmax), "softmax over 2^31 elements");
        expect_giant("y", &y, n, 1, 0, 0x1p-31);
        const rafter_logsumexp_args lse = {.size = sizeof lse, .dim = 0, .x = &x, .lse = &sums};
        ran(rafter_logsumexp_forward(giant, &lse), "logsumexp over 2^31 elements");
        expect_giant("lse", &sums, lines, 1, 0, pattern + 31 * log(2));
        const rafter_lrpe_cosine_args encode = {.size = sizeof encode,
                                                .act = RAFTER_ACT_SOFTMAX,
                                                .softmax_over = RAFTER_OVER_SEQUENCE,
                                                .x = &tokens,
                                                .theta = &theta,
                                                .y = &wide};
        ran(rafter_lrpe_cosine_forward(giant, &encode), "lrpe_cosine over 2^31 tokens");
        expect_giant("y", &wide, 2 * n, 2 * lines, 0, 0x1p-31);
        expect_giant("y", &wide, 2 * n, 2 * lines, lines, 0);
        const DLTensor *const all[] = {&x, &y, &wide, &sums, &theta};
        release_all(all, sizeof all / sizeof *all);
    }
}

/* The most rows that kernels number by an int (MOST_INT_ROWS of cuda/launch.cuh), and three fewer, so that packs of four rows are whole; of two elements
 * that are adjacent, or that are `rows` elements apart. */
static void test_most_int_rows(void) {
    const int64_t most = INT32_MAX - (1 << 24), two = 2;
    for (int test = 0; test < 4; test++) {
        const bool columns = test % 2;
        int64_t rows = test < 2 ? most : most - 3, shape[2] = {rows, two},
                strides[2] = {columns ? 1 : two, columns ? rows : 1};
        DLTensor x = giant_tensor(RAFTER_BF16, 2, shape, PATTERN), dx = giant_tensor(RAFTER_BF16, 2, shape, 0xff);
        DLTensor row_value = giant_tensor(RAFTER_F32, 1, &rows, 0xff),
                 upstream = giant_tensor(RAFTER_F32, 1, &rows, PATTERN);
        DLTensor lse_of = giant_tensor(RAFTER_F32, 1, &rows, 0xff), labels = giant_tensor(RAFTER_I32, 1, &rows, 0);
        x.strides = dx.strides = strides;
        const int64_t n = two * rows, period = columns ? 1 : two;

        const rafter_logsumexp_args lse = {
            .size = sizeof lse, .dim = 1, .x = &x, .lse = &lse_of, .dlse = &upstream, .dx = &dx};
        ran(rafter_logsumexp_forward(giant, &lse), "logsumexp of almost 2^31 rows");
        expect_giant("lse", &lse_of, rows, 1, 0, pattern + log(2));
        ran(rafter_logsumexp_backward(giant, &lse), "backward of almost 2^31 rows");
        expect_giant("dx", &dx, n, 1, 0, pattern / 2);

        for (int capped = 0; capped < 2; capped++) {
            const double slope = capped ? 1 - tanh(pattern) * tanh(pattern) : 1;
            const rafter_loss_options options = {
                .size = sizeof options, .reduction = RAFTER_NONE, .softcap = capped ? 1.0f : 0.0f};
            const rafter_cross_entropy_args forward = {.size = sizeof forward,
                                                       .options = &options,
                                                       .logits = &x,
                                                       .target = &labels,
                                                       .loss = &row_value,
                                                       .lse = &lse_of};
            ran(rafter_cross_entropy_forward(giant, &forward), "cross_entropy of almost 2^31 rows");
            expect_giant("loss", &row_value, rows, 1, 0, log(2));
            rafter_cross_entropy_args backward = forward;
            backward.loss = NULL;
            backward.dloss = &upstream;
            backward.dlogits = &dx;
            ran(rafter_cross_entropy_backward(giant, &backward), "gradients of almost 2^31 rows");
            /* One class after the other, or both of a row. */
            expect_giant("dlogits", &dx, columns ? rows : n, period, 0, -pattern / 2 * slope);
            DLTensor second = dx;
            second.data = (char *)dx.data + (columns ? rows : 1) * 2;
            expect_giant("dlogits", &second, columns ? rows : n - 1, period, 0, pattern / 2 * slope);
        }
        const DLTensor *const all[] = {&x, &dx, &row_value, &upstream, &lse_of, &labels};
        release_all(all, sizeof all / sizeof *all);
    }
}

/* Rows of one pack each: more threads than 32 bits can count. */
static void test_giant_packs(void) {
    int64_t shape[2] = {((int64_t)1 << 27) + 7, 8};
    DLTensor x = giant_tensor(RAFTER_BF16, 2, shape, PATTERN), sums = giant_tensor(RAFTER_F32, 1, shape, 0xff);
    const rafter_logsumexp_args lse = {.size = sizeof lse, .dim = 1, .x = &x, .lse = &sums};
    ran(rafter_logsumexp_forward(giant, &lse), "logsumexp of 2^27 rows");
    expect_giant("lse", &sums, shape[0], 1, 0, pattern + log(8));
    gpu_release(x.data);
    gpu_release(sums.data);
}

void test_giants(void) {
    const int64_t least = (int64_t)64 << 30;
    struct gpu_facts facts;
    giant = open_context();
    gpu_describe(giant, &facts);
    if (facts.memory_bytes >= least) {
        test_giant_rows();
        test_most_int_rows();
        test_giant_lines();
        test_giant_packs();
    } else {
        printf("this GPU has less than 64 GiB: more than 2^31 rows are not tested\n");
    }
    close_context(giant);
}

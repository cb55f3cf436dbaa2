/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The contract of the public header apart from the numbers: bad input gets a status and a sentence that names the
 * argument and both values, and leaves outputs untouched; argument structs can grow; workspaces and allocators do what
 * they say; zero-size tensors pass.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "rafter/rafter.h"

/* ---- a small valid call of every op, to spoil one argument at a time ------------------------- */

enum { B = 2, N = 3, H = 2, D = 8, ROWS = B * N, V = 11 };

static struct fixture {
    rafter_context *context;
    /* Memory, larger than needed so that strides can be played with. */
    float x_data[256], y_data[512], dy_data[512], dx_data[256], theta_data[64], weight_data[256], small_data[8][64];
    int64_t labels[ROWS], positions[N];
    int64_t shape_x[4], shape_y[4], shape_theta[2], shape_weight[2], shape_rows[1], shape_lse[3], shape_grid[2],
        shape_hidden[2];
    int64_t strides[4];
    DLTensor x, y, dy, dx, theta, dtheta, positions_t; /* act, logsumexp, lrpe_cosine */
    DLTensor lse, dlse;
    DLTensor logits, dlogits, target, loss, row_loss, row_lse, argmax; /* losses */
    DLTensor hidden, dhidden, weight, dweight;
    int64_t argmax_data[ROWS];
    rafter_loss_options options;
    rafter_act_args act;
    rafter_logsumexp_args logsumexp;
    rafter_cross_entropy_args ce;
    rafter_linear_cross_entropy_args lce;
    rafter_lrpe_cosine_args lrpe;
} f;

static int setup(void **state) {
    (void)state;
    rafter_context_destroy(f.context);
    memset(&f, 0, sizeof f);
    if (rafter_context_create(&f.context, NULL) != RAFTER_OK)
        return 1;
    for (int i = 0; i < 256; i++) {
        f.x_data[i] = 0.01f * (float)(i % 37) - 0.1f;
        f.weight_data[i] = 0.02f * (float)(i % 29) - 0.2f;
    }
    for (int i = 0; i < 512; i++) {
        f.dy_data[i] = 1;
        f.y_data[i] = 77;
    }
    for (int i = 0; i < 256; i++)
        f.dx_data[i] = 77;
    for (int i = 0; i < ROWS; i++)
        f.labels[i] = i;
    memcpy(f.shape_x, (int64_t[]){B, N, H, D}, sizeof f.shape_x);
    memcpy(f.shape_y, (int64_t[]){B, N, H, 2 * D}, sizeof f.shape_y);
    memcpy(f.shape_theta, (int64_t[]){H, D}, sizeof f.shape_theta);
    memcpy(f.shape_lse, (int64_t[]){B, N, H}, sizeof f.shape_lse);
    memcpy(f.shape_grid, (int64_t[]){ROWS, V}, sizeof f.shape_grid);
    memcpy(f.shape_hidden, (int64_t[]){ROWS, D}, sizeof f.shape_hidden);
    memcpy(f.shape_weight, (int64_t[]){V, D}, sizeof f.shape_weight);
    f.shape_rows[0] = ROWS;

    f.x = rafter_tensor(f.x_data, RAFTER_F32, 4, f.shape_x);
    f.y = rafter_tensor(f.y_data, RAFTER_F32, 4, f.shape_x);
    f.dy = rafter_tensor(f.dy_data, RAFTER_F32, 4, f.shape_x);
    f.dx = rafter_tensor(f.dx_data, RAFTER_F32, 4, f.shape_x);
    f.theta = rafter_tensor(f.theta_data, RAFTER_F32, 2, f.shape_theta);
    f.dtheta = rafter_tensor(f.small_data[0], RAFTER_F32, 2, f.shape_theta);
    f.positions_t = rafter_tensor(f.positions, RAFTER_I64, 1, (f.strides[3] = N, &f.strides[3]));
    f.lse = rafter_tensor(f.small_data[1], RAFTER_F32, 3, f.shape_lse);
    f.dlse = rafter_tensor(f.small_data[2], RAFTER_F32, 3, f.shape_lse);
    f.logits = rafter_tensor(f.x_data, RAFTER_F32, 2, f.shape_grid);
    f.dlogits = rafter_tensor(f.dx_data, RAFTER_F32, 2, f.shape_grid);
    f.target = rafter_tensor(f.labels, RAFTER_I64, 1, f.shape_rows);
    f.loss = rafter_tensor(f.small_data[3], RAFTER_F32, 0, NULL);
    f.row_loss = rafter_tensor(f.small_data[4], RAFTER_F32, 1, f.shape_rows);
    f.row_lse = rafter_tensor(f.small_data[5], RAFTER_F32, 1, f.shape_rows);
    f.argmax = rafter_tensor(f.argmax_data, RAFTER_I64, 1, f.shape_rows);
    f.hidden = rafter_tensor(f.x_data, RAFTER_F32, 2, f.shape_hidden);
    f.dhidden = rafter_tensor(f.dx_data, RAFTER_F32, 2, f.shape_hidden);
    f.weight = rafter_tensor(f.weight_data, RAFTER_F32, 2, f.shape_weight);
    f.dweight = rafter_tensor(f.y_data, RAFTER_F32, 2, f.shape_weight);

    f.options = (rafter_loss_options){.size = sizeof f.options};
    f.act = (rafter_act_args){
        .size = sizeof f.act, .kind = RAFTER_ACT_SOFTMAX, .dim = -1, .x = &f.x, .y = &f.y, .dy = &f.dy, .dx = &f.dx};
    f.logsumexp = (rafter_logsumexp_args){
        .size = sizeof f.logsumexp, .dim = -1, .x = &f.x, .lse = &f.lse, .dlse = &f.dlse, .dx = &f.dx};
    f.ce = (rafter_cross_entropy_args){.size = sizeof f.ce,
                                       .options = &f.options,
                                       .logits = &f.logits,
                                       .target = &f.target,
                                       .loss = &f.loss,
                                       .lse = &f.row_lse};
    f.lce = (rafter_linear_cross_entropy_args){.size = sizeof f.lce,
                                               .options = &f.options,
                                               .x = &f.hidden,
                                               .weight = &f.weight,
                                               .target = &f.target,
                                               .loss = &f.loss,
                                               .dx = &f.dhidden,
                                               .dweight = &f.dweight};
    f.lrpe = (rafter_lrpe_cosine_args){.size = sizeof f.lrpe, .x = &f.x, .theta = &f.theta, .y = &f.y};
    return 0;
}

static int teardown(void **state) {
    (void)state;
    rafter_context_destroy(f.context);
    f.context = NULL;
    return 0;
}

static void lrpe_shapes(void) {
    f.y.shape = f.shape_y;
    f.dy.shape = f.shape_y;
    f.lrpe.dy = &f.dy;
    f.lrpe.dx = &f.dx;
}

/* The call failed with this status, its sentence holds all the words (NULL-terminated), and no output was written. */
static void expect_failure(rafter_status got, rafter_status want, const char *word, ...) {
    const char *sentence = rafter_last_error(f.context);
    if (got != want)
        print_error("status %s, wanted %s; sentence: %s\n", rafter_status_name(got), rafter_status_name(want),
                    sentence);
    assert_int_equal(got, want);
    va_list words;
    va_start(words, word);
    for (; word; word = va_arg(words, const char *)) {
        if (!strstr(sentence, word))
            print_error("'%s' is not in: %s\n", word, sentence);
        assert_non_null(strstr(sentence, word));
    }
    va_end(words);
    for (int i = 0; i < 512; i++)
        assert_true(f.y_data[i] == 77);
    for (int i = 0; i < 256; i++)
        assert_true(f.dx_data[i] == 77);
    for (int t = 0; t < 8; t++)
        for (int i = 0; i < 64; i++)
            assert_true(f.small_data[t][i] == 0);
}
#define EXPECT_INVALID(call, ...) expect_failure((call), RAFTER_INVALID_ARGUMENT, __VA_ARGS__, (char *)NULL)

/* ---- the valid calls are valid --------------------------------------------------------------- */

static void test_fixture_is_valid(void **state) {
    (void)state;
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);
    assert_int_equal(rafter_act_backward(f.context, &f.act), RAFTER_OK);
    assert_int_equal(rafter_logsumexp_forward(f.context, &f.logsumexp), RAFTER_OK);
    assert_int_equal(rafter_logsumexp_backward(f.context, &f.logsumexp), RAFTER_OK);
    assert_int_equal(rafter_cross_entropy_forward(f.context, &f.ce), RAFTER_OK);
    f.ce.dlogits = &f.dlogits;
    assert_int_equal(rafter_cross_entropy_backward(f.context, &f.ce), RAFTER_OK);
    assert_int_equal(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_OK);
    assert_int_equal(rafter_linear_cross_entropy_backward(f.context, &f.lce), RAFTER_OK);
    lrpe_shapes();
    assert_int_equal(rafter_lrpe_cosine_forward(f.context, &f.lrpe), RAFTER_OK);
    f.lrpe.dtheta = &f.dtheta;
    assert_int_equal(rafter_lrpe_cosine_backward(f.context, &f.lrpe), RAFTER_OK);
    assert_string_equal(rafter_last_error(f.context), "");
}

/* ---- what every op checks alike -------------------------------------------------------------- */

/* One call of each op and direction, on the fixture as it stands. */
static rafter_status call(int which) {
    switch (which) {
    case 0: return rafter_act_forward(f.context, &f.act);
    case 1: return rafter_act_backward(f.context, &f.act);
    case 2: return rafter_logsumexp_forward(f.context, &f.logsumexp);
    case 3: return rafter_logsumexp_backward(f.context, &f.logsumexp);
    case 4: return rafter_cross_entropy_forward(f.context, &f.ce);
    case 5: return rafter_cross_entropy_backward(f.context, &f.ce);
    case 6: return rafter_linear_cross_entropy_forward(f.context, &f.lce);
    case 7: return rafter_linear_cross_entropy_backward(f.context, &f.lce);
    case 8: return rafter_lrpe_cosine_forward(f.context, &f.lrpe);
    default: return rafter_lrpe_cosine_backward(f.context, &f.lrpe);
    }
}
enum { CALLS = 10 };

/* An input tensor that call `which` reads, and an output that it writes, with their argument names. */
struct handles {
    DLTensor *input, *output;
    const char *input_name, *output_name;
};

static struct handles handles(int which) {
    f.ce.dlogits = which == 5 ? &f.dlogits : NULL;
    if (which >= 8)
        lrpe_shapes();
    switch (which) {
    case 0: return (struct handles){&f.x, &f.y, "x", "y"};
    case 1: return (struct handles){&f.dy, &f.dx, "dy", "dx"};
    case 2: return (struct handles){&f.x, &f.lse, "x", "lse"};
    case 3: return (struct handles){&f.x, &f.dx, "x", "dx"};
    case 4: return (struct handles){&f.logits, &f.row_lse, "logits", "lse"};
    case 5: return (struct handles){&f.logits, &f.dlogits, "logits", "dlogits"};
    case 6: return (struct handles){&f.hidden, &f.dweight, "x", "dweight"};
    case 7: return (struct handles){&f.weight, &f.dhidden, "weight", "dx"};
    case 8: return (struct handles){&f.theta, &f.y, "theta", "y"};
    default: return (struct handles){&f.x, &f.dx, "x", "dx"};
    }
}

/* Runs `spoil` on a fresh fixture for every call, and expects a sentence with the spoilt argument's name and `word`. */
static void spoil_inputs(void (*spoil)(DLTensor *), const char *word) {
    for (int which = 0; which < CALLS; which++) {
        setup(NULL);
        const struct handles h = handles(which);
        spoil(h.input);
        EXPECT_INVALID(call(which), h.input_name, word);
        teardown(NULL);
    }
}

static void spoil_outputs(void (*spoil)(DLTensor *), const char *word) {
    for (int which = 0; which < CALLS; which++) {
        setup(NULL);
        const struct handles h = handles(which);
        spoil(h.output);
        EXPECT_INVALID(call(which), h.output_name, word);
        teardown(NULL);
    }
}

static void on_gpu(DLTensor *t) {
    t->device.device_type = kDLCUDA;
}
static void as_int32(DLTensor *t) {
    t->dtype = (DLDataType){kDLInt, 32, 1};
}
static void as_double(DLTensor *t) {
    t->dtype = (DLDataType){kDLFloat, 64, 1};
}
static void without_data(DLTensor *t) {
    t->data = NULL;
}
static void without_shape(DLTensor *t) {
    t->shape = NULL;
}
static void many_dims(DLTensor *t) {
    t->ndim = 17;
}
static int64_t other_strides[4], other_shape[4];
static void own_strides(DLTensor *t) {
    int64_t step = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        other_strides[d] = step;
        step *= t->shape[d];
    }
    t->strides = other_strides;
}
static void negative_stride(DLTensor *t) {
    own_strides(t);
    other_strides[0] = -other_strides[0];
}
static void huge_stride(DLTensor *t) {
    own_strides(t);
    other_strides[0] = INT64_MAX / 2;
}
static void zero_stride(DLTensor *t) {
    own_strides(t);
    other_strides[0] = 0;
}
static void negative_size(DLTensor *t) {
    memcpy(other_shape, t->shape, sizeof(int64_t) * (size_t)t->ndim);
    other_shape[0] = -3;
    t->shape = other_shape;
}
static void longer_shape(DLTensor *t) {
    memcpy(other_shape, t->shape, sizeof(int64_t) * (size_t)t->ndim);
    other_shape[t->ndim - 1] += 1;
    t->shape = other_shape;
}

static void test_spoilt_tensors(void **state) {
    (void)state;
    spoil_inputs(on_gpu, "device");
    spoil_outputs(on_gpu, "device");
    spoil_inputs(as_int32, "dtype");
    spoil_inputs(as_double, "dtype fp64");
    spoil_outputs(as_double, "dtype fp64");
    spoil_inputs(without_data, "NULL");
    spoil_outputs(without_data, "NULL");
    spoil_inputs(without_shape, "NULL");
    spoil_inputs(many_dims, "17");
    spoil_outputs(many_dims, "17");
    spoil_inputs(negative_stride, "stride");
    spoil_outputs(negative_stride, "stride");
    spoil_inputs(huge_stride, "stride");
    spoil_outputs(huge_stride, "stride");
    spoil_outputs(zero_stride, "overlap");
    spoil_inputs(negative_size, "-3");
    spoil_outputs(longer_shape, "shape");
    setup(state);
}

static void test_missing_arguments(void **state) {
    (void)state;
    EXPECT_INVALID(rafter_act_forward(f.context, NULL), "args", "NULL");
    EXPECT_INVALID(rafter_linear_cross_entropy_backward(f.context, NULL), "args", "NULL");
    assert_int_equal(rafter_act_forward(NULL, &f.act), RAFTER_INVALID_ARGUMENT);
    assert_string_equal(rafter_last_error(NULL), "context is NULL");
    f.act.x = NULL;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "x", "NULL");
    f.act.x = &f.x;
    f.act.y = NULL;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "y", "NULL");
    EXPECT_INVALID(rafter_act_backward(f.context, &f.act), "y", "NULL"); /* softmax's backward reads y */
    f.logsumexp.lse = NULL;
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "lse", "NULL");
    EXPECT_INVALID(rafter_logsumexp_backward(f.context, &f.logsumexp), "lse", "NULL");
    f.ce.target = NULL;
    EXPECT_INVALID(rafter_cross_entropy_forward(f.context, &f.ce), "target", "NULL");
    f.lce.weight = NULL;
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "weight", "NULL");
    f.lrpe.theta = NULL;
    EXPECT_INVALID(rafter_lrpe_cosine_forward(f.context, &f.lrpe), "theta", "NULL");
    size_t bytes = 0;
    assert_int_equal(rafter_act_workspace(f.context, &f.act, RAFTER_FORWARD, NULL), RAFTER_INVALID_ARGUMENT);
    f.act.x = NULL;
    assert_int_equal(rafter_act_workspace(f.context, &f.act, RAFTER_FORWARD, &bytes), RAFTER_INVALID_ARGUMENT);
}

static void test_sizes_of_structs(void **state) {
    (void)state;
    f.act.size = 0;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "rafter_act_args.size", "0");
    f.options.size = 3;
    EXPECT_INVALID(rafter_cross_entropy_forward(f.context, &f.ce), "rafter_loss_options.size", "3");

    /* A caller from the future: fine while what it adds is zero. */
    struct {
        rafter_logsumexp_args args;
        int64_t later;
    } future = {f.logsumexp, 0};
    future.args.size = sizeof future;
    assert_int_equal(rafter_logsumexp_forward(f.context, &future.args), RAFTER_OK);
    memset(f.small_data, 0, sizeof f.small_data);
    future.later = 1;
    expect_failure(rafter_logsumexp_forward(f.context, &future.args), RAFTER_UNSUPPORTED, "rafter_logsumexp_args.size",
                   (char *)NULL);

    /* A caller from the past: what it does not know is zero. */
    f.logsumexp.size = offsetof(rafter_logsumexp_args, workspace);
    f.logsumexp.workspace = (void *)1;
    f.logsumexp.workspace_bytes = 1;
    assert_int_equal(rafter_logsumexp_forward(f.context, &f.logsumexp), RAFTER_OK);
}

/* ---- shapes, options, overlaps of single ops ------------------------------------------------- */

static void test_act_bad(void **state) {
    (void)state;
    f.act.dim = 4;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "dim", "4");
    f.act.dim = -5;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "dim", "-5");
    f.act.dim = -1;
    f.act.kind = (rafter_act_kind)17;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "kind", "17");
    f.act.kind = RAFTER_ACT_SILU;
    f.y.data = f.x_data + 1;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "y", "overlaps", "x");
    f.y.data = f.y_data;
    f.y.dtype = (DLDataType){kDLBfloat, 16, 1};
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "y", "bf16", "fp32");

    f.y = rafter_tensor(f.y_data, RAFTER_F32, 4, f.shape_x);
    unsigned char bits[64];
    int64_t wrong[] = {1}, strided[] = {1, 2, 4, 8};
    DLTensor mask = rafter_tensor(bits, RAFTER_U8, 1, wrong);
    f.act.relu_mask = &mask;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "relu_mask"); /* silu has none */
    f.act.kind = RAFTER_ACT_RELU;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "relu_mask", "12"); /* 96 elements */
    wrong[0] = 12;
    f.x.strides = strided;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "x"); /* a mask wants row-major x */
}

static void test_logsumexp_bad(void **state) {
    (void)state;
    f.logsumexp.dim = 9;
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "dim", "9");
    f.logsumexp.dim = 1; /* lse is shaped for dim 3 */
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "lse", "shape");
    f.logsumexp.dim = -1;
    f.logsumexp.algorithm = (rafter_logsumexp_algorithm)9;
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "algorithm", "9");
    f.logsumexp.algorithm = RAFTER_LOGSUMEXP_AUTO;
    f.dlse.shape = f.shape_x; /* [2, 3, 2] is a prefix of x's shape: spoil it */
    f.dlse.ndim = 2;
    EXPECT_INVALID(rafter_logsumexp_backward(f.context, &f.logsumexp), "dlse", "shape");
    f.dlse = f.lse;
    f.dx.data = f.x_data + 1;
    EXPECT_INVALID(rafter_logsumexp_backward(f.context, &f.logsumexp), "dx", "overlaps");
}

static void test_losses_bad(void **state) {
    (void)state;
    rafter_loss_options *o = &f.options;
#define BAD_OPTION(field, value, word)                                                                                 \
    do {                                                                                                               \
        *o = (rafter_loss_options){.size = sizeof *o};                                                                 \
        o->field = value;                                                                                              \
        EXPECT_INVALID(rafter_cross_entropy_forward(f.context, &f.ce), #field, word);                                  \
        EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), #field, word);                          \
    } while (0)
    BAD_OPTION(label_smoothing, 1.5f, "1.5");
    BAD_OPTION(label_smoothing, -0.25f, "-0.25");
    BAD_OPTION(label_smoothing, (float)(0.0 / 0.0), "nan");
    BAD_OPTION(softcap, -1.0f, "-1");
    BAD_OPTION(reduction, (rafter_reduction)7, "7");
    DLTensor weights = f.row_loss; /* [ROWS], wanted [V] */
    BAD_OPTION(class_weight, &weights, "shape");
    DLTensor wrong = rafter_tensor(f.weight_data, RAFTER_F32, 2, f.shape_weight);
    BAD_OPTION(row_weight, &wrong, "shape");
    BAD_OPTION(denominator, &wrong, "shape");
    *o = (rafter_loss_options){.size = sizeof *o};

    for (int sign = 0; sign < 2; sign++) {
        f.labels[4] = sign ? -1 : V;
        expect_failure(rafter_cross_entropy_forward(f.context, &f.ce), RAFTER_LABEL_OUT_OF_RANGE, "4",
                       sign ? "-1" : "11", (char *)NULL);
        expect_failure(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_LABEL_OUT_OF_RANGE, "4",
                       sign ? "-1" : "11", (char *)NULL);
        f.ce.dlogits = &f.dlogits;
        expect_failure(rafter_cross_entropy_backward(f.context, &f.ce), RAFTER_LABEL_OUT_OF_RANGE, "4", (char *)NULL);
        expect_failure(rafter_linear_cross_entropy_backward(f.context, &f.lce), RAFTER_LABEL_OUT_OF_RANGE, "4",
                       (char *)NULL);
        f.ce.dlogits = NULL;
    }
    f.labels[4] = 4;

    int64_t fewer[] = {ROWS - 1};
    f.target.shape = fewer;
    EXPECT_INVALID(rafter_cross_entropy_forward(f.context, &f.ce), "target", "[5]", "[6]");
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "target", "[5]", "[6]");
    f.target.shape = f.shape_rows;
    f.loss = f.row_loss; /* mean wants one element */
    EXPECT_INVALID(rafter_cross_entropy_forward(f.context, &f.ce), "loss", "shape");
    f.loss = rafter_tensor(f.small_data[3], RAFTER_F32, 0, NULL);

    f.dlogits.data = f.x_data + 2; /* neither in place nor apart */
    f.ce.dlogits = &f.dlogits;
    EXPECT_INVALID(rafter_cross_entropy_backward(f.context, &f.ce), "dlogits", "overlaps", "logits");
    f.ce.lse = &f.row_lse;
    f.ce.row_loss = &f.row_lse; /* two outputs, one memory */
    f.ce.dlogits = NULL;
    EXPECT_INVALID(rafter_cross_entropy_forward(f.context, &f.ce), "overlaps");

    int64_t narrow[] = {V, D - 1};
    f.weight.shape = narrow;
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "weight", "[11, 7]");
    f.weight.shape = f.shape_weight;
    f.weight.dtype = (DLDataType){kDLBfloat, 16, 1};
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "weight", "bf16");
    f.weight.dtype = f.hidden.dtype;
    f.dweight.dtype = (DLDataType){kDLFloat, 16, 1};
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "dweight", "fp16");
    f.dweight.dtype = f.hidden.dtype;
    f.lce.mode = (rafter_lce_mode)5;
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "mode", "5");
    f.lce.mode = RAFTER_LCE_AUTO;
    f.lce.budget = 1;
    expect_failure(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_WORKSPACE_TOO_SMALL, "budget", "1",
                   (char *)NULL);
}

static void test_lrpe_bad(void **state) {
    (void)state;
    lrpe_shapes();
    f.lrpe.act = (rafter_act_kind)33;
    EXPECT_INVALID(rafter_lrpe_cosine_forward(f.context, &f.lrpe), "act", "33");
    f.lrpe.act = RAFTER_ACT_NONE;
    f.lrpe.algorithm = (rafter_lrpe_algorithm)33;
    EXPECT_INVALID(rafter_lrpe_cosine_forward(f.context, &f.lrpe), "algorithm", "33");
    f.lrpe.algorithm = RAFTER_LRPE_AUTO;
    f.y.shape = f.shape_x; /* not doubled */
    EXPECT_INVALID(rafter_lrpe_cosine_forward(f.context, &f.lrpe), "y", "[2, 3, 2, 8]", "[2, 3, 2, 16]");
    f.y.shape = f.shape_y;
    int64_t wrong[] = {H, D - 1};
    f.theta.shape = wrong;
    EXPECT_INVALID(rafter_lrpe_cosine_forward(f.context, &f.lrpe), "theta", "[2, 7]");
    f.theta.shape = f.shape_theta;
    int64_t short_positions[] = {N - 1};
    f.positions_t.shape = short_positions;
    f.lrpe.positions = &f.positions_t;
    EXPECT_INVALID(rafter_lrpe_cosine_forward(f.context, &f.lrpe), "positions", "[2]");
    f.lrpe.positions = &f.theta;
    EXPECT_INVALID(rafter_lrpe_cosine_forward(f.context, &f.lrpe), "positions", "dtype");
}

/* ---- memory ---------------------------------------------------------------------------------- */

struct ledger {
    size_t held, most;
    int calls;
    int fail;
};

static void *ledger_allocate(void *user, size_t bytes) {
    struct ledger *ledger = user;
    ledger->calls++;
    if (ledger->fail)
        return NULL;
    ledger->held += bytes;
    if (ledger->held > ledger->most)
        ledger->most = ledger->held;
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static void ledger_release(void *user, void *memory, size_t bytes) {
    ((struct ledger *)user)->held -= bytes;
    free(memory);
}

static void with_ledger(struct ledger *ledger) {
    rafter_context_destroy(f.context);
    const rafter_context_options options = {
        .size = sizeof options, .allocate = ledger_allocate, .release = ledger_release, .user = ledger};
    assert_int_equal(rafter_context_create(&f.context, &options), RAFTER_OK);
}

static void test_allocator(void **state) {
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

static void test_workspace(void **state) {
    (void)state;
    size_t bytes = 0;
    assert_int_equal(rafter_linear_cross_entropy_workspace(f.context, &f.lce, RAFTER_FORWARD, &bytes), RAFTER_OK);
    assert_true(bytes > 0);
    char *memory = malloc(bytes + 64);
    struct ledger ledger = {.fail = 1}; /* with a workspace the allocator is never asked */
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

/* The linker sends the library's aligned_alloc here (tests/CMakeLists.txt). */
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);

enum { LARGE_BLOCK = 4 << 20 }; /* bytes from which on a context keeps a block */
static int large_blocks;

void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
    large_blocks += bytes >= LARGE_BLOCK;
    return __real_aligned_alloc(alignment, bytes);
}

/* Without an allocator of the caller's, a large block serves every call that it is large enough for, and grows when it
 * is not. The results show that its former contents do not matter. */
static void test_kept_block(void **state) {
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

/* A large vocabulary in 64 MiB, as the allocator has seen them, gives what the call without a budget gives. */
static void test_budget(void **state) {
    (void)state;
    enum { TOKENS = 384, WIDTH = 32, CLASSES = 131072 };
    const size_t budget = (size_t)64 << 20;
    int64_t tokens[] = {TOKENS}, shape_x[] = {TOKENS, WIDTH}, shape_w[] = {CLASSES, WIDTH};
    enum { X = TOKENS * WIDTH, W = CLASSES * WIDTH };
    float *const memory = malloc((size_t)(3 * X + 3 * W) * sizeof *memory);
    int64_t *const labels = malloc(TOKENS * sizeof *labels);
    assert_true(memory && labels);
    for (int64_t i = 0; i < X + W; i++) /* of no short period */
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

static void test_interleaved_columns_do_not_overlap(void **state) {
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

static void test_none_copies_nothing_in_place(void **state) {
    (void)state;
    f.act.kind = RAFTER_ACT_NONE;
    f.act.y = &f.x;
    f.act.dx = &f.dy;
    const float before = f.x_data[5];
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);
    assert_int_equal(rafter_act_backward(f.context, &f.act), RAFTER_OK);
    assert_true(f.x_data[5] == before);
}

/* ---- zero sizes ------------------------------------------------------------------------------ */

static void test_zero_sizes(void **state) {
    (void)state;
    int64_t empty[] = {B, 0, H, D}, empty_y[] = {B, 0, H, 2 * D}, empty_lse[] = {B, 0, H}, no_rows[] = {0},
            no_grid[] = {0, V}, no_hidden[] = {0, D};
    DLTensor x = rafter_tensor(NULL, RAFTER_F32, 4, empty), y = x, dy = x, dx = x;
    f.act.x = &x, f.act.y = &y, f.act.dy = &dy, f.act.dx = &dx;
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);
    assert_int_equal(rafter_act_backward(f.context, &f.act), RAFTER_OK);
    f.act.dim = 1; /* softmax over nothing */
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);

    DLTensor lse = rafter_tensor(NULL, RAFTER_F32, 3, empty_lse);
    f.logsumexp.x = &x, f.logsumexp.lse = &lse;
    assert_int_equal(rafter_logsumexp_forward(f.context, &f.logsumexp), RAFTER_OK);
    f.logsumexp.dim = 1; /* over nothing: -inf, as in PyTorch */
    int64_t reduced[] = {B, H, D};
    f.lse = rafter_tensor(f.small_data[1], RAFTER_F32, 3, reduced);
    f.logsumexp.lse = &f.lse;
    assert_int_equal(rafter_logsumexp_forward(f.context, &f.logsumexp), RAFTER_OK);
    for (int i = 0; i < B * H * D; i++)
        assert_true(f.small_data[1][i] == (float)-__builtin_inf());

    DLTensor logits = rafter_tensor(NULL, RAFTER_F32, 2, no_grid), target = rafter_tensor(NULL, RAFTER_I64, 1, no_rows);
    f.ce.logits = &logits, f.ce.target = &target, f.ce.lse = NULL;
    assert_int_equal(rafter_cross_entropy_forward(f.context, &f.ce), RAFTER_OK);
    assert_true(f.small_data[3][0] != f.small_data[3][0]); /* the mean of nothing is NaN */
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

/* ---- context --------------------------------------------------------------------------------- */

static void test_context(void **state) {
    (void)state;
    rafter_context *context = (rafter_context *)1;
    assert_int_equal(rafter_context_create(NULL, NULL), RAFTER_INVALID_ARGUMENT);
    rafter_context_options options = {.size = sizeof options, .variant = "abacus"};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_UNSUPPORTED);
    assert_null(context);
    assert_non_null(strstr(rafter_last_error(NULL), "variant is 'abacus'"));
    options.variant = "portable";
    options.threads = 3;
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_OK);
    assert_int_equal(rafter_context_threads(context), 3);
    const char *op, *variant;
    int ops = 0;
    for (; rafter_describe_op(context, ops, &op, &variant); ops++) {
        assert_string_equal(variant, "portable");
        assert_string_equal(rafter_op_variant(op, 0), "portable");
    }
    assert_int_equal(ops, 5);
    assert_null(rafter_op_variant("abacus", 0));
    rafter_context_destroy(context);
    rafter_context_destroy(NULL);

    setenv("RAFTER_VARIANT", "portable", 1); /* wins over the option */
    options.variant = NULL;
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_OK);
    assert_int_equal(rafter_describe_op(context, 0, &op, &variant), 1);
    assert_string_equal(variant, "portable");
    rafter_context_destroy(context);
    unsetenv("RAFTER_VARIANT");

    options = (rafter_context_options){.size = sizeof options, .allocate = ledger_allocate};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_INVALID_ARGUMENT);
    assert_non_null(strstr(rafter_last_error(NULL), "release is NULL"));
    options = (rafter_context_options){.size = sizeof options, .threads = -2};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_INVALID_ARGUMENT);
    assert_non_null(strstr(rafter_last_error(NULL), "threads is -2"));
    options = (rafter_context_options){.size = sizeof options, .device = {kDLCUDA, 9999}};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_UNSUPPORTED);
    assert_non_null(strstr(rafter_last_error(NULL), "CUDA"));
    options.device = (DLDevice){kDLCUDAHost, 0};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_UNSUPPORTED);
    assert_non_null(strstr(rafter_last_error(NULL), "device_type is 3"));
    assert_int_equal(rafter_context_create(&context, NULL), RAFTER_OK); /* which forgets the sentence */
    assert_string_equal(rafter_last_error(NULL), "context is NULL");
    int32_t found = -1;
    assert_int_equal(rafter_bad_labels(context, &found), RAFTER_OK);
    assert_int_equal(found, 0);
    assert_int_equal(rafter_bad_labels(context, NULL), RAFTER_INVALID_ARGUMENT);
    assert_int_equal(rafter_context_set_stream(context, NULL), RAFTER_INVALID_ARGUMENT);
    assert_non_null(strstr(rafter_last_error(context), "stream"));
    assert_int_equal(rafter_context_set_stream(NULL, NULL), RAFTER_INVALID_ARGUMENT);
    rafter_context_destroy(context);
    for (int status = RAFTER_OK; status <= RAFTER_DEVICE_ERROR; status++)
        assert_string_not_equal(rafter_status_name((rafter_status)status), "unknown status");
    assert_string_equal(rafter_status_name((rafter_status)99), "unknown status");
}

int main(void) {
    unsetenv("RAFTER_VARIANT");
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_fixture_is_valid),
        TEST(test_spoilt_tensors),
        TEST(test_missing_arguments),
        TEST(test_sizes_of_structs),
        TEST(test_act_bad),
        TEST(test_logsumexp_bad),
        TEST(test_losses_bad),
        TEST(test_lrpe_bad),
        TEST(test_allocator),
        TEST(test_workspace),
        TEST(test_kept_block),
        TEST(test_budget),
        TEST(test_interleaved_columns_do_not_overlap),
        TEST(test_none_copies_nothing_in_place),
        TEST(test_zero_sizes),
        TEST(test_context),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

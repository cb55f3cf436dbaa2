/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments that every op checks alike. */
#include <string.h>

#include "fixture.h"

/* ---- valid calls ----------------------------------------------------------------------------- */

void test_fixture_is_valid(void **state) {
    (void)state;
    assert_int_equal(rafter_scale_forward(f.context, &f.scale), RAFTER_OK);
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

/* ---- common checks --------------------------------------------------------------------------- */

/* One call of each op and direction, with the current fixture. */
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
    case 9: return rafter_lrpe_cosine_backward(f.context, &f.lrpe);
    default: return rafter_scale_forward(f.context, &f.scale);
    }
}
enum { CALLS = 11 };

/* An input tensor that call `which` reads, and an output that it writes, with their argument
 * names. */
struct handles {
    DLTensor *input, *output;
    const char *input_name, *output_name;
};

static struct handles handles(int which) {
    f.ce.dlogits = which == 5 ? &f.dlogits : NULL;
    if (which == 8 || which == 9)
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
    case 9: return (struct handles){&f.x, &f.dx, "x", "dx"};
    default: return (struct handles){&f.x, &f.y, "x", "y"};
    }
}

/* Runs `spoil` on a fresh fixture for every call, and expects a message with the spoilt argument's
 * name and `word`. */
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

void test_spoilt_tensors(void **state) {
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

void test_missing_arguments(void **state) {
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

void test_sizes_of_structs(void **state) {
    (void)state;
    f.act.size = 0;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "rafter_act_args.size", "0");
    f.options.size = 3;
    EXPECT_INVALID(rafter_cross_entropy_forward(f.context, &f.ce), "rafter_loss_options.size", "3");

    /* A size that no struct of any version has: nothing is read that far. */
    f.options.size = sizeof f.options;
    f.act.size = 1000;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "rafter_act_args.size", "1000");

    /* A caller with a newer header: valid while its new fields are zero. */
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

    /* A caller with an older header: missing fields are zero. */
    f.logsumexp.size = offsetof(rafter_logsumexp_args, workspace);
    f.logsumexp.workspace = (void *)1;
    f.logsumexp.workspace_bytes = 1;
    assert_int_equal(rafter_logsumexp_forward(f.context, &f.logsumexp), RAFTER_OK);
    f.lce.size = offsetof(rafter_linear_cross_entropy_args, dentropy);
    f.lce.dentropy = &f.loss; /* behind the end: not looked at */
    assert_int_equal(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_OK);
}

/* The workspace functions of all ops refuse a direction that does not exist. */
void test_bad_direction(void **state) {
    (void)state;
    const rafter_direction bad = (rafter_direction)2;
    size_t bytes = 0;
    f.ce.dlogits = &f.dlogits;
    lrpe_shapes();
    EXPECT_INVALID(rafter_lrpe_cosine_workspace(f.context, &f.lrpe, bad, &bytes), "direction", "2");
    setup(NULL);
    f.ce.dlogits = &f.dlogits;
    EXPECT_INVALID(rafter_act_workspace(f.context, &f.act, bad, &bytes), "direction", "2");
    EXPECT_INVALID(rafter_logsumexp_workspace(f.context, &f.logsumexp, bad, &bytes), "direction", "2");
    EXPECT_INVALID(rafter_cross_entropy_workspace(f.context, &f.ce, bad, &bytes), "direction", "2");
    EXPECT_INVALID(rafter_linear_cross_entropy_workspace(f.context, &f.lce, bad, &bytes), "direction", "2");
    EXPECT_INVALID(rafter_scale_workspace(f.context, &f.scale, bad, &bytes), "direction", "2");
    EXPECT_INVALID(rafter_scale_workspace(f.context, &f.scale, RAFTER_BACKWARD, &bytes), "direction", "1");
}

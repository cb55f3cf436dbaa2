/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes, options and overlaps that single ops refuse. */
#include <string.h>

#include "fixture.h"

void test_act_bad(void **state) {
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
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "x"); /* a mask needs row-major x */
}

void test_logsumexp_bad(void **state) {
    (void)state;
    f.logsumexp.dim = 9;
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "dim", "9");
    f.logsumexp.dim = 1; /* lse is shaped for dim 3 */
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "lse", "shape");
    f.logsumexp.dim = -1;
    f.logsumexp.algorithm = (rafter_logsumexp_algorithm)9;
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "algorithm", "9");
    f.logsumexp.algorithm = RAFTER_LOGSUMEXP_AUTO;
    DLTensor rounded = rafter_tensor(f.small_data[2], RAFTER_BF16, 3, f.shape_lse);
    f.logsumexp.rounded = &rounded;
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "rounded", "bf16"); /* x is fp32 */
    rounded = rafter_tensor(f.small_data[2], RAFTER_F32, 2, f.shape_lse);
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "rounded", "shape");
    int64_t turned[] = {1, B, B * N};
    rounded = f.dlse;
    rounded.strides = turned;
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "rounded", "stride");
    rounded = f.lse;
    EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "rounded", "overlaps");
    rounded = f.dlse;
    assert_int_equal(rafter_logsumexp_forward(f.context, &f.logsumexp), RAFTER_OK);
    assert_memory_equal(f.small_data[2], f.small_data[1], sizeof(float) * B * N * H);
    memset(f.small_data, 0, sizeof f.small_data);
    f.dlse.shape = f.shape_x; /* [2, 3, 2] is a prefix of x's shape: spoil it */
    f.dlse.ndim = 2;
    EXPECT_INVALID(rafter_logsumexp_backward(f.context, &f.logsumexp), "dlse", "shape");
    f.dlse = f.lse;
    f.dx.data = f.x_data + 1;
    EXPECT_INVALID(rafter_logsumexp_backward(f.context, &f.logsumexp), "dx", "overlaps");
}

void test_loss_options_bad(void **state) {
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
}

void test_labels_out_of_range(void **state) {
    (void)state;
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
}

void test_loss_tensors_bad(void **state) {
    (void)state;
    int64_t fewer[] = {ROWS - 1};
    f.target.shape = fewer;
    EXPECT_INVALID(rafter_cross_entropy_forward(f.context, &f.ce), "target", "[5]", "[6]");
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "target", "[5]", "[6]");
    f.target.shape = f.shape_rows;
    f.loss = f.row_loss; /* mean needs one element */
    EXPECT_INVALID(rafter_cross_entropy_forward(f.context, &f.ce), "loss", "shape");
    f.loss = rafter_tensor(f.small_data[3], RAFTER_F32, 0, NULL);

    f.dlogits.data = f.x_data + 2; /* overlaps, but is not in place */
    f.ce.dlogits = &f.dlogits;
    EXPECT_INVALID(rafter_cross_entropy_backward(f.context, &f.ce), "dlogits", "overlaps", "logits");
    f.ce.lse = &f.row_lse;
    f.ce.row_loss = &f.row_lse; /* two outputs in the same memory */
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
    f.lce.dentropy = &f.loss; /* no dimensions, wanted those of target */
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "dentropy", "shape", "[6]");
    DLTensor dentropy = f.row_loss;
    dentropy.dtype = (DLDataType){kDLBfloat, 16, 1};
    f.lce.dentropy = &dentropy;
    EXPECT_INVALID(rafter_linear_cross_entropy_backward(f.context, &f.lce), "dentropy", "bf16", "fp32");
    dentropy = f.row_loss;
    dentropy.data = f.dx_data; /* shares memory with an output */
    EXPECT_INVALID(rafter_linear_cross_entropy_backward(f.context, &f.lce), "dentropy", "dx", "overlaps");
    f.lce.dentropy = NULL;
    f.lce.mode = (rafter_lce_mode)5;
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "mode", "5");
    f.lce.mode = RAFTER_LCE_AUTO;
    f.lce.allow_tf32 = 2;
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "allow_tf32", "2");
    f.lce.allow_tf32 = 0;
    f.lce.reserved2 = 3;
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "reserved2", "3");
    f.lce.reserved2 = 0;
    f.lce.budget = 1;
    expect_failure(rafter_linear_cross_entropy_forward(f.context, &f.lce), RAFTER_WORKSPACE_TOO_SMALL, "budget", "1",
                   (char *)NULL);
}

void test_lrpe_bad(void **state) {
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

void test_scale_bad(void **state) {
    (void)state;
    int64_t two[] = {2};
    DLTensor pair = rafter_tensor(f.small_data[3], RAFTER_F32, 1, two);
    f.scale.factor = &pair;
    EXPECT_INVALID(rafter_scale_forward(f.context, &f.scale), "factor", "2 elements");
    f.scale.factor = &f.loss;
    f.loss.dtype = (DLDataType){kDLBfloat, 16, 1};
    EXPECT_INVALID(rafter_scale_forward(f.context, &f.scale), "factor", "bf16", "fp32");
    f.loss = rafter_tensor(f.y_data + 3, RAFTER_F32, 0, NULL);
    EXPECT_INVALID(rafter_scale_forward(f.context, &f.scale), "y", "overlaps", "factor");
    f.loss = rafter_tensor(f.small_data[3], RAFTER_F32, 0, NULL);
    f.y.data = f.x_data + 1;
    EXPECT_INVALID(rafter_scale_forward(f.context, &f.scale), "y", "overlaps", "x");
    f.y = rafter_tensor(f.y_data, RAFTER_F32, 4, f.shape_y);
    EXPECT_INVALID(rafter_scale_forward(f.context, &f.scale), "y", "shape");
}

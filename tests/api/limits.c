/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes at the stated limit and past it, memory that overlaps, and other hostile but well-formed
 * arguments. Built with UBSan, these tests also check that no size overflows on the way. */
#include <math.h>
#include <string.h>

#include "fixture.h"

static const int64_t MOST = (int64_t)1 << 47; /* elements of a tensor, as the header says */

/* ---- sizes ----------------------------------------------------------------------------------- */

/* A tensor of any shape over one element: all strides are 0. */
static DLTensor repeated(void *element, rafter_dtype dtype, int32_t ndim, int64_t *shape) {
    static int64_t zeros[4];
    DLTensor t = rafter_tensor(element, dtype, ndim, shape);
    t.strides = zeros;
    return t;
}

void test_weight_past_the_limit(void **state) {
    (void)state;
    static int64_t one[] = {1}, shape_x[] = {1, 1}, shape_w[] = {0, 1};
    f.hidden = rafter_tensor(f.x_data, RAFTER_F32, 2, shape_x);
    f.target = rafter_tensor(f.labels, RAFTER_I64, 1, one);
    f.weight = repeated(f.weight_data, RAFTER_F32, 2, shape_w);
    f.lce.dx = f.lce.dweight = NULL;
    size_t bytes = 0;
    for (int bits = 47; bits <= 62; bits++) {
        shape_w[0] = ((int64_t)1 << bits) + (bits == 47);
        EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "weight has shape", "2^47");
        EXPECT_INVALID(rafter_linear_cross_entropy_workspace(f.context, &f.lce, RAFTER_FORWARD, &bytes), "weight",
                       "2^47");
    }
    shape_w[0] = INT64_MAX;
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "weight has shape", "9223372036854775807");
}

/* Each tensor is within the limit, and their product is not. */
void test_logits_past_the_limit(void **state) {
    (void)state;
    static int64_t rows[1], shape_x[] = {0, 1}, shape_w[] = {0, 1};
    f.hidden = repeated(f.x_data, RAFTER_F32, 2, shape_x);
    f.target = repeated(f.labels, RAFTER_I64, 1, rows);
    f.weight = repeated(f.weight_data, RAFTER_F32, 2, shape_w);
    f.lce.dx = f.lce.dweight = NULL;
    rows[0] = shape_x[0] = 1 << 24;
    shape_w[0] = (1 << 23) + 1;
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "x has 16777216 rows", "8388609", "2^47");
    rows[0] = shape_x[0] = shape_w[0] = MOST;
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "2^47 logits");
}

void test_logsumexp_past_the_limit(void **state) {
    (void)state;
    static int64_t shape[1];
    f.x = repeated(f.x_data, RAFTER_F32, 1, shape);
    f.lse = rafter_tensor(f.small_data[1], RAFTER_F32, 0, NULL);
    size_t bytes = 0;
    const int64_t sizes[] = {MOST + 1, (int64_t)1 << 62, ((int64_t)1 << 62) + 1, INT64_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        shape[0] = sizes[i];
        EXPECT_INVALID(rafter_logsumexp_forward(f.context, &f.logsumexp), "x has shape", "2^47");
        EXPECT_INVALID(rafter_logsumexp_workspace(f.context, &f.logsumexp, RAFTER_FORWARD, &bytes), "x", "2^47");
    }
}

/* The sizes beside a 0 are bounded too, and so is where the last element lies. */
void test_other_sizes_past_the_limit(void **state) {
    (void)state;
    static int64_t empty[] = {0, (int64_t)1 << 48}, two[] = {2}, far_apart[] = {(int64_t)1 << 47};
    f.x = rafter_tensor(NULL, RAFTER_F32, 2, empty);
    f.y = rafter_tensor(NULL, RAFTER_F32, 2, empty);
    f.act.kind = RAFTER_ACT_RELU;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "x has shape [0, 281474976710656]", "2^47");
    f.x = rafter_tensor(f.x_data, RAFTER_F32, 1, two);
    f.x.strides = far_apart;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "x has stride", "2^47");
    f.x.strides = NULL;
    f.x.byte_offset = UINT64_MAX - 8;
    EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "x.byte_offset", "address space");
}

/* At the limit every workspace function answers, with a size that does not wrap. Outputs are given
 * where they cost workspace; a lone output of 2^47 elements has no two indices at one address. */
void test_workspace_at_the_limit(void **state) {
    (void)state;
    static int64_t flat[] = {(int64_t)1 << 47}, one[] = {1}, shape_w[] = {(int64_t)1 << 47, 1}, shape_x[] = {1, 1};
    static int64_t shape_rows[] = {(int64_t)1 << 47, 1}, grid[] = {1, (int64_t)1 << 46, 1, 1},
                   grid_y[] = {1, (int64_t)1 << 46, 1, 2}, shape_theta[] = {1, 1};
    size_t bytes = 0;
    f.x = repeated(f.x_data, RAFTER_F32, 1, flat);
    f.lse = rafter_tensor(f.small_data[1], RAFTER_F32, 0, NULL);
    for (int algorithm = 0; algorithm < 3; algorithm++) {
        f.logsumexp.algorithm = (rafter_logsumexp_algorithm)algorithm;
        assert_int_equal(rafter_logsumexp_workspace(f.context, &f.logsumexp, RAFTER_FORWARD, &bytes), RAFTER_OK);
        assert_true(bytes < (size_t)1 << 60);
    }
    DLTensor out = rafter_tensor((void *)(uintptr_t)((uint64_t)1 << 60), RAFTER_F32, 1, flat); /* never written */
    f.act.y = &out;
    assert_int_equal(rafter_act_workspace(f.context, &f.act, RAFTER_FORWARD, &bytes), RAFTER_OK);
    assert_true(bytes < (size_t)1 << 60);

    f.hidden = rafter_tensor(f.x_data, RAFTER_F32, 2, shape_x);
    f.target = rafter_tensor(f.labels, RAFTER_I64, 1, one);
    f.weight = repeated(f.weight_data, RAFTER_F32, 2, shape_w);
    DLTensor dweight = rafter_tensor(out.data, RAFTER_F32, 2, shape_w);
    f.dhidden = rafter_tensor(f.dx_data, RAFTER_F32, 2, shape_x);
    f.lce.dweight = &dweight;
    for (int transposed = 0; transposed < 2; transposed++) {
        for (int mode = 0; mode < 3; mode++) {
            f.lce.mode = (rafter_lce_mode)mode;
            assert_int_equal(rafter_linear_cross_entropy_workspace(f.context, &f.lce, RAFTER_FORWARD, &bytes),
                             RAFTER_OK);
            assert_true(bytes < (size_t)1 << 60);
        }
        /* Now the rows are many and the classes few. */
        f.hidden = repeated(f.x_data, RAFTER_F32, 2, shape_rows);
        f.target = repeated(f.labels, RAFTER_I64, 1, flat);
        f.weight = rafter_tensor(f.weight_data, RAFTER_F32, 2, shape_x);
        f.lce.dx = NULL;
        dweight = rafter_tensor(f.y_data, RAFTER_F32, 2, shape_x);
    }

    f.x = repeated(f.x_data, RAFTER_F32, 4, grid);
    f.theta = rafter_tensor(f.theta_data, RAFTER_F32, 2, shape_theta);
    f.dy = repeated(f.dy_data, RAFTER_F32, 4, grid_y);
    f.dtheta = rafter_tensor(f.small_data[0], RAFTER_F32, 2, shape_theta);
    f.lrpe.dy = &f.dy, f.lrpe.dtheta = &f.dtheta, f.lrpe.act = RAFTER_ACT_SOFTMAX;
    f.lrpe.softmax_over = RAFTER_OVER_SEQUENCE;
    assert_int_equal(rafter_lrpe_cosine_workspace(f.context, &f.lrpe, RAFTER_BACKWARD, &bytes), RAFTER_OK);
    assert_true(bytes < (size_t)1 << 60);

    f.logits = repeated(f.x_data, RAFTER_F32, 2, shape_rows);
    f.target = repeated(f.labels, RAFTER_I64, 1, flat);
    f.ce.lse = NULL;
    assert_int_equal(rafter_cross_entropy_workspace(f.context, &f.ce, RAFTER_FORWARD, &bytes), RAFTER_OK);
    assert_true(bytes < (size_t)1 << 60);
}

/* ---- overlaps -------------------------------------------------------------------------------- */

/* Expects that a workspace over `tensor` is refused, whether it begins inside it or before it. */
#define EXPECT_OVERLAP(call, args, tensor, name)                                                                       \
    do {                                                                                                               \
        (args).workspace = (char *)(tensor).data + 3;                                                                  \
        (args).workspace_bytes = 1;                                                                                    \
        EXPECT_INVALID(call(f.context, &(args)), "workspace (", "overlaps", name);                                     \
        (args).workspace = (char *)(tensor).data - 8;                                                                  \
        (args).workspace_bytes = 9;                                                                                    \
        EXPECT_INVALID(call(f.context, &(args)), "workspace (", "overlaps " name " (");                                \
        (args).workspace = NULL;                                                                                       \
    } while (0)

void test_workspace_over_a_tensor(void **state) {
    (void)state;
    EXPECT_OVERLAP(rafter_linear_cross_entropy_forward, f.lce, f.target, "target");
    EXPECT_OVERLAP(rafter_linear_cross_entropy_forward, f.lce, f.dweight, "dweight");
    EXPECT_OVERLAP(rafter_linear_cross_entropy_backward, f.lce, f.hidden, "x");
    EXPECT_OVERLAP(rafter_cross_entropy_forward, f.ce, f.row_lse, "lse");
    EXPECT_OVERLAP(rafter_logsumexp_forward, f.logsumexp, f.lse, "lse");
    EXPECT_OVERLAP(rafter_logsumexp_backward, f.logsumexp, f.dx, "dx");
    EXPECT_OVERLAP(rafter_act_forward, f.act, f.x, "x");
    EXPECT_OVERLAP(rafter_act_backward, f.act, f.dy, "dy");
    EXPECT_OVERLAP(rafter_scale_forward, f.scale, f.loss, "factor");
    lrpe_shapes();
    EXPECT_OVERLAP(rafter_lrpe_cosine_forward, f.lrpe, f.theta, "theta");
    EXPECT_OVERLAP(rafter_lrpe_cosine_backward, f.lrpe, f.dx, "dx");

    /* Tensors of earlier calls are forgotten. */
    char own[64];
    f.scale.workspace = own;
    f.scale.workspace_bytes = sizeof own;
    f.y.shape = f.shape_x;
    assert_int_equal(rafter_scale_forward(f.context, &f.scale), RAFTER_OK);
    f.scale.workspace = f.theta_data;
    assert_int_equal(rafter_scale_forward(f.context, &f.scale), RAFTER_OK);
}

void test_saved_over_a_tensor(void **state) {
    (void)state;
    static _Alignas(16) char memory[1 << 12];
    f.lce.dx = f.lce.dweight = NULL;
    f.weight.data = memory + sizeof memory - sizeof(float) * V * D;
    f.lce.saved = memory;
    f.lce.saved_bytes = sizeof memory;
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "saved (", "overlaps weight");
    f.weight.data = f.weight_data; /* separate: refused for another reason */
    EXPECT_INVALID(rafter_linear_cross_entropy_forward(f.context, &f.lce), "saved", "CPU");
}

/* ---- other arguments ------------------------------------------------------------------------- */

void test_unknown_dtype(void **state) {
    (void)state;
    const int bad[] = {-1, 6, 1 << 30};
    for (int i = 0; i < 3; i++) {
        f.x = rafter_tensor(f.x_data, (rafter_dtype)bad[i], 4, f.shape_x);
        EXPECT_INVALID(rafter_act_forward(f.context, &f.act), "x has dtype", "wanted fp32 or bf16 or fp16");
    }
}

/* The mask of no elements has no bytes, whatever the other sizes are. */
void test_mask_of_an_empty_tensor(void **state) {
    (void)state;
    static int64_t empty[] = {0, 5}, none[] = {0};
    f.x = f.y = f.dy = f.dx = rafter_tensor(NULL, RAFTER_F32, 2, empty);
    DLTensor mask = rafter_tensor(NULL, RAFTER_U8, 1, none);
    f.act.kind = RAFTER_ACT_RELU;
    f.act.relu_mask = &mask;
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);
    assert_int_equal(rafter_act_backward(f.context, &f.act), RAFTER_OK);
}

/* ---- strides --------------------------------------------------------------------------------- */

/* Logits that are expanded along the classes: every class has probability 1 / V. Long rows of this kind are
 * transposed in blocks. */
void test_expanded_classes(void **state) {
    (void)state;
    enum { MANY = 4000 };
    static float dlogits[ROWS * MANY];
    const int64_t sizes[] = {V, MANY};
    int64_t expanded[] = {1, 0};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int option = 0; option < 2; option++) {
            const int64_t classes = sizes[i];
            int64_t shape[] = {ROWS, classes};
            f.logits = rafter_tensor(f.x_data, RAFTER_F32, 2, shape);
            f.logits.strides = expanded;
            f.dlogits = rafter_tensor(dlogits, RAFTER_F32, 2, shape);
            f.options.logit_scale = option ? 0.5f : 0;
            f.ce.dlogits = &f.dlogits;
            f.ce.lse = NULL;
            assert_int_equal(rafter_cross_entropy_backward(f.context, &f.ce), RAFTER_OK);
            const float scale = (option ? 0.5f : 1) / ROWS;
            for (int64_t k = 0; k < ROWS * classes; k++) {
                const float label = k % classes == f.labels[k / classes] ? 1 : 0;
                assert_true(fabsf(dlogits[k] - scale * (1.0f / (float)classes - label)) < 1e-5f);
            }
        }
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Bad arguments get the same status and message as on the CPU. */
#include <string.h>

#include "parts.h"

/* A valid call of every op. Bad calls are refused before any data is read, so host memory can pass
 * as device memory, and the messages must be equal, including addresses. */
enum { B = 2, N = 3, H = 2, D = 8, V = 11 };

static struct calls {
    float x[B * N * H * D], y[2 * B * N * H * D], dx[B * N * H * D], theta[H * D], rows[4][B * N * H], loss[1];
    int64_t labels[B * N], shape_x[4], shape_y[4], shape_theta[2], shape_lse[3], shape_logits[2], shape_rows[1];
    DLTensor x_t, y_t, dx_t, wide_t, theta_t, lse_t, logits_t, dlogits_t, target_t, loss_t;
    rafter_loss_options options;
    rafter_act_args act;
    rafter_logsumexp_args logsumexp;
    rafter_cross_entropy_args cross_entropy;
    rafter_lrpe_cosine_args lrpe;
} c;

static void reset_calls(DLDevice device) {
    memset(&c, 0, sizeof c);
    memcpy(c.shape_x, (int64_t[]){B, N, H, D}, sizeof c.shape_x);
    memcpy(c.shape_y, (int64_t[]){B, N, H, 2 * D}, sizeof c.shape_y);
    memcpy(c.shape_theta, (int64_t[]){H, D}, sizeof c.shape_theta);
    memcpy(c.shape_lse, (int64_t[]){B, N, H}, sizeof c.shape_lse);
    memcpy(c.shape_logits, (int64_t[]){B * N, V}, sizeof c.shape_logits);
    c.shape_rows[0] = B * N;
    c.x_t = rafter_tensor(c.x, RAFTER_F32, 4, c.shape_x);
    c.y_t = rafter_tensor(c.y, RAFTER_F32, 4, c.shape_x);
    c.dx_t = rafter_tensor(c.dx, RAFTER_F32, 4, c.shape_x);
    c.wide_t = rafter_tensor(c.y, RAFTER_F32, 4, c.shape_y);
    c.theta_t = rafter_tensor(c.theta, RAFTER_F32, 2, c.shape_theta);
    c.lse_t = rafter_tensor(c.rows[0], RAFTER_F32, 3, c.shape_lse);
    c.logits_t = rafter_tensor(c.x, RAFTER_F32, 2, c.shape_logits);
    c.dlogits_t = rafter_tensor(c.dx, RAFTER_F32, 2, c.shape_logits);
    c.target_t = rafter_tensor(c.labels, RAFTER_I64, 1, c.shape_rows);
    c.loss_t = rafter_tensor(c.loss, RAFTER_F32, 0, NULL);
    DLTensor *const all[] = {&c.x_t,   &c.y_t,      &c.dx_t,      &c.wide_t,   &c.theta_t,
                             &c.lse_t, &c.logits_t, &c.dlogits_t, &c.target_t, &c.loss_t};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        all[i]->device = device;
    c.options = (rafter_loss_options){.size = sizeof c.options};
    c.act = (rafter_act_args){.size = sizeof c.act, .kind = RAFTER_ACT_SILU, .x = &c.x_t, .y = &c.y_t};
    c.logsumexp = (rafter_logsumexp_args){.size = sizeof c.logsumexp, .dim = -1, .x = &c.x_t, .lse = &c.lse_t};
    c.cross_entropy = (rafter_cross_entropy_args){.size = sizeof c.cross_entropy,
                                                  .options = &c.options,
                                                  .logits = &c.logits_t,
                                                  .target = &c.target_t,
                                                  .loss = &c.loss_t,
                                                  .dlogits = &c.dlogits_t};
    c.lrpe = (rafter_lrpe_cosine_args){.size = sizeof c.lrpe, .x = &c.x_t, .theta = &c.theta_t, .y = &c.wide_t};
}

static rafter_status call_act(rafter_context *context) {
    return rafter_act_forward(context, &c.act);
}
static rafter_status call_act_backward(rafter_context *context) {
    return rafter_act_backward(context, &c.act);
}
static rafter_status call_logsumexp(rafter_context *context) {
    return rafter_logsumexp_forward(context, &c.logsumexp);
}
static rafter_status call_cross_entropy(rafter_context *context) {
    return rafter_cross_entropy_forward(context, &c.cross_entropy);
}
static rafter_status call_lrpe(rafter_context *context) {
    return rafter_lrpe_cosine_forward(context, &c.lrpe);
}
static rafter_status ask_act(rafter_context *context) {
    return rafter_act_workspace(context, &c.act, RAFTER_FORWARD, NULL);
}

#define SPOIL(name, statement)                                                                                         \
    static void name(void) {                                                                                           \
        statement;                                                                                                     \
    }
SPOIL(act_no_x, c.act.x = NULL)
SPOIL(act_no_y, c.act.y = NULL)
SPOIL(act_no_data, c.x_t.data = NULL)
SPOIL(act_bad_kind, *(int *)&c.act.kind = 99)
SPOIL(act_small_size, c.act.size = 4)
SPOIL(act_bad_dim, (c.act.kind = RAFTER_ACT_SOFTMAX, c.act.dim = 4))
SPOIL(act_wrong_dtype, c.y_t.dtype.bits = 16)
SPOIL(act_wrong_shape, c.y_t.ndim = 3)
SPOIL(act_overlap, (c.y_t.data = c.x + 1))
SPOIL(act_workspace_over_y, (c.act.workspace = c.y, c.act.workspace_bytes = 1))
SPOIL(act_too_large, c.shape_x[0] = (int64_t)1 << 47)
SPOIL(act_mask, c.act.relu_mask = &c.y_t)
SPOIL(act_backward_no_dy, c.act.dx = &c.dx_t)
SPOIL(nothing, (void)0)
SPOIL(lse_bad_algorithm, *(int *)&c.logsumexp.algorithm = 7)
SPOIL(lse_wrong_shape, c.lse_t.ndim = 2)
SPOIL(lse_negative_size, (c.shape_lse[0] = -1))
SPOIL(ce_no_target, c.cross_entropy.target = NULL)
SPOIL(ce_float_target, c.target_t.dtype.code = kDLFloat)
SPOIL(ce_bad_smoothing, c.options.label_smoothing = 2.0f)
SPOIL(ce_wrong_loss, c.loss_t = c.lse_t)
SPOIL(ce_overlap, c.dlogits_t.data = c.x + 1)
SPOIL(ce_unaligned_size, c.cross_entropy.size = 3)
SPOIL(lrpe_no_theta, c.lrpe.theta = NULL)
SPOIL(lrpe_narrow_y, c.wide_t.shape = c.shape_x)
SPOIL(lrpe_bad_act, *(int *)&c.lrpe.act = -1)
SPOIL(lrpe_bad_positions, c.lrpe.positions = &c.target_t)

static const struct bad_call {
    void (*spoil)(void);
    rafter_status (*call)(rafter_context *context);
} bad_calls[] = {
    {act_no_x, call_act},
    {act_no_y, call_act},
    {act_no_data, call_act},
    {act_bad_kind, call_act},
    {act_small_size, call_act},
    {act_bad_dim, call_act},
    {act_wrong_dtype, call_act},
    {act_wrong_shape, call_act},
    {act_overlap, call_act},
    {act_workspace_over_y, call_act},
    {act_too_large, call_act},
    {act_mask, call_act},
    {act_backward_no_dy, call_act_backward},
    {nothing, ask_act},
    {lse_bad_algorithm, call_logsumexp},
    {lse_wrong_shape, call_logsumexp},
    {lse_negative_size, call_logsumexp},
    {ce_no_target, call_cross_entropy},
    {ce_float_target, call_cross_entropy},
    {ce_bad_smoothing, call_cross_entropy},
    {ce_wrong_loss, call_cross_entropy},
    {ce_overlap, call_cross_entropy},
    {ce_unaligned_size, call_cross_entropy},
    {lrpe_no_theta, call_lrpe},
    {lrpe_narrow_y, call_lrpe},
    {lrpe_bad_act, call_lrpe},
    {lrpe_bad_positions, call_lrpe},
};

static void test_bad_calls(rafter_context *here, rafter_context *there) {
    for (size_t i = 0; i < sizeof bad_calls / sizeof *bad_calls; i++) {
        reset_calls(context_device(here));
        bad_calls[i].spoil();
        const rafter_status on_cpu = bad_calls[i].call(here);
        reset_calls(context_device(there));
        bad_calls[i].spoil();
        const rafter_status on_gpu = bad_calls[i].call(there);
        expect(on_cpu != RAFTER_OK, "bad call %zu passes", i);
        expect(on_gpu == on_cpu && strcmp(rafter_last_error(here), rafter_last_error(there)) == 0,
               "bad call %zu: CPU '%s', CUDA '%s'", i, rafter_last_error(here), rafter_last_error(there));
    }
}

static void refused(rafter_status status, rafter_context *context, const char *words) {
    expect(status == RAFTER_INVALID_ARGUMENT && strstr(rafter_last_error(context), words), "wanted '%s', got %s: '%s'",
           words, rafter_status_name(status), rafter_last_error(context));
}

/* All tensors, or one of them, on another device than the context's. */
static void test_wrong_devices(rafter_context *here, rafter_context *there) {
    const DLDevice host = {kDLCPU, 0}, gpu = {kDLCUDA, 0};
    reset_calls(host);
    refused(call_act(there), there, "x is on device type 1, wanted the context's, 2");
    refused(call_logsumexp(there), there, "x is on device type 1, wanted the context's, 2");
    refused(call_cross_entropy(there), there, "logits is on device type 1, wanted the context's, 2");
    refused(call_lrpe(there), there, "x is on device type 1, wanted the context's, 2");
    reset_calls(gpu);
    refused(call_act(here), here, "x is on device type 2, wanted the context's, 1");
    c.y_t.device = host;
    refused(call_act(there), there, "y is on device type 1, wanted the context's, 2");
    c.target_t.device = host;
    refused(call_cross_entropy(there), there, "target is on device type 1, wanted the context's, 2");
    c.theta_t.device = host;
    refused(call_lrpe(there), there, "theta is on device type 1, wanted the context's, 2");
    c.x_t.device.device_id = 5;
    refused(call_logsumexp(there), there, "x is on device 5, wanted the context's, 0");

    reset_calls(gpu);
    c.y_t.byte_offset = 2; /* valid on the CPU; a GPU would fault */
    refused(call_act(there), there, "y begins at ");

    rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 1000}};
    rafter_context *none = NULL;
    expect(rafter_context_create(&none, &options) == RAFTER_UNSUPPORTED && !none &&
               strstr(rafter_last_error(NULL), "device_id is 1000"),
           "a context on GPU 1000: '%s'", rafter_last_error(NULL));
}

/* Tensors without elements may have no data. */
static void test_empty(rafter_context *there) {
    reset_calls(context_device(there));
    c.shape_x[0] = c.shape_y[0] = c.shape_lse[0] = c.shape_rows[0] = c.shape_logits[0] = 0;
    c.x_t.data = c.y_t.data = c.wide_t.data = c.lse_t.data = c.logits_t.data = c.dlogits_t.data = c.target_t.data =
        NULL;
    c.cross_entropy.loss = NULL;
    expect(call_act(there) == RAFTER_OK, "act of nothing: %s", rafter_last_error(there));
    expect(call_logsumexp(there) == RAFTER_OK, "logsumexp of nothing: %s", rafter_last_error(there));
    expect(call_cross_entropy(there) == RAFTER_OK, "cross_entropy of nothing: %s", rafter_last_error(there));
    expect(call_lrpe(there) == RAFTER_OK, "lrpe_cosine of nothing: %s", rafter_last_error(there));
    expect(gpu_synchronize(there), "the device failed");
}

void test_arguments(void) {
    rafter_context *here = NULL, *there = open_context();
    if (rafter_context_create(&here, NULL) == RAFTER_OK) {
        test_bad_calls(here, there);
        test_wrong_devices(here, there);
        test_empty(there);
        int32_t found = -1;
        expect(rafter_bad_labels(here, &found) == RAFTER_OK && found == 0, "a CPU context has bad labels");
    }
    rafter_context_destroy(here);
    close_context(there);
}

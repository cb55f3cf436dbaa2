/* SPDX-License-Identifier: Apache-2.0 */
/* One function per kind of call: adds its tensors, calls. */
#include "batch.h"

#include <stdlib.h>
#include <string.h>

#include "harness/context.h"
#include "harness/gpu.h"

static const DLTensor *add_row(struct scene *s, enum role role, rafter_dtype dtype, double size) {
    return add(s, role, dtype, size, 0, 1, &s->setting->length);
}

/* ---- act, logsumexp, lrpe_cosine -------------------------------------------------------------- */

static rafter_status softmax_forward(struct scene *s) {
    const rafter_act_args a = {.size = sizeof a,
                               .kind = RAFTER_ACT_SOFTMAX,
                               .dim = 1,
                               .x = add_row(s, INPUT, s->setting->dtype, 3.0),
                               .y = add_row(s, OUTPUT, s->setting->dtype, 0.0)};
    return s->failed ? RAFTER_OUT_OF_MEMORY : rafter_act_forward(s->context, &a);
}

static rafter_status softmax_backward(struct scene *s) {
    const rafter_act_args a = {.size = sizeof a,
                               .kind = RAFTER_ACT_SOFTMAX,
                               .dim = 1,
                               .y = add_row(s, INPUT, s->setting->dtype, 0.1),
                               .dy = add_row(s, INPUT, s->setting->dtype, 1.0),
                               .dx = add_row(s, OUTPUT, s->setting->dtype, 0.0)};
    return s->failed ? RAFTER_OUT_OF_MEMORY : rafter_act_backward(s->context, &a);
}

static rafter_status silu(struct scene *s) {
    const rafter_dtype dtype = s->setting->dtype;
    rafter_act_args a = {.size = sizeof a, .kind = RAFTER_ACT_SILU, .x = add_row(s, INPUT, dtype, 3.0)};
    if (s->setting->options == 0) {
        a.y = add_row(s, OUTPUT, dtype, 0.0);
        return s->failed ? RAFTER_OUT_OF_MEMORY : rafter_act_forward(s->context, &a);
    }
    a.dy = add_row(s, INPUT, dtype, 1.0);
    a.dx = add_row(s, OUTPUT, dtype, 0.0);
    return s->failed ? RAFTER_OUT_OF_MEMORY : rafter_act_backward(s->context, &a);
}

static rafter_status logsumexp(struct scene *s) {
    rafter_logsumexp_args a = {.size = sizeof a, .dim = 1, .x = add_row(s, INPUT, s->setting->dtype, 3.0)};
    if (s->setting->options == 0) {
        a.lse = add_numbers(s, OUTPUT, RAFTER_F32, 0.0);
        return s->failed ? RAFTER_OUT_OF_MEMORY : rafter_logsumexp_forward(s->context, &a);
    }
    a.lse = add_numbers(s, INPUT, RAFTER_F32, 5.0);
    a.dlse = add_numbers(s, INPUT, RAFTER_F32, 1.0);
    a.dx = add_row(s, OUTPUT, s->setting->dtype, 0.0);
    return s->failed ? RAFTER_OUT_OF_MEMORY : rafter_logsumexp_backward(s->context, &a);
}

/* A row is a sequence of `length` tokens, 2 heads and `depth` features. options: act, softmax over the
 * sequence; then backward. */
static rafter_status lrpe_cosine(struct scene *s) {
    const struct setting *const g = s->setting;
    const int64_t x[] = {g->length, 2, g->depth}, y[] = {g->length, 2, 2 * g->depth}, theta[] = {2, g->depth};
    const int which = g->options / 2;
    rafter_lrpe_cosine_args a = {.size = sizeof a,
                                 .act = which == 0 ? RAFTER_ACT_SILU : RAFTER_ACT_SOFTMAX,
                                 .softmax_over = which == 2 ? RAFTER_OVER_SEQUENCE : RAFTER_OVER_FEATURE,
                                 .offset = 7,
                                 .x = add(s, INPUT, g->dtype, 1.0, 0, 3, x),
                                 .theta = add(s, SHARED, RAFTER_F32, 0.1, 0, 2, theta)};
    if (g->options % 2 == 0) {
        a.y = add(s, OUTPUT, g->dtype, 0.0, 0, 3, y);
        return s->failed ? RAFTER_OUT_OF_MEMORY : rafter_lrpe_cosine_forward(s->context, &a);
    }
    a.dy = add(s, INPUT, g->dtype, 1.0, 0, 3, y);
    a.dx = add(s, OUTPUT, g->dtype, 0.0, 0, 3, x);
    return s->failed ? RAFTER_OUT_OF_MEMORY : rafter_lrpe_cosine_backward(s->context, &a);
}

/* ---- losses ----------------------------------------------------------------------------------- */

/* Options 1: label smoothing; 2: everything; 3: a softcap alone. The softcap is amid the logits, because
 * kernels cap small and large ones by different formulas. */
static rafter_loss_options options_of(struct scene *s, int which, rafter_reduction reduction) {
    rafter_loss_options o = {.size = sizeof o, .reduction = reduction};
    o.label_smoothing = which == 1 || which == 2 ? 0.1f : 0.0f;
    o.softcap = which >= 2 ? 2.0f : 0.0f;
    if (which == 2) {
        o.z_loss = 1e-3f;
        o.logit_scale = 1.5f;
        o.class_weight = add(s, SHARED, RAFTER_F32, 1.0, 0, 1, &s->setting->length);
    }
    if (which == 1 || which == 2)
        o.row_weight = add_numbers(s, INPUT, RAFTER_F32, 1.0);
    return o;
}

static const DLTensor *add_labels(struct scene *s) {
    return add(s, INPUT, RAFTER_I64, 0.0, s->setting->length, 0, NULL);
}

/* options: of the loss, and 4 times: 0 results of forward; 1 forward with the gradient; 2 backward
 * from lse; 3 backward without. */
static rafter_status cross_entropy(struct scene *s) {
    const int which = s->setting->options % 4, what = s->setting->options / 4;
    const rafter_dtype dtype = s->setting->dtype;
    const rafter_loss_options o = options_of(s, which, what == 0 ? RAFTER_NONE : RAFTER_SUM);
    rafter_cross_entropy_args a = {
        .size = sizeof a, .options = &o, .logits = add_row(s, INPUT, dtype, 3.0), .target = add_labels(s)};
    if (what == 0) {
        a.loss = add_numbers(s, OUTPUT, RAFTER_F32, 0.0);
        a.lse = add_numbers(s, OUTPUT, RAFTER_F32, 0.0);
    }
    if (what == 0 && which == 2) {
        a.logprob = add_numbers(s, OUTPUT, RAFTER_F32, 0.0);
        a.entropy = add_numbers(s, OUTPUT, RAFTER_F32, 0.0);
        a.argmax = add(s, OUTPUT, RAFTER_I64, 0.0, 0, 0, NULL);
    }
    if (what == 1)
        a.row_loss = add_numbers(s, OUTPUT, RAFTER_F32, 0.0);
    if (what == 2)
        a.lse = add_numbers(s, INPUT, RAFTER_F32, 9.0);
    if (what > 0)
        a.dlogits = add_row(s, OUTPUT, dtype, 0.0);
    if (s->failed)
        return RAFTER_OUT_OF_MEMORY;
    return what < 2 ? rafter_cross_entropy_forward(s->context, &a) : rafter_cross_entropy_backward(s->context, &a);
}

/* options: of the loss, and 3 times: 0 results of forward; 1 forward with gradients; 2 the same,
 * compact; 3 backward from lse, with a gradient of every row; 4 the same, and one of its entropy; 5
 * forward that saves, if it can, and backward. */
static rafter_status linear_cross_entropy(struct scene *s) {
    const int which = s->setting->options % 3, what = s->setting->options / 3;
    const rafter_dtype dtype = s->setting->dtype;
    enum { SAVES = 5 };
    const bool own_gradients = what >= 3;
    const int64_t weight[] = {s->setting->length, s->setting->depth};
    const rafter_loss_options o = options_of(s, which, what == 0 || own_gradients ? RAFTER_NONE : RAFTER_SUM);
    rafter_linear_cross_entropy_args a = {.size = sizeof a,
                                          .options = &o,
                                          .mode = what == 2 ? RAFTER_LCE_COMPACT : RAFTER_LCE_AUTO,
                                          .x = add(s, INPUT, dtype, 1.0, 0, 1, &s->setting->depth),
                                          .weight = add(s, SHARED, dtype, 0.2, 0, 2, weight),
                                          .target = add_labels(s)};
    if (which > 0)
        a.bias = add(s, SHARED, dtype, 1.0, 0, 1, &s->setting->length);
    if (what == 3 || what == 4)
        a.lse = add_numbers(s, INPUT, RAFTER_F32, 9.0);
    else
        a.row_loss = add_numbers(s, OUTPUT, RAFTER_F32, 0.0);
    if (what == 0) {
        a.lse = add_numbers(s, OUTPUT, RAFTER_F32, 0.0);
        a.logprob = add_numbers(s, OUTPUT, RAFTER_F32, 0.0);
    }
    if (what == 0 && which == 2) {
        a.entropy = add_numbers(s, OUTPUT, RAFTER_F32, 0.0);
        a.argmax = add(s, OUTPUT, RAFTER_I64, 0.0, 0, 0, NULL);
    }
    const DLTensor *const dx = what > 0 ? add(s, OUTPUT, dtype, 0.0, 0, 1, &s->setting->depth) : NULL;
    if (what < SAVES)
        a.dx = dx;
    if (what > 0 && what < SAVES && which == 1) /* not compared: it is a sum over rows */
        a.dweight = add(s, SHARED, dtype, 0.0, 0, 2, weight);
    if (own_gradients)
        a.dloss = add_numbers(s, INPUT, RAFTER_F32, 1.0);
    if (what == 4) {
        a.entropy = add_numbers(s, INPUT, RAFTER_F32, 3.0);
        a.dentropy = add_numbers(s, INPUT, RAFTER_F32, 1.0);
    }
    if (s->failed)
        return RAFTER_OUT_OF_MEMORY;
    if (what < SAVES)
        return what >= 3 ? rafter_linear_cross_entropy_backward(s->context, &a)
                         : rafter_linear_cross_entropy_forward(s->context, &a);
    rafter_status status = rafter_linear_cross_entropy_saved(s->context, &a, &a.saved_bytes);
    if (status != RAFTER_OK)
        return status;
    if (a.saved_bytes > 0 && !(a.saved = gpu_allocate(a.saved_bytes)))
        return RAFTER_OUT_OF_MEMORY;
    status = rafter_linear_cross_entropy_forward(s->context, &a);
    a.dx = dx;
    if (status == RAFTER_OK)
        status = rafter_linear_cross_entropy_backward(s->context, &a);
    if (!a.saved)
        return status;
    gpu_synchronize(s->context);
    gpu_release(a.saved);
    return status;
}

const struct call calls[] = {
    {"act softmax forward", softmax_forward, 1, ANY_LENGTH},
    {"act softmax backward", softmax_backward, 1, ANY_LENGTH},
    {"act silu", silu, 2, ANY_LENGTH},
    {"logsumexp", logsumexp, 2, ANY_LENGTH},
    {"cross_entropy", cross_entropy, 16, ANY_LENGTH},
    {"lrpe_cosine", lrpe_cosine, 6, SEQUENCES},
    {"linear_cross_entropy", linear_cross_entropy, 18, WITH_DEPTH},
};
const int calls_count = sizeof calls / sizeof *calls;

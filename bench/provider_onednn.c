/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oneDNN, for the ops it has: eltwise, softmax, and for linear_cross_entropy its matmul and
 * softmax; the few elements at the labels are computed here. A session is a list of steps. It runs
 * in a child process, whose exit frees everything, so nothing is destroyed explicitly.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <omp.h>

#include "onednn_api.h"
#include "provider.h"

enum { STEPS = 8, ARGS = 3 };

struct step {
    dnnl_primitive_t primitive; /* or, where NULL, the function */
    dnnl_exec_arg_t arg[ARGS];
    void (*function)(struct session *s);
};

struct onednn {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    int steps;
    struct step step[STEPS];
    size_t scratch;
    bool failed; /* a call failed; the session's reason says which */

    /* linear_cross_entropy */
    int64_t rows, features, classes;
    rafter_dtype dtype;
    void *logits;
    float *label_logit;
};

static bool good(struct session *s, dnnl_status_t status, const char *what) {
    struct onednn *o = s->state;
    if (status == dnnl_success)
        return true;
    o->failed = true;
    if (status == dnnl_unimplemented)
        return session_fail(s, "this version has no %s for these tensors", what);
    return session_fail(s, "%s failed with status %d", what, (int)status);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static dnnl_data_type_t data_type(rafter_dtype dtype) {
    return dtype == RAFTER_F32 ? dnnl_f32 : dtype == RAFTER_BF16 ? dnnl_bf16 : dnnl_f16;
}

static onednn_layout layout_of(struct session *s, const problem_tensor *t) {
    onednn_layout layout;
    dnnl_dims_t shape = {0}, stride = {0};
    for (int d = 0; d < t->ndim; d++) {
        shape[d] = t->shape[d];
        stride[d] = t->stride[d];
    }
    good(s, onednn_layout_create(&layout, t->ndim, shape, data_type(t->dtype), stride), "layout");
    return layout;
}

static onednn_layout matrix(struct session *s, rafter_dtype dtype, int64_t rows, int64_t columns, int64_t row_stride,
                            int64_t column_stride) {
    onednn_layout layout;
    const dnnl_dims_t shape = {rows, columns}, stride = {row_stride, column_stride};
    good(s, onednn_layout_create(&layout, 2, shape, data_type(dtype), stride), "layout");
    return layout;
}

static dnnl_memory_t memory(struct session *s, onednn_layout layout, void *data) {
    struct onednn *o = s->state;
    dnnl_memory_t result = NULL;
    good(s, dnnl_memory_create(&result, ONEDNN_LAYOUT(layout), o->engine, data), "memory");
    return result;
}

static dnnl_memory_t memory_of(struct session *s, const char *name) {
    const problem_tensor *t = problem_find(&s->problem, name);
    return memory(s, layout_of(s, t), t->tensor.data);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Adds a step that runs the plan, if the plan could be made. */
static void add_primitive(struct session *s, dnnl_status_t status, dnnl_primitive_desc_t plan, const char *what,
                          const dnnl_exec_arg_t arg[ARGS]) {
    struct onednn *o = s->state;
    if (o->failed || !good(s, status, what))
        return;
    struct step *step = &o->step[o->steps++];
    memcpy(step->arg, arg, sizeof step->arg);
    good(s, dnnl_primitive_create(&step->primitive, plan), what);
    int64_t bytes = 0;
    if (dnnl_primitive_desc_query(plan, dnnl_query_memory_consumption_s64, 0, &bytes) == dnnl_success)
        o->scratch += (size_t)bytes;
}

static void add_function(struct session *s, void (*function)(struct session *s)) {
    struct onednn *o = s->state;
    o->step[o->steps++] = (struct step){.function = function};
}

/* ---- act ------------------------------------------------------------------------------------- */

static const struct {
    rafter_act_kind act;
    dnnl_alg_kind_t kind;
    float alpha;
} eltwise[] = {
    {RAFTER_ACT_RELU, dnnl_eltwise_relu, 0},
    {RAFTER_ACT_SIGMOID, dnnl_eltwise_logistic, 0},
    {RAFTER_ACT_SILU, dnnl_eltwise_swish, 1},
};
enum { ELTWISE = sizeof eltwise / sizeof *eltwise };

static int find_eltwise(const problem *p) {
    int i = 0;
    while (i < ELTWISE && p->options.act != eltwise[i].act)
        i++;
    return i;
}

static void plan_eltwise(struct session *s, int kind) {
    struct onednn *o = s->state;
    const onednn_layout layout = layout_of(s, problem_find(&s->problem, "x"));
    dnnl_primitive_desc_t forward = NULL, backward = NULL;
    const dnnl_status_t status = onednn_eltwise(&forward, o->engine, eltwise[kind].kind, eltwise[kind].alpha, layout);
    if (!good(s, status, problem_act_names[eltwise[kind].act]))
        return;
    if (s->mode != PROBLEM_BACKWARD) {
        const dnnl_exec_arg_t arg[ARGS] = {{DNNL_ARG_SRC, memory_of(s, "x")}, {DNNL_ARG_DST, memory_of(s, "y")}};
        add_primitive(s, status, forward, problem_act_names[eltwise[kind].act], arg);
    }
    if (s->mode != PROBLEM_FORWARD) {
        const dnnl_exec_arg_t arg[ARGS] = {{DNNL_ARG_SRC, memory_of(s, "x")},
                                           {DNNL_ARG_DIFF_DST, memory_of(s, "dy")},
                                           {DNNL_ARG_DIFF_SRC, memory_of(s, "dx")}};
        const dnnl_status_t again =
            onednn_eltwise_backward(&backward, o->engine, eltwise[kind].kind, eltwise[kind].alpha, layout, forward);
        add_primitive(s, again, backward, problem_act_names[eltwise[kind].act], arg);
    }
}

static void plan_softmax(struct session *s) {
    struct onednn *o = s->state;
    const problem_tensor *x = problem_find(&s->problem, "x");
    const int axis = problem_dim(&s->problem, x->ndim);
    const onednn_layout layout = layout_of(s, x);
    dnnl_primitive_desc_t forward = NULL, backward = NULL;
    const dnnl_status_t status = onednn_softmax(&forward, o->engine, layout, axis);
    if (!good(s, status, "softmax"))
        return;
    if (s->mode != PROBLEM_BACKWARD) {
        const dnnl_exec_arg_t arg[ARGS] = {{DNNL_ARG_SRC, memory_of(s, "x")}, {DNNL_ARG_DST, memory_of(s, "y")}};
        add_primitive(s, status, forward, "softmax", arg);
    }
    if (s->mode != PROBLEM_FORWARD) {
        const dnnl_exec_arg_t arg[ARGS] = {{DNNL_ARG_DST, memory_of(s, "y")},
                                           {DNNL_ARG_DIFF_DST, memory_of(s, "dy")},
                                           {DNNL_ARG_DIFF_SRC, memory_of(s, "dx")}};
        const dnnl_status_t again = onednn_softmax_backward(&backward, o->engine, layout, axis, forward);
        add_primitive(s, again, backward, "softmax", arg);
    }
}

/* ---- linear_cross_entropy -------------------------------------------------------------------- */

static int64_t label_of(const struct session *s, int64_t row) {
    const problem_tensor *t = problem_find(&s->problem, "target");
    return t->dtype == RAFTER_I64 ? ((const int64_t *)t->tensor.data)[row] : ((const int32_t *)t->tensor.data)[row];
}

static float get(const struct onednn *o, int64_t row, int64_t column) {
    const int64_t at = row * o->classes + column;
    if (o->dtype == RAFTER_F32)
        return ((const float *)o->logits)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)o->logits)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void put(const struct onednn *o, int64_t row, int64_t column, float value) {
    const int64_t at = row * o->classes + column;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (o->dtype == RAFTER_F32)
        ((float *)o->logits)[at] = value;
    else
        ((uint16_t *)o->logits)[at] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Between matmul and softmax. */
static void keep_label_logits(struct session *s) {
    struct onednn *o = s->state;
    for (int64_t row = 0; row < o->rows; row++)
        o->label_logit[row] = get(o, row, label_of(s, row));
}

/* After softmax: loss and lse from the probabilities at the labels, then the gradient of the logits
 * without its factor. */
static void finish_loss(struct session *s) {
    struct onednn *o = s->state;
    const problem_tensor *lse = problem_find(&s->problem, "lse");
    double loss = 0;
    for (int64_t row = 0; row < o->rows; row++) {
        const int64_t label = label_of(s, row);
        const float p = get(o, row, label), logp = logf(p);
        loss -= logp;
        if (lse)
            ((float *)lse->tensor.data)[row] = o->label_logit[row] - logp;
        put(o, row, label, p - 1);
    }
    *(float *)problem_find(&s->problem, "loss")->tensor.data = (float)(loss / (double)o->rows);
}

static void plan_matmul(struct session *s, onednn_layout a, void *a_data, onednn_layout b, void *b_data,
                        onednn_layout c, void *c_data, float factor) {
    struct onednn *o = s->state;
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_post_ops_t ops = NULL;
    dnnl_primitive_attr_create(&attributes);
    dnnl_post_ops_create(&ops);
    if (factor != 1)
        good(s, onednn_scale(ops, factor), "scale");
    good(s, dnnl_primitive_attr_set_post_ops(attributes, ops), "scale");
    dnnl_primitive_desc_t plan = NULL;
    const dnnl_status_t status = onednn_matmul(&plan, o->engine, a, b, c, attributes);
    const dnnl_exec_arg_t arg[ARGS] = {{DNNL_ARG_SRC, memory(s, a, a_data)},
                                       {DNNL_ARG_WEIGHTS, memory(s, b, b_data)},
                                       {DNNL_ARG_DST, memory(s, c, c_data)}};
    add_primitive(s, status, plan, "matmul", arg);
}

static void plan_linear_cross_entropy(struct session *s) {
    struct onednn *o = s->state;
    const problem_tensor *x = problem_find(&s->problem, "x"), *w = problem_find(&s->problem, "weight");
    const int64_t n = problem_find(&s->problem, "target")->numel, d = x->shape[x->ndim - 1], v = w->shape[0];
    o->rows = n, o->features = d, o->classes = v;
    o->dtype = x->dtype;
    const size_t bytes = (size_t)(n * v) * (x->dtype == RAFTER_F32 ? 4 : 2);
    o->logits = aligned_alloc(64, (bytes + 63) / 64 * 64);
    o->label_logit = calloc((size_t)n, sizeof(float));
    if (!o->logits || !o->label_logit) {
        o->failed = true;
        session_fail(s, "no memory for the logits");
        return;
    }
    o->scratch += bytes + (size_t)n * sizeof(float);

    const onednn_layout logits = matrix(s, x->dtype, n, v, v, 1);
    plan_matmul(s, matrix(s, x->dtype, n, d, d, 1), x->tensor.data, matrix(s, w->dtype, d, v, 1, d), w->tensor.data,
                logits, o->logits, 1);
    add_function(s, keep_label_logits);
    dnnl_primitive_desc_t softmax = NULL;
    const dnnl_status_t status = onednn_softmax(&softmax, o->engine, logits, 1);
    const dnnl_exec_arg_t arg[ARGS] = {{DNNL_ARG_SRC, memory(s, logits, o->logits)},
                                       {DNNL_ARG_DST, memory(s, logits, o->logits)}};
    add_primitive(s, status, softmax, "softmax", arg);
    add_function(s, finish_loss);
    if (s->mode == PROBLEM_FORWARD)
        return;
    const problem_tensor *dx = problem_find(&s->problem, "dx"), *dw = problem_find(&s->problem, "dweight"),
                         *dloss = problem_find(&s->problem, "dloss");
    const float factor = (dloss ? *(const float *)dloss->tensor.data : 1) / (float)n;
    if (dx)
        plan_matmul(s, logits, o->logits, matrix(s, w->dtype, v, d, d, 1), w->tensor.data,
                    matrix(s, dx->dtype, n, d, d, 1), dx->tensor.data, factor);
    if (dw)
        plan_matmul(s, matrix(s, x->dtype, v, n, 1, v), o->logits, matrix(s, x->dtype, n, d, d, 1), x->tensor.data,
                    matrix(s, dw->dtype, v, d, d, 1), dw->tensor.data, factor);
}

/* ---- the provider ---------------------------------------------------------------------------- */

static bool serves_loss(const problem *p) {
    const problem_tensor *target = problem_find(p, "target");
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        const bool result = t->role == PROBLEM_OUTPUT || t->role == PROBLEM_GRADIENT;
        if (result && strcmp(t->name, "loss") != 0 && strcmp(t->name, "lse") != 0 && strcmp(t->name, "dx") != 0 &&
            strcmp(t->name, "dweight") != 0)
            return false;
    }
    return target && !target->some_ignored && problem_is_plain_loss(p);
}

static bool serves(const struct provider *provider, const problem *p, enum problem_mode mode) {
    (void)provider;
    if (strcmp(p->op->op, "act") == 0)
        return p->options.act != RAFTER_ACT_NONE;
    return strcmp(p->op->op, "linear_cross_entropy") == 0 && mode != PROBLEM_BACKWARD && serves_loss(p);
}

static bool open_onednn(struct session *s) {
    struct onednn *o = calloc(1, sizeof *o);
    s->state = o;
    if (!o)
        return session_fail(s, "no memory");
    omp_set_num_threads(rafter_context_threads(s->context));
    if (!good(s, dnnl_engine_create(&o->engine, dnnl_cpu, 0), "engine") ||
        !good(s, dnnl_stream_create(&o->stream, o->engine, dnnl_stream_default_flags), "stream"))
        return false;
    const int kind = find_eltwise(&s->problem);
    if (strcmp(s->problem.op->op, "linear_cross_entropy") == 0)
        plan_linear_cross_entropy(s);
    else if (kind < ELTWISE)
        plan_eltwise(s, kind);
    else
        plan_softmax(s);
    return !o->failed;
}

static bool call(struct session *s) {
    struct onednn *o = s->state;
    s->scratch = o->scratch;
    for (int i = 0; i < o->steps; i++) {
        struct step *step = &o->step[i];
        if (!step->primitive) {
            step->function(s);
            continue;
        }
        int args = 0;
        while (args < ARGS && step->arg[args].memory)
            args++;
        if (!good(s, dnnl_primitive_execute(step->primitive, o->stream, args, step->arg), "call"))
            return false;
        if (!good(s, dnnl_stream_wait(o->stream), "call"))
            return false;
    }
    return true;
}

static bool timed(struct session *s, double *seconds) {
    return time_call(s, call, seconds);
}

const struct provider provider_onednn = {
    .name = "onednn", .isolated = true, .serves = serves, .open = open_onednn, .time = timed};

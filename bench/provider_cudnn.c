/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN's softmax and activations. Its library is loaded when a run on a GPU first needs it. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/context.h"
#include "provider.h"
#include "worker.h"

/* From cuDNN's ABI, versions 8 and 9. */
typedef struct cudnn_handle *cudnn_handle;
typedef struct cudnn_tensor *cudnn_tensor;
typedef struct cudnn_activation *cudnn_activation;
enum {
    CUDNN_FLOAT = 0,
    CUDNN_HALF = 2,
    CUDNN_BFLOAT16 = 9,
    CUDNN_NCHW = 0,
    CUDNN_SIGMOID = 0,
    CUDNN_RELU = 1,
    CUDNN_SWISH = 6,
    CUDNN_PROPAGATE_NAN = 1,
    CUDNN_SOFTMAX_ACCURATE = 1,
    CUDNN_SOFTMAX_OVER_CHANNEL = 1
};

/* The functions that are used, by name: X(name, arguments). All return 0 when they succeed. */
#define CUDNN_FUNCTIONS(X)                                                                                             \
    X(cudnnCreate, (cudnn_handle *))                                                                                   \
    X(cudnnSetStream, (cudnn_handle, void *))                                                                          \
    X(cudnnCreateTensorDescriptor, (cudnn_tensor *))                                                                   \
    X(cudnnSetTensor4dDescriptor, (cudnn_tensor, int, int, int, int, int, int))                                        \
    X(cudnnDestroyTensorDescriptor, (cudnn_tensor))                                                                    \
    X(cudnnCreateActivationDescriptor, (cudnn_activation *))                                                           \
    X(cudnnSetActivationDescriptor, (cudnn_activation, int, int, double))                                              \
    X(cudnnDestroyActivationDescriptor, (cudnn_activation))                                                            \
    X(cudnnActivationForward,                                                                                          \
      (cudnn_handle, cudnn_activation, const void *, cudnn_tensor, const void *, const void *, cudnn_tensor, void *))  \
    X(cudnnActivationBackward,                                                                                         \
      (cudnn_handle, cudnn_activation, const void *, cudnn_tensor, const void *, cudnn_tensor, const void *,           \
       cudnn_tensor, const void *, const void *, cudnn_tensor, void *))                                                \
    X(cudnnSoftmaxForward,                                                                                             \
      (cudnn_handle, int, int, const void *, cudnn_tensor, const void *, const void *, cudnn_tensor, void *))          \
    X(cudnnSoftmaxBackward, (cudnn_handle, int, int, const void *, cudnn_tensor, const void *, cudnn_tensor,           \
                             const void *, const void *, cudnn_tensor, void *))

static struct {
    bool tried;
    char why[200];
    cudnn_handle handle;
#define X(name, arguments) int(*name) arguments;
    CUDNN_FUNCTIONS(X)
#undef X
} cudnn;

struct state {
    cudnn_tensor layout;
    cudnn_activation activation;
};

/* In the system's library path, or where PyTorch's packages put it. */
static void *find_library(void) {
    const char *const names[] = {secure_getenv("RAFTER_CUDNN"), "libcudnn.so.9", "libcudnn.so.8", "libcudnn.so",
                                 json_text(worker_greeting(), "cudnn")};
    void *library = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !library; i++)
        if (names[i] && names[i][0])
            library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    return library;
}

static bool load(struct session *s) {
    if (!cudnn.tried) {
        cudnn.tried = true;
        void *library = find_library();
        if (!library)
            snprintf(cudnn.why, sizeof cudnn.why, "libcudnn is not installed (RAFTER_CUDNN can say where it is)");
#define X(name, arguments)                                                                                             \
    *(void **)&cudnn.name = library ? dlsym(library, #name) : NULL;                                                    \
    if (library && !cudnn.name)                                                                                        \
        snprintf(cudnn.why, sizeof cudnn.why, "libcudnn has no %s", #name);
        CUDNN_FUNCTIONS(X)
#undef X
        if (!cudnn.why[0] && cudnn.cudnnCreate(&cudnn.handle) != 0)
            snprintf(cudnn.why, sizeof cudnn.why, "cudnnCreate failed");
    }
    s->missing = cudnn.why[0] != '\0';
    return !s->missing || session_fail(s, "%s", cudnn.why);
}

static bool good(struct session *s, int status, const char *what) {
    return status == 0 || session_fail(s, "%s failed with status %d", what, status);
}

/* -1: cuDNN has no such activation. */
static int activation_of(const problem *p) {
    const rafter_act_kind act = p->options.act;
    return act == RAFTER_ACT_RELU      ? CUDNN_RELU
           : act == RAFTER_ACT_SIGMOID ? CUDNN_SIGMOID
           : act == RAFTER_ACT_SILU    ? CUDNN_SWISH
                                       : -1;
}

static bool serves(const struct provider *provider, const problem *p, enum problem_mode mode) {
    (void)provider, (void)mode;
    return strcmp(p->op->op, "act") == 0 && p->options.act != RAFTER_ACT_NONE;
}

/* The tensor as n x c x 1 x w: softmax runs over c. */
static bool lay_out(struct session *s, cudnn_tensor layout) {
    const problem *const p = &s->problem;
    const problem_tensor *x = problem_find(p, "x");
    int64_t n = 1, c = 1, w = 1;
    const int dim = p->options.act == RAFTER_ACT_SOFTMAX ? problem_dim(p, x->ndim) : x->ndim - 1;
    for (int d = 0; d < x->ndim; d++)
        *(d < dim ? &n : d == dim ? &c : &w) *= x->shape[d];
    const int type = x->dtype == RAFTER_F32 ? CUDNN_FLOAT : x->dtype == RAFTER_F16 ? CUDNN_HALF : CUDNN_BFLOAT16;
    return good(s, cudnn.cudnnSetTensor4dDescriptor(layout, CUDNN_NCHW, type, (int)n, (int)c, 1, (int)w), "layout");
}

static bool open_cudnn(struct session *s) {
    struct state *state = calloc(1, sizeof *state);
    s->state = state;
    if (!state)
        return session_fail(s, "no memory");
    return load(s) && good(s, cudnn.cudnnSetStream(cudnn.handle, context_stream(s->context)), "cudnnSetStream") &&
           good(s, cudnn.cudnnCreateTensorDescriptor(&state->layout), "layout") && lay_out(s, state->layout) &&
           good(s, cudnn.cudnnCreateActivationDescriptor(&state->activation), "activation") &&
           (activation_of(&s->problem) < 0 ||
            good(s,
                 cudnn.cudnnSetActivationDescriptor(state->activation, activation_of(&s->problem), CUDNN_PROPAGATE_NAN,
                                                    1),
                 "activation"));
}

static bool call(struct session *s) {
    const struct state *t = s->state;
    const bool softmax = activation_of(&s->problem) < 0;
    const float one = 1, zero = 0;
    void *x = problem_dl(&s->problem, "x")->data, *y = problem_dl(&s->problem, "y")->data,
         *dy = problem_dl(&s->problem, "dy")->data, *dx = problem_dl(&s->problem, "dx")->data;
    int status = 0;
    if (s->mode != PROBLEM_BACKWARD)
        status = softmax ? cudnn.cudnnSoftmaxForward(cudnn.handle, CUDNN_SOFTMAX_ACCURATE, CUDNN_SOFTMAX_OVER_CHANNEL,
                                                     &one, t->layout, x, &zero, t->layout, y)
                         : cudnn.cudnnActivationForward(cudnn.handle, t->activation, &one, t->layout, x, &zero,
                                                        t->layout, y);
    if (s->mode != PROBLEM_FORWARD && status == 0)
        status = softmax ? cudnn.cudnnSoftmaxBackward(cudnn.handle, CUDNN_SOFTMAX_ACCURATE, CUDNN_SOFTMAX_OVER_CHANNEL,
                                                      &one, t->layout, y, t->layout, dy, &zero, t->layout, dx)
                         : cudnn.cudnnActivationBackward(cudnn.handle, t->activation, &one, t->layout, y, t->layout, dy,
                                                         t->layout, x, &zero, t->layout, dx);
    return good(s, status, softmax ? "softmax" : "activation");
}

static bool timed(struct session *s, double *seconds) {
    return time_call_on_device(s, call, seconds);
}

/* In backward its activations read x and y, its softmax y. */
static bool memory(struct session *s, double *bytes) {
    double seconds;
    *bytes = result_bytes(s);
    if (s->mode == PROBLEM_BACKWARD && activation_of(&s->problem) >= 0)
        *bytes += (double)tensor_bytes(problem_find(&s->problem, "y"));
    return timed(s, &seconds);
}

static bool collect(struct session *s) {
    return problem_results_from_device(&s->problem, s->context, s->mode) ||
           session_fail(s, "the results could not be copied from the device");
}

static void close_cudnn(struct session *s) {
    struct state *state = s->state;
    if (state && state->layout)
        cudnn.cudnnDestroyTensorDescriptor(state->layout);
    if (state && state->activation)
        cudnn.cudnnDestroyActivationDescriptor(state->activation);
    free(state);
    s->state = NULL;
}

const struct provider provider_cudnn = {.name = "cudnn",
                                        .device = true,
                                        .serves = serves,
                                        .open = open_cudnn,
                                        .time = timed,
                                        .memory = memory,
                                        .collect = collect,
                                        .close = close_cudnn};

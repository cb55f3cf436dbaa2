/* SPDX-License-Identifier: Apache-2.0 */
#include "calls.h"

#include <dirent.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { B = 2, N = 96, H = 4, D = 64, ROWS = 96, V = 2000, CELLS = ROWS * V, TOKENS = B * N * H * D };
enum { SHORT = 24, FEW = CELLS / SHORT }; /* the same cells as short rows */
enum { INPUTS = CELLS, OUTPUT_BYTES = 4 << 20, PATTERN = 0x5a };

static float plain[INPUTS], weights[V];
static uint16_t narrow[INPUTS];
static int64_t labels[ROWS], few_labels[FEW];

void fill_inputs(enum inputs kind) {
    uint64_t state = 1;
    for (int i = 0; i < INPUTS; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        float x = (float)(int32_t)(state >> 32) * 0x1p-30f;
        if (i % 7 == 3 && kind != ORDINARY)
            x = kind == SUBNORMAL ? x * 0x1p-127f : -INFINITY;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        plain[i] = x;
        narrow[i] = (uint16_t)(bits >> 16); /* bf16 */
    }
    for (int i = 0; i < V; i++)
        weights[i] = 0.5f + (float)(i % 5);
    for (int i = 0; i < FEW; i++)
        few_labels[i] = i % 11 == 5 ? -100 : i % SHORT;
    for (int i = 0; i < ROWS; i++)
        labels[i] = i % 11 == 5 ? -100 : i * 31 % V;
}

/* ---- calls ----------------------------------------------------------------------------------- */

struct tensors {
    struct outputs *outputs;
    rafter_dtype dtype;
    DLTensor tensor[16];
    int used;
};

static const DLTensor *input(struct tensors *t, int64_t first, int ndim, int64_t *shape) {
    void *const data = t->dtype == RAFTER_F32 ? (void *)(plain + first) : (void *)(narrow + first);
    t->tensor[t->used] = rafter_tensor(data, t->dtype, ndim, shape);
    return &t->tensor[t->used++];
}

static const DLTensor *typed(struct tensors *t, void *data, rafter_dtype dtype, int ndim, int64_t *shape) {
    t->tensor[t->used] = rafter_tensor(data, dtype, ndim, shape);
    return &t->tensor[t->used++];
}

static const DLTensor *output(struct tensors *t, rafter_dtype dtype, int ndim, int64_t *shape) {
    size_t bytes = dtype == RAFTER_F32 ? 4 : dtype == RAFTER_I64 ? 8 : 2;
    for (int d = 0; d < ndim; d++)
        bytes *= (size_t)shape[d];
    const DLTensor *const tensor =
        typed(t, t->outputs->memory + t->outputs->shift + t->outputs->bytes, dtype, ndim, shape);
    t->outputs->bytes += (bytes + 63) / 64 * 64;
    expect(t->outputs->bytes + 64 <= OUTPUT_BYTES, "raise OUTPUT_BYTES");
    return tensor;
}

static int64_t grid[] = {ROWS, V}, few[] = {FEW, SHORT}, few_rows[] = {FEW}, few_columns[] = {SHORT};
static int64_t rows[] = {ROWS}, columns[] = {V}, tokens[] = {B, N, H, D}, twice[] = {B, N, H, 2 * D};
static int64_t theta_shape[] = {H, D}, hidden[] = {ROWS, D}, weight_shape[] = {V, D};

static rafter_status act(rafter_context *context, struct tensors *t, int kind, int dim, rafter_direction direction) {
    int64_t *const shape = dim < 2 ? grid : few;
    rafter_act_args a = {.size = sizeof a, .kind = (rafter_act_kind)kind, .dim = dim % 2, .x = input(t, 0, 2, shape)};
    a.y = direction == RAFTER_FORWARD ? output(t, t->dtype, 2, shape) : a.x;
    if (direction == RAFTER_FORWARD)
        return rafter_act_forward(context, &a);
    a.dy = a.x;
    a.dx = output(t, t->dtype, 2, shape);
    return rafter_act_backward(context, &a);
}

static rafter_status logsumexp(rafter_context *context, struct tensors *t, int algorithm, int dim,
                               rafter_direction direction) {
    int64_t *const all = dim < 2 ? grid : few;
    rafter_logsumexp_args a = {
        .size = sizeof a, .algorithm = (rafter_logsumexp_algorithm)algorithm, .dim = dim % 2, .x = input(t, 0, 2, all)};
    int64_t *const shape = dim == 0 ? columns : dim == 1 ? rows : dim == 2 ? few_columns : few_rows;
    if (direction == RAFTER_FORWARD) {
        a.lse = output(t, RAFTER_F32, 1, shape);
        return rafter_logsumexp_forward(context, &a);
    }
    a.lse = typed(t, plain, RAFTER_F32, 1, shape);
    a.dlse = a.lse;
    a.dx = output(t, t->dtype, 2, all);
    return rafter_logsumexp_backward(context, &a);
}

static rafter_status cross_entropy(rafter_context *context, struct tensors *t, int options, int short_rows,
                                   rafter_direction direction) {
    int64_t *const all = short_rows ? few : grid, *const each = short_rows ? few_rows : rows;
    const rafter_loss_options o = {.size = sizeof o,
                                   .label_smoothing = 0.1f,
                                   .z_loss = 1e-3f,
                                   .softcap = 30,
                                   .class_weight =
                                       typed(t, weights, RAFTER_F32, 1, short_rows ? few_columns : columns)};
    rafter_cross_entropy_args a = {.size = sizeof a,
                                   .options = options ? &o : NULL,
                                   .logits = input(t, 0, 2, all),
                                   .target = typed(t, short_rows ? few_labels : labels, RAFTER_I64, 1, each),
                                   .dlogits = output(t, t->dtype, 2, all)};
    if (direction == RAFTER_BACKWARD)
        return rafter_cross_entropy_backward(context, &a);
    a.loss = output(t, RAFTER_F32, 0, NULL);
    a.lse = output(t, RAFTER_F32, 1, each);
    a.entropy = output(t, RAFTER_F32, 1, each);
    a.argmax = output(t, RAFTER_I64, 1, each);
    return rafter_cross_entropy_forward(context, &a);
}

static rafter_status linear(rafter_context *context, struct tensors *t, int mode, int unused,
                            rafter_direction direction) {
    (void)unused;
    rafter_linear_cross_entropy_args a = {.size = sizeof a,
                                          .mode = (rafter_lce_mode)mode,
                                          .x = input(t, 0, 2, hidden),
                                          .weight = input(t, ROWS * D, 2, weight_shape),
                                          .target = typed(t, labels, RAFTER_I64, 1, rows),
                                          .dx = output(t, t->dtype, 2, hidden),
                                          .dweight = output(t, t->dtype, 2, weight_shape)};
    if (direction == RAFTER_BACKWARD)
        return rafter_linear_cross_entropy_backward(context, &a);
    a.loss = output(t, RAFTER_F32, 0, NULL);
    return rafter_linear_cross_entropy_forward(context, &a);
}

static rafter_status lrpe_cosine(rafter_context *context, struct tensors *t, int kind, int over,
                                 rafter_direction direction) {
    rafter_lrpe_cosine_args a = {.size = sizeof a,
                                 .act = (rafter_act_kind)kind,
                                 .softmax_over = (rafter_softmax_over)over,
                                 .x = input(t, 0, 4, tokens),
                                 .theta = typed(t, weights, RAFTER_F32, 2, theta_shape)};
    if (direction == RAFTER_FORWARD) {
        a.y = output(t, t->dtype, 4, twice);
        return rafter_lrpe_cosine_forward(context, &a);
    }
    a.dy = input(t, TOKENS, 4, twice);
    a.dx = output(t, t->dtype, 4, tokens);
    a.dtheta = output(t, RAFTER_F32, 2, theta_shape);
    return rafter_lrpe_cosine_backward(context, &a);
}

static rafter_status scale(rafter_context *context, struct tensors *t, int unused, int unused2,
                           rafter_direction direction) {
    (void)unused, (void)unused2, (void)direction;
    rafter_scale_args a = {.size = sizeof a,
                           .x = input(t, 0, 2, grid),
                           .factor = typed(t, weights, RAFTER_F32, 0, NULL),
                           .y = output(t, t->dtype, 2, grid)};
    return rafter_scale_forward(context, &a);
}

_Static_assert(3 * TOKENS <= INPUTS && ROWS * D + V * D <= INPUTS, "raise INPUTS");

static const struct {
    const char *op, *name;
    rafter_status (*make)(rafter_context *, struct tensors *, int, int, rafter_direction);
    int option, dim;
    rafter_direction direction;
} kinds[] = {
    {"act", "silu", act, RAFTER_ACT_SILU, 0, RAFTER_FORWARD},
    {"act", "silu backward", act, RAFTER_ACT_SILU, 0, RAFTER_BACKWARD},
    {"act", "softmax of rows", act, RAFTER_ACT_SOFTMAX, 1, RAFTER_FORWARD},
    {"act", "softmax of rows, backward", act, RAFTER_ACT_SOFTMAX, 1, RAFTER_BACKWARD},
    {"act", "softmax of columns", act, RAFTER_ACT_SOFTMAX, 0, RAFTER_FORWARD},
    {"act", "softmax of columns, backward", act, RAFTER_ACT_SOFTMAX, 0, RAFTER_BACKWARD},
    {"act", "softmax of short rows", act, RAFTER_ACT_SOFTMAX, 3, RAFTER_FORWARD},
    {"act", "softmax of short rows, backward", act, RAFTER_ACT_SOFTMAX, 3, RAFTER_BACKWARD},
    {"act", "softmax of few columns, backward", act, RAFTER_ACT_SOFTMAX, 2, RAFTER_BACKWARD},
    {"logsumexp", "short rows", logsumexp, RAFTER_LOGSUMEXP_AUTO, 3, RAFTER_FORWARD},
    {"logsumexp", "short rows, backward", logsumexp, RAFTER_LOGSUMEXP_AUTO, 3, RAFTER_BACKWARD},
    {"logsumexp", "few columns, backward", logsumexp, RAFTER_LOGSUMEXP_AUTO, 2, RAFTER_BACKWARD},
    {"cross_entropy", "short rows", cross_entropy, 0, 1, RAFTER_FORWARD},
    {"cross_entropy", "short rows with options", cross_entropy, 1, 1, RAFTER_FORWARD},
    {"logsumexp", "rows", logsumexp, RAFTER_LOGSUMEXP_AUTO, 1, RAFTER_FORWARD},
    {"logsumexp", "rows, backward", logsumexp, RAFTER_LOGSUMEXP_AUTO, 1, RAFTER_BACKWARD},
    {"logsumexp", "columns", logsumexp, RAFTER_LOGSUMEXP_PARALLEL, 0, RAFTER_FORWARD},
    {"logsumexp", "columns, backward", logsumexp, RAFTER_LOGSUMEXP_AUTO, 0, RAFTER_BACKWARD},
    {"cross_entropy", "forward", cross_entropy, 0, 0, RAFTER_FORWARD},
    {"cross_entropy", "backward", cross_entropy, 0, 0, RAFTER_BACKWARD},
    {"cross_entropy", "forward with options", cross_entropy, 1, 0, RAFTER_FORWARD},
    {"cross_entropy", "backward with options", cross_entropy, 1, 0, RAFTER_BACKWARD},
    {"linear_cross_entropy", "fast", linear, RAFTER_LCE_FAST, 0, RAFTER_FORWARD},
    {"linear_cross_entropy", "compact", linear, RAFTER_LCE_COMPACT, 0, RAFTER_FORWARD},
    {"linear_cross_entropy", "backward", linear, RAFTER_LCE_AUTO, 0, RAFTER_BACKWARD},
    {"lrpe_cosine", "silu", lrpe_cosine, RAFTER_ACT_SILU, 0, RAFTER_FORWARD},
    {"lrpe_cosine", "silu backward", lrpe_cosine, RAFTER_ACT_SILU, 0, RAFTER_BACKWARD},
    {"lrpe_cosine", "softmax of features, backward", lrpe_cosine, RAFTER_ACT_SOFTMAX, RAFTER_OVER_FEATURE,
     RAFTER_BACKWARD},
    {"lrpe_cosine", "softmax of the sequence", lrpe_cosine, RAFTER_ACT_SOFTMAX, RAFTER_OVER_SEQUENCE, RAFTER_FORWARD},
    {"lrpe_cosine", "softmax of the sequence, backward", lrpe_cosine, RAFTER_ACT_SOFTMAX, RAFTER_OVER_SEQUENCE,
     RAFTER_BACKWARD},
    {"scale", "forward", scale, 0, 0, RAFTER_FORWARD},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

int calls_count(void) {
    return 2 * KINDS;
}

const char *call_op(int call) {
    return kinds[call % KINDS].op;
}

const char *call_name(int call) {
    static _Thread_local char name[100];
    snprintf(name, sizeof name, "%s, %s, %s", call_op(call), kinds[call % KINDS].name, call < KINDS ? "fp32" : "bf16");
    return name;
}

struct outputs new_outputs(void) {
    const struct outputs outputs = {.memory = aligned_alloc(64, OUTPUT_BYTES)};
    expect(outputs.memory != NULL, "no memory for outputs");
    return outputs;
}

void free_outputs(struct outputs *outputs) {
    free(outputs->memory);
}

rafter_status make_call(rafter_context *context, int call, struct outputs *outputs) {
    memset(outputs->memory, PATTERN, OUTPUT_BYTES);
    outputs->bytes = 0;
    struct tensors t = {.outputs = outputs, .dtype = call < KINDS ? RAFTER_F32 : RAFTER_BF16};
    call %= KINDS;
    return kinds[call].make(context, &t, kinds[call].option, kinds[call].dim, kinds[call].direction);
}

uint64_t hash_of(const struct outputs *outputs) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i + 8 <= outputs->bytes; i += 8) {
        uint64_t word;
        memcpy(&word, outputs->memory + outputs->shift + i, sizeof word);
        hash = (hash ^ word) * 1099511628211u;
        hash ^= hash >> 29;
    }
    return hash;
}

int untouched(const struct outputs *outputs) {
    for (size_t i = 0; i < outputs->bytes; i++)
        if (outputs->memory[outputs->shift + i] != PATTERN)
            return 0;
    return 1;
}

rafter_context *new_context(int threads, const char *variant) {
    const rafter_context_options options = {.size = sizeof options, .threads = threads, .variant = variant};
    rafter_context *context;
    expect(rafter_context_create(&context, &options) == RAFTER_OK, "no context: %s", rafter_last_error(NULL));
    return context;
}

uint64_t result_of(rafter_context *context, int call) {
    struct outputs outputs = new_outputs();
    const rafter_status status = make_call(context, call, &outputs);
    expect(status == RAFTER_OK, "%s: %s", call_name(call), rafter_last_error(context));
    const uint64_t hash = hash_of(&outputs);
    free_outputs(&outputs);
    return hash;
}

int count_workers(void) {
    DIR *const tasks = opendir("/proc/self/task");
    int count = 0;
    for (const struct dirent *entry; tasks && (entry = readdir(tasks));) {
        char path[300], name[20] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *const file = fopen(path, "r");
        count += file && fgets(name, sizeof name, file) && strcmp(name, "rafter\n") == 0;
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return count;
}

void expect(int condition, const char *format, ...) {
    if (condition)
        return;
    va_list list;
    va_start(list, format);
    fputs("FAIL ", stdout);
    vprintf(format, list);
    fputc('\n', stdout);
    fflush(stdout);
    va_end(list);
    _exit(1);
}

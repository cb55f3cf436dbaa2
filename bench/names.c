/* SPDX-License-Identifier: Apache-2.0 */
#include "names.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

const char *const extra_meanings[] = {
    [EXTRA_SHARE] =
        ("the share of the floor: the least time that the call's bytes and flops take at the rates measured "
         "in the same run, divided by the measured time"),
    [EXTRA_ERROR] = "the largest error against the fp64 oracle, |got - want| / max(1, |want|)",
    [EXTRA_HOST] = "microseconds until the call returns to the caller",
    [EXTRA_FIRST] = "milliseconds of the first call of a fresh process",
};

/* ---- columns --------------------------------------------------------------------------------- */

static const struct column_entry {
    const char *column, *name, *meaning;
} columns[] = {
    {"rafter", "Rafter", "this library, with its own choice of algorithm and kernel"},
    {"onepass", "Rafter, one pass", "Rafter, loss and gradient in one call"},
    {"fast", "Rafter, fast", "Rafter, gradients computed in forward, with more workspace"},
    {"compact", "Rafter, compact", "Rafter, logits recomputed slice by slice, with little workspace"},
    {"native", "Rafter, native", "Rafter, fast, products accumulated as the matrix units do it"},
    {"saved", "Rafter, saved", "Rafter, forward saves the exponentials, backward reads them"},
    {"mask", "Rafter, mask", "Rafter, relu whose forward keeps one bit per element for backward"},
    {"parallel", "Rafter, parallel", "Rafter, all of a row at once"},
    {"recurrence", "Rafter, recurrence", "Rafter, one pass along the row"},
    {"sp", "Rafter, sp", "Rafter, tasks split over the sequence"},
    {"bp", "Rafter, bp", "Rafter, tasks split over the batch"},
    {"rafter_py", "Rafter from PyTorch", "Rafter through its PyTorch package"},
    {"naive", "Plain C", "unfused loops in C at -O3, one per framework operation"},
    {"onednn", "oneDNN", "oneDNN"},
    {"cudnn", "cuDNN", "cuDNN's softmax and activations"},
    {"to", "PyTorch", "PyTorch, eager"},
    {"toc", "torch.compile", "PyTorch with torch.compile, compiled for the shape"},
    {"torch_lce", "PyTorch's fused loss", "F.linear_cross_entropy of PyTorch"},
    {"tr", "Triton", "the Triton kernels of xopes"},
    {"pt", "Triton, parallel", "the parallel Triton kernels of xopes"},
    {"ptr", "Triton, parallel", "the parallel Triton kernels of xopes"},
    {"rtr", "Triton, recurrence", "the recurrent Triton kernels of xopes"},
    {"tr_lce", "Triton after a linear layer", "a linear layer, then the Triton cross entropy of xopes"},
    {"fla", "flash-linear-attention", "flash-linear-attention's fused loss"},
    {"tr_fla", "flash-linear-attention", "flash-linear-attention's fused linear loss"},
    {"liger", "Liger Kernel", "Liger Kernel's loss"},
    {"tr_liger", "Liger Kernel", "Liger Kernel's fused linear loss"},
    {"liger_sm90", "Liger Kernel, SM90", "Liger Kernel's CuTe loss for Hopper"},
    {"liger_fslce", "Liger Kernel, FSLCE", "Liger Kernel's CuTe log-probabilities for RL"},
    {"tr_cut", "cut cross entropy", "Apple's cut cross entropy"},
    {"tr_jg", "Geiping's", "Geiping's linear cross entropy"},
    {"quack", "QuACK", "QuACK"},
    {"quack_exp", "QuACK, scaled exp", "QuACK's scaled-exp pipeline"},
};

static const struct column_entry *find_column(const char *column) {
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        if (strcmp(columns[i].column, column) == 0)
            return &columns[i];
    return NULL;
}

const char *column_name(const char *column) {
    const struct column_entry *const entry = find_column(column);
    return entry ? entry->name : column;
}

const char *column_meaning(const char *column) {
    const struct column_entry *const entry = find_column(column);
    return entry ? entry->meaning : NULL;
}

/* ---- titles ---------------------------------------------------------------------------------- */

enum op { OP_CROSS_ENTROPY, OP_LCE, OP_LOGSUMEXP, OP_ACT, OP_LRPE, OP_SCALE, OPS };

static const struct {
    const char *prefix, *name;
} ops[OPS] = {
    [OP_CROSS_ENTROPY] = {"cross_entropy", "Cross entropy"},
    [OP_LCE] = {"lce", "Linear cross entropy"},
    [OP_LOGSUMEXP] = {"logsumexp", "Logsumexp"},
    [OP_ACT] = {"act", "Activation"},
    [OP_LRPE] = {"lrpe_cosine", "LRPE-cosine"},
    [OP_SCALE] = {"scale", "Scale"},
};

static const struct {
    const char *mode, *name;
} modes[] = {{"fwd", "forward"}, {"bwd", "backward"}, {"fwd+bwd", "forward and backward"}};

static const struct {
    const char *act, *name;
} acts[] = {{"none", "no activation"}, {"relu", "ReLU"},       {"sigmoid", "sigmoid"},
            {"silu", "SiLU"},          {"softmax", "softmax"}, {"gelu", "GELU"}};

/* A title's parts after op, metric and mode; "" where it has none. */
struct parts {
    char batch[24], head[24], dim[24], vocab[24], act[24], softmax_dim[24];
    char rest[128]; /* all others, each after ", " */
};

static bool starts(const char *text, const char *with) {
    return strncmp(text, with, strlen(with)) == 0;
}

/* Takes "batch4096" as "4096". */
static bool take(char to[24], const char *token, const char *key) {
    const char *const value = token + strlen(key);
    if (!starts(token, key) || *value < '0' || *value > '9')
        return false;
    snprintf(to, 24, "%.23s", value);
    return true;
}

/* Appends, cut to the size. */
static void add(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void add(char *text, size_t size, const char *format, ...) {
    const size_t used = strlen(text);
    va_list values;
    va_start(values, format);
    vsnprintf(text + used, size - used, format, values);
    va_end(values);
}

static void take_token(struct parts *p, const char *token) {
    if (take(p->batch, token, "batch") || take(p->head, token, "head") || take(p->dim, token, "dim") ||
        take(p->vocab, token, "vocab") || strcmp(token, "ls0.0") == 0 || strcmp(token, "mean") == 0)
        return; /* no smoothing, and a mean: the usual loss */
    if (starts(token, "act_")) {
        snprintf(p->act, sizeof p->act, "%.23s", token + 4);
        return;
    }
    if (starts(token, "dim_")) {
        snprintf(p->softmax_dim, sizeof p->softmax_dim, "%.23s", token + 4);
        return;
    }
    add(p->rest, sizeof p->rest, ", ");
    for (const char *c = token; *c; c++) /* "label_smoothing0.1" is "label smoothing 0.1" */
        if (*c == '_')
            add(p->rest, sizeof p->rest, " ");
        else if (*c >= '0' && *c <= '9' && c > token && c[-1] >= 'a' && c[-1] <= 'z' &&
                 !strstr("bf16 fp16 fp32", token))
            add(p->rest, sizeof p->rest, " %c", *c);
        else
            add(p->rest, sizeof p->rest, "%c", *c);
}

/* A hyphen ends a token, but for that of a negative dimension: "dim_-1". */
static void split(struct parts *p, const char *text) {
    while (*text) {
        size_t length = strcspn(text, "-");
        if (length > 0 && text[length - 1] == '_' && text[length] == '-')
            length += 1 + strcspn(text + length + 1, "-");
        char token[64];
        snprintf(token, sizeof token, "%.*s", (int)(length < 63 ? length : 63), text);
        take_token(p, token);
        text += length + (text[length] == '-');
    }
}

static const char *softmax_dimension(enum op op, const struct parts *p) {
    if (strcmp(p->softmax_dim, "-1") == 0)
        return op == OP_LRPE ? " over features" : " over the last dimension";
    if (strcmp(p->softmax_dim, "-2") == 0 || strcmp(p->softmax_dim, "1") == 0)
        return " over the sequence";
    return "";
}

/* "SiLU", "Softmax over the sequence"; "LRPE-cosine with SiLU". */
static void add_op(char *text, size_t size, enum op op, const struct parts *p) {
    const char *act = p->act;
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
        if (strcmp(p->act, acts[i].act) == 0)
            act = acts[i].name;
    if (!act[0] || (op == OP_LRPE && strcmp(p->act, "none") == 0))
        add(text, size, "%s", ops[op].name);
    else if (op == OP_LRPE)
        add(text, size, "%s with %s%s", ops[op].name, act, softmax_dimension(op, p));
    else
        add(text, size, "%c%s%s", act[0] >= 'a' && act[0] <= 'z' ? act[0] - 'a' + 'A' : act[0], act + 1,
            softmax_dimension(op, p));
}

static void add_sizes(char *text, size_t size, enum op op, const struct parts *p) {
    if (op == OP_ACT && p->batch[0])
        add(text, size, ", [%s, %s, n, %s]", p->batch, p->head, p->dim);
    else if (op == OP_LRPE && p->batch[0])
        add(text, size, ", [%s, n, %s, %s]", p->batch, p->head, p->dim);
    else if (op == OP_LOGSUMEXP && p->batch[0])
        add(text, size, ", [%s, %s, n]", p->batch, p->dim);
    else if (op == OP_SCALE && p->dim[0])
        add(text, size, ", [n, %s]", p->dim);
    else if (op == OP_CROSS_ENTROPY || op == OP_LCE) {
        if (p->batch[0])
            add(text, size, ", %s %s", p->batch, op == OP_LCE ? "tokens" : "rows");
        if (p->dim[0])
            add(text, size, ", D = %s", p->dim);
        if (p->vocab[0])
            add(text, size, ", %s classes", p->vocab);
    }
}

/* The op of a title whose prefix is followed by its metric; OPS: none. `rest` is what follows the metric. */
static enum op op_of(const struct table *t, const char **rest) {
    for (int op = 0; op < OPS; op++) {
        const size_t length = strlen(ops[op].prefix), metric = strlen(metric_names[t->metric]);
        const char *const after = t->title + length;
        if (!starts(t->title, ops[op].prefix) || *after != '-' || !starts(after + 1, metric_names[t->metric]) ||
            after[1 + metric] != '-')
            continue;
        *rest = after + metric + 2;
        return (enum op)op;
    }
    return OPS;
}

struct table_name table_name(const struct table *t) {
    struct table_name name = {.text = ""};
    const char *rest = "";
    const enum op op = op_of(t, &rest);
    const size_t length = strcspn(rest, "-");
    for (size_t i = 0; op < OPS && i < sizeof modes / sizeof *modes; i++)
        if (strlen(modes[i].mode) == length && starts(rest, modes[i].mode))
            snprintf(name.mode, sizeof name.mode, "%s", modes[i].name);
    if (!name.mode[0]) {
        snprintf(name.text, sizeof name.text, "%s", t->title);
        return name;
    }
    struct parts parts = {.batch = ""};
    split(&parts, rest + length + (rest[length] == '-'));
    snprintf(name.op, sizeof name.op, "%s", ops[op].name);
    add_op(name.text, sizeof name.text, op, &parts);
    add(name.text, sizeof name.text, ", %s", name.mode);
    add_sizes(name.text, sizeof name.text, op, &parts);
    add(name.text, sizeof name.text, "%s", parts.rest);
    return name;
}

const char *x_meaning(const struct table *t) {
    const char *rest;
    const enum op op = op_of(t, &rest);
    if (t->map[0])
        return t->map;
    if (strcmp(t->x_name, "v") == 0)
        return "classes";
    if (strcmp(t->x_name, "b") == 0)
        return "tokens";
    if (strcmp(t->x_name, "d") == 0)
        return "hidden size D";
    if (strcmp(t->x_name, "n") != 0)
        return "";
    return op == OP_LOGSUMEXP ? "length of a row" : op == OP_SCALE ? "rows" : "sequence length";
}

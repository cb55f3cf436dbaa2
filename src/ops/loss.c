/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/loss.h"

#include <math.h>
#include <string.h>

#include "core/fp.h"
#include "core/threads.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static rafter_status check_options(rafter_context *context, const rafter_loss_options *given, rafter_loss_options *o,
                                   struct rafter_loss *loss) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    *o = (rafter_loss_options){.size = sizeof *o};
    if (given)
        RAFTER_TRY(rafter_take_args(context, "rafter_loss_options", given, o, sizeof *o));
    if ((unsigned)o->reduction > RAFTER_NONE)
        return rafter_fail(context, bad, "options.reduction is %d, wanted RAFTER_MEAN, RAFTER_SUM or RAFTER_NONE",
                           (int)o->reduction);
    if ((unsigned)o->zero_if_all_ignored > 1)
        return rafter_fail(context, bad, "options.zero_if_all_ignored is %d, wanted 0 or 1",
                           (int)o->zero_if_all_ignored);
    if (!(o->label_smoothing >= 0.0f && o->label_smoothing <= 1.0f))
        return rafter_fail(context, bad, "options.label_smoothing is %g, wanted 0 to 1", (double)o->label_smoothing);
    if (!isfinite(o->z_loss))
        return rafter_fail(context, bad, "options.z_loss is %g, wanted a finite number", (double)o->z_loss);
    if (!(o->softcap >= 0.0f && isfinite(o->softcap)))
        return rafter_fail(context, bad, "options.softcap is %g, wanted a positive number, or 0 for none",
                           (double)o->softcap);
    if (!(o->logit_scale >= 0.0f && isfinite(o->logit_scale)))
        return rafter_fail(context, bad, "options.logit_scale is %g, wanted a positive number, or 0 for 1",
                           (double)o->logit_scale);
    if (o->denominator && o->reduction != RAFTER_MEAN)
        return rafter_fail(context, bad, "options.denominator is given with options.reduction %s, wanted RAFTER_MEAN",
                           o->reduction == RAFTER_SUM ? "RAFTER_SUM" : "RAFTER_NONE");
    loss->reduction = o->reduction;
    loss->zero_if_all_ignored = o->zero_if_all_ignored;
    loss->ignore_index = o->ignore_index ? *o->ignore_index : -100;
    loss->smoothing = o->label_smoothing;
    loss->z_loss = o->z_loss;
    loss->softcap = o->softcap;
    loss->scale = o->logit_scale != 0.0f ? o->logit_scale : 1.0f;
    return RAFTER_OK;
}

rafter_status rafter_loss_begin(rafter_context *context, const rafter_loss_options *options) {
    if (!options)
        return RAFTER_OK;
    rafter_loss_options o;
    rafter_communicator group;
    RAFTER_TRY(rafter_take_args(context, "rafter_loss_options", options, &o, sizeof o));
    RAFTER_TRY(rafter_group_take(context, "options.class_group", o.class_group, true, &group));
    return rafter_group_take(context, "options.row_group", o.row_group, false, &group);
}

/* Takes the groups, and this rank's classes among those of all ranks. */
static rafter_status take_groups(rafter_context *context, const rafter_loss_options *o, struct rafter_loss *loss) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    loss->all_classes = loss->classes;
    if (o->row_group)
        RAFTER_TRY(rafter_group_take(context, "options.row_group", o->row_group, false, &loss->row_group));
    if (!o->class_group) {
        if (o->first_class != 0 || o->classes != 0)
            return rafter_fail(context, bad, "options.%s is %lld without options.class_group, wanted 0",
                               o->first_class ? "first_class" : "classes",
                               (long long)(o->first_class ? o->first_class : o->classes));
        return RAFTER_OK;
    }
    RAFTER_TRY(rafter_group_take(context, "options.class_group", o->class_group, true, &loss->class_group));
    if (o->classes < 0 || o->classes > RAFTER_MOST_ELEMENTS)
        return rafter_fail(context, bad, "options.classes is %lld, wanted 0 to 2^47", (long long)o->classes);
    if (o->first_class < 0 || o->first_class > o->classes - loss->classes)
        return rafter_fail(context, bad,
                           "options.first_class is %lld, wanted 0 to %lld: this rank has %lld of %lld classes",
                           (long long)o->first_class, (long long)(o->classes - loss->classes), (long long)loss->classes,
                           (long long)o->classes);
    loss->all_classes = o->classes;
    loss->first_class = o->first_class;
    return RAFTER_OK;
}

/* A tensor of the loss, for checks over all of them. */
struct named {
    const char *name;
    const rafter_view *view;
    bool output;
};
enum { TENSORS = 12 };

static void list_tensors(const struct rafter_loss *loss, struct named list[TENSORS]) {
    const struct named all[TENSORS] = {
        {"loss", &loss->loss, true},
        {"row_loss", &loss->row_loss, true},
        {"lse", &loss->lse, loss->direction == RAFTER_FORWARD},
        {"logprob", &loss->logprob, true},
        {"entropy", &loss->entropy, loss->direction == RAFTER_FORWARD},
        {"argmax", &loss->argmax, true},
        {"target", &loss->target, false},
        {"dloss", &loss->dloss, false},
        {"dentropy", &loss->dentropy, false},
        {"options.row_weight", &loss->row_weight, false},
        {"options.class_weight", &loss->class_weight, false},
        {"options.denominator", &loss->denominator, false},
    };
    memcpy(list, all, sizeof all);
}

/* Takes an optional tensor. */
static rafter_status take(rafter_context *context, const char *name, const DLTensor *tensor, bool output,
                          unsigned dtypes, rafter_view *view) {
    if (!tensor)
        return RAFTER_OK;
    return (output ? rafter_take_output : rafter_take_tensor)(context, name, tensor, dtypes, view);
}

static rafter_status take_scalar(rafter_context *context, const char *name, const DLTensor *tensor, bool output,
                                 rafter_view *view) {
    if (!tensor)
        return RAFTER_OK;
    RAFTER_TRY(take(context, name, tensor, output, RAFTER_SET(RAFTER_F32), view));
    if (view->numel != 1)
        return rafter_want_shape(context, name, view, 0, NULL);
    view->ndim = 0;
    return RAFTER_OK;
}

rafter_status rafter_loss_take(rafter_context *context, const struct rafter_loss_args *args, rafter_direction direction,
                               const char *rows_name, int ndim, const int64_t *shape, int64_t classes,
                               struct rafter_loss *loss) {
    RAFTER_QUIET_FP;
    *loss = (struct rafter_loss){.direction = direction, .classes = classes};
    rafter_loss_options o;
    RAFTER_TRY(check_options(context, args->options, &o, loss));
    RAFTER_TRY(take_groups(context, &o, loss));

    const unsigned f32 = RAFTER_SET(RAFTER_F32);
    RAFTER_TRY(rafter_take_tensor(context, "target", args->target, RAFTER_INTS, &loss->target));
    if (loss->target.ndim != ndim || memcmp(loss->target.shape, shape, (size_t)ndim * sizeof *shape) != 0) {
        rafter_view rows = {.ndim = ndim};
        memcpy(rows.shape, shape, (size_t)ndim * sizeof *shape);
        return rafter_want_same_shape(context, "target", &loss->target, rows_name, &rows);
    }
    loss->rows = loss->target.numel;

    const bool forward = direction == RAFTER_FORWARD;
    const struct {
        const char *name;
        const DLTensor *tensor;
        bool output;
        unsigned dtypes;
        rafter_view *view;
    } per_row[] = {
        {"options.row_weight", o.row_weight, false, f32, &loss->row_weight},
        {"lse", args->lse, forward, f32, &loss->lse},
        {"row_loss", forward ? args->row_loss : NULL, true, f32, &loss->row_loss},
        {"logprob", forward ? args->logprob : NULL, true, f32, &loss->logprob},
        {"entropy", forward || args->dentropy ? args->entropy : NULL, forward, f32, &loss->entropy},
        {"dentropy", args->dentropy, false, f32, &loss->dentropy},
        {"argmax", forward ? args->argmax : NULL, true, RAFTER_INTS, &loss->argmax},
        {"loss", forward && o.reduction == RAFTER_NONE ? args->loss : NULL, true, f32, &loss->loss},
        {"dloss", o.reduction == RAFTER_NONE ? args->dloss : NULL, false, f32, &loss->dloss},
    };
    for (size_t i = 0; i < sizeof per_row / sizeof *per_row; i++)
        if (per_row[i].tensor) {
            RAFTER_TRY(take(context, per_row[i].name, per_row[i].tensor, per_row[i].output, per_row[i].dtypes,
                            per_row[i].view));
            RAFTER_TRY(rafter_want_same_shape(context, per_row[i].name, per_row[i].view, "target", &loss->target));
        }
    if (o.reduction != RAFTER_NONE) {
        if (forward)
            RAFTER_TRY(take_scalar(context, "loss", args->loss, true, &loss->loss));
        RAFTER_TRY(take_scalar(context, "dloss", args->dloss, false, &loss->dloss));
    }
    RAFTER_TRY(take_scalar(context, "options.denominator", o.denominator, false, &loss->denominator));
    if (o.class_weight) {
        RAFTER_TRY(rafter_take_tensor(context, "options.class_weight", o.class_weight, f32, &loss->class_weight));
        RAFTER_TRY(rafter_want_shape(context, "options.class_weight", &loss->class_weight, 1, &loss->all_classes));
    }
    if (loss->argmax.dtype == RAFTER_I32 && rafter_loss_has(&loss->argmax) && loss->all_classes - 1 > INT32_MAX)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "argmax has dtype int32, wanted int64 for %lld classes",
                           (long long)loss->all_classes);

    if (rafter_group_has(&loss->class_group) && rafter_loss_has(&loss->argmax) && loss->all_classes - 1 > INT32_MAX)
        return rafter_fail(context, RAFTER_UNSUPPORTED,
                           "argmax is wanted of %lld classes, wanted at most 2^31 with options.class_group",
                           (long long)loss->all_classes);

    struct named all[TENSORS];
    list_tensors(loss, all);
    for (int i = 0; i < TENSORS; i++)
        for (int j = 0; j < TENSORS && all[i].output; j++)
            if (j > i || !all[j].output)
                RAFTER_TRY(rafter_want_disjoint(context, all[i].name, all[i].view, all[j].name, all[j].view));

    rafter_view *const rows[] = {&loss->target,  &loss->row_weight, &loss->dloss,    &loss->dentropy, &loss->lse,
                                 &loss->entropy, &loss->loss,       &loss->row_loss, &loss->logprob,  &loss->argmax};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        rafter_collapse(&rows[i], 1, 0, rows[i]->ndim);
    return RAFTER_OK;
}

rafter_status rafter_loss_want_disjoint(rafter_context *context, const struct rafter_loss *loss, const char *name,
                                        const rafter_view *view, bool output) {
    struct named all[TENSORS];
    list_tensors(loss, all);
    for (int i = 0; i < TENSORS; i++) {
        if (output)
            RAFTER_TRY(rafter_want_disjoint(context, name, view, all[i].name, all[i].view));
        else if (all[i].output)
            RAFTER_TRY(rafter_want_disjoint(context, all[i].name, all[i].view, name, view));
    }
    return RAFTER_OK;
}

/* ---- elements -------------------------------------------------------------------------------- */

static char *at(const rafter_view *view, int64_t row) {
    return rafter_at(view, rafter_offset(view, 0, view->ndim, row));
}

static float get(const rafter_view *view, int64_t row) {
    float value;
    memcpy(&value, at(view, row), sizeof value);
    return value;
}

/* Writes one element of an optional output. */
static void put(const rafter_view *view, int64_t row, double value) {
    const float rounded = (float)value;
    if (rafter_loss_has(view))
        memcpy(at(view, row), &rounded, sizeof rounded);
}

/* Whether the elements follow one another. */
static bool in_sequence(const rafter_view *view) {
    return view->ndim == 1 && (view->stride[0] == 1 || view->shape[0] <= 1);
}

static int64_t raw_label(const struct rafter_loss *loss, int64_t row) {
    const char *p = at(&loss->target, row);
    int32_t narrow;
    int64_t wide;
    if (loss->target.dtype == RAFTER_I64) {
        memcpy(&wide, p, sizeof wide);
        return wide;
    }
    memcpy(&narrow, p, sizeof narrow);
    return narrow;
}

int64_t rafter_loss_label(const struct rafter_loss *loss, int64_t row) {
    const int64_t label = raw_label(loss, row);
    return label == loss->ignore_index ? -1 : label;
}

bool rafter_loss_needs_statistics(const struct rafter_loss *loss) {
    return loss->direction == RAFTER_FORWARD || !rafter_loss_has(&loss->lse) ||
           (rafter_loss_has(&loss->dentropy) && !rafter_loss_has(&loss->entropy));
}

float rafter_loss_given_lse(const struct rafter_loss *loss, int64_t row) {
    return get(&loss->lse, row);
}

float rafter_loss_class_weight(const struct rafter_loss *loss, int64_t label) {
    return rafter_loss_has(&loss->class_weight) ? get(&loss->class_weight, label) : 1.0f;
}

/* 1 unless the label is ignored, then 0. Signs and shifts instead of comparisons: every instruction
 * set has vectors of these. */
static uint64_t counts(uint64_t label, int64_t ignored) {
    const uint64_t difference = label ^ (uint64_t)ignored;
    return (difference | (0 - difference)) >> 63;
}

void rafter_loss_labels(const struct rafter_loss *loss, int64_t first, int64_t n, int32_t *labels) {
    if (loss->target.dtype == RAFTER_I64 && in_sequence(&loss->target)) {
        const char *const from = at(&loss->target, first);
        for (int64_t i = 0; i < n; i++) {
            uint64_t label;
            memcpy(&label, from + i * 8, sizeof label);
            labels[i] = (int32_t)(uint32_t)(label | (counts(label, loss->ignore_index) - 1));
        }
    } else {
        for (int64_t i = 0; i < n; i++)
            labels[i] = (int32_t)rafter_loss_label(loss, first + i);
    }
}

void rafter_loss_load_rows(const rafter_view *view, int64_t first, int64_t n, float *values) {
    if (!rafter_loss_has(view) || view->numel == 1) {
        const float all = rafter_loss_has(view) ? get(view, 0) : 1.0f;
        for (int64_t i = 0; i < n; i++)
            values[i] = all;
    } else if (in_sequence(view)) {
        memcpy(values, at(view, first), (size_t)n * sizeof *values);
    } else {
        for (int64_t i = 0; i < n; i++)
            values[i] = get(view, first + i);
    }
}

void rafter_loss_store_rows(const rafter_view *view, int64_t first, int64_t n, const float *values) {
    if (!rafter_loss_has(view))
        return;
    if (in_sequence(view))
        memcpy(at(view, first), values, (size_t)n * sizeof *values);
    else
        for (int64_t i = 0; i < n; i++)
            put(view, first + i, (double)values[i]);
}

static void put_index(const rafter_view *view, int64_t row, int64_t index) {
    const int32_t narrow = (int32_t)index;
    if (view->dtype == RAFTER_I64)
        memcpy(at(view, row), &index, sizeof index);
    else
        memcpy(at(view, row), &narrow, sizeof narrow);
}

void rafter_loss_store_argmax(const struct rafter_loss *loss, int64_t first, int64_t n, const int32_t *index) {
    const rafter_view *const view = &loss->argmax;
    if (!rafter_loss_has(view))
        return;
    if (view->dtype == RAFTER_I64 && in_sequence(view)) {
        char *const to = at(view, first);
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * 8, &(int64_t){index[i]}, 8);
    } else {
        for (int64_t i = 0; i < n; i++)
            put_index(view, first + i, index[i]);
    }
}

/* ---- labels ---------------------------------------------------------------------------------- */

enum { READ_ROWS = 1 << 14, READ_TASKS = 256 }; /* rows per task, at least; tasks, at most */

/* The labels that one task has read. */
struct labels_read {
    int64_t counted, first_bad; /* first_bad: the row of the first label out of range, or -1 */
    double weight;
};

struct reading {
    const struct rafter_loss *loss;
    int64_t per_task;
    struct labels_read part[READ_TASKS];
};

/* Returns how many of n int64 labels in sequence are not ignored. *bad: how many of those are out of range. */
static int64_t count_labels(const char *from, int64_t n, int64_t classes, int64_t ignored, int64_t *bad) {
    uint64_t counted = 0, out = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t label;
        memcpy(&label, from + i * 8, sizeof label);
        counted += counts(label, ignored);
        out += ((label | ((uint64_t)classes - 1 - label)) >> 63) & counts(label, ignored);
    }
    *bad = (int64_t)out;
    return (int64_t)counted;
}

/* The sum of the class weights of n int64 labels in sequence, each of which is ignored or in range. Several sums hide
 * the latency of the adds. */
static double add_label_weights(const struct rafter_loss *loss, const char *from, int64_t n) {
    enum { SUMS = 4 };
    const char *const weights = loss->class_weight.data;
    const int64_t step = loss->class_weight.stride[0] * (int64_t)sizeof(float);
    double sum[SUMS] = {0};
    for (int64_t i = 0; i < n; i++) {
        uint64_t label;
        memcpy(&label, from + i * 8, sizeof label);
        const uint64_t counted = counts(label, loss->ignore_index);
        uint32_t bits; /* of the weight; an ignored label has those of 0, without a branch that would be mispredicted */
        float weight;
        memcpy(&bits, weights + (int64_t)(label & (0 - counted)) * step, sizeof bits);
        bits &= 0 - (uint32_t)counted;
        memcpy(&weight, &bits, sizeof weight);
        sum[i % SUMS] += (double)weight;
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static void read_task(void *arg, int64_t task) {
    struct reading *const reading = arg;
    const struct rafter_loss *const loss = reading->loss;
    const int64_t first = task * reading->per_task;
    const int64_t end = first + reading->per_task < loss->rows ? first + reading->per_task : loss->rows;
    struct labels_read read = {.counted = 0, .first_bad = -1};
    if (loss->target.dtype == RAFTER_I64 && in_sequence(&loss->target)) {
        const char *const labels = at(&loss->target, first);
        int64_t bad;
        read.counted = count_labels(labels, end - first, loss->all_classes, loss->ignore_index, &bad);
        if (bad == 0) {
            read.weight = (double)read.counted;
            if (rafter_loss_has(&loss->class_weight) && read.counted > 0) /* so there is a class */
                read.weight = add_label_weights(loss, labels, end - first);
            reading->part[task] = read;
            return;
        }
        read = (struct labels_read){.counted = 0, .first_bad = -1}; /* again, to find the first bad one */
    }
    for (int64_t row = first; row < end && read.first_bad < 0; row++) {
        const int64_t label = raw_label(loss, row);
        if (label == loss->ignore_index)
            continue;
        if (label < 0 || label >= loss->all_classes) {
            read.first_bad = row;
            break;
        }
        read.counted++;
        read.weight += (double)rafter_loss_class_weight(loss, label);
    }
    reading->part[task] = read;
}

double rafter_loss_denominator(const struct rafter_loss *loss) {
    if (loss->reduction != RAFTER_MEAN)
        return 1.0;
    return rafter_loss_has(&loss->denominator) ? (double)get(&loss->denominator, 0) : loss->label_weight;
}

/* The sum over all classes. Several sums hide the latency of the adds. */
static double sum_class_weights(const struct rafter_loss *loss) {
    double sum[4] = {0.0, 0.0, 0.0, 0.0};
    int64_t v = 0;
    for (; v + 4 <= loss->all_classes; v += 4)
        for (int k = 0; k < 4; k++)
            sum[k] += (double)get(&loss->class_weight, v + k);
    for (; v < loss->all_classes; v++)
        sum[0] += (double)get(&loss->class_weight, v);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

rafter_status rafter_loss_read(rafter_context *context, struct rafter_loss *loss) {
    RAFTER_QUIET_FP;
    struct reading reading = {.loss = loss, .per_task = READ_ROWS};
    if (loss->rows > READ_ROWS * READ_TASKS)
        reading.per_task = (loss->rows + READ_TASKS - 1) / READ_TASKS;
    const int64_t tasks = (loss->rows + reading.per_task - 1) / reading.per_task;
    rafter_parallel(context, tasks, read_task, &reading);
    loss->counted = 0;
    loss->label_weight = 0.0;
    for (int64_t task = 0; task < tasks; task++) {
        const struct labels_read *const read = &reading.part[task];
        if (read->first_bad >= 0)
            return rafter_fail(context, RAFTER_LABEL_OUT_OF_RANGE,
                               "the target of row %lld is %lld, wanted 0 to %lld (V = %lld) or ignore_index, %lld",
                               (long long)read->first_bad, (long long)raw_label(loss, read->first_bad),
                               (long long)loss->all_classes - 1, (long long)loss->all_classes,
                               (long long)loss->ignore_index);
        loss->counted += read->counted;
        loss->label_weight += read->weight;
    }
    loss->mean_denominator = rafter_loss_denominator(loss);

    loss->class_weight_sum = (double)loss->all_classes;
    /* Label smoothing needs it, and ranks compare theirs. */
    const bool shared = rafter_group_has(&loss->class_group) || rafter_group_has(&loss->row_group);
    if (rafter_loss_has(&loss->class_weight) && (loss->smoothing != 0.0f || shared))
        loss->class_weight_sum = sum_class_weights(loss);
    return RAFTER_OK;
}

/* ---- rows ------------------------------------------------------------------------------------ */

const struct rafter_row_stats rafter_row_empty = {.max = -INFINITY, .best = -INFINITY, .argmax = -1};

struct rafter_row_stats rafter_row_merge(const struct rafter_row_stats *a, const struct rafter_row_stats *b) {
    struct rafter_row_stats m = *a;
    m.max = a->max > b->max ? a->max : b->max;
    m.logit_sum = a->logit_sum + b->logit_sum;
    m.target = a->target + b->target;
    m.sum = m.moment = 0.0;
    const struct rafter_row_stats *const parts[] = {a, b};
    for (int i = 0; i < 2; i++) {
        /* A part of all -inf has a sum of 0, and needs no shift. In other parts an infinite shift
         * comes with a NaN in one of the sums. */
        const double shift = parts[i]->max == m.max || parts[i]->sum == 0.0 ? 0.0 : parts[i]->max - m.max;
        const double shrink = shift == 0.0 ? 1.0 : exp(shift);
        m.sum += parts[i]->sum * shrink;
        m.moment += (parts[i]->moment + shift * parts[i]->sum) * shrink;
    }
    if (a->argmax < 0 || b->best > a->best || (isnan(b->best) && !isnan(a->best))) {
        m.best = b->best;
        m.argmax = b->argmax;
    }
    return m;
}

double rafter_row_lse(const struct rafter_row_stats *stats) {
    return stats->max + log(stats->sum);
}

/* Rounding may push a sum of non-negative terms below 0. NaN stays NaN. */
static double non_negative(double value) {
    return value < 0.0 ? 0.0 : value;
}

static float row_weight(const struct rafter_loss *loss, int64_t row) {
    return rafter_loss_has(&loss->row_weight) ? get(&loss->row_weight, row) : 1.0f;
}

double rafter_loss_write_row(const struct rafter_loss *loss, int64_t row, int64_t label,
                             const struct rafter_row_stats *stats) {
    double value = 0.0, lse = 0.0, nll = 0.0, entropy = 0.0;
    int64_t argmax = -1;
    if (label >= 0) {
        const double s = (double)loss->smoothing, log_sum = log(stats->sum);
        lse = stats->max + log_sum;
        nll = non_negative((stats->max - stats->target) + log_sum); /* r - u_y; r itself may lose the logarithm */
        value = (1.0 - s) * (double)rafter_loss_class_weight(loss, label) * nll;
        if (s != 0.0)
            value += s / (double)loss->all_classes *
                     ((stats->max * loss->class_weight_sum - stats->logit_sum) + log_sum * loss->class_weight_sum);
        if (loss->z_loss != 0.0f)
            value += (double)loss->z_loss * lse * lse;
        value *= (double)row_weight(loss, row);
        entropy = non_negative(log_sum - stats->moment / stats->sum);
        argmax = stats->argmax;
    }
    if (loss->reduction == RAFTER_NONE)
        put(&loss->loss, row, value);
    put(&loss->row_loss, row, value);
    put(&loss->lse, row, lse);
    put(&loss->logprob, row, 0.0 - nll);
    put(&loss->entropy, row, entropy);
    if (rafter_loss_has(&loss->argmax))
        put_index(&loss->argmax, row, argmax);
    return value;
}

void rafter_loss_write(const struct rafter_loss *loss, double sum) {
    if (loss->reduction == RAFTER_NONE)
        return;
    const bool nothing = loss->reduction == RAFTER_MEAN && loss->counted == 0 && loss->zero_if_all_ignored;
    put(&loss->loss, 0, nothing ? 0.0 : sum / loss->mean_denominator);
}

/* The coefficients of a row whose softmax is share * e^(u - pivot). lse: r, for the derivative of
 * z_loss * r^2. surprise: log(share) + entropy, only read with dentropy. */
static struct rafter_row_gradient gradient(const struct rafter_loss *loss, int64_t row, int64_t label, double pivot,
                                           double share, double lse, double surprise) {
    const double dloss = rafter_loss_has(&loss->dloss) ? (double)get(&loss->dloss, row) : 1.0;
    const double upstream = dloss * (double)row_weight(loss, row) / loss->mean_denominator * (double)loss->scale;
    const double spread = (double)loss->smoothing / (double)loss->all_classes;
    const double target = (1.0 - (double)loss->smoothing) * (double)rafter_loss_class_weight(loss, label);
    double whole = target + spread * loss->class_weight_sum;
    if (loss->z_loss != 0.0f)
        whole += 2.0 * (double)loss->z_loss * lse;
    struct rafter_row_gradient g = {.pivot = (float)pivot,
                                    .p = upstream * whole * share,
                                    .target = upstream * target,
                                    .spread = upstream * spread,
                                    .level = 1.0};
    if (rafter_loss_has(&loss->dentropy)) {
        const double h = (double)get(&loss->dentropy, row) * (double)loss->scale;
        g.p = share;
        g.level = upstream * whole - h * surprise;
        g.tilt = -h;
    }
    return g;
}

static const struct rafter_row_gradient no_gradient = {.zero = true};

struct rafter_row_gradient rafter_loss_gradient(const struct rafter_loss *loss, int64_t row, int64_t label,
                                                const struct rafter_row_stats *stats) {
    if (label < 0 || stats->sum == 0.0)
        return no_gradient;
    /* log(share) = -log(sum), and the entropy is log(sum) - moment / sum. */
    return gradient(loss, row, label, stats->max, 1.0 / stats->sum, rafter_row_lse(stats), -stats->moment / stats->sum);
}

struct rafter_row_gradient rafter_loss_gradient_from_lse(const struct rafter_loss *loss, int64_t row, int64_t label,
                                                         float lse) {
    if (label < 0 || lse == -INFINITY)
        return no_gradient;
    const double entropy = rafter_loss_has(&loss->dentropy) ? (double)get(&loss->entropy, row) : 0.0;
    return gradient(loss, row, label, (double)lse, 1.0, (double)lse, entropy);
}

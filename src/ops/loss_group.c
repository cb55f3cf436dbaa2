/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/loss_group.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"

static const char class_group[] = "options.class_group", row_group[] = "options.row_group";

/* ---- agreement ------------------------------------------------------------------------------- */

/* The terms of a tender (core/group.h): name, the groups whose ranks must have the same value, words for messages. */
enum { IN_CLASSES = 1, IN_ROWS = 2, IN_BOTH = 3 };
#define TERMS(X)                                                                                                       \
    X(OP, IN_BOTH, "the op")                                                                                           \
    X(DIRECTION, IN_BOTH, "the direction")                                                                             \
    X(DTYPE, IN_BOTH, "the dtype")                                                                                     \
    X(ROWS, IN_CLASSES, "the number of rows")                                                                          \
    X(CLASSES, IN_BOTH, "the number of classes")                                                                       \
    X(DEPTH, IN_BOTH, "D")                                                                                             \
    X(REDUCTION, IN_BOTH, "reduction")                                                                                 \
    X(IGNORE_INDEX, IN_BOTH, "ignore_index")                                                                           \
    X(ZERO_IF_ALL_IGNORED, IN_BOTH, "zero_if_all_ignored")                                                             \
    X(SMOOTHING, IN_BOTH, "label_smoothing")                                                                           \
    X(Z_LOSS, IN_BOTH, "z_loss")                                                                                       \
    X(SOFTCAP, IN_BOTH, "softcap")                                                                                     \
    X(SCALE, IN_BOTH, "logit_scale")                                                                                   \
    X(CLASS_WEIGHT, IN_BOTH, "the sum of class_weight")                                                                \
    X(DENOMINATOR, IN_BOTH, "denominator")                                                                             \
    X(LABELS, IN_CLASSES, "a hash of the labels")                                                                      \
    X(RECORD, IN_CLASSES, "the bytes of statistics per row")                                                           \
    X(DX, IN_CLASSES, "dx (0: not wanted, 1: all rows, 2: a share)")                                                   \
    X(FIRST, 0, NULL)                                                                                                  \
    X(OWN, 0, NULL)                                                                                                    \
    X(COUNTED, 0, NULL)                                                                                                \
    X(WEIGHT, 0, NULL)

enum term {
#define X(name, groups, words) TERM_##name,
    TERMS(X)
#undef X
        TERM_COUNT
};
_Static_assert((int)TERM_COUNT <= (int)RAFTER_MOST_TERMS, "raise RAFTER_MOST_TERMS, and the bytes in rafter.h");

static void names_for(int group, const char *names[RAFTER_MOST_TERMS]) {
    static const struct {
        int groups;
        const char *words;
    } all[] = {
#define X(name, groups, words) {groups, words},
        TERMS(X)
#undef X
    };
    for (int t = 0; t < RAFTER_MOST_TERMS; t++)
        names[t] = t < (int)TERM_COUNT && (all[t].groups & group) ? all[t].words : NULL;
}

/* A hash of 52 bits, so that a double holds it. */
static double hash_labels(const struct rafter_loss *loss) {
    uint64_t hash = 1469598103934665603u;
    for (int64_t row = 0; row < loss->rows; row++)
        hash = (hash ^ (uint64_t)rafter_loss_label(loss, row)) * 1099511628211u;
    return (double)(hash >> 12);
}

static void fill_terms(const struct rafter_loss *loss, const struct rafter_loss_terms *given, double *term) {
    term[TERM_OP] = given->op;
    term[TERM_DIRECTION] = loss->direction;
    term[TERM_DTYPE] = given->dtype;
    term[TERM_ROWS] = (double)loss->rows;
    term[TERM_CLASSES] = (double)loss->all_classes;
    term[TERM_DEPTH] = (double)given->depth;
    term[TERM_REDUCTION] = loss->reduction;
    term[TERM_IGNORE_INDEX] = (double)loss->ignore_index;
    term[TERM_ZERO_IF_ALL_IGNORED] = loss->zero_if_all_ignored;
    term[TERM_SMOOTHING] = (double)loss->smoothing;
    term[TERM_Z_LOSS] = (double)loss->z_loss;
    term[TERM_SOFTCAP] = (double)loss->softcap;
    term[TERM_SCALE] = (double)loss->scale;
    term[TERM_CLASS_WEIGHT] = loss->class_weight_sum;
    term[TERM_DENOMINATOR] = rafter_loss_has(&loss->denominator) ? loss->mean_denominator : 0.0;
    term[TERM_LABELS] = rafter_group_has(&loss->class_group) ? hash_labels(loss) : 0.0;
    term[TERM_RECORD] = given->exchange ? (double)rafter_loss_record_bytes(loss) : 0.0;
    term[TERM_DX] = given->dx;
    term[TERM_FIRST] = (double)loss->first_class;
    term[TERM_OWN] = (double)loss->classes;
    term[TERM_COUNTED] = (double)loss->counted;
    term[TERM_WEIGHT] = loss->label_weight;
}

/* Fails unless the ranks' shards follow one another from class 0 to the last. */
static rafter_status check_shards(rafter_context *context, const struct rafter_loss *loss,
                                  const struct rafter_tender *all) {
    double next = 0.0;
    for (int r = 0; r < loss->class_group.ranks; r++) {
        const double first = all[r].term[TERM_FIRST], own = all[r].term[TERM_OWN];
        if (first != next)
            return rafter_fail(context, RAFTER_RANKS_DISAGREE,
                               "rank %d of options.class_group has %.0f classes from %.0f on, wanted from %.0f on, "
                               "where those of the ranks before it end",
                               r, own, first, next);
        next = first + own;
    }
    if (next != (double)loss->all_classes)
        return rafter_fail(context, RAFTER_RANKS_DISAGREE,
                           "the ranks of options.class_group have %.0f classes in all, wanted options.classes, %lld",
                           next, (long long)loss->all_classes);
    return RAFTER_OK;
}

double rafter_loss_add_weights(const struct rafter_loss *loss, double sum, int64_t from, int64_t to) {
    if (!rafter_loss_has(&loss->class_weight) || loss->smoothing == 0.0f)
        return sum + (double)(to - from);
    for (int64_t v = from; v < to; v++)
        sum += (double)rafter_loss_class_weight(loss, v);
    return sum;
}

static rafter_status agree_on_classes(rafter_context *context, struct rafter_loss *loss, rafter_status status,
                                      const double *term, struct rafter_tender *all, double *prefix) {
    const char *names[RAFTER_MOST_TERMS];
    names_for(IN_CLASSES, names);
    RAFTER_TRY(rafter_group_agree(context, class_group, &loss->class_group, status, term, names, all));
    RAFTER_TRY(check_shards(context, loss, all));
    prefix[0] = 0.0;
    for (int r = 0; r < loss->class_group.ranks; r++) {
        const int64_t first = (int64_t)all[r].term[TERM_FIRST], own = (int64_t)all[r].term[TERM_OWN];
        prefix[r + 1] = rafter_loss_add_weights(loss, prefix[r], first, first + own);
    }
    return RAFTER_OK;
}

static rafter_status agree_on_rows(rafter_context *context, struct rafter_loss *loss, rafter_status status,
                                   const double *term, struct rafter_tender *all) {
    const char *names[RAFTER_MOST_TERMS];
    names_for(IN_ROWS, names);
    RAFTER_TRY(rafter_group_agree(context, row_group, &loss->row_group, status, term, names, all));
    loss->counted = 0;
    loss->label_weight = 0.0;
    for (int r = 0; r < loss->row_group.ranks; r++) {
        loss->counted += (int64_t)all[r].term[TERM_COUNTED];
        loss->label_weight += all[r].term[TERM_WEIGHT];
    }
    loss->mean_denominator = rafter_loss_denominator(loss);
    return RAFTER_OK;
}

rafter_status rafter_loss_agree(rafter_context *context, struct rafter_loss *loss,
                                const struct rafter_loss_terms *terms, rafter_status status, double *prefix) {
    const int most = loss->class_group.ranks > loss->row_group.ranks ? loss->class_group.ranks : loss->row_group.ranks;
    double term[RAFTER_MOST_TERMS] = {0};
    struct rafter_tender *const all = malloc((size_t)most * sizeof *all);
    if (!all)
        return rafter_fail(context, RAFTER_OUT_OF_MEMORY, "no memory for what %d ranks say of their calls", most);
    fill_terms(loss, terms, term);
    if (rafter_group_has(&loss->class_group))
        status = agree_on_classes(context, loss, status, term, all, prefix);
    if (rafter_group_has(&loss->row_group))
        status = agree_on_rows(context, loss, status, term, all);
    free(all);
    return status;
}

/* ---- records --------------------------------------------------------------------------------- */

size_t rafter_loss_record_bytes(const struct rafter_loss *loss) {
    const bool more = loss->smoothing != 0.0f || rafter_loss_has(&loss->entropy) || rafter_loss_has(&loss->argmax) ||
                      rafter_loss_has(&loss->dentropy);
    return more ? sizeof(struct rafter_row_record) : offsetof(struct rafter_row_record, moment);
}

struct rafter_row_record rafter_row_record_of(const struct rafter_row_stats *stats, double weights) {
    struct rafter_row_record record = {.max = (float)stats->max,
                                       .sum = (float)stats->sum,
                                       .target = (float)stats->target,
                                       .moment = (float)stats->moment,
                                       .best = (float)stats->best,
                                       .argmax = (int32_t)(uint32_t)stats->argmax};
    record.sum_rest = (float)(stats->sum - (double)record.sum);
    record.deficit = (float)(isfinite(stats->max) ? stats->max * weights - stats->logit_sum : 0.0 - stats->logit_sum);
    return record;
}

struct rafter_row_stats rafter_row_stats_of(const struct rafter_row_record *record, double weights) {
    const double max = (double)record->max, deficit = (double)record->deficit;
    return (struct rafter_row_stats){.max = max,
                                     .sum = (double)record->sum + (double)record->sum_rest,
                                     .moment = (double)record->moment,
                                     .logit_sum = isfinite(max) ? max * weights - deficit : 0.0 - deficit,
                                     .target = (double)record->target,
                                     .best = (double)record->best,
                                     .argmax = record->argmax};
}

struct rafter_row_stats rafter_row_merge_tree(const char *parts, size_t stride, size_t bytes, const double *prefix,
                                              int64_t from, int64_t to) {
    if (to - from <= 0)
        return rafter_row_empty;
    const double weights = prefix[to] - prefix[from];
    struct rafter_row_record record = {.argmax = -1};
    if (to - from == 1) {
        memcpy(&record, parts + (size_t)from * stride, bytes);
    } else {
        const int64_t middle = from + (to - from) / 2;
        const struct rafter_row_stats a = rafter_row_merge_tree(parts, stride, bytes, prefix, from, middle);
        const struct rafter_row_stats b = rafter_row_merge_tree(parts, stride, bytes, prefix, middle, to);
        const struct rafter_row_stats merged = rafter_row_merge(&a, &b);
        record = rafter_row_record_of(&merged, weights);
    }
    return rafter_row_stats_of(&record, weights);
}

/* ---- exchange -------------------------------------------------------------------------------- */

size_t rafter_loss_exchange_bytes(const struct rafter_loss *loss, int64_t rows) {
    return (size_t)rows * rafter_loss_record_bytes(loss) * (size_t)(1 + loss->class_group.ranks);
}

void rafter_loss_put_record(const struct rafter_loss *loss, char *exchange, int64_t row,
                            const struct rafter_row_record *record) {
    const size_t bytes = rafter_loss_record_bytes(loss);
    memcpy(exchange + (size_t)row * bytes, record, bytes);
}

rafter_status rafter_loss_exchange(rafter_context *context, const struct rafter_loss *loss, char *exchange,
                                   int64_t rows) {
    const size_t bytes = (size_t)rows * rafter_loss_record_bytes(loss);
    return rafter_group_gather(context, class_group, &loss->class_group, exchange, exchange + bytes, bytes);
}

struct rafter_row_stats rafter_loss_merged(const struct rafter_loss *loss, const char *exchange, int64_t rows,
                                           int64_t row, const double *prefix) {
    const size_t bytes = rafter_loss_record_bytes(loss), all = (size_t)rows * bytes;
    return rafter_row_merge_tree(exchange + all + (size_t)row * bytes, all, bytes, prefix, 0, loss->class_group.ranks);
}

rafter_status rafter_loss_write_sum(rafter_context *context, const struct rafter_loss *loss, double sum) {
    const rafter_communicator *const group = &loss->row_group;
    if (rafter_group_has(group) && loss->reduction != RAFTER_NONE) {
        double *const all = malloc((size_t)group->ranks * sizeof *all);
        if (!all)
            return rafter_fail(context, RAFTER_OUT_OF_MEMORY, "no memory for the losses of %d ranks",
                               (int)group->ranks);
        const rafter_status status = rafter_group_gather(context, row_group, group, &sum, all, sizeof sum);
        sum = 0.0;
        for (int r = 0; r < group->ranks && status == RAFTER_OK; r++)
            sum += all[r];
        free(all);
        RAFTER_TRY(status);
    }
    rafter_loss_write(loss, sum);
    return RAFTER_OK;
}

rafter_status rafter_loss_run(rafter_context *context, const struct rafter_op *op, const struct rafter_call *call,
                              struct rafter_loss *loss) {
    const bool spread = context->cuda && rafter_group_has(&loss->row_group);
    if (spread)
        RAFTER_TRY(context->cuda->begin_rows(context, loss));
    RAFTER_TRY(rafter_run(context, op, call));
    return spread ? context->cuda->end_rows(context, loss) : RAFTER_OK;
}

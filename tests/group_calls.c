/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of ranks apart from the option grid (groups.c): ranks that disagree or fail, what goes over
 * the wire, guarantees about bits, and the mistakes that other parallel losses have made.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/loopback.h"
#include "harness/problem.h"

enum { MOST = 4, ROWS = 12, DEPTH = 16, TENDER = 320 };

/* One rank's call of linear_cross_entropy, or of cross_entropy if `logits` is set. The arguments point
 * into this struct. */
struct rank {
    rafter_context *context;
    rafter_communicator group;
    rafter_loss_options options;
    rafter_linear_cross_entropy_args lce;
    rafter_cross_entropy_args ce;
    int64_t labels[ROWS], rows[1], shape_x[2], shape_w[2], shape_z[2], shape_v[1], shape_share[2];
    DLTensor x, weight, target, loss, row_loss, lse, logprob, entropy, argmax, dx, dweight, logits, dlogits,
        class_weight;
    float out[5][ROWS], loss_value;
    int64_t best[ROWS];
    float *dx_data, *dw_data, *dz_data;
    rafter_status status;
    char error[512];
};

struct world {
    int ranks;
    int64_t classes, cut[MOST + 1];
    float *x_data, *w_data, *z_data, *class_weights;
    bool use_logits, by_rows; /* by_rows: a row group; each rank has all classes */
    bool backward;
    struct loopback *wire;
    struct rank rank[MOST];
};

static float noise(uint64_t i) {
    return (float)problem_normal(problem_mix(i));
}

static float *numbers(int64_t count, uint64_t seed) {
    float *const p = malloc((size_t)(count + 1) * sizeof *p);
    assert_non_null(p);
    for (int64_t i = 0; i < count; i++)
        p[i] = noise(seed * 1000003 + (uint64_t)i);
    return p;
}

/* Sets every rank's arguments; a test then changes some. Row groups: rows are cut by `cut` too. */
static void world_open(struct world *w, int ranks, int64_t classes, const int64_t *cut, bool use_logits, bool by_rows) {
    *w = (struct world){.ranks = ranks, .classes = classes, .use_logits = use_logits, .by_rows = by_rows};
    const int64_t total = by_rows ? ROWS : classes;
    for (int r = 0; r <= ranks; r++)
        w->cut[r] = cut ? cut[r] : total * r / ranks;
    w->wire = loopback_new(ranks);
    w->x_data = numbers(ROWS * DEPTH, 1);
    w->w_data = numbers(classes * DEPTH, 2);
    w->z_data = numbers(ROWS * classes, 3);
    w->class_weights = numbers(classes, 4);
    for (int64_t v = 0; v < classes; v++)
        w->class_weights[v] = fabsf(w->class_weights[v]) + 0.1f;
    for (int r = 0; r < ranks; r++) {
        struct rank *const k = &w->rank[r];
        const rafter_context_options options = {.size = sizeof options, .threads = 1};
        assert_int_equal(rafter_context_create(&k->context, &options), RAFTER_OK);
        const int64_t own = w->cut[r + 1] - w->cut[r], n = by_rows ? own : ROWS, v = by_rows ? classes : own;
        const int64_t row = by_rows ? w->cut[r] : 0, first = by_rows ? 0 : w->cut[r];
        k->group = loopback_rank(w->wire, r, k->context);
        k->options = (rafter_loss_options){.size = sizeof k->options};
        if (by_rows) {
            k->options.row_group = &k->group;
        } else {
            k->options.class_group = &k->group;
            k->options.first_class = first;
            k->options.classes = classes;
        }
        for (int64_t i = 0; i < n; i++)
            k->labels[i] = (row + i) % 5 == 4 ? -100 : (int64_t)(problem_mix((uint64_t)(row + i)) % (uint64_t)classes);
        k->rows[0] = n;
        k->shape_x[0] = k->shape_z[0] = n;
        k->shape_x[1] = k->shape_w[1] = k->shape_share[1] = DEPTH;
        k->shape_w[0] = k->shape_z[1] = v;
        k->shape_v[0] = classes;
        k->shape_share[0] = ROWS / ranks;
        k->dx_data = numbers(ROWS * DEPTH, 9);
        k->dw_data = numbers(v * DEPTH, 9);
        k->dz_data = numbers(ROWS * v, 9);
        for (int64_t i = 0; i < n; i++) /* a shard of its own of the logits */
            memcpy(k->dz_data + i * v, w->z_data + (row + i) * classes + first, (size_t)v * sizeof(float));
        k->x = rafter_tensor(w->x_data + row * DEPTH, RAFTER_F32, 2, k->shape_x);
        k->weight = rafter_tensor(w->w_data + first * DEPTH, RAFTER_F32, 2, k->shape_w);
        k->target = rafter_tensor(k->labels, RAFTER_I64, 1, k->rows);
        k->loss = rafter_tensor(&k->loss_value, RAFTER_F32, 0, NULL);
        k->row_loss = rafter_tensor(k->out[0], RAFTER_F32, 1, k->rows);
        k->lse = rafter_tensor(k->out[1], RAFTER_F32, 1, k->rows);
        k->logprob = rafter_tensor(k->out[2], RAFTER_F32, 1, k->rows);
        k->entropy = rafter_tensor(k->out[3], RAFTER_F32, 1, k->rows);
        k->argmax = rafter_tensor(k->best, RAFTER_I64, 1, k->rows);
        k->dx = rafter_tensor(k->dx_data, RAFTER_F32, 2, k->shape_x);
        k->dweight = rafter_tensor(k->dw_data, RAFTER_F32, 2, k->shape_w);
        k->logits = rafter_tensor(k->dz_data, RAFTER_F32, 2, k->shape_z);
        k->class_weight = rafter_tensor(w->class_weights, RAFTER_F32, 1, k->shape_v);
        k->loss_value = 77.0f;
        k->lce = (rafter_linear_cross_entropy_args){.size = sizeof k->lce,
                                                    .options = &k->options,
                                                    .x = &k->x,
                                                    .weight = &k->weight,
                                                    .target = &k->target,
                                                    .loss = &k->loss};
        k->ce = (rafter_cross_entropy_args){
            .size = sizeof k->ce, .options = &k->options, .logits = &k->logits, .target = &k->target, .loss = &k->loss};
    }
}

static void want_everything(struct rank *k) {
    k->lce.row_loss = k->ce.row_loss = &k->row_loss;
    k->lce.lse = k->ce.lse = &k->lse;
    k->lce.logprob = k->ce.logprob = &k->logprob;
    k->lce.entropy = k->ce.entropy = &k->entropy;
    k->lce.argmax = k->ce.argmax = &k->argmax;
    k->lce.dx = &k->dx;
    k->lce.dweight = &k->dweight;
    k->ce.dlogits = &k->logits; /* in place */
}

static void body(void *arg, int r) {
    struct world *const w = arg;
    struct rank *const k = &w->rank[r];
    if (w->use_logits)
        k->status = (w->backward ? rafter_cross_entropy_backward : rafter_cross_entropy_forward)(k->context, &k->ce);
    else
        k->status = (w->backward ? rafter_linear_cross_entropy_backward
                                 : rafter_linear_cross_entropy_forward)(k->context, &k->lce);
    snprintf(k->error, sizeof k->error, "%s", rafter_last_error(k->context));
}

static void world_run(struct world *w) {
    loopback_run(w->ranks, body, w);
}

static void expect_success(const struct world *w) {
    for (int r = 0; r < w->ranks; r++)
        if (w->rank[r].status != RAFTER_OK)
            fail_msg("rank %d: %s", r, w->rank[r].error);
}

static void world_close(struct world *w) {
    for (int r = 0; r < w->ranks; r++) {
        rafter_context_destroy(w->rank[r].context);
        free(w->rank[r].dx_data);
        free(w->rank[r].dw_data);
        free(w->rank[r].dz_data);
    }
    loopback_free(w->wire);
    free(w->x_data);
    free(w->w_data);
    free(w->z_data);
    free(w->class_weights);
}

/* ---- arguments ------------------------------------------------------------------------------- */

static void refuse(struct rank *k, const char *word, const char *other) {
    const rafter_status status = rafter_cross_entropy_forward(k->context, &k->ce);
    if (status != RAFTER_INVALID_ARGUMENT || !strstr(rafter_last_error(k->context), word) ||
        !strstr(rafter_last_error(k->context), other))
        fail_msg("wanted a message with '%s' and '%s', got %s: %s", word, other, rafter_status_name(status),
                 rafter_last_error(k->context));
}

static void test_arguments(void **state) {
    (void)state;
    struct world w;
    world_open(&w, 1, 11, NULL, true, false);
    struct rank *const k = &w.rank[0];
    const rafter_communicator good = k->group;
#define REFUSE(field, value, word, other)                                                                              \
    do {                                                                                                               \
        k->group = good;                                                                                               \
        k->group.field = value;                                                                                        \
        refuse(k, word, other);                                                                                        \
        k->group = good;                                                                                               \
    } while (0)
    REFUSE(size, 3, "rafter_communicator.size", "3");
    REFUSE(ranks, 0, "class_group.ranks is 0", "at least 1");
    REFUSE(rank, 1, "class_group.rank is 1", "0 to 0");
    REFUSE(rank, -1, "class_group.rank is -1", "0 to 0");
    REFUSE(all_gather, NULL, "class_group.all_gather", "NULL");
    REFUSE(all_reduce_sum, NULL, "class_group.all_reduce_sum", "NULL");
    k->options.first_class = 1;
    refuse(k, "first_class is 1", "0 to 0");
    k->options.first_class = -1;
    refuse(k, "first_class is -1", "0 to 0");
    k->options.first_class = 0;
    k->options.classes = 10;
    refuse(k, "first_class is 0", "11 of 10");
    k->options.classes = -1;
    refuse(k, "classes is -1", "0 to 2^47");
    k->options.class_group = NULL;
    k->options.classes = 11;
    refuse(k, "classes is 11", "without options.class_group");
    k->options.classes = 0;
    k->options.first_class = 2;
    refuse(k, "first_class is 2", "without options.class_group");
    /* An older caller's struct ends before the groups: what lies behind it is not read. */
    k->options.size = offsetof(rafter_loss_options, class_group);
    k->options.class_group = (const rafter_communicator *)(uintptr_t)1;
    assert_int_equal(rafter_cross_entropy_forward(k->context, &k->ce), RAFTER_OK);
    world_close(&w);
}

/* ---- ranks that disagree --------------------------------------------------------------------- */

/* What rank 1 does differently: the same order as in test_disagreements. */
static void make_change(struct rank *k, size_t what) {
    static const int64_t other = -7;
    rafter_loss_options *const o = &k->options;
    switch (what) {
    case 0: k->rows[0] = k->shape_x[0] = ROWS - 1; break;
    case 1: o->classes++; break;
    case 2: o->first_class--; break;
    case 3: o->label_smoothing = 0.25f; break;
    case 4: o->z_loss = 0.5f; break;
    case 5: o->softcap = 30; break;
    case 6: o->logit_scale = 2; break;
    case 7: o->reduction = RAFTER_SUM; break;
    case 8:
        o->ignore_index = &other;
        for (int i = 0; i < ROWS; i++)
            k->labels[i] = k->labels[i] == -100 ? other : k->labels[i];
        break;
    case 9: k->labels[2] = k->labels[2] == 0 ? 1 : 0; break;
    case 10: o->class_weight = &k->class_weight; break;
    case 11: k->lce.entropy = &k->entropy; break;
    case 12: k->lce.dx = NULL; break;
    case 13: /* half the bytes: readable */
        k->x.dtype = k->weight.dtype = (DLDataType){kDLBfloat, 16, 1};
        k->lce.dx = NULL;
        break;
    }
}

static void test_disagreements(void **state) {
    (void)state;
    static const char *const all[] = {"number of rows is 12 on rank 0 and 11 on rank 1",
                                      "number of classes is 20 on rank 0 and 21 on rank 1",
                                      "rank 1 of options.class_group has 10 classes from 9 on, wanted from 10 on",
                                      "label_smoothing is 0 on rank 0 and 0.25 on rank 1",
                                      "z_loss is 0 on rank 0 and 0.5 on rank 1",
                                      "softcap is 0 on rank 0 and 30 on rank 1",
                                      "logit_scale is 1 on rank 0 and 2 on rank 1",
                                      "reduction is 0 on rank 0 and 1 on rank 1",
                                      "ignore_index is -100 on rank 0 and -7 on rank 1",
                                      "a hash of the labels",
                                      "class_weight is 20 on rank 0",
                                      "bytes of statistics per row is 16 on rank 0 and 32 on rank 1",
                                      "dx (0: not wanted, 1: all rows, 2: a share) is 1 on rank 0 and 0 on rank 1",
                                      "dtype is 0 on rank 0 and 1 on rank 1"};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct world w;
        world_open(&w, 2, 20, NULL, false, false);
        for (int r = 0; r < 2; r++)
            w.rank[r].lce.dx = &w.rank[r].dx;
        make_change(&w.rank[1], i);
        world_run(&w);
        for (int r = 0; r < 2; r++) {
            if (w.rank[r].status != RAFTER_RANKS_DISAGREE || !strstr(w.rank[r].error, all[i]))
                fail_msg("wanted '%s', got %s: %s", all[i], rafter_status_name(w.rank[r].status), w.rank[r].error);
            assert_true(w.rank[r].loss_value == 77.0f); /* nothing was written */
        }
        world_close(&w);
    }
}

static void *no_memory(void *user, size_t bytes) {
    (void)user, (void)bytes;
    return NULL;
}
static void no_release(void *user, void *memory, size_t bytes) {
    (void)user, (void)memory, (void)bytes;
}

/* A rank that fails tells the others, which would wait for it. */
static void expect_told(struct world *w, int who, rafter_status status, const char *words) {
    world_run(w);
    for (int r = 0; r < w->ranks; r++) {
        const struct rank *const k = &w->rank[r];
        const rafter_status want = r == who ? status : RAFTER_RANKS_DISAGREE;
        if (k->status != want || !strstr(k->error, words) || (r != who && !strstr(k->error, "rank 1 of options.")))
            fail_msg("rank %d: wanted %s and '%s', got %s: %s", r, rafter_status_name(want), words,
                     rafter_status_name(k->status), k->error);
        assert_true(k->loss_value == 77.0f);
    }
}

static void test_failures(void **state) {
    (void)state;
    for (int use_logits = 0; use_logits < 2; use_logits++)
        for (int by_rows = 0; by_rows < 2; by_rows++) {
            struct world w;
            world_open(&w, 3, 20, NULL, use_logits, by_rows);
            w.rank[1].ce.target = w.rank[1].lce.target = NULL;
            expect_told(&w, 1, RAFTER_INVALID_ARGUMENT, "target");
            w.rank[1].ce.target = w.rank[1].lce.target = &w.rank[1].target;
            const rafter_context_options options = {
                .size = sizeof options, .allocate = no_memory, .release = no_release};
            rafter_context_destroy(w.rank[1].context);
            assert_int_equal(rafter_context_create(&w.rank[1].context, &options), RAFTER_OK);
            w.rank[1].group = loopback_rank(w.wire, 1, w.rank[1].context);
            expect_told(&w, 1, RAFTER_OUT_OF_MEMORY, "the allocator returned NULL");
            world_close(&w);
            world_open(&w, 3, 20, NULL, use_logits, by_rows);
            w.rank[1].labels[2] = 20;
            expect_told(&w, 1, RAFTER_LABEL_OUT_OF_RANGE, "the target of row 2 is 20, wanted 0 to 19");
            world_close(&w);
        }
}

/* A rank in another op, or another direction. */
static void other_body(void *arg, int r) {
    struct world *const w = arg;
    struct rank *const k = &w->rank[r];
    k->status = r == 1 ? rafter_cross_entropy_forward(k->context, &k->ce)
                       : rafter_linear_cross_entropy_forward(k->context, &k->lce);
    snprintf(k->error, sizeof k->error, "%s", rafter_last_error(k->context));
}

static void test_other_op(void **state) {
    (void)state;
    struct world w;
    world_open(&w, 2, 20, NULL, false, false);
    loopback_run(2, other_body, &w);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(w.rank[r].status, RAFTER_RANKS_DISAGREE);
        assert_non_null(strstr(w.rank[r].error, "the op is 1 on rank 0 and 0 on rank 1"));
    }
    world_close(&w);
}

static void test_broken_wire(void **state) {
    (void)state;
    for (int calls = 0; calls < 3; calls++) { /* the agreement, the statistics, dx */
        struct world w;
        world_open(&w, 2, 20, NULL, false, false);
        loopback_break(w.wire, calls);
        for (int r = 0; r < 2; r++)
            w.rank[r].lce.dx = &w.rank[r].dx;
        world_run(&w);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(w.rank[r].status, RAFTER_COLLECTIVE_FAILED);
            assert_non_null(strstr(w.rank[r].error, calls < 2 ? "all_gather of options.class_group returned"
                                                              : "all_reduce_sum of options.class_group returned"));
            assert_non_null(strstr(w.rank[r].error, "the wire is broken"));
        }
        world_close(&w);
    }
}

/* ---- what moves ------------------------------------------------------------------------------ */

static void test_traffic(void **state) {
    (void)state;
    for (int more = 0; more < 2; more++) {
        struct world w;
        world_open(&w, 4, 40, NULL, false, false);
        int64_t counted = 0;
        for (int i = 0; i < ROWS; i++)
            counted += w.rank[0].labels[i] >= 0;
        for (int r = 0; r < 4; r++) {
            w.rank[r].lce.dx = &w.rank[r].dx;
            w.rank[r].lce.dweight = &w.rank[r].dweight;
            w.rank[r].lce.entropy = more ? &w.rank[r].entropy : NULL;
        }
        world_run(&w);
        expect_success(&w);
        const struct loopback_traffic t = loopback_traffic(w.wire);
        assert_int_equal(t.gathers, 2);
        assert_int_equal(t.gathered_bytes, TENDER + counted * (more ? 32 : 16)); /* ignored rows are not sent */
        assert_int_equal(t.sums, 1);
        assert_int_equal(t.summed_bytes, ROWS * DEPTH * sizeof(float));
        world_close(&w);
    }
}

/* ---- bits ------------------------------------------------------------------------------------ */

/* Equal shards of whole statistics tiles (docs/distributed.md): the same bits for 1, 2 and 4 ranks. Of
 * linear_cross_entropy, however it cuts its shard: each number of ranks has another budget. */
static void test_same_bits(void **state) {
    (void)state;
    enum { TILE = 16384, CLASSES = 8 * TILE };
    for (int kind = 0; kind < 8; kind++) {
        struct world w[3];
        for (int i = 0; i < 3; i++) {
            world_open(&w[i], 1 << i, CLASSES, NULL, kind < 4, false);
            for (int r = 0; r < w[i].ranks; r++) {
                struct rank *const k = &w[i].rank[r];
                want_everything(k);
                k->options.label_smoothing = kind % 2 ? 0.1f : 0.0f;
                k->options.class_weight = kind % 2 ? &k->class_weight : NULL;
                k->options.softcap = kind / 2 % 2 ? 3.0f : 0.0f;
                k->options.z_loss = 1e-3f;
                k->lce.budget = (size_t)((kind + i) % 3) << 20;
            }
            world_run(&w[i]);
            expect_success(&w[i]);
            for (int r = 0; r < w[i].ranks; r++) {
                const struct rank *const k = &w[i].rank[r], *const one = &w[0].rank[0];
                assert_memory_equal(&k->loss_value, &one->loss_value, sizeof k->loss_value);
                for (int o = 0; o < 4; o++)
                    assert_memory_equal(k->out[o], one->out[o], sizeof k->out[o]);
                assert_memory_equal(k->best, one->best, sizeof k->best);
                for (int64_t v = k->shape_z[1], row = 0; kind < 4 && row < ROWS; row++) /* and the gradient */
                    assert_memory_equal(k->dz_data + row * v, one->dz_data + row * CLASSES + w[i].cut[r],
                                        (size_t)v * sizeof(float));
            }
        }
        for (int i = 0; i < 3; i++)
            world_close(&w[i]);
    }
}

/* ---- mistakes of others ---------------------------------------------------------------------- */

/* One rank's answer: the same call without a group. */
static void run_alone(struct world *one, int64_t classes, bool use_logits, void (*options)(struct rank *)) {
    world_open(one, 1, classes, NULL, use_logits, false);
    struct rank *const k = &one->rank[0];
    want_everything(k);
    if (options)
        options(k);
    k->options.class_group = NULL;
    k->options.classes = 0;
    world_run(one);
    expect_success(one);
}

static void expect_close(const float *a, const float *b, int64_t n, float bound) {
    for (int64_t i = 0; i < n; i++)
        if (!(fabsf(a[i] - b[i]) <= bound * (1.0f + fabsf(b[i]))))
            fail_msg("element %d is %g, wanted %g", (int)i, (double)a[i], (double)b[i]);
}

/* All logits equal: the loss is log(V), with no log(ranks) beside it. */
static void test_no_offset(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++) {
        struct world w;
        world_open(&w, ranks, 24, NULL, true, false);
        for (int r = 0; r < ranks; r++)
            for (int64_t i = 0; i < ROWS * w.rank[r].shape_z[1]; i++)
                w.rank[r].dz_data[i] = 0.5f;
        world_run(&w);
        expect_success(&w);
        for (int r = 0; r < ranks; r++)
            assert_true(fabs((double)w.rank[r].loss_value - log(24.0)) < 1e-6);
        world_close(&w);
    }
}

static void smooth_and_weigh(struct rank *k) {
    k->options.label_smoothing = 0.2f;
    k->options.class_weight = &k->class_weight;
}

/* Label smoothing sums over all classes, not over those of a rank; dx is summed over the ranks. */
static void test_smoothing_and_dx(void **state) {
    (void)state;
    static const int64_t uneven[] = {0, 1, 1, 30, 37};
    struct world one, w;
    run_alone(&one, 37, false, smooth_and_weigh);
    world_open(&w, 4, 37, uneven, false, false);
    for (int r = 0; r < 4; r++) {
        want_everything(&w.rank[r]);
        smooth_and_weigh(&w.rank[r]);
    }
    world_run(&w);
    expect_success(&w);
    for (int r = 0; r < 4; r++) {
        expect_close(&w.rank[r].loss_value, &one.rank[0].loss_value, 1, 1e-6f);
        expect_close(w.rank[r].dx_data, one.rank[0].dx_data, ROWS * DEPTH, 1e-6f);
        expect_close(w.rank[r].dw_data, one.rank[0].dw_data + uneven[r] * DEPTH, w.rank[r].shape_w[0] * DEPTH, 1e-6f);
        assert_memory_equal(w.rank[r].dx_data, w.rank[0].dx_data, sizeof(float) * ROWS * DEPTH);
    }
    world_close(&w);
    world_close(&one);
}

/* The mean over rows of all ranks: denominators are summed, with class weights and with rows that are
 * ignored; a mean of the ranks' means is something else. One rank has no rows, one only ignored ones. */
static void test_row_mean(void **state) {
    (void)state;
    static const int64_t cuts[] = {0, 4, 4, 5, ROWS}; /* row 4 is ignored */
    for (int weighted = 0; weighted < 2; weighted++) {
        struct world one, w;
        run_alone(&one, 23, false, weighted ? smooth_and_weigh : NULL);
        world_open(&w, 4, 23, cuts, false, true);
        for (int r = 0; r < 4; r++) {
            want_everything(&w.rank[r]);
            if (weighted)
                smooth_and_weigh(&w.rank[r]);
        }
        world_run(&w);
        expect_success(&w);
        for (int r = 0; r < 4; r++) {
            assert_memory_equal(&w.rank[r].loss_value, &w.rank[0].loss_value, sizeof(float));
            expect_close(&w.rank[r].loss_value, &one.rank[0].loss_value, 1, 1e-6f);
            expect_close(w.rank[r].dx_data, one.rank[0].dx_data + cuts[r] * DEPTH, w.rank[r].rows[0] * DEPTH, 1e-6f);
        }
        for (int64_t i = 0; i < 23 * DEPTH; i++) { /* gradients of the weights are sums, not means */
            float sum = 0;
            for (int r = 0; r < 4; r++)
                sum += w.rank[r].dw_data[i];
            expect_close(&sum, &one.rank[0].dw_data[i], 1, 1e-6f);
        }
        world_close(&w);
        world_close(&one);
    }
}

/* Ranks that cut their work into different numbers of chunks exchange equally often. */
static void test_unequal_chunks(void **state) {
    (void)state;
    static const int64_t cuts[] = {0, 2, 1500, 1501};
    struct world one, w;
    run_alone(&one, 1501, false, NULL);
    world_open(&w, 3, 1501, cuts, false, false);
    for (int r = 0; r < 3; r++) {
        want_everything(&w.rank[r]);
        size_t bytes = 0;
        w.rank[r].lce.mode = r == 1 ? RAFTER_LCE_FAST : RAFTER_LCE_COMPACT;
        assert_int_equal(
            rafter_linear_cross_entropy_workspace(w.rank[r].context, &w.rank[r].lce, RAFTER_FORWARD, &bytes),
            RAFTER_OK);
        w.rank[r].lce.budget = bytes * 3 / 4; /* more and smaller slices than the others */
        if (rafter_linear_cross_entropy_workspace(w.rank[r].context, &w.rank[r].lce, RAFTER_FORWARD, &bytes) !=
            RAFTER_OK)
            w.rank[r].lce.budget = 0;
    }
    world_run(&w);
    expect_success(&w);
    assert_int_equal(loopback_traffic(w.wire).gathers, 2);
    for (int r = 0; r < 3; r++)
        expect_close(w.rank[r].dx_data, one.rank[0].dx_data, ROWS * DEPTH, 1e-6f);
    world_close(&w);
    world_close(&one);
}

/* dx of this rank's rows only. */
static void test_share_of_dx(void **state) {
    (void)state;
    struct world one, w;
    run_alone(&one, 50, false, NULL);
    world_open(&w, 3, 50, NULL, false, false);
    for (int r = 0; r < 3; r++) {
        w.rank[r].dx = rafter_tensor(w.rank[r].dx_data, RAFTER_F32, 2, w.rank[r].shape_share);
        w.rank[r].lce.dx = &w.rank[r].dx;
    }
    world_run(&w);
    expect_success(&w);
    for (int r = 0; r < 3; r++)
        expect_close(w.rank[r].dx_data, one.rank[0].dx_data + r * ROWS / 3 * DEPTH, ROWS / 3 * DEPTH, 1e-6f);
    w.rank[1].shape_share[0]++;
    world_run(&w);
    assert_int_equal(w.rank[1].status, RAFTER_INVALID_ARGUMENT);
    assert_non_null(
        strstr(w.rank[1].error, "dx has shape [5, 16], wanted the shape of x, with 12 rows, or [rows / 3, 16]"));
    assert_int_equal(w.rank[0].status, RAFTER_RANKS_DISAGREE);
    world_close(&w);
    world_close(&one);
}

void test_logsumexp(void **state), test_softmax(void **state), test_older_communicator(void **state);

int main(void) {
    unsetenv("RAFTER_VARIANT");
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_arguments),         cmocka_unit_test(test_disagreements),
                                       cmocka_unit_test(test_failures),          cmocka_unit_test(test_other_op),
                                       cmocka_unit_test(test_broken_wire),       cmocka_unit_test(test_traffic),
                                       cmocka_unit_test(test_same_bits),         cmocka_unit_test(test_no_offset),
                                       cmocka_unit_test(test_smoothing_and_dx),  cmocka_unit_test(test_row_mean),
                                       cmocka_unit_test(test_unequal_chunks),    cmocka_unit_test(test_share_of_dx),
                                       cmocka_unit_test(test_logsumexp),         cmocka_unit_test(test_softmax),
                                       cmocka_unit_test(test_older_communicator)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

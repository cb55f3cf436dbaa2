/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What batch invariance costs on a GPU: device microseconds of a call without and with the option, in
 * turns, with cold caches, and how much longer the second takes.
 *
 *     rafter_batch_invariance
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "harness/context.h"
#include "harness/gpu.h"
#include "measure.h"

enum { REPEATS = 15 };

static rafter_context *context;
static void *before, *after; /* events */
static char *other;          /* memory that fills L2 between repeats */
static size_t other_bytes;

/* A call on tensors of [rows, length], or x [rows, depth] and weight [length, depth]. */
struct work {
    const char *name;
    rafter_dtype dtype;
    int64_t rows, length, depth;
    DLTensor x, y, dy, weight, dweight, target, numbers, loss;
};

static rafter_status cross_entropy(struct work *w, const DLTensor *gradient) {
    const rafter_cross_entropy_args a = {.size = sizeof a,
                                         .logits = &w->x,
                                         .target = &w->target,
                                         .loss = &w->loss,
                                         .lse = &w->numbers,
                                         .dlogits = gradient};
    return rafter_cross_entropy_forward(context, &a);
}
static rafter_status ce_forward(struct work *w) {
    return cross_entropy(w, NULL);
}
static rafter_status ce_gradient(struct work *w) {
    return cross_entropy(w, &w->y);
}
static rafter_status ce_backward(struct work *w) {
    const rafter_cross_entropy_args a = {
        .size = sizeof a, .logits = &w->x, .target = &w->target, .lse = &w->numbers, .dlogits = &w->y};
    return rafter_cross_entropy_backward(context, &a);
}
static rafter_status logsumexp(struct work *w) {
    const rafter_logsumexp_args a = {.size = sizeof a, .dim = 1, .x = &w->x, .lse = &w->numbers};
    return rafter_logsumexp_forward(context, &a);
}
static rafter_status softmax(struct work *w) {
    const rafter_act_args a = {.size = sizeof a, .kind = RAFTER_ACT_SOFTMAX, .dim = 1, .x = &w->x, .y = &w->y};
    return rafter_act_forward(context, &a);
}
static rafter_status softmax_backward(struct work *w) {
    const rafter_act_args a = {
        .size = sizeof a, .kind = RAFTER_ACT_SOFTMAX, .dim = 1, .y = &w->x, .dy = &w->dy, .dx = &w->y};
    return rafter_act_backward(context, &a);
}
static rafter_status lce_forward(struct work *w) {
    const rafter_linear_cross_entropy_args a = {
        .size = sizeof a, .x = &w->x, .weight = &w->weight, .target = &w->target, .loss = &w->loss, .lse = &w->numbers};
    return rafter_linear_cross_entropy_forward(context, &a);
}
static rafter_status lce_gradients(struct work *w) {
    const rafter_linear_cross_entropy_args a = {.size = sizeof a,
                                                .x = &w->x,
                                                .weight = &w->weight,
                                                .target = &w->target,
                                                .loss = &w->loss,
                                                .dx = &w->y,
                                                .dweight = &w->dweight};
    return rafter_linear_cross_entropy_forward(context, &a);
}

static int64_t shapes[64][2];
static int shapes_used;

/* Memory is set to bytes that are small numbers in every dtype, and valid labels. */
static DLTensor tensor(rafter_dtype dtype, int ndim, int64_t rows, int64_t columns) {
    int64_t *const shape = shapes[shapes_used++];
    shape[0] = rows;
    shape[1] = columns;
    const size_t bytes = (size_t)rows * (size_t)(ndim > 1 ? columns : 1) *
                         (dtype == RAFTER_I64   ? 8
                          : dtype == RAFTER_F32 ? 4
                                                : 2);
    DLTensor t = rafter_tensor(gpu_allocate(bytes), dtype, ndim, shape);
    t.device = context_device(context);
    if (!t.data || !gpu_fill(context, t.data, dtype == RAFTER_I64 ? 0 : 0x3c, bytes)) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return t;
}

static double seconds(rafter_status (*call)(struct work *), struct work *w, int invariant) {
    rafter_context_set_batch_invariant(context, invariant);
    gpu_fill(context, other, invariant, other_bytes);
    gpu_record(context, before);
    if (call(w) != RAFTER_OK) {
        fprintf(stderr, "%s: %s\n", w->name, rafter_last_error(context));
        exit(1);
    }
    gpu_record(context, after);
    return 1e-3 * gpu_elapsed(before, after);
}

/* What is measured: a call, on rows whose elements are adjacent, or on columns: rows that lie side by side. */
struct kind {
    const char *name;
    rafter_status (*call)(struct work *);
    bool columns;
};

static void measure(const struct kind *kind, rafter_dtype dtype, int64_t rows, int64_t length, int64_t depth) {
    struct work w = {.name = kind->name, .dtype = dtype, .rows = rows, .length = length, .depth = depth};
    struct samples samples[2] = {{0}};
    int64_t side_by_side[2] = {1, rows};
    const int64_t columns = depth ? depth : length;
    shapes_used = 0;
    w.x = tensor(dtype, 2, rows, columns);
    w.y = tensor(dtype, 2, rows, columns);
    w.dy = tensor(dtype, 2, depth ? 1 : rows, columns);
    w.weight = tensor(dtype, 2, depth ? length : 1, columns);
    w.dweight = tensor(dtype, 2, depth ? length : 1, columns);
    w.target = tensor(RAFTER_I64, 1, rows, 1);
    w.numbers = tensor(RAFTER_F32, 1, rows, 1);
    w.loss = tensor(RAFTER_F32, 1, 1, 1);
    w.loss.ndim = 0;
    if (kind->columns)
        w.x.strides = w.y.strides = w.dy.strides = side_by_side;
    for (int i = -2; i < REPEATS; i++)
        for (int invariant = 0; invariant < 2; invariant++) {
            const double time = seconds(kind->call, &w, invariant);
            if (i >= 0)
                samples_add(&samples[invariant], time);
        }
    const double usual = 1e6 * samples_summary(&samples[0]).median, option = 1e6 * samples_summary(&samples[1]).median;
    printf("%-22s %s %s %6lld x %6lld x %5lld %10.1f %10.1f  %+6.1f %%\n", kind->name,
           kind->columns ? "columns" : "rows   ", dtype == RAFTER_F32 ? "fp32" : "bf16", (long long)rows,
           (long long)length, (long long)depth, usual, option, 100.0 * (option / usual - 1.0));
    fflush(stdout);
    const DLTensor *const all[] = {&w.x, &w.y, &w.dy, &w.weight, &w.dweight, &w.target, &w.numbers, &w.loss};
    gpu_synchronize(context);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        gpu_release(all[i]->data);
    samples_free(&samples[0]);
    samples_free(&samples[1]);
}

int main(void) {
    const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}};
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        fprintf(stderr, "%s\n", rafter_last_error(NULL));
        return 77;
    }
    struct gpu_facts facts;
    gpu_describe(context, &facts);
    other_bytes = (size_t)(2 * facts.l2_bytes);
    other = gpu_allocate(other_bytes);
    before = gpu_new_event();
    after = gpu_new_event();
    static const struct kind kinds[] = {{"cross_entropy", ce_forward, false},
                                        {"cross_entropy, dlogits", ce_gradient, false},
                                        {"cross_entropy backward", ce_backward, false},
                                        {"logsumexp", logsumexp, false},
                                        {"softmax", softmax, false},
                                        {"softmax backward", softmax_backward, false}},
                             linear[] = {{"lce", lce_forward, false}, {"lce, gradients", lce_gradients, false}};
    static const struct {
        int64_t rows;
        int64_t lengths[12];
    } tables[] = {{64, {1000, 8192, 50257, 128256}},
                  {2048, {1000, 8192, 32000, 50257, 50304, 128256}},
                  {8192, {2, 10, 64, 100, 257, 512, 1000, 2048, 3001, 8192, 32000, 50257}},
                  {65536, {2, 10, 32, 60, 100, 257, 512, 777, 1000, 1501, 2048, 5001}},
                  {524288, {2, 10, 32, 60, 100, 257, 512, 1000}}},
      side_by_side[] = {{8192, {10, 100, 1000, 5000}}, {524288, {2, 21, 100, 300}}};
    static const int64_t lce_rows[] = {64, 2048, 8192}, depths[] = {1024, 2048, 4096}, classes[] = {32000, 128256};
    static const rafter_dtype dtypes[] = {RAFTER_BF16, RAFTER_F32};
    printf("%-22s %-35s %15s %10s\n", "call", "             rows x length x depth", "usual, us", "invariant");
    for (int t = 0; t < 2; t++)
        for (int k = 0; k < 6; k++) {
            for (int r = 0; r < 5; r++)
                for (int l = 0; l < 12 && tables[r].lengths[l]; l++)
                    measure(&kinds[k], dtypes[t], tables[r].rows, tables[r].lengths[l], 0);
            struct kind kind = kinds[k];
            kind.columns = true;
            for (int r = 0; r < 2; r++)
                for (int l = 0; l < 12 && side_by_side[r].lengths[l]; l++)
                    measure(&kind, dtypes[t], side_by_side[r].rows, side_by_side[r].lengths[l], 0);
        }
    for (int r = 0; r < 3; r++)
        for (int d = 0; d < 3; d++)
            for (int c = 0; c < 2; c++)
                for (int k = 0; k < 2; k++)
                    measure(&linear[k], RAFTER_BF16, lce_rows[r], classes[c], depths[d]);
    for (int k = 0; k < 2; k++)
        measure(&linear[k], RAFTER_F32, 2048, 32000, 2048);
    rafter_context_destroy(context);
    return 0;
}

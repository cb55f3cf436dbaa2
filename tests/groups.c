/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The walk over ranks: problems of the two losses, with their classes, their rows or both spread
 * over ranks that are threads, and of logsumexp and softmax, with their dimension spread, against the
 * fp64 oracle. Every option, reduction, special value and output comes, with even, uneven, one-class
 * and empty shards. All ranks of a class group must have the same bits.
 *
 *     test_groups [--device cuda] [--every N [--from K]] [OP]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/sizes.h"
#include "harness/context.h"
#include "harness/gpu.h"
#include "harness/loopback.h"
#include "harness/problem.h"

static int64_t passed, failed, calls;
static DLDevice device = {kDLCPU, 0};

/* Ranks of class groups, and of row groups. */
static const struct grid { int classes, rows; } grids[] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {1, 2}, {1, 3}, {2, 2}};
enum { GRIDS = sizeof grids / sizeof *grids, MOST = 4 };

static rafter_context *contexts[MOST];

static void verdict(bool good, const problem *p, const struct grid *g, enum problem_mode mode, const char *sentence) {
    if (good)
        passed++;
    else if (failed++ < 40)
        printf("FAIL %s | %s | %s %s | %s | %d x %d ranks, %s: %s\n", p->op->op, p->label,
               problem_layout_names[p->layout], problem_values_names[p->values], p->op->algorithms[p->algorithm],
               g->classes, g->rows, problem_mode_names[mode], sentence);
}

/* ---- shards ---------------------------------------------------------------------------------- */

/* Cuts [0, total) for `ranks` ranks: shard r is [cut[r], cut[r + 1]). */
static void cut_range(int64_t total, int ranks, uint64_t kind, int64_t cut[MOST + 1]) {
    for (int r = 0; r <= ranks; r++)
        cut[r] = total * r / ranks;
    for (int r = 1; r < ranks; r++)
        if (kind % 5 == 1) /* one each, and the rest */
            cut[r] = min64(r, total);
        else if (kind % 5 == 2) /* empty but for the last */
            cut[r] = 0;
        else if (kind % 5 == 3) /* empty but for the first */
            cut[r] = total;
        else if (kind % 5 == 4) /* uneven */
            cut[r] = total * r * r / (ranks * ranks);
}

/* A rank's problem: tensors that are views of the whole problem's, or copies of its own. */
struct part {
    problem p;
    rafter_communicator class_group, row_group;
    bool owned[PROBLEM_TENSORS];
    rafter_status status;
    char error[600];
};

struct run {
    problem *whole;
    enum problem_mode mode;
    struct grid grid;
    int64_t class_cut[MOST + 1], row_cut[MOST + 1];
    struct part part[MOST];
};

static bool is_among(const char *name, const char *const names[]) {
    for (int i = 0; names[i]; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

static const char *const by_last[] = {"logits", "dlogits", NULL}; /* the dimension that has the classes */
static const char *const by_first[] = {"weight", "dweight", "bias", "dbias", NULL};
static const char *const whole_vectors[] = {"class_weight", "denominator", NULL};
static const char *const by_reduction[] = {"loss", "dloss", NULL};

/* logsumexp and softmax have no rows to spread, and other tensors. */
static const char *const by_dim[] = {"x", "y", "dy", "dx", NULL};

static bool has_lines(const problem *p) {
    return !problem_find(p, "target");
}

/* The dimension that is spread over a class group; -1: none. */
static int spread_dim(const problem *p, const problem_tensor *t) {
    if (has_lines(p))
        return is_among(t->name, by_dim) ? problem_dim(p, t->ndim) : -1;
    return is_among(t->name, by_last) ? t->ndim - 1 : is_among(t->name, by_first) ? 0 : -1;
}

/* Results that every rank of a class group has. */
static bool is_common(const problem *p, const problem_tensor *t) {
    return spread_dim(p, t) < 0 && (t->role == PROBLEM_OUTPUT || strcmp(t->name, "dx") == 0);
}

/* Whether the first dimension is that of the labels. */
static bool has_rows(const problem *p, const problem_tensor *t) {
    if (is_among(t->name, by_first) || is_among(t->name, whole_vectors))
        return false;
    return p->options.loss.reduction == RAFTER_NONE || !is_among(t->name, by_reduction);
}

static void narrow(problem_tensor *t, int dim, int64_t from, int64_t to) {
    t->tensor.data = (char *)t->tensor.data + from * t->tensor.strides[dim] * problem_dtype_bytes(t->dtype);
    t->shape[dim] = to - from;
}

static char *duplicate(const problem_tensor *t) {
    const char *const from = t->tensor.data; /* t->device may be aligned otherwise */
    char *const copy = t->device ? gpu_allocate(t->memory_bytes) : malloc(t->memory_bytes + 1);
    if (!copy || (t->device ? !gpu_copy(copy, from, t->memory_bytes) : !memcpy(copy, from, t->memory_bytes)))
        abort();
    return copy;
}

static void make_part(struct run *run, int rank) {
    struct part *const part = &run->part[rank];
    const int c = rank % run->grid.classes, w = rank / run->grid.classes;
    part->p = *run->whole;
    for (int i = 0; i < part->p.tensors; i++) {
        problem_tensor *const t = &part->p.tensor[i];
        static int64_t strides[MOST][PROBLEM_TENSORS][PROBLEM_DIMS];
        for (int d = 0; d < t->ndim; d++)
            strides[rank][i][d] = t->tensor.strides ? t->tensor.strides[d] : t->stride[d];
        t->tensor.shape = t->shape;
        t->tensor.strides = strides[rank][i];
        /* Of results that several ranks have, rank 0's are compared with the oracle. */
        part->owned[i] = is_common(&part->p, t) && (c > 0 || (w > 0 && !has_rows(&part->p, t)));
        if (part->owned[i])
            t->tensor.data = duplicate(t);
        const int dim = spread_dim(&part->p, t);
        if (dim >= 0)
            narrow(t, dim, run->class_cut[c], run->class_cut[c + 1]);
        if (run->grid.rows > 1 && has_rows(&part->p, t))
            narrow(t, 0, run->row_cut[w], run->row_cut[w + 1]);
    }
    if (has_lines(&part->p)) {
        part->p.options.group = &part->class_group;
        return;
    }
    rafter_loss_options *const o = &part->p.options.loss;
    o->class_group = &part->class_group;
    o->first_class = run->class_cut[c];
    o->classes = run->class_cut[run->grid.classes];
    o->row_group = run->grid.rows > 1 ? &part->row_group : NULL;
}

/* The start of a copy, from where its tensor begins. */
static char *copy_of(const struct run *run, const struct part *part, int i) {
    const problem_tensor *const own = &part->p.tensor[i];
    int64_t shift = 0;
    const int w = (int)(part - run->part) / run->grid.classes;
    if (run->grid.rows > 1 && has_rows(&part->p, own))
        shift += run->row_cut[w] * own->tensor.strides[0] * problem_dtype_bytes(own->dtype);
    return (char *)own->tensor.data - shift;
}

/* ---- one call -------------------------------------------------------------------------------- */

static void body(void *arg, int rank) {
    struct run *const run = arg;
    struct part *const part = &run->part[rank];
    part->status = run->whole->op->call(&part->p, contexts[rank], run->mode);
    snprintf(part->error, sizeof part->error, "rank %d: %s (%s)", rank, rafter_status_name(part->status),
             rafter_last_error(contexts[rank]));
    const bool gpu = context_on_gpu(contexts[rank]);
    if (gpu && !gpu_synchronize(contexts[rank]))
        part->status = RAFTER_DEVICE_ERROR;
    if (gpu && part->status != RAFTER_OK) { /* on a CPU the library tells the others */
        loopback_leave(&part->class_group);
        loopback_leave(&part->row_group);
    }
}

/* Row by row: ranks of one class group have the same bits. `fetched`: the whole tensor's bytes on the
 * host. */
static char difference[128]; /* between ranks, in words */

/* The bits of a NaN are not promised: an instruction keeps those of one operand or of the other. */
static bool is_nan(rafter_dtype dtype, const char *value) {
    uint32_t wide = 0;
    uint16_t narrow = 0;
    memcpy(&wide, value, dtype == RAFTER_F32 ? sizeof wide : 0);
    memcpy(&narrow, value, dtype == RAFTER_BF16 || dtype == RAFTER_F16 ? sizeof narrow : 0);
    return (wide & 0x7fffffff) > 0x7f800000 || (narrow & 0x7fff) > (dtype == RAFTER_F16 ? 0x7c00 : 0x7f80);
}

static bool same_bits(const struct run *run, int rank, int i) {
    const problem_tensor *const whole = &run->whole->tensor[i], *const own = &run->part[rank].p.tensor[i];
    char *const copy = copy_of(run, &run->part[rank], i);
    const int64_t bytes = problem_dtype_bytes(own->dtype);
    char *host = copy;
    if (whole->device) {
        host = malloc(whole->memory_bytes + 1);
        if (!host || !gpu_copy(host, copy, whole->memory_bytes))
            abort();
    }
    bool same = true;
    int64_t numel = 1;
    for (int d = 0; d < own->ndim; d++)
        numel *= own->shape[d];
    const int64_t start = (char *)own->tensor.data - copy;
    for (int64_t index = 0; index < numel; index++) {
        int64_t at = 0, rest = index;
        for (int d = own->ndim - 1; d >= 0; d--) {
            at += rest % own->shape[d] * own->tensor.strides[d] * bytes;
            rest /= own->shape[d];
        }
        const char *const a = host + start + at, *const b = whole->memory + start + at;
        if (memcmp(a, b, (size_t)bytes) == 0 || (is_nan(own->dtype, a) && is_nan(own->dtype, b)))
            continue;
        uint64_t bits[2] = {0};
        memcpy(&bits[0], a, (size_t)bytes);
        memcpy(&bits[1], b, (size_t)bytes);
        if (same)
            snprintf(difference, sizeof difference, "%s has other bits on rank %d: %#llx, not %#llx", own->name, rank,
                     (unsigned long long)bits[0], (unsigned long long)bits[1]);
        same = false;
    }
    if (whole->device)
        free(host);
    return same;
}

static void release_part(struct run *run, int rank) {
    struct part *const part = &run->part[rank];
    for (int i = 0; i < part->p.tensors; i++)
        if (part->owned[i]) {
            char *const copy = copy_of(run, part, i);
            run->whole->tensor[i].device ? gpu_release(copy) : free(copy);
        }
}

/* Makes the call on all ranks. True: it succeeded everywhere, and copies have the same bits. */
static bool call_ranks(struct run *run) {
    const struct grid g = run->grid;
    const int ranks = g.classes * g.rows;
    struct loopback *class_wire[MOST], *row_wire[MOST];
    for (int w = 0; w < g.rows; w++)
        class_wire[w] = loopback_new(g.classes);
    for (int c = 0; c < g.classes; c++)
        row_wire[c] = loopback_new(g.rows);
    for (int rank = 0; rank < ranks; rank++) {
        const int c = rank % g.classes, w = rank / g.classes;
        run->part[rank].class_group = loopback_rank(class_wire[w], c, contexts[rank]);
        run->part[rank].row_group = loopback_rank(row_wire[c], w, contexts[rank]);
        make_part(run, rank);
    }
    loopback_run(ranks, body, run);
    for (int w = 0; w < g.rows; w++)
        loopback_free(class_wire[w]);
    for (int c = 0; c < g.classes; c++)
        loopback_free(row_wire[c]);
    calls += ranks;
    bool good = true;
    for (int rank = 0; rank < ranks && good; rank++)
        if (run->part[rank].status != RAFTER_OK) {
            verdict(false, run->whole, &run->grid, run->mode, run->part[rank].error);
            good = false;
        }
    return good;
}

static void compare_copies(struct run *run) {
    const int ranks = run->grid.classes * run->grid.rows;
    bool same = true;
    for (int rank = 0; rank < ranks; rank++)
        for (int i = 0; i < run->whole->tensors; i++)
            if (run->part[rank].owned[i] && problem_writes(&run->whole->tensor[i], run->mode))
                same &= same_bits(run, rank, i);
    verdict(same, run->whole, &run->grid, run->mode, difference);
}

static void run_grid(problem *p, const struct grid *g, enum problem_mode mode, uint64_t seed,
                     struct problem_solution *solution) {
    static struct run run;
    const problem_tensor *const target = problem_find(p, "target"), *const logits = problem_find(p, "logits");
    const problem_tensor *const spread = logits ? logits : problem_find(p, target ? "weight" : "x");
    const int64_t rows = target && target->ndim > 0 ? target->shape[0] : 1;
    if (spread->ndim == 0 || (g->rows > 1 && (!target || target->ndim == 0)))
        return;
    run = (struct run){.whole = p, .mode = mode, .grid = *g};
    cut_range(spread->shape[spread_dim(p, spread)], g->classes, seed, run.class_cut);
    cut_range(rows, g->rows, seed / 5, run.row_cut);
    if (mode == PROBLEM_BACKWARD && !solution->solved) {
        problem_prepare_backward(p);
        problem_solve_once(p, PROBLEM_BACKWARD, solution);
    }
    problem_poison(p, mode);
    const bool gpu = device.device_type == kDLCUDA;
    if (gpu && !problem_to_device(p, contexts[0], mode))
        abort();
    if (call_ranks(&run)) {
        if (gpu && !problem_from_device(p, contexts[0]))
            abort();
        compare_copies(&run);
        problem_solve_once(p, mode, solution);
        const struct problem_verdict v = problem_compare(p, mode);
        verdict(v.good, p, g, mode, v.sentence);
    }
    for (int rank = 0; rank < g->classes * g->rows; rank++)
        release_part(&run, rank);
    if (gpu)
        problem_leave_device(p);
}

/* ---- problems -------------------------------------------------------------------------------- */

/* Drops gradients of tensors that the ranks of a row group share: the sum over the ranks is up to the caller. */
static void drop_shared_gradients(problem *p) {
    for (int i = 0; i < p->tensors; i++)
        if (strcmp(p->tensor[i].name, "dweight") == 0 || strcmp(p->tensor[i].name, "dbias") == 0) {
            memmove(&p->tensor[i], &p->tensor[i + 1], (size_t)(p->tensors - i - 1) * sizeof p->tensor[i]);
            p->tensors--;
            i--;
        }
}

/* Every rank rounds the loss of its rows to fp32 before they are added up. With row weights of both signs, huge
 * losses cancel, and their rounding errors do not. */
static void allow_rounded_parts(problem *p) {
    problem_tensor *const loss = problem_find(p, "loss");
    const problem_tensor *const logits = problem_find(p, "logits"), *const target = problem_find(p, "target");
    if (!loss || !logits || p->values != PROBLEM_HUGE || !problem_find(p, "row_weight"))
        return;
    const double largest = 4 * 2 * (logits->dtype == RAFTER_F16 ? 6e4 : 1e30); /* weight, distance of two logits */
    const bool averaged = p->options.loss.reduction == RAFTER_MEAN && !problem_find(p, "denominator");
    const double rows = averaged ? 2 : (double)target->numel; /* of a mean, at least half of the rows count */
    loss->absolute = fmax(loss->absolute, 0x1p-24 * largest * rows);
}

static void walk_problem(const struct op_cases *op, int64_t index, int layout, int values, int algorithm) {
    static problem p;
    for (int spread_rows = 0; spread_rows < 2; spread_rows++) {
        p = (problem){.op = op,
                      .layout = (enum problem_layout)layout,
                      .values = (enum problem_values)values,
                      .algorithm = algorithm};
        op->make(&p, index);
        if (p.large || p.for_cuda || !problem_has_layout(&p, p.layout) || !problem_adapt(&p))
            return;
        if (has_lines(&p) && (spread_rows || (op == &rafter_cases_act && p.options.act != RAFTER_ACT_SOFTMAX)))
            return;
        if (spread_rows) {
            drop_shared_gradients(&p);
            allow_rounded_parts(&p);
        }
        if (!problem_allocate(&p, (uint64_t)index * 7919 + 1))
            abort();
        for (int m = 0; m < PROBLEM_MODES; m++) {
            struct problem_solution solution = {false, 0};
            const uint64_t seed = problem_mix((uint64_t)(index * 131 + layout * 17 + values * 5 + algorithm));
            for (int g = 0; g < GRIDS && (op->algorithm_modes[algorithm] >> m & 1); g++)
                if ((grids[g].rows > 1) == (spread_rows > 0))
                    run_grid(&p, &grids[g], (enum problem_mode)m, seed + (uint64_t)g, &solution);
        }
        problem_free(&p);
    }
}

static void walk_op(const struct op_cases *op, int64_t every, int64_t from) {
    const bool lines = op == &rafter_cases_act || op == &rafter_cases_logsumexp; /* these take any layout */
    int64_t number = 0;
    for (int64_t index = 0; index < op->count(); index++)
        for (int layout = 0; layout < PROBLEM_LAYOUTS; layout++)
            for (int values = 0; values < PROBLEM_VALUES; values++)
                for (int algorithm = 0; op->algorithms[algorithm]; algorithm++) {
                    const bool common = layout == PROBLEM_COMPACT || layout == PROBLEM_PADDED || lines;
                    if (!common || (layout != PROBLEM_COMPACT && values != PROBLEM_ORDINARY) ||
                        strcmp(op->algorithms[algorithm], "saved") == 0)
                        continue;
                    if (number++ % every == from)
                        walk_problem(op, index, layout, values, algorithm);
                }
}

static const char *const with_groups[] = {"cross_entropy", "linear_cross_entropy", "logsumexp", "act", NULL};

int main(int argc, char **argv) {
    int64_t every = 1, from = 0;
    const char *only = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--every") == 0 && i + 1 < argc)
            every = max64(atoll(argv[++i]), 1);
        else if (strcmp(argv[i], "--from") == 0 && i + 1 < argc)
            from = atoll(argv[++i]) % every;
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc)
            device.device_type = strcmp(argv[++i], "cuda") == 0 ? kDLCUDA : kDLCPU;
        else
            only = argv[i];
    }
    for (int r = 0; r < MOST; r++) {
        const rafter_context_options options = {.size = sizeof options, .device = device, .threads = 1};
        if (rafter_context_create(&contexts[r], &options) != RAFTER_OK) {
            printf("skipped: %s\n", rafter_last_error(NULL));
            return 77;
        }
    }
    for (int o = 0; problem_ops[o]; o++) {
        const char *const name = problem_ops[o]->op;
        if (is_among(name, with_groups) && (!only || strcmp(only, name) == 0))
            walk_op(problem_ops[o], every, from);
    }
    for (int r = 0; r < MOST; r++)
        rafter_context_destroy(contexts[r]);
    printf("%lld passed, %lld failed, %lld calls\n", (long long)passed, (long long)failed, (long long)calls);
    return failed > 0 || passed == 0;
}

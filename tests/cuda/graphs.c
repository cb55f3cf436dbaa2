/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that are captured into graphs: what they may allocate, and replays with other data against
 * the oracle. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

/* Copies the host data of `from` to the device memory of `to`, a problem of the same shape. */
static void upload(const problem *from, const problem *to) {
    for (int i = 0; i < from->tensors; i++)
        if (!from->tensor[i].in_place_of && from->tensor[i].memory_bytes > 0)
            gpu_copy(to->tensor[i].tensor.data, from->tensor[i].memory, from->tensor[i].memory_bytes);
}

static void download(const problem *from, const problem *to) {
    for (int i = 0; i < from->tensors; i++)
        if (!from->tensor[i].in_place_of && from->tensor[i].memory_bytes > 0)
            gpu_copy(to->tensor[i].memory, from->tensor[i].tensor.data, from->tensor[i].memory_bytes);
}

/* Captures a call of p, which is on the device. One call gets a workspace of the size it asks for.
 * Two calls are made once before the capture, so that the context has the memory. */
static void *capture(problem *p, rafter_context *context, enum problem_mode mode, rafter_status *status) {
    size_t bytes = 0;
    if (problem_is_one_call(p, mode)) {
        *status = problem_ask(p, context, mode, &bytes);
        p->workspace = bytes ? gpu_allocate(bytes) : NULL;
        p->workspace_bytes = bytes;
    } else {
        *status = p->op->call(p, context, mode);
    }
    if (*status != RAFTER_OK || !gpu_capture_begin(context))
        return NULL;
    *status = p->op->call(p, context, mode);
    return gpu_capture_end(context);
}

/* Replays the graph on the data of q and compares with the oracle. */
static void replay(const problem *p, problem *q, rafter_context *context, enum problem_mode mode, void *graph) {
    const char *const name = problem_mode_names[mode];
    if (mode == PROBLEM_BACKWARD) {
        problem_prepare_backward(q);
        problem_solve(q, PROBLEM_BACKWARD);
    }
    gpu_synchronize(context); /* wait for the call before the capture */
    for (int round = 0; round < 2;
         round++) { /* the second round starts from the counters and scratch memory of the first */
        problem_poison(q, mode);
        upload(q, p);
        const bool ran = gpu_replay(context, graph) && gpu_synchronize(context);
        expect(ran, "%s %s %s: the graph did not run", q->op->op, q->label, name);
        if (!ran)
            return;
        download(p, q);
        if (mode != PROBLEM_BACKWARD)
            problem_solve(q, mode);
        const struct problem_verdict v = problem_compare(q, mode);
        expect(v.good, "%s %s %s, replay %d: %s", q->op->op, q->label, name, round + 1, v.sentence);
    }
}

static void test_graph(const struct op_cases *op, int64_t index, int algorithm, enum problem_mode mode) {
    problem p = {.op = op, .algorithm = algorithm}, q = {.op = op, .algorithm = algorithm};
    op->make(&p, index);
    op->make(&q, index);
    if (p.large || (mode == PROBLEM_BACKWARD && p.sample > 1)) /* it would need a forward call of its own */
        return;
    if (!problem_adapt(&p) || !problem_adapt(&q) || !problem_allocate(&p, 1) || !problem_allocate(&q, 2))
        return;
    rafter_context *context = open_context();
    if (problem_to_device(&p, context, mode)) {
        rafter_status status = RAFTER_OK;
        void *const graph = capture(&p, context, mode, &status);
        expect(status == RAFTER_OK, "%s %s %s in a capture: %s", op->op, p.label, problem_mode_names[mode],
               rafter_last_error(context));
        expect(status != RAFTER_OK || graph, "%s %s %s: the capture was broken", op->op, p.label,
               problem_mode_names[mode]);
        if (graph) {
            replay(&p, &q, context, mode, graph);
            gpu_release_graph(graph);
        }
        if (p.workspace)
            gpu_release(p.workspace);
    }
    problem_leave_device(&p);
    close_context(context);
    problem_free(&p);
    problem_free(&q);
}

void test_graphs(const struct op_cases *op, int64_t every) {
    for (int64_t index = 0; index < op->count(); index += every)
        for (int algorithm = 0; op->algorithms[algorithm]; algorithm++)
            for (int mode = 0; mode < PROBLEM_MODES; mode++)
                if (op->algorithm_modes[algorithm] >> mode & 1)
                    test_graph(op, index, algorithm, (enum problem_mode)mode);
}

/* ---- scratch memory and captures ------------------------------------------------------------- */

/* Columns in two parts each: more scratch memory than the context's own block. */
enum { LENGTH = 128, COLUMNS = 100000, MORE_COLUMNS = 400000 };

struct sums {
    int64_t shape[2];
    DLTensor x, lse;
    rafter_logsumexp_args args;
};

static void set_sums(struct sums *s, float *x, float *lse, int64_t columns) {
    s->shape[0] = LENGTH;
    s->shape[1] = columns;
    s->x = rafter_tensor(x, RAFTER_F32, 2, s->shape);
    s->lse = rafter_tensor(lse, RAFTER_F32, 1, s->shape + 1);
    s->x.device = s->lse.device = (DLDevice){kDLCUDA, 0};
    s->args = (rafter_logsumexp_args){
        .size = sizeof s->args, .algorithm = RAFTER_LOGSUMEXP_PARALLEL, .dim = 0, .x = &s->x, .lse = &s->lse};
}

/* x is 0, so every lse must be the logarithm of the column's length. */
static bool are_right(const float *lse, int64_t columns) {
    float *const host = malloc(sizeof(float) * (size_t)columns);
    bool good = host && gpu_copy(host, lse, sizeof(float) * (size_t)columns);
    for (int64_t i = 0; i < columns && good; i++)
        good = fabs(host[i] - log(LENGTH)) < 1e-5;
    free(host);
    return good;
}

void test_scratch_in_captures(void) {
    rafter_context *context = open_context();
    const size_t x_bytes = sizeof(float) * LENGTH * MORE_COLUMNS, lse_bytes = sizeof(float) * MORE_COLUMNS;
    float *const x = gpu_allocate(x_bytes), *const few = gpu_allocate(lse_bytes), *const many = gpu_allocate(lse_bytes);
    gpu_fill(context, x, 0, x_bytes);
    struct sums s, more;
    set_sums(&s, x, few, COLUMNS);
    set_sums(&more, x, many, MORE_COLUMNS);

    size_t wanted = 0, wanted_more = 0;
    expect(rafter_logsumexp_workspace(context, &s.args, RAFTER_FORWARD, &wanted) == RAFTER_OK && wanted > 1 << 20 &&
               rafter_logsumexp_workspace(context, &more.args, RAFTER_FORWARD, &wanted_more) == RAFTER_OK &&
               wanted_more > wanted,
           "%zu and %zu bytes of workspace: this test needs other problems", wanted, wanted_more);

    /* Nothing is allocated during a capture, and a refused call does not break the capture. */
    expect(gpu_capture_begin(context), "no capture");
    rafter_status status = rafter_logsumexp_forward(context, &s.args);
    expect(status == RAFTER_OUT_OF_MEMORY && strstr(rafter_last_error(context), "captured"),
           "a call that must allocate in a capture: %s (%s)", rafter_status_name(status), rafter_last_error(context));
    int32_t found;
    status = rafter_bad_labels(context, &found);
    expect(status == RAFTER_UNSUPPORTED && strstr(rafter_last_error(context), "captured"),
           "rafter_bad_labels in a capture: %s (%s)", rafter_status_name(status), rafter_last_error(context));
    void *graph = gpu_capture_end(context);
    expect(graph != NULL, "a call that was refused broke the capture");
    if (graph)
        gpu_release_graph(graph);

    /* After one call the context has the memory. The graph keeps it, whatever the context does
     * later. */
    expect(rafter_logsumexp_forward(context, &s.args) == RAFTER_OK, "%s", rafter_last_error(context));
    expect(gpu_capture_begin(context), "no capture");
    expect(rafter_logsumexp_forward(context, &s.args) == RAFTER_OK, "%s", rafter_last_error(context));
    graph = gpu_capture_end(context);
    expect(graph != NULL, "no graph");
    for (int round = 0; round < 3 && graph; round++) {
        gpu_fill(context, few, 0xff, lse_bytes);
        gpu_fill(context, many, 0xff, lse_bytes);
        expect(rafter_logsumexp_forward(context, &more.args) == RAFTER_OK, "%s", rafter_last_error(context));
        expect(gpu_replay(context, graph), "no replay");
        expect(gpu_synchronize(context), "the device failed");
        expect(are_right(few, COLUMNS), "the graph's results are wrong once the context's memory has grown");
        expect(are_right(many, MORE_COLUMNS), "a call between replays is wrong");
    }
    if (graph)
        gpu_release_graph(graph);
    gpu_release(x);
    gpu_release(few);
    gpu_release(many);
    close_context(context);
}

/*
 * The CUDA backend apart from the numbers of single calls, which test_walk --device cuda checks: calls that are
 * captured into graphs and replayed, calls on two streams, labels out of range, and bad arguments, which must get the
 * sentences that they get on the CPU.
 *
 *     test_cuda [--every N]
 *
 * --every takes one problem in N. Without a GPU it says so and exits with 77, which ctest counts as skipped.
 */
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/backend.h"
#include "harness/problem.h"

static int64_t passed, failed, every = 1;
static const struct rafter_cuda *cuda;

static void expect(bool good, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void expect(bool good, const char *format, ...) {
    if (good) {
        passed++;
        return;
    }
    if (failed++ >= 40)
        return;
    va_list values;
    va_start(values, format);
    printf("FAIL ");
    vprintf(format, values);
    printf("\n");
    va_end(values);
}

static rafter_context *open_on(void *stream) {
    const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}, .stream = stream};
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        printf("skipped: %s\n", rafter_last_error(NULL));
        exit(77);
    }
    return context;
}

/* On a stream of its own, which takes no heed of the default one. */
static rafter_context *open_context(void) {
    return open_on(cuda ? cuda->stream(false) : NULL);
}

static void close_context(rafter_context *context) {
    void *const stream = context->stream;
    rafter_context_destroy(context);
    if (stream)
        cuda->forget_stream(stream);
}

/* ---- graphs -------------------------------------------------------------------------------------------------------
 */

/* Copies what `from` holds on the host to where `to`, a problem of the same shape, lies on the device. */
static void upload(const problem *from, const problem *to) {
    for (int i = 0; i < from->tensors; i++)
        if (!from->tensor[i].in_place_of && from->tensor[i].memory_bytes > 0)
            cuda->copy(to->tensor[i].tensor.data, from->tensor[i].memory, from->tensor[i].memory_bytes);
}

static void download(const problem *from, const problem *to) {
    for (int i = 0; i < from->tensors; i++)
        if (!from->tensor[i].in_place_of && from->tensor[i].memory_bytes > 0)
            cuda->copy(to->tensor[i].memory, from->tensor[i].tensor.data, from->tensor[i].memory_bytes);
}

static bool is_one_call(const problem *p, enum problem_mode mode) {
    return mode != PROBLEM_BOTH || p->op->algorithm_modes[p->algorithm] == 1u << PROBLEM_BOTH;
}

/* The graph of one call of p, which is on the device. A call gets a workspace, of the size it asks for; of two calls
 * the first has been made before, so that the context has one. */
static void *capture(problem *p, rafter_context *context, enum problem_mode mode, rafter_status *status) {
    size_t bytes = 0;
    if (is_one_call(p, mode)) {
        p->ask = &bytes;
        *status = p->op->call(p, context, mode);
        p->ask = NULL;
        p->workspace = bytes ? cuda->allocate(bytes) : NULL;
        p->workspace_bytes = bytes;
    } else {
        *status = p->op->call(p, context, mode);
    }
    if (*status != RAFTER_OK || !cuda->capture_begin(context))
        return NULL;
    *status = p->op->call(p, context, mode);
    return cuda->capture_end(context);
}

/* The graph, replayed on the data of q, against the oracle. */
static void replay(const problem *p, problem *q, rafter_context *context, enum problem_mode mode, void *graph) {
    const char *const name = problem_mode_names[mode];
    if (mode == PROBLEM_BACKWARD) {
        problem_solve(q, PROBLEM_FORWARD);
        problem_store_outputs(q);
        problem_solve(q, PROBLEM_BACKWARD);
    }
    cuda->synchronize(context);               /* with the call that was made before the capture */
    for (int round = 0; round < 2; round++) { /* the second finds what the first has left: counters, scratch memory */
        problem_poison(q, mode);
        upload(q, p);
        const bool ran = cuda->replay(context, graph) && cuda->synchronize(context);
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
    if (p.large || !problem_allocate(&p, 1) || !problem_allocate(&q, 2))
        return;
    rafter_context *context = open_context();
    if (problem_to_device(&p, context)) {
        rafter_status status = RAFTER_OK;
        void *const graph = capture(&p, context, mode, &status);
        expect(status == RAFTER_OK, "%s %s %s in a capture: %s", op->op, p.label, problem_mode_names[mode],
               rafter_last_error(context));
        expect(status != RAFTER_OK || graph, "%s %s %s: the capture was broken", op->op, p.label,
               problem_mode_names[mode]);
        if (graph) {
            replay(&p, &q, context, mode, graph);
            cuda->forget_graph(graph);
        }
        if (p.workspace)
            cuda->release(p.workspace);
    }
    problem_leave_device(&p, context);
    close_context(context);
    problem_free(&p);
    problem_free(&q);
}

static void test_graphs(const struct op_cases *op) {
    for (int64_t index = 0; index < op->count(); index += every)
        for (int algorithm = 0; op->algorithms[algorithm]; algorithm++)
            for (int mode = 0; mode < PROBLEM_MODES; mode++)
                if (op->algorithm_modes[algorithm] >> mode & 1)
                    test_graph(op, index, algorithm, (enum problem_mode)mode);
}

/* ---- scratch memory and captures ------------------------------------------------------------------------------------
 */

/* Columns in two parts each: more scratch memory than a context always has. */
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

/* Of zeros, every one is the logarithm of their number. */
static bool are_right(const float *lse, int64_t columns) {
    float *const host = malloc(sizeof(float) * (size_t)columns);
    bool good = host && cuda->copy(host, lse, sizeof(float) * (size_t)columns);
    for (int64_t i = 0; i < columns && good; i++)
        good = fabs(host[i] - log(LENGTH)) < 1e-5;
    free(host);
    return good;
}

static void test_scratch_in_captures(void) {
    rafter_context *context = open_context();
    const size_t x_bytes = sizeof(float) * LENGTH * MORE_COLUMNS, lse_bytes = sizeof(float) * MORE_COLUMNS;
    float *const x = cuda->allocate(x_bytes), *const few = cuda->allocate(lse_bytes),
                 *const many = cuda->allocate(lse_bytes);
    cuda->fill(context, x, 0, x_bytes);
    struct sums s, more;
    set_sums(&s, x, few, COLUMNS);
    set_sums(&more, x, many, MORE_COLUMNS);

    size_t wanted = 0, wanted_more = 0;
    expect(rafter_logsumexp_workspace(context, &s.args, RAFTER_FORWARD, &wanted) == RAFTER_OK && wanted > 1 << 20 &&
               rafter_logsumexp_workspace(context, &more.args, RAFTER_FORWARD, &wanted_more) == RAFTER_OK &&
               wanted_more > wanted,
           "%zu and %zu bytes of workspace: this test needs other problems", wanted, wanted_more);

    /* Nothing is allocated during a capture, and the capture is none the worse for it. */
    expect(cuda->capture_begin(context), "no capture");
    rafter_status status = rafter_logsumexp_forward(context, &s.args);
    expect(status == RAFTER_OUT_OF_MEMORY && strstr(rafter_last_error(context), "captured"),
           "a call that must allocate in a capture: %s (%s)", rafter_status_name(status), rafter_last_error(context));
    int32_t found;
    status = rafter_bad_labels(context, &found);
    expect(status == RAFTER_UNSUPPORTED && strstr(rafter_last_error(context), "captured"),
           "rafter_bad_labels in a capture: %s (%s)", rafter_status_name(status), rafter_last_error(context));
    void *graph = cuda->capture_end(context);
    expect(graph != NULL, "a call that was refused broke the capture");
    if (graph)
        cuda->forget_graph(graph);

    /* After one call there is memory. The graph keeps it, whatever the context does later. */
    expect(rafter_logsumexp_forward(context, &s.args) == RAFTER_OK, "%s", rafter_last_error(context));
    expect(cuda->capture_begin(context), "no capture");
    expect(rafter_logsumexp_forward(context, &s.args) == RAFTER_OK, "%s", rafter_last_error(context));
    graph = cuda->capture_end(context);
    expect(graph != NULL, "no graph");
    for (int round = 0; round < 3 && graph; round++) {
        cuda->fill(context, few, 0xff, lse_bytes);
        cuda->fill(context, many, 0xff, lse_bytes);
        expect(rafter_logsumexp_forward(context, &more.args) == RAFTER_OK, "%s", rafter_last_error(context));
        expect(cuda->replay(context, graph), "no replay");
        expect(cuda->synchronize(context), "the device failed");
        expect(are_right(few, COLUMNS), "the graph's results are wrong once the context's memory has grown");
        expect(are_right(many, MORE_COLUMNS), "a call between replays is wrong");
    }
    if (graph)
        cuda->forget_graph(graph);
    cuda->release(x);
    cuda->release(few);
    cuda->release(many);
    close_context(context);
}

/* ---- two streams --------------------------------------------------------------------------------------------------
 */

/* The op's largest problem that fits among others and writes over none of its inputs. */
static bool largest_problem(const struct op_cases *op, problem *largest) {
    double most = 0;
    for (int64_t index = 0; index < op->count(); index++) {
        problem p = {.op = op};
        op->make(&p, index);
        double elements = 0;
        bool in_place = false;
        for (int i = 0; i < p.tensors; i++) {
            elements += (double)p.tensor[i].numel;
            in_place |= p.tensor[i].in_place_of != NULL || p.tensor[i].accumulates;
        }
        if (!p.large && !in_place && elements > most) {
            most = elements;
            *largest = p;
        }
    }
    return most > 0;
}

struct party {
    problem p;
    rafter_context *context;
    enum problem_mode mode;
    uint64_t bits;
};

static bool join(struct party *party, const struct op_cases *op, enum problem_mode mode) {
    party->mode = mode;
    if (!largest_problem(op, &party->p) || !problem_allocate(&party->p, 3))
        return false;
    problem_solve(&party->p, PROBLEM_FORWARD);
    problem_store_outputs(&party->p);
    party->context = open_context();
    problem_poison(&party->p, mode);
    if (problem_call(&party->p, party->context, mode) != RAFTER_OK) /* alone */
        return false;
    party->bits = problem_digest(&party->p, mode);
    problem_poison(&party->p, mode);
    return true;
}

static void leave(struct party *party) {
    if (!party->context)
        return;
    problem_leave_device(&party->p, party->context);
    close_context(party->context);
    problem_free(&party->p);
}

/* Calls on two streams at once give the bits that each gives alone. */
static void test_two_streams(const struct op_cases *a, const struct op_cases *b) {
    enum { ROUNDS = 20 };
    struct party one = {.context = NULL}, other = {.context = NULL};
    if (join(&one, a, PROBLEM_FORWARD) && join(&other, b, PROBLEM_BACKWARD) && problem_to_device(&one.p, one.context) &&
        problem_to_device(&other.p, other.context)) {
        bool good = true;
        for (int round = 0; round < ROUNDS && good; round++)
            good = one.p.op->call(&one.p, one.context, one.mode) == RAFTER_OK &&
                   other.p.op->call(&other.p, other.context, other.mode) == RAFTER_OK;
        good = good && problem_from_device(&one.p, one.context) && problem_from_device(&other.p, other.context);
        expect(good && problem_digest(&one.p, one.mode) == one.bits, "%s %s beside %s: the bits are others", a->op,
               one.p.label, b->op);
        expect(good && problem_digest(&other.p, other.mode) == other.bits, "%s %s beside %s: the bits are others",
               b->op, other.p.label, a->op);
    }
    leave(&one);
    leave(&other);
}

/* A softmax of one line, so long that its blocks fill the GPU and meet; or any other act of so many elements. */
enum { LINE = 1 << 25 };

struct line {
    int64_t shape[1];
    uint16_t *x_there, *y_there;
    DLTensor x, y;
    rafter_act_args args;
    rafter_context *context;
};

static void open_line(struct line *line, rafter_act_kind kind, bool urgent) {
    *line = (struct line){.shape = {LINE}, .context = open_on(cuda->stream(urgent))};
    line->x_there = cuda->allocate(sizeof(uint16_t) * LINE);
    line->y_there = cuda->allocate(sizeof(uint16_t) * LINE);
    line->x = rafter_tensor(line->x_there, RAFTER_BF16, 1, line->shape);
    line->y = rafter_tensor(line->y_there, RAFTER_BF16, 1, line->shape);
    line->x.device = line->y.device = line->context->device;
    line->args = (rafter_act_args){.size = sizeof line->args, .kind = kind, .x = &line->x, .y = &line->y};
    cuda->fill(line->context, line->x_there, 0, sizeof(uint16_t) * LINE);
    cuda->fill(line->context, line->y_there, 0xff, sizeof(uint16_t) * LINE);
    cuda->synchronize(line->context);
}

static void close_line(struct line *line) {
    cuda->release(line->x_there);
    cuda->release(line->y_there);
    close_context(line->context);
}

static void on_alarm(int signal) {
    (void)signal;
    static const char words[] = "FAIL blocks that meet have waited for each other for a minute\n";
    if (write(STDOUT_FILENO, words, sizeof words - 1) > 0)
        _exit(1);
    _exit(2);
}

/* Kernels whose blocks wait for each other go on to the end though others, of a higher priority too, take their places
 * on the GPU. */
static void test_meetings(void) {
    enum { ROUNDS = 100, MINUTE = 60 };
    struct line meeting, urgent, filler;
    open_line(&meeting, RAFTER_ACT_SOFTMAX, false);
    open_line(&urgent, RAFTER_ACT_SOFTMAX, true);
    open_line(&filler, RAFTER_ACT_SILU, false);
    signal(SIGALRM, on_alarm);
    alarm(MINUTE);
    for (int round = 0; round < ROUNDS; round++) {
        struct line *const turn[] = {&filler, &meeting, &urgent};
        for (int i = 0; i < 3; i++)
            expect(rafter_act_forward(turn[i]->context, &turn[i]->args) == RAFTER_OK, "%s",
                   rafter_last_error(turn[i]->context));
    }
    expect(cuda->synchronize(meeting.context) && cuda->synchronize(urgent.context) && cuda->synchronize(filler.context),
           "the device failed");
    alarm(0);
    uint16_t results[2][LINE / (1 << 15)];
    const uint16_t want = (127 - 25) << 7; /* 2^-25 in bf16 */
    for (int i = 0; i < LINE / (1 << 15); i++) {
        cuda->copy(&results[0][i], meeting.y_there + ((size_t)i << 15), sizeof want);
        cuda->copy(&results[1][i], urgent.y_there + ((size_t)i << 15), sizeof want);
        expect(results[0][i] == want && results[1][i] == want, "a softmax beside another is wrong at %d", i << 15);
    }
    close_line(&meeting);
    close_line(&urgent);
    close_line(&filler);
}

/* ---- more rows than 32 bits count -----------------------------------------------------------------------------------
 */

enum { PATTERN = 0x3f };                                  /* of every byte of an input: 0.746 in bf16 and in fp32 */
static const float pattern = 0x1.7e7e7ep-1f;              /* 0x3f3f3f3f */
static const int64_t giant_rows = ((int64_t)1 << 31) + 7; /* in blocks of 256 and packs of 8: never a whole number */

static rafter_context *giant;

/* Device memory of n elements, every byte of it `byte`. */
static void *giant_memory(rafter_dtype dtype, int64_t n, int byte) {
    const size_t bytes = (size_t)n * (dtype == RAFTER_F32 || dtype == RAFTER_I32 ? 4 : 2);
    void *memory = cuda->allocate(bytes);
    expect(memory && cuda->fill(giant, memory, byte, bytes), "no memory for %lld elements", (long long)n);
    return memory;
}

static DLTensor giant_tensor(rafter_dtype dtype, int ndim, int64_t *shape, int byte) {
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    DLTensor t = rafter_tensor(giant_memory(dtype, n, byte), dtype, ndim, shape);
    t.device = giant->device;
    return t;
}

/* Elements at both ends, around powers of two, and in between, of a tensor where every `period`-th is alike. */
static void expect_giant(const char *name, const DLTensor *t, int64_t n, int64_t period, int64_t phase, double want) {
    const int64_t two = (int64_t)1 << 31;
    const int64_t near[] = {0, 1, 255, n / 3, n / 2, two - 1, two, two + 1, 2 * two - 1, 2 * two, n - period};
    for (size_t i = 0; i < sizeof near / sizeof *near; i++) {
        const int64_t at = near[i] / period * period + phase;
        unsigned char bytes[4] = {0};
        const size_t size = t->dtype.bits / 8;
        float got;
        if (at >= n)
            continue;
        cuda->copy(bytes + 4 - size, (const char *)t->data + (size_t)at * size, size); /* a bf16 is the high half */
        memcpy(&got, bytes, sizeof got);
        expect(fabs(got - want) <= 0x1p-8 * fabs(want), "%s[%lld] is %g, wanted %g", name, (long long)at, got, want);
    }
}

static void ran(rafter_status status, const char *what) {
    expect(status == RAFTER_OK, "%s: %s", what, rafter_last_error(giant));
    expect(cuda->synchronize(giant), "%s: the device failed", what);
}

static void test_giant_rows(void) {
    int64_t pairs[2] = {giant_rows, 2}, rows[1] = {giant_rows};
    const int64_t n = 2 * giant_rows;
    DLTensor x = giant_tensor(RAFTER_BF16, 2, pairs, PATTERN), out = giant_tensor(RAFTER_BF16, 2, pairs, 0xff);
    DLTensor of_row = giant_tensor(RAFTER_F32, 1, rows, 0xff), upstream = giant_tensor(RAFTER_F32, 1, rows, PATTERN);
    DLTensor labels = giant_tensor(RAFTER_I32, 1, rows, 0);

    const rafter_act_args softmax = {.size = sizeof softmax, .kind = RAFTER_ACT_SOFTMAX, .dim = 1, .x = &x, .y = &out};
    ran(rafter_act_forward(giant, &softmax), "softmax of 2^31 rows");
    expect_giant("y", &out, n, 1, 0, 0.5);
    const rafter_act_args silu = {.size = sizeof silu, .kind = RAFTER_ACT_SILU, .x = &x, .y = &out};
    ran(rafter_act_forward(giant, &silu), "silu of 2^32 elements");
    expect_giant("y", &out, n, 1, 0, pattern / (1 + exp(-(double)pattern)));

    const rafter_logsumexp_args lse = {
        .size = sizeof lse, .dim = 1, .x = &x, .lse = &of_row, .dlse = &upstream, .dx = &out};
    ran(rafter_logsumexp_forward(giant, &lse), "logsumexp of 2^31 rows");
    expect_giant("lse", &of_row, giant_rows, 1, 0, pattern + log(2));
    ran(rafter_logsumexp_backward(giant, &lse), "backward of 2^31 rows");
    expect_giant("dx", &out, n, 1, 0, pattern / 2);

    const rafter_loss_options options = {.size = sizeof options, .reduction = RAFTER_NONE};
    const rafter_cross_entropy_args loss = {.size = sizeof loss,
                                            .options = &options,
                                            .logits = &x,
                                            .target = &labels,
                                            .row_loss = &of_row,
                                            .dloss = &upstream,
                                            .dlogits = &out};
    ran(rafter_cross_entropy_forward(giant, &loss), "cross_entropy of 2^31 rows");
    expect_giant("row_loss", &of_row, giant_rows, 1, 0, log(2));
    expect_giant("dlogits", &out, n, 2, 0, -pattern / 2);
    expect_giant("dlogits", &out, n, 2, 1, pattern / 2);

    int64_t shape_x[4] = {1, giant_rows, 1, 1}, shape_y[4] = {1, giant_rows, 1, 2}, shape_theta[2] = {1, 1};
    DLTensor tokens = x, theta = giant_tensor(RAFTER_F32, 2, shape_theta, 0);
    tokens.ndim = out.ndim = 4;
    tokens.shape = shape_x;
    out.shape = shape_y;
    const rafter_lrpe_cosine_args encode = {
        .size = sizeof encode, .act = RAFTER_ACT_RELU, .x = &tokens, .theta = &theta, .y = &out};
    ran(rafter_lrpe_cosine_forward(giant, &encode), "lrpe_cosine of 2^31 tokens");
    expect_giant("y", &out, n, 2, 0, pattern);
    expect_giant("y", &out, n, 2, 1, 0);
    const DLTensor *const all[] = {&x, &out, &of_row, &upstream, &labels, &theta};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        cuda->release(all[i]->data);
}

/* One line of so many elements, alone and beside another. */
static void test_giant_lines(void) {
    for (int64_t lines = 1; lines <= 2; lines++) {
        int64_t shape[2] = {giant_rows, lines}, one[1] = {lines}, shape_x[4] = {1, giant_rows, 1, lines},
                shape_y[4] = {1, giant_rows, 1, 2 * lines}, shape_theta[2] = {1, lines};
        const int64_t n = giant_rows * lines;
        DLTensor x = giant_tensor(RAFTER_BF16, 2, shape, PATTERN), y = giant_tensor(RAFTER_BF16, 2, shape, 0xff);
        DLTensor wide = giant_tensor(RAFTER_BF16, 4, shape_y, 0xff), sums = giant_tensor(RAFTER_F32, 1, one, 0xff);
        DLTensor theta = giant_tensor(RAFTER_F32, 2, shape_theta, 0), tokens = x;
        tokens.ndim = 4;
        tokens.shape = shape_x;
        const rafter_act_args softmax = {
            .size = sizeof softmax, .kind = RAFTER_ACT_SOFTMAX, .dim = 0, .x = &x, .y = &y};
        ran(rafter_act_forward(giant, &softmax), "softmax over 2^31 elements");
        expect_giant("y", &y, n, 1, 0, 0x1p-31);
        const rafter_logsumexp_args lse = {.size = sizeof lse, .dim = 0, .x = &x, .lse = &sums};
        ran(rafter_logsumexp_forward(giant, &lse), "logsumexp over 2^31 elements");
        expect_giant("lse", &sums, lines, 1, 0, pattern + 31 * log(2));
        const rafter_lrpe_cosine_args encode = {.size = sizeof encode,
                                                .act = RAFTER_ACT_SOFTMAX,
                                                .softmax_over = RAFTER_OVER_SEQUENCE,
                                                .x = &tokens,
                                                .theta = &theta,
                                                .y = &wide};
        ran(rafter_lrpe_cosine_forward(giant, &encode), "lrpe_cosine over 2^31 tokens");
        expect_giant("y", &wide, 2 * n, 2 * lines, 0, 0x1p-31);
        expect_giant("y", &wide, 2 * n, 2 * lines, lines, 0);
        const DLTensor *const all[] = {&x, &y, &wide, &sums, &theta};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            cuda->release(all[i]->data);
    }
}

static void test_giants(void) {
    const int64_t least = (int64_t)64 << 30;
    struct rafter_cuda_facts facts;
    giant = open_context();
    cuda->facts(giant, &facts);
    if (facts.memory_bytes >= least) {
        test_giant_rows();
        test_giant_lines();
    } else {
        printf("this GPU has less than 64 GiB: more than 2^31 rows were left out\n");
    }
    close_context(giant);
}

/* ---- labels out of range --------------------------------------------------------------------------------------------
 */

enum { ROWS = 6 };

static bool all_nan(const float *row, int64_t step, int64_t n) {
    bool all = true;
    for (int64_t i = 0; i < n; i++)
        all &= isnan(row[i * step]) != 0;
    return all;
}

static bool all_finite(const float *row, int64_t step, int64_t n) {
    bool all = true;
    for (int64_t i = 0; i < n; i++)
        all &= isfinite(row[i * step]) != 0;
    return all;
}

/* Rows 1 and 4 have labels out of range, row 2 is ignored. `backward`: the gradient in a call of its own. */
static void test_labels(int64_t classes, bool transposed, bool gradient, bool backward, rafter_context *context) {
    int64_t shape[2] = {ROWS, classes}, rows[1] = {ROWS};
    int64_t strides[2] = {transposed ? 1 : classes, transposed ? ROWS : 1};
    const int64_t labels[ROWS] = {0, classes, -100, classes - 1, -1, 0};
    const size_t bytes = sizeof(float) * ROWS * (size_t)classes;
    float *const host = calloc(1, bytes), row_loss[ROWS] = {0}, loss = 0;
    float *const z = cuda->allocate(bytes), *const dz = cuda->allocate(bytes);
    float *const row_loss_there = cuda->allocate(sizeof row_loss), *const loss_there = cuda->allocate(sizeof loss);
    int64_t *const target_there = cuda->allocate(sizeof labels);
    if (!host)
        return;
    cuda->copy(z, host, bytes);
    cuda->copy(dz, host, bytes);
    cuda->copy(target_there, labels, sizeof labels);

    DLTensor logits = rafter_tensor(z, RAFTER_F32, 2, shape), dlogits = rafter_tensor(dz, RAFTER_F32, 2, shape);
    DLTensor target = rafter_tensor(target_there, RAFTER_I64, 1, rows),
             sum = rafter_tensor(loss_there, RAFTER_F32, 0, NULL);
    DLTensor each = rafter_tensor(row_loss_there, RAFTER_F32, 1, rows);
    DLTensor *const all[] = {&logits, &dlogits, &target, &sum, &each};
    for (int i = 0; i < 5; i++)
        all[i]->device = (DLDevice){kDLCUDA, 0};
    logits.strides = dlogits.strides = strides;
    const rafter_cross_entropy_args args = {.size = sizeof args,
                                            .logits = &logits,
                                            .target = &target,
                                            .loss = backward ? NULL : &sum,
                                            .row_loss = backward ? NULL : &each,
                                            .dlogits = gradient ? &dlogits : NULL};
    const rafter_status status =
        backward ? rafter_cross_entropy_backward(context, &args) : rafter_cross_entropy_forward(context, &args);
    char name[96];
    snprintf(name, sizeof name, "labels out of %lld classes, %s, %s", (long long)classes,
             transposed ? "transposed" : "compact",
             backward   ? "backward"
             : gradient ? "one pass"
                        : "forward");
    expect(status == RAFTER_OK, "%s: %s", name, rafter_last_error(context));
    int32_t found = -1;
    expect(rafter_bad_labels(context, &found) == RAFTER_OK && found == 1, "%s: the flag is %d", name, (int)found);
    expect(rafter_bad_labels(context, &found) == RAFTER_OK && found == 0, "%s: the flag was not cleared", name);

    if (!backward) {
        cuda->copy(row_loss, row_loss_there, sizeof row_loss);
        cuda->copy(&loss, loss_there, sizeof loss);
        expect(isnan(loss) && isnan(row_loss[1]) && isnan(row_loss[4]), "%s: their losses are not NaN", name);
        expect(fabs(row_loss[0] - log((double)classes)) < 1e-4 && row_loss[2] == 0.0f &&
                   fabs(row_loss[5] - log((double)classes)) < 1e-4,
               "%s: the other rows' losses are wrong", name);
    }
    if (gradient) {
        cuda->copy(host, dz, bytes);
        for (int row = 0; row < ROWS; row++)
            expect((row == 1 || row == 4 ? all_nan : all_finite)(host + row * strides[0], strides[1], classes),
                   "%s: the gradient of row %d is wrong", name, row);
    }
    free(host);
    cuda->release(z);
    cuda->release(dz);
    cuda->release(row_loss_there);
    cuda->release(loss_there);
    cuda->release(target_there);
}

static void test_bad_labels(void) {
    static const int64_t classes[] = {8, 5000, 40001,
                                      600000}; /* a warp, a block, a cluster to a row, more than a chip */
    rafter_context *context = open_context();
    int32_t found = -1;
    expect(rafter_bad_labels(context, &found) == RAFTER_OK && found == 0, "the flag is set in a new context");
    expect(rafter_bad_labels(context, NULL) == RAFTER_INVALID_ARGUMENT, "rafter_bad_labels takes NULL");
    for (int i = 0; i < 4; i++)
        for (int transposed = 0; transposed < 2; transposed++) {
            test_labels(classes[i], transposed, false, false, context);
            test_labels(classes[i], transposed, true, false, context);
            test_labels(classes[i], transposed, true, true, context);
        }
    close_context(context);
}

/* ---- bad arguments --------------------------------------------------------------------------------------------------
 */

/* A valid call of every op. Bad ones are refused before any data is looked at, so that the tensors can be said to be
 * anywhere: the sentences must be the same, and addresses in them too. */
enum { B = 2, N = 3, H = 2, D = 8, V = 11 };

static struct calls {
    float x[B * N * H * D], y[2 * B * N * H * D], dx[B * N * H * D], theta[H * D], rows[4][B * N * H], loss[1];
    int64_t labels[B * N], shape_x[4], shape_y[4], shape_theta[2], shape_lse[3], shape_logits[2], shape_rows[1];
    DLTensor x_t, y_t, dx_t, wide_t, theta_t, lse_t, logits_t, dlogits_t, target_t, loss_t;
    rafter_loss_options options;
    rafter_act_args act;
    rafter_logsumexp_args logsumexp;
    rafter_cross_entropy_args cross_entropy;
    rafter_lrpe_cosine_args lrpe;
} c;

static void reset_calls(DLDevice device) {
    memset(&c, 0, sizeof c);
    memcpy(c.shape_x, (int64_t[]){B, N, H, D}, sizeof c.shape_x);
    memcpy(c.shape_y, (int64_t[]){B, N, H, 2 * D}, sizeof c.shape_y);
    memcpy(c.shape_theta, (int64_t[]){H, D}, sizeof c.shape_theta);
    memcpy(c.shape_lse, (int64_t[]){B, N, H}, sizeof c.shape_lse);
    memcpy(c.shape_logits, (int64_t[]){B * N, V}, sizeof c.shape_logits);
    c.shape_rows[0] = B * N;
    c.x_t = rafter_tensor(c.x, RAFTER_F32, 4, c.shape_x);
    c.y_t = rafter_tensor(c.y, RAFTER_F32, 4, c.shape_x);
    c.dx_t = rafter_tensor(c.dx, RAFTER_F32, 4, c.shape_x);
    c.wide_t = rafter_tensor(c.y, RAFTER_F32, 4, c.shape_y);
    c.theta_t = rafter_tensor(c.theta, RAFTER_F32, 2, c.shape_theta);
    c.lse_t = rafter_tensor(c.rows[0], RAFTER_F32, 3, c.shape_lse);
    c.logits_t = rafter_tensor(c.x, RAFTER_F32, 2, c.shape_logits);
    c.dlogits_t = rafter_tensor(c.dx, RAFTER_F32, 2, c.shape_logits);
    c.target_t = rafter_tensor(c.labels, RAFTER_I64, 1, c.shape_rows);
    c.loss_t = rafter_tensor(c.loss, RAFTER_F32, 0, NULL);
    DLTensor *const all[] = {&c.x_t,   &c.y_t,      &c.dx_t,      &c.wide_t,   &c.theta_t,
                             &c.lse_t, &c.logits_t, &c.dlogits_t, &c.target_t, &c.loss_t};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        all[i]->device = device;
    c.options = (rafter_loss_options){.size = sizeof c.options};
    c.act = (rafter_act_args){.size = sizeof c.act, .kind = RAFTER_ACT_SILU, .x = &c.x_t, .y = &c.y_t};
    c.logsumexp = (rafter_logsumexp_args){.size = sizeof c.logsumexp, .dim = -1, .x = &c.x_t, .lse = &c.lse_t};
    c.cross_entropy = (rafter_cross_entropy_args){.size = sizeof c.cross_entropy,
                                                  .options = &c.options,
                                                  .logits = &c.logits_t,
                                                  .target = &c.target_t,
                                                  .loss = &c.loss_t,
                                                  .dlogits = &c.dlogits_t};
    c.lrpe = (rafter_lrpe_cosine_args){.size = sizeof c.lrpe, .x = &c.x_t, .theta = &c.theta_t, .y = &c.wide_t};
}

static rafter_status call_act(rafter_context *context) {
    return rafter_act_forward(context, &c.act);
}
static rafter_status call_act_backward(rafter_context *context) {
    return rafter_act_backward(context, &c.act);
}
static rafter_status call_logsumexp(rafter_context *context) {
    return rafter_logsumexp_forward(context, &c.logsumexp);
}
static rafter_status call_cross_entropy(rafter_context *context) {
    return rafter_cross_entropy_forward(context, &c.cross_entropy);
}
static rafter_status call_lrpe(rafter_context *context) {
    return rafter_lrpe_cosine_forward(context, &c.lrpe);
}
static rafter_status ask_act(rafter_context *context) {
    return rafter_act_workspace(context, &c.act, RAFTER_FORWARD, NULL);
}

#define SPOIL(name, statement)                                                                                         \
    static void name(void) {                                                                                           \
        statement;                                                                                                     \
    }
SPOIL(act_no_x, c.act.x = NULL)
SPOIL(act_no_y, c.act.y = NULL)
SPOIL(act_no_data, c.x_t.data = NULL)
SPOIL(act_bad_kind, *(int *)&c.act.kind = 99)
SPOIL(act_small_size, c.act.size = 4)
SPOIL(act_bad_dim, (c.act.kind = RAFTER_ACT_SOFTMAX, c.act.dim = 4))
SPOIL(act_wrong_dtype, c.y_t.dtype.bits = 16)
SPOIL(act_wrong_shape, c.y_t.ndim = 3)
SPOIL(act_overlap, (c.y_t.data = c.x + 1))
SPOIL(act_mask, c.act.relu_mask = &c.y_t)
SPOIL(act_backward_no_dy, c.act.dx = &c.dx_t)
SPOIL(nothing, (void)0)
SPOIL(lse_bad_algorithm, *(int *)&c.logsumexp.algorithm = 7)
SPOIL(lse_wrong_shape, c.lse_t.ndim = 2)
SPOIL(lse_negative_size, (c.shape_lse[0] = -1))
SPOIL(ce_no_target, c.cross_entropy.target = NULL)
SPOIL(ce_float_target, c.target_t.dtype.code = kDLFloat)
SPOIL(ce_bad_smoothing, c.options.label_smoothing = 2.0f)
SPOIL(ce_wrong_loss, c.loss_t = c.lse_t)
SPOIL(ce_overlap, c.dlogits_t.data = c.x + 1)
SPOIL(ce_unaligned_size, c.cross_entropy.size = 3)
SPOIL(lrpe_no_theta, c.lrpe.theta = NULL)
SPOIL(lrpe_narrow_y, c.wide_t.shape = c.shape_x)
SPOIL(lrpe_bad_act, *(int *)&c.lrpe.act = -1)
SPOIL(lrpe_bad_positions, c.lrpe.positions = &c.target_t)

static const struct bad_call {
    void (*spoil)(void);
    rafter_status (*call)(rafter_context *context);
} bad_calls[] = {
    {act_no_x, call_act},
    {act_no_y, call_act},
    {act_no_data, call_act},
    {act_bad_kind, call_act},
    {act_small_size, call_act},
    {act_bad_dim, call_act},
    {act_wrong_dtype, call_act},
    {act_wrong_shape, call_act},
    {act_overlap, call_act},
    {act_mask, call_act},
    {act_backward_no_dy, call_act_backward},
    {nothing, ask_act},
    {lse_bad_algorithm, call_logsumexp},
    {lse_wrong_shape, call_logsumexp},
    {lse_negative_size, call_logsumexp},
    {ce_no_target, call_cross_entropy},
    {ce_float_target, call_cross_entropy},
    {ce_bad_smoothing, call_cross_entropy},
    {ce_wrong_loss, call_cross_entropy},
    {ce_overlap, call_cross_entropy},
    {ce_unaligned_size, call_cross_entropy},
    {lrpe_no_theta, call_lrpe},
    {lrpe_narrow_y, call_lrpe},
    {lrpe_bad_act, call_lrpe},
    {lrpe_bad_positions, call_lrpe},
};

static void test_bad_calls(rafter_context *here, rafter_context *there) {
    for (size_t i = 0; i < sizeof bad_calls / sizeof *bad_calls; i++) {
        reset_calls(here->device);
        bad_calls[i].spoil();
        const rafter_status on_cpu = bad_calls[i].call(here);
        reset_calls(there->device);
        bad_calls[i].spoil();
        const rafter_status on_gpu = bad_calls[i].call(there);
        expect(on_cpu != RAFTER_OK, "bad call %zu passes", i);
        expect(on_gpu == on_cpu && strcmp(rafter_last_error(here), rafter_last_error(there)) == 0,
               "bad call %zu: CPU '%s', CUDA '%s'", i, rafter_last_error(here), rafter_last_error(there));
    }
}

static void refused(rafter_status status, rafter_context *context, const char *words) {
    expect(status == RAFTER_INVALID_ARGUMENT && strstr(rafter_last_error(context), words), "wanted '%s', got %s: '%s'",
           words, rafter_status_name(status), rafter_last_error(context));
}

/* Tensors on another device than the context's, all of them or one among others. */
static void test_wrong_devices(rafter_context *here, rafter_context *there) {
    const DLDevice host = {kDLCPU, 0}, gpu = {kDLCUDA, 0};
    reset_calls(host);
    refused(call_act(there), there, "x is on device type 1, wanted the context's, 2");
    refused(call_logsumexp(there), there, "x is on device type 1, wanted the context's, 2");
    refused(call_cross_entropy(there), there, "logits is on device type 1, wanted the context's, 2");
    refused(call_lrpe(there), there, "x is on device type 1, wanted the context's, 2");
    reset_calls(gpu);
    refused(call_act(here), here, "x is on device type 2, wanted the context's, 1");
    c.y_t.device = host;
    refused(call_act(there), there, "y is on device type 1, wanted the context's, 2");
    c.target_t.device = host;
    refused(call_cross_entropy(there), there, "target is on device type 1, wanted the context's, 2");
    c.theta_t.device = host;
    refused(call_lrpe(there), there, "theta is on device type 1, wanted the context's, 2");
    c.x_t.device.device_id = 5;
    refused(call_logsumexp(there), there, "x is on device 5, wanted the context's, 0");

    reset_calls(gpu);
    c.y_t.byte_offset = 2; /* the CPU takes it, a GPU would fault */
    refused(call_act(there), there, "y begins at ");

    rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 1000}};
    rafter_context *none = NULL;
    expect(rafter_context_create(&none, &options) == RAFTER_UNSUPPORTED && !none &&
               strstr(rafter_last_error(NULL), "device_id is 1000"),
           "a context on GPU 1000: '%s'", rafter_last_error(NULL));
}

/* Tensors of no elements have no data to be looked at. */
static void test_empty(rafter_context *there) {
    reset_calls(there->device);
    c.shape_x[0] = c.shape_y[0] = c.shape_lse[0] = c.shape_rows[0] = c.shape_logits[0] = 0;
    c.x_t.data = c.y_t.data = c.wide_t.data = c.lse_t.data = c.logits_t.data = c.dlogits_t.data = c.target_t.data =
        NULL;
    c.cross_entropy.loss = NULL;
    expect(call_act(there) == RAFTER_OK, "act of nothing: %s", rafter_last_error(there));
    expect(call_logsumexp(there) == RAFTER_OK, "logsumexp of nothing: %s", rafter_last_error(there));
    expect(call_cross_entropy(there) == RAFTER_OK, "cross_entropy of nothing: %s", rafter_last_error(there));
    expect(call_lrpe(there) == RAFTER_OK, "lrpe_cosine of nothing: %s", rafter_last_error(there));
    expect(cuda->synchronize(there), "the device failed");
}

static void test_arguments(void) {
    rafter_context *here = NULL, *there = open_context();
    if (rafter_context_create(&here, NULL) == RAFTER_OK) {
        test_bad_calls(here, there);
        test_wrong_devices(here, there);
        test_empty(there);
        int32_t found = -1;
        expect(rafter_bad_labels(here, &found) == RAFTER_OK && found == 0, "a CPU context has bad labels");
    }
    rafter_context_destroy(here);
    close_context(there);
}

/* Whether the op runs on CUDA at all. */
static bool serves(const struct op_cases *op, rafter_context *context) {
    problem p = {.op = op};
    op->make(&p, 0);
    if (!problem_allocate(&p, 1))
        return false;
    const bool serves = problem_call(&p, context, PROBLEM_FORWARD) != RAFTER_UNSUPPORTED;
    problem_free(&p);
    if (!serves)
        printf("%s does not run on CUDA: left out\n", op->op);
    return serves;
}

static void count_off(const char *what) {
    static int64_t before;
    printf("%-40s %lld checks\n", what, (long long)(passed + failed - before));
    fflush(stdout);
    before = passed + failed;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--every") == 0)
        every = atoll(argv[2]) > 1 ? atoll(argv[2]) : 1;
    rafter_context *context = open_context();
    cuda = context->cuda;
    const char *op, *variant;
    expect(rafter_describe_op(context, 0, &op, &variant) && strcmp(variant, "cuda") == 0,
           "the GPU's variant is not cuda");
    test_arguments();
    count_off("arguments");
    test_bad_labels();
    count_off("labels out of range");
    test_scratch_in_captures();
    count_off("scratch memory and captures");
    for (int o = 0; problem_ops[o]; o++) {
        if (!serves(problem_ops[o], context))
            continue;
        test_graphs(problem_ops[o]);
        count_off(problem_ops[o]->op);
        for (int other = 0; problem_ops[other]; other++)
            if (serves(problem_ops[other], context))
                test_two_streams(problem_ops[o], problem_ops[other]);
        count_off("on two streams");
    }
    test_meetings();
    count_off("blocks that meet");
    test_giants();
    count_off("more than 2^31 rows");
    rafter_context_destroy(context);
    printf("%lld passed, %lld failed\n", (long long)passed, (long long)failed);
    return failed > 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `rafter scale`: how linear_cross_entropy scales with its classes spread over ranks. The compute of one
 * rank, with V / R classes, is measured; the time of the collectives comes from a model of the network:
 * docs/distributed.md has its formulas.
 *
 * All ranks make the call once, as threads, and what rank 0 receives is kept. Then rank 0 alone repeats
 * the call, and its gathers copy what was kept: the measured call has the real statistics of all ranks,
 * and no network. The sum of dx is left out; or, to measure what it costs beside the product for dW, a
 * copy on some multiprocessors takes its place.
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
#include "measure.h"
#include "verbs.h"

/* ---- command line ---------------------------------------------------------------------------- */

enum { MOST_POINTS = 16 };

/* Seconds per hop; bytes per second, per rank and direction, that collectives reach. */
static const struct network {
    const char *name;
    double latency, bandwidth;
} networks[] = {{"nvlink", 5e-6, 360e9}, {"infiniband", 10e-6, 45e9}};

struct settings {
    int64_t rows, depth, classes;
    rafter_dtype dtype;
    DLDevice device;
    int ranks[MOST_POINTS], points;
    int beside[MOST_POINTS], besides; /* multiprocessors for a copy in place of the sum of dx */
    struct network network;
    double seconds;
    const char *svg;
};

static int wrong(const char *option, const char *value, const char *wanted) {
    fprintf(stderr, "rafter scale: %s is '%s', wanted %s\n", option, value, wanted);
    return 2;
}

/* At most MOST_POINTS numbers from 1 to `most`. */
static bool read_list(const char *text, int most, int *list, int *count) {
    *count = 0;
    while (*text && *count < MOST_POINTS) {
        char *end;
        const long number = strtol(text, &end, 10);
        if (end == text || number < 1 || number > most || (*end && *end != ','))
            return false;
        list[(*count)++] = (int)number;
        text = *end ? end + 1 : end;
    }
    return *count > 0 && !*text;
}

static bool read_number(const char *text, double least, double *value) {
    char *end;
    *value = strtod(text, &end);
    return end != text && !*end && *value >= least && isfinite(*value);
}

/* Returns 0, or the exit status after a message. */
static int read_option(struct settings *s, const char *option, const char *value) {
    double number = 0;
    const bool is_size = read_number(value, 1, &number) && number <= 1e9;
    if (strcmp(option, "--rows") == 0 || strcmp(option, "--depth") == 0 || strcmp(option, "--classes") == 0) {
        if (!is_size)
            return wrong(option, value, "a number from 1 to 1e9");
        *(strcmp(option, "--rows") == 0    ? &s->rows
          : strcmp(option, "--depth") == 0 ? &s->depth
                                           : &s->classes) = (int64_t)number;
    } else if (strcmp(option, "--ranks") == 0) {
        if (!read_list(value, LOOPBACK_MOST_RANKS, s->ranks, &s->points))
            return wrong(option, value, "numbers from 1 to 64, separated by commas");
    } else if (strcmp(option, "--beside") == 0) {
        if (!read_list(value, 1024, s->beside, &s->besides))
            return wrong(option, value, "numbers of multiprocessors, separated by commas");
    } else if (strcmp(option, "--dtype") == 0) {
        if (strcmp(value, "bf16") != 0 && strcmp(value, "fp16") != 0 && strcmp(value, "fp32") != 0)
            return wrong(option, value, "bf16, fp16 or fp32");
        s->dtype = value[0] == 'b' ? RAFTER_BF16 : strcmp(value, "fp16") == 0 ? RAFTER_F16 : RAFTER_F32;
    } else if (strcmp(option, "--device") == 0) {
        if (strcmp(value, "cpu") != 0 && strcmp(value, "cuda") != 0)
            return wrong(option, value, "cpu or cuda");
        s->device.device_type = strcmp(value, "cuda") == 0 ? kDLCUDA : kDLCPU;
    } else if (strcmp(option, "--network") == 0) {
        for (size_t i = 0; i < sizeof networks / sizeof *networks; i++)
            if (strcmp(value, networks[i].name) == 0) {
                s->network = networks[i];
                return 0;
            }
        return wrong(option, value, "nvlink or infiniband");
    } else if (strcmp(option, "--latency") == 0 || strcmp(option, "--bandwidth") == 0) {
        if (!read_number(value, 1e-3, &number))
            return wrong(option, value, "a positive number: microseconds, or GB/s");
        if (option[2] == 'l')
            s->network.latency = number * 1e-6;
        else
            s->network.bandwidth = number * 1e9;
        s->network.name = "custom";
    } else if (strcmp(option, "--seconds") == 0) {
        if (!read_number(value, 1e-6, &s->seconds))
            return wrong(option, value, "a positive number");
    } else if (strcmp(option, "--svg") == 0) {
        s->svg = value;
    } else {
        fprintf(stderr, "rafter scale: there is no option '%s'; see rafter help\n", option);
        return 2;
    }
    return 0;
}

/* ---- collectives that repeat ----------------------------------------------------------------- */

enum { MOST_GATHERS = 8 };

/* A communicator that records what one rank receives from the inner one, or plays it back. */
struct tape {
    rafter_communicator inner;
    const rafter_context *context;
    bool playing;
    int at, count;
    struct {
        void *data;
        size_t bytes;
    } gather[MOST_GATHERS];
    size_t gathered, summed; /* bytes that this rank gave to collectives */
    int copies_on;           /* multiprocessors that copy instead of a sum; 0: nothing is done */
    void *copied;            /* `summed` bytes */
};

static bool copy(const struct tape *t, void *to, const void *from, size_t bytes) {
    if (context_on_gpu(t->context))
        return gpu_move(t->context, to, from, bytes);
    memcpy(to, from, bytes);
    return true;
}

static int tape_gather(void *user, const void *send, void *receive, size_t bytes, void *stream) {
    struct tape *const t = user;
    const size_t all = bytes * (size_t)t->inner.ranks;
    if (t->at >= MOST_GATHERS)
        return 1;
    if (t->playing)
        return t->gather[t->at].bytes == all && copy(t, receive, t->gather[t->at++].data, all) ? 0 : 1;
    const int error = t->inner.all_gather(t->inner.user, send, receive, bytes, stream);
    void *const kept = context_on_gpu(t->context) ? gpu_allocate(all) : malloc(all);
    if (error || !kept || !copy(t, kept, receive, all))
        return error ? error : 1;
    t->gather[t->at].data = kept;
    t->gather[t->at++].bytes = all;
    t->count = t->at;
    t->gathered += bytes;
    return 0;
}

/* Stands in for the sum: the memory traffic of a rank's part of it. dx is read and written 2 (ranks - 1) / ranks times,
 * half of that to add up shares, half to spread them. */
static bool stand_in(const struct tape *t, const void *data, void *stream) {
    const size_t ranks = (size_t)t->inner.ranks, rest = t->summed / ranks * (ranks - 2) / 16 * 16;
    return gpu_copy_on(stream, t->copied, data, t->summed, t->copies_on) &&
           gpu_copy_on(stream, t->copied, data, rest, t->copies_on);
}

static int tape_sum(void *user, float *data, size_t count, void *stream) {
    struct tape *const t = user;
    if (t->playing)
        return t->copies_on == 0 || stand_in(t, data, stream) ? 0 : 1;
    t->summed += count * sizeof *data;
    return t->inner.all_reduce_sum(t->inner.user, data, count, stream);
}

static rafter_communicator tape_open(struct tape *t, struct loopback *wire, int rank, const rafter_context *context) {
    *t = (struct tape){.inner = loopback_rank(wire, rank, context), .context = context};
    rafter_communicator c = t->inner;
    c.user = t;
    c.all_gather = tape_gather;
    c.all_reduce_sum = tape_sum;
    c.reduce_scatter_sum = NULL;
    return c;
}

static void tape_close(struct tape *t) {
    for (int i = 0; i < t->count; i++)
        context_on_gpu(t->context) ? gpu_release(t->gather[i].data) : free(t->gather[i].data);
    if (t->copied)
        gpu_release(t->copied);
}

/* ---- one rank's call ------------------------------------------------------------------------- */

struct rank {
    problem p;
    rafter_context *context;
    rafter_communicator group;
    struct tape tape;
    void *own[PROBLEM_TENSORS]; /* results that every rank has */
    rafter_status status;
};

struct world {
    const problem *whole;
    int ranks;
    struct rank *rank;
};

/* Views of the rank's classes, and results of its own. */
static bool make_rank(struct world *w, struct loopback *wire, int r, const struct settings *s) {
    struct rank *const k = &w->rank[r];
    const rafter_context_options options = {.size = sizeof options, .device = s->device};
    if (rafter_context_create(&k->context, &options) != RAFTER_OK)
        return false;
    const int64_t first = s->classes * r / w->ranks, end = s->classes * (r + 1) / w->ranks;
    k->p = *w->whole;
    for (int i = 0; i < k->p.tensors; i++) {
        problem_tensor *const t = &k->p.tensor[i];
        const int64_t bytes = problem_dtype_bytes(t->dtype);
        t->tensor.shape = t->shape;
        t->tensor.strides = t->stride;
        if (strcmp(t->name, "weight") == 0 || strcmp(t->name, "dweight") == 0) {
            t->tensor.data = (char *)t->tensor.data + first * t->stride[0] * bytes;
            t->shape[0] = end - first;
        } else if (t->role == PROBLEM_OUTPUT || t->role == PROBLEM_GRADIENT) {
            const size_t size = (size_t)(max64(t->numel, 1) * bytes);
            k->own[i] = s->device.device_type == kDLCUDA ? gpu_allocate(size) : malloc(size);
            t->tensor.data = k->own[i];
            if (!k->own[i])
                return false;
        }
    }
    k->group = tape_open(&k->tape, wire, r, k->context);
    k->p.options.loss.class_group = &k->group;
    k->p.options.loss.first_class = first;
    k->p.options.loss.classes = s->classes;
    return true;
}

static void free_rank(struct rank *k, bool gpu) {
    for (int i = 0; i < k->p.tensors; i++)
        gpu ? gpu_release(k->own[i]) : free(k->own[i]);
    tape_close(&k->tape);
    rafter_context_destroy(k->context);
}

static void call_rank(void *arg, int r) {
    struct rank *const k = &((struct world *)arg)->rank[r];
    k->tape.at = 0;
    k->status = k->p.op->call(&k->p, k->context, PROBLEM_BOTH);
    if (context_on_gpu(k->context) && !gpu_synchronize(k->context))
        k->status = RAFTER_DEVICE_ERROR;
}

/* Rank 0's call; or, `copy_alone`, the copy that takes the place of its sum. */
static void do_once(struct rank *k, bool copy_alone) {
    k->tape.at = 0;
    if (!copy_alone)
        k->status = k->p.op->call(&k->p, k->context, PROBLEM_BOTH);
    else if (!stand_in(&k->tape, k->tape.copied, NULL)) /* in place, on the context's stream */
        k->status = RAFTER_DEVICE_ERROR;
}

/* Repeats do_once for so many seconds and adds the times to `samples`. */
static bool take_samples(struct world *w, double seconds, bool copy_alone, struct samples *samples) {
    struct rank *const k = &w->rank[0];
    const bool gpu = context_on_gpu(k->context);
    void *const before = gpu ? gpu_new_event() : NULL, *const after = gpu ? gpu_new_event() : NULL;
    double spent = 0;
    k->tape.playing = true;
    call_rank(w, 0);
    for (int taken = 0; k->status == RAFTER_OK && (taken < 5 || spent < seconds); taken++) {
        const double start = clock_seconds();
        if (gpu)
            gpu_record(k->context, before);
        do_once(k, copy_alone);
        if (gpu)
            gpu_record(k->context, after);
        const double took = gpu ? (double)gpu_elapsed(before, after) * 1e-3 : clock_seconds() - start;
        if (took < 0 || !samples_add(samples, took))
            k->status = RAFTER_DEVICE_ERROR;
        spent += clock_seconds() - start;
    }
    if (k->status != RAFTER_OK)
        fprintf(stderr, "rafter scale: %s: %s\n", rafter_status_name(k->status), rafter_last_error(k->context));
    if (gpu) {
        gpu_release_event(before);
        gpu_release_event(after);
    }
    return k->status == RAFTER_OK;
}

/* The median seconds of do_once. Negative: it failed. */
static double time_rank(struct world *w, double seconds, bool copy_alone) {
    struct samples samples = {0};
    const double median = take_samples(w, seconds, copy_alone, &samples) ? samples_summary(&samples).median : -1;
    samples_free(&samples);
    return median;
}

/* ---- the model ------------------------------------------------------------------------------- */

/* What the library is told of the copy: nothing, or its multiprocessors. */
enum { TOLD = 2 };

struct point {
    int ranks;
    double compute, gather, sum, step; /* seconds */
    double gathered, summed;           /* bytes that a rank sends */
    char variant[64];
    struct {
        double copy, call[TOLD]; /* seconds: the copy alone; the call with it */
    } beside[MOST_POINTS];
};

/* The formulas of docs/distributed.md. The sum of dx can hide behind the product for dW, a third of the
 * compute. */
static void add_network(struct point *p, const struct network *n) {
    const double hops = ceil(log2(p->ranks)), others = p->ranks - 1;
    p->gather = p->ranks == 1 ? 0 : n->latency * hops + others * p->gathered / n->bandwidth;
    p->sum = p->ranks == 1 ? 0 : 2 * n->latency * hops + 2 * others / p->ranks * p->summed / n->bandwidth;
    p->step = p->compute + p->gather + fmax(0, p->sum - p->compute / 3);
}

/* Measures the call with a copy in place of the sum of dx, and the copy alone. */
static bool measure_beside(struct world *w, const struct settings *s, struct point *point) {
    struct tape *const tape = &w->rank[0].tape;
    tape->copied = s->besides > 0 && w->ranks > 1 ? gpu_allocate(tape->summed) : NULL;
    bool good = true;
    for (int i = 0; i < s->besides && w->ranks > 1 && good; i++) {
        tape->copies_on = s->beside[i];
        point->beside[i].copy = tape->copied ? time_rank(w, s->seconds, true) : -1;
        good = point->beside[i].copy > 0;
        for (int told = 0; told < TOLD && good; told++) {
            w->rank[0].group.multiprocessors = told ? s->beside[i] : 0;
            point->beside[i].call[told] = time_rank(w, s->seconds, false);
            good = point->beside[i].call[told] > 0;
        }
    }
    return good;
}

static void free_ranks(struct world *w, int first, bool gpu) {
    for (int r = first; w->rank && r < w->ranks; r++)
        if (w->rank[r].context) {
            free_rank(&w->rank[r], gpu);
            w->rank[r] = (struct rank){0};
        }
}

/* All ranks make the call once; then only rank 0 is kept, with what it received. */
static bool open_world(struct world *w, const problem *whole, const struct settings *s, int ranks,
                       struct point *point) {
    *w = (struct world){.whole = whole, .ranks = ranks, .rank = calloc((size_t)ranks, sizeof *w->rank)};
    struct loopback *const wire = loopback_new(ranks);
    *point = (struct point){.ranks = ranks, .compute = -1};
    bool good = w->rank != NULL;
    for (int r = 0; r < ranks && good; r++)
        good = make_rank(w, wire, r, s);
    if (good)
        loopback_run(ranks, call_rank, w);
    for (int r = 0; r < ranks && good; r++)
        if (w->rank[r].status != RAFTER_OK) {
            fprintf(stderr, "rafter scale: rank %d of %d: %s: %s\n", r, ranks, rafter_status_name(w->rank[r].status),
                    rafter_last_error(w->rank[r].context));
            good = false;
        }
    if (good) {
        point->gathered = (double)w->rank[0].tape.gathered;
        point->summed = (double)w->rank[0].tape.summed;
        problem_variant(&w->rank[0].p, w->rank[0].context, PROBLEM_BOTH, point->variant, sizeof point->variant);
    }
    free_ranks(w, 1, s->device.device_type == kDLCUDA);
    loopback_free(wire);
    return good;
}

/* The numbers of ranks are measured in turns: a GPU gets slower as it gets warm, so whatever came last would seem
 * less efficient than it is. */
enum { TURNS = 5 };

static bool measure(const problem *whole, const struct settings *s, struct point *points) {
    struct world worlds[MOST_POINTS] = {0};
    struct samples samples[MOST_POINTS] = {0};
    bool good = true;
    for (int i = 0; i < s->points && good; i++)
        good = open_world(&worlds[i], whole, s, s->ranks[i], &points[i]);
    for (int turn = 0; turn < TURNS && good; turn++)
        for (int i = 0; i < s->points && good; i++)
            good = take_samples(&worlds[i], s->seconds / TURNS, false, &samples[i]);
    for (int i = 0; i < s->points && good; i++) {
        points[i].compute = samples_summary(&samples[i]).median;
        add_network(&points[i], &s->network);
        good = measure_beside(&worlds[i], s, &points[i]);
    }
    for (int i = 0; i < s->points; i++) {
        free_ranks(&worlds[i], 0, s->device.device_type == kDLCUDA);
        free(worlds[i].rank);
        samples_free(&samples[i]);
    }
    return good;
}

/* ---- output ---------------------------------------------------------------------------------- */

static double efficiency(const struct point *first, const struct point *p, double seconds) {
    return first->compute * first->ranks / (p->ranks * seconds);
}

static void print_points(const struct settings *s, const struct point *p, int count) {
    printf("linear_cross_entropy, loss and gradients: N = %lld, D = %lld, V = %lld, %s\n", (long long)s->rows,
           (long long)s->depth, (long long)s->classes, problem_dtype_name(s->dtype));
    printf(
        "compute measured here with V / ranks classes; network modelled: %s, %.1f us per hop, %.0f GB/s per rank\n\n",
        s->network.name, s->network.latency * 1e6, s->network.bandwidth / 1e9);
    printf(
        "ranks  compute ms  efficiency  gathered KiB  dx MiB  gather ms  dx sum ms   step ms  efficiency  variant\n");
    for (int i = 0; i < count; i++) {
        printf("%5d %11.4f %11.3f %13.1f %7.1f %10.4f %10.4f %9.4f %11.3f  %s\n", p[i].ranks, p[i].compute * 1e3,
               efficiency(p, &p[i], p[i].compute), p[i].gathered / 1024, p[i].summed / (1 << 20), p[i].gather * 1e3,
               p[i].sum * 1e3, p[i].step * 1e3, efficiency(p, &p[i], p[i].step), p[i].variant);
    }
    printf("\nefficiency of a modelled step\n");
    for (int i = 0; i < count; i++) {
        const double e = efficiency(p, &p[i], p[i].step);
        printf("%5d |", p[i].ranks);
        for (int bar = 0; bar < (int)(fmin(e, 1.5) * 50); bar++)
            putchar('#');
        printf(" %.3f\n", e);
    }
}

static void print_besides(const struct settings *s, const struct point *p, int count) {
    printf("\na copy on some multiprocessors in place of the sum of dx, beside the product for dW\n");
    printf("ranks  multiprocessors   copy ms  told   call ms   more than without   hidden\n");
    for (int i = 0; i < count; i++)
        for (int b = 0; b < s->besides * TOLD && p[i].ranks > 1; b++) {
            const double copy = p[i].beside[b / TOLD].copy, call = p[i].beside[b / TOLD].call[b % TOLD];
            printf("%5d %16d %9.4f %5s %9.4f %16.4f ms %8.3f\n", p[i].ranks, s->beside[b / TOLD], copy * 1e3,
                   b % TOLD ? "yes" : "no", call * 1e3, (call - p[i].compute) * 1e3, 1 - (call - p[i].compute) / copy);
        }
}

/* Efficiencies over ranks: of the compute, and of the modelled step. */
static bool write_svg(const char *path, const struct settings *s, const struct point *p, int count) {
    enum { WIDTH = 640, HEIGHT = 360, LEFT = 50, BOTTOM = 40, TOP = 30 };
    FILE *const to = fopen(path, "w");
    if (!to)
        return false;
    const double last = fmax(1, log2(p[count - 1].ranks)), down = HEIGHT - BOTTOM, high = down - TOP, top = 1.1;
    fprintf(to,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" "
            "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            WIDTH, HEIGHT);
    fprintf(to, "<text x=\"%d\" y=\"18\">efficiency over ranks: N = %lld, D = %lld, V = %lld, %s</text>\n", LEFT,
            (long long)s->rows, (long long)s->depth, (long long)s->classes, s->network.name);
    for (int tick = 0; tick <= 10; tick += 2) {
        const double y = down - high * tick / 10 / top;
        fprintf(to, "<path d=\"M%d %.1fH%d\" stroke=\"#ccc\"/><text x=\"20\" y=\"%.1f\">%.1f</text>\n", LEFT, y,
                WIDTH - 20, y + 4, tick / 10.0);
    }
    for (int line = 0; line < 2; line++) {
        fprintf(to, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" points=\"", line ? "#c33" : "#36c");
        for (int i = 0; i < count; i++)
            fprintf(to, "%.1f,%.1f ", LEFT + (WIDTH - LEFT - 30) * log2(p[i].ranks) / last,
                    down - high * fmin(top, efficiency(p, &p[i], line ? p[i].step : p[i].compute)) / top);
        fprintf(to, "\"/>\n<text x=\"%d\" y=\"%.1f\" fill=\"%s\">%s</text>\n", LEFT + 10, down - 10 - 16 * line,
                line ? "#c33" : "#36c", line ? "modelled step" : "measured compute");
    }
    for (int i = 0; i < count; i++)
        fprintf(to, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n",
                LEFT + (WIDTH - LEFT - 30) * log2(p[i].ranks) / last, HEIGHT - 20, p[i].ranks);
    fputs("</svg>\n", to);
    const bool failed = ferror(to);
    return fclose(to) == 0 && !failed;
}

/* ---- the verb -------------------------------------------------------------------------------- */

/* The whole problem, on the device. *memory: to be released. */
static bool make_whole(problem *p, const struct settings *s, const rafter_context *context, char **memory) {
    const struct problem_request request = {
        .ndim = 2, .shape = {s->rows, s->depth}, .dtype = s->dtype, .classes = s->classes};
    *p = (problem){.op = &rafter_cases_linear_cross_entropy};
    const char *const refused = p->op->make_request(p, &request);
    if (refused || !problem_adapt(p)) {
        fprintf(stderr, "rafter scale: %s\n", refused ? refused : "the problem cannot be made");
        return false;
    }
    const size_t bytes = problem_place(p, NULL, s->device);
    *memory = s->device.device_type == kDLCUDA ? gpu_allocate(bytes)
                                               : aligned_alloc(64, (size_t)round_up((int64_t)bytes, 64));
    if (!*memory) {
        fprintf(stderr, "rafter scale: no memory for %zu bytes\n", bytes);
        return false;
    }
    problem_place(p, *memory, s->device);
    return problem_generate(p, context, 1);
}

int verb_scale(int argc, char **argv) {
    struct settings s = {.dtype = RAFTER_BF16, .device = {kDLCPU, 0}, .network = networks[0], .seconds = 1};
    for (int i = 2; i < argc; i += 2) {
        if (i + 1 >= argc)
            return wrong(argv[i], "", "a value");
        const int status = read_option(&s, argv[i], argv[i + 1]);
        if (status)
            return status;
    }
    const bool gpu = s.device.device_type == kDLCUDA;
    if (s.besides > 0 && !gpu)
        return wrong("--device", "cpu", "cuda, with --beside");
    bool chosen = false; /* the ranks, by default */
    s.rows = s.rows ? s.rows : gpu ? 8192 : 256;
    s.depth = s.depth ? s.depth : gpu ? 4096 : 256;
    s.classes = s.classes ? s.classes : gpu ? 131072 : 8192;
    for (int ranks = 1; ranks <= 64 && (s.points == 0 || chosen); ranks *= 2) {
        s.ranks[s.points++] = ranks;
        chosen = true;
    }
    const rafter_context_options options = {.size = sizeof options, .device = s.device};
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        fprintf(stderr, "rafter scale: %s\n", rafter_last_error(NULL));
        return 1;
    }
    problem *const whole = calloc(1, sizeof *whole);
    char *memory = NULL;
    struct point points[MOST_POINTS];
    bool good = whole && make_whole(whole, &s, context, &memory) && measure(whole, &s, points);
    if (good)
        print_points(&s, points, s.points);
    if (good && s.besides > 0)
        print_besides(&s, points, s.points);
    if (good && s.svg && !write_svg(s.svg, &s, points, s.points)) {
        fprintf(stderr, "rafter scale: cannot write %s\n", s.svg);
        good = false;
    }
    gpu ? gpu_release(memory) : free(memory);
    free(whole);
    rafter_context_destroy(context);
    return good ? 0 : 1;
}

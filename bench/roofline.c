/* SPDX-License-Identifier: Apache-2.0 */
#include "roofline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness/context.h"
#include "harness/cpu.h"
#include "harness/gpu.h"
#include "harness/streams.h"
#include "machine.h"
#include "measure.h"
#include "provider.h"

static const struct streams *best_streams(void) {
#define LEVEL(what, isa) &what##isa,
    static const struct streams *const by_level[CPU_LEVELS] = {CPU_LEVEL_LIST(LEVEL, streams_)};
#undef LEVEL
    return by_level[cpu_level()];
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Seconds of a copy on the device that reads and writes `bytes` in total, with cold caches. */
static double device_copy_seconds(const rafter_context *context, double bytes) {
    enum { REPEATS = 11 };
    struct gpu_facts facts;
    gpu_describe(context, &facts);
    const size_t half = (size_t)(bytes / 2), other_bytes = 4 * (size_t)facts.l2_bytes;
    char *from = gpu_allocate(half), *to = gpu_allocate(half), *other = gpu_allocate(other_bytes);
    void *before = gpu_new_event(), *after = gpu_new_event();
    struct samples samples = {0};
    bool good = from && to && other && before && after;
    for (int i = 0; i < REPEATS && good; i++) {
        gpu_fill(context, other, i, other_bytes);
        gpu_record(context, before);
        good = gpu_move(context, to, from, half);
        gpu_record(context, after);
        good = samples_add(&samples, 1e-3 * gpu_elapsed(before, after)) && good;
    }
    const double seconds = good ? samples_summary(&samples).median : INFINITY;
    samples_free(&samples);
    gpu_release_event(before);
    gpu_release_event(after);
    gpu_release(from);
    gpu_release(to);
    gpu_release(other);
    return seconds;
}

bool roofline_create(struct roofline *r, rafter_context *context, const struct pace *pace) {
    *r = (struct roofline){.context = context, .pace = pace};
    if (context_on_gpu(context)) {
        const double bytes = 0x1p32;
        r->copy = r->read = bytes / device_copy_seconds(context, bytes);
        return true;
    }
    enum { PIECE = 1 << 20, REPEATS = 7 };
    const int threads = rafter_context_threads(context);
    size_t bytes = 4 * machine_cache_bytes(threads) / PIECE * PIECE;
    bytes = bytes > (size_t)256 << 20 ? bytes : (size_t)256 << 20;
    char *from = aligned_alloc(64, bytes), *to = aligned_alloc(64, bytes);
    if (!from || !to) {
        free(from);
        free(to);
        return false;
    }
    const struct streams *streams = best_streams();
    const int64_t pieces = (int64_t)(bytes / PIECE);
    float sum = 0;
    for (int repeat = 0; repeat <= REPEATS; repeat++) {
        double start = clock_seconds();
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t i = 0; i < pieces; i++)
            if (repeat > 0)
                streams->copy(to + i * PIECE, from + i * PIECE, PIECE);
            else { /* the first round faults the pages in, each by the thread that will use it */
                memset(from + i * PIECE, 0, PIECE);
                memset(to + i * PIECE, 0, PIECE);
            }
        if (repeat > 0)
            r->copy = fmax(r->copy, 2 * (double)bytes / (clock_seconds() - start));
        start = clock_seconds();
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum)
        for (int64_t i = 0; i < pieces; i++)
            sum += streams->read(from + i * PIECE, PIECE);
        if (repeat > 0)
            r->read = fmax(r->read, (double)bytes / (clock_seconds() - start));
    }
    static volatile float keep;
    keep = sum;
    (void)keep;
    free(from);
    free(to);
    return true;
}

/* Bytes written, and as many bytes read, move at the rate of a copy; the rest at the rate of
 * reading. */
double roofline_memory_seconds(const struct roofline *r, const problem *p, enum problem_mode mode, double bytes) {
    double written = 0;
    for (int i = 0; i < p->tensors; i++)
        if (problem_writes(&p->tensor[i], mode) && !p->tensor[i].in_place_of)
            written += (double)tensor_bytes(&p->tensor[i]);
    const double copied = fmin(2 * written, bytes);
    return copied / r->copy + (bytes - copied) / r->read;
}

/* ---- L1 -------------------------------------------------------------------------------------- */

/* Bytes per second, as cost() counts them, of one thread whose data stays in L1; infinite if the op
 * cannot run like that. */
static double measure_resident(const struct op_cases *op, const struct bench_row *row, enum problem_mode mode) {
    enum { LEAST_REPEATS = 3 };
    const double budget = 0.03;
    problem p = {.op = op, .layout = PROBLEM_RESIDENT};
    struct bench_row resident = *row;
    resident.resident = true;
    op->make_bench(&p, &resident);
    problem_adapt(&p);
    p.layout = PROBLEM_RESIDENT;

    rafter_context *context = NULL;
    const rafter_context_options options = {.size = sizeof options, .threads = 1};
    double bytes = 0, flops = 0, best = INFINITY;
    bool good = false;
    if (problem_allocate(&p, 1) && rafter_context_create(&context, &options) == RAFTER_OK) {
        context_allow_self_overlap(context);
        op->cost(&p, mode, &bytes, &flops);
        good = mode != PROBLEM_BACKWARD || op->call(&p, context, PROBLEM_FORWARD) == RAFTER_OK;
        const double end = clock_seconds() + budget;
        for (int i = 0; good && (i < LEAST_REPEATS || clock_seconds() < end); i++) {
            const double start = clock_seconds();
            good = op->call(&p, context, mode) == RAFTER_OK;
            best = fmin(best, clock_seconds() - start);
        }
    }
    rafter_context_destroy(context);
    problem_free(&p);
    return good ? bytes / best : INFINITY;
}

/* ---- matrix work ----------------------------------------------------------------------------- */

static double measure_matrix(rafter_context *context, rafter_dtype dtype) {
    enum { REPEATS = 5 };
    int64_t iterations = 1 << 10;
    double best = 0, seconds = 0;
    do { /* until a run is long enough for the clock, and for the processor to reach its sustained frequency */
        const double start = clock_seconds();
        cpu_matrix_flops(context, dtype, iterations);
        seconds = clock_seconds() - start;
        iterations *= 2;
    } while (seconds < 0.02);
    for (int i = 0; i < REPEATS; i++) {
        const double start = clock_seconds();
        const double flops = cpu_matrix_flops(context, dtype, iterations);
        best = fmax(best, flops / (clock_seconds() - start));
    }
    return best;
}

double roofline_seconds(struct roofline *r, const problem *p, const struct bench_row *row, enum problem_mode mode) {
    double bytes = 0, flops = 0;
    p->op->cost(p, mode, &bytes, &flops);
    if (context_on_gpu(r->context) && flops == 0)
        return device_copy_seconds(r->context, bytes);
    if (context_on_gpu(r->context)) {
        if (r->matrix[row->dtype] == 0)
            r->matrix[row->dtype] = peers_matrix_rate(r->context, r->pace, row->dtype);
        return r->matrix[row->dtype] > 0 ? fmax(bytes / r->copy, flops / r->matrix[row->dtype]) : 0;
    }
    const double memory = roofline_memory_seconds(r, p, mode, bytes);
    if (flops == 0)
        return fmax(memory, bytes / (measure_resident(p->op, row, mode) * rafter_context_threads(r->context)));
    if (r->matrix[row->dtype] == 0)
        r->matrix[row->dtype] = measure_matrix(r->context, row->dtype);
    return fmax(memory, flops / r->matrix[row->dtype]);
}

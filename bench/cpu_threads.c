/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The elementwise and row ops on the CPU by threads, bf16, and what keeps them from the roofline:
 *
 *     rafter_cpu_threads [THREADS...]     default: 2, and all processors
 *
 * For each number of threads:
 *   machine   GB/s of copies and reads of large buffers: with non-temporal and ordinary stores, in
 *             pieces of several sizes that are dealt out in advance (static) or on demand (dynamic),
 *             in memory that one thread or all threads touched first, and in huge pages
 *   stores    GB/s of a copy of a tensor with cold caches, by size and kind of store: where the
 *             non-temporal ones begin to win
 *   tasks     microseconds of a loop whose tasks do nothing
 *   ops       ms and shares of the roofline with cold caches. `compute` is the share that the op's
 *             own loops would allow: all threads at once, each on data of its own in L1
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <omp.h>

#include "core/pages.h"
#include "core/threads.h"
#include "harness/context.h"
#include "harness/cpu.h"
#include "harness/streams.h"
#include "machine.h"
#include "measure.h"

enum { MIB = 1 << 20, BIG = 1024, TENSORS = 3, MOST = 256 };

/* Calls that are timed. With few threads each of them takes longer. */
static int repeats(int threads) {
    return threads > 4 ? 5 : 3;
}

enum touch { BY_ONE, BY_ALL, HUGE_PAGES, TOUCHES };
static const char *const touch_names[] = {"one thread", "all threads", "huge pages"};

/* The bytes of a tensor, TENSORS of them in one block. */
struct memory {
    char *base;
    size_t bytes; /* of one tensor */
};

static struct memory make_memory(size_t bytes, enum touch touch, int threads) {
    struct memory m = {NULL, bytes};
    char *const base = mmap(NULL, TENSORS * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return m;
    m.base = base;
    if (touch == HUGE_PAGES)
        madvise(base, TENSORS * bytes, MADV_HUGEPAGE);
    const int64_t pieces = (int64_t)(TENSORS * bytes / MIB);
#pragma omp parallel for num_threads(touch == BY_ONE ? 1 : threads) schedule(static)
    for (int64_t i = 0; i < pieces; i++)
        for (int64_t k = 0; k < MIB / 2; k++) { /* bf16 of about -1 to 1 */
            const uint16_t value = (uint16_t)((k * 40503 & 0x80ff) | 0x3f00);
            memcpy(base + i * MIB + 2 * k, &value, sizeof value);
        }
    return m;
}

static void free_memory(struct memory *m) {
    if (m->base)
        munmap(m->base, TENSORS * m->bytes);
    m->base = NULL;
}

static const struct streams *streams(void) {
#define LEVEL(what, isa) &what##isa,
    static const struct streams *const by_level[CPU_LEVELS] = {CPU_LEVEL_LIST(LEVEL, streams_)};
#undef LEVEL
    return by_level[cpu_level()];
}

static void ordinary_copy(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes); /* pieces are too small for memcpy's own non-temporal stores */
}

/* ---- machine --------------------------------------------------------------------------------- */

static volatile float keep;

enum work { READ, STREAM, ORDINARY };

/* Seconds, the least of several runs, to move `bytes` of m in pieces. */
static double move(const struct memory *m, enum work work, size_t bytes, size_t piece, bool dynamic, int threads,
                   const struct pace *cold) {
    const struct streams *const s = streams();
    const int64_t pieces = (int64_t)(bytes / piece);
    char *const from = m->base, *const to = m->base + m->bytes;
    omp_set_schedule(dynamic ? omp_sched_dynamic : omp_sched_static, dynamic ? 1 : 0);
    double best = INFINITY;
    for (int repeat = 0; repeat < repeats(threads); repeat++) {
        if (cold)
            pace_evict(cold, NULL);
        float sum = 0;
        const double start = clock_seconds();
#pragma omp parallel for num_threads(threads) schedule(runtime) reduction(+ : sum)
        for (int64_t i = 0; i < pieces; i++) {
            const size_t at = (size_t)i * piece;
            if (work == READ)
                sum += s->read(from + at, piece);
            else
                (work == STREAM ? s->copy : ordinary_copy)(to + at, from + at, piece);
        }
        best = fmin(best, clock_seconds() - start);
        keep = sum;
    }
    return best;
}

/* Prints the machine's rates. Returns those of the roofline, which are measured as bench does. */
static bool machine_rates(int threads, double *copy, double *read) {
    const size_t bytes = (size_t)BIG * MIB;
    printf("\nmachine, %d threads, GB/s: copies count bytes read and written\n", threads);
    printf("%-14s%10s%10s%10s%10s%10s%10s%10s%10s\n", "touched by", "read", "nt static", "nt 64K", "nt 128K", "nt 512K",
           "nt 2M", "ordinary", "ord 128K");
    *copy = *read = 0;
    for (int touch = 0; touch < TOUCHES; touch++) {
        struct memory m = make_memory(bytes, (enum touch)touch, threads);
        if (!m.base)
            return false;
        const double n = (double)bytes;
        const double r = n / move(&m, READ, bytes, MIB, false, threads, NULL);
        const double c = 2 * n / move(&m, STREAM, bytes, MIB, false, threads, NULL);
        printf("%-14s%10.1f%10.1f", touch_names[touch], r / 1e9, c / 1e9);
        for (size_t piece = 64 << 10; piece <= 2 * MIB; piece *= piece == 64 << 10 ? 2 : 4)
            printf("%10.1f", 2 * n / move(&m, STREAM, bytes, piece, true, threads, NULL) / 1e9);
        printf("%10.1f", 2 * n / move(&m, ORDINARY, bytes, MIB, false, threads, NULL) / 1e9);
        printf("%10.1f\n", 2 * n / move(&m, ORDINARY, bytes, 128 << 10, true, threads, NULL) / 1e9);
        fflush(stdout);
        if (touch != HUGE_PAGES) {
            *copy = fmax(*copy, c);
            *read = fmax(*read, r);
        }
        free_memory(&m);
    }
    return true;
}

static bool store_sizes(int threads, const struct pace *pace) {
    static const int mib[] = {1, 4, 16, 32, 64, 128, 256, 512};
    struct memory m = make_memory((size_t)512 * MIB, BY_ONE, threads);
    if (!m.base)
        return false;
    printf("\nstores, %d threads: GB/s of a cold copy, tasks of 128 KiB\n%-14s", threads, "MiB");
    for (size_t i = 0; i < sizeof mib / sizeof *mib; i++)
        printf("%10d", mib[i]);
    for (int work = STREAM; work <= ORDINARY; work++) {
        printf("\n%-14s", work == STREAM ? "non-temporal" : "ordinary");
        for (size_t i = 0; i < sizeof mib / sizeof *mib; i++) {
            const size_t bytes = (size_t)mib[i] * MIB;
            const double seconds = move(&m, (enum work)work, bytes, 128 << 10, true, threads, pace);
            printf("%10.1f", 2 * (double)bytes / seconds / 1e9);
        }
    }
    printf("\n");
    free_memory(&m);
    return true;
}

/* ---- tasks ----------------------------------------------------------------------------------- */

static void nothing(void *arg, int64_t task) {
    (void)arg;
    (void)task;
}

static void task_cost(rafter_context *context, int threads) {
    enum { CALLS = 2000 };
    printf("\ntasks, %d threads: us of a loop of tasks that do nothing, 20 us after the last one\n", threads);
    for (int64_t tasks = threads; tasks <= 64 * threads; tasks *= 8) {
        double best = INFINITY, sum = 0;
        for (int i = 0; i < CALLS; i++) {
            const double wait = clock_seconds() + 20e-6;
            while (clock_seconds() < wait)
                ;
            const double start = clock_seconds();
            rafter_parallel(context, tasks, nothing, NULL);
            const double seconds = clock_seconds() - start;
            best = fmin(best, seconds);
            sum += seconds;
        }
        printf("%8lld tasks%10.1f least%10.1f mean\n", (long long)tasks, 1e6 * best, 1e6 * sum / CALLS);
    }
}

/* ---- ops ------------------------------------------------------------------------------------- */

enum op { SCALE, RELU, SILU, SOFTMAX, LSE, LOSS, OPS };
static const struct {
    const char *name;
    enum op op;
    bool backward;
    int64_t columns;
    int read, written; /* tensors */
} ops[] = {
    {"scale", SCALE, false, 4096, 1, 1},
    {"relu fwd", RELU, false, 4096, 1, 1},
    {"relu bwd", RELU, true, 4096, 2, 1},
    {"silu fwd", SILU, false, 4096, 1, 1},
    {"silu bwd", SILU, true, 4096, 2, 1},
    {"softmax 4096 fwd", SOFTMAX, false, 4096, 1, 1},
    {"softmax 4096 bwd", SOFTMAX, true, 4096, 2, 1},
    {"logsumexp 4096 fwd", LSE, false, 4096, 1, 0},
    {"logsumexp 4096 bwd", LSE, true, 4096, 1, 1},
    {"cross_entropy 32768 fwd", LOSS, false, 32768, 1, 0},
    {"cross_entropy 32768 bwd", LOSS, true, 32768, 1, 1},
};
enum { ROWS_OF_OPS = sizeof ops / sizeof *ops };

static DLTensor tensor(void *data, rafter_dtype dtype, int ndim, const int64_t *shape) {
    DLTensor t = {.data = data, .device = {kDLCPU, 0}, .ndim = ndim, .shape = (int64_t *)(uintptr_t)shape};
    t.dtype = dtype == RAFTER_BF16  ? (DLDataType){kDLBfloat, 16, 1}
              : dtype == RAFTER_F32 ? (DLDataType){kDLFloat, 32, 1}
                                    : (DLDataType){kDLInt, 64, 1};
    return t;
}

/* One call on `rows` rows of m. small: memory for 3 * rows floats and rows labels. */
static bool call(rafter_context *context, int which, const struct memory *m, int64_t rows, float *small) {
    const int64_t shape[] = {rows, ops[which].columns}, one = 1;
    const DLTensor x = tensor(m->base, RAFTER_BF16, 2, shape), y = tensor(m->base + m->bytes, RAFTER_BF16, 2, shape),
                   dy = tensor(m->base + 2 * m->bytes, RAFTER_BF16, 2, shape),
                   lse = tensor(small, RAFTER_F32, 1, shape), dlse = tensor(small + rows, RAFTER_F32, 1, shape),
                   scalar = tensor(small + 2 * rows, RAFTER_F32, 0, NULL), factor = tensor(small, RAFTER_F32, 1, &one),
                   labels = tensor(small + 4 * rows, RAFTER_I64, 1, shape);
    const bool backward = ops[which].backward;
    const rafter_act_args act = {.size = sizeof act,
                                 .kind = ops[which].op == RELU   ? RAFTER_ACT_RELU
                                         : ops[which].op == SILU ? RAFTER_ACT_SILU
                                                                 : RAFTER_ACT_SOFTMAX,
                                 .dim = -1,
                                 .x = &x,
                                 .y = backward ? &x : &y, /* the gradient of softmax reads y */
                                 .dy = &dy,
                                 .dx = &y};
    const rafter_logsumexp_args sum = {.size = sizeof sum,
                                       .dim = -1,
                                       .x = &x,
                                       .lse = &lse,
                                       .dlse = backward ? &dlse : NULL,
                                       .dx = backward ? &y : NULL};
    const rafter_cross_entropy_args loss = {.size = sizeof loss,
                                            .logits = &x,
                                            .target = &labels,
                                            .loss = backward ? NULL : &scalar,
                                            .lse = &lse,
                                            .dlogits = backward ? &y : NULL};
    const rafter_scale_args scale = {.size = sizeof scale, .x = &x, .factor = &factor, .y = &y};
    rafter_status status;
    switch (ops[which].op) {
    case SCALE: status = rafter_scale_forward(context, &scale); break;
    case LSE: status = (backward ? rafter_logsumexp_backward : rafter_logsumexp_forward)(context, &sum); break;
    case LOSS:
        status = (backward ? rafter_cross_entropy_backward : rafter_cross_entropy_forward)(context, &loss);
        break;
    default: status = (backward ? rafter_act_backward : rafter_act_forward)(context, &act); break;
    }
    if (status != RAFTER_OK)
        fprintf(stderr, "rafter: %s: %s\n", ops[which].name, rafter_last_error(context));
    return status == RAFTER_OK;
}

static float *make_small(int64_t rows) {
    float *small = calloc((size_t)rows + 1, 6 * sizeof *small);
    for (int64_t i = 0; small && i < rows; i++)
        small[i] = 10.0f, small[rows + i] = 1.0f; /* lse, or scale's factor; dlse */
    return small;
}

/* Seconds per row with data in L1 and all threads busy; each has a context of its own. */
static double compute_seconds(int which, int threads) {
    const int64_t rows = 1;
    double seconds = 0;
#pragma omp parallel num_threads(threads) reduction(+ : seconds)
    {
        rafter_context *context = NULL;
        const rafter_context_options options = {.size = sizeof options, .threads = 1};
        struct memory m = make_memory((size_t)MIB, BY_ONE, 1);
        float *small = make_small(rows);
        bool good = rafter_context_create(&context, &options) == RAFTER_OK && m.base && small;
        int64_t calls = 0;
#pragma omp barrier
        const double start = clock_seconds(), end = start + 5e-3;
        while (good && clock_seconds() < end)
            for (int i = 0; good && i < 4; i++, calls++)
                good = call(context, which, &m, rows, small);
        seconds += calls ? (clock_seconds() - start) / (double)calls : INFINITY;
        rafter_context_destroy(context);
        free(small);
        free_memory(&m);
    }
    return seconds / threads / threads; /* mean of the threads; all of them do a row in that time */
}

struct variant {
    const char *name;
    enum touch touch;
    int64_t stream_above; /* 0: the library's own limit */
};
static const struct variant variants[] = {
    {"as it is", BY_ONE, 0},  {"nt always", BY_ONE, 1},      {"nt never", BY_ONE, INT64_MAX},
    {"all touch", BY_ALL, 0}, {"huge pages", HUGE_PAGES, 0}, {"huge, nt", HUGE_PAGES, 1},
};
enum { VARIANTS = sizeof variants / sizeof *variants };

static bool op_shares(rafter_context *context, int threads, int mib, const struct pace *pace, double copy,
                      double read) {
    const size_t bytes = (size_t)mib * MIB;
    double seconds[ROWS_OF_OPS][VARIANTS], compute[ROWS_OF_OPS];
    bool good = true;
    for (int v = 0; v < VARIANTS; v++) {
        struct memory m = make_memory(bytes, variants[v].touch, threads);
        rafter_stream_above(variants[v].stream_above);
        for (int i = 0; i < ROWS_OF_OPS && good; i++) {
            const int64_t rows = (int64_t)bytes / 2 / ops[i].columns;
            float *small = make_small(rows);
            struct samples samples = {0};
            good = m.base && small && call(context, i, &m, rows, small);
            for (int k = 0; k < repeats(threads) && good; k++) {
                pace_evict(pace, context);
                const double start = clock_seconds();
                good = call(context, i, &m, rows, small) && samples_add(&samples, clock_seconds() - start);
            }
            seconds[i][v] = good ? samples_summary(&samples).median : NAN;
            samples_free(&samples);
            free(small);
        }
        free_memory(&m);
    }
    rafter_stream_above(0);
    printf("\nops, %d threads, tensors of %d MiB: ms, then shares of the roofline in %%\n%-26s%10s", threads, mib, "op",
           "ms");
    for (int v = 0; v < VARIANTS; v++)
        printf("%12s", variants[v].name);
    printf("%12s\n", "compute");
    for (int i = 0; i < ROWS_OF_OPS && good; i++) {
        const int64_t rows = (int64_t)bytes / 2 / ops[i].columns;
        const double copied = 2.0 * ops[i].written * (double)bytes;
        const double rest = (ops[i].read + ops[i].written) * (double)bytes - copied;
        const double floor = copied / copy + rest / read;
        compute[i] = compute_seconds(i, threads) * (double)rows;
        printf("%-26s%10.3f", ops[i].name, 1e3 * seconds[i][0]);
        for (int v = 0; v < VARIANTS; v++)
            printf("%12.0f", 100 * floor / seconds[i][v]);
        printf("%12.0f\n", 100 * floor / compute[i]);
    }
    fflush(stdout);
    return good;
}

static bool measure(int threads) {
    rafter_context *context = NULL;
    const rafter_context_options options = {.size = sizeof options, .threads = threads};
    struct pace pace = {0};
    double copy, read;
    bool good = rafter_context_create(&context, &options) == RAFTER_OK && pace_create(&pace, false, context) &&
                machine_rates(threads, &copy, &read) && store_sizes(threads, &pace);
    if (good) {
        task_cost(context, threads);
        good =
            op_shares(context, threads, 24, &pace, copy, read) && op_shares(context, threads, 144, &pace, copy, read);
    }
    pace_destroy(&pace, NULL);
    rafter_context_destroy(context);
    return good;
}

int main(int argc, char **argv) {
    printf("%s, %d processors, L1 %zu KiB, L2 %zu KiB, L3 %zu KiB\n", machine_cpu(), machine_processors(),
           machine_cache_level(1) >> 10, machine_cache_level(2) >> 10, machine_cache_level(3) >> 10);
    const int usual[] = {2, machine_processors()};
    const int count = argc > 1 ? argc - 1 : usual[1] > 2 ? 2 : 1;
    for (int i = 0; i < count; i++) {
        const int threads = argc > 1 ? atoi(argv[i + 1]) : usual[i];
        if (threads < 1 || threads > MOST || !measure(threads)) {
            fprintf(stderr, "rafter: no result with %d threads\n", threads);
            return 1;
        }
    }
    return 0;
}

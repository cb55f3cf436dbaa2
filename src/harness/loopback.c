/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/loopback.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "harness/context.h"
#include "harness/gpu.h"

struct rank {
    struct loopback *wire;
    int rank;
    const rafter_context *context;
    /* What it has brought to the collective that is running. */
    const char *send;
    char *receive;
    size_t bytes;
    char *staged; /* on a GPU: a copy of `send` on the host */
};

struct loopback {
    int ranks;
    pthread_mutex_t lock;
    pthread_cond_t all_there;
    int waiting;
    unsigned generation;
    int error;          /* not 0: everything fails from now on */
    int64_t calls_left; /* until it breaks; negative: never */
    struct loopback_traffic traffic;
    struct rank rank[LOOPBACK_MOST_RANKS];
};

static bool on_gpu(const struct rank *own) {
    return own->context && context_on_gpu(own->context);
}

/* Waits until all ranks have called it. An error that is set after that belongs to the next meeting. */
static int meet(struct loopback *wire) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LOOPBACK_SECONDS;
    pthread_mutex_lock(&wire->lock);
    const unsigned generation = wire->generation;
    if (!wire->error && ++wire->waiting == wire->ranks) {
        wire->waiting = 0;
        wire->generation++;
        pthread_cond_broadcast(&wire->all_there);
    }
    while (generation == wire->generation && !wire->error)
        if (pthread_cond_timedwait(&wire->all_there, &wire->lock, &until) != 0) {
            wire->error = LOOPBACK_ALONE;
            pthread_cond_broadcast(&wire->all_there);
        }
    const int error = generation == wire->generation ? wire->error : 0;
    pthread_mutex_unlock(&wire->lock);
    return error;
}

static void set_error(struct loopback *wire, int error) {
    pthread_mutex_lock(&wire->lock);
    wire->error = wire->error ? wire->error : error;
    pthread_cond_broadcast(&wire->all_there);
    pthread_mutex_unlock(&wire->lock);
}

/* Begins a collective. When it returns 0, every rank's data can be read by all. */
static int begin(struct rank *own, const void *send, void *receive, size_t bytes, size_t send_bytes) {
    struct loopback *const wire = own->wire;
    own->send = send;
    own->receive = receive;
    own->bytes = bytes;
    own->staged = NULL;
    if (on_gpu(own)) {
        own->staged = malloc(send_bytes);
        if (!own->staged || !gpu_synchronize(own->context) || !gpu_copy(own->staged, send, send_bytes))
            set_error(wire, LOOPBACK_BROKEN);
        own->send = own->staged;
    }
    if (own->rank == 0 && wire->calls_left == 0)
        set_error(wire, LOOPBACK_BROKEN);
    if (own->rank == 0 && wire->calls_left > 0)
        wire->calls_left--;
    int error = meet(wire);
    for (int r = 0; r < wire->ranks && !error; r++)
        if (wire->rank[r].bytes != bytes)
            error = LOOPBACK_MISMATCH;
    return error;
}

/* Ends a collective: returns when all ranks have read what they need. */
static int end(struct rank *own, int error) {
    if (error)
        set_error(own->wire, error);
    error = meet(own->wire);
    free(own->staged);
    own->staged = NULL;
    return error;
}

static bool deliver(const struct rank *own, void *to, const void *from, size_t bytes) {
    if (on_gpu(own))
        return gpu_copy(to, from, bytes);
    memcpy(to, from, bytes);
    return true;
}

static int all_gather(void *user, const void *send, void *receive, size_t bytes, void *stream) {
    struct rank *const own = user;
    struct loopback *const wire = own->wire;
    (void)stream;
    int error = begin(own, send, receive, bytes, bytes);
    for (int r = 0; r < wire->ranks && !error; r++)
        if (!deliver(own, (char *)receive + (size_t)r * bytes, wire->rank[r].send, bytes))
            error = LOOPBACK_BROKEN;
    if (own->rank == 0) {
        wire->traffic.gathers++;
        wire->traffic.gathered_bytes += bytes;
    }
    return end(own, error);
}

/* The sum over all ranks, in rank order, of `count` numbers from `first` on. */
static float *sum_of(const struct loopback *wire, size_t first, size_t count) {
    float *const sum = calloc(count + 1, sizeof *sum);
    for (int r = 0; r < wire->ranks && sum; r++)
        for (size_t i = 0; i < count; i++) {
            float one;
            memcpy(&one, wire->rank[r].send + (first + i) * sizeof one, sizeof one);
            sum[i] += one;
        }
    return sum;
}

static int add_up(struct rank *own, const float *send, float *receive, size_t total, size_t first, size_t count) {
    struct loopback *const wire = own->wire;
    int error = begin(own, send, receive, total * sizeof *send, total * sizeof *send);
    float *const sum = error ? NULL : sum_of(wire, first, count);
    if (own->rank == 0) {
        wire->traffic.sums++;
        wire->traffic.summed_bytes += total * sizeof *send;
    }
    error = end(own, !error && !sum ? LOOPBACK_BROKEN : error); /* only then write: `receive` may be `send` */
    if (!error && !deliver(own, receive, sum, count * sizeof *sum))
        error = LOOPBACK_BROKEN;
    free(sum);
    return error;
}

static int all_reduce_sum(void *user, float *data, size_t count, void *stream) {
    (void)stream;
    return add_up(user, data, data, count, 0, count);
}

static int reduce_scatter_sum(void *user, const float *send, float *receive, size_t count, void *stream) {
    struct rank *const own = user;
    (void)stream;
    return add_up(own, send, receive, count * (size_t)own->wire->ranks, count * (size_t)own->rank, count);
}

static const char *describe(void *user, int error) {
    (void)user;
    return error == LOOPBACK_MISMATCH ? "ranks pass different sizes"
           : error == LOOPBACK_ALONE  ? "a rank did not come"
                                      : "the wire is broken";
}

struct loopback *loopback_new(int ranks) {
    struct loopback *const wire = calloc(1, sizeof *wire);
    if (!wire || ranks < 1 || ranks > LOOPBACK_MOST_RANKS)
        abort();
    wire->ranks = ranks;
    wire->calls_left = -1;
    pthread_mutex_init(&wire->lock, NULL);
    pthread_cond_init(&wire->all_there, NULL);
    return wire;
}

void loopback_free(struct loopback *wire) {
    pthread_cond_destroy(&wire->all_there);
    pthread_mutex_destroy(&wire->lock);
    free(wire);
}

rafter_communicator loopback_rank(struct loopback *wire, int rank, const rafter_context *context) {
    wire->rank[rank].wire = wire;
    wire->rank[rank].rank = rank;
    wire->rank[rank].context = context;
    return (rafter_communicator){.size = sizeof(rafter_communicator),
                                 .user = &wire->rank[rank],
                                 .rank = rank,
                                 .ranks = wire->ranks,
                                 .all_gather = all_gather,
                                 .all_reduce_sum = all_reduce_sum,
                                 .reduce_scatter_sum = reduce_scatter_sum,
                                 .describe = describe};
}

void loopback_leave(const rafter_communicator *rank) {
    const struct rank *const own = rank->user;
    set_error(own->wire, LOOPBACK_ALONE);
}

void loopback_break(struct loopback *wire, int calls) {
    wire->calls_left = calls;
}

struct loopback_traffic loopback_traffic(const struct loopback *wire) {
    return wire->traffic;
}

struct thread {
    pthread_t id;
    void (*body)(void *arg, int rank);
    void *arg;
    int rank;
};

static void *run_thread(void *arg) {
    const struct thread *const own = arg;
    own->body(own->arg, own->rank);
    return NULL;
}

void loopback_run(int ranks, void (*body)(void *arg, int rank), void *arg) {
    struct thread threads[LOOPBACK_MOST_RANKS];
    for (int r = 0; r < ranks; r++) {
        threads[r] = (struct thread){.body = body, .arg = arg, .rank = r};
        if (pthread_create(&threads[r].id, NULL, run_thread, &threads[r]) != 0)
            abort();
    }
    for (int r = 0; r < ranks; r++)
        pthread_join(threads[r].id, NULL);
}

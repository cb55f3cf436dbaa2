/* SPDX-License-Identifier: Apache-2.0 */
#include "core/pool.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>

#include <linux/futex.h>
#include <sys/syscall.h>

#include "core/fp.h"
#include "core/kernel_memory.h"

enum {
    LINE = 128, /* bytes; two cache lines, which processors fetch together */
    JOBS = 64,  /* parallel calls at one time; further ones run on their own thread alone */
    MOST_WORKERS = RAFTER_MOST_THREADS - 1,
    WAKE_AT_ONCE = 4,         /* waking takes the waker microseconds; those it woke wake the others */
    WORKER_STACK = 256 << 10, /* kernel memory, 32 KiB of frames, and what sanitizers add */
};
/* How long a waiting thread spins before it sleeps: longer than the pauses between the phases of a call and between
 * the calls of a loop, and short enough not to hold up other programs. */
static const int64_t SPIN_NANOSECONDS = 2000000;
static const int64_t RETRY_NANOSECONDS = 1000000000; /* after thread creation has failed */

/* Fields of a job's state: workers inside, free seats, and two flags. */
enum { INSIDE = 0x7ff, ONE_SEAT = 1 << 11, SEATS = 0x7ff << 11, OPEN = 1 << 22, WAITED_FOR = 1 << 23 };

/* A parallel call. A worker enters it by taking a seat, and the call ends when all workers have left. Only the caller
 * and workers inside may touch the members other than `state` and `most_running`. */
struct job {
    _Alignas(LINE) _Atomic uint32_t state; /* the fields above; a futex that the caller sleeps on */
    _Atomic int most_running;              /* workers enter only while fewer threads than this are running */
    int64_t tasks;
    void (*body)(void *arg, int64_t task);
    void *arg;
    struct rafter_fp fp;
    _Alignas(LINE) _Atomic int64_t next; /* task to take */
};

static struct {
    _Alignas(LINE) _Atomic uint32_t news; /* a futex for idle workers: counts events that may give them work */
    _Atomic int sleeping;                 /* workers */
    _Alignas(LINE) _Atomic uint64_t used; /* a bit per job: some call has it */
    _Atomic uint64_t open;                /* a bit per job: it may have seats */
    _Atomic int running;                  /* threads inside jobs, callers included */
    _Atomic int workers;
    _Atomic bool changing; /* a thread is creating or ending workers; it alone writes `thread` */
    _Atomic bool stopped;  /* the library is being unloaded */
    _Atomic int64_t retry; /* no thread is created before this time */
    pthread_t thread[MOST_WORKERS];
    struct job job[JOBS];
} pool;

_Thread_local char *rafter_thread_memory;

/* ---- waiting --------------------------------------------------------------------------------- */

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
    __asm__ volatile("pause");
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    const int kept = errno;
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
    errno = kept;
}

static void wake(_Atomic uint32_t *word, int count) {
    const int kept = errno;
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
    errno = kept;
}

int rafter_pool_processors(void) {
    static _Atomic int found; /* every thread that races here writes the same value */
    if (found == 0) {
        cpu_set_t set;
        int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
        found = count > 0 ? count : 1;
    }
    return found;
}

/* Spins until (word & mask) equals `value` or, with `other`, differs from it. False if that takes
 * too long. */
static bool spin_until(_Atomic uint32_t *word, uint32_t mask, uint32_t value, bool other) {
    /* With more threads than processors, the one that is waited for may need this processor. */
    const bool crowded = atomic_load_explicit(&pool.workers, memory_order_relaxed) >= rafter_pool_processors();
    const int64_t end = crowded ? 0 : now() + SPIN_NANOSECONDS;
    for (;;) {
        for (int i = 0; i < 64; i++) {
            if (((atomic_load_explicit(word, memory_order_acquire) & mask) == value) != other)
                return true;
            relax();
        }
        if (end == 0 || now() >= end)
            return false;
        sched_yield(); /* whoever else wants this processor, perhaps the thread that is waited for, gets it */
    }
}

/* Lets idle workers look for work: all that spin, and up to `count` of those that sleep. */
static void announce(int count) {
    atomic_fetch_add(&pool.news, 1);
    if (count > 0 && atomic_load(&pool.sleeping) > 0)
        wake(&pool.news, count < WAKE_AT_ONCE ? count : WAKE_AT_ONCE);
}

/* ---- workers --------------------------------------------------------------------------------- */

/* Counts this thread as running if that makes no more than `most` threads. */
static bool start_running(int most) {
    int running = atomic_load(&pool.running);
    while (running < most)
        if (atomic_compare_exchange_weak(&pool.running, &running, running + 1))
            return true;
    return false;
}

/* Stops counting this thread as running if more than `most` are: a call has begun elsewhere. */
static bool give_way(int most) {
    int running = atomic_load_explicit(&pool.running, memory_order_relaxed);
    while (running > most)
        if (atomic_compare_exchange_weak(&pool.running, &running, running - 1))
            return true;
    return false;
}

static bool enter(struct job *job) {
    if (!start_running(atomic_load_explicit(&job->most_running, memory_order_relaxed)))
        return false;
    uint32_t state = atomic_load(&job->state);
    while (state & SEATS)
        if (atomic_compare_exchange_weak(&job->state, &state, state - ONE_SEAT + 1))
            return true;
    atomic_fetch_sub(&pool.running, 1);
    return false;
}

/* Leaves a job, with or without giving the seat back. */
static void leave(struct job *job, bool seat_is_free) {
    uint32_t state = atomic_load(&job->state), after;
    do
        after = state - 1 + (seat_is_free && state & OPEN ? ONE_SEAT : 0);
    while (!atomic_compare_exchange_weak(&job->state, &state, after));
    if ((after & INSIDE) == 0 && state & WAITED_FOR)
        wake(&job->state, 1); /* by now the job may belong to another call; waking its caller does no harm */
}

/* Takes tasks of a job that this worker has entered, until none is left or too many threads run. */
static void help(struct job *job) {
    const int most = atomic_load_explicit(&job->most_running, memory_order_relaxed);
    if (atomic_load(&job->state) & SEATS && atomic_load(&pool.sleeping) > 0)
        wake(&pool.news, WAKE_AT_ONCE);
    rafter_fp_set(job->fp);
    bool gave_way = false;
    while (!atomic_load_explicit(&pool.stopped, memory_order_relaxed)) {
        gave_way = give_way(most);
        if (gave_way)
            break;
        const int64_t task = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (task >= job->tasks)
            break;
        job->body(job->arg, task);
    }
    if (!gave_way)
        atomic_fetch_sub(&pool.running, 1);
    leave(job, gave_way);
}

/* Enters an open job that has a free seat, and helps it; false if there is none. The search starts
 * at a different job each time, so that workers spread evenly over jobs. */
static bool help_any(unsigned *first) {
    const uint64_t open = atomic_load(&pool.open);
    if (open == 0)
        return false;
    *first = (*first + 1) % JOBS;
    for (unsigned i = 0; i < JOBS; i++) {
        const unsigned at = (*first + i) % JOBS;
        if (open >> at & 1 && enter(&pool.job[at])) {
            help(&pool.job[at]);
            return true;
        }
    }
    return false;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wframe-larger-than=" /* a worker's stack is its own */
static void *work(void *arg) {
    unsigned first = (unsigned)(uintptr_t)arg;
    _Alignas(64) char memory[RAFTER_THREAD_BYTES];
    rafter_thread_memory = memory;
    for (;;) {
        const uint32_t seen = atomic_load(&pool.news);
        if (atomic_load(&pool.stopped))
            return NULL;
        if (help_any(&first) || spin_until(&pool.news, UINT32_MAX, seen, true))
            continue;
        atomic_fetch_add(&pool.sleeping, 1);
        sleep_while(&pool.news, seen);
        atomic_fetch_sub(&pool.sleeping, 1);
    }
}
#pragma GCC diagnostic pop

/* ---- creating and ending them ---------------------------------------------------------------- */

/* Runs in the child of a fork, which has none of the parent's other threads: clears everything that
 * these held or counted. The forking thread is in no job, because jobs run none of the caller's code. */
static void forget_workers(void) {
    atomic_store(&pool.workers, 0);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.running, 0);
    atomic_store(&pool.open, 0);
    atomic_store(&pool.used, 0);
    atomic_store(&pool.changing, false);
    atomic_store(&pool.retry, 0);
    for (int i = 0; i < JOBS; i++)
        atomic_store(&pool.job[i].state, 0);
}

static bool fork_is_handled;

static void handle_fork(void) {
    fork_is_handled = pthread_atfork(NULL, NULL, forget_workers) == 0;
}

/* The caller's signal handlers do not run on workers, apart from those of faults and of profilers. */
static void block_signals(sigset_t *before) {
    static const int not_blocked[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGABRT, SIGSYS, SIGPROF};
    sigset_t set;
    sigfillset(&set);
    for (size_t i = 0; i < sizeof not_blocked / sizeof *not_blocked; i++)
        sigdelset(&set, not_blocked[i]);
    pthread_sigmask(SIG_SETMASK, &set, before);
}

/* The bytes of a thread's stack that the C library takes for itself. With glibc they include the thread-local variables
 * of the program and of the libraries it was started with, which may be megabytes. glibc tells only through a function
 * that its headers do not declare; other C libraries do not have it. */
static size_t least_stack(const pthread_attr_t *attributes) {
    typedef size_t get_least(const pthread_attr_t *);
    get_least *get = NULL;
    *(void **)&get = dlsym(RTLD_DEFAULT, "__pthread_get_minstack");
    if (get)
        return get(attributes);
    const long least = sysconf(_SC_THREAD_STACK_MIN);
    return (size_t)(least > 0 ? least : PTHREAD_STACK_MIN);
}

static bool create_worker(pthread_t *thread, void *arg) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    pthread_attr_setstacksize(&attributes, least_stack(&attributes) + WORKER_STACK);
    const bool created = pthread_create(thread, &attributes, work, arg) == 0;
    pthread_attr_destroy(&attributes);
    if (created)
        pthread_setname_np(*thread, "rafter");
    return created;
}

/* Creates workers until there are `wanted` or creation fails. Returns at once if another thread is
 * creating or ending workers. */
static void provide(int wanted) {
    if (atomic_load_explicit(&pool.workers, memory_order_relaxed) >= wanted || now() < atomic_load(&pool.retry))
        return;
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    bool idle = false;
    if (pthread_once(&once, handle_fork) != 0 || !fork_is_handled ||
        !atomic_compare_exchange_strong(&pool.changing, &idle, true))
        return;
    sigset_t mask;
    block_signals(&mask);
    int workers = atomic_load(&pool.workers);
    while (workers < wanted && !atomic_load(&pool.stopped) &&
           create_worker(&pool.thread[workers], (void *)(uintptr_t)workers))
        atomic_store(&pool.workers, ++workers);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    if (workers < wanted)
        atomic_store(&pool.retry, now() + RETRY_NANOSECONDS);
    atomic_store(&pool.changing, false);
}

/* When the library is unloaded or the process exits. Calls that are still under way, or begin
 * later, go on without workers. */
__attribute__((destructor)) static void stop(void) {
    atomic_store(&pool.stopped, true);
    bool idle = false;
    while (!atomic_compare_exchange_weak(&pool.changing, &idle, true)) {
        idle = false;
        sched_yield();
    }
    atomic_fetch_add(&pool.news, 1);
    wake(&pool.news, INT_MAX);
    const int workers = atomic_load(&pool.workers);
    for (int i = 0; i < workers; i++)
        pthread_join(pool.thread[i], NULL);
    atomic_store(&pool.workers, 0);
    atomic_store(&pool.changing, false);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static struct job *take_job(int *index) {
    uint64_t used = atomic_load(&pool.used);
    while (used != UINT64_MAX) {
        *index = __builtin_ctzll(~used);
        if (atomic_compare_exchange_weak(&pool.used, &used, used | (uint64_t)1 << *index))
            return &pool.job[*index];
    }
    return NULL;
}

/* No worker enters any more; returns when the last one has left. */
static void close_job(struct job *job) {
    atomic_fetch_and(&job->state, INSIDE);
    if (spin_until(&job->state, INSIDE, 0, false))
        return;
    uint32_t state = atomic_fetch_or(&job->state, WAITED_FOR) | WAITED_FOR;
    while (state & INSIDE) {
        sleep_while(&job->state, state);
        state = atomic_load(&job->state);
    }
}

void rafter_pool_run(int threads, int64_t tasks, void (*body)(void *arg, int64_t task), void *arg) {
    int helpers = threads < RAFTER_MOST_THREADS ? threads - 1 : MOST_WORKERS;
    helpers = helpers < tasks - 1 ? helpers : (int)(tasks - 1);
    if (helpers > 0)
        provide(helpers);
    int index;
    struct job *const job =
        helpers > 0 && atomic_load_explicit(&pool.workers, memory_order_relaxed) > 0 ? take_job(&index) : NULL;
    if (!job) {
        for (int64_t task = 0; task < tasks; task++)
            body(arg, task);
        return;
    }
    const int processors = rafter_pool_processors(), most = threads > processors ? threads : processors;
    atomic_store_explicit(&job->most_running, most, memory_order_relaxed);
    atomic_store_explicit(&job->next, 0, memory_order_relaxed);
    job->tasks = tasks;
    job->body = body;
    job->arg = arg;
    job->fp = rafter_fp_get();
    const int room = most - (atomic_fetch_add(&pool.running, 1) + 1);
    atomic_store(&job->state, OPEN | (uint32_t)helpers * ONE_SEAT);
    atomic_fetch_or(&pool.open, (uint64_t)1 << index);
    announce(helpers < room ? helpers : room);

    int64_t task;
    while ((task = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < tasks)
        body(arg, task);

    atomic_fetch_and(&pool.open, ~((uint64_t)1 << index));
    close_job(job);
    atomic_fetch_sub(&pool.running, 1);
    atomic_fetch_and(&pool.used, ~((uint64_t)1 << index));
    if (atomic_load(&pool.open) != 0)
        announce(1); /* there is room for a worker in another call now */
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Calls on threads of the host: rafter_context_options.parallel. */
#include <fenv.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "core/fp.h"
#include "host.h"

enum { THREADS = 5 };

struct work {
    void (*work)(void *arg, int32_t i);
    void *arg;
    int32_t i;
};

static _Atomic int parallel_calls, changed_environments;

static void *run_one(void *arg) {
    const struct work *const w = arg;
    fesetround(FE_DOWNWARD); /* the thread's own mode, which the library must not leave changed */
    const uint64_t before = rafter_fp_get().control;
    w->work(w->arg, w->i);
    changed_environments += rafter_fp_get().control != before;
    fesetround(FE_TONEAREST);
    return NULL;
}

static void on_threads(void *user, int32_t count, void (*work)(void *arg, int32_t i), void *arg) {
    (void)user;
    expect(count > 1 && count <= THREADS, "parallel is asked for %d threads of %d", (int)count, THREADS);
    parallel_calls++;
    pthread_t thread[THREADS];
    struct work one[THREADS];
    for (int32_t i = 0; i < count; i++) {
        one[i] = (struct work){work, arg, i};
        expect(pthread_create(&thread[i], NULL, run_one, &one[i]) == 0, "no thread");
    }
    for (int32_t i = 0; i < count; i++)
        pthread_join(thread[i], NULL);
}

static void backwards(void *user, int32_t count, void (*work)(void *arg, int32_t i), void *arg) {
    ++*(int *)user;
    for (int32_t i = count - 1; i >= 0; i--)
        work(arg, i);
}

static void last_alone(void *user, int32_t count, void (*work)(void *arg, int32_t i), void *arg) {
    ++*(int *)user;
    work(arg, count - 1);
}

static void not_at_all(void *user, int32_t count, void (*work)(void *arg, int32_t i), void *arg) {
    ++*(int *)user;
    (void)count, (void)work, (void)arg;
}

typedef void parallel(void *user, int32_t count, void (*work)(void *arg, int32_t i), void *arg);

static rafter_context *context_on(parallel *host, void *user) {
    const rafter_context_options options = {.size = sizeof options, .threads = THREADS, .parallel = host, .user = user};
    rafter_context *context;
    expect(rafter_context_create(&context, &options) == RAFTER_OK, "no context: %s", rafter_last_error(NULL));
    return context;
}

/* The same bits as on one thread, whatever the host does; no thread of the library's own. */
void threads_of_the_host(void) {
    static const struct {
        const char *name;
        parallel *host;
    } hosts[] = {
        {"threads", on_threads}, {"backwards", backwards}, {"last alone", last_alone}, {"not at all", not_at_all}};
    rafter_context *const one = new_context(1, NULL);
    for (size_t h = 0; h < sizeof hosts / sizeof *hosts; h++) {
        int calls = 0;
        rafter_context *const many = context_on(hosts[h].host, &calls);
        for (int call = 0; call < calls_count(); call++)
            expect(result_of(many, call) == result_of(one, call), "%s: other bits on the host's threads (%s)",
                   call_name(call), hosts[h].name);
        expect(hosts[h].host == on_threads || calls > 0, "%s: parallel was not called", hosts[h].name);
        rafter_context_destroy(many);
    }
    expect(parallel_calls > 0, "parallel was not called");
    expect(count_workers() == 0, "%d workers of the library's own, wanted none", count_workers());
    rafter_context_destroy(one);
}

/* Host threads compute in the caller's rounding mode, and get their own back. */
void host_threads_round_as_the_caller(void) {
    rafter_context *const one = new_context(1, NULL), *const many = context_on(on_threads, NULL);
    int changed = 0;
    for (int call = 0; call < calls_count(); call++) {
        const uint64_t usual = result_of(one, call);
        fesetround(FE_UPWARD);
        const uint64_t wanted = result_of(one, call), given = result_of(many, call);
        fesetround(FE_TONEAREST);
        expect(given == wanted, "%s: bits depend on the thread", call_name(call));
        changed += wanted != usual;
    }
    expect(changed > 0, "no result depends on the rounding mode: the test tests nothing");
    expect(changed_environments == 0, "%d threads got another environment back", changed_environments);
    rafter_context_destroy(one);
    rafter_context_destroy(many);
}

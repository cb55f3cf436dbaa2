/* SPDX-License-Identifier: Apache-2.0 */
/* fork() in a process whose library has workers. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "host.h"

enum { CALL_MANY = 80 };
static rafter_context *context;
static uint64_t wanted[CALL_MANY];

static void some_results(void) {
    for (int call = 0; call < calls_count(); call += 3)
        expect(result_of(context, call) == wanted[call], "%s has other bits after fork", call_name(call));
}

static void grandchild(void) {
    some_results(); /* a pool of its own, then another fork */
    expect(in_child(some_results, TEST_SECONDS / 4) == 0, "in the grandchild");
}

static void *fork_and_call(void *arg) {
    (void)arg;
    expect(in_child(grandchild, TEST_SECONDS / 2) == 0, "in the child of a thread");
    some_results();
    return NULL;
}

void call_after_fork(void) {
    context = new_context(4, NULL);
    for (int call = 0; call < calls_count(); call++)
        wanted[call] = result_of(context, call);
    expect(count_workers() == 3, "%d workers, wanted 3", count_workers());
    expect(in_child(grandchild, TEST_SECONDS / 2) == 0, "in the child");
    some_results();
    pthread_t thread;
    expect(pthread_create(&thread, NULL, fork_and_call, NULL) == 0, "no thread");
    pthread_join(thread, NULL);
    some_results();
    rafter_context_destroy(context);
}

static atomic_bool done;

static void *call_meanwhile(void *arg) {
    rafter_context *const own = new_context(3, NULL);
    for (int i = 0; !done; i++)
        expect(result_of(own, i % calls_count()) == wanted[i % calls_count()], "other bits beside a fork");
    rafter_context_destroy(own);
    return arg;
}

static void one_result(void) {
    expect(result_of(context, 0) == wanted[0], "other bits after fork");
    expect(count_workers() > 0, "the child has no workers");
}

/* At the fork, other threads are in the middle of calls, which do not exist in the child. */
void fork_while_threads_call(void) {
    context = new_context(4, NULL);
    for (int call = 0; call < calls_count(); call++)
        wanted[call] = result_of(context, call);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        expect(pthread_create(&threads[i], NULL, call_meanwhile, NULL) == 0, "no thread");
    for (int i = 0; i < 30; i++) {
        expect(in_child(one_result, TEST_SECONDS / 4) == 0, "in child %d", i);
        expect(result_of(context, 1) == wanted[1], "other bits in the parent");
    }
    done = true;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    rafter_context_destroy(context);
}

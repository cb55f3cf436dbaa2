/* SPDX-License-Identifier: Apache-2.0 */
#include "failures.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"

_Atomic int threads_left = -1, failing_allocation, allocations;

static bool fails(void) {
    return ++allocations == failing_allocation;
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg);

void *__wrap_malloc(size_t bytes) {
    return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes) {
    return fails() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
    return fails() ? NULL : __real_aligned_alloc(alignment, bytes);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg) {
    if (threads_left == 0)
        return EAGAIN;
    if (threads_left > 0)
        threads_left--;
    return __real_pthread_create(thread, attributes, run, arg);
}

/* For every call and every k: the k-th allocation fails, in the creation of the context or in the
 * call. A call that fails says so and has written nothing; one that succeeds has the usual result. */
void every_failing_allocation(void) {
    int failures = 0;
    struct outputs outputs = new_outputs();
    rafter_context *const usual = new_context(3, NULL);
    for (int call = 0; call < calls_count(); call++) {
        const uint64_t wanted = result_of(usual, call);
        for (int k = 1;; k++) {
            const rafter_context_options options = {.size = sizeof options, .threads = 3};
            rafter_context *context = NULL;
            allocations = 0;
            failing_allocation = k;
            const rafter_status created = rafter_context_create(&context, &options);
            const rafter_status status = created == RAFTER_OK ? make_call(context, call, &outputs) : created;
            const bool reached = allocations >= k;
            failing_allocation = 0;
            expect(status == RAFTER_OK || status == RAFTER_OUT_OF_MEMORY, "%s: status %d", call_name(call),
                   (int)status);
            if (created != RAFTER_OK) {
                expect(context == NULL, "%s: a failed creation left a context", call_name(call));
                expect(strstr(rafter_last_error(NULL), "memory") != NULL, "a failed creation says '%s'",
                       rafter_last_error(NULL));
            } else if (status == RAFTER_OK) {
                expect(hash_of(&outputs) == wanted, "%s: another result after allocation %d failed", call_name(call),
                       k);
            } else {
                expect(untouched(&outputs), "%s wrote to an output and failed", call_name(call));
                expect(rafter_last_error(context)[0] != '\0', "%s: no message", call_name(call));
                expect(make_call(context, call, &outputs) == RAFTER_OK && hash_of(&outputs) == wanted,
                       "%s: the context does not work after a failure", call_name(call));
            }
            rafter_context_destroy(context);
            failures += status != RAFTER_OK;
            if (!reached)
                break;
        }
    }
    expect(failures > calls_count(), "only %d allocations failed", failures);
    rafter_context_destroy(usual);
    free_outputs(&outputs);
}

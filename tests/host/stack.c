/* SPDX-License-Identifier: Apache-2.0 */
/* How much of the caller's stack a call takes. */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"

enum { MOST_STACK = SANITIZED ? 1 << 20 : 32 << 10 }; /* as include/rafter/rafter.h promises */
enum { STACK = 2 << 20, UNUSED = 0xa7 };

struct stack_call {
    rafter_context *context;
    struct outputs outputs;
    int call;
    rafter_status status;
};

static void *on_a_stack(void *arg) {
    struct stack_call *const c = arg;
    c->status = make_call(c->context, c->call, &c->outputs);
    return NULL;
}

static void *nothing(void *arg) {
    return arg;
}

/* Bytes of the stack that a thread has used to run the function. */
static size_t stack_used(unsigned char *stack, void *(*run)(void *), void *arg) {
    memset(stack, UNUSED, STACK);
    pthread_attr_t attributes;
    pthread_t thread;
    const bool has_attributes =
        pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, STACK) == 0;
    const bool runs = has_attributes && pthread_create(&thread, &attributes, run, arg) == 0;
    expect(runs, "no thread on a stack of its own");
    if (runs)
        pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    size_t free_bytes = 0;
    while (free_bytes < STACK && stack[free_bytes] == UNUSED)
        free_bytes++;
    return STACK - free_bytes;
}

/* No call takes more than 32 KiB of its caller's stack, at any level of instructions. What a thread
 * that does nothing takes is the C library's. */
void bounded_stack(void) {
    static const char *const levels[] = {NULL, "portable", "avx2", "avx512", "avx512bf16", "amx"};
    unsigned char *const stack = aligned_alloc(4096, STACK);
    expect(stack != NULL, "no memory");
    const size_t least = stack_used(stack, nothing, NULL);
    for (size_t level = 0; level < sizeof levels / sizeof *levels; level++) {
        const rafter_context_options options = {.size = sizeof options, .threads = 1, .variant = levels[level]};
        struct stack_call c = {.outputs = new_outputs()};
        if (rafter_context_create(&c.context, &options) != RAFTER_OK)
            continue; /* not on this machine */
        for (c.call = 0; c.call < calls_count(); c.call++) {
            const size_t used = stack_used(stack, on_a_stack, &c) - least;
            expect(c.status == RAFTER_OK, "%s: %s", call_name(c.call), rafter_last_error(c.context));
            expect(used <= MOST_STACK, "%s (%s) takes %zu bytes of stack, wanted at most %d", call_name(c.call),
                   levels[level] ? levels[level] : "default", used, (int)MOST_STACK);
        }
        rafter_context_destroy(c.context);
        free_outputs(&c.outputs);
    }
    free(stack);
}

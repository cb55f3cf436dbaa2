/* SPDX-License-Identifier: Apache-2.0 */
/* The caller's floating-point environment and its stack. */
#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/fp.h"
#include "host.h"

/* Flags of this processor's control register that flush subnormal numbers. */
#if defined(__x86_64__)
enum { FLUSH = 0x8040 }; /* FTZ and DAZ */
#else
enum { FLUSH = 1 << 24 };
#endif

/* With every mode of the caller, all numbers of threads give the bits that one thread gives. */
void rounding_and_flushing_of_the_caller(void) {
    static const int rounding[] = {FE_TONEAREST, FE_UPWARD, FE_TOWARDZERO};
    int changed = 0;
    fill_inputs(SUBNORMAL);
    rafter_context *const one = new_context(1, NULL), *const many = new_context(4, NULL);
    for (int call = 0; call < calls_count(); call++) {
        const uint64_t usual = result_of(one, call);
        for (int mode = 1; mode < 6; mode++) {
            const struct rafter_fp before = rafter_fp_get();
            struct rafter_fp fp = before;
            fesetround(rounding[mode % 3]);
            if (mode >= 3) {
                fp = rafter_fp_get();
                fp.control |= FLUSH;
                rafter_fp_set(fp);
            }
            fp = rafter_fp_get();
            const uint64_t wanted = result_of(one, call);
            for (int i = 0; i < 3; i++)
                expect(result_of(many, call) == wanted, "%s: bits depend on the thread in mode %d", call_name(call),
                       mode);
            const struct rafter_fp after = rafter_fp_get();
            expect(after.control >> 6 == fp.control >> 6, "%s has changed the caller's mode", call_name(call));
            rafter_fp_set(before);
            changed += wanted != usual;
        }
    }
    expect(changed > calls_count(), "only %d results depend on the mode: the test tests little", changed);
    rafter_context_destroy(one);
    rafter_context_destroy(many);
}

/* -inf among the inputs makes every exception; the caller traps all of them. */
void no_trap_and_no_flag(void) {
    fill_inputs(MINUS_INFINITY);
    rafter_context *const context = new_context(4, NULL);
    struct outputs outputs = new_outputs();
    for (int call = 0; call < calls_count(); call++) {
        feclearexcept(FE_ALL_EXCEPT);
        feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW);
        const rafter_status status = make_call(context, call, &outputs);
        const int trapped = fegetexcept(), flags = fetestexcept(FE_ALL_EXCEPT);
        fedisableexcept(FE_ALL_EXCEPT);
        expect(status == RAFTER_OK, "%s: %s", call_name(call), rafter_last_error(context));
        expect(trapped == (FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW), "%s has changed the traps",
               call_name(call));
        expect(flags == 0, "%s has set flags %x", call_name(call), (unsigned)flags);
    }
    rafter_context_destroy(context);
    free_outputs(&outputs);
}

/* ---- the stack ------------------------------------------------------------------------------- */

/* Sanitizers make frames larger. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MOST_STACK = 1 << 20 };
#else
enum { MOST_STACK = 32 << 10 }; /* as include/rafter/rafter.h promises */
#endif
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
    expect(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, STACK) == 0 &&
               pthread_create(&thread, &attributes, run, arg) == 0,
           "no thread on a stack of its own");
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    size_t free_bytes = 0;
    while (free_bytes < STACK && stack[free_bytes] == UNUSED)
        free_bytes++;
    return STACK - free_bytes;
}

/* No call takes more than 32 KiB of its caller's stack, at any level of instructions. What a thread
 * that does nothing takes is the C library's. */
void small_stack(void) {
    static const char *const levels[] = {"portable", "avx2", "avx512", "avx512bf16", "amx"};
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
                   levels[level], used, (int)MOST_STACK);
        }
        rafter_context_destroy(c.context);
        free_outputs(&c.outputs);
    }
    free(stack);
}

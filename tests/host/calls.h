/* SPDX-License-Identifier: Apache-2.0 */
/* One call of every op, direction and dtype, each of several tasks, for tests of what a call does to
 * the process around it. Inputs are shared; outputs belong to a caller. */
#ifndef RAFTER_TESTS_HOST_CALLS_H
#define RAFTER_TESTS_HOST_CALLS_H

#include <stddef.h>
#include <stdint.h>

#include "rafter/rafter.h"

/* Whether a sanitizer is compiled in: frames are larger then, and address space is needed for shadows. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif
#if !defined(SANITIZED)
#define SANITIZED 0
#endif

/* What the ordinary numbers of the inputs are replaced by, every 7th of them. */
enum inputs { ORDINARY, SUBNORMAL, MINUS_INFINITY };

/* Fills the inputs, once or again. */
void fill_inputs(enum inputs kind);

int calls_count(void);
const char *call_name(int call);
const char *call_op(int call);

struct outputs {
    unsigned char *memory;
    size_t bytes; /* of the last call */
    size_t shift; /* bytes of memory before the outputs, less than 64 */
};
struct outputs new_outputs(void);
void free_outputs(struct outputs *outputs);

/* Makes call number `call`. All outputs are filled with a pattern before. */
rafter_status make_call(rafter_context *context, int call, struct outputs *outputs);

/* A hash of the outputs; `untouched` if nothing was written to them. */
uint64_t hash_of(const struct outputs *outputs);
int untouched(const struct outputs *outputs);

/* A context with this many threads, and a call on it that must succeed; ends the program if not. */
rafter_context *new_context(int threads, const char *variant);
uint64_t result_of(rafter_context *context, int call);

/* Threads of this process that the library has created. */
int count_workers(void);

/* Ends the program with a sentence if the condition does not hold. */
void expect(int condition, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef RAFTER_TESTS_HOST_HOST_H
#define RAFTER_TESTS_HOST_HOST_H

#include "calls.h"

/* Of a test. Other machines may be emulated. */
#if defined(__x86_64__)
enum { TEST_SECONDS = 120 };
#else
enum { TEST_SECONDS = 1200 };
#endif

/* Runs a function in a child process and returns its wait status; SIGALRM if it takes too long. */
int in_child(void (*run)(void), unsigned seconds);

#define HOST_TESTS(X)                                                                                                  \
    X(threads_do_not_change_bits)                                                                                      \
    X(addresses_do_not_change_bits)                                                                                    \
    X(no_thread_can_be_created)                                                                                        \
    X(some_threads_can_be_created)                                                                                     \
    X(threads_past_the_limit_of_processes)                                                                             \
    X(address_space_is_exhausted)                                                                                      \
    X(call_after_fork)                                                                                                 \
    X(fork_while_threads_call)                                                                                         \
    X(contexts_side_by_side)                                                                                           \
    X(workers_are_shared)                                                                                              \
    X(threads_of_the_host)                                                                                             \
    X(host_threads_round_as_the_caller)                                                                                \
    X(signals_stay_with_the_host)                                                                                      \
    X(exit_with_workers)                                                                                               \
    X(exit_while_a_thread_calls)                                                                                       \
    X(unload_with_workers)                                                                                             \
    X(rounding_and_flushing_of_the_caller)                                                                             \
    X(no_trap_and_no_flag)                                                                                             \
    X(bounded_stack)                                                                                                   \
    X(every_failing_allocation)

#define DECLARE(name) void name(void);
HOST_TESTS(DECLARE)
#undef DECLARE

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Allocations and thread creations of the library (the linker redirects them here, see
 * tests/CMakeLists.txt) fail on request. */
#ifndef RAFTER_TESTS_HOST_FAILURES_H
#define RAFTER_TESTS_HOST_FAILURES_H

/* Threads that may still be created; below 0: any number. */
extern _Atomic int threads_left;

/* The allocation, counted from 1, that fails; 0: none does. */
extern _Atomic int failing_allocation;
extern _Atomic int allocations; /* since it was set to 0 */

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* A progress line on stderr, if that is a terminal. With RAFTER_PROGRESS set in the environment
 * every message is a line of its own that begins with the seconds since the first. */
#ifndef RAFTER_BENCH_PROGRESS_H
#define RAFTER_BENCH_PROGRESS_H

void progress(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Removes the line, before anything else is printed. */
void progress_clear(void);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* One line on stderr that says what is being done; nothing at all unless stderr is a terminal, or RAFTER_PROGRESS is
 * set in the environment: then every one is a line of its own that begins with the seconds since the first. */
#ifndef RAFTER_BENCH_PROGRESS_H
#define RAFTER_BENCH_PROGRESS_H

void progress(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Takes the line away, before anything else is printed. */
void progress_clear(void);

#endif

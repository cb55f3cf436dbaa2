/* SPDX-License-Identifier: Apache-2.0 */
#include "progress.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "measure.h"

static bool shown;

void progress(const char *format, ...) {
    static double started;
    const bool logged = getenv("RAFTER_PROGRESS") != NULL;
    if (!logged && !isatty(STDERR_FILENO))
        return;
    started = started > 0 ? started : clock_seconds();
    va_list values;
    va_start(values, format);
    if (logged)
        fprintf(stderr, "%8.3f ", clock_seconds() - started);
    else
        fputs("\r\033[K", stderr);
    vfprintf(stderr, format, values);
    if (logged)
        fputc('\n', stderr);
    va_end(values);
    fflush(stderr);
    shown = !logged;
}

void progress_clear(void) {
    if (shown)
        fputs("\r\033[K", stderr);
    shown = false;
}

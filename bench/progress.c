#include "progress.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

static bool shown;

void progress(const char *format, ...) {
    if (!isatty(STDERR_FILENO))
        return;
    va_list values;
    va_start(values, format);
    fputs("\r\033[K", stderr);
    vfprintf(stderr, format, values);
    va_end(values);
    fflush(stderr);
    shown = true;
}

void progress_clear(void) {
    if (shown)
        fputs("\r\033[K", stderr);
    shown = false;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* In a file of its own because librafter_cuda carries a copy of it. */
#include "core/context.h"

#include <stdarg.h>
#include <stdio.h>

rafter_status rafter_fail(rafter_context *context, rafter_status status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(context->error, sizeof context->error, format, values);
    va_end(values);
    return status;
}

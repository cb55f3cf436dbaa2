/* SPDX-License-Identifier: Apache-2.0 */
/* Apart from the rest of the context because the CUDA backend, a library of its own, carries a copy. */
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

/* SPDX-License-Identifier: Apache-2.0 */
/* A program with large thread-local variables, which lie on the stack of every thread: the library's workers have room
 * beside them. */
#include <stdio.h>
#include <stdlib.h>

#include "rafter/rafter.h"

static _Thread_local volatile char large[200 << 10];

int main(void) {
    enum { ROWS = 512, COLUMNS = 4096, THREADS = 4 };
    large[0] = 1;
    int64_t shape[] = {ROWS, COLUMNS};
    float *const x = calloc(ROWS * COLUMNS, sizeof *x), *const y = calloc(ROWS * COLUMNS, sizeof *y);
    if (!x || !y)
        return 1;
    DLTensor in = rafter_tensor(x, RAFTER_F32, 2, shape), out = rafter_tensor(y, RAFTER_F32, 2, shape);
    const rafter_context_options options = {.size = sizeof options, .threads = THREADS};
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK)
        return 1;
    const rafter_act_args args = {.size = sizeof args, .kind = RAFTER_ACT_SOFTMAX, .dim = -1, .x = &in, .y = &out};
    const rafter_status status = rafter_act_forward(context, &args);
    if (status != RAFTER_OK)
        fprintf(stderr, "%s\n", rafter_last_error(context));
    const int wrong = status != RAFTER_OK || y[0] != 1.0f / COLUMNS || y[ROWS * COLUMNS - 1] != 1.0f / COLUMNS;
    rafter_context_destroy(context);
    free(x);
    free(y);
    return wrong;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Labels out of range: their rows are NaN, the others are not, and rafter_bad_labels() reports
 * them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "parts.h"

enum { ROWS = 6 };

static bool all_nan(const float *row, int64_t step, int64_t n) {
    bool all = true;
    for (int64_t i = 0; i < n; i++)
        all &= isnan(row[i * step]) != 0;
    return all;
}

static bool all_finite(const float *row, int64_t step, int64_t n) {
    bool all = true;
    for (int64_t i = 0; i < n; i++)
        all &= isfinite(row[i * step]) != 0;
    return all;
}

/* Rows 1 and 4 have labels out of range, row 2 is ignored. `backward`: the gradient in a call of
 * its own. */
static void test_labels(int64_t classes, bool transposed, bool gradient, bool backward, rafter_context *context) {
    int64_t shape[2] = {ROWS, classes}, rows[1] = {ROWS};
    int64_t strides[2] = {transposed ? 1 : classes, transposed ? ROWS : 1};
    const int64_t labels[ROWS] = {0, classes, -100, classes - 1, -1, 0};
    const size_t bytes = sizeof(float) * ROWS * (size_t)classes;
    float *const host = calloc(1, bytes), row_loss[ROWS] = {0}, loss = 0;
    float *const z = gpu_allocate(bytes), *const dz = gpu_allocate(bytes);
    float *const gpu_row_loss = gpu_allocate(sizeof row_loss), *const gpu_loss = gpu_allocate(sizeof loss);
    int64_t *const gpu_target = gpu_allocate(sizeof labels);
    if (!host)
        return;
    gpu_copy(z, host, bytes);
    gpu_copy(dz, host, bytes);
    gpu_copy(gpu_target, labels, sizeof labels);

    DLTensor logits = rafter_tensor(z, RAFTER_F32, 2, shape), dlogits = rafter_tensor(dz, RAFTER_F32, 2, shape);
    DLTensor target = rafter_tensor(gpu_target, RAFTER_I64, 1, rows),
             sum = rafter_tensor(gpu_loss, RAFTER_F32, 0, NULL);
    DLTensor each = rafter_tensor(gpu_row_loss, RAFTER_F32, 1, rows);
    DLTensor *const all[] = {&logits, &dlogits, &target, &sum, &each};
    for (int i = 0; i < 5; i++)
        all[i]->device = (DLDevice){kDLCUDA, 0};
    logits.strides = dlogits.strides = strides;
    const rafter_cross_entropy_args args = {.size = sizeof args,
                                            .logits = &logits,
                                            .target = &target,
                                            .loss = backward ? NULL : &sum,
                                            .row_loss = backward ? NULL : &each,
                                            .dlogits = gradient ? &dlogits : NULL};
    const rafter_status status =
        backward ? rafter_cross_entropy_backward(context, &args) : rafter_cross_entropy_forward(context, &args);
    char name[96];
    snprintf(name, sizeof name, "labels out of %lld classes, %s, %s", (long long)classes,
             transposed ? "transposed" : "compact",
             backward   ? "backward"
             : gradient ? "one pass"
                        : "forward");
    expect(status == RAFTER_OK, "%s: %s", name, rafter_last_error(context));
    int32_t found = -1;
    expect(rafter_bad_labels(context, &found) == RAFTER_OK && found == 1, "%s: the flag is %d", name, (int)found);
    expect(rafter_bad_labels(context, &found) == RAFTER_OK && found == 0, "%s: the flag was not cleared", name);

    if (!backward) {
        gpu_copy(row_loss, gpu_row_loss, sizeof row_loss);
        gpu_copy(&loss, gpu_loss, sizeof loss);
        expect(isnan(loss) && isnan(row_loss[1]) && isnan(row_loss[4]), "%s: their losses are not NaN", name);
        expect(fabs(row_loss[0] - log((double)classes)) < 1e-4 && row_loss[2] == 0.0f &&
                   fabs(row_loss[5] - log((double)classes)) < 1e-4,
               "%s: the other rows' losses are wrong", name);
    }
    if (gradient) {
        gpu_copy(host, dz, bytes);
        for (int row = 0; row < ROWS; row++)
            expect((row == 1 || row == 4 ? all_nan : all_finite)(host + row * strides[0], strides[1], classes),
                   "%s: the gradient of row %d is wrong", name, row);
    }
    free(host);
    gpu_release(z);
    gpu_release(dz);
    gpu_release(gpu_row_loss);
    gpu_release(gpu_loss);
    gpu_release(gpu_target);
}

void test_bad_labels(void) {
    static const int64_t classes[] = {8, 5000, 40001,
                                      600000}; /* a warp, a block, a cluster per row, more than fits on chip */
    rafter_context *context = open_context();
    int32_t found = -1;
    expect(rafter_bad_labels(context, &found) == RAFTER_OK && found == 0, "the flag is set in a new context");
    expect(rafter_bad_labels(context, NULL) == RAFTER_INVALID_ARGUMENT, "rafter_bad_labels takes NULL");
    for (int i = 0; i < 4; i++)
        for (int transposed = 0; transposed < 2; transposed++) {
            test_labels(classes[i], transposed, false, false, context);
            test_labels(classes[i], transposed, true, false, context);
            test_labels(classes[i], transposed, true, true, context);
        }
    close_context(context);
}

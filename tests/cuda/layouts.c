/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients with other strides than the logits. */
#include <math.h>
#include <stdlib.h>

#include "parts.h"

enum { OUTER = 2, INNER = 3, CLASSES = 1000, ROWS = OUTER * INNER };

/* Computes dlogits of compact logits into `gpu_dz`, as bf16, with these strides. */
static void differentiate(rafter_context *context, bool backward, const DLTensor *logits, const DLTensor *target,
                          void *gpu_dz, size_t bytes, int64_t *strides) {
    int64_t shape[3] = {OUTER, INNER, CLASSES};
    float *const mean = gpu_allocate(sizeof *mean);
    DLTensor dlogits = rafter_tensor(gpu_dz, RAFTER_BF16, 3, shape), loss = rafter_tensor(mean, RAFTER_F32, 0, NULL);
    dlogits.strides = strides;
    dlogits.device = loss.device = context_device(context);
    const rafter_cross_entropy_args args = {
        .size = sizeof args, .logits = logits, .target = target, .loss = backward ? NULL : &loss, .dlogits = &dlogits};
    expect(mean && gpu_fill(context, gpu_dz, 0xff, bytes), "no memory for a gradient");
    const rafter_status status =
        backward ? rafter_cross_entropy_backward(context, &args) : rafter_cross_entropy_forward(context, &args);
    expect(status == RAFTER_OK, "strided dlogits: %s", rafter_last_error(context));
    expect(gpu_synchronize(context), "strided dlogits: the device failed");
    gpu_release(mean);
}

/* The first two dimensions of the logits collapse into one, those of dlogits do not: its rows have
 * any alignment. */
void test_layouts(void) {
    int64_t shape[3] = {OUTER, INNER, CLASSES}, rows[2] = {OUTER, INNER};
    int64_t compact[3] = {INNER * CLASSES, CLASSES, 1}, apart[3] = {3008, 1001, 1};
    const size_t bytes = 2 * ROWS * CLASSES, apart_bytes = 2 * OUTER * 3008;
    const int64_t labels[ROWS] = {0, 999, -100, 17, 500, 3};
    char *const host = malloc(bytes), *const want = malloc(bytes), *const got = malloc(apart_bytes);
    rafter_context *const context = open_context();
    void *const z = gpu_allocate(bytes), *const dz = gpu_allocate(apart_bytes);
    int64_t *const gpu_target = gpu_allocate(sizeof labels);
    if (host && want && got && z && dz && gpu_target) {
        for (uint64_t i = 0; i < ROWS * CLASSES; i++)
            problem_store(RAFTER_BF16, host + 2 * i, problem_normal(problem_mix(i)));
        gpu_copy(z, host, bytes);
        gpu_copy(gpu_target, labels, sizeof labels);
        DLTensor logits = rafter_tensor(z, RAFTER_BF16, 3, shape),
                 target = rafter_tensor(gpu_target, RAFTER_I64, 2, rows);
        logits.device = target.device = context_device(context);
        for (int backward = 0; backward < 2; backward++) {
            differentiate(context, backward, &logits, &target, dz, apart_bytes, compact);
            gpu_copy(want, dz, bytes);
            differentiate(context, backward, &logits, &target, dz, apart_bytes, apart);
            gpu_copy(got, dz, apart_bytes);
            double worst = 0;
            for (int64_t i = 0; i < ROWS * CLASSES; i++) {
                const int64_t row = i / CLASSES, at = row / INNER * apart[0] + row % INNER * apart[1] + i % CLASSES;
                const double a = problem_load(RAFTER_BF16, got + 2 * at), b = problem_load(RAFTER_BF16, want + 2 * i);
                const double off = fabs(a - b) / (fabs(b) + 1e-9);
                worst = off <= worst ? worst : off; /* NaN counts */
            }
            expect(worst <= 0x1p-7, "strided dlogits, %s: apart by %g", backward ? "backward" : "one pass", worst);
        }
    }
    expect(host && want && got && z && dz && gpu_target, "no memory for strided dlogits");
    close_context(context);
    gpu_release(z);
    gpu_release(dz);
    gpu_release(gpu_target);
    free(host);
    free(want);
    free(got);
}

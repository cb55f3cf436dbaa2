/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients whose rows lie otherwise than those of the logits. */
#include <math.h>
#include <stdlib.h>

#include "parts.h"

enum { OUTER = 2, INNER = 3, CLASSES = 1000, ROWS = OUTER * INNER };

/* dlogits with these strides, of logits without gaps; as bf16, in `there`. */
static void differentiate(rafter_context *context, bool backward, const DLTensor *logits, const DLTensor *target,
                          void *there, size_t bytes, int64_t *strides) {
    int64_t shape[3] = {OUTER, INNER, CLASSES};
    float *const mean = cuda->allocate(sizeof *mean);
    DLTensor dlogits = rafter_tensor(there, RAFTER_BF16, 3, shape), loss = rafter_tensor(mean, RAFTER_F32, 0, NULL);
    dlogits.strides = strides;
    dlogits.device = loss.device = context->device;
    const rafter_cross_entropy_args args = {
        .size = sizeof args, .logits = logits, .target = target, .loss = backward ? NULL : &loss, .dlogits = &dlogits};
    expect(mean && cuda->fill(context, there, 0xff, bytes), "no memory for a gradient");
    const rafter_status status =
        backward ? rafter_cross_entropy_backward(context, &args) : rafter_cross_entropy_forward(context, &args);
    expect(status == RAFTER_OK, "strided dlogits: %s", rafter_last_error(context));
    expect(cuda->synchronize(context), "strided dlogits: the device failed");
    cuda->release(mean);
}

/* The first two dimensions of the logits are one, those of dlogits are not: its rows begin anywhere. */
void test_layouts(void) {
    int64_t shape[3] = {OUTER, INNER, CLASSES}, rows[2] = {OUTER, INNER};
    int64_t compact[3] = {INNER * CLASSES, CLASSES, 1}, apart[3] = {3008, 1001, 1};
    const size_t bytes = 2 * ROWS * CLASSES, apart_bytes = 2 * OUTER * 3008;
    const int64_t labels[ROWS] = {0, 999, -100, 17, 500, 3};
    char *const host = malloc(bytes), *const want = malloc(bytes), *const got = malloc(apart_bytes);
    rafter_context *const context = open_context();
    void *const z = cuda->allocate(bytes), *const dz = cuda->allocate(apart_bytes);
    int64_t *const target_there = cuda->allocate(sizeof labels);
    if (host && want && got && z && dz && target_there) {
        for (uint64_t i = 0; i < ROWS * CLASSES; i++)
            problem_store(RAFTER_BF16, host + 2 * i, problem_normal(problem_mix(i)));
        cuda->copy(z, host, bytes);
        cuda->copy(target_there, labels, sizeof labels);
        DLTensor logits = rafter_tensor(z, RAFTER_BF16, 3, shape),
                 target = rafter_tensor(target_there, RAFTER_I64, 2, rows);
        logits.device = target.device = context->device;
        for (int backward = 0; backward < 2; backward++) {
            differentiate(context, backward, &logits, &target, dz, apart_bytes, compact);
            cuda->copy(want, dz, bytes);
            differentiate(context, backward, &logits, &target, dz, apart_bytes, apart);
            cuda->copy(got, dz, apart_bytes);
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
    expect(host && want && got && z && dz && target_there, "no memory for strided dlogits");
    close_context(context);
    cuda->release(z);
    cuda->release(dz);
    cuda->release(target_there);
    free(host);
    free(want);
    free(got);
}

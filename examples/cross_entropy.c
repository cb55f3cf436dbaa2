/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cross entropy of a small batch: the loss, then its gradient, then both in one pass.
 *
 *     cc cross_entropy.c $(pkg-config --cflags --libs rafter) -lm
 */
#include <rafter/rafter.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 4, VOCABULARY = 10 };

static void check(rafter_context *ctx, rafter_status status) {
    if (status == RAFTER_OK)
        return;
    fprintf(stderr, "%s: %s\n", rafter_status_name(status), rafter_last_error(ctx));
    exit(1);
}

int main(void) {
    float logits_data[ROWS][VOCABULARY], gradient_data[ROWS][VOCABULARY], one_pass_data[ROWS][VOCABULARY];
    int64_t labels[ROWS] = {3, 1, -100, 7}; /* -100: ignored */
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VOCABULARY; v++)
            logits_data[r][v] = sinf((float)(r * VOCABULARY + v));

    int64_t grid[] = {ROWS, VOCABULARY}, rows[] = {ROWS};
    float loss_value, lse_data[ROWS];
    DLTensor logits = rafter_tensor(logits_data, RAFTER_F32, 2, grid);
    DLTensor target = rafter_tensor(labels, RAFTER_I64, 1, rows);
    DLTensor loss = rafter_tensor(&loss_value, RAFTER_F32, 0, NULL);
    DLTensor lse = rafter_tensor(lse_data, RAFTER_F32, 1, rows);
    DLTensor gradient = rafter_tensor(gradient_data, RAFTER_F32, 2, grid);
    DLTensor one_pass = rafter_tensor(one_pass_data, RAFTER_F32, 2, grid);

    rafter_context *ctx = NULL;
    check(NULL, rafter_context_create(&ctx, NULL));

    rafter_loss_options options = {.size = sizeof options, .label_smoothing = 0.1f};
    rafter_cross_entropy_args args = {
        .size = sizeof args, .options = &options, .logits = &logits, .target = &target, .loss = &loss, .lse = &lse};
    check(ctx, rafter_cross_entropy_forward(ctx, &args));
    printf("loss %.6f\n", loss_value);

    args.dlogits = &gradient;
    check(ctx, rafter_cross_entropy_backward(ctx, &args));

    args.dlogits = &one_pass; /* forward with dlogits: loss and gradient in one pass over the logits */
    check(ctx, rafter_cross_entropy_forward(ctx, &args));

    float sum = 0, difference = 0;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VOCABULARY; v++) {
            sum += fabsf(gradient_data[r][v]);
            difference = fmaxf(difference, fabsf(gradient_data[r][v] - one_pass_data[r][v]));
        }
    printf("gradient's absolute sum %.6f, the two ways differ by %.1e\n", sum, difference);
    rafter_context_destroy(ctx);
    return !(difference < 1e-6f && sum > 0);
}

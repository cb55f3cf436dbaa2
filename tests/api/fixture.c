/* SPDX-License-Identifier: Apache-2.0 */
#include "fixture.h"

#include <stdlib.h>
#include <string.h>

struct fixture f;

int setup(void **state) {
    (void)state;
    rafter_context_destroy(f.context);
    memset(&f, 0, sizeof f);
    if (rafter_context_create(&f.context, NULL) != RAFTER_OK)
        return 1;
    for (int i = 0; i < 256; i++) {
        f.x_data[i] = 0.01f * (float)(i % 37) - 0.1f;
        f.weight_data[i] = 0.02f * (float)(i % 29) - 0.2f;
    }
    for (int i = 0; i < 512; i++) {
        f.dy_data[i] = 1;
        f.y_data[i] = 77;
    }
    for (int i = 0; i < 256; i++)
        f.dx_data[i] = 77;
    for (int i = 0; i < ROWS; i++)
        f.labels[i] = i;
    memcpy(f.shape_x, (int64_t[]){B, N, H, D}, sizeof f.shape_x);
    memcpy(f.shape_y, (int64_t[]){B, N, H, 2 * D}, sizeof f.shape_y);
    memcpy(f.shape_theta, (int64_t[]){H, D}, sizeof f.shape_theta);
    memcpy(f.shape_lse, (int64_t[]){B, N, H}, sizeof f.shape_lse);
    memcpy(f.shape_grid, (int64_t[]){ROWS, V}, sizeof f.shape_grid);
    memcpy(f.shape_hidden, (int64_t[]){ROWS, D}, sizeof f.shape_hidden);
    memcpy(f.shape_weight, (int64_t[]){V, D}, sizeof f.shape_weight);
    f.shape_rows[0] = ROWS;

    f.x = rafter_tensor(f.x_data, RAFTER_F32, 4, f.shape_x);
    f.y = rafter_tensor(f.y_data, RAFTER_F32, 4, f.shape_x);
    f.dy = rafter_tensor(f.dy_data, RAFTER_F32, 4, f.shape_x);
    f.dx = rafter_tensor(f.dx_data, RAFTER_F32, 4, f.shape_x);
    f.theta = rafter_tensor(f.theta_data, RAFTER_F32, 2, f.shape_theta);
    f.dtheta = rafter_tensor(f.small_data[0], RAFTER_F32, 2, f.shape_theta);
    f.positions_t = rafter_tensor(f.positions, RAFTER_I64, 1, (f.strides[3] = N, &f.strides[3]));
    f.lse = rafter_tensor(f.small_data[1], RAFTER_F32, 3, f.shape_lse);
    f.dlse = rafter_tensor(f.small_data[2], RAFTER_F32, 3, f.shape_lse);
    f.logits = rafter_tensor(f.x_data, RAFTER_F32, 2, f.shape_grid);
    f.dlogits = rafter_tensor(f.dx_data, RAFTER_F32, 2, f.shape_grid);
    f.target = rafter_tensor(f.labels, RAFTER_I64, 1, f.shape_rows);
    f.loss = rafter_tensor(f.small_data[3], RAFTER_F32, 0, NULL);
    f.row_loss = rafter_tensor(f.small_data[4], RAFTER_F32, 1, f.shape_rows);
    f.row_lse = rafter_tensor(f.small_data[5], RAFTER_F32, 1, f.shape_rows);
    f.argmax = rafter_tensor(f.argmax_data, RAFTER_I64, 1, f.shape_rows);
    f.hidden = rafter_tensor(f.x_data, RAFTER_F32, 2, f.shape_hidden);
    f.dhidden = rafter_tensor(f.dx_data, RAFTER_F32, 2, f.shape_hidden);
    f.weight = rafter_tensor(f.weight_data, RAFTER_F32, 2, f.shape_weight);
    f.dweight = rafter_tensor(f.y_data, RAFTER_F32, 2, f.shape_weight);

    f.options = (rafter_loss_options){.size = sizeof f.options};
    f.act = (rafter_act_args){
        .size = sizeof f.act, .kind = RAFTER_ACT_SOFTMAX, .dim = -1, .x = &f.x, .y = &f.y, .dy = &f.dy, .dx = &f.dx};
    f.logsumexp = (rafter_logsumexp_args){
        .size = sizeof f.logsumexp, .dim = -1, .x = &f.x, .lse = &f.lse, .dlse = &f.dlse, .dx = &f.dx};
    f.ce = (rafter_cross_entropy_args){.size = sizeof f.ce,
                                       .options = &f.options,
                                       .logits = &f.logits,
                                       .target = &f.target,
                                       .loss = &f.loss,
                                       .lse = &f.row_lse};
    f.lce = (rafter_linear_cross_entropy_args){.size = sizeof f.lce,
                                               .options = &f.options,
                                               .x = &f.hidden,
                                               .weight = &f.weight,
                                               .target = &f.target,
                                               .loss = &f.loss,
                                               .dx = &f.dhidden,
                                               .dweight = &f.dweight};
    f.lrpe = (rafter_lrpe_cosine_args){.size = sizeof f.lrpe, .x = &f.x, .theta = &f.theta, .y = &f.y};
    f.scale = (rafter_scale_args){.size = sizeof f.scale, .x = &f.x, .factor = &f.loss, .y = &f.y};
    return 0;
}

int teardown(void **state) {
    (void)state;
    rafter_context_destroy(f.context);
    f.context = NULL;
    return 0;
}

void lrpe_shapes(void) {
    f.y.shape = f.shape_y;
    f.dy.shape = f.shape_y;
    f.lrpe.dy = &f.dy;
    f.lrpe.dx = &f.dx;
}

void expect_failure(rafter_status got, rafter_status want, const char *word, ...) {
    const char *message = rafter_last_error(f.context);
    if (got != want)
        print_error("status %s, wanted %s; message: %s\n", rafter_status_name(got), rafter_status_name(want), message);
    assert_int_equal(got, want);
    va_list words;
    va_start(words, word);
    for (; word; word = va_arg(words, const char *)) {
        if (!strstr(message, word))
            print_error("'%s' is not in: %s\n", word, message);
        assert_non_null(strstr(message, word));
    }
    va_end(words);
    for (int i = 0; i < 512; i++)
        assert_true(f.y_data[i] == 77);
    for (int i = 0; i < 256; i++)
        assert_true(f.dx_data[i] == 77);
    for (int t = 0; t < 8; t++)
        for (int i = 0; i < 64; i++)
            assert_true(f.small_data[t][i] == 0);
}

void *ledger_allocate(void *user, size_t bytes) {
    struct ledger *ledger = user;
    ledger->calls++;
    if (ledger->fail)
        return NULL;
    ledger->held += bytes;
    if (ledger->held > ledger->most)
        ledger->most = ledger->held;
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

void ledger_release(void *user, void *memory, size_t bytes) {
    ((struct ledger *)user)->held -= bytes;
    free(memory);
}

void with_ledger(struct ledger *ledger) {
    rafter_context_destroy(f.context);
    const rafter_context_options options = {
        .size = sizeof options, .allocate = ledger_allocate, .release = ledger_release, .user = ledger};
    assert_int_equal(rafter_context_create(&f.context, &options), RAFTER_OK);
}

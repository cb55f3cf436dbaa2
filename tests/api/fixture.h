/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small valid call of every op. A test spoils one argument at a time and expects a failure.
 * test_api tests the contract of the public header apart from the numbers: bad arguments get a
 * status and a message that names the argument and both values, and leave outputs untouched;
 * argument structs can grow; workspaces, allocators and variants do what the header says; zero-size
 * tensors are valid.
 */
#ifndef RAFTER_TESTS_API_FIXTURE_H
#define RAFTER_TESTS_API_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "rafter/rafter.h"

enum { B = 2, N = 3, H = 2, D = 8, ROWS = B * N, V = 11 };

struct fixture {
    rafter_context *context;
    /* Memory, larger than needed so that strides can be played with. */
    float x_data[256], y_data[512], dy_data[512], dx_data[256], theta_data[64], weight_data[256], small_data[8][64];
    int64_t labels[ROWS], positions[N];
    int64_t shape_x[4], shape_y[4], shape_theta[2], shape_weight[2], shape_rows[1], shape_lse[3], shape_grid[2],
        shape_hidden[2];
    int64_t strides[4];
    DLTensor x, y, dy, dx, theta, dtheta, positions_t; /* act, logsumexp, lrpe_cosine */
    DLTensor lse, dlse;
    DLTensor logits, dlogits, target, loss, row_loss, row_lse, argmax; /* losses */
    DLTensor hidden, dhidden, weight, dweight;
    int64_t argmax_data[ROWS];
    rafter_loss_options options;
    rafter_act_args act;
    rafter_logsumexp_args logsumexp;
    rafter_cross_entropy_args ce;
    rafter_linear_cross_entropy_args lce;
    rafter_lrpe_cosine_args lrpe;
    rafter_scale_args scale;
};
extern struct fixture f;

/* Make the calls valid again; release the context. For cmocka: the argument is unused, the result
 * 0. */
int setup(void **state);
int teardown(void **state);

/* Gives y and dy the shapes of lrpe_cosine. */
void lrpe_shapes(void);

/* Expects that the call failed with this status, that its message holds all the words
 * (NULL-terminated), and that no output was written. */
void expect_failure(rafter_status got, rafter_status want, const char *word, ...);
#define EXPECT_INVALID(call, ...) expect_failure((call), RAFTER_INVALID_ARGUMENT, __VA_ARGS__, (char *)NULL)

/* An allocator that counts. */
struct ledger {
    size_t held, most;
    int calls;
    int fail; /* return NULL */
};
void *ledger_allocate(void *user, size_t bytes);
void ledger_release(void *user, void *memory, size_t bytes);
/* Replaces the fixture's context by one with this allocator. */
void with_ledger(struct ledger *ledger);

/* The tests, by file. */
#define ARGUMENT_TESTS(X)                                                                                              \
    X(test_fixture_is_valid)                                                                                           \
    X(test_spoilt_tensors)                                                                                             \
    X(test_missing_arguments)                                                                                          \
    X(test_sizes_of_structs)                                                                                           \
    X(test_bad_direction)
#define OPTION_TESTS(X)                                                                                                \
    X(test_act_bad)                                                                                                    \
    X(test_logsumexp_bad)                                                                                              \
    X(test_loss_options_bad)                                                                                           \
    X(test_labels_out_of_range)                                                                                        \
    X(test_loss_tensors_bad)                                                                                           \
    X(test_lrpe_bad)                                                                                                   \
    X(test_scale_bad)
#define MEMORY_TESTS(X)                                                                                                \
    X(test_allocator)                                                                                                  \
    X(test_workspace)                                                                                                  \
    X(test_kept_block)                                                                                                 \
    X(test_budget)                                                                                                     \
    X(test_interleaved_columns_do_not_overlap)                                                                         \
    X(test_none_copies_nothing_in_place)                                                                               \
    X(test_scaling_by_one_touches_nothing)                                                                             \
    X(test_zero_sizes)
#define LIMIT_TESTS(X)                                                                                                 \
    X(test_weight_past_the_limit)                                                                                      \
    X(test_logits_past_the_limit)                                                                                      \
    X(test_logsumexp_past_the_limit)                                                                                   \
    X(test_other_sizes_past_the_limit)                                                                                 \
    X(test_workspace_at_the_limit)                                                                                     \
    X(test_workspace_over_a_tensor)                                                                                    \
    X(test_saved_over_a_tensor)                                                                                        \
    X(test_unknown_dtype)                                                                                              \
    X(test_mask_of_an_empty_tensor)                                                                                    \
    X(test_expanded_classes)
#define CONTEXT_TESTS(X)                                                                                               \
    X(test_context)                                                                                                    \
    X(test_bad_contexts)                                                                                               \
    X(test_levels)                                                                                                     \
    X(test_unknown_variant)                                                                                            \
    X(test_considered_variants)

#define DECLARE_TEST(name) void name(void **state);
ARGUMENT_TESTS(DECLARE_TEST)
OPTION_TESTS(DECLARE_TEST)
MEMORY_TESTS(DECLARE_TEST)
LIMIT_TESTS(DECLARE_TEST)
CONTEXT_TESTS(DECLARE_TEST)
#undef DECLARE_TEST

#endif

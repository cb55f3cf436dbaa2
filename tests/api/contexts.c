/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts, and the variants that their calls take. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

void test_context(void **state) {
    (void)state;
    rafter_context *context = NULL;
    const rafter_context_options options = {.size = sizeof options, .threads = 3};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_OK);
    assert_int_equal(rafter_context_threads(context), 3);
    int32_t found = -1;
    assert_int_equal(rafter_bad_labels(context, &found), RAFTER_OK);
    assert_int_equal(found, 0);
    assert_int_equal(rafter_bad_labels(context, NULL), RAFTER_INVALID_ARGUMENT);
    assert_int_equal(rafter_context_set_stream(context, NULL), RAFTER_INVALID_ARGUMENT);
    assert_non_null(strstr(rafter_last_error(context), "stream"));
    assert_int_equal(rafter_context_set_stream(NULL, NULL), RAFTER_INVALID_ARGUMENT);
    rafter_context_destroy(context);
    rafter_context_destroy(NULL);
    assert_int_equal(rafter_context_threads(NULL), 0);
    assert_int_equal(rafter_peak_workspace(NULL), 0);
    rafter_reset_peak_workspace(NULL);
    for (int status = RAFTER_OK; status <= RAFTER_RANKS_DISAGREE; status++)
        assert_string_not_equal(rafter_status_name((rafter_status)status), "unknown status");
    assert_string_equal(rafter_status_name((rafter_status)99), "unknown status");
}

void test_bad_contexts(void **state) {
    (void)state;
    rafter_context *context = NULL;
    assert_int_equal(rafter_context_create(NULL, NULL), RAFTER_INVALID_ARGUMENT);
    rafter_context_options options = {.size = sizeof options, .allocate = ledger_allocate};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_INVALID_ARGUMENT);
    assert_non_null(strstr(rafter_last_error(NULL), "release is NULL"));
    options = (rafter_context_options){.size = sizeof options, .threads = -2};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_INVALID_ARGUMENT);
    assert_non_null(strstr(rafter_last_error(NULL), "threads is -2"));
    options = (rafter_context_options){.size = sizeof options, .batch_invariant = 2};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_INVALID_ARGUMENT);
    assert_non_null(strstr(rafter_last_error(NULL), "batch_invariant is 2, wanted 0 or 1"));
    options = (rafter_context_options){.size = sizeof options, .device = {kDLCUDA, 9999}};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_UNSUPPORTED);
    assert_non_null(strstr(rafter_last_error(NULL), "CUDA"));
    options.device = (DLDevice){kDLCUDAHost, 0};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_UNSUPPORTED);
    assert_non_null(strstr(rafter_last_error(NULL), "device_type is 3"));
    options.device = (DLDevice){kDLCUDA, 0};
    setenv("RAFTER_CUDA_LIBRARY", OLD_BACKEND, 1); /* tests/old_backend.c */
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_UNSUPPORTED);
    assert_non_null(strstr(rafter_last_error(NULL), "has other structs (0123456789ab)"));
    unsetenv("RAFTER_CUDA_LIBRARY");
    int64_t shape[1] = {1};
    assert_int_equal(rafter_tensor(shape, (rafter_dtype)77, 1, shape).dtype.bits, 0);
    assert_int_equal(rafter_context_create(&context, NULL), RAFTER_OK); /* clears the message */
    assert_string_equal(rafter_last_error(NULL), "context is NULL");
    rafter_context_destroy(context);
}

/* ---- variants -------------------------------------------------------------------------------- */

enum {
#define RAFTER_OP(name) OP_##name,
#include "ops/ops.inc"
#undef RAFTER_OP
    OPS /* how many there are */
};

/* Of every op, only the variant "portable" may run in this context. */
static void expect_portable(const rafter_context *context) {
    int ops = 0;
    for (const char *op; (op = rafter_op_name(ops)); ops++) {
        const char *variant, *reason;
        int allowed = 0, index = 0;
        for (; rafter_describe_variant(context, op, index, &variant, &reason); index++) {
            assert_true((reason == NULL) == (strcmp(variant, "portable") == 0));
            allowed += !reason;
        }
        assert_int_equal(allowed, 1);
        assert_string_equal(variant, "portable"); /* the last row serves everything */
    }
    assert_int_equal(ops, OPS);
}

void test_levels(void **state) {
    (void)state;
    rafter_context *context = NULL;
    rafter_context_options options = {.size = sizeof options, .variant = "portable"};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_OK);
    expect_portable(context);
    rafter_context_destroy(context);

    setenv("RAFTER_VARIANT", "portable", 1); /* overrides the option */
    options.variant = NULL;
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_OK);
    unsetenv("RAFTER_VARIANT");
    expect_portable(context);

    const char *variant = NULL, *reason = NULL;
    assert_null(rafter_op_name(-1));
    assert_null(rafter_op_name(OPS));
    assert_int_equal(rafter_describe_variant(context, "abacus", 0, &variant, &reason), 0);
    assert_int_equal(rafter_describe_variant(context, "act", -1, &variant, &reason), 0);
    assert_int_equal(rafter_describe_variant(context, "act", 99, &variant, &reason), 0);
    assert_int_equal(rafter_describe_variant(NULL, "act", 0, &variant, &reason), 0);
    rafter_context_destroy(context);
}

void test_unknown_variant(void **state) {
    (void)state;
    rafter_context *context = (rafter_context *)1;
    const rafter_context_options options = {.size = sizeof options, .variant = "abacus"};
    assert_int_equal(rafter_context_create(&context, &options), RAFTER_UNSUPPORTED);
    assert_null(context);
    assert_non_null(strstr(rafter_last_error(NULL), "variant is 'abacus'"));
    setenv("RAFTER_VARIANT", "abacus", 1);
    assert_int_equal(rafter_context_create(&context, NULL), RAFTER_UNSUPPORTED);
    unsetenv("RAFTER_VARIANT");
    assert_null(context);
    assert_non_null(strstr(rafter_last_error(NULL), "variant is 'abacus'"));
}

/* After a call or a workspace question: the variants from the most preferred to the one that was
 * taken. */
static void expect_considered(const char *op) {
    const char *variant, *reason, *described, *why;
    int count = 0;
    for (; rafter_considered_variant(f.context, count, &variant, &reason); count++) {
        assert_int_equal(rafter_describe_variant(f.context, op, count, &described, &why), 1);
        assert_string_equal(variant, described);
        assert_true((reason == NULL) == (why == NULL)); /* on a CPU, only the level decides */
        if (!reason) {                                  /* the one that was taken is the last */
            assert_int_equal(rafter_considered_variant(f.context, count + 1, &variant, &reason), 0);
            return;
        }
    }
    fail_msg("no variant of %s was taken", op);
}

void test_considered_variants(void **state) {
    (void)state;
    const char *variant, *reason;
    size_t bytes = 0;
    assert_int_equal(rafter_considered_variant(f.context, 0, &variant, &reason), 0); /* no call yet */
    assert_int_equal(rafter_considered_variant(NULL, 0, &variant, &reason), 0);
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);
    expect_considered("act");
    assert_int_equal(rafter_considered_variant(f.context, -1, &variant, &reason), 0);
    assert_int_equal(rafter_linear_cross_entropy_workspace(f.context, &f.lce, RAFTER_FORWARD, &bytes), RAFTER_OK);
    expect_considered("linear_cross_entropy");
    assert_int_equal(rafter_cross_entropy_forward(f.context, &f.ce), RAFTER_OK);
    expect_considered("cross_entropy");

    int64_t empty[] = {0, D}; /* nothing to compute: no variant */
    DLTensor x = rafter_tensor(NULL, RAFTER_F32, 2, empty), y = x;
    f.act.x = &x, f.act.y = &y;
    assert_int_equal(rafter_act_forward(f.context, &f.act), RAFTER_OK);
    assert_int_equal(rafter_considered_variant(f.context, 0, &variant, &reason), 0);
}

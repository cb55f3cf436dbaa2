/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "fixture.h"

int main(void) {
    unsetenv("RAFTER_VARIANT");
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown),
    const struct CMUnitTest tests[] = {ARGUMENT_TESTS(TEST) OPTION_TESTS(TEST) MEMORY_TESTS(TEST) LIMIT_TESTS(TEST)
                                           CONTEXT_TESTS(TEST)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include "harness/problem.h"

static int64_t count(void) {
    return 0;
}

const struct op_cases rafter_cases_lrpe_cosine = {.op = "lrpe_cosine", .count = count};

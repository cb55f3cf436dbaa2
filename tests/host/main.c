/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a call does to the process around it, and what that process may do to a call. Each test runs
 * in a child process of its own: a crash, an exit or a hang of one fails it alone.
 *
 *     test_host [NAME...]
 */
#include "host.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
#define TEST(name) {#name, name},
    HOST_TESTS(TEST)
#undef TEST
};

int in_child(void (*run)(void), unsigned seconds) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(seconds);
        run();
        fflush(stdout);
        _exit(0);
    }
    int status = -1;
    while (waitpid(child, &status, 0) < 0)
        ;
    return status;
}

int main(int argc, char **argv) {
    int failed = 0, run = 0;
    fill_inputs(ORDINARY);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool named = argc == 1;
        for (int j = 1; j < argc; j++)
            named |= strcmp(argv[j], tests[i].name) == 0;
        if (!named)
            continue;
        const int status = in_child(tests[i].run, TEST_SECONDS);
        printf("%-4s %s", status == 0 ? "ok" : "FAIL", tests[i].name);
        if (WIFSIGNALED(status))
            printf(": signal %d", WTERMSIG(status));
        putchar('\n');
        failed += status != 0;
        run++;
    }
    return run == 0 || failed > 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Several processes on one GPU, and contexts that are destroyed while their work is queued. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "parts.h"

enum { ROUNDS = 20, PROCESSES = 2, MOST_DIGESTS = 64 };

/* ---- processes ------------------------------------------------------------------------------- */

/* Whether a softmax whose blocks wait for each other is right at every 2^15-th element. */
static bool softmax_is_right(const struct line *line) {
    const uint16_t want = (127 - 25) << 7; /* 2^-25 in bf16 */
    bool good = gpu_synchronize(line->context);
    for (size_t i = 0; i < LINE && good; i += 1 << 15) {
        uint16_t got = 0;
        good = gpu_copy(&got, line->gpu_y + i, sizeof got) && got == want;
    }
    return good;
}

/* Calls every op in both directions, ROUNDS times, each against the bits of its first call, and the
 * first call against the oracle. Returns how many digests it has stored. */
static int call_all(uint64_t *digests, bool *good) {
    int count = 0;
    for (int o = 0; problem_ops[o]; o++)
        for (int mode = PROBLEM_FORWARD; mode <= PROBLEM_BACKWARD && serves(problem_ops[o]); mode++) {
            struct party party = {.context = NULL};
            if (!(problem_ops[o]->algorithm_modes[0] >> mode & 1) ||
                !join(&party, problem_ops[o], (enum problem_mode)mode)) {
                leave(&party);
                continue;
            }
            problem *const p = &party.p;
            for (int round = 0; round < ROUNDS && *good; round++) {
                problem_poison(p, party.mode);
                *good = problem_call(p, party.context, party.mode) == RAFTER_OK &&
                        problem_digest(p, party.mode) == party.bits;
            }
            problem_solve(p, party.mode);
            const struct problem_verdict verdict = problem_compare(p, party.mode);
            if (!*good || !verdict.good)
                printf("FAIL %s %s beside other processes: %s\n", problem_ops[o]->op, p->label,
                       verdict.good ? "the bits differ" : verdict.sentence);
            *good &= verdict.good;
            digests[count++] = party.bits;
            leave(&party);
        }
    struct line line;
    open_line(&line, RAFTER_ACT_SOFTMAX, gpu_new_stream(false));
    for (int round = 0; round < 10 * ROUNDS && *good; round++)
        *good = rafter_act_forward(line.context, &line.args) == RAFTER_OK;
    if (*good && !softmax_is_right(&line)) {
        printf("FAIL a long softmax beside other processes is wrong\n");
        *good = false;
    }
    close_line(&line);
    return count;
}

int run_beside(void) {
    uint64_t digests[MOST_DIGESTS];
    bool good = true;
    const int count = call_all(digests, &good);
    for (int i = 0; i < count; i++)
        printf("digest %016" PRIx64 "\n", digests[i]);
    fflush(stdout);
    return !good;
}

/* Starts this program again. Returns what it prints, or NULL. */
static FILE *start(pid_t *process) {
    int both[2];
    if (pipe(both) != 0)
        return NULL;
    fflush(stdout);
    *process = fork();
    if (*process == 0) {
        dup2(both[1], STDOUT_FILENO);
        close(both[0]);
        close(both[1]);
        execl("/proc/self/exe", "test_cuda", "--beside", (char *)NULL);
        _exit(127);
    }
    close(both[1]);
    return *process > 0 ? fdopen(both[0], "r") : NULL;
}

/* Reads a process's digests to its end, and passes its failures on. */
static void expect_digests(FILE *from, pid_t process, const uint64_t *wanted, int count) {
    char line[600];
    int found = 0;
    while (from && fgets(line, sizeof line, from)) {
        uint64_t digest;
        if (sscanf(line, "digest %" SCNx64, &digest) != 1) {
            printf("%s", line);
            continue;
        }
        expect(found < count && digest == wanted[found], "another process has other bits in call %d", found);
        found++;
    }
    if (from)
        fclose(from);
    int status = -1;
    waitpid(process, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0 && found == count,
           "a process beside others: wait status %d, %d of %d digests", status, found, count);
}

/* Processes that share the GPU get the results that one alone gets. */
void test_processes(void) {
    uint64_t alone[MOST_DIGESTS], beside[MOST_DIGESTS];
    bool good = true;
    const int count = call_all(alone, &good);
    expect(good && count > 0, "calls of one process, %d of them", count);
    FILE *from[PROCESSES];
    pid_t process[PROCESSES];
    for (int i = 0; i < PROCESSES; i++)
        from[i] = start(&process[i]);
    const int again = call_all(beside, &good);
    expect(good && again == count && memcmp(alone, beside, (size_t)count * sizeof *alone) == 0,
           "this process has other bits beside others");
    for (int i = 0; i < PROCESSES; i++)
        expect_digests(from[i], process[i], alone, count);
}

/* ---- contexts destroyed under queued work ---------------------------------------------------- */

enum { QUEUED = 40 };

/* Enqueues milliseconds of work. */
static void fill_queue(struct line *filler) {
    for (int i = 0; i < QUEUED; i++)
        expect(rafter_act_forward(filler->context, &filler->args) == RAFTER_OK, "%s",
               rafter_last_error(filler->context));
}

/* A call behind a filled queue, whose context is destroyed at once, gives the usual bits. */
static void destroy_after_call(const struct op_cases *op, enum problem_mode mode) {
    struct party party = {.context = NULL};
    if (!join(&party, op, mode)) {
        leave(&party);
        return;
    }
    struct line filler;
    void *const stream = context_stream(party.context);
    open_line(&filler, RAFTER_ACT_SILU, stream);
    bool good = problem_to_device(&party.p, party.context, mode);
    fill_queue(&filler);
    good = good && op->call(&party.p, party.context, mode) == RAFTER_OK;
    rafter_context_destroy(party.context);
    party.context = filler.context; /* on the same stream: to wait for it, and to leave */
    good = good && problem_from_device(&party.p, filler.context);
    expect(good && problem_digest(&party.p, mode) == party.bits,
           "%s %s %s, context destroyed while the call was queued: %s", op->op, party.p.label, problem_mode_names[mode],
           good ? "the bits differ" : "the device failed");
    gpu_release(filler.gpu_x);
    gpu_release(filler.gpu_y);
    leave(&party);
}

/* The flag for bad labels belongs to the context: kernels must not write it once it is gone. */
static void destroy_before_bad_labels(void) {
    enum { ROWS = 64, CLASSES = 128 };
    static int64_t labels[ROWS];
    int64_t shape[2] = {ROWS, CLASSES}, rows[1] = {ROWS};
    struct line filler;
    open_line(&filler, RAFTER_ACT_SILU, gpu_new_stream(false));
    rafter_context *const context = open_on(context_stream(filler.context));
    for (int i = 0; i < ROWS; i++)
        labels[i] = CLASSES + i;
    DLTensor logits = on_device(context, NULL, RAFTER_F32, 2, shape, sizeof(float) * ROWS * CLASSES);
    DLTensor target = on_device(context, labels, RAFTER_I64, 1, rows, sizeof labels);
    DLTensor loss = on_device(context, NULL, RAFTER_F32, 0, NULL, sizeof(float));
    const rafter_cross_entropy_args args = {.size = sizeof args, .logits = &logits, .target = &target, .loss = &loss};
    fill_queue(&filler);
    expect(rafter_cross_entropy_forward(context, &args) == RAFTER_OK, "%s", rafter_last_error(context));
    rafter_context_destroy(context);
    expect(gpu_synchronize(filler.context), "the device failed after a context with bad labels was destroyed");
    const DLTensor *const all[] = {&logits, &target, &loss};
    release_all(all, sizeof all / sizeof *all);
    close_line(&filler);
}

void test_destroyed(void) {
    for (int o = 0; problem_ops[o]; o++)
        for (int mode = PROBLEM_FORWARD; mode <= PROBLEM_BACKWARD && serves(problem_ops[o]); mode++)
            if (problem_ops[o]->algorithm_modes[0] >> mode & 1)
                destroy_after_call(problem_ops[o], (enum problem_mode)mode);
    destroy_before_bad_labels();
}

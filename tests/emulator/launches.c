/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of up to 2^36 elements, as many as an H200 has memory for, on an emulated one. The library plans them, and a GPU
 * would accept every launch. Nothing runs, so that tensors have addresses and no memory.
 *
 *     test_launches [OP ...] [--calls N] [--seed S] [--kernels]
 *
 * Takes N random calls of each map of the op, as many with random strides, and the op's list of problems, each with the
 * library's choice of a variant and with every variant. Also checks that the cells of the maps that `rafter bench` draws
 * are not left to the slowest variant, and how much workspace linear_cross_entropy takes. --kernels prints the kernels that were launched, as addresses
 * for `addr2line -Cfe build/emulated/librafter_cuda.so`; those missing are for calls that nobody draws, or for none.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "harness/draw.h"
#include "harness/map.h"
#include "harness/variants.h"
#include "record_launches.h"

static const int64_t most_elements = (int64_t)1 << 36, most_products = (int64_t)1 << 30;

/* Addresses without memory: tensors at the beginning, the workspace at the end. */
static const size_t arena_bytes = (size_t)1 << 45, workspace_at = (size_t)1 << 43;
static char *arena;

static int64_t made, failures;

/* ---- kernels --------------------------------------------------------------------------------- */

enum { KERNELS_MOST = 8192 };
static const void *kernels[KERNELS_MOST];
static int kernel_count;

static void note(const void *kernel) {
    for (int i = 0; i < kernel_count; i++)
        if (kernels[i] == kernel)
            return;
    if (kernel_count < KERNELS_MOST)
        kernels[kernel_count++] = kernel;
}

static void print_kernels(void) {
    for (int i = 0; i < kernel_count; i++) {
        Dl_info info;
        if (dladdr(kernels[i], &info))
            printf("0x%zx\n", (size_t)((const char *)kernels[i] - (const char *)info.dli_fbase));
    }
}

/* ---- contexts -------------------------------------------------------------------------------- */

struct contexts {
    int count;
    const char *name[VARIANTS_MOST + 1]; /* the first one is NULL: the library's choice */
    rafter_context *of[VARIANTS_MOST + 1];
};

static void *allocate(void *user, size_t bytes) {
    (void)user;
    return bytes < arena_bytes - workspace_at ? arena + workspace_at : NULL;
}

static void release(void *user, void *memory, size_t bytes) {
    (void)user;
    (void)memory;
    (void)bytes;
}

static void open_contexts(struct contexts *contexts, const char *op) {
    rafter_context_options options = {
        .size = sizeof options, .device = {kDLCUDA, 0}, .allocate = allocate, .release = release};
    *contexts = (struct contexts){.count = 1};
    contexts->of[0] = variant_context(NULL, options);
    const char *name, *reason;
    for (int i = 0; rafter_describe_variant(contexts->of[0], op, i, &name, &reason); i++) {
        contexts->name[contexts->count] = name;
        contexts->of[contexts->count++] = variant_context(name, options);
    }
    for (int i = 0; i < contexts->count; i++)
        if (!contexts->of[i]) {
            printf("no context: %s\n", rafter_last_error(NULL));
            exit(2);
        }
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Tokens of lrpe_cosine have fewer than 2^31 elements; larger ones are refused. */
static bool is_refused(const problem *p) {
    const problem_tensor *const x = problem_find(p, "x");
    int64_t of_token = 1;
    for (int d = 2; x && d < x->ndim; d++)
        of_token *= x->shape[d];
    return strcmp(p->op->op, "lrpe_cosine") == 0 && of_token > INT32_MAX;
}

static void make_calls(problem *p, const struct contexts *contexts) {
    p->options.budget = PROBLEM_NO_BUDGET; /* to find the smallest one takes many plans */
    if (problem_place(p, arena, (DLDevice){kDLCUDA, 0}) >= workspace_at)
        return;
    for (int m = 0; m < PROBLEM_MODES; m++) {
        if (!(p->op->algorithm_modes[p->algorithm] >> m & 1))
            continue;
        for (int i = 0; i < contexts->count; i++) {
            const rafter_status status = p->op->call(p, contexts->of[i], (enum problem_mode)m);
            if (is_refused(p) && status == RAFTER_INVALID_ARGUMENT)
                continue;
            if (status != RAFTER_OK && variant_declined(contexts->of[i], status) && contexts->name[i])
                continue;
            made++;
            if ((status != RAFTER_OK || is_refused(p)) && failures++ < 40)
                printf("FAIL %s %s | %s | %s %s: %s\n", p->op->op, contexts->name[i] ? contexts->name[i] : "auto",
                       p->label, problem_layout_names[p->layout], problem_mode_names[m],
                       rafter_last_error(contexts->of[i]));
        }
    }
}

static void call_list(const struct op_cases *op, const struct contexts *contexts) {
    for (int64_t index = 0; index < op->count(); index++)
        for (int layout = 0; layout < PROBLEM_LAYOUTS; layout++)
            for (int algorithm = 0; op->algorithms[algorithm]; algorithm++) {
                problem p = {.op = op, .layout = (enum problem_layout)layout, .algorithm = algorithm};
                op->make(&p, index);
                if (problem_has_layout(&p, p.layout) && problem_adapt(&p))
                    make_calls(&p, contexts);
            }
}

/* Number `index` of the random calls: of the op's maps, of its make_random, and with random strides. */
static void call_random(const struct op_cases *op, uint64_t seed, int64_t index, const struct contexts *contexts) {
    struct dice dice = {problem_mix(seed) ^ (uint64_t)index};
    for (int k = 0; k < op->maps; k++)
        for (int shuffled = 0; shuffled < 2; shuffled++) {
            problem p = {.op = op, .layout = shuffled ? PROBLEM_SHUFFLED : PROBLEM_COMPACT, .shuffle = roll(&dice)};
            const int64_t most = pick_size(&dice, most_elements);
            const struct map_cell cell = map_draw_unlisted(op, &op->map[k], seed + (uint64_t)shuffled, index, most);
            op->map[k].make(&p, &cell);
            make_calls(&p, contexts);
        }
    problem p;
    if (op->make_random) {
        draw_without_map(&p, op, &dice, most_products);
        make_calls(&p, contexts);
    }
    draw_shuffled(&p, op, &dice);
    make_calls(&p, contexts);
}

/* ---- choices --------------------------------------------------------------------------------- */

/* cross_entropy's last variant serves every call, up to a hundred times slower than others. No cell of its maps may take
 * it, however large. */
static void check_last_resort(const struct op_cases *op, rafter_context *context) {
    for (uint64_t seed = 1; seed <= 10; seed++)
        for (int k = 0; k < op->maps; k++)
            for (int64_t i = 0; i < 400; i++) {
                const struct map_cell cell = map_draw(op, &op->map[k], seed, i, false);
                problem p = {.op = op};
                op->map[k].make(&p, &cell);
                p.options.budget = PROBLEM_NO_BUDGET;
                if (problem_place(&p, arena, (DLDevice){kDLCUDA, 0}) >= workspace_at)
                    continue;
                for (int m = 0; m < PROBLEM_MODES; m++) {
                    if (!(op->map[k].modes >> m & 1))
                        continue;
                    made++;
                    const rafter_status status = op->call(&p, context, (enum problem_mode)m);
                    const char *const taken = variant_taken(context);
                    if ((status != RAFTER_OK || !taken || strcmp(taken, "strided") == 0) && failures++ < 40)
                        printf("FAIL %s | %s | taken by %s\n", p.label, problem_mode_names[m], taken ? taken : "none");
                }
            }
}

/* Gives each tensor, of less than 2^36 bytes, addresses of its own. */
static void place_apart(DLTensor *const *all, int64_t count) {
    for (int64_t t = 0; t < count; t++) {
        all[t]->data = arena + (t << 36);
        all[t]->device = (DLDevice){kDLCUDA, 0};
    }
}

/* A call of rows of two classes, contiguous or side by side, with a loss per row. Returns the variant that it takes. */
static const char *choice_of_pairs(rafter_context *context, rafter_dtype dtype, int64_t rows, bool columns,
                                   bool forward) {
    int64_t shape[] = {rows, 2}, strides[] = {columns ? 1 : 2, columns ? rows : 1};
    DLTensor logits = rafter_tensor(arena, dtype, 2, shape), dlogits = logits,
             target = rafter_tensor(arena, RAFTER_I64, 1, shape), loss = rafter_tensor(arena, RAFTER_F32, 1, shape),
             lse = loss;
    DLTensor *const all[] = {&logits, &dlogits, &target, &loss, &lse};
    place_apart(all, 5);
    logits.strides = dlogits.strides = strides;
    const rafter_loss_options options = {.size = sizeof options, .reduction = RAFTER_NONE};
    rafter_cross_entropy_args args = {
        .size = sizeof args, .options = &options, .logits = &logits, .target = &target, .lse = &lse};
    *(forward ? &args.loss : &args.dloss) = &loss;
    if (!forward)
        args.dlogits = &dlogits;
    const rafter_status status =
        forward ? rafter_cross_entropy_forward(context, &args) : rafter_cross_entropy_backward(context, &args);
    return status == RAFTER_OK ? variant_taken(context) : "none";
}

/* Kernels that number rows by an int once declined from 2^30 rows on, and slow ones took over. */
static void check_choice_past_2_30(rafter_context *context) {
    for (int dtype = 0; dtype < 2; dtype++)
        for (int columns = 0; columns < 2; columns++)
            for (int forward = 0; forward < 2; forward++) {
                const rafter_dtype of = dtype ? RAFTER_F32 : RAFTER_BF16;
                const int64_t limit = (int64_t)1 << 30;
                const char *const below = choice_of_pairs(context, of, limit - 8, columns, forward),
                                  *const above = choice_of_pairs(context, of, limit + 8, columns, forward);
                made += 2;
                if ((strcmp(below, "none") == 0 || strcmp(below, above) != 0) && failures++ < 40)
                    printf("FAIL rows of two classes%s, %s: %s below 2^30 rows, %s above\n",
                           columns ? " side by side" : "", forward ? "forward" : "backward", below, above);
            }
}

/* Without a budget linear_cross_entropy takes few groups of rows, which need no or few passes over sums of dW; but less
 * workspace than the logits, and at most 5 GiB. */
static void check_workspaces(rafter_context *context) {
    static const struct {
        int64_t rows, depth, classes;
        rafter_lce_accumulate accumulate;
        int64_t least, most; /* MiB */
    } calls[] = {{16384, 2048, 151936, RAFTER_ACCUMULATE_F32, 4000, 4748},
                 {16384, 2048, 151936, RAFTER_ACCUMULATE_NATIVE, 1, 1500}, /* for those who want to save memory */
                 {8192, 2048, 151936, RAFTER_ACCUMULATE_F32, 1700, 2374},
                 {32768, 4096, 128256, RAFTER_ACCUMULATE_F32, 4000, 5120},
                 {4096, 4096, 128256, RAFTER_ACCUMULATE_F32, 1, 1002}};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        int64_t x_shape[] = {calls[i].rows, calls[i].depth}, w_shape[] = {calls[i].classes, calls[i].depth};
        DLTensor x = rafter_tensor(arena, RAFTER_BF16, 2, x_shape), dx = x,
                 loss = rafter_tensor(arena, RAFTER_F32, 0, NULL),
                 target = rafter_tensor(arena, RAFTER_I64, 1, x_shape),
                 weight = rafter_tensor(arena, RAFTER_BF16, 2, w_shape), dweight = weight;
        DLTensor *const all[] = {&x, &weight, &target, &loss, &dx, &dweight};
        place_apart(all, 6);
        const rafter_linear_cross_entropy_args args = {.size = sizeof args,
                                                       .accumulate = calls[i].accumulate,
                                                       .x = &x,
                                                       .weight = &weight,
                                                       .target = &target,
                                                       .loss = &loss,
                                                       .dx = &dx,
                                                       .dweight = &dweight};
        size_t bytes = 0;
        const rafter_status status = rafter_linear_cross_entropy_workspace(context, &args, RAFTER_FORWARD, &bytes);
        const int64_t mib = (int64_t)(bytes >> 20);
        made++;
        if (status != RAFTER_OK || mib < calls[i].least || mib > calls[i].most) {
            failures++;
            printf("FAIL linear_cross_entropy of %lld rows, depth %lld, %lld classes takes %lld MiB, wanted %lld to "
                   "%lld. %s\n",
                   (long long)calls[i].rows, (long long)calls[i].depth, (long long)calls[i].classes, (long long)mib,
                   (long long)calls[i].least, (long long)calls[i].most, rafter_last_error(context));
        }
    }
}

int main(int argc, char **argv) {
    const char *ops[16] = {NULL};
    int named = 0;
    int64_t calls = 1000;
    uint64_t seed = 1;
    bool list = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--calls") == 0 && i + 1 < argc)
            calls = atoll(argv[++i]);
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            seed = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--kernels") == 0)
            list = true;
        else if (named < 15)
            ops[named++] = argv[i];
    }
    arena = mmap(NULL, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) {
        perror("no addresses for the tensors");
        return 2;
    }
    emulator_record_launches(note);
    for (int o = 0; problem_ops[o]; o++) {
        const struct op_cases *const op = problem_ops[o];
        bool wanted = named == 0;
        for (int i = 0; i < named; i++)
            wanted |= strcmp(ops[i], op->op) == 0;
        if (!wanted)
            continue;
        struct contexts contexts;
        open_contexts(&contexts, op->op);
        const int before = kernel_count;
        call_list(op, &contexts);
        for (int64_t i = 0; i < calls; i++)
            call_random(op, seed, i, &contexts);
        if (strcmp(op->op, "cross_entropy") == 0) {
            check_last_resort(op, contexts.of[0]);
            check_choice_past_2_30(contexts.of[0]);
        }
        if (strcmp(op->op, "linear_cross_entropy") == 0)
            check_workspaces(contexts.of[0]);
        if (!list)
            printf("%-22s %d kernels launched\n", op->op, kernel_count - before);
        for (int i = 0; i < contexts.count; i++)
            rafter_context_destroy(contexts.of[i]);
    }
    if (list)
        print_kernels();
    else
        printf("%lld calls, %lld failures\n", (long long)made, (long long)failures);
    return made == 0 || failures > 0;
}

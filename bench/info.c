/* SPDX-License-Identifier: Apache-2.0 */
/* `rafter info`: the machine and the kernel variants. `rafter info OP --shape ...`: the variant of
 * one call. */
#include <stdio.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef RAFTER_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif

#include "harness/context.h"
#include "harness/gpu.h"
#include "harness/variants.h"
#include "machine.h"
#include "options.h"
#include "verbs.h"

/* ---- the machine ----------------------------------------------------------------------------- */

static void print_size(const char *name, size_t bytes) {
    if (bytes >= (size_t)1 << 20)
        printf("%s %zu MiB", name, bytes >> 20);
    else if (bytes > 0)
        printf("%s %zu KiB", name, bytes >> 10);
    else
        printf("%s none", name);
}

static void print_cpu(const rafter_context *context) {
    printf("rafter    %s\n", rafter_version());
    printf("cpu       %s\n", machine_cpu());
    printf("features  %s\n", rafter_cpu_features());
    printf("caches    ");
    print_size("L1", machine_cache_level(1));
    print_size(", L2", machine_cache_level(2));
    print_size(", L3", machine_cache_level(3));
    printf("\nmemory    %.1f GiB free\n", (double)machine_free_memory() / (1 << 30));
    printf("threads   %d of %d processors", rafter_context_threads(context), machine_processors());
#ifdef _OPENMP
    printf(" (OpenMP %d)", _OPENMP);
#endif
    printf("\noneDNN    ");
#ifdef RAFTER_HAVE_ONEDNN
    const dnnl_version_t *v = dnnl_version();
    printf("%d.%d.%d, for the bench only\n", v->major, v->minor, v->patch);
#else
    printf("not in this build\n");
#endif
}

/* A context on the first GPU, or NULL. */
static rafter_context *print_cuda(void) {
    const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}};
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        printf("CUDA      not usable: %s\n", rafter_last_error(NULL));
        return NULL;
    }
    struct gpu_facts facts;
    gpu_describe(context, &facts);
    printf("CUDA      %s, compute capability %d.%d, %d multiprocessors, L2 %lld MiB, %lld GiB, driver %d.%d, runtime "
           "%d.%d\n",
           facts.name, facts.compute_capability / 10, facts.compute_capability % 10, facts.multiprocessors,
           (long long)facts.l2_bytes >> 20, (long long)facts.memory_bytes >> 30, facts.driver / 1000,
           facts.driver % 1000 / 10, facts.runtime / 1000, facts.runtime % 1000 / 10);
    return context;
}

/* ---- variants -------------------------------------------------------------------------------- */

/* The variants of an op for one kind of device. `context`: NULL if there is no such device. */
static void print_variants(const char *op, DLDeviceType device, const rafter_context *context) {
    const bool cuda = device == kDLCUDA;
    struct variant_row row;
    for (int i = 0; variant_row(op, device, i, &row); i++) {
        const char *name, *reason = "there is no usable GPU";
        if (context)
            rafter_describe_variant(context, op, i, &name, &reason);
        printf("%-22s%-6s%-28s%-7s%s%s\n", op, cuda ? "cuda" : "cpu", row.name, cuda ? row.level : "",
               reason ? "no: " : "yes", reason ? reason : "");
    }
}

static int print_machine(const struct options *o) {
    rafter_context *context;
    if (rafter_context_create(&context, NULL) != RAFTER_OK) {
        fprintf(stderr, "rafter: no context: %s\n", rafter_last_error(NULL));
        return 1;
    }
    if (o->named == 0)
        print_cpu(context);
    rafter_context *const gpu = print_cuda();
    printf("\nVariants, in order of preference: a call takes the first one that runs here and serves it.\n");
    printf("%-22s%-6s%-28s%-7s%s\n", "op", "on", "variant", "level", "runs here");
    for (int i = 0; o->op[i]; i++) {
        print_variants(o->op[i]->op, kDLCPU, context);
        print_variants(o->op[i]->op, kDLCUDA, gpu);
    }
    rafter_context_destroy(gpu);
    rafter_context_destroy(context);
    return 0;
}

/* ---- one call -------------------------------------------------------------------------------- */

/* The variants that the last call on the context considered, the reason for each that was passed
 * over, and those after the one that was taken. */
static void print_considered(const struct op_cases *op, const rafter_context *context, size_t bytes) {
    const char *name, *reason;
    int count = 0;
    for (; rafter_considered_variant(context, count, &name, &reason); count++)
        if (reason)
            printf("    %-28spassed over: %s\n", name, reason);
        else
            printf("    %-28sruns, with %zu bytes of workspace\n", name, bytes);
    if (count == 0)
        printf("    no variant runs: there is nothing to compute\n");
    const char *unused;
    for (int i = count; count > 0 && rafter_describe_variant(context, op->op, i, &name, &unused); i++)
        printf("    %-28snot considered\n", name);
}

/* One call of the library; false if no variant serves it. */
static bool print_call(problem *p, rafter_context *context, enum problem_mode mode) {
    size_t bytes = 0;
    const rafter_status status = problem_ask(p, context, mode, &bytes);
    printf("%s\n", problem_mode_names[mode]);
    if (status == RAFTER_OK || status == RAFTER_UNSUPPORTED || status == RAFTER_WORKSPACE_TOO_SMALL)
        print_considered(p->op, context, bytes);
    if (status != RAFTER_OK)
        printf("    %s: %s\n", rafter_status_name(status), rafter_last_error(context));
    return status == RAFTER_OK;
}

static bool find_algorithm(const struct op_cases *op, const char *name, int *index) {
    for (*index = 0; name && op->algorithms[*index]; ++*index)
        if (strcmp(op->algorithms[*index], name) == 0)
            return true;
    if (!name) {
        *index = 0;
        return true;
    }
    fprintf(stderr, "rafter: %s has no algorithm '%s'\n", op->op, name);
    return false;
}

/* Declares the problem that the command line describes and gives its tensors addresses. Nothing
 * reads them: the library only plans the call. */
static bool make_problem(problem *p, const struct options *o, const rafter_context *context) {
    struct problem_request request = o->request;
    request.dtype = o->dtype;
    const char *const wrong = p->op->make_request(p, &request);
    if (wrong) {
        fprintf(stderr, "rafter: %s: %s\n", p->op->op, wrong);
        return false;
    }
    if (!problem_adapt(p)) {
        fprintf(stderr, "rafter: %s: the algorithm does not apply to this call\n", p->op->op);
        return false;
    }
    if (!problem_reserve(p)) {
        fprintf(stderr, "rafter: %s: the tensors are too large for this machine's address space\n", p->op->op);
        return false;
    }
    for (int i = 0; i < p->tensors; i++)
        p->tensor[i].tensor.device = context_device(context);
    return true;
}

static int explain(const struct options *o) {
    static problem p;
    p.op = o->op[0];
    if (!find_algorithm(p.op, o->algorithm, &p.algorithm))
        return 2;
    const bool cuda = o->device.device_type == kDLCUDA;
    const rafter_context_options options = {
        .size = sizeof options, .device = o->device, .threads = o->threads, .batch_invariant = o->batch_invariant};
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        fprintf(stderr, "rafter: no context: %s\n", rafter_last_error(NULL));
        return 1;
    }
    int status = 2;
    if (make_problem(&p, o, context)) {
        printf("%s %s, on %s\n", p.op->op, p.label, cuda ? "cuda" : "cpu");
        status = 0;
        unsigned modes = p.op->algorithm_modes[p.algorithm] & o->modes;
        if (modes >> PROBLEM_BOTH & 1 && !problem_is_one_call(&p, PROBLEM_BOTH))
            modes = 1u << PROBLEM_FORWARD | 1u << PROBLEM_BACKWARD;
        for (int mode = 0; mode < PROBLEM_MODES; mode++)
            if (modes >> mode & 1)
                status |= !print_call(&p, context, (enum problem_mode)mode);
    }
    problem_free(&p);
    rafter_context_destroy(context);
    return status;
}

int verb_info(int argc, char **argv) {
    struct options o;
    if (!options_read(&o, "info", argc, argv, 2))
        return 2;
    if (!o.has_shape && argc - 2 > o.named) {
        fprintf(stderr, "rafter: info OP wants --shape with its other options, such as --shape 32768x4096\n");
        return 2;
    }
    if (o.has_shape && o.named != 1) {
        fprintf(stderr, "rafter: --shape wants one op: rafter info OP --shape 32768x4096\n");
        return 2;
    }
    return o.has_shape ? explain(&o) : print_machine(&o);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef RAFTER_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif

#include "core/backend.h"
#include "machine.h"
#include "rafter/rafter.h"
#include "verbs.h"

static void print_size(const char *name, size_t bytes) {
    if (bytes >= (size_t)1 << 20)
        printf("%s %zu MiB", name, bytes >> 20);
    else if (bytes > 0)
        printf("%s %zu KiB", name, bytes >> 10);
    else
        printf("%s none", name);
}

static void print_cuda(void) {
    const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}};
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        printf("CUDA      not usable: %s\n\n", rafter_last_error(NULL));
        return;
    }
    struct rafter_cuda_facts facts;
    context->cuda->facts(context, &facts);
    printf("CUDA      %s, compute capability %d.%d, %d multiprocessors, L2 %lld MiB, %lld GiB, driver %d.%d, runtime "
           "%d.%d\n\n",
           facts.name, facts.compute_capability / 10, facts.compute_capability % 10, facts.multiprocessors,
           (long long)facts.l2_bytes >> 20, (long long)facts.memory_bytes >> 30, facts.driver / 1000,
           facts.driver % 1000 / 10, facts.runtime / 1000, facts.runtime % 1000 / 10);
    rafter_context_destroy(context);
}

int verb_info(int argc, char **argv) {
    if (argc > 2) {
        fprintf(stderr, "rafter: info takes no arguments, and '%s' was given\n", argv[2]);
        return 2;
    }
    rafter_context *context;
    const rafter_status status = rafter_context_create(&context, NULL);
    if (status != RAFTER_OK) {
        fprintf(stderr, "rafter: no context: %s\n", rafter_last_error(NULL));
        return 1;
    }
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
    print_cuda();

    printf("%-22s%-12s%s\n", "op", "runs", "available");
    const char *op, *variant;
    for (int i = 0; rafter_describe_op(context, i, &op, &variant); i++) {
        printf("%-22s%-12s", op, variant);
        for (int k = 0; (variant = rafter_op_variant(op, k)); k++)
            printf("%s%s", k ? " " : "", variant);
        printf("\n");
    }
    rafter_context_destroy(context);
    return 0;
}

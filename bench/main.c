/* The rafter command. */
#include <stdio.h>
#include <string.h>

#include "rafter/rafter.h"
#include "verbs.h"

static void help(FILE *to) {
    fputs("rafter info                 what runs here: CPU, threads, the variant that serves each op, libraries\n"
          "rafter check [OP...]        every variant against an fp64 oracle; exit status 1 if any is wrong\n"
          "    --device cpu|cuda       where: all variants of the CPU (default), or the GPU\n"
          "    --threads N             threads to run on (default: all)\n"
          "rafter bench [OP...]        speed and memory tables, one column per provider\n"
          "    --preset quick|seeds    quick: small batches, two minutes (default); seeds: the seeds' full sizes\n"
          "    --metric speed|memory   milliseconds (default), or MiB of outputs and workspace\n"
          "    --mode fwd|bwd|fwd+bwd  only this one (default: all that a table has)\n"
          "    --x 1024,2048           rows, instead of the preset's\n"
          "    --dtype bf16|fp16|fp32  of the tensors (default bf16)\n"
          "    --threads N             threads for every provider (default: all)\n"
          "    --providers a,b         only these columns\n"
          "    --percent               beside each time, the share of the roofline measured in the same run\n"
          "    --seconds S             time per cell\n"
          "    --warm                  leave a call's data in the caches between repeats\n"
          "    --json FILE             write every cell with its spread, bytes, flops and error\n"
          "    --csv DIR               write one file per table\n"
          "rafter help                 this\n"
          "rafter --version            the library's version\n"
          "\n"
          "Ops: cross_entropy, linear_cross_entropy (lce), logsumexp, act, lrpe_cosine; all when none is named.\n"
          "RAFTER_VARIANT=portable|avx2|... in the environment keeps to kernels no newer than that.\n",
          to);
}

int main(int argc, char **argv) {
    const char *verb = argc > 1 ? argv[1] : "";
    if (strcmp(verb, "bench") == 0)
        return verb_bench(argc, argv);
    if (strcmp(verb, "check") == 0)
        return verb_check(argc, argv);
    if (strcmp(verb, "info") == 0)
        return verb_info(argc, argv);
    if (strcmp(verb, "help") == 0 || strcmp(verb, "--help") == 0 || strcmp(verb, "-h") == 0) {
        help(stdout);
        return 0;
    }
    if (strcmp(verb, "--version") == 0) {
        printf("rafter %s\n", rafter_version());
        return 0;
    }
    if (argc > 1)
        fprintf(stderr, "rafter: there is no verb '%s', wanted one of these:\n\n", verb);
    help(stderr);
    return 2;
}

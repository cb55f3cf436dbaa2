/* SPDX-License-Identifier: Apache-2.0 */
/* The rafter command. */
#include <stdio.h>
#include <string.h>

#include "rafter/rafter.h"
#include "verbs.h"

static void help(FILE *to) {
    fputs(
        "rafter info                 what runs here: CPU, threads, the variant that serves each op, libraries\n"
        "rafter check [OP...]        every variant against an fp64 oracle; exit status 1 if any is wrong\n"
        "    --device cpu|cuda       where: all variants of the CPU (default), or the GPU\n"
        "    --threads N             threads to run on (default: all)\n"
        "rafter bench [OP...]        speed and memory tables, one column per provider\n"
        "    --preset quick|seeds    quick: small batches, two minutes (default); seeds: the seeds' full sizes\n"
        "    --metric speed|memory|all  milliseconds (default), MiB at the peak of a call, or both\n"
        "    --mode fwd|bwd|fwd+bwd  only this one (default: all that a table has)\n"
        "    --x 1024,2048           rows, instead of the preset's\n"
        "    --dtype bf16|fp16|fp32  of the tensors (default bf16)\n"
        "    --threads N             threads for every provider (default: all)\n"
        "    --providers a,b         only these columns\n"
        "    --without a,b           not these\n"
        "    --percent               beside each time, the share of the roofline measured in the same run\n"
        "    --error, --host         beside each figure: the largest error; microseconds until the call comes back\n"
        "    --first-call            and: the first call of a fresh process, compiling and tuning included\n"
        "    --table TEXT            only tables with this in their title\n"
        "    --device cpu|cuda       where to run (default cpu)\n"
        "    --seconds S             time per cell\n"
        "    --limit S               time that a peer in a process of its own may take for a call, or to compile\n"
        "    --warm                  leave a call's data in the caches between repeats\n"
        "    --json FILE             write every cell with its spread, bytes, flops and error\n"
        "    --resume                go on with the rows that FILE does not have\n"
        "    --html FILE             write a report to look at: summary, plots, tables\n"
        "    --csv DIR               write one file per table\n"
        "    --list                  only say which tables, rows and columns there would be\n"
        "    --markdown              print the tables once more, as Markdown\n"
        "rafter compare OLD NEW      two files of --json: what got slower beyond noise; exit status 1 if anything did\n"
        "rafter headline FILE        the largest row of every table of a --json file, as a Markdown table\n"
        "rafter page FILE            the page that --html writes, from a --json file\n"
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
    if (strcmp(verb, "compare") == 0)
        return verb_compare(argc, argv);
    if (strcmp(verb, "headline") == 0)
        return verb_headline(argc, argv);
    if (strcmp(verb, "page") == 0)
        return verb_page(argc, argv);
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

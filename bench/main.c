/* SPDX-License-Identifier: Apache-2.0 */
/* The rafter command. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "rafter/rafter.h"
#include "verbs.h"

static void help(FILE *to) {
    fputs(
        "rafter info                 the machine, and every op's kernel variants: which run here, in order of "
        "preference\n"
        "rafter info OP --shape S    the variant that a call would take, its workspace, and why others were passed "
        "over\n"
        "    --shape 32768x4096      shape of x, or of the logits\n"
        "    --dtype bf16|fp16|fp32  of the tensors (default bf16)\n"
        "    --device cpu|cuda       where the call would run (default cpu)\n"
        "    --mode fwd|bwd|fwd+bwd, --direction forward|backward  only these calls (default: all)\n"
        "    --act none|relu|sigmoid|silu|softmax, --dim D (default -1), --softmax-over feature|sequence, --offset N\n"
        "    --classes V, --bias, --reduction mean|sum|none, --label-smoothing S, --z-loss C, --softcap C,\n"
        "    --logit-scale S, --class-weight  options of the losses; V and bias: of linear_cross_entropy\n"
        "    --extras                also the optional results: row_loss, logprob, entropy, argmax; dtheta\n"
        "    --algorithm NAME, --in-place, --threads N, --batch-invariant\n"
        "rafter check [OP...]        every variant against an fp64 oracle; exit status 1 if any result is wrong\n"
        "    --device cpu|cuda       variants of the CPU (default) or of the GPU\n"
        "    --threads N             threads per call (default: all)\n"
        "rafter bench [OP...]        speed and memory tables, one column per provider\n"
        "    --preset quick|seeds|models|map  quick: small batches, two minutes (default); seeds: the seeds' full "
        "sizes;\n"
        "                            models: linear_cross_entropy at the sizes of models, and with its options;\n"
        "                            map: cells drawn over shapes, layouts and options, and the worst of them\n"
        "    --cells N, --seed S     map: cells per op (default: 400 on a GPU, 50 on a CPU), and their list (default "
        "1)\n"
        "    --metric speed|memory|all  milliseconds (default), MiB at the peak of a call, or both\n"
        "    --mode fwd|bwd|fwd+bwd  only this mode (default: all modes of a table)\n"
        "    --x 1024,2048           rows, instead of the preset's\n"
        "    --dtype bf16|fp16|fp32  of the tensors (default bf16)\n"
        "    --device cpu|cuda       where to run (default cpu)\n"
        "    --threads N             threads for every provider (default: all)\n"
        "    --batch-invariant       Rafter's rows have the same bits in every batch\n"
        "    --providers a,b         only these columns\n"
        "    --without a,b           all but these columns\n"
        "    --variants              also a column for each of Rafter's variants that serves the call\n"
        "    --table TEXT            only tables with this in their title\n"
        "    --percent               beside each time, the share of the roofline measured in the same run\n"
        "    --error                 beside each figure, the largest error\n"
        "    --host                  beside each time, microseconds until the call returns\n"
        "    --first-call            beside each time, the first call of a fresh process, compiling and tuning "
        "included\n"
        "    --seconds S             time per cell\n"
        "    --limit S               time limit for a call, or for compiling, of a provider in another process\n"
        "    --warm                  leave a call's data in the caches between repeats\n"
        "    --json FILE             write every cell with its spread, bytes, flops, error and variant\n"
        "    --resume                keep the rows that FILE has, measure the others\n"
        "    --html FILE             write a report with summary, plots and tables\n"
        "    --csv DIR               write one file per table\n"
        "    --list                  only list the tables, rows and columns\n"
        "    --markdown              print the tables again, as Markdown\n"
        "rafter compare OLD NEW      two files of --json: cells that got slower beyond noise; exit status 1 if there "
        "are any\n"
        "    --html FILE             write a page with both runs side by side\n"
        "rafter headline FILE        one line per op for README.md, from a --json file of the seeds' tables\n"
        "rafter page FILE            the page that --html writes, from a --json file\n"
        "rafter scale                linear_cross_entropy with its classes over 1 to 64 ranks: compute measured here, "
        "network modelled\n"
        "    --rows N, --depth D, --classes V  (default 8192, 4096, 131072; on a CPU 256, 256, 8192)\n"
        "    --ranks 1,2,4,8         numbers of ranks (default: 1 to 64)\n"
        "    --network nvlink|infiniband  (default nvlink), or --latency US per hop and --bandwidth GB/s per rank\n"
        "    --dtype bf16|fp16|fp32, --device cpu|cuda, --seconds S per number of ranks (default 1)\n"
        "    --beside 8,16,32        also with a copy on so many multiprocessors in place of the sum of dx, beside the "
        "product for dW\n"
        "    --svg FILE              the efficiencies as a plot\n"
        "rafter help                 this text\n"
        "rafter --version            the library's version\n"
        "\n"
        "Ops: cross_entropy, linear_cross_entropy (lce), logsumexp, act, lrpe_cosine, scale; all of them if none is "
        "named.\n"
        "RAFTER_VARIANT=NAME in the environment: a CPU level (portable, avx2, neon, ...) allows no newer CPU kernels; "
        "a "
        "CUDA\n"
        "variant is used in all ops that have it.\n",
        to);
}

static int run_verb(int argc, char **argv) {
    const char *verb = argc > 1 ? argv[1] : "";
    if (strcmp(verb, "bench") == 0)
        return verb_bench(argc, argv);
    if (strcmp(verb, "compare") == 0)
        return verb_compare(argc, argv);
    if (strcmp(verb, "headline") == 0)
        return verb_headline(argc, argv);
    if (strcmp(verb, "page") == 0)
        return verb_page(argc, argv);
    if (strcmp(verb, "scale") == 0)
        return verb_scale(argc, argv);
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

int main(int argc, char **argv) {
    const int status = run_verb(argc, argv);
    const bool failed = ferror(stdout);
    if (fclose(stdout) == 0 && !failed)
        return status;
    fprintf(stderr, "rafter: cannot write to standard output\n");
    return status ? status : 1;
}

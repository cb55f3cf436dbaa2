/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs of the rafter command. Each takes the whole command line (argv[1] is the verb) and
 * returns the exit status: 0 success, 1 failure, 2 wrong command line. main checks that standard
 * output was written. */
#ifndef RAFTER_BENCH_VERBS_H
#define RAFTER_BENCH_VERBS_H

int verb_info(int argc, char **argv);
int verb_check(int argc, char **argv);
int verb_bench(int argc, char **argv);
int verb_compare(int argc, char **argv);
int verb_headline(int argc, char **argv);
int verb_page(int argc, char **argv);
int verb_scale(int argc, char **argv);

#endif

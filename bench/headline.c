/* SPDX-License-Identifier: Apache-2.0 */
/* `rafter headline REPORT.json`: one line per op for README.md, from the largest row of a table. */
#include <string.h>

#include "names.h"
#include "report.h"
#include "verbs.h"

/* A line of the output: its text, and the titles of the tables that its figures are from. `both`: forward and
 * backward are one call. */
static const struct line {
    const char *text, *forward, *backward, *both;
} lines[] = {
    {"Cross entropy, 4096 rows of %lld classes", "cross_entropy-speed-fwd-batch4096-bf16-ls0.0-mean",
     "cross_entropy-speed-bwd-batch4096-bf16-ls0.0-mean", NULL},
    {"Linear cross entropy, 12288 tokens, D = 4096, %lld classes", NULL, NULL,
     "lce-speed-fwd+bwd-batch12288-dim4096-bf16"},
    {"logsumexp, 4096 rows of %lld", "logsumexp-speed-fwd-batch4-dim1024-bf16",
     "logsumexp-speed-bwd-batch4-dim1024-bf16", NULL},
    {"Softmax over %lld positions, [12, 12, n, 128]", "act-speed-fwd-batch12-head12-dim128-act_softmax-dim_-2-bf16",
     "act-speed-bwd-batch12-head12-dim128-act_softmax-dim_-2-bf16", NULL},
    {"LRPE-cosine with silu, [12, %lld, 12, 128]", "lrpe_cosine-speed-fwd-batch12-head12-dim128-act_silu-bf16",
     "lrpe_cosine-speed-bwd-batch12-head12-dim128-act_silu-bf16", NULL},
};

/* "**0.265** (98 %) | 0.391 Triton |" */
static void write_cells(const struct table *t, const struct row *row, FILE *to) {
    const char *column = "";
    const struct cell *ours = row ? row_ours(t, row) : NULL, *peer = row ? row_best_peer(t, row, &column) : NULL;
    if (ours && ours->share > 0)
        fprintf(to, " **%.3g** (%.0f %%) |", ours->value.median, 100 * ours->share);
    else if (ours)
        fprintf(to, " **%.3g** |", ours->value.median);
    else
        fprintf(to, " |");
    if (peer)
        fprintf(to, " %.3g %s |", peer->value.median, column_name(column));
    else
        fprintf(to, " |");
}

static const struct row *largest_row(const struct table *t) {
    return t && t->rows > 0 ? &t->row[t->rows - 1] : NULL;
}

static void write_line(const struct report *r, const struct line *line, FILE *to) {
    const struct table *const first = report_find_table(r, line->both ? line->both : line->forward);
    const struct table *const backward = line->backward ? report_find_table(r, line->backward) : NULL;
    const struct row *const row = largest_row(first);
    if (!row)
        return;
    fprintf(to, "| ");
    fprintf(to, line->text, (long long)row->x);
    fprintf(to, " |");
    write_cells(first, row, to);
    if (line->both)
        fprintf(to, " (both in one call) | |");
    else
        write_cells(backward, backward ? table_find_row(backward, row->x) : NULL, to);
    fputc('\n', to);
}

static void write_rows(const struct report *r, FILE *to) {
    fprintf(to, "| | forward, ms | best peer | backward, ms | best peer |\n|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        write_line(r, &lines[i], to);
}

static void headline_write(const struct report *r, FILE *to) {
    fprintf(to,
            "bf16, through the C API, on one %s (%s%s%s). In brackets: the share of the floor measured in the same "
            "run.\n\n",
            r->gpu[0] ? r->gpu : r->cpu, r->date, r->torch[0] ? ", PyTorch " : "", r->torch);
    write_rows(r, to);
}

int verb_headline(int argc, char **argv) {
    return report_print(argc, argv, "headline wants one report: rafter headline REPORT.json", headline_write);
}

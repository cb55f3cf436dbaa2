/* SPDX-License-Identifier: Apache-2.0 */
/* The report as one self-contained HTML file. */
#include <string.h>

#include "map.h"
#include "plot.h"
#include "report.h"
#include "verbs.h"

static const char style[] =
    ":root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#57606a;--line:#d0d7de;--card:#f6f8fa;--good:#116329;"
    "--bad:#a40e26;--link:#0b57b0}\n"
    "@media (prefers-color-scheme:dark){:root{--bg:#0f1318;--fg:#e6edf3;--soft:#9da7b1;--line:#39414a;--card:#171c22;"
    "--good:#6fdd8b;--bad:#ff9a9a;--link:#79b8ff}}\n"
    "*{box-sizing:border-box}body{margin:0 auto;max-width:62rem;padding:1rem;background:var(--bg);color:var(--fg);"
    "font:16px/1.5 "
    "system-ui,sans-serif}h1{font-size:1.6rem;line-height:1.2}h2{font-size:1.15rem;overflow-wrap:anywhere;"
    "margin-top:2.5rem;border-top:1px solid var(--line);padding-top:1rem}a{color:var(--link)}p,li{max-width:46rem}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}"
    "caption{text-align:left;color:var(--soft);padding:.25rem 0}th,td{padding:.25rem .6rem;text-align:right;"
    "border-bottom:1px solid "
    "var(--line);white-space:nowrap}th:first-child,td.l{text-align:left}td.l{white-space:normal;overflow-wrap:anywhere;"
    "min-width:11rem}thead "
    "th{background:var(--card)}"
    "td.best{font-weight:700}td.x{color:var(--soft)}.good{color:var(--good)}.bad{color:var(--bad)}"
    ".notes{font-size:.875rem;color:var(--soft)}figure{margin:1rem "
    "0}svg{width:100%;height:auto;display:block;touch-action:pan-y}"
    "svg text{font-size:12px;fill:var(--fg)}.own{font-weight:700}.grid{stroke:var(--line);stroke-width:1}"
    "polyline{fill:none;stroke:var(--c);stroke-width:1.5}polyline.ours{stroke-width:3}.lead{fill:none;stroke:var(--c);"
    "stroke-width:2}circle.p{fill:var(--c);stroke:var(--bg);stroke-width:1}circle.on{stroke:var(--fg);stroke-width:2.5}"
    "#tip{position:fixed;pointer-events:none;background:var(--fg);color:var(--bg);padding:.25rem "
    ".5rem;border-radius:.25rem;"
    "font-size:.875rem;max-width:90vw}#tip[hidden]{display:none}pre{overflow-x:auto;background:var(--card);padding:."
    "75rem}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1rem}dt{color:var(--soft)}dd{margin:0}\n"
    ".c0{--c:#0b57b0}.c1{--c:#b35900}.c2{--c:#1a7f37}.c3{--c:#8250df}.c4{--c:#bf3989}.c5{--c:#6e7781}.c6{--c:#0e7c86}"
    ".c7{--c:#a40e26}.c8{--c:#6b5900}.c9{--c:#5a32a3}\n"
    "@media "
    "(prefers-color-scheme:dark){.c0{--c:#58a6ff}.c1{--c:#ffa657}.c2{--c:#56d364}.c3{--c:#bc8cff}.c4{--c:#ff7eb6}"
    ".c5{--c:#b1bac4}.c6{--c:#56d4dd}.c7{--c:#ff7b72}.c8{--c:#e3b341}.c9{--c:#d2a8ff}}\n"
    ".tile text{fill:#111}.h0{fill:#7ed69a}.h1{fill:#cfe07a}.h2{fill:#f4cf62}.h3{fill:#f4a261}.h4{fill:#f28b82}\n"
    "@media print{:root{--bg:#fff;--fg:#000;--soft:#333;--line:#999;--card:#eee}body{max-width:none;font-size:10pt}"
    "section{break-inside:avoid}.scroll{overflow:visible}table{font-size:7pt}th,td{padding:.1rem "
    ".25rem}#tip{display:none}}\n";

/* Shows the value of the point nearest to the pointer. */
static const char script[] =
    "const tip=document.getElementById('tip');let on=null;\n"
    "function away(){if(on)on.classList.remove('on');on=null;tip.hidden=true}\n"
    "for(const svg of document.querySelectorAll('svg')){\n"
    "  const points=[...svg.querySelectorAll('circle.p')];\n"
    "  function near(event){\n"
    "    let best=null,least=900;\n"
    "    for(const p of points){const b=p.getBoundingClientRect();\n"
    "      const d=(b.x+b.width/2-event.clientX)**2+(b.y+b.height/2-event.clientY)**2;if(d<least){least=d;best=p}}\n"
    "    if(best!==on)away();\n"
    "    if(!best)return;\n"
    "    on=best;on.classList.add('on');tip.textContent=on.dataset.v;tip.hidden=false;\n"
    "    const w=tip.offsetWidth,x=Math.min(event.clientX+12,innerWidth-w-4),y=event.clientY-tip.offsetHeight-8;\n"
    "    tip.style.left=Math.max(4,x)+'px';tip.style.top=(y<4?event.clientY+16:y)+'px';\n"
    "  }\n"
    "  svg.addEventListener('pointermove',near);svg.addEventListener('pointerdown',near);\n"
    "  svg.addEventListener('pointerleave',away);\n"
    "}\n"
    "addEventListener('scroll',away,{passive:true});\n";

static void write_number(FILE *to, double value) {
    fprintf(to, value >= 1000 ? "%.0f" : "%.4g", value);
}

/* ---- summary --------------------------------------------------------------------------------- */

static void write_ratio(const struct table *t, double ours, double theirs, FILE *to) {
    const double ratio = theirs / ours;
    const char *better = t->metric == METRIC_SPEED ? "faster" : "leaner",
               *worse = t->metric == METRIC_SPEED ? "slower" : "more";
    if (ratio >= 1.005)
        fprintf(to, "<td class=\"good\">%.2f× %s</td>", ratio, better);
    else if (ratio > 0.995)
        fputs("<td>equal</td>", to);
    else
        fprintf(to, "<td class=\"bad\">%.2f× %s</td>", 1 / ratio, worse);
}

static void write_summary_row(const struct table *t, FILE *to) {
    const struct row *row = &t->row[t->rows - 1];
    const char *name = "";
    const struct cell *ours = row_ours(t, row), *peer = row_best_peer(t, row, &name);
    fputs("<tr><td class=\"l\">", to);
    write_link(to, t, t->title);
    fputs("</td><td>", to);
    write_escaped(to, t->x_name);
    fprintf(to, " = %lld</td>", (long long)row->x);
    if (ours) {
        fputs("<td>", to);
        write_number(to, ours->value.median);
        fprintf(to, " %s</td>", metric_units[t->metric]);
    } else {
        fputs("<td>–</td>", to);
    }
    if (peer) {
        fputs("<td>", to);
        write_escaped(to, name);
        fputc(' ', to);
        write_number(to, peer->value.median);
        fprintf(to, " %s</td>", metric_units[t->metric]);
    } else {
        fputs("<td>–</td>", to);
    }
    if (ours && peer && ours->value.median > 0)
        write_ratio(t, ours->value.median, peer->value.median, to);
    else
        fputs("<td>–</td>", to);
    if (ours && ours->share > 0)
        fprintf(to, "<td>%.0f %%</td></tr>\n", 100 * ours->share);
    else
        fputs("<td>–</td></tr>\n", to);
}

static void write_summary(const struct report *r, FILE *to) {
    fputs("<section aria-labelledby=\"summary\"><h2 id=\"summary\">Summary</h2>\n<div class=\"scroll\" tabindex=\"0\" "
          "role=\"region\" aria-label=\"Summary table\"><table><caption>Each table at its largest row: Rafter against "
          "the best "
          "of the others, and its share of the floor (the time that the bytes or flops take at the rates measured in "
          "the same "
          "run).</caption><thead><tr><th scope=\"col\">table</th><th scope=\"col\">row</th><th "
          "scope=\"col\">Rafter</th><th "
          "scope=\"col\">best peer</th><th scope=\"col\">Rafter is</th><th scope=\"col\">of the "
          "floor</th></tr></thead><tbody>\n",
          to);
    for (int i = 0; i < r->tables; i++)
        if (r->table[i].rows > 0 && !r->table[i].map[0])
            write_summary_row(&r->table[i], to);
    fputs("</tbody></table></div></section>\n", to);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void write_heading(const struct table *t, FILE *to) {
    fputs("<thead><tr><th scope=\"col\">", to);
    write_escaped(to, t->x_name);
    fputs("</th>", to);
    for (int k = 0; k < t->columns; k++) {
        fputs("<th scope=\"col\">", to);
        write_escaped(to, t->column[k]);
        fputs(t->early[k] ? "*</th>" : "</th>", to);
        for (int e = 0; e < EXTRAS; e++)
            if (t->extras >> e & 1)
                fprintf(to, "<th scope=\"col\">%s</th>", extra_names[e]);
    }
    fputs(t->metric == METRIC_MEMORY ? "<th scope=\"col\">gradients</th></tr></thead>" : "</tr></thead>", to);
}

static void write_cell(const struct cell *c, double best, FILE *to) {
    if (c->state != CELL_MEASURED) {
        fputs(c->state == CELL_WRONG ? "<td class=\"bad\">wrong</td>" : "<td>–</td>", to);
        return;
    }
    fputs(c->value.median <= best ? "<td class=\"best\">" : "<td>", to);
    write_number(to, c->value.median);
    fputs("</td>", to);
}

static void write_notes(const struct table *t, FILE *to) {
    if (t->notes > 0)
        fputs("<ul class=\"notes\">\n", to);
    for (int i = 0; i < t->notes; i++) {
        fputs("<li>", to);
        write_escaped(to, t->note[i]);
        fputs("</li>\n", to);
    }
    if (t->notes > 0)
        fputs("</ul>\n", to);
}

static void write_table(const struct table *t, FILE *to) {
    fputs("<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"", to);
    write_escaped(to, t->title);
    fprintf(to, "\"><table><caption>%s</caption>",
            t->metric == METRIC_SPEED ? "Milliseconds, median of the repeats"
                                      : "MiB at the peak of the call, beyond its inputs");
    write_heading(t, to);
    fputs("<tbody>\n", to);
    for (int i = 0; i < t->rows; i++) {
        const struct row *row = &t->row[i];
        double best = -1;
        for (int k = 0; k < t->columns; k++)
            if (row->cell[k].state == CELL_MEASURED && (best < 0 || row->cell[k].value.median < best))
                best = row->cell[k].value.median;
        fprintf(to, "<tr><th scope=\"row\">%lld</th>", (long long)row->x);
        for (int k = 0; k < t->columns; k++) {
            write_cell(&row->cell[k], best, to);
            for (int e = 0; e < EXTRAS; e++)
                if (t->extras >> e & 1)
                    fprintf(to, "<td class=\"x\">%s</td>", extra_text(&row->cell[k], (enum extra)e));
        }
        if (t->metric == METRIC_MEMORY) {
            fputs("<td class=\"x\">", to);
            write_number(to, row->gradient_bytes / (1 << 20));
            fputs("</td>", to);
        }
        fputs("</tr>\n", to);
    }
    fputs("</tbody></table></div>\n", to);
    write_notes(t, to);
}

/* ---- the machine ----------------------------------------------------------------------------- */

static void write_fact(FILE *to, const char *name, const char *value) {
    if (!value[0])
        return;
    fprintf(to, "<dt>%s</dt><dd>", name);
    write_escaped(to, value);
    fputs("</dd>\n", to);
}

static void write_gpu_state(FILE *to, const char *name, struct gpu_state s) {
    if (s.clock_mhz > 0)
        fprintf(to, "<dt>%s</dt><dd>%d MHz, memory %d MHz, %d °C, %d W</dd>\n", name, s.clock_mhz, s.memory_clock_mhz,
                s.temperature, s.watts);
}

static void write_machine(const struct report *r, FILE *to) {
    fputs("<section aria-labelledby=\"machine\"><h2 id=\"machine\">Machine and command</h2>\n<dl>\n", to);
    write_fact(to, "CPU", r->cpu);
    fprintf(to, "<dt>threads</dt><dd>%d</dd>\n", r->threads);
    write_fact(to, "GPU", r->gpu);
    write_gpu_state(to, "GPU before", r->before);
    write_gpu_state(to, "GPU after", r->after);
    write_fact(to, "Rafter", r->version);
    write_fact(to, "PyTorch", r->torch);
    if (r->copy > 0)
        fprintf(to, "<dt>copy rate</dt><dd>%.1f GB/s</dd>\n", r->copy / 1e9);
    if (r->matrix > 0)
        fprintf(to, "<dt>matrix rate</dt><dd>%.1f GFLOP/s</dd>\n", r->matrix / 1e9);
    fprintf(to, "<dt>the run took</dt><dd>%.0f s%s</dd>\n</dl>\n<pre tabindex=\"0\" aria-label=\"command\"><code>",
            r->seconds, r->interrupted ? ", and was interrupted" : "");
    for (char **word = r->command; word && *word; word++) {
        fputs(word == r->command ? "" : " ", to);
        write_escaped(to, *word);
    }
    fputs("</code></pre></section>\n", to);
}

static int tables_of_maps(const struct report *r) {
    int count = 0;
    for (int i = 0; i < r->tables; i++)
        count += r->table[i].map[0] != '\0';
    return count;
}

void html_write(const struct report *r, FILE *to) {
    const char *machine = r->gpu[0] ? r->gpu : r->cpu;
    fputs("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
          "content=\"width=device-width,initial-scale=1\"><link rel=\"icon\" href=\"data:,\"><title>Rafter on ",
          to);
    write_escaped(to, machine);
    fprintf(to, "</title><style>\n%s</style></head>\n<body><header><h1>Rafter on ", style);
    write_escaped(to, machine);
    fputs("</h1><p>", to);
    write_escaped(to, r->date);
    fputs(", Rafter ", to);
    write_escaped(to, r->version);
    fputs(". Every column of a table was measured in the same run, in turn, on the same data; every "
          "result was compared with an fp64 oracle first, but for the map's larger cells. A dash: it did not run, and "
          "the reason is below the table. A "
          "star: its forward computes the gradient too, so compare fwd+bwd. Bold: the best of the "
          "row.</p></header>\n<main>\n",
          to);
    if (r->tables > tables_of_maps(r))
        write_summary(r, to);
    heat_write_worst(r, to);
    for (int i = 0; i < r->tables; i++) {
        const struct table *t = &r->table[i];
        fputs("<section aria-labelledby=\"", to);
        write_escaped(to, t->title);
        fputs("\"><h2 id=\"", to);
        write_escaped(to, t->title);
        fputs("\">", to);
        write_escaped(to, t->title);
        fputs("</h2>\n", to);
        if (t->map[0]) {
            heat_write(r, t, to);
            write_notes(t, to);
        } else {
            plot_write(t, to);
            if (t->rows > 0)
                write_table(t, to);
        }
        fputs("</section>\n", to);
    }
    write_machine(r, to);
    fprintf(to, "</main>\n<div id=\"tip\" role=\"status\" hidden></div>\n<script>\n%s</script></body></html>\n",
            script);
}

int verb_page(int argc, char **argv) {
    return report_print(argc, argv, "page wants one report: rafter page REPORT.json > REPORT.html", html_write);
}

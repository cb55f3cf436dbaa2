/* SPDX-License-Identifier: Apache-2.0 */
#include "page.h"

#include <string.h>

#include "names.h"

static const char style[] =
    ":root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#57606a;--line:#d0d7de;--card:#f6f8fa;--good:#116329;"
    "--bad:#a40e26;--link:#0b57b0;--warn:#fff3cd}\n"
    "@media (prefers-color-scheme:dark){:root{--bg:#0f1318;--fg:#e6edf3;--soft:#9da7b1;--line:#39414a;--card:#171c22;"
    "--good:#6fdd8b;--bad:#ff9a9a;--link:#79b8ff;--warn:#3b3000}}\n"
    "*{box-sizing:border-box}html{scroll-padding-top:3.5rem}\n"
    "body{margin:0 auto;max-width:64rem;padding:1rem;background:var(--bg);color:var(--fg);font:16px/1.5 "
    "system-ui,sans-serif}\n"
    "h1{font-size:1.6rem;line-height:1.2}h2{font-size:1.2rem;overflow-wrap:anywhere;margin:2.5rem 0 .25rem;"
    "border-top:1px solid var(--line);padding-top:1rem}a{color:var(--link)}p,li{max-width:46rem}\n"
    ".slug{margin:0 0 .5rem;font-size:.8rem;color:var(--soft);overflow-wrap:anywhere}\n"
    ".warn{background:var(--warn);border-left:4px solid var(--bad);padding:.5rem .75rem}\n"
    ".filter{position:sticky;top:0;z-index:3;display:flex;flex-wrap:wrap;gap:.35rem .75rem;align-items:center;"
    "background:var(--bg);border-bottom:1px solid var(--line);padding:.4rem 0;font-size:.9rem}\n"
    ".filter select{font:inherit;max-width:11rem;padding:.2rem}.filter "
    "label{display:flex;gap:.3rem;align-items:center}\n"
    "nav ul{margin:.25rem 0 .75rem;padding-left:1.2rem}nav li{padding:.1rem 0}nav "
    "summary,details>summary{cursor:pointer;"
    "padding:.25rem 0}\n"
    ".scroll{overflow:auto;max-height:85vh;border:1px solid var(--line);border-radius:.25rem}"
    ".scroll::-webkit-scrollbar{height:10px;width:10px}.scroll::-webkit-scrollbar-thumb{background:var(--soft);"
    "border-radius:5px}\n"
    ".scroll.cut{box-shadow:inset -14px 0 10px -10px var(--soft)}.hint{display:none;font-size:.85rem;color:var(--soft);"
    "margin:.25rem 0}.hint.cut{display:block}\n"
    "table{border-collapse:separate;border-spacing:0;font-size:.875rem;font-variant-numeric:tabular-nums}"
    "caption{text-align:left;color:var(--soft);padding:.35rem .6rem}caption span{position:sticky;left:.6rem;"
    "display:inline-block;max-width:min(58rem,calc(100vw - 3.2rem))}th,td{padding:.3rem .6rem;text-align:right;"
    "vertical-align:top;border-bottom:1px solid var(--line);white-space:nowrap}"
    "thead th{position:sticky;top:0;z-index:2;background:var(--card)}th:first-child,td.l{text-align:left}"
    "tbody th,tbody td.l{position:sticky;left:0;z-index:1;background:var(--bg)}thead th:first-child{left:0;z-index:3}"
    "td.l{white-space:normal;overflow-wrap:anywhere;min-width:17rem}\n"
    "td.best{font-weight:700}td small,th small{display:block;font-weight:400;color:var(--soft);font-size:.78rem}"
    ".good{color:var(--good)}.bad{color:var(--bad)}.notes{font-size:.875rem;color:var(--soft)}\n"
    "figure{margin:1rem 0}figcaption{font-size:.875rem;color:var(--soft);max-width:46rem}"
    "svg{width:100%;max-width:46rem;height:auto;display:block;touch-action:pan-y}"
    "svg text{font-size:12px;fill:var(--fg)}.own{font-weight:700}.grid{stroke:var(--line);stroke-width:1}"
    ".floor{stroke:var(--fg);stroke-width:1.5;stroke-dasharray:5 4}"
    "polyline{fill:none;stroke:var(--c);stroke-width:1.5}polyline.ours{stroke-width:3}.band{fill:var(--c);opacity:.18}"
    ".lead{fill:none;stroke:var(--c);stroke-width:2}circle.p{fill:var(--c);stroke:var(--bg);stroke-width:1}"
    "circle.on{stroke:var(--fg);stroke-width:2.5}.pair{display:flex;flex-wrap:wrap;gap:1rem}.pair figure{flex:1 1 "
    "22rem;"
    "min-width:0}\n"
    "#tip{position:fixed;z-index:9;pointer-events:none;background:var(--fg);color:var(--bg);padding:.25rem .5rem;"
    "border-radius:.25rem;font-size:.875rem;max-width:90vw}#tip[hidden]{display:none}"
    "pre{overflow-x:auto;background:var(--card);padding:.75rem}\n"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1rem}dt{color:var(--soft)}"
    "dd{margin:0;overflow-wrap:anywhere}\n"
    ".c0{--c:#0b57b0}.c1{--c:#b35900}.c2{--c:#1a7f37}.c3{--c:#8250df}.c4{--c:#bf3989}.c5{--c:#6e7781}.c6{--c:#0e7c86}"
    ".c7{--c:#a40e26}.c8{--c:#6b5900}.c9{--c:#5a32a3}\n"
    "@media (prefers-color-scheme:dark){.c0{--c:#58a6ff}.c1{--c:#ffa657}.c2{--c:#56d364}.c3{--c:#bc8cff}"
    ".c4{--c:#ff7eb6}.c5{--c:#b1bac4}.c6{--c:#56d4dd}.c7{--c:#ff7b72}.c8{--c:#e3b341}.c9{--c:#d2a8ff}}\n"
    ".tile text{fill:#111}.h0{fill:#7ed69a}.h1{fill:#cfe07a}.h2{fill:#f4cf62}.h3{fill:#f4a261}.h4{fill:#f28b82}\n"
    "@media (max-width:40rem){body{padding:.75rem;font-size:15px}svg text{font-size:17px}th,td{padding:.3rem .45rem}"
    "td.l{min-width:8.5rem;max-width:10rem}dl{display:block}dd{margin:0 0 .5rem}html{scroll-padding-top:.5rem}"
    ".filter{position:static}.filter select{max-width:8.5rem}}\n"
    "@media print{:root{--bg:#fff;--fg:#000;--soft:#333;--line:#999;--card:#eee;--warn:#fff}body{max-width:none;"
    "font-size:10pt}section{break-inside:avoid}.scroll{overflow:visible;max-height:none}table{font-size:7pt}"
    "th,td{padding:.1rem .25rem}#tip,.filter,.hint{display:none}}\n";

static const char script[] =
    /* The value of the point nearest to the pointer. */
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
    "addEventListener('scroll',away,{passive:true});\n"
    /* A table that goes on beyond its box says so. */
    "function cut(box){const more=box.scrollWidth-box.clientWidth-box.scrollLeft>2;\n"
    "  "
    "box.classList.toggle('cut',more);box.previousElementSibling.classList.toggle('cut',box.scrollWidth>box."
    "clientWidth+2)}"
    "\n"
    "const boxes=[...document.querySelectorAll('.scroll')];\n"
    "for(const box of boxes)box.addEventListener('scroll',()=>cut(box),{passive:true});\n"
    "function cutAll(){boxes.forEach(cut)}\n"
    "addEventListener('resize',cutAll);addEventListener('toggle',cutAll,true);cutAll();\n"
    /* The filter hides sections, rows of the summary and entries of the contents. */
    "const selects=[...document.querySelectorAll('.filter select')],count=document.getElementById('shown');\n"
    "function filter(){let shown=0;\n"
    "  for(const e of document.querySelectorAll('[data-op]')){\n"
    "    e.hidden=selects.some(s=>s.value&&e.getAttribute('data-'+s.name)!==s.value);\n"
    "    shown+=e.tagName==='SECTION'&&!e.hidden}\n"
    "  for(const d of document.querySelectorAll('nav details'))d.hidden=!d.querySelector('li:not([hidden])');\n"
    "  count.textContent=shown===1?'1 table':shown+' tables';cutAll()}\n"
    "selects.forEach(s=>s.addEventListener('change',filter));if(count)filter();\n";

/* ---- strings --------------------------------------------------------------------------------- */

void write_escaped(FILE *to, const char *text) {
    for (; *text; text++) {
        const char *entity = *text == '&'    ? "&amp;"
                             : *text == '<'  ? "&lt;"
                             : *text == '>'  ? "&gt;"
                             : *text == '"'  ? "&quot;"
                             : *text == '\'' ? "&#39;"
                                             : NULL;
        if (entity)
            fputs(entity, to);
        else
            fputc(*text, to);
    }
}

void write_number(FILE *to, double value) {
    fprintf(to, value >= 1000 ? "%.0f" : "%.4g", value);
}

void write_link(FILE *to, const struct table *t, const char *text) {
    fputs("<a href=\"#", to);
    write_escaped(to, t->title);
    fputs("\">", to);
    write_escaped(to, text);
    fputs("</a>", to);
}

/* ---- the page -------------------------------------------------------------------------------- */

void page_begin(FILE *to, const char *title) {
    fputs("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
          "content=\"width=device-width,initial-scale=1\"><link rel=\"icon\" href=\"data:,\"><title>",
          to);
    write_escaped(to, title);
    fprintf(to, "</title><style>\n%s</style></head>\n<body><header><h1>", style);
    write_escaped(to, title);
    fputs("</h1>\n", to);
}

void page_end(FILE *to) {
    fprintf(to, "</main>\n<div id=\"tip\" role=\"status\" hidden></div>\n<script>\n%s</script></body></html>\n",
            script);
}

void table_begin(FILE *to, const char *label) {
    fputs("<p class=\"hint\">Scroll the table sideways for all columns →</p>\n<div class=\"scroll\" tabindex=\"0\" "
          "role=\"region\" aria-label=\"",
          to);
    write_escaped(to, label);
    fputs("\"><table>", to);
}

void table_end(FILE *to) {
    fputs("</tbody></table></div>\n", to);
}

/* ---- sections, contents and filter ----------------------------------------------------------- */

/* What the filter compares. */
static void write_keys(FILE *to, const struct table *t, const struct table_name *name) {
    fputs(" data-op=\"", to);
    write_escaped(to, name->op);
    fprintf(to, "\" data-mode=\"%s\" data-metric=\"%s\"", name->mode, metric_names[t->metric]);
}

void section_begin(FILE *to, const struct table *t) {
    const struct table_name name = table_name(t);
    fputs("<section", to);
    write_keys(to, t, &name);
    fputs(" aria-labelledby=\"", to);
    write_escaped(to, t->title);
    fputs("\"><h2 id=\"", to);
    write_escaped(to, t->title);
    fputs("\">", to);
    write_escaped(to, name.text);
    fputs(t->metric == METRIC_MEMORY ? ": memory</h2>\n<p class=\"slug\">" : "</h2>\n<p class=\"slug\">", to);
    write_escaped(to, t->title);
    fputs("</p>\n", to);
}

void section_end(FILE *to) {
    fputs("</section>\n", to);
}

/* The first table with the same op, direction or metric writes the choice. */
static bool is_first(const struct report *r, int index, int key) {
    const struct table_name name = table_name(&r->table[index]);
    for (int i = 0; i < index; i++) {
        const struct table_name before = table_name(&r->table[i]);
        if (key == 0   ? strcmp(before.op, name.op) == 0
            : key == 1 ? strcmp(before.mode, name.mode) == 0
                       : r->table[i].metric == r->table[index].metric)
            return false;
    }
    return true;
}

static void write_filter(const struct report *r, FILE *to) {
    static const char *const keys[] = {"op", "mode", "metric"}, *const labels[] = {"Op", "Direction", "Measure"};
    fputs("<form class=\"filter\" aria-label=\"Filter\" onsubmit=\"return false\">", to);
    for (int key = 0; key < 3; key++) {
        fprintf(to, "<label>%s <select name=\"%s\"><option value=\"\">all</option>", labels[key], keys[key]);
        for (int i = 0; i < r->tables; i++) {
            const struct table_name name = table_name(&r->table[i]);
            if (!is_first(r, i, key))
                continue;
            fputs("<option>", to);
            write_escaped(to, key == 0 ? name.op : key == 1 ? name.mode : metric_names[r->table[i].metric]);
            fputs("</option>", to);
        }
        fputs("</select></label>", to);
    }
    fputs("<output id=\"shown\"></output></form>\n", to);
}

void contents_write(const struct report *r, FILE *to) {
    fputs(
        "<nav aria-labelledby=\"contents\"><h2 id=\"contents\">Contents</h2>\n<p><a href=\"#columns\">What the columns "
        "are</a> · <a href=\"#machine\">Machine and command</a></p>\n",
        to);
    for (int i = 0; i < r->tables; i++) {
        if (!is_first(r, i, 0))
            continue;
        const struct table_name group = table_name(&r->table[i]);
        fputs("<details><summary>", to);
        write_escaped(to, group.op[0] ? group.op : "Others");
        fputs("</summary><ul>\n", to);
        for (int k = i; k < r->tables; k++) {
            const struct table *const t = &r->table[k];
            struct table_name name = table_name(t);
            if (strcmp(name.op, group.op) != 0)
                continue;
            fputs("<li", to);
            write_keys(to, t, &name);
            fputs(">", to);
            write_link(to, t, name.text);
            fputs(t->metric == METRIC_MEMORY ? ": memory</li>\n" : "</li>\n", to);
        }
        fputs("</ul></details>\n", to);
    }
    fputs("</nav>\n", to);
    write_filter(r, to);
}

/* ---- trust ----------------------------------------------------------------------------------- */

void unrest_write(const struct report *r, const char *which, FILE *to) {
    char text[256];
    for (int i = 0; report_unrest(r, i, text, sizeof text); i++) {
        fprintf(to, "<p class=\"warn\"><strong>%s:</strong> ", which);
        write_escaped(to, text);
        fputs("</p>\n", to);
    }
}

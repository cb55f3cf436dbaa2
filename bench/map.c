/* SPDX-License-Identifier: Apache-2.0 */
/* `rafter bench --preset map`: draws the cells of each op's maps and measures them. */
#include "map.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/sizes.h"
#include "harness/gpu.h"
#include "harness/map.h"
#include "machine.h"
#include "progress.h"
#include "run.h"

enum {
    GPU_CELLS = 400, /* per map: five minutes for all of them */
    CPU_CELLS = 50,
    SAVE_EVERY = 10 /* seconds between writes of the files */
};

/* Memory that all cells share, on the device; and host memory for the cells that are checked. */
struct arena {
    char *memory, *host;
    size_t bytes;
};

static bool on_gpu(const struct run *run) {
    return context_on_gpu(run->context);
}

static int64_t cells_of(const struct run *run) {
    return run->options.cells > 0 ? run->options.cells : on_gpu(run) ? GPU_CELLS : CPU_CELLS;
}

/* ---- one cell -------------------------------------------------------------------------------- */

static struct map_cell make_cell(const struct run *run, problem *p, const struct op_cases *op,
                                 const struct map_kind *kind, int64_t index) {
    const struct map_cell cell = map_draw(op, kind, run->options.seed, index, !on_gpu(run));
    *p = (problem){.op = op};
    kind->make(p, &cell);
    return cell;
}

static struct map_place place_of(const problem *p, const struct map_kind *kind, const struct map_cell *cell,
                                 enum problem_mode mode) {
    struct map_place place = {.length = cell->length};
    map_layout_text(cell, place.layout, sizeof place.layout);
    snprintf(place.option, sizeof place.option, "%s", kind->option[cell->option]);
    snprintf(place.gradient, sizeof place.gradient, "%s", mode == PROBLEM_FORWARD ? "none" : map_gradient_text(p));
    snprintf(place.dtype, sizeof place.dtype, "%s", problem_dtype_name(cell->dtype));
    snprintf(place.label, sizeof place.label, "%s%s%s%s", p->label,
             cell->input == PROBLEM_UNALIGNED ? ", at an odd offset"
             : cell->input == PROBLEM_PADDED  ? ", padded rows"
                                              : "",
             strcmp(place.gradient, "none") == 0 ? "" : ", gradient ",
             strcmp(place.gradient, "none") == 0 ? "" : place.gradient);
    return place;
}

/* The table of a map in a mode; adds it if there is none. NULL: not requested. */
static struct table *find_table(struct run *run, const struct op_cases *op, const struct map_kind *kind,
                                enum problem_mode mode) {
    char title[sizeof((struct table *)0)->title];
    snprintf(title, sizeof title, "%s-speed-%s-map%s%s-%s-seed%llu", op->prefix, problem_mode_names[mode],
             kind->name[0] ? "_" : "", kind->name, on_gpu(run) ? "cuda" : "cpu", (unsigned long long)run->options.seed);
    if (!(kind->modes & run->options.modes & 1u << mode) || (run->options.table && !strstr(title, run->options.table)))
        return NULL;
    struct table *t = report_find_table(&run->report, title);
    if (t)
        return t;
    t = report_add_table(&run->report);
    memcpy(t->title, title, sizeof title);
    snprintf(t->x_name, sizeof t->x_name, "cell");
    snprintf(t->map, sizeof t->map, "%s", kind->length_name);
    t->metric = METRIC_SPEED;
    t->extras = 1u << EXTRA_SHARE | (unsigned)run->options.host << EXTRA_HOST;
    t->ours[table_column(t, "rafter")] = true;
    t->printed = true; /* the worst cells are printed instead */
    return t;
}

/* Copies the tensors of a placed problem to the host, for the oracle. False: the device failed. */
static bool copy_to_host(problem *p, const struct run *run, const struct arena *arena) {
    size_t used = 0;
    for (int i = 0; i < p->tensors && on_gpu(run); i++) {
        p->tensor[i].memory = arena->host + used;
        used += (size_t)round_up((int64_t)p->tensor[i].memory_bytes, 64);
    }
    return !on_gpu(run) || problem_from_device(p, run->context);
}

/* Opens the columns, one call each. If `checked`, results of columns that work on the problem's own
 * tensors are compared with the oracle's; the Python worker's columns have numbers of their own. */
static void open_columns(struct run *run, problem *p, struct column columns[], int count, struct row_notes *notes,
                         bool checked) {
    for (int i = 0; i < count && !run_interrupted; i++) {
        struct column *c = &columns[i];
        struct session *s = &c->session;
        double seconds;
        const bool exact = s->provider->exact;
        if (!exact && !s->provider->anywhere) {
            table_add_note_about(notes->table[METRIC_SPEED], c->name, "it does not run on the map's layouts");
            continue;
        }
        if (checked && exact && on_gpu(run))
            problem_poison_device(p, run->context, s->mode);
        else if (checked && exact)
            problem_poison(p, s->mode);
        if (!column_open(c, notes, &seconds) || !checked || !exact)
            continue;
        struct problem_verdict verdict = {.good = false, .sentence = "its results could not be copied"};
        if (session_collect(s))
            verdict = problem_compare(&s->problem, s->mode);
        c->max_error = verdict.max_error;
        c->state = verdict.good ? CELL_MEASURED : CELL_WRONG;
        c->live = verdict.good;
        if (!verdict.good)
            table_add_note(notes->table[METRIC_SPEED], "%s at cell %lld: wrong: %s", c->name, (long long)notes->x,
                           verdict.sentence);
    }
}

static void run_mode(struct run *run, problem *p, const struct arena *arena, enum problem_mode mode,
                     struct row_notes *notes, struct row row) {
    size_t bytes = 0;
    for (int i = 0; i < p->tensors; i++)
        bytes += p->tensor[i].memory_bytes + 64;
    bool checked = bytes <= MAP_CHECKED;
    if (mode == PROBLEM_BACKWARD && p->op->call(p, run->context, PROBLEM_FORWARD) != RAFTER_OK)
        table_add_note(notes->table[METRIC_SPEED], "rafter at cell %lld: the forward before it failed: %s",
                       (long long)notes->x, rafter_last_error(run->context));
    if (checked) {
        p->sample = max64(1, p->tensor[0].numel / MAP_CHECKED_ELEMENTS);
        checked = copy_to_host(p, run, arena);
    }
    if (checked)
        problem_solve(p, mode);
    struct column columns[REPORT_COLUMNS];
    const int count = columns_list(run, p, mode, columns); /* after problem_solve: sessions copy its answers */
    open_columns(run, p, columns, count, notes, checked);
    columns_time(run, columns, count, notes);
    row.bytes = map_bytes(p, mode);
    if (!run_interrupted) {
        columns_report(columns, count, notes->table[METRIC_SPEED], &row,
                       roofline_memory_seconds(&run->roofline, p, mode, row.bytes));
        *table_add_row(notes->table[METRIC_SPEED], row.x) = row;
    }
    columns_close(columns, count);
}

static void run_cell(struct run *run, const struct arena *arena, const struct op_cases *op, const struct map_kind *kind,
                     int64_t index) {
    problem p;
    const struct map_cell cell = make_cell(run, &p, op, kind, index);
    struct row_notes notes = {.x = index + 1};
    bool filled = false;
    for (int mode = 0; mode < PROBLEM_MODES && !run_interrupted; mode++) {
        const struct row row = {.x = index + 1, .place = place_of(&p, kind, &cell, (enum problem_mode)mode)};
        struct table *const t = notes.table[METRIC_SPEED] = find_table(run, op, kind, (enum problem_mode)mode);
        if (!t || table_find_row(t, row.x)) /* not requested, or there since before --resume */
            continue;
        const size_t bytes = problem_place(&p, NULL, context_device(run->context));
        if (bytes > arena->bytes) {
            table_add_note(t, "cell %lld (%s): left out, it takes %zu MiB and %zu MiB could be allocated",
                           (long long)row.x, row.place.label, bytes >> 20, arena->bytes >> 20);
            *table_add_row(t, row.x) = row;
            continue;
        }
        problem_place(&p, arena->memory, context_device(run->context));
        filled = filled || problem_generate(&p, run->context, run->options.seed + (uint64_t)index);
        if (filled)
            run_mode(run, &p, arena, (enum problem_mode)mode, &notes, row);
        else
            table_add_note(t, "cell %lld (%s): left out, the device could not fill it", (long long)row.x,
                           row.place.label);
    }
    problem_free(&p);
    peers_forget_row();
}

/* ---- all cells ------------------------------------------------------------------------------- */

/* Allocates what the largest cell takes, or, if that fails, as much as there is. */
static bool allocate(struct arena *arena, const struct run *run) {
    size_t most = 0;
    for (int i = 0; run->options.op[i]; i++)
        for (int k = 0; k < run->options.op[i]->maps; k++)
            for (int64_t index = 0; index < cells_of(run); index++) {
                problem p;
                make_cell(run, &p, run->options.op[i], &run->options.op[i]->map[k], index);
                const size_t bytes = problem_place(&p, NULL, context_device(run->context));
                most = bytes > most ? bytes : most;
            }
    if (!on_gpu(run)) {
        const size_t free_bytes = machine_free_memory() / 2; /* the Python worker has copies */
        arena->bytes = most < free_bytes ? most : free_bytes;
        arena->memory =
            mmap(NULL, arena->bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return arena->memory != MAP_FAILED;
    }
    arena->host = malloc(MAP_CHECKED);
    for (arena->bytes = most; arena->bytes > MAP_CHECKED; arena->bytes -= arena->bytes / 8)
        if ((arena->memory = gpu_allocate(arena->bytes)))
            break;
    return arena->host && arena->memory;
}

static void release(struct arena *arena, const struct run *run) {
    if (on_gpu(run))
        gpu_release(arena->memory);
    else if (arena->memory != MAP_FAILED)
        munmap(arena->memory, arena->bytes + 1);
    free(arena->host);
}

static void run_kind(struct run *run, const struct arena *arena, const struct op_cases *op,
                     const struct map_kind *kind) {
    const int64_t cells = cells_of(run);
    for (int64_t i = 0; i < cells && !run_interrupted; i++) {
        progress("map of %s%s%s: cell %lld of %lld", op->op, kind->name[0] ? " " : "", kind->name, (long long)i + 1,
                 (long long)cells);
        run_cell(run, arena, op, kind, i);
        if (clock_seconds() - run->saved > SAVE_EVERY)
            run_save(run);
    }
    progress_clear();
    for (int mode = 0; mode < PROBLEM_MODES; mode++) {
        const struct table *t = find_table(run, op, kind, (enum problem_mode)mode);
        if (t)
            map_print_summary(t, stdout);
    }
    fflush(stdout);
}

void run_map(struct run *run) {
    struct arena arena = {0};
    if (allocate(&arena, run)) {
        for (int i = 0; run->options.op[i]; i++)
            for (int k = 0; k < run->options.op[i]->maps; k++)
                run_kind(run, &arena, run->options.op[i], &run->options.op[i]->map[k]);
        map_print_worst(&run->report, stdout);
    } else {
        fprintf(stderr, "rafter: no memory for the map's tensors\n");
    }
    release(&arena, run);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How linear_cross_entropy is cut on CUDA: rows into groups, classes into slices, and what of it the workspace holds.
 * Decided by shapes, dtypes, wanted results and the budget alone.
 */
#ifndef RAFTER_LCE_CUDA_PLAN_CUH
#define RAFTER_LCE_CUDA_PLAN_CUH

#include "cuda/products.cuh"
#include "ops/linear_cross_entropy/call.h"
#include "ops/linear_cross_entropy/cuda_steps.cuh"

#include <math.h>

#include <type_traits>

namespace {

/* Rows of a matrix that products can take as it lies: neighbours in a row, rows that begin at multiples of 16 bytes. */
struct Lying {
    bool plain;
    int64_t stride; /* of rows, then */
};

int64_t rounded(int64_t n, int64_t multiple) {
    return ceil_div(n, multiple) * multiple;
}

int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

Lying lying(const rafter_view &view) {
    const int last = view.ndim - 1;
    const int64_t wide = 16 / rafter_dtype_bytes(view.dtype), columns = view.shape[last];
    const bool one_row = view.ndim == 2 && view.shape[0] == 1;
    Lying l;
    l.stride = one_row ? rounded(columns, wide) : view.stride[0];
    l.plain = view.ndim == 2 && (view.stride[last] == 1 || columns == 1) && l.stride >= columns &&
              l.stride % wide == 0 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    return l;
}

/* Whether columns need more than the softmax. */
bool needs_full(const struct rafter_loss &loss) {
    return loss.softcap != 0.0f || loss.smoothing != 0.0f || loss.entropy.data || loss.argmax.data;
}

constexpr int64_t MOST_TURNED = 2; /* classes for each element of depth: see turns_exponentials */

struct Plan {
    rafter_dtype dtype;
    int64_t rows, depth, classes;
    bool statistics;         /* to be found, not given by the caller's lse */
    bool dx, dweight, dbias; /* wanted */
    bool fusable, fused;     /* may be, is by fused.cuh, and gradients.cuh */
    bool drops;              /* fused: ignored rows, before anything is multiplied */
    bool fast;
    int64_t group, slice; /* rows, classes of a tile: fast takes all classes at a time; so do statistics, if fused */
    int parts;            /* of a row, for its statistics */
    int64_t first_group;  /* rows of the first group, which may have more than the others */
    int64_t hosted;    /* of its exponentials those of the last `hosted` classes lie in dweight until it is written */
    bool lends;        /* all of a group's exponentials lie in dweight, which is written from its sums, at the end */
    int64_t dx_rows;   /* of the sums of dx that are formed at a time, where they are not direct_dx */
    int clusters;      /* that the GPU has room for: see tiles.cuh */
    int meeting_room;  /* fused: parts of tiles that can meet, see tiles::Meeting */
    int64_t host_rows; /* rows whose dz of all classes dweight could hold; 0: it may not */
    int64_t depth_stride, tile_stride, dz_stride;
    Lying x, weight, dx_lies, dweight_lies;
    bool grows_dx, grows_dweight; /* as fp32 sums of all of it, in the workspace */
    bool adds_dweight;            /* to what the caller's holds */
    size_t product_bytes, bytes;

    bool gradients() const {
        return dx || dweight || dbias;
    }
    /* Whether fast turns exponentials into dz where they lie: that is a pass over them, but spares those over x and dx
     * that exponentials take. (Not where rows of x that are ignored would meet dz in sums of some of the rows.) */
    bool turns_exponentials() const {
        return fast && fused && drops && classes <= MOST_TURNED * depth;
    }
    /* Whether fast keeps these instead of dz. */
    bool exponentials() const {
        return fast && fused && !turns_exponentials();
    }
    /* Whether a block takes a row's logits to dz in one pass. */
    bool turns_rows() const {
        return fast && !fused && statistics && !dbias && classes <= MOST_PART;
    }
    /* Whether x is packed group by group, however it lies: that leaves out what ignored rows hold, which cannot be
     * mended in sums that have been there before. */
    bool packs_groups() const {
        return fast && !fused && (group < rows || adds_dweight);
    }
    bool direct_x() const {
        return x.plain && !packs_groups();
    }
    /* Whether the kept rows' copy of x lies in dx, which has a row for each: when the k-th kept row's dx is written,
     * only copies up to the k-th are lost, and those have been multiplied. */
    bool copies_into_dx() const {
        return fused && drops && x.plain && dx && dx_lies.plain;
    }
    bool copies_x() const {
        return !direct_x() || (fused && drops && !copies_into_dx());
    }
    /* Whether products write the gradient where the caller wants it. */
    bool direct_dx() const {
        return dx_lies.plain && !grows_dx;
    }
    bool direct_dweight() const {
        return dweight_lies.plain && !grows_dweight && !(mends() && adds_dweight);
    }
    /* Whether ignored rows of x may reach the sums of dW. */
    bool mends() const {
        return dweight && direct_x() && !exponentials() && !(fused && drops);
    }
};

struct Buffers {
    Common *common;
    int *order, *classes;   /* fused::Kept's */
    RowStats *tiles;        /* fused: of the group's rows; compact's lie where dz will */
    float *z_label;         /* fused: of every row */
    RowStats *sample;       /* fused.cuh's, of every row */
    char *x_scaled;         /* the group's, by p */
    Gathered<FULL> *stats;  /* of every part of the group's rows (fast), of every row (compact) */
    RowGradient *gradients; /* of every row */
    Labels labels;          /* of every row */
    Totals *of_block;
    float *bias;
    char *x, *weight; /* packed, where the caller's do not do: the group's rows (fast) or all, fused::Kept's copy if
                       * fused; all classes */
    float *z;
    char *dz;            /* compact: of all rows and a slice */
    float *dx, *dweight; /* fp32 sums: of the group and of the slice, or of all if they grow */
    float *dbias;
    char *products; /* cuBLASLt's workspace */
    float *meeting; /* tiles::Meeting's */
    unsigned *counters;
};

size_t lay_out(const Plan &p, char *memory, Buffers *b) {
    const int64_t bytes = rafter_dtype_bytes(p.dtype), groups = ceil_div<int64_t>(p.rows, p.group > 0 ? p.group : 1);
    const bool gradients = p.gradients();
    /* cuBLASLt's workspace must begin at a multiple of 256 bytes, the caller's begins at one of 64. */
    constexpr int64_t ALIGNMENT = 256;
    size_t used = ALIGNMENT - RAFTER_SCRATCH_ALIGNMENT;
    if (memory)
        memory += rounded(reinterpret_cast<intptr_t>(memory), ALIGNMENT) - reinterpret_cast<intptr_t>(memory) - used;
    const auto place = [&](auto **buffer, bool wanted, int64_t size) {
        *buffer = memory && wanted ? reinterpret_cast<std::remove_reference_t<decltype(*buffer)>>(memory + used) : NULL;
        used += wanted ? static_cast<size_t>(rounded(size, ALIGNMENT)) : 0;
    };
    place(&b->common, true, sizeof(Common));
    const bool tiles = p.fused && p.statistics, dz = (p.dx || p.dweight) && (p.fused || !p.fast) && !p.lends;
    const int64_t tile_bytes = tiles ? p.first_group * fused::tiles_across(p.classes) * int64_t(sizeof(RowStats)) : 0;
    const int64_t dz_bytes = !dz       ? 0
                             : !p.fast ? p.rows * p.dz_stride * bytes
                                       : larger(p.first_group * rounded(p.classes - p.hosted, 8),
                                                p.first_group < p.rows ? p.group * p.dz_stride : 0) *
                                             bytes;
    place(&b->order, p.fused, p.rows * int64_t(sizeof(int)));
    place(&b->classes, p.fused, p.rows * int64_t(sizeof(int)));
    place(&b->tiles, tiles && p.fast, tile_bytes);
    place(&b->z_label, p.fused, p.rows * 4);
    place(&b->sample, p.exponentials(), p.rows * int64_t(sizeof(RowStats)));
    place(&b->x_scaled, p.exponentials() && p.dweight, p.first_group * p.depth_stride * bytes);
    place(&b->stats, !p.fused && p.statistics && !p.turns_rows(),
          (p.fast ? p.group : p.rows) * p.parts * int64_t(sizeof(Gathered<FULL>)));
    place(&b->gradients, gradients, p.rows * int64_t(sizeof(RowGradient)));
    const bool labels = p.exponentials() && p.dweight;
    place(&b->labels.of_row, labels, rounded(p.rows, 4) * int64_t(sizeof(int)));
    place(&b->labels.of_class, labels, p.classes * int64_t(sizeof(Labels::Class)));
    place(&b->labels.frequent, labels, Labels::bytes_of_frequent(p.rows));
    place(&b->of_block, true,
          (p.turns_rows() ? p.rows : p.rows / (ROW_THREADS / WARP) + groups + 1) * int64_t(sizeof(Totals)));
    place(&b->bias, true, p.classes * 4);
    place(&b->x, p.copies_x(), (p.packs_groups() ? p.group : p.rows) * p.depth_stride * bytes);
    place(&b->weight, !p.weight.plain, p.classes * p.depth_stride * bytes);
    place(&b->z, !p.fused, p.group * p.tile_stride * 4);
    if (p.fast) {
        place(&b->dz, dz, dz_bytes);
    } else {
        place(&b->dz, tiles || dz, larger(tile_bytes, dz_bytes));
        b->tiles = reinterpret_cast<RowStats *>(b->dz);
    }
    place(&b->dx, p.dx && !p.direct_dx(), p.dx_rows * p.depth_stride * 4);
    place(&b->dweight, p.dweight && !p.direct_dweight(),
          (p.fast || p.grows_dweight ? p.classes : p.slice) * p.depth_stride * 4);
    place(&b->dbias, p.dbias, p.classes * 4);
    place(&b->products, !p.fused && p.product_bytes > 0, static_cast<int64_t>(p.product_bytes));
    place(&b->meeting, p.meeting_room > 0, p.meeting_room * tiles::MEETING_BYTES);
    place(&b->counters, p.fused, tiles::counters_of(p.clusters) * int64_t(sizeof(unsigned)));
    return used;
}

constexpr int64_t MIB = 1 << 20;

/* Where exponentials take at least so much, dweight's own memory holds some of them; but not of fewer classes than
 * make products of a good size. */
constexpr int64_t HOSTING_BYTES = 256 * MIB, LEAST_HOSTED = 8192;
/* Whether products write dweight after dz that may have lain there: not if it is added to, or has gaps. */
bool hosts(const Plan &p) {
    return p.fused && p.dweight && p.direct_dweight() && p.dweight_lies.stride == p.depth && !p.adds_dweight;
}

/* Rows f of a first group of which dweight hosts so much that what is left, of f / (f + host_rows) of the classes,
 * takes no more than a group of g rows does. */
int64_t largest_first_group(int64_t g, int64_t host_rows) {
    const double half = static_cast<double>(g) / 2;
    return static_cast<int64_t>(half + sqrt(half * half + static_cast<double>(g) * static_cast<double>(host_rows)));
}

/* How many of the last classes' exponentials fit into what dweight has for the classes before: when those are to be
 * written, these have been used. */
int64_t hosted_classes(const Plan &p) {
    const int64_t least_before = ceil_div(p.classes * p.first_group, p.first_group + p.host_rows) + 8; /* of padding */
    const int64_t before = rounded(least_before, fused::CLASSES);
    return p.classes - before;
}

/* Compact: how many of the classes from v on make a slice whose dz fits into what dweight has for those behind it. */
int64_t hosted_slice(const Plan &p, int64_t v) {
    return p.host_rows * (p.classes - v) / (p.host_rows + p.rows) / fused::CLASSES * fused::CLASSES;
}

int64_t tiles_of(int64_t rows, int64_t columns) {
    return ceil_div<int64_t>(rows, tiles::CLUSTER * tiles::ROWS) * ceil_div<int64_t>(columns, tiles::COLUMNS);
}

/* Room for parts of tiles, if taking some apart makes one of the products, of the plan's rows and all classes, quicker
 * by 2 %: as many as take twice what cuBLASLt would get. */
int room_to_meet(const Plan &p, int64_t rows) {
    if (!p.fusable)
        return 0;
    const int room = static_cast<int>(2 * static_cast<int64_t>(p.product_bytes) / tiles::MEETING_BYTES);
    const auto gains = [&](int64_t down, int64_t across, int64_t depth) {
        const int tiles = static_cast<int>(tiles_of(down, across)),
                  steps = static_cast<int>(ceil_div<int64_t>(depth, tiles::DEPTH));
        const int64_t whole = tiles::Deal::of(tiles, steps, p.clusters, 0).time;
        return whole - tiles::Deal::of(tiles, steps, p.clusters, room).time > whole / 50;
    };
    const bool any = gains(rows, p.classes, p.depth) || (p.dx && gains(rows, p.depth, p.classes)) ||
                     (p.dweight && gains(p.classes, p.depth, rows));
    return any ? room : 0;
}

/* Whether the product of dweight has so few tiles that most of the GPU is idle if they are not taken apart; or even
 * then. */
bool few_tiles(const Plan &p, int parts) {
    const double flops =
        2.0 * static_cast<double>(p.rows) * static_cast<double>(p.depth) * static_cast<double>(p.classes);
    return p.dweight && flops > 1e10 && 2 * parts * tiles_of(p.classes, p.depth) < p.clusters;
}

/* Rows whose exponentials of all classes, padded as they lie, dweight could hold. */
int64_t lent_rows(const Plan &p, const linear_cross_entropy_call *call) {
    return p.classes * p.depth * rafter_dtype_bytes(call->dweight.dtype) /
           (rounded(p.classes, 8) * rafter_dtype_bytes(p.dtype));
}

/* Fills in what follows from fast, group and slice; takes back what it cannot lend. */
void complete(Plan *p, const linear_cross_entropy_call *call) {
    const int64_t bytes = rafter_dtype_bytes(p->dtype);
    const auto grows = [&](bool wanted, const Lying &lies, const rafter_view &view, bool in_steps) {
        return wanted && in_steps && !(lies.plain && (view.dtype == RAFTER_F32 || call->native));
    };
    /* Exponentials need bf16's range, and what they save must be worth their passes over x and dx; a dz that is given
     * by lse needs none of it. */
    p->fused = p->fusable && (!p->fast || (p->dtype == RAFTER_BF16 && p->statistics &&
                                           !(few_tiles(*p, 1) && p->classes > MOST_TURNED * p->depth)));
    if (p->fast)
        p->slice = p->classes;
    p->parts = static_cast<int>(p->fast && p->classes > 0 ? ceil_div<int64_t>(p->classes, MOST_PART) : 1);
    p->depth_stride = rounded(p->depth, 8);
    p->tile_stride = rounded(p->slice, 8);
    p->dz_stride = p->fast && !p->fused ? p->tile_stride * 4 / bytes : p->tile_stride;
    p->dx_rows = p->fast ? p->group : p->rows;
    const bool dx_in_steps = !p->fast && p->slice < p->classes;
    p->grows_dx = p->fused ? p->dx && dx_in_steps : grows(p->dx, p->dx_lies, call->dx, dx_in_steps);
    p->grows_dweight = grows(p->dweight, p->dweight_lies, call->dweight, p->fast && p->group < p->rows);
    p->lends = p->lends && p->exponentials() && p->grows_dweight && p->dweight_lies.plain &&
               p->dweight_lies.stride == p->depth && !p->adds_dweight && p->group <= lent_rows(*p, call);
    p->first_group = p->group;
    p->hosted = 0;
    p->host_rows = hosts(*p) ? p->depth * rafter_dtype_bytes(call->dweight.dtype) / bytes : 0;
    if (p->exponentials() && p->host_rows > 0 && p->group * p->classes * bytes >= HOSTING_BYTES) {
        Plan hosting = *p;
        const int64_t first = largest_first_group(p->group, p->host_rows) / 256 * 256;
        hosting.first_group = first >= p->rows || p->group >= p->rows ? p->rows : larger(first, p->group);
        hosting.hosted = hosted_classes(hosting);
        if (hosting.hosted >= LEAST_HOSTED)
            *p = hosting;
    }
    p->meeting_room = p->fused ? room_to_meet(*p, p->fast ? p->first_group : p->rows) : 0;
    Buffers unused;
    p->bytes = lay_out(*p, NULL, &unused);
}

/* The sizes that fast and compact like, and the least they go down to. */
constexpr int64_t FAST_TILE_BYTES = 512 * MIB, LEAST_GROUP = 32, COMPACT_DZ_BYTES = 64 * MIB,
                  COMPACT_TILE_BYTES = 32 * MIB, FUSED_DZ_BYTES = 96 * MIB, FUSED_BYTES = 122 * MIB,
                  FUSED_TILE_BYTES = 96 * MIB, FORWARD_TILE_BYTES = 64 * MIB, LEAST_SLICE = 128;
/* With fewer rows in a group the products of fast run slower than compact's fourth one costs. */
constexpr int64_t FAST_ROWS = 512;

/* A part of `total` that is at most `most`, all parts being about alike and multiples of `unit`. */
int64_t even_part(int64_t total, int64_t most, int64_t unit) {
    if (total <= most)
        return total > 0 ? total : 1;
    const int64_t parts = ceil_div<int64_t>(total, most > unit ? most / unit * unit : unit);
    return rounded(ceil_div<int64_t>(total, parts), unit);
}

int64_t unit_of(int64_t rows) {
    return rows >= 1024 ? 256 : rows >= 128 ? 128 : LEAST_GROUP;
}

/* Fewer and fewer rows in a group until the plan fits. False: none does, and the plan is the smallest. */
bool fit_fast(Plan *p, const linear_cross_entropy_call *call, size_t limit) {
    p->fast = true;
    p->group = p->rows > 0 ? p->rows : 1;
    complete(p, call);
    for (int64_t most = p->group; p->bytes > limit && most > LEAST_GROUP; complete(p, call)) {
        most = most / 8 * 7 > LEAST_GROUP ? most / 8 * 7 : LEAST_GROUP;
        p->lends = true;
        p->group = even_part(p->rows, most, unit_of(most));
    }
    return p->bytes <= limit;
}

bool fit_compact(Plan *p, const linear_cross_entropy_call *call, size_t limit) {
    const int64_t bytes = rafter_dtype_bytes(p->dtype), rows = p->rows > 0 ? p->rows : 1;
    const bool gradients = p->gradients();
    p->fast = false;
    int64_t slice = MOST_PART;
    if (gradients) {
        const int64_t parts = room_to_meet(*p, rows) * tiles::MEETING_BYTES;
        const int64_t room = !p->fusable                            ? COMPACT_DZ_BYTES
                             : parts > FUSED_BYTES - FUSED_DZ_BYTES ? FUSED_BYTES - parts
                                                                    : FUSED_DZ_BYTES;
        const int64_t most = room / (rows * bytes) / 256 * 256;
        slice = most > slice ? slice : larger(most, 512);
    }
    const auto half = [](int64_t n) { return larger(n / 2 / tiles::DEPTH * tiles::DEPTH, LEAST_SLICE); };
    int64_t tile = !gradients ? FORWARD_TILE_BYTES : p->fusable ? FUSED_TILE_BYTES : COMPACT_TILE_BYTES;
    for (;;) {
        p->slice = slice < p->classes ? slice : p->classes > 0 ? p->classes : 1;
        const int64_t row_bytes =
            p->fusable ? fused::tiles_across(p->classes) * int64_t(sizeof(RowStats)) : p->slice * 4;
        const int64_t most = tile / (row_bytes > 0 ? row_bytes : 1);
        p->group = even_part(rows, most > LEAST_GROUP ? most : LEAST_GROUP, unit_of(most));
        complete(p, call);
        if (p->bytes <= limit)
            return true;
        if (p->group > LEAST_GROUP && tile > row_bytes * LEAST_GROUP)
            tile /= 2;
        else if (slice > LEAST_SLICE)
            slice = half(slice < p->classes ? slice : p->classes);
        else
            return false;
    }
}

/* Whether `call` may be done this way. */
bool may_be_fast(const Plan &p, const linear_cross_entropy_call *call) {
    return p.gradients() && call->mode != RAFTER_LCE_COMPACT && (call->mode == RAFTER_LCE_FAST || p.statistics);
}
bool may_be_compact(const Plan &p, const linear_cross_entropy_call *call) {
    return call->mode != RAFTER_LCE_FAST || !p.gradients();
}

/* Without a budget: groups whose logits take FAST_TILE_BYTES; or one group of all rows, after which nothing has to be
 * kept in fp32, if that takes no more; or groups of as many rows as dweight can lend its memory to, if that is more. */
Plan comfortable_fast(Plan p, const linear_cross_entropy_call *call) {
    p.fast = true;
    complete(&p, call);
    const int64_t most = FAST_TILE_BYTES / ((p.fused ? 2 : 4) * (p.classes > 0 ? p.classes : 1));
    p.group = even_part(p.rows, most > FAST_ROWS ? most : FAST_ROWS, 256);
    complete(&p, call);
    Plan one = p;
    one.group = p.rows > 0 ? p.rows : 1;
    complete(&one, call);
    if (one.bytes <= p.bytes)
        return one;
    if (!p.exponentials() || !p.grows_dweight)
        return p;
    Plan lent = p;
    lent.lends = true;
    lent.group = even_part(p.rows, lent_rows(p, call), 256);
    complete(&lent, call);
    return lent.lends && lent.group >= p.group && lent.bytes <= p.bytes ? lent : p;
}

/* With p->product_bytes for cuBLASLt. False: no plan fits the budget, and the plan is the smallest. */
bool choose(Plan *p, const linear_cross_entropy_call *call, size_t budget) {
    Plan fast = *p, compact = *p;
    bool fits = false;
    if (may_be_fast(*p, call)) {
        fits = budget ? fit_fast(&fast, call, budget) : true;
        if (!budget)
            fast = comfortable_fast(fast, call);
        const bool good = call->mode == RAFTER_LCE_FAST || fast.group >= FAST_ROWS || fast.group >= p->rows;
        if (!may_be_compact(*p, call) || (fits && good)) {
            *p = fast;
            return fits;
        }
    }
    if (fit_compact(&compact, call, budget ? budget : SIZE_MAX)) {
        *p = compact;
        return true;
    }
    *p = fits || (may_be_fast(*p, call) && fast.bytes < compact.bytes) ? fast : compact;
    return fits;
}

/* Decided by shapes, dtypes, wanted results and the budget alone. False: the budget is too small, and the plan's bytes
 * are what would do. */
bool make_plan(const rafter_cuda_state *state, const linear_cross_entropy_call *call, size_t budget, Plan *plan) {
    Plan p = {};
    p.dtype = call->x.dtype;
    p.rows = call->loss.rows;
    p.depth = call->x.shape[call->x.ndim - 1];
    p.classes = call->loss.classes;
    p.statistics = call->loss.direction == RAFTER_FORWARD || !call->loss.lse.data;
    p.dx = call->dx.data;
    p.dweight = call->dweight.data;
    p.dbias = call->dbias.data;
    p.adds_dweight = call->accumulate_into_dweight;
    p.x = lying(call->x);
    p.weight = lying(call->weight);
    p.dx_lies = p.dx ? lying(call->dx) : Lying{};
    p.dweight_lies = p.dweight ? lying(call->dweight) : Lying{};
    p.fusable = p.dtype != RAFTER_F32 && p.depth > 0 && p.classes > 0 && p.rows > 0 && p.rows <= INT32_MAX &&
                !p.dbias && !needs_full(call->loss) && fused::available(state);
    p.clusters = state->multiprocessors / tiles::CLUSTER;
    p.fusable = p.fusable && p.clusters > 0 && !few_tiles(p, tiles::Deal::MOST_PARTS);
    p.drops = p.fusable;
    p.product_bytes = PRODUCT_BYTES;
    while (budget && p.product_bytes > budget / 16)
        p.product_bytes = p.product_bytes > 65536 ? p.product_bytes / 2 : 0;
    *plan = p;
    if (choose(plan, call, budget))
        return true;
    *plan = p;
    plan->product_bytes = 0;
    plan->drops = false; /* what x's copy may take, ignored rows are multiplied for */
    return choose(plan, call, budget);
}

} // namespace

#endif

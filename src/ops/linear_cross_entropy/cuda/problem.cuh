/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the CUDA variants of linear_cross_entropy share when they plan a call: facts about the call,
 * limits and layout of the workspace, and how rows are cut into groups and classes into slices.
 * Plans depend on shapes, dtypes, wanted results and the budget alone.
 */
#ifndef RAFTER_LCE_CUDA_PROBLEM_CUH
#define RAFTER_LCE_CUDA_PROBLEM_CUH

#include <math.h>

#include "core/sizes.h"
#include "cuda/backend.cuh"
#include "cuda/cublaslt_products.cuh"
#include "ops/linear_cross_entropy/call.h"

namespace lce {

constexpr int64_t MIB = 1 << 20;

/* How the rows of a matrix lie in memory. `direct`: products can use it in place. Rows are
 * contiguous then and begin at multiples of 16 bytes, `stride` elements apart. */
struct RowLayout {
    bool direct;
    int64_t stride;
};

/* `invariant`: a single row is direct only if several such rows would be. */
inline RowLayout row_layout(const rafter_view &view, bool invariant = false) {
    const int last = view.ndim - 1;
    const int64_t wide = 16 / rafter_dtype_bytes(view.dtype), columns = view.shape[last];
    const bool one_row = view.ndim == 2 && view.shape[0] == 1;
    RowLayout layout;
    layout.stride = one_row ? round_up(columns, wide) : view.stride[0];
    const bool fits = !(invariant && one_row) || columns % wide == 0;
    layout.direct = fits && view.ndim == 2 && (view.stride[last] == 1 || columns == 1) && layout.stride >= columns &&
                    layout.stride % wide == 0 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    return layout;
}

/* Facts about a call that decide on variants and plans. */
struct Problem {
    rafter_dtype dtype;
    int64_t rows, depth, classes;
    rafter_lce_mode mode;
    bool invariant;                 /* batch invariant: how a row's sums are cut must not depend on other rows */
    bool statistics;                /* row statistics must be computed: lse is not given or not enough */
    bool all_statistics;            /* cuBLASLt: kernels on logits need the code for all options */
    bool caps, smooths;             /* softcap, label smoothing */
    bool option_stats;              /* Hopper: columns need statistics beyond the softmax's */
    bool logit_sums;                /* Hopper: the sum of a row's logits is needed: x times the sum of W's rows */
    bool spreads_apart;             /* Hopper: label smoothing's spread is a product of two vectors: no softcap */
    bool reads_logits;              /* Hopper: logits can be read back from exponentials: the softcap is small */
    bool divides_upstream;          /* rows have coefficients of their own that fp16 might not hold: see Prepared */
    bool dentropy;                  /* is given: gradients need every row's entropy */
    bool saves;                     /* forward saves exponentials for backward, or backward uses them */
    bool shared;                    /* classes are spread over ranks: dx is always summed in the workspace */
    int ranks;                      /* number of them */
    int64_t exchange_bytes;         /* workspace of their exchange: see ops/loss_group.cuh */
    bool share_of_dx;               /* each rank wants dx of its share of the rows only */
    bool dx, dweight, dbias;        /* wanted */
    bool adds_dweight;              /* dW is added to what the caller's dweight holds */
    bool sum_in_dx, sum_in_dweight; /* partial sums may be kept in the caller's tensor */
    RowLayout x, weight, dx_layout, dweight_layout;
    int64_t dx_bytes, dweight_bytes; /* per element */

    explicit Problem(const linear_cross_entropy_call &call) {
        const struct rafter_loss &loss = call.loss;
        dtype = call.x.dtype;
        rows = loss.rows;
        depth = call.x.shape[call.x.ndim - 1];
        classes = loss.classes;
        mode = call.mode;
        invariant = call.common.batch_invariant;
        dentropy = loss.dentropy.data;
        statistics = loss.direction == RAFTER_FORWARD || !loss.lse.data || (dentropy && !loss.entropy.data);
        caps = loss.softcap != 0.0f;
        smooths = loss.smoothing != 0.0f;
        option_stats = statistics && ((smooths && caps) || loss.entropy.data || dentropy || loss.argmax.data);
        logit_sums = statistics && smooths && !caps;
        spreads_apart = smooths && !caps;
        /* e^-80 is a normal number in bf16. */
        reads_logits = caps && dtype == RAFTER_BF16 && 2.0f * fabsf(loss.softcap * loss.scale) <= 80.0f;
        const bool alike =
            !loss.row_weight.data && !loss.class_weight.data && loss.reduction != RAFTER_NONE && loss.z_loss == 0.0f;
        divides_upstream = dentropy || (dtype == RAFTER_F16 && !alike);
        all_statistics = caps || smooths || loss.entropy.data || dentropy || loss.argmax.data;
        /* Logits cannot be read out of exponentials with a softcap, nor the entropy. */
        saves = call.saved && !(dentropy && (caps || !loss.entropy.data));
        ranks = loss.class_group.ranks;
        shared = ranks > 0;
        share_of_dx = call.dx_rows == 2;
        exchange_bytes = (rows + 1) * (loss.entropy.data || dentropy || loss.argmax.data ? 32 : 16) * (1 + ranks);
        dx = share_of_dx ? rows * depth > 0 : call.dx.data != NULL;
        dweight = call.dweight.data;
        dbias = call.dbias.data;
        adds_dweight = call.accumulate_into_dweight;
        x = row_layout(call.x);
        weight = row_layout(call.weight);
        dx_layout = call.dx.data ? row_layout(call.dx, invariant) : RowLayout{};
        dweight_layout = dweight ? row_layout(call.dweight) : RowLayout{};
        dx_bytes = rafter_dtype_bytes(call.dx.dtype);
        dweight_bytes = rafter_dtype_bytes(call.dweight.dtype);
        sum_in_dx = dx_layout.direct && (call.dx.dtype == RAFTER_F32 || call.native);
        sum_in_dweight = dweight_layout.direct && (call.dweight.dtype == RAFTER_F32 || call.native);
    }
    bool gradients() const {
        return dx || dweight || dbias;
    }
    int64_t bytes() const { /* of an element of the inputs */
        return rafter_dtype_bytes(dtype);
    }
    /* Elements between rows of packed copies and of fp32 sums. */
    int64_t depth_stride() const {
        return round_up(depth, int64_t(8));
    }
};

/* ---- why a variant does not serve a call ----------------------------------------------------- */

inline const char *why_not_fast(const Problem &p) {
    if (p.rows == 0 || p.classes == 0)
        return "there are no rows or no classes";
    if (!p.gradients())
        return "no gradient is wanted";
    if (p.saves)
        return "saved is given";
    if (p.mode == RAFTER_LCE_COMPACT)
        return "mode is compact";
    if (p.mode == RAFTER_LCE_AUTO && !p.statistics)
        return "lse is given: compact takes no more products, and less memory";
    return NULL;
}

/* If classes are spread over ranks, compact also serves calls that insist on fast, where hopper_over_ranks does
 * not; and a rank may have no classes. */
inline const char *why_not_compact(const Problem &p) {
    if (p.rows == 0 || (p.classes == 0 && !p.shared))
        return "there are no rows or no classes";
    if (p.saves)
        return "saved is given";
    /* Fast is batch invariant only for some calls: compact serves the others. */
    return p.mode == RAFTER_LCE_FAST && p.gradients() && !p.shared && !p.invariant ? "mode is fast" : NULL;
}

/* Other calls divide dz of fp16 inputs by a power of two next to the largest coefficient of all rows, so
 * that fp16 holds it. What is then too small for fp16 depends on the other rows. So batch-invariant calls
 * that store dz divide every row by a unit of its own: see row_units.cuh. */
inline bool has_row_units(const Problem &p) {
    return p.invariant && p.dx && p.dtype == RAFTER_F16 && p.divides_upstream;
}

/* ---- limits of the workspace ----------------------------------------------------------------- */

struct Limits {
    size_t budget;        /* bytes that the plan may take; 0: no limit */
    size_t product_bytes; /* for cuBLASLt; our own products take twice that for split sums */
    bool drop_ignored;    /* Hopper: ignored rows are dropped before the products, for which x may be copied */
};

inline Limits limits_of(const linear_cross_entropy_call &call) {
    const size_t alignment = rafter_scratch_request(1) - 1, given = call.common.budget;
    Limits limits = {given > alignment ? given - alignment : given ? 1 : 0, PRODUCT_BYTES, true};
    while (limits.budget && limits.product_bytes > limits.budget / 16)
        limits.product_bytes = limits.product_bytes > 65536 ? limits.product_bytes / 2 : 0;
    return limits;
}

/* What `plan` returns for a plan of this many bytes. If the plan does not fit, that is a budget that
 * would suffice: more than the bytes, because product_bytes grows with the budget, and our own products
 * take up to an eighth of it. */
inline size_t bytes_to_report(const Limits &limits, size_t bytes) {
    return limits.budget && bytes > limits.budget ? bytes + bytes / 7 + 1 : bytes;
}

/* For budgets that are too small with the usual limits: no workspace for products, no copy of x. */
inline Limits tight_limits_of(const linear_cross_entropy_call &call) {
    Limits limits = limits_of(call);
    limits.product_bytes = 0;
    limits.drop_ignored = false;
    return limits;
}

/* ---- layout of the workspace ----------------------------------------------------------------- */

/* cuBLASLt's workspace must begin at a multiple of 256 bytes; the call's begins at a multiple of
 * 64. */
constexpr int64_t LAYOUT_ALIGNMENT = 256;

/* Where a buffer begins, in bytes from the aligned workspace. */
template <typename T> struct Buffer {
    int64_t offset = -1; /* -1: the call needs no such buffer */

    T *in(char *aligned_workspace) const {
        return offset < 0 ? NULL : reinterpret_cast<T *>(aligned_workspace + offset);
    }
};

class Layout {
    int64_t used = 0;

  public:
    template <typename T> void place(Buffer<T> *buffer, bool wanted, int64_t bytes) {
        buffer->offset = wanted ? used : -1;
        used += wanted ? round_up(bytes, LAYOUT_ALIGNMENT) : 0;
    }
    size_t bytes() const {
        return static_cast<size_t>(used + LAYOUT_ALIGNMENT - RAFTER_SCRATCH_ALIGNMENT);
    }
};

inline char *align_workspace(char *workspace) {
    return reinterpret_cast<char *>(round_up(reinterpret_cast<intptr_t>(workspace), intptr_t(LAYOUT_ALIGNMENT)));
}

/* ---- groups of rows, slices of classes ------------------------------------------------------- */

constexpr int64_t LEAST_GROUP = 32, LEAST_SLICE = 128;
/* Fast keeps the logits or exponentials of a group in this many bytes if there is no budget. */
constexpr int64_t FAST_TILE_BYTES = 512 * MIB;
/* With fewer rows in a group, fast's products lose more than compact's fourth product costs. */
constexpr int64_t FAST_ROWS = 512;

/* The size of equal parts of `total` that are at most `most`, in multiples of `unit`. */
inline int64_t even_part(int64_t total, int64_t most, int64_t unit) {
    if (total <= most)
        return total > 0 ? total : 1;
    const int64_t parts = ceil_div(total, most > unit ? most / unit * unit : unit);
    return round_up(ceil_div(total, parts), unit);
}

/* The multiple of which groups of about so many rows are. */
inline int64_t unit_of(int64_t rows) {
    return rows >= 1024 ? 256 : rows >= 128 ? 128 : LEAST_GROUP;
}

/* The smallest group that fast should use: any, if the caller insists on fast. */
inline int64_t least_fast_group(const Problem &p) {
    return p.mode == RAFTER_LCE_FAST ? LEAST_GROUP : FAST_ROWS;
}
inline bool is_good_group(const Problem &p, int64_t group) {
    return group >= least_fast_group(p) || group >= p.rows;
}

/* Plans with all rows in one group, then with smaller and smaller groups, until the plan fits the
 * budget. make(group, shrunk) plans and returns the bytes; the last plan that it makes is the
 * result. `good_only`: no groups under least_fast_group. */
template <typename Make> size_t fit_groups(const Problem &p, size_t budget, bool good_only, Make make) {
    size_t bytes = make(p.rows, false);
    for (int64_t most = p.rows; bytes > budget && most > LEAST_GROUP;) {
        most = max(most / 8 * 7, LEAST_GROUP);
        const int64_t group = even_part(p.rows, most, unit_of(most));
        if (good_only && !is_good_group(p, group))
            break;
        bytes = make(group, true);
    }
    return bytes;
}

/* Plans with smaller and smaller tiles, then slices, until the plan fits. make(group, slice) is as
 * above. row_bytes_of(slice): workspace per row of a tile, which has `tile` bytes at first. */
template <typename RowBytes, typename Make>
size_t fit_slices(const Problem &p, size_t budget, int64_t slice, int64_t tile, RowBytes row_bytes_of, Make make) {
    const size_t limit = budget ? budget : SIZE_MAX;
    for (;;) {
        const int64_t classes = max(p.classes, int64_t(1)); /* a rank may have none */
        const int64_t row_bytes = row_bytes_of(min(slice, classes)), most = tile / row_bytes;
        const int64_t group = even_part(p.rows, max(most, LEAST_GROUP), unit_of(most));
        const size_t bytes = make(group, min(slice, classes));
        if (bytes <= limit)
            return bytes;
        if (group > LEAST_GROUP && tile > row_bytes * LEAST_GROUP)
            tile /= 2;
        else if (slice > LEAST_SLICE)
            slice = max(min(slice, classes) / 2 / 64 * 64, LEAST_SLICE); /* 64: a step of the products */
        else
            return bytes;
    }
}

/* Compact's slice if there is no budget: dz of all rows takes `dz_bytes` at most. A
 * forward call has no dz. */
constexpr int64_t MOST_SLICE = 8192, INVARIANT_SLICE = 4096;
inline int64_t slice_for(const Problem &p, int64_t dz_bytes) {
    if (!p.gradients())
        return MOST_SLICE;
    if (p.invariant)
        return INVARIANT_SLICE;
    const int64_t most = dz_bytes / (p.rows * p.bytes()) / 256 * 256;
    return most > MOST_SLICE ? MOST_SLICE : max(most, int64_t(512));
}
constexpr int64_t FORWARD_TILE_BYTES = 64 * MIB; /* compact's tile if no gradient is wanted */

} // namespace lce

#endif

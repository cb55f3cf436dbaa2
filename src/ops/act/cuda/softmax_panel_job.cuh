/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax as a job of cuda/panel_softmax.cuh and cuda/persistent_softmax.cuh. */
#ifndef RAFTER_ACT_CUDA_SOFTMAX_PANEL_JOB_CUH
#define RAFTER_ACT_CUDA_SOFTMAX_PANEL_JOB_CUH

#include "cuda/panel_softmax.cuh"
#include "ops/act/cuda/softmax_layout.cuh"

namespace {

/* The tensors of a call, as panels. A panel is `across` packs of adjacent columns; or one contiguous
 * row: then a "row" of the panel is one pack of it. */
struct PanelTensors {
    const void *in, *dy;
    void *out;
    Walk outer;                                         /* over the dimensions outside panels */
    Divisor panels_across;                              /* panels side by side in an outer index */
    int across;                                         /* packs side by side in a panel */
    int64_t packs;                                      /* side by side in an outer index */
    int64_t pack_stride[TENSORS], row_strides[TENSORS]; /* elements to the next pack side by side; to the next row */
};

/* EXPANDED: backward with an expanded dy, which has one input. */
enum Kind { FORWARDS, BACKWARDS, EXPANDED };

/* The Job (cuda/panel_softmax.cuh says what its members are), with packs of N elements. */
template <typename T_, int N_, bool COLUMNS, Kind KIND> struct Softmax : PanelTensors {
    typedef T_ T;
    static constexpr bool FORWARD = KIND == FORWARDS;
    static constexpr int N = N_, LINES = COLUMNS ? N : 1, MOST_LINES = !COLUMNS ? 1 : N * sizeof(T) < 16 ? 128 : 8 * N;
    static constexpr int INPUTS = KIND == BACKWARDS ? 2 : 1, ITEMS = N == 1 ? 16 : 8, SUMS = 1, THREADS = 256,
                         PER_SM = KIND == BACKWARDS ? 3 : 5;
    static constexpr bool HAS_MAX = FORWARD;
    typedef Statistics<LINES, HAS_MAX, SUMS> Stats;
    struct Table {};
    struct Panel {
        unsigned outer;
        int64_t pack; /* the first */
    };
    struct Place {
        const T *in[INPUTS];
        T *out;
        float upstream; /* dy, if expanded */
        int column;
        bool active;
    };

    DEVICE Panel panel_at(unsigned index) const {
        const unsigned outside = panels_across.quotient(index);
        return {outside, (int64_t)(index - outside * panels_across.number) * across};
    }
    DEVICE Place locate(const Panel &panel, int column, int64_t row) const {
        const int64_t pack = panel.pack + column;
        int64_t at[3];
        outer.offsets(panel.outer, at);
        for (int t = 0; t < 3; t++)
            at[t] += pack * pack_stride[t] + row * row_strides[t];
        Place place;
        place.in[0] = static_cast<const T *>(in) + at[IN];
        if constexpr (KIND == BACKWARDS)
            place.in[1] = static_cast<const T *>(dy) + at[DY];
        if constexpr (KIND == EXPANDED)
            place.upstream = to_float(static_cast<const T *>(dy)[at[DY]]);
        place.out = static_cast<T *>(out) + at[OUT];
        place.column = column;
        place.active = pack < packs;
        return place;
    }
    DEVICE void prepare(Table &, const Panel &) const {
    }
    DEVICE const T *source(const Place &place, int input) const {
        return place.in[input];
    }
    DEVICE int64_t row_stride(int input) const {
        return row_strides[input];
    }
    /* Forward: x. Backward: y in x, and dy in d. */
    template <class AnyItems>
    DEVICE static void unpack_item(const AnyItems &items, int i, const Place &place, float (&x)[N], float (&d)[N]) {
        unpack(items.in(i, 0), x);
        if constexpr (KIND == BACKWARDS)
            unpack(items.in(i, 1), d);
        if constexpr (KIND == EXPANDED)
#pragma unroll
            for (int j = 0; j < N; j++)
                d[j] = place.upstream;
    }

    template <bool FIRST, class AnyItems>
    DEVICE void accumulate(Stats &statistics, const AnyItems &items, const Place &place, const Table &) const {
        if (items.count == 0)
            return;
        if constexpr (FORWARD) {
            Pack<T, N> top = items.in(0, 0);
            items.template for_each<4>([&](int i) { top = max_of(top, items.in(i, 0)); });
            cover<FIRST, LINES>(statistics, 0, top);
        }
        items.template for_each<2>([&](int i) {
            float x[N], d[N];
            unpack_item(items, i, place, x, d);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float &sum = statistics.sum[0][j % LINES];
                sum = FORWARD ? sum + exp2_fast((x[j] - statistics.max[j % LINES]) * LOG2E) : fmaf(x[j], d[j], sum);
            }
        });
    }

    /* Forward: the maximum, and 1 / the sum of exponentials. Backward: the sum of y dy. */
    DEVICE void finalize(float (&values)[Stats::COUNT], const Panel &, int) const {
        if constexpr (FORWARD)
            values[1] = 1.0f / values[1];
    }

    template <class AnyItems>
    DEVICE void finish(const float (&values)[Stats::COUNT][MOST_LINES], const AnyItems &items, const Place &place,
                       const Table &) const {
        const uint64_t policy = l2_evict_first();
        T *to = place.out + items.down * row_strides[OUT];
        float value[Stats::COUNT][LINES];
#pragma unroll
        for (int k = 0; k < Stats::COUNT; k++)
            read_numbers(values[k] + place.column * LINES, value[k]);
        items.template for_each<2>([&](int i) {
            float x[N], d[N];
            unpack_item(items, i, place, x, d);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const int line = j % LINES;
                if constexpr (FORWARD)
                    x[j] = exp_as<T>(x[j] - value[0][line]) * value[1][line];
                else
                    x[j] *= d[j] - value[0][line];
            }
            store_with(to, packed<T, N>(x), policy);
            to += items.step * row_strides[OUT];
        });
    }
};

/* ---- host side ------------------------------------------------------------------------------- */

PanelTensors panel_tensors(const act_call &call) {
    PanelTensors tensors = {};
    tensors.in = call.in.data;
    tensors.dy = call.dy.data;
    tensors.out = call.out.data;
    return tensors;
}

/* Columns as panels. `wide`: in packs of 16 bytes, else of one element. */
struct ColumnPanels {
    PanelTensors tensors;
    int64_t panels, rows; /* rows: per panel */
    bool wide;

    ColumnPanels(const act_call &call, const SoftmaxViews &views) : tensors(panel_tensors(call)), wide(views.wide()) {
        const int dim = views.ndim() - 2, column = views.ndim() - 1;
        const int64_t width = wide ? 16 / rafter_dtype_bytes(call.out.dtype) : 1;
        rows = views.size(dim);
        tensors.outer = walk_over(views.pointer, 0, dim);
        tensors.packs = views.size(column) / width;
        /* Panels are 128 bytes wide: narrower ones split DRAM pages, and of wider ones fewer fit in L2.
         * If rows begin anywhere, 256 bytes: a panel shares a sector of 32 bytes with each neighbour. */
        tensors.across = power_at_least(tensors.packs, 1, wide ? 8 : 256 / (int)rafter_dtype_bytes(call.out.dtype));
        const int64_t panels_across = ceil_div(tensors.packs, int64_t(tensors.across));
        tensors.panels_across = Divisor(panels_across);
        for (int t = 0; t < TENSORS; t++)
            if (views.pointer[t]) {
                tensors.pack_stride[t] = width * views.view[t].stride[column];
                tensors.row_strides[t] = views.view[t].stride[dim];
            }
        panels = views.numel() / (views.size(column) * rows) * panels_across;
    }
};

/* Calls f with the job that runs the panels. Contiguous rows have no job for an expanded dy. */
template <bool COLUMNS, class F>
auto with_job(const act_call &call, bool wide, bool expanded, const PanelTensors &tensors, F f) {
    return for_dtype(call.out.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        constexpr Kind ONE_INPUT = COLUMNS ? EXPANDED : BACKWARDS;
        if (is_forward(call))
            return wide ? f(Softmax<T, WIDE<T>, COLUMNS, FORWARDS>{tensors})
                        : f(Softmax<T, 1, COLUMNS, FORWARDS>{tensors});
        if (expanded)
            return wide ? f(Softmax<T, WIDE<T>, COLUMNS, ONE_INPUT>{tensors})
                        : f(Softmax<T, 1, COLUMNS, ONE_INPUT>{tensors});
        return wide ? f(Softmax<T, WIDE<T>, COLUMNS, BACKWARDS>{tensors})
                    : f(Softmax<T, 1, COLUMNS, BACKWARDS>{tensors});
    });
}

/* The plan of a variant that uses cuda/panel_softmax.cuh. The caller fills all but `plan`. */
template <bool COLUMNS> struct PlannedPanels {
    PanelTensors tensors;
    PanelPlan plan;
    bool wide, expanded;

    /* Fills `plan`; returns the bytes of workspace. */
    size_t make(const rafter_cuda_state &device, const act_call &call, int64_t panels, int64_t rows) {
        return with_job<COLUMNS>(call, wide, expanded, tensors, [&](const auto &job) {
            typedef std::decay_t<decltype(job)> Job;
            plan = plan_panels<Job>(device, panels, rows, tensors.across);
            return PanelWorkspaceBytes<Job>(plan).all();
        });
    }
    void launch(rafter_context *context, const act_call &call, char *workspace) const {
        with_job<COLUMNS>(call, wide, expanded, tensors,
                          [&](const auto &job) { launch_panels(context, job, plan, workspace); });
    }
};

} // namespace

#endif

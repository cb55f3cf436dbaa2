/* SPDX-License-Identifier: Apache-2.0 */
/*
 * act on CUDA: every input is read from memory once and every output written once.
 *
 *     elementwise       a pack of 16 bytes to a thread; anything strided or unaligned by the element
 *     relu with a mask  eight elements and their byte of the mask to a thread
 *     softmax           lines of neighbouring elements: in the registers of 8 or 32 lanes where they fit
 *                       longer ones, and lines down a dimension whose neighbours are other lines: cuda/strips.cuh
 *                       the latter where they are too long for a block, on Hopper and later: cuda/conveyor.cuh
 */
#include "cuda/activations.cuh"
#include "cuda/backend.cuh"
#include "cuda/conveyor.cuh"
#include "cuda/launch.cuh"
#include "cuda/strips.cuh"
#include "ops/act/call.h"

namespace {

enum { IN, DY, OUT }; /* the tensors of a Walk */

constexpr int THREADS = 128; /* a pack of 16 bytes to each: docs/perf/README.md */

/* ---- elementwise kinds ----------------------------------------------------------------------- */

constexpr int ANY_KIND = -1; /* in place of a kind as a template's argument: the one that the call names */

template <typename T> struct Map {
    const T *in, *dy; /* in: dy too, for the gradient of none */
    T *out;
    rafter_act_kind kind;
};

template <bool FORWARD, typename T, int N>
DEVICE Pack<T, N> mapped(rafter_act_kind kind, const Pack<T, N> &in, const Pack<T, N> &dy) {
    if (kind == RAFTER_ACT_NONE) /* copies bits, so that a NaN keeps its payload */
        return in;
    float x[N], d[N];
    unpack(in, x);
    unpack(dy, d);
#pragma unroll
    for (int j = 0; j < N; j++)
        x[j] = FORWARD ? act_forward<T>(kind, x[j]) : act_backward<T>(kind, x[j], d[j]);
    return packed<T, N>(x);
}

/* Tensors of neighbouring elements: `packs` from the element `head` on, and `edges` single elements before and after
 * them. What is wide belongs to the block, so that a thread adds 32 bits to it. */
template <int KIND, bool FORWARD, int N, typename T>
__global__ void __launch_bounds__(THREADS) map_flat(const Map<T> map, int head, int64_t packs, int edges) {
    const rafter_act_kind kind = KIND == ANY_KIND ? map.kind : (rafter_act_kind)KIND;
    const int64_t block = (int64_t)blockIdx.x * THREADS, at = head + block * N, left = packs - block;
    const int mine = threadIdx.x * N;
    if (threadIdx.x < (left < THREADS ? (unsigned)left : THREADS)) {
        const Pack<T, N> in = load_once<T, N>(map.in + at + mine);
        const Pack<T, N> dy = FORWARD ? in : load_once<T, N>(map.dy + at + mine);
        store_once(map.out + at + mine, mapped<FORWARD>(kind, in, dy));
    }
    if (blockIdx.x == 0 && threadIdx.x < edges) {
        const int64_t edge = threadIdx.x < head ? threadIdx.x : threadIdx.x + packs * N;
        const Pack<T, 1> x = load_once<T, 1>(map.in + edge), d = FORWARD ? x : load_once<T, 1>(map.dy + edge);
        store_once(map.out + edge, mapped<FORWARD>(kind, x, d));
    }
}

/* Tensors with any strides; an item is N neighbouring elements. */
template <bool FORWARD, int N, typename T>
__global__ void __launch_bounds__(THREADS) map_strided(const Map<T> map, const Walk walk, int64_t items) {
    const int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (item >= items)
        return;
    int64_t at[3];
    walk.offsets(item, at);
    const Pack<T, N> in = load_once<T, N>(map.in + at[IN]);
    const Pack<T, N> dy = FORWARD ? in : load_once<T, N>(map.dy + at[DY]);
    store_once(map.out + at[OUT], mapped<FORWARD>(map.kind, in, dy));
}

/* ---- relu and its mask ----------------------------------------------------------------------- */

/* NaN counts as above 0: it goes through, and so does its gradient. */
template <typename T> DEVICE bool passes(T x) {
    return !(to_float(x) <= 0.0f);
}

/* One byte and its eight elements, of which `count` are there. Forward turns x into y and the byte; backward turns dy
 * into dx by the byte. `at(i)` gives the offsets of element i of the eight. */
template <typename T, bool FORWARD, typename F>
DEVICE void relu_byte(const T *in, uint8_t *byte, T *out, int64_t count, F at) {
    unsigned bits = FORWARD ? 0 : *byte;
    for (int i = 0; i < 8 && i < count; i++) {
        int64_t in_at, out_at;
        at(i, in_at, out_at);
        const T a = in[in_at];
        if (FORWARD)
            bits |= (unsigned)passes(a) << i;
        out[out_at] = bits >> i & 1 ? a : from_float<T>(0.0f);
    }
    if (FORWARD)
        *byte = (uint8_t)bits;
}

/* Neighbouring elements, aligned. */
template <typename T, bool FORWARD>
__global__ void __launch_bounds__(THREADS) relu_masked(const T *in, uint8_t *mask, T *out, int64_t n) {
    constexpr int N = WIDE<T>, PARTS = 8 / N;
    const int64_t bytes = n / 8, byte = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (byte < bytes) {
        unsigned bits = FORWARD ? 0 : __ldcs(mask + byte);
        Pack<T, N> a[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            a[p] = load_once<T, N>(in + byte * 8 + p * N);
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                const int bit = p * N + j;
                if (FORWARD)
                    bits |= (unsigned)passes(a[p].v[j]) << bit;
                a[p].v[j] = bits >> bit & 1 ? a[p].v[j] : from_float<T>(0.0f);
            }
            store_once(out + byte * 8 + p * N, a[p]);
        }
        if (FORWARD)
            __stcs(mask + byte, (uint8_t)bits);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0 && bytes * 8 < n)
        relu_byte<T, FORWARD>(in, mask + bytes, out, n - bytes * 8,
                              [&](int i, int64_t &in_at, int64_t &out_at) { in_at = out_at = bytes * 8 + i; });
}

/* Any strides. */
template <typename T, bool FORWARD>
__global__ void __launch_bounds__(THREADS)
    relu_masked_strided(const T *in, uint8_t *mask, T *out, const Walk walk, int64_t n) {
    const int64_t byte = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (byte * 8 < n)
        relu_byte<T, FORWARD>(in, mask + byte, out, n - byte * 8, [&](int i, int64_t &in_at, int64_t &out_at) {
            int64_t at[3];
            walk.offsets(byte * 8 + i, at);
            in_at = at[IN];
            out_at = at[OUT];
        });
}

/* ---- softmax of short lines ------------------------------------------------------------------ */

/* Forward: y = e^(x - max) / sum of e^(x - max). Backward: dx = y (dy - sum of y dy). The maximum starts from the
 * lowest finite number, so that a line of all -inf is 0 / 0: NaN. */

template <typename T> struct Lines {
    const T *in, *dy;
    T *out;
    Walk walk; /* over lines */
    int64_t lines;
    int packs; /* of a line */
};

/* GROUP lanes to a line, PACKS packs of a line to a lane, AT_ONCE lines loaded before the first is used. */
template <typename T, int N, bool FORWARD, int GROUP, int PACKS, int AT_ONCE>
__global__ void __launch_bounds__(THREADS) softmax_short(const Lines<T> lines) {
    const int lane = threadIdx.x % GROUP;
    const int64_t first = (int64_t)blockIdx.x * (THREADS / GROUP * AT_ONCE) + threadIdx.x / GROUP;
    Pack<T, N> in[AT_ONCE][PACKS], dy[AT_ONCE][PACKS];
    int64_t out_at[AT_ONCE];
    bool has[AT_ONCE][PACKS];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        const int64_t line = first + r * (THREADS / GROUP);
        int64_t at[3];
        lines.walk.offsets(line, at);
        out_at[r] = at[OUT] + lane * N;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            has[r][p] = line < lines.lines && p * GROUP + lane < lines.packs;
            if (has[r][p]) {
                in[r][p] = load_once<T, N>(lines.in + at[IN] + (p * GROUP + lane) * N);
                if (!FORWARD)
                    dy[r][p] = load_once<T, N>(lines.dy + at[DY] + (p * GROUP + lane) * N);
            } else {
#pragma unroll
                for (int j = 0; j < N; j++)
                    in[r][p].v[j] = dy[r][p].v[j] = from_float<T>(FORWARD ? -INFINITY : 0.0f);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        float x[PACKS][N], d[PACKS][N], max = -FLT_MAX, sum = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            unpack(in[r][p], x[p]);
            if (!FORWARD)
                unpack(dy[r][p], d[p]);
#pragma unroll
            for (int j = 0; j < N; j++)
                if (FORWARD)
                    max = fmaxf(max, x[p][j]);
                else
                    sum = fmaf(x[p][j], d[p][j], sum);
        }
        if (FORWARD) {
#pragma unroll
            for (int step = GROUP / 2; step > 0; step /= 2)
                max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
#pragma unroll
            for (int p = 0; p < PACKS; p++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    sum += x[p][j] = exp_as<T>(x[p][j] - max);
        }
#pragma unroll
        for (int step = GROUP / 2; step > 0; step /= 2)
            sum += __shfl_xor_sync(~0u, sum, step);
        const float scale = FORWARD ? 1.0f / sum : 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
#pragma unroll
            for (int j = 0; j < N; j++)
                x[p][j] = FORWARD ? x[p][j] * scale : x[p][j] * (d[p][j] - sum);
            if (has[r][p])
                store_once(lines.out + out_at[r] + p * GROUP * N, packed<T, N>(x[p]));
        }
    }
}

/* ---- softmax of all other lines -------------------------------------------------------------- */

/* A job of cuda/strips.cuh and cuda/conveyor.cuh. DOWN: lines run down a dimension, N of them side by side in a pack.
 * Else a strip is one line of neighbouring elements, and a "row" is a pack of it. */
template <typename T_, int N_, bool DOWN, bool FORWARD, int ITEMS_ = 8, int PER_SM_ = FORWARD ? 5 : 3> struct Softmax {
    typedef T_ T;
    static constexpr int N = N_, LINES = DOWN ? N : 1, MOST_LINES = !DOWN ? 1 : N == 1 ? WARP : 8 * N;
    static constexpr int INPUTS = FORWARD ? 1 : 2, ITEMS = ITEMS_, SUMS = 1, THREADS = 256, PER_SM = PER_SM_;
    static constexpr bool HAS_MAX = FORWARD;
    typedef Statistics<LINES, HAS_MAX, SUMS> Stats;
    struct Table {};
    struct Strip {
        unsigned outer;
        int64_t pack; /* the first */
    };
    struct Place {
        const T *in[INPUTS];
        T *out;
        int column;
        bool active;
    };

    const T *in, *dy;
    T *out;
    Walk outer;     /* over the dimensions outside of strips */
    Divisor groups; /* strips side by side */
    int across;
    int64_t packs; /* side by side */
    int64_t pack_stride[3], row_strides[3];

    DEVICE Strip strip_at(unsigned index) const {
        const unsigned outside = groups.quotient(index);
        return {outside, (int64_t)(index - outside * groups.number) * across};
    }
    DEVICE Corner corner(const Strip &strip) const {
        Corner at = {(int)strip.pack * N, {0, 0, 0}};
        unsigned index = strip.outer;
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (i < outer.dims) { /* innermost first */
                const unsigned size = (unsigned)outer.size[outer.dims - 1 - i];
                at.outer[i] = (int)(index % size);
                index /= size;
            }
        return at;
    }
    DEVICE Place locate(const Strip &strip, int column, int64_t row) const {
        const int64_t pack = strip.pack + column;
        int64_t at[3];
        outer.offsets(strip.outer, at);
        for (int t = 0; t < 3; t++)
            at[t] += pack * pack_stride[t] + row * row_strides[t];
        Place place;
        place.in[0] = in + at[IN];
        if constexpr (!FORWARD)
            place.in[1] = dy + at[DY];
        place.out = out + at[OUT];
        place.column = column;
        place.active = pack < packs;
        return place;
    }
    DEVICE void prepare(Table &, const Strip &) const {
    }
    DEVICE const T *source(const Place &place, int input) const {
        return place.in[input];
    }
    DEVICE int64_t row_stride(int input) const {
        return row_strides[input];
    }
    DEVICE bool has(const Place &, int) const {
        return true;
    }
    /* x, or y and dy. */
    template <class AnyItems>
    DEVICE static void unpack_item(const AnyItems &items, int i, float (&x)[N], float (&d)[N]) {
        unpack(items.in(i, 0), x);
        if constexpr (!FORWARD)
            unpack(items.in(i, 1), d);
    }

    template <bool FIRST, class AnyItems>
    DEVICE void accumulate(Stats &statistics, const AnyItems &items, const Place &, const Table &) const {
        if (items.count == 0)
            return;
        if constexpr (FORWARD) {
            Pack<T, N> top = items.in(0, 0);
            items.template for_each<4>([&](int i) { top = max_of(top, items.in(i, 0)); });
            cover<FIRST, LINES>(statistics, 0, top);
        }
        items.template for_each<2>([&](int i) {
            float x[N], d[N];
            unpack_item(items, i, x, d);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float &sum = statistics.sum[0][j % LINES];
                sum = FORWARD ? sum + exp2_fast((x[j] - statistics.max[j % LINES]) * LOG2E) : fmaf(x[j], d[j], sum);
            }
        });
    }

    DEVICE void conclude(float (&values)[Stats::COUNT], const Strip &, int) const {
        if constexpr (FORWARD)
            values[1] = 1.0f / values[1];
    }

    template <class AnyItems>
    DEVICE void finish(const float (&values)[Stats::COUNT][MOST_LINES], const AnyItems &items, const Place &place,
                       const Table &) const {
        const uint64_t policy = l2_pass_on();
        T *to = place.out + items.down * row_strides[OUT];
        float value[Stats::COUNT][LINES];
#pragma unroll
        for (int k = 0; k < Stats::COUNT; k++)
            read_numbers(values[k] + place.column * LINES, value[k]);
        items.template for_each<2>([&](int i) {
            float x[N], d[N];
            unpack_item(items, i, x, d);
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

/* ---- how calls are cut ----------------------------------------------------------------------- */

/* The views of a call, brought into another order of dimensions. in of a call that has none is dy: what none copies. */
struct Views {
    rafter_view view[3];
    const rafter_view *pointer[3]; /* NULL: the call has no such tensor */
    rafter_view *used[3];
    int count;
    bool forward;
    rafter_act_kind kind;

    explicit Views(const act_call *call) : count(0), forward(call->direction == RAFTER_FORWARD), kind(call->kind) {
        view[IN] = call->in.data ? call->in : call->dy;
        view[DY] = call->dy;
        view[OUT] = call->out;
        for (int t = 0; t < 3; t++) {
            pointer[t] = forward && t == DY ? NULL : &view[t];
            if (pointer[t])
                used[count++] = &view[t];
        }
    }
    int ndim() const {
        return view[OUT].ndim;
    }
    bool all_wide(int dims) const {
        bool all = true;
        for (int v = 0; v < count; v++)
            all = all && is_wide(*used[v], dims);
        return all;
    }
    bool adjacent(int dim) const {
        bool all = true;
        for (int v = 0; v < count; v++)
            all = all && (used[v]->stride[dim] == 1 || used[v]->shape[dim] == 1);
        return all;
    }
    template <typename T> T *data(int t) const {
        return pointer[t] ? reinterpret_cast<T *>(view[t].data) : NULL;
    }

    /* Orders the first `dims` dimensions as they lie in the output's memory, outermost first. */
    void order_by_stride(int dims) {
        for (int placed = 1; placed < dims; placed++)
            for (int d = placed; d > 0 && view[OUT].stride[d - 1] < view[OUT].stride[d]; d--)
                swap(d - 1, d);
    }
    void swap(int a, int b) {
        for (int v = 0; v < count; v++) {
            const int64_t size = used[v]->shape[a], stride = used[v]->stride[a];
            used[v]->shape[a] = used[v]->shape[b];
            used[v]->stride[a] = used[v]->stride[b];
            used[v]->shape[b] = size;
            used[v]->stride[b] = stride;
        }
    }
    void move_to_end(int dim) {
        for (int d = dim; d + 1 < ndim(); d++)
            swap(d, d + 1);
    }
};

template <typename T> void launch_map(const rafter_context *context, Views &views) {
    views.order_by_stride(views.ndim());
    const int dims = rafter_collapse(views.used, views.count, 0, views.ndim());
    const int64_t n = views.view[OUT].numel;
    const Map<T> map = {views.data<T>(IN), views.data<T>(DY), views.data<T>(OUT), views.kind};
    const auto start = [&](auto *kernel, int64_t items, int64_t each, auto... more) {
        launch(context, {ceil_div(items > 0 ? items : 1, each), THREADS}, kernel, map, more...);
    };

    if (dims == 1 && views.adjacent(0)) {
        /* The output's first whole pack; the inputs' are there too, or there are none. */
        const uintptr_t at = reinterpret_cast<uintptr_t>(map.out);
        const int64_t ragged = static_cast<int64_t>(-at % 16 / sizeof(T)), head = ragged < n ? ragged : n;
        bool wide = true;
        for (int v = 0; v < views.count; v++)
            wide = wide && (reinterpret_cast<uintptr_t>(views.used[v]->data) - at) % 16 == 0;
        if (!wide)
            return views.forward ? start(map_flat<ANY_KIND, true, 1, T>, n, THREADS, 0, n, 0)
                                 : start(map_flat<ANY_KIND, false, 1, T>, n, THREADS, 0, n, 0);
        const int64_t packs = (n - head) / WIDE<T>;
        const auto flat = [&](auto *kernel) {
            start(kernel, packs, THREADS, static_cast<int>(head), packs, static_cast<int>(n - packs * WIDE<T>));
        };
        switch (views.kind) {
        case RAFTER_ACT_RELU:
            return views.forward ? flat(map_flat<RAFTER_ACT_RELU, true, WIDE<T>, T>)
                                 : flat(map_flat<RAFTER_ACT_RELU, false, WIDE<T>, T>);
        case RAFTER_ACT_SIGMOID:
            return views.forward ? flat(map_flat<RAFTER_ACT_SIGMOID, true, WIDE<T>, T>)
                                 : flat(map_flat<RAFTER_ACT_SIGMOID, false, WIDE<T>, T>);
        default:
            return views.forward ? flat(map_flat<RAFTER_ACT_SILU, true, WIDE<T>, T>)
                                 : flat(map_flat<RAFTER_ACT_SILU, false, WIDE<T>, T>);
        }
    }
    const bool wide = views.all_wide(dims);
    if (wide)
        for (int v = 0; v < views.count; v++) { /* from here on in packs */
            views.used[v]->shape[dims - 1] /= WIDE<T>;
            views.used[v]->stride[dims - 1] = WIDE<T>;
        }
    const Walk walk = walk_over(views.pointer, 0, dims);
    if (wide)
        views.forward ? start(map_strided<true, WIDE<T>, T>, n / WIDE<T>, THREADS, walk, n / WIDE<T>)
                      : start(map_strided<false, WIDE<T>, T>, n / WIDE<T>, THREADS, walk, n / WIDE<T>);
    else
        views.forward ? start(map_strided<true, 1, T>, n, THREADS, walk, n)
                      : start(map_strided<false, 1, T>, n, THREADS, walk, n);
}

template <typename T, bool FORWARD>
void launch_relu_masked(const rafter_context *context, Views &views, uint8_t *mask) {
    rafter_view *const used[] = {&views.view[FORWARD ? IN : DY], &views.view[OUT]};
    const int dims = rafter_collapse(used, 2, 0, views.ndim()); /* in row-major order, as the bits are */
    const int64_t n = views.view[OUT].numel;
    const T *const in = reinterpret_cast<const T *>(used[0]->data);
    T *const out = views.data<T>(OUT);
    const bool flat = dims == 1 && used[0]->stride[0] == 1 && used[1]->stride[0] == 1 &&
                      (reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
    const rafter_view *const walked[3] = {used[0], NULL, used[1]};
    if (flat)
        launch(context, {ceil_div(n, (int64_t)8 * THREADS), THREADS}, relu_masked<T, FORWARD>, in, mask, out, n);
    else
        launch(context, {ceil_div(n, (int64_t)8 * THREADS), THREADS}, relu_masked_strided<T, FORWARD>, in, mask, out,
               walk_over(walked, 0, dims), n);
}

/* ---- softmax --------------------------------------------------------------------------------- */

/* Starts a job. */
template <class Job>
rafter_status start_strips(rafter_context *context, const act_call *call, const Job &job, int64_t strips, int64_t rows,
                           int across) {
    const Cut cut = cut_into_strips<Job>(context->cuda_state, strips, rows, across, false);
    return run_with_scratch(context, call, StripScratch<Job>(cut).bytes(), "act",
                            [&](char *scratch) { launch_strips(context, job, cut, scratch); });
}

template <typename T, int N, bool FORWARD>
rafter_status plan_rows(rafter_context *context, const act_call *call, const Views &views) {
    const int dims = views.ndim() - 1;
    const int64_t length = views.view[OUT].shape[dims], lines = views.view[OUT].numel / length, packs = length / N;
    const Walk walk = walk_over(views.pointer, 0, dims);
    const Lines<T> job = {views.data<T>(IN),
                          views.data<T>(DY),
                          views.data<T>(OUT),
                          walk,
                          lines,
                          static_cast<int>(packs < INT32_MAX ? packs : INT32_MAX)};
    const auto in_registers = [&](auto *kernel, int64_t lines_of_block) {
        return run_with_scratch(context, call, 0, "act", [&](char *) {
            launch(context, {ceil_div(lines, lines_of_block), THREADS}, kernel, job);
        });
    };
    if constexpr (N > 1) {
        if (packs <= 8)
            return in_registers(softmax_short<T, N, FORWARD, 8, 1, 4>, THREADS / 8 * 4);
        if (packs <= 16)
            return FORWARD ? in_registers(softmax_short<T, N, FORWARD, 8, 2, 1>, THREADS / 8)
                           : in_registers(softmax_short<T, N, FORWARD, 16, 1, 1>, THREADS / 16);
        if (packs <= 32)
            return in_registers(softmax_short<T, N, FORWARD, 8, 4, 1>, THREADS / 8);
        if (packs <= 64)
            return in_registers(softmax_short<T, N, FORWARD, WARP, 2, 2>, THREADS / WARP * 2);
        if (packs <= 128)
            return in_registers(softmax_short<T, N, FORWARD, WARP, 4, 1>, THREADS / WARP);
    } else {
        if (packs <= 32)
            return in_registers(softmax_short<T, N, FORWARD, WARP, 1, 4>, THREADS / WARP * 4);
        if (packs <= 128)
            return in_registers(softmax_short<T, N, FORWARD, WARP, 4, 2>, THREADS / WARP * 2);
        if (packs <= 512)
            return in_registers(softmax_short<T, N, FORWARD, WARP, 16, 1>, THREADS / WARP);
    }
    typedef Softmax<T, N, false, FORWARD> Job;
    const Job strips = {job.in, job.dy, job.out, walk, Divisor(1), 1, 1, {0, 0, 0}, {N, N, N}};
    return start_strips(context, call, strips, lines, packs, 1);
}

/* The inputs of a job whose lines run down the last dimension, as the conveyor reads them: false where it cannot. */
template <class Job> bool map_columns(const Views &views, Tensors<Job> *tensors) {
    const int down = views.ndim() - 1, side = down - 1;
    bool mapped = side <= 3;
    for (int t = 0; mapped && t < Job::INPUTS; t++) {
        const rafter_view &view = views.view[t];
        int64_t size[5] = {view.shape[side], view.shape[down]}, stride[4] = {view.stride[down]};
        for (int d = 0; d < side; d++) {
            size[2 + d] = view.shape[side - 1 - d];
            stride[1 + d] = view.stride[side - 1 - d];
        }
        mapped = map_tiles(tensors, t, view, 2 + side, size, stride);
    }
    return mapped;
}

/* Lines down the last dimension; the one before it is where they are neighbours, if anywhere. */
template <typename T, int N, bool FORWARD>
rafter_status plan_columns(rafter_context *context, const act_call *call, const Views &views) {
    typedef Softmax<T, N, true, FORWARD> Job;
    const int down = views.ndim() - 1, side = down - 1;
    const rafter_view &out = views.view[OUT];
    const int64_t packs = out.shape[side] / N, rows = out.shape[down], outer = out.numel / (out.shape[side] * rows);
    /* Strips of 128 bytes: narrower ones break up the memory's pages, of wider ones L2 holds fewer. */
    const int across = power_at_least(packs, 1, Job::MOST_LINES / N);
    const int64_t groups = ceil_div(packs, (int64_t)across);
    Job job = {views.data<T>(IN),
               views.data<T>(DY),
               views.data<T>(OUT),
               walk_over(views.pointer, 0, side),
               Divisor(groups),
               across,
               packs,
               {},
               {}};
    for (int t = 0; t < 3; t++)
        if (views.pointer[t]) {
            job.pack_stride[t] = N * views.view[t].stride[side];
            job.row_strides[t] = views.view[t].stride[down];
        }
    const int64_t strips = outer * groups;
    if constexpr (N > 1) {
        Tensors<Job> tensors;
        if (conveyor_pays<Job>(context->cuda_state, strips, rows, across) && map_columns(views, &tensors)) {
            const ConveyorCut cut = cut_for_conveyor<Job>(context->cuda_state, strips, rows);
            return run_with_scratch(context, call, conveyor_bytes<Job>(cut), "act",
                                    [&](char *scratch) { launch_conveyor(context, tensors, job, cut, scratch); });
        }
    }
    return start_strips(context, call, job, strips, rows, across);
}

template <typename T, bool FORWARD>
rafter_status plan_softmax(rafter_context *context, const act_call *call, Views &views) {
    if (views.ndim() == 0)
        rafter_collapse(views.used, views.count, 0, 0); /* a number is a line of one element */
    else
        views.move_to_end(call->dim);
    views.order_by_stride(views.ndim() - 1);
    const int line = rafter_collapse(views.used, views.count, 0, views.ndim() - 1);
    if (views.adjacent(line)) {
        return views.all_wide(line + 1) ? plan_rows<T, WIDE<T>, FORWARD>(context, call, views)
                                        : plan_rows<T, 1, FORWARD>(context, call, views);
    }
    views.swap(line - 1, line);
    const bool wide = views.all_wide(line + 1);
    views.swap(line - 1, line);
    return wide ? plan_columns<T, WIDE<T>, FORWARD>(context, call, views)
                : plan_columns<T, 1, FORWARD>(context, call, views);
}

/* A plain copy where the tensors have one order of memory; false where they have not. */
bool copy(const rafter_context *context, const act_call *call) {
    Views views(call);
    views.order_by_stride(views.ndim());
    if (rafter_collapse(views.used, views.count, 0, views.ndim()) > 1 || !views.adjacent(0))
        return false;
    const size_t bytes = static_cast<size_t>(call->out.numel * rafter_dtype_bytes(call->out.dtype));
    cudaMemcpyAsync(call->out.data, views.view[IN].data, bytes, cudaMemcpyDeviceToDevice, context->cuda_state->stream);
    return true;
}

template <typename T> rafter_status start(rafter_context *context, const act_call *call) {
    Views views(call);
    if (call->kind == RAFTER_ACT_SOFTMAX)
        return views.forward ? plan_softmax<T, true>(context, call, views)
                             : plan_softmax<T, false>(context, call, views);
    return run_with_scratch(context, call, 0, "act", [&](char *) {
        if (call->mask)
            views.forward ? launch_relu_masked<T, true>(context, views, call->mask)
                          : launch_relu_masked<T, false>(context, views, call->mask);
        else if (call->kind != RAFTER_ACT_NONE || !copy(context, call))
            launch_map<T>(context, views);
    });
}

} // namespace

extern "C" rafter_status rafter_cuda_act(rafter_context *context, const struct act_call *call) {
    OnDevice current(context);
    if (call->out.numel == 0)
        return RAFTER_OK;
    return for_dtype(call->out.dtype, [&](auto zero) { return start<decltype(zero)>(context, call); });
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of short lines: rows, or interleaved lines ([outer, length, inner]) of short slabs.
 *
 * A block takes a chunk of whole slabs. It copies them to shared memory by aligned packs of 16
 * bytes, wherever lines begin; 1 to 32 lanes per line read the line from there, element by element,
 * into registers; the results go through shared memory to the output, again by aligned packs.
 *
 * All elements that a block writes it has read before, and it uses no element that another block
 * writes: the output may be the input.
 */
#include <float.h>

#include "ops/act/cuda/softmax_layout.cuh"

namespace {

constexpr int CHUNK_THREADS = 256, STEPS = 16; /* elements per lane, at most */
constexpr int MOST_LENGTH = WARP * STEPS;
constexpr int CHUNK_BYTES = 16 << 10; /* of a tensor in shared memory, at most */

struct ChunkPlan {
    int64_t slabs;
    int per_chunk;     /* slabs */
    int elements;      /* of a slab */
    int length, inner; /* of a slab */
    int lanes_log2;    /* lanes per line */
    int steps;         /* elements per lane, at most */
    int slots;         /* packs per slab of a tensor with gaps between slabs, at most */
    int bytes;         /* of one tensor's chunk in shared memory */
    Divisor by_inner, by_slots;
    bool dense[TENSORS]; /* no gaps between slabs */
    bool expanded;       /* dy is one number per slab */
    bool rotate;         /* lines of a warp begin in the same banks: they start at different steps */
};

template <typename T> struct ChunkArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    const T *in_end, *dy_end; /* the end of each tensor's memory */
    Walk outer;
    ChunkPlan plan;
};

/* Copies the aligned pack at `from` to shared memory; of one that reaches out of [low, high) only
 * the elements inside. */
template <typename T> DEVICE void copy_pack(Pack<T, WIDE<T>> *to, const T *from, const T *low, const T *high) {
    constexpr int N = WIDE<T>;
    if (from >= low && from + N <= high) {
        copy_async(to, from);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (from + j >= low && from + j < high)
                to->v[j] = from[j];
    }
}

template <typename T> DEVICE int offset_in_pack(const T *p) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T));
}

/* One input's chunk in shared memory. */
template <typename T> struct ChunkInput {
    static constexpr int N = WIDE<T>;
    T *memory;
    const T *tensor;
    const Walk *outer;
    int64_t first; /* slab */
    int which, pitch, shift;
    bool dense;

    /* Starts to copy `slabs` slabs. Packs at the ends of the chunk reach into other chunks, but never
     * out of the tensor's memory. */
    DEVICE void fill(const ChunkPlan &plan, int slabs, const T *end) {
        int64_t at[3];
        if (dense) {
            const T *const from = tensor + first * plan.elements;
            shift = offset_in_pack(from);
            pitch = plan.elements;
            const int packs = (shift + slabs * plan.elements + N - 1) / N;
            for (int i = threadIdx.x; i < packs; i += 4 * CHUNK_THREADS)
#pragma unroll
                for (int u = 0; u < 4; u++)
                    if (i + u * CHUNK_THREADS < packs)
                        copy_pack(reinterpret_cast<Pack<T, N> *>(memory) + i + u * CHUNK_THREADS,
                                  from - shift + (i + u * CHUNK_THREADS) * N, tensor, end);
        } else {
            pitch = plan.slots * N;
            const int packs = slabs * plan.slots;
            for (int i = threadIdx.x; i < packs; i += CHUNK_THREADS) {
                const int slab = static_cast<int>(plan.by_slots.quotient(i)), slot = i - slab * plan.slots;
                outer->offsets(first + slab, at);
                const T *const from = tensor + at[which];
                const int own = offset_in_pack(from);
                if (slot * N < own + plan.elements)
                    copy_pack(reinterpret_cast<Pack<T, N> *>(memory) + i, from - own + slot * N, tensor, end);
            }
        }
    }
    /* The first element of a slab. */
    DEVICE T *slab(int i) const {
        int own = shift;
        if (!dense) {
            int64_t at[3];
            outer->offsets(first + i, at);
            own = offset_in_pack(tensor + at[which]);
        }
        return memory + i * pitch + own;
    }
};

template <typename T, bool FORWARD, bool ROTATE>
__global__ void __launch_bounds__(CHUNK_THREADS, 4) softmax_chunk(const __grid_constant__ ChunkArgs<T> a) {
    constexpr int N = WIDE<T>;
    extern __shared__ uint4 chunk_memory[];
    char *const memory = reinterpret_cast<char *>(chunk_memory);
    const ChunkPlan &plan = a.plan;
    const int64_t first = (int64_t)blockIdx.x * plan.per_chunk;
    const int slabs = static_cast<int>(min(int64_t(plan.per_chunk), plan.slabs - first));
    const int lines = slabs * plan.inner, lanes = 1 << plan.lanes_log2, lane = threadIdx.x & (lanes - 1);

    ChunkInput<T> in = {reinterpret_cast<T *>(memory), a.in, &a.outer, first, IN, 0, 0, plan.dense[IN]};
    in.fill(plan, slabs, a.in_end);
    ChunkInput<T> dy = {reinterpret_cast<T *>(memory + plan.bytes), a.dy, &a.outer, first, DY, 0, 0, plan.dense[DY]};
    if (!FORWARD && !plan.expanded)
        dy.fill(plan, slabs, a.dy_end);
    copy_commit();
    T *const results = reinterpret_cast<T *>(memory + (FORWARD ? 1 : 2) * plan.bytes);
    T *const out = a.out + first * plan.elements; /* if dense */
    const int out_shift = plan.dense[OUT] ? offset_in_pack(out) : 0;
    copy_wait<0>();
    __syncthreads();

    for (int base = 0; base < lines; base += CHUNK_THREADS >> plan.lanes_log2) {
        const int line = base + ((int)threadIdx.x >> plan.lanes_log2);
        const bool active = line < lines; /* the others take part in shuffles */
        const int slab = active ? static_cast<int>(plan.by_inner.quotient(line)) : 0,
                  column = active ? line - slab * plan.inner : 0;
        const T *const x = in.slab(slab) + column;
        const T *const d = FORWARD || plan.expanded ? x : dy.slab(slab) + column;
        int64_t at[3] = {};
        if (!plan.dense[OUT] || plan.expanded)
            a.outer.offsets(first + slab, at);
        const float upstream = !FORWARD && plan.expanded ? to_float(a.dy[at[DY]]) : 0.0f;
        const int begin = ROTATE ? line % plan.steps : 0;
        const int stop = active ? plan.length : 0;

        float v[STEPS], w[STEPS], max = -FLT_MAX, sum = 0.0f;
        int step = begin;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            if (k < plan.steps) {
                const int i = (step << plan.lanes_log2) + lane;
                v[k] = FORWARD ? -INFINITY : 0.0f;
                w[k] = upstream;
                if (i < stop) {
                    v[k] = to_float(x[i * plan.inner]);
                    if (!FORWARD && !plan.expanded)
                        w[k] = to_float(d[i * plan.inner]);
                }
                max = fmaxf(max, v[k]);
                step = ROTATE && step + 1 == plan.steps ? 0 : step + 1;
            }
        }
        if (FORWARD)
            for (int apart = lanes / 2; apart > 0; apart /= 2)
                max = fmaxf(max, __shfl_xor_sync(~0u, max, apart));
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (k < plan.steps) {
                if (FORWARD)
                    v[k] = exp_as<T>(v[k] - max);
                sum = FORWARD ? sum + v[k] : fmaf(v[k], w[k], sum);
            }
        for (int apart = lanes / 2; apart > 0; apart /= 2)
            sum += __shfl_xor_sync(~0u, sum, apart);

        const float scale = 1.0f / sum;
        T *const to = plan.dense[OUT] ? results + out_shift + slab * plan.elements + column : a.out + at[OUT] + column;
        step = begin;
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (k < plan.steps) {
                const int i = (step << plan.lanes_log2) + lane;
                if (i < stop)
                    to[i * plan.inner] = from_float<T>(FORWARD ? v[k] * scale : v[k] * (w[k] - sum));
                step = ROTATE && step + 1 == plan.steps ? 0 : step + 1;
            }
    }
    if (!plan.dense[OUT])
        return;
    __syncthreads();
    const int end = out_shift + slabs * plan.elements, packs = (end + N - 1) / N;
    for (int i = threadIdx.x; i < packs; i += CHUNK_THREADS) {
        const Pack<T, N> pack = reinterpret_cast<const Pack<T, N> *>(results)[i];
        if (i * N >= out_shift && (i + 1) * N <= end) {
            store_once(out - out_shift + i * N, pack);
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                if (i * N + j >= out_shift && i * N + j < end)
                    out[i * N + j - out_shift] = pack.v[j];
        }
    }
}

struct Chunks {
    typedef act_call Call;
    struct Plan {
        Walk outer;
        ChunkPlan chunk;
    };

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        if (!views.all_slabs())
            return "length and inner dimensions have gaps";
        if (views.length() > MOST_LENGTH)
            return "lines are longer than 512 elements";
        if (views.inner() * rafter_dtype_bytes(call.out.dtype) >= 64 && views.column_width() > 1)
            return "columns are packs, which registers hold";
        if (views.elements() * rafter_dtype_bytes(call.out.dtype) > CHUNK_BYTES)
            return "slabs are larger than 16 KB";
        if (3 * (CHUNK_BYTES + 64) > device.shared_bytes)
            return "the GPU has too little shared memory";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.out.dtype)), width = 16 / bytes;
        ChunkPlan &chunk = plan->chunk;
        chunk = {};
        plan->outer = walk_over(views.pointer, 0, views.dim());
        chunk.slabs = views.slabs();
        chunk.elements = static_cast<int>(views.elements());
        chunk.length = static_cast<int>(views.length());
        chunk.inner = static_cast<int>(views.inner());
        bool all_dense = true;
        for (int t = 0; t < TENSORS; t++)
            if (views.pointer[t]) {
                chunk.dense[t] = views.is_dense(t);
                all_dense = all_dense && (chunk.dense[t] || t == OUT);
            }
        chunk.expanded = !is_forward(call) && !views.is_slab(DY);
        chunk.slots = ceil_div(chunk.elements + width - 1, width);
        while (ceil_div(chunk.length, 1 << chunk.lanes_log2) > STEPS)
            chunk.lanes_log2++;
        chunk.steps = ceil_div(chunk.length, 1 << chunk.lanes_log2);
        chunk.by_inner = Divisor(chunk.inner);
        chunk.by_slots = Divisor(chunk.slots);
        /* Lines that begin a multiple of 16 bytes apart share few banks. */
        chunk.rotate = chunk.inner == 1 && chunk.lanes_log2 < 5 && chunk.length * bytes % 16 == 0;
        /* As many slabs as fit, but enough chunks for all multiprocessors. */
        const int pitch = all_dense ? chunk.elements : chunk.slots * width;
        const int64_t fit = max(CHUNK_BYTES / (pitch * bytes), 1),
                      share = ceil_div(chunk.slabs, int64_t(device.multiprocessors) * 4);
        chunk.per_chunk = static_cast<int>(max(min(fit, share), int64_t(1)));
        chunk.bytes = round_up(max(chunk.per_chunk * pitch, chunk.per_chunk * chunk.elements) * bytes + 16, 16);
        return 0;
    }

    template <typename T, bool FORWARD>
    static void launch_as(rafter_context *context, const Call &call, const Plan &plan) {
        const auto end = [](const rafter_view &view) {
            return view.data ? reinterpret_cast<const T *>(view.data + rafter_span_bytes(&view)) : NULL;
        };
        const ChunkArgs<T> args = {reinterpret_cast<const T *>(call.in.data),
                                   reinterpret_cast<const T *>(call.dy.data),
                                   reinterpret_cast<T *>(call.out.data),
                                   end(call.in),
                                   end(call.dy),
                                   plan.outer,
                                   plan.chunk};
        const size_t shared = (FORWARD ? 2 : 3) * plan.chunk.bytes;
        ::launch(context, {ceil_div(plan.chunk.slabs, int64_t(plan.chunk.per_chunk)), CHUNK_THREADS, shared},
                 plan.chunk.rotate ? softmax_chunk<T, FORWARD, true> : softmax_chunk<T, FORWARD, false>, args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            is_forward(call) ? launch_as<T, true>(context, ordered.call, plan)
                             : launch_as<T, false>(context, ordered.call, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_chunks, Chunks)

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of short lines: rows, or interleaved lines ([outer, length, inner]) of short slabs.
 *
 * A block takes a chunk of whole slabs. It copies them to shared memory by aligned packs of 16
 * bytes, wherever lines begin. 1 to 32 lanes per line read the line from there into registers,
 * element by element. The results go through shared memory to the output, again by aligned packs.
 *
 * A block reads all elements that it writes before it writes, and uses no element that another
 * block writes: the output may be the input.
 */
#include <float.h>

#include "ops/act/cuda/softmax_layout.cuh"

namespace {

constexpr int CHUNK_THREADS = 256;
constexpr int STEPS = 16;      /* elements per lane, at most ... */
constexpr int MORE_STEPS = 32; /* ... and in the forward of 16-bit types: another kernel, which takes more registers */
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
    Divisor by_inner, by_slots, by_elements;
    /* Elements from one slab to the next, if a chunk is copied as one span, with the small gaps between
     * slabs; 0: each slab is copied by itself. For the output: only if there are no gaps, else 0. */
    int pitch[TENSORS];
    bool expanded; /* dy is one number per slab */
};

template <typename T> struct ChunkArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    const T *in_end, *dy_end; /* the end of each tensor's memory */
    Walk outer;
    ChunkPlan plan;
};

/* Copies the aligned pack at `from` to shared memory. If it reaches outside [low, high), copies only
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

/* One input's chunk in shared memory. */
template <typename T> struct ChunkInput {
    static constexpr int N = WIDE<T>;
    T *memory;
    const T *tensor;
    const Walk *outer;
    int64_t first;    /* slab of the chunk */
    int which, shift; /* IN or DY; if the chunk is one span, the offset of its first element in its pack */
    int close;        /* the plan's pitch of this input */
    int pitch;        /* elements from slab to slab in shared memory */

    /* Starts to copy `slabs` slabs. Packs at the ends of the chunk may reach into other chunks, but
     * never outside the tensor. */
    DEVICE void fill(const ChunkPlan &plan, int slabs, const T *end) {
        int64_t at[3];
        if (close > 0) {
            const T *const from = tensor + first * close;
            shift = offset_in_pack(from);
            pitch = close;
            const int packs = (shift + (slabs - 1) * close + plan.elements + N - 1) / N;
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
    /* The first element of the chunk's slab i, in shared memory. */
    DEVICE T *slab(int i) const {
        int own = shift;
        if (close == 0) {
            int64_t at[3];
            outer->offsets(first + i, at);
            own = offset_in_pack(tensor + at[which]);
        }
        return memory + i * pitch + own;
    }
};

/* Computes the lines of a chunk, STEPS elements per lane. A lane reads all of its elements before it
 * uses the first. Lanes past the end of a line read what follows the line, and ignore it. */
template <typename T, bool FORWARD, int STEPS>
DEVICE void softmax_of_lines(const ChunkArgs<T> &a, const ChunkInput<T> &in, const ChunkInput<T> &dy, T *results,
                             int lines) {
    const ChunkPlan &plan = a.plan;
    const int lanes = 1 << plan.lanes_log2, lane = threadIdx.x & (lanes - 1), apart = lanes * plan.inner;
    const bool partial = lane + (STEPS - 1) * lanes >= plan.length; /* the last step has no element of this lane */
    for (int base = 0; base < lines; base += CHUNK_THREADS >> plan.lanes_log2) {
        const int own = base + ((int)threadIdx.x >> plan.lanes_log2), line = min(own, lines - 1);
        const int slab = static_cast<int>(plan.by_inner.quotient(line)),
                  place = line - slab * plan.inner + lane * plan.inner;
        float v[STEPS], w[STEPS], max = -FLT_MAX, sum = 0.0f;
        const T *x = in.slab(slab) + place;
#pragma unroll
        for (int k = 0; k < STEPS; k++, x += apart)
            v[k] = to_float(*x);
        if (!FORWARD) {
            if (plan.expanded) {
                int64_t at[3];
                a.outer.offsets(in.first + slab, at);
                const float upstream = to_float(a.dy[at[DY]]);
#pragma unroll
                for (int k = 0; k < STEPS; k++)
                    w[k] = upstream;
            } else {
                const T *d = dy.slab(slab) + place;
#pragma unroll
                for (int k = 0; k < STEPS; k++, d += apart)
                    w[k] = to_float(*d);
            }
        }
        if (partial) {
            v[STEPS - 1] = FORWARD ? -INFINITY : 0.0f;
            w[STEPS - 1] = 0.0f;
        }
        if (FORWARD) {
#pragma unroll
            for (int k = 0; k < STEPS; k++)
                max = fmaxf(max, v[k]);
            for (int step = lanes / 2; step > 0; step /= 2)
                max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
        }
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            if (FORWARD)
                v[k] = exp_as<T>(v[k] - max);
            sum = FORWARD ? sum + v[k] : fmaf(v[k], w[k], sum);
        }
        for (int step = lanes / 2; step > 0; step /= 2)
            sum += __shfl_xor_sync(~0u, sum, step);
        if (own >= lines)
            continue;
        const float scale = NARROW<T> ? reciprocal_fast(sum) : 1.0f / sum; /* a sum is 1 or more, or 0, or NaN */
        T *to = results + slab * plan.elements + place;
#pragma unroll
        for (int k = 0; k < STEPS; k++, to += apart)
            if (k < STEPS - 1 || !partial)
                *to = from_float<T>(FORWARD ? v[k] * scale : v[k] * (w[k] - sum));
    }
}

/* Calls f with the number of steps, up to MOST, as a constant. */
template <int MOST, class F> DEVICE void with_steps(int steps, F f) {
    if constexpr (MOST > 1)
        if (steps < MOST)
            return with_steps<MOST - 1>(steps, f);
    f(std::integral_constant<int, MOST>());
}

/* A block per chunk, with up to MOST elements of a line per lane. */
template <typename T, bool FORWARD, int MOST>
__global__ void __launch_bounds__(CHUNK_THREADS, FORWARD ? 5 : 4)
    softmax_chunk(const __grid_constant__ ChunkArgs<T> a) {
    constexpr int N = WIDE<T>;
    DYNAMIC_SHARED(uint4, chunk_memory);
    char *const memory = reinterpret_cast<char *>(chunk_memory);
    const ChunkPlan &plan = a.plan;
    const int64_t first = (int64_t)blockIdx.x * plan.per_chunk;
    const int slabs = static_cast<int>(min(int64_t(plan.per_chunk), plan.slabs - first));

    wait_for_previous_kernel();
    ChunkInput<T> in = {reinterpret_cast<T *>(memory), a.in, &a.outer, first, IN, 0, plan.pitch[IN], 0};
    in.fill(plan, slabs, a.in_end);
    ChunkInput<T> dy = {reinterpret_cast<T *>(memory + plan.bytes), a.dy, &a.outer, first, DY, 0, plan.pitch[DY], 0};
    if (!FORWARD && !plan.expanded)
        dy.fill(plan, slabs, a.dy_end);
    copy_commit();
    T *const results = reinterpret_cast<T *>(memory + (FORWARD ? 1 : 2) * plan.bytes);
    T *const out = a.out + first * plan.elements; /* if without gaps */
    const int shift = plan.pitch[OUT] > 0 ? offset_in_pack(out) : 0;
    copy_wait<0>();
    __syncthreads();
    with_steps<MOST>(plan.steps, [&](auto steps) {
        softmax_of_lines<T, FORWARD, decltype(steps)::value>(a, in, dy, results + shift, slabs * plan.inner);
    });
    __syncthreads();

    const int end = shift + slabs * plan.elements;
    if (plan.pitch[OUT] == 0) {
        for (int i = threadIdx.x; i < end; i += CHUNK_THREADS) {
            const int slab = static_cast<int>(plan.by_elements.quotient(i));
            int64_t at[3];
            a.outer.offsets(first + slab, at);
            a.out[at[OUT] + i - slab * plan.elements] = results[i];
        }
        return;
    }
    for (int i = threadIdx.x; i * N < end; i += CHUNK_THREADS) {
        const Pack<T, N> pack = reinterpret_cast<const Pack<T, N> *>(results)[i];
        if (i * N >= shift && (i + 1) * N <= end) {
            store_once(out - shift + i * N, pack);
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                if (i * N + j >= shift && i * N + j < end)
                    out[i * N + j - shift] = pack.v[j];
        }
    }
}

struct Chunks {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true; /* of rows: the number of lanes depends on their length alone */
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
        if (views.length() > MOST_CHUNKED_LENGTH)
            return "lines are longer than 512 elements";
        if (call.common.batch_invariant && !dim_is_contiguous(call))
            return "dim is strided: lines would share lanes as their neighbours allow";
        if (views.inner() * rafter_dtype_bytes(call.out.dtype) >= 64 && views.column_width() > 1)
            return "columns are packs, which registers hold";
        if (views.elements() * rafter_dtype_bytes(call.out.dtype) > CHUNK_BYTES)
            return "slabs are larger than 16 KB";
        if (4 * CHUNK_BYTES > device.shared_bytes)
            return "the GPU has too little shared memory";
        return NULL;
    }

    /* See ChunkPlan::pitch. */
    static int pitch_of(const SlabViews &views, int t) {
        const int64_t elements = views.elements(), most = t == OUT ? elements : elements + elements / 4 + 8;
        if (!views.is_slab(t) || views.dim() != 1)
            return 0;
        const int64_t pitch = views.slabs() == 1 ? elements : views.view[t].stride[0];
        return static_cast<int>(pitch >= elements && pitch <= most ? pitch : 0);
    }

    /* The worst bank conflict when each lane of a warp reads an element: how many words of one bank of shared
     * memory that takes. `pitch`: elements from one slab to the next. */
    static int most_in_a_bank(const ChunkPlan &chunk, int bytes, int pitch) {
        int count[WARP] = {}, last[WARP], most = 0;
        for (int t = 0; t < WARP; t++) {
            const int line = t >> chunk.lanes_log2, lane = t & ((1 << chunk.lanes_log2) - 1);
            const int word = (line / chunk.inner * pitch + line % chunk.inner + lane * chunk.inner) * bytes / 4;
            const int bank = word % WARP;
            if (count[bank] == 0 || last[bank] != word)
                most = max(most, ++count[bank]);
            last[bank] = word;
        }
        return most;
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
        chunk.expanded = !is_forward(call) && !views.is_slab(DY);
        chunk.slots = ceil_div(chunk.elements + width - 1, width);
        int pitch = chunk.elements; /* in shared memory, of the input with the largest one */
        for (int t = 0; t < TENSORS; t++)
            if (views.pointer[t]) {
                chunk.pitch[t] = pitch_of(views, t);
                if (t != OUT && !(t == DY && chunk.expanded))
                    pitch = max(pitch, chunk.pitch[t] > 0 ? chunk.pitch[t] : chunk.slots * width);
            }
        const int most = is_forward(call) && bytes == 2 ? MORE_STEPS : STEPS;
        const bool by_length = call.common.batch_invariant;
        const int distance = chunk.pitch[IN] > 0 && !by_length ? chunk.pitch[IN] : chunk.elements;
        while (ceil_div(chunk.length, 1 << chunk.lanes_log2) > most ||
               (chunk.lanes_log2 < 4 && most_in_a_bank(chunk, bytes, distance) > 2))
            chunk.lanes_log2++;
        chunk.by_inner = Divisor(chunk.inner);
        chunk.by_slots = Divisor(chunk.slots);
        chunk.by_elements = Divisor(chunk.elements);
        /* As many slabs per chunk as fit, but enough chunks for all multiprocessors. */
        const int64_t fit = max(CHUNK_BYTES / (pitch * bytes), 1),
                      share = ceil_div(chunk.slabs, int64_t(device.multiprocessors) * 4);
        chunk.per_chunk = static_cast<int>(max(min(fit, share), int64_t(1)));
        const int lines = chunk.per_chunk * chunk.inner;
        while (!by_length && lines << (chunk.lanes_log2 + 1) <= CHUNK_THREADS && 4 << chunk.lanes_log2 < chunk.length &&
               chunk.lanes_log2 < 5) /* few lines: lanes would idle */
            chunk.lanes_log2++;
        chunk.steps = ceil_div(chunk.length, 1 << chunk.lanes_log2);
        const int at_a_time = CHUNK_THREADS >> chunk.lanes_log2;
        if (lines > at_a_time) /* all lanes busy in the last round too */
            chunk.per_chunk = max(lines / at_a_time * at_a_time / chunk.inner, 1);
        /* Lanes read past the end of a line: up to as many elements as there are lanes. */
        const int slack = 16 + (chunk.inner << chunk.lanes_log2) * bytes;
        chunk.bytes = round_up(chunk.per_chunk * pitch * bytes + slack, 16);
        return 0;
    }

    template <typename T, bool FORWARD>
    static void launch_as(rafter_context *context, const OrderedCall &ordered, const Plan &plan) {
        const Call &call = ordered.call;
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
        Launch how = {ceil_div(plan.chunk.slabs, int64_t(plan.chunk.per_chunk)), CHUNK_THREADS};
        how.shared = (FORWARD ? 2 : 3) * plan.chunk.bytes;
        auto kernel = softmax_chunk<T, FORWARD, STEPS>;
        if constexpr (FORWARD && NARROW<T>)
            if (plan.chunk.steps > STEPS)
                kernel = softmax_chunk<T, FORWARD, MORE_STEPS>;
        ::launch(context, how, kernel, args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        for_dtype_and_direction(call, [&](auto zero, auto forward) {
            launch_as<decltype(zero), decltype(forward)::value>(context, ordered, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_chunks, Chunks)

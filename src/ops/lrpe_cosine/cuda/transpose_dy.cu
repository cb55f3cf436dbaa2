/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward of lrpe_cosine with a large dy whose features are not adjacent, but whose heads, tokens or sequences
 * are. (`staged` takes adjacent heads as they are, unless f is a softmax.) dy is cut into slices of sequences. Each
 * slice is copied into the workspace with adjacent features (turned), and another variant computes it from there.
 * Slices are small enough to stay in L2 in between. But if dtheta is wanted, which is a sum over all sequences, there
 * is only one slice.
 */
#include "cuda/elementwise.cuh"
#include "ops/lrpe_cosine/cuda/problem.cuh"

extern "C" {
extern const struct rafter_variant_functions rafter_cuda_lrpe_cosine_staged, rafter_cuda_lrpe_cosine_rotate,
    rafter_cuda_lrpe_cosine_feature_softmax, rafter_cuda_lrpe_cosine_long_feature_softmax,
    rafter_cuda_lrpe_cosine_sequence_softmax, rafter_cuda_lrpe_cosine_transpose_dy;
}

namespace {

/* Measured: docs/perf/lrpe_cosine.md. */
constexpr int64_t LEAST_BYTES = 8 << 20, SLICE_BYTES = 32 << 20; /* of dy; of a slice of it */
constexpr int64_t LEAST_SIDE = 32, LEAST_SEQUENCES = 2;          /* elements along both dimensions that are swapped */

const lrpe_cosine_call &typed(const struct rafter_call *call) {
    return *reinterpret_cast<const lrpe_cosine_call *>(call);
}

/* How a call is cut into slices of sequences. */
struct Slices {
    const lrpe_cosine_call &call;
    int64_t count, each; /* sequences in all; sequences per slice */

    explicit Slices(const lrpe_cosine_call &of) : call(of), count(of.dy.shape[0]), each(count) {
        if (!call.dtheta.data)
            each = max(min(SLICE_BYTES / bytes_of(1), count), int64_t(1));
    }
    int64_t bytes_of(int64_t sequences) const { /* of dy */
        return call.dy.numel / count * sequences * rafter_dtype_bytes(call.dy.dtype);
    }
    size_t copy_bytes() const {
        return static_cast<size_t>(round_up(bytes_of(each), int64_t(256)));
    }
    /* The given sequences of a view. */
    static rafter_view part(rafter_view view, int64_t first, int64_t sequences) {
        if (!view.data)
            return view;
        view.data = rafter_at(&view, first * view.stride[0]);
        view.numel = view.numel / view.shape[0] * sequences;
        view.shape[0] = sequences;
        return view;
    }
    /* The call for a slice, with dy as it is. */
    lrpe_cosine_call slice(int64_t first, int64_t sequences) const {
        lrpe_cosine_call slice = call;
        slice.x = part(call.x, first, sequences);
        slice.dx = part(call.dx, first, sequences);
        slice.dy = part(call.dy, first, sequences);
        slice.positions = part(call.positions, first, sequences);
        return slice;
    }
    /* The view of a copy of dy, without gaps, at `memory`. */
    static rafter_view turned(rafter_view dy, char *memory) {
        dy.data = memory;
        for (int64_t d = dy.ndim - 1, step = 1; d >= 0; step *= dy.shape[d--])
            dy.stride[d] = step;
        return dy;
    }
};

/* The variant that computes the slices; NULL: none does. It is the same for any address of the workspace, because that
 * is aligned. */
const struct rafter_variant_functions *taker(const rafter_context *context, const lrpe_cosine_call &slice) {
    for (const auto *functions :
         {&rafter_cuda_lrpe_cosine_staged, &rafter_cuda_lrpe_cosine_rotate, &rafter_cuda_lrpe_cosine_feature_softmax,
          &rafter_cuda_lrpe_cosine_long_feature_softmax, &rafter_cuda_lrpe_cosine_sequence_softmax})
        if (!functions->why_not || !functions->why_not(context, &slice.common))
            return functions;
    return NULL;
}

/* A slice with a made-up aligned address of the turned dy, to ask variants before there is a workspace. */
lrpe_cosine_call example(const Slices &slices, int64_t sequences) {
    lrpe_cosine_call slice = slices.slice(0, sequences);
    slice.dy = Slices::turned(slice.dy, reinterpret_cast<char *>(uintptr_t(256)));
    return slice;
}

const char *why_not(const rafter_context *context, const struct rafter_call *common) {
    const lrpe_cosine_call &call = typed(common);
    if (call.common.direction == RAFTER_FORWARD || call.x.numel == 0)
        return "not a backward call, or x is empty";
    if (lrpe::is_turned(call) && !rafter_cuda_lrpe_cosine_staged.why_not(context, common))
        return "another variant takes dy as it is";
    if (call.common.batch_invariant)
        return "it is not batch invariant: it turns large gradients only";
    const rafter_view &dy = call.dy;
    bool turns = false;
    for (int d = 0; d < 3; d++)
        turns = turns || (dy.stride[d] == 1 && dy.shape[d] >= LEAST_SIDE);
    if (dy.stride[3] <= 1 || dy.shape[3] < LEAST_SIDE || !turns)
        return "the features of dy are adjacent, or no other dimension of 32 is";
    if (dy.shape[0] < LEAST_SEQUENCES)
        return "few sequences: their angles take longer than their gradients";
    if (dy.numel * rafter_dtype_bytes(dy.dtype) < LEAST_BYTES)
        return "dy is small";
    const Slices slices(call);
    return taker(context, example(slices, slices.each)) ? NULL : "no other variant takes the call";
}

size_t plan(const rafter_context *context, const struct rafter_call *common, void *) {
    const Slices slices(typed(common));
    size_t most = 0; /* workspace that a slice takes: the larger of a whole one and the last one */
    for (int64_t sequences : {slices.each, slices.count % slices.each})
        if (sequences > 0) {
            const lrpe_cosine_call slice = example(slices, sequences);
            struct rafter_plan plan;
            most = max(most, taker(context, slice)->plan(context, &slice.common, plan.own.storage));
        }
    return slices.copy_bytes() + most;
}

rafter_status run(rafter_context *context, const struct rafter_call *common, const void *, const void *,
                  char *workspace) {
    const Slices slices(typed(common));
    const struct rafter_variant_functions *const functions = taker(context, example(slices, slices.each));
    for (int64_t first = 0; first < slices.count; first += slices.each) {
        lrpe_cosine_call slice = slices.slice(first, min(slices.each, slices.count - first));
        rafter_view from = slice.dy, to = Slices::turned(slice.dy, workspace), *views[] = {&from, &to};
        slice.dy = to;
        rafter_order_by_stride(views, 2, &to, to.ndim);
        rafter_collapse(views, 2, 0, to.ndim);
        for_dtype(to.dtype, [&](auto zero) {
            elementwise::launch_all<decltype(zero)>(context, elementwise::Views<1>{{to, from}}, elementwise::Copy(),
                                                    INT32_MAX);
        });
        struct rafter_plan plan;
        functions->plan(context, &slice.common, plan.own.storage);
        RAFTER_TRY(functions->run(context, &slice.common, plan.own.storage, NULL, workspace + slices.copy_bytes()));
    }
    return RAFTER_OK;
}

} // namespace

extern "C" const struct rafter_variant_functions rafter_cuda_lrpe_cosine_transpose_dy = {why_not, plan, run};

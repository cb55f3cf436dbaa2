/* SPDX-License-Identifier: Apache-2.0 */
/* What elementwise_flat and elementwise_strided share: kernel arguments and the arithmetic on packs. */
#ifndef RAFTER_ACT_CUDA_ELEMENTWISE_CUH
#define RAFTER_ACT_CUDA_ELEMENTWISE_CUH

#include "cuda/activations.cuh"
#include "ops/act/cuda/problem.cuh"

namespace {

template <typename T> struct ElementwiseArgs {
    const T *in, *dy;
    T *out;

    explicit ElementwiseArgs(const act_call &call)
        : in(reinterpret_cast<const T *>(input_of(call).data)), dy(reinterpret_cast<const T *>(call.dy.data)),
          out(reinterpret_cast<T *>(call.out.data)) {
    }
};

template <bool FORWARD, typename T, int N>
DEVICE Pack<T, N> activate(rafter_act_kind kind, const Pack<T, N> &in, const Pack<T, N> &dy) {
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

} // namespace

#endif

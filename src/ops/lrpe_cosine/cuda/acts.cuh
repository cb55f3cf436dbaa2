/* SPDX-License-Identifier: Apache-2.0 */
/* f (the activation) of several elements, for kernels that find out at run time which f the call has. There is one
 * branch for all elements, so that their exponentials are computed side by side. */
#ifndef RAFTER_LRPE_COSINE_CUDA_ACTS_CUH
#define RAFTER_LRPE_COSINE_CUDA_ACTS_CUH

#include <type_traits>

#include "cuda/activations.cuh"
#include "ops/lrpe_cosine/cuda/problem.cuh"

namespace lrpe {

/* Calls with(f as a compile-time constant). Does nothing if f is RAFTER_ACT_NONE or a softmax. */
template <class With> DEVICE void for_act(int f, With with) {
    if (f == RAFTER_ACT_RELU)
        with(std::integral_constant<int, RAFTER_ACT_RELU>());
    else if (f == RAFTER_ACT_SIGMOID)
        with(std::integral_constant<int, RAFTER_ACT_SIGMOID>());
    else if (f == RAFTER_ACT_SILU)
        with(std::integral_constant<int, RAFTER_ACT_SILU>());
}

/* Replaces v by f(x). v is x; or if f is a softmax, v is p / scale, where p is its result. */
template <typename T, int N> DEVICE void activate_all(int f, float scale, float (&v)[N]) {
    if (f >= LANE_SOFTMAX) {
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] *= scale;
        return;
    }
    for_act(f, [&](auto kind) {
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = act_forward<T>(static_cast<rafter_act_kind>(kind.value), v[j]);
    });
}

/* For any f but a softmax: replaces g, the gradient of f(x), by the gradient of x; and if VALUES, x by f(x). */
template <bool VALUES, typename T, int N> DEVICE void differentiate_all(int f, float (&x)[N], float (&g)[N]) {
    for_act(f, [&](auto kind_constant) {
        constexpr auto kind = static_cast<rafter_act_kind>(decltype(kind_constant)::value);
#pragma unroll
        for (int j = 0; j < N; j++) {
            g[j] = act_backward<T>(kind, x[j], g[j]);
            if constexpr (VALUES)
                x[j] = act_forward<T>(kind, x[j]);
        }
    });
}

} // namespace lrpe

#endif

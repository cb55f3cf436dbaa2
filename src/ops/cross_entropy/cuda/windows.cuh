/* SPDX-License-Identifier: Apache-2.0 */
/* How tiles.cu takes long rows side by side by windows of packs (cuda/slab_windows.cuh). */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_WINDOWS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_WINDOWS_CUH

#include "cuda/slab_windows.cuh"
#include "ops/cross_entropy/cuda/general.cuh"

namespace {

/* Rows per thread, which keeps the statistics of all of them in registers. */
template <typename T, int OPTIONS> constexpr int WINDOW_ELEMENTS = OPTIONS == FULL ? 4 : WIDE<T>;

/* `full` must agree with GeneralPlan::options. */
inline WindowChoice window_choice(const cross_entropy_call &call) {
    const struct rafter_loss &l = call.loss;
    const bool full = (l.smoothing != 0.0f && l.class_weight.data) || l.entropy.data || l.argmax.data;
    const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
    return {bytes, full ? 4 : 16 / bytes, !full};
}

} // namespace

#endif

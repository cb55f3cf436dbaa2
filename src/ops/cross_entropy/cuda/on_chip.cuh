/* SPDX-License-Identifier: Apache-2.0 */
/* For basic_on_chip.cu and on_chip.cu: which blocks keep a whole row on chip from its statistics to its gradient. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_ON_CHIP_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_ON_CHIP_CUH

#include "ops/cross_entropy/cuda/problem.cuh"

namespace {

/* Each thread keeps IN_REGISTERS packs of the row in registers; the other packs are in shared
 * memory, filled by cp.async in groups of COPIED packs per thread. */
template <int MOST_THREADS, int BLOCKS_PER_SM, int PACKS_IN_REGISTERS, int PACKS_COPIED> struct Shape {
    static constexpr int THREADS = MOST_THREADS, PER_SM = BLOCKS_PER_SM, IN_REGISTERS = PACKS_IN_REGISTERS,
                         COPIED = PACKS_COPIED;
};
/* From short rows to long ones. */
typedef Shape<256, 6, 2, 2> SixPerSm; /* basic calls only */
typedef Shape<512, 3, 2, 2> ThreePerSm;
typedef Shape<512, 2, 4, 4> TwoPerSm;
typedef Shape<512, 1, 4, 4> OnePerSm;
typedef Shape<1024, 1, 4, 4> Largest; /* for rows that need all registers of the SM; not for basic calls */

struct Fit {
    int shape; /* index in the list of shapes */
    int threads;
    size_t shared; /* dynamic shared memory, in bytes */
};

/* Whether a row of `packs` packs fits into a block of the shape. full_blocks: always with
 * Shape::THREADS threads; otherwise short rows take fewer. */
template <class Shape> bool fits(const rafter_cuda_state &device, int64_t packs, bool full_blocks, Fit *fit) {
    const int64_t own = 2 << 10, reserved = 1 << 10; /* shared memory per block: static; reserved by CUDA */
    fit->threads = full_blocks ? Shape::THREADS : power_at_least(packs / 8, 64, Shape::THREADS);
    fit->shared = static_cast<size_t>(max(packs - Shape::IN_REGISTERS * fit->threads, int64_t(0)) * 16);
    return int64_t(fit->shared) <= (device.shared_bytes + reserved) / Shape::PER_SM - reserved - own;
}

/* The first shape that the row fits into. False: none. */
template <class... Shapes> bool find_shape(const rafter_cuda_state &device, int64_t packs, bool full_blocks, Fit *fit) {
    fit->shape = -1;
    return (... || (fit->shape++, fits<Shapes>(device, packs, full_blocks, fit)));
}

/* Why a row per block, kept on chip, does not serve the call, apart from the length of its rows. */
inline const char *why_not_on_chip(const rafter_cuda_state &device, const Problem &p) {
    if (!p.gradient)
        return "no gradient is wanted";
    if (p.lse_given)
        return "lse is given: no statistics are needed";
    if (p.invariant)
        return p.whole_packs && p.row_packs() > INVARIANT_PACKS ? NULL : "rows are short, or not whole, aligned packs";
    /* Few long rows are faster in parts (two_pass.cu). Rows that are not whole packs already are if they are more. */
    if (!p.whole_packs && 2 * p.rows < device.multiprocessors)
        return "there are fewer rows than half the multiprocessors, and they are not whole, aligned packs";
    return 4 * p.rows < device.multiprocessors && p.row_bytes > 128 << 10 ? "rows are few and long" : NULL;
}

} // namespace

#endif

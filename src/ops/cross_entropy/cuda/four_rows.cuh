/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels in which a thread takes four rows (cuda/column_packs.cuh) load and store besides the logits: labels,
 * lse, losses and dloss. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_FOUR_ROWS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_FOUR_ROWS_CUH

#include "cuda/column_packs.cuh"
#include "ops/cross_entropy/cuda/basic.cuh"

namespace {

/* The labels of four rows: loaded, then turned into classes. */
template <typename T, bool LOOSE> struct FourLabels {
    int64_t loaded[ROWS_PER_THREAD];

    DEVICE FourLabels(const BasicArgs &u, const FourRows<T, LOOSE> &place) {
        const int row = place.row;
        if constexpr (LOOSE) {
#pragma unroll
            for (int j = 0; j < ROWS_PER_THREAD; j++)
                loaded[j] = place.has(j) ? u.load_label(row + place.apart(j)) : u.ignore_index;
        } else if (u.wide_labels) {
            const longlong2 *const from =
                reinterpret_cast<const longlong2 *>(static_cast<const int64_t *>(u.labels) + row);
            const longlong2 a = from[0], b = from[1];
            loaded[0] = a.x, loaded[1] = a.y, loaded[2] = b.x, loaded[3] = b.y;
        } else {
            const int4 a = *reinterpret_cast<const int4 *>(static_cast<const int *>(u.labels) + row);
            loaded[0] = a.x, loaded[1] = a.y, loaded[2] = a.z, loaded[3] = a.w;
        }
    }
    DEVICE void classes(const BasicArgs &u, int (&label)[ROWS_PER_THREAD]) const {
#pragma unroll
        for (int j = 0; j < ROWS_PER_THREAD; j++)
            label[j] = u.class_of(loaded[j]);
    }
};

/* Writes lse and the loss of four rows, where they are wanted. row_losses: the output of reduction none, or NULL. */
template <typename T, bool LOOSE>
DEVICE void put_four(const FourRows<T, LOOSE> &place, const BasicArgs &u, float *row_losses,
                     const float (&loss)[ROWS_PER_THREAD], const float (&lse)[ROWS_PER_THREAD]) {
    if (u.lse)
        place.store(u.lse + place.row, packed<float>(lse));
    if (u.row_loss)
        place.store(u.row_loss + place.row, packed<float>(loss));
    if (row_losses)
        place.store(row_losses + place.row, packed<float>(loss));
}

/* What gradients of four rows need: lse, or INFINITY if it is not given; and dloss, or 1. */
struct FourUpstream {
    float lse[ROWS_PER_THREAD], dloss[ROWS_PER_THREAD];

    template <typename T, bool LOOSE>
    DEVICE FourUpstream(const FourRows<T, LOOSE> &place, const float *all_lse, const float *row_dlosses)
        : lse{INFINITY, INFINITY, INFINITY, INFINITY}, dloss{1.0f, 1.0f, 1.0f, 1.0f} {
        if (all_lse)
            unpack(place.load_numbers(all_lse + place.row), lse);
        if (row_dlosses)
            unpack(place.load_numbers(row_dlosses + place.row), dloss);
    }
};

/* Whether a thread can access its four rows' numbers in a tensor of one number per row: as 16 aligned bytes, or one
 * by one if the rows are loose. */
inline bool in_fours(const rafter_view &view, bool loose) {
    return contiguous_or_missing(view) && (loose || reinterpret_cast<uintptr_t>(view.data) % 16 == 0);
}

/* Why the tensors of one number per row cannot be accessed four at a time, or NULL. any_dloss: see why_not_options. */
inline const char *why_not_in_fours(const Problem &p, const cross_entropy_call &call, bool loose,
                                    bool any_dloss = false) {
    const struct rafter_loss &l = call.loss;
    const bool each = l.reduction == RAFTER_NONE, one_dloss = any_dloss || is_one_number(l.dloss);
    const rafter_view &numbers = p.forward ? l.loss : l.dloss;
    return in_fours(l.target, loose) && in_fours(l.lse, loose) && in_fours(l.row_loss, loose) &&
                   (!each || in_fours(numbers, loose) || (!p.forward && one_dloss))
               ? NULL
               : "numbers of four rows cannot be accessed at once";
}

} // namespace

#endif

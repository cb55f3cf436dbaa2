/* SPDX-License-Identifier: Apache-2.0 */
/* The numbers of four rows that a thread takes (cuda/column_packs.cuh): their labels, and whether others can be
 * accessed at once. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_FOUR_ROWS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_FOUR_ROWS_CUH

#include "cuda/column_packs.cuh"
#include "ops/cross_entropy/cuda/basic.cuh"

namespace {

/* The classes of four rows. */
template <typename T, bool LOOSE> struct FourLabels {
    int64_t loaded[COLUMNS];

    DEVICE FourLabels(const BasicArgs &u, const PlacedColumns<T, LOOSE> &place) {
        const int row = place.row;
        if constexpr (LOOSE) {
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
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
    DEVICE void classes(const BasicArgs &u, int (&label)[COLUMNS]) const {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            label[j] = u.class_of(loaded[j]);
    }
};

/* Whether four numbers of a tensor, one per row, can be accessed: at once, unless the rows are loose. */
inline bool in_fours(const rafter_view &view, bool loose) {
    return contiguous_or_missing(view) && (loose || reinterpret_cast<uintptr_t>(view.data) % 16 == 0);
}

/* Why the numbers of a call's rows are not for four at a time, or NULL. */
inline const char *why_not_in_fours(const Problem &p, const cross_entropy_call &call, bool loose) {
    const struct rafter_loss &l = call.loss;
    const bool each = l.reduction == RAFTER_NONE, one_dloss = is_one_number(l.dloss);
    const rafter_view &numbers = p.forward ? l.loss : l.dloss;
    return in_fours(l.target, loose) && in_fours(l.lse, loose) && in_fours(l.row_loss, loose) &&
                   (!each || in_fours(numbers, loose) || (!p.forward && one_dloss))
               ? NULL
               : "numbers of four rows cannot be accessed at once";
}

} // namespace

#endif

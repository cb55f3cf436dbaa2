/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels of elementwise.cuh work on: the tensors, walks over their dimensions, packs of the inputs. */
#ifndef RAFTER_CUDA_ELEMENTWISE_OPERANDS_CUH
#define RAFTER_CUDA_ELEMENTWISE_OPERANDS_CUH

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/unaligned_pack.cuh"
#include "cuda/view_layout.cuh"

namespace elementwise {

/* The output, then the inputs. */
template <int INPUTS> struct Tensors {
    char *data[1 + INPUTS];
    const char *end[1 + INPUTS]; /* past the last element */
    int64_t inner[1 + INPUTS];   /* strides of the last dimension; 0: expanded */
    int64_t across[1 + INPUTS];  /* by_tiles: strides of the other dimension, along which an input is contiguous */

    template <typename T> DEVICE T *output() const {
        return reinterpret_cast<T *>(data[0]);
    }
    template <typename T> DEVICE const T *input(int i) const {
        return reinterpret_cast<const T *>(data[1 + i]);
    }
    template <typename T> DEVICE const T *past(int i) const {
        return reinterpret_cast<const T *>(end[1 + i]);
    }
};

template <typename T> DEVICE Pack<T, WIDE<T>> all_same(T value) {
    Pack<T, WIDE<T>> same;
#pragma unroll
    for (int j = 0; j < WIDE<T>; j++)
        same.v[j] = value;
    return same;
}

/* A pack of an input that is being loaded: adjacent elements, or one element that is expanded. load() issues the loads,
 * get() waits for them. PACKED: the pack is aligned. */
template <typename T, bool PACKED> struct Operand {
    /* load() already makes the pack, so that it must be kept, not its parts: see UnalignedPack<float>. */
    static constexpr bool AT_ONCE = PACKED || !NARROW<T>;
    typename std::conditional<AT_ONCE, Pack<T, WIDE<T>>, UnalignedPack<T>>::type pack;
    Pack<T, 1> one; /* the expanded element, unless AT_ONCE */

    template <int INPUTS> DEVICE void load(const Tensors<INPUTS> &tensors, int t, const T *row, int64_t column) {
        const bool expanded = tensors.inner[1 + t] == 0;
        const T *const begin = tensors.template input<T>(t), *const end = tensors.template past<T>(t);
        if constexpr (!AT_ONCE) {
            if (expanded)
                one = load_once<T, 1>(row);
            else
                pack.load(true, row + column, begin, end);
        } else if (expanded) {
            pack = all_same(*row);
        } else if constexpr (PACKED) {
            pack = load_once<T, WIDE<T>>(row + column);
        } else {
            UnalignedPack<T> anywhere;
            anywhere.load(true, row + column, begin, end);
            pack = anywhere.get(begin, end);
        }
    }
    template <int INPUTS> DEVICE Pack<T, WIDE<T>> get(const Tensors<INPUTS> &tensors, int t) const {
        if constexpr (AT_ONCE)
            return pack;
        else
            return tensors.inner[1 + t] == 0 ? all_same(one.v[0])
                                             : pack.get(tensors.template input<T>(t), tensors.template past<T>(t));
    }
};

/* All dimensions but the last one (by_tiles: two), outermost first. DIMS: their number if it is known at compile time,
 * else ANY. */
constexpr int ANY = 0;
template <int INPUTS> struct Outer {
    int dims;
    Divisor size[RAFTER_VIEW_DIMS];
    int64_t stride[RAFTER_VIEW_DIMS][1 + INPUTS];

    /* Offsets, in elements, of the index-th combination. */
    template <int DIMS> DEVICE void offsets(unsigned index, int64_t (&at)[1 + INPUTS]) const {
        for (int t = 0; t <= INPUTS; t++)
            at[t] = 0;
        if constexpr (DIMS == ANY) {
#pragma unroll 1
            for (int d = dims - 1; d > 0; d--)
                index = step(d, index, at);
        } else {
#pragma unroll
            for (int d = DIMS - 1; d > 0; d--)
                index = step(d, index, at);
        }
#pragma unroll
        for (int t = 0; t <= INPUTS; t++)
            at[t] += index * stride[0][t];
    }
    DEVICE unsigned step(int d, unsigned index, int64_t (&at)[1 + INPUTS]) const {
        const unsigned outer = size[d].quotient(index), within = index - outer * size[d].number;
#pragma unroll
        for (int t = 0; t <= INPUTS; t++)
            at[t] += within * stride[d][t];
        return outer;
    }
};

} // namespace elementwise

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Tensor maps: descriptions of tensors in global memory for Hopper's copy engine, made on the
 * host. */
#ifndef RAFTER_CUDA_TENSOR_MAP_CUH
#define RAFTER_CUDA_TENSOR_MAP_CUH

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>

#include "core/tensor.h"

/* Makes the map of a tensor with `dims` dimensions, innermost first. The innermost one is contiguous; stride[d], in
 * elements, is that of dimension d + 1. Copies take boxes of box[0] x box[1] x 1 x ... elements; elements outside of
 * the tensor read as 0. Returns false if the driver cannot make the map. */
static inline bool make_tensor_map(CUtensorMap *map, rafter_dtype dtype, const void *data, int dims,
                                   const int64_t *size, const int64_t *stride, const int (&box)[2],
                                   CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                               const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                               CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static std::atomic<Encode> known{NULL};
    Encode encode = known.load(std::memory_order_relaxed);
    if (!encode) {
        void *function = NULL;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
                cudaSuccess ||
            found != cudaDriverEntryPointSuccess) {
            cudaGetLastError(); /* clear it: the next call must not report it */
            return false;
        }
        encode = reinterpret_cast<Encode>(function);
        known.store(encode, std::memory_order_relaxed);
    }
    cuuint64_t sizes[5], bytes[5];
    cuuint32_t boxes[5], steps[5];
    for (int d = 0; d < dims; d++) {
        sizes[d] = static_cast<cuuint64_t>(size[d]);
        bytes[d] = d + 1 < dims ? static_cast<cuuint64_t>(stride[d] * rafter_dtype_bytes(dtype)) : 0;
        boxes[d] = d < 2 ? static_cast<cuuint32_t>(box[d]) : 1;
        steps[d] = 1;
    }
    const CUtensorMapDataType type = dtype == RAFTER_F32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : dtype == RAFTER_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return encode(map, type, static_cast<cuuint32_t>(dims), const_cast<void *>(data), sizes, bytes, boxes, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

#endif

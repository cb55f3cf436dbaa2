/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's tensor maps: see emulator.h. */
#ifndef RAFTER_TESTS_EMULATOR_CUDA_H
#define RAFTER_TESTS_EMULATOR_CUDA_H

#include <stdint.h>

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
    char *data;
    cuuint64_t size[5], stride[5]; /* innermost first; stride[d], in bytes, is that of dimension d + 1 */
    cuuint32_t box[5], dims;
    CUtensorMapDataType type;
    CUtensorMapSwizzle swizzle;
};

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The few functions of cuBLASLt that products.cu calls. They are declared here so that the build needs
 * neither cuBLASLt's headers nor the library: it is loaded at the first matrix product. The numbers are
 * cuBLASLt's ABI, the same in versions 12 and 13.
 */
#ifndef RAFTER_CUDA_CUBLASLT_H
#define RAFTER_CUDA_CUBLASLT_H

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <stddef.h>
#include <stdint.h>

typedef int LtStatus; /* 0: success */
typedef struct LtHandle_ *LtHandle;
typedef struct LtOperation_ *LtOperation;
typedef struct LtLayout_ *LtLayout;
typedef struct LtPreference_ *LtPreference;

struct LtAlgorithm {
    uint64_t opaque[8];
};

struct LtCandidate {
    LtAlgorithm algorithm;
    size_t workspace_bytes;
    LtStatus status;
    float waves;
    int reserved[4];
};

enum LtComputeType { LT_COMPUTE_F32 = 68, LT_COMPUTE_F32_BY_TF32 = 77 };
enum LtOperationAttribute { LT_POINTER_MODE = 2, LT_TRANSPOSE_A = 3, LT_TRANSPOSE_B = 4 }; /* each an int32 */
enum { LT_SCALARS_ON_HOST = 0, LT_SCALARS_ON_DEVICE = 1 };
enum LtPreferenceAttribute {
    LT_MOST_WORKSPACE = 1,     /* uint64: bytes */
    LT_REDUCTIONS_ALLOWED = 3, /* uint32: a mask */
    LT_ALIGNMENT_A = 5,        /* uint32: bytes. Those of B, C and D are 6, 7 and 8 */
    LT_ALIGNMENT_D = 8
};
enum { LT_REDUCE_IN_F32 = 2 }; /* split-k: parts of a sum are stored in the workspace and added in a fixed order */
enum LtAlgorithmAttribute {
    LT_ID,
    LT_TILE,
    LT_SPLIT,
    LT_REDUCTION,
    LT_SWIZZLE,
    LT_CUSTOM,
    LT_STAGES,
    LT_INNER,
    LT_CLUSTER
};

enum { LT_COOPERATIVE = 4 }; /* on Hopper, kernels with LT_CUSTOM >= this are cooperative: see built_in_choice */

struct LtFunctions {
    LtStatus (*cublasLtCreate)(LtHandle *handle);
    LtStatus (*cublasLtDestroy)(LtHandle handle);
    LtStatus (*cublasLtMatmulDescCreate)(LtOperation *operation, int compute, cudaDataType_t scalars);
    LtStatus (*cublasLtMatmulDescDestroy)(LtOperation operation);
    LtStatus (*cublasLtMatmulDescSetAttribute)(LtOperation operation, LtOperationAttribute attribute, const void *value,
                                               size_t bytes);
    LtStatus (*cublasLtMatrixLayoutCreate)(LtLayout *layout, cudaDataType_t type, uint64_t rows, uint64_t columns,
                                           int64_t leading);
    LtStatus (*cublasLtMatrixLayoutDestroy)(LtLayout layout);
    LtStatus (*cublasLtMatmulPreferenceCreate)(LtPreference *preference);
    LtStatus (*cublasLtMatmulPreferenceDestroy)(LtPreference preference);
    LtStatus (*cublasLtMatmulPreferenceSetAttribute)(LtPreference preference, LtPreferenceAttribute attribute,
                                                     const void *value, size_t bytes);
    LtStatus (*cublasLtMatmulAlgoGetHeuristic)(LtHandle handle, LtOperation operation, LtLayout a, LtLayout b,
                                               LtLayout c, LtLayout d, LtPreference preference, int wanted,
                                               LtCandidate *found, int *count);
    LtStatus (*cublasLtMatmulAlgoConfigGetAttribute)(const LtAlgorithm *algorithm, LtAlgorithmAttribute attribute,
                                                     void *value, size_t bytes, size_t *written);
    LtStatus (*cublasLtMatmul)(LtHandle handle, LtOperation operation, const void *alpha, const void *a,
                               LtLayout a_layout, const void *b, LtLayout b_layout, const void *beta, const void *c,
                               LtLayout c_layout, void *d, LtLayout d_layout, const LtAlgorithm *algorithm,
                               void *workspace, size_t workspace_bytes, cudaStream_t stream);
};

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* cuBLASLt, as far as src/cuda/cublaslt_products.cu calls it: plain loops, one algorithm. */
#include "cuda/cublaslt.h"

#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "record_launches.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

struct LtHandle_ {
    int unused;
};
struct LtOperation_ {
    int32_t transpose_a, transpose_b, mode;
};
struct LtLayout_ {
    cudaDataType_t type;
    uint64_t rows, columns;
    int64_t leading;

    float load(const void *data, uint64_t row, uint64_t column) const {
        const uint64_t at = column * static_cast<uint64_t>(leading) + row;
        switch (type) {
        case CUDA_R_32F: return static_cast<const float *>(data)[at];
        case CUDA_R_16BF: return static_cast<const __nv_bfloat16 *>(data)[at];
        default: return static_cast<const __half *>(data)[at];
        }
    }
    void store(void *data, uint64_t row, uint64_t column, float value) const {
        const uint64_t at = column * static_cast<uint64_t>(leading) + row;
        switch (type) {
        case CUDA_R_32F: static_cast<float *>(data)[at] = value; break;
        case CUDA_R_16BF: static_cast<__nv_bfloat16 *>(data)[at] = value; break;
        default: static_cast<__half *>(data)[at] = value; break;
        }
    }
};
struct LtPreference_ {
    int unused;
};

EXPORTED LtStatus cublasLtCreate(LtHandle *handle) {
    *handle = new LtHandle_();
    return 0;
}
EXPORTED LtStatus cublasLtDestroy(LtHandle handle) {
    delete handle;
    return 0;
}
EXPORTED LtStatus cublasLtMatmulDescCreate(LtOperation *operation, int, cudaDataType_t) {
    *operation = new LtOperation_();
    return 0;
}
EXPORTED LtStatus cublasLtMatmulDescDestroy(LtOperation operation) {
    delete operation;
    return 0;
}
EXPORTED LtStatus cublasLtMatmulDescSetAttribute(LtOperation operation, LtOperationAttribute attribute,
                                                 const void *value, size_t) {
    const int32_t number = *static_cast<const int32_t *>(value);
    (attribute == LT_POINTER_MODE  ? operation->mode
     : attribute == LT_TRANSPOSE_A ? operation->transpose_a
                                   : operation->transpose_b) = number;
    return 0;
}
EXPORTED LtStatus cublasLtMatrixLayoutCreate(LtLayout *layout, cudaDataType_t type, uint64_t rows, uint64_t columns,
                                             int64_t leading) {
    *layout = new LtLayout_{type, rows, columns, leading};
    return 0;
}
EXPORTED LtStatus cublasLtMatrixLayoutDestroy(LtLayout layout) {
    delete layout;
    return 0;
}
EXPORTED LtStatus cublasLtMatmulPreferenceCreate(LtPreference *preference) {
    *preference = new LtPreference_();
    return 0;
}
EXPORTED LtStatus cublasLtMatmulPreferenceDestroy(LtPreference preference) {
    delete preference;
    return 0;
}
EXPORTED LtStatus cublasLtMatmulPreferenceSetAttribute(LtPreference, LtPreferenceAttribute, const void *, size_t) {
    return 0;
}
EXPORTED LtStatus cublasLtMatmulAlgoGetHeuristic(LtHandle, LtOperation, LtLayout, LtLayout, LtLayout, LtLayout,
                                                 LtPreference, int, LtCandidate *found, int *count) {
    found[0] = {};
    *count = 1;
    return 0;
}
EXPORTED LtStatus cublasLtMatmulAlgoConfigGetAttribute(const LtAlgorithm *, LtAlgorithmAttribute, void *value,
                                                       size_t bytes, size_t *written) {
    memset(value, 0, bytes);
    *written = bytes;
    return 0;
}

/* d = alpha a b + beta c, all stored by columns. */
EXPORTED LtStatus cublasLtMatmul(LtHandle, LtOperation operation, const void *alpha, const void *a, LtLayout a_layout,
                                 const void *b, LtLayout b_layout, const void *beta, const void *c, LtLayout c_layout,
                                 void *d, LtLayout d_layout, const LtAlgorithm *, void *, size_t, cudaStream_t) {
    emulator::finish();
    if (emulator_records_launches())
        return 0;
    const float factor = *static_cast<const float *>(alpha), add = *static_cast<const float *>(beta);
    const uint64_t depth = operation->transpose_a ? a_layout->rows : a_layout->columns;
    std::vector<float> rows(d_layout->rows * depth), column(depth);
    for (uint64_t i = 0; i < d_layout->rows; i++)
        for (uint64_t k = 0; k < depth; k++)
            rows[i * depth + k] = operation->transpose_a ? a_layout->load(a, k, i) : a_layout->load(a, i, k);
    for (uint64_t j = 0; j < d_layout->columns; j++) {
        for (uint64_t k = 0; k < depth; k++)
            column[k] = operation->transpose_b ? b_layout->load(b, j, k) : b_layout->load(b, k, j);
        for (uint64_t i = 0; i < d_layout->rows; i++) {
            float sum = 0.0f;
            for (uint64_t k = 0; k < depth; k++)
                sum += rows[i * depth + k] * column[k];
            sum *= factor;
            d_layout->store(d, i, j, add != 0.0f ? sum + add * c_layout->load(c, i, j) : sum);
        }
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products, by cuBLASLt. */
#ifndef RAFTER_CUDA_CUBLASLT_PRODUCTS_CUH
#define RAFTER_CUDA_CUBLASLT_PRODUCTS_CUH

#include "core/tensor.h"
#include "cuda/backend.cuh"

/* All matrices are row-major: element (i, j) is at i * stride + j. Rows begin at
 * multiples of 16 bytes. */
struct Operand {
    const void *data;
    int64_t stride;
    bool transposed; /* `data` holds the operand's transpose */
};

/* c[m, n] = alpha * a[m, k] b[k, n] + beta * c. Sums are fp32 in a fixed order. */
struct Product {
    rafter_dtype dtype;     /* of a and b. fp32 is multiplied in true fp32, unless tf32 */
    rafter_dtype out_dtype; /* of c: `dtype` or fp32 */
    int64_t m, n, k;
    Operand a, b;
    void *c;
    int64_t c_stride;
    const float *alpha; /* on the device; NULL: 1 */
    bool add;           /* beta is 1; else it is 0, and c is not read */
    bool tf32;          /* fp32 operands may be rounded to TF32 */
    bool rigid; /* for batch invariance: a row of c has the same bits for any m. k is not split, nothing is tuned */
};

/* With this much workspace, in bytes, cuBLASLt can choose among all of its algorithms. With less it has
 * fewer, with none it still has some. */
enum { PRODUCT_BYTES = 16 << 20 };

/* Loads cuBLASLt unless it is loaded already. On failure the error says what is missing. */
rafter_status rafter_cuda_open_products(rafter_context *context);
void rafter_cuda_close_products(rafter_cuda_state *state);

/* Enqueues the product. The algorithm for a shape is chosen once and kept in the context: one of
 * cuBLASLt's proposals, by the shape alone. If the environment variable RAFTER_TUNE is 1, it is the
 * fastest of the proposals, measured at the first product of that shape outside of a capture. That
 * product waits for the device; after the trials its result is the correct one. */
rafter_status rafter_cuda_multiply(rafter_context *context, const Product &product, void *workspace,
                                   size_t workspace_bytes);

#endif

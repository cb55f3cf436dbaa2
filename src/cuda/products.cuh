/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products, by cuBLASLt. */
#ifndef RAFTER_CUDA_PRODUCTS_CUH
#define RAFTER_CUDA_PRODUCTS_CUH

#include "core/tensor.h"
#include "cuda/backend.cuh"

/* Every matrix lies in rows: element (i, j) is at i * stride + j. Rows begin at multiples of 16 bytes. */
struct Operand {
    const void *data;
    int64_t stride;
    bool turned; /* the transpose of what is meant lies there */
};

/* c[m, n] = alpha * a[m, k] b[k, n] + beta * c. Sums are fp32 in a fixed order. */
struct Product {
    rafter_dtype dtype;     /* of a and b: fp32 is multiplied in true fp32 */
    rafter_dtype out_dtype; /* that, or fp32 */
    int64_t m, n, k;
    Operand a, b;
    void *c;
    int64_t c_stride;
    const float *alpha; /* on the device; NULL: 1 */
    bool add;           /* beta is 1, else 0 and c is not read */
};

/* Workspace that lets cuBLASLt choose among all its algorithms; with less it has fewer, with none it has some. */
enum { PRODUCT_BYTES = 16 << 20 };

/* Loads cuBLASLt if that has not been done; else, the sentence says what is missing. */
rafter_status rafter_cuda_open_products(rafter_context *context);
void rafter_cuda_close_products(rafter_cuda_state *state);

/* Enqueues the product. The algorithm for a shape is found once and kept in the context: one of those that cuBLASLt
 * proposes, by the shape alone; or, where the environment variable RAFTER_TUNE is 1, the fastest of those that it
 * proposes, measured at the first product of that shape outside of a capture, which waits for the device and leaves the
 * result in place of all the trials'. */
rafter_status rafter_cuda_multiply(rafter_context *context, const Product &product, void *workspace,
                                   size_t workspace_bytes);

#endif

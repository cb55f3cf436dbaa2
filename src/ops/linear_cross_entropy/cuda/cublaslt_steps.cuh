/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The steps of the cuBLASLt variants: products, and between them kernels on fp32 logits
 * (kernels/logit_kernels.cu).
 */
#ifndef RAFTER_LCE_CUDA_CUBLASLT_STEPS_CUH
#define RAFTER_LCE_CUDA_CUBLASLT_STEPS_CUH

#include "ops/linear_cross_entropy/cuda/call_steps.cuh"
#include "ops/linear_cross_entropy/cuda/gradient_steps.cuh"

namespace lce {

constexpr int MOST_PART = 8192; /* columns of a row that one block of the logit kernels takes */

/* fp32 logits of some rows and classes, without the bias. */
struct LogitTile {
    float *z;
    int64_t stride; /* between rows: a multiple of 4 */
    int64_t first_row, rows, first_class, classes;
    const float *bias; /* of all classes; NULL: none */
};

/* cuBLASLt's workspace. */
struct ProductWorkspace {
    char *memory;
    size_t bytes;
};

/* ---- products -------------------------------------------------------------------------------- */

/* The tile's logits z = x W^T. `x`: from the tile's first row on. */
rafter_status form_logits(const Run &run, const ProductWorkspace &workspace, const Operand &x, const LogitTile &tile);

/* dx = dz W, of dz's `rows` rows. `add`: adds to what `out` holds. */
rafter_status multiply_dx(const Run &run, const ProductWorkspace &workspace, const Dz &dz, int64_t rows,
                          const GradientOut &out, bool add);

/* dW = dz^T x, of dz's classes. `x`: dz's rows. `add`: as above. */
rafter_status multiply_dweight(const Run &run, const ProductWorkspace &workspace, const Dz &dz, int64_t rows,
                               const Operand &x, const GradientOut &out, bool add);

/* ---- rows of logits -------------------------------------------------------------------------- */

/* Computes statistics of the tile's rows, in `parts` parts per row, and merges them with those in `stats`,
 * unless `first`. */
void collect_statistics(const Run &run, const LogitTile &tile, int parts, bool first, LossStats<FULL> *stats);

/* Writes dz of the tile, if dx or dW is wanted; and adds its sum over rows to dbias, if that is wanted.
 * `first_rows`: sets dbias instead. dz may overwrite the front of the tile's rows. */
void write_gradient(const Run &run, const LogitTile &tile, char *dz, int64_t dz_stride, float *dbias, bool first_rows);

/* Computes statistics, results and dz of a tile of whole rows in one pass over the logits: for at most
 * MOST_PART classes, and without dbias. */
void convert_rows(Run *run, const LogitTile &tile, char *dz, int64_t dz_stride);

} // namespace lce

#endif

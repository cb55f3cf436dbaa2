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

/* z of the tile = x W^T. `x`: from the tile's first row on. */
rafter_status form_logits(const Run &run, const ProductWorkspace &workspace, const Operand &x, const LogitTile &tile);

/* dx of dz's `rows` rows = dz W; `add`: to what `out` holds. */
rafter_status multiply_dx(const Run &run, const ProductWorkspace &workspace, const Dz &dz, int64_t rows,
                          const GradientOut &out, bool add);

/* dW of dz's classes = dz^T x. `x`: dz's rows. */
rafter_status multiply_dweight(const Run &run, const ProductWorkspace &workspace, const Dz &dz, int64_t rows,
                               const Operand &x, const GradientOut &out, bool add);

/* ---- rows of logits -------------------------------------------------------------------------- */

/* Statistics of the tile's rows, in `parts` parts per row. Merged with those in
 * `stats`, unless `first`. */
void collect_statistics(const Run &run, const LogitTile &tile, int parts, bool first, LossStats<FULL> *stats);

/* dz of the tile, if dx or dW is wanted; and dbias (+)= its sum over rows, if that is wanted.
 * `first_rows`: dbias is not added to. dz may overwrite the front of the tile's rows. */
void write_gradient(const Run &run, const LogitTile &tile, char *dz, int64_t dz_stride, float *dbias, bool first_rows);

/* Statistics, results and dz of a tile of whole rows in one pass over the logits: for at most
 * MOST_PART classes, and without dbias. */
void convert_rows(Run *run, const LogitTile &tile, char *dz, int64_t dz_stride);

} // namespace lce

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Where dz is stored, where gradients go, and the repair of dW if ignored rows hold infinities or NaN. */
#ifndef RAFTER_LCE_CUDA_GRADIENT_STEPS_CUH
#define RAFTER_LCE_CUDA_GRADIENT_STEPS_CUH

#include "ops/linear_cross_entropy/cuda/call_steps.cuh"

namespace lce {

/* dz of some rows, or exponentials in its place: `classes` classes from first_class on. */
struct Dz {
    char *data;
    int64_t stride, first_class, classes;

    Dz from_row(int64_t row, int64_t element_bytes) const {
        return {data + row * stride * element_bytes, stride, first_class, classes};
    }
};

/* Where a product writes a gradient: into the caller's tensor, times alpha; or as fp32 sums
 * into the workspace. */
struct GradientOut {
    void *data;
    int64_t stride;
    rafter_dtype dtype;
    const float *alpha; /* on the device; NULL: 1 */
};

inline GradientOut into_tensor(const Run &run, const rafter_view &view, const RowLayout &layout, int64_t row) {
    return {view.data + row * layout.stride * rafter_dtype_bytes(view.dtype), layout.stride, view.dtype, run.alpha()};
}

inline GradientOut into_sums(const Run &run, float *sums) {
    return {sums, run.problem.depth_stride(), RAFTER_F32, NULL};
}

/* Rows of x or W from `row` on. */
inline Operand rows_from(const Operand &matrix, rafter_dtype dtype, int64_t row) {
    return {static_cast<const char *>(matrix.data) + row * matrix.stride * rafter_dtype_bytes(dtype), matrix.stride,
            matrix.transposed};
}

/* dz of an ignored row is 0, but 0 times an infinity or NaN of x is NaN in the sums of every class.
 * If products read x in place, with its ignored rows, find_nonfinite looks for such a value. If
 * there is one, which is rare, redo_nonfinite sums dW of dz's classes again without the ignored
 * rows, slowly. `x`: all rows. */
void find_nonfinite(const Run &run, const Operand &x);
void redo_nonfinite(const Run &run, const Operand &x, const Dz &dz, const GradientOut &out);

} // namespace lce

#endif

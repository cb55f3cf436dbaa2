/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dz of fp16 inputs in batch-invariant calls (has_row_units): every row is divided by its unit, a power
 * of two next to its own largest coefficient. The row of dx is multiplied by the unit in fp32. For dW,
 * which is a sum over rows, x is multiplied by the unit instead, divided by the largest unit of all
 * rows, so that fp16 holds it; dW's alpha contains that largest unit.
 */
#ifndef RAFTER_LCE_CUDA_ROW_UNITS_CUH
#define RAFTER_LCE_CUDA_ROW_UNITS_CUH

#include "ops/linear_cross_entropy/cuda/call_steps.cuh"

namespace lce {

struct RowUnits {
    Buffer<float> units; /* of every row, in the kernels' order; then the largest one, then dW's alpha */
    Buffer<char> x;      /* x times units over the largest, for dW; rows are depth_stride() apart */

    void place(Layout *layout, const Problem &p);
    bool any() const {
        return units.offset >= 0;
    }
    /* dW's alpha; NULL: the call's. */
    const float *dweight_alpha(const Problem &p, char *workspace) const {
        return any() ? units.in(workspace) + p.rows + 1 : NULL;
    }
};

/* After begin_call, which has been told Loss::row_units: finds the units of all rows, and for dW scales x.
 * `x`: fp16. Its active.order NULL: all rows of the call, in their order, `x.stride` apart. Else the last
 * rows of the scaled x are the active ones, as in the copy of ActiveRows. */
void find_row_units(Run *run, const RowUnits &buffers, const ActiveX<fp16> &x, char *workspace);

/* Multiplies the sums of dx, depth_stride() apart, by the units. `count`: of active rows, on the device; NULL:
 * all. */
void multiply_by_units(const Run &run, const int *count, float *sums);

} // namespace lce

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The steps at the beginning and the end of every call: kernels/call_kernels.cu; and the exchange between ranks:
 * kernels/rank_kernels.cu. */
#ifndef RAFTER_LCE_CUDA_CALL_STEPS_CUH
#define RAFTER_LCE_CUDA_CALL_STEPS_CUH

#include "cuda/launch.cuh"
#include "ops/linear_cross_entropy/cuda/active_rows.cuh"
#include "ops/linear_cross_entropy/cuda/problem.cuh"

namespace lce {

constexpr int ROW_THREADS = 128; /* of a block that finishes rows */

/* A call that is being enqueued. */
struct Run {
    rafter_context *context;
    const linear_cross_entropy_call &call;
    const Problem problem;
    Loss loss;
    float row_scale;        /* the kernels' dz is larger than the gradient by this factor: see row_scale_of */
    Common *common;         /* on the device */
    Totals *block_totals;   /* sums over rows, one per block that has finished rows */
    int64_t blocks;         /* of block_totals so far */
    bool loss_is_written;   /* by the kernel that finished all rows */
    RowGradient *gradients; /* coefficients of every row's gradient; NULL: no gradient is wanted */
    const float *row_units; /* what rows' coefficients were divided by: see row_units.cuh; NULL: all by the same */
    const float *bias;      /* of all classes, fp32; NULL: none */
    Operand weight;         /* [classes, depth]: the caller's, or a packed copy */

    Run(rafter_context *for_context, const linear_cross_entropy_call &for_call);

    const float *alpha() const {
        return &common->alpha;
    }
};

/* Buffers that every variant has. */
struct CommonBuffers {
    Buffer<Common> common;
    Buffer<RowGradient> gradients;
    Buffer<Totals> block_totals;
    Buffer<float> bias;
    Buffer<char> weight; /* packed copy of W, unless products can use the caller's */

    /* The Totals that finish_rows or finish_tiles write for all groups, at most: few rows have a block each. */
    static int64_t totals_of(int64_t rows, int64_t group) {
        return rows + ceil_div(rows, group) + 1;
    }
    void place(Layout *layout, const Problem &p, int64_t totals);
    /* Sets the Run's pointers. */
    void use(Run *run, char *workspace) const;
};

/* The copy of x's active rows: see ActiveRows. */
struct CopyOfActive {
    Rows x;
    int64_t step; /* between a row's elements */
    int columns;
    /* Rows of x and of the copy begin at multiples of 16 bytes and are contiguous. Products can use
     * x itself then if all rows are active, so nothing is copied in that case. */
    bool wide;
    uint16_t *to; /* NULL: no copy */
    int64_t stride;
};

/* What the first kernel does for the Hopper variants, beyond sums over rows and classes. */
struct ActiveRowsSetup {
    bool drop_ignored;
    int *order, *classes; /* of ActiveRows. NULL: no list */
    unsigned *counters;   /* of gemm::SplitSums, to be cleared */
    int counter_count;
    Labels labels;
    CopyOfActive copy;
};

/* The first kernel of a call: sums over labels and class weights, the list of active rows. Then the
 * bias in fp32 and the packed W, where they are needed. */
void begin_call(Run *run, const ActiveRowsSetup &setup, char *workspace, const CommonBuffers &buffers);
/* The first kernel alone. */
void prepare(Run *run, const ActiveRowsSetup &setup);

/* Rows [first, first + rows) of x or W, with any strides, as rows that products can use. Ignored
 * rows of x become zeros, so that their contents reach no sum. */
void pack_rows(const Run &run, const rafter_view &view, int64_t first, int64_t rows, char *to);

/* Computes results and gradient coefficients of rows: from `parts` statistics of each row, merged in their
 * order; or from the caller's lse, if `stats` is NULL. `order`: of ActiveRows, or NULL. */
void finish_rows(Run *run, const int *order, int64_t first, int64_t rows, const LossStats<FULL> *stats, int parts);

/* Sets rows [first, first + rows) of a gradient to alpha * sums, or to 0 if `sums` is NULL. `add`: adds
 * that to what the gradient holds. `alpha` NULL: the run's. */
void store_rows(const Run &run, const rafter_view &view, const RowLayout &layout, bool add, int64_t first, int64_t rows,
                const float *sums, const float *alpha = NULL);
void store_dbias(const Run &run, const float *sums);

/* After products that multiplied ignored rows as zeros: their dx is 0 * alpha, which is NaN if alpha
 * is not finite. Then this writes zeros. dx has the call's rows [first, first + rows). */
void zero_ignored_dx(const Run &run, int64_t first, int64_t rows);

/* ---- classes that are spread over ranks: kernels/rank_kernels.cu ------------------------------ */

/* Buffers of such calls. */
struct RankBuffers {
    Buffer<LossStats<FULL>> stats; /* of every row */
    Buffer<char> exchange;
    Buffer<float> dx; /* of all rows, in their order: before and after the sum over ranks */
    Buffer<float> dx_share;

    void place(Layout *layout, const Problem &p);
};

/* Exchanges the statistics of all rows. `own`: over this rank's classes; `merged`: over all classes; may be
 * `own`. Both have the rows in the order of `order` (NULL: the call's). */
rafter_status exchange_statistics(const Run &run, const int *order, char *exchange, const LossStats<FULL> *own,
                                  LossStats<FULL> *merged);

/* to[order[k]] = sums[k] for the first *count rows, and 0 for the others. */
void put_in_order(const Run &run, const ActiveRows &active, const float *sums, float *to);

/* begin_dx_sum starts to sum dx over the ranks, on the second stream; end_dx_sum waits, and stores dx or
 * this rank's share. `dx`: without alpha, in the order of the call's rows; if the rank has no classes, it
 * is set to 0 first. */
rafter_status begin_dx_sum(const Run &run, float *dx, float *share);
rafter_status end_dx_sum(const Run &run, const float *dx, const float *share);

/* Zeros the rows of `dx` that are not active; they are depth_stride() apart. */
void zero_inactive_rows(const Run &run, const ActiveRows &active, float *dx);

/* The last kernel: writes the loss, unless finish_tiles has written it. If zero_inactive_dx, it also zeros dx
 * of the rows that are not active. */
void finish_call(const Run &run, const ActiveRows &active, bool zero_inactive_dx);

/* ---- launches -------------------------------------------------------------------------------- */

/* A thread per item, in at most `most` blocks. */
inline Launch thread_per_item(int64_t items, int threads, int64_t most = 1 << 20) {
    return {max(int64_t(1), min(ceil_div<int64_t>(items, threads), most)), threads};
}

} // namespace lce

#endif

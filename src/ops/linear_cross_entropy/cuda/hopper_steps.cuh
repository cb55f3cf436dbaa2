/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The steps of the Hopper variants: our own products (cuda/hopper_gemm.cuh), and the kernels between them.
 * The product that forms logits converts them at once, so that no logit is ever stored. Products
 * multiply active rows only, whose number they read on the device.
 */
#ifndef RAFTER_LCE_CUDA_HOPPER_STEPS_CUH
#define RAFTER_LCE_CUDA_HOPPER_STEPS_CUH

#include "cuda/hopper_gemm.cuh"
#include "ops/linear_cross_entropy/cuda/call_steps.cuh"
#include "ops/linear_cross_entropy/cuda/gradient_steps.cuh"

namespace lce {

/* ---- which calls ----------------------------------------------------------------------------- */

/* With at most this many classes per element of depth, fast converts exponentials to dz in place. */
constexpr int64_t MOST_CLASSES_PER_DEPTH = 2;

inline int clusters_of(const rafter_cuda_state &device) {
    return device.multiprocessors / gemm::CLUSTER;
}

/* Whether dW has so few tiles that most of the GPU is idle even if each tile is
 * split into `parts`. */
bool few_dweight_tiles(const Problem &p, int clusters, int parts);

/* Whether this build has the kernels: without sm_90a their bodies are empty. */
bool hopper_kernels_built(int device);

const char *why_not_hopper(const rafter_cuda_state &device, const Problem &p);
/* For variants that store exponentials, beyond the above: logits may have to be read back from exponentials,
 * which bf16's range allows; and exponentials must save more than their passes over x and dx cost. If lse is
 * given, dz needs no exponentials. */
const char *why_not_hopper_fast(const rafter_cuda_state &device, const Problem &p);

/* ---- tiles of logits ------------------------------------------------------------------------- */

/* Results of a product x W^T:
 *
 *     STATISTICS     maximum and sum of exponentials of each row over each tile of classes
 *     EXPONENTIALS   the same, relative to a pivot that is known beforehand, or to one that suits the
 *                    tile; and the exponentials
 *     GRADIENT       dz, from the rows' coefficients */
enum LogitMode { STATISTICS, EXPONENTIALS, GRADIENT };

/* How many classes a tile has, with STATISTICS or EXPONENTIALS: those of gemm::InTurns or of gemm::Together. */
int tile_classes_of(const Problem &p, LogitMode mode, int clusters);

/* ---- plans ----------------------------------------------------------------------------------- */

/* How many parts of split tiles to reserve memory for: as many as the products of `rows` rows and all
 * classes use, if splitting makes one of them 2 % faster; else 0. `sliced`: products are of some of the
 * classes, and use as many as the limits allow. */
int split_capacity_for(const Problem &p, const Limits &limits, int clusters, int tile_classes, int64_t rows,
                       bool sliced);

/* Batch-invariant calls: into how many parts the sums of dx over so many classes are cut, whatever the
 * number of rows. 1: they are not cut; then 2048 rows of such depths would leave half of an H200 idle. */
inline int invariant_dx_parts(const Problem &p, int64_t classes) {
    constexpr int64_t LEAST_CLASSES = 2048;
    return !p.invariant || classes < LEAST_CLASSES || p.depth > 2048 ? 1 : p.depth > 512 ? 2 : 4;
}

/* Rows whose dz of all classes fits into dW's own memory; 0 if dW must not be used for that. dW is
 * free until the products write it, unless it is added to, has gaps, or is not written by
 * products. */
int64_t rows_in_dweight(const Problem &p, bool direct_dweight);

/* What the plans of all Hopper variants hold. */
struct HopperSetup {
    bool drop_ignored;
    /* x of active rows is copied into dx, which has a row for each. When dx of the k-th active row
     * is written, only copies up to the k-th are lost, and those have been multiplied. */
    bool copy_into_dx;
    bool row_units;     /* see row_units.cuh */
    int clusters;       /* that run at a time */
    int tile_classes;   /* from tile_classes_of */
    int split_capacity; /* from split_capacity_for */
    CommonBuffers common;
    Buffer<int> order, classes; /* of ActiveRows */
    Buffer<float> z_label;      /* the label's logit of every row */
    Buffer<char> x;             /* copy of active rows' x, unless it is in dx */
    Buffer<float> split_sums;
    Buffer<unsigned> counters;

    void place(Layout *layout, const Problem &p, int64_t totals);
    int64_t tiles(const Problem &p) const {
        return ceil_div<int64_t>(p.classes, tile_classes);
    }
};

/* A matrix in the inputs' dtype. */
struct Matrix {
    const void *data;
    int64_t rows, columns, stride;
};

/* Where the spread of label smoothing is subtracted: see kernels/exponentials.cu. */
enum SpreadPlace {
    SPREAD_IN_DZ,          /* where dz is formed: in the epilogue of the logits, or in the conversion */
    SPREAD_APART,          /* from the sums of dx and dW, as a product of two vectors */
    SPREAD_IN_EXPONENTIALS /* from the exponentials, by adjust_exponentials: there is a softcap */
};

/* For products of exponentials. */
inline SpreadPlace spread_place_of(const Problem &p) {
    return !p.smooths ? SPREAD_IN_DZ : p.caps ? SPREAD_IN_EXPONENTIALS : SPREAD_APART;
}

/* A Run of a Hopper variant. */
struct HopperRun : Run {
    ActiveRows active;
    gemm::SplitSums split;
    Matrix x, copy; /* x for products if all rows are active; the copy of active rows for other calls */
    Matrix w;
    float *z_label;
    Labels labels;           /* of_row NULL: not wanted */
    float *column_parts;     /* ColumnSums' workspace, if there is any */
    int tile_classes, tiles; /* of HopperSetup */
    SpreadPlace spread;
    const float *weight_sum; /* label smoothing: the sum of w_v W_v; NULL: not needed */
    const float *logit_sums; /* label smoothing without a softcap: from sum_logits */
    bool zeroed_dx;          /* hopper_dx has zeroed dx of the rows that are not active */
    int beside = 0;          /* multiprocessors that the sum of dx takes while dW is computed */

    /* Sets the pointers, and enqueues the first kernels. */
    HopperRun(rafter_context *for_context, const linear_cross_entropy_call &for_call, const HopperSetup &setup,
              const Labels &for_labels, char *workspace);

    /* How tiles of products whose results are rows of the call are split. If the call is batch invariant, that
     * must not depend on the number of tiles: those of logits are never split, those of dx always alike. */
    gemm::SplitSums logit_split() const {
        return {split.sums, split.counters, problem.invariant ? 0 : split.capacity};
    }
    gemm::SplitSums dx_split(int64_t classes) const {
        const int parts = invariant_dx_parts(problem, classes);
        return {split.sums, split.counters, problem.invariant ? 0 : split.capacity, parts > 1 ? parts : 0};
    }

    /* x as other kernels read it. */
    template <typename T> ActiveX<T> active_x() const {
        return {active, static_cast<const T *>(x.data), x.stride, !problem.x.direct};
    }
};

/* ---- logits: kernels/hopper_logits.cu -------------------------------------------------------- */

/* Statistics of a row over a tile that some options need beyond RowStats: see LossStats<FULL>. */
struct alignas(16) OptionStats {
    float logit_sum, moment, best;
    int argmax;
};

struct LogitTask {
    ActiveRows active;
    gemm::SplitSums split;
    int64_t first_row, rows, first_class, classes; /* of active rows, and of W */
    int depth;
    float scale;               /* of logits */
    float softcap;             /* 0: none */
    float inverse_softcap;     /* of the derivative; 0: results are not multiplied by it */
    const float *bias;         /* of all classes; NULL: none */
    const float *class_weight; /* of all classes; NULL: all are 1. Read if it smooths */
    int64_t class_stride;
    bool smooths, wants_argmax;   /* which OptionStats are wanted; smooths, in GRADIENT: the spread is */
    bool differentiates_entropy;  /* GRADIENT */
    bool wide;                    /* gemm::ClusterShape */
    RowStats *stats;              /* [rows][tiles]; GRADIENT: not written */
    OptionStats *more;            /* [rows][tiles]; NULL: not wanted */
    int tiles;                    /* per row of `stats` */
    float *z_label;               /* of all active rows */
    const RowStats *sample;       /* EXPONENTIALS: estimated statistics of the task's rows; or NULL */
    float *dz_label;              /* GRADIENT: the label's element of dz, not rounded; NULL: not wanted */
    const RowGradient *gradients; /* GRADIENT: of all active rows */
    void *out;                    /* [rows][out_stride] in the inputs' dtype: exponentials or dz */
    int64_t out_stride;           /* a multiple of 8 */
};

/* The caller sets the task's rows, classes, stats, more and sample. `out`: for exponentials or dz. If there
 * is a softcap, exponentials are multiplied by its derivative, but their sums are not. With label smoothing
 * too, adjust_exponentials does that, after it has subtracted the spread. */
rafter_status multiply_logits(const HopperRun &run, LogitMode mode, LogitTask task, const Dz &out);

/* A task for the statistics of all classes of active rows [first, first + rows). */
LogitTask statistics_task(const HopperRun &run, int64_t first, int64_t rows, RowStats *stats);

/* ---- gradients: kernels/hopper_gradients.cu -------------------------------------------------- */

/* dW of dz's classes from active rows [first, first + rows), which are dz's rows. `scaled`: x_scaled,
 * to be used instead of x; its last rows are dz's active ones. `spread_x`: from sum_spread_x; NULL: none.
 * `add`: adds to what `out` holds. */
rafter_status hopper_dweight(const HopperRun &run, const Dz &dz, int64_t first, int64_t rows, const Matrix *scaled,
                             const float *spread_x, const GradientOut &out, bool add);

/* dx of active rows [first, first + rows). dz is in one part, or in two: `dz` and then `rest`. */
struct DxInput {
    Dz dz, rest; /* rest.classes 0: none. Else dz.classes is a multiple of gemm::DEPTH */
    int64_t first, rows;
    const RowGradient *gradients; /* of all active rows, if dz is exponentials; NULL: it is dz */
};
/* Writes the complete dx into the caller's tensor. If it is summed in parts first, the rows that are not
 * active are zeroed as well; run->zeroed_dx tells. */
rafter_status hopper_dx(HopperRun *run, const DxInput &input);
/* This rank's part of the sum over ranks: dx of all rows as fp32 and without alpha, in the call's
 * order, depth_stride() apart; zeros for ignored rows. */
rafter_status hopper_rank_dx(const HopperRun &run, const DxInput &input, float *to);
/* Writes dx as fp32 sums, without the row factor and the label's part. `sums` has sums_rows rows. `add`:
 * adds to them. */
rafter_status hopper_dx_sums(const HopperRun &run, const DxInput &input, float *sums, int64_t sums_rows, bool add);

/* ---- estimates: kernels/row_sample.cu --------------------------------------------------------- */

/* Estimated statistics of every active row, from a few of its logits: the pivot of its
 * exponentials. */
void sample_statistics(const HopperRun &run, RowStats *sample);
/* The sum of w_v z_v of every active row, from sum_weights, for label smoothing without a softcap.
 * `to` has an element more than there are rows. */
void sum_logits(const HopperRun &run, const float *weight_sum, float *to);

/* ---- rows: kernels/hopper_rows.cu ------------------------------------------------------------ */

/* Computes results and coefficients of active rows [first, first + rows), from the statistics of their
 * tiles (`more` may be NULL). If to_dz.data is not NULL, it has the exponentials of these rows,
 * which are converted to dz in place. Adds the rows to run->labels if that is wanted. only_save:
 * stores the statistics in `saved`, and does nothing else. */
void finish_tiles(HopperRun *run, int64_t first, int64_t rows, const RowStats *stats, const OptionStats *more,
                  const Dz &to_dz, LossStats<FULL> *saved = NULL, bool only_save = false);

/* In a backward that uses `saved`: computes the coefficients of all rows. In forward, finish_tiles has
 * stored their statistics in `saved`, and unify_saved_pivots has given all tiles of a row one pivot. */
void finish_saved_rows(const HopperRun &run, const LossStats<FULL> *saved);

/* If classes are spread over ranks: computes results and coefficients of all rows. `own`: their statistics
 * over this rank's classes, whose pivots the exponentials have; `merged`: over all classes. */
void finish_rank_rows(HopperRun *run, const LossStats<FULL> *own, const LossStats<FULL> *merged);

/* ---- exponentials, and dx: kernels/exponentials.cu ------------------------------------------- */

/* Rescales the tiles whose pivot is not their row's, for a later backward. */
void unify_saved_pivots(const HopperRun &run, const RowStats *stats, const LossStats<FULL> *saved, const Dz &dz);

/* Prepares the exponentials of a group for the products. They are in one part or two (first the
 * classes below dz.classes). Rescales tiles that have another pivot than their row (`stats` NULL: there
 * are none), subtracts the spread if this is its place (run.spread), removes the label's element, and
 * writes x_scaled = p * x: see kernels/exponentials.cu. */
void adjust_exponentials(const HopperRun &run, int64_t first, int64_t rows, const RowStats *stats, const Dz &dz,
                         const Dz &rest, const Matrix &x_scaled);

/* Stores active rows' dx from its sums, and zeros for the other rows among [first, first + rows).
 * `gradients`: as in DxInput. The sums are in `parts` parts, part_stride elements apart. */
void store_dx_rows(const HopperRun &run, int64_t first, int64_t rows, const float *sums, const RowGradient *gradients,
                   int parts = 1, int64_t part_stride = 0);
/* The same for hopper_rank_dx. */
void store_rank_dx(const HopperRun &run, const float *sums, const RowGradient *gradients, int parts,
                   int64_t part_stride, float *to);

/* ---- sums over rows: kernels/column_sums.cu -------------------------------------------------- */

/* Workspace of the functions below. */
struct ColumnSums {
    static int chunks(int64_t rows, int64_t columns);
    /* Enough for this many columns, or fewer. */
    static int64_t bytes(int64_t rows, int64_t columns);
    /* Elements of a result that is read in whole tiles; those after the columns are 0. */
    static_assert(gemm::COLUMNS == 256, "lce_padded_depth rounds up to that");
    static int64_t padded(int64_t columns) {
        return lce_padded_depth(columns);
    }
};

/* The sum of w_v W_v over all classes. `to` has padded(depth) elements. */
void sum_weights(const HopperRun &run, float *to);
/* The sum of spread * x over active rows [first, first + rows). `to` has padded(depth) elements. */
void sum_spread_x(const HopperRun &run, int64_t first, int64_t rows, float *to);
/* dbias of dz's classes, from active rows [first, first + rows), without alpha. `gradients`: as in
 * DxInput. `at_label`: the label's elements of dz of all active rows, which replace the rounded ones;
 * NULL: those of `gradients`. `dbias`: of all classes. */
void sum_dbias(const HopperRun &run, const Dz &dz, int64_t first, int64_t rows, const RowGradient *gradients,
               const float *at_label, bool add, float *dbias);

/* ---- labels: kernels/label_rows.cu ----------------------------------------------------------- */

/* dW[label] += at_label * x for all active rows. `out`: all of dW. */
void add_label_rows(const HopperRun &run, const GradientOut &out);

/* dW of all rows from exponentials, into the caller's tensor (`direct`) or through `sums`. */
inline rafter_status form_dweight(const HopperRun &run, const Dz &dz, const Matrix &x_scaled, const float *spread_x,
                                  bool direct, float *sums) {
    const Problem &p = run.problem;
    const rafter_view &dweight = run.call.dweight;
    const GradientOut out = direct ? into_tensor(run, dweight, p.dweight_layout, 0) : into_sums(run, sums);
    RAFTER_TRY(hopper_dweight(run, dz, 0, p.rows, &x_scaled, spread_x, out, direct && p.adds_dweight));
    add_label_rows(run, out);
    if (!direct)
        store_rows(run, dweight, p.dweight_layout, p.adds_dweight, 0, p.classes, sums);
    return RAFTER_OK;
}

} // namespace lce

#endif

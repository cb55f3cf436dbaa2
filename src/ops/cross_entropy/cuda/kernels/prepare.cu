/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel before all others in calls that need sums over classes or over many labels: see general.cuh. */
#include "ops/cross_entropy/cuda/general.cuh"

namespace {

constexpr int PREPARE_THREADS = 512;
static_assert(PREPARE_BLOCKS <= PREPARE_THREADS, "one block adds up the sums of all");
/* Whether `prepare` adds up labels, too. */
__host__ DEVICE bool prepares_totals(const Args &c) {
    return c.loss.needs_totals() && c.gradient;
}
/* Blocks of `prepare`. More of them add up faster, but it takes longer until the last one has arrived. */
inline int64_t prepare_blocks(const Args &c) {
    constexpr int64_t FEW = PREPARE_BLOCKS / 4;
    if (!prepares_totals(c))
        return max(min(ceil_div<int64_t>(c.loss.all_classes, PREPARE_THREADS), FEW), int64_t(1));
    return c.loss.rows >= 1 << 20 ? int64_t(PREPARE_BLOCKS) : FEW;
}

/* As `count` (loss.cuh), for calls with class weights: 8 labels are in flight, and then their weights; the compiler
 * alone would wait for each. Only for `prepare`: kernels that rarely count should not have so many instructions. */
DEVICE Totals count_weights(const Loss &loss, int64_t first, int64_t step) {
    constexpr int AT_ONCE = 8;
    Totals totals = {};
    int64_t counted = 0;
#pragma unroll 1
    for (int64_t row = first; row < loss.rows; row += AT_ONCE * step) {
        int64_t label[AT_ONCE];
        double weight[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            label[k] = row + k * step < loss.rows ? loss.load_label(row + k * step) : loss.ignore_index;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            label[k] = loss.class_of(label[k]);
            weight[k] = label[k] == IGNORED ? 0.0 : label[k] >= 0 ? loss.weight_of(label[k]) : 1.0;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            totals.weight += weight[k];
            counted += label[k] != IGNORED;
        }
    }
    totals.counted = static_cast<double>(counted);
    return totals;
}

/* The first kernel of a call that needs it: sums over the weights of all classes, and over the labels if there
 * are many. prepared[1 ...] get the sums of each block; the last block to finish adds them up into
 * prepared[0]. */
__global__ __launch_bounds__(PREPARE_THREADS) void prepare(const __grid_constant__ Args c, Prepared *prepared) {
    wait_for_inputs();
    start_next_kernel();
    const int64_t first = blockIdx.x * int64_t(PREPARE_THREADS) + threadIdx.x,
                  step = gridDim.x * int64_t(PREPARE_THREADS);
    double classes = 0.0;
    for (int64_t v = first; v < c.loss.all_classes; v += step)
        classes += c.loss.weight_of(v);
    Totals totals = {};
    if (prepares_totals(c))
        totals = c.loss.class_weight ? count_weights(c.loss, first, step) : count(c.loss, first, step);
    const Prepared mine = {block_sum(classes), block_sum(totals)};
    if (threadIdx.x == 0)
        prepared[1 + blockIdx.x] = mine;
    if (!block_arrives_last(c.counter, gridDim.x))
        return;
    Prepared all = {};
    if (threadIdx.x < gridDim.x) {
        const Prepared &of_block = prepared[1 + threadIdx.x];
        all.class_weight_sum = __ldcg(&of_block.class_weight_sum);
        all.totals.weight = __ldcg(&of_block.totals.weight);
        all.totals.counted = __ldcg(&of_block.totals.counted);
    }
    all = {block_sum(all.class_weight_sum), block_sum(all.totals)};
    if (threadIdx.x == 0)
        prepared[0] = all;
}

} // namespace

void launch_prepare(const rafter_context *context, const Args &args, Prepared *prepared) {
    launch(context, Launch{prepare_blocks(args), PREPARE_THREADS}, prepare, args, prepared);
}

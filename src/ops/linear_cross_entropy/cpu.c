/* SPDX-License-Identifier: Apache-2.0 */
/* linear_cross_entropy's CPU kernels: packing (cpu_pack.h), products, logits with their statistics, and dz. Formats
 * are in kernels.h. */
#include "core/kernel_memory.h"
#include "core/sizes.h"
#include "core/variants.h"
#include "ops/linear_cross_entropy/cpu_few.h"
#include "ops/linear_cross_entropy/cpu_pack.h"
#include "ops/linear_cross_entropy/micro.h"
#include "simd/softmax.h"

/* ---- products -------------------------------------------------------------------------------- */

/* Part `part` of `parts` of `bytes`, into L2. */
V_INLINE void fetch_part(const char *p, int64_t bytes, int64_t part, int64_t parts) {
    for (int64_t at = bytes * part / parts / 64 * 64; at < bytes * (part + 1) / parts; at += 64)
        __builtin_prefetch(p + at, 0, 2);
}

/* n elements from column k on, of the rows [first + from, first + to) that there are. */
V_INLINE void fetch_rows(const struct lce_matrix *m, int64_t first, int64_t k, int64_t n, int64_t from, int64_t to) {
    const int64_t bytes = v_bytes((int)m->dtype);
    for (int64_t row = first + from; row < min64(first + to, m->rows); row++)
        fetch_part(lce_row(m, row, bytes) + k * bytes, n * bytes, 0, 1);
}

/* Where the panels of a block's operands begin, from K = k on. */
struct panels {
    const char *left, *right;
    int64_t k;          /* elements, up to where the block of the L1 ends */
    int64_t right_next; /* bytes from a right panel to the next; left: LCE_DEPTH_BYTES for each row */
};

V_INLINE struct panels panels_at(const struct lce_format *f, int64_t inner, const struct lce_product *job,
                                 int64_t first_row, int64_t first_column, int64_t k) {
    const int64_t depth = lce_depth(f), k_padded = round_up(job->k, f->step), columns = round_up(job->n, f->columns);
    const int64_t block = k / depth * depth, in_block = min64(depth, k_padded - block);
    return (struct panels){job->left ? job->left + lce_left_row(f, first_row) + lce_left_k(f, job->m, k) : NULL,
                           job->right +
                               (block * columns + first_column * in_block + (k - block) * f->columns) * f->element,
                           min64(inner, k_padded - k), in_block * f->columns * f->element};
}

V_INLINE void product_as(bool pairs, const struct lce_product *job, int64_t row_block, int64_t column_block) {
    const struct lce_format f = format_of(pairs);
    const struct lce_matrix *const unpacked = job->left ? NULL : job->unpacked;
    const int64_t inner = pairs ? PAIR_DEPTH : lce_depth(&f), k_padded = round_up(job->k, f.step);
    const int64_t first_row = row_block * LCE_ROWS, first_column = column_block * LCE_COLUMNS;
    const int64_t m = min64(LCE_ROWS, round_up(job->m, f.rows) - first_row) / f.rows;
    const int64_t n = min64(LCE_COLUMNS, round_up(job->n, f.columns) - first_column) / f.columns;
    const int64_t stride = lce_out_stride(&f, job->n, column_block);
    float *const out = job->out + lce_out_at(&f, job->m, job->n, first_row, column_block);
    char *const panel = rafter_kernel_memory(); /* if the left operand is not packed */
    _Static_assert(32 * LCE_DEPTH_BYTES <= RAFTER_KERNEL_BYTES, "raise RAFTER_KERNEL_BYTES");
    if (pairs)
        begin_pairs();
    struct panels here = panels_at(&f, inner, job, first_row, first_column, 0), next = {0};
    for (int64_t k = 0; k == 0 || k < k_padded; k += inner, here = next) { /* also if K is 0: the result is zero */
        if (k + inner < k_padded)
            next = panels_at(&f, inner, job, first_row, first_column, k + inner);
        for (int64_t i = 0; i < m; i++) {
            const char *left = unpacked ? panel : here.left + i * f.rows * LCE_DEPTH_BYTES;
            if (unpacked)
                pack_panel(unpacked, first_row + i * f.rows, k, here.k, panel);
            for (int64_t j = 0; j < n; j++) {
                /* The hardware does not see far enough ahead: a panel is short, and L3 is far away. */
                if (unpacked)
                    fetch_rows(unpacked, first_row + (i + 1) * f.rows, k, here.k, f.rows * j / n, f.rows * (j + 1) / n);
                else if (k + inner < k_padded)
                    fetch_part(next.left + i * f.rows * LCE_DEPTH_BYTES, next.k * f.rows * f.element, j, n);
                if (k + inner < k_padded)
                    fetch_part(next.right + j * next.right_next, next.k * f.columns * f.element, i, m);
                (pairs ? micro_pairs : micro_f32)(here.k, left, here.right + j * here.right_next,
                                                  out + i * f.rows * stride + j * f.columns, stride,
                                                  job->accumulate || k > 0);
            }
        }
    }
    if (pairs)
        end_pairs();
}

static void product(rafter_dtype dtype, const struct lce_product *job, int64_t row_block, int64_t column_block) {
    if (is_pairs((int)dtype))
        product_as(true, job, row_block, column_block);
    else
        product_as(false, job, row_block, column_block);
}

/* ---- logits and their statistics ------------------------------------------------------------- */

/* The index of each row's label among the classes of a block; -1 if the block does not have it. */
V_INLINE void place_labels(const int64_t *label, int64_t rows, int64_t first, int64_t classes,
                           int32_t place[LCE_COLUMNS]) {
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = label[i] - first;
        place[i] = at >= 0 && at < classes ? (int32_t)at : -1;
    }
    for (int64_t i = rows; i < LCE_COLUMNS; i++)
        place[i] = -1;
}

static inline float *stat_at(const struct lce_logits *job, int64_t class_block, enum lce_stat stat, int64_t row) {
    return job->stats + (class_block * LCE_STATS + stat) * round_up(job->product.n, LCE_COLUMNS) + row;
}

/* Vectors of rows processed at a time, over all classes of a block. There are two passes; the
 * second reads from L1. */
enum { ROW_VECTORS = 2 };

V_INLINE void logits_as(bool capped, bool all, const struct lce_logits *job, float *block, int64_t stride,
                        int64_t classes, int64_t row_block, int64_t column_block) {
    const float *bias = job->bias + row_block * LCE_ROWS, *weight = job->weight + row_block * LCE_ROWS;
    const vf inverse_cap = v_set(capped ? 1.0f / job->softcap : 1.0f),
             scale = v_set(capped ? job->scale * job->softcap : job->scale);
    const vf low = v_set(-INFINITY);
    for (int64_t r = 0; r < stride; r += ROW_VECTORS * V_LANES) {
        vf max[ROW_VECTORS], sum[ROW_VECTORS], moment[ROW_VECTORS], logit_sum[ROW_VECTORS], best[ROW_VECTORS];
        vi argmax[ROW_VECTORS];
        for (int s = 0; s < ROW_VECTORS; s++) {
            max[s] = low;
            sum[s] = moment[s] = logit_sum[s] = v_set(0.0f);
            best[s] = v_load(RAFTER_F32, block + r + s * V_LANES) + v_set(bias[0]);
            argmax[s] = (vi){0};
        }
        for (int64_t v = 0; v < classes; v++)
            for (int s = 0; s < ROW_VECTORS; s++) {
                float *p = block + v * stride + r + s * V_LANES;
                const vf z = v_load(RAFTER_F32, p) + v_set(bias[v]);
                const vf u = (capped ? v_tanh(z * inverse_cap) : z) * scale;
                v_store(RAFTER_F32, p, u);
                max[s] = v_max(u, max[s]);
                if (all) {
                    logit_sum[s] = v_fma(v_set(weight[v]), u, logit_sum[s]);
                    const vi better = (z > best[s]) | ((z != z) & (best[s] == best[s]));
                    best[s] = v_select(better, z, best[s]);
                    argmax[s] = (vi)v_select(better, (vf)((vi){0} + (int32_t)v), (vf)argmax[s]);
                }
            }
        if (!job->stats)
            continue;
        vf pivot[ROW_VECTORS];
        for (int s = 0; s < ROW_VECTORS; s++)
            pivot[s] = v_select(max[s] == low, v_set(0.0f), max[s]);
        for (int64_t v = 0; v < classes; v++)
            for (int s = 0; s < ROW_VECTORS; s++) {
                const vf u = v_load(RAFTER_F32, block + v * stride + r + s * V_LANES);
                const vf e = v_exp_from(u, pivot[s]);
                sum[s] += e;
                if (all) /* the bound avoids -inf * 0 */
                    moment[s] = v_fma(e, v_max(u - pivot[s], v_set(-200.0f)), moment[s]);
            }
        for (int s = 0; s < ROW_VECTORS; s++) {
            const int64_t row = column_block * LCE_COLUMNS + r + s * V_LANES;
            v_store(RAFTER_F32, stat_at(job, row_block, LCE_MAX, row), max[s]);
            v_store(RAFTER_F32, stat_at(job, row_block, LCE_SUM, row), sum[s]);
            if (all) {
                v_store(RAFTER_F32, stat_at(job, row_block, LCE_MOMENT, row), moment[s]);
                v_store(RAFTER_F32, stat_at(job, row_block, LCE_LOGIT_SUM, row), logit_sum[s]);
                v_store(RAFTER_F32, stat_at(job, row_block, LCE_BEST, row), best[s]);
                v_store(RAFTER_F32, stat_at(job, row_block, LCE_ARGMAX, row),
                        (vf)(argmax[s] + (int32_t)(row_block * LCE_ROWS)));
            }
        }
    }
}

static void logits(rafter_dtype dtype, const struct lce_logits *job, int64_t row_block, int64_t column_block) {
    const struct lce_product *p = &job->product;
    const struct lce_format f = format_of(is_pairs((int)dtype));
    if (p->left || p->unpacked)
        product(dtype, p, row_block, column_block);

    const int64_t first = row_block * LCE_ROWS, classes = min64(LCE_ROWS, p->m - first);
    const int64_t first_row = column_block * LCE_COLUMNS, rows = min64(LCE_COLUMNS, p->n - first_row);
    const int64_t stride = lce_out_stride(&f, p->n, column_block);
    float *const block = p->out + lce_out_at(&f, p->m, p->n, first, column_block);
    if (job->softcap != 0.0f) {
        if (job->more)
            logits_as(true, true, job, block, stride, classes, row_block, column_block);
        else
            logits_as(true, false, job, block, stride, classes, row_block, column_block);
    } else {
        if (job->more)
            logits_as(false, true, job, block, stride, classes, row_block, column_block);
        else
            logits_as(false, false, job, block, stride, classes, row_block, column_block);
    }
    if (!job->stats)
        return;
    int32_t place[LCE_COLUMNS];
    place_labels(job->label + first_row, rows, job->first_class + first, classes, place);
    for (int64_t r = 0; r < rows; r++)
        if (place[r] >= 0)
            job->target[first_row + r] = block[place[r] * stride + r];
}

static void fold(const struct lce_logits *job, int64_t column_block) {
    const int64_t first_row = column_block * LCE_COLUMNS, rows = min64(LCE_COLUMNS, job->product.n - first_row);
    const int64_t blocks = ceil_div(job->product.m, LCE_ROWS);
    const vf low = v_set(-INFINITY), zero = v_set(0.0f);
#define STAT(block, stat) v_load(RAFTER_F32, stat_at(job, block, stat, row))
    for (int64_t row = first_row; row < first_row + rows; row += V_LANES) {
        vf max = STAT(0, LCE_MAX), sum = STAT(0, LCE_SUM);
        vf moment = zero, logit_sum = zero, best = zero, argmax = zero;
        if (job->more) {
            moment = STAT(0, LCE_MOMENT), logit_sum = STAT(0, LCE_LOGIT_SUM);
            best = STAT(0, LCE_BEST), argmax = STAT(0, LCE_ARGMAX);
        }
        for (int64_t b = 1; b < blocks; b++) {
            const vf other = STAT(b, LCE_MAX), larger = v_max(other, max);
            const vf pivot = v_select(larger == low, zero, larger);
            const vf shrink = v_exp_from(max, pivot), shrink_other = v_exp_from(other, pivot);
            if (job->more) {
                /* If a block is scaled to 0, its shift may be infinite. */
                const vf shift = v_select(shrink == zero, zero, max - pivot);
                const vf shift_other = v_select(shrink_other == zero, zero, other - pivot);
                moment = v_fma(shift, sum, moment) * shrink +
                         v_fma(shift_other, STAT(b, LCE_SUM), STAT(b, LCE_MOMENT)) * shrink_other;
                logit_sum += STAT(b, LCE_LOGIT_SUM);
                const vf z = STAT(b, LCE_BEST);
                const vi better = (z > best) | ((z != z) & (best == best));
                best = v_select(better, z, best);
                argmax = v_select(better, STAT(b, LCE_ARGMAX), argmax);
            }
            sum = sum * shrink + STAT(b, LCE_SUM) * shrink_other;
            max = larger;
        }
#undef STAT
        v_store(RAFTER_F32, stat_at(job, 0, LCE_MAX, row), max);
        v_store(RAFTER_F32, stat_at(job, 0, LCE_SUM, row), sum);
        if (job->more) {
            v_store(RAFTER_F32, stat_at(job, 0, LCE_MOMENT, row), moment);
            v_store(RAFTER_F32, stat_at(job, 0, LCE_LOGIT_SUM, row), logit_sum);
            v_store(RAFTER_F32, stat_at(job, 0, LCE_BEST, row), best);
            v_store(RAFTER_F32, stat_at(job, 0, LCE_ARGMAX, row), argmax);
        }
    }
}

/* ---- gradient of the logits ------------------------------------------------------------------ */

/* Per-row constants of one vector of rows. */
struct row_vectors {
    vf pivot, p, target, spread, level, tilt;
    vi label, valid;
};

/* dz of class `place` of the block. */
V_INLINE vf dz_of(bool capped, bool tilted, const struct row_vectors *row, vf u, float weight, int32_t place,
                  vf inverse_cap) {
    vf softmax = row->p * v_exp_from(u, row->pivot);
    if (tilted) { /* The bound keeps -inf out; the exponential is 0 long before it. */
        const vf t = v_max(u - row->pivot, v_set(-256.0f));
        softmax *= v_fma(row->tilt, t, row->level);
    }
    vf dz = softmax - row->spread * v_set(weight);
    dz = v_select(row->label == place, dz - row->target, dz);
    if (capped) {
        const vf t = u * inverse_cap;
        dz *= v_fma(-t, t, v_set(1.0f));
    }
    return v_select(row->valid, dz, v_set(0.0f));
}

V_INLINE void gradient_as(bool pairs, bool capped, bool tilted, const struct lce_gradient *job, int64_t row_block,
                          int64_t column_block) {
    const struct lce_format f = format_of(pairs);
    const int group = pairs ? 2 * V_LANES : V_LANES; /* classes in one vector of a row of a left operand */
    const int64_t first_class = row_block * LCE_ROWS, first_row = column_block * LCE_COLUMNS;
    const int64_t classes = min64(LCE_ROWS, job->m - first_class), rows = min64(LCE_COLUMNS, job->n - first_row);
    const int64_t stride = job->stride ? job->stride : lce_out_stride(&f, job->n, column_block);
    const float *const block = job->u + lce_out_at(&f, job->m, job->n, first_class, column_block);
    const float *const weight = job->weight + first_class;
    const vf inverse_cap = v_set(capped ? 1.0f / job->cap : 0.0f);
    vi lane;
    for (int i = 0; i < V_LANES; i++)
        lane[i] = i;
    int32_t place[LCE_COLUMNS];
    place_labels(job->label + first_row, rows, job->first_class + first_class, classes, place);
    int64_t class_at[LCE_ROWS], row_at[LCE_COLUMNS]; /* in the operands */
    for (int64_t i = 0; i < classes; i++)
        class_at[i] = lce_left_row(&f, first_class + i);
    for (int64_t i = 0; i < rows; i++)
        row_at[i] = lce_left_row(&f, first_row + i);

    for (int64_t v = 0; v < classes; v += group) {
        const int64_t by_row_k = lce_left_k(&f, job->n, first_class + v);
        vf sum[2 * V_LANES];
        for (int i = 0; i < group; i++)
            sum[i] = v_set(0.0f);
        for (int64_t r = 0; r < rows; r += V_LANES) {
            const int64_t row = first_row + r, by_class_k = lce_left_k(&f, job->m, row);
            struct row_vectors here = {.pivot = v_load(RAFTER_F32, job->pivot + row),
                                       .p = v_load(RAFTER_F32, job->p + row),
                                       .target = v_load(RAFTER_F32, job->target + row),
                                       .spread = v_load(RAFTER_F32, job->spread + row),
                                       .label = (vi)v_load(RAFTER_F32, place + r),
                                       .valid = lane < (int32_t)(rows - r)};
            if (tilted) {
                here.level = v_load(RAFTER_F32, job->level + row);
                here.tilt = v_load(RAFTER_F32, job->tilt + row);
            }
            if (v + group < classes) /* these rows of logits are too short for the hardware to see a stream */
                fetch_part((const char *)(block + (v + group) * stride), min64(group, classes - v - group) * stride * 4,
                           r / V_LANES, ceil_div(rows, V_LANES));
            vf unit[V_LANES]; /* fp32 numbers, or bf16 pairs of adjacent classes */
            vh even = (vh){0};
            for (int i = 0; i < group; i++) {
                vf dz = v_set(0.0f);
                if (v + i < classes) {
                    const vf u = v_load(RAFTER_F32, block + (v + i) * stride + r);
                    dz = dz_of(capped, tilted, &here, u, weight[v + i], (int32_t)(v + i), inverse_cap);
                    sum[i] += dz;
                }
                const vh half = pairs ? round_halves(dz) : even;
                if (job->by_class && v + i < classes) {
                    char *const to = job->by_class + class_at[v + i] + by_class_k;
                    if (pairs)
                        memcpy(to, &half, sizeof half);
                    else
                        v_store(RAFTER_F32, to, dz);
                }
                if (!pairs)
                    unit[i] = dz;
                else if (i % 2 == 0)
                    even = half;
                else
                    unit[i / 2] = join_pairs(even, half);
            }
            if (job->by_row) {
                transpose(unit);
                for (int64_t i = 0; i < V_LANES && r + i < rows; i++)
                    v_store(RAFTER_F32, job->by_row + row_at[r + i] + by_row_k, unit[i]);
            }
        }
        const int64_t written = round_up(rows, V_LANES), padded = round_up(rows, f.step);
        for (int64_t i = 0; i < group && v + i < classes; i++) {
            if (job->by_class && padded > written) /* within one unit */
                memset(job->by_class + class_at[v + i] + lce_left_k(&f, job->m, first_row + written), 0,
                       (size_t)((padded - written) * f.element));
            if (job->sum)
                job->sum[column_block * job->m + first_class + v + i] = v_sum(sum[i]);
        }
    }
}

static void gradient(rafter_dtype dtype, const struct lce_gradient *job, int64_t row_block, int64_t column_block) {
    const bool pairs = is_pairs((int)dtype), capped = job->cap != 0.0f, tilted = job->level != NULL;
    if (pairs && tilted)
        gradient_as(true, capped, true, job, row_block, column_block);
    else if (tilted)
        gradient_as(false, capped, true, job, row_block, column_block);
    else if (pairs && capped)
        gradient_as(true, true, false, job, row_block, column_block);
    else if (pairs)
        gradient_as(true, false, false, job, row_block, column_block);
    else if (capped)
        gradient_as(false, true, false, job, row_block, column_block);
    else
        gradient_as(false, false, false, job, row_block, column_block);
}

/* ---- results --------------------------------------------------------------------------------- */

V_INLINE void store_as(int dtype, const float *source, int64_t n, float scale, bool add, char *destination,
                       int64_t stride) {
    int64_t i = 0;
    for (; stride == 1 && !add && i + 2 * V_LANES <= n; i += 2 * V_LANES)
        v_store2(dtype, destination + i * v_bytes(dtype), v_load(RAFTER_F32, source + i) * v_set(scale),
                 v_load(RAFTER_F32, source + i + V_LANES) * v_set(scale));
    for (; i < n; i += V_LANES) {
        const int64_t here = min64(V_LANES, n - i);
        char *const p = destination + i * stride * v_bytes(dtype);
        char buffer[V_LANES * 4];
        vf value = v_load_part(RAFTER_F32, source + i, here, 0.0f) * v_set(scale);
        if (add)
            value += v_load_part(dtype, v_gather(dtype, p, stride, here, buffer), here, 0.0f);
        if (stride == 1) {
            v_store_part(dtype, p, value, here);
        } else {
            v_store(dtype, buffer, value);
            v_scatter(dtype, buffer, p, stride, here);
        }
    }
}

static void store(rafter_dtype dtype, const float *source, int64_t n, float scale, bool add, char *destination,
                  int64_t stride) {
    V_FOR_DTYPE(dtype, d, store_as(d, source, n, scale, add, destination, stride));
}

V_INLINE void widen_as(int dtype, const char *source, int64_t stride, int64_t n, float *destination) {
    char buffer[V_LANES * 4];
    for (int64_t i = 0; i < n; i += V_LANES) {
        const int64_t here = min64(V_LANES, n - i);
        const char *const p = v_gather(dtype, source + i * stride * v_bytes(dtype), stride, here, buffer);
        v_store_part(RAFTER_F32, destination + i, v_load_part(dtype, p, here, 0.0f), here);
    }
}

static void widen(rafter_dtype dtype, const char *source, int64_t stride, int64_t n, float *destination) {
    V_FOR_DTYPE(dtype, d, widen_as(d, source, stride, n, destination));
}

static double peak(rafter_dtype dtype, int64_t iterations, char *scratch) {
    const bool pairs = is_pairs((int)dtype);
    const struct lce_format f = format_of(pairs);
    char *const left = scratch, *const right = left + f.rows * LCE_DEPTH_BYTES;
    float *const out = (float *)(right + f.columns * LCE_DEPTH_BYTES);
    const int64_t k = lce_depth(&f) / 2;
    if (pairs)
        begin_pairs();
    for (int64_t i = 0; i < iterations; i++)
        (pairs ? micro_pairs : micro_f32)(k, left, right, out, f.columns, true);
    if (pairs)
        end_pairs();
    return 2.0 * (double)(f.rows * f.columns * k) * (double)iterations;
}

extern const struct linear_cross_entropy_kernels RAFTER_KERNELS(linear_cross_entropy);
const struct linear_cross_entropy_kernels RAFTER_KERNELS(linear_cross_entropy) = {
    .format = {[RAFTER_F32] = F32_FORMAT, [RAFTER_BF16] = PAIR_FORMAT, [RAFTER_F16] = F32_FORMAT},
    .pack_left = pack_left,
    .pack_right = pack_right,
    .pack_right_transposed = pack_right_transposed,
    .product = product,
    .logits = logits,
    .gradient = gradient,
    .few_logits = few_logits,
    .few_sum = few_sum,
    .few_apply = few_apply,
    .few_pack = few_pack,
    .few_pairs = LCE_FEW_PAIRS,
    .fold = fold,
    .store = store,
    .widen = widen,
    .peak = peak,
};

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Part of cuda.cu, in its namespace: the usual call. Mean or sum, no weights, smoothing, cap, scale or z_loss, nothing
 * asked for beside loss, row losses and lse, and everything neighbours in memory. Its kernels do the same as the others
 * but take few parameters and few instructions: both are cold when a kernel starts, and where rows are short that is
 * most of the time.
 *
 *     rows of up to 2 KB, or 4 KB with a gradient   usual_short_rows
 *     forward                                       usual_long_rows, usual_sum
 *     backward from lse                             usual_coefficients, usual_gradients
 *     statistics and gradient                       usual_factor, usual_on_chip, usual_sum
 */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_USUAL_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_USUAL_CUH

constexpr int ONE_BLOCK = 512; /* threads of a kernel that is one block */

/* The gradient of a row is c e^(z - pivot), and less by `target` at the label; or all c, where that is negative. */
struct alignas(16) UsualGradient {
    float c, pivot, target;
    int label;
};

struct Usual {
    const char *z; /* logits */
    char *dz;
    int64_t z_step, dz_step; /* between rows, in bytes */
    const void *labels;
    float *lse;
    int64_t ignore_index;
    int rows, classes;
    bool wide_labels;         /* of 8 bytes */
    int *bad_labels;          /* set to 1 where a label is out of range */
    double *losses;           /* of all rows, for usual_sum; of blocks of usual_short_rows, with their counts */
    unsigned *counter;        /* of those blocks that have ended; 0 between calls */
    float *row_loss;          /* NULL: not wanted */
    float *loss;              /* of all rows together; NULL: not wanted */
    const float *dloss;       /* NULL: 1 */
    const float *denominator; /* NULL: the number of labels that are not ignored */
    bool mean, zero_if_all_ignored;

    template <typename T> DEVICE const T *row_of_z(int row) const {
        return reinterpret_cast<const T *>(z + row * z_step);
    }
    template <typename T> DEVICE T *row_of_dz(int row) const {
        return reinterpret_cast<T *>(dz + row * dz_step);
    }
    /* Apart, so that a label can be on its way while something else is done. */
    DEVICE int64_t load_label(int row) const {
        return wide_labels ? load_now(static_cast<const int64_t *>(labels) + row)
                           : load_now(static_cast<const int *>(labels) + row);
    }
    DEVICE int class_of(int64_t label) const {
        return label == ignore_index                     ? static_cast<int>(IGNORED)
               : static_cast<uint64_t>(label) >= classes ? static_cast<int>(OUT_OF_RANGE)
                                                         : static_cast<int>(label);
    }
    /* Labels that are not ignored, by all THREADS of a block. */
    template <int THREADS, typename L> DEVICE int count_in(const L *all) const {
        constexpr int AT_ONCE = 16;
        int counted = 0;
#pragma unroll 1
        for (int first = threadIdx.x; first < rows; first += AT_ONCE * THREADS) {
            L label[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                label[k] = all[min(first + k * THREADS, rows - 1)];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                counted += first + k * THREADS < rows && label[k] != ignore_index;
        }
        return block_sum(counted);
    }
    template <int THREADS> DEVICE int count() const {
        return wide_labels ? count_in<THREADS>(static_cast<const int64_t *>(labels))
                           : count_in<THREADS>(static_cast<const int *>(labels));
    }
    DEVICE double divisor(double counted) const {
        return !mean ? 1.0 : denominator ? *denominator : counted;
    }
    /* What all gradients are multiplied by; to be called by all THREADS of a block. */
    template <int THREADS> DEVICE double factor() const {
        const float upstream = dloss ? *dloss : 1.0f;
        return upstream / divisor(mean && !denominator ? count<THREADS>() : 0);
    }

    /* Writes what is wanted of a row, by one thread, and returns its loss. */
    DEVICE double finish_row(int row, int label, RowStats s, float z_label) const {
        double of_row, log_sum_exp;
        if (label >= 0) {
            const double log_sum = log(static_cast<double>(s.max == INFINITY ? NAN : s.sum));
            of_row = at_least_zero((static_cast<double>(s.max) - z_label) + log_sum);
            log_sum_exp = s.max + log_sum;
        } else {
            of_row = log_sum_exp = label == IGNORED ? 0.0 : NAN;
            warn(label);
        }
        if (lse)
            lse[row] = static_cast<float>(log_sum_exp);
        if (row_loss)
            row_loss[row] = static_cast<float>(of_row);
        return of_row;
    }
    /* Writes the loss of all rows, by one thread. */
    DEVICE void finish(double sum, double counted) const {
        if (loss)
            *loss = mean && counted == 0.0 && zero_if_all_ignored ? 0.0f : static_cast<float>(sum / divisor(counted));
    }
    DEVICE void warn(int label) const {
        if (label == OUT_OF_RANGE)
            *static_cast<volatile int *>(bad_labels) = 1;
    }

    /* `factor` is what all gradients are multiplied by. */
    DEVICE UsualGradient gradient_unread(int label) const {
        return {label == IGNORED ? 0.0f : NAN, 0.0f, 0.0f, label};
    }
    DEVICE UsualGradient gradient_from_lse(int label, double factor, float given) const {
        return {static_cast<float>(factor), given, static_cast<float>(factor), label};
    }
    DEVICE UsualGradient gradient_from_stats(int label, double factor, RowStats s) const {
        const float sum = s.max == INFINITY ? NAN : s.sum;
        if (sum == 0.0f)
            return {0.0f, 0.0f, 0.0f, static_cast<int>(IGNORED)};
        return {static_cast<float>(factor / static_cast<double>(sum)), s.max, static_cast<float>(factor), label};
    }
};

/* Writes packs first, first + step, ... of a row of `packs`. z_label: of the label, if its pack is one of those. */
template <typename T, int COUNT>
DEVICE void write_packs(T *dz, const Pack<T, WIDE<T>> (&pack)[COUNT], int first, int step, int packs,
                        const UsualGradient &g, float z_label, bool mine) {
    constexpr int N = WIDE<T>;
    const ScaledExp<T> of(g.c, g.pivot, 1.0f);
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (first + k * step < packs)
            store_once<T, N>(dz + (first + k * step) * N, g.label < 0 ? all_of<T, N>(g.c) : of.of(pack[k]));
    if (mine)
        dz[g.label] = from_float<T>(g.c * expf(z_label - g.pivot) - g.target);
}

/* ---- rows that fit into a warp's registers --------------------------------------------------- */

/* The losses of a block's rows, and how many count, have been written by its threads; the last block writes the loss of
 * all. To be called by all threads. */
template <int ROWS> DEVICE void add_up_rows(const Usual &u, const double2 (&of_row)[ROWS]) {
    double2 *const of_block = reinterpret_cast<double2 *>(u.losses);
    __syncthreads();
    if (threadIdx.x == 0) {
        double2 sum = of_row[0];
#pragma unroll
        for (int i = 1; i < ROWS; i++)
            sum = make_double2(sum.x + of_row[i].x, sum.y + of_row[i].y);
        of_block[blockIdx.x] = sum;
    }
    if (!block_arrives_last(u.counter, gridDim.x))
        return;
    double2 sum = {};
    for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
        const double2 more = __ldcg(&of_block[i]);
        sum = make_double2(sum.x + more.x, sum.y + more.y);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        u.finish(sum.x, sum.y);
}

/* A warp to a row, PACKS to each of its lanes. */
template <typename T, int PACKS, bool FORWARD, bool GRADIENT>
__global__ __launch_bounds__(ROW_THREADS) void usual_short_rows(const __grid_constant__ Usual u) {
    constexpr int N = WIDE<T>;
    const int lane = threadIdx.x % WARP, own = (blockIdx.x * ROW_THREADS + threadIdx.x) / WARP;
    const bool there = own < u.rows;
    const int row = there ? own : u.rows - 1, packs = u.classes / N;
    const T *const z = u.row_of_z<T>(row);
    Pack<T, N> pack[PACKS];
    load_packs(pack, z, packs, lane, WARP);
    loads_so_far_first();
    const int64_t loaded = u.load_label(row);
    const float given = FORWARD || !u.lse ? INFINITY : load_now(u.lse + row);
    const double factor = GRADIENT ? u.factor<ROW_THREADS>() : 0.0;
    const int label = u.class_of(loaded);
    const float z_label = label >= 0 ? to_float(z[label]) : 0.0f;
    const bool serves = lse_serves<T>(given);
    RowStats s = no_elements();
    if (__any_sync(~0u, label >= 0 && !serves)) {
        add_packs(s, pack, 1.0f);
        s = merge_lanes<WARP>(s, 1.0f);
    }
    if (GRADIENT) {
        __syncwarp(); /* nobody writes dz over a logit that another lane has yet to read */
        if (!FORWARD && lane == 0)
            u.warn(label);
        const UsualGradient g = label < 0 ? u.gradient_unread(label)
                                : serves  ? u.gradient_from_lse(label, factor, given)
                                          : u.gradient_from_stats(label, factor, s);
        const bool mine = there && g.label >= 0 && g.label / N % WARP == lane;
        write_packs(u.row_of_dz<T>(row), pack, lane, WARP, there ? packs : 0, g, z_label, mine);
    }
    if (FORWARD) {
        __shared__ double2 of_row[ROW_THREADS / WARP];
        if (lane == 0)
            of_row[threadIdx.x / WARP] =
                there ? make_double2(u.finish_row(row, label, s, z_label), label != IGNORED) : make_double2(0.0, 0.0);
        if (u.loss)
            add_up_rows(u, of_row);
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* A block to a row, of which a thread loads AT_ONCE packs at a time. */
template <typename T, int AT_ONCE>
__global__ __launch_bounds__(MOST_THREADS, 3) void usual_long_rows(const __grid_constant__ Usual u) {
    constexpr int N = WIDE<T>;
    start_next_kernel();
    const int row = blockIdx.x, packs = u.classes / N, threads = blockDim.x;
    const T *const z = u.row_of_z<T>(row);
    Pack<T, N> pack[AT_ONCE];
    load_packs(pack, z, packs, threadIdx.x, threads);
    loads_so_far_first();
    const int label = u.class_of(u.load_label(row));
    const float z_label = threadIdx.x == 0 && label >= 0 ? to_float(z[label]) : 0.0f;
    const RowStats s =
        label >= 0 ? merge_block(stats_of_packs(pack, z, packs, threadIdx.x, threads), 1.0f) : no_elements();
    if (threadIdx.x == 0)
        u.losses[row] = u.finish_row(row, label, s, z_label);
}

/* The loss of all rows. One block. */
__global__ __launch_bounds__(ONE_BLOCK) void usual_sum(const __grid_constant__ Usual u) {
    constexpr int AT_ONCE = 8;
    const int counted = u.mean ? u.count<ONE_BLOCK>() : 0;
    wait_for_previous_kernel();
    double sum = 0.0;
    for (int first = threadIdx.x; first < u.rows; first += AT_ONCE * ONE_BLOCK) {
        double loss[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            loss[k] = __ldcg(&u.losses[min(first + k * ONE_BLOCK, u.rows - 1)]);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            sum += first + k * ONE_BLOCK < u.rows ? loss[k] : 0.0;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        u.finish(sum, counted);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* A thread to a row. Rows whose lse does not serve are read, by the whole warp. */
template <typename T>
__global__ __launch_bounds__(ROW_THREADS) void usual_coefficients(const __grid_constant__ Usual u,
                                                                  UsualGradient *of_row) {
    start_next_kernel();
    const int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_THREADS + threadIdx.x;
    const bool there = row < u.rows;
    const int64_t loaded = there ? u.load_label(row) : u.ignore_index;
    const float given = there ? load_now(u.lse + row) : 0.0f;
    const double factor = u.factor<ROW_THREADS>();
    const int label = u.class_of(loaded);
    UsualGradient g = label < 0 ? u.gradient_unread(label) : u.gradient_from_lse(label, factor, given);
    for (unsigned left = __ballot_sync(~0u, label >= 0 && !lse_serves<T>(given)); left != 0; left &= left - 1) {
        const int of = __ffs(left) - 1;
        const Stretch<const T> z(u.row_of_z<T>(row - lane + of), u.classes);
        const RowStats s = merge_lanes<WARP>(stats_of(z, lane, WARP, 1.0f), 1.0f);
        if (lane == of)
            g = u.gradient_from_stats(label, factor, s);
    }
    if (there) {
        u.warn(label);
        of_row[row] = g;
    }
}

/* A block to a part of a row, or to a whole one. */
template <typename T>
__global__ __launch_bounds__(GRADIENT_THREADS,
                             1536 / GRADIENT_THREADS) void usual_gradients(const __grid_constant__ Usual u,
                                                                           const Divisor parts,
                                                                           const UsualGradient *of_row) {
    constexpr int THREADS = GRADIENT_THREADS, PACKS = GRADIENT_PACKS;
    constexpr int N = WIDE<T>;
    const int row = static_cast<int>(parts.quotient(blockIdx.x)), part = blockIdx.x - row * parts.number;
    const int first = part * (THREADS * PACKS) + threadIdx.x, packs = u.classes / N;
    const T *const z = u.row_of_z<T>(row);
    Pack<T, N> pack[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++)
        if (first + k * THREADS < packs)
            pack[k] = load_once<T, N>(z + (first + k * THREADS) * N);
    wait_for_previous_kernel();
    const UsualGradient g = of_row[row];
    const unsigned own = g.label / N - first; /* a multiple of THREADS: the label's pack is this thread's */
    const bool mine = g.label >= 0 && own < THREADS * PACKS && own % THREADS == 0;
    const float z_label = mine ? to_float(z[g.label]) : 0.0f;
    write_packs(u.row_of_dz<T>(row), pack, first, THREADS, packs, g, z_label, mine);
}

/* ---- rows held on chip ----------------------------------------------------------------------- */

/* What all gradients are multiplied by. One block. */
__global__ __launch_bounds__(ONE_BLOCK) void usual_factor(const __grid_constant__ Usual u, double *factor) {
    start_next_kernel();
    const double of_call = u.factor<ONE_BLOCK>();
    if (threadIdx.x == 0)
        *factor = of_call;
}

/* As on_chip. */
template <typename T, class Shape>
__global__ __launch_bounds__(Shape::THREADS, Shape::PER_SM) void usual_on_chip(const __grid_constant__ Usual u,
                                                                               const double *of_call) {
    extern __shared__ __align__(128) uint4 slot_memory[];
    constexpr int N = WIDE<T>, THREADS = Shape::THREADS, OWN = Shape::IN_REGISTERS, COPIED = Shape::COPIED,
                  STEP = COPIED * THREADS;
    const int thread = threadIdx.x, row = blockIdx.x, packs = u.classes / N;
    const T *const z = u.row_of_z<T>(row);
    T *const dz = u.row_of_dz<T>(row);
    Pack<T, N> own[OWN];
    load_packs(own, z, packs, thread, THREADS);
    const int64_t loaded = u.load_label(row);

    /* No other thread ever touches the slot of a pack: each waits for its own copies alone. */
    Pack<T, N> *const slots = reinterpret_cast<Pack<T, N> *>(slot_memory) - OWN * THREADS; /* of pack i: slots[i] */
    const int first = OWN * THREADS + thread;
    /* Up to here all threads have a whole group: no more questions. */
    const int whole = packs < OWN * THREADS ? 0 : packs - (packs - OWN * THREADS) % STEP;
    int groups = 0;
    const auto fetch = [&] {
        int i = first;
        for (; i < whole; i += STEP, groups++) {
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                copy_async<T, N>(slots + i + k * THREADS, z + (i + k * THREADS) * N);
            copy_commit();
        }
        for (; i < packs; i += THREADS)
            copy_async<T, N>(slots + i, z + i * N);
        copy_commit();
    };
    if (Shape::PER_SM == 1) /* alone on its SM: no other block makes use of the wait for the label */
        fetch();
    start_next_kernel();
    const int label = u.class_of(loaded);
    if (Shape::PER_SM > 1 && label >= 0)
        fetch();
    const bool mine = label >= 0 && label / N % THREADS == thread;
    const float z_label = mine || (label >= 0 && thread == 0) ? to_float(z[label]) : 0.0f;
    RowStats s = no_elements();
    if (label >= 0) {
        add_packs(s, own, 1.0f);
        Pack<T, N> pack[COPIED];
        int i = first;
        for (; i < whole; i += STEP) {
            copy_wait_all_but(groups--);
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                pack[k] = slots[i + k * THREADS];
            add_packs(s, pack, 1.0f);
        }
        copy_wait<0>();
        if (i < packs) {
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                pack[k] = i + k * THREADS < packs ? slots[i + k * THREADS] : all_of<T, N>(-INFINITY);
            add_packs(s, pack, 1.0f);
        }
        s = merge_block<PLAIN>({s}, 1.0f).s;
    } else {
        copy_wait<0>();
    }
    wait_for_previous_kernel();
    const UsualGradient g = label < 0 ? u.gradient_unread(label) : u.gradient_from_stats(label, __ldcg(of_call), s);
    if (g.label < 0) {
        for (int i = thread; i < packs; i += THREADS)
            store_once<T, N>(dz + i * N, all_of<T, N>(g.c));
    } else {
        const ScaledExp<T> of(g.c, g.pivot, 1.0f);
        int i = first;
        for (; i < whole; i += STEP)
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                store_once<T, N>(dz + (i + k * THREADS) * N, of.of(load_once<T, N>(slots[i + k * THREADS].v)));
        for (; i < packs; i += THREADS)
            store_once<T, N>(dz + i * N, of.of(load_once<T, N>(slots[i].v)));
        write_packs(dz, own, thread, THREADS, packs, g, z_label, mine);
    }
    if (thread == 0)
        u.losses[row] = u.finish_row(row, label, s, z_label);
}

/* ---- whether a call is usual ----------------------------------------------------------------- */

/* Whether the call is a usual one; `u` is it then, but for its scratch memory. */
bool take_usual(const Call &c, Usual *u) {
    const Loss &l = c.loss;
    const int64_t element = rafter_dtype_bytes(c.z.dtype);
    if (l.reduction == RAFTER_NONE || l.weighted || l.z_loss != 0.0f || l.softcap != 0.0f || l.scale != 1.0f ||
        l.class_weight || l.row_weight.data || l.logprob.data || l.entropy.data || l.argmax.data)
        return false;
    if (l.rows == 0 || l.rows > 2 * SCANNED_ROWS || l.classes == 0 || l.classes > 1 << 30 || c.z_step != 1 ||
        !c.z.in_packs(l.classes) || (c.gradient && (c.dz_step != 1 || !c.dz.in_packs(l.classes))) ||
        !l.target.in_line() || (l.lse.data && (!l.lse.in_line() || l.lse.dtype != RAFTER_F32)) ||
        (l.row_loss.data && !l.row_loss.in_line()))
        return false;
    *u = {c.z.data,
          c.dz.data,
          c.z.step * element,
          c.dz.step * element,
          l.target.data,
          reinterpret_cast<float *>(l.lse.data),
          l.ignore_index,
          static_cast<int>(l.rows),
          static_cast<int>(l.classes),
          l.target.dtype == RAFTER_I64,
          l.bad_labels,
          nullptr,
          c.counter,
          reinterpret_cast<float *>(l.row_loss.data),
          reinterpret_cast<float *>(l.loss.data),
          reinterpret_cast<const float *>(l.dloss.data),
          l.denominator,
          l.reduction == RAFTER_MEAN,
          l.zero_if_all_ignored};
    return true;
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rafter: fused training operations for language models.
 *
 *     #include <rafter/rafter.h>
 *
 *     rafter_context *ctx;
 *     if (rafter_context_create(&ctx, NULL) != RAFTER_OK) ...
 *
 *     int64_t rows[] = {4096}, grid[] = {4096, 32000};
 *     DLTensor logits = rafter_tensor(z, RAFTER_BF16, 2, grid);
 *     DLTensor target = rafter_tensor(y, RAFTER_I64, 1, rows);
 *     float value;
 *     DLTensor loss = rafter_tensor(&value, RAFTER_F32, 0, NULL);
 *
 *     rafter_cross_entropy_args args = {.size = sizeof args, .logits = &logits, .target = &target, .loss = &loss};
 *     if (rafter_cross_entropy_forward(ctx, &args) != RAFTER_OK)
 *         fprintf(stderr, "%s\n", rafter_last_error(ctx));
 *     rafter_context_destroy(ctx);
 *
 * What holds for every call
 * -------------------------
 * Tensors are DLPack's DLTensor with strides honoured: padded rows, transposed views, and stride 0
 * in inputs. Inputs are fp32, bf16 or fp16; everything inside is computed in fp32 or better and
 * rounded once, to nearest even, when stored. Labels and positions are int32 or int64.
 *
 * Sizes: a tensor has at most 2^47 elements (repeated ones, of stride 0, count), and its last element
 * is less than 2^47 elements after its first. linear_cross_entropy has at most 2^47 logits, N V. More
 * is refused.
 *
 * Argument structs: set `.size` to sizeof the struct, so that the struct can grow without breaking
 * the ABI. Leave what you do not need at zero: zero means default. A NULL output is not computed.
 * Reserved fields must be zero.
 *
 * Errors: every call returns a status. If it is not RAFTER_OK, no output has been written (but see
 * RAFTER_DEVICE_ERROR and RAFTER_COLLECTIVE_FAILED), and rafter_last_error() names the argument, what
 * was given and what was wanted. No call exits, prints or throws.
 *
 * Memory: an output may not overlap anything else that the call reads or writes, nor itself (stride
 * 0), except where a block below says "in place". Scratch memory comes from `.workspace` if given,
 * else from the context's allocator. rafter_<op>_workspace() returns how many bytes a call with the
 * same arguments takes. A call is refused if its workspace overlaps `.saved`, or any memory between
 * the first and the last element of a tensor of the call. The default allocator of a CPU context keeps
 * the last block of 4 MiB or more until the context is destroyed, and uses it for later calls that fit.
 *
 * CUDA: a call enqueues work on the context's stream and returns. It never waits for the device. It
 * can be captured into a graph, and the graph can be replayed with other data in the same memory.
 * Nothing is allocated during a capture: give a workspace, or make the same call once before. A
 * graph uses memory of the context, so it may be replayed only while the context lives, ordered
 * with the context's stream. The stream must outlive the context. rafter_context_destroy() waits for
 * the device, so it may be called while work is queued, but not during a capture.
 *
 * Threads: a context serves one call at a time. Different contexts may be used from different
 * threads at the same time. All contexts share the library's worker threads; there are never more of
 * them than the context with the most `threads` asks for. Calls that run at the same time divide the
 * workers: no more threads run than there are processors, or than one of the contexts asks for,
 * whichever is more. If threads cannot be created, a call has fewer. After fork(), parent and child may
 * go on calling, from any thread; the child gets workers of its own. Workers handle no signals but
 * faults and SIGPROF. They end when the process exits or the library is unloaded; do not unload it
 * during a call.
 *
 * Stack: a CPU call takes at most 32 KiB of its caller's stack.
 *
 * Floating-point environment: on a CPU, every thread of a call uses the caller's rounding mode, and
 * flushes subnormal numbers if the caller does. No call traps, whatever exceptions the caller has
 * enabled, and none changes the caller's exception flags.
 *
 * Determinism: the same call gives the same bits every time, for any number of threads, wherever in
 * memory its tensors are. In another batch, a row may have other bits, unless the context is batch
 * invariant: see rafter_context_set_batch_invariant.
 *
 * Zero-size tensors are valid where PyTorch accepts them.
 *
 * docs/reliability.md names the test that holds each of these promises.
 */
#ifndef RAFTER_H
#define RAFTER_H

#include <stddef.h>
#include <stdint.h>

#include "dlpack.h"

#if defined(_WIN32)
#define RAFTER_API
#else
#define RAFTER_API __attribute__((visibility("default")))
#endif

#define RAFTER_VERSION_MAJOR 0
#define RAFTER_VERSION_MINOR 2
#define RAFTER_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------------
 * Status
 */

/* Values are pinned: they never change meaning. */
typedef enum rafter_status {
    RAFTER_OK = 0,
    RAFTER_INVALID_ARGUMENT = 1,    /* NULL, a wrong shape, dtype or stride, an option out of range, an overlap */
    RAFTER_UNSUPPORTED = 2,         /* valid, but this build or device cannot do it */
    RAFTER_LABEL_OUT_OF_RANGE = 3,  /* a label outside [0, V) that is not ignore_index (CPU; see cross_entropy) */
    RAFTER_OUT_OF_MEMORY = 4,       /* the context's allocator returned NULL */
    RAFTER_WORKSPACE_TOO_SMALL = 5, /* .workspace_bytes, or the byte budget, is under what the call needs */
    RAFTER_DEVICE_ERROR = 6,        /* the CUDA runtime failed: rafter_last_error() has its message; outputs may have
                                     * been written */
    RAFTER_COLLECTIVE_FAILED = 7,   /* a function of a communicator returned an error; outputs may have been written */
    RAFTER_RANKS_DISAGREE = 8       /* ranks of a group made different calls, or the call failed on another rank */
} rafter_status;

/* "ok", "invalid argument", ...: a static string, for any value. */
RAFTER_API const char *rafter_status_name(rafter_status status);

/* "0.2.0": the version of the library that is running, which may be newer than the header. */
RAFTER_API const char *rafter_version(void);

/* -------------------------------------------------------------------------------------------------
 * Context
 */

typedef struct rafter_context rafter_context;

typedef struct rafter_context_options {
    size_t size;             /* sizeof(rafter_context_options) */
    DLDevice device;         /* zero: the CPU */
    void *stream;            /* CUDA: the cudaStream_t that calls are enqueued on */
    int32_t threads;         /* CPU threads a call may use, at most 1024; 0: OMP_NUM_THREADS, else all processors */
    int32_t batch_invariant; /* 0 or 1: see rafter_context_set_batch_invariant */
    /* NULL: the best variant for each call. A CPU level ("portable", "avx2", "neon", ...): no
     * newer CPU kernels than this. A CUDA variant (`rafter info` lists them): ops that have a
     * variant of that name use no other, and refuse calls that it does not serve. The environment
     * variable RAFTER_VARIANT, if set, overrides this. */
    const char *variant;
    /* Allocator of scratch memory: both functions or neither. `allocate` returns memory aligned to
     * 64 bytes, or NULL. On CUDA both are called while work is being enqueued; the work uses the
     * memory later, in stream order. PyTorch's allocator and cudaMallocAsync allow that; cudaFree
     * would wait for the device. CUDA calls that take at most 1 MiB use memory of the context and
     * do not call the allocator. */
    void *(*allocate)(void *user, size_t bytes);
    void (*release)(void *user, void *memory, size_t bytes);
    void *user; /* first argument of the functions of this struct */
    /* CPU. NULL: calls use the library's own threads. Else calls use the host's: `parallel` calls
     * work(arg, i) for the i in [0, count), at the same time, on any threads, and returns when all
     * these calls have returned. count is at most `threads`. Each i is called at most once; with too
     * few threads `parallel` may leave some i out, and the calling thread does what is left. Meant for
     * hosts whose own threads stay awake between calls, as OpenMP's do: they would compete with the
     * library's. */
    void (*parallel)(void *user, int32_t count, void (*work)(void *arg, int32_t i), void *arg);
} rafter_context_options;

/* `options` may be NULL. On failure *context is NULL, and rafter_last_error(NULL) says why.
 * RAFTER_UNSUPPORTED: the variant is unknown or cannot run on this machine, or librafter_cuda or a
 * driver is missing for a CUDA device. */
RAFTER_API rafter_status rafter_context_create(rafter_context **context, const rafter_context_options *options);
RAFTER_API void rafter_context_destroy(rafter_context *context); /* NULL is fine */

/* CUDA: later calls are enqueued on this stream. The function itself enqueues nothing, so it may be
 * called during a capture. Work on the old stream and work on the new one must not run at the same
 * time: the caller orders the two streams. RAFTER_INVALID_ARGUMENT on a CPU context. */
RAFTER_API rafter_status rafter_context_set_stream(rafter_context *context, void *stream);

/* Batch invariance, for later calls. 1: the bits of a row's results do not depend on how many rows the
 * call has, on what the other rows hold, or on where the row is among them. The results of a row are
 *     cross_entropy, linear_cross_entropy   row_loss, loss without reduction, lse, logprob, entropy,
 *                                           argmax; its row of dlogits or dx, for the same upstream
 *                                           gradient (that of a mean depends on the other rows)
 *     logsumexp, act, scale                 lse, y, dx of a line along `dim`, or of an element
 *     lrpe_cosine                           y, dx of a token; with softmax over the sequence, of a batch
 *                                           entry
 * dweight, dbias, dtheta and reduced losses are sums over rows, and are not covered.
 *
 * The promise holds between calls that are otherwise the same: lengths, dtypes, options, wanted results,
 * strides within a row, device and build. On CUDA, if a row is a whole multiple of 16 bytes, rows must
 * begin at multiples of 16 bytes in all of the calls, or in none.
 *
 * Cost: work is cut by the lengths of rows alone. On CUDA, 2048 or more rows of whole multiples of 16
 * bytes take as long as without the option; other rows up to a third longer in most calls, columns up to
 * twice as long, and few long rows longer still: docs/perf/batch_invariance.md. (On a CPU without the
 * option, rows depend on each other only if there are few, or if their elements are not adjacent.)
 *
 * Some calls cannot be served so, and fail with RAFTER_UNSUPPORTED: linear_cross_entropy with dx summed
 * over more than two ranks, because the communicator chooses the order of that sum; and on CUDA,
 * cross_entropy with class_group; linear_cross_entropy with a budget, or with fp32 inputs and class_group;
 * cross_entropy and logsumexp of more than 2^30 short rows, or of more than 2^30 parts of columns, of 256
 * elements each. */
RAFTER_API rafter_status rafter_context_set_batch_invariant(rafter_context *context, int32_t batch_invariant);

/* Why the last call on this context failed; "" if it did not. Valid until the next call. For NULL:
 * why the calling thread's last rafter_context_create failed. */
RAFTER_API const char *rafter_last_error(const rafter_context *context);

/* The most scratch memory, in bytes, that a call on this context has held since the last reset. */
RAFTER_API size_t rafter_peak_workspace(const rafter_context *context);
RAFTER_API void rafter_reset_peak_workspace(rafter_context *context);

/* -------------------------------------------------------------------------------------------------
 * Tensors
 */

typedef enum rafter_dtype {
    RAFTER_F32 = 0,
    RAFTER_BF16 = 1,
    RAFTER_F16 = 2,
    RAFTER_I32 = 3,
    RAFTER_I64 = 4,
    RAFTER_U8 = 5
} rafter_dtype;

/* A row-major tensor without gaps over your CPU memory. `shape` must outlive it. A convenience: any
 * DLTensor works. An unknown dtype gives a tensor that every call refuses. */
RAFTER_API DLTensor rafter_tensor(void *data, rafter_dtype dtype, int32_t ndim, int64_t *shape);

typedef enum rafter_direction { RAFTER_FORWARD = 0, RAFTER_BACKWARD = 1 } rafter_direction;

/* -------------------------------------------------------------------------------------------------
 * Groups of ranks: one call, made by several processes or GPUs together
 *
 * The library has no transport of its own. A rafter_communicator wraps the caller's: three collective
 * functions, which rafter/mpi.h and rafter/nccl.h fill in for MPI and NCCL. The library calls them in
 * the same order on every rank of the group.
 *
 * On CUDA a function enqueues its work on `stream`, a cudaStream_t of the context's device, which need
 * not be the context's own stream. On a CPU `stream` is NULL, and the function returns when the data is
 * there. All pointers are to memory of the context's device. A function returns 0 for success; anything
 * else fails the call with RAFTER_COLLECTIVE_FAILED, and `describe`, if given, turns the number into
 * text.
 *     all_gather          `bytes` bytes of `send` from every rank, in rank order, into `receive`
 *     all_reduce_sum      in place: `data` becomes the fp32 sum over the ranks, the same bits on all
 *     reduce_scatter_sum  rank r receives the sums of elements [r count, (r + 1) count) of `send`,
 *                         which has ranks * count elements. NULL: not available.
 *
 * The struct and what it points to must live until the call returns; on CUDA, what `user` points to must
 * live until the enqueued work is done.
 *
 * class_group (in rafter_loss_options): the classes are cut into shards, one per rank, in the order
 * of the ranks. A rank passes the logits, or the rows of weight and bias, of classes [first_class,
 * first_class + n), where n is the size of its own tensor: any number, also 0. The shards together
 * are [0, classes). Everything else is the same on every rank: x, the labels, which are numbers in
 * [0, classes), row weights, dloss, and class_weight, which has all `classes` elements.
 * Every rank gets the same outputs, bit for bit: those of the loss over all classes (argmax is a class
 * in [0, classes)). It gets the gradients of its own tensors. dx is summed over the ranks, in fp32, and
 * is the same on every rank; if the communicator has reduce_scatter_sum, dx may instead be [rows /
 * ranks, D]: this rank's share of the rows, in rank order.
 * A call moves one all-gather of 16 bytes per row and rank, if statistics are computed (32 bytes with
 * entropy, dentropy or argmax; on a CPU also with label smoothing), and one sum of dx if dx is wanted.
 * On a CPU it begins with an all-gather of 320 bytes per rank, in which the ranks compare their calls.
 *
 * row_group: each rank has rows of its own, any number of them, also 0. Sums and means are over the
 * rows of all ranks: the loss is the sum over all ranks, and so is mean's denominator unless it is
 * given. Every rank gets the same loss. Gradients are those of that loss: for a tensor that the ranks
 * share, sum them over the ranks, do not average them. Per-row outputs, and reduction none, are as
 * without a group.
 *
 * Both groups may be given: a grid of ranks, in which class_group is this rank's row of the grid.
 *
 * Errors on a CPU: if the ranks of a group disagree in what must be the same, or the call fails on
 * one of them, the call fails on every rank, before anything is written; the message names the rank
 * and what differs. What cannot be known on CUDA without waiting is in docs/distributed.md.
 */

typedef struct rafter_communicator {
    size_t size; /* sizeof(rafter_communicator) */
    void *user;  /* given to every function */
    int32_t rank;
    int32_t ranks;
    int (*all_gather)(void *user, const void *send, void *receive, size_t bytes, void *stream);
    int (*all_reduce_sum)(void *user, float *data, size_t count, void *stream);
    int (*reduce_scatter_sum)(void *user, const float *send, float *receive, size_t count, void *stream);
    const char *(*describe)(void *user, int error); /* NULL: only the number is reported */
    /* CUDA: how many multiprocessors a sum of dx occupies. The product for dweight, which runs beside it,
     * leaves that many free: see docs/distributed.md. 0: none, or not known; the product then uses all,
     * and has to wait for those that the sum occupies. */
    int32_t multiprocessors;
} rafter_communicator;

/* -------------------------------------------------------------------------------------------------
 * act: y = f(x), element by element, or softmax over one dimension
 *
 *     rafter_act_args a = {.size = sizeof a, .kind = RAFTER_ACT_SILU, .x = &x, .y = &y};
 *     rafter_act_forward(ctx, &a);
 *
 * All tensors have x's shape and dtype.
 * Forward:  y from x. In place (y is x: same data and strides) is allowed.
 * Backward: dx from dy, and x for relu, sigmoid and silu, or y (the forward's result) for softmax.
 *           dx may be dy (in place).
 * `none` copies nothing when y is x (or dx is dy), and copies otherwise. The derivative of relu at
 * 0 is 0.
 * group: softmax only. The tensors are this rank's part of `dim`, of any length, also 0. The softmax is
 * over the parts of all ranks; see "Groups of ranks". Forward and backward each gather 8 bytes per line
 * and rank.
 * relu_mask: optional with relu, a flat uint8 tensor of ceil(numel / 8) bytes; bit i % 8 of byte i
 * / 8 is set where element i (row-major order) of x is above 0, or NaN. Forward writes it;
 * backward, when it is given, reads it instead of x. The other tensors must then be contiguous.
 */

typedef enum rafter_act_kind {
    RAFTER_ACT_NONE = 0,
    RAFTER_ACT_RELU = 1,
    RAFTER_ACT_SIGMOID = 2,
    RAFTER_ACT_SILU = 3,
    RAFTER_ACT_SOFTMAX = 4
} rafter_act_kind;

typedef struct rafter_act_args {
    size_t size; /* sizeof(rafter_act_args) */
    rafter_act_kind kind;
    int32_t dim; /* softmax only: -ndim .. ndim-1. Zero is the first dimension, not a default */
    const DLTensor *x;
    const DLTensor *y;
    const DLTensor *dy;
    const DLTensor *dx;
    const DLTensor *relu_mask; /* relu only; optional */
    void *workspace;
    size_t workspace_bytes;
    const rafter_communicator *group; /* NULL: this call has all of dim */
} rafter_act_args;

RAFTER_API rafter_status rafter_act_forward(rafter_context *context, const rafter_act_args *args);
RAFTER_API rafter_status rafter_act_backward(rafter_context *context, const rafter_act_args *args);
RAFTER_API rafter_status rafter_act_workspace(rafter_context *context, const rafter_act_args *args,
                                              rafter_direction direction, size_t *bytes);

/* -------------------------------------------------------------------------------------------------
 * logsumexp: lse = log(sum(exp(x))) over one dimension
 *
 *     rafter_logsumexp_args a = {.size = sizeof a, .x = &x, .dim = -1, .lse = &lse};
 *     rafter_logsumexp_forward(ctx, &a);
 *
 * lse has x's shape with `dim` either dropped or kept as 1, in fp32 or in x's dtype.
 * Forward:  lse from x. If `rounded` is given (shape and strides of lse, dtype of x), it gets the same
 *           result in x's dtype: for callers who return that and keep an fp32 lse for backward.
 * Backward: dx = dlse * exp(x - lse), from x, lse and dlse (shape of lse; fp32 or x's dtype). dx may be
 *           x (in place).
 * A line of all -inf, or an empty one, has lse -inf and gradient 0. A line that holds +inf has lse +inf.
 * group: x is this rank's part of `dim`, of any length, also 0. lse is over the parts of all ranks, with
 * the same bits on every rank; see "Groups of ranks". Forward gathers 4 bytes per line and rank, and lse
 * is rounded once more. Backward needs nothing of other ranks: leave group NULL.
 */

typedef enum rafter_logsumexp_algorithm {
    RAFTER_LOGSUMEXP_AUTO = 0,
    RAFTER_LOGSUMEXP_PARALLEL = 1,  /* split every line, then merge the parts */
    RAFTER_LOGSUMEXP_RECURRENCE = 2 /* one running maximum and sum along the line */
} rafter_logsumexp_algorithm;

typedef struct rafter_logsumexp_args {
    size_t size; /* sizeof(rafter_logsumexp_args) */
    rafter_logsumexp_algorithm algorithm;
    int32_t dim; /* -ndim .. ndim-1. Zero is the first dimension, not a default */
    const DLTensor *x;
    const DLTensor *lse;
    const DLTensor *dlse;
    const DLTensor *dx;
    void *workspace;
    size_t workspace_bytes;
    const rafter_communicator *group; /* NULL: this call has all of dim */
    const DLTensor *rounded;          /* forward; optional */
} rafter_logsumexp_args;

RAFTER_API rafter_status rafter_logsumexp_forward(rafter_context *context, const rafter_logsumexp_args *args);
RAFTER_API rafter_status rafter_logsumexp_backward(rafter_context *context, const rafter_logsumexp_args *args);
RAFTER_API rafter_status rafter_logsumexp_workspace(rafter_context *context, const rafter_logsumexp_args *args,
                                                    rafter_direction direction, size_t *bytes);

/* -------------------------------------------------------------------------------------------------
 * Options of the two losses, cross_entropy and linear_cross_entropy
 *
 * With u = logit_scale * softcap(z), softcap(z) = cap * tanh(z / cap), r = logsumexp(u), s =
 * label_smoothing, and class weights w (all 1 when not given), a row with label y has
 *     row_loss = row_weight * ( w_y (1-s) (r - u_y) + s/V * sum_v w_v (r - u_v) + z_loss * r^2 ).
 * Rows whose label is ignore_index have row_loss 0 and gradient 0, and are not counted.
 *     sum:  loss = sum of row_loss
 *     mean: loss = sum of row_loss / denominator. Unless given, the denominator is the sum of w_y
 *           over the rows that are not ignored (without class weights: their number), as in PyTorch.
 *           Row weights are not part of it, so that they may be advantages that sum to zero.
 *     none: loss = row_loss, shaped as the labels
 */

typedef enum rafter_reduction { RAFTER_MEAN = 0, RAFTER_SUM = 1, RAFTER_NONE = 2 } rafter_reduction;

typedef struct rafter_loss_options {
    size_t size;                  /* sizeof(rafter_loss_options) */
    const int64_t *ignore_index;  /* NULL: -100 */
    rafter_reduction reduction;   /* zero: mean */
    int32_t zero_if_all_ignored;  /* mean over no rows: 0 gives NaN (PyTorch's answer), 1 gives 0 */
    float label_smoothing;        /* 0 .. 1 */
    float z_loss;                 /* coefficient of r^2 */
    float softcap;                /* 0: none */
    float logit_scale;            /* 1 / temperature; 0 means 1 */
    const DLTensor *class_weight; /* fp32 [V]; with class_group all V of them, on every rank */
    const DLTensor *row_weight;   /* fp32, shaped as the labels */
    const DLTensor *denominator;  /* fp32, one element, on the context's device: replaces mean's denominator */
    /* See "Groups of ranks". Without class_group, first_class and classes are 0. */
    const rafter_communicator *class_group; /* NULL: this call has all classes */
    int64_t first_class;                    /* where this rank's shard begins */
    int64_t classes;                        /* V, of all ranks together */
    const rafter_communicator *row_group;   /* NULL: this call has all rows */
} rafter_loss_options;

/* -------------------------------------------------------------------------------------------------
 * cross_entropy: loss of logits[..., V] against labels[...]
 *
 *     rafter_loss_options o = {.size = sizeof o, .label_smoothing = 0.1f};
 *     rafter_cross_entropy_args a = {.size = sizeof a, .options = &o, .logits = &z, .target = &y, .loss = &loss,
 *                                    .lse = &lse};
 *     rafter_cross_entropy_forward(ctx, &a);
 *     a.dlogits = &dz;                               // a.dlogits = &z: over the logits
 *     rafter_cross_entropy_backward(ctx, &a);
 *
 * Forward: writes those of loss, row_loss, lse, logprob, entropy and argmax that are not NULL. If
 * dlogits is given too, the same pass writes it, for the upstream gradient dloss: one read and one
 * write of the logits in all.
 * Backward: writes dlogits from logits, target, dloss, and lse if given (else lse is computed again).
 * dlogits has the dtype of the logits and may be the logits (in place: same data and strides).
 * dloss is fp32, shaped as loss (one element for mean and sum); NULL means 1.
 * Per-row outputs are fp32 (argmax: int64 or int32), shaped as target. For ignored rows they are 0,
 * and argmax is -1.
 *     logprob = u_y - r, never above 0; entropy = -sum p log p; argmax: the first index of the
 *     largest logit.
 * A row of all -inf has lse -inf, loss NaN and gradient 0. A +inf or NaN logit makes the row NaN.
 * A label out of range: on the CPU the call fails with RAFTER_LABEL_OUT_OF_RANGE, which names the
 * row, before anything is written. On CUDA the row's outputs and gradient are NaN, and
 * rafter_bad_labels() reports that there was such a row.
 * If rows are more than V elements apart, what lies between them is neither read nor written.
 */

typedef struct rafter_cross_entropy_args {
    size_t size;                        /* sizeof(rafter_cross_entropy_args) */
    const rafter_loss_options *options; /* NULL: all defaults */
    const DLTensor *logits;             /* [..., V] */
    const DLTensor *target;             /* [...], int32 or int64 */
    const DLTensor *loss;               /* one element; with reduction none, shaped as target */
    const DLTensor *row_loss;           /* this and the next four: forward, optional, shaped as target */
    const DLTensor *lse;                /* backward reads it, if given */
    const DLTensor *logprob;
    const DLTensor *entropy;
    const DLTensor *argmax;
    const DLTensor *dloss;   /* upstream gradient; NULL: 1 */
    const DLTensor *dlogits; /* forward: optional */
    void *workspace;
    size_t workspace_bytes;
} rafter_cross_entropy_args;

RAFTER_API rafter_status rafter_cross_entropy_forward(rafter_context *context, const rafter_cross_entropy_args *args);
RAFTER_API rafter_status rafter_cross_entropy_backward(rafter_context *context, const rafter_cross_entropy_args *args);
RAFTER_API rafter_status rafter_cross_entropy_workspace(rafter_context *context, const rafter_cross_entropy_args *args,
                                                        rafter_direction direction, size_t *bytes);

/* *found: 1 if a loss on this context has seen a label out of range since the last call of this
 * function, else 0. On CUDA this waits for all work on the context's stream, so do not call it in
 * every step; during a capture it returns RAFTER_UNSUPPORTED. On the CPU, where a bad label fails
 * the call, *found is always 0. Returns RAFTER_RANKS_DISAGREE if, on CUDA, the ranks of a group have made
 * different calls since then; the results of those are NaN. */
RAFTER_API rafter_status rafter_bad_labels(rafter_context *context, int32_t *found);

/* -------------------------------------------------------------------------------------------------
 * linear_cross_entropy: cross_entropy of z = x W^T + bias, never holding all of z
 *
 *     rafter_linear_cross_entropy_args a = {.size = sizeof a, .x = &x, .weight = &w, .target = &y, .loss = &loss,
 *                                           .dx = &dx, .dweight = &dw};
 *     rafter_linear_cross_entropy_forward(ctx, &a);  // loss and gradients: three matrix products
 *
 * x[..., D], weight[V, D], bias[V] (optional), target[...]. x, weight and bias have one dtype.
 * Forward: writes the outputs of cross_entropy, and those of dx, dweight and dbias that are not NULL, for
 * the upstream gradient dloss.
 * Backward: writes those of dx, dweight and dbias that are not NULL for dloss, from the inputs, and from
 * lse if given. It computes the logits again (but see rafter_linear_cross_entropy_saved).
 * dentropy: the upstream gradient of entropy, fp32, shaped as target; NULL: none. Gradients are those
 * of sum(dloss * loss) + sum(dentropy * entropy). Neither the mean's denominator nor row weights
 * apply to dentropy; ignored rows have no gradient. Backward with dentropy also reads entropy, the
 * result of forward: if lse and entropy are given, no statistics are computed again.
 * dx, dweight and dbias have the dtype of their input, or fp32. They are accumulated in fp32, unless
 * `accumulate` says otherwise. Ignored rows cost no matrix work on a CPU, nor on Hopper GPUs with 16-bit
 * inputs and most options; elsewhere they are multiplied as zeros. A logit is never rounded below
 * fp32 before the softmax.
 * allow_tf32: on CUDA, products of fp32 inputs may round their operands (the inputs, and dz, the
 * gradient of the logits) to TF32, 11 bits; sums stay fp32. 0: products in full fp32. Ignored for 16-bit
 * inputs and on the CPU.
 * accumulate_into_dweight: add to dweight, which is then fp32 (a "main gradient"), instead of
 * overwriting it.
 * budget: the most bytes of workspace that the call may take; 0: whatever is fastest. Results
 * depend on it only by fp32 rounding. RAFTER_WORKSPACE_TOO_SMALL if the budget is under what the
 * smallest chunk needs; the message says how much that is.
 */

/* With class_group, auto takes fast if the workspace can hold all logits of the rank, else compact. */
typedef enum rafter_lce_mode {
    RAFTER_LCE_AUTO = 0,
    RAFTER_LCE_FAST = 1, /* loss and gradients of one group of rows after the other: 3 matrix products */
    /* statistics of all rows, then gradients of one slice of the classes after the other: 4 matrix
     * products, least memory */
    RAFTER_LCE_COMPACT = 2
} rafter_lce_mode;

typedef enum rafter_lce_accumulate {
    RAFTER_ACCUMULATE_F32 = 0,
    /* Sums from group to group, or slice to slice, are kept in the gradient's own dtype: less memory, and an
     * error that docs/linear_cross_entropy.md states. */
    RAFTER_ACCUMULATE_NATIVE = 1
} rafter_lce_accumulate;

typedef struct rafter_linear_cross_entropy_args {
    size_t size;                        /* sizeof(rafter_linear_cross_entropy_args) */
    const rafter_loss_options *options; /* NULL: all defaults */
    rafter_lce_mode mode;
    rafter_lce_accumulate accumulate;
    int32_t accumulate_into_dweight; /* 0 or 1 */
    int32_t reserved;                /* zero */
    size_t budget;                   /* bytes; 0: no limit */
    const DLTensor *x;               /* [..., D] */
    const DLTensor *weight;          /* [V, D] */
    const DLTensor *bias;            /* [V], optional */
    const DLTensor *target;          /* from here to dloss: as in rafter_cross_entropy_args */
    const DLTensor *loss;
    const DLTensor *row_loss;
    const DLTensor *lse;
    const DLTensor *logprob;
    const DLTensor *entropy;
    const DLTensor *argmax;
    const DLTensor *dloss;
    const DLTensor *dx; /* these three: forward and backward, optional */
    const DLTensor *dweight;
    const DLTensor *dbias;
    void *workspace;
    size_t workspace_bytes;
    const DLTensor *dentropy; /* upstream gradient of entropy; NULL: none */
    int32_t allow_tf32;       /* 0 or 1 */
    int32_t reserved2;        /* zero */
    void *saved;              /* see rafter_linear_cross_entropy_saved */
    size_t saved_bytes;       /* that `saved` has */
} rafter_linear_cross_entropy_args;

RAFTER_API rafter_status rafter_linear_cross_entropy_forward(rafter_context *context,
                                                             const rafter_linear_cross_entropy_args *args);
RAFTER_API rafter_status rafter_linear_cross_entropy_backward(rafter_context *context,
                                                              const rafter_linear_cross_entropy_args *args);
RAFTER_API rafter_status rafter_linear_cross_entropy_workspace(rafter_context *context,
                                                               const rafter_linear_cross_entropy_args *args,
                                                               rafter_direction direction, size_t *bytes);

/* For a forward call without gradients, and a later backward: forward stores the exponentials of the
 * logits in `saved`, memory of the context's device, and backward, given the same `saved` and otherwise
 * the same arguments, does not compute the logits again: 3 matrix products in all instead of 4.
 * *bytes: what `saved` must hold, about 2 N V. 0: this call cannot use it; leave `saved` NULL. That is so
 * on a CPU, without Hopper's kernels, for fp32 inputs, with a budget, with mode compact, and with softcap
 * and label smoothing together unless inputs are bf16 and softcap * logit_scale is at most 40.
 * `saved` begins at a multiple of 16 bytes. Backward overwrites it. With dentropy, backward uses `saved`
 * only if it is given the entropy and there is no softcap. */
RAFTER_API rafter_status rafter_linear_cross_entropy_saved(rafter_context *context,
                                                           const rafter_linear_cross_entropy_args *args, size_t *bytes);

/* -------------------------------------------------------------------------------------------------
 * lrpe_cosine: y = [ f(x) cos(Theta), f(x) sin(Theta) ],  Theta = position * theta
 *
 *     rafter_lrpe_cosine_args a = {.size = sizeof a, .act = RAFTER_ACT_SILU, .x = &x, .theta = &theta, .y = &y};
 *     rafter_lrpe_cosine_forward(ctx, &a);
 *
 * x[B, N, H, D] (or [B, N, D], then H = 1 and y has no head dimension either), y[B, N, H, 2D] of
 * x's dtype. theta [H, D], [H, 1] or [1, D], fp32, bf16 or fp16. The position of token n is offset
 * + n, or positions[n] or positions[b, n] if given. The product of position and theta is reduced to an
 * angle without rounding first: position 10^6 is as accurate as position 1. f is any act; softmax runs
 * over the feature dimension D or over the sequence dimension N: see softmax_over. On CUDA, H D is less
 * than 2^31.
 * Backward: writes those of dx (x's dtype) and dtheta (theta's shape; fp32 or theta's dtype) that are not
 * NULL, from x, theta and dy.
 */

typedef enum rafter_softmax_over { RAFTER_OVER_FEATURE = 0, RAFTER_OVER_SEQUENCE = 1 } rafter_softmax_over;

typedef enum rafter_lrpe_algorithm {
    RAFTER_LRPE_AUTO = 0,
    RAFTER_LRPE_SP = 1, /* sequence parallel: a task has some tokens, with all features */
    RAFTER_LRPE_BP = 2  /* block parallel: a task has some features, and walks the whole sequence */
} rafter_lrpe_algorithm;

typedef struct rafter_lrpe_cosine_args {
    size_t size; /* sizeof(rafter_lrpe_cosine_args) */
    rafter_act_kind act;
    rafter_softmax_over softmax_over;
    rafter_lrpe_algorithm algorithm;
    int32_t reserved; /* zero */
    int64_t offset;
    const DLTensor *x;
    const DLTensor *theta;
    const DLTensor *positions; /* int32 or int64, [N] or [B, N] */
    const DLTensor *y;
    const DLTensor *dy;
    const DLTensor *dx;
    const DLTensor *dtheta;
    void *workspace;
    size_t workspace_bytes;
} rafter_lrpe_cosine_args;

RAFTER_API rafter_status rafter_lrpe_cosine_forward(rafter_context *context, const rafter_lrpe_cosine_args *args);
RAFTER_API rafter_status rafter_lrpe_cosine_backward(rafter_context *context, const rafter_lrpe_cosine_args *args);
RAFTER_API rafter_status rafter_lrpe_cosine_workspace(rafter_context *context, const rafter_lrpe_cosine_args *args,
                                                      rafter_direction direction, size_t *bytes);

/* -------------------------------------------------------------------------------------------------
 * scale: y = factor * x
 *
 *     rafter_scale_args a = {.size = sizeof a, .x = &dweight, .factor = &dloss, .y = &dweight};
 *     rafter_scale_forward(ctx, &a);
 *
 * factor is one fp32 number in the memory of the context's device, so that it may be the result of
 * an earlier call: the host never waits for it. y has x's shape and dtype, and may be x itself: the
 * same data and strides. Then a factor of 1 costs nothing: neither x nor y is read or written. Each
 * product is computed in fp32 and rounded once; NaN, inf and -0 behave as in that product. The op
 * is linear and has no backward: dx is scale of dy by the same factor. rafter_scale_workspace takes
 * RAFTER_FORWARD only; the answer is always 0.
 */

typedef struct rafter_scale_args {
    size_t size; /* sizeof(rafter_scale_args) */
    const DLTensor *x;
    const DLTensor *factor; /* fp32, one element, any number of dimensions */
    const DLTensor *y;
    void *workspace;
    size_t workspace_bytes;
} rafter_scale_args;

RAFTER_API rafter_status rafter_scale_forward(rafter_context *context, const rafter_scale_args *args);
RAFTER_API rafter_status rafter_scale_workspace(rafter_context *context, const rafter_scale_args *args,
                                                rafter_direction direction, size_t *bytes);

/* -------------------------------------------------------------------------------------------------
 * What runs here
 */

/* Op number `index` (0, 1, ...); NULL past the end. */
RAFTER_API const char *rafter_op_name(int index);

/* Variant number `index` of `op` for the context's kind of device, in order of preference. *reason
 * is NULL if the device can run it, else why not. Returns 0 past the end, 1 otherwise. */
RAFTER_API int rafter_describe_variant(const rafter_context *context, const char *op, int index, const char **variant,
                                       const char **reason);

/* The variants that the last call on this context considered (also a rafter_<op>_workspace call),
 * in order of preference. *reason is NULL for the one that was taken, the last; else why it was
 * passed over. Returns 0 past the end. */
RAFTER_API int rafter_considered_variant(const rafter_context *context, int index, const char **variant,
                                         const char **reason);

/* "avx2 fma f16c avx512f ...", "neon fp16 bf16 ...": what was found on this CPU; "" if the library
 * has only portable code for it. */
RAFTER_API const char *rafter_cpu_features(void);

/* Threads a CPU call on this context may use. */
RAFTER_API int rafter_context_threads(const rafter_context *context);

#ifdef __cplusplus
}
#endif

#endif /* RAFTER_H */

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random calls, most of them slightly wrong. Whatever the arguments, a call returns a status, a
 * failure has a message and writes nothing, and no call touches memory outside its tensors (under
 * AddressSanitizer every tensor has an allocation of exactly its own extent).
 *
 *     test_fuzz [CALLS [SEED [cuda | small]]]
 *
 *     test_fuzz --inputs FILE...
 *
 * Call number i is the same in every run: SEED + i is its own seed. With `small` the tensors are
 * small, and there are many more calls a second (tests/fuzz.sh). The second form makes the calls that
 * the bytes of files describe: inputs of libFuzzer (./run fuzz), which drives this file when compiled
 * with RAFTER_LIBFUZZER; tests/fuzz/api has some.
 *
 * With `cuda` the data are ordinary numbers, and every call is also made on the GPU: it must return
 * the CPU's status, and about the same results. Without a GPU the test prints why and exits with
 * 77.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/gpu.h"

static uint64_t state;

/* The next number of the generator. */
static uint64_t noise(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

/* Bytes that decide what the call is; when they are used up, or without any, the generator does. */
static const uint8_t *input;
static size_t input_left;

static uint64_t take(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes && input_left > 0; i++, input_left--)
        value = value << 8 | *input++;
    return value;
}

static uint64_t draw(void) {
    return input_left > 0 ? take(8) : noise();
}

static int64_t below(int64_t n) {
    return (int64_t)((input_left > 0 ? take(n <= 256 ? 1 : 4) : noise()) % (uint64_t)n);
}

static int one_in(int64_t n) {
    return below(n) == 0;
}

enum { TENSORS = 16, DIMS = 5, MOST_BYTES = 1 << 22 };

static bool small; /* sizes are */

struct tensor {
    DLTensor dl;
    int64_t shape[DIMS], strides[DIMS];
    size_t bytes;
    unsigned char *before; /* a copy of the memory, to see that a failed call wrote nothing */
    unsigned char *after;  /* the data after the call, on the host; on the CPU the memory itself */
};

/* The tensors of one call. */
static struct pool {
    struct tensor tensor[TENSORS];
    int used;
    bool gpu;      /* in the memory of the GPU */
    bool ordinary; /* data are small numbers, not arbitrary bits */
} pool_of_cpu, pool_of_gpu, *pool = &pool_of_cpu;

/* Memory for the next tensor. On the GPU, where allocating is slow, tensors have fixed places. */
static void *take_memory(size_t bytes) {
    static char *places;
    const size_t place = 8 * (size_t)MOST_BYTES;
    if (pool->gpu && !places)
        places = gpu_allocate(TENSORS * place);
    void *memory = !pool->gpu ? malloc(bytes) : places ? places + (size_t)(pool->used - 1) * place : NULL;
    if (!memory && bytes > 0)
        abort();
    return memory;
}

static void release_all(struct pool *all) {
    for (int i = 0; i < all->used; i++) {
        struct tensor *t = &all->tensor[i];
        free(t->after);
        free(t->before);
    }
    all->used = 0;
}

/* ---- floating-point numbers ------------------------------------------------------------------ */

static float half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 0 ? ldexpf((float)fraction, -24) : ldexpf((float)(1024 + fraction), exponent - 25);
    if (exponent == 31)
        size = fraction ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
}

static float load(const unsigned char *at, DLDataType dtype) {
    uint16_t narrow;
    uint32_t bits;
    float value;
    if (dtype.bits == 32) {
        memcpy(&value, at, sizeof value);
        return value;
    }
    memcpy(&narrow, at, sizeof narrow);
    if (dtype.code == kDLFloat)
        return half_value(narrow);
    bits = (uint32_t)narrow << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* n / 32, for n from -128 to 127, which every dtype holds exactly. */
static void store(unsigned char *at, DLDataType dtype, int n) {
    const float value = (float)n / 32;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t narrow = (uint16_t)(bits >> 16);
    if (dtype.code == kDLFloat && n != 0) /* sign, exponent with another bias, fraction */
        narrow = (uint16_t)((bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 127 + 15) << 10) | (bits >> 13 & 1023));
    if (dtype.bits == 32)
        memcpy(at, &value, sizeof value);
    else
        memcpy(at, &narrow, sizeof narrow);
}

/* ---- random calls ---------------------------------------------------------------------------- */

/* A tensor of about this shape and dtype; sometimes NULL. Integers are in [0, labels). */
static const DLTensor *some(rafter_dtype dtype, int ndim, const int64_t *shape, int64_t labels) {
    if (one_in(60) || pool->used == TENSORS)
        return NULL;
    struct tensor *t = &pool->tensor[pool->used++];
    memset(t, 0, sizeof *t);
    if (one_in(40))
        dtype = (rafter_dtype)below(6);
    memcpy(t->shape, shape, sizeof(int64_t) * (size_t)ndim);
    if (one_in(60) && ndim < DIMS)
        t->shape[ndim++] = 1 + below(3);
    if (one_in(40) && ndim > 0)
        t->shape[below(ndim)] += below(3) - 1;
    t->dl = rafter_tensor(NULL, dtype, ndim, t->shape);
    const DLDeviceType here = pool->gpu ? kDLCUDA : kDLCPU, elsewhere = pool->gpu ? kDLCPU : kDLCUDA;
    t->dl.device.device_type = one_in(100) ? elsewhere : here;

    int64_t step = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        t->strides[d] = step;
        step *= t->shape[d] > 0 ? t->shape[d] : 1;
        if (one_in(8))
            step += below(4);
    }
    if (ndim >= 2 && one_in(6)) { /* transpose */
        const int64_t a = below(ndim), b = below(ndim), kept = t->strides[a];
        t->strides[a] = t->strides[b];
        t->strides[b] = kept;
    }
    if (ndim > 0 && one_in(12))
        t->strides[below(ndim)] = 0;
    if (ndim > 0 && one_in(60))
        t->strides[below(ndim)] = one_in(2) ? -below(9) : (int64_t)(draw() >> 1);
    if (!one_in(3))
        t->dl.strides = t->strides;

    int64_t extent = 1; /* elements from the first to the last */
    int64_t compact = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        const int64_t stride = t->dl.strides ? t->strides[d] : compact;
        int64_t reach;
        if (t->shape[d] == 1)
            continue;
        if (t->shape[d] <= 0 || stride < 0) { /* nothing is read: empty, or refused */
            extent = 1;
            break;
        }
        if (__builtin_mul_overflow(t->shape[d] - 1, stride, &reach) || __builtin_add_overflow(extent, reach, &extent) ||
            extent > MOST_BYTES) {
            extent = -1;
            break;
        }
        compact *= t->shape[d];
    }
    const size_t size = t->dl.dtype.bits / 8;
    if (extent < 0)
        return &t->dl; /* too large to allocate: data stays NULL and the call must refuse it */
    t->bytes = (size_t)extent * size;
    t->dl.data = take_memory(t->bytes);
    t->before = malloc(t->bytes);
    t->after = pool->gpu ? malloc(t->bytes) : t->dl.data;
    if (!t->before || !t->after)
        abort();
    for (size_t i = 0; i < (size_t)extent; i++) {
        unsigned char *at = t->before + i * size;
        const uint64_t bits = noise();
        if (t->dl.dtype.code == kDLInt) {
            const int64_t label = noise() % 200 == 0 ? (int64_t)bits
                                  : noise() % 6 == 0 ? -100
                                                     : (int64_t)(noise() % (uint64_t)labels);
            const int32_t narrow = (int32_t)label;
            memcpy(at, size == 4 ? (const void *)&narrow : (const void *)&label, size);
        } else if (pool->ordinary && t->dl.dtype.code != kDLUInt) {
            store(at, t->dl.dtype, (int)(bits % 256) - 128);
        } else {
            memcpy(at, &bits, size); /* any bits: subnormals, infinities, NaN */
        }
    }
    if (pool->gpu)
        gpu_copy(t->dl.data, t->before, t->bytes);
    else
        memcpy(t->dl.data, t->before, t->bytes);
    return &t->dl;
}

static const DLTensor *maybe(const DLTensor *t) {
    return one_in(2) ? t : NULL;
}

static rafter_dtype some_float(void) {
    return (rafter_dtype)below(3);
}

static rafter_dtype some_int(void) {
    return one_in(2) ? RAFTER_I32 : RAFTER_I64;
}

static int64_t some_size(void) {
    static const int64_t sizes[] = {0, 1, 1, 2, 3, 5, 8, 17, 33, 64, 130};
    enum { SIZES = sizeof sizes / sizeof *sizes, SMALL_SIZES = SIZES - 3 };
    const int64_t size = sizes[below(small ? SMALL_SIZES : SIZES)];
    return one_in(60) ? (small ? 33 + below(300) : 131 + below(40000)) : size;
}

static int some_enum(int count) {
    return (int)(one_in(50) ? below(100) : below(count));
}

static rafter_loss_options some_options(const int64_t *rows, int row_dims, int64_t classes) {
    static int64_t ignored;
    ignored = below(3) - 1;
    const int64_t v[] = {classes}, one[] = {1};
    return (rafter_loss_options){.size = one_in(100) ? (size_t)below(64) : sizeof(rafter_loss_options),
                                 .ignore_index = one_in(3) ? &ignored : NULL,
                                 .reduction = (rafter_reduction)some_enum(3),
                                 .zero_if_all_ignored = one_in(2),
                                 .label_smoothing = one_in(3) ? (float)below(12) / 10 : 0,
                                 .z_loss = one_in(4) ? 0.01f : 0,
                                 .softcap = one_in(4) ? (float)(below(40) - 2) : 0,
                                 .logit_scale = one_in(4) ? 0.5f : 0,
                                 .class_weight = one_in(4) ? some(RAFTER_F32, 1, v, 1) : NULL,
                                 .row_weight = one_in(4) ? some(RAFTER_F32, row_dims, rows, 1) : NULL,
                                 .denominator = one_in(4) ? some(RAFTER_F32, (int)below(2), one, 1) : NULL};
}

static rafter_status random_act(rafter_context *context) {
    const int ndim = (int)below(4);
    const int64_t shape[] = {some_size(), some_size(), some_size()};
    const rafter_dtype dtype = some_float();
    int64_t bytes = 1;
    for (int d = 0; d < ndim; d++)
        bytes *= shape[d];
    bytes = (bytes + 7) / 8;
    rafter_act_args a = {.size = sizeof a,
                         .kind = (rafter_act_kind)some_enum(5),
                         .dim = (int32_t)(below(9) - 4),
                         .x = some(dtype, ndim, shape, 1),
                         .y = some(dtype, ndim, shape, 1),
                         .dy = some(dtype, ndim, shape, 1),
                         .dx = some(dtype, ndim, shape, 1)};
    if (one_in(8))
        a.y = a.x;
    if (one_in(8))
        a.dx = a.dy;
    if (one_in(5))
        a.relu_mask = some(RAFTER_U8, 1, &bytes, 1);
    return one_in(2) ? rafter_act_forward(context, &a) : rafter_act_backward(context, &a);
}

static rafter_status random_logsumexp(rafter_context *context) {
    const int ndim = 1 + (int)below(3), dim = (int)below(ndim);
    int64_t shape[] = {some_size(), some_size(), some_size()}, reduced[3];
    const rafter_dtype dtype = some_float();
    int kept = 0;
    for (int d = 0; d < ndim; d++)
        if (d != dim)
            reduced[kept++] = shape[d];
    rafter_logsumexp_args a = {.size = sizeof a,
                               .algorithm = (rafter_logsumexp_algorithm)some_enum(3),
                               .dim = one_in(20) ? (int32_t)below(9) - 4 : dim,
                               .x = some(dtype, ndim, shape, 1),
                               .lse = some(one_in(2) ? RAFTER_F32 : dtype, kept, reduced, 1),
                               .dlse = some(one_in(2) ? RAFTER_F32 : dtype, kept, reduced, 1),
                               .dx = some(dtype, ndim, shape, 1)};
    if (one_in(8))
        a.dx = a.x;
    if (one_in(4))
        a.rounded = some(dtype, kept, reduced, 1);
    return one_in(2) ? rafter_logsumexp_forward(context, &a) : rafter_logsumexp_backward(context, &a);
}

static rafter_status random_cross_entropy(rafter_context *context) {
    const int dims = 1 + (int)below(2);
    const int64_t shape[] = {some_size(), some_size(), some_size()}, classes = shape[dims];
    const rafter_dtype dtype = some_float();
    const rafter_loss_options options = some_options(shape, dims, classes);
    const int none = options.reduction == RAFTER_NONE;
    rafter_cross_entropy_args a = {.size = sizeof a,
                                   .options = one_in(4) ? NULL : &options,
                                   .logits = some(dtype, dims + 1, shape, 1),
                                   .target = some(some_int(), dims, shape, classes > 0 ? classes : 1),
                                   .loss = maybe(some(RAFTER_F32, none ? dims : 0, shape, 1)),
                                   .row_loss = maybe(some(RAFTER_F32, dims, shape, 1)),
                                   .lse = maybe(some(RAFTER_F32, dims, shape, 1)),
                                   .logprob = maybe(some(RAFTER_F32, dims, shape, 1)),
                                   .entropy = maybe(some(RAFTER_F32, dims, shape, 1)),
                                   .argmax = maybe(some(some_int(), dims, shape, 1)),
                                   .dloss = maybe(some(RAFTER_F32, none ? dims : 0, shape, 1))};
    const int backward = one_in(2);
    if (backward || one_in(3))
        a.dlogits = one_in(4) ? a.logits : some(dtype, dims + 1, shape, 1);
    return backward ? rafter_cross_entropy_backward(context, &a) : rafter_cross_entropy_forward(context, &a);
}

static rafter_status random_linear_cross_entropy(rafter_context *context) {
    const int64_t n = some_size(), d = some_size(), v = some_size();
    const int64_t hidden[] = {n, d}, weight[] = {v, d};
    const rafter_dtype dtype = some_float();
    const rafter_loss_options options = some_options(&n, 1, v);
    const int none = options.reduction == RAFTER_NONE;
    rafter_linear_cross_entropy_args a = {.size = sizeof a,
                                          .options = one_in(4) ? NULL : &options,
                                          .mode = (rafter_lce_mode)some_enum(3),
                                          .accumulate = (rafter_lce_accumulate)some_enum(2),
                                          .budget = one_in(3) ? (size_t)below(1 << 20) : 0,
                                          .x = some(dtype, 2, hidden, 1),
                                          .weight = some(dtype, 2, weight, 1),
                                          .bias = maybe(some(dtype, 1, &v, 1)),
                                          .target = some(some_int(), 1, &n, v > 0 ? v : 1),
                                          .loss = some(RAFTER_F32, none ? 1 : 0, &n, 1),
                                          .lse = maybe(some(RAFTER_F32, 1, &n, 1)),
                                          .entropy = maybe(some(RAFTER_F32, 1, &n, 1)),
                                          .dx = maybe(some(one_in(2) ? RAFTER_F32 : dtype, 2, hidden, 1)),
                                          .dweight = maybe(some(one_in(2) ? RAFTER_F32 : dtype, 2, weight, 1)),
                                          .dbias = maybe(some(dtype, 1, &v, 1))};
    a.accumulate_into_dweight = a.dweight && a.dweight->dtype.bits == 32 && one_in(4);
    a.dentropy = one_in(4) ? some(RAFTER_F32, 1, &n, 1) : NULL;
    const bool forward = one_in(2);
    if (!forward && pool->ordinary)
        a.lse = NULL; /* a random lse may give probabilities that only a float can hold */
    return forward ? rafter_linear_cross_entropy_forward(context, &a)
                   : rafter_linear_cross_entropy_backward(context, &a);
}

static rafter_status random_lrpe_cosine(rafter_context *context) {
    const int64_t b = 1 + below(3), n = some_size(), h = 1 + below(3), d = some_size();
    const int heads = !one_in(4);
    const int64_t full[] = {b, n, h, d}, flat[] = {b, n, d}, full_y[] = {b, n, h, 2 * d}, flat_y[] = {b, n, 2 * d};
    const int64_t theta[] = {heads && one_in(2) ? h : 1, one_in(4) ? 1 : d}, positions[] = {b, n};
    const rafter_dtype dtype = some_float(), angle = some_float();
    const int rows = 1 + (int)below(2);
    rafter_lrpe_cosine_args a = {.size = sizeof a,
                                 .act = (rafter_act_kind)some_enum(5),
                                 .softmax_over = (rafter_softmax_over)some_enum(2),
                                 .algorithm = (rafter_lrpe_algorithm)some_enum(3),
                                 .offset = one_in(2)        ? 0
                                           : pool->ordinary ? below(1000000)
                                                            : (int64_t)draw(),
                                 .x = some(dtype, 3 + heads, heads ? full : flat, 1),
                                 .theta = some(angle, 2, theta, 1),
                                 .positions =
                                     one_in(4) ? some(some_int(), rows, rows == 2 ? positions : &n, 1000) : NULL,
                                 .y = some(dtype, 3 + heads, heads ? full_y : flat_y, 1),
                                 .dy = some(dtype, 3 + heads, heads ? full_y : flat_y, 1),
                                 .dx = some(dtype, 3 + heads, heads ? full : flat, 1),
                                 .dtheta = one_in(3) ? some(one_in(2) ? RAFTER_F32 : angle, 2, theta, 1) : NULL};
    return one_in(2) ? rafter_lrpe_cosine_forward(context, &a) : rafter_lrpe_cosine_backward(context, &a);
}

static rafter_status random_scale(rafter_context *context) {
    const int ndim = (int)below(4);
    const int64_t shape[] = {some_size(), some_size(), some_size()}, ones[] = {1, 1};
    const rafter_dtype dtype = some_float();
    rafter_scale_args a = {.size = sizeof a,
                           .x = some(dtype, ndim, shape, 1),
                           .factor = some(RAFTER_F32, (int)below(3), ones, 1),
                           .y = some(dtype, ndim, shape, 1)};
    if (one_in(2))
        a.y = a.x;
    return rafter_scale_forward(context, &a);
}

/* ---- the test -------------------------------------------------------------------------------- */

static rafter_status (*const ops[])(rafter_context *) = {
    random_act, random_logsumexp, random_cross_entropy, random_linear_cross_entropy, random_lrpe_cosine, random_scale};
enum { OPS = sizeof ops / sizeof *ops };

/* Makes call number `seed`; its tensors are in `pool`. */
static rafter_status make_call(rafter_context *context, uint64_t seed, int *op) {
    state = seed * 0x9e3779b97f4a7c15u | 1;
    draw();
    *op = (int)below(OPS);
    const rafter_status status = ops[*op](context);
    for (int t = 0; t < pool->used && pool->gpu; t++)
        if (pool->tensor[t].after &&
            !(gpu_synchronize(context) &&
              gpu_copy(pool->tensor[t].after, pool->tensor[t].dl.data, pool->tensor[t].bytes))) {
            printf("FAIL test_fuzz 1 %llu cuda: the device failed\n", (unsigned long long)seed);
            exit(1); /* no later call would work */
        }
    return status;
}

/* What is wrong with the call, or NULL. */
static const char *judge(const rafter_context *context, rafter_status status) {
    if (status == RAFTER_OK)
        return NULL;
    for (int t = 0; t < pool->used; t++) {
        const struct tensor *tensor = &pool->tensor[t];
        if (tensor->before && memcmp(tensor->before, tensor->after, tensor->bytes) != 0)
            return "a failed call wrote to a tensor";
    }
    return rafter_last_error(context)[0] == '\0' ? "a failure without a message" : NULL;
}

/* Whether two tensors are about equal. Rounding may differ by a unit in the last place of the
 * 16-bit types, and by what cancellation leaves of the largest numbers; an element in the wrong
 * place differs by far more. Inputs are up to 4, so the largest may have been 0.1 even if all results
 * are less: the gradient of a softmax of one element is 0 but for rounding, and the smallest fp16
 * numbers have few digits. Where one has an infinity the other may have NaN: a factor of inf (a given
 * denominator of 0) may be applied before or after a difference. Loose: matrix products round intermediate
 * results as bf16 does. */
static bool alike(const struct tensor *a, const struct tensor *b, bool loose) {
    if (!a->before || a->dl.dtype.code == kDLInt || a->dl.dtype.code == kDLUInt)
        return !a->before || memcmp(a->after, b->after, a->bytes) == 0;
    const size_t size = a->dl.dtype.bits / 8;
    const float unit = size == 4 ? 1e-4f : a->dl.dtype.code == kDLFloat ? 0x1p-9f : 0x1p-6f;
    const float leaves = loose ? 0x1p-5f : 1e-4f;
    float largest = loose ? 1 : 0.1f;
    for (size_t i = 0; i < a->bytes; i += size) {
        const float x = load(a->after + i, a->dl.dtype);
        largest = isfinite(x) && fabsf(x) > largest ? fabsf(x) : largest;
    }
    for (size_t i = 0; i < a->bytes; i += size) {
        const float x = load(a->after + i, a->dl.dtype), y = load(b->after + i, a->dl.dtype);
        const bool same = x == y || (!isfinite(x) && !isfinite(y));
        if (!same && !(fabsf(x - y) <= unit * fabsf(x) + leaves * largest))
            return false;
    }
    return true;
}

static const char *compare(int op, rafter_status here, rafter_status there) {
    if (here == RAFTER_LABEL_OUT_OF_RANGE || there == RAFTER_UNSUPPORTED)
        return NULL; /* the GPU continues with NaN, or does not have the op */
    if (here == RAFTER_WORKSPACE_TOO_SMALL || there == RAFTER_WORKSPACE_TOO_SMALL)
        return NULL; /* the minimum workspaces differ */
    if (here != there)
        return "the status differs";
    for (int t = 0; t < pool_of_cpu.used; t++)
        if (!alike(&pool_of_cpu.tensor[t], &pool_of_gpu.tensor[t], ops[op] == random_linear_cross_entropy))
            return "the results differ";
    return NULL;
}

/* Makes the call that `size` bytes describe, at the CPU level that the first of them names. Returns
 * what is wrong with it, or NULL. */
static const char *try_input(const uint8_t *bytes, size_t size) {
    static const char *const levels[] = {NULL, "portable", "avx2", "avx512"};
    enum { LEVELS = sizeof levels / sizeof *levels };
    static rafter_context *contexts[LEVELS];
    for (int i = 0; i < LEVELS && !contexts[0]; i++) {
        const rafter_context_options options = {
            .size = sizeof options, .threads = 2, .variant = levels[LEVELS - 1 - i]};
        if (rafter_context_create(&contexts[LEVELS - 1 - i], &options) != RAFTER_OK)
            contexts[LEVELS - 1 - i] = NULL; /* not on this machine */
    }
    state = 0x9e3779b97f4a7c15u;
    input = bytes;
    input_left = size;
    rafter_context *const named = contexts[below(LEVELS)], *const context = named ? named : contexts[0];
    const rafter_status status = ops[below(OPS)](context);
    input_left = 0;
    const char *const problem = judge(context, status);
    release_all(pool);
    return problem;
}

#if defined(RAFTER_LIBFUZZER)
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    const char *const problem = try_input(bytes, size);
    if (problem) {
        printf("FAIL %s\n", problem);
        abort();
    }
    return 0;
}
#else
static int try_files(int count, char **paths) {
    static uint8_t bytes[1 << 16];
    int failed = 0;
    for (int i = 0; i < count; i++) {
        FILE *const file = fopen(paths[i], "rb");
        const size_t size = file ? fread(bytes, 1, sizeof bytes, file) : 0;
        const char *const problem = file ? try_input(bytes, size) : "cannot be opened";
        if (file)
            fclose(file);
        if (problem)
            printf("FAIL %s: %s\n", paths[i], problem);
        failed += problem != NULL;
    }
    printf("%d passed, %d failed\n", count - failed, failed);
    return count == 0 || failed > 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--inputs") == 0)
        return try_files(argc - 2, argv + 2);
    const long calls = argc > 1 ? atol(argv[1]) : 20000;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    const bool twice = argc > 3 && strcmp(argv[3], "cuda") == 0;
    small = argc > 3 && strcmp(argv[3], "small") == 0;
    long passed = 0, failed = 0, accepted[OPS] = {0};
    rafter_context_options options = {.size = sizeof options, .threads = 2};
    rafter_context *context = NULL, *gpu = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK)
        return 2;
    options.device = (DLDevice){kDLCUDA, 0};
    if (twice && rafter_context_create(&gpu, &options) != RAFTER_OK) {
        printf("skipped: %s\n", rafter_last_error(NULL));
        return 77;
    }
    pool_of_cpu.ordinary = pool_of_gpu.ordinary = twice;
    pool_of_gpu.gpu = gpu != NULL;
    for (long i = 0; i < calls; i++) {
        int op;
        const rafter_status status = make_call(context, seed + (uint64_t)i, &op);
        const char *problem = judge(context, status), *sentence = rafter_last_error(context);
        if (gpu) {
            pool = &pool_of_gpu;
            const rafter_status there = make_call(gpu, seed + (uint64_t)i, &op);
            const char *of_gpu = judge(gpu, there);
            of_gpu = of_gpu ? of_gpu : compare(op, status, there);
            if (of_gpu && !problem) {
                problem = of_gpu;
                sentence = there == RAFTER_OK ? "on the GPU" : rafter_last_error(gpu);
            }
            release_all(&pool_of_gpu);
            pool = &pool_of_cpu;
        }
        accepted[op] += status == RAFTER_OK;
        if (!problem) {
            passed++;
        } else if (failed++ < 20) {
            printf("FAIL call %ld of op %d (test_fuzz 1 %llu%s): %s: %s\n", i, op,
                   (unsigned long long)(seed + (uint64_t)i),
                   gpu     ? " cuda"
                   : small ? " small"
                           : "",
                   problem, sentence);
        }
        release_all(&pool_of_cpu);
    }
    rafter_context_destroy(context);
    rafter_context_destroy(gpu);
    for (int op = 0; op < OPS; op++) /* if all calls are refused, nothing is tested */
        if (calls >= 1000 && accepted[op] < calls / OPS / 12) {
            failed++;
            printf("FAIL only %ld calls of op %d were accepted\n", accepted[op], op);
        }
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}
#endif

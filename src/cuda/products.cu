/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/products.cuh"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mutex>

#include "cuda/cublaslt.h"

/* ---- loading --------------------------------------------------------------------------------- */

#define STRING_(x) #x
#define STRING(x) STRING_(x)
static const char *const LIBRARY = "libcublasLt.so." STRING(__CUDACC_VER_MAJOR__);

/* Once for the process; it stays loaded. A library of that name that is loaded already, PyTorch's for one, is it. */
static const LtFunctions *load(char *reason, size_t room) {
    static std::mutex lock;
    static LtFunctions functions;
    static bool loaded;
    const std::lock_guard<std::mutex> locked(lock);
    if (loaded)
        return &functions;
    const char *path = getenv("RAFTER_CUBLASLT_LIBRARY");
    path = path && *path ? path : LIBRARY;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *error = dlerror();
        snprintf(reason, room, "%s", error ? error : path);
        return NULL;
    }
    const struct {
        const char *name;
        void **to;
    } wanted[] = {
#define WANT(name) {#name, reinterpret_cast<void **>(&functions.name)}
        WANT(cublasLtCreate),
        WANT(cublasLtDestroy),
        WANT(cublasLtMatmulDescCreate),
        WANT(cublasLtMatmulDescDestroy),
        WANT(cublasLtMatmulDescSetAttribute),
        WANT(cublasLtMatrixLayoutCreate),
        WANT(cublasLtMatrixLayoutDestroy),
        WANT(cublasLtMatmulPreferenceCreate),
        WANT(cublasLtMatmulPreferenceDestroy),
        WANT(cublasLtMatmulPreferenceSetAttribute),
        WANT(cublasLtMatmulAlgoGetHeuristic),
        WANT(cublasLtMatmulAlgoConfigGetAttribute),
        WANT(cublasLtMatmul),
#undef WANT
    };
    for (const auto &one : wanted)
        if (!(*one.to = dlsym(library, one.name))) {
            snprintf(reason, room, "%s has no %s", path, one.name);
            return NULL;
        }
    loaded = true;
    return &functions;
}

/* ---- what a context keeps -------------------------------------------------------------------- */

/* A product without its addresses: what decides on an algorithm. */
struct Shape {
    rafter_dtype dtype, out_dtype;
    bool a_turned, b_turned, add;
    bool on_device; /* alpha and beta */
    int64_t m, n, k, a_stride, b_stride, c_stride;
    size_t workspace_bytes;
};

struct Known {
    Shape shape;
    LtOperation operation;
    LtLayout a, b, c;
    LtAlgorithm algorithm;
};

enum { MOST_KNOWN = 128, MOST_CANDIDATES = 8, TRIALS = 4 };

struct rafter_cuda_products {
    const LtFunctions *lt;
    LtHandle handle;
    bool tunes;
    int known, next; /* the oldest is forgotten when there is no room */
    Known shape[MOST_KNOWN];
};

static void forget(const LtFunctions *lt, Known *known) {
    if (known->operation)
        lt->cublasLtMatmulDescDestroy(known->operation);
    for (LtLayout layout : {known->a, known->b, known->c})
        if (layout)
            lt->cublasLtMatrixLayoutDestroy(layout);
    memset(known, 0, sizeof *known);
}

void rafter_cuda_close_products(rafter_cuda_state *state) {
    rafter_cuda_products *products = state->products;
    if (!products)
        return;
    for (int i = 0; i < products->known; i++)
        forget(products->lt, &products->shape[i]);
    if (products->handle)
        products->lt->cublasLtDestroy(products->handle);
    free(products);
    state->products = NULL;
}

rafter_status rafter_cuda_open_products(rafter_context *context) {
    rafter_cuda_state *state = context->cuda_state;
    if (state->products)
        return RAFTER_OK;
    char reason[256] = "";
    const LtFunctions *lt = load(reason, sizeof reason);
    if (!lt)
        return rafter_fail(context, RAFTER_UNSUPPORTED, "linear_cross_entropy on CUDA needs %s of cuBLAS: %s", LIBRARY,
                           reason);
    rafter_cuda_products *products = static_cast<rafter_cuda_products *>(calloc(1, sizeof *products));
    if (!products)
        return rafter_fail(context, RAFTER_OUT_OF_MEMORY, "no memory for matrix products");
    products->lt = lt;
    const char *tune = getenv("RAFTER_TUNE");
    products->tunes = tune && strcmp(tune, "1") == 0;
    state->products = products;
    const LtStatus status = lt->cublasLtCreate(&products->handle);
    if (status != 0) {
        products->handle = NULL;
        rafter_cuda_close_products(state);
        return rafter_fail(context, RAFTER_DEVICE_ERROR, "cuBLASLt could not be started (status %d)", (int)status);
    }
    return RAFTER_OK;
}

/* ---- choosing an algorithm ------------------------------------------------------------------- */

/* cuBLASLt counts columns first, so that what it sees is c^T[n, m] = b^T a^T. */
static cudaDataType_t type_of(rafter_dtype dtype) {
    return dtype == RAFTER_F32 ? CUDA_R_32F : dtype == RAFTER_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

static LtStatus describe(const LtFunctions *lt, Known *known) {
    const Shape &s = known->shape;
    const int32_t turn_a = s.b_turned, turn_b = s.a_turned;
    const int32_t mode = s.on_device ? LT_SCALARS_ON_DEVICE : LT_SCALARS_ON_HOST;
    LtStatus status = lt->cublasLtMatmulDescCreate(&known->operation, LT_COMPUTE_F32, CUDA_R_32F);
    if (status == 0)
        status = lt->cublasLtMatmulDescSetAttribute(known->operation, LT_TURN_A, &turn_a, sizeof turn_a);
    if (status == 0)
        status = lt->cublasLtMatmulDescSetAttribute(known->operation, LT_TURN_B, &turn_b, sizeof turn_b);
    if (status == 0)
        status = lt->cublasLtMatmulDescSetAttribute(known->operation, LT_POINTER_MODE, &mode, sizeof mode);
    const cudaDataType_t type = type_of(s.dtype);
    if (status == 0)
        status =
            lt->cublasLtMatrixLayoutCreate(&known->a, type, s.b_turned ? s.k : s.n, s.b_turned ? s.n : s.k, s.b_stride);
    if (status == 0)
        status =
            lt->cublasLtMatrixLayoutCreate(&known->b, type, s.a_turned ? s.m : s.k, s.a_turned ? s.k : s.m, s.a_stride);
    if (status == 0)
        status = lt->cublasLtMatrixLayoutCreate(&known->c, type_of(s.out_dtype), s.n, s.m, s.c_stride);
    return status;
}

static LtStatus propose(const rafter_cuda_products *products, const Known *known, LtCandidate *found, int *count) {
    const LtFunctions *lt = products->lt;
    LtPreference preference = NULL;
    const uint64_t most = known->shape.workspace_bytes;
    const uint32_t reductions = LT_REDUCE_IN_F32, alignment = 16;
    LtStatus status = lt->cublasLtMatmulPreferenceCreate(&preference);
    if (status == 0)
        status = lt->cublasLtMatmulPreferenceSetAttribute(preference, LT_MOST_WORKSPACE, &most, sizeof most);
    if (status == 0)
        status =
            lt->cublasLtMatmulPreferenceSetAttribute(preference, LT_REDUCTIONS_ALLOWED, &reductions, sizeof reductions);
    for (int operand = LT_ALIGNMENT_A; operand <= LT_ALIGNMENT_D && status == 0; operand++)
        status = lt->cublasLtMatmulPreferenceSetAttribute(preference, static_cast<LtPreferenceAttribute>(operand),
                                                          &alignment, sizeof alignment);
    if (status == 0)
        status = lt->cublasLtMatmulAlgoGetHeuristic(products->handle, known->operation, known->a, known->b, known->c,
                                                    known->c, preference, MOST_CANDIDATES, found, count);
    if (preference)
        lt->cublasLtMatmulPreferenceDestroy(preference);
    return status;
}

static LtStatus enqueue(const rafter_cuda_state *state, const Known &known, const Product &p, void *workspace) {
    const rafter_cuda_products *products = state->products;
    const float host_scalars[] = {0.0f, 1.0f};
    const float *const scalars = known.shape.on_device ? state->zero_and_one : host_scalars;
    return products->lt->cublasLtMatmul(products->handle, known.operation, p.alpha ? p.alpha : scalars + 1, p.b.data,
                                        known.a, p.a.data, known.b, scalars + p.add, p.c, known.c, p.c, known.c,
                                        &known.algorithm, workspace, known.shape.workspace_bytes, state->stream);
}

/* Milliseconds of the fastest of a few trials, negative if it fails. The trials add nothing to c: alpha is 0 in them,
 * on the device, where cuBLASLt does not see it and leave out the product. */
static float time_candidate(const rafter_cuda_state *state, const Known &known, Product p, void *workspace,
                            cudaEvent_t before, cudaEvent_t after) {
    if (p.add)
        p.alpha = state->zero_and_one;
    float least = -1.0f;
    for (int trial = 0; trial < TRIALS; trial++) {
        float milliseconds = 0.0f;
        cudaEventRecord(before, state->stream);
        if (enqueue(state, known, p, workspace) != 0)
            return -1.0f;
        cudaEventRecord(after, state->stream);
        if (cudaEventSynchronize(after) != cudaSuccess || cudaEventElapsedTime(&milliseconds, before, after) != 0)
            return -1.0f;
        if (trial > 0 && (least < 0.0f || milliseconds < least))
            least = milliseconds;
    }
    return least;
}

static int attribute_of(const LtFunctions *lt, const LtCandidate &candidate, LtAlgorithmAttribute attribute) {
    int value = 0;
    size_t written = 0;
    lt->cublasLtMatmulAlgoConfigGetAttribute(&candidate.algorithm, attribute, &value,
                                             attribute == LT_INNER || attribute == LT_CLUSTER ? 2 : 4, &written);
    return value;
}

static void describe_choice(const LtFunctions *lt, const Known &known, const LtCandidate &candidate, int number,
                            float milliseconds) {
    int value[LT_CLUSTER + 1];
    for (int attribute = LT_ID; attribute <= LT_CLUSTER; attribute++)
        value[attribute] = attribute_of(lt, candidate, static_cast<LtAlgorithmAttribute>(attribute));
    const Shape &s = known.shape;
    fprintf(stderr,
            "product m %lld n %lld k %lld turned %d%d add %d out %d: candidate %d, algorithm %d tile %d split %d "
            "reduction %d swizzle %d custom %d stages %d inner %d cluster %d, waves %.2f: %.4f ms\n",
            (long long)s.m, (long long)s.n, (long long)s.k, s.a_turned, s.b_turned, s.add, (int)s.out_dtype, number,
            value[LT_ID], value[LT_TILE], value[LT_SPLIT], value[LT_REDUCTION], value[LT_SWIZZLE], value[LT_CUSTOM],
            value[LT_STAGES], value[LT_INNER], value[LT_CLUSTER], (double)candidate.waves, (double)milliseconds);
}

/* The candidate that is taken without measuring: cuBLASLt's first, except where large products of short sums write
 * much. There, on an H200, its kernels whose custom option is below LT_COOPERATIVE, in which one half of a block writes
 * its tile while the other sums the next, beat those that it puts first, in which both work on one tile, by up to a
 * fifth; and lose where sums are long or results few: docs/perf/linear_cross_entropy.md. */
static int built_in_choice(const rafter_cuda_state *state, const Shape &shape, const LtCandidate *found, int count) {
    const double results = (double)shape.m * (double)shape.n, flops = 2.0 * results * (double)shape.k;
    const bool writes_much = flops > 1e10 && (shape.k <= 4096 || (shape.k <= 16384 && results > 4e7));
    for (int i = 0; i < count && state->compute_capability == 90 && shape.dtype != RAFTER_F32 && writes_much; i++)
        if (attribute_of(state->products->lt, found[i], LT_CUSTOM) < LT_COOPERATIVE)
            return i;
    return 0;
}

/* Puts the fastest candidate into known->algorithm. */
static void tune(const rafter_cuda_state *state, Known *known, const LtCandidate *found, int count, const Product &p,
                 void *workspace) {
    cudaEvent_t before = NULL, after = NULL;
    cudaEventCreate(&before);
    cudaEventCreate(&after);
    float least = -1.0f;
    int best = 0;
    for (int i = 0; i < count && before && after; i++) {
        known->algorithm = found[i].algorithm;
        const float milliseconds = time_candidate(state, *known, p, workspace, before, after);
        if (getenv("RAFTER_TUNE_TALK"))
            describe_choice(state->products->lt, *known, found[i], i, milliseconds);
        if (milliseconds > 0.0f && (least < 0.0f || milliseconds < least)) {
            least = milliseconds;
            best = i;
        }
    }
    known->algorithm = found[best].algorithm;
    cudaEventDestroy(before);
    cudaEventDestroy(after);
}

rafter_status rafter_cuda_multiply(rafter_context *context, const Product &p, void *workspace, size_t workspace_bytes) {
    rafter_cuda_products *products = context->cuda_state->products;
    Shape shape;
    memset(&shape, 0, sizeof shape); /* padding too: shapes are compared as bytes */
    shape.dtype = p.dtype;
    shape.out_dtype = p.out_dtype;
    shape.a_turned = p.a.turned;
    shape.b_turned = p.b.turned;
    shape.add = p.add;
    shape.on_device = p.alpha || p.add; /* of a sum that grows: so that a trial can have an alpha of 0, see below */
    shape.m = p.m;
    shape.n = p.n;
    shape.k = p.k;
    shape.a_stride = p.a.stride;
    shape.b_stride = p.b.stride;
    shape.c_stride = p.c_stride;
    shape.workspace_bytes = workspace_bytes;

    Known *known = NULL;
    for (int i = 0; i < products->known && !known; i++)
        if (memcmp(&products->shape[i].shape, &shape, sizeof shape) == 0)
            known = &products->shape[i];
    LtStatus status = 0;
    if (!known) {
        known = &products->shape[products->next];
        forget(products->lt, known);
        known->shape = shape;
        LtCandidate found[MOST_CANDIDATES] = {};
        int count = 0;
        status = describe(products->lt, known);
        if (status == 0)
            status = propose(products, known, found, &count);
        if (status != 0 || count == 0) {
            forget(products->lt, known);
            return rafter_fail(context, RAFTER_DEVICE_ERROR,
                               "cuBLASLt has no algorithm for a product of %lld x %lld x %lld (status %d)",
                               (long long)p.m, (long long)p.n, (long long)p.k, (int)status);
        }
        known->algorithm = found[built_in_choice(context->cuda_state, shape, found, count)].algorithm;
        if (products->tunes && count > 1 && !rafter_cuda_capturing(context->cuda_state))
            tune(context->cuda_state, known, found, count, p, workspace);
        products->next = (products->next + 1) % MOST_KNOWN;
        if (products->known < MOST_KNOWN)
            products->known++;
    }
    status = enqueue(context->cuda_state, *known, p, workspace);
    if (status != 0)
        return rafter_fail(context, RAFTER_DEVICE_ERROR, "cuBLASLt could not multiply %lld x %lld x %lld (status %d)",
                           (long long)p.m, (long long)p.n, (long long)p.k, (int)status);
    return RAFTER_OK;
}

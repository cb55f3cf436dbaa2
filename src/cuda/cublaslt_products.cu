/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products by cuBLASLt: loading the library, choosing and caching an algorithm per shape, enqueueing. */
#include "cuda/cublaslt_products.cuh"

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

/* Loads cuBLASLt once per process; it stays loaded. If a library of that name is loaded already, such as
 * PyTorch's, dlopen gives that one. */
static const LtFunctions *load(char *reason, size_t reason_bytes) {
    static std::mutex lock;
    static LtFunctions functions;
    static bool loaded;
    const std::lock_guard<std::mutex> locked(lock);
    if (loaded)
        return &functions;
    const char *path = secure_getenv("RAFTER_CUBLASLT_LIBRARY");
    path = path && *path ? path : LIBRARY;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *error = dlerror();
        snprintf(reason, reason_bytes, "%s", error ? error : path);
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
            snprintf(reason, reason_bytes, "%s has no %s", path, one.name);
            return NULL;
        }
    loaded = true;
    return &functions;
}

/* ---- state of a context ---------------------------------------------------------------------- */

/* A product without its addresses: the key of the cache of algorithms. */
struct Shape {
    rafter_dtype dtype, out_dtype;
    bool a_transposed, b_transposed, add, tf32, rigid;
    bool on_device; /* whether alpha and beta are in device memory */
    int64_t m, n, k, a_stride, b_stride, c_stride;
    size_t workspace_bytes;
};

struct CachedProduct {
    Shape shape;
    LtOperation operation;
    LtLayout a, b, c;
    LtAlgorithm algorithm;
};

enum { MOST_CACHED = 128, MOST_CANDIDATES = 8, TRIALS = 4 }; /* products per context; per product; per candidate */

struct rafter_cuda_products {
    const LtFunctions *lt;
    LtHandle handle;
    bool tunes;
    int cached, next; /* a ring: the oldest is replaced when it is full */
    CachedProduct entry[MOST_CACHED];
};

static void clear(const LtFunctions *lt, CachedProduct *entry) {
    if (entry->operation)
        lt->cublasLtMatmulDescDestroy(entry->operation);
    for (LtLayout layout : {entry->a, entry->b, entry->c})
        if (layout)
            lt->cublasLtMatrixLayoutDestroy(layout);
    memset(entry, 0, sizeof *entry);
}

void rafter_cuda_close_products(rafter_cuda_state *state) {
    rafter_cuda_products *products = state->products;
    if (!products)
        return;
    for (int i = 0; i < products->cached; i++)
        clear(products->lt, &products->entry[i]);
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

static cudaDataType_t type_of(rafter_dtype dtype) {
    return dtype == RAFTER_F32 ? CUDA_R_32F : dtype == RAFTER_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* Describes the entry's product to cuBLASLt, which is column-major: it computes c^T[n, m] = b^T a^T. */
static LtStatus describe(const LtFunctions *lt, CachedProduct *entry) {
    const Shape &s = entry->shape;
    const int32_t transpose_a = s.b_transposed, transpose_b = s.a_transposed;
    const int32_t mode = s.on_device ? LT_SCALARS_ON_DEVICE : LT_SCALARS_ON_HOST;
    LtStatus status =
        lt->cublasLtMatmulDescCreate(&entry->operation, s.tf32 ? LT_COMPUTE_F32_BY_TF32 : LT_COMPUTE_F32, CUDA_R_32F);
    if (status == 0)
        status = lt->cublasLtMatmulDescSetAttribute(entry->operation, LT_TRANSPOSE_A, &transpose_a, sizeof transpose_a);
    if (status == 0)
        status = lt->cublasLtMatmulDescSetAttribute(entry->operation, LT_TRANSPOSE_B, &transpose_b, sizeof transpose_b);
    if (status == 0)
        status = lt->cublasLtMatmulDescSetAttribute(entry->operation, LT_POINTER_MODE, &mode, sizeof mode);
    const cudaDataType_t type = type_of(s.dtype);
    if (status == 0)
        status = lt->cublasLtMatrixLayoutCreate(&entry->a, type, s.b_transposed ? s.k : s.n, s.b_transposed ? s.n : s.k,
                                                s.b_stride);
    if (status == 0)
        status = lt->cublasLtMatrixLayoutCreate(&entry->b, type, s.a_transposed ? s.m : s.k, s.a_transposed ? s.k : s.m,
                                                s.a_stride);
    if (status == 0)
        status = lt->cublasLtMatrixLayoutCreate(&entry->c, type_of(s.out_dtype), s.n, s.m, s.c_stride);
    return status;
}

/* Asks cuBLASLt for algorithms for the product. */
static LtStatus propose(const rafter_cuda_products *products, const CachedProduct *entry, LtCandidate *found,
                        int *count) {
    const LtFunctions *lt = products->lt;
    LtPreference preference = NULL;
    const uint64_t most = entry->shape.workspace_bytes;
    const uint32_t reductions = entry->shape.rigid ? 0 : LT_REDUCE_IN_F32, alignment = 16;
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
        status = lt->cublasLtMatmulAlgoGetHeuristic(products->handle, entry->operation, entry->a, entry->b, entry->c,
                                                    entry->c, preference, MOST_CANDIDATES, found, count);
    if (preference)
        lt->cublasLtMatmulPreferenceDestroy(preference);
    return status;
}

static LtStatus enqueue(const rafter_cuda_state *state, const CachedProduct &entry, const Product &p, void *workspace) {
    const rafter_cuda_products *products = state->products;
    const float host_scalars[] = {0.0f, 1.0f};
    const float *const scalars = entry.shape.on_device ? state->zero_and_one : host_scalars;
    return products->lt->cublasLtMatmul(products->handle, entry.operation, p.alpha ? p.alpha : scalars + 1, p.b.data,
                                        entry.a, p.a.data, entry.b, scalars + p.add, p.c, entry.c, p.c, entry.c,
                                        &entry.algorithm, workspace, entry.shape.workspace_bytes, state->stream);
}

/* Milliseconds of the fastest of a few trials; negative if one fails. If the product adds to c, alpha is
 * 0 in the trials, so that they add nothing. That 0 is in device memory, because cuBLASLt would skip the
 * product if it saw it. */
static float time_candidate(const rafter_cuda_state *state, const CachedProduct &entry, Product p, void *workspace,
                            cudaEvent_t before, cudaEvent_t after) {
    if (p.add)
        p.alpha = state->zero_and_one;
    float least = -1.0f;
    for (int trial = 0; trial < TRIALS; trial++) {
        float milliseconds = 0.0f;
        cudaEventRecord(before, state->stream);
        if (enqueue(state, entry, p, workspace) != 0)
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

static void describe_choice(const LtFunctions *lt, const CachedProduct &entry, const LtCandidate &candidate, int number,
                            float milliseconds) {
    int value[LT_CLUSTER + 1];
    for (int attribute = LT_ID; attribute <= LT_CLUSTER; attribute++)
        value[attribute] = attribute_of(lt, candidate, static_cast<LtAlgorithmAttribute>(attribute));
    const Shape &s = entry.shape;
    fprintf(stderr,
            "product m %lld n %lld k %lld transposed %d%d add %d out %d: candidate %d, algorithm %d tile %d split %d "
            "reduction %d swizzle %d custom %d stages %d inner %d cluster %d, waves %.2f: %.4f ms\n",
            (long long)s.m, (long long)s.n, (long long)s.k, s.a_transposed, s.b_transposed, s.add, (int)s.out_dtype,
            number, value[LT_ID], value[LT_TILE], value[LT_SPLIT], value[LT_REDUCTION], value[LT_SWIZZLE],
            value[LT_CUSTOM], value[LT_STAGES], value[LT_INNER], value[LT_CLUSTER], (double)candidate.waves,
            (double)milliseconds);
}

/* The candidate to use without measuring. Usually cuBLASLt's first proposal, in whose kernels both halves of a block
 * work on the same tile. But for large products with small k and many results on an H200, kernels with a custom option
 * below LT_COOPERATIVE are up to a fifth faster: one half of a block writes its tile while the other sums the next.
 * They are slower where k is large or results are few: docs/perf/linear_cross_entropy.md. */
static int built_in_choice(const rafter_cuda_state *state, const Shape &shape, const LtCandidate *found, int count) {
    const double results = (double)shape.m * (double)shape.n, flops = 2.0 * results * (double)shape.k;
    const bool writes_much = flops > 1e10 && (shape.k <= 4096 || (shape.k <= 16384 && results > 4e7));
    for (int i = 0; i < count && state->compute_capability == 90 && shape.dtype != RAFTER_F32 && writes_much; i++)
        if (attribute_of(state->products->lt, found[i], LT_CUSTOM) < LT_COOPERATIVE)
            return i;
    return 0;
}

/* RAFTER_TUNE: measures the candidates, and sets the entry's algorithm to the fastest. */
static void tune(const rafter_cuda_state *state, CachedProduct *entry, const LtCandidate *found, int count,
                 const Product &p, void *workspace) {
    cudaEvent_t before = NULL, after = NULL;
    const bool timed = cudaEventCreate(&before) == cudaSuccess && cudaEventCreate(&after) == cudaSuccess;
    float least = -1.0f;
    int best = 0;
    for (int i = 0; i < count && timed; i++) {
        entry->algorithm = found[i].algorithm;
        const float milliseconds = time_candidate(state, *entry, p, workspace, before, after);
        if (getenv("RAFTER_TUNE_TALK"))
            describe_choice(state->products->lt, *entry, found[i], i, milliseconds);
        if (milliseconds > 0.0f && (least < 0.0f || milliseconds < least)) {
            least = milliseconds;
            best = i;
        }
    }
    entry->algorithm = found[best].algorithm;
    if (before)
        cudaEventDestroy(before);
    if (after)
        cudaEventDestroy(after);
    cudaGetLastError(); /* clear it: a failed trial is not a failure of the product */
}

/* Describes the entry's product and asks for algorithms for it. If it is rigid, it asks for those of a product of
 * RIGID_ROWS rows, so that the same kernel is used for any number of rows. */
static LtStatus find_algorithms(const rafter_cuda_products *products, CachedProduct *entry, LtCandidate *found,
                                int *count) {
    constexpr int64_t RIGID_ROWS = 2048;
    CachedProduct asked = {};
    asked.shape = entry->shape;
    if (entry->shape.rigid)
        asked.shape.m = RIGID_ROWS;
    LtStatus status = describe(products->lt, &asked);
    if (status == 0)
        status = propose(products, &asked, found, count);
    clear(products->lt, &asked);
    return status == 0 ? describe(products->lt, entry) : status;
}

rafter_status rafter_cuda_multiply(rafter_context *context, const Product &p, void *workspace, size_t workspace_bytes) {
    rafter_cuda_products *products = context->cuda_state->products;
    if (context->cuda_state->failed)
        return RAFTER_OK; /* as in launch(): the failure is reported at the end of the call */
    Shape shape;
    memset(&shape, 0, sizeof shape); /* padding too: shapes are compared bytewise */
    shape.dtype = p.dtype;
    shape.out_dtype = p.out_dtype;
    shape.a_transposed = p.a.transposed;
    shape.b_transposed = p.b.transposed;
    shape.add = p.add;
    shape.tf32 = p.tf32 && p.dtype == RAFTER_F32;
    shape.rigid = p.rigid;
    shape.on_device = p.alpha || p.add; /* p.add: so that trials can have an alpha of 0, see time_candidate */
    shape.m = p.m;
    shape.n = p.n;
    shape.k = p.k;
    shape.a_stride = p.a.stride;
    shape.b_stride = p.b.stride;
    shape.c_stride = p.c_stride;
    shape.workspace_bytes = workspace_bytes;

    CachedProduct *entry = NULL;
    for (int i = 0; i < products->cached && !entry; i++)
        if (memcmp(&products->entry[i].shape, &shape, sizeof shape) == 0)
            entry = &products->entry[i];
    LtStatus status = 0;
    if (!entry) {
        entry = &products->entry[products->next];
        clear(products->lt, entry);
        entry->shape = shape;
        LtCandidate found[MOST_CANDIDATES] = {};
        int count = 0;
        status = find_algorithms(products, entry, found, &count);
        if (status != 0 || count == 0) {
            clear(products->lt, entry);
            return rafter_fail(context, RAFTER_DEVICE_ERROR,
                               "cuBLASLt has no algorithm for a product of %lld x %lld x %lld (status %d)",
                               (long long)p.m, (long long)p.n, (long long)p.k, (int)status);
        }
        entry->algorithm = found[p.rigid ? 0 : built_in_choice(context->cuda_state, shape, found, count)].algorithm;
        if (products->tunes && count > 1 && !p.rigid && !rafter_cuda_capturing(context->cuda_state))
            tune(context->cuda_state, entry, found, count, p, workspace);
        products->next = (products->next + 1) % MOST_CACHED;
        if (products->cached < MOST_CACHED)
            products->cached++;
    }
    context->cuda_state->follows = false; /* the last thing it enqueues may not be a kernel */
    status = enqueue(context->cuda_state, *entry, p, workspace);
    if (status != 0)
        return rafter_fail(context, RAFTER_DEVICE_ERROR, "cuBLASLt could not multiply %lld x %lld x %lld (status %d)",
                           (long long)p.m, (long long)p.n, (long long)p.k, (int)status);
    return RAFTER_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

const char *const problem_mode_names[] = {"fwd", "bwd", "fwd+bwd"};
const char *const problem_layout_names[] = {"compact", "guarded", "unaligned", "padded", "transposed", "expanded"};
const char *const problem_values_names[] = {"ordinary", "huge", "-inf", "+inf", "nan"};

const struct op_cases *const problem_ops[] = {
#define RAFTER_OP(name) &rafter_cases_##name,
#include "ops/ops.inc"
#undef RAFTER_OP
    NULL};

bool problem_adapt(problem *p) {
    return !p->op->adapt || p->op->adapt(p);
}

/* Padding of inputs: NaN in every dtype, so that a kernel that reads it shows. */
enum { PADDING = 0xff };

bool problem_writes(const problem_tensor *t, enum problem_mode mode) {
    return (t->role == PROBLEM_OUTPUT && mode != PROBLEM_BACKWARD) ||
           (t->role == PROBLEM_GRADIENT && mode != PROBLEM_FORWARD);
}

static bool is_result(const problem_tensor *t) {
    return t->role == PROBLEM_OUTPUT || t->role == PROBLEM_GRADIENT;
}

/* ---- numbers --------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    uint8_t code, bits;
    int digits, least_exponent; /* of floats: bits of the significand, exponent of the smallest normal */
} dtypes[] = {
    [RAFTER_F32] = {"fp32", kDLFloat, 32, 24, -126}, [RAFTER_BF16] = {"bf16", kDLBfloat, 16, 8, -126},
    [RAFTER_F16] = {"fp16", kDLFloat, 16, 11, -14},  [RAFTER_I32] = {"int32", kDLInt, 32, 0, 0},
    [RAFTER_I64] = {"int64", kDLInt, 64, 0, 0},      [RAFTER_U8] = {"uint8", kDLUInt, 8, 0, 0},
};

const char *problem_dtype_name(rafter_dtype dtype) {
    return dtypes[dtype].name;
}

static int64_t bytes_of(rafter_dtype dtype) {
    return dtypes[dtype].bits / 8;
}

/* The distance between neighbouring values of the dtype at x. */
static double unit(rafter_dtype dtype, double x) {
    int exponent;
    frexp(x, &exponent);
    exponent -= 1;
    if (x == 0 || exponent < dtypes[dtype].least_exponent)
        exponent = dtypes[dtype].least_exponent;
    return ldexp(1.0, exponent - dtypes[dtype].digits + 1);
}

/* x rounded to the dtype, to nearest even, in one step. */
static double round_to(rafter_dtype dtype, double x) {
    if (dtypes[dtype].digits == 0 || !isfinite(x))
        return x;
    const double u = unit(dtype, x), rounded = nearbyint(x / u) * u;
    const double largest = dtype == RAFTER_F16 ? 65504.0 : dtype == RAFTER_BF16 ? 0x1.fep127 : 0x1.fffffep127;
    return fabs(rounded) > largest ? copysign(INFINITY, x) : rounded;
}

static uint16_t half_bits(double x) {
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const double size = fabs(round_to(RAFTER_F16, x));
    if (isnan(x))
        return 0x7e00;
    if (isinf(size))
        return sign | 0x7c00;
    if (size < 0x1p-14) /* zero and subnormals count in units of 2^-24 */
        return (uint16_t)(sign | (int)(size * 0x1p24));
    int exponent;
    const double fraction = frexp(size, &exponent); /* in [0.5, 1) */
    return (uint16_t)(sign | (exponent + 14) << 10 | (int)((2 * fraction - 1) * 1024));
}

static double half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31)
        size = fraction ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
}

void problem_store(rafter_dtype dtype, char *to, double x) {
    if (dtype == RAFTER_I64) {
        const int64_t v = (int64_t)x;
        memcpy(to, &v, 8);
    } else if (dtype == RAFTER_I32) {
        const int32_t v = (int32_t)x;
        memcpy(to, &v, 4);
    } else if (dtype == RAFTER_U8) {
        *(unsigned char *)to = (unsigned char)x;
    } else if (dtype == RAFTER_F16) {
        const uint16_t bits = half_bits(x);
        memcpy(to, &bits, 2);
    } else {
        const float v = (float)x;
        uint32_t bits;
        memcpy(&bits, &v, 4);
        if (dtype == RAFTER_F32) {
            memcpy(to, &bits, 4);
        } else {
            const uint16_t high = (uint16_t)(isnan(v) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
            memcpy(to, &high, 2);
        }
    }
}

double problem_load(rafter_dtype dtype, const char *from) {
    uint16_t half = 0;
    uint32_t word = 0;
    int64_t wide = 0;
    float real;
    switch (dtype) {
    case RAFTER_U8: return *(const unsigned char *)from;
    case RAFTER_I64: memcpy(&wide, from, 8); return (double)wide;
    case RAFTER_I32: memcpy(&word, from, 4); return (int32_t)word;
    case RAFTER_F16: memcpy(&half, from, 2); return half_value(half);
    case RAFTER_BF16:
        memcpy(&half, from, 2);
        word = (uint32_t)half << 16;
        break;
    case RAFTER_F32: memcpy(&word, from, 4); break;
    }
    memcpy(&real, &word, 4);
    return real;
}

uint64_t problem_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* ---- tensors --------------------------------------------------------------------------------- */

problem_tensor *problem_add(problem *p, const char *name, enum problem_role role, rafter_dtype dtype, int ndim,
                            const int64_t *shape) {
    if (p->tensors == PROBLEM_TENSORS || ndim > PROBLEM_DIMS)
        abort();
    problem_tensor *t = &p->tensor[p->tensors++];
    *t = (problem_tensor){.name = name, .role = role, .dtype = dtype, .ndim = ndim, .numel = 1, .scale = 1};
    for (int d = 0; d < ndim; d++) {
        t->shape[d] = shape[d];
        t->numel *= shape[d];
    }
    return t;
}

problem_tensor *problem_find(const problem *p, const char *name) {
    for (int i = 0; i < p->tensors; i++)
        if (strcmp(p->tensor[i].name, name) == 0)
            return (problem_tensor *)&p->tensor[i];
    return NULL;
}

const DLTensor *problem_dl(const problem *p, const char *name) {
    const problem_tensor *t = problem_find(p, name);
    return t ? &t->tensor : NULL;
}

static char *address(const problem_tensor *t, int64_t index) {
    if (t->plain)
        return t->memory + index * bytes_of(t->dtype);
    int64_t offset = 0;
    for (int d = t->ndim - 1; d >= 0; d--) {
        offset += index % t->shape[d] * t->stride[d];
        index /= t->shape[d];
    }
    return t->memory + offset * bytes_of(t->dtype);
}

double problem_value(const problem_tensor *t, int64_t index) {
    return t->exact ? t->exact[index] : problem_load(t->dtype, address(t, index));
}

double problem_initial(const problem_tensor *t, int64_t index) {
    return t->initial[index];
}

/* ---- layout and filling ---------------------------------------------------------------------- */

static bool lays_out(const problem_tensor *t, enum problem_layout layout) {
    if (t->compact_only || t->numel == 0)
        return false;
    switch (layout) {
    case PROBLEM_PADDED:
    case PROBLEM_RESIDENT: return t->ndim >= 2;
    case PROBLEM_TRANSPOSED: return t->ndim >= 2 && t->shape[t->ndim - 1] > 1 && t->shape[t->ndim - 2] > 1;
    case PROBLEM_EXPANDED: return !is_result(t) && !t->in_place_of && t->ndim >= 1 && t->shape[0] > 1;
    default: return true;
    }
}

/* The other tensor that shares this one's memory, whichever of the two names it. */
static problem_tensor *partner(const problem *p, const problem_tensor *t) {
    if (t->in_place_of)
        return problem_find(p, t->in_place_of);
    for (int i = 0; i < p->tensors; i++)
        if (p->tensor[i].in_place_of && strcmp(p->tensor[i].in_place_of, t->name) == 0)
            return (problem_tensor *)&p->tensor[i];
    return NULL;
}

bool problem_has_layout(const problem *p, enum problem_layout layout) {
    bool any = false;
    for (int i = 0; i < p->tensors; i++) {
        any |= lays_out(&p->tensor[i], layout);
        if (layout == PROBLEM_EXPANDED && partner(p, &p->tensor[i]))
            return false; /* an output with stride 0 is not a thing */
    }
    return any;
}

static void set_strides(problem_tensor *t, enum problem_layout layout) {
    int64_t order[PROBLEM_DIMS] = {0}; /* dimensions from the outermost in memory to the innermost */
    for (int d = 0; d < t->ndim; d++)
        order[d] = d;
    const bool lays = lays_out(t, layout);
    if (lays && layout == PROBLEM_TRANSPOSED) {
        order[t->ndim - 2] = t->ndim - 1;
        order[t->ndim - 1] = t->ndim - 2;
    }
    int64_t step = 1;
    t->plain = !lays || layout < PROBLEM_PADDED;
    for (int i = t->ndim - 1; i >= 0; i--) {
        const int64_t d = order[i];
        t->stride[d] = step;
        step *= t->shape[d] > 0 ? t->shape[d] : 1;
        if (lays && layout == PROBLEM_PADDED && i == t->ndim - 1)
            step += 3;
    }
    if (lays && layout == PROBLEM_EXPANDED)
        t->stride[0] = 0;
    if (lays && layout == PROBLEM_RESIDENT)
        for (int d = 0; d < t->ndim - 1; d++)
            t->stride[d] = 0;
}

/* Memory for the tensor: aligned, or one element past that, or ending right before an unreadable page. */
static bool map_memory(problem_tensor *t, enum problem_layout layout) {
    int64_t elements = t->numel > 0 ? 1 : 0;
    for (int d = 0; d < t->ndim && t->numel > 0; d++)
        elements += (t->shape[d] - 1) * t->stride[d];
    const int64_t pad = layout == PROBLEM_PADDED && lays_out(t, layout) ? 3 : 0;
    t->memory_bytes = (size_t)((elements + pad) * bytes_of(t->dtype));
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    t->mapping_bytes = (t->memory_bytes + page - 1) / page * page + 2 * page;
    t->mapping =
        mmap(NULL, t->mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (t->mapping == MAP_FAILED) {
        t->mapping = NULL;
        return false;
    }
    char *end = (char *)t->mapping + t->mapping_bytes - page;
    if (layout == PROBLEM_GUARDED) {
        mprotect(end, page, PROT_NONE);
        t->memory = end - t->memory_bytes;
    } else {
        t->memory = (char *)t->mapping + (layout == PROBLEM_UNALIGNED ? bytes_of(t->dtype) : 0);
    }
    return true;
}

double problem_normal(uint64_t bits) {
    const double sum = (double)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    return (sum / 65536.0 - 2.0) * 1.7320508075688772;
}

static double drawn(const problem_tensor *t, uint64_t seed, int64_t index) {
    const uint64_t bits = problem_mix(seed ^ problem_mix((uint64_t)index));
    switch (t->fill) {
    case PROBLEM_NORMAL: return t->shift + t->scale * problem_normal(bits);
    case PROBLEM_UNIFORM: return t->shift + t->scale * (double)(bits >> 11) * 0x1p-53;
    case PROBLEM_LABELS:
        if (t->some_ignored && bits >> 61 == 0)
            return (double)t->ignored;
        return (double)(t->low + (int64_t)(problem_mix(bits) % (uint64_t)(t->high - t->low)));
    case PROBLEM_COUNT: return (double)(t->low + index % t->high);
    }
    return 0;
}

static double special_value(const problem_tensor *t, enum problem_values values, uint64_t seed, int64_t index,
                            double ordinary) {
    const uint64_t bits = problem_mix(seed ^ problem_mix((uint64_t)index ^ 0x5eedu));
    const int64_t last = t->ndim > 0 ? t->shape[t->ndim - 1] : 1;
    if (values == PROBLEM_NEGATIVE_INF && index < last)
        return -INFINITY;
    if (bits % 16 != 0)
        return ordinary;
    switch (values) {
    case PROBLEM_HUGE: return (bits >> 32 & 1 ? 1 : -1) * (t->dtype == RAFTER_F16 ? 6e4 : 1e30);
    case PROBLEM_NEGATIVE_INF: return -INFINITY;
    case PROBLEM_INFINITE: return INFINITY;
    case PROBLEM_NAN: return NAN;
    default: return ordinary;
    }
}

static void fill(problem *p, problem_tensor *t, uint64_t seed) {
    const bool special = t->special && p->values != PROBLEM_ORDINARY;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < t->numel; i++) {
        const double x = drawn(t, seed, i);
        problem_store(t->dtype, address(t, i), special ? special_value(t, p->values, seed, i, x) : x);
    }
}

/* memset on all threads: a single one takes seconds to bring in the pages of the largest tensors. */
static void set_bytes(char *memory, int value, size_t bytes) {
    const size_t piece = (size_t)4 << 20;
    const int64_t pieces = (int64_t)((bytes + piece - 1) / piece);
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (int64_t i = 0; i < pieces; i++) {
        const size_t from = (size_t)i * piece;
        memset(memory + from, value, bytes - from < piece ? bytes - from : piece);
    }
}

static double *values_of(const problem_tensor *t) {
    double *values = malloc(sizeof(double) * (size_t)(t->numel > 0 ? t->numel : 1));
    if (!values)
        return NULL;
#pragma omp parallel for if (t->numel > 100000)
    for (int64_t i = 0; i < t->numel; i++)
        values[i] = problem_load(t->dtype, address(t, i));
    return values;
}

bool problem_allocate(problem *p, uint64_t seed) {
    if (p->sample < 1)
        p->sample = 1;
    for (int i = 0; i < p->tensors; i++)
        set_strides(&p->tensor[i], p->layout);
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (t->in_place_of)
            continue; /* below, once its partner is there */
        if (!map_memory(t, p->layout)) {
            problem_free(p);
            return false;
        }
        if (p->layout != PROBLEM_RESIDENT && (is_result(t) || !t->plain))
            set_bytes(t->memory, is_result(t) ? PROBLEM_POISON : PADDING, t->memory_bytes);
        if (!is_result(t) || t->accumulates)
            fill(p, t, problem_mix(seed + 1000003u * (uint64_t)i));
        if (t->accumulates)
            t->initial = values_of(t);
    }
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (t->in_place_of) {
            problem_tensor *other = problem_find(p, t->in_place_of);
            t->memory = other->memory;
            t->memory_bytes = other->memory_bytes;
            memcpy(t->stride, other->stride, sizeof t->stride);
            t->plain = other->plain;
            if (!is_result(other)) {
                other->exact = values_of(other);
                other->original = malloc(other->memory_bytes + 1);
                if (!other->exact || !other->original) {
                    problem_free(p);
                    return false;
                }
                memcpy(other->original, other->memory, other->memory_bytes);
            }
        }
        t->tensor = (DLTensor){.data = t->memory,
                               .device = {kDLCPU, 0},
                               .ndim = t->ndim,
                               .dtype = {dtypes[t->dtype].code, dtypes[t->dtype].bits, 1},
                               .shape = t->shape,
                               .strides = t->stride};
    }
    return true;
}

static void forget_answers(problem_tensor *t) {
    if (t->list)
        munmap(t->list, t->list_bytes);
    free(t->expected);
    t->expected = NULL;
    t->list = NULL;
    t->listed = 0;
}

void problem_free(problem *p) {
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (t->mapping)
            munmap(t->mapping, t->mapping_bytes);
        forget_answers(t);
        free(t->exact);
        free(t->initial);
        free(t->original);
        t->mapping = NULL;
        t->memory = t->original = NULL;
        t->exact = t->initial = NULL;
    }
}

void problem_poison(problem *p, enum problem_mode mode) {
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (!problem_writes(t, mode))
            continue;
        problem_tensor *other = partner(p, t);
        if (other && !is_result(other))
            memcpy(other->memory, other->original, other->memory_bytes);
        else if (t->accumulates)
            for (int64_t k = 0; k < t->numel; k++)
                problem_store(t->dtype, address(t, k), t->initial[k]);
        else
            set_bytes(t->memory, PROBLEM_POISON, t->memory_bytes);
    }
}

/* ---- the oracle's answers -------------------------------------------------------------------- */

/* An answer that was not given: a NaN no computation makes. */
static const uint64_t unset_bits = 0x7ff4dead4badf00du;

static bool is_unset(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits == unset_bits;
}

void problem_expect(problem_tensor *t, int64_t index, double value) {
    if (!t->list) {
        t->expected[index] = value;
        return;
    }
    int64_t place;
#pragma omp atomic capture
    place = t->listed++;
    if ((size_t)place >= t->list_bytes / sizeof *t->list)
        abort(); /* an oracle that answers twice */
    t->list[place] = (struct problem_answer){index, value};
}

/* Makes room for the answers: one per element, or, from a sampled oracle, a list. The list has room for all elements,
 * but only the pages that are written to take memory. */
static void expect_answers(problem_tensor *t, bool sampled) {
    forget_answers(t);
    const int64_t numel = t->numel > 0 ? t->numel : 1;
    if (sampled) {
        t->list_bytes = (size_t)numel * sizeof *t->list;
        t->list = mmap(NULL, t->list_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (t->list == MAP_FAILED)
            abort();
        return;
    }
    t->expected = malloc(sizeof(double) * (size_t)numel);
    if (!t->expected)
        abort();
    for (int64_t k = 0; k < t->numel; k++)
        memcpy(&t->expected[k], &unset_bits, 8);
}

void problem_solve(problem *p, enum problem_mode mode) {
    for (int i = 0; i < p->tensors; i++)
        if (problem_writes(&p->tensor[i], mode))
            expect_answers(&p->tensor[i], p->sample > 1);
    if (mode != PROBLEM_BACKWARD)
        p->op->oracle(p, PROBLEM_FORWARD);
    if (mode != PROBLEM_FORWARD)
        p->op->oracle(p, PROBLEM_BACKWARD);
}

void problem_store_outputs(problem *p) {
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (t->role == PROBLEM_OUTPUT)
            for (int64_t k = 0; k < t->numel; k++)
                problem_store(t->dtype, address(t, k), t->expected[k]);
    }
}

/* ---- comparing ------------------------------------------------------------------------------- */

/* Error as a share of the bound. */
static double judge(const problem_tensor *t, double got, double want) {
    const double rounded = round_to(t->dtype, want);
    if ((isnan(got) && isnan(want)) || got == rounded)
        return 0;
    if (isnan(got) || isnan(want) || isinf(got) || isinf(want))
        return INFINITY;
    const double error = fabs(got - want), bound = t->absolute + t->relative * fabs(want);
    const double share = bound > 0 ? error / bound : INFINITY;
    if (t->dtype == RAFTER_BF16 || t->dtype == RAFTER_F16)
        return fmin(share, fabs(got - rounded) / unit(t->dtype, rounded));
    return share;
}

static void compare_element(const problem_tensor *t, int64_t index, double want, struct problem_verdict *v) {
    const double got = problem_load(t->dtype, address(t, index));
    const double share = judge(t, got, want), error = fabs(got - want) / fmax(1, fabs(want));
    if (share <= 1 && isfinite(error) && error > v->max_error)
        v->max_error = error;
    if (share > v->worst || (share > 1 && v->good)) {
        v->worst = share;
        if (share > 1) {
            v->good = false;
            snprintf(v->sentence, sizeof v->sentence, "%s[%lld] is %.9g, wanted %.9g (bound %.3g + %.3g relative)",
                     t->name, (long long)index, got, want, t->absolute, t->relative);
        }
    }
}

static bool padding_intact(const problem_tensor *t, enum problem_layout layout) {
    if (layout != PROBLEM_PADDED || !lays_out(t, layout))
        return true;
    const int64_t last = t->shape[t->ndim - 1], bytes = bytes_of(t->dtype);
    for (int64_t row = 0; row < t->numel / last; row++) {
        const unsigned char *end = (const unsigned char *)address(t, row * last) + last * bytes;
        for (int64_t b = 0; b < 3 * bytes; b++)
            if (end[b] != end[0] || (end[b] != PROBLEM_POISON && end[b] != PADDING))
                return false;
    }
    return true;
}

struct problem_verdict problem_compare(const problem *p, enum problem_mode mode) {
    struct problem_verdict v = {.good = true};
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (!problem_writes(t, mode))
            continue;
        if (t->list)
            for (int64_t k = 0; k < t->listed; k++)
                compare_element(t, t->list[k].index, t->list[k].value, &v);
        else
            for (int64_t k = 0; k < t->numel; k++)
                if (!is_unset(t->expected[k]))
                    compare_element(t, k, t->expected[k], &v);
        if (!t->accumulates && !padding_intact(t, p->layout)) {
            v.good = false;
            v.worst = INFINITY;
            snprintf(v.sentence, sizeof v.sentence, "%s: padding between rows was written", t->name);
        }
    }
    return v;
}

uint64_t problem_digest(const problem *p, enum problem_mode mode) {
    uint64_t digest = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (!problem_writes(t, mode))
            continue;
        for (int64_t k = 0; k < t->numel; k++) {
            uint64_t bits = 0;
            memcpy(&bits, address(t, k), (size_t)bytes_of(t->dtype));
            digest = problem_mix(digest ^ bits);
        }
    }
    return digest;
}

/* ---- finite differences ---------------------------------------------------------------------- */

static problem_tensor *upstream_of(const problem *p, const problem_tensor *output) {
    char name[32];
    snprintf(name, sizeof name, "d%s", output->name);
    problem_tensor *t = problem_find(p, name);
    return t && t->role == PROBLEM_UPSTREAM ? t : NULL;
}

/* Sum over outputs of upstream gradient times output, in fp64; a loss without an upstream gradient counts with 1. */
static double objective(problem *p) {
    problem_solve(p, PROBLEM_FORWARD);
    double sum = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i], *upstream = upstream_of(p, t);
        if (t->role != PROBLEM_OUTPUT || (!upstream && strcmp(t->name, "loss") != 0))
            continue;
        for (int64_t k = 0; k < t->numel; k++)
            sum += t->expected[k] * (upstream ? problem_value(upstream, k) : 1.0);
    }
    return sum;
}

double problem_finite_differences(problem *p) {
    for (int i = 0; i < p->tensors; i++)
        if (!is_result(&p->tensor[i]) && !p->tensor[i].exact)
            p->tensor[i].exact = values_of(&p->tensor[i]);
    objective(p);
    for (int i = 0; i < p->tensors; i++) { /* backward reads the unrounded outputs */
        problem_tensor *t = &p->tensor[i];
        if (t->role != PROBLEM_OUTPUT)
            continue;
        free(t->exact);
        t->exact = values_of(t);
        for (int64_t k = 0; k < t->numel; k++)
            t->exact[k] = t->expected[k];
    }
    problem_solve(p, PROBLEM_BACKWARD);

    double worst = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *gradient = &p->tensor[i];
        if (gradient->role != PROBLEM_GRADIENT)
            continue;
        problem_tensor *input = problem_find(p, gradient->name + 1);
        if (!input || input->role != PROBLEM_INPUT)
            continue;
        double size = 0;
        for (int64_t k = 0; k < gradient->numel; k++)
            size = fmax(size, fabs(gradient->expected[k] - (gradient->accumulates ? gradient->initial[k] : 0)));
        const int64_t step = gradient->numel / 24 + 1;
        for (int64_t k = 0; k < gradient->numel; k += step) {
            const double x = input->exact[k], h = 1e-5 * fmax(1, fabs(x));
            input->exact[k] = x + h;
            const double above = objective(p);
            input->exact[k] = x - h;
            const double below = objective(p);
            input->exact[k] = x;
            const double slope = (above - below) / (2 * h);
            const double answer = gradient->expected[k] - (gradient->accumulates ? gradient->initial[k] : 0);
            worst = fmax(worst, fabs(slope - answer) / fmax(size, 1e-3));
        }
    }
    return worst;
}

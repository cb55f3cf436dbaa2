/* SPDX-License-Identifier: Apache-2.0 */
/* A problem's tensors: declaring, laying out, filling, releasing. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/sizes.h"
#include "harness/dice.h"
#include "harness/gpu.h"
#include "harness/internal.h"

/* ---- declaring ------------------------------------------------------------------------------- */

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

char *problem_address(const problem_tensor *t, int64_t index) {
    if (t->plain)
        return t->memory + index * problem_dtype_bytes(t->dtype);
    int64_t offset = 0;
    for (int d = t->ndim - 1; d >= 0; d--) {
        offset += index % t->shape[d] * t->stride[d];
        index /= t->shape[d];
    }
    return t->memory + offset * problem_dtype_bytes(t->dtype);
}

double problem_value(const problem_tensor *t, int64_t index) {
    return t->exact ? t->exact[index] : problem_load(t->dtype, problem_address(t, index));
}

double problem_initial(const problem_tensor *t, int64_t index) {
    return t->initial[index];
}

/* ---- layout and filling ---------------------------------------------------------------------- */

bool problem_lays_out(const problem_tensor *t, enum problem_layout layout) {
    if (t->compact_only || t->numel == 0)
        return false;
    switch (layout) {
    case PROBLEM_PADDED:
    case PROBLEM_RESIDENT: return t->ndim >= 2;
    case PROBLEM_CROSSED: return !problem_is_result(t) && problem_lays_out(t, PROBLEM_TRANSPOSED);
    case PROBLEM_TRANSPOSED: return t->ndim >= 2 && t->shape[t->ndim - 1] > 1 && t->shape[t->ndim - 2] > 1;
    case PROBLEM_EXPANDED: return !problem_is_result(t) && !t->in_place_of && t->ndim >= 1 && t->shape[0] > 1;
    case PROBLEM_BROADCAST: return t->role == PROBLEM_UPSTREAM && !t->in_place_of && t->ndim >= 1 && t->shape[0] > 1;
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
        any |= problem_lays_out(&p->tensor[i], layout);
        const bool results_differ =
            layout == PROBLEM_EXPANDED || layout == PROBLEM_CROSSED || layout == PROBLEM_BROADCAST;
        if (results_differ && partner(p, &p->tensor[i]))
            return false; /* two tensors in one memory have one layout */
        if (layout == PROBLEM_SHUFFLED && p->tensor[i].dtype == RAFTER_U8)
            return false; /* a mask has its bits in row-major order */
    }
    return any;
}

/* Random numbers for the tensor. In half of the problems they are the same for all tensors, so that tensors of one shape
 * have one layout. */
static struct dice dice_of(const problem *p, const problem_tensor *t) {
    struct dice common = {p->shuffle};
    if (one_in(&common, 2))
        return common;
    const problem_tensor *const as = t->laid_out_as ? problem_find(p, t->laid_out_as) : t;
    return (struct dice){p->shuffle ^ problem_mix((uint64_t)(as - p->tensor) + 1)};
}

int64_t problem_offset(const problem *p, const problem_tensor *t) {
    enum { OFFSETS = 9 };
    struct dice dice = dice_of(p, t);
    const enum problem_layout layout = problem_layout_of(p, t);
    return layout == PROBLEM_UNALIGNED ? 1 : layout == PROBLEM_SHUFFLED && one_in(&dice, 2) ? pick(&dice, OFFSETS) : 0;
}

/* Dimensions in any order; a step of 1 to 3 elements; behind each dimension no gap, or one of up to 32 elements. A third
 * of the upstream gradients are expanded. */
static void shuffle_strides(const problem *p, problem_tensor *t, struct dice dice) {
    int64_t order[PROBLEM_DIMS] = {0}, step = one_in(&dice, 2) ? 1 : 1 + pick(&dice, 3);
    for (int d = 0; d < t->ndim; d++) {
        const int64_t at = one_in(&dice, 2) ? d : pick(&dice, d + 1);
        order[d] = order[at];
        order[at] = d;
    }
    for (int i = t->ndim - 1; i >= 0; i--) {
        t->stride[order[i]] = step;
        step *= max64(t->shape[order[i]], 1);
        step += one_in(&dice, 2) ? 0 : one_in(&dice, 2) ? 1 + pick(&dice, 5) : 8 * (1 + pick(&dice, 4));
    }
    if (t->role == PROBLEM_UPSTREAM && !partner(p, t) && one_in(&dice, 3)) {
        const int64_t one = pick(&dice, 2 * PROBLEM_DIMS); /* all dimensions in half of the cases */
        for (int d = 0; d < t->ndim; d++)
            t->stride[d] = one >= PROBLEM_DIMS || one == d ? 0 : t->stride[d];
    }
    t->plain = false;
}

static void set_strides(const problem *p, problem_tensor *t, enum problem_layout layout) {
    if (layout == PROBLEM_SHUFFLED && problem_lays_out(t, layout)) {
        shuffle_strides(p, t, dice_of(p, t));
        return;
    }
    int64_t order[PROBLEM_DIMS] = {0}; /* dimensions from the outermost in memory to the innermost */
    for (int d = 0; d < t->ndim; d++)
        order[d] = d;
    const bool lays = problem_lays_out(t, layout);
    if (lays && (layout == PROBLEM_TRANSPOSED || layout == PROBLEM_CROSSED)) {
        order[t->ndim - 2] = t->ndim - 1;
        order[t->ndim - 1] = t->ndim - 2;
    }
    int64_t step = 1;
    t->plain = !lays || layout < PROBLEM_PADDED;
    for (int i = t->ndim - 1; i >= 0; i--) {
        const int64_t d = order[i];
        t->stride[d] = step;
        step *= max64(t->shape[d], 1);
        if (lays && layout == PROBLEM_PADDED && i == t->ndim - 1)
            step += PROBLEM_PAD_ELEMENTS;
    }
    if (lays && layout == PROBLEM_EXPANDED)
        t->stride[0] = 0;
    if (lays && (layout == PROBLEM_RESIDENT || layout == PROBLEM_BROADCAST))
        for (int d = 0; d < (layout == PROBLEM_RESIDENT ? t->ndim - 1 : t->ndim); d++)
            t->stride[d] = 0;
}

/* The bytes from the first element to the last, with the padding of the last row. */
static size_t span_bytes(const problem_tensor *t, enum problem_layout layout) {
    int64_t elements = t->numel > 0 ? 1 : 0;
    for (int d = 0; d < t->ndim && t->numel > 0; d++)
        elements += (t->shape[d] - 1) * t->stride[d];
    const int64_t pad = layout == PROBLEM_PADDED && problem_lays_out(t, layout) ? PROBLEM_PAD_ELEMENTS : 0;
    return (size_t)((elements + pad) * problem_dtype_bytes(t->dtype));
}

/* Memory for the tensor: problem_offset elements past an aligned address, or ending where an unreadable page begins. */
static bool map_memory(const problem *p, problem_tensor *t) {
    const enum problem_layout layout = problem_layout_of(p, t);
    t->memory_bytes = span_bytes(t, layout);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    t->mapping_bytes = (size_t)round_up((int64_t)t->memory_bytes, (int64_t)page) + 2 * page;
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
        t->memory = (char *)t->mapping + problem_offset(p, t) * problem_dtype_bytes(t->dtype);
    }
    return true;
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
        problem_store(t->dtype, problem_address(t, i), special ? special_value(t, p->values, seed, i, x) : x);
    }
}

/* Draws the first elements and repeats them. Their number is a prime, so that rows of other lengths differ. */
static void fill_repeating(problem_tensor *t, uint64_t seed) {
    enum { DRAWN = 1048583, PIECE = 1 << 20 };
    const size_t element = (size_t)problem_dtype_bytes(t->dtype);
    const int64_t count = (int64_t)(t->memory_bytes / element), first = min64(count, DRAWN);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < first; i++)
        problem_store(t->dtype, t->memory + (size_t)i * element, drawn(t, seed, i));
    for (int64_t done = first; done < count; done = min64(2 * done, count)) {
        const int64_t more = min64(done, count - done);
#pragma omp parallel for schedule(static) if (more > PIECE)
        for (int64_t at = 0; at < more; at += PIECE)
            memcpy(t->memory + (size_t)(done + at) * element, t->memory + (size_t)at * element,
                   (size_t)min64(PIECE, more - at) * element);
    }
}

bool problem_generate(problem *p, const rafter_context *context, uint64_t seed) {
    bool good = true;
    p->generated = true;
    for (int i = 0; i < p->tensors && good; i++) {
        problem_tensor *t = &p->tensor[i];
        const uint64_t own = problem_mix(seed + 1000003u * (uint64_t)i);
        if (problem_is_result(t))
            continue;
        if (t->device)
            good = gpu_generate(context, t, own);
        else
            fill_repeating(t, own);
    }
    return good;
}

/* memset on all threads: one thread takes seconds to fault in the pages of the largest tensors. */
static void set_bytes(char *memory, int value, size_t bytes) {
    const size_t piece = (size_t)4 << 20;
    const int64_t pieces = ceil_div((int64_t)bytes, (int64_t)piece);
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (int64_t i = 0; i < pieces; i++) {
        const size_t from = (size_t)i * piece;
        memset(memory + from, value, bytes - from < piece ? bytes - from : piece);
    }
}

double *problem_values_of(const problem_tensor *t) {
    double *values = malloc(sizeof(double) * (size_t)max64(t->numel, 1));
    if (!values)
        return NULL;
#pragma omp parallel for if (t->numel > 100000)
    for (int64_t i = 0; i < t->numel; i++)
        values[i] = problem_load(t->dtype, problem_address(t, i));
    return values;
}

static void set_argument(problem_tensor *t, void *data, DLDevice device) {
    t->tensor = (DLTensor){.data = data,
                           .device = device,
                           .ndim = t->ndim,
                           .dtype = problem_dl_dtype(t->dtype),
                           .shape = t->shape,
                           .strides = t->stride};
}

/* Gives an in-place tensor the memory and the layout of its partner. */
static void share_memory(problem_tensor *t, const problem_tensor *other) {
    t->memory = other->memory;
    t->memory_bytes = other->memory_bytes;
    memcpy(t->stride, other->stride, sizeof t->stride);
    t->plain = other->plain;
}

bool problem_reserve(problem *p) {
    p->sample = max64(p->sample, 1);
    for (int i = 0; i < p->tensors; i++)
        set_strides(p, &p->tensor[i], problem_layout_of(p, &p->tensor[i]));
    for (int i = 0; i < p->tensors; i++)
        if (!p->tensor[i].in_place_of && !map_memory(p, &p->tensor[i])) {
            problem_free(p);
            return false;
        }
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (t->in_place_of)
            share_memory(t, problem_find(p, t->in_place_of));
        set_argument(t, t->memory, (DLDevice){kDLCPU, 0});
    }
    return true;
}

size_t problem_place(problem *p, char *memory, DLDevice device) {
    enum { ALIGNMENT = 4096 };
    size_t used = 0;
    p->sample = max64(p->sample, 1);
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        set_strides(p, t, problem_layout_of(p, t));
        if (t->in_place_of)
            continue;
        t->memory_bytes = span_bytes(t, problem_layout_of(p, t));
        const size_t offset = (size_t)(problem_offset(p, t) * problem_dtype_bytes(t->dtype));
        char *const at = memory ? memory + used + offset : NULL;
        t->memory = device.device_type == kDLCPU ? at : NULL;
        t->device = device.device_type == kDLCPU ? NULL : at;
        set_argument(t, at, device);
        used += (size_t)round_up((int64_t)(t->memory_bytes + offset), ALIGNMENT);
    }
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *const t = &p->tensor[i];
        if (!t->in_place_of)
            continue;
        const problem_tensor *const other = problem_find(p, t->in_place_of);
        share_memory(t, other);
        t->device = other->device;
        set_argument(t, other->tensor.data, device);
    }
    return used;
}

/* Keeps what an in-place call overwrites. False: no memory. */
static bool keep_original(problem_tensor *t) {
    t->exact = problem_values_of(t);
    t->original = malloc(t->memory_bytes + 1);
    if (!t->exact || !t->original)
        return false;
    memcpy(t->original, t->memory, t->memory_bytes);
    return true;
}

bool problem_allocate(problem *p, uint64_t seed) {
    if (!problem_reserve(p))
        return false;
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (t->in_place_of)
            continue;
        if (p->layout != PROBLEM_RESIDENT && (problem_is_result(t) || !t->plain))
            set_bytes(t->memory, problem_is_result(t) ? PROBLEM_POISON : PROBLEM_PADDING, t->memory_bytes);
        if (!problem_is_result(t) || t->accumulates)
            fill(p, t, problem_mix(seed + 1000003u * (uint64_t)i));
        if (t->accumulates)
            t->initial = problem_values_of(t);
    }
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        problem_tensor *other = t->in_place_of ? problem_find(p, t->in_place_of) : NULL;
        if (other && !problem_is_result(other) && !keep_original(other)) {
            problem_free(p);
            return false;
        }
    }
    return true;
}

void problem_free(problem *p) {
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (t->mapping)
            munmap(t->mapping, t->mapping_bytes);
        problem_forget_answers(t);
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
        if (other && !problem_is_result(other))
            memcpy(other->memory, other->original, other->memory_bytes);
        else if (t->accumulates)
            for (int64_t k = 0; k < t->numel; k++)
                problem_store(t->dtype, problem_address(t, k), t->initial[k]);
        else
            set_bytes(t->memory, PROBLEM_POISON, t->memory_bytes);
    }
}

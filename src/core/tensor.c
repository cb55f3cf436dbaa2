/* SPDX-License-Identifier: Apache-2.0 */
#include "core/tensor.h"

#include <stdio.h>
#include <string.h>

const char *rafter_dtype_name(rafter_dtype dtype) {
    static const char *const names[] = {"fp32", "bf16", "fp16", "int32", "int64", "uint8"};
    return names[dtype];
}

static const struct {
    uint8_t code, bits;
} codes[] = {
    [RAFTER_F32] = {kDLFloat, 32}, [RAFTER_BF16] = {kDLBfloat, 16}, [RAFTER_F16] = {kDLFloat, 16},
    [RAFTER_I32] = {kDLInt, 32},   [RAFTER_I64] = {kDLInt, 64},     [RAFTER_U8] = {kDLUInt, 8},
};
enum { DTYPES = sizeof codes / sizeof *codes };

DLTensor rafter_tensor(void *data, rafter_dtype dtype, int32_t ndim, int64_t *shape) {
    const bool known = (unsigned)dtype < DTYPES;
    return (DLTensor){.data = data,
                      .device = {kDLCPU, 0},
                      .ndim = ndim,
                      .dtype = {known ? codes[dtype].code : 0, known ? codes[dtype].bits : 0, 1},
                      .shape = shape};
}

struct text {
    char s[160];
};

static void append(struct text *text, const char *format, long long value) {
    const size_t used = strlen(text->s);
    snprintf(text->s + used, sizeof text->s - used, format, value);
}

static struct text shape_text(int ndim, const int64_t *shape) {
    struct text text = {"["};
    for (int d = 0; d < ndim; d++)
        append(&text, d ? ", %lld" : "%lld", (long long)shape[d]);
    append(&text, "]", 0);
    return text;
}

/* The name, for a message, of a dtype that the library does not have. */
static struct text foreign_text(DLDataType dtype) {
    static const struct {
        const char *name;
        bool sized; /* the number of bits belongs to the name */
    } kinds[] = {
        [kDLInt] = {"int", true},
        [kDLUInt] = {"uint", true},
        [kDLFloat] = {"fp", true},
        [kDLComplex] = {"complex", true},
        [kDLBool] = {"bool", false},
        [kDLFloat8_e4m3fn] = {"float8_e4m3fn", false},
        [kDLFloat8_e4m3fnuz] = {"float8_e4m3fnuz", false},
        [kDLFloat8_e5m2] = {"float8_e5m2", false},
        [kDLFloat8_e5m2fnuz] = {"float8_e5m2fnuz", false},
    };
    struct text text = {""};
    if (dtype.code >= sizeof kinds / sizeof *kinds || !kinds[dtype.code].name || dtype.lanes != 1)
        snprintf(text.s, sizeof text.s, "code %d with %d bits and %d lanes", dtype.code, dtype.bits, dtype.lanes);
    else if (kinds[dtype.code].sized)
        snprintf(text.s, sizeof text.s, "%s%d", kinds[dtype.code].name, dtype.bits);
    else
        snprintf(text.s, sizeof text.s, "%s", kinds[dtype.code].name);
    return text;
}

static struct text set_text(unsigned dtypes) {
    struct text text = {""};
    for (int i = 0; i < DTYPES; i++)
        if (dtypes >> i & 1) {
            const size_t used = strlen(text.s);
            snprintf(text.s + used, sizeof text.s - used, "%s%s", used ? " or " : "",
                     rafter_dtype_name((rafter_dtype)i));
        }
    return text;
}

/* Fills in numel, shape and stride. The one place that bounds them: see RAFTER_MOST_ELEMENTS. */
static rafter_status take_sizes(rafter_context *context, const char *name, const DLTensor *tensor, rafter_view *view) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    const int64_t most = RAFTER_MOST_ELEMENTS;
    int64_t product = 1; /* of the sizes above 0: also the other sizes of an empty tensor are bounded */
    for (int d = 0; d < view->ndim; d++) {
        const int64_t size = view->shape[d] = tensor->shape[d];
        if (size < 0)
            return rafter_fail(context, bad, "%s has shape %s, wanted no negative size", name,
                               shape_text(tensor->ndim, tensor->shape).s);
        if (size == 0)
            view->numel = 0;
        else if (__builtin_mul_overflow(product, size, &product) || product > most)
            return rafter_fail(context, bad, "%s has shape %s, wanted at most 2^47 elements", name,
                               shape_text(tensor->ndim, tensor->shape).s);
    }
    if (view->numel == 0)
        return RAFTER_OK;
    int64_t last = 0; /* offset of the last element */
    for (int d = view->ndim - 1; d >= 0; d--) {
        const int64_t stride = tensor->strides ? tensor->strides[d] : view->numel;
        if (view->shape[d] > 1) {
            if (stride < 0)
                return rafter_fail(context, bad, "%s has stride %lld in dimension %d, wanted no negative stride", name,
                                   (long long)stride, d);
            view->stride[d] = stride;
            int64_t span;
            if (__builtin_mul_overflow(view->shape[d] - 1, stride, &span) ||
                __builtin_add_overflow(last, span, &last) || last >= most)
                return rafter_fail(context, bad,
                                   "%s has stride %lld in dimension %d of size %lld, wanted all elements within 2^47 "
                                   "of the first",
                                   name, (long long)stride, d, (long long)view->shape[d]);
        }
        view->numel *= view->shape[d];
    }
    return RAFTER_OK;
}

rafter_status rafter_take_tensor(rafter_context *context, const char *name, const DLTensor *tensor, unsigned dtypes,
                                 rafter_view *view) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    if (!tensor)
        return rafter_fail(context, bad, "%s is NULL, wanted a tensor", name);
    if (tensor->device.device_type != context->device.device_type)
        return rafter_fail(context, bad, "%s is on device type %d, wanted the context's, %d", name,
                           (int)tensor->device.device_type, (int)context->device.device_type);
    if (context->device.device_type != kDLCPU && tensor->device.device_id != context->device.device_id)
        return rafter_fail(context, bad, "%s is on device %d, wanted the context's, %d", name,
                           (int)tensor->device.device_id, (int)context->device.device_id);
    if (tensor->ndim < 0 || tensor->ndim > RAFTER_MAX_DIMS)
        return rafter_fail(context, bad, "%s has %d dimensions, wanted 0 to %d", name, (int)tensor->ndim,
                           RAFTER_MAX_DIMS);
    if (tensor->ndim > 0 && !tensor->shape)
        return rafter_fail(context, bad, "%s.shape is NULL, wanted %d sizes", name, (int)tensor->ndim);

    int dtype = 0;
    while (dtype < DTYPES && !(codes[dtype].code == tensor->dtype.code && codes[dtype].bits == tensor->dtype.bits &&
                               tensor->dtype.lanes == 1))
        dtype++;
    if (dtype == DTYPES)
        return rafter_fail(context, bad, "%s has dtype %s, wanted %s", name, foreign_text(tensor->dtype).s,
                           set_text(dtypes).s);
    if (!(dtypes >> dtype & 1))
        return rafter_fail(context, bad, "%s has dtype %s, wanted %s", name, rafter_dtype_name((rafter_dtype)dtype),
                           set_text(dtypes).s);

    *view = (rafter_view){.dtype = (rafter_dtype)dtype, .ndim = tensor->ndim, .numel = 1};
    RAFTER_TRY(take_sizes(context, name, tensor, view));
    if (view->numel == 0)
        return RAFTER_OK;
    if (!tensor->data)
        return rafter_fail(context, bad, "%s.data is NULL, wanted %lld elements", name, (long long)view->numel);
    uintptr_t begin, end;
    if (__builtin_add_overflow((uintptr_t)tensor->data, tensor->byte_offset, &begin) ||
        __builtin_add_overflow(begin, (uintptr_t)rafter_span_bytes(view), &end))
        return rafter_fail(context, bad, "%s.byte_offset is %llu: past the address space", name,
                           (unsigned long long)tensor->byte_offset);
    view->data = (char *)tensor->data + tensor->byte_offset;
    const int64_t bytes = rafter_dtype_bytes(view->dtype);
    if (context->device.device_type != kDLCPU && (uintptr_t)view->data % (uintptr_t)bytes != 0)
        return rafter_fail(context, bad, "%s begins at %p, wanted a multiple of %lld bytes on a GPU", name,
                           (void *)view->data, (long long)bytes);
    return rafter_note_memory(context, name, view->data, (size_t)rafter_span_bytes(view));
}

int64_t rafter_span_bytes(const rafter_view *view) {
    if (view->numel == 0)
        return 0;
    int64_t last = 0;
    for (int d = 0; d < view->ndim; d++)
        last += (view->shape[d] - 1) * view->stride[d];
    return (last + 1) * rafter_dtype_bytes(view->dtype);
}

static void swap_dims(rafter_view *const views[], int count, int a, int b) {
    for (int v = 0; v < count; v++) {
        rafter_view *const view = views[v];
        const int64_t shape = view->shape[a], stride = view->stride[a];
        view->shape[a] = view->shape[b];
        view->stride[a] = view->stride[b];
        view->shape[b] = shape;
        view->stride[b] = stride;
    }
}

void rafter_move_dim_last(rafter_view *const views[], int count, int dim) {
    for (int d = dim; d + 1 < views[0]->ndim; d++)
        swap_dims(views, count, d, d + 1);
}

/* Whether a dimension of stride a belongs outside one of stride b. */
static bool is_outside(int64_t a, int64_t b) {
    return b != 0 && (a == 0 || a > b);
}

void rafter_order_by_stride(rafter_view *const views[], int count, const rafter_view *leader, int dims) {
    int64_t stride[RAFTER_VIEW_DIMS];
    memcpy(stride, leader->stride, sizeof stride);
    for (int placed = 1; placed < dims; placed++)
        for (int d = placed; d > 0 && is_outside(stride[d], stride[d - 1]); d--) {
            const int64_t outer = stride[d];
            stride[d] = stride[d - 1];
            stride[d - 1] = outer;
            swap_dims(views, count, d - 1, d);
        }
}

rafter_status rafter_take_output(rafter_context *context, const char *name, const DLTensor *tensor, unsigned dtypes,
                                 rafter_view *view) {
    RAFTER_TRY(rafter_take_tensor(context, name, tensor, dtypes, view));
    if (view->numel == 0 || context->allow_self_overlap)
        return RAFTER_OK;
    /* From the smallest stride up, each stride must step over everything that the smaller ones
     * reach. */
    bool used[RAFTER_MAX_DIMS] = {false};
    for (int64_t reach = 1;;) {
        int next = -1;
        for (int d = 0; d < view->ndim; d++)
            if (!used[d] && view->shape[d] > 1 && (next < 0 || view->stride[d] < view->stride[next]))
                next = d;
        if (next < 0)
            return RAFTER_OK;
        if (view->stride[next] < reach)
            return rafter_fail(
                context, RAFTER_INVALID_ARGUMENT,
                "%s has stride %lld in dimension %d, wanted at least %lld: an output may not overlap itself", name,
                (long long)view->stride[next], next, (long long)reach);
        used[next] = true;
        reach += (view->shape[next] - 1) * view->stride[next];
    }
}

rafter_status rafter_want_shape(rafter_context *context, const char *name, const rafter_view *view, int ndim,
                                const int64_t *shape) {
    if (view->ndim == ndim && memcmp(view->shape, shape, (size_t)ndim * sizeof *shape) == 0)
        return RAFTER_OK;
    return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "%s has shape %s, wanted %s", name,
                       shape_text(view->ndim, view->shape).s, shape_text(ndim, shape).s);
}

rafter_status rafter_want_same_shape(rafter_context *context, const char *name, const rafter_view *view,
                                     const char *other_name, const rafter_view *other) {
    if (view->ndim == other->ndim && memcmp(view->shape, other->shape, (size_t)view->ndim * sizeof *view->shape) == 0)
        return RAFTER_OK;
    return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "%s has shape %s, wanted the shape of %s, %s", name,
                       shape_text(view->ndim, view->shape).s, other_name, shape_text(other->ndim, other->shape).s);
}

rafter_status rafter_want_same_dtype(rafter_context *context, const char *name, const rafter_view *view,
                                     const char *other_name, const rafter_view *other) {
    if (view->dtype == other->dtype)
        return RAFTER_OK;
    return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "%s has dtype %s, wanted the dtype of %s, %s", name,
                       rafter_dtype_name(view->dtype), other_name, rafter_dtype_name(other->dtype));
}

bool rafter_same_memory(const rafter_view *a, const rafter_view *b) {
    if (a->data != b->data || a->dtype != b->dtype || a->ndim != b->ndim)
        return false;
    for (int d = 0; d < a->ndim; d++)
        if (a->shape[d] != b->shape[d] || a->stride[d] != b->stride[d])
            return false;
    return true;
}

/* A view as equally spaced rows: `width` bytes used out of every `pitch`. False if it has another
 * form. */
static bool as_rows(const rafter_view *view, int64_t *pitch, int64_t *width) {
    rafter_view copy = *view;
    rafter_view *const views[] = {&copy};
    const int dims = rafter_collapse(views, 1, 0, copy.ndim);
    const int64_t bytes = rafter_dtype_bytes(view->dtype);
    if (dims != 2)
        return false;
    *pitch = copy.stride[0] * bytes;
    *width = ((copy.shape[1] - 1) * copy.stride[1] + 1) * bytes;
    return *width <= *pitch;
}

rafter_status rafter_want_disjoint(rafter_context *context, const char *output_name, const rafter_view *output,
                                   const char *other_name, const rafter_view *other) {
    if (output->numel == 0 || other->numel == 0)
        return RAFTER_OK;
    const uintptr_t a = (uintptr_t)output->data, b = (uintptr_t)other->data;
    const uintptr_t a_end = a + (uintptr_t)rafter_span_bytes(output);
    const uintptr_t b_end = b + (uintptr_t)rafter_span_bytes(other);
    if (a_end <= b || b_end <= a)
        return RAFTER_OK;
    int64_t pitch_a, width_a, pitch_b, width_b;
    if (as_rows(output, &pitch_a, &width_a) && as_rows(other, &pitch_b, &width_b) && pitch_a == pitch_b) {
        const int64_t shift = (int64_t)(b - a) % pitch_a, gap = shift < 0 ? shift + pitch_a : shift;
        if (gap >= width_a && gap + width_b <= pitch_a)
            return RAFTER_OK;
    }
    return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                       "%s (%p, %lld bytes) overlaps %s (%p, %lld bytes), wanted separate memory", output_name,
                       (void *)output->data, (long long)(a_end - a), other_name, (void *)other->data,
                       (long long)(b_end - b));
}

rafter_status rafter_take_dim(rafter_context *context, int32_t given, int ndim, int *dim) {
    const int dims = ndim > 0 ? ndim : 1;
    if (given < -dims || given >= dims)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "dim is %d, wanted %d to %d", (int)given, -dims, dims - 1);
    *dim = given < 0 ? given + dims : given;
    return RAFTER_OK;
}

int rafter_collapse(rafter_view *const views[], int count, int from, int to) {
    int kept = from; /* dimensions [from, kept) are done; the last of them may still grow */
    for (int d = from; d < to; d++) {
        if (views[0]->shape[d] == 1)
            continue;
        bool merges = kept > from;
        for (int v = 0; v < count && merges; v++)
            merges = views[v]->stride[kept - 1] == views[v]->stride[d] * views[v]->shape[d];
        if (!merges)
            kept++;
        for (int v = 0; v < count; v++) {
            rafter_view *view = views[v];
            view->shape[kept - 1] = merges ? view->shape[kept - 1] * view->shape[d] : view->shape[d];
            view->stride[kept - 1] = view->stride[d];
        }
    }
    if (kept == from) {
        for (int v = 0; v < count; v++) {
            if (to == from) { /* nothing was there: make room */
                memmove(views[v]->shape + from + 1, views[v]->shape + from, (size_t)(views[v]->ndim - from) * 8);
                memmove(views[v]->stride + from + 1, views[v]->stride + from, (size_t)(views[v]->ndim - from) * 8);
                views[v]->ndim++;
            }
            views[v]->shape[from] = 1;
            views[v]->stride[from] = 0;
        }
        if (to == from)
            return 1;
        kept++;
    }
    for (int v = 0; v < count; v++) {
        rafter_view *view = views[v];
        for (int d = to; d < view->ndim; d++) {
            view->shape[kept + d - to] = view->shape[d];
            view->stride[kept + d - to] = view->stride[d];
        }
        view->ndim -= to - kept;
    }
    return kept - from;
}

/* Where the memory ends; the last address if that is past the address space. */
static uintptr_t end_of(const void *memory, size_t bytes) {
    uintptr_t end;
    return __builtin_add_overflow((uintptr_t)memory, bytes, &end) ? UINTPTR_MAX : end;
}

rafter_status rafter_note_memory(rafter_context *context, const char *name, const void *memory, size_t bytes) {
    if (context->taken_count == RAFTER_MOST_TAKEN)
        return rafter_fail(context, RAFTER_UNSUPPORTED, "%s is one tensor too many, wanted at most %d", name,
                           RAFTER_MOST_TAKEN);
    context->taken[context->taken_count++] =
        (struct rafter_taken){.name = name, .begin = (uintptr_t)memory, .end = end_of(memory, bytes)};
    return RAFTER_OK;
}

rafter_status rafter_want_unused(rafter_context *context, const char *name, const void *memory, size_t bytes) {
    const uintptr_t begin = (uintptr_t)memory, end = end_of(memory, bytes);
    for (int i = 0; memory && bytes > 0 && i < context->taken_count; i++) {
        const struct rafter_taken *const taken = &context->taken[i];
        if (begin < taken->end && taken->begin < end)
            return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                               "%s (%p, %zu bytes) overlaps %s (%p, %zu bytes), wanted separate memory", name, memory,
                               bytes, taken->name, (void *)taken->begin, (size_t)(taken->end - taken->begin));
    }
    return RAFTER_OK;
}

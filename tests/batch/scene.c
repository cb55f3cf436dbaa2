/* SPDX-License-Identifier: Apache-2.0 */
#include "batch.h"

#include <stdlib.h>
#include <string.h>

#include "harness/context.h"
#include "harness/gpu.h"
#include "harness/problem.h"

#define DEVICE_BYTES ((size_t)1 << 30)

int content_of(const struct scene *scene, int64_t row) {
    return (int)((scene->first + 5 * row) % CONTENTS);
}

/* Numbers with a bell-shaped distribution of this size, or labels. */
static void fill_row(const struct tensor *t, rafter_dtype dtype, int number, int content, double size, int64_t labels,
                     char *to) {
    const uint64_t seed = problem_mix((uint64_t)number * 1000 + (uint64_t)content);
    for (int64_t e = 0; e < t->elements; e++, to += t->element) {
        const uint64_t bits = problem_mix(seed + (uint64_t)e);
        const double sum = (double)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
        double value = size * 1.732 * (sum / 65536.0 - 2.0);
        if (labels > 0)
            value = content == IGNORED_CONTENT && t->role != SHARED ? -100.0 : (double)(bits % (uint64_t)labels);
        problem_store(dtype, to, value);
    }
}

/* Device memory: one block, which scenes use one after the other. */
static char *block;
static size_t block_used;
enum { BLOCK_ALIGNMENT = 512 };

static char *take_device_memory(size_t bytes) {
    if (!block)
        block = gpu_allocate(DEVICE_BYTES);
    if (!block || block_used + bytes > DEVICE_BYTES)
        return NULL;
    char *const memory = block + block_used;
    block_used += (bytes + BLOCK_ALIGNMENT - 1) / BLOCK_ALIGNMENT * BLOCK_ALIGNMENT;
    return memory;
}

/* What a shared tensor holds: the last ones are kept, because they are large and many calls have them. */
static const char *shared_numbers(const struct tensor *t, rafter_dtype dtype, int number, double size) {
    static struct {
        rafter_dtype dtype;
        int64_t elements;
        double size;
        char *numbers;
    } kept[MOST_TENSORS];
    if (kept[number].numbers && kept[number].dtype == dtype && kept[number].elements == t->elements &&
        kept[number].size == size)
        return kept[number].numbers;
    free(kept[number].numbers);
    kept[number].dtype = dtype;
    kept[number].elements = t->elements;
    kept[number].size = size;
    kept[number].numbers = malloc((size_t)(t->elements * t->element));
    if (kept[number].numbers)
        fill_row(t, dtype, number, 0, size, 0, kept[number].numbers);
    return kept[number].numbers;
}

const char *element_at(const struct tensor *t, int64_t row, int64_t e) {
    int64_t at = t->role == SHARED ? 0 : row * t->strides[0];
    for (int d = t->dl.ndim - 1; d > (t->role == SHARED ? -1 : 0); d--) {
        at += e % t->shape[d] * t->strides[d];
        e /= t->shape[d];
    }
    return t->host + at * t->element;
}

const DLTensor *add(struct scene *scene, enum role role, rafter_dtype dtype, double size, int64_t labels, int ndim,
                    const int64_t *shape) {
    struct tensor *const t = &scene->tensor[scene->count++];
    const enum layout wanted = scene->setting->layout;
    const enum layout layout = role != SHARED && (ndim == 1 || (ndim == 0 && wanted == GAPS)) ? wanted : ROWS;
    const int leading = role == SHARED ? 0 : 1;
    const int64_t rows = role == SHARED ? 1 : scene->rows;
    *t = (struct tensor){.role = role, .elements = 1, .element = problem_dtype_bytes(dtype)};
    t->shape[0] = rows;
    for (int d = 0; d < ndim; d++) {
        t->shape[leading + d] = shape[d];
        t->elements *= shape[d];
    }
    int64_t stride = 1;
    for (int d = leading + ndim - 1; d >= 0; d--, stride *= t->shape[d + 1])
        t->strides[d] = stride;
    const int64_t apart = layout == INTERLEAVED ? MOST_ROWS + 1 : layout == NARROW ? NARROW_ROWS : 0;
    if (apart) {
        t->strides[0] = 1;
        t->strides[1] = apart;
    }
    if (layout == GAPS)
        t->strides[0] += ndim == 0 ? 2 : 64;
    const int64_t elements = apart ? t->elements * apart : (rows - 1) * t->strides[0] + t->elements;
    t->bytes = elements * t->element;
    const int64_t before = layout == SHIFTED ? t->element : 0, row_bytes = t->elements * t->element;
    const bool gpu = context_on_gpu(scene->context);
    t->memory = gpu ? take_device_memory((size_t)(t->bytes + before)) : malloc((size_t)(t->bytes + before) + 1);
    t->host = malloc((size_t)t->bytes + 1);
    char *const row = malloc((size_t)row_bytes + 1);
    const char *const shared = role == SHARED ? shared_numbers(t, dtype, scene->count - 1, size) : NULL;
    if (!t->host || !t->memory || !row || (role == SHARED && !shared)) {
        scene->failed = true;
        free(row);
        return NULL;
    }
    t->dl = rafter_tensor(t->memory, dtype, leading + ndim, t->shape);
    t->dl.strides = t->strides;
    t->dl.device = context_device(scene->context);
    t->dl.byte_offset = (uint64_t)before;
    if (role == SHARED)
        memcpy(t->host, shared, (size_t)row_bytes);
    else
        memset(t->host, 0xff, (size_t)t->bytes);
    for (int content = 0; content < CONTENTS && role == INPUT; content++) {
        fill_row(t, dtype, scene->count - 1, content, size, labels, row);
        for (int64_t r = 0; r < rows; r++) {
            if (content_of(scene, r) != content)
                continue;
            if (!apart)
                memcpy(t->host + r * t->strides[0] * t->element, row, (size_t)row_bytes);
            for (int64_t e = 0; apart && e < t->elements; e++)
                memcpy(t->host + (r + e * apart) * t->element, row + e * t->element, (size_t)t->element);
        }
    }
    free(row);
    if (!gpu)
        memcpy(t->memory + before, t->host, (size_t)t->bytes);
    else if (!gpu_copy(t->memory + before, t->host, (size_t)t->bytes))
        scene->failed = true;
    return &t->dl;
}

const DLTensor *add_numbers(struct scene *scene, enum role role, rafter_dtype dtype, double size) {
    return add(scene, role, dtype, size, 0, 0, NULL);
}

bool fetch(struct scene *scene) {
    const bool gpu = context_on_gpu(scene->context);
    bool good = !gpu || gpu_synchronize(scene->context);
    for (int i = 0; i < scene->count; i++) {
        struct tensor *const t = &scene->tensor[i];
        const char *const from = t->memory + t->dl.byte_offset;
        if (t->role == OUTPUT && gpu)
            good = good && gpu_copy(t->host, from, (size_t)t->bytes);
        else if (t->role == OUTPUT)
            memcpy(t->host, from, (size_t)t->bytes);
        if (!gpu)
            free(t->memory);
        t->memory = NULL;
    }
    block_used = 0;
    return good;
}

void release(struct scene *scene) {
    for (int i = 0; i < scene->count; i++) {
        free(scene->tensor[i].host);
        if (!context_on_gpu(scene->context))
            free(scene->tensor[i].memory); /* if it was not fetched */
    }
    block_used = 0;
    scene->count = 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "batch.h"

#include <stdlib.h>
#include <string.h>

#include "harness/context.h"
#include "harness/gpu.h"
#include "harness/problem.h"

int content_of(const struct scene *scene, int64_t row) {
    return (int)((scene->first + 5 * row) % CONTENTS);
}

static void fill_row(const struct scene *scene, const struct tensor *t, int content, double size, int64_t labels,
                     char *to) {
    const uint64_t seed = problem_mix((uint64_t)scene->count * 1000 + (uint64_t)content);
    for (int64_t e = 0; e < t->elements; e++) {
        const uint64_t bits = problem_mix(seed + (uint64_t)e);
        double value = size * problem_normal(bits);
        if (labels > 0)
            value = content == IGNORED_CONTENT && t->role != SHARED ? -100.0 : (double)(bits % (uint64_t)labels);
        problem_store((rafter_dtype)(t->dl.dtype.code == kDLInt ? RAFTER_I64 : scene->setting->dtype), to, value);
        to += t->element;
    }
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
    const enum layout layout = role != SHARED && ndim == 1 ? scene->setting->layout : ROWS;
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
    const int64_t elements = apart ? t->elements * apart : rows * t->elements;
    t->bytes = elements * t->element;
    t->host = malloc((size_t)t->bytes + 1);
    char *const row = malloc((size_t)(t->elements * t->element) + 1);
    const int64_t before = layout == SHIFTED ? t->element : 0;
    const bool gpu = context_on_gpu(scene->context);
    t->memory = gpu ? gpu_allocate((size_t)(t->bytes + before)) : malloc((size_t)(t->bytes + before) + 1);
    if (!t->host || !t->memory || !row) {
        scene->failed = true;
        free(row);
        return NULL;
    }
    t->dl = rafter_tensor(t->memory, dtype, leading + ndim, t->shape);
    t->dl.strides = t->strides;
    t->dl.device = context_device(scene->context);
    t->dl.byte_offset = (uint64_t)before;
    memset(t->host, 0xff, (size_t)t->bytes);
    for (int content = 0; content < CONTENTS && role != OUTPUT; content++) {
        const struct setting numbers = {.dtype = dtype};
        struct scene as_dtype = {.setting = &numbers, .count = scene->count};
        fill_row(&as_dtype, t, content, size, labels, row);
        for (int64_t r = 0; r < rows; r++) {
            if (role != SHARED && content_of(scene, r) != content)
                continue;
            if (!apart)
                memcpy(t->host + r * t->elements * t->element, row, (size_t)(t->elements * t->element));
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
    }
    return good;
}

void release(struct scene *scene) {
    const bool gpu = context_on_gpu(scene->context);
    for (int i = 0; i < scene->count; i++) {
        free(scene->tensor[i].host);
        gpu ? gpu_release(scene->tensor[i].memory) : free(scene->tensor[i].memory);
    }
    scene->count = 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "measure.h"

#include <stdlib.h>

bool samples_add(struct samples *s, double value) {
    if (s->count == s->capacity) {
        const int capacity = s->capacity ? 2 * s->capacity : 64;
        double *grown = realloc(s->value, (size_t)capacity * sizeof *grown);
        if (!grown)
            return false;
        s->value = grown;
        s->capacity = capacity;
    }
    s->value[s->count++] = value;
    return true;
}

void samples_free(struct samples *s) {
    free(s->value);
    *s = (struct samples){0};
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(const struct samples *s, double q) {
    const double place = q * (s->count - 1);
    const int below = (int)place;
    const int above = below + 1 < s->count ? below + 1 : below;
    return s->value[below] + (place - below) * (s->value[above] - s->value[below]);
}

struct summary samples_summary(struct samples *s) {
    qsort(s->value, (size_t)s->count, sizeof *s->value, by_value);
    return (struct summary){.median = quantile(s, 0.5), .p10 = quantile(s, 0.1), .p90 = quantile(s, 0.9)};
}

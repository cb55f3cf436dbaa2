/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/variants.h"

#include <stdlib.h>
#include <string.h>

#include "core/variants.h"

static const struct rafter_op *const ops[RAFTER_OP_COUNT] = {
#define RAFTER_OP(name) &rafter_op_##name,
#include "ops/ops.inc"
#undef RAFTER_OP
};

_Static_assert((int)VARIANTS_MOST == (int)RAFTER_MOST_CONSIDERED, "a call names more variants than a walk covers");
_Static_assert((int)VARIANTS_MOST_OF_ALL == (int)RAFTER_OP_COUNT * VARIANTS_MOST, "one place per op and variant");

static const char *cuda_level(int level) {
    return level == RAFTER_LEVEL_sm80    ? "sm80"
           : level == RAFTER_LEVEL_sm90  ? "sm90"
           : level == RAFTER_LEVEL_sm90a ? "sm90a"
                                         : "unknown";
}

bool variant_row(const char *op, DLDeviceType device, int index, struct variant_row *row) {
    for (int i = 0; i < RAFTER_OP_COUNT; i++) {
        if (strcmp(ops[i]->name, op) != 0)
            continue;
        const bool cuda = device == kDLCUDA;
        if (index >= (cuda ? ops[i]->cuda_count : ops[i]->cpu_count))
            return false;
        const struct rafter_variant *const variant = cuda ? &ops[i]->cuda[index] : &ops[i]->cpu[index];
        *row = (struct variant_row){variant->name, cuda ? cuda_level(variant->level) : variant->name};
        return true;
    }
    return false;
}

bool variant_exists(const char *name) {
    for (int i = 0; i < RAFTER_OP_COUNT; i++) {
        for (int k = 0; k < ops[i]->cpu_count; k++)
            if (strcmp(ops[i]->cpu[k].name, name) == 0)
                return true;
        for (int k = 0; k < ops[i]->cuda_count; k++)
            if (strcmp(ops[i]->cuda[k].name, name) == 0)
                return true;
    }
    return false;
}

const char *variant_taken(const rafter_context *context) {
    const char *name = NULL, *reason = NULL;
    for (int i = 0; rafter_considered_variant(context, i, &name, &reason); i++)
        if (!reason)
            return name;
    return NULL;
}

bool variant_declined(const rafter_context *context, rafter_status status) {
    const char *name, *reason;
    return status == RAFTER_UNSUPPORTED && rafter_considered_variant(context, 0, &name, &reason) &&
           !variant_taken(context);
}

rafter_context *variant_context(const char *name, rafter_context_options options) {
    static const char variable[] = "RAFTER_VARIANT";
    char *const outer = getenv(variable) ? strdup(getenv(variable)) : NULL;
    unsetenv(variable); /* it would override the option */
    rafter_context *context = NULL;
    options.size = sizeof options;
    options.variant = name;
    const rafter_status status = rafter_context_create(&context, &options);
    if (outer)
        setenv(variable, outer, 1);
    free(outer);
    return status == RAFTER_OK ? context : NULL;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "core/variants.h"

#include <string.h>

static const struct rafter_op *const ops[] = {
#define RAFTER_OP(name) &rafter_op_##name,
#include "ops/ops.inc"
#undef RAFTER_OP
};
enum { OPS = sizeof ops / sizeof *ops };

const struct rafter_variant *rafter_pick(const rafter_context *context, const struct rafter_op *op) {
    int i = op->variants - 1;
    while (i > 0 && op->variant[i].isa > context->isa)
        i--;
    return &op->variant[i];
}

int rafter_describe_op(const rafter_context *context, int index, const char **op, const char **variant) {
    if (!context || index < 0 || index >= OPS)
        return 0;
    *op = ops[index]->name;
    *variant = context->cuda ? "cuda" : rafter_isa_name(rafter_pick(context, ops[index])->isa);
    return 1;
}

const char *rafter_op_variant(const char *op, int index) {
    for (int o = 0; o < OPS; o++)
        if (strcmp(ops[o]->name, op) == 0 && index >= 0 && index < ops[o]->variants &&
            ops[o]->variant[index].isa <= rafter_cpu_isa())
            return rafter_isa_name(ops[o]->variant[index].isa);
    return NULL;
}

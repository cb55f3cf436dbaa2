#include "core/context.h"
#include "core/variants.h"

#define RAFTER_VARIANT(isa) extern const int RAFTER_PASTE3(rafter_, cross_entropy, isa);
#include "variants.inc"
#undef RAFTER_VARIANT

static const struct rafter_variant variants[] = {
#define RAFTER_VARIANT(isa) {RAFTER_ISA_##isa, &RAFTER_PASTE3(rafter_, cross_entropy, isa)},
#include "variants.inc"
#undef RAFTER_VARIANT
};

const struct rafter_op rafter_op_cross_entropy = {"cross_entropy", sizeof variants / sizeof *variants, variants};

rafter_status rafter_cross_entropy_forward(rafter_context *context, const rafter_cross_entropy_args *args) {
    (void)args;
    return rafter_fail(context, RAFTER_UNSUPPORTED, "cross_entropy is not in this build yet");
}
rafter_status rafter_cross_entropy_backward(rafter_context *context, const rafter_cross_entropy_args *args) {
    return rafter_cross_entropy_forward(context, args);
}
rafter_status rafter_cross_entropy_workspace(rafter_context *context, const rafter_cross_entropy_args *args, rafter_direction direction,
                                     size_t *bytes) {
    (void)direction, (void)bytes;
    return rafter_cross_entropy_forward(context, args);
}

#include "core/context.h"
#include "core/variants.h"

#define RAFTER_VARIANT(isa) extern const int RAFTER_PASTE3(rafter_, lrpe_cosine, isa);
#include "variants.inc"
#undef RAFTER_VARIANT

static const struct rafter_variant variants[] = {
#define RAFTER_VARIANT(isa) {RAFTER_ISA_##isa, &RAFTER_PASTE3(rafter_, lrpe_cosine, isa)},
#include "variants.inc"
#undef RAFTER_VARIANT
};

const struct rafter_op rafter_op_lrpe_cosine = {"lrpe_cosine", sizeof variants / sizeof *variants, variants};

rafter_status rafter_lrpe_cosine_forward(rafter_context *context, const rafter_lrpe_cosine_args *args) {
    (void)args;
    return rafter_fail(context, RAFTER_UNSUPPORTED, "lrpe_cosine is not in this build yet");
}
rafter_status rafter_lrpe_cosine_backward(rafter_context *context, const rafter_lrpe_cosine_args *args) {
    return rafter_lrpe_cosine_forward(context, args);
}
rafter_status rafter_lrpe_cosine_workspace(rafter_context *context, const rafter_lrpe_cosine_args *args, rafter_direction direction,
                                     size_t *bytes) {
    (void)direction, (void)bytes;
    return rafter_lrpe_cosine_forward(context, args);
}

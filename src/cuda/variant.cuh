/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A CUDA variant: the host side of one file src/ops/<op>/cuda/<name>.cu. The file defines a struct
 *
 *     struct PackedRows {
 *         typedef logsumexp_call Call;     the op's checked call
 *         struct Plan { ... };             whatever launch needs; plain data
 *         static const char *why_not(const rafter_cuda_state &device, const Call &call);
 *         static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan);
 *         static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace);
 *     };
 *     RAFTER_CUDA_VARIANT(logsumexp, packed_rows, PackedRows)
 *
 * and the op's variants.inc gets the row CUDA(packed_rows, sm80). core/variants.h says what each
 * function does. Launch errors are checked after launch returns.
 */
#ifndef RAFTER_CUDA_VARIANT_CUH
#define RAFTER_CUDA_VARIANT_CUH

#include <type_traits>

#include "core/variants.h"
#include "cuda/backend.cuh"

/* The classes of a loss may be spread over ranks, and so may the reduced dimension of a softmax. A variant that serves
 * such calls declares
 *     static constexpr bool SHARES_CLASSES = true; */
template <class Variant, class = void> struct SharesClasses : std::false_type {};
template <class Variant>
struct SharesClasses<Variant, std::void_t<decltype(Variant::SHARES_CLASSES)>>
    : std::bool_constant<Variant::SHARES_CLASSES> {};

template <class Call> auto has_shared_classes(const Call &call, int) -> decltype(call.loss.class_group.ranks > 0) {
    return call.loss.class_group.ranks > 0;
}
template <class Call> auto has_shared_classes(const Call &call, int) -> decltype(call.group.ranks > 0) {
    return call.group.ranks > 0;
}
template <class Call> bool has_shared_classes(const Call &, long) {
    return false;
}

/* Calls may ask for batch invariance: see rafter_context_set_batch_invariant. A variant that provides it declares
 *     static constexpr bool BATCH_INVARIANT = true;
 * or BATCH_INVARIANT_BACKWARD if only its backward does. Then, if call.common.batch_invariant, neither why_not nor the
 * order in which a row is summed may depend on the number of rows or on their addresses. */
template <class Variant, class = void> struct IsBatchInvariant : std::false_type {};
template <class Variant>
struct IsBatchInvariant<Variant, std::void_t<decltype(Variant::BATCH_INVARIANT)>>
    : std::bool_constant<Variant::BATCH_INVARIANT> {};
template <class Variant, class = void> struct HasInvariantBackward : IsBatchInvariant<Variant> {};
template <class Variant>
struct HasInvariantBackward<Variant, std::void_t<decltype(Variant::BATCH_INVARIANT_BACKWARD)>>
    : std::bool_constant<Variant::BATCH_INVARIANT_BACKWARD> {};

/* The variant's functions, as struct rafter_variant_functions wants them. */
template <class Variant> struct VariantFunctions {
    typedef typename Variant::Call Call;
    typedef typename Variant::Plan Plan;
    static_assert(sizeof(Plan) <= RAFTER_PLAN_BYTES, "raise RAFTER_PLAN_BYTES");

    static const Call &typed(const struct rafter_call *call) {
        return *reinterpret_cast<const Call *>(call);
    }
    static const char *why_not(const rafter_context *context, const struct rafter_call *call) {
        if (!SharesClasses<Variant>::value && has_shared_classes(typed(call), 0))
            return "classes, or dim, are spread over ranks";
        const bool invariant = call->direction == RAFTER_BACKWARD ? HasInvariantBackward<Variant>::value
                                                                  : IsBatchInvariant<Variant>::value;
        if (call->batch_invariant && !invariant)
            return "it is not batch invariant";
        return Variant::why_not(*context->cuda_state, typed(call));
    }
    static size_t plan(const rafter_context *context, const struct rafter_call *call, void *plan) {
        return Variant::plan(*context->cuda_state, typed(call), static_cast<Plan *>(plan));
    }
    static rafter_status run(rafter_context *context, const struct rafter_call *call, const void *plan, const void *,
                             char *workspace) {
        return Variant::launch(context, typed(call), *static_cast<const Plan *>(plan), workspace);
    }
};

#define RAFTER_CUDA_VARIANT(op, name, Variant)                                                                         \
    extern "C" {                                                                                                       \
    extern const struct rafter_variant_functions rafter_cuda_##op##_##name;                                            \
    }                                                                                                                  \
    const struct rafter_variant_functions rafter_cuda_##op##_##name = {                                                \
        VariantFunctions<Variant>::why_not, VariantFunctions<Variant>::plan, VariantFunctions<Variant>::run};

#endif

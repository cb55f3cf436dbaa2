/* SPDX-License-Identifier: Apache-2.0 */
/* What the ops for PyTorch's dispatcher have in common (ops.cpp, linear_cross_entropy.cpp). */
#ifndef RAFTER_PYTHON_OPS_H
#define RAFTER_PYTHON_OPS_H

#include "contexts.h"
#include "groups.h"
#include "tensor.h"

#include <algorithm>
#include <span>

namespace rafter {

inline int32_t f32() {
    return torch_dtype(RAFTER_F32);
}

/* An argument struct with every field at its default. */
template <class Args> Args default_args() {
    Args args = {};
    args.size = sizeof args;
    return args;
}

/* Calls the library's function, in a context for the device of the call's tensors. */
template <class Args>
void run(const char *op, const Call &call, rafter_status (*function)(rafter_context *, const Args *),
         const Args &args) {
    const Session session(op, call.device());
    session(function(session, &args));
}

/* The library counts dimensions in 32 bits. A dim beyond them stays out of range. */
inline int32_t dimension(Call &call) {
    return static_cast<int32_t>(std::clamp<int64_t>(call.integer(), INT32_MIN, INT32_MAX));
}

/* The function that the dispatcher calls. The body takes its arguments from the Call and returns
 * its results through it. */
typedef void Kernel(StableIValue *stack, uint64_t arguments, uint64_t results);

template <void body(Call &)> void kernel(StableIValue *stack, uint64_t, uint64_t) {
    Call call(stack);
    body(call);
}

/* An op of the library: its name and schema, and the function that the dispatcher calls. */
struct OpEntry {
    const char *name, *schema;
    Kernel *kernel;
};

/* linear_cross_entropy and linear_logprobs. */
extern const std::span<const OpEntry> linear_ops;

/* ---- shared by the two losses --------------------------------------------------------------- */

/* Last in every schema, in the order of LossOptions (_options.py). They have defaults because
 * converting an argument from Python takes time, and filling in a default takes almost none. */
#define LOSS_OPTIONS                                                                                                   \
    "Tensor? weight=None, Tensor? row_weight=None, Tensor? denominator=None, int ignore_index=-100, int reduction=0, " \
    "bool zero_if_all_ignored=False, float label_smoothing=0., float z_loss=0., float softcap=0., float "              \
    "logit_scale=0., str? groups=None"

struct LossOptions {
    Tensor weight, row_weight, denominator;
    int64_t ignore_index;
    rafter_loss_options c;
    Groups groups; /* see groups.h */

    explicit LossOptions(Call &call)
        : weight(call.optional_tensor()), row_weight(call.optional_tensor()), denominator(call.optional_tensor()),
          ignore_index(call.integer()), c(default_args<rafter_loss_options>()) {
        c.ignore_index = &ignore_index;
        c.reduction = static_cast<rafter_reduction>(call.integer());
        c.zero_if_all_ignored = call.flag();
        c.label_smoothing = call.number();
        c.z_loss = call.number();
        c.softcap = call.number();
        c.logit_scale = call.number();
        c.class_weight = weight.dl();
        c.row_weight = row_weight.dl();
        c.denominator = denominator.dl();
        /* Only numbers follow this argument, so nothing on the stack leaks if the device is refused here. */
        const std::optional<std::string> text = call.optional_text();
        if (text)
            groups = Groups(*text, call.device(), c);
    }
};

/* Bits of `which`, in the order of the results. _options.py has the same. */
enum { ROW_LOSS = 1, LOGPROB = 2, ENTROPY = 4, ARGMAX = 8 };

/* The results of a loss: always loss and lse; the others only with `stats`, for schemas that have
 * them. */
struct Outputs {
    Tensor loss, lse, row_loss, logprob, entropy, argmax;

    template <class Args>
    Outputs(Args &args, const Tensor &target, const LossOptions &options, Device device, bool stats, int64_t which) {
        const int dims = options.c.reduction == RAFTER_NONE ? target.dims() : 0;
        const auto row = [&](rafter_dtype dtype, bool wanted) {
            return Tensor::empty(target.shape(), target.dims(), torch_dtype(dtype), device, wanted);
        };
        loss = Tensor::empty(target.shape(), dims, f32(), device);
        lse = row(RAFTER_F32, true);
        args.loss = loss.dl();
        args.lse = lse.dl();
        if (!stats)
            return;
        row_loss = row(RAFTER_F32, which & ROW_LOSS);
        logprob = row(RAFTER_F32, which & LOGPROB);
        entropy = row(RAFTER_F32, which & ENTROPY);
        argmax = row(RAFTER_I64, which & ARGMAX);
        args.row_loss = row_loss.dl();
        args.logprob = logprob.dl();
        args.entropy = entropy.dl();
        args.argmax = argmax.dl();
    }
};

} // namespace rafter

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* linear_cross_entropy and linear_logprobs for PyTorch's dispatcher. */
#include "ops.h"

namespace rafter {

namespace {

#define LINEAR_INPUTS "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target"
#define GRADIENTS "Tensor dinput, Tensor dweight, Tensor dbias"
#define LINEAR_OPTIONS "int lce_mode=0, int accumulate=0, int budget=0, bool allow_tf32=False"

/* Bits of `grads`, in the order of the results. _options.py has the same. */
enum { DX = 1, DWEIGHT = 2, DBIAS = 4 };

struct LinearInputs {
    Tensor x, weight, bias, target;
    mutable Tensor all_rows; /* of x, if that has only this rank's */

    explicit LinearInputs(Call &call)
        : x(call.tensor()), weight(call.tensor()), bias(call.optional_tensor()), target(call.tensor()) {
    }
};

rafter_linear_cross_entropy_args linear_args(Call &call, const LinearInputs &in, const LossOptions &options) {
    rafter_linear_cross_entropy_args args = default_args<rafter_linear_cross_entropy_args>();
    args.options = &options.c;
    if (options.groups.share)
        in.all_rows = options.groups.classes->gathered(in.x);
    args.x = (options.groups.share ? in.all_rows : in.x).dl();
    args.weight = in.weight.dl();
    args.bias = in.bias.dl();
    args.target = in.target.dl();
    args.mode = static_cast<rafter_lce_mode>(call.integer());
    args.accumulate = static_cast<rafter_lce_accumulate>(call.integer());
    args.budget = static_cast<size_t>(call.integer());
    args.allow_tf32 = call.flag();
    return args;
}

struct LinearGradients {
    Tensor dx, dweight, dbias;

    LinearGradients(rafter_linear_cross_entropy_args &args, const LinearInputs &in, int64_t grads)
        : dx(in.x.empty_like(grads & DX)), dweight(in.weight.empty_like(grads & DWEIGHT)),
          dbias(in.bias.present() ? in.bias.empty_like(grads & DBIAS) : in.x.empty_like(false)) {
        args.dx = dx.dl();
        args.dweight = dweight.dl();
        args.dbias = dbias.dl();
    }
};

template <bool stats> void linear_cross_entropy(Call &call) {
    const LinearInputs in(call);
    const int64_t grads = call.integer(), which = stats ? call.integer() : 0;
    const LossOptions options(call);
    rafter_linear_cross_entropy_args args = linear_args(call, in, options);
    Outputs out(args, in.target, options, call.device(), stats, which);
    LinearGradients gradients(args, in, grads);
    run("linear_cross_entropy", call, rafter_linear_cross_entropy_forward, args);
    if constexpr (stats)
        call.return_tensors(out.loss, out.lse, gradients.dx, gradients.dweight, gradients.dbias, out.row_loss,
                            out.logprob, out.entropy, out.argmax);
    else
        call.return_tensors(out.loss, out.lse, gradients.dx, gradients.dweight, gradients.dbias);
}

template <bool into_main_grad> void linear_cross_entropy_backward(Call &call) {
    const Tensor dloss = call.tensor();
    const LinearInputs in(call);
    const Tensor lse = call.tensor();
    const Tensor main_grad = into_main_grad ? call.tensor() : Tensor();
    const int64_t grads = call.integer();
    const LossOptions options(call);
    rafter_linear_cross_entropy_args args = linear_args(call, in, options);
    LinearGradients gradients(args, in, into_main_grad ? grads & ~DWEIGHT : grads);
    args.dloss = dloss.dl();
    args.lse = lse.dl();
    if constexpr (into_main_grad) {
        args.dweight = main_grad.dl();
        args.accumulate_into_dweight = 1;
    }
    run("linear_cross_entropy", call, rafter_linear_cross_entropy_backward, args);
    if constexpr (into_main_grad)
        call.return_tensors(gradients.dx, gradients.dbias);
    else
        call.return_tensors(gradients.dx, gradients.dweight, gradients.dbias);
}

/* Forward for a later backward. `saved` has no elements if this call saves nothing. */
void linear_cross_entropy_saving(Call &call) {
    const LinearInputs in(call);
    const int64_t which = call.integer();
    const LossOptions options(call);
    rafter_linear_cross_entropy_args args = linear_args(call, in, options);
    Outputs out(args, in.target, options, call.device(), true, which);
    {
        const Session session("linear_cross_entropy", call.device());
        session(rafter_linear_cross_entropy_saved(session, &args, &args.saved_bytes));
    }
    const int64_t words = static_cast<int64_t>((args.saved_bytes + 7) / 8);
    Tensor saved = Tensor::empty(&words, 1, rafter::torch_dtype(RAFTER_I64), call.device());
    args.saved = words > 0 ? saved.dl()->data : nullptr;
    run("linear_cross_entropy", call, rafter_linear_cross_entropy_forward, args);
    call.return_tensors(out.loss, out.lse, saved, out.row_loss, out.logprob, out.entropy, out.argmax);
}

/* Backward from what forward saved, if it did. dweight is added to main_grad, if that is given.
 * dentropy and entropy: both or neither. */
void linear_cross_entropy_backward_saved(Call &call) {
    const Tensor dloss = call.tensor(), dentropy = call.optional_tensor(), entropy = call.optional_tensor();
    const LinearInputs in(call);
    const Tensor lse = call.tensor(), saved = call.tensor(), main_grad = call.optional_tensor();
    const int64_t grads = call.integer();
    const LossOptions options(call);
    rafter_linear_cross_entropy_args args = linear_args(call, in, options);
    LinearGradients gradients(args, in, main_grad.present() ? grads & ~DWEIGHT : grads);
    args.dloss = dloss.dl();
    args.lse = lse.dl();
    args.saved_bytes = static_cast<size_t>(saved.dl()->shape[0]) * 8;
    args.saved = args.saved_bytes > 0 ? saved.dl()->data : nullptr;
    if (dentropy.present()) {
        args.dentropy = dentropy.dl();
        args.entropy = entropy.dl();
    }
    if (main_grad.present() && (grads & DWEIGHT)) {
        args.dweight = main_grad.dl();
        args.accumulate_into_dweight = 1;
    }
    run("linear_cross_entropy", call, rafter_linear_cross_entropy_backward, args);
    call.return_tensors(gradients.dx, gradients.dweight, gradients.dbias);
}

/* Throws if the budget is too small for backward. Forward asks this when backward is going to
 * compute the gradients in `grads`, with_entropy: also that of the entropy. The question reads no
 * data, so the tensors of backward that do not exist yet are contiguous placeholders, at addresses
 * that overlap nothing. */
void linear_check_budget(Call &call) {
    const LinearInputs in(call);
    const bool into_main_grad = call.flag(), with_entropy = call.flag();
    const int64_t grads = call.integer();
    const LossOptions options(call);
    rafter_linear_cross_entropy_args args = linear_args(call, in, options);
    const DLDataType single = rafter::dl_dtype(f32());
    uintptr_t address = 0;
    const auto placeholder = [&](const Tensor &like, DLDataType dtype) {
        DLTensor tensor = *like.dl();
        tensor.data = reinterpret_cast<void *>(address += uintptr_t(1) << 50);
        tensor.strides = nullptr;
        tensor.byte_offset = 0;
        tensor.dtype = dtype;
        return tensor;
    };
    DLTensor dloss = placeholder(in.target, single), lse = placeholder(in.target, single), dbias = {};
    DLTensor dx = placeholder(in.x, in.x.dl()->dtype);
    DLTensor dweight = placeholder(in.weight, into_main_grad ? single : in.weight.dl()->dtype);
    if (in.bias.present())
        dbias = placeholder(in.bias, in.bias.dl()->dtype);
    if (options.c.reduction != RAFTER_NONE)
        dloss.ndim = 0;
    DLTensor dentropy = placeholder(in.target, single), entropy = placeholder(in.target, single);
    args.dloss = &dloss;
    args.lse = &lse;
    args.dentropy = with_entropy ? &dentropy : nullptr;
    args.entropy = with_entropy ? &entropy : nullptr;
    args.dx = grads & DX ? &dx : nullptr;
    args.dweight = grads & DWEIGHT ? &dweight : nullptr;
    args.dbias = grads & DBIAS ? &dbias : nullptr;
    args.accumulate_into_dweight = into_main_grad && (grads & DWEIGHT);
    const Session session("linear_cross_entropy", call.device());
    size_t bytes = 0;
    session(rafter_linear_cross_entropy_workspace(session, &args, RAFTER_BACKWARD, &bytes));
}

/* Per-row log-probability, entropy and argmax: the statistics of linear_cross_entropy, without the loss. */
void linear_logprobs(Call &call) {
    const LinearInputs in(call);
    const bool wants_entropy = call.flag(), wants_argmax = call.flag();
    const LossOptions options(call);
    rafter_linear_cross_entropy_args args = linear_args(call, in, options);
    Outputs out(args, in.target, options, call.device(), true,
                LOGPROB | (wants_entropy ? ENTROPY : 0) | (wants_argmax ? ARGMAX : 0));
    args.loss = nullptr;
    run("linear_logprobs", call, rafter_linear_cross_entropy_forward, args);
    call.return_tensors(out.logprob, out.entropy, out.lse, out.argmax);
}

/* Gradients of sum(dloss * loss) + sum(dentropy * entropy), from the results of linear_logprobs. */
void linear_logprobs_backward(Call &call) {
    const Tensor dloss = call.tensor(), dentropy = call.tensor();
    const LinearInputs in(call);
    const Tensor lse = call.tensor(), entropy = call.tensor();
    const int64_t grads = call.integer();
    const LossOptions options(call);
    rafter_linear_cross_entropy_args args = linear_args(call, in, options);
    LinearGradients gradients(args, in, grads);
    args.dloss = dloss.dl();
    args.dentropy = dentropy.dl();
    args.lse = lse.dl();
    args.entropy = entropy.dl();
    run("linear_logprobs", call, rafter_linear_cross_entropy_backward, args);
    call.return_tensors(gradients.dx, gradients.dweight, gradients.dbias);
}

} // namespace

static constexpr OpEntry ops[] = {
    {"linear_cross_entropy",
     "(" LINEAR_INPUTS ", int grads, " LOSS_OPTIONS ", " LINEAR_OPTIONS ") -> (Tensor loss, Tensor lse, " GRADIENTS ")",
     kernel<linear_cross_entropy<false>>},
    {"linear_cross_entropy_stats",
     "(" LINEAR_INPUTS ", int grads, int which, " LOSS_OPTIONS ", " LINEAR_OPTIONS
     ") -> (Tensor loss, Tensor lse, " GRADIENTS ", Tensor row_loss, Tensor logprob, Tensor entropy, Tensor argmax)",
     kernel<linear_cross_entropy<true>>},
    {"linear_cross_entropy_backward",
     "(Tensor dloss, " LINEAR_INPUTS ", Tensor lse, int grads, " LOSS_OPTIONS ", " LINEAR_OPTIONS ") -> (" GRADIENTS
     ")",
     kernel<linear_cross_entropy_backward<false>>},
    {"linear_cross_entropy_backward_main_grad",
     "(Tensor dloss, " LINEAR_INPUTS ", Tensor lse, Tensor(a!) main_grad, int grads, " LOSS_OPTIONS ", " LINEAR_OPTIONS
     ") -> (Tensor dinput, Tensor dbias)",
     kernel<linear_cross_entropy_backward<true>>},
    {"linear_cross_entropy_saving",
     "(" LINEAR_INPUTS ", int which, " LOSS_OPTIONS ", " LINEAR_OPTIONS
     ") -> (Tensor loss, Tensor lse, Tensor saved, Tensor row_loss, Tensor logprob, Tensor entropy, Tensor argmax)",
     kernel<linear_cross_entropy_saving>},
    {"linear_cross_entropy_backward_saved",
     "(Tensor dloss, Tensor? dentropy, Tensor? entropy, " LINEAR_INPUTS
     ", Tensor lse, Tensor(a!) saved, Tensor(b!)? main_grad, int grads, " LOSS_OPTIONS ", " LINEAR_OPTIONS
     ") -> (" GRADIENTS ")",
     kernel<linear_cross_entropy_backward_saved>},
    {"linear_check_budget",
     "(" LINEAR_INPUTS ", bool into_main_grad, bool with_entropy, int grads, " LOSS_OPTIONS ", " LINEAR_OPTIONS
     ") -> ()",
     kernel<linear_check_budget>},
    {"linear_logprobs",
     "(" LINEAR_INPUTS ", bool wants_entropy, bool wants_argmax, " LOSS_OPTIONS ", " LINEAR_OPTIONS
     ") -> (Tensor logprob, Tensor entropy, Tensor lse, Tensor argmax)",
     kernel<linear_logprobs>},
    {"linear_logprobs_backward",
     "(Tensor dloss, Tensor dentropy, " LINEAR_INPUTS ", Tensor lse, Tensor entropy, int grads, " LOSS_OPTIONS
     ", " LINEAR_OPTIONS ") -> (" GRADIENTS ")",
     kernel<linear_logprobs_backward>},
};

/* constinit, because ops.cpp reads it while libraries are initialized. */
constinit const std::span<const OpEntry> linear_ops = ops;

} // namespace rafter

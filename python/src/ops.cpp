/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rafter's ops for PyTorch's dispatcher. Every op is registered twice, with and without a leading
 * underscore. The plain name gets an autograd formula (in _ops.py); the name with the underscore is
 * the kernel below autograd, for the eager path, which has a torch.autograd.Function of its own.
 * Shapes follow the C API; the Python side handles whatever else PyTorch users expect.
 */
#include "contexts.h"
#include "groups.h"
#include "tensor.h"

#include <algorithm>

using rafter::Call;
using rafter::Session;
using rafter::Tensor;

namespace {

int32_t f32() {
    return rafter::torch_dtype(RAFTER_F32);
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
int32_t dimension(Call &call) {
    return static_cast<int32_t>(std::clamp<int64_t>(call.integer(), INT32_MIN, INT32_MAX));
}

/* The function that the dispatcher calls. The body takes its arguments from the Call and returns
 * its results through it. */
typedef void Kernel(StableIValue *stack, uint64_t arguments, uint64_t results);

template <void body(Call &)> void kernel(StableIValue *stack, uint64_t, uint64_t) {
    Call call(stack);
    body(call);
}

/* ---- act ------------------------------------------------------------------------------------- */

rafter_act_args act_args(Call &call) {
    rafter_act_args args = default_args<rafter_act_args>();
    args.kind = static_cast<rafter_act_kind>(call.integer());
    args.dim = dimension(call);
    return args;
}

void act(Call &call) {
    const Tensor x = call.tensor();
    rafter_act_args args = act_args(call);
    Tensor y = x.empty_like();
    args.x = x.dl();
    args.y = y.dl();
    run("act", call, rafter_act_forward, args);
    call.return_tensors(y);
}

void act_backward(Call &call) {
    const Tensor dy = call.tensor(), saved = call.tensor(); /* x, or y for softmax */
    rafter_act_args args = act_args(call);
    Tensor dx = saved.empty_like();
    (args.kind == RAFTER_ACT_SOFTMAX ? args.y : args.x) = saved.dl();
    args.dy = dy.dl();
    args.dx = dx.dl();
    run("act", call, rafter_act_backward, args);
    call.return_tensors(dx);
}

/* relu with a mask of one bit per element for backward. x, and dy in backward, are contiguous. */
void relu_saving(Call &call) {
    const Tensor x = call.tensor();
    rafter_act_args args = default_args<rafter_act_args>();
    int64_t bytes = 1;
    for (int d = 0; d < x.dims(); d++)
        bytes *= x.shape()[d];
    bytes = (bytes + 7) / 8;
    Tensor y = x.empty_like(), mask = Tensor::empty(&bytes, 1, rafter::torch_dtype(RAFTER_U8), call.device());
    args.kind = RAFTER_ACT_RELU;
    args.x = x.dl();
    args.y = y.dl();
    args.relu_mask = mask.dl();
    run("act", call, rafter_act_forward, args);
    call.return_tensors(y, mask);
}

void relu_mask_backward(Call &call) {
    const Tensor dy = call.tensor(), mask = call.tensor();
    rafter_act_args args = default_args<rafter_act_args>();
    Tensor dx = dy.empty_like();
    args.kind = RAFTER_ACT_RELU;
    args.dy = dy.dl();
    args.dx = dx.dl();
    args.relu_mask = mask.dl();
    run("act", call, rafter_act_backward, args);
    call.return_tensors(dx);
}

/* ---- logsumexp ------------------------------------------------------------------------------- */

/* The dtypes of logsumexp's results: fp32, x's, or x's and then fp32. */
enum class LseDtypes { F32, OF_X, BOTH };

void compute_logsumexp(Call &call, LseDtypes dtypes) {
    const Tensor x = call.tensor();
    rafter_logsumexp_args args = default_args<rafter_logsumexp_args>();
    args.dim = dimension(call);
    const bool keepdim = call.flag();
    args.algorithm = static_cast<rafter_logsumexp_algorithm>(call.integer());
    int64_t shape[Tensor::MAX_DIMS];
    int dims = 0;
    for (int d = 0; d < x.dims(); d++) { /* an out-of-range dim removes nothing; the library refuses it */
        const bool reduced = d == (args.dim < 0 ? args.dim + x.dims() : args.dim);
        if (!reduced || keepdim)
            shape[dims++] = reduced ? 1 : x.shape()[d];
    }
    Tensor lse = Tensor::empty(shape, dims, dtypes == LseDtypes::OF_X ? x.dtype() : f32(), call.device());
    args.x = x.dl();
    args.lse = lse.dl();
    if (dtypes != LseDtypes::BOTH) {
        run("logsumexp", call, rafter_logsumexp_forward, args);
        call.return_tensors(lse);
        return;
    }
    Tensor rounded = Tensor::empty(shape, dims, x.dtype(), call.device());
    args.rounded = rounded.dl();
    run("logsumexp", call, rafter_logsumexp_forward, args);
    call.return_tensors(rounded, lse);
}

void logsumexp(Call &call) {
    compute_logsumexp(call, LseDtypes::F32);
}

void logsumexp_rounded(Call &call) {
    compute_logsumexp(call, LseDtypes::OF_X);
}

void logsumexp_saving(Call &call) {
    compute_logsumexp(call, LseDtypes::BOTH);
}

void logsumexp_backward(Call &call) {
    const Tensor dlse = call.tensor(), x = call.tensor(), lse = call.tensor();
    rafter_logsumexp_args args = default_args<rafter_logsumexp_args>();
    args.dim = dimension(call);
    args.algorithm = static_cast<rafter_logsumexp_algorithm>(call.integer());
    Tensor dx = x.empty_like();
    args.x = x.dl();
    args.lse = lse.dl();
    args.dlse = dlse.dl();
    args.dx = dx.dl();
    run("logsumexp", call, rafter_logsumexp_backward, args);
    call.return_tensors(dx);
}

/* ---- shared by the two losses ---------------------------------------------------------------- */

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
    rafter::Groups groups; /* see groups.h */

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
            groups = rafter::Groups(*text, call.device(), c);
    }
};

/* Bits of `which`, in the order of the results. _options.py has the same. */
enum { ROW_LOSS = 1, LOGPROB = 2, ENTROPY = 4, ARGMAX = 8 };

/* The results of a loss: always loss and lse; the others only with `stats`, for schemas that have
 * them. */
struct Outputs {
    Tensor loss, lse, row_loss, logprob, entropy, argmax;

    template <class Args>
    Outputs(Args &args, const Tensor &target, const LossOptions &options, rafter::Device device, bool stats,
            int64_t which) {
        const int dims = options.c.reduction == RAFTER_NONE ? target.dims() : 0;
        const auto row = [&](rafter_dtype dtype, bool wanted) {
            return Tensor::empty(target.shape(), target.dims(), rafter::torch_dtype(dtype), device, wanted);
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

/* ---- cross_entropy --------------------------------------------------------------------------- */

template <bool stats> void cross_entropy(Call &call) {
    const Tensor logits = call.tensor(), target = call.tensor();
    const int64_t which = stats ? call.integer() : 0;
    const LossOptions options(call);
    rafter_cross_entropy_args args = default_args<rafter_cross_entropy_args>();
    args.options = &options.c;
    args.logits = logits.dl();
    args.target = target.dl();
    Outputs out(args, target, options, call.device(), stats, which);
    run("cross_entropy", call, rafter_cross_entropy_forward, args);
    if constexpr (stats)
        call.return_tensors(out.loss, out.lse, out.row_loss, out.logprob, out.entropy, out.argmax);
    else
        call.return_tensors(out.loss, out.lse);
}

template <bool in_place> void cross_entropy_backward(Call &call) {
    const Tensor dloss = call.tensor(), logits = call.tensor(), target = call.tensor(), lse = call.tensor();
    const LossOptions options(call);
    rafter_cross_entropy_args args = default_args<rafter_cross_entropy_args>();
    args.options = &options.c;
    args.logits = logits.dl();
    args.target = target.dl();
    args.lse = lse.dl();
    args.dloss = dloss.dl();
    Tensor dlogits = in_place ? Tensor() : logits.empty_like();
    args.dlogits = in_place ? logits.dl() : dlogits.dl();
    run("cross_entropy", call, rafter_cross_entropy_backward, args);
    if constexpr (!in_place)
        call.return_tensors(dlogits);
}

/* ---- linear_cross_entropy -------------------------------------------------------------------- */

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

/* ---- lrpe_cosine ----------------------------------------------------------------------------- */

/* offset is a SymInt: with an int, torch.compile would compile again for every value. */
#define LRPE                                                                                                           \
    "Tensor x, Tensor theta, Tensor? positions=None, SymInt offset=0, int act=0, int softmax_over=0, int algorithm=0"

struct LrpeCall {
    Tensor x, theta, positions;
    rafter_lrpe_cosine_args c;

    explicit LrpeCall(Call &call)
        : x(call.tensor()), theta(call.tensor()), positions(call.optional_tensor()),
          c(default_args<rafter_lrpe_cosine_args>()) {
        c.offset = call.integer();
        c.act = static_cast<rafter_act_kind>(call.integer());
        c.softmax_over = static_cast<rafter_softmax_over>(call.integer());
        c.algorithm = static_cast<rafter_lrpe_algorithm>(call.integer());
        c.x = x.dl();
        c.theta = theta.dl();
        c.positions = positions.dl();
    }
};

void lrpe_cosine(Call &call) {
    LrpeCall lrpe(call);
    int64_t shape[Tensor::MAX_DIMS];
    for (int d = 0; d < lrpe.x.dims(); d++)
        shape[d] = lrpe.x.shape()[d] * (d + 1 == lrpe.x.dims() ? 2 : 1);
    Tensor y = Tensor::empty(shape, lrpe.x.dims(), lrpe.x.dtype(), call.device());
    lrpe.c.y = y.dl();
    run("lrpe_cosine", call, rafter_lrpe_cosine_forward, lrpe.c);
    call.return_tensors(y);
}

void lrpe_cosine_backward(Call &call) {
    const Tensor dy = call.tensor();
    const bool wants_dtheta = call.flag();
    LrpeCall lrpe(call);
    Tensor dx = lrpe.x.empty_like(), dtheta = lrpe.theta.empty_like(wants_dtheta);
    lrpe.c.dy = dy.dl();
    lrpe.c.dx = dx.dl();
    lrpe.c.dtheta = dtheta.dl();
    run("lrpe_cosine", call, rafter_lrpe_cosine_backward, lrpe.c);
    call.return_tensors(dx, dtheta);
}

/* ---- scale ----------------------------------------------------------------------------------- */

/* In place. A factor of 1 costs no pass over x, and the host does not wait for the factor. */
void scale(Call &call) {
    const Tensor x = call.tensor(), factor = call.tensor();
    rafter_scale_args args = default_args<rafter_scale_args>();
    args.x = args.y = x.dl();
    args.factor = factor.dl();
    run("scale", call, rafter_scale_forward, args);
}

/* ---- info and registration ------------------------------------------------------------------- */

/* Lines of "name value": version, CPU features, threads, and the kernel variant of each op. */

void info(StableIValue *stack, uint64_t, uint64_t) {
    const rafter::Device cpu = {aoti_torch_device_type_cpu(), 0};
    Session run("info", cpu);
    std::string text = std::string("version ") + rafter_version() + "\ncpu " + rafter_cpu_features() + "\nthreads " +
                       std::to_string(rafter_context_threads(run)) + "\n";
    const char *op, *variant, *reason;
    for (int i = 0; (op = rafter_op_name(i)); i++)
        for (int v = 0; rafter_describe_variant(run, op, v, &variant, &reason); v++)
            if (!reason) { /* the first one that this CPU runs */
                text += std::string("kernels:") + op + " " + variant + "\n";
                break;
            }
    stack[0] = torch::stable::detail::from(text);
}

struct OpEntry {
    const char *name, *schema;
    Kernel *kernel;
};

const OpEntry ops[] = {
    {"act", "(Tensor x, int kind, int dim=0) -> Tensor", kernel<act>},
    {"act_backward", "(Tensor dy, Tensor saved, int kind, int dim=0) -> Tensor", kernel<act_backward>},
    {"relu_saving", "(Tensor x) -> (Tensor y, Tensor mask)", kernel<relu_saving>},
    {"relu_mask_backward", "(Tensor dy, Tensor mask) -> Tensor", kernel<relu_mask_backward>},
    {"logsumexp", "(Tensor x, int dim, bool keepdim=False, int algorithm=0) -> Tensor", kernel<logsumexp>},
    {"logsumexp_rounded", "(Tensor x, int dim, bool keepdim=False, int algorithm=0) -> Tensor",
     kernel<logsumexp_rounded>},
    {"logsumexp_saving", "(Tensor x, int dim, bool keepdim=False, int algorithm=0) -> (Tensor, Tensor)",
     kernel<logsumexp_saving>},
    {"logsumexp_backward", "(Tensor dlse, Tensor x, Tensor lse, int dim, int algorithm=0) -> Tensor",
     kernel<logsumexp_backward>},
    {"cross_entropy", "(Tensor input, Tensor target, " LOSS_OPTIONS ") -> (Tensor loss, Tensor lse)",
     kernel<cross_entropy<false>>},
    {"cross_entropy_stats",
     "(Tensor input, Tensor target, int which, " LOSS_OPTIONS ") -> (Tensor loss, Tensor lse, Tensor row_loss, "
     "Tensor logprob, Tensor entropy, Tensor argmax)",
     kernel<cross_entropy<true>>},
    {"cross_entropy_backward", "(Tensor dloss, Tensor input, Tensor target, Tensor lse, " LOSS_OPTIONS ") -> Tensor",
     kernel<cross_entropy_backward<false>>},
    {"cross_entropy_backward_", "(Tensor dloss, Tensor(a!) input, Tensor target, Tensor lse, " LOSS_OPTIONS ") -> ()",
     kernel<cross_entropy_backward<true>>},
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
    {"lrpe_cosine", "(" LRPE ") -> Tensor", kernel<lrpe_cosine>},
    {"lrpe_cosine_backward", "(Tensor dy, bool wants_dtheta, " LRPE ") -> (Tensor dx, Tensor dtheta)",
     kernel<lrpe_cosine_backward>},
    {"scale_", "(Tensor(a!) x, Tensor factor) -> ()", kernel<scale>},
};

void implement(torch::stable::detail::StableLibrary &library) {
    for (const OpEntry &op : ops) {
        library.impl(op.name, op.kernel);
        library.impl((std::string("_") + op.name).c_str(), op.kernel);
    }
}

} // namespace

/* STABLE_TORCH_LIBRARY makes a string of its argument before the preprocessor looks into it. */
#define LIBRARY(name, variable) STABLE_TORCH_LIBRARY(name, variable)
#define LIBRARY_IMPL(name, key, variable) STABLE_TORCH_LIBRARY_IMPL(name, key, variable)

LIBRARY(RAFTER_TORCH_NAMESPACE, library) {
    for (const OpEntry &op : ops) {
        library.def((std::string(op.name) + op.schema).c_str());
        library.def((std::string("_") + op.name + op.schema).c_str());
    }
    library.def("_info() -> str");
    /* Implemented in _groups.py. They return "", or what went wrong. */
    library.def("_group_all_gather(Tensor send, Tensor(a!) receive, str group, int stream) -> str");
    library.def("_group_reduce_scatter(Tensor send, Tensor(a!) receive, str group, int stream) -> str");
    library.def("_group_all_reduce(Tensor(a!) data, str group, int stream) -> str");
}

LIBRARY_IMPL(RAFTER_TORCH_NAMESPACE, CPU, library) {
    implement(library);
}

LIBRARY_IMPL(RAFTER_TORCH_NAMESPACE, CUDA, library) {
    implement(library);
}

LIBRARY_IMPL(RAFTER_TORCH_NAMESPACE, CompositeExplicitAutograd, library) {
    library.impl("_info", info);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rafter's ops for PyTorch's dispatcher. Every op is registered twice, with and without a leading
 * underscore. The plain name gets an autograd formula (in _ops.py); the name with the underscore is
 * the kernel below autograd, for the eager path, which has a torch.autograd.Function of its own.
 * Shapes follow the C API; the Python side handles whatever else PyTorch users expect.
 */
#include "ops.h"

using namespace rafter;

namespace {

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
    {"lrpe_cosine", "(" LRPE ") -> Tensor", kernel<lrpe_cosine>},
    {"lrpe_cosine_backward", "(Tensor dy, bool wants_dtheta, " LRPE ") -> (Tensor dx, Tensor dtheta)",
     kernel<lrpe_cosine_backward>},
    {"scale_", "(Tensor(a!) x, Tensor factor) -> ()", kernel<scale>},
};

template <class Function> void for_each_op(Function function) {
    for (const OpEntry &op : ops)
        function(op);
    for (const OpEntry &op : linear_ops)
        function(op);
}

void implement(torch::stable::detail::StableLibrary &library) {
    for_each_op([&](const OpEntry &op) {
        library.impl(op.name, op.kernel);
        library.impl((std::string("_") + op.name).c_str(), op.kernel);
    });
}

} // namespace

/* STABLE_TORCH_LIBRARY makes a string of its argument before the preprocessor looks into it. */
#define LIBRARY(name, variable) STABLE_TORCH_LIBRARY(name, variable)
#define LIBRARY_IMPL(name, key, variable) STABLE_TORCH_LIBRARY_IMPL(name, key, variable)

LIBRARY(RAFTER_TORCH_NAMESPACE, library) {
    for_each_op([&](const OpEntry &op) {
        library.def((std::string(op.name) + op.schema).c_str());
        library.def((std::string("_") + op.name + op.schema).c_str());
    });
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

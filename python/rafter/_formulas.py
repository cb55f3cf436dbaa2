# SPDX-License-Identifier: Apache-2.0
"""Fake kernels and gradients of the ops, in the order of include/rafter/rafter.h. Arguments are those of the schemas in ops.cpp;
trailing ones that have their default value may be missing."""
import torch

from ._ops import Op, below_autograd, declare, define, direct, once

RELU, SOFTMAX = 1, 4  # of rafter_act_kind
NONE = 2  # of rafter_reduction
COMPACT = 2  # of rafter_lce_mode
DX, DWEIGHT, DBIAS = BITS = 1, 2, 4  # of linear_cross_entropy's `grads`


def _absent(like):
    """A result that was not asked for."""
    return like.new_empty(0)


def _like(tensor, wanted):
    return torch.empty_like(tensor) if wanted else _absent(tensor)


# ---- act

# Backward is given the result instead of x: what follows an activation keeps that anyway. relu only asks where it is positive.
FROM_RESULT = (RELU, SOFTMAX)


def _act_save(ctx, args, y):
    ctx.save_for_backward(y if args[1] in FROM_RESULT else args[0])
    ctx.rest = args[1:]


def _act_backward(op, ctx, dy):
    return (op("act_backward")(dy, *ctx.saved_tensors, *ctx.rest),)


declare("act_backward", lambda dy, saved, kind, dim=0: torch.empty_like(saved))
act = Op("act", 1, lambda x, kind, dim=0: torch.empty_like(x), _act_save, _act_backward)


class _ActEager(dict):
    """The eager path of each activation, by kind and dim. An activation is the least there is to compute, and a Function
    costs least when its only argument is the tensor."""

    def __missing__(self, key):
        kind, dim = key
        raw, raw_backward = act.raw, below_autograd("act_backward")

        def keeping_input(ctx, x):
            ctx.save_for_backward(x)
            return raw(x, kind, dim)

        def keeping_result(ctx, x):
            y = raw(x, kind, dim)
            ctx.save_for_backward(y)
            return y

        @once
        def backward(ctx, dy):
            return (raw_backward(dy, *ctx.saved_tensors, kind, dim),)

        forward = keeping_result if kind in FROM_RESULT else keeping_input
        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self[key] = made = direct(type(("none", "relu", "sigmoid", "silu", "softmax")[kind], (torch.autograd.Function,), members))
        return made


act_eager = _ActEager()

# ---- logsumexp


def _logsumexp_fake(x, dim, keepdim=False, algorithm=0):
    shape = list(x.shape)
    if shape:
        shape[dim] = 1
        if not keepdim:
            del shape[dim]
    return x.new_empty(shape, dtype=torch.float32)


def _logsumexp_save(ctx, args, lse):
    ctx.save_for_backward(args[0], lse)
    ctx.dim, ctx.algorithm = args[1], args[3:]


def _logsumexp_backward(op, ctx, dlse):
    return (op("logsumexp_backward")(dlse, *ctx.saved_tensors, ctx.dim, *ctx.algorithm),)


declare("logsumexp_backward", lambda dlse, x, lse, dim, algorithm=0: torch.empty_like(x))
logsumexp = Op("logsumexp", 1, _logsumexp_fake, _logsumexp_save, _logsumexp_backward)

# ---- cross_entropy
#
# The ten options of both losses: weight, row_weight, denominator, ignore_index, reduction, zero_if_all_ignored,
# label_smoothing, z_loss, softcap, logit_scale. The first three are tensors.


def _loss_fake(target, options):
    reduction = options[4] if len(options) > 4 else 0
    loss = target.new_empty(target.shape if reduction == NONE else (), dtype=torch.float32)
    return loss, target.new_empty(target.shape, dtype=torch.float32)


def _stats_fake(target, which):
    """row_loss, logprob, entropy, argmax."""
    dtypes = (torch.float32, torch.float32, torch.float32, torch.int64)
    return tuple(target.new_empty(target.shape if which >> bit & 1 else 0, dtype=dtype) for bit, dtype in enumerate(dtypes))


def _cross_entropy_save(ctx, args, results, options=2):
    ctx.save_for_backward(args[0], args[1], results[1], *args[options:options + 3])
    ctx.numbers = args[options + 3:]
    ctx.mark_non_differentiable(*results[1:])


def _cross_entropy_stats_save(ctx, args, results):
    _cross_entropy_save(ctx, args, results, options=3)


def _cross_entropy_eager(raw):
    def forward(ctx, input, rest):
        loss, lse = raw(input, *rest)
        ctx.save_for_backward(input, rest[0], lse, *rest[1:4])
        ctx.numbers = rest[4:]
        return loss

    return forward


def _cross_entropy_backward(op, ctx, dloss, *_):
    return (op("cross_entropy_backward")(dloss, *ctx.saved_tensors, *ctx.numbers),)


declare("cross_entropy_backward", lambda dloss, input, *_: torch.empty_like(input))
declare("cross_entropy_backward_", lambda *_: None)
cross_entropy = Op("cross_entropy", 1, lambda input, target, *options: _loss_fake(target, options), _cross_entropy_save,
                   _cross_entropy_backward, _cross_entropy_eager)
cross_entropy_stats = Op("cross_entropy_stats", 1, lambda input, target, which, *options:
                         (*_loss_fake(target, options), *_stats_fake(target, which)), _cross_entropy_stats_save,
                         _cross_entropy_backward)


class CrossEntropyInplace(torch.autograd.Function):
    """cross_entropy whose backward writes over the logits, and tells autograd that it did."""

    forward = staticmethod(_cross_entropy_eager(cross_entropy.raw))

    @staticmethod
    @once
    def backward(ctx, dloss):
        input = ctx.saved_tensors[0]
        below_autograd("cross_entropy_backward_")(dloss, *ctx.saved_tensors, *ctx.numbers)
        torch.autograd.graph.increment_version(input)
        return input.detach(), None


cross_entropy_inplace = direct(CrossEntropyInplace)

# ---- linear_cross_entropy
#
# Arguments: input, linear_weight, linear_bias, target, grads (and which), then the ten options, then mode, accumulate, budget.
# With `grads`, forward has computed those gradients for an upstream gradient of 1, and backward scales them.


def _gradients_fake(input, linear_weight, linear_bias, grads):
    dbias = _absent(input) if linear_bias is None else _like(linear_bias, grads & DBIAS)
    return _like(input, grads & DX), _like(linear_weight, grads & DWEIGHT), dbias


def _linear_fake(input, linear_weight, linear_bias, target, grads, *rest):
    return *_loss_fake(target, rest), *_gradients_fake(input, linear_weight, linear_bias, grads)


def _linear_stats_fake(input, linear_weight, linear_bias, target, grads, which, *rest):
    return *_linear_fake(input, linear_weight, linear_bias, target, grads, *rest), *_stats_fake(target, which)


def _linear_backward_fake(dloss, input, linear_weight, linear_bias, target, lse, grads, *_):
    return _gradients_fake(input, linear_weight, linear_bias, grads)


def _linear_main_grad_fake(dloss, input, linear_weight, linear_bias, target, lse, main_grad, grads, *_):
    dinput, _, dbias = _gradients_fake(input, linear_weight, linear_bias, grads)
    return dinput, dbias


def _save_inputs(ctx, args, lse, options, *more):
    """args: those of the call; options: where its options start."""
    ctx.save_for_backward(*args[:4], lse, *more, *args[options:options + 3])
    ctx.numbers = args[options + 3:]


def _wanted(ctx):
    return sum(bit for bit, needed in zip(BITS, ctx.needs_input_grad) if needed)


def _only(gradients, grads):
    """A zero-size result that was not asked for becomes None."""
    return tuple(g if grads & bit else None for g, bit in zip(gradients, BITS))


def _linear_save(ctx, args, results, options=5):
    _save_inputs(ctx, args, results[1], options, *results[2:5])
    ctx.early = args[4]
    ctx.mark_non_differentiable(*results[1:])


def _linear_stats_save(ctx, args, results):
    _linear_save(ctx, args, results, options=6)


def _linear_backward(op, ctx, dloss, *_):
    input, linear_weight, linear_bias, target, lse, dinput, dweight, dbias, *options = ctx.saved_tensors
    grads = _wanted(ctx)
    if grads & ~ctx.early:
        return _only(op("linear_cross_entropy_backward")(dloss, input, linear_weight, linear_bias, target, lse, grads, *options,
                                                         *ctx.numbers), grads)
    return tuple(g * dloss if grads & bit else None for g, bit in zip((dinput, dweight, dbias), BITS))


declare("linear_cross_entropy_backward", _linear_backward_fake)
declare("linear_cross_entropy_backward_main_grad", _linear_main_grad_fake)
linear_cross_entropy = Op("linear_cross_entropy", 3, _linear_fake, _linear_save, _linear_backward)
linear_cross_entropy_stats = Op("linear_cross_entropy_stats", 3, _linear_stats_fake, _linear_stats_save, _linear_backward)


class LinearCrossEntropy(torch.autograd.Function):
    """The eager path of linear_cross_entropy, which hands the gradients of forward over instead of copying them: the first
    backward scales them in place and lets go of them; another one (retain_graph) computes them again. With main_grad, dW is
    added to it in backward and the weight gets no gradient. `how`: main_grad or None, whether statistics are wanted, and the
    op's further arguments."""

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, how):
        main_grad, stats, rest = how
        op = linear_cross_entropy_stats if stats else linear_cross_entropy
        loss, lse, dinput, dweight, dbias, *more = op.raw(input, linear_weight, linear_bias, *rest)
        options = rest[3 if stats else 2:]
        ctx.save_for_backward(input, linear_weight, linear_bias, rest[0], lse, *options[:3])
        ctx.gradients, ctx.rest = (dinput, dweight, dbias), (main_grad, rest[1], options[3:])
        if not stats:
            return loss
        ctx.mark_non_differentiable(lse, *more)
        return loss, lse, *more

    @staticmethod
    @once
    def backward(ctx, dloss, *_):
        input, linear_weight, linear_bias, target, lse, *options = ctx.saved_tensors  # raises if the graph was freed
        inputs = dloss, input, linear_weight, linear_bias, target, lse
        main_grad, early, numbers = ctx.rest
        grads = _wanted(ctx)
        gradients, ctx.gradients = ctx.gradients, None
        if main_grad is not None and grads & DWEIGHT:
            dinput, dbias = below_autograd("linear_cross_entropy_backward_main_grad")(*inputs, main_grad, grads, *options,
                                                                                      *numbers)
            torch.autograd.graph.increment_version(main_grad)
            return *_only((dinput, None, dbias), grads & ~DWEIGHT), None
        if gradients is None or grads & ~early:
            gradients = below_autograd("linear_cross_entropy_backward")(*inputs, grads, *options, *numbers)
        elif dloss.is_cuda or dloss.item() != 1.0:
            for gradient, bit in zip(gradients, BITS):
                if grads & bit:
                    gradient.mul_(dloss)
        return *_only(gradients, grads), None


linear_eager = direct(LinearCrossEntropy)

# ---- linear_logprobs: linear_cross_entropy's statistics, with gradients of both. Arguments: the inputs, wants_entropy, then the
# options and choices.


def _logprobs_fake(input, linear_weight, linear_bias, target, wants_entropy, *_):
    shapes = (target.shape, target.shape if wants_entropy else 0, target.shape)
    return tuple(target.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _logprobs_save(ctx, args, results):
    _, entropy, lse = results
    _save_inputs(ctx, args, lse, 5, entropy)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*((lse,) if args[4] else (entropy, lse)))


def _logprobs_backward(op, ctx, dlogprob, dentropy, _):
    input, linear_weight, linear_bias, target, lse, entropy, *options = ctx.saved_tensors
    grads = _wanted(ctx)
    if dlogprob is None and dentropy is None:
        return None, None, None
    if dentropy is None:  # the loss of a row is minus its log-probability
        gradients = op("linear_cross_entropy_backward")(-dlogprob, input, linear_weight, linear_bias, target, lse, grads, *options,
                                                        *ctx.numbers)
    else:
        ignore_index, _, _, _, _, softcap, logit_scale, *_ = ctx.numbers
        gradients = op("linear_logprobs_backward")(dlogprob, dentropy, input, linear_weight, linear_bias, target, entropy,
                                                   ignore_index, softcap, logit_scale, grads)
    return _only(gradients, grads)


_SLICE = 1 << 26  # bytes of fp32 logits that the entropy's gradient holds at a time


def _matmul_f32(a, b):
    """a @ b with a result that is not rounded below fp32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _logprobs_gradients(dlogprob, dentropy, input, linear_weight, linear_bias, target, entropy, ignore_index, softcap, logit_scale,
                        grads):
    """With p = softmax(u), u = scale * softcap(z): d logprob / du = onehot - p and d entropy / du = -p (log p + entropy). In
    PyTorch's own operations, over slices of rows: entropy bonuses are rare, and the C library has no gradient for them."""
    x, labels = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    kept = labels != ignore_index
    up_entropy = torch.where(kept, dentropy.reshape(-1), 0.0)
    up_logprob = torch.zeros_like(up_entropy) if dlogprob is None else torch.where(kept, dlogprob.reshape(-1), 0.0)
    labels = torch.where(kept, labels, 0).long()
    row_entropy = entropy.reshape(-1)
    dinput, dweight, dbias = _gradients_fake(input, linear_weight, linear_bias, grads)
    dx = x.new_empty(x.shape if grads & DX else 0)
    dw = dweight.new_zeros(dweight.shape, dtype=torch.float32)
    db = dbias.new_zeros(dbias.shape, dtype=torch.float32)
    scale = logit_scale or 1.0
    step = max(1, _SLICE // (4 * max(linear_weight.shape[0], 1)))
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        z = _matmul_f32(x[rows], linear_weight.t())
        if linear_bias is not None:
            z += linear_bias
        slope = scale
        if softcap:
            z = torch.tanh(z / softcap)
            slope = scale * (1 - z * z)
            z *= softcap
        log_p = torch.log_softmax(z * scale, -1)
        p = log_p.exp()
        dz = -p * (torch.where(p > 0, log_p, 0.0) + row_entropy[rows, None]) * up_entropy[rows, None] - p * up_logprob[rows, None]
        dz.scatter_add_(1, labels[rows, None], up_logprob[rows, None])
        dz *= slope
        if grads & DBIAS:
            db += dz.sum(0)
        dz = dz.to(x.dtype)
        if grads & DX:
            dx[rows] = dz @ linear_weight
        if grads & DWEIGHT:
            dw += _matmul_f32(dz.t(), x[rows])
    return dinput.copy_(dx.view(dinput.shape)), dweight.copy_(dw), dbias.copy_(db)


def _logprobs_gradients_fake(dlogprob, dentropy, input, linear_weight, linear_bias, target, entropy, ignore_index, softcap,
                             logit_scale, grads):
    return _gradients_fake(input, linear_weight, linear_bias, grads)


define("linear_logprobs_backward", "(Tensor? dlogprob, Tensor dentropy, Tensor input, Tensor linear_weight, Tensor? linear_bias, "
       "Tensor target, Tensor entropy, int ignore_index, float softcap, float logit_scale, int grads) -> "
       "(Tensor dinput, Tensor dweight, Tensor dbias)", _logprobs_gradients)
declare("linear_logprobs_backward", _logprobs_gradients_fake)
linear_logprobs = Op("linear_logprobs", 3, _logprobs_fake, _logprobs_save, _logprobs_backward)

# ---- lrpe_cosine


def _lrpe_save(ctx, args, y):
    ctx.save_for_backward(*args[:3])
    ctx.rest = args[3:]


def _lrpe_backward(op, ctx, dy):
    wants_dtheta = ctx.needs_input_grad[1]
    dx, dtheta = op("lrpe_cosine_backward")(dy, wants_dtheta, *ctx.saved_tensors, *ctx.rest)
    return dx, dtheta if wants_dtheta else None


declare("lrpe_cosine_backward", lambda dy, wants_dtheta, x, theta, *_: (torch.empty_like(x), _like(theta, wants_dtheta)))
lrpe_cosine = Op("lrpe_cosine", 2, lambda x, theta, *_: x.new_empty((*x.shape[:-1], 2 * x.shape[-1])), _lrpe_save, _lrpe_backward)

# SPDX-License-Identifier: Apache-2.0
"""Fake kernels and gradients of the ops, in the order of include/rafter/rafter.h. Arguments are
those of the schemas in python/src; trailing arguments may be missing if they have their default
value."""
import torch

from ._ops import (MASK_BYTES, Op, accelerated, batched, below_autograd, declare, direct, kernels, no_double_backward,
                   public)
from ._options import (ACTS, ARGMAX, DBIAS, DWEIGHT, DX, ENTROPY, GRADIENTS, LOGPROB, NONE, RELU, SOFTMAX, STATISTICS,
                       flatten, save_for_backward, saved_for_backward, unflatten)


def _absent(like):
    """A result that was not requested."""
    return like.new_empty(0)


def _like(tensor, wanted):
    return torch.empty_like(tensor) if wanted else _absent(tensor)


# ---- act

# Backward of these starts from the result instead of x: the next layer usually saves the result
# anyway, so nothing extra is kept. relu's backward only needs the sign.
FROM_RESULT = (RELU, SOFTMAX)


def _act_save(ctx, args, y):
    ctx.save_for_backward(y if args[1] in FROM_RESULT else args[0])
    ctx.rest = args[1:]


def _act_backward(op, ctx, dy):
    return (op("act_backward")(dy, *ctx.saved_tensors, *ctx.rest),)


declare("act_backward", lambda dy, saved, kind, dim=0: torch.empty_like(saved))
act = Op("act", 1, lambda x, kind, dim=0: torch.empty_like(x), _act_save, _act_backward)


declare("relu_saving", lambda x: (torch.empty_like(x), x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)))
declare("relu_mask_backward", lambda dy, mask: torch.empty_like(dy))


def _masks(x):
    """Whether relu saves a mask of one bit per element. Forward then writes, and backward reads, a
    sixteenth or a thirty-second of the result's bytes. A small result does not need it: it is still in
    the L2 cache if backward comes soon."""
    return x.is_cuda and x.nbytes >= MASK_BYTES and x.is_contiguous()


def act_python(kind, dim):
    """The activation as a Function whose only argument is the tensor: such a call is the cheapest."""
    raw = act.raw

    def saving_input(ctx, x):
        ctx.save_for_backward(x)
        return raw(x, kind, dim)

    def saving_result(ctx, x):
        y = raw(x, kind, dim)
        ctx.save_for_backward(y)
        return y

    def saving_mask(ctx, x):
        if not _masks(x):
            return saving_result(ctx, x)
        y, mask = below_autograd("relu_saving")(x)
        ctx.save_for_backward(mask)
        return y

    @no_double_backward
    def backward(ctx, dy):
        saved, = ctx.saved_tensors
        if saved.dtype is torch.uint8:
            return (kernels()("relu_mask_backward")(dy.contiguous(), saved),)
        return (kernels()("act_backward")(dy, saved, kind, dim),)

    forward = saving_mask if kind == RELU else saving_result if kind in FROM_RESULT else saving_input
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return direct(type(list(ACTS)[kind], (torch.autograd.Function,), members))


class _ActEager(dict):
    """The eager path of each activation, by (kind, dim). Activations do so little work that host
    time matters most here."""

    def __missing__(self, key):
        self[key] = eager = accelerated(list(ACTS)[key[0]], act_python(*key), key)
        return eager


act_eager = _ActEager()

# ---- logsumexp


def _logsumexp_fake(x, dim, keepdim=False, algorithm=0, dtype=torch.float32):
    shape = list(x.shape)
    if shape:
        shape[dim] = 1
        if not keepdim:
            del shape[dim]
    return x.new_empty(shape, dtype=dtype)


def _logsumexp_rounded_fake(x, dim, keepdim=False, algorithm=0):
    return _logsumexp_fake(x, dim, keepdim, algorithm, x.dtype)


def _logsumexp_save(ctx, args, lse):
    ctx.save_for_backward(args[0], lse)
    ctx.dim, ctx.algorithm = args[1], args[3:]


def _logsumexp_backward(op, ctx, dlse):
    return (op("logsumexp_backward")(dlse, *ctx.saved_tensors, ctx.dim, *ctx.algorithm),)


declare("logsumexp_backward", lambda dlse, x, lse, dim, algorithm=0: torch.empty_like(x))
logsumexp = Op("logsumexp", 1, _logsumexp_fake, _logsumexp_save, _logsumexp_backward)
# In the input's dtype, for calls without a gradient: no extra kernel converts the result.
declare("logsumexp_rounded", _logsumexp_rounded_fake)
logsumexp_rounded = below_autograd("logsumexp_rounded")
# In the input's dtype and in fp32, for calls with a gradient, which is computed from the latter.
declare("logsumexp_saving", lambda *args: (_logsumexp_rounded_fake(*args), _logsumexp_fake(*args)))


def _logsumexp_rounded_python():
    """logsumexp in the input's dtype as a Function. The upstream gradient has that dtype too, and
    Rafter's kernel takes it as it is: no other kernel converts the result or its gradient."""
    saving = below_autograd("logsumexp_saving")

    def forward(ctx, x, rest):
        rounded, lse = saving(x, *rest)
        _logsumexp_save(ctx, (x, *rest), lse)
        return rounded

    @no_double_backward
    def backward(ctx, dlse):
        return (*_logsumexp_backward(kernels(), ctx, dlse), None)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return direct(type("logsumexp_rounded", (torch.autograd.Function,), members))


logsumexp_rounded_python = _logsumexp_rounded_python()
logsumexp_rounded_eager = accelerated("logsumexp_rounded", logsumexp_rounded_python)

# ---- cross_entropy


def _loss_fake(target, arguments):
    options, _ = unflatten(arguments)
    loss = target.new_empty(target.shape if options.reduction == NONE else (), dtype=torch.float32)
    return loss, target.new_empty(target.shape, dtype=torch.float32)


def _statistics_fake(target, which):
    """row_loss, logprob, entropy, argmax."""
    dtypes = (torch.float32, torch.float32, torch.float32, torch.int64)
    return tuple(target.new_empty(target.shape if which & bit else 0, dtype=dtype)
                 for bit, dtype in zip(STATISTICS, dtypes))


def _cross_entropy_fake(input, target, *arguments):
    return _loss_fake(target, arguments)


def _cross_entropy_stats_fake(input, target, which, *arguments):
    return *_loss_fake(target, arguments), *_statistics_fake(target, which)


def _cross_entropy_save(ctx, args, results, first_option=2):
    options, _ = unflatten(args[first_option:])
    save_for_backward(ctx, (*args[:2], results[1]), options)
    ctx.mark_non_differentiable(*results[1:])


def _cross_entropy_stats_save(ctx, args, results):
    _cross_entropy_save(ctx, args, results, first_option=3)


def _cross_entropy_eager(raw):
    def forward(ctx, input, rest):
        loss, lse = raw(input, *rest)
        save_for_backward(ctx, (input, rest[0], lse), unflatten(rest[1:])[0])
        return loss

    return forward


def _cross_entropy_backward(op, ctx, dloss, *_):
    tensors, options, _ = saved_for_backward(ctx)
    return (op("cross_entropy_backward")(dloss, *tensors, *flatten(options)),)


declare("cross_entropy_backward", lambda dloss, input, *_: torch.empty_like(input))
declare("cross_entropy_backward_", lambda *_: None)
cross_entropy = Op("cross_entropy", 1, _cross_entropy_fake, _cross_entropy_save, _cross_entropy_backward,
                   _cross_entropy_eager)
cross_entropy_stats = Op("cross_entropy_stats", 1, _cross_entropy_stats_fake, _cross_entropy_stats_save,
                         _cross_entropy_backward)


class CrossEntropyInplace(torch.autograd.Function):
    """cross_entropy whose backward overwrites the logits, and tells autograd so. Not under compiled
    autograd and vmap, which need backward as a function."""

    forward = staticmethod(_cross_entropy_eager(cross_entropy.raw))

    @staticmethod
    @no_double_backward
    def backward(ctx, dloss):
        tensors, options, _ = saved_for_backward(ctx)
        arguments = (dloss, *tensors, *flatten(options))
        if torch.compiler.is_dynamo_compiling() or batched(dloss):
            return kernels()("cross_entropy_backward")(*arguments), None
        kernels()("cross_entropy_backward_")(*arguments)
        logits = tensors[0]
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), None


cross_entropy_inplace = direct(CrossEntropyInplace)

# ---- scale
#
# In place. A factor of 1 leaves x alone; the kernel checks that on the device, so the host need not wait.

declare("scale_", lambda x, factor: None)
scale_ = public("_scale_")  # not below_autograd(): compiled autograd traces backward, and can trace this call

# ---- linear_cross_entropy
#
# Arguments of the forward ops: input, linear_weight, linear_bias, target, grads (and which), then
# the LossOptions, then the LinearOptions. Forward computes the gradients in `grads` for an upstream
# gradient of 1, and backward scales them.


def linear_arguments(target, grads, which, options, linear):
    """The arguments after the first three: of linear_cross_entropy if `which` is None, else of
    linear_cross_entropy_stats."""
    return (target, grads, *(() if which is None else (which,)), *flatten(options, linear))


def _gradients_fake(input, linear_weight, linear_bias, grads):
    dbias = _absent(input) if linear_bias is None else _like(linear_bias, grads & DBIAS)
    return _like(input, grads & DX), _like(linear_weight, grads & DWEIGHT), dbias


def _linear_fake(input, linear_weight, linear_bias, target, grads, *arguments):
    return *_loss_fake(target, arguments), *_gradients_fake(input, linear_weight, linear_bias, grads)


def _linear_stats_fake(input, linear_weight, linear_bias, target, grads, which, *arguments):
    return (*_linear_fake(input, linear_weight, linear_bias, target, grads, *arguments),
            *_statistics_fake(target, which))


def _linear_backward_fake(dloss, input, linear_weight, linear_bias, target, lse, grads, *_):
    return _gradients_fake(input, linear_weight, linear_bias, grads)


def _linear_main_grad_fake(dloss, input, linear_weight, linear_bias, target, lse, main_grad, grads, *_):
    dinput, _, dbias = _gradients_fake(input, linear_weight, linear_bias, grads)
    return dinput, dbias


def _needed(ctx):
    """The gradients that autograd asks for, as bits of `grads`."""
    return sum(bit for bit, needed in zip(GRADIENTS, ctx.needs_input_grad) if needed)


def _select(gradients, grads):
    """The gradients in `grads`, and None for the others."""
    return tuple(g if grads & bit else None for g, bit in zip(gradients, GRADIENTS))


def _linear_save(ctx, args, results, first_option=5):
    lse, *gradients = results[1:5]
    save_for_backward(ctx, (*args[:4], lse, *gradients), *unflatten(args[first_option:]))
    ctx.computed = args[4]
    ctx.mark_non_differentiable(*results[1:])


def _linear_stats_save(ctx, args, results):
    _linear_save(ctx, args, results, first_option=6)


def _linear_backward(op, ctx, dloss, *_):
    tensors, options, linear = saved_for_backward(ctx)
    inputs, gradients = tensors[:5], tensors[5:]  # inputs: x, W, bias, target, lse
    grads = _needed(ctx)
    if grads & ~ctx.computed:
        return _select(op("linear_cross_entropy_backward")(dloss, *inputs, grads, *flatten(options, linear)), grads)
    return tuple(_scaled(g, dloss) if grads & bit else None for g, bit in zip(gradients, GRADIENTS))


def _scaled(gradient, dloss):
    """gradient * dloss, with dloss in fp32: CUDA would round a scalar tensor to bf16 or fp16 before it
    multiplies. scale_ would not help here: a saved tensor is an input of the backward graph, and a
    mutable op would be given a clone of it. Inductor fuses the conversions and multiplies in place
    (the saved gradients are donated buffers), so there is no second dW; the pass over dW remains,
    even for a dloss of 1. Without Inductor there is an fp32 copy of the gradient for a moment."""
    return (gradient.float() * dloss).to(gradient.dtype)


def _saving_fake(input, linear_weight, linear_bias, target, which, *arguments):
    # How much is saved, and whether, depends on the device: only the eager path asks.
    return *_loss_fake(target, arguments), target.new_empty(0, dtype=torch.int64), *_statistics_fake(target, which)


def _linear_saved_fake(dloss, dentropy, entropy, input, linear_weight, linear_bias, target, lse, saved, main_grad, grads, *_):
    return _gradients_fake(input, linear_weight, linear_bias, grads if main_grad is None else grads & ~DWEIGHT)


declare("linear_cross_entropy_saving", _saving_fake)
declare("linear_cross_entropy_backward_saved", _linear_saved_fake)
declare("linear_cross_entropy_backward", _linear_backward_fake)
declare("linear_cross_entropy_backward_main_grad", _linear_main_grad_fake)
linear_cross_entropy = Op("linear_cross_entropy", 3, _linear_fake, _linear_save, _linear_backward)
linear_cross_entropy_stats = Op("linear_cross_entropy_stats", 3, _linear_stats_fake, _linear_stats_save,
                                _linear_backward)


def _take_saved(ctx, upstream):
    """What forward saved, for the first backward only: later ones get None, and so does a backward that
    must have no side effects (compiled autograd, vmap)."""
    saved, ctx.saved = getattr(ctx, "saved", None), None
    return None if torch.compiler.is_dynamo_compiling() or batched(upstream) else saved


class LinearCrossEntropy(torch.autograd.Function):
    """The eager path of linear_cross_entropy. The gradients that forward computed are returned without
    a copy: the first backward scales them in place and drops its references; a second one
    (retain_graph) computes them again. With main_grad, backward adds dW to main_grad, and the weight
    gets no gradient. If backward is to compute the gradients, forward may save the exponentials of
    the logits, so that the first backward need not compute the logits again. `call` holds main_grad
    or None, whether forward saves, and the arguments of linear_arguments()."""

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, call):
        main_grad, saves, (target, grads, which, options, linear) = call
        if saves:
            loss, lse, saved, *statistics = below_autograd("linear_cross_entropy_saving")(
                input, linear_weight, linear_bias, target, which or 0, *flatten(options, linear))
            ctx.gradients, ctx.saved = None, saved if saved.numel() else None
        else:
            op = linear_cross_entropy if which is None else linear_cross_entropy_stats
            loss, lse, *gradients = op.raw(
                input, linear_weight, linear_bias, *linear_arguments(target, grads, which, options, linear))
            statistics = gradients[3:]
            ctx.gradients, ctx.saved = gradients[:3], None
        save_for_backward(ctx, (input, linear_weight, linear_bias, target, lse), options, linear)
        ctx.computed, ctx.main_grad = grads, main_grad
        if which is None:
            return loss
        ctx.mark_non_differentiable(lse, *statistics)
        return loss, lse, *statistics

    @staticmethod
    @no_double_backward
    def backward(ctx, dloss, *_):
        inputs, options, linear = saved_for_backward(ctx)
        arguments = flatten(options, linear)
        grads = _needed(ctx)
        gradients, ctx.gradients = ctx.gradients, None
        saved = _take_saved(ctx, dloss)
        main_grad = ctx.main_grad
        if saved is not None:
            gradients = below_autograd("linear_cross_entropy_backward_saved")(
                dloss, None, None, *inputs, saved, main_grad, grads, *arguments)
            if main_grad is not None and grads & DWEIGHT:
                torch.autograd.graph.increment_version(main_grad)
                grads &= ~DWEIGHT
            return *_select(gradients, grads), None
        if main_grad is not None and grads & DWEIGHT:
            if batched(dloss):
                raise RuntimeError("linear_cross_entropy: main_grad=True takes one upstream gradient, not a batch "
                                   "(is_grads_batched)")
            dinput, dbias = kernels()("linear_cross_entropy_backward_main_grad")(
                dloss, *inputs, main_grad, grads, *arguments)
            torch.autograd.graph.increment_version(main_grad)
            return *_select((dinput, None, dbias), grads & ~DWEIGHT), None
        if gradients is None or grads & ~ctx.computed:
            gradients = kernels()("linear_cross_entropy_backward")(dloss, *inputs, grads, *arguments)
        elif batched(dloss):
            gradients = tuple(_scaled(g, dloss) for g in gradients)
        else:
            factor = dloss.float()
            for gradient, bit in zip(gradients, GRADIENTS):
                if grads & bit:
                    scale_(gradient, factor)
        return *_select(gradients, grads), None


linear_eager = direct(LinearCrossEntropy)

# ---- linear_logprobs
#
# The statistics of linear_cross_entropy, with gradients for logprob and entropy. Arguments: the
# four inputs, wants_entropy, wants_argmax, then the LossOptions and LinearOptions.


def _logprobs_fake(input, linear_weight, linear_bias, target, wants_entropy, wants_argmax, *_):
    shapes = (target.shape, target.shape if wants_entropy else 0, target.shape)
    argmax = target.new_empty(target.shape if wants_argmax else 0, dtype=torch.int64)
    return *(target.new_empty(shape, dtype=torch.float32) for shape in shapes), argmax


def _logprobs_save(ctx, args, results):
    _, entropy, lse, argmax = results
    save_for_backward(ctx, (*args[:4], lse, entropy), *unflatten(args[6:]))
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(() if args[4] else (entropy,)), lse, argmax)


def _logprobs_forward(raw):
    def forward(ctx, input, linear_weight, linear_bias, rest):
        saves, target, wants_entropy, wants_argmax, *arguments = rest
        args = (input, linear_weight, linear_bias, target, wants_entropy, wants_argmax, *arguments)
        saved = None
        if saves:  # as LinearCrossEntropy
            which = LOGPROB | (ENTROPY if wants_entropy else 0) | (ARGMAX if wants_argmax else 0)
            _, lse, saved, _, logprob, entropy, argmax = below_autograd("linear_cross_entropy_saving")(
                *args[:4], which, *arguments)
            results = logprob, entropy, lse, argmax
        else:
            results = raw(*args)
        _logprobs_save(ctx, args, results)
        ctx.saved = saved if saved is not None and saved.numel() else None
        return results

    return forward


def _logprobs_backward(op, ctx, dlogprob, dentropy, *_):
    (*inputs, lse, entropy), options, linear = saved_for_backward(ctx)
    grads = _needed(ctx)
    if dlogprob is None and dentropy is None:
        return None, None, None
    saved = _take_saved(ctx, dentropy if dlogprob is None else dlogprob)
    arguments = flatten(options, linear)
    # The loss of a row is minus its log-probability.
    dloss = torch.zeros_like(dentropy) if dlogprob is None else -dlogprob
    if saved is not None:
        gradients = below_autograd("linear_cross_entropy_backward_saved")(
            dloss, dentropy, None if dentropy is None else entropy, *inputs, lse, saved, None, grads, *arguments)
    elif dentropy is None:
        gradients = op("linear_cross_entropy_backward")(dloss, *inputs, lse, grads, *arguments)
    else:
        gradients = op("linear_logprobs_backward")(dloss, dentropy, *inputs, lse, entropy, grads, *arguments)
    return _select(gradients, grads)


def _logprobs_backward_fake(dloss, dentropy, input, linear_weight, linear_bias, target, lse, entropy, grads, *_):
    return _gradients_fake(input, linear_weight, linear_bias, grads)


declare("linear_logprobs_backward", _logprobs_backward_fake)
linear_logprobs = Op("linear_logprobs", 3, _logprobs_fake, _logprobs_save, _logprobs_backward, _logprobs_forward)

# ---- lrpe_cosine


def _lrpe_save(ctx, args, y):
    ctx.save_for_backward(*args[:3])
    ctx.rest = args[3:]


def _lrpe_backward(op, ctx, dy):
    wants_dtheta = ctx.needs_input_grad[1]
    dx, dtheta = op("lrpe_cosine_backward")(dy, wants_dtheta, *ctx.saved_tensors, *ctx.rest)
    return dx, dtheta if wants_dtheta else None


declare("lrpe_cosine_backward",
        lambda dy, wants_dtheta, x, theta, *_: (torch.empty_like(x), _like(theta, wants_dtheta)))
lrpe_cosine = Op("lrpe_cosine", 2, lambda x, theta, *_: x.new_empty((*x.shape[:-1], 2 * x.shape[-1])), _lrpe_save,
                 _lrpe_backward)

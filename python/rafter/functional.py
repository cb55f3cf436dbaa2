# SPDX-License-Identifier: Apache-2.0
"""The functions of Rafter. They take the same arguments as those of torch.nn.functional, in the
same order; everything else is a keyword argument."""
from typing import NamedTuple, Optional, Protocol, Sequence, Tuple, Union, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _compat, _flops, _formulas, _ops, _subclasses
from ._namespace import NAMESPACE
from ._options import (ACCUMULATE, ACTS, ARGMAX, BASIC, BASIC_LINEAR, COMPACT, DBIAS, DWEIGHT, DX, ENTROPY, LOGPROB,
                       LRPE_ALGORITHMS, LSE_ALGORITHMS, MEAN, MODES, NONE, REDUCTIONS, RELU, ROW_LOSS, SIGMOID, SILU,
                       SOFTMAX, STATISTICS, Accumulate, Act, Extra, LinearOptions, LogsumexpAlgorithm, LossOptions,
                       LrpeAlgorithm, Mode, Reduction, flatten, pick)

_flops.register()

# Module-level names: an attribute lookup in every call would cost host time.
_compiling = torch.compiler.is_dynamo_compiling
_transforming = _compat.functorch_active
_forward_mode = _compat.forward_mode
_grad_enabled = torch.is_grad_enabled
_any_autocast = _compat.any_autocast_enabled
_tf32_products = _compat.tf32_products
_f32 = torch.float32
_F32_TINY, _F32_MAX = 2.0**-149, torch.finfo(torch.float32).max  # the ops take numbers in fp32
_act_raw, _act_eager = _formulas.act.raw, _formulas.act_eager
_ce_raw, _ce_eager = _formulas.cross_entropy.raw, _formulas.cross_entropy.eager

_EXTRAS = {"row_loss": ROW_LOSS, "logprob": LOGPROB, "entropy": ENTROPY, "argmax": ARGMAX, "lse": 0}


class LossOutput(NamedTuple):
    """The result of a loss with extras. Those that were not requested are None. Only `loss` has a
    gradient."""

    loss: Tensor
    row_loss: Optional[Tensor] = None
    lse: Optional[Tensor] = None
    logprob: Optional[Tensor] = None
    entropy: Optional[Tensor] = None
    argmax: Optional[Tensor] = None


class LogProbs(NamedTuple):
    """The result of linear_logprobs. The first two have gradients; entropy and is_top are None unless
    requested."""

    logprob: Tensor
    entropy: Optional[Tensor] = None
    is_top: Optional[Tensor] = None


for _result in (LossOutput, LogProbs):
    _compat.register_named_tuple(_result, serialized_type_name=f"{NAMESPACE}.{_result.__name__}")

_PLAIN = frozenset((Tensor, Parameter, type(None)))


def _plain(*tensors):
    """Whether the eager path can run: no tensor is a subclass instance, and torch.compile, function
    transforms and forward-mode AD are all inactive. None counts as plain."""
    if _compiling() or _transforming() or _forward_mode._current_level >= 0:
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
    return True


# ---- act


class _Elementwise(Protocol):
    def __call__(self, input: Tensor) -> Tensor: ...


def _elementwise(kind: int, name: str, doc: str) -> _Elementwise:
    """Makes an activation function. Host time dominates small activations, so only one Python frame
    lies between the caller and the op."""
    eager = _formulas.act_eager[kind, 0]

    def function(input: Tensor) -> Tensor:
        cls = type(input)
        # not _plain(input), inlined
        if (cls is not Tensor and cls is not Parameter or _compiling() or _transforming()
                or _forward_mode._current_level >= 0):
            return _subclasses.call(_formulas.act.op, input, kind)
        if input.requires_grad and _grad_enabled():
            return eager(input)
        return _act_raw(input, kind)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


relu = _elementwise(RELU, "relu", "max(input, 0), like torch.nn.functional.relu; the derivative at 0 is 0.")
sigmoid = _elementwise(SIGMOID, "sigmoid", "1 / (1 + exp(-input)), like torch.sigmoid.")
silu = _elementwise(SILU, "silu", "input * sigmoid(input), like torch.nn.functional.silu.")


def softmax(input: Tensor, dim: int, *, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Like torch.nn.functional.softmax: over any dimension, without a transposing copy. `dtype`
    casts the input first."""
    if dtype is not None and dtype is not input.dtype:
        input = input.to(dtype)
    cls = type(input)
    if (cls is not Tensor and cls is not Parameter or _compiling() or _transforming()
            or _forward_mode._current_level >= 0):
        return _subclasses.call(_formulas.act.op, input, SOFTMAX, dim)
    if input.requires_grad and _grad_enabled():
        return _act_eager[SOFTMAX, dim](input)
    return _act_raw(input, SOFTMAX, dim)


def act(input: Tensor, kind: Act = "none", dim: Optional[int] = None) -> Tensor:
    """The activation called `kind`: "none" (returns the input itself), "relu", "sigmoid", "silu",
    or "softmax" over `dim`."""
    number = pick(ACTS, "kind", kind)
    if number == 0:
        return input
    _check_dim(dim, number, "kind", kind)
    return softmax(input, dim) if dim is not None else {RELU: relu, SIGMOID: sigmoid, SILU: silu}[number](input)


def _check_dim(dim, number, name, given):
    """Softmax needs a dim, and no other activation takes one."""
    if (dim is None) == (number == SOFTMAX):
        raise ValueError(f"dim is {dim!r} with {name} {given!r}: softmax needs a dim, the others take none")


# ---- logsumexp


def logsumexp(input: Tensor, dim: int, keepdim: bool = False, *, dtype: Optional[torch.dtype] = None,
              algorithm: LogsumexpAlgorithm = "auto") -> Tensor:
    """log(sum(exp(input))) over one dimension, like torch.logsumexp.

    The result has `dtype`, or the dtype of the input. It is computed in fp32, so
    dtype=torch.float32 costs nothing extra. The gradient is computed from the fp32 value.
    """
    number = pick(LSE_ALGORITHMS, "algorithm", algorithm)
    if type(dim) is not int:
        dim = _one_dim(dim)
    if not _plain(input):
        lse = _subclasses.call(_formulas.logsumexp.op, input, dim, keepdim, number)
    elif input.requires_grad and _grad_enabled():
        lse = _formulas.logsumexp.eager(input, (dim, keepdim, number))
    else:
        lse = _formulas.logsumexp.raw(input, dim, keepdim, number)
    if dtype is None:
        dtype = input.dtype
    return lse if dtype is _f32 else lse.to(dtype)


def _one_dim(dim):
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        return dim[0]
    raise ValueError(f"dim is {dim!r}, wanted one dimension")


# ---- shared by the losses


def _constant(name, tensor, device):
    """A class weight, row weight or denominator in fp32. None of them gets a gradient."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        if _compiling():  # a number in a product may change without a recompilation
            return torch.ones((), dtype=_f32, device=device) * tensor
        return torch.full((), float(tensor), dtype=_f32, device=device)
    if tensor.requires_grad:
        raise ValueError(f"{name} requires a gradient, but Rafter computes none for it; pass {name}.detach()")
    return tensor if tensor.dtype is _f32 else tensor.to(_f32)


def _no_gradient(name, number):
    """Refuses a number whose gradient would be lost."""
    if isinstance(number, Tensor) and number.requires_grad and _grad_enabled():
        raise ValueError(f"{name} requires a gradient, but Rafter computes none for it; pass {name}.detach()")


def _varies(number):
    """Whether torch.compile traces the number as a variable, which it does from its second value
    on. As an argument of an op it would become a constant again, and cost a compilation per
    value."""
    return _compiling() and not _compat.is_constant(number)


def _scaled(logit_scale, softcap, *tensors):
    """The tensors, multiplied by the logit_scale, and None; for a scale that is a tensor or a
    number that varies. So PyTorch computes its gradient, and the host never reads its value. In
    fp32, because a product in bf16 would round the scale too. A softcap comes between the tensors
    and the scale; then the scale becomes a number, and is returned in place of None."""
    if not isinstance(logit_scale, Tensor):
        if softcap is not None:
            return *tensors, logit_scale
        _check_scale(logit_scale)
    elif logit_scale.numel() != 1:
        raise ValueError(f"logit_scale has shape {list(logit_scale.shape)}, wanted one element")
    elif softcap is not None:
        if logit_scale.requires_grad and _grad_enabled():
            raise ValueError("logit_scale requires a gradient, but Rafter computes none for it together with softcap; "
                             "pass logit_scale.detach()")
        return *tensors, 1.0 if logit_scale.is_meta else float(logit_scale)
    else:
        logit_scale = logit_scale.reshape(())
    return *(t if t is None else t.to(torch.promote_types(t.dtype, _f32)) * logit_scale for t in tensors), None


def _scaled_linear(logit_scale, softcap, input, linear_bias):
    """_scaled for the linear ops: input and bias keep their dtype."""
    dtype = input.dtype
    input, linear_bias, logit_scale = _scaled(logit_scale, softcap, input, linear_bias)
    return input.to(dtype), None if linear_bias is None else linear_bias.to(dtype), logit_scale


def _check_scale(logit_scale):
    if not _F32_TINY <= logit_scale <= _F32_MAX:
        raise ValueError(f"logit_scale is {logit_scale}, wanted a positive fp32 number, or None for 1")


def _labels(target):
    if target.dtype is torch.int64 or target.dtype is torch.int32:
        return target
    if target.is_floating_point():
        raise ValueError(f"target has dtype {target.dtype}, wanted class indices (int32 or int64): class probabilities "
                         "are not supported, use torch.nn.functional.cross_entropy")
    return target.long()


def _loss_options(input, *, weight=None, row_weight=None, denominator=None, ignore_index=-100, reduction="mean",
                  zero_if_all_ignored=False, label_smoothing=0.0, z_loss=0.0, softcap=None, logit_scale=None):
    """Checks the user's options and converts them to the values that the ops take. All defaults
    give BASIC itself."""
    number = pick(REDUCTIONS, "reduction", reduction)
    if weight is None and row_weight is None and denominator is None:
        # The types, because a tensor of 0 may require a gradient; _no_gradient sees it below.
        changed = (number or zero_if_all_ignored or softcap is not None or type(label_smoothing) is not float
                   or type(z_loss) is not float or label_smoothing or z_loss)
        if not changed and ignore_index == -100 and logit_scale is None:
            return BASIC
    else:
        weight = _constant("weight", weight, input.device)
        row_weight = _constant("row_weight", row_weight, input.device)
        denominator = _constant("denominator", denominator, input.device)
        if denominator is not None and number != MEAN:
            raise ValueError(f'denominator is given with reduction={reduction!r}, wanted reduction="mean"')
    _no_gradient("label_smoothing", label_smoothing)
    _no_gradient("z_loss", z_loss)
    _no_gradient("softcap", softcap)
    # The ops read 0 as "none", so a number that is 0 in fp32 must not reach them.
    if logit_scale is not None:
        _check_scale(logit_scale)
    if softcap and not _F32_TINY <= softcap <= _F32_MAX:
        raise ValueError(f"softcap is {softcap}, wanted a positive fp32 number, or None")
    return LossOptions(weight, row_weight, denominator, ignore_index, number, zero_if_all_ignored, label_smoothing,
                       z_loss, softcap or 0.0, logit_scale or 0.0)


def _linear_options(mode, accumulate, budget):
    number, accumulate = pick(MODES, "mode", mode), pick(ACCUMULATE, "accumulate", accumulate)
    if not (number or accumulate or budget):
        return BASIC_LINEAR
    if budget < 0:
        raise ValueError(f"budget is {budget}, wanted a number of bytes, or 0 for no limit")
    return LinearOptions(number, accumulate, budget)


def _as_torch_multiplies(linear, input):
    """The LinearOptions with TF32 products if PyTorch's own product of the input would use them. They
    are saved for backward, which so multiplies as forward did."""
    if input.dtype is _f32 and input.is_cuda and _tf32_products():
        return linear._replace(allow_tf32=True)
    return linear


# Raises if the budget is too small for backward. Only the eager path asks this.
_check_budget = _ops.public("linear_check_budget")
torch.library.register_fake(f"{NAMESPACE}::linear_check_budget", lambda *_: None)  # for meta tensors


def _parse_extras(extras):
    """The ops' `which` bits, and whether lse was requested."""
    if isinstance(extras, str):
        extras = (extras,)
    return sum(pick(_EXTRAS, "an entry of extras", name) for name in set(extras)), "lse" in extras


def _loss_output(which, wants_lse, loss, lse, *statistics):
    row_loss, logprob, entropy, argmax = (t if which & bit else None for bit, t in zip(STATISTICS, statistics))
    return LossOutput(loss, row_loss, lse if wants_lse else None, logprob, entropy, argmax)


# ---- cross_entropy


@overload  # an empty tuple is a sequence too, so the overloads overlap; the first one wins
def cross_entropy(input: Tensor, target: Tensor, weight: Optional[Tensor] = ...,  # type: ignore[overload-overlap]
                  ignore_index: int = ..., reduction: Reduction = ..., label_smoothing: float = ..., *,
                  z_loss: float = ..., softcap: Optional[float] = ..., logit_scale: Union[Tensor, float, None] = ...,
                  row_weight: Optional[Tensor] = ..., denominator: Union[Tensor, float, None] = ...,
                  zero_if_all_ignored: bool = ..., dim: int = ..., extras: Tuple[()] = ...,
                  inplace_backward: bool = ...) -> Tensor: ...


@overload
def cross_entropy(input: Tensor, target: Tensor, weight: Optional[Tensor] = ..., ignore_index: int = ...,
                  reduction: Reduction = ..., label_smoothing: float = ..., *, z_loss: float = ...,
                  softcap: Optional[float] = ..., logit_scale: Union[Tensor, float, None] = ...,
                  row_weight: Optional[Tensor] = ..., denominator: Union[Tensor, float, None] = ...,
                  zero_if_all_ignored: bool = ..., dim: int = ..., extras: Union[Extra, Sequence[Extra]],
                  inplace_backward: bool = ...) -> LossOutput: ...


def cross_entropy(input: Tensor, target: Tensor, weight: Optional[Tensor] = None, ignore_index: int = -100,
                  reduction: Reduction = "mean", label_smoothing: float = 0.0, *, z_loss: float = 0.0,
                  softcap: Optional[float] = None, logit_scale: Union[Tensor, float, None] = None,
                  row_weight: Optional[Tensor] = None, denominator: Union[Tensor, float, None] = None,
                  zero_if_all_ignored: bool = False, dim: int = 1, extras: Union[Extra, Sequence[Extra]] = (),
                  inplace_backward: bool = False):
    """Cross entropy of logits and class indices, like torch.nn.functional.cross_entropy; the loss
    is always fp32.

    dim: the class dimension. 1, or 0 for a vector, as in PyTorch; dim=-1 takes [batch, time,
        vocabulary] directly.
    logit_scale: 1 / temperature. A tensor of one element gets a gradient, and multiplies the logits
        in fp32 beforehand; not with softcap.
    softcap: logits become softcap * tanh(logits / softcap).
    z_loss: adds z_loss * logsumexp^2 to the loss of each row.
    row_weight: fp32, same shape as target.
    denominator: what "mean" divides by; a number or a tensor on the device.
    zero_if_all_ignored: the mean over no rows is 0 instead of NaN.
    extras: any of "row_loss", "lse", "logprob", "entropy", "argmax"; the result is then a
        LossOutput.
    inplace_backward: backward overwrites the logits with their gradient. It has no effect under
        torch.compile.
    """
    if input.dim() != 2:
        if input.dim() == 0:
            raise ValueError("input has no dimensions, wanted at least the class dimension")
        given = input
        input = input.movedim(dim if input.dim() > 1 else 0, -1)
        if target.shape != input.shape[:-1]:
            raise RuntimeError(_wrong_target(given, target, dim, input.shape[:-1]))
    elif dim != 1 and dim != -1:
        input = input.movedim(dim, -1)
    target = _labels(target)
    if logit_scale is not None and (isinstance(logit_scale, Tensor) or _varies(logit_scale)):
        input, logit_scale = _scaled(logit_scale, softcap, input)
    options = _loss_options(input, weight=weight, row_weight=row_weight, denominator=denominator,
                            ignore_index=ignore_index, reduction=reduction, zero_if_all_ignored=zero_if_all_ignored,
                            label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, logit_scale=logit_scale)
    plain = _plain(input, target, options.weight, options.row_weight, options.denominator)
    if extras:
        return _cross_entropy_stats(input, target, options, plain, *_parse_extras(extras))
    if not plain:
        return _subclasses.call(_formulas.cross_entropy.op, input, target, *flatten(options))[0]
    if input.requires_grad and _grad_enabled():
        eager = _formulas.cross_entropy_inplace if inplace_backward else _ce_eager
        return eager(input, (target, options))
    return _ce_raw(input, target, *flatten(options))[0]


def _wrong_target(input, target, dim, wanted):
    """The message for a target that does not have the shape of the input without `dim`."""
    message = (f"rafter.cross_entropy: target has shape {list(target.shape)}, wanted {list(wanted)}: the shape of "
               f"input, {list(input.shape)}, without its class dimension, dim={dim}")
    if target.shape == input.shape[:-1]:
        message += "; if the classes are in the last dimension, pass dim=-1"
    return message


def _cross_entropy_stats(input, target, options, plain, which, wants_lse):
    op, rest = _formulas.cross_entropy_stats, (target, which, *flatten(options))
    if not plain:
        results = _subclasses.call(op.op, input, *rest)
    elif input.requires_grad and _grad_enabled():
        results = op.eager(input, rest)
    else:
        results = op.raw(input, *rest)
    return _loss_output(which, wants_lse, *results)


# ---- linear_cross_entropy


def _same_dtype(input, linear_weight, linear_bias):
    """Casts all three to one dtype: autocast's if it is on, as torch.nn.functional.linear does,
    otherwise the dtype they promote to."""
    given = input.dtype
    same = linear_weight.dtype is given and (linear_bias is None or linear_bias.dtype is given)
    # The common case. The checks below give the same result, in twice the time.
    if same and not _any_autocast():
        return input, linear_weight, linear_bias
    device = input.device.type
    if torch.is_autocast_enabled(device) and given.is_floating_point and given is not torch.float64:
        dtype = torch.get_autocast_dtype(device)
    elif same:
        return input, linear_weight, linear_bias
    else:
        dtype = torch.promote_types(given, linear_weight.dtype)
        if linear_bias is not None:
            dtype = torch.promote_types(dtype, linear_bias.dtype)
    return input.to(dtype), linear_weight.to(dtype), None if linear_bias is None else linear_bias.to(dtype)


def _needs(input, linear_weight, linear_bias):
    """The gradients that will be needed, as bits of the ops' `grads`."""
    if not _grad_enabled():
        return 0
    bias = linear_bias is not None and linear_bias.requires_grad
    return input.requires_grad * DX | linear_weight.requires_grad * DWEIGHT | bias * DBIAS


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *,  # type: ignore[overload-overlap]
                         linear_bias: Optional[Tensor] = ..., weight: Optional[Tensor] = ...,
                         reduction: Reduction = ..., ignore_index: Optional[int] = ..., label_smoothing: float = ...,
                         z_loss: float = ..., softcap: Optional[float] = ...,
                         logit_scale: Union[Tensor, float, None] = ..., row_weight: Optional[Tensor] = ...,
                         denominator: Union[Tensor, float, None] = ..., zero_if_all_ignored: bool = ...,
                         mode: Mode = ..., accumulate: Accumulate = ..., budget: int = ..., main_grad: bool = ...,
                         extras: Tuple[()] = ...) -> Tensor: ...


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Optional[Tensor] = ...,
                         weight: Optional[Tensor] = ..., reduction: Reduction = ..., ignore_index: Optional[int] = ...,
                         label_smoothing: float = ..., z_loss: float = ..., softcap: Optional[float] = ...,
                         logit_scale: Union[Tensor, float, None] = ..., row_weight: Optional[Tensor] = ...,
                         denominator: Union[Tensor, float, None] = ..., zero_if_all_ignored: bool = ...,
                         mode: Mode = ..., accumulate: Accumulate = ..., budget: int = ..., main_grad: bool = ...,
                         extras: Union[Extra, Sequence[Extra]]) -> LossOutput: ...


def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Optional[Tensor] = None,
                         weight: Optional[Tensor] = None, reduction: Reduction = "mean",
                         ignore_index: Optional[int] = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
                         softcap: Optional[float] = None, logit_scale: Union[Tensor, float, None] = None,
                         row_weight: Optional[Tensor] = None, denominator: Union[Tensor, float, None] = None,
                         zero_if_all_ignored: bool = False, mode: Mode = "auto", accumulate: Accumulate = "float32",
                         budget: int = 0, main_grad: bool = False, extras: Union[Extra, Sequence[Extra]] = ()):
    """cross_entropy(input @ linear_weight.T + linear_bias, target) without ever storing the logits.

    input [..., D], linear_weight [V, D], linear_bias [V], target [...]: like
    torch.nn.functional.linear_cross_entropy, with the additional options of cross_entropy. Forward
    also computes the gradients of the tensors that require one.

    mode="compact": forward computes only the loss, and backward computes the gradients over slices
    of the vocabulary. This costs one more matrix product, and no gradient is stored between the
    two. accumulate="native": see docs/linear_cross_entropy.md. budget: workspace limit in bytes; 0
    means whatever runs fastest. Forward raises if it is too small for either direction (under
    torch.compile, each direction checks its own). main_grad: backward adds dW to
    linear_weight.main_grad (fp32), and the weight itself gets no gradient.
    """
    linear = _linear_options(mode, accumulate, budget)
    into = _main_grad(linear_weight) if main_grad else None
    input, linear_weight, linear_bias = _same_dtype(input, linear_weight, linear_bias)
    target = _labels(target)
    linear = _as_torch_multiplies(linear, input)
    if logit_scale is not None and (isinstance(logit_scale, Tensor) or _varies(logit_scale)):
        input, linear_bias, logit_scale = _scaled_linear(logit_scale, softcap, input, linear_bias)
    options = _loss_options(input, weight=weight, row_weight=row_weight, denominator=denominator,
                            ignore_index=-100 if ignore_index is None else ignore_index, reduction=reduction,
                            zero_if_all_ignored=zero_if_all_ignored, label_smoothing=label_smoothing, z_loss=z_loss,
                            softcap=softcap, logit_scale=logit_scale)
    needs = _needs(input, linear_weight, linear_bias)
    # Gradients for an upstream gradient of 1 may underflow in fp16. Loss scaling prevents that, but
    # only if they are computed in backward.
    in_backward = (linear.mode == COMPACT or options.reduction == NONE or into is not None
                   or input.dtype is torch.float16)
    which, wants_lse = _parse_extras(extras) if extras else (None, False)
    call = (target, 0 if in_backward else needs, which, options, linear)
    op = _formulas.linear_cross_entropy_stats if extras else _formulas.linear_cross_entropy
    if not _plain(input, linear_weight, linear_bias, target, options.weight, options.row_weight, options.denominator):
        if into is not None:
            raise RuntimeError("main_grad=True works only on plain tensors outside torch.compile")
        results = _subclasses.call(op.op, input, linear_weight, linear_bias, *_formulas.linear_arguments(*call))
    elif needs:
        if budget and in_backward:
            _check_budget(input, linear_weight, linear_bias, target, into is not None, False, needs, *options, *linear)
        saves = in_backward and _may_save(input, linear_weight, target, linear)
        results = _formulas.linear_eager(input, linear_weight, linear_bias, (into, saves, call))
        return _loss_output(which, wants_lse, *results) if extras else results
    else:
        results = op.raw(input, linear_weight, linear_bias, *_formulas.linear_arguments(*call))
    if not extras:
        return results[0]
    loss, lse, _, _, _, *statistics = results
    return _loss_output(which, wants_lse, loss, lse, *statistics)


def _may_save(input, weight, target, linear):
    """Whether forward may save exponentials for backward, 2 bytes per logit. The library knows whether
    it can."""
    return (input.is_cuda and input.dtype is not _f32 and linear.mode != COMPACT and not linear.budget
            and 2 * target.numel() * weight.shape[0] <= max(2 * weight.numel() * weight.element_size(), 1 << 30))


def _main_grad(weight):
    into = getattr(weight, "main_grad", None)
    if not isinstance(into, Tensor) or into.dtype is not _f32 or into.shape != weight.shape:
        raise ValueError("main_grad=True needs linear_weight.main_grad, an fp32 tensor of the weight's shape")
    return into


def linear_logprobs(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Optional[Tensor] = None,
                    temperature: float = 1.0, softcap: Optional[float] = None, ignore_index: int = -100,
                    entropy: bool = False, is_top: bool = False, mode: Mode = "auto", budget: int = 0) -> LogProbs:
    """Log-probability of each target under softmax(logits / temperature), never above 0; if requested,
    the entropy, and whether the target has the largest logit (of equal ones, the first).

    For reinforcement learning: log-probability and entropy have gradients. logits = input @
    linear_weight.T + linear_bias are never stored. For ignored targets the results are 0 and False.
    """
    _no_gradient("temperature", temperature)
    if not 1.0 / _F32_MAX <= temperature <= 1.0 / _F32_TINY:
        raise ValueError(f"temperature is {temperature}, wanted a positive number with an inverse in fp32")
    input, linear_weight, linear_bias = _same_dtype(input, linear_weight, linear_bias)
    target = _labels(target)
    logit_scale = None
    if _varies(temperature) and softcap is None:  # as in _scaled; 1 / temperature would become a constant
        dtype, wide = input.dtype, torch.promote_types(input.dtype, _f32)
        input, linear_bias = (t if t is None else (t.to(wide) / temperature).to(dtype) for t in (input, linear_bias))
    else:
        logit_scale = 1.0 / temperature
    options = _loss_options(input, ignore_index=ignore_index, reduction="none", softcap=softcap,
                            logit_scale=logit_scale)
    linear = _as_torch_multiplies(_linear_options(mode, "float32", budget), input)
    rest = (target, entropy, is_top, *flatten(options, linear))
    op = _formulas.linear_logprobs
    if not _plain(input, linear_weight, linear_bias, target):
        results = _subclasses.call(op.op, input, linear_weight, linear_bias, *rest)
    elif needs := _needs(input, linear_weight, linear_bias):
        if budget:
            _check_budget(input, linear_weight, linear_bias, target, False, entropy, needs, *options, *linear)
        saves = _may_save(input, linear_weight, target, linear)
        results = op.eager(input, linear_weight, linear_bias, (saves, *rest))
    else:
        results = op.raw(input, linear_weight, linear_bias, *rest)
    top = None
    if is_top:
        top = results[3] == target
        if ignore_index == -1:  # also the argmax of ignored rows
            top = top & (target != -1)
    return LogProbs(results[0], results[1] if entropy else None, top)


# ---- lrpe_cosine


def lrpe_cosine(input: Tensor, theta: Tensor, *, offset: int = 0, positions: Optional[Tensor] = None, act: Act = "none",
                dim: Optional[int] = None, algorithm: LrpeAlgorithm = "auto") -> Tensor:
    """LRPE-cosine positional encoding: [f(x) cos(Theta), f(x) sin(Theta)] with Theta = position *
    theta.

    input [B, N, H, D] or [B, N, D]; theta [H, D], [H, 1] or [1, D]. The position of token n is
    offset + n, or comes from `positions` [N] or [B, N]; giving both is an error. f is `act`;
    softmax runs over the features (dim=-1) or the sequence (dim=1).
    """
    kind = pick(ACTS, "act", act)
    _check_dim(dim, kind, "act", act)
    if dim not in (None, 1, -1, input.dim() - 1):
        raise ValueError(f"dim is {dim}, wanted -1 (the features) or 1 (the sequence)")
    if positions is not None and offset != 0:
        raise ValueError(f"offset is {offset} and positions are given, wanted only one of them")
    rest = (positions, offset, kind, int(dim == 1), pick(LRPE_ALGORITHMS, "algorithm", algorithm))
    op = _formulas.lrpe_cosine
    if not _plain(input, theta, positions):
        return _subclasses.call(op.op, input, theta, *rest)
    if _grad_enabled() and (input.requires_grad or theta.requires_grad):
        return op.eager(input, theta, rest)
    return op.raw(input, theta, *rest)

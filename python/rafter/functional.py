# SPDX-License-Identifier: Apache-2.0
"""The functions of Rafter. They take what torch.nn.functional's take, in the same places; everything more is by keyword."""
from typing import NamedTuple, Optional, Protocol, Sequence, Tuple, Union, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _formulas, _subclasses

# Names for what every call looks up.
_compiling = torch.compiler.is_dynamo_compiling
_transforming = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_f32 = torch.float32
_act_raw, _act_eager = _formulas.act.raw, _formulas.act_eager
_ce_raw, _ce_eager = _formulas.cross_entropy.raw, _formulas.cross_entropy.eager

_REDUCTIONS = {"mean": 0, "sum": 1, "none": 2}
_ACTS = {"none": 0, "relu": 1, "sigmoid": 2, "silu": 3, "softmax": 4}
_MODES = {"auto": 0, "fast": 1, "compact": 2}
_ACCUMULATE = {"float32": 0, "native": 1}
_LSE_ALGORITHMS = {"auto": 0, "parallel": 1, "recurrence": 2}
_LRPE_ALGORITHMS = {"auto": 0, "sp": 1, "bp": 2}
_EXTRAS = {"row_loss": 1, "logprob": 2, "entropy": 4, "argmax": 8, "lse": 0}


class LossOutput(NamedTuple):
    """What a loss returns when extras are asked for; those that are not are None. Only `loss` carries a gradient."""

    loss: Tensor
    row_loss: Optional[Tensor] = None
    lse: Optional[Tensor] = None
    logprob: Optional[Tensor] = None
    entropy: Optional[Tensor] = None
    argmax: Optional[Tensor] = None


class LogProbs(NamedTuple):
    """What linear_logprobs returns. Both carry gradients; entropy is None unless it is asked for."""

    logprob: Tensor
    entropy: Optional[Tensor] = None


def _pick(table, name, given):
    try:
        return table[given]
    except (KeyError, TypeError):
        raise ValueError(f"{name} is {given!r}, wanted one of {', '.join(map(repr, table))}") from None


_PLAIN = frozenset((Tensor, Parameter, type(None)))


def _plain(*tensors):
    """Whether the eager path serves: tensors that are no subclasses, or None, outside torch.compile and function transforms."""
    if _compiling() or _transforming():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
    return True


# ---- act


class _Elementwise(Protocol):
    def __call__(self, input: Tensor) -> Tensor: ...


def _elementwise(kind: int, name: str, doc: str) -> _Elementwise:
    """An activation. There is the least to compute here, and so the least between the caller and the op: one frame of Python."""
    eager = _formulas.act_eager[kind, 0]

    def function(input: Tensor) -> Tensor:
        cls = type(input)
        if cls is not Tensor and cls is not Parameter or _compiling() or _transforming():  # not _plain, without the call
            return _subclasses.call(_formulas.act.op, input, kind)
        if input.requires_grad and _grad_enabled():
            return eager(input)
        return _act_raw(input, kind)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


relu = _elementwise(1, "relu", "max(input, 0), as torch.nn.functional.relu; the derivative at 0 is 0.")
sigmoid = _elementwise(2, "sigmoid", "1 / (1 + exp(-input)), as torch.sigmoid.")
silu = _elementwise(3, "silu", "input * sigmoid(input), as torch.nn.functional.silu.")


def softmax(input: Tensor, dim: int, *, dtype: Optional[torch.dtype] = None) -> Tensor:
    """As torch.nn.functional.softmax: over any dimension, without a transposing copy. `dtype` casts the input first."""
    if dtype is not None and dtype is not input.dtype:
        input = input.to(dtype)
    cls = type(input)
    if cls is not Tensor and cls is not Parameter or _compiling() or _transforming():
        return _subclasses.call(_formulas.act.op, input, 4, dim)
    if input.requires_grad and _grad_enabled():
        return _act_eager[4, dim](input)
    return _act_raw(input, 4, dim)


def act(input: Tensor, kind: str = "none", dim: Optional[int] = None) -> Tensor:
    """The activation named: "none" (hands the input back), "relu", "sigmoid", "silu", or "softmax" over `dim`."""
    number = _pick(_ACTS, "kind", kind)
    if number == 0:
        return input
    if (dim is None) == (number == 4):
        raise ValueError(f"dim is {dim!r} with kind {kind!r}: softmax wants one, the others none")
    return softmax(input, dim) if dim is not None else (relu, sigmoid, silu)[number - 1](input)


# ---- logsumexp


def logsumexp(input: Tensor, dim: int, keepdim: bool = False, *, dtype: Optional[torch.dtype] = None,
              algorithm: str = "auto") -> Tensor:
    """log(sum(exp(input))) over one dimension, as torch.logsumexp.

    The result has the input's dtype, or `dtype`; fp32 costs nothing more. Inside it is fp32, and the gradient starts from that.
    """
    number = _pick(_LSE_ALGORITHMS, "algorithm", algorithm)
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


# ---- what the losses share


def _float32(name, tensor, device):
    """Class weights, row weights and denominators are constants, in fp32."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        return torch.full((), float(tensor), dtype=_f32, device=device)
    if tensor.requires_grad:
        raise ValueError(f"{name} requires a gradient, and has none here; pass {name}.detach()")
    return tensor if tensor.dtype is _f32 else tensor.to(_f32)


def _labels(target):
    if target.dtype is torch.int64 or target.dtype is torch.int32:
        return target
    if target.is_floating_point():
        raise ValueError(f"target has dtype {target.dtype}, wanted class indices (int32 or int64): class probabilities are not "
                         "supported, use torch.nn.functional.cross_entropy")
    return target.long()


_DEFAULTS = (None, None, None, -100, 0, False, 0.0, 0.0, 0.0, 0.0)  # as in the schemas: what equals them is left out


def _options(input, weight, row_weight, denominator, ignore_index, reduction, zero_if_all_ignored, label_smoothing, z_loss,
             softcap, logit_scale):
    """The ten options as the ops take them."""
    number = _pick(_REDUCTIONS, "reduction", reduction)
    if weight is not None or row_weight is not None or denominator is not None:
        weight = _float32("weight", weight, input.device)
        row_weight = _float32("row_weight", row_weight, input.device)
        denominator = _float32("denominator", denominator, input.device)
        if denominator is not None and number != 0:
            raise ValueError(f'denominator is given with reduction={reduction!r}, wanted reduction="mean"')
    if logit_scale == 0:  # which is the ops' word for none
        raise ValueError("logit_scale is 0, wanted another number, or None for 1")
    return (weight, row_weight, denominator, ignore_index, number, zero_if_all_ignored, label_smoothing, z_loss, softcap or 0.0,
            logit_scale or 0.0)


def _which(extras):
    if isinstance(extras, str):
        extras = (extras,)
    return sum(_pick(_EXTRAS, "an entry of extras", name) for name in set(extras)), "lse" in extras


def _named(which, wants_lse, loss, lse, row_loss, logprob, entropy, argmax):
    pick = [t if which >> bit & 1 else None for bit, t in enumerate((row_loss, logprob, entropy, argmax))]
    return LossOutput(loss, pick[0], lse if wants_lse else None, *pick[1:])


# ---- cross_entropy


@overload  # an empty tuple is a sequence too: the first one's
def cross_entropy(input: Tensor, target: Tensor, weight: Optional[Tensor] = ...,  # type: ignore[overload-overlap]
                  ignore_index: int = ..., reduction: str = ..., label_smoothing: float = ..., *, z_loss: float = ...,
                  softcap: Optional[float] = ..., logit_scale: Optional[float] = ..., row_weight: Optional[Tensor] = ...,
                  denominator: Union[Tensor, float, None] = ..., zero_if_all_ignored: bool = ..., dim: int = ...,
                  extras: Tuple[()] = ..., inplace_backward: bool = ...) -> Tensor: ...


@overload
def cross_entropy(input: Tensor, target: Tensor, weight: Optional[Tensor] = ..., ignore_index: int = ..., reduction: str = ...,
                  label_smoothing: float = ..., *, z_loss: float = ..., softcap: Optional[float] = ...,
                  logit_scale: Optional[float] = ..., row_weight: Optional[Tensor] = ...,
                  denominator: Union[Tensor, float, None] = ..., zero_if_all_ignored: bool = ..., dim: int = ...,
                  extras: Union[str, Sequence[str]], inplace_backward: bool = ...) -> LossOutput: ...


def cross_entropy(input: Tensor, target: Tensor, weight: Optional[Tensor] = None, ignore_index: int = -100,
                  reduction: str = "mean", label_smoothing: float = 0.0, *, z_loss: float = 0.0,
                  softcap: Optional[float] = None, logit_scale: Optional[float] = None, row_weight: Optional[Tensor] = None,
                  denominator: Union[Tensor, float, None] = None, zero_if_all_ignored: bool = False, dim: int = 1,
                  extras: Union[str, Sequence[str]] = (), inplace_backward: bool = False):
    """Cross entropy of logits against class indices, as torch.nn.functional.cross_entropy; the loss is always fp32.

    Classes are in dimension 1, or 0 of a vector, as in PyTorch; `dim=-1` takes [batch, time, vocabulary] as it is.
    logit_scale: 1 / temperature. softcap: logits become cap * tanh(logits / cap). z_loss: adds z_loss * logsumexp^2.
    row_weight: fp32, shaped as target. denominator: what "mean" divides by, a number or a tensor on the device.
    zero_if_all_ignored: 0 instead of NaN. extras: any of "row_loss", "lse", "logprob", "entropy", "argmax"; then a LossOutput
    comes back. inplace_backward: backward writes the gradient over the logits (not under torch.compile, which has its own way).
    """
    if input.dim() != 2:
        if input.dim() == 0:
            raise ValueError("input has no dimensions, wanted that of the classes at least")
        input = input.movedim(dim if input.dim() > 1 else 0, -1)
    elif dim != 1 and dim != -1:
        input = input.movedim(dim, -1)
    target = _labels(target)
    options = _options(input, weight, row_weight, denominator, ignore_index, reduction, zero_if_all_ignored, label_smoothing,
                       z_loss, softcap, logit_scale)
    if extras:
        return _cross_entropy_stats(input, target, options, *_which(extras))
    rest = (target,) if options == _DEFAULTS else (target, *options)
    if not _plain(input, *rest[:4]):
        return _subclasses.call(_formulas.cross_entropy.op, input, *rest)[0]
    if input.requires_grad and _grad_enabled():
        return _formulas.cross_entropy_inplace(input, rest) if inplace_backward else _ce_eager(input, rest)
    return _ce_raw(input, *rest)[0]


def _cross_entropy_stats(input, target, options, which, wants_lse):
    op, rest = _formulas.cross_entropy_stats, (target, which, *options)
    if not _plain(input, target, *options[:3]):
        results = _subclasses.call(op.op, input, *rest)
    elif input.requires_grad and _grad_enabled():
        results = op.eager(input, rest)
    else:
        results = op.raw(input, *rest)
    return _named(which, wants_lse, *results)


# ---- linear_cross_entropy


def _same_dtype(input, linear_weight, linear_bias):
    """One dtype for all three: autocast's where it is on, as torch.nn.functional.linear has it, else what they promote to."""
    given = input.dtype
    same = linear_weight.dtype is given and (linear_bias is None or linear_bias.dtype is given)
    if same and not _any_autocast():  # the rule; what follows would say the same, in twice the time
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
    """Which gradients are wanted, as the ops take it."""
    if not _grad_enabled():
        return 0
    of_bias = linear_bias is not None and linear_bias.requires_grad
    return input.requires_grad * _formulas.DX | linear_weight.requires_grad * _formulas.DWEIGHT | of_bias * _formulas.DBIAS


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *,  # type: ignore[overload-overlap]
                         linear_bias: Optional[Tensor] = ..., weight: Optional[Tensor] = ..., reduction: str = ...,
                         ignore_index: Optional[int] = ..., label_smoothing: float = ..., z_loss: float = ..., softcap: Optional[float] = ...,
                         logit_scale: Optional[float] = ..., row_weight: Optional[Tensor] = ...,
                         denominator: Union[Tensor, float, None] = ..., zero_if_all_ignored: bool = ..., mode: str = ...,
                         accumulate: str = ..., budget: int = ..., main_grad: bool = ..., extras: Tuple[()] = ...) -> Tensor: ...


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Optional[Tensor] = ...,
                         weight: Optional[Tensor] = ..., reduction: str = ..., ignore_index: Optional[int] = ...,
                         label_smoothing: float = ..., z_loss: float = ..., softcap: Optional[float] = ...,
                         logit_scale: Optional[float] = ..., row_weight: Optional[Tensor] = ...,
                         denominator: Union[Tensor, float, None] = ..., zero_if_all_ignored: bool = ..., mode: str = ...,
                         accumulate: str = ..., budget: int = ..., main_grad: bool = ...,
                         extras: Union[str, Sequence[str]]) -> LossOutput: ...


def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Optional[Tensor] = None,
                         weight: Optional[Tensor] = None, reduction: str = "mean", ignore_index: Optional[int] = None,
                         label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: Optional[float] = None,
                         logit_scale: Optional[float] = None, row_weight: Optional[Tensor] = None,
                         denominator: Union[Tensor, float, None] = None, zero_if_all_ignored: bool = False, mode: str = "auto",
                         accumulate: str = "float32", budget: int = 0, main_grad: bool = False,
                         extras: Union[str, Sequence[str]] = ()):
    """cross_entropy(input @ linear_weight.T + linear_bias, target) without ever holding the logits.

    input [..., D], linear_weight [V, D], linear_bias [V], target [...]: as torch.nn.functional.linear_cross_entropy, with the
    further options of cross_entropy. Gradients are computed beside the loss, in forward, for those that require one.

    mode="compact": nothing but the loss in forward, and gradients over slices of the vocabulary in backward: one more matrix
    product, and no gradient is held between the two. accumulate="native": see docs/linear_cross_entropy.md. budget: the most
    workspace in bytes; 0: what runs fastest. main_grad: add dW to linear_weight.main_grad (fp32) in backward, instead of giving
    the weight a gradient.
    """
    mode, accumulate = _pick(_MODES, "mode", mode), _pick(_ACCUMULATE, "accumulate", accumulate)
    into = _main_grad(linear_weight) if main_grad else None
    input, linear_weight, linear_bias = _same_dtype(input, linear_weight, linear_bias)
    target = _labels(target)
    options = _options(input, weight, row_weight, denominator, -100 if ignore_index is None else ignore_index, reduction,
                       zero_if_all_ignored, label_smoothing, z_loss, softcap, logit_scale)
    needs = _needs(input, linear_weight, linear_bias)
    # In fp16 a gradient for an upstream gradient of 1 may underflow, which a scaled loss is there to prevent: not in forward then.
    in_backward = mode == _formulas.COMPACT or options[4] == _formulas.NONE or into is not None or input.dtype is torch.float16
    early = 0 if in_backward else needs
    which, wants_lse = _which(extras) if extras else (0, False)
    rest = (target, early, which) if extras else (target, early)
    choices = (mode, accumulate, budget)
    if options != _DEFAULTS or choices != (0, 0, 0):
        rest += options + choices
    op = _formulas.linear_cross_entropy_stats if extras else _formulas.linear_cross_entropy
    if not _plain(input, linear_weight, linear_bias, target, *options[:3]):
        if into is not None:
            raise RuntimeError("main_grad=True is for plain tensors outside torch.compile; leave it off here")
        results = _subclasses.call(op.op, input, linear_weight, linear_bias, *rest)
    elif needs:
        results = _formulas.linear_eager(input, linear_weight, linear_bias, (into, bool(extras), rest))
        return _named(which, wants_lse, *results) if extras else results
    else:
        results = op.raw(input, linear_weight, linear_bias, *rest)
    return _named(which, wants_lse, *results[:2], *results[5:]) if extras else results[0]


def _main_grad(weight):
    into = getattr(weight, "main_grad", None)
    if not isinstance(into, Tensor) or into.dtype is not _f32 or into.shape != weight.shape:
        raise ValueError("main_grad=True wants linear_weight.main_grad, an fp32 tensor of the weight's shape")
    return into


def linear_logprobs(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Optional[Tensor] = None,
                    temperature: float = 1.0, softcap: Optional[float] = None, ignore_index: int = -100, entropy: bool = False,
                    mode: str = "auto", budget: int = 0) -> LogProbs:
    """Log-probability of each target under softmax(logits / temperature), never above 0, and on request the entropy.

    For reinforcement learning: both carry gradients. logits = input @ linear_weight.T + linear_bias are never held. Ignored
    targets have 0 in both.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, wanted a positive number")
    input, linear_weight, linear_bias = _same_dtype(input, linear_weight, linear_bias)
    target = _labels(target)
    options = _options(input, None, None, None, ignore_index, "none", False, 0.0, 0.0, softcap, 1.0 / temperature)
    rest = (target, entropy, *options, _pick(_MODES, "mode", mode), 0, budget)
    op = _formulas.linear_logprobs
    if not _plain(input, linear_weight, linear_bias, target):
        results = _subclasses.call(op.op, input, linear_weight, linear_bias, *rest)
    elif _needs(input, linear_weight, linear_bias):
        results = op.eager(input, linear_weight, linear_bias, rest)
    else:
        results = op.raw(input, linear_weight, linear_bias, *rest)
    return LogProbs(results[0], results[1] if entropy else None)


# ---- lrpe_cosine


def lrpe_cosine(input: Tensor, theta: Tensor, *, offset: int = 0, positions: Optional[Tensor] = None, act: str = "none",
                dim: Optional[int] = None, algorithm: str = "auto") -> Tensor:
    """LRPE-cosine positional encoding: [f(x) cos(Theta), f(x) sin(Theta)] with Theta = position * theta.

    input [B, N, H, D] or [B, N, D]; theta [H, D], [H, 1] or [1, D]. Positions are offset + n, or `positions` [N] or [B, N].
    f is `act`; softmax is over the features (dim=-1) or the sequence (dim=1).
    """
    kind = _pick(_ACTS, "act", act)
    if (dim is None) == (kind == 4):
        raise ValueError(f"dim is {dim!r} with act {act!r}: softmax wants one, the others none")
    if dim not in (None, 1, -1, input.dim() - 1):
        raise ValueError(f"dim is {dim}, wanted -1 (the features) or 1 (the sequence)")
    rest = (positions, offset, kind, int(dim == 1), _pick(_LRPE_ALGORITHMS, "algorithm", algorithm))
    op = _formulas.lrpe_cosine
    if not _plain(input, theta, positions):
        return _subclasses.call(op.op, input, theta, *rest)
    if _grad_enabled() and (input.requires_grad or theta.requires_grad):
        return op.eager(input, theta, rest)
    return op.raw(input, theta, *rest)

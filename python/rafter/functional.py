# SPDX-License-Identifier: Apache-2.0
"""The functions of Rafter. They take the same arguments as those of torch.nn.functional, in the
same order; everything else is a keyword argument."""
from typing import Any, NamedTuple, Optional, Protocol, Sequence, Tuple, Union, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _compat, _flops, _formulas, _groups, _ops, _sharded, _subclasses
from ._arguments import (F32_MAX, F32_TINY, as_torch_multiplies, labels, linear_options, loss_options, no_gradient,
                         scaled, scaled_linear, varies)
from ._namespace import NAMESPACE
from ._options import (ACTS, ARGMAX, COMPACT, DBIAS, DWEIGHT, DX, ENTROPY, LOGPROB, LRPE_ALGORITHMS, LSE_ALGORITHMS,
                       NONE, RELU, ROW_LOSS, SIGMOID, SILU, SOFTMAX, STATISTICS, Accumulate, Act, Extra,
                       LogsumexpAlgorithm, LrpeAlgorithm, Mode, Reduction, flatten, pick)

_flops.register()

# Module-level names: an attribute lookup in every call would cost host time.
_compiling = torch.compiler.is_dynamo_compiling
_transforming = _compat.functorch_active
_forward_mode = _compat.forward_mode
_grad_enabled = torch.is_grad_enabled
_any_autocast = _compat.any_autocast_enabled
_f32 = torch.float32
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
            return _subclasses.call(_formulas.act, input, kind)
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
        return _subclasses.call(_formulas.act, input, SOFTMAX, dim)
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
        lse = _subclasses.call(_formulas.logsumexp, input, dim, keepdim, number)
    elif dtype is None or dtype is input.dtype:
        if not (input.requires_grad and _grad_enabled()):
            return _formulas.logsumexp_rounded(input, dim, keepdim, number)
        eager = _formulas.logsumexp.eager if input.dtype is _f32 else _formulas.logsumexp_rounded_eager
        return eager(input, (dim, keepdim, number))
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
                  inplace_backward: bool = ..., group: Any = ..., first_class: Optional[int] = ...,
                  classes: Optional[int] = ..., row_group: Any = ...) -> Tensor: ...


@overload
def cross_entropy(input: Tensor, target: Tensor, weight: Optional[Tensor] = ..., ignore_index: int = ...,
                  reduction: Reduction = ..., label_smoothing: float = ..., *, z_loss: float = ...,
                  softcap: Optional[float] = ..., logit_scale: Union[Tensor, float, None] = ...,
                  row_weight: Optional[Tensor] = ..., denominator: Union[Tensor, float, None] = ...,
                  zero_if_all_ignored: bool = ..., dim: int = ..., extras: Union[Extra, Sequence[Extra]],
                  inplace_backward: bool = ..., group: Any = ..., first_class: Optional[int] = ...,
                  classes: Optional[int] = ..., row_group: Any = ...) -> LossOutput: ...


def cross_entropy(input: Tensor, target: Tensor, weight: Optional[Tensor] = None, ignore_index: int = -100,
                  reduction: Reduction = "mean", label_smoothing: float = 0.0, *, z_loss: float = 0.0,
                  softcap: Optional[float] = None, logit_scale: Union[Tensor, float, None] = None,
                  row_weight: Optional[Tensor] = None, denominator: Union[Tensor, float, None] = None,
                  zero_if_all_ignored: bool = False, dim: int = 1, extras: Union[Extra, Sequence[Extra]] = (),
                  inplace_backward: bool = False, group: Any = None, first_class: Optional[int] = None,
                  classes: Optional[int] = None, row_group: Any = None):
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
        torch.compile, nor on DTensors.
    group: a torch.distributed.ProcessGroup whose ranks each have the logits of some classes; labels
        and class weights are those of all classes. See docs/distributed.md.
    classes: of all ranks. None: as many on every rank. first_class: this rank's; None: torch.chunk's.
    row_group: a ProcessGroup whose ranks each have some rows; sums and means are over all of them.
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
    target = labels(target)
    groups = None
    if group is not None or row_group is not None or classes is not None or first_class is not None:
        groups = _groups.text(input.shape[-1], input.is_cpu, group, first_class, classes, row_group)
        _groups.check_scale(logit_scale, group, "the logits")
        input = input if group is None else _groups.rows_of_classes(input)
    if logit_scale is not None and (isinstance(logit_scale, Tensor) or varies(logit_scale)):
        input, logit_scale = scaled(logit_scale, softcap, input)
    options = loss_options(input, weight=weight, row_weight=row_weight, denominator=denominator,
                           ignore_index=ignore_index, reduction=reduction, zero_if_all_ignored=zero_if_all_ignored,
                           label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, logit_scale=logit_scale,
                           groups=groups)
    plain = _plain(input, target, options.weight, options.row_weight, options.denominator)
    if extras:
        return _cross_entropy_stats(input, target, options, plain, *_parse_extras(extras))
    if not plain:
        if _subclasses.has_dtensors(input, target, *options[:3]):
            return _cross_entropy_stats(input, target, options, plain, 0, False).loss
        return _formulas.cross_entropy.dispatched(input, target, *flatten(options))[0]
    if input.requires_grad and _grad_enabled():
        eager = _formulas.cross_entropy_inplace if inplace_backward else _ce_eager
        return eager(input, (target, *flatten(options)))
    return _ce_raw(input, target, *flatten(options))[0]


def _wrong_target(input, target, dim, wanted):
    """The message for a target that does not have the shape of the input without `dim`."""
    message = (f"rafter.cross_entropy: target has shape {list(target.shape)}, wanted {list(wanted)}: the shape of "
               f"input, {list(input.shape)}, without its class dimension, dim={dim}")
    if target.shape == input.shape[:-1]:
        message += "; if the classes are in the last dimension, pass dim=-1"
    return message


def _cross_entropy_stats(input, target, options, plain, which, wants_lse):
    wrap = None
    if not plain and _subclasses.has_dtensors(input, target, *options[:3]):
        _no_groups(options)
        input, target, options, wrap = _sharded.cross_entropy(input, target, options)
        plain = _plain(input, target, *options[:3])
    op, rest = _formulas.cross_entropy_stats, (target, which, *flatten(options))
    if not plain:
        results = op.dispatched(input, *rest)
    elif input.requires_grad and _grad_enabled():
        results = op.eager(input, rest)
    else:
        results = op.raw(input, *rest)
    return _loss_output(which, wants_lse, *(results if wrap is None else wrap(results)))


def _no_groups(options):
    if options.groups is not None:
        raise ValueError("group or row_group is given with DTensors, whose placements tell the groups")


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
                         extras: Tuple[()] = ..., group: Any = ..., first_class: Optional[int] = ...,
                         classes: Optional[int] = ..., row_group: Any = ...) -> Tensor: ...


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Optional[Tensor] = ...,
                         weight: Optional[Tensor] = ..., reduction: Reduction = ..., ignore_index: Optional[int] = ...,
                         label_smoothing: float = ..., z_loss: float = ..., softcap: Optional[float] = ...,
                         logit_scale: Union[Tensor, float, None] = ..., row_weight: Optional[Tensor] = ...,
                         denominator: Union[Tensor, float, None] = ..., zero_if_all_ignored: bool = ...,
                         mode: Mode = ..., accumulate: Accumulate = ..., budget: int = ..., main_grad: bool = ...,
                         extras: Union[Extra, Sequence[Extra]], group: Any = ..., first_class: Optional[int] = ...,
                         classes: Optional[int] = ..., row_group: Any = ...) -> LossOutput: ...


def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Optional[Tensor] = None,
                         weight: Optional[Tensor] = None, reduction: Reduction = "mean",
                         ignore_index: Optional[int] = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
                         softcap: Optional[float] = None, logit_scale: Union[Tensor, float, None] = None,
                         row_weight: Optional[Tensor] = None, denominator: Union[Tensor, float, None] = None,
                         zero_if_all_ignored: bool = False, mode: Mode = "auto", accumulate: Accumulate = "float32",
                         budget: int = 0, main_grad: bool = False, extras: Union[Extra, Sequence[Extra]] = (),
                         group: Any = None, first_class: Optional[int] = None, classes: Optional[int] = None,
                         row_group: Any = None):
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

    group, first_class, classes, row_group: as in cross_entropy; with group, weight and bias are those
    of this rank's classes, the input is the same on every rank, and so is its gradient, summed over
    the ranks.
    """
    linear = linear_options(mode, accumulate, budget)
    into = _main_grad(linear_weight) if main_grad else None
    input, linear_weight, linear_bias = _same_dtype(input, linear_weight, linear_bias)
    target = labels(target)
    groups = None
    if group is not None or row_group is not None or classes is not None or first_class is not None:
        groups = _groups.text(linear_weight.shape[0], input.is_cpu, group, first_class, classes, row_group)
        if linear_bias is not None:
            _groups.check_scale(logit_scale, group, "linear_bias")
    linear = as_torch_multiplies(linear, input)
    if logit_scale is not None and (isinstance(logit_scale, Tensor) or varies(logit_scale)):
        input, linear_bias, logit_scale = scaled_linear(logit_scale, softcap, input, linear_bias)
    options = loss_options(input, weight=weight, row_weight=row_weight, denominator=denominator,
                           ignore_index=-100 if ignore_index is None else ignore_index, reduction=reduction,
                           zero_if_all_ignored=zero_if_all_ignored, label_smoothing=label_smoothing, z_loss=z_loss,
                           softcap=softcap, logit_scale=logit_scale, groups=groups)
    needs = _needs(input, linear_weight, linear_bias)
    # Gradients for an upstream gradient of 1 may underflow in fp16. Loss scaling prevents that, but
    # only if they are computed in backward. A second derivative under torch.func is refused only by
    # an op in backward.
    in_backward = (linear.mode == COMPACT or options.reduction == NONE or into is not None
                   or input.dtype is torch.float16 or (_transforming() and not _compiling()))
    which, wants_lse = _parse_extras(extras) if extras else (None, False)
    plain = _plain(input, linear_weight, linear_bias, target, options.weight, options.row_weight, options.denominator)
    wrap = None
    if not plain:
        if into is not None:
            raise RuntimeError("main_grad=True works only on plain tensors outside torch.compile")
        if _subclasses.has_dtensors(input, linear_weight, linear_bias, target, *options[:3]):
            _no_groups(options)
            input, linear_weight, linear_bias, target, options, wrap = _sharded.linear(
                "linear_cross_entropy", input, linear_weight, linear_bias, target, options)
            plain = _plain(input, linear_weight, linear_bias, target, *options[:3])
    call = (target, 0 if in_backward else needs, which, options, linear)
    op = _formulas.linear_cross_entropy_stats if extras else _formulas.linear_cross_entropy
    if plain and needs:
        if budget and in_backward:
            _check_budget(input, linear_weight, linear_bias, target, into is not None, False, needs, *options, *linear)
        saves = in_backward and options.groups is None and _may_save(input, linear_weight, target, linear)
        results = _formulas.linear_eager(input, linear_weight, linear_bias, (into, saves, call))
        if not extras:
            return results if wrap is None else wrap((results,))[0]
    else:
        kernel = op.raw if plain else op.dispatched
        loss, lse, _, _, _, *statistics = kernel(input, linear_weight, linear_bias, *_formulas.linear_arguments(*call))
        results = (loss, lse, *statistics)
    if wrap is not None:
        results = wrap(results)
    return _loss_output(which, wants_lse, *results) if extras else results[0]


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
                    entropy: bool = False, is_top: bool = False, mode: Mode = "auto", budget: int = 0,
                    group: Any = None, first_class: Optional[int] = None, classes: Optional[int] = None,
                    row_group: Any = None) -> LogProbs:
    """Log-probability of each target under softmax(logits / temperature), never above 0; if requested,
    the entropy, and whether the target has the largest logit (of equal ones, the first).

    For reinforcement learning: log-probability and entropy have gradients. logits = input @
    linear_weight.T + linear_bias are never stored. For ignored targets the results are 0 and False.
    group, first_class, classes, row_group: as in linear_cross_entropy. With row_group the ranks only
    compare their calls: results are per row.
    """
    no_gradient("temperature", temperature)
    if not 1.0 / F32_MAX <= temperature <= 1.0 / F32_TINY:
        raise ValueError(f"temperature is {temperature}, wanted a positive number with an inverse in fp32")
    input, linear_weight, linear_bias = _same_dtype(input, linear_weight, linear_bias)
    target = labels(target)
    logit_scale = None
    if varies(temperature) and softcap is None:  # as in scaled; 1 / temperature would become a constant
        dtype, wide = input.dtype, torch.promote_types(input.dtype, _f32)
        input, linear_bias = (t if t is None else (t.to(wide) / temperature).to(dtype) for t in (input, linear_bias))
    else:
        logit_scale = 1.0 / temperature
    groups = None
    if group is not None or row_group is not None or classes is not None or first_class is not None:
        groups = _groups.text(linear_weight.shape[0], input.is_cpu, group, first_class, classes, row_group)
    options = loss_options(input, ignore_index=ignore_index, reduction="none", softcap=softcap,
                           logit_scale=logit_scale, groups=groups)
    linear = as_torch_multiplies(linear_options(mode, "float32", budget), input)
    plain, wrap = _plain(input, linear_weight, linear_bias, target), None
    if not plain and _subclasses.has_dtensors(input, linear_weight, linear_bias, target):
        _no_groups(options)
        input, linear_weight, linear_bias, target, options, wrap = _sharded.linear(
            "linear_logprobs", input, linear_weight, linear_bias, target, options)
        plain = _plain(input, linear_weight, linear_bias, target)
    rest = (target, entropy, is_top, *flatten(options, linear))
    op = _formulas.linear_logprobs
    if not plain:
        results = op.dispatched(input, linear_weight, linear_bias, *rest)
    elif needs := _needs(input, linear_weight, linear_bias):
        if budget:
            _check_budget(input, linear_weight, linear_bias, target, False, entropy, needs, *options, *linear)
        saves = options.groups is None and _may_save(input, linear_weight, target, linear)
        results = op.eager(input, linear_weight, linear_bias, (saves, *rest))
    else:
        results = op.raw(input, linear_weight, linear_bias, *rest)
    logprob, entropies, _, top = results
    if is_top:
        top = top == target
        if ignore_index == -1:  # also the argmax of ignored rows
            top = top & (target != -1)
    if wrap is not None:
        logprob, entropies, top = wrap((logprob, entropies, top))
    return LogProbs(logprob, entropies if entropy else None, top if is_top else None)


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
        return _subclasses.call(op, input, theta, *rest)
    if _grad_enabled() and (input.requires_grad or theta.requires_grad):
        return op.eager(input, theta, rest)
    return op.raw(input, theta, *rest)

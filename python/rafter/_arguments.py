# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of the losses and converts them to what the ops take."""
import torch
from torch import Tensor

from . import _compat
from ._options import (ACCUMULATE, BASIC, BASIC_LINEAR, MEAN, MODES, REDUCTIONS, LinearOptions, LossOptions, pick)

_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_tf32_products = _compat.tf32_products
_f32 = torch.float32
F32_TINY, F32_MAX = 2.0**-149, torch.finfo(torch.float32).max  # the ops take numbers in fp32


def _constant(name, tensor, device):
    """A class weight, row weight or denominator in fp32. None of them gets a gradient."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        if _compiling():  # as a factor, the number may change without a recompilation
            return torch.ones((), dtype=_f32, device=device) * tensor
        return torch.full((), float(tensor), dtype=_f32, device=device)
    if tensor.requires_grad:
        raise ValueError(f"{name} requires a gradient, but Rafter computes none for it; pass {name}.detach()")
    return tensor if tensor.dtype is _f32 else tensor.to(_f32)


def no_gradient(name, number):
    """Refuses a number whose gradient would be lost."""
    if isinstance(number, Tensor) and number.requires_grad and _grad_enabled():
        raise ValueError(f"{name} requires a gradient, but Rafter computes none for it; pass {name}.detach()")


def varies(number):
    """Whether torch.compile traces the number as a variable, as it does once a number has had two
    values. An op's argument would make it a constant again, at the cost of a compilation per value."""
    return _compiling() and not _compat.is_constant(number)


def scaled(logit_scale, softcap, *tensors):
    """For a scale that is a tensor, or a number that varies: returns the tensors, multiplied by the
    logit_scale, and None. So PyTorch computes the scale's gradient, and the host never reads its
    value. The products are in fp32, because one in bf16 would round the scale too. With a softcap,
    which is applied before the scale, the tensors are returned as they are; then the scale becomes a
    number, and is returned in place of None."""
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


def scaled_linear(logit_scale, softcap, input, linear_bias):
    """scaled for the linear ops: input and bias keep their dtype."""
    dtype = input.dtype
    input, linear_bias, logit_scale = scaled(logit_scale, softcap, input, linear_bias)
    return input.to(dtype), None if linear_bias is None else linear_bias.to(dtype), logit_scale


def _check_scale(logit_scale):
    if not F32_TINY <= logit_scale <= F32_MAX:
        raise ValueError(f"logit_scale is {logit_scale}, wanted a positive fp32 number, or None for 1")


def labels(target):
    if target.dtype is torch.int64 or target.dtype is torch.int32:
        return target
    if target.is_floating_point():
        raise ValueError(f"target has dtype {target.dtype}, wanted class indices (int32 or int64): class probabilities "
                         "are not supported, use torch.nn.functional.cross_entropy")
    return target.long()


def loss_options(input, *, weight=None, row_weight=None, denominator=None, ignore_index=-100, reduction="mean",
                 zero_if_all_ignored=False, label_smoothing=0.0, z_loss=0.0, softcap=None, logit_scale=None,
                 groups=None):
    """Checks the user's options and converts them to the values that the ops take. All defaults
    give BASIC itself."""
    number = pick(REDUCTIONS, "reduction", reduction)
    if weight is None and row_weight is None and denominator is None and groups is None:
        # Types are compared too: a tensor of value 0 may require a gradient, which no_gradient refuses below.
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
    no_gradient("label_smoothing", label_smoothing)
    no_gradient("z_loss", z_loss)
    no_gradient("softcap", softcap)
    # The ops read 0 as "none", so a number that is 0 in fp32 must not reach them.
    if logit_scale is not None:
        _check_scale(logit_scale)
    if softcap and not F32_TINY <= softcap <= F32_MAX:
        raise ValueError(f"softcap is {softcap}, wanted a positive fp32 number, or None")
    return LossOptions(weight, row_weight, denominator, ignore_index, number, zero_if_all_ignored, label_smoothing,
                       z_loss, softcap or 0.0, logit_scale or 0.0, groups)


def linear_options(mode, accumulate, budget):
    number, accumulate = pick(MODES, "mode", mode), pick(ACCUMULATE, "accumulate", accumulate)
    if not (number or accumulate or budget):
        return BASIC_LINEAR
    if budget < 0:
        raise ValueError(f"budget is {budget}, wanted a number of bytes, or 0 for no limit")
    return LinearOptions(number, accumulate, budget)


def as_torch_multiplies(linear, input):
    """The LinearOptions with TF32 products if PyTorch's own product of the input would use them.
    Backward gets the saved options, so that it multiplies as forward did."""
    if input.dtype is _f32 and input.is_cuda and _tf32_products():
        return linear._replace(allow_tf32=True)
    return linear

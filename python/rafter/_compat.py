# SPDX-License-Identifier: Apache-2.0
"""Every private PyTorch API that the package uses, and why. Nothing else in the package touches
one.

Checked with PyTorch 2.13 (CPU). A new PyTorch release needs a run of tests/python; if one of these
names is gone, this file is the only one to change. The savings are from docs/pytorch.md.
"""
import functools

import torch
from torch.autograd import Function

# Whether a torch.func transform (grad, vmap, ...) is active. torch.func has no public query, and
# the eager path would bypass the transform.
functorch_active = torch._C._are_functorch_transforms_active

# Whether autocast is on for any device type. The public torch.is_autocast_enabled(device_type)
# needs the device type of the input first, and every call of linear_cross_entropy would pay for
# that.
any_autocast_enabled = torch._C._is_any_autocast_enabled


def kernel_of(op):
    """The op, called straight through the dispatcher. OpOverload.__call__ first looks for tensor
    subclasses, which the eager path has already done; skipping that saves 0.3 microseconds per
    call. _dispatch_call_boxed and OpOverload._handle have no public equivalent."""
    return functools.partial(torch._C._dispatch_call_boxed, op._handle)


def apply_of(function):
    """Function.apply without its Python part, which only serves function transforms; those take the
    dispatcher path. Saves 1.5 microseconds per call. The base class behind it,
    torch._C._FunctionBase, is private; super() reaches it without naming it."""
    return super(Function, function).apply


def delayed_error(message):
    """A function that returns its tensor with a grad_fn that raises `message`. The public
    torch.autograd.function.once_differentiable uses the same node, but skips it when no upstream
    gradient requires a gradient, so a missing term would go unnoticed."""
    return torch._C._functions.DelayedError(message.encode(), 1)


# OpOverload._schema: the public torch.ops API gives no access to an op's schema.


def op_name(op):
    """The op's name, as in "rafter.act"."""
    return op._schema.name.replace("::", ".")


def argument_names(op):
    return [argument.name for argument in op._schema.arguments]


def is_mutable(op):
    """Whether the op writes to one of its arguments."""
    return op._schema.is_mutable

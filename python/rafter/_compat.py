# SPDX-License-Identifier: Apache-2.0
"""Every private PyTorch API that the package uses, and why. Nothing else in the package touches
one, except autograd.cpp, which is compiled for one version of PyTorch.

Checked with PyTorch 2.13 (CPU). A new PyTorch release needs a run of tests/python; if one of these
names is gone, this file is the only one to change. The savings are from docs/pytorch.md.
"""
import functools

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import Function, forward_ad
from torch.utils import _pytree

# Whether a torch.func transform (grad, vmap, ...) is active. torch.func has no public query, and
# the eager path would bypass the transform.
functorch_active = torch._C._are_functorch_transforms_active

# Whether autocast is on for any device type. The public torch.is_autocast_enabled(device_type)
# needs the device type of the input first, and every call of linear_cross_entropy would pay for
# that.
any_autocast_enabled = torch._C._is_any_autocast_enabled


# Whether a tensor is a batch inside vmap. autograd.grad(is_grads_batched=True) still uses the vmap from
# before torch.func, which functorch_active does not notice. Neither vmap has a public query.
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_is_batched = torch._C._functorch.is_batchedtensor


def is_batched(tensor):
    return _is_legacy_batched(tensor) or _is_batched(tensor)


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


# The module whose attribute _current_level is the open level of forward-mode AD, or -1. There is no
# public query. The module itself, because reading the attribute is cheaper than a call.
forward_mode = forward_ad


def has_tangent(tensor):
    """Whether forward-mode AD differentiates with respect to the tensor."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def is_constant(number):
    """Whether torch.compile traces the number as a constant, not as a symbol. Documented, but
    experimental. Imported here because the import takes a while, and only torch.compile needs it."""
    from torch.fx.experimental.symbolic_shapes import has_static_value
    return has_static_value(number)


def autograd_kernel(op, backward, setup_context=None):
    """The Autograd kernel that the public torch.library.register_autograd would register. That
    function leaves no room for a check in front of the kernel."""
    return make_autograd_impl(op, Info(backward, setup_context))


def raise_when_differentiated(message, tensor, inputs):
    """The tensor with a grad_fn that raises `message`, and whose next nodes are those of `inputs`:
    autograd skips a node that leads to none of the tensors it differentiates with respect to. The
    public torch.autograd.function.once_differentiable uses the same node, but without `inputs`, and
    only if an upstream gradient requires a gradient."""
    return torch._C._functions.DelayedError(message.encode(), 1 + len(inputs))(tensor, *inputs)[0]


# register_named_tuple(cls, serialized_type_name=name): lets torch.export.save write a program that
# returns a cls. The public torch.export.register_dataclass takes only dataclasses.
register_named_tuple = _pytree._register_namedtuple


# OpOverload._schema: the public torch.ops API gives no access to an op's schema.


def op_name(op):
    """The op's name, as in "rafter.act"."""
    return "rafter." + op._schema.name.split("::")[1]


def argument_names(op):
    return [argument.name for argument in op._schema.arguments]


def is_mutable(op):
    """Whether the op writes to one of its arguments."""
    return op._schema.is_mutable


def tf32_products():
    """Whether PyTorch multiplies fp32 matrices as TF32 on CUDA, however that was set."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# What torch.compiler.assume_constant_result would do, without importing torch._dynamo at once. Dynamo
# cannot trace the function. Its guards contain the setting, so that a change compiles again.
tf32_products._dynamo_marked_constant = True


def wrapper_tensor(cls, shape, dtype, device):
    """A tensor of a subclass that has no memory of its own; every op goes to its __torch_dispatch__.
    PyTorch documents no other way to make one."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def process_group(name):
    """The ProcessGroup of that group_name. Functional collectives find theirs in the same way; there is
    no public one. Imported here: not every PyTorch has torch.distributed."""
    from torch.distributed.distributed_c10d import _resolve_process_group
    return _resolve_process_group(name)


def version(tensor):
    """Autograd's count of in-place writes to the tensor; None for one of inference mode, which has none."""
    return None if tensor.is_inference() else tensor._version

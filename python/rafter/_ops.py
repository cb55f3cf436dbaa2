# SPDX-License-Identifier: Apache-2.0
"""Loads the library of ops and registers a fake kernel and a gradient for each.

Every differentiable op has two entry points that share one gradient formula:

- `torch.ops.rafter.NAME`, with its autograd formula registered with the dispatcher: for
  torch.compile, tensor subclasses, function transforms, and direct calls of the op.
- `Op.eager`, around `torch.ops.rafter._NAME`, the same kernel below autograd: for plain tensors. The
  dispatcher's Python autograd kernel costs about 15 microseconds per call, a torch.autograd.Function
  (`Op.python`) about 3, an autograd node in C++ (autograd.cpp) less than 1; figures in
  docs/pytorch.md. Such nodes are not part of PyTorch's stable ABI: the package has them for the
  version that it was built with, and for the ops where host time matters. All else is a Function.
"""
import functools
import importlib
import os
import re

import torch
from torch.autograd import Function

from . import _compat
from ._namespace import NAMESPACE

torch.ops.load_library(os.path.join(os.path.dirname(os.path.abspath(__file__)), "librafter_torch.so"))
OPS = getattr(torch.ops, NAMESPACE)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
NAMES: list[str] = []  # all ops; the tests check that each has samples

direct = _compat.apply_of
_compiling = torch.compiler.is_dynamo_compiling


def _nodes():
    """The module with the autograd nodes in C++; None if the package has none for this PyTorch, whose
    version is in the module's name, and this Python."""
    try:
        return importlib.import_module("._autograd_" + re.sub("[^A-Za-z0-9]", "_", torch.__version__), __package__)
    except ImportError:
        return None


NODES = _nodes()


def accelerated(name, python, constants=None):
    """The op's eager path: its node in C++ if there is one, otherwise `python`. Both take the same
    arguments. constants: the arguments of the op after the inputs, if `python` knows them already."""
    return python if NODES is None else NODES.accelerated(name, python, constants)


def batched(upstream):
    """Whether an eager backward runs under vmap: is_grads_batched, jacobian(vectorize=True),
    torch.func.vmap around autograd.grad. vmap calls the kernels once per upstream gradient, but
    only those that write to none of their arguments."""
    return not _compiling() and _compat.is_batched(upstream)


def public(name):
    return getattr(OPS, name).default


@functools.cache
def below_autograd(name):
    """The op's kernel, invisible to autograd. The caller has checked that no argument is a tensor
    subclass."""
    return _compat.kernel_of(public("_" + name))


def kernels():
    """below_autograd, for the backward of an eager op; public, if compiled autograd traces that
    backward, because torch.compile can trace only a call of the op itself."""
    return public if _compiling() else below_autograd


_NO_DOUBLE_BACKWARD = "rafter: double backward (the gradient of a gradient) is not implemented"
_NO_FORWARD_MODE = "rafter: forward-mode AD (jvp, jacfwd, dual tensors) is not implemented; use backward"
MASK_BYTES = 16 << 20  # from this size on relu saves a mask instead of its result
if NODES is not None:
    NODES.configure(_NO_DOUBLE_BACKWARD, _NO_FORWARD_MODE, MASK_BYTES)

_forward_mode = _compat.forward_mode
_transforming = _compat.functorch_active


def _refuse(ctx, *grads):
    raise RuntimeError(_NO_DOUBLE_BACKWARD)


def _refuse_jvp(ctx, *tangents):
    raise NotImplementedError(_NO_FORWARD_MODE)


def _refuse_tangents(args):
    """Raises if forward-mode AD differentiates with respect to one of the args: the kernels would
    drop its tangent."""
    if any(isinstance(a, torch.Tensor) and _compat.has_tangent(a) for a in args):
        raise NotImplementedError(_NO_FORWARD_MODE)


def no_double_backward(backward):
    """A backward whose results, under create_graph, raise an error when they are differentiated,
    whether with respect to what backward started from (the saved tensors) or to the upstream
    gradients."""

    @functools.wraps(backward)
    def guarded(ctx, *grads):
        if _forward_mode._current_level >= 0:
            _refuse_tangents(grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        # Read before backward, which may overwrite a saved tensor.
        inputs = [t for t in (*ctx.saved_tensors, *grads) if t is not None and t.requires_grad]
        with torch.no_grad():
            results = backward(ctx, *grads)
        return tuple(r if r is None else _compat.raise_when_differentiated(
            _NO_DOUBLE_BACKWARD, r.detach().requires_grad_(), inputs) for r in results)

    return guarded


def _register_autograd(name, backward, setup_context=None):
    """torch.library.register_autograd, for an op that also refuses forward-mode AD."""
    op = public(name)
    kernel = _compat.autograd_kernel(op, backward, setup_context)

    def checked(keyset, *args):
        if _forward_mode._current_level >= 0:
            _refuse_tangents(args)
        return kernel(keyset, *args)

    _library.impl(name, checked, "Autograd", with_keyset=True)


def _on_one_device(name, fake):
    """The fake kernel, after the check of devices that the real one makes. Without it, a call with
    tensors on the CPU and on the meta device, which PyTorch sends to the fake kernel, would return
    uninitialised memory."""
    names = _compat.argument_names(public(name))

    @functools.wraps(fake)
    def checked(*args):
        device = None
        for argument, given in zip(names, args):
            if isinstance(given, torch.Tensor):
                device = device or given.device
                if given.device != device:
                    raise RuntimeError(f"rafter.{name}: {argument} is on {given.device}, wanted the first tensor's "
                                       f"device, {device}")
        return fake(*args)

    return checked


def implement(name, function):
    """An op whose kernel is a Python function, for tensors of any device."""
    _library.impl(name, function, "CompositeExplicitAutograd")


def declare(name, fake, differentiable=False):
    """Registers the fake kernel of an op under both names, and makes the one with the underscore
    invisible to autograd. An op that computes a gradient refuses to be differentiated itself."""
    NAMES.append(name)
    fake = _on_one_device(name, fake)
    for each in (name, "_" + name):
        torch.library.register_fake(f"{NAMESPACE}::{each}", fake)
    _library.impl("_" + name, torch.library.fallthrough_kernel, "Autograd")
    if not differentiable and not _compat.is_mutable(public(name)):
        _register_autograd(name, _refuse)


@functools.cache
def _transformable_gradient(name):
    """An op that computes a gradient, under torch.func transforms: vmap calls it once per entry, and
    differentiating its results raises."""

    class Gradient(Function):
        generate_vmap_rule = True
        forward = staticmethod(public("_" + name))
        backward = staticmethod(_refuse)
        jvp = staticmethod(_refuse_jvp)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    return Gradient.apply


def _transformable(name, save, backward):
    """The op for torch.func transforms (grad, vjp, jacrev, vmap), which only take a Function that
    saves its tensors in setup_context."""

    class Transformable(Function):
        generate_vmap_rule = True
        forward = staticmethod(public("_" + name))
        jvp = staticmethod(_refuse_jvp)

        @staticmethod
        def setup_context(ctx, inputs, output):
            save(ctx, inputs, output)
            ctx.none = (None,) * len(inputs)

    def formula(ctx, *grads):
        gradients = backward(_transformable_gradient, ctx, *grads)
        return (*gradients, *ctx.none[len(gradients):])

    Transformable.backward = staticmethod(formula)
    Transformable.__name__ = name
    return Transformable.apply


class Op:
    """An op with a gradient for its first `inputs` arguments.

    fake(*args): returns empty results with the right shapes and dtypes.
    save(ctx, args, results): saves what backward needs.
    backward(op, ctx, *grads): computes the gradients with op("NAME_backward").
    forward(raw): makes a forward(ctx, *inputs, rest) for the eager path, for ops where the general
    one is too slow or returns more than it should.
    """

    def __init__(self, name, inputs, fake, save, backward, forward=None):
        declare(name, fake, differentiable=True)
        self.op = public(name)
        self.transformed = _transformable(name, save, backward)
        self.raw = raw = below_autograd(name)
        no_gradients = (None,) * (len(_compat.argument_names(self.op)) - inputs)

        @no_double_backward
        def formula(ctx, *grads):
            return (*backward(public, ctx, *grads), *no_gradients)

        def setup_context(ctx, inputs, output):
            save(ctx, inputs, output)

        _register_autograd(name, formula, setup_context)

        def general(ctx, *args):
            args = args[:-1] + args[-1]
            results = raw(*args)
            save(ctx, args, results)
            return results

        @no_double_backward
        def eager_backward(ctx, *grads):
            return (*backward(kernels(), ctx, *grads), None)

        # The arguments after the first `inputs` are passed as one tuple, because a Function
        # inspects each of its arguments. grad_fn shows the name of the class.
        members = {"forward": staticmethod(forward(raw) if forward else general),
                   "backward": staticmethod(eager_backward)}
        self.python = direct(type(name, (Function,), members))
        self.eager = accelerated(name, self.python)

    def dispatched(self, *args):
        """The op where the eager path cannot run: torch.compile, torch.func, tensor subclasses."""
        if _transforming() and not _compiling():
            return self.transformed(*args)
        return self.op(*args)

# SPDX-License-Identifier: Apache-2.0
"""The dispatcher's side of Rafter: loads the library of ops and gives each its fake kernel and its gradient.

Every differentiable op has two ways in, which share one gradient:

- `torch.ops.rafter.NAME`, with its autograd formula registered with the dispatcher: for torch.compile, tensor subclasses,
  function transforms, and whoever calls the op directly.
- `Op.eager`, a torch.autograd.Function over `torch.ops.rafter._NAME`, the same kernel below autograd: for plain tensors, because
  the dispatcher's Python autograd kernel costs some 15 microseconds a call and this some 3 (docs/pytorch.md has the figures).
"""
import functools
import os

import torch
from torch.autograd import Function

torch.ops.load_library(os.path.join(os.path.dirname(os.path.abspath(__file__)), "librafter_torch.so"))
_library = torch.library.Library("rafter", "FRAGMENT")
NAMES: list[str] = []  # of all ops, for the tests


def public(name):
    return getattr(torch.ops.rafter, name).default


@functools.cache
def below_autograd(name):
    """The kernel that autograd does not see, straight from the dispatcher: OpOverload.__call__ would look for tensor subclasses
    first, and a caller of this has done that."""
    return functools.partial(torch._C._dispatch_call_boxed, public("_" + name)._handle)


def direct(function):
    """Function.apply without its Python part, which is for function transforms; those come in by the dispatcher."""
    return super(Function, function).apply


def define(name, schema, function):
    """An op whose kernel is Python, for all devices, under both names."""
    for each in (name, "_" + name):
        _library.define(each + schema)
        _library.impl(each, function, "CompositeExplicitAutograd")


_TWICE = "rafter: the gradient of a gradient is not implemented"


def _refuse(ctx, *grads):
    raise RuntimeError(_TWICE)


def once(backward):
    """A backward whose gradients, where create_graph asks for a graph of them, raise when they are differentiated in turn. (What
    torch.autograd.function.once_differentiable does, except that it trusts upstream gradients that require none: a term would be
    missing silently.)"""

    @functools.wraps(backward)
    def guarded(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        tie = torch._C._functions.DelayedError(_TWICE.encode(), 1)
        return tuple(None if r is None else tie(r.detach().requires_grad_()) for r in results)

    return guarded


def declare(name, fake, differentiable=False):
    """Registers the fake kernel of an op under both its names, and lets the one with the underscore pass autograd by. An op
    that is part of a gradient refuses to be differentiated itself."""
    NAMES.append(name)
    for each in (name, "_" + name):
        torch.library.register_fake("rafter::" + each, fake)
    _library.impl("_" + name, torch.library.fallthrough_kernel, "Autograd")
    if not differentiable and not public(name)._schema.is_mutable:
        torch.library.register_autograd("rafter::" + name, _refuse)


class Op:
    """An op with a gradient for its first `inputs` arguments.

    fake(*args): the results' shapes and dtypes. save(ctx, args, results): keeps what backward needs.
    backward(op, ctx, *grads): the gradients, by way of op("NAME_backward").
    forward(raw): makes the eager path's forward(ctx, *inputs, rest), where the general one is too slow for a small op or returns
    more than it should.
    """

    def __init__(self, name, inputs, fake, save, backward, forward=None):
        declare(name, fake, differentiable=True)
        self.op = public(name)
        self.raw = raw = below_autograd(name)
        others = (None,) * (len(self.op._schema.arguments) - inputs)

        @once
        def formula(ctx, *grads):
            return (*backward(public, ctx, *grads), *others)

        def keep(ctx, inputs, output):
            save(ctx, inputs, output)

        torch.library.register_autograd("rafter::" + name, formula, setup_context=keep)

        def general(ctx, *args):
            args = args[:-1] + args[-1]
            results = raw(*args)
            save(ctx, args, results)
            return results

        @once
        def eager_backward(ctx, *grads):
            return (*backward(below_autograd, ctx, *grads), None)

        # The arguments after the first `inputs` come as one tuple: a Function looks at each of its arguments. The class's name
        # is the one that grad_fn shows.
        members = {"forward": staticmethod(forward(raw) if forward else general), "backward": staticmethod(eager_backward)}
        self.eager = direct(type(name, (Function,), members))

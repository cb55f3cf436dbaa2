# SPDX-License-Identifier: Apache-2.0
"""The autograd nodes in C++ (autograd.cpp) against the Functions in Python that they stand for: the same
bits, names and errors."""
import importlib.machinery
import os
import re
import subprocess
import sys
import weakref

import pytest
import torch
from torch.autograd import forward_ad

import rafter
from rafter import _formulas, _ops
from rafter._options import ACTS, LossOptions
from support import in_threads, labels, leaf, normal, on_devices, parametrize, uneven, with_saved


def _act(name, dim=0):
    key = (ACTS[name], dim)
    return _formulas.act_eager[key], _formulas.act_python(*key)


def _op(name):
    op = getattr(_formulas, name)
    return op.eager, op.python


def _options(device):
    return LossOptions(weight=normal(9, device=device, seed=4).abs(), row_weight=normal(6, device=device, seed=5),
                       denominator=torch.tensor(3.5, device=device), label_smoothing=0.1, z_loss=1e-3, softcap=4.0)


def problems(device):
    """By name: both paths, their inputs, and the tuple of further arguments, if they take one."""
    x, y = normal(6, 9, device=device, scale=3.0), labels((6,), 9, device)
    cube, theta = normal(2, 3, 2, 8, device=device), normal(2, 8, device=device, seed=2)
    positions = torch.tensor([5, 0, 2], device=device)
    return {
        "relu": (*_act("relu"), [x]),
        "sigmoid": (*_act("sigmoid"), [x]),
        "silu": (*_act("silu"), [x]),
        "softmax": (*_act("softmax", 0), [x]),
        "softmax -1": (*_act("softmax", -1), [x]),
        "logsumexp": (*_op("logsumexp"), [x], (1, False, 0)),
        "logsumexp keepdim": (*_op("logsumexp"), [x], (0, True, 0)),
        "logsumexp of a cube": (*_op("logsumexp"), [cube], (-2,)),
        "logsumexp_rounded": (_formulas.logsumexp_rounded_eager, _formulas.logsumexp_rounded_python, [x], (1, False, 0)),
        "cross_entropy": (*_op("cross_entropy"), [x], (y,)),
        "cross_entropy options": (*_op("cross_entropy"), [x], (y, *_options(device))),
        "cross_entropy none": (*_op("cross_entropy"), [x], (y, *LossOptions(reduction=2))),
        "lrpe_cosine": (*_op("lrpe_cosine"), [cube, theta], (None, 3, ACTS["silu"], 0, 0)),
        "lrpe_cosine positions": (*_op("lrpe_cosine"), [cube, theta], (positions, 0, ACTS["softmax"], 1, 0)),
    }


NAMES = list(problems("cpu"))


def paths(name, device="cpu", dtype=torch.float32):
    """The C++ and the Python path, as functions of tensors, and those tensors."""
    if _ops.NODES is None:
        pytest.skip("the package has no autograd nodes for this version of PyTorch")
    nodes, python, tensors, *rest = problems(device)[name]
    assert nodes is not python
    return [lambda *given: nodes(*given, *rest), lambda *given: python(*given, *rest)], [t.to(dtype) for t in tensors]


def outcome(function):
    """What the function returns, or the error that it raises."""
    try:
        return function()
    except Exception as error:
        return type(error), str(error)


def same_errors(functions):
    """Asserts that both raise the same error, and returns its message."""
    ours, expected = map(outcome, functions)
    assert isinstance(expected, tuple) and issubclass(expected[0], Exception), expected
    assert ours == expected
    return expected[1]


def equal(ours, expected):
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.stride() == b.stride() and a.requires_grad == b.requires_grad
            assert torch.equal(a, b)


# ---- the module is the right one


def test_nodes_are_used_if_the_package_has_them():
    folder = os.path.dirname(os.path.abspath(rafter.__file__))
    name = "_autograd_" + re.sub("[^A-Za-z0-9]", "_", torch.__version__)
    there = any(os.path.exists(os.path.join(folder, name + s)) for s in importlib.machinery.EXTENSION_SUFFIXES)
    assert (_ops.NODES is not None) == there


def test_another_version_of_pytorch_gets_functions_in_python():
    code = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.10.0+other")
import rafter
from rafter import _formulas, _ops
assert _ops.NODES is None and _formulas.logsumexp.eager is _formulas.logsumexp.python
x = torch.ones(3, 4, requires_grad=True)
y = rafter.silu(x)
y.sum().backward()
assert isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction) and x.grad is not None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(rafter.__file__))})
    assert done.returncode == 0, done.stderr


@parametrize("name", ["linear_cross_entropy", "linear_logprobs", "cross_entropy_stats"])
def test_other_ops_stay_in_python(name):
    op = getattr(_formulas, name)
    assert op.eager is op.python


# ---- the same results


@on_devices
@parametrize("dtype", [torch.float32, torch.bfloat16])
@parametrize("name", NAMES)
def test_results_and_gradients_are_the_same_bits(device, dtype, name):
    functions, tensors = paths(name, device, dtype)
    seen = []
    for function in functions:
        given = [leaf(t) for t in tensors]
        out, saved = with_saved(function, *given)
        seen.append((out, *saved, *torch.autograd.grad(out, given, uneven(out))))
        assert out.grad_fn.name() == re.sub(" .*", "", name) + "Backward"
    equal(*seen)


def test_relu_with_a_mask():
    """The node that large tensors on CUDA get, on the CPU."""
    paths("relu")
    relu = _ops.NODES.accelerated("relu_mask", None, ())
    x, dy = leaf(normal(5, 7)), normal(7, 5, seed=1).t()
    out, (mask,) = with_saved(relu, x)
    assert mask.dtype is torch.uint8 and mask.numel() == 5
    equal([out.detach(), *torch.autograd.grad(out, x, dy)], [x.detach().relu(), (dy * (x > 0)).contiguous()])


@parametrize("frozen", [0, 1])
@parametrize("name", ["lrpe_cosine", "lrpe_cosine positions"])
def test_only_needed_gradients(name, frozen):
    functions, tensors = paths(name)
    seen = []
    for function in functions:
        given = [t if i == frozen else leaf(t) for i, t in enumerate(tensors)]
        out = function(*given)
        out.backward(uneven(out))
        both = [leaf(t) for t in tensors]
        out = function(*both)
        seen.append(([t.grad for t in given], torch.autograd.grad(out, both[1 - frozen], uneven(out))))
    equal(seen[0][0], seen[1][0])
    equal(seen[0][1], seen[1][1])


@on_devices
@parametrize("name", NAMES)
def test_without_an_upstream_gradient_the_gradients_are_zero(device, name):
    """As if the upstream gradient were zero, which is what autograd gives a Function in Python."""
    class Undefined(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return None

    functions, tensors = paths(name, device)
    seen = []
    for function in functions:
        given = [leaf(t) for t in tensors]
        out = Undefined.apply(function(*given))
        seen.append(torch.autograd.grad(out, given, torch.ones_like(out), allow_unused=True))
    equal(*seen)


@parametrize("name", NAMES)
def test_batched_upstream_gradients(name):
    functions, tensors = paths(name)
    seen = []
    for function in functions:
        given = [leaf(t) for t in tensors]
        out = function(*given)
        upstream = torch.stack([uneven(out), torch.ones_like(out), torch.zeros_like(out)])
        seen.append(torch.autograd.grad(out, given, upstream, is_grads_batched=True))
    equal(*seen)


@parametrize("name", ["silu", "softmax", "cross_entropy options", "lrpe_cosine"])
def test_compiled_autograd_of_several_shapes_and_undefined_gradients(name):
    functions, tensors = paths(name)
    rows = [6] if name.startswith("cross") else [6, 4, 5]

    def run(out):
        out.backward(torch.ones_like(out))

    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager")
    for count in rows:
        seen = []
        for function, backward in zip(functions, (compiled, run)):
            given = [leaf(t[:count]) for t in tensors]
            with torch._dynamo.config.patch(compiled_autograd=True):
                backward(function(*given) * 2)
            seen.append([t.grad for t in given])
        equal(*seen)


def test_arguments_that_only_python_converts():
    np = pytest.importorskip("numpy")
    x, y = leaf(normal(6, 9)), labels((6,), 9, "cpu")
    torch.testing.assert_close(rafter.softmax(x, np.int64(1)), rafter.softmax(x, 1), rtol=0, atol=0)
    torch.testing.assert_close(rafter.cross_entropy(x, y, label_smoothing=1),
                               rafter.cross_entropy(x, y, label_smoothing=1.0), rtol=0, atol=0)


# ---- the same errors


@parametrize("name", NAMES)
def test_second_derivatives_are_refused_alike(name):
    functions, tensors = paths(name)

    def second(function, by_upstream):
        given = [leaf(t) for t in tensors]
        out = function(*given)
        upstream = uneven(out).requires_grad_()
        results = torch.autograd.grad(out, given, upstream, create_graph=True)
        assert all(r.requires_grad for r in results)
        torch.autograd.grad(sum(r.sum() for r in results), upstream if by_upstream else given[0])

    for by_upstream in (False, True):
        message = same_errors([lambda f=f: second(f, by_upstream) for f in functions])
        assert "gradient of a gradient" in message


@parametrize("name", NAMES)
def test_a_freed_graph_is_refused_alike(name):
    functions, tensors = paths(name)

    def twice(function):
        out = function(*map(leaf, tensors)).sum()
        out.backward()
        out.backward()

    assert "second time" in same_errors([lambda f=f: twice(f) for f in functions])


@parametrize("name", NAMES)
def test_modified_tensors_are_noticed_alike(name):
    functions, tensors = paths(name)
    of_result = name.startswith(("relu", "softmax", "logsumexp")) and name != "logsumexp_rounded"

    def modified(function):
        given = [leaf(t) * 1.0 for t in tensors]
        out = function(*given)
        with torch.no_grad():
            (out if of_result else given[-1]).add_(1.0)
        out.sum().backward()

    message = same_errors([lambda f=f: modified(f) for f in functions])
    assert "modified by an inplace operation" in message


@parametrize("name", NAMES)
def test_tangents_are_refused_alike(name):
    functions, tensors = paths(name)

    def dual(function):
        given = [leaf(t) for t in tensors]
        out = function(*given)
        with forward_ad.dual_level():
            upstream = forward_ad.make_dual(uneven(out), torch.ones_like(out))
            torch.autograd.grad(out, given, upstream)

    assert "forward-mode AD" in same_errors([lambda f=f: dual(f) for f in functions])


WRONG = [("softmax", "x", 7), ("silu", "integers", 0), ("logsumexp", "x", (7,)), ("logsumexp", "x", (2**70,)),
         ("logsumexp", "x", (1.5,)), ("logsumexp", "x", ()), ("logsumexp", "x", (0, False, 99)),
         ("logsumexp", "x", (0, False, 0, 0)), ("logsumexp", "x", None), ("logsumexp", "integers", (0,)),
         ("logsumexp", "none", (0,)), ("cross_entropy", "x", ("labels",)), ("cross_entropy", "x", (None,))]


@parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused_alike(wrong):
    name, tensor, rest = wrong
    paths(name)
    x = {"x": leaf(normal(6, 9)), "integers": torch.ones(3, dtype=torch.int32), "none": None}[tensor]
    if name in ACTS:
        same_errors([lambda f=f: f(x) for f in _act(name, rest)])
        return
    if rest == ("labels",):
        rest = (torch.full((6,), 50),)
    same_errors([lambda f=f: f(x, rest) for f in _op(name)])


# ---- what only the nodes do


def test_backward_runs_no_python():
    """So it does not take the GIL either."""
    for name in NAMES:
        functions, tensors = paths(name)
        out = functions[0](*map(leaf, tensors))
        upstream = uneven(out)
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_filename) if event == "call" else None)
        try:
            out.backward(upstream)
        finally:
            sys.setprofile(None)
        assert not [c for c in calls if "rafter" in c]


def test_graphs_are_freed():
    for name in NAMES:
        functions, tensors = paths(name)
        given = [leaf(t) * 1.0 for t in tensors]
        out = functions[0](*given)
        kept = [weakref.ref(t) for t in (out, *given)]
        del given, out
        assert not [r for r in kept if r() is not None], name


def test_threads():
    """Forward and backward without the GIL, each thread with its own graph, and all with one graph."""
    functions, tensors = paths("silu")
    x = leaf(tensors[0])
    shared = functions[0](x)
    (expected,) = torch.autograd.grad(shared.sum(), x, retain_graph=True)
    wrong = []

    def work():
        for _ in range(200):
            mine = leaf(x)
            results = (*torch.autograd.grad(functions[0](mine).sum(), mine),
                       *torch.autograd.grad(shared.sum(), x, retain_graph=True))
            if not all(torch.equal(r, expected) for r in results):
                wrong.append(1)

    in_threads(work, 4)
    assert not wrong

# SPDX-License-Identifier: Apache-2.0
"""Derivatives are right or refused, never silently dropped: second derivatives, forward-mode AD,
options that are tensors, and a mean over a zero sum of class weights."""
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import rafter
from support import in_dtypes, labels, leaf, loss_reference, normal, on_devices, parametrize, skip_unless
from test_autograd import NAMES, problem


class Subclass(torch.Tensor):
    """A subclass of Tensor takes the dispatcher path."""


def as_subclass(x):
    return x.detach().as_subclass(Subclass).requires_grad_(x.requires_grad)


PATHS = {"eager": lambda x: x, "dispatcher": as_subclass}

# ---- second derivatives


def refuses_double_backward():
    return pytest.raises(RuntimeError, match="gradient of a gradient")


@parametrize("path", list(PATHS))
@parametrize("name", NAMES)
def test_a_gradient_penalty_is_refused(name, path):
    """Also where autograd looks only for paths to x: autograd.grad, and backward(inputs=)."""
    function, x = problem(name, "cpu")
    x = PATHS[path](x)
    loss = function(x).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    penalty = loss + dx.square().sum()
    with refuses_double_backward():
        torch.autograd.grad(penalty, x, retain_graph=True)
    with refuses_double_backward():
        penalty.backward(inputs=[x], retain_graph=True)
    with refuses_double_backward():
        penalty.backward()


@parametrize("name", NAMES)
def test_a_gradient_penalty_on_an_earlier_tensor_is_refused(name):
    function, x = problem(name, "cpu")
    loss = function(x.tanh()).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with refuses_double_backward():
        torch.autograd.grad(dx.square().sum(), x)


@parametrize("name", NAMES)
def test_the_derivative_by_the_upstream_gradient_is_refused(name):
    function, x = problem(name, "cpu")
    out = function(x)
    up = leaf(normal(*out.shape))
    (dx,) = torch.autograd.grad(out, x, up, create_graph=True)
    with refuses_double_backward():
        torch.autograd.grad(dx.sum(), up)


@parametrize("function", ["hessian", "hvp", "vhp", "jvp"])
@parametrize("name", NAMES)
def test_autograd_functional_is_refused(name, function):
    body, x = problem(name, "cpu")
    arguments = (lambda x: body(x).sum(), x.detach())
    if function != "hessian":
        arguments += (torch.ones_like(x),)
    with refuses_double_backward():
        getattr(torch.autograd.functional, function)(*arguments)


def test_other_second_derivatives_are_refused():
    """With respect to the weight, the bias and theta; of an in-place backward, of extras, and of the
    gradients that main_grad leaves."""
    x, w, b, y = leaf(normal(6, 8)), leaf(normal(9, 8)), leaf(normal(9)), labels((6,), 9, "cpu")
    z, cube, theta = normal(6, 9), leaf(normal(2, 3, 2, 8)), leaf(normal(2, 8))
    w.main_grad = torch.zeros(9, 8)
    linear = lambda **options: rafter.linear_cross_entropy(x, w, y, linear_bias=b, **options)  # noqa: E731
    losses = [
        (linear(), [x, w, b]),
        (linear(mode="compact"), [x, w, b]),
        (linear(extras="entropy").loss, [x, w, b]),
        (linear(main_grad=True), [x, b]),
        (rafter.lrpe_cosine(cube, theta).sum(), [cube, theta]),
    ]
    for loss, inputs in losses:
        for first in torch.autograd.grad(loss, inputs, create_graph=True):
            for tensor in inputs:
                with refuses_double_backward():
                    torch.autograd.grad(first.square().sum(), tensor, retain_graph=True)
    for options in (dict(inplace_backward=True), dict(extras="lse")):
        logits = leaf(z)
        loss = rafter.cross_entropy(logits * 2, y, **options)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        with refuses_double_backward():
            torch.autograd.grad(first.square().sum(), logits)


@parametrize("name", NAMES)
def test_a_gradient_penalty_of_a_compiled_function_is_refused(name):
    """By PyTorch, unless the compiled backward reads no input of the function: then PyTorch drops the
    term, as it does for its own softmax."""
    if name in ("linear_cross_entropy", "relu", "softmax"):
        return
    torch.compiler.reset()
    function, x = problem(name, "cpu")
    loss = torch.compile(lambda x: function(x).sum(), backend="aot_eager")(x)
    with pytest.raises(RuntimeError, match="double backward"):
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.autograd.grad(loss + dx.square().sum(), x)


# ---- forward-mode AD


def refuses_forward_mode():
    return pytest.raises(NotImplementedError, match="forward-mode AD")


@parametrize("name", NAMES)
def test_forward_mode_is_refused(name):
    function, x = problem(name, "cpu")
    v = torch.ones_like(x)
    with refuses_forward_mode():
        torch.func.jvp(function, (x.detach(),), (v,))
    with refuses_forward_mode():
        torch.func.jacfwd(function)(x.detach())
    with refuses_forward_mode():
        torch.func.jvp(lambda x: torch.func.jvp(function, (x,), (v,))[1], (x.detach(),), (v,))
    with forward_ad.dual_level():
        for tensor in (x, x.detach(), as_subclass(x), as_subclass(x.detach())):
            with refuses_forward_mode():
                function(forward_ad.make_dual(tensor, v))


def test_forward_mode_of_a_compiled_function_is_refused():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: torch.func.jvp(rafter.silu, (x,), (x,)), backend="aot_eager")
    with pytest.raises(Exception, match="forward-mode AD"):
        compiled(normal(6, 9))


@parametrize("name", NAMES)
def test_other_tensors_may_have_tangents(name):
    """Inside a dual level, functions of tensors without a tangent work."""
    function, x = problem(name, "cpu")
    expected = function(x)
    up = normal(*expected.shape)
    (gradient,) = torch.autograd.grad(expected, x, up)
    with forward_ad.dual_level():
        forward_ad.make_dual(x.detach(), torch.ones_like(x))
        torch.testing.assert_close(function(x.detach()), expected.detach())
        actual = function(x)
        torch.testing.assert_close(torch.autograd.grad(actual, x, up, retain_graph=True)[0], gradient)
        with refuses_forward_mode():
            torch.autograd.grad(actual, x, forward_ad.make_dual(up, up))


def test_tangents_of_any_argument_are_refused():
    x, w, b, y = normal(6, 8), normal(9, 8), normal(9), labels((6,), 9, "cpu")
    cube, theta = normal(2, 3, 2, 8), normal(2, 8)
    with forward_ad.dual_level():
        dual = lambda t: forward_ad.make_dual(t, torch.ones_like(t))  # noqa: E731
        calls = [
            lambda: rafter.linear_cross_entropy(x, dual(w), y),
            lambda: rafter.linear_cross_entropy(x, w, y, linear_bias=dual(b)),
            lambda: rafter.linear_cross_entropy(x, w, y, weight=dual(b.abs())),
            lambda: rafter.linear_logprobs(x, dual(w), y),
            lambda: rafter.lrpe_cosine(cube, dual(theta)),
            lambda: torch.ops.rafter.act(dual(x), 3),
            lambda: torch.ops.rafter.act_backward(dual(x), x, 3),
        ]
        for call in calls:
            with refuses_forward_mode():
                call()


# ---- options that are tensors


@on_devices
@in_dtypes
@parametrize("options", [dict(), dict(label_smoothing=0.1, z_loss=1e-2), dict(reduction="sum"),
                         dict(reduction="none"), dict(extras="lse")])
@parametrize("shape", [(), (1,)])
def test_a_learned_logit_scale(device, dtype, options, shape):
    """As in CLIP. The scale and its gradient are those of the fp64 formula."""
    x, y = leaf(normal(6, 9, device=device, dtype=dtype)), labels((6,), 9, device)
    scale = torch.full(shape, 1.7, device=device, requires_grad=True)
    out = rafter.cross_entropy(x, y, logit_scale=scale, **options)
    loss = out.loss if "extras" in options else out
    reference = {name: value for name, value in options.items() if name != "extras"}
    exact = loss_reference(x, y, logit_scale=scale.double().reshape(()), **reference)
    up = normal(*loss.shape, device=device)
    actual, expected = (torch.autograd.grad(v, [x, scale], up.to(v.dtype)) for v in (loss, exact))
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual[0], expected[0], rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-5)
    assert actual[1].shape == scale.shape


@parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_a_learned_logit_scale_by_finite_differences(function):
    x, w, b, y = normal(6, 8), normal(9, 8), normal(9), labels((6,), 9, "cpu")
    step = 1e-2

    def loss(scale):
        if function == "cross_entropy":
            return rafter.cross_entropy(x, y % 8, logit_scale=scale, z_loss=1e-2)
        return rafter.linear_cross_entropy(x, w, y, linear_bias=b, logit_scale=scale, z_loss=1e-2)

    scale = torch.tensor(1.3, requires_grad=True)
    (actual,) = torch.autograd.grad(loss(scale), scale)
    difference = (loss(1.3 + step) - loss(1.3 - step)) / (2 * step)
    torch.testing.assert_close(actual, difference, rtol=1e-3, atol=1e-4)


@on_devices
@in_dtypes
@parametrize("options", [dict(), dict(mode="compact"), dict(reduction="none")])
@parametrize("bias", [False, True])
def test_a_learned_logit_scale_of_the_linear_loss(device, dtype, options, bias):
    skip_unless("linear_cross_entropy", device)
    x, w = leaf(normal(6, 8, device=device, dtype=dtype)), leaf(normal(9, 8, device=device, dtype=dtype, seed=1))
    b = leaf(normal(9, device=device, dtype=dtype, seed=2)) if bias else None
    y, scale = labels((6,), 9, device), torch.tensor(1.7, device=device, requires_grad=True)
    loss = rafter.linear_cross_entropy(x, w, y, linear_bias=b, logit_scale=scale, **options)
    logits = F.linear(x.double(), w.double(), None if b is None else b.double())
    exact = loss_reference(logits, y, logit_scale=scale.double(), reduction=options.get("reduction", "mean"))
    up = normal(*loss.shape, device=device)
    inputs = [x, w, scale] + ([b] if bias else [])
    actual, expected = (torch.autograd.grad(v, inputs, up.to(v.dtype)) for v in (loss, exact))
    # x * scale is rounded to the dtype of x once more
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2**-5, atol=2**-6)
    torch.testing.assert_close(loss.double(), exact, **tolerance)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, **tolerance)


def test_a_logit_scale_tensor_compiles_once():
    torch.compiler.reset()
    x, y = leaf(normal(6, 9)), labels((6,), 9, "cpu")
    compiled = torch.compile(lambda x, s: rafter.cross_entropy(x, y, logit_scale=s), fullgraph=True,
                             backend="aot_eager")
    compiled(x, torch.tensor(0.5, requires_grad=True))
    with torch.compiler.set_stance("fail_on_recompile"):
        for value in (1.0, 1.5, 2.0):
            scale = torch.tensor(value, requires_grad=True)
            actual = torch.autograd.grad(compiled(x, scale), [x, scale])
            expected = torch.autograd.grad(F.cross_entropy(x * scale, y), [x, scale])
            torch.testing.assert_close(actual, expected)


@parametrize("name", ["label_smoothing", "z_loss", "softcap"])
@parametrize("value", [0.0, 0.5])
def test_options_that_require_a_gradient_are_refused(name, value):
    x, w, y = normal(6, 8), normal(9, 8), labels((6,), 8, "cpu")
    option = {name: torch.tensor(value, requires_grad=True)}
    with pytest.raises(ValueError, match=f"{name} requires a gradient"):
        rafter.cross_entropy(x, y, **option)
    with pytest.raises(ValueError, match=f"{name} requires a gradient"):
        rafter.linear_cross_entropy(x, w, y, **option)
    with torch.no_grad():  # nothing is lost
        torch.testing.assert_close(rafter.cross_entropy(x, y, **option),
                                   rafter.cross_entropy(x, y, **{name: value}))


def test_a_learned_temperature_is_refused():
    x, w, y = normal(6, 8), normal(9, 8), labels((6,), 8, "cpu")
    one = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(ValueError, match="temperature requires a gradient"):
        rafter.linear_logprobs(x, w, y, temperature=one)
    with pytest.raises(ValueError, match="logit_scale requires a gradient.* together with softcap"):
        rafter.cross_entropy(x, y, logit_scale=one, softcap=3.0)
    with pytest.raises(ValueError, match="wanted one element"):
        rafter.cross_entropy(x, y, logit_scale=torch.ones(6))
    with pytest.raises(RuntimeError, match="fp64"):
        rafter.cross_entropy(x.double(), y, logit_scale=one)
    with torch.no_grad():
        torch.testing.assert_close(rafter.cross_entropy(x, y, logit_scale=one, softcap=3.0),
                                   rafter.cross_entropy(x, y, logit_scale=2.0, softcap=3.0))


# ---- a zero sum of class weights


@on_devices
@in_dtypes
@parametrize("options", [dict(), dict(mode="compact"), dict(main_grad=True)])
def test_a_mean_over_a_zero_sum_of_weights(device, dtype, options):
    """0 / 0: the loss and the gradients of the rows that count are NaN, as in PyTorch; ignored rows
    have a gradient of 0."""
    skip_unless("linear_cross_entropy", device)
    x, w = leaf(normal(64, 32, device=device, dtype=dtype)), leaf(normal(50, 32, device=device, dtype=dtype, seed=1))
    y, weight = labels((64,), 7, device), torch.ones(50, device=device)
    weight[:7] = 0
    w.main_grad = torch.zeros(50, 32, device=device)
    loss = rafter.linear_cross_entropy(x, w, y, weight=weight, **options)
    exact = F.cross_entropy(x.float() @ w.float().t(), y, weight=weight)
    actual = torch.autograd.grad(loss, [x, w], allow_unused=True)
    assert loss.isnan() and exact.isnan()
    for a, e in zip(actual, torch.autograd.grad(exact, [x, w])):
        assert torch.equal((w.main_grad if a is None else a).isnan(), e.isnan())
        assert a is None or not a[~e.isnan()].any()


@on_devices
@in_dtypes
@parametrize("upstream", ["inf", "nan"])
def test_an_infinite_upstream_gradient_of_ignored_rows(device, dtype, upstream):
    """The gradient of an ignored row is 0, whatever the upstream gradient is. Only in modes that
    compute gradients in backward: otherwise backward multiplies stored ones."""
    skip_unless("linear_cross_entropy", device)
    x, w = leaf(normal(64, 32, device=device, dtype=dtype)), leaf(normal(50, 32, device=device, dtype=dtype, seed=1))
    y = labels((64,), 50, device)
    for reduction in ("mean", "sum"):
        loss = rafter.linear_cross_entropy(x, w, y, mode="compact", reduction=reduction)
        (dx,) = torch.autograd.grad(loss, [x], torch.tensor(float(upstream), device=device))
        assert not dx[y == -100].any()
        assert not dx[y != -100].isfinite().any()

# SPDX-License-Identifier: Apache-2.0
"""What autograd expects of every op: a second backward, frozen inputs, refusal of second
derivatives, version counters, checkpoints, threads."""
import pytest
import torch
import torch.nn.functional as F

import rafter
from support import in_threads, labels, leaf, normal, on_devices, parametrize, skip_unless


def problems(device):
    """By name: a function of one tensor, and that tensor."""
    y = labels((6,), 9, device)
    w = normal(9, 8, device=device, seed=1)
    theta = normal(2, 8, device=device, seed=2)
    return {
        "cross_entropy": (lambda x: rafter.cross_entropy(x, y, reduction="none"), normal(6, 9, device=device)),
        "cross_entropy mean": (lambda x: rafter.cross_entropy(x, y), normal(6, 9, device=device)),
        "linear_cross_entropy": (lambda x: rafter.linear_cross_entropy(x, w, y), normal(6, 8, device=device)),
        "linear_cross_entropy none": (lambda x: rafter.linear_cross_entropy(x, w, y, reduction="none"),
                                      normal(6, 8, device=device)),
        "linear_cross_entropy compact": (lambda x: rafter.linear_cross_entropy(x, w, y, mode="compact"),
                                         normal(6, 8, device=device)),
        "linear_logprobs": (lambda x: sum(rafter.linear_logprobs(x, w, y, entropy=True)[:2]),
                            normal(6, 8, device=device)),
        "logsumexp": (lambda x: rafter.logsumexp(x, 0), normal(6, 9, device=device)),
        "softmax": (lambda x: rafter.softmax(x, 0), normal(6, 9, device=device)),
        "silu": (rafter.silu, normal(6, 9, device=device)),
        "sigmoid": (rafter.sigmoid, normal(6, 9, device=device)),
        "relu": (rafter.relu, normal(6, 9, device=device)),
        "lrpe_cosine": (lambda x: rafter.lrpe_cosine(x, theta, act="silu"), normal(2, 3, 2, 8, device=device)),
    }


NAMES = list(problems("cpu"))


def problem(name, device):
    if name.startswith("linear"):
        skip_unless("linear_cross_entropy", device)
    function, x = problems(device)[name]
    return function, leaf(x)


@on_devices
@parametrize("name", NAMES)
def test_a_second_backward_gives_the_same_result(device, name):
    function, x = problem(name, device)
    out = function(x)
    up = normal(*out.shape, device=device, seed=7)
    (first,) = torch.autograd.grad(out, x, up, retain_graph=True)
    first = first.clone()
    (second,) = torch.autograd.grad(out, x, up, retain_graph=True)
    (third,) = torch.autograd.grad(out, x, 2 * up)
    torch.testing.assert_close(second, first, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(third, 2 * first, rtol=1e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x, up)


@on_devices
@parametrize("name", NAMES)
def test_a_second_derivative_is_refused(device, name):
    function, x = problem(name, device)
    (dx,) = torch.autograd.grad(function(x).sum() * 2, x, create_graph=True)
    (first,) = torch.autograd.grad(function(x).sum() * 2, x)
    torch.testing.assert_close(dx, first)
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        ((dx * dx).sum() + x.square().sum()).backward()


@parametrize("name", NAMES)
def test_a_second_derivative_is_refused_by_the_registered_ops_too(name):
    """A subclass of Tensor takes the dispatcher path."""
    function, x = problem(name, "cpu")

    class Sub(torch.Tensor):
        pass

    sub = x.detach().as_subclass(Sub).requires_grad_()
    out = function(sub)
    (dx,) = torch.autograd.grad(out.sum() * 2, sub, create_graph=True)
    plain = leaf(x)
    (expected,) = torch.autograd.grad(function(plain).sum() * 2, plain)
    torch.testing.assert_close(dx.as_subclass(torch.Tensor), expected)
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        (dx * dx).sum().backward()


@on_devices
@parametrize("name", NAMES)
def test_nothing_is_saved_without_gradients(device, name):
    function, x = problem(name, device)
    with torch.no_grad():
        assert function(x).grad_fn is None
    assert function(x.detach()).grad_fn is None
    with torch.inference_mode():
        assert not function(x.detach()).requires_grad
    assert function(x).grad_fn is not None


@on_devices
@parametrize("name", NAMES)
def test_changed_inputs_are_noticed(device, name):
    """Backward reads the tensors that forward read; if one was modified in between, autograd
    reports it."""
    function, x = problem(name, device)
    if name in ("linear_cross_entropy", "relu", "softmax"):
        return  # backward does not read x: it uses the result, or the gradient from forward
    changed = x * 1.0
    out = function(changed).sum()
    with torch.no_grad():
        changed.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@on_devices
@parametrize("name", NAMES)
def test_inside_a_graph(device, name):
    """Between other operations, under a checkpoint, and with the input used twice."""
    from torch.utils.checkpoint import checkpoint
    function, x = problem(name, device)

    def body(x):
        return function(torch.tanh(x)).sum() + x.square().sum()

    (plain,) = torch.autograd.grad(body(x), x)
    (again,) = torch.autograd.grad(checkpoint(body, x, use_reentrant=False), x)
    torch.testing.assert_close(again, plain)


@parametrize("name", NAMES)
def test_gradcheck(name):
    """The library computes in fp32, so finite differences are coarse; a wrong formula is further
    off."""
    function, x = problem(name, "cpu")
    assert torch.autograd.gradcheck(function, leaf(x * 0.5), eps=1e-2, atol=2e-2, rtol=2e-2, fast_mode=False,
                                    nondet_tol=1e-6)


@on_devices
def test_statistics_have_no_gradient(device):
    """lse and the other statistics add nothing to the gradient of the loss."""
    x, y = leaf(normal(6, 9, device=device)), labels((6,), 9, device)
    out = rafter.cross_entropy(x, y, extras=("lse", "entropy"))
    (dx,) = torch.autograd.grad(out.loss + out.lse.sum() + out.entropy.sum(), x)
    (expected,) = torch.autograd.grad(F.cross_entropy(x, y), x)
    torch.testing.assert_close(dx, expected)


@on_devices
def test_threads(device):
    """Two threads at once, each with its own stream on CUDA."""
    x, y = normal(64, 500, device=device), labels((64,), 500, device)
    expected = F.cross_entropy(x, y)
    wrong = []

    def work():
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            for _ in range(50):
                if not torch.allclose(rafter.cross_entropy(leaf(x), y), expected):
                    wrong.append(1)

    in_threads(work, 2)
    assert not wrong


def test_pytorch_threads_are_honoured():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert "threads 1" in torch.ops.rafter._info().splitlines()
        torch.set_num_threads(2)
        assert "threads 2" in torch.ops.rafter._info().splitlines()
    finally:
        torch.set_num_threads(before)

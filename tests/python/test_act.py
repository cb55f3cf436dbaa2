# SPDX-License-Identifier: Apache-2.0
"""Activations and softmax against PyTorch's, forward and backward."""
import pytest
import torch
import torch.nn.functional as F

import rafter
from support import LAYOUTS, close, gradients, in_dtypes, leaf, normal, on_devices, parametrize, uneven, with_saved

POINTWISE = [(rafter.relu, F.relu), (rafter.sigmoid, torch.sigmoid), (rafter.silu, F.silu)]
SHAPES = [(), (1,), (5,), (3, 17), (2, 3, 5, 7), (0, 4)]


@on_devices
@in_dtypes
@parametrize("pair", POINTWISE)
@parametrize("shape", SHAPES)
def test_pointwise(device, dtype, pair, shape):
    x = leaf(normal(*shape, device=device, dtype=dtype, scale=4.0))
    ours, (dx,) = gradients(pair[0], [x], uneven)
    theirs, (expected,) = gradients(lambda x: pair[1](x.double()), [x], uneven)
    assert ours.dtype == dx.dtype == dtype
    close(ours, theirs)
    close(dx, expected)


@on_devices
@in_dtypes
@parametrize("shape_dim", [((7,), 0), ((3, 17), -1), ((3, 17), 0), ((2, 5, 9), 1), ((2, 5, 9), -3), ((4, 1000), -1),
                           ((4, 0), 0)])
def test_softmax(device, dtype, shape_dim):
    shape, dim = shape_dim
    x = leaf(normal(*shape, device=device, dtype=dtype, scale=4.0))
    ours, (dx,) = gradients(lambda x: rafter.softmax(x, dim), [x], uneven)
    close(ours, F.softmax(x.double(), dim))
    y, dy = ours.detach().double(), uneven(ours).double()  # backward uses the rounded y, as in PyTorch
    close(dx, y * (dy - (y * dy).sum(dim, keepdim=True)))


@on_devices
def test_relu_saves_only_its_result(device):
    y, (saved,) = with_saved(rafter.relu, leaf(normal(5, 7, device=device)))
    assert saved.data_ptr() == y.data_ptr()


@on_devices
@parametrize("expanded", [False, True])
def test_large_relu_saves_a_bit_per_element(device, expanded):
    """On CUDA; elsewhere its result."""
    x = leaf(normal(4099, 1027, device=device))
    y, (saved,) = with_saved(rafter.relu, x)
    assert saved.numel() == ((4099 * 1027 + 7) // 8 if device == "cuda" else x.numel())
    dy = torch.ones((), device=device).expand(y.shape) if expanded else uneven(y)
    y.backward(dy)
    close(y, F.relu(x.double()))
    close(x.grad, dy.double() * (x > 0))


@on_devices
@parametrize("layout", LAYOUTS)
def test_layouts(device, layout):
    x = layout(normal(6, 9, device=device)).requires_grad_()
    for function, other in (*POINTWISE, (lambda x: rafter.softmax(x, 0), lambda x: F.softmax(x, 0)),
                            (lambda x: rafter.softmax(x, 1), lambda x: F.softmax(x, 1))):
        for upstream in (uneven, lambda out: torch.ones((), device=device).expand(out.shape),
                         lambda out: layout(uneven(out))):
            ours, (dx,) = gradients(function, [x], upstream)
            theirs, (expected,) = gradients(lambda x: other(x.double()), [x],
                                            lambda out: upstream(out.float()).double())
            close(ours, theirs)
            close(dx, expected)


@on_devices
def test_expanded(device):
    x = normal(4, 1, device=device).requires_grad_()
    ours, (dx,) = gradients(lambda x: rafter.silu(x.expand(4, 6)), [x], uneven)
    theirs, (expected,) = gradients(lambda x: F.silu(x.double().expand(4, 6)), [x], uneven)
    close(ours, theirs)
    close(dx, expected)


@on_devices
def test_special_values(device):
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-30, -200.0], device=device)
    for function, other in POINTWISE:
        close(function(x), other(x.double()))
    zero = leaf(torch.zeros(3, device=device))
    rafter.relu(zero).sum().backward()
    assert not zero.grad.any()
    wild = torch.tensor([[0.0, float("inf")], [-float("inf"), 1.0], [-float("inf"), -float("inf")]], device=device)
    close(rafter.softmax(wild, -1), F.softmax(wild.double(), -1))


def test_by_name():
    x = torch.randn(3, 4)
    assert rafter.act(x) is x and rafter.act(x, "none") is x
    assert torch.equal(rafter.act(x, "silu"), rafter.silu(x))
    assert torch.equal(rafter.act(x, "softmax", 0), rafter.softmax(x, 0))
    assert torch.equal(rafter.softmax(x.bfloat16(), -1, dtype=torch.float32), rafter.softmax(x.bfloat16().float(), -1))
    for bad in (dict(kind="gelu"), dict(kind="softmax"), dict(kind="relu", dim=1)):
        with pytest.raises(ValueError):
            rafter.act(x, **bad)
    with pytest.raises(IndexError, match="dim is 2"):
        rafter.softmax(x, 2)

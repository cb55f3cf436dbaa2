# SPDX-License-Identifier: Apache-2.0
"""lrpe_cosine against its formula in fp64."""
import pytest
import torch
import torch.nn.functional as F

import rafter
from support import LAYOUTS, close, gradients, in_dtypes, leaf, normal, on_devices, parametrize, uneven


def reference(x, theta, offset=0, positions=None, act="none", dim=None):
    x, theta = x.double(), theta.double()
    f = {"none": lambda v: v, "relu": F.relu, "sigmoid": torch.sigmoid, "silu": F.silu,
         "softmax": lambda v: F.softmax(v, dim)}[act](x)
    if positions is None:
        positions = offset + torch.arange(x.shape[1], device=x.device)
    at = positions.double().reshape(*positions.shape, *[1] * (x.dim() - 2))
    angle = at * (theta if x.dim() == 4 else theta[0])
    return torch.cat([f * angle.cos(), f * angle.sin()], -1)


@on_devices
@in_dtypes
@parametrize("act", [("none", None), ("relu", None), ("sigmoid", None), ("silu", None), ("softmax", -1),
                     ("softmax", 1)])
@parametrize("theta_shape", [(3, 8), (3, 1), (1, 8)])
def test_formula(device, dtype, act, theta_shape):
    x = leaf(normal(2, 5, 3, 8, device=device, dtype=dtype))
    theta = leaf(normal(*theta_shape, device=device, seed=1))
    options = dict(act=act[0], dim=act[1])
    ours, (dx, dtheta) = gradients(lambda x, t: rafter.lrpe_cosine(x, t, offset=3, **options), [x, theta], uneven)
    theirs, expected = gradients(lambda x, t: reference(x, t, offset=3, **options), [x, theta], uneven)
    assert ours.dtype == dtype and ours.shape == (2, 5, 3, 16)
    close(ours, theirs)
    close(dx, expected[0], scale=8 if act[0] == "softmax" else 2)
    close(dtheta / expected[1].abs().max().float(), expected[1] / expected[1].abs().max(), scale=4)


@on_devices
def test_positions_and_three_dimensions(device):
    x, theta = normal(2, 5, 8, device=device), normal(1, 8, device=device, seed=1)
    close(rafter.lrpe_cosine(x, theta), reference(x, theta))
    for positions in (torch.tensor([4, 0, 2, 2, 9]), torch.arange(10).view(2, 5).flip(1).int()):
        positions = positions.to(device)
        cube = normal(2, 5, 3, 8, device=device)
        close(rafter.lrpe_cosine(cube, theta, positions=positions), reference(cube, theta, positions=positions))


@on_devices
def test_far_positions(device):
    x = torch.ones(1, 2, 1, 4, device=device)
    theta = torch.rand(1, 4, generator=torch.Generator().manual_seed(0)).to(device)
    close(rafter.lrpe_cosine(x, theta, offset=10**6), reference(x, theta, offset=10**6))


@on_devices
@parametrize("layout", LAYOUTS)
def test_layouts(device, layout):
    x, theta = layout(normal(2, 5, 3, 8, device=device)).requires_grad_(), normal(3, 8, device=device, seed=1)
    ours, (dx,) = gradients(lambda x: rafter.lrpe_cosine(x, theta, act="silu"), [x], lambda out: layout(uneven(out)))
    theirs, (expected,) = gradients(lambda x: reference(x, theta, act="silu"), [x], uneven)
    close(ours, theirs)
    close(dx, expected)


@on_devices
def test_every_offset_runs_in_one_graph(device):
    """Decoding: the offset grows by one in every step. A graph per value would reach the limit of
    recompilations after eight steps."""
    x, theta = normal(2, 1, 3, 8, device=device), normal(3, 8, device=device, seed=1).requires_grad_()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=count)
    def step(x, offset):
        return rafter.lrpe_cosine(x, theta.detach(), offset=offset)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step_with_gradient(x, offset):
        return rafter.lrpe_cosine(x, theta, offset=offset)

    for offset in range(20):
        expected = rafter.lrpe_cosine(x, theta, offset=offset)
        assert torch.equal(step(x, offset), expected)
        actual = step_with_gradient(x, offset)
        assert torch.equal(actual, expected)
        for a, b in zip(*(torch.autograd.grad(t, theta, uneven(t)) for t in (actual, expected))):
            assert torch.equal(a, b)
    assert len(graphs) <= 4  # 0, 1, and all others


def test_refusals():
    x, theta = torch.randn(2, 5, 3, 8), torch.rand(3, 8)
    with pytest.raises(ValueError, match="softmax needs a dim"):
        rafter.lrpe_cosine(x, theta, act="softmax")
    with pytest.raises(ValueError, match="dim is 2"):
        rafter.lrpe_cosine(x, theta, act="softmax", dim=2)
    with pytest.raises(RuntimeError, match="theta has shape"):
        rafter.lrpe_cosine(x, torch.rand(2, 8))
    with pytest.raises(ValueError, match="offset is 3 and positions are given"):
        rafter.lrpe_cosine(x, theta, offset=3, positions=torch.arange(5))

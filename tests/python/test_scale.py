# SPDX-License-Identifier: Apache-2.0
"""scale_, and the upstream gradient of linear_cross_entropy, which backward applies with it."""
import pytest
import torch

import rafter
from support import DTYPES, LAYOUTS, in_dtypes, labels, leaf, normal, on_devices, parametrize, skip_unless

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan")]
FACTORS = [1.0, -1.0, 0.37, 1e30, 1e-40, *SPECIAL]


def product(x, factor):
    """In fp32, rounded once."""
    return (x.float() * factor).to(x.dtype)


def same(actual, expected):
    """Equal in value and sign, NaN where NaN is expected."""
    assert actual.dtype == expected.dtype
    finite = ~expected.isnan()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[finite], expected[finite])
    assert torch.equal(actual[finite].signbit(), expected[finite].signbit())


def bits(x):
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@on_devices
@in_dtypes
@parametrize("layout", LAYOUTS)
def test_scale(device, dtype, layout):
    x = normal(7, 1025, device=device, dtype=dtype)
    x[0, :len(SPECIAL)] = torch.tensor(SPECIAL)
    x[0, 5] = torch.finfo(dtype).max
    x[0, 6] = torch.finfo(dtype).smallest_normal / 4
    for factor in FACTORS:
        for shape in ((), (1,)):
            scaled, number = layout(x), torch.full(shape, factor, device=device)
            torch.ops.rafter.scale_(scaled, number)
            same(scaled, product(x, factor))


@on_devices
@in_dtypes
def test_a_factor_of_one_leaves_the_bits_alone(device, dtype):
    """Also a NaN keeps its payload, which a product would change."""
    width = 32 if dtype == torch.float32 else 16
    whole = torch.randint(-2**(width - 1), 2**(width - 1), (3, 4099), device=device,
                          dtype=torch.int32 if width == 32 else torch.int16)
    x = whole.clone().view(dtype)
    assert x.isnan().any()
    torch.ops.rafter.scale_(x, torch.ones((), device=device))
    assert torch.equal(bits(x), whole)


def test_refusals():
    x = normal(4, 5)
    for factor, message in ((torch.ones(2), "factor has 2 elements, wanted 1"),
                            (torch.ones((), dtype=torch.bfloat16), "factor has dtype bf16, wanted fp32"),
                            (x[0, 0], "y .* overlaps factor")):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.rafter.scale_(x, factor)


# ---- the upstream gradient of linear_cross_entropy


def problem(device, dtype):
    x = leaf(normal(33, 24, device=device, dtype=dtype))
    w = leaf(normal(65, 24, device=device, dtype=dtype, seed=1, scale=0.4))
    b = leaf(normal(65, device=device, dtype=dtype, seed=2))
    return [x, w, b], labels((33,), 65, device)


def computed_by_forward(tensors, target):
    """The gradients for an upstream gradient of 1."""
    x, w, b = (t.detach() for t in tensors)
    return torch.ops.rafter.linear_cross_entropy(x, w, b, target, 7)[2:5]


@on_devices
@parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float16])  # fp16: computed in backward
@parametrize("factor", FACTORS)
def test_backward_scales_the_gradients_of_forward(device, dtype, factor):
    skip_unless("linear_cross_entropy", device)
    tensors, target = problem(device, dtype)
    loss = rafter.linear_cross_entropy(*tensors[:2], target, linear_bias=tensors[2])
    actual = torch.autograd.grad(loss, tensors, torch.full((), factor, device=device))
    for got, gradient in zip(actual, computed_by_forward(tensors, target)):
        same(got, product(gradient, factor))
        if factor == 1:
            assert torch.equal(bits(got), bits(gradient))


@on_devices
@parametrize("factor", SPECIAL)
def test_special_upstream_gradients_propagate_as_in_pytorch(device, factor):
    """0 * inf and the like: the same elements are NaN, inf and 0."""
    skip_unless("linear_cross_entropy", device)
    tensors, target = problem(device, torch.float32)
    upstream = torch.full((), factor, device=device)
    ours = rafter.linear_cross_entropy(*tensors[:2], target, linear_bias=tensors[2])
    actual = torch.autograd.grad(ours, tensors, upstream)
    for got, gradient in zip(actual, computed_by_forward(tensors, target)):
        same(got, gradient * upstream)


@on_devices
def test_only_wanted_gradients_are_scaled(device):
    skip_unless("linear_cross_entropy", device)
    (x, w, b), target = problem(device, torch.float32)
    loss = 3 * rafter.linear_cross_entropy(x, w, target, linear_bias=b)
    loss.backward(inputs=[w])
    assert x.grad is None and b.grad is None
    same(w.grad, product(computed_by_forward((x, w, b), target)[1], 3.0))

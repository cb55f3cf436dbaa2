# SPDX-License-Identifier: Apache-2.0
"""logsumexp against torch.logsumexp."""
import pytest
import torch

import rafter
from support import LAYOUTS, close, gradients, in_dtypes, leaf, normal, on_devices, parametrize, uneven


@on_devices
@in_dtypes
@parametrize("shape_dim", [((7,), 0), ((3, 17), -1), ((3, 17), 0), ((2, 5, 9), 1), ((2, 5, 9), -3), ((2, 3000), -1),
                           ((), 0)])
@parametrize("keepdim", [False, True])
@parametrize("algorithm", ["auto", "parallel", "recurrence"])
def test_agrees_with_pytorch(device, dtype, shape_dim, keepdim, algorithm):
    shape, dim = shape_dim
    x = leaf(normal(*shape, device=device, dtype=dtype, scale=4.0))
    ours, (dx,) = gradients(lambda x: rafter.logsumexp(x, dim, keepdim, algorithm=algorithm), [x], uneven)
    theirs, (expected,) = gradients(lambda x: torch.logsumexp(x.double(), dim, keepdim), [x], uneven)
    assert ours.dtype == dtype and ours.shape == theirs.shape
    close(ours, theirs)
    close(dx, expected)
    wide = rafter.logsumexp(x, dim, keepdim, dtype=torch.float32)
    assert wide.dtype == torch.float32
    close(wide, theirs)
    alone = rafter.logsumexp(x.detach(), dim, keepdim, algorithm=algorithm)  # the kernel rounds, not PyTorch
    assert alone.dtype == dtype and alone.shape == theirs.shape
    close(alone, theirs)


@on_devices
@parametrize("layout", LAYOUTS)
@parametrize("dim", [0, 1, 2])
def test_layouts(device, layout, dim):
    x = layout(normal(3, 4, 5, device=device)).requires_grad_()
    for upstream in (uneven, lambda out: torch.ones((), device=device).expand(out.shape)):
        ours, (dx,) = gradients(lambda x: rafter.logsumexp(x, dim), [x], upstream)
        theirs, (expected,) = gradients(lambda x: torch.logsumexp(x.double(), dim), [x],
                                        lambda out: upstream(out.float()).double())
        close(ours, theirs)
        close(dx, expected)


@on_devices
def test_special_values(device):
    inf = float("inf")
    x = leaf(torch.tensor([[-inf, -inf], [inf, 0.0], [-inf, 2.0], [float("nan"), 1.0]], device=device))
    ours, (dx,) = gradients(lambda x: rafter.logsumexp(x, -1), [x], uneven)
    close(ours, torch.logsumexp(x.double(), -1))
    assert not dx[0].any()
    assert rafter.logsumexp(torch.empty(3, 0, device=device), -1).tolist() == [-inf] * 3
    assert rafter.logsumexp(torch.empty(0, 3, device=device), -1).shape == (0,)


def test_refusals():
    x = torch.randn(3, 4)
    assert torch.equal(rafter.logsumexp(x, [1]), rafter.logsumexp(x, 1))
    with pytest.raises(ValueError, match="one dimension"):
        rafter.logsumexp(x, (0, 1))
    with pytest.raises(IndexError, match="dim is 2"):
        rafter.logsumexp(x, 2)
    with pytest.raises(ValueError, match="algorithm"):
        rafter.logsumexp(x, 1, algorithm="tree")

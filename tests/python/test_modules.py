# SPDX-License-Identifier: Apache-2.0
"""rafter.nn against torch.nn."""
import pytest
import torch

import rafter
from support import labels, normal, on_devices, parametrize, skip_unless


@on_devices
def test_cross_entropy_loss(device):
    x, y = normal(6, 9, device=device), labels((6,), 9, device)
    weight = normal(9, device=device).abs()
    ours = rafter.nn.CrossEntropyLoss(weight, label_smoothing=0.1, reduction="sum").to(device)
    theirs = torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1, reduction="sum").to(device)
    torch.testing.assert_close(ours(x, y), theirs(x, y))
    assert set(ours.state_dict()) == set(theirs.state_dict())
    assert "label_smoothing=0.1" in repr(ours)
    plain = rafter.nn.CrossEntropyLoss(extras=("lse",))
    assert plain(x, y, denominator=4.0).lse.shape == (6,)


@on_devices
@parametrize("bias", [False, True])
def test_linear_cross_entropy_loss(device, bias):
    skip_unless("linear_cross_entropy", device)
    module = rafter.nn.LinearCrossEntropyLoss(8, 9, bias=bias, device=device, z_loss=1e-3)
    x, y = normal(6, 8, device=device), labels((6,), 9, device)
    loss = module(x, y)
    loss.backward()
    torch.testing.assert_close(loss, rafter.cross_entropy(module.linear(x), y, z_loss=1e-3), rtol=1e-5, atol=1e-6)
    assert all(p.grad is not None for p in module.parameters()) and len(list(module.parameters())) == 1 + bias
    assert "z_loss" in repr(module)


@on_devices
def test_lrpe_cosine(device):
    x = normal(2, 5, 3, 8, device=device)
    module = rafter.nn.LRPECosine(3, 8, act="silu", device=device)
    assert torch.equal(module(x, offset=2), rafter.lrpe_cosine(x, module.theta, offset=2, act="silu"))
    assert not list(module.parameters()) and not module.state_dict()
    learned = rafter.nn.LRPECosine(3, 8, act="silu", learned=True, device=device)
    torch.testing.assert_close(learned(x), module(x))
    learned(x).sum().backward()
    assert learned.theta.grad.shape == (3, 8) and learned.theta.grad.any()


@on_devices
@parametrize("learned", [False, True])
def test_theta_stays_fp32(device, learned):
    module = rafter.nn.LRPECosine(3, 8, learned=learned)
    x, expected = normal(1, 1, 3, 8, device=device, dtype=torch.bfloat16), module.theta.detach().clone()
    for move in (lambda m: m.to(torch.bfloat16), lambda m: m.to(device, torch.float16), lambda m: m.double(),
                 lambda m: m.to(device)):
        move(torch.nn.Sequential(module))
        assert module.theta.dtype == torch.float32 and torch.equal(module.theta.detach().cpu(), expected)
        assert isinstance(module.theta, torch.nn.Parameter) == learned
    assert module.theta.device == x.device
    assert torch.equal(module(x, offset=1000), rafter.lrpe_cosine(x, expected.to(device), offset=1000))


def test_misspelt_options_are_refused_at_construction():
    with pytest.raises(TypeError, match="CrossEntropyLoss has no option 'zloss', wanted one of .*z_loss"):
        rafter.nn.CrossEntropyLoss(zloss=1e-3)
    with pytest.raises(TypeError, match="LinearCrossEntropyLoss has no option 'soft_cap', wanted one of .*softcap"):
        rafter.nn.LinearCrossEntropyLoss(8, 9, soft_cap=3.0)
    with pytest.raises(ValueError, match="act is 'swish'"):
        rafter.nn.LRPECosine(3, 8, act="swish")
    with pytest.raises(ValueError, match="softmax needs a dim"):
        rafter.nn.LRPECosine(3, 8, act="softmax")

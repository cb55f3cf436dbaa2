# SPDX-License-Identifier: Apache-2.0
"""Replicated DTensors work everywhere, sharded ones in the losses (ranks_dtensor.py has more); others
are refused with an error that names the alternatives. The mesh has one rank: this process."""
import os

import pytest
import torch

import rafter
from support import labels, normal

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh  # noqa: E402

_mesh = None


def mesh():
    global _mesh
    if _mesh is None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        _mesh = init_device_mesh("cpu", (1,))
    return _mesh


def placed(x, placement):
    return DTensor.from_local(x, mesh(), [placement], run_check=False)


def test_replicated():
    z, x, w, y = normal(6, 9), normal(6, 8), normal(9, 8), labels((6,), 9, "cpu")
    for function, tensors in ((lambda z: rafter.cross_entropy(z, y), [z]), (rafter.silu, [z]),
                              (lambda z: rafter.softmax(z, 0), [z]), (lambda z: rafter.logsumexp(z, 1), [z]),
                              (lambda x, w: rafter.linear_cross_entropy(x, w, y), [x, w])):
        plain = [t.clone().requires_grad_() for t in tensors]
        replicated = [placed(t.clone(), Replicate()).requires_grad_() for t in tensors]
        expected, out = function(*plain), function(*replicated)
        assert isinstance(out, DTensor)
        torch.testing.assert_close(out.to_local(), expected)
        expected.sum().backward()
        out.sum().backward()
        for a, b in zip(replicated, plain):
            torch.testing.assert_close(a.grad.to_local(), b.grad)


def test_mixed_with_plain_tensors():
    """Any argument may be the DTensor."""
    z, x, w, y, b = normal(6, 9), normal(6, 8), normal(9, 8), labels((6,), 9, "cpu"), normal(9)
    q, theta = normal(2, 3, 2, 8), normal(2, 8)
    for function, tensor in ((lambda t: rafter.cross_entropy(z, t), y),
                             (lambda t: rafter.cross_entropy(z, y, t), b.abs()),
                             (lambda t: rafter.cross_entropy(z, y, row_weight=t, extras="lse").loss, normal(6).abs()),
                             (lambda t: rafter.linear_cross_entropy(x, t, y), w),
                             (lambda t: rafter.linear_cross_entropy(x, w, y, linear_bias=t), b),
                             (lambda t: rafter.linear_logprobs(x, w, t).logprob, y),
                             (lambda t: rafter.lrpe_cosine(q, t), theta)):
        out = function(placed(tensor, Replicate()))
        assert isinstance(out, DTensor)
        torch.testing.assert_close(out.to_local(), function(tensor))
        with pytest.raises(NotImplementedError, match="redistribute"):
            function(placed(tensor, Shard(0)))


def test_sharded():
    z, y = placed(normal(6, 9), Shard(0)), labels((6,), 9, "cpu")
    torch.testing.assert_close(rafter.cross_entropy(z, y).to_local(), rafter.cross_entropy(z.to_local(), y))
    for function in (lambda: rafter.silu(z), lambda: rafter.logsumexp(z, 1)):
        with pytest.raises(NotImplementedError, match="redistribute"):
            function()
    with pytest.raises(NotImplementedError, match="Shard"):
        rafter.linear_cross_entropy(normal(6, 8), placed(normal(9, 8), Shard(0)), y)

# SPDX-License-Identifier: Apache-2.0
"""rafter.batch_invariant: a sequence's log-probabilities and gradient, alone and in a batch. The C
test, tests/batch, covers the ops, dtypes and layouts."""
import pytest
import torch

import rafter
from support import in_dtypes, labels, leaf, normal, on_devices, parametrize, skip_unless


def test_function_and_context_manager():
    assert not rafter.is_batch_invariant()
    with rafter.batch_invariant():
        assert rafter.is_batch_invariant()
        with rafter.batch_invariant(False):
            assert not rafter.is_batch_invariant()
        assert rafter.is_batch_invariant()
    assert not rafter.is_batch_invariant()
    rafter.batch_invariant(True)
    try:
        assert rafter.is_batch_invariant()
        with pytest.raises(TypeError, match="mode is 2, wanted True or False"):
            rafter.batch_invariant(2)
    finally:
        rafter.batch_invariant(False)


@on_devices
@in_dtypes
@parametrize("classes", [257, 4099])
@torch.no_grad()
def test_logprobs_of_a_sequence(device, dtype, classes):
    skip_unless("linear_cross_entropy", device)
    w = normal(classes, 72, device=device, dtype=dtype, seed=1, scale=0.3)
    x = normal(500, 72, device=device, dtype=dtype)
    y = labels((500,), classes, device)
    with rafter.batch_invariant():
        whole = rafter.linear_logprobs(x, w, y, entropy=True)
        for first, end in ((0, 1), (3, 10), (100, 229), (371, 500), (1, 500)):
            part = rafter.linear_logprobs(x[first:end], w, y[first:end], entropy=True)
            assert torch.equal(part.logprob, whole.logprob[first:end])
            assert torch.equal(part.entropy, whole.entropy[first:end])


@on_devices
@in_dtypes
def test_gradient_of_a_sequence(device, dtype):
    skip_unless("linear_cross_entropy", device)
    w = normal(1000, 64, device=device, dtype=dtype, seed=1, scale=0.3)
    x = normal(300, 64, device=device, dtype=dtype)
    y, upstream = labels((300,), 1000, device), normal(300, device=device, seed=3)

    def gradient(first, end):
        own = leaf(x[first:end].clone())
        rafter.linear_logprobs(own, w, y[first:end]).logprob.backward(upstream[first:end])
        return own.grad

    with rafter.batch_invariant():
        whole = gradient(0, 300)
        for first, end in ((0, 1), (7, 40), (170, 300)):
            assert torch.equal(gradient(first, end), whole[first:end])

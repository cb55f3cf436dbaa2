# SPDX-License-Identifier: Apache-2.0
"""Arguments out of range: refused at once, with PyTorch's exception types and the Python names."""
import pytest
import torch

import rafter
from support import on_devices, parametrize, skip_unless, smallest_budget


def problem(device="cpu"):
    x, w = torch.randn(6, 8, device=device), torch.randn(9, 8, device=device)
    return x.requires_grad_(), w.requires_grad_(), torch.tensor([0, 1, 2, -100, 4, 5], device=device)


@on_devices
@parametrize("options", [dict(mode="compact"), dict(reduction="none"), dict(main_grad=True)])
def test_a_budget_too_small_for_backward_fails_in_forward(device, options):
    skip_unless("linear_cross_entropy", device)
    x, w, y = problem(device)
    w.main_grad = torch.zeros(9, 8, device=device)
    with torch.no_grad():
        forward = smallest_budget(lambda b: rafter.linear_cross_entropy(x, w, y, budget=b, **options))
    both = smallest_budget(lambda b: rafter.linear_cross_entropy(x, w, y, budget=b, **options))
    assert both >= forward
    rafter.linear_cross_entropy(x, w, y, budget=both, **options).sum().backward()


@on_devices
def test_a_budget_too_small_for_backward_of_logprobs_fails_in_forward(device):
    skip_unless("linear_cross_entropy", device)
    x, w, y = problem(device)
    budget = smallest_budget(lambda b: rafter.linear_logprobs(x, w, y, budget=b))
    rafter.linear_logprobs(x, w, y, budget=budget).logprob.sum().backward()
    with_entropy = smallest_budget(lambda b: rafter.linear_logprobs(x, w, y, entropy=True, budget=b))
    assert with_entropy >= budget
    sum(rafter.linear_logprobs(x, w, y, entropy=True, budget=with_entropy)[:2]).sum().backward()


def test_numbers_out_of_range():
    x, w, y = problem()
    for function in (rafter.linear_cross_entropy, rafter.linear_logprobs):
        with pytest.raises(ValueError, match="budget is -1"):
            function(x, w, y, budget=-1)
        with pytest.raises(RuntimeError, match="budget is 1 bytes of workspace, wanted at least [0-9]+, or 0 for no"):
            function(x, w, y, budget=1)
    for bad in (0.0, 1e-46, -1.0, 1e46, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="logit_scale is "):
            rafter.cross_entropy(x, y, logit_scale=bad)
        with pytest.raises(ValueError, match="temperature is "):
            rafter.linear_logprobs(x, w, y, temperature=bad)
        if bad != 0:
            with pytest.raises(ValueError, match="softcap is "):
                rafter.linear_cross_entropy(x, w, y, softcap=bad)
    assert rafter.cross_entropy(x, y, softcap=0.0) == rafter.cross_entropy(x, y)


def test_indices_out_of_range():
    x, w, y = problem()
    y[4] = 99
    for function in (lambda: rafter.cross_entropy(x, y), lambda: rafter.cross_entropy(x.detach(), y),
                     lambda: rafter.linear_cross_entropy(x, w, y), lambda: rafter.linear_logprobs(x, w, y),
                     lambda: torch.ops.rafter.cross_entropy(x, y)):
        with pytest.raises(IndexError, match="the target of row 4 is 99"):
            function()
    for dim in (2, -3, 2**32 + 1):
        for function in (rafter.softmax, rafter.logsumexp):
            with pytest.raises(IndexError, match="dim is "):
                function(x, dim)
    with pytest.raises(IndexError):
        rafter.cross_entropy(x, y, dim=3)


def test_messages_use_the_names_of_python():
    x, w, y = problem()
    three = torch.ones(3)
    for message, function in (
            ("rafter.cross_entropy: input has dtype fp64", lambda: rafter.cross_entropy(x.double(), y)),
            ("rafter.cross_entropy: weight has shape", lambda: rafter.cross_entropy(x, y, three)),
            ("rafter.cross_entropy: label_smoothing is", lambda: rafter.cross_entropy(x, y, label_smoothing=2.0)),
            ("entropy: weight has shape", lambda: rafter.linear_cross_entropy(x, w, y, weight=three)),
            ("entropy: row_weight has shape", lambda: rafter.linear_cross_entropy(x, w, y, row_weight=three)),
            ("entropy: linear_bias has shape", lambda: rafter.linear_cross_entropy(x, w, y, linear_bias=three)),
            ("wanted the shape of input without its last", lambda: rafter.linear_cross_entropy(x, w, y[:3])),
            ("rafter.act: input has dtype fp64", lambda: rafter.silu(x.double())),
            ("rafter.act: input has dtype bool", lambda: rafter.silu(x.bool())),
            ("rafter.act: input has dtype int8", lambda: rafter.silu(x.to(torch.int8))),
            ("rafter.act: input has dtype complex64", lambda: rafter.silu(x.to(torch.complex64))),
            ("rafter.act: input has dtype float8_e4m3fn", lambda: rafter.silu(x.to(torch.float8_e4m3fn))),
            ("rafter.lrpe_cosine: input has 2 dimensions", lambda: rafter.lrpe_cosine(x, torch.rand(1, 8)))):
        with pytest.raises(RuntimeError, match=message):
            function()


def test_classes_in_the_last_dimension_without_dim():
    """[batch, time, classes] with targets [batch, time]: the message names dim=-1."""
    z, y = torch.randn(2, 4, 100), torch.zeros(2, 4, dtype=torch.long)
    for extras in ((), "lse"):
        with pytest.raises(RuntimeError, match=r"shape \[2, 4\], wanted \[2, 100\].*\[2, 4, 100\].* pass dim=-1"):
            rafter.cross_entropy(z, y, extras=extras)
    assert rafter.cross_entropy(z, y, dim=-1).isfinite()
    with pytest.raises(RuntimeError, match=r"target has shape \[3, 4\], wanted \[2, 4\].*dim=-1$"):
        rafter.cross_entropy(z, torch.zeros(3, 4, dtype=torch.long), dim=-1)


def test_a_transposed_weight():
    x, w, y = problem()
    wrong = r"linear_weight has shape \[8, 9\], wanted \[V, D\] with D = 8, because input has shape \[..., 8\]"
    for function in (rafter.linear_cross_entropy, rafter.linear_logprobs):
        with pytest.raises(RuntimeError, match=wrong + r"; pass its transpose \(linear_weight.t\(\)"):
            function(x, w.t(), y)
        with pytest.raises(RuntimeError, match=r"because input has shape \[..., 8\]$"):
            function(x, w[:, 1:], y)


@parametrize("grad", [False, True])
def test_meta_and_real_tensors_together(grad):
    """PyTorch sends such calls to the fake kernels, which compute nothing."""
    x, w, y = (t.detach() for t in problem())
    q, theta = torch.randn(1, 3, 2, 4), torch.randn(2, 4)
    for function, tensors in ((rafter.cross_entropy, (x, y)), (rafter.linear_cross_entropy, (x, w, y)),
                              (rafter.linear_logprobs, (x, w, y)), (rafter.lrpe_cosine, (q, theta)),
                              (lambda x, y, r: rafter.cross_entropy(x, y, row_weight=r), (x, y, torch.ones(6))),
                              (lambda x, y: rafter.cross_entropy(x, y, extras="lse"), (x, y))):
        for which in range(len(tensors)):
            mixed = [t.to("meta") if i == which else t for i, t in enumerate(tensors)]
            mixed[0] = mixed[0].detach().clone().requires_grad_(grad)
            with pytest.raises(RuntimeError, match="is on (cpu|meta), wanted the first tensor's device"):
                function(*mixed)

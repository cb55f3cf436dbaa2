# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests: devices, inputs in awkward layouts, fp64 references, comparison."""
import functools
import os
import threading

import pytest
import torch
# Private, like Tensor._version in version() below; PyTorch has no public equivalent of the three.
# Only the tests use them. Checked with PyTorch 2.13 (CPU).
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401

import rafter

DEVICES = [d for d in os.environ.get("RAFTER_TEST_DEVICES", "cpu cuda").split()
           if d == "cpu" or torch.cuda.is_available()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def parametrize(name, values):
    return pytest.mark.parametrize(name, values)


@functools.cache
def refusal(op, device):
    """Why this build cannot run the op on the device (the library's error message), or None."""
    x = torch.zeros(2, 4, device=device)
    try:
        if op == "linear_cross_entropy":
            rafter.linear_cross_entropy(x, x, torch.zeros(2, dtype=torch.long, device=device))
    except RuntimeError as error:
        if device == "cpu":
            raise
        return str(error)
    return None


def skip_unless(op, device):
    if refusal(op, device):
        pytest.skip(refusal(op, device))


def version(tensor):
    """Autograd's count of in-place writes to the tensor."""
    return tensor._version


# ---- layouts: the same values with other strides


def contiguous(x):
    return x.clone(memory_format=torch.contiguous_format)


def padded(x):
    """Rows of a wider buffer, with NaN between them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), device=x.device).to(x.dtype)
    wide[..., :-3] = x
    return wide[..., :-3]


def transposed(x):
    """Column-major in the last two dimensions."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x.clone()


def every_other(x):
    """Stride 2 in the last dimension, with NaN in the gaps."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), device=x.device).to(x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


LAYOUTS = [contiguous, padded, transposed, every_other]

# ---- comparison

# Twice the relative error of one rounding to the dtype. The fp32 sums and operations before that
# rounding stay well within the rest.
_RTOL = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
_ATOL = {torch.float32: 2e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5}


def close(actual, expected, dtype=None, scale=1.0, atol=0.0):
    """Asserts that actual equals the fp64 `expected` within the rounding error of `dtype`, by
    default the dtype of actual."""
    dtype = dtype or actual.dtype
    rtol, atol = _RTOL[dtype] * scale, max(_ATOL[dtype] * scale, atol)
    torch.testing.assert_close(actual.detach().double().cpu(), expected.detach().double().cpu(), rtol=rtol, atol=atol,
                               equal_nan=True, check_stride=False)


def leaf(x):
    return x.detach().clone().requires_grad_() if x.is_contiguous() else x.detach().requires_grad_()


def gradients(function, tensors, upstream):
    """The function's result, and the gradients of its tensors for an upstream gradient: a tensor,
    or a function of the result."""
    out = function(*tensors)
    up = upstream(out) if callable(upstream) else upstream
    return out, torch.autograd.grad(out, tensors, up.to(out.dtype), allow_unused=True)


def in_threads(work, count):
    """Runs work() in so many threads at once, and waits for them."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def with_saved(function, *tensors):
    """The function's result, and the tensors that it saves for backward."""
    saved = []

    def pack(tensor):
        saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return function(*tensors), saved


def ones(out):
    return torch.ones_like(out)


def uneven(out):
    """An upstream gradient that differs from element to element; its values are exact in every
    dtype."""
    return (torch.arange(out.numel(), device=out.device) % 7 - 2.5).reshape(out.shape).to(out.dtype)


# ---- the losses in fp64


def loss_reference(logits, target, *, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0,
                   z_loss=0.0, softcap=None, logit_scale=None, row_weight=None, denominator=None,
                   zero_if_all_ignored=False):
    """The formula of rafter.h, for logits [..., V]."""
    u = logits.double()
    if softcap:
        u = softcap * torch.tanh(u / softcap)
    u = u * (logit_scale or 1.0)
    classes = u.shape[-1]
    w = torch.ones(classes, dtype=torch.float64, device=u.device) if weight is None else weight.double()
    active = target != ignore_index
    y = torch.where(active, target, 0).long()
    r = torch.logsumexp(u, -1)
    wy = w[y]
    rows = wy * (1 - label_smoothing) * (r - u.gather(-1, y.unsqueeze(-1)).squeeze(-1))
    rows = rows + label_smoothing / classes * (w * (r.unsqueeze(-1) - u)).sum(-1) + z_loss * r * r
    if row_weight is not None:
        rows = rows * row_weight.double()
    rows = torch.where(active, rows, 0.0)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    if denominator is not None:
        return rows.sum() / torch.as_tensor(denominator, dtype=torch.float64).to(u.device)
    if zero_if_all_ignored and not bool(active.any()):
        return rows.sum()
    return rows.sum() / torch.where(active, wy, 0.0).sum()


def labels(shape, classes, device, ignored=True, ignore_index=-100, seed=3):
    y = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))
    if ignored and y.numel() > 2:
        y.view(-1)[::3] = ignore_index
    return y.to(device)


def normal(*shape, device="cpu", dtype=torch.float32, seed=0, scale=1.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.to(device=device, dtype=dtype)


def smallest_budget(function):
    """The budget that function(budget) asks for in its error message, until it raises no more."""
    budget = 1
    while True:
        try:
            function(budget)
            return budget
        except RuntimeError as error:
            assert "budget is" in str(error)
            wanted = int(str(error).split("wanted at least ")[1].split(",")[0])
            assert wanted > budget
            budget = wanted

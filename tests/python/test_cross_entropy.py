# SPDX-License-Identifier: Apache-2.0
"""cross_entropy against torch.nn.functional.cross_entropy and against its formula in fp64."""
import pytest
import torch
import torch.nn.functional as F

import rafter
from support import (LAYOUTS, close, gradients, in_dtypes, labels, leaf, loss_reference, normal, on_devices, ones,
                     parametrize, uneven, version)

# The shapes of PyTorch's own tests (a vector, a batch, images with classes in dimension 1), and one
# row, one class, odd widths.
SHAPES = [(5,), (7, 5), (1, 1), (3, 257), (65, 33), (2, 6, 4), (2, 6, 3, 4)]


def reference(x, y, **options):
    return F.cross_entropy(x.double(), y.long(), **options)


@on_devices
@in_dtypes
@parametrize("reduction", ["mean", "sum", "none"])
@parametrize("shape", SHAPES)
def test_agrees_with_pytorch(device, dtype, reduction, shape):
    classes = shape[0] if len(shape) == 1 else shape[1]
    x = leaf(normal(*shape, device=device, dtype=dtype, scale=3.0))
    y = labels(shape[:1] + shape[2:] if len(shape) > 1 else (), classes, device)
    for smoothing in (0.0, 0.1):
        for weight in (None, normal(classes, device=device).abs() + 0.1):
            options = dict(reduction=reduction, label_smoothing=smoothing)
            ours, (dx,) = gradients(lambda x: rafter.cross_entropy(x, y, weight, **options), [x], uneven)
            wide = None if weight is None else weight.double()
            theirs, (expected,) = gradients(lambda x: reference(x, y, weight=wide, **options), [x], uneven)
            assert ours.dtype == torch.float32
            close(ours, theirs)
            close(dx, expected)


OPTIONS = [
    dict(z_loss=1e-2),
    dict(softcap=2.0),
    dict(logit_scale=0.7),
    dict(z_loss=1e-3, softcap=5.0, logit_scale=1.5, label_smoothing=0.1),
    dict(ignore_index=0),
    dict(denominator=13.5),
    dict(label_smoothing=1.0),
]


@on_devices
@in_dtypes
@parametrize("reduction", ["mean", "sum", "none"])
@parametrize("options", OPTIONS)
def test_further_options(device, dtype, reduction, options):
    if "denominator" in options and reduction != "mean":
        return
    x = leaf(normal(33, 65, device=device, dtype=dtype, scale=3.0))
    y = labels((33,), 65, device)
    y = torch.where(y == -100, options.get("ignore_index", -100), y)
    for row_weight in (None, normal(33, device=device, seed=5)):
        both = dict(reduction=reduction, row_weight=row_weight, **options)
        ours, (dx,) = gradients(lambda x: rafter.cross_entropy(x, y, **both), [x], uneven)
        theirs, (expected,) = gradients(lambda x: loss_reference(x, y, **both), [x], uneven)
        close(ours, theirs, scale=2)
        close(dx, expected, scale=2)


@on_devices
@parametrize("layout", LAYOUTS)
@parametrize("labels_dtype", [torch.int64, torch.int32, torch.uint8])
def test_layouts(device, layout, labels_dtype):
    values = normal(6, 9, device=device, scale=3.0)
    x = layout(values).requires_grad_()
    y = labels((6,), 9, device, ignored=False).to(labels_dtype)
    ours, (dx,) = gradients(lambda x: rafter.cross_entropy(x, y, reduction="none"), [x], uneven)
    theirs, (expected,) = gradients(lambda x: reference(x, y, reduction="none"), [x], uneven)
    close(ours, theirs)
    close(dx, expected)


@on_devices
def test_expanded_logits_and_gradients(device):
    row = normal(1, 9, device=device).requires_grad_()
    y = labels((6,), 9, device)
    ours, (drow,) = gradients(lambda r: rafter.cross_entropy(r.expand(6, 9), y, reduction="none"), [row],
                              torch.tensor(0.5, device=device).expand(6))
    theirs, (expected,) = gradients(lambda r: reference(r.expand(6, 9), y, reduction="none"), [row],
                                    torch.tensor(0.5, device=device).expand(6))
    close(ours, theirs)
    close(drow, expected)


@on_devices
def test_last_dimension(device):
    x, y = leaf(normal(2, 3, 7, device=device)), labels((2, 3), 7, device)
    close(rafter.cross_entropy(x, y, dim=-1), reference(x.movedim(-1, 1), y))


@on_devices
def test_denominator_on_the_device(device):
    x, y = normal(8, 5, device=device), labels((8,), 5, device)
    count = torch.tensor(40, device=device)  # any dtype
    close(rafter.cross_entropy(x, y, denominator=count), loss_reference(x, y, denominator=40.0))
    with pytest.raises(ValueError, match="denominator"):
        rafter.cross_entropy(x, y, denominator=count, reduction="sum")


@on_devices
def test_extras_come_by_name(device):
    x, y = leaf(normal(8, 5, device=device)), labels((8,), 5, device)
    out = rafter.cross_entropy(x, y, extras=("lse", "logprob", "entropy", "argmax", "row_loss"))
    active = y != -100
    p = torch.log_softmax(x.double(), -1)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    close(out.loss, reference(x, y))
    close(out.lse, torch.where(active, torch.logsumexp(x.double(), -1), zero))
    close(out.logprob, torch.where(active, p.gather(1, y.clamp(min=0)[:, None])[:, 0], zero))
    close(out.entropy, torch.where(active, -(p.exp() * p).sum(-1), zero))
    close(out.row_loss, loss_reference(x, y, reduction="none"))
    assert torch.equal(out.argmax, torch.where(active, x.argmax(-1), -1))
    assert out.loss.requires_grad and not any(t.requires_grad for t in out[1:])
    only = rafter.cross_entropy(x, y, extras="entropy")
    assert only._fields == out._fields and only.lse is None and only.argmax is None
    assert torch.equal(only.entropy, out.entropy)
    (expected,) = torch.autograd.grad(reference(x, y), x)
    close(torch.autograd.grad(out.loss, x)[0], expected)
    with pytest.raises(ValueError, match="extras"):
        rafter.cross_entropy(x, y, extras="accuracy")


@on_devices
def test_lse_of_rows_that_do_not_count(device):
    """What docs/pytorch.md says: a weight of 0 instead of ignore_index."""
    z, y = leaf(normal(9, 17, device=device)), labels((9,), 17, device)
    counts = y != -100
    assert 0 < int(counts.sum()) < 9
    ignored = rafter.cross_entropy(z, y, extras="lse")
    weighted = rafter.cross_entropy(z, y.masked_fill(~counts, 0), row_weight=counts.float(), denominator=counts.sum(),
                                    extras="lse")
    close(weighted.loss, ignored.loss.double())
    close(weighted.lse, torch.logsumexp(z.double(), -1))
    assert not ignored.lse[~counts].any()
    for one, other in zip(torch.autograd.grad(weighted.loss, z), torch.autograd.grad(ignored.loss, z)):
        close(one, other.double())


@on_devices
def test_all_ignored(device):
    x, y = leaf(normal(4, 5, device=device)), torch.full((4,), -100, device=device)
    loss, (dx,) = gradients(lambda x: rafter.cross_entropy(x, y), [x], ones)
    assert loss.isnan()
    loss, (dx,) = gradients(lambda x: rafter.cross_entropy(x, y, zero_if_all_ignored=True), [x], ones)
    assert loss == 0 and not dx.any()


@on_devices
def test_no_rows(device):
    x, y = torch.empty(0, 5, device=device, requires_grad=True), torch.empty(0, dtype=torch.long, device=device)
    assert rafter.cross_entropy(x, y).isnan()
    assert rafter.cross_entropy(x, y, reduction="sum") == 0
    loss, (dx,) = gradients(lambda x: rafter.cross_entropy(x, y, reduction="none"), [x], ones)
    assert loss.shape == (0,) and dx.shape == (0, 5)


@on_devices
def test_infinite_logits(device):
    x = normal(4, 6, device=device)
    x[0, 1:4] = -float("inf")
    x[1] = -float("inf")
    y = torch.tensor([0, 2, 3, 4], device=device)
    x = leaf(x)
    ours, (dx,) = gradients(lambda x: rafter.cross_entropy(x, y, reduction="none"), [x], ones)
    theirs, (expected,) = gradients(lambda x: reference(x, y, reduction="none"), [x], ones)
    expected[1] = 0  # PyTorch gives NaN for a row of -inf; Rafter gives 0
    close(ours, theirs)
    close(dx, expected)


def test_a_label_out_of_range_names_its_row():
    with pytest.raises(IndexError, match=r"rafter.cross_entropy: the target of row 1 is 9"):
        rafter.cross_entropy(torch.randn(3, 5), torch.tensor([0, 9, 1]))


def test_a_label_out_of_range_poisons_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    x, y = torch.randn(3, 5, device="cuda"), torch.tensor([0, 9, 1], device="cuda")
    loss = rafter.cross_entropy(x, y, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]


def test_refusals():
    x, y = torch.randn(3, 5), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="reduction is 'avg'"):
        rafter.cross_entropy(x, y, reduction="avg")
    with pytest.raises(ValueError, match="class probabilities"):
        rafter.cross_entropy(x, x)
    with pytest.raises(RuntimeError, match="dtype fp64, wanted fp32"):
        rafter.cross_entropy(x.double(), y)
    with pytest.raises(RuntimeError, match=r"target has shape \[2\]"):
        rafter.cross_entropy(x, y[:2])
    with pytest.raises(RuntimeError, match=r": weight has shape \[4\]"):
        rafter.cross_entropy(x, y, torch.ones(4))
    with pytest.raises(ValueError, match="row_weight requires a gradient"):
        rafter.cross_entropy(x, y, row_weight=torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="logit_scale is 0"):
        rafter.cross_entropy(x, y, logit_scale=0.0)
    with pytest.raises(RuntimeError, match="label_smoothing"):
        rafter.cross_entropy(x, y, label_smoothing=1.5)


@on_devices
def test_in_place_backward(device):
    values, y = normal(6, 9, device=device), labels((6,), 9, device)
    x = leaf(values)
    logits = x * 1.0
    loss = rafter.cross_entropy(logits, y, inplace_backward=True)
    before = version(logits)
    loss.backward(retain_graph=True)
    (expected,) = torch.autograd.grad(reference(x, y), x)
    close(x.grad, expected)
    close(logits, expected)  # the gradient has overwritten them
    assert version(logits) > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

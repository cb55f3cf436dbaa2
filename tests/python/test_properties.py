# SPDX-License-Identifier: Apache-2.0
"""Random shapes, layouts, dtypes and options (hypothesis) against fp64 references."""
import pytest
import torch
import torch.nn.functional as F

import rafter
from support import LAYOUTS, close, gradients, labels, loss_reference, normal, uneven

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

settings = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 1000)
options = st.fixed_dictionaries({
    "reduction": st.sampled_from(["mean", "sum", "none"]),
    "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
    "z_loss": st.sampled_from([0.0, 1e-2]),
    "softcap": st.sampled_from([None, 3.0, 30.0]),
    "logit_scale": st.sampled_from([None, 0.5, 2.0]),
    "ignore_index": st.sampled_from([-100, 0, -1]),
})


@settings
@hypothesis.given(rows=st.integers(0, 9), classes=st.integers(1, 70), dtype=dtypes, layout=layouts, seed=seeds,
                  options=options, weighted=st.booleans(), by_row=st.booleans())
def test_cross_entropy(rows, classes, dtype, layout, seed, options, weighted, by_row):
    x = layout(normal(rows, classes, dtype=dtype, seed=seed, scale=3.0)).requires_grad_()
    y = labels((rows,), classes, "cpu", ignore_index=options["ignore_index"], seed=seed)
    both = dict(options, row_weight=normal(rows, seed=seed + 1) if by_row else None)
    weight = normal(classes, seed=seed + 2).abs() + 0.1 if weighted else None
    ours, (dx,) = gradients(lambda x: rafter.cross_entropy(x, y, weight, **both), [x], uneven)
    theirs, (expected,) = gradients(lambda x: loss_reference(x, y, weight=weight, **both), [x], uneven)
    close(ours, theirs, scale=8)
    close(dx, expected, scale=4)


@settings
@hypothesis.given(rows=st.integers(1, 9), features=st.integers(1, 20), classes=st.integers(1, 70), layout=layouts,
                  seed=seeds, options=options, mode=st.sampled_from(["auto", "fast", "compact"]), bias=st.booleans())
def test_linear_cross_entropy(rows, features, classes, layout, seed, options, mode, bias):
    x = layout(normal(rows, features, seed=seed)).requires_grad_()
    w = layout(normal(classes, features, seed=seed + 1)).requires_grad_()
    b = normal(classes, seed=seed + 2).requires_grad_()
    y = labels((rows,), classes, "cpu", ignore_index=options["ignore_index"], seed=seed)
    tensors = [x, w, b] if bias else [x, w]
    ours, actual = gradients(
        lambda x, w, b=None: rafter.linear_cross_entropy(x, w, y, linear_bias=b, mode=mode, **options), tensors, uneven)
    theirs, expected = gradients(
        lambda x, w, b=None: loss_reference(F.linear(x.double(), w.double(), b if b is None else b.double()), y,
                                            **options), tensors, uneven)
    close(ours, theirs, scale=8)
    for a, e in zip(actual, expected):
        size = 1 + e.abs().max().item()
        close(a.double() / size, e / size, dtype=torch.float32, scale=8)


shapes = st.lists(st.integers(0, 6), min_size=1, max_size=4)


@settings
@hypothesis.given(shape=shapes, dtype=dtypes, layout=layouts, seed=seeds, data=st.data())
def test_reductions(shape, dtype, layout, seed, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = layout(normal(*shape, dtype=dtype, seed=seed, scale=3.0)).requires_grad_()
    keepdim = data.draw(st.booleans())
    ours, (dx,) = gradients(lambda x: rafter.logsumexp(x, dim, keepdim), [x], uneven)
    if x.shape[dim]:
        theirs, (expected,) = gradients(lambda x: torch.logsumexp(x.double(), dim, keepdim), [x], uneven)
        close(ours, theirs)
        close(dx, expected)
    y = rafter.softmax(x, dim)
    close(y, F.softmax(x.double(), dim))
    assert y.shape == x.shape


@settings
@hypothesis.given(shape=st.lists(st.integers(0, 6), max_size=5), dtype=dtypes, layout=layouts, seed=seeds)
def test_pointwise(shape, dtype, layout, seed):
    if not shape and layout is not LAYOUTS[0]:
        return
    x = layout(normal(*shape, dtype=dtype, seed=seed, scale=4.0)).requires_grad_()
    for function, other in ((rafter.relu, F.relu), (rafter.sigmoid, torch.sigmoid), (rafter.silu, F.silu)):
        ours, (dx,) = gradients(function, [x], uneven)
        theirs, (expected,) = gradients(lambda x: other(x.double()), [x], uneven)
        close(ours, theirs)
        close(dx, expected)

# SPDX-License-Identifier: Apache-2.0
"""The registered ops: torch.library.opcheck, fake tensors, torch.compile, export, autocast, CUDA
graphs."""
import pytest
import torch
import torch.nn.functional as F

import rafter
from rafter import _compat, _ops
from rafter._options import BASIC, BASIC_LINEAR, NONE, LinearOptions, LossOptions, flatten, unflatten
from support import FakeTensorMode, labels, leaf, normal, on_devices, parametrize, refusal, skip_unless

OPTIONS = LossOptions(label_smoothing=0.1, z_loss=1e-3, softcap=5.0, logit_scale=0.7)


def samples(device):
    """By op name: argument lists, several where options change the results."""
    z, y, w = normal(6, 9, device=device), labels((6,), 9, device), normal(9, 8, device=device)
    x, b, one = normal(6, 8, device=device), normal(9, device=device), torch.ones((), device=device)
    lse, rows = torch.logsumexp(z, -1), normal(6, device=device)
    wide = torch.logsumexp(x @ w.t(), -1)
    cube, theta = normal(2, 3, 2, 8, device=device), normal(2, 8, device=device)
    weights = (b.abs(), rows.abs(), one)
    options, per_row = flatten(OPTIONS), flatten(OPTIONS._replace(reduction=NONE))
    return {
        "act": [(z, 1), (z, 3), (z, 4, 0), (z.t(), 4, -1), (z[:, ::2], 2)],
        "act_backward": [(z, z, 3), (z, z.softmax(0), 4, 0)],
        "relu_saving": [(z,), (z[:, :1].contiguous(),)],
        "relu_mask_backward": [(z, torch.arange(7, dtype=torch.uint8, device=device))],
        "logsumexp": [(z, 1), (cube, 1, True, 1), (z.t(), 0)],
        "logsumexp_rounded": [(z, 1), (z.bfloat16(), 0, True, 2)],
        "logsumexp_saving": [(z, 1), (z.bfloat16(), 0, True, 2)],
        "logsumexp_backward": [(lse, z, lse, 1), (lse, z, lse, 1, 2)],
        "cross_entropy": [(z, y), (z, y, *options), (z, y, *per_row), (z, y, *weights)],
        "cross_entropy_stats": [(z, y, 0), (z, y, 15, *options), (z, y, 5, *per_row)],
        "cross_entropy_backward": [(one, z, y, lse), (one, z, y, lse, *weights), (rows, z, y, lse, *per_row)],
        "cross_entropy_backward_": [(one, z, y, lse), (rows, z, y, lse, *per_row)],
        "linear_cross_entropy": [(x, w, None, y, 0), (x, w, b, y, 7), (x, w, b, y, 2, *options, 1, 0, 0),
                                 (x, w, b, y, 0, *per_row)],
        "linear_cross_entropy_stats": [(x, w, None, y, 3, 15), (x, w, b, y, 0, 6, *per_row)],
        "linear_cross_entropy_backward": [(one, x, w, None, y, wide, 3), (rows, x, w, b, y, wide, 5, *per_row)],
        "linear_cross_entropy_backward_main_grad": [(one, x, w, None, y, wide, torch.zeros_like(w), 3)],
        "linear_cross_entropy_saving": [(x, w, None, y, 0), (x, w, b, y, 15, *per_row)],
        "linear_cross_entropy_backward_saved": [
            (one, None, None, x, w, None, y, wide, torch.empty(0, dtype=torch.int64, device=device), None, 3),
            (rows, rows, rows.abs(), x, w, b, y, wide, torch.empty(0, dtype=torch.int64, device=device), None, 7, *per_row),
            (one, None, None, x, w, b, y, wide, torch.empty(0, dtype=torch.int64, device=device), torch.zeros_like(w), 7)],
        "linear_logprobs": [(x, w, None, y, False, False, *per_row), (x, w, b, y, True, True, *per_row)],
        "linear_logprobs_backward": [(rows, rows, x, w, b, y, wide, rows.abs(), 7, *per_row),
                                     (rows, rows, x, w, None, y, wide, rows.abs(), 2, *per_row, 2, 0, 0)],
        "lrpe_cosine": [(cube, theta), (cube, theta[:1], torch.arange(3, device=device), 0, 3),
                        (cube, theta, None, 5, 4, 1, 2)],
        "lrpe_cosine_backward": [(torch.cat([cube, cube], -1), False, cube, theta),
                                 (torch.cat([cube, cube], -1), True, cube, theta)],
        "scale_": [(z.clone(), one), (z.clone(), 3 * one), (cube.clone().transpose(1, 2), rows[:1])],
    }


def test_every_op_has_samples():
    assert sorted(samples("cpu")) == sorted(_ops.NAMES)


def test_options_match_the_schemas():
    """LossOptions has the order and the defaults of the schemas in python/src."""
    linear = ("lce_mode", *LinearOptions._fields[1:])
    all_options = LossOptions._fields + linear
    for name in ("cross_entropy", "cross_entropy_stats", "cross_entropy_backward", "cross_entropy_backward_"):
        assert tuple(_compat.argument_names(_ops.public(name)))[-len(LossOptions._fields):] == LossOptions._fields
    for name in ("", "_stats", "_backward", "_backward_main_grad", "_saving", "_backward_saved"):
        names = tuple(_compat.argument_names(_ops.public("linear_cross_entropy" + name)))
        assert names[-len(all_options):] == all_options
    for name in ("linear_logprobs", "linear_logprobs_backward"):
        assert tuple(_compat.argument_names(_ops.public(name)))[-len(all_options):] == all_options
    z, y = normal(6, 9), labels((6,), 9, "cpu")
    op = torch.ops.rafter.cross_entropy
    for actual, expected in zip(op(z, y, *LossOptions()), op(z, y)):
        assert torch.equal(actual, expected)
    assert flatten(BASIC) == flatten(BASIC, BASIC_LINEAR) == ()
    assert unflatten(flatten(OPTIONS, LinearOptions(mode=2))) == (OPTIONS, LinearOptions(mode=2))


def with_gradients(op, args):
    """The arguments, with requires_grad set on those that the op has a gradient for."""
    wanted = {"x", "input", "theta", "linear_weight", "linear_bias"}
    return tuple(leaf(a) if isinstance(a, torch.Tensor) and name in wanted else a
                 for name, a in zip(_compat.argument_names(op), args))


@on_devices
@parametrize("name", list(samples("cpu")))
def test_opcheck(device, name):
    if name.startswith("linear"):
        skip_unless("linear_cross_entropy", device)
    op = getattr(torch.ops.rafter, name).default
    below = getattr(torch.ops.rafter, "_" + name).default
    # The backward ops, and those that compute a rounded result, refuse to be differentiated
    # (test_autograd), so they are checked without gradients.
    differentiable = not (name.endswith(("backward", "saving", "rounded")) or _compat.is_mutable(op))
    for args in samples(device)[name]:
        torch.library.opcheck(op, with_gradients(op, args) if differentiable else args)
        torch.library.opcheck(below, args)


@on_devices
@parametrize("name", list(samples("cpu")))
def test_fake_kernels(device, name):
    """The fake result has the shape, strides, dtype and device of the real one."""
    if name.startswith("linear"):
        skip_unless("linear_cross_entropy", device)
    op = getattr(torch.ops.rafter, name).default
    for args in samples(device)[name]:
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
        real = op(*args)
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (fake, real))):
            if a is not None:
                assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def model(device):
    y, theta = labels((6,), 9, device), normal(1, 8, device=device, seed=2)
    linear = refusal("linear_cross_entropy", device) is None

    def step(x, w):
        """Uses every function."""
        h = rafter.silu(x) + rafter.relu(x) * rafter.sigmoid(x)
        h = h + rafter.lrpe_cosine(h.view(2, 3, 8), theta, act="silu").view(6, 16)[:, ::2]
        logits = h @ w.t()
        loss = rafter.cross_entropy(logits, y, label_smoothing=0.1, z_loss=1e-3)
        out = rafter.cross_entropy(logits, y, reduction="none", extras=("entropy", "argmax"))
        loss = loss + out.loss.mean() + out.entropy.sum() + rafter.softmax(logits, -1).square().sum()
        loss = loss + rafter.logsumexp(logits, -1).sum() + rafter.logsumexp(h.bfloat16(), 0, dtype=torch.float32).sum()
        if linear:
            loss = loss + rafter.linear_cross_entropy(h, w, y) + rafter.linear_cross_entropy(h, w, y, mode="compact")
            logprob, entropy, _ = rafter.linear_logprobs(h, w, y, entropy=True, temperature=0.7)
            loss = loss + (logprob * 0.5).sum() + 0.1 * entropy.sum()
        return loss

    return step


@on_devices
@parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_graph_breaks(device, backend):
    torch.compiler.reset()
    step = model(device)
    x, w = leaf(normal(6, 8, device=device)), leaf(normal(9, 8, device=device, seed=1))
    expected = step(x, w)
    wanted = torch.autograd.grad(expected, [x, w])
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    actual = compiled(x, w)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(actual, [x, w]), wanted):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w), expected, rtol=1e-5, atol=1e-5)


@on_devices
def test_compiled_gradients_keep_the_upstream_gradient_exact(device):
    """bf16 gradients are scaled by the fp32 upstream gradient, not by its bf16 rounding."""
    skip_unless("linear_cross_entropy", device)
    torch.compiler.reset()
    x, w = leaf(normal(6, 8, device=device, dtype=torch.bfloat16)), normal(9, 8, device=device).bfloat16()
    y = labels((6,), 9, device)
    function = lambda x: rafter.linear_cross_entropy(x, w, y) / 3  # noqa: E731
    (expected,) = torch.autograd.grad(function(x), x)
    (actual,) = torch.autograd.grad(torch.compile(function, fullgraph=True, backend="aot_eager")(x), x)
    assert torch.equal(actual, expected) and actual.dtype == torch.bfloat16


@on_devices
def test_compile_with_dynamic_shapes(device):
    torch.compiler.reset()
    compiled = torch.compile(lambda x, y: rafter.cross_entropy(rafter.silu(x), y, reduction="none").sum(),
                             fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, classes in ((4, 9), (7, 13), (5, 6)):
        x, y = leaf(normal(rows, classes, device=device)), labels((rows,), classes, device)
        (actual,) = torch.autograd.grad(compiled(x, y), x)
        (expected,) = torch.autograd.grad(F.cross_entropy(F.silu(x), y, reduction="sum"), x)
        torch.testing.assert_close(actual, expected)


@parametrize("strict", [False, True])
def test_export(strict):
    """The exported program calls the registered ops."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.step = model("cpu")

        def forward(self, x, w):
            return self.step(x, w)

    x, w = normal(6, 8), normal(9, 8, seed=1)
    program = torch.export.export(Model(), (x, w), strict=strict)
    names = {str(node.target) for node in program.graph.nodes}
    assert {"rafter.act.default", "rafter.cross_entropy.default", "rafter.linear_cross_entropy.default"} <= names
    torch.testing.assert_close(program.module()(x, w), model("cpu")(x, w))


@on_devices
def test_autocast(device):
    x, y = leaf(normal(6, 9, device=device)), labels((6,), 9, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert rafter.cross_entropy(x, y).dtype == torch.float32
        assert rafter.cross_entropy(x.bfloat16(), y).dtype == torch.float32
        assert rafter.silu(x.bfloat16()).dtype == torch.bfloat16


def test_tensors_on_two_devices():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    with pytest.raises(RuntimeError, match="argument 2 is on the CPU, wanted the first tensor's device, cuda:0"):
        torch.ops.rafter._cross_entropy(torch.randn(3, 4, device="cuda"), torch.zeros(3, dtype=torch.long))


def test_cuda_graphs():
    """Forward and backward are captured on a new stream, then replayed with other data."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    step = model("cuda")
    x, w = leaf(normal(6, 8, device="cuda")), leaf(normal(9, 8, device="cuda", seed=1))

    def run():
        loss = step(x, w)
        return (loss, *torch.autograd.grad(loss, [x, w]))

    for _ in range(6):  # several streams first, as in a long program
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (5, 6):
        with torch.no_grad():
            x.copy_(normal(6, 8, device="cuda", seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(captured, run()):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compile_reduce_overhead():
    """torch.compile's own CUDA graphs."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.compiler.reset()
    step = model("cuda")
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x, w = leaf(normal(6, 8, device="cuda", seed=seed)), leaf(normal(9, 8, device="cuda", seed=1))
        expected = step(x, w)
        wanted = torch.autograd.grad(expected, [x, w])
        actual = compiled(x, w)
        for a, b in zip(torch.autograd.grad(actual, [x, w]), wanted):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy and linear_logprobs against F.cross_entropy of a matrix product, in fp64."""
import contextlib

import pytest
import torch
import torch.nn.functional as F

import rafter
from rafter import _compat
from support import (LAYOUTS, TorchDispatchMode, close, gradients, in_dtypes, labels, leaf, loss_reference, normal,
                     on_devices, ones, parametrize, skip_unless, smallest_budget, uneven, version)

OP = "linear_cross_entropy"


def problem(device, dtype, rows=33, features=24, classes=65, bias=False):
    x = leaf(normal(rows, features, device=device, dtype=dtype))
    w = leaf(normal(classes, features, device=device, dtype=dtype, seed=1, scale=0.4))
    b = leaf(normal(classes, device=device, dtype=dtype, seed=2)) if bias else None
    return x, w, b, labels((rows,), classes, device)


def logits(x, w, b=None):
    return F.linear(x.double(), w.double(), None if b is None else b.double())


def compare(ours, theirs, tensors, upstream):
    """The gradient of the logits is rounded to the dtype of the inputs before the matrix products,
    as autograd would do, so the error of a gradient is relative to its largest element."""
    a, da = gradients(ours, tensors, upstream)
    b, db = gradients(theirs, tensors, upstream)
    close(a, b, scale=4)
    for actual, expected in zip(da, db):
        size = expected.abs().max().item() or 1.0
        close(actual.double() / size, expected / size, dtype=actual.dtype, scale=2, atol=torch.finfo(actual.dtype).eps)


@on_devices
@in_dtypes
@parametrize("bias", [False, True])
@parametrize("reduction", ["mean", "sum", "none"])
def test_agrees_with_pytorch(device, dtype, bias, reduction):
    skip_unless(OP, device)
    x, w, b, y = problem(device, dtype, bias=bias)
    tensors = [x, w] + [b] * bias
    for options in (dict(), dict(label_smoothing=0.1), dict(weight=normal(65, device=device, seed=4).abs() + 0.1)):
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        compare(lambda x, w, b=None: rafter.linear_cross_entropy(x, w, y, linear_bias=b, reduction=reduction,
                                                                 **options),
                lambda x, w, b=None: F.cross_entropy(logits(x, w, b), y, reduction=reduction, **wide), tensors, uneven)


@parametrize("reduction", ["mean", "sum", "none"])
def test_agrees_with_pytorch_linear_cross_entropy(reduction):
    own = getattr(F, "linear_cross_entropy", None)
    if own is None:
        pytest.skip("this PyTorch has no linear_cross_entropy")
    x, w, b, y = problem("cpu", torch.float32, bias=True)
    options = dict(linear_bias=b, reduction=reduction, label_smoothing=0.2, ignore_index=-100)
    ours, theirs = rafter.linear_cross_entropy(x, w, y, **options), own(x, w, y, **options)
    close(ours, theirs.double())
    for actual, expected in zip(torch.autograd.grad(ours.sum(), [x, w, b]),
                                torch.autograd.grad(theirs.sum(), [x, w, b])):
        close(actual, expected.double(), scale=4)


@on_devices
@parametrize("mode", ["auto", "fast", "compact"])
@parametrize("options", [dict(z_loss=1e-2, softcap=3.0, logit_scale=0.8), dict(denominator=7.0),
                         dict(accumulate="native"), dict(budget=1 << 24)])
def test_further_options(device, mode, options):
    skip_unless(OP, device)
    x, w, b, y = problem(device, torch.float32, bias=True)
    row_weight = normal(33, device=device, seed=6)
    formula = {k: v for k, v in options.items() if k not in ("accumulate", "budget")}
    compare(lambda x, w, b: rafter.linear_cross_entropy(x, w, y, linear_bias=b, mode=mode, row_weight=row_weight,
                                                        **options),
            lambda x, w, b: loss_reference(logits(x, w, b), y, row_weight=row_weight, **formula), [x, w, b], uneven)


@on_devices
@parametrize("layout", LAYOUTS)
def test_layouts(device, layout):
    skip_unless(OP, device)
    x, w, b, y = problem(device, torch.float32)
    x, w = layout(x.detach()).requires_grad_(), layout(w.detach()).requires_grad_()
    compare(lambda x, w: rafter.linear_cross_entropy(x, w, y), lambda x, w: F.cross_entropy(logits(x, w), y), [x, w],
            ones)


@on_devices
def test_leading_dimensions(device):
    skip_unless(OP, device)
    x, w, _, y = problem(device, torch.float32, rows=12)
    cube, square = leaf(x.detach().view(3, 4, -1)), y.view(3, 4)
    compare(lambda x, w: rafter.linear_cross_entropy(x, w, square, reduction="none"),
            lambda x, w: loss_reference(logits(x, w), square, reduction="none"), [cube, w], uneven)


@on_devices
def test_extras(device):
    skip_unless(OP, device)
    x, w, _, y = problem(device, torch.float32)
    every = ("row_loss", "lse", "logprob", "entropy", "argmax")
    for needs in (True, False):
        with torch.set_grad_enabled(needs):
            out = rafter.linear_cross_entropy(x, w, y, extras=every)
            expected = rafter.cross_entropy(F.linear(x, w), y, extras=every)
        assert out._fields == expected._fields and out.loss.requires_grad == needs
        for actual, wanted in zip(out, expected):
            torch.testing.assert_close(actual, wanted, rtol=2e-5, atol=2e-6)
    assert rafter.linear_cross_entropy(x, w, y, extras=("lse",)).argmax is None


def seen_by_dispatcher(function):
    """The name and the arguments of each rafter op that the function calls."""
    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "rafter":
                calls.append((_compat.op_name(func).removeprefix("rafter.").lstrip("_"), args))
            return func(*args, **(kwargs or {}))

    with Watch():
        function()
    return calls


@on_devices
def test_only_wanted_gradients_are_computed(device):
    skip_unless(OP, device)
    x, w, b, y = problem(device, torch.float32, bias=True)
    for bits, needs in ((0, (False, False, False)), (1, (True, False, False)), (2, (False, True, False)),
                        (7, (True, True, True))):
        for tensor, wanted in zip((x, w, b), needs):
            tensor.requires_grad_(wanted)
        ((name, args),) = seen_by_dispatcher(lambda: rafter.linear_cross_entropy(x, w, y, linear_bias=b))
        assert (name, args[4]) == ("linear_cross_entropy", bits)
        if bits:
            loss = rafter.linear_cross_entropy(x, w, y, linear_bias=b, reduction="none")
            calls = seen_by_dispatcher(lambda: loss.sum().backward())
            ((name, args),) = [call for call in calls if call[0].endswith("backward")]
            assert args[6] == bits
            assert [t.grad is not None for t in (x, w, b)] == list(needs)
            x.grad = w.grad = b.grad = None
    with torch.no_grad():
        ((name, args),) = seen_by_dispatcher(lambda: rafter.linear_cross_entropy(x, w, y, linear_bias=b))
    assert args[4] == 0


@on_devices
@parametrize("mode", ["auto", "compact"])
def test_main_grad(device, mode):
    skip_unless(OP, device)
    x, w, b, y = problem(device, torch.bfloat16, bias=True)
    w.main_grad = torch.full(w.shape, 0.25, dtype=torch.float32, device=device)
    before = version(w.main_grad)
    for _ in range(2):  # it accumulates
        (3 * rafter.linear_cross_entropy(x, w, y, linear_bias=b, mode=mode, main_grad=True)).backward()
    assert w.grad is None and version(w.main_grad) > before
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    dx, dw, db = torch.autograd.grad(F.cross_entropy(logits(*wide), y), wide)
    eps = torch.finfo(torch.bfloat16).eps
    for actual, expected in ((w.main_grad - 0.25, dw), (x.grad, dx), (b.grad, db)):
        size = 6 * expected.abs().max()
        close(actual.double() / size, 6 * expected / size, dtype=torch.bfloat16, atol=eps)
    with pytest.raises(ValueError, match="main_grad"):
        rafter.linear_cross_entropy(x, w.detach(), y, main_grad=True)


@on_devices
def test_scaled_losses_in_fp16(device):
    """Loss scaling, as torch.amp.GradScaler does it, keeps fp16 gradients from underflowing."""
    skip_unless(OP, device)
    x, w, _, y = problem(device, torch.float16, rows=64)
    scale = 2.0**14
    loss = rafter.linear_cross_entropy(x, w, y, denominator=1e6)
    dx, dw = torch.autograd.grad(loss * scale, [x, w])
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    reference = loss_reference(logits(*wide), y, denominator=1e6)
    for actual, expected in zip((dx, dw), torch.autograd.grad(reference * scale, wide)):
        size = expected.abs().max()
        close(actual.double() / size, expected / size, dtype=torch.float16, scale=2,
              atol=torch.finfo(torch.float16).eps)


@on_devices
def test_mixed_dtypes_and_autocast(device):
    skip_unless(OP, device)
    x, w, _, y = problem(device, torch.float32)
    half = leaf(x.detach().bfloat16())
    loss, (dx, dw) = gradients(lambda x, w: rafter.linear_cross_entropy(x, w, y), [half, w], ones)
    assert loss.dtype == torch.float32 and dx.dtype == torch.bfloat16 and dw.dtype == torch.float32
    with torch.autocast(device, dtype=torch.bfloat16):
        loss, (dx, dw) = gradients(lambda x, w: rafter.linear_cross_entropy(x, w, y), [x, w], ones)
        assert rafter.cross_entropy(F.linear(x, w), y).dtype == torch.float32
    assert loss.dtype == dx.dtype == dw.dtype == torch.float32
    rounded = F.cross_entropy(logits(x.bfloat16(), w.bfloat16()), y)
    close(loss, rounded)


@on_devices
def test_refusals(device):
    skip_unless(OP, device)
    x, w, _, y = problem(device, torch.float32)
    with pytest.raises(RuntimeError, match=r": linear_weight has shape \[65, 23\]"):
        rafter.linear_cross_entropy(x, w[:, 1:], y)
    with pytest.raises(ValueError, match="temperature is 0.0"):
        rafter.linear_logprobs(x, w, y, temperature=0.0)
    with pytest.raises(ValueError, match="mode is 'quick'"):
        rafter.linear_cross_entropy(x, w, y, mode="quick")
    with pytest.raises(RuntimeError, match="budget"):
        rafter.linear_cross_entropy(x, w, y, budget=64)


# ---- TF32


@contextlib.contextmanager
def tf32(allowed):
    """PyTorch allows TF32 products, or does not; afterwards the default: not."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def errors_of_gradients(device, function, in_forward, in_backward):
    """Of dx and dW, relative to their largest elements; with TF32 allowed in either direction."""
    x, w, _, y = problem(device, torch.float32, rows=256, features=512, classes=1024)
    exact = torch.autograd.grad(F.cross_entropy(logits(x, w), y, reduction="sum"), [x, w])
    with tf32(in_forward):
        if function == "logprobs":
            loss = -rafter.linear_logprobs(x, w, y).logprob.sum()
        else:
            loss = rafter.linear_cross_entropy(x, w, y, reduction="sum", mode=function)
    with tf32(in_backward):
        actual = torch.autograd.grad(loss, [x, w])
    return [((a - e).abs().max() / e.abs().max()).item() for a, e in zip(actual, exact)]


@on_devices
@parametrize("function", ["fast", "compact", "logprobs"])
def test_tf32_only_where_pytorch_allows_it(device, function):
    """The setting of forward counts, also in backward. The CPU knows no TF32."""
    skip_unless(OP, device)
    for in_backward in (False, True):
        assert max(errors_of_gradients(device, function, False, in_backward)) < 2e-5
        rounded = errors_of_gradients(device, function, True, in_backward)
        if device == "cuda":
            assert 1e-4 < min(rounded) and max(rounded) < 2e-2
        else:
            assert max(rounded) < 2e-5


def test_tf32_under_compile():
    """Dynamo accepts the question for the setting, and compiles again when it changes."""

    @torch.compile(fullgraph=True, backend="eager")
    def allowed(x):
        return x + 1 if _compat.tf32_products() else x

    for setting in (False, True, False):
        with tf32(setting):
            assert bool(allowed(torch.zeros(2))[0]) is setting


# ---- linear_logprobs


@on_devices
@in_dtypes
@parametrize("options", [dict(), dict(temperature=0.7), dict(temperature=1.3, softcap=3.0)])
@parametrize("parts", ["logprob", "entropy", "both"])
def test_logprobs(device, dtype, options, parts):
    skip_unless(OP, device)
    x, w, b, y = problem(device, dtype, bias=True)

    def pick(logprob, entropy):
        return torch.stack([logprob, entropy]) if parts == "both" else logprob if parts == "logprob" else entropy

    def expected(x, w, b):
        u = logits(x, w, b)
        if "softcap" in options:
            u = options["softcap"] * torch.tanh(u / options["softcap"])
        p = torch.log_softmax(u / options.get("temperature", 1.0), -1)
        active = y != -100
        return pick(torch.where(active, p.gather(1, y.clamp(min=0)[:, None])[:, 0], 0.0),
                    torch.where(active, -(p.exp() * p).sum(-1), 0.0))

    def ours(x, w, b):
        out = rafter.linear_logprobs(x, w, y, linear_bias=b, entropy=parts != "logprob", **options)
        assert bool((out.logprob <= 0).all())
        return pick(*out[:2])

    compare(ours, expected, [x, w, b], uneven)


@on_devices
@in_dtypes
def test_logprobs_read_no_ignored_row(device, dtype):
    skip_unless(OP, device)
    x, w, b, y = problem(device, dtype, bias=True)
    padding = (y == -100)[:, None]
    results = []
    for fill in (0.0, float("nan")):
        rows = leaf(x.detach().masked_fill(padding, fill))
        out = rafter.linear_logprobs(rows, w, y, linear_bias=b, entropy=True)
        results.append((*out[:2], *torch.autograd.grad((out.logprob + 0.5 * out.entropy).sum(), [rows, w, b])))
    for clean, filled in zip(*results):
        assert torch.equal(clean, filled)
    assert not results[1][2][padding[:, 0]].any()


@on_devices
@parametrize("ignore_index", [-100, -1])
def test_logprobs_say_whether_the_target_is_the_top_class(device, ignore_index):
    """In the same call as log-probability and entropy, with their gradients."""
    skip_unless(OP, device)
    x, w, b, y = problem(device, torch.float32, bias=True)
    z = logits(x, w, b).detach()
    y = torch.where(torch.arange(len(y), device=device) % 2 == 0, z.argmax(-1), y.clamp(min=0))
    y[1] = y[2] = ignore_index
    expected = (z.argmax(-1) == y) & (y != ignore_index)
    out = rafter.linear_logprobs(x, w, y, linear_bias=b, ignore_index=ignore_index, entropy=True, is_top=True)
    assert out.is_top.dtype is torch.bool and torch.equal(out.is_top, expected) and 3 < int(expected.sum()) < len(y)
    two = rafter.linear_logprobs(x, w, y, linear_bias=b, ignore_index=ignore_index, entropy=True)
    assert two.is_top is None
    loss = lambda o: (o.logprob - 0.1 * o.entropy).sum()  # noqa: E731
    for one, other in zip(torch.autograd.grad(loss(out), [x, w, b]), torch.autograd.grad(loss(two), [x, w, b])):
        assert torch.equal(one, other)
    with torch.no_grad():
        plain = rafter.linear_logprobs(x, w, y, linear_bias=b, ignore_index=ignore_index, is_top=True)
    assert torch.equal(plain.is_top, expected) and plain.entropy is None
    ties = rafter.linear_logprobs(torch.ones(2, 4, device=device), torch.ones(3, 4, device=device),
                                  torch.tensor([0, 1], device=device), is_top=True)
    assert ties.is_top.tolist() == [True, False]  # of equal logits, the first


@on_devices
def test_logprobs_without_features(device):
    skip_unless(OP, device)
    x, w, b, y = problem(device, torch.float32, features=0, bias=True)
    out = rafter.linear_logprobs(x, w, y, linear_bias=b, entropy=True)
    dx, dw, db = torch.autograd.grad(out.entropy.sum(), [x, w, b])
    assert dx.shape == (33, 0) and dw.shape == (65, 0)
    p = torch.log_softmax(b.double(), -1)
    (expected,) = torch.autograd.grad((y != -100).sum() * -(p.exp() * p).sum(), b)
    close(db, expected, scale=4)


@on_devices
@parametrize("mode", ["fast", "compact"])
def test_logprobs_within_a_budget(device, mode):
    """The smallest groups of rows and slices of classes."""
    skip_unless(OP, device)
    x, w, b, y = problem(device, torch.float32, rows=133, classes=465, bias=True)

    def ours(**options):
        out = rafter.linear_logprobs(x, w, y, linear_bias=b, entropy=True, **options)
        return torch.autograd.grad((out.logprob - 0.5 * out.entropy).sum(), [x, w, b])

    whole = ours()
    budget = smallest_budget(lambda budget: ours(mode=mode, budget=budget))
    for part, expected in zip(ours(mode=mode, budget=budget), whole):
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)


@on_devices
def test_logprobs_gradients_are_of_the_library(device):
    """Backward calls no op of PyTorch that multiplies matrices."""
    skip_unless(OP, device)
    x, w, _, y = problem(device, torch.float32)
    called = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    out = rafter.linear_logprobs(x, w, y, entropy=True)
    with Watch():
        torch.autograd.grad((out.logprob + out.entropy).sum(), [x, w])
    assert "rafter._linear_logprobs_backward.default" in called
    assert not any("mm" in name or "matmul" in name or "softmax" in name for name in called)


# ---- exponentials that forward saves for backward


@on_devices
@parametrize("dtype", [torch.bfloat16, torch.float16])
@parametrize("options", [
    dict(), dict(softcap=3.0), dict(label_smoothing=0.1), dict(weight=True, label_smoothing=0.2, logit_scale=0.5),
    dict(row_weight=True, z_loss=0.01)])
def test_backward_from_saved_exponentials(device, dtype, options):
    """The first backward uses what forward saved, a second one computes the logits again, and mode
    "compact" never saves. All agree with fp64."""
    skip_unless(OP, device)
    x, w, b, y = problem(device, dtype, rows=200, features=64, classes=1000, bias=True)
    options = dict(options)
    if options.get("weight"):
        options["weight"] = normal(1000, device=device, seed=4).abs() + 0.1
    if options.get("row_weight"):
        options["row_weight"] = normal(200, device=device, seed=5)
    loss = rafter.linear_cross_entropy(x, w, y, linear_bias=b, reduction="none", **options)
    upstream = uneven(loss)
    first = torch.autograd.grad(loss, [x, w, b], upstream, retain_graph=True)
    second = torch.autograd.grad(loss, [x, w, b], upstream)
    compact = rafter.linear_cross_entropy(x, w, y, linear_bias=b, reduction="none", mode="compact", **options)
    third = torch.autograd.grad(compact, [x, w, b], upstream)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    exact = loss_reference(logits(x, w, b), y, reduction="none", **wide)
    close(loss, exact, scale=4)
    for expected, *actual in zip(torch.autograd.grad(exact, [x, w, b], upstream), first, second, third):
        size = expected.abs().max().item()
        for each in actual:
            close(each.double() / size, expected.double() / size, dtype=dtype, scale=2, atol=torch.finfo(dtype).eps)


@on_devices
def test_forward_saves_only_where_it_helps(device):
    skip_unless(OP, device)
    x, w, _, y = problem(device, torch.bfloat16, rows=200, features=64, classes=1000)
    saving = torch.ops.rafter.linear_cross_entropy_saving
    saved = saving(x, w, None, y, 0)[2]
    hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    assert saved.numel() * 8 == (200 * (1000 * 2 + 64) + 256 * 4 if hopper else 0)
    assert saving(x, w, None, y, 0, lce_mode=2)[2].numel() == 0
    # Logits are read back out of the exponentials, which fp16 cannot hold.
    both = dict(softcap=3.0, label_smoothing=0.1)
    assert saving(x, w, None, y, 0, **both)[2].numel() == saved.numel()
    assert saving(x.half(), w.half(), None, y, 0, **both)[2].numel() == 0
    assert saving(x.float(), w.float(), None, y, 0)[2].numel() == 0


@on_devices
@parametrize("dtype", [torch.bfloat16, torch.float16])
@parametrize("uses_entropy", [False, True])
def test_logprobs_from_saved_exponentials(device, dtype, uses_entropy):
    """Backward uses what was saved, whether the entropy has an upstream gradient or not."""
    skip_unless(OP, device)
    x, w, b, y = problem(device, dtype, rows=200, features=64, classes=1000, bias=True)
    results = [rafter.linear_logprobs(x, w, y, linear_bias=b, entropy=True, temperature=0.8, mode=mode)
               for mode in ("auto", "compact")]
    z = logits(x, w, b) / 0.8
    p = z.log_softmax(-1)
    counts = y != -100
    logprob = p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1) * counts
    entropy = -(p.exp() * p).sum(-1) * counts
    upstream = uneven(logprob)
    wanted = torch.autograd.grad((logprob * upstream).sum() + uses_entropy * entropy.sum(), [x, w, b])
    for result in results:
        close(result.logprob, logprob, scale=4, atol=1e-5)
        close(result.entropy, entropy, scale=4, atol=1e-5)
        value = (result.logprob * upstream).sum() + (result.entropy.sum() if uses_entropy else 0)
        for actual, expected in zip(torch.autograd.grad(value, [x, w, b]), wanted):
            size = expected.abs().max().item()
            close(actual.double() / size, expected.double() / size, dtype=dtype, scale=2, atol=torch.finfo(dtype).eps)


@on_devices
@parametrize("rows", [64, 128, 129, 200, 256, 257])
@parametrize("ignored", [False, True])
def test_few_rows_and_many_classes(device, rows, ignored):
    """On Hopper dx has few tiles, which are split into many parts."""
    if device == "cpu":
        pytest.skip("the CPU has no such tiles")
    x, w, _, y = problem(device, torch.bfloat16, rows=rows, features=520, classes=20000)
    if ignored:
        y[::3] = -100
    loss = rafter.linear_cross_entropy(x, w, y)
    dx, dw = torch.autograd.grad(loss, (x, w))
    wide_x, wide_w = x.detach().float().requires_grad_(), w.detach().float().requires_grad_()
    expected = F.cross_entropy(wide_x @ wide_w.t(), y)
    wanted = torch.autograd.grad(expected, (wide_x, wide_w))
    assert abs(loss.item() - expected.item()) < 1e-4 * abs(expected.item())
    for ours, theirs in zip((dx, dw), wanted):
        assert ((ours.float() - theirs).norm() / theirs.norm()).item() < 5e-3

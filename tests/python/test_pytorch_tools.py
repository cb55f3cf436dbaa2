# SPDX-License-Identifier: Apache-2.0
"""What else PyTorch does with an op: compiled autograd, vmap over backward, meta tensors, exported
programs, FLOP counts, and numbers that change under torch.compile."""
import io

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import rafter
from support import labels, leaf, normal, on_devices, parametrize, skip_unless

STATISTICS = ("row_loss", "lse", "logprob", "entropy", "argmax")


def tensors(device, dtype):
    made = dict(
        x=normal(6, 8, dtype=dtype), w=normal(9, 8, dtype=dtype, seed=1), b=normal(9, dtype=dtype, seed=2),
        z=normal(6, 9, dtype=dtype, seed=3), cube=normal(2, 3, 2, 8, dtype=dtype, seed=4), theta=normal(2, 8, seed=5),
        scale=torch.tensor(1.5))
    made = {name: leaf(t.to(device)) for name, t in made.items()}
    made["w"].main_grad = torch.zeros(9, 8, device=device)
    return made | dict(y=labels((6,), 9, "cpu").to(device), rows=normal(6, seed=6).abs().to(device))


def linear(**options):
    return lambda x, w, b, y: rafter.linear_cross_entropy(x, w, y, linear_bias=b, **options)


def logprobs(**options):
    return lambda x, w, b, y: rafter.linear_logprobs(x, w, y, linear_bias=b, **options)


def loss(**options):
    return lambda z, y: rafter.cross_entropy(z, y, **options)


# By name: a function, and the names of its arguments.
CALLS = {
    "linear_cross_entropy": (linear(), "x w b y"),
    "linear_cross_entropy without bias": (lambda x, w, y: rafter.linear_cross_entropy(x, w, y), "x w y"),
    "linear_cross_entropy none": (linear(reduction="none"), "x w b y"),
    "linear_cross_entropy compact": (linear(mode="compact", budget=1 << 30), "x w b y"),
    "linear_cross_entropy options": (linear(label_smoothing=0.1, z_loss=1e-3, softcap=3.0, logit_scale=2.0,
                                            denominator=5.0), "x w b y"),
    "linear_cross_entropy rows": (lambda x, w, y, rows: rafter.linear_cross_entropy(x, w, y, row_weight=rows),
                                  "x w y rows"),
    "linear_cross_entropy extras": (linear(extras=STATISTICS), "x w b y"),
    "linear_cross_entropy scale": (lambda x, w, y, scale: rafter.linear_cross_entropy(x, w, y, logit_scale=scale),
                                   "x w y scale"),
    "linear_logprobs": (logprobs(budget=1 << 30), "x w b y"),
    "linear_logprobs entropy": (logprobs(entropy=True, temperature=0.7), "x w b y"),
    "linear_logprobs all": (logprobs(entropy=True, is_top=True), "x w b y"),
    "cross_entropy": (loss(), "z y"),
    "cross_entropy none": (loss(reduction="none", label_smoothing=0.1), "z y"),
    "cross_entropy extras": (loss(extras=STATISTICS), "z y"),
    "cross_entropy scale": (lambda z, y, scale: rafter.cross_entropy(z, y, logit_scale=scale), "z y scale"),
    "cross_entropy scale and softcap": (lambda z, y, scale: rafter.cross_entropy(
        z, y, logit_scale=scale.detach(), softcap=3.0), "z y scale"),
    "cross_entropy in place": (lambda z, y: rafter.cross_entropy(z * 2, y, inplace_backward=True), "z y"),
    "cross_entropy images": (lambda cube: rafter.cross_entropy(
        cube, torch.zeros(2, 2, 8, dtype=torch.int32, device=cube.device)), "cube"),
    "logsumexp": (lambda z: rafter.logsumexp(z, 1), "z"),
    "logsumexp keepdim": (lambda z: rafter.logsumexp(z.t(), 0, True, dtype=torch.float32), "z"),
    "softmax": (lambda z: rafter.softmax(z, 0), "z"),
    "silu": (lambda z: rafter.silu(z.t()), "z"),
    "sigmoid": (lambda z: rafter.sigmoid(z[:, ::2]), "z"),
    "relu": (rafter.relu, "z"),
    "lrpe_cosine": (lambda cube, theta: rafter.lrpe_cosine(cube, theta, act="silu", offset=4), "cube theta"),
    "lrpe_cosine positions": (lambda cube, theta: rafter.lrpe_cosine(
        cube, theta, positions=torch.arange(3, device=cube.device), act="softmax", dim=1), "cube theta"),
    "LRPECosine": (lambda cube: rafter.nn.LRPECosine(2, 8, device=cube.device)(cube), "cube"),
}


def call(name, device="cpu", dtype=torch.float32):
    """The function, its arguments, and those of them that get a gradient."""
    if name.startswith("linear"):
        skip_unless("linear_cross_entropy", "cpu" if device == "meta" else device)
    function, names = CALLS[name]
    made = tensors(device, dtype)
    arguments = [made[n] for n in names.split()]
    constant = "scale" if name.endswith("softcap") else ""
    return function, arguments, [made[n] for n in names.split() if made[n].requires_grad and n != constant]


def results(out):
    """The tensors of a result."""
    return [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]


def weighted(out):
    """A number, whose upstream gradients differ from element to element."""
    return sum((t * normal(*t.shape, seed=7).to(t.device)).sum() for t in results(out) if t.requires_grad)


# ---- compiled autograd


def backward(loss):
    loss.backward()


def compiled_backward(backend="aot_eager"):
    torch.compiler.reset()
    return torch.compile(backward, backend=backend)


@on_devices
@parametrize("name", list(CALLS))
def test_compiled_autograd_of_an_eager_forward(device, name):
    function, arguments, inputs = call(name, device)
    expected = torch.autograd.grad(weighted(function(*arguments)), inputs)
    value = weighted(function(*arguments))
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled_backward()(value)
    for tensor, gradient in zip(inputs, expected):
        torch.testing.assert_close(tensor.grad, gradient)


@parametrize("name", ["linear_cross_entropy", "cross_entropy", "linear_logprobs entropy", "silu"])
def test_compiled_autograd_with_inductor(name):
    function, arguments, inputs = call(name)
    expected = torch.autograd.grad(weighted(function(*arguments)), inputs)
    for _ in range(2):
        value = weighted(function(*arguments))
        with torch._dynamo.config.patch(compiled_autograd=True):
            compiled_backward("inductor")(value)
    for tensor, gradient in zip(inputs, expected):
        torch.testing.assert_close(tensor.grad, 2 * gradient)


def test_compiled_autograd_adds_to_main_grad():
    made = tensors("cpu", torch.float32)
    x, w, y = made["x"], made["w"], made["y"]
    expected = torch.autograd.grad(F.cross_entropy(x @ w.t(), y), [x, w])
    value = rafter.linear_cross_entropy(x, w, y, main_grad=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled_backward()(value)
    torch.testing.assert_close(x.grad, expected[0])
    torch.testing.assert_close(w.main_grad, expected[1])
    assert w.grad is None


# ---- vmap over backward


@on_devices
@parametrize("name", list(CALLS))
def test_is_grads_batched(device, name):
    """With is_grads_batched, and with torch.func.vmap around autograd.grad."""
    function, arguments, inputs = call(name, device)

    def outputs():
        return [t for t in results(function(*arguments)) if t.requires_grad]

    batches = [normal(3, *t.shape, seed=7).to(device, t.dtype) for t in outputs()]
    one_by_one = [torch.autograd.grad(outputs(), inputs, [b[i] for b in batches]) for i in range(3)]
    expected = [torch.stack(gradients) for gradients in zip(*one_by_one)]
    outs = outputs()
    actual = torch.autograd.grad(outs, inputs, batches, is_grads_batched=True, retain_graph=True)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e)
    outs = outputs()
    actual = torch.func.vmap(lambda *up: torch.autograd.grad(outs, inputs, up, retain_graph=True))(*batches)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e)
    actual = torch.autograd.grad(outs, inputs, [b[0] for b in batches])
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e[0])


def test_a_vectorized_jacobian():
    y = labels((6,), 9, "cpu")
    for function, reference in ((rafter.silu, F.silu), (lambda x: rafter.cross_entropy(x, y, reduction="none"),
                                                        lambda x: F.cross_entropy(x, y, reduction="none"))):
        actual, expected = (torch.autograd.functional.jacobian(f, normal(6, 9), vectorize=True)
                            for f in (function, reference))
        torch.testing.assert_close(actual, expected)


def test_a_batch_of_upstream_gradients_for_main_grad_is_refused():
    made = tensors("cpu", torch.float32)
    value = rafter.linear_cross_entropy(made["x"], made["w"], made["y"], main_grad=True)
    with pytest.raises(RuntimeError, match="main_grad=True takes one upstream gradient"):
        torch.autograd.grad(value, [made["x"], made["w"]], torch.ones(3), is_grads_batched=True)
    assert not made["w"].main_grad.any()


# ---- meta tensors


def facts(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype


@parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@parametrize("name", list(CALLS))
def test_meta_tensors(name, dtype):
    """Results and gradients on the meta device have the shapes, strides and dtypes of real ones."""
    found = {}
    for device in ("cpu", "meta"):
        function, arguments, inputs = call(name, device, dtype)
        out = function(*arguments)
        gradients = torch.autograd.grad(weighted(out), inputs)
        with torch.no_grad():
            constant = function(*arguments)
        made = [*results(out), *gradients, *results(constant)]
        assert {t.device.type for t in made} == {device}
        found[device] = [facts(t) for t in made]
    assert found["meta"] == found["cpu"]


def test_main_grad_of_meta_tensors():
    made = tensors("meta", torch.bfloat16)
    rafter.linear_cross_entropy(made["x"], made["w"], made["y"], main_grad=True).backward()
    assert facts(made["x"].grad) == facts(made["x"]) and made["w"].grad is None


# ---- exported programs


@parametrize("strict", [False, True])
@parametrize("name", list(CALLS))
def test_a_saved_program(name, strict):
    """A program of torch.export, saved and loaded, gives the results and gradients of the function;
    a LossOutput stays one."""
    if name == "cross_entropy scale and softcap":
        return  # reads the scale on the host, so it cannot be traced; see below
    function, arguments, inputs = call(name)

    class Model(torch.nn.Module):
        def forward(self, *arguments):
            return function(*arguments)

    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), tuple(arguments), strict=strict), file)
    file.seek(0)
    program = torch.export.load(file)
    assert any(str(node.target).startswith("rafter.") for node in program.graph.nodes)
    actual, expected = program.module()(*arguments), function(*arguments)
    assert type(actual) is type(expected)
    assert len(results(actual)) == len(results(expected))
    for a, e in zip(results(actual), results(expected)):
        torch.testing.assert_close(a, e)
    for a, e in zip(*(torch.autograd.grad(weighted(out), inputs) for out in (actual, expected))):
        torch.testing.assert_close(a, e)


def test_a_program_with_a_dynamic_number_of_rows():
    class Model(torch.nn.Module):
        def forward(self, x, w, y):
            return rafter.linear_cross_entropy(x, w, y), rafter.linear_logprobs(x, w, y, entropy=True)

    made = tensors("cpu", torch.float32)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Model(), (made["x"], made["w"], made["y"]),
                                  dynamic_shapes=({0: rows}, None, {0: rows}))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x, y = normal(11, 8), labels((11,), 9, "cpu")
    actual, expected = torch.export.load(file).module()(x, made["w"], y), Model()(x, made["w"], y)
    torch.testing.assert_close(actual[0], expected[0])
    assert type(actual[1]) is rafter.LogProbs
    torch.testing.assert_close(tuple(actual[1]), tuple(expected[1]))


# ---- FLOP counts

# By name: matrix products in forward, in backward, and in a forward without gradients. With
# mode="compact", and for linear_logprobs, backward computes the logits again.
PRODUCTS = {
    "linear_cross_entropy": (3, 0, 1),
    "linear_cross_entropy without bias": (3, 0, 1),
    "linear_cross_entropy none": (1, 3, 1),
    "linear_cross_entropy compact": (1, 3, 1),
    "linear_cross_entropy extras": (3, 0, 1),
    "linear_logprobs": (1, 3, 1),
    "linear_logprobs entropy": (1, 3, 1),
    "linear_logprobs all": (1, 3, 1),
    "cross_entropy": (0, 0, 0),
    "silu": (0, 0, 0),
}


def products(run):
    """The result, and the FLOPs in units of one product of [6, 8] and [8, 9]."""
    with FlopCounterMode(display=False) as mode:
        out = run()
    return out, mode.get_total_flops() / (2 * 6 * 8 * 9)


@parametrize("compiled", [False, True])
@parametrize("name", list(PRODUCTS))
def test_flop_counts(name, compiled):
    torch.compiler.reset()
    function, arguments, inputs = call(name)
    if compiled:
        function = torch.compile(function, backend="aot_eager")
        function(*arguments)  # compiling is not counted
    out, forward = products(lambda: function(*arguments))
    value = weighted(out)
    _, backward = products(lambda: torch.autograd.grad(value, inputs))
    _, alone = products(lambda: CALLS[name][0](*(a.detach() for a in arguments)))
    assert (forward, backward, alone) == PRODUCTS[name]


def test_flop_counts_of_frozen_inputs_and_of_main_grad():
    made = tensors("cpu", torch.float32)
    x, w, y = made["x"], made["w"], made["y"]
    assert products(lambda: rafter.linear_cross_entropy(x, w.detach(), y))[1] == 2
    assert products(lambda: rafter.linear_cross_entropy(x.detach(), w, y))[1] == 2
    for function, count in ((lambda: rafter.linear_logprobs(x, w.detach(), y).logprob.sum(), 2),
                            (lambda: rafter.linear_logprobs(x.detach(), w, y, entropy=True).entropy.sum(), 2),
                            (lambda: rafter.linear_cross_entropy(x, w, y, main_grad=True), 3)):
        value, forward = products(function)
        assert forward == 1
        assert products(value.backward)[1] == count


def test_flop_counts_of_saved_exponentials():
    """On meta tensors, because a CPU saves nothing."""
    x, w = torch.empty(6, 8, device="meta"), torch.empty(9, 8, device="meta")
    y, lse = torch.empty(6, dtype=torch.int64, device="meta"), torch.empty(6, device="meta")
    ops = torch.ops.rafter
    assert products(lambda: ops.linear_cross_entropy_saving(x, w, None, y, 0))[1] == 1
    for words, count in ((5, 2), (0, 3)):
        saved = torch.empty(words, dtype=torch.int64, device="meta")
        arguments = (lse, None, None, x, w, None, y, lse, saved, None, 3)
        assert products(lambda a=arguments: ops.linear_cross_entropy_backward_saved(*a))[1] == count


# ---- numbers that change under torch.compile


NUMBERS = {
    "logit_scale": (lambda made, s: rafter.cross_entropy(made["z"], made["y"], logit_scale=s), "z"),
    "logit_scale linear": (lambda made, s: rafter.linear_cross_entropy(
        made["x"], made["w"], made["y"], linear_bias=made["b"], logit_scale=s), "x w b"),
    "denominator": (lambda made, s: rafter.cross_entropy(made["z"], made["y"], denominator=s), "z"),
    "temperature": (lambda made, s: sum(rafter.linear_logprobs(
        made["x"], made["w"], made["y"], linear_bias=made["b"], temperature=s, entropy=True)[:2]).sum(), "x w b"),
}


@parametrize("form", ["float", "int", "tensor"])
@parametrize("name", list(NUMBERS))
def test_a_number_that_changes_compiles_twice(name, form):
    """Once for the first value, as a constant, and once for all others. A tensor compiles once."""
    if (name, form) == ("temperature", "tensor"):
        return
    torch.compiler.reset()
    made = tensors("cpu", torch.float32)
    function, names = NUMBERS[name]
    inputs = [made[n] for n in names.split()]
    compiled = torch.compile(lambda s: function(made, s), fullgraph=True, backend="aot_eager")
    kind = dict(float=lambda i: 0.5 + 0.3 * i, int=lambda i: 2 + i, tensor=lambda i: torch.tensor(0.5 + 0.3 * i))[form]
    values = [kind(i) for i in range(10)]
    compiled(values[0])
    if form != "tensor":
        compiled(values[1])
    with torch.compiler.set_stance("fail_on_recompile"):
        for value in values[2:]:
            actual, expected = compiled(value), function(made, value)
            torch.testing.assert_close(actual, expected)
            for a, e in zip(*(torch.autograd.grad(out, inputs) for out in (actual, expected))):
                torch.testing.assert_close(a, e)


def test_a_number_that_changes_is_still_checked():
    torch.compiler.reset()
    made = tensors("cpu", torch.float32)
    compiled = torch.compile(lambda s: NUMBERS["logit_scale"][0](made, s), backend="aot_eager")
    for value in (0.5, 0.7, 0.9):
        compiled(value)
    with pytest.raises(ValueError, match="logit_scale is -1.0, wanted a positive fp32 number"):
        compiled(-1.0)


def test_a_tensor_scale_with_a_softcap_cannot_be_traced():
    """The scale comes after the softcap, inside the op, which takes it as a number."""
    torch.compiler.reset()
    function, arguments, _ = call("cross_entropy scale and softcap")
    with pytest.raises(Exception, match="data-dependent|item"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(*arguments), function(*arguments))

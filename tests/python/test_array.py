# SPDX-License-Identifier: Apache-2.0
"""rafter.array on NumPy, JAX and other arrays, without PyTorch; and the calls by name beneath it."""
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading

import pytest

np = pytest.importorskip("numpy")

from rafter import _calls  # noqa: E402
from rafter import array as ra  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
V = 50


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def labels(*shape, classes=V):
    y = np.random.default_rng(7).integers(0, classes, shape)
    y.reshape(-1)[1] = -100
    return y


# ---- references in fp64


def log_softmax(u):
    u = u - u.max(-1, keepdims=True)
    return u - np.log(np.exp(u).sum(-1, keepdims=True))


def loss_rows(z, y, label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0, w=None, row_weight=None):
    """The formula of rafter.h, per row."""
    u = z.astype(np.float64)
    u = (softcap * np.tanh(u / softcap) if softcap else u) * logit_scale
    logp, safe = log_softmax(u), np.where(y == -100, 0, y)
    w = np.ones(z.shape[-1]) if w is None else w.astype(np.float64)
    lse = u[..., 0] - logp[..., 0]
    picked = np.take_along_axis(logp, safe[..., None], -1)[..., 0]
    rows = -(1 - label_smoothing) * w[safe] * picked - label_smoothing / z.shape[-1] * (w * logp).sum(-1)
    rows = (rows + z_loss * lse**2) * (1 if row_weight is None else row_weight)
    return np.where(y == -100, 0.0, rows)


def numeric(function, x, upstream, h=1e-6):
    """The gradient of sum(upstream * function(x)), by differences in fp64."""
    x = x.astype(np.float64)
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = h
        gradient[i] = (upstream * (function(x + step) - function(x - step))).sum() / (2 * h)
    return gradient


def host(array):
    """The numbers, in fp64."""
    return np.asarray(array.cpu() if hasattr(array, "is_cuda") else array, dtype=np.float64)


def close(actual, expected, rtol=2e-5, atol=2e-6):
    np.testing.assert_allclose(host(actual), expected, rtol=rtol, atol=atol)


# ---- kinds of arrays


class Foreign:
    """A library that Rafter does not know: __dlpack__ and the array API's namespace, nothing else."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.device = array, array.shape, array.dtype, "cpu"

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return Foreign

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    float32, int64 = np.float32, np.int64

    @staticmethod
    def empty(shape, dtype, device):
        assert device == "cpu"
        return Foreign(np.empty(shape, dtype))

    @staticmethod
    def asarray(number, dtype, device):
        return Foreign(np.asarray(number, dtype))


def jax_array(array):
    jax = pytest.importorskip("jax")
    return jax.device_put(array, jax.devices("cpu")[0])  # where JAX has a GPU, arrays are there by default


def torch_tensor(array):
    return pytest.importorskip("torch").from_numpy(np.array(array))


def cuda_tensor(array):
    tensor = torch_tensor(array)
    if not sys.modules["torch"].cuda.is_available():
        pytest.skip("no GPU")
    return tensor.cuda()


KINDS = [np.asarray, jax_array, torch_tensor, cuda_tensor, Foreign]
of_kinds = pytest.mark.parametrize("of", KINDS, ids=["numpy", "jax", "torch", "cuda", "foreign"])


@of_kinds
def test_results_are_of_the_callers_kind(of):
    z, y = of(normal(6, V)), of(labels(6))
    expected = loss_rows(normal(6, V), labels(6))
    out = ra.cross_entropy(z, y, extras=("row_loss", "argmax", "lse"), gradient=True, dloss=2.0)
    for result in (out.loss, out.row_loss, out.dlogits, ra.act(z, "silu"), ra.logsumexp(z, -1), ra.scale(z, 2.0)):
        assert type(result) is type(z)
    close(out.row_loss, expected)
    close(out.loss, expected.sum() / 5)
    close(ra.scale(z, 2.0), 2 * normal(6, V).astype(np.float64))
    assert out.argmax.dtype == y.dtype
    again = ra.cross_entropy_backward(2.0, z, y, out.lse)
    close(again, host(out.dlogits))


# ---- every op against fp64


@of_kinds
@pytest.mark.parametrize("kind", ["relu", "sigmoid", "silu", "softmax"])
def test_act(of, kind):
    x, dy = normal(3, 4, 5), normal(3, 4, 5, seed=1)
    dim = 1 if kind == "softmax" else None
    sigmoid = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    function = {"relu": lambda a: np.maximum(a, 0), "sigmoid": sigmoid, "silu": lambda a: a * sigmoid(a),
                "softmax": lambda a: np.exp(a) / np.exp(a).sum(1, keepdims=True)}[kind]
    y = ra.act(of(x), kind, dim)
    close(y, function(x.astype(np.float64)))
    dx = ra.act_backward(of(dy), y if kind == "softmax" else of(x), kind, dim)
    close(dx, numeric(function, x, dy), atol=1e-6)


@of_kinds
@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp(of, keepdim):
    x = normal(3, 4, 5)
    function = lambda a: np.log(np.exp(a).sum(1, keepdims=keepdim))  # noqa: E731
    lse = ra.logsumexp(of(x), -2, keepdim)
    close(lse, function(x.astype(np.float64)))
    dlse = normal(*lse.shape, seed=1)
    close(ra.logsumexp_backward(of(dlse), of(x), lse, -2), numeric(function, x, dlse), atol=1e-6)


OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}, {"softcap": 3.0, "logit_scale": 0.5}]


@of_kinds
@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy(of, options):
    z, y = normal(2, 3, 7, seed=2), labels(2, 3, classes=7)
    weights = {"class_weight": np.linspace(0.5, 2, 7, dtype=np.float32), "row_weight": normal(2, 3, seed=4)}
    given = {**options, **{name: of(array) for name, array in weights.items()}}
    rows = lambda a: loss_rows(a, y, w=weights["class_weight"], row_weight=weights["row_weight"],  # noqa: E731
                               **options)
    out = ra.cross_entropy(of(z), of(y), reduction="none", extras=("lse", "logprob", "entropy"), **given)
    close(out.loss, rows(z))
    upstream = normal(2, 3, seed=5)
    dz = ra.cross_entropy_backward(of(upstream), of(z), of(y), out.lse, reduction="none", **given)
    close(dz, numeric(rows, z, upstream), atol=1e-6)
    close(ra.cross_entropy(of(z), of(y), denominator=4.0, **given), rows(z).sum() / 4)


@of_kinds
@pytest.mark.parametrize("mode", ["auto", "compact"])
def test_linear_cross_entropy(of, mode):
    x, w, b, y = normal(5, 4), normal(7, 4, seed=1), normal(7, seed=2), labels(5, classes=7)
    rows = lambda a=x, m=w, c=b: loss_rows(a @ m.astype(np.float64).T + c, y, z_loss=0.01)  # noqa: E731
    arguments = (of(x), of(w), of(y))
    options = {"bias": of(b), "reduction": "none", "z_loss": 0.01, "mode": mode}
    upstream = normal(5, seed=3)
    wanted = {"dx": numeric(lambda a: rows(a=a), x, upstream), "dweight": numeric(lambda m: rows(m=m), w, upstream),
              "dbias": numeric(lambda c: rows(c=c), b, upstream)}
    out = ra.linear_cross_entropy(*arguments, gradients=tuple(wanted), dloss=of(upstream), extras=("lse",), **options)
    close(out.loss, rows())
    later = ra.linear_cross_entropy_backward(of(upstream), *arguments, lse=out.lse, gradients=tuple(wanted), **options)
    for name, gradient in wanted.items():
        close(getattr(out, name), gradient, rtol=1e-4, atol=2e-6)
        close(later[name], gradient, rtol=1e-4, atol=2e-6)


def test_entropy_has_a_gradient():
    x, w, y = normal(4, 3), normal(6, 3, seed=1), labels(4, classes=6)
    active = (y != -100).astype(np.float64)

    def entropy(a):
        logp = log_softmax(a @ w.astype(np.float64).T)
        return -(np.exp(logp) * logp).sum(-1) * active

    out = ra.linear_cross_entropy(x, w, y, reduction="none", extras=("lse", "entropy"))
    close(out.entropy, entropy(x))
    up = normal(4, seed=2)
    dx = ra.linear_cross_entropy_backward(np.zeros(4, np.float32), x, w, y, lse=out.lse, entropy=out.entropy,
                                          dentropy=up, gradients="dx", reduction="none")["dx"]
    close(dx, numeric(entropy, x, up), rtol=1e-4)


@of_kinds
def test_lrpe_cosine(of):
    x, theta = normal(2, 3, 2, 4), np.random.default_rng(3).random((2, 4)).astype(np.float32)
    angle = (10 + np.arange(3))[:, None, None] * theta.astype(np.float64)

    def encode(a, t):
        t = (10 + np.arange(3))[:, None, None] * t
        return np.concatenate([np.maximum(a, 0) * np.cos(t), np.maximum(a, 0) * np.sin(t)], -1)

    y = ra.lrpe_cosine(of(x), of(theta), offset=10, act="relu")
    close(y, np.concatenate([np.maximum(x, 0) * np.cos(angle), np.maximum(x, 0) * np.sin(angle)], -1))
    dy = normal(2, 3, 2, 8, seed=1)
    dx, dtheta = ra.lrpe_cosine_backward(of(dy), of(x), of(theta), offset=10, act="relu")
    close(dx, numeric(lambda a: encode(a, theta.astype(np.float64)), x, dy), atol=1e-6)
    close(dtheta, numeric(lambda t: encode(x.astype(np.float64), t), theta, dy), rtol=1e-4, atol=1e-5)
    positions = np.arange(10, 13, dtype=np.int32)
    close(ra.lrpe_cosine(of(x), of(theta), positions=of(positions), act="relu"), host(y))


# ---- layouts, dtypes, threads


def test_strides_are_honoured():
    wide = normal(12, 40)
    for x in (wide[::2, ::3], wide.T[:5], np.broadcast_to(wide[0], (3, 40))):
        close(ra.logsumexp(x, -1), np.log(np.exp(x.astype(np.float64)).sum(-1)))
    with pytest.raises(ValueError, match="x has stride -40 in dimension 0, wanted no negative stride"):
        ra.logsumexp(wide[::-1], -1)
    fixed = normal(4, 5)
    fixed.flags.writeable = False
    close(ra.act(fixed, "relu"), np.maximum(fixed, 0))


def test_sixteen_bit_dtypes():
    dtypes = [np.float16]
    if importlib.util.find_spec("ml_dtypes"):
        dtypes.append(importlib.import_module("ml_dtypes").bfloat16)
    for dtype in dtypes:
        x = normal(3, 40).astype(dtype)
        for given in (x, x[:, ::2]):
            y = ra.act(given, "softmax", -1)
            assert y.dtype == given.dtype
            exact = np.exp(log_softmax(given.astype(np.float64)))
            close(y, exact, rtol=2**-7)
            close(ra.logsumexp(given, -1), np.log(np.exp(given.astype(np.float64)).sum(-1)))


def test_threads_have_contexts_of_their_own():
    x = normal(64, 1000)
    expected = ra.logsumexp(x, -1)
    wrong = []

    def work():
        for _ in range(20):
            if not np.array_equal(ra.logsumexp(x, -1), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- mistakes


def test_mistakes_are_named():
    z, y = normal(4, V), labels(4)
    with pytest.raises(TypeError, match="logits is a builtins.list, wanted an array of NumPy"):
        ra.cross_entropy([[1.0]], y)
    with pytest.raises(TypeError, match="target is a builtins.list, wanted an array with __dlpack__"):
        ra.cross_entropy(z, [1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"target has shape \[3\]"):
        ra.cross_entropy(z, y[:3])
    with pytest.raises(ValueError, match="logits"):
        ra.cross_entropy(z.astype(np.float64), y)
    with pytest.raises(IndexError, match="50"):
        ra.cross_entropy(z, np.full(4, V))
    with pytest.raises(ValueError, match="reduction is 'total', wanted one of 'mean', 'sum', 'none'"):
        ra.cross_entropy(z, y, reduction="total")
    with pytest.raises(ValueError, match="extras has 'gradient', wanted any of row_loss"):
        ra.cross_entropy(z, y, extras="gradient")
    with pytest.raises(ValueError, match="wanted any of dx, dweight and, with a bias, dbias"):
        ra.linear_cross_entropy(z, z, y, gradients="dbias")
    with pytest.raises(TypeError, match="zloss"):
        ra.cross_entropy(z, y, zloss=1.0)
    with pytest.raises(ValueError, match="z_loss is 1e-60, wanted a number that fp32 holds"):
        ra.cross_entropy(z, y, z_loss=1e-60)
    with pytest.raises(ValueError, match="softmax needs a dim"):
        ra.act(z, "softmax")
    with pytest.raises(IndexError, match="dim is 2, wanted -2 to 1"):
        ra.logsumexp(z, 2)
    with pytest.raises(ValueError, match="dim is 5000000000, which does not fit"):
        ra._Call("logsumexp_forward", z, "x", dim=5 * 10**9)
    with pytest.raises(RuntimeError, match="budget is 1 bytes of workspace, wanted at least [0-9]+, or 0 for no limit"):
        ra.linear_cross_entropy(z, normal(9, V), np.zeros(4, np.int64), budget=1, gradients=("dx", "dweight"))


def test_traced_arrays_of_jax_are_sent_to_rafter_jax():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="use rafter.jax"):
        jax.jit(lambda x: ra.act(x, "silu"))(jax.numpy.ones(3))


# ---- the header


def test_a_name_that_the_header_does_not_have():
    z = normal(2, 3)
    with pytest.raises(LookupError, match="rafter.h has no rafter_act_sideways"):
        ra._Call("act_sideways", z, "x")
    with pytest.raises(ValueError, match="rafter_act_forward has no argument angle"):
        ra._Call("act_forward", z, "x", angle=1)
    for name in ("size", "workspace_bytes", "options"):
        with pytest.raises(ValueError, match=f"has no argument {name}"):
            ra._Call("cross_entropy_forward", z, "logits", **{name: 1})
    with pytest.raises(ValueError, match="rafter_act_forward: kind is not a tensor"):
        ra._Call("act_forward", z, "kind")
    with pytest.raises(ValueError, match="rafter_act_forward: x is not an integer"):
        ra._Call("act_forward", z, "x", x=1)
    with pytest.raises(LookupError, match="rafter.h has no RAFTER_ACT_SWISH"):
        _calls.value("RAFTER_ACT_SWISH")


# Arguments that rafter.array does not offer, and why.
LEFT_OUT = {"relu_mask",  # an array of bits, only for autograd to keep
            "rounded",  # the result in the dtype of x beside that in fp32: only for autograd, which needs both
            "accumulate_into_dweight",  # writes to an array of the caller
            "options.first_class", "options.classes"}  # only with a group of ranks, which cannot be passed by name


def test_every_argument_of_the_header_is_offered():
    """A field that the header gains fails this test until rafter.array offers it or LEFT_OUT says why
    not."""
    used = {}

    class Recording(ra._Call):
        def _note(self, names):
            used.setdefault(self.name, set()).update(names)

        def _array(self, name, array):
            self._note([name])
            super()._array(name, array)

        def integers(self, integers):
            self._note(integers)
            super().integers(integers)

        def numbers(self, numbers):
            self._note(numbers)
            super().numbers(numbers)

    z, y, one = normal(4, V), labels(4), np.ones(1, np.float32)
    w, b, rows = normal(9, V), normal(9), np.ones(4, np.float32)
    every = {"class_weight": np.ones(V, np.float32), "row_weight": rows, "ignore_index": -100}
    extras = ("row_loss", "lse", "logprob", "entropy", "argmax")
    original, ra._Call = ra._Call, Recording
    try:
        for kind, dim in (("silu", None), ("softmax", -1)):
            ra.act_backward(z, ra.act(z, kind, dim), kind, dim)
        ra.logsumexp_backward(rows, z, ra.logsumexp(z, -1), -1)
        out = ra.cross_entropy(z, y, denominator=one, gradient=True, dloss=1.0, extras=extras, **every)
        ra.cross_entropy_backward(1.0, z, y, out.lse, denominator=one, **every)
        every["class_weight"] = np.ones(9, np.float32)
        y[y > 0] %= 9
        out = ra.linear_cross_entropy(z, w, y, bias=b, denominator=one, gradients=("dx", "dweight", "dbias"),
                                      dloss=1.0, dentropy=rows, extras=extras, **every)
        ra.linear_cross_entropy_backward(1.0, z, w, y, bias=b, denominator=one, lse=out.lse, entropy=out.entropy,
                                         dentropy=rows, gradients=("dx", "dweight", "dbias"), **every)
        x, theta = normal(1, 4, 2), normal(1, 2)
        ra.lrpe_cosine(x, theta, positions=np.arange(4))
        ra.lrpe_cosine_backward(normal(1, 4, 4), x, theta, positions=np.arange(4))
        ra.scale(z, 2.0)
    finally:
        ra._Call = original
    with open(os.path.join(ROOT, "include", "rafter", "rafter.h"), encoding="utf-8") as file:
        calls = set(re.findall(r"rafter_(\w+_(?:forward|backward))\(", file.read()))
    assert used.keys() == calls
    for op in sorted({call.rpartition("_")[0] for call in calls}):
        names = set(_calls.fields(op + "_forward"))
        offered = used[op + "_forward"] | used.get(op + "_backward", set())
        assert names - offered == names & LEFT_OUT, op


def test_choices_are_those_of_the_header():
    with open(os.path.join(ROOT, "include", "rafter", "rafter.h"), encoding="utf-8") as file:
        header = file.read()
    enums = {name: body for name, body in re.findall(r"typedef enum rafter_(\w+) \{(.*?)\}", header, re.S)}
    of = {"act": "act_kind", "kind": "act_kind", "reduction": "reduction", "mode": "lce_mode",
          "accumulate": "lce_accumulate", "logsumexp algorithm": "logsumexp_algorithm", "lrpe algorithm":
          "lrpe_algorithm", "softmax_over": "softmax_over"}
    assert of.keys() == _calls.CHOICES.keys()
    for name, (prefix, strings) in _calls.CHOICES.items():
        values = dict(re.findall(r"(RAFTER_\w+) = (\d+)", enums[of[name]]))
        assert {prefix + s.upper() for s in strings} == values.keys()
        for string in strings:
            assert _calls.choice(name, string) == int(values[prefix + string.upper()])


def build_names(folder, change):
    """Builds arguments.c, without the library, against a header that was changed."""
    source = os.path.join(ROOT, "python")
    os.makedirs(os.path.join(folder, "include", "rafter"))
    for name in ("rafter.h", "dlpack.h"):
        with open(os.path.join(ROOT, "include", "rafter", name), encoding="utf-8") as file:
            text = file.read()
        with open(os.path.join(folder, "include", "rafter", name), "w", encoding="utf-8") as file:
            file.write(change(text) if name == "rafter.h" else text)
    header, fields = os.path.join(folder, "include", "rafter", "rafter.h"), os.path.join(folder, "fields.inc")
    done = subprocess.run([sys.executable, os.path.join(source, "fields.py"), header, fields], capture_output=True,
                          text=True)
    if done.returncode:
        return done.stderr
    # The functions stay unresolved: the test only sets fields.
    done = subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-shared", "-fPIC", "-I", folder, "-I",
                           os.path.join(folder, "include"), os.path.join(source, "src", "arguments.c"), "-o",
                           os.path.join(folder, "names.so")], capture_output=True, text=True)
    return done.stderr


def field_names(folder, call):
    c = ctypes.CDLL(os.path.join(folder, "names.so"), mode=os.RTLD_LAZY)
    c.rafter_arguments_field.restype = ctypes.c_char_p
    flag = ctypes.c_int()
    names = []
    while name := c.rafter_arguments_field(call.encode(), len(names), ctypes.byref(flag)):
        names.append(name.decode())
    return names


def test_a_changed_header_is_noticed():
    if not os.path.exists(os.path.join(ROOT, "python", "fields.py")) or not shutil.which(os.environ.get("CC", "cc")):
        pytest.skip("no sources, or no C compiler")
    swapped = lambda text: text.replace(  # noqa: E731
        "    const DLTensor *x;\n    const DLTensor *lse;", "    const DLTensor *lse;\n    const DLTensor *sigma;\n"
        "    const DLTensor *x;")
    with tempfile.TemporaryDirectory() as folder:
        assert build_names(folder, swapped) == ""
        names = field_names(folder, "logsumexp_forward")
        assert names[3:6] == ["lse", "sigma", "x"]
    for change, complaint in (
            (lambda text: text.replace("    size_t budget;", "    double budget;"), "_Generic|generic selection"),
            (lambda text: text.replace("    size_t budget;", "    size_t budget[2];"), r"cannot read 'size_t budget\[2"),
            (lambda text: text.replace("} rafter_scale_args;", "} rafter_scaling;"), "structs with a body, but"),
            (lambda text: text.replace("const rafter_scale_args *args", "const rafter_scaling_args *args"),
             "takes a rafter_scaling_args, which the header does not declare")):
        with tempfile.TemporaryDirectory() as folder:
            assert re.search(complaint, build_names(folder, change))


# ---- without PyTorch


def test_without_pytorch():
    """`import rafter` and rafter.array in a process where PyTorch cannot be imported."""
    program = """
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else real(name, package)
sys.modules["torch"] = None  # an import of it fails
import numpy, rafter, rafter.array
print(rafter.array.act(numpy.float32([-1, 2]), "relu"), rafter.__version__, rafter.__all__)
try:
    from rafter import cross_entropy
except ImportError as error:
    print(error)
import runpy
sys.argv[1:] = ["info"]
runpy.run_module("rafter", run_name="__main__")
"""
    import rafter
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(rafter.__file__))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0. 2.] 0.") and "[]" in done.stdout
    assert "rafter.cross_entropy needs PyTorch 2.10 or later" in done.stdout
    assert "Without PyTorch: rafter.array" in done.stdout

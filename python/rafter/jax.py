# SPDX-License-Identifier: Apache-2.0
"""Rafter's operations for JAX: under jit, grad and vmap, through XLA's foreign function interface.
See docs/array.md. Arguments have the names and meanings of include/rafter/rafter.h; options other
than arrays are static."""
import ctypes
import functools
import glob
import os
from typing import Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from . import _calls
from .array import LossResult

__all__ = ["LossResult", "act", "cross_entropy", "linear_cross_entropy", "logsumexp", "lrpe_cosine"]

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_TARGET = "rafter"


def _register():
    path = os.path.join(_FOLDER, "librafter_jax.so")
    if not os.path.exists(path):
        raise ImportError("rafter.jax needs librafter_jax, which this package was built without, because jaxlib's "
                          "headers were missing; build it with RAFTER_WITH_JAX=1, or with --no-build-isolation where jaxlib is "
                          "installed")
    library = ctypes.CDLL(path)
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.rafter_xla_cpu), platform="cpu")
    if glob.glob(os.path.join(_FOLDER, "librafter_cuda.so*")):
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.rafter_xla_cuda), platform="CUDA")


_register()


def _words(table):
    return " ".join(f"{name}={value!r}" for name, value in table.items())


def _run(call, arrays, results, integers, numbers=()):
    """Runs rafter_<call>. arrays: inputs by name, None is left out. results: (shape, dtype) by name.
    Returns the results by name."""
    arrays = {name: array for name, array in arrays.items() if array is not None}
    shapes = [jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in results.values()]
    function = jax.ffi.ffi_call(_TARGET, shapes, vmap_method="sequential")
    integers = {name: int(value) for name, value in dict(integers).items()}
    numbers = {name: float(value) for name, value in dict(numbers).items()}
    out = function(*arrays.values(), call=call, inputs=" ".join(arrays), outputs=" ".join(results),
                   integers=_words(integers), numbers=_words(numbers))
    return dict(zip(results, out))


def _like(array):
    return array.shape, array.dtype


# ---- derivatives
#
# fwd rules get every leaf as a pair (value, perturbed), so that only the gradients that are needed are
# computed, and a derivative that Rafter does not have raises instead of being 0.


def _values(tree):
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))


def _refuse_perturbed(arrays):
    for name, leaf in arrays.items():
        if leaf is not None and leaf.perturbed:
            raise ValueError(f"rafter.jax computes no gradient for {name.removeprefix('options.')}; pass "
                             "jax.lax.stop_gradient of it")


def _cotangent(given, like):
    """An upstream gradient in fp32; JAX may say that it is zero instead of passing zeros."""
    return jnp.zeros(like, jnp.float32) if isinstance(given, SymbolicZero) else given.astype(jnp.float32)


def _differentiable(primal):
    """A function of (static, *arrays) with a derivative, from two functions: primal.forward gets pairs
    and returns the result and what backward needs; primal.backward returns the cotangents."""
    function = jax.custom_vjp(primal.plain, nondiff_argnums=(0,))
    function.defvjp(primal.forward, primal.backward, symbolic_zeros=True)
    return function


class _Act:
    @staticmethod
    def plain(static, x):
        return _run("act_forward", {"x": x}, {"y": _like(x)}, static)["y"]

    @staticmethod
    def forward(static, x):
        y = _Act.plain(static, x.value)
        return y, y if dict(static)["kind"] == _calls.value("RAFTER_ACT_SOFTMAX") else x.value

    @staticmethod
    def backward(static, saved, dy):
        if isinstance(dy, SymbolicZero):
            return (jnp.zeros_like(saved),)
        name = "y" if dict(static)["kind"] == _calls.value("RAFTER_ACT_SOFTMAX") else "x"
        return (_run("act_backward", {name: saved, "dy": dy}, {"dx": _like(saved)}, static)["dx"],)


class _Logsumexp:
    @staticmethod
    def plain(static, x):
        integers, keepdim = static
        shape = _calls.without_dim(x.shape, dict(integers)["dim"], keepdim)
        return _run("logsumexp_forward", {"x": x}, {"lse": (shape, jnp.float32)}, integers)["lse"]

    @staticmethod
    def forward(static, x):
        lse = _Logsumexp.plain(static, x.value)
        return lse, (x.value, lse)

    @staticmethod
    def backward(static, saved, dlse):
        x, lse = saved
        arrays = {"x": x, "lse": lse, "dlse": _cotangent(dlse, lse.shape)}
        return (_run("logsumexp_backward", arrays, {"dx": _like(x)}, static[0])["dx"],)


class _Lrpe:
    @staticmethod
    def plain(static, x, theta, positions):
        shape = (*x.shape[:-1], 2 * x.shape[-1])
        return _run("lrpe_cosine_forward", {"x": x, "theta": theta, "positions": positions}, {"y": (shape, x.dtype)},
                    static)["y"]

    @staticmethod
    def forward(static, x, theta, positions):
        arrays = x.value, theta.value, None if positions is None else positions.value
        return _Lrpe.plain(static, *arrays), (arrays, jnp.zeros(0) if theta.perturbed else None)

    @staticmethod
    def backward(static, saved, dy):
        (x, theta, positions), wants_dtheta = saved
        if isinstance(dy, SymbolicZero):
            return jnp.zeros_like(x), None, None
        results = {"dx": _like(x)}
        if wants_dtheta is not None:
            results["dtheta"] = _like(theta)
        out = _run("lrpe_cosine_backward", {"x": x, "theta": theta, "positions": positions, "dy": dy}, results, static)
        return out["dx"], out.get("dtheta"), None


# The losses. static: integers, numbers and the extras, as tuples. arrays: class_weight and the like.


def _loss_results(static, target):
    integers, _, extras = static
    shape = target.shape if dict(integers)["options.reduction"] == _calls.value("RAFTER_NONE") else ()
    return {"loss": (shape, jnp.float32),
            **{name: (target.shape, target.dtype if name == "argmax" else jnp.float32) for name in extras}}


def _with_lse(static):
    """static, with lse among the extras: backward needs it."""
    integers, numbers, extras = static
    return static if "lse" in extras else (integers, numbers, (*extras, "lse"))


def _requested(static, out):
    """loss and extras, in that order."""
    return tuple(out[name] for name in ("loss", *static[2]))


class _CrossEntropy:
    @staticmethod
    def run(static, logits, target, arrays):
        integers, numbers, _ = static
        return _run("cross_entropy_forward", {"logits": logits, "target": target, **arrays},
                    _loss_results(static, target), integers, numbers)

    @staticmethod
    def plain(static, logits, target, arrays):
        return _requested(static, _CrossEntropy.run(static, logits, target, arrays))

    @staticmethod
    def forward(static, logits, target, arrays):
        _refuse_perturbed(arrays)
        given = logits.value, target.value, _values(arrays)
        out = _CrossEntropy.run(_with_lse(static), *given)
        return _requested(static, out), (*given, out["lse"])

    @staticmethod
    def backward(static, saved, cotangents):
        logits, target, arrays, lse = saved
        integers, numbers, _ = static
        dloss = _cotangent(cotangents[0], _loss_results(static, target)["loss"][0])
        given = {"logits": logits, "target": target, "lse": lse, "dloss": dloss, **arrays}
        out = _run("cross_entropy_backward", given, {"dlogits": _like(logits)}, integers, numbers)
        return out["dlogits"], None, None


class _LinearCrossEntropy:
    """Forward computes the gradients too, for an upstream gradient of 1, and backward scales them;
    except with reduction none, mode compact, and in fp16, where they might underflow: there backward
    computes them."""

    @staticmethod
    def inputs(inputs):
        return {name: array for name, array in zip(("x", "weight", "bias"), inputs) if array is not None}

    @staticmethod
    def run(static, inputs, target, arrays, gradients=()):
        integers, numbers, _ = static
        given = _LinearCrossEntropy.inputs(inputs)
        results = {**_loss_results(static, target), **{"d" + name: _like(given[name]) for name in gradients}}
        return _run("linear_cross_entropy_forward", {**given, "target": target, **arrays}, results, integers, numbers)

    @staticmethod
    def plain(static, inputs, target, arrays):
        return _requested(static, _LinearCrossEntropy.run(static, inputs, target, arrays))

    @staticmethod
    def forward(static, inputs, target, arrays):
        _refuse_perturbed(arrays)
        needed = [name for name, leaf in _LinearCrossEntropy.inputs(inputs).items() if leaf.perturbed]
        inputs, target, arrays = _values(inputs), target.value, _values(arrays)
        integers = dict(static[0])
        in_backward = (integers["options.reduction"] == _calls.value("RAFTER_NONE")
                       or integers["mode"] == _calls.value("RAFTER_LCE_COMPACT") or inputs[0].dtype == jnp.float16)
        out = _LinearCrossEntropy.run(_with_lse(static), inputs, target, arrays, () if in_backward else needed)
        gradients = {name: None if in_backward else out["d" + name] for name in needed}
        marks = {name: jnp.zeros(0) for name in needed}  # residuals are arrays: which gradients are needed
        saved = (inputs, target, arrays, out["lse"]) if in_backward else (inputs, None, None, None)
        return _requested(static, out), (saved, gradients, marks)

    @staticmethod
    def backward(static, residuals, cotangents):
        (inputs, target, arrays, lse), gradients, needed = residuals
        given = _LinearCrossEntropy.inputs(inputs)
        integers, numbers, _ = static
        if lse is None:
            factor = _cotangent(cotangents[0], ())
            out = {name: (gradient.astype(jnp.float32) * factor).astype(gradient.dtype)
                   for name, gradient in gradients.items()}
        else:
            dloss = _cotangent(cotangents[0], _loss_results(static, target)["loss"][0])
            upstream = {"target": target, "lse": lse, "dloss": dloss}
            out = _run("linear_cross_entropy_backward", {**given, **upstream, **arrays},
                       {"d" + name: _like(given[name]) for name in needed}, integers, numbers)
            out = {name: out["d" + name] for name in needed}
        return tuple(None if array is None else out.get(name, jnp.zeros_like(array))
                     for name, array in zip(("x", "weight", "bias"), inputs)), None, None


_act, _logsumexp, _lrpe = _differentiable(_Act), _differentiable(_Logsumexp), _differentiable(_Lrpe)
_cross_entropy, _linear_cross_entropy = _differentiable(_CrossEntropy), _differentiable(_LinearCrossEntropy)

# ---- the functions


def _static(table):
    """A dict that jit can compare."""
    return tuple(sorted(table.items()))


def act(x, kind: str, dim: int = None):
    """The activation called `kind`: "relu", "sigmoid", "silu", or "softmax" over `dim`."""
    return _act(_static(_calls.act_arguments(kind, dim)), jnp.asarray(x))


def logsumexp(x, dim: int, keepdim: bool = False, *, algorithm: str = "auto"):
    """log(sum(exp(x))) over one dimension, in fp32."""
    number = _calls.choice("logsumexp algorithm", algorithm)
    return _logsumexp((_static({"dim": dim, "algorithm": number}), keepdim), jnp.asarray(x))


def lrpe_cosine(x, theta, *, positions=None, offset: int = 0, act: str = "none", softmax_over: str = "feature",
                algorithm: str = "auto"):
    """LRPE-cosine: x [B, N, H, D] or [B, N, D] becomes [..., 2D]. theta [H, D], [H, 1] or [1, D]."""
    static = {"act": _calls.choice("act", act), "softmax_over": _calls.choice("softmax_over", softmax_over),
              "offset": offset, "algorithm": _calls.choice("lrpe algorithm", algorithm)}
    return _lrpe(_static(static), jnp.asarray(x), jnp.asarray(theta), positions)


def _loss_arguments(options, extras, more=()):
    arrays, integers, numbers = _calls.loss_options(**options)
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    extras = (extras,) if isinstance(extras, str) else tuple(extras)
    for name in extras:
        if name not in ("row_loss", "lse", "logprob", "entropy", "argmax"):
            raise ValueError(f"extras has {name!r}, wanted any of row_loss, lse, logprob, entropy, argmax")
    return (_static({**integers, **dict(more)}), _static(numbers), extras), arrays


def _loss_result(extras, out):
    loss, *rest = out
    if not extras:
        return loss
    names = (extras,) if isinstance(extras, str) else extras
    return LossResult(loss, **dict(zip(names, map(jax.lax.stop_gradient, rest))))


def cross_entropy(logits, target, *, extras: Sequence[str] = (), **options):
    """The loss of logits [..., V] against labels [...], in fp32. Options and extras are those of
    rafter.array.cross_entropy; class_weight, row_weight and denominator may be traced. Extras have no
    gradient."""
    static, arrays = _loss_arguments(options, extras)
    return _loss_result(extras, _cross_entropy(static, jnp.asarray(logits), jnp.asarray(target), arrays))


def linear_cross_entropy(x, weight, target, *, bias=None, extras: Sequence[str] = (), mode: str = "auto",
                         accumulate: str = "f32", budget: int = 0, allow_tf32: bool = False, **options):
    """cross_entropy of x [..., D] times weight [V, D] transposed, plus bias [V], without ever holding
    all logits. See rafter.array.linear_cross_entropy."""
    more = {"mode": _calls.choice("mode", mode), "accumulate": _calls.choice("accumulate", accumulate),
            "budget": budget, "allow_tf32": bool(allow_tf32)}
    static, arrays = _loss_arguments(options, extras, more)
    inputs = jnp.asarray(x), jnp.asarray(weight), None if bias is None else jnp.asarray(bias)
    return _loss_result(extras, _linear_cross_entropy(static, inputs, jnp.asarray(target), arrays))

# SPDX-License-Identifier: Apache-2.0
"""Rafter's operations on arrays of NumPy, JAX, CuPy, PyTorch, and any other library that has
`__dlpack__` and the array API's namespace. Nothing here needs PyTorch, and nothing is copied on the
way in. Results are arrays of the first argument's kind, on its device. There is no autograd: each
op has a function for its gradient. For jit and grad of JAX see rafter.jax. See docs/array.md.

Arguments have the names and meanings of include/rafter/rafter.h.
"""
import ctypes
import sys
import threading
from typing import Any, NamedTuple, Sequence

import numpy

from . import _calls

__all__ = ["LossResult", "act", "act_backward", "cross_entropy", "cross_entropy_backward", "linear_cross_entropy",
           "linear_cross_entropy_backward", "logsumexp", "logsumexp_backward", "lrpe_cosine", "lrpe_cosine_backward",
           "scale"]

_CPU, _CUDA = 1, 2  # DLPack's numbers of devices


class LossResult(NamedTuple):
    """The result of a loss with extras or gradients. What was not requested is None."""

    loss: Any
    row_loss: Any = None
    lse: Any = None
    logprob: Any = None
    entropy: Any = None
    argmax: Any = None
    dlogits: Any = None
    dx: Any = None
    dweight: Any = None
    dbias: Any = None


# ---- kinds of arrays


class _NumPy:
    """How arrays of one library are made and given to C. `like` is the call's first array."""

    def empty(self, like, shape, dtype):
        """An array that C writes to. Its dtype is a NumPy dtype, or the name of one."""
        return numpy.empty(shape, dtype)

    def finish(self, like, array):
        """The array, as the caller gets it."""
        return array

    def scalar(self, like, number):
        return numpy.asarray(number, numpy.float32)

    def stream(self, like):
        """CUDA: the stream that calls are enqueued on."""
        return 0

    def capsule(self, array, stream):
        """A DLPack capsule, and whether it holds bf16 although its dtype says otherwise."""
        # NumPy exports only its own dtypes; bfloat16 is one of ml_dtypes.
        bfloat16 = isinstance(array, numpy.ndarray) and array.dtype.name == "bfloat16"
        array = array.view(numpy.uint16) if bfloat16 else array
        try:  # read-only arrays, such as broadcast ones, need version 1
            return array.__dlpack__(max_version=(1, 0)), bfloat16
        except TypeError:
            return array.__dlpack__(), bfloat16


class _Jax(_NumPy):
    """JAX on the CPU. JAX owns no array that others may write to, so C writes to NumPy's, which JAX
    then takes over."""

    def finish(self, like, array):
        import jax
        return jax.device_put(array, like.sharding if array.shape == like.shape else list(like.devices())[0])


class _OnDevice(_NumPy):
    """Libraries with memory on GPUs."""

    def capsule(self, array, stream):
        if array.__dlpack_device__()[0] != _CUDA:
            return super().capsule(array, stream)
        # DLPack calls the legacy default stream 1. The producer makes our stream wait for the array.
        return array.__dlpack__(stream=stream or 1), False


class _CuPy(_OnDevice):
    def empty(self, like, shape, dtype):
        return sys.modules["cupy"].empty(shape, dtype)

    def scalar(self, like, number):
        return sys.modules["cupy"].asarray(number, "float32")

    def stream(self, like):
        return sys.modules["cupy"].cuda.get_current_stream().ptr


class _Torch(_OnDevice):
    def empty(self, like, shape, dtype):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, device=like.device)

    def scalar(self, like, number):
        torch = sys.modules["torch"]
        return torch.full((), float(number), dtype=torch.float32, device=like.device)

    def stream(self, like):
        return sys.modules["torch"].cuda.current_stream(like.device).cuda_stream


class _Namespace(_OnDevice):
    """Any library with the array API's namespace. On CUDA: the legacy default stream."""

    def empty(self, like, shape, dtype):
        namespace = like.__array_namespace__()
        dtype = getattr(namespace, dtype) if isinstance(dtype, str) else dtype
        return namespace.empty(shape, dtype=dtype, device=like.device)

    def scalar(self, like, number):
        namespace = like.__array_namespace__()
        return namespace.asarray(float(number), dtype=namespace.float32, device=like.device)


def _kind(array, name):
    def of(module, cls):
        found = sys.modules.get(module)
        return found is not None and isinstance(array, getattr(found, cls))

    if isinstance(array, numpy.ndarray):
        return _NumPy()
    if of("jax", "Array"):
        jax = sys.modules["jax"]
        if isinstance(array, jax.core.Tracer) or array.__dlpack_device__()[0] != _CPU:
            raise TypeError(f"{name} is traced by JAX, or not on the CPU: use rafter.jax")
        return _Jax()
    if of("torch", "Tensor"):
        return _Torch()
    if of("cupy", "ndarray"):
        return _CuPy()
    if hasattr(array, "__dlpack__") and hasattr(array, "__array_namespace__"):
        return _Namespace()
    raise TypeError(f"{name} is a {type(array).__module__}.{type(array).__qualname__}, wanted an array of NumPy, JAX, "
                    "CuPy or PyTorch, or one with __dlpack__ and __array_namespace__")


# ---- one call

_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.restype, _is_capsule.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

_contexts = threading.local()  # a context serves one call at a time, on one stream: one per thread, device and stream


class _Context:
    def __init__(self, device, stream):
        self.pointer = _calls.library().rafter_arguments_context(*device)
        if not self.pointer:
            raise RuntimeError(_calls.library().rafter_last_error(None).decode())
        self.destroy = _calls.library().rafter_context_destroy
        if device[0] != _CPU:
            _calls.library().rafter_context_set_stream(self.pointer, stream)

    def __del__(self):
        if getattr(self, "pointer", None):
            self.destroy(self.pointer)


def _context(device, stream):
    found = _contexts.__dict__.get((device, stream))
    if not found:
        found = _contexts.__dict__[device, stream] = _Context(device, stream)
    return found.pointer


class _Call:
    """One call of the library. Arguments are given by their names in rafter.h."""

    def __init__(self, name, first, first_name, **integers):
        self.name, self.first = name, first
        self.kind = _kind(first, first_name)
        self.device = tuple(map(int, first.__dlpack_device__()))
        self.stream = self.kind.stream(first) if self.device[0] != _CPU else 0
        self.capsules, self.outputs = [], {}
        self.library = _calls.library()
        self.arguments = self.library.rafter_arguments_new(name.encode())
        if not self.arguments:
            raise LookupError(f"rafter.h has no rafter_{name}")
        self.input(first_name, first)
        self.integers(integers)

    def __del__(self):
        if getattr(self, "arguments", None):
            self.library.rafter_arguments_free(self.arguments)

    def _check(self, error):
        if error:
            raise ValueError(error.decode())

    def _array(self, name, array):
        if not hasattr(array, "__dlpack__"):
            raise TypeError(f"{name} is a {type(array).__module__}.{type(array).__qualname__}, wanted an array with "
                            "__dlpack__")
        capsule, bfloat16 = self.kind.capsule(array, self.stream)
        self.capsules.append(capsule)  # it keeps the memory, and the shape, until the call is over
        versioned = _is_capsule(capsule, b"dltensor_versioned")
        pointer = _capsule_pointer(capsule, b"dltensor_versioned" if versioned else b"dltensor")
        self._check(self.library.rafter_arguments_set_capsule(self.arguments, name.encode(), pointer, versioned,
                                                              bfloat16))

    def input(self, name, array):
        """An optional input; a number becomes an array of one element."""
        if array is None:
            return
        if isinstance(array, (int, float, numpy.generic)):
            array = self.kind.scalar(self.first, array)
        self._array(name, array)

    def output(self, name, shape, dtype=None):
        """A result; its dtype is that of the first array unless given."""
        array = self.kind.empty(self.first, tuple(shape), self.first.dtype if dtype is None else dtype)
        self._array(name, array)
        self.outputs[name] = array

    def inputs(self, arrays):
        for name, array in arrays.items():
            self.input(name, array)

    def integers(self, integers):
        for name, number in integers.items():
            self._check(self.library.rafter_arguments_set_integer(self.arguments, name.encode(), number))

    def numbers(self, numbers):
        for name, number in numbers.items():
            self._check(self.library.rafter_arguments_set_number(self.arguments, name.encode(), number))

    def run(self):
        """Runs it and returns the outputs by name."""
        context = _context(self.device, self.stream)
        status = self.library.rafter_arguments_run(self.arguments, context)
        if status:
            message = f"rafter_{self.name}: {self.library.rafter_last_error(context).decode()}"
            raise _ERRORS.get(status, RuntimeError)(message)
        return {name: self.kind.finish(self.first, array) for name, array in self.outputs.items()}

    def one(self):
        (result,) = self.run().values()
        return result


_ERRORS = {_calls.value("RAFTER_INVALID_ARGUMENT"): ValueError, _calls.value("RAFTER_LABEL_OUT_OF_RANGE"): IndexError,
           _calls.value("RAFTER_OUT_OF_MEMORY"): MemoryError}

# ---- act, logsumexp, lrpe_cosine, scale


def act(x, kind: str, dim: int = None):
    """The activation called `kind`: "relu", "sigmoid", "silu", or "softmax" over `dim`."""
    call = _Call("act_forward", x, "x", **_calls.act_arguments(kind, dim))
    call.output("y", x.shape)
    return call.one()


def act_backward(dy, saved, kind: str, dim: int = None):
    """The gradient of act for its input. `saved` is x, or for softmax y, the result."""
    call = _Call("act_backward", saved, "y" if kind == "softmax" else "x", **_calls.act_arguments(kind, dim))
    call.input("dy", dy)
    call.output("dx", saved.shape)
    return call.one()


def logsumexp(x, dim: int, keepdim: bool = False, *, algorithm: str = "auto"):
    """log(sum(exp(x))) over one dimension, in fp32."""
    call = _Call("logsumexp_forward", x, "x", dim=dim, algorithm=_calls.choice("logsumexp algorithm", algorithm))
    call.output("lse", _calls.without_dim(x.shape, dim, keepdim), "float32")
    return call.one()


def logsumexp_backward(dlse, x, lse, dim: int, *, algorithm: str = "auto"):
    """The gradient of logsumexp for x, from its result and dlse, shaped as the result."""
    call = _Call("logsumexp_backward", x, "x", dim=dim, algorithm=_calls.choice("logsumexp algorithm", algorithm))
    call.inputs({"lse": lse, "dlse": dlse})
    call.output("dx", x.shape)
    return call.one()


def _lrpe_integers(act, softmax_over, offset, algorithm):
    return {"act": _calls.choice("act", act), "softmax_over": _calls.choice("softmax_over", softmax_over),
            "offset": offset, "algorithm": _calls.choice("lrpe algorithm", algorithm)}


def lrpe_cosine(x, theta, *, positions=None, offset: int = 0, act: str = "none", softmax_over: str = "feature",
                algorithm: str = "auto"):
    """LRPE-cosine: x [B, N, H, D] or [B, N, D] becomes [..., 2D]. theta [H, D], [H, 1] or [1, D]."""
    call = _Call("lrpe_cosine_forward", x, "x", **_lrpe_integers(act, softmax_over, offset, algorithm))
    call.inputs({"theta": theta, "positions": positions})
    call.output("y", (*x.shape[:-1], 2 * x.shape[-1]))
    return call.one()


def lrpe_cosine_backward(dy, x, theta, *, positions=None, offset: int = 0, act: str = "none",
                         softmax_over: str = "feature", algorithm: str = "auto"):
    """The gradients dx and dtheta of lrpe_cosine."""
    call = _Call("lrpe_cosine_backward", x, "x", **_lrpe_integers(act, softmax_over, offset, algorithm))
    call.inputs({"theta": theta, "positions": positions, "dy": dy})
    call.output("dx", x.shape)
    call.output("dtheta", theta.shape, theta.dtype)
    results = call.run()
    return results["dx"], results["dtheta"]


def scale(x, factor):
    """factor * x, rounded once; factor: a number, or an fp32 array of one element on x's device."""
    call = _Call("scale_forward", x, "x")
    call.input("factor", factor)
    call.output("y", x.shape)
    return call.one()


# ---- the losses

_EXTRAS = ("row_loss", "lse", "logprob", "entropy", "argmax")


def _loss_call(name, first, first_name, target, options, more):
    arrays, integers, numbers = _calls.loss_options(**options)
    call = _Call(name, first, first_name, **integers, **more)
    call.inputs({"target": target, **arrays})
    call.numbers(numbers)
    return call


def _loss_result(call, target, options, extras):
    """Adds the outputs of a forward call, and runs it."""
    per_row = options.get("reduction", "mean") == "none"
    extras = (extras,) if isinstance(extras, str) else tuple(extras)
    for name in extras:
        if name not in _EXTRAS:
            raise ValueError(f"extras has {name!r}, wanted any of {', '.join(_EXTRAS)}")
        call.output(name, target.shape, target.dtype if name == "argmax" else "float32")
    call.output("loss", target.shape if per_row else (), "float32")
    results = call.run()
    return LossResult(**results) if len(results) > 1 else results["loss"]


def cross_entropy(logits, target, *, extras: Sequence[str] = (), gradient: bool = False, dloss=None, **options):
    """The loss of logits [..., V] against labels [...], in fp32.

    options: those of rafter_loss_options in rafter.h: class_weight, row_weight, denominator,
        ignore_index, reduction, zero_if_all_ignored, label_smoothing, z_loss, softcap, logit_scale.
    extras: any of "row_loss", "lse", "logprob", "entropy", "argmax"; gradient: dlogits too, for the
        upstream gradient dloss (1 unless given), in the same pass. The result is then a LossResult.
    """
    call = _loss_call("cross_entropy_forward", logits, "logits", target, options, {})
    if dloss is not None and not gradient:
        raise ValueError("dloss is given without gradient=True")
    if gradient:
        call.input("dloss", dloss)
        call.output("dlogits", logits.shape)
    return _loss_result(call, target, options, extras)


def cross_entropy_backward(dloss, logits, target, lse=None, **options):
    """dlogits for the upstream gradient dloss; with forward's lse, nothing is computed twice."""
    call = _loss_call("cross_entropy_backward", logits, "logits", target, options, {})
    call.inputs({"dloss": dloss, "lse": lse})
    call.output("dlogits", logits.shape)
    return call.one()


def _linear_call(name, x, weight, bias, target, options, mode, accumulate, budget, allow_tf32):
    more = {"mode": _calls.choice("mode", mode), "accumulate": _calls.choice("accumulate", accumulate),
            "budget": budget, "allow_tf32": bool(allow_tf32)}
    call = _loss_call(name, x, "x", target, options, more)
    call.inputs({"weight": weight, "bias": bias})
    return call


def _linear_gradients(call, gradients, x, weight, bias):
    for name in (gradients,) if isinstance(gradients, str) else gradients:
        of = {"dx": x, "dweight": weight, "dbias": bias}.get(name)
        if of is None:
            raise ValueError(f"gradients has {name!r}, wanted any of dx, dweight and, with a bias, dbias")
        call.output(name, of.shape)


def linear_cross_entropy(x, weight, target, *, bias=None, extras: Sequence[str] = (), gradients: Sequence[str] = (),
                         dloss=None, dentropy=None, mode: str = "auto", accumulate: str = "f32", budget: int = 0,
                         allow_tf32: bool = False, **options):
    """cross_entropy of x [..., D] times weight [V, D] transposed, plus bias [V], without ever holding
    all logits.

    gradients: any of "dx", "dweight", "dbias", for the upstream gradient dloss (1 unless given) of
        the loss and dentropy of the entropy, in the same call: three matrix products in all. The
        result is then a LossResult, as with extras. Options and extras are those of cross_entropy.
    """
    call = _linear_call("linear_cross_entropy_forward", x, weight, bias, target, options, mode, accumulate, budget,
                        allow_tf32)
    if not gradients and (dloss is not None or dentropy is not None):
        raise ValueError("dloss or dentropy is given without gradients")
    call.inputs({"dloss": dloss, "dentropy": dentropy})
    _linear_gradients(call, gradients, x, weight, bias)
    return _loss_result(call, target, options, extras)


def linear_cross_entropy_backward(dloss, x, weight, target, *, bias=None, lse=None, entropy=None, dentropy=None,
                                  gradients: Sequence[str] = ("dx", "dweight"), mode: str = "auto",
                                  accumulate: str = "f32", budget: int = 0, allow_tf32: bool = False, **options):
    """The gradients called `gradients`, by name in a dict. With forward's lse (and entropy, if
    dentropy is given), no statistics are computed again; logits are."""
    call = _linear_call("linear_cross_entropy_backward", x, weight, bias, target, options, mode, accumulate, budget,
                        allow_tf32)
    call.inputs({"dloss": dloss, "lse": lse, "entropy": entropy, "dentropy": dentropy})
    _linear_gradients(call, gradients, x, weight, bias)
    return call.run()

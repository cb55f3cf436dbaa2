# SPDX-License-Identifier: Apache-2.0
"""Calls of the C library by name, and the options that rafter.array and rafter.jax share. No struct
is declared here: librafter_array knows the header (python/src/arguments.h)."""
import ctypes
import functools
import os

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_MESSAGES = ("set_capsule", "set_integer", "set_number")  # these return NULL, or why not


@functools.cache
def library():
    """librafter_array, with the types of its functions."""
    c = ctypes.CDLL(os.path.join(_FOLDER, "librafter_array.so"))
    pointer, text, i32, i64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int64
    for name, result, *arguments in (
            ("rafter_arguments_new", pointer, text),
            ("rafter_arguments_free", None, pointer),
            ("rafter_arguments_set_capsule", text, pointer, text, pointer, ctypes.c_int, ctypes.c_int),
            ("rafter_arguments_set_integer", text, pointer, text, i64),
            ("rafter_arguments_set_number", text, pointer, text, ctypes.c_double),
            ("rafter_arguments_run", ctypes.c_int, pointer, pointer),
            ("rafter_arguments_context", pointer, i32, i32),
            ("rafter_arguments_value", i64, text),
            ("rafter_arguments_field", text, text, ctypes.c_int, ctypes.POINTER(ctypes.c_int)),
            ("rafter_context_set_stream", ctypes.c_int, pointer, pointer),
            ("rafter_context_destroy", None, pointer),
            ("rafter_last_error", text, pointer),
            ("rafter_version", text)):
        function = getattr(c, name)
        function.restype, function.argtypes = result, arguments
    return c


@functools.cache
def value(name):
    """The number of an enum's name in rafter.h."""
    number = library().rafter_arguments_value(name.encode())
    if number < 0:
        raise LookupError(f"rafter.h has no {name}")
    return number


def fields(call):
    """The names of the arguments of rafter_<call> that can be set."""
    can_be_set = ctypes.c_int()
    names = []
    index = 0
    while name := library().rafter_arguments_field(call.encode(), index, ctypes.byref(can_be_set)):
        names += [name.decode()] if can_be_set.value else []
        index += 1
    return names


CHOICES = {  # argument: prefix of its enum, and the strings it takes
    "act": ("RAFTER_ACT_", ("none", "relu", "sigmoid", "silu", "softmax")),
    "kind": ("RAFTER_ACT_", ("none", "relu", "sigmoid", "silu", "softmax")),
    "reduction": ("RAFTER_", ("mean", "sum", "none")),
    "mode": ("RAFTER_LCE_", ("auto", "fast", "compact")),
    "accumulate": ("RAFTER_ACCUMULATE_", ("f32", "native")),
    "logsumexp algorithm": ("RAFTER_LOGSUMEXP_", ("auto", "parallel", "recurrence")),
    "lrpe algorithm": ("RAFTER_LRPE_", ("auto", "sp", "bp")),
    "softmax_over": ("RAFTER_OVER_", ("feature", "sequence")),
}


def choice(name, given):
    """The number that stands for the string `given`, the value of the argument `name`."""
    prefix, strings = CHOICES[name]
    if given not in strings:
        raise ValueError(f"{name.split()[-1]} is {given!r}, wanted one of {', '.join(map(repr, strings))}")
    return value(prefix + given.upper())


def loss_options(*, class_weight=None, row_weight=None, denominator=None, ignore_index=-100, reduction="mean",
                 zero_if_all_ignored=False, label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0):
    """The options of both losses by their names in rafter.h: arrays, integers, numbers."""
    if not logit_scale > 0:
        raise ValueError(f"logit_scale is {logit_scale}, wanted a positive number")
    arrays = {"class_weight": class_weight, "row_weight": row_weight, "denominator": denominator}
    integers = {"ignore_index": ignore_index, "reduction": choice("reduction", reduction),
                "zero_if_all_ignored": bool(zero_if_all_ignored)}
    numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap, "logit_scale": logit_scale}
    return [{"options." + name: given for name, given in table.items() if given is not None}
            for table in (arrays, integers, numbers)]


def act_arguments(kind, dim, name="kind"):
    """kind and dim of act as integers. Softmax needs a dim, and no other activation takes one."""
    number = choice(name, kind)
    if (dim is None) == (kind == "softmax"):
        raise ValueError(f"dim is {dim!r} with {name} {kind!r}: softmax needs a dim, the others take none")
    return {"kind": number, "dim": 0 if dim is None else dim}


def normal_dim(dim, ndim):
    """The dimension as a number from 0 on."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim is {dim}, wanted {-ndim} to {ndim - 1}")
    return dim % ndim


def without_dim(shape, dim, keepdim):
    """The shape of logsumexp's result."""
    dim = normal_dim(dim, len(shape))
    return (*shape[:dim], *((1,) if keepdim else ()), *shape[dim + 1:])

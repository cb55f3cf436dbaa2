# SPDX-License-Identifier: Apache-2.0
"""The options of the losses, as one tuple from the public functions to the ops; and the numbers of
the C enums."""
from typing import Literal, NamedTuple, Optional

from torch import Tensor

# The enums of include/rafter/rafter.h, by the names that the public functions take.
ACTS = {"none": 0, "relu": 1, "sigmoid": 2, "silu": 3, "softmax": 4}
REDUCTIONS = {"mean": 0, "sum": 1, "none": 2}
MODES = {"auto": 0, "fast": 1, "compact": 2}
ACCUMULATE = {"float32": 0, "native": 1}
LSE_ALGORITHMS = {"auto": 0, "parallel": 1, "recurrence": 2}
LRPE_ALGORITHMS = {"auto": 0, "sp": 1, "bp": 2}

# The same names for type checkers, which cannot read them from the dicts; a test compares the two.
Act = Literal["none", "relu", "sigmoid", "silu", "softmax"]
Reduction = Literal["mean", "sum", "none"]
Mode = Literal["auto", "fast", "compact"]
Accumulate = Literal["float32", "native"]
LogsumexpAlgorithm = Literal["auto", "parallel", "recurrence"]
LrpeAlgorithm = Literal["auto", "sp", "bp"]
Extra = Literal["row_loss", "lse", "logprob", "entropy", "argmax"]

RELU, SIGMOID, SILU, SOFTMAX = ACTS["relu"], ACTS["sigmoid"], ACTS["silu"], ACTS["softmax"]
MEAN, NONE = REDUCTIONS["mean"], REDUCTIONS["none"]
COMPACT = MODES["compact"]

# Bits of the ops' `grads` and `which` arguments, as in ops.h and linear_cross_entropy.cpp.
DX, DWEIGHT, DBIAS = GRADIENTS = 1, 2, 4
ROW_LOSS, LOGPROB, ENTROPY, ARGMAX = STATISTICS = 1, 2, 4, 8


def pick(table, name, given):
    """The number of the enum that stands for `given`, the value of the argument `name`."""
    try:
        return table[given]
    except (KeyError, TypeError):
        raise ValueError(f"{name} is {given!r}, wanted one of {', '.join(map(repr, table))}") from None


class LossOptions(NamedTuple):
    """The options of both losses. Order and defaults are those of the op schemas (LOSS_OPTIONS
    in python/src/ops.h)."""

    weight: Optional[Tensor] = None
    row_weight: Optional[Tensor] = None
    denominator: Optional[Tensor] = None
    ignore_index: int = -100
    reduction: int = MEAN
    zero_if_all_ignored: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0  # 0: none
    logit_scale: float = 0.0  # 0: none
    groups: Optional[str] = None  # see _groups.text


class LinearOptions(NamedTuple):
    """The further options of linear_cross_entropy (LINEAR_OPTIONS in linear_cross_entropy.cpp)."""

    mode: int = 0
    accumulate: int = 0
    budget: int = 0  # bytes of workspace; 0: whatever runs fastest
    allow_tf32: bool = False  # in products of fp32 inputs on CUDA


# The basic call is recognised by identity with these two. A comparison of all fields in every call
# would cost host time, most of all with a tensor in them.
BASIC = LossOptions()
BASIC_LINEAR = LinearOptions()

_COUNT = len(LossOptions._fields)
_TENSORS = 3  # the first fields are tensors


def flatten(options, linear=()):
    """The options as the last arguments of an op. Empty for the basic call: converting an argument
    takes time, a default in the schema takes almost none."""
    if options is BASIC and (linear is BASIC_LINEAR or not linear):
        return ()
    return (*options, *linear)


def unflatten(arguments):
    """The LossOptions and LinearOptions in the last arguments of an op; missing ones have their
    defaults."""
    if not arguments:
        return BASIC, BASIC_LINEAR
    return LossOptions(*arguments[:_COUNT]), LinearOptions(*arguments[_COUNT:])


def save_for_backward(ctx, tensors, options, linear=()):
    """Saves tensors and options in ctx. Autograd must see every tensor, so those among the options
    go through ctx.save_for_backward too."""
    if options is BASIC:
        ctx.save_for_backward(*tensors)
        ctx.numbers = None
    else:
        ctx.save_for_backward(*tensors, *options[:_TENSORS])
        ctx.numbers = options[_TENSORS:]
    ctx.linear = linear


def saved_for_backward(ctx):
    """The tensors, LossOptions and LinearOptions that save_for_backward saved. Raises if the graph
    was freed."""
    saved = ctx.saved_tensors
    if ctx.numbers is None:
        return saved, BASIC, ctx.linear
    return saved[:-_TENSORS], LossOptions._make(saved[-_TENSORS:] + ctx.numbers), ctx.linear

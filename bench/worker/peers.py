# SPDX-License-Identifier: Apache-2.0
"""The functions that the columns in Python call.

A function here is named <op>_<column>. It takes the row (tensors by name, and `row.options`) and returns the callable that is
measured, a function of the differentiable inputs, through the package's public entry point. bench/peers.inc lists the columns. If a
package is not installed, its import fails.
"""
import torch
import torch.nn.functional as F

# The differentiable inputs and the output. Gradients are named "d" plus the tensor's name, upstream gradients too.
OPS = {
    "act": (("x",), "y"),
    "cross_entropy": (("logits",), "loss"),
    "linear_cross_entropy": (("x", "weight"), "loss"),
    "logsumexp": (("x",), "lse"),
    "lrpe_cosine": (("x",), "y"),
    "scale": (("x",), "y"),
}


def overwrites(when):
    """Marks a column whose "forward" or "backward" overwrites its inputs: it gets its own copy, which is restored before each call."""

    def mark(make):
        make.overwrites = when
        return make

    return mark


def act_of(row):
    """(name, dim) of act; only softmax has a dim."""
    name = row.options["act"]
    return name, row.options["dim"] if name == "softmax" else None


def lrpe_act_of(row):
    """The same of lrpe_cosine, whose x is [B, N, H, D]."""
    name = row.options["act"]
    return name, {"feature": -1, "sequence": 1}[row.options["softmax_over"]] if name == "softmax" else None


def activation(name, dim):
    if name == "softmax":
        return lambda x: F.softmax(x, dim)
    return {"none": lambda x: x, "relu": F.relu, "sigmoid": torch.sigmoid, "silu": F.silu}[name]


# ---- torch, eager ------------------------------------------------------------------------------------------------------


def act_to(row):
    return activation(*act_of(row))


def cross_entropy_to(row):
    target = row["target"]
    return lambda z: F.cross_entropy(z, target)


def linear_cross_entropy_to(row):
    target = row["target"]
    return lambda x, weight: F.cross_entropy(F.linear(x, weight), target)


def logsumexp_to(row):
    dim = row.options["dim"]
    return lambda x: torch.logsumexp(x, dim)


def lrpe_cosine_to(row):
    theta, activate = row["theta"], activation(*lrpe_act_of(row))
    positions = torch.arange(row["x"].shape[1], device=theta.device, dtype=torch.float32).view(-1, 1, 1)

    def encode(x):
        angle = positions * theta.float()
        activated = activate(x)
        return torch.cat([activated * angle.cos(), activated * angle.sin()], -1).to(x.dtype)

    return encode


def scale_to(row):
    factor = row["factor"]
    return lambda x: x * factor


# ---- torch, others -----------------------------------------------------------------------------------------------------


def compiled(eager):
    """torch.compile for this shape, as a model of fixed shapes would be compiled."""

    def make(row):
        torch._dynamo.reset()
        return torch.compile(eager(row), dynamic=False)

    make.walks_graphs_once = True  # its backward may overwrite tensors that its forward kept
    return make


act_toc = compiled(act_to)
cross_entropy_toc = compiled(cross_entropy_to)
linear_cross_entropy_toc = compiled(linear_cross_entropy_to)
logsumexp_toc = compiled(logsumexp_to)
lrpe_cosine_toc = compiled(lrpe_cosine_to)
scale_toc = compiled(scale_to)


def linear_cross_entropy_torch_lce(row):
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    target = row["target"]
    return lambda x, weight: F.linear_cross_entropy(x, weight, target)


# ---- xopes: the kernels behind the seeds' tables -----------------------------------------------------------------------


def act_tr(row):
    from xopes.ops.act import act_triton

    name, dim = act_of(row)
    return lambda x: act_triton(x, name, dim)


@overwrites("forward")
def cross_entropy_tr(row):
    from xopes.ops.cross_entropy import cross_entropy_triton

    target = row["target"]
    return lambda z: cross_entropy_triton(z, target)


@overwrites("backward")
def cross_entropy_pt(row):
    from xopes.ops.cross_entropy import cross_entropy_parallel_triton

    target = row["target"]
    return lambda z: cross_entropy_parallel_triton(z, target)


def linear_cross_entropy_tr(row):
    from xopes.ops.linear_cross_entropy import linear_cross_entropy_triton

    target = row["target"]
    return lambda x, weight: linear_cross_entropy_triton(x, target, weight)


def linear_cross_entropy_tr_lce(row):
    from xopes.ops.cross_entropy import cross_entropy_parallel_triton

    target = row["target"]
    return lambda x, weight: cross_entropy_parallel_triton(F.linear(x, weight), target)


def logsumexp_ptr(row):
    from xopes.ops.logsumexp import lse_parallel_triton

    dim = row.options["dim"]
    return lambda x: lse_parallel_triton(x, dim)


def logsumexp_rtr(row):
    from xopes.ops.logsumexp import lse_recurrence_triton

    dim = row.options["dim"]
    return lambda x: lse_recurrence_triton(x, dim)


def lrpe_cosine_tr(row):
    from xopes.ops.lrpe import lrpe_fn

    theta, (name, dim) = row["theta"], lrpe_act_of(row)
    return lambda x: lrpe_fn(x, theta, act=name, dim=dim, lrpe_type="cosine")


# ---- flash-linear-attention, Liger, cut cross entropy, Geiping's, QuACK -------------------------------------------------


def cross_entropy_fla(row):
    from fla.modules import FusedCrossEntropyLoss

    loss, target = FusedCrossEntropyLoss(), row["target"]
    return lambda z: loss(z, target)


def linear_cross_entropy_tr_fla(row):
    from fla.modules import FusedLinearCrossEntropyLoss

    loss, target = FusedLinearCrossEntropyLoss(), row["target"]
    return lambda x, weight: loss(x, target, weight)


@overwrites("forward")
def cross_entropy_liger(row):
    from liger_kernel.transformers.functional import liger_cross_entropy

    target = row["target"]
    return lambda z: liger_cross_entropy(z, target)


def linear_cross_entropy_tr_liger(row):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    target = row["target"]
    return lambda x, weight: liger_fused_linear_cross_entropy(x, weight, target)


def linear_cross_entropy_tr_cut(row):
    from cut_cross_entropy import linear_cross_entropy

    target = row["target"]
    return lambda x, weight: linear_cross_entropy(x, weight, target)


def linear_cross_entropy_tr_jg(row):
    from linear_cross_entropy import linear_cross_entropy

    target = row["target"]
    return lambda x, weight: linear_cross_entropy(x, target, weight.t())[0]


def cross_entropy_quack(row):
    from quack.cross_entropy import cross_entropy

    target = row["target"]
    return lambda z: cross_entropy(z, target)


def linear_cross_entropy_quack(row):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    target = row["target"]
    return lambda x, weight: chunked_linear_cross_entropy(x, weight, target)

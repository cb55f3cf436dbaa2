# SPDX-License-Identifier: Apache-2.0
"""The functions that the columns in Python call.

A function here is named <op>_<column>. It takes the row (tensors by name, and `row.options`) and returns the callable that is
measured, a function of the differentiable inputs, through the package's public entry point. bench/peers.inc lists the columns. If a
package is not installed, its import fails. If it does not serve the row, the function or the callable raises, and the cell is a dash.
"""
import torch
import torch.nn.functional as F

# The differentiable inputs (those that the row has) and the output. Gradients are named "d" plus the tensor's name, upstream
# gradients too.
OPS = {
    "act": (("x",), "y"),
    "cross_entropy": (("logits",), "loss"),
    "linear_cross_entropy": (("x", "weight", "bias"), "loss"),
    "logsumexp": (("x",), "lse"),
    "lrpe_cosine": (("x",), "y"),
    "scale": (("x",), "y"),
}


# The columns of the map: they compute the call with its options and layouts, or raise.
MAP_COLUMNS = ("to", "toc", "quack")


def overwrites(when):
    """Marks a column whose "forward" or "backward" overwrites its inputs: it gets its own copy, which is restored before each call."""

    def mark(make):
        make.overwrites = when
        return make

    return mark


def scratch_on_cpu(whose):
    """Marks a column whose scratch memory on a CPU is not PyTorch's, so that the worker cannot count it there."""

    def mark(make):
        make.scratch_on_cpu = whose
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


# ---- options of the losses ---------------------------------------------------------------------------------------------

LOSS_NUMBERS = ("label_smoothing", "z_loss", "softcap", "logit_scale")  # 0: absent
LOSS_TENSORS = ("class_weight", "row_weight", "bias")


def loss_options(row, takes=()):
    """The options that the row has: numbers and tensors by name. Raises if the column's function does not take one of them."""
    given = {name: row.options[name] for name in LOSS_NUMBERS if row.options[name]}
    given.update({name: row[name] for name in LOSS_TENSORS if name in row.tensors})
    refused = [name.replace("_", " ") for name in given if name not in takes]
    if refused:
        raise NotImplementedError(f"it has no {', '.join(refused)}")
    return given


def torch_loss(row):
    """The loss of logits as one writes it with PyTorch."""
    given, target = loss_options(row, LOSS_NUMBERS + LOSS_TENSORS), row["target"]
    softcap, scale, z_loss = (given.get(name) for name in ("softcap", "logit_scale", "z_loss"))
    smoothing, row_weight = given.get("label_smoothing", 0.0), given.get("row_weight")
    # F.cross_entropy wants the logits' dtype.
    weight = given["class_weight"].to(row["x"].dtype) if "class_weight" in given else None

    def loss(z):
        if softcap:
            z = softcap * torch.tanh(z / softcap)
        if scale:
            z = z * scale
        if row_weight is None and not z_loss:
            return F.cross_entropy(z, target, weight, label_smoothing=smoothing)
        rows = F.cross_entropy(z, target, weight, label_smoothing=smoothing, reduction="none").float()
        if z_loss:
            rows = rows + z_loss * torch.logsumexp(z, -1).float().square()
        if row_weight is not None:
            rows = rows * row_weight
        return rows.mean() if weight is None else rows.sum() / weight[target].float().sum()

    return loss


# ---- torch, eager ------------------------------------------------------------------------------------------------------


def act_to(row):
    return activation(*act_of(row))


def cross_entropy_to(row):
    """With the row's options, as one writes them with PyTorch. The row has the classes last; F.cross_entropy wants dimension 1."""
    target, o, row_weight = row["target"].long(), row.options, row.tensors.get("row_weight")
    softcap, scale, z_loss, reduction = o["softcap"], o["logit_scale"], o["z_loss"], o["reduction"]
    weight = row["class_weight"].to(row["logits"].dtype) if "class_weight" in row.tensors else None
    counted = (target != -100) if weight is None else weight[target.clamp(min=0)] * (target != -100)

    def loss(z):
        z = softcap * torch.tanh(z / softcap) if softcap else z
        z = z * scale if scale else z
        classes_first = z.movedim(-1, 1) if z.dim() > 2 else z
        if row_weight is None and not z_loss:
            return F.cross_entropy(classes_first, target, weight, reduction=reduction, label_smoothing=o["label_smoothing"])
        rows = F.cross_entropy(classes_first, target, weight, reduction="none", label_smoothing=o["label_smoothing"]).float()
        if z_loss:
            rows = rows + z_loss * torch.logsumexp(z, -1).float().square() * (target != -100)
        if row_weight is not None:
            rows = rows * row_weight
        return rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.sum() / counted.sum()

    return loss


def linear_cross_entropy_to(row):
    loss = torch_loss(row)
    return lambda x, weight, bias=None: loss(F.linear(x, weight, bias))


def logsumexp_to(row):
    dim = row.options["dim"]
    return lambda x: torch.logsumexp(x, dim)


def lrpe_cosine_to(row):
    theta, activate = row["theta"], activation(*lrpe_act_of(row))
    positions = torch.arange(row["x"].shape[1], device=theta.device, dtype=torch.float32).view(-1, 1, 1)
    if "positions" in row.tensors:
        positions = row["positions"].float()[..., None, None]

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
    given, target = loss_options(row, ("label_smoothing", "class_weight", "bias")), row["target"]
    class_weight = given["class_weight"].to(row["x"].dtype) if "class_weight" in given else None
    smoothing = given.get("label_smoothing", 0.0)
    return lambda x, weight, bias=None: F.linear_cross_entropy(x, weight, target, linear_bias=bias, weight=class_weight,
                                                               label_smoothing=smoothing)


# ---- Rafter's PyTorch package ------------------------------------------------------------------------------------------


@scratch_on_cpu("Rafter's")
def linear_cross_entropy_rafter_py(row):
    import rafter

    options, target = loss_options(row, LOSS_NUMBERS + LOSS_TENSORS), row["target"]
    options.pop("bias", None)
    if "class_weight" in options:
        options["weight"] = options.pop("class_weight")
    return lambda x, weight, bias=None: rafter.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)


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

    loss_options(row)
    target = row["target"]
    return lambda x, weight: linear_cross_entropy_triton(x, target, weight)


def linear_cross_entropy_tr_lce(row):
    from xopes.ops.cross_entropy import cross_entropy_parallel_triton

    loss_options(row)
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

    given, target = loss_options(row, ("label_smoothing", "logit_scale", "softcap", "bias")), row["target"]
    loss = FusedLinearCrossEntropyLoss(label_smoothing=given.get("label_smoothing", 0.0),
                                       logit_scale=given.get("logit_scale", 1.0),
                                       logit_softcapping=given.get("softcap"))
    return lambda x, weight, bias=None: loss(x, target, weight, bias)


@overwrites("forward")
def cross_entropy_liger(row):
    from liger_kernel.transformers.functional import liger_cross_entropy

    target = row["target"]
    return lambda z: liger_cross_entropy(z, target)


def linear_cross_entropy_tr_liger(row):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    takes = ("label_smoothing", "z_loss", "softcap", "class_weight", "bias")
    options, target = loss_options(row, takes), row["target"]
    options.pop("bias", None)
    for ours, theirs in (("z_loss", "lse_square_scale"), ("class_weight", "ce_weight")):
        if ours in options:
            options[theirs] = options.pop(ours)
    return lambda x, weight, bias=None: liger_fused_linear_cross_entropy(x, weight, target, bias, **options)


def linear_cross_entropy_liger_sm90(row):
    """Liger's kernels in CuTe: gradients of logits are kept for backward."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    loss_options(row)
    target = row["target"]
    return lambda x, weight: liger_fused_linear_cross_entropy_sm90(x, weight, target)


def linear_cross_entropy_liger_fslce(row):
    """Liger's log-probabilities for RL, in CuTe: logits are never stored, and backward computes them again."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    given, x, target = loss_options(row, ("logit_scale", )), row["x"], row["target"]
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        raise NotImplementedError("its kernels want Hopper; elsewhere it is PyTorch over slices")
    temperature = 1 / given.get("logit_scale", 1.0)
    return lambda x, weight: LigerFusedLinearScaledCrossEntropyFunction.apply(x, weight, target, temperature).mean()


def linear_cross_entropy_tr_cut(row):
    from cut_cross_entropy import linear_cross_entropy

    given, target = loss_options(row, ("softcap", "bias")), row["target"]
    softcap = given.get("softcap")
    return lambda x, weight, bias=None: linear_cross_entropy(x, weight, target, bias, softcap=softcap)


def linear_cross_entropy_tr_jg(row):
    from linear_cross_entropy import linear_cross_entropy

    loss_options(row)
    target = row["target"]
    return lambda x, weight: linear_cross_entropy(x, target, weight.t())[0]


def cross_entropy_quack(row):
    from quack.cross_entropy import cross_entropy

    target, o = row["target"], row.options
    refused = [name for name in ("label_smoothing", "z_loss", "softcap", "logit_scale") if o[name]]
    refused += [name for name in ("class_weight", "row_weight") if name in row.tensors]
    if refused or row["logits"].dim() != 2:
        raise NotImplementedError(f"it has no {', '.join(refused) or 'more dimensions than two'}")
    return lambda z: cross_entropy(z, target, reduction=o["reduction"])


def linear_cross_entropy_quack(row):
    """QuACK's chunked pipeline: logits of 4096 rows at a time are overwritten with their gradient."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    loss_options(row)
    target = row["target"]
    return lambda x, weight: chunked_linear_cross_entropy(x, weight, target, use_scaled_exp=False)


def linear_cross_entropy_quack_exp(row):
    """QuACK's scaled-exp pipeline, which chunked_linear_cross_entropy takes by itself where it can."""
    from quack.linear_cross_entropy import scaled_exp_lce_supported, scaled_exp_linear_cross_entropy

    loss_options(row)
    target, chunk = row["target"], 4096
    if not scaled_exp_lce_supported(row["x"], row["weight"], chunk, "mean"):
        raise NotImplementedError("it wants Hopper, bf16, V a multiple of 128 and D of 8")
    return lambda x, weight: scaled_exp_linear_cross_entropy(x, weight, target, chunk)


def act_quack(row):
    from quack.softmax import softmax

    x = row["x"]
    if act_of(row)[1] not in (-1, x.dim() - 1):
        raise NotImplementedError("its softmax is over the last dimension")
    return lambda x: softmax(x.reshape(-1, x.shape[-1])).view(x.shape)

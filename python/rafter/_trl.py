# SPDX-License-Identifier: Apache-2.0
"""TRL's fused head, computed by Rafter for patched models.

TRL (1.16) replaces the forward of the models that it trains. Called with fused_lm_head=True, that one
runs the layers, asks the model for its output layer, and gives hidden states and weight to
trl.kernels.ChunkedLogProbFunction. A patched model notes that it was asked, and Rafter then computes
in place of that function. So TRL's own code stays in charge of labels, masks, temperature and metrics.
"""
import sys
import threading
import weakref

import torch

from . import _subclasses, functional

_MODULE, _NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
_local = threading.local()  # .asked: a weak reference to the patch whose output layer was asked for last


def is_trainer(trainer):
    return any(cls.__module__.split(".")[0] == "trl" for cls in type(trainer).__mro__)


def check_options(options):
    """TRL makes its losses from log-probabilities: options of the loss itself would have no effect."""
    for name in options:
        if name not in ("mode", "budget"):
            raise ValueError(f"rafter.patch: {name} has no effect on TRL's losses, which are made of log-probabilities"
                             "; wanted only mode and budget")


def announce(patch):
    """The model of the patch was asked for its output layer. If TRL asked, its next call of the
    function is for this model."""
    module = sys.modules.get(_MODULE)
    original = getattr(module, _NAME, None)
    if original is None:
        return
    if not isinstance(original, _LogProbs):
        setattr(module, _NAME, _LogProbs(original))
    _local.asked = weakref.ref(patch)


class _LogProbs:
    """Takes the place of TRL's autograd function. Models that are not patched get TRL's."""

    def __init__(self, original):
        self.original = original

    def apply(self, *args, **kwargs):
        asked, _local.asked = getattr(_local, "asked", None), None
        patch = asked and asked()
        return self.original.apply(*args, **kwargs) if patch is None else _compute(patch, *args, **kwargs)


def _compute(patch, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None,
             logit_scale=1.0, outputs=("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")):
    """log_probs, entropy, log_sum_sq_probs, mean_logits and is_top1 of the targets, as TRL's function
    returns them: what was not requested is None, and only the first two have gradients."""
    check_options(patch.options)
    if hasattr(weight, "ds_id"):
        raise RuntimeError("rafter.patch: under DeepSpeed ZeRO-3 backward would need the output layer gathered again, "
                           "which Rafter does not do; rafter.unpatch(model) restores TRL's own head")
    if not logit_scale > 0:
        raise RuntimeError(f"rafter.patch: the model has a logit scale of {logit_scale}, wanted a positive number")
    hidden = _subclasses.replicated(hidden, weight)  # tensor parallelism shards the output layer
    # TRL: cap * tanh(scale * z / cap) / temperature. Rafter: cap * tanh(z / cap) / temperature.
    cap = None if final_logit_softcapping is None else final_logit_softcapping / logit_scale
    temperature = temperature / logit_scale
    head = {"linear_bias": bias, "softcap": cap, "mode": patch.options.get("mode", "auto"),
            "budget": patch.options.get("budget", 0)}
    out = functional.linear_logprobs(hidden, weight, targets, temperature=temperature, entropy="entropy" in outputs,
                                     is_top="is_top1" in outputs, **head)
    squares = mean = None
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:  # log sum p^2 = lse(2 u) - 2 lse(u)
            once, twice = (_forward(hidden, weight, targets, n / temperature, head).lse for n in (1, 2))
            squares = twice - 2 * once
        if "mean_logits" in outputs:
            mean = _mean_logits(hidden, weight, bias, targets, temperature, head)
    return tuple(each if each is None else _subclasses.local(each)
                 for each in (out.logprob, out.entropy, squares, mean, out.is_top))


def _forward(hidden, weight, targets, logit_scale, head, **options):
    return functional.linear_cross_entropy(hidden, weight, targets, reduction="none", logit_scale=logit_scale,
                                           extras=("lse",), **head, **options)


def _mean_logits(hidden, weight, bias, targets, temperature, head):
    """The mean of each row's logits over temperature. It is a product with the mean row of the weight,
    unless a softcap lies between; then it comes from the smoothed part of a loss, lse - mean."""
    if head["softcap"] is None:
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        return (mean if bias is None else mean + bias.float().mean()) / temperature
    out = _forward(hidden, weight, targets, 1 / temperature, head, label_smoothing=1.0)
    return out.lse - out.loss

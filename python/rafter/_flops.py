# SPDX-License-Identifier: Apache-2.0
"""FLOP counts of the linear ops, for torch.utils.flop_counter. Like PyTorch's own counts they cover
matrix products only, so the other ops count 0."""
import math

from torch.utils.flop_counter import register_flop_formula

from . import _ops
from ._options import DWEIGHT, DX


def _products(input, linear_weight, grads):
    """The products for the logits, dx and dW; each has the same size. Arguments are shapes."""
    count = 1 + bool(grads & DX) + bool(grads & DWEIGHT)
    return 2 * math.prod(input) * linear_weight[0] * count


def _forward(input, linear_weight, linear_bias, target, grads, *_, **__):
    return _products(input, linear_weight, grads)


def _backward(dloss, input, linear_weight, linear_bias, target, lse, grads, *_, **__):
    return _products(input, linear_weight, grads)


def _backward_main_grad(dloss, input, linear_weight, linear_bias, target, lse, main_grad, grads, *_, **__):
    return _products(input, linear_weight, grads)


def _backward_saved(dloss, dentropy, entropy, input, linear_weight, linear_bias, target, lse, saved, main_grad, grads,
                    *_, **__):
    logits = _products(input, linear_weight, 0)  # computed again only if nothing was saved
    return _products(input, linear_weight, grads) - (logits if saved[0] else 0)


def _logprobs(input, linear_weight, *_, **__):
    return _products(input, linear_weight, 0)


def _logprobs_backward(dloss, dentropy, input, linear_weight, linear_bias, target, lse, entropy, grads, *_, **__):
    return _products(input, linear_weight, grads)


_FORMULAS = {"linear_cross_entropy": _forward, "linear_cross_entropy_stats": _forward,
             "linear_cross_entropy_backward": _backward,
             "linear_cross_entropy_backward_main_grad": _backward_main_grad,
             "linear_cross_entropy_saving": _logprobs, "linear_cross_entropy_backward_saved": _backward_saved,
             "linear_logprobs": _logprobs,
             "linear_logprobs_backward": _logprobs_backward}


def register():
    for name, formula in _FORMULAS.items():
        register_flop_formula([getattr(_ops.OPS, each) for each in (name, "_" + name)])(formula)

# SPDX-License-Identifier: Apache-2.0
"""The functions as modules. The constructor takes the options that stay the same for every call;
forward takes the tensors of the batch."""
import inspect
from typing import Any, Optional

import torch
from torch import Tensor

from . import functional
from ._options import ACTS, Act, Reduction, pick

_TENSORS = ("input", "linear_weight", "linear_bias", "target", "weight")  # not among the options


def _check_options(module, function, options):
    """Refuses a misspelt option at construction, not in the first forward."""
    names = [name for name in inspect.signature(function).parameters if name not in _TENSORS]
    for name in options:
        if name not in names:
            raise TypeError(f"{type(module).__name__} has no option {name!r}, wanted one of {', '.join(names)}")


class CrossEntropyLoss(torch.nn.Module):
    """rafter.cross_entropy as a module; replaces torch.nn.CrossEntropyLoss."""

    weight: Optional[Tensor]

    def __init__(self, weight: Optional[Tensor] = None, ignore_index: int = -100, reduction: Reduction = "mean",
                 label_smoothing: float = 0.0, **options: Any):
        super().__init__()
        _check_options(self, functional.cross_entropy, options)
        self.register_buffer("weight", weight)
        self.options = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, **options)

    def forward(self, input: Tensor, target: Tensor, **batch: Any):
        """batch: row_weight, denominator or any other keyword argument of rafter.cross_entropy."""
        return functional.cross_entropy(input, target, self.weight, **{**self.options, **batch})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearCrossEntropyLoss(torch.nn.Module):
    """The last layer of a classifier together with its loss; replaces
    torch.nn.LinearCrossEntropyLoss. `linear` holds the layer's weight [num_classes, in_features]
    and bias."""

    weight: Optional[Tensor]

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = False, device: Any = None,
                 dtype: Optional[torch.dtype] = None, weight: Optional[Tensor] = None, **options: Any):
        super().__init__()
        _check_options(self, functional.linear_cross_entropy, options)
        self.linear = torch.nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.options = options

    def forward(self, input: Tensor, target: Tensor, **batch: Any):
        """batch: row_weight, denominator or any other keyword argument of
        rafter.linear_cross_entropy."""
        return functional.linear_cross_entropy(input, self.linear.weight, target, linear_bias=self.linear.bias,
                                               weight=self.weight, **{**self.options, **batch})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LRPECosine(torch.nn.Module):
    """rafter.lrpe_cosine with its angles: theta[h, d] = base ** (-d / features), the same for every
    head. With learned=True theta is a parameter. theta stays in fp32 when the module changes its
    dtype: positions are large, and an angle of position * theta needs every bit of theta."""

    theta: Tensor

    def __init__(self, heads: int, features: int, *, base: float = 10000.0, learned: bool = False, act: Act = "none",
                 dim: Optional[int] = None, device: Any = None):
        super().__init__()
        theta = base ** (-torch.arange(features, dtype=torch.float32, device=device) / features)
        if learned:
            self.theta = torch.nn.Parameter(theta.repeat(heads, 1))
        else:
            self.register_buffer("theta", theta[None], persistent=False)
        functional._check_dim(dim, pick(ACTS, "act", act), "act", act)
        self.act, self.dim = act, dim

    def _apply(self, fn, *args: Any, **kwargs: Any):
        """Behind to(), half(), cuda() and so on: theta follows the device, not the dtype."""

        def without_cast(tensor):
            result = fn(tensor)
            return result if result.dtype is tensor.dtype else tensor.to(result.device)

        return super()._apply(without_cast, *args, **kwargs)

    def forward(self, input: Tensor, *, offset: int = 0, positions: Optional[Tensor] = None) -> Tensor:
        return functional.lrpe_cosine(input, self.theta, offset=offset, positions=positions, act=self.act, dim=self.dim)

    def extra_repr(self) -> str:
        return f"theta={tuple(self.theta.shape)}, act={self.act!r}, dim={self.dim}"

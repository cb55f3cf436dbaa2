"""Modules over the functions. Options that are the same for every call are given to the constructor; tensors of a batch to forward."""
import torch

from . import functional


class CrossEntropyLoss(torch.nn.Module):
    """rafter.cross_entropy as a module, in the place of torch.nn.CrossEntropyLoss."""

    def __init__(self, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, **options):
        super().__init__()
        self.register_buffer("weight", weight)
        self.options = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, **options)

    def forward(self, input, target, **batch):
        """batch: row_weight, denominator, or any other keyword of rafter.cross_entropy."""
        return functional.cross_entropy(input, target, self.weight, **{**self.options, **batch})

    def extra_repr(self):
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearCrossEntropyLoss(torch.nn.Module):
    """The last layer of a classifier and its loss in one, in the place of torch.nn.LinearCrossEntropyLoss: `linear` holds the
    layer's weight [num_classes, in_features] and bias."""

    def __init__(self, in_features, num_classes, *, bias=False, device=None, dtype=None, weight=None, **options):
        super().__init__()
        self.linear = torch.nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.options = options

    def forward(self, input, target, **batch):
        """batch: row_weight, denominator, or any other keyword of rafter.linear_cross_entropy."""
        return functional.linear_cross_entropy(input, self.linear.weight, target, linear_bias=self.linear.bias, weight=self.weight,
                                               **{**self.options, **batch})

    def extra_repr(self):
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LRPECosine(torch.nn.Module):
    """rafter.lrpe_cosine with its angles: theta[h, d] = base ** (-d / features), the same for every head, learned on request."""

    def __init__(self, heads, features, *, base=10000.0, learned=False, act="none", dim=None, device=None):
        super().__init__()
        theta = base ** (-torch.arange(features, dtype=torch.float32, device=device) / features)
        if learned:
            self.theta = torch.nn.Parameter(theta.repeat(heads, 1))
        else:
            self.register_buffer("theta", theta[None], persistent=False)
        self.act, self.dim = act, dim

    def forward(self, input, *, offset=0, positions=None):
        return functional.lrpe_cosine(input, self.theta, offset=offset, positions=positions, act=self.act, dim=self.dim)

    def extra_repr(self):
        return f"theta={tuple(self.theta.shape)}, act={self.act!r}, dim={self.dim}"

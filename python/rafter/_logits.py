# SPDX-License-Identifier: Apache-2.0
"""What stands in for the logits of a patched model: a record of how they would be computed, and a
tensor that computes them when it is read."""
import math

import torch
from torch.utils import _pytree

from . import _compat


class CannotPatch(RuntimeError):
    """Why rafter.patch does not serve a model, in half a sentence."""


class Logits:
    """Stands in for the logits of a forward with labels. It records how the
    model makes them: a sum of products, and then perhaps a softcap and a scale. The sum has one
    product, or several if LoRA adapts the output layer. Whatever else the model does with its logits
    raises."""

    def __init__(self, products, scale=1.0, cap=None):
        # products: (factor, input, layer) each, for factor * layer(input). logits = scale * sum, or
        # with a cap: cap * tanh(scale * sum).
        self.products, self.scale, self.cap = products, scale, cap

    @property
    def dtype(self):
        return self.products[0][1].dtype

    def float(self):
        return self  # the loss is computed in fp32

    def contiguous(self):
        return self

    # What torch.distributed.tensor.parallel does with the output of a layer. The loss is computed from
    # the shards, wherever the logits would go.
    placements = None

    def redistribute(self, *args, **kwargs):
        return self

    def to_local(self, *args, **kwargs):
        return self

    def to(self, target, non_blocking=False):
        if isinstance(target, torch.dtype) and target not in (self.dtype, torch.float32):
            self._refuse(f"to({target})")
        return self  # also for a device: the loss is computed on that of the hidden states

    def __mul__(self, factor):
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < abs(factor) < math.inf:
            self._refuse(f"a product with {factor!r}")
        if self.cap is None:
            return Logits(self.products, self.scale * factor)
        return Logits(self.products, self.scale, self.cap * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor):
        if not isinstance(divisor, (int, float)) or divisor == 0:
            self._refuse(f"a division by {divisor!r}")
        return self * (1.0 / divisor)

    def __add__(self, other):  # what LoRA adds
        if not isinstance(other, Logits) or self.cap is not None or other.cap is not None:
            self._refuse("a sum")
        return Logits([(factor * part.scale, *product) for part in (self, other)
                        for factor, *product in part.products])

    def tanh(self):
        if self.cap is not None:
            self._refuse("a second tanh")
        return Logits(self.products, self.scale, 1.0)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    def __getitem__(self, _):
        return self._refuse("an index")

    def __sub__(self, _):
        return self._refuse("a difference")

    __rsub__ = __sub__

    def __neg__(self):
        return self._refuse("a sign")

    def __pow__(self, _):
        return self._refuse("a power")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.tanh:
            return args[0].tanh()
        return cls._refuse(getattr(function, "__name__", str(function)))

    @staticmethod
    def _refuse(what):
        raise CannotPatch(f"it changes its logits between the output layer and the loss ({what}), and Rafter follows "
                          "only scales and softcaps")

    def options(self):
        """softcap and logit_scale of linear_cross_entropy."""
        softcap, scale = None, self.scale
        if self.cap is not None:  # cap * tanh(scale * z) = scale * cap * (1 / scale) * tanh(z / (1 / scale))
            softcap, scale = 1.0 / self.scale, self.scale * self.cap
        if scale <= 0 or softcap is not None and softcap <= 0:
            self._refuse(f"a scale of {scale}")
        options = {} if softcap is None else {"softcap": softcap}
        return options if abs(scale - 1.0) < 1e-12 else {**options, "logit_scale": scale}

    def linear(self):
        """input, weight and bias of one layer that computes the sum. Several products become one by
        concatenation of their inputs and weights, which is exact and leaves the gradients of LoRA's A
        and B to autograd."""
        (_, input, layer), *more = self.products
        if not more:
            return input, layer.weight, layer.bias
        inputs, weights, bias = [], [], None
        for factor, x, each in self.products:
            inputs.append((x if factor == 1 else x * factor).to(input.dtype))
            weights.append(each.weight.to(layer.weight.dtype))
            if each.bias is not None:
                part = (each.bias * factor).to(layer.weight.dtype)
                bias = part if bias is None else bias + part
        return torch.cat(inputs, -1), torch.cat(weights, -1), bias

    def value(self, dtype):
        """The logits themselves. dtype: what autocast multiplied in; None: the inputs' own."""
        total = None
        for factor, input, layer in self.products:
            input, weight, bias = (t if t is None or dtype is None else t.to(dtype)
                                   for t in (input, layer.weight, layer.bias))
            part = torch.nn.functional.linear(input, weight, bias)
            part = part if factor == 1 else part * factor
            total = part if total is None else total + part
        total = total if self.scale == 1 else total * self.scale
        return total if self.cap is None else self.cap * torch.tanh(total)


class LazyLogits(torch.Tensor):
    """The logits of an evaluation, computed when an op first reads them. shape, dtype and device are
    known before. Only without gradients."""

    @staticmethod
    def __new__(cls, recorded, cast=None):
        _, input, layer = recorded.products[0]
        device = input.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self = _compat.wrapper_tensor(cls, (*input.shape[:-1], layer.weight.shape[0]), cast or autocast or input.dtype,
                                      input.device)
        self.recorded, self.autocast, self.computed = recorded, autocast, None
        self.versions = [_compat.version(each.weight) for _, _, each in recorded.products]
        return self

    def value(self):
        if self.computed is None:
            now = [_compat.version(each.weight) for _, _, each in self.recorded.products]
            if now != self.versions:
                raise RuntimeError("rafter.patch: the logits of an evaluation are read after the output layer has "
                                   "changed; read them before the next training step")
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                self.computed = self.recorded.value(self.autocast).to(self.dtype)
            self.recorded = None
        return self.computed

    def _as(self, dtype):
        """The same logits in another dtype, still to be computed."""
        other = LazyLogits(self.recorded, dtype)
        other.autocast, other.versions = self.autocast, self.versions
        return other

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls) and first.computed is None:
            if function is torch.ops.aten.detach.default:
                return first._as(first.dtype)
            if function is torch.ops.aten._to_copy.default and kwargs.keys() == {"dtype"}:
                return first._as(kwargs["dtype"])
        args, kwargs = _pytree.tree_map(lambda t: t.value() if isinstance(t, cls) else t, (args, kwargs))
        return function(*args, **kwargs)


def _reads(name):
    def method(self, *args, **kwargs):
        return getattr(self.value(), name)(*args, **kwargs)

    return method


# These read the memory of a tensor without an op.
for _name in ("numpy", "tolist", "data_ptr", "untyped_storage", "__array__", "__dlpack__", "__repr__", "__reduce_ex__",
              "__deepcopy__"):
    setattr(LazyLogits, _name, _reads(_name))

# SPDX-License-Identifier: Apache-2.0
"""rafter.patch(model): the training loss of a Hugging Face causal LM without ever forming
logits."""
import functools
import inspect
import math
from typing import Any, TypeVar

import torch

from . import functional

_Model = TypeVar("_Model", bound=torch.nn.Module)
_KEY = "_rafter_patch"  # the attribute of a model that holds its _Patch
_SET_BY_PATCH = {"input", "linear_weight", "target", "linear_bias", "ignore_index", "denominator", "reduction",
                 "extras"}
_OPTIONS = [name for name in inspect.signature(functional.linear_cross_entropy).parameters
            if name not in _SET_BY_PATCH]


class _Replacement:
    """A method with the name and signature of the one it replaces, because trainers inspect them.
    It is an object, not a closure, so that copy.deepcopy and pickle of a patched model copy it
    too."""

    def __init__(self, method, original):
        functools.update_wrapper(self, original)
        self.method = method

    def __call__(self, *args, **kwargs):
        return self.method(*args, **kwargs)


class _Logits:
    """Stands in for the logits of a training forward, which are never computed. It records how the
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

    def to(self, target, non_blocking=False):
        if isinstance(target, torch.dtype) and target not in (self.dtype, torch.float32):
            self._refuse(f"to({target})")
        return self  # also for a device: the loss is computed on that of the hidden states

    def __mul__(self, factor):
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < abs(factor) < math.inf:
            self._refuse(f"a product with {factor!r}")
        if self.cap is None:
            return _Logits(self.products, self.scale * factor)
        return _Logits(self.products, self.scale, self.cap * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor):
        if not isinstance(divisor, (int, float)) or divisor == 0:
            self._refuse(f"a division by {divisor!r}")
        return self * (1.0 / divisor)

    def __add__(self, other):  # what LoRA adds
        if not isinstance(other, _Logits) or self.cap is not None or other.cap is not None:
            self._refuse("a sum")
        return _Logits([(factor * part.scale, *product) for part in (self, other)
                        for factor, *product in part.products])

    def tanh(self):
        if self.cap is not None:
            self._refuse("a second tanh")
        return _Logits(self.products, self.scale, 1.0)

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
        raise RuntimeError(f"rafter.patch: the model changes its logits between the output layer and the loss ({what}) "
                           "and cannot be patched, unless it only scales and softcaps them; rafter.unpatch(model) "
                           "restores it")

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


def _is_linear(module):
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


def _linears(layer):
    """The layers that compute the logits: the output layer itself, or the parts of one that PEFT
    has wrapped, by modules_to_save or by LoRA. PEFT decides in every forward which of them it
    calls."""
    if _is_linear(layer):
        return [layer]
    copies = getattr(layer, "modules_to_save", None)
    if isinstance(copies, torch.nn.ModuleDict) and hasattr(layer, "original_module"):
        return sum(map(_linears, copies.values()), _linears(layer.original_module))
    adapters = getattr(layer, "lora_B", None)
    if isinstance(adapters, torch.nn.ModuleDict) and hasattr(layer, "base_layer"):
        return sum(map(_linears, adapters.values()), _linears(layer.base_layer))
    raise TypeError("rafter.patch needs a causal LM whose output layer is a torch.nn.Linear, plain or adapted by PEFT "
                    f"with LoRA or modules_to_save; this one is {type(layer).__module__}.{type(layer).__qualname__}")


class _Layer:
    """The forward of an output layer: _Logits while a training loss is computed."""

    def __init__(self, patch, layer):
        self.patch, self.layer, self.forward = patch, layer, layer.forward

    def __call__(self, input):
        return _Logits([(1.0, input, self.layer)]) if self.patch.active else self.forward(input)


class _Patch:
    """While the model's forward computes a training loss, its output layer returns _Logits, and its
    loss function uses what they recorded. Otherwise both are the model's own."""

    def __init__(self, model, options):
        self.model, self.options = model, options
        kind = type(model).__name__
        self.layers = _linears(model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None)
        if not hasattr(type(model), "loss_function"):
            raise TypeError(f"rafter.patch needs a model with a loss_function (transformers 4.46 or later); {kind} has "
                            "none; if it wraps another model, patch the inner one")
        self.loss = model.loss_function
        if getattr(self.loss, "__name__", None) != "ForCausalLMLoss":
            raise TypeError("rafter.patch needs a model whose loss is ForCausalLMLoss of transformers; this "
                            f"{kind} has {self.loss!r}")
        self.active = False  # between the start of a training forward and its loss_function
        self.forward = model.forward
        self.labels_at = list(inspect.signature(model.forward).parameters).index("labels")
        # transformers has no public way to ask whether a model has a loss_function of its own; the
        # property of that name stores it here.
        self.own_loss = model.__dict__.get("_loss_function")
        model.forward = _Replacement(self.model_forward, model.forward)
        for layer in self.layers:
            layer.forward = _Replacement(_Layer(self, layer), layer.forward)
        model.loss_function = self.loss_function

    def undo(self):
        del self.model.forward, self.model._loss_function
        for layer in self.layers:
            del layer.forward
        if self.own_loss is not None:
            self.model.loss_function = self.own_loss

    def model_forward(self, *args, **kwargs):
        labels = args[self.labels_at] if len(args) > self.labels_at else kwargs.get("labels")
        if not self.model.training or not torch.is_grad_enabled() or labels is None:
            return self.forward(*args, **kwargs)
        self.active = True
        try:
            output = self.forward(*args, **kwargs)
            if self.active:
                raise RuntimeError(f"rafter.patch: {type(self.model).__name__} did not call its loss_function; "
                                   "rafter.unpatch(model) restores it")
        finally:
            self.active = False
        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        output.logits = None
        return output

    def loss_function(self, logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100,
                      shift_labels=None, **kwargs):
        if not self.active:
            return self.loss(logits, labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch,
                             ignore_index=ignore_index, shift_labels=shift_labels, **kwargs)
        if not isinstance(logits, _Logits):
            raise RuntimeError(f"rafter.patch: the logits of {type(self.model).__name__} do not come from the output "
                               "layer that was patched; rafter.unpatch(model) restores it, and adapters have to be "
                               "added before rafter.patch")
        own = logits.options()
        for name in ("softcap", "logit_scale"):
            if own and name in self.options:
                raise ValueError(f"rafter.patch: {name} is {self.options[name]}, but {type(self.model).__name__} has "
                                 f"{', '.join(f'{key} {value:.6g}' for key, value in own.items())} of its own")
        self.active = False
        hidden, weight, bias = logits.linear()
        if shift_labels is None:  # token n predicts token n + 1; the last token predicts nothing
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.reshape(hidden.shape[:-1]).to(hidden.device)
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.reshape(()).to(hidden.device)
        return functional.linear_cross_entropy(hidden, weight, shift_labels, linear_bias=bias,
                                               ignore_index=ignore_index, denominator=num_items_in_batch, **own,
                                               **self.options)


def _inner(model):
    """The model itself, or the one that PEFT has wrapped."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def patch(model: _Model, **options: Any) -> _Model:
    """Makes model(input_ids, labels=labels) compute its training loss with
    rafter.linear_cross_entropy, and returns the model. The logits of the output are then None.
    Nothing changes without labels, without gradients or in eval mode. `options` are keyword
    arguments of linear_cross_entropy: mode, budget, label_smoothing, z_loss ... A model that PEFT
    has wrapped is patched inside."""
    inner = _inner(model)
    if _KEY in inner.__dict__:
        raise RuntimeError("rafter.patch: the model is already patched")
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"rafter.patch has no option {name!r}, wanted one of {', '.join(_OPTIONS)}")
    inner.__dict__[_KEY] = _Patch(inner, options)
    return model


def unpatch(model: _Model) -> _Model:
    """Undoes rafter.patch and returns the model."""
    inner = _inner(model)
    if _KEY not in inner.__dict__:
        raise RuntimeError("rafter.unpatch: the model is not patched")
    inner.__dict__.pop(_KEY).undo()
    return model

# SPDX-License-Identifier: Apache-2.0
"""rafter.patch(model): the training loss of a Hugging Face causal LM without ever forming
logits."""
import functools
import inspect
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


class _Patch:
    """While the model's forward computes a training loss, its output layer returns the hidden
    states unchanged, and its loss function uses them together with the layer's weight. Otherwise
    both are the model's own."""

    def __init__(self, model, options):
        self.model, self.options = model, options
        self.layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        kind = type(model).__name__
        if not isinstance(self.layer, torch.nn.Linear) or type(self.layer).forward is not torch.nn.Linear.forward:
            raise TypeError(f"rafter.patch needs a causal LM whose output layer is a torch.nn.Linear; this {kind} has "
                            f"{type(self.layer).__name__}")
        if not hasattr(type(model), "loss_function"):
            raise TypeError(f"rafter.patch needs a model with a loss_function (transformers 4.46 or later); {kind} has "
                            "none; if it wraps another model, as PEFT does, patch the inner one")
        self.loss = model.loss_function
        if getattr(self.loss, "__name__", None) != "ForCausalLMLoss":
            raise TypeError("rafter.patch needs a model whose loss is ForCausalLMLoss of transformers; this "
                            f"{kind} has {self.loss!r}")
        self.hidden = None  # the hidden states of the current forward
        self.active = False  # between the start of a training forward and its loss_function
        self.forwards = model.forward, self.layer.forward
        self.labels_at = list(inspect.signature(model.forward).parameters).index("labels")
        # transformers has no public way to ask whether a model has a loss_function of its own; the
        # property of that name stores it here.
        self.own_loss = model.__dict__.get("_loss_function")
        model.forward = _Replacement(self.model_forward, model.forward)
        self.layer.forward = _Replacement(self.layer_forward, self.layer.forward)
        model.loss_function = self.loss_function

    def undo(self):
        del self.model.forward, self.layer.forward, self.model._loss_function
        if self.own_loss is not None:
            self.model.loss_function = self.own_loss

    def model_forward(self, *args, **kwargs):
        forward = self.forwards[0]
        labels = args[self.labels_at] if len(args) > self.labels_at else kwargs.get("labels")
        if not self.model.training or not torch.is_grad_enabled() or labels is None:
            return forward(*args, **kwargs)
        self.active, self.hidden = True, None
        try:
            output = forward(*args, **kwargs)
            if self.active:
                raise RuntimeError(f"rafter.patch: {type(self.model).__name__} did not call its loss_function; "
                                   "rafter.unpatch(model) restores it")
        finally:
            self.active, self.hidden = False, None
        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        output.logits = None
        return output

    def layer_forward(self, hidden):
        if not self.active:
            return self.forwards[1](hidden)
        self.hidden = hidden
        return hidden

    def loss_function(self, logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100,
                      shift_labels=None, **kwargs):
        if not self.active:
            return self.loss(logits, labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch,
                             ignore_index=ignore_index, shift_labels=shift_labels, **kwargs)
        if logits is not self.hidden:
            raise RuntimeError(f"rafter.patch: {type(self.model).__name__} changes its logits between the output layer "
                               "and the loss (a softcap, a scale, a cast) and cannot be patched; "
                               "rafter.unpatch(model) restores it")
        self.active = False
        if shift_labels is None:  # token n predicts token n + 1; the last token predicts nothing
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.reshape(self.hidden.shape[:-1]).to(self.hidden.device)
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.reshape(()).to(self.hidden.device)
        return functional.linear_cross_entropy(self.hidden, self.layer.weight, shift_labels,
                                               linear_bias=self.layer.bias, ignore_index=ignore_index,
                                               denominator=num_items_in_batch, **self.options)


def patch(model: _Model, **options: Any) -> _Model:
    """Makes model(input_ids, labels=labels) compute its training loss with
    rafter.linear_cross_entropy, and returns the model. The logits of the output are then None.
    Nothing changes without labels, without gradients or in eval mode. `options` are keyword
    arguments of linear_cross_entropy: mode, budget, label_smoothing, z_loss ..."""
    if _KEY in model.__dict__:
        raise RuntimeError("rafter.patch: the model is already patched")
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"rafter.patch has no option {name!r}, wanted one of {', '.join(_OPTIONS)}")
    model.__dict__[_KEY] = _Patch(model, options)
    return model


def unpatch(model: _Model) -> _Model:
    """Undoes rafter.patch and returns the model."""
    if _KEY not in model.__dict__:
        raise RuntimeError("rafter.unpatch: the model is not patched")
    model.__dict__.pop(_KEY).undo()
    return model

"""One line for a Hugging Face causal LM: rafter.patch(model) makes its training loss without ever forming logits."""
import functools

import torch

from . import functional

_KEY = "_rafter_patch"  # where a model keeps its _Patch


def _disguised(method, original):
    """The method with the name and signature of the original: trainers look at them."""

    @functools.wraps(original)
    def forward(*args, **kwargs):
        return method(*args, **kwargs)

    return forward


class _Patch:
    """While the model's forward computes a training loss, its output layer hands the hidden states on, and its loss function
    takes them together with the layer's weight. At all other times both are the model's own."""

    def __init__(self, model, options):
        self.model, self.options = model, options
        self.layer = model.get_output_embeddings()
        if not isinstance(self.layer, torch.nn.Linear):
            raise TypeError(f"rafter.patch wants a causal LM whose output layer is a torch.nn.Linear; this {type(model).__name__} has "
                            f"{type(self.layer).__name__}")
        if not hasattr(type(model), "loss_function"):
            raise TypeError(f"rafter.patch wants a model with a loss_function (transformers 4.46 or later); {type(model).__name__} has "
                            "none")
        self.hidden = None  # of the forward that is under way
        self.armed = False
        self.forwards = model.forward, self.layer.forward
        self.own_loss = model.__dict__.get("_loss_function")
        model.forward = _disguised(self.model_forward, model.forward)
        self.layer.forward = _disguised(self.layer_forward, self.layer.forward)
        self.loss = model.loss_function
        model.loss_function = self.loss_function

    def undo(self):
        del self.model.forward, self.layer.forward, self.model._loss_function
        if self.own_loss is not None:
            self.model.loss_function = self.own_loss

    def model_forward(self, *args, **kwargs):
        forward = self.forwards[0]
        if not self.model.training or not torch.is_grad_enabled() or kwargs.get("labels") is None:
            return forward(*args, **kwargs)
        self.armed, self.hidden = True, None
        try:
            output = forward(*args, **kwargs)
            if self.armed:
                raise RuntimeError(f"rafter.patch: {type(self.model).__name__} did not ask its loss_function for the loss; "
                                   "rafter.unpatch(model) restores it")
        finally:
            self.armed, self.hidden = False, None
        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        output.logits = None
        return output

    def layer_forward(self, hidden):
        if not self.armed:
            return self.forwards[1](hidden)
        self.hidden = hidden
        return hidden

    def loss_function(self, logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
        if not self.armed:
            return self.loss(logits, labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index,
                             shift_labels=shift_labels, **kwargs)
        if logits is not self.hidden:
            raise RuntimeError(f"rafter.patch: {type(self.model).__name__} changes its logits between the output layer and the loss "
                               "(a softcap, a scale, a cast), and cannot be patched; rafter.unpatch(model) restores it")
        self.armed = False
        if shift_labels is None:  # the token at n predicts the one at n + 1, and the last predicts nothing
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.reshape(self.hidden.shape[:-1]).to(self.hidden.device)
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(self.hidden.device)
        return functional.linear_cross_entropy(self.hidden, self.layer.weight, shift_labels, linear_bias=self.layer.bias,
                                               ignore_index=ignore_index, denominator=num_items_in_batch, **self.options)


def patch(model, **options):
    """Makes model(input_ids, labels=labels) in training compute its loss by rafter.linear_cross_entropy, and returns the model.
    The output's logits are then None; without labels, without gradients or in eval() nothing changes. `options` are keywords of
    linear_cross_entropy: mode, budget, z_loss ..."""
    if _KEY in model.__dict__:
        raise RuntimeError("rafter.patch: the model is patched already")
    model.__dict__[_KEY] = _Patch(model, options)
    return model


def unpatch(model):
    """Undoes rafter.patch and returns the model."""
    if _KEY not in model.__dict__:
        raise RuntimeError("rafter.unpatch: the model is not patched")
    model.__dict__.pop(_KEY).undo()
    return model

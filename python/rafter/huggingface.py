# SPDX-License-Identifier: Apache-2.0
"""rafter.patch(model), or of a trainer: the loss of a Hugging Face causal LM without ever forming
logits."""
import functools
import inspect
import sys
from typing import Any, TypeVar

import torch

from . import _subclasses, _trl, functional
from ._logits import CannotPatch, LazyLogits, Logits

_Model = TypeVar("_Model")
_KEY = "_rafter_patch"  # the attribute of a model that holds its _Patch
_SET_BY_PATCH = {"input", "linear_weight", "target", "linear_bias", "ignore_index", "denominator", "reduction",
                 "extras", "group", "first_class", "classes"}  # a sharded output layer is a DTensor
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
    raise CannotPatch("its output layer has to be a torch.nn.Linear, plain or adapted by PEFT with LoRA or "
                      f"modules_to_save; this one is {type(layer).__module__}.{type(layer).__qualname__}")


def _is_fsdp(module):
    """Whether FSDP2's fully_shard was called on the module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class _Layer:
    """The forward of an output layer: Logits while a training loss is computed."""

    def __init__(self, patch, layer):
        self.patch, self.layer, self.forward = patch, layer, layer.forward

    def __call__(self, input):
        if not self.patch.active:
            return self.forward(input)
        self.patch.keep(self.layer)
        return Logits([(1.0, input, self.layer)])


class _Conflict(ValueError):
    """An option of rafter.patch that the model has itself."""


class _Patch:
    """While the model's forward computes a loss, its output layer returns Logits, and its loss function
    uses what they recorded. Otherwise both are the model's own."""

    def __init__(self, model, options):
        self.model, self.options = model, options
        self.kind = type(model).__name__
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise CannotPatch("it is an encoder-decoder, as T5 and BART are, and computes its loss itself; "
                              "rafter.linear_cross_entropy(decoder_output, lm_head.weight, labels) does the same")
        self.layers = _linears(model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None)
        if not hasattr(type(model), "loss_function"):
            raise CannotPatch("it has no loss_function, as models of transformers 4.46 and later do; if it wraps "
                              "another model, patch the inner one")
        self.loss = model.loss_function
        if getattr(self.loss, "__name__", None) != "ForCausalLMLoss":
            raise CannotPatch(f"its loss has to be ForCausalLMLoss of transformers; this one is {self.loss!r}")
        parameters = list(inspect.signature(model.forward).parameters)
        if "labels" not in parameters:
            raise CannotPatch("its forward takes no labels")
        self.labels_at = parameters.index("labels")
        self.active = False  # between the start of a forward with labels and its loss_function
        self.trying = False  # in a trial, whose loss nobody needs
        self.kept = []  # layers whose weight FSDP2 keeps for the loss
        self.off = False  # undone, but called by what was wrapped around it
        self.forward, self.own_forward = model.forward, model.__dict__.get("forward")
        # transformers has no public way to ask whether a model has a loss_function of its own; the
        # property of that name stores it here.
        self.own_loss = model.__dict__.get("_loss_function")
        self.replacement = model.forward = _Replacement(self.model_forward, model.forward)
        # Tensor parallelism sets a forward of the layer itself.
        self.own_layer_forwards = [layer.__dict__.get("forward") for layer in self.layers]
        for layer in self.layers:
            layer.forward = _Replacement(_Layer(self, layer), layer.forward)
        model.loss_function = self.loss_function
        # TRL asks for the output layer, and multiplies by its weight itself.
        model.get_output_embeddings = _Replacement(self.get_output_embeddings, model.get_output_embeddings)

    def undo(self):
        del self.model._loss_function, self.model.get_output_embeddings
        if self.model.forward is not self.replacement:  # a trainer has wrapped it
            self.off = True
        elif self.own_forward is None:
            del self.model.forward
        else:
            self.model.forward = self.own_forward
        for layer, own in zip(self.layers, self.own_layer_forwards):
            del layer.forward
            if own is not None:
                layer.forward = own
        if self.own_loss is not None:
            self.model.loss_function = self.own_loss

    def get_output_embeddings(self):
        _trl.announce(self)
        return type(self.model).get_output_embeddings(self.model)

    def keep(self, layer):
        """Makes FSDP2 keep the layer's weight. The loss reads it after the layer's forward, when FSDP2 would
        have freed it if the layer is a unit of its own. It stays until backward has its gradient, so it is
        gathered once per step, not again for backward."""
        if _is_fsdp(layer):
            layer.set_reshard_after_forward(False, recurse=False)
            self.kept.append(layer)

    def release(self):
        """Frees the kept weights, if no backward follows that would do so."""
        for layer in self.kept:
            layer.reshard()

    def trial(self):
        """Runs the model's forward on two tokens, without its layers and without the loss. It raises
        CannotPatch if Rafter cannot follow this forward. If the trial fails for another reason, because
        the model needs other inputs, the first real step decides; so it does under FSDP2, whose first
        forward must be a whole one."""
        inside = self.model.base_model
        if inside is self.model or any(map(_is_fsdp, (self.model, *self.layers))):
            return
        weight = self.layers[0].weight
        hidden = torch.zeros(1, 2, weight.shape[1], dtype=weight.dtype, device=weight.device)
        tokens = torch.zeros(1, 2, dtype=torch.long, device=weight.device)
        had, own = "forward" in inside.__dict__, inside.forward
        inside.forward = lambda *args, **kwargs: _trial_output(hidden)
        self.trying = True
        devices = [weight.device] if weight.is_cuda else []
        try:
            with torch.random.fork_rng(devices), torch.enable_grad():
                self.recorded_forward(input_ids=tokens, labels=tokens)
        except (CannotPatch, _Conflict):
            raise
        except Exception:
            pass
        finally:
            self.trying = False
            del inside.forward
            if had:
                inside.forward = own

    def recorded_forward(self, *args, **kwargs):
        """The model's forward, with its loss by Rafter."""
        self.active, self.kept = True, []
        try:
            output = self.forward(*args, **kwargs)
            if self.active:
                raise CannotPatch("it did not call its loss_function")
            return output
        finally:
            self.active = False
            if not torch.is_grad_enabled():
                self.release()

    def model_forward(self, *args, **kwargs):
        labels = args[self.labels_at] if len(args) > self.labels_at else kwargs.get("labels")
        training = self.model.training and torch.is_grad_enabled()
        if (self.off or labels is None or kwargs.get("fused_lm_head")
                or not training and not self.may_be_lazy(kwargs)):
            return self.forward(*args, **kwargs)
        try:
            output = self.recorded_forward(*args, **kwargs)
        except CannotPatch as reason:
            raise RuntimeError(f"rafter.patch: {self.kind} cannot be served: {reason}; rafter.unpatch(model) restores "
                               "it") from None
        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        output.logits = None if training else LazyLogits(output.logits)
        return output

    def may_be_lazy(self, kwargs):
        """Whether the logits of an evaluation may be computed only when they are read: not if they may need
        a gradient, nor if the weight may be elsewhere by then (FSDP, DeepSpeed)."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return_dict = kwargs.get("return_dict")
        if return_dict is None:
            return_dict = getattr(self.model.config, "return_dict", True)
        return (return_dict and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
                and not (distributed and torch.distributed.get_world_size() > 1))

    def loss_function(self, logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100,
                      shift_labels=None, **kwargs):
        if not self.active:
            return self.loss(logits, labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch,
                             ignore_index=ignore_index, shift_labels=shift_labels, **kwargs)
        if not isinstance(logits, Logits):
            raise CannotPatch("its logits do not come from the output layer that was patched (adapters have to be "
                              "added before rafter.patch)")
        own = logits.options()
        for name in ("softcap", "logit_scale"):
            if own and name in self.options:
                raise _Conflict(f"rafter.patch: {name} is {self.options[name]}, but {self.kind} has "
                                f"{', '.join(f'{key} {value:.6g}' for key, value in own.items())} of its own")
        self.active = False
        hidden, weight, bias = logits.linear()
        if self.trying:
            return hidden.new_zeros(())
        if shift_labels is None:  # token n predicts token n + 1; the last token predicts nothing
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.reshape(hidden.shape[:-1]).to(hidden.device)
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.reshape(()).to(hidden.device)
        loss = functional.linear_cross_entropy(_subclasses.replicated(hidden, weight), weight, shift_labels,
                                               linear_bias=bias, ignore_index=ignore_index,
                                               denominator=num_items_in_batch, **own, **self.options)
        return _subclasses.local(loss)  # as other losses of the model


def _trial_output(hidden):
    from transformers.modeling_outputs import MoeModelOutputWithPast
    return MoeModelOutputWithPast(last_hidden_state=hidden)


def _inner(model):
    """The model itself, or the one that PEFT has wrapped."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _models(thing):
    """The models to patch: the one given, or those of a trainer, TRL's reference model included."""
    if isinstance(thing, torch.nn.Module):
        return [_inner(thing)]
    if not isinstance(getattr(thing, "model", None), torch.nn.Module):
        raise TypeError(f"rafter.patch takes a model or a trainer with a model, not a {type(thing).__qualname__}")
    models = [_inner(thing.model)]
    reference = getattr(thing, "ref_model", None)
    return models + ([_inner(reference)] if isinstance(reference, torch.nn.Module) else [])


def _check_trainer(trainer, options):
    """Refuses settings with which the trainer would compute its loss from logits, past the patch."""
    if getattr(trainer, "label_smoother", None) is not None:
        raise ValueError("rafter.patch: the trainer has label_smoothing_factor, and computes that from logits; leave "
                         "it at 0 and pass label_smoothing to rafter.patch")
    if getattr(trainer, "compute_loss_func", None) is not None:
        raise ValueError("rafter.patch: the trainer has a compute_loss_func, which reads logits; leave it out")
    if _trl.is_trainer(trainer):
        _trl.check_options(options)


def patch(model: _Model, **options: Any) -> _Model:
    """Makes model(input_ids, labels=labels) compute its loss with rafter.linear_cross_entropy, and
    returns the model. In training the logits of the output are then None; under no_grad they are
    computed when they are read. Nothing changes without labels. `model` may also be a trainer of
    transformers or of TRL (SFT, DPO, GRPO, KTO, RLOO), which has a model. `options` are keyword
    arguments of linear_cross_entropy: mode, budget, label_smoothing, z_loss ...; with TRL, mode and
    budget. A model that PEFT has wrapped is patched inside. Raises, and leaves the model as it is, if
    the model cannot be patched."""
    models = _models(model)
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"rafter.patch has no option {name!r}, wanted one of {', '.join(_OPTIONS)}")
    if any(_KEY in inner.__dict__ for inner in models):
        raise RuntimeError("rafter.patch: the model is already patched")
    if not isinstance(model, torch.nn.Module):
        _check_trainer(model, options)
    done = []
    try:
        for inner in models:
            done.append(_Patch(inner, options))
            inner.__dict__[_KEY] = done[-1]
            done[-1].trial()
    except Exception as error:
        for each in done:
            each.model.__dict__.pop(_KEY).undo()
        if isinstance(error, CannotPatch):
            raise TypeError(f"rafter.patch cannot patch {type(inner).__name__}: {error}") from None
        raise
    return model


def unpatch(model: _Model) -> _Model:
    """Undoes rafter.patch and returns the model, or the trainer."""
    models = _models(model)
    if not all(_KEY in inner.__dict__ for inner in models):
        raise RuntimeError("rafter.unpatch: the model is not patched")
    for inner in models:
        inner.__dict__.pop(_KEY).undo()
    return model

# SPDX-License-Identifier: Apache-2.0
"""rafter.patch on small causal LMs with random weights."""
import copy
import inspect
import pickle

import pytest
import torch

import rafter
from support import TorchDispatchMode, on_devices, parametrize, skip_unless

transformers = pytest.importorskip("transformers")
VOCABULARY = 97


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0))


def gemma2():
    """A model that softcaps its logits after the output layer."""
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8))


def step(model, **batch):
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batch(device):
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0)).to(device)
    labels = ids.clone()
    labels[0, :5] = -100
    return dict(input_ids=ids, labels=labels)


@on_devices
@parametrize("make", [llama, gpt2])
@parametrize("more", [{}, {"num_items_in_batch": torch.tensor(31)}, {"num_items_in_batch": 31}])
def test_patched_model_agrees(device, make, more):
    skip_unless("linear_cross_entropy", device)
    torch.manual_seed(0)
    model = make().to(device).train()
    expected, wanted = step(model, **batch(device), **more)
    forward = inspect.signature(model.forward)
    assert rafter.patch(model) is model
    assert inspect.signature(model.forward) == forward
    actual, gradients = step(model, **batch(device), **more)
    assert actual.logits is None
    torch.testing.assert_close(actual.loss, expected.loss)
    assert gradients.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(gradients[name], wanted[name], rtol=1e-4, atol=1e-6, msg=name)

    model.eval()  # logits as before, and the model's own loss
    torch.testing.assert_close(model(**batch(device)).logits, expected.logits)
    torch.testing.assert_close(model(**batch(device), **more).loss, expected.loss)
    model.train()
    with torch.no_grad():
        assert model(**batch(device)).logits is not None
    assert model(batch(device)["input_ids"]).logits is not None
    loss, none, *_ = model(**batch(device), return_dict=False)
    assert none is None and loss.requires_grad

    assert rafter.unpatch(model) is model
    again, gradients = step(model, **batch(device), **more)
    torch.testing.assert_close(again.logits, expected.logits)
    for name in ("forward", "_loss_function"):
        assert name not in model.__dict__ and name not in model.get_output_embeddings().__dict__


def train(model, batches, more):
    """The gradients of several batches, accumulated in .grad."""
    model.zero_grad()
    for inputs in batches:
        model(**inputs, **more).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@on_devices
@parametrize("make", [llama, gpt2])
def test_gradient_accumulation(device, make):
    """Micro-batches with different numbers of tokens, each divided by the total number, as the
    Trainer of transformers does."""
    skip_unless("linear_cross_entropy", device)
    torch.manual_seed(0)
    model = make().to(device).train()
    whole = batch(device)
    whole["labels"][1, 9:] = -100
    batches = [{name: tensor[row:row + 1] for name, tensor in whole.items()} for row in range(2)]
    items = (whole["labels"][:, 1:] != -100).sum()
    wanted = train(model, [whole], {})
    rafter.patch(model)
    for count in (items, items.reshape(1), items.item()):
        for name, gradient in train(model, batches, {"num_items_in_batch": count}).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def test_label_smoothing():
    """Label smoothing as the Trainer of transformers defines it, which computes it from the
    logits."""
    torch.manual_seed(0)
    model = llama().train()
    inputs = batch("cpu")
    logits = model(inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(rafter.patch(model, label_smoothing=0.1)(**inputs).loss, expected)


def test_labels_by_position():
    torch.manual_seed(0)
    model = rafter.patch(llama().train())
    inputs = batch("cpu")
    names = list(inspect.signature(model.forward).parameters)
    out = model(*(inputs.get(name) for name in names[:names.index("labels") + 1]))
    assert out.logits is None
    torch.testing.assert_close(out.loss, model(**inputs).loss)


@parametrize("take", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_independent(take):
    torch.manual_seed(0)
    model = rafter.patch(llama().train())
    before, _ = step(model, **batch("cpu"))
    twin = take(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.zero_grad()
    again, gradients = step(twin, **batch("cpu"))
    assert again.logits is None and len(gradients) == len(list(twin.parameters()))
    torch.testing.assert_close(again.loss, before.loss)
    assert all(p.grad is None for p in model.parameters())
    assert rafter.unpatch(twin)(**batch("cpu")).logits is not None
    assert model(**batch("cpu")).logits is None  # still patched


def test_compiled():
    torch.compiler.reset()
    torch.manual_seed(0)
    model = llama().train()
    expected, wanted = step(model, **batch("cpu"))
    compiled = torch.compile(rafter.patch(model), backend="aot_eager")
    model.zero_grad()
    out = compiled(**batch("cpu"))
    out.loss.backward()
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def test_logits_are_never_formed():
    """With this vocabulary the logits would be the largest tensor by far; no tensor of that size
    appears."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.numel())
            return out

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=4096, n_embd=8, n_layer=1, n_head=1, n_positions=64)).train()
    ids = torch.randint(0, 4096, (4, 32))
    for patched in (False, True):
        if patched:
            rafter.patch(model)
        largest = 0
        with Watch():
            model(ids, labels=ids).loss.backward()
        assert (largest >= ids.numel() * 4096) != patched


def test_options_and_refusals():
    model = gpt2().train()
    own, _ = step(model, **batch("cpu"))
    rafter.patch(model, z_loss=1e-2, mode="compact")
    assert step(model, **batch("cpu"))[0].loss > own.loss
    with pytest.raises(RuntimeError, match="already patched"):
        rafter.patch(model)
    rafter.unpatch(model)
    with pytest.raises(RuntimeError, match="not patched"):
        rafter.unpatch(model)
    with pytest.raises(TypeError, match="output layer"):
        rafter.patch(model.transformer)
    with pytest.raises(TypeError, match="'zloss', wanted one of .*z_loss"):
        rafter.patch(model, zloss=1e-2)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(TypeError, match="ForCausalLMLoss"):
        rafter.patch(model)


def test_the_model_inside_a_wrapper_is_the_one_to_patch():
    """PEFT wraps models like this: some methods of the inner model, and a forward of its own."""

    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inside = model

        def get_output_embeddings(self):
            return self.inside.get_output_embeddings()

        def forward(self, *args, **kwargs):
            return self.inside(*args, **kwargs)

    model = llama().train()
    wrapper = Wrapper(model)
    with pytest.raises(TypeError, match="wraps another model"):
        rafter.patch(wrapper)
    rafter.patch(model)
    assert wrapper(**batch("cpu")).logits is None


def test_other_output_layers_are_refused():
    """Layers that compute more than a product with their weight, as quantized and adapted ones
    do."""

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = gpt2()
    model.set_output_embeddings(Scaled(32, VOCABULARY, bias=False))
    with pytest.raises(TypeError, match="output layer is a torch.nn.Linear; this GPT2LMHeadModel has Scaled"):
        rafter.patch(model)


def test_a_model_that_changes_its_logits_is_refused():
    model = rafter.patch(gemma2().train())
    with pytest.raises(RuntimeError, match="changes its logits"):
        model(**batch("cpu"))
    rafter.unpatch(model)
    assert model(**batch("cpu")).loss.isfinite()

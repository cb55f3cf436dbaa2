# SPDX-License-Identifier: Apache-2.0
"""rafter.patch on small causal LMs with random weights."""
import copy
import inspect
import pickle
import tempfile

import pytest
import torch

import rafter
from support import TorchDispatchMode, on_devices, parametrize, skip_unless

transformers = pytest.importorskip("transformers")
VOCABULARY = 97


SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0))


# These change their logits after the output layer. The numbers are far from those of the real
# models, so that a softcap or a scale that is missed changes the loss of random weights.


def gemma2():
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.2))


def gemma3():
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, head_dim=8))


def capped_gemma3():
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, head_dim=8,
                                                                        final_logit_softcapping=0.2))


def granite():
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SMALL, logits_scaling=0.3))


def cohere():
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL, **TOKENS, logit_scale=5.0))


def cohere2():
    return transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**SMALL, **TOKENS, logit_scale=5.0))


MODELS = [llama, gpt2, gemma2, gemma3, capped_gemma3, granite, cohere, cohere2]


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
@parametrize("make", MODELS)
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
    with torch.no_grad():  # logits when they are read
        out = model(**batch(device), **more)
        torch.testing.assert_close(out.loss, expected.loss.detach())
        assert (out.logits.shape, out.logits.dtype) == (expected.logits.shape, expected.logits.dtype)
        torch.testing.assert_close(out.logits + 0, expected.logits.detach())
        assert type(model(**batch(device), return_dict=False)[1]) is torch.Tensor
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


@parametrize("make", [llama, gpt2, gemma2, cohere])
def test_gradient_checkpointing(make):
    torch.manual_seed(0)
    model = make().train()
    expected, wanted = step(model, **batch("cpu"))
    model.gradient_checkpointing_enable()
    actual, gradients = step(rafter.patch(model), **batch("cpu"))
    torch.testing.assert_close(actual.loss, expected.loss)
    assert gradients.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(gradients[name], wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def test_tied_weights_are_among_the_models():
    """test_patched_model_agrees covers both kinds."""
    tied = [make.__name__ for make in MODELS
            if (model := make()).get_output_embeddings().weight is model.get_input_embeddings().weight]
    assert "gpt2" in tied and "gemma2" in tied and "cohere" in tied and "llama" not in tied


@parametrize("make", [gemma2, granite])
def test_bf16(make):
    """The patched loss does not round the logits, so it is as close to fp32 as the model's own."""
    torch.manual_seed(0)
    exact = make().bfloat16().float().train()
    expected = exact(**batch("cpu")).loss
    model = copy.deepcopy(exact).bfloat16()
    own = model(**batch("cpu")).loss
    actual = rafter.patch(model)(**batch("cpu")).loss
    assert (actual - expected).abs() <= (own - expected).abs() + 2**-9 * expected


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


@parametrize("make", [llama, gemma2, cohere])
def test_compiled(make):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make().train()
    expected, wanted = step(model, **batch("cpu"))
    compiled = torch.compile(rafter.patch(model), backend="aot_eager")
    model.zero_grad()
    out = compiled(**batch("cpu"))
    out.loss.backward()
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def largest_tensor(run):
    """The number of elements of the largest tensor that an op returns."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.numel())
            return out

    with Watch():
        run()
    return largest


def test_logits_are_never_formed():
    """With this vocabulary the logits would be the largest tensor by far; no tensor of that size
    appears."""
    models = [transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=4096, n_embd=8, n_layer=1, n_head=1, n_positions=64)),
        transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
            **{**SMALL, "vocab_size": 4096, "hidden_size": 8, "num_hidden_layers": 1}, head_dim=8))]
    ids = torch.randint(0, 4096, (4, 32))
    for model in models:
        run = lambda: model.train()(ids, labels=ids).loss.backward()  # noqa: E731, B023
        assert largest_tensor(run) >= ids.numel() * 4096
        rafter.patch(model)
        assert largest_tensor(run) < ids.numel() * 4096


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
    with pytest.raises(TypeError, match="cannot patch GPT2Model: its output layer has to be a torch.nn.Linear"):
        rafter.patch(model.transformer)
    with pytest.raises(TypeError, match="takes a model or a trainer with a model, not a str"):
        rafter.patch("gpt2")
    with pytest.raises(TypeError, match="'zloss', wanted one of .*z_loss"):
        rafter.patch(model, zloss=1e-2)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(TypeError, match="ForCausalLMLoss"):
        rafter.patch(model)


def test_options_beside_those_of_the_model():
    for make, name in ((gemma2, "softcap 0.2"), (cohere, "logit_scale 5")):
        for option in ("softcap", "logit_scale"):
            model = make().train()
            with pytest.raises(ValueError, match=f"{option} is 2.0, but {type(model).__name__} has {name} of its own"):
                rafter.patch(model, **{option: 2.0})
            assert model(**batch("cpu")).logits is not None  # as it was
    torch.manual_seed(0)
    model = llama().train()
    logits = model(batch("cpu")["input_ids"]).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(2 * logits, batch("cpu")["labels"][:, 1:].flatten())
    torch.testing.assert_close(rafter.patch(model, logit_scale=2.0)(**batch("cpu")).loss, expected)


def test_the_model_inside_a_wrapper_is_the_one_to_patch():
    """A wrapper has some methods of the inner model, and a forward of its own. test_peft.py has
    those of PEFT, which patch() looks into."""

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
    """Layers that compute more than a product with their weight, as quantized ones do."""

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = gpt2()
    model.set_output_embeddings(Scaled(32, VOCABULARY, bias=False))
    with pytest.raises(TypeError, match="output layer has to be a torch.nn.Linear, .*; this one is .*Scaled"):
        rafter.patch(model)


class Changing(transformers.LlamaForCausalLM):
    """A model that does something to its logits before the loss."""

    def forward(self, input_ids=None, labels=None):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.change(self.lm_head(hidden))
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            loss=self.loss_function(logits, labels, self.vocab_size), logits=logits)


FOLLOWED = {
    "scales": lambda z: 3 * z / 2 * 4.0,
    "a softcap": lambda z: 0.3 * torch.tanh(z / 0.3),
    "a softcap of scaled logits, scaled": lambda z: (5 * z).tanh() * 0.2 / 0.1,
    "two signs": lambda z: -1 * (-2.0 * z),
    "fp32": lambda z: z.float().contiguous().to(torch.float32).to(z.dtype).to("cpu", non_blocking=True),
}
REFUSED = {
    "clamp": lambda z: z.clamp(-1, 1),
    "torch.clamp": lambda z: torch.clamp(z, -1, 1),
    "a constant": lambda z: z + 1.0,
    "a tensor": lambda z: z * torch.tensor(2.0),
    "a tensor first": lambda z: torch.tensor(2.0) * z,
    "a mask": lambda z: torch.zeros(VOCABULARY) + z,
    "a sign": lambda z: -2.0 * z,
    "a negative softcap": lambda z: 3.0 * torch.tanh(-2.0 * z),
    "zero": lambda z: 0 * z,
    "tanh twice": lambda z: torch.tanh(torch.tanh(z)),
    "a sum of softcaps": lambda z: torch.tanh(z) + torch.tanh(z),
    "a slice": lambda z: z[..., :50],
    "a shape": lambda z: z.view(-1, z.shape[-1]),
    "bf16": lambda z: z.to(torch.bfloat16),
    "a power": lambda z: z**2,
    "a difference": lambda z: z - 1,
    "a minus": lambda z: -z,
    "other logits": lambda z: torch.zeros(2, 12, VOCABULARY),
}


def changing(change):
    torch.manual_seed(0)
    model = Changing(transformers.LlamaConfig(**SMALL)).train()
    model.change = change
    return model


@parametrize("name", list(FOLLOWED))
def test_changes_of_the_logits_that_are_followed(name):
    model = changing(FOLLOWED[name])
    expected, wanted = step(model, **batch("cpu"))
    actual, gradients = step(rafter.patch(model), **batch("cpu"))
    assert actual.logits is None
    torch.testing.assert_close(actual.loss, expected.loss)
    for name in wanted:
        torch.testing.assert_close(gradients[name], wanted[name], rtol=1e-4, atol=1e-6, msg=name)


@parametrize("name", list(REFUSED))
def test_other_changes_of_the_logits_are_refused(name):
    """When the model is patched, and if it changes its ways, in the forward."""
    model = changing(REFUSED[name])
    with pytest.raises(TypeError, match="rafter.patch cannot patch Changing: it(s logits| changes its logits)"):
        rafter.patch(model)
    assert not [key for key in model.__dict__ if key in ("forward", "_loss_function", "get_output_embeddings")]
    model.change = lambda z: z
    rafter.patch(model)
    model.change = REFUSED[name]
    with pytest.raises(RuntimeError, match="rafter.patch: Changing cannot be served: it(s logits| changes its logits)"):
        model(**batch("cpu"))
    model.change = lambda z: z
    assert model(**batch("cpu")).logits is None  # nothing is left of the failure


def encoder_decoders():
    small = dict(vocab_size=VOCABULARY, d_model=16, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    yield transformers.T5ForConditionalGeneration(transformers.T5Config(d_kv=4, d_ff=16, num_layers=1, num_heads=2,
                                                                        **small))
    yield transformers.BartForConditionalGeneration(transformers.BartConfig(
        encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2,
        decoder_attention_heads=2, **small))


def test_encoder_decoders_are_refused_with_a_sentence():
    for model in encoder_decoders():
        with pytest.raises(TypeError, match=f"cannot patch {type(model).__name__}: it is an encoder-decoder"):
            rafter.patch(model)


def test_a_model_that_computes_its_loss_itself_is_refused():
    class Own(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=None, logits=logits)

    with pytest.raises(TypeError, match="cannot patch Own: it did not call its loss_function"):
        rafter.patch(Own(transformers.LlamaConfig(**SMALL)))


def test_patching_runs_no_layer_and_keeps_the_random_state():
    model = llama().train()
    model.model.layers[0].forward = None  # would raise
    state = torch.random.get_rng_state()
    rafter.patch(model)
    assert torch.equal(torch.random.get_rng_state(), state) and "forward" not in model.model.__dict__


# ---- evaluation


@parametrize("make", [llama, gemma2, cohere])
def test_evaluation_forms_no_logits_until_they_are_read(make):
    torch.manual_seed(0)
    model = make().eval()
    inputs = batch("cpu")
    size = inputs["input_ids"].numel() * VOCABULARY
    with torch.no_grad():
        expected = model(**inputs)
        rafter.patch(model)
        kept = []
        assert largest_tensor(lambda: kept.append(model(**inputs))) < size
        (out,) = kept
        torch.testing.assert_close(out.loss, expected.loss)
        assert list(out.keys())[:2] == ["loss", "logits"]
        pairs = tuple(out.items())  # as the Trainer of transformers does, whether it needs them or not
        assert out.logits.detach().float().computed is None
        assert out.logits.computed is None
        assert torch.equal(out.logits.argmax(-1), expected.logits.argmax(-1))
        assert out.logits.computed.shape == expected.logits.shape
        for read in (lambda t: t.numpy(), lambda t: t.tolist(), lambda t: copy.deepcopy(t).numpy(),
                     lambda t: pickle.loads(pickle.dumps(t)).numpy(), lambda t: torch.cat([t[:1], t[1:]]),
                     lambda t: t.double().float()):
            again = model(**inputs)
            torch.testing.assert_close(torch.as_tensor(read(again.logits)), expected.logits)
        assert "tensor(" in repr(pairs[1][1])
    late = None
    with torch.no_grad():
        late = model(**inputs)
        for parameter in model.parameters():
            parameter.mul_(1.1)
        with pytest.raises(RuntimeError, match="read after the output layer has changed"):
            late.logits.sum()


def test_evaluation_under_autocast():
    torch.manual_seed(0)
    model = llama().eval()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(**batch("cpu")).logits
            out = rafter.patch(model)(**batch("cpu"))
        assert out.logits.dtype is torch.bfloat16
        torch.testing.assert_close(out.logits.float(), expected.float())


# ---- the Trainer

FOLDER = tempfile.TemporaryDirectory()  # what a trainer writes


def trainer_of(model, folder, **arguments):
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (8, 12)).tolist()]
    arguments = dict(max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
                     disable_tqdm=True, **arguments)
    return transformers.Trainer(model=model, args=transformers.TrainingArguments(folder, **arguments),
                                train_dataset=rows, eval_dataset=rows)


def test_a_trainer_is_patched_by_one_line():
    pytest.importorskip("accelerate")
    results = []
    for patched in (False, True):
        torch.manual_seed(0)
        trainer = trainer_of(llama(), FOLDER.name, gradient_accumulation_steps=2, learning_rate=1.0,
                             optim="sgd")
        if patched:
            assert rafter.patch(trainer) is trainer
            assert largest_tensor(lambda: results.append(trainer.evaluate()["eval_loss"])) < 12 * VOCABULARY * 8
        else:
            results.append(trainer.evaluate()["eval_loss"])
        results[-1] = (results[-1], trainer.train().training_loss,
                       {n: p.detach().clone() for n, p in trainer.model.named_parameters()})
    (own_eval, own_loss, own), (eval_loss, loss, ours) = results
    assert abs(own_eval - eval_loss) < 1e-5 and abs(own_loss - loss) < 1e-5
    for name in own:
        torch.testing.assert_close(ours[name], own[name], rtol=1e-3, atol=1e-5, msg=name)
    rafter.unpatch(trainer)
    smoothed = trainer_of(llama(), FOLDER.name, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        rafter.patch(smoothed)

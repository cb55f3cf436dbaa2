# SPDX-License-Identifier: Apache-2.0
"""rafter.patch on models that PEFT has wrapped: adapters in the layers, a trained copy of the
output layer, and LoRA on the output layer."""
import copy

import pytest
import torch

import rafter
from support import parametrize

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from test_huggingface import SMALL, VOCABULARY, batch, gemma2, largest_tensor, llama, step  # noqa: E402


def lora(*modules, **options):
    """Random adapters: by default B is 0, so that a LoRA that is missed would not be noticed."""
    return peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", init_lora_weights=False,
                           target_modules=list(modules), **options)


CONFIGS = {
    "layers": lambda: lora("q_proj", "v_proj"),
    "head": lambda: lora("q_proj", "lm_head"),
    "head with dropout": lambda: lora("lm_head", lora_dropout=0.5),
    "head with bias": lambda: lora("lm_head", lora_bias=True),
    "rank-stabilized": lambda: lora("lm_head", use_rslora=True),
    "copy of the head": lambda: lora("q_proj", modules_to_save=["lm_head"]),
    "virtual tokens": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def agrees(model, **more):
    """Asserts that the patched model has the loss and the gradients of the unpatched one; leaves it
    patched."""
    model.train()
    torch.manual_seed(1)  # dropout
    expected, wanted = step(model, **batch("cpu"), **more)
    assert rafter.patch(model) is model
    still_agrees(model, expected, wanted, **more)
    return expected


def still_agrees(model, expected, wanted, **more):
    torch.manual_seed(1)
    actual, gradients = step(model, **batch("cpu"), **more)
    assert actual.logits is None
    torch.testing.assert_close(actual.loss, expected.loss)
    assert gradients.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(gradients[name], wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def adapted(make, config):
    torch.manual_seed(0)
    return peft.get_peft_model(make(), CONFIGS[config]())


@parametrize("make", [llama, gemma2])
@parametrize("config", list(CONFIGS))
def test_adapted_models(make, config):
    model = adapted(make, config)
    expected = agrees(model)
    model.eval()
    own = model(**batch("cpu")).logits
    rafter.unpatch(model)
    torch.testing.assert_close(model(**batch("cpu")).logits, own)
    assert all("forward" not in module.__dict__ for module in model.modules())
    torch.manual_seed(1)
    torch.testing.assert_close(model.train()(**batch("cpu")).loss, expected.loss)


@parametrize("config", ["head", "copy of the head"])
def test_denominator_checkpointing_and_copies(config):
    model = adapted(llama, config)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    agrees(model, num_items_in_batch=torch.tensor(31))
    twin = copy.deepcopy(model)
    expected, wanted = step(model, **batch("cpu"))
    for parameter in model.parameters():
        parameter.data.zero_()
    still_agrees(twin, expected, wanted)


@parametrize("config", ["head", "copy of the head"])
def test_compiled(config):
    torch.compiler.reset()
    model = adapted(gemma2, config).train()
    expected, wanted = step(model, **batch("cpu"))
    compiled = torch.compile(rafter.patch(model), backend="aot_eager")
    model.zero_grad()
    out = compiled(**batch("cpu"))
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss)
    for name, parameter in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


@parametrize("config", ["head", "copy of the head"])
def test_switching_adapters(config):
    """PEFT decides in every forward which adapters it uses; the patched model follows."""
    model = adapted(llama, config)
    model.add_adapter("other", CONFIGS[config]())
    losses = {}
    for patched in (False, True):
        if patched:
            rafter.patch(model.train())
        for name in ("other", "default"):
            model.set_adapter(name)
            losses[patched, name] = model(**batch("cpu")).loss
        with model.disable_adapter():
            losses[patched, "none"] = model(**batch("cpu")).loss
        if config == "head":
            model.base_model.set_adapter(["default", "other"])
            losses[patched, "both"] = model(**batch("cpu")).loss
            model.set_adapter("default")
            model.merge_adapter()
            losses[patched, "merged"] = model(**batch("cpu")).loss
            model.unmerge_adapter()
    names = {name for _, name in losses}
    for name in names:
        torch.testing.assert_close(losses[True, name], losses[False, name])
    assert len({losses[True, name].item() for name in names - {"merged"}}) == len(names - {"merged"})


def test_logits_are_never_formed():
    """Also not the product of LoRA's B, which has their shape."""
    model = peft.get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **{**SMALL, "vocab_size": 4096, "hidden_size": 8})), lora("lm_head")).train()
    ids = torch.randint(0, 4096, (4, 32))
    run = lambda: model(input_ids=ids, labels=ids).loss.backward()  # noqa: E731
    assert largest_tensor(run) >= ids.numel() * 4096
    rafter.patch(model)
    assert largest_tensor(run) < ids.numel() * 4096


def test_what_is_refused():
    """Adapters that change more of the output layer, and adapters that come after the patch."""
    with pytest.raises(TypeError, match="cannot patch LlamaForCausalLM: .* this one is peft.tuners.ia3"):
        rafter.patch(peft.get_peft_model(llama(), peft.IA3Config(
            task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"], feedforward_modules=[])))
    dora = peft.get_peft_model(llama(), lora("lm_head", use_dora=True)).train()
    with pytest.raises(TypeError, match="changes its logits"):
        rafter.patch(dora)
    assert dora(**batch("cpu")).logits.shape[-1] == VOCABULARY
    late = peft.get_peft_model(rafter.patch(llama()), lora("lm_head")).train()
    with pytest.raises(RuntimeError, match="changes its logits"):
        late(**batch("cpu"))
    late = peft.get_peft_model(rafter.patch(llama()), lora("q_proj", modules_to_save=["lm_head"])).train()
    with pytest.raises(RuntimeError, match="do not come from the output layer that was patched"):
        late(**batch("cpu"))
    fine = peft.get_peft_model(rafter.patch(llama()), lora("q_proj")).train()
    assert fine(**batch("cpu")).logits is None

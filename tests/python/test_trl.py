# SPDX-License-Identifier: Apache-2.0
"""rafter.patch with TRL's trainers: the steps of an unpatched model, computed by Rafter."""
import os
import tempfile

import pytest
import torch

import rafter
from support import parametrize

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
import datasets  # noqa: E402
from rafter import functional  # noqa: E402
from test_huggingface import SMALL, gemma2  # noqa: E402

FOLDER = tempfile.TemporaryDirectory()  # what trainers write
WORDS = [f"w{i}" for i in range(SMALL["vocab_size"] - 3)]


def tokenizer():
    """A word per token."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>",
                                                unk_token="<unk>")


def text(seed, count):
    chosen = torch.randint(0, len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in chosen)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, pad_token_id=0, bos_token_id=1,
                                                                  eos_token_id=1))


COMMON = dict(max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no", bf16=False,
              disable_tqdm=True, logging_steps=1, learning_rate=1.0, optim="sgd", gradient_checkpointing=False,
              max_grad_norm=1e9)


def sft(model, folder, **options):
    data = datasets.Dataset.from_dict({"text": [text(i, 6 + i) for i in range(6)]})
    return trl.SFTTrainer(model=model, args=trl.SFTConfig(folder, **COMMON, **options), train_dataset=data,
                          eval_dataset=data, processing_class=tokenizer())


def dpo(model, folder, **options):
    data = datasets.Dataset.from_dict({"prompt": [text(i, 4) for i in range(6)],
                                       "chosen": [" " + text(10 + i, 5) for i in range(6)],
                                       "rejected": [" " + text(20 + i, 7) for i in range(6)]})
    torch.manual_seed(1)
    return trl.DPOTrainer(model=model, ref_model=llama(), args=trl.DPOConfig(folder, **COMMON, **options),
                          train_dataset=data, eval_dataset=data, processing_class=tokenizer())


def grpo(model, folder, trainer=trl.GRPOTrainer, config=trl.GRPOConfig, **options):
    data = datasets.Dataset.from_dict({"prompt": [text(i, 4) for i in range(6)]})
    reward = lambda completions, **_: [float(len(set(c.split()))) + 0.1 * i  # noqa: E731
                                       for i, c in enumerate(completions)]
    if options.get("beta"):  # TRL loads the reference model from where the model came from
        model.save_pretrained(os.path.join(folder, "reference"))
        model.config._name_or_path = os.path.join(folder, "reference")
    arguments = {**COMMON, **dict(num_generations=2, max_completion_length=6, temperature=0.7, beta=0.0), **options}
    return trainer(model=model, args=config(folder, **arguments), train_dataset=data, reward_funcs=reward,
                   processing_class=tokenizer())


def kto(model, folder, **options):
    data = datasets.Dataset.from_dict({"prompt": [text(i, 4) for i in range(6)],
                                       "completion": [" " + text(10 + i, 5) for i in range(6)],
                                       "label": [i % 2 == 0 for i in range(6)]})
    torch.manual_seed(1)
    return trl.KTOTrainer(model=model, ref_model=llama(), args=trl.KTOConfig(folder, **COMMON, **options),
                          train_dataset=data, processing_class=tokenizer())


def rloo(model, folder, **options):
    return grpo(model, folder, trainer=trl.RLOOTrainer, config=trl.RLOOConfig, **options)


def count_calls(run):
    """How often rafter.linear_logprobs is called, with and without gradients wanted."""
    counts = {True: 0, False: 0}
    original = functional.linear_logprobs

    def counted(*args, **kwargs):
        counts[torch.is_grad_enabled()] += 1
        return original(*args, **kwargs)

    functional.linear_logprobs = counted
    try:
        run()
    finally:
        functional.linear_logprobs = original
    return counts


def trained(make, trainer_of, folder, patch, **options):
    torch.manual_seed(0)
    model = make()
    if patch == "the model":
        rafter.patch(model)
    trainer = trainer_of(model, folder, **options)
    if patch == "the trainer":
        assert rafter.patch(trainer) is trainer
    torch.manual_seed(0)
    counts = count_calls(trainer.train)
    metrics = [{k: v for k, v in entry.items() if isinstance(v, float) and "runtime" not in k and "second" not in k
                and "time" not in k} for entry in trainer.state.log_history[:-1]]
    return trainer, counts, metrics, {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


CASES = {"sft": (llama, sft, {}), "sft gemma2": (gemma2, sft, {}), "dpo": (llama, dpo, {}),
         "dpo wpo": (llama, dpo, {"use_weighting": True}), "dpo gemma2": (gemma2, dpo, {}),
         "grpo": (llama, grpo, {}), "grpo with reference": (llama, grpo, {"beta": 0.1}),
         "kto": (llama, kto, {}), "rloo": (llama, rloo, {})}


@parametrize("patch", ["the trainer", "the model"])
@parametrize("case", list(CASES))
def test_training(case, patch):
    make, trainer_of, options = CASES[case]
    _, none, expected, wanted = trained(make, trainer_of, FOLDER.name, None, **options)
    trainer, counts, metrics, actual = trained(make, trainer_of, FOLDER.name, patch, **options)
    assert none == {True: 0, False: 0}
    assert counts[True] >= 2, counts
    if trainer_of is dpo and patch == "the trainer":
        assert counts[False] >= 2, counts  # the reference model
    assert len(metrics) == len(expected) > 0
    for got, want in zip(metrics, expected):
        assert got.keys() == want.keys()
        for name in want:
            assert abs(got[name] - want[name]) <= 2e-4 * (1 + abs(want[name])), (name, got[name], want[name])
    changed = 0
    for name in wanted:
        torch.testing.assert_close(actual[name], wanted[name], rtol=2e-3, atol=2e-4, msg=name)
        changed += int(not torch.equal(actual[name], dict(make().named_parameters())[name]))
    assert changed
    rafter.unpatch(trainer if patch == "the trainer" else trainer.model)
    assert count_calls(lambda: trainer.train()) == {True: 0, False: 0}


def test_evaluation():
    torch.manual_seed(0)
    trainer = sft(llama(), FOLDER.name)
    expected = trainer.evaluate()
    rafter.patch(trainer)
    results = []
    counts = count_calls(lambda: results.append(trainer.evaluate()))
    assert counts[False] >= 1
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert abs(results[0][name] - expected[name]) < 1e-5


def test_adapted_models():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj"])
    runs = [trained(lambda: peft.get_peft_model(llama(), config), sft, FOLDER.name, patch)  # noqa: B023
            for patch in (None, "the trainer")]
    assert runs[1][1][True] >= 2
    for name, parameter in runs[0][3].items():
        torch.testing.assert_close(runs[1][3][name], parameter, rtol=2e-3, atol=2e-4, msg=name)


def test_what_is_refused():
    with pytest.raises(ValueError, match="z_loss has no effect on TRL's losses"):
        rafter.patch(sft(llama(), FOLDER.name), z_loss=1e-4)
    trainer = sft(rafter.patch(llama(), z_loss=1e-4), FOLDER.name)
    with pytest.raises(ValueError, match="z_loss has no effect on TRL's losses"):
        trainer.train()
    with pytest.raises(ValueError, match="compute_loss_func"):
        broken = sft(llama(), FOLDER.name)
        broken.compute_loss_func = lambda *_: None
        rafter.patch(broken)

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training step of a Hugging Face model with and without rafter.patch: tokens per second, peak memory, longest sequence.

    bench/train_step.py [--models llama-3.2-1b,gemma-2-2b] [--ways as-is,compile,liger,rafter] [--sequence 8192] [--batch 1]
                        [--steps 10] [--no-checkpointing] [--attention sdpa|eager] [--search-seconds 120] [--search-step 1024]
                        [--device cuda|cpu] [--json FILE] [--quick]

The models have the shapes of the published ones and random weights, in bf16. A step is forward, backward, fused AdamW and
zero_grad on one sequence of random tokens. Every cell runs in a process of its own, because Liger's patch changes classes and a
process that ran out of memory stays fragmented. The table is Markdown, on standard output; progress goes to standard error.

The longest sequence is found by doubling, then by bisection down to --search-step tokens, with batch 1 and whole steps. The search
ends after --search-seconds, and before a step that would take longer than what is left of them; then the table says "at least".
--search-seconds 0 leaves it out.

--quick: tiny models on a CPU, in one process, without the search: a test of this script.
"""
import argparse
import gc
import json
import subprocess
import sys
import time

# Sizes of the published models.
LLAMA = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
             num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=True)
GEMMA = dict(vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
             num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
             final_logit_softcapping=30.0, attn_logit_softcapping=50.0, tie_word_embeddings=True)
TINY = dict(vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16)
# name: (architecture, sizes, attention). transformers' sdpa leaves out the softcap of Gemma 2's attention, and warns; so eager.
MODELS = {"llama-3.2-1b": ("Llama", LLAMA, "sdpa"), "gemma-2-2b": ("Gemma2", GEMMA, "eager")}
WAYS = {"as-is": "as is", "compile": "torch.compile", "liger": "Liger's patch", "liger-loss": "Liger's loss only",
        "rafter": "`rafter.patch`", "rafter-compile": "`rafter.patch`, torch.compile"}
DEFAULT_WAYS = "as-is,compile,liger,rafter"
SEED = 1
# What libraries say when memory runs out: PyTorch and CUDA; Rafter, whose scratch and results PyTorch allocates.
OUT_OF_MEMORY = ("out of memory", "the allocator returned null", "pytorch failed in empty")


def say(text):
    print(text, file=sys.stderr, flush=True)


# ---- one cell: a model in one way --------------------------------------------------------------------------------------


class Cell:
    def __init__(self, model, way, args):
        import torch
        import transformers

        self.torch, self.way, self.cuda = torch, way, args.device == "cuda"
        self.device = torch.device(args.device)
        family, sizes, attention = MODELS[model]
        if args.quick:
            sizes = {**sizes, **TINY}
        if way.startswith("liger"):  # before the model is made: the patch replaces classes
            apply_liger(family, loss_only=way == "liger-loss")
        config = getattr(transformers, f"{family}Config")(**sizes, max_position_embeddings=1 << 20, use_cache=False,
                                                          attn_implementation=args.attention or attention)
        torch.manual_seed(SEED)
        torch.set_default_dtype(torch.bfloat16)
        with self.device:
            self.model = getattr(transformers, f"{family}ForCausalLM")(config).train()
        torch.set_default_dtype(torch.float32)
        self.vocabulary = config.vocab_size
        if args.checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if way.startswith("rafter"):
            import rafter

            rafter.patch(self.model)
        self.call = torch.compile(self.model) if way.endswith("compile") else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def tokens(self, batch, sequence):
        generator = self.torch.Generator().manual_seed(SEED)
        return self.torch.randint(0, self.vocabulary, (batch, sequence), generator=generator).to(self.device)

    def step(self, tokens):
        """The loss of a whole training step, as a tensor on the device."""
        loss = self.call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def wait(self):
        if self.cuda:
            self.torch.cuda.synchronize()

    def measure(self, batch, sequence, steps):
        """The loss of the first step, the median seconds of the others, and the peak bytes (None on a CPU)."""
        tokens = self.tokens(batch, sequence)
        loss = self.step(tokens).item()  # compiles, and allocates the optimizer's state
        for _ in range(2 if steps > 1 else 0):
            self.step(tokens)
        self.wait()
        if self.cuda:
            self.torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step(tokens)
            self.wait()
            times.append(time.perf_counter() - start)
        times.sort()
        return loss, times[len(times) // 2], self.torch.cuda.max_memory_allocated() if self.cuda else None

    def fits(self, sequence):
        """Seconds of one step with this sequence, or None if memory runs out."""
        try:
            tokens = self.tokens(1, sequence)
            for _ in range(2 if self.way.endswith("compile") else 1):  # the first one compiles for the new size
                start = time.perf_counter()
                self.step(tokens)
                self.wait()
            return time.perf_counter() - start
        except RuntimeError as error:  # torch.OutOfMemoryError is one; libraries have their own
            if not any(text in str(error).lower() for text in OUT_OF_MEMORY):
                raise
            error.__traceback__ = None  # it holds the tensors of the step that failed
            return None
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            if self.cuda:
                self.torch.cuda.empty_cache()


def apply_liger(family, loss_only):
    import liger_kernel.transformers as liger

    apply = getattr(liger, f"apply_liger_kernel_to_{family.lower()}")
    if loss_only:
        mlp = "swiglu" if family == "Llama" else "geglu"
        apply(rope=False, rms_norm=False, fused_linear_cross_entropy=True, **{mlp: False})
    else:
        apply()


def longest(fits, start, step, seconds, clock=time.perf_counter):
    """(the longest sequence that fits, whether it is known that `step` more tokens do not). fits(n) is the seconds of a step with n
    tokens, or None. Doubles from `start`, then halves the gap down to `step`; 0 if not even `step` tokens fit."""
    end = clock() + seconds
    good, bad, took = 0, None, 0.0
    trial = start
    while bad is None or bad - good > step:
        # Attention makes a step's time grow with the square of the sequence.
        if good and clock() + took * (trial / good) ** 2 > end:
            return good, False
        result = fits(trial)
        if result is None:
            bad = trial
        else:
            good, took = trial, result
        trial = 2 * good if bad is None else (good + bad) // 2 // step * step
        if bad is not None and trial <= good:
            break
    return good, True


def run_cell(model, way, args):
    """The figures of a cell; or {"reason": why there are none}."""
    try:
        cell = Cell(model, way, args)
        loss, seconds, peak = cell.measure(args.batch, args.sequence, args.steps)
        result = {"loss": loss, "seconds": seconds, "tokens_per_second": args.batch * args.sequence / seconds, "peak": peak}
        if args.search_seconds > 0:
            result["longest"], result["exact"] = longest(cell.fits, args.sequence, args.search_step, args.search_seconds)
        return result
    except Exception as error:  # a way that does not run loses only its own line
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return {"reason": f"{type(error).__name__}: {lines[0].strip()}"}


# ---- all cells ---------------------------------------------------------------------------------------------------------


def run_apart(model, way, args):
    """run_cell in a process of its own, which gets this command's arguments and prints JSON."""
    command = [sys.executable, __file__, *sys.argv[1:], "--cell", model, way]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = said.stdout.splitlines()
    return json.loads(lines[-1]) if said.returncode == 0 and lines else {"reason": f"its process ended with status {said.returncode}"}


def cell_text(result):
    if "reason" in result:
        return "- | - | - | - | -"
    peak = "-" if result["peak"] is None else f"{result['peak'] / 2**30:.2f}"
    length = "-"
    if "longest" in result:
        length = f"{result['longest']}" if result["exact"] else f"at least {result['longest']}"
    return f"{result['tokens_per_second']:.0f} | {1e3 * result['seconds']:.1f} | {peak} | {length} | {result['loss']:.4f}"


def print_table(results, args):
    print("| model | way | tokens/s | ms per step | peak GiB | longest sequence | first loss |")
    print("|---|---|---|---|---|---|---|")
    for (model, way), result in results.items():
        print(f"| {model} | {WAYS[way]} | {cell_text(result)} |")
    print()
    with_or_without = "with" if args.checkpointing else "without"
    print(f"{args.batch} x {args.sequence} tokens, bf16, {with_or_without} gradient checkpointing, fused AdamW, on {args.device}; "
          f"median of {args.steps} steps." +
          (f" The longest sequence is within {args.search_step} tokens." if args.search_seconds > 0 else ""))
    for (model, way), result in results.items():
        if "reason" in result:
            print(f"- {model}, {WAYS[way]}: {result['reason']}")


def names(value, known, option):
    chosen = value.split(",")
    for name in chosen:
        if name not in known:
            raise SystemExit(f"train_step.py: {option} names '{name}', wanted some of {', '.join(known)}")
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default=DEFAULT_WAYS, help=", ".join(WAYS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--attention", choices=["sdpa", "eager"], help="default: sdpa; eager for Gemma 2")
    parser.add_argument("--search-seconds", type=float, default=120)
    parser.add_argument("--search-step", type=int, default=1024)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.device, args.sequence, args.steps, args.search_seconds = "cpu", 24, 1, 0
    if args.cell:
        print(json.dumps(run_cell(*args.cell, args)))
        return
    results = {}
    for model in names(args.models, MODELS, "--models"):
        for way in names(args.ways, WAYS, "--ways"):
            say(f"{model}, {WAYS[way]}")
            results[model, way] = (run_cell if args.quick else run_apart)(model, way, args)
            say(f"    {cell_text(results[model, way])}")
            if args.json:  # after every cell: a later one may take long
                with open(args.json, "w", encoding="utf-8") as file:
                    json.dump([{"model": m, "way": w, **result} for (m, w), result in results.items()], file, indent=1)
    print_table(results, args)


if __name__ == "__main__":
    main()

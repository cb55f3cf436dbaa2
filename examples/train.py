#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer on generated text, once with plain PyTorch and once with Rafter, from
the same initial weights. Prints both loss curves, tokens per second and peak memory.

    PYTHONPATH=build/python python examples/train.py [--steps 50] [--device cpu]

The models differ in three lines: the activation, and the last layer with its loss. Each run is a
separate process, so that its peak memory can be measured.
"""
import argparse
import json
import math
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 8192, 64, 4, 2, 64, 16


def make_text(size, seed=0):
    """Sentences of a small grammar, predictable enough to learn."""
    import random
    draw = random.Random(seed)
    who = ["the fox", "a carpenter", "the river", "my neighbour", "an old clock", "the rafter"]
    does = ["holds", "follows", "remembers", "measures", "paints", "carries"]
    what = ["the roof", "a long story", "every beam", "the winter", "two small stones", "the evening light"]
    text = ""
    while len(text) < size:
        text += f"{draw.choice(who)} {draw.choice(does)} {draw.choice(what)}. "
    return text.encode()[:size]


def tokens(text):
    """Each token is a pair of adjacent bytes, folded into the vocabulary, so that the last layer is wide."""
    data = torch.tensor(list(text), dtype=torch.long)
    return (data[:-1] * 256 + data[1:]) % VOCABULARY


class Block(torch.nn.Module):
    def __init__(self, silu):
        super().__init__()
        self.silu = silu
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(self.silu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    def __init__(self, with_rafter):
        super().__init__()
        if with_rafter:
            import rafter
            self.loss = rafter.linear_cross_entropy
            silu = rafter.silu
        else:
            self.loss = lambda x, weight, y: F.cross_entropy(F.linear(x, weight).flatten(0, 1), y.flatten())
            silu = F.silu
        self.embedding, self.position = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(silu) for _ in range(LAYERS)])
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x, y):
        h = self.embedding(x) + self.position.weight
        for block in self.blocks:
            h = block(h)
        return self.loss(self.norm(h), self.head.weight, y)


def train(with_rafter, steps, device):
    torch.manual_seed(0)
    model = Model(with_rafter).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = tokens(make_text(1 << 16)).to(device)
    order = torch.Generator().manual_seed(1)
    losses, start = [], None
    for step in range(steps):
        at = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=order)
        x = torch.stack([data[i:i + LENGTH] for i in at])
        y = torch.stack([data[i + 1:i + LENGTH + 1] for i in at])
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1:
            start = time.perf_counter()  # the first two steps are warm-up
    speed = (steps - 2) * BATCH * LENGTH / (time.perf_counter() - start)
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"losses": losses, "tokens_per_second": speed, "peak_mib": peak / 2**20}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=["torch", "rafter"], help="run one of the two and print JSON")
    args = parser.parse_args()
    if args.steps < 3:
        sys.exit("train.py: --steps must be 3 or more; the first two are warm-up")
    if args.only:
        print(json.dumps(train(args.only == "rafter", args.steps, args.device)))
        return
    runs = {}
    for name in ("torch", "rafter"):
        command = [sys.executable, __file__, "--only", name, "--steps", str(args.steps), "--device", args.device]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        runs[name] = json.loads(output.splitlines()[-1])
    print(f"{'step':>6}{'torch':>12}{'rafter':>12}")
    curves = [runs[name]["losses"] for name in runs]
    for step in sorted({*range(0, args.steps, max(1, args.steps // 8)), args.steps - 1}):
        print(f"{step:>6}{curves[0][step]:>12.6f}{curves[1][step]:>12.6f}")
    difference = max(abs(a - b) / abs(a) for a, b in zip(*curves))
    print(f"largest relative difference between the losses: {difference:.1e}")
    for name, run in runs.items():
        print(f"{name:<8}{run['tokens_per_second']:>10.0f} tokens/s{run['peak_mib']:>10.0f} MiB peak")
    if not math.isfinite(difference) or difference > 1e-3:
        sys.exit("the loss curves differ by more than rounding")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small model whose output layer is spread over ranks: each rank holds the rows of the weight
for its own classes. No rank ever holds the rows of another, or the logits.

    PYTHONPATH=build/python torchrun --nproc-per-node 2 examples/vocabulary_parallel.py [--steps 20]

With a GPU for each rank, NCCL connects them; else gloo, on the CPU. Every rank has the same tokens. At the
end rank 0 trains the whole layer by itself, to compare.
"""
import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group: see the end of main()

import rafter

CLASSES, WIDTH, TOKENS = 1003, 64, 256  # the classes do not divide evenly


class Head(torch.nn.Module):
    """A small model with an output layer of the classes [first, last)."""

    def __init__(self, first, last):
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank, whatever it keeps of them
        self.body = torch.nn.Sequential(torch.nn.Embedding(CLASSES, WIDTH), torch.nn.Linear(WIDTH, WIDTH),
                                        torch.nn.GELU())
        weight = torch.randn(CLASSES, WIDTH) / WIDTH**0.5
        self.weight = torch.nn.Parameter(weight[first:last].clone())

    def forward(self, tokens, labels, **options):
        return rafter.linear_cross_entropy(self.body(tokens), self.weight, labels, **options)


def train(model, steps, device, **options):
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, CLASSES, (TOKENS,), generator=order).to(device)
        loss = model(tokens, (tokens * 7 + 3) % CLASSES, label_smoothing=0.05, **options)
        optimizer.zero_grad()
        loss.backward()  # the body's gradient is that of all classes: the loss sums it over the ranks
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunk = -(-CLASSES // ranks)  # as torch.chunk cuts
    first, last = min(rank * chunk, CLASSES), min((rank + 1) * chunk, CLASSES)
    print(f"rank {rank} of {ranks} has classes {first} to {last - 1}")
    losses = train(Head(first, last), steps, device, group=dist.group.WORLD, classes=CLASSES)
    error = 0.0
    if rank == 0:
        alone = train(Head(0, CLASSES), steps, device)
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, alone))
        print(f"loss of the first step {losses[0]:.6f}, of the last {losses[-1]:.6f}; largest relative difference to "
              f"one rank: {error:.1e}")
    # This joins gloo's threads. A thread that is not joined, and still holds a tensor of the last collective,
    # aborts the process when Python exits. If torch.distributed.nn is first imported after init_process_group, as
    # torch.optim does through torch._dynamo, its default arguments keep the group alive, and the threads run on.
    dist.destroy_process_group()
    if not error < 1e-3:
        sys.exit("the losses differ by more than rounding")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time per call of Rafter's functions and of torch's, on the smallest row of every table: the
cost of Python, the dispatcher, autograd and the launch before the device does anything. Forward
without and with gradients required, then forward and backward; then a breakdown of a call.

    PYTHONPATH=build/python bench/torch_host_cost.py [--device cuda]

On CUDA, calls are timed while the device is busy with earlier work, so that no call waits for it;
on the CPU, where a call returns when it is done, on tensors of a few elements.
"""
import argparse
import gc
import time

import torch
import torch.nn.functional as F

import rafter


def microseconds(calls, device, rounds, repeats=30):  # so few repeats that the device's queue never fills
    """The smallest mean time of a round, for each call: larger times are noise. Rounds alternate, so that all see the same conditions."""
    best = [float("inf")] * len(calls)
    for call in calls:
        for _ in range(50):
            call()
    for _ in range(rounds):
        for i, call in enumerate(calls):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / repeats)
    return [1e6 * seconds for seconds in best]


def rows(device, grad):
    """Name, the tensors that get a gradient, our call and theirs: the smallest rows of tests/seeds.txt, or on the CPU a few numbers."""
    small = device == "cpu"
    dtype = torch.float32 if small else torch.bfloat16

    def tensor(*shape):
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad)

    def labels(rows, classes):
        return torch.randint(0, classes, (rows,), device=device)

    logits, target = (tensor(4, 8), labels(4, 8)) if small else (tensor(4096, 1024), labels(4096, 1024))
    hidden, weight, label = ((tensor(4, 8), tensor(8, 8), labels(4, 8)) if small else
                             (tensor(12288, 4096), tensor(1024, 4096), labels(12288, 1024)))
    cube = tensor(*(2, 4, 8) if small else (4, 1024, 1024))
    block = tensor(*(2, 2, 4, 8) if small else (12, 12, 256, 128))
    sequence = tensor(*(2, 4, 2, 8) if small else (12, 256, 12, 128))
    theta = torch.rand(sequence.shape[2], sequence.shape[3], device=device)

    def encode(x):
        angle = torch.arange(x.shape[1], device=device, dtype=torch.float32).view(-1, 1, 1) * theta
        return torch.cat([x * angle.cos(), x * angle.sin()], -1)

    yield "cross_entropy", [logits], lambda: rafter.cross_entropy(logits, target), lambda: F.cross_entropy(logits, target)
    yield ("linear_cross_entropy", [hidden, weight], lambda: rafter.linear_cross_entropy(hidden, weight, label),
           lambda: F.cross_entropy(F.linear(hidden, weight), label))
    yield "logsumexp", [cube], lambda: rafter.logsumexp(cube, -1), lambda: torch.logsumexp(cube, -1)
    yield "softmax dim -1", [block], lambda: rafter.softmax(block, -1), lambda: F.softmax(block, -1)
    yield "softmax dim -2", [block], lambda: rafter.softmax(block, -2), lambda: F.softmax(block, -2)
    yield "silu", [block], lambda: rafter.silu(block), lambda: F.silu(block)
    yield "sigmoid", [block], lambda: rafter.sigmoid(block), lambda: torch.sigmoid(block)
    yield "relu", [block], lambda: rafter.relu(block), lambda: F.relu(block)
    for kind, dim, f in (("none", None, lambda x: x), ("silu", None, F.silu), ("softmax", -1, lambda x: F.softmax(x, -1)),
                         ("softmax", 1, lambda x: F.softmax(x, 1))):
        yield (f"lrpe_cosine {kind}" + (f" dim {dim}" if dim else ""), [sequence],
               lambda kind=kind, dim=dim: rafter.lrpe_cosine(sequence, theta, act=kind, dim=dim), lambda f=f: encode(f(sequence)))


def parts(device):
    """What a call of silu is made of, from the inside out, and what PyTorch's own costs: name and call."""
    plain = torch.randn(*(2, 2, 4, 8) if device == "cpu" else (12, 12, 256, 128), device=device)
    leaf = plain.clone().requires_grad_()

    raw = rafter._formulas.act.raw

    class Allocating(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx, dy):
            return dy

    class Calling(Allocating):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return raw(x, 3)

    allocating, calling = rafter._ops.direct(Allocating), rafter._ops.direct(Calling)
    yield "allocating the result", lambda: torch.empty_like(plain)
    yield "the op below autograd", lambda: raw(plain, 3)
    yield "rafter.silu", lambda: rafter.silu(plain)
    yield "F.silu", lambda: F.silu(plain)
    yield "a Function that allocates", lambda: allocating(leaf)
    yield "a Function around the op", lambda: calling(leaf)
    yield "rafter.silu with gradient", lambda: rafter.silu(leaf)
    yield "F.silu with gradient", lambda: F.silu(leaf)


def with_backward(call, tensors):
    upstream = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), tensors, upstream)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    device = options.device
    torch.set_num_threads(1)
    gc.disable()
    print(f"torch {torch.__version__}, {device}; microseconds of host time per call")
    for title, grad, backward in (("without gradients", False, False), ("with gradients", True, False), ("and backward", True, True)):
        print(f"\n{title:<24}{'rafter':>9}{'torch':>9}{'more':>9}")
        for name, tensors, *calls in rows(device, grad):
            if backward:
                calls = [with_backward(call, tensors) for call in calls]
            mine, other = microseconds(calls, device, options.rounds)
            print(f"{name:<24}{mine:>9.2f}{other:>9.2f}{mine - other:>+9.2f}", flush=True)
    names, calls = zip(*parts(device))
    print()
    for name, cost in zip(names, microseconds(calls, device, options.rounds)):
        print(f"{name:<28}{cost:>9.2f}")


if __name__ == "__main__":
    main()

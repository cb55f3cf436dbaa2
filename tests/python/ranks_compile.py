# SPDX-License-Identifier: Apache-2.0
"""The losses over ranks under torch.compile. Run by ranks.py."""
import os

import torch
from torch.distributed.tensor import Replicate, Shard

import rafter
from ranks_dtensor import CLASSES, expected, mesh_of, placed, problem
from ranks_losses import cuts
from support import close

# aot_eager traces as Inductor does, without the time of its compilers.
BACKEND = os.environ.get("RAFTER_TEST_COMPILER", "aot_eager")


def check_groups(world):
    """One graph, with the group as a constant; forward and backward are Rafter's ops and nothing else of
    V's size."""
    x, w, b, target = problem(world)
    own = slice(*cuts(CLASSES, world.size)[0][world.rank:world.rank + 2])
    loss, gradients = expected(x, w, b, target)

    @torch.compile(fullgraph=True, backend=BACKEND)
    def step(x, w, b, target):
        return rafter.linear_cross_entropy(x * 1, w, target, linear_bias=b, group=world.group, classes=CLASSES)

    tensors = [t.clone().requires_grad_() for t in (x, w[own], b[own])]
    out = step(*tensors, target)
    out.backward(torch.full_like(out, -1.5))
    world.same_bits(out)
    close(out, loss, scale=4)
    for t, g in zip(tensors, (gradients[0], gradients[1][own], gradients[2][own])):
        close(t.grad, g, scale=8)


def check_every_function(world):
    """Compiled once for any number of rows."""
    x, w, b, target = problem(world)
    own = slice(*cuts(CLASSES, world.size)[0][world.rank:world.rank + 2])
    rows = slice(*cuts(len(target), world.size)[0][world.rank:world.rank + 2])

    def step(x, w, logits, target, mine, own_target):
        shard = dict(group=world.group, classes=CLASSES)
        out = rafter.cross_entropy(logits, target, label_smoothing=0.1, extras="entropy", **shard)
        return (out.loss, out.entropy, *rafter.linear_logprobs(x, w, target, entropy=True, is_top=True, **shard),
                rafter.cross_entropy(mine, own_target, row_group=world.group))

    logits = x @ w.T
    compiled = torch.compile(step, fullgraph=True, backend=BACKEND, dynamic=True)
    for n in (len(target), 7, 5):
        arguments = x[:n].requires_grad_(), w[own], logits[:n, own], target[:n], logits[rows], target[rows]
        for found, wanted in zip(compiled(*arguments), step(*arguments)):
            assert torch.equal(found, wanted)


def check_cuda_graph(world):
    """Captured with the collectives in it, and replayed with other data."""
    world.skip_unless(world.device == "cuda" and torch.distributed.get_backend() == "nccl", "for NCCL")
    x, w, _, target = problem(world)
    own = slice(*cuts(CLASSES, world.size)[0][world.rank:world.rank + 2])
    tensors = [t.to(torch.bfloat16).requires_grad_() for t in (x, w[own])]

    def step():
        loss = rafter.linear_cross_entropy(*tensors, target, group=world.group, classes=CLASSES)
        return loss, *torch.autograd.grad(loss, tensors)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        tensors[0].mul_(1.5)
    graph.replay()
    for found, wanted in zip(captured, step()):
        assert torch.equal(found, wanted)


def check_dtensors(world):
    mesh = mesh_of(world)
    x, w, b, target = problem(world)
    loss, gradients = expected(x, w, b, target)

    @torch.compile(fullgraph=True, backend=BACKEND)
    def step(x, w, b, target):
        return rafter.linear_cross_entropy(x, w, target, linear_bias=b).to_local()

    for placement in (Replicate(), Shard(0)):
        tensors = placed(x, mesh, placement), placed(w, mesh, Shard(0)), placed(b, mesh, Shard(0))
        out = step(*tensors, target)
        out.backward(torch.full_like(out, -1.5))
        close(out, loss, scale=4)
        assert [t.grad.placements for t in tensors] == [(placement,), (Shard(0),), (Shard(0),)]
        for t, g in zip(tensors, gradients):
            close(t.grad.full_tensor(), g, scale=8)

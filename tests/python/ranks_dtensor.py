# SPDX-License-Identifier: Apache-2.0
"""The losses on DTensors: values, the placements of results and gradients, and what is moved. Run by
ranks.py."""
import contextlib

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import rafter
from ranks_losses import EXTRAS, one_rank, upstream_of
from support import close, labels, loss_reference, normal

ROWS, CLASSES, DEPTH = 10, 23, 16  # neither is a multiple of 2 and 3


def mesh_of(world, *shape, gathers=True):
    """gathers: DTensor's own will be called. Those of gloo end the process for CUDA tensors (pytorch
    152645)."""
    backend = torch.distributed.get_backend()
    world.skip_unless(not gathers or world.device == "cpu" or backend != "gloo", "gloo cannot gather CUDA tensors")
    return init_device_mesh(world.device, shape or (world.size,))


def problem(world):
    x, w = normal(ROWS, DEPTH, device=world.device), normal(CLASSES, DEPTH, device=world.device, seed=1, scale=0.5)
    return x, w, normal(CLASSES, device=world.device, seed=2), labels((ROWS,), CLASSES, world.device)


def placed(tensor, mesh, *placements):
    return distribute_tensor(tensor.clone(), mesh, placements).detach().requires_grad_(tensor.is_floating_point())


def expected(x, w, b, target, **options):
    """Loss and gradients in fp64."""
    x, w, b = (t.double().requires_grad_() for t in (x, w, b))
    loss = loss_reference(x @ w.T + b, target, **options)
    return loss, torch.autograd.grad(loss, (x, w, b), upstream_of(loss))


def backward(loss):
    """With the upstream gradient of expected(), however the loss is placed."""
    whole = upstream_of(loss.full_tensor())
    loss.backward(distribute_tensor(whole, loss.device_mesh, loss.placements))


class Sent(list):
    """Bytes, and in `names` what sent them."""

    def __init__(self):
        super().__init__()
        self.names = []


@contextlib.contextmanager
def gathers():
    """The bytes that a rank sends in each of the library's collectives."""
    sent = Sent()
    names = ("all_gather_single", "all_gather_into_tensor", "all_reduce", "reduce_scatter_single",
             "reduce_scatter_tensor")
    functions = {name: getattr(torch.distributed, name) for name in names if hasattr(torch.distributed, name)}

    def recording(name, function, at):
        def call(*args, **kwargs):
            sent.append(args[at].numel() * args[at].element_size())
            sent.names.append(name)
            return function(*args, **kwargs)
        return call

    for name, function in functions.items():
        setattr(torch.distributed, name, recording(name, function, 0 if name == "all_reduce" else 1))
    try:
        yield sent
    finally:
        for name, function in functions.items():
            setattr(torch.distributed, name, function)


def check_vocabulary_parallel(world):
    """weight in Shard(0): dW in Shard(0), and dx, summed, in Replicate. Nothing of V or V / ranks moves."""
    mesh = mesh_of(world, gathers=False)
    x, w, b, target = problem(world)
    weight = normal(CLASSES, device=world.device, seed=5).abs() + 0.1
    for options in ({}, dict(reduction="none"), dict(reduction="sum", label_smoothing=0.1, weight=weight, z_loss=0.01)):
        loss, gradients = expected(x, w, b, target, **options)
        for mode in ("auto", "compact"):
            tensors = placed(x, mesh, Replicate()), placed(w, mesh, Shard(0)), placed(b, mesh, Shard(0))
            with CommDebugMode() as moved, gathers() as sent:
                out = rafter.linear_cross_entropy(tensors[0], tensors[1], target, linear_bias=tensors[2], mode=mode,
                                                  **options)
                assert isinstance(out, DTensor) and out.placements == (Replicate(),)
                out.backward(placed(upstream_of(loss).float(), mesh, Replicate()).detach())
            assert not any("functional" in str(op) for op in moved.get_comm_counts()), moved.get_comm_counts()
            # The ranks' calls, 32 bytes for each row, and dx; twice for a backward of its own.
            assert max(sent) <= max(320, 32 * ROWS, 4 * ROWS * DEPTH), sent
            close(out.to_local(), loss, scale=4)
            world.same_bits(out.to_local(), tensors[0].grad.to_local())
            assert [t.grad.placements for t in tensors] == [(Replicate(),), (Shard(0),), (Shard(0),)]
            for t, g in zip(tensors, gradients):
                close(t.grad.to_local(), distribute_tensor(g, mesh, t.placements).to_local(), scale=8)


def check_sequence_parallel_input(world):
    """Rows of the input over the same ranks as the classes: gathered, and dx goes back in shards; by a
    reduce-scatter if they are even. [batch, time, D] is cut over either."""
    mesh = mesh_of(world)
    _, w, b, _ = problem(world)
    steps = 3 * world.size
    for shape, dim in (((2, 5), 1), ((2, steps), 1), ((steps, 2), 0), ((steps,), 0)):
        x, target = normal(*shape, DEPTH, device=world.device), labels(shape, CLASSES, world.device)
        row_weight = normal(*shape, device=world.device, seed=6)
        for options in ({}, dict(mode="compact"), dict(reduction="none", row_weight=row_weight)):
            mode = options.pop("mode", "auto")
            loss, gradients = expected(x, w, b, target, **options)
            tensors = placed(x, mesh, Shard(dim)), placed(w, mesh, Shard(0)), placed(b, mesh, Shard(0))
            with gathers() as sent:
                out = rafter.linear_cross_entropy(tensors[0], tensors[1], target, linear_bias=tensors[2], mode=mode,
                                                  extras=EXTRAS, **options)
                assert out.loss.placements == out.lse.placements == (Replicate(),)
                backward(out.loss)
            if shape != (2, 5) and world.size > 1:  # dx is never summed on every rank
                assert "all_reduce" not in sent.names and "reduce_scatter" in " ".join(sent.names), sent.names
            close(out.loss.to_local(), loss, scale=4)
            stats = one_rank(x.double() @ w.double().T + b, target, options) if len(shape) == 1 else None
            if stats:
                close(out.entropy.to_local(), stats.entropy.double(), scale=4)
            assert [t.grad.placements for t in tensors] == [(Shard(dim),), (Shard(0),), (Shard(0),)]
            for t, g in zip(tensors, gradients):
                close(t.grad.full_tensor(), g, scale=8)


def check_rows_of_a_replicated_weight(world):
    """Rows in Shard(0): a loss over all rows, and dW placed as by torch.nn.functional.linear."""
    mesh = mesh_of(world)
    x, w, b, target = problem(world)
    row_weight = normal(ROWS, device=world.device, seed=6)
    for options in ({}, dict(reduction="none"), dict(row_weight=row_weight), dict(denominator=7.0)):
        loss, gradients = expected(x, w, b, target, **options)
        tensors = placed(x, mesh, Shard(0)), placed(w, mesh, Replicate()), placed(b, mesh, Replicate())
        labels_there = placed(target, mesh, Shard(0)) if "row_weight" in options else target  # either
        out = rafter.linear_cross_entropy(tensors[0], tensors[1], labels_there, linear_bias=tensors[2], extras=EXTRAS,
                                          **options)
        per_row = options.get("reduction") == "none"
        assert out.loss.placements == ((Shard(0) if per_row else Replicate()),)
        assert out.lse.placements == (Shard(0),) and out.lse.shape == (ROWS,)
        close(out.loss.full_tensor(), loss, scale=4)
        stats = one_rank((x.double() @ w.double().T + b), target, {k: v for k, v in options.items()})
        for name in EXTRAS:
            close(getattr(out, name).full_tensor().float(), getattr(stats, name).double(), scale=4)
        backward(out.loss)
        native = placed(w, mesh, Replicate())
        torch.nn.functional.linear(placed(x, mesh, Shard(0)), native).sum().backward()
        assert tensors[1].grad.placements == native.grad.placements, native.grad.placements
        for t, g in zip(tensors, gradients):
            close(t.grad.full_tensor(), g, scale=8)


def check_logits(world):
    """Logits in Shard over classes (what loss_parallel covers), and over rows."""
    mesh = mesh_of(world)
    whole, target = normal(2, 5, CLASSES, device=world.device), labels((2, 5), CLASSES, world.device)
    weight = normal(CLASSES, device=world.device, seed=5).abs() + 0.1
    for options in ({}, dict(weight=weight, label_smoothing=0.1, z_loss=0.01), dict(reduction="none", softcap=4.0)):
        z = whole.double().requires_grad_()
        loss = loss_reference(z, target, **options)
        dz, = torch.autograd.grad(loss, z, upstream_of(loss))
        for placement in (Shard(2), Shard(-1), Shard(1), Replicate()):
            logits = placed(whole, mesh, placement)
            with gathers() as sent:
                out = rafter.cross_entropy(logits, target, dim=-1, **options)
            assert not sent or max(sent) <= max(320, 32 * 10)
            backward(out)
            close(out.full_tensor(), loss, scale=4)
            assert logits.grad.placements == logits.placements
            close(logits.grad.full_tensor(), dz, scale=4)
    logits = placed(whole.movedim(-1, 1).contiguous(), mesh, Shard(1))
    close(rafter.cross_entropy(logits, target).full_tensor(), loss_reference(whole, target), scale=4)


def check_partial_input(world):
    """What a row-parallel layer returns before its sum."""
    mesh = mesh_of(world)
    x, w, b, target = problem(world)
    loss, _ = expected(x, w, torch.zeros_like(b), target)
    part = DTensor.from_local(x / world.size, mesh, [Partial()], run_check=False)
    close(rafter.linear_cross_entropy(part, placed(w, mesh, Shard(0)), target).full_tensor(), loss, scale=4)


def check_logprobs(world):
    mesh = mesh_of(world)
    x, w, b, target = problem(world)
    want = rafter.linear_logprobs(x, w, target, linear_bias=b, entropy=True, is_top=True)
    for input, weight in ((Replicate(), Shard(0)), (Shard(0), Shard(0)), (Shard(0), Replicate())):
        tensors = placed(x, mesh, input), placed(w, mesh, weight), placed(b, mesh, weight)
        out = rafter.linear_logprobs(tensors[0], tensors[1], target, linear_bias=tensors[2], entropy=True, is_top=True)
        for a, e in zip(out, want):
            close(a.full_tensor().float(), e.double(), scale=4)
        (out.logprob.sum() + out.entropy.sum()).backward()
        reference = [t.clone().requires_grad_() for t in (x, w, b)]
        whole = rafter.linear_logprobs(reference[0], reference[1], target, linear_bias=reference[2], entropy=True)
        (whole.logprob.sum() + whole.entropy.sum()).backward()
        for t, r in zip(tensors, reference):
            close(t.grad.full_tensor(), r.grad.double(), scale=8, atol=1e-5)


def check_two_dimensions(world):
    """Rows over one dimension of a mesh, classes over the other; also with one rank in one of them."""
    x, w, b, target = problem(world)
    loss, gradients = expected(x, w, b, target)
    for rows in sorted({1, 2, world.size}):
        if world.size % rows:
            continue
        mesh = mesh_of(world, rows, world.size // rows)
        tensors = (placed(x, mesh, Shard(0), Replicate()), placed(w, mesh, Replicate(), Shard(0)),
                   placed(b, mesh, Replicate(), Shard(0)))
        out = rafter.linear_cross_entropy(tensors[0], tensors[1], target, linear_bias=tensors[2])
        assert out.placements == (Replicate(), Replicate())
        backward(out)
        close(out.to_local(), loss, scale=4)
        for t, g in zip(tensors, gradients):
            close(t.grad.full_tensor(), g, scale=8)
        logits = placed(x @ w.T + b, mesh, Shard(0), Shard(1))
        close(rafter.cross_entropy(logits, target).full_tensor(), loss, scale=4)


def check_refusals(world):
    mesh = mesh_of(world)
    x, w, b, target = problem(world)
    for input, weight in ((x, placed(w, mesh, Shard(0))), (placed(x, mesh, Shard(1)), placed(w, mesh, Shard(0))),
                          (placed(x, mesh, Replicate()), placed(w, mesh, Shard(1)))):
        with pytest.raises(NotImplementedError, match="redistribute"):
            rafter.linear_cross_entropy(input, weight, target)
    with pytest.raises(ValueError, match="placements tell the groups"):
        rafter.linear_cross_entropy(placed(x, mesh, Replicate()), placed(w, mesh, Shard(0)), target, row_group=mesh)
    grid = mesh_of(world, 1, world.size)
    with pytest.raises(NotImplementedError, match="two dimensions"):
        rafter.cross_entropy(placed(normal(6, 9, device=world.device), grid, Shard(1), Shard(1)), target[:6] % 9)

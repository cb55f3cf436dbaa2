# SPDX-License-Identifier: Apache-2.0
"""Mistakes that other parallel losses have made. Run by ranks.py."""
import datetime
import math

import pytest
import torch

import rafter
from ranks_losses import cuts
from support import close, labels, loss_reference, normal, smallest_budget


def own(world, total, cut=0):
    shards = cuts(total, world.size)
    return slice(*shards[cut % len(shards)][world.rank:world.rank + 2])


def check_log_tp_offset(world):
    """Megatron-LM 7452: the loss was off by the logarithm of the number of ranks. Equal logits over V
    classes have a loss of log V, however many ranks have them."""
    classes, target = 60, torch.arange(5, device=world.device)
    mine = own(world, classes)
    width = mine.stop - mine.start
    groups = dict(group=world.group, classes=classes)
    exact = torch.tensor(math.log(classes), dtype=torch.float64)
    close(rafter.cross_entropy(torch.zeros(5, width, device=world.device), target, **groups), exact)
    x, w = normal(5, 8, device=world.device), torch.zeros(width, 8, device=world.device)
    close(rafter.linear_cross_entropy(x, w, target, **groups), exact)
    close(rafter.linear_logprobs(x, w, target, **groups).logprob, -exact.expand(5))


def check_smoothing_over_all_classes(world):
    """Megatron-LM 737 and 7464: label smoothing counted the classes of one rank."""
    z, target = normal(6, 30, device=world.device), labels((6,), 30, world.device)
    found = rafter.cross_entropy(z[:, own(world, 30)], target, label_smoothing=0.3, group=world.group, classes=30)
    close(found, loss_reference(z, target, label_smoothing=0.3))


def check_weighted_mean_over_a_sharded_batch(world):
    """pytorch 185167: with class weights the mean divides by the sum of the weights of all rows, not by
    that of one rank's, and is not the mean of the ranks' means."""
    rows = 17
    z, target = normal(rows, 9, device=world.device), labels((rows,), 9, world.device)
    weight = torch.arange(1, 10, device=world.device).float() ** 2
    expected = loss_reference(z, target, weight=weight)
    for cut in range(4):
        mine = own(world, rows, cut)
        close(rafter.cross_entropy(z[mine], target[mine], weight, row_group=world.group), expected)


def check_context_parallel_token_count(world):
    """verl 6049: ranks of a context have different numbers of tokens that count; each divided by its own
    number. All of the prompt, on the first ranks, is ignored here."""
    tokens = 24
    x, w = normal(tokens, 8, device=world.device), normal(11, 8, device=world.device, seed=1)
    target = labels((tokens,), 11, world.device, ignored=False)
    target[:15] = -100
    reference = [t.double().requires_grad_() for t in (x, w)]
    expected = loss_reference(reference[0] @ reference[1].T, target)
    dx, dw = torch.autograd.grad(expected, reference)
    mine = own(world, tokens)
    tensors = [x[mine].clone().requires_grad_(), w.clone().requires_grad_()]
    loss = rafter.linear_cross_entropy(*tensors, target[mine], row_group=world.group)
    close(loss, expected)
    loss.backward()
    close(tensors[0].grad, dx[mine], scale=8)
    torch.distributed.all_reduce(tensors[1].grad, group=world.group)
    close(tensors[1].grad, dw, scale=8)
    # The same number, given: that of gradient accumulation over several batches.
    given = rafter.linear_cross_entropy(x[mine], w, target[mine], row_group=world.group, denominator=9.0)
    close(given, expected)


def check_unequal_chunk_counts(world):
    """trl 6696: ranks whose rows make different numbers of chunks made different numbers of collective
    calls, and hung. The budget makes many chunks on one rank, and one or none on the others."""
    rows = 600
    x, w = normal(rows, 32, device=world.device), normal(50, 32, device=world.device, seed=1)
    target = labels((rows,), 50, world.device)
    expected = loss_reference(x.double() @ w.double().T, target)
    least = smallest_budget(lambda budget: rafter.linear_cross_entropy(x.clone().requires_grad_(), w, target,
                                                                       budget=budget))
    for cut in range(4):
        for mode in ("fast", "compact"):
            mine = own(world, rows, cut)
            leaf = x[mine].clone().requires_grad_()
            loss = rafter.linear_cross_entropy(leaf, w, target[mine], row_group=world.group, mode=mode,
                                               budget=2 * least if mode == "fast" else 0)
            loss.backward()
            close(loss, expected)


def check_a_rank_that_never_calls(world):
    """The error is the engine's, after its timeout; the process group itself says what is wrong."""
    world.skip_unless(world.size > 1 and world.device == "cpu", "needs several ranks on the CPU")
    torch.distributed.barrier()  # the timeout is also that of making the group
    group = torch.distributed.new_group(timeout=datetime.timedelta(seconds=3))
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="all_gather of group returned 1 on rank 0 of .: .*ime"):
            rafter.cross_entropy(normal(2, 3), torch.zeros(2, dtype=torch.long), group=group)


def check_dx_is_summed(world):
    """ml-cross-entropy 14: the gradient of the input was that of one rank's classes."""
    x, w, target = normal(6, 8, device=world.device), normal(20, 8, device=world.device, seed=1), \
        labels((6,), 20, world.device)
    reference = x.double().requires_grad_()
    dx, = torch.autograd.grad(loss_reference(reference @ w.double().T, target), reference)
    for cut in range(4):
        mine = own(world, 20, cut)
        groups = dict(group=world.group, first_class=mine.start, classes=20)
        for mode in ("auto", "compact"):
            leaf = x.clone().requires_grad_()
            rafter.linear_cross_entropy(leaf, w[mine], target, mode=mode, **groups).backward()
            world.same_bits(leaf.grad)
            close(leaf.grad, dx, scale=8)
        leaf = x.clone().requires_grad_()
        valid = (target != -100).sum()
        (-rafter.linear_logprobs(leaf, w[mine], target, **groups).logprob.sum() / valid).backward()
        close(leaf.grad, dx, scale=8)

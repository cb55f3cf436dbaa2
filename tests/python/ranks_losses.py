# SPDX-License-Identifier: Apache-2.0
"""group= and row_group= of the losses: every option and output over shards of any size, against one
rank and against fp64. Run by ranks.py."""
import pytest
import torch

import rafter
from support import close, labels, loss_reference, normal

ROWS, CLASSES, DEPTH = 7, 23, 16
EXTRAS = ("row_loss", "lse", "logprob", "entropy", "argmax")


def cuts(total, size):
    """Where shards begin, and the total: even, uneven, one class, none at all."""
    chunk = -(-total // size)
    even = [min(r * chunk, total) for r in range(size + 1)]
    one = [0] + [min(r + 1, total) for r in range(size - 1)] + [total]  # one each, and the rest
    last = [0] * size + [total]  # all on the last rank
    first = [0] + [total] * size
    return [even, one, last, first] if size > 1 else [even]


def options(device):
    weight, row_weight = normal(CLASSES, device=device, seed=5).abs() + 0.1, normal(ROWS, device=device, seed=6)
    most = dict(weight=weight, row_weight=row_weight, label_smoothing=0.1, z_loss=0.01, softcap=5.0, logit_scale=1.7)
    return [{}, dict(label_smoothing=0.1), dict(z_loss=0.01), dict(softcap=3.0, logit_scale=0.7),
            dict(weight=weight), dict(weight=weight, label_smoothing=0.2), dict(row_weight=row_weight),
            most]


def one_rank(logits, target, given):
    """All results of one rank that has all classes."""
    return rafter.cross_entropy(logits.detach().float(), target, extras=EXTRAS, **given)


def upstream_of(loss):
    return (torch.arange(loss.numel(), device=loss.device) % 5 - 1.5).reshape(loss.shape).to(loss.dtype)


def compare(world, out, expected_loss, expected):
    """Results against fp64 and one rank; and the same bits on every rank."""
    world.same_bits(out.loss, out.row_loss, out.lse, out.logprob, out.entropy, out.argmax)
    close(out.loss, expected_loss, scale=4)
    for name in EXTRAS[:-1]:
        close(getattr(out, name), getattr(expected, name).double(), scale=4)
    assert torch.equal(out.argmax, expected.argmax)


def check_cross_entropy(world):
    whole, target = normal(ROWS, CLASSES, device=world.device), labels((ROWS,), CLASSES, world.device)
    for given in options(world.device) + [dict(ignore_index=3)]:
        if "ignore_index" in given:
            target = target.clamp(min=0)
        for reduction in ("mean", "sum", "none"):
            z = whole.double().requires_grad_()
            arguments = dict(given, reduction=reduction)
            loss, expected = loss_reference(z, target, **arguments), one_rank(z, target, arguments)
            up = upstream_of(loss)
            dz, = torch.autograd.grad(loss, z, up)
            for cut in cuts(CLASSES, world.size):
                a, b = cut[world.rank], cut[world.rank + 1]
                own = whole[:, a:b].clone().requires_grad_()
                out = rafter.cross_entropy(own, target, group=world.group, first_class=a, classes=CLASSES,
                                           extras=EXTRAS, **arguments)
                compare(world, out, loss, expected)
                out.loss.backward(up.float())
                close(own.grad, dz[:, a:b], scale=4)


def check_cross_entropy_layouts(world):
    """Dimensions, dtypes, labels of int32, no extras, in place, no gradient."""
    whole, target = normal(3, 5, CLASSES, device=world.device), labels((3, 5), CLASSES, world.device)
    a, b = cuts(CLASSES, world.size)[0][world.rank:world.rank + 2]
    shard = dict(group=world.group, classes=CLASSES)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        z = whole.to(dtype).double().requires_grad_()
        expected = loss_reference(z, target)
        dz, = torch.autograd.grad(expected, z)
        for inplace in (False, True):
            own = whole[..., a:b].to(dtype).clone().requires_grad_()
            loss = rafter.cross_entropy(own * 1, target.int(), dim=-1, inplace_backward=inplace, **shard)
            close(loss, expected, scale=4)
            loss.backward()
            close(own.grad, dz[..., a:b], scale=4)
        close(rafter.cross_entropy(whole[..., a:b].to(dtype), target, dim=-1, **shard), expected, scale=4)
    z = whole.double().requires_grad_()
    expected = loss_reference(z, target)
    dz, = torch.autograd.grad(expected, z)
    moved = whole[..., a:b].movedim(-1, 1).contiguous().requires_grad_()  # PyTorch's layout
    loss = rafter.cross_entropy(moved, target, **shard)
    loss.backward()
    close(loss, expected, scale=4)
    close(moved.grad.movedim(1, -1), dz[..., a:b], scale=4)


def linear_problem(world, dtype=torch.float32):
    x, w = normal(ROWS, DEPTH, device=world.device), normal(CLASSES, DEPTH, device=world.device, seed=1, scale=0.5)
    return x.to(dtype), w.to(dtype), normal(CLASSES, device=world.device, seed=2).to(dtype), \
        labels((ROWS,), CLASSES, world.device)


def linear_reference(x, w, b, target, arguments):
    """fp64 loss, upstream gradient, gradients, and statistics on one rank."""
    x, w, b = (t.double().requires_grad_() for t in (x, w, b))
    logits = x @ w.T + b
    loss = loss_reference(logits, target, **arguments)
    up = upstream_of(loss)
    return loss, up, torch.autograd.grad(loss, (x, w, b), up), one_rank(logits, target, arguments)


def check_linear_cross_entropy(world):
    x, w, b, target = linear_problem(world)
    for given in options(world.device) + [dict(ignore_index=3)]:
        if "ignore_index" in given:
            target = target.clamp(min=0)
        for reduction in ("mean", "sum", "none"):
            arguments = dict(given, reduction=reduction)
            loss, up, gradients, expected = linear_reference(x, w, b, target, arguments)
            for mode in ("auto", "compact"):
                for cut in cuts(CLASSES, world.size):
                    own = slice(cut[world.rank], cut[world.rank + 1])
                    tensors = [t.clone().requires_grad_() for t in (x, w[own], b[own])]
                    out = rafter.linear_cross_entropy(
                        tensors[0], tensors[1], target, linear_bias=tensors[2], mode=mode, extras=EXTRAS,
                        group=world.group, first_class=own.start, classes=CLASSES, **arguments)
                    compare(world, out, loss, expected)
                    out.loss.backward(up.float())
                    dx, dw, db = (t.grad for t in tensors)
                    world.same_bits(dx)
                    close(dx, gradients[0], scale=8)
                    close(dw, gradients[1][own], scale=8)
                    close(db, gradients[2][own], scale=8)


def check_linear_dtypes(world):
    """16-bit inputs; a frozen weight or input; no gradient; a second backward; main_grad."""
    cut = cuts(CLASSES, world.size)[0]
    own = slice(cut[world.rank], cut[world.rank + 1])
    shard = dict(group=world.group, classes=CLASSES)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w, b, target = linear_problem(world, dtype)
        atol = 0 if dtype is torch.float32 else 2e-3  # the gradient of a logit is rounded before the products
        loss, _, gradients, _ = linear_reference(x, w, b, target, {})
        tensors = [t.clone().requires_grad_() for t in (x, w[own], b[own])]
        out = rafter.linear_cross_entropy(tensors[0], tensors[1], target, linear_bias=tensors[2], **shard)
        out.backward(torch.full_like(out, -1.5), retain_graph=True)  # upstream_of(a scalar) is -1.5
        for t, expected in zip(tensors, (gradients[0], gradients[1][own], gradients[2][own])):
            close(t.grad, expected, scale=8, atol=atol)
            t.grad = None
        out.backward(torch.full_like(out, -1.5))
        close(tensors[0].grad, gradients[0], scale=8, atol=atol)
        frozen = rafter.linear_cross_entropy(tensors[0], w[own], target, linear_bias=b[own], **shard)
        dx, = torch.autograd.grad(frozen, tensors[0], torch.full_like(frozen, -1.5))
        close(dx, gradients[0], scale=8, atol=atol)
        fixed = rafter.linear_cross_entropy(x, tensors[1], target, linear_bias=b[own], **shard)
        dw, = torch.autograd.grad(fixed, tensors[1], torch.full_like(fixed, -1.5))
        close(dw, gradients[1][own], scale=8, atol=atol)
        with torch.no_grad():
            close(rafter.linear_cross_entropy(x, w[own], target, linear_bias=b[own], **shard), loss, scale=4)
    x, w, b, target = linear_problem(world)
    loss, _, gradients, _ = linear_reference(x, w, torch.zeros_like(b), target, {})
    weight = torch.nn.Parameter(w[own].clone())
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    rafter.linear_cross_entropy(x, weight, target, main_grad=True, **shard).backward()
    assert weight.grad is None
    close(weight.main_grad, 1 + gradients[1][own] / -1.5, scale=8)


def check_linear_logprobs(world):
    x, w, b, target = linear_problem(world)
    for softcap, temperature in ((None, 1.0), (4.0, 0.7)):
        arguments = dict(softcap=softcap, temperature=temperature, entropy=True, is_top=True)
        whole = [t.clone().requires_grad_() for t in (x, w, b)]
        expected = rafter.linear_logprobs(whole[0], whole[1], target, linear_bias=whole[2], **arguments)
        up = normal(ROWS, device=world.device, seed=8), normal(ROWS, device=world.device, seed=9)
        wanted = torch.autograd.grad(expected[:2], whole, up)
        for cut in cuts(CLASSES, world.size):
            own = slice(cut[world.rank], cut[world.rank + 1])
            tensors = [t.clone().requires_grad_() for t in (x, w[own], b[own])]
            out = rafter.linear_logprobs(tensors[0], tensors[1], target, linear_bias=tensors[2], group=world.group,
                                         first_class=own.start, classes=CLASSES, **arguments)
            world.same_bits(out.logprob, out.entropy, out.is_top)
            close(out.logprob, expected.logprob.double(), scale=4)
            close(out.entropy, expected.entropy.double(), scale=4)
            assert torch.equal(out.is_top, expected.is_top)
            dx, dw, db = torch.autograd.grad(out[:2], tensors, up)
            close(dx, wanted[0].double(), scale=8, atol=1e-5)
            close(dw, wanted[1][own].double(), scale=8, atol=1e-5)
            close(db, wanted[2][own].double(), scale=8, atol=1e-5)


def check_larger_bf16(world):
    """What Hopper's own kernels serve, with the sum of dx on a second stream."""
    world.skip_unless(world.device == "cuda", "for CUDA")
    rows, classes, depth = 512, 4096, 256
    x, w = normal(rows, depth, device="cuda", dtype=torch.bfloat16), normal(classes, depth, device="cuda", seed=1,
                                                                           dtype=torch.bfloat16, scale=0.1)
    target = labels((rows,), classes, "cuda")
    xd, wd = x.double().requires_grad_(), w.double().requires_grad_()
    expected = loss_reference(xd @ wd.T, target)
    dx, dw = torch.autograd.grad(expected, (xd, wd))
    for cut in cuts(classes, world.size):
        own = slice(cut[world.rank], cut[world.rank + 1])
        for _ in range(3):  # again with the memory of the step before
            tensors = [x.clone().requires_grad_(), w[own].clone().requires_grad_()]
            loss = rafter.linear_cross_entropy(*tensors, target, group=world.group, first_class=own.start,
                                               classes=classes)
            loss.backward()
            close(loss, expected, scale=8)
            world.same_bits(loss, tensors[0].grad)
            for found, wanted in ((tensors[0].grad, dx), (tensors[1].grad, dw[own])):
                if found.numel():
                    error = (found.double() - wanted).norm() / wanted.norm()
                    assert error < 1e-2, error


def check_rows(world):
    """row_group: rows of any number on each rank; the loss is that of all rows, and gradients add up."""
    rows = 13
    x, w, target = normal(rows, DEPTH, device=world.device), normal(CLASSES, DEPTH, device=world.device, seed=1), \
        labels((rows,), CLASSES, world.device)
    weight = normal(CLASSES, device=world.device, seed=5).abs() + 0.1
    row_weight = normal(rows, device=world.device, seed=6)
    for given in ({}, dict(weight=weight), dict(row_weight=row_weight, label_smoothing=0.1), dict(denominator=4.0)):
        for reduction in ("mean", "sum", "none"):
            if "denominator" in given and reduction != "mean":
                continue
            arguments = dict(given, reduction=reduction)
            xd, wd = x.double().requires_grad_(), w.double().requires_grad_()
            loss = loss_reference(xd @ wd.T, target, **arguments)
            up = upstream_of(loss)
            dx, dw = torch.autograd.grad(loss, (xd, wd), up)
            for cut in cuts(rows, world.size):
                own = slice(cut[world.rank], cut[world.rank + 1])
                mine = dict(arguments)
                if "row_weight" in mine:
                    mine["row_weight"] = row_weight[own]
                per_row = reduction == "none"
                for linear in (True, False):
                    tensors = [x[own].clone().requires_grad_(), w.clone().requires_grad_()]
                    if linear:
                        out = rafter.linear_cross_entropy(*tensors, target[own], row_group=world.group, **mine)
                    else:
                        out = rafter.cross_entropy(tensors[0] @ tensors[1].T, target[own], row_group=world.group,
                                                   **mine)
                    close(out, loss[own] if per_row else loss, scale=4)
                    if not per_row:
                        world.same_bits(out)
                    out.backward(up[own].float() if per_row else up.float())
                    close(tensors[0].grad, dx[own], scale=8)
                    total = tensors[1].grad
                    torch.distributed.all_reduce(total, group=world.group)
                    close(total, dw, scale=8)


def check_all_ignored(world):
    """A mean over no rows on any rank: NaN, or 0 if that is asked for."""
    x, w = normal(4, DEPTH, device=world.device), normal(CLASSES, DEPTH, device=world.device)
    target = torch.full((4,), -100, device=world.device)
    own = slice(*cuts(CLASSES, world.size)[0][world.rank:world.rank + 2])
    for groups, weight in ((dict(group=world.group, classes=CLASSES), w[own]), (dict(row_group=world.group), w)):
        assert torch.isnan(rafter.linear_cross_entropy(x, weight, target, **groups))
        leaf = x.clone().requires_grad_()
        loss = rafter.linear_cross_entropy(leaf, weight, target, zero_if_all_ignored=True, **groups)
        assert loss == 0
        loss.backward()
        assert not leaf.grad.any()


def check_grid(world):
    """Both groups: classes over the rows of a grid of ranks, rows over its columns."""
    world.skip_unless(world.size % 2 == 0, "needs an even number of ranks")
    from torch.distributed.device_mesh import init_device_mesh
    columns = world.size // 2
    mesh = init_device_mesh(world.device, (2, columns), mesh_dim_names=("rows", "classes"))
    i, j = divmod(world.rank, columns)
    x, w, b, target = linear_problem(world)
    loss, _, gradients, _ = linear_reference(x, w, b, target, {})
    rows = slice(*cuts(ROWS, 2)[0][i:i + 2])
    own = slice(*cuts(CLASSES, columns)[0][j:j + 2])
    tensors = [t.clone().requires_grad_() for t in (x[rows], w[own], b[own])]
    out = rafter.linear_cross_entropy(tensors[0], tensors[1], target[rows], linear_bias=tensors[2],
                                      group=mesh["classes"], classes=CLASSES, row_group=mesh.get_group("rows"))
    world.same_bits(out)
    close(out, loss, scale=4)
    out.backward()
    close(tensors[0].grad, gradients[0][rows] / -1.5, scale=8)
    torch.distributed.all_reduce(tensors[1].grad, group=mesh.get_group("rows"))
    close(tensors[1].grad, gradients[1][own] / -1.5, scale=8)


def check_modules(world):
    x, w, b, target = linear_problem(world)
    loss, _, gradients, _ = linear_reference(x, w, b, target, {})
    own = slice(*cuts(CLASSES, world.size)[0][world.rank:world.rank + 2])
    shard = dict(group=world.group, classes=CLASSES)
    module = rafter.nn.LinearCrossEntropyLoss(DEPTH, own.stop - own.start, bias=True, device=world.device, **shard)
    with torch.no_grad():
        module.linear.weight.copy_(w[own])
        module.linear.bias.copy_(b[own])
    out = module(x, target)
    out.backward()
    close(out, loss, scale=4)
    close(module.linear.weight.grad, gradients[1][own] / -1.5, scale=8)
    logits = (x @ w.T + b)[:, own]
    close(rafter.nn.CrossEntropyLoss(**shard)(logits, target), loss, scale=4)


def check_arguments(world):
    z, target = normal(ROWS, 4, device=world.device), labels((ROWS,), 4, world.device)
    with pytest.raises(ValueError, match="without a group"):
        rafter.cross_entropy(z, target, classes=4)
    with pytest.raises(ValueError, match="without classes"):
        rafter.cross_entropy(z, target, group=world.group, first_class=0)
    with pytest.raises(ValueError, match="wanted a ProcessGroup"):
        rafter.cross_entropy(z, target, group="world")
    with pytest.raises(ValueError, match="wanted a ProcessGroup"):
        rafter.cross_entropy(z, target, row_group=torch.distributed.GroupMember.NON_GROUP_MEMBER)
    scale = torch.ones((), requires_grad=True, device=world.device)
    with pytest.raises(ValueError, match="logit_scale requires a gradient"):
        rafter.cross_entropy(z, target, group=world.group, logit_scale=scale)
    if world.size > 1:  # every rank has 4 classes; torch.chunk would give 5 to the first
        kind = RuntimeError if world.device == "cpu" else ValueError
        with pytest.raises(kind, match="group|pass first_class"):
            rafter.cross_entropy(z, target, group=world.group, classes=world.size * 5)


def check_learned_scale(world):
    """A logit_scale with a gradient is exact for linear losses: dx is summed over the ranks."""
    x, w, _, target = linear_problem(world)
    own = slice(*cuts(CLASSES, world.size)[0][world.rank:world.rank + 2])
    found = []
    for weight, groups in ((w, {}), (w[own], dict(group=world.group, classes=CLASSES))):
        scale = torch.tensor(1.3, device=world.device, requires_grad=True)
        rafter.linear_cross_entropy(x, weight, target, logit_scale=scale, **groups).backward()
        found.append(scale.grad)
    close(found[1], found[0].double(), scale=8)


def check_disagreement_on_cuda(world):
    """Results are NaN on every rank: the host does not wait for what the others sent."""
    world.skip_unless(world.device == "cuda", "for CUDA")
    x, w, _, target = linear_problem(world)
    last = world.rank == world.size - 1
    own = slice(*cuts(CLASSES, world.size)[0][world.rank:world.rank + 2])
    right = dict(group=world.group, first_class=own.start, classes=CLASSES)
    wrong = [dict(right, classes=CLASSES + 1)]
    if world.size > 1:
        wrong += [dict(right, first_class=own.start - 1) if last else right, dict(right, z_loss=0.5) if last else right]
    for given in wrong:
        assert torch.isnan(rafter.linear_cross_entropy(x, w[own], target, **given)), given
        assert torch.isnan(rafter.cross_entropy((x @ w.T)[:, own].contiguous(), target, **given)), given
    assert torch.isfinite(rafter.linear_cross_entropy(x, w[own], target, **right))


def check_ranks_that_disagree(world):
    """Every rank raises, and can go on."""
    world.skip_unless(world.size > 1 and world.device == "cpu", "needs several ranks on the CPU")
    x, w, _, target = linear_problem(world)
    last = world.rank == world.size - 1
    own = slice(*cuts(CLASSES, world.size)[0][world.rank:world.rank + 2])

    def call(input=x, weight=None, target=target, **given):
        arguments = dict(group=world.group, classes=CLASSES, first_class=own.start)
        arguments.update(given)
        return rafter.linear_cross_entropy(input, w[own] if weight is None else weight, target, **arguments)

    other = target.clone()
    other[1] = 0 if target[1] else 1
    bad = target.clone()
    bad[1] = CLASSES
    for given in (dict(label_smoothing=0.1), dict(reduction="sum"), dict(target=other), dict(target=bad),
                  dict(input=x[:-1], target=target[:-1]), dict(input=x.double()), dict(weight=w[own][:-1]),
                  dict(classes=CLASSES + 1), dict(weight=torch.ones(CLASSES)[:, None] * w[0])):
        with pytest.raises((RuntimeError, IndexError), match="rafter.linear_cross_entropy: "):
            call(**(given if last else {}))
        call()  # the ranks are still in step
    with pytest.raises(RuntimeError, match="row_group"):
        rafter.cross_entropy(x, target % DEPTH, row_group=world.group, z_loss=0.1 if last else 0.0)

# SPDX-License-Identifier: Apache-2.0
"""The losses on DTensors. Every rank computes on its local tensors, in a group with the ranks that have
the other classes or rows. No data of the size of the vocabulary is moved."""
import torch
from torch import Tensor

from . import _groups
from ._options import NONE


class _Layout:
    """How the tensors of a call are distributed over a mesh: which dimension of the mesh cuts the
    classes, and which one cuts the rows (and along which dimension of the input). Along the others,
    ranks hold copies."""

    def __init__(self, op, mesh):
        self.op, self.mesh = op, mesh
        self.classes = self.rows = None  # dimensions of the mesh
        self.row_dim = None  # of the input

    def refuse(self, what):
        raise NotImplementedError(
            f"rafter.{self.op}: {what}. Wanted classes in Shard (dimension 0 of the weight, the class dimension of "
            "logits) or rows of the input in Shard, each over one dimension of the mesh, and the rest in Replicate; "
            "use tensor.redistribute(...), or tensor.full_tensor()")

    def shard_of(self, tensor, name, placement):
        """The dimension of the tensor that the placement cuts. Refuses any placement but a plain Shard."""
        from torch.distributed.tensor import Shard
        if type(placement) is not Shard:  # FSDP has shards in another order, which are a subclass
            self.refuse(f"{name} has placements {tuple(tensor.placements)}")
        return placement.dim % tensor.dim()

    def cut_classes(self, name, at):
        if self.classes is not None:
            self.refuse(f"{name} is sharded over two dimensions of the mesh")
        self.classes = at

    def cut_rows(self, name, at, dim):
        if self.rows is not None:
            self.refuse(f"the rows of {name} are sharded over two dimensions of the mesh")
        self.rows, self.row_dim = at, dim

    def placements(self, classes=None, rows=None):
        """Replicate, except for the mesh dimensions that cut classes and rows: these get `classes` and
        `rows`, if given."""
        from torch.distributed.tensor import Replicate
        placements = [Replicate()] * self.mesh.ndim
        if self.classes is not None and classes is not None:
            placements[self.classes] = classes
        if self.rows is not None and rows is not None:
            placements[self.rows] = rows
        return placements

    def local(self, tensor, placements, gradient=None):
        """The local tensor, in these placements, of a DTensor or of a plain tensor that is the same on
        every rank. gradient: the placements of its gradient, if they are not those of the tensor."""
        from torch.distributed.tensor import DTensor
        if tensor is None:
            return None
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self.mesh, self.placements(), run_check=False)
        if tuple(tensor.placements) != tuple(placements):
            tensor = tensor.redistribute(placements=placements)
        return tensor.to_local(grad_placements=gradient)

    def row_shard(self):
        from torch.distributed.tensor import Shard
        return None if self.row_dim is None else Shard(self.row_dim)

    def finish(self, classes, shard, target, options, share=None):
        """Returns the local target, the options with the groups, and a function that makes DTensors of the
        results. share: the dimension along which the input has only this rank's rows; None: it has all."""
        group = None if self.classes is None else self.mesh.get_group(self.classes)
        # With reduction "none" a row's loss needs nothing of other rows.
        row_group = None if self.rows is None or options.reduction == NONE else self.mesh.get_group(self.rows)
        text = None
        if group is not None or row_group is not None:
            text = _groups.text(shard, self.mesh.device_type == "cpu", group, None, None if group is None else classes,
                                row_group, share is not None)
        shape = target.shape
        rows, everywhere = self.placements(rows=self.row_shard()), self.placements()
        weight, row_weight, denominator = options[:3]
        options = options._replace(weight=self.local(weight, everywhere),
                                   row_weight=_first(self.local(row_weight, rows), share),
                                   denominator=self.local(denominator, everywhere), groups=text)
        own = self.local(target, rows)
        target = _first(own, share)

        def wrap(results):
            if share is not None:  # rows back in their own order
                moved = own.movedim(share, 0).shape
                results = [r.reshape(moved).movedim(0, share) if r.shape == target.shape else r for r in results]
            return tuple(self.wrap(r, own, shape, rows) for r in results)

        return target, options, wrap

    def wrap(self, result, target, shape, rows):
        from torch.distributed.tensor import DTensor
        if result.shape != target.shape or self.rows is None:  # a scalar, an absent result, or all rows
            return DTensor.from_local(result, self.mesh, self.placements(), run_check=False)
        stride = torch.empty(shape, device="meta").stride()  # uneven shards do not tell the global shape
        return DTensor.from_local(result, self.mesh, rows, run_check=False, shape=shape, stride=stride)


def _first(tensor, dim):
    """The tensor's rows as one dimension, with `dim` outermost: the order that results from gathering ranks
    that each have a part of `dim`. With dim None the tensor stays as it is."""
    return tensor if tensor is None or dim is None else tensor.movedim(dim, 0).reshape(-1)


def _layout(op, input, tensors):
    """Returns a layout that cuts nothing yet; the input as a DTensor without Partial; and its placements,
    which are made before the redistribution because Dynamo of PyTorch 2.11 loses a Shard's type there."""
    from torch.distributed.tensor import DTensor, Replicate
    given = [t for t in (input, *tensors) if isinstance(t, DTensor)]
    layout = _Layout(op, given[0].device_mesh)
    if any(t.device_mesh != layout.mesh for t in given):
        layout.refuse("the DTensors are on different meshes")
    if not isinstance(input, DTensor):
        for t in given:
            if not all(p.is_replicate() for p in t.placements):
                layout.refuse(f"a DTensor has placements {tuple(t.placements)}, but input is a plain tensor; make it a "
                              "DTensor too (DTensor.from_local)")
        input = DTensor.from_local(input, layout.mesh, layout.placements(), run_check=False)
    placements = [Replicate() if p.is_partial() else p for p in input.placements]
    return layout, input.redistribute(placements=placements), placements


def cross_entropy(input: Tensor, target, options):
    """Local logits [..., V], target and options, and a function that makes DTensors of the results."""
    layout, input, placements = _layout("cross_entropy", input, (target, *options[:3]))
    last = input.dim() - 1
    for at, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = layout.shard_of(input, "input", placement)
        if dim == last:
            layout.cut_classes("input", at)
        else:
            layout.cut_rows("input", at, dim)
    local = input.to_local()
    if layout.classes is not None:
        local = _groups.rows_of_classes(local)
    return local, *layout.finish(input.shape[-1], local.shape[-1], target, options)


def linear(op, input: Tensor, linear_weight, linear_bias, target, options):
    """Local input, weight, bias, target and options, and a function that makes DTensors of the results.

    If the classes are cut, the library sums dx over the ranks, so that dx is replicated, as the input is.
    If the rows of the input are cut evenly over the same dimension of the mesh, the op gathers the input
    and scatters the sums of dx; if unevenly, the input is gathered here. If only the rows are cut, each
    rank has a part of the sum for dW: Partial, as for torch.nn.functional.linear."""
    from torch.distributed.tensor import DTensor, Partial, Shard
    layout, input, placements = _layout(op, input, (linear_weight, linear_bias, target, *options[:3]))
    if not isinstance(linear_weight, DTensor):
        linear_weight = DTensor.from_local(linear_weight, layout.mesh, layout.placements(), run_check=False)
    last, share = input.dim() - 1, None
    for at, (of_input, of_weight) in enumerate(zip(placements, linear_weight.placements)):
        if not of_weight.is_replicate():
            if layout.shard_of(linear_weight, "linear_weight", of_weight) != 0:
                layout.refuse(f"linear_weight has placements {tuple(linear_weight.placements)}")
            layout.cut_classes("linear_weight", at)
        if of_input.is_replicate():
            continue
        dim = layout.shard_of(input, "input", of_input)
        if dim == last:
            layout.refuse(f"input has placements {tuple(input.placements)}")
        if of_weight.is_replicate():
            layout.cut_rows("input", at, dim)
        elif input.shape[dim] % layout.mesh.size(at) == 0:
            share = dim
    classes = layout.placements(classes=Shard(0))
    gradient = layout.placements(classes=Shard(0), rows=Partial())
    local = layout.local(linear_weight, classes, gradient)
    count, shard = linear_weight.shape[0], local.shape[0]
    if layout.rows is not None:
        share = None
    if share is None:
        rows = layout.local(input, layout.placements(rows=layout.row_shard()))
    else:
        rows = layout.local(input, layout.placements(classes=Shard(share)))
        rows = rows.movedim(share, 0).reshape(-1, input.shape[-1])
    return (rows, local, layout.local(linear_bias, classes, gradient),
            *layout.finish(count, shard, target, options, share))

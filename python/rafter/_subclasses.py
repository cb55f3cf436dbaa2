# SPDX-License-Identifier: Apache-2.0
"""Calls through the dispatcher, for torch.compile, function transforms and tensor subclasses,
including DTensor."""
import sys

from torch import Tensor

from . import _compat


def _dtensors(args):
    """The DTensors among args. Looks the module up instead of importing it: the import is slow, and
    without it there are no DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return [a for a in args if isinstance(a, module.DTensor)] if module else []


def has_dtensors(*args):
    return len(_dtensors(args)) > 0  # torch.compile of PyTorch 2.11 knows no bool() of a list


def replicated(tensor, like):
    """A plain tensor that is the same on every rank, as a DTensor if `like` is one."""
    if not has_dtensors(like) or has_dtensors(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate
    return DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def local(tensor):
    """The tensor, or the local tensor of a DTensor."""
    return tensor.to_local() if has_dtensors(tensor) else tensor


def call(op, *args):
    """Calls an Op of _ops.py. Replicated DTensors are computed locally on every rank; sharded ones are
    refused."""
    dtensors = _dtensors(args)
    if not dtensors:
        return op.dispatched(*args)
    for tensor in dtensors:
        if not all(p.is_replicate() for p in tensor.placements):
            raise NotImplementedError(
                f"{_compat.op_name(op.op)} got a DTensor with placements {tuple(tensor.placements)}, but supports only "
                "replicated ones. Use tensor.redistribute(placements=[Replicate()]) or tensor.full_tensor(); for "
                "data-parallel rows, call it on tensor.to_local() and reduce the loss yourself")
    first = dtensors[0]
    results = op.dispatched(*(a.to_local() if any(a is d for d in dtensors) else a for a in args))

    def to_dtensor(result):
        return type(first).from_local(result, first.device_mesh, first.placements, run_check=False)

    return to_dtensor(results) if isinstance(results, Tensor) else tuple(map(to_dtensor, results))

# SPDX-License-Identifier: Apache-2.0
"""Calls by way of the dispatcher, which torch.compile, function transforms and tensor subclasses understand; and DTensor."""
import sys

from torch import Tensor


def _placed(args):
    """The DTensors among args. Their module is looked up, not imported: it is slow to load, and without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return [a for a in args if isinstance(a, module.DTensor)] if module else []


def call(op, *args):
    """op(*args). Replicated DTensors are computed with as the tensors they are, on every rank; sharded ones are refused."""
    placed = _placed(args)
    if not placed:
        return op(*args)
    name = op._schema.name.replace("::", ".")
    for tensor in placed:
        if not all(p.is_replicate() for p in tensor.placements):
            raise NotImplementedError(
                f"{name} got a DTensor with placements {tuple(tensor.placements)}, and works on replicated ones only. Use "
                "tensor.redistribute(placements=[Replicate()]) or tensor.full_tensor(); for data-parallel rows, call it on "
                "tensor.to_local() and reduce the loss yourself")
    first = placed[0]
    results = op(*(a.to_local() if any(a is p for p in placed) else a for a in args))

    def lift(result):
        return type(first).from_local(result, first.device_mesh, first.placements, run_check=False)

    return lift(results) if isinstance(results, Tensor) else tuple(map(lift, results))

# SPDX-License-Identifier: Apache-2.0
"""Process groups of torch.distributed for the losses: the arguments group and row_group as the text
that the ops take, and the collectives that the library calls."""
import contextlib

import torch

from . import _compat, _ops


def text(shard, cpu, group, first_class, classes, row_group, share=False):
    """The argument `groups` of the ops (python/src/groups.h). shard: how many classes this rank has. cpu:
    whether the tensors are on the CPU; there the library itself compares the ranks' shards, and fails
    on all ranks. share: the input has only this rank's rows, and all ranks have equally many."""
    if group is None:
        if first_class is not None or classes is not None:
            raise ValueError(f"first_class is {first_class} and classes is {classes} without a group, wanted a group")
        return None if row_group is None else ";" + _part(0, 0, *_ranks("row_group", row_group))
    rank, ranks, name = _ranks("group", group)
    if classes is None:
        if first_class is not None:
            raise ValueError(f"first_class is {first_class} without classes, wanted both or only classes")
        first_class, classes = rank * shard, ranks * shard  # assumes equal shards; the library compares the ranks
    elif first_class is None:
        first_class = first_of_chunk(classes, rank, ranks)
        if not cpu and first_of_chunk(classes, rank + 1, ranks) - first_class != shard:
            raise ValueError(f"rank {rank} of {ranks} has {shard} of {classes} classes, which are not the shards of "
                             "torch.chunk; pass first_class")
    rows = "" if row_group is None else _part(0, 0, *_ranks("row_group", row_group))
    return f"{_part(first_class, classes, rank, ranks, name, share)};{rows}"


def rows_of_classes(input):
    """The logits with the classes of a row adjacent in memory, as class groups on CUDA need them: a copy
    if they are not."""
    return input.contiguous() if input.is_cuda and input.shape[-1] > 1 and input.stride(-1) != 1 else input


def check_scale(logit_scale, group, of):
    """Refuses a logit_scale that requires a gradient. It multiplies `of`, of which a rank has only a part
    (that of its classes), so a rank would compute only a part of the gradient."""
    if group is not None and isinstance(logit_scale, torch.Tensor) and logit_scale.requires_grad:
        raise ValueError(f"logit_scale requires a gradient, but with group a rank has only its part of {of}; pass "
                         "logit_scale.detach()")


def first_of_chunk(count, rank, ranks):
    """Where a rank's shard begins if `count` classes are cut as torch.chunk and DTensor cut them."""
    return min(rank * -(-count // ranks), count)


def _part(first_class, classes, rank, ranks, name, share=False):
    if ";" in name:
        raise ValueError(f"the name of a process group is {name!r}, wanted one without a semicolon")
    return f"{rank} {ranks} {first_class} {classes} {int(share)} {name}"


def _ranks(argument, group):
    """This process's rank in the group, the number of its ranks and its name."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(f"{argument} is given, but torch.distributed.init_process_group has not been called")
    if isinstance(group, distributed.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{argument} is a DeviceMesh of {group.ndim} dimensions, wanted one: mesh[\"name\"]")
        group = group.get_group()
    if not isinstance(group, distributed.ProcessGroup):
        raise ValueError(f"{argument} is {group!r}, wanted a ProcessGroup that this process belongs to, or a "
                         "DeviceMesh of one dimension")
    return distributed.get_rank(group), distributed.get_world_size(group), group.group_name


# ---- the collectives that the library calls, through groups.cpp
#
# They are in Python because PyTorch's stable ABI has no process groups, and so that any backend works.
# They return "", or why they failed.


def _on(stream, device):
    """A context in which PyTorch's current stream is `stream`: a cudaStream_t as a number, 0 on the CPU;
    -1 leaves the stream as it is."""
    if device.type != "cuda" or stream == -1 or torch.cuda.current_stream(device).cuda_stream == stream:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))


def _collective(run, tensor, name, stream):
    try:
        if tensor.numel():
            with torch.no_grad(), _on(stream, tensor.device):
                run(_compat.process_group(name))
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def _renamed(new, old):
    """A function of torch.distributed that PyTorch 2.13 has renamed."""
    return getattr(torch.distributed, new, None) or getattr(torch.distributed, old)


def _all_gather(send, receive, name, stream):
    gather = _renamed("all_gather_single", "all_gather_into_tensor")
    return _collective(lambda group: gather(receive, send, group=group), send, name, stream)


def _reduce_scatter(send, receive, name, stream):
    scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
    return _collective(lambda group: scatter(receive, send, group=group), send, name, stream)


def _all_reduce(data, name, stream):
    return _collective(lambda group: torch.distributed.all_reduce(data, group=group), data, name, stream)


_ops.implement("_group_all_gather", _all_gather)
_ops.implement("_group_all_reduce", _all_reduce)
_ops.implement("_group_reduce_scatter", _reduce_scatter)

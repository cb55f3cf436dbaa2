# SPDX-License-Identifier: Apache-2.0
"""The bench's worker with two cross_entropy columns whose backward overwrites the logits with their
gradient, as some kernels do: `pt` is marked as overwriting, `fla` is not."""
import os
import runpy
import sys

import torch

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench", "worker")
sys.path.insert(0, FOLDER)
import peers  # noqa: E402: from FOLDER


class Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        ctx.save_for_backward(logits, target)
        return torch.nn.functional.cross_entropy(logits.float(), target)

    @staticmethod
    def backward(ctx, upstream):
        logits, target = ctx.saved_tensors
        p = torch.softmax(logits.float(), -1)
        p[torch.arange(len(target)), target] -= 1
        return logits.data.copy_(upstream * p / len(target)), None


@peers.overwrites("backward")
def pt(row):
    target = row["target"]
    return lambda logits: Overwriting.apply(logits, target)


peers.cross_entropy_pt = pt
peers.cross_entropy_fla = lambda row: pt(row)
runpy.run_path(os.path.join(FOLDER, "worker.py"), run_name="__main__")

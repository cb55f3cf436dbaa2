# SPDX-License-Identifier: Apache-2.0
"""python -m rafter info: prints which kernels run on this machine."""
import glob
import os
import sys

import rafter
from . import _calls


def info():
    if not rafter.__all__:
        print(f"rafter {_calls.library().rafter_version().decode()} in {os.path.dirname(os.path.abspath(__file__))}")
        print("Without PyTorch: rafter.array, and rafter.jax where it was built")
        return
    info_with_torch()


def info_with_torch():
    import torch
    from . import _ops
    facts = dict(line.split(" ", 1) for line in _ops.OPS._info().splitlines())
    folder = os.path.dirname(os.path.abspath(_ops.__file__))
    kernels = {name.split(":")[1]: value for name, value in facts.items() if name.startswith("kernels:")}
    print(f"rafter {facts['version']} in {folder}")
    print(f"PyTorch {torch.__version__}, {facts['threads']} CPU threads, "
          f"autograd nodes in {'Python' if _ops.NODES is None else 'C++'}")
    print(f"CPU features: {facts['cpu']}")
    for op, variant in kernels.items():
        print(f"  {op:<24}{variant}")
    print(f"CUDA: {cuda(torch, _ops.OPS, folder)}")


def cuda(torch, ops, folder):
    if not torch.cuda.is_available():
        included = glob.glob(os.path.join(folder, "librafter_cuda.so*"))
        return "PyTorch sees no GPU; " + ("librafter_cuda is in the package" if included else
                                          "the package has no librafter_cuda")
    try:
        ops._act(torch.zeros(1, device="cuda"), 1)
    except RuntimeError as error:
        return f"not usable: {str(error).splitlines()[0]}"
    return f"{torch.cuda.get_device_name()}, with librafter_cuda"


def main():
    if sys.argv[1:] not in ([], ["info"]):
        sys.exit("usage: python -m rafter info")
    info()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Calls on the CPU run on PyTorch's threads, and in the child of a fork on Rafter's own."""

import subprocess
import sys

SCRIPT = """
import os, sys
import numpy
import torch
import rafter

def own_threads():
    tasks = (f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task"))
    return sum(open(name).read().strip() == "rafter" for name in tasks)

torch.set_num_threads(2)
x = torch.randn(512, 4096)
wanted = torch.softmax(x.double(), -1).float().numpy()   # PyTorch's threads exist from here on

def check(where): # without ops of PyTorch, which wait for its threads for ever in the child
    for threads in (2, 1, 3):
        torch.set_num_threads(threads)
        assert numpy.allclose(rafter.softmax(x, -1).numpy(), wanted, atol=1e-6), where

check("in the parent")
assert own_threads() == 0, "the library has threads of its own"
child = os.fork()
if child == 0:
    try:
        check("in the child")
        assert own_threads() > 0, "the child has no threads"
        os._exit(0)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(1)
status = os.waitpid(child, 0)[1]
assert status == 0, f"the child ended with {status}"
check("in the parent, after the fork")
assert own_threads() == 0
"""


def test_threads_of_pytorch_and_of_a_forked_child():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

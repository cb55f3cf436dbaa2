# SPDX-License-Identifier: Apache-2.0
"""The losses over several ranks: processes with gloo on this machine. The checks themselves are in
ranks_*.py; they run in one set of processes per number of ranks."""
import functools
import os
import re
import subprocess
import sys

import pytest
import torch

import ranks
from support import parametrize

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

SIZES = [int(n) for n in os.environ.get("RAFTER_TEST_RANKS", "2 3").split()]
# One number of ranks is enough where the time goes into torch.compile and transformers.
ONCE = ("ranks_compile", "ranks_models")


def modules(size):
    return [m for m in ranks.MODULES if m not in ONCE or size == SIZES[0]]


def checks(module):
    with open(os.path.join(ranks.FOLDER, module + ".py"), encoding="utf-8") as file:
        return re.findall(r"^def (check_\w+)", file.read(), re.MULTILINE)


@functools.cache
def outcomes(size):
    return ranks.launch(size, modules(size))


CASES = [(size, check) for size in SIZES for module in modules(size) for check in checks(module)]


@parametrize("size, check", CASES)
def test_ranks(size, check):
    found = outcomes(size)
    outcome = found.get(check, f"not run: {found}")
    if outcome.startswith("skipped"):
        pytest.skip(outcome)
    assert outcome == "ok", outcome


def test_the_example_trains():
    script = os.path.join(ranks.FOLDER, "..", "..", "examples", "vocabulary_parallel.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script,
               "--steps", "5"]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 has classes 502 to 1002" in done.stdout and "relative difference" in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""bench/train_step.py: its search, and one step of tiny models."""
import importlib.util
import os
import re
import subprocess
import sys
import types

import pytest

pytest.importorskip("transformers")
SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench", "train_step.py")


def script():
    spec = importlib.util.spec_from_file_location("train_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("limit", [100, 1024, 8192, 9000, 16384, 70000, 71679])
def test_the_longest_sequence(limit):
    tried = []

    def fits(n):
        tried.append(n)
        return 0.0 if n <= limit else None

    found, exact = script().longest(fits, start=8192, step=1024, seconds=60)
    assert exact and found <= limit < found + 1024
    assert len(tried) == len(set(tried)) and min(tried) > 0


def test_the_search_ends_before_a_step_that_takes_too_long():
    now = [0.0]

    def fits(n):
        now[0] += (n / 8192) ** 2
        return (n / 8192) ** 2

    assert script().longest(fits, 8192, 1024, seconds=30, clock=lambda: now[0]) == (32768, False)


@pytest.mark.parametrize("message", [
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "rafter.linear_cross_entropy: the allocator returned NULL for 4096 bytes of workspace",
    "rafter: PyTorch failed in empty_like",
    "device-side assert triggered",
])
def test_only_running_out_of_memory_ends_the_doubling(message):
    def step(tokens):
        raise RuntimeError(message)

    cell = object.__new__(script().Cell)
    cell.way, cell.cuda, cell.step, cell.tokens = "as-is", False, step, lambda batch, sequence: None
    cell.optimizer = types.SimpleNamespace(zero_grad=lambda set_to_none: None)
    if "assert" in message:
        with pytest.raises(RuntimeError, match=message):
            cell.fits(8)
    else:
        assert cell.fits(8) is None


def test_a_quick_run():
    words = [sys.executable, SCRIPT, "--quick", "--ways", "as-is,liger,rafter", "--models", "llama-3.2-1b"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    figures = r" \| [0-9]+ \| [0-9.]+ \| - \| - \| ([0-9.]+) \|$"
    plain = re.search(r"^\| llama-3.2-1b \| as is" + figures, said.stdout, re.MULTILINE)
    ours = re.search(r"^\| llama-3.2-1b \| `rafter.patch`" + figures, said.stdout, re.MULTILINE)
    assert plain and ours, said.stdout + said.stderr
    assert abs(float(plain[1]) - float(ours[1])) < 2e-2  # the model's own loss is of bf16 logits


def test_a_way_that_is_not_there_says_so():
    said = subprocess.run([sys.executable, SCRIPT, "--quick", "--ways", "wings"], capture_output=True, text=True, timeout=60)
    assert said.returncode != 0 and "--ways names 'wings', wanted some of as-is" in said.stderr

# SPDX-License-Identifier: Apache-2.0
"""bench/autograd_map.py: every case runs, and Rafter's results and gradients are torch's."""
import os
import subprocess
import sys

import pytest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench", "autograd_map.py")


@pytest.mark.parametrize("which", [[], ["--linear", "--most-rows", "64"], ["--random", "100"]])
def test_results_of_all_cases(which):
    words = [sys.executable, SCRIPT, "--quick", *which]
    lines = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    assert len(lines) > 10
    for line in lines:
        error, _, name = line.partition(" ")
        assert float(error) < (1e-5 if "float32" in name else 0.03), line

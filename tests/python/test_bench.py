# SPDX-License-Identifier: Apache-2.0
"""The bench's Python columns: a column that overwrites its inputs must not affect the others."""
import os
import re
import subprocess
import sys

import pytest

import rafter


def bench(mode, columns):
    """The output of the rafter command for these columns of cross_entropy."""
    command = os.path.join(os.path.dirname(os.path.abspath(rafter.__file__)), "..", "..", "bench", "rafter")
    if not os.path.exists(command):
        pytest.skip("not run from a build tree")
    worker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "overwriting_worker.py")
    environment = {**os.environ, "RAFTER_PYTHON": sys.executable, "RAFTER_WORKER": worker}
    words = ["bench", "cross_entropy", "--x", "2048", "--mode", mode, "--seconds", "0.001", "--providers", columns]
    said = subprocess.run([command, *words], env=environment, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    return said.stdout


@pytest.mark.parametrize("mode, columns", [("bwd", "pt,to,toc"), ("fwd+bwd", "pt,to")])
def test_a_column_that_overwrites_its_inputs(mode, columns):
    said = bench(mode, columns)
    assert re.search(r"^0 +2048\.0" + r" +[0-9.]+" * len(columns.split(",")) + "$", said, re.MULTILINE), said
    assert re.search(r"^ +pt: its gradient overwrites its input$", said, re.MULTILINE), said


def test_a_column_that_overwrites_its_inputs_unannounced():
    said = bench("bwd", "fla,to")
    assert re.search(r"^0 +2048\.0 +- +[0-9.]+$", said, re.MULTILINE), said
    assert "fla at v = 2048: RuntimeError: it writes over its inputs" in said

# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of docs/pytorch.md in order, in one namespace, as a reader would."""
import os
import re

PAGE = os.path.join(os.path.dirname(__file__), "..", "..", "docs", "pytorch.md")


def test_every_example_runs():
    with open(PAGE, encoding="utf-8") as file:
        blocks = re.findall(r"^```python\n(.*?)^```", file.read(), re.M | re.S)
    assert len(blocks) > 8
    namespace = {}
    for block in blocks:
        if "transformers" in block:
            try:
                import transformers  # noqa: F401
            except ImportError:
                continue
        exec(compile(block, PAGE, "exec"), namespace)
    head = namespace["head"]
    assert head is not None and namespace["out"].entropy.requires_grad


def test_every_public_name_is_on_the_page():
    import rafter
    with open(PAGE, encoding="utf-8") as file:
        page = file.read()
    for name in rafter.__all__:
        if name not in ("LogProbs", "LossOutput"):
            assert re.search(rf"rafter\.{name}\b", page), name


def test_the_example_trains():
    import subprocess
    import sys
    script = os.path.join(os.path.dirname(PAGE), "..", "examples", "train.py")
    done = subprocess.run([sys.executable, script, "--steps", "4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout

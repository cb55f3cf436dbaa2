# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of the pages in order, in one namespace, as a reader would."""
import os
import re

DOCS = os.path.join(os.path.dirname(__file__), "..", "..", "docs")
PAGE = os.path.join(DOCS, "pytorch.md")


def blocks_of(page):
    with open(page, encoding="utf-8") as file:
        return re.findall(r"^```python\n(.*?)^```", file.read(), re.M | re.S)


def test_every_example_runs():
    blocks = blocks_of(PAGE)
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


def test_every_example_with_arrays_runs():
    page = os.path.join(DOCS, "array.md")
    blocks = blocks_of(page)
    namespace = {}
    for block in blocks:
        try:
            exec(compile(block, page, "exec"), namespace)
        except ModuleNotFoundError as error:
            assert error.name in ("numpy", "jax")
            continue
    assert len(blocks) >= 2


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

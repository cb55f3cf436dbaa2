# SPDX-License-Identifier: Apache-2.0
"""The bench's Python columns: a column that overwrites its inputs must not affect the others; the options of the losses."""
import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch
from support import close, labels, loss_reference, normal

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


# ---- the functions that linear_cross_entropy's columns call, with every option of --preset models

NUMBERS = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "logit_scale": 0.5}
TENSORS = {"class_weight": (50, ), "row_weight": (24, ), "bias": (50, )}
OPTIONS = [[], *([name] for name in (*NUMBERS, *TENSORS)), [*NUMBERS, *TENSORS]]


def peers():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench", "worker", "peers.py")
    spec = importlib.util.spec_from_file_location("peers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Row:
    """What the worker gives a column."""

    def __init__(self, options):
        self.options = {name: value if name in options else 0 for name, value in NUMBERS.items()}
        self.tensors = {"x": normal(24, 32), "weight": normal(50, 32, seed=1, scale=0.3),
                        "target": labels((24, ), 50, "cpu", ignored=False)}
        for seed, (name, shape) in enumerate(TENSORS.items()):
            if name in options:
                self.tensors[name] = normal(*shape, seed=5 + seed).abs() + 0.5

    def __getitem__(self, name):
        return self.tensors[name]

    def leaves(self, dtype=torch.float32):
        return [self.tensors[name].to(dtype).requires_grad_() for name in ("x", "weight", "bias") if name in self.tensors]


def expected(row):
    leaves = row.leaves(torch.float64)
    numbers = {name: value for name, value in row.options.items() if value}
    loss = loss_reference(torch.nn.functional.linear(*leaves), row["target"], weight=row.tensors.get("class_weight"),
                          row_weight=row.tensors.get("row_weight"), **numbers)
    return loss, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("column", ["to", "rafter_py"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda names: "+".join(names) or "plain")
def test_a_column_computes_every_option(column, options):
    row = Row(options)
    leaves = row.leaves()
    loss = getattr(peers(), f"linear_cross_entropy_{column}")(row)(*leaves)
    want_loss, want_gradients = expected(row)
    close(loss, want_loss)
    for got, want in zip(torch.autograd.grad(loss, leaves), want_gradients):
        close(got, want, scale=8, atol=1e-5)


def test_a_column_refuses_an_option_that_its_function_lacks():
    with pytest.raises(NotImplementedError, match="it has no softcap, bias"):
        peers().loss_options(Row(["softcap", "bias", "logit_scale"]), ("logit_scale", ))
    assert peers().loss_options(Row(["softcap"]), ("softcap", )) == {"softcap": 3.0}

# SPDX-License-Identifier: Apache-2.0
"""The bench's map: every cell has torch's time or a reason, and torch's column computes the options of the map."""
import json
import os
import subprocess
import sys

import pytest
import torch

import rafter


def rafter_command():
    command = os.path.join(os.path.dirname(os.path.abspath(rafter.__file__)), "..", "..", "bench", "rafter")
    if not os.path.exists(command):
        pytest.skip("not run from a build tree")
    return command


def test_torch_on_the_map(tmp_path):
    """Every cell has torch's time, or a note that says why not."""
    report = tmp_path / "map.json"
    words = ["bench", "--preset", "map", "--cells", "6", "--seconds", "0.001", "--providers", "rafter,to", "--json", report]
    environment = {**os.environ, "RAFTER_PYTHON": sys.executable}
    said = subprocess.run([rafter_command(), *words], env=environment, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    cells = json.loads(report.read_text())
    notes = {table["title"]: " ".join(table["notes"]) for table in cells["tables"]}
    rows = [row for row in cells["rows"] if row["provider"] == "to"]
    assert len(rows) == 6 * len(cells["tables"]), [table["title"] for table in cells["tables"]]
    assert sum(row["median"] is not None for row in rows) > len(rows) // 2
    for row in rows:
        assert row["median"] is not None or f"to at cell = {row['x']}: left out" in notes[row["table"]], row


class Row:
    """A row as peers.py gets it."""

    def __init__(self, tensors, **options):
        self.tensors = tensors
        self.options = {"label_smoothing": 0, "z_loss": 0, "softcap": 0, "logit_scale": 0, "reduction": "mean", **options}

    def __getitem__(self, name):
        return self.tensors[name]


@pytest.mark.parametrize("options", [
    {}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"softcap": 3.0}, {"logit_scale": 0.5}, {"reduction": "none"},
    {"reduction": "none", "z_loss": 0.01, "softcap": 3.0},
], ids=str)
@pytest.mark.parametrize("extra", ["", "class_weight", "row_weight"])
def test_torch_computes_the_options_of_the_map(options, extra):
    """Columns of the map are not compared with the oracle there, so compare the function with the package here."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench", "worker"))
    import peers

    torch.manual_seed(0)
    logits, target = torch.randn(4, 3, 17) * 3, torch.randint(0, 17, (4, 3))
    target[1, 1] = -100
    tensors = {"logits": logits, "target": target}
    given = dict(options)
    if extra == "class_weight":
        tensors[extra] = given["weight"] = torch.rand(17) + 0.5
    elif extra == "row_weight":
        tensors[extra] = given["row_weight"] = torch.randn(4, 3)
    got = peers.cross_entropy_to(Row(tensors, **options))(logits)
    want = rafter.cross_entropy(logits, target, dim=-1, **given)
    torch.testing.assert_close(got, want.view(got.shape), rtol=1e-5, atol=1e-5)

# SPDX-License-Identifier: Apache-2.0
"""The layout for the Hugging Face Hub, loaded as the `kernels` package loads it."""
import base64
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

import rafter

PYTHON = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))), "python")
PACKAGE = os.path.dirname(os.path.abspath(rafter.__file__))


def laid_out(folder):
    """A kernel from the library of the package, which has another namespace than a kernel would."""
    spec = importlib.util.spec_from_file_location("hub", os.path.join(PYTHON, "hub.py"))
    hub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hub)
    path = hub.lay_out(PACKAGE, "rafter", folder)
    # The package's library has the C library beside it; that of a kernel contains it.
    shutil.copy(os.path.join(PACKAGE, "librafter_array.so"), path)
    return path


def run(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd="/", capture_output=True, text=True,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert done.returncode == 0, done.stderr
    return done.stdout


COMPUTE = """
import torch
x, w, y = torch.randn(6, 8, requires_grad=True), torch.randn(9, 8), torch.arange(6)
loss = module.linear_cross_entropy(x, w, y)
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x @ w.T, y))
loss.backward()
print(module.__file__, sorted(module.__all__))
"""

# What the package does: a module of any name, from the path of its __init__.py.
BY_HAND = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_a_kernel", sys.argv[1] + "/__init__.py")
module = sys.modules["_a_kernel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
""" + COMPUTE

BY_KERNELS = """
import pathlib, sys
import kernels
module = kernels.get_local_kernel(pathlib.Path(sys.argv[1]).parent.parent, backend="cpu", trust_remote_code=True)
""" + COMPUTE

OLDER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("older", sys.argv[1] + "/rafter/__init__.py")
module = sys.modules["older"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
""" + COMPUTE


def test_the_layout():
    if not os.path.exists(os.path.join(PYTHON, "hub.py")):
        pytest.skip("no sources")
    with tempfile.TemporaryDirectory() as folder:
        path = laid_out(folder)
        assert os.path.relpath(path, folder).startswith("build/torch-stable-abi210-cpu-")
        with open(os.path.join(path, "metadata.json"), encoding="utf-8") as file:
            metadata = json.load(file)
        assert (metadata["name"], metadata["backend"]) == ("rafter", {"type": "cpu"})
        files = metadata["digest"]["files"]
        assert {"__init__.py", "rafter/__init__.py", "_namespace.py", "librafter_torch.so"} < files.keys()
        assert not {"array.py", "jax.py"} & files.keys()
        with open(os.path.join(path, "functional.py"), "rb") as file:
            assert files["functional.py"] == base64.b64encode(hashlib.sha256(file.read()).digest()).decode()
        for program in (BY_HAND, OLDER):
            shown = run(program, path)
            assert shown.startswith(path) and "linear_logprobs" in shown
        done = subprocess.run([sys.executable, os.path.join(PYTHON, "hub.py"), PACKAGE, "rafter", folder],
                              capture_output=True, text=True)
        assert done.returncode and "wanted a name of its own" in done.stderr


def test_the_kernels_package_takes_it():
    pytest.importorskip("kernels")
    with tempfile.TemporaryDirectory() as folder:
        path = laid_out(folder)
        assert run(BY_KERNELS, path).startswith(path)

# SPDX-License-Identifier: Apache-2.0
"""The installed package: its files are complete, and `python -m rafter info` works."""
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch

import rafter


def run(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *words], cwd="/", env=environment, capture_output=True, text=True)


def test_info():
    done = run(os.path.dirname(os.path.dirname(rafter.__file__)), "-m", "rafter", "info")
    assert done.returncode == 0, done.stderr
    for word in ("rafter 0.", "PyTorch", "linear_cross_entropy", "CUDA:"):
        assert word in done.stdout
    assert run(os.path.dirname(os.path.dirname(rafter.__file__)), "-m", "rafter", "abacus").returncode != 0


def test_installed_files_are_enough():
    """`cmake --install --component python` installs the files that a wheel contains."""
    package = os.path.dirname(os.path.abspath(rafter.__file__))
    build = os.path.dirname(os.path.dirname(package))
    if not os.path.exists(os.path.join(build, "cmake_install.cmake")) or not shutil.which("cmake"):
        pytest.skip("not run from a build tree")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["cmake", "--install", build, "--component", "python", "--prefix", folder], check=True,
                       capture_output=True)
        for name in os.listdir(package):
            if name.endswith(".py"):
                shutil.copy(os.path.join(package, name), os.path.join(folder, "rafter", name))
        for name in os.listdir(package):
            if name.startswith("_autograd_"):
                assert os.path.exists(os.path.join(folder, "rafter", name))
        cuda = "librafter_cuda.so.0"
        assert os.path.exists(os.path.join(folder, "rafter", cuda)) == os.path.exists(os.path.join(build, cuda))
        done = run(folder, "-c", "import torch, rafter; print(rafter.__file__); print(rafter.silu(torch.ones(3)))")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(folder)
        if not torch.cuda.is_available():
            included = os.path.exists(os.path.join(build, cuda))
            message = "librafter_cuda is in the package" if included else "no librafter_cuda"
            assert message in run(folder, "-m", "rafter", "info").stdout


def test_types_are_announced():
    """Type checkers ignore the annotations of a package without py.typed."""
    assert os.path.exists(os.path.join(os.path.dirname(rafter.__file__), "py.typed"))


def test_public_names():
    for name in rafter.__all__:
        assert getattr(rafter, name) is not None
        assert getattr(rafter, name).__doc__


def test_choices_are_literals():
    """A type checker knows the strings that an argument takes, and they are those that the code takes."""
    import typing

    from rafter import _options, functional
    for literal, table in ((_options.Act, _options.ACTS), (_options.Reduction, _options.REDUCTIONS),
                           (_options.Mode, _options.MODES), (_options.Accumulate, _options.ACCUMULATE),
                           (_options.LogsumexpAlgorithm, _options.LSE_ALGORITHMS),
                           (_options.LrpeAlgorithm, _options.LRPE_ALGORITHMS), (_options.Extra, functional._EXTRAS)):
        assert set(typing.get_args(literal)) == set(table)
    functions = [getattr(rafter, name) for name in rafter.__all__ if name in vars(functional)]
    modules = [rafter.nn.CrossEntropyLoss.__init__, rafter.nn.LRPECosine.__init__]
    seen = 0
    for function in functions + modules:
        if not isinstance(function, type):
            hints = typing.get_type_hints(function)
            assert str not in hints.values(), f"{function.__qualname__} takes a plain str"
            seen += sum(typing.get_origin(hint) is typing.Literal for hint in hints.values())
    assert seen >= 9


def test_version():
    facts = dict(line.split(" ", 1) for line in torch.ops.rafter._info().splitlines())
    assert rafter.__version__ == facts["version"]


def test_pip_without_torch_gets_a_sentence():
    """What pip install --no-build-isolation shows where there is no PyTorch."""
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(rafter.__file__))))
    if not os.path.exists(os.path.join(source, "CMakeLists.txt")) or not shutil.which("cmake"):
        pytest.skip("not run from a build tree")
    with tempfile.TemporaryDirectory() as folder:
        python = os.path.join(folder, "python3")
        with open(python, "w") as file:
            file.write(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')  # sees no site-packages
        os.chmod(python, 0o755)
        done = subprocess.run(["cmake", "-S", source, "-B", os.path.join(folder, "build"), "-DSKBUILD=2",
                               "-DRAFTER_CUDA=OFF", "-DRAFTER_TESTS=OFF", "-DRAFTER_BENCH=OFF",
                               f"-DPython3_EXECUTABLE={python}"], capture_output=True, text=True)
    message = " ".join(done.stderr.split())
    assert done.returncode == 0, done.stderr
    assert "built without its PyTorch functions" in message
    assert "install PyTorch 2.10 or later and build again" in message

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of this folder without pytest. They use only parametrize, raises, skip, importorskip
and tmp_path, and this script has its own versions of those.

    PYTHONPATH=build/python tests/python/without_pytest.py [MODULE...] [-k WORD]
"""
import contextlib
import importlib
import inspect
import itertools
import os
import pathlib
import re
import sys
import tempfile
import time
import traceback
import types
import warnings


class Skip(Exception):
    pass


def skip(reason, allow_module_level=False):
    raise Skip(reason)


def importorskip(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Skip(f"{name} is not installed") from None


@contextlib.contextmanager
def raises(kind, match=None):
    try:
        yield
    except kind as error:
        if match and not re.search(match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {match!r}") from error
        return
    raise AssertionError(f"{kind} was not raised")


def parametrize(name, values, ids=None):
    def mark(function):
        function.axes = [(name, list(values)), *getattr(function, "axes", [])]
        return function

    return mark


def install():
    """Installs a stand-in for the module pytest, with the parts that the tests use."""
    module = types.ModuleType("pytest")
    module.skip, module.raises, module.importorskip = skip, raises, importorskip
    # skipif, fixture: JAX imports a package that decorates functions of its own with them.
    module.fixture = lambda *given, **_: given[0] if given else lambda function: function
    module.mark = types.SimpleNamespace(parametrize=parametrize, skipif=lambda *_, **__: lambda function: function)
    sys.modules["pytest"] = module


def cases(module):
    for name, function in list(vars(module).items()):
        if not name.startswith("test_"):
            continue
        axes = getattr(function, "axes", [])
        for values in itertools.product(*(values for _, values in axes)):
            arguments = {}
            for (axis, _), value in zip(axes, values):
                names = axis.split(", ")
                arguments.update(zip(names, value if len(names) > 1 else [value]))
            yield f"{module.__name__}.{name}", arguments, function


def call(function, arguments):
    if "tmp_path" not in inspect.signature(function).parameters:
        return function(**arguments)
    with tempfile.TemporaryDirectory() as folder:
        function(**arguments, tmp_path=pathlib.Path(folder))


def main():
    install()
    warnings.simplefilter("ignore")  # only failures and skips matter here
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, folder)
    words = sys.argv[1:]
    only = words[words.index("-k") + 1] if "-k" in words else ""
    every = sorted(name[:-3] for name in os.listdir(folder) if name.startswith("test_"))
    names = [w for w in words if w not in ("-k", only)] or every
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    for name in names:
        start = time.time()
        before = dict(counts)
        reasons = set()
        try:
            module = importlib.import_module(name)
        except Skip as reason:
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        for title, arguments, function in cases(module):
            if only not in title:
                continue
            try:
                call(function, arguments)
                counts["passed"] += 1
            except Skip as reason:
                counts["skipped"] += 1
                reasons.add(str(reason)[:160])
            except Exception:
                counts["failed"] += 1
                shown = ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in arguments.items())
                print(f"FAILED {title}({shown})\n{traceback.format_exc(limit=-3)[-1200:]}", flush=True)
        done = ", ".join(f"{counts[k] - before[k]} {k}" for k in counts if counts[k] > before[k])
        print(f"{name}: {done} in {time.time() - start:.1f} s", *(f"  skipped: {r}" for r in sorted(reasons)),
              sep="\n", flush=True)
    print(", ".join(f"{n} {k}" for k, n in counts.items()))
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()

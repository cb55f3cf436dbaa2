# SPDX-License-Identifier: Apache-2.0
"""Lays a build out as a kernel of the Hugging Face Hub, for the `kernels` package.

    python3 hub.py LIBRARIES NAMESPACE OUTPUT [--cuda VERSION --archs 8.0 9.0a ...]

LIBRARIES: the folder with librafter_torch.so, built with -DRAFTER_TORCH_NAMESPACE=NAMESPACE, and for
CUDA librafter_cuda.so.0. OUTPUT gets build/VARIANT with the Python files, the libraries and
metadata.json. `./run hub` does all of it. The format: docs/hub.md.
"""
import argparse
import base64
import hashlib
import json
import os
import platform
import shutil

HERE = os.path.dirname(os.path.abspath(__file__))
# What needs more than PyTorch stays out: a kernel may import nothing else.
LEFT_OUT = ("array.py", "jax.py", "_calls.py", "__main__.py", "_namespace.py")
TORCH = "210"  # PyTorch 2.10: the oldest with the stable ABI that the library uses
VERSION = 0  # the Hub's count of incompatible versions; 0: may still change

# For versions of `kernels` that look for a folder with the kernel's name.
FORWARD = '''# SPDX-License-Identifier: Apache-2.0
import importlib.util
import pathlib
import sys

_spec = importlib.util.spec_from_file_location("{namespace}", pathlib.Path(__file__).parent.parent / "__init__.py")
_module = sys.modules.get(_spec.name)
if _module is None:
    _module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
globals().update({{name: getattr(_module, name) for name in _module.__all__}})
__all__ = _module.__all__
'''


def digest(folder):
    """SHA-256 of every file, in base64."""
    files = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with open(path, "rb") as file:
                hashed = hashlib.sha256(file.read()).digest()
            files[os.path.relpath(path, folder)] = base64.b64encode(hashed).decode()
    return {"algorithm": "sha256", "files": dict(sorted(files.items()))}


def lay_out(libraries, namespace, output, cuda=None, archs=()):
    backend = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    folder = os.path.join(output, "build", f"torch-stable-abi{TORCH}-{backend}-{platform.machine()}-linux")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(os.path.join(folder, "rafter"))
    for name in sorted(os.listdir(os.path.join(HERE, "rafter"))):
        if name.endswith((".py", ".typed")) and name not in LEFT_OUT:
            shutil.copy(os.path.join(HERE, "rafter", name), folder)
    for name in ["librafter_torch.so"] + (["librafter_cuda.so.0"] if cuda else []):
        shutil.copy(os.path.join(libraries, name), folder)
    with open(os.path.join(folder, "_namespace.py"), "w", encoding="utf-8") as file:
        file.write(f'# SPDX-License-Identifier: Apache-2.0\nNAMESPACE = "{namespace}"\n')
    with open(os.path.join(folder, "rafter", "__init__.py"), "w", encoding="utf-8") as file:
        file.write(FORWARD.format(namespace=namespace))
    metadata = {"id": namespace, "name": "rafter", "version": VERSION, "license": "Apache-2.0", "python-depends": [],
                "backend": {"type": "cuda", "archs": list(archs)} if cuda else {"type": "cpu"},
                "digest": digest(folder)}
    with open(os.path.join(folder, "metadata.json"), "w", encoding="utf-8") as file:
        json.dump(metadata, file, indent=2)
    return folder


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries")
    parser.add_argument("namespace")
    parser.add_argument("output")
    parser.add_argument("--cuda", help="the toolkit's version, as 13.0")
    parser.add_argument("--archs", nargs="*", default=[], help="as 8.0 9.0a 12.0+PTX")
    arguments = parser.parse_args()
    if not arguments.namespace.isidentifier() or arguments.namespace == "rafter":
        parser.error(f"NAMESPACE is {arguments.namespace!r}, wanted a name of its own, with the commit in it")
    print(lay_out(**vars(arguments)))


if __name__ == "__main__":
    main()

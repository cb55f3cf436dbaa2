# SPDX-License-Identifier: Apache-2.0
"""rafter.batch_invariant: see docs/pytorch.md."""
import ctypes
import os

_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "librafter_torch.so")
_exchange = ctypes.CDLL(_PATH).rafter_torch_batch_invariant  # loaded already, by _ops.py
_exchange.restype, _exchange.argtypes = ctypes.c_int32, [ctypes.c_int32]


class batch_invariant:
    """Makes the results and the gradient of a row have the same bits in every batch: for any number of
    rows, wherever the row is among them. Called as a function, rafter.batch_invariant(True), it holds
    from then on; as a context manager, `with rafter.batch_invariant():`, it holds inside. The setting
    applies to the whole process, with all threads and devices, and counts when a kernel is called: a
    backward pass is invariant if it runs while the setting is on. Weight gradients and reduced losses
    are sums over rows, and do depend on the batch."""

    def __init__(self, mode: bool = True):
        if not isinstance(mode, bool):
            raise TypeError(f"mode is {mode!r}, wanted True or False")
        self._before = _exchange(mode)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        _exchange(self._before)


def is_batch_invariant() -> bool:
    """Whether rafter.batch_invariant is on."""
    return bool(_exchange(-1))

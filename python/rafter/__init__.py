# SPDX-License-Identifier: Apache-2.0
"""Rafter: fused training operations for language models. With PyTorch there are functions and
modules: see docs/pytorch.md. Without it there are rafter.array, for arrays of NumPy and others, and
rafter.jax: see docs/array.md."""
import importlib.util
import os

__version__ = "0.2.0"  # as in include/rafter/rafter.h, which a test compares

_PYTORCH = ("LogProbs", "LossOutput", "act", "batch_invariant", "cross_entropy", "is_batch_invariant",
            "linear_cross_entropy", "linear_logprobs", "logsumexp", "lrpe_cosine", "nn", "patch", "relu", "sigmoid", "silu", "softmax", "unpatch")
_built = os.path.exists(os.path.join(os.path.dirname(os.path.abspath(__file__)), "librafter_torch.so"))

if _built and importlib.util.find_spec("torch"):
    from . import nn
    from .functional import (LogProbs, LossOutput, act, cross_entropy, linear_cross_entropy, linear_logprobs,
                             logsumexp, lrpe_cosine, relu, sigmoid, silu, softmax)
    from .huggingface import patch, unpatch
    from ._batch import batch_invariant, is_batch_invariant

    __all__ = [*_PYTORCH]
else:
    __all__ = []

    def __getattr__(name):
        if name not in _PYTORCH:
            raise AttributeError(f"module 'rafter' has no attribute {name!r}")
        # ImportError, so that `from rafter import NAME` shows the sentence too.
        raise ImportError(f"rafter.{name} needs PyTorch 2.10 or later, " + (
            "which is not installed" if _built else "which was not there when this package was built; install it and "
            "build Rafter again") + "; rafter.array works without it")

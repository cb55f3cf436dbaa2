# SPDX-License-Identifier: Apache-2.0
"""Rafter: fused training operations for language models, as PyTorch functions and modules. See
docs/pytorch.md."""
from . import nn
from .functional import (LogProbs, LossOutput, act, cross_entropy, linear_cross_entropy, linear_logprobs, logsumexp,
                         lrpe_cosine, relu, sigmoid, silu, softmax)
from .huggingface import patch, unpatch

__version__ = "0.2.0"  # as in include/rafter/rafter.h, which a test compares

__all__ = ["LogProbs", "LossOutput", "act", "cross_entropy", "linear_cross_entropy", "linear_logprobs", "logsumexp",
           "lrpe_cosine", "nn", "patch", "relu", "sigmoid", "silu", "softmax", "unpatch"]

# SPDX-License-Identifier: Apache-2.0
"""torch.func: grad, vjp, jacrev and vmap agree with PyTorch's own ops; what has no derivative is refused."""
import pytest
import rafter
import torch
import torch.nn.functional as F
from support import labels, normal, parametrize
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

X, Z, W, BIAS = normal(6, 5), normal(6, 10), normal(10, 5), normal(10)
Y = labels((6,), 10, "cpu")
ROWS = Y.clamp(min=0)


def lrpe(x, theta):
    angles = torch.arange(float(x.shape[1]))[:, None, None] * theta
    return torch.cat([F.silu(x) * angles.cos(), F.silu(x) * angles.sin()], -1)


def log_probs(x, w):
    return torch.log_softmax(x @ w.T, -1)


def entropy(x, w):
    return -(log_probs(x, w).exp() * log_probs(x, w)).sum(-1)


# What rafter computes, what PyTorch computes, and the arguments to differentiate by.
PAIRS = {
    "relu": (rafter.relu, F.relu, (Z,)),
    "sigmoid": (rafter.sigmoid, torch.sigmoid, (Z,)),
    "silu": (rafter.silu, F.silu, (Z,)),
    "softmax": (lambda z: rafter.softmax(z, 0), lambda z: F.softmax(z, 0), (Z,)),
    "logsumexp": (lambda z: rafter.logsumexp(z, -1), lambda z: torch.logsumexp(z, -1), (Z,)),
    "cross_entropy": (lambda z: rafter.cross_entropy(z, Y, label_smoothing=0.1),
                      lambda z: F.cross_entropy(z, Y, label_smoothing=0.1), (Z,)),
    "cross_entropy_extras": (lambda z: rafter.cross_entropy(z, Y, extras=("lse", "entropy")).loss,
                             lambda z: F.cross_entropy(z, Y), (Z,)),
    "linear_cross_entropy": (lambda x, w, b: rafter.linear_cross_entropy(x, w, Y, linear_bias=b),
                             lambda x, w, b: F.cross_entropy(x @ w.T + b, Y), (X, W, BIAS)),
    "linear_cross_entropy_extras": (lambda x, w: rafter.linear_cross_entropy(x, w, Y, extras=("lse",)).loss,
                                    lambda x, w: F.cross_entropy(x @ w.T, Y), (X, W)),
    "linear_logprobs": (lambda x, w: rafter.linear_logprobs(x, w, ROWS).logprob,
                        lambda x, w: log_probs(x, w).gather(1, ROWS[:, None])[:, 0], (X, W)),
    "entropy": (lambda x, w: rafter.linear_logprobs(x, w, ROWS, entropy=True).entropy, entropy, (X, W)),
    "lrpe_cosine": (lambda x, t: rafter.lrpe_cosine(x, t, act="silu"), lrpe, (normal(2, 4, 3, 8), normal(3, 8))),
}


@parametrize("name", PAIRS)
def test_gradients(name):
    ours, torchs, inputs = PAIRS[name]
    arguments = tuple(range(len(inputs)))
    torch.testing.assert_close(*(grad(lambda *a: (f(*a) ** 2).sum(), arguments)(*inputs) for f in (ours, torchs)))
    torch.testing.assert_close(*(jacrev(f, arguments)(*inputs) for f in (ours, torchs)))
    up = torch.randn_like(torchs(*inputs))
    torch.testing.assert_close(*(vjp(f, *inputs)[1](up) for f in (ours, torchs)))


@parametrize("name", PAIRS)
def test_vmap(name):
    ours, torchs, inputs = PAIRS[name]
    batches = tuple(torch.stack([t, 2 * t, -t]) for t in inputs)
    arguments = tuple(range(len(inputs)))
    torch.testing.assert_close(*(vmap(f)(*batches) for f in (ours, torchs)))
    torch.testing.assert_close(*(vmap(grad(lambda *a: f(*a).sum(), arguments))(*batches) for f in (ours, torchs)))


def test_gradients_per_sample():
    def per_sample(f):
        return vmap(grad(f), in_dims=(None, 0, 0))(W, X, ROWS)

    torch.testing.assert_close(per_sample(lambda w, x, y: rafter.linear_cross_entropy(x[None], w, y[None])),
                               per_sample(lambda w, x, y: F.cross_entropy((x @ w.T)[None], y[None])))


@parametrize("name", PAIRS)
def test_second_derivatives_are_refused(name):
    ours, _, inputs = PAIRS[name]
    for outer in range(len(inputs)):
        with pytest.raises(RuntimeError, match="double backward"):
            grad(lambda *a: grad(lambda *b: (ours(*b) ** 2).sum())(*a).square().sum(), outer)(*inputs)


@parametrize("name", PAIRS)
def test_forward_mode_is_refused(name):
    ours, _, inputs = PAIRS[name]
    for call in (lambda: jvp(ours, inputs, inputs), lambda: jacfwd(ours)(*inputs),
                 lambda: jacfwd(jacrev(lambda *a: ours(*a).sum()))(*inputs)):
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            call()


def test_inside_and_outside_of_autograd():
    """The tensors of a transform may have a history of their own."""
    x = X.clone().requires_grad_()
    rafter.linear_cross_entropy(x * grad(lambda w: rafter.linear_cross_entropy(X, w, Y))(W).sum(), W, Y).backward()
    expected = X.clone().requires_grad_()
    F.cross_entropy(expected * grad(lambda w: F.cross_entropy(X @ w.T, Y))(W).sum() @ W.T, Y).backward()
    torch.testing.assert_close(x.grad, expected.grad)

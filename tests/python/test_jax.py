# SPDX-License-Identifier: Apache-2.0
"""rafter.jax on the CPU: values and gradients as JAX computes them, under jit and vmap."""
import pytest

jax = pytest.importorskip("jax")
try:
    from rafter import jax as rj
except ImportError as reason:
    pytest.skip(str(reason), allow_module_level=True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

V = 33


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def labels(*shape, classes=V):
    return jax.random.randint(jax.random.key(9), shape, 0, classes).at[(0,) * len(shape)].set(-100)


def loss_rows(z, y, label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0, class_weight=None,
              row_weight=None, ignore_index=-100):
    u = z.astype(jnp.float32)
    u = (softcap * jnp.tanh(u / softcap) if softcap else u) * logit_scale
    w = jnp.ones(z.shape[-1]) if class_weight is None else class_weight
    logp, safe = jax.nn.log_softmax(u), jnp.where(y == ignore_index, 0, y)
    picked = jnp.take_along_axis(logp, safe[..., None], -1)[..., 0]
    rows = -(1 - label_smoothing) * w[safe] * picked - label_smoothing / z.shape[-1] * (w * logp).sum(-1)
    rows = rows + z_loss * jax.nn.logsumexp(u, -1)**2
    return jnp.where(y == ignore_index, 0, rows * (1 if row_weight is None else row_weight))


def reference(z, y, reduction="mean", denominator=None, **options):
    rows = loss_rows(z, y, **options)
    if reduction != "mean":
        return rows if reduction == "none" else rows.sum()
    w = options.get("class_weight")
    counted = jnp.where(y == -100, 0, 1.0 if w is None else w[jnp.where(y == -100, 0, y)])
    return rows.sum() / (counted.sum() if denominator is None else denominator)


def close(actual, expected, rtol=3e-5, atol=3e-6):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=rtol, atol=atol)


def agree(function, expected, *arrays, **bounds):
    """Values and gradients for an uneven upstream gradient, with and without jit."""
    def weighted(f):
        return lambda *a: (f(*a).astype(jnp.float32) * (jnp.arange(f(*a).size) % 5 - 1.5).reshape(f(*a).shape)).sum()

    wanted = jax.grad(weighted(expected), tuple(range(len(arrays))))(*arrays)
    for transform in (lambda f: f, jax.jit):
        close(transform(function)(*arrays), expected(*arrays), **bounds)
        for got, want in zip(transform(jax.grad(weighted(function), tuple(range(len(arrays)))))(*arrays), wanted):
            close(got, want, **bounds)


@pytest.mark.parametrize("kind", ["relu", "sigmoid", "silu", "softmax"])
def test_act(kind):
    dim = 1 if kind == "softmax" else None
    expected = jax.nn.softmax if kind == "softmax" else getattr(jax.nn, kind)
    agree(lambda x: rj.act(x, kind, dim), lambda x: expected(x, 1) if kind == "softmax" else expected(x),
          normal(3, 4, 5))


def test_logsumexp():
    for keepdim in (False, True):
        agree(lambda x: rj.logsumexp(x, 1, keepdim), lambda x: jax.nn.logsumexp(x, 1, keepdims=keepdim),
              normal(3, 4, 5))


OPTIONS = [{}, {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-2},
           {"reduction": "none", "softcap": 3.0, "logit_scale": 0.5}, {"denominator": 3.0},
           {"class_weight": jnp.linspace(0.5, 2, V), "row_weight": jnp.arange(6.0).reshape(2, 3)}]


@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy(options):
    y = labels(2, 3)
    agree(lambda z: rj.cross_entropy(z, y, **options), lambda z: reference(z, y, **options), normal(2, 3, V))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mode", ["auto", "compact"])
def test_linear_cross_entropy(options, mode):
    y = labels(2, 3)
    agree(lambda x, w, b: rj.linear_cross_entropy(x, w, y, bias=b, mode=mode, **options),
          lambda x, w, b: reference(x @ w.T + b, y, **options), normal(2, 3, 8), normal(V, 8, seed=1),
          normal(V, seed=2))
    agree(lambda w: rj.linear_cross_entropy(normal(2, 3, 8), w, y, mode=mode, **options),  # x is a constant
          lambda w: reference(normal(2, 3, 8) @ w.T, y, **options), normal(V, 8, seed=1))


def test_lrpe_cosine():
    def expected(x, theta):
        angle = (5 + jnp.arange(3.0))[:, None, None] * theta
        return jnp.concatenate([jax.nn.silu(x) * jnp.cos(angle), jax.nn.silu(x) * jnp.sin(angle)], -1)

    x, theta = normal(2, 3, 2, 4), jax.random.uniform(jax.random.key(1), (2, 4))
    agree(lambda x, t: rj.lrpe_cosine(x, t, offset=5, act="silu"), expected, x, theta, atol=2e-5)
    positions = jnp.arange(5, 8)
    agree(lambda x: rj.lrpe_cosine(x, theta, positions=positions, act="silu"), lambda x: expected(x, theta), x,
          atol=2e-5)


def test_extras_have_no_gradient():
    z, y = normal(4, V), labels(4)

    def both(z):
        out = rj.cross_entropy(z, y, extras=("argmax", "entropy"))
        return out.loss + out.entropy.sum(), out.argmax

    (value, argmax), gradient = jax.value_and_grad(jax.jit(both), has_aux=True)(z)
    close(gradient, jax.grad(lambda z: reference(z, y))(z))
    assert (argmax[1:] == z.argmax(-1)[1:]).all() and argmax[0] == -1


def test_bf16_and_fp16():
    y = labels(8)
    for dtype, bound in ((jnp.bfloat16, 2**-6), (jnp.float16, 2**-9)):
        x, w = normal(8, 16, dtype=dtype), normal(V, 16, seed=1, dtype=dtype)
        loss = lambda x: rj.linear_cross_entropy(x, w, y)  # noqa: E731, B023
        exact = jax.grad(lambda x: reference(x @ w.astype(jnp.float32).T, y))(x.astype(jnp.float32))  # noqa: B023
        gradient = jax.jit(jax.grad(loss))(x)
        assert gradient.dtype == dtype
        np.testing.assert_allclose(np.asarray(gradient, np.float32), exact, rtol=bound, atol=1e-3)


def test_vmap_and_scan():
    z, y = normal(3, 4, V), jnp.broadcast_to(labels(4), (3, 4))
    close(jax.vmap(rj.cross_entropy)(z, y), jax.vmap(reference)(z, y))
    gradient = jax.vmap(jax.grad(lambda z, y: rj.cross_entropy(z, y)))(z, y)
    close(gradient, jax.vmap(jax.grad(reference))(z, y))
    total, _ = jax.lax.scan(lambda sum, pair: (sum + rj.cross_entropy(*pair), None), 0.0, (z, y))
    close(total, jax.vmap(reference)(z, y).sum())


def test_only_the_gradients_that_are_needed():
    """A gradient for x alone does not compute dweight."""
    x, w, y = normal(4, 8), normal(V, 8, seed=1), labels(4)
    loss = lambda x, w: rj.linear_cross_entropy(x, w, y)  # noqa: E731
    both = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w))
    alone = str(jax.make_jaxpr(jax.grad(loss))(x, w))
    assert "dx dweight" in both and "dx" in alone and "dweight" not in alone
    assert "dx" not in str(jax.make_jaxpr(loss)(x, w))


def test_the_logits_are_never_formed():
    n, v, d = 64, 4096, 8
    compiled = jax.jit(jax.grad(lambda x, w: rj.linear_cross_entropy(x, w, labels(n, classes=v)), (0, 1))).lower(
        normal(n, d), normal(v, d)).compile()
    assert f"{n},{v}" not in compiled.as_text()


def test_mistakes_are_named():
    z, y = normal(4, V), labels(4)
    with pytest.raises(ValueError, match="no gradient for row_weight"):
        jax.grad(lambda r: rj.cross_entropy(z, y, row_weight=r))(jnp.ones(4))
    with pytest.raises(ValueError, match="extras has 'gradient'"):
        rj.cross_entropy(z, y, extras="gradient")
    with pytest.raises(Exception, match=r"rafter_cross_entropy_forward: target has shape \[3\]"):
        rj.cross_entropy(z, y[:3]).block_until_ready()
    with pytest.raises(Exception, match="rafter_cross_entropy_forward: .*33"):
        jax.jit(rj.cross_entropy)(z, jnp.full(4, V)).block_until_ready()
    with pytest.raises(Exception, match="dtype"):
        rj.act(jnp.ones(3, jnp.int8), "silu").block_until_ready()

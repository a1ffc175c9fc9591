"""What is differentiable, how often, and what a policy of jax.checkpoint may keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax import xla
from ejkernel.modules import flash_attention, page_attention
from harness import normal

Q = normal("q", (1, 8, 2, 4))


def loss(x):
    return (flash_attention(x, x, x, causal=True) ** 2).sum()


ONCE = "flash_attention can be differentiated once, in reverse"


@pytest.mark.parametrize(
    "twice",
    [
        jax.hessian(loss),
        jax.grad(lambda x: jax.grad(loss)(x).sum()),
        lambda x: jax.jvp(jax.grad(loss), (x,), (x,)),
        jax.jit(jax.hessian(loss)),
        jax.vmap(jax.grad(lambda x: jax.grad(lambda y: loss(y[None]))(x).sum())),
    ],
    ids=["hessian", "grad-of-grad", "jvp-of-grad", "jit-hessian", "vmap-grad-of-grad"],
)
def test_a_second_derivative_is_one_clear_line(twice):
    with pytest.raises(NotImplementedError, match=ONCE) as raised:
        twice(Q)
    assert len(str(raised.value).splitlines()) == 1


def test_a_cache_has_no_gradient_unless_nobody_wants_it():
    cache, lens, table = jnp.ones((2, 4, 2, 4)), jnp.array([5]), jnp.array([[0, 1]])

    def read(q):
        return page_attention(q, cache, cache, lens, table)

    with pytest.raises(
        NotImplementedError, match=r"page_attention cannot be differentiated: .* train with flash_attention"
    ):
        jax.grad(lambda q: read(q).sum())(Q[:, 0])
    gradient, seen = jax.grad(lambda q: ((q**2).sum(), read(q)), has_aux=True)(Q[:, 0])
    np.testing.assert_allclose(gradient, 2 * Q[:, 0])
    assert seen.shape == (1, 2, 4)


def _forwards(policy):
    """How often the forward runs in a training step under jax.checkpoint with that policy."""
    step = jax.grad(lambda x: jnp.tanh(jax.checkpoint(loss, policy=policy)(x)))
    return jax.jit(step).lower(Q).as_text().count("call @forward")


def test_a_policy_may_keep_outputs_and_lse_by_name():
    policies = jax.checkpoint_policies
    assert _forwards(policies.nothing_saveable) == 2
    assert _forwards(policies.save_only_these_names("ejkernel_out", "ejkernel_lse")) == 1
    assert _forwards(policies.save_only_these_names("something_else")) == 2


def test_only_the_lse_is_differentiated(monkeypatch):
    seen = []
    backward = xla.IMPLEMENTATION.backward

    def spy(call, residuals, cotangents, config):
        seen.append(sorted(cotangents))
        return backward(call, residuals, cotangents, config)

    monkeypatch.setattr(xla.IMPLEMENTATION, "backward", spy)
    q = normal("q", (1, 7, 2, 4))  # of a length that nothing else is traced for

    def both(x, use):
        return flash_attention(x, q, q, return_lse=True)[use].sum()

    def lse(x):
        logits = jnp.einsum("bthd,bshd->bhts", x, q) / 2
        return jax.nn.logsumexp(logits, -1).sum()

    np.testing.assert_allclose(jax.grad(both)(q, 1), jax.grad(lse)(q), rtol=1e-4, atol=1e-5)
    jax.grad(both)(q, 0)
    assert seen == [["lse"], ["out"]]


def test_a_training_step_traces_each_kernel_once(monkeypatch):
    seen = []
    for name in ("forward", "backward"):
        kernel = getattr(xla.IMPLEMENTATION, name)
        monkeypatch.setattr(xla.IMPLEMENTATION, name, lambda *given, k=kernel, n=name: seen.append(n) or k(*given))
    q = normal("q", (1, 9, 2, 4))  # of a length that nothing else is traced for
    jax.jit(jax.grad(loss)).trace(q)
    jax.grad(loss)(q)  # and takes what jit has traced
    assert seen == ["forward", "backward"]

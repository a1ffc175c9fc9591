"""vmap over cotangents alone: every row of a Jacobian is the gradient that a loop would find."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention, selected_attention
from harness import PLATFORMS
from tolerances import assert_close

Q, K, V = (jax.random.normal(jax.random.key(n), (1, 16, 2, 16)) for n in range(3))
INDICES = jnp.arange(16 * 2 * 2).reshape(1, 16, 2, 2) % 3


def check(function):
    """Of a function of V with few results."""
    found = jax.jacrev(function)(V)
    one = jax.jit(jax.grad(lambda v, n: function(v)[n]))
    for n, row in enumerate(found):
        assert_close({"value": row}, {"value": one(V, n)})


@pytest.mark.parametrize("platform", [p for p in PLATFORMS if p.device == "cpu"], ids=lambda p: p.id)
def test_dropout_of_one_row(platform):
    """Its seeds are as many as the rows of the batch, and never broadcast."""

    def some(v):
        return flash_attention(Q, K, v, dropout_prob=0.5, dropout_seed=3, platform=platform.name)[0, :3, 0, 0]

    with platform.context():
        check(some)


def test_selected_blocks_of_one_row():
    check(lambda v: selected_attention(Q, K, v, INDICES, block_size=4)[0, :3, 0, 0])

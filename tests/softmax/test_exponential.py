"""The exponential that XLA's loop has on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.online_softmax import MASKED
from ejkernel.kernels.common.tiles import exp_on_cpu


def test_is_the_exponential():
    x = jnp.concatenate([jnp.linspace(low, high, 100_001) for low, high in ((-87.3, 0), (-1, 1), (0, 88))])
    exact = np.exp(np.asarray(x, np.float64))
    ours = np.asarray(jax.jit(exp_on_cpu)(x), np.float64)
    assert np.abs(ours / exact - 1).max() < 2e-7


def test_is_zero_for_what_is_hidden():
    hidden = jnp.array([-jnp.inf, MASKED, -1e4, -88.0], jnp.float32)
    assert (np.asarray(exp_on_cpu(hidden)) == 0).all()


def test_keeps_every_nan():
    bits = jnp.array([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, -(2**22)], jnp.int32)
    assert jnp.isnan(exp_on_cpu(jax.lax.bitcast_convert_type(bits, jnp.float32))).all()
    assert exp_on_cpu(jnp.float32(0)) == 1

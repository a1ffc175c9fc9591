"""Calls on several devices outside jit: one program each, kept for other numbers, and for each setting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ejkernel import MaskInfo, flash_attention, native_sparse_attention, ring_attention, use_config
from ejkernel.ops import deterministic

MESH = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("x",))
X, GATE = jnp.ones((2, 32, 2, 8)), jnp.ones((2, 32, 2))
BATCH = (PartitionSpec("x"),) * 3


def documents(split: int) -> MaskInfo:
    return MaskInfo.from_segments(np.asarray([[0] * split + [1] * (32 - split)]))


def flash(split: int) -> jax.Array:
    return flash_attention(X, X, X, mask_info=documents(split), mesh=MESH, in_specs=BATCH)


def ring(split: int) -> jax.Array:
    return ring_attention(X, X, X, axis_name="x", mask_info=documents(split), mesh=MESH)


def sparse(split: int) -> jax.Array:
    lengths = np.full(2, split)
    options = {"block_counts": 2, "block_size": 8, "kv_lengths": lengths}
    return native_sparse_attention(X, X, X, GATE, GATE, **options, mesh=MESH, in_specs=BATCH)


@pytest.fixture
def compiled(monkeypatch):
    """The programs that were compiled, by number."""
    programs, listening = [], [True]

    def listener(event: str, duration_secs: float, **_: object) -> None:
        if listening[0] and event.endswith("backend_compile_duration"):
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield programs
    listening[0] = False


@pytest.mark.parametrize("call", [flash, ring, sparse], ids=lambda call: call.__name__)
def test_other_lengths_compile_nothing(call, compiled):
    call(20)
    assert compiled
    compiled.clear()
    call(9)
    assert not compiled


def test_a_setting_is_another_program(compiled):
    flash(20)
    compiled.clear()
    with use_config("flash_attention", {"block_q": 16, "block_k": 8}), deterministic():
        flash(20)
    assert compiled


def test_a_config_that_is_a_dict_runs():
    told = flash_attention(X, X, X, mesh=MESH, in_specs=BATCH, cfg={"block_q": 16, "block_k": 8})
    np.testing.assert_allclose(told, flash_attention(X, X, X), atol=1e-6)

"""Memory does not grow with T x S, and what varies from step to step does not recompile."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax.reference import reference
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.modules import flash_attention
from ejkernel.types import BlockPattern, MaskInfo
from harness import normal

LONG = 2048
TILES = {"block_q": 128, "block_k": 128}


def compiled_memory(T, function, grad=True):
    """Bytes of scratch that XLA reserves for a function of q, k, v of length T."""
    q = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)

    def loss(q, k, v):
        return function(q, k, v).sum()

    program = jax.grad(loss, (0, 1, 2)) if grad else loss
    return jax.jit(program).lower(q, q, q).compile().memory_analysis().temp_size_in_bytes


MASKS = {
    "causal": lambda T: {"causal": True},
    "window": lambda T: {"sliding_window": 64},
    "segments": lambda T: {"mask_info": MaskInfo.from_segments(jnp.arange(T)[None] // 100)},
    "pattern": lambda T: {"mask_info": MaskInfo.from_block_pattern(
        BlockPattern.local_stride(2, T // 64, 2, 4, block_size=64), q_len=T)},
    "dropout": lambda T: {"dropout_prob": 0.1, "dropout_seed": 0},
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
def test_training_memory_is_far_below_the_matrix_of_logits(mask):
    matrix = 2 * LONG * LONG * 4
    used = compiled_memory(LONG, lambda q, k, v: flash_attention(q, k, v, cfg=TILES, **MASKS[mask](LONG)))
    assert used < matrix / 8, f"{used / matrix:.2f} of the matrix of logits"


def test_memory_grows_with_the_length_not_its_square():
    short, long = (compiled_memory(n, lambda *x: flash_attention(*x, causal=True, cfg=TILES)) for n in (LONG, 4 * LONG))
    assert long < 5 * short


def test_memory_is_a_small_part_of_the_definition():
    ours = compiled_memory(LONG, lambda *x: flash_attention(*x, causal=True, cfg=TILES))
    naive = compiled_memory(LONG, lambda *x: reference(canonicalise(*x, causal=True))["out"])
    assert ours * 15 < naive


# Compilations --------------------------------------------------------------------------------------------------

T = 24
Q, K, V = (normal(name, (2, T, 2, 8)) for name in "qkv")
SMALL = {"block_q": 8, "block_k": 8}


class Compilations:
    """How often XLA has compiled since the last `clear`."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, duration, **others):
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def clear(self):
        self.count = 0


@pytest.fixture(scope="module")
def compilations():
    return Compilations()


VARYING = {
    "lengths": (
        lambda x: flash_attention(Q, K, V, mask_info=MaskInfo.from_lengths(x, q_len=T), causal=True, cfg=SMALL),
        [[3, 24], [24, 1], [0, 0]],
    ),
    "kv-lengths": (
        lambda x: flash_attention(Q, K, V, mask_info=MaskInfo(T, T).apply_kv_lengths(x), cfg=SMALL),
        [[3, 24], [24, 1], [0, 0]],
    ),
    "segments": (
        lambda x: flash_attention(Q, K, V, mask_info=MaskInfo.from_segments(x), causal=True, cfg=SMALL),
        [np.arange(T)[None] // 5, np.arange(T)[None] % 3, np.full((1, T), -1)],
    ),
    "cum_seqlens": (
        lambda x: flash_attention(Q[0], K[0], V[0], cum_seqlens_q=x, causal=True, cfg=SMALL),
        [[0, 4, 20], [0, 12, 24], [0, 0, 0]],
    ),
    "cum_seqlens_k": (
        lambda x: flash_attention(Q[0], K[0], V[0], cum_seqlens_q=jnp.array([0, 4, 20]), cum_seqlens_k=x, cfg=SMALL),
        [[0, 4, 20], [0, 12, 24], [0, 0, 0]],
    ),
    "dropout_seed": (
        lambda x: flash_attention(Q, K, V, dropout_prob=0.2, dropout_seed=x, cfg=SMALL),
        [1, 2, 3],
    ),
    "pattern": (
        lambda x: flash_attention(Q, K, V, cfg=SMALL, mask_info=MaskInfo.from_block_pattern(
            BlockPattern.from_dense(x, block_size=8), q_len=T)),
        [np.eye(3, dtype=bool), np.ones((3, 3), bool), np.zeros((3, 3), bool)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARYING)
def test_what_varies_does_not_recompile_a_training_step(name, compilations):
    function, values = VARYING[name]
    traces = []

    def step(x):
        traces.append(name)
        return function(x)

    compiled = jax.jit(step)
    values = [jnp.asarray(x) for x in values]
    results = [compiled(values[0])]
    compilations.clear()
    results += [compiled(x) for x in values[1:]]
    assert len(traces) == 1 and compilations.count == 0
    assert not np.array_equal(results[0], results[1])


@pytest.mark.parametrize("name", ["lengths", "cum_seqlens", "dropout_seed"])
def test_what_varies_does_not_recompile_a_plain_call(name, compilations):
    """Not under jit: the second call finds everything compiled."""
    function, values = VARYING[name]
    values = [jnp.asarray(x) for x in values]
    function(values[0])
    function(values[1])
    compilations.clear()
    function(values[2])
    assert compilations.count == 0


def test_a_gradient_outside_jit_compiles_once(compilations):
    gradient = jax.grad(lambda q: flash_attention(q, K, V, cfg=SMALL).sum())
    gradient(Q)
    gradient(Q + 1)
    compilations.clear()
    gradient(Q + 2)
    assert compilations.count == 0


def test_mask_info_as_an_argument_does_not_retrace():
    traces = []

    @jax.jit
    def step(mask):
        traces.append(mask)
        return flash_attention(Q, K, V, mask_info=mask, cfg=SMALL)

    for ids in VARYING["segments"][1]:
        step(MaskInfo.from_segments(jnp.asarray(ids)).apply_causal())
    assert len(traces) == 1


def test_the_schedule_of_a_causal_call_is_a_constant():
    """No device work for closed forms: the program holds no sort and no reduction to booleans."""
    text = jax.jit(lambda q: flash_attention(q, K, V, causal=True, cfg=SMALL)).lower(Q).as_text()
    assert "stablehlo.sort" not in text


def test_the_gradient_of_a_sum_compiles_as_fast_as_others():
    """It begins with ones, a constant: XLA must not compute with so many of them while it compiles."""
    q = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.float32)

    def seconds(loss):
        start = time.process_time()
        jax.jit(jax.grad(lambda q: loss(flash_attention(q, q, q, causal=True, platform="xla")))).lower(q).compile()
        return time.process_time() - start

    of_squares = seconds(lambda out: (out * out).sum())
    assert seconds(jnp.sum) < 2 * of_squares

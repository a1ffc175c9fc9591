"""Example inputs, the logger, questions about the device, and the bookkeeping of packed sequences."""

import itertools
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejgpu import utils, xla_utils

# Example inputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("equal", [False, True])
def test_varlen_inputs_say_where_each_sequence_begins(equal):
    q, k, v, metadata = utils.varlen_input_helper(5, 4, 2, 103, 57, 16, "bfloat16", equal)
    for x, cu, longest, limit in (
        (q, metadata.cu_seqlens_q, metadata.max_seqlens_q, 103 // 5),
        (k, metadata.cu_seqlens_k, metadata.max_seqlens_k, 57 // 5),
    ):
        lengths = np.diff(cu)
        assert cu[0] == 0 and cu[-1] == len(x) and len(lengths) == 5
        assert lengths.min() >= 1 and lengths.max() == longest <= limit
        assert not equal or (lengths == limit).all()
    assert q.dtype == "bfloat16" and q.shape[1:] == (4, 16) and v.shape == k.shape == (len(k), 2, 16)
    assert (metadata.layout, metadata.sm_scale) == ("thd", 0.25)


def test_varlen_inputs_need_a_token_per_sequence():
    with pytest.raises(ValueError, match="qseqlen=3 must be at least 4"):
        utils.varlen_input_helper(4, 1, 1, 3, 8, 8)


def test_numbers_differ_from_call_to_call_and_repeat_by_seed():
    a, b = utils.numeric_gen(4, 5), utils.numeric_gen(4, 5)
    assert a.dtype == jnp.float16 and a.shape == (4, 5) and (a != b).any()
    one, other = (utils.numeric_gen(3, dtype=jnp.float32, method="uniform", seed=7) for _ in range(2))
    assert (one == other).all() and ((one >= 0) & (one < 1)).all()
    with pytest.raises(ValueError, match=r"method 'nothing' is not a function of jax\.random"):
        utils.numeric_gen(3, method="nothing")


def test_block_indices_are_past_blocks_in_order():
    indices = np.asarray(utils.generate_block_indices(2, 70, 3, 4, 16, seed=1))
    assert indices.shape == (2, 70, 3, 4) and indices.dtype == np.int32
    token_block = np.arange(70)[None, :, None, None] // 16
    real = indices < 70
    assert (indices[real] <= np.broadcast_to(token_block, indices.shape)[real]).all()
    assert (indices == token_block).any(-1).all()  # every token sees its own block
    assert (real.sum(-1) == np.minimum(token_block[..., 0] + 1, 4)).all()
    differences = np.diff(indices, axis=-1)
    assert (differences[real[..., 1:]] > 0).all() and (indices[~real] == 70).all()
    assert (indices != np.asarray(utils.generate_block_indices(2, 70, 3, 4, 16, seed=2))).any()
    assert utils.generate_block_indices(1, 8, 1, 5, 16).tolist() == [[[[0, 8, 8, 8, 8]]] * 8]


# Logging ------------------------------------------------------------------------------------------------------


def test_a_logger_is_made_by_its_first_message(capsys):
    logger = utils.get_logger("ejgpu.test_first", "WARNING")
    assert "ejgpu.test_first" not in logging.Logger.manager.loggerDict
    logger.info("not %s", "shown")
    logger.warning("%d tokens", 5)
    error = capsys.readouterr().err
    assert "5 tokens" in error and "shown" not in error and "WARNING" in error
    assert len(logger.handlers) == 1 and len(utils.get_logger("ejgpu.test_first").logger.handlers) == 1


@pytest.mark.parametrize("forced", [False, True])
def test_it_has_colours_on_a_terminal_alone(monkeypatch, capsys, forced):
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    utils.get_logger(f"ejgpu.test_colours_{forced}").warning("hello")
    error = capsys.readouterr().err
    assert "hello" in error and ("\x1b[" in error) == forced


# The device ---------------------------------------------------------------------------------------------------


def test_this_device():
    info = utils.device_info()
    assert info.backend == jax.default_backend() and info.count == jax.device_count()
    if info.backend == "cpu":
        assert not (utils.is_cuda() or utils.is_hip() or utils.is_cdna() or utils.is_rdna())


@pytest.mark.parametrize(
    ("capability", "answers"),
    [
        ("9.0", (True, False, False, False)),
        ("gfx942", (False, True, True, False)),
        ("gfx90a", (False, True, True, False)),
        ("gfx906", (False, True, False, False)),
        ("gfx1100", (False, True, False, True)),
    ],
)
def test_other_devices(monkeypatch, capability, answers):
    device = SimpleNamespace(
        platform="gpu", device_kind="A GPU", compute_capability=capability, memory_stats=lambda: {"bytes_limit": 80}
    )
    monkeypatch.setattr(utils, "default_device", lambda: device)
    monkeypatch.setattr(jax, "device_count", lambda backend: 1)
    assert (utils.is_cuda(), utils.is_hip(), utils.is_cdna(), utils.is_rdna()) == answers
    assert utils.device_info().memory == 80 and utils.device_info().kind == "a_gpu"


# Packed sequences ---------------------------------------------------------------------------------------------


def starts(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


@pytest.mark.parametrize("lengths", [[3, 0, 7], [0, 8, 0]])
def test_positions_are_those_of_a_loop(lengths):
    cu, size = starts(lengths), 4
    tokens = [[row, position] for row, n in enumerate(lengths) for position in range(n)]
    chunks = [[row, number] for row, n in enumerate(lengths) for number in range(-(-n // size))]
    assert xla_utils.prepare_lens(cu).tolist() == lengths
    assert xla_utils.prepare_token_indices(cu).tolist() == tokens
    assert xla_utils.prepare_sequence_ids(cu).tolist() == [row for row, _ in tokens]
    assert xla_utils.prepare_position_ids(cu).tolist() == [position for _, position in tokens]
    assert xla_utils.prepare_chunk_indices(cu, size).tolist() == chunks
    counts = [-(-n // size) for n in lengths]
    assert xla_utils.prepare_chunk_offsets(cu, size).tolist() == starts(counts).tolist()
    mask = np.arange(9)[None] < np.array(lengths)[:, None]
    assert xla_utils.prepare_cu_seqlens_from_mask(mask).tolist() == cu.tolist()


def test_positions_under_jit_need_the_number_of_tokens():
    cu = jnp.array([0, 2, 5])
    ids = jax.jit(lambda cu: xla_utils.prepare_token_indices(cu, total=7))(cu)
    assert ids.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [-1, 0], [-1, 0]]
    chunks = jax.jit(lambda cu: xla_utils.prepare_chunk_indices(cu, 2, total=4))(cu)
    assert chunks.tolist() == [[0, 0], [1, 0], [1, 1], [-1, 0]]
    with pytest.raises(ValueError, match="not known while tracing: give total="):
        jax.jit(xla_utils.prepare_position_ids)(cu)


def by_loop(x, spans, reverse):
    """Cumulative sums of x (T, ...) within each span of tokens, zeros elsewhere."""
    out = np.zeros_like(x)
    for a, b in spans:
        out[a:b] = x[a:b][::-1].cumsum(0)[::-1] if reverse else x[a:b].cumsum(0)
    return out


@pytest.mark.parametrize(
    ("reverse", "head_first", "packed", "trailing"),
    [(False, False, False, (3,)), (True, False, True, (3, 2)), (False, True, True, (3,)), (True, True, False, (3, 2))],
)
def test_sums(reverse, head_first, packed, trailing):
    T, size = 11, 4
    cu = starts([5, 0, 4]) if packed else np.array([0, T])
    x = np.random.default_rng(0).standard_normal((1 if packed else 2, T, *trailing))
    mine = jnp.asarray(x.swapaxes(1, 2) if head_first else x, jnp.float32)
    options = {"reverse": reverse, "head_first": head_first, "scale": 0.5, "cu_seqlens": cu if packed else None}
    sequences = list(itertools.pairwise(cu))
    chunks = [(a, min(a + size, end)) for start, end in sequences for a in range(start, end, size)]
    for sums, spans in (
        (xla_utils.chunk_local_cumsum(mine, size, **options), chunks),
        (xla_utils.chunk_global_cumsum(mine, **options), sequences),
    ):
        sums = np.asarray(sums).swapaxes(1, 2) if head_first else sums
        right = np.stack([0.5 * by_loop(row, spans, reverse) for row in x])
        np.testing.assert_allclose(sums, right, atol=1e-5)


def test_sums_never_cross_and_keep_infinities_to_themselves():
    x = jnp.array([1.0, -jnp.inf, 2.0, 3.0, jnp.nan]).reshape(1, 5, 1)
    cu = jnp.array([0, 2, 4])
    sums = jax.jit(lambda x: xla_utils.chunk_global_cumsum(x, cu_seqlens=cu))(x)
    assert sums.ravel().tolist() == [1.0, -np.inf, 2.0, 5.0, 0.0]
    gradient = jax.grad(lambda x: xla_utils.chunk_global_cumsum(x, cu_seqlens=cu)[0, 3, 0])(jnp.ones((1, 5, 1)))
    assert gradient.ravel().tolist() == [0.0, 0.0, 1.0, 1.0, 0.0]


def test_sums_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="cu_seqlens packs sequences into one row, got batch 2"):
        xla_utils.chunk_global_cumsum(jnp.ones((2, 4, 1)), cu_seqlens=jnp.array([0, 4]))
    with pytest.raises(ValueError, match=r"expected \(B, T, H\)"):
        xla_utils.chunk_local_cumsum(jnp.ones((2, 4)), 2)
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        xla_utils.chunk_local_cumsum(jnp.ones((2, 4, 1)), 0)

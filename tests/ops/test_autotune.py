"""autotune measures the search space, uses the winner at once, and keeps it."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.paged import xla as paged_xla
from ejkernel.kernels.paged.spec import dimensions
from ejkernel.kernels.softmax import xla
from ejkernel.kernels.softmax.operations import bucket
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.modules import flash_attention, page_attention
from ejkernel.ops import TunedConfigs, autotune, explain, get_operation, list_operations, tuning
from ejkernel.ops.tuned_files import user_file
from ejkernel.ops.tuning_session import active

Q = jnp.ones((1, 32, 2, 8))
FAST, SLOW, DEFAULT = xla.Config(16, 16), xla.Config(8, 8), xla.default_config(canonicalise(Q, Q, Q))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Three candidates whose times are made up; the configs measured, in order."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(xla.IMPLEMENTATION, "search_space", lambda call: [SLOW, FAST, SLOW])
    seen = []

    def measure(operation, implementation, call, config, arrays):
        assert not any(isinstance(x, jax.core.Tracer) for x in arrays.values())
        seen.append(config)
        return {FAST: (1e-6, 4e-6), SLOW: (3e-6, 8e-6)}.get(config, (1e-6, 5e-6))

    monkeypatch.setattr(tuning, "_measure", measure)
    return seen


@pytest.mark.parametrize(("T", "sizes"), [(1, [128]), (129, [128, 256]), (5000, [128, 256, 512, 1024])])
def test_tiles_beyond_the_length_are_not_measured(T, sizes):
    """A tile that holds the whole length does as much as any larger one."""
    query, key = (jnp.ones((1, n, 2, 8)) for n in (T, 64))
    found = xla.search_space(canonicalise(query, key, key))
    assert [(c.block_q, c.block_k) for c in found] == [(n, 128) for n in sizes]


def test_the_winner_is_kept(measured):
    with autotune(progress=False):
        flash_attention(Q, Q, Q)
    assert measured == [DEFAULT, SLOW, FAST]  # each once
    kept = TunedConfigs.load(user_file("cpu"))
    where = "flash_attention", bucket(canonicalise(Q, Q, Q))
    assert xla.Config(**kept.find(*where, "xla")) == FAST
    assert kept.times(*where) == {"xla": pytest.approx(1.0)}
    assert kept.times(*where, gradient=True) == {"xla": pytest.approx(3.0)}
    assert explain(flash_attention, Q, Q, Q).config == FAST
    assert explain(flash_attention, Q, Q, Q).config_source == "the user's tuned file"


def test_measured_once_per_bucket(measured):
    with autotune(progress=False):
        flash_attention(Q, Q, Q)
        flash_attention(Q[:, :20], Q[:, :20], Q[:, :20])
        assert len(measured) == 3
        flash_attention(Q, Q, Q, causal=True)
        assert len(measured) == 6


def test_without_save_nothing_is_written(measured):
    with autotune(save=False, progress=False):
        flash_attention(Q, Q, Q)
    assert len(measured) == 3 and not user_file("cpu").exists()
    assert explain(flash_attention, Q, Q, Q).config_source == "default"


@pytest.mark.parametrize("obstacle", ["a file in the way", "a read-only folder", "a full disk"])
def test_a_save_that_fails_keeps_the_winner_in_memory(obstacle, measured, monkeypatch, tmp_path):
    folder = user_file("cpu").parent
    if obstacle == "a file in the way":
        folder.write_text("")
    else:
        code = errno.ENOSPC if obstacle == "a full disk" else errno.EROFS
        monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(code, os.strerror(code))))
    with autotune(progress=False):
        with pytest.warns(UserWarning, match="could not be saved"):
            flash_attention(Q, Q, Q)
        flash_attention(Q, Q, Q)
    assert len(measured) == 3
    told = explain(flash_attention, Q, Q, Q)
    assert told.config == FAST and told.config_source == "tuned in this process, not saved"
    assert {p.name for p in tmp_path.rglob("*")} <= {"tuned", "cpu.json.lock"}


def test_what_was_measured_is_told(measured):
    with autotune(progress=False) as found:
        flash_attention(Q, Q, Q)
    (one,) = found
    assert (one.operation, one.platform, one.best, one.default) == ("flash_attention", "xla", FAST, DEFAULT)
    assert one.seconds[SLOW] == (3e-6, 8e-6) and one.entry("other").find("other", one.bucket, "xla")["block_q"] == 16


def test_what_the_file_has_is_not_measured_unless_asked(measured):
    with autotune(progress=False):
        flash_attention(Q, Q, Q)
    with autotune(progress=False, again=False) as found:
        flash_attention(Q, Q, Q)
        assert not found and len(measured) == 3
        flash_attention(Q, Q, Q, causal=True)
    assert len(found) == 1 and len(measured) == 6


def test_a_config_that_fails_is_passed_over(measured, monkeypatch):
    made_up = tuning._measure

    def measure(operation, implementation, call, config, arrays):
        if config in broken:
            raise MemoryError("too large")
        return made_up(operation, implementation, call, config, arrays)

    monkeypatch.setattr(tuning, "_measure", measure)
    broken = [FAST, DEFAULT]
    with autotune(progress=False) as found:
        flash_attention(Q, Q, Q)
    assert found[0].best == SLOW and found[0].failed == dict.fromkeys(broken, "MemoryError: too large")
    broken = [FAST, DEFAULT, SLOW]
    with autotune(progress=False), pytest.raises(RuntimeError, match="no config of flash_attention on xla could be"):
        flash_attention(Q, Q, Q)


def test_the_winner_is_used_at_once(measured):
    def run(q):
        return flash_attention(q, q, q)

    with autotune(save=False, progress=False):
        text = jax.jit(run).lower(Q).as_text()
    assert "tensor<16x16xf32>" in text and "tensor<32x32xf32>" not in text


def test_an_explicit_config_is_not_tuned(measured):
    with autotune(progress=False):
        flash_attention(Q, Q, Q, cfg={"block_q": 8})
    assert not measured


def test_explain_does_not_tune(measured):
    with autotune(progress=False):
        explain(flash_attention, Q, Q, Q)
    assert not measured


def test_nothing_tunes_unasked(measured):
    flash_attention(Q, Q, Q)
    assert not measured


def test_autotune_ends_with_an_error(measured):
    with pytest.raises(ZeroDivisionError), autotune(progress=False):
        _ = 1 / 0
    assert not active()


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_when_asked(measured, progress, capsys):
    with autotune(save=False, progress=progress):
        flash_attention(Q, Q, Q)
    assert ("tuning flash_attention on xla" in capsys.readouterr().out) == progress


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_for_real(compiled, monkeypatch, tmp_path):
    """Two candidates, truly measured, forward and backward; inside jit on random arrays."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(xla.IMPLEMENTATION, "search_space", lambda call: [xla.Config(16, 16)])
    monkeypatch.setattr(tuning, "REPEATS", 1)

    def run(q):
        return flash_attention(q, q, q, causal=True)

    with autotune(progress=False):
        got = (jax.jit(run) if compiled else run)(Q)
    np.testing.assert_allclose(got, 1.0, rtol=1e-6)
    entries = TunedConfigs.load(user_file("cpu")).entries["flash_attention"]
    (entry,) = entries.values()
    assert entry["xla"]["microseconds"] > 0 and xla.Config(**entry["xla"]["config"])


def test_what_is_measured_is_computed_when_it_is(monkeypatch):
    """Arrays that a program holds as constants XLA may compute with while it compiles: all of them are arguments."""
    given = []
    monkeypatch.setattr(paged_xla.IMPLEMENTATION, "search_space", lambda call: [])
    monkeypatch.setattr(tuning, "median_seconds", lambda step, *args: given.append(step.lower(*args)) or 1.0)
    pages, lens, table = jnp.ones((4, 8, 2, 8)), jnp.array([8, 8]), jnp.arange(4).reshape(2, 2)
    with autotune(save=False, progress=False):
        page_attention(jnp.ones((2, 4, 8)), pages, pages, lens, table)
    (program,) = given
    assert len(jax.tree.leaves(program.in_avals)) == 5


def test_median_seconds_repeats():
    calls = []
    assert tuning.median_seconds(lambda: calls.append(1), repeats=3) >= 0
    assert len(calls) == 4  # one to warm up


@pytest.mark.parametrize("name", list_operations())
def test_an_example_is_a_full_and_legal_call(name):
    """Zeros for lengths would tune attention over nothing."""
    operation = get_operation(name)
    for call in operation.probes().values():
        drawn = operation.example(call)
        assert {n: x.shape for n, x in drawn.items()} == {n: x.shape for n, x in call.arrays.items()}
        assert all(x.dtype == call[n].dtype for n, x in drawn.items())
        if "context_lens" in drawn:
            dims = dimensions(call)
            assert (drawn["context_lens"] == dims.S).all()
        if "block_tables" in drawn:
            pages = call["kv_pages" if "kv_pages" in call else "key_pages"].shape[1]
            assert (drawn["block_tables"] >= 0).all() and (drawn["block_tables"] < pages).all()
        if "query_start" in drawn:
            assert drawn["query_start"][0, -1] == dims.T and (drawn["num_seqs"] == dims.N).all()
        if "cu_seqlens" in drawn:
            assert drawn["cu_seqlens"][0, -1] == call["x" if "x" in call else "query"].shape[1]


def test_inside_jit_an_example_is_measured(measured, monkeypatch):
    seen = []

    def measure(operation, implementation, call, config, arrays):
        seen.append(arrays)
        return (1e-6,)

    monkeypatch.setattr(tuning, "_measure", measure)
    cache, table = jnp.ones((8, 16, 2, 16)), jnp.zeros((2, 3), jnp.int32)
    with autotune(save=False, progress=False):
        jax.jit(page_attention)(jnp.ones((2, 4, 16)), cache, cache, jnp.array([20, 0]), table)
    assert seen[0]["context_lens"].tolist() == [[48, 48]]
    assert seen[0]["block_tables"].tolist() == [[[0, 1, 2], [3, 4, 5]]]

"""The TPU kernel in Pallas's interpreter: what the shared cases do not reach, and what it refuses.

Every case runs with race detection, in memory that starts as nan.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # no public word on races yet
from jax.experimental import pallas as pl

from ejkernel.kernels.common.pallas_tpu import CHIPS
from ejkernel.kernels.paged import pallas_tpu, ragged
from ejkernel.kernels.paged.calls import page_call
from ejkernel.kernels.paged.operations import page_structs
from ejkernel.kernels.paged.pallas_tpu.kernel import Blocks
from ejkernel.kernels.paged.reference import reference
from ejkernel.modules import cascade_attention, page_attention
from ejkernel.ops import Target, interpret
from harness import normal
from harness.paged import CASES, MIXED, MIXED_LENGTHS, Case, check_case
from harness.platforms import Platform
from tolerances import assert_close

INTERPRETED = Platform("pallas", interpreted=True, tiles=True)
V5E = Target("tpu", "tpu_v5_lite", "tpu")
HALF = {"dtype": "bfloat16"}

# each key head multiplied on its own, in blocks of fewer tokens than a page too
APART = (
    Case("mixed-window-sinks", kind="ragged", queries=MIXED, lengths=MIXED_LENGTHS, rows=50, sinks=1,
         options={"sliding_window": 11}, **HALF),
    Case("interleaved-heads-first", kind="ragged", queries=MIXED, lengths=MIXED_LENGTHS, H=6, Hkv=3),
    Case("e4m3", kind="ragged", queries=(9, 1), lengths=(20, 17), Hkv=4, cache="float8_e4m3fn", scales=True, **HALF),
    Case("tokens-40-24", queries=3, lengths=(37, 3), D=40, Dv=24, scales=True, **HALF),
    Case("contiguous", kind="contiguous", lengths=(37, 20, 64), starts=(5, 20, 33)),
    Case("contiguous-heads-first", kind="contiguous", H=3, Hkv=1, lengths=(37, 61), starts=(5, 20), L=61, width=1,
         **HALF),
)  # fmt: skip


@pytest.mark.parametrize("case", APART, ids=lambda case: case.id)
def test_heads_multiplied_one_by_one(case):
    check_case(case, INTERPRETED, cfg={"block_q": 4, "block_k": 32, "joined_rows": 0})


def test_two_cores(monkeypatch):
    """Cores take tiles by turns, each with its own chain of copies; no races, and the same bits every time."""
    monkeypatch.setattr(pallas_tpu, "chip_of", lambda target: CHIPS["tpu_v4"])
    case = next(case for case in CASES if case.id == "several-tokens")
    arrays = case.arrays()
    call = page_call(**arrays, return_lse=True).on(Target("cpu", "cpu", "cpu", interpreted=True))
    config = pallas_tpu.Config(block_q=2, block_k=32)
    assert pallas_tpu._kernel(call, config).cores == 2
    run = jax.jit(lambda arrays: pallas_tpu.IMPLEMENTATION.forward(replace(call, arrays=arrays), config)[0])
    outputs = run(call.arrays)
    assert_close(outputs, case.expected()[0])
    for name, again in run(call.arrays).items():
        np.testing.assert_array_equal(again, outputs[name])
    assert interpreter.races is not None and not interpreter.races.races_found
    assert pallas_tpu._kernel(page_structs(N=1), config).splits == 2  # a lone tile is for both
    assert pallas_tpu._kernel(page_structs(N=2), config).splits == 1


@pytest.mark.parametrize("joined_rows", [0, 128])
def test_own_nan_shows_where_it_is_seen(joined_rows):
    """In its head, to queries from its token on, though a product over all keys would spread it."""
    H, Hkv, D, L = 4, 2, 16, 8
    key, value = (normal(name, (6, L, Hkv, D)) for name in ("key", "value"))
    key, value = key.at[5, 2, 0].set(jnp.nan), value.at[3, 7, 1].set(jnp.nan)
    given = normal("query", (2, 3, H, D)), key, value, jnp.array([16, 19]), jnp.array([[0, 3, 9], [2, 1, 5]])
    exact = reference(page_call(*given))
    assert np.isnan(exact["out"]).any() and not np.isnan(exact["out"]).all()
    with interpret():
        cfg = {"block_q": 3, "block_k": 16, "joined_rows": joined_rows}
        out = jax.jit(lambda *a: page_attention(*a, platform="pallas", cfg=cfg))(*given)
    assert_close({"out": out.reshape(1, 6, H, D)}, {"out": exact["out"]})


def test_parts():
    """Seed 003's functions and a shared prefix need the softmax in parts."""
    query, key, value = normal("query", (2, 4, 16)), normal("key", (2, 50, 2, 16)), normal("value", (2, 50, 2, 16))
    lengths, starts = jnp.array([50, 20]), jnp.array([7, 20])
    pages = [x.reshape(10, 10, 2, 16) for x in (key, value)]
    tables = jnp.array([[0, 1, 2], [0, 1, 7]])

    def both(platform):
        parts = ragged._ragged(query, key, value, lengths, starts, 16, ragged.MASK_VALUE)
        out = cascade_attention(query, *pages, jnp.array([27, 23]), tables, 15, platform=platform)
        return dict(zip("omlc", (*parts, out), strict=True))

    expected = both("xla")
    with interpret(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(ragged.RAGGED_DECODE_ATTENTION.preference, "cpu", ("pallas",))
        outputs = both("pallas")
    finite = [{n: np.maximum(x, -1e30) for n, x in side.items()} for side in (outputs, expected)]
    for name in "omlc":
        assert_close({name: finite[0][name]}, {name: finite[1][name]})


# Blocks -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, 40))
def test_every_key_is_in_one_block(page, width, block_k):
    """In the block that `index` says, within a copy that stays in its page."""
    dims = pallas_tpu.dimensions(page_structs())._replace(L=page, W=width)
    blocks = pallas_tpu._blocks(dims, block_k, False)
    owners: dict[int, list[int]] = {}
    for j in range(int(blocks.index(page * width - 1)) + 1):
        block = blocks.at(j)
        assert 0 <= block.offset <= page - blocks.copied
        assert block.base <= block.low and block.high <= block.base + blocks.size
        assert block.base == block.slot * page + block.offset
        for key in range(int(block.low), min(int(block.high), page * width)):
            owners.setdefault(key, []).append(j)
    assert owners == {key: [int(blocks.index(key))] for key in range(page * width)}


def test_sub_pages_with_heads_first_keep_to_tiles_of_memory():
    dims = pallas_tpu.dimensions(page_structs())._replace(L=1024, W=1)
    assert pallas_tpu._blocks(dims, 500, True) == Blocks(1024, 256, 1)
    assert pallas_tpu._blocks(dims._replace(L=1000), 500, True) == Blocks(1000, 1000, 1)


# What does not fit ---------------------------------------------------------------------------------------------


def test_refusals():
    def reasons(**options):
        return pallas_tpu.unsupported(page_structs(**options).on(V5E))

    assert reasons() == []
    assert reasons(dtype="float16") == ["a float16 cache: a TPU has no float16 to load, use bfloat16"]
    assert reasons(dtype="float16", cache="int8", num_splits=4) == []


def test_large_tables_are_refused_with_the_arithmetic():
    (reason,) = pallas_tpu.unsupported(page_structs(N=64, W=4096).on(V5E))
    assert "a page table of 1 x 64 x 4096 entries" in reason
    assert "needs 1025 KiB of scalar memory, 512 are to spare; larger pages need less" in reason


def test_configs_that_do_not_fit():
    call = page_structs(tokens=512, H=32, Hkv=8, D=128).on(replace(V5E, kind="tpu_v4"))
    assert pallas_tpu.unsupported_config(call, pallas_tpu.default_config(call)) == []
    (reason,) = pallas_tpu.unsupported_config(call, pallas_tpu.Config(block_q=512, block_k=2048))
    assert reason.startswith("Config(block_q=512, ") and "MiB of VMEM, v4 has 14.0" in reason
    assert all(not pallas_tpu.unsupported_config(call, config) for config in pallas_tpu.search_space(call))


@pytest.mark.parametrize("fields", [{"block_q": 0}, {"block_k": 1.5}, {"joined_rows": -1}])
def test_configs_check_themselves(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"{name}=.* must be an int from"):
        pallas_tpu.Config(**fields)


def test_cost():
    """Keys and values once, queries and outputs once, two products."""
    call = page_structs(H=8, Hkv=2, D=64, L=16).on(V5E)
    cost = pallas_tpu.cost(call)
    assert isinstance(cost, pl.CostEstimate)
    assert cost.flops == 4 * 4 * 8 * 128 * 64  # of 4 queries, 8 heads, 128 keys
    assert cost.bytes_accessed == 4 * 128 * 2 * 128 * 2 + 2 * 4 * 8 * 64 * 2

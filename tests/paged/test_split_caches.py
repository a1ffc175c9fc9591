"""Decoding from a cache that is split over devices, by pages or along its length, gives what one device gives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import decode_attention, page_attention, ragged_decode_attention, ragged_page_attention
from harness import normal
from tolerances import assert_close

N, H, HKV, D, L, W, PAGES = 4, 4, 2, 8, 4, 6, 16
LENS = jnp.array([20, 0, 7, 24])
# pages of several sequences, some of them shared, on all devices
TABLE = jnp.asarray(np.random.default_rng(0).integers(0, PAGES, (N, W)).astype(np.int32))


def mesh_of(kind=AxisType.Auto):
    return Mesh(np.asarray(jax.devices("cpu")[:8]).reshape(2, 4), ("tp", "cache"), axis_types=(kind, kind))


def caches(*names, first=(PAGES, L)):
    return {name: normal(name, (*first, HKV, D)) for name in names}


def agree(function, given, specs, **options):
    mesh = mesh_of()
    split = jax.jit(lambda a: function(**a, **options, return_lse=True, mesh=mesh, in_specs=specs))
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in given.items()}
    program = split.lower(placed).compile()
    # keys and values stay where they are: what is exchanged is sums
    assert not re.search(r"\b(all-gather|all-to-all|collective-permute)(-start)?\(", program.as_text())
    whole = jax.jit(lambda a: function(**a, **options, return_lse=True))(given)
    assert_close(*({str(i): x for i, x in enumerate(outputs)} for outputs in (program(placed), whole)))


PAGED = {"key_cache": P("cache", None, "tp"), "value_cache": P("cache", None, "tp")}
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "cap": {"logits_soft_cap": 3.0},
    "chunk": {"chunk_size": 9},
}
# which `jit` traces
TRACED = {"chunk": {"sliding_window": jnp.int32(5), "logits_soft_cap": jnp.float32(3.0)}}


@pytest.mark.parametrize("name", OPTIONS)
def test_pages(name):
    given = {
        "query": normal("query", (N, H, D)),
        **caches("key_cache", "value_cache"),
        "softmax_aux": normal("s", (H,)),
    }
    specs = {"query": P(None, "tp"), **PAGED}
    given |= {"context_lens": LENS, "block_tables": TABLE, **TRACED.get(name, {})}
    agree(page_attention, given, specs, **OPTIONS[name])


def test_pages_and_several_tokens():
    """Each token sees one key more than the one before; what a table does not use may be anything, pages too."""
    query, lens = normal("query", (N, 3, H, D)), jnp.array([20, 3, 7, 24])
    table = TABLE.at[2, 2:].set(99)
    used = np.unique(np.concatenate([np.asarray(row)[: -(-n // L)] for row, n in zip(table, lens, strict=True)]))
    given = caches("key_cache", "value_cache")
    unused = np.setdiff1d(np.arange(PAGES), used)
    given = {name: x.at[unused].set(jnp.nan) for name, x in given.items()}
    given |= {"query": query, "context_lens": lens, "block_tables": table}
    agree(page_attention, given, {"query": P(None, None, "tp"), **PAGED}, sliding_window=9)


def test_flat_buffers():
    given = {"query": normal("query", (N, H, D)), **caches("key_buffer", "value_buffer", first=(PAGES * L,))}
    given |= {"req_to_tokens": TABLE, "seq_lens": LENS}
    specs = {"query": P(None, "tp"), "key_buffer": P("cache", "tp"), "value_buffer": P("cache", "tp")}
    agree(decode_attention, given, specs, page_size=L)


@pytest.mark.parametrize("window", [None, 5])
def test_length(window):
    """Starts and ends on different devices; one sequence is empty, and nan behind an end is not read."""
    given = caches("key", "value", first=(N, 24))
    given = {n: x.at[2, 7:].set(jnp.nan) for n, x in given.items()} | {"query": normal("query", (N, H, D))}
    given |= {"sequence_start": jnp.array([3, 0, 1, 13]), "sequence_end": LENS, "softmax_aux": normal("s", (H, 2))}
    specs = {"query": P(None, "tp"), "key": P(None, "cache", "tp"), "value": P(None, "cache", "tp")}
    agree(ragged_decode_attention, given, specs, sliding_window=window)


def test_over_explicit_axes():
    mesh = mesh_of(AxisType.Explicit)
    given = caches("key", "value", first=(N, 24)) | {"query": normal("query", (N, H, D))}
    bounds = (jnp.zeros(N, jnp.int32), LENS)
    specs = {"query": P(None, "tp"), "key": P(None, "cache", "tp"), "value": P(None, "cache", "tp")}
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in given.items()}
    got = ragged_decode_attention(placed["query"], placed["key"], placed["value"], *bounds)
    assert_close({"out": got}, {"out": ragged_decode_attention(given["query"], given["key"], given["value"], *bounds)})


def test_packed_queries_do_not_split_pages():
    pages = normal("pages", (PAGES, L, 2 * HKV, D))
    with pytest.raises(
        ValueError, match=r"split dimension P of size .*page_attention and decode_attention split pages"
    ):
        ragged_page_attention(
            normal("query", (8, H, D)), pages, LENS, TABLE, jnp.array([0, 1, 1, 3, 8]), 4,
            mesh=mesh_of(), in_specs=(P(), P("cache")),
        )  # fmt: skip

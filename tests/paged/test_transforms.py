"""vmap, many devices, export and donation give what a plain call gives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.paged.calls import specs_by_array
from ejkernel.modules import (
    decode_attention,
    page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    write_interleaved_kv_pages,
    write_kv_pages,
)
from harness import normal
from harness.paged import refused
from tolerances import assert_close

N, H, HKV, D, L, W, PAGES = 4, 8, 4, 16, 8, 3, 16
LENS = jnp.array([20, 0, 7, 24])
TABLE = jnp.asarray(np.random.default_rng(0).permutation(PAGES)[: N * W].reshape(N, W).astype(np.int32))


def arrays(*lead):
    cache = (PAGES, L, HKV, D)
    shapes = {"query": (*lead, N, H, D), "key_cache": (*lead, *cache), "value_cache": (*lead, *cache)}
    return {name: normal(name, shape) for name, shape in shapes.items()}


def attend(*, platform="xla", **given):
    out, lse = page_attention(
        **{"context_lens": LENS, "block_tables": TABLE, **given}, return_lse=True, platform=platform
    )
    return {"out": out, "lse": lse}


# vmap -----------------------------------------------------------------------------------------------------------

MAPPED = {
    "all": arrays(3),
    "query": {"query": normal("queries", (3, N, H, D))},
    "values-lengths": {
        "value_cache": normal("more values", (3, PAGES, L, HKV, D)),
        "context_lens": jnp.array([[20, 0, 7, 24], [1, 2, 3, 4], [0, 0, 24, 9]]),
    },
    "tables-sinks-scales": {
        "block_tables": jnp.stack([TABLE, TABLE[::-1], TABLE // 2]),
        "softmax_aux": normal("sinks", (3, H)),
        "k_scale": jnp.array([0.5, 1.0, 2.0]),
        "v_scale": normal("v_scale", (3, HKV)),
    },
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_a_loop(name, platform):
    if refused(platform):
        return
    fixed, mapped = {n: x for n, x in arrays().items() if n not in MAPPED[name]}, MAPPED[name]
    with platform.context():
        got = jax.jit(jax.vmap(lambda m: attend(**fixed, **m, platform=platform.name)))(mapped)
        one = jax.jit(lambda m: attend(**fixed, **m, platform=platform.name))
        loop = [one({n: x[i] for n, x in mapped.items()}) for i in range(3)]
    assert_close(got, jax.tree.map(lambda *x: np.stack(x), *loop))


def test_vmap_of_ragged_batches(platform):
    """Every row with its own queries, lengths and number of sequences."""
    if refused(platform):
        return
    pages = normal("pages", (PAGES, L, 2 * HKV, D))
    start = jnp.array([[0, 1, 9, 9, 10], [0, 5, 5, 6, 10]])
    lens = jnp.array([[20, 9, 7, 24], [8, 0, 7, 24]])
    mapped = normal("query", (2, 12, H, D)), lens, start, jnp.array([2, 4])
    with platform.context():

        def one(query, lens, start, n):
            return ragged_page_attention(query, pages, lens, TABLE, start, n, platform=platform.name)

        got = jax.jit(jax.vmap(one))(*mapped)
        loop = [jax.jit(one)(*(x[i] for x in mapped)) for i in range(2)]
    assert_close({"out": got}, {"out": np.stack(loop)})


# Many devices ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    devices = np.asarray(jax.devices("cpu"))
    assert len(devices) >= 8, "conftest.py asks for 8 host devices"
    return Mesh(devices[:8].reshape(2, 4), ("dp", "tp"), axis_types=(request.param, request.param))


HEADS = P(None, None, "tp", None)


@pytest.mark.parametrize("rank", [3, 4])
def test_sequences_and_heads(rank, mesh):
    given = arrays() | {"softmax_aux": normal("sinks", (H, 2)), "k_scale": normal("scale", (HKV,))}
    query = P("dp", "tp") if rank == 3 else P("dp", None, "tp")
    if rank == 4:
        given["query"] = given["query"][:, None]
    specs = {"mesh": mesh, "in_specs": (query, HEADS, HEADS), "out_specs": query}
    split = jax.jit(lambda a: attend(**a, **specs))(given)
    assert_close(split, jax.jit(lambda a: attend(**a))(given))


@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_types_are_specs(tokens):
    """Arrays that are split over Explicit axes need no mesh= and no in_specs=; the output is split like the query."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"))
    given = arrays() | {"context_lens": jnp.maximum(LENS, tokens or 1)}
    query = P("dp", "tp") if tokens is None else P("dp", None, "tp")
    if tokens is not None:
        given["query"] = normal("query", (N, tokens, H, D))
    specs = {"query": query, "key_cache": HEADS, "value_cache": HEADS, "context_lens": P("dp")}
    split = {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in given.items()}
    got = jax.jit(lambda a: attend(**a))(split)
    assert_close(got, jax.jit(lambda a: attend(**a))(given))
    assert jax.typeof(got["out"]).sharding.is_equivalent_to(NamedSharding(mesh.abstract_mesh, query), got["out"].ndim)


def test_one_key_head_is_not_split(mesh):
    given = arrays()
    given |= {name: given[name][:, :, :1] for name in ("key_cache", "value_cache")}
    split = jax.jit(lambda a: attend(**a, mesh=mesh, in_specs={"query": P(None, "tp")}))(given)
    assert_close(split, jax.jit(lambda a: attend(**a))(given))


def test_ragged_heads(mesh):
    query, pages = normal("query", (10, H, D)), normal("pages", (PAGES, L, 2 * HKV, D))
    others = LENS.at[1].set(9), TABLE, jnp.array([0, 1, 9, 9, 10]), 4
    whole = dict.fromkeys(("context_lens", "block_tables", "query_start_loc", "num_seqs"), P())
    specs = {"mesh": mesh, "in_specs": {"queries": P(None, "tp"), "kv_pages": HEADS, **whole}}
    split = jax.jit(lambda *a: ragged_page_attention(*a, **specs))(query, pages, *others)
    assert_close({"out": split}, {"out": jax.jit(ragged_page_attention)(query, pages, *others)})
    with pytest.raises(ValueError, match=r"dimension Hkv of size 2 does not divide over \('tp',\) of 4 devices"):
        ragged_page_attention(query, pages[:, :, :4], *others, mesh=mesh, in_specs=(P(None, "tp"), HEADS))


def test_ragged_heads_of_two_caches(mesh):
    """The specs of the pair are a pair, one for both, or follow one another."""
    query, pages = normal("query", (10, H, D)), tuple(normal(name, (PAGES, L, HKV, D)) for name in ("key", "value"))
    others = LENS.at[1].set(9), TABLE, jnp.array([0, 1, 9, 9, 10]), 4
    expected = jax.jit(ragged_page_attention)(query, pages, *others)
    queries = P(None, "tp")
    named = {"queries": queries, "key_pages": HEADS, "value_pages": HEADS}
    for specs in ({"queries": queries, "kv_pages": HEADS}, {"queries": queries, "kv_pages": (HEADS, HEADS)}):
        assert specs_by_array(pages, specs) == named
    for specs in ((queries, (HEADS, HEADS)), named):
        out = ragged_page_attention(query, pages, *others, mesh=mesh, in_specs=specs)
        assert_close({"out": out}, {"out": expected})
    with pytest.raises(TypeError, match="the spec of queries is 'tp': it must be one PartitionSpec"):
        ragged_page_attention(query, pages, *others, mesh=mesh, in_specs=("tp",))
    with pytest.raises(ValueError, match=r"in_specs of kv_pages is .* or a pair of them"):
        ragged_page_attention(query, pages, *others, mesh=mesh, in_specs=(queries, (HEADS,) * 3))
    with pytest.raises(ValueError, match="9 specs are too many for queries, key_pages"):
        ragged_page_attention(query, pages, *others, mesh=mesh, in_specs=(P(),) * 9)


def test_contiguous_caches_split_along(mesh):
    key, value = normal("key", (N, 24, HKV, D)), normal("value", (N, 24, HKV, D))
    arguments = normal("query", (N, H, D)), key, value, LENS // 2, LENS
    cache = P("dp", None, "tp", None)
    named = {"query": P("dp", "tp"), "key": cache, "value": cache, "sequence_start": P("dp"), "sequence_end": P("dp")}
    specs = {"mesh": mesh, "in_specs": named}
    split = jax.jit(lambda *a: ragged_decode_attention(*a, **specs))(*arguments)
    assert_close({"out": split}, {"out": jax.jit(ragged_decode_attention)(*arguments)})


def test_flat_buffers(mesh):
    key, value = (normal(name, (PAGES, HKV, D)) for name in ("key", "value"))
    arguments = normal("query", (N, H, D)), key, value, TABLE, jnp.array([3, 0, 1, 2])
    heads = P(None, "tp", None)
    named = {"query": P("dp", "tp"), "key_buffer": heads, "value_buffer": heads}
    specs = {"mesh": mesh, "in_specs": named | {"req_to_tokens": P("dp"), "seq_lens": P("dp")}}
    split = jax.jit(lambda *a: decode_attention(*a, **specs))(*arguments)
    assert_close({"out": split}, {"out": jax.jit(decode_attention)(*arguments)})


def test_what_cannot_be_split(mesh):
    with pytest.raises(ValueError, match="mesh axis 'dp' splits dimensions N and P"):
        attend(**arrays(), mesh=mesh, in_specs=(P("dp"), P("dp"), P("dp")))
    with pytest.raises(ValueError, match=r"names unknown arrays \['keys'\]"):
        attend(**arrays(), mesh=mesh, in_specs={"keys": P()})


def test_a_shard_map_of_ones_own_with_pages_of_ones_own(mesh):
    """Data-parallel serving: every device has its sequences and its pages, and ids count within them."""
    given = arrays() | {"context_lens": LENS, "block_tables": TABLE % (PAGES // 2)}
    specs = {name: P("dp") for name in given}
    body = jax.shard_map(
        lambda a: attend(**a), mesh=mesh, in_specs=(specs,), out_specs={"out": P("dp"), "lse": P("dp")}
    )
    half = {name: (x.shape[0] // 2) for name, x in given.items()}
    one = jax.jit(lambda a: attend(**a))
    parts = [one({name: x[i * half[name] : (i + 1) * half[name]] for name, x in given.items()}) for i in (0, 1)]
    placed = jax.device_put(given, NamedSharding(mesh, P("dp")))
    assert_close(jax.jit(body)(placed), jax.tree.map(lambda *x: np.concatenate(x), *parts))


def test_export():
    given = arrays() | {"context_lens": LENS, "block_tables": TABLE}
    exported = jax.export.export(jax.jit(lambda a: attend(**a)), platforms=("cpu", "cuda", "tpu"))(given)
    assert_close(exported.call(given), attend(**given))


# Writes ---------------------------------------------------------------------------------------------------------


def written(cache, rows, slots):
    cache = np.array(cache)
    for row, slot in zip(np.asarray(rows), np.asarray(slots), strict=True):
        if slot >= 0:
            cache[slot // L, slot % L] = row
    return cache


SLOTS = jnp.array([5, -1, 17, 127, 0])


def rows():
    return normal("new keys", (5, HKV, D)), normal("new values", (5, HKV, D))


def test_writes():
    given, (key, value) = arrays(), rows()
    keys, values = write_kv_pages(given["key_cache"], given["value_cache"], key, value, SLOTS)
    np.testing.assert_array_equal(keys, written(given["key_cache"], key, SLOTS))
    np.testing.assert_array_equal(values, written(given["value_cache"], value, SLOTS))


def test_interleaved_writes():
    pages, (key, value) = normal("pages", (PAGES, L, 2 * HKV, D)), rows()
    stored = write_interleaved_kv_pages(pages, key, value, SLOTS)
    np.testing.assert_array_equal(stored[:, :, 0::2], written(pages[:, :, 0::2], key, SLOTS))
    np.testing.assert_array_equal(stored[:, :, 1::2], written(pages[:, :, 1::2], value, SLOTS))


def test_writes_are_in_place_where_caches_are_donated():
    """Both caches are aliased, and the program copies nothing of their size."""
    given, (key, value) = arrays(), rows()
    caches = given["key_cache"], given["value_cache"]
    lowered = jax.jit(write_kv_pages, donate_argnums=(0, 1)).lower(*caches, key, value, SLOTS)
    text = lowered.compile().as_text()
    assert text.count("may-alias") + text.count("must-alias") == 2
    size = rf"f32\[({PAGES},{L}|{PAGES * L}),{HKV},{D}\]"
    assert re.search(size, text) and not re.search(size + r"\S* copy\(", text)


def test_narrow_caches_saturate():
    key = jnp.array([1.26, -1e6, 1e6, 0.0]).reshape(1, 1, 4)
    for dtype, low, high in (("float8_e4m3fn", -448, 448), ("float8_e5m2", -57344, 57344), ("int8", -128, 127)):
        cache = jnp.zeros((1, 1, 1, 4), dtype)
        stored = write_kv_pages(cache, cache, key, key, [0])[0].astype(jnp.float32).ravel()
        assert stored.tolist() == [1.0 if dtype == "int8" else 1.25, low, high, 0.0]
    assert np.isnan(write_kv_pages(*[jnp.zeros((1, 1, 1, 4), "float8_e4m3fn")] * 2, key * jnp.nan, key, [0])[0]).all()


def test_a_written_cache_is_read_back_with_the_same_scales():
    """Into int8 with a scale per key head, and out again: as near as 8 bits are."""
    key, value = normal("keys", (16, HKV, D)), normal("values", (16, HKV, D))
    scales = {"k_scale": abs(key).max((0, 2)) / 127, "v_scale": abs(value).max() / 127}
    empty = jnp.zeros((2, L, HKV, D), "int8")
    caches = write_kv_pages(empty, empty, key, value, jnp.arange(16), **scales)
    query, length, table = normal("query", (1, H, D)), jnp.array([16]), jnp.array([[0, 1]])
    out = page_attention(query, *caches, length, table, **scales)
    exact = page_attention(query, key.reshape(2, L, HKV, D), value.reshape(2, L, HKV, D), length, table)
    assert 0 < abs(out - exact).max() < 0.02

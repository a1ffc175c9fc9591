"""What a ring costs, from schedules and sums alone: balance, hops, and the choice of a way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.kernels.ring import cost
from ejkernel.kernels.ring.layout import Hops, from_zigzag, hops_needed, shard_of, to_zigzag
from ejkernel.kernels.softmax import schedule
from ejkernel.kernels.softmax.spec import Band, Dimensions, Spec, dimensions
from ejkernel.modules import ring_attention
from ejkernel.ops import Call, Target
from ejkernel.types import MaskInfo

CAUSAL = Band(None, 0)


def blocks_visited(layout: str, devices: int, tokens: int, block: int) -> np.ndarray:
    """Of each device, the blocks that its causal calls visit on all hops together, by the schedule of its calls."""
    index = np.stack([np.asarray(shard_of(layout, r, devices, tokens).index) for r in range(devices)])
    everyone = index.reshape(1, -1)

    def visits(mine: jax.Array) -> jax.Array:
        struct = jax.ShapeDtypeStruct((1, tokens, 1, 8), "float32")
        keys = jax.ShapeDtypeStruct((1, devices * tokens, 1, 8), "float32")
        arrays = {"query": struct, "key": keys, "value": keys, "q_positions": mine[None], "kv_positions": everyone}
        # the keys of all devices one after the other: runs of blocks would join hops, so they are counted as maps
        call = Call(Spec(1.0, CAUSAL), arrays)
        return schedule._interval_maps(call, dimensions(call), block, block, jnp)[0].sum()

    return np.asarray(jax.lax.map(visits, jnp.asarray(index)))


@pytest.mark.parametrize("devices", [8, 256])
def test_zigzag_balances_causal_work(devices):
    zigzag, contiguous = (blocks_visited(name, devices, 512, 64) for name in ("zigzag", "contiguous"))
    assert zigzag.max() <= 1.05 * zigzag.mean()
    assert contiguous.max() > 1.7 * contiguous.mean()


def test_hops_of_a_schedule_are_those_counted():
    """One hop's call visits what the map of its keys says."""
    devices, tokens, block = 4, 32, 8
    total = 0
    for r in range(devices):
        for j in range(devices):
            mine, theirs = (np.asarray(shard_of("zigzag", d, devices, tokens).index)[None] for d in (r, j))
            x = jnp.zeros((1, tokens, 1, 8))
            arrays = {
                "query": x,
                "key": x,
                "value": x,
                "q_positions": jnp.asarray(mine),
                "kv_positions": jnp.asarray(theirs),
            }
            bounds = np.asarray(schedule.plan(Call(Spec(1.0, CAUSAL), arrays), block, block, "q").bounds)
            total += (bounds[..., 3] - bounds[..., 0]).sum()
    assert total == blocks_visited("zigzag", devices, tokens, block).sum()


@pytest.mark.parametrize(
    ("layout", "band", "chunk", "hops"),
    [
        ("contiguous", Band(), None, Hops(7)),
        ("contiguous", CAUSAL, None, Hops(7)),
        ("contiguous", Band(-1, 0), None, Hops(1)),
        ("contiguous", Band(-16, 0), None, Hops(1)),
        ("contiguous", Band(-17, 0), None, Hops(2)),
        ("contiguous", Band(-9, 3), None, Hops(1, 1)),
        ("contiguous", Band(0, 20), None, Hops(0, 2)),
        ("contiguous", Band(0, 0), None, Hops(0)),
        ("contiguous", CAUSAL, 32, Hops(1)),
        ("zigzag", CAUSAL, None, Hops(7)),
        ("zigzag", Band(-8, 0), None, Hops(1, 1)),
    ],
    ids=str,
)
def test_windows_stop_early(layout, band, chunk, hops):
    """8 devices with 16 tokens each."""
    assert hops_needed(layout, 8, 128, 128, band, chunk) == hops


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_zigzag_and_back(axis):
    x = jnp.arange(24 * 24).reshape(24, 24)
    np.testing.assert_array_equal(from_zigzag(to_zigzag(x, 3, axis), 3, axis), x)
    parts = [np.asarray(shard_of("zigzag", r, 3, 8).index) for r in range(3)]
    np.testing.assert_array_equal(to_zigzag(jnp.arange(24), 3, 0), np.concatenate(parts))
    with pytest.raises(ValueError, match=r"length of 24 of x does not divide into 2 \* 5 chunks.* pad it to 30"):
        to_zigzag(x, 5, axis)


def problem(T, **options):
    dims = Dimensions(B=1, T=T, S=T, H=32, Hkv=8, D=128, Dv=128)
    return cost.Problem(dims, 8, 2, CAUSAL, layout="zigzag", **options)


def test_the_choice_follows_the_sums():
    """Long parts go round, for it hides; short ones exchange heads, or gather keys where heads do not divide."""

    def chosen(T, H=32, Hkv=8, kind="tpu_v5_lite", band=CAUSAL, layout="zigzag", devices=8):
        from ejkernel.kernels.ring.spec import Spec as RingSpec

        shapes = {"query": (1, T, H, 128), "key": (1, T, Hkv, 128), "value": (1, T, Hkv, 128)}
        structs = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
        return cost.choose(Call(RingSpec(0.1, band, layout=layout), structs, Target("tpu", kind, "tpu")), devices)

    assert chosen(16384).method == "ring"
    assert chosen(16384).costs["ring"].waiting == 0.0
    assert chosen(128).method in ("all_to_all", "all_gather") and chosen(128).costs["ring"].waiting > 0.0
    assert "all_to_all" in chosen(128, H=12, Hkv=4).refused and chosen(128, H=12, Hkv=4).method != "all_to_all"
    assert "all_gather" in chosen(2**20).refused
    assert "waiting" in str(chosen(128))


def test_explain_shows_the_sums():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("sp",))
    q = jax.ShapeDtypeStruct((1, 4096, 8, 64), "float32")
    told = explain(ring_attention, q, q, q, causal=True, mesh=mesh)
    assert told.operation == "ring_attention" and told.platform == "xla"
    assert "4 devices along ('sp',)" in told.reason and "by arithmetic" in told.reason
    told = explain(ring_attention, q, q, q, method="ring", mesh=mesh)
    assert "ring, as asked" in told.reason and "halves" not in told.reason
    alone = explain(ring_attention, q, q, q, mesh=jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("sp",)))
    assert alone.reason.startswith("1 device along ('sp',): ring (nothing travels); first of")


@pytest.mark.parametrize(
    ("halves", "options"),
    [
        (True, {}),
        (True, {"segments": True}),
        (True, {"alibi_slopes": np.ones(8, np.float32)}),
        (False, {"layout": "contiguous"}),
        (False, {"causal": False}),
        (False, {"sliding_window": (64, 0)}),
        (False, {"bias": jax.ShapeDtypeStruct((1, 8, 4096, 4096), "float32")}),
    ],
)
def test_explain_says_what_meets(halves, options):
    """With zigzag and nothing but causality no call compares indices."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("sp",))
    q = jax.ShapeDtypeStruct((1, 4096, 8, 64), "float32")
    given = {"causal": True, "layout": "zigzag", "method": "ring", "mesh": mesh} | options
    if given.pop("segments", False):
        given["mask_info"] = MaskInfo.from_segments(np.zeros((1, 4096), np.int32))
    assert ("xla for halves that see all" in explain(ring_attention, q, q, q, **given).reason) == halves

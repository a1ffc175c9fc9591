"""A split sequence gives what one device gives: every way, every layout, outputs and all gradients."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention, from_zigzag, ring_attention, to_zigzag
from ejkernel.types import MaskInfo
from harness import evaluate, normal
from tolerances import assert_close

B, T, H, Hkv, D = 2, 64, 8, 2, 8
TILES = {"block_q": 4, "block_k": 4}


def mesh_of(*shape, names=("sp",), kind=AxisType.Auto):
    shape = shape or (8,)
    devices = np.asarray(jax.devices("cpu")[: int(np.prod(shape))])
    return Mesh(devices.reshape(shape), names, axis_types=(kind,) * len(names))


def qkv(Hkv=Hkv, S=T, B=B, dtype="float32"):
    shapes = {"query": (B, T, H, D), "key": (B, S, Hkv, D), "value": (B, S, Hkv, D)}
    return {name: normal(name, shape, dtype) for name, shape in shapes.items()}


def ids(rows=B):
    return np.sort(np.random.default_rng(0).integers(-1, 4, (rows, T)), axis=1).astype(np.int32)


class Case(NamedTuple):
    """A call: arrays with gradients, options, and arrays of a mask by the name of a function that makes it."""

    floats: dict[str, Any]
    options: dict[str, Any] = {}  # noqa: RUF012
    mask: Any = None  # (how, arrays with their token axes): made on both sides from arrays in the order of the layout


def segments(ids):
    return MaskInfo.from_segments(ids)


def positions(ids, at):
    return MaskInfo.from_segments(ids, None, at)


def dense(mask):
    return MaskInfo.from_attention_mask(mask)


IDS = (ids(), (1,))
AT = (np.tile(np.arange(T, dtype=np.int32) // 3, (B, 1)), (1,))
PAIRS = (np.random.default_rng(1).random((1, H, T, T)) < 0.6, (2, 3))
CAUSAL = {"causal": True}
CASES = {
    "fewer-queries": Case({**qkv(S=2 * T)}, CAUSAL),
    "window": Case(qkv(), {"sliding_window": (9, 0), "causal": True}),
    "two-sided": Case(qkv(), {"sliding_window": (9, 3)}),
    "segments": Case(qkv() | {"softmax_aux": normal("sinks", (H, 2))}, CAUSAL, (segments, IDS)),
    "positions": Case(qkv(), CAUSAL, (positions, IDS, AT)),
    "mask": Case(qkv(), {}, (dense, PAIRS)),
    "bias-cap": Case(qkv() | {"bias": normal("bias", (1, H, T, T))}, {"causal": True, "logits_soft_cap": 3.0}),
    "bias-column": Case(qkv() | {"bias": normal("bias", (B, 1, 1, T))}),
    "bias-row": Case(qkv() | {"bias": normal("bias", (1, H, T, 1))}, CAUSAL),
    "dropout": Case(qkv(), {"causal": True, "dropout_prob": 0.3, "dropout_seed": 5}),
}  # fmt: skip
TOKENS = {"query": (1,), "key": (1,), "value": (1,), "bias": (2, 3), "out": (1,), "lse": (2,)}


def moved(arrays, layout, devices, how=to_zigzag):
    """Arrays in the order of a layout."""
    if layout == "contiguous":
        return arrays

    def one(name, x):
        for axis in TOKENS.get(name, ()):
            x = how(x, devices, axis) if x.shape[axis] > 1 else x
        return x

    return {name: one(name, x) for name, x in arrays.items()}


def mask_of(case, layout, devices):
    if case.mask is None:
        return {}
    make, *arrays = case.mask
    if layout == "zigzag":
        for i, (x, axes) in enumerate(arrays):
            for axis in axes:
                x = np.asarray(to_zigzag(x, devices, axis))
            arrays[i] = (x, axes)
    return {"mask_info": make(*(x for x, _ in arrays))}


COTANGENTS = {"out": normal("dout", (B, T, H, D)), "lse": normal("dlse", (B, H, T))}


@cache
def whole(name):
    """On one device."""
    case = CASES[name]

    def attend(floats):
        out, lse = flash_attention(
            **floats, **case.options, **mask_of(case, "contiguous", 1), return_lse=True, cfg=TILES
        )
        return {"out": out, "lse": lse}

    return evaluate(attend, case.floats, COTANGENTS)


def split(name, layout, devices=8, **options):
    """Over devices, in its layout; the results are in the order of the tokens."""
    case = CASES[name]
    order = {"layout": layout} | mask_of(case, layout, devices)

    def attend(floats):
        floats = moved(floats, layout, devices)
        out, lse = ring_attention(**floats, **case.options, **order, **options, return_lse=True, cfg=TILES)
        return moved({"out": out, "lse": lse}, layout, devices, from_zigzag)

    return evaluate(attend, case.floats, COTANGENTS)


def agree(got, expected):
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1], kind="gradient of")


RINGS = [
    ("fewer-queries", "zigzag"), ("window", "contiguous"), ("two-sided", "zigzag"), ("segments", "zigzag"),
    ("positions", "contiguous"), ("mask", "zigzag"), ("bias-cap", "zigzag"), ("bias-column", "contiguous"),
    ("bias-row", "contiguous"), ("dropout", "zigzag"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), RINGS, ids=lambda x: x)
def test_ring(name, layout):
    agree(split(name, layout, mesh=mesh_of(), method="ring"), whole(name))


@pytest.mark.parametrize(
    ("method", "name", "layout"),
    [
        ("all_to_all", "segments", "zigzag"),
        ("all_to_all", "dropout", "zigzag"),
        ("all_to_all", "bias-cap", "contiguous"),
        ("all_gather", "segments", "zigzag"),
        ("all_gather", "dropout", "zigzag"),
        ("all_gather", "mask", "contiguous"),
    ],
    ids=lambda x: x,
)
def test_other_ways(method, name, layout):
    agree(split(name, layout, mesh=mesh_of(), method=method), whole(name))


@pytest.mark.parametrize(
    ("name", "layout"), [("segments", "zigzag"), ("dropout", "zigzag"), ("bias-row", "contiguous")], ids=lambda x: x
)
def test_ring_and_heads(name, layout):
    """Around one axis, heads along the other; more devices than key heads there."""
    mesh = mesh_of(2, 4, names=("ring", "heads"))
    agree(split(name, layout, 2, mesh=mesh, axis_name=("ring", "heads"), method="ring"), whole(name))


# Where the devices are said ---------------------------------------------------------------------------------------


def causal(layout="contiguous", **options):
    def attend(floats):
        return {"out": ring_attention(**floats, causal=True, cfg=TILES, layout=layout, **options)}

    return attend


ONLY_OUT = {"out": COTANGENTS["out"]}


def alone(floats):
    return {"out": flash_attention(**floats, causal=True, cfg=TILES)}


@cache
def whole_causal():
    return evaluate(alone, qkv(), ONLY_OUT)


@pytest.mark.parametrize("check_vma", [False, True], ids=["unchecked", "checked"])
def test_inside_a_users_own_shard_map(check_vma):
    """Over data and sequence, with two hops written out and with a loop."""
    for shape, method in (((2, 4), "ring"), ((4, 2), "ring"), ((2, 4), "all_gather")):
        if shape[0] > B:
            continue
        mesh = mesh_of(*shape, names=("dp", "sp"))
        body = jax.shard_map(
            causal(method=method), mesh=mesh, in_specs=P("dp", "sp"), out_specs=P("dp", "sp"), check_vma=check_vma
        )
        agree(evaluate(body, qkv(), ONLY_OUT), whole_causal())


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.parametrize("enter", [lambda mesh: mesh, jax.set_mesh], ids=["with-mesh", "set_mesh"])
def test_an_ambient_mesh(enter):
    """Nothing else is said: the batch goes over the other axis."""
    mesh = mesh_of(2, 4, names=("dp", "sp"))
    with enter(mesh):
        out = ring_attention(**qkv(), causal=True, method="ring", cfg=TILES)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "sp")), 4)
    assert_close({"out": out}, whole_causal()[0])


def test_types_are_specs():
    mesh = mesh_of(2, 2, 2, names=("dp", "sp", "tp"), kind=AxisType.Explicit)
    spec = P("dp", "sp", "tp")
    placed = {name: jax.device_put(x, NamedSharding(mesh, spec)) for name, x in qkv().items()}
    got = evaluate(causal(method="ring"), placed, ONLY_OUT)
    agree(got, whole_causal())
    assert jax.typeof(got[0]["out"]).sharding.is_equivalent_to(NamedSharding(mesh.abstract_mesh, spec), 4)


def test_specs_with_heads_and_sinks():
    """More devices along heads than key heads: they share keys."""
    mesh = mesh_of(2, 4, names=("sp", "tp"))
    specs = {"query": P(None, "sp", "tp"), "key": P(None, "sp"), "value": P(None, "sp")}
    agree(split("segments", "zigzag", 2, mesh=mesh, in_specs=specs, method="ring"), whole("segments"))


def test_one_device_and_one_sequence():
    mesh = mesh_of(1)
    floats = {name: x[0] for name, x in qkv().items()}
    got = jax.jit(lambda f: ring_attention(**f, causal=True, mesh=mesh, layout="zigzag", cfg=TILES))(floats)
    assert_close({"out": got}, {"out": whole_causal()[0]["out"][0]})


# How JAX may use it -----------------------------------------------------------------------------------------------


def test_vmap_outside_and_inside():
    mesh = mesh_of(2)
    many = {name: jnp.stack([x, 2 * x]) for name, x in qkv().items()}
    one = causal(method="ring", mesh=mesh)
    expected = evaluate(
        lambda f: {"out": jnp.stack([flash_attention(**{n: x[i] for n, x in f.items()}, causal=True) for i in (0, 1)])},
        many, {"out": jnp.stack([ONLY_OUT["out"]] * 2)},
    )  # fmt: skip
    agree(evaluate(jax.vmap(one), many, {"out": jnp.stack([ONLY_OUT["out"]] * 2)}), expected)
    spec = P(None, None, "sp")
    inside = jax.shard_map(jax.vmap(causal(method="ring")), mesh=mesh, in_specs=spec, out_specs=spec)
    assert_close(jax.jit(inside)(many), expected[0])


def test_remat_and_scan():
    """With a policy by name."""
    mesh = mesh_of(2)
    policy = jax.checkpoint_policies.save_only_these_names("ejkernel_out", "ejkernel_lse")

    def loss(floats, attend, wrap):
        layer = wrap(lambda q, _: (attend(floats | {"query": q})["out"], None))
        return jax.lax.scan(layer, floats["query"], None, length=2)[0].sum()

    ring = partial(loss, attend=causal(method="ring", mesh=mesh), wrap=partial(jax.checkpoint, policy=policy))
    plain = partial(loss, attend=alone, wrap=lambda layer: layer)
    assert_close(*(jax.jit(jax.grad(function))(qkv()) for function in (ring, plain)))


def test_strict_rules_64_bits_and_narrow_dtypes():
    floats = qkv(dtype="float16")
    mesh = mesh_of(4)
    expected = jax.jit(lambda f: flash_attention(**f, causal=True, cfg=TILES))(qkv())
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        program = jax.jit(
            jax.value_and_grad(lambda f: causal(method="ring", mesh=mesh)(f)["out"].astype("float32").sum())
        )
        total, gradients = program(floats)
    assert {x.dtype for x in gradients.values()} == {jnp.float16.dtype}
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-2, atol=0.5)


def test_nan_in_padding_stays_there():
    """Padding on several devices, keys and queries."""
    segment = jnp.asarray(np.where(np.arange(T) < 37, 0, -1)[None])
    mask = MaskInfo.from_segments(segment)

    def attend(floats, function, **options):
        return {"out": function(**floats, causal=True, mask_info=mask, cfg=TILES, **options)}

    bad = {name: x.at[:, 37:].set(jnp.nan) for name, x in qkv().items()}
    got = evaluate(lambda f: attend(f, ring_attention, mesh=mesh_of(), method="ring"), bad, ONLY_OUT)
    agree(got, evaluate(lambda f: attend(f, flash_attention), qkv(), ONLY_OUT))


# Bad input --------------------------------------------------------------------------------------------------------

ERRORS = {
    "no-mesh": ({}, ValueError, "needs devices: give mesh=, enter a mesh"),
    "axis": ({"mesh": 8, "axis_name": "x"}, ValueError, r"'x' is not an axis of the mesh, which has \('sp',\)"),
    "three-axes": ({"mesh": 8, "axis_name": ("a", "b", "c")}, ValueError, "one mesh axis, or two"),
    "layout": ({"mesh": 8, "layout": "striped"}, ValueError, "layout='striped' is unknown; use one of 'contiguous'"),
    "method": ({"mesh": 8, "method": "bus"}, ValueError, "method='bus' is unknown"),
    "length": ({"mesh": 7}, ValueError, r"dimension T of size 64 does not divide over \('sp',\) of 7 devices.*pad"),
    "heads": ({"mesh": 8, "method": "all_to_all", "heads": 4}, ValueError, "query heads H=4 and key heads Hkv=2 do"),
    "other-specs": ({"mesh": 8, "in_specs": (P("sp"),) * 3}, ValueError, "dimension B of size 2 does not divide"),
    "head-dim": ({"mesh": 8, "in_specs": (P(None, None, None, "sp"),) * 3}, ValueError, "split dimension D of size"),
    "zigzag": ({"mesh": 8, "layout": "zigzag", "length": 24}, ValueError, r"two chunks: 3 queries .* multiples of 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(name):
    options, error, message = ERRORS[name]
    options = dict(options)
    if "mesh" in options:
        options["mesh"] = mesh_of(options["mesh"])
    heads, length = options.pop("heads", H), options.pop("length", T)
    floats = {name: x[:, :length, :heads] for name, x in qkv().items()}
    with pytest.raises(error, match=message):
        ring_attention(**floats, **{"method": "ring", **options})


def test_patterns_are_refused():
    from ejkernel.types import BlockPattern

    mask = MaskInfo.from_block_pattern(BlockPattern.sliding_blocks(4, 1, block_size=16), q_len=T)
    with pytest.raises(NotImplementedError, match="takes no block pattern"):
        ring_attention(**qkv(), mask_info=mask, mesh=mesh_of())


@pytest.mark.parametrize(
    ("T", "S", "method"),
    [(0, 64, "ring"), (64, 0, "ring"), (0, 0, "ring"), (0, 64, "all_to_all"), (64, 0, "all_gather"), (0, 0, "auto")],
)
def test_no_queries_or_no_keys(T, S, method):
    q, k = normal("q", (B, T, H, D)), normal("k", (B, S, Hkv, D))
    sinks, bias = normal("sinks", (H,)), normal("bias", (1, H, T, S))

    def attend(q, k, sinks, bias):
        arrays = {"query": q, "key": k, "value": k, "softmax_aux": sinks, "bias": bias}
        return ring_attention(**arrays, mesh=mesh_of(2), method=method, causal=True, return_lse=True)

    (out, lse), pull = jax.vjp(attend, q, k, sinks, bias)
    assert out.shape == (B, T, H, D) and not np.any(out)
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks[:, None], (B, H, T)))
    dq, dk, dsinks, dbias = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert [x.shape for x in (dq, dk, dbias)] == [q.shape, k.shape, bias.shape]
    assert not any(np.any(x) for x in (dq, dk, dbias))
    np.testing.assert_array_equal(dsinks, B * T)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_bias_of_the_least_number_is_finite(layout):
    """And one of -inf hides: rows of the first see every key alike, rows of the second none."""
    arrays = qkv()
    bias = np.full((1, 1, T, 1), np.finfo(np.float32).min, np.float32)
    bias[:, :, ::2] = -np.inf
    out, lse = ring_attention(
        **arrays, bias=jnp.asarray(bias), mesh=mesh_of(4), method="ring", layout=layout, return_lse=True
    )
    mean = arrays["value"].mean(1, keepdims=True).repeat(H // Hkv, 2)
    assert_close({"out": out[:, 1::2]}, {"out": jnp.broadcast_to(mean, out[:, 1::2].shape)})
    assert not np.any(out[:, ::2]) and np.isneginf(lse[:, :, ::2]).all() and np.isfinite(lse[:, :, 1::2]).all()

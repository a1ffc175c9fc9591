"""jit, vmap, grad, remat, scan and export give what a plain call gives."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from ejkernel.types import BlockPattern, MaskInfo
from harness import normal
from harness.compilations import compiled_programs
from tolerances import assert_close

T, H, D = 20, 2, 8
TILES = {"block_q": 8, "block_k": 8}
N = 3  # the mapped axis


def attend(floats, extras, **options):
    """(out, lse) of arrays with a gradient and of others: `ids`, `mask`, `blocks`, `seed`."""
    extras = dict(extras)
    mask = MaskInfo(T, T)
    if "ids" in extras:
        mask &= MaskInfo.from_segments(extras.pop("ids"))
    if "mask" in extras:
        mask &= MaskInfo.from_attention_mask(extras.pop("mask"))
    if "blocks" in extras:
        mask &= MaskInfo.from_block_pattern(BlockPattern.from_dense(extras.pop("blocks"), block_size=5), q_len=T)
    if "seed" in extras:
        options |= {"dropout_prob": 0.4, "dropout_seed": extras.pop("seed")}
    assert not extras
    return flash_attention(**floats, mask_info=mask, causal=True, return_lse=True, cfg=TILES, **options)


def with_gradients(floats, extras):
    """Outputs and gradients of one call, under cotangents that differ from place to place."""
    (out, lse), pull = jax.vjp(lambda f: attend(f, extras), floats)
    (gradients,) = pull((jnp.cos(out), jnp.where(jnp.isfinite(lse), jnp.sin(lse), 1.0)))
    return {"out": out, "lse": lse}, gradients


def qkv(B, *lead):
    return {name: normal(name, (*lead, B, T, H, D)) for name in ("query", "key", "value")}


def booleans(shape):
    return jnp.asarray(np.random.default_rng(1).random(shape) < 0.6)


def whole(numbers):
    return jnp.asarray(numbers, jnp.int32)


IDS = whole(np.sort(np.random.default_rng(2).integers(-1, 3, (N, 2, T)), axis=-1))

# floats, rest, and which of them are mapped
MAPS = {
    "qkv": (qkv(2, N), {}, {"query", "key", "value"}),
    "query": (qkv(2) | {"query": normal("queries", (N, 2, T, H, D))}, {}, {"query"}),
    "key-value-batch-1": (qkv(1, N) | {"query": normal("query", (1, T, H, D))}, {}, {"key", "value"}),
    "mask": (qkv(2), {"mask": booleans((N, 2, 1, T, T))}, {"mask"}),
    "mask-batch-1": (qkv(1), {"mask": booleans((N, 1, H, T, T))}, {"mask"}),
    "segments-batch-1": (qkv(1), {"ids": IDS[:, :1]}, {"ids"}),
    "pattern": (qkv(2), {"blocks": booleans((N, 1, H, 4, 4))}, {"blocks"}),
    "bias-batch-1": (qkv(1) | {"bias": normal("bias", (N, 1, H, T, 1))}, {}, {"bias"}),
    "bias-unmapped": (qkv(2, N) | {"bias": normal("bias", (1, H, 1, T))}, {}, {"query", "key", "value"}),
    "sinks": (qkv(2) | {"softmax_aux": normal("sinks", (N, H))}, {}, {"softmax_aux"}),
    "sinks-unmapped": (qkv(1, N) | {"softmax_aux": normal("sinks", (H, 3))}, {}, {"query", "key", "value"}),
    "dropout": (qkv(2, N), {"seed": jnp.int32(5)}, {"query", "key", "value"}),
    "dropout-seed-batch-1": (qkv(1), {"seed": whole([5, 6, 7])}, {"seed"}),
}  # fmt: skip


def axes_of(arrays, mapped):
    return {name: 0 if name in mapped else None for name in arrays}


def part(arrays, mapped, n):
    return {name: x[n] if name in mapped else x for name, x in arrays.items()}


@pytest.mark.parametrize("name", MAPS)
def test_vmap_is_a_loop(name):
    """Values and per-example gradients."""
    floats, extras, mapped = MAPS[name]
    axes = axes_of(floats, mapped), axes_of(extras, mapped)
    outputs, gradients = jax.jit(jax.vmap(with_gradients, in_axes=axes))(floats, extras)
    one = jax.jit(with_gradients)
    loop = [one(part(floats, mapped, n), part(extras, mapped, n)) for n in range(N)]
    expected = jax.tree.map(lambda *x: np.stack(x), *loop)
    assert_close(outputs, expected[0])
    assert_close(gradients, expected[1], kind="gradient of")


@pytest.mark.parametrize("name", ["query", "bias-unmapped", "sinks-unmapped"])
def test_gradient_of_vmap_is_the_sum_of_a_loop(name):
    floats, extras, mapped = MAPS[name]

    def loss(floats, extras):
        out, lse = attend(floats, extras)
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    mapped_loss = jax.vmap(loss, in_axes=(axes_of(floats, mapped), axes_of(extras, mapped)))
    gradients = jax.jit(jax.grad(lambda f: mapped_loss(f, extras).sum()))(floats)
    one = jax.jit(jax.grad(loss))
    loop = [one(part(floats, mapped, n), part(extras, mapped, n)) for n in range(N)]
    expected = {name: (np.stack if name in mapped else sum)([g[name] for g in loop]) for name in floats}
    assert_close(gradients, expected, kind="gradient of")


def test_nested_vmap():
    queries, keys = normal("queries", (2, 2, T, H, D)), normal("keys", (3, 2, T, H, D))
    value = normal("value", (2, T, H, D))

    def one(query, key):
        return with_gradients({"query": query, "key": key, "value": value}, {"seed": jnp.int32(1)})

    inner = jax.vmap(one, in_axes=(None, 0))
    outputs, gradients = jax.jit(jax.vmap(inner, in_axes=(0, None)))(queries, keys)
    single = jax.jit(one)
    loop = [[single(q, k) for k in keys] for q in queries]
    expected = jax.tree.map(lambda *x: np.stack(x), *[jax.tree.map(lambda *x: np.stack(x), *row) for row in loop])
    assert_close(outputs, expected[0])
    assert_close(gradients, expected[1])


def test_vmap_over_other_axes_and_a_mask_info():
    """The mapped axis need not lead, and a MaskInfo is a pytree like any other."""
    arrays = [normal(name, (2, T, N, H, D)) for name in "qkv"]
    masks = MaskInfo.from_segments(IDS[0]).replace(q_segment_ids=IDS[1], kv_segment_ids=IDS[1])
    stacked = jax.tree.map(lambda x: jnp.stack([x, x[::-1], x]), masks)

    def one(q, k, v, mask):
        return flash_attention(q, k, v, mask_info=mask, cfg=TILES)

    got = jax.jit(jax.vmap(one, in_axes=(2, 2, 2, 0), out_axes=2))(*arrays, stacked)
    single = jax.jit(one)
    loop = [single(*(x[:, :, n] for x in arrays), jax.tree.map(lambda x, n=n: x[n], stacked)) for n in range(N)]
    assert_close({"out": got}, {"out": np.stack(loop, 2)})


def test_jit_is_eager():
    floats, extras = qkv(2) | {"bias": normal("bias", (H, T, T))}, {"ids": IDS[0], "seed": jnp.int32(1)}
    eager, compiled = with_gradients(floats, extras), jax.jit(with_gradients)(floats, extras)
    assert_close(eager[0], compiled[0])
    assert_close(eager[1], compiled[1])


def test_remat_changes_nothing():
    floats = qkv(1)

    def loss(floats, wrap):
        step = wrap(lambda f: attend(f, {})[0])
        return jnp.sin(step(floats | {"query": step(floats)})).sum()

    plain = jax.jit(jax.grad(lambda f: loss(f, lambda g: g)))(floats)
    rematerialised = jax.jit(jax.grad(lambda f: loss(f, jax.checkpoint)))(floats)
    assert_close(rematerialised, plain)


def test_scan_over_layers():
    floats = qkv(1)
    weights = normal("weights", (3, D, D))

    def layer(x, w):
        return attend(floats | {"query": x @ w}, {})[0], None

    def scanned(x):
        return jax.lax.scan(layer, x, weights)[0].sum()

    def unrolled(x):
        for w in weights:
            x, _ = layer(x, w)
        return x.sum()

    got, expected = (jax.jit(jax.value_and_grad(f))(floats["query"]) for f in (scanned, unrolled))
    assert_close(dict(enumerate(got)), dict(enumerate(expected)))


def test_scan_over_masks():
    floats = qkv(2)
    _, got = jax.jit(lambda ids: jax.lax.scan(lambda c, i: (c, attend(floats, {"ids": i})[0]), 0, ids))(IDS)
    one = jax.jit(lambda i: attend(floats, {"ids": i})[0])
    assert_close({"out": got}, {"out": np.stack([one(i) for i in IDS])})


def test_export():
    floats, extras = qkv(2), {"ids": IDS[0]}
    function = jax.jit(with_gradients)
    exported = jax.export.export(function)(floats, extras)
    if importlib.util.find_spec("flatbuffers"):  # what JAX writes exports with
        exported = jax.export.deserialize(exported.serialize())
    for got, expected in zip(jax.jit(exported.call)(floats, extras), function(floats, extras), strict=True):
        assert_close(got, expected)


def test_value_and_gradient_of_lse_alone():
    floats = qkv(1)
    gradient = jax.jit(jax.grad(lambda f: attend(f, {})[1].sum()))(floats)
    assert np.abs(gradient["query"]).max() > 0 and not np.any(gradient["value"])


def test_integer_arrays_have_no_gradient():
    with pytest.raises(TypeError, match="int32"):
        jax.grad(lambda ids: attend(qkv(2), {"ids": ids})[0].sum())(IDS[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_traced_scale(dtype):
    """It is as good as one that the program knows, and has a gradient."""
    q, k, v = (normal(name, (1, T, H, D), dtype) for name in ("query", "key", "value"))

    def attend(scale):
        out, lse = flash_attention(q, k, v, softmax_scale=scale, causal=True, return_lse=True)
        return out.astype(jnp.float32), lse

    known, traced = attend(0.25), jax.jit(attend)(0.25)
    assert_close(dict(zip("ol", traced, strict=True)), dict(zip("ol", known, strict=True)))
    gradient = jax.jit(jax.grad(lambda scale: attend(scale)[1].sum()))(0.3)
    step = 2.0**-6
    difference = (attend(0.3 + step)[1].sum() - attend(0.3 - step)[1].sum()) / (2 * step)
    assert abs(gradient - difference) <= 0.02 * abs(difference)


def _from_lengths(lengths):
    return {"mask_info": MaskInfo.from_lengths(lengths, q_len=T)}


NEW_LENGTHS = {
    "packed": lambda n: {"cum_seqlens_q": jnp.array([0, n, T])},
    "packed-numpy": lambda n: {"cum_seqlens_q": np.array([0, n, T], np.int32)},
    "lengths": lambda n: _from_lengths(jnp.array([n])),
    "lengths-numpy": lambda n: _from_lengths(np.array([n], np.int32)),
    "segments": lambda n: {"mask_info": MaskInfo.from_segments((np.arange(T) >= n)[None].astype(np.int32))},
    "kv-lengths": lambda n: {"mask_info": MaskInfo(T, T).apply_kv_lengths(jnp.array([n]))},
}


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("how", NEW_LENGTHS)
def test_new_lengths_compile_nothing(how, differentiated):
    q, k, v = (normal(name, (1, T, H, D)) for name in ("query", "key", "value"))

    def run(n):
        options = NEW_LENGTHS[how](n)
        attend = lambda q: flash_attention(q, k, v, causal=True, **options).sum()  # noqa: E731
        jax.block_until_ready((jax.grad(attend) if differentiated else attend)(q))

    run(3)
    with compiled_programs() as names:
        for n in (5, 11, T):
            run(n)
    assert names == []

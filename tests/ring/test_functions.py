"""Mask and score functions, ALiBi, traced options and masks that are rules, over split sequences."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.ring.spec import ARRAYS, Part, canonicalise
from ejkernel.kernels.softmax import schedule
from ejkernel.modules import flash_attention, from_zigzag, ring_attention, to_zigzag
from ejkernel.ops import Call
from ejkernel.types import MaskInfo
from harness import evaluate, normal
from tolerances import assert_close

B, T, H, D = 2, 32, 4, 8
IDS = np.sort(np.random.default_rng(0).integers(0, 3, (B, T)), axis=1).astype(np.int32)
ENDS = np.minimum(np.arange(T) * 2 + 6, T).astype(np.int32)[None]  # of a tree
QKV = {name: normal(name, (B, T, heads, D)) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
TILES = {"block_q": 4, "block_k": 4}


class Case(NamedTuple):
    """What makes options of arrays: those that have a gradient, and those of tokens, in the order of these."""

    make: Callable[..., dict[str, Any]]
    trained: dict[str, Any]
    of_tokens: dict[str, Any] = {}  # noqa: RUF012
    queries: int = T

    def qkv(self):
        return QKV | {"query": QKV["query"][:, : self.queries]}


def gates_and_table(gates, table, slopes):
    total, ids, prefix = jnp.cumsum(-jax.nn.softplus(gates), axis=-1), jnp.asarray(IDS), jnp.array([5, 17])

    def score(s, b, h, i, j):
        return s * slopes[h] + total[b, h, i] - total[b, h, j] + table[jnp.clip(j - i, -8, 8) + 8, h]

    return {"score_fn": score, "mask_fn": lambda b, h, i, j: ((j <= i) | (j < prefix[b])) & (ids[b, i] == ids[b, j])}


def alibi_and_traced(slopes):
    window = 11 + jnp.int32(0 * slopes[0])
    return {"alibi_slopes": slopes, "sliding_window": (window, None), "logits_soft_cap": 9 * slopes[1], "causal": True}


def shifted(slopes, shift):
    functions = {"score_fn": lambda s, b, h, i, j: s + shift[j] - 0.1 * i, "mask_fn": lambda b, h, i, j: j - i <= 9}
    return alibi_and_traced(slopes) | functions


def tree_or_documents(ids, ends):
    return {"mask_info": MaskInfo.tree(ends) | MaskInfo.from_segments(ids)}


SLOPES = {"slopes": normal("slopes", (H,)) ** 2 + 0.1}
CASES = {
    "gates": Case(gates_and_table, {"gates": normal("g", (B, H, T)), "table": normal("t", (17, H))} | SLOPES),
    "alibi": Case(alibi_and_traced, SLOPES),
    "fewer-queries": Case(shifted, SLOPES | {"shift": normal("shift", (T,))}, queries=T // 2),
    "tree": Case(tree_or_documents, {}, {"ids": IDS, "ends": ENDS}),
}


def results(case, attend):
    """Outputs and gradients of `attend(tokens, trained)`."""
    tokens = case.qkv()

    def call(floats):
        trained = {name: floats[name] for name in case.trained}
        return {"out": attend({name: floats[name] for name in tokens} | case.of_tokens, trained)}

    return evaluate(call, tokens | case.trained, {"out": normal("dout", tokens["query"].shape)})


def attention(function, case, tokens, trained, **options):
    of_tokens = {name: tokens[name] for name in case.of_tokens}
    return function(*(tokens[name] for name in QKV), **case.make(**of_tokens, **trained), **options, cfg=TILES)


@cache
def alone(name):
    case = CASES[name]
    return results(case, lambda *arrays: attention(flash_attention, case, *arrays))


def split(case, layout, mesh, inside, **options):
    """On a mesh, or inside a shard_map (which checks, or does not, what varies), whose arrays of tokens are split."""
    axes, around = mesh.axis_names, mesh.devices.shape[0]

    def ring(tokens, trained, **more):
        return attention(ring_attention, case, tokens, trained, axis_name=axes, layout=layout, **options, **more)

    def attend(tokens, trained):
        if layout == "zigzag":
            tokens = {name: to_zigzag(x, around) for name, x in tokens.items()}
        if inside is None:
            out = ring(tokens, trained, mesh=mesh)
        else:
            over = P(None, axes)
            out = jax.shard_map(ring, mesh=mesh, in_specs=(over, P()), out_specs=over, check_vma=inside)(
                tokens, trained
            )
        return from_zigzag(out, around) if layout == "zigzag" else out

    return results(case, attend)


def mesh_of(*shape):
    devices = np.asarray(jax.devices("cpu")[: int(np.prod(shape))])
    return Mesh(devices.reshape(shape), ("sp", "heads")[: len(shape)])


@pytest.mark.parametrize(
    ("name", "layout", "method", "shape", "inside"),
    [
        ("gates", "contiguous", "ring", (4,), None),
        ("gates", "zigzag", "all_to_all", (4,), None),
        ("gates", "zigzag", "ring", (2, 2), True),  # around one axis, heads along the other
        ("alibi", "zigzag", "ring", (2,), None),  # in halves
        ("fewer-queries", "zigzag", "all_gather", (4,), False),
        ("tree", "zigzag", "ring", (4,), True),
    ],
    ids=str,
)
def test_functions(name, layout, method, shape, inside):
    got, expected = split(CASES[name], layout, mesh_of(*shape), inside, method=method), alone(name)
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1], kind="gradient of")


def test_hops_visit_the_blocks_that_are_seen():
    """Of documents by their bounds, over all devices and hops."""
    devices, block, t = 4, 4, T // 4
    starts = np.argmax(IDS[:, :, None] == IDS[:, None, :], axis=-1)
    bounds = [starts, np.broadcast_to(np.arange(T) + 1, (B, T))]
    seen = np.asarray(MaskInfo.from_bounds(*bounds, q_len=T).attention_mask[:, 0])
    bounds, seen = [to_zigzag(x, devices) for x in bounds], to_zigzag(to_zigzag(seen, devices, 1), devices, 2)
    mask = MaskInfo.from_bounds(*bounds, q_len=T)
    call = canonicalise(*QKV.values(), mask_info=mask, layout="zigzag", part=Part(devices))

    def visits(pair):
        arrays = dict(call.arrays)
        for name, x in arrays.items():
            for letter, device in zip("TS", pair, strict=True):
                if letter in ARRAYS[name].axes:
                    arrays[name] = lax.dynamic_slice_in_dim(x, device * t, t, ARRAYS[name].axes.index(letter))
        return schedule.plan(Call(call.spec.softmax, arrays), block, block, "q").number[..., 1].sum()

    pairs = jnp.indices((devices, devices)).reshape(2, -1).T
    blocks = seen.reshape(B, T // block, block, T // block, block).any((2, 4))
    assert jax.jit(lambda: lax.map(visits, pairs).sum())() == blocks.sum()


def dense():
    return MaskInfo.from_attention_mask(np.ones((1, 1, T // 4, T // 4), bool))


def of_all():
    ids = jnp.asarray(IDS)
    return MaskInfo.from_function(lambda b, h, i, j: (ids[0, i] == ids[0, j]) | (j < 3), q_len=T // 4)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (dense, NotImplementedError, "no dense mask, for its columns are of one device: give mask_fn"),
        (of_all, ValueError, "has numbers for the 8 tokens of a device: a function that reads one of 32"),
    ],
)
def test_masks_that_a_device_cannot_have(mask, error, message):
    body = jax.shard_map(
        lambda q, k, v: ring_attention(q, k, v, mask_info=mask()),
        mesh=mesh_of(4),
        in_specs=P(None, "sp"),
        out_specs=P(),
    )
    with pytest.raises(error, match=message):
        jax.eval_shape(body, *QKV.values())

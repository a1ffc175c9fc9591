"""The forward kernel: a block of queries of one head meets the key blocks that the schedule gives it, one per step.

Kept in VMEM between the steps of a row, in lanes as the queries are: the largest logit, the sum of
exponentials against it, and the output against it.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.common.online_softmax import MASKED
from ejkernel.kernels.common.pallas_tpu import transposed
from ejkernel.kernels.softmax.pallas_tpu.schedule import FIRST, LAST, Scalars
from ejkernel.kernels.softmax.pallas_tpu.tiles import (
    GridStep,
    Refs,
    Scratch,
    Tiles,
    finite_entries,
    length_second,
    nonfinite_zeroed,
)
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call

_NOWHERE = 2**30


def scratch(call: Call, block_q: int) -> dict[str, Scratch]:
    """What the kernel keeps from tile to tile of a block of queries."""
    row = (1, block_q), jnp.float32
    kept = {"max": row, "sum": row, "out": ((dimensions(call).Dv, block_q), jnp.float32)}
    return kept | ({"best": row, "best_at": (row[0], jnp.int32)} if call.spec.with_argmax else {})


def run(call: Call, block_q: int, block_k: int) -> dict[str, jax.Array]:
    """out (B, T, H, Dv), lse (B, H, T), and total and argmax (B, H, T) where the call wants them."""
    tiles = Tiles.of(call, block_q, block_k, "q")
    B, T, _, H, _, _, Dv = tiles.dims
    row = tiles.of_queries(1)
    outputs = {
        "out": (jax.ShapeDtypeStruct((B, H, Dv, T), call["query"].dtype), tiles.of_queries(Dv)),
        "lse": (jax.ShapeDtypeStruct((B, H, 1, T), jnp.float32), row),
    }
    if call.spec.with_argmax:
        outputs["total"] = outputs["lse"]
        outputs["argmax"] = (jax.ShapeDtypeStruct((B, H, 1, T), jnp.int32), row)

    def softmax_forward(scalars: Scalars, arrays: Refs, outs: Refs, kept: Refs) -> None:
        at = tiles.current_step(scalars)
        pl.when(at.has(FIRST))(lambda: _start(tiles, scalars, at, kept))
        tiles.visit(at, lambda masked: _step(tiles, scalars, arrays, kept, at, masked))
        pl.when(at.has(LAST))(lambda: _finish(tiles, outs, kept))

    kept = scratch(call, tiles.block_q)
    done = tiles.launch(softmax_forward, tiles.operands(), outputs, kept, width=tiles.dims.D + Dv)
    done["out"] = length_second(done["out"])
    return {name: x if name == "out" else x[:, :, 0] for name, x in done.items()}


def _start(tiles: Tiles, scalars: Scalars, at: GridStep, kept: Refs) -> None:
    """A head's sinks count once, here."""
    row = kept["max"].shape
    if "sinks" in tiles.call:
        sink = jnp.full(row, tiles.sink(scalars, at) * (1.0 / tiles.unit), jnp.float32)
        kept["max"][...], kept["sum"][...] = sink, tiles.weights(sink, jnp.where(sink == MASKED, 0.0, sink))
    else:
        kept["max"][...], kept["sum"][...] = jnp.full(row, MASKED, jnp.float32), jnp.zeros(row, jnp.float32)
    kept["out"][...] = jnp.zeros(kept["out"].shape, jnp.float32)
    if "best" in kept:
        kept["best"][...], kept["best_at"][...] = jnp.full(row, MASKED, jnp.float32), jnp.full(row, -1, jnp.int32)


def _step(tiles: Tiles, scalars: Scalars, arrays: Refs, kept: Refs, at: GridStep, masked: bool) -> None:
    value = arrays["value"][...]
    x = tiles.logits(scalars, arrays, at, tiles.scores(arrays, arrays["query"][...], arrays["key"][...]))
    if masked:
        # a value that is not finite marks its key: the mask then hides it from all who must not see it
        fine = finite_entries(value).astype(jnp.float32).min(0, keepdims=True)
        x = jnp.where(transposed(fine) > 0.0, x, jnp.nan)
        x = jnp.where(tiles.seen(scalars, arrays, at), x, MASKED)
        value = nonfinite_zeroed(value)
    highest = x.max(0, keepdims=True)
    if "best" in kept:
        _, keys = tiles.indices(at)
        where = jnp.where(x == highest, keys, _NOWHERE).min(0, keepdims=True)
        better = highest > kept["best"][...]
        kept["best_at"][...] = jnp.where(better, where, kept["best_at"][...])
        kept["best"][...] = jnp.where(better, highest, kept["best"][...])
    old_max = kept["max"][...]
    new_max = jnp.maximum(old_max, highest)
    base = jnp.where(new_max == MASKED, 0.0, new_max)  # a row that has seen nothing yet: -inf - 0, not -inf - -inf
    weights, shrink = tiles.weights(x, base), tiles.weights(old_max, base)
    kept["max"][...] = new_max
    kept["sum"][...] = kept["sum"][...] * shrink + weights.sum(0, keepdims=True)
    if tiles.spec.dropout:
        weights = jnp.where(tiles.stays(scalars, at), weights * (1.0 / (1.0 - tiles.spec.dropout)), 0.0)
    kept["out"][...] = kept["out"][...] * shrink + tiles.dot(value, weights.astype(value.dtype), (1, 0))


def _finish(tiles: Tiles, outs: Refs, kept: Refs) -> None:
    total = kept["sum"][...]
    some = total != 0.0  # a nan total is not nothing: it must show
    total = jnp.where(some, total, 1.0)
    outs["out"][...] = (kept["out"][...] / total).astype(outs["out"].dtype)
    outs["lse"][...] = jnp.where(some, kept["max"][...] * tiles.unit + jnp.log(total), -jnp.inf)
    if "best_at" in kept:
        outs["total"][...] = kept["sum"][...]
        outs["argmax"][...] = kept["best_at"][...]

"""The kernel of a walk on a TPU: which chunk each step of the grid has, how arrays are cut, and what a step does.

Arrays are handed over as (B, H, T, channels), channels rounded up to multiples of 64. The grid is (B, H, chunks), and
the state of a head stays in VMEM from chunk to chunk. A walk that descends takes the chunks from the last to the first.
Packed sequences are brought into whole chunks around the kernel, and tables in scalar memory say where each begins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.common.pallas_tpu import LANES, tile_bytes
from ejkernel.kernels.linear import chunks
from ejkernel.kernels.linear.layout import Layout
from ejkernel.kernels.linear.pallas_tpu.tiles import Chunk, Tile, parts_of, row_sums
from ejkernel.kernels.linear.scans import Walk

Operand = tuple[jax.Array, pl.BlockSpec]
Output = tuple[jax.ShapeDtypeStruct, pl.BlockSpec]

_CHANNELS = 64
_ENTERS, _LEAVES = 1, 2


@dataclass(frozen=True, eq=False)
class Steps:
    """The chunks of a walk and how its arrays are cut into them; of the walk's own arrays a kernel reads none."""

    w: Walk
    size: int
    layout: Layout

    @property
    def packed(self) -> bool:
        return self.w.cu_seqlens is not None

    @property
    def rows(self) -> int:
        return self.layout.valid.shape[1]

    @property
    def grid(self) -> tuple[int, int, int]:
        B, _, H, _ = self.w.a.shape
        return B, H, self.rows

    @property
    def widths(self) -> tuple[int, int]:
        """Channels of the state's rows and columns, as the kernel has them."""
        return _channels(self.w.a.shape[3]), _channels(self.w.c.shape[3])

    @property
    def dtype(self) -> Any:
        return _wide(self.w.c.dtype)

    @property
    def computes(self) -> bool:
        """Whether more than the state is wanted."""
        return self.w.with_out or self.w.factor is not None

    @cached_property
    def chunk(self) -> Chunk:
        w = self.w
        gates = {"g": w.g, "inner": w.inner, "outer": w.outer}
        parts = {name: parts_of(x.dtype) for name, x in gates.items() if x is not None}
        by_channel = w.inner is not None or w.outer is not None
        # products of single channels are summed over a whole sequence: nothing evens out their roundings
        fine = w.factor is not None and w.outer is not None and self.dtype == jnp.bfloat16
        return Chunk(self.size, w.late, w.descending, w.scale, by_channel, fine, parts)

    @cached_property
    def scalars(self) -> dict[str, jax.Array]:
        """What lies in scalar memory: of every chunk of packed sequences, and of every head."""
        B, H, rows = self.grid
        found = {}
        if self.packed:
            layout = self.layout
            ends = jnp.arange(rows, dtype=jnp.int32)[None] == jnp.take_along_axis(layout.last, layout.sequence, 1)
            enters, leaves = (ends, layout.first) if self.w.descending else (layout.first, ends)
            tokens = layout.valid.sum(-1, dtype=jnp.int32)
            flags = jnp.where(tokens > 0, _ENTERS * enters.astype(jnp.int32) + _LEAVES * leaves.astype(jnp.int32), 0)
            found = {"tokens": tokens, "flags": flags, "sequence": layout.sequence.astype(jnp.int32)}
            found = {name: jnp.broadcast_to(x, (B, rows)).reshape(-1) for name, x in found.items()}
        if self.w.g_gamma is not None:
            gamma = jnp.maximum(self.w.g_gamma.astype(jnp.float32), chunks.LEAST_DECAY)
            found["gamma"] = jnp.broadcast_to(gamma, (B, H)).reshape(-1)
        return found

    # Blocks ------------------------------------------------------------------------------------------------------

    def row(self, n: Any) -> Any:
        """The chunk of a step."""
        return self.rows - 1 - n if self.w.descending else n

    def of_tokens(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.size, width), lambda b, h, n, *_: (b, h, self.row(n), 0))

    def of_rows(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, 1, self.size), lambda b, h, n, *_: (b, h, self.row(n), 0, 0))

    def of_sequence(self, *shape: int) -> pl.BlockSpec:
        def index(b: Any, h: Any, n: Any, *scalars: Any) -> tuple[Any, ...]:
            sequence = self._named(scalars)["sequence"][b * self.rows + self.row(n)] if self.packed else 0
            return b, sequence, h, 0, 0

        return pl.BlockSpec((None, None, None, *shape), index)

    def _named(self, refs: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.scalars, refs, strict=True))

    def operands(self) -> dict[str, Operand]:
        w, (A, C) = self.w, self.widths
        stack = np.stack(list(self.chunk.matrices.values())).astype(np.float32)
        found = {"matrices": (jnp.asarray(stack, jnp.bfloat16), pl.BlockSpec(stack.shape, lambda *_: (0, 0, 0)))}
        given = {"b": w.b, "c": w.c, "inner": w.inner, "outer": w.outer, "factor": w.factor}
        given |= {"a": w.a} if self.computes else {}
        given |= {"balance": w.balance} if w.outer is not None else {}
        for name, x in given.items():
            if x is not None:
                x = self.to_tokens(x)
                found[name] = x, self.of_tokens(x.shape[3])
        for name, x in {"g": w.g, "balance": w.balance}.items():
            if x is not None and name not in found:
                found[name] = self.to_rows(x), self.of_rows()
        if w.start is not None:
            padding = [(0, width - n) for width, n in zip(self.widths, w.start.shape[3:], strict=True)]
            found["start"] = jnp.pad(w.start, ((0, 0),) * 3 + tuple(padding)), self.of_sequence(A, C)
        if w.sums_start is not None:
            wide = self.w.outer is not None
            sums_start = (
                jnp.pad(w.sums_start, ((0, 0),) * 3 + ((0, C - w.sums_start.shape[3]),))
                if wide
                else w.sums_start[..., None]
            )
            found["sums_start"] = sums_start[..., None, :], self.of_sequence(1, sums_start.shape[3])
        return found

    def outputs(self) -> dict[str, Output]:
        w, (A, C), (B, H, rows) = self.w, self.widths, self.grid
        length = max(rows * self.size if self.packed else w.c.shape[1], self.size)
        found: dict[str, Output] = {}
        if w.with_out:
            found["out"] = jax.ShapeDtypeStruct((B, H, length, C), self.dtype), self.of_tokens(C)
        if w.with_state:
            shape = (B, self.layout.sequences, H, A, C)
            found["state"] = jax.ShapeDtypeStruct(shape, jnp.float32), self.of_sequence(A, C)
        if w.factor is not None and w.outer is not None:
            found["products"] = jax.ShapeDtypeStruct((B, H, length, C), jnp.float32), self.of_tokens(C)
        elif w.factor is not None:
            found["products"] = jax.ShapeDtypeStruct((B, H, rows, 1, self.size), jnp.float32), self.of_rows()
        return found

    def scratch(self) -> dict[str, tuple[int, int]]:
        """Shapes of what stays from chunk to chunk, in float32."""
        found = {"state": self.widths}
        if self.w.aged:
            found["aged"] = self.widths
        if self.w.balance is not None:
            found["sums_start"] = (1, self.widths[1] if self.w.outer is not None else LANES)
        return found

    def vmem_bytes(self) -> int:
        """Bytes of VMEM; the arithmetic is in pallas_tpu.py."""
        blocks = [*self.operands().values(), *self.outputs().values()]
        copied = sum(tile_bytes(spec.block_shape, x.dtype) for x, spec in blocks)
        kept = sum(tile_bytes(shape, jnp.float32) for shape in self.scratch().values())
        W, L = max(LANES, *self.widths), self.size
        values = 4 * L * W * 8 + 4 * L * max(L, LANES) * 4 + 4 * W * W * (5 if self.w.aged else 3)
        return 2 * copied + kept + values * (3 if self.dtype == jnp.float32 else 2) // 2

    def cost(self, arrays: dict[str, Operand], outputs: dict[str, Output]) -> pl.CostEstimate:
        (B, H, rows), (A, C), L = self.grid, self.widths, self.size
        products = L * L * (A + C) * self.computes * max(1, self.chunk.levels) + (1 + self.computes) * L * A * C
        moved = [x for x, _ in (*arrays.values(), *outputs.values())]
        return pl.CostEstimate(
            flops=2 * B * H * rows * products,
            transcendentals=B * H * rows * L * (L + (A + C) * self.chunk.levels),
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in moved),
        )

    # Tokens to blocks and back -----------------------------------------------------------------------------------

    def to_tokens(self, x: jax.Array) -> jax.Array:
        """(B, T, H, channels) to (B, H, tokens of all chunks, channels); the last chunk may lack some."""
        B, T, H, channels = x.shape
        x = x.astype(_wide(x.dtype))
        if self.packed:
            x = jnp.moveaxis(self.layout.gather(x), 1, 2).reshape(B, H, self.rows * self.size, channels)
        else:
            x = jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, max(0, self.size - T)), (0, 0)))
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, _channels(channels) - channels)))

    def from_tokens(self, x: jax.Array) -> jax.Array:
        B, H, _, C = x.shape
        if self.packed:
            x = self.layout.scatter(jnp.moveaxis(x.reshape(B, H, self.rows, self.size, C), 2, 0))
        else:
            x = x[:, :, : self.layout.T].swapaxes(1, 2)
        return x[..., : self.w.c.shape[3]]

    def to_rows(self, x: jax.Array) -> jax.Array:
        """(B, T, H) to (B, H, chunks, 1, tokens) in float32, zero where there is no token."""
        return jnp.moveaxis(self.layout.gather(x.astype(jnp.float32)), 1, 2)[:, :, :, None]

    def from_products(self, x: jax.Array) -> jax.Array:
        if self.w.outer is not None:
            return self.from_tokens(x)
        return self.layout.scatter(jnp.moveaxis(x[:, :, :, 0], 2, 0))

    def final_states(self, state: jax.Array) -> jax.Array:
        """A sequence without tokens, which no step saw, keeps its start."""
        state = state[..., : self.w.a.shape[3], : self.w.c.shape[3]]
        if not self.packed:
            return state
        start = jnp.zeros((), jnp.float32) if self.w.start is None or self.w.aged else self.w.start
        return jnp.where((self.layout.last >= 0)[..., None, None, None], state, start)

    # The kernel --------------------------------------------------------------------------------------------------

    def linear_walk(self, given: Any, arrays: Any, outs: Any, kept: Any) -> None:
        scalars = self._named(given)
        b, h, n = (pl.program_id(axis) for axis in range(3))
        row = self.row(n)
        gamma = scalars["gamma"][b * self.grid[1] + h] if "gamma" in scalars else None
        if self.packed:
            at = b * self.rows + row
            tokens, flags = scalars["tokens"][at], scalars["flags"][at]
            enters, leaves = (flags & _ENTERS) != 0, (flags & _LEAVES) != 0
        else:
            tokens = jnp.minimum(self.layout.T - row * self.size, self.size)
            enters, leaves = n == 0, n == self.rows - 1

        @pl.when(enters)
        def _() -> None:
            for name, first in (("state", "start"), ("aged", ""), ("sums_start", "sums_start")):
                if name in kept:
                    kept[name][...] = (
                        jnp.broadcast_to(arrays[first][...], kept[name].shape)
                        if first in arrays
                        else jnp.zeros(kept[name].shape, jnp.float32)
                    )

        # behind the last packed sequence there may be chunks of nothing
        pl.when(tokens > 0)(lambda: self._step(arrays, outs, kept, tokens, gamma))
        if self.w.with_state:

            @pl.when(leaves)
            def _() -> None:
                outs["state"][...] = kept["aged" if self.w.aged else "state"][...]

    def _step(self, arrays: Any, outs: Any, kept: Any, tokens: Any, gamma: Any) -> None:
        tile = Tile(self.chunk, self._values(arrays, tokens), arrays["matrices"], tokens, gamma)
        state, aged = kept["state"][...], kept["aged"][...] if self.w.aged else None
        if self.computes:
            others, diagonal = tile.out(state, aged)
            if self.w.with_out:
                outs["out"][...] = (others + diagonal).astype(self.dtype)
            if self.w.factor is not None:
                self._products(tile, others, outs, kept)
        kept["state"][...] = tile.next_state(state)
        if aged is not None:
            kept["aged"][...] = tile.next_aged(state, aged)

    def _values(self, arrays: Any, tokens: Any) -> dict[str, jax.Array]:
        """The arrays of a chunk: zero where there is no token, and no decay below the least."""
        found = {n: ref[...] for n, ref in arrays.items() if n not in ("matrices", "start", "sums_start")}
        if not self.packed and self.layout.T % self.size and self.size < self.layout.T:
            there = lax.broadcasted_iota(jnp.int32, (self.size, 1), 0) < tokens
            for name, x in found.items():
                if x.shape[0] == self.size:
                    found[name] = jnp.where(there, x.astype(jnp.float32), 0.0).astype(x.dtype)
        gates = {name: found[name].astype(jnp.float32) for name in self.chunk.parts}
        return found | {name: jnp.maximum(x, chunks.LEAST_DECAY) for name, x in gates.items()}

    def _products(self, tile: Tile, others: jax.Array, outs: Any, kept: Any) -> None:
        by_channel = self.w.outer is not None
        products = tile.arrays["factor"].astype(jnp.float32) * others
        products = products if by_channel else row_sums(products)
        if self.w.balance is not None:
            x, sums_start = tile.arrays["balance"] - products, kept["sums_start"][...]
            products, sums_start = (
                tile.running(x, sums_start) if by_channel else tile.running_lanes(x, sums_start[:, :1])
            )
            kept["sums_start"][...] = jnp.broadcast_to(sums_start, kept["sums_start"].shape)
        outs["products"][...] = products if by_channel else products[:1]


def _wide(dtype: Any) -> Any:
    """float16 as float32: a TPU multiplies neither, but the latter holds the former exactly."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)


def _channels(n: int) -> int:
    return -(-n // _CHANNELS) * _CHANNELS

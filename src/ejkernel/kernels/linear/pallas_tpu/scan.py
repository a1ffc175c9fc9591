"""The kernel of a scan on a TPU: which chunk each grid step has, how arrays are cut into blocks, and what a step does.

Arrays are handed over as (B, H, T, channels), channels rounded up to multiples of 64. The grid is (B, H, chunks), and
the state of a head stays in VMEM from chunk to chunk. A scan that descends takes the chunks from the last to the first.
Packed sequences are brought into whole chunks around the kernel, and tables in scalar memory say where each begins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from ejkernel.kernels.linear.pallas_tpu.tiles import Chunk, Tile, bfloat16_terms, row_sums
from ejkernel.kernels.linear.scans import Scan

Operand = tuple[jax.Array, pl.BlockSpec]
Output = tuple[jax.ShapeDtypeStruct, pl.BlockSpec]

_CHANNELS = 64
# flags of a chunk: the first and the last of its sequence, in the order of the scan
_FIRST, _LAST = 1, 2


@dataclass(frozen=True, eq=False)
class ScanKernel:
    """A scan's kernel and how arrays are cut into blocks for it. It reads these, none of the arrays of the scan."""

    scan: Scan
    size: int
    layout: Layout

    @property
    def packed(self) -> bool:
        return self.scan.cu_seqlens is not None

    @property
    def rows(self) -> int:
        return self.layout.valid.shape[1]

    @property
    def grid(self) -> tuple[int, int, int]:
        B, _, H, _ = self.scan.a.shape
        return B, H, self.rows

    @property
    def widths(self) -> tuple[int, int]:
        """Channels of the state's rows and columns, as the kernel has them."""
        return _channels(self.scan.a.shape[3]), _channels(self.scan.c.shape[3])

    @property
    def dtype(self) -> Any:
        return _multiplied_dtype(self.scan.c.dtype)

    @property
    def computes(self) -> bool:
        """Whether more than the state is wanted."""
        return self.scan.with_out or self.scan.factor is not None

    @cached_property
    def chunk(self) -> Chunk:
        scan = self.scan
        gates = {"g": scan.g, "inner": scan.inner, "outer": scan.outer}
        terms = {name: bfloat16_terms(x.dtype) for name, x in gates.items() if x is not None}
        by_channel = scan.inner is not None or scan.outer is not None
        # products of single channels are summed over a whole sequence: nothing evens out their roundings
        split = scan.factor is not None and scan.outer is not None and self.dtype == jnp.bfloat16
        return Chunk(self.size, scan.deferred, scan.descending, scan.scale, by_channel, split, terms)

    @cached_property
    def scalars(self) -> dict[str, jax.Array]:
        """What lies in scalar memory: of every chunk of packed sequences, and of every head."""
        B, H, rows = self.grid
        tables = {}
        if self.packed:
            layout = self.layout
            last = jnp.arange(rows, dtype=jnp.int32)[None] == jnp.take_along_axis(layout.last, layout.sequence, 1)
            first, last = (last, layout.first) if self.scan.descending else (layout.first, last)
            tokens = layout.valid.sum(-1, dtype=jnp.int32)
            flags = jnp.where(tokens > 0, _FIRST * first.astype(jnp.int32) + _LAST * last.astype(jnp.int32), 0)
            tables = {"tokens": tokens, "flags": flags, "sequence": layout.sequence.astype(jnp.int32)}
            tables = {name: jnp.broadcast_to(x, (B, rows)).reshape(-1) for name, x in tables.items()}
        if self.scan.g_gamma is not None:
            gamma = jnp.maximum(self.scan.g_gamma.astype(jnp.float32), chunks.LEAST_DECAY)
            tables["gamma"] = jnp.broadcast_to(gamma, (B, H)).reshape(-1)
        return tables

    # Blocks ------------------------------------------------------------------------------------------------------

    def row(self, n: Any) -> Any:
        """The chunk of a grid step."""
        return self.rows - 1 - n if self.scan.descending else n

    def token_blocks(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.size, width), lambda b, h, n, *_: (b, h, self.row(n), 0))

    def row_blocks(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, 1, self.size), lambda b, h, n, *_: (b, h, self.row(n), 0, 0))

    def sequence_blocks(self, *shape: int) -> pl.BlockSpec:
        def index(b: Any, h: Any, n: Any, *scalars: Any) -> tuple[Any, ...]:
            sequence = self._named(scalars)["sequence"][b * self.rows + self.row(n)] if self.packed else 0
            return b, sequence, h, 0, 0

        return pl.BlockSpec((None, None, None, *shape), index)

    def _named(self, refs: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.scalars, refs, strict=True))

    def operands(self) -> dict[str, Operand]:
        scan, (A, C) = self.scan, self.widths
        stack = np.stack(list(self.chunk.matrices.values())).astype(np.float32)
        operands = {"matrices": (jnp.asarray(stack, jnp.bfloat16), pl.BlockSpec(stack.shape, lambda *_: (0, 0, 0)))}
        given = {"b": scan.b, "c": scan.c, "inner": scan.inner, "outer": scan.outer, "factor": scan.factor}
        given |= {"a": scan.a} if self.computes else {}
        given["erase"] = scan.erase
        given |= {"minuend": scan.minuend} if scan.outer is not None else {}
        for name, x in given.items():
            if x is not None:
                x = self.to_tokens(x)
                operands[name] = x, self.token_blocks(x.shape[3])
        for name, x in {"g": scan.g, "minuend": scan.minuend}.items():
            if x is not None and name not in operands:
                operands[name] = self.to_rows(x), self.row_blocks()
        if scan.start is not None:
            padding = [(0, width - n) for width, n in zip(self.widths, scan.start.shape[3:], strict=True)]
            operands["start"] = jnp.pad(scan.start, ((0, 0),) * 3 + tuple(padding)), self.sequence_blocks(A, C)
        if scan.sums_start is not None:
            sums, width = (scan.sums_start, C) if scan.outer is not None else (scan.sums_start[..., None], 1)
            sums = jnp.pad(sums, ((0, 0),) * 3 + ((0, width - sums.shape[3]),))
            operands["sums_start"] = sums[..., None, :], self.sequence_blocks(1, width)
        return operands

    def outputs(self) -> dict[str, Output]:
        scan, (A, C), (B, H, rows) = self.scan, self.widths, self.grid
        length = max(rows * self.size if self.packed else scan.c.shape[1], self.size)
        outputs: dict[str, Output] = {}
        if scan.with_out:
            outputs["out"] = jax.ShapeDtypeStruct((B, H, length, C), self.dtype), self.token_blocks(C)
        if scan.with_written:
            outputs["written"] = jax.ShapeDtypeStruct((B, H, length, C), self.dtype), self.token_blocks(C)
        if scan.with_state:
            shape = (B, self.layout.sequences, H, A, C)
            outputs["state"] = jax.ShapeDtypeStruct(shape, jnp.float32), self.sequence_blocks(A, C)
        if scan.factor is not None and scan.outer is not None:
            outputs["products"] = jax.ShapeDtypeStruct((B, H, length, C), jnp.float32), self.token_blocks(C)
        elif scan.factor is not None:
            outputs["products"] = jax.ShapeDtypeStruct((B, H, rows, 1, self.size), jnp.float32), self.row_blocks()
        return outputs

    def scratch(self) -> dict[str, tuple[int, int]]:
        """Shapes of what stays from chunk to chunk, in float32."""
        shapes = {"state": self.widths}
        if self.scan.tangent:
            shapes["tangent"] = self.widths
        if self.scan.minuend is not None:
            shapes["sums_start"] = (1, self.widths[1] if self.scan.outer is not None else LANES)
        return shapes

    def vmem_bytes(self) -> int:
        """Bytes of VMEM; the arithmetic is at the top of __init__.py."""
        blocks = [*self.operands().values(), *self.outputs().values()]
        copied = sum(tile_bytes(spec.block_shape, x.dtype) for x, spec in blocks)
        kept = sum(tile_bytes(shape, jnp.float32) for shape in self.scratch().values())
        W, L = max(LANES, *self.widths), self.size
        pairs = 4 if self.scan.erase is None else 16  # and the blocks of an inverse, in tiles of 128 lanes
        values = 4 * L * W * 8 + 4 * L * max(L, LANES) * pairs + 4 * W * W * (5 if self.scan.tangent else 3)
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
        x = x.astype(_multiplied_dtype(x.dtype))
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
        return x[..., : self.scan.c.shape[3]]

    def to_rows(self, x: jax.Array) -> jax.Array:
        """(B, T, H) to (B, H, chunks, 1, tokens) in float32, zero where there is no token."""
        return jnp.moveaxis(self.layout.gather(x.astype(jnp.float32)), 1, 2)[:, :, :, None]

    def from_products(self, x: jax.Array) -> jax.Array:
        if self.scan.outer is not None:
            return self.from_tokens(x)
        return self.layout.scatter(jnp.moveaxis(x[:, :, :, 0], 2, 0))

    def final_states(self, state: jax.Array) -> jax.Array:
        """A sequence without tokens, which no grid step had, keeps its start."""
        state = state[..., : self.scan.a.shape[3], : self.scan.c.shape[3]]
        if not self.packed:
            return state
        start = jnp.zeros((), jnp.float32) if self.scan.start is None or self.scan.tangent else self.scan.start
        return jnp.where((self.layout.last >= 0)[..., None, None, None], state, start)

    # The kernel --------------------------------------------------------------------------------------------------

    def linear_scan_kernel(self, scalar_refs: Any, arrays: Any, outs: Any, scratch: Any) -> None:
        scalars = self._named(scalar_refs)
        b, h, n = (pl.program_id(axis) for axis in range(3))
        row = self.row(n)
        gamma = scalars["gamma"][b * self.grid[1] + h] if "gamma" in scalars else None
        if self.packed:
            index = b * self.rows + row
            tokens, flags = scalars["tokens"][index], scalars["flags"][index]
            first, last = (flags & _FIRST) != 0, (flags & _LAST) != 0
        else:
            tokens = jnp.minimum(self.layout.T - row * self.size, self.size)
            first, last = n == 0, n == self.rows - 1

        @pl.when(first)
        def _() -> None:
            for name, given in (("state", "start"), ("tangent", ""), ("sums_start", "sums_start")):
                if name in scratch:
                    scratch[name][...] = (
                        jnp.broadcast_to(arrays[given][...], scratch[name].shape)
                        if given in arrays
                        else jnp.zeros(scratch[name].shape, jnp.float32)
                    )

        # behind the last packed sequence there may be chunks without tokens
        pl.when(tokens > 0)(lambda: self._step(arrays, outs, scratch, tokens, gamma))
        if self.scan.with_state:

            @pl.when(last)
            def _() -> None:
                outs["state"][...] = scratch["tangent" if self.scan.tangent else "state"][...]

    def _step(self, arrays: Any, outs: Any, scratch: Any, tokens: Any, gamma: Any) -> None:
        tile = Tile(self.chunk, self._values(arrays, tokens), arrays["matrices"], tokens, gamma)
        state, tangent = scratch["state"][...], scratch["tangent"][...] if self.scan.tangent else None
        if self.scan.erase is not None:
            written = tile.operand(tile.written(state))
            tile = replace(tile, arrays=tile.arrays | {"c": written})
            if self.scan.with_written:
                outs["written"][...] = written.astype(self.dtype)
        if self.computes:
            others, diagonal = tile.out(state, tangent)
            if self.scan.with_out:
                outs["out"][...] = (others if self.scan.strict else others + diagonal).astype(self.dtype)
            if self.scan.factor is not None:
                self._products(tile, others, outs, scratch)
        scratch["state"][...] = tile.next_state(state)
        if tangent is not None:
            scratch["tangent"][...] = tile.next_tangent(state, tangent)

    def _values(self, arrays: Any, tokens: Any) -> dict[str, jax.Array]:
        """The arrays of a chunk: zero where there is no token, and no decay below the least."""
        values = {n: ref[...] for n, ref in arrays.items() if n not in ("matrices", "start", "sums_start")}
        if not self.packed and self.layout.T % self.size and self.size < self.layout.T:
            real = lax.broadcasted_iota(jnp.int32, (self.size, 1), 0) < tokens
            for name, x in values.items():
                if x.shape[0] == self.size:
                    values[name] = jnp.where(real, x.astype(jnp.float32), 0.0).astype(x.dtype)
        gates = {name: values[name].astype(jnp.float32) for name in self.chunk.terms}
        return values | {name: jnp.maximum(x, chunks.LEAST_DECAY) for name, x in gates.items()}

    def _products(self, tile: Tile, others: jax.Array, outs: Any, scratch: Any) -> None:
        by_channel = self.scan.outer is not None
        products = tile.arrays["factor"].astype(jnp.float32) * others
        products = products if by_channel else row_sums(products)
        if self.scan.minuend is not None:
            x, sums_start = tile.arrays["minuend"] - products, scratch["sums_start"][...]
            products, sums_start = (
                tile.running(x, sums_start) if by_channel else tile.running_lanes(x, sums_start[:, :1])
            )
            scratch["sums_start"][...] = jnp.broadcast_to(sums_start, scratch["sums_start"].shape)
        outs["products"][...] = products if by_channel else products[:1]


def _multiplied_dtype(dtype: Any) -> Any:
    """float16 as float32: a TPU multiplies neither, but the latter holds the former exactly."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)


def _channels(n: int) -> int:
    return -(-n // _CHANNELS) * _CHANNELS

"""One tile of softmax attention on a TPU: what the forward and backward kernels share.

Arrays keep the length in the lanes: `(B, T, H, D)` is handed over as `(B, H, D, T)`. That is how XLA itself lays out
such an array when it may choose, so no copy stands around the kernels, and a head dimension that is not a multiple of
128 costs neither memory nor bandwidth. Tiles of logits are (keys, queries): what belongs to a query is a row of lanes.
"""

import math
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.expressions.nodes import OPERAND, Expression, nodes
from ejkernel.kernels.common import dropout as bits
from ejkernel.kernels.common.pallas_tpu import LANES, LOG2_E, launch, transposed
from ejkernel.kernels.common.pallas_tpu_rules import for_mosaic
from ejkernel.kernels.common.rules import TileOperands, array_name
from ejkernel.kernels.common.tiles import capped, matmul
from ejkernel.kernels.softmax.pallas_tpu.schedule import MASKED, VISIT, Scalars, divided, flatten
from ejkernel.kernels.softmax.schedule import Side
from ejkernel.kernels.softmax.spec import Dimensions, Spec, dimensions
from ejkernel.ops import Call
from ejkernel.types.visibility import Tokens, visible

Refs = dict[str, Any]
Operand = tuple[jax.Array, pl.BlockSpec]
# shape and dtype of what a kernel keeps from tile to tile
Scratch = tuple[tuple[int, int], Any]

# arrays of a call that have numbers for a head, which a kernel reads from scalar memory
_SCALARS = ("sinks", "dropout_seeds", "int_scalars", "float_scalars")


def length_last(x: jax.Array) -> jax.Array:
    """(B, L, heads, dim) as (B, heads, dim, L)."""
    return x.transpose(0, 2, 3, 1)


def length_second(x: jax.Array) -> jax.Array:
    """(B, heads, dim, L) as (B, L, heads, dim)."""
    return x.transpose(0, 3, 1, 2)


def whole_block(block: int, length: int) -> int:
    """A block no longer than the array it cuts, up to whole lanes."""
    return min(block, -(-length // LANES) * LANES)


class GridStep:
    """The tile of one step of the grid. A property reads scalar memory when it is used: index maps use few of them."""

    def __init__(self, tiles: "Tiles", index: tuple[Any, ...], scalars: Scalars):
        self.tiles, self.index, self.scalars = tiles, index, scalars

    @property
    def b(self) -> Any:
        return self.index[0]

    @cached_property
    def _row(self) -> tuple[Any, Any]:
        return self.tiles.schedule.row(self.scalars, *self.index)

    @cached_property
    def _column(self) -> tuple[Any, Any]:
        return self.tiles.schedule.column(self.scalars, *self.index)

    @property
    def _owns_queries(self) -> bool:
        return self.tiles.side == "q"

    @cached_property
    def h(self) -> Any:
        """The query head."""
        return self.index[1] if self._owns_queries else self.index[1] * self.tiles.dims.G + self.member

    @property
    def member(self) -> Any:
        """Which of the query heads that share a key head, where key blocks are owned."""
        return self._row[1]

    @cached_property
    def kv(self) -> Any:
        """The key head."""
        return divided(self.index[1], self.tiles.dims.G) if self._owns_queries else self.index[1]

    @cached_property
    def i(self) -> Any:
        """The query block."""
        return self._row[0] if self._owns_queries else self._column[0]

    @cached_property
    def j(self) -> Any:
        """The key block."""
        return self._column[0] if self._owns_queries else self._row[0]

    @cached_property
    def flags(self) -> Any:
        return self._column[1]

    def has(self, flag: int) -> Any:
        return (self.flags & flag) != 0


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of one kernel: `side` "q" owns query blocks, "k" owns key blocks of a key head."""

    call: Call
    dims: Dimensions
    block_q: int
    block_k: int
    side: Side
    schedule: Any

    @classmethod
    def of(cls, call: Call, block_q: int, block_k: int, side: Side) -> "Tiles":
        dims = dimensions(call)
        block_q, block_k = whole_block(block_q, dims.T), whole_block(block_k, dims.S)
        schedule = flatten(call, block_q, block_k, side, dims.G if side == "k" else 1)
        return cls(call, dims, block_q, block_k, side, schedule)

    @property
    def spec(self) -> Spec:
        return self.call.spec

    # The grid ------------------------------------------------------------------------------------------------

    @property
    def grid(self) -> tuple[Any, ...]:
        return self.dims.B, self.dims.H if self.side == "q" else self.dims.Hkv, self.schedule.number

    @property
    def visits(self) -> int:
        """Tiles that the kernel visits; the most there can be, where values decide."""
        return self.grid[0] * self.grid[1] * self.schedule.length * self.schedule.repeats

    def scalars(self) -> Scalars:
        """What lies in scalar memory: the schedule, sinks, dropout seeds, and what functions read for a head."""
        given = {name: self.call[name].reshape(-1) for name in self._of_heads}
        if "dropout_seeds" in given:
            given["dropout_seeds"] = lax.bitcast_convert_type(given["dropout_seeds"], jnp.int32)
        return self.schedule.scalars | given

    @property
    def scalar_bytes(self) -> int:
        return sum(4 * x.size for x in self.scalars().values())

    @cached_property
    def _of_heads(self) -> list[str]:
        wanted = {"sinks", "dropout_seeds", *self._operand_names}
        return [name for name in _SCALARS if name in wanted and name in self.call]

    @cached_property
    def _operand_names(self) -> list[str]:
        """The arrays that mask and score functions read in this kernel."""
        mask, score = self.spec.rules
        read = nodes(score, mask if self.schedule.masked else None)
        return list(dict.fromkeys(array_name(node) for node in read if node.name == OPERAND))

    def step(self, index: tuple[Any, ...], scalars: Scalars) -> GridStep:
        return GridStep(self, index, scalars)

    def current_step(self, scalars: Scalars) -> GridStep:
        at = self.step(tuple(pl.program_id(axis) for axis in range(len(self.grid))), scalars)
        _ = at.h, at.i, at.j, at.flags  # read before any branch: what is read in a branch is known in it alone
        return at

    def sink(self, scalars: Scalars, at: GridStep) -> Any:
        return scalars["sinks"][(at.b * self.dims.H if self.call["sinks"].shape[0] > 1 else 0) + at.h]

    def seed(self, scalars: Scalars, at: GridStep) -> Any:
        return scalars["dropout_seeds"][at.b * self.dims.H + at.h].astype(jnp.uint32)

    # Blocks of arrays ----------------------------------------------------------------------------------------

    def _block(self, shape: tuple[int | None, ...], where: Any) -> pl.BlockSpec:
        def index(*given: Any) -> tuple[Any, ...]:
            names = (*self.schedule.scalars, *self._of_heads)
            return where(self.step(given[: len(self.grid)], dict(zip(names, given[len(self.grid) :], strict=True))))

        return pl.BlockSpec(shape, index)

    def of_queries(self, dim: int) -> pl.BlockSpec:
        """Blocks of (B, H, dim, T)."""
        return self._block((None, None, dim, self.block_q), lambda at: (at.b, at.h, 0, at.i))

    def of_keys(self, dim: int) -> pl.BlockSpec:
        """Blocks of (B, Hkv, dim, S)."""
        return self._block((None, None, dim, self.block_k), lambda at: (at.b, at.kv, 0, at.j))

    def _ids(self, name: str) -> Operand:
        x = self.call[name][:, None]
        queries, many = name.startswith("q_"), x.shape[0] > 1
        block = (None, 1, self.block_q if queries else self.block_k)
        return x, self._block(block, lambda at: (at.b if many else 0, 0, at.i if queries else at.j))

    def _operand(self, name: str) -> Operand:
        """Blocks of what functions read for each query, (B|1, H|1, n, T), or for each key, (B|1, H|1, n, S)."""
        x, queries = self.call[name], name.endswith("_rows")
        B, H, n, _ = x.shape
        block = (None, None, n, self.block_q if queries else self.block_k)
        where = lambda at: (at.b if B > 1 else 0, at.h if H > 1 else 0, 0, at.i if queries else at.j)  # noqa: E731
        return x, self._block(block, where)

    def of_matrix(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Blocks of (B, H, T, S), where any axis may be 1."""
        B, H, T, S = (n > 1 for n in shape)
        block = (None, None, self.block_q if T else 1, self.block_k if S else 1)
        return self._block(block, lambda at: (at.b if B else 0, at.h if H else 0, at.i if T else 0, at.j if S else 0))

    def _cells(self) -> Operand:
        """The cells of the block pattern that each tile touches, (B|1, H|1, nq, nk, rows, columns) float32."""
        pattern = self.call["pattern"]
        height, width = self.spec.pattern_block or (1, 1)
        Bp, Hp, Tb, Sb = pattern.shape
        rows, columns = _touched(self.dims.T, self.block_q, height), _touched(self.dims.S, self.block_k, width)
        # (nq, rows) and (nk, columns)
        at_q, at_k = np.minimum(rows, Tb - 1), np.minimum(columns, Sb - 1)
        cells = pattern[:, :, at_q[:, None, :, None], at_k[None, :, None, :]].astype(jnp.float32)
        block = (None, None, None, None, *cells.shape[4:])
        where = lambda at: (at.b if Bp > 1 else 0, at.h if Hp > 1 else 0, at.i, at.j, 0, 0)  # noqa: E731
        return cells, self._block(block, where)

    def operands(self) -> dict[str, Operand]:
        """The arrays that every kernel reads: queries, keys, values, bias, masks, and what functions read."""
        call, dims = self.call, self.dims
        operands: dict[str, Operand] = {
            "query": (length_last(call["query"]), self.of_queries(dims.D)),
            "key": (length_last(call["key"]), self.of_keys(dims.D)),
            "value": (length_last(call["value"]), self.of_keys(dims.Dv)),
        }
        if "bias" in call:
            operands["bias"] = (call["bias"], self.of_matrix(call["bias"].shape))
        operands |= {name: self._operand(name) for name in self._operand_names if name not in _SCALARS}
        if not self.schedule.masked:
            return operands
        for name in ("q_segments", "kv_segments", "q_positions", "kv_positions"):
            if name in call:
                operands[name] = self._ids(name)
        if "mask" in call:
            operands["mask"] = (call["mask"].astype(jnp.int8), self.of_matrix(call["mask"].shape))
        if "pattern" in call:
            operands["pattern"] = self._cells()
        return operands

    # Inside a kernel -----------------------------------------------------------------------------------------

    def visit(self, at: GridStep, step: Any) -> None:
        """step(masked) where this grid step visits a tile, with the element mask or without."""
        if self.schedule.unmasked:
            pl.when(at.has(VISIT) & ~at.has(MASKED))(lambda: step(False))
        if self.schedule.masked:
            pl.when(at.has(VISIT) & at.has(MASKED))(lambda: step(True))

    def indices(self, at: GridStep) -> tuple[jax.Array, jax.Array]:
        """Query (1, block_q) and key (block_k, 1) indices."""
        queries = at.i * self.block_q + lax.broadcasted_iota(jnp.int32, (1, self.block_q), 1)
        return queries, at.j * self.block_k + lax.broadcasted_iota(jnp.int32, (self.block_k, 1), 0)

    def dot(self, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        precision = self.spec.precision
        if a.dtype != jnp.float32:
            precision = None
        elif precision != lax.Precision.DEFAULT:
            precision = lax.Precision.HIGHEST  # the hardware multiplies bfloat16: float32 takes several passes
        return matmul(a, b, contract, precision)

    @property
    def plain(self) -> bool:
        """Whether nothing comes between the scale and the softmax, so that the scale can wait for the exponential."""
        spec = self.spec
        changed = "bias" in self.call or spec.soft_cap is not None or spec.rules.score is not None
        return not changed and spec.logits_dtype == "float32" and spec.scale > 0

    @property
    def unit(self) -> float:
        """What the numbers of `scores` and `logits` are multiples of."""
        return self.spec.scale if self.plain else 1.0

    def scores(self, refs: Refs, query: jax.Array, key: jax.Array) -> jax.Array:
        """What a score function is given, (block_k, block_q) in units of `unit`."""
        x = self.dot(key, query, (0, 0))
        if self.plain:
            return x
        x *= self.spec.scale
        if "bias" in refs:
            x += transposed(refs["bias"][...].astype(jnp.float32))
        return capped(x, self.spec.soft_cap)

    def logits(self, scalars: Scalars, refs: Refs, at: GridStep, scores: jax.Array) -> jax.Array:
        """Logits (block_k, block_q) before the mask, in units of `unit`."""
        rule = self.spec.rules.score
        x = scores if rule is None else self.value(rule, scalars, refs, at, scores)
        return rounded(jnp.broadcast_to(x, scores.shape), self.spec.logits_dtype)

    def value(
        self, expression: Expression, scalars: Scalars, refs: Refs, at: GridStep, scores: jax.Array | None = None
    ) -> jax.Array:
        """An expression of a mask or score function, of a shape that broadcasts with (block_k, block_q)."""

        def scalar(name: str, number: int) -> Any:
            B, H, n = self.call[name].shape
            return scalars[name][((at.b * H if B > 1 else 0) + (at.h if H > 1 else 0)) * n + number]

        def row(name: str, number: int) -> jax.Array:
            return refs[name][number : number + 1]

        def column(name: str, number: int) -> jax.Array:
            return transposed(refs[name][number : number + 1])

        return TileOperands(scalar, row, column).value(for_mosaic(expression), *self.indices(at), scores)

    def weights(self, x: jax.Array, base: jax.Array) -> jax.Array:
        """exp(x - base), in units of `unit`; subtracted first, for a product that is fused is not rounded."""
        return jnp.exp2((x - base) * (self.unit * LOG2_E))

    def seen(self, scalars: Scalars, refs: Refs, at: GridStep) -> jax.Array:
        """Which pairs of a tile are visible, (block_k, block_q)."""
        spec, dims = self.spec, self.dims
        at_q, at_k = self.indices(at)
        pairs = jnp.ones((self.block_k, self.block_q), jnp.bool_)
        if dims.T % self.block_q:
            pairs &= at_q < dims.T
        if dims.S % self.block_k:
            pairs &= at_k < dims.S
        queries, keys = Tokens(at_q + (dims.S - dims.T)), Tokens(at_k)
        if "q_positions" in refs:
            queries, keys = Tokens(refs["q_positions"][...]), Tokens(transposed(refs["kv_positions"][...]))
        if "q_segments" in refs:
            queries = queries._replace(segment=refs["q_segments"][...])
            keys = keys._replace(segment=transposed(refs["kv_segments"][...]))
        rules = [transposed(refs["mask"][...].astype(jnp.int32)) != 0] if "mask" in refs else []
        if "pattern" in refs:
            rules.append(self._pattern(refs["pattern"][...], at_q, at_k, at))
        if spec.rules.mask is not None:
            rules.append(self.value(spec.rules.mask, scalars, refs, at))
        return visible(queries, keys, spec.band, spec.chunk, pairs=pairs, also=rules, divide=_floordivided)

    def _pattern(self, cells: jax.Array, queries: jax.Array, keys: jax.Array, at: GridStep) -> jax.Array:
        """The cells (rows, columns) of a tile spread over its pairs, by two products with zeros and ones."""
        height, width = self.spec.pattern_block or (1, 1)
        rows, columns = cells.shape
        first_q, first_k = divided(at.i * self.block_q, height), divided(at.j * self.block_k, width)
        row = lax.broadcasted_iota(jnp.int32, (rows, self.block_q), 0) + first_q
        column = lax.broadcasted_iota(jnp.int32, (self.block_k, columns), 1) + first_k
        of_query = (row * height <= queries) & (queries < (row + 1) * height)
        of_key = (column * width <= keys) & (keys < (column + 1) * width)
        by_query = matmul(cells, of_query.astype(jnp.float32), (0, 0))  # (columns, block_q)
        return matmul(of_key.astype(jnp.float32), by_query, (1, 0)) > 0.5

    def stays(self, scalars: Scalars, at: GridStep) -> jax.Array:
        """Which pairs survive dropout, (block_k, block_q)."""
        return bits.keep(self.seed(scalars, at), *self.indices(at), self.spec.dropout)

    def launch(
        self, kernel: Any, arrays: dict[str, Operand], outputs: Any, scratch: dict[str, Scratch], width: int
    ) -> Any:
        """Run a kernel over the grid; `width` is what the head dimensions of a tile's matmuls add up to."""
        given = self.scalars()

        @wraps(kernel)
        def named(scalars: tuple[Any, ...], *refs: Refs) -> None:
            kernel(dict(zip(given, scalars, strict=True)), *refs)

        return launch(
            named,
            target=self.call.target,
            grid=self.grid,
            scalars=list(given.values()),
            arrays=arrays,
            outputs=outputs,
            scratch={name: pltpu.VMEM(*kept) for name, kept in scratch.items()},
            cost=self.cost(width, arrays, outputs),
            parallel=2,
        )

    def cost(self, width: int, arrays: dict[str, Operand], outputs: Any) -> pl.CostEstimate:
        """Operations of the tiles visited, and bytes copied: row blocks once, column blocks and matrices per visit."""
        B, heads, *_ = self.grid
        rows = B * heads * (-(-self.dims.T // self.block_q) if self.side == "q" else -(-self.dims.S // self.block_k))

        def copied(name: str, x: Any, spec: pl.BlockSpec) -> int:
            matrix = name in ("bias", "mask", "pattern")
            of_keys = name.startswith("k") or name == "value" or name.endswith("_columns")
            times = self.visits if matrix or of_keys == (self.side == "q") else rows
            return times * math.prod(n for n in spec.block_shape or () if isinstance(n, int)) * x.dtype.itemsize

        pairs = self.visits * self.block_q * self.block_k
        return pl.CostEstimate(
            flops=2 * pairs * width,
            transcendentals=pairs,
            bytes_accessed=sum(copied(name, x, spec) for name, (x, spec) in arrays.items())
            + sum(math.prod(struct.shape) * struct.dtype.itemsize for struct, _ in outputs.values()),
        )


def rounded(x: jax.Array, dtype: str) -> jax.Array:
    """float32 x rounded to a narrower dtype; to float16 by hand, for a TPU has none."""
    if dtype != "float16":
        return x.astype(dtype).astype(jnp.float32)
    word = lax.bitcast_convert_type(x, jnp.int32)
    word = (word + 0xFFF + ((word >> 13) & 1)) & ~0x1FFF  # to nearest even, ten bits behind the point
    normal = lax.bitcast_convert_type(word, jnp.float32)
    size = jnp.abs(x)
    # float32 near 0.75 steps by 2^-24, as float16 does below its smallest normal number
    small = jnp.where(size < 2.0**-14, (size + 0.75) - 0.75, jnp.abs(normal))
    large = jnp.where(size < 65520.0, small, jnp.where(size == size, jnp.inf, jnp.nan))
    return jnp.where(x < 0, -large, large)


def finite_entries(x: jax.Array) -> jax.Array:
    """Which entries are finite: of what is not, the difference with itself is nan."""
    wide = x.astype(jnp.float32)
    return wide - wide == 0.0


def nonfinite_zeroed(x: jax.Array) -> jax.Array:
    """x with zeros for what is not finite: 0 * nan is nan, so in a product over rows a hidden one could leak."""
    return jnp.where(finite_entries(x), x.astype(jnp.float32), 0.0).astype(x.dtype)


def _floordivided(x: jax.Array, n: int) -> jax.Array:
    return lax.div(jnp.where(x < 0, x - (n - 1), x), jnp.int32(n))


def _touched(length: int, block: int, cell: int) -> np.ndarray:
    """The cells each block touches: (blocks, the most that one touches); the last ones may lie past the end."""
    starts = np.arange(0, length, block)
    first, last = starts // cell, (starts + block - 1) // cell
    return first[:, None] + np.arange(int((last - first).max()) + 1)

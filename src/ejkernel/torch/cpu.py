"""Attention on CPU tensors: every tile that the block schedule visits, many at a time, and no other.

Elsewhere too, what kernels have no gradients of: those of tables that functions read.

Tiles are rows of one batched product each, in float32. What is not finite never enters a product that sums over rows:
0 * nan is nan, so it would reach those who do not see it. It marks the logits of its own row instead, which masks hide.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ejkernel.expressions.nodes import LOOKUP
from ejkernel.kernels.common.rules import Rules, TileOperands, table_index
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.softmax.rules import head_operands, slopes
from ejkernel.kernels.softmax.schedule import Ranges, plan
from ejkernel.kernels.softmax.spec import Band, Dimensions, Spec, dimensions
from ejkernel.ops import Call
from ejkernel.torch.calls import (
    Cotangents,
    Gradients,
    Options,
    Tensors,
    are_heads_first,
    canonical,
    empty_rows,
    output_dtype,
    sink_gradient,
)
from ejkernel.torch.dropout import kept_pairs
from ejkernel.torch.functions import TORCH, Functions
from ejkernel.torch.inputs import Lengths
from ejkernel.torch.pattern import Pattern
from ejkernel.types.visibility import Tokens, pattern_cells, visible

# logits that are in memory at a time
_MOST_LOGITS = 2**22


class Tiles(NamedTuple):
    """The visited tiles in order of their rows; a row is a block of queries of one (batch, head)."""

    row: np.ndarray  # (n,) number of the row, batch-major
    column: np.ndarray  # (n,) key block
    masked: np.ndarray  # (n,) bool


def _tile(options: Options, spec: Spec, dims: Dimensions) -> tuple[int, int]:
    block = 128 if spec.pattern_block is None else min(max(spec.pattern_block[0], 32), 128)
    block_q, block_k = options.block_m or block, options.block_n or block
    return min(block_q, power_of_two(dims.T)), min(block_k, power_of_two(dims.S))


def _visited_tiles(call: Call, tile: tuple[int, int]) -> Tiles:
    dims = dimensions(call)
    schedule = plan(call, *tile, "q", xp=np)
    if isinstance(schedule, Ranges):
        lo, full_lo, full_hi, hi = np.moveaxis(np.asarray(schedule.bounds), -1, 0)[..., None]
        at = np.arange(-(-dims.S // tile[1]))
        visited, unmasked, column = (lo <= at) & (at < hi), (full_lo <= at) & (at < full_hi), at[None, None, None]
    else:
        at = np.arange(schedule.index.shape[3])
        unmasked, visited = (at < schedule.number[..., n, None] for n in (0, 1))
        column = schedule.index
    shape = (dims.B, dims.H, *visited.shape[2:])
    where = np.nonzero(np.broadcast_to(visited, shape))
    row = np.ravel_multi_index(where[:3], shape[:3])
    return Tiles(row, np.broadcast_to(column, shape)[where], ~np.broadcast_to(unmasked, shape)[where])


@lru_cache(maxsize=64)
def _static_tiles(spec: Spec, dims: Dimensions, pattern: str, tile: tuple[int, int]) -> Tiles:
    """Of a call whose mask has no lengths in it: known from its shapes."""
    shapes = {"query": (dims.B, dims.T, dims.H, dims.D), "value": (dims.B, dims.S, dims.Hkv, dims.Dv)}
    arrays: dict[str, Any] = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    return _visited_tiles(Call(spec, arrays | _cells(pattern, dims.H)), tile)


def _tiles(call: Any, options: Options, tile: tuple[int, int], read_values: bool) -> Tiles:
    """The tiles of a call, its mask function left out; without `read_values`, whatever lengths may leave."""
    dims, spec = dimensions(call), replace(call.spec, rules=Rules())
    if "q_segments" not in call:
        return _static_tiles(spec, dims, options.pattern, tile)
    if not read_values:
        return _static_tiles(replace(spec, band=Band()), dims, options.pattern, tile)
    lengths = {name: call[name].detach().numpy() for name in Lengths._fields}
    arrays = {"query": call["query"], "value": call["value"], **lengths, **_cells(options.pattern, dims.H)}
    return _visited_tiles(Call(spec, arrays), tile)


def _cells(pattern: str, heads: int) -> dict[str, Any]:
    return {"pattern": Pattern.known(pattern).for_heads(heads)} if pattern else {}


# One batch of tiles -----------------------------------------------------------------------------------------


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """(B, length, heads, dim) to float32 (B, heads, blocks, block, dim), the last block filled with zeros."""
    B, L, H, D = x.shape
    x = x.detach().float()
    if L % block:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -L % block))
    return x.reshape(B, -1, block, H, D).permute(0, 3, 1, 2, 4).contiguous()


def _per_block(x: Tensor, block: int, fill: int) -> Tensor:
    """(B|1, length) to (B|1, blocks, block)."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=fill).reshape(x.shape[0], -1, block)


def _nonfinite_zeroed(x: Tensor) -> Tensor:
    finite = torch.isfinite(x)
    return x if finite.all() else torch.where(finite, x, 0.0)


def _with_nan_rows(x: Tensor, bad: Tensor) -> Tensor:
    """Rows (..., L, D) that are nan where `bad` (..., L)."""
    return torch.where(bad[..., None], torch.nan, x) if bad.any() else x


def _nonfinite_rows(x: Tensor) -> Tensor:
    """(..., L): the rows in which something is not finite."""
    return ~torch.isfinite(x).all(-1)


class _Batch(NamedTuple):
    """Tiles whose rows are complete: all that their queries see is in this batch."""

    b: Tensor  # (n,) of each tile
    h: Tensor
    kv: Tensor  # its key head
    i: Tensor
    j: Tensor
    row: Tensor  # (n,) which of the batch's rows
    first: Tensor  # (rows,) its first tile
    masked: Tensor  # (m,) the tiles that need a mask
    queries: Tensor  # (n, block_q) index of each query; past the end, the last
    keys: Tensor  # (n, block_k)

    def of(self, tiles: Tensor) -> "_Batch":
        """Some of the tiles, which need not be complete rows."""
        chosen = {name: getattr(self, name)[tiles] for name in ("b", "h", "kv", "i", "j", "row", "queries", "keys")}
        return self._replace(**chosen)

    def entries(self, x: Tensor, *, pairs: bool = True) -> tuple[Tensor, ...]:
        """Indices of (B|1, H|1, T|1, S|1), or of its leading two, for each pair."""
        at = (self.b[:, None, None], self.h[:, None, None], self.queries[:, :, None], self.keys[:, None, :])
        return tuple(i.clamp(max=n - 1) for i, n in zip(at[: 4 if pairs else 2], x.shape, strict=False))


class _Table(NamedTuple):
    """A table (B|1, H|1, n) that is read at indices of pairs."""

    batch: _Batch
    table: Tensor

    def __getitem__(self, at: tuple[Any, Any]) -> Tensor:
        return self.table[(*self.batch.entries(self.table, pairs=False), at[1])]


class _Problem:
    """A `Call` on tensors, in float32 and in blocks of queries and keys.

    Without `read_values`, which waits for a device, it visits more tiles than lengths and functions leave.
    """

    def __init__(self, call: Any, options: Options, read_values: bool = True):
        self.call, self.options = call, options
        self.spec: Spec = call.spec
        self.dims = dimensions(call)
        self.tile = _tile(self.options, self.spec, self.dims)
        self.rows = -(-self.dims.T // self.tile[0])
        self.columns = -(-self.dims.S // self.tile[1])
        self.device = call["query"].device
        self.functions = Functions.known(options.functions)
        self.operands = self.functions.operands(call.arrays, self.dims.T, self.dims.S)
        self.tiles = self._function_tiles(_tiles(call, self.options, self.tile, read_values), read_values)
        # the scale is in the queries; a bad value marks its key
        self.query = _in_blocks(call["query"], self.tile[0]) * self.spec.scale
        key, value = _in_blocks(call["key"], self.tile[1]), _in_blocks(call["value"], self.tile[1])
        self.key, self.value = _with_nan_rows(key, _nonfinite_rows(value)), _nonfinite_zeroed(value)
        if self.options.pattern:
            self.cells = torch.from_numpy(np.array(Pattern.known(self.options.pattern).for_heads(self.dims.H)))
        # positions and segments by blocks; keys and queries past the end are in no segment
        T, S = self.dims.T, self.dims.S
        at_q, at_k = (torch.arange(n, device=self.device)[None] for n in (T, S))
        given = [call.get(name) for name in Lengths._fields]
        q_seg, k_seg, q_pos, k_pos = given if given[0] is not None else (at_q * 0, at_k * 0, at_q + (S - T), at_k)
        self.q_segments, self.kv_segments = _per_block(q_seg, self.tile[0], -1), _per_block(k_seg, self.tile[1], -1)
        self.q_positions, self.kv_positions = _per_block(q_pos, self.tile[0], 0), _per_block(k_pos, self.tile[1], 0)

    def _function_tiles(self, tiles: Tiles, read_values: bool) -> Tiles:
        """Without those in which a mask function hides all, and with a mask where it hides some."""
        _, _, i = np.unravel_index(tiles.row, (self.dims.B, self.dims.H, self.rows))
        # what functions and biases are past the last query must not reach a sum
        tiles = tiles._replace(masked=tiles.masked | (i == self.rows - 1) & (self.dims.T % self.tile[0] != 0))
        if not read_values:
            return tiles._replace(masked=np.ones_like(tiles.masked))
        if self.spec.rules.mask is None:
            return tiles
        some, every = self._function_maps()
        b, h, i = np.unravel_index(tiles.row, (self.dims.B, self.dims.H, self.rows))
        at = (b % some.shape[0], h % some.shape[1], i, tiles.column)
        return Tiles(*(x[some[at]] for x in tiles._replace(masked=tiles.masked | ~every[at])))

    def _function_maps(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether a mask function shows any, and whether every, pair of a tile: (B|1, H|1, rows, columns) each."""
        rule, (BQ, BK) = self.spec.rules.mask, self.tile
        leading = tuple(n if by else 1 for n, by in zip(self.dims[:4:3], self.functions[2:], strict=True))
        shape = (*leading, self.rows, self.columns)
        some, every = np.empty(shape, bool), np.empty(shape, bool)
        keys = torch.arange(self.columns * BK, dtype=torch.int32).clamp(max=self.dims.S - 1)
        for b, h, i in np.ndindex(shape[:3]):
            head = {name: x[b % x.shape[0], h % x.shape[1]] for name, x in self.operands.items()}
            queries = torch.arange(i * BQ, (i + 1) * BQ, dtype=torch.int32).clamp(max=self.dims.T - 1)
            read = head_operands(head, queries, keys)._replace(namespace=TORCH)
            seen = read.value(rule, queries[:, None], keys).expand(BQ, len(keys)).reshape(BQ, self.columns, BK)  # pyright: ignore[reportArgumentType]
            some[b, h, i], every[b, h, i] = seen.any(2).any(0), seen.all(2).all(0)
        return some, every

    def batches(self) -> Iterator[_Batch]:
        """Whole rows, as many as memory allows."""
        rows, starts = np.unique(self.tiles.row, return_index=True)
        ends = np.append(starts[1:], len(self.tiles.row))
        most = max(1, _MOST_LOGITS // (self.tile[0] * self.tile[1]))
        first = 0
        while first < len(rows):
            last = max(first + 1, int(np.searchsorted(ends, starts[first] + most, side="right")))
            yield self._batch(slice(starts[first], ends[last - 1]), starts[first:last] - starts[first])
            first = last

    def _batch(self, tiles: slice, first: np.ndarray) -> _Batch:
        b, h, i = np.unravel_index(self.tiles.row[tiles], (self.dims.B, self.dims.H, self.rows))
        row = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(b))))
        masked = np.nonzero(self.tiles.masked[tiles])[0]
        arrays = [b, h, h // self.dims.G, i, self.tiles.column[tiles], row, first, masked]
        arrays += [
            np.minimum(at[:, None] * block + np.arange(block), length - 1)
            for at, block, length in zip((i, arrays[4]), self.tile, self.dims[1:3], strict=True)
        ]
        made = (torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(self.device) for x in arrays)
        return _Batch(*made)

    def logits(self, batch: _Batch, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """(n, block_q, block_k) of `query` and `key` (n, ...), -inf where hidden; and as the soft cap left them."""
        x = torch.bmm(query, key.transpose(1, 2))
        if "bias" in self.call:
            bias = self.call["bias"].detach()
            x += bias[batch.entries(bias)].float()
        if self.spec.soft_cap is not None:
            x = x.div_(self.spec.soft_cap).tanh_().mul_(self.spec.soft_cap)
        capped = x
        if self.spec.rules.score is not None:
            x = self.values(batch, self.spec.rules.score, capped).clone()
        elif self.spec.soft_cap is not None:
            x = capped.clone()
        if len(batch.masked):
            x[batch.masked] = torch.where(self._seen(batch), x[batch.masked], -torch.inf)
        return x, capped

    def values(self, batch: _Batch, expression: Any, logits: Any = None) -> Tensor:
        """An expression at every pair of tiles, (n, block_q, block_k)."""
        b, h, arrays = batch.b, batch.h, self.operands

        def read(name: str, n: int, index: Tensor | None = None) -> Tensor:
            x = arrays[name]
            row = b.clamp(max=x.shape[0] - 1), h.clamp(max=x.shape[1] - 1)
            return x[*row, n] if index is None else x[row[0][:, None], row[1][:, None], n, index]

        operands = TileOperands(
            lambda name, n: read(name, n)[:, None, None],
            lambda name, n: read(name, n, batch.queries)[:, :, None],
            lambda name, n: read(name, n, batch.keys)[:, None, :],
            lambda name: _Table(batch, arrays[name]),
            TORCH,
        )
        queries, keys = batch.queries.int()[:, :, None], batch.keys.int()[:, None, :]
        return operands.value(expression, queries, keys, logits).expand(len(b), *self.tile)

    def kept(self, batch: _Batch) -> Tensor:
        """What remains of each weight under dropout, as a factor."""
        seeds = self.call["dropout_seeds"][batch.b, batch.h][:, None, None]
        return kept_pairs(seeds, batch.queries[:, :, None], batch.keys[:, None, :], self.spec.dropout)

    def add_operand_gradients(self, dfloats: Tensor, batch: _Batch, ds: Tensor, capped: Tensor, zeroed: Any) -> None:
        """Adds those of a batch of tiles to the gradients of what a score function reads; `ds` are its results'."""
        layout = self.functions.layouts.floats
        T, S = self.dims.T, self.dims.S
        starts = {"scalar": 0, "row": layout.scalars, "column": layout.scalars + layout.rows * T}
        for node, slope in slopes(self.spec.rules.score).operands:
            values = zeroed(ds * self.values(batch, slope, capped))
            if node.name == LOOKUP:
                index = tuple(self.values(batch, arg) for arg in node.args)
                at = table_index(node, index) + starts["column"] + layout.columns * S  # pyright: ignore[reportOperatorIssue]
            else:
                kind, number = node.data
                length = {"scalar": 1, "row": T, "column": S}[kind]
                sums = {"scalar": (1, 2), "row": 2, "column": 1}[kind]
                values = values.sum(sums, keepdim=True)
                index = {"row": batch.queries[:, :, None], "column": batch.keys[:, None, :]}.get(kind, 0)
                at = index + starts[kind] + number * length + torch.zeros_like(values, dtype=torch.long)
            dfloats.index_put_((*batch.entries(dfloats, pairs=False), at.long()), values, accumulate=True)

    def _seen(self, batch: _Batch) -> Tensor:
        """Which pairs of the masked tiles are seen."""
        b, h, i, j = (x[batch.masked] for x in (batch.b, batch.h, batch.i, batch.j))

        def cut(x: Tensor, block: Tensor) -> Tensor:
            return x[b if x.shape[0] > 1 else 0, block]

        q_pos, k_pos = cut(self.q_positions, i)[:, :, None], cut(self.kv_positions, j)[:, None, :]
        queries = Tokens(q_pos, cut(self.q_segments, i)[:, :, None])
        keys = Tokens(k_pos, cut(self.kv_segments, j)[:, None, :])
        rules = self._shown(h, i, j, q_pos, k_pos) if self.options.pattern else []
        if self.spec.rules.mask is not None:
            rules.append(self.values(batch.of(batch.masked), self.spec.rules.mask))
        pairs = torch.ones((len(b), *self.tile), dtype=torch.bool, device=self.device)
        return visible(queries, keys, self.spec.band, pairs=pairs, also=rules)

    def _shown(self, h: Tensor, i: Tensor, j: Tensor, q_pos: Tensor, k_pos: Tensor) -> list[Tensor]:
        """Rules of the pattern, which covers positions from 0 on, or all queries and keys by their index."""
        block: Any = self.spec.pattern_block
        _, heads, rows, columns = self.cells.shape
        head = (h if heads > 1 else torch.zeros_like(h))[:, None, None]
        if not self.spec.pattern_by_position:
            q_pos = (i[:, None] * self.tile[0] + torch.arange(self.tile[0]))[:, :, None]
            k_pos = (j[:, None] * self.tile[1] + torch.arange(self.tile[1]))[:, None, :]
        last_q, last_k = rows * block[0] - 1, columns * block[1] - 1
        inside_q, inside_k = (q_pos >= 0) & (q_pos <= last_q), (k_pos >= 0) & (k_pos <= last_k)
        cells = pattern_cells(self.cells, q_pos.clamp(0, last_q), k_pos.clamp(0, last_k), block, (0, head))
        return [inside_q, inside_k, cells]

    def joined(self, blocks: Tensor, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """(..., heads * blocks, block, dim) to the length, heads and memory of one of q, k and v."""
        like = self.call[name]
        (B, L, H, _), D = like.shape, blocks.shape[-1]
        heads_first = are_heads_first(*(self.call[name] for name in ("query", "key", "value")))
        rows = empty_rows(like, (B, L, H, D), heads_first, dtype or like.dtype)
        return rows.copy_(blocks.reshape(B, H, -1, D)[:, :, :L].transpose(1, 2))


# Both passes ------------------------------------------------------------------------------------------------


def _of_tensors(computed: Callable[..., Any]) -> Callable[..., Any]:
    """A pass over a `_Problem` as one over tensors and options, without autograd and autocast."""

    @wraps(computed)
    def run(tensors: Tensors, options: Options, *others: Any, read_values: bool = True) -> Any:
        with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            return computed(_Problem(canonical(tensors, options), options, read_values), *others)

    return run


@_of_tensors
def forward(problem: _Problem) -> tuple[Tensor, Tensor]:
    dims, call, (BQ, _) = problem.dims, problem.call, problem.tile
    # rows that see nothing stay as they start
    outputs = torch.zeros((dims.B, dims.H, problem.rows, BQ, dims.Dv))
    lse = torch.full((dims.B, dims.H, problem.rows, BQ), -torch.inf)
    if "sinks" in call:
        lse[...] = call["sinks"].detach().float()[..., None, None]
    for batch in problem.batches():
        key = problem.key[batch.b, batch.kv, batch.j]  # (n, BK, D)
        x, _ = problem.logits(batch, problem.query[batch.b, batch.h, batch.i], key)
        at = batch.b[batch.first], batch.h[batch.first], batch.i[batch.first]
        start = lse[at]  # (rows, BQ): that of the sinks
        every = batch.row[:, None].expand(-1, BQ)
        row_max = start.scatter_reduce(0, every, x.amax(-1), "amax")
        safe_max = torch.where(torch.isneginf(row_max), 0.0, row_max)
        p = x.sub_(safe_max[batch.row][:, :, None]).exp_()
        row_sum = torch.exp(start - safe_max).index_add_(0, batch.row, p.sum(-1))
        if problem.spec.dropout:
            p = p.mul_(problem.kept(batch))
        product = torch.bmm(p, problem.value[batch.b, batch.kv, batch.j])
        out = torch.zeros((len(safe_max), BQ, dims.Dv)).index_add_(0, batch.row, product)
        seen = row_sum != 0
        row_sum = torch.where(seen, row_sum, 1.0)
        outputs[at] = out / row_sum[..., None]
        lse[at] = torch.where(seen, safe_max + torch.log(row_sum), -torch.inf)
    out = problem.joined(outputs, "query", output_dtype(call["query"]))
    return out, lse.reshape(dims.B, dims.H, -1)[:, :, : dims.T].contiguous()


class _TileGradients(NamedTuple):
    """Of a batch of tiles: the kept weights, and the gradients of the scaled products."""

    batch: _Batch
    query: Tensor
    key: Tensor
    dout: Tensor
    weights: Tensor
    ds: Tensor


class _Gradients:
    """The backward of a problem but for its products: what `cotangents` give each pair.

    Attributes:
        delta: (B, H, T) what each row's gradients are counted from.
        lse: +inf where nothing is seen.
        dbias, dfloats: what `tiles` sums up on the way, or None.
    """

    def __init__(self, problem: _Problem, cotangents: Cotangents, needed: Gradients):
        self.problem = problem
        out, lse, dout, dlse = cotangents
        delta = (out.float() * dout.float()).sum(-1).transpose(1, 2)
        self.delta = delta if dlse is None else delta - dlse
        self.lse = torch.where(torch.isneginf(lse), torch.inf, lse)
        self.dout = dout
        bias, floats = (problem.call.get(name) for name in ("bias", "floats"))
        wanted = needed.floats and problem.spec.rules.score is not None
        self.dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed.bias else None
        self.dfloats = torch.zeros_like(floats) if floats is not None and wanted else None

    def tiles(self) -> Iterator[_TileGradients]:
        problem, spec, (BQ, _) = self.problem, self.problem.spec, self.problem.tile
        douts = _in_blocks(self.dout, BQ)
        rows_lse, rows_delta = (_in_blocks(x.transpose(1, 2)[..., None], BQ)[..., 0] for x in (self.lse, self.delta))
        # a row whose terms are not finite is nan wherever it is seen, and nowhere else
        nonfinite = _nonfinite_rows(douts) | ~torch.isfinite(rows_delta) | torch.isnan(rows_lse)
        query_with_nan = _with_nan_rows(problem.query, nonfinite)
        query, key, douts, rows_delta = (_nonfinite_zeroed(x) for x in (problem.query, problem.key, douts, rows_delta))
        rows_lse = torch.nan_to_num(rows_lse, nan=0.0, posinf=torch.inf)
        for batch in problem.batches():
            tile_q, tile_k = (batch.b, batch.h, batch.i), (batch.b, batch.kv, batch.j)
            do = douts[tile_q]
            x, capped = problem.logits(batch, query_with_nan[tile_q], problem.key[tile_k])
            p = x.sub_(rows_lse[tile_q][:, :, None]).exp_()
            dp = torch.bmm(do, problem.value[tile_k].transpose(1, 2))
            weights = p
            if spec.dropout:
                kept = problem.kept(batch)
                dp, weights = dp.mul_(kept), p * kept

            def hidden_zeroed(values: Tensor, batch: _Batch = batch, p: Tensor = p) -> Tensor:
                # dp of a hidden value may be inf, and so may slopes
                if len(batch.masked):
                    values[batch.masked] = torch.where(p[batch.masked] == 0, 0.0, values[batch.masked])
                return values

            ds = dp.sub_(rows_delta[tile_q][:, :, None]).mul_(p)
            if self.dfloats is not None:
                problem.add_operand_gradients(self.dfloats, batch, ds, capped, hidden_zeroed)
            if spec.rules.score is not None:
                ds = ds * problem.values(batch, slopes(spec.rules.score).score, capped)
            if spec.soft_cap is not None:
                ds = ds * (1.0 - (capped / spec.soft_cap) ** 2)
            ds = hidden_zeroed(ds)
            if self.dbias is not None:
                self.dbias.index_put_(batch.entries(self.dbias), ds, accumulate=True)
            yield _TileGradients(batch, query[tile_q], key[tile_k], do, weights, ds)


@_of_tensors
def operand_gradients(problem: _Problem, cotangents: Cotangents) -> Any:
    """Of what a score function reads, on any device."""
    gradients = _Gradients(problem, cotangents, Gradients(False, False, False, floats=True))
    for _ in gradients.tiles():
        pass
    return gradients.dfloats


@_of_tensors
def backward(problem: _Problem, cotangents: Cotangents, needed: Gradients) -> Gradients:
    dims, call, (BQ, BK) = problem.dims, problem.call, problem.tile
    gradients = _Gradients(problem, cotangents, needed)
    dq = torch.zeros((dims.B, dims.H, problem.rows, BQ, dims.D))
    dk = torch.zeros((dims.B * dims.Hkv * problem.columns, BK, dims.D))
    dv = torch.zeros((dims.B * dims.Hkv * problem.columns, BK, dims.Dv))
    for batch, query, key, do, weights, ds in gradients.tiles():
        at = batch.b[batch.first], batch.h[batch.first], batch.i[batch.first]
        dq[at] = torch.zeros((len(at[0]), BQ, dims.D)).index_add_(0, batch.row, torch.bmm(ds, key))
        slot = (batch.b * dims.Hkv + batch.kv) * problem.columns + batch.j
        dk.index_add_(0, slot, torch.bmm(ds.transpose(1, 2), query))
        dv.index_add_(0, slot, torch.bmm(weights.transpose(1, 2), do))
    dq, dk, dv = (
        problem.joined(dx, name) for name, dx in (("query", dq * problem.spec.scale), ("key", dk), ("value", dv))
    )
    sinks, dbias = call.get("sinks"), gradients.dbias
    dsinks = None if sinks is None else sink_gradient(sinks[0], gradients.lse, gradients.delta)
    return Gradients(dq, dk, dv, dsinks, None if dbias is None else dbias.to(call["bias"].dtype), gradients.dfloats)

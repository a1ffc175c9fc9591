"""The paged kernel for TPUs: one step of the grid is a tile of query tokens of one sequence, with a loop over its keys.

A page (tokens, heads, head_dim) is contiguous, so one copy brings the keys of all heads, and no page is read twice for
a tile. Copies are double buffered: while a block is multiplied the next one arrives, and while a tile's last block is
multiplied the queries and the first block of the next tile do. Only pages with visible keys are copied.

Of a block, heads are taken in one of two ways (`Rows`): with few query rows all heads meet in one matmul and pairs of
different heads are hidden, as a block must pass the matrix unit once anyway and rows below its size are free; with many
rows the block is transposed to (heads, tokens, head_dim), once for all rows, and each head is multiplied on its own.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.expressions.nodes import Expression
from ejkernel.kernels.common.online_softmax import MASKED
from ejkernel.kernels.common.pallas_tpu import SUBLANES
from ejkernel.kernels.common.pallas_tpu_rules import for_mosaic
from ejkernel.kernels.common.rules import TileOperands
from ejkernel.kernels.common.tiles import capped, matmul
from ejkernel.kernels.paged.spec import Dimensions, Spec, lowest_keys

Refs = dict[str, Any]

HIDDEN = 2**30  # the index of a key that no query sees


@dataclass(frozen=True)
class Rows:
    """The query rows of a tile.

    Attributes:
        tokens: query tokens of a tile at most.
        joined: whether the keys of all heads are one operand, (tokens, heads) rows of it; else each head is its own.
    """

    tokens: int
    joined: bool
    dims: Dimensions

    @property
    def heads(self) -> int:
        """Matmuls per block."""
        return 1 if self.joined else self.dims.Hkv

    @property
    def count(self) -> int:
        """Rows of a matmul: (tokens, H) of them, or (tokens, G)."""
        return self.tokens * self.dims.H // self.heads


class Block(NamedTuple):
    """Where a block of keys lies."""

    slot: Any  # of its first page in the table
    offset: Any  # of its first key in that page
    base: Any  # index of its first key in the sequence
    low: Any  # keys from there on belong to it: the last sub-page of a page may reach into the one before
    high: Any


@dataclass(frozen=True)
class Blocks:
    """A sequence's keys in blocks: several whole pages, or a sub-page.

    Attributes:
        page: tokens of a page.
        copied: tokens of one copy: a page, or a sub-page.
        copies: of a block; more than one only of whole pages.
    """

    page: int
    copied: int
    copies: int

    @property
    def size(self) -> int:
        return self.copied * self.copies

    @property
    def per_page(self) -> int:
        return -(-self.page // self.copied)

    def index(self, key: Any) -> Any:
        """The block that holds a key."""
        if self.per_page == 1:
            return divided(key, self.size)
        page = divided(key, self.page)
        return page * self.per_page + divided(key - page * self.page, self.copied)

    def at(self, j: Any) -> Block:
        if self.per_page == 1:
            return Block(j * self.copies, 0, j * self.size, j * self.size, (j + 1) * self.size)
        slot = divided(j, self.per_page)
        first, low = slot * self.page, (j - slot * self.per_page) * self.copied
        # a last sub-page that a page has not in full starts earlier instead
        offset = low if self.page % self.copied == 0 else jnp.minimum(low, self.page - self.copied)
        high = first + jnp.minimum(low + self.copied, self.page)
        return Block(slot, offset, first + offset, first + low, high)


class Online(NamedTuple):
    """The running softmax of the rows of one matmul."""

    running_max: jax.Array  # (rows, 1) largest logit so far
    running_sum: jax.Array  # (rows, 1) sum of exponentials against it
    acc: jax.Array  # (rows, Dv) weighted values against it


class Tile(NamedTuple):
    """Query tokens of one sequence, as scalars."""

    sequence: Any
    token: Any  # its first row in the query
    count: Any
    position: Any  # of that token in the sequence
    low: Any  # keys that any of them sees: from low to high
    high: Any
    window: Any  # that is traced; None where there is none
    first: Any  # block
    steps: Any
    split: Any  # which split of the keys it has


@dataclass(frozen=True, eq=False)
class Kernel:
    """What is static about a launch.

    Attributes:
        rows: how tiles are multiplied, in order of their tokens; a tile is for the first that has enough.
        heads_first: whether pages are (heads, tokens, head_dim).
        paired: whether keys and values alternate as rows of one array.
        batched: for each array of pages, whether every row of the batch axis has its own.
        scaled: whether each query row has its own scale, factor of the values, and sink.
        read: how many numbers functions read of each token and head, by the name of their array.
        dtype: of the operands of the matmuls.
        tiles: how many there are, each with `splits` splits of its keys.
        cores: that take them one after the other.
    """

    spec: Spec
    dims: Dimensions
    rows: tuple[Rows, ...]
    blocks: Blocks
    heads_first: bool
    paired: bool
    batched: tuple[bool, ...]
    scaled: bool
    read: dict[str, int]
    cache: Any
    dtype: Any
    tiles: int
    splits: int
    cores: int

    @property
    def precision(self) -> Any:
        # the hardware multiplies bfloat16: float32 takes several passes
        return lax.Precision.HIGHEST if self.dtype == jnp.float32 else None

    @property
    def out_dtype(self) -> Any:
        return self.spec.out_dtype or (jnp.float32 if self.splits > 1 else self.dtype)

    @property
    def tokens(self) -> int:
        return self.rows[-1].tokens

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """head_dim of each array of pages."""
        return (self.dims.D,) if self.paired else (self.dims.D, self.dims.Dv)

    def buffers(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of everything in VMEM that lives as long as the kernel."""
        dims, blocks, f32 = self.dims, self.blocks, jnp.float32
        heads = dims.Hkv * (2 if self.paired else 1)
        page = (heads, blocks.copied) if self.heads_first else (blocks.copied, heads)
        buffers: dict[str, tuple[tuple[int, ...], Any]] = {
            "query": ((2, self.tokens, dims.H, dims.D), self.dtype),
            "out": ((self.tokens, dims.H, dims.Dv), self.out_dtype),
        }
        if "stats" in self.written:
            buffers["stats"] = ((self.tokens, dims.H, 2), f32)
        read = {name: (n, jnp.int32 if name == "int_rows" else f32) for name, n in self.read.items()}
        buffers |= {name: ((2, self.tokens, dims.H, n), dtype) for name, (n, dtype) in read.items()}
        for i, width in enumerate(self.widths):
            buffers[f"pages_{i}"] = ((2, blocks.copies, *page, width), self.cache)
        for i, rows in enumerate(self.rows):
            buffers[f"rows_{i}"] = ((rows.heads, rows.count, dims.D), self.dtype)
            buffers[f"acc_{i}"] = ((rows.heads, rows.count, dims.Dv), f32)
            buffers[f"running_max_{i}"] = ((rows.heads, rows.count, 1), f32)
            buffers[f"running_sum_{i}"] = ((rows.heads, rows.count, 1), f32)
            buffers |= {f"{name}_{i}": ((rows.heads, rows.count, n), dtype) for name, (n, dtype) in read.items()}
        if not self.heads_first and not all(rows.joined for rows in self.rows):
            for i, width in enumerate(self.widths):
                buffers[f"heads_first_{i}"] = ((heads, blocks.size, width), self.dtype)
        return buffers

    def scratch(self) -> dict[str, Any]:
        memories: dict[str, Any] = {name: pltpu.VMEM(*buffer) for name, buffer in self.buffers().items()}
        copies = {"page_copies": pltpu.SemaphoreType.DMA((2,)), "query_copies": pltpu.SemaphoreType.DMA((2,))}
        # which buffer the next block is in, and how many tokens of output are on their way
        return memories | copies | {"out_copies": pltpu.SemaphoreType.DMA, "state": pltpu.SMEM((2,), jnp.int32)}

    # One step of the grid ------------------------------------------------------------------------------------

    def paged_attention(self, scalars: Refs, arrays: Refs, outputs: Refs, scratch: Refs) -> None:
        refs = {**{f"{name}_scalar": ref for name, ref in scalars.items()}, **scratch}
        refs |= {f"{name}_input": ref for name, ref in arrays.items()}
        refs |= {f"{name}_output": ref for name, ref in outputs.items()}
        core, i = pl.program_id(0), pl.program_id(1)
        current, following = (self.tile(refs, (i + ahead) * self.cores + core) for ahead in (0, 1))

        @pl.when(i == 0)
        def _():
            refs["state"][0] = 0
            refs["state"][1] = 0
            self.fetch_tile(refs, current, 0, 0)

        fewer = 0
        for v, rows in enumerate(self.rows):
            fits = (fewer < current.count) & (current.count <= rows.tokens)
            pl.when(fits)(partial(self.attend_tile, refs, v, rows, current, following, i))
            fewer = rows.tokens
        # the chain of copies goes on where there is nothing to do
        pl.when(current.count == 0)(lambda: self.fetch_tile(refs, following, 1 - i % 2, refs["state"][0]))

        pl.when(i == pl.num_programs(1) - 1)(lambda: self.wait_outputs(refs))

    def attend_tile(self, refs: Refs, v: int, rows: Rows, current: Tile, following: Tile, i: Any) -> None:
        """All keys of a tile: `v` says which of the scratch arrays are those of `rows`."""
        self.copy_query(refs, current, i % 2, "wait")
        self.begin(refs, v, rows, current, i % 2)
        slot = refs["state"][0]
        next_tile = partial(self.fetch_tile, refs, following, 1 - i % 2)

        def step(step_index: Any, slot: Any) -> Any:
            j = current.first + step_index
            pl.when(step_index + 1 < current.steps)(lambda: self.copy_block(refs, current, j + 1, 1 - slot, "start"))
            pl.when(step_index + 1 == current.steps)(lambda: next_tile(1 - slot))
            self.copy_block(refs, current, j, slot, "wait")
            self.attend_block(refs, v, rows, current, j, slot)
            return 1 - slot

        slot = lax.fori_loop(0, current.steps, step, slot)
        pl.when(current.steps == 0)(lambda: next_tile(slot))
        refs["state"][0] = slot
        self.finish(refs, v, rows, current)

    def tile(self, refs: Refs, index: Any) -> Tile:
        """The tile (and split of its keys) of that number; past the last one it has no tokens."""
        spec, S = self.spec, self.dims.S
        exists, number = index < self.tiles * self.splits, index
        index = jnp.minimum(divided(number, self.splits), self.tiles - 1)
        n, count = refs["sequence_scalar"][index], jnp.where(exists, refs["count_scalar"][index], 0)
        length = jnp.clip(refs["context_lens_scalar"][n], 0, S)
        position = length + refs["ahead_scalar"][index]
        low = jnp.clip(refs["starts_scalar"][n], 0, S) if "starts_scalar" in refs else jnp.int32(0)
        high = length
        if spec.causal:
            high = jnp.minimum(high, position + count)
        window = None
        if "window_scalar" in refs:
            window = refs["window_scalar"][divided(jnp.minimum(n, self.dims.B * self.dims.N - 1), self.dims.N)]
        if (lowest := lowest_keys(spec, position, window)) is not None:
            low = jnp.maximum(low, lowest)
        first = self.blocks.index(low)
        some = (count > 0) & (low < high)
        steps = jnp.where(some, self.blocks.index(jnp.maximum(high, 1) - 1) - first + 1, 0)
        split_steps, split = divided(steps + self.splits - 1, self.splits), number - index * self.splits
        steps = jnp.clip(steps - split * split_steps, 0, split_steps)
        token, first = refs["token_scalar"][index], first + split * split_steps
        return Tile(n, token, count, position, low, high, window, first, steps, split)

    # Copies --------------------------------------------------------------------------------------------------

    def fetch_tile(self, refs: Refs, tile: Tile, query_slot: Any, slot: Any) -> None:
        """Start the copies of a tile's queries and of its first block."""
        self.copy_query(refs, tile, query_slot, "start")
        pl.when(tile.steps > 0)(lambda: self.copy_block(refs, tile, tile.first, slot, "start"))

    def copy_query(self, refs: Refs, tile: Tile, slot: Any, act: str) -> None:
        semaphore = refs["query_copies"].at[slot]

        @pl.loop(0, tile.count)
        def _(t):
            for name in ("query", *self.read):
                source, target = refs[f"{name}_input"].at[tile.token + t], refs[name].at[slot, t]
                getattr(pltpu.make_async_copy(source, target, semaphore), act)()

    def copy_block(self, refs: Refs, tile: Tile, j: Any, slot: Any, act: str) -> None:
        """Start or await the copies of what is visible of a block."""
        blocks, dims, block = self.blocks, self.dims, self.blocks.at(j)
        row = divided(tile.sequence, dims.N)

        def copy(p: Any) -> None:
            page = tile.sequence - row * dims.N
            if "block_tables_scalar" in refs:
                page = refs["block_tables_scalar"][tile.sequence * dims.W + block.slot + p]
                page = jnp.clip(page, 0, dims.P - 1)
            for i, batched in enumerate(self.batched):
                source = refs[f"pages_{i}_input"].at[page + row * dims.P if batched else page]
                if blocks.per_page > 1:
                    tokens = pl.ds(block.offset, blocks.copied)
                    source = source.at[:, tokens] if self.heads_first else source.at[tokens]
                target = refs[f"pages_{i}"].at[slot, p]
                getattr(pltpu.make_async_copy(source, target, refs["page_copies"].at[slot]), act)()

        if blocks.copies == 1:
            copy(0)
            return
        first = divided(jnp.maximum(tile.low - block.base, 0), blocks.copied)
        last = divided(jnp.minimum(tile.high - block.base, blocks.size) + blocks.copied - 1, blocks.copied)
        pl.loop(first, last)(copy)

    def copy_outputs(self, refs: Refs, tile: Tile) -> None:
        refs["state"][1] = tile.count
        row = tile.token + tile.split * (self.dims.B * self.dims.T)
        for name in self.written:

            @pl.loop(0, tile.count)
            def _(t, name=name):
                target = refs[f"{name}_output"].at[row + t]
                pltpu.make_async_copy(refs[name].at[t], target, refs["out_copies"]).start()

    def wait_outputs(self, refs: Refs) -> None:
        for name in self.written:

            @pl.loop(0, refs["state"][1])
            def _(t, name=name):
                pltpu.make_async_copy(refs[name].at[0], refs[f"{name}_output"].at[0], refs["out_copies"]).wait()

    @property
    def written(self) -> tuple[str, ...]:
        """The outputs; lse and top only where asked for, or where splits are merged by them."""
        merged = self.splits > 1 or self.spec.out_dtype is not None
        return ("out", "stats") if self.spec.with_lse or merged else ("out",)

    # Computation ---------------------------------------------------------------------------------------------

    def begin(self, refs: Refs, v: int, rows: Rows, current: Tile, query_slot: Any) -> None:
        """The queries as rows, and an empty state: with sinks, they are what it has seen."""
        G, D = self.dims.G, self.dims.D
        for h in range(rows.heads):
            heads = slice(None) if rows.joined else slice(h * G, (h + 1) * G)
            # in float32: two rows of bfloat16 share a word, and may not be of the same head
            query = refs["query"][query_slot, : rows.tokens, heads, :].astype(jnp.float32)
            refs[f"rows_{v}"][h] = query.reshape(rows.count, D).astype(self.dtype)
            for name, n in self.read.items():
                refs[f"{name}_{v}"][h] = refs[name][query_slot, : rows.tokens, heads, :].reshape(rows.count, n)
        refs[f"acc_{v}"][...] = jnp.zeros_like(refs[f"acc_{v}"])
        refs[f"running_max_{v}"][...] = jnp.full_like(refs[f"running_max_{v}"], MASKED)
        refs[f"running_sum_{v}"][...] = jnp.zeros_like(refs[f"running_sum_{v}"])
        if not self.scaled:
            return

        @pl.when((current.sequence < self.dims.B * self.dims.N) & (current.split == 0))
        def _():
            sinks = refs[f"by_row_{v}_input"][:, :, 2:3]
            refs[f"running_max_{v}"][...] = sinks
            refs[f"running_sum_{v}"][...] = jnp.exp(sinks - jnp.where(sinks == MASKED, 0.0, sinks))

    def attend_block(self, refs: Refs, v: int, rows: Rows, current: Tile, j: Any, slot: Any) -> None:
        """Absorb a block."""
        block = self.blocks.at(j)
        if not rows.joined and not self.heads_first:
            for i, width in enumerate(self.widths):
                tokens = refs[f"pages_{i}"][slot].astype(self.dtype).reshape(self.blocks.size, -1, width)
                refs[f"heads_first_{i}"][...] = jnp.swapaxes(tokens, 0, 1)

        def head(h: Any) -> None:
            key, value = self.operands(refs, rows, h, slot)
            function = partial(self.value, refs, v, h, rows, current, block)
            seen = self.seen(rows, current, block)
            if self.spec.rules.mask is not None:
                seen &= function(self.spec.rules.mask)
            self.attend(refs, v, h, key, value, seen, rows.joined and self.paired, function)

        if rows.heads == 1:
            head(0)
        else:
            pl.loop(0, rows.heads)(head)

    def seen(self, rows: Rows, current: Tile, block: Block) -> jax.Array:
        """Which pairs of rows and columns are visible. Of joined columns only those of keys, of the row's head."""
        spec, each = self.spec, rows.count // rows.tokens
        column, row, token, of_row = self.offsets(rows)
        key, position = block.base + token, current.position + of_row
        visible = (jnp.maximum(current.low, block.low) <= key) & (key < jnp.minimum(current.high, block.high))
        by_row = spec.causal and rows.tokens > 1
        if rows.joined:
            head = jnp.where(visible, column - token * self.columns_per_key(rows), -1)
            seen = head == small_divided(row - of_row * each, self.dims.G) * (2 if self.paired else 1)
            seen = seen & (key <= position) if by_row else seen
        else:
            seen = jnp.where(visible, key, HIDDEN) <= (position if by_row else jnp.full_like(position, HIDDEN - 1))
        lowest = lowest_keys(spec, position, current.window) if by_row else None
        return seen if lowest is None else seen & (key >= lowest)

    def offsets(self, rows: Rows) -> tuple[jax.Array, ...]:
        """The numbers of columns (1, columns) and rows (rows, 1), and of their tokens."""
        column, row = iota((1, self.blocks.size * self.columns_per_key(rows)), 1), iota((rows.count, 1), 0)
        return (
            column,
            row,
            small_divided(column, self.columns_per_key(rows)),
            small_divided(row, rows.count // rows.tokens),
        )

    def value(
        self, refs: Refs, v: int, h: Any, rows: Rows, current: Tile, block: Block, rule: Expression, logits: Any = None
    ) -> jax.Array:
        """Of a mask or score function, of a shape that broadcasts with (rows, columns)."""
        _, _, token, of_row = self.offsets(rows)

        def row(name: str, n: int) -> jax.Array:
            return refs[f"{name}_{v}"][h, :, n : n + 1]

        return TileOperands(row, row, row).value(
            for_mosaic(rule), current.position + of_row, block.base + token, logits
        )

    def columns_per_key(self, rows: Rows) -> int:
        """Joined columns are the rows of a page: (keys, heads), with a value behind each key where they are paired."""
        return self.dims.Hkv * (2 if self.paired else 1) if rows.joined else 1

    def operands(self, refs: Refs, rows: Rows, h: Any, slot: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values of a head (or of all) in a block."""
        if rows.joined:
            pages = [refs[f"pages_{i}"][slot].astype(self.dtype).reshape(-1, w) for i, w in enumerate(self.widths)]
            return pages[0], pages[-1]
        names = [(0, 2 * h), (0, 2 * h + 1)] if self.paired else [(0, h), (1, h)]
        if not self.heads_first:
            key, value = (refs[f"heads_first_{i}"][row] for i, row in names)
            return key, value
        shapes = [(self.blocks.size, self.widths[i]) for i, _ in names]
        key, value = (refs[f"pages_{i}"][slot, :, row].astype(self.dtype) for i, row in names)
        return key.reshape(shapes[0]), value.reshape(shapes[1])

    def attend(
        self, refs: Refs, v: int, h: Any, key: jax.Array, value: jax.Array, seen: jax.Array, shift: bool, function: Any
    ) -> None:
        """One step of online softmax; with `shift`, the value of each key is in the next row."""
        old = Online(*(refs[f"{name}_{v}"][h] for name in Online._fields))
        scale = refs[f"by_row_{v}_input"][h, :, 0:1] if self.scaled else self.spec.scale
        logits = capped(matmul(refs[f"rows_{v}"][h], key, (1, 1), self.precision) * scale, self.spec.soft_cap)
        if self.spec.rules.score is not None:
            logits = function(self.spec.rules.score, logits)

        def absorb(logits: jax.Array, value: jax.Array) -> Online:
            logits = jnp.where(seen, logits, MASKED)
            new_max = jnp.maximum(old.running_max, logits.max(1, keepdims=True))
            # a row that has seen nothing: -inf - 0, not -inf - -inf
            base = jnp.where(new_max == MASKED, 0.0, new_max)
            weights, shrink = jnp.exp(logits - base), jnp.exp(old.running_max - base)
            moved = pltpu.roll(weights, 1, 1) if shift else weights  # from the columns of keys to those of values
            product = matmul(moved.astype(self.dtype), value, (1, 0), self.precision)
            return Online(new_max, old.running_sum * shrink + weights.sum(1, keepdims=True), old.acc * shrink + product)

        def keep(new: Online) -> None:
            for name, x in new._asdict().items():
                refs[f"{name}_{v}"][h] = x

        new = absorb(logits, value)
        keep(new)
        if not jnp.issubdtype(self.cache, jnp.floating):
            return

        # 0 * nan is nan: if there is one, again with finite values, and what was not finite shows in the logits
        @pl.when(jnp.sum(new.acc - new.acc) != 0.0)
        def _():
            wide = value.astype(jnp.float32)
            wrong = jnp.where(wide - wide == 0.0, 0.0, 1.0)
            counts = matmul(jnp.ones((SUBLANES, wide.shape[1]), jnp.float32), wrong, (1, 1))
            counts = (pltpu.roll(counts, counts.shape[1] - 1, 1) if shift else counts)[:1]
            finite = jnp.where(wrong == 0.0, wide, 0.0).astype(value.dtype)
            keep(absorb(jnp.where(counts > 0.0, jnp.nan, logits), finite))

    def finish(self, refs: Refs, v: int, rows: Rows, current: Tile) -> None:
        """Normalised rows, and the copies that bring them out."""
        G = self.dims.G
        self.wait_outputs(refs)
        for h in range(rows.heads):
            heads = slice(None) if rows.joined else slice(h * G, (h + 1) * G)
            row_max, total = refs[f"running_max_{v}"][h], refs[f"running_sum_{v}"][h]
            some = total != 0.0  # a nan total is not nothing: it must show
            total = jnp.where(some, total, 1.0)
            out = refs[f"acc_{v}"][h] / total
            if self.scaled:
                out *= refs[f"by_row_{v}_input"][h, :, 1:2]
            refs["out"][: rows.tokens, heads, :] = out.reshape(rows.tokens, -1, out.shape[1]).astype(self.out_dtype)
            if "stats" in self.written:
                lse = jnp.where(some, row_max + jnp.log(total), -jnp.inf)
                row_max = jnp.where(some, row_max + (total - total), -jnp.inf)
                first = iota((rows.count, 2), 1) == 0
                refs["stats"][: rows.tokens, heads, :] = jnp.where(first, lse, row_max).reshape(rows.tokens, -1, 2)
        self.copy_outputs(refs, current)


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def divided(x: Any, n: int) -> Any:
    """Of a scalar that is not negative."""
    return x if n == 1 else lax.div(x, jnp.int32(n))


def small_divided(x: jax.Array, n: int) -> jax.Array:
    """Of a tile of indices: exact below 2^20, and cheaper than the integers' own."""
    return x if n == 1 else ((x.astype(jnp.float32) + 0.5) * (1.0 / n)).astype(jnp.int32)

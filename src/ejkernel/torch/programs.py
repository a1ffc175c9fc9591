"""All that is static about a kind of call to the Triton kernels of `kernels/softmax`, made once and kept."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import Tensor

from ejkernel.expressions.bounds import has_operands, is_exact
from ejkernel.expressions.nodes import Expression
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.common.triton_rules import DeviceFunction, layouts_of, unsupported_operations
from ejkernel.kernels.softmax import triton as family
from ejkernel.kernels.softmax.rules import has_table_gradient, slopes
from ejkernel.kernels.softmax.schedule import Lists, Schedule, Side
from ejkernel.kernels.softmax.spec import Spec, dimensions
from ejkernel.kernels.softmax.triton import Config, Tile
from ejkernel.ops import Call, Target
from ejkernel.torch.calls import Cotangents, Gradients, empty_rows, sink_gradient
from ejkernel.torch.few_queries import Arrangement, static_lengths
from ejkernel.torch.functions import Functions
from ejkernel.torch.inputs import FLOAT8S
from ejkernel.torch.pattern import Pattern
from ejkernel.torch.prepared_launch import DTYPES, PreparedLaunch, aligned_to_16_bytes

MOVED = ("query", "key", "value")


class Kind(NamedTuple):
    """What distinguishes programs: everything static, and the shapes.

    Lengths that follow from an `arrangement` are static too.
    """

    spec: Spec
    arrays: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    pattern: str
    tile: tuple[int, int]
    heads_first: bool
    device: torch.device
    out: torch.dtype
    arrangement: Arrangement | None = None
    functions: str = ""


@lru_cache
def target_of(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target("cpu", "cpu", "cpu", interpreted=True)
    facts = torch.cuda.get_device_properties(device)
    kind = "_".join(facts.name.lower().split())
    return Target("gpu", kind, f"sm_{facts.major}{facts.minor}", cores=facts.multi_processor_count)


_MOST_HEADS = 2**16 - 1
# the narrowest tile of dk and dv
_FEWEST_ROWS = 32
# of the launches that make a schedule: tokens of one program of the first, blocks of one step of the second
_TOKENS = 2048
_BLOCKS = 1024


class DeviceSchedule(NamedTuple):
    """A schedule on the device: bounds or numbers, lists if there are such, and the order of sub-blocks of keys."""

    rows: Tensor | None = None
    index: Tensor | None = None
    order: Tensor | None = None


Schedules = dict[tuple[int, int, Side], DeviceSchedule]  # by the tile


class LaunchPair(NamedTuple):
    """A fast launch, and the nan-safe one over the blocks in which the fast one left a nan."""

    fast: PreparedLaunch
    nan_safe: PreparedLaunch | None
    flags: tuple[int, int]  # the shape of what the first marks for the second


class ScheduleLaunches(NamedTuple):
    """The launches that make a schedule from lengths or a function, and the shapes of what they write."""

    blocks: PreparedLaunch
    rows: PreparedLaunch
    shapes: dict[str, tuple[int, ...]]


class Program:
    """The launches of calls of one kind."""

    def __init__(self, kind: Kind):
        self.kind = kind
        self.compiled = kind.device.type == "cuda"
        self.pattern = Pattern.known(kind.pattern) if kind.pattern else None
        self.functions = Functions.known(kind.functions)
        self.call = self._described()
        self.dims = dimensions(self.call)
        if reasons := unsupported_operations(*kind.spec.rules):
            raise NotImplementedError("; ".join(reasons))
        rule = kind.spec.rules.mask
        of_shapes = "q_segments" not in self.call and (rule is None or (is_exact(rule) and not has_operands(rule)))
        self.static = kind.arrangement is not None or of_shapes
        self.config = self._config()
        self.pairs: dict[str, LaunchPair] = {}
        self.terms: dict[bool, PreparedLaunch] = {}
        self.others: dict[Any, PreparedLaunch] = {}  # those of biases and of what functions read
        self.schedules: dict[tuple[Tile, Side], DeviceSchedule] = {}
        self.schedule_launches: dict[tuple[Tile, Side], ScheduleLaunches] = {}
        # what a launch is given and neither reads nor writes
        kinds = {"absent": torch.int32, "total": torch.float32, "argmax": torch.int32, "nothing": torch.int32}
        self.fixed = {name: torch.empty(4, dtype=dtype, device=kind.device) for name, dtype in kinds.items()}
        if self.pattern is not None:
            self.fixed["pattern"] = self.pattern.cells(kind.device, self.dims.H)

    def _described(self) -> Any:
        """The call by its shapes, on what 8-bit numbers become: tiles and products are those."""
        kind = self.kind
        structs: Any = {n: jax.ShapeDtypeStruct(shape, jax.numpy.dtype(DTYPES[t])) for n, shape, t in kind.arrays}
        if self.pattern is not None:
            shape = self.pattern.for_heads(structs["query"].shape[2]).shape
            structs["pattern"] = jax.ShapeDtypeStruct(shape, jax.numpy.dtype(bool))
        query, key = (dtype for _, _, dtype in kind.arrays[:2])
        computed = DTYPES[torch.bfloat16 if query in FLOAT8S else query]
        self.wide = computed if key in FLOAT8S else None
        structs["query"] = jax.ShapeDtypeStruct(structs["query"].shape, jax.numpy.dtype(computed))
        flat = {n: torch.empty(structs[n].shape, device="meta") for n in ("ints", "floats") if n in structs}
        operands = self.functions.operands(flat, structs["query"].shape[1], structs["key"].shape[1])
        structs |= {
            n: jax.ShapeDtypeStruct(tuple(x.shape), jax.numpy.dtype(n.split("_")[0] + "32"))
            for n, x in operands.items()
        }
        return Call(kind.spec, structs, target_of(kind.device))

    def _config(self) -> Config:
        """The family's tiles, no taller than the queries; or a caller's own."""
        config = family.default_config(self.call)
        rows = power_of_two(self.call["query"].shape[1], 16)
        forward = config.forward
        if rows < forward.block_q:
            forward = replace(forward, block_q=rows, warps=4)
        tiles = {"forward": forward, "dq": config.dq, "dkv": config.dkv} | ({"dv": config.dv} if config.dv else {})
        if any(self.kind.tile):
            sizes = {n: x for n, x in zip(("block_q", "block_k"), self.kind.tile, strict=True) if x}
            tiles = {name: replace(tile, **sizes) for name, tile in tiles.items()}
        elif self.pattern is not None and not self.static:
            tiles = {name: self._narrowed(tile) if name in ("dkv", "dv") else tile for name, tile in tiles.items()}
        return replace(config, **tiles)

    def _narrowed(self, tile: Tile) -> Tile:
        """A tile of keys as rows that reaches over no more blocks than it must, where their order is not known.

        Four warps are enough for 64 keys, and their registers for 32 queries of a wide head.
        """
        pattern: Any = self.pattern
        width = max(pattern.block_size, _FEWEST_ROWS)
        if width >= tile.block_k:
            return tile
        narrow = replace(tile, block_k=power_of_two(width), warps=4)
        wide = max(self.dims.D, self.dims.Dv) > 64
        return replace(narrow, block_q=min(tile.block_q, 32), stages=3) if wide else narrow

    def sub_block(self, tile: Tile, side: Side) -> int | None:
        """Keys of a sub-block, of a tile whose keys come in such: as rows, only where their order is computed once."""
        return family.sub_block_keys(self.call, tile) if side == "q" or self.static else None

    def schedule(
        self, tile: Tile, side: Side, tensors: Mapping[str, Tensor], aligned: bool, made: Schedules | None = None
    ) -> DeviceSchedule:
        """On the device; of a mask without lengths, once. `made` are those that launches of one pass share."""
        key = (tile, side)
        if not self.static:
            made = {} if made is None else made
            sizes = (tile.block_q, tile.block_k, side)
            if sizes in made:
                return made[sizes]
            if key not in self.schedule_launches:
                self.schedule_launches[key] = self._schedule_launches(tile, side)
            launches = self.schedule_launches[key]
            written = {name: self.fixed["nothing"].new_empty(shape) for name, shape in launches.shapes.items()}
            for launch in (launches.blocks, launches.rows):
                launch.run({**tensors, **written}, self.compiled, aligned)
            made[sizes] = DeviceSchedule(written["rows"], written.get("index"))
            return made[sizes]
        if key not in self.schedules:
            arrays: dict[str, Any] = dict(self.call.arrays)
            if self.pattern is not None:
                arrays["pattern"] = self.pattern.for_heads(self.dims.H)
            if self.kind.arrangement is not None:
                arrays |= static_lengths(self.kind.arrangement)
            schedule, order = family.scheduled(Call(self.kind.spec, arrays), tile, side, np)
            self.schedules[key] = _on_device(schedule, order, self.kind.device)
        return self.schedules[key]

    def _schedule_launches(self, tile: Tile, side: Side) -> ScheduleLaunches:
        from ejkernel.kernels.softmax.triton.schedule import EXTENTS, extents_kernel, maps_kernel, rows_kernel

        tile = replace(tile, block_k=self.sub_block(tile, side) or tile.block_k, warps=4, stages=1)
        B, n_q, n_k = self.dims.B, -(-self.dims.T // tile.block_q), -(-self.dims.S // tile.block_k)
        rows, others = (n_q, n_k) if side == "q" else (n_k, n_q)
        patterns = 0 if self.pattern is None else self.pattern.heads
        by_function = self.kind.spec.rules.mask is not None
        by_head = patterns > 1 or self.functions.by_head
        if by_function and "q_segments" not in self.call and not self.functions.by_batch:
            B = 1
        heads = self.dims.H if by_head else 1
        shapes: dict[str, tuple[int, ...]] = {"rows": (B, heads, rows, 4)}
        more: dict[str, Any] = {}
        if self.pattern is not None:
            self.fixed["sums"] = self.pattern.sums(self.kind.device)
            more["p_sums"] = "sums"
        if lists := by_function or self.pattern is not None:
            shapes |= {"rows": (B, heads, rows, 2), "index": (B, heads, rows, others)}
        written = ("rows", "index" if lists else "nothing")
        unscheduled, general = DeviceSchedule(), {"LISTS": lists}
        if by_function:
            shapes["maps"], more["p_maps"] = (B, heads, n_q, n_k), "maps"
            blocks = self._prepared(maps_kernel, tile, unscheduled, B * heads, ("maps",), {}, general, HEADS=heads)
            blocks = replace(blocks, grid=(n_k, n_q, B * heads))
        else:
            shapes["extents"], more["p_extents"] = (B, EXTENTS.value, n_q + n_k), "extents"
            at_once = {f"N{x}": max(1, _TOKENS // n) for x, n in (("Q", tile.block_q), ("K", tile.block_k))}
            blocks = self._prepared(extents_kernel, tile, unscheduled, B, ("extents",), {}, general, **at_once)
            blocks = replace(blocks, grid=(-(-n_q // at_once["NQ"]) + -(-n_k // at_once["NK"]), B, 1))
        N = min(power_of_two(others, 32), _BLOCKS)
        options = {"HEADS": heads, "PATTERNS": patterns, "BY_KEYS": side == "k", "N": N}
        tile = replace(tile, warps=max(1, N // 256))
        made = self._prepared(rows_kernel, tile, unscheduled, B * heads, written, more, general, **options)
        return ScheduleLaunches(blocks, replace(made, grid=(rows, B * heads, 1)), shapes)

    def _prepared(
        self,
        kernel: Any,
        tile: Tile,
        schedule: DeviceSchedule,
        heads: int,
        outputs: Sequence[str],
        more: Mapping[str, Any],
        constants: Mapping[str, Any],
        call: Any = None,
        **others: Any,
    ) -> PreparedLaunch:
        """A launch over all rows of a schedule; `more` are arguments beyond those the kernels share."""
        import triton.language as tl

        if heads > _MOST_HEADS:
            raise ValueError(f"batch times heads, {heads}, must be at most {_MOST_HEADS}: a grid of CUDA has no more")
        rows, index, order = schedule
        call = call or self.call
        operands = {f"p_{name}": call.get(name) for name in ("ints", "floats")}
        shared = family.arguments(call, rows, index, order, operands)
        shared = {name: _NAMES[name] if hasattr(x, "shape") else x for name, x in shared.items()}
        given = {**shared, **more}
        names = [name for name in kernel.arg_names if name != "C" and name not in others]
        named = {name: given.get(name) for name in names[: -len(outputs)]}
        wide = None if self.wide is None else getattr(tl, self.wide)
        general = {"LISTS": index is not None, "HEADS_FIRST": self.kind.heads_first, "WIDE": wide}
        made = family.constants(call, tile, **{**general, **constants})
        fixed = schedule._asdict() if self.static else {}
        return PreparedLaunch(
            kernel=kernel,
            arguments=(*("absent" if x is None else x for x in named.values()), *outputs),
            outputs=len(outputs),
            grid=(0 if rows is None else rows.shape[2], heads, 1),
            tile=tile,
            constants={"C": made, **others},
            fixed={**self.fixed, **{name: x for name, x in fixed.items() if x is not None}},
        )

    def _pair(
        self, kernel: Any, tile: Tile, side: Side, heads: int, outputs: Sequence[str], schedule: Any, **constants: Any
    ) -> LaunchPair:
        """Both launches read one schedule, with one tile."""
        width = self.sub_block(tile, side)
        length = self.dims.T if side == "q" else self.dims.S
        flagged = family.flag_rows(tile, side, width)
        flags = (heads, -(-length // flagged))
        constants = {"SUB_BLOCK": width, **constants}
        fast = self._prepared(kernel, tile, schedule, heads, (*outputs, "bad"), _ROWS, constants)
        if not family.hides_anything(self.call):
            return LaunchPair(fast, None, flags)
        old = {"p_flags": "bad", **{f"p_old_{name}": name for name in outputs}, **_ROWS}
        marked = {"GUARD": True, "FLAG_ROWS": flagged, **constants}
        nan_safe = self._prepared(kernel, replace(tile, stages=1), schedule, heads, (*outputs, "nothing"), old, marked)
        return LaunchPair(fast, nan_safe, flags)

    def _run_twice(
        self,
        name: str,
        kernel: str,
        tile: Tile,
        side: Side,
        tensors: dict[str, Any],
        schedules: Schedules | None = None,
        **more: Any,
    ) -> None:
        """The two launches of a kernel; `more` are constants of it."""
        aligned = self.compiled and aligned_to_16_bytes(tensors)
        pair = self.pairs.get(name)
        if pair is None or not self.static:
            schedule = self.schedule(tile, side, tensors, aligned, schedules)
            if pair is None:
                outputs = {"forward": ("out", "lse", "total", "argmax"), "dq": ("dq",)}.get(kernel, ("dk", "dv"))
                heads = self.dims.B * (self.dims.H if side == "q" else self.dims.Hkv)
                pair = self._pair(_kernel(kernel), tile, side, heads, outputs, schedule, **more)
                self.pairs[name] = pair
            if not self.static:
                tensors |= {name: x for name, x in schedule._asdict().items() if x is not None}
        tensors["bad"] = self.fixed["nothing"].new_empty(pair.flags)
        pair.fast.run(tensors, self.compiled, aligned)
        if pair.nan_safe is not None:
            pair.nan_safe.run(tensors, self.compiled, aligned)

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        B, T, _, H, _, _, Dv = self.dims
        query = tensors["query"]
        if query.shape[3] == Dv and query.dtype == self.kind.out:  # which is dense, and so is what is like it
            out = torch.empty_like(query)
        else:
            out = empty_rows(query, (B, T, H, Dv), self.kind.heads_first, self.kind.out)
        lse = torch.empty((B, H, T), dtype=torch.float32, device=query.device)
        self._run_twice("forward", "forward", self.config.forward, "q", {**tensors, "out": out, "lse": lse})
        return out, lse

    @cached_property
    def _row_block(self) -> int:
        tiles = (self.config.dq, self.config.dkv, self.config.dv, self.config.dbias)
        return max(tile.block_q for tile in tiles if tile)

    def _row_terms(self, with_dlse: bool) -> PreparedLaunch:
        if with_dlse not in self.terms:
            tile = Tile(min(64, self._row_block), 16, 4, 1)
            more = {"p_out": "out", "p_dout": "dout", "p_lse": "lse", "p_dlse": "dlse" if with_dlse else None}
            heads, block = self.dims.B * self.dims.H, self._row_block
            outputs, constants = ("rows_lse", "rows_delta"), {"ROW_BLOCK": block}
            made = self._prepared(
                _kernel("row_terms"), tile, DeviceSchedule(), heads, outputs, more, constants, DLSE=with_dlse
            )
            blocks = -(-self.dims.T // block) * block // tile.block_q
            self.terms[with_dlse] = replace(made, grid=(blocks, heads, 1))
        return self.terms[with_dlse]

    def backward(self, tensors: dict[str, Tensor], cotangents: Cotangents, needed: Gradients) -> Gradients:
        """All gradients but those of tables that a function reads."""
        B, T, _, H, *_ = self.dims
        out, lse, dout, dlse = cotangents
        config, heads_first, schedules = self.config, self.kind.heads_first, {}
        more: dict[str, Any] = {"schedules": schedules, "ROW_BLOCK": self._row_block}
        rows_lse, rows_delta = lse.new_empty((2, B, H, -(-T // self._row_block) * self._row_block)).unbind(0)
        given = {**tensors, "dout": dout, "rows_lse": rows_lse, "rows_delta": rows_delta}
        terms = {**given, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
        self._row_terms(dlse is not None).run(terms, self.compiled, self.compiled and aligned_to_16_bytes(terms))
        dq, dk, dv = (empty_rows(tensors[n], tuple(tensors[n].shape), heads_first, tensors[n].dtype) for n in MOVED)
        self._run_twice("dq", "dq", config.dq, "q", {**given, "dq": dq}, **more)
        if config.dv is None:
            self._run_twice("dkv", "dkv", config.dkv, "k", {**given, "dk": dk, "dv": dv}, **more)
        else:
            other = dk.new_empty(4)  # of the two, the one that a launch leaves out
            self._run_twice("dk", "dkv", config.dkv, "k", {**given, "dk": dk, "dv": other}, VALUE=False, **more)
            self._run_twice("dv", "dkv", config.dv, "k", {**given, "dk": other, "dv": dv}, KEY=False, **more)
        dsinks = None
        if "sinks" in tensors:
            lse = torch.where(torch.isneginf(lse), torch.inf, lse)
            dsinks = sink_gradient(tensors["sinks"][0], lse, rows_delta[:, :, :T])
        score, dbias, dfloats = self.kind.spec.rules.score, None, None
        if "bias" in tensors and needed.bias:
            dbias = self._bias_gradient(given)
        if "floats" in tensors and needed.floats and score is not None and not has_table_gradient(score):
            dfloats = self._operand_gradients(score, given, schedules)
        return Gradients(dq, dk, dv, dsinks, dbias, dfloats)

    def _bias_gradient(self, given: dict[str, Tensor]) -> Tensor:
        dims, bias, tile = self.dims, given["bias"], self.config.dbias or self.config.dq
        shape, dtype, call = bias.shape, bias.dtype, self.call
        if 1 in shape[2:]:  # little is owned: each batch and head has programs of its own, and all are summed after
            shape, dtype = (dims.B, dims.H, *((1, dims.S) if shape[2] == 1 else (dims.T, 1))), torch.float32
            given = {**given, "bias": bias.expand(shape).contiguous()}
            wide = jax.ShapeDtypeStruct(shape, self.call["bias"].dtype)
            call = replace(self.call, arrays={**self.call.arrays, "bias": wide})
        given = {**given, "dbias": bias.new_empty(shape, dtype=dtype)}
        if "dbias" not in self.others:
            constants = {"ROW_BLOCK": self._row_block}
            made = self._prepared(_kernel("dbias"), tile, DeviceSchedule(), 1, ("dbias",), _ROWS, constants, call)
            grid = shape[0] * shape[1], -(-shape[2] // tile.block_q), -(-shape[3] // tile.block_k)
            self.others["dbias"] = replace(made, grid=grid)
        self.others["dbias"].run(given, self.compiled, self.compiled and aligned_to_16_bytes(given))
        return given["dbias"].sum_to_size(bias.shape).to(bias.dtype)

    def _operand_gradients(self, score: Expression, given: dict[str, Tensor], schedules: Schedules) -> Tensor:
        """(B|1, H|1, n), as the operands lie."""
        dims, layout = self.dims, self.functions.layouts.floats
        dfloats = torch.zeros_like(given["floats"])
        for node, slope in slopes(score).operands:
            kind, number = node.data
            sums = self._summed_slope(slope, "k" if kind == "column" else "q", given, schedules)
            sums = sums if kind != "scalar" else sums.sum(-1, keepdim=True)
            sums = sums.sum_to_size(*dfloats.shape[:2], sums.shape[2])
            start = {"scalar": 0, "row": layout.scalars, "column": layout.scalars + layout.rows * dims.T}[kind]
            start += number * sums.shape[2]
            dfloats[:, :, start : start + sums.shape[2]] = sums
        return dfloats

    def _summed_slope(self, slope: Expression, side: Side, given: dict[str, Tensor], schedules: Schedules) -> Tensor:
        """What a derivative by an operand sums to for each query or key, (B, H, length)."""
        tile, heads, length = self.config.dq, self.dims.B * self.dims.H, self.dims.T if side == "q" else self.dims.S
        aligned = self.compiled and aligned_to_16_bytes(given)
        schedule = self.schedule(tile, side, given, aligned, schedules)
        name = (slope, side)
        if name not in self.others:
            made = DeviceFunction(slope, layouts_of(self.call.arrays))
            constants = {"ROW_BLOCK": self._row_block, "OPERAND_SLOPE": made, "OF_KEYS": side == "k"}
            self.others[name] = self._prepared(
                _kernel("operand"), tile, schedule, heads, ("doperand",), _ROWS, constants
            )
        sums = given["rows_lse"].new_empty((self.dims.B, self.dims.H, length))
        scheduled = {n: x for n, x in schedule._asdict().items() if x is not None}
        self.others[name].run({**given, **scheduled, "doperand": sums}, self.compiled, aligned)
        return sums


program_of = lru_cache(maxsize=256)(Program)


def _kernel(name: str) -> Any:
    from ejkernel.kernels.softmax.triton import backward, forward

    return getattr(forward if name == "forward" else backward, f"{name}_kernel")


# parameters that are tensors, by the names of the tensors
_NAMES = {
    "p_q": "query",
    "p_k": "key",
    "p_v": "value",
    "p_sinks": "sinks",
    "p_q_seg": "q_segments",
    "p_k_seg": "kv_segments",
    "p_q_pos": "q_positions",
    "p_k_pos": "kv_positions",
    "p_pattern": "pattern",
    "p_rows": "rows",
    "p_index": "index",
    "p_order": "order",
    "p_bias": "bias",
    "p_ints": "ints",
    "p_floats": "floats",
    "p_seeds": "dropout_seeds",
}
_ROWS = {"p_dout": "dout", "p_lse": "rows_lse", "p_delta": "rows_delta"}


def _on_device(schedule: Schedule, order: Any, device: torch.device) -> DeviceSchedule:
    lists = isinstance(schedule, Lists)
    rows, index = (schedule.number, schedule.index) if lists else (schedule.bounds, None)
    # dense: a sum over a broadcast array need not be
    arrays = (None if x is None else torch.as_tensor(x).contiguous().to(device) for x in (rows, index, order))
    return DeviceSchedule(*arrays)

"""The schedule that launches make from lengths is the one that `plan` defines: rows, and lists as far as they go."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ejkernel.bridge import compile_for
from ejkernel.kernels.softmax.schedule import plan
from ejkernel.kernels.softmax.spec import Band, Spec
from ejkernel.kernels.softmax.triton import Tile
from ejkernel.ops import Call
from ejkernel.torch import programs
from ejkernel.torch.few_queries import arranged_lengths
from ejkernel.torch.inputs import Lengths, packed_lengths, padded_lengths
from ejkernel.torch.pattern import Pattern
from ejkernel.torch.programs import Kind, Program

CAUSAL = Band(None, 0)


def sized(B: int, T: int, S: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(B, T, 1, 16), torch.zeros(B, S, 1, 16)


def padded(T: int, S: int, left: list[int] | None = None, seqlens: list[int] | None = None) -> Callable[[], Any]:
    B = len(left or seqlens or [])
    given = [None if x is None else torch.tensor(x, dtype=torch.int32) for x in (left, seqlens)]
    return lambda: padded_lengths(*sized(B, T, S), *given)


def packed(T: int, S: int, queries: list[int], keys: list[int]) -> Callable[[], Any]:
    cu = [torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (queries, keys)]
    return lambda: packed_lengths(*sized(1, T, S), *cu)


def split(lengths: Callable[[], Any], group: int, splits: int) -> Callable[[], Any]:
    """As the launches see it: heads of a group are rows, and splits of the keys are more batch rows."""

    def arranged() -> Any:
        given: Any = dict(zip(Lengths._fields, lengths(), strict=True))
        given["query"] = given["q_segments"]
        return arranged_lengths(given, group, splits).values()

    return arranged


def anything(B: int, T: int, S: int, seed: int, far: int = 1) -> Callable[[], Any]:
    """Any segments, padding among them, and positions before and past those of a pattern, in runs."""

    def made() -> Any:
        random = np.random.default_rng(seed)
        lengths = [np.sort(random.integers(-1, 3, (B, n)), -1) for n in (T, S)]
        lengths += [np.sort(random.integers(-30 * far, 200 * far, (B, n)), -1) for n in (T, S)]
        return [torch.from_numpy(np.roll(x, seed, -1).astype(np.int32)) for x in lengths]

    return made


def placed(q: int, k: int, length: int = 64) -> Callable[[], Any]:
    """One segment whose queries and keys start at these positions."""
    at = torch.arange(length, dtype=torch.int32)[None]
    return lambda: (at * 0, at * 0, at + q, at + k)


@dataclass(frozen=True)
class Case:
    id: str
    lengths: Callable[[], Any]
    band: Band = CAUSAL
    chunk: int | None = None
    blocks: tuple[int, int] = (16, 16)
    heads: int = 2
    patterns: int = 0
    size: int = 16


CASES = [
    Case("packed", packed(100, 100, [30, 50, 20], [30, 50, 20])),
    Case("packed-of-one-segment", packed(128, 128, [128], [128]), blocks=(16, 32)),
    Case("packed-with-padding-behind", packed(150, 150, [64, 0, 50], [64, 0, 50]), blocks=(32, 16)),
    Case("packed-window", packed(200, 200, [120, 80], [120, 80]), Band(-40, 0)),
    Case("packed-full", packed(96, 128, [48, 48], [64, 64]), Band()),
    Case("packed-mixed", packed(40, 130, [1, 38, 1], [60, 40, 30]), blocks=(16, 64)),
    Case("packed-pattern", packed(200, 200, [70, 0, 130], [70, 0, 130]), patterns=1),
    Case("packed-pattern-by-head", packed(200, 200, [70, 0, 130], [70, 0, 130]), patterns=2, blocks=(32, 16)),
    Case("packed-large-blocks", packed(300, 300, [130, 170], [130, 170]), patterns=2, size=64, blocks=(64, 32)),
    Case("left-padding", padded(100, 100, [0, 37, 100])),
    Case("left-padding-pattern", padded(128, 128, [0, 37, 128]), patterns=1),
    Case("both-paddings", padded(128, 128, [0, 5, 64], [128, 60, 0]), patterns=2, blocks=(16, 64)),
    Case("decode", padded(1, 150, None, [150, 77, 0]), patterns=2),
    Case("decode-no-pattern", padded(1, 150, None, [150, 77, 0]), Band(-50, 0)),
    Case("decode-large-blocks", padded(1, 512, None, [512, 130, 1]), patterns=1, size=64, blocks=(16, 64)),
    Case("chunk-of-queries", padded(40, 160, None, [160, 90, 20]), patterns=2),
    Case("not-causal", padded(40, 160, None, [160, 90, 0]), Band(), patterns=1),
    Case("packed-heads", split(padded(1, 160, None, [160, 90, 0]), 4, 1), patterns=2),
    Case("split-keys", split(padded(3, 256, [0, 9], [256, 140]), 2, 4), patterns=2, blocks=(16, 32)),
    Case("pattern-of-a-key-head", padded(100, 100, None, [100, 40]), heads=4, patterns=2),
    Case("pattern-of-more-heads", padded(100, 100, None, [100, 40]), heads=2, patterns=4),
    Case("chunk", padded(100, 100, [0, 37]), chunk=24),
    Case("chunk-before-the-first-token", placed(-24, -24), Band(), chunk=24),
    Case("before-the-pattern", placed(-24, -24), Band(), patterns=1),
    Case("queries-past-the-pattern", placed(264, -24), Band(), patterns=1),
    Case("keys-past-the-pattern", placed(-24, 264), Band(), patterns=1),
    Case("window-as-wide-as-tiles", placed(0, 0), Band(-33, 1)),
    Case("window-just-over-tiles", placed(0, 0), Band(-31, 15)),
    *(Case(f"anything-{n}", anything(2, 90, 170, n), patterns=n % 3, blocks=(16, 32)) for n in range(6)),
    *(Case(f"chunk-{n}", anything(2, 90, 170, n), Band(), 32 + n, patterns=n % 2) for n in range(2)),
    *(Case(f"far-{n}", anything(2, 90, 170, n, far=10**6), Band(-20, 5), patterns=1) for n in range(2)),
]


def pattern_of(case: Case) -> Pattern | None:
    if not case.patterns:
        return None
    n = -(-300 // case.size)
    cells = np.random.default_rng(0).random((case.patterns, n, n)) < 0.5
    cells[:, :, [0, 1, 2, -1]] = True  # some tiles are wholly set
    if case.patterns > case.heads:
        cells[1::2] = cells[::2]  # what a group shares
    return Pattern.of(cells, case.size)


def described(case: Case, lengths: dict[str, torch.Tensor]) -> tuple[Program, Call]:
    """The program of a case, and the same call on arrays of the host."""
    pattern = pattern_of(case)
    (B, T), S = lengths["q_segments"].shape, lengths["kv_segments"].shape[1]
    shapes = {"query": (B, T, case.heads, 16), "key": (B, S, case.heads, 16), "value": (B, S, case.heads, 16)}
    arrays = tuple((name, shape, torch.float32) for name, shape in shapes.items())
    arrays += tuple((name, tuple(x.shape), x.dtype) for name, x in lengths.items())
    block = None if pattern is None else (case.size, case.size)
    spec = Spec(1.0, case.band, case.chunk, pattern_block=block, pattern_by_position=pattern is not None)
    key = "" if pattern is None else pattern.key
    known: Any = {name: np.empty(shape) for name, shape in shapes.items()} | {n: x.numpy() for n, x in lengths.items()}
    if pattern is not None:
        known["pattern"] = pattern.for_heads(case.heads)
    program = Program(Kind(spec, arrays, key, case.blocks, False, torch.device("cpu"), torch.float32))
    return program, Call(spec, known)


def lengths_of(case: Case) -> dict[str, torch.Tensor]:
    return dict(zip(Lengths._fields, case.lengths(), strict=True))


def planned(call: Call, case: Case, side: Any) -> Any:
    with np.errstate(over="ignore"):  # of what padding has; it decides nothing
        return plan(call, *case.blocks, side, np)


def check(case: Case, side: Any) -> None:
    lengths = lengths_of(case)
    program, call = described(case, lengths)
    tile = Tile(*case.blocks, 4, 1)
    rows, index, order = program.schedule(tile, side, lengths, False)
    blocks = (case.blocks[0], program.sub_block(tile, side) or case.blocks[1])
    expected = planned(call, replace(case, blocks=blocks), side)
    assert order is None
    if index is None:
        np.testing.assert_array_equal(rows, np.broadcast_to(expected.bounds, rows.shape))
        return
    np.testing.assert_array_equal(rows, np.broadcast_to(expected.number, rows.shape))
    listed = np.arange(index.shape[-1]) < rows[..., 1:].numpy()
    wanted = np.broadcast_to(expected.index, index.shape)
    np.testing.assert_array_equal(np.where(listed, index, -1), np.where(listed, wanted, -1))


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_it_is_what_plan_says(case, side, monkeypatch):
    # several programs for the blocks of a row, and several steps over them
    monkeypatch.setattr(programs, "_TOKENS", 64)
    monkeypatch.setattr(programs, "_BLOCKS", 8)
    check(case, side)


@pytest.mark.parametrize("case", CASES[:2] + CASES[6:8], ids=lambda case: case.id)
def test_as_many_blocks_at_a_time_as_on_a_gpu(case):
    check(case, "k")


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("id", ["packed-window", "both-paddings", "decode", "chunk"])
def test_the_launches_compile_for_hopper(id, side, monkeypatch):
    (case,) = (case for case in CASES if case.id == id)
    lengths = lengths_of(case)
    program, _ = described(case, lengths)
    launches = []
    monkeypatch.setattr(
        programs.PreparedLaunch, "run", lambda launch, tensors, *_: launches.append(launch.described(tensors))
    )
    program.schedule(Tile(*case.blocks, 4, 1), side, {**program.fixed, **lengths}, False)
    assert [launch.kernel.__name__ for launch, _ in launches] == ["extents_kernel", "rows_kernel"]
    for launch, names in launches:
        operands = [jax.ShapeDtypeStruct((1,), jnp.int32) for _ in names]
        arguments = [*launch.fill(operands, operands[0]), *launch.outputs]
        report = compile_for("sm_90", launch.kernel, arguments, dict(launch.constexprs), launch.num_warps, 1)
        assert report.problems == [] and report.shared_bytes < 2**13, report


@pytest.mark.parametrize("lists", [False, True])
def test_the_cases_have_blocks_of_every_kind(lists):
    """Rows without a mask, rows of both kinds, rows that leave blocks out, and rows that see nothing."""
    kinds = set()
    for case in CASES:
        if bool(case.patterns) == lists:
            lengths = lengths_of(case)
            schedule = planned(described(case, lengths)[1], case, "q")
            if lists:
                unmasked, seen = np.moveaxis(schedule.number, -1, 0)
            else:
                lo, full_lo, full_hi, hi = np.moveaxis(schedule.bounds, -1, 0)
                unmasked, seen = full_hi - full_lo, hi - lo
            blocks = -(-lengths["kv_segments"].shape[1] // case.blocks[1])
            rows_of = {
                "unmasked": (unmasked == seen) & (seen > 0),
                "both": (unmasked > 0) & (unmasked < seen),
                "left out": (seen > 0) & (seen < blocks),
                "nothing": seen == 0,
            }
            kinds |= {name for name, rows in rows_of.items() if rows.any()}
    assert kinds == {"unmasked", "both", "left out", "nothing"}

"""Implicit sharding: what the partitioner of a plain `jit` is told of an operation.

Over Auto mesh axes nobody knows while a program is traced how its arrays will lie. The partitioner would then gather
what a kernel reads, for it cannot see into one, and some of what a loop over blocks reads. Here it is told by the
dimension letters of the arrays which dimensions are computed apart, and given the program of one part.

On one device, and inside a shard_map, nothing of this is in the program.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.operation import Dims, Splits
from ejkernel.ops.sharding import Axes, Share, axes_of, dividing, letter_sizes, share_of

Function = Callable[..., Any]


class _Value(NamedTuple):
    """An operand or a result."""

    dims: Dims
    shape: tuple[int, ...]


class _Undeclared(Exception):
    """A result has no dimension letters."""


def partitioned(
    function: Function,
    splits: Splits,
    operands: Sequence[Mapping[str, Dims]],
    results: Mapping[str, Dims],
    *,
    gradients: bool = False,
) -> Function:
    """A function of groups of named arrays, to arrays in any tree of dicts, that a plain jit splits over devices.

    Args:
        function: does a part like the whole.
        splits: which letters may be split.
        operands: of each group, the dimensions by name.
        results: those of its results by name, wherever in the tree they are.
        gradients: whether results are sums over what they are not split along.
    """

    def run(*groups: Any) -> Any:
        leaves, tree = jax.tree.flatten(groups)
        known = [dims.get(name) for group, dims in zip(groups, operands, strict=True) for name in sorted(group)]
        if None in known:
            return function(*groups)
        values = [_Value(dims, x.shape) for dims, x in zip(known, leaves, strict=True) if dims is not None]
        split = _Split(splits, values, gradients)
        # without jit it would have to hold the constants of a function, which it cannot (0.10 to 0.12)
        if not split.letters or jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return function(*groups)

        def flat(*leaves: Any) -> Any:
            outputs = jax.jit(function)(*jax.tree.unflatten(tree, leaves))  # which holds its constants itself
            split.note_results(outputs, results)
            return outputs

        wrapped = custom_partitioning(flat)
        wrapped.def_partition(
            partition=lambda mesh, args, outs: split.partition(flat, mesh, args, outs),
            infer_sharding_from_operands=split.infer,  # of a JAX whose partitioner is not Shardy
            sharding_rule=lambda mesh, *_: split.rule(mesh),
        )
        try:
            return wrapped(*leaves)
        except _Undeclared:
            return function(*groups)

    return run


@dataclass
class _Split:
    """How the operands and results of a function are split together."""

    splits: Splits
    operands: list[_Value]
    gradients: bool
    results: list[_Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = letter_sizes(self.operands)
        self.letters = {letter for letter in self.splits.free if self.sizes.get(letter, 1) > 1}
        self.pairs = [pair for pair in self.splits.grouped if set(pair) <= set(self.sizes)]
        self.tied = [pair for pair in self.splits.tied if set(pair) <= set(self.sizes)]
        for one, other in self.tied:  # where one is whole, so is the other
            self.letters -= set() if {one, other} <= self.letters else {one, other}

    def note_results(self, outputs: Any, known: Mapping[str, Dims]) -> None:
        values = []
        for path, x in jax.tree_util.tree_flatten_with_path(outputs)[0]:
            name = path[-1].key
            if name not in known:
                raise _Undeclared(name)
            values.append(_Value(known[name], x.shape))
        self.results = values

    # What Shardy is told ----------------------------------------------------------------------------------------

    def rule(self, mesh: Mesh) -> SdyShardingRule:
        """A factor for every letter that may be split; what may not needs replication."""
        factors = _Factors(self._letter_factors(mesh), {f"{one}_in_{other}" for one, other in self.tied})
        operands = tuple(factors.of(value) for value in self.operands)
        results = tuple(factors.of(value) for value in self.results)
        sizes: dict[str, Any] = factors.sizes_of_parts()
        return SdyShardingRule(operands, results, need_replication_factors=tuple(factors.whole), **sizes)

    def _letter_factors(self, mesh: Mesh) -> dict[str, tuple[tuple[str, int], ...]]:
        """The factors of each letter, and their sizes: query heads are key heads times the heads of a group."""
        by_letter: dict[str, tuple[tuple[str, int], ...]] = {}
        by_letter |= {letter: ((letter, self.sizes[letter]),) for letter in self.letters}
        for one, other in (*self.pairs, *self.tied):
            if one not in by_letter or other not in by_letter:
                continue
            group = self._group(one, other)
            if (one, other) in self.tied or all(self.sizes[other] % n == 0 for n in mesh.shape.values()):
                by_letter[one] = by_letter[other] if group == 1 else (*by_letter[other], (f"{one}_in_{other}", group))
            else:  # an axis that all heads are split over would be cut in two; devices share keys instead
                del by_letter[other]
        return by_letter

    def _group(self, one: str, other: str) -> int:
        return self.sizes[one] // self.sizes[other]

    # What the partitioner is told -------------------------------------------------------------------------------

    def infer(self, mesh: Mesh, args: Sequence[Any], outs: Any) -> Any:
        by_letter = self._axes(mesh, [(value, x.sharding) for value, x in zip(self.operands, args, strict=True)])
        return self._shardings(mesh, self.results, by_letter, jax.tree.structure(outs))

    def partition(self, function: Function, mesh: Mesh, args: Sequence[Any], outs: Any) -> Any:
        leaves, tree = jax.tree.flatten(outs)
        if mesh.empty:  # arrays of no named mesh: as if nothing were split
            devices = sorted(leaves[0].sharding.device_set, key=lambda device: device.id)
            mesh = Mesh(devices, ("devices",))
        known = [(v, x.sharding) for v, x in zip([*self.operands, *self.results], [*args, *leaves], strict=True)]
        by_letter = self._axes(mesh, known)
        shares = [share_of(pair, self.sizes, by_letter, mesh) for pair in self.pairs]
        local = self._local(function, mesh, by_letter, [share for share in shares if share is not None])
        given = self._shardings(mesh, self.operands, by_letter, jax.tree.structure(tuple(args)))
        return mesh, local, self._shardings(mesh, self.results, by_letter, tree), given

    def _axes(self, mesh: Mesh, known: Sequence[tuple[_Value, Any]]) -> dict[str, Axes]:
        """The mesh axes of each letter: what the first of the arrays says that is split along it."""
        by_letter: dict[str, Axes] = {}
        used: set[str] = set()
        shared = {other: one for one, other in (*self.pairs, *self.tied)}
        asked = [
            (shared.get(letter, letter), letter, axes) for v, split in known for letter, axes in _entries(v, split)
        ]
        asked.sort(key=lambda entry: entry[0] != entry[1])  # what query heads say comes first
        for letter, named, axes in asked:
            free = tuple(axis for axis in axes if axis not in used)
            if letter in self.letters and named in self.letters and letter not in by_letter:
                by_letter[letter] = dividing(free, self.sizes[letter], mesh)
                used |= set(by_letter[letter])
        for pair in self.pairs:
            self._share(pair, by_letter, mesh)
        for one, other in self.tied:
            by_letter[one] = by_letter[other] = dividing(by_letter.get(one, ()), self.sizes[other], mesh)
        return by_letter

    def _share(self, pair: tuple[str, str], by_letter: dict[str, Axes], mesh: Mesh) -> None:
        """Split both letters of a pair so that every device has what it needs."""
        one, other = pair
        while True:
            by_letter[other] = dividing(by_letter.get(one, ()), self.sizes[other], mesh)
            if share_of(pair, self.sizes, by_letter, mesh) is not None:
                return
            by_letter[one] = by_letter[one][:-1]

    def _spec(self, value: _Value, by_letter: Mapping[str, Axes]) -> PartitionSpec:
        split = [
            by_letter.get(letter, ()) if n > 1 else () for letter, n in zip(value.dims.axes, value.shape, strict=True)
        ]
        return PartitionSpec(*(axes or None for axes in split))

    def _shardings(self, mesh: Mesh, values: Sequence[_Value], by_letter: Mapping[str, Axes], tree: Any) -> Any:
        return jax.tree.unflatten(tree, [NamedSharding(mesh, self._spec(value, by_letter)) for value in values])

    def _local(
        self, function: Function, mesh: Mesh, by_letter: Mapping[str, Axes], shares: Sequence[Share]
    ) -> Function:
        """The function on one device's part."""
        every = {axis for axes in by_letter.values() for axis in axes if mesh.shape[axis] > 1}

        def summed(x: jax.Array, value: _Value) -> jax.Array:
            for share in shares:
                x = share.put_back(x, value.dims)
            split_axes = {axis for entry in self._spec(value, by_letter) for axis in axes_of(entry)}
            others = tuple(sorted(every - split_axes))
            return jax.lax.psum(x, others) if others else x

        def local(*leaves: jax.Array) -> Any:
            for share in shares:
                leaves = tuple(share.cut(x, value.dims) for x, value in zip(leaves, self.operands, strict=True))
            # results of a part are noted too; only their letters, and the whole's shapes, matter
            whole = self.results
            outputs, tree = jax.tree.flatten(function(*leaves))
            self.results = whole
            if self.gradients:
                outputs = [summed(x, value) for x, value in zip(outputs, whole, strict=True)]
            return jax.tree.unflatten(tree, outputs)

        return local


def _entries(value: _Value, sharding: Any) -> list[tuple[str, Axes]]:
    """The letters along which an array is split, and over what."""
    if not isinstance(sharding, NamedSharding):
        return []
    entries = zip(value.dims.axes, value.shape, sharding.spec, strict=False)
    return [(letter, axes_of(entry)) for letter, n, entry in entries if n > 1 and axes_of(entry)]


class _Factors:
    """The names of factors as a rule needs them; each dimension that is whole has one of its own."""

    def __init__(self, letters: Mapping[str, tuple[tuple[str, int], ...]], unsplit: set[str]) -> None:
        self.letters, self.unsplit = letters, unsplit
        self.whole: list[str] = []  # in the order in which they appear
        self._size: dict[str, int] = {}
        self._alone: set[str] = set()

    def of(self, value: _Value) -> ArrayMapping:
        return ArrayMapping(*(self._one(letter, n) for letter, n in zip(value.dims.axes, value.shape, strict=True)))

    def _one(self, letter: str, n: int) -> str | CompoundFactor:
        known = self.letters.get(letter) if n > 1 else None
        if known is None:
            return self._fresh()
        each = n // math.prod(size for _, size in known)
        names = [name for name, _ in known]
        self.whole += [name for name in names if name in self.unsplit and name not in self.whole]
        self._size |= dict(known)
        if each > 1:
            names.append(self._fresh())
            self._size[names[-1]] = each
            self._alone.discard(names[-1])
        if len(names) == 1:
            self._alone.add(names[0])
            return names[0]
        return CompoundFactor(*names)

    def _fresh(self) -> str:
        self.whole.append(f"whole_{len(self.whole)}")
        self._alone.add(self.whole[-1])
        return self.whole[-1]

    def sizes_of_parts(self) -> dict[str, int]:
        """Of the factors that are nowhere a whole dimension: a rule cannot know these."""
        return {name: size for name, size in self._size.items() if name not in self._alone}

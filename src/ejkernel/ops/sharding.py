"""The one shard_map path: specs for q, k, v in, specs for every other array derived from their dimension letters.

Over Explicit mesh axes the types of the arrays are specs too. There the kernels must run in a shard_map: their programs
do not say how each of their steps would be split.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import core as jax_core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.operation import Arrays, Call, Dims, Operation
from ejkernel.ops.target import ambient_mesh
from ejkernel.ops.tuning_session import active, paused

Axes = tuple[str, ...]

# what MaxText, EasyDeL, Flax and others call the axis that weights, and with them heads, are split over
_OF_WEIGHTS = ("tp", "mp", "tensor", "model", "heads")

# what errors call the specs, by whether they are those of types
_SOURCE = {False: "in_specs", True: "the shardings of the arrays"}


@dataclass(frozen=True)
class Shards:
    """What the caller said about many devices: `mesh`, `in_specs`, `out_specs`."""

    mesh: Mesh | AbstractMesh | None = None
    in_specs: Any = None
    out_specs: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh | AbstractMesh | None):
            raise TypeError(f"mesh={self.mesh!r:.80} must be a jax.sharding.Mesh")
        if (self.in_specs is not None or self.out_specs is not None) and self.found_mesh is None:
            raise ValueError(
                "in_specs and out_specs need mesh=, or a mesh around the call (jax.set_mesh, `with mesh:`)"
            )

    @property
    def found_mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh given, else the one around the call."""
        return self.mesh or ambient_mesh()


def typed_specs(call: Call) -> dict[str, PartitionSpec]:
    """The arrays that are split over Explicit mesh axes, which types show, and how."""
    specs = {name: jax.typeof(x).sharding.spec for name, x in call.arrays.items()}
    return {name: spec for name, spec in specs.items() if any(spec)}


def mesh_of(x: jax.Array) -> Mesh | AbstractMesh:
    """The mesh of an array that has one; that of a traced one is abstract."""
    sharding: Any = jax.typeof(x).sharding if isinstance(x, jax_core.Tracer) else x.sharding
    return sharding.mesh


def _axes_of_type(mesh: Mesh | AbstractMesh, *types: AxisType) -> frozenset[str]:
    return frozenset(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind in types)


def axes_of(entry: Any) -> Axes:
    """The mesh axes of an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def parts(axes: Axes, mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _named_specs(operation: Operation, call: Call, in_specs: Any) -> dict[str, PartitionSpec]:
    if isinstance(in_specs, Mapping):
        known = {_given(operation, name): name for name in operation.arrays}
        if unknown := sorted(set(in_specs) - set(known)):
            raise ValueError(f"in_specs names unknown arrays {unknown}; known: {list(known)}")
        specs = {known[name]: spec for name, spec in in_specs.items() if known[name] in call}
    elif isinstance(in_specs, PartitionSpec) or not isinstance(in_specs, Sequence):
        raise TypeError(f"in_specs={in_specs!r} must be one PartitionSpec per leading array, or a dict by name")
    else:
        names = [name for name in operation.arrays if name in call]
        if len(in_specs) > len(names):
            shown = [_given(operation, name) for name in names]
            raise ValueError(f"in_specs has {len(in_specs)} entries for {len(names)} arrays {shown}")
        specs = dict(zip(names, in_specs, strict=False))
    for name, spec in specs.items():
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"in_specs of {_given(operation, name)} is {spec!r}: it must be one PartitionSpec")
    return specs


def _given(operation: Operation, name: str) -> str:
    """What callers call an array."""
    return operation.arrays[name].given or name


def letter_sizes(arrays: Iterable[tuple[Dims, Sequence[int]]]) -> dict[str, int]:
    """The size of each dimension letter, from arrays and their shapes; one may broadcast along it with size 1."""
    sizes: dict[str, int] = {}
    for dims, shape in arrays:
        for letter, each, n in zip(dims.axes, dims.each, shape, strict=True):
            if each is not None:
                size = sizes.get(letter, 1)
                sizes[letter] = max(n // each, size) if n and size else 0
    return sizes


def _sizes(operation: Operation, call: Call) -> dict[str, int]:
    return letter_sizes((operation.arrays[name], x.shape) for name, x in call.arrays.items())


@dataclass(frozen=True)
class Share:
    """What a device needs of a letter that groups of another share: query heads here, key heads of all.

    Attributes:
        letter: the one that is shared.
        axes: those that the groups' letter is split over, `own_axes` those that this one is: the first of them.
        members: of the groups' letter on one device.
        group: how many of them share one.
        held: entries that a device has, `needed` those that its members need.
    """

    letter: str
    axes: Axes
    own_axes: Axes
    members: int
    group: int
    held: int

    @property
    def needed(self) -> int:
        return max(1, self.members // self.group)

    def cut(self, x: jax.Array, dims: Dims) -> jax.Array:
        """What is needed of an array."""
        if self.letter not in dims.axes or self.needed == self.held:
            return x
        axis, each = self._axis(dims)
        return jax.lax.dynamic_slice_in_dim(x, self._start() * each, self.needed * each, axis)

    def put_back(self, x: jax.Array, dims: Dims) -> jax.Array:
        """Zeros for what was not needed."""
        if self.letter not in dims.axes or self.needed == self.held:
            return x
        axis, each = self._axis(dims)
        whole = jnp.zeros((*x.shape[:axis], self.held * each, *x.shape[axis + 1 :]), x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(whole, x, self._start() * each, axis)

    def _axis(self, dims: Dims) -> tuple[int, int]:
        axis = dims.axes.index(self.letter)
        return axis, dims.each[axis] or 1

    def _start(self) -> jax.Array:
        mine = jax.lax.axis_index(self.axes) * self.members // self.group
        return mine - jax.lax.axis_index(self.own_axes) * self.held if self.own_axes else mine


def share_of(pair: tuple[str, str], sizes: Mapping[str, int], by_letter: Mapping[str, Axes], mesh: Any) -> Share | None:
    """How devices share the second letter of a pair; None where its parts do not fit those of the first."""
    one, other = pair
    axes, own_axes = by_letter.get(one, ()), by_letter.get(other, ())
    members, held = sizes[one] // parts(axes, mesh), sizes.get(other, 1) // parts(own_axes, mesh)
    group = sizes[one] // sizes.get(other, 1)
    fits = members % group == 0 or group % members == 0
    return Share(other, axes, own_axes, members, group, held) if fits and axes[: len(own_axes)] == own_axes else None


def dividing(axes: Axes, size: int, mesh: Any) -> Axes:
    """The most of the leading axes that divide a size."""
    while size % parts(axes, mesh):
        axes = axes[:-1]
    return axes


def _axes_by_dimension(
    operation: Operation, call: Call, specs: dict[str, PartitionSpec], mesh: Mesh | AbstractMesh, typed: bool
) -> dict[str, Axes]:
    """Mesh axes of each dimension letter, from the specs given; those of types leave whole ones to other arrays."""
    by_letter: dict[str, Axes] = {}
    for name, spec in specs.items():
        letters = operation.arrays[name].axes
        if len(spec) > len(letters):
            raise ValueError(f"in_specs of {_given(operation, name)} is {spec}, but it has dimensions {letters}")
        entries = (*spec, *(None for _ in letters[len(spec) :]))
        for letter, entry, size in zip(letters, entries, call[name].shape, strict=True):
            axes = axes_of(entry)
            if not axes and (size == 1 or typed):
                continue  # it broadcasts, or is whole and can be cut: this says nothing about the dimension
            if by_letter.setdefault(letter, axes) != axes:
                raise ValueError(
                    f"{_SOURCE[typed]} disagree on dimension {letter}: {by_letter[letter]} and {axes} (in "
                    f"{_given(operation, name)})"
                )
    sizes, said = _sizes(operation, call), set(by_letter)
    for pair in (*operation.splits.tied, *operation.splits.grouped):
        for letter, other in (pair, pair[::-1]):
            if letter not in by_letter and sizes.get(letter, 1) > 1:
                by_letter[letter] = by_letter.get(other, ())
    for _, other in operation.splits.grouped:
        if other not in said and all(axis in mesh.shape for axis in by_letter.get(other, ())):
            by_letter[other] = dividing(by_letter.get(other, ()), sizes.get(other, 1), mesh)
    return by_letter


def _check(
    by_letter: dict[str, Axes], call: Call, operation: Operation, mesh: Mesh | AbstractMesh, typed: bool
) -> None:
    sizes, splits = _sizes(operation, call), operation.splits
    splittable = (*splits.free, *splits.passed_on)
    splittable += tuple(other for one, other in splits.tied if one in splittable)
    for letter, axes in by_letter.items():
        for axis in axes:
            if axis not in mesh.shape:
                raise ValueError(
                    f"{_SOURCE[typed]} split {letter} over mesh axis {axis!r}; the mesh has {dict(mesh.shape)}"
                )
        count, size = parts(axes, mesh), sizes.get(letter, 1)
        if count > 1 and letter not in splittable:
            instead = splits.otherwise.get(letter)
            raise ValueError(
                f"{_SOURCE[typed]} split dimension {letter} of size {size} over {axes}: {operation.name} can only be "
                f"split over {', '.join(splittable)}{'' if instead is None else f'; {instead}'}"
            )
        if size % count:
            raise ValueError(
                f"dimension {letter} of size {size} does not divide over {axes} of {count} devices{_mend(letter, size)}"
            )
    _check_axes({letter: tuple(a for a in axes if mesh.shape[a] > 1) for letter, axes in by_letter.items()}, operation)
    for one, other in splits.tied:
        axes, own_axes = by_letter.get(one, ()), by_letter.get(other, ())
        if other in sizes and axes != own_axes:
            raise ValueError(
                f"dimension {one} is split over {axes} and {other} over {own_axes}: they must be split alike"
            )
    for pair in splits.grouped:
        if pair[1] in sizes and share_of(pair, sizes, by_letter, mesh) is None:
            raise ValueError(_apart(pair, sizes, by_letter, mesh))


def _check_axes(by_letter: dict[str, Axes], operation: Operation) -> None:
    """That no axis splits two dimensions, unless they are split together."""
    split_alike = {frozenset(pair) for pair in (*operation.splits.tied, *operation.splits.grouped)}
    by_axis: dict[str, str] = {}
    for letter, axes in by_letter.items():
        for axis in axes:
            other = by_axis.setdefault(axis, letter)
            if other != letter and frozenset((letter, other)) not in split_alike:
                raise ValueError(f"mesh axis {axis!r} splits dimensions {other} and {letter}: it may split one of them")


def _mend(letter: str, size: int) -> str:
    return f": split it over a number that divides {size}, pad it, or split another dimension than {letter}"


def _apart(pair: tuple[str, str], sizes: Mapping[str, int], by_letter: Mapping[str, Axes], mesh: Any) -> str:
    one, other = pair
    axes, own_axes = by_letter.get(one, ()), by_letter.get(other, ())
    return (
        f"dimension {one} of size {sizes[one]} is split over {axes} of {parts(axes, mesh)} devices and {other} of size "
        f"{sizes[other]} over {own_axes}: a device would need parts of {other} that it has not. Split both alike over "
        f"a number that divides {sizes[other]}; or leave {other} whole and split {one} over a number that "
        f"{sizes[other]} divides; or split another dimension"
    )


def _spec_for(letters: Sequence[str], shape: Sequence[int], by_letter: dict[str, Axes]) -> PartitionSpec:
    """The spec of an array: broadcast dimensions of size 1 are not split."""
    return PartitionSpec(
        *(by_letter.get(c, ()) or None if n != 1 else None for c, n in zip(letters, shape, strict=True))
    )


def likely_axes(operation: Operation, call: Call, mesh: Mesh | AbstractMesh, taken: Axes = ()) -> dict[str, Axes]:
    """Where nobody says how arrays lie: every axis of a mesh, but those taken, splits the first letter it divides.

    An axis with a name that model builders give to the one that splits weights begins with the last letter: heads.
    """
    sizes, splits, by_letter = _sizes(operation, call), operation.splits, {}
    pairs = [pair for pair in (*splits.grouped, *splits.tied) if set(pair) <= set(sizes)]
    shared = {other for _, other in pairs}
    letters = [letter for letter in splits.free if letter in sizes and letter not in shared]
    free = _axes_of_type(mesh, AxisType.Auto, AxisType.Explicit)
    for axis in (axis for axis in mesh.axis_names if axis in free and axis not in taken and mesh.shape[axis] > 1):
        for letter in reversed(letters) if axis in _OF_WEIGHTS else letters:
            more = by_letter | {letter: (*by_letter.get(letter, ()), axis)}
            more |= {b: dividing(more.get(a, ()), sizes[b], mesh) for a, b in pairs}
            fits = all(share_of(pair, sizes, more, mesh) is not None for pair in pairs if pair in splits.grouped)
            fits &= all(more.get(a, ()) == more[b] for a, b in pairs if (a, b) in splits.tied and a in splits.free)
            if sizes[letter] % parts(more[letter], mesh) == 0 and fits:
                by_letter = more
                break
    return by_letter


def likely_specs(operation: Operation, call: Call, mesh: Mesh | AbstractMesh) -> dict[str, PartitionSpec]:
    """The specs of all arrays by `likely_axes`."""
    found = likely_axes(operation, call, mesh)
    return {n: _spec_for(operation.arrays[n].axes, x.shape, found) for n, x in call.arrays.items()}


def on_mesh_of(arrays: Any) -> AbstractContextManager[None]:
    """Within, new arrays have the mesh that the types of `arrays` have, if any: a program may join them."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
    mesh = next((mesh for mesh in meshes if _axes_of_type(mesh, AxisType.Explicit)), None)
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def varying_like(start: Any, arrays: Any) -> Any:
    """`start` marked as varying over the mesh axes that `arrays` vary over, as a loop inside a shard_map must be."""

    def varies_over(x: Any) -> frozenset[str]:
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*(varies_over(x) for x in jax.tree.leaves(arrays)))

    def marked(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varies_over(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(marked, start)


def run_sharded(operation: Operation, call: Call, shards: Shards, body: Callable[[Call], Arrays]) -> Arrays:
    """Run `body` on every device's part of the call, as `in_specs` say or else the types of the arrays.

    Outside jit the program is kept by what equals `body`, where that can be hashed.
    """
    typed = shards.in_specs is None
    given = typed_specs(call) if typed else _named_specs(operation, call, shards.in_specs)
    mesh = mesh_of(call[next(iter(given))]) if typed and shards.mesh is None else shards.found_mesh
    assert mesh is not None
    wanted = _output_specs(operation, shards.out_specs)
    split = _Split(operation, call.spec, call.target, mesh, typed, (*given.items(),), (*wanted.items(),), body)
    traced = any(isinstance(x, jax_core.Tracer) for x in call.arrays.values())
    # outside jit, JAX would compile the steps of a shard_map one by one, and again for every call
    kept = isinstance(mesh, Mesh) and not traced and _hashable(body)
    return _compiled(split, call.arrays) if kept else split(call.arrays)


def _hashable(body: Any) -> bool:
    """Whether a program can be kept by it: it has no config that is a dict."""
    try:
        hash(body)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class _Split:
    """All that is static of a call on several devices."""

    operation: Operation
    spec: Any
    target: Any
    mesh: Mesh | AbstractMesh
    typed: bool
    given: tuple[tuple[str, PartitionSpec], ...]
    wanted: tuple[tuple[str, PartitionSpec], ...]
    body: Callable[[Call], Arrays]

    def __call__(self, arrays: Arrays) -> Arrays:
        operation, mesh, given, wanted = self.operation, self.mesh, dict(self.given), dict(self.wanted)
        call = Call(self.spec, arrays, self.target)
        found = _axes_by_dimension(operation, call, given, mesh, self.typed)
        _check(found, call, operation, mesh, self.typed)
        sizes = _sizes(operation, call)
        shares = [share_of(pair, sizes, found, mesh) for pair in operation.splits.grouped if pair[1] in sizes]
        in_specs = {n: _spec_for(operation.arrays[n].axes, x.shape, found) for n, x in arrays.items()}
        in_specs |= {} if self.typed else given

        def local(arrays: Arrays) -> Arrays:
            run = self.body
            for share in shares:
                assert share is not None
                arrays = {name: share.cut(x, operation.arrays[name]) for name, x in arrays.items()}
            for letter, pass_on in operation.splits.passed_on.items():
                if parts(axes := found.get(letter, ()), mesh) > 1:
                    run = partial(pass_on, axes=axes, run=run)
            return run(Call(self.spec, arrays, self.target))

        # only the names are wanted: what is split over Explicit axes must not be, outside of a shard_map
        with paused():
            whole = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays.items()}
            shapes = jax.eval_shape(lambda arrays: self.body(Call(self.spec, arrays, self.target)), whole)
        derived = {
            n: PartitionSpec(*(found.get(c, ()) or None for c in Dims(operation.outputs[n]).axes)) for n in shapes
        }
        out_specs = derived | {name: spec for name, spec in wanted.items() if name in shapes}
        mapped = _shard_map(local, mesh, (in_specs,), out_specs)
        # outside jit nothing can be measured inside of it
        return (jax.jit(mapped) if active() else mapped)(arrays)


_compiled = jax.jit(_Split.__call__, static_argnums=0)


def _shard_map(function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any):
    """A shard_map over every axis that is not yet manual; arrays come to it split over the Explicit ones in any way."""
    explicit = _axes_of_type(mesh, AxisType.Explicit)
    free = explicit | _axes_of_type(mesh, AxisType.Auto)
    # all axes is the default, which leaves out one that vmap holds
    names = set(free) if len(free) < len(mesh.axis_names) else set()
    # the kernels are opaque to the replication checker
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
    )

    def typed(spec: PartitionSpec) -> NamedSharding:
        entries = (tuple(axis for axis in axes_of(entry) if axis in explicit) for entry in spec)
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in entries)))

    if not explicit:
        return mapped
    return lambda *arrays: mapped(*jax.sharding.reshard(arrays, jax.tree.map(typed, in_specs)))


def split_vmap(rule: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """A rule of custom_vmap, whose outputs are all mapped, on every device's part where the mapped axis is split."""

    def split(axis_size: int, in_batched: Any, *groups: Any) -> tuple[Any, Any]:
        leaves = zip(jax.tree.leaves(groups), jax.tree.leaves(in_batched), strict=True)
        shardings = [jax.typeof(x).sharding for x, mapped in leaves if mapped]
        sharding = next((sharding for sharding in shardings if sharding.spec[0]), None)
        if sharding is None:
            return rule(axis_size, in_batched, *groups)
        entry, mesh = sharding.spec[0], sharding.mesh
        part = axis_size // parts(axes_of(entry), mesh)
        specs = jax.tree.map(lambda mapped: PartitionSpec(entry if mapped else None), tuple(in_batched))
        local = _shard_map(lambda *parts: rule(part, in_batched, *parts)[0], mesh, specs, PartitionSpec(entry))
        outputs = local(*groups)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return split


def _output_specs(operation: Operation, out_specs: Any) -> dict[str, PartitionSpec]:
    if out_specs is None:
        return {}
    names = list(operation.outputs)
    if isinstance(out_specs, Mapping):
        if unknown := sorted(set(out_specs) - set(names)):
            raise ValueError(f"out_specs names unknown outputs {unknown}; known: {names}")
        return dict(out_specs)
    listed = [out_specs] if isinstance(out_specs, PartitionSpec) else list(out_specs)
    if len(listed) > len(names):
        raise ValueError(f"out_specs has {len(listed)} entries for {len(names)} outputs {names}")
    return dict(zip(names, listed, strict=False))

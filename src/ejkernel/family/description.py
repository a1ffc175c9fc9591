"""A family, as the command line knows it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Call

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class PublicFunction:
    """The public function of an operation.

    Attributes:
        where: the module that has it under the operation's name, or the function itself. Loaded on first use.
        canonicalise: the same arguments to the canonical call; None where there is no single one.
    """

    where: str | Callable[..., Any]
    canonicalise: Callable[..., Call] | None = None


@dataclass(frozen=True)
class Check:
    """One call, what it should give, and what jax.nn would make of it.

    Attributes:
        name: what tables call it.
        operation: its public function takes trained and fixed arrays, static options and `platform`, by name.
        definition: the canonical call by its definition, in the dtype given; differentiable. As many outputs as the
            public function has.
        dtype: of the trained arrays.
        trained: shapes of the arrays that get a gradient.
        fixed: traced arguments that get none, such as a MaskInfo.
        static: options that are part of the program.
        peer: the canonical call by jax.nn, or None where it has no such thing.
        differentiable: whether there are gradients to check.
        slow: whether its kernels take long to compile, so that it is begun first where checks share a machine.
    """

    name: str
    operation: str
    definition: Callable[[Call, Any], Any]
    dtype: str
    trained: Mapping[str, tuple[int, ...]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    static: Mapping[str, Any] = field(default_factory=dict)
    peer: Callable[[Call], Any] | None = None
    differentiable: bool = True
    slow: bool = False

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for name, shape in self.trained.items()}

    def arrays(self) -> Arrays:
        """Random values for the trained arrays. From numpy: jax.random would compile a program per shape."""
        rng = np.random.default_rng(0)
        draw = rng.standard_normal
        return {name: jnp.asarray(draw(x.shape, np.float32).astype(x.dtype)) for name, x in self.structs().items()}


class Roofline(NamedTuple):
    """What kernels cannot beat: a Markdown table, and the sizes it is for."""

    title: str
    table: str


class TypicalCall(NamedTuple):
    """A call that models make often.

    Attributes:
        operations: those that run the same kernels for it. It is measured for the first.
        sizes: to the arguments of `Family.arguments`.
    """

    operations: tuple[str, ...]
    sizes: dict[str, Any]


def _no_typical_calls(backend: str, quick: bool) -> list[TypicalCall]:
    return []


@dataclass(frozen=True)
class Family:
    """What a family says about itself.

    Attributes:
        name: what the command line calls it.
        functions: its operations by name.
        arguments: (operation, sizes by name) to the arguments of its public function, on shapes alone; None stands for
            one that is not given. Its own arguments, annotated with an `Option`, are those of the command line.
        checks: the calls that `ejkernel verify` runs, in the order shown.
        typical_calls: (backend, quick) to the calls that `ejkernel tune` measures where no sizes are given.
        roofline: (batch, length, width = heads * head_dim; all optional) to bounds by its kernels' own schedules.
    """

    name: str
    functions: Mapping[str, PublicFunction]
    arguments: Callable[..., dict[str, Any]] = lambda operation: {}
    checks: Callable[[], list[Check]] = list
    typical_calls: Callable[[str, bool], list[TypicalCall]] = _no_typical_calls
    roofline: Callable[..., Roofline] | None = None

    def function(self, operation: str) -> Callable[..., Any]:
        """The public function of an operation."""
        where = self.functions[operation].where
        return getattr(import_module(where), operation) if isinstance(where, str) else where


def load_family(package: str) -> Family:
    """The family whose package that is."""
    return import_module(f"{package}.family").FAMILY

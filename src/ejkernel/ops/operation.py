"""What an operation is: named arrays in, named arrays out, and the implementations that can do it."""

import importlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax

from ejkernel.ops.target import Target

PLATFORMS = ("xla", "triton", "pallas", "cudnn")

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Dims:
    """The dimension letters of a named array, whether a gradient flows to it, and whether it may broadcast.

    The first letter is `B` everywhere, and vmap folds into it. Its size is the batch, or also 1 where it broadcasts.
    """

    names: str
    grad: bool = False
    broadcasts: bool = True

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.names.split())


@dataclass(frozen=True)
class Call:
    """A canonical call: static facts in `spec`, the arrays that are present by name, and the device it is for."""

    spec: Any
    arrays: Arrays
    target: Target = field(default=Target("cpu", "cpu", "cpu"))

    def __getitem__(self, name: str) -> jax.Array:
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def get(self, name: str) -> Any:
        """The array of that name, or None."""
        return self.arrays.get(name)

    def on(self, target: Target) -> "Call":
        return replace(self, target=target)


class Implementation(Protocol):
    """The six names of a platform file.

    The residuals of an operation are the same arrays on every platform, so that one's backward may follow another's
    forward. A seventh name, `unsupported_config(call, config) -> list[str]`, is for platforms where a config may not
    fit the device; an eighth, `against_gradient(call) -> list[str]`, for a backward that auto must not take, though
    one may force it.
    """

    Config: type

    def unsupported(self, call: Call) -> list[str]: ...
    def default_config(self, call: Call) -> Any: ...
    def search_space(self, call: Call) -> list[Any]: ...
    def forward(self, call: Call, config: Any) -> tuple[Arrays, Arrays]: ...
    def backward(self, call: Call, residuals: Arrays, cotangents: Arrays, config: Any) -> Arrays: ...


def _no_probes() -> dict[str, Call]:
    return {}


@dataclass(frozen=True, eq=False)
class Operation:
    """A public operation: its arrays, its outputs, and where its implementations live.

    Attributes:
        name: the public function's name.
        arrays: dimension letters of every array the canonical call may hold.
        outputs: dimension letters of every output.
        implementations: platform to module path; `pallas` may map a backend to a path. Loaded on first use.
        preference: backend to platforms, best first, where no measurement says otherwise.
        bucket: the shape bucket a call is tuned under.
        probes: one small call per feature, for the generated support table.
    """

    name: str
    arrays: Mapping[str, Dims]
    outputs: Mapping[str, str]
    implementations: Mapping[str, str | Mapping[str, str]]
    preference: Mapping[str, tuple[str, ...]]
    bucket: Callable[[Call], str]
    probes: Callable[[], dict[str, Call]] = _no_probes

    def __post_init__(self) -> None:
        _OPERATIONS[self.name] = self

    def path(self, platform: str, backend: str) -> str | None:
        """Module path of the implementation for a platform on a backend."""
        entry = self.implementations.get(platform)
        return entry if entry is None or isinstance(entry, str) else entry.get(backend)

    @property
    def differentiable(self) -> bool:
        return any(dims.grad for dims in self.arrays.values())

    def load(self, platform: str, backend: str) -> Implementation:
        path = self.path(platform, backend)
        if path is None:
            raise KeyError(f"{self.name} has no {platform} implementation for {backend}")
        return importlib.import_module(path)  # pyright: ignore[reportReturnType]


_OPERATIONS: dict[str, Operation] = {}


def list_operations() -> list[str]:
    """Names of all public operations.

    >>> from ejkernel.ops import list_operations
    >>> "flash_attention" in list_operations()
    True
    """
    importlib.import_module("ejkernel.modules")
    return sorted(_OPERATIONS)


def get_operation(operation: "Operation | str | Callable[..., Any]") -> Operation:
    """The operation behind an `Operation`, its name, or its public function."""
    if isinstance(operation, Operation):
        return operation
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", repr(operation))
    if name not in list_operations():
        raise ValueError(f"unknown operation {name!r}; known: {', '.join(list_operations())}")
    return _OPERATIONS[name]


@dataclass(frozen=True)
class Plan:
    """Everything static about one execution: hashable, so that it can key traces.

    `gradient` is the plan of the backward, where that is another platform's.
    """

    operation: Operation
    implementation: Any
    config: Hashable
    spec: Hashable
    target: Target
    gradient: "Plan | None" = None

    def call(self, arrays: Arrays) -> Call:
        return Call(self.spec, arrays, self.target)

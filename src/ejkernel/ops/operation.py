"""What an operation is: named arrays in, named arrays out, and the implementations that can do it."""

import importlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.target import Target

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Dims:
    """The dimension letters of a named array, whether a gradient flows to it, and whether it may broadcast.

    The first letter is `B` everywhere, and vmap folds into it. Its size is the batch, or also 1 where it broadcasts.
    A dimension may have several entries for each of its letter, one after the other: `2Hkv` has two, `N*` any number.
    `given` is what callers know the array by, where it is another name.
    """

    names: str
    grad: bool = False
    broadcasts: bool = True
    given: str | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The letters alone."""
        return tuple(name.lstrip("0123456789").removesuffix("*") for name in self.names.split())

    @property
    def each(self) -> tuple[int | None, ...]:
        """How many entries there are for each of a letter; None: any number."""
        heads = [name.removesuffix(letter) for name, letter in zip(self.names.split(), self.axes, strict=True)]
        return tuple(None if head.endswith("*") else int(head or 1) for head in heads)


@dataclass(frozen=True)
class Splits:
    """Which dimensions of an operation may be split over devices.

    Attributes:
        free: letters whose parts never meet: every device computes its own.
        tied: pairs of letters that are split alike.
        grouped: pairs of letters where equal groups of the first share one of the second (query and key heads). They
            are split alike, or the second over fewer axes: a device then takes from its part what its groups need.
        passed_on: letters whose parts do meet: `(call, axes, run)` to outputs, on each device, where `call` is its
            part, `axes` are what the letter is split over, and `run` does a call on this device alone.
        otherwise: for letters that may not be split, what to do instead.
    """

    free: tuple[str, ...] = ("B",)
    tied: tuple[tuple[str, str], ...] = ()
    grouped: tuple[tuple[str, str], ...] = ()
    passed_on: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    otherwise: Mapping[str, str] = field(default_factory=dict)


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

    def get(self, name: str, default: Any = None) -> Any:
        """The array of that name, or the default."""
        return self.arrays.get(name, default)

    def on(self, target: Target) -> "Call":
        return replace(self, target=target)


def _takes_any_config(call: Call, config: Any) -> list[str]:
    return []


def _no_remark(call: Call, config: Any) -> str:
    return ""


@dataclass(eq=False)
class Implementation:
    """How one platform does an operation. A platform's file makes one, called `IMPLEMENTATION`.

    Attributes:
        Config: a frozen dataclass that checks itself.
        unsupported: every reason why a call cannot be done; empty when it can.
        default_config: the config of a call that nobody tuned.
        search_space: configs worth measuring for a call.
        forward: `(call, config)` to outputs and residuals, both by name.
        backward: `(call, residuals, cotangents, config)` to gradients by array name; the cotangent of an output that
            nobody differentiates is absent. None where there is no gradient.
        unsupported_config: every reason why a config does not fit a call.
        shared_residuals: whether the residuals are those that the operation's other platforms leave and take, so that
            another's backward may follow this forward, and this backward another's forward. If not, what they are may
            depend on the config, and its own backward follows with the same one.
        residuals: dimension letters of the residuals that are not outputs. Without them every device of a plain jit
            computes everything.
        deterministic: whether the backward gives the same bits every run.
        deterministic_by_xla: whether it does so at least with XLA's `--xla_gpu_deterministic_ops`.
        remark: what `explain` says of a config beside its fields: why it is that one, say.
        jvp: `(call, tangents, config)` to outputs and their tangents, both by name; the tangent of an array that does
            not vary is absent. None where there is no forward mode. Nothing runs it yet.
    """

    Config: type
    unsupported: Callable[[Call], list[str]]
    default_config: Callable[[Call], Any]
    search_space: Callable[[Call], list[Any]]
    forward: Callable[[Call, Any], tuple[Arrays, Arrays]]
    backward: Callable[[Call, Arrays, Arrays, Any], Arrays] | None = None
    unsupported_config: Callable[[Call, Any], list[str]] = _takes_any_config
    shared_residuals: bool = True
    residuals: Mapping[str, str] = field(default_factory=dict)
    deterministic: bool = True
    deterministic_by_xla: bool = False
    remark: Callable[[Call, Any], str] = _no_remark
    jvp: Callable[[Call, Arrays, Any], tuple[Arrays, Arrays]] | None = None


def _no_probes() -> dict[str, Call]:
    return {}


def random_arrays(call: Call) -> Arrays:
    """Normal numbers, True and zeros in the shapes of a call: an example of one whose integers may be zero."""
    rng = np.random.default_rng(0)

    def one(x: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype)
        return jnp.ones(x.shape, x.dtype) if x.dtype == jnp.bool_ else jnp.zeros(x.shape, x.dtype)

    return {name: one(x) for name, x in call.arrays.items()}


@dataclass(frozen=True, eq=False)
class Operation:
    """A public operation: its arrays, its outputs, and where its implementations live.

    Attributes:
        name: the public function's name.
        arrays: dimension letters of every array the canonical call may hold.
        outputs: dimension letters of every output.
        implementations: platform to module path, or to a row for each thing it runs on: a device kind (`tpu_v5_lite`),
            an architecture (`sm_90`, `gfx942`) or a backend, to a path. Loaded on first use.
        preference: architecture (first) or backend to platforms, best first, where no measurement says otherwise.
        bucket: the shape bucket a call is tuned under.
        splits: which dimensions may be split over devices.
        example: arrays like those of a call whose values are unknown, for tuning: a full one, with legal indices.
        probes: one small call per feature, for the generated support table.
        no_gradient: of an operation none of whose arrays has one, what to do instead.
        made_of: of a public function that makes several calls, the operations that its `cfg` is for. It has no
            implementation of its own.
        of_nothing: `(arrays, zeros)` to outputs, of a call with an empty dimension, from zeros in their shapes. None:
            implementations know what these are, but for an empty batch.
        configs_of: of an operation made of another's calls, the name of that one: what is measured of it is kept and
            found under that name, and a `use_config` for that one is for these calls too, after one for their own name.
    """

    name: str
    arrays: Mapping[str, Dims]
    outputs: Mapping[str, str]
    implementations: Mapping[str, str | Mapping[str, str]]
    preference: Mapping[str, tuple[str, ...]]
    bucket: Callable[[Call], str]
    splits: Splits = Splits()
    example: Callable[[Call], Arrays] = random_arrays
    probes: Callable[[], dict[str, Call]] = _no_probes
    no_gradient: str = "it has no gradient"
    made_of: tuple[str, ...] = ()
    of_nothing: Callable[[Arrays, Arrays], Arrays] | None = None
    configs_of: str | None = None

    @property
    def measured_as(self) -> str:
        """The name that tuned files have for it."""
        return self.configs_of or self.name

    def path(self, platform: str, *runs_on: str) -> str | None:
        """Module path of the implementation for a platform on the first of these that has a row."""
        entry = self.implementations.get(platform)
        return (
            entry if entry is None or isinstance(entry, str) else next((entry[n] for n in runs_on if n in entry), None)
        )

    @property
    def differentiable(self) -> bool:
        return any(dims.grad for dims in self.arrays.values())

    def load(self, platform: str, *runs_on: str) -> Implementation:
        path = self.path(platform, *runs_on)
        if path is None:
            raise KeyError(f"{self.name} has no {platform} implementation for {', '.join(runs_on)}")
        return importlib.import_module(path).IMPLEMENTATION


@dataclass(frozen=True)
class Plan:
    """Everything static about one execution: hashable, so that it can key traces.

    `gradient` is the plan of the backward, where that is another platform's; `no_gradient` says why there is none.
    `implicit` says that a plain jit may split it over devices, `deterministic` that its gradient must repeat to the
    bit. `recorded` is the number of the call that it stands in for, while `explain` is open.
    """

    operation: Operation
    implementation: Implementation
    config: Hashable
    spec: Hashable
    target: Target
    gradient: "Plan | None" = None
    no_gradient: str | None = None
    implicit: bool = False
    deterministic: bool = False
    recorded: int | None = None

    def call(self, arrays: Arrays) -> Call:
        return Call(self.spec, arrays, self.target)

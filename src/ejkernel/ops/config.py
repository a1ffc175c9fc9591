"""Which config a call runs with, and why."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ejkernel.ops.operation import Call, Implementation, Operation
from ejkernel.ops.registry import get_operation
from ejkernel.ops.settings import changed, settings
from ejkernel.ops.target import Target
from ejkernel.ops.tuned_files import MEASURED, TunedConfigs, shipped_file, unsaved, user_file

USERS = "the user's tuned file"


class _Fields(tuple):  # of names and values
    """A config given as a dict of its fields, as part of the settings that traces are known by."""

    __slots__ = ()


def _frozen(value: Any) -> Any:
    """A value that JSON may have written: lists as tuples, which can be hashed."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@contextmanager
def use_config(operation: Operation | str | Callable[..., Any], cfg: Any) -> Iterator[None]:
    """Use a config for every call of an operation made inside the context.

    `cfg` is a platform's `Config` (calls on other platforms are left alone) or a dict of its fields.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import flash_attention
    >>> from ejkernel.ops import use_config
    >>> q = jnp.ones((1, 16, 2, 8))
    >>> with use_config("flash_attention", {"block_q": 16, "block_k": 16}):
    ...     flash_attention(q, q, q).shape
    (1, 16, 2, 8)
    """
    check_config(cfg)
    name = get_operation(operation).name
    kept = _Fields((key, _frozen(value)) for key, value in sorted(cfg.items())) if isinstance(cfg, dict) else cfg
    try:
        hash(kept)
    except TypeError as error:
        raise TypeError(f"cfg={cfg!r} must have fields that can be hashed: {error}") from None
    with changed(configs=tuple({**dict(settings().configs), name: kept}.items())):
        yield


@contextmanager
def use_config_of(composite: Operation, operation: Operation) -> Iterator[None]:
    """Within, a call of the operation has the configs given for the public function that makes it."""
    given = dict(settings().configs)
    if composite.name not in given:
        yield
        return
    with changed(configs=tuple({**given, operation.name: given[composite.name]}.items())):
        yield


@lru_cache(maxsize=64)
def _read(path: Path, stamp: int) -> TunedConfigs:
    return TunedConfigs.load(path)


def _stored(path: Path) -> TunedConfigs:
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return TunedConfigs()


class Source(NamedTuple):
    """Tuned configs: where they come from, and the device kind they were measured on."""

    name: str
    kind: str
    tuned: TunedConfigs


def tuned_sources(target: Target) -> list[Source]:
    """Tuned configs for a device, most specific first: the user's, the shipped, another's of its architecture."""
    users, kinds = user_file(target.kind), dict.fromkeys((target.kind, MEASURED.get(target.arch, target.arch)))
    return [
        Source("tuned in this process, not saved", target.kind, unsaved(users)),
        Source(USERS, target.kind, _stored(users)),
        *(Source(f"shipped for {kind}", kind, _stored(shipped_file(kind))) for kind in kinds),
    ]


class Measured(NamedTuple):
    """Microseconds by platform, of a bucket and on a device kind for which several were compared."""

    bucket: str
    kind: str
    times: dict[str, float]


def measured_times(operation: Operation, call: Call, gradient: bool) -> Measured:
    """Those of the bucket nearest to the call's, and of those equally near, of the most specific source."""
    bucket = operation.bucket(call)
    sources = tuned_sources(call.target)
    nears = [(source.tuned.nearest(operation.measured_as, bucket, gradient), source) for source in sources]
    candidates = [(near, source) for near, source in nears if near is not None]
    if not candidates:
        return Measured(bucket, call.target.kind, {})
    (_, near), source = min(candidates, key=lambda one: one[0][0])
    return Measured(near, source.kind, source.tuned.times(operation.measured_as, near, gradient))


def check_config(cfg: Any) -> None:
    """Raise for what is no config of any platform."""
    if not isinstance(cfg, dict) and (isinstance(cfg, type) or not dataclasses.is_dataclass(cfg)):
        raise TypeError(f"cfg={cfg!r} must be a platform's Config or a dict of its fields")


def build_config(implementation: Implementation, cfg: Any, platform: str) -> Any:
    """A platform's Config from a Config or a dict of its fields."""
    if isinstance(cfg, implementation.Config):
        return cfg
    names = [f.name for f in dataclasses.fields(implementation.Config)]
    unknown = sorted(set(cfg) - set(names))
    if unknown:
        raise ValueError(f"cfg has unknown fields {unknown} for platform {platform!r}; its fields: {names}")
    return implementation.Config(**cfg)


# for `cfg`: neither one given with the call nor one of `use_config`
UNGIVEN: Any = object()


def _overrides(operation: Operation) -> list[Any]:
    """Those of `use_config` for an operation's own name, and for that whose configs it has."""
    given = dict(settings().configs)
    kept = [given[name] for name in (operation.name, operation.measured_as) if name in given]
    return [dict(cfg) if isinstance(cfg, _Fields) else cfg for cfg in kept]


def overridden(operation: Operation) -> bool:
    """Whether the call is inside a `use_config` for its operation."""
    return bool(_overrides(operation))


def given_config(
    operation: Operation, implementation: Implementation, platform: str, cfg: Any
) -> tuple[Any, str] | None:
    """The config the caller asked for, by `cfg=` or `use_config`, and which of them."""
    if cfg is UNGIVEN:
        return None
    if cfg is not None:
        return build_config(implementation, cfg, platform), "cfg="
    for override in _overrides(operation):
        if isinstance(override, dict | implementation.Config):
            return build_config(implementation, override, platform), "use_config"
    return None


def choose_config(
    operation: Operation, implementation: Implementation, platform: str, call: Call, cfg: Any
) -> tuple[Any, str]:
    """The config and where it came from."""
    given = given_config(operation, implementation, platform, cfg)
    if given is not None:
        return given
    bucket = operation.bucket(call)
    for source, _, tuned in tuned_sources(call.target):
        fields = tuned.find(operation.measured_as, bucket, platform)
        if fields is not None:
            try:
                config = implementation.Config(**fields)
            except (TypeError, ValueError) as error:  # a file of another version of this Config
                entry = f"{operation.measured_as}, {bucket}, {platform}"
                warnings.warn(f"{source}: the config of {entry} is unusable and passed over: {error}", stacklevel=2)
                continue
            # tuned for another length of the same bucket, it may not fit this one
            if not implementation.unsupported_config(call, config):
                return config, source
    return implementation.default_config(call), "default"

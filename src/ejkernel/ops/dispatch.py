"""run(): from a canonical call to the implementation that does it, and the reasons why others would not."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejkernel.ops import config as configs
from ejkernel.ops import tuning
from ejkernel.ops.autodiff import execute
from ejkernel.ops.operation import PLATFORMS, Arrays, Call, Operation, Plan
from ejkernel.ops.sharding import Shards, run_sharded, typed_specs
from ejkernel.ops.target import Target, target_of

_INTERPRETING: ContextVar[bool] = ContextVar("ejkernel_interpreting", default=False)
_EXPLAINING: ContextVar[bool] = ContextVar("ejkernel_explaining", default=False)


@contextmanager
def interpret() -> Iterator[None]:
    """Run GPU and TPU kernels in their interpreters on the CPU, for calls made (or traced) inside.

    `platform="triton"` runs in Triton's interpreter, `platform="pallas"` in Pallas's TPU interpreter.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import mean_pooling
    >>> from ejkernel.ops import interpret
    >>> with interpret():
    ...     mean_pooling(jnp.ones((1, 8, 1, 4)), chunk_size=4, platform="triton").shape
    (1, 2, 1, 4)
    """
    token = _INTERPRETING.set(True)
    try:
        yield
    finally:
        _INTERPRETING.reset(token)


def interpreting() -> bool:
    """Whether `interpret()` is active."""
    return _INTERPRETING.get()


@dataclass(frozen=True)
class Explanation:
    """What would run, with which config, and why the other platforms would not.

    `gradient` says the same of its gradient, where that is another platform's or one was passed over for it.
    """

    operation: str
    target: Target
    platform: str | None
    config: Any
    config_source: str | None
    reason: str
    refusals: dict[str, list[str]]
    gradient: "Explanation | None" = None

    @property
    def avoided(self) -> dict[str, list[str]]:
        """Platforms that could do the call, and why they are not taken for its gradient."""
        refused = {} if self.gradient is None else self.gradient.refusals
        return {platform: reasons for platform, reasons in refused.items() if platform not in self.refusals}

    def __str__(self) -> str:
        lines = [f"{self.operation} on {self.target.kind}: {self.platform or 'nothing can run this'} ({self.reason})"]
        if self.platform is not None:
            lines.append(f"  config: {self.config} (from {self.config_source})")
        if (other := self.gradient) is not None:
            lines.append(f"  its gradient: {other.platform} ({other.reason})")
            lines.append(f"  config: {other.config} (from {other.config_source})")
        for platform, reasons in self.refusals.items():
            lines += [f"  not {platform}: {reason}" for reason in reasons]
        lines += [f"  not {p} for the gradient: {reason}" for p, reasons in self.avoided.items() for reason in reasons]
        return "\n".join(lines)

    __repr__ = __str__


class _Explained(Exception):
    def __init__(self, explanation: Explanation):
        self.explanation = explanation


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What a call of a public function would run: platform, config, and every other platform's refusal.

    Nothing is computed; arrays may be `jax.ShapeDtypeStruct`s.

    >>> import jax
    >>> from ejkernel import explain
    >>> from ejkernel.modules import flash_attention
    >>> q = jax.ShapeDtypeStruct((1, 128, 8, 64), "float32")
    >>> explain(flash_attention, q, q, q, causal=True).platform
    'xla'
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]

    def traced(structs: list[Any]) -> None:
        given = iter(structs)
        merged = [next(given) if is_struct else leaf for leaf, is_struct in zip(leaves, dynamic, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, merged)
        function(*args, **kwargs)

    token = _EXPLAINING.set(True)
    try:
        jax.eval_shape(traced, [leaf for leaf, is_struct in zip(leaves, dynamic, strict=True) if is_struct])
    except _Explained as answer:
        return answer.explanation
    finally:
        _EXPLAINING.reset(token)
    raise TypeError(f"{getattr(function, '__name__', function)} is not an operation of ejkernel")


_NEEDS = {"triton": ("gpu",), "cudnn": ("gpu",), "pallas": ("gpu", "tpu"), "xla": ("cpu", "gpu", "tpu")}
# the backend whose kernels an interpreter runs on the CPU
_INTERPRETED = {"triton": "gpu", "pallas": "tpu"}
_PACKAGES = {"triton": ("triton", "cuda")}


def _emulated_backend(platform: str, target: Target) -> str:
    """The backend whose kernels a platform would run: an interpreter stands in for the absent one."""
    return _INTERPRETED.get(platform, "cpu") if target.interpreted else target.backend


def _hardware_refusals(operation: Operation, platform: str, backend: str) -> list[str]:
    needs = _NEEDS[platform]
    if backend not in needs:
        wanted = " or ".join({"gpu": "an NVIDIA GPU", "tpu": "a TPU", "cpu": "a CPU"}[b] for b in needs)
        interpretable = platform in _INTERPRETED and operation.path(platform, _INTERPRETED[platform]) is not None
        hint = "; `ejkernel.ops.interpret()` runs it in an interpreter" if interpretable else ""
        return [f"needs {wanted}, this call is for {backend}{hint}"]
    if platform in _PACKAGES:
        package, extra = _PACKAGES[platform]
        if importlib.util.find_spec(package) is None:
            return [f"the package {package} is not installed (pip install 'ejkernel[{extra}]')"]
    return []


def refusals(operation: Operation, platform: str, call: Call, cfg: Any = None) -> list[str]:
    """Every reason why a platform cannot do a call; empty when it can."""
    if platform not in operation.implementations:
        return [f"{operation.name} has no {platform} implementation"]
    backend = _emulated_backend(platform, call.target)
    if reasons := _hardware_refusals(operation, platform, backend):
        return reasons
    if operation.path(platform, backend) is None:
        return [f"{operation.name} has no {platform} implementation for {backend}"]
    implementation = operation.load(platform, backend)
    reasons = implementation.unsupported(call)
    if cfg is not None and not isinstance(cfg, dict | implementation.Config):
        return [*reasons, f"cfg is a {type(cfg).__module__}.{type(cfg).__name__}, not its Config"]
    return reasons + _config_refusals(operation, implementation, platform, call, cfg)


def _config_refusals(operation: Operation, implementation: Any, platform: str, call: Call, cfg: Any) -> list[str]:
    """Why a config that the caller gave does not fit the call; a platform without the question takes any."""
    check = getattr(implementation, "unsupported_config", None)
    if check is None:
        return []
    try:
        given = configs.given_config(operation, implementation, platform, cfg)
    except (TypeError, ValueError):
        return []  # not a config at all: if this platform is chosen, building it says so
    return [] if given is None else check(call, given[0])


def _against_gradient(operation: Operation, platform: str, call: Call) -> list[str]:
    """What keeps auto from the backward of a platform that has one."""
    implementation = operation.load(platform, _emulated_backend(platform, call.target))
    return getattr(implementation, "against_gradient", lambda call: [])(call)


def _candidates(operation: Operation, call: Call, gradient: bool) -> tuple[list[str], str]:
    """Platforms in the order auto tries them, and where the order came from."""
    order = list(operation.preference.get(call.target.backend, ("xla",)))
    for backward in (True, False) if gradient else (False,):
        bucket, times = configs.measured_times(operation, call, backward)
        if times:
            fastest = sorted((p for p in times if p in PLATFORMS), key=lambda p: times[p])
            order = fastest + [p for p in order if p not in times]
            shown = ", ".join(f"{p} {times[p]:.0f} us" for p in fastest)
            here = operation.bucket(call)
            where = f"for {here}" if bucket == here else f"at {bucket}, the nearest to {here}"
            return order, f"fastest{' forward' if gradient and not backward else ''} measured {where}: {shown}"
    return order, f"first of {', '.join(order)} that can"


def choose(operation: Operation, call: Call, platform: str | None, cfg: Any) -> tuple[Plan | None, Explanation]:
    """The plan for a call, and the explanation of the choice."""
    if platform not in (None, "auto", *PLATFORMS):
        raise ValueError(f"platform {platform!r} is unknown; use None, 'auto', {', '.join(map(repr, PLATFORMS))}")
    if cfg is not None:
        configs.check_config(cfg)
    refused = {p: refusals(operation, p, call, cfg) for p in PLATFORMS}
    if platform not in (None, "auto"):
        return _choose_from([str(platform)], "forced by platform=", operation, call, cfg, refused)
    plan, explanation = _choose_from(*_candidates(operation, call, gradient=False), operation, call, cfg, refused)
    if plan is None or not operation.differentiable:
        return plan, explanation
    avoided = {p: reasons or _against_gradient(operation, p, call) for p, reasons in refused.items()}
    if cfg is not None or configs.overridden(operation):  # for one platform
        if not avoided[str(explanation.platform)]:
            return plan, explanation
        cfg = configs.UNGIVEN
    gradient, why = _choose_from(*_candidates(operation, call, gradient=True), operation, call, cfg, avoided)
    if gradient is None or (why.platform == explanation.platform and why.refusals == explanation.refusals):
        return plan, explanation
    other = None if why.platform == explanation.platform else gradient
    return replace(plan, gradient=other), replace(explanation, gradient=why)


def _choose_from(
    order: list[str], reason: str, operation: Operation, call: Call, cfg: Any, refused: dict[str, list[str]]
) -> tuple[Plan | None, Explanation]:
    """The plan of the first platform that can."""
    chosen = next((p for p in order if not refused[p]), None)
    refused = {p: reasons for p, reasons in refused.items() if reasons}
    if chosen is None:
        return None, Explanation(operation.name, call.target, None, None, None, reason, refused)
    implementation = operation.load(chosen, _emulated_backend(chosen, call.target))
    config, source = configs.choose_config(operation, implementation, chosen, call, cfg)
    if source not in ("cfg=", "use_config") and tuning.active() and not _EXPLAINING.get():
        config, source = tuning.tune(operation, implementation, chosen, call), "autotune"
    plan = Plan(operation, implementation, config, call.spec, call.target)
    return plan, Explanation(operation.name, call.target, chosen, config, source, reason, refused)


def _refuse(operation: Operation, explanation: Explanation, platform: str | None) -> NotImplementedError:
    asked = f"platform {platform!r} cannot do this call" if platform not in (None, "auto") else "no platform can do it"
    lines = [f"{operation.name}: {asked}"]
    shown = [platform] if platform in explanation.refusals else list(explanation.refusals)
    lines += [f"  {p}: {reason}" for p in shown for reason in explanation.refusals[str(p)]]
    could = [p for p in PLATFORMS if p not in explanation.refusals]
    lines.append(f"  platforms that could: {', '.join(could) or 'none'}")
    return NotImplementedError("\n".join(lines))


def run(
    operation: Operation,
    call: Call,
    *,
    platform: str | None = None,
    cfg: Any = None,
    shards: Shards | None = None,
) -> Arrays:
    """Run a canonical call and return its outputs by name."""
    shards = Shards() if shards is None else shards
    target = target_of(call.arrays.values(), shards.mesh)
    call = call.on(replace(target, interpreted=interpreting() and target.backend == "cpu"))
    if shards.in_specs is not None or typed_specs(call):
        return run_sharded(operation, call, shards, lambda local: run_here(operation, local, platform, cfg))
    return run_here(operation, call, platform, cfg)


def run_here(operation: Operation, call: Call, platform: str | None, cfg: Any) -> Arrays:
    """Run a call whose target is settled, on the arrays as they are."""
    plan, explanation = choose(operation, call, platform, cfg)
    if _EXPLAINING.get():
        raise _Explained(explanation)
    if plan is None:
        raise _refuse(operation, explanation, platform)
    return execute(plan, call.arrays)

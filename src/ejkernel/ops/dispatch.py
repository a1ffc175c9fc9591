"""run(): from a canonical call to the implementation that does it, and the reasons why others would not."""

import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejkernel.ops import config as configs
from ejkernel.ops.autodiff import default_rules, execute
from ejkernel.ops.empty import to_plan
from ejkernel.ops.explanation import Explanation
from ejkernel.ops.operation import Arrays, Call, Implementation, Operation, Plan
from ejkernel.ops.platforms import DEVICES, PLATFORMS, TYPICAL
from ejkernel.ops.recording import recorder
from ejkernel.ops.settings import interpreting, is_deterministic, shards_implicitly, xla_is_deterministic
from ejkernel.ops.sharding import Shards, likely_specs, run_sharded, typed_specs, varying_like
from ejkernel.ops.target import Target, target_of
from ejkernel.ops.tuning import tune
from ejkernel.ops.tuning_session import active


def _loaded(operation: Operation, platform: str, target: Target) -> Implementation | str:
    """The implementation, or why its module does not load."""
    try:
        return _load(operation, platform, target)
    except Exception as error:  # whatever a version of JAX or Triton that is not known here raises
        reason = f"it cannot be imported: {type(error).__name__}: {error}"
        newer = PLATFORMS[platform].newer_packages()
        absent = isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("ejkernel")
        if not (newer or absent):
            _warn_once(operation.path(platform, *PLATFORMS[platform].runs_on(target)), error)
        return reason + (f" (with {', '.join(newer)}, which nobody has tried)" if newer else "")


_WARNED: set[str | None] = set()


def _warn_once(module: str | None, error: Exception) -> None:
    """A fault of this package must not pass for a platform that cannot do a call."""
    if module in _WARNED:
        return
    _WARNED.add(module)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.filename}:{frame.lineno}"
    message = f"{module} does not import and is passed over: {type(error).__name__}: {error} ({where})"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _load(operation: Operation, platform: str, target: Target) -> Implementation:
    return operation.load(platform, *PLATFORMS[platform].runs_on(target))


def refusals(operation: Operation, platform: str, call: Call, cfg: Any = None, *, thorough: bool = False) -> list[str]:
    """Why a platform cannot do a call; empty when it can.

    Where the hardware or a package is missing that is reason enough, unless `thorough` asks for all others too.
    """
    row = PLATFORMS[platform]
    if platform not in operation.implementations:
        return [f"{operation.name} has no {platform} implementation"]
    backend = row.backend(call.target)
    if backend not in row.backends:
        interpretable = row.interpreter is not None and operation.path(platform, row.interpreter) is not None
        hint = "; `ejkernel.ops.interpret()` runs it in an interpreter" if interpretable else ""
        reasons = [f"needs {row.needs}, this call is for {backend}{hint}"]
        return reasons + (row.missing() + _refusals_elsewhere(operation, platform, call) if thorough else [])
    if missing := row.missing():
        return missing + (_refusals_elsewhere(operation, platform, call) if thorough else [])
    if operation.path(platform, *row.runs_on(call.target)) is None:
        kinds = [name for name in operation.implementations[platform] if name not in TYPICAL]
        if kinds:
            return [f"needs {' or '.join(kinds)}, not {call.target.arch}"]
        return [f"{operation.name} has no {platform} implementation for {backend}"]
    implementation = _loaded(operation, platform, call.target)
    if isinstance(implementation, str):
        return [implementation]
    reasons = implementation.unsupported(call)
    if cfg is not None and not isinstance(cfg, dict | implementation.Config):
        return [*reasons, f"cfg is a {type(cfg).__module__}.{type(cfg).__name__}, not its Config"]
    return reasons + _config_refusals(operation, implementation, platform, call, cfg)


def _refusals_elsewhere(operation: Operation, platform: str, call: Call) -> list[str]:
    """What a platform would say of a call where it runs with all its packages."""
    row = PLATFORMS[platform]
    backends = [backend for backend in row.backends if operation.path(platform, *TYPICAL[backend].names) is not None]
    refusals = []
    for backend in backends:
        implementation = _loaded(operation, platform, TYPICAL[backend])
        if isinstance(implementation, Implementation):
            here = backend == call.target.backend
            reasons = implementation.unsupported(call if here else call.on(TYPICAL[backend]))
        else:  # a package that is missing is told already
            reasons = [] if row.missing() else [implementation]
        where = f"on {DEVICES[backend]}: " if len(backends) > 1 else ""
        refusals += [where + reason for reason in reasons]
    return refusals


def _config_refusals(
    operation: Operation, implementation: Implementation, platform: str, call: Call, cfg: Any
) -> list[str]:
    """Why a config that the caller gave does not fit the call."""
    try:
        given = configs.given_config(operation, implementation, platform, cfg)
    except (TypeError, ValueError):
        return []  # not a config at all: if this platform is chosen, building it says so
    return [] if given is None else implementation.unsupported_config(call, given[0])


def _changes_bits(implementation: Implementation) -> bool:
    """Whether its backward would differ between runs where that is not wanted."""
    repeats = implementation.deterministic or (implementation.deterministic_by_xla and xla_is_deterministic())
    return is_deterministic() and not repeats


def _against_gradient(operation: Operation, platform: str, call: Call, times: dict[str, float]) -> list[str]:
    """What keeps a platform that can do the forward from also doing the backward, of any platform's forward."""
    implementation = _load(operation, platform, call.target)
    measured = f"; measured {times[platform]:.0f} us" if platform in times else ""
    limits = {
        "it has no backward": implementation.backward is None,
        "its backward needs its own forward": not implementation.shared_residuals,
        # where XLA makes it repeat, it is no longer what was measured
        f"its gradients differ between runs, and the same bits are asked for{measured}": (
            is_deterministic() and not implementation.deterministic
        ),
    }
    return [reason for reason, holds in limits.items() if holds]


def _candidates(operation: Operation, call: Call, gradient: bool) -> tuple[list[str], str]:
    """Platforms in the order auto tries them, and where the order came from."""
    target, preference = call.target, operation.preference
    order = list(preference.get(target.arch) or preference.get(target.backend, ("xla",)))
    for backward in (True, False) if gradient else (False,):
        bucket, kind, times = configs.measured_times(operation, call, backward)
        if times:
            fastest = sorted((p for p in times if p in PLATFORMS), key=lambda p: times[p])
            order = fastest + [p for p in order if p not in times]
            shown = ", ".join(f"{p} {times[p]:.0f} us" for p in fastest)
            here = operation.bucket(call)
            where = f"for {here}" if bucket == here else f"at {bucket}, the nearest to {here}"
            where += "" if kind == target.kind else f", on {kind}"
            return order, f"fastest{' forward' if gradient and not backward else ''} measured {where}: {shown}"
    return order, f"first of {', '.join(order)} that can"


def choose(operation: Operation, call: Call, platform: str | None, cfg: Any) -> tuple[Plan | None, Explanation]:
    """The plan for a call, and the explanation of the choice."""
    if platform is not None and not (isinstance(platform, str) and platform in ("auto", *PLATFORMS)):
        raise ValueError(f"platform {platform!r} is unknown; use None, 'auto', {', '.join(map(repr, PLATFORMS))}")
    if cfg is not None:
        configs.check_config(cfg)
    call = to_plan(operation, call)
    with default_rules():  # some plan the call to know its size
        refused = {p: refusals(operation, p, call, cfg, thorough=p == platform) for p in PLATFORMS}
    if platform not in (None, "auto"):
        order, reason = [str(platform)], "forced by platform="
    else:
        order, reason = _candidates(operation, call, gradient=False)
    plan, explanation = _choose_from(order, reason, operation, call, cfg, refused)
    if plan is None:
        return plan, explanation
    if not operation.differentiable:
        return replace(plan, no_gradient=operation.no_gradient), explanation
    if platform in (None, "auto"):
        return _with_gradient(plan, explanation, operation, call, cfg, refused)
    reasons = _own_gradient_refusals(plan.implementation)
    return replace(plan, no_gradient="; ".join(reasons) or None), explanation


def _own_gradient_refusals(implementation: Implementation) -> list[str]:
    """Why a forward cannot be followed by the backward of the same platform."""
    limits = {
        "it has no backward": implementation.backward is None,
        "its gradients differ between runs, and the same bits are asked for": _changes_bits(implementation),
    }
    return [reason for reason, holds in limits.items() if holds]


def _with_gradient(
    plan: Plan, explanation: Explanation, operation: Operation, call: Call, cfg: Any, refused: dict[str, list[str]]
) -> tuple[Plan, Explanation]:
    """A plan of auto with the backward that suits it best, which may be another platform's."""
    chosen, own_reasons = str(explanation.platform), _own_gradient_refusals(plan.implementation)
    if not plan.implementation.shared_residuals:
        return replace(plan, no_gradient="; ".join(own_reasons) or None), explanation
    if cfg is not None or configs.overridden(operation):  # for one platform
        if not own_reasons:
            return plan, explanation
        cfg = configs.UNGIVEN
    times = configs.measured_times(operation, call, True).times
    avoided = {p: reasons or _against_gradient(operation, p, call, times) for p, reasons in refused.items()}
    gradient, why = _choose_from(*_candidates(operation, call, gradient=True), operation, call, cfg, avoided)
    if gradient is None:
        return replace(plan, no_gradient="; ".join(own_reasons)), replace(explanation, gradient=why)
    if why.platform == chosen and why.refusals == explanation.refusals:
        return plan, explanation
    other = None if why.platform == chosen else gradient
    return replace(plan, gradient=other), replace(explanation, gradient=why)


def _choose_from(
    order: list[str], reason: str, operation: Operation, call: Call, cfg: Any, refused: dict[str, list[str]]
) -> tuple[Plan | None, Explanation]:
    """The plan of the first platform that can."""
    chosen = next((p for p in order if not refused[p]), None)
    refused = {p: reasons for p, reasons in refused.items() if reasons}
    if chosen is None:
        return None, Explanation(operation.name, call.target, None, None, None, reason, refused)
    implementation = _load(operation, chosen, call.target)
    config, source = configs.choose_config(operation, implementation, chosen, call, cfg)
    if source not in ("cfg=", "use_config") and active() and recorder() is None:
        config, source = tune(operation, implementation, chosen, call), "autotune"
    plan = Plan(
        operation,
        implementation,
        config,
        call.spec,
        call.target,
        implicit=_implicit(call),
        deterministic=is_deterministic(),
    )
    told = Explanation(operation.name, call.target, chosen, config, source, reason, refused)
    return plan, replace(told, remark=implementation.remark(call, config))


def _implicit(call: Call) -> bool:
    """Whether a plain jit may be told how a call splits.

    Libtpu has no custom partitioning (JAX issue 38196). An interpreter calls back, which the program of a part may not.
    Inside a shard_map all is split already.
    """
    able = call.target.backend != "tpu" and not call.target.interpreted
    return able and shards_implicitly() and not jax.sharding.get_abstract_mesh().manual_axes


def _refuse(operation: Operation, explanation: Explanation, platform: str | None) -> NotImplementedError:
    asked = f"platform {platform!r} cannot do this call" if platform not in (None, "auto") else "no platform can do it"
    lines = [f"{operation.name}: {asked}"]
    shown = [platform] if platform in explanation.refusals else list(explanation.refusals)
    lines += [f"  {p}: {reason}" for p in shown for reason in explanation.refusals[str(p)]]
    could = [p for p in PLATFORMS if p not in explanation.refusals]
    lines.append(f"  platforms that could: {', '.join(could) or 'none'}")
    return NotImplementedError("\n".join(lines))


def plan(operation: Operation, call: Call, platform: str | None = None, cfg: Any = None) -> Plan:
    """How a call, whose target is known, would run; `forward` and `backward` of `ops.autodiff` run it in halves."""
    chosen, explanation = choose(operation, call, platform, cfg)
    if chosen is None:
        raise _refuse(operation, explanation, platform)
    return chosen


def with_target(call: Call, shards: Shards | None = None) -> Call:
    """The call with the device it is for."""
    target = target_of(call.arrays.values(), None if shards is None else shards.mesh)
    return call.on(replace(target, interpreted=interpreting() and target.backend == "cpu"))


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
    call = with_target(call, shards)
    mesh = shards.found_mesh
    if shards.in_specs is None and mesh is not None and not typed_specs(call) and _needs_specs(call, mesh):
        shards = replace(shards, in_specs=likely_specs(operation, call, mesh))
    if shards.in_specs is not None or typed_specs(call):
        return run_sharded(operation, call, shards, LocalRun(operation, platform, cfg))
    if shards.out_specs is not None:
        raise ValueError("out_specs needs in_specs, or arrays whose types say how they are split (Explicit axes)")
    return run_locally(operation, call, platform, cfg)


def _needs_specs(call: Call, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> bool:
    """Whether a plain jit could not split the call: on several TPUs, outside of a shard_map."""
    return call.target.backend == "tpu" and mesh.size > 1 and not jax.sharding.get_abstract_mesh().manual_axes


@dataclass(frozen=True)
class LocalRun:
    """Does calls on this device alone, as the caller said."""

    operation: Operation
    platform: str | None = None
    cfg: Any = None

    def __call__(self, call: Call) -> Arrays:
        return run_locally(self.operation, call, self.platform, self.cfg)

    def plan(self, call: Call) -> Plan:
        """How it would do one."""
        return plan(self.operation, call, self.platform, self.cfg)


def run_locally(operation: Operation, call: Call, platform: str | None, cfg: Any) -> Arrays:
    """Run a call whose target is known, on the arrays as they are."""
    # inside a shard_map: the gradient of what all devices share is the sum of theirs
    arrays = varying_like(call.arrays, call.arrays)
    if recorder() is None:
        return execute(plan(operation, call, platform, cfg), arrays)
    chosen, explanation = choose(operation, call, platform, cfg)
    return recorded(operation, call, explanation, None if chosen is None else chosen.no_gradient)


def recorded(operation: Operation, call: Call, explanation: Explanation, no_gradient: str | None = None) -> Arrays:
    """The outputs of a call that `explain` notes in place of running it."""
    open_recorder = recorder()
    assert open_recorder is not None
    implementation, target = operation.load("xla", "cpu"), Target("cpu", "cpu", "cpu")
    with default_rules():
        config = implementation.default_config(call.on(target))
    plan = Plan(operation, implementation, config, call.spec, target, no_gradient=no_gradient)
    return execute(open_recorder.record(plan, explanation, call), varying_like(call.arrays, call.arrays))


@dataclass(frozen=True)
class Composite:
    """Makes the calls of a public function that is made of several.

    Attributes:
        operation: the function's.
        platform: for all calls.
        cfg: for those that are said to take it.
        mesh: what they are compiled for.
    """

    operation: Operation
    platform: str | None = None
    cfg: Any = None
    mesh: Any = None

    def run(self, operation: Operation, call: Call, *, takes_cfg: bool = True) -> Arrays:
        """The outputs of the next call."""
        cfg = self.cfg if takes_cfg else None
        with self._recorded(), configs.use_config_of(self.operation, operation) if takes_cfg else nullcontext():
            return run(operation, call, platform=self.platform, cfg=cfg, shards=Shards(self.mesh))

    def _recorded(self) -> AbstractContextManager[None]:
        open_recorder = recorder()
        return nullcontext() if open_recorder is None else open_recorder.inside(self.operation.name)


def run_plain(operation: Operation, call: Call, function: Callable[[Arrays], Arrays], why: str) -> Arrays:
    """A call of a public function that is plain JAX on every device, and says why."""
    if recorder() is None:
        return function(call.arrays)
    call = with_target(call)
    absent = {p: refusals(operation, p, call) for p in PLATFORMS if p not in operation.implementations}
    return recorded(operation, call, Explanation(operation.name, call.target, "xla", None, None, why, absent))

"""Who takes part: ours on each platform, made from what a family says of a case, and the family's peers."""

import dataclasses
from typing import Any

import jax

from benchmarks.measuring.benchmark import (
    FORWARD,
    Arrays,
    Benchmark,
    Case,
    Contender,
    DeviceLock,
    Program,
    jax_program,
    passes_of,
)
from ejkernel.family import Family
from ejkernel.ops import Explanation, explain, get_operation
from ejkernel.ops.dispatch import with_target


def all_contenders(benchmark: Benchmark, backend: str, platforms: list[str] | None) -> list[Contender]:
    """Everybody, present or not: ours first, on those platforms or on the ones worth it."""
    return [*(_ours(benchmark, p) for p in platforms or benchmark.platforms.get(backend, ("xla",))), *benchmark.peers()]


def choice(family: Family, case: Case) -> dict[str, str | None]:
    """The platforms that auto takes for a case, by pass; two for forward and backward where they differ."""
    told = explained(family, case.operations[0], case, "auto")
    taken = [told.platform] if told.gradient is None else [told.platform, told.gradient.platform]
    both = ", ".join(dict.fromkeys(map(str, taken)))
    return {what: told.platform if what == FORWARD else both for what in case.passes}


def explained(family: Family, operation: str, case: Case, platform: str | None) -> Explanation:
    """What a case would run, as a call of one of its operations."""
    function = family.function(operation)
    return explain(lambda arrays: function(**case.arguments(arrays), platform=platform), case.structs())


def bucket_of(family: Family, operation: str, case: Case) -> str | None:
    """The shape bucket of a case on this machine, where it is one call."""
    found: list[str] = []
    canonicalise = family.functions[operation].canonicalise
    if canonicalise is None:
        return None

    def call(arrays: Arrays) -> None:
        found.append(get_operation(operation).bucket(with_target(canonicalise(**case.arguments(arrays)))))

    jax.eval_shape(call, case.structs())
    return found[0]


def _ours(benchmark: Benchmark, platform: str) -> Contender:
    """Ours on a platform: what `explain` says of a case is what it refuses, and where its times are kept."""
    family = benchmark.family

    def build(case: Case, what: str, arrays: Arrays, device_lock: DeviceLock) -> Program:
        function = family.function(case.operations[0])

        def call(given: Arrays) -> Any:
            return function(**case.arguments(given), platform=platform)

        chain = benchmark.chain(case, what)
        return jax_program(passes_of(call, what, benchmark.trained), arrays, device_lock, chain)

    def refusal(case: Case) -> str | None:
        told = explained(family, case.operations[0], case, platform)
        return None if told.platform else "; ".join(told.refusals.get(platform, ["no platform can"]))

    def tuning(case: Case) -> dict[str, Any] | None:
        bucket = bucket_of(family, case.operations[0], case)
        if bucket is None:
            return None
        told = explained(family, case.operations[0], case, platform)
        config = None if told.config_source == "default" else dataclasses.asdict(told.config)
        return {"operations": [*case.operations], "bucket": bucket, "platform": told.platform, "config": config}

    return Contender(
        key=f"ejkernel-{platform}",
        name=f"ejkernel {platform}",
        build=build,
        refusal=refusal,
        tuning=tuning,
        platform=platform,
    )

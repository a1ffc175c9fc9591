"""Who takes part: our library on each platform, and the peers of the benchmark."""

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
    """All, installed or not: ours first, on those platforms or on the ones worth it."""
    return [*(_ours(benchmark, p) for p in platforms or benchmark.platforms.get(backend, ("xla",))), *benchmark.peers()]


def choice(family: Family, case: Case) -> dict[str, str | None]:
    """The platforms that auto takes for a case, by pass; two for forward and backward where they differ."""
    explanation = explained(family, case.operations[0], case, "auto")
    forward, gradient = explanation.platform, explanation.gradient
    taken = [forward] if gradient is None else [forward, gradient.platform]
    both = ", ".join(dict.fromkeys(map(str, taken)))
    return {what: forward if what == FORWARD else both for what in case.passes}


def explained(family: Family, operation: str, case: Case, platform: str | None) -> Explanation:
    """What a case would run, as a call of one of its operations."""
    function = family.function(operation)
    return explain(lambda arrays: function(**case.arguments(arrays), platform=platform), case.structs())


def bucket_of(family: Family, operation: str, case: Case) -> str | None:
    """The shape bucket of a case on this machine, where it is one call."""
    buckets: list[str] = []
    canonicalise = family.functions[operation].canonicalise
    if canonicalise is None:
        return None

    def call(arrays: Arrays) -> None:
        buckets.append(get_operation(operation).bucket(with_target(canonicalise(**case.arguments(arrays)))))

    jax.eval_shape(call, case.structs())
    return buckets[0]


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
        explanation = explained(family, case.operations[0], case, platform)
        return None if explanation.platform else "; ".join(explanation.refusals.get(platform, ["no platform can"]))

    def tuning(case: Case) -> dict[str, Any] | None:
        bucket = bucket_of(family, case.operations[0], case)
        if bucket is None:
            return None
        explanation = explained(family, case.operations[0], case, platform)
        config = None if explanation.config_source == "default" else dataclasses.asdict(explanation.config)
        return {"operations": [*case.operations], "bucket": bucket, "platform": explanation.platform, "config": config}

    return Contender(
        key=f"ejkernel-{platform}",
        name=f"ejkernel {platform}",
        build=build,
        refusal=refusal,
        tuning=tuning,
        platform=platform,
    )

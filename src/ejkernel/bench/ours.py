"""Our contenders: what `explain` says of a case is what a run refuses, and where its times are kept."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ejkernel.bench.benchmark import Contender, Program
from ejkernel.ops import Explanation


def ours(
    platform: str,
    build: Callable[..., Program],
    explained: Callable[[Any, str], Explanation],
    place: Callable[[Any], tuple[list[str], str]],
) -> Contender:
    """Ours on a platform; `place` gives the operations that a case's times are of, and their shape bucket."""

    def refusal(case: Any) -> str | None:
        told = explained(case, platform)
        return None if told.platform else "; ".join(told.refusals.get(platform, ["no platform can"]))

    def tuning(case: Any) -> dict[str, Any]:
        told = explained(case, platform)
        operations, bucket = place(case)
        config = None if told.config_source == "default" else dataclasses.asdict(told.config)
        return {"operations": operations, "bucket": bucket, "platform": told.platform, "config": config}

    return Contender(
        key=f"ejkernel-{platform}",
        name=f"ejkernel {platform}",
        build=build,
        refusal=refusal,
        tuning=tuning,
        platform=platform,
    )

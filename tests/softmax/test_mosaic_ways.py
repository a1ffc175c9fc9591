"""Mosaic GPU's kernels as no default has them, against the reference."""

from dataclasses import replace
from functools import partial

import pytest

from ejkernel.kernels.softmax import mosaic_gpu
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target
from harness import PLATFORMS, by_case, check
from harness.poison import hides, poisoned
from harness.softmax import CASES, Case, call_case, definition

WAYS = {
    "overlap": {"overlap": True},
    "three": {"overlap": True, "warpgroups": 3},
    "lane": {"semantics": "lane"},
    "fused": {"fused": True, "dkv_stages": 2},
    "fused-overlap": {"fused": True, "dkv_stages": 2, "overlap": True},
}
WIDE = [case for case in CASES if case.dtype in ("bfloat16", "float16") and case.D > 32]


def config_of(case: Case, way: str) -> mosaic_gpu.Config | None:
    """The default config of a case on an H200, changed; None where these kernels do not do that."""
    call = canonicalise(**case.arrays(), **case.keywords()).on(Target("gpu", "nvidia_h200", "sm_90", cores=132))
    if mosaic_gpu.unsupported(call):
        return None
    default = mosaic_gpu.default_config(call)
    blocks = {"block_k": min(128, default.block_k)}
    if "fused" in way:
        blocks["dkv_block_q"] = mosaic_gpu.BLOCKS.get(mosaic_gpu.width(call), 64)
    config = replace(default, **blocks, **WAYS[way])
    return None if mosaic_gpu.unsupported_config(call, config) else config


@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_cases(way):
    if "fused" in way and not mosaic_gpu.CAN_ADD:
        assert not any(config_of(case, way) for case in WIDE)
    else:
        assert sum(config_of(case, way) is not None for case in WIDE) >= 5


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@by_case(WIDE)
def test_case(case: Case, way):
    config = config_of(case, way)
    if config is None:
        return
    platform = next(p for p in PLATFORMS if (p.name, p.device) == ("pallas", "gpu"))
    check(
        partial(call_case, replace(case, options=case.options | {"cfg": config}), platform),
        partial(definition, case),
        case.arrays(),
        case.dtype,
        poison=partial(poisoned, case) if hides(case) else None,
        name=case.id,
    )

"""Mosaic GPU's kernels as no default has them, against the reference."""

from dataclasses import replace
from functools import partial

import pytest

from ejkernel.kernels.softmax import mosaic_gpu
from ejkernel.modules import flash_attention
from ejkernel.ops import explain
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


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@by_case(case for case in CASES if case.dtype in ("bfloat16", "float16") and case.D > 32)
def test_case(case: Case, way):
    platform = next(p for p in PLATFORMS if (p.name, p.device) == ("pallas", "gpu"))
    explained = explain(flash_attention, **case.arrays(), **case.keywords())
    if "pallas" in explained.refusals:
        return
    told = explain(flash_attention, **case.arrays(), **case.keywords(), platform="pallas")
    width = next(D for D in mosaic_gpu.HEAD_DIMS if max(case.D, case.Dv or 0) <= D)
    blocks: dict[str, int] = {"block_k": min(128, told.config.block_k)}
    blocks |= {"dkv_block_q": mosaic_gpu.BLOCKS.get(width, 64)} if "fused" in way else {}
    chosen = replace(case, options=case.options | {"cfg": replace(told.config, **blocks, **WAYS[way])})
    if "pallas" in explain(flash_attention, **case.arrays(), **chosen.keywords(), platform="pallas").refusals:
        return
    check(
        partial(call_case, chosen, platform),
        partial(definition, case),
        case.arrays(),
        case.dtype,
        poison=partial(poisoned, case) if hides(case) else None,
        name=case.id,
    )

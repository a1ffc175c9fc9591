"""Mosaic GPU's kernels as no default has them, against the reference."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import pytest

from ejkernel.kernels.softmax import mosaic_gpu
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target
from harness import PLATFORMS, by_case, check
from harness.poison import hides, poisoned
from harness.softmax import CASES, Case, call_case, definition
from tolerances import assert_close

WAYS = {
    "two": {"warpgroups": 2},
    "lane": {"semantics": "lane", "bwd_semantics": "lane"},
    "warpgroup": {"semantics": "warpgroup"},
    "fused": {"fused": True, "dkv_stages": 2},
}
WIDE = [case for case in CASES if case.dtype in ("bfloat16", "float16") and case.D > 32]


def config_of(case: Case, way: str) -> mosaic_gpu.Config | None:
    """The default config of a case on an H200, changed; None where these kernels do not do that."""
    call = canonicalise(**case.arrays(), **case.keywords()).on(Target("gpu", "nvidia_h200", "sm_90", cores=132))
    if mosaic_gpu.unsupported(call):
        return None
    default, block = mosaic_gpu.default_config(call), {}
    if way == "fused":
        block["dkv_block_q"] = mosaic_gpu.BLOCKS.get(mosaic_gpu.width(call), 64)
    config = replace(default, **block, **WAYS[way])
    return None if config == default or mosaic_gpu.unsupported_config(call, config) else config


@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_cases(way):
    if way == "fused" and not mosaic_gpu.CAN_ADD:
        assert not any(config_of(case, way) for case in WIDE)
    else:
        assert sum(config_of(case, way) is not None for case in WIDE) >= 4


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


@pytest.mark.gpu
@pytest.mark.parametrize("growth", [12, 40, 1e4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_logits_that_outgrow_their_first_block(D, causal, growth):
    """Rows whose logits pass those of their first keys by 50, by 150, of which exp is no float32, and by far."""
    case = Case("outgrown", B=1, T=700, D=D, dtype="bfloat16", options={"causal": causal})
    arrays = case.arrays()
    arrays["key"] *= jnp.where(jnp.arange(case.T) < 400, 1, growth).astype(jnp.bfloat16)[:, None, None]
    platform = next(p for p in PLATFORMS if (p.name, p.device) == ("pallas", "gpu"))
    naive, exact = (definition(case, arrays, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    assert_close(call_case(case, platform, arrays), exact, naive, "output")

"""Mosaic GPU's kernels as no default has them, against the reference."""

import math
from dataclasses import replace
from functools import partial
from itertools import islice

import jax
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
    "three": {"warpgroups": 3},
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
        block["dkv_block_q"] = mosaic_gpu.BLOCK_Q.get(mosaic_gpu.tile_head_dim(call), 64)
    config = replace(default, **block, **WAYS[way])
    return None if config == default or mosaic_gpu.unsupported_config(call, config) else config


@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_cases(way):
    if way == "fused" and not mosaic_gpu.CAN_ADD_TO_INPUT:
        assert not any(config_of(case, way) for case in WIDE)
    else:
        # the first that there are: each is canonicalised
        assert len([*islice((case for case in WIDE if config_of(case, way) is not None), 4)]) == 4


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


def outgrown(growth: float, arrays):
    """Keys whose logits pass those of the first by more than their exponentials can be."""
    grown = jnp.where(jnp.arange(arrays["key"].shape[1]) < 400, 1, growth)
    return arrays | {"key": arrays["key"] * grown.astype(jnp.bfloat16)[:, None, None]}


def beyond(excess: dict[int, float], sink: float, arrays):
    """Keys whose logits are so much (base 2), all others' 0: sums close to the largest float32, and beyond."""
    D = arrays["query"].shape[-1]
    first = jnp.arange(D) == 0
    query, key = (jnp.zeros_like(arrays[name]) for name in ("query", "key"))
    query = jnp.where(first, jnp.asarray(D**0.5, query.dtype), query)
    for at, logit in excess.items():
        key = key.at[..., at, :, 0].set(logit * math.log(2.0))
    changed = arrays | {"query": query, "key": key}
    if "softmax_aux" in arrays:
        changed["softmax_aux"] = jnp.full_like(arrays["softmax_aux"], sink * math.log(2.0))
    return changed


BEYOND = {f"grown-{growth}": partial(outgrown, growth) for growth in (12.0, 40.0, 1e4)}
BEYOND |= {f"one-{excess}": partial(beyond, {500: excess}, 0.0) for excess in (126.5, 127.5, 140.0)}
# rows from 640 on see the first of the keys in an unmasked block, and the other in a masked one behind it
PASSED = {f"{a}-{b}": partial(beyond, {300: a, 645: b}, b) for a, b in ((60.0, 127.0), (124.0, 126.5), (127.0, 127.5))}


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_logits_far_beyond_those_of_the_first_block(D, causal):
    case = Case("beyond", B=1, T=700, D=D, dtype="bfloat16", options={"causal": causal})
    platform = next(p for p in PLATFORMS if (p.name, p.device) == ("pallas", "gpu"))
    ours = jax.jit(partial(call_case, case, platform))
    naive, exact = (jax.jit(partial(definition, case, dtype=dtype)) for dtype in (jnp.bfloat16, jnp.float32))
    for how, changed in BEYOND.items():
        arrays = changed(case.arrays())
        assert_close(ours(arrays), exact(arrays), naive(arrays), f"{how}: output")


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["window", "packed", "sinks"])
def test_maxima_that_follow_far_logits(mask):
    """Running sums are not lost where later maxima pass those before by far."""
    options = {"causal": True} | ({"sliding_window": 600} if mask == "window" else {})
    case = Case("passed", B=1, T=700, D=128, dtype="bfloat16", sinks="H" if mask == "sinks" else "", options=options)
    case = replace(case, cum_q=(0, 20, 700)) if mask == "packed" else case
    platform = next(p for p in PLATFORMS if (p.name, p.device) == ("pallas", "gpu"))
    ours = jax.jit(partial(call_case, case, platform))
    naive, exact = (jax.jit(partial(definition, case, dtype=dtype)) for dtype in (jnp.bfloat16, jnp.float32))
    for how, changed in PASSED.items():
        arrays = changed(case.arrays())
        assert_close(ours(arrays), exact(arrays), naive(arrays), f"{how}: output")

"""More tiles than a device has cores: who computes a tile, and in which order, changes nothing."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention
from ejkernel.ops import explain
from ejkernel.types import MaskInfo
from harness import cotangents_for, normal, with_gradients
from harness.checks import on_host
from tolerances import assert_close

NAMES = ("query", "key", "value")


@pytest.mark.parametrize("mask", ["full", "causal", "documents"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_head_is_right_among_many(D, mask, native):
    # 512 tiles of 128 rows go round 132 cores without much left over; a CPU is shown the same with less
    B, T, H = (4, 1024, 16) if native.device == "gpu" else (2, 256, 2)
    arrays = {name: normal(name, (B, T, H, D), jnp.bfloat16) for name in NAMES}
    options = native.options((128, 128), "bfloat16") | {"causal": mask != "full"}
    ids = jnp.searchsorted(jnp.array([T // 9, T // 3, T // 2]), jnp.arange(T), side="right")
    if mask == "documents":
        options["mask_info"] = MaskInfo.from_segments(ids[None])
        if (native.name, native.device) == ("pallas", "gpu") and D <= 128:
            options["cfg"] = {"longest_first": True}
        if native.name in explain(flash_attention, *arrays.values(), **options).refusals:
            with pytest.raises(NotImplementedError, match="segments"):
                flash_attention(*arrays.values(), **options)
            return
    seen = (ids[:, None] == ids) | (mask != "documents")
    seen &= jnp.tri(T, dtype=bool) | (mask == "full")

    def attend(x):
        return {"out": flash_attention(*(x[name] for name in NAMES), **options)}

    def definition(x):
        q, k, v = (x[name][0, :, 0] for name in NAMES)
        logits = jnp.where(seen, q @ k.T * D**-0.5, -jnp.inf)
        return {"out": (jax.nn.softmax(logits) @ v)[None, :, None]}

    cotangents = cotangents_for(attend, arrays, "bfloat16")
    many = with_gradients(attend)(arrays, cotangents)
    defined = on_host(definition)
    for b, h in ((0, 0), (B - 1, H - 1), (B // 2, H // 2)):
        one, *given = jax.tree.map(lambda x, b=b, h=h: x[b : b + 1, :, h : h + 1], (many, arrays, cotangents))
        exact, naive = defined(*jax.tree.map(lambda x: x.astype(jnp.float32), given)), defined(*given)
        for ours, right, rough, kind in zip(one, exact, naive, ("output", "gradient of"), strict=True):
            assert_close(ours, right, rough, f"batch {b}, head {h}: {kind}")

"""What attention over split sequences says about itself."""

from typing import Any

import jax
import numpy as np

from ejkernel.about.family import Check, Family, PublicFunction, Roofline
from ejkernel.kernels.ring.run import attend
from ejkernel.kernels.ring.scaling import table
from ejkernel.kernels.ring.spec import canonicalise
from ejkernel.kernels.softmax.about.checks import attention
from ejkernel.kernels.softmax.about.sizes import arguments
from ejkernel.kernels.softmax.spec import finish
from ejkernel.types import MaskInfo


def ring_attention(
    *, query: Any, key: Any, value: Any, bias: Any = None, softmax_aux: Any = None,
    platform: Any = None, cfg: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """The public function, over as many devices of this machine as the length divides over."""
    count = max(n for n in range(1, jax.device_count() + 1) if query.shape[-3] % n == 0)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:count]), ("sp",))
    arrays = (query, key, value, bias, softmax_aux)
    return finish(*attend(arrays, "sp", (mesh, None, None), platform, cfg, **options), query.shape)


def _checks() -> list[Check]:
    packed = {"mask_info": MaskInfo.from_segments((np.arange(512) // 200)[None])}
    ring = {"operation": "ring_attention", "causal": True, "peer": False}
    return [
        attention("ring, causal, GQA", "B1 T512 H4 Hkv2 D64", dtype="bfloat16", method="ring", **ring),
        attention(
            "all-gather, documents", "B1 T512 H4 D64", dtype="float32", fixed=packed, method="all_gather", **ring
        ),
    ]


def _roofline(batch: int = 1, length: int = 8192, width: int = 4096) -> Roofline:
    title = (
        f"One hop of a causal ring, milliseconds: batch {batch}, {length} tokens on a device, heads * head_dim {width}"
    )
    return Roofline(title, table(batch, length, width))


FAMILY = Family(
    name="ring",
    module=__name__,
    functions={"ring_attention": PublicFunction(ring_attention, canonicalise)},
    arguments=arguments,
    checks=_checks,
    roofline=_roofline,
)

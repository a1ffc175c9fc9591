"""What attention over split sequences says about itself: its function, and the sizes it takes."""

from typing import Any

import jax
import numpy as np

from ejkernel.family import Family, PublicFunction, Roofline
from ejkernel.kernels.ring.checks import checks
from ejkernel.kernels.ring.run import attend
from ejkernel.kernels.ring.scaling import table
from ejkernel.kernels.ring.spec import canonicalise
from ejkernel.kernels.softmax.family import arguments
from ejkernel.kernels.softmax.spec import finish


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


def _roofline(batch: int = 1, length: int = 8192, width: int = 4096) -> Roofline:
    title = (
        f"One hop of a causal ring, milliseconds: batch {batch}, {length} tokens on a device, heads * head_dim {width}"
    )
    return Roofline(title, table(batch, length, width))


FAMILY = Family(
    name="ring",
    functions={"ring_attention": PublicFunction(ring_attention, canonicalise)},
    arguments=arguments,
    checks=checks,
    roofline=_roofline,
)

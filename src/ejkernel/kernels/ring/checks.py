"""Two representative calls of attention over split sequences, checked as softmax attention is."""

import numpy as np

from ejkernel.family import Check
from ejkernel.kernels.softmax.checks import attention
from ejkernel.types import MaskInfo


def checks() -> list[Check]:
    packed = {"mask_info": MaskInfo.from_segments((np.arange(512) // 200)[None])}
    ring = {"operation": "ring_attention", "causal": True, "peer": False}
    return [
        attention("ring, causal, GQA", "B1 T512 H4 Hkv2 D64", dtype="bfloat16", method="ring", **ring),
        attention(
            "all-gather, documents", "B1 T512 H4 D64", dtype="float32", fixed=packed, method="all_gather", **ring
        ),
    ]

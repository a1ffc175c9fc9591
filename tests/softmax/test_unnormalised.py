"""`normalize_output=False` to the last bits: against its definition in float64, on logits that have no roundings."""

import numpy as np
import pytest

from ejkernel.modules import flash_attention
from ejkernel.ops import explain
from harness import normal

B, T, S, H, D = 1, 24, 40, 2, 8


def definition(q, k, v, sinks):
    """Exponentials against the row's largest logit, sinks among them, times the values: (B, T, H, D)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    logits = np.einsum("bthd,bshd->bhts", q, k)
    top = logits.max(-1)
    if sinks is not None:
        top = np.maximum(top, np.asarray(sinks, np.float64).max(-1)[None, :, None])
    return np.einsum("bhts,bshd->bthd", np.exp(logits - top[..., None]), v)


@pytest.mark.parametrize("sinks", [None, 1, 2], ids=["plain", "a-sink", "two-sinks"])
def test_within_a_millionth_of_the_definition(sinks, platform):
    # Triton's exponents are in units of log2 and rounded so: their error grows with the logits
    largest = 3 if platform.name == "triton" else 300
    q, k = (np.round(2 * np.asarray(normal(name, (B, n, H, D)))) / 2 for name, n in (("q", T), ("k", S)))
    scale = 2.0 ** np.floor(np.log2(largest / np.abs(np.einsum("bthd,bshd->bhts", q, k)).max()))
    v = normal("v", (B, S, H, D))
    aux = None if sinks is None else scale * np.round(40 * np.asarray(normal("sinks", (H, sinks))))
    options = {"softmax_aux": aux, "softmax_scale": scale, "normalize_output": False}
    with platform.context():
        if platform.name in explain(flash_attention, q, k, v, **options).refusals:
            return
        out = flash_attention(q, k, v, **options, **platform.options((8, 8), "float32"))
    expected = definition(scale * q, k, v, aux)
    assert np.abs(out - expected).max() <= 1e-6 * np.abs(expected).max()

"""What the kernels of other packages, cuDNN's and FlashAttention-4's, have in common."""

from ejkernel.ops import Call


def missing_options(call: Call, dropout: str = "dropout") -> dict[str, bool]:
    """What neither can do, and whether the call asks for it: they have a scale, a band and packed sequences."""
    spec, packed = call.spec, "q_offsets" in call
    return {
        "a gradient of lse": spec.with_lse or spec.with_argmax,
        "chunks": spec.chunk is not None,
        "soft cap": spec.soft_cap is not None,
        dropout: spec.dropout > 0,
        f"logits_dtype {spec.logits_dtype}": spec.logits_dtype != "float32",
        "bias": "bias" in call,
        "sinks": "sinks" in call,
        "segments and lengths, unless given as cum_seqlens": "q_segments" in call and not packed,
        "explicit positions": "q_positions" in call and not packed,
        "dense masks": "mask" in call,
        "block patterns": "pattern" in call,
        "a mask function": spec.rules.mask is not None,
        "a score function": spec.rules.score is not None,
    }

"""The cases of softmax attention, and what a case means."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax.reference import reference, weights
from ejkernel.kernels.softmax.spec import canonicalise, sink_logits
from ejkernel.modules import flash_attention
from ejkernel.ops import Call, explain
from ejkernel.types import BlockPattern, MaskInfo
from harness.checks import Arrays, normal
from harness.platforms import Platform


@dataclass(frozen=True)
class Case:
    """One call of `flash_attention`: sizes, which arrays there are, and the other keywords.

    Attributes:
        bias: its shape, one letter per axis: "BHTS" in full, "1" where it broadcasts.
        sinks: its shape, of letters and numbers: "H", "H3" or "13".
        mask: makes `mask_info` from the case.
        cum_q, cum_k: the lengths of packed sequences.
        packed: whether packed arrays have three dimensions.
        tiles: queries and keys per tile, on platforms that can choose.
        lse: whether the log-sum-exp is an output too, and so has a gradient.
        strength: what queries are multiplied by, and keys divided by: logits are the same, and gradients are not.
        options: further keywords.
    """

    id: str
    B: int = 2
    T: int = 48
    S: int | None = None
    H: int = 2
    Hkv: int | None = None
    D: int = 16
    Dv: int | None = None
    dtype: str = "float32"
    bias: str = ""
    sinks: str = ""
    mask: Callable[["Case"], MaskInfo] | None = None
    cum_q: tuple[int, ...] = ()
    cum_k: tuple[int, ...] = ()
    packed: bool = True
    tiles: tuple[int, int] = (32, 16)
    lse: bool = True
    strength: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kv_len(self) -> int:
        return self.T if self.S is None else self.S

    def sizes(self) -> dict[str, int]:
        return {"B": self.B, "H": self.H, "T": self.T, "S": self.kv_len}

    def shaped(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes()[c] if c in self.sizes() else int(c) for c in letters)

    def arrays(self) -> Arrays:
        """Everything that has a gradient."""
        Hkv, Dv = self.Hkv or self.H, self.Dv or self.D
        shapes = {
            "query": (self.B, self.T, self.H, self.D),
            "key": (self.B, self.kv_len, Hkv, self.D),
            "value": (self.B, self.kv_len, Hkv, Dv),
        }
        if self.cum_q and self.packed:
            shapes = {name: shape[1:] for name, shape in shapes.items()}
        if self.bias:
            shapes["bias"] = self.shaped(self.bias)
        if self.sinks:
            shapes["softmax_aux"] = self.shaped(self.sinks)
        arrays = {name: normal(name, shape, self.dtype) for name, shape in shapes.items()}
        return arrays | {"query": arrays["query"] * self.strength, "key": arrays["key"] / self.strength}

    def keywords(self) -> dict[str, Any]:
        """Everything else."""
        keywords = {"return_lse": self.lse, **self.options}
        if self.mask is not None:
            keywords["mask_info"] = self.mask(self)
        if self.cum_q:
            keywords["cum_seqlens_q"] = jnp.asarray(self.cum_q, jnp.int32)
        if self.cum_k:
            keywords["cum_seqlens_k"] = jnp.asarray(self.cum_k, jnp.int32)
        return keywords


def named(outputs: Any) -> Arrays:
    return dict(zip(("out", "lse"), outputs, strict=True)) if isinstance(outputs, tuple) else {"out": outputs}


def definition(case: Case, arrays: Arrays, dtype: Any) -> Arrays:
    """What a case means, from the family's reference."""
    keywords = case.keywords()
    call = canonicalise(**arrays, **keywords)
    outputs = reference(call, dtype)
    if not keywords.get("normalize_output", True):
        outputs["out"] = undivided(call, arrays, outputs, dtype)
    if arrays["query"].ndim == 3:
        outputs = {name: x[0] for name, x in outputs.items()}
    return outputs if case.lse else {"out": outputs["out"]}


def undivided(call: Call, arrays: Arrays, outputs: Arrays, dtype: Any) -> jax.Array:
    """The output times its softmax sum of logits minus their row maximum, sinks included."""
    p, lse = weights(call, dtype)
    largest = p.max(-1)
    top = jnp.where(largest > 0, lse + jnp.log(jnp.where(largest > 0, largest, 1.0)), -jnp.inf)
    if (sinks := sink_logits(arrays.get("softmax_aux"), p.shape[1])) is not None:
        top = jnp.maximum(top, sinks.max(-1)[None, :, None])
    some = lse > -jnp.inf
    total = jnp.where(some, jnp.exp(jnp.where(some, lse, 0.0) - jnp.where(some, top, 0.0)), 0.0)
    return (outputs["out"].astype(jnp.float32) * total.swapaxes(1, 2)[..., None]).astype(dtype)


def call_case(case: Case, platform: Platform, arrays: Arrays) -> Arrays:
    options = case.keywords()
    options = {**platform.options(case.tiles, case.dtype), **options}
    with platform.context():
        return named(flash_attention(**arrays, **options))


def refusals(case: Case, platform: Platform) -> list[str]:
    options = {**case.keywords(), "platform": platform.name}
    with platform.context():
        return explain(flash_attention, **case.arrays(), **options).refusals.get(platform.name, [])


def runs(case: Case, platform: Platform) -> bool:
    """Whether the platform takes the case; one that refuses is checked to say why."""
    if reasons := refusals(case, platform):
        check_refusal(case, platform, reasons)
    return not reasons


def check_refusal(case: Case, platform: Platform, reasons: list[str]) -> None:
    """The platform raises, and gives every reason that `explain` gives."""
    with pytest.raises(NotImplementedError) as raised:
        call_case(case, platform, case.arrays())
    missing = [reason for reason in reasons if reason not in str(raised.value)]
    assert not missing, f"{raised.value} does not say {missing}"


# Masks ------------------------------------------------------------------------------------------------------


def _rng(case: Case) -> np.random.Generator:
    return np.random.default_rng(len(case.id))


def sorted_ids(case: Case, length: int, rows: int, padding: int = 0) -> np.ndarray:
    """Segments one after another, the last tokens padding."""
    ids = np.sort(_rng(case).integers(0, 4, (rows, length)), axis=1)
    ids[:, length - padding :] = -1
    return ids.astype(np.int32)


def segments(case: Case, *, rows: int = 0, padding: int = 0) -> MaskInfo:
    return MaskInfo.from_segments(jnp.asarray(sorted_ids(case, case.T, rows or case.B, padding)))


def _unsorted(case: Case) -> MaskInfo:
    return MaskInfo.from_segments(jnp.asarray(_rng(case).integers(-1, 3, (case.B, case.T)), jnp.int32))


def _cross(case: Case, *, padding: int = 0) -> MaskInfo:
    q, k = sorted_ids(case, case.T, case.B, padding), sorted_ids(case, case.kv_len, case.B, padding)
    return MaskInfo.from_segments(jnp.asarray(q), jnp.asarray(k))


def _positions(case: Case) -> MaskInfo:
    """One segment, tokens in any order."""
    rng = _rng(case)
    q = np.stack([rng.permutation(case.T) for _ in range(case.B)])
    k = np.stack([rng.permutation(case.kv_len) for _ in range(case.B)])
    zeros = jnp.zeros((case.B, 1), jnp.int32)
    ids = jnp.broadcast_to(zeros, (case.B, case.T)), jnp.broadcast_to(zeros, (case.B, case.kv_len))
    return MaskInfo.from_segments(*ids, jnp.asarray(q, jnp.int32), jnp.asarray(k, jnp.int32))


def _segment_positions(case: Case) -> MaskInfo:
    """Positions that restart in each segment."""
    mask = segments(case, padding=5)
    return mask.replace(q_positions=mask.q_positions, kv_positions=mask.kv_positions)


def _lengths(case: Case, q: tuple[int, ...] = (48, 17), k: tuple[int, ...] | None = None) -> MaskInfo:
    keys = None if k is None else jnp.asarray(k)
    return MaskInfo.from_lengths(jnp.asarray(q), keys, q_len=case.T, kv_len=case.kv_len)


def _kv_lengths(case: Case) -> MaskInfo:
    return MaskInfo(case.T, case.kv_len).apply_kv_lengths(jnp.asarray([0, case.kv_len - 7]))


def _dense(case: Case, letters: str = "B1TS") -> MaskInfo:
    mask = _rng(case).random(case.shaped(letters)) < 0.4
    mask[..., 3, :] = False
    mask[..., :16] = mask[..., :16].any()  # tiles that are all visible
    mask[..., -16:] = False  # and tiles that are not visited
    return MaskInfo.from_attention_mask(jnp.asarray(mask))


def _pattern(case: Case, block: int | tuple[int, int] = 16, heads: int = 0, batch: int = 0) -> MaskInfo:
    bq, bk = (block, block) if isinstance(block, int) else block
    lead = (batch, heads) if batch else (heads,) if heads else ()
    blocks = _rng(case).random((*lead, -(-case.T // bq), -(-case.kv_len // bk))) < 0.5
    blocks[..., -1] = False  # keys that nobody sees
    pattern = BlockPattern.from_dense(blocks, block_size=block)
    return MaskInfo.from_block_pattern(pattern, q_len=case.T, kv_len=case.kv_len)


def _chunks(case: Case, size: int = 16) -> MaskInfo:
    return MaskInfo(case.T, case.kv_len).apply_chunked(size)


def _everything(case: Case) -> MaskInfo:
    return segments(case, padding=3) & _pattern(case, 16, heads=case.H) & _dense(case, "B1TS")


# Cases ------------------------------------------------------------------------------------------------------

CAUSAL = {"causal": True}
UNDIVIDED = {"normalize_output": False}
DROPOUT = {"dropout_prob": 0.3, "dropout_seed": 7}

LENGTHS = (
    Case("1x1", T=1),
    Case("63x63", T=63),
    Case("129x129", T=129, tiles=(64, 64)),
    Case("1000x1000-causal", B=1, T=1000, H=1, tiles=(256, 128), options=CAUSAL),
    Case("63x129", T=63, S=129, tiles=(32, 64)),
    Case("129x63", T=129, S=63, tiles=(64, 32)),
    Case("1x129", T=1, S=129, tiles=(16, 64)),
    Case("129x1", T=129, S=1, tiles=(64, 16)),
    Case("one-tile", T=48, tiles=(512, 512)),
)
SIZES = (
    Case("gqa4", H=4, Hkv=1, options=CAUSAL),
    Case("gqa8", H=8, Hkv=1, B=1),
    Case("gqa4-of-8", H=8, Hkv=2, B=1, options=CAUSAL),
    Case("D40", D=40),
    Case("D64-bfloat16", D=64, dtype="bfloat16", options=CAUSAL),
    Case("D128-bfloat16", D=128, dtype="bfloat16"),
    Case("D256-bfloat16", D=256, dtype="bfloat16", options=CAUSAL),
    Case("Dv-smaller", D=40, Dv=24),
    Case("Dv-larger", D=16, Dv=40, options=CAUSAL),
)
DTYPES = (
    Case("bfloat16", T=63, dtype="bfloat16", D=40),
    Case("bfloat16-gqa-causal", T=129, H=4, Hkv=2, dtype="bfloat16", tiles=(64, 64), options=CAUSAL),
    Case("float16", T=63, dtype="float16", D=40),
    Case("float16-gqa-causal", T=129, H=4, Hkv=2, dtype="float16", tiles=(64, 64), options=CAUSAL),
    Case("bfloat16-no-lse", T=64, D=64, dtype="bfloat16", lse=False),
    Case("bfloat16-no-lse-causal", T=64, D=64, dtype="bfloat16", lse=False, options=CAUSAL),
    Case("float16-no-lse-window", T=64, D=64, dtype="float16", lse=False, options={**CAUSAL, "sliding_window": 8}),
    Case("bfloat16-no-lse-gqa", T=64, S=128, H=4, Hkv=2, D=64, dtype="bfloat16", lse=False),
    *(
        Case(f"{dtype}-{how}", T=40, dtype=dtype, D=40, strength=strength, options=CAUSAL)
        for dtype in ("float32", "bfloat16", "float16")
        for how, strength in (("strong", 2.0**8), ("weak", 2.0**-8))
    ),
)
BANDS = (
    Case("causal", options=CAUSAL),
    Case("causal-T<S", T=33, S=70, options=CAUSAL),
    Case("causal-T>S", T=70, S=33, options=CAUSAL),
    Case("window-both", T=100, options={"sliding_window": 10}),
    Case("window-left", T=100, options={"sliding_window": (10, 0)}),
    Case("window-right", T=100, options={"sliding_window": (0, 10)}),
    Case("window-one-side-open", T=65, options={"sliding_window": (None, 5)}),
    Case("window-lopsided-T<S", T=40, S=90, options={"sliding_window": (20, 3)}),
    Case("window-T>S", T=90, S=40, options={"sliding_window": 6}),
    Case("window-causal", T=100, options={**CAUSAL, "sliding_window": 17}),
    Case("window-zero", options={"sliding_window": 0}),
    Case("causal-offset", mask=lambda c: MaskInfo(c.T, c.kv_len).apply_causal(offset=-3)),
    Case("chunks", T=70, mask=_chunks),
    Case("chunks-odd-causal", T=70, mask=partial(_chunks, size=13), options=CAUSAL),
    Case("chunks-T<S", T=33, S=70, mask=_chunks, options={"sliding_window": 9}),
)
SEGMENTS = (
    Case("segments", T=70, mask=segments),
    Case("segments-one-row", T=70, mask=partial(segments, rows=1), options=CAUSAL),
    Case("segments-padding-causal", T=70, mask=partial(segments, padding=20), options=CAUSAL),
    Case("segments-unsorted", T=70, mask=_unsorted),
    Case("segments-unsorted-causal", T=70, mask=_unsorted, options=CAUSAL),
    Case("segments-cross", T=40, S=70, mask=_cross),
    Case("segments-cross-padding-window", T=70, S=40, mask=partial(_cross, padding=9), options={"sliding_window": 12}),
    Case("segments-bfloat16-gqa", T=70, H=4, Hkv=2, dtype="bfloat16", mask=segments, options=CAUSAL),
    Case("lengths", mask=_lengths),
    Case("lengths-cross-causal", S=70, mask=partial(_lengths, k=(70, 9)), options=CAUSAL),
    Case("lengths-zero", mask=partial(_lengths, q=(0, 48))),
    Case("kv-lengths-zero", S=70, mask=_kv_lengths),
)
POSITIONS = (
    Case("positions-causal", T=70, mask=_positions, options=CAUSAL),
    Case("positions-window-T<S", T=40, S=70, mask=_positions, options={"sliding_window": (8, 2)}),
    Case("positions-chunks", T=70, mask=lambda c: _positions(c).apply_chunked(16)),
    Case("positions-in-segments-causal", T=70, mask=_segment_positions, options=CAUSAL),
)
GRIDS = (
    Case("mask-per-batch", T=70, mask=_dense),
    Case("mask-per-head", T=70, mask=partial(_dense, letters="BHTS"), options=CAUSAL),
    Case("mask-shared", T=40, S=70, mask=partial(_dense, letters="11TS")),
    Case("pattern-finer-than-tile", T=70, mask=_pattern),
    Case("pattern-coarser-than-tile", T=130, mask=partial(_pattern, block=64), tiles=(32, 32), options=CAUSAL),
    Case("pattern-across-tiles", T=100, mask=partial(_pattern, block=24), tiles=(32, 32)),
    Case("pattern-oblong-per-head", T=40, S=70, mask=partial(_pattern, block=(8, 24), heads=2), options=CAUSAL),
    Case("pattern-per-batch", T=70, mask=partial(_pattern, block=16, heads=2, batch=2)),
    Case("pattern-local-stride", T=100, H=4, Hkv=2, options=CAUSAL, mask=lambda c: MaskInfo.from_block_pattern(
        BlockPattern.local_stride(c.H, 7, 1, 3, block_size=16), q_len=c.T)),
    Case("pattern-stripes", B=1, T=140, H=4, Hkv=2, dtype="bfloat16", options=CAUSAL, mask=lambda c:
         MaskInfo.from_block_pattern(BlockPattern.local_stride(c.H, 9, 1, 4, block_size=16), q_len=c.T)),
)  # fmt: skip
BIAS_SHAPES = ("BHTS", "1HTS", "B1TS", "BH1S", "1H1S", "BHT1", "11TS", "B11S", "1HT1", "111S", "11T1", "BH11", "1111")
BIASES = (
    *(Case(f"bias-{shape}", T=33, S=41, bias=shape) for shape in BIAS_SHAPES),
    Case("bias-TS", T=33, S=41, bias="TS", options=CAUSAL),
    Case("bias-dropout-grids", T=70, bias="1HTS", mask=_everything, options=DROPOUT),
    Case("bias-HTS-masked", T=70, bias="HTS", mask=partial(segments, padding=9), options=CAUSAL),
    Case("bias-HT1-masked", T=70, bias="HT1", mask=partial(segments, padding=9), options=CAUSAL),
    Case("bias-bfloat16", T=70, bias="1HTS", dtype="bfloat16", options=CAUSAL),
    Case("bias-soft-cap", T=33, S=41, bias="B1TS", options={"logits_soft_cap": 2.0}),
)  # fmt: skip
SINKS = (
    Case("sinks-chunks", T=70, sinks="H", mask=partial(_chunks, size=20)),
    Case("sinks-H", H=4, Hkv=2, sinks="H"),
    Case("sinks-Hn", sinks="H3", options=CAUSAL),
    Case("sinks-shared", sinks="15", options=CAUSAL),
    Case("sinks-bfloat16", sinks="H", dtype="bfloat16", options={**CAUSAL, "sliding_window": 9}),
    Case("sinks-rows-that-see-nothing", T=70, S=33, sinks="H2", options=CAUSAL),
    Case("sinks-segments", T=70, sinks="H", mask=partial(segments, padding=20), options=CAUSAL),
)
LOGITS = (
    Case("soft-cap", options={"logits_soft_cap": 1.5}),
    Case("soft-cap-causal-bfloat16", T=70, dtype="bfloat16", options={**CAUSAL, "logits_soft_cap": 3.0}),
    Case("soft-cap-segments", T=70, mask=_unsorted, options={"logits_soft_cap": 3.0}),
    Case("scale", options={"softmax_scale": 0.7}),
    Case("scale-negative", D=40, Dv=24, options={"softmax_scale": -0.3, "causal": True}),
    Case("precision", options={"precision": "highest"}),
    Case("logits-bfloat16", options={"logits_dtype": jnp.bfloat16, **CAUSAL}),
    Case("logits-float16", options={"logits_dtype": jnp.float16}),
)
DROPOUTS = (
    Case("dropout", options=DROPOUT),
    Case("dropout-gqa-causal-T<S", T=40, S=70, H=4, Hkv=2, options={**DROPOUT, **CAUSAL}),
    Case("dropout-bfloat16-segments", T=70, dtype="bfloat16", mask=partial(segments, padding=9), options=DROPOUT),
)
PACKED = (
    Case("packed", B=1, T=100, cum_q=(0, 30, 31, 80, 100), options=CAUSAL),
    Case("packed-padding", B=1, T=100, cum_q=(0, 40, 70), options=CAUSAL),
    Case("packed-empty-sequences", B=1, T=64, cum_q=(0, 0, 40, 40, 64, 64)),
    Case("packed-cross", B=1, T=60, S=100, cum_q=(0, 20, 50), cum_k=(0, 40, 90)),
    Case("packed-cross-causal", B=1, T=60, S=100, cum_q=(0, 20, 50), cum_k=(0, 40, 90), options=CAUSAL),
    Case("packed-cross-window", B=1, T=60, S=60, cum_q=(0, 20, 60), cum_k=(0, 30, 55), options={"sliding_window": 7}),
    Case("packed-four-dimensions", B=1, T=100, H=4, Hkv=2, cum_q=(0, 40, 100), packed=False, options=CAUSAL),
    Case("packed-bfloat16-padding", B=1, T=64, H=2, Hkv=1, dtype="bfloat16", cum_q=(0, 30, 30, 50), lse=False,
         options={**CAUSAL, "sliding_window": 20}),
    Case("packed-float16-cross-causal", B=1, T=32, S=64, dtype="float16", cum_q=(0, 12, 20, 30), cum_k=(0, 30, 30, 60),
         lse=False, options=CAUSAL),
    Case("packed-bfloat16-sinks", B=1, T=100, dtype="bfloat16", cum_q=(0, 40, 70), sinks="H", options=CAUSAL),
)  # fmt: skip
UNNORMALISED = (
    Case("unnormalised", options=UNDIVIDED),
    Case("unnormalised-causal-T>S", T=70, S=33, options={**UNDIVIDED, **CAUSAL}),
    Case("unnormalised-sinks", sinks="H2", options={**UNDIVIDED, **CAUSAL}),
    Case("unnormalised-sinks-alone", T=70, S=33, sinks="13", options={**UNDIVIDED, **CAUSAL}),
    Case("unnormalised-bias-soft-cap", bias="1HTS", options={**UNDIVIDED, "logits_soft_cap": 3.0}),
    Case("unnormalised-bfloat16-gqa", H=4, Hkv=2, dtype="bfloat16", options={**UNDIVIDED, **CAUSAL}),
    Case("unnormalised-segments-no-lse", T=70, mask=partial(segments, padding=9), lse=False, options=UNDIVIDED),
)
# several tiles in both directions and head dims of the Hopper kernels, which refuse most of the small cases above
_wide = partial(Case, B=1, T=300, D=128, dtype="bfloat16", tiles=(128, 64))
WIDE = (
    _wide("wide-D64", B=2, T=256, D=64),
    _wide("wide-D64-gqa-causal", H=4, Hkv=2, D=64, options=CAUSAL),
    _wide("wide-D64-chunks-sinks", D=64, sinks="H", mask=partial(_chunks, size=100)),
    _wide("wide-D64-positions", D=64, mask=_segment_positions, options=CAUSAL),
    _wide("wide-D96-float16", D=96, T=200, dtype="float16"),
    _wide("wide-D96-lengths-window", B=2, D=96, mask=partial(_lengths, q=(300, 111)), options={"sliding_window": 50}),
    _wide("wide-D128-segments-gqa-causal", H=4, Hkv=2, mask=partial(segments, padding=40), options=CAUSAL),
    _wide("wide-D128-packed-gqa-causal", H=4, Hkv=2, cum_q=(0, 7, 140, 140, 260), lse=False, options=CAUSAL),
    _wide("wide-D64-packed-cross-causal", T=200, S=330, H=4, Hkv=2, D=64, cum_q=(0, 7, 140, 190),
          cum_k=(0, 70, 190, 300), options=CAUSAL),
    _wide("wide-D128-packed-window", T=520, cum_q=(0, 450, 520), options={**CAUSAL, "sliding_window": 260}),
    _wide("wide-D128-window-soft-cap", options={**CAUSAL, "sliding_window": 60, "logits_soft_cap": 4.0}),
    _wide("wide-D128-one-query", B=2, T=1, S=300, H=4, Hkv=2, options=CAUSAL),
    _wide("wide-D64-pattern-per-batch", B=2, D=64, mask=partial(_pattern, block=(64, 128), heads=2, batch=2)),
    _wide("wide-D128-pattern-gqa-causal", H=4, Hkv=2, mask=partial(_pattern, block=64, heads=4), options=CAUSAL),
    _wide("wide-D256-pattern-segments", T=200, D=256, options=CAUSAL,
          mask=lambda c: segments(c, padding=30) & _pattern(c, 64)),
    _wide("wide-D128-bias-dropout", T=200, bias="1HTS", options={**CAUSAL, **DROPOUT}),
    _wide("wide-D64-bias-B11S-gqa-causal", B=2, H=4, Hkv=2, D=64, bias="B11S", options=CAUSAL),
    _wide("wide-D64-bias-1H1S-pattern", D=64, bias="1H1S", mask=partial(_pattern, block=64)),
    _wide("wide-D128-bias-BHT1-gqa", B=2, T=200, H=4, Hkv=2, bias="BHT1", options={"logits_soft_cap": 4.0}),
    _wide("wide-D192-bias-1H1S", T=200, D=192, bias="1H1S", options=DROPOUT),
    _wide("wide-D80-Dv128-mask", T=200, D=80, Dv=128, mask=partial(_dense, letters="BHTS"), options=DROPOUT),
    _wide("wide-D40-bias-mask", T=200, D=40, dtype="float16", bias="1HTS", mask=partial(_dense, letters="B1TS")),
    _wide("wide-D192-causal-T<S", T=130, S=270, D=192, options=CAUSAL),
    _wide("wide-D192-float16-sinks", T=200, D=192, dtype="float16", sinks="H", options={"sliding_window": (90, 10)}),
    _wide("wide-D256-gqa-causal", T=200, D=256, H=4, Hkv=2, options=CAUSAL),
    _wide("wide-D256-segments-soft-cap", T=200, D=256, mask=partial(segments, padding=30),
          options={"logits_soft_cap": 4.0}),
)  # fmt: skip
COMBINATIONS = (
    Case("segments-bias-sinks-soft-cap-dropout", T=70, H=4, Hkv=2, bias="1HTS", sinks="H2",
         mask=partial(segments, padding=9), options={**CAUSAL, **DROPOUT, "logits_soft_cap": 4.0}),
    Case("everything-masked", T=70, mask=_everything, options={**CAUSAL, "sliding_window": 40}),
    Case("everything-bfloat16", T=70, S=90, H=4, Hkv=2, D=40, Dv=24, dtype="bfloat16", bias="BHTS", sinks="H",
         mask=partial(_cross, padding=9),
         options={"sliding_window": (30, 10), "logits_soft_cap": 4.0, "softmax_scale": 0.2}),
    Case("packed-everything", B=1, T=100, H=4, Hkv=2, bias="HT1", sinks="H", cum_q=(0, 40, 70),
         options={**CAUSAL, **DROPOUT, "sliding_window": 12}),
)  # fmt: skip

# XLA's loop has met their features in the smaller cases; these few show it several large tiles
WIDE_ON_CPUS = ("wide-D96-lengths-window", "wide-D128-segments-gqa-causal", "wide-D256-pattern-segments")
# kernels for GPUs treat these as cases of their own; to XLA's loop each is one of the others, or part of one
SMALL_FOR_GPUS = (
    "129x129", "one-tile", "gqa8", "gqa4-of-8", "D64-bfloat16", "D128-bfloat16", "Dv-larger", "float16-gqa-causal",
    "bfloat16-no-lse", "bfloat16-no-lse-causal", "float16-no-lse-window", "float32-strong", "float32-weak",
    "bfloat16-weak", "causal-T<S", "window-both", "window-right", "window-T>S", "chunks", "segments",
    "segments-unsorted", "segments-cross", "segments-bfloat16-gqa", "lengths", "mask-shared", "bias-1HTS", "bias-BH1S",
    "bias-B11S", "bias-1HT1", "bias-111S", "bias-11T1", "bias-HT1-masked", "bias-bfloat16", "sinks-chunks", "sinks-H",
    "sinks-bfloat16", "soft-cap-causal-bfloat16", "soft-cap-segments", "scale", "dropout", "packed", "packed-cross",
    "packed-bfloat16-padding", "packed-float16-cross-causal", "packed-bfloat16-sinks", "unnormalised",
    "unnormalised-sinks",
)  # fmt: skip

CASES = (
    *LENGTHS, *SIZES, *DTYPES, *BANDS, *SEGMENTS, *POSITIONS, *GRIDS, *BIASES, *SINKS, *LOGITS, *DROPOUTS, *PACKED,
    *UNNORMALISED, *WIDE, *COMBINATIONS,
)  # fmt: skip
FOR_GPUS = tuple(case for case in CASES if case.id in SMALL_FOR_GPUS or (case in WIDE and case.id not in WIDE_ON_CPUS))

# what interpreters, which take long, are given: every feature of a kernel once, and pairs that meet in one
CORE_IDS = (
    "63x129", "1x129",
    "D256-bfloat16", "bfloat16-gqa-causal", "float16-strong", "float16-weak",
    "causal-T>S", "window-lopsided-T<S", "chunks-odd-causal",
    "segments-unsorted-causal", "segments-cross-padding-window", "kv-lengths-zero",
    "positions-window-T<S", "positions-in-segments-causal",
    "mask-per-head", "pattern-oblong-per-head", "pattern-per-batch", "pattern-stripes",
    "bias-BH1S", "bias-1111", "sinks-rows-that-see-nothing", "scale-negative",
    "logits-bfloat16", "dropout-gqa-causal-T<S", "packed-cross-causal", "unnormalised-sinks-alone",
    *(case.id for case in COMBINATIONS),
)  # fmt: skip
CORE = tuple(case for case in CASES if case.id in CORE_IDS)

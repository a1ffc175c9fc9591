"""Mask and score functions, and options that are traced, on every platform: outputs and all gradients.

The definition here is a matrix of logits in jax.numpy, and the user's functions under `vmap`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from ejkernel.ops import explain, interpret
from ejkernel.types import MaskInfo
from harness import by_case, check, normal
from harness.gallery import MASKS, SCORES, Sizes, values


@dataclass(frozen=True)
class Case:
    """A call with functions.

    Attributes:
        mask, score: names in the gallery.
        make: from the arrays that have gradients, of `trained`'s shapes, the score function.
        options: further keywords, which `seen` says in the definition.
        seen: whether query i of T sees key j of S, beside the mask function.
    """

    id: str
    mask: str = ""
    score: str = ""
    sizes: Sizes = Sizes(2, 4, 40, 56)
    Hkv: int = 2
    D: int = 16
    dtype: str = "float32"
    tiles: tuple[int, int] = (16, 16)
    trained: dict[str, tuple[int, ...]] = field(default_factory=dict)
    make: Callable[..., Any] | None = None
    options: Callable[["Case"], dict[str, Any]] = lambda case: {}
    seen: Callable[[Any, Any, Any], Any] = lambda b, i, j: True

    def arrays(self) -> dict[str, Any]:
        B, H, T, S = self.sizes
        shapes = {"query": (B, T, H, self.D), "key": (B, S, self.Hkv, self.D), "value": (B, S, self.Hkv, self.D)}
        arrays = {name: normal(name, shape, self.dtype) for name, shape in shapes.items()}
        return arrays | {name: normal(name, shape) for name, shape in self.trained.items()}

    def functions(self, arrays: dict[str, Any]) -> dict[str, Any]:
        given = {"mask_fn": MASKS[self.mask](self.sizes)} if self.mask else {}
        if self.make is not None:
            given["score_fn"] = self.make(*(arrays[name] for name in self.trained))
        elif self.score:
            given["score_fn"] = SCORES[self.score](self.sizes)
        return given


def definition(case: Case, arrays: dict[str, Any], dtype: Any) -> dict[str, Any]:
    H = case.sizes.H
    query, key, value = (arrays[name].astype(dtype) for name in ("query", "key", "value"))
    key, value = (jnp.repeat(x, H // case.Hkv, axis=2) for x in (key, value))
    logits = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest", preferred_element_type=jnp.float32)
    logits *= case.D**-0.5
    given = case.functions(arrays)
    if "score_fn" in given:
        logits = values(given["score_fn"], case.sizes, logits)
    seen = values(lambda b, h, i, j: jnp.asarray(case.seen(b, i, j), bool), case.sizes)
    if "mask_fn" in given:
        seen &= values(given["mask_fn"], case.sizes)
    some = seen.any(-1)
    logits = jnp.where(seen, logits, -jnp.inf)
    lse = jnp.where(some, jax.nn.logsumexp(jnp.where(some[..., None], logits, 0.0), axis=-1), -jnp.inf)
    weights = jnp.where(seen, jnp.exp(logits - jnp.where(some, lse, 0.0)[..., None]), 0.0)
    out = jnp.einsum(
        "bhts,bshd->bthd", weights.astype(dtype), value, precision="highest", preferred_element_type=jnp.float32
    )
    return {"out": out.astype(dtype), "lse": lse}


def call(case: Case, platform: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    arguments = (arrays[name] for name in ("query", "key", "value"))
    options = platform.options(case.tiles, case.dtype) | case.functions(arrays) | case.options(case)
    with platform.context():
        return dict(zip(("out", "lse"), flash_attention(*arguments, return_lse=True, **options), strict=True))


def refusals(case: Case, platform: Any) -> list[str]:
    arrays = case.arrays()
    options = case.functions(arrays) | case.options(case) | {"platform": platform.name}
    with platform.context():
        found = explain(flash_attention, *(arrays[n] for n in ("query", "key", "value")), **options)
    return found.refusals.get(platform.name, [])


IDS = np.sort(np.random.default_rng(0).integers(0, 3, (2, 48)), axis=1).astype(np.int32)


def _alibi(slopes):
    return lambda s, b, h, i, j: s - slopes[h] * jnp.abs(i - j)


def _forgetting(gates):
    total = jnp.cumsum(-jax.nn.softplus(gates), axis=-1)
    return lambda s, b, h, i, j: s + total[b, h, i] - total[b, h, j]


def _temperature(temperature, shift):
    return lambda s, b, h, i, j: jnp.tanh(s * temperature[h] + shift[j]) * 3.0


def _relative(table):
    return lambda s, b, h, i, j: s + table[jnp.clip(j - i, -8, 8) + 8, h]


SQUARE = Sizes(2, 4, 48, 48)
CASES = [
    Case("prefix-soft-cap", mask="prefix", score="soft-cap", sizes=SQUARE),
    Case("documents-prefix", mask="documents-prefix", score="distance"),
    Case("natten", mask="natten", score="temperature", Hkv=4),
    Case("tree-log-distance", mask="tree", score="log-distance", dtype="bfloat16"),
    Case("window-by-head", mask="window-by-head", score="gated", sizes=Sizes(1, 4, 33, 65)),
    Case("nothing", mask="nothing"),
    Case("trained-alibi", mask="causal", trained={"slopes": (4,)}, make=_alibi),
    Case("trained-gates", mask="jagged", sizes=SQUARE, trained={"gates": (2, 4, 48)}, make=_forgetting),
    Case(
        "in-segments", mask="dilated", sizes=SQUARE, trained={"temperature": (4,), "shift": (48,)}, make=_temperature,
        options=lambda case: {"mask_info": MaskInfo.from_segments(IDS), "sliding_window": (20, 3)},
        seen=lambda b, i, j: (jnp.asarray(IDS)[b, i] == jnp.asarray(IDS)[b, j]) & (i - j <= 20) & (j - i <= 3),
    ),
]  # fmt: skip
# what reads an array at query and key together
TABLES = [
    Case("matrix-relative", mask="matrix", trained={"table": (17, 4)}, make=_relative),
    Case("blocks-matrix-bias", mask="blocks", score="matrix-bias", sizes=SQUARE),
]


@by_case([*CASES, *TABLES])
def test_functions(case, platform):
    if reasons := refusals(case, platform):
        told = " ".join(reasons)
        if (platform.name, platform.device) == ("pallas", "cpu"):
            assert case in TABLES and "table" in told, told
        else:  # kernels of Hopper, cuDNN and FlashAttention-4 read no functions
            assert platform.name in ("pallas", "cudnn", "cute"), told
            assert "a mask function" in told or "a score function" in told, told
        return
    check(
        lambda arrays: call(case, platform, arrays),
        lambda arrays, dtype: definition(case, arrays, dtype),
        case.arrays(),
        case.dtype,
        name=case.id,
    )


def attended(platform="xla", sizes=SQUARE, **options):
    case = Case("plain", sizes=sizes)
    q, k, v = (case.arrays()[name] for name in ("query", "key", "value"))
    return flash_attention(q, k, v, platform=platform, **options)


def test_functions_of_packed_sequences_count_inside_them():
    offsets = jnp.array([0, 13, 13, 40])
    arrays = [normal(name, (44, 4, 16)) for name in ("query", "key", "value")]
    bias = normal("bias", (27,))

    def both(i, j):
        return {
            "mask_fn": lambda b, h, i, j: (j <= i) & (i - j < 9) | (j < 2),
            "score_fn": lambda s, b, h, i, j: s + bias[i] * bias[j],
        }

    out = flash_attention(*arrays, cum_seqlens_q=offsets, **both(0, 0))
    for start, end in ((0, 13), (13, 40)):
        alone = flash_attention(*(x[None, start:end] for x in arrays), **both(0, 0))
        np.testing.assert_allclose(out[start:end], alone[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(out[40:], 0)


def test_alibi_slopes_are_those_of_the_function():
    slopes = jnp.array([0.5, 0.25, 0.125, 1.0])
    by_function = attended(causal=True, score_fn=lambda s, b, h, i, j: s - slopes[h] * jnp.abs(i - j))
    np.testing.assert_allclose(attended(causal=True, alibi_slopes=slopes), by_function, rtol=1e-5, atol=1e-5)
    ends = attended(sizes=Sizes(2, 4, 8, 48), alibi_slopes=slopes[None])
    whole = attended(sizes=Sizes(2, 4, 8, 48), score_fn=lambda s, b, h, i, j: s - slopes[h] * jnp.abs(i + 40 - j))
    np.testing.assert_allclose(ends, whole, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"alibi_slopes \(3,\) must be \(4,\) or \(batch, 4\)"):
        attended(alibi_slopes=slopes[:3])


def test_traced_options_are_those_that_are_known():
    @jax.jit
    def traced(window, scale, cap):
        return attended(causal=True, sliding_window=(window, 0), softmax_scale=scale, logits_soft_cap=cap)

    for window, scale, cap in ((5, 0.3, 2.0), (48, 1.0, 0.5)):
        known = attended(causal=True, sliding_window=(window, 0), softmax_scale=scale, logits_soft_cap=cap)
        np.testing.assert_allclose(traced(window, scale, cap), known, rtol=1e-5, atol=1e-5)
    assert traced._cache_size() == 1

    def total(cap):
        return (attended(logits_soft_cap=cap) ** 2).sum()

    step = 1e-3
    np.testing.assert_allclose(jax.grad(total)(1.5), (total(1.5 + step) - total(1.5 - step)) / (2 * step), rtol=2e-3)
    with pytest.raises(TypeError, match="sliding_window must hold integers, got float32"):
        jax.jit(lambda w: attended(sliding_window=w))(2.5)


def test_one_scanned_layer_has_local_and_global_windows():
    def layer(x, window):
        return flash_attention(x, x, x, causal=True, sliding_window=(window, 0)), None

    x = normal("x", (1, 24, 2, 8))
    out = jax.jit(lambda x: jax.lax.scan(layer, x, jnp.array([3, 100]))[0])(x)
    first = flash_attention(x, x, x, causal=True, sliding_window=(3, 0))
    np.testing.assert_allclose(out, flash_attention(first, first, first, causal=True), rtol=1e-5, atol=1e-5)


def test_new_values_compile_nothing():
    arrays = [normal(name, (1, 32, 2, 8)) for name in ("query", "key", "value")]

    def outside(prefix, slopes):
        return flash_attention(
            *arrays,
            mask_fn=lambda b, h, i, j: (j <= i) | (j < prefix[b]),
            score_fn=lambda s, b, h, i, j: s - slopes[h] * (i - j),
        )

    outside(jnp.array([3]), jnp.array([0.5, 0.1])).block_until_ready()
    with jax.log_compiles(), pytest.MonkeyPatch.context():
        import logging

        seen = []
        handler = logging.Handler()
        handler.emit = lambda record: seen.append(record.getMessage())
        logging.getLogger("jax").addHandler(handler)
        try:
            outside(jnp.array([9]), jnp.array([0.25, 0.2])).block_until_ready()
        finally:
            logging.getLogger("jax").removeHandler(handler)
    assert not [message for message in seen if "Compiling" in message], seen


def test_vmap_over_what_a_function_closes_over():
    arrays = [normal(name, (1, 24, 2, 8)) for name in ("query", "key", "value")]

    def one(prefix, slope):
        return flash_attention(
            *arrays,
            mask_fn=lambda b, h, i, j: (j <= i) | (j < prefix),
            score_fn=lambda s, b, h, i, j: s - slope * jnp.abs(i - j),
        )

    prefixes, slopes = jnp.array([1, 5, 24]), jnp.array([0.1, 1.0, 0.0])
    looped = jnp.stack([one(p, s) for p, s in zip(prefixes, slopes, strict=True)])
    np.testing.assert_allclose(jax.vmap(one)(prefixes, slopes), looped, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda s: (jax.vmap(one)(prefixes, s) ** 2).sum())(slopes)
    alone = [jax.grad(lambda s, p=p: (one(p, s) ** 2).sum())(s) for p, s in zip(prefixes, slopes, strict=True)]
    np.testing.assert_allclose(gradient, jnp.stack(alone), rtol=1e-4, atol=1e-5)


def test_split_heads_and_batch_have_their_own_values():
    slopes, prefix = jnp.array([0.5, 0.25, 0.125, 1.0]), jnp.array([3, 9])
    options = {
        "mask_fn": lambda b, h, i, j: (j <= i) | (j < prefix[b] + h),
        "score_fn": lambda s, b, h, i, j: s - slopes[h] * jnp.abs(i - j),
    }
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("dp", None, "tp", None)
    split = attended(mesh=mesh, in_specs=(spec,) * 3, **options)
    np.testing.assert_allclose(split, attended(**options), rtol=1e-5, atol=1e-5)


def test_dropout_sinks_and_lse_beside_functions():
    options = {"causal": True, "softmax_aux": jnp.linspace(-1, 1, 4), "dropout_prob": 0.3, "dropout_seed": 3}
    by_function = attended(mask_fn=lambda b, h, i, j: (i // 7 == j // 7) | (j < 3), **options)
    prefix = MaskInfo(48, 48).apply_chunked(7) | MaskInfo.from_bounds(None, jnp.full(48, 3), q_len=48)
    np.testing.assert_allclose(by_function, attended(mask_info=prefix, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_an_output_without_its_sum(normalize):
    bias = normal("bias", (48,))
    plain = attended(bias=jnp.broadcast_to(bias, (1, 1, 48, 48)), normalize_output=normalize)
    score = attended(score_fn=lambda s, b, h, i, j: s + bias[j], normalize_output=normalize)
    np.testing.assert_allclose(score, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("platform", ["xla", "triton", "pallas"])
def test_functions_of_few_indices(platform):
    """A logit that does not depend on the score, nor on the pair; a mask of one side alone."""
    sizes, values_ = Sizes(1, 2, 16, 16), normal("values", (16,))
    case = Case("few", sizes=sizes)
    q, k, v = (x[:, :, :2] for x in (case.arrays()[name] for name in ("query", "key", "value")))
    with interpret() if platform != "xla" else nullcontext():
        for score in (lambda s, b, h, i, j: 0.0, lambda s, b, h, i, j: values_[j], lambda s, b, h, i, j: 1.0 * h):
            out = flash_attention(q, k, v, score_fn=score, mask_fn=lambda b, h, i, j: i > 2, platform=platform)
            logits = jnp.broadcast_to(values(score, sizes, jnp.zeros(sizes)), sizes)
            expected = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits, -1), v).at[:, :3].set(0)
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_blocks_that_a_function_hides_are_not_read():
    k = normal("key", (2, 48, 2, 16)).at[:, 16:].set(jnp.nan)
    q, v = normal("query", (2, 48, 4, 16)), normal("value", (2, 48, 2, 16)).at[:, 16:].set(jnp.inf)
    first = flash_attention(q, k, v, mask_fn=lambda b, h, i, j: j < 16)
    np.testing.assert_allclose(first, flash_attention(q, k[:, :16], v[:, :16]), rtol=1e-5, atol=1e-5)
    gradients = jax.grad(lambda q, k, v: flash_attention(q, k, v, mask_fn=lambda b, h, i, j: j < 16).sum(), (0, 1, 2))(
        q, k, v
    )
    assert all(bool(jnp.isfinite(x).all()) for x in gradients)


def test_explain_shows_functions():
    q = jax.ShapeDtypeStruct((1, 128, 8, 64), "bfloat16")
    found = explain(flash_attention, q, q, q, mask_fn=lambda b, h, i, j: (j <= i) | (j < 9), device="h200")
    assert "a mask function: (j <= i) | (j < 9)" in " ".join(found.refusals["pallas"])


def test_functions_that_say_what_options_do_run_as_these():
    q = jax.ShapeDtypeStruct((1, 128, 8, 64), "bfloat16")
    ids = jnp.arange(128) // 50
    functions = {
        "mask_fn": lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i),
        "score_fn": lambda s, b, h, i, j: 50.0 * jnp.tanh(s / 50.0),
    }
    found = explain(flash_attention, q, q, q, **functions, device="h200")
    options = {"mask_info": MaskInfo.from_segments(ids), "causal": True, "logits_soft_cap": 50.0}
    assert found.platform == explain(flash_attention, q, q, q, **options, device="h200").platform == "pallas"
    np.testing.assert_array_equal(attended(score_fn=functions["score_fn"]), attended(logits_soft_cap=50.0))

"""The cases, what they are worth in FLOPs, their inputs, and what is right."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.measuring.benchmark import BOTH, FORWARD, Arrays, DeviceLock
from ejkernel.family import FLOOR, Truth
from ejkernel.kernels.softmax.reference import reference
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.types import MaskInfo

QKV = ("query", "key", "value")
TRAINED = (*QKV, "bias")


@dataclass(frozen=True)
class Case:
    """Attention under a mask. `unit` is what tables show.

    Attributes:
        mask: "full"; or causal: "causal", "window", "documents", "tree" (eight rollouts on a prefix of a third of the
            tokens); or "prefix-LM" (all see the first quarter).
        S: keys, where they are not as many as queries; then the mask is `full`.
        documents: so many are packed, cut at random.
        by: how ours are given documents: "segment ids", "cu_seqlens", or a "mask_fn" that is taken for no segments.
        bias: whether every head has one of its own, (1, H, T, S), that is trained too.
        alibi: whether a score function adds ALiBi.
        model: whose shapes they are.
    """

    group: str
    B: int
    T: int
    H: int
    Hkv: int
    D: int
    mask: str
    dtype: str
    unit: str = "ms"
    window: int | None = None
    documents: int | None = None
    passes: tuple[str, ...] = (FORWARD, BOTH)
    S: int | None = None
    by: str = "cu_seqlens"
    bias: bool = False
    alibi: bool = False
    soft_cap: float | None = None
    model: str = ""

    @property
    def name(self) -> str:
        keys = "" if self.S is None else f" S{self.S}"
        grouped = "" if self.Hkv == self.H else f" Hkv{self.Hkv}"
        by = "" if self.by == "cu_seqlens" else f" by {self.by}"
        detail = {
            "window": f" {self.window}",
            "documents": f" {self.documents} at random{by}",
            "tree": f" 8 x {self.rollout} on {self.prefix}",
        }.get(self.mask, "")
        detail += " bias" * self.bias + " ALiBi" * self.alibi
        detail += "" if self.soft_cap is None else f" soft cap {self.soft_cap:g}"
        detail += f" {self.dtype}" if self.model and self.dtype != "bfloat16" else ""
        whose = f"{self.group} {self.model}".strip()
        return f"{whose} B{self.B} T{self.T}{keys} H{self.H}{grouped} D{self.D} {self.mask}{detail}"

    @property
    def keys(self) -> int:
        return self.T if self.S is None else self.S

    @property
    def causal(self) -> bool:
        return self.mask not in ("full", "prefix-LM")

    @property
    def prefix(self) -> int:
        """Tokens that all rollouts of a tree, or all queries, see."""
        return self.T // (3 if self.mask == "tree" else 4)

    @property
    def rollout(self) -> int:
        return (self.T - self.prefix) // 8

    @property
    def sliding_window(self) -> tuple[int, int] | None:
        """(left, right) beside the query's own position."""
        return None if self.window is None else (self.window - 1, 0)

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def amount(self, what: str) -> float:
        """Two matmuls over the pairs that are seen; 2.5 times that for a backward. Causal counts half of T * T."""
        T, W, P, R = self.T, self.window or 0, self.prefix, self.rollout
        pairs = {
            "full": T * self.keys,
            "causal": T * T / 2,
            "window": W * T - W * (W - 1) / 2,
            "documents": float((np.diff(self.offsets()).astype(np.int64) ** 2).sum()) / 2,
            "prefix-LM": (T * T + P * P) / 2,
            "tree": P * P / 2 + 8 * (P * R + R * R / 2),
        }[self.mask]
        return (1 if what == FORWARD else 3.5) * 4 * self.B * self.H * self.D * pairs

    @property
    def operations(self) -> tuple[str, ...]:
        return "flash_attention", "scaled_dot_product_attention"

    def offsets(self) -> np.ndarray:
        """Where documents begin, and the end of the last."""
        cuts = np.random.default_rng(0).choice(np.arange(1, self.T), (self.documents or 1) - 1, replace=False)
        return np.array([0, *np.sort(cuts), self.T], np.int32)

    def segments(self) -> np.ndarray:
        """The document of every token."""
        return np.repeat(np.arange(self.documents or 1, dtype=np.int32), np.diff(self.offsets()))

    def numbers(self) -> dict[str, np.ndarray]:
        """What a mask or a score reads, by name."""
        given = {}
        if self.documents is not None:
            given |= {"segments": self.segments()[None], "offsets": self.offsets()}
        if self.mask == "tree":
            at = np.arange(self.T, dtype=np.int32)
            P, R = self.prefix, self.rollout
            given["ends"] = np.where(at < P, self.T, P + ((at - P) // R + 1) * R).astype(np.int32)
        if self.alibi:
            given["slopes"] = (2.0 ** (-8.0 * np.arange(1, self.H + 1) / self.H)).astype(np.float32)
        return given

    def visible(self, i: Any, j: Any, numbers: Arrays) -> Any:
        """Whether query i sees key j, of arrays of any library."""
        if self.mask == "prefix-LM":
            return (j <= i) | (j < self.prefix)
        seen = j <= i
        if self.mask == "window":
            seen = seen & (i - j < self.window)
        if self.mask == "documents":
            ids = numbers["segments"][0]
            seen = seen & (ids[i] == ids[j])
        if self.mask == "tree":
            seen = seen & (i < numbers["ends"][j])
        return seen

    def score_fn(self, arrays: Arrays, start: Any = 0) -> Any:
        """That of the queries from `start` on; None where logits are left as they are."""
        if not self.alibi:
            return None
        return lambda score, b, h, i, j: score - arrays["slopes"][h] * jnp.abs(i + start - j)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        q, k = (self.B, self.T, self.H, self.D), (self.B, self.keys, self.Hkv, self.D)
        bias = {"bias": (1, self.H, self.T, self.keys)} if self.bias else {}
        return {"query": q, "key": k, "value": k, "dout": q} | bias

    def structs(self) -> Arrays:
        structs = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in self.shapes().items()}
        return structs | {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in self.numbers().items()}

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        options: dict[str, Any] = {"causal": self.causal, "sliding_window": self.sliding_window}
        options |= {"bias": arrays.get("bias"), "logits_soft_cap": self.soft_cap, "score_fn": self.score_fn(arrays)}
        if self.mask == "tree":
            options |= {"causal": False, "mask_info": MaskInfo.tree(arrays["ends"])}
        elif self.mask == "prefix-LM":
            options |= {"causal": False, "mask_fn": lambda b, h, i, j: self.visible(i, j, arrays)}
        elif self.mask == "documents" and self.by == "mask_fn":
            ids = arrays["segments"][0]
            options |= {"causal": False, "mask_fn": lambda b, h, i, j: (j <= i) & (abs(ids[i] - ids[j]) < 1)}
        elif self.mask == "documents" and self.by == "segment ids":
            options["mask_info"] = MaskInfo.from_segments(arrays["segments"])
        else:
            options["cum_seqlens_q"] = arrays.get("offsets")
        return {name: arrays[name] for name in QKV} | options


def _dense(T: int, tokens: int, width: int, D: int, dtype: str, unit: str = "ms") -> list[Case]:
    B, H = tokens // T, width // D
    return [Case("dense", B, T, H, H, D, mask, dtype, unit) for mask in ("full", "causal")]


def _masked(T: int, H: int, Hkv: int, D: int, dtype: str) -> list[Case]:
    case = partial(Case, "masked", 1, T, H, Hkv, D, dtype=dtype)
    documents = partial(case, "documents", documents=16)
    return [case("causal"), case("window", window=T // 16), documents(by="segment ids"), documents()]


def _with_functions(T: int, H: int, Hkv: int, D: int, dtype: str) -> list[Case]:
    """Masks and scores that are functions, and Gemma-2's layer; `T` tokens, a multiple of 48."""
    case = partial(Case, "functions", 1, T, H, Hkv, D, dtype=dtype)
    return [
        case("causal", alibi=True),
        case("prefix-LM"),
        case("tree"),
        case("documents", documents=16, by="mask_fn"),
        Case("functions", 1, T // 3 * 2, H // 2, H // 4, 2 * D, "window", dtype, window=T // 3, soft_cap=50.0),
    ]


def _of_models() -> list[Case]:
    """Shapes that people train, odd ones among them."""

    def case(model: str, B: int, T: int, H: int, D: int, mask: str, Hkv: int | None = None, **more: Any) -> Case:
        dtype = more.pop("dtype", "bfloat16")
        return Case("models", B, T, H, Hkv or H, D, mask, dtype, model=model, **more)

    return [
        case("GPT-2", 8, 1024, 12, 64, "causal"),
        case("Llama", 4, 4096, 32, 128, "causal", 8),
        case("T5", 4, 2048, 16, 64, "full", bias=True),
        case("Phi", 4, 2048, 16, 80, "causal"),
        case("UNet", 2, 4096, 8, 40, "full"),
        case("UNet", 2, 4096, 8, 40, "full", S=77),
        case("BERT", 32, 512, 12, 64, "full"),
        case("ViT", 64, 197, 12, 64, "full"),
        case("CLIP", 64, 577, 16, 64, "full"),
        case("Whisper", 4, 1500, 20, 64, "full"),
        case("DiT", 16, 1024, 16, 72, "full"),
        case("Phi-3", 1, 4096, 32, 96, "causal"),
        case("Gemma", 2, 4096, 8, 256, "window", 4, window=1024),
        case("GPT-2", 2, 2048, 16, 64, "causal", dtype="float32"),
    ]


def all_cases(backend: str, quick: bool) -> list[Case]:
    """The most telling first: a run may be cut short. A CPU gets sizes that it can do."""
    if backend == "cpu":
        T, H = (256, 2) if quick else (4096, 8)
        masked = _masked(2 * T, H, H, 64, "float32")
        return [*_dense(T, T, 64 * H, 64, "float32"), *masked, *_with_functions(T // 128 * 192, 4, 2, 64, "float32")]
    dense = partial(_dense, tokens=16384, width=2048, dtype="bfloat16", unit="TFLOP/s")
    if quick:
        return dense(2048, D=128)
    lengths = [case for T in (2048, 16384) for D in (128, 64, 256) for case in dense(T, D=D)]
    most_telling = [case for D in (128, 64, 256) for case in dense(8192, D=D)]
    masked = [case for T, D in ((16384, 128), (8192, 64)) for case in _masked(T, 32, 8, D, "bfloat16")]
    # Gemma-2's is of 8192 tokens, and the tree of 1024 times 8 on 4096
    return [*most_telling, *masked, *_with_functions(12288, 32, 8, 128, "bfloat16"), *_of_models(), *lengths]


class Attention:
    """A case with its inputs on the device."""

    def __init__(self, case: Case):
        self.case = case
        rng = np.random.default_rng(0)
        self.arrays: Arrays = {
            name: jnp.asarray(rng.standard_normal(shape, np.float32).astype(jnp.dtype(case.dtype)))
            for name, shape in case.shapes().items()
        }
        self.arrays |= {name: jnp.asarray(x) for name, x in case.numbers().items()}
        jax.block_until_ready(self.arrays)  # PyTorch reads the same memory and knows nothing of JAX's streams

    def truths(self, device_lock: DeviceLock) -> list[Truth]:
        """Of the output and the gradients, by the definition in float32; the naive errors by it in the case's dtype."""
        wide = {name: x.astype(jnp.float32) if name in self.case.shapes() else x for name, x in self.arrays.items()}
        exact = self._defined(jnp.float32, wide, device_lock)
        # in float32 the naive computation is the definition itself
        is_exact = self.case.dtype == "float32"
        naive = exact if is_exact else self._defined(jnp.dtype(self.case.dtype), self.arrays, device_lock)
        # float32 sums of T terms: their roundings grow like the square root
        floor = FLOOR * max(1.0, math.sqrt(max(self.case.T, self.case.keys) / 256))
        return [Truth.of(e, n, floor) for e, n in zip(exact, naive, strict=True)]

    def _defined(self, dtype: Any, arrays: Arrays, device_lock: DeviceLock) -> tuple[Arrays, Arrays]:
        # no autotuning: it would run on the device while another process measures
        options = {"xla_gpu_autotune_level": 0}
        program = jax.jit(partial(_defined, self.case, dtype), compiler_options=options).lower(arrays).compile()
        with device_lock:
            return jax.block_until_ready(program(arrays))


# elements of a block of logits: the whole matrix would not fit
_BLOCK = 2**25


def _defined(case: Case, dtype: Any, arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Output and gradients by the definition, a block of queries at a time."""
    T = case.T
    most = max(1, _BLOCK // (case.B * case.H * case.keys))
    rows = T if most >= T else math.gcd(T, 1 << (most.bit_length() - 1))
    key, value = arrays["key"], arrays["value"]
    ids = arrays.get("segments", jnp.zeros((1, T), jnp.int32))
    key_ids = ids if case.S is None else jnp.zeros((1, case.S), jnp.int32)
    positions, key_positions = (jnp.arange(n, dtype=jnp.int32)[None] for n in (T, case.keys))

    def block(sums: tuple[jax.Array, jax.Array], start: jax.Array):
        cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=rows)
        mask = MaskInfo.from_segments(cut(ids, axis=1), key_ids, cut(positions, axis=1), key_positions)
        mask_fn = lambda b, h, i, j: case.visible(i + start, j, arrays)  # noqa: E731
        by_query = {"query": cut(arrays["query"], axis=1)}
        if case.bias:
            by_query["bias"] = cut(arrays["bias"], axis=2)

        def attend(by_query: Arrays, key: jax.Array, value: jax.Array) -> jax.Array:
            call = canonicalise(
                key=key,
                value=value,
                mask_info=mask,
                causal=case.causal,
                sliding_window=case.sliding_window,
                logits_soft_cap=case.soft_cap,
                mask_fn=mask_fn if case.mask in ("tree", "prefix-LM") else None,
                score_fn=case.score_fn(arrays, start),
                **by_query,
            )
            return reference(call, dtype)["out"]

        out, pull = jax.vjp(attend, by_query, key, value)
        shares = pull(cut(arrays["dout"], axis=1))
        sums = tuple(x + share.astype(jnp.float32) for x, share in zip(sums, shares[1:], strict=True))
        return sums, (out, shares[0])

    zeros = (jnp.zeros(key.shape), jnp.zeros(value.shape))
    (dkey, dvalue), (out, by_query) = lax.scan(block, zeros, jnp.arange(0, T, rows))

    def joined(blocks: jax.Array, axis: int) -> jax.Array:
        blocks = jnp.moveaxis(blocks, 0, axis)
        return blocks.reshape(*blocks.shape[:axis], T, *blocks.shape[axis + 2 :])

    gradients = {"dquery": joined(by_query["query"], 1), "dkey": dkey.astype(dtype), "dvalue": dvalue.astype(dtype)}
    if case.bias:
        gradients["dbias"] = joined(by_query["bias"], 2)
    return {"out": joined(out, 1)}, gradients

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
    """Attention under a mask; every mask but `full` is causal. `unit` is what tables show.

    Attributes:
        S: keys, where they are not as many as queries; then the mask is `full`.
        documents: so many are packed, cut at random.
        bias: whether every head has one of its own, (1, H, T, S), that is trained too.
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
    bias: bool = False
    model: str = ""

    @property
    def name(self) -> str:
        keys = "" if self.S is None else f" S{self.S}"
        grouped = "" if self.Hkv == self.H else f" Hkv{self.Hkv}"
        detail = {"window": f" {self.window}", "documents": f" {self.documents} at random"}.get(self.mask, "")
        detail += " bias" if self.bias else ""
        detail += f" {self.dtype}" if self.model and self.dtype != "bfloat16" else ""
        whose = f"{self.group} {self.model}".strip()
        return f"{whose} B{self.B} T{self.T}{keys} H{self.H}{grouped} D{self.D} {self.mask}{detail}"

    @property
    def keys(self) -> int:
        return self.T if self.S is None else self.S

    @property
    def causal(self) -> bool:
        return self.mask != "full"

    @property
    def sliding_window(self) -> tuple[int, int] | None:
        """(left, right) beside the query's own position."""
        return None if self.window is None else (self.window - 1, 0)

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def amount(self, what: str) -> float:
        """Two matmuls over the pairs that are seen; 2.5 times that for a backward. Causal counts half of T * T."""
        T, W = self.T, self.window or 0
        pairs = {
            "full": T * self.keys,
            "causal": T * T / 2,
            "window": W * T - W * (W - 1) / 2,
            "documents": float((np.diff(self.offsets()).astype(np.int64) ** 2).sum()) / 2,
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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        q, k = (self.B, self.T, self.H, self.D), (self.B, self.keys, self.Hkv, self.D)
        bias = {"bias": (1, self.H, self.T, self.keys)} if self.bias else {}
        return {"query": q, "key": k, "value": k, "dout": q} | bias

    def structs(self) -> Arrays:
        structs = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in self.shapes().items()}
        if self.documents is not None:
            structs["segments"] = jax.ShapeDtypeStruct((1, self.T), jnp.int32)
            structs["offsets"] = jax.ShapeDtypeStruct((self.documents + 1,), jnp.int32)
        return structs

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        options = {"causal": self.causal, "sliding_window": self.sliding_window}
        options |= {"cum_seqlens_q": arrays.get("offsets"), "bias": arrays.get("bias")}
        return {name: arrays[name] for name in QKV} | options


def _dense(T: int, tokens: int, width: int, D: int, dtype: str, unit: str = "ms") -> list[Case]:
    B, H = tokens // T, width // D
    return [Case("dense", B, T, H, H, D, mask, dtype, unit) for mask in ("full", "causal")]


def _masked(T: int, H: int, Hkv: int, D: int, dtype: str) -> list[Case]:
    case = partial(Case, "masked", 1, T, H, Hkv, D, dtype=dtype)
    return [case("causal"), case("window", window=T // 16), case("documents", documents=16)]


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
        return [*_dense(T, T, 64 * H, 64, "float32"), *_masked(2 * T, H, H, 64, "float32")]
    dense = partial(_dense, tokens=16384, width=2048, dtype="bfloat16", unit="TFLOP/s")
    if quick:
        return dense(2048, D=128)
    lengths = [case for T in (2048, 16384) for D in (128, 64, 256) for case in dense(T, D=D)]
    most_telling = [case for D in (128, 64, 256) for case in dense(8192, D=D)]
    masked = [case for T, D in ((16384, 128), (8192, 64)) for case in _masked(T, 32, 8, D, "bfloat16")]
    return [*most_telling, *masked, *_of_models(), *lengths]


class Attention:
    """A case with its inputs on the device."""

    def __init__(self, case: Case):
        self.case = case
        rng = np.random.default_rng(0)
        self.arrays: Arrays = {
            name: jnp.asarray(rng.standard_normal(shape, np.float32).astype(jnp.dtype(case.dtype)))
            for name, shape in case.shapes().items()
        }
        if case.documents is not None:
            self.arrays["segments"] = jnp.asarray(case.segments()[None])
            self.arrays["offsets"] = jnp.asarray(case.offsets())
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

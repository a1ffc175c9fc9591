"""The cases, the tokens they are worth, their inputs, and what is right."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.measuring.benchmark import FORWARD, TRAINING, Arrays, DeviceLock
from benchmarks.model.transformer import WEIGHTS, layer, logits, losses, weight_shapes
from ejkernel.family import FLOOR, Truth
from ejkernel.kernels.softmax.reference import reference
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.types import MaskInfo

TRAINED = ("embedding", *WEIGHTS)


@dataclass(frozen=True)
class Case:
    """A training step on T tokens, of packed documents or one; or a decode loop: `group` says which.

    A loop continues B sequences of T cached tokens by `steps` tokens each. These are given, not drawn: every contender
    decodes the same.
    """

    group: str
    layers: int
    T: int
    H: int
    Hkv: int
    D: int
    dtype: str
    vocabulary: int
    documents: int = 1
    B: int = 1
    steps: int = 0
    page: int = 0
    unit: str = "ktoken/s"
    passes: tuple[str, ...] = (TRAINING,)

    @property
    def name(self) -> str:
        sizes = f"L{self.layers} H{self.H} Hkv{self.Hkv} D{self.D}"
        if self.decodes:
            return f"{self.group} B{self.B} S{self.T} page{self.page} {sizes} {self.steps} steps"
        what = "1 document" if self.documents == 1 else f"{self.documents} documents"
        return f"{self.group} T{self.T} {sizes} {what}"

    @property
    def decodes(self) -> bool:
        return self.group == "decode"

    @property
    def packed(self) -> bool:
        return self.documents > 1

    @property
    def operations(self) -> tuple[str, ...]:
        return ("decoding" if self.decodes else "training",)

    def facts(self) -> dict[str, Any]:
        """The memory of a training step is worth a table."""
        return dataclasses.asdict(self) | {"memory": not self.decodes}

    def amount(self, what: str) -> float:
        return float(self.B * self.steps if self.decodes else self.T)

    def weights(self) -> dict[str, tuple[int, ...]]:
        shapes = weight_shapes(self)
        return {"embedding": shapes["embedding"], **{name: (self.layers, *shapes[name]) for name in WEIGHTS}}

    def structs(self) -> Arrays:
        struct = jax.ShapeDtypeStruct
        # those trained are float32, and cast for each step
        structs: Arrays = {
            n: struct(shape, self.dtype if self.decodes else "float32") for n, shape in self.weights().items()
        }
        if self.decodes:
            pages = (self.B * self._pages, self.page, self.Hkv, self.D)
            structs["caches"] = [(struct(pages, self.dtype),) * 2 for _ in range(self.layers)]
            integers = {"tokens": (self.steps, self.B), "block_tables": (self.B, self._pages)}
        else:
            integers = {"tokens": (1, self.T), "targets": (1, self.T)}
            integers |= {"segments": (1, self.T), "offsets": (self.documents + 1,)} if self.packed else {}
            structs["dout"] = struct((1, self.T), "float32")
        return structs | {name: struct(shape, "int32") for name, shape in integers.items()}

    @property
    def _pages(self) -> int:
        """Of a sequence."""
        return -(-(self.T + self.steps) // self.page)

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        return {"case": self, "arrays": arrays}


def all_cases(backend: str, quick: bool) -> list[Case]:
    """The most telling first. A CPU gets sizes that it can do."""
    if backend == "cpu":
        layers, T, H, D = (2, 128, 4, 16) if quick else (4, 2048, 8, 64)
        case = partial(Case, layers=layers, H=H, Hkv=H // 2, D=D, dtype="float32", vocabulary=256)
        decode = case("decode", T=T, B=4, steps=8, page=32, passes=(FORWARD,))
        packed = case("training", T=T, documents=T // 32)
        return [packed, decode] if quick else [packed, decode, case("training", T=T)]
    case = partial(Case, layers=2 if quick else 8, H=32, Hkv=8, D=128, dtype="bfloat16", vocabulary=8192)
    return [
        case("training", T=16384, documents=16),
        case("decode", T=4096, B=32, steps=32, page=64, passes=(FORWARD,)),
        case("training", T=16384),
    ]


class Model:
    """A case with its inputs on the device."""

    def __init__(self, case: Case):
        self.case = case
        rng = np.random.default_rng(0)
        structs, keys = case.structs(), iter(jax.random.split(jax.random.key(0), 64 + 2 * case.layers))
        draw = jax.jit(_normal, static_argnums=(1, 2, 3))
        self.arrays: Arrays = {}
        for name in TRAINED:
            # a product is as large as what goes in
            scale = 1.0 if name == "embedding" else structs[name].shape[1] ** -0.5
            self.arrays[name] = draw(next(keys), structs[name].shape, structs[name].dtype, scale)
        for name in ("tokens", "targets"):
            if name in structs:
                drawn = rng.integers(0, case.vocabulary, structs[name].shape)
                self.arrays[name] = jnp.asarray(drawn, jnp.int32)
        if case.decodes:
            caches = structs["caches"]
            self.arrays["caches"] = [tuple(draw(next(keys), x.shape, x.dtype, 1.0) for x in pair) for pair in caches]
            table = rng.permutation(caches[0][0].shape[0]).reshape(structs["block_tables"].shape)
            self.arrays["block_tables"] = jnp.asarray(table, jnp.int32)
        else:
            self.arrays["dout"] = jnp.full((1, case.T), 1 / case.T, jnp.float32)
        if case.packed:
            cuts = np.sort(rng.choice(np.arange(1, case.T), case.documents - 1, replace=False))
            offsets = np.concatenate([[0], cuts, [case.T]])
            self.arrays["offsets"] = jnp.asarray(offsets, jnp.int32)
            self.arrays["segments"] = jnp.asarray(np.repeat(np.arange(case.documents), np.diff(offsets))[None], "int32")
        jax.block_until_ready(self.arrays)

    def truths(self, device_lock: DeviceLock) -> list[Truth]:
        """The loss of every token and the gradients of all weights, or the logits of every step."""
        defined = _decoded if self.case.decodes else _trained
        exact = self._run(defined, "float32", device_lock)
        naive = exact if self.case.dtype == "float32" else self._run(defined, self.case.dtype, device_lock)
        floor = FLOOR * self.case.layers * max(1.0, math.sqrt(self.case.T / 256))
        return [Truth.of(e, n, floor) for e, n in zip(exact, naive, strict=True)]

    def _run(self, defined: Any, dtype: str, device_lock: DeviceLock) -> list[Arrays]:
        # no autotuning: it would run on the device while another process measures
        options = {"xla_gpu_autotune_level": 0}
        with jax.default_matmul_precision("highest"):
            program = jax.jit(partial(defined, self.case, jnp.dtype(dtype)), compiler_options=options)
            compiled = program.lower(self.arrays).compile()
        with device_lock:
            return jax.block_until_ready(compiled(self.arrays))


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    return scale * jax.random.normal(key, shape, dtype)


# What is right ------------------------------------------------------------------------------------------------

# elements of a block of logits: the full matrix would not fit
_BLOCK = 2**25


def _trained(case: Case, dtype: Any, arrays: Arrays) -> list[Arrays]:
    """Losses and gradients with attention by its definition."""
    segments = arrays.get("segments", jnp.zeros((1, case.T), jnp.int32))
    attend = partial(_attention, dtype, segments)

    def losses_of(weights: Arrays) -> jax.Array:
        return losses(case, weights, arrays["tokens"], arrays["targets"], attend, dtype, keep=False)

    out, pull = jax.vjp(losses_of, {name: arrays[name] for name in TRAINED})
    (gradients,) = pull(arrays["dout"])
    return [{"out": out}, {f"d{name}": x for name, x in gradients.items()}]


def _attention(dtype: Any, segments: jax.Array, *qkv: jax.Array) -> jax.Array:
    """(1, T, H, D), a block of queries at a time; what blocks add to the gradients of keys is summed in float32."""
    query, key, value = (x.astype(jnp.float32) for x in qkv)
    _, T, H, D = query.shape
    rows = math.gcd(T, 1 << (max(1, _BLOCK // (H * T)).bit_length() - 1))
    positions = jnp.arange(T, dtype=jnp.int32)[None]

    @jax.checkpoint
    def block(start: jax.Array, query: jax.Array) -> jax.Array:
        cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=rows, axis=1)
        mask = MaskInfo.from_segments(cut(segments), segments, cut(positions), positions)
        call = canonicalise(*(x.astype(dtype) for x in (query, key, value)), mask_info=mask, causal=True)
        return reference(call, dtype)["out"]

    blocks = jnp.moveaxis(query.reshape(1, -1, rows, H, D), 1, 0)
    out = lax.map(lambda given: block(*given), (jnp.arange(0, T, rows), blocks))
    return jnp.moveaxis(out, 0, 1).reshape(1, T, H, D)


def _decoded(case: Case, dtype: Any, arrays: Arrays) -> list[Arrays]:
    """Logits of all steps at once: new tokens (B, steps) see the cached ones and those before them."""
    weights = {name: arrays[name].astype(dtype) for name in TRAINED}
    x = weights["embedding"][arrays["tokens"].T]
    for i, pages in enumerate(arrays["caches"]):
        cached = [contiguous(case, cache, arrays["block_tables"]).astype(dtype) for cache in pages]

        def attend(query: jax.Array, *new: jax.Array, cached: Any = cached) -> jax.Array:
            keys, values = (jnp.concatenate([old[:, : case.T], x], 1) for old, x in zip(cached, new, strict=True))

            def one(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                return reference(canonicalise(query[None], key[None], value[None], causal=True), dtype)["out"][0]

            return lax.map(lambda given: one(*given), (query, keys, values))

        x = layer(case, {name: weights[name][i] for name in WEIGHTS}, x, attend)
    return [{"out": jnp.swapaxes(logits(weights["embedding"], x), 0, 1)}]


def contiguous(case: Case, cache: jax.Array, table: jax.Array) -> jax.Array:
    """The pages of every sequence side by side: (B, pages * page, Hkv, D)."""
    return cache[table].reshape(case.B, -1, case.Hkv, case.D)

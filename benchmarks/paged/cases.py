"""The cases, the bytes they must read, their inputs, and what is right."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring.benchmark import FORWARD, Arrays, DeviceLock
from ejkernel.family import Truth
from ejkernel.kernels.softmax.reference import reference
from ejkernel.kernels.softmax.spec import canonicalise


@dataclass(frozen=True)
class Case:
    """Sequences of two kinds against pages in random order: `chunks` of new tokens, and single tokens to decode.

    A decoded token sees `keys` keys; the tokens of a chunk are all that there is of their sequence.
    """

    group: str
    decodes: int
    keys: int
    page: int
    H: int
    Hkv: int
    D: int
    dtype: str
    cache: str
    unit: str
    chunks: int = 0
    chunk: int = 0
    passes: tuple[str, ...] = (FORWARD,)

    @property
    def name(self) -> str:
        batches = [f"{self.chunks} x {self.chunk} tokens"] if self.chunks else []
        batches += [f"B{self.decodes} S{self.keys}"] if self.decodes else []
        cache = "" if self.cache == self.dtype else f" {self.cache}"
        return f"{self.group} {' + '.join(batches)} page{self.page} H{self.H} Hkv{self.Hkv} D{self.D}{cache}"

    @property
    def even(self) -> bool:
        """Whether the call itself says that every sequence has one new token."""
        return self.group == "decode"

    @property
    def scales(self) -> tuple[float, float] | None:
        """What keys and values of an 8-bit cache are multiplied by: they lie around 1, as others do."""
        if jnp.dtype(self.cache).itemsize > 1:
            return None
        return (1 / 32, 1 / 16) if self.cache == "int8" else (0.5, 2.0)

    @property
    def lengths(self) -> np.ndarray:
        return np.asarray([self.chunk] * self.chunks + [self.keys] * self.decodes, np.int32)

    @property
    def tokens(self) -> np.ndarray:
        """New ones of every sequence."""
        return np.asarray([self.chunk] * self.chunks + [1] * self.decodes, np.int32)

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def amount(self, what: str) -> float:
        """Bytes of keys and values, each read once."""
        return 2.0 * int(self.lengths.sum()) * self.Hkv * self.D * jnp.dtype(self.cache).itemsize

    @property
    def operations(self) -> tuple[str, ...]:
        return ("page_attention" if self.even else "ragged_page_attention",)

    def structs(self) -> Arrays:
        return {name: jax.ShapeDtypeStruct(*shape) for name, shape in self.shapes().items()}

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        """8-bit caches have scales."""
        given = dict(arrays)
        if not self.even:
            given["queries"] = given.pop("query")
        scales = {} if self.scales is None else dict(zip(("k_scale", "v_scale"), self.scales, strict=True))
        return given | {name: jnp.float32(scale) for name, scale in scales.items()}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        sequences, pages = len(self.lengths), -(-int(self.lengths.max()) // self.page)
        total = (sequences * pages, self.page)
        caches = {"key_cache": (*total, self.Hkv, self.D), "value_cache": (*total, self.Hkv, self.D)}
        if not self.even:
            caches = {"kv_pages": (*total, 2 * self.Hkv, self.D)}
        integers = {"context_lens": (sequences,), "block_tables": (sequences, pages)}
        if not self.even:
            integers |= {"query_start_loc": (sequences + 1,), "num_seqs": ()}
        shapes = {"query": ((int(self.tokens.sum()), self.H, self.D), self.dtype)}
        shapes |= {name: (shape, self.cache) for name, shape in caches.items()}
        return shapes | {name: (shape, "int32") for name, shape in integers.items()}


def all_cases(backend: str, quick: bool) -> list[Case]:
    """The most telling first. A CPU gets sizes that it can do."""
    if backend == "cpu":
        keys, page = (64, 16) if quick else (2048, 64)
        sizes = {"H": 8, "Hkv": 2, "D": 64, "dtype": "float32", "cache": "float32"}
        decode = partial(Case, "decode", unit="ms", **sizes)
        mixed = partial(Case, "mixed", unit="ms", **sizes)
        return [decode(4, keys, page), mixed(3, keys, page, chunks=1, chunk=keys // 2)]
    sizes = {"H": 32, "Hkv": 8, "D": 128, "dtype": "bfloat16", "cache": "bfloat16"}
    decode = partial(Case, "decode", unit="TB/s", **sizes)
    mixed = partial(Case, "mixed", unit="ms", **sizes)
    cases = [decode(32, 8192, 64), decode(32, 8192, 64, cache="float8_e4m3fn"), decode(1, 8192, 64)]
    if quick:
        return cases
    return [
        *cases,
        decode(128, 4096, 64),
        decode(1, 131072, 64),
        decode(32, 8192, 16),
        decode(32, 8192, 16, cache="float8_e4m3fn"),
        decode(32, 8192, 64, cache="float8_e5m2"),
        decode(32, 8192, 64, cache="int8"),
        mixed(60, 8192, 64, chunks=4, chunk=2048),
        mixed(0, 0, 64, chunks=4, chunk=2048),
        mixed(60, 8192, 64),
    ]


class Serving:
    """A case with its inputs on the device."""

    def __init__(self, case: Case):
        self.case = case
        keys = iter(jax.random.split(jax.random.key(0), 4))
        fill = jax.jit(_random, static_argnums=(1, 2))
        shapes = case.shapes()
        self.arrays: Arrays = {n: fill(next(keys), *shape) for n, shape in shapes.items() if shape[1] != "int32"}
        table = np.random.default_rng(0).permutation(np.prod(shapes["block_tables"][0]))
        integers = {"context_lens": case.lengths, "block_tables": table.reshape(shapes["block_tables"][0])}
        if not case.even:
            integers |= {"query_start_loc": np.cumsum([0, *case.tokens]), "num_seqs": np.asarray(len(case.lengths))}
        self.arrays |= {name: jnp.asarray(x, jnp.int32) for name, x in integers.items()}

    def truths(self, device_lock: DeviceLock) -> list[Truth]:
        """Of the output, by the definition in float32; the naive error by it in the case's dtype."""
        exact = self._defined(jnp.dtype("float32"), device_lock)
        # in float32 the naive computation is the definition itself
        naive = exact if self.case.dtype == "float32" else self._defined(jnp.dtype(self.case.dtype), device_lock)
        return [Truth.of({"out": exact}, {"out": naive})]

    def _defined(self, dtype: Any, device_lock: DeviceLock) -> jax.Array:
        # no autotuning: it would run on the device while another process measures
        options = {"xla_gpu_autotune_level": 0}
        program = jax.jit(partial(_defined, self.case, dtype), compiler_options=options).lower(self.arrays).compile()
        with device_lock:
            return jax.block_until_ready(program(self.arrays))


def _random(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    x = jax.random.normal(key, shape, jnp.bfloat16)
    return jnp.round(32 * x).astype(dtype) if dtype == "int8" else x.astype(dtype)


def _defined(case: Case, dtype: Any, arrays: Arrays) -> jax.Array:
    """The output by the definition of dense attention, one sequence after another."""
    outputs = []
    token, sequence = 0, 0
    for count, tokens, length in ((case.chunks, case.chunk, case.chunk), (case.decodes, 1, case.keys)):
        if not count:
            continue
        query = arrays["query"][token : token + count * tokens].reshape(count, tokens, case.H, case.D)
        tables = arrays["block_tables"][sequence : sequence + count, : -(-length // case.page)]
        one = partial(_one_sequence, case, dtype, length, arrays)
        outputs.append(jax.lax.map(one, (query, tables)).reshape(-1, case.H, case.D))
        token, sequence = token + count * tokens, sequence + count
    return jnp.concatenate(outputs)


# rows of logits at a time: all of a long chunk would not fit
_ROWS = 256


def _one_sequence(case: Case, dtype: Any, length: int, arrays: Arrays, given: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Of its queries, and its row of the table."""
    query, table = given
    if case.even:
        pages = arrays["key_cache"][table], arrays["value_cache"][table]
    else:
        both = arrays["kv_pages"][table]
        pages = both[:, :, ::2], both[:, :, 1::2]
    key, value = (
        (x.reshape(-1, *x.shape[2:])[None, :length].astype(jnp.float32) * scale).astype(dtype)
        for x, scale in zip(pages, case.scales or (1.0, 1.0), strict=True)
    )
    T = len(query)
    blocks = []
    for start in range(0, T, _ROWS):
        rows, seen = query[start : start + _ROWS], length - T + min(start + _ROWS, T)
        call = canonicalise(rows[None].astype(dtype), key[:, :seen], value[:, :seen], causal=True)
        blocks.append(reference(call, dtype)["out"][0])
    return jnp.concatenate(blocks)

"""The cases of paged attention, and what a case means. Everything that must not be read is poison in every case."""

import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.paged import calls
from ejkernel.kernels.paged.reference import reference
from ejkernel.modules import (
    decode_attention,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
    ragged_page_attention,
)
from ejkernel.ops import explain
from harness.checks import AS_USERS_COMPILE, Arrays, normal
from harness.platforms import Platform
from tolerances import assert_close

NOWHERE = 10**9  # a page id for slots that are not used

FUNCTIONS = {
    "page": (page_attention, calls.page_call),
    "ragged": (ragged_page_attention, calls.ragged_page_call),
    "prefill": (prefill_page_attention, calls.prefill_call),
    "decode": (decode_attention, calls.decode_call),
    "contiguous": (ragged_decode_attention, calls.ragged_decode_call),
}


@dataclass(frozen=True, eq=False)
class Case:
    """One call.

    Attributes:
        kind: which public function, a key of FUNCTIONS.
        lengths: keys of each sequence.
        queries: query tokens of each sequence; one number where all have the same.
        rows: query tokens in all, where there are more than the sequences have (ragged).
        padding: entries past num_seqs (ragged).
        separate: keys and values in two arrays of pages (ragged).
        spare: pages that no sequence has.
        width: pages of a row of the table; default: what the longest needs, and one more.
        strength: the size of queries, keys and values.
        sinks: shape of the sinks in letters, such as "H" or "H3".
        tiles: (block_q, block_k) for platforms that take them.
    """

    id: str
    lengths: tuple[int, ...] = (37, 0, 64, 1)
    queries: int | tuple[int, ...] = 1
    kind: str = "page"
    H: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int | None = None
    L: int = 16
    dtype: str = "float32"
    strength: float = 1.0
    cache: str | None = None
    starts: tuple[int, ...] | None = None
    rows: int | None = None
    padding: int = 0
    separate: bool = False
    spare: int = 2
    width: int | None = None
    sinks: int | None = None
    scales: bool = False
    tiles: tuple[int, int] = (4, 32)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def each(self) -> tuple[int, ...]:
        return self.queries if isinstance(self.queries, tuple) else (self.queries,) * len(self.lengths)

    @property
    def cache_dtype(self) -> Any:
        return jnp.dtype(self.cache or self.dtype)

    def numbers(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Random numbers as the cache would hold them, in float32."""
        x = self.strength * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        return np.round(x * 30) if self.cache == "int8" else x

    @property
    def poison(self) -> float:
        return 127.0 if self.cache == "int8" else np.nan

    def sequences(self, name: str, dim: int) -> list[np.ndarray]:
        """The keys or values (length, Hkv, dim) of each sequence; those before its start are poison."""
        found = [self.numbers(f"{name} {n}", (length, self.Hkv, dim)) for n, length in enumerate(self.lengths)]
        for start, x in zip(self.starts or (), found, strict=False):
            x[:start] = self.poison
        return found

    def table(self) -> np.ndarray:
        """Permuted pages, (N, W); slots that are not used lead nowhere."""
        need = [-(-length // self.L) for length in self.lengths]
        width = self.width or max(need) + 1
        free = iter(np.random.default_rng(3).permutation(sum(need) + self.spare))
        table = np.full((len(need) + self.padding, width), NOWHERE)
        table[1::2] = -NOWHERE
        for row, count in zip(table, need, strict=False):
            row[:count] = [next(free) for _ in range(count)]
        return table.astype(np.int32)

    def paged(self, parts: list[np.ndarray], table: np.ndarray) -> np.ndarray:
        """Those sequences in pages (P, L, Hkv, dim), poison elsewhere."""
        count = sum(-(-length // self.L) for length in self.lengths) + self.spare
        pages = np.full((count, self.L, *parts[0].shape[1:]), self.poison, np.float32)
        for row, part in zip(table, parts, strict=False):
            for slot in range(-(-len(part) // self.L)):
                piece = part[slot * self.L : (slot + 1) * self.L]
                pages[row[slot], : len(piece)] = piece
        return pages

    def arrays(self) -> Arrays:
        """The arrays of the public function, by name, on the device."""
        return jax.tree.map(jnp.asarray, self._arrays())

    def _arrays(self) -> Arrays:
        Dv, N = self.Dv or self.D, len(self.lengths)
        keys, values = self.sequences("key", self.D), self.sequences("value", Dv)
        total = self.rows or sum(self.each)
        query = self.strength * normal("query", (total, self.H, self.D), self.dtype)
        lens, table = np.asarray(self.lengths, np.int32), self.table()

        def cached(x: np.ndarray) -> np.ndarray:
            return x.astype(self.cache_dtype)

        extra: Arrays = {}
        if self.sinks is not None:
            extra["softmax_aux"] = normal("sinks", (self.H, self.sinks))
        if self.scales:
            extra |= {"k_scale": np.linspace(0.5, 1.5, self.Hkv, dtype=np.float32), "v_scale": np.float32(1.7)}
        if self.kind == "contiguous":
            S = (self.width or max(self.lengths) // self.L + 2) * self.L + 3
            whole = {}
            for name, parts in (("key", keys), ("value", values)):
                whole[name] = np.full((N, S, *parts[0].shape[1:]), self.poison, np.float32)
                for n, part in enumerate(parts):
                    whole[name][n, : len(part)] = part
            starts = np.asarray(self.starts or (0,) * N, np.int32)
            ends = {"sequence_start": starts, "sequence_end": lens}
            return {"query": query, **{name: cached(x) for name, x in whole.items()}, **ends, **extra}
        pages = cached(self.paged(keys, table)), cached(self.paged(values, table))
        if self.kind == "ragged":
            kv = pages
            if not self.separate:
                kv = np.stack(pages, 3).reshape(*pages[0].shape[:2], 2 * self.Hkv, self.D)
            garbage = np.full(self.padding, -NOWHERE, np.int32)
            start = np.concatenate([np.cumsum([0, *self.each], dtype=np.int32), garbage])
            lens = np.concatenate([lens, garbage])
            sequences = {"context_lens": lens, "block_tables": table, "query_start_loc": start, "num_seqs": np.int32(N)}
            return {"queries": query, "kv_pages": kv, **sequences, **extra}
        caches = {"key_cache": pages[0], "value_cache": pages[1]}
        if self.kind == "prefill":
            one = {"context_len": lens[0], "page_indices": table[0]}
            return {"query": query, **caches, **one, **extra}
        if self.kind == "decode":
            flat = {n.replace("cache", "buffer"): x.reshape(-1, *x.shape[2:]) for n, x in caches.items()}
            return {"query": query, **flat, "req_to_tokens": table, "seq_lens": lens, **extra}
        query = query.reshape(N, -1, self.H, self.D)
        return {"query": query, **caches, "context_lens": lens, "block_tables": table, **extra}

    @property
    def static(self) -> dict[str, Any]:
        return self.options | ({"page_size": self.L} if self.kind == "decode" else {})

    @lru_cache  # noqa: B019  cases live as long as the tests
    def expected(self) -> tuple[Arrays, Arrays | None]:
        """By the definition, in the shapes of the canonical call: in float32, and naively in the dtype of the case."""

        def both(arrays: Arrays) -> list[Arrays]:
            call = FUNCTIONS[self.kind][1](**arrays, **self.static)
            return [reference(call, dtype) for dtype in dict.fromkeys([jnp.dtype("float32"), jnp.dtype(self.dtype)])]

        exact, *naive = jax.jit(both)(self.arrays())
        return exact, naive[0] if naive else None

    def run(self, arrays: Arrays, platform: Platform, **options: Any) -> Arrays:
        """The public function on a platform, in the shapes of the canonical call."""
        how = {"platform": platform.name, **({"cfg": self.config} if platform.tiles else {}), **options}
        function = FUNCTIONS[self.kind][0]
        lse = self.kind != "ragged"
        result = function(**arrays, **self.static, **how, **({"return_lse": True} if lse else {}))
        out, logs = result if lse else (result, None)
        found = {"out": out.reshape(1, -1, self.H, out.shape[-1])}
        if logs is not None:
            batched = self.kind != "prefill"
            logs = jnp.moveaxis(logs.reshape(len(self.lengths), self.H, -1), 0, 1) if batched else logs
            found["lse"] = logs.reshape(1, self.H, -1)
        return found

    @property
    def config(self) -> dict[str, int]:
        return dict(zip(("block_q", "block_k"), self.tiles, strict=True))


def refused(platform: Platform) -> bool:
    """Whether a platform has no kernel of this family; `check_case` checks that it says so."""
    with platform.context():
        return platform.name in explain(page_attention, **CASES[0].arrays()).refusals


def check_case(case: Case, platform: Platform, *, optimised: bool = False, **options: Any) -> None:
    """A case on a platform against the definition; a platform that refuses must say why."""
    arrays = case.arrays()
    with platform.context():
        refusals = explain(FUNCTIONS[case.kind][0], **arrays, **case.static).refusals
        if platform.name in refusals:
            with pytest.raises(NotImplementedError) as raised:
                case.run(arrays, platform, **options)
            assert all(reason in str(raised.value) for reason in refusals[platform.name])
            return
        compiled = AS_USERS_COMPILE if optimised and jax.default_backend() == "cpu" else None
        got = jax.jit(lambda a: case.run(a, platform, **options), compiler_options=compiled)(arrays)
    exact, naive = case.expected()
    assert got["out"].dtype == case.dtype
    assert_close(got, {name: exact[name] for name in got}, naive and {name: naive[name] for name in got}, "output")


MIXED = (1, 9, 0, 1, 30, 3)
MIXED_LENGTHS = (50, 9, 13, 0, 41, 3)
HALF = {"dtype": "bfloat16"}

DECODES = (
    Case("plain"),
    Case("page-size-1", L=1),
    Case("page-size-256", L=256, lengths=(300, 5), width=2),
    Case("page-size-12", L=12, lengths=(37, 24, 5)),
    Case("page-size-64", L=64, lengths=(200, 64, 5), tiles=(4, 16)),
    Case("all-full", lengths=(48, 48), width=3),
    Case("all-empty", lengths=(0, 0), width=2),
    Case("mqa-8", H=8, Hkv=1, **HALF),
    Case("mha", H=3, Hkv=3),
    Case("gqa-3", H=6, Hkv=2),
    Case("many-heads", H=40, Hkv=1, lengths=(21, 40), **HALF),
    Case("head-dim-40-24", D=40, Dv=24, **HALF),
    Case("head-dim-128", D=128, lengths=(70, 3), **HALF),
    Case("head-dim-256", D=256, lengths=(33, 3), **HALF),
    Case("float16", dtype="float16"),
    Case("float16-strong", dtype="float16", strength=100.0, queries=3, lengths=(37, 3, 64)),
    Case("window", options={"sliding_window": 9}),
    Case("window-0", options={"sliding_window": (0, 5)}),
    Case("window-over-pages", L=4, lengths=(100, 41), options={"sliding_window": (20, 0)}, **HALF),
    Case("sinks", sinks=1, **HALF),
    Case("sinks-3-window", sinks=3, options={"sliding_window": 5}),
    Case("soft-cap", options={"logits_soft_cap": 1.5}),
    Case("scale-negative", options={"softmax_scale": -0.4}),
    Case("splits-3", options={"num_splits": 3}, L=4, **HALF),
    Case("splits-8-sinks-window", sinks=1, options={"num_splits": 8, "sliding_window": 30}, L=4),
    Case("splits-beyond-keys", options={"num_splits": 16}, lengths=(5, 0, 1)),
    Case("several-tokens", queries=3, lengths=(37, 3, 64)),
    Case("several-tokens-window", queries=4, lengths=(37, 4, 64), options={"sliding_window": 6}, **HALF),
    Case("more-tokens-than-keys", queries=3, lengths=(37, 1, 0)),
    Case("several-tokens-splits", queries=2, lengths=(64, 30), options={"num_splits": 4}, sinks=1),
)
CACHES = (
    Case("e4m3", cache="float8_e4m3fn", scales=True, **HALF),
    Case("e5m2", cache="float8_e5m2", scales=True, **HALF),
    Case("int8", cache="int8", scales=True, options={"softmax_scale": 0.01}, **HALF),
    Case("int8-float32", cache="int8", scales=True, options={"softmax_scale": 0.01, "num_splits": 2}),
    Case(
        "e4m3-ragged", cache="float8_e4m3fn", scales=True, kind="ragged", queries=MIXED, lengths=MIXED_LENGTHS, **HALF
    ),
    Case("e4m3-d128-small-pages", cache="float8_e4m3fn", scales=True, lengths=(129, 0, 17), D=128, **HALF),
    Case("scales-of-a-plain-cache", scales=True, options={"logits_soft_cap": 3.0}),
)
RAGGED = (
    Case("mixed", kind="ragged", queries=MIXED, lengths=MIXED_LENGTHS),
    Case("mixed-bfloat16", kind="ragged", queries=MIXED, lengths=MIXED_LENGTHS, rows=50, padding=3, **HALF),
    Case("mixed-everything", kind="ragged", queries=MIXED, lengths=MIXED_LENGTHS, rows=50, padding=3, sinks=2, L=4,
         H=6, scales=True, options={"sliding_window": 11, "logits_soft_cap": 2.0}),
    Case("ragged-decode", kind="ragged", queries=(1, 1, 1), lengths=(40, 17, 1), rows=7, padding=1),
    Case("ragged-prefill", kind="ragged", queries=(40, 23), lengths=(40, 30), H=8, L=8, **HALF),
    Case("float16-strong-mixed", dtype="float16", strength=100.0, kind="ragged", queries=MIXED, lengths=MIXED_LENGTHS),
    Case("ragged-nothing", kind="ragged", queries=(0, 0), lengths=(0, 20), rows=5),
    Case("mixed-arrays", kind="ragged", queries=MIXED, lengths=MIXED_LENGTHS, rows=50, padding=3, separate=True, Dv=24),
    Case("ragged-d128", kind="ragged", queries=(20, 1), lengths=(40, 30), D=128, **HALF),
)  # fmt: skip
OTHERS = (
    Case("prefill", kind="prefill", queries=(30,), lengths=(50,)),
    Case("prefill-window-sinks", kind="prefill", queries=(30,), lengths=(50,), sinks=1, options={"sliding_window": 8},
         **HALF),
    Case("prefill-whole", kind="prefill", queries=(33,), lengths=(33,), H=6, Hkv=2, D=40, **HALF),
    Case("flat-buffer", kind="decode", L=1, lengths=(20, 0, 7)),
    Case("flat-buffer-pages", kind="decode", L=8, sinks=1, options={"num_splits": 2}, **HALF),
    Case("contiguous", kind="contiguous", starts=(5, 0, 30, 0)),
    Case("contiguous-bfloat16", kind="contiguous", lengths=(37, 20, 64), starts=(0, 20, 63), sinks=1, **HALF),
    Case("contiguous-window", kind="contiguous", lengths=(37, 20, 64), starts=(33, 0, 0),
         options={"sliding_window": 9}),
    Case("contiguous-e4m3", kind="contiguous", cache="float8_e4m3fn", starts=(0, 0, 9, 0), **HALF),
)  # fmt: skip

CASES = (*DECODES, *CACHES, *RAGGED, *OTHERS)

# what interpreters, which take long, are given: every feature of a kernel once, and pairs that meet in one
CORE_IDS = (
    "plain", "page-size-12", "page-size-64", "all-empty", "mqa-8", "head-dim-40-24", "head-dim-256", "float16",
    "float16-strong", "float16-strong-mixed", "window-over-pages", "sinks-3-window", "soft-cap",
    "splits-8-sinks-window", "several-tokens-window", "more-tokens-than-keys", "e4m3", "e5m2", "int8", "e4m3-ragged",
    "e4m3-d128-small-pages", "mixed-bfloat16", "mixed-everything", "mixed-arrays", "ragged-nothing", "ragged-prefill",
    "prefill-window-sinks", "flat-buffer-pages", "contiguous-bfloat16", "contiguous-window", "contiguous-e4m3",
)  # fmt: skip
CORE = tuple(case for case in CASES if case.id in CORE_IDS)
# which differ in sizes that make paths of kernels: to XLA each is one of the others, or part of one
FOR_GPUS_IDS = (
    "page-size-64", "all-full", "mha", "gqa-3", "many-heads", "head-dim-128", "float16", "window", "sinks", "soft-cap",
    "several-tokens", "int8", "e4m3-d128-small-pages", "mixed", "ragged-decode", "ragged-d128", "prefill",
    "flat-buffer", "contiguous",
)  # fmt: skip
FOR_GPUS = tuple(case for case in CASES if case.id in FOR_GPUS_IDS)

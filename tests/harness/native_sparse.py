"""The cases of attention over selected blocks, and what a case means."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.native_sparse.reference import reference, visible
from ejkernel.kernels.native_sparse.spec import canonicalise
from ejkernel.modules import selected_attention
from ejkernel.ops import explain
from harness.checks import Arrays, check, normal
from harness.platforms import Platform
from harness.poison import filled, poisons


@dataclass(frozen=True, eq=False)
class Case:
    """One call of `selected_attention`.

    Attributes:
        K: indices of a query: any numbers from -2 to behind the last block.
        near: whether neighbouring queries have the same ones.
        counts: whether each query has a count of its own.
        cu: cumulative lengths of packed sequences.
        lengths: of caches.
        strength: the size of query and key. Much larger, gradients show that `delta` is of a rounded output.
        config: of Triton.
    """

    id: str
    B: int = 1
    T: int = 40
    S: int | None = None
    H: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int | None = None
    K: int = 3
    block_size: int = 16
    dtype: str = "float32"
    strength: float = 1.0
    near: bool = False
    counts: bool = False
    sinks: bool = False
    lse: bool = True
    cu: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def arrays(self) -> Arrays:
        """The floats of the public function, by name."""
        S, Dv = self.S or self.T, self.Dv or self.D
        shapes = {
            "query": (self.B, self.T, self.H, self.D),
            "key": (self.B, S, self.Hkv, self.D),
            "value": (self.B, S, self.Hkv, Dv),
        }
        found = {name: normal(name, shape, self.dtype) for name, shape in shapes.items()}
        found |= {name: self.strength * found[name] for name in ("query", "key")}
        return found | ({"softmax_aux": normal("sinks", (self.H,))} if self.sinks else {})

    def indices(self) -> np.ndarray:
        rng = np.random.default_rng(self.T + self.K)
        blocks = -(-(self.S or self.T) // self.block_size)
        drawn = rng.integers(-2, blocks + 1, (self.B, self.T, self.Hkv, self.K))
        if self.near:
            drawn = np.where(rng.random(drawn.shape) < 0.9, drawn[:, :1], drawn)
        return drawn.astype(np.int32)

    def keywords(self, arrays: Arrays) -> dict[str, Any]:
        given = dict(arrays) | {"block_indices": self.indices(), "block_size": self.block_size}
        if self.counts:
            given["block_counts"] = np.random.default_rng(7).integers(0, self.K + 2, (self.B, self.T, self.Hkv))
        if self.cu is not None:
            given["cu_seqlens"] = np.asarray(self.cu, np.int32)
        if self.lengths is not None:
            given["kv_lengths"] = np.asarray(self.lengths, np.int32)
        return given | {"return_lse": self.lse} | self.options


def named(result: Any) -> Arrays:
    out, lse = result if isinstance(result, tuple) else (result, None)
    # where a query sees nothing it is -inf, which has no error
    return {"out": out} | ({} if lse is None else {"lse": jnp.where(jnp.isneginf(lse), -1.0, lse)})


def call_case(case: Case, platform: Platform, arrays: Arrays, **how: Any) -> Arrays:
    if case.config and platform.name == "triton":
        how["cfg"] = case.config
    with platform.context():
        return named(selected_attention(**case.keywords(arrays), platform=platform.name, **how))


def definition(case: Case, arrays: Arrays, dtype: Any) -> Arrays:
    found = reference(canonicalise(**case.keywords(arrays)), dtype)
    return named((found["out"], found["lse"]) if case.lse else found["out"])


def poisoned(case: Case, arrays: Arrays) -> Arrays:
    """The arrays with poison in queries that see nothing and keys that nobody sees."""
    seen = np.asarray(visible(canonicalise(**case.keywords(arrays))))  # (B, Hkv, T, S)
    nobody, nothing = ~seen.any((1, 2)), ~seen.any((1, 3))
    arrays = dict(arrays)
    for name, rows in (("query", nothing), ("key", nobody), ("value", nobody)):
        arrays[name] = filled(arrays[name], rows, poisons(rows.shape, arrays[name].dtype))
    return arrays


def check_case(case: Case, platform: Platform, *, optimised: bool = False) -> None:
    """Outputs and every gradient; a platform that refuses a case must say why."""
    with platform.context():
        told = explain(selected_attention, **case.keywords(case.arrays()), platform=platform.name)
    if reasons := told.refusals.get(platform.name, []):
        with pytest.raises(NotImplementedError) as raised:
            call_case(case, platform, case.arrays())
        assert all(reason in str(raised.value) for reason in reasons)
        return
    check(
        partial(call_case, case, platform),
        partial(definition, case),
        case.arrays(),
        case.dtype,
        optimised=optimised,
        poison=partial(poisoned, case),
        poison_only=platform.interpreted,
        name=f"selected {case.id}",
    )


BY_KEYS = {"order": "keys", "rows": 16, "block_k": 16, "segment": 24}
BY_QUERIES = {"order": "queries", "rows": 16, "block_k": 16, "segment": 24}
_packed = partial(Case, T=60, cu=(0, 0, 7, 7, 43, 44, 55))

CASES = (
    Case("plain", B=2, T=70, config=BY_QUERIES),
    Case("plain-by-keys", B=2, T=70, config=BY_KEYS | {"segment": 8}),
    Case("near", near=True, K=4, config=BY_QUERIES),
    Case("near-by-keys", B=2, near=True, K=4, sinks=True, config=BY_KEYS),
    Case("sinks-counts", B=2, sinks=True, counts=True, config=BY_QUERIES),
    Case("one-token", T=1, K=1),
    Case("no-lse", lse=False),
    Case("mha", H=2, config=BY_KEYS),
    Case("mha-by-queries", H=2, T=40, config=BY_QUERIES),
    Case("mqa-6", T=33, H=6, Hkv=1, D=40, Dv=24, config=BY_QUERIES),
    Case("mqa-16", H=16, Hkv=1, T=40),
    Case("mqa-64", H=64, Hkv=1, T=9),
    Case("tokens", block_size=1, K=20, T=33, config=BY_QUERIES),
    Case("tokens-by-keys", block_size=1, K=9, T=33, Hkv=1, config=BY_KEYS),
    Case("tokens-many", block_size=1, K=80, T=12, H=2, Hkv=1, config=BY_QUERIES),
    Case("block-5", block_size=5, K=6, config=BY_KEYS),
    Case("block-32", block_size=32, T=130, config=BY_QUERIES),
    Case("block-64", block_size=64, T=200),
    Case("block-128", block_size=128, T=150, H=2, Hkv=1, K=2, config=BY_QUERIES | {"block_k": 64}),
    Case("block-256", block_size=256, T=300, K=2),
    Case("block-40", block_size=40, T=60, H=2, Hkv=1, config=BY_KEYS),
    Case("cache", B=2, T=3, S=70, config=BY_QUERIES),
    Case("cache-lengths", B=2, T=3, S=70, lengths=(2, 55), config=BY_QUERIES),
    Case("cache-lengths-by-keys", B=2, T=3, S=70, lengths=(70, 33), sinks=True, config=BY_KEYS),
    Case("scale-negative", options={"softmax_scale": -0.7}, config=BY_QUERIES),
    Case("bfloat16", dtype="bfloat16", D=64, config=BY_QUERIES),
    Case("bfloat16-by-keys", dtype="bfloat16", D=64, Dv=32, config=BY_KEYS),
    Case("float16", B=2, T=70, dtype="float16", K=4),
    Case("float16-strong", B=2, T=70, dtype="float16", strength=4.0, config=BY_QUERIES),
    Case("float16-strong-by-keys", B=2, T=70, dtype="float16", strength=4.0, config=BY_KEYS),
    _packed("packed", config=BY_QUERIES),
    _packed("packed-by-keys", sinks=True, config=BY_KEYS),
    _packed("packed-tokens", block_size=3, K=5, config=BY_KEYS),
    _packed("packed-nothing", T=20, cu=(0, 0, 0)),
)

# what the interpreter, which takes long, is given
CORE_IDS = (
    "near", "near-by-keys", "sinks-counts", "one-token", "mqa-6", "mha", "tokens-by-keys", "tokens-many", "block-5",
    "block-40", "cache-lengths", "cache-lengths-by-keys", "float16-strong", "float16-strong-by-keys", "bfloat16",
    "bfloat16-by-keys", "packed", "packed-by-keys", "packed-tokens", "packed-nothing",
)  # fmt: skip
CORE = tuple(case for case in CASES if case.id in CORE_IDS)
# which differ in their config, or in sizes that make paths of kernels: to XLA each is one of the others
FOR_GPUS_IDS = (
    "plain-by-keys", "near", "mha-by-queries", "mqa-16", "tokens-by-keys", "block-32", "block-64", "block-40", "cache",
    "cache-lengths", "float16-strong-by-keys", "bfloat16", "packed",
)  # fmt: skip
FOR_GPUS = tuple(case for case in CASES if case.id in FOR_GPUS_IDS)

"""The cases, the products they need, their inputs, and what is right."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring.benchmark import BOTH, FORWARD, Arrays, DeviceLock
from ejkernel.family import FLOOR, Truth
from ejkernel.kernels.softmax.reference import reference as softmax
from ejkernel.kernels.softmax.spec import Spec
from ejkernel.ops import Call

TRAINED = ("query", "key", "value")
BLOCK = 64


@dataclass(frozen=True)
class Case:
    """Attention to K blocks of 64 tokens; `group` says whether neighbouring queries share blocks."""

    group: str
    T: int
    H: int
    Hkv: int
    D: int
    K: int
    dtype: str
    unit: str = "ms"
    passes: tuple[str, ...] = (FORWARD, BOTH)

    @property
    def name(self) -> str:
        return f"{self.group} T{self.T} H{self.H} Hkv{self.Hkv} D{self.D} {self.K} blocks"

    @property
    def operations(self) -> tuple[str, ...]:
        return ("selected_attention",)

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def amount(self, what: str) -> float:
        """Products of the pairs that are seen: two of them, and five more backwards."""
        pairs = float(self.T) * self.H * min(self.K * BLOCK, self.T)
        return (4.0 if what == FORWARD else 14.0) * pairs * self.D

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of those in the case's dtype."""
        query, key = (1, self.T, self.H, self.D), (1, self.T, self.Hkv, self.D)
        return {"query": query, "key": key, "value": key, "dout": query}

    def structs(self) -> Arrays:
        structs = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in self.shapes().items()}
        return structs | {"block_indices": jax.ShapeDtypeStruct((1, self.T, self.Hkv, self.K), "int32")}

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        given = {name: x for name, x in arrays.items() if name != "dout" and x is not None}
        return given | {"block_size": BLOCK}


def all_cases(backend: str, quick: bool) -> list[Case]:
    """The most telling first: a run may be cut short. A CPU gets sizes that it can do."""
    if backend == "cpu":
        T, H, Hkv, D, K = (256, 2, 1, 16, 2) if quick else (4096, 8, 2, 64, 8)
        case = partial(Case, H=H, Hkv=Hkv, D=D, K=K, dtype="float32")
        return [case("shared blocks", T), case("random blocks", T)]
    case = partial(Case, H=64, Hkv=4, D=128, K=16, dtype="bfloat16")
    first = [case("shared blocks", 32768), case("random blocks", 32768)]
    return first if quick else [*first, case("shared blocks", 65536), case("random blocks", 65536)]


# how often a query keeps a block of the one before it
KEPT = {"shared blocks": 0.9, "random blocks": 0.0}


def drawn_blocks(case: Case) -> np.ndarray:
    """(1, T, Hkv, K): different blocks up to a query's own, -1 where there are fewer than K."""
    draw = Random(1).random
    heads = [list(_drawn_rows(case, draw)) for _ in range(case.Hkv)]
    return np.asarray(heads, np.int32).swapaxes(0, 1)[None]


def _drawn_rows(case: Case, draw: Callable[[], float]) -> Iterator[list[int]]:
    """The blocks of each query of a head."""
    blocks: list[int] = []
    kept = KEPT[case.group]
    for seen_blocks in (t // BLOCK + 1 for t in range(case.T)):
        blocks = [block for block in blocks if draw() < kept]
        missing = min(case.K, seen_blocks) - len(blocks)
        while missing:
            block = int(draw() * seen_blocks)
            if block not in blocks:
                blocks.append(block)
                missing -= 1
        yield blocks + [-1] * (case.K - len(blocks))


class Selected:
    """A case with its inputs on the device."""

    def __init__(self, case: Case):
        self.case = case
        rng = np.random.default_rng(0)
        shapes = case.shapes().items()
        drawn = {name: rng.standard_normal(shape, np.float32).astype(jnp.dtype(case.dtype)) for name, shape in shapes}
        self.arrays: Arrays = {name: jnp.asarray(x) for name, x in drawn.items()}
        self.arrays["block_indices"] = jnp.asarray(drawn_blocks(case))
        jax.block_until_ready(self.arrays)  # PyTorch reads the same memory and knows nothing of JAX's streams

    def truths(self, device_lock: DeviceLock) -> list[Truth]:
        """Of the output and the gradients, by the definition in float32; the naive errors by it in the case's dtype."""
        exact = self._defined(jnp.dtype("float32"), device_lock)
        naive = exact if self.case.dtype == "float32" else self._defined(jnp.dtype(self.case.dtype), device_lock)
        return [Truth.of(e, n, FLOOR) for e, n in zip(exact, naive, strict=True)]

    def _defined(self, dtype: Any, device_lock: DeviceLock) -> list[Arrays]:
        # no autotuning: it would run on the device while another process measures
        options = {"xla_gpu_autotune_level": 0}
        program = jax.jit(partial(_defined, self.case, dtype), compiler_options=options).lower(self.arrays).compile()
        with device_lock:
            return jax.block_until_ready(program(self.arrays))


# queries at a time: the keys of all would not fit
_ROWS = 64


def _defined(case: Case, dtype: Any, arrays: Arrays) -> list[Arrays]:
    """Output and gradients by the definition of softmax attention, of each query over its own blocks.

    The family's definition, over all keys under a mask, would be `T / (K * BLOCK)` times the work.
    """
    trained = {name: arrays[name].astype(dtype).astype(jnp.float32) for name in TRAINED}

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(-1, _ROWS, *x.shape[2:])

    def attend(trained: Arrays) -> jax.Array:
        some = jax.checkpoint(partial(_rows_defined, case, dtype, trained["key"][0], trained["value"][0]))
        chunks = (rows(trained["query"]), rows(arrays["block_indices"]), jnp.arange(case.T).reshape(-1, _ROWS))
        return jax.lax.map(lambda chunk: some(*chunk), chunks).reshape(1, case.T, case.H, case.D)

    out, pull = jax.vjp(attend, trained)
    (gradients,) = pull(arrays["dout"].astype(out.dtype))
    return [{"out": out}, {f"d{name}": x.astype(dtype) for name, x in gradients.items()}]


def _rows_defined(
    case: Case, dtype: Any, key: jax.Array, value: jax.Array, query: jax.Array, indices: jax.Array, position: jax.Array
) -> jax.Array:
    """(R, H, D) of some queries: each is a batch of its own, with keys of its own."""
    at = indices[..., None] * BLOCK + jnp.arange(BLOCK)  # (R, Hkv, K, BLOCK)
    seen = (indices[..., None] >= 0) & (at <= position[:, None, None, None])

    def gathered(x: jax.Array) -> jax.Array:
        """(R, K * BLOCK, Hkv, D), whose gradients are summed in float32."""
        blocks = jnp.moveaxis(x.reshape(-1, BLOCK, case.Hkv, case.D), 2, 0)  # (Hkv, N, BLOCK, D)
        picked = jax.vmap(lambda blocks, at: blocks[at], in_axes=(0, 1), out_axes=3)(blocks, jnp.maximum(indices, 0))
        return picked.reshape(len(picked), -1, case.Hkv, case.D).astype(dtype)

    # the heads that share keys are queries at one position
    grouped = query.reshape(len(query), case.Hkv, -1, case.D).swapaxes(1, 2).astype(dtype)  # (R, G, Hkv, D)
    mask = seen.reshape(len(query), case.Hkv, 1, -1)
    named = {"query": grouped, "key": gathered(key), "value": gathered(value), "mask": mask}
    return softmax(Call(Spec(scale=case.D**-0.5), named), dtype)["out"].swapaxes(1, 2).reshape(query.shape)

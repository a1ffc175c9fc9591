"""The cases, the products they need, their inputs, and what is right."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.about.answers import FLOOR, Truth
from ejkernel.about.benchmark import BOTH, FORWARD, Arrays, Quiet
from ejkernel.kernels.native_sparse.reference import reference
from ejkernel.kernels.native_sparse.spec import canonicalise
from ejkernel.ops import Call

TRAINED = ("query", "key", "value")
BLOCK = 64


@dataclass(frozen=True)
class Case:
    """Attention to K blocks of 64 tokens; `group` says whether neighbouring queries choose alike."""

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


def drawn_blocks(case: Case) -> np.ndarray:
    """(1, T, Hkv, K): any blocks up to a query's own; where they are shared, nine of ten are the neighbour's."""
    rng = np.random.default_rng(1)
    own = np.arange(case.T) // BLOCK
    draws = np.floor(rng.random((case.T, case.Hkv, case.K)) * (own + 1)[:, None, None]).astype(np.int32)
    if case.group == "shared blocks":
        anew = rng.random(draws.shape) < 0.1
        anew[0] = True
        # each is that of the last query that drew anew
        at = np.maximum.accumulate(np.where(anew, np.arange(case.T)[:, None, None], 0), axis=0)
        draws = np.take_along_axis(draws, at, axis=0)
    return draws[None]


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

    def truths(self, quiet: Quiet) -> list[Truth]:
        """Of the output and the gradients, by the definition in float32; the naive errors by it in the case's dtype."""
        exact = self._defined(jnp.dtype("float32"), quiet)
        naive = exact if self.case.dtype == "float32" else self._defined(jnp.dtype(self.case.dtype), quiet)
        return [Truth.of(e, n, FLOOR) for e, n in zip(exact, naive, strict=True)]

    def _defined(self, dtype: Any, quiet: Quiet) -> list[Arrays]:
        # no autotuning: it would run on the device while another process measures
        options = {"xla_gpu_autotune_level": 0}
        program = jax.jit(partial(_defined, self.case, dtype), compiler_options=options).lower(self.arrays).compile()
        with quiet:
            return jax.block_until_ready(program(self.arrays))


# queries at a time: the logits of all would not fit
_ROWS = 64


def _defined(case: Case, dtype: Any, arrays: Arrays) -> list[Arrays]:
    """Output and gradients by the definition, a few queries at a time."""
    trained = {name: arrays[name].astype(dtype) for name in TRAINED}
    call = canonicalise(**trained, block_indices=arrays["block_indices"], block_size=BLOCK)

    def rows(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(1, -1, _ROWS, *x.shape[2:]), 1, 0)

    def attend(trained: Arrays) -> jax.Array:
        @jax.checkpoint
        def some(part: Arrays) -> jax.Array:
            whole = {"key": trained["key"], "value": trained["value"], "starts": call["starts"]}
            return reference(Call(call.spec, whole | part), dtype)["out"]

        parts = {"query": rows(trained["query"]), "indices": rows(call["indices"]), "limits": rows(call["limits"])}
        return jnp.moveaxis(jax.lax.map(some, parts), 0, 1).reshape(1, case.T, case.H, case.D)

    out, pull = jax.vjp(attend, trained)
    (gradients,) = pull(arrays["dout"].astype(out.dtype))
    return [{"out": out}, {f"d{name}": x for name, x in gradients.items()}]

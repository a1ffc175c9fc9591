"""The cases, the bytes they must move, their inputs, and what is right."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.measuring.benchmark import BOTH, FORWARD, Arrays, Chain, DeviceLock
from ejkernel.family import FLOOR, Truth
from ejkernel.kernels.linear.reference import reference
from ejkernel.kernels.linear.spec import canonicalise, lightning_decay

# `g` is there with decays per channel only
TRAINED = ("query", "key", "value", "g")
LAYER = {"layer_idx": 0, "num_layers": 12}


@dataclass(frozen=True)
class Case:
    """Lightning attention, GLA with decays per channel, or a decode step of the former: `group` says which.

    Documents are packed, and equally long.
    """

    group: str
    B: int
    T: int
    H: int
    D: int
    dtype: str
    unit: str = "ms"
    documents: int | None = None
    passes: tuple[str, ...] = (FORWARD, BOTH)

    @property
    def name(self) -> str:
        packed = "" if self.documents is None else f" {self.documents} documents"
        return f"{self.group} B{self.B} T{self.T} H{self.H} D{self.D}{packed}"

    @property
    def rows(self) -> int:
        """Sequences, all of one length."""
        return self.documents or self.B

    @property
    def gated(self) -> bool:
        return self.group == "gla"

    @property
    def decodes(self) -> bool:
        return self.group == "decode"

    @property
    def operations(self) -> tuple[str, ...]:
        return ("gla_attention" if self.gated else "lightning_attention",)

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def amount(self, what: str) -> float:
        """Bytes: every array read and written once; of a decode, the states."""
        if self.decodes:
            return 2.0 * 4 * self.B * self.H * self.D * self.D
        # q, k, v (g) in, out; a backward reads them and dout and writes as many gradients
        inputs = 4 if self.gated else 3
        arrays = inputs + 1 if what == FORWARD else 3 * inputs + 2
        return float(arrays) * self.B * self.T * self.H * self.D * jnp.dtype(self.dtype).itemsize

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of those in the case's dtype."""
        names = ("query", "key", "value", "dout", *(("g",) if self.gated else ()))
        return dict.fromkeys(names, (self.B, self.T, self.H, self.D))

    def structs(self) -> Arrays:
        structs = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in self.shapes().items()}
        if self.decodes:
            structs["initial_state"] = jax.ShapeDtypeStruct((self.B, self.H, self.D, self.D), jnp.float32)
        if self.documents is not None:
            structs["cu_seqlens"] = jax.ShapeDtypeStruct((self.documents + 1,), jnp.int32)
        return structs

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        given = {name: x for name, x in arrays.items() if name != "dout" and x is not None}
        given |= {} if self.gated else LAYER
        return given | ({"return_state": True} if self.decodes else {})


def chain(case: Case, what: str) -> Chain | None:
    """A decode step is over before the host has started the next, which begins with the state it left."""
    return ({"query": "out", "initial_state": "out 1"}, 20) if case.decodes else None


def all_cases(backend: str, quick: bool) -> list[Case]:
    """The most telling first: a run may be cut short. A CPU gets sizes that it can do."""
    if backend == "cpu":
        T, H, D = (128, 2, 16) if quick else (8192, 4, 64)
        case = partial(Case, H=H, D=D, dtype="float32")
    else:
        T, H, D = 2048, 16, 128
        case = partial(Case, H=H, D=D, dtype="bfloat16")
    unit = "ms" if backend == "cpu" else "TB/s"
    decode = case("decode", 4 if backend == "cpu" else 64, 1, unit=unit, passes=(FORWARD,))
    if backend == "cpu":
        return [case("lightning", 1, T), case("gla", 1, T), case("lightning", 1, T, documents=16), decode]
    first = [case("lightning", 8, T), case("gla", 8, T), decode]
    if quick:
        return first
    long = case("lightning", 1, 16384)
    return [
        *first,
        case("lightning", 1, 65536),
        case("gla", 1, 16384),
        long,
        dataclasses.replace(long, documents=16),
    ]


class Recurrence:
    """A case with its inputs on the device."""

    def __init__(self, case: Case):
        self.case = case
        rng = np.random.default_rng(0)

        def draw(shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))

        self.arrays: Arrays = {name: draw(shape, case.dtype) for name, shape in case.shapes().items()}
        if case.gated:
            # as a gate's logarithm of a sigmoid over 16 has them
            self.arrays["g"] = (jax.nn.log_sigmoid(self.arrays["g"].astype(jnp.float32)) / 16).astype(case.dtype)
        if case.decodes:
            self.arrays["initial_state"] = draw((case.B, case.H, case.D, case.D), np.float32)
        if case.documents is not None:
            ends = np.linspace(0, case.T, case.documents + 1).astype(np.int32)
            self.arrays["cu_seqlens"] = jnp.asarray(ends)
        jax.block_until_ready(self.arrays)  # PyTorch reads the same memory and knows nothing of JAX's streams

    def truths(self, device_lock: DeviceLock) -> list[Truth]:
        """Of the output and the gradients, as sums over pairs of tokens in float32.

        The naive errors are those of the definition in the case's dtype, token by token, on the first tokens; where
        later ones are larger, so is their rounding.
        """
        case = self.case
        tokens = {name: self.arrays[name].reshape(case.rows, -1, case.H, case.D) for name in case.shapes()}
        exact = self._run(_in_pairs, "float32", tokens, device_lock)
        naive = [dict.fromkeys(one, 0.0) for one in exact]
        if case.dtype != "float32":
            first = {name: x[:, :_FIRST] for name, x in tokens.items()}
            wide, narrow = (self._run(_by_token, dtype, first, device_lock) for dtype in ("float32", case.dtype))
            naive = [
                {
                    name: error * _largest(all_of[name]) / _largest(w[name])
                    for name, error in Truth.of(w, n).naive.items()
                }
                for all_of, w, n in zip(exact, wide, narrow, strict=True)
            ]
        floor = FLOOR * max(1.0, math.sqrt(case.T / 256))
        largest = [max(_largest(x) for x in one.values()) for one in exact]
        outputs = [{name: x.reshape(case.B, case.T, case.H, case.D) for name, x in one.items()} for one in exact]
        return [Truth(one, errors, floor * most) for one, errors, most in zip(outputs, naive, largest, strict=True)]

    def _run(self, attend: "Attend", dtype: str, tokens: Arrays, device_lock: DeviceLock) -> list[Arrays]:
        case = self.case
        state = self.arrays.get("initial_state", jnp.zeros((case.rows, case.H, case.D, case.D)))
        # no autotuning: it would run on the device while another process measures
        options = {"xla_gpu_autotune_level": 0}
        program = jax.jit(partial(_defined, case, attend, jnp.dtype(dtype)), compiler_options=options)
        compiled = program.lower(tokens, state).compile()
        with device_lock:
            return jax.block_until_ready(compiled(tokens, state))


def _largest(x: jax.Array) -> float:
    return float(jnp.abs(x).max())


# What is right ------------------------------------------------------------------------------------------------

# tokens between states that are kept: those of all would not fit
_BLOCK = 64
# tokens of a sequence that the definition is computed for: a step for each is slow on a GPU
_FIRST = 512

# (case, dtype, state, tokens (rows, size, H, D)) to the state after them, in float32, and their output
Attend = Callable[[Case, Any, jax.Array, Arrays], tuple[jax.Array, jax.Array]]


def _defined(case: Case, attend: Attend, dtype: Any, tokens: Arrays, state: jax.Array) -> list[Arrays]:
    """Output and gradients of sequences as rows, a block of tokens after another."""
    rows, T, *_ = tokens["query"].shape
    trained = {name: tokens[name].astype(dtype) for name in TRAINED if name in tokens}

    def attend_all(trained: Arrays) -> jax.Array:
        size = min(_BLOCK, T)
        blocks = {n: jnp.moveaxis(x.reshape(rows, -1, size, case.H, case.D), 1, 0) for n, x in trained.items()}
        _, out = lax.scan(jax.checkpoint(partial(attend, case, dtype)), state, blocks)
        return jnp.moveaxis(out, 0, 1).reshape(rows, T, case.H, case.D)

    if BOTH not in case.passes:
        return [{"out": attend_all(trained)}]
    out, pull = jax.vjp(attend_all, trained)
    (gradients,) = pull(tokens["dout"].astype(out.dtype))
    return [{"out": out}, {f"d{name}": x for name, x in gradients.items()}]


def _by_token(case: Case, dtype: Any, state: jax.Array, tokens: Arrays) -> tuple[jax.Array, jax.Array]:
    """By the definition; the state that is handed on is float32, as in every kernel."""
    decay = None if case.gated else jnp.asarray(lightning_decay(case.H, **LAYER))
    exact, narrow = (
        canonicalise(**{name: x.astype(d) for name, x in tokens.items()}, g_gamma=decay, initial_state=state)
        for d in (jnp.dtype("float32"), dtype)
    )
    return reference(exact)["state"][:, 0], reference(narrow, dtype)["out"]


def _in_pairs(case: Case, dtype: Any, state: jax.Array, tokens: Arrays) -> tuple[jax.Array, jax.Array]:
    """What each token gets of each before it, decayed by all that lies between them, and of the state."""
    q, k, v = (tokens[name] for name in ("query", "key", "value"))
    decay = tokens["g"] if case.gated else jnp.asarray(lightning_decay(case.H, **LAYER), dtype)[:, None]
    logs = jnp.cumsum(jnp.broadcast_to(decay, (*q.shape[:3], decay.shape[-1])), axis=1)
    at = jnp.arange(q.shape[1])
    before = (at[:, None] >= at)[..., None]  # (t, s, H)
    between = jnp.exp(jnp.where(before[..., None], logs[:, :, None] - logs[:, None], 0))  # (rows, t, s, H, D or 1)
    weights = jnp.where(before, (q[:, :, None] * k[:, None] * between).sum(-1), 0)
    product = partial(jnp.einsum, precision="highest")
    out = product("rtsh,rshe->rthe", weights, v) + product("rthd,rhde->rthe", q * jnp.exp(logs), state)
    last = logs[:, -1]  # (rows, H, D or 1)
    added = product("rshd,rshe->rhde", k * jnp.exp(last[:, None] - logs), v)
    return jnp.exp(last)[..., None] * state + added, case.D**-0.5 * out

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
from ejkernel.kernels.linear.delta.reference import reference as delta_reference
from ejkernel.kernels.linear.delta.spec import canonicalise as delta_call
from ejkernel.kernels.linear.reference import reference
from ejkernel.kernels.linear.spec import canonicalise, lightning_decay

# `g` is there where decays are inputs, `beta` in the delta rule
TRAINED = ("query", "key", "value", "g", "beta")
OPERATIONS = {
    "lightning": "lightning_attention",
    "decode": "lightning_attention",
    "gla": "gla_attention",
    "gated delta": "gated_delta_rule",
    "gated delta decode": "gated_delta_rule",
    "kimi delta": "kimi_delta_attention",
}
LAYER = {"layer_idx": 0, "num_layers": 12}


@dataclass(frozen=True)
class Case:
    """Lightning attention, GLA with decays per channel, the delta rule, or a decode step: `group` says which.

    Documents are packed, and equally long: of the delta rule by segment ids, else by cumulative lengths.

    Attributes:
        Hk: heads of queries and keys, where they are fewer.
        Dv: channels of values, where they are others.
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
    Hk: int | None = None
    Dv: int | None = None

    @property
    def name(self) -> str:
        heads = f"H{self.H}" if self.Hk is None else f"H{self.Hk}/{self.H}"
        dims = f"D{self.D}" if self.Dv is None else f"D{self.D}x{self.Dv}"
        packed = "" if self.documents is None else f" {self.documents} documents"
        return f"{self.group} B{self.B} T{self.T} {heads} {dims}{packed}"

    @property
    def rows(self) -> int:
        """Sequences, all of one length."""
        return self.documents or self.B

    @property
    def gated(self) -> bool:
        """Whether decays are those of key channels."""
        return self.group in ("gla", "kimi delta")

    @property
    def erases(self) -> bool:
        return "delta" in self.group

    @property
    def decodes(self) -> bool:
        return self.group.endswith("decode")

    @property
    def operations(self) -> tuple[str, ...]:
        return (OPERATIONS[self.group],)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.rows, self.H, self.D, self.Dv or self.D

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def amount(self, what: str) -> float:
        """Bytes: every array read and written once; of a decode, the states."""
        if self.decodes:
            return 2.0 * 4 * math.prod(self.state_shape)
        # inputs in, out out; a backward reads inputs and dout and writes as many gradients
        shapes, size = self.shapes(), jnp.dtype(self.dtype).itemsize
        out = math.prod(shapes.pop("dout"))
        inputs = sum(math.prod(shape) for shape in shapes.values())
        return float(size) * (inputs + out if what == FORWARD else 3 * inputs + 2 * out)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of those in the case's dtype."""
        tokens, Dv = (self.B, self.T), self.Dv or self.D
        shapes: dict[str, tuple[int, ...]] = {}
        shapes |= dict.fromkeys(("query", "key"), (*tokens, self.Hk or self.H, self.D))
        shapes |= dict.fromkeys(("value", "dout"), (*tokens, self.H, Dv))
        if self.gated:
            shapes["g"] = (*tokens, self.H, self.D)
        if self.erases:
            shapes |= {"g": shapes.get("g", (*tokens, self.H)), "beta": (*tokens, self.H)}
        return shapes

    def structs(self) -> Arrays:
        structs = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in self.shapes().items()}
        if self.decodes:
            structs["initial_state"] = jax.ShapeDtypeStruct(self.state_shape, jnp.float32)
        if self.documents is not None and self.erases:
            structs["segment_ids"] = jax.ShapeDtypeStruct((1, self.T), jnp.int32)
        elif self.documents is not None:
            structs["cu_seqlens"] = jax.ShapeDtypeStruct((self.documents + 1,), jnp.int32)
        return structs

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        given = {name: x for name, x in arrays.items() if name != "dout" and x is not None}
        given |= LAYER if self.operations == ("lightning_attention",) else {}
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
        delta = [case("gated delta", 1, T, Hk=H // 2), case("kimi delta", 1, T)]
        return [case("lightning", 1, T), case("gla", 1, T), *delta, case("lightning", 1, T, documents=16), decode]
    delta = partial(case, "gated delta", H=32, Hk=16)
    first = [case("lightning", 8, T), case("gla", 8, T), decode, delta(1, 8192), case("kimi delta", 1, 8192, H=32)]
    if quick:
        return first
    delta_decode = dataclasses.replace(decode, group="gated delta decode", H=32, Hk=16)
    first += [delta(4, 8192), delta(1, 32768), delta_decode]
    first += [case("gated delta", 1, 16384, H=8, Hk=4, documents=16), case("gated delta", 1, 8192, H=30, D=96, Dv=192)]
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
        if "g" in self.arrays:
            # as a gate's logarithm of a sigmoid over 16 has them
            self.arrays["g"] = (jax.nn.log_sigmoid(self.arrays["g"].astype(jnp.float32)) / 16).astype(case.dtype)
        if case.erases:
            for name in ("query", "key"):
                x = self.arrays[name].astype(jnp.float32)
                self.arrays[name] = (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(case.dtype)
            self.arrays["beta"] = jax.nn.sigmoid(self.arrays["beta"])
        if case.decodes:
            self.arrays["initial_state"] = draw(case.state_shape, np.float32)
        if case.documents is not None and case.erases:
            self.arrays["segment_ids"] = jnp.asarray(np.arange(case.T)[None] // (case.T // case.documents), jnp.int32)
        elif case.documents is not None:
            ends = np.linspace(0, case.T, case.documents + 1).astype(np.int32)
            self.arrays["cu_seqlens"] = jnp.asarray(ends)
        jax.block_until_ready(self.arrays)  # PyTorch reads the same memory and knows nothing of JAX's streams

    def truths(self, device_lock: DeviceLock) -> list[Truth]:
        """Of the output and the gradients, as sums over pairs of tokens in float32.

        The naive errors are those of the definition in the case's dtype, token by token, on the first tokens; where
        later ones are larger, so is their rounding.
        """
        case = self.case
        shapes = case.shapes()
        tokens = {name: self.arrays[name].reshape(case.rows, -1, *shape[2:]) for name, shape in shapes.items()}
        exact = self._run(_by_token if case.erases else _in_pairs, "float32", tokens, device_lock)
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
        shapes |= {f"d{name}": shape for name, shape in shapes.items()} | {"out": shapes["dout"]}
        outputs = [{name: x.reshape(shapes[name]) for name, x in one.items()} for one in exact]
        return [Truth(one, errors, floor * most) for one, errors, most in zip(outputs, naive, largest, strict=True)]

    def _run(self, attend: "Attend", dtype: str, tokens: Arrays, device_lock: DeviceLock) -> list[Arrays]:
        case = self.case
        state = self.arrays.get("initial_state", jnp.zeros(case.state_shape))
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
        blocks = {n: jnp.moveaxis(x.reshape(rows, -1, size, *x.shape[2:]), 1, 0) for n, x in trained.items()}
        _, out = lax.scan(jax.checkpoint(partial(attend, case, dtype)), state, blocks)
        return jnp.moveaxis(out, 0, 1).reshape(rows, T, *out.shape[3:])

    if BOTH not in case.passes:
        return [{"out": attend_all(trained)}]
    out, pull = jax.vjp(attend_all, trained)
    (gradients,) = pull(tokens["dout"].astype(out.dtype))
    return [{"out": out}, {f"d{name}": x for name, x in gradients.items()}]


def _by_token(case: Case, dtype: Any, state: jax.Array, tokens: Arrays) -> tuple[jax.Array, jax.Array]:
    """By the definition; the state that is handed on is float32, as in every kernel."""
    given: dict[str, Any] = {"initial_state": state}
    if not case.gated and not case.erases:
        given["g_gamma"] = jnp.asarray(lightning_decay(case.H, **LAYER))
    canonical, definition = (delta_call, delta_reference) if case.erases else (canonicalise, reference)
    exact, narrow = (
        canonical(**{name: x.astype(d) for name, x in tokens.items()}, **given) for d in (jnp.dtype("float32"), dtype)
    )
    return definition(exact)["state"][:, 0], definition(narrow, dtype)["out"]


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

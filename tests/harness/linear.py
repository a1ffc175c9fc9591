"""The cases of linear attention, and what a case means. What lies behind packed sequences is poison in every case."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.linear.reference import reference
from ejkernel.kernels.linear.spec import canonicalise
from ejkernel.modules import recurrent_attention
from ejkernel.ops import explain
from harness.checks import Arrays, check, normal
from harness.platforms import Platform
from harness.poison import poisons

GATES = ("g", "g_gamma", "gk", "gv")
TOKENS = ("query", "key", "value", "g", "gk", "gv")


@dataclass(frozen=True, eq=False)
class Case:
    """One call.

    Attributes:
        gates: which decays there are.
        decay: their strength, a key of DECAYS.
        gates_dtype: of the decays, where it is not that of the queries.
        state: whether there is an initial one.
        final: whether the final one is returned.
        cu: cumulative lengths of packed sequences.
    """

    id: str
    T: int = 65
    B: int = 2
    H: int = 2
    D: int = 16
    Dv: int | None = None
    dtype: str = "float32"
    gates: tuple[str, ...] = ()
    decay: str = "mild"
    gates_dtype: str | None = None
    state: bool = True
    final: bool = True
    cu: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def arrays(self) -> Arrays:
        """The floats of the public function by name."""
        B, T, H, D, Dv = self.B, self.T, self.H, self.D, self.Dv or self.D
        shapes: dict[str, tuple[int, ...]] = {"query": (B, T, H, D), "key": (B, T, H, D), "value": (B, T, H, Dv)}
        shapes |= {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, D), "gv": (B, T, H, Dv)}
        arrays = {name: normal(name, shape, self.dtype) for name, shape in shapes.items() if name not in GATES}
        arrays |= {name: self.log_decays(name, shapes[name]) for name in self.gates}
        if self.state:
            N = B if self.cu is None else len(self.cu) - 1
            arrays["initial_state"] = normal("initial state", (N, H, D, Dv))
        return arrays

    def log_decays(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        logs = DECAYS[self.decay](np.abs(np.asarray(normal(name, shape))))
        return jnp.asarray(logs, "float32" if name == "g_gamma" else self.gates_dtype or self.dtype)

    def keywords(self, arrays: Arrays) -> dict[str, Any]:
        """All arguments of the public function."""
        given = dict(arrays)
        if self.cu is not None:
            given["cu_seqlens"] = np.asarray(self.cu, np.int32)
        return given | {"return_state": self.final} | self.options


def _mixed(size: np.ndarray) -> np.ndarray:
    """Next to nothing, a little, and what leaves nothing, one after the other."""
    return -size * np.resize([1e-3, 0.3, 20.0, 0.05, 3.0, 1e-3, 60.0], size.shape)


# from sizes to log decays of tokens
DECAYS = {
    "mild": lambda size: -size / 8,
    "strong": lambda size: -20.0 - size,
    "mixed": _mixed,
    "resets": lambda size: np.where(size > 1.2, -np.inf, -size / 8),
    "zero": lambda size: 0.0 * size,
    # what a model's gates look like: some channels keep everything, others lose it within a few tokens
    "sigmoid": lambda size: -np.logaddexp(0.0, 3.0 * (size - 1.0)),
}


def named(result: Any) -> Arrays:
    out, state = result if isinstance(result, tuple) else (result, None)
    return {"out": out} | ({} if state is None else {"state": state})


def call_case(case: Case, platform: Platform, arrays: Arrays, **how: Any) -> Arrays:
    with platform.context():
        return named(recurrent_attention(**case.keywords(arrays), platform=platform.name, **how))


def definition(case: Case, arrays: Arrays, dtype: Any) -> Arrays:
    """What a case means, from the family's reference, in the shapes of the public function."""
    results = reference(canonicalise(**case.keywords(arrays)), dtype)
    state = results["state"][0] if case.cu is not None else results["state"][:, 0]
    return {"out": results["out"]} | ({"state": state} if case.final else {})


def poisoned(case: Case, arrays: Arrays) -> Arrays:
    """The arrays with poison behind the last packed sequence, decays included."""
    assert case.cu is not None
    padding = np.arange(case.T) >= case.cu[-1]

    def fill(x: jax.Array) -> jax.Array:
        tokens = (1, case.T, *(1,) * (x.ndim - 2))
        return jnp.where(padding.reshape(tokens), jnp.asarray(poisons((case.T,), x.dtype).reshape(tokens), x.dtype), x)

    return {name: fill(x) if name in TOKENS else x for name, x in arrays.items()}


def refusals(case: Case, platform: Platform) -> list[str]:
    with platform.context():
        explanation = explain(recurrent_attention, **case.keywords(case.arrays()), platform=platform.name)
    return explanation.refusals.get(platform.name, [])


def check_case(case: Case, platform: Platform, *, optimised: bool = False) -> None:
    """Outputs and every gradient; a platform that refuses a case must say why."""
    if reasons := refusals(case, platform):
        with pytest.raises(NotImplementedError) as raised:
            call_case(case, platform, case.arrays())
        missing = [reason for reason in reasons if reason not in str(raised.value)]
        assert not missing, f"{raised.value} does not say {missing}"
        return
    check(
        partial(call_case, case, platform),
        partial(definition, case),
        case.arrays(),
        case.dtype,
        optimised=optimised,
        poison=partial(poisoned, case) if case.cu is not None and case.cu[-1] < case.T else None,
        name=f"linear {case.id}",
    )


REVERSE = {"reverse": True}
PACKED = (0, 0, 7, 7, 73, 74, 90)
_packed = partial(Case, B=1, T=100, cu=PACKED)

LENGTHS = (
    Case("T1", T=1, gates=("gk",)),
    Case("T5-all-reverse", T=5, gates=GATES, options=REVERSE),
    Case("T63-head", T=63, gates=("g_gamma",)),
    Case("T64-token", T=64, gates=("g",)),
    Case("T130-all", T=130, B=1, gates=GATES),
    Case("T130-channel", T=130, gates=("gk",)),
)
GATED = (
    Case("plain"),
    Case("head", gates=("g_gamma",)),
    Case("value-channel", gates=("gv",)),
    Case("both-channels", gates=("gk", "gv")),
    Case("token-head", gates=("g", "g_gamma")),
    Case("head-zero", gates=("g_gamma",), decay="zero"),
)
STRONG = (
    Case("head-strong", T=130, gates=("g_gamma",), decay="strong"),
    Case("channel-strong", gates=("gk",), decay="strong"),
    Case("all-strong", B=1, gates=GATES, decay="strong"),
    Case("token-mixed", T=130, gates=("g",), decay="mixed"),
    Case("channel-mixed", T=130, B=1, gates=("gk",), decay="mixed"),
    Case("value-channel-mixed", gates=("gv",), decay="mixed"),
    Case("all-mixed-reverse", gates=GATES, decay="mixed", options=REVERSE),
    Case("token-resets", T=130, gates=("g",), decay="resets"),
    Case("channel-resets", T=130, B=1, gates=("gk",), decay="resets"),
    Case("channels-resets-reverse", gates=("gk", "gv"), decay="resets", options=REVERSE),
)
STATES = (
    Case("no-state", gates=("gk",), state=False, final=False),
    Case("no-initial-state", gates=("g",), state=False),
    Case("no-final-state", gates=GATES, final=False),
    Case("plain-reverse", state=False, final=False, options=REVERSE),
    Case("scale-negative", gates=("gk",), options={"softmax_scale": -0.7}),
)
SIZES = (
    Case("D40-Dv24", D=40, Dv=24, gates=("gk",)),
    Case("D24-Dv40-values", T=33, D=24, Dv=40, gates=("g", "gv")),
    Case("D64-bfloat16", D=64, dtype="bfloat16", gates=("g",)),
    Case("D128-bfloat16", B=1, H=1, D=128, dtype="bfloat16", gates=("gk",)),
    Case("D128-Dv64-head-bfloat16", T=33, B=1, H=3, D=128, Dv=64, dtype="bfloat16", gates=("g_gamma",)),
    Case("D1-Dv1", D=1, Dv=1, gates=("g",)),
)
DTYPES = (
    Case("plain-bfloat16", dtype="bfloat16"),
    Case("all-bfloat16-decays-float32", T=33, dtype="bfloat16", gates=GATES, gates_dtype="float32"),
    Case("channel-strong-bfloat16", dtype="bfloat16", gates=("gk",), decay="strong"),
    Case("channel-mixed-bfloat16", T=130, dtype="bfloat16", gates=("gk",), decay="mixed"),
    Case("token-float16", dtype="float16", gates=("g",)),
)
PACKINGS = (
    _packed("packed", state=False, final=False),
    _packed("packed-head", gates=("g_gamma",)),
    _packed("packed-token-state", gates=("g",)),
    _packed("packed-all-reverse", gates=GATES, options=REVERSE),
    _packed("packed-channel-mixed", gates=("gk",), decay="mixed"),
    _packed("packed-channel-bfloat16", gates=("gk",), dtype="bfloat16"),
    _packed("packed-to-the-end", cu=(0, 64, 100), gates=("gk",)),
    _packed("packed-nothing", T=20, cu=(0, 0, 0), gates=("g", "gk")),
    _packed("packed-ones", T=9, cu=(0, 1, 2, 3, 4, 9), gates=("gv",)),
)

# every dtype with every kind of decay, weak and as strong as a model's gates; of several chunks, since products with a
# state are rounded otherwise than those within a chunk
GRID_DECAYS = ("mild", "sigmoid")
_grid = partial(Case, T=70, B=1, H=1, state=False, final=False)
GRID_DTYPES = ("float32", "bfloat16", "float16")
GRID_GATES = ("g", "gk", "gv")
GRID = tuple(
    _grid(f"{'-'.join(gates)}-{decay}-{dtype}", dtype=dtype, gates=gates, decay=decay)
    for dtype, gates, decay in product(GRID_DTYPES, (*((gate,) for gate in GRID_GATES), GRID_GATES), GRID_DECAYS)
)
# as large as a model's, on GPUs alone
LARGE = tuple(replace(case, id=f"D128-T512-{case.id}", T=512, H=2, D=128) for case in GRID if case.dtype != "float32")

CASES = (*LENGTHS, *GATED, *STRONG, *STATES, *SIZES, *DTYPES, *PACKINGS, *GRID)

# what interpreters, which take long, are given: every feature of a kernel once, and pairs that meet in one
CORE_IDS = (
    "T1", "T63-head", "T130-all", "token-mixed", "channel-mixed", "channel-resets", "all-strong", "plain-reverse",
    "D40-Dv24", "D128-bfloat16", "packed-token-state", "packed-all-reverse", "packed-nothing",
)  # fmt: skip
# and of the grid all decays at once; alone those of a model, in float16, which takes paths of its own in every kernel
GRID_ON_CPUS = tuple(
    case
    for case in GRID
    if case.gates == GRID_GATES
    or (case.decay == "sigmoid" and (case.dtype == "float16" or case.id == "gk-sigmoid-bfloat16"))
)
CORE = tuple(case for case in CASES if case.id in CORE_IDS or case in GRID_ON_CPUS)
# what is a path of its own in kernels for GPUs alone
FOR_GPUS_IDS = (
    "T64-token", "T130-channel", "head", "value-channel", "token-head", "head-strong", "no-state",
    "D64-bfloat16", "D128-Dv64-head-bfloat16", "plain-bfloat16", "channel-strong-bfloat16", "packed",
    "packed-channel-bfloat16", "packed-to-the-end",
)  # fmt: skip
FOR_GPUS = tuple(case for case in CASES if case.id in FOR_GPUS_IDS or (case in GRID and case not in GRID_ON_CPUS))


def missing_from_grid(cases: Iterable[Case]) -> list[tuple[str, ...]]:
    """Which dtype, kind of decay and strength no case brings together over more than one chunk, without a state."""
    met = {(case.dtype, gate, case.decay) for case in cases if case.T > 64 for gate in case.gates}
    return [pair for pair in product(GRID_DTYPES, GRID_GATES, GRID_DECAYS) if pair not in met]

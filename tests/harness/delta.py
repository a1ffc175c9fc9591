"""The cases of the delta rule, and what a case means. What lies in padding is poison in every case."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.linear.delta.reference import reference
from ejkernel.kernels.linear.delta.spec import canonicalise
from ejkernel.modules import gated_delta_rule
from ejkernel.ops import explain
from harness.checks import Arrays, check, normal
from harness.linear import DECAYS, named
from harness.platforms import Platform
from harness.poison import poisons

STATE = "initial_state"


@dataclass(frozen=True, eq=False)
class Case:
    """One call.

    Attributes:
        Hk: heads of queries and keys.
        g: which decays there are: of a "token" and head, of a "channel", or none.
        decay: their strength, a key of DECAYS.
        beta: the largest; None: there is none.
        more: "erase_key" and "write_gate", where they are given.
        state: whether there is an initial one.
        final: whether the final one is returned.
        cu: cumulative lengths of packed sequences.
        ids: how long each segment is, and its id.
        repeated: how much of a key is the same for all tokens.
    """

    id: str
    T: int = 70
    B: int = 1
    H: int = 2
    Hk: int = 2
    D: int = 16
    Dv: int | None = None
    dtype: str = "float32"
    g: str | None = "token"
    decay: str = "mild"
    beta: float | None = 1.0
    more: tuple[str, ...] = ()
    state: bool = True
    final: bool = True
    cu: tuple[int, ...] | None = None
    ids: tuple[tuple[int, int], ...] = ()
    repeated: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        B, T, H, Hk, D, Dv = self.B, self.T, self.H, self.Hk, self.D, self.Dv or self.D
        shapes: dict[str, tuple[int, ...]] = {"query": (B, T, Hk, D), "key": (B, T, Hk, D), "value": (B, T, H, Dv)}
        shapes |= {"g": (B, T, H, D) if self.g == "channel" else (B, T, H)} if self.g else {}
        shapes |= {"beta": (B, T, H)} if self.beta else {}
        more = {"erase_key": (B, T, H, D), "write_gate": (B, T, H, Dv)}
        return shapes | {name: more[name] for name in self.more}

    def arrays(self) -> Arrays:
        """The floats of the public function by name."""
        drawn = {name: np.asarray(normal(name, shape)) for name, shape in self.shapes().items()}
        drawn["key"] = drawn["key"] + self.repeated * np.asarray(normal("repeated", drawn["key"].shape[2:]))
        for name in {"query", "key", "erase_key"} & drawn.keys():
            drawn[name] = drawn[name] / np.linalg.norm(drawn[name], axis=-1, keepdims=True)
        if "g" in drawn:
            drawn["g"] = DECAYS[self.decay](np.abs(drawn["g"]))
        if "beta" in drawn:
            drawn["beta"] = (self.beta or 0.0) / (1 + np.exp(-drawn["beta"] - self.repeated))
        arrays: Arrays = {name: jnp.asarray(x, self.dtype) for name, x in drawn.items()}
        if self.state:
            N = self.B if self.cu is None else len(self.cu) - 1
            arrays[STATE] = normal(STATE, (N, self.H, self.D, self.Dv or self.D))
        return arrays

    def keywords(self, arrays: Arrays) -> dict[str, Any]:
        """All arguments of the public function."""
        given = dict(arrays) | {"return_state": self.final} | self.options
        if self.cu is not None:
            given["cu_seqlens"] = np.asarray(self.cu, np.int32)
        if self.ids:
            given["segment_ids"] = self.segment_ids()
        return given

    def segment_ids(self) -> np.ndarray:
        return np.concatenate([np.full(n, i, np.int32) for n, i in self.ids])[None].repeat(self.B, 0)

    def padding(self) -> np.ndarray:
        """(T,): what is not to be read."""
        if self.ids:
            return self.segment_ids()[0] < 0
        return np.arange(self.T) >= (self.T if self.cu is None else self.cu[-1])


def call_case(case: Case, platform: Platform, arrays: Arrays, **how: Any) -> Arrays:
    with platform.context():
        return named(gated_delta_rule(**case.keywords(arrays), platform=platform.name, **how))


def definition(case: Case, arrays: Arrays, dtype: Any) -> Arrays:
    """What a case means, from the family's reference, in the shapes of the public function."""
    results = reference(canonicalise(**case.keywords(arrays)), dtype)
    state = results["state"][0] if case.cu is not None else results["state"][:, 0]
    return {"out": results["out"]} | ({"state": state} if case.final else {})


def poisoned(case: Case, arrays: Arrays) -> Arrays:
    """The arrays with poison in padding, decays included."""

    def fill(x: jax.Array) -> jax.Array:
        tokens = (1, case.T, *(1,) * (x.ndim - 2))
        values = jnp.asarray(poisons((case.T,), x.dtype).reshape(tokens), x.dtype)
        return jnp.where(case.padding().reshape(tokens), values, x)

    return {name: x if name == STATE else fill(x) for name, x in arrays.items()}


def refusals(case: Case, platform: Platform) -> list[str]:
    with platform.context():
        explanation = explain(gated_delta_rule, **case.keywords(case.arrays()), platform=platform.name)
    return explanation.refusals.get(platform.name, [])


def check_case(case: Case, platform: Platform) -> None:
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
        poison=partial(poisoned, case) if case.padding().any() else None,
        name=f"delta {case.id}",
    )


PACKED = (0, 0, 7, 7, 40, 41, 60)
SEGMENTS = ((20, 4), (1, 0), (9, -1), (37, 1), (3, -1))
BOTH = ("erase_key", "write_gate")

CASES = (
    Case("T1", T=1),
    Case("T5-channel-packed", T=9, g="channel", H=4, cu=(0, 3, 3, 8), more=("write_gate",)),
    Case("T64-grouped", T=64, H=4),
    Case("T130-grouped", T=130, H=4, Dv=32, state=False),
    Case("plain", g=None, state=False, final=False),
    Case("plain-no-beta", g=None, beta=None),
    Case("channel", g="channel", H=3, Hk=1),
    Case("token-strong", decay="strong"),
    Case("token-mixed", decay="mixed"),
    Case("token-resets", decay="resets"),
    Case("channel-mixed", g="channel", decay="mixed"),
    Case("channel-resets", g="channel", decay="resets", state=False),
    Case("erase", more=("erase_key",), beta=1.0),
    Case("write", more=("write_gate",), g="channel"),
    Case("both", more=BOTH, beta=None, g="channel"),
    Case("both-plain", more=BOTH, beta=None, g=None, H=4),
    Case("eigenvalues-negative", beta=2.0, options={"softmax_scale": -0.7}),
    Case("D24-Dv40", D=24, Dv=40, T=33),
    Case("D40-Dv24-channel", D=40, Dv=24, T=33, g="channel"),
    Case("repeated", repeated=2.0, T=130, decay="zero"),
    Case("repeated-bfloat16", repeated=2.0, T=130, decay="zero", dtype="bfloat16"),
    Case("token-bfloat16", dtype="bfloat16", H=4, D=64),
    Case("channel-bfloat16", dtype="bfloat16", g="channel", decay="sigmoid"),
    Case("token-float16", dtype="float16"),
    Case("packed", cu=PACKED, H=4),
    Case("packed-channel", cu=PACKED, g="channel", decay="mixed"),
    Case("packed-nothing", T=20, cu=(0, 0, 0)),
    Case("segments", B=2, ids=SEGMENTS, state=False),
    Case("segments-plain", ids=SEGMENTS, state=False, g=None),
    Case("segments-channel-bfloat16", ids=SEGMENTS, state=False, g="channel", dtype="bfloat16"),
)

# what a CPU's XLA leaves to GPUs: each is near another that it runs, and most are given to the interpreter of Triton
FOR_GPUS_IDS = (
    "T64-grouped", "token-strong", "channel-resets", "write", "both-plain", "D24-Dv40", "token-float16",
    "repeated", "plain", "segments-plain",
)  # fmt: skip
FOR_GPUS = tuple(case for case in CASES if case.id in FOR_GPUS_IDS)

# what interpreters, which take long, are given: that of TPUs, whose every step is slow, those that meet most
CORE_IDS = ("T130-grouped", "channel-mixed", "both", "repeated-bfloat16", "packed-channel", "segments")
TRITON_IDS = (
    "T1", "T5-channel-packed", "T64-grouped", "plain-no-beta", "channel", "token-mixed", "channel-resets", "erase",
    "D24-Dv40", "token-bfloat16",
    "token-float16", "packed",
)  # fmt: skip
CORE = tuple(case for case in CASES if case.id in CORE_IDS)
TRITON = tuple(case for case in CASES if case.id in TRITON_IDS)

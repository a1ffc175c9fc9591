"""h_t = decay * h_{t-1} + x_t; the outputs are all h_t and the last one."""

from dataclasses import dataclass

import jax.numpy as jnp

from ejkernel.ops import Call, Dims, Operation, Splits, run


@dataclass(frozen=True)
class Spec:
    decay: float


DECAYED_SUM = Operation(
    name="decayed_sum",
    arrays={
        "x": Dims("B T D", grad=True, broadcasts=False),
        "state": Dims("B D", grad=True, broadcasts=False),
        "lengths": Dims("B"),
    },
    outputs={"out": "B T D", "state": "B D"},
    implementations={
        "xla": "toy_family.xla",
        "triton": "toy_family.triton",
        "pallas": {"tpu": "toy_family.pallas_tpu"},
    },
    preference={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("pallas", "xla")},
    bucket=lambda call: f"T{call['x'].shape[1]}",
    splits=Splits(free=("B", "D"), otherwise={"T": "hand the state on"}),
    example=lambda call: {
        "x": jnp.ones(call["x"].shape),
        "state": jnp.zeros(call["state"].shape),
        "lengths": jnp.full(call["lengths"].shape, call["x"].shape[1]),
    },
    probes=lambda: {
        "plain": Call(Spec(0.5), {"x": jnp.ones((1, 4, 2)), "state": jnp.zeros((1, 2))})
    },
)

OPERATIONS = (DECAYED_SUM,)


def decayed_sum(x, state, lengths, *, decay=0.5, platform=None, cfg=None, shards=None):
    call = Call(Spec(decay), {"x": x, "state": state, "lengths": lengths})
    outputs = run(DECAYED_SUM, call, platform=platform, cfg=cfg, shards=shards)
    return outputs["out"], outputs["state"]

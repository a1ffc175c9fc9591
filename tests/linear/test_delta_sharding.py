"""The delta rule on many devices gives what one gives: batch and heads split, the length, and shared keys."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import gated_delta_rule
from harness import evaluate, normal
from harness.delta import Case
from harness.linear import named
from tolerances import assert_close

T, H, D = 24, 4, 8
CASES = {
    "token": Case("", T=T, H=H, Hk=2, D=D, Dv=6, B=2),
    "channel": Case("", T=T, H=H, Hk=4, D=D, Dv=6, B=2, g="channel", decay="mixed"),
    "packed": Case("", T=T, H=H, Hk=2, D=D, Dv=6, cu=(0, 3, 3, 17, 22)),
    "both": Case("", T=T, H=H, Hk=2, D=D, B=2, g=None, beta=None, more=("erase_key", "write_gate")),
    "segments": Case("", T=T, H=H, Hk=2, D=D, B=2, ids=((10, 0), (4, -1), (10, 1)), state=False),
}


def mesh_of(kind, **sizes):
    devices = np.asarray(jax.devices("cpu")[: np.prod([*sizes.values()])]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))


def agrees(case, mesh, spec):
    given = case.arrays()
    shapes = {"out": given["value"].shape}
    shapes["state"] = (case.B if case.cu is None else len(case.cu) - 1, H, D, shapes["out"][-1])
    cotangents = {name: normal(f"d{name}", shape) for name, shape in shapes.items()}

    def attend(x, **options):
        return named(gated_delta_rule(**case.keywords(x), cfg={"chunk": 8}, **options))

    got = evaluate(lambda x: attend(x, mesh=mesh, in_specs=(spec,) * 3), given, cotangents)
    expected = evaluate(attend, given, cotangents)
    for ours, theirs, kind in zip(got, expected, ("output", "gradient of"), strict=True):
        assert_close(ours, theirs, kind=kind)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_batch_and_heads(kind):
    agrees(CASES["token"], mesh_of(kind, dp=2, tp=2), P("dp", None, "tp"))


def test_fewer_keys_than_devices():
    """Four devices have a head each, and what its two keys are to them."""
    case = CASES["token"]
    mesh = mesh_of(AxisType.Auto, tp=4)
    given = case.arrays()
    specs = {"query": P(), "key": P(), "value": P(None, None, "tp")}
    out = jax.jit(lambda x: gated_delta_rule(**case.keywords(x), mesh=mesh, in_specs=specs))(given)
    assert_close(named(out), named(gated_delta_rule(**case.keywords(given))))


@pytest.mark.parametrize("name", CASES)
def test_length(name):
    """States are passed from device to device by the transitions of their tokens."""
    agrees(CASES[name], mesh_of(AxisType.Auto, sp=4), P(None, "sp"))


def test_a_plain_jit_may_split_it():
    case = CASES["token"]
    given = case.arrays()
    sharding = NamedSharding(mesh_of(AxisType.Auto, dp=2), P("dp"))
    placed = {name: jax.device_put(x, sharding) for name, x in given.items()}
    out = jax.jit(lambda x: gated_delta_rule(**case.keywords(x)))(placed)
    assert_close(named(out), named(gated_delta_rule(**case.keywords(given))))

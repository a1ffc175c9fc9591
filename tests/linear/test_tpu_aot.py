"""The TPU kernel, compiled by libtpu for chips that are not here: every scan of a call fits what is reckoned for it."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.kernels.common.pallas_tpu import CHIPS
from ejkernel.kernels.linear import pallas_tpu
from ejkernel.kernels.linear.delta.operations import _struct_call as delta_call
from ejkernel.kernels.linear.delta.pallas_tpu import DELTA_RULE
from ejkernel.kernels.linear.operations import _struct_call
from ejkernel.ops.target import describe_device

pytestmark = pytest.mark.tpu_aot

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def case(*gates, B=2, T=1024, H=4, D=128, Dv=None, N=None, states=False, gate_dtype="float32", **options):
    """The sizes and options of a call."""
    dims = {"B": 1 if N else B, "T": T, "H": H, "D": D, "Dv": Dv or D}
    shapes = {"g": "BTH", "g_gamma": "H", "gk": "BTHD", "gv": ["B", "T", "H", "Dv"]}
    arrays = {name: ([dims[letter] for letter in shapes[name]], gate_dtype) for name in gates}
    if states:
        arrays["initial_state"] = ([N or B, H, D, Dv or D], "float32")
        options["return_state"] = True
    given = {name: lambda shape=shape, dtype=dtype: jnp.zeros(shape, dtype) for name, (shape, dtype) in arrays.items()}
    if N:
        given["cu_seqlens"] = lambda: jnp.zeros(N + 1, jnp.int32)
    return {**dims, **given, **options}


def call_of(options):
    """A call on shapes alone; `constant` says that the decay of heads is no argument of the program."""
    options = dict(options)
    constant = options.pop("constant", False)
    call = _struct_call(**options)
    return replace(call, spec=replace(call.spec, constant_gamma=constant or "g_gamma" not in call))


CASES = {
    "D128-lightning": case("g_gamma", constant=True),
    "D128-gated-bfloat16": case("gk", gate_dtype="bfloat16"),
    "D256-all-gates-float32": case("g", "g_gamma", "gk", "gv", D=256, dtype="float32", states=True),
    "D64-gated-states": case("gk", D=64, states=True),
    "D128-packed": case("g", "g_gamma", N=5, states=True),
}
OTHERS = {
    "D128-no-decay": case(),
    "D128-head": case("g_gamma", states=True),
    "D128-per-token": case("g", gate_dtype="bfloat16", reverse=True),
    "D128-value-channels": case("gv", states=True),
    "D128-packed-all-gates-reverse": case("g", "g_gamma", "gk", "gv", N=5, reverse=True, states=True),
    "D128-one-token": case("g_gamma", "gk", T=1, states=True),
    "D64-odd-length": case("gk", T=1001, D=64),
    "D40-Dv24-float32": case("g", "gk", T=300, D=40, Dv=24, dtype="float32"),
    "D128-float16": case("g_gamma", dtype="float16"),
    "D512-gated": case("gk", D=512),
}
# the least memory and the newest; `make tpu-aot` takes all
QUICK = [("v4", "D128-gated-bfloat16"), ("v4", "D128-lightning"), ("v6e", "D128-gated-bfloat16")]
MORE = [(chip, name) for chip in TOPOLOGIES for name in CASES] + [(c, name) for c in ("v4", "v6e") for name in OTHERS]
on_chips = pytest.mark.parametrize(
    ("chip", "name"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.tpu_aot_more) for pair in MORE if pair not in QUICK)],
)


@on_chips
def test_compiles_in_the_memory_that_is_reckoned(chip, name, tpu_devices, monkeypatch):
    """A kernel may use no more. Given more, the compiler takes more."""
    call = call_of((CASES | OTHERS)[name])
    tangent = "g_gamma" in call and not call.spec.constant_gamma
    kernels = kernels_of(call, pallas_tpu.LINEAR, tpu_devices(TOPOLOGIES[chip])[0], monkeypatch)
    assert len(kernels) == 4 + ("gv" in call) + tangent


DELTA = {
    "grouped": {"H": 4},
    "channels": {"g": lambda: jnp.zeros((2, 512, 2, 128))},
    "D96-Dv192-float32": {"D": 96, "Dv": 192, "dtype": "float32"},
    "packed": {"B": 1, "cu_seqlens": lambda: jnp.zeros(6, jnp.int32), "return_state": True},
}


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        pytest.param(chip, name, marks=[pytest.mark.tpu_aot_more] * ((chip, name) != ("v4", "channels")))
        for chip in TOPOLOGIES
        for name in DELTA
    ],
)
def test_the_delta_rule_compiles(chip, name, tpu_devices, monkeypatch):
    options = {"B": 2, "T": 512, "H": 2, "D": 128, "Dv": 128} | DELTA[name]
    of_tokens = {n: lambda: jnp.zeros((options["B"], 512, options["H"])) for n in ("g", "beta")}
    call = delta_call(**of_tokens | options)
    assert len(kernels_of(call, DELTA_RULE, tpu_devices(TOPOLOGIES[chip])[0], monkeypatch)) == 7


def kernels_of(call, scans, device, monkeypatch):
    """The kernels of a forward and backward, compiled in the memory that is reckoned for them."""
    mesh = Mesh(np.array([device]), ("x",))
    call = call.on(describe_device(device))
    assert scans.unsupported(call) == []
    config = scans.default_config(call)

    def both(arrays):
        mine = replace(call, arrays=arrays)
        outputs, residuals = scans.forward(mine, config)
        return outputs, scans.backward(mine, residuals, outputs, config)

    sharding = NamedSharding(mesh, PartitionSpec())
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in call.arrays.items()}
    reckoned = replace(CHIPS[call.target.kind], vmem_bytes=scans.vmem_bytes(call, config) * 8 // 7)
    monkeypatch.setitem(CHIPS, call.target.kind, reckoned)
    text = jax.jit(both).lower(structs).compile().as_text()
    return re.findall(r"linear_scan_kernel(?:\.\d+)? = .*custom-call.*", text)

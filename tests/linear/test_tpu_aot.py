"""The TPU kernel, compiled by libtpu for chips that are not here: every walk of a call fits."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.kernels.linear import pallas_tpu
from ejkernel.kernels.linear.operations import _struct_call
from ejkernel.ops.target import describe_device

pytestmark = pytest.mark.tpu_aot

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# the least memory and the newest; `make tpu-aot` takes all
on_chips = pytest.mark.parametrize(
    "chip", [pytest.param(c, marks=[pytest.mark.tpu_aot_more] if c in ("v5e", "v5p") else []) for c in CHIPS]
)


def case(*gates, B=2, T=1024, H=4, D=128, Dv=None, N=None, states=False, gate_dtype="float32", **options):
    """A call on shapes alone."""
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


CASES = {
    "D128-lightning": case("g_gamma"),
    "D128-gated-bfloat16": case("gk", gate_dtype="bfloat16"),
    "D256-all-gates-float32": case("g", "g_gamma", "gk", "gv", D=256, dtype="float32", states=True),
    "D64-gated-states": case("gk", D=64, states=True),
    "D128-packed": case("g", "g_gamma", N=5, states=True),
}
ONE_CHIP = {
    "D128-no-decay": case(),
    "D128-per-token": case("g", gate_dtype="bfloat16", reverse=True),
    "D128-value-channels": case("gv", states=True),
    "D128-packed-all-gates-reverse": case("g", "g_gamma", "gk", "gv", N=5, reverse=True, states=True),
    "D128-one-token": case("g_gamma", "gk", T=1, states=True),
    "D64-odd-length": case("gk", T=1001, D=64),
    "D40-Dv24-float32": case("g", "gk", T=300, D=40, Dv=24, dtype="float32"),
    "D128-float16": case("g_gamma", dtype="float16"),
    "D512-gated": case("gk", D=512),
}


@pytest.fixture(scope="module")
def mesh_of(tpu_devices):
    return lambda chip: Mesh(np.array(tpu_devices(CHIPS[chip])[:1]), ("x",))


def check(mesh, options):
    """The forward and backward of a call compile, and no walk takes more memory than was reckoned."""
    call = _struct_call(**options).on(describe_device(mesh.devices[0]))
    assert pallas_tpu.unsupported(call) == []
    config = pallas_tpu.default_config(call)

    def both(arrays):
        mine = replace(call, arrays=arrays)
        outputs, residuals = pallas_tpu.forward(mine, config)
        return outputs, pallas_tpu.backward(mine, residuals, outputs, config)

    sharding = NamedSharding(mesh, PartitionSpec())
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in call.arrays.items()}
    text = jax.jit(both).lower(structs).compile().as_text()
    kernels = re.findall(r"%?linear_walk(?:\.\d+)? = .*custom-call.*", text)
    assert len(kernels) == (5 if "gv" in options else 4)
    for kernel in kernels:
        used = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', kernel)
        assert used is None or int(used[1]) <= pallas_tpu.vmem_bytes(call, config)


@pytest.mark.parametrize("name", CASES)
@on_chips
def test_fits(chip, name, mesh_of):
    check(mesh_of(chip), CASES[name])


@pytest.mark.parametrize("name", ONE_CHIP)
def test_other_options_compile(name, mesh_of):
    check(mesh_of("v5e"), ONE_CHIP[name])

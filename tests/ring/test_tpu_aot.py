"""The ring as libtpu compiles it: what is exchanged and when, and what a chip of a pod of 256 holds."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.ring.scaling import SENT_BACK, problem
from ejkernel.modules import flash_attention, ring_attention

pytestmark = pytest.mark.tpu_aot

H, HKV, D = 8, 2, 128
COLLECTIVES = r"\b(all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
BYTES = {"bf16": 2, "f32": 4}


def step(attend):
    def run(query, key, value, dout):
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(dout)

    return run


def compiled(attend, mesh, spec, B, T, **options):
    shapes = [(B, T, heads, D) for heads in (H, HKV, HKV, H)]
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for shape in shapes]
    return jax.jit(step(attend)).lower(*structs).compile(**options)


def bodies(text: str) -> list[list[tuple[str, str, str]]]:
    """Of each computation that has permutes, its operations in the order in which they run: (kind, name, shape)."""
    bodies = [[]]
    for line in text.splitlines():
        if re.match(r"(%|ENTRY)", line):
            bodies.append([])
        elif match := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\(", line):
            bodies[-1].append((match[3], match[1], match[2]))
    return [body for body in bodies if any(kind.startswith("collective-permute") for kind, _, _ in body)]


def sent_bytes(body: list[tuple[str, str, str]]) -> int:
    shapes = [re.search(r"(bf16|f32)\[([\d,]+)\]", shape) for kind, _, shape in body if kind.endswith("permute-done")]
    return sum(BYTES[m[1]] * math.prod(map(int, m[2].split(","))) for m in shapes if m is not None)


TOKENS = 2048  # on a chip


@pytest.fixture(scope="module")
def ring(tpu_devices):
    """Forward and backward of a ring of 256 chips."""
    devices = tpu_devices("v5p:8x8x4")
    mesh = Mesh(np.asarray(devices), ("sp",), axis_types=(AxisType.Auto,))

    def attend(*qkv):
        return ring_attention(*qkv, causal=True, layout="zigzag", method="ring", mesh=mesh)

    options = {"compiler_options": {"xla_enable_async_collective_permute": "true"}}
    return compiled(attend, mesh, P(None, "sp"), 1, len(devices) * TOKENS, **options)


@pytest.mark.xdist_group("a ring of 256 chips")
def test_sending_overlaps_computing(ring):
    """On 256 chips every permute starts before the kernels of its hop and is awaited after them."""
    text = ring.as_text()
    assert set(re.findall(COLLECTIVES, text)) == {"collective-permute"}
    loops = [body for body in bodies(text) if any("softmax" in name for _, name, _ in body)]
    assert len(loops) == 2  # forward and backward
    for body in loops:
        kinds = [(kind, name) for kind, name, _ in body if kind.startswith("collective") or "softmax" in name]
        names = [kind if kind.startswith("collective") else "kernel" for kind, _ in kinds if "tuple" not in kind]
        first, last = names.index("kernel"), len(names) - names[::-1].index("kernel")
        assert set(names[:first]) == {"collective-permute-start"} and set(names[last:]) == {"collective-permute-done"}
    # what the table of scaling says is sent
    part = problem(TOKENS, heads=H, key_heads=HKV, dim=D)
    assert sorted(map(sent_bytes, loops)) == [part.key_bytes, SENT_BACK * part.key_bytes]


@pytest.mark.xdist_group("a ring of 256 chips")
def test_a_ring_of_256_chips(ring):
    """A chip holds its own part: what it needs does not grow with the ring."""
    part = problem(TOKENS, heads=H, key_heads=HKV, dim=D)
    memory = ring.memory_analysis()
    queries = TOKENS * H * D * 2
    assert memory.argument_size_in_bytes == 2 * queries + part.key_bytes
    # float32 sums of the output or of dq, and four times (here, on its way, and so for the hop after, which is sent
    # meanwhile) keys, values and their gradients; nothing of T
    assert memory.temp_size_in_bytes <= 2 * queries + queries + 4 * (1 + 2) * part.key_bytes


@pytest.mark.tpu_aot_more  # tests/softmax/test_tpu_aot.py splits over four chips too
def test_batch_and_heads_of_an_ambient_mesh(tpu_devices):
    """Each chip's kernels get its own batch rows and heads, and nothing is exchanged."""
    mesh = Mesh(np.asarray(tpu_devices("v5e:2x2")).reshape(2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def attend(*qkv):
        return flash_attention(*qkv, causal=True, platform="pallas", mesh=mesh)

    text = compiled(attend, mesh, P("data", None, "tensor"), 4, 1024).as_text()
    assert not re.search(COLLECTIVES, text)
    shapes = re.findall(r"%softmax_forward[\w.]* = \(bf16\[([\d,]+)\]", text)
    assert shapes == ["2,4,128,1024"]

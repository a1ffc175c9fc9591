"""Several processes on this host, with JAX's own runtime between them, give what one device gives."""

import os
import socket
import subprocess
import sys

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from ejkernel.modules import flash_attention, from_zigzag, ring_attention, to_zigzag

port, processes, process = (int(x) for x in sys.argv[1:])
jax.config.update("jax_num_cpu_devices", 4 // processes)
jax.distributed.initialize(f"localhost:{port}", processes, process)
assert jax.device_count() == 4 and jax.process_count() == processes
mesh, spec = Mesh(np.asarray(jax.devices()), ("sp",)), P(None, "sp")
rng = np.random.default_rng(0)
shapes = {"query": (1, 32, 4, 8), "key": (1, 32, 2, 8), "value": (1, 32, 2, 8)}
floats = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
tiles = {"block_q": 4, "block_k": 4}


def loss(floats, attend):
    return jnp.square(attend(**floats)).sum()


def whole(query, key, value):
    return flash_attention(query, key, value, causal=True, cfg=tiles)


def ring(query, key, value):
    mixed = (to_zigzag(x, 4) for x in (query, key, value))
    return from_zigzag(ring_attention(*mixed, causal=True, layout="zigzag", method="ring", mesh=mesh, cfg=tiles), 4)


placed = {
    name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index, x=x: x[index])
    for name, x in floats.items()
}
total, gradients = jax.jit(jax.value_and_grad(lambda f: loss(f, ring)))(placed)
expected, others = jax.jit(jax.value_and_grad(lambda f: loss(f, whole)))(floats)
np.testing.assert_allclose(total.addressable_data(0), expected, rtol=1e-5)
for name, x in gradients.items():
    for shard in x.addressable_shards:
        np.testing.assert_allclose(shard.data, np.asarray(others[name])[shard.index], rtol=1e-4, atol=1e-4)
print("equal")
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def test_ring_over_processes(xla_flags):
    """Forward and backward, over two devices of each process."""
    processes = 2
    flags = [flag for flag in xla_flags.split() if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    arguments = [sys.executable, "-c", PROGRAM, str(free_port()), str(processes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen([*arguments, str(i)], env=environment, **pipes) for i in range(processes)]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * processes, said
    assert all(text.rstrip().endswith("equal") for text in said), said

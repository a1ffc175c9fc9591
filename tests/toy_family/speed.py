"""Every platform that runs here, timed: `PYTHONPATH=tests python -m toy_family.speed`."""

import statistics
import sys
import time

import jax
import jax.numpy as jnp

from toy_family.operations import decayed_sum


def milliseconds(function, *arrays, calls=20, samples=5):
    """The median of samples of many calls each, so that starting them does not count."""
    jax.block_until_ready(function(*arrays))  # compiled, and warm
    measured = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*arrays)
        jax.block_until_ready(out)
        measured.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(measured)


def main(B=8, T=4096, D=2048):
    x = jax.random.normal(jax.random.key(0), (B, T, D))
    state, lengths = jnp.zeros((B, D)), jnp.full((B,), T)
    # x read and written once: what no kernel can beat
    copy = milliseconds(jax.jit(lambda x: x + 1), x)
    print(f"{jax.devices()[0].device_kind}, B{B} T{T} D{D}: a copy takes {copy:.3f} ms")
    for platform in ("xla", "triton", "pallas"):

        def loss(x, platform=platform):
            return decayed_sum(x, state, lengths, platform=platform)[0].sum()

        try:
            forward, both = (
                milliseconds(jax.jit(loss), x),
                milliseconds(jax.jit(jax.grad(loss)), x),
            )
        except NotImplementedError as refusal:
            print(f"{platform}: {' '.join(str(refusal).split())}")
        else:
            print(f"{platform}: {forward:.3f} ms forward, {both:.3f} ms with the gradient")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

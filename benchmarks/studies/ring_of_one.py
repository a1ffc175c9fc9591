"""The calls that one device of a ring makes, on a single GPU or TPU, against its share of one dense causal call.

    python -m benchmarks.studies.ring_of_one            # a ring of 8, 131072 tokens in all, zigzag

Nothing is sent: this is what a ring loses by cutting one call into many. At most 1.1 times the share is the aim.
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.ring.layout import shard_of
from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=8)
parser.add_argument("--length", type=int, default=131072, help="tokens of the whole sequence")
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--key-heads", type=int, default=2)
parser.add_argument("--dim", type=int, default=128)
parser.add_argument("--layout", default="zigzag", choices=["contiguous", "zigzag"])
parser.add_argument("--repeats", type=int, default=5)


def arrays(length, given):
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (given.heads, given.key_heads, given.key_heads, given.heads)
    return [jax.random.normal(k, (1, length, h, given.dim), jnp.bfloat16) for k, h in zip(keys, heads, strict=True)]


def forward(query, key, value, dout, mask, causal=True):
    return flash_attention(query, key, value, mask_info=mask, causal=causal)


def both(query, key, value, dout, mask, causal=True):
    out, pull = jax.vjp(lambda q, k, v: forward(q, k, v, dout, mask, causal), query, key, value)
    return out, pull(dout)


def hops(program, shard, given):
    """The calls of the busiest device; with zigzag all have as much to do, and see halves of other devices' keys."""
    n, t = given.devices, shard[0].shape[1]
    if given.layout == "zigzag":
        halves = [jnp.concatenate([x[:, : t // 2], x[:, t // 2 :]]) for x in shard]
        return [partial(program, *shard, None), *[partial(program, *halves, None, causal=False)] * (n - 1)]
    at = [shard_of(given.layout, r, n, t).index[None] for r in range(n)]
    masks = [MaskInfo(t, t, q_pos=at[n - 1], kv_pos=at[source]) for source in range(n)]
    return [partial(program, *shard, mask) for mask in masks]


def seconds(calls, repeats):
    """The median time of all calls, one after the other."""
    for call in calls:
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([call() for call in calls])
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    given = parser.parse_args()
    n, t = given.devices, given.length // given.devices
    shard, dense_call = arrays(t, given), arrays(given.length, given)
    print(f"{jax.devices()[0].device_kind}: {given.length} tokens over {n} devices, {given.layout}")
    for name, function in (("forward", forward), ("forward + backward", both)):
        program = jax.jit(function, static_argnames="causal")
        dense = seconds([partial(program, *dense_call, None)], given.repeats) / n
        ring = seconds(hops(program, shard, given), given.repeats)
        print(f"{name}: {n} hops {1e3 * ring:.2f} ms, its share {1e3 * dense:.2f} ms: {ring / dense:.2f}x")


if __name__ == "__main__":
    main()

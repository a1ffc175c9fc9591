"""Dense attention over a contiguous cache, which a paged one should not lose to."""

from functools import partial
from typing import Any

import jax

from benchmarks.measuring.benchmark import Arrays, Contender, DeviceLock, Program, jax_program
from benchmarks.paged.cases import Case

# twenty calls in one program: a single decode ends before the host has started the next
CHAIN = ({"query": "out"}, 20)


def peers() -> list[Contender]:
    """All, installed or not."""
    return [
        _contiguous("jax-nn", "jax.nn (XLA), contiguous", "xla", "cpu"),
        _contiguous("jax-cudnn", "cuDNN, contiguous", "cudnn", "gpu"),
    ]


def _contiguous(key: str, name: str, implementation: Any, backend: str) -> Contender:
    """A decode by `jax.nn`, with the keys and values of every sequence side by side."""
    attend = partial(jax.nn.dot_product_attention, implementation=implementation)

    def build(case: Case, what: str, arrays: Arrays, device_lock: DeviceLock) -> Program:
        def gather(cache: jax.Array, table: jax.Array) -> jax.Array:
            return cache[table].reshape(len(table), -1, *cache.shape[2:])

        with device_lock:
            key, value = (
                jax.block_until_ready(jax.jit(gather)(arrays[n], arrays["block_tables"]))
                for n in ("key_cache", "value_cache")
            )

        def step(arrays: Arrays) -> Arrays:
            return {"out": attend(arrays["query"][:, None], arrays["key"], arrays["value"])[:, 0]}

        given = {"query": arrays["query"], "key": key, "value": value}
        return jax_program(step, given, device_lock, CHAIN)

    def missing(current: str) -> str | None:
        return None if current == backend else f"needs {backend}, this is {current}"

    def refusal(case: Case) -> str | None:
        if not case.even:
            return "one call is for one number of tokens"
        return None if case.cache == case.dtype else f"a {case.cache} cache"

    return Contender(key, name, build, missing, refusal)

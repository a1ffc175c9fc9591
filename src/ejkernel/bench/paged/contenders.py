"""Ours on its platforms, and dense attention over a contiguous cache, which a paged one should not lose to."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.bench.benchmark import FORWARD, Arrays, Contender, Program, Quiet, jax_program
from ejkernel.bench.ours import ours
from ejkernel.bench.paged.cases import Case
from ejkernel.kernels.paged.calls import page_call, ragged_page_call
from ejkernel.kernels.paged.operations import PAGE_ATTENTION, RAGGED_PAGE_ATTENTION, bucket
from ejkernel.modules import page_attention, ragged_page_attention
from ejkernel.ops import Explanation, explain

# calls of one program: a decode of one sequence is over before the host has started the next
CHAIN = 20


def all_contenders(backend: str, platforms: list[str] | None) -> list[Contender]:
    """Everybody, present or not: ours first."""
    worth = {"cpu": ["xla"], "gpu": ["triton", "xla"]}.get(backend, ["pallas", "xla"])
    dense = [("jax-nn", "jax.nn (XLA), contiguous", "xla", "cpu"), ("jax-cudnn", "cuDNN, contiguous", "cudnn", "gpu")]
    return [*map(_ours, platforms or worth), *(_contiguous(*peer) for peer in dense)]


def _arguments(case: Case, arrays: Any) -> dict[str, Any]:
    """By name, as the public function takes them; 8-bit caches have scales."""
    given = dict(arrays)
    if not case.even:
        given["queries"] = given.pop("query")
    scales = {} if case.scales is None else dict(zip(("k_scale", "v_scale"), case.scales, strict=True))
    return given | {name: jnp.float32(scale) for name, scale in scales.items()}


def _explained(case: Case, platform: str) -> Explanation:
    function = page_attention if case.even else ragged_page_attention

    def call(**arrays: Any) -> None:
        function(**_arguments(case, arrays), platform=platform)

    return explain(call, **_structs(case))


def _structs(case: Case) -> Arrays:
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in case.shapes().items()}


def choice(case: Case) -> dict[str, str | None]:
    """The platform that auto takes."""
    return {FORWARD: _explained(case, "auto").platform}


def _ours(platform: str) -> Contender:
    def build(case: Case, what: str, arrays: Arrays, quiet: Quiet) -> Program:
        function = page_attention if case.even else ragged_page_attention

        def step(arrays: Arrays) -> Arrays:
            return {"out": function(**_arguments(case, arrays), platform=platform)}

        return jax_program(step, arrays, quiet, chain=("query", "out", CHAIN))

    return ours(platform, build, _explained, _place)


def _place(case: Case) -> tuple[list[str], str]:
    found: list[str] = []

    def call(arrays: Arrays) -> None:
        make = page_call if case.even else ragged_page_call
        found.append(bucket(make(**_arguments(case, arrays))))

    jax.eval_shape(call, _structs(case))
    return [(PAGE_ATTENTION if case.even else RAGGED_PAGE_ATTENTION).name], found[0]


def _contiguous(key: str, name: str, implementation: Any, backend: str) -> Contender:
    """A decode by `jax.nn`, with the keys and values of every sequence side by side."""
    attend = partial(jax.nn.dot_product_attention, implementation=implementation)

    def build(case: Case, what: str, arrays: Arrays, quiet: Quiet) -> Program:
        def gather(cache: jax.Array, table: jax.Array) -> jax.Array:
            return cache[table].reshape(len(table), -1, *cache.shape[2:])

        with quiet:
            key, value = (
                jax.block_until_ready(jax.jit(gather)(arrays[n], arrays["block_tables"]))
                for n in ("key_cache", "value_cache")
            )

        def step(arrays: Arrays) -> Arrays:
            return {"out": attend(arrays["query"][:, None], arrays["key"], arrays["value"])[:, 0]}

        given = {"query": arrays["query"], "key": key, "value": value}
        return jax_program(step, given, quiet, chain=("query", "out", CHAIN))

    def missing(here: str) -> str | None:
        return None if here == backend else f"needs {backend}, this is {here}"

    def refusal(case: Case) -> str | None:
        if not case.even:
            return "one call is for one number of tokens"
        return None if case.cache == case.dtype else f"a {case.cache} cache"

    return Contender(key, name, build, missing, refusal)

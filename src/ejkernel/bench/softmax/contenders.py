"""Who takes part: ours on each platform, and what JAX offers. PyTorch's are in `torch_peers`."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.bench.benchmark import BOTH, FORWARD, Arrays, Contender, Program, Quiet, jax_program
from ejkernel.bench.ours import ours
from ejkernel.bench.softmax import torch_peers
from ejkernel.bench.softmax.cases import Case
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION, SCALED_DOT_PRODUCT_ATTENTION, bucket
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.modules import flash_attention
from ejkernel.ops import Explanation, explain
from ejkernel.types import MaskInfo

# (case, arrays, query, key, value) -> out
Attend = Callable[[Case, Arrays, jax.Array, jax.Array, jax.Array], jax.Array]


def all_contenders(backend: str, platforms: list[str] | None) -> list[Contender]:
    """Everybody, present or not: ours first."""
    worth = {"cpu": ["xla"], "gpu": ["auto", "triton", "pallas", "cudnn"]}.get(backend, ["pallas", "xla"])
    return [*map(_ours, platforms or worth), *(_in_jax(*peer) for peer in JAX_PEERS), *torch_peers.peers()]


def _build(attend: Attend, case: Case, what: str, arrays: Arrays, quiet: Quiet) -> Program:
    def step(arrays: Arrays) -> Arrays:
        qkv = arrays["query"], arrays["key"], arrays["value"]
        if what == FORWARD:
            return {"out": attend(case, arrays, *qkv)}
        out, pull = jax.vjp(partial(attend, case, arrays), *qkv)
        return {"out": out, **dict(zip(("dquery", "dkey", "dvalue"), pull(arrays["dout"]), strict=True))}

    return jax_program(step, arrays, quiet)


# Ours -------------------------------------------------------------------------------------------------------


def _options(case: Case, arrays: Arrays) -> dict[str, Any]:
    mask = MaskInfo.from_segments(arrays["segments"]) if "segments" in arrays else None
    return {"causal": case.causal, "sliding_window": case.sliding_window, "mask_info": mask}


def _structs(case: Case) -> Arrays:
    structs = {name: jax.ShapeDtypeStruct(shape, case.dtype) for name, shape in case.shapes().items()}
    if case.documents is not None:
        structs["segments"] = jax.ShapeDtypeStruct((1, case.T), jnp.int32)
    return structs


def _explained(case: Case, platform: str) -> Explanation:
    def call(query: Any, key: Any, value: Any, dout: Any, **arrays: Any) -> None:
        flash_attention(query, key, value, **_options(case, arrays), platform=platform)

    return explain(call, **_structs(case))


def choice(case: Case) -> dict[str, str | None]:
    """The platforms that auto takes, by pass; two for forward and backward where they differ."""
    told = _explained(case, "auto")
    taken = [told.platform] if told.gradient is None else [told.platform, told.gradient.platform]
    return {FORWARD: told.platform, BOTH: ", ".join(dict.fromkeys(map(str, taken)))}


def _ours(platform: str) -> Contender:
    def attend(case: Case, arrays: Arrays, *qkv: jax.Array) -> jax.Array:
        return flash_attention(*qkv, **_options(case, arrays), platform=platform)

    return ours(platform, partial(_build, attend), _explained, _place)


def _place(case: Case) -> tuple[list[str], str]:
    found: list[str] = []

    def call(arrays: Arrays) -> None:
        qkv = arrays["query"], arrays["key"], arrays["value"]
        found.append(bucket(canonicalise(*qkv, **_options(case, arrays))))

    jax.eval_shape(call, _structs(case))
    return [FLASH_ATTENTION.name, SCALED_DOT_PRODUCT_ATTENTION.name], found[0]


# Peers in JAX -----------------------------------------------------------------------------------------------


def _explicit_mask(case: Case) -> jax.Array:
    """Which query sees which key of its document, (1, 1, T, T): what those without segments are given."""
    ids = np.arange(case.T) * (case.documents or 1) // case.T
    return jnp.asarray(ids[:, None] == ids[None, :])[None, None]


def _in_jax(key: str, name: str, attend: Attend, backends: tuple[str, ...], package: str, most: float) -> Contender:
    def missing(backend: str) -> str | None:
        if importlib.util.find_spec(package) is None:
            return "not installed"
        return None if backend in backends else f"needs {' or '.join(backends)}, this is {backend}"

    def refusal(case: Case) -> str | None:
        logits = 4 * case.B * case.H * case.T * case.T / 2**30
        return f"its logits would take {logits:.0f} GiB" if logits > most else None

    def build(case: Case, what: str, arrays: Arrays, quiet: Quiet) -> Program:
        importlib.import_module(package)  # no part of a first call
        if case.documents is not None:
            with quiet:
                arrays = {**arrays, "mask": jax.block_until_ready(_explicit_mask(case))}
        return _build(attend, case, what, arrays, quiet)

    return Contender(key, name, build, missing, refusal)


def _jax_nn(implementation: Literal["xla", "cudnn"], case: Case, arrays: Arrays, *qkv: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(
        *qkv,
        mask=arrays.get("mask"),
        is_causal=case.causal,
        local_window_size=case.sliding_window,
        implementation=implementation,
    )


def _tokamax(case: Case, arrays: Arrays, *qkv: jax.Array) -> jax.Array:
    import tokamax

    return tokamax.dot_product_attention(
        *qkv,
        mask=arrays.get("mask"),
        is_causal=case.causal,
        local_window_size=case.sliding_window,
        implementation="mosaic",
    )


# key, name, function, backends, package, the most GiB of logits it may make
JAX_PEERS: list[tuple[str, str, Attend, tuple[str, ...], str, float]] = [
    ("jax-nn", "jax.nn (XLA)", partial(_jax_nn, "xla"), ("cpu", "tpu"), "jax", 4),
    ("jax-cudnn", "cuDNN (jax.nn)", partial(_jax_nn, "cudnn"), ("gpu",), "jax", np.inf),
    ("tokamax", "tokamax Mosaic", _tokamax, ("gpu", "tpu"), "tokamax", np.inf),
]

"""What JAX offers beside ours, and PyTorch, whose ways are in `torch_peers`."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.about.benchmark import Arrays, Contender, Program, Quiet, jax_program, passes_of
from ejkernel.kernels.softmax.about import torch_peers
from ejkernel.kernels.softmax.about.cases import TRAINED, Case

# (case, arrays) -> out
Attend = Callable[[Case, Arrays], jax.Array]


def peers() -> list[Contender]:
    """Everybody, present or not."""
    return [*(_in_jax(*peer) for peer in JAX_PEERS), *torch_peers.peers()]


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
        return jax_program(passes_of(partial(attend, case), what, TRAINED), arrays, quiet)

    return Contender(key, name, build, missing, refusal)


def _jax_nn(implementation: Literal["xla", "cudnn"], case: Case, arrays: Arrays) -> jax.Array:
    return jax.nn.dot_product_attention(
        *map(arrays.__getitem__, TRAINED),
        mask=arrays.get("mask"),
        is_causal=case.causal,
        local_window_size=case.sliding_window,
        implementation=implementation,
    )


def _tokamax(case: Case, arrays: Arrays) -> jax.Array:
    import tokamax

    return tokamax.dot_product_attention(
        *map(arrays.__getitem__, TRAINED),
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

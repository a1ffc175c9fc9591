"""What JAX offers beside ours, and PyTorch, whose ways are in `torch_peers`."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring.benchmark import Arrays, Contender, DeviceLock, Program, jax_program, passes_of
from benchmarks.softmax import torch_peers
from benchmarks.softmax.cases import QKV, TRAINED, Case

# (case, arrays) -> out
Attend = Callable[[Case, Arrays], jax.Array]


def peers() -> list[Contender]:
    """All, installed or not."""
    return [*map(_in_jax, PEERS), *torch_peers.peers()]


class _Peer(NamedTuple):
    """Another's attention in JAX.

    Attributes:
        most: GiB of logits that it may make.
        lacks: why it cannot do a case, beside that.
        takes_mask: whether documents, trees and prefixes are given to it as a mask.
        autotunes: whether XLA has matmuls, for which it tries kernels on the GPU.
    """

    key: str
    name: str
    attend: Attend
    backends: tuple[str, ...]
    package: str = "jax"
    most: float = np.inf
    lacks: Callable[[Case], str | None] = lambda case: None
    takes_mask: bool = True
    autotunes: bool = False


def _explicit_mask(case: Case) -> jax.Array:
    """Which query sees which key, (1, 1, T, T): what those without a word for the mask are given."""
    at = np.arange(case.T)
    return jnp.asarray(case.visible(at[:, None], at[None, :], case.numbers()))[None, None]


def _in_jax(peer: _Peer) -> Contender:
    def missing(backend: str) -> str | None:
        if importlib.util.find_spec(peer.package) is None:
            return "not installed"
        return None if backend in peer.backends else f"needs {' or '.join(peer.backends)}, this is {backend}"

    def refusal(case: Case) -> str | None:
        logits = 4 * case.B * case.H * case.T * case.keys / 2**30
        return f"its logits would take {logits:.0f} GiB" if logits > peer.most else peer.lacks(case)

    def build(case: Case, what: str, arrays: Arrays, device_lock: DeviceLock) -> Program:
        importlib.import_module(peer.package)  # no part of a first call
        if case.mask in ("documents", "tree", "prefix-LM") and peer.takes_mask:
            with device_lock:
                arrays = {**arrays, "mask": jax.block_until_ready(_explicit_mask(case))}
        function = passes_of(partial(peer.attend, case), what, TRAINED)
        # else XLA rounds the operands of its matmuls on a GPU
        with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
            return jax_program(function, arrays, device_lock, autotunes=peer.autotunes)

    return Contender(peer.key, peer.name, build, missing, refusal)


def _no_score(case: Case) -> str | None:
    return "no score functions" if case.alibi else "no soft cap" if case.soft_cap is not None else None


def _narrow(case: Case) -> str | None:
    return "16-bit numbers alone" if case.dtype == "float32" else _no_score(case)


def _fa4_lacks(case: Case) -> str | None:
    if case.mask in ("tree", "prefix-LM"):
        return "no masks of pairs"
    return "no bias" if case.bias else _narrow(case)


def _jax_nn(implementation: Literal["xla", "cudnn"], case: Case, arrays: Arrays) -> jax.Array:
    return jax.nn.dot_product_attention(
        *map(arrays.__getitem__, QKV),
        bias=arrays.get("bias"),
        mask=arrays.get("mask"),
        is_causal=case.causal,
        local_window_size=case.sliding_window,
        implementation=implementation,
    )


def _tokamax(case: Case, arrays: Arrays) -> jax.Array:
    import tokamax

    return tokamax.dot_product_attention(
        *map(arrays.__getitem__, QKV),
        bias=arrays.get("bias"),
        mask=arrays.get("mask"),
        is_causal=case.causal,
        local_window_size=case.sliding_window,
        implementation="mosaic",
    )


def _fa4(case: Case, arrays: Arrays) -> jax.Array:
    import fa4_jax

    q, k, v = map(arrays.__getitem__, QKV)
    if case.documents is None:
        return fa4_jax.flash_attn(q, k, v, causal=case.causal, window_size=case.sliding_window)
    offsets = arrays["offsets"]
    return fa4_jax.flash_attn_varlen(q[0], k[0], v[0], offsets, offsets, causal=True)[None]


PEERS = (
    _Peer("jax-cudnn", "cuDNN (jax.nn)", partial(_jax_nn, "cudnn"), ("gpu",), lacks=_narrow),
    _Peer("tokamax", "tokamax Mosaic", _tokamax, ("gpu", "tpu"), "tokamax", lacks=_narrow),
    _Peer("fa4", "fa4-jax", _fa4, ("gpu",), "fa4_jax", lacks=_fa4_lacks, takes_mask=False),
    # of all it compiles longest on a GPU: where time is short the others come first
    _Peer(
        "jax-nn",
        "jax.nn (XLA)",
        partial(_jax_nn, "xla"),
        ("cpu", "gpu", "tpu"),
        most=2,
        lacks=_no_score,
        autotunes=True,
    ),
)

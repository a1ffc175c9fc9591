"""What programs around ejgpu's kernels use: example inputs, a logger, and questions about the device."""

import itertools
import logging
import re
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.checks.options import static_int
from ejkernel.ops.target import default_device, describe_device

__all__ = [
    "AttentionMetadata",
    "DeviceInfo",
    "LazyLogger",
    "device_info",
    "generate_block_indices",
    "get_logger",
    "is_cdna",
    "is_cuda",
    "is_hip",
    "is_rdna",
    "numeric_gen",
    "varlen_input_helper",
]

# default seeds of `numeric_gen`
_default_seeds = itertools.count()


# Example inputs -----------------------------------------------------------------------------------------------


class AttentionMetadata(NamedTuple):
    """What `flash_attn_varlen` needs to know of packed sequences beside q, k and v."""

    cu_seqlens_q: jax.Array
    cu_seqlens_k: jax.Array
    max_seqlens_q: int
    max_seqlens_k: int
    sm_scale: float
    layout: str = "thd"


def varlen_input_helper(
    batch_size: int,
    qheads: int,
    kvheads: int,
    qseqlen: int,
    kseqlen: int,
    head_dim: int,
    dtype: DTypeLike = jnp.float16,
    equal_seqlens: bool = False,
    *,
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array, AttentionMetadata]:
    """Random q, k and v of packed sequences, `(tokens, heads, head_dim)`, and where each sequence begins.

    Args:
        batch_size: how many sequences.
        qheads: heads of q; `kvheads` those of k and v.
        qseqlen: tokens of all queries together, at most: a sequence has up to `qseqlen // batch_size`.
        kseqlen: the same for keys.
        equal_seqlens: every sequence has as many as it may.
        seed: of lengths and values.

    >>> q, k, v, metadata = varlen_input_helper(3, 8, 2, 300, 600, 64)
    >>> q.shape[1:], k.shape[1:], len(metadata.cu_seqlens_q), metadata.layout
    ((8, 64), (2, 64), 4, 'thd')
    """
    random = np.random.default_rng(seed)
    lengths = []
    for name, total in (("qseqlen", qseqlen), ("kseqlen", kseqlen)):
        longest = static_int(name, total, static_int("batch_size", batch_size, 1)) // batch_size
        lengths.append(np.full(batch_size, longest) if equal_seqlens else random.integers(1, longest + 1, batch_size))
    starts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in lengths]
    shapes = [(starts[0][-1], qheads, head_dim), *[(starts[1][-1], kvheads, head_dim)] * 2]
    q, k, v = (jnp.asarray(random.standard_normal(shape, np.float32), dtype) for shape in shapes)
    cu_q, cu_k = map(jnp.asarray, starts)
    longest_q, longest_k = (int(n.max()) for n in lengths)
    return q, k, v, AttentionMetadata(cu_q, cu_k, longest_q, longest_k, head_dim**-0.5)


def numeric_gen(
    *shape: int, dtype: DTypeLike = jnp.float16, method: str = "normal", seed: int | None = None
) -> jax.Array:
    """An array of random numbers.

    Args:
        shape: its dimensions.
        method: the name of a function of `jax.random`, such as "normal" or "uniform".
        seed: by default how many were made before: arrays of one program differ, those of another run are the same.

    >>> numeric_gen(2, 3, dtype=jnp.float32, seed=1).shape
    (2, 3)
    """
    draw = getattr(jax.random, method, None)
    if not callable(draw) or method.startswith("_"):
        raise ValueError(f"method {method!r} is not a function of jax.random")
    drawn: Any = draw(jax.random.key(next(_default_seeds) if seed is None else seed), shape, dtype=dtype)
    return drawn


def generate_block_indices(
    batch_size: int,
    sequence_length: int,
    kv_heads: int,
    num_blocks_per_token: int,
    block_size: int,
    seed: int = 0,
) -> jax.Array:
    """Random blocks for every token to see: `(batch, length, kv_heads, blocks)` int32, in order.

    The block of the token itself is among them; the others lie before it. Where a token has fewer blocks to choose
    from, `sequence_length` fills the remaining entries and stands for no block.

    >>> indices = generate_block_indices(1, 64, 1, 2, 16)
    >>> indices[0, [0, 63], 0].tolist()[0]
    [0, 64]
    """
    sizes = {"batch_size": batch_size, "kv_heads": kv_heads, "num_blocks_per_token": num_blocks_per_token}
    B, H, K = (static_int(name, size, 1) for name, size in sizes.items())
    T, block = static_int("sequence_length", sequence_length, 1), static_int("block_size", block_size, 1)
    token_block = (np.arange(T) // block)[:, None, None]  # (T, 1, 1)
    blocks = np.arange(token_block[-1, 0, 0] + 1)
    order = np.random.default_rng(seed).random((B, T, H, len(blocks)))
    # the block of the token itself comes first, blocks after it last
    order = np.where(blocks == token_block, -1.0, np.where(blocks > token_block, 2.0, order))
    chosen = np.argsort(order, axis=-1)[..., :K]
    chosen = np.where(chosen > token_block, T, chosen)
    padded = np.full((B, T, H, K), T, np.int32)
    padded[..., : chosen.shape[-1]] = chosen
    return jnp.asarray(np.sort(padded, axis=-1))


# Logging ------------------------------------------------------------------------------------------------------


class LazyLogger:
    """A logger that is made, and gets its coloured handler, with its first message."""

    def __init__(self, name: str, level: int | str = logging.INFO):
        self.name, self.wanted_level = name, level

    @cached_property
    def logger(self) -> logging.Logger:
        from rich.console import Console
        from rich.logging import RichHandler

        logger = logging.getLogger(self.name)
        logger.setLevel(self.wanted_level)
        if not logger.handlers:  # those that the program has set up stay as they are
            logger.addHandler(RichHandler(console=Console(stderr=True), show_path=False, log_time_format="[%X]"))
            logger.propagate = False
        return logger

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.logger, name)


def get_logger(name: str, level: int | str = logging.INFO) -> LazyLogger:
    """A logger with colours, on stderr; nothing is set up before its first message.

    It has the methods of `logging.Logger`, and arguments of a message are put in only where it is shown.

    >>> logger = get_logger("my program")
    >>> logger.debug("%d tokens", 100)
    """
    return LazyLogger(name, level)


# The device ---------------------------------------------------------------------------------------------------


class DeviceInfo(NamedTuple):
    """The device that JAX places new arrays on.

    Attributes:
        backend: "cpu", "gpu" or "tpu".
        kind: its name, such as nvidia_h200.
        arch: what kernels are compiled for, such as sm_90 or gfx942; elsewhere the backend.
        count: how many devices of the backend there are.
        memory: bytes it may use, where it says.
    """

    backend: str
    kind: str
    arch: str
    count: int
    memory: int | None


def device_info() -> DeviceInfo:
    """What the default device is.

    >>> device_info().count >= 1
    True
    """
    device = default_device()
    target = describe_device(device)
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return DeviceInfo(
        target.backend, target.kind, _arch(device, target.arch), jax.device_count(device.platform), memory
    )


def is_cuda() -> bool:
    """Whether the default device is an NVIDIA GPU."""
    return device_info().arch.startswith("sm_")


def is_hip() -> bool:
    """Whether the default device is an AMD GPU."""
    return device_info().arch.startswith("gfx")


def is_cdna() -> bool:
    """Whether the default device is an AMD GPU for data centres (MI100 and later)."""
    return re.match(r"gfx9(08|0a|4|5)", device_info().arch) is not None


def is_rdna() -> bool:
    """Whether the default device is an AMD GPU for graphics (RX 5000 and later)."""
    return re.match(r"gfx1\d", device_info().arch) is not None


def _arch(device: Any, arch: str) -> str:
    """JAX calls an AMD GPU "gpu" too: its capability tells."""
    capability = str(getattr(device, "compute_capability", ""))
    return capability if capability.startswith("gfx") else arch

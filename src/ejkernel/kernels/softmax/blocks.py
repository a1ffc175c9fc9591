"""From what a caller may call a block mask to a MaskInfo."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import bool_array, check_has_numbers, check_sizes_known
from ejkernel.checks.options import int_pair
from ejkernel.types import BlockPattern, MaskInfo

Counts = tuple[int, int, int, int]  # batch, heads, query blocks, key blocks

# a function of ints is called for each block up to so many (some 50 ms); beyond, it is vectorised where it can be
_MOST_CALLS = 2**17


def pattern_mask(query: Any, key: Any, block_mask: Any, block_size: Any, mask_info: MaskInfo | None) -> MaskInfo:
    """The mask of a block pattern, with whatever else `mask_info` says."""
    for name, x in (("query", query), ("key", key)):
        check_has_numbers(name, x)
        check_sizes_known(name, x)
        if x.ndim < 3:
            raise ValueError(f"{name} must have 4 dimensions (batch, length, heads, head_dim), got {x.shape}")
    *batch, T, H, _ = query.shape
    B, S = math.prod(batch), key.shape[-3]
    pattern = _pattern(block_mask, block_size, (B, H, T, S))
    mask = MaskInfo.from_block_pattern(pattern, q_len=T, kv_len=S)
    for what, given, wanted in (("batch", mask.shape[0], B), ("heads", mask.shape[1], H)):
        if given not in (1, wanted):
            raise ValueError(f"block_mask has {what} {given}, query has {wanted}; it is {pattern!r}")
    if mask_info is not None and not isinstance(mask_info, MaskInfo):
        raise TypeError(f"mask_info must be a MaskInfo, got {type(mask_info).__name__}")
    return mask if mask_info is None else mask & mask_info


def _pattern(block_mask: Any, block_size: Any, sizes: tuple[int, int, int, int]) -> BlockPattern:
    if isinstance(block_mask, BlockPattern):
        return _sized(block_mask, block_size)
    if block_mask is None:
        raise TypeError("block_mask must be a BlockPattern, an array or a function of (b, h, i, j), got None")
    if block_size is None:
        raise ValueError("block_size is needed unless block_mask is a BlockPattern")
    B, H, T, S = sizes
    block = int_pair("block_size", block_size, 1)
    counts = (B, H, -(-T // block[0]) or 1, -(-S // block[1]) or 1)  # a pattern has a block, also if it hides nothing
    blocks = _evaluated(block_mask, counts) if callable(block_mask) else bool_array("block_mask", block_mask)
    if blocks.ndim not in (2, 3, 4):
        shapes = "(blocks_q, blocks_k), (heads, ...) or (batch, heads, ...)"
        raise ValueError(f"block_mask must have shape {shapes}, got {blocks.shape}")
    if blocks.shape[-2:] != counts[2:]:
        raise ValueError(
            f"block_mask has shape {blocks.shape}; lengths {T} and {S} in blocks of {block} need {counts[2:]} blocks"
        )
    return BlockPattern.from_dense(blocks, block_size=block)


def _sized(pattern: BlockPattern, block_size: Any) -> BlockPattern:
    """The pattern with the size that it, or else the caller, says."""
    if block_size is None:
        return pattern
    if pattern.block_size is None:
        return dataclasses.replace(pattern, block_size=int_pair("block_size", block_size, 1))
    if int_pair("block_size", block_size, 1) != pattern.block_shape:
        raise ValueError(f"block_size={block_size} but the pattern's blocks are {pattern.block_size}")
    return pattern


# A function of block indices --------------------------------------------------------------------------------


def _evaluated(function: Callable[..., Any], counts: Counts) -> Any:
    """bool (B, H, blocks_q, blocks_k) of a function of block indices.

    Ints are the definition: the function may branch on them, look them up, compute with them beyond 32 bits. One that
    answers them with an array of JAX is written for arrays, and vectorised.
    """
    _check_arguments(function)
    plain = _answers_ints(function)
    if plain and math.prod(counts) <= _MOST_CALLS:
        return _called(function, counts)
    try:
        return _vectorised(function, counts)
    except (TypeError, AttributeError, IndexError, ValueError, OverflowError):  # what plain Python says of tracers
        if not plain:
            raise
        return _called(function, counts)


def _check_arguments(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin may have none
        return
    try:
        signature.bind(0, 0, 0, 0)
    except TypeError as error:
        raise TypeError(
            f"block_mask is called with the indices (b, h, i, j) of batch, head, query block and key block: {error}; "
            f"it has the signature {signature}"
        ) from None


def _answers_ints(function: Callable[..., Any]) -> bool:
    try:
        return not isinstance(function(0, 0, 0, 0), jax.Array)
    except (TypeError, AttributeError):  # it uses its indices as arrays
        return False


def _called(function: Callable[..., Any], counts: Counts) -> np.ndarray:
    if counts[0] == 0:  # an empty batch: there is no row to call it for
        return np.zeros((1, *counts[1:]), bool)
    answers = np.array([function(*at) for at in np.ndindex(*counts)])
    if answers.shape != (math.prod(counts),):
        raise _not_one_bool(answers.shape[1:])
    return np.asarray(bool_array("block_mask", answers)).reshape(counts)


def _vectorised(function: Callable[..., Any], counts: Counts) -> jax.Array:
    def answer(*at: Any) -> jax.Array:
        visited = jnp.asarray(function(*at), bool)
        if visited.shape != ():
            raise _not_one_bool(visited.shape)
        return visited

    return jax.vmap(answer)(*np.indices(counts, np.int32).reshape(4, -1)).reshape(counts)


def _not_one_bool(shape: tuple[int, ...]) -> ValueError:
    return ValueError(f"block_mask must give one bool for each (b, h, i, j), got shape {shape}")

"""What the operation and its implementations share: options, the canonical call on tensors, and layouts in memory."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ejkernel.kernels.softmax.spec import Band, Spec
from ejkernel.ops import Call
from ejkernel.torch.functions import Functions
from ejkernel.torch.inputs import FLOAT8S, Lengths
from ejkernel.torch.pattern import Pattern


class Cotangents(NamedTuple):
    """What a forward gave, and the gradients of it."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


class Gradients(NamedTuple):
    """Of the first `TRAINED` tensors, or whether they are needed; None where there is no such tensor."""

    query: Any
    key: Any
    value: Any
    sinks: Any = None
    bias: Any = None
    floats: Any = None


class Options(NamedTuple):
    """What is static about a call, in words that a custom op takes.

    `pattern` is the key of a `Pattern`, or ""; `block_m` and `block_n` are the tile, or 0; `functions` is the key of
    `Functions`, or "".
    """

    scale: float
    lo: int | None = None
    hi: int | None = None
    soft_cap: float | None = None
    pattern: str = ""
    block_m: int = 0
    block_n: int = 0
    dropout: float = 0.0
    functions: str = ""


# the tensors of an operation, in order; those but the first three may be None. The first `TRAINED` have gradients
NAMES = ("query", "key", "value", "sinks", "bias", "floats", "ints", "dropout_seeds", *Lengths._fields)
TRAINED = 6
Tensors = tuple[Any, ...]


def layouts_of(query: Tensor, key: Tensor, value: Tensor) -> Any:
    """What the launches of a call on plain tensors depend on, beside its options: their layouts and devices."""
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _spec(options: Options) -> Spec:
    pattern = Pattern.known(options.pattern) if options.pattern else None
    return Spec(
        scale=options.scale,
        band=Band(options.lo, options.hi),
        soft_cap=options.soft_cap,
        pattern_block=None if pattern is None else (pattern.block_size, pattern.block_size),
        pattern_by_position=pattern is not None and not pattern.by_index,
        dropout=options.dropout,
        rules=Functions.known(options.functions).rules,
    )


def canonical(tensors: Tensors, options: Options) -> Any:
    """The call as the softmax family knows it, on tensors."""
    arrays: dict[str, Any] = {name: x for name, x in zip(NAMES, tensors, strict=True) if x is not None}
    if "sinks" in arrays:
        arrays["sinks"] = arrays["sinks"][None]
    return Call(_spec(options), arrays)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(H,): sinks take weight exp(sink - lse) and give no value. lse and delta are (B, H, T), lse +inf where none."""
    share = torch.exp(sinks.float()[None, :, None] - lse)
    # a hidden row's delta may be nan; it has no share
    return -torch.where(share > 0, share * delta, 0.0).sum((0, 2)).to(sinks.dtype)


def output_dtype(query: Tensor) -> torch.dtype:
    return torch.bfloat16 if query.dtype in FLOAT8S else query.dtype


def are_heads_first(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all three are dense as (B, heads, length, dim), and not as (B, length, heads, dim)."""
    three = (query, key, value)
    return not all(x.is_contiguous() for x in three) and all(x.transpose(1, 2).is_contiguous() for x in three)


def empty_rows(like: Tensor, shape: tuple[int, ...], heads_first: bool, dtype: torch.dtype) -> Tensor:
    """An empty (B, length, heads, dim), with the heads before the length in memory where `heads_first`."""
    B, L, H, D = shape
    if heads_first:
        return like.new_empty((B, H, L, D), dtype=dtype).transpose(1, 2)
    return like.new_empty(shape, dtype=dtype)

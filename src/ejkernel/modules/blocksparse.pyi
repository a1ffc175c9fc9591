"""Made by tests/stubs.py from blocksparse.py."""

from typing import Any, Literal, overload

import jax
from jaxtyping import Array, Float

from ejkernel.types import MaskInfo

@overload
def blocksparse_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    softmax_aux: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    block_mask: Any,
    block_size: int | tuple[int, int] | None = None,
    mask_info: MaskInfo | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    return_lse: Literal[False] = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array: ...
@overload
def blocksparse_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    softmax_aux: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    block_mask: Any,
    block_size: int | tuple[int, int] | None = None,
    mask_info: MaskInfo | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    return_lse: Literal[True],
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def blocksparse_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    softmax_aux: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    block_mask: Any,
    block_size: int | tuple[int, int] | None = None,
    mask_info: MaskInfo | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    return_lse: bool,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...

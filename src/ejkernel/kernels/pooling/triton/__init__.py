"""Mean pooling in Triton: forward one program per row and slice of its width, backward per block of tokens."""

from dataclasses import dataclass
from itertools import product

import jax

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.sizes import ceil_div, power_of_two
from ejkernel.kernels.pooling.spec import batch, row_bounds, token_rows
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays


@dataclass(frozen=True)
class Config:
    """Tile of tokens by channels (heads and head_dim together), and warps."""

    block_t: int = 4
    block_w: int = 1024
    num_warps: int = 4

    def __post_init__(self) -> None:
        config_ints(self, ("block_t", "block_w", "num_warps"), power_of_two=True)
        if self.num_warps > 16:
            raise ValueError(f"num_warps={self.num_warps} must be at most 16")


def unsupported(call: Call) -> list[str]:
    return []


def default_config(call: Call) -> Config:
    """Wide and flat: best of a search on an H200 at 2048 channels; fewer channels take more tokens (not searched)."""
    _, _, H, D = call["x"].shape
    block_w = min(1024, power_of_two(H * D, 16))
    block_t = min(4096 // block_w, power_of_two(call.spec.chunk_size))
    return Config(block_t, block_w, num_warps=min(4, max(1, block_t * block_w // 1024)))


def search_space(call: Call) -> list[Config]:
    return [Config(*tile) for tile in product((4, 8, 16, 32), (64, 128, 256, 512, 1024, 2048), (1, 2, 4))]


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    from ejkernel.bridge import triton_call
    from ejkernel.kernels.pooling.triton.kernels import pooling_fwd_kernel

    x, bounds = call["x"], row_bounds(call)
    B, rows, (_, T, H, D) = batch(call), call.spec.rows, x.shape
    out = triton_call(
        pooling_fwd_kernel,
        x,
        bounds,
        T,
        rows,
        out_shape=jax.ShapeDtypeStruct((B, rows, H, D), x.dtype),
        grid=(B * rows * ceil_div(H * D, config.block_w),),
        num_warps=config.num_warps,
        X_BATCHED=x.shape[0] > 1,
        BOUNDS_BATCHED=bounds.shape[0] > 1,
        W=H * D,
        BLOCK_T=config.block_t,
        BLOCK_W=config.block_w,
    )
    return {"out": out}, {}


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    from ejkernel.bridge import triton_call
    from ejkernel.kernels.pooling.triton.kernels import pooling_bwd_kernel

    x, dout, bounds, tokens = call["x"], cotangents["out"], row_bounds(call), token_rows(call)
    B, T, H, D = x.shape
    dx = triton_call(
        pooling_bwd_kernel,
        dout,
        bounds,
        tokens,
        T,
        call.spec.rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(B * ceil_div(T, config.block_t) * ceil_div(H * D, config.block_w),),
        num_warps=config.num_warps,
        BOUNDS_BATCHED=bounds.shape[0] > 1,
        W=H * D,
        BLOCK_T=config.block_t,
        BLOCK_W=config.block_w,
    )
    return {"x": dx}


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward, backward)

"""Mean pooling in Triton: forward one program per row and slice of its width, backward per block of tokens."""

import math
from dataclasses import dataclass
from itertools import product

import jax

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.sizes import ceil_div, power_of_two
from ejkernel.kernels.common.triton_launch import TritonLaunch
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
    block_w = min(1024, power_of_two(math.prod(call["x"].shape[2:]), 16))
    block_t = min(4096 // block_w, power_of_two(call.spec.chunk_size))
    return Config(block_t, block_w, num_warps=min(4, max(1, block_t * block_w // 1024)))


def search_space(call: Call) -> list[Config]:
    return [Config(*tile) for tile in product((4, 8, 16, 32), (64, 128, 256, 512, 1024, 2048), (1, 2, 4))]


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    from ejkernel.kernels.pooling.triton.kernels import pooling_fwd_kernel

    x, B, rows = call["x"], batch(call), call.spec.rows
    struct = jax.ShapeDtypeStruct((B, rows, *x.shape[2:]), x.dtype)
    return {"out": _launch(call, config, B * rows, p_x=x).run(pooling_fwd_kernel, struct)}, {}


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    from ejkernel.kernels.pooling.triton.kernels import pooling_bwd_kernel

    x, blocks = call["x"], ceil_div(call["x"].shape[1], config.block_t)
    arrays = {"p_dout": cotangents["out"], "p_token_rows": token_rows(call)}
    launch = _launch(call, config, x.shape[0] * blocks, **arrays)
    return {"x": launch.run(pooling_bwd_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))}


def _launch(call: Call, config: Config, programs: int, **arrays: jax.Array) -> TritonLaunch:
    """A launch of so many programs for each block of channels."""
    from ejkernel.kernels.pooling.triton.kernels import Constants

    (B, T, *channels), bounds = call["x"].shape, row_bounds(call)
    W = math.prod(channels)
    constants = Constants(B > 1, bounds.shape[0] > 1, W, config.block_t, config.block_w)
    values = {"p_bounds": bounds, "T": T, "rows": call.spec.rows, **arrays}
    return TritonLaunch(values, constants, (programs * ceil_div(W, config.block_w),), config.num_warps, 2)


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward, backward)

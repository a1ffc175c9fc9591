"""How the Triton kernels of the delta rule are cut: configs, and what they can do."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.linear.delta.spec import dimensions
from ejkernel.ops import Call

_MAX_CHANNELS = 256
_MAX_TOKENS_ONE_BY_ONE = 16


@dataclass(frozen=True)
class Config:
    """How chunks are cut.

    Attributes:
        chunk: tokens done at once; 1 is the recurrence itself, whose gradient takes 16.
        block_v: channels of values of a program that keeps a state.
        num_warps: warps of it.
        num_stages: chunks in flight.
        chunk_warps: warps of a program that has one chunk.
    """

    chunk: int = 64
    block_v: int = 32
    num_warps: int = 4
    num_stages: int = 2
    chunk_warps: int = 8

    def __post_init__(self) -> None:
        config_ints(self, ("chunk", "block_v", "num_warps", "chunk_warps"), power_of_two=True)
        config_ints(self, ("num_stages",))
        if self.chunk not in (1, 16, 32, 64):
            raise ValueError(f"chunk={self.chunk} must be 1, 16, 32 or 64")
        if self.block_v < 16:
            raise ValueError(f"block_v={self.block_v} must be at least 16")


def unsupported(call: Call) -> list[str]:
    dims = dimensions(call)
    most = max(dims.D, dims.Dv)
    return [f"head_dim {most} is above {_MAX_CHANNELS}"] if most > _MAX_CHANNELS else []


def default_config(call: Call) -> Config:
    dims = dimensions(call)
    if dims.T <= _MAX_TOKENS_ONE_BY_ONE:
        return Config(chunk=1, block_v=16 if dims.D > 64 else 32)
    large, float32 = dims.D > 128, call["query"].dtype == jnp.float32
    # without products of warpgroups, operands are in registers
    small = call.target.arch.startswith(("sm_8", "sm_12"))
    chunk = max(16, 64 >> (large + float32 + small))
    block_v = 32 if large or float32 or small else 64
    return Config(chunk, min(block_v, power_of_two(dims.Dv, 16)), num_stages=1 if large else 2)


def search_space(call: Call) -> list[Config]:
    default, dims = default_config(call), dimensions(call)
    if default.chunk == 1:
        return [Config(1, block_v, warps) for block_v in (16, 32, 64) for warps in (1, 2, 4)]
    blocks = [n for n in (16, 32, 64, 128) if n <= power_of_two(dims.Dv, 16)]
    configs = [default, *(replace(default, block_v=n, num_warps=w) for n in blocks for w in (4, 8))]
    configs += [replace(default, num_stages=n) for n in (1, 2, 3)]
    configs += [replace(default, chunk_warps=n) for n in (4, 8)]
    configs += [replace(default, chunk=n) for n in (16, 32, 64)]
    return list(dict.fromkeys(configs))

"""How Triton scans are cut: configs, and what they can do."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.sizes import ceil_div, power_of_two
from ejkernel.kernels.linear.spec import dimensions
from ejkernel.ops import Call

_MAX_CHANNELS = 256
_MAX_TOKENS_ONE_BY_ONE = 16


@dataclass(frozen=True)
class Config:
    """How a scan is cut.

    Attributes:
        chunk: tokens done at once; 1 is the recurrence itself.
        segment: tokens of a segment; segments run side by side, after a scan for their states alone. 0: one a sequence.
        block_c: channels of a program.
        num_warps: warps of a program.
        num_stages: chunks in flight.
    """

    chunk: int = 64
    segment: int = 0
    block_c: int = 64
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        config_ints(self, ("chunk", "block_c", "num_warps"), power_of_two=True)
        config_ints(self, ("num_stages",))
        config_ints(self, ("segment",), 0)
        if 1 < self.chunk < 16 or self.chunk > 128:
            raise ValueError(f"chunk={self.chunk} must be 1, or from 16 to 128")
        if self.block_c < 16:
            raise ValueError(f"block_c={self.block_c} must be at least 16")
        if self.segment % self.chunk:
            raise ValueError(f"segment={self.segment} must be a multiple of chunk={self.chunk}")

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile: what products take at least."""
        return max(self.chunk, 16)


def tile_channels(n: int) -> int:
    """Channels of a tile that holds all n."""
    return power_of_two(n, 16)


def unsupported(call: Call) -> list[str]:
    dims = dimensions(call)
    most = max(dims.D, dims.Dv)
    return [f"head_dim {most} is above {_MAX_CHANNELS}"] if most > _MAX_CHANNELS else []


def default_config(call: Call) -> Config:
    dims = dimensions(call)
    if dims.T <= _MAX_TOKENS_ONE_BY_ONE:
        return Config(chunk=1, block_c=16 if max(dims.D, dims.Dv) > 64 else 32)
    float32, large = call["query"].dtype == jnp.float32, max(dims.D, dims.Dv) > 128
    # without products of warpgroups, operands are in registers
    small = call.target.arch.startswith(("sm_8", "sm_12"))
    wide = large or float32
    block_c, warps = 32 if wide else 64, 8 if wide or small else 4
    chunk = 32 if wide and ("gk" in call or "gv" in call or small) else 64
    if float32 and (large or small):
        chunk = 16  # what fits in the 99 KB of shared memory that small GPUs have, and in registers
    programs = dims.B * dims.H * ceil_div(max(dims.D, dims.Dv), block_c)
    return Config(chunk, _segment(dims.T, programs, call.target.cores or 132), block_c, warps)


def _segment(T: int, programs: int, cores: int) -> int:
    """Tokens of a segment: none where sequences alone keep the chip busy, else a power of two from 512 on."""
    if programs >= cores or T < 1024:
        return 0
    wanted = max(2, ceil_div(4 * cores, programs))
    return power_of_two(ceil_div(T, wanted), 512)


def search_space(call: Call) -> list[Config]:
    default, dims = default_config(call), dimensions(call)
    if default.chunk == 1:
        return [Config(1, 0, block_c, warps) for block_c in (16, 32, 64) for warps in (2, 4, 8)]
    segments = {default.segment // 2, default.segment * 2} - {default.segment}
    # one thing at a time, and wide tiles for as many warps: each config takes seconds to compile
    configs = [default, *(replace(default, segment=n) for n in sorted(segments) if n % default.chunk == 0)]
    wider = [n for n in (32, 64, 128) if n <= tile_channels(max(dims.D, dims.Dv))]
    configs += [replace(default, block_c=n, num_warps=default.num_warps * n // default.block_c) for n in wider]
    configs += [replace(default, num_warps=n) for n in (4, 8)]
    configs += [replace(default, num_stages=n) for n in (1, 2, 3)]
    configs += [replace(default, chunk=n) for n in (32, 64) if default.segment % n == 0]
    return [config for config in dict.fromkeys(configs) if 2 <= config.num_warps <= 8]

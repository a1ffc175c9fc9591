"""Mean pooling in Triton: forward one program per row and slice of its width, backward per block of tokens."""

from dataclasses import dataclass
from itertools import product

import jax
import triton
import triton.language as tl

from ejkernel.bridge import triton_call
from ejkernel.checks.options import config_ints
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
    block_w = min(1024, max(16, triton.next_power_of_2(H * D)))
    block_t = min(4096 // block_w, triton.next_power_of_2(call.spec.chunk_size))
    return Config(block_t, block_w, num_warps=min(4, max(1, block_t * block_w // 1024)))


def search_space(call: Call) -> list[Config]:
    return [Config(*tile) for tile in product((4, 8, 16, 32), (64, 128, 256, 512, 1024, 2048), (1, 2, 4))]


@triton.jit
def _row_of_program(ROWS, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Batch, row and channels of a program; one grid dimension, because the others end at 65535."""
    i = tl.program_id(0)
    NW: tl.constexpr = tl.cdiv(W, BLOCK_W)
    i_row = i // NW
    o_w = (i % NW) * BLOCK_W + tl.arange(0, BLOCK_W)
    return (i_row // ROWS).to(tl.int64), i_row % ROWS, o_w


@triton.jit
def pooling_fwd_kernel(
    p_x,
    p_bounds,
    T,
    rows,
    p_out,
    X_BATCHED: tl.constexpr,
    BOUNDS_BATCHED: tl.constexpr,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i_b, i_r, o_w = _row_of_program(rows, W, BLOCK_W)
    p_bounds += (i_b * rows * BOUNDS_BATCHED + i_r) * 2
    start = tl.load(p_bounds)
    end = tl.load(p_bounds + 1)
    # the constant W last: it tells the compiler that addresses stay aligned
    p_x += i_b * T * X_BATCHED * W
    # [BLOCK_W]
    b_sum = tl.zeros([BLOCK_W], tl.float32)
    for i_t in range(start, end, BLOCK_T):
        o_t = i_t + tl.arange(0, BLOCK_T)
        m_x = (o_t < end)[:, None] & (o_w < W)
        # [BLOCK_T, BLOCK_W]
        b_x = tl.load(p_x + o_t.to(tl.int64)[:, None] * W + o_w, mask=m_x, other=0.0)
        b_sum += tl.sum(b_x.to(tl.float32), 0)
    # an empty row is written too: zero
    b_out = b_sum / tl.maximum(end - start, 1).to(tl.float32)
    tl.store(p_out + (i_b * rows + i_r) * W + o_w, b_out.to(p_out.dtype.element_ty), mask=o_w < W)


@triton.jit
def pooling_bwd_kernel(
    p_dout,
    p_bounds,
    p_token_rows,
    T,
    rows,
    p_dx,
    BOUNDS_BATCHED: tl.constexpr,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i_b, i_t, o_w = _row_of_program(tl.cdiv(T, BLOCK_T), W, BLOCK_W)
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    # [BLOCK_T]: the row each token went into, -1 for none
    b_row = tl.load(p_token_rows + i_b * T * BOUNDS_BATCHED + o_t, mask=o_t < T, other=-1)
    m_row = b_row >= 0
    p_bounds += (i_b * rows * BOUNDS_BATCHED + b_row) * 2
    b_count = tl.load(p_bounds + 1, mask=m_row, other=1) - tl.load(p_bounds, mask=m_row, other=0)
    m_w = (o_w < W)[None, :]
    # [BLOCK_T, BLOCK_W]
    p_row = p_dout + (i_b * rows + b_row)[:, None] * W + o_w
    b_dout = tl.load(p_row, mask=m_row[:, None] & m_w, other=0.0).to(tl.float32)
    b_dx = b_dout / b_count.to(tl.float32)[:, None]
    p_dx += i_b * T * W + o_t.to(tl.int64)[:, None] * W + o_w
    tl.store(p_dx, b_dx.to(p_dx.dtype.element_ty), mask=(o_t < T)[:, None] & m_w)


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    x, bounds = call["x"], row_bounds(call)
    B, rows, (_, T, H, D) = batch(call), call.spec.rows, x.shape
    out = triton_call(
        pooling_fwd_kernel,
        x,
        bounds,
        T,
        rows,
        out_shape=jax.ShapeDtypeStruct((B, rows, H, D), x.dtype),
        grid=(B * rows * triton.cdiv(H * D, config.block_w),),
        num_warps=config.num_warps,
        X_BATCHED=x.shape[0] > 1,
        BOUNDS_BATCHED=bounds.shape[0] > 1,
        W=H * D,
        BLOCK_T=config.block_t,
        BLOCK_W=config.block_w,
    )
    return {"out": out}, {}


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
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
        grid=(B * triton.cdiv(T, config.block_t) * triton.cdiv(H * D, config.block_w),),
        num_warps=config.num_warps,
        BOUNDS_BATCHED=bounds.shape[0] > 1,
        W=H * D,
        BLOCK_T=config.block_t,
        BLOCK_W=config.block_w,
    )
    return {"x": dx}


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward, backward)

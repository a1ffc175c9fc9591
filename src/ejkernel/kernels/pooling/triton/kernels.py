"""The kernels of mean pooling: forward by rows of the result, backward by blocks of tokens."""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Constants:
    """What a launch is compiled for, as the one constexpr `C` of both kernels.

    Attributes:
        X_BATCHED, BOUNDS_BATCHED: whether each row of the batch has its tokens, and its bounds.
        W: channels of a token.
        BLOCK_T, BLOCK_W: tokens and channels of a tile.
    """

    X_BATCHED: bool
    BOUNDS_BATCHED: bool
    W: int
    BLOCK_T: int
    BLOCK_W: int


@triton.jit
def _row_of_program(ROWS, C: tl.constexpr):
    """Batch, row and channels of a program; one grid dimension, because the others end at 65535."""
    i = tl.program_id(0)
    NW: tl.constexpr = tl.cdiv(C.W, C.BLOCK_W)
    i_row = i // NW
    o_w = (i % NW) * C.BLOCK_W + tl.arange(0, C.BLOCK_W)
    return (i_row // ROWS).to(tl.int64), i_row % ROWS, o_w


@triton.jit
def pooling_fwd_kernel(p_x, p_bounds, T, rows, p_out, C: tl.constexpr):
    i_b, i_r, o_w = _row_of_program(rows, C)
    p_bounds += (i_b * rows * C.BOUNDS_BATCHED + i_r) * 2
    start = tl.load(p_bounds)
    end = tl.load(p_bounds + 1)
    # the constant W last: it tells the compiler that addresses stay aligned
    p_x += i_b * T * C.X_BATCHED * C.W
    # [BLOCK_W]
    b_sum = tl.full([C.BLOCK_W], 0.0, tl.float32)
    for i_t in range(start, end, C.BLOCK_T):
        o_t = i_t + tl.arange(0, C.BLOCK_T)
        m_x = (o_t < end)[:, None] & (o_w < C.W)
        # [BLOCK_T, BLOCK_W]
        b_x = tl.load(p_x + o_t.to(tl.int64)[:, None] * C.W + o_w, mask=m_x, other=0.0)
        b_sum += tl.sum(b_x.to(tl.float32), 0)
    # an empty row is written too: zero
    b_out = b_sum / tl.maximum(end - start, 1).to(tl.float32)
    tl.store(p_out + (i_b * rows + i_r) * C.W + o_w, b_out.to(p_out.dtype.element_ty), mask=o_w < C.W)


@triton.jit
def pooling_bwd_kernel(p_dout, p_bounds, p_token_rows, T, rows, p_dx, C: tl.constexpr):
    i_b, i_t, o_w = _row_of_program(tl.cdiv(T, C.BLOCK_T), C)
    o_t = i_t * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
    # [BLOCK_T]: the row each token went into, -1 for none
    b_row = tl.load(p_token_rows + i_b * T * C.BOUNDS_BATCHED + o_t, mask=o_t < T, other=-1)
    m_row = b_row >= 0
    p_bounds += (i_b * rows * C.BOUNDS_BATCHED + b_row) * 2
    b_count = tl.load(p_bounds + 1, mask=m_row, other=1) - tl.load(p_bounds, mask=m_row, other=0)
    m_w = (o_w < C.W)[None, :]
    # [BLOCK_T, BLOCK_W]
    p_row = p_dout + (i_b * rows + b_row)[:, None] * C.W + o_w
    b_dout = tl.load(p_row, mask=m_row[:, None] & m_w, other=0.0).to(tl.float32)
    b_dx = b_dout / b_count.to(tl.float32)[:, None]
    p_dx += i_b * T * C.W + o_t.to(tl.int64)[:, None] * C.W + o_w
    tl.store(p_dx, b_dx.to(p_dx.dtype.element_ty), mask=(o_t < T)[:, None] & m_w)

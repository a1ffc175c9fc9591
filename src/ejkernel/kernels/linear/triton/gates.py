"""Decays of every channel in Triton, before the walks and behind them: steps, scaled arrays, and the decays' gradients.

What middle and steps are says scan.py.
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E
from ejkernel.kernels.linear.chunks import NEAR, NEAR_DECAY
from ejkernel.kernels.linear.triton.tiles import load_gates, load_tile, middle_sums, place, store_tile

# what the exponent of a decay relative to a middle may come to
_FAR = tl.constexpr(-NEAR // 2 * NEAR_DECAY)


@triton.jit
def _reach(b_size, n: tl.constexpr):
    """The largest sum in a channel over n tokens of (R, BC)."""
    R: tl.constexpr = b_size.shape[0]
    BC: tl.constexpr = b_size.shape[1]
    return tl.max(tl.max(tl.sum(tl.reshape(b_size, [R // n, n, BC]), 1), 1), 0)


@triton.jit
def linear_steps_kernel(
    p_gates,
    p_pieces,
    T,
    p_steps,
    H: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    PACKED: tl.constexpr,
    PIECES_BATCHED: tl.constexpr,
):
    """(B, rows, H): how many tokens of a chunk can be done at once; LEAST is 8, or 4 for two kinds of decays."""
    i_b, i_h, _, i_start, n, i_slot, _ = place(p_pieces, T, CHUNK, ROWS, PIECES_BATCHED, PACKED, H, 1)
    o_i = tl.arange(0, CHUNK)
    m_i = (o_i < n) & (i_slot >= 0)
    p_gates += ((i_b * T + i_start) * H + i_h).to(tl.int64) * C
    b_gates = load_gates(p_gates, o_i * H, m_i, C, BC, 0)
    b_size = tl.abs(b_gates.to(tl.float32))
    n_step = CHUNK
    # a step reaches over half of it; most chunks pass by their largest decay alone
    if tl.max(b_size) * (CHUNK // 2) * 8 > _FAR * LEAST:
        for k in tl.static_range(1, 7):
            if CHUNK >> k >= LEAST:
                if _reach(b_size, CHUNK >> k) * 8 > _FAR * LEAST:
                    n_step = CHUNK >> k
    i_row = (tl.program_id(0) // H).to(tl.int64)
    tl.store(p_steps + i_row * H + i_h, n_step)


@triton.jit
def linear_scale_kernel(
    p_x,
    p_y,
    p_gates,
    p_steps,
    p_pieces,
    T,
    p_scaled_x,
    p_scaled_y,
    p_before,
    p_behind,
    H: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BC: tl.constexpr,
    CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
    PIECES_BATCHED: tl.constexpr,
    DESCENDING: tl.constexpr,
    HAS_X: tl.constexpr,
    WITH_X: tl.constexpr,
    HAS_Y: tl.constexpr,
    PARTS: tl.constexpr,
):
    """x times its decays from the middle of each chunk, y times their inverse; and sums of decays before and behind it.

    Without x, ones are. A program has CHUNK tokens, which may be several chunks.
    """
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    DIRECTION: tl.constexpr = -1 if DESCENDING else 1
    i_b, i_h, i_c, i_start, n, i_slot, i_n = place(p_pieces, T, CHUNK, ROWS, PIECES_BATCHED, PACKED, H, BLOCKS)
    i_first = i_c * BC
    o_i = tl.arange(0, CHUNK)
    o_c = i_first + tl.arange(0, BC)
    o_t = o_i * (DIRECTION * H)
    step = tl.load(p_steps + i_b * H + i_h)
    if (n > 0) & (i_slot >= 0):
        for i in range(0, n, step):
            # the tokens of the chunk in the order of the walk
            i_at = i + step - 1 if DESCENDING else i
            i_token = ((i_b * T + i_start + i_at) * H + i_h).to(tl.int64) * C
            m_i = ((i_at - o_i if DESCENDING else i_at + o_i) < n) & (o_i < step)
            # all loads before the sums, which wait for theirs
            if HAS_X:
                b_x = load_tile(p_x + i_token, o_t, m_i, C, BC, i_first)
            if HAS_Y:
                b_y = load_tile(p_y + i_token, o_t, m_i, C, BC, i_first)
            b_gates = load_gates(p_gates + i_token, o_t, m_i, C, BC, i_first)
            b_sum = middle_sums(b_gates, step, PARTS)
            if WITH_X:
                b_power = tl.exp2(b_sum)
                store_tile(p_scaled_x + i_token, b_x * b_power if HAS_X else b_power, o_t, m_i, C, BC, i_first)
            if HAS_Y:
                store_tile(p_scaled_y + i_token, b_y * tl.exp2(-b_sum), o_t, m_i, C, BC, i_first)
            # from the middle back to the first token, and on to the last
            p_chunk = ((i_b * CHUNKS + (i_start + i) // step + i_n) * H + i_h).to(tl.int64) * C + o_c[None, :]
            m_c = (o_c < C)[None, :]
            b_before = b_gates.to(tl.float32) * LOG2_E - b_sum
            tl.store(p_before + p_chunk + o_i[:, None] * 0, b_before, mask=m_c & (o_i == 0)[:, None])
            tl.store(p_behind + p_chunk + o_i[:, None] * 0, b_sum, mask=m_c & (o_i == step - 1)[:, None])


@triton.jit
def linear_gates_kernel(
    p_x,
    p_dx,
    p_y,
    p_dy,
    p_sums_start,
    p_pieces,
    T,
    segment,
    p_sums,
    H: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BC: tl.constexpr,
    CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
    PIECES_BATCHED: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_DX: tl.constexpr,
    HAS_SUMS_START: tl.constexpr,
    DESCENDING: tl.constexpr,
):
    """Sums of x dx - y dy along a walk, from what they had come to before the piece: per channel, or over all (BC)."""
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    i_b, i_h, i_c, i_start, n, i_slot, _ = place(p_pieces, T, segment, ROWS, PIECES_BATCHED, PACKED, H, BLOCKS)
    m_real = i_slot >= 0
    i_first = i_c * BC
    o_i = tl.arange(0, CHUNK)
    o_c = i_first + tl.arange(0, BC)
    DIRECTION: tl.constexpr = -1 if DESCENDING else 1
    o_t = o_i * (DIRECTION * H)
    i_token = ((i_b * T + i_start + (n - 1 if DESCENDING else 0)) * H + i_h).to(tl.int64)
    i_row = (i_b * SLOTS + i_slot) * H + i_h
    if PER_CHANNEL:
        b_before = tl.zeros([BC], tl.float32)
        if HAS_SUMS_START:
            b_before = tl.load(p_sums_start + i_row * C + o_c, mask=(o_c < C) & m_real, other=0.0)
    else:
        b_before = 0.0
        if HAS_SUMS_START:
            b_before = tl.load(p_sums_start + i_row, mask=m_real, other=0.0)
    for i in range(0, n, CHUNK):
        m_i = i + o_i < n
        m_l = m_i & m_real
        b_y = load_tile(p_y + i_token * C, o_t, m_l, C, BC, i_first).to(tl.float32)
        b_p = -b_y * load_tile(p_dy + i_token * C, o_t, m_l, C, BC, i_first)
        if HAS_DX:
            b_x = load_tile(p_x + i_token * C, o_t, m_l, C, BC, i_first).to(tl.float32)
            b_p += b_x * load_tile(p_dx + i_token * C, o_t, m_l, C, BC, i_first)
        if PER_CHANNEL:
            store_tile(p_sums + i_token * C, tl.cumsum(b_p, 0) + b_before[None, :], o_t, m_i, C, BC, i_first)
            b_before += tl.sum(b_p, 0)
        else:
            b_one = tl.sum(b_p, 1)
            tl.store(p_sums + i_token + o_t, tl.cumsum(b_one, 0) + b_before, mask=m_i)
            b_before += tl.sum(b_one, 0)
        i_token += DIRECTION * CHUNK * H

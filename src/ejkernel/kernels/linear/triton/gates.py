"""Decays of every channel in Triton, before the scans and after: chunk lengths, scaled arrays, the decays' gradients.

What is meant by the middle of a chunk, and why chunks may be shorter than tiles, says scan.py.
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E, load_tile, store_tile
from ejkernel.kernels.linear.chunks import NEAR, NEAR_DECAY
from ejkernel.kernels.linear.triton.tiles import load_gates, middle_sums, program_coordinates

_NEAR = tl.constexpr(NEAR)
# the largest exponent of a decay relative to the middle of a chunk
_FAR = tl.constexpr(-NEAR // 2 * NEAR_DECAY)


@triton.jit
def _largest_sum(b_size, n: tl.constexpr):
    """The largest sum in a channel over n tokens of (R, BC)."""
    R: tl.constexpr = b_size.shape[0]
    BC: tl.constexpr = b_size.shape[1]
    return tl.max(tl.max(tl.sum(tl.reshape(b_size, [R // n, n, BC]), 1), 1), 0)


@triton.jit
def linear_chunk_length_kernel(p_gates, p_segments, T, p_lengths, C: tl.constexpr):
    """(B, segments, H): how many tokens of a tile can be done at once, LEAST at least."""
    i_b, i_h, _, i_start, n, i_slot, _ = program_coordinates(p_segments, T, C.CHUNK, C)
    o_i = tl.arange(0, C.CHUNK)
    m_i = (o_i < n) & (i_slot >= 0)
    p_gates += ((i_b * T + i_start) * C.H + i_h).to(tl.int64) * C.C
    b_gates = load_gates(p_gates, o_i * (C.H * C.C), m_i, C.C, C.BC, 0)
    b_size = tl.abs(b_gates.to(tl.float32))
    n_chunk = C.CHUNK
    # exponents grow over half a chunk; most tiles pass by their largest decay alone
    if tl.max(b_size) * (C.CHUNK // 2) * _NEAR > _FAR * C.LEAST:
        for k in tl.static_range(1, 7):
            if C.CHUNK >> k >= C.LEAST:
                if _largest_sum(b_size, C.CHUNK >> k) * _NEAR > _FAR * C.LEAST:
                    n_chunk = C.CHUNK >> k
    i_row = (tl.program_id(0) // C.H).to(tl.int64)
    tl.store(p_lengths + i_row * C.H + i_h, n_chunk)


@triton.jit
def linear_scale_kernel(
    p_x,
    p_y,
    p_gates,
    p_chunk_lengths,
    p_segments,
    T,
    p_scaled_x,
    p_scaled_y,
    p_before,
    p_after,
    C: tl.constexpr,
):
    """x times its decays from the middle of each chunk, y times their inverse; and the sums of decays of both halves.

    Without x, ones are. A program has CHUNK tokens, which may be several chunks.
    """
    i_b, i_h, i_c, i_start, n, i_slot, i_n = program_coordinates(p_segments, T, C.CHUNK, C)
    i_first = i_c * C.BC
    o_i = tl.arange(0, C.CHUNK)
    o_c = i_first + tl.arange(0, C.BC)
    o_t = o_i * (C.DIRECTION * C.H * C.C)
    n_chunk = tl.load(p_chunk_lengths + i_b * C.H + i_h)
    if (n > 0) & (i_slot >= 0):
        for i in range(0, n, n_chunk):
            # the tokens of the chunk in the order of the scan
            i_at = i + n_chunk - 1 if C.DESCENDING else i
            i_token = ((i_b * T + i_start + i_at) * C.H + i_h).to(tl.int64) * C.C
            m_i = ((i_at - o_i if C.DESCENDING else i_at + o_i) < n) & (o_i < n_chunk)
            # all loads before the sums, which wait for theirs
            if C.HAS_X:
                b_x = load_tile(p_x + i_token, o_t, m_i, C.C, C.BC, i_first)
            if C.HAS_Y:
                b_y = load_tile(p_y + i_token, o_t, m_i, C.C, C.BC, i_first)
            b_gates = load_gates(p_gates + i_token, o_t, m_i, C.C, C.BC, i_first)
            b_sum = middle_sums(b_gates, n_chunk, C.TERMS)
            if C.WITH_SCALED:
                b_power = tl.exp2(b_sum)
                b_scaled = b_x * b_power if C.HAS_X else b_power
                store_tile(p_scaled_x + i_token, b_scaled, o_t, m_i, C.C, C.BC, i_first)
            if C.HAS_Y:
                store_tile(p_scaled_y + i_token, b_y * tl.exp2(-b_sum), o_t, m_i, C.C, C.BC, i_first)
            # from the middle back to the first token, and on to the last
            p_chunk = ((i_b * C.MAX_CHUNKS + (i_start + i) // n_chunk + i_n) * C.H + i_h).to(tl.int64) * C.C
            p_chunk += o_c[None, :]
            m_c = (o_c < C.C)[None, :]
            b_before = b_gates.to(tl.float32) * LOG2_E - b_sum
            tl.store(p_before + p_chunk + o_i[:, None] * 0, b_before, mask=m_c & (o_i == 0)[:, None])
            tl.store(p_after + p_chunk + o_i[:, None] * 0, b_sum, mask=m_c & (o_i == n_chunk - 1)[:, None])


@triton.jit
def linear_gate_gradients_kernel(
    p_x,
    p_dx,
    p_y,
    p_dy,
    p_sums_start,
    p_segments,
    T,
    segment,
    p_sums,
    C: tl.constexpr,
):
    """Sums of x dx - y dy along a scan, on from those before the segment: per channel, or over all channels."""
    i_b, i_h, i_c, i_start, n, i_slot, _ = program_coordinates(p_segments, T, segment, C)
    m_real = i_slot >= 0
    i_first = i_c * C.BC
    o_i = tl.arange(0, C.CHUNK)
    o_c = i_first + tl.arange(0, C.BC)
    o_t = o_i * (C.DIRECTION * C.H)
    i_token = ((i_b * T + i_start + (n - 1 if C.DESCENDING else 0)) * C.H + i_h).to(tl.int64)
    i_row = (i_b * C.SLOTS + i_slot) * C.H + i_h
    if C.PER_CHANNEL:
        b_before = tl.full([C.BC], 0.0, tl.float32)
        if C.HAS_SUMS_START:
            b_before = tl.load(p_sums_start + i_row * C.C + o_c, mask=(o_c < C.C) & m_real, other=0.0)
    else:
        b_before = 0.0
        if C.HAS_SUMS_START:
            b_before = tl.load(p_sums_start + i_row, mask=m_real, other=0.0)
    for i in range(0, n, C.CHUNK):
        m_i = i + o_i < n
        m_l = m_i & m_real
        b_y = load_tile(p_y + i_token * C.C, o_t * C.C, m_l, C.C, C.BC, i_first).to(tl.float32)
        b_p = -b_y * load_tile(p_dy + i_token * C.C, o_t * C.C, m_l, C.C, C.BC, i_first)
        if C.HAS_X:
            b_x = load_tile(p_x + i_token * C.C, o_t * C.C, m_l, C.C, C.BC, i_first).to(tl.float32)
            b_p += b_x * load_tile(p_dx + i_token * C.C, o_t * C.C, m_l, C.C, C.BC, i_first)
        if C.PER_CHANNEL:
            b_sums = tl.cumsum(b_p, 0) + b_before[None, :]
            store_tile(p_sums + i_token * C.C, b_sums, o_t * C.C, m_i, C.C, C.BC, i_first)
            b_before += tl.sum(b_p, 0)
        else:
            b_one = tl.sum(b_p, 1)
            tl.store(p_sums + i_token + o_t, tl.cumsum(b_one, 0) + b_before, mask=m_i)
            b_before += tl.sum(b_one, 0)
        i_token += C.DIRECTION * C.CHUNK * C.H

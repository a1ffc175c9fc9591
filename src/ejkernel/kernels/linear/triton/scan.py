"""The scan in Triton: one kernel goes along a segment chunk by chunk, another token by token.

A program has one head, one segment and BC channels of c; its state (BA, BC) stays in registers, in float32, and with it
its tangent where that is wanted. Of 16 bits the state is kept transposed: the compiler then needs fewer registers.

Decays of every channel are relative to the middle of a chunk: exp(sum) from there to a token multiplies what looks back
(queries, and gradients of outputs), its inverse what is looked at. Arrays are multiplied by them beforehand, once for
all scans that need them, and outputs by the powers themselves, kept likewise; the state is decayed to the middle before
a chunk meets it, and to the end after it.
Exponents must stay small, so chunks of heads with strong decays are shorter than tiles (`p_chunk_lengths`).
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E, load_tile, store_tile
from ejkernel.kernels.linear.triton.tiles import (
    along,
    chunk_decays,
    decay_exponent,
    decay_power,
    decayed_states,
    decays_between,
    outer_dot,
    program_coordinates,
    rounded_factor,
    state_dot,
    state_offsets,
    wide_dot,
)


@triton.jit
def linear_chunk_kernel(
    p_a,
    p_b,
    p_c,
    p_g,
    p_gamma,
    p_power,
    p_chunk_lengths,
    p_before,
    p_after,
    p_outer_before,
    p_outer_after,
    p_start,
    p_segments,
    T,
    segment,
    scale,
    p_out,
    p_strict,
    p_state,
    p_totals,
    p_outer_totals,
    C: tl.constexpr,
):
    narrow: tl.constexpr = p_out.dtype.element_ty
    EXACT: tl.constexpr = narrow == tl.float32
    i_b, i_h, i_c, i_start, n, i_slot, i_n = program_coordinates(p_segments, T, segment, C)
    # padding is scanned too, to write zeros, but never read
    m_real = i_slot >= 0
    i_first = i_c * C.BC
    o_i = tl.arange(0, C.CHUNK)
    o_a = tl.arange(0, C.BA)
    o_c = i_first + tl.arange(0, C.BC)
    if C.HAS_CHANNELS:
        n_chunk = tl.load(p_chunk_lengths + i_b * C.H + i_h)
    else:
        n_chunk = C.CHUNK
    # chunks are cut from the first token of a segment on, whichever way the scan goes
    i_at = tl.cdiv(n, n_chunk) * n_chunk - 1 if C.DESCENDING else 0
    i_token = ((i_b * T + i_start + i_at) * C.H + i_h).to(tl.int64)
    i_row = (i_b * C.SLOTS + i_slot) * C.H + i_h
    p_a += i_token * C.A
    p_b += i_token * C.A
    p_c += i_token * C.C
    p_g += i_token
    p_power += i_token * C.C
    p_out += i_token * C.C
    p_strict += i_token * C.C
    i_chunk = i_start // n_chunk + i_n + (tl.cdiv(n, n_chunk) - 1 if C.DESCENDING else 0)
    i_chunk = ((i_b * C.MAX_CHUNKS + i_chunk) * C.H + i_h).to(tl.int64)
    o_t = o_i.to(tl.int64) * (C.DIRECTION * C.H)
    o_state, m_state = state_offsets(i_first, C.TRANSPOSED, C)
    # [BA, BC], or its transpose
    if C.HAS_START:
        b_h = tl.load(p_start + i_row * C.A * C.C + o_state, mask=m_state & m_real, other=0.0)
    else:
        b_h = tl.zeros(m_state.shape, tl.float32)
    b_tangent = 0.0
    if C.TANGENT:
        b_tangent = tl.zeros(m_state.shape, tl.float32)
    b_gamma = 0.0
    if C.HAS_GAMMA:
        b_gamma = tl.load(p_gamma + i_b * C.GAMMA_BATCHED * C.H + i_h)
    b_totals = tl.full([C.BA], 0.0, tl.float32)
    b_outer_totals = tl.full([C.BC], 0.0, tl.float32)

    # with decays of every channel, what no product takes is in flight as well
    for i in tl.range(0, n, n_chunk, num_stages=C.STAGES if C.HAS_CHANNELS else None):
        m_i = (i_at - i - o_i < n) if C.DESCENDING else (i + o_i < n)
        if C.HAS_CHANNELS:
            m_i = m_i & (o_i < n_chunk)
        m_l = m_i & m_real
        b_a = load_tile(p_a, o_t * C.A, m_l, C.A, C.BA)
        b_b = load_tile(p_b, o_t * C.A, m_l, C.A, C.BA)
        # tokens up to each; those that a chunk lacks are the first in a scan that descends
        n_lacks = tl.maximum(i_at - i - n + 1, 0) if C.DESCENDING else 0
        n_count = n_chunk - n_lacks if C.DESCENDING else tl.minimum(n_chunk, n - i)
        b_count = tl.minimum(tl.maximum(o_i + 1 - n_lacks, 0), n_count).to(tl.float32)
        n_count = n_count.to(tl.float32)
        if C.HAS_HEAD:
            b_upto, b_upto_remainder, b_all, b_all_remainder, unit = chunk_decays(
                p_g + o_t, b_gamma, b_count, n_count, m_l, EXACT, C
            )
        # the state from the beginning of the chunk to its middle
        if C.HAS_INNER:
            b_before = tl.load(p_before + i_chunk * C.A + o_a, mask=(o_a < C.A) & m_real, other=0.0)
            b_after = tl.load(p_after + i_chunk * C.A + o_a, mask=(o_a < C.A) & m_real, other=0.0)
            b_h, b_tangent = decayed_states(b_h, b_tangent, along(tl.exp2(b_before), C.TRANSPOSED), C)
            if C.WITH_TOTALS:
                b_totals += b_before + b_after
        if C.HAS_OUTER:
            b_before_c = tl.load(p_outer_before + i_chunk * C.C + o_c, mask=(o_c < C.C) & m_real, other=0.0)
            b_after_c = tl.load(p_outer_after + i_chunk * C.C + o_c, mask=(o_c < C.C) & m_real, other=0.0)
            b_h, b_tangent = decayed_states(b_h, b_tangent, along(tl.exp2(b_before_c), not C.TRANSPOSED), C)
            if C.WITH_TOTALS:
                b_outer_totals += b_before_c + b_after_c

        if C.WITH_OUT or C.WITH_STRICT:
            # [CHUNK, CHUNK]
            b_s = wide_dot(b_a, tl.trans(b_b), None, narrow, C)
            # [CHUNK, BC]
            b_rounded = rounded_factor(b_h, narrow) if C.WITH_STRICT else b_h
            b_o = state_dot(b_a, b_rounded, None, narrow, C)
            if C.HAS_HEAD:
                b_s *= decays_between(b_upto, b_upto_remainder, unit, EXACT, C)
            # above the diagonal it could be infinite
            if C.WITH_STRICT:
                b_diagonal = tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_s, 0.0), 1)
                b_s = tl.where(o_i[:, None] > o_i[None, :], b_s, 0.0)
                if C.TANGENT:
                    b_s *= (o_i[:, None] - o_i[None, :]).to(tl.float32)
            else:
                b_s = tl.where(o_i[:, None] >= o_i[None, :], b_s, 0.0)
            if C.TANGENT:
                b_o = state_dot(b_a, b_tangent, b_o * b_count[:, None], narrow, C)
            elif C.WITH_STRICT and not EXACT:
                # what rounding the state has lost: it would add up along the sequence
                b_lost = b_h - b_rounded.to(tl.float32)
                b_o = state_dot(b_a, b_lost, b_o, narrow, C)
            if C.HAS_HEAD:
                b_o *= decay_power(b_upto, b_upto_remainder, unit, EXACT, C)[:, None]
        b_c = load_tile(p_c, o_t * C.C, m_l, C.C, C.BC, i_first)
        if C.WITH_OUT or C.WITH_STRICT:
            b_o = wide_dot(b_s, b_c, b_o, narrow, C)
            b_o *= scale
            if C.HAS_OUTER:
                b_power = load_tile(p_power, o_t * C.C, m_l, C.C, C.BC, i_first).to(tl.float32)
                if C.PACKED and C.DEFERRED:
                    b_power = tl.where(m_l[:, None], b_power, 1.0)  # padding has none
            if C.WITH_STRICT:
                # without what the token gives itself, and relative to the middle unless its factor is not
                b_strict = b_o * b_power if C.HAS_OUTER and C.TANGENT else b_o
                store_tile(p_strict, b_strict, o_t * C.C, m_i, C.C, C.BC, i_first)
                b_o += scale * b_diagonal[:, None] * b_c
            if C.WITH_OUT:
                if C.HAS_OUTER:
                    b_o = b_o / b_power if C.DEFERRED else b_o * b_power
                store_tile(p_out, b_o, o_t * C.C, m_i, C.C, C.BC, i_first)

        # the state after the chunk
        if C.TANGENT:
            b_tangent += n_count * b_h
        if C.HAS_HEAD:
            b_exponent = decay_exponent(b_all, b_all_remainder, unit, EXACT, C)
            b_h, b_tangent = decayed_states(b_h, b_tangent, tl.exp2(b_exponent), C)
            b_c = b_c * decay_power(b_all - b_upto, b_all_remainder - b_upto_remainder, unit, EXACT, C)[:, None]
            if C.WITH_TOTALS:
                b_totals += b_exponent
        b_h = outer_dot(b_b, b_c, b_h, narrow, C)
        if C.TANGENT:
            b_tangent = outer_dot(b_b, b_c * (n_count - b_count)[:, None], b_tangent, narrow, C)
        if C.HAS_INNER:
            b_h, b_tangent = decayed_states(b_h, b_tangent, along(tl.exp2(b_after), C.TRANSPOSED), C)
        if C.HAS_OUTER:
            b_h, b_tangent = decayed_states(b_h, b_tangent, along(tl.exp2(b_after_c), not C.TRANSPOSED), C)

        o_next = C.DIRECTION * C.H * n_chunk
        p_a += o_next * C.A
        p_b += o_next * C.A
        p_c += o_next * C.C
        p_g += o_next
        p_power += o_next * C.C
        p_out += o_next * C.C
        p_strict += o_next * C.C
        i_chunk += C.DIRECTION * C.H

    if C.WITH_STATE:
        tl.store(p_state + i_row * C.A * C.C + o_state, b_tangent if C.TANGENT else b_h, mask=m_state & m_real)
    if C.WITH_TOTALS:
        if i_c == 0:
            tl.store(p_totals + i_row * C.A + o_a, b_totals, mask=(o_a < C.A) & m_real)
        if C.HAS_OUTER:
            tl.store(p_outer_totals + i_row * C.C + o_c, b_outer_totals, mask=(o_c < C.C) & m_real)


@triton.jit
def linear_token_kernel(
    p_a,
    p_b,
    p_c,
    p_g,
    p_gamma,
    p_inner,
    p_outer,
    p_start,
    p_segments,
    T,
    scale,
    p_out,
    p_state,
    C: tl.constexpr,
):
    i_b, i_h, i_c, i_start, n, i_slot, _ = program_coordinates(p_segments, T, T, C)
    m_real = i_slot >= 0
    i_first = i_c * C.BC
    o_a = tl.arange(0, C.BA)
    o_c = i_first + tl.arange(0, C.BC)
    m_a = o_a < C.A
    m_c = o_c < C.C
    i_token = i_b * T + (i_start + n - 1 if C.DESCENDING else i_start)
    i_row = (i_b * C.SLOTS + i_slot) * C.H + i_h
    o_state, m_state = state_offsets(i_first, False, C)
    # [BA, BC]
    if C.HAS_START:
        b_h = tl.load(p_start + i_row * C.A * C.C + o_state, mask=m_state & m_real, other=0.0)
    else:
        b_h = tl.full([C.BA, C.BC], 0.0, tl.float32)
    b_gamma = 0.0
    if C.HAS_GAMMA:
        b_gamma = tl.load(p_gamma + i_b * C.GAMMA_BATCHED * C.H + i_h)
    for i in range(n):
        i_t = (i_token + C.DIRECTION * i) * C.H + i_h
        # [BA], [BA], [BC]
        b_a = tl.load(p_a + i_t * C.A + o_a, mask=m_a & m_real, other=0.0).to(tl.float32)
        b_b = tl.load(p_b + i_t * C.A + o_a, mask=m_a & m_real, other=0.0).to(tl.float32)
        b_c = tl.load(p_c + i_t * C.C + o_c, mask=m_c & m_real, other=0.0).to(tl.float32)
        b_decay = tl.full([C.BA, 1], 0.0, tl.float32) + b_gamma
        if C.HAS_G:
            b_decay += tl.load(p_g + i_t, mask=m_real, other=0.0).to(tl.float32)
        if C.HAS_INNER:
            b_decay += tl.load(p_inner + i_t * C.A + o_a, mask=m_a & m_real, other=0.0).to(tl.float32)[:, None]
        b_decay = tl.exp2(b_decay * LOG2_E)
        if C.HAS_OUTER:
            b_outer = tl.load(p_outer + i_t * C.C + o_c, mask=m_c & m_real, other=0.0).to(tl.float32)
            b_decay = b_decay * tl.exp2(b_outer * LOG2_E)[None, :]
        if not C.DEFERRED:
            b_h *= b_decay
        b_h += b_b[:, None] * b_c[None, :]
        if C.WITH_OUT:
            b_o = tl.sum(b_a[:, None] * b_h, 0) * scale
            tl.store(p_out + i_t * C.C + o_c, b_o.to(p_out.dtype.element_ty), mask=m_c)
        if C.DEFERRED:
            b_h *= b_decay
    if C.WITH_STATE:
        tl.store(p_state + i_row * C.A * C.C + o_state, b_h, mask=m_state & m_real)


@triton.jit
def linear_join_kernel(p_local, p_totals, p_outer_totals, p_start, p_order, p_starts, p_final, C: tl.constexpr):
    """The states before every segment, from what each adds to a state of zero and how much it keeps of another."""
    BLOCKS: tl.constexpr = (C.A + C.BA - 1) // C.BA
    i = tl.program_id(0)
    i_a = i % BLOCKS
    i_h = (i // BLOCKS) % C.H
    i_b = (i // (BLOCKS * C.H)).to(tl.int64)
    o_a = i_a * C.BA + tl.arange(0, C.BA)
    o_c = tl.arange(0, C.BC)
    o_s = o_a[:, None] * C.C + o_c[None, :]
    m_s = (o_a < C.A)[:, None] & (o_c < C.C)[None, :]
    b_h = tl.full([C.BA, C.BC], 0.0, tl.float32)
    i_before = -1
    for i in range(C.SEGMENTS):
        i_r = C.SEGMENTS - 1 - i if C.DESCENDING else i
        i_row = (i_b * C.SEGMENTS + i_r) * C.H + i_h
        i_n = 0
        m_last = i == C.SEGMENTS - 1
        if C.PACKED:
            p_segment = p_order + (i_b * C.TABLE_BATCHED * C.SEGMENTS + i_r) * 2
            # of a segment without tokens it is -1
            i_n = tl.load(p_segment)
            m_last = tl.load(p_segment + 1) != 0
        if i_n >= 0:
            i_state = (i_b * C.SEQUENCES + i_n) * C.H + i_h
            if i_n != i_before:
                b_h = tl.full([C.BA, C.BC], 0.0, tl.float32)
                if C.HAS_START:
                    b_h = tl.load(p_start + i_state * C.A * C.C + o_s, mask=m_s, other=0.0)
            i_before = i_n
            tl.store(p_starts + i_row * C.A * C.C + o_s, b_h, mask=m_s)
            # what the last segment of a sequence adds is in the final state alone
            m_added = m_s if C.WITH_STATE else m_s & (m_last == 0)
            b_kept = tl.load(p_totals + i_row * C.A + o_a, mask=o_a < C.A, other=0.0)
            b_h *= tl.exp2(b_kept)[:, None]
            if C.HAS_OUTER:
                b_kept_outer = tl.load(p_outer_totals + i_row * C.C + o_c, mask=o_c < C.C, other=0.0)
                b_h *= tl.exp2(b_kept_outer)[None, :]
            b_h += tl.load(p_local + i_row * C.A * C.C + o_s, mask=m_added, other=0.0)
            if C.WITH_STATE:
                tl.store(p_final + i_state * C.A * C.C + o_s, b_h, mask=m_s & m_last)

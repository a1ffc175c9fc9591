"""The walk in Triton: one kernel takes a piece of a sequence chunk by chunk, another token by token.

A program has one head, one piece and BC channels of c; its state (BA, BC) stays in registers, in float32, and beside it
that of an aged walk. Of 16 bits it is kept turned: the compiler then needs fewer registers.

Decays of every channel are relative to the middle of a chunk: exp(sum) from there to a token multiplies what looks back
(queries, and gradients of outputs), its inverse what is looked at. Arrays are multiplied by them beforehand, once for
all walks that need them, and outputs by the powers themselves, kept likewise; the state is decayed to the middle before
a chunk meets it, and to the end behind it.
Exponents must stay small, so heads with strong decays take fewer tokens at a time (`steps`).
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E
from ejkernel.kernels.linear.triton.tiles import (
    along,
    chunk_decays,
    decay_exponent,
    decay_power,
    decayed_states,
    decays_between,
    load_tile,
    outer_dot,
    place,
    rounded_factor,
    state_dot,
    state_offsets,
    store_tile,
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
    p_steps,
    p_before,
    p_behind,
    p_outer_before,
    p_outer_behind,
    p_start,
    p_pieces,
    T,
    segment,
    scale,
    p_out,
    p_strict,
    p_state,
    p_totals,
    p_outer_totals,
    H: tl.constexpr,
    A: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
    PIECES_BATCHED: tl.constexpr,
    HAS_G: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    GAMMA_BATCHED: tl.constexpr,
    HAS_INNER: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_START: tl.constexpr,
    DESCENDING: tl.constexpr,
    LATE: tl.constexpr,
    AGED: tl.constexpr,
    WITH_OUT: tl.constexpr,
    WITH_STRICT: tl.constexpr,
    WITH_STATE: tl.constexpr,
    WITH_TOTALS: tl.constexpr,
    STAGES: tl.constexpr,
    TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    HAS_HEAD: tl.constexpr = HAS_G or HAS_GAMMA
    narrow: tl.constexpr = p_out.dtype.element_ty
    EXACT: tl.constexpr = narrow == tl.float32
    DIRECTION: tl.constexpr = -1 if DESCENDING else 1
    i_b, i_h, i_c, i_start, n, i_slot, i_n = place(p_pieces, T, segment, ROWS, PIECES_BATCHED, PACKED, H, BLOCKS)
    # padding is walked along too, to write zeros, but never read
    m_real = i_slot >= 0
    i_first = i_c * BC
    o_i = tl.arange(0, CHUNK)
    o_a = tl.arange(0, BA)
    o_c = i_first + tl.arange(0, BC)
    if HAS_INNER or HAS_OUTER:
        step = tl.load(p_steps + i_b * H + i_h)
    else:
        step = CHUNK
    # chunks are cut from the first token of a piece on, whichever way the walk goes
    i_at = tl.cdiv(n, step) * step - 1 if DESCENDING else 0
    i_token = ((i_b * T + i_start + i_at) * H + i_h).to(tl.int64)
    i_row = (i_b * SLOTS + i_slot) * H + i_h
    p_a += i_token * A
    p_b += i_token * A
    p_c += i_token * C
    p_g += i_token
    p_power += i_token * C
    p_out += i_token * C
    p_strict += i_token * C
    i_chunk = i_start // step + i_n + (tl.cdiv(n, step) - 1 if DESCENDING else 0)
    i_chunk = ((i_b * CHUNKS + i_chunk) * H + i_h).to(tl.int64)
    o_t = o_i.to(tl.int64) * (DIRECTION * H)
    o_state, m_state = state_offsets(A, C, BA, BC, i_first, TURNED)
    # [BA, BC], or turned
    if HAS_START:
        b_h = tl.load(p_start + i_row * A * C + o_state, mask=m_state & m_real, other=0.0)
    else:
        b_h = tl.zeros(m_state.shape, tl.float32)
    b_aged = 0.0
    if AGED:
        b_aged = tl.zeros(m_state.shape, tl.float32)
    b_gamma = 0.0
    if HAS_GAMMA:
        b_gamma = tl.load(p_gamma + i_b * GAMMA_BATCHED * H + i_h)
    b_totals = tl.zeros([BA], tl.float32)
    b_outer_totals = tl.zeros([BC], tl.float32)

    # with decays of every channel, what no product takes is in flight as well
    for i in tl.range(0, n, step, num_stages=STAGES if HAS_INNER or HAS_OUTER else None):
        m_i = (i_at - i - o_i < n) if DESCENDING else (i + o_i < n)
        if HAS_INNER or HAS_OUTER:
            m_i = m_i & (o_i < step)
        m_l = m_i & m_real
        b_a = load_tile(p_a, o_t, m_l, A, BA, 0)
        b_b = load_tile(p_b, o_t, m_l, A, BA, 0)
        # tokens up to each; those that a chunk lacks are the first in a walk that descends
        n_lacks = tl.maximum(i_at - i - n + 1, 0) if DESCENDING else 0
        n_count = step - n_lacks if DESCENDING else tl.minimum(step, n - i)
        b_count = tl.minimum(tl.maximum(o_i + 1 - n_lacks, 0), n_count).to(tl.float32)
        n_count = n_count.to(tl.float32)
        if HAS_HEAD:
            b_upto, b_upto_rest, b_all, b_all_rest, unit = chunk_decays(
                p_g + o_t, b_gamma, b_count, n_count, m_l, HAS_G, HAS_GAMMA, LATE, EXACT
            )
        # the state from the beginning of the chunk to its middle
        if HAS_INNER:
            b_before = tl.load(p_before + i_chunk * A + o_a, mask=(o_a < A) & m_real, other=0.0)
            b_behind = tl.load(p_behind + i_chunk * A + o_a, mask=(o_a < A) & m_real, other=0.0)
            b_h, b_aged = decayed_states(b_h, b_aged, along(tl.exp2(b_before), TURNED), AGED)
            if WITH_TOTALS:
                b_totals += b_before + b_behind
        if HAS_OUTER:
            b_before_c = tl.load(p_outer_before + i_chunk * C + o_c, mask=(o_c < C) & m_real, other=0.0)
            b_behind_c = tl.load(p_outer_behind + i_chunk * C + o_c, mask=(o_c < C) & m_real, other=0.0)
            b_h, b_aged = decayed_states(b_h, b_aged, along(tl.exp2(b_before_c), not TURNED), AGED)
            if WITH_TOTALS:
                b_outer_totals += b_before_c + b_behind_c

        if WITH_OUT or WITH_STRICT:
            # [CHUNK, CHUNK]
            b_s = wide_dot(b_a, tl.trans(b_b), None, narrow, PRECISION)
            # [CHUNK, BC]
            b_rounded = rounded_factor(b_h, narrow) if WITH_STRICT else b_h
            b_o = state_dot(b_a, b_rounded, None, TURNED, narrow, PRECISION)
            if HAS_HEAD:
                b_s *= decays_between(b_upto, b_upto_rest, unit, HAS_G, EXACT)
            # above the diagonal it could be infinite
            if WITH_STRICT:
                b_own = tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_s, 0.0), 1)
                b_s = tl.where(o_i[:, None] > o_i[None, :], b_s, 0.0)
                if AGED:
                    b_s *= (o_i[:, None] - o_i[None, :]).to(tl.float32)
            else:
                b_s = tl.where(o_i[:, None] >= o_i[None, :], b_s, 0.0)
            if AGED:
                b_o = state_dot(b_a, b_aged, b_o * b_count[:, None], TURNED, narrow, PRECISION)
            elif WITH_STRICT and not EXACT:
                # what rounding the state has lost: it would add up along the sequence
                b_lost = b_h - b_rounded.to(tl.float32)
                b_o = state_dot(b_a, b_lost, b_o, TURNED, narrow, PRECISION)
            if HAS_HEAD:
                b_o *= decay_power(b_upto, b_upto_rest, unit, HAS_G, EXACT)[:, None]
        b_c = load_tile(p_c, o_t, m_l, C, BC, i_first)
        if WITH_OUT or WITH_STRICT:
            b_o = wide_dot(b_s, b_c, b_o, narrow, PRECISION)
            b_o *= scale
            if HAS_OUTER:
                b_power = load_tile(p_power, o_t, m_l, C, BC, i_first).to(tl.float32)
                if PACKED and LATE:
                    b_power = tl.where(m_l[:, None], b_power, 1.0)  # padding has none
            if WITH_STRICT:
                # without the token's own part, and relative to the middle unless its factor is not
                b_strict = b_o * b_power if HAS_OUTER and AGED else b_o
                store_tile(p_strict, b_strict, o_t, m_i, C, BC, i_first)
                b_o += scale * b_own[:, None] * b_c
            if WITH_OUT:
                if HAS_OUTER:
                    b_o = b_o / b_power if LATE else b_o * b_power
                store_tile(p_out, b_o, o_t, m_i, C, BC, i_first)

        # the state behind the chunk
        if AGED:
            b_aged += n_count * b_h
        if HAS_HEAD:
            b_exponent = decay_exponent(b_all, b_all_rest, unit, HAS_G, EXACT)
            b_h, b_aged = decayed_states(b_h, b_aged, tl.exp2(b_exponent), AGED)
            b_c = b_c * decay_power(b_all - b_upto, b_all_rest - b_upto_rest, unit, HAS_G, EXACT)[:, None]
            if WITH_TOTALS:
                b_totals += b_exponent
        b_h = outer_dot(b_b, b_c, b_h, TURNED, narrow, PRECISION)
        if AGED:
            b_aged = outer_dot(b_b, b_c * (n_count - b_count)[:, None], b_aged, TURNED, narrow, PRECISION)
        if HAS_INNER:
            b_h, b_aged = decayed_states(b_h, b_aged, along(tl.exp2(b_behind), TURNED), AGED)
        if HAS_OUTER:
            b_h, b_aged = decayed_states(b_h, b_aged, along(tl.exp2(b_behind_c), not TURNED), AGED)

        o_next = DIRECTION * H * step
        p_a += o_next * A
        p_b += o_next * A
        p_c += o_next * C
        p_g += o_next
        p_power += o_next * C
        p_out += o_next * C
        p_strict += o_next * C
        i_chunk += DIRECTION * H

    if WITH_STATE:
        tl.store(p_state + i_row * A * C + o_state, b_aged if AGED else b_h, mask=m_state & m_real)
    if WITH_TOTALS:
        if i_c == 0:
            tl.store(p_totals + i_row * A + o_a, b_totals, mask=(o_a < A) & m_real)
        if HAS_OUTER:
            tl.store(p_outer_totals + i_row * C + o_c, b_outer_totals, mask=(o_c < C) & m_real)


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
    p_pieces,
    T,
    scale,
    p_out,
    p_state,
    H: tl.constexpr,
    A: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    PACKED: tl.constexpr,
    PIECES_BATCHED: tl.constexpr,
    HAS_G: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    GAMMA_BATCHED: tl.constexpr,
    HAS_INNER: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_START: tl.constexpr,
    DESCENDING: tl.constexpr,
    LATE: tl.constexpr,
    WITH_OUT: tl.constexpr,
    WITH_STATE: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    DIRECTION: tl.constexpr = -1 if DESCENDING else 1
    i_b, i_h, i_c, i_start, n, i_slot, _ = place(p_pieces, T, T, ROWS, PIECES_BATCHED, PACKED, H, BLOCKS)
    m_real = i_slot >= 0
    i_first = i_c * BC
    o_a = tl.arange(0, BA)
    o_c = i_first + tl.arange(0, BC)
    m_a = o_a < A
    m_c = o_c < C
    i_token = i_b * T + (i_start + n - 1 if DESCENDING else i_start)
    i_row = (i_b * SLOTS + i_slot) * H + i_h
    o_state, m_state = state_offsets(A, C, BA, BC, i_first, False)
    # [BA, BC]
    if HAS_START:
        b_h = tl.load(p_start + i_row * A * C + o_state, mask=m_state & m_real, other=0.0)
    else:
        b_h = tl.zeros([BA, BC], tl.float32)
    b_gamma = 0.0
    if HAS_GAMMA:
        b_gamma = tl.load(p_gamma + i_b * GAMMA_BATCHED * H + i_h)
    for i in range(n):
        i_t = (i_token + DIRECTION * i) * H + i_h
        # [BA], [BA], [BC]
        b_a = tl.load(p_a + i_t * A + o_a, mask=m_a & m_real, other=0.0).to(tl.float32)
        b_b = tl.load(p_b + i_t * A + o_a, mask=m_a & m_real, other=0.0).to(tl.float32)
        b_c = tl.load(p_c + i_t * C + o_c, mask=m_c & m_real, other=0.0).to(tl.float32)
        b_decay = tl.full([BA, 1], 0.0, tl.float32) + b_gamma
        if HAS_G:
            b_decay += tl.load(p_g + i_t, mask=m_real, other=0.0).to(tl.float32)
        if HAS_INNER:
            b_decay += tl.load(p_inner + i_t * A + o_a, mask=m_a & m_real, other=0.0).to(tl.float32)[:, None]
        b_decay = tl.exp2(b_decay * LOG2_E)
        if HAS_OUTER:
            b_outer = tl.load(p_outer + i_t * C + o_c, mask=m_c & m_real, other=0.0).to(tl.float32)
            b_decay = b_decay * tl.exp2(b_outer * LOG2_E)[None, :]
        if not LATE:
            b_h *= b_decay
        b_h += b_b[:, None] * b_c[None, :]
        if WITH_OUT:
            b_o = tl.sum(b_a[:, None] * b_h, 0) * scale
            tl.store(p_out + i_t * C + o_c, b_o.to(p_out.dtype.element_ty), mask=m_c)
        if LATE:
            b_h *= b_decay
    if WITH_STATE:
        tl.store(p_state + i_row * A * C + o_state, b_h, mask=m_state & m_real)


@triton.jit
def linear_join_kernel(
    p_local,
    p_totals,
    p_outer_totals,
    p_start,
    p_pieces,
    p_starts,
    p_final,
    H: tl.constexpr,
    A: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    PACKED: tl.constexpr,
    PIECES_BATCHED: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_START: tl.constexpr,
    WITH_FINAL: tl.constexpr,
    DESCENDING: tl.constexpr,
):
    """The states before every piece, from what each piece adds to a state of zero and how much it keeps of another."""
    BLOCKS: tl.constexpr = (A + BA - 1) // BA
    i = tl.program_id(0)
    i_a = i % BLOCKS
    i_h = (i // BLOCKS) % H
    i_b = (i // (BLOCKS * H)).to(tl.int64)
    o_a = i_a * BA + tl.arange(0, BA)
    o_c = tl.arange(0, BC)
    o_s = o_a[:, None] * C + o_c[None, :]
    m_s = (o_a < A)[:, None] & (o_c < C)[None, :]
    b_h = tl.zeros([BA, BC], tl.float32)
    i_before = -1
    for i in range(ROWS):
        i_r = ROWS - 1 - i if DESCENDING else i
        i_row = (i_b * ROWS + i_r) * H + i_h
        i_n = 0
        m_last = i == ROWS - 1
        if PACKED:
            p_piece = p_pieces + (i_b * PIECES_BATCHED * ROWS + i_r) * 2
            # of a row without tokens it is -1
            i_n = tl.load(p_piece)
            m_last = tl.load(p_piece + 1) != 0
        if i_n >= 0:
            i_state = (i_b * SEQUENCES + i_n) * H + i_h
            if i_n != i_before:
                b_h = tl.zeros([BA, BC], tl.float32)
                if HAS_START:
                    b_h = tl.load(p_start + i_state * A * C + o_s, mask=m_s, other=0.0)
            i_before = i_n
            tl.store(p_starts + i_row * A * C + o_s, b_h, mask=m_s)
            # of the last piece nobody may want to know what it adds
            m_added = m_s if WITH_FINAL else m_s & (m_last == 0)
            b_keep = tl.load(p_totals + i_row * A + o_a, mask=o_a < A, other=0.0)
            b_h *= tl.exp2(b_keep)[:, None]
            if HAS_OUTER:
                b_keep_outer = tl.load(p_outer_totals + i_row * C + o_c, mask=o_c < C, other=0.0)
                b_h *= tl.exp2(b_keep_outer)[None, :]
            b_h += tl.load(p_local + i_row * A * C + o_s, mask=m_added, other=0.0)
            if WITH_FINAL:
                tl.store(p_final + i_state * A * C + o_s, b_h, mask=m_s & m_last)

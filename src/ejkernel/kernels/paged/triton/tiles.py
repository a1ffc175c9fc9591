"""What the paged kernels share in Triton: where a sequence lies, and the loop of query rows over its keys."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_rules import DeviceFunction
from ejkernel.kernels.common.triton_tiles import LN_2, LOG2_E, online_softmax, softmax_result, tanh


@dataclass(frozen=True)
class Constants:
    """What a launch is compiled for, as the one constexpr `C` of every kernel and of what they call.

    Attributes:
        HK, G: key heads, and query heads of each.
        TOKENS: query tokens of every sequence; None where they differ.
        L: tokens of a page.
        BD, BDV: head dims of a tile, powers of two.
        INTERLEAVED: whether keys and values are the even and odd rows of one array.
        WINDOW: how many keys before its own a query sees; None is all. TRACED_WINDOW: whether there is one in memory.
        SPAN: a query sees keys of its own chunk of so many positions; None is all.
        MASK_RULE, SCORE_RULE: mask and score functions, or None.
        HIDES: how many of a sequence's newest keys the former may hide.
        TABLE, COUNTED, STARTS, SINKS, K_SCALED, V_SCALED: which of the optional arrays there are.
        NARROW: whether the cache has 8 bits and the queries are bfloat16.
        PAIRED: whether the cache is read in pairs of 8 bits.
        PTX: whether there is PTX to be run: not in the interpreter.
        BR, BK: query rows and keys of a tile.
        DECODE_TOKENS: sequences of at most as many query tokens are those of the decode kernel.
        SEVERAL: whether rows of a tile may be of several tokens, so that one may see a key that another does not.
        GROUPS: into how many a tile's keys are split, each with a softmax of its own: one for each warp, or one in all.
        SPLITS: into how many a sequence's keys are split.
        LEAST: blocks of a split at least.
        SEARCH: steps of the search for a tile's sequence.
        BS: splits that are merged, padded to a power of two.
        CHUNK: splits that are merged at a time.
    """

    HK: int
    G: int
    TOKENS: int | None
    L: int
    D: int
    DV: int
    BD: int
    BDV: int
    INTERLEAVED: bool
    WINDOW: int | None
    TRACED_WINDOW: bool
    SPAN: int | None
    CAUSAL: bool
    CAPPED: bool
    TABLE: bool
    COUNTED: bool
    STARTS: bool
    SINKS: bool
    K_SCALED: bool
    V_SCALED: bool
    NARROW: bool
    PAIRED: bool
    PTX: bool
    PRECISION: str
    MASK_RULE: DeviceFunction | None = None
    SCORE_RULE: DeviceFunction | None = None
    HIDES: int = 0
    BR: int = 1
    BK: int = 1
    DECODE_TOKENS: int = 0
    SEVERAL: bool = True
    GROUPS: int = 1
    SPLITS: int = 1
    LEAST: int = 1
    SEARCH: int = 0
    BS: int = 1
    CHUNK: int = 1

    # strides of tokens and heads in the cache, in elements, and where the values of a head begin
    @property
    def K_HEAD(self) -> int:
        return self.D * (2 if self.INTERLEAVED else 1)

    @property
    def V_HEAD(self) -> int:
        return self.DV * (2 if self.INTERLEAVED else 1)

    @property
    def K_TOKEN(self) -> int:
        return self.HK * self.K_HEAD

    @property
    def V_TOKEN(self) -> int:
        return self.HK * self.V_HEAD

    @property
    def V_FIRST(self) -> int:
        return self.D if self.INTERLEAVED else 0

    # query rows of a sequence in the decode kernel
    @property
    def DECODE_ROWS(self) -> int:
        return self.DECODE_TOKENS * self.G


@triton.jit
def key_window(p_window, i_b, stride, C: tl.constexpr):
    """How many keys before its own a query sees, if that is in memory."""
    window = 0
    if C.TRACED_WINDOW:
        window = tl.load(p_window + i_b * stride)
    return window


@triton.jit
def query_edge(p_query_start, i_n, T):
    """The first query token of a sequence, within the tokens there are; that of the first is 0."""
    edge = tl.load(p_query_start + i_n)
    return tl.where(i_n == 0, 0, tl.minimum(tl.maximum(edge, 0), T))


@triton.jit
def query_span(p_query_start, i_n, T, C: tl.constexpr):
    """First query token and number of query tokens of a sequence; C.TOKENS is None where p_query_start says."""
    if C.TOKENS is None:
        first = query_edge(p_query_start, i_n, T)
        return first, tl.maximum(query_edge(p_query_start, i_n + 1, T) - first, 0)
    else:
        return i_n * C.TOKENS, C.TOKENS


@triton.jit
def key_span(p_lens, p_starts, i_n, S, C: tl.constexpr):
    """First visible key and number of keys of a sequence, within what its pages hold."""
    length = tl.minimum(tl.maximum(tl.load(p_lens + i_n), 0), S)
    if C.STARTS:
        return tl.minimum(tl.maximum(tl.load(p_starts + i_n), 0), S), length
    else:
        return length * 0, length


@triton.jit
def lowest_key(low, position, window, C: tl.constexpr):
    """The first key from `low` on that windows and chunks show to a query at a position."""
    if C.WINDOW is not None:
        low = tl.maximum(low, position - C.WINDOW)
    if C.TRACED_WINDOW:
        low = tl.maximum(low, position - window)
    if C.SPAN is not None:
        low = tl.maximum(low, position // C.SPAN * C.SPAN)
    return low


@triton.jit
def visible_blocks(position, n_tokens, low, high, window, C: tl.constexpr):
    """Keys low to high that some of the tokens from `position` on see, and the blocks of those that all of them see.

    Returns low, high, first block, last block (exclusive), first full block, last full block (exclusive).
    """
    all_low, all_high = low, high
    if C.HIDES > 0:
        all_high = high - C.HIDES
    if C.CAUSAL:
        all_high = tl.minimum(all_high, position + 1)
        high = tl.minimum(high, position + n_tokens)
        all_low = lowest_key(low, position + n_tokens - 1, window, C)
        low = lowest_key(low, position, window, C)
    i_first = low // C.BK
    i_last = tl.maximum(tl.cdiv(high, C.BK), i_first)
    i_full = tl.minimum(tl.maximum(tl.cdiv(all_low, C.BK), i_first), i_last)
    i_full_last = tl.minimum(tl.maximum(tl.maximum(all_high, 0) // C.BK, i_full), i_last)
    return low, high, i_first, i_last, i_full, i_full_last


@triton.jit
def cache_rows(p_table, i_n, i_k, o_k, high, P, C: tl.constexpr):
    """The rows of the cache, counted in tokens, in which keys i_k + o_k of a sequence lie, o_k from 0 to BK: int64."""
    if not C.TABLE:
        return i_n.to(tl.int64) * C.L + (i_k + o_k)
    elif C.L % C.BK == 0:
        i_page = tl.load(p_table + i_k // C.L, mask=i_k < high, other=0)
        i_page = tl.minimum(tl.maximum(i_page, 0), P - 1)
        return i_page.to(tl.int64) * C.L + (i_k % C.L + o_k)
    else:
        b_page = tl.load(p_table + (i_k + o_k) // C.L, mask=i_k + o_k < high, other=0)
        b_page = tl.minimum(tl.maximum(b_page, 0), P - 1)
        return b_page.to(tl.int64) * C.L + (i_k + o_k) % C.L


@triton.jit
def load_queries(p_q, o_row, m_row, scale, C: tl.constexpr):
    """Query rows (BR, BD), twice; zeros where hidden and past D. And what turns their products into logits, (BR,).

    PAIRED: their even columns and their odd ones, (BR, BD // 2) each. NARROW: the cache has 8 bits, which become
    float16 in few instructions and bfloat16 in many. Then the queries are float16 too, their largest entry brought
    near 1, so that nothing overflows and they lose nothing.
    """
    STEP: tl.constexpr = 2 if C.PAIRED else 1
    o_d = tl.arange(0, C.BD // STEP) * STEP
    p_tile = p_q + o_row[:, None] * C.D + o_d[None, :]
    m_tile = m_row[:, None] & (o_d < C.D)[None, :]
    b_q = tl.load(p_tile, mask=m_tile, other=0.0)
    b_odd = b_q
    if C.PAIRED:
        b_odd = tl.load(p_tile + 1, mask=m_tile, other=0.0)
    b_scale = tl.zeros_like(o_row).to(tl.float32) + scale
    if C.NARROW:
        b_largest = tl.max(tl.maximum(tl.abs(b_q.to(tl.float32)), tl.abs(b_odd.to(tl.float32))), 1)
        b_unit = tl.exp2(tl.floor(tl.log2(tl.where(b_largest > 0.0, b_largest, 1.0))))
        b_q = (b_q.to(tl.float32) / b_unit[:, None]).to(tl.float16)
        b_odd = (b_odd.to(tl.float32) / b_unit[:, None]).to(tl.float16)
        b_scale *= b_unit
    return b_q, b_odd, b_scale


# two int16 in a register, $2, to the float16 of their low bytes, $0, and of their high bytes, $1
FROM_E4M3 = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# the upper byte of the same float16
FROM_E5M2 = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x2404;
    and.b32 $1, $2, 0xff00ff00;
}""")
# x + 128 is the last byte of the float16 1024 + 128 + x
FROM_INT8 = tl.constexpr("""{
    .reg .b32 bytes, low, high, base;
    xor.b32 bytes, $2, 0x80808080;
    prmt.b32 low, bytes, 0x64, 0x4240;
    prmt.b32 high, bytes, 0x64, 0x4341;
    mov.b32 base, 0x64806480;
    sub.f16x2 $0, low, base;
    sub.f16x2 $1, high, base;
}""")


@triton.jit
def widen(b, TYPE: tl.constexpr, PTX: tl.constexpr):
    """The low and the high bytes of int16, numbers of an 8-bit type, as float16, which holds all of them exactly.

    In PTX, which the interpreter cannot run, for two int16 at a time: a matmul's operand has them in one register.
    """
    if PTX:
        CODE: tl.constexpr = FROM_E4M3 if TYPE.is_fp8e4nv() else FROM_E5M2 if TYPE.is_fp8e5() else FROM_INT8
        return tl.inline_asm_elementwise(CODE, "=&r,=r,r", [b], (tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        b_low, b_high = b.to(tl.int8), (b >> 8).to(tl.int8)
        return b_low.to(TYPE, bitcast=True).to(tl.float16), b_high.to(TYPE, bitcast=True).to(tl.float16)


@triton.jit
def load_cache(
    p, b_row, m_row, STRIDE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr
):
    """Rows of one head of the cache, (..., BD) where b_row is (...), twice; zeros where hidden and past D.

    PAIRED: their even columns and their odd ones, (..., BD // 2) each, as float16. Numbers of 8 bits are read in pairs,
    as int16: shared memory gives a matmul's operands many of those at a time, and bytes one by one.
    """
    STEP: tl.constexpr = 2 if C.PAIRED else 1
    TYPE: tl.constexpr = p.dtype.element_ty
    if C.PAIRED:
        p = p.to(tl.pointer_type(tl.int16))
    # as many axes as the tile
    o_d = tl.arange(0, BD // STEP)[None, :]
    if len(b_row.shape) == 2:
        o_d = o_d[None, :, :]
    b_row, m_row = tl.expand_dims(b_row, -1), tl.expand_dims(m_row, -1)
    p_tile = p + b_row * (STRIDE // STEP) + o_d
    if MASKED and D != BD:
        b = tl.load(p_tile, mask=m_row & (o_d < D // STEP), other=0.0)
    elif MASKED:
        b = tl.load(p_tile, mask=m_row, other=0.0)
    elif D != BD:
        b = tl.load(p_tile, mask=o_d < D // STEP, other=0.0)
    else:
        b = tl.load(p_tile)
    if C.PAIRED:
        return widen(b, TYPE, C.PTX)
    else:
        return b, b


@triton.jit
def mark_keys(b_s, b_v):
    """0 * nan is nan: what is not finite stays out of the product and marks its key's logits instead."""
    m_fine = (b_v - b_v) == 0.0
    m_key = tl.min(m_fine.to(tl.int32), -1) == 0
    b_s = tl.where(tl.expand_dims(m_key, -2), float("nan"), b_s)
    return b_s, tl.where(m_fine, b_v, 0.0).to(b_v.dtype)


@triton.jit
def loop_over_keys(
    b_q, b_q_odd, b_position, b_max, b_sum, p_k, p_v, p_table, i_n, P, low, high, i_first, i_last, i_full, i_full_last,
    b_scale, soft_cap, window, p_ints, p_floats, o_operand, n_operands,
    C: tl.constexpr,
):  # fmt: skip
    """The running softmax (in base 2) of query rows b_q (BR, BD) over blocks i_first .. i_last of their keys.

    Blocks i_full .. i_full_last are seen by every row in full and need no mask. PAIRED: b_q has the even columns,
    b_q_odd the odd ones. With GROUPS, one for each warp, tiles have an axis of groups in front: each group has its
    keys of every block and a softmax of its own, so that warps need not meet before the end. Of the operands of mask
    and score functions, rows have those at o_operand (BR,) of n_operands each.
    """
    # what turns products into logits in base 2, or into those that tanh or a function takes
    b_unit = b_scale * LOG2_E
    if C.CAPPED:
        b_unit = b_scale / soft_cap
    elif C.SCORE_RULE is not None:
        b_unit = b_scale
    STEP: tl.constexpr = 2 if C.PAIRED else 1
    # keys of a block, (BK,)
    o_block = tl.arange(0, C.BK)
    # (BR, BDV), twice
    b_out = tl.full([C.BR, C.BDV // STEP], 0.0, tl.float32)
    if C.GROUPS > 1:
        o_group = tl.arange(0, C.GROUPS)[:, None]
        o_block = o_group * (C.BK // C.GROUPS) + tl.arange(0, C.BK // C.GROUPS)[None, :]
        b_out = tl.full([C.GROUPS, C.BR, C.BDV // STEP], 0.0, tl.float32)
        b_q = tl.broadcast_to(b_q[None, :, :], (C.GROUPS, C.BR, C.BD // STEP))
        b_q_odd = tl.broadcast_to(b_q_odd[None, :, :], (C.GROUPS, C.BR, C.BD // STEP))
        # what the rows bring along is the first group's
        b_max = tl.where(o_group == 0, b_max[None, :], float("-inf"))
        b_sum = tl.where(o_group == 0, b_sum[None, :], 0.0)
    b_out_odd = b_out
    n_before = i_full - i_first
    for MASKED in tl.static_range(2):
        n_blocks = i_full_last - i_full
        if MASKED:
            n_blocks = n_before + i_last - i_full_last
        i_k = i_full * C.BK
        if MASKED:
            i_k = tl.where(n_before > 0, i_first, i_full_last) * C.BK
        # the rows of the next block are looked up a step ahead: their page ids are no wait before its keys
        b_row = cache_rows(p_table, i_n, i_k, o_block, high, P, C)
        for n in range(n_blocks):
            o_k = i_k + o_block
            m_k = (o_k >= low) & (o_k < high)
            # (BK, BD), (BK, BDV), each twice
            b_k, b_k_odd = load_cache(p_k, b_row, m_k, C.K_TOKEN, C.D, C.BD, MASKED, C)
            b_v, b_v_odd = load_cache(p_v, b_row, m_k, C.V_TOKEN, C.DV, C.BDV, MASKED, C)
            i_k += C.BK
            if MASKED:
                i_k = tl.where(n + 1 < n_before, i_first + n + 1, i_full_last + n + 1 - n_before) * C.BK
            b_row = cache_rows(p_table, i_n, i_k, o_block, high, P, C)
            # (BR, BK)
            b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision=C.PRECISION)
            if C.PAIRED:
                b_s = tl.dot(b_q_odd, tl.trans(b_k_odd.to(b_q.dtype)), b_s, input_precision=C.PRECISION)
            b_s = b_s * b_unit[:, None]
            o_seen = tl.expand_dims(o_k, -2)
            if C.SCORE_RULE is not None:
                if C.CAPPED:
                    b_s = soft_cap * tanh(b_s)
                b_s = LOG2_E * C.SCORE_RULE.call(
                    b_position[:, None], o_seen, b_s, p_ints, p_floats, n_operands, 0, o_operand[:, None]
                )
            elif C.CAPPED:
                b_s = soft_cap * LOG2_E * tanh(b_s)
            b_v, b_v_odd = b_v.to(b_q.dtype), b_v_odd.to(b_q.dtype)
            if MASKED and C.SEVERAL:
                b_s, b_v = mark_keys(b_s, b_v)
                if C.PAIRED:
                    b_s, b_v_odd = mark_keys(b_s, b_v_odd)
            if MASKED:
                m_seen = tl.expand_dims(m_k, -2)
                if C.CAUSAL and C.SEVERAL:
                    m_seen = m_seen & (o_seen <= b_position[:, None])
                    if C.WINDOW is not None:
                        m_seen = m_seen & (o_seen >= b_position[:, None] - C.WINDOW)
                    if C.TRACED_WINDOW or C.SPAN is not None:
                        m_seen = m_seen & (o_seen >= lowest_key(low, b_position, window, C)[:, None])
                if C.MASK_RULE is not None:
                    m_seen = m_seen & C.MASK_RULE.call(
                        b_position[:, None], o_seen, b_s, p_ints, p_floats, n_operands, 0, o_operand[:, None]
                    )
                b_s = tl.where(m_seen, b_s, float("-inf"))
            b_max, b_base, b_shrink = online_softmax(b_max, tl.max(b_s, -1), MASKED or C.SCORE_RULE is not None)
            b_p = tl.exp2(b_s - tl.expand_dims(b_base, -1))
            b_sum = b_sum * b_shrink + tl.sum(b_p, -1)
            b_out *= tl.expand_dims(b_shrink, -1)
            b_p = b_p.to(b_v.dtype)
            b_out = tl.dot(b_p, b_v, b_out, input_precision=C.PRECISION)
            if C.PAIRED:
                b_out_odd *= tl.expand_dims(b_shrink, -1)
                b_out_odd = tl.dot(b_p, b_v_odd, b_out_odd, input_precision=C.PRECISION)
    if C.GROUPS > 1:
        b_new = tl.max(b_max, 0)
        b_shrink = tl.exp2(b_max - tl.where(b_new == float("-inf"), 0.0, b_new))
        b_max, b_sum = b_new, tl.sum(b_sum * b_shrink, 0)
        b_out = tl.sum(b_out * tl.expand_dims(b_shrink, -1), 0)
        b_out_odd = tl.sum(b_out_odd * tl.expand_dims(b_shrink, -1), 0)
    if C.PAIRED:
        b_out = tl.interleave(b_out, b_out_odd)
    return b_max, b_sum, b_out


@triton.jit
def sink_softmax(p_sinks, o_head, m_row, C: tl.constexpr):
    """The running maximum, in units of log2, and the running sum of rows that have seen their sinks and no key."""
    b_max = tl.full([C.BR], float("-inf"), tl.float32)
    b_sum = tl.full([C.BR], 0.0, tl.float32)
    if C.SINKS and C.SPLITS == 1:
        b_max = tl.load(p_sinks + o_head, mask=m_row, other=0.0) * LOG2_E
        b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    return b_max, b_sum


@triton.jit
def value_scale(p_v_scale, i_h, C: tl.constexpr):
    """What the values of a key head are multiplied by."""
    v_scale = 1.0
    if C.V_SCALED:
        v_scale = tl.load(p_v_scale + i_h)
    return v_scale


@triton.jit
def store_outputs(
    b_max, b_sum, b_out, p_out, p_lse, p_max, v_scale, o_token, o_head, m_row, i_b, T, H, C: tl.constexpr
):
    """Normalised rows, their lse and their maximum, each row to its token and head."""
    o_d = tl.arange(0, C.BDV)
    b_total, b_lse = softmax_result(b_max, b_sum)
    b_out = b_out * (v_scale / b_total)[:, None]
    o_row = (i_b.to(tl.int64) * T + o_token) * H + o_head
    m_tile = m_row[:, None] & (o_d < C.DV)[None, :]
    tl.store(p_out + o_row[:, None] * C.DV + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_tile)
    o_logs = (i_b.to(tl.int64) * H + o_head) * T + o_token
    tl.store(p_lse + o_logs, b_lse * LN_2, mask=m_row)
    tl.store(p_max + o_logs, tl.where(b_sum != 0.0, b_max * LN_2, float("-inf")), mask=m_row)

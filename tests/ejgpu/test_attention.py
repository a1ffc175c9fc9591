"""ejgpu's functions against those of `ejkernel.modules`, and against numpy where they add something."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejgpu
from ejgpu.xla_utils import chunk_local_cumsum, prepare_sequence_ids
from ejkernel import modules
from harness import normal

T, S, H, HKV, D = 7, 9, 4, 2, 8


def inputs(batch=2):
    return normal("q", (batch, T, H, D)), normal("k", (batch, S, HKV, D)), normal("v", (batch, S, HKV, D))


def by_hand(q, k, v, bias=0.0, causal=True, scale=D**-0.5):
    """(T, H, D) of one sequence, with a bias that broadcasts to (H, T, S)."""
    k, v = np.repeat(k, H // HKV, 1), np.repeat(v, H // HKV, 1)
    logits = np.einsum("thd,shd->hts", q, k) * scale + bias
    if causal:
        logits = np.where(np.tril(np.ones(logits.shape[1:], bool), len(k) - len(q)), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


def test_layouts_agree():
    q, k, v = inputs()
    out = ejgpu.flash_attn_varlen(q, k, v, layout="bshd")
    np.testing.assert_allclose(out, modules.flash_attention(q, k, v, causal=True), atol=1e-6)
    flipped = ejgpu.flash_attn_varlen(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="bhsd")
    np.testing.assert_allclose(flipped.swapaxes(1, 2), out, atol=1e-6)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    starts = {"cu_seqlens_q": jnp.array([0, T, 2 * T]), "cu_seqlens_k": jnp.array([0, S, 2 * S])}
    from_packed = ejgpu.flash_attn_varlen(*packed, layout="thd", max_seqlens_q=T, max_seqlens_k=S, **starts)
    np.testing.assert_allclose(from_packed, out.reshape(-1, H, D), atol=1e-6)


def test_gradients_are_those_of_flash_attention():
    q, k, v = inputs()
    bias = normal("b", (H, T, S))

    def theirs(q, k, v, bias):
        options = {"b": bias, "layout": "bhsd", "causal": False, "sm_scale": 0.3, "dropout_p": 0.2}
        return jnp.sin(ejgpu.flash_attn_varlen(*(x.swapaxes(1, 2) for x in (q, k, v)), **options)).sum()

    def ours(q, k, v, bias):
        return jnp.sin(
            modules.flash_attention(q, k, v, bias, softmax_scale=0.3, dropout_prob=0.2, dropout_seed=0)
        ).sum()

    for mine, right in zip(*(jax.grad(f, (0, 1, 2, 3))(q, k, v, bias) for f in (theirs, ours)), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5)


@pytest.mark.parametrize("by_row", [False, True])
def test_alibi(by_row):
    q, k, v = inputs()
    slopes = np.abs(normal("slopes", (2, H) if by_row else (H,)))
    out = ejgpu.flash_attn_varlen(q, k, v, alibi_slopes=slopes, b=normal("b", (2, 1, T, S)))
    distance = np.abs(np.arange(T)[:, None] + S - T - np.arange(S))
    for row in range(2):
        slope = np.asarray(slopes[row] if by_row else slopes)
        bias = normal("b", (2, 1, T, S))[row] - slope[:, None, None] * distance
        np.testing.assert_allclose(out[row], by_hand(q[row], k[row], v[row], bias), atol=1e-5)


@pytest.mark.parametrize("separate_keys", [False, True])
def test_alibi_of_packed_sequences_counts_in_each(separate_keys):
    lengths, keys = [3, 4], [5, 4] if separate_keys else [3, 4]
    cu_q, cu_k = np.cumsum([0, *lengths]), np.cumsum([0, *keys])
    q, k, v = normal("q", (8, H, D)), normal("k", (cu_k[-1] + 1, HKV, D)), normal("v", (cu_k[-1] + 1, HKV, D))
    slopes = np.abs(normal("slopes", (2, H)))
    given = {"cu_seqlens_q": cu_q} | ({"cu_seqlens_k": cu_k} if separate_keys else {})
    out = ejgpu.flash_attn_varlen(q, k, v, layout="thd", alibi_slopes=slopes, **given)
    for row, (n, m) in enumerate(zip(lengths, keys, strict=True)):
        at, of = slice(cu_q[row], cu_q[row + 1]), slice(cu_k[row], cu_k[row + 1])
        bias = -np.asarray(slopes)[row][:, None, None] * np.abs(np.arange(n)[:, None] + m - n - np.arange(m))
        np.testing.assert_allclose(out[at], by_hand(q[at], k[of], v[of], bias), atol=1e-5)
    assert not np.any(out[7:])  # padding


def test_slopes_have_a_gradient_and_may_be_traced():
    q, k, v = inputs()

    @jax.jit
    def loss(slopes, starts):
        packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k[:, :T], v[:, :T])]
        return ejgpu.flash_attn_varlen(
            *packed, layout="thd", cu_seqlens_q=starts, max_seqlens_q=1, alibi_slopes=slopes
        ).sum()

    gradient = jax.grad(loss)(jnp.ones(H), jnp.array([0, T, 2 * T]))
    assert gradient.shape == (H,) and np.abs(gradient).max() > 0


@pytest.mark.parametrize("packed", [False, True])
def test_alibi_makes_no_array_of_pairs(packed):
    """Neither it nor its gradient: at 16384 tokens that would be gigabytes."""
    long, tokens = 4096, (4096,) if packed else (1, 4096)
    q, k = (jax.ShapeDtypeStruct((*tokens, heads, D), jnp.float32) for heads in (H, HKV))
    given = {"layout": "thd", "cu_seqlens_q": jnp.array([0, 900, long])} if packed else {}

    def loss(q, k, v, slopes):
        return ejgpu.flash_attn_varlen(q, k, v, alibi_slopes=slopes, **given).sum()

    slopes = jax.ShapeDtypeStruct((2, H) if packed else (H,), jnp.float32)
    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).lower(q, k, k, slopes)
    shapes = re.findall(r"tensor<((?:\d+x)+)", step.as_text())
    largest = max(np.prod([int(n) for n in shape.split("x")[:-1]]) for shape in shapes)
    assert long * H * D <= largest < long * long / 4


def test_decode_sees_what_is_valid():
    q, k, v = normal("q", (2, 1, H, D)), *(normal(n, (2, S, HKV, D)) for n in "kv")
    lens = np.array([S, 4])
    hidden = jnp.arange(S)[None, :, None, None] >= lens[:, None, None, None]
    out = ejgpu.flash_attn_varlen_decode(
        q, jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.nan, v), cache_seqlens=lens, sm_scale=0.5
    )
    for row, n in enumerate(lens):
        right = by_hand(q[row], k[row, :n], v[row, :n], scale=0.5)
        np.testing.assert_allclose(out[row], right, atol=1e-5)


def test_linear_attention_gives_out_and_state():
    q, k, v = (normal(n, (1, T, H, D)) for n in "qkv")
    g, state = -jnp.abs(normal("g", (1, T, H, D))), normal("state", (1, H, D, D))
    names = {"softmax_scale": 0.3, "reverse": True, "return_state": True}
    cases = [
        (ejgpu.recurrent, modules.recurrent_attention, {"gk": g, "gv": g, "initial_state": state}),
        (ejgpu.recurrent_gla, modules.gla_attention, {"g": g, "initial_state": state}),
        (ejgpu.lightning_attn, modules.lightning_attention, {"layer_idx": 1, "num_layers": 4, "initial_state": state}),
    ]
    for theirs, ours, given in cases:
        outputs = theirs(q, k, v, scale=0.3, reverse=True, **given)
        for mine, right in zip(outputs, ours(q, k, v, **given, **names), strict=True):
            np.testing.assert_array_equal(mine, right)


def test_native_sparse_attention_passes_everything_on():
    q, k, v = normal("q", (1, 32, 4, 8)), normal("k", (1, 32, 2, 8)), normal("v", (1, 32, 2, 8))
    gates = {name: jax.nn.sigmoid(normal(name, (1, 32, 4))) for name in ("g_cmp", "g_slc", "g_swa")}
    given = gates | {"block_counts": 2, "block_size": 8, "window_size": 5, "cu_seqlens": jnp.array([0, 20, 32])}
    out = ejgpu.native_spare_attention(q, k, v, scale=0.3, **given)
    np.testing.assert_array_equal(out, modules.native_sparse_attention(q, k, v, softmax_scale=0.3, **given))
    given = {"block_indices": np.tile(np.arange(4), (1, 32, 2, 1)), "block_counts": 2, "block_size": 8}
    out = ejgpu.native_spare_attention(q, k, v, **given)
    np.testing.assert_array_equal(out, modules.native_sparse_attention(q, k, v, **given))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "sbhd"}, "layout 'sbhd' is unknown; use one of bshd, bhsd, thd"),
        ({"layout": "thd"}, r"q has shape \(2, 7, 4, 8\); layout 'thd' has 3 dimensions"),
        ({"cu_seqlens_q": [0, 7]}, "describe layout 'thd', got layout 'bshd'"),
        ({"max_seqlens_q": 6}, "max_seqlens_q=6, but sequences have 7 tokens"),
        ({"alibi_slopes": np.ones(3, np.float32)}, r"alibi_slopes \(3,\) must be \(4,\) or \(batch, 4\)"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        ejgpu.flash_attn_varlen(*inputs(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "layout 'thd' packs sequences: cu_seqlens_q must say where they begin"),
        (
            {"cu_seqlens_q": [0, 3, 7], "max_seqlens_q": 3},
            r"but a sequence has more tokens \(row 1: 4\)",
        ),
        ({"cu_seqlens_q": [0, 3, 7], "alibi_slopes": np.ones((3, H), np.float32)}, r"must be \(4,\) or \(2, 4\)"),
    ],
)
def test_bad_packed_input(options, message):
    q = normal("q", (T, H, D))
    with pytest.raises(ValueError, match=message):
        ejgpu.flash_attn_varlen(q, q, q, layout="thd", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 1.5}, r"^dropout_p=1\.5 must be at least 0 and below 1"),
        ({"dropout_p": "half"}, "^dropout_p must be a number, got 'half'"),
        ({"sm_scale": np.inf}, "^sm_scale=inf must be finite"),
        ({"b": np.zeros((3, T, S), np.float32)}, r"^b \(3, 7, 9\) does not broadcast to .* = \(2, 4, 7, 9\)"),
        ({"b": np.zeros((T, S), np.int32)}, "^b has dtype int32"),
        (
            {"b": np.zeros((3, T, S), np.float32), "alibi_slopes": np.ones(H, np.float32)},
            r"^b \(3, 7, 9\) does not broadcast to .* = \(2, 4, 7, 9\)",
        ),
        ({"q": np.zeros((2, T, H, D), np.int32)}, "^q has dtype int32"),
        ({"k": np.zeros((2, S, HKV, 4), np.float32)}, r"^head_dim of k \(.*\) must be that of q \(.*\): 8"),
        ({"v": np.zeros((2, 3, HKV, D), np.float32)}, r"^v \(.*\) must have the length and heads of k \(.*\)"),
    ],
)
def test_errors_are_in_the_words_of_flash_attn_varlen(options, message):
    arrays = dict(zip("qkv", inputs(), strict=True))
    with pytest.raises((TypeError, ValueError), match=message):
        ejgpu.flash_attn_varlen(**arrays | options)


def test_errors_of_the_others_are_in_their_words():
    x, token = normal("q", (1, 16, 4, 8)), normal("q", (1, 1, 4, 8))
    cases = [
        (lambda: ejgpu.recurrent(x, x, x, scale="one"), "^scale must be a number, got 'one'"),
        (lambda: ejgpu.recurrent_gla(x, x[..., :4], x), r"^k \(1, 16, 4, 4\)"),
        (lambda: ejgpu.lightning_attn(x, x, x, 0, 4, scale=np.inf), "^scale=inf must be finite"),
        (lambda: ejgpu.flash_attn_varlen_decode(token, x, x, cache_seqlens=[17]), "^cache_seqlens must"),
        (lambda: ejgpu.flash_attn_varlen_decode(token, x, x, cache_seqlens=[7], sm_scale=np.inf), "^sm_scale=inf"),
    ]
    for call, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.parametrize("device", [np.array, jnp.array])
@pytest.mark.parametrize("starts", [[2, 16], [0, 9, 5], [0, 99]])
def test_bad_starts_of_sequences_raise_wherever_they_are(device, starts):
    x, starts = jnp.ones((1, 16, 4, 8)), device(starts)
    slopes, ordered = jnp.ones(4), np.linspace(0, 16, len(starts)).astype(int)
    varlen = partial(ejgpu.flash_attn_varlen, x[0], x[0], x[0], layout="thd")
    blocks = jnp.zeros((1, 16, 4, 1), jnp.int32)
    cases = {
        "cu_seqlens_q": [
            lambda: varlen(cu_seqlens_q=starts),
            lambda: varlen(cu_seqlens_q=starts, alibi_slopes=slopes, max_seqlens_q=3),
        ],
        "cu_seqlens_k": [lambda: varlen(cu_seqlens_q=ordered, cu_seqlens_k=starts)],
        "cu_seqlens": [
            lambda: ejgpu.recurrent(x, x, x, cu_seqlens=starts),
            lambda: ejgpu.recurrent_gla(x, x, x, cu_seqlens=starts),
            lambda: ejgpu.lightning_attn(x, x, x, 0, 4, cu_seqlens=starts),
            lambda: ejgpu.native_spare_attention(x, x, x, block_indices=blocks, block_size=16, cu_seqlens=starts),
            lambda: chunk_local_cumsum(x[..., 0], 4, cu_seqlens=starts),
            lambda: prepare_sequence_ids(starts, total=16),
        ],
    }
    for name, calls in cases.items():
        for call in calls:
            with pytest.raises(ValueError, match=f"^{name} must start at 0, never decrease, and end within the 16 tok"):
                call()

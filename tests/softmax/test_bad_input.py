"""Every row of the bad-input table: what is raised, and what the message says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from ejkernel.modules import attention, blocksparse_attention, flash_attention, scaled_dot_product_attention
from ejkernel.ops import explain
from ejkernel.types import BlockPattern, MaskInfo

Q, K, V = jnp.ones((2, 6, 4, 8)), jnp.ones((2, 10, 2, 8)), jnp.ones((2, 10, 2, 8))
PACKED = {"query": jnp.ones((6, 4, 8)), "key": jnp.ones((6, 2, 8)), "value": jnp.ones((6, 2, 8))}


def ones(*shape, dtype="float32"):
    return jnp.ones(shape, dtype)


# what is changed in a good call, the error, its message
WRONG = {
    # shapes and head counts
    "query-rank": ({"query": ones(6, 8)}, ValueError, r"query must have 4 dimensions, got shape \(6, 8\).*layout is"),
    "key-rank": ({"key": ones(10, 2, 8)}, ValueError, r"key \(10, 2, 8\) must have as many dimensions as query"),
    "empty": ({"key": ones(2, 10, 0, 8)}, ValueError, r"key has an empty dimension: shape \(2, 10, 0, 8\)"),
    "batch": ({"key": ones(3, 10, 2, 8)}, ValueError, r"batch sizes differ: query \(2, 6, 4, 8\), key \(3, 10, 2, 8\)"),
    "value-batch": ({"value": ones(1, 10, 2, 8)}, ValueError, "batch sizes differ"),
    "head-dim": ({"key": ones(2, 10, 2, 16)}, ValueError, r"head_dim of key \(2, 10, 2, 16\) must be .* 8"),
    "value-length": ({"value": ones(2, 9, 2, 8)}, ValueError, r"value \(2, 9, 2, 8\) must have .* \(10, 2\)"),
    "value-heads": ({"value": ones(2, 10, 4, 8)}, ValueError, "value .* must have the length and heads of key"),
    "heads": ({"key": ones(2, 10, 3, 8), "value": ones(2, 10, 3, 8)}, ValueError, r"H=4 must be a multiple .* Hkv=3"),
    "packed-keys-not": (
        {"query": ones(6, 4, 8), "cum_seqlens_q": jnp.array([0, 6])},
        ValueError,
        r"key \(2, 10, 2, 8\) must have as many dimensions as query \(6, 4, 8\)",
    ),
    "batches-of-batches": (
        {"query": ones(2, 3, 6, 4, 8), "key": ones(3, 2, 6, 4, 8), "value": ones(3, 2, 6, 4, 8)},
        ValueError,
        r"batch sizes differ: query \(2, 3, 6, 4, 8\)",
    ),
    # dtypes
    "not-an-array": ({"query": [[1.0]]}, TypeError, "query must be an array, got list"),
    "none": ({"value": None}, TypeError, "value must be an array, got NoneType"),
    "a-dtype": ({"query": np.float32}, TypeError, "query must be an array, got type"),
    "float64": ({"query": np.ones((2, 6, 4, 8))}, TypeError, "query has dtype float64; supported: float32, bfloat16"),
    "int32": ({"key": ones(2, 10, 2, 8, dtype="int32")}, TypeError, "key has dtype int32; supported: float32"),
    "bool": ({"value": ones(2, 10, 2, 8, dtype=bool)}, TypeError, "value has dtype bool; supported"),
    "complex": ({"value": ones(2, 10, 2, 8, dtype="complex64")}, TypeError, "value has dtype complex64; supported"),
    "mixed": ({"key": ones(2, 10, 2, 8, dtype="bfloat16")}, TypeError, "key has dtype bfloat16, query has float32"),
    # bias and sinks
    "bias-shape": ({"bias": ones(6, 9)}, ValueError, r"bias \(6, 9\) does not broadcast to .* \(2, 4, 6, 10\)"),
    "bias-rank": ({"bias": ones(1, 1, 1, 6, 10)}, ValueError, "bias .* does not broadcast"),
    "bias-key-heads": ({"bias": ones(2, 2, 6, 10)}, ValueError, "bias .* does not broadcast"),
    "bias-dtype": ({"bias": ones(6, 10, dtype="int32")}, TypeError, "bias has dtype int32; supported"),
    "sinks-shape": ({"softmax_aux": ones(3, 2)}, ValueError, r"softmax_aux \(3, 2\) must be .* with heads=4"),
    "sinks-of-other-heads": ({"softmax_aux": ones(3)}, ValueError, r"be \(heads,\), .* heads=4; 3 .* are \(1, 3\)"),
    "sinks-rank": ({"softmax_aux": ones(1, 4, 2)}, ValueError, "softmax_aux .* must be"),
    "sinks-empty": ({"softmax_aux": ones(4, 0)}, ValueError, "softmax_aux .* must be"),
    "sinks-dtype": ({"softmax_aux": ones(4, dtype="int32")}, TypeError, "softmax_aux has dtype int32"),
    # masks
    "mask-type": ({"mask_info": ones(2, 10)}, TypeError, "mask_info must be a MaskInfo, got"),
    "mask-lengths": ({"mask_info": MaskInfo(6, 9)}, ValueError, r"\(q, kv\) = \(6, 9\), query and key have \(6, 10\)"),
    "mask-batch": (
        {"mask_info": MaskInfo.from_attention_mask(np.ones((3, 6, 10), bool))}, ValueError,
        "mask_info has batch 3, query has 2",
    ),
    "mask-heads": (
        {"mask_info": MaskInfo.from_attention_mask(np.ones((1, 3, 6, 10), bool))}, ValueError,
        "mask_info has 3 heads, query has 4",
    ),
    # options
    "scale-text": ({"softmax_scale": "big"}, TypeError, "softmax_scale must be a number, got 'big'"),
    "scale-nan": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale=nan must be finite"),
    "dropout-1": ({"dropout_prob": 1.0, "dropout_seed": 0}, ValueError, r"dropout_prob=1\.0 must be .* below 1"),
    "dropout-negative": ({"dropout_prob": -0.1, "dropout_seed": 0}, ValueError, "dropout_prob=-0.1 must be"),
    "dropout-no-seed": ({"dropout_prob": 0.5}, ValueError, "dropout_prob=0.5 needs dropout_seed"),
    "dropout-seed-float": ({"dropout_prob": 0.5, "dropout_seed": 1.5}, TypeError, "dropout_seed must be .* float32"),
    "dropout-seed-shape": (
        {"dropout_prob": 0.5, "dropout_seed": jnp.arange(3)}, TypeError, r"dropout_seed must be .* int32 \(3,\)",
    ),
    "causal-int": ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
    "causal-none": ({"causal": None}, TypeError, "causal must be True or False, got None"),
    "lse-text": ({"return_lse": "yes"}, TypeError, "return_lse must be True or False"),
    "normalize-none": ({"normalize_output": None}, TypeError, "normalize_output must be True or False"),
    "window-negative": ({"sliding_window": -1}, ValueError, "sliding_window=-1 must not be negative"),
    "window-three": ({"sliding_window": (1, 2, 3)}, ValueError, r"sliding_window=\(1, 2, 3\) must be an int or a pair"),
    "window-float": ({"sliding_window": 2.5}, TypeError, "sliding_window=2.5 must hold ints or None"),
    "window-bool": ({"sliding_window": True}, TypeError, "sliding_window=True must hold ints"),
    "cap-zero": ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap=0.0 must be positive"),
    "cap-negative": ({"logits_soft_cap": -3}, ValueError, "logits_soft_cap=-3.0 must be positive"),
    "logits-dtype": ({"logits_dtype": jnp.int32}, TypeError, "logits_dtype=int32 is not supported; use one of float32"),
    "scale-bool": ({"softmax_scale": True}, TypeError, "softmax_scale must be a number, got True"),
    "precisions": ({"precision": ("high", "highest")}, ValueError, r"precision=\('high', 'highest'\) is unknown"),
    "logits-float64": ({"logits_dtype": "float64"}, TypeError, "logits_dtype=float64 is not supported"),
    "precision": ({"precision": "sharp"}, ValueError, "precision='sharp' is unknown; use None, 'default'"),
    "platform": ({"platform": "cuda"}, ValueError, "platform 'cuda' is unknown; use None, 'auto', 'xla', 'triton'"),
    "cfg-field": ({"platform": "xla", "cfg": {"block": 3}}, ValueError, r"unknown fields \['block'\] .*'block_q'"),
    "cfg-value": ({"cfg": {"block_q": 0}}, ValueError, "block_q=0 must be an int from 1 on"),
    "cfg-type": ({"platform": "xla", "cfg": 64}, TypeError, "cfg=64 must be a platform's Config or a dict"),
    # packed
    "cum-batch": ({"cum_seqlens_q": jnp.array([0, 6])}, ValueError, "packs sequences into one row; query has batch 2"),
    "cum-k-alone": ({"cum_seqlens_k": jnp.array([0, 6])}, ValueError, "cum_seqlens_k needs cum_seqlens_q"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_flash_attention_refuses(name):
    changes, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        flash_attention(**{"query": Q, "key": K, "value": V, **changes})


@pytest.mark.parametrize(
    "name", ["heads", "float64", "bias-shape", "mask-lengths", "dropout-no-seed", "window-negative"]
)
def test_the_same_while_tracing(name):
    """Raised before any kernel, in a traced call too."""
    changes, error, message = WRONG[name]
    static = {n: x for n, x in changes.items() if not isinstance(x, jax.Array)}
    arrays = {n: x for n, x in {"query": Q, "key": K, "value": V, **changes}.items() if n not in static}
    with pytest.raises(error, match=message):
        jax.jit(lambda arrays: flash_attention(**arrays, **static))(arrays)


def test_float64_arrays_of_jax():
    with jax.enable_x64(True):
        q = jnp.ones((1, 4, 2, 8), jnp.float64)
        with pytest.raises(TypeError, match="query has dtype float64; supported: float32, bfloat16, float16"):
            flash_attention(q, q, q)


PACKED_WRONG = {
    "one-entry": ([0], ValueError, r"cum_seqlens_q must have shape \(sequences \+ 1,\), got \(1,\)"),
    "rank": ([[0, 6]], ValueError, "cum_seqlens_q must have 1 dimensions"),
    "float": (np.array([0.0, 6.0], np.float32), TypeError, "cum_seqlens_q must hold integers, got float32"),
    "past-the-end": ([0, 4, 7], ValueError, r"never decrease, and end within the 6 tokens \(row 2: 7\)"),
    "decreasing": ([0, 4, 2], ValueError, r"never decrease.*\(row 2: 2\)"),
    "negative": (np.array([-1, 4]), ValueError, r"must start at 0.*\(row 0: -1\)"),
    "late-start": ([2, 6], ValueError, r"cum_seqlens_q must start at 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED_WRONG)
def test_packed_refuses(name):
    cum, error, message = PACKED_WRONG[name]
    with pytest.raises(error, match=message):
        flash_attention(**PACKED, cum_seqlens_q=cum)


def test_packed_keys_of_another_length_need_their_own():
    longer = {"key": ones(9, 2, 8), "value": ones(9, 2, 8)}
    with pytest.raises(ValueError, match="keys have 9 tokens and queries 6: give cum_seqlens_k"):
        flash_attention(**PACKED | longer, cum_seqlens_q=[0, 6])
    with pytest.raises(ValueError, match=r"cum_seqlens_q \(2,\) and cum_seqlens_k \(3,\) must have the same length"):
        flash_attention(**PACKED | longer, cum_seqlens_q=[0, 6], cum_seqlens_k=[0, 4, 9])
    with pytest.raises(ValueError, match=r"cum_seqlens_k must start .* 9 tokens \(row 1: 10\)"):
        flash_attention(**PACKED | longer, cum_seqlens_q=[0, 6], cum_seqlens_k=[0, 10])


# Swapped layout -------------------------------------------------------------------------------------------------


def test_swapped_heads_and_lengths_that_still_divide():
    """(batch, heads, length, dim): 4 'tokens' of 16 'heads' against 4 of 24."""
    q, k = ones(2, 4, 16, 8), ones(2, 4, 24, 8)
    with pytest.raises(ValueError, match=r"H=16 .* Hkv=24.*\(batch, length, heads, head_dim\).*swapped\?"):
        flash_attention(q, k, k)


def test_swapped_heads_and_lengths_against_a_mask():
    q = ones(2, 4, 16, 8)
    mask = MaskInfo.from_lengths(jnp.array([3, 16]), q_len=16)
    with pytest.raises(ValueError, match=r"\(16, 16\), query and key have \(4, 4\).*layout.*swapped\?"):
        flash_attention(q, q, q, mask_info=mask)


def test_swapped_values():
    with pytest.raises(ValueError, match=r"value \(2, 2, 10, 8\) must have the length and heads of key.*layout"):
        flash_attention(Q, K, V.swapaxes(1, 2))


# Out of range ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    lambda x: MaskInfo.from_lengths(x, q_len=6),
    lambda x: MaskInfo(6, 6).apply_kv_lengths(x),
], ids=["from_lengths", "apply_kv_lengths"])  # fmt: skip
@pytest.mark.parametrize("lengths", [[3, 7], [-1, 3]], ids=["past-the-end", "negative"])
def test_lengths_out_of_range(make, lengths):
    with pytest.raises(ValueError, match=r"engths must lie in \[0, 6\]"):
        make(np.array(lengths))
    with pytest.raises(ValueError, match=r"engths must lie in \[0, 6\]"):
        make(jnp.array(lengths))


@pytest.mark.parametrize("cum", [[0, 4, 9], [0, 9, 4], [-3, 4, 6]], ids=["past-the-end", "decreasing", "negative"])
def test_traced_cum_seqlens_are_clamped(cum):
    """Nothing outside is read: the answer is that of some valid packing, and finite."""
    out = jax.jit(lambda cum: flash_attention(**PACKED, cum_seqlens_q=cum))(jnp.array(cum))
    assert np.isfinite(out).all()


def test_traced_lengths_are_clamped():
    q = ones(2, 6, 2, 8)
    run = jax.jit(lambda n: flash_attention(q, q, q, mask_info=MaskInfo.from_lengths(n, q_len=6)))
    np.testing.assert_array_equal(run(jnp.array([9, -2])), run(jnp.array([6, 0])))


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.setenv("EJKERNEL_CHECKS", "1")


def test_checks_of_device_values(checks):
    with pytest.raises(ValueError, match=r"cum_seqlens_q must start at 0.* 6 tokens \(row 2: 9\)"):
        flash_attention(**PACKED, cum_seqlens_q=jnp.array([0, 4, 9]))


def test_checks_of_keys(checks):
    with pytest.raises(ValueError, match=r"cum_seqlens_k must start at 0.* \(row 1: 7\)"):
        flash_attention(**PACKED, cum_seqlens_q=jnp.array([0, 4]), cum_seqlens_k=jnp.array([0, 7]))


def test_checks_pass_what_is_right(checks):
    out = flash_attention(**PACKED, cum_seqlens_q=jnp.array([0, 4, 6]))
    assert np.isfinite(out).all()


def test_checks_under_jit_go_through_checkify(checks):
    run = checkify.checkify(jax.jit(lambda cum: flash_attention(**PACKED, cum_seqlens_q=cum)))
    error, _ = run(jnp.array([0, 4, 9]))
    with pytest.raises(checkify.JaxRuntimeError, match=r"cum_seqlens_q must start at 0.* 6 tokens \(row 2\)"):
        error.throw()
    error, out = run(jnp.array([0, 4, 6]))
    error.throw()
    assert np.isfinite(out).all()


def test_checks_of_lengths_under_jit_go_through_checkify(checks):
    q = ones(2, 6, 2, 8)
    run = checkify.checkify(jax.jit(lambda n: flash_attention(q, q, q, mask_info=MaskInfo.from_lengths(n, q_len=6))))
    error, _ = run(jnp.array([3, 9]))
    with pytest.raises(checkify.JaxRuntimeError, match=r"q_lengths .*\[0, 6\].*row 1"):
        error.throw()


def test_offsets_on_the_device_are_looked_at_and_traced_ones_put_in_order():
    offsets = jnp.array([0, 4, 9])
    with pytest.raises(ValueError, match=r"cum_seqlens_q .* within the 6 tokens \(row 2: 9\)"):
        flash_attention(**PACKED, cum_seqlens_q=offsets)
    out = jax.jit(lambda offsets: flash_attention(**PACKED, cum_seqlens_q=offsets))(offsets)
    assert np.isfinite(out).all()


# Forced platforms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [flash_attention, scaled_dot_product_attention], ids=["flash", "sdpa"])
@pytest.mark.parametrize("name", ["triton", "pallas", "cudnn"])
def test_a_forced_platform_gives_the_reasons_that_explain_gives(function, name):
    reasons = explain(function, Q, K, V).refusals[name]
    with pytest.raises(NotImplementedError) as raised:
        function(Q, K, V, platform=name)
    message = str(raised.value)
    assert reasons and all(reason in message for reason in reasons)
    assert f"platform {name!r} cannot do this call" in message and "platforms that could: xla" in message
    assert function.__name__ in message


def test_a_forced_platform_under_jit():
    with pytest.raises(NotImplementedError, match="platform 'cudnn' cannot do this call"):
        jax.jit(lambda q: flash_attention(q, K, V, platform="cudnn"))(Q)


# Traced options -------------------------------------------------------------------------------------------------


def test_options_that_are_part_of_the_program():
    with pytest.raises(TypeError, match="dropout_prob must be a Python number, got a traced value"):
        jax.jit(lambda x: flash_attention(Q, K, V, dropout_prob=x))(0.5)


@pytest.mark.parametrize("name", ["softmax_scale", "logits_soft_cap"])
def test_a_traced_option_is_one_number(name):
    with pytest.raises(TypeError, match=rf"{name} must be a number, got float32 of shape \(4,\)"):
        jax.jit(lambda x: flash_attention(Q, K, V, **{name: x}))(np.ones(4, np.float32))


def test_a_traced_causal():
    with pytest.raises(TypeError, match="causal must be True or False"):
        jax.jit(lambda x: flash_attention(Q, K, V, causal=x))(True)


@pytest.mark.parametrize("function", [flash_attention, attention, scaled_dot_product_attention, blocksparse_attention])
def test_unknown_keywords(function):
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        function(Q, K, V, window=3)


# The other functions --------------------------------------------------------------------------------------------

BLOCKS = np.ones((2, 3), bool)

BLOCKSPARSE = {
    "no-size": ({"block_mask": BLOCKS}, ValueError, "block_size is needed unless block_mask is a BlockPattern"),
    "size-zero": ({"block_mask": BLOCKS, "block_size": 0}, ValueError, "block_size.*(at least 1|positive)"),
    "size-text": ({"block_mask": BLOCKS, "block_size": "4"}, (TypeError, ValueError), "block_size"),
    "size-disagrees": (
        {"block_mask": BlockPattern.from_dense(BLOCKS, block_size=4), "block_size": 8}, ValueError,
        "block_size=8 but the pattern's blocks are 4",
    ),
    "too-few-blocks": ({"block_mask": BLOCKS, "block_size": 2}, ValueError, r"blocks of \(2, 2\) need \(3, 5\) blocks"),
    "too-many-blocks": ({"block_mask": np.ones((3, 3), bool), "block_size": 4}, ValueError, r"need \(2, 3\) blocks"),
    "rank": ({"block_mask": np.ones(3, bool), "block_size": 4}, ValueError, r"block_mask must have shape \(blocks_q"),
    "dtype": ({"block_mask": BLOCKS * 0.5, "block_size": 4}, TypeError, "block_mask must be bool or 0/1 integers"),
    "heads": (
        {"block_mask": np.ones((3, 2, 3), bool), "block_size": 4}, ValueError, "block_mask has heads 3, query has 4"
    ),
    "heads-of-a-pattern": (
        {"block_mask": BlockPattern.from_dense(np.ones((3, 2, 3), bool)), "block_size": 4}, ValueError,
        "block_mask has heads 3, query has 4",
    ),
    "batch": (
        {"block_mask": np.ones((3, 4, 2, 3), bool), "block_size": 4}, ValueError, "block_mask has batch 3, query has 2"
    ),
    "answer": ({"block_mask": lambda *at: None, "block_size": 4}, TypeError, "block_mask must be bool or 0/1"),
    "answer-shape": ({"block_mask": lambda *at: [True, False], "block_size": 4}, ValueError,
        r"one bool for each \(b, h, i, j\), got shape \(2,\)"),
    "answer-shape-of-jax": ({"block_mask": lambda *at: jnp.ones(2, bool), "block_size": 4}, ValueError,
        r"one bool for each \(b, h, i, j\), got shape \(2,\)"),
    "three-arguments": ({"block_mask": lambda b, h, i: True, "block_size": 4}, TypeError,
                        r"block_mask is called with the indices \(b, h, i, j\) .* the signature \(b, h, i\)"),
    "none": ({"block_mask": None}, TypeError, "block_mask must be a BlockPattern, .* got None"),
    "query-rank": ({"query": ones(6, 8), "block_mask": BLOCKS, "block_size": 4}, ValueError, "query must have 4 dim"),
    "callable-size": ({"block_mask": lambda *at: True, "block_size": -1}, ValueError, "block_size=-1 must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKSPARSE)
def test_blocksparse_refuses(name):
    changes, error, message = BLOCKSPARSE[name]
    with pytest.raises(error, match=message):
        blocksparse_attention(**{"query": Q, "key": K, "value": V, **changes})


def test_attention_with_dropout_needs_a_key():
    with pytest.raises(ValueError, match=r"dropout_prob=0\.5 needs"):
        attention(Q, K, V, dropout_prob=0.5, deterministic=False)

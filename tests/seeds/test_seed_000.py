"""The examples of seed 000, as printed, and their numbers against numpy."""

import numpy as np

LENGTH = 64 * np.finfo(np.float16).eps  # roundings to float16 of results of about 1


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def wide(*arrays):
    return [np.asarray(x).astype(np.float64) for x in arrays]


def test_flash_attention_of_variable_length(capsys):
    import jax.numpy as jnp

    from ejgpu import flash_attn_varlen
    from ejgpu.utils import varlen_input_helper

    # Example usage of variable length flash attention
    batch_size = 4
    qheads = 8
    kvheads = 8
    qseqlen = 512
    kseqlen = 512
    head_dim = 64

    # Prepare variable length inputs
    q, k, v, metadata = varlen_input_helper(
        batch_size=batch_size,
        qheads=qheads,
        kvheads=kvheads,
        qseqlen=qseqlen,
        kseqlen=kseqlen,
        head_dim=head_dim,
        dtype=jnp.float16,
        equal_seqlens=False, # Set to True for equal length sequences
    )  # fmt: skip

    # Apply flash attention
    output = flash_attn_varlen(
        q,
        k,
        v,
        cu_seqlens_q=metadata.cu_seqlens_q,
        cu_seqlens_k=metadata.cu_seqlens_k,
        max_seqlens_q=metadata.max_seqlens_q,
        max_seqlens_k=metadata.max_seqlens_k,
        causal=True, # Set to False for non-causal attention
        layout=metadata.layout,
        sm_scale=metadata.sm_scale,
    )  # fmt: skip

    print("Flash Attention (Variable Length) Output Shape:", output.shape)

    assert capsys.readouterr().out == f"Flash Attention (Variable Length) Output Shape: {q.shape}\n"
    q, k, v = wide(q, k, v)
    starts, keys = np.asarray(metadata.cu_seqlens_q), np.asarray(metadata.cu_seqlens_k)
    for a, b, c, d in zip(starts[:-1], starts[1:], keys[:-1], keys[1:], strict=True):
        logits = np.einsum("thd,shd->hts", q[a:b], k[c:d]) * 64**-0.5
        seen = np.tril(np.ones((b - a, d - c), bool), (d - c) - (b - a))
        some = seen.any(1)  # with fewer keys than queries the first queries see none
        logits = np.where(seen, logits, -np.inf)[:, some]
        np.testing.assert_allclose(output[a:b][some], np.einsum("hts,shd->thd", softmax(logits), v[c:d]), atol=LENGTH)
        assert not np.any(output[a:b][~some])


def test_recurrent_attention(capsys):
    from ejgpu import recurrent
    from ejgpu.utils import numeric_gen

    # Example usage of recurrent attention
    batch_size = 2
    seq_len = 256
    num_heads = 4
    key_dim = 64
    value_dim = 64

    query = numeric_gen(batch_size, seq_len, num_heads, key_dim)
    key = numeric_gen(batch_size, seq_len, num_heads, key_dim)
    value = numeric_gen(batch_size, seq_len, num_heads, value_dim)
    init_state = numeric_gen(batch_size, num_heads, key_dim, value_dim)

    # Apply recurrent attention
    output, state = recurrent(query, key, value, initial_state=init_state)

    print("Recurrent Attention Output Shape:", output.shape)
    print("Recurrent Attention Final State Shape:", state.shape)

    assert capsys.readouterr().out.splitlines() == [
        "Recurrent Attention Output Shape: (2, 256, 4, 64)",
        "Recurrent Attention Final State Shape: (2, 4, 64, 64)",
    ]
    q, k, v, start = wide(query, key, value, init_state)
    states = start[:, None] + np.cumsum(np.einsum("bthd,bthe->bthde", k, v), axis=1)
    largest = np.abs(states).max()
    np.testing.assert_allclose(state, states[:, -1], atol=LENGTH * largest)
    right = np.einsum("bthd,bthde->bthe", q, states) * 64**-0.5
    np.testing.assert_allclose(output, right, atol=LENGTH * np.abs(right).max())


def test_native_sparse_attention(capsys):
    from ejgpu import native_spare_attention
    from ejgpu.utils import generate_block_indices, numeric_gen

    # Example usage of native sparse attention
    batch_size = 1
    kv_heads = 1
    query_heads = 16
    sequence_length = 128
    head_dim = 64
    num_blocks_per_token = 8
    block_size = 16
    scale = 0.1

    query = numeric_gen(batch_size, sequence_length, query_heads, head_dim)
    key = numeric_gen(batch_size, sequence_length, kv_heads, head_dim)
    value = numeric_gen(batch_size, sequence_length, kv_heads, head_dim)
    block_indices = generate_block_indices(
        batch_size,
        sequence_length,
        kv_heads,
        num_blocks_per_token,
        block_size
    )  # fmt: skip

    # Apply native sparse attention
    output = native_spare_attention(
        q=query,
        k=key,
        v=value,
        block_indices=block_indices,
        block_size=block_size,
        scale=scale
    )  # fmt: skip

    print("Native Sparse Attention Output Shape:", output.shape)

    assert capsys.readouterr().out == "Native Sparse Attention Output Shape: (1, 128, 16, 64)\n"
    q, k, v = wide(query, key, value)
    blocks, token = np.asarray(block_indices)[0, :, 0], np.arange(128)
    seen = (token // 16 == blocks[..., None]).any(1) & (token <= token[:, None])  # (T, S)
    logits = np.where(seen, 0.1 * np.einsum("thd,sd->hts", q[0], k[0, :, 0]), -np.inf)
    np.testing.assert_allclose(output[0], np.einsum("hts,sd->thd", softmax(logits), v[0, :, 0]), atol=LENGTH)

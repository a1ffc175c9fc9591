"""What programs of dkernel ask of its names: chunks of patterns, bidirectional ones, packed projections, imports."""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from dkernel import LocalStrideSparseAttention, SparseAttention, combine_attn_partitions, get_sparse_attn_mask
from dkernel.interface import SparseAttention as FromInterface
from dkernel.utils import get_sparse_attn_mask as from_utils
from harness.tensors import dense, running

H, T, D, BLOCK = 4, 96, 16, 16


def qkv(B=1, T=T, S=None, H=H, Hkv=None):
    random = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, D), (B, S or T, Hkv or H, D), (B, S or T, Hkv or H, D))
    return [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]


def gradients(out, tensors):
    weights = torch.cos(torch.arange(out.numel())).reshape(out.shape)
    return torch.autograd.grad((out * weights).sum(), tensors)


def test_the_files_of_dkernel_have_the_same_names():
    assert FromInterface is SparseAttention and from_utils is get_sparse_attn_mask


# Patterns ---------------------------------------------------------------------------------------------------

MASKS = {
    "causal": {},
    "homogeneous": {"homo_head": True},
    "dense heads": {"num_dense_heads": 1, "num_kv_heads": 2},
    "step": {"head_sliding_step": 3, "head_sliding_offset": 1},
    "relative": {"vert_position_type": "relative"},
    "both sides": {"causal": False},
    "both sides, dense heads": {"causal": False, "num_dense_heads": 1},
    "both sides, columns": {"causal": False, "vert_position_type": "absolute"},
    "before and after": {"causal": False, "local_blocks": (3, 1)},
    "a chunk of the queries": {"seqlen": 32, "q_start_position": 64, "kv_seqlen": 96},
    "chunks of both": {"seqlen": 40, "q_start_position": 48, "kv_start_position": 16, "kv_seqlen": 70},
    "a chunk, both sides": {"seqlen": 32, "kv_start_position": 32, "kv_seqlen": 48, "causal": False},
    "past": {"past_len": 40},
    "past, whole blocks, both sides": {"past_len": 32, "causal": False},
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_are_what_the_rule_says(case):
    options = {"seqlen": 90, "local_blocks": 2, "vert_stride": 5, **MASKS[case]}
    (crow, col), blocks, mask = get_sparse_attn_mask(H, block_size=16, return_dense=True, device="cpu", **options)
    causal, past = options.get("causal", True), options.get("past_len", 0)
    before, after = options["local_blocks"] if isinstance(options["local_blocks"], tuple) else (2, 2)
    relative = options.get("vert_position_type", "absolute" if causal else "relative") == "relative"
    patterns = options.get("num_kv_heads", H)

    def seen(h, q, k):  # blocks, counted in the sequence
        h = 0 if options.get("homo_head") else h * patterns // H
        if causal and k > q:
            return False
        if -after < q - k < before or h >= patterns - options.get("num_dense_heads", 0):
            return True
        if relative:
            return (q - k - before + 1 if k < q else k - q - after + 1) % 5 == 0
        return (k + h * options.get("head_sliding_step", 1) + options.get("head_sliding_offset", 0)) % 5 == 0

    q0, k0 = options.get("q_start_position", 0), options.get("kv_start_position", 0)
    lengths = options["seqlen"] - past, options.get("kv_seqlen", options["seqlen"])
    tokens = np.zeros((H, *lengths))
    for h, i, j in np.ndindex(tokens.shape):
        q, k = q0 + past + i, k0 + j
        tokens[h, i, j] = seen(h, q // 16, k // 16) and (k <= q or not causal)
    assert mask.dtype == blocks.dtype == torch.bfloat16 and mask.shape[0] in (1, H)
    assert ((1 - mask).bool().numpy() == (tokens == 0)).all()
    skipped = -(-past // 16)
    rows = range(q0 // 16 + skipped, q0 // 16 + -(-options["seqlen"] // 16))
    columns = range(k0 // 16, k0 // 16 + -(-lengths[1] // 16))
    expected = [[[seen(h, q, k) for k in columns] for q in rows] for h in range(H)]
    assert (blocks.bool().numpy() == np.array(expected)).all()
    for h in range(blocks.shape[0]):
        for row in range(blocks.shape[1]):
            listed = col[h, crow[h, row] : crow[h, row + 1]].tolist()
            assert listed == blocks[h, row].nonzero()[:, 0].tolist()


BAD_MASKS = {
    "past": (ValueError, "past_len=90 must be less than seqlen=90", {"past_len": 90}),
    "two starts": (
        ValueError,
        "past_len=16 and q_start_position=16: give one",
        {"past_len": 16, "q_start_position": 16},
    ),
    "within a block": (ValueError, "kv_start_position=8 must be a multiple of block_size=16", {"kv_start_position": 8}),
    "type": (ValueError, "vert_position_type='near' must be None", {"vert_position_type": "near"}),
    "nothing local": (ValueError, "local_blocks=0 must be at least 1", {"local_blocks": (1, 0)}),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_bad_masks(case):
    error, message, options = BAD_MASKS[case]
    with pytest.raises(error, match=message):
        get_sparse_attn_mask(H, 90, 16, **options)


# Modules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "implementation"),
    [({}, "cpu"), ({"num_dense_heads": 1}, "cpu"), ({"local_blocks": (2, 1)}, "cpu"), ({}, "interpreted")],
)
def test_bidirectional_attention(options, implementation):
    given = {"local_blocks": 1, "vert_stride": 3, "causal": False, **options}
    (_, _, mask), tensors = get_sparse_attn_mask(2, T, 16, return_dense=True, device="cpu", **given), qkv(H=2)
    module = LocalStrideSparseAttention(2, T, 16, block_m=32, block_n=16, **given)
    with running(implementation):
        out = module(*tensors)
        ours = gradients(out, tensors)
    expected, _ = dense(*tensors, mask.bool()[None])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, gradients(expected, tensors), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "implementation"),
    [("together", "cpu"), ("before and same", "cpu"), ("ring", "cpu"), ("before and same", "interpreted")],
)
def test_chunks_of_queries_over_chunks_of_keys_are_the_whole(keys, implementation):
    """Each chunk has its rows and columns of the pattern; with the keys of its own tokens it is causal."""
    chunk, options = 32, {"block_size": 16, "local_blocks": 1, "vert_stride": 2, "device": "cpu"}
    q, k, v = qkv(H=2)
    _, pattern, _ = get_sparse_attn_mask(2, T, **options)
    undivided = SparseAttention(16, pattern)
    chunks = []
    with running(implementation):
        for start in range(0, T, chunk):
            same = start, start + chunk
            before = [(n, n + chunk) for n in range(0, start, chunk)] if keys == "ring" else [(0, start)][: start > 0]
            pairs = []
            for first, end in [(0, same[1])] if keys == "together" else [*before, same]:
                where = {"q_start_position": start, "kv_start_position": first, "kv_seqlen": end - first}
                _, blocks, _ = get_sparse_attn_mask(2, chunk, **options, **where)
                module = SparseAttention(16, blocks, causal=end == same[1], block_m=16, block_n=16)
                pairs.append(module(q[:, same[0] : same[1]], k[:, first:end], v[:, first:end], return_lse=True))
            chunks.append(combine_attn_partitions(*pairs, hdim=2))
        ours = gradients(torch.cat(chunks, 1), (q, k, v))
    expected = undivided(q, k, v)
    torch.testing.assert_close(torch.cat(chunks, 1), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, gradients(expected, (q, k, v)), atol=2e-5, rtol=1e-4)


def test_rows_and_columns_of_a_pattern_that_is_not_square():
    module = SparseAttention(16, torch.ones(2, 3), causal=False)
    q, k, v = qkv(H=1, T=32, S=48)
    assert module.max_seqlen == 48 and "blocks=2 x 3" in repr(module)
    with pytest.raises(ValueError, match="k has length 64; 3 blocks of 16 tokens cover 48"):
        module(*qkv(H=1, T=32, S=64))
    with pytest.raises(ValueError, match="q has length 33; 2 blocks of 16 tokens cover 32"):
        module(*qkv(H=1, T=33, S=48))
    for options, tensors in (({"seqlens": [3]}, (q, k, v)), ({"cu_seqlen_k": [0, 48]}, (q[0], k[0], v[0]))):
        with pytest.raises(ValueError, match="lengths, paddings and packed sequences need a square one"):
            module(*tensors, **options)


@pytest.mark.parametrize("seq_dim", [1, 2])
def test_packed_projections(seq_dim):
    heads = 3 - seq_dim
    module = LocalStrideSparseAttention(H, T, 16, 2, 3, seq_dim=seq_dim)
    q, k, v = (x.detach().transpose(1, seq_dim) for x in qkv())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = module(*leaves)
    wanted = gradients(expected, leaves)
    qkv_packed, kv_packed = (torch.cat(x, heads).requires_grad_() for x in ((q, k, v), (k, v)))
    out = module(qkv_packed, split_qkv=lambda x: x.chunk(3, heads))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, [qkv_packed])[0], torch.cat(wanted, heads))
    out = module(leaves[0], kv_packed, split_qkv=lambda x: x.chunk(2, heads))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, [kv_packed])[0], torch.cat(wanted[1:], heads))


def test_mistakes_with_packed_projections():
    module, (q, k, v) = LocalStrideSparseAttention(H, T, 16, 2, 3), qkv()
    with pytest.raises(ValueError, match="k and v not given: tensors that are packed in q need split_qkv"):
        module(q)
    with pytest.raises(ValueError, match="v not given: tensors that are packed in k need split_qkv"):
        module(q, k)
    with pytest.raises(ValueError, match="give q alone, or q and k, and not v"):
        module(q, k, v, split_qkv=lambda x: x.chunk(2, 2))
    with pytest.raises(ValueError, match="split_qkv must give k and v, and gave 3 tensors"):
        module(q, k, split_qkv=lambda x: (x, x, x))
    with pytest.raises(ValueError, match="split_qkv must give q, k and v, and gave 2 tensors"):
        module(q, split_qkv=lambda x: (x, x))


def test_splits_of_the_head_are_taken_and_change_nothing():
    tensors = qkv()
    plain = LocalStrideSparseAttention(H, T, 16, 2, 3)(*tensors)
    with warnings.catch_warnings(action="error"):
        one = LocalStrideSparseAttention(H, T, 16, 2, 3, d_splits=1)
    with pytest.warns(UserWarning, match="d_splits=2 splits nothing"):
        two = LocalStrideSparseAttention(H, T, 16, 2, 3, d_splits=2)
    assert torch.equal(one(*tensors), plain) and torch.equal(two(*tensors), plain)
    with pytest.raises(ValueError, match="d_splits=3 must be None, 1 or 2"):
        LocalStrideSparseAttention(H, T, 16, 2, 3, d_splits=3)


def test_patterns_that_a_cache_cannot_follow_warn():
    cells = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]])
    with pytest.warns(UserWarning, match="not efficient for a KV cache"):
        SparseAttention(16, cells)
    with pytest.warns(UserWarning, match="KV cache"):
        SparseAttention(16, torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]]))
    with warnings.catch_warnings(action="error"):
        SparseAttention(16, cells, causal=False)
        LocalStrideSparseAttention(H, T, 16, 1, 4)
        LocalStrideSparseAttention(H, T, 16, 1, 4, causal=False)
        # the newest two blocks of four: the first row is of the third
        SparseAttention(16, torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1]]))


def test_without_torch_the_import_names_what_to_install(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    for name in ("dkernel", "ejkernel.torch"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and "pip install 'ejkernel-attention[torch]'" in last, done.stderr

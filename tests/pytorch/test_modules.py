"""The modules as a stranger uses them: layouts, copies, modes of PyTorch, and mistakes."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from dkernel import LocalStrideSparseAttention, SparseAttention, combine_attn_partitions, get_sparse_attn_mask
from ejkernel.torch import flash_attention
from harness.tensors import running

IMPLEMENTATIONS = ("cpu", "interpreted")
H, T, D, BLOCK = 4, 70, 16, 16


def qkv(B=2, T=T, S=None, H=H, Hkv=None, D=D, dtype=torch.float32, **options):
    random = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, D), (B, S or T, Hkv or H, D), (B, S or T, Hkv or H, D))
    return [torch.randn(shape, generator=random).to(dtype).requires_grad_(**options) for shape in shapes]


def local(heads=H, length=128, **options):
    return LocalStrideSparseAttention(heads, length, BLOCK, 2, 3, block_m=32, block_n=16, **options)


# Patterns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"homo_head": True}, {"num_dense_heads": 1}, {"num_kv_heads": 2}, {"num_kv_heads": 2, "num_dense_heads": 1}],
    ids=str,
)
def test_local_stride_rule(options):
    heads, blocks, local_blocks, stride, offset = 4, 9, 2, 8, 3
    module = LocalStrideSparseAttention(
        heads, blocks * 16, 16, local_blocks, stride, head_sliding_offset=offset, **options
    )
    group = heads // options.get("num_kv_heads", heads)
    first_dense = heads // group - options.get("num_dense_heads", 0)
    for h, q, k in np.ndindex(heads, blocks, blocks):
        number = 0 if options.get("homo_head") else h // group
        strided = (k + number * max(1, stride // heads) + offset) % stride == 0
        seen = k <= q and (q - k < local_blocks or strided or number >= first_dense)
        cells = module.pattern.blocks
        assert cells[0 if len(cells) == 1 else h, q, k] == seen
    _, mask, _ = get_sparse_attn_mask(
        heads, blocks * 16, 16, local_blocks, stride, head_sliding_offset=offset, device="cpu", **options
    )
    assert (mask.bool().numpy() == module.pattern.blocks).all()


def test_heads_split_over_devices_are_those_of_one():
    undivided, (q, k, v) = local(num_dense_heads=1), qkv()
    shards = [local(num_dense_heads=1, active_head_range=(n, n + 2)) for n in (0, 2)]
    split = [shard(*(x[:, :, n : n + 2] for x in (q, k, v))) for shard, n in zip(shards, (0, 2), strict=True)]
    torch.testing.assert_close(torch.cat(split, 2), undivided(q, k, v))
    same = local(homo_head=True, active_head_range=(1, 3))
    torch.testing.assert_close(same(*(x[:, :, 1:3] for x in (q, k, v))), local(homo_head=True)(q, k, v)[:, :, 1:3])


def test_a_dense_head_is_causal_attention():
    q, k, v = qkv()
    out = local(num_dense_heads=1)(q, k, v)
    torch.testing.assert_close(out[:, :, 3:], flash_attention(*(x[:, :, 3:] for x in (q, k, v)), causal=True))


def test_equal_patterns_are_one_and_others_are_not():
    one, two, other = local(), local(), local(num_dense_heads=1)
    assert one.pattern is two.pattern and one.pattern is not other.pattern


# Properties -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunks_and_decoding_continue_a_prefill(implementation):
    module, (q, k, v) = local(num_kv_heads=2), qkv(B=1, Hkv=2)
    prefill = module(q, k, v)
    with running(implementation):
        chunk = module(q[:, 30:50], k[:, :50], v[:, :50])
        one = module(q[:, 49:50], k[:, :50], v[:, :50])
        cache = module(q[:, 49:50], k, v, seqlens=torch.tensor([50]))
    torch.testing.assert_close(chunk, prefill[:, 30:50], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one, prefill[:, 49:50], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache, prefill[:, 49:50], atol=1e-5, rtol=1e-5)


def test_packed_padded_and_alone_are_the_same():
    module, lengths = local(), [33, 70, 5]
    q, k, v = qkv(B=3)
    separate = [module(*(x[b : b + 1, :n] for x in (q, k, v)))[0] for b, n in enumerate(lengths)]
    right = module(q, k, v, seqlens=torch.tensor(lengths))
    shifted = [torch.stack([x[b].roll(T - n, 0) for b, n in enumerate(lengths)]) for x in (q, k, v)]
    left = module(*shifted, left_paddings=torch.tensor([T - n for n in lengths]))
    packed = [torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x in (q, k, v)]
    cu = torch.tensor([0, *np.cumsum(lengths)])
    packed_out = module(*packed, cu_seqlen_k=cu)
    for b, n in enumerate(lengths):
        for out in (right[b, :n], left[b, T - n :], packed_out[cu[b] : cu[b + 1]]):
            torch.testing.assert_close(out, separate[b], atol=1e-5, rtol=1e-5)
        assert not right[b, n:].any() and not left[b, : T - n].any()
    decoded = module(q[:, 0], k.flatten(0, 1), v.flatten(0, 1), cu_seqlen_k=torch.arange(4) * T)
    assert decoded.shape == (3, H, D)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_in_padding_reaches_nothing(implementation):
    module, lengths = local(heads=2), torch.tensor([33, 40])
    q, k, v = qkv(T=40, H=2)
    results = []
    for poison in (0.0, float("nan")):
        tensors = [x.detach().clone() for x in (q, k, v)]
        for x in tensors:
            x[0, 33:] = poison
        leaves = [x.requires_grad_() for x in tensors]
        with running(implementation):
            out, lse = module(*leaves, seqlens=lengths, return_lse=True)
            weights = torch.cos(torch.arange(out.numel())).reshape(out.shape)
            if poison != 0.0:
                weights[0, 33:] = poison
            out.backward(weights)
        results.append((out, lse, *(x.grad for x in leaves)))
    for clean, poisoned in zip(*results, strict=True):
        torch.testing.assert_close(clean, poisoned, atol=0, rtol=0, equal_nan=False)
    assert not results[1][0][0, 33:].any() and torch.isneginf(results[1][1][0, :, 33:]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_that_is_seen_shows_and_no_other_row_does(implementation):
    module, (q, k, v) = local(heads=2, homo_head=True), qkv(B=1, H=2)
    shown = torch.tensor(module.pattern.blocks[0, :, 20 // BLOCK]).repeat_interleave(BLOCK)[:T]
    seen = shown & (torch.arange(T) >= 20)
    with torch.no_grad(), running(implementation):
        v[0, 20] = float("nan")
        out = module(q, k, v)
    assert torch.equal(out.isnan().all(-1).all(-1)[0], seen) and torch.equal(out.isnan().any(-1).any(-1)[0], seen)


def test_partitions_of_the_keys_combine_with_their_gradients():
    q, k, v = qkv(T=64)
    causal = np.tril(np.ones((4, 4), bool))
    undivided = SparseAttention(16, causal)
    local_keys = SparseAttention(16, causal[:2, :2])
    across = SparseAttention(16, np.ones((2, 2), bool), causal=False)
    newest = q[:, 32:]
    pairs = [
        across(newest, k[:, :32], v[:, :32], return_lse=True),
        local_keys(newest, k[:, 32:], v[:, 32:], return_lse=True),
    ]
    out = combine_attn_partitions(*pairs, hdim=2)
    expected = undivided(q, k, v)[:, 32:]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_a_partition_that_saw_nothing_weighs_nothing():
    out, lse = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(1, 2, 3, requires_grad=True)
    nothing = torch.full((1, 2, 3, 4), float("nan")), torch.full((1, 2, 3), -torch.inf)
    merged = combine_attn_partitions((out, lse), nothing)
    torch.testing.assert_close(merged, out)
    merged.sum().backward()
    assert out.grad.isfinite().all() and lse.grad.isfinite().all()
    assert not combine_attn_partitions(nothing).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("seq_dim", [1, 2])
@pytest.mark.parametrize(("queries", "keys"), [(0, 20), (20, 0), (0, 0)])
@pytest.mark.parametrize("lengths", [False, True])
def test_no_queries_or_no_keys(queries, keys, seq_dim, lengths, implementation):
    """Zeros and lse -inf, whatever the tensors hold, and gradients of zeros."""
    module = local(seq_dim=seq_dim)
    shapes = ((2, queries, H, D), (2, keys, H, D), (2, keys, H, D))
    leaves = [torch.full(shape, torch.nan).transpose(1, seq_dim).requires_grad_() for shape in shapes]
    options = {"seqlens": torch.tensor([0, keys])} if lengths else {}
    with running(implementation):
        out, lse = module(*leaves, return_lse=True, **options)
        (out.sum() + lse.sum()).backward()
    assert out.shape == leaves[0].shape and lse.shape == (2, H, queries)
    assert not out.any() and torch.isneginf(lse).all()
    assert all(x.grad.shape == x.shape and not x.grad.any() for x in leaves)
    packed = [torch.zeros(n, H, D) for n in (queries, keys, keys)]
    cu = {"cu_seqlen_q": [0, 0, queries], "cu_seqlen_k": [0, keys, keys]}
    assert local()(*packed, **cu).shape == (queries, H, D)


# PyTorch's ways ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strided_tensors_are_taken_as_they_are(implementation):
    module = local(heads=2)
    random = torch.Generator().manual_seed(0)
    fused = torch.randn((1, 20, 3, 2, D), generator=random, requires_grad=True)
    with running(implementation):
        q, k, v = fused.unbind(2)
        out = module(q, k, v)
        expected = module(*(x.contiguous() for x in (q, k, v)))
        ours, theirs = (torch.autograd.grad(x.cos().sum(), fused)[0] for x in (out, expected))
    torch.testing.assert_close(out, expected, atol=0, rtol=0)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    expanded = torch.randn((1, T, 1, D), generator=random).expand(2, T, 2, D)
    torch.testing.assert_close(module(expanded, expanded, expanded), module(*[expanded.contiguous()] * 3))


@pytest.mark.parametrize("wanted", range(3))
def test_a_gradient_of_one_input_alone(wanted):
    module = local()
    tensors = qkv()
    every = torch.autograd.grad(module(*tensors).cos().sum(), tensors)
    leaves = [x.detach().requires_grad_(n == wanted) for n, x in enumerate(tensors)]
    module(*leaves).cos().sum().backward()
    assert [x.grad is not None for x in leaves] == [n == wanted for n in range(3)]
    torch.testing.assert_close(leaves[wanted].grad, every[wanted])


def test_lse_alone_has_a_gradient():
    module, (q, k, v) = local(), qkv()
    _, lse = module(q, k, v, return_lse=True)
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    assert dq.abs().sum() > 0 and not dv.any()


def test_a_second_derivative_is_refused():
    module, (q, k, v) = local(), qkv(T=20)
    (dq,) = torch.autograd.grad(module(q, k, v).cos().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_gradients_of_torch_func_work_and_vmap_is_refused():
    module, (q, k, v) = local(), qkv(T=20)
    gradient = torch.func.grad(lambda x: module(x, k, v).cos().sum())(q)
    torch.testing.assert_close(gradient, torch.autograd.grad(module(q, k, v).cos().sum(), q)[0])
    with pytest.raises(RuntimeError, match="does not have vmap support"):
        torch.func.vmap(lambda x: module(x[None], k[:1], v[:1]))(q)


def test_copies_state_and_devices():
    module, (q, k, v) = local(num_dense_heads=1), qkv()
    expected = module(q, k, v)
    assert module.state_dict() == {} and list(module.parameters()) == []
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)]
    for other in (*copies, module.to("cpu").half().eval(), torch.nn.Sequential(module)[0]):
        torch.testing.assert_close(other(q, k, v), expected)
    assert "block_size=16" in repr(module)


def test_modes():
    module, (q, k, v) = local(), qkv()
    with torch.no_grad():
        assert not module(q, k, v).requires_grad
    with torch.inference_mode():
        assert module(q, k, v).shape == q.shape
        assert module(q, k, v, seqlens=torch.tensor([5, 70])).shape == q.shape
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(q, k.bfloat16(), v)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    frozen = [x.detach() for x in (q, k, v)]
    assert not module(*frozen).requires_grad
    torch.utils.checkpoint.checkpoint(module, q, k, v, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_what_it_stands_for(dtype, implementation):
    """Computed in bfloat16, of which every float8 number is one: the answer is that of the converted inputs."""
    module, tensors = local(heads=2), [x.detach() for x in qkv(B=1, T=40, H=2)]
    q, k, v = (x.to(dtype) for x in tensors)
    with running(implementation):
        out = module(q, k, v)
        expected = module(*(x.bfloat16() for x in (q, k, v)))
        mixed = module(tensors[0].half(), k, v)
        expected_mixed = module(tensors[0].half(), k.half(), v.half())
    assert out.dtype == torch.bfloat16 and mixed.dtype == torch.float16
    torch.testing.assert_close(out, expected, atol=0, rtol=0)
    torch.testing.assert_close(mixed, expected_mixed, atol=0, rtol=0)


# Mistakes ---------------------------------------------------------------------------------------------------


def calls(module, *tensors, **options):
    return lambda: module(*tensors, **options)


def bad():
    module = local()
    q, k, v = (x.detach() for x in qkv())
    packed = q[0], k[0], v[0]
    lengths = torch.tensor([70, 70])
    first = {"seq_dim": 3}
    return {
        "no tensor": (TypeError, "k must be a torch.Tensor, got list", calls(module, q, [1], v)),
        "rank": (ValueError, r"q must have 3 or 4 dimensions, got shape \(70, 4\)",
                 calls(module, q[0, :, 0:4, 0], k, v)),
        "ranks": (ValueError, "k .* must have as many dimensions as q", calls(module, q, k[0], v)),
        "float64": (TypeError, "q has dtype torch.float64; supported", calls(module, q.double(), k, v)),
        "integers": (TypeError, "v has dtype torch.int64", calls(module, q, k, v.long())),
        "dtypes": (TypeError, "k has dtype torch.float16, q has torch.float32", calls(module, q, k.half(), v.half())),
        "value dtype": (TypeError, "v has dtype torch.float16, k has", calls(module, q, k, v.half())),
        "device": (ValueError, "k is on meta, q on cpu", calls(module, q, k.to("meta"), v)),
        "batch": (ValueError, "batch sizes of q, k and v differ: 2, 1 and 1", calls(module, q, k[:1], v[:1])),
        "head dim": (ValueError, "head_dim of k, 8, must be that of q: 16", calls(module, q, k[..., :8], v)),
        "value length": (ValueError, r"v must have the length and heads of k", calls(module, q, k, v[:, :9])),
        "heads": (ValueError, "query heads 4 must be a multiple of key heads 3",
                  calls(module, q, k[:, :, :3], v[:, :, :3])),
        "pattern heads": (ValueError, "the pattern has 4 heads; q has 2 and k has 2",
                          calls(module, q[:, :, :2], k[:, :, :2], v[:, :, :2])),
        "too long": (ValueError, "k has length 280; 8 blocks of 16 tokens cover 128", calls(module, *qkv(T=280))),
        "wide": (ValueError, "head dims 300 and 300 must be at most 256", calls(module, *qkv(D=300))),
        "no heads": (ValueError, "q has no heads or no features", calls(module, q[:, :, :0], k, v)),
        "packed": (ValueError, "3 dimensions need cu_seqlen_k", calls(module, *packed)),
        "not packed": (ValueError, "4 dimensions take no cu_seqlen_k", calls(module, q, k, v, cu_seqlen_k=lengths)),
        "queries alone": (ValueError, "cu_seqlen_q needs cu_seqlen_k", calls(module, q, k, v, cu_seqlen_q=lengths)),
        "packed and padded": (ValueError, "packed sequences have no padding",
                              calls(module, *packed, cu_seqlen_k=torch.tensor([0, 70]), seqlens=lengths)),
        "which queries": (ValueError, "cu_seqlen_q is needed: q has 9 tokens, k 70, and there are 1 sequences",
                          calls(module, q[0, :9], k[0], v[0], cu_seqlen_k=torch.tensor([0, 70]))),
        "counts": (ValueError, r"cu_seqlen_q \(3,\) and cu_seqlen_k \(2,\) must have one length",
                   calls(module, *packed, cu_seqlen_k=torch.tensor([0, 70]), cu_seqlen_q=torch.tensor([0, 9, 70]))),
        "order": (ValueError, "cu_seqlen_k must start at 0, never decrease, and end within the 70 tokens .row 2: 5.",
                  calls(module, *packed, cu_seqlen_k=torch.tensor([0, 9, 5]))),
        "past the end": (ValueError, "end within the 70 tokens",
                         calls(module, *packed, cu_seqlen_k=torch.tensor([0, 71]))),
        "long sequences": (ValueError, "be at most 128 apart",
                           calls(module, *(x[0] for x in qkv(T=200)), cu_seqlen_k=torch.tensor([0, 200]))),
        "lengths": (ValueError, r"seqlens must lie within the 70 keys.*row 1: 71",
                    calls(module, q, k, v, seqlens=[70, 71])),
        "left": (ValueError, r"left_paddings must lie in \[0, 70\] .row 0: -1.",
                 calls(module, q, k, v, left_paddings=[-1, 0])),
        "both": (ValueError, "left padding included", calls(module, q, k, v, left_paddings=[9, 9], seqlens=lengths)),
        "length shape": (ValueError, r"seqlens must have shape \(2,\), got \(3,\)",
                         calls(module, q, k, v, seqlens=[1, 2, 3])),
        "length dtype": (TypeError, "seqlens must hold integers", calls(module, q, k, v, seqlens=[1.0, 2.0])),
        "scale": (ValueError, "sm_scale=nan must be finite", calls(module, q, k, v, float("nan"))),
        "float8 gradient": (TypeError, "has no gradient here",
                            calls(module, *(x.to(torch.float8_e5m2).requires_grad_() for x in (q, k, v)))),
        "pattern shape": (ValueError, r"shape \(rows, columns\) or \(heads, rows, columns\), got \(2,\)",
                          lambda: SparseAttention(16, torch.ones(2))),
        "pattern values": (ValueError, "only 0 and 1", lambda: SparseAttention(16, torch.full((2, 2), 2))),
        "block": (ValueError, "block_size=24 must be a power of two", lambda: SparseAttention(24, torch.ones(2, 2))),
        "tile": (ValueError, "block_m=8 must be a power of two from 16",
                 lambda: SparseAttention(16, torch.ones(2, 2), block_m=8)),
        "layout": (ValueError, "seq_dim=3 must be None, 1 or 2",
                   lambda: SparseAttention(16, torch.ones(2, 2), **first)),
        "stride": (ValueError, "vert_stride=0 must be at least 1", lambda: LocalStrideSparseAttention(2, 64, 16, 1, 0)),
        "key heads": (ValueError, "num_heads=4 must be a multiple of num_kv_heads=3", lambda: local(num_kv_heads=3)),
        "dense heads": (ValueError, "num_dense_heads must be at most num_kv_heads=2, got 3",
                        lambda: local(num_kv_heads=2, num_dense_heads=3)),
        "range": (ValueError, r"active_head_range=\(2, 9\) must be heads within \[0, 4\)",
                  lambda: local(active_head_range=(2, 9))),
        "range of groups": (ValueError, "whole groups of 2 heads",
                            lambda: local(num_kv_heads=2, active_head_range=(1, 3))),
        "no pair": (ValueError, "at least one pair", combine_attn_partitions),
        "pair": (ValueError, "pair 0: out", lambda: combine_attn_partitions((q, torch.zeros(2, 70, 4)), hdim=2)),
    }  # fmt: skip


@pytest.mark.parametrize("case", bad())
def test_mistakes(case):
    error, message, call = bad()[case]
    with pytest.raises(error, match=message):
        call()

"""The quick start of seed 004 as printed, with smaller sizes on a CPU."""

import pytest
import torch

# what is smaller: the block size and the shape of the pattern stay in proportion
SIZES = {
    "block_size = 64": "block_size = 16",
    "local_blocks = 32": "local_blocks = 4",
    "vert_stride = 8": "vert_stride = 2",
    "max_seq_len = 8192": "max_seq_len = 128",
    "num_heads = 32": "num_heads = 4",
    "2, 8192, 32, 128": "2, 128, 4, 16",
    '"cuda"': '"cpu"',
}
QUICK_START = """
import torch
from dkernel import SparseAttention, LocalStrideSparseAttention


# 1.) Using local-stride pattern

block_size = 64 # sparse block size, minimum 16
local_blocks = 32 # num local blocks, always attend to up to 64 * 16=1024 token
vert_stride = 8 # attend to 1 block per every 8 blocks after the local window above
max_seq_len = 8192 # model supports up to 8192 seqlen
num_heads = 32
device = "cuda"

q, k, v = [torch.rand(2, 8192, 32, 128, device=device).requires_grad_() for _ in range(3)]

attn = LocalStrideSparseAttention(
                 num_heads,
                 max_seq_len, 
                 block_size, 
                 local_blocks, 
                 vert_stride,
                 seq_dim=1, # q/k/v layout: (batch, seqlen, num_heads, head_dim)
                )
attn.to(device) # optional, attn default to current_device

# This first time, it needs to warmup, so could be slow.
attn(q, k, v)

# Now should be fast
ouput = attn(q, k, v)

# 2.) Using user defined arbitrary pattern

num_blocks = max_seq_len // block_size

# True/1 means attn to the blocks, 0 means not attend to.
block_sparse_pattern = torch.rand((num_heads, num_blocks, num_blocks)) > 0.8

# Ensure the diag blocks are always attended.
# Otherwise, tokens at block_0 have nothing to attend to
for head_sparse_pattern in block_sparse_pattern:
    head_sparse_pattern.diagonal()[:] = True

# Ensure it is causal
block_sparse_pattern *= torch.tril(torch.ones_like(block_sparse_pattern[0]))

# NOTE: You may get warning saying that pattern is not KV cache friendly, due to
# KV cache needed for later tokens are not used in earlier tokens.
# This may result in unexpected larger KV cache.
# So you may need to consider properly design the sparse pattern carefully.

attn = SparseAttention(block_size, block_sparse_pattern, seq_dim=1)
attn.to(device)

# similar, it needs to warmup the first time it runs
output = attn(q, k, v, sm_scale=0.008)
"""  # noqa: W291


def run(program: str) -> dict[str, torch.Tensor]:
    names: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="KV cache cannot drop"):
        exec(compile(program, "seed 004", "exec"), names)
    return names


def check(names: dict[str, torch.Tensor]) -> None:
    """Both outputs against the whole matrix, and a gradient through each."""
    q, k, v = (names[n] for n in "qkv")
    _, T, H, D = q.shape
    block, causal = names["block_size"], torch.ones(T, T, device=q.device).tril().bool()
    heads, at = torch.arange(H, device=q.device)[:, None, None], torch.arange(T, device=q.device) // block
    local = at[:, None] - at < names["local_blocks"]
    strided = (at + heads * max(1, names["vert_stride"] // H)) % names["vert_stride"] == 0
    given_pattern = names["block_sparse_pattern"].to(q.device)[:, at[:, None], at]
    for output, seen, scale in ((names["ouput"], local | strided, D**-0.5), (names["output"], given_pattern, 0.008)):
        logits = scale * torch.einsum("bthd,bshd->bhts", q, k)
        p = torch.softmax(torch.where(seen & causal, logits, -torch.inf), -1)
        expected = torch.einsum("bhts,bshd->bthd", p, v)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        weights = torch.randn_like(output)
        ours, theirs = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (output, expected))
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_quick_start_on_a_cpu():
    program = QUICK_START
    for printed, smaller in SIZES.items():
        assert printed in program
        program = program.replace(printed, smaller)
    check(run(program))


@pytest.mark.gpu
def test_quick_start_on_cuda():
    """At full size, where the whole matrix would not fit: what it gives is compared at smaller ones."""
    names = run(QUICK_START)
    assert names["ouput"].shape == names["output"].shape == (2, 8192, 32, 128)
    assert names["ouput"].isfinite().all() and names["output"].isfinite().all()
    (names["ouput"] + names["output"]).sum().backward()
    assert all(names[n].grad.isfinite().all() for n in "qkv")

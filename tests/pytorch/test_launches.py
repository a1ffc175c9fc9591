"""The launches on CUDA, without a GPU: they compile for one, are made once, and split and pack as they should."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ejkernel.bridge import TARGETS, compile_for
from ejkernel.ops import Target, interpret
from ejkernel.torch import (
    LocalStrideSparseAttention,
    SparseAttention,
    few_queries,
    flash_attention,
    launches,
    prepared_launch,
    programs,
)
from ejkernel.torch.calls import Options
from ejkernel.torch.operation import NO_EXTRAS

H200 = Target("gpu", "nvidia_h200", "sm_90", cores=132)


@pytest.fixture
def recorded(monkeypatch):
    """What would be launched on an H200: nothing runs."""
    launched = []

    def run(step, tensors, compiled, aligned):
        tensors = {**step.fixed, **tensors}
        launch, names = step.described(tensors)
        launched.append((launch, [prepared_launch.struct(tensors[name]) for name in names]))

    monkeypatch.setattr(programs.PreparedLaunch, "run", run)
    for module in (programs, launches):
        monkeypatch.setattr(module, "target_of", lambda device: H200)
    forget()
    with interpret():
        yield launched
    forget()


def forget():
    programs.program_of.cache_clear()
    launches._READY.clear()


def qkv(B, T, S, H, Hkv, D, dtype, grad=True):
    shapes = (B, T, H, D), (B, S, Hkv, D), (B, S, Hkv, D)
    return [torch.zeros(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def local(length, H, block=64, **options):
    return LocalStrideSparseAttention(H, length, block, 4, 4, **options)


def training(dtype, D, block=64, seq_dim=1):
    module = local(512, 4, block, seq_dim=seq_dim, num_kv_heads=2)
    q, k, v = qkv(1, 512, 512, 4, 2, D, dtype)
    if seq_dim == 2:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, lse = module(q, k, v, return_lse=True)
    (out.float().sum() + lse.sum()).backward()


CALLS = {
    "bfloat16-D128": lambda: training(torch.bfloat16, 128),
    "bfloat16-D64-blocks-of-16-heads-first": lambda: training(torch.bfloat16, 64, block=16, seq_dim=2),
    "float32-D128": lambda: training(torch.float32, 128),
    "float8-decode": lambda: local(4096, 8, num_kv_heads=2)(
        *(x.to(torch.float8_e4m3fn) for x in qkv(1, 1, 4096, 8, 2, 128, torch.float32, False)), seqlens=[3000]
    ),
    "packed": lambda: local(512, 4)(
        *(x[0] for x in qkv(1, 512, 512, 4, 4, 128, torch.bfloat16, False)), cu_seqlen_k=[0, 100, 512]
    ),
}


# tests/softmax/test_triton_compile.py has their lists
LATER = ("bfloat16-D128", "float32-D128", "packed")


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=[pytest.mark.cuda_aot_more] * (call in LATER)) for call in CALLS]
)
def test_they_compile_for_hopper_and_fit(call, recorded):
    CALLS[call]()
    kernels = {launch.kernel.__name__ for launch, _ in recorded}
    trained = {"forward_kernel", "row_terms_kernel", "dq_kernel", "dkv_kernel"}
    assert kernels == (trained if "D" in call else {"extents_kernel", "rows_kernel", "forward_kernel"})
    done = set()
    for launch, operands in recorded:
        nan_safe = dict(launch.constexprs)["C"].GUARD
        if (launch.kernel.__name__, nan_safe) in done:
            continue
        done.add((launch.kernel.__name__, nan_safe))
        arguments = [*launch.fill(operands, operands[0]), *launch.outputs]
        report = compile_for(
            "sm_90", launch.kernel, arguments, dict(launch.constexprs), launch.num_warps, launch.num_stages
        )
        assert report.shared_bytes <= TARGETS["sm_90"], report
        # the nan-safe one runs where a fast one left a nan, and may be slow; float32 spills some with any mask, and
        # dk/dv of several query heads 256 bytes, with which it is faster than with tiles that fit
        assert nan_safe or report.spill_bytes <= {"float32-D128": 200, "bfloat16-D128": 256}.get(call, 0), report
        assert not [problem for problem in report.problems if "spills" not in problem], report


@pytest.mark.parametrize("group, splits", [(1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("lengths", [None, [64, 30]])
def test_packed_heads_and_split_keys_change_nothing(group, splits, lengths):
    module = LocalStrideSparseAttention(4, 64, 16, 1, 2, num_kv_heads=4 // group, block_m=16, block_n=16)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((2, n, h, 16), generator=random) for n, h in ((3, 4), (64, 4 // group), (64, 4 // group)))
    expected, expected_lse = module(q, k, v, seqlens=lengths, return_lse=True)
    tensors = (q, k, v, *NO_EXTRAS, *module._padded(q, k, None, lengths))
    options = Options(scale=0.25, hi=0, pattern=module.pattern.key, block_m=16, block_n=16)
    with interpret():
        out, lse = launches.forward(tensors, options, splits=splits)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_splits_fill_the_device_and_no_more():
    assert few_queries.splits_for(1, 8192, 132) == 16  # splits of 512 keys
    assert few_queries.splits_for(1, 1 << 20, 132) == 256
    assert few_queries.splits_for(132, 1 << 20, 132) == 1
    assert few_queries.splits_for(64, 8192, 132) == 4
    assert few_queries.splits_for(1, 8191, 132) == 1  # no equal splits
    assert few_queries.splits_for(1, 8192, 0) == 1


def test_decoding_packs_the_heads_of_a_group_and_splits_a_long_cache(recorded):
    local(8192, 8, num_kv_heads=2)(*qkv(1, 1, 8192, 8, 2, 64, torch.bfloat16, False))
    launch, _ = recorded[0]
    constants = dict(launch.constexprs)["C"]
    assert (constants.H, constants.G, constants.BQ) == (2, 1, 16)
    assert launch.grid == (1, 2 * 16, 1)  # 16 splits of 512 keys


def test_a_length_for_each_sequence_costs_the_host_little(recorded):
    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.append(func)
            return func(*args, **(kwargs or {}))

    module, tensors = local(1024, 8, num_kv_heads=2), qkv(70, 1, 1024, 8, 2, 64, torch.bfloat16, False)
    lengths = torch.full((70,), 1000, dtype=torch.int32)
    module(*tensors, seqlens=lengths)
    recorded.clear()
    operations = []
    with Counted():
        module(*tensors, seqlens=lengths)
    kernels = ["extents_kernel", "rows_kernel", "forward_kernel", "forward_kernel"]
    assert [launch.kernel.__name__ for launch, _ in recorded] == kernels
    assert len(operations) + len(recorded) <= 45  # a few of them check the lengths, which a GPU is not asked to


def test_a_prefill_of_one_sequence_on_few_heads_is_split_too(recorded):
    local(8192, 1)(*qkv(1, 256, 8192, 1, 1, 64, torch.bfloat16, False))
    assert recorded[0][0].grid[1] > 1


def test_no_copy_of_dense_tensors(recorded, monkeypatch):
    seen = []
    run = programs.PreparedLaunch.run

    def noted(step, tensors, *more):
        seen.append(tensors)
        run(step, tensors, *more)

    monkeypatch.setattr(programs.PreparedLaunch, "run", noted)
    for seq_dim in (1, 2):
        q, k, v = qkv(2, 128, 128, 4, 4, 64, torch.bfloat16, False)
        q, k, v = (x if seq_dim == 1 else x.transpose(1, 2).contiguous() for x in (q, k, v))
        local(128, 4, 16, seq_dim=seq_dim)(q, k, v)
        # what a model that keeps heads first has made of (B, T, H, D)
        local(128, 4, 16, seq_dim=3 - seq_dim)(*(x.transpose(1, 2) for x in (q, k, v)))
        for tensors in seen[-4:]:
            assert [tensors[n].data_ptr() for n in ("query", "key", "value")] == [x.data_ptr() for x in (q, k, v)]


def test_what_is_static_is_made_once(recorded):
    module, calls = local(256, 2), qkv(1, 256, 256, 2, 2, 64, torch.bfloat16)
    for _ in range(3):
        module(*calls).sum().backward()
    local(256, 2, homo_head=False)(*calls)  # another layer with the same pattern
    assert programs.program_of.cache_info().misses == 1 and len(launches._READY) == 1


def test_patterns_are_data(recorded):
    """Kernels are compiled for their constants, and these do not depend on what a pattern holds."""
    constants = set()
    for seed in range(3):
        cells = np.tril(np.random.default_rng(seed).random((2, 4, 4)) < 0.5) | np.eye(4, dtype=bool)
        with warnings.catch_warnings(action="ignore"):
            module = SparseAttention(64, cells)
        module(*qkv(1, 256, 256, 2, 2, 64, torch.bfloat16)).sum().backward()
        constants.add(frozenset((launch.kernel.__name__, launch.constexprs) for launch, _ in recorded))
        recorded.clear()
    assert len(constants) == 1


def test_work_is_that_of_the_visited_tiles(recorded):
    """The lists that the kernels loop over have as many entries as a brute-force count of tiles finds."""
    T, H, block = 1024, 16, 64
    module = local(T, H, block)
    module(*qkv(1, T, T, H, H, 64, torch.bfloat16)).sum().backward()
    (program,) = launches._READY.values()
    cells = module.pattern.blocks
    for (tile, side), planned in program.schedules.items():
        wide = cells.repeat(block, 1).repeat(block, 2) & np.tril(np.ones((T, T), bool))
        tiles = wide.reshape(H, T // tile.block_q, tile.block_q, T // tile.block_k, tile.block_k).any((2, 4))
        if planned.order is not None:  # blocks of keys in that order, two in a tile
            blocks = wide.reshape(H, T // tile.block_q, tile.block_q, T // block, block).any((2, 4))
            ordered = np.take_along_axis(blocks, planned.order.numpy()[0, :, None], axis=2)
            tiles = ordered.reshape(H, T // tile.block_q, -1, tile.block_k // block).any(-1)
        counts = tiles.sum(-1 if side == "q" else -2)
        assert (planned.rows[0, :, :, 1].numpy() == counts).all()


def test_blocks_narrower_than_tiles_cost_no_more_than_wide_ones(recorded):
    """Stripes of 16 keys are brought together in tiles of 64: forward and backward visit about as many pairs."""

    def pairs(block):
        launches._READY.clear()
        module = LocalStrideSparseAttention(16, 4096, block, 512 // block, 8)
        module(*qkv(1, 4096, 4096, 16, 16, 128, torch.bfloat16)).sum().backward()
        (program,) = launches._READY.values()
        assert {dict(launch.constexprs)["C"].SUB_BLOCK for launch, _ in recorded} == {None, 16} or block != 16
        recorded.clear()
        visited = {}
        for (tile, side), planned in program.schedules.items():
            width = program.sub_block(tile, side) or tile.block_k
            visited[side] = int(planned.rows[..., 1].sum()) * tile.block_q * (width if side == "q" else tile.block_k)
        return visited

    narrow, wide = pairs(16), pairs(64)
    # a tile of 64 queries sees 48 more local keys
    assert narrow["q"] <= 1.25 * wide["q"] and narrow["k"] <= 1.25 * wide["k"]


def test_more_heads_than_a_grid_has(recorded):
    with pytest.raises(ValueError, match="batch times heads, 65536, must be at most 65535"):
        flash_attention(*qkv(2**14, 1, 1, 4, 4, 1, torch.bfloat16, False))


def test_flash_attention_has_closed_ranges(recorded):
    flash_attention(*qkv(1, 256, 256, 2, 2, 64, torch.bfloat16, False), causal=True)
    assert not dict(recorded[0][0].constexprs)["C"].LISTS


@pytest.mark.parametrize("attend", [local(64, 2, 16), lambda *qkv: flash_attention(*qkv, causal=True)])
def test_a_program_is_not_kept_for_tensors_that_lie_otherwise(attend):
    """Heads first is one way not to be contiguous, a slice of a wider tensor, with gaps between its rows, another."""
    forget()
    heads_first = [torch.randn(1, 2, 64, 16).transpose(1, 2) for _ in range(3)]
    sliced = [torch.randn(1, 64, 2, 32)[..., :16] for _ in range(3)]
    with interpret(), torch.no_grad():
        attend(*heads_first)
        assert len(launches._READY) == 1  # the next like it has it
        torch.testing.assert_close(attend(*sliced), attend(*(x.contiguous() for x in sliced)))

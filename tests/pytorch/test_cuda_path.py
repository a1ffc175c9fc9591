"""The path to CUDA through Triton's own runtime, up to the driver: one that records what it is asked to launch."""

from types import SimpleNamespace

import pytest
import torch

from ejkernel.ops import Target, interpret
from ejkernel.torch import LocalStrideSparseAttention, flash_attention, launches, programs

H200 = Target("gpu", "nvidia_h200", "sm_90", cores=132)


@pytest.fixture
def launched(monkeypatch):
    """(kernel, grid, arguments) of every launch; kernels are compiled for real."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import jit
    from triton.runtime.driver import driver

    recorded = []

    class Launcher:
        def __init__(self, source, metadata):
            self.kernel = source.fn

        def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
            recorded.append((self.kernel.__name__, (x, y, z), dict(zip(self.kernel.arg_names, arguments, strict=True))))

    noting = SimpleNamespace(
        launcher_cls=Launcher,
        utils=SimpleNamespace(
            load_binary=lambda *_: (1, 1, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        ),
        get_current_device=lambda: "none",
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    make = programs.Program.__init__

    def compiled(self, kind):
        make(self, kind)
        self.compiled = True

    monkeypatch.setattr(driver, "_active", noting)
    monkeypatch.setattr(programs.Program, "__init__", compiled)
    for module in (programs, launches):
        monkeypatch.setattr(module, "target_of", lambda device: H200)
    jit_runs = []
    run = jit.JITFunction.run

    def counted(self, *args, **kwargs):
        jit_runs.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(jit.JITFunction, "run", counted)
    forget()
    with interpret():
        yield SimpleNamespace(launches=recorded, jit_runs=jit_runs)
    forget()


def forget():
    programs.program_of.cache_clear()
    launches._READY.clear()


def qkv(T=64, H=2, Hkv=1, D=16, **options):
    heads = (H, Hkv, Hkv)
    return [torch.zeros((1, T, n, D), dtype=torch.bfloat16).requires_grad_(**options) for n in heads]


def test_tensors_reach_the_kernels_and_what_was_compiled_is_launched_again(launched):
    module, (q, k, v) = LocalStrideSparseAttention(2, 64, 16, 1, 2, num_kv_heads=1), qkv()
    kernels = ["forward_kernel"] * 2 + ["row_terms_kernel"] + ["dq_kernel"] * 2 + ["dkv_kernel"] * 2
    for repeated in (False, True):
        out = module(q, k, v)
        out.sum().backward()
        assert [name for name, _, _ in launched.launches] == kernels
        assert launched.jit_runs == ([] if repeated else kernels)
        _, grid, arguments = launched.launches[0]
        assert grid == (1, 2, 1) and arguments["T"] == 64 and arguments["p_q"].data_ptr() == q.data_ptr()
        assert arguments["p_out"].data_ptr() == out.data_ptr() and arguments["C"].G == 2
        launched.launches.clear()
        launched.jit_runs.clear()


@pytest.mark.cuda_aot_more
def test_functions_biases_and_what_has_gradients_reach_the_kernels(launched):
    q, k, v = qkv(T=96, Hkv=2)
    bias, slopes, row = (torch.rand(shape).requires_grad_() for shape in ((1, 2, 96, 96), (2,), (96,)))
    prefix, scheduled = torch.tensor([9]), ["maps_kernel", "rows_kernel"]
    kernels = [*scheduled, *["forward_kernel"] * 2, "row_terms_kernel", *scheduled, *["dq_kernel"] * 2]
    kernels += [*scheduled, *["dkv_kernel"] * 2, "dbias_kernel", *["operand_kernel"] * 2]
    for repeated in (False, True):
        out = flash_attention(
            q, k, v, bias=bias, dropout_prob=0.1, dropout_seed=1,
            mask_mod=lambda b, h, i, j: (i >= j) | (j < prefix[b]),
            score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j) * row[i],
        )  # fmt: skip
        out.sum().backward()
        assert [name for name, _, _ in launched.launches] == kernels
        assert not (repeated and launched.jit_runs)
        launched.launches.clear()
        launched.jit_runs.clear()


def test_memory_that_is_not_aligned_takes_the_long_way(launched):
    """What was compiled for aligned tensors must not be launched on others."""
    module = LocalStrideSparseAttention(2, 64, 16, 1, 2)
    aligned = [x.detach() for x in qkv(Hkv=2)]
    shifted = [torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape) for x in aligned]
    for tensors, by_jit in ((aligned, 2), (shifted, 2), (aligned, 0), (shifted, 2)):
        module(*tensors)
        assert len(launched.jit_runs) == by_jit
        assert launched.launches[-1][2]["p_q"].data_ptr() == tensors[0].data_ptr()
        launched.jit_runs.clear()


def test_a_token_of_float8_and_a_length(launched):
    """Scalars of 1 become constants, and 8-bit pointers other types."""
    module = LocalStrideSparseAttention(2, 64, 16, 1, 2, num_kv_heads=1)
    q, k, v = (x.detach().to(torch.float8_e4m3fn) for x in qkv())
    assert module(q[:, :1], k, v, seqlens=[40]).dtype == torch.bfloat16
    one = LocalStrideSparseAttention(1, 64, 16, 1, 2)
    assert one(q[:, :1, :1].contiguous(), k, v).shape == (1, 1, 1, 16)
    kernels = ["extents_kernel", "rows_kernel", *["forward_kernel"] * 4]
    assert [name for name, _, _ in launched.launches] == kernels

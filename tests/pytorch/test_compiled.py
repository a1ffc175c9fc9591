"""Inside torch.compile: one custom op with shapes, gradients and no graph breaks."""

import pytest
import torch

from ejkernel.torch import LocalStrideSparseAttention, flash_attention
from ejkernel.torch.calls import Options
from ejkernel.torch.inputs import Lengths
from ejkernel.torch.operation import NO_EXTRAS, Extras

NOTHING = (*NO_EXTRAS, *Lengths())
DROPOUT = {"dropout_prob": 0.5, "dropout_seed": 3}
BACKENDS = ["eager", "aot_eager"]


def qkv(B=2, T=40, H=2, D=16):
    random = torch.Generator().manual_seed(0)
    return [torch.randn((B, T, H, D), generator=random).requires_grad_() for _ in range(3)]


def attention(**options):
    return LocalStrideSparseAttention(2, 64, 16, 1, 2, **options)


def samples():
    q, k, v = qkv(T=20)
    module = attention()
    lengths = [torch.zeros(1, 20, dtype=torch.int32)] * 2 + [torch.arange(20, dtype=torch.int32)[None]] * 2
    sinks, bias = (torch.zeros(shape, requires_grad=True) for shape in ((2,), (1, 2, 1, 20)))
    extras = Extras(sinks, bias, dropout_seeds=torch.ones((2, 2), dtype=torch.int32))
    return module, {
        "plain": (q, k, v, *NOTHING, *Options(0.25, hi=0)),
        "pattern": (q, k, v, *NOTHING, *Options(0.25, hi=0, pattern=module.pattern.key)),
        "everything": (q, k, v, *extras, *lengths, *Options(0.25, -9, 0, 5.0, "", 16, 16, 0.2)),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("sample", ["plain", "pattern", "everything"])
def test_the_op_passes_opcheck(sample):
    module, given = samples()
    torch.library.opcheck(torch.ops.ejkernel.attention.default, given[sample])
    del module


def test_both_layouts_have_the_strides_they_promise():
    for seq_dim in (1, 2):
        module, tensors = attention(seq_dim=seq_dim), qkv()
        tensors = [x.detach() if seq_dim == 1 else x.detach().transpose(1, 2).contiguous() for x in tensors]
        out = torch.compile(module, backend="aot_eager", fullgraph=True)(*tensors)
        assert out.stride() == module(*tensors).stride()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["plain", "seqlens", "packed", "flash", "flash-arrays", "lse"])
def test_compiled_is_eager(case, backend):
    torch.compiler.reset()
    module, (q, k, v) = attention(), qkv()
    functions = {
        "plain": lambda q, k, v: module(q * 2, k, v).cos(),
        "seqlens": lambda q, k, v: module(q, k, v, seqlens=torch.tensor([7, 40])).cos(),
        "packed": lambda q, k, v: module(q[0], k[0], v[0], cu_seqlen_k=torch.tensor([0, 10, 40])).cos(),
        "flash": lambda q, k, v: flash_attention(q, k, v, causal=True, softmax_aux=torch.zeros(2)).cos(),
        "flash-arrays": lambda q, k, v: flash_attention(
            q, k, v, bias=q[:, :, :, 0].transpose(1, 2)[..., None], q_segment_ids=torch.arange(40) // 7, **DROPOUT
        ).cos(),
        "lse": lambda q, k, v: sum(x.sum() for x in module(q, k, v, return_lse=True)),
    }
    function = functions[case]
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    expected, actual = function(q, k, v), compiled(q, k, v)
    torch.testing.assert_close(actual, expected)
    ours, theirs = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (actual, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_functions_break_the_graph_and_work():
    torch.compiler.reset()
    q, k, v = qkv()
    slopes = torch.rand(2, requires_grad=True)

    def function(q, k, v, slopes):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + slopes[h] * (kv_idx - q_idx)

        return flash_attention(q, k, v, causal=True, score_mod=score_mod).cos().sum()

    compiled = torch.compile(function, backend="eager")
    leaves = (q, k, v, slopes)
    ours, theirs = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, function))
    torch.testing.assert_close(ours, theirs)


def test_lengths_may_vary_without_compiling_again():
    torch.compiler.reset()
    module, runs = attention(), []

    def backend(graph, inputs):
        runs.append(graph)
        return graph.forward

    compiled = torch.compile(module, backend=backend, dynamic=True, fullgraph=True)
    for T in (20, 33, 48):
        q, k, v = (x.detach() for x in qkv(T=T))
        torch.testing.assert_close(compiled(q, k, v), module(q, k, v))
    assert len(runs) == 1


def test_meta_and_fake_tensors_have_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        module = attention()
    for mode in (FakeTensorMode(), torch.device("meta")):
        with mode:
            q, k, v = (torch.empty(2, 40, 2, 16) for _ in range(3))
            assert module(q, k, v).shape == (2, 40, 2, 16)


def test_a_second_derivative_is_refused():
    module, (q, k, v) = attention(), qkv(T=20)
    key = module.pattern.key
    out, _ = torch.ops.ejkernel.attention(q, k, v, *NOTHING, *Options(0.25, hi=0, pattern=key))
    (dq,) = torch.autograd.grad(out.cos().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.sum().backward()


def test_a_pattern_of_another_process_is_named():
    q, k, v = qkv(T=20)
    with pytest.raises(ValueError, match="block pattern 00 is not known in this process"):
        torch.ops.ejkernel.attention(q, k, v, *NOTHING, *Options(0.25, hi=0, pattern="00"))

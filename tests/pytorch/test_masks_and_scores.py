"""Segments, bounds, biases, slopes, dropout and functions of `ejkernel.torch.flash_attention`, with every gradient."""

import warnings
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, noop_mask, or_masks

import ejkernel.modules
from ejkernel.expressions.evaluation import evaluate, gather
from ejkernel.kernels.softmax.triton import Tile
from ejkernel.ops import interpret
from ejkernel.torch import flash_attention, programs
from ejkernel.torch.functions import TORCH
from ejkernel.torch.tracing import traced
from harness.tensors import IMPLEMENTATIONS, check, placed, running

B, H, Hkv, T, S, D = 2, 2, 1, 40, 48, 16
INDICES = torch.meshgrid(*(torch.arange(n) for n in (B, H, T, S)), indexing="ij")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high))


ARRAYS = {
    "ids": integers(0, 4, B, S).sort(1).values,
    "prefix": torch.tensor([5, 17]),
    "slopes": 2.0 ** -torch.arange(1.0, H + 1),
    "table": drawn(2 * S + 1, H, seed=1),
    "gates": drawn(B, H, S, seed=2).cumsum(-1),
    "cap": torch.tensor(3.0),
}
# of what they read, to functions of indices
MASKS: dict[str, Any] = {
    "causal": lambda x: lambda b, h, i, j: i >= j,
    "window": lambda x: lambda b, h, i, j: (i >= j) & (i - j <= 9),
    "prefix": lambda x: or_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: j < x.prefix[b]),
    "documents": lambda x: lambda b, h, i, j: (x.ids[b, i] == x.ids[b, j]) & (i >= j),
    "dilated": lambda x: and_masks(lambda b, h, i, j: (i >= j) & ((i - j) % 3 == 0), noop_mask),
    "natten": lambda x: lambda b, h, i, j: ((i // 8 - j // 8).abs() <= 1) & (torch.abs(i % 8 - j % 8) <= 2),
    "none": lambda x: noop_mask,
}
SCORES: dict[str, Any] = {
    "alibi": lambda x: lambda s, b, h, i, j: s - x.slopes[h] * abs(i - j),
    "alibi-arithmetic": lambda x: lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / H)),
    "relative": lambda x: lambda s, b, h, i, j: s + x.table[j - i + S, h],
    "soft-cap": lambda x: lambda s, b, h, i, j: x.cap * torch.tanh(s / x.cap),
    "forgetting": lambda x: lambda s, b, h, i, j: s + x.gates[b, h, i] - x.gates[b, h, j],
    "conditional": lambda x: lambda s, b, h, i, j: torch.where(i % 2 == 0, s * 2.0, torch.exp(s * 0.25)),
}
FUNCTIONS = [
    ("causal", "relative"), ("window", "alibi"), ("prefix", "forgetting"), ("documents", "soft-cap"),
    ("dilated", "conditional"), ("natten", "alibi-arithmetic"),
]  # fmt: skip


def qkv(**sizes: int) -> dict[str, torch.Tensor]:
    n = {"B": B, "T": T, "S": S, "H": H, "Hkv": Hkv} | sizes
    shapes = {"query": (n["B"], n["T"], n["H"], D), "key": (n["B"], n["S"], n["Hkv"], D)}
    shapes["value"] = shapes["key"]
    return {name: drawn(*shape, seed=len(name)) for name, shape in shapes.items()}


def cotangents(seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(B, T, H, D, seed=seed), drawn(B, H, T, seed=seed)


def by_definition(query: Any, key: Any, value: Any, seen: Any, scored: Any) -> Any:
    """`scored(logits)` (B, H, T, S) in place of the logits."""
    key_of_head = key.repeat_interleave(H // Hkv, 2)
    x = scored(torch.einsum("bthd,bshd->bhts", query, key_of_head) * D**-0.5)
    x = torch.where(seen, x, -torch.inf)
    some = seen.any(-1)
    x = torch.where(some[..., None], x, 0.0)
    p = torch.where(seen, torch.softmax(x, -1), 0.0)
    out = torch.einsum("bhts,bshd->bthd", p, value.repeat_interleave(H // Hkv, 2))
    return out, torch.where(some, torch.logsumexp(x, -1), -torch.inf)


def check_gradients(implementation: str, more: dict[str, torch.Tensor], options: Any, seen: Any, scored: Any) -> None:
    """`options(**more)` are the arguments, `scored(x, **more)` the logits from those so far."""

    def ours(query: Any, key: Any, value: Any, **more: Any) -> Any:
        return flash_attention(query, key, value, return_lse=True, **options(**more))

    def theirs(query: Any, key: Any, value: Any, **more: Any) -> Any:
        return by_definition(query, key, value, seen.expand(B, H, T, S), lambda x: scored(x, **more))

    with running(implementation):
        check(placed(implementation, ours), theirs, qkv() | more, cotangents())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("mask", "score"), FUNCTIONS)
def test_functions(mask, score, implementation):
    trained = {"relative": "table", "alibi": "slopes", "forgetting": "gates", "soft-cap": "cap"}
    more = {name: ARRAYS[name] for name in {trained.get(score)} if name}
    device = "cuda" if implementation == "cuda" else "cpu"

    def of(device: str, **arrays: Any) -> Any:
        x = SimpleNamespace(**{name: x.to(device) for name, x in ARRAYS.items()} | arrays)
        return MASKS[mask](x), SCORES[score](x)

    check_gradients(
        implementation,
        more,
        lambda **arrays: dict(zip(("mask_mod", "score_mod"), of(device, **arrays), strict=True)),
        of("cpu")[0](*INDICES),
        lambda x, **arrays: of("cpu", **arrays)[1](x, *INDICES),
    )


@pytest.mark.parametrize(("mask", "score"), FUNCTIONS)
def test_the_same_functions_give_flex_attention_the_same(mask, score):
    arrays, tensors = SimpleNamespace(**ARRAYS), qkv()
    mask_mod, score_mod = MASKS[mask](arrays), SCORES[score](arrays)
    moved = (x.transpose(1, 2).contiguous() for x in tensors.values())
    block_mask = create_block_mask(mask_mod, B, H, T, S, device="cpu")
    with warnings.catch_warnings():  # that it is not compiled
        warnings.simplefilter("ignore")
        expected = flex_attention(*moved, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
    actual = flash_attention(**tensors, mask_mod=mask_mod, score_mod=score_mod)
    torch.testing.assert_close(actual, expected.transpose(1, 2), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(B, H, T, S), (H, 1, S), (B, 1, T, 1)], ids=str)
def test_bias(shape, implementation):
    check_gradients(
        implementation,
        {"bias": drawn(*shape)},
        lambda bias: {"bias": bias, "causal": True, "logits_soft_cap": 2.0},
        INDICES[3] <= INDICES[2] + S - T,
        lambda x, bias: 2.0 * torch.tanh((x + bias) / 2.0),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads_before_the_length_with_all_that_has_gradients(implementation):
    """A repeated bias is summed into what it repeats; what is hidden is nan."""
    i, j = INDICES[2:]
    more = {"bias": drawn(1, H, 1, S), "slopes": ARRAYS["slopes"], "row": drawn(T)}

    def ours(query: Any, key: Any, value: Any, bias: Any, slopes: Any, row: Any) -> Any:
        moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
        options = {"bias": bias.expand(B, H, T, S), "alibi_slopes": slopes, "causal": True}
        return flash_attention(*moved, score_mod=lambda s, b, h, i, j: s * row[i], return_lse=True, **options)

    def theirs(query: Any, key: Any, value: Any, bias: Any, slopes: Any, row: Any) -> Any:
        def scored(x: Any) -> Any:
            return (x + bias - slopes[:, None, None] * (i + S - T - j).abs()) * row[:, None]

        return by_definition(query, key, value, j <= i + S - T, scored)

    with running(implementation):
        check(placed(implementation, ours), theirs, qkv() | more, cotangents())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bounds_and_segments(implementation):
    starts, ends, last = integers(-3, 20, B, H, T), integers(10, 60, T), integers(5, 50, B, S)
    q_ids, kv_ids = integers(-1, 2, B, T), integers(-1, 2, 1, S)
    device = "cuda" if implementation == "cuda" else "cpu"
    options = {
        "bounds": (starts.to(device), ends.to(device)),
        "key_bounds": (None, last.to(device)),
        "q_segment_ids": q_ids.to(device),
        "kv_segment_ids": kv_ids[0].to(device),
    }
    b, h, i, j = INDICES
    seen = (j >= starts[b, h, i]) & (j < ends[i]) & (i < last[b, j])
    seen = seen & (q_ids[b, i] == kv_ids[0, j]) & (q_ids[b, i] >= 0)
    assert not seen.any(-1).all()
    check_gradients(implementation, {}, lambda: options, seen, lambda x: x)


def test_hidden_values_reach_nothing():
    tensors = {name: x.requires_grad_() for name, x in qkv().items()}
    table = drawn(T, S).masked_fill(~torch.ones(T, S).tril().bool(), torch.nan).requires_grad_()
    for implementation in ("cpu", "interpreted"):
        with running(implementation):
            out = flash_attention(
                **tensors, mask_mod=MASKS["causal"](None), score_mod=lambda s, b, h, i, j: s + table[i, j]
            )
            gradients = torch.autograd.grad(out.square().sum(), [*tensors.values(), table])
        assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_score_may_hide_all_of_a_row(implementation):
    check_gradients(
        implementation,
        {},
        lambda: {"score_mod": lambda s, b, h, i, j: torch.where(i >= 9, s, -float("inf"))},
        INDICES[2] >= 9,
        lambda x: x,
    )


PACKED = {"cum_seqlens_q": [0, 10, 37], "cum_seqlens_k": [0, 20, 47]}


@pytest.mark.parametrize("implementation", ["cpu", "interpreted"])
@pytest.mark.parametrize("case", ["dropout", "packed", "packed-alike", "packed-segments"])
def test_as_in_jax(case, implementation):
    """The same weights are dropped, and functions and slopes count inside of packed sequences."""
    tensors = qkv() if case == "dropout" else {name: x[0] for name, x in qkv().items()}
    if case == "packed-alike":
        tensors["query"] = drawn(S, H, D)
    arrays = {"alibi_slopes": drawn(2, H).abs(), "bias": drawn(1, H, 1, S)}
    numbers: dict[str, Any] = {"dropout_prob": 0.3, "dropout_seed": 2**32 - 5, "causal": True}
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    if case != "dropout":
        packed = {"cum_seqlens_q": PACKED["cum_seqlens_k"]} if case == "packed-alike" else PACKED
        ours, theirs = ({name: made(x) for name, x in packed.items()} for made in (torch.tensor, jnp.array))
        numbers = {"causal": True}
        ours["score_mod"], theirs["score_fn"] = (lambda s, b, h, i, j: s * 0.5 + (i - 2 * j) * 0.125,) * 2
        ours["mask_mod"], theirs["mask_fn"] = (lambda b, h, i, j: (j - i < 9) & (j % 5 != 3),) * 2
    if case == "packed-segments":
        ids = integers(0, 2, S), integers(0, 2, T)
        ours |= {"q_segment_ids": ids[1], "kv_segment_ids": ids[0]}
        theirs["mask_info"] = ejkernel.types.MaskInfo.from_segments(*(jnp.asarray(x.numpy()) for x in ids[::-1]))
    given = {name: x.numpy() for name, x in (tensors | arrays).items()}
    expected = ejkernel.modules.flash_attention(**{n: jnp.asarray(x) for n, x in given.items()}, **theirs, **numbers)
    with running(implementation):
        actual = flash_attention(**tensors, **arrays, **ours, **numbers)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=3e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_dropout(implementation):
    """By a bias of as many numbers as there are pairs, which says what became of each."""
    tensors = {name: x.double() for name, x in qkv().items()} | {"bias": drawn(B, H, T, S).double()}
    identity = torch.eye(S).expand(B, H, S, S).transpose(1, 2)

    def kept(query: Any, key: Any, bias: Any) -> Any:
        options = {"dropout_prob": 0.4, "dropout_seed": torch.tensor(3), "bias": bias}
        return flash_attention(query, key.repeat_interleave(H // Hkv, 2), identity.to(query), **options) > 0

    single = {name: x.float() for name, x in tensors.items()}
    with running("cpu"):
        mask = kept(*(single[name] for name in ("query", "key", "bias"))).transpose(1, 2)  # (B, H, T, S)

    def ours(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return flash_attention(
            query, key, value, bias=bias, dropout_prob=0.4, dropout_seed=torch.tensor(3), return_lse=True
        )

    def theirs(query: Any, key: Any, value: Any, bias: Any) -> Any:
        _, lse = by_definition(query, key, value, torch.ones(B, H, T, S, dtype=torch.bool), lambda x: x + bias)
        x = torch.einsum("bthd,bshd->bhts", query, key.repeat_interleave(H // Hkv, 2)) * D**-0.5 + bias
        p = torch.softmax(x, -1) * mask / 0.6
        return torch.einsum("bhts,bshd->bthd", p, value.repeat_interleave(H // Hkv, 2)), lse

    with running(implementation):
        check(placed(implementation, ours), theirs, single, cotangents())


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("mask", ["prefix", "documents", "table"])
def test_blocks_that_a_function_hides_are_left_out(mask, side, monkeypatch):
    masks = MASKS | {"table": lambda x: lambda b, h, i, j: x.table[i // 16 + j // 16 * 3, h] > 0.3}
    function = masks[mask](SimpleNamespace(**ARRAYS))
    made = []

    def forward(program: Any, tensors: Any) -> Any:
        made.append(program.schedule(Tile(16, 16, 4, 1), side, tensors, False))
        return tensors["query"], tensors["query"]

    monkeypatch.setattr(programs.Program, "forward", forward)
    with interpret():
        flash_attention(**qkv(), mask_mod=function)
    seen = torch.as_tensor(function(*INDICES)).expand(B, H, T, S)
    tiles = torch.nn.functional.pad(seen, (0, -S % 16, 0, -T % 16)).unflatten(3, (-1, 16)).unflatten(2, (-1, 16))
    some, every = tiles.any(5).any(3), tiles.all(5).all(3)
    if side == "k":
        some, every = some.transpose(2, 3), every.transpose(2, 3)
    ((rows, index, _),) = made
    assert some.any() and not some.all()
    for at in np.ndindex(some.shape[:3]):
        n_every, n_some = rows[at[0] % rows.shape[0], at[1] % rows.shape[1], at[2]].tolist()
        listed = index[at[0] % rows.shape[0], at[1] % rows.shape[1], at[2]].tolist()
        assert listed[:n_every] == every[at].nonzero()[:, 0].tolist()
        assert sorted(listed[:n_some]) == some[at].nonzero()[:, 0].tolist()


def test_new_values_and_equal_functions_make_no_new_program():
    def attend(slopes: torch.Tensor) -> torch.Tensor:
        return flash_attention(**qkv(), score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j))

    with interpret():
        first = attend(ARRAYS["slopes"])
        made = programs.program_of.cache_info().misses
        second = attend(ARRAYS["slopes"] * 2)
    assert programs.program_of.cache_info().misses == made and not torch.equal(first, second)


TENSOR, IDS = drawn(5), ("q_segment_ids", "kv_segment_ids")
WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "dropout without a seed": (ValueError, "dropout_prob=0.1 needs dropout_seed", {"dropout_prob": 0.1}),
    "dropout of everything": (ValueError, "dropout_prob=1.0 must be at least 0", {"dropout_prob": 1.0}),
    "seed": (TypeError, "dropout_seed must be an int", {"dropout_prob": 0.1, "dropout_seed": 0.5}),
    "bias": (ValueError, r"bias \(3, 48\) does not broadcast", {"bias": drawn(3, S)}),
    "bias of ints": (TypeError, "bias must be a tensor of float32", {"bias": torch.ones(1, dtype=torch.int32)}),
    "slopes": (ValueError, r"alibi_slopes \(5,\) must be \(2,\) or \(2, 2\)", {"alibi_slopes": TENSOR}),
    "segments": (
        ValueError,
        r"q_segment_ids must have shape \(2, 40\), got \(2, 48\)",
        dict.fromkeys(IDS, ARRAYS["ids"]),
    ),
    "segments of queries": (ValueError, "give kv_segment_ids", {"q_segment_ids": torch.zeros(T, dtype=torch.int32)}),
    "segments of keys": (ValueError, "kv_segment_ids needs q_segment_ids", {"kv_segment_ids": ARRAYS["ids"]}),
    "float bounds": (TypeError, r"bounds\[1\] must hold integers", {"bounds": (None, torch.zeros(T))}),
    "one bound": (TypeError, r"key_bounds must be a pair \(starts, ends\)", {"key_bounds": ARRAYS["ids"]}),
    "no function": (TypeError, "mask_mod must be a function", {"mask_mod": 3}),
    "a mask of numbers": (TypeError, "mask_mod.* must give a bool", {"mask_mod": lambda b, h, i, j: i - j}),
    "a score of bools": (TypeError, "score_mod.* must give a float", {"score_mod": lambda s, b, h, i, j: s > 0}),
    "if": (TypeError, "say torch.where, & and |", {"mask_mod": lambda b, h, i, j: bool(i > j)}),
    "a row": (ValueError, "computes with a tensor of shape", {"score_mod": lambda s, b, h, i, j: s + TENSOR}),
    "a slice": (ValueError, "needed integers", {"score_mod": lambda s, b, h, i, j: s + ARRAYS["table"][h, :]}),
    "a float index": (ValueError, "needed integers", {"score_mod": lambda s, b, h, i, j: s + TENSOR[s]}),
    "erf": (ValueError, "erf has no counterpart", {"score_mod": lambda s, b, h, i, j: torch.erf(s)}),
    "a method": (AttributeError, "cumsum of a number", {"score_mod": lambda s, b, h, i, j: s.cumsum(0)}),
    "bfloat16": (ValueError, "a cast to torch.bfloat16", {"score_mod": lambda s, b, h, i, j: s.to(torch.bfloat16)}),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input(case):
    error, message, options = WRONG[case]
    with pytest.raises(error, match=message):
        flash_attention(**qkv(), **options)


OPERATIONS: dict[str, Any] = {
    "reflected": lambda s, b, h, i, j: 1.0 - s / 2 + 2.0**-h + np.float32(0.5) * s - 7 // (j + 1) - 9 % (i + 2),
    "divisions": lambda s, b, h, i, j: s + (i - 9) // 4 + (i - 9) % 4 + torch.fmod(i - 9, 4) + (i - j) / 3 + -s // 0.5,
    "rounding": lambda s, b, h, i, j: s + torch.div(i - 9, 4, rounding_mode="trunc") + torch.floor(s) + s % 0.75,
    "powers": lambda s, b, h, i, j: s**2 + torch.pow(s, 3) + s.square() + (i**2).float() * 0.01 + s.exp() ** 0.5,
    "bits": lambda s, b, h, i, j: s + ((i ^ j) & 3) + (i << 1) + (j >> 1) + (~i | j),
    "logic": lambda s, b, h, i, j: torch.where(torch.logical_not(i > j) | torch.logical_and(i, j), s, -s),
    "limits": lambda s, b, h, i, j: s.clamp(-0.5, 0.5) + torch.maximum(s, i * 0.1) + i.clip(max=3) + torch.relu(s),
    "fills": lambda s, b, h, i, j: s.masked_fill(i == j, 2.0) + torch.zeros_like(s) + s.new_ones(()) + s.new_tensor(3),
    "casts": lambda s, b, h, i, j: s.int() + i.to(torch.float32) + (s > 0).long() + s.to(s.dtype) + i.bool().float(),
    "smooth": lambda s, b, h, i, j: s.sigmoid() + torch.log1p(s.abs()) + torch.rsqrt(1 + s * s) + s.reciprocal().sin(),
    "finite": lambda s, b, h, i, j: torch.where(torch.isfinite(s / (i - j)) & ~torch.isnan(s), s, s.detach() * 2),
    "parts": lambda s, b, h, i, j: (
        s + ARRAYS["gates"][b, h, i] + ARRAYS["gates"][-1, 0, j] + ARRAYS["table"][-h - 1, 1]
    ),
}


@pytest.mark.parametrize("case", OPERATIONS)
def test_operations_are_those_of_pytorch(case):
    function, score = OPERATIONS[case], drawn(B, H, T, S)
    rule = traced(function, "score_mod", scores=True, device=torch.device("cpu"))
    indices = [x.int() for x in INDICES]

    def read(node: Any, index: Any) -> Any:
        return gather(rule.arrays[node.data], (0, *index[1:]))

    axes = dict(zip("bhij", indices, strict=True))
    actual = evaluate(rule.expression, axes, score=score, load=read, namespace=TORCH)
    torch.testing.assert_close(actual, function(score, *indices).float(), rtol=1e-5, atol=1e-5)

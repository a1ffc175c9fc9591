"""Any legal combination of options: outputs and every gradient are those of the definition, or a platform says why not.

The cases of each family are chosen by hand; these are drawn, as many as `EJKERNEL_EXAMPLES` says. What trains is
float32: in a narrow dtype the error of a few numbers, to which ours is held, is a matter of luck.
"""

import os
from functools import partial
from itertools import count
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ejkernel.kernels.native_sparse import whole
from ejkernel.kernels.native_sparse.reference import native_sparse
from ejkernel.kernels.pooling import reference as pooling
from ejkernel.kernels.pooling import spec as pooling_spec
from ejkernel.modules import mean_pooling, native_sparse_attention
from harness import PLATFORMS, check, linear, paged, poison, softmax
from harness import native_sparse as selected
from harness.checks import normal

EXAMPLES = int(os.environ.get("EJKERNEL_EXAMPLES", "4"))
XLA = PLATFORMS[0]
DTYPES = st.sampled_from(("float32", "bfloat16", "float16"))
# a smaller example of a failure would be worth less than the minutes that compiling takes
some = settings(max_examples=EXAMPLES, phases=[Phase.generate])
drawn = st.data()


def maybe(data: Any, strategy: Any) -> Any:
    """A value, or None."""
    return data.draw(st.none() | strategy)


def options_of(data: Any, **strategies: Any) -> dict[str, Any]:
    """Some of these options; what is left out has its default."""
    chosen = data.draw(st.sets(st.sampled_from(sorted(strategies))))
    return {name: data.draw(strategies[name]) for name in sorted(chosen)}


def identity() -> str:
    """One of its own, by which harnesses keep what they know of a case."""
    return f"drawn {next(_numbers)}"


_numbers = count(1)


def cumulative(data: Any, total: int) -> tuple[int, ...]:
    """Of packed sequences, of which some may be empty, with padding behind the last."""
    return (0, *sorted(data.draw(st.lists(st.integers(0, total), min_size=1, max_size=5))))


def heads(data: Any) -> dict[str, int]:
    return dict(zip(("H", "Hkv"), data.draw(st.sampled_from(((2, 2), (4, 2), (3, 1)))), strict=True))


windows = st.integers(0, 20) | st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9))
scales = st.sampled_from((0.3, 1.0, -0.5))

# of queries and keys that are the same tokens
SELF_MASKS = (softmax.segments, partial(softmax.segments, padding=5), softmax._unsorted, softmax._segment_positions)
MASKS = (
    softmax._cross, softmax._positions, softmax._kv_lengths, softmax._dense, softmax._pattern, softmax._chunks,
    partial(softmax._dense, letters="1HTS"), partial(softmax._pattern, block=(16, 8), heads=1),
)  # fmt: skip


@some
@given(drawn)
def test_softmax(data):
    T, S = data.draw(st.sampled_from(((48, None), (17, None), (20, 41), (41, 20))))
    options = options_of(
        data, causal=st.booleans(), sliding_window=windows, logits_soft_cap=st.sampled_from((2.0, 30.0)),
        softmax_scale=scales, normalize_output=st.booleans(), dropout_prob=st.just(0.3),
    )  # fmt: skip
    options |= {"dropout_seed": jnp.uint32(5)} if "dropout_prob" in options else {}
    case = softmax.Case(
        identity(),
        T=T,
        S=S,
        D=data.draw(st.sampled_from((8, 24))),
        Dv=maybe(data, st.just(16)),
        bias=data.draw(st.sampled_from(("", "BHTS", "1H1S", "TS", "B11S"))),
        sinks=data.draw(st.sampled_from(("", "H", "H3", "12"))),
        mask=maybe(data, st.sampled_from(MASKS + (SELF_MASKS if S is None else ()))),
        lse=data.draw(st.booleans()),
        options=options,
        **heads(data),
    )
    assert softmax.runs(case, XLA)
    check(
        partial(softmax.call_case, case, XLA),
        partial(softmax.definition, case),
        case.arrays(),
        case.dtype,
        poison=partial(poison.poisoned, case) if poison.hides(case) else None,
        poison_only=True,
    )


@some
@given(drawn)
def test_linear(data):
    T = data.draw(st.sampled_from((1, 17, 65)))
    packed = data.draw(st.booleans())
    case = linear.Case(
        identity(),
        T=T,
        B=1 if packed else 2,
        D=data.draw(st.sampled_from((8, 20))),
        Dv=maybe(data, st.just(12)),
        gates=tuple(sorted(data.draw(st.sets(st.sampled_from(linear.GATES))))),
        decay=data.draw(st.sampled_from(("mild", "strong", "zero"))),
        state=data.draw(st.booleans()),
        final=data.draw(st.booleans()),
        cu=cumulative(data, T) if packed else None,
        options=options_of(data, reverse=st.booleans(), softmax_scale=scales),
    )
    linear.check_case(case, XLA)


@some
@given(drawn)
def test_paged(data):
    kind = data.draw(st.sampled_from(sorted(paged.FUNCTIONS)))
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    counts = [1] * len(counts) if kind in ("decode", "contiguous") else counts[:1] if kind == "prefill" else counts
    counts = counts[:1] * len(counts) if kind == "page" else counts
    lengths = [n + data.draw(st.integers(0, 40)) for n in counts]
    narrow = maybe(data, st.sampled_from(("float8_e4m3fn", "int8")))
    options = options_of(data, softmax_scale=st.just(0.05), logits_soft_cap=st.just(5.0), sliding_window=windows)
    if kind in ("page", "decode"):
        options |= options_of(data, num_splits=st.integers(1, 5))
    if isinstance(options.get("sliding_window"), tuple):  # nothing lies ahead of a newest token
        options["sliding_window"] = (options["sliding_window"][0], None)
    case = paged.Case(
        "drawn",
        lengths=tuple(lengths),
        queries=tuple(counts) if kind == "ragged" else counts[0],
        kind=kind,
        L=data.draw(st.sampled_from((3, 8, 16))),
        D=8,
        Dv=None if kind == "ragged" else maybe(data, st.just(16)),
        dtype=data.draw(DTYPES),
        cache=narrow,
        scales=narrow is not None and kind != "contiguous",
        sinks=maybe(data, st.integers(1, 3)),
        separate=kind == "ragged" and data.draw(st.booleans()),
        options=options,
        **heads(data),
    )
    paged.check_case(case, XLA)


@some
@given(drawn)
def test_selected(data):
    packed = data.draw(st.booleans())
    T = data.draw(st.sampled_from((1, 33)))
    S = None if packed else maybe(data, st.just(50))
    case = selected.Case(
        identity(),
        B=1 if packed else 2,
        T=T,
        S=S,
        D=8,
        Dv=maybe(data, st.just(12)),
        K=data.draw(st.integers(1, 5)),
        block_size=data.draw(st.sampled_from((1, 5, 16))),
        counts=data.draw(st.booleans()),
        sinks=data.draw(st.booleans()),
        lse=data.draw(st.booleans()),
        cu=cumulative(data, T) if packed else None,
        lengths=None if packed or S is None else (33, 50),
        options=options_of(data, softmax_scale=scales),
        **heads(data),
    )
    selected.check_case(case, XLA)


@some
@given(drawn)
def test_native_sparse(data):
    T = data.draw(st.sampled_from((24, 33)))
    gates = data.draw(st.sets(st.sampled_from(("g_cmp", "g_slc", "g_swa")), min_size=1))
    packed = data.draw(st.booleans())
    B, n = 1 if packed else 2, heads(data)
    shapes = {"query": (B, T, n["H"], 8), "key": (B, T, n["Hkv"], 8), "value": (B, T, n["Hkv"], 8)}
    shapes |= dict.fromkeys(sorted(gates), (B, T, n["H"]))
    size = data.draw(st.sampled_from((4, 8)))
    options = {"block_size": size}
    options |= {"block_counts": data.draw(st.integers(3, 9))} if "g_slc" in gates else {}
    options |= {"window_size": 10} if "g_swa" in gates else {}
    options |= {"cu_seqlens": np.asarray(cumulative(data, T), np.int32)} if packed else {}
    options |= options_of(data, softmax_scale=st.sampled_from((0.2, 1.0)))
    check(
        lambda arrays: {"out": native_sparse_attention(**arrays, **options)},
        lambda arrays, dtype: {"out": native_sparse(whole.canonicalise(**arrays, **options), dtype)},
        {name: normal(name, shape) for name, shape in shapes.items()},
    )


@some
@given(drawn)
def test_mean_pooling(data):
    T, packed = data.draw(st.integers(1, 40)), data.draw(st.booleans())
    options: dict[str, Any] = {"chunk_size": data.draw(st.integers(1, 50))}
    options |= {"cu_seqlens": np.asarray((*cumulative(data, T), T), np.int32)} if packed else {}  # at least one row
    dtype = data.draw(DTYPES)
    check(
        lambda arrays: {"out": mean_pooling(**arrays, **options)},
        lambda arrays, dtype: {
            "out": pooling.mean_pooling(pooling_spec.canonicalise(**arrays, **options)).astype(dtype)
        },
        {"x": normal("x", (1 if packed else 2, T, 2, 8), dtype)},
        dtype,
    )

"""The canonical call of softmax attention: every check and every default is here."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel.checks.arrays import (
    INT32_MAX,
    cumulative_lengths,
    float_array,
    float_dtype,
    number_array,
)
from ejkernel.checks.options import flag, number
from ejkernel.expressions.binding import Rule, Sizes, distance, with_indices
from ejkernel.expressions.nodes import FLOAT, INT, TRUE, B, Expression, H, I, apply, cast, load, score
from ejkernel.kernels.common.batch import Batch, folded, folded_broadcast, unfolded
from ejkernel.kernels.common.dropout import head_seeds
from ejkernel.kernels.common.rules import (
    Rules,
    cap_rule,
    composed,
    conjunction,
    mask_rule,
    recognised_cap,
    score_rule,
)
from ejkernel.kernels.common.scale import with_static_scale
from ejkernel.kernels.common.tiles import rounded
from ejkernel.kernels.softmax import rules
from ejkernel.ops import Call, Dims
from ejkernel.types import MaskInfo

ARRAYS = {
    "query": Dims("B T H D", grad=True, broadcasts=False),
    "key": Dims("B S Hkv D", grad=True, broadcasts=False),
    "value": Dims("B S Hkv Dv", grad=True, broadcasts=False),
    "bias": Dims("B H T S", grad=True),
    "sinks": Dims("B H", grad=True, given="softmax_aux"),
    "q_segments": Dims("B T"),
    "kv_segments": Dims("B S"),
    "q_positions": Dims("B T"),
    "kv_positions": Dims("B S"),
    "mask": Dims("B H T S"),
    "pattern": Dims("B H Tb Sb"),
    "dropout_seeds": Dims("B H", broadcasts=False),
    # cumulative lengths of packed sequences, beside the segments and positions made of them: some kernels take these
    "q_offsets": Dims("B N+1"),
    "kv_offsets": Dims("B N+1"),
    # what mask and score functions read
    **rules.ARRAYS,
}

# only with `with_argmax`: each row's sum of exponentials against its largest logit, sinks among both, and its best key
OUTPUTS = {"out": "B T H Dv", "lse": "B H T", "total": "B H T", "argmax": "B H T"}


class Band(NamedTuple):
    """Keep keys with `lo <= key position - query position <= hi`; None is unbounded."""

    lo: int | None = None
    hi: int | None = None

    def __and__(self, other: "Band") -> "Band":  # pyright: ignore[reportIncompatibleMethodOverride]
        los = [x for x in (self.lo, other.lo) if x is not None]
        his = [x for x in (self.hi, other.hi) if x is not None]
        return Band(max(los, default=None), min(his, default=None))


@dataclass(frozen=True)
class Spec:
    """The static facts of a call. Arrays, and so all lengths, are in `Call.arrays`.

    `pattern_by_position` is for `ejkernel.torch`: the blocks of its patterns are counted by position, those of a
    `BlockPattern` by plain index.
    """

    scale: float
    band: Band = Band()
    chunk: int | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    logits_dtype: str = "float32"
    precision: Any = None
    pattern_block: tuple[int, int] | None = None
    pattern_by_position: bool = False
    with_argmax: bool = False
    with_lse: bool = False
    rules: Rules = Rules()


class Indices(NamedTuple):
    """What functions know tokens by, where that is not their index in the row: int32 (1, T) and (1, S).

    Attributes:
        q, k: the indices.
        whole: how many queries and keys the sequence has that the row is a part of, or has in another order; None where
            the indices are those in packed sequences.
    """

    q: jax.Array
    k: jax.Array
    whole: tuple[int, int] | None = None

    def counted(self, rule: Rule) -> Rule:
        """A rule of the sequence, and of arrays of the sequence."""
        return with_indices(rule, self.q, self.k)

    def placed(self, rule: Rule | None) -> Rule | None:
        """A rule of the row, in which arrays are the row's: indices that it computes with are the sequence's."""
        return rule if rule is None or self.whole is None else with_indices(rule, self.q, self.k, of_tokens=True)


class Dimensions(NamedTuple):
    """The sizes of a call, by their letters."""

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int

    @property
    def G(self) -> int:
        return self.H // self.Hkv


def dimensions(call: Call) -> Dimensions:
    B, T, H, D = call["query"].shape
    _, S, Hkv, Dv = call["value"].shape
    return Dimensions(B, T, S, H, Hkv, D, Dv)


def canonicalise(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    softmax_aux: Any = None,
    *,
    mask_info: MaskInfo | None = None,
    softmax_scale: Any = None,
    dropout_prob: float = 0.0,
    dropout_seed: Any = None,
    causal: bool = False,
    sliding_window: Any = None,
    logits_soft_cap: Any = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    return_lse: bool = False,
    mask_fn: Any = None,
    score_fn: Any = None,
    alibi_slopes: Any = None,
    names: Mapping[str, str] = MappingProxyType({}),
    indices: Indices | None = None,
) -> Call:
    """Check everything about a call and bring it to its one canonical form.

    `names` are those that errors use for arguments which the caller knows by another; `indices` are for tokens that are
    a part of a sequence.
    """
    query, key, value, batch, dims = checked_tokens(query, key, value)
    offsets = _packed_offsets(dims, cum_seqlens_q, cum_seqlens_k)
    mask = _combined_mask(dims, mask_info, offsets)
    if offsets and (mask_fn is not None or score_fn is not None):
        indices = _packed_indices(offsets, dims)
    if mask_fn is not None:
        mask &= _function_mask(mask_rule(mask_fn), indices, dims)
    called = dict(zip(_RENAMED, _RENAMED, strict=True)) | {**names}
    query, scale = with_static_scale(called["softmax_scale"], query, softmax_scale)
    arrays: dict[str, Any] = {"query": query, "key": key, "value": value}
    arrays["bias"] = _bias(bias, dims, batch)
    arrays["sinks"] = _sinks(softmax_aux, dims)
    arrays |= _mask_arrays(mask)
    if mask_info is None:  # it may hide keys that the offsets alone would show
        arrays |= {name: None if x is None else x[None] for name, x in offsets.items()}
    dropout = number(called["dropout_prob"], dropout_prob)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{called['dropout_prob']}={dropout_prob} must be at least 0 and below 1")
    if dropout > 0.0:
        if dropout_seed is None:
            raise ValueError(f"{called['dropout_prob']}={dropout} needs {called['dropout_seed']}")
        arrays["dropout_seeds"] = head_seeds(_seed(called["dropout_seed"], dropout_seed), dims.B, dims.H)
    cap, capped = cap_rule(logits_soft_cap)
    away = _distance(mask, dims, indices)
    band, window_rule = _window(sliding_window, away)
    called_score = None if score_fn is None else _counted(score_rule(score_fn), indices)
    scores = composed(called_score, composed(_alibi(alibi_slopes, dims, away, offsets), capped))
    if cap is None and scores is not None and (known := recognised_cap(scores.expression)) is not None:
        cap, scores = known, None
    seen = conjunction(mask.rule, window_rule)
    if indices is not None:
        seen, scores = indices.placed(seen), indices.placed(scores)
    bound, operands = rules.bound_rules(seen, scores, Sizes(dims.B, dims.H, dims.T, dims.S))
    arrays |= operands
    spec = Spec(
        scale=scale,
        band=Band(*mask.band) & Band(None, 0 if flag("causal", causal) else None) & band,
        chunk=mask.chunk,
        soft_cap=cap,
        dropout=dropout,
        logits_dtype="float32" if logits_dtype is None else float_dtype(called["logits_dtype"], logits_dtype).name,
        precision=_precision(precision),
        pattern_block=None if mask.pattern is None else mask.pattern.block_shape,
        with_argmax=not flag("normalize_output", normalize_output),
        with_lse=flag("return_lse", return_lse),
        rules=bound,
    )
    return Call(spec, {name: x for name, x in arrays.items() if x is not None})


# arguments that some public functions call otherwise
_RENAMED = ("dropout_prob", "dropout_seed", "softmax_scale", "logits_dtype")


# q, k, v ----------------------------------------------------------------------------------------------------


_LAYOUT = "the layout is (batch, length, heads, head_dim)"


class Checked(NamedTuple):
    """Queries, keys and values that fit each other, with one batch dimension, and the ones they had."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    batch: Batch
    dims: Dimensions


def checked_tokens(query: Any, key: Any, value: Any) -> Checked:
    query, key, value = float_array("query", query), float_array("key", key), float_array("value", value)
    batch = _check_batch(query, key, value)
    query, key, value = folded(query), folded(key), folded(value)
    return Checked(query, key, value, batch, _check_shapes(query, key, value))


def _check_batch(query: jax.Array, key: jax.Array, value: jax.Array) -> Batch:
    """The leading dimensions, which all three share: none for one sequence, or packed ones."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} must have 4 dimensions, got shape {x.shape}; {_LAYOUT}")
        if x.ndim != query.ndim:
            raise ValueError(f"{name} {x.shape} must have as many dimensions as query {query.shape}; {_LAYOUT}")
    batch = query.shape[:-3]
    if key.shape[:-3] != batch or value.shape[:-3] != batch:
        raise ValueError(f"batch sizes differ: query {query.shape}, key {key.shape}, value {value.shape}; {_LAYOUT}")
    return batch


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> Dimensions:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if 0 in x.shape[2:]:
            raise ValueError(f"{name} has an empty dimension: shape {x.shape}")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, query has {query.dtype}: they must be the same")
    B, T, H, D = query.shape
    _, S, Hkv, _ = key.shape
    if key.shape[3] != D:
        raise ValueError(f"head_dim of key {key.shape} must be that of query {query.shape}: {D}")
    if value.shape[1:3] != (S, Hkv):
        raise ValueError(
            f"value {value.shape} must have the length and heads of key {key.shape}: {(S, Hkv)}; {_LAYOUT}"
        )
    if H % Hkv:
        swapped = f"; {_LAYOUT}: are lengths and heads swapped?" if T and S and 0 in (T % S, S % T) else ""
        raise ValueError(f"query heads {H=} must be a multiple of key heads {Hkv=}{swapped}")
    return Dimensions(B, T, S, H, Hkv, D, value.shape[3])


# Static options ---------------------------------------------------------------------------------------------


def window_band(sliding_window: Any) -> Band:
    """The band of `sliding_window`: None, w for (w, w), or (left, right) where None is unbounded."""
    if sliding_window is None:
        return Band()
    pair = sliding_window if isinstance(sliding_window, tuple | list) else (sliding_window, sliding_window)
    if len(pair) != 2:
        raise ValueError(f"sliding_window={sliding_window!r} must be an int or a pair (left, right)")
    for side in pair:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | np.integer)):
            raise TypeError(f"sliding_window={sliding_window!r} must hold ints or None")
        if side is not None and side < 0:
            raise ValueError(f"sliding_window={sliding_window!r} must not be negative")
    # beyond int32, in which positions are, a side is as good as unbounded
    left, right = (None if side is None or side > INT32_MAX else side for side in pair)
    return Band(None if left is None else -int(left), None if right is None else int(right))


def _precision(precision: Any) -> Any:
    if isinstance(precision, tuple | list) and len(precision) == 2 and precision[0] == precision[1]:
        precision = precision[0]  # of either operand
    if precision is None or isinstance(precision, jax.lax.Precision | jax.lax.DotAlgorithmPreset):
        return precision
    if isinstance(precision, str) and precision in jax.lax.DotAlgorithmPreset.__members__:
        return jax.lax.DotAlgorithmPreset[precision]
    try:
        return jax.lax.Precision(precision)
    except (ValueError, TypeError):  # what cannot be hashed is a TypeError
        known = ", ".join(repr(p.name.lower()) for p in jax.lax.Precision)
        raise ValueError(f"precision={precision!r} is unknown; use None, {known} or a jax.lax.Precision") from None


def _seed(called: str, seed: Any) -> jax.Array:
    if isinstance(seed, int | np.integer):
        return jnp.uint32(int(seed) % 2**32)
    seed = number_array(called, seed)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return _key_bits(seed)
    if seed.shape == (2,) and seed.dtype == jnp.uint32:  # a key of the old kind
        return _key_bits(seed)
    if seed.shape != () or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(f"{called} must be an int, an integer scalar or a key, got {seed.dtype} {seed.shape}")
    return seed.astype(jnp.uint32)


@jax.jit
def _key_bits(key: jax.Array) -> jax.Array:
    return jax.random.bits(key, (), jnp.uint32)


# Functions, and options that are traced ---------------------------------------------------------------------


def _function_mask(rule: Rule, indices: Indices | None, dims: Dimensions) -> MaskInfo:
    """What a function shows of the tokens in the row."""
    plain = MaskInfo(q_len=dims.T, kv_len=dims.S)
    if indices is None:
        return plain.recognised(rule)
    if indices.whole is not None:
        shown = MaskInfo(*indices.whole).recognised(rule)
    elif indices.k is indices.q:  # within a sequence, differences of indices are those in the row
        shown = plain.recognised(rule, differences_alone=True)
    else:
        shown = dataclasses.replace(plain, rule=rule)
    taken: dict[str, Any] = {"q_len": dims.T, "kv_len": dims.S, "rule": shown.rule and indices.counted(shown.rule)}
    if shown.q_ids is not None:
        taken |= {"q_ids": _entries(shown.q_ids, indices.q), "kv_ids": _entries(shown.kv_ids, indices.k)}
    return dataclasses.replace(shown, **taken)


@jax.jit
def _entries(x: jax.Array, index: jax.Array) -> jax.Array:
    """Of each row of x the entries at indices (1, n)."""
    return x[:, index[0]]


def _counted(rule: Rule, indices: Indices | None) -> Rule:
    return rule if indices is None else indices.counted(rule)


def _packed_indices(offsets: dict[str, Any], dims: Dimensions) -> Indices:
    """Those inside each packed sequence."""
    q = token_positions(offsets["q_offsets"], dims.T)
    return Indices(q, q if offsets["kv_offsets"] is None else token_positions(offsets["kv_offsets"], dims.S))


@partial(jax.jit, static_argnums=1)
def token_positions(offsets: jax.Array, length: int) -> jax.Array:
    """Where each token (1, length) stands in its packed sequence; past the last, anything."""
    at = jnp.arange(length, dtype=jnp.int32)
    return (at - offsets[token_sequences(offsets, length)])[None]


def token_sequences(offsets: jax.Array, length: int) -> jax.Array:
    """The packed sequence of each token (length,); of padding, the last."""
    at = jnp.arange(length, dtype=jnp.int32)
    return jnp.clip(jnp.searchsorted(offsets, at, side="right") - 1, 0, offsets.shape[0] - 2)


def _distance(mask: MaskInfo, dims: Dimensions, indices: Indices | None) -> Rule:
    """Of a key from a query, in positions."""
    mask = mask.canonical()
    T, S = (dims.T, dims.S) if indices is None or indices.whole is None else indices.whole
    return distance(mask.q_pos, mask.kv_pos, S - T)


def _alibi(slopes: Any, dims: Dimensions, away: Rule, offsets: dict[str, Any]) -> Rule | None:
    """`-slope * |distance|`, of positions as causality has them."""
    if slopes is None:
        return None
    x = float_array("alibi_slopes", slopes).astype(jnp.float32)
    rows = offsets["q_offsets"].shape[0] - 1 if offsets else dims.B
    if x.shape not in ((dims.H,), (1, dims.H), (rows, dims.H)):
        each = f"({rows}, {dims.H}), by sequence" if offsets else f"(batch, {dims.H})"
        raise ValueError(f"alibi_slopes {x.shape} must be ({dims.H},) or {each}")
    index: tuple[Expression, ...] = (B, H)
    x = x.reshape(-1, dims.H)
    if offsets and x.shape[0] > 1:  # of each query, by its sequence
        x, index = _slopes_of_tokens(x, offsets["q_offsets"], dims.T), (B, H, I)
    return alibi_rule(x, index, away)


def alibi_rule(slopes: Any, index: tuple[Expression, ...], away: Rule) -> Rule:
    """The score rule of slopes at an index, and of how far away a key is."""
    biased = score() - load(len(away.arrays), index, FLOAT) * cast(apply("abs", away.expression), FLOAT)
    return Rule(biased, (*away.arrays, slopes))


@partial(jax.jit, static_argnums=2)
def _slopes_of_tokens(slopes: jax.Array, offsets: jax.Array, length: int) -> jax.Array:
    """(sequences, heads) to (1, heads, length)."""
    return slopes[token_sequences(offsets, length)].T[None]


def _window(sliding_window: Any, away: Rule) -> tuple[Band, Rule | None]:
    """A known window as a band, and a traced one as a rule of the distance of keys."""
    pair = sliding_window if isinstance(sliding_window, tuple | list) else (sliding_window, sliding_window)
    if len(pair) != 2 or not any(isinstance(x, Tracer) for x in pair):
        return window_band(sliding_window), None
    seen, arrays = TRUE, away.arrays
    for x, left in zip(pair, (True, False), strict=True):
        if isinstance(x, Tracer):
            if x.shape != () or not jnp.issubdtype(x.dtype, jnp.integer):
                raise TypeError(f"sliding_window must hold integers, got {x.dtype} of shape {x.shape}")
            width = load(len(arrays), (B,), INT)
            seen &= away.expression >= -width if left else away.expression <= width
            arrays = (*arrays, x.astype(jnp.int32)[None])
    return window_band(tuple(None if isinstance(x, Tracer) else x for x in pair)), Rule(seen, arrays)


# Bias and sinks ---------------------------------------------------------------------------------------------


def _bias(bias: Any, dims: Dimensions, batch: Batch) -> jax.Array | None:
    if bias is None:
        return None
    bias = float_array("bias", bias)
    wanted = (*(batch or (1,)), dims.H, dims.T, dims.S)
    shape = (1,) * (len(wanted) - bias.ndim) + bias.shape
    if len(shape) != len(wanted) or any(n not in (1, m) for n, m in zip(shape, wanted, strict=True)):
        raise ValueError(f"bias {bias.shape} does not broadcast to (batch, heads, q_len, kv_len) = {wanted}")
    return folded_broadcast(bias, batch)


def initial_bias(bias: Any, init_bias: Any, mask_info: Any) -> Any:
    """The bias, or the one `init_bias` makes when there is neither bias nor mask."""
    if bias is not None or mask_info is not None or init_bias is None:
        return bias
    if not callable(init_bias):
        raise TypeError(f"init_bias must be a function, got {type(init_bias).__name__}: {init_bias!r:.80}")
    return init_bias()


def sink_logits(softmax_aux: Any, H: int) -> jax.Array | None:
    """Sinks (H,), (H, n) or, shared by all heads, (1, n), as float32 (H, n)."""
    if softmax_aux is None:
        return None
    sinks = float_array("softmax_aux", softmax_aux).astype(jnp.float32)
    if sinks.ndim == 1 and sinks.shape[0] == H:
        return sinks[:, None]
    if sinks.ndim == 2 and sinks.shape[0] in (1, H) and sinks.shape[1] > 0:
        return jnp.broadcast_to(sinks, (H, sinks.shape[1]))
    raise ValueError(sink_shapes(sinks.shape, H))


def sink_shapes(shape: tuple[int, ...], H: int) -> str:
    """What an error says of sinks that fit neither the heads nor all of them: (n,) could mean either."""
    shared = f"; {shape[0]} sinks that all heads share are (1, {shape[0]})" if len(shape) == 1 and shape[0] else ""
    return f"softmax_aux {shape} must be (heads,), (heads, n) or (1, n) with heads={H}{shared}"


def _sinks(softmax_aux: Any, dims: Dimensions) -> jax.Array | None:
    sinks = sink_logits(softmax_aux, dims.H)
    return None if sinks is None else joined_sinks(sinks)[None]


@jax.jit
def joined_sinks(sinks: jax.Array) -> jax.Array:
    """One logit (H,) for all sinks (H, n) of a head: they only ever meet as a sum of exponentials.

    One of -inf weighs nothing and has no gradient; where all are, that of `logsumexp` would be nan.
    """
    top = jax.lax.stop_gradient(sinks.max(-1))
    base = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.exp(sinks - base[:, None]).sum(-1)
    some = total != 0.0
    return jnp.where(some, base + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)


# Masks ------------------------------------------------------------------------------------------------------


def _packed_offsets(dims: Dimensions, cum_q: Any, cum_k: Any) -> dict[str, jax.Array | None]:
    """The checked offsets of packed sequences; those of the keys are None where they are the queries' own."""
    if cum_q is None and cum_k is not None:
        raise ValueError("cum_seqlens_k needs cum_seqlens_q")
    if cum_q is None:
        return {}
    if dims.B != 1:
        raise ValueError(f"cum_seqlens_q packs sequences into one row; query has batch {dims.B}, needed 1")
    q = cumulative_lengths("cum_seqlens_q", cum_q, dims.T)
    if cum_k is None and dims.S != dims.T:
        raise ValueError(f"keys have {dims.S} tokens and queries {dims.T}: give cum_seqlens_k")
    k = None if cum_k is None or cum_k is cum_q else cumulative_lengths("cum_seqlens_k", cum_k, dims.S)
    if k is not None and k.shape != q.shape:
        raise ValueError(f"cum_seqlens_q {q.shape} and cum_seqlens_k {k.shape} must have the same length")
    return {"q_offsets": q, "kv_offsets": k}


def _combined_mask(dims: Dimensions, mask_info: Any, offsets: dict[str, Any]) -> MaskInfo:
    if mask_info is not None and not isinstance(mask_info, MaskInfo):
        raise TypeError(f"mask_info must be a MaskInfo, got {type(mask_info).__name__}")
    mask = MaskInfo(q_len=dims.T, kv_len=dims.S)
    if offsets:
        mask = MaskInfo.from_cu_seqlens(*offsets.values(), max_q_len=dims.T, max_kv_len=dims.S)
    if mask_info is not None:
        mask_info = mask_info.with_lengths(dims.T, dims.S)
        _check_mask(mask_info, dims)
        mask = mask & mask_info if offsets else mask_info
    return mask


def _check_mask(mask: MaskInfo, dims: Dimensions) -> None:
    B, H = mask.shape[:2]
    matrix = mask.is_self_attention() and B == dims.T != dims.B
    mend = "; a 2-D mask is padding (B, S); give a matrix of queries and keys as mask[None]" if matrix else ""
    if (mask.q_len, mask.kv_len) != (dims.T, dims.S):
        swapped = {mask.q_len, mask.kv_len} & {dims.H, dims.Hkv}
        hint = f"; {_LAYOUT}: are lengths and heads swapped?" if swapped else ""
        raise ValueError(
            f"mask_info is for lengths (q, kv) = {(mask.q_len, mask.kv_len)}, "
            f"query and key have {(dims.T, dims.S)}{mend or hint}"
        )
    if B not in (1, dims.B):
        raise ValueError(f"mask_info has batch {B}, query has {dims.B}{mend}")
    if H not in (1, dims.H):
        raise ValueError(f"mask_info has {H} heads, query has {dims.H}")


def _mask_arrays(mask: MaskInfo) -> dict[str, Any]:
    mask = mask.canonical()
    return {
        "q_segments": mask.q_ids,
        "kv_segments": mask.kv_ids,
        "q_positions": mask.q_pos,
        "kv_positions": mask.kv_pos,
        "mask": mask.dense,
        "pattern": None if mask.pattern is None else _on_device(mask.pattern.blocks),
    }


def _on_device(blocks: Any) -> jax.Array:
    with jax.transfer_guard("allow"):  # a static pattern lies on the host: sending it is meant
        return jnp.asarray(blocks)


# After the kernel -------------------------------------------------------------------------------------------


def finish(call: Call, outputs: dict[str, jax.Array], shape: tuple[int, ...], softmax_aux: Any = None) -> Any:
    """From the canonical outputs to what the caller asked for, whose query has that shape."""
    out, lse = outputs["out"], outputs["lse"]
    if call.spec.with_argmax and call["key"].shape[1]:  # without keys, no weight has a sum
        out = _unnormalised(call.spec, call.arrays, outputs, softmax_aux)
    out = unfolded(out, shape[:-3])
    return (out, unfolded(lse, shape[:-3])) if call.spec.with_lse else out


@partial(jax.jit, static_argnums=0)
def _unnormalised(spec: Spec, arrays: Any, outputs: dict[str, jax.Array], softmax_aux: Any) -> jax.Array:
    """out times its softmax sum of logits minus their row maximum, differentiable through that maximum too.

    The sum is the kernel's own: exp(lse - maximum) would have the roundings of both logits in it. Its gradient is that
    of the exponential.
    """
    call = Call(spec, arrays)
    out, lse = outputs["out"], outputs["lse"]
    top = theirs = _row_maximum(call, outputs["argmax"])
    if (sinks := sink_logits(softmax_aux, dimensions(call).H)) is not None:
        top = jnp.maximum(top, sinks.max(-1)[None, :, None])
        theirs = jnp.maximum(theirs, call["sinks"][..., None])  # a head's sinks are one to the kernel
    seen = ~jnp.isneginf(lse)
    lse, top, theirs = (jnp.where(seen, x, 0.0) for x in (lse, top, theirs))
    value = jax.lax.stop_gradient(outputs["total"] * jnp.exp(theirs - top))
    total = value * jnp.exp((lse - top) - jax.lax.stop_gradient(lse - top))  # (B, H, T)
    return (out.astype(jnp.float32) * total.swapaxes(1, 2)[..., None]).astype(out.dtype)


def _row_maximum(call: Call, argmax: jax.Array) -> jax.Array:
    """The logit (B, H, T) of each row's best key, -inf where it sees none (argmax -1)."""
    dims = dimensions(call)
    at, some = jnp.maximum(argmax, 0), (argmax >= 0)[..., None]
    key = jnp.repeat(call["key"], dims.G, axis=2).swapaxes(1, 2)  # (B, H, S, D)
    # a row that sees nothing has no best key, and what lies there must not reach a gradient
    best = jnp.where(some, jnp.take_along_axis(key, at[..., None], axis=2), 0).astype(jnp.float32)
    query = jnp.where(some, call["query"].swapaxes(1, 2), 0).astype(jnp.float32)
    logits = call.spec.scale * jnp.einsum("bhtd,bhtd->bht", query, best, precision="highest")
    if (bias := call.get("bias")) is not None:
        wide = jnp.broadcast_to(bias, (*bias.shape[:3], dims.S)) if bias.shape[3] == 1 else bias
        wide = jnp.broadcast_to(wide, (dims.B, dims.H, dims.T, dims.S))
        logits += jnp.take_along_axis(wide, at[..., None], axis=3)[..., 0].astype(jnp.float32)
    if call.spec.soft_cap is not None:
        logits = call.spec.soft_cap * jnp.tanh(logits / call.spec.soft_cap)
    if (rule := call.spec.rules.score) is not None:
        rows = jnp.arange(dims.T, dtype=jnp.int32)
        logits = rules.at_keys(call.arrays, at).value(rule, rows, at, logits)
    logits = rounded(logits, call.spec.logits_dtype)
    return jnp.where(argmax >= 0, logits, -jnp.inf)

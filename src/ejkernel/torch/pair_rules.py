"""The rules of a call from what a caller gives of pairs of queries and keys: functions, bounds, slopes."""

from typing import Any, NamedTuple

from torch import Tensor

from ejkernel.expressions.binding import Rule, Sizes, distance, with_indices
from ejkernel.expressions.nodes import INT, B, Expression, H, I, J, load
from ejkernel.kernels.common.rules import composed, conjunction, recognised_cap
from ejkernel.kernels.softmax.spec import Band, alibi_rule
from ejkernel.torch.calls import Options
from ejkernel.torch.functions import bound, without_bands
from ejkernel.torch.inputs import Inputs, limits, packed_lengths
from ejkernel.torch.operation import Extras
from ejkernel.torch.tracing import traced
from ejkernel.types.mask_rules import bounds_rule

Limits = tuple[Tensor | None, Tensor | None]


class Offsets(NamedTuple):
    """Cumulative lengths of packed sequences; the keys' may be the queries'."""

    queries: Tensor
    keys: Tensor


class PairOptions(NamedTuple):
    """The arguments of `flash_attention` that become rules, and the segments of packed tokens."""

    mask_mod: Any
    score_mod: Any
    bounds: Limits | None
    key_bounds: Limits | None
    alibi_slopes: Tensor | None
    segments: tuple[Tensor, Tensor] | None


def with_pair_rules(
    inputs: Inputs, offsets: Offsets | None, pairs: PairOptions, options: Options, extras: Extras
) -> tuple[Options, Extras]:
    """The options and tensors of a call with its rules bound."""
    query, key, *_ = inputs
    (B_, T, H_, _), S, device = query.shape, key.shape[1], query.device
    mask, scores = (
        None if f is None else traced(f, name, scores=of_scores, device=device)
        for f, name, of_scores in ((pairs.mask_mod, "mask_mod", False), (pairs.score_mod, "score_mod", True))
    )
    band, offset = Band(options.lo, options.hi), S - T
    if offsets is not None and offsets.queries is offsets.keys:
        offset = 0
    if offsets is None or offsets.queries is offsets.keys:
        bands, mask = without_bands(mask, offset)
        band &= bands
    if offsets is not None:
        # where tokens stand in their sequences
        q, k = (packed_lengths(x, x, cu, cu).kv_positions for x, cu in zip((query, key), offsets, strict=True))
        mask, scores = (None if rule is None else with_indices(rule, q, k) for rule in (mask, scores))
    rules = [mask, *_bounds(pairs, (B_, H_, T, S), query)]
    if pairs.segments is not None:
        q_id, k_id = load(0, (B, I), INT), load(1, (B, J), INT)
        rules.append(Rule(q_id.equals(k_id) & (q_id >= 0), pairs.segments))
    if pairs.alibi_slopes is not None:
        scores = composed(scores, _alibi(pairs.alibi_slopes, inputs, offsets))
    cap = options.soft_cap
    if cap is None and scores is not None and (cap := recognised_cap(scores.expression)) is not None:
        scores = None
    options = options._replace(lo=band.lo, hi=band.hi, soft_cap=cap)
    if 0 in (B_, T, S):
        return options, extras
    key_, ints, floats = bound(conjunction(*rules), scores, Sizes(B_, H_, T, S), device)
    return options._replace(functions=key_), extras._replace(ints=ints, floats=floats)


def _bounds(pairs: PairOptions, sizes: tuple[int, int, int, int], like: Tensor) -> list[Rule]:
    rules = []
    for name, given, length in (("bounds", pairs.bounds, sizes[2]), ("key_bounds", pairs.key_bounds, sizes[3])):
        if given is None:
            continue
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise TypeError(f"{name} must be a pair (starts, ends), got {type(given).__name__}")
        pair = (limits(f"{name}[{n}]", x, (*sizes[:2], length), like) for n, x in enumerate(given))
        rules.append(bounds_rule(*pair, of_keys=name == "key_bounds"))
    return rules


def _alibi(slopes: Any, inputs: Inputs, offsets: Offsets | None) -> Rule:
    query, key, _, lengths = inputs
    rows, heads = query.shape[0] if offsets is None else len(offsets.queries) - 1, query.shape[2]
    if not isinstance(slopes, Tensor) or not slopes.dtype.is_floating_point:
        raise TypeError(
            f"alibi_slopes must be a tensor of floats, got {getattr(slopes, 'dtype', type(slopes).__name__)}"
        )
    if slopes.device != query.device:
        raise ValueError(f"alibi_slopes is on {slopes.device}, query on {query.device}: they must be on one device")
    if tuple(slopes.shape) not in ((heads,), (1, heads), (rows, heads)):
        raise ValueError(f"alibi_slopes {tuple(slopes.shape)} must be ({heads},) or ({rows}, {heads})")
    index: tuple[Expression, ...] = (B, H)
    x = slopes.float().reshape(-1, heads)
    if offsets is None:
        return alibi_rule(x, index, distance(None, None, key.shape[1] - query.shape[1]))
    if x.shape[0] > 1:  # of each query, by its sequence
        of_tokens: Any = lengths.q_segments
        x, index = x[of_tokens[0].clamp(min=0)].T[None], (B, H, I)
    return alibi_rule(x, index, distance(lengths.q_positions, lengths.kv_positions, 0))

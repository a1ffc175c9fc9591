"""Runs scans in Triton: which segments they are cut into, and what several scans of a call have in common."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear.scans import Scan, ScanResult
from ejkernel.kernels.linear.triton.config import Config
from ejkernel.kernels.linear.triton.launches import (
    ChunkArrays,
    chunk_lengths,
    gate_gradients,
    join_segments,
    scale,
    scan_chunks,
    scan_tokens,
)
from ejkernel.kernels.linear.triton.segments import Segments, segments_of, whole_sequences


class States(NamedTuple):
    """The states (B, rows, H, A, C) before the segments of a scan that adds b^T c, and those at the end of sequences.

    A scan that adds c^T b has the transposes of these. Which scan it is, is known by b and c being the same arrays.
    """

    b: Any
    c: Any
    starts: jax.Array
    final: jax.Array | None

    def transposed(self) -> "States":
        return States(self.c, self.b, self.starts.mT, None if self.final is None else self.final.mT)


class Scaled(NamedTuple):
    """An array times its decays from the middle of each chunk, and the sums of decays before the middle and after it.

    `sources` are the arrays that it is known by, which must live as long.
    """

    x: Any
    before: jax.Array | None = None
    after: jax.Array | None = None
    sources: tuple[Any, ...] = ()


class ScanRunner:
    """Runs scans, and remembers between them what several need.

    Where sequences are cut into segments, a first scan gives the states between them. With decays of every channel,
    arrays are multiplied by those beforehand. Both are known by the arrays they are made of.

    `products` of a scan are kept without their factor: in the scan that takes them as minuend, it is c. With `outer`
    they are relative to the middles of chunks, and factors are as well.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.states: list[States] = []
        # by the identities of array and gates, and whether it is by their inverse
        self.scaled: dict[tuple[int, int, bool], Scaled] = {}
        # by the identity of gates: these, and their powers
        self.powers: dict[int, tuple[jax.Array, jax.Array]] = {}
        self.chunk_lengths: jax.Array | None = None

    def __call__(self, scan: Scan) -> ScanResult:
        if self.config.chunk == 1 and scan.factor is None and not scan.tangent:
            return scan_tokens(scan, self.config)
        arrays, segments, states = self._chunk_arrays(scan), whole_sequences(scan), None
        if scan.tangent:
            _, strict, state, *_ = scan_chunks(scan, self.config, segments, arrays)
            return ScanResult(None, state, None if scan.factor is None else (strict * scan.factor).sum(-1))
        # sums that run across segments need the product of both states there
        others = self._known_states(scan.a, scan.factor) if scan.minuend is not None else None
        if 0 < self.config.segment < scan.a.shape[1] and (scan.minuend is None or others is not None):
            segments, states = segments_of(scan, self.config.segment), self._known_states(scan.b, scan.c)
            if states is None or (scan.with_state and states.final is None):
                states = States(scan.b, scan.c, *join_segments(scan, self.config, segments, arrays))
                self.states.append(states)
        by_segments = scan if states is None else replace(scan, start=states.starts, with_state=False)
        out, strict, state, *_ = scan_chunks(by_segments, self.config, segments, arrays)
        state = state if states is None else states.final
        products = strict
        if scan.minuend is not None:
            known = others is not None and states is not None
            sums_start = _sums_starts(scan, segments, states, others) if known else scan.sums_start
            products = gate_gradients(scan, segments, arrays, strict, sums_start)
        return ScanResult.wanted(scan, out, state, products)

    def _known_states(self, b: Any, c: Any) -> States | None:
        for states in self.states:
            if states.b is b and states.c is c:
                return states
            if states.b is c and states.c is b:
                return states.transposed()
        return None

    def _chunk_arrays(self, scan: Scan) -> ChunkArrays:
        """What a scan needs of its chunks."""
        if scan.inner is None and scan.outer is None:
            return ChunkArrays(scan.a, scan.b, scan.c, scan.factor)
        if self.chunk_lengths is None:
            self.chunk_lengths = chunk_lengths(scan, self.config)
        a, b = self._scaled_pair(scan, scan.inner, scan.a, scan.b)
        factor, c = self._scaled_pair(scan, scan.outer, None if scan.tangent else scan.factor, scan.c)
        halves = [(x.after, x.before) if scan.deferred else (x.before, x.after) for x in (a, c)]
        return ChunkArrays(a.x, b.x, c.x, factor.x, self._power(scan), self.chunk_lengths, *halves[0], *halves[1])

    def _scaled_pair(self, scan: Scan, gates: Any, looking: Any, looked_at: Any) -> tuple[Scaled, Scaled]:
        """What looks back times its decays, and what is looked at times their inverse; with deferred ones, the reverse.

        Both are made in one launch, and what was made before is not again.
        """
        if gates is None:
            return Scaled(looking), Scaled(looked_at)
        pair = (looked_at, looking) if scan.deferred else (looking, looked_at)
        keys = [(id(x), id(gates), inverse) for x, inverse in zip(pair, (False, True), strict=True)]
        missing = [None if key in self.scaled else x for x, key in zip(pair, keys, strict=True)]
        if any(x is not None for x in missing):
            assert self.chunk_lengths is not None
            *scaled, before, after = scale(scan, self.config, *missing, gates, self.chunk_lengths)
            for key, source, x in zip(keys, missing, scaled, strict=True):
                if source is not None:
                    self.scaled[key] = Scaled(x, before, after, (source, gates))
        x, y = (self.scaled.get(key, Scaled(None)) for key in keys)
        return (y, x) if scan.deferred else (x, y)

    def _power(self, scan: Scan) -> jax.Array | None:
        """What outputs are multiplied by, or divided by where decays are deferred."""
        if scan.outer is None or not (scan.with_out or scan.tangent):
            return None
        if id(scan.outer) not in self.powers:
            assert self.chunk_lengths is not None
            power, *_ = scale(scan, self.config, None, None, scan.outer, self.chunk_lengths)
            self.powers[id(scan.outer)] = scan.outer, power
        return self.powers[id(scan.outer)][1]


def _sums_starts(scan: Scan, segments: Segments, states: States, others: States) -> jax.Array:
    """What sums have come to before each segment: the gradient of the state times the state, (B, rows, H, C)."""
    # where this scan begins a segment, the other way has come to the end of it: the start of the next
    other_starts = jnp.roll(others.starts, -1 if scan.descending else 1, 1)
    sums = scan.scale * (states.starts * other_starts).sum(-2 if scan.outer is not None else (-2, -1))
    B = scan.a.shape[0]
    first = jnp.zeros((B, scan.sequences, *sums.shape[2:]), jnp.float32) if scan.sums_start is None else scan.sums_start
    if segments.order is not None:
        sequence = jnp.broadcast_to(jnp.maximum(segments.order[..., 0], 0), (B, segments.rows))
        first = jax.vmap(lambda x, index: x[index])(first, sequence)
    return jnp.where(segments.first.reshape(*segments.first.shape, *(1,) * (sums.ndim - 2)), first, sums)

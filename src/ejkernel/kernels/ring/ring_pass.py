"""A ring pass: keys go from device to device, and each absorbs them into the online softmax of its own queries.

The backward is a pass of the same hops. A key's gradient goes with it, one hop behind, and both are sent while a device
computes; at the end the gradients go home. Nothing of another device is kept for the backward: residuals are a device's
own arrays, its output and its log-sum-exp.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ejkernel.kernels.common.dropout import moved
from ejkernel.kernels.common.online_softmax import (
    OnlineSoftmax,
    merge,
    nothing_seen,
    online_finish,
    state_of,
    with_sinks,
)
from ejkernel.kernels.ring.layout import Hops, Shard, shard_of
from ejkernel.kernels.ring.spec import ARRAYS, Spec, moving
from ejkernel.kernels.softmax.gradients import row_terms, sink_gradient
from ejkernel.kernels.softmax.spec import Band
from ejkernel.ops import Call
from ejkernel.ops.autodiff import backward, default_rules, forward
from ejkernel.ops.operation import Arrays, Plan
from ejkernel.ops.sharding import varying_like

# fewer hops are written out; as many, or more, are a loop
_WRITTEN_OUT = 3


@dataclass(frozen=True)
class Ring:
    """Everything static about a ring pass.

    Attributes:
        spec: the call's.
        axes: of the mesh, that the tokens are split over, on so many `devices`.
        hops: how far keys travel.
        plan: of one device's call on the keys that it has.
        half_plan: with `halves`, of one half of its queries on one half of another's keys.
    """

    spec: Spec
    axes: tuple[str, ...]
    devices: int
    hops: Hops
    halves: bool = False
    plan: Plan | None = None
    half_plan: Plan | None = None

    def device(self) -> jax.Array:
        """The number of this device."""
        return lax.axis_index(self.axes)

    def sent(self, x: Any, distance: int) -> Any:
        """Everything that the device so far below this one has."""
        pairs = [(i, (i + distance) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), x)

    def shard(self, device: Any, length: int) -> Shard:
        return shard_of(self.spec.layout, device, self.devices, length)


class Offsets(NamedTuple):
    """Where tokens that meet begin, among the queries and among the keys on this device."""

    query: Any = 0
    key: Any = 0


class Meeting(NamedTuple):
    """Queries and keys that meet on a hop; those from several offsets on, one after the other along the batch."""

    arrays: Arrays
    offsets: tuple[Offsets, ...] = (Offsets(),)

    def rows(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Of an array with this device's queries along an axis, those that meet."""
        return jnp.concatenate([self.rows_at(x, offsets, axis) for offsets in self.offsets])

    def rows_at(self, x: jax.Array, offsets: Offsets, axis: int = 1) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, offsets.query, self.arrays["query"].shape[1], axis)

    def by_offsets(self, results: Arrays) -> list[tuple[Offsets, Arrays]]:
        """Outputs or gradients of the whole batch, for each of the offsets."""
        split = {name: jnp.split(x, len(self.offsets)) for name, x in results.items()}
        return [(offsets, {name: x[n] for name, x in split.items()}) for n, offsets in enumerate(self.offsets)]


def _trained(arrays: Arrays) -> Arrays:
    """What has gradients that hops make; sinks join the merged sum."""
    return {name: x for name, x in arrays.items() if ARRAYS[name].grad and name != "sinks"}


def meets_in_halves(call: Call) -> bool:
    """Whether causality with zigzag is all that indices decide, but for functions, and hops are to make use of it.

    Then no call needs to compare them. At home the tokens are in order. The chunks of another device lie around those
    of this one, or between them: two of the four pairs of chunks are seen, and whole. Either all queries see its first
    keys, or the last queries see all of its keys.
    """
    spec: Spec = call.spec
    causal = spec.band == Band(None, 0) and spec.chunk is None and not spec.dropout
    by_index = not any(name in call for name in ("q_positions", "bias", "mask"))
    # libtpu would send gradients of keys behind the kernels, not beside them
    wanted = spec.layout == "zigzag" and call.target.backend != "tpu"
    return wanted and causal and by_index and call["query"].shape[1] == call["key"].shape[1]


def indices_decide(spec: Spec) -> bool:
    """Whether it matters which token is which."""
    return spec.band != Band() or spec.chunk is not None


class Hop:
    """The keys of device `source` are on this one; `home` says that they are its own.

    Dropout counts tokens by their index in the sequence, which a seed can only shift: it is done run by run.
    """

    def __init__(self, ring: Ring, arrays: Arrays, keys: Arrays, source: Any, *, home: bool) -> None:
        T, S = arrays["query"].shape[1], keys["key"].shape[1]
        self.queries, self.keys = ring.shard(ring.device(), T), ring.shard(source, S)
        self.dropout, self.halves = ring.spec.dropout > 0, ring.halves and not home
        self.earlier, self.first_column = source < ring.device(), source * S
        self.plan = ring.half_plan if self.halves else ring.plan
        met = {name: x for name, x in arrays.items() if name != "sinks"} | keys
        for name in ("bias", "mask"):
            if name in met and met[name].shape[3] > 1:
                met[name] = lax.dynamic_slice_in_dim(met[name], self.first_column, S, 3)
        if indices_decide(ring.spec) and not ring.halves and "q_positions" not in met:
            met["q_positions"] = (self.queries.index + (S - T) * ring.devices)[None]
            met["kv_positions"] = self.keys.index[None]
        self.arrays = met

    def meeting(self, number: Any) -> Meeting:
        """Everything that meets; with dropout, one run of queries and one of keys."""
        if self.halves:
            last, first = self.queries.length, jnp.int32(0)
            # all queries and its first keys; or the last queries and all its keys
            both = (
                Offsets(jnp.int32(last), first),
                Offsets(jnp.where(self.earlier, first, last), jnp.where(self.earlier, first, last)),
            )
            return Meeting(self._stacked(both), both)
        if not self.dropout:
            return Meeting(self.arrays)
        i, j = number // len(self.keys.starts), number % len(self.keys.starts)
        offsets = Offsets(i * self.queries.length, j * self.keys.length)
        starts = (_start(self.queries, i), _start(self.keys, j))
        seeds = {"dropout_seeds": moved(self.arrays["dropout_seeds"], *starts)}
        return Meeting(self._cut(offsets) | seeds, (offsets,))

    def fold(self, step: Callable[[Any, Meeting], Any], state: Any) -> Any:
        """`step` over all that meets."""
        count = len(self.queries.starts) * len(self.keys.starts) if self.dropout else 1
        if count == 1:
            return step(state, self.meeting(0))
        return lax.fori_loop(0, count, lambda number, state: step(state, self.meeting(number)), state)

    def _stacked(self, several: tuple[Offsets, ...]) -> Arrays:
        """The runs from several offsets on, one after the other along the batch."""
        B = self.arrays["query"].shape[0]
        cuts = [self._cut(offsets) for offsets in several]

        def one(name: str) -> jax.Array:
            return jnp.concatenate([jnp.broadcast_to(cut[name], (B, *cut[name].shape[1:])) for cut in cuts])

        return {name: one(name) for name in self.arrays}

    def _cut(self, offsets: Offsets) -> Arrays:
        runs = {"T": (offsets.query, self.queries.length), "S": (offsets.key, self.keys.length)}

        def one(name: str, x: jax.Array) -> jax.Array:
            for axis, letter in enumerate(ARRAYS[name].axes):
                if letter in runs and x.shape[axis] > 1:
                    x = lax.dynamic_slice_in_dim(x, *runs[letter], axis=axis)
            return x

        return {name: one(name, x) for name, x in self.arrays.items()}


def _start(shard: Shard, run: Any) -> jax.Array:
    return jnp.stack([jnp.asarray(start, jnp.int32) for start in shard.starts])[run]


class Direction(NamedTuple):
    """Hops `first` to `last`, up or down the ring; on hop 0 keys are at home."""

    step: int
    first: int
    last: int

    def loop(self, hop: Any, carry: Any, peel_home: bool) -> Any:
        """hop(carry, h) over all hops. Few are written out, and then the last need send nothing on.

        With `peel_home` hop 0 stands before the loop.
        """
        first = self.first
        if peel_home and first == 0:
            carry, _ = hop(carry, 0, last=self.last == 0)
            first = 1
        if self.last - first >= _WRITTEN_OUT:
            return lax.scan(hop, carry, jnp.arange(first, self.last + 1, dtype=jnp.int32))[0]
        for h in range(first, self.last + 1):
            carry, _ = hop(carry, h, last=h == self.last)
        return carry


def _directions(ring: Ring) -> Iterator[Direction]:
    yield Direction(1, 0, ring.hops.up)
    if ring.hops.down:
        yield Direction(-1, 1, ring.hops.down)


# Forward ----------------------------------------------------------------------------------------------------


def _absorb(state: OnlineSoftmax, hop: Hop) -> OnlineSoftmax:
    """The online softmax (B, t, H) after the keys of this hop."""

    def step(state: OnlineSoftmax, met: Meeting) -> OnlineSoftmax:
        outputs, _ = forward(hop.plan, met.arrays)  # where nothing is visible, its schedule visits nothing
        for offsets, out in met.by_offsets({name: outputs[name] for name in ("out", "lse")}):
            added = state_of(out["out"], out["lse"].swapaxes(1, 2))
            rows = jax.tree.map(lambda x, offsets=offsets: met.rows_at(x, offsets), state)
            both = merge(jax.tree.map(lambda *x: jnp.stack(x), rows, added))
            state = jax.tree.map(
                lambda x, y, first=offsets.query: lax.dynamic_update_slice_in_dim(x, y, first, 1), state, both
            )
        return state

    return hop.fold(step, state)


def _forward_pass(ring: Ring, arrays: Arrays, state: OnlineSoftmax, direction: Direction) -> OnlineSoftmax:
    first = moving(arrays) if direction.first == 0 else ring.sent(moving(arrays), direction.step)

    def hop(
        carry: tuple[Arrays, OnlineSoftmax], h: Any, last: bool = False
    ) -> tuple[tuple[Arrays, OnlineSoftmax], None]:
        keys, state = carry
        sent = keys if last else ring.sent(keys, direction.step)  # while this device computes
        return (sent, _absorb(state, _hop(ring, arrays, keys, direction, h))), None

    carry = varying_like((first, state), (arrays, ring.device()))
    return direction.loop(hop, carry, ring.halves)[1]


def _hop(ring: Ring, arrays: Arrays, keys: Arrays, direction: Direction, h: Any) -> Hop:
    """What meets after h hops in a direction; 0 at home."""
    source = lax.rem(ring.device() - direction.step * h + ring.devices, jnp.int32(ring.devices))
    return Hop(ring, arrays, keys, source, home=isinstance(h, int) and h == 0)


def _outputs(ring: Ring, arrays: Arrays) -> Arrays:
    """Output and log-sum-exp of this device's queries."""
    B, t, H, _ = arrays["query"].shape
    Dv = arrays["value"].shape[3]
    state = nothing_seen((B, t, H), Dv)
    for direction in _directions(ring):
        state = _forward_pass(ring, arrays, state, direction)
    if "sinks" in arrays:
        state = with_sinks(state, arrays["sinks"][:, None])
    out, lse = online_finish(state)
    return {"out": out.astype(arrays["query"].dtype), "lse": lse.swapaxes(1, 2)}


# Backward ---------------------------------------------------------------------------------------------------


class _Saved(NamedTuple):
    """What a backward reads on every hop."""

    residuals: Arrays
    cotangents: Arrays


def _zeros(arrays: Arrays) -> Arrays:
    return {name: jnp.zeros(x.shape, jnp.float32) for name, x in arrays.items()}


def _hop_gradients(ring: Ring, arrays: Arrays, saved: _Saved, staying: Arrays, hop: Hop):
    """The gradients of what stays, grown by this hop, and those of what came with the keys of this hop."""
    assert hop.plan is not None
    plan = hop.plan.gradient or hop.plan

    def step(sums: Arrays, met: Meeting) -> Arrays:
        residuals, cotangents = ({"out": met.rows(x["out"]), "lse": met.rows(x["lse"], 2)} for x in saved)
        if not ring.spec.with_lse:
            cotangents = {"out": cotangents["out"]}
        gradients = backward(plan, met.arrays, residuals, cotangents)
        for offsets, added in met.by_offsets(gradients):
            sums = {name: _grown(name, x, added[name], offsets, hop.first_column) for name, x in sums.items()}
        return sums

    zeros = varying_like(_zeros(moving(_trained(arrays))), (arrays, ring.device()))
    sums = hop.fold(step, staying | zeros)
    return {name: sums[name] for name in staying}, {name: sums[name] for name in zeros}


def _grown(name: str, total: jax.Array, more: jax.Array, offsets: Offsets, first_column: Any) -> jax.Array:
    """A gradient with that of some queries and keys added, where they are in it."""
    more = more.astype(jnp.float32)
    if more.shape[0] > total.shape[0]:  # of what had been broadcast along the batch
        more = more.sum(0, keepdims=True)
    begins = {"T": offsets.query, "S": offsets.key, "C": first_column + offsets.key}
    letters = zip(ARRAYS[name].axes, total.shape, strict=True)
    at = tuple(jnp.int32(begins.get(letter, 0) if size > 1 else 0) for letter, size in letters)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, more.shape) + more, at)


def _backward_pass(ring: Ring, arrays: Arrays, saved: _Saved, staying: Arrays, direction: Direction):
    """The gradients of what stays, and of what goes with this device's keys from all who met them in this direction."""
    first = moving(arrays) if direction.first == 0 else ring.sent(moving(arrays), direction.step)

    def hop(carry: tuple[Arrays, Arrays, Arrays], h: Any, last: bool = False):
        keys, travelling, staying = carry
        # both are sent while this device computes: gradients come one hop behind their keys
        sent = keys if last else ring.sent(keys, direction.step)
        nothing_yet = isinstance(h, int) and h == direction.first
        arrived = travelling if nothing_yet else ring.sent(travelling, direction.step)
        staying, gradients = _hop_gradients(ring, arrays, saved, staying, _hop(ring, arrays, keys, direction, h))
        return (sent, {n: arrived[n] + x for n, x in gradients.items()}, staying), None

    start = (first, _zeros(moving(_trained(arrays))), staying)
    _, travelling, staying = direction.loop(hop, varying_like(start, (arrays, ring.device())), ring.halves)
    return staying, ring.sent(travelling, -direction.step * direction.last)


def _gradients(ring: Ring, arrays: Arrays, residuals: Arrays, cotangents: Arrays) -> tuple[Any]:
    for plan in (ring.plan, ring.half_plan):
        if plan is not None and plan.no_gradient is not None:
            raise NotImplementedError(f"ring_attention cannot be differentiated: {plan.no_gradient}")
    saved = _Saved(residuals, cotangents)
    trained = _trained(arrays)
    staying, gradients = _zeros({n: x for n, x in trained.items() if n not in moving(trained)}), {}
    for direction in _directions(ring):
        staying, more = _backward_pass(ring, arrays, saved, staying, direction)
        gradients = {name: gradients[name] + x if name in gradients else x for name, x in more.items()}
    gradients = gradients | staying
    if "sinks" in arrays:
        gradients |= sink_gradient(Call(ring.spec, arrays), *row_terms(residuals, cotangents))
    return ({n: gradients[n].astype(x.dtype) if n in gradients else None for n, x in arrays.items()},)


# Both -------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, arrays: Arrays) -> Arrays:
    with default_rules():
        return _named(_outputs(ring, arrays))


def _named(arrays: Arrays) -> Arrays:
    """Under the names that every operation's outputs have for a policy of jax.checkpoint."""
    return {name: checkpoint_name(x, f"ejkernel_{name}") for name, x in arrays.items()}


def _attend_fwd(ring: Ring, arrays: Arrays) -> tuple[Arrays, tuple[Arrays, Arrays]]:
    with default_rules():
        outputs = _named(_outputs(ring, arrays))
    return outputs, (arrays, outputs)


def _attend_bwd(ring: Ring, saved: tuple[Arrays, Arrays], cotangents: Arrays) -> tuple[Any]:
    with default_rules():
        return _gradients(ring, *saved, cotangents)


_attend.defvjp(_attend_fwd, _attend_bwd)


# outside jit, a shard_map would do one primitive after the other
@partial(jax.jit, static_argnums=0)
def ring_pass(ring: Ring, arrays: Arrays) -> Arrays:
    """Attention of this device's queries to the keys of all devices along the ring's axes."""
    return _attend(ring, varying_like(arrays, (arrays, ring.device())))

"""Linear attention, and all of its gradients, as walks: one mechanism, which each platform has one kernel for.

A walk goes along the tokens of every sequence and keeps a state h (A, C):

    early:  h <- decay_i(h);  h <- h + b_i^T c_i;  out_i = scale * a_i h
    late:   h <- h + b_i^T c_i;  out_i = scale * a_i h;  h <- decay_i(h)

so that out_i = scale * (sum over j up to i of w_ij (a_i . b_j) c_j), where w_ij are the decays between j and i. Then

    out    = walk(query, key, value)          dquery = walk(dout, value, key)
    dvalue = walk back(key, query, dout)      dkey   = walk back(value, dout, query)

where a walk back goes the other way and is late. The decays of the channels of a and b are called `inner`, those of
the channels of c and out `outer`: `gk` and `gv` by turns.

The gradient of a log decay is that of the state times the state, and needs neither. With `gk`, for every channel:

    dgk_t = dgk_{t+1} + query_t * dquery_t - key_t * dkey_t

and for `gv` the same of out, dout, value and dvalue; the sum over channels is that of `g`. What a token gives itself
is the same in both products and left out of them: strong decays leave little else, which rounding would hide.

The gradient of `g_gamma` is the sum of those of all tokens, but not computed as that: each of them is a sum over all
later tokens, and their roundings would add up once more. It is that of the output times the output of an `aged` walk:
a derivative by what every decay has once multiplies each weight by the number of its decays.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays


@dataclass(frozen=True, eq=False)
class Walk:
    """What a platform's kernel is asked for. Sequences are packed if `cu_seqlens` is given, else N is 1.

    Attributes:
        a, b: (B, T, H, A).
        c: (B, T, H, C).
        g: log decays (B, T, H).
        g_gamma: log decays (B or 1, H) of every token.
        inner: log decays (B, T, H, A).
        outer: log decays (B, T, H, C).
        start: the state at the beginning (B, N, H, A, C), float32; zero if None.
        cu_seqlens: (B or 1, N + 1).
        scale: of the output.
        descending: whether it goes from the last token to the first.
        late: whether a token decays the state after it was added and read.
        aged: whether every weight, those of the state too, is multiplied by the number of decays in it. `start` has had
            none. Of an early walk, without `balance`.
        with_out: whether the output is wanted.
        with_state: whether the final state is.
        factor: (B, T, H, C): `products` are wanted, of the output without the token's own part and this, float32;
            with `outer` of every channel (B, T, H, C), else their sum over the channels (B, T, H).
        balance: products of another walk; then the result is instead the sum along this walk of those minus its own,
            float32 or, with `outer`, perhaps in its dtype: it is the gradient of that.
        sums_start: what that sum starts with, (B, N, H, C) or (B, N, H); zero if None.
    """

    a: jax.Array
    b: jax.Array
    c: jax.Array
    g: jax.Array | None = None
    g_gamma: jax.Array | None = None
    inner: jax.Array | None = None
    outer: jax.Array | None = None
    start: jax.Array | None = None
    cu_seqlens: jax.Array | None = None
    scale: float = 1.0
    descending: bool = False
    late: bool = False
    aged: bool = False
    with_out: bool = True
    with_state: bool = False
    factor: jax.Array | None = None
    balance: jax.Array | None = None
    sums_start: jax.Array | None = None


class Walked(NamedTuple):
    """What came of a walk: `out` (B, T, H, C) in the dtype of c, `state` (B, N, H, A, C) float32, `products`.

    Padding behind the last packed sequence is zero in all. What was not wanted is None.
    """

    out: jax.Array | None
    state: jax.Array | None
    products: jax.Array | None


Walker = Callable[[Walk], Walked]


def forward_walk(call: Call) -> Walk:
    """The walk that gives the output and the final state."""
    return Walk(
        call["query"],
        call["key"],
        call["value"],
        call.get("g"),
        call.get("g_gamma"),
        call.get("gk"),
        call.get("gv"),
        call.get("initial_state"),
        call.get("cu_seqlens"),
        scale=call.spec.scale,
        descending=call.spec.reverse,
        with_out=call.spec.with_out,
        with_state=call.spec.with_state,
    )


def _taken(walk: Walker, w: Walk) -> Walked:
    """What comes of a walk; where there are no tokens, no platform is asked."""
    if w.a.shape[1] > 0:
        return walk(w)
    B, _, H, A = w.a.shape
    N = 1 if w.cu_seqlens is None else w.cu_seqlens.shape[1] - 1
    start = jnp.zeros((B, N, H, A, w.c.shape[3]), jnp.float32) if w.start is None or w.aged else w.start
    products = jnp.zeros(w.c.shape if w.outer is not None else w.c.shape[:3], jnp.float32)
    return Walked(
        w.c if w.with_out else None, start if w.with_state else None, products if w.factor is not None else None
    )


def forward(call: Call, walk: Walker) -> tuple[Arrays, Arrays]:
    """Outputs and residuals of a call: inputs, and the final state where it is an output."""
    walked = _taken(walk, forward_walk(call))
    outputs = {"out": walked.out, "state": walked.state}
    outputs = {name: x for name, x in outputs.items() if x is not None}
    return outputs, {name: x for name, x in outputs.items() if name == "state"}


def backward(call: Call, residuals: Arrays, cotangents: Arrays, walk: Walker) -> Arrays:
    """Every gradient; walks for those that nobody uses are left out by the compiler."""
    walk = partial(_taken, walk)
    ahead = forward_walk(call)
    dout, dstate = cotangents.get("out"), cotangents.get("state")
    end = sums_start = None
    if dstate is not None:
        # an output is scaled, a state is not: walks back keep a gradient of the state without the scale
        end = dstate.astype(jnp.float32) / call.spec.scale
        sums_start = dstate.astype(jnp.float32) * residuals["state"]
    back = replace(ahead, descending=not ahead.descending, late=True, start=end, with_out=True, with_state=False)
    # the decays of all channels of a head: from the side of the values only where their own are wanted anyway
    by_value = "gv" in call
    by_key = "gk" in call or ("g" in call and not by_value)
    found = _of_value(call, walk, ahead, back, dout, sums_start, by_value)
    found |= _of_query_and_key(walk, ahead, back, dout, sums_start, by_key)
    if "g" in call:
        gates = found["gk" if by_key else "gv"]
        found["g"] = gates.sum(-1, dtype=jnp.float32) if gates.ndim == 4 else gates
    if "g_gamma" in call and not call.spec.constant_gamma:
        found["g_gamma"] = _of_gamma(call, walk, ahead, dout, dstate)
    return {name: x.astype(call[name].dtype) for name, x in found.items() if name in call}


def _of_query_and_key(
    walk: Walker, ahead: Walk, back: Walk, dout: jax.Array | None, sums_start: jax.Array | None, gates: bool
) -> Arrays:
    """Their gradients; with `gates`, `gk` is that of the key channels' decays, or their sum where they have none."""
    q, k, v, inner, outer = ahead.a, ahead.b, ahead.c, ahead.outer, ahead.inner
    across = replace(ahead, a=dout, b=v, c=k, inner=inner, outer=outer, start=_transposed(ahead.start))
    across = replace(across, with_out=True, with_state=False, factor=q if gates else None)
    balance, found = None, {}
    if dout is None:
        found["query"], dout = jnp.zeros_like(q), jnp.zeros_like(v)
        balance = jnp.zeros(k.shape if outer is not None else k.shape[:3], jnp.float32) if gates else None
    else:
        found["query"], _, balance = walk(across)
    back = replace(back, a=v, b=dout, c=q, inner=inner, outer=outer, start=_transposed(back.start))
    if gates:
        sums_start = None if sums_start is None else sums_start.sum(-1 if outer is not None else (-2, -1))
        back = replace(back, factor=k, balance=balance, sums_start=sums_start)
    found["key"], _, found["gk"] = walk(back)
    return {name: x for name, x in found.items() if x is not None}


def _of_value(
    call: Call, walk: Walker, ahead: Walk, back: Walk, dout: jax.Array | None, sums_start: jax.Array | None, gates: bool
) -> Arrays:
    """The gradients of the values and the initial state; with `gates`, of the value channels' decays too."""
    q, k, v = ahead.a, ahead.b, ahead.c
    if gates:
        sums_start = None if sums_start is None else sums_start.sum(-2)
        nothing = jnp.zeros(v.shape, jnp.float32)
        balance = nothing if dout is None else walk(replace(ahead, with_out=False, factor=dout)).products
        back = replace(back, factor=v, balance=balance, sums_start=sums_start)
    back = replace(back, a=k, b=q, c=jnp.zeros_like(v) if dout is None else dout)
    dv, dstate, dgv = walk(replace(back, with_state="initial_state" in call))
    dstate = None if dstate is None else dstate * call.spec.scale
    found = {"value": dv, "initial_state": dstate, "gv": dgv}
    return {name: x for name, x in found.items() if x is not None}


def _transposed(state: jax.Array | None) -> jax.Array | None:
    return None if state is None else state.mT


def _of_gamma(call: Call, walk: Walker, ahead: Walk, dout: jax.Array | None, dstate: jax.Array | None) -> jax.Array:
    """The gradient (B or 1, H) of the decays that all tokens have."""
    aged = replace(ahead, aged=True, with_out=False, with_state=dstate is not None, factor=dout)
    _, state, products = walk(aged)
    found = jnp.zeros((1, 1), jnp.float32)
    if products is not None:
        found = found + products.sum((1, 3) if products.ndim == 4 else 1)
    if state is not None and dstate is not None:
        found = found + (state * dstate).sum((1, 3, 4))
    return found.sum(0, keepdims=True) if call["g_gamma"].shape[0] == 1 else found

"""Linear attention, and all of its gradients, as scans: one mechanism, for which each platform has one kernel.

A scan goes along the tokens of every sequence and keeps a state h (A, C):

    h <- decay_i(h);  h <- h + b_i^T c_i;  out_i = scale * a_i h
    h <- h + b_i^T c_i;  out_i = scale * a_i h;  h <- decay_i(h)        with deferred decays

so that out_i = scale * (sum over j up to i of w_ij (a_i . b_j) c_j), where w_ij are the decays between j and i. Then

    out    = scan(query, key, value)             dquery = scan(dout, value, key)
    dvalue = reverse scan(key, query, dout)      dkey   = reverse scan(value, dout, query)

where a reverse scan goes the other way, with deferred decays. The decays of the channels of a and b are called `inner`,
those of the channels of c and out `outer`: one of them is `gk`, the other `gv`.

The gradient of a log decay is that of the state times the state, and needs neither. With `gk`, for every channel:

    dgk_t = dgk_{t+1} + query_t * dquery_t - key_t * dkey_t

and for `gv` the same of out, dout, value and dvalue; the sum over channels is that of `g`. What a token gives itself
is the same in both products and left out of them: strong decays leave little else, which rounding would hide.

The gradient of `g_gamma` is the sum of those of all tokens, but not computed as that: each of them is a sum over all
later tokens, and their roundings would add up once more. It is that of the output times the output of a tangent scan:
the derivative by a number that is added to all log decays multiplies each weight by the number of its decays.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays


@dataclass(frozen=True, eq=False)
class Scan:
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
        deferred: whether a token decays the state after it was added and read, not before.
        tangent: whether every weight, those of the state too, is multiplied by the number of decays in it. `start` has
            had none. Not with deferred decays, nor with `minuend`.
        with_out: whether the output is wanted.
        with_state: whether the final state is.
        factor: (B, T, H, C): `products` are wanted, of this and the output without what a token gives itself, float32;
            with `outer` of every channel (B, T, H, C), else their sum over the channels (B, T, H).
        minuend: products of another scan; then the result is instead the sum along this scan of those minus this one's
            products, float32 or, with `outer`, perhaps in its dtype: it is the gradient of that.
        sums_start: what that sum starts with, (B, N, H, C) or (B, N, H); zero if None.
        erase: (B, T, H, A): with these a token reads what is there before it, of the state and of earlier tokens, and
            writes c less that: the delta rule. Not with `outer`. For TPUs alone.
        with_written: whether that is wanted.
        strict: whether the output is to lack what a token gives itself. For TPUs alone.
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
    deferred: bool = False
    tangent: bool = False
    with_out: bool = True
    with_state: bool = False
    factor: jax.Array | None = None
    minuend: jax.Array | None = None
    sums_start: jax.Array | None = None
    erase: jax.Array | None = None
    with_written: bool = False
    strict: bool = False

    @property
    def sequences(self) -> int:
        """Packed ones, or 1."""
        return 1 if self.cu_seqlens is None else self.cu_seqlens.shape[1] - 1

    @property
    def state_shape(self) -> tuple[int, ...]:
        B, _, H, A = self.a.shape
        return B, self.sequences, H, A, self.c.shape[3]


class ScanResult(NamedTuple):
    """What comes of a scan: `out` (B, T, H, C) in the dtype of c, `state` (B, N, H, A, C) float32, `products`.

    `written` has the shape and dtype of `out`. Padding behind the last packed sequence is zero in all. What was not
    wanted is None.
    """

    out: jax.Array | None
    state: jax.Array | None
    products: jax.Array | None
    written: jax.Array | None = None

    @classmethod
    def wanted(cls, scan: Scan, out: Any, state: Any, products: Any) -> "ScanResult":
        """Of what a kernel gave, what was asked for."""
        out, state = out if scan.with_out else None, state if scan.with_state else None
        return cls(out, state, products if scan.factor is not None else None)


RunScan = Callable[[Scan], ScanResult]


def forward_scan(call: Call) -> Scan:
    """The scan that gives the output and the final state."""
    return Scan(
        *(call[name] for name in ("query", "key", "value")),
        *(call.get(name) for name in ("g", "g_gamma", "gk", "gv", "initial_state", "cu_seqlens")),
        scale=call.spec.scale,
        descending=call.spec.reverse,
        with_out=call.spec.with_out,
        with_state=call.spec.with_state,
    )


def _run_on_tokens(run_scan: RunScan, scan: Scan) -> ScanResult:
    """What comes of a scan; where there are no tokens, no platform is asked."""
    if scan.a.shape[1] > 0:
        return run_scan(scan)
    start = jnp.zeros(scan.state_shape, jnp.float32) if scan.start is None or scan.tangent else scan.start
    products = jnp.zeros(scan.c.shape if scan.outer is not None else scan.c.shape[:3], jnp.float32)
    return ScanResult.wanted(scan, scan.c, start, products)


def forward(call: Call, run_scan: RunScan) -> tuple[Arrays, Arrays]:
    """Outputs and residuals of a call: inputs, and the final state where it is an output."""
    result = _run_on_tokens(run_scan, forward_scan(call))
    outputs = _given(out=result.out, state=result.state)
    return outputs, {name: x for name, x in outputs.items() if name == "state"}


def backward(call: Call, residuals: Arrays, cotangents: Arrays, run_scan: RunScan) -> Arrays:
    """Every gradient; scans for those that nobody uses are left out by the compiler."""
    run_scan = partial(_run_on_tokens, run_scan)
    primal = forward_scan(call)
    dout, dstate = cotangents.get("out"), cotangents.get("state")
    end = sums_start = None
    if dstate is not None:
        # an output is scaled, a state is not: reverse scans keep a gradient of the state without the scale
        end = dstate.astype(jnp.float32) / call.spec.scale
        sums_start = dstate.astype(jnp.float32) * residuals["state"]
    descending = not primal.descending
    reverse = replace(primal, descending=descending, deferred=True, start=end, with_out=True, with_state=False)
    # the decays of all channels of a head: from the side of the values only where those of values are wanted anyway
    by_value = "gv" in call
    by_key = "gk" in call or ("g" in call and not by_value)
    gradients = _of_value(call, run_scan, primal, reverse, dout, sums_start, by_value)
    gradients |= _of_query_and_key(run_scan, primal, reverse, dout, sums_start, by_key)
    if "g" in call:
        gates = gradients["gk" if by_key else "gv"]
        gradients["g"] = gates.sum(-1, dtype=jnp.float32) if gates.ndim == 4 else gates
    if "g_gamma" in call and not call.spec.constant_gamma:
        gradients["g_gamma"] = _of_gamma(call, run_scan, primal, dout, dstate)
    return {name: x.astype(call[name].dtype) for name, x in gradients.items() if name in call}


def _of_query_and_key(
    run_scan: RunScan, primal: Scan, reverse: Scan, dout: jax.Array | None, sums_start: jax.Array | None, gates: bool
) -> Arrays:
    """Their gradients; with `gates`, `gk` is that of the key channels' decays, or their sum where they have none."""
    q, k, v, inner, outer = primal.a, primal.b, primal.c, primal.outer, primal.inner
    if dout is None:
        dquery, dout = jnp.zeros_like(q), jnp.zeros_like(v)
        minuend = jnp.zeros(k.shape if outer is not None else k.shape[:3], jnp.float32) if gates else None
    else:
        of_query = replace(primal, a=dout, b=v, c=k, inner=inner, outer=outer, start=transposed_state(primal.start))
        result = run_scan(replace(of_query, with_out=True, with_state=False, factor=q if gates else None))
        dquery, minuend = result.out, result.products
    of_key = replace(reverse, a=v, b=dout, c=q, inner=inner, outer=outer, start=transposed_state(reverse.start))
    if gates:
        sums_start = None if sums_start is None else sums_start.sum(-1 if outer is not None else (-2, -1))
        of_key = replace(of_key, factor=k, minuend=minuend, sums_start=sums_start)
    result = run_scan(of_key)
    return _given(query=dquery, key=result.out, gk=result.products)


def _of_value(
    call: Call,
    run_scan: RunScan,
    primal: Scan,
    reverse: Scan,
    dout: jax.Array | None,
    sums_start: jax.Array | None,
    gates: bool,
) -> Arrays:
    """The gradients of the values and the initial state; with `gates`, of the value channels' decays too."""
    q, k, v = primal.a, primal.b, primal.c
    if gates:
        sums_start = None if sums_start is None else sums_start.sum(-2)
        zeros = jnp.zeros(v.shape, jnp.float32)
        minuend = zeros if dout is None else run_scan(replace(primal, with_out=False, factor=dout)).products
        reverse = replace(reverse, factor=v, minuend=minuend, sums_start=sums_start)
    reverse = replace(reverse, a=k, b=q, c=jnp.zeros_like(v) if dout is None else dout)
    dv, dstate, dgv, _ = run_scan(replace(reverse, with_state="initial_state" in call))
    return _given(value=dv, initial_state=None if dstate is None else dstate * call.spec.scale, gv=dgv)


def _given(**arrays: jax.Array | None) -> Arrays:
    return {name: x for name, x in arrays.items() if x is not None}


def transposed_state(state: jax.Array | None) -> jax.Array | None:
    return None if state is None else state.mT


def _of_gamma(
    call: Call, run_scan: RunScan, primal: Scan, dout: jax.Array | None, dstate: jax.Array | None
) -> jax.Array:
    """The gradient (B or 1, H) of the decays that all tokens have."""
    _, state, products, _ = run_scan(
        replace(primal, tangent=True, with_out=False, with_state=dstate is not None, factor=dout)
    )
    gradient = jnp.zeros((1, 1), jnp.float32)
    if products is not None:
        gradient = gradient + products.sum((1, 3) if products.ndim == 4 else 1)
    if state is not None and dstate is not None:
        gradient = gradient + (state * dstate).sum((1, 3, 4))
    return gradient.sum(0, keepdims=True) if call["g_gamma"].shape[0] == 1 else gradient

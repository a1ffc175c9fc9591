"""The delta rule, and all of its gradients, as scans of linear attention, two of which erase before they write.

Once it is known what tokens write, d, all is linear attention with d for values:

    d      = what an erasing scan(query, key, w * value; erase) writes, and its output is out
    y      = reverse scan(key, query, dout)                what the gradient of d would be if nothing erased
    r      = what an erasing reverse scan(-, erase, y; key) writes: that of what is left to write
    dquery = scan(dout, d, key),  derase = -scan(r, d, key),  dkey = reverse scan(d, dout, query) - (d, r, erase)

where those with r lack what a token gives itself.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear.delta.spec import dimensions
from ejkernel.kernels.linear.reference import without_padding
from ejkernel.kernels.linear.scans import RunScan, Scan, transposed_state
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays

_TOKENS = ("query", "key", "value", "beta", "erase_key", "write_gate")


def forward_scan(call: Call) -> Scan:
    """The scan that gives the output, the final state and what is written."""
    query, key, erase, value = _scanned(call, call.arrays)
    return Scan(
        query,
        key,
        value,
        g=call.get("g"),
        inner=call.get("gk"),
        start=call.get("initial_state"),
        cu_seqlens=call.get("cu_seqlens"),
        scale=call.spec.scale,
        with_out=call.spec.with_out,
        with_state=call.spec.with_state,
        erase=erase,
        with_written=True,
    )


def _scanned(call: Call, arrays: Arrays) -> tuple[jax.Array, ...]:
    """Queries, keys, erase keys and values of every head, as scans have them."""
    _, _, H, Hk, *_ = dimensions(call)
    query, key = (jnp.repeat(arrays[name], H // Hk, 2) for name in ("query", "key"))
    wide = arrays["value"].astype(jnp.float32)
    beta = arrays["beta"].astype(jnp.float32)[..., None] if "beta" in arrays else None
    write = arrays["write_gate"].astype(jnp.float32) if "write_gate" in arrays else beta
    value = arrays["value"] if write is None else (write * wide).astype(key.dtype)
    erase = arrays.get("erase_key")
    if erase is None:
        erase = key if beta is None else (beta * key.astype(jnp.float32)).astype(key.dtype)
    return query, key, erase if key.dtype == jnp.float16 else erase.astype(key.dtype), value


def forward(call: Call, run_scan: RunScan) -> tuple[Arrays, Arrays]:
    """Outputs and residuals of a call."""
    result = run_scan(forward_scan(call))
    outputs = {"out": result.out, "state": result.state}
    residuals = {"written": result.written} | ({"state": result.state} if call.spec.with_state else {})
    return {name: x for name, x in outputs.items() if x is not None}, residuals  # pyright: ignore


def backward(call: Call, residuals: Arrays, cotangents: Arrays, run_scan: Callable[[Scan], Any]) -> Arrays:
    """Every gradient; scans for those that nobody uses are left out by the compiler."""
    trained = {name: call[name] for name in _TOKENS if name in call}
    (query, key, erase, value), pull = jax.vjp(lambda x: _scanned(call, x), trained)
    dout, dstate = cotangents.get("out", jnp.zeros_like(value)), cotangents.get("state")
    written, end = residuals["written"], None
    if dstate is not None:
        # an output is scaled, a state is not: reverse scans keep a gradient of the state without the scale
        end = dstate.astype(jnp.float32) / call.spec.scale
    plain = replace(forward_scan(call), erase=None, with_written=False, with_out=True, with_state=False)
    reverse = replace(plain, descending=True, deferred=True, start=end)
    unscaled = {"scale": 1.0, "start": None}
    with_dstart = replace(reverse, with_state="initial_state" in call)
    y = run_scan(replace(with_dstart, a=key, b=query, c=dout))
    left = replace(with_dstart, **unscaled, a=key, b=erase, c=y.out, erase=key, with_written=True, with_out=False)
    left = run_scan(left)
    rest = left.written
    # of key channels: what was inside the products of pairs is outside
    of_key = {"inner": None, "outer": plain.inner}
    starts, ends = transposed_state(plain.start), transposed_state(end)
    gates = "g" in call or "gk" in call
    takes = replace(plain, **of_key, a=dout, b=written, c=key, start=starts, factor=query if gates else None)
    takes = run_scan(takes)
    erases = replace(plain, **of_key, a=rest, b=written, c=key, start=starts, scale=1.0, strict=True)
    erases = run_scan(replace(erases, factor=erase if gates else None))
    erased = replace(reverse, **of_key, **unscaled, a=written, b=rest, c=erase, strict=True)
    erased = run_scan(replace(erased, factor=key if gates else None))
    gives = replace(reverse, **of_key, a=written, b=dout, c=query, start=ends)
    if gates:
        minuend = takes.products - erases.products + erased.products
        gives = replace(gives, factor=key, minuend=minuend, sums_start=_sums_start(call, dstate, residuals))
    gives = run_scan(gives)
    dkey = (gives.out.astype(jnp.float32) - erased.out.astype(jnp.float32)).astype(key.dtype)
    gradients = pull((takes.out, dkey, -erases.out, rest))[0]
    # there what is multiplied may be nan
    gradients = {name: without_padding(call, x) for name, x in gradients.items()}
    if "initial_state" in call:
        gradients["initial_state"] = call.spec.scale * y.state - left.state
    if gates:
        gradients |= {"gk": gives.products, "g": gives.products.sum(-1) if "gk" in call else gives.products}
    return {name: x.astype(call[name].dtype) for name, x in gradients.items() if name in call}


def _sums_start(call: Call, dstate: jax.Array | None, residuals: Arrays) -> Any:
    """What the gradients of decays get of the final state, (B, N, H, D) or (B, N, H)."""
    if dstate is None:
        return None
    return (dstate.astype(jnp.float32) * residuals["state"]).sum(-1 if "gk" in call else (-2, -1))

"""Softmax attention on Hopper through Pallas Mosaic GPU: warp-specialised, pipelined wgmma. Forward.

A tile is 128 query rows of one head; a program computes one, or one after another. Two compute warpgroups hold 64 rows
each; a third one copies key and value blocks into a ring of `stages` shared-memory slots. The compute warpgroups meet
at a barrier twice per key block and run half a block apart, so that one does its softmax while the other feeds the
tensor cores. The block schedule gives each tile three runs of key blocks: masked, unmasked, masked.

Registers of a compute thread (at most 232): logits block_k/2, weights in 16 bits block_k/4, output D/2.
D64/block_k 128: 64+32+32, D128/128: 64+32+64, D256/64: 32+16+128.
Shared memory (227 KB): 256*D bytes of queries, as much for the output (up to D128; beyond, it takes the queries' place)
and stages*2*block_k*D*2 of keys and values. D64/128/2: 32+64, D128/128/2: 64+128, D256/64/2: 64+128.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.checks.options import config_ints
from ejkernel.kernels.softmax.mosaic_gpu_tiles import (
    LOG2_E,
    ROW,
    Kernel,
    Masks,
    across,
    act,
    batch_index,
    compute_tiles,
    copy_tiles,
    eights,
    fetch,
    flags,
    flags_of,
    launch,
    masked_block,
    retry_scratch,
    tile_ref,
    zeros,
)
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays

HEAD_DIMS = (64, 96, 128, 192, 256)
LN_2 = 0.6931471805599453
# The running maximum starts here, not at -inf: a masked logit (-inf) minus it is -inf, never inf - inf.
FLOOR = -1e30
SMEM_BYTES = 232448


@dataclass(frozen=True)
class Config:
    """How a tile is computed; a compute warpgroup owns 64 rows of queries (forward, dq) or keys (dk/dv).

    Attributes:
        block_k: forward, keys of a block.
        stages: forward, key and value blocks in flight.
        dq_block_k: keys of a block in the dq kernel.
        dq_slots: shared-memory slots that keys and values share in the dq kernel.
        dkv_block_q: queries of a block in the dk/dv kernel.
        dkv_stages: query blocks in flight in the dk/dv kernel.
        dkv_split: one warpgroup sums dv, the other dk, over the same 64 keys (for large head dims).
        semantics: which of Mosaic's two lowerings to use.
        persistent: as many programs as cores, where a fixed deal of tiles is fair.
    """

    block_k: int = 128
    stages: int = 2
    dq_block_k: int = 64
    dq_slots: int = 4
    dkv_block_q: int = 64
    dkv_stages: int = 2
    dkv_split: bool = False
    semantics: Literal["warpgroup", "lane"] = "warpgroup"
    persistent: bool = True

    def __post_init__(self) -> None:
        config_ints(self, ("block_k", "dq_block_k", "dkv_block_q"), 64, multiple=64)
        for name, least in (("stages", 2), ("dq_slots", 3), ("dkv_stages", 1)):
            config_ints(self, (name,), least)
        if self.semantics not in ("warpgroup", "lane"):
            raise ValueError(f"semantics={self.semantics!r} must be 'warpgroup' or 'lane'")

    def shared_bytes(self, head_dim: int) -> dict[str, int]:
        """Shared memory of each kernel for 16-bit inputs: tiles, and what is small in whole kilobytes."""
        row, results = 2 * head_dim, 128 if results_apart(head_dim) else 0
        keys, gradients = (64, 0) if self.dkv_split else (128, 2 * results)
        exchange = 2 * 64 * self.dkv_block_q * 2 if self.dkv_split else 0
        statistics = 4 * self.dkv_stages * self.dkv_block_q
        return {
            "forward": row * (128 + results + 2 * self.stages * self.block_k)
            + _small(8 * 64, _marks(self.stages, self.block_k)),
            "dq": row * (2 * 128 + results + self.dq_slots * self.dq_block_k)
            + _small(_marks(self.dq_slots, self.dq_block_k)),
            "dkv": row * (2 * keys + gradients + 2 * self.dkv_stages * self.dkv_block_q)
            + exchange
            + _small(statistics, statistics, _marks(2 * self.dkv_stages, self.dkv_block_q)),
        }


def results_apart(head_dim: int) -> bool:
    """Whether results have shared memory of their own, so that the next tile need not wait until they left."""
    return head_dim <= 128


def _marks(flags: int, columns: int) -> int:
    """Bytes of the marks of a masked call, see `retry_scratch`."""
    return 2 * (3 + flags) * max(64, columns)


def _small(*arrays: int) -> int:
    """Bytes of small arrays, each in whole kilobytes, of Mosaic's scratch for reductions and of the barriers."""
    return sum(-(-size // 1024) * 1024 for size in arrays) + 1024 + 256


def unsupported(call: Call) -> list[str]:
    """Why this implementation cannot do the call; empty if it can."""
    q, k, v = call["query"], call["key"], call["value"]
    spec, dims = call.spec, dimensions(call)
    reasons = []
    if call.target.capability != 90:
        reasons.append(f"needs a Hopper GPU (sm_90), not {call.target.arch}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"needs bfloat16 or float16 throughout, not {q.dtype}, {k.dtype}, {v.dtype}")
    if dims.D not in HEAD_DIMS:
        reasons.append(f"head dim {dims.D} is not one of {HEAD_DIMS}")
    if dims.Dv != dims.D:
        reasons.append(f"value head dim {dims.Dv} differs from {dims.D}")
    for name, what in (("bias", "a bias"), ("mask", "a dense mask"), ("pattern", "a block pattern")):
        if name in call:
            reasons.append(f"{what} is not implemented")
    if spec.dropout:
        reasons.append("dropout is not implemented")
    if spec.with_argmax:
        reasons.append("the argmax output is not implemented")
    if spec.logits_dtype != "float32":
        reasons.append(f"logits are computed in float32, not {spec.logits_dtype}")
    if spec.precision not in (None, lax.Precision.DEFAULT):
        reasons.append(f"precision {spec.precision} is not implemented: one tensor-core pass, f32 accumulation")
    return reasons


def unsupported_config(call: Call, config: Config) -> list[str]:
    """Why a config does not fit the call."""
    return [
        f"its {kernel} kernel needs {size} bytes of shared memory, of {SMEM_BYTES}"
        for kernel, size in config.shared_bytes(dimensions(call).D).items()
        if size > SMEM_BYTES
    ]


def default_config(call: Call) -> Config:
    """Tiles by head dim; see the budgets above and in mosaic_gpu_bwd."""
    D = dimensions(call).D
    if D <= 64:
        # with a mask, smaller blocks visit less
        block_k = 128 if Masks.of(call, "q").mixed else 256
        return Config(block_k=block_k, stages=2, dq_block_k=128, dq_slots=4, dkv_block_q=64, dkv_stages=3)
    if D <= 128:
        return Config(block_k=128, stages=2, dq_block_k=64, dq_slots=6, dkv_block_q=64, dkv_stages=2)
    return Config(
        block_k=64,
        stages=2,
        dq_block_k=64,
        dq_slots=4 if D == 192 else 3,
        dkv_block_q=64,
        dkv_stages=2,
        dkv_split=True,
        semantics="lane",
    )


def search_space(call: Call) -> list[Config]:
    """Configs worth timing that fit in shared memory and in the forward's registers."""
    D = dimensions(call).D
    base = default_config(call)
    found = [base]
    for block_k in (64, 128, 256):
        for stages in (2, 3, 4):
            for persistent in (True, False):
                config = replace(base, block_k=block_k, stages=stages, persistent=persistent)
                registers = block_k * 3 // 4 + D // 2
                fits = registers <= 224 and max(config.shared_bytes(D).values()) <= SMEM_BYTES
                if fits and config != base:
                    found.append(config)
    return found


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    """Output and log-sum-exp; both are all the backward pass keeps."""
    q, k, v = (eights(call[name]) for name in ("query", "key", "value"))
    dims = dimensions(call)
    T_padded = -(-dims.T // 128) * 128
    kernel = _Forward.of(call, config, "q", 128, config.block_k)
    operands = kernel.operands(call)
    if "sinks" in call:
        operands["sinks"] = call["sinks"]
    out, lse = launch(
        kernel,
        config.semantics,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((dims.B, dims.H, T_padded), jnp.float32),
        ),
        scratch=kernel.scratch(),
        programs=kernel.walk.programs,
        name="softmax_forward",
    )(q, k, v, operands)
    outputs = {"out": out[:, : dims.T], "lse": lse[:, :, : dims.T]}
    return outputs, dict(outputs)


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    """Gradients by array name; see mosaic_gpu_bwd."""
    from ejkernel.kernels.softmax import mosaic_gpu_bwd

    return mosaic_gpu_bwd.backward(call, residuals, cotangents, config)


class _Forward(Kernel):
    """Output and log-sum-exp of 128 queries."""

    def scratch(self) -> dict[str, Any]:
        c, D = self.config, self.dims.D
        scratch = retry_scratch(self.masks, c.stages, c.block_k) | {
            "q_smem": tile_ref((2, 64, D), self.dtype),
            "k_smem": tile_ref((c.stages, c.block_k, D), self.dtype),
            "v_smem": tile_ref((c.stages, c.block_k, D), self.dtype),
            "lse_smem": plgpu.SMEM((2, 64), jnp.float32),
            "q_ready": plgpu.Barrier(num_barriers=2),
            "k_ready": plgpu.Barrier(num_barriers=c.stages),
            "v_ready": plgpu.Barrier(num_barriers=c.stages),
            "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "turn": plgpu.Barrier(num_arrivals=2),
        }
        return scratch | ({"out_smem": tile_ref((2, 64, D), self.dtype)} if results_apart(D) else {})

    def __call__(self, q_ref, k_ref, v_ref, refs, out_ref, lse_ref, **s: Any) -> None:
        w = lax.axis_index("warpgroup")
        pl.when(w < 2)(lambda: act("compute", s, partial(self._compute, q_ref, refs, out_ref, lse_ref, s, w)))
        pl.when(w == 2)(lambda: act("copy", s, partial(self._copy, k_ref, v_ref, refs, s)))

    def _copy(self, k_ref, v_ref, refs, s, scrub) -> None:
        block_k, stages = self.config.block_k, self.config.stages

        def feed(n, blocks):
            b, h, i = self.walk.place(n)
            h_kv = lax.div(h, jnp.int32(self.dims.G))
            row = self.runs.row(refs, b, h, i)

            def block(j, t):
                slot = lax.rem(t, jnp.int32(stages))
                at = (batch_index(k_ref, b), pl.ds(j * block_k, block_k), h_kv)
                pl.when(t >= stages)(lambda: plgpu.barrier_wait(s["k_free"].at[slot]))
                fetch(k_ref.at[at], s["k_smem"].at[slot], s["k_ready"].at[slot])
                pl.when(t >= stages)(lambda: plgpu.barrier_wait(s["v_free"].at[slot]))
                how = ()
                if self.masks.mixed:
                    how = (jnp.logical_and(scrub, masked_block(row, j)), s["raw"], flags_of(s, slot, block_k))
                fetch(v_ref.at[at], s["v_smem"].at[slot], s["v_ready"].at[slot], *how)
                return t + 1

            return lax.fori_loop(row[0], row[3], block, blocks)

        copy_tiles(self.walk, s, scrub, {"k_free": 1, "v_free": 1}, feed)

    def _compute(self, q_ref, refs, out_ref, lse_ref, s, w, scrub) -> None:
        D, apart, last = self.dims.D, results_apart(self.dims.D), self.walk.count() - 1
        q_smem = s["q_smem"].at[w]

        def meet() -> None:
            plgpu.barrier_arrive(s["turn"])
            plgpu.barrier_wait(s["turn"])

        def fetch_queries(n: Any) -> None:
            b, h, i = self.walk.place(n)
            plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds((2 * i + w) * 64, 64), h], q_smem, s["q_ready"].at[w])

        def work(n, blocks):
            b, h, i = self.walk.place(n)
            start = (2 * i + w) * 64
            row = self.runs.row(refs, b, h, i)
            lo, _, _, hi = row
            rows = self.masks.rows(refs, b, start, 64)
            plgpu.barrier_wait(s["q_ready"].at[w])
            step = self._step(refs, s, q_smem, rows, b, blocks - lo, hi, scrub)
            first = lax.rem(blocks, jnp.int32(self.config.stages))
            pl.when(hi > lo)(lambda: plgpu.barrier_wait(s["k_ready"].at[first]))
            # one warpgroup sits out the first half block: from there on they alternate
            pl.when(jnp.logical_and(w == 1, n == 0))(meet)
            acc, m, l = self.runs.loop(row, step, (zeros((64, D)), *self._start(refs, b, h)))
            pl.when(jnp.logical_and(w == 0, n == last))(meet)
            empty = l == 0.0
            acc *= across(jnp.where(empty, 0.0, 1.0 / l), acc.shape, 0)
            lse = jnp.where(empty, -jnp.inf, m * LN_2 + jnp.log(l))
            own = pl.ds(start, 64)
            return blocks + (hi - lo), [
                (acc, s["out_smem"].at[w] if apart else q_smem, out_ref.at[b, own, h]),
                (lse, s["lse_smem"].at[w], lse_ref.at[b, h, own]),
            ]

        compute_tiles(self.walk, s, w, scrub, fetch_queries, work, apart=apart)

    def _start(self, refs, b, h) -> tuple[jax.Array, jax.Array]:
        """Running maximum (base 2) and sum: a head's sinks count once, here."""
        m = plgpu.layout_cast(jnp.full((64,), FLOOR, jnp.float32), ROW)
        if "sinks" not in refs:
            return m, zeros((64,), ROW)
        sink = refs["sinks"][batch_index(refs["sinks"], b), h] * LOG2_E
        m = jnp.maximum(m, sink)
        return m, jnp.exp2(sink - m)

    def _step(self, refs, s, q, rows, b, before, hi, scrub) -> Callable[..., Any]:
        c, D = self.config, self.dims.D
        shape = (64, c.block_k)
        turn = s["turn"]

        def step(i, carry, *, masked: bool):
            acc, m, l = carry
            slot = lax.rem(i + before, jnp.int32(c.stages))

            def qk(s_ref):
                plgpu.wgmma(s_ref, q, s["k_smem"].at[slot].T)
                plgpu.barrier_arrive(turn)
                keep = self.masks.keep(refs, rows, b, i * c.block_k, shape) if masked else None
                return s_ref[...], keep

            x, keep = pl.run_scoped(qk, plgpu.ACC(shape, jnp.float32))
            plgpu.barrier_arrive(s["k_free"].at[slot])
            plgpu.barrier_wait(turn)  # the other warpgroup has its logits or is done: now it may multiply

            x, factor, _ = self.logits.base2(x)
            if keep is not None:
                x = jnp.where(keep, x, -jnp.inf)
            top = jnp.maximum(m, x.max(axis=1) * factor)
            decay = jnp.exp2(m - top)
            p = jnp.exp2(x * factor - across(top, shape, 0))
            acc *= across(decay, acc.shape, 0)
            l *= decay
            mixed = masked and self.masks.mixed
            if mixed and keep is not None:
                pl.when(scrub)(partial(plgpu.barrier_wait, s["v_ready"].at[slot]))
                p16 = jnp.where(keep, p + across(flags(s, slot, c.block_k, scrub), shape, 1), 0.0).astype(self.dtype)
            else:
                p16 = p.astype(self.dtype)
            if D <= 128:  # registers allow the row sums before the turn changes; at 256 they would spill
                l += p.sum(axis=1)
                acc, l, top, p16 = lax.optimization_barrier((acc, l, top, p16))
            plgpu.barrier_arrive(turn)
            ready = partial(plgpu.barrier_wait, s["v_ready"].at[slot])
            pl.when(jnp.logical_not(scrub))(ready) if mixed else ready()
            plgpu.barrier_wait(turn)
            if D > 128:
                l += p.sum(axis=1)

            def pv(acc_ref):
                plgpu.wgmma(acc_ref, p16, s["v_smem"].at[slot])
                following = lax.rem(i + 1 + before, jnp.int32(c.stages))
                pl.when(i + 1 < hi)(lambda: plgpu.barrier_wait(s["k_ready"].at[following]))

            acc = pl.run_state(pv)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(s["v_free"].at[slot])
            return acc, top, l

        return step


IMPLEMENTATION = Implementation(
    Config, unsupported, default_config, search_space, forward, backward, unsupported_config
)

"""The forward kernel of Mosaic GPU: output and log-sum-exp of 128 queries a tile; see mosaic_gpu for its budgets."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.softmax.mosaic_gpu_retry import fetch, flags, flags_of, retry_scratch
from ejkernel.kernels.softmax.mosaic_gpu_tiles import (
    LOG2_E,
    ROW,
    Kernel,
    across,
    batch_index,
    launch,
    masked_block,
    padded_to_8,
    results_apart,
    tile_ref,
    zeros,
)
from ejkernel.kernels.softmax.mosaic_gpu_warpgroups import act, compute_tiles, copy_tiles
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays

LN_2 = 0.6931471805599453
# The running maximum starts here, not at -inf: a masked logit (-inf) minus it is -inf, never inf - inf.
FLOOR = -3e38


def forward(call: Call, config: Any) -> Arrays:
    """Output and log-sum-exp."""
    q, k, v = (padded_to_8(call[name]) for name in ("query", "key", "value"))
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
    return {"out": out[:, : dims.T], "lse": lse[:, :, : dims.T]}


class _Forward(Kernel):
    """Output and log-sum-exp of 128 queries."""

    def scratch(self) -> dict[str, Any]:
        c, D = self.config, self.dims.D
        scratch = retry_scratch(self.masks, c.stages, c.block_k, self.parts) | {
            "q_smem": tile_ref((2, 64, D), self.dtype),
            "k_smem": tile_ref((c.stages, c.block_k, D), self.dtype),
            "v_smem": tile_ref((c.stages, c.block_k, D), self.dtype),
            "lse_smem": plgpu.SMEM((2, 64), jnp.float32),
            "q_ready": plgpu.Barrier(num_barriers=2),
            "k_ready": plgpu.Barrier(num_arrivals=self.parts, num_barriers=c.stages),
            "v_ready": plgpu.Barrier(num_arrivals=self.parts, num_barriers=c.stages),
            "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "turn": plgpu.Barrier(num_arrivals=2),
        }
        scratch |= self.bias_scratch(c.stages)
        return scratch | ({"out_smem": tile_ref((2, 64, D), self.dtype)} if results_apart(D) else {})

    def __call__(self, q_ref, k_ref, v_ref, refs, out_ref, lse_ref, **scratch: Any) -> None:
        w = lax.axis_index("warpgroup")
        pl.when(w < 2)(
            lambda: act("compute", scratch, partial(self._compute, q_ref, refs, out_ref, lse_ref, scratch, w))
        )
        pl.when(w == 2)(lambda: act("copy", scratch, partial(self._copy, k_ref, v_ref, refs, scratch)))

    def _copy(self, k_ref, v_ref, refs, scratch, scrub) -> None:
        block_k, stages = self.config.block_k, self.config.stages

        def feed(careful, n, blocks):
            b, h, i = self.place(refs, n)
            h_kv = lax.div(h, jnp.int32(self.dims.G))
            row = self.runs.row(refs, b, h, i)

            def block(j, t):
                slot = lax.rem(t, jnp.int32(stages))
                spans = self.spans(refs, (b, h, i), j)  # read before the slot is free
                at = [(batch_index(k_ref, b), span, h_kv) for span in spans]
                pl.when(t >= stages)(lambda: plgpu.barrier_wait(scratch["k_free"].at[slot]))
                fetch([k_ref.at[one] for one in at], scratch["k_smem"].at[slot], scratch["k_ready"].at[slot])
                self.fetch_bias(refs, scratch, slot, (b, h, i), spans)
                pl.when(t >= stages)(lambda: plgpu.barrier_wait(scratch["v_free"].at[slot]))
                how = ()
                if careful:
                    how = (masked_block(row, j), scratch["raw"], flags_of(scratch, slot, block_k))
                fetch([v_ref.at[one] for one in at], scratch["v_smem"].at[slot], scratch["v_ready"].at[slot], *how)
                return t + 1

            return lax.fori_loop(row[0], row[3], block, blocks)

        copy_tiles(self.walk, scratch, scrub, {"k_free": 1, "v_free": 1}, feed)

    def _compute(self, q_ref, refs, out_ref, lse_ref, scratch, w, scrub) -> None:
        D, apart, last = self.dims.D, results_apart(self.dims.D), self.walk.count() - 1
        q_smem = scratch["q_smem"].at[w]

        def meet() -> None:
            plgpu.barrier_arrive(scratch["turn"])
            plgpu.barrier_wait(scratch["turn"])

        def fetch_queries(n: Any) -> None:
            b, h, i = self.place(refs, n)
            plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds((2 * i + w) * 64, 64), h], q_smem, scratch["q_ready"].at[w])

        def work(n, blocks):
            b, h, i = self.place(refs, n)
            start = (2 * i + w) * 64
            row = self.runs.row(refs, b, h, i)
            lo, _, _, hi = row
            rows = self.masks.rows(refs, b, start, 64)
            plgpu.barrier_wait(scratch["q_ready"].at[w])
            step = self._step(refs, scratch, w, rows, (b, h, i), blocks - lo, hi, scrub)
            first = lax.rem(blocks, jnp.int32(self.config.stages))
            pl.when(hi > lo)(lambda: plgpu.barrier_wait(scratch["k_ready"].at[first]))
            # one warpgroup sits out the first half block: from there on they alternate
            pl.when(jnp.logical_and(w == 1, n == 0))(meet)
            acc, m, l = self.runs.loop(row, step, (zeros((64, D)), *self._start(refs, b, h)))
            pl.when(jnp.logical_and(w == 0, n == last))(meet)
            empty = l == 0.0
            acc *= across(jnp.where(empty, 0.0, 1.0 / (l * (1.0 - self.dropout))), acc.shape, 0)
            lse = jnp.where(empty, -jnp.inf, m * LN_2 + jnp.log(l))
            own = pl.ds(start, 64)
            return blocks + (hi - lo), [
                (acc, scratch["out_smem"].at[w] if apart else q_smem, out_ref.at[b, own, h]),
                (lse, scratch["lse_smem"].at[w], lse_ref.at[b, h, own]),
            ]

        compute_tiles(self.walk, scratch, w, scrub, fetch_queries, work, apart=apart)

    def _start(self, refs, b, h) -> tuple[jax.Array, jax.Array]:
        """Running maximum (base 2) and sum: a head's sinks count once, here."""
        m = plgpu.layout_cast(jnp.full((64,), FLOOR, jnp.float32), ROW)
        if "sinks" not in refs:
            return m, zeros((64,), ROW)
        sink = refs["sinks"][batch_index(refs["sinks"], b), h] * LOG2_E
        m = jnp.maximum(m, sink)
        return m, jnp.exp2(sink - m)

    def _step(self, refs, scratch, w, rows, place, before, hi, scrub) -> Callable[..., Any]:
        c, D = self.config, self.dims.D
        shape = (64, c.block_k)
        q, turn = scratch["q_smem"].at[w], scratch["turn"]
        bias_of = self.bias(refs, scratch, rows, place, w)

        def step(i, carry, *, masked: bool):
            acc, m, l = carry
            slot = lax.rem(i + before, jnp.int32(c.stages))

            def qk(s_ref):
                plgpu.wgmma(s_ref, q, scratch["k_smem"].at[slot].T)
                plgpu.barrier_arrive(turn)
                keep = self.keep(refs, rows, place, w, i, shape) if masked else None
                return s_ref[...], keep

            x, keep = pl.run_scoped(qk, plgpu.ACC(shape, jnp.float32))
            bias = bias_of(slot, i)
            plgpu.barrier_arrive(scratch["k_free"].at[slot])
            plgpu.barrier_wait(turn)  # the other warpgroup has its logits or is done: now it may multiply

            x, factor, _ = self.logits.base2(x, bias)
            if keep is not None:
                x = jnp.where(keep, x, -jnp.inf)
            top = jnp.maximum(m, x.max(axis=1) * factor)
            decay = jnp.exp2(m - top)
            p = jnp.exp2(self.capped(x * factor - across(top, shape, 0)))
            acc *= across(decay, acc.shape, 0)
            l *= decay
            mixed = masked and self.masks.mixed
            stays = self.stays(refs, rows, place, i, shape)
            weights = p if stays is None else jnp.where(stays, p, 0.0)
            if mixed and keep is not None:
                pl.when(scrub)(partial(plgpu.barrier_wait, scratch["v_ready"].at[slot]))
                weights = jnp.where(keep, weights + across(flags(scratch, slot, c.block_k, scrub), shape, 1), 0.0)
            p16 = weights.astype(self.dtype)
            if D <= 128:  # registers allow the row sums before the turn changes; at 256 they would spill
                l += p.sum(axis=1)
                acc, l, top, p16 = lax.optimization_barrier((acc, l, top, p16))
            plgpu.barrier_arrive(turn)
            ready = partial(plgpu.barrier_wait, scratch["v_ready"].at[slot])
            pl.when(jnp.logical_not(scrub))(ready) if mixed else ready()
            plgpu.barrier_wait(turn)
            if D > 128:
                l += p.sum(axis=1)

            def pv(acc_ref):
                plgpu.wgmma(acc_ref, p16, scratch["v_smem"].at[slot])
                following = lax.rem(i + 1 + before, jnp.int32(c.stages))
                pl.when(i + 1 < hi)(lambda: plgpu.barrier_wait(scratch["k_ready"].at[following]))

            acc = pl.run_state(pv)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(scratch["v_free"].at[slot])
            return acc, top, l

        return step

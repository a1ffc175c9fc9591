"""What the backward kernels of Mosaic GPU share: weights and gradients of a tile, and the walk of keys over queries."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.softmax.mosaic_gpu.retry import fetch, flags_of, retry_scratch, with_flags
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import Masked
from ejkernel.kernels.softmax.mosaic_gpu.tiles import (
    COL,
    Kernel,
    copy_parts,
    load,
    masked_block,
    tile_ref,
    unknown,
    zeros,
)
from ejkernel.kernels.softmax.mosaic_gpu.warpgroups import copy_tiles


class Gradient(Kernel):
    """What the backward kernels have in common."""

    @property
    def overlaps(self) -> bool:
        """Whether steps are those of `beside`: in JAX 0.10 a product there cannot add to what a loop sums up."""
        return jax.__version_info__ >= (0, 11)

    def own_number(self, w: Any) -> Any:
        """The warpgroup's number, for addresses inside a loop; at D64 registers hold them all, which is faster."""
        D = self.dims.D
        return unknown(w) if D == 128 or (D > 128 and self.overlaps) else w

    def weights(
        self, logits: jax.Array, minus_lse: jax.Array, keep: Any, bias: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Softmax weights of a tile of q.k, and the soft cap's slope."""
        x, factor, t = self.logits.base2(logits, bias)
        exponent = self.capped(x * factor + minus_lse)
        if keep is not None:  # here, not behind what rounds: LLVM would take the pairs apart for it
            exponent = jnp.where(keep, exponent, -jnp.inf)
        return jnp.exp2(exponent), None if t is None else 1.0 - t * t

    def kept(self, x: jax.Array, stays: jax.Array | None) -> jax.Array:
        """Zeros where a pair was dropped, the others the larger for it."""
        return x if stays is None else jnp.where(stays, x * (1.0 / (1.0 - self.dropout)), 0.0)

    def beside(
        self,
        shape: tuple[int, int],
        minus_delta: jax.Array,
        issue: Callable[[Any, Any], jax.Array],
        weigh: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]],
        finish: Callable[[jax.Array, jax.Array | None, Callable[[int], jax.Array]], None],
    ) -> None:
        """A step whose weights are computed while the product for dp runs; all its products are done at its end.

        Args:
            minus_delta: spread over the tile. The accumulator of dp begins with it, unless pairs are dropped.
            issue: (logits, dp) starts both products, and has minus the log-sum-exps: while products read shared memory,
                anything else takes long to come from it.
            weigh: (logits, those) to the weights, and the soft cap's slope.
            finish: (weights, slope, dp) does the rest; dp(n) is had when at most n later products are not done.
        """

        def body(dp_acc: Any) -> None:
            def logits(s_acc: Any) -> tuple[jax.Array, jax.Array]:
                minus_lse = issue(s_acc, dp_acc)
                return plgpu.wgmma_accumulator_load(s_acc, wait_n=1), minus_lse

            x, minus_lse = lax.optimization_barrier(pl.run_scoped(logits, plgpu.ACC(shape, jnp.float32)))
            finish(
                *weigh(x, minus_lse), lambda n: lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_acc, wait_n=n))
            )

        start: Any = plgpu.ACC.init(zeros(shape) if self.dropout else minus_delta)
        pl.run_state(body)(start)

    def logits_gradient(
        self, p: jax.Array, dp: jax.Array, minus_delta: jax.Array, slope: jax.Array | None, keep: Any, stays: Any
    ) -> jax.Array:
        """ds in 16 bits, of the dp that `beside` has."""
        left = minus_delta if self.dropout else None
        return logits_gradient(p, self.kept(dp, stays), left, slope, keep).astype(self.dtype)


def logits_gradient(p: jax.Array, dp: jax.Array, minus_delta: jax.Array | None, slope: Any, keep: Any) -> jax.Array:
    """ds; without minus_delta, it is in dp already."""
    if minus_delta is not None:
        dp += minus_delta
    if slope is not None:
        dp *= slope
    return p * (dp if keep is None else jnp.where(keep, dp, 0.0))  # 0 * (what a masked value holds) may be nan


class QueryLoop(Gradient):
    """The loop over a group's query heads and their query blocks, and the copies that feed it."""

    def ring_scratch(self, keys: tuple[int, ...], own_flags: int = 0) -> dict[str, Any]:
        """Shared memory of keys, of a ring of query blocks, and of flags: `own_flags` beside those of the ring."""
        c, D = self.config, self.dims.D
        return retry_scratch(self.masks.mixed, 2 * c.dkv_stages + own_flags, c.dkv_block_q, self.parts) | {
            "k_smem": tile_ref((*keys, D), self.dtype),
            "v_smem": tile_ref((*keys, D), self.dtype),
            "q_smem": tile_ref((c.dkv_stages, c.dkv_block_q, D), self.dtype),
            "do_smem": tile_ref((c.dkv_stages, c.dkv_block_q, D), self.dtype),
            "minus_lse": plgpu.SMEM((c.dkv_stages, c.dkv_block_q), jnp.float32),
            "minus_delta": plgpu.SMEM((c.dkv_stages, c.dkv_block_q), jnp.float32),
            "q_ready": plgpu.Barrier(num_arrivals=2 * self.parts, num_barriers=c.dkv_stages),
            "do_ready": plgpu.Barrier(num_arrivals=2 * self.parts, num_barriers=c.dkv_stages),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=c.dkv_stages),
            **self.bias_scratch(c.dkv_stages),
        }

    def over_heads(self, refs, b, h_kv, i, steps: Any, visit: Callable[..., Any]) -> Any:
        """visit(head, row, steps so far) -> steps so far, for each query head of the group; steps in all."""
        G = self.dims.G

        def one(g, steps):
            h = h_kv * G + g
            return visit(h, self.runs.row(refs, b, h, i), steps)

        return lax.fori_loop(0, G, one, steps) if G > 1 else one(0, steps)

    def copy(self, q_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, scratch, scrub) -> None:
        block, stages = self.config.dkv_block_q, self.config.dkv_stages

        def visit(b, i, careful, h, row, steps):
            def block_of(n, t):
                slot = lax.rem(t, jnp.int32(stages))
                spans = self.spans(refs, (b, h, i), n)
                pl.when(t >= stages)(lambda: plgpu.barrier_wait(scratch["free"].at[slot]))
                self.fetch_bias(refs, scratch, slot, (b, h, i), spans)
                for n_flag, (name, tile, statistic) in enumerate(
                    (("q", q_ref, minus_lse_ref), ("do", do_ref, minus_delta_ref))
                ):
                    ready = scratch[f"{name}_ready"].at[slot]
                    smem = scratch["minus_lse" if name == "q" else "minus_delta"]
                    copy_parts([statistic.at[b, h, rows] for rows in spans], smem.at[slot], ready)
                    how = ()
                    if careful:
                        flag = flags_of(scratch, n_flag * stages + slot, block)
                        how = (masked_block(row, n), scratch["raw"], flag)
                    fetch([tile.at[b, rows, h] for rows in spans], scratch[f"{name}_smem"].at[slot], ready, *how)
                return t + 1

            return lax.fori_loop(row[0], row[3], block_of, steps)

        def feed(careful, n, steps):
            b, h_kv, i = self.place(refs, n)
            return self.over_heads(refs, b, h_kv, i, steps, partial(visit, b, i, careful))

        copy_tiles(self.walking(refs), scratch, scrub, {"free": 1}, feed)

    def minus_log_sums(self, scratch, slot, masked: Masked, scrub) -> jax.Array:
        """Minus the base-2 log-sum-exp of a block's queries, nan for those whose query or dout was scrubbed."""
        minus_lse = load(scratch["minus_lse"].at[slot], COL)
        if masked and self.masks.mixed:
            minus_lse = with_flags(minus_lse, scratch, (slot, self.config.dkv_stages + slot), scrub)
        return minus_lse

    def loop(self, refs, b, h_kv, i, steps: Any, step: Callable[..., Any]) -> Any:
        """Steps after all query blocks of all heads; `step` makes the step of a (batch, head, tile)."""
        return self.over_heads(
            refs, b, h_kv, i, steps, lambda h, row, steps: self.runs.loop(row, step((b, h, i)), steps)
        )

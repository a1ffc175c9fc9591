"""What the backward kernels of Mosaic GPU share: weights and gradients of a tile, and the loop of keys over queries."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.softmax.mosaic_gpu import private_mosaic as mosaic
from ejkernel.kernels.softmax.mosaic_gpu.retry import copy_block, flags_of, retry_scratch, with_flags
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import MaskedRun
from ejkernel.kernels.softmax.mosaic_gpu.tiles import Kernel, copy_sub_blocks, is_masked, swizzled_smem, zeros
from ejkernel.kernels.softmax.mosaic_gpu.warpgroups import produce_tiles


class Gradient(Kernel):
    """What the backward kernels have in common."""

    def warpgroup_in_loop(self, w: Any) -> Any:
        """The warpgroup's number, for addresses inside a loop; at D64 registers hold them all, which is faster."""
        D = self.dims.D
        return mosaic.not_hoisted(w) if D == 128 or (D > 128 and mosaic.CAN_ACCUMULATE_INSIDE_STATE) else w

    def weights(
        self, logits: jax.Array, minus_lse: jax.Array, keep: Any, bias: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Softmax weights of a tile of q.k, and the soft cap's slope."""
        x, factor, t = self.logits.base2(logits, bias)
        exponent = self.at_most_zero(x * factor + minus_lse)
        if keep is not None:  # before the rounding: LLVM would split the rounded pairs to mask them
            exponent = jnp.where(keep, exponent, -jnp.inf)
        return jnp.exp2(exponent), None if t is None else 1.0 - t * t

    def apply_dropout(self, x: jax.Array, undropped: jax.Array | None) -> jax.Array:
        """Zeros where a pair was dropped, and the others scaled up for it."""
        return x if undropped is None else jnp.where(undropped, x * (1.0 / (1.0 - self.dropout)), 0.0)

    def overlapped_step(
        self,
        shape: tuple[int, int],
        minus_delta: jax.Array,
        issue: Callable[[Any, Any], jax.Array],
        recompute: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]],
        finish: Callable[[jax.Array, jax.Array | None, Callable[[int], jax.Array]], None],
    ) -> None:
        """A step whose weights are computed while the product for dp runs; all its products are done at its end.

        Needs mosaic.CAN_ACCUMULATE_INSIDE_STATE.

        Args:
            minus_delta: as a tile. The accumulator of dp begins with it, unless pairs are dropped.
            issue: (logits, dp) starts both products, and returns minus the log-sum-exps: read later, while products
                keep shared memory busy, they would take long.
            recompute: (logits, minus the log-sum-exps) to the weights, and the soft cap's slope.
            finish: (weights, slope, dp) does the rest; dp(n) waits until at most n later products are unfinished.
        """

        def body(dp_acc: Any) -> None:
            def logits(s_acc: Any) -> tuple[jax.Array, jax.Array]:
                minus_lse = issue(s_acc, dp_acc)
                return mosaic.read_accumulator(s_acc, pending=1), minus_lse

            x, minus_lse = mosaic.compiler_barrier(pl.run_scoped(logits, plgpu.ACC(shape, jnp.float32)))
            finish(*recompute(x, minus_lse), lambda n: mosaic.compiler_barrier(mosaic.read_accumulator(dp_acc, n)))

        start: Any = mosaic.accumulator_from(zeros(shape) if self.dropout else minus_delta)
        pl.run_state(body)(start)

    def logits_gradient(
        self, p: jax.Array, dp: jax.Array, minus_delta: jax.Array, slope: jax.Array | None, keep: Any, undropped: Any
    ) -> jax.Array:
        """ds in 16 bits, of the dp that `overlapped_step` has."""
        missing = minus_delta if self.dropout else None
        return logits_gradient(p, self.apply_dropout(dp, undropped), missing, slope, keep).astype(self.dtype)


def logits_gradient(p: jax.Array, dp: jax.Array, minus_delta: jax.Array | None, slope: Any, keep: Any) -> jax.Array:
    """ds; without minus_delta, it is in dp already."""
    if minus_delta is not None:
        dp += minus_delta
    if slope is not None:
        dp *= slope
    return p * (dp if keep is None else jnp.where(keep, dp, 0.0))  # 0 * (what a masked value holds) may be nan


class QueryLoop(Gradient):
    """The loop over a group's query heads and their query blocks, and the copies that feed it."""

    def ring_scratch(self, keys: tuple[int, ...], key_tiles: int = 0) -> dict[str, Any]:
        """Shared memory of keys, of a ring of query blocks, and of the nan flags of both: of `key_tiles`, if any."""
        c, D = self.config, self.dims.D
        copies = self.sub_blocks_per_block
        return retry_scratch(self.masks.mixed, 2 * c.dkv_stages + key_tiles, c.dkv_block_q, copies) | {
            "k_smem": swizzled_smem((*keys, D), self.dtype),
            "v_smem": swizzled_smem((*keys, D), self.dtype),
            "q_smem": swizzled_smem((c.dkv_stages, c.dkv_block_q, D), self.dtype),
            "do_smem": swizzled_smem((c.dkv_stages, c.dkv_block_q, D), self.dtype),
            "minus_lse": plgpu.SMEM((c.dkv_stages, c.dkv_block_q), jnp.float32),
            "minus_delta": plgpu.SMEM((c.dkv_stages, c.dkv_block_q), jnp.float32),
            "q_ready": plgpu.Barrier(num_arrivals=2 * copies, num_barriers=c.dkv_stages),
            "do_ready": plgpu.Barrier(num_arrivals=2 * copies, num_barriers=c.dkv_stages),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=c.dkv_stages),
            **self.bias_scratch(c.dkv_stages),
        }

    def over_heads(self, refs, b, h_kv, i, blocks: Any, visit: Callable[..., Any]) -> Any:
        """visit(head, bounds, blocks so far) -> blocks so far, for each query head of the group; blocks in all."""
        G = self.dims.G

        def one(g, blocks):
            h = h_kv * G + g
            return visit(h, self.runs.bounds(refs, b, h, i), blocks)

        return lax.fori_loop(0, G, one, blocks) if G > 1 else one(0, blocks)

    def produce(self, q_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, scratch, retry) -> None:
        block, stages = self.config.dkv_block_q, self.config.dkv_stages
        tensors = ("q", q_ref, "minus_lse", minus_lse_ref), ("do", do_ref, "minus_delta", minus_delta_ref)

        def visit(b, i, nan_safe, h, bounds, blocks):
            def copy(n, t):
                stage = lax.rem(t, jnp.int32(stages))
                spans = self.spans(refs, (b, h, i), n)
                pl.when(t >= stages)(lambda: plgpu.barrier_wait(scratch["free"].at[stage]))
                self.copy_bias(refs, scratch, stage, (b, h, i), spans)
                for number, (name, tensor, statistic, statistic_ref) in enumerate(tensors):
                    ready = scratch[f"{name}_ready"].at[stage]
                    copy_sub_blocks(
                        [statistic_ref.at[b, h, rows] for rows in spans], scratch[statistic].at[stage], ready
                    )
                    nan_flags = ()
                    if nan_safe:
                        flags = flags_of(scratch, number * stages + stage, block)
                        nan_flags = (is_masked(bounds, n), scratch["raw_ready"], flags)
                    sources = [tensor.at[b, rows, h] for rows in spans]
                    copy_block(sources, scratch[f"{name}_smem"].at[stage], ready, *nan_flags)
                return t + 1

            return lax.fori_loop(bounds.lo, bounds.hi, copy, blocks)

        def fill(nan_safe, n, blocks):
            b, h_kv, i = self.tile_coordinates(refs, n)
            return self.over_heads(refs, b, h_kv, i, blocks, partial(visit, b, i, nan_safe))

        produce_tiles(self.scheduler_in(refs), scratch, retry, {"free": 1}, fill)

    def minus_lse_of(self, scratch, stage, masked: MaskedRun, retry) -> jax.Array:
        """Minus the base-2 log-sum-exp of a block's queries, nan for those whose query or dout was not finite."""
        minus_lse = mosaic.load(scratch["minus_lse"].at[stage], mosaic.COL)
        if masked and self.masks.mixed:
            minus_lse = with_flags(minus_lse, scratch, (stage, self.config.dkv_stages + stage), retry)
        return minus_lse

    def loop(self, refs, b, h_kv, i, blocks: Any, step: Callable[..., Any]) -> Any:
        """Blocks in all after all query blocks of all heads; `step` makes the step of a (batch, head, tile)."""
        return self.over_heads(
            refs, b, h_kv, i, blocks, lambda h, bounds, blocks: self.runs.loop(bounds, step((b, h, i)), blocks)
        )

"""Softmax attention on Hopper through Pallas Mosaic GPU. Backward in one kernel of five products, up to head dim 128.

A tile is 128 keys, 64 a consumer, and visits blocks of 64 queries, at head dim 64 of 128. Logits and dp are
computed with keys as rows, so that the weights and ds feed dv and dk from registers. Only ds goes through shared
memory, for dq = ds^T k, of which each warpgroup computes half: of the columns, at head dim 64 of the queries. The copy
engine adds them to dq in global memory, in whatever order the programs come: no two runs need give the same bits.

A step: logits and dp; exp2 while dp runs; dv; ds, which is stored before products read that memory again; the previous
step's dq, so that no warpgroup waits for the other's; dk, which runs while dq leaves. The weights are rounded to 16
bits before they make ds: they are an operand in that form already, and registers are what there is least of.

Registers of a compute thread (at most 240): dk and dv 128, logits and dp 32 each or dq 32, ds and the weights 16 each.
Shared memory: keys and values 64 KB, two stages of queries and dout 64, two of ds 32, dq in float32 32. At head dim 64
that is 64, 64 or 32, 32, and 32, 64, 64, 32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.softmax.mosaic_gpu import private_mosaic as mosaic
from ejkernel.kernels.softmax.mosaic_gpu.backward_tiles import QueryLoop
from ejkernel.kernels.softmax.mosaic_gpu.masks import batch_index, broadcast
from ejkernel.kernels.softmax.mosaic_gpu.retry import flags_of, zero_nonfinite
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import MaskedRun
from ejkernel.kernels.softmax.mosaic_gpu.tiles import launch
from ejkernel.kernels.softmax.mosaic_gpu.warpgroups import consume_tiles, run_warpgroup
from ejkernel.ops import Call

# queries of a block, by head dim
BLOCK_Q = {64: 128, 128: 64}
# a consumer's half of dq
DQ_HALF = (64, 64)
# registers of a consumer's and of the producer's threads: 2 * 240 + 24 is 3 * 168
REGISTERS = (240, 24)


def fused_gradients(call: Call, config: Any, tensors: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """dq, dk and dv."""
    q, k = tensors[:2]
    kernel = _Fused.of(call, config, "k", 128, BLOCK_Q[q.shape[3]])
    like_keys = jax.ShapeDtypeStruct(k.shape, k.dtype)
    run = launch(kernel, out_type=(like_keys, like_keys), name="softmax_bwd", auto_barriers=False)

    def add(refs) -> None:
        dq_ref, dk_ref, dv_ref = refs
        dk_ref[...], dv_ref[...] = run(*tensors, dq_ref, kernel.operands(call))

    # not jax.new_ref, which a shard_map cannot hold inside a function that has a derivative of its own
    dq, dk, dv = pl.run_state(add)((jnp.zeros(q.shape, jnp.float32), jnp.zeros_like(k), jnp.zeros_like(k)))
    return (dq * kernel.logits.factor).astype(q.dtype), dk, dv


class _Fused(QueryLoop):
    """dk and dv of 128 keys, 64 in each consumer, and what these keys add to dq."""

    def scratch(self) -> dict[str, Any]:
        ds = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        dq = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)
        scratch = self.ring_scratch((2, 64), key_tiles=2)
        del scratch["do_ready"]
        return scratch | {
            "q_ready": plgpu.Barrier(num_arrivals=4 * self.sub_blocks_per_block, num_barriers=self.config.dkv_stages),
            "ds_smem": plgpu.SMEM((2, 2, 64, self.block), self.dtype, transforms=ds),
            "dq_smem": plgpu.SMEM((2, *DQ_HALF), jnp.float32, transforms=dq),
            "operands_ready": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            "ds_ready": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            "dq_done": plgpu.Barrier(num_arrivals=2),
        }

    def __call__(
        self, q_ref, k_ref, v_ref, do_ref, minus_lse_ref, minus_delta_ref, dq_ref, refs, dk_ref, dv_ref, **scratch: Any
    ) -> None:
        w = lax.axis_index("warpgroup")
        scratch["do_ready"] = scratch["q_ready"]  # a step waits once: every barrier costs a register
        consume = partial(self._consume, (k_ref, v_ref, dq_ref, dk_ref, dv_ref), refs, scratch, w)
        produce = partial(self.produce, q_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, scratch)
        pl.when(w < 2)(lambda: run_warpgroup("consumer", scratch, consume, REGISTERS))
        pl.when(w == 2)(lambda: run_warpgroup("producer", scratch, produce, REGISTERS))

    def _consume(self, tensors, refs, scratch, w, retry) -> None:
        k_ref, v_ref, dq_ref, dk_ref, dv_ref = tensors
        k_smem, v_smem = scratch["k_smem"].at[w], scratch["v_smem"].at[w]

        def fetch_operands(n) -> None:
            b, h_kv, i = self.tile_coordinates(refs, n)
            for source, target in ((k_ref, k_smem), (v_ref, v_smem)):
                tile_rows = source.at[batch_index(source, b), pl.ds(i * 128 + w * 64, 64), h_kv]
                plgpu.copy_gmem_to_smem(tile_rows, target, scratch["operands_ready"].at[w])

        def compute(n, first):
            b, h_kv, i = self.tile_coordinates(refs, n)
            start = i * 128 + w * 64
            rows = self.masks.rows(refs, b, start, 64)
            plgpu.barrier_wait(scratch["operands_ready"].at[w])
            if self.masks.mixed:
                self._zero_nonfinite_keys(scratch, w)

            def accumulate(dk_acc, dv_acc):
                def visit(h, bounds, t):
                    sums, tile = (dq_ref, dk_acc, dv_acc), (b, h, i)
                    step = self._step(refs, scratch, sums, w, tile, bounds.lo, rows, retry)
                    t = self.runs.loop(bounds, step, t)
                    visited = bounds.hi > bounds.lo
                    self._wait_ds(scratch, t, visited)
                    dq = mosaic.wait_for_product(self._dq_half(scratch, w, t - 1), 0)
                    self._add_to_dq(refs, scratch, dq_ref, dq, tile, bounds.hi - 1, w, visited, retry)
                    return t

                t = self.over_heads(refs, b, h_kv, i, first, visit)
                return t, dk_acc[...], dv_acc[...]

            acc = plgpu.ACC((64, self.dims.D), jnp.float32)
            blocks, dk, dv = pl.run_scoped(accumulate, acc, acc)
            if self.masks.mixed:  # weights of a zeroed key were wrong; its dk is nan where one of them counted
                flags = mosaic.load(self._key_flags(scratch, w), mosaic.ROW).astype(jnp.float32)
                dv += broadcast(jnp.where(flags == 0.0, 0.0, (dk * 0.0).sum(axis=1)), dv.shape, 0)
            # the other warpgroup's dq reads these keys, which dk is to replace
            plgpu.barrier_arrive(scratch["dq_done"])
            plgpu.barrier_wait(scratch["dq_done"])
            tile_rows = (b, pl.ds(start, 64), h_kv)
            return blocks, [(dk * self.logits.factor, k_smem, dk_ref.at[tile_rows]), (dv, v_smem, dv_ref.at[tile_rows])]

        consume_tiles(self.scheduler_in(refs), scratch, w, retry, fetch_operands, compute, separate_outputs=False)

    def _key_flags(self, scratch, w) -> Any:
        return flags_of(scratch, 2 * self.config.dkv_stages + w, 64)

    def _zero_nonfinite_keys(self, scratch, w) -> None:
        """Zero keys that are not finite, lest queries that must not see them get a nan from 0 * nan; those that see
        them get it from the values, which become nan in these rows: of them only dp is computed, row by row.
        """
        flags_ref = self._key_flags(scratch, w)
        zero_nonfinite(scratch["k_smem"].at[w], flags_ref)
        plgpu.commit_smem()
        flags = mosaic.load(flags_ref, mosaic.ROW)
        for column in range(0, self.dims.D, 64):
            columns = scratch["v_smem"].at[w, :, pl.ds(column, 64)]
            columns[...] = mosaic.load(columns, mosaic.WGMMA) + broadcast(flags, (64, 64), 0).astype(self.dtype)
        plgpu.commit_smem()

    def _wait_ds(self, scratch, t, exists) -> None:
        """Wait until both consumers have stored their ds of the step before t, if there was one."""
        pl.when(exists)(lambda: plgpu.barrier_wait(scratch["ds_ready"].at[lax.rem(t + 1, jnp.int32(2))]))

    def _dq_half(self, scratch, w, t) -> jax.Array:
        """Registers that will hold this consumer's half of ds^T k of step t when the products are done."""
        buffer, half = lax.rem(t + 2, jnp.int32(2)), pl.ds(w * 64, 64)

        def product(acc):
            for other in range(2):
                if self.block > 64:
                    ds, k = scratch["ds_smem"].at[buffer, other, :, half], scratch["k_smem"].at[other]
                else:
                    ds, k = scratch["ds_smem"].at[buffer, other], scratch["k_smem"].at[other, :, half]
                plgpu.wgmma(acc, ds.T, k)
            return mosaic.read_accumulator(acc, pending=None)

        return pl.run_scoped(product, plgpu.ACC(DQ_HALF, jnp.float32))

    def _add_to_dq(self, refs, scratch, dq_ref, dq, tile, n, w, exists, retry) -> None:
        """Add half of dq of the n-th block to what is in global memory."""
        b, h, _ = tile
        if self.block > 64:
            target = dq_ref.at[b, pl.ds(jnp.maximum(n, 0) * self.block + w * 64, 64), h]
        else:
            (span,) = self.spans(refs, tile, jnp.maximum(n, 0) if self.runs.listed else n)  # there is no entry -1
            target = dq_ref.at[b, span, h, pl.ds(w * 64, 64)]
        smem = scratch["dq_smem"].at[w]
        if retry is not False:  # the first attempt has added it
            exists = jnp.logical_and(exists, jnp.logical_not(retry))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem[...] = dq
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, target, predicate=exists, reduction_op="add")

    def _step(self, refs, scratch, sums, warpgroup, tile, lo, rows, retry) -> Callable[..., Any]:
        dq_ref, dk_acc, dv_acc = sums
        start, shape = tile[2] * 128 + warpgroup * 64, (64, self.block)

        def step(n, t, *, masked: MaskedRun):
            w = mosaic.not_hoisted(warpgroup)  # addresses in registers would spill more than fits the cache
            stage, buffer = (lax.rem(t, jnp.int32(size)) for size in (self.config.dkv_stages, 2))
            q_smem, do_smem = scratch["q_smem"].at[stage], scratch["do_smem"].at[stage]

            def issue(s_acc, dp_acc) -> jax.Array:
                plgpu.wgmma(s_acc, scratch["k_smem"].at[w], q_smem.T)
                plgpu.wgmma(dp_acc, scratch["v_smem"].at[w], do_smem.T)
                return self.minus_lse_of(scratch, stage, masked, retry)

            def recompute(x, minus_lse):
                keep = self.keep(refs, rows, tile, w, n, shape, masked)
                return self.weights(x, broadcast(minus_lse, shape, 1), keep)

            def minus_delta() -> jax.Array:
                return broadcast(mosaic.load(scratch["minus_delta"].at[stage], mosaic.COL), shape, 1)

            def finish(p, slope, dp) -> None:
                p = mosaic.compiler_barrier(p.astype(self.dtype))  # rounds pairs, where there is no mask
                plgpu.wgmma(dv_acc, p, do_smem)
                keep = self.keep(refs, rows, tile, w, mosaic.not_hoisted(n), shape, masked)
                ds = self.logits_gradient(mosaic.to_float32(p), dp(1), minus_delta(), slope, keep, None)
                if self.dims.S % self.rows:  # keys beyond the last are zeros, but their weights may be infinite
                    row = mosaic.tile_iota(shape, 0)
                    ds = jnp.where(row < self.dims.S - start, ds, jnp.zeros_like(ds))
                self._wait_ds(scratch, t, n > lo)
                scratch["ds_smem"].at[buffer, w][...] = ds
                plgpu.commit_smem()
                dq = self._dq_half(scratch, w, t - 1)
                plgpu.wgmma(dk_acc, ds, q_smem)
                dq = mosaic.wait_for_product(dq, 1)
                # only now: the other warpgroup may write over what this half of dq was made from
                plgpu.barrier_arrive(scratch["ds_ready"].at[buffer])
                self._add_to_dq(refs, scratch, dq_ref, dq, tile, n - 1, w, n > lo, retry)

            plgpu.barrier_wait(scratch["q_ready"].at[stage])
            self.overlapped_step(shape, minus_delta(), issue, recompute, finish)
            plgpu.barrier_arrive(scratch["free"].at[stage])
            return t + 1

        return step

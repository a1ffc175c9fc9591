"""Softmax attention on Hopper through Pallas Mosaic GPU. Backward: dq, then dk and dv, each owned by one program;
or all three in one kernel, see backward_fused.py.

In two kernels no sum crosses programs, so the gradients are the same bits every run. The price is seven matmuls instead
of five: logits and dp are computed once per kernel. Logits are recomputed in base 2 against the kept log-sum-exp.

dq: 128 queries a tile, 64 a consumer; keys and values stream through one ring of `dq_stages` stages, in the order
k0 v0 k1 v1 ..., so that an odd number of stages is of use (D256 has room for three).
Registers: dq D/2, logits and dp dq_block_k/2 each, ds in 16 bits dq_block_k/4. D64/128: 32+128+32,
D128/64: 64+64+16, D256/64: 128+64+16. Shared memory: 512*D bytes of queries and dout, 256*D of dq (up to D128; beyond,
it takes the queries' memory), 2*stages*block*D of the ring. D64/128/4: 32+16+64 KB, D128/64/6: 64+32+96,
D192/64/4: 96+96, D256/64/3: 128+96.

dk/dv: 128 keys a tile, 64 a consumer, both gradients in its registers: D + dkv_block_q (logits, dp) +
dkv_block_q/2 (weights and ds in 16 bits). D64/64: 64+64+32, D128/64: 128+64+32. A group's query heads are summed in
registers. Shared memory: keys and values, dk and dv, and `dkv_stages` of queries and dout; D128/64/2: 64 KB each.
Under a block pattern the two 64 need not be neighbours: they are sub-blocks that about as many queries visit.
Beyond D128 two gradients of 64 keys do not fit one warpgroup: `dkv_split` gives one warpgroup dv and the other dk of
the same 64 keys. The first computes the weights and hands them to the second through shared memory; each does two of
the four matmuls. D256/64: 128+32+16 and 128+32+32+16. Shared memory: keys and values (64 KB at D256), two stages of
queries and dout (128 KB), two buffers of weights (16 KB).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.softmax.gradients import output_cotangent, sink_gradient
from ejkernel.kernels.softmax.mosaic_gpu import private_mosaic as mosaic
from ejkernel.kernels.softmax.mosaic_gpu.backward_fused import fused_gradients
from ejkernel.kernels.softmax.mosaic_gpu.backward_tiles import Gradient, QueryLoop, logits_gradient
from ejkernel.kernels.softmax.mosaic_gpu.masks import batch_index, broadcast
from ejkernel.kernels.softmax.mosaic_gpu.retry import copy_block, flags_of, retry_scratch, with_flags
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import MaskedRun
from ejkernel.kernels.softmax.mosaic_gpu.tiles import (
    LOG2_E,
    is_masked,
    launch,
    pad_to_8,
    separate_outputs,
    swizzled_smem,
)
from ejkernel.kernels.softmax.mosaic_gpu.warpgroups import consume_tiles, drain, produce_tiles, run_warpgroup
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays

# tiles of the bias in flight for dq
BIAS_STAGES = 2


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Any) -> Arrays:
    """Gradients of query, key, value, sinks and bias."""
    dims = dimensions(call)
    q, k, v = (pad_to_8(call[name]) for name in ("query", "key", "value"))
    given, lse = output_cotangent(residuals, cotangents), residuals["lse"]
    dout = pad_to_8(given.astype(q.dtype))
    delta = jnp.einsum("bthd,bthd->bht", residuals["out"], given, preferred_element_type=jnp.float32)
    if "lse" in cotangents:
        delta -= cotangents["lse"].astype(jnp.float32)
    tensors = (q, k, v, dout, *_row_statistics(lse, delta, config))
    if config.fused:
        dq, dk, dv = fused_gradients(call, config, tensors)
    else:
        dq, (dk, dv) = _dq(call, config, tensors), _dkv(call, config, tensors)
    gradients = {"query": dq[:, : dims.T], "key": dk[:, : dims.S], "value": dv[:, : dims.S]}
    if "bias" in call:
        from ejkernel.kernels.softmax.triton import bias_gradient  # whose package is not needed for all else

        gradients["bias"] = bias_gradient(call, residuals, cotangents)
    return gradients | sink_gradient(call, jnp.where(lse == -jnp.inf, jnp.inf, lse), delta)


def _row_statistics(lse: jax.Array, delta: jax.Array, config: Any) -> tuple[jax.Array, jax.Array]:
    """What is added to logits and to dp, (B, H, whole tiles): minus the base-2 log-sum-exp, and minus delta.

    The former is -inf where a row sees nothing or lies beyond T: weight 0.
    """
    padding = ((0, 0), (0, 0), (0, -lse.shape[2] % math.lcm(128, config.dkv_block_q)))
    minus_lse = jnp.where(lse == -jnp.inf, -jnp.inf, lse * -LOG2_E)
    return jnp.pad(minus_lse, padding, constant_values=-jnp.inf), jnp.pad(-delta, padding)


def _dq(call: Call, config: Any, tensors: tuple[jax.Array, ...]) -> jax.Array:
    q = tensors[0]
    kernel = _QueryGradient.of(call, config, "q", 128, config.dq_block_k)
    run = launch(kernel, out_type=jax.ShapeDtypeStruct(q.shape, q.dtype), name="softmax_dq")
    return run(*tensors, kernel.operands(call))


def _dkv(call: Call, config: Any, tensors: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    kind, keys = (_SplitKeyGradient, 64) if config.dkv_split else (_KeyGradient, 128)
    kernel = kind.of(call, config, "k", keys, config.dkv_block_q)
    gradient = jax.ShapeDtypeStruct(tensors[1].shape, tensors[1].dtype)
    return launch(kernel, out_type=(gradient, gradient), name="softmax_dkv")(*tensors, kernel.operands(call))


class _QueryGradient(Gradient):
    """dq of 128 queries."""

    def scratch(self) -> dict[str, Any]:
        c, D = self.config, self.dims.D
        scratch = retry_scratch(self.masks.mixed, c.dq_stages, c.dq_block_k, self.sub_blocks_per_block) | {
            "q_smem": swizzled_smem((2, 64, D), self.dtype),
            "do_smem": swizzled_smem((2, 64, D), self.dtype),
            "kv_smem": swizzled_smem((c.dq_stages, c.dq_block_k, D), self.dtype),
            "operands_ready": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            "ready": plgpu.Barrier(num_arrivals=self.sub_blocks_per_block, num_barriers=c.dq_stages),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=c.dq_stages),
        }
        if self.bias_copied:
            scratch |= self.bias_scratch(BIAS_STAGES)
            scratch["bias_free"] = plgpu.Barrier(num_arrivals=2, num_barriers=BIAS_STAGES)
        return scratch | ({"dq_smem": swizzled_smem((2, 64, D), self.dtype)} if separate_outputs(D) else {})

    def __call__(
        self, q_ref, k_ref, v_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, dq_ref, **scratch: Any
    ) -> None:
        w = lax.axis_index("warpgroup")
        separate = separate_outputs(self.dims.D)

        def fetch_operands(n) -> None:
            b, h, i = self.tile_coordinates(refs, n)
            for source, target in ((q_ref, scratch["q_smem"]), (do_ref, scratch["do_smem"])):
                tile_rows = source.at[b, pl.ds(i * 128 + w * 64, 64), h]
                plgpu.copy_gmem_to_smem(tile_rows, target.at[w], scratch["operands_ready"].at[w])

        def compute(retry, n, blocks):
            b, h, i = self.tile_coordinates(refs, n)
            bounds = self.runs.bounds(refs, b, h, i)
            tile_rows = pl.ds(i * 128 + w * 64, 64)
            statistics = (
                mosaic.load(minus_lse_ref.at[b, h, tile_rows], mosaic.ROW),
                mosaic.load(minus_delta_ref.at[b, h, tile_rows], mosaic.ROW),
            )
            rows = self.masks.rows(refs, b, i * 128 + w * 64, 64)
            plgpu.barrier_wait(scratch["operands_ready"].at[w])

            def accumulate(dq_acc):
                step = self._step(refs, scratch, dq_acc, w, (b, h, i), blocks - bounds.lo, rows, statistics, retry)
                self.runs.loop(bounds, step, jnp.int32(0))
                return dq_acc[...]

            dq = pl.run_scoped(accumulate, plgpu.ACC((64, self.dims.D), jnp.float32)) * self.logits.factor
            smem = scratch["dq_smem" if separate else "q_smem"].at[w]
            return blocks + (bounds.hi - bounds.lo), [(dq, smem, dq_ref.at[b, tile_rows, h])]

        def consume(retry) -> None:
            body = partial(compute, retry)
            consume_tiles(self.scheduler_in(refs), scratch, w, retry, fetch_operands, body, separate_outputs=separate)

        pl.when(w < 2)(lambda: run_warpgroup("consumer", scratch, consume))
        pl.when(w == 2)(lambda: run_warpgroup("producer", scratch, partial(self._produce, k_ref, v_ref, refs, scratch)))

    def _produce(self, k_ref, v_ref, refs, scratch, retry) -> None:
        block, stages = self.config.dq_block_k, self.config.dq_stages

        def fill(nan_safe, n, blocks):
            b, h, i = self.tile_coordinates(refs, n)
            h_kv = lax.div(h, jnp.int32(self.dims.G))
            bounds = self.runs.bounds(refs, b, h, i)

            def copy(j, blocks):
                spans = self.spans(refs, (b, h, i), j)
                if self.bias_copied:
                    bias_stage = lax.rem(blocks, jnp.int32(BIAS_STAGES))
                    pl.when(blocks >= BIAS_STAGES)(lambda: plgpu.barrier_wait(scratch["bias_free"].at[bias_stage]))
                    self.copy_bias(refs, scratch, bias_stage, (b, h, i), spans)
                for which, source in enumerate((k_ref, v_ref)):
                    t = 2 * blocks + which
                    stage = lax.rem(t, jnp.int32(stages))
                    sources = [source.at[batch_index(source, b), span, h_kv] for span in spans]
                    pl.when(t >= stages)(lambda stage=stage: plgpu.barrier_wait(scratch["free"].at[stage]))
                    nan_flags = ()
                    if nan_safe and source is k_ref:
                        nan_flags = (is_masked(bounds, j), scratch["raw_ready"], flags_of(scratch, stage, block))
                    copy_block(sources, scratch["kv_smem"].at[stage], scratch["ready"].at[stage], *nan_flags)
                return blocks + 1

            return lax.fori_loop(bounds.lo, bounds.hi, copy, blocks)

        rings = {"free": 2} | ({"bias_free": 1} if self.bias_copied else {})
        produce_tiles(self.scheduler_in(refs), scratch, retry, rings, fill)

    def _step(self, refs, scratch, dq_acc, w, tile, blocks_before, rows, statistics, retry) -> Callable[..., Any]:
        block, stages = self.config.dq_block_k, self.config.dq_stages
        (minus_lse, minus_delta), shape = statistics, (64, block)
        bias_of = self.bias(refs, scratch, rows, tile, w)

        def step(i, carry, *, masked: MaskedRun):
            q_smem, do_smem = (scratch[name].at[self.warpgroup_in_loop(w)] for name in ("q_smem", "do_smem"))
            t = 2 * (i + blocks_before)
            k_stage, v_stage = lax.rem(t, jnp.int32(stages)), lax.rem(t + 1, jnp.int32(stages))
            k_smem, v_smem = scratch["kv_smem"].at[k_stage], scratch["kv_smem"].at[v_stage]

            def issue(s_acc, dp_acc) -> jax.Array:
                plgpu.barrier_wait(scratch["ready"].at[k_stage])
                plgpu.wgmma(s_acc, q_smem, k_smem.T)
                plgpu.barrier_wait(scratch["ready"].at[v_stage])
                plgpu.wgmma(dp_acc, do_smem, v_smem.T)
                return minus_lse

            def products(s_acc, dp_acc):
                issue(s_acc, dp_acc)
                keep = self.keep(refs, rows, tile, w, i, shape, masked)
                x = mosaic.read_accumulator(s_acc, pending=1)  # dp goes on while the weights are computed
                if masked and self.masks.mixed:
                    x = with_flags(x, scratch, (k_stage,), retry)
                bias_stage = lax.rem(i + blocks_before, jnp.int32(BIAS_STAGES))
                p, slope = self.weights(x, broadcast(minus_lse, shape, 0), keep, bias_of(bias_stage, i))
                if self.bias_copied:
                    plgpu.barrier_arrive(scratch["bias_free"].at[bias_stage])
                dp = self.apply_dropout(dp_acc[...], self.dropout_keep(refs, rows, tile, i, shape))
                plgpu.barrier_arrive(scratch["free"].at[v_stage])
                return logits_gradient(p, dp, broadcast(minus_delta, shape, 0), slope, keep).astype(self.dtype)

            def recompute(x, minus_lse):
                keep = self.keep(refs, rows, tile, w, i, shape, masked)
                if masked and self.masks.mixed:
                    x = with_flags(x, scratch, (k_stage,), retry)
                bias_stage = lax.rem(i + blocks_before, jnp.int32(BIAS_STAGES))
                weights_and_slope = self.weights(x, broadcast(minus_lse, shape, 0), keep, bias_of(bias_stage, i))
                if self.bias_copied:
                    plgpu.barrier_arrive(scratch["bias_free"].at[bias_stage])
                return weights_and_slope

            def finish(p, slope, dp) -> None:
                mosaic.compute_now(p, mosaic.WGMMA)
                keep = self.keep(refs, rows, tile, w, mosaic.not_hoisted(i), shape, masked)
                undropped, product = self.dropout_keep(refs, rows, tile, i, shape), dp(0)
                plgpu.barrier_arrive(scratch["free"].at[v_stage])
                ds = self.logits_gradient(p, product, broadcast(minus_delta, shape, 0), slope, keep, undropped)
                plgpu.wgmma(dq_acc, ds, k_smem)

            if mosaic.CAN_ACCUMULATE_INSIDE_STATE:
                self.overlapped_step(shape, broadcast(minus_delta, shape, 0), issue, recompute, finish)
            else:
                ds = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
                plgpu.wgmma(dq_acc, ds, k_smem)
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["free"].at[k_stage])
            return carry

        return step


class _KeyGradient(QueryLoop):
    """dk and dv of 128 keys, 64 in each consumer warpgroup."""

    halves_longest_first = True

    def scratch(self) -> dict[str, Any]:
        results = {"dk_smem": swizzled_smem((2, 64, self.dims.D), self.dtype)}
        results["dv_smem"] = results["dk_smem"]
        operands_ready = {"operands_ready": plgpu.Barrier(num_arrivals=2, num_barriers=2)}
        return self.ring_scratch((2, 64)) | operands_ready | (results if separate_outputs(self.dims.D) else {})

    def __call__(
        self, q_ref, k_ref, v_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, dk_ref, dv_ref, **scratch: Any
    ) -> None:
        w = lax.axis_index("warpgroup")
        D, separate = self.dims.D, separate_outputs(self.dims.D)

        def fetch_operands(n) -> None:
            b, h_kv, i = self.tile_coordinates(refs, n)
            start = self.start(refs, (b, h_kv, i), w)
            for source, target in ((k_ref, scratch["k_smem"]), (v_ref, scratch["v_smem"])):
                tile_rows = source.at[batch_index(source, b), pl.ds(start, 64), h_kv]
                plgpu.copy_gmem_to_smem(tile_rows, target.at[w], scratch["operands_ready"].at[w])

        def compute(retry, n, blocks):
            b, h_kv, i = self.tile_coordinates(refs, n)
            start = self.start(refs, (b, h_kv, i), w)
            rows = self.masks.rows(refs, b, start, 64)
            plgpu.barrier_wait(scratch["operands_ready"].at[w])

            def accumulate(dk_acc, dv_acc):
                step = partial(self._step, refs, scratch, dk_acc, dv_acc, w, rows, retry)
                return self.loop(refs, b, h_kv, i, blocks, step), dk_acc[...], dv_acc[...]

            acc = plgpu.ACC((64, D), jnp.float32)
            blocks, dk, dv = pl.run_scoped(accumulate, acc, acc)
            tile_rows = (b, pl.ds(start, 64), h_kv)
            return blocks, [
                (dk * self.logits.factor, scratch["dk_smem" if separate else "k_smem"].at[w], dk_ref.at[tile_rows]),
                (dv, scratch["dv_smem" if separate else "v_smem"].at[w], dv_ref.at[tile_rows]),
            ]

        def consume(retry) -> None:
            body = partial(compute, retry)
            consume_tiles(self.scheduler_in(refs), scratch, w, retry, fetch_operands, body, separate_outputs=separate)

        pl.when(w < 2)(lambda: run_warpgroup("consumer", scratch, consume))
        produce = partial(self.produce, q_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, scratch)
        pl.when(w == 2)(lambda: run_warpgroup("producer", scratch, produce))

    def _step(self, refs, scratch, dk_acc, dv_acc, w, rows, retry, tile) -> Callable[..., Any]:
        block, stages = self.config.dkv_block_q, self.config.dkv_stages
        shape = (64, block)  # keys by queries
        bias_of = self.bias(refs, scratch, rows, tile, w)

        def step(n, t, *, masked: MaskedRun):
            k_smem, v_smem = (scratch[name].at[self.warpgroup_in_loop(w)] for name in ("k_smem", "v_smem"))
            stage = lax.rem(t, jnp.int32(stages))
            q_smem, do_smem = scratch["q_smem"].at[stage], scratch["do_smem"].at[stage]

            def products(s_acc, dp_acc):
                plgpu.barrier_wait(scratch["q_ready"].at[stage])
                plgpu.wgmma(s_acc, k_smem, q_smem.T)
                plgpu.barrier_wait(scratch["do_ready"].at[stage])
                plgpu.wgmma(dp_acc, v_smem, do_smem.T)
                keep = self.keep(refs, rows, tile, w, n, shape, masked)
                minus_lse = broadcast(self.minus_lse_of(scratch, stage, masked, retry), shape, 1)
                x = mosaic.read_accumulator(s_acc, pending=1)
                p, slope = self.weights(x, minus_lse, keep, bias_of(stage, n))
                undropped = self.dropout_keep(refs, rows, tile, n, shape)
                dp = self.apply_dropout(dp_acc[...], undropped)
                minus_delta = broadcast(mosaic.load(scratch["minus_delta"].at[stage], mosaic.COL), shape, 1)
                ds = logits_gradient(p, dp, minus_delta, slope, keep)
                return self.apply_dropout(p, undropped).astype(self.dtype), ds.astype(self.dtype)

            def issue(s_acc, dp_acc) -> jax.Array:
                plgpu.wgmma(s_acc, k_smem, q_smem.T)
                plgpu.wgmma(dp_acc, v_smem, do_smem.T)
                return self.minus_lse_of(scratch, stage, masked, retry)

            def recompute(x, minus_lse):
                keep = self.keep(refs, rows, tile, w, n, shape, masked)
                return self.weights(x, broadcast(minus_lse, shape, 1), keep, bias_of(stage, n))

            def finish(p, slope, dp) -> None:
                undropped = self.dropout_keep(refs, rows, tile, n, shape)
                plgpu.wgmma(dv_acc, self.apply_dropout(p, undropped).astype(self.dtype), do_smem)
                keep = self.keep(refs, rows, tile, w, mosaic.not_hoisted(n), shape, masked)
                minus_delta = broadcast(mosaic.load(scratch["minus_delta"].at[stage], mosaic.COL), shape, 1)
                plgpu.wgmma(dk_acc, self.logits_gradient(p, dp(1), minus_delta, slope, keep, undropped), q_smem)

            def add() -> None:
                if mosaic.CAN_ACCUMULATE_INSIDE_STATE:
                    plgpu.barrier_wait(scratch["q_ready"].at[stage])
                    plgpu.barrier_wait(scratch["do_ready"].at[stage])
                    minus_delta = broadcast(mosaic.load(scratch["minus_delta"].at[stage], mosaic.COL), shape, 1)
                    self.overlapped_step(shape, minus_delta, issue, recompute, finish)
                    return
                p, ds = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
                plgpu.wgmma(dv_acc, p, do_smem)
                plgpu.wgmma(dk_acc, ds, q_smem)
                plgpu.wgmma_wait(0)

            def skip() -> None:
                plgpu.barrier_wait(scratch["q_ready"].at[stage])
                plgpu.barrier_wait(scratch["do_ready"].at[stage])
                if self.bias_copied:
                    plgpu.barrier_wait(scratch["bias_ready"].at[stage])

            if masked and self.runs.listed:  # these queries may see the other consumer's keys alone
                sees = self.half_sees(refs, tile, w, n)
                pl.when(sees)(add)
                pl.when(jnp.logical_not(sees))(skip)
            else:
                add()
            plgpu.barrier_arrive(scratch["free"].at[stage])
            return t + 1

        return step


class _SplitKeyGradient(QueryLoop):
    """dk and dv of 64 keys: warpgroup 0 sums dv, warpgroup 1 dk."""

    @property
    def consumers(self) -> int:
        return 2

    def scratch(self) -> dict[str, Any]:
        return self.ring_scratch((64,)) | {
            "p_smem": swizzled_smem((2, 64, self.config.dkv_block_q), self.dtype),
            "p_ready": plgpu.Barrier(num_barriers=2),
            "p_free": plgpu.Barrier(num_barriers=2),
            "operands_ready": plgpu.Barrier(num_barriers=2),
        }

    def __call__(
        self, q_ref, k_ref, v_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, dk_ref, dv_ref, **scratch: Any
    ) -> None:
        w = lax.axis_index("warpgroup")

        def consume(index, source, smem, target, step, factor, retry) -> None:
            """One gradient: `smem` holds the keys or values that only this consumer reads, and then the gradient."""

            def fetch_operands(n) -> None:
                b, h_kv, i = self.tile_coordinates(refs, n)
                tile_rows = source.at[batch_index(source, b), pl.ds(i * 64, 64), h_kv]
                plgpu.copy_gmem_to_smem(tile_rows, smem, scratch["operands_ready"].at[index])

            def compute(n, blocks):
                b, h_kv, i = self.tile_coordinates(refs, n)
                rows = self.masks.rows(refs, b, i * 64, 64) if index == 0 else {"start": i * 64}
                plgpu.barrier_wait(scratch["operands_ready"].at[index])

                def accumulate(acc):
                    return self.loop(refs, b, h_kv, i, blocks, partial(step, refs, scratch, acc, rows, retry)), acc[...]

                blocks, gradient = pl.run_scoped(accumulate, plgpu.ACC((64, self.dims.D), jnp.float32))
                return blocks, [(gradient * factor, smem, target.at[b, pl.ds(i * 64, 64), h_kv])]

            blocks = consume_tiles(
                self.scheduler_in(refs), scratch, index, retry, fetch_operands, compute, separate_outputs=False
            )
            if index == 0:
                drain(scratch["p_free"], blocks)

        values = partial(consume, 0, k_ref, scratch["k_smem"], dv_ref, self._value_step, 1.0)
        keys = partial(consume, 1, v_ref, scratch["v_smem"], dk_ref, self._key_step, self.logits.factor)
        pl.when(w == 0)(lambda: run_warpgroup("consumer", scratch, values))
        pl.when(w == 1)(lambda: run_warpgroup("consumer", scratch, keys))
        produce = partial(self.produce, q_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, scratch)
        pl.when(w == 2)(lambda: run_warpgroup("producer", scratch, produce))

    def _value_step(self, refs, scratch, dv_acc, rows, retry, tile) -> Callable[..., Any]:
        block, stages = self.config.dkv_block_q, self.config.dkv_stages
        shape = (64, block)
        bias_of = self.bias(refs, scratch, rows, tile, 0)

        def step(n, t, *, masked: MaskedRun):
            stage, buffer = lax.rem(t, jnp.int32(stages)), lax.rem(t, jnp.int32(2))

            def product(s_acc):
                plgpu.barrier_wait(scratch["q_ready"].at[stage])
                plgpu.wgmma(s_acc, scratch["k_smem"], scratch["q_smem"].at[stage].T)
                keep = self.keep(refs, rows, tile, 0, n, shape, masked)
                plgpu.barrier_wait(scratch["do_ready"].at[stage])
                minus_lse = broadcast(self.minus_lse_of(scratch, stage, masked, retry), shape, 1)
                p, slope = self.weights(s_acc[...], minus_lse, keep, bias_of(stage, n))
                if slope is None:
                    return p, p
                # the slope of a masked pair may be nan
                return p, p * (slope if keep is None else jnp.where(keep, slope, 0.0))

            p, sloped = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
            pl.when(t >= 2)(lambda: plgpu.barrier_wait(scratch["p_free"].at[buffer]))
            scratch["p_smem"].at[buffer][...] = sloped.astype(self.dtype)
            plgpu.barrier_arrive(scratch["p_ready"].at[buffer])
            undropped = self.dropout_keep(refs, rows, tile, n, shape)
            plgpu.wgmma(dv_acc, self.apply_dropout(p, undropped).astype(self.dtype), scratch["do_smem"].at[stage])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["free"].at[stage])
            return t + 1

        return step

    def _key_step(self, refs, scratch, dk_acc, rows, retry, tile) -> Callable[..., Any]:
        stages = self.config.dkv_stages
        shape = (64, self.config.dkv_block_q)

        def step(n, t, *, masked: MaskedRun):
            stage, buffer = lax.rem(t, jnp.int32(stages)), lax.rem(t, jnp.int32(2))

            def product(dp_acc):
                plgpu.barrier_wait(scratch["do_ready"].at[stage])
                plgpu.wgmma(dp_acc, scratch["v_smem"], scratch["do_smem"].at[stage].T)
                plgpu.barrier_wait(scratch["p_ready"].at[buffer])
                p = mosaic.load(scratch["p_smem"].at[buffer], mosaic.WGMMA).astype(jnp.float32)
                plgpu.barrier_arrive(scratch["p_free"].at[buffer])
                minus_delta = broadcast(mosaic.load(scratch["minus_delta"].at[stage], mosaic.COL), shape, 1)
                dp = self.apply_dropout(dp_acc[...], self.dropout_keep(refs, rows, tile, n, shape))
                # a weight of 0 is a masked one: what its value holds does not count
                return logits_gradient(p, dp, minus_delta, None, p != 0.0 if masked else None).astype(self.dtype)

            ds = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
            plgpu.barrier_wait(scratch["q_ready"].at[stage])
            plgpu.wgmma(dk_acc, ds, scratch["q_smem"].at[stage])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["free"].at[stage])
            return t + 1

        return step

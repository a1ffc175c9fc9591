"""Softmax attention on Hopper through Pallas Mosaic GPU. Backward: dq, then dk and dv, each owned by one program;
or all three in one kernel, see backward_fused.py.

In two kernels no sum crosses programs, so the gradients are the same bits every run. The price is seven matmuls instead
of five: logits and dp are computed once per kernel. Logits are recomputed in base 2 against the kept log-sum-exp.

dq: 128 queries a tile, 64 a warpgroup; keys and values stream through one ring of `dq_slots` slots, in the order
k0 v0 k1 v1 ..., so that an odd number of slots is of use (D256 has room for three).
Registers: dq D/2, logits and dp dq_block_k/2 each, ds in 16 bits dq_block_k/4. D64/128: 32+128+32,
D128/64: 64+64+16, D256/64: 128+64+16. Shared memory: 512*D bytes of queries and dout, 256*D of dq (up to D128; beyond,
it takes the queries' place), 2*slots*block*D of the ring. D64/128/4: 32+16+64 KB, D128/64/6: 64+32+96,
D192/64/4: 96+96, D256/64/3: 128+96.

dk/dv: 128 keys a tile, 64 a warpgroup, both gradients in its registers: D + dkv_block_q (logits, dp) +
dkv_block_q/2 (weights and ds in 16 bits). D64/64: 64+64+32, D128/64: 128+64+32. A group's query heads are summed in
registers. Shared memory: keys and values, dk and dv, and `dkv_stages` of queries and dout; D128/64/2: 64 KB each.
Under a block pattern the two 64 need not be neighbours: they are pieces that about as many queries visit.
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
from ejkernel.kernels.softmax.mosaic_gpu.backward_fused import fused_gradients
from ejkernel.kernels.softmax.mosaic_gpu.backward_tiles import Gradient, QueryLoop, logits_gradient
from ejkernel.kernels.softmax.mosaic_gpu.ptx import settle
from ejkernel.kernels.softmax.mosaic_gpu.retry import fetch, flags_of, retry_scratch, with_flags
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import Masked
from ejkernel.kernels.softmax.mosaic_gpu.tiles import (
    COL,
    LOG2_E,
    ROW,
    WGMMA,
    across,
    batch_index,
    launch,
    load,
    masked_block,
    padded_to_8,
    results_apart,
    tile_ref,
    unknown,
)
from ejkernel.kernels.softmax.mosaic_gpu.warpgroups import act, compute_tiles, copy_tiles, drain
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays

# tiles of the bias in flight for dq
BIAS_TILES = 2


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Any) -> Arrays:
    """Gradients of query, key, value, sinks and bias."""
    dims = dimensions(call)
    q, k, v = (padded_to_8(call[name]) for name in ("query", "key", "value"))
    given, lse = output_cotangent(residuals, cotangents), residuals["lse"]
    dout = padded_to_8(given.astype(q.dtype))
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
    return launch(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch=kernel.scratch(),
        programs=kernel.walk.programs,
        name="softmax_dq",
    )(*tensors, kernel.operands(call))


def _dkv(call: Call, config: Any, tensors: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    k = tensors[1]
    kind, keys = (_SplitKeyGradient, 64) if config.dkv_split else (_KeyGradient, 128)
    kernel = kind.of(call, config, "k", keys, config.dkv_block_q)
    return launch(
        kernel,
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(k.shape, k.dtype)),
        scratch=kernel.scratch(),
        programs=kernel.walk.programs,
        name="softmax_dkv",
    )(*tensors, kernel.operands(call))


class _QueryGradient(Gradient):
    """dq of 128 queries."""

    def scratch(self) -> dict[str, Any]:
        c, D = self.config, self.dims.D
        scratch = retry_scratch(self.masks.mixed, c.dq_slots, c.dq_block_k, self.parts) | {
            "q_smem": tile_ref((2, 64, D), self.dtype),
            "do_smem": tile_ref((2, 64, D), self.dtype),
            "kv_smem": tile_ref((c.dq_slots, c.dq_block_k, D), self.dtype),
            "own_ready": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            "ready": plgpu.Barrier(num_arrivals=self.parts, num_barriers=c.dq_slots),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=c.dq_slots),
        }
        if self.bias_copied:
            scratch |= self.bias_scratch(BIAS_TILES)
            scratch["bias_free"] = plgpu.Barrier(num_arrivals=2, num_barriers=BIAS_TILES)
        return scratch | ({"dq_smem": tile_ref((2, 64, D), self.dtype)} if results_apart(D) else {})

    def __call__(
        self, q_ref, k_ref, v_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, dq_ref, **scratch: Any
    ) -> None:
        w = lax.axis_index("warpgroup")
        apart = results_apart(self.dims.D)

        def fetch_own(n) -> None:
            b, h, i = self.place(refs, n)
            for source, target in ((q_ref, scratch["q_smem"]), (do_ref, scratch["do_smem"])):
                own_rows = source.at[b, pl.ds(i * 128 + w * 64, 64), h]
                plgpu.copy_gmem_to_smem(own_rows, target.at[w], scratch["own_ready"].at[w])

        def work(scrub, n, blocks):
            b, h, i = self.place(refs, n)
            row = self.runs.row(refs, b, h, i)
            own_rows = pl.ds(i * 128 + w * 64, 64)
            added = load(minus_lse_ref.at[b, h, own_rows], ROW), load(minus_delta_ref.at[b, h, own_rows], ROW)
            rows = self.masks.rows(refs, b, i * 128 + w * 64, 64)
            plgpu.barrier_wait(scratch["own_ready"].at[w])

            def sum_up(dq_acc):
                step = self._step(refs, scratch, dq_acc, w, (b, h, i), blocks - row[0], rows, added, scrub)
                self.runs.loop(row, step, jnp.int32(0))
                return dq_acc[...]

            dq = pl.run_scoped(sum_up, plgpu.ACC((64, self.dims.D), jnp.float32)) * self.logits.factor
            smem = scratch["dq_smem" if apart else "q_smem"].at[w]
            return blocks + (row[3] - row[0]), [(dq, smem, dq_ref.at[b, own_rows, h])]

        def compute(scrub) -> None:
            compute_tiles(self.walking(refs), scratch, w, scrub, fetch_own, partial(work, scrub), apart=apart)

        pl.when(w < 2)(lambda: act("compute", scratch, compute))
        pl.when(w == 2)(lambda: act("copy", scratch, partial(self._copy, k_ref, v_ref, refs, scratch)))

    def _copy(self, k_ref, v_ref, refs, scratch, scrub) -> None:
        block, slots = self.config.dq_block_k, self.config.dq_slots

        def feed(careful, n, blocks):
            b, h, i = self.place(refs, n)
            h_kv = lax.div(h, jnp.int32(self.dims.G))
            row = self.runs.row(refs, b, h, i)

            def copy(j, blocks):
                spans = self.spans(refs, (b, h, i), j)
                if self.bias_copied:
                    tile = lax.rem(blocks, jnp.int32(BIAS_TILES))
                    pl.when(blocks >= BIAS_TILES)(lambda: plgpu.barrier_wait(scratch["bias_free"].at[tile]))
                    self.fetch_bias(refs, scratch, tile, (b, h, i), spans)
                for which, source in enumerate((k_ref, v_ref)):
                    t = 2 * blocks + which
                    slot = lax.rem(t, jnp.int32(slots))
                    parts = [source.at[batch_index(source, b), span, h_kv] for span in spans]
                    pl.when(t >= slots)(lambda slot=slot: plgpu.barrier_wait(scratch["free"].at[slot]))
                    how = ()
                    if careful and source is k_ref:
                        how = (masked_block(row, j), scratch["raw"], flags_of(scratch, slot, block))
                    fetch(parts, scratch["kv_smem"].at[slot], scratch["ready"].at[slot], *how)
                return blocks + 1

            return lax.fori_loop(row[0], row[3], copy, blocks)

        rings = {"free": 2} | ({"bias_free": 1} if self.bias_copied else {})
        copy_tiles(self.walking(refs), scratch, scrub, rings, feed)

    def _step(self, refs, scratch, dq_acc, w, place, before, rows, added, scrub) -> Callable[..., Any]:
        block, slots = self.config.dq_block_k, self.config.dq_slots
        (minus_lse, minus_delta), shape = added, (64, block)
        bias_of = self.bias(refs, scratch, rows, place, w)

        def step(i, carry, *, masked: Masked):
            own_rows = [scratch[name].at[self.own_number(w)] for name in ("q_smem", "do_smem")]
            t = 2 * (i + before)
            k_slot, v_slot = lax.rem(t, jnp.int32(slots)), lax.rem(t + 1, jnp.int32(slots))
            k_smem, v_smem = scratch["kv_smem"].at[k_slot], scratch["kv_smem"].at[v_slot]

            def issue(s_acc, dp_acc) -> jax.Array:
                plgpu.barrier_wait(scratch["ready"].at[k_slot])
                plgpu.wgmma(s_acc, own_rows[0], k_smem.T)
                plgpu.barrier_wait(scratch["ready"].at[v_slot])
                plgpu.wgmma(dp_acc, own_rows[1], v_smem.T)
                return minus_lse

            def products(s_acc, dp_acc):
                issue(s_acc, dp_acc)
                keep = self.keep(refs, rows, place, w, i, shape, masked)
                x = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)  # dp goes on while the weights are computed
                if masked and self.masks.mixed:
                    x = with_flags(x, scratch, (k_slot,), scrub)
                tile = lax.rem(i + before, jnp.int32(BIAS_TILES))
                p, slope = self.weights(x, across(minus_lse, shape, 0), keep, bias_of(tile, i))
                if self.bias_copied:
                    plgpu.barrier_arrive(scratch["bias_free"].at[tile])
                dp = self.kept(dp_acc[...], self.stays(refs, rows, place, i, shape))
                plgpu.barrier_arrive(scratch["free"].at[v_slot])
                return logits_gradient(p, dp, across(minus_delta, shape, 0), slope, keep).astype(self.dtype)

            def weigh(x, minus_lse):
                keep = self.keep(refs, rows, place, w, i, shape, masked)
                if masked and self.masks.mixed:
                    x = with_flags(x, scratch, (k_slot,), scrub)
                tile = lax.rem(i + before, jnp.int32(BIAS_TILES))
                found = self.weights(x, across(minus_lse, shape, 0), keep, bias_of(tile, i))
                if self.bias_copied:
                    plgpu.barrier_arrive(scratch["bias_free"].at[tile])
                return found

            def finish(p, slope, dp) -> None:
                settle(p, WGMMA)
                keep = self.keep(refs, rows, place, w, unknown(i), shape, masked)
                stays, product = self.stays(refs, rows, place, i, shape), dp(0)
                plgpu.barrier_arrive(scratch["free"].at[v_slot])
                ds = self.logits_gradient(p, product, across(minus_delta, shape, 0), slope, keep, stays)
                plgpu.wgmma(dq_acc, ds, k_smem)

            if self.overlaps:
                self.beside(shape, across(minus_delta, shape, 0), issue, weigh, finish)
            else:
                ds = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
                plgpu.wgmma(dq_acc, ds, k_smem)
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["free"].at[k_slot])
            return carry

        return step


class _KeyGradient(QueryLoop):
    """dk and dv of 128 keys, 64 in each compute warpgroup."""

    alike = True

    def scratch(self) -> dict[str, Any]:
        results = {"dk_smem": tile_ref((2, 64, self.dims.D), self.dtype)}
        results["dv_smem"] = results["dk_smem"]
        own_ready = {"own_ready": plgpu.Barrier(num_arrivals=2, num_barriers=2)}
        return self.ring_scratch((2, 64)) | own_ready | (results if results_apart(self.dims.D) else {})

    def __call__(
        self, q_ref, k_ref, v_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, dk_ref, dv_ref, **scratch: Any
    ) -> None:
        w = lax.axis_index("warpgroup")
        D, apart = self.dims.D, results_apart(self.dims.D)

        def fetch_own(n) -> None:
            b, h_kv, i = self.place(refs, n)
            start = self.start(refs, (b, h_kv, i), w)
            for source, target in ((k_ref, scratch["k_smem"]), (v_ref, scratch["v_smem"])):
                own_rows = source.at[batch_index(source, b), pl.ds(start, 64), h_kv]
                plgpu.copy_gmem_to_smem(own_rows, target.at[w], scratch["own_ready"].at[w])

        def work(scrub, n, steps):
            b, h_kv, i = self.place(refs, n)
            start = self.start(refs, (b, h_kv, i), w)
            rows = self.masks.rows(refs, b, start, 64)
            plgpu.barrier_wait(scratch["own_ready"].at[w])

            def sum_up(dk_acc, dv_acc):
                step = partial(self._step, refs, scratch, dk_acc, dv_acc, w, rows, scrub)
                return self.loop(refs, b, h_kv, i, steps, step), dk_acc[...], dv_acc[...]

            acc = plgpu.ACC((64, D), jnp.float32)
            steps, dk, dv = pl.run_scoped(sum_up, acc, acc)
            own_rows = (b, pl.ds(start, 64), h_kv)
            return steps, [
                (dk * self.logits.factor, scratch["dk_smem" if apart else "k_smem"].at[w], dk_ref.at[own_rows]),
                (dv, scratch["dv_smem" if apart else "v_smem"].at[w], dv_ref.at[own_rows]),
            ]

        def compute(scrub) -> None:
            compute_tiles(self.walking(refs), scratch, w, scrub, fetch_own, partial(work, scrub), apart=apart)

        pl.when(w < 2)(lambda: act("compute", scratch, compute))
        pl.when(w == 2)(
            lambda: act(
                "copy", scratch, partial(self.copy, q_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, scratch)
            )
        )

    def _step(self, refs, scratch, dk_acc, dv_acc, w, rows, scrub, place) -> Callable[..., Any]:
        block, stages = self.config.dkv_block_q, self.config.dkv_stages
        shape = (64, block)  # keys by queries
        bias_of = self.bias(refs, scratch, rows, place, w)

        def step(n, t, *, masked: Masked):
            own_rows = [scratch[name].at[self.own_number(w)] for name in ("k_smem", "v_smem")]
            slot = lax.rem(t, jnp.int32(stages))
            q_smem, do_smem = scratch["q_smem"].at[slot], scratch["do_smem"].at[slot]

            def products(s_acc, dp_acc):
                plgpu.barrier_wait(scratch["q_ready"].at[slot])
                plgpu.wgmma(s_acc, own_rows[0], q_smem.T)
                plgpu.barrier_wait(scratch["do_ready"].at[slot])
                plgpu.wgmma(dp_acc, own_rows[1], do_smem.T)
                keep = self.keep(refs, rows, place, w, n, shape, masked)
                minus_lse = across(self.minus_log_sums(scratch, slot, masked, scrub), shape, 1)
                x = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                p, slope = self.weights(x, minus_lse, keep, bias_of(slot, n))
                stays = self.stays(refs, rows, place, n, shape)
                dp = self.kept(dp_acc[...], stays)
                minus_delta = across(load(scratch["minus_delta"].at[slot], COL), shape, 1)
                ds = logits_gradient(p, dp, minus_delta, slope, keep)
                return self.kept(p, stays).astype(self.dtype), ds.astype(self.dtype)

            def issue(s_acc, dp_acc) -> jax.Array:
                plgpu.wgmma(s_acc, own_rows[0], q_smem.T)
                plgpu.wgmma(dp_acc, own_rows[1], do_smem.T)
                return self.minus_log_sums(scratch, slot, masked, scrub)

            def weigh(x, minus_lse):
                keep = self.keep(refs, rows, place, w, n, shape, masked)
                return self.weights(x, across(minus_lse, shape, 1), keep, bias_of(slot, n))

            def finish(p, slope, dp) -> None:
                stays = self.stays(refs, rows, place, n, shape)
                plgpu.wgmma(dv_acc, self.kept(p, stays).astype(self.dtype), do_smem)
                keep = self.keep(refs, rows, place, w, unknown(n), shape, masked)
                minus_delta = across(load(scratch["minus_delta"].at[slot], COL), shape, 1)
                plgpu.wgmma(dk_acc, self.logits_gradient(p, dp(1), minus_delta, slope, keep, stays), q_smem)

            def add() -> None:
                if self.overlaps:
                    plgpu.barrier_wait(scratch["q_ready"].at[slot])
                    plgpu.barrier_wait(scratch["do_ready"].at[slot])
                    minus_delta = across(load(scratch["minus_delta"].at[slot], COL), shape, 1)
                    self.beside(shape, minus_delta, issue, weigh, finish)
                    return
                p, ds = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
                plgpu.wgmma(dv_acc, p, do_smem)
                plgpu.wgmma(dk_acc, ds, q_smem)
                plgpu.wgmma_wait(0)

            def pass_over() -> None:
                plgpu.barrier_wait(scratch["q_ready"].at[slot])
                plgpu.barrier_wait(scratch["do_ready"].at[slot])
                if self.bias_copied:
                    plgpu.barrier_wait(scratch["bias_ready"].at[slot])

            if masked and self.runs.listed:  # these queries may see the other warpgroup's keys alone
                shown = self.shown(refs, place, w, n)
                pl.when(shown)(add)
                pl.when(jnp.logical_not(shown))(pass_over)
            else:
                add()
            plgpu.barrier_arrive(scratch["free"].at[slot])
            return t + 1

        return step


class _SplitKeyGradient(QueryLoop):
    """dk and dv of 64 keys: warpgroup 0 sums dv, warpgroup 1 dk."""

    def scratch(self) -> dict[str, Any]:
        return self.ring_scratch((64,)) | {
            "p_smem": tile_ref((2, 64, self.config.dkv_block_q), self.dtype),
            "p_ready": plgpu.Barrier(num_barriers=2),
            "p_free": plgpu.Barrier(num_barriers=2),
            "own_ready": plgpu.Barrier(num_barriers=2),
        }

    def __call__(
        self, q_ref, k_ref, v_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, dk_ref, dv_ref, **scratch: Any
    ) -> None:
        w = lax.axis_index("warpgroup")

        def compute(index, source, smem, target, step, factor, scrub) -> None:
            """One gradient: `smem` holds the keys or values only this warpgroup reads, and at the end the result."""

            def fetch_own(n) -> None:
                b, h_kv, i = self.place(refs, n)
                own_rows = source.at[batch_index(source, b), pl.ds(i * 64, 64), h_kv]
                plgpu.copy_gmem_to_smem(own_rows, smem, scratch["own_ready"].at[index])

            def work(n, steps):
                b, h_kv, i = self.place(refs, n)
                rows = self.masks.rows(refs, b, i * 64, 64) if index == 0 else {"start": i * 64}
                plgpu.barrier_wait(scratch["own_ready"].at[index])

                def sum_up(acc):
                    return self.loop(refs, b, h_kv, i, steps, partial(step, refs, scratch, acc, rows, scrub)), acc[...]

                steps, gradient = pl.run_scoped(sum_up, plgpu.ACC((64, self.dims.D), jnp.float32))
                return steps, [(gradient * factor, smem, target.at[b, pl.ds(i * 64, 64), h_kv])]

            steps = compute_tiles(self.walking(refs), scratch, index, scrub, fetch_own, work, apart=False)
            if index == 0:
                drain(scratch["p_free"], steps)

        values = partial(compute, 0, k_ref, scratch["k_smem"], dv_ref, self._value_step, 1.0)
        keys = partial(compute, 1, v_ref, scratch["v_smem"], dk_ref, self._key_step, self.logits.factor)
        pl.when(w == 0)(lambda: act("compute", scratch, values))
        pl.when(w == 1)(lambda: act("compute", scratch, keys))
        pl.when(w == 2)(
            lambda: act(
                "copy", scratch, partial(self.copy, q_ref, do_ref, minus_lse_ref, minus_delta_ref, refs, scratch)
            )
        )

    def _value_step(self, refs, scratch, dv_acc, rows, scrub, place) -> Callable[..., Any]:
        block, stages = self.config.dkv_block_q, self.config.dkv_stages
        shape = (64, block)
        bias_of = self.bias(refs, scratch, rows, place, 0)

        def step(n, t, *, masked: Masked):
            slot, buffer = lax.rem(t, jnp.int32(stages)), lax.rem(t, jnp.int32(2))

            def product(s_acc):
                plgpu.barrier_wait(scratch["q_ready"].at[slot])
                plgpu.wgmma(s_acc, scratch["k_smem"], scratch["q_smem"].at[slot].T)
                keep = self.keep(refs, rows, place, 0, n, shape, masked)
                plgpu.barrier_wait(scratch["do_ready"].at[slot])
                minus_lse = across(self.minus_log_sums(scratch, slot, masked, scrub), shape, 1)
                p, slope = self.weights(s_acc[...], minus_lse, keep, bias_of(slot, n))
                if slope is None:
                    return p, p
                # the slope of a masked pair may be nan
                return p, p * (slope if keep is None else jnp.where(keep, slope, 0.0))

            p, sloped = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
            pl.when(t >= 2)(lambda: plgpu.barrier_wait(scratch["p_free"].at[buffer]))
            scratch["p_smem"].at[buffer][...] = sloped.astype(self.dtype)
            plgpu.barrier_arrive(scratch["p_ready"].at[buffer])
            stays = self.stays(refs, rows, place, n, shape)
            plgpu.wgmma(dv_acc, self.kept(p, stays).astype(self.dtype), scratch["do_smem"].at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["free"].at[slot])
            return t + 1

        return step

    def _key_step(self, refs, scratch, dk_acc, rows, scrub, place) -> Callable[..., Any]:
        stages = self.config.dkv_stages
        shape = (64, self.config.dkv_block_q)

        def step(n, t, *, masked: Masked):
            slot, buffer = lax.rem(t, jnp.int32(stages)), lax.rem(t, jnp.int32(2))

            def product(dp_acc):
                plgpu.barrier_wait(scratch["do_ready"].at[slot])
                plgpu.wgmma(dp_acc, scratch["v_smem"], scratch["do_smem"].at[slot].T)
                plgpu.barrier_wait(scratch["p_ready"].at[buffer])
                p = load(scratch["p_smem"].at[buffer], WGMMA).astype(jnp.float32)
                plgpu.barrier_arrive(scratch["p_free"].at[buffer])
                minus_delta = across(load(scratch["minus_delta"].at[slot], COL), shape, 1)
                dp = self.kept(dp_acc[...], self.stays(refs, rows, place, n, shape))
                # a weight of 0 is a masked one: what its value holds does not count
                return logits_gradient(p, dp, minus_delta, None, p != 0.0 if masked else None).astype(self.dtype)

            ds = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
            plgpu.barrier_wait(scratch["q_ready"].at[slot])
            plgpu.wgmma(dk_acc, ds, scratch["q_smem"].at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["free"].at[slot])
            return t + 1

        return step

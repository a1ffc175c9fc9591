"""The forward kernel of Mosaic GPU: output and log-sum-exp, 64 queries a consumer; see mosaic_gpu for its budgets."""

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.softmax.mosaic_gpu import private_mosaic as mosaic
from ejkernel.kernels.softmax.mosaic_gpu.masks import batch_index, broadcast
from ejkernel.kernels.softmax.mosaic_gpu.retry import copy_block, flags_of, retry_scratch, with_flags
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import Bounds, Coordinates, MaskedRun
from ejkernel.kernels.softmax.mosaic_gpu.tiles import (
    LOG2_E,
    Kernel,
    is_masked,
    launch,
    pad_to_8,
    separate_outputs,
    swizzled_smem,
    zeros,
)
from ejkernel.kernels.softmax.mosaic_gpu.warpgroups import consume_tiles, produce_tiles, run_warpgroup
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays

LN_2 = 0.6931471805599453
# The running maximum starts here, not at -inf: a masked logit (-inf) minus it is -inf, never inf - inf.
INITIAL_MAX = -3e38
# Running sums are kept by column modulo this: those of one thread, which are added to others' at the end of a tile.
SUM_COLUMNS = 8
# Sums beyond this are no result, and call for another attempt: their inverse may be too small for a number.
MAX_SUM = 2.0**125
# So do sums beyond this that are rescaled to a later maximum: the factor would be 0 for all but much smaller sums.
MAX_SUM_TO_RESCALE = 2.0**64
# By how much (base 2) logits may pass the running maximum before sums are rescaled to a new one: weights are up to 2^8.
RESCALE_THRESHOLD = 8.0


def forward(call: Call, config: Any) -> Arrays:
    """Output and log-sum-exp."""
    q, k, v = (pad_to_8(call[name]) for name in ("query", "key", "value"))
    dims = dimensions(call)
    rows = 64 * config.warpgroups
    kernel = _Forward.of(call, config, "q", rows, config.block_k)
    operands = kernel.operands(call)
    if "sinks" in call:
        operands["sinks"] = call["sinks"]
    lse_type = jax.ShapeDtypeStruct((dims.B, dims.H, -(-dims.T // rows) * rows), jnp.float32)
    run = launch(kernel, out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), lse_type), name="softmax_forward")
    out, lse = run(q, k, v, operands)
    return {"out": out[:, : dims.T], "lse": lse[:, :, : dims.T]}


class _Forward(Kernel):
    """Output and log-sum-exp of a tile, 64 queries a consumer warpgroup.

    A warpgroup does the softmax of a block while it multiplies the previous one's weights with their values: a step
    issues the logits of block i and the values of block i - 1, and both are done at its end.
    """

    @property
    def assume_running_max(self) -> bool:
        """Whether a first attempt takes the maxima of a row's first blocks for those of all.

        Weights are too large for their sums only if a logit passes those maxima by far (base 2: by 125, less the
        logarithm of how many do and of their values, or by 64 where other maxima follow): the result is then nan, and
        computed again with an online softmax. This cannot begin before every row has seen something.
        """
        return self.bias_extent == "" and bool(self.dtype == jnp.bfloat16)

    @property
    def all_rows_see_first_block(self) -> bool:
        """Whether every row sees something of the first block that its tile visits, or nothing at all."""
        m = self.masks
        return not (m.lower or m.segments or m.positions or m.halves or m.dense != "")

    @property
    def ping_pong(self) -> bool:
        """Whether consumers issue products one after the other, which pays where these are most of a step."""
        return self.dims.D > 128

    def scratch(self) -> dict[str, Any]:
        c, D, consumers, mixed = self.config, self.dims.D, self.consumers, self.masks.mixed
        copies = self.sub_blocks_per_block
        scratch = retry_scratch(
            mixed or self.assume_running_max, c.stages if mixed else 0, c.block_k, copies, consumers
        ) | {
            "q_smem": swizzled_smem((consumers, 64, D), self.dtype),
            "k_smem": swizzled_smem((c.stages, c.block_k, D), self.dtype),
            "v_smem": swizzled_smem((c.stages, c.block_k, D), self.dtype),
            "lse_smem": plgpu.SMEM((consumers, 64), jnp.float32),
            "q_ready": plgpu.Barrier(num_barriers=consumers),
            "k_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=c.stages),
            "v_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=c.stages),
            "k_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=c.stages),
            "v_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=c.stages),
        }
        if self.ping_pong:
            scratch["ping_pong"] = plgpu.Barrier(num_barriers=consumers)
        scratch |= self.bias_scratch(c.stages)
        return scratch | ({"out_smem": swizzled_smem((consumers, 64, D), self.dtype)} if separate_outputs(D) else {})

    def __call__(self, q_ref, k_ref, v_ref, refs, out_ref, lse_ref, **scratch: Any) -> None:
        w = lax.axis_index("warpgroup")
        consume = partial(self._consume, q_ref, refs, out_ref, lse_ref, scratch, w)
        registers = (160, 32) if self.consumers == 3 else (232, 40)
        pl.when(w < self.consumers)(lambda: run_warpgroup("consumer", scratch, consume, registers))
        produce = partial(self._produce, k_ref, v_ref, refs, scratch)
        pl.when(w == self.consumers)(lambda: run_warpgroup("producer", scratch, produce, registers))

    def _produce(self, k_ref, v_ref, refs, scratch, retry) -> None:
        block_k, stages = self.config.block_k, self.config.stages

        def fill(nan_safe, n, blocks):
            b, h, i = self.tile_coordinates(refs, n)
            h_kv = lax.div(h, jnp.int32(self.dims.G))
            bounds = self.runs.bounds(refs, b, h, i)

            def copy(j, t):
                stage = lax.rem(t, jnp.int32(stages))
                spans = self.spans(refs, (b, h, i), j)  # read before the stage is free
                at = [(batch_index(k_ref, b), span, h_kv) for span in spans]
                pl.when(t >= stages)(lambda: plgpu.barrier_wait(scratch["k_free"].at[stage]))
                copy_block([k_ref.at[rows] for rows in at], scratch["k_smem"].at[stage], scratch["k_ready"].at[stage])
                self.copy_bias(refs, scratch, stage, (b, h, i), spans)
                pl.when(t >= stages)(lambda: plgpu.barrier_wait(scratch["v_free"].at[stage]))
                nan_flags = ()
                if nan_safe:
                    nan_flags = (is_masked(bounds, j), scratch["raw_ready"], flags_of(scratch, stage, block_k))
                values = [v_ref.at[rows] for rows in at]
                copy_block(values, scratch["v_smem"].at[stage], scratch["v_ready"].at[stage], *nan_flags)
                return t + 1

            return lax.fori_loop(bounds.lo, bounds.hi, copy, blocks)

        rings, mixed = {"k_free": 1, "v_free": 1}, self.masks.mixed
        produce_tiles(self.scheduler_in(refs), scratch, retry, rings, fill, self.consumers, zeroes_nonfinite=mixed)

    def _consume(self, q_ref, refs, out_ref, lse_ref, scratch, w, retry) -> None:
        separate = separate_outputs(self.dims.D)
        q_smem = scratch["q_smem"].at[w]

        def fetch_queries(n: Any) -> None:
            b, h, i = self.tile_coordinates(refs, n)
            query_rows = pl.ds(i * self.rows + w * 64, 64)
            plgpu.copy_gmem_to_smem(q_ref.at[b, query_rows, h], q_smem, scratch["q_ready"].at[w])

        def compute(n, blocks):
            b, h, i = self.tile_coordinates(refs, n)
            start = i * self.rows + w * 64
            bounds = self.runs.bounds(refs, b, h, i)
            rows = self.masks.rows(refs, b, start, 64)
            plgpu.barrier_wait(scratch["q_ready"].at[w])
            acc, m, l = self._loop_over_keys(refs, scratch, w, n, rows, (b, h, i), bounds, blocks, retry)
            m, l, correction = self._with_sinks(refs, b, h, m, l.sum(axis=1))
            empty = l == 0.0
            divisor = jnp.where(l > MAX_SUM, jnp.nan, l * (1.0 - self.dropout))
            acc *= broadcast(jnp.where(empty, 0.0, correction / divisor), acc.shape, 0)
            lse = jnp.where(empty, -jnp.inf, m * LN_2 + jnp.log(l))
            query_rows = pl.ds(start, 64)
            return blocks + (bounds.hi - bounds.lo), [
                (acc, scratch["out_smem"].at[w] if separate else q_smem, out_ref.at[b, query_rows, h]),
                (lse, scratch["lse_smem"].at[w], lse_ref.at[b, h, query_rows]),
            ]

        scheduler = self.scheduler_in(refs)
        consume_tiles(scheduler, scratch, w, retry, fetch_queries, compute, separate_outputs=separate)

    def _steps(self, bounds: tuple[Any, ...], step, carry) -> Any:
        """carry after all blocks of a tile but its first."""
        if self.all_rows_see_first_block or not self.assume_running_max:
            return self.runs.loop(bounds, partial(step, assume_running_max=self.assume_running_max), carry)
        for first, last, masked in self.runs.present(bounds):
            online = partial(step, masked=masked, assume_running_max=False)
            if masked:
                carry = lax.fori_loop(first, last, online, carry)
                continue
            second = jnp.minimum(first + 1, last)  # a block without a mask shows all rows something
            carry = lax.fori_loop(first, second, online, carry)
            assuming = partial(step, masked=masked, assume_running_max=True)
            acc, m, l, p = lax.fori_loop(second, last, assuming, carry)
            carry = acc, m, _rescalable(l), p
        return carry

    def _with_sinks(self, refs, b, h, m, l) -> tuple[jax.Array, jax.Array, jax.Array | float]:
        """Running maxima (base 2) and sums with a head's sinks, and the factor that rescales the old sums.

        Sinks come last: were they the first maximum, a row's largest weight would be rounded, which else is 1.
        """
        if "sinks" not in refs:
            return m, l, 1.0
        sink = refs["sinks"][batch_index(refs["sinks"], b), h] * LOG2_E
        new_max = jnp.maximum(m, sink)
        correction = jnp.exp2(m - new_max)
        return new_max, _rescalable(l) * correction + jnp.exp2(sink - new_max), correction

    def _new_maxima(self, x, factor, m) -> tuple[jax.Array, jax.Array]:
        """Maxima of logits x * factor and of all before them, and the factors that rescale the old sums."""
        new_max = mosaic.row_max(_fold_columns(jnp.maximum, x)) * factor
        threshold = 0.0 if self.bias_extent else RESCALE_THRESHOLD  # `at_most_zero` clips what passes the maximum
        new_max = jnp.where(new_max - m <= threshold, m, new_max)  # a nan stays a nan
        return new_max, jnp.exp2(m - new_max)

    def _loop_over_keys(
        self, refs, scratch, w, n, rows, tile: Coordinates, bounds: Bounds, blocks, retry
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sums of weighted values, running maxima (base 2) and sums of 64 queries over all blocks of a tile."""
        stages, shape = jnp.int32(self.config.stages), (64, self.block)
        q, mixed = scratch["q_smem"].at[w], self.masks.mixed
        bias_of = self.bias(refs, scratch, rows, tile, w)

        def stage_of(i):
            return lax.rem(i + (blocks - bounds.lo), stages)

        def wait_for_values(stage) -> None:
            wait = partial(plgpu.barrier_wait, scratch["v_ready"].at[stage])
            pl.when(jnp.logical_not(retry))(wait) if mixed else wait()

        def with_nan_flags(i, stage, masked: MaskedRun, weights):
            """Weights of values that were made finite, with their flags. The mask is made again, which is rare."""
            plgpu.barrier_wait(scratch["v_ready"].at[stage])
            if not masked:
                return weights
            # not_hoisted: else the first mask would be kept until here
            keep = self.keep(refs, rows, tile, w, mosaic.not_hoisted(i), shape, masked)
            made_finite = is_masked(bounds, i)  # which a first block need not be
            return jnp.where(keep, with_flags(weights, scratch, (stage,), made_finite), 0.0)

        def online_softmax(x, i, stage, m, l, *, masked: MaskedRun, assume_running_max: bool):
            """Of block i, whose logits are done: new maxima and sums, weights, and factors for the old sums."""
            keep = self.keep(refs, rows, tile, w, i, shape, masked)
            x, factor, _ = self.logits.base2(x, bias_of(stage, i))
            plgpu.barrier_arrive(scratch["k_free"].at[stage])
            if keep is not None:
                x = jnp.where(keep, x, -jnp.inf)
            if assume_running_max:
                new_max, correction = lax.cond(
                    retry, lambda: self._new_maxima(x, factor, m), lambda: (m, zeros((64,), mosaic.ROW) + 1.0)
                )
            else:
                new_max, correction = self._new_maxima(x, factor, m)
            p = jnp.exp2(self.at_most_zero(x * factor - broadcast(new_max, shape, 0)))
            l = l * broadcast(correction, l.shape, 0) + _fold_columns(operator.add, p)
            undropped = self.dropout_keep(refs, rows, tile, i, shape)
            weights = p if undropped is None else jnp.where(undropped, p, 0.0)
            if mixed:
                weights = lax.cond(retry, partial(with_nan_flags, i, stage, masked), lambda weights: weights, weights)
            return mosaic.compiler_barrier((new_max, l, weights, correction))

        def prologue(i, carry):
            (acc, m, l, _), stage = carry, stage_of(i)
            plgpu.barrier_wait(scratch["k_ready"].at[stage])

            def logits(x_acc):
                plgpu.wgmma(x_acc, q, scratch["k_smem"].at[stage].T)
                return x_acc[...]

            x = pl.run_scoped(logits, plgpu.ACC(shape, jnp.float32))
            masked = "before" if self.runs.masked else ""
            m, l, p, _ = online_softmax(x, i, stage, m, l, masked=masked, assume_running_max=False)
            return acc, m, l, p.astype(self.dtype)

        def step(i, carry, *, masked: MaskedRun, assume_running_max: bool):
            acc, m, l, p = carry
            stage, previous = stage_of(i), stage_of(i - 1)
            plgpu.barrier_wait(scratch["k_ready"].at[stage])
            if self.ping_pong:
                plgpu.barrier_wait(scratch["ping_pong"].at[w])

            def products(state):
                acc_ref, m_ref, l_ref, x_ref, correction_ref = state

                def issue(x_acc):
                    plgpu.wgmma(x_acc, q, scratch["k_smem"].at[stage].T)
                    wait_for_values(previous)
                    plgpu.wgmma(acc_ref, p, scratch["v_smem"].at[previous])
                    if self.ping_pong:
                        plgpu.barrier_arrive(scratch["ping_pong"].at[lax.rem(w + 1, jnp.int32(self.consumers))])
                    return mosaic.read_accumulator(x_acc, pending=1)

                x = mosaic.compiler_barrier(pl.run_scoped(issue, plgpu.ACC(shape, jnp.float32)))
                m_ref[...], sums, x_ref[...], correction_ref[...] = online_softmax(
                    x, i, stage, m, l, masked=masked, assume_running_max=assume_running_max
                )
                mosaic.compute_now(sums, mosaic.WGMMA)
                l_ref[...] = sums

            state: Any = mosaic.accumulator_from(acc), m, l, zeros(shape), zeros((64,), mosaic.ROW)
            acc, m, l, x, correction = pl.run_state(products)(state)
            plgpu.barrier_arrive(scratch["v_free"].at[previous])
            # only now: registers of a product's operand must not change while it runs
            acc = mosaic.rescale_if(acc, correction, retry) if assume_running_max else mosaic.rescale(acc, correction)
            return acc, m, l, x.astype(self.dtype)

        def epilogue(i, carry):
            (acc, m, l, p), stage = carry, stage_of(i)
            wait_for_values(stage)
            state: Any = mosaic.accumulator_from(acc)
            acc = pl.run_state(lambda acc: plgpu.wgmma(acc, p, scratch["v_smem"].at[stage]))(state)
            plgpu.barrier_arrive(scratch["v_free"].at[stage])
            return acc, m, l, p

        def unless_empty(i, body, carry):
            if self.runs.never_empty:
                return body(i, carry)
            return lax.fori_loop(i, jnp.minimum(i + 1, bounds.hi), body, carry)

        if self.ping_pong:  # the last consumer lets the first one begin
            begins = jnp.logical_and(w == self.consumers - 1, n == 0)
            pl.when(begins)(lambda: plgpu.barrier_arrive(scratch["ping_pong"].at[0]))
        no_weights = plgpu.layout_cast(jnp.zeros(shape, self.dtype), mosaic.WGMMA)
        maxima = plgpu.layout_cast(jnp.full((64,), INITIAL_MAX, jnp.float32), mosaic.ROW)
        carry = (zeros((64, self.dims.D)), maxima, zeros((64, SUM_COLUMNS)), no_weights)
        carry = unless_empty(bounds.lo, prologue, carry)
        unmasked = (lax.max(jnp.int32(i), jnp.int32(bounds.lo + 1)) for i in (bounds.full_lo, bounds.full_hi))
        carry = self._steps((bounds.lo + 1, *unmasked, bounds.hi), step, carry)
        if self.ping_pong:  # and what the last one hands on at the end is for nobody
            ends = jnp.logical_and(w == 0, n == self.scheduler_in(refs).count() - 1)
            pl.when(ends)(lambda: plgpu.barrier_wait(scratch["ping_pong"].at[0]))
        return unless_empty(lax.max(jnp.int32(bounds.hi - 1), jnp.int32(bounds.lo)), epilogue, carry)[:3]


def _rescalable(l: jax.Array) -> jax.Array:
    """Running sums that may be rescaled to a later maximum; nan for those that are too large."""
    return jnp.where(l > MAX_SUM_TO_RESCALE, jnp.nan, l)


def _fold_columns(join: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """A tile's columns joined by their number modulo SUM_COLUMNS, which no other thread is needed for."""
    return reduce(join, (x[:, n : n + SUM_COLUMNS] for n in range(0, x.shape[1], SUM_COLUMNS)))

"""The forward kernel of Mosaic GPU: output and log-sum-exp, 64 queries a warpgroup; see mosaic_gpu for its budgets."""

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.softmax.mosaic_gpu.ptx import rescaled, row_max, scaled, settle
from ejkernel.kernels.softmax.mosaic_gpu.retry import fetch, flags_of, retry_scratch, with_flags
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import Masked
from ejkernel.kernels.softmax.mosaic_gpu.tiles import (
    LOG2_E,
    ROW,
    WGMMA,
    Kernel,
    across,
    batch_index,
    launch,
    masked_block,
    padded_to_8,
    results_apart,
    tile_ref,
    unknown,
    zeros,
)
from ejkernel.kernels.softmax.mosaic_gpu.warpgroups import act, compute_tiles, copy_tiles
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays

LN_2 = 0.6931471805599453
# The running maximum starts here, not at -inf: a masked logit (-inf) minus it is -inf, never inf - inf.
FLOOR = -3e38
# Sums of weights are kept by column modulo this: those of one thread, which meet others' at the end of a tile only.
COLUMNS = 8
# Sums beyond this are no result, and call for another attempt: their inverse may be too small for a number.
MOST = 2.0**125
# So do sums beyond this that are to be scaled to a later maximum: the scale would be 0 for what is not small beside it.
MOST_TO_SCALE = 2.0**64
# By how much (base 2) logits may pass the running maximum before sums are scaled to a new one: weights are up to 2^8.
SLACK = 8.0


def forward(call: Call, config: Any) -> Arrays:
    """Output and log-sum-exp."""
    q, k, v = (padded_to_8(call[name]) for name in ("query", "key", "value"))
    dims = dimensions(call)
    rows = 64 * config.warpgroups
    T_padded = -(-dims.T // rows) * rows
    kernel = _Forward.of(call, config, "q", rows, config.block_k)
    operands = kernel.operands(call)
    if "sinks" in call:
        operands["sinks"] = call["sinks"]
    out, lse = launch(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((dims.B, dims.H, T_padded), jnp.float32),
        ),
        scratch=kernel.scratch(),
        programs=kernel.walk.programs,
        name="softmax_forward",
        groups=kernel.groups,
    )(q, k, v, operands)
    return {"out": out[:, : dims.T], "lse": lse[:, :, : dims.T]}


class _Forward(Kernel):
    """Output and log-sum-exp of a tile, 64 queries a compute warpgroup.

    A warpgroup does the softmax of a block while it multiplies the previous one's weights with their values: a step
    issues the logits of block i and the values of block i - 1, and both are done at its end.
    """

    @property
    def hopeful(self) -> bool:
        """Whether the maxima of a row's first blocks serve for others, in a first attempt.

        Weights are too large for their sums only if a logit passes those maxima by far (base 2: by 125, less the
        logarithm of how many do and of their values, or by 64 where other maxima follow): the result is then nan, and
        computed again with maxima as they should be. So they do not serve before every row has seen something.
        """
        return self.bias_extent == "" and bool(self.dtype == jnp.bfloat16)

    @property
    def all_see_first(self) -> bool:
        """Whether every row sees something of the first block that its tile visits, or nothing at all."""
        m = self.masks
        return not (m.lower or m.segments or m.positions or m.halves or m.dense != "")

    @property
    def turns(self) -> bool:
        """Whether warpgroups take turns to issue products, which pays where these are most of a step."""
        return self.dims.D > 128

    def scratch(self) -> dict[str, Any]:
        c, D, groups, mixed = self.config, self.dims.D, self.groups, self.masks.mixed
        marks = c.stages if mixed else 0
        scratch = retry_scratch(mixed or self.hopeful, marks, c.block_k, self.parts, groups) | {
            "q_smem": tile_ref((groups, 64, D), self.dtype),
            "k_smem": tile_ref((c.stages, c.block_k, D), self.dtype),
            "v_smem": tile_ref((c.stages, c.block_k, D), self.dtype),
            "lse_smem": plgpu.SMEM((groups, 64), jnp.float32),
            "q_ready": plgpu.Barrier(num_barriers=groups),
            "k_ready": plgpu.Barrier(num_arrivals=self.parts, num_barriers=c.stages),
            "v_ready": plgpu.Barrier(num_arrivals=self.parts, num_barriers=c.stages),
            "k_free": plgpu.Barrier(num_arrivals=groups, num_barriers=c.stages),
            "v_free": plgpu.Barrier(num_arrivals=groups, num_barriers=c.stages),
        }
        if self.turns:
            scratch["turn"] = plgpu.Barrier(num_barriers=groups)
        scratch |= self.bias_scratch(c.stages)
        return scratch | ({"out_smem": tile_ref((groups, 64, D), self.dtype)} if results_apart(D) else {})

    def __call__(self, q_ref, k_ref, v_ref, refs, out_ref, lse_ref, **scratch: Any) -> None:
        w = lax.axis_index("warpgroup")
        compute = partial(self._compute, q_ref, refs, out_ref, lse_ref, scratch, w)
        registers = (160, 32) if self.groups == 3 else (232, 40)
        pl.when(w < self.groups)(lambda: act("compute", scratch, compute, registers))
        copy = partial(self._copy, k_ref, v_ref, refs, scratch)
        pl.when(w == self.groups)(lambda: act("copy", scratch, copy, registers))

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

        rings = {"k_free": 1, "v_free": 1}
        copy_tiles(self.walking(refs), scratch, scrub, rings, feed, self.groups, scrubs=self.masks.mixed)

    def _compute(self, q_ref, refs, out_ref, lse_ref, scratch, w, scrub) -> None:
        apart = results_apart(self.dims.D)
        q_smem = scratch["q_smem"].at[w]

        def fetch_queries(n: Any) -> None:
            b, h, i = self.place(refs, n)
            own_rows = pl.ds(i * self.rows + w * 64, 64)
            plgpu.copy_gmem_to_smem(q_ref.at[b, own_rows, h], q_smem, scratch["q_ready"].at[w])

        def work(n, blocks):
            b, h, i = self.place(refs, n)
            start = i * self.rows + w * 64
            row = self.runs.row(refs, b, h, i)
            lo, _, _, hi = row
            rows = self.masks.rows(refs, b, start, 64)
            plgpu.barrier_wait(scratch["q_ready"].at[w])
            acc, m, l = self._visit(refs, scratch, w, n, rows, (b, h, i), row, blocks, scrub)
            m, l, decay = self._with_sinks(refs, b, h, m, l.sum(axis=1))
            empty = l == 0.0
            total = jnp.where(l > MOST, jnp.nan, l * (1.0 - self.dropout))
            acc *= across(jnp.where(empty, 0.0, decay / total), acc.shape, 0)
            lse = jnp.where(empty, -jnp.inf, m * LN_2 + jnp.log(l))
            own_rows = pl.ds(start, 64)
            return blocks + (hi - lo), [
                (acc, scratch["out_smem"].at[w] if apart else q_smem, out_ref.at[b, own_rows, h]),
                (lse, scratch["lse_smem"].at[w], lse_ref.at[b, h, own_rows]),
            ]

        compute_tiles(self.walking(refs), scratch, w, scrub, fetch_queries, work, apart=apart)

    def _steps(self, row, step, carry) -> Any:
        """carry after all blocks of a row but its first."""
        if self.all_see_first or not self.hopeful:
            return self.runs.loop(row, partial(step, hopeful=self.hopeful), carry)
        for first, last, masked in self.runs.parts(row):
            if masked:
                carry = lax.fori_loop(first, last, partial(step, masked=masked, hopeful=False), carry)
                continue
            shown = jnp.minimum(first + 1, last)  # a block without a mask shows all rows something
            carry = lax.fori_loop(first, shown, partial(step, masked=masked, hopeful=False), carry)
            acc, m, l, p = lax.fori_loop(shown, last, partial(step, masked=masked, hopeful=True), carry)
            carry = acc, m, _to_scale(l), p
        return carry

    def _with_sinks(self, refs, b, h, m, l) -> tuple[jax.Array, jax.Array, jax.Array | float]:
        """Maxima (base 2) and sums of weights with a head's sinks, and what sums beside the old maxima are worth.

        Sinks come last: were they the first maximum, a row's largest weight would be rounded, which else is 1.
        """
        if "sinks" not in refs:
            return m, l, 1.0
        sink = refs["sinks"][batch_index(refs["sinks"], b), h] * LOG2_E
        top = jnp.maximum(m, sink)
        decay = jnp.exp2(m - top)
        return top, _to_scale(l) * decay + jnp.exp2(sink - top), decay

    def _maxima(self, x, factor, m) -> tuple[jax.Array, jax.Array]:
        """New maxima of logits x * factor and of all before them, and what sums beside the old ones are worth."""
        top = row_max(_by_columns(jnp.maximum, x)) * factor
        slack = 0.0 if self.bias_extent else SLACK  # what `capped` is for leaves none
        top = jnp.where(top - m <= slack, m, top)  # a nan stays one
        return top, jnp.exp2(m - top)

    def _visit(self, refs, scratch, w, n, rows, place, row, blocks, scrub) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sums of weighted values, maxima (base 2) and sums of weights of 64 queries over all blocks of a row."""
        lo, full_lo, full_hi, hi = row
        stages, shape = jnp.int32(self.config.stages), (64, self.block)
        q, mixed = scratch["q_smem"].at[w], self.masks.mixed
        bias_of = self.bias(refs, scratch, rows, place, w)

        def slot_of(i):
            return lax.rem(i + (blocks - lo), stages)

        def values_ready(slot) -> None:
            ready = partial(plgpu.barrier_wait, scratch["v_ready"].at[slot])
            pl.when(jnp.logical_not(scrub))(ready) if mixed else ready()

        def marked(i, slot, masked: Masked, weights):
            """Weights of scrubbed values; the marks are known with them. The mask is made again, which is rare."""
            plgpu.barrier_wait(scratch["v_ready"].at[slot])
            if not masked:
                return weights
            # unknown: else the first mask would be kept until here
            keep = self.keep(refs, rows, place, w, unknown(i), shape, masked)
            scrubbed = masked_block(row, i)  # which a first block need not be
            return jnp.where(keep, with_flags(weights, scratch, (slot,), scrubbed), 0.0)

        def weigh(x, i, slot, m, l, *, masked: Masked, hopeful: bool):
            """Of block i, whose logits are done: maxima and sums, weights, and what the old sums are worth."""
            keep = self.keep(refs, rows, place, w, i, shape, masked)
            x, factor, _ = self.logits.base2(x, bias_of(slot, i))
            plgpu.barrier_arrive(scratch["k_free"].at[slot])
            if keep is not None:
                x = jnp.where(keep, x, -jnp.inf)
            if hopeful:
                top, decay = lax.cond(scrub, lambda: self._maxima(x, factor, m), lambda: (m, zeros((64,), ROW) + 1.0))
            else:
                top, decay = self._maxima(x, factor, m)
            p = jnp.exp2(self.capped(x * factor - across(top, shape, 0)))
            l = l * across(decay, l.shape, 0) + _by_columns(operator.add, p)
            stays = self.stays(refs, rows, place, i, shape)
            weights = p if stays is None else jnp.where(stays, p, 0.0)
            if mixed:
                weights = lax.cond(scrub, partial(marked, i, slot, masked), lambda weights: weights, weights)
            return lax.optimization_barrier((top, l, weights, decay))

        def first(i, carry):
            (acc, m, l, _), slot = carry, slot_of(i)
            plgpu.barrier_wait(scratch["k_ready"].at[slot])

            def logits(x_acc):
                plgpu.wgmma(x_acc, q, scratch["k_smem"].at[slot].T)
                return x_acc[...]

            x = pl.run_scoped(logits, plgpu.ACC(shape, jnp.float32))
            m, l, p, _ = weigh(x, i, slot, m, l, masked="before" if self.runs.masked else "", hopeful=False)
            return acc, m, l, p.astype(self.dtype)

        def step(i, carry, *, masked: Masked, hopeful: bool):
            acc, m, l, p = carry
            slot, before = slot_of(i), slot_of(i - 1)
            plgpu.barrier_wait(scratch["k_ready"].at[slot])
            if self.turns:
                plgpu.barrier_wait(scratch["turn"].at[w])

            def products(state):
                acc_ref, m_ref, l_ref, x_ref, decay_ref = state

                def block(x_acc):
                    plgpu.wgmma(x_acc, q, scratch["k_smem"].at[slot].T)
                    values_ready(before)
                    plgpu.wgmma(acc_ref, p, scratch["v_smem"].at[before])
                    if self.turns:
                        plgpu.barrier_arrive(scratch["turn"].at[lax.rem(w + 1, jnp.int32(self.groups))])
                    return plgpu.wgmma_accumulator_load(x_acc, wait_n=1)

                x = lax.optimization_barrier(pl.run_scoped(block, plgpu.ACC(shape, jnp.float32)))
                m_ref[...], total, x_ref[...], decay_ref[...] = weigh(x, i, slot, m, l, masked=masked, hopeful=hopeful)
                settle(total, WGMMA)
                l_ref[...] = total

            state: Any = plgpu.ACC.init(acc), m, l, zeros(shape), zeros((64,), ROW)
            acc, m, l, x, decay = pl.run_state(products)(state)
            plgpu.barrier_arrive(scratch["v_free"].at[before])
            # only now: registers of a product's operand must not change while it runs
            acc = scaled(acc, decay, scrub) if hopeful else rescaled(acc, decay)
            return acc, m, l, x.astype(self.dtype)

        def last(i, carry):
            (acc, m, l, p), slot = carry, slot_of(i)
            values_ready(slot)
            before: Any = plgpu.ACC.init(acc)
            acc = pl.run_state(lambda acc: plgpu.wgmma(acc, p, scratch["v_smem"].at[slot]))(before)
            plgpu.barrier_arrive(scratch["v_free"].at[slot])
            return acc, m, l, p

        def once(i, body, carry):
            return body(i, carry) if self.runs.never_empty else lax.fori_loop(i, jnp.minimum(i + 1, hi), body, carry)

        if self.turns:  # the first warpgroup's first turn is the last one's to give
            start = jnp.logical_and(w == self.groups - 1, n == 0)
            pl.when(start)(lambda: plgpu.barrier_arrive(scratch["turn"].at[0]))
        nothing = plgpu.layout_cast(jnp.zeros(shape, self.dtype), WGMMA)
        maxima = plgpu.layout_cast(jnp.full((64,), FLOOR, jnp.float32), ROW)
        carry = once(lo, first, (zeros((64, self.dims.D)), maxima, zeros((64, COLUMNS)), nothing))
        remaining = (lo + 1, *(lax.max(jnp.int32(i), jnp.int32(lo + 1)) for i in (full_lo, full_hi)), hi)
        carry = self._steps(remaining, step, carry)
        if self.turns:  # and the last one's last goes to nobody
            end = jnp.logical_and(w == 0, n == self.walking(refs).count() - 1)
            pl.when(end)(lambda: plgpu.barrier_wait(scratch["turn"].at[0]))
        return once(lax.max(jnp.int32(hi - 1), jnp.int32(lo)), last, carry)[:3]


def _to_scale(l: jax.Array) -> jax.Array:
    """Sums of weights that may be scaled to a later maximum; nan for those beside whose own that is none."""
    return jnp.where(l > MOST_TO_SCALE, jnp.nan, l)


def _by_columns(join: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """A tile's columns joined by their number modulo COLUMNS, which no other thread is needed for."""
    return reduce(join, (x[:, n : n + COLUMNS] for n in range(0, x.shape[1], COLUMNS)))

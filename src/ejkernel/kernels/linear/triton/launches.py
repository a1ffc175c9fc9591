"""Launches of the Triton kernels of linear attention."""

from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from ejkernel.kernels.common.triton_launch import TritonLaunch
from ejkernel.kernels.linear.chunks import NEAR
from ejkernel.kernels.linear.scans import Scan, ScanResult
from ejkernel.kernels.linear.triton.config import Config, tile_channels
from ejkernel.kernels.linear.triton.gates import (
    linear_chunk_length_kernel,
    linear_gate_gradients_kernel,
    linear_scale_kernel,
)
from ejkernel.kernels.linear.triton.scan import linear_chunk_kernel, linear_join_kernel, linear_token_kernel
from ejkernel.kernels.linear.triton.segments import Segments, segments_of, whole_sequences
from ejkernel.kernels.linear.triton.tiles import Constants


class ChunkArrays(NamedTuple):
    """The arrays of a scan as the chunk kernel takes them, and the decays of both halves of each chunk."""

    a: jax.Array
    b: jax.Array
    c: jax.Array
    factor: jax.Array | None
    power: jax.Array | None = None
    chunk_lengths: jax.Array | None = None
    before: jax.Array | None = None
    after: jax.Array | None = None
    outer_before: jax.Array | None = None
    outer_after: jax.Array | None = None


def scan_chunks(
    scan: Scan, config: Config, segments: Segments, arrays: ChunkArrays, totals: bool = False
) -> tuple[jax.Array, ...]:
    """Out, out without what a token gives itself, states and totals; what is not wanted has no meaning."""
    B, _, H, A, C = scan.state_shape
    strict = scan.factor is not None
    block_c = min(config.block_c, tile_channels(C))
    if scan.tangent:  # there are two states
        block_c = max(16, block_c // 2)
    # without outputs there are registers and shared memory for more
    stages = config.num_stages if scan.with_out or strict else 2 * config.num_stages
    constants = replace(
        _scan_constants(scan, segments, block_c),
        CHUNK=config.tile_tokens,
        MAX_CHUNKS=_max_chunks(scan),
        TANGENT=scan.tangent,
        WITH_STRICT=strict,
        WITH_TOTALS=totals,
        STAGES=stages,
        TRANSPOSED=scan.a.dtype != jnp.float32,  # fewer registers, of 16 bits
        PRECISION="tf32x3" if scan.a.dtype == jnp.float32 else "tf32",
    )
    states = (B, segments.slots, H)
    shapes = [
        _struct(scan.c.shape, scan.with_out, scan.c.dtype),
        _struct(scan.c.shape, strict),
        _struct((*states, A, C), scan.with_state),
        _struct((*states, A), totals),
        _struct((*states, C), totals and scan.outer is not None),
    ]
    values = {f"p_{name}": x for name, x in arrays._asdict().items()}
    return _run(linear_chunk_kernel, scan, segments, constants, shapes, values, config.num_warps, stages)


def scan_tokens(scan: Scan, config: Config) -> ScanResult:
    """A scan token by token."""
    segments = whole_sequences(scan)
    B, _, H, A, C = scan.state_shape
    constants = _scan_constants(scan, segments, min(config.block_c, tile_channels(C)))
    out, state = _struct(scan.c.shape, scan.with_out, scan.c.dtype), (B, segments.slots, H, A, C)
    shapes = [out, _struct(state, scan.with_state)]
    results = _run(linear_token_kernel, scan, segments, constants, shapes, {}, config.num_warps)
    return ScanResult.wanted(scan, *results, None)


def join_segments(
    scan: Scan, config: Config, segments: Segments, arrays: ChunkArrays
) -> tuple[jax.Array, jax.Array | None]:
    """The states before every segment, and those at the end of every sequence."""
    B, N, H, A, C = scan.state_shape
    of_state = replace(scan, start=None, with_out=False, with_state=True, factor=None, minuend=None, sums_start=None)
    _, _, local, totals, outer_totals = scan_chunks(of_state, config, segments.before_last(scan), arrays, totals=True)
    block_c = tile_channels(C)
    constants = replace(
        _table_constants(scan, segments, C, block_c),
        A=A,
        BA=max(1, 2048 // block_c),
        SEQUENCES=N,
        HAS_OUTER=scan.outer is not None,
        HAS_START=scan.start is not None,
        WITH_STATE=scan.with_state,
    )
    values = {"p_local": local, "p_totals": totals, "p_outer_totals": outer_totals, "p_order": segments.order}
    shapes = [_struct((B, segments.rows, H, A, C)), _struct(scan.state_shape, scan.with_state)]
    programs = B * H * triton.cdiv(A, constants.BA)
    starts, final = _run(linear_join_kernel, scan, segments, constants, shapes, values, programs=programs)
    if not scan.with_state:
        return starts, None
    if scan.cu_seqlens is not None:  # a sequence without tokens has no segment
        some = (jnp.diff(scan.cu_seqlens, axis=1) > 0)[..., None, None, None]
        final = jnp.where(some, final, 0.0 if scan.start is None else scan.start)
    return starts, final


def chunk_lengths(scan: Scan, config: Config) -> jax.Array:
    """(B, H): how many tokens of a head can be done at once, so that decays relative to their middle stay in range."""
    gates = [x for x in (scan.inner, scan.outer) if x is not None]
    segments = segments_of(scan, config.tile_tokens)

    def lengths_for(x: jax.Array) -> jax.Array:
        B, _, H, C = x.shape
        constants = replace(
            _table_constants(scan, segments, C, tile_channels(C), descending=False),
            CHUNK=config.tile_tokens,
            LEAST=NEAR // len(gates),  # with both, products have twice the exponents
        )
        shape = _struct((B, segments.rows, H), dtype=jnp.int32)
        lengths = _run(linear_chunk_length_kernel, scan, segments, constants, shape, {"p_gates": x})
        return lengths.min(1, initial=config.tile_tokens)

    return reduce(jnp.minimum, map(lengths_for, gates))


def scale(scan: Scan, config: Config, x: Any, y: Any, gates: jax.Array, lengths: jax.Array) -> tuple[jax.Array, ...]:
    """x times its decays from the middle of each chunk, y times their inverse, and the decays of both halves.

    Without both, the decays themselves instead of x.
    """
    B, _, H, C = gates.shape
    segments, dtype = segments_of(scan, config.tile_tokens), scan.c.dtype
    # bfloat16 has 8 bits of the 24 that a float32 has; what is multiplied may have as few
    terms = 1 if gates.dtype != jnp.float32 else 3 if dtype == jnp.float32 else 2
    descending = scan.descending != scan.deferred
    constants = replace(
        _table_constants(scan, segments, C, min(128, tile_channels(C)), descending=descending),
        CHUNK=config.tile_tokens,
        MAX_CHUNKS=_max_chunks(scan),
        HAS_X=x is not None,
        HAS_Y=y is not None,
        WITH_SCALED=x is not None or y is None,
        TERMS=terms,
    )
    values = {"p_x": x, "p_y": y, "p_gates": gates, "p_chunk_lengths": lengths}
    # float16 may not hold them
    scaled = jnp.float32 if dtype == jnp.float16 else dtype
    wanted = constants.WITH_SCALED, constants.HAS_Y
    shapes = [_struct(gates.shape, some, scaled) for some in wanted] + 2 * [_struct((B, constants.MAX_CHUNKS, H, C))]
    return _run(linear_scale_kernel, scan, segments, constants, shapes, values, stages=1)


def gate_gradients(
    scan: Scan, segments: Segments, arrays: ChunkArrays, strict: jax.Array, sums_start: jax.Array | None
) -> jax.Array:
    """The gradients of decays: (B, T, H, C) with outer ones, else (B, T, H)."""
    B, T, H, C = scan.c.shape
    per_channel, has_minuend = scan.outer is not None, scan.minuend is not None and scan.minuend.ndim == 4
    constants = replace(
        _table_constants(scan, segments, C, min(64, tile_channels(C)) if per_channel else tile_channels(C)),
        CHUNK=64,
        SLOTS=segments.slots,
        PER_CHANNEL=per_channel,
        HAS_X=has_minuend,
        HAS_SUMS_START=sums_start is not None,
    )
    values = {"p_x": arrays.c, "p_dx": scan.minuend if has_minuend else None, "p_y": arrays.factor, "p_dy": strict}
    values |= {"p_sums_start": sums_start}
    shape = _struct((B, T, H)) if scan.outer is None else _struct(scan.c.shape, dtype=scan.outer.dtype)
    return _run(linear_gate_gradients_kernel, scan, segments, constants, shape, values)


def _struct(shape: tuple[int, ...], wanted: bool = True, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An output; of what is not wanted, one number."""
    return jax.ShapeDtypeStruct(shape if wanted else (1,), dtype)


def _max_chunks(scan: Scan) -> int:
    """The most chunks of a row of the batch, however short they are."""
    T, sequences = scan.a.shape[1], 1 if scan.cu_seqlens is None else scan.cu_seqlens.shape[1]
    return 2 * T // NEAR + sequences + 1


def _run(
    kernel: Any,
    scan: Scan,
    segments: Segments,
    constants: Constants,
    shapes: Any,
    values: dict[str, Any],
    warps: int = 4,
    stages: int = 2,
    programs: int | None = None,
) -> Any:
    """The outputs of a kernel, which may ask by name for `values`, and for the arrays of the scan that are not there.

    Programs are one for each block of channels of every segment, unless it is said how many.
    """
    names = {"p_a": scan.a, "p_b": scan.b, "p_c": scan.c, "p_g": scan.g, "p_gamma": scan.g_gamma}
    names |= {"p_inner": scan.inner, "p_outer": scan.outer, "p_start": scan.start, "scale": scan.scale}
    names |= {"p_segments": segments.table, "T": scan.a.shape[1], "segment": segments.tokens}
    if programs is None:
        programs = scan.a.shape[0] * constants.SEGMENTS * constants.H * constants.BLOCKS
    return TritonLaunch(names | values, constants, (programs,), warps, stages).run(kernel, shapes)


def _table_constants(
    scan: Scan, segments: Segments, channels: int, block_c: int, descending: bool | None = None
) -> Constants:
    """What all kernels have: heads, channels and the table of segments."""
    table = segments.table
    return Constants(
        H=scan.a.shape[2],
        C=channels,
        BC=block_c,
        SEGMENTS=segments.rows,
        PACKED=table is not None,
        TABLE_BATCHED=table is not None and table.shape[0] > 1,
        DESCENDING=scan.descending if descending is None else descending,
    )


def _scan_constants(scan: Scan, segments: Segments, block_c: int) -> Constants:
    """What the kernels that keep a state have."""
    return replace(
        _table_constants(scan, segments, scan.c.shape[3], block_c),
        A=scan.a.shape[3],
        BA=tile_channels(scan.a.shape[3]),
        SLOTS=segments.slots,
        HAS_G=scan.g is not None,
        HAS_GAMMA=scan.g_gamma is not None,
        GAMMA_BATCHED=scan.g_gamma is not None and scan.g_gamma.shape[0] > 1,
        HAS_INNER=scan.inner is not None,
        HAS_OUTER=scan.outer is not None,
        HAS_START=scan.start is not None,
        DEFERRED=scan.deferred,
        WITH_OUT=scan.with_out,
        WITH_STATE=scan.with_state,
    )

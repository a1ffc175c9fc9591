"""Linear attention in Triton: how a walk is cut into pieces that run side by side, and its launches."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton

from ejkernel.bridge import triton_call
from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.packed_chunks import max_packed_chunks, packed_chunks
from ejkernel.kernels.linear import scans
from ejkernel.kernels.linear.chunks import NEAR
from ejkernel.kernels.linear.scans import Walk, Walked
from ejkernel.kernels.linear.spec import dimensions
from ejkernel.kernels.linear.triton.gates import linear_gates_kernel, linear_scale_kernel, linear_steps_kernel
from ejkernel.kernels.linear.triton.scan import linear_chunk_kernel, linear_join_kernel, linear_token_kernel
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays

_MOST_CHANNELS = 256
_MOST_TOKENS_BY_ONE = 16


@dataclass(frozen=True)
class Config:
    """How a walk is cut.

    Attributes:
        chunk: tokens done at once; 1 is the recurrence itself.
        segment: tokens of a piece; pieces run side by side, after a walk for their states alone. 0 for no pieces.
        block_c: channels of a program.
        num_warps: warps of a program.
        num_stages: chunks in flight.
    """

    chunk: int = 64
    segment: int = 0
    block_c: int = 64
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        config_ints(self, ("chunk", "block_c", "num_warps"), power_of_two=True)
        config_ints(self, ("num_stages",))
        config_ints(self, ("segment",), 0)
        if 1 < self.chunk < 16 or self.chunk > 128:
            raise ValueError(f"chunk={self.chunk} must be 1, or from 16 to 128")
        if self.block_c < 16:
            raise ValueError(f"block_c={self.block_c} must be at least 16")
        if self.segment % self.chunk:
            raise ValueError(f"segment={self.segment} must be a multiple of chunk={self.chunk}")


def unsupported(call: Call) -> list[str]:
    dims = dimensions(call)
    most = max(dims.D, dims.Dv)
    return [f"head_dim {most} is above {_MOST_CHANNELS}"] if most > _MOST_CHANNELS else []


def default_config(call: Call) -> Config:
    dims = dimensions(call)
    if dims.T <= _MOST_TOKENS_BY_ONE:
        return Config(chunk=1, block_c=16 if max(dims.D, dims.Dv) > 64 else 32)
    exact, many = call["query"].dtype == jnp.float32, max(dims.D, dims.Dv) > 128
    # without products of whole warp groups, operands are in registers
    small = call.target.arch.startswith(("sm_8", "sm_12"))
    wide = many or exact
    block_c, warps = 32 if wide else 64, 8 if wide or small else 4
    chunk = 32 if wide and ("gk" in call or "gv" in call or small) else 64
    if exact and (many or small):
        chunk = 16  # what fits in the 99 KB of shared memory that small GPUs have, and in registers
    programs = dims.B * dims.H * triton.cdiv(max(dims.D, dims.Dv), block_c)
    return Config(chunk, _segment(dims.T, programs, call.target.cores or 132), block_c, warps)


def _segment(T: int, programs: int, cores: int) -> int:
    """Tokens of a piece: none where sequences alone keep the chip busy, else a power of two from 512 on."""
    if programs >= cores or T < 1024:
        return 0
    wanted = max(2, triton.cdiv(4 * cores, programs))
    return max(512, triton.next_power_of_2(triton.cdiv(T, wanted)))


def search_space(call: Call) -> list[Config]:
    default, dims = default_config(call), dimensions(call)
    if default.chunk == 1:
        return [Config(1, 0, block_c, warps) for block_c in (16, 32, 64) for warps in (2, 4, 8)]
    segments = {default.segment // 2, default.segment * 2} - {default.segment}
    # one thing at a time, and wide tiles for as many warps: each config takes seconds to compile
    found = [default, *(replace(default, segment=n) for n in sorted(segments) if n % default.chunk == 0)]
    wider = [n for n in (32, 64, 128) if n <= _channels(max(dims.D, dims.Dv))]
    found += [replace(default, block_c=n, num_warps=default.num_warps * n // default.block_c) for n in wider]
    found += [replace(default, num_warps=n) for n in (4, 8)]
    found += [replace(default, num_stages=n) for n in (1, 2, 3)]
    found += [replace(default, chunk=n) for n in (32, 64) if default.segment % n == 0]
    return [config for config in dict.fromkeys(found) if 2 <= config.num_warps <= 8]


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    walker = _Walker(config)
    outputs, residuals = scans.forward(call, walker)
    # states between pieces, for the walk that gives dquery
    residuals |= {"starts": walker.known[0].starts} if walker.known else {}
    return outputs, residuals | ({} if walker.steps is None else {"steps": walker.steps})


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    walker = _Walker(config)
    walker.steps = residuals.get("steps")
    if "starts" in residuals:
        walker.known.append(_States(call["key"], call["value"], residuals["starts"], None))
    return scans.backward(call, residuals, cotangents, walker)


IMPLEMENTATION = Implementation(
    Config,
    unsupported,
    default_config,
    search_space,
    forward,
    backward,
    shared_residuals=False,
    residuals={"starts": "B pieces H D Dv"},
)


class _States(NamedTuple):
    """The states (B, pieces, H, A, C) before the pieces of a walk that adds b^T c, and those at the end of sequences.

    A state is that of another walk, turned, where b and c change places: b and c tell, by being the same arrays.
    """

    b: Any
    c: Any
    starts: jax.Array
    final: jax.Array | None

    def transposed(self) -> "_States":
        return _States(self.c, self.b, self.starts.mT, None if self.final is None else self.final.mT)


class _Walker:
    """Takes walks, and remembers between them what several need.

    Where sequences are cut into pieces, a first walk finds the states between them. With decays of every channel,
    arrays are multiplied by those beforehand. Both are known by the arrays they are made of.

    `products` of a walk are kept without their factor: in the walk that balances them, it is c. With `outer` they are
    relative to the middles of chunks, and factors are as well.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.known: list[_States] = []
        self.scaled: list[tuple[Any, Any, bool, _Scaled]] = []
        self.powers: list[tuple[Any, jax.Array]] = []
        self.steps: jax.Array | None = None

    def __call__(self, w: Walk) -> Walked:
        if self.config.chunk == 1 and w.factor is None and not w.aged:
            return _by_token(w, self.config)
        chunks, pieces, states = self._chunks(w), _sequences(w), None
        if w.aged:
            _, strict, state, *_ = _launch(w, self.config, pieces, chunks)
            return Walked(None, state, None if w.factor is None else (strict * w.factor).sum(-1))
        # sums that run across pieces need the product of both states there
        others = self._states(w.a, w.factor) if w.balance is not None else None
        if 0 < self.config.segment < w.a.shape[1] and (w.balance is None or others is not None):
            pieces, states = _pieces(w, self.config.segment), self._states(w.b, w.c)
            if states is None or (w.with_state and states.final is None):
                states = _States(w.b, w.c, *_join(w, self.config, pieces, chunks))
                self.known.append(states)
        here = w if states is None else replace(w, start=states.starts, with_state=False)
        out, strict, state, *_ = _launch(here, self.config, pieces, chunks)
        state = state if states is None else states.final
        sums_start = w.sums_start if others is None or states is None else _sums_starts(w, pieces, states, others)
        products = strict if w.balance is None else _gates(w, pieces, chunks, strict, sums_start)
        return Walked(
            out if w.with_out else None, state if w.with_state else None, None if w.factor is None else products
        )

    def _states(self, b: Any, c: Any) -> _States | None:
        for states in self.known:
            if states.b is b and states.c is c:
                return states
            if states.b is c and states.c is b:
                return states.transposed()
        return None

    def _chunks(self, w: Walk) -> "_Chunks":
        """What a walk needs of its chunks: a walk back looks at what an early one looks back from."""
        if w.inner is None and w.outer is None:
            return _Chunks(w.a, w.b, w.c, w.factor)
        chunk = max(self.config.chunk, 16)
        if self.steps is None:
            self.steps = _steps(w, chunk)
        x, y = (w.b, w.a) if w.late else (w.a, w.b)
        self._scale(w, x, y, w.inner, chunk)
        factor = None if w.aged else w.factor
        self._scale(w, *((w.c, factor) if w.late else (factor, w.c)), w.outer, chunk)
        a, b = self._scaled(w.a, w.inner, w.late), self._scaled(w.b, w.inner, not w.late)
        c = self._scaled(w.c, w.outer, not w.late)
        halves = [(x.behind, x.before) if w.late else (x.before, x.behind) for x in (a, c)]
        return _Chunks(
            a.x,
            b.x,
            c.x,
            None if factor is None else self._scaled(factor, w.outer, w.late).x,
            self._power(w, chunk),
            self.steps,
            *halves[0],
            *halves[1],
        )

    def _power(self, w: Walk, chunk: int) -> jax.Array | None:
        """What outputs are multiplied by, or divided by in a walk back."""
        if w.outer is None or not (w.with_out or w.aged):
            return None
        known = [power for gates, power in self.powers if gates is w.outer]
        if known:
            return known[0]
        assert self.steps is not None
        power, *_ = _scale(w, None, None, w.outer, self.steps, chunk)
        self.powers.append((w.outer, power))
        return power

    def _scaled(self, x: jax.Array, gates: jax.Array | None, inverse: bool) -> "_Scaled":
        if gates is None:
            return _Scaled(x, None, None)
        key = (id(x), id(gates), inverse)
        return next(found for *names, found in self.scaled if (id(names[0]), id(names[1]), names[2]) == key)

    def _scale(self, w: Walk, x: Any, y: Any, gates: jax.Array | None, chunk: int) -> None:
        """Multiply x by decays and y by their inverse, unless that is done."""
        if gates is None:
            return
        known = {(id(array), inverse) for array, decays, inverse, _ in self.scaled if decays is gates}
        x = None if (id(x), False) in known else x
        y = None if (id(y), True) in known else y
        if x is None and y is None:
            return
        assert self.steps is not None
        scaled_x, scaled_y, before, behind = _scale(w, x, y, gates, self.steps, chunk)
        for array, inverse, scaled in ((x, False, scaled_x), (y, True, scaled_y)):
            if array is not None:
                self.scaled.append((array, gates, inverse, _Scaled(scaled, before, behind)))


class _Scaled(NamedTuple):
    """An array times its decays from the middle of each chunk, and the sums of decays before and behind it."""

    x: jax.Array
    before: jax.Array | None
    behind: jax.Array | None


class _Chunks(NamedTuple):
    """The arrays of a walk as its kernel takes them, tokens at a time, and the decays of both halves of each chunk."""

    a: jax.Array
    b: jax.Array
    c: jax.Array
    factor: jax.Array | None
    power: jax.Array | None = None
    steps: jax.Array | None = None
    before: jax.Array | None = None
    behind: jax.Array | None = None
    outer_before: jax.Array | None = None
    outer_behind: jax.Array | None = None


# Pieces ----------------------------------------------------------------------------------------------------


class _Pieces(NamedTuple):
    """What programs walk along.

    Attributes:
        rows: pieces of a row of the batch.
        slots: states that a row of the batch starts with.
        tokens: of a piece, where sequences are not packed.
        table: (B or 1, rows, 4) where they are: the first token, the one behind the last, the slot, the sequence. The
            slot of padding, which is walked along for the zeros to be written, is -1.
        order: (B or 1, rows, 2): the sequence, -1 for padding, and whether it is the last of it.
        first: (B or 1, rows): whether it is the first of its sequence. Both in the order of the walk.
    """

    rows: int
    slots: int
    tokens: int
    table: jax.Array | None = None
    order: jax.Array | None = None
    first: Any = None


def _sequences(w: Walk) -> _Pieces:
    """Every sequence a piece, and the padding behind them."""
    T = w.a.shape[1]
    if w.cu_seqlens is None:
        return _Pieces(1, 1, T)
    rows, N = w.cu_seqlens.shape
    end = jnp.concatenate([w.cu_seqlens[:, 1:], jnp.full((rows, 1), T, jnp.int32)], 1)
    slot = jnp.broadcast_to(jnp.asarray([*range(N - 1), -1], jnp.int32), (rows, N))
    return _Pieces(N, N - 1, T, jnp.stack([w.cu_seqlens, end, slot, slot], -1))


def _pieces(w: Walk, size: int) -> _Pieces:
    """Pieces of so many tokens, the last of a sequence perhaps of fewer."""
    T = w.a.shape[1]
    if w.cu_seqlens is None:
        rows = triton.cdiv(T, size)
        return _Pieces(rows, rows, size, first=np.arange(rows)[None] == (rows - 1 if w.descending else 0))
    batch, N = w.cu_seqlens.shape
    ends = jnp.concatenate([w.cu_seqlens, jnp.full((batch, 1), T, jnp.int32)], 1)  # padding is one more sequence
    rows = max_packed_chunks(T, N, size)
    pieces = packed_chunks(ends, size, rows)
    row = np.arange(rows, dtype=np.int32)[None]
    real = pieces.sequence < N - 1
    at = jnp.minimum(pieces.sequence, N - 1)
    lowest = row == jnp.take_along_axis(pieces.first_row, at, 1)
    highest = row == jnp.take_along_axis(pieces.first_row, at + 1, 1) - 1
    first, last = (highest, lowest) if w.descending else (lowest, highest)
    table = jnp.stack([pieces.start, pieces.end, jnp.where(real, row, -1), pieces.sequence], -1)
    order = jnp.stack([jnp.where(real, pieces.sequence, -1), last.astype(jnp.int32)], -1)
    return _Pieces(rows, rows, size, table, order, first)


def _needed(w: Walk, pieces: _Pieces) -> _Pieces:
    """Those whose states are: not the last of a packed sequence, unless its final state is wanted."""
    if pieces.table is None or pieces.order is None or w.with_state:
        return pieces
    nothing = jnp.asarray([0, 0, -1, 0], jnp.int32)
    return pieces._replace(table=jnp.where(pieces.order[..., 1:] != 0, nothing, pieces.table))


def _sums_starts(w: Walk, pieces: _Pieces, states: _States, others: _States) -> jax.Array:
    """What running sums have come to before each piece: the gradient of the state times the state, (B, rows, H, C)."""
    # where this walk begins a piece, the other way has come to the end of it: the start of the next
    there = jnp.roll(others.starts, -1 if w.descending else 1, 1)
    found = w.scale * (states.starts * there).sum(-2 if w.outer is not None else (-2, -1))
    B, N = w.a.shape[0], 1 if pieces.order is None else w.cu_seqlens.shape[1] - 1  # pyright: ignore
    sums_start = jnp.zeros((B, N, *found.shape[2:]), jnp.float32) if w.sums_start is None else w.sums_start
    if pieces.order is not None:
        sequence = jnp.broadcast_to(jnp.maximum(pieces.order[..., 0], 0), (B, pieces.rows))
        sums_start = jax.vmap(lambda x, at: x[at])(sums_start, sequence)
    return jnp.where(pieces.first.reshape(*pieces.first.shape, *(1,) * (found.ndim - 2)), sums_start, found)


# Launches --------------------------------------------------------------------------------------------------


def _struct(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _nothing() -> jax.ShapeDtypeStruct:
    return _struct((1,))


def _channels(n: int) -> int:
    """Channels of a tile that holds all n."""
    return max(16, triton.next_power_of_2(n))


def _parts(gates: jax.Array | None, data: jax.Array) -> int:
    """In how many parts of 8 bits the gates are summed."""
    return 1 if gates is None or gates.dtype != jnp.float32 else 3 if data.dtype == jnp.float32 else 2


def _flags(w: Walk, pieces: _Pieces) -> dict[str, Any]:
    """The constexprs that all kernels which walk along tokens have."""
    return {
        "H": w.a.shape[2],
        "A": w.a.shape[3],
        "C": w.c.shape[3],
        "ROWS": pieces.rows,
        "BA": _channels(w.a.shape[3]),
        "PACKED": pieces.table is not None,
        "PIECES_BATCHED": pieces.table is not None and pieces.table.shape[0] > 1,
        "HAS_G": w.g is not None,
        "HAS_GAMMA": w.g_gamma is not None,
        "GAMMA_BATCHED": w.g_gamma is not None and w.g_gamma.shape[0] > 1,
        "HAS_INNER": w.inner is not None,
        "HAS_OUTER": w.outer is not None,
        "DESCENDING": w.descending,
        "LATE": w.late,
        "WITH_OUT": w.with_out,
    }


def _precision(w: Walk) -> str:
    return "tf32x3" if w.a.dtype == jnp.float32 else "tf32"


def _steps(w: Walk, chunk: int) -> jax.Array:
    """(B, H): how many tokens of a head can be done at once, so that decays relative to their middle stay in range."""
    gates = [x for x in (w.inner, w.outer) if x is not None]
    pieces = _pieces(w, chunk)

    def of(x: jax.Array) -> jax.Array:
        B, T, H, C = x.shape
        steps = triton_call(
            linear_steps_kernel,
            x,
            pieces.table,
            T,
            out_shape=_struct((B, pieces.rows, H), jnp.int32),
            grid=(B * pieces.rows * H,),
            H=H,
            C=C,
            ROWS=pieces.rows,
            BC=_channels(C),
            CHUNK=chunk,
            LEAST=NEAR // len(gates),  # with both, products have twice the exponents
            PACKED=pieces.table is not None,
            PIECES_BATCHED=pieces.table is not None and pieces.table.shape[0] > 1,
        )
        return steps.min(1, initial=chunk)

    return jnp.minimum(of(gates[0]), of(gates[-1])) if len(gates) > 1 else of(gates[0])


def _places(w: Walk) -> int:
    """Places for chunks of a row of the batch, however short."""
    T, sequences = w.a.shape[1], 1 if w.cu_seqlens is None else w.cu_seqlens.shape[1]
    return 2 * T // NEAR + sequences + 1


def _scale(w: Walk, x: Any, y: Any, gates: jax.Array, steps: jax.Array, chunk: int) -> tuple[jax.Array, ...]:
    """x times its decays from the middle of each chunk, y times their inverse, and the decays of both halves.

    Without both, the decays themselves in the place of x.
    """
    B, T, H, C = gates.shape
    given, with_x = w.c if y is None else y, x is not None or y is None
    pieces, block_c = _pieces(w, chunk), min(128, _channels(C))
    # float16 may not hold them
    scaled = _struct(gates.shape, jnp.float32 if given.dtype == jnp.float16 else given.dtype)
    keep = _struct((B, _places(w), H, C))
    return triton_call(
        linear_scale_kernel,
        x,
        y,
        gates,
        steps,
        pieces.table,
        T,
        out_shape=[scaled if with_x else _nothing(), _nothing() if y is None else scaled, keep, keep],
        grid=(B * pieces.rows * H * triton.cdiv(C, block_c),),
        num_stages=1,
        H=H,
        C=C,
        ROWS=pieces.rows,
        CHUNKS=_places(w),
        BC=block_c,
        CHUNK=chunk,
        PACKED=pieces.table is not None,
        PIECES_BATCHED=pieces.table is not None and pieces.table.shape[0] > 1,
        DESCENDING=w.descending != w.late,
        HAS_X=x is not None,
        WITH_X=with_x,
        HAS_Y=y is not None,
        PARTS=_parts(gates, given),
    )


def _launch(w: Walk, config: Config, pieces: _Pieces, chunks: _Chunks, totals: bool = False) -> tuple[jax.Array, ...]:
    """Out, out without own parts, states and totals of the chunk kernel; what is not wanted has no meaning."""
    B, T, H, A = w.a.shape
    C, rows, chunk = w.c.shape[3], pieces.rows, max(config.chunk, 16)
    block_c = min(config.block_c, _channels(C))
    if w.aged:  # there are two states
        block_c = max(16, block_c // 2)
    blocks = triton.cdiv(C, block_c)
    strict = w.factor is not None
    # without outputs there is room for more
    stages = config.num_stages if w.with_out or strict else 2 * config.num_stages
    return triton_call(
        linear_chunk_kernel,
        chunks.a,
        chunks.b,
        chunks.c,
        w.g,
        w.g_gamma,
        chunks.power,
        chunks.steps,
        chunks.before,
        chunks.behind,
        chunks.outer_before,
        chunks.outer_behind,
        w.start,
        pieces.table,
        T,
        pieces.tokens,
        w.scale,
        out_shape=[
            _struct(w.c.shape if w.with_out else (1,), w.c.dtype),
            _struct(w.c.shape) if strict else _nothing(),
            _struct((B, pieces.slots, H, A, C)) if w.with_state else _nothing(),
            _struct((B, pieces.slots, H, A)) if totals else _nothing(),
            _struct((B, pieces.slots, H, C)) if totals and w.outer is not None else _nothing(),
        ],
        grid=(B * rows * H * blocks,),
        num_warps=config.num_warps,
        num_stages=stages,
        SLOTS=pieces.slots,
        CHUNKS=_places(w),
        BC=block_c,
        CHUNK=chunk,
        HAS_START=w.start is not None,
        AGED=w.aged,
        WITH_STRICT=strict,
        WITH_STATE=w.with_state,
        WITH_TOTALS=totals,
        STAGES=stages,
        TURNED=w.a.dtype != jnp.float32,  # fewer registers, of 16 bits
        PRECISION=_precision(w),
        **_flags(w, pieces),
    )


def _gates(w: Walk, pieces: _Pieces, chunks: _Chunks, strict: jax.Array, sums_start: jax.Array | None) -> jax.Array:
    """The gradients of decays: (B, T, H, C) with outer ones, else (B, T, H)."""
    B, T, H, C = w.c.shape
    per_channel, balanced = w.outer is not None, w.balance is not None and w.balance.ndim == 4
    block_c = min(64, _channels(C)) if per_channel else _channels(C)
    return triton_call(
        linear_gates_kernel,
        chunks.c,
        w.balance if balanced else None,
        chunks.factor,
        strict,
        sums_start,
        pieces.table,
        T,
        pieces.tokens,
        out_shape=_struct((B, T, H)) if w.outer is None else _struct(w.c.shape, w.outer.dtype),
        grid=(B * pieces.rows * H * (triton.cdiv(C, block_c) if per_channel else 1),),
        H=H,
        C=C,
        ROWS=pieces.rows,
        SLOTS=pieces.slots,
        BC=block_c,
        CHUNK=64,
        PACKED=pieces.table is not None,
        PIECES_BATCHED=pieces.table is not None and pieces.table.shape[0] > 1,
        PER_CHANNEL=per_channel,
        HAS_DX=balanced,
        HAS_SUMS_START=sums_start is not None,
        DESCENDING=w.descending,
    )


def _join(w: Walk, config: Config, pieces: _Pieces, chunks: _Chunks) -> tuple[jax.Array, jax.Array | None]:
    """The states before every piece, and those at the end of every sequence."""
    B, _, H, A = w.a.shape
    C, N = w.c.shape[3], 1 if w.cu_seqlens is None else w.cu_seqlens.shape[1] - 1
    alone = replace(w, start=None, with_out=False, with_state=True, factor=None, balance=None, sums_start=None)
    _, _, local, totals, outer_totals = _launch(alone, config, _needed(w, pieces), chunks, totals=True)
    block_c = _channels(C)
    block_a = max(1, 2048 // block_c)
    starts, final = triton_call(
        linear_join_kernel,
        local,
        totals,
        outer_totals,
        w.start,
        pieces.order,
        out_shape=[_struct((B, pieces.rows, H, A, C)), _struct((B, N, H, A, C)) if w.with_state else _nothing()],
        grid=(B * H * triton.cdiv(A, block_a),),
        H=H,
        A=A,
        C=C,
        ROWS=pieces.rows,
        SEQUENCES=N,
        BA=block_a,
        BC=block_c,
        PACKED=pieces.order is not None,
        PIECES_BATCHED=pieces.order is not None and pieces.order.shape[0] > 1,
        HAS_OUTER=w.outer is not None,
        HAS_START=w.start is not None,
        WITH_FINAL=w.with_state,
        DESCENDING=w.descending,
    )
    if not w.with_state:
        return starts, None
    if w.cu_seqlens is not None:  # a sequence without tokens has no piece
        some = (jnp.diff(w.cu_seqlens, axis=1) > 0)[..., None, None, None]
        final = jnp.where(some, final, 0.0 if w.start is None else w.start)
    return starts, final


def _by_token(w: Walk, config: Config) -> Walked:
    pieces = _sequences(w)
    B, T, H, A = w.a.shape
    C = w.c.shape[3]
    block_c = min(config.block_c, _channels(C))
    out, state = triton_call(
        linear_token_kernel,
        w.a,
        w.b,
        w.c,
        w.g,
        w.g_gamma,
        w.inner,
        w.outer,
        w.start,
        pieces.table,
        T,
        w.scale,
        out_shape=[
            _struct(w.c.shape, w.c.dtype) if w.with_out else _nothing(),
            _struct((B, pieces.slots, H, A, C)) if w.with_state else _nothing(),
        ],
        grid=(B * pieces.rows * H * triton.cdiv(C, block_c),),
        num_warps=config.num_warps,
        SLOTS=pieces.slots,
        BC=block_c,
        HAS_START=w.start is not None,
        WITH_STATE=w.with_state,
        **_flags(w, pieces),
    )
    return Walked(out if w.with_out else None, state if w.with_state else None, None)

"""What the Mosaic GPU kernels say in PTX: what Pallas has no word for, and what ptxas would put in another order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
ONE = "0f3F800000"


def settle(x: jax.Array, layout: Any) -> None:
    """Compute x (float32, never negative) before whatever comes next that has an effect, say a wait for a product.

    ptxas keeps the order of effects, but puts off what only yields numbers. So their signs decide about an effect: an
    event for profilers.
    """

    def decide(_: Any, array: Any) -> None:
        numbers = _numbers(array)
        either = " ".join(f"or.b32 signs, signs, ${n};" for n in range(1, len(numbers)))  # ptxas does two at a time
        begin, end = ".reg .pred any; .reg .b32 signs; mov.b32 signs, $0;", "setp.lt.s32 any, signs, 0; @any pmevent 0;"
        asm("!llvm.void", f"{begin} {either} {end}", numbers)

    inline((layout,))(decide)(x)


def rescaled(x: jax.Array, factors: jax.Array) -> jax.Array:
    """A tile times a factor for each row; a warp passes over it if all its rows have the factor 1."""

    def vote(_: Any, array: Any) -> Any:
        first, *others = range(1, 1 + len(numbers := _numbers(array)))
        either = " ".join(f"setp.neu.or.f32 any, ${n}, {ONE}, any;" for n in others)
        begin = f".reg .pred any; setp.neu.f32 any, ${first}, {ONE};"
        found = asm("i32", f"{begin} {either} vote.sync.any.pred any, any, -1; selp.b32 $0, 1, 0, any;", numbers)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    return scaled(x, factors, inline((ROW,), scalar)(vote)(factors) != 0)


def scaled(x: jax.Array, factors: jax.Array, when: jax.Array) -> jax.Array:
    """A tile times a factor for each row, if asked for."""
    return lax.cond(when, lambda x: x * lax.broadcast_in_dim(factors, x.shape, [0]), lambda x: x, x)


def widened(x: jax.Array) -> jax.Array:
    """A tile of 16-bit numbers in float32; ptxas would take pairs of bfloat16 apart and join them again."""
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)

    def widen(_: Any, tile: Any) -> Any:
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F32Type.get())
        low, high = (arith.constant(i32, n) for n in (16, -65536))

        def both(register: Any) -> Any:
            bits = llvm.bitcast(i32, register)
            halves = [llvm.bitcast(ir.F32Type.get(), n) for n in (arith.shli(bits, low), arith.andi(bits, high))]
            return vector.from_elements(pair, halves)

        registers = np.vectorize(both, otypes=[object])(tile.registers)
        return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)

    wide = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA)
    return inline((WGMMA,), wide)(widen)(x)


def row_max(x: jax.Array) -> jax.Array:
    """The largest number of each row of a tile of eight columns.

    A thread has numbers of two rows. ptxas would do what leads to one row's result first, in a chain in which each
    waits for the one before, and begin with the other while it waits for a shuffle. So both results depend on both.
    """

    def largest(_: Any, tile: Any) -> Any:
        ptx = ".reg .b32 a, b, zero; max.NaN.f32 a, $2, $3; max.NaN.f32 b, $4, $5; mov.b32 zero, 0; "
        ptx += "lop3.b32 $0, a, b, zero, 0x78; lop3.b32 $1, b, a, zero, 0x78; "  # a ^ (b & 0), which ptxas leaves be
        for lane in (1, 2):
            ptx += "".join(f"shfl.sync.bfly.b32 {t}, ${n}, {lane}, 31, -1; " for n, t in enumerate("ab"))
            ptx += "max.NaN.f32 $0, $0, a; max.NaN.f32 $1, $1, b; "
        both = asm("!llvm.struct<(f32, f32)>", ptx, _numbers(tile))
        layout, one = tile.layout.reduce((1,)), ir.VectorType.get((1,), ir.F32Type.get())
        rows = [vector.broadcast(one, llvm.extractvalue(ir.F32Type.get(), both, [n])) for n in range(2)]
        registers = np.array(rows, dtype=object).reshape(layout.registers_shape((64,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    rows = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=ROW)
    return inline((WGMMA,), rows)(largest)(x)


def inline(arguments: tuple[Any, ...], result: Any = None) -> Any:
    """A decorator of what writes instructions; `arguments` are layouts of arrays."""
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)


def asm(result: str, ptx: str, operands: list[Any]) -> Any:
    """PTX whose first operands are what it yields, and the others float32."""
    outputs = {"!llvm.void": "", "!llvm.struct<(f32, f32)>": "=&f,=&f,", "i32": "=r,"}[result]
    inputs = ",".join("f" * len(operands))
    return llvm.inline_asm(ir.Type.parse(result), operands, f"{{ {ptx} }}", outputs + inputs, has_side_effects=True)


def _numbers(array: Any) -> list[Any]:
    """The numbers that a thread has of an array of Mosaic's."""
    return [number for register in array.registers.flat for number in _numbers_of(register)]


def _numbers_of(register: Any) -> list[Any]:
    """The numbers of a register of Mosaic's, which may be a vector of them."""
    if not isinstance(register.type, ir.VectorType):
        return [register]
    return [vector.extract(register, dynamic_position=[], static_position=[n]) for n in range(register.type.shape[0])]

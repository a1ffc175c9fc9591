"""All that these kernels use of Mosaic GPU beyond its documented names; no other file of this folder imports that.

Lowered with JAX 0.10.2 and 0.11.2, and run on an H200 with the latter. What is used:

- instructions that Pallas has no word for, and an order of them that ptxas would change: `plgpu.inline_mgpu` and
  `plgpu.ShapeDtypeStruct`; of `jax.experimental.mosaic.gpu` the `FragmentedArray` with its registers and layout; the
  dialects of `jaxlib.mlir`. A vote of a warp, a maximum over rows that runs two chains side by side, a cast from
  bfloat16 that keeps pairs together, and a way to say "compute this now" in Pallas would replace them.
- accumulators whose products are still running: `plgpu.wgmma_accumulator_load`, and `plgpu.ACC.init` for one that
  begins with a value. A documented read of an accumulator that says how many products may be pending would replace it.
- `plgpu.load` with a layout, and `plgpu.broadcasted_iota`: a load and an iota whose layout is inferred would.
- `plgpu.LoweringSemantics`: the default will do, once it compiles as fast.
- `lax.optimization_barrier` inside a kernel, where what it holds back is not documented.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

# how the 64 rows of a warpgroup's tile lie in its registers, as wgmma leaves them; one number a row; one a column
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
COL = WGMMA.reduce(0)

# JAX 0.10 has no way for a kernel to add to an array that it was given
CAN_ADD_TO_INPUT = jax.__version_info__ >= (0, 11)
# in JAX 0.10 a product inside `run_state` cannot add to an accumulator of the loop around it
CAN_ACCUMULATE_INSIDE_STATE = jax.__version_info__ >= (0, 11)
# JAX 0.10 has an optimization barrier for arrays only, not for a number
_HAS_SCALAR_BARRIER = jax.__version_info__ >= (0, 11)

# JAX 0.10 wants an index for `load`, JAX 0.11 deprecates it, JAX 0.12 has none
_index = inspect.signature(plgpu.load).parameters.get("idx")
_LOAD_INDEX = ((),) if _index is not None and _index.default is inspect.Parameter.empty else ()

_ONE = "0f3F800000"  # 1.0 as PTX writes a float32


# Registers and accumulators ---------------------------------------------------------------------------------


def load(ref: Any, layout: Any) -> jax.Array:
    """An array from global or shared memory, each thread the elements that it has of a tile in this layout."""
    return plgpu.load(ref, *_LOAD_INDEX, layout=layout, optimized=False)


def tile_iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The row numbers (axis 0) or column numbers (axis 1) of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def accumulator_from(value: jax.Array) -> Any:
    """An accumulator for `run_state` that begins with a value."""
    return plgpu.ACC.init(value)


def read_accumulator(acc: Any, pending: int | None) -> jax.Array:
    """Its registers once at most `pending` later products are unfinished; None does not wait at all."""
    return plgpu.wgmma_accumulator_load(acc, wait_n=pending)


def wait_for_product(registers: jax.Array, pending: int) -> jax.Array:
    """What `read_accumulator` had before its product was done: now it is, and at most `pending` later ones are not."""
    plgpu.wgmma_wait(pending)
    return compiler_barrier(registers)


def compiler_params(*, auto_barriers: bool) -> Any:
    """`auto_barriers`: whether Mosaic puts its own between a warpgroup's writes and its reads of shared memory."""
    return plgpu.CompilerParams(
        approx_math=True,
        # warpgroup semantics give the same code, and lower up to twice as slowly: they look for layouts
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        # one reduction crosses warps, that of nans: 4 numbers; head dim 256 has no shared memory to spare
        reduction_scratch_bytes=16,
        unsafe_no_auto_barriers=not auto_barriers,
    )


# Order ------------------------------------------------------------------------------------------------------


def compiler_barrier(x: Any) -> Any:
    """x, which is computed as a whole before this point: the compiler moves none of it behind, nor repeats it there."""
    return lax.optimization_barrier(x)


def not_hoisted(number: Any) -> Any:
    """The number, which the compiler cannot know to be the same in every iteration of a loop.

    Addresses made from it before the loop would fill registers, and what they drive out to local memory can be more
    than the first-level cache holds.
    """
    return lax.optimization_barrier(number) if _HAS_SCALAR_BARRIER else number


def compute_now(x: jax.Array, layout: Any) -> None:
    """Compute x (float32, never negative) before whatever comes next that has an effect, say a wait for a product.

    ptxas keeps the order of effects, but puts off what only yields numbers. So the signs of x decide about an effect,
    an event for profilers, which never happens.
    """

    def write(_: Any, array: Any) -> None:
        elements = _elements(array)
        either = " ".join(f"or.b32 signs, signs, ${n};" for n in range(1, len(elements)))  # ptxas does two at a time
        begin, end = ".reg .pred any; .reg .b32 signs; mov.b32 signs, $0;", "setp.lt.s32 any, signs, 0; @any pmevent 0;"
        _asm("!llvm.void", f"{begin} {either} {end}", elements)

    plgpu.inline_mgpu(arg_types=(layout,))(write)(x)


# Instructions -----------------------------------------------------------------------------------------------


def rescale(x: jax.Array, factors: jax.Array) -> jax.Array:
    """A tile times a factor for each row; a warp skips this if all its rows have the factor 1."""

    def vote(_: Any, array: Any) -> Any:
        first, *others = range(1, 1 + len(elements := _elements(array)))
        either = " ".join(f"setp.neu.or.f32 any, ${n}, {_ONE}, any;" for n in others)
        begin = f".reg .pred any; setp.neu.f32 any, ${first}, {_ONE};"
        needed = _asm("i32", f"{begin} {either} vote.sync.any.pred any, any, -1; selp.b32 $0, 1, 0, any;", elements)
        return mgpu.FragmentedArray.splat(needed, (), is_signed=True)

    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    needed = plgpu.inline_mgpu(arg_types=(ROW,), return_type=scalar)(vote)(factors)
    return rescale_if(x, factors, needed != 0)


def rescale_if(x: jax.Array, factors: jax.Array, needed: jax.Array) -> jax.Array:
    """A tile times a factor for each row, if that is needed."""
    return lax.cond(needed, lambda x: x * lax.broadcast_in_dim(factors, x.shape, [0]), lambda x: x, x)


def to_float32(x: jax.Array) -> jax.Array:
    """A tile of 16-bit numbers in float32; ptxas would split pairs of bfloat16 and join them again."""
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)

    def cast(_: Any, tile: Any) -> Any:
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F32Type.get())
        low, high = (arith.constant(i32, n) for n in (16, -65536))

        def both(register: Any) -> Any:
            bits = llvm.bitcast(i32, register)
            halves = [llvm.bitcast(ir.F32Type.get(), n) for n in (arith.shli(bits, low), arith.andi(bits, high))]
            return vector.from_elements(pair, halves)

        registers = np.vectorize(both, otypes=[object])(tile.registers)
        return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA)
    return plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=result)(cast)(x)


def row_max(x: jax.Array) -> jax.Array:
    """The largest number of each row of a tile of eight columns.

    A thread has numbers of two rows. ptxas would first do all that leads to one row's result, in a chain in which each
    instruction waits for the one before, and begin with the other row while it waits for a shuffle. So both results
    depend on both rows.
    """

    def largest(_: Any, tile: Any) -> Any:
        ptx = ".reg .b32 a, b, zero; max.NaN.f32 a, $2, $3; max.NaN.f32 b, $4, $5; mov.b32 zero, 0; "
        ptx += "lop3.b32 $0, a, b, zero, 0x78; lop3.b32 $1, b, a, zero, 0x78; "  # a ^ (b & 0), which ptxas leaves be
        for lane in (1, 2):
            ptx += "".join(f"shfl.sync.bfly.b32 {t}, ${n}, {lane}, 31, -1; " for n, t in enumerate("ab"))
            ptx += "max.NaN.f32 $0, $0, a; max.NaN.f32 $1, $1, b; "
        both = _asm("!llvm.struct<(f32, f32)>", ptx, _elements(tile))
        layout, one = tile.layout.reduce((1,)), ir.VectorType.get((1,), ir.F32Type.get())
        rows = [vector.broadcast(one, llvm.extractvalue(ir.F32Type.get(), both, [n])) for n in range(2)]
        registers = np.array(rows, dtype=object).reshape(layout.registers_shape((64,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    rows = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=ROW)
    return plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=rows)(largest)(x)


def _asm(result: str, ptx: str, operands: list[Any]) -> Any:
    """PTX whose first operands are what it yields, and whose others are float32."""
    outputs = {"!llvm.void": "", "!llvm.struct<(f32, f32)>": "=&f,=&f,", "i32": "=r,"}[result]
    inputs = ",".join("f" * len(operands))
    return llvm.inline_asm(ir.Type.parse(result), operands, f"{{ {ptx} }}", outputs + inputs, has_side_effects=True)


def _elements(array: Any) -> list[Any]:
    """The elements of an array that a thread has, one by one: a register of Mosaic's may be a vector of them."""
    elements = []
    for register in array.registers.flat:
        if isinstance(register.type, ir.VectorType):
            numbers = range(register.type.shape[0])
            elements += [vector.extract(register, dynamic_position=[], static_position=[n]) for n in numbers]
        else:
            elements.append(register)
    return elements

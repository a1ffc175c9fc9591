"""Launches of the Triton kernels of the delta rule."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.packed_chunks import max_packed_chunks, packed_chunks
from ejkernel.kernels.common.sizes import ceil_div, power_of_two
from ejkernel.kernels.common.triton_launch import TritonLaunch
from ejkernel.kernels.linear.delta.spec import dimensions
from ejkernel.kernels.linear.delta.triton.config import Config
from ejkernel.kernels.linear.delta.triton.gradients import delta_gradients_kernel
from ejkernel.kernels.linear.delta.triton.prepare import delta_prepare_kernel
from ejkernel.kernels.linear.delta.triton.scan import delta_backward_kernel, delta_forward_kernel, delta_token_kernel
from ejkernel.kernels.linear.delta.triton.tiles import Constants
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays


class Prepared(NamedTuple):
    """What the chunks of a call need whatever the state is; with decays of channels, all that meets the state."""

    inverse: jax.Array
    scores: jax.Array
    reading: jax.Array | None = None
    erasing: jax.Array | None = None
    writing: jax.Array | None = None
    keep: jax.Array | None = None


@dataclass(frozen=True)
class Launches:
    """The kernels of one call.

    Attributes:
        chunks: (B or 1, rows, 2): the first token of each chunk and the one behind its last, of packed sequences.
        sequences: (B or 1, N, 3): of each sequence, and its first chunk.
    """

    call: Call
    config: Config
    constants: Constants
    chunks: jax.Array | None
    sequences: jax.Array | None

    @classmethod
    def of(cls, call: Call, config: Config) -> "Launches":
        _, T, H, Hk, D, Dv, N = dimensions(call)
        rows, chunks, sequences, cu = ceil_div(T, config.chunk), None, None, call.get("cu_seqlens")
        if cu is not None:
            rows = max(1, max_packed_chunks(T, N, config.chunk))
            packed = packed_chunks(cu, config.chunk, rows)
            chunks = jnp.stack([packed.start, packed.end], -1)
            sequences = jnp.stack([cu[:, :-1], cu[:, 1:], packed.first_row[:, :-1]], -1)
        dtype = call["query"].dtype
        # decays in bfloat16 have 8 bits of the 24 that a float32 has; what is multiplied may have as few
        wide = "gk" in call and call["gk"].dtype == jnp.float32
        constants = Constants(
            H=H,
            HK=Hk,
            K=D,
            V=Dv,
            BK=power_of_two(D, 16),
            BV=min(config.block_v, power_of_two(Dv, 16)),
            CHUNK=config.chunk,
            ROWS=rows,
            SEQUENCES=N,
            PACKED=cu is not None,
            TABLE_BATCHED=cu is not None and cu.shape[0] > 1,
            HAS_G="g" in call,
            HAS_GK="gk" in call,
            HAS_BETA="beta" in call,
            HAS_ERASE="erase_key" in call,
            HAS_WRITE="write_gate" in call,
            STAGES=config.num_stages,
            PRECISION="tf32x3" if dtype == jnp.float32 else "tf32",
            TERMS=1 if not wide else 3 if dtype == jnp.float32 else 2,
        )
        return cls(call, config, constants, chunks, sequences)

    def tokens(self) -> tuple[jax.Array, jax.Array]:
        """Out and the final states of few tokens."""
        spec, call = self.call.spec, self.call
        constants = replace(
            self.constants, HAS_START="initial_state" in call, WITH_OUT=spec.with_out, WITH_STATE=spec.with_state
        )
        shapes = [self._of_values(spec.with_out, call["value"].dtype), self._of_state(spec.with_state)]
        values = {"p_q": call["query"], "p_k": call["key"], "p_erase": call.get("erase_key")}
        return self._by_sequence(delta_token_kernel, constants, shapes, values)

    def prepare(self) -> Prepared:
        B, T, H, _, D, *_ = dimensions(self.call)
        dtype, per_channel = self._operand_dtype, "gk" in self.call
        pairs, channels = (B, T, H, self.config.chunk), (B, T, H, D)
        shapes = [_struct(pairs, True, dtype), _struct(pairs, True, dtype)]
        shapes += 3 * [_struct(channels, per_channel, dtype)] + [_struct((B, self.constants.ROWS, H, D), per_channel)]
        constants = replace(self.constants, BK=min(32 if per_channel else 64, self.constants.BK))
        values = {"p_q": self.call["query"], "p_k": self.call["key"], "p_erase": self.call.get("erase_key")}
        results = self._by_chunk(delta_prepare_kernel, constants, shapes, values)
        return Prepared(*results[:2], *(x if per_channel else None for x in results[2:]))

    def forward(self, prepared: Prepared, *, with_states: bool = False) -> tuple[jax.Array, ...]:
        """Out, the final states, and with `with_states` instead the states before chunks, and what tokens write."""
        spec, dtype = self.call.spec, self.call["value"].dtype
        with_out, with_state = (some and not with_states for some in (spec.with_out, spec.with_state))
        constants = replace(
            self._of_scan(),
            HAS_START="initial_state" in self.call,
            WITH_OUT=with_out,
            WITH_STATE=with_state,
            WITH_STATES=with_states,
        )
        shapes = [self._of_values(with_out, dtype), self._of_state(with_state)]
        shapes += [self._of_chunks(with_states), self._of_values(with_states, self._operand_dtype)]
        return self._by_sequence(delta_forward_kernel, constants, shapes, self._prepared(prepared))

    def backward(self, prepared: Prepared, dout: jax.Array, dstate: jax.Array | None) -> tuple[jax.Array, ...]:
        """The gradients of what is left to write, of the states after chunks, and of those at the start."""
        with_dstart = "initial_state" in self.call
        constants = replace(self._of_scan(), HAS_DSTATE=dstate is not None, WITH_DSTART=with_dstart)
        shapes = [self._of_values(True, self._operand_dtype), self._of_chunks(True), self._of_state(with_dstart)]
        values = self._prepared(prepared) | {"p_dout": dout, "p_dstate": dstate}
        return self._by_sequence(delta_backward_kernel, constants, shapes, values)

    def gradients(
        self, dout: jax.Array, written: jax.Array, drest: jax.Array, states: jax.Array, dstates: jax.Array
    ) -> Arrays:
        """Of all arrays of tokens."""
        call, (B, T, H, Hk, D, _, _) = self.call, dimensions(self.call)
        of_keys = _struct((B, T, H, D), True, call["query"].dtype if Hk == H else jnp.float32)
        block_k = min(32 if "gk" in call else 64, self.constants.BK)
        constants = replace(self.constants, BK=block_k, SPLITS=ceil_div(D, block_k), BV=min(self.constants.BV, 32))
        summed = (B, T, H, constants.SPLITS)
        wanted = {"g": summed, "gk": (B, T, H, D), "beta": summed, "erase_key": (B, T, H, D)}
        wanted["write_gate"] = call["value"].shape
        shapes = [of_keys, of_keys, self._of_values(True, call["value"].dtype)]
        shapes += [_struct(shape, name in call) for name, shape in wanted.items()]
        values = {"p_q": call["query"], "p_k": call["key"], "p_erase": call.get("erase_key"), "p_dout": dout}
        values |= {"p_written": written, "p_drest": drest, "p_states": states, "p_dstates": dstates}
        dq, dk, dv, *others = self._by_chunk(delta_gradients_kernel, constants, shapes, values)
        if Hk != H:
            dq, dk = (x.reshape(B, T, Hk, H // Hk, D).sum(3) for x in (dq, dk))
        given = {"query": dq, "key": dk, "value": dv} | dict(zip(wanted, others, strict=True))
        given = {name: x for name, x in given.items() if name in call}
        given |= {name: given[name].sum(3) for name in ("g", "beta") if name in call}
        return {name: x.astype(call[name].dtype) for name, x in given.items()}

    @property
    def _operand_dtype(self) -> Any:
        """Of what products take: float16 may not hold it."""
        dtype = self.call["query"].dtype
        return jnp.float32 if dtype == jnp.float16 else dtype

    def _of_scan(self) -> Constants:
        """With decays of channels, those of heads are in what meets the state."""
        return replace(self.constants, HAS_G=self.constants.HAS_G and not self.constants.HAS_GK)

    def _of_values(self, wanted: bool, dtype: Any) -> jax.ShapeDtypeStruct:
        return _struct(self.call["value"].shape, wanted, dtype)

    def _of_state(self, wanted: bool) -> jax.ShapeDtypeStruct:
        B, _, H, _, D, Dv, N = dimensions(self.call)
        return _struct((B, N, H, D, Dv), wanted)

    def _of_chunks(self, wanted: bool) -> jax.ShapeDtypeStruct:
        B, _, H, _, D, Dv, _ = dimensions(self.call)
        return _struct((B, self.constants.ROWS, H, D, Dv), wanted, self._operand_dtype)

    def _prepared(self, prepared: Prepared) -> dict[str, Any]:
        """What meets the state."""
        call = self.call
        given = (call["query"], call.get("erase_key"), call["key"])
        if prepared.reading is not None:
            given = prepared.reading, prepared.erasing, prepared.writing
        values = dict(zip(("p_q", "p_erase", "p_k"), given, strict=True))
        return values | {"p_keep": prepared.keep, "p_inverse": prepared.inverse, "p_scores": prepared.scores}

    def _by_chunk(self, kernel: Any, constants: Constants, shapes: Any, values: dict[str, Any]) -> Any:
        programs = self.call["query"].shape[0] * constants.ROWS * constants.H * constants.SPLITS
        return self._run(kernel, constants, shapes, values, programs, self.config.chunk_warps, 1)

    def _by_sequence(self, kernel: Any, constants: Constants, shapes: Any, values: dict[str, Any]) -> Any:
        programs = self.call["query"].shape[0] * constants.SEQUENCES * constants.H * constants.BLOCKS
        return self._run(kernel, constants, shapes, values, programs, self.config.num_warps, self.config.num_stages)

    def _run(
        self,
        kernel: Any,
        constants: Constants,
        shapes: Any,
        values: dict[str, Any],
        programs: int,
        warps: int,
        stages: int,
    ) -> Any:
        call = self.call
        names = {"p_v": call["value"], "p_chunks": self.chunks, "p_sequences": self.sequences}
        arrays = {"p_g": "g", "p_gk": "gk", "p_beta": "beta", "p_write": "write_gate", "p_start": "initial_state"}
        names |= {name: call.get(array) for name, array in arrays.items()}
        names |= {"T": call["query"].shape[1], "scale": call.spec.scale}
        return TritonLaunch(names | values, constants, (programs,), warps, stages).run(kernel, shapes)


def _struct(shape: tuple[int, ...], wanted: bool = True, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An output; of what is not wanted, one number."""
    return jax.ShapeDtypeStruct(shape if wanted else (1,), dtype)

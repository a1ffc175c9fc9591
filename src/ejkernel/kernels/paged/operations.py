"""The operations built on the paged family, and where their implementations live."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel.kernels.common.sizes import rounded_sizes
from ejkernel.kernels.common.struct_call import struct_call
from ejkernel.kernels.paged.calls import decode_call, page_call, prefill_call, ragged_decode_call, ragged_page_call
from ejkernel.kernels.paged.sharded import along_length, along_pages
from ejkernel.kernels.paged.spec import (
    ARRAYS,
    BY_SEQUENCE,
    CONTIGUOUS,
    NO_GRADIENT,
    OUTPUTS,
    OUTPUTS_BY_SEQUENCE,
    dimensions,
    finish,
)
from ejkernel.ops import Call, Dims, Operation, Shards, Splits, run
from ejkernel.ops.operation import Arrays, random_arrays
from ejkernel.ops.sharding import axes_of

IMPLEMENTATIONS = {
    "xla": "ejkernel.kernels.paged.xla",
    "pallas": {"tpu": "ejkernel.kernels.paged.pallas_tpu"},
    "triton": "ejkernel.kernels.paged.triton",
}
PREFERENCE = {"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("pallas", "xla")}


def bucket(call: Call) -> str:
    """The shape bucket of a call: its sizes rounded, and what changes the work."""
    dims, spec = dimensions(call), call.spec
    sizes = {"T": dims.T, "N": dims.N, "S": dims.S, "L": dims.L, "H": dims.H, "K": dims.Hkv, "D": dims.D, "V": dims.Dv}
    cache = call["kv_pages" if "kv_pages" in call else "key_pages"].dtype.name
    kind = "ragged" if spec.tokens is None else "even"
    limited = spec.window is not None or spec.chunk is not None or "window" in call
    window = ["window"] * limited + [f"{name}_fn" for name, rule in spec.rules._asdict().items() if rule is not None]
    return "-".join([rounded_sizes(sizes.items()), call["query"].dtype.name, cache, kind, *window])


def page_structs(
    *, H: int = 8, Hkv: int = 2, D: int = 64, Dv: int | None = None, L: int = 16, dtype: str = "bfloat16",
    cache: str | None = None, tokens: int = 1, N: int = 4, W: int = 8, **options: Any,
) -> Call:  # fmt: skip
    """A call of `page_attention` on shapes alone."""
    struct = jax.ShapeDtypeStruct
    query, pages = struct((N, tokens, H, D), dtype), [struct((N * W, L, Hkv, d), cache or dtype) for d in (D, Dv or D)]
    return struct_call(page_call, query, *pages, struct((N,), "int32"), struct((N, W), "int32"), **options)


def _biased() -> Callable[..., Any]:
    bias = jnp.ones(128)
    return lambda score, b, h, i, j: score + bias[j]


def probes() -> dict[str, Call]:
    """One small call per feature."""
    struct = jax.ShapeDtypeStruct
    lens, table = struct((4,), "int32"), struct((4, 8), "int32")
    packed, pages = struct((40, 8, 64), "bfloat16"), struct((32, 16, 4, 64), "bfloat16")
    halves, flat = [struct((32, 16, 2, 64), "bfloat16")] * 2, [struct((512, 2, 64), "bfloat16")] * 2
    whole = [struct((4, 100, 2, 64), "bfloat16")] * 2
    batch = struct((4, 8, 64), "bfloat16")
    ones = partial(jnp.ones, 2)
    return {
        "decode": page_structs(),
        "several tokens each": page_structs(tokens=4),
        "mixed batch (`ragged_page_attention`)": struct_call(
            ragged_page_call, packed, pages, lens, table, struct((5,), "int32"), struct((), "int32")
        ),
        "one sequence's chunk (`prefill_page_attention`)": struct_call(
            prefill_call, packed, *halves, struct((), "int32"), struct((8,), "int32")
        ),
        "flat buffer (`decode_attention`)": struct_call(decode_call, batch, *flat, table, lens, page_size=1),
        "contiguous cache (`ragged_decode_attention`)": struct_call(ragged_decode_call, batch, *whole, lens, lens),
        "sliding window": page_structs(sliding_window=32),
        "chunks": page_structs(chunk_size=32),
        "traced window": page_structs(sliding_window=partial(jnp.ones, (), "int32")),
        "`score_fn`, traced soft cap": page_structs(logits_soft_cap=partial(jnp.ones, ())),
        "`mask_fn`": page_structs(mask_fn=lambda: lambda b, h, i, j: (i - j) % 2 == 0),
        "`tree_mask`": page_structs(tokens=4, tree_mask=partial(jnp.ones, (4, 4), bool)),
        "functions that read an array at keys": page_structs(score_fn=_biased),
        "sinks": page_structs(softmax_aux=lambda: jnp.zeros(8)),
        "soft cap": page_structs(logits_soft_cap=30.0),
        "num_splits": page_structs(num_splits=4),
        "float8_e4m3fn cache": page_structs(cache="float8_e4m3fn", k_scale=ones, v_scale=ones),
        "float8_e5m2 cache": page_structs(cache="float8_e5m2", k_scale=ones, v_scale=ones),
        "int8 cache": page_structs(cache="int8", k_scale=ones, v_scale=ones),
        "page size 1": page_structs(L=1),
        "page size 256": page_structs(L=256),
        "MQA, 64 query heads": page_structs(H=64, Hkv=1),
        "head_dim 256": page_structs(D=256),
        "head_dim 40": page_structs(D=40),
        "Dv != D": page_structs(Dv=32),
        "float16": page_structs(dtype="float16"),
        "float32": page_structs(dtype="float32"),
    }


def example(call: Call) -> Arrays:
    """A call like this one whose sequences are as long as the table allows, on pages of their own where there are
    enough; all have about as many queries.
    """
    dims, arrays = dimensions(call), random_arrays(call)
    pages = call["kv_pages" if "kv_pages" in call else "key_pages"].shape[1]

    def filled(name: str, values: Any) -> Arrays:
        x = call.get(name)
        return {} if x is None else {name: jnp.broadcast_to(jnp.asarray(values, x.dtype), x.shape)}

    table = call.get("block_tables")
    ids = 0 if table is None else np.arange(np.prod(table.shape[1:])).reshape(table.shape[1:]) % pages
    return (
        arrays
        | filled("context_lens", dims.S)
        | filled("block_tables", ids)
        | filled("query_start", np.linspace(0, dims.T, dims.N + 1).astype(np.int32))
        | filled("num_seqs", dims.N)
        | filled("k_scale", 1.0)
        | filled("v_scale", 1.0)
    )


_family = partial(
    Operation,
    implementations=IMPLEMENTATIONS,
    preference=PREFERENCE,
    bucket=bucket,
    example=example,
    probes=probes,
    no_gradient=NO_GRADIENT,
)

_splits = partial(Splits, free=("B", "N", "H", "Hkv"), grouped=(("H", "Hkv"),))
_BY_PAGES = _splits(passed_on={"P": along_pages})
_BY_LENGTH = _splits(passed_on={"S": along_length})
_PACKED = _splits(otherwise={"P": "page_attention and decode_attention split pages"})

PAGE_ATTENTION = _family(name="page_attention", arrays=BY_SEQUENCE, outputs=OUTPUTS_BY_SEQUENCE, splits=_BY_PAGES)
RAGGED_PAGE_ATTENTION = _family(name="ragged_page_attention", arrays=ARRAYS, outputs=OUTPUTS, splits=_PACKED)
PREFILL_PAGE_ATTENTION = _family(name="prefill_page_attention", arrays=ARRAYS, outputs=OUTPUTS, splits=_PACKED)
DECODE_ATTENTION = _family(name="decode_attention", arrays=BY_SEQUENCE, outputs=OUTPUTS_BY_SEQUENCE, splits=_BY_PAGES)
RAGGED_DECODE_ATTENTION = _family(
    name="ragged_decode_attention", arrays=CONTIGUOUS, outputs=OUTPUTS_BY_SEQUENCE, splits=_BY_LENGTH
)
CASCADE_ATTENTION = replace(
    PAGE_ATTENTION,
    name="cascade_attention",
    implementations={},
    made_of=(PREFILL_PAGE_ATTENTION.name, PAGE_ATTENTION.name),
)

OPERATIONS = (
    PAGE_ATTENTION,
    RAGGED_PAGE_ATTENTION,
    PREFILL_PAGE_ATTENTION,
    DECODE_ATTENTION,
    RAGGED_DECODE_ATTENTION,
    CASCADE_ATTENTION,
)


def _rows_whole(specs: Any, letters: dict[str, Any], mesh: Any) -> Any:
    """Specs that split no sequences and no tokens: the one row that stands in for none is on every device."""
    for name, spec in (specs or {}).items():
        for axis in (axis for entry in spec for axis in axes_of(entry)):
            if axis not in mesh.shape:
                raise ValueError(f"the spec {spec} of {name} has mesh axis {axis!r}; the mesh has {dict(mesh.shape)}")
    rows = ("N", "T")
    return specs and {
        name: PartitionSpec(*(None if letter in rows else entry for letter, entry in zip(letters[name], spec)))
        for name, spec in specs.items()
    }


def attend(
    operation: Operation,
    call: Call,
    shape: tuple[int, ...],
    split: Shards,
    *,
    batched: bool,
    platform: str | None,
    cfg: Any,
) -> Any:
    """What the caller asked for, whose query has that shape and whose canonical arrays are split like this."""
    if call.spec.stands_in or 0 in shape:
        inputs = {name: dims.axes for name, dims in operation.arrays.items()}
        outputs = {name: Dims(letters).axes for name, letters in operation.outputs.items()}
        mesh = split.found_mesh
        split = Shards(mesh, _rows_whole(split.in_specs, inputs, mesh), _rows_whole(split.out_specs, outputs, mesh))
    return finish(call, run(operation, call, platform=platform, cfg=cfg, shards=split), shape, batched=batched)

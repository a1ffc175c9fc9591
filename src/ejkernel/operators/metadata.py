"""The settings of an attention operator."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from ejkernel.checks.arrays import FLOATS
from ejkernel.checks.options import number, static_int
from ejkernel.ops import PLATFORMS

BACKENDS = ("cpu", "gpu", "cuda", "rocm", "tpu")

Axis = str | tuple[str, ...] | None
Mode = Literal["prefill", "decode"]


@dataclass(frozen=True)
class PartitionAxis:
    """The mesh axes that each dimension is split over. Axes that the mesh does not have split nothing."""

    batch_axis: Axis = ("dp", "fsdp")
    head_axis: Axis = "tp"
    query_sequence_axis: Axis = "sp"
    key_sequence_axis: Axis = "sp"


@dataclass(frozen=True)
class AttentionMetadata:
    """The settings that all calls of an operator share.

    Attributes:
        runtime_dtype: queries, keys and values are cast to it; None leaves them as they are.
        runtime_softmax_dtype: logits are rounded to it before the softmax; None is float32.
        sequence_axis_name: the mesh axis along which ring attention passes keys on.
        mesh: devices to split calls over, as `partition_axis` says; None leaves it to the arrays.
        platform: None or "auto", "xla", "triton", "pallas", "cudnn", "cute".
        backend: "cpu", "gpu", "cuda", "rocm" or "tpu": which `forward_*` a call takes. None: that of this machine.
        partition_axis: a `PartitionAxis`, or anything that has its fields; None is the default one.
        softmax_scale: None is `head_dim ** -0.5`.
        dropout_prob: chance that a weight is dropped, in calls with `deterministic=False`.
        blocksize_q: queries per tile on XLA and TPUs; kernels of GPUs have tiles of their own. Answers do not depend
            on it. None: what is best.
        blocksize_k: the same for keys.
        blocksize_b: rows per tile: kernels take 1.

    >>> from ejkernel.operators import AttentionMetadata
    >>> AttentionMetadata(softmax_scale=0.125, backend="npu")
    Traceback (most recent call last):
        ...
    ValueError: backend 'npu' is unknown; use one of cpu, gpu, cuda, rocm, tpu
    """

    runtime_dtype: DTypeLike | None = None
    runtime_softmax_dtype: DTypeLike | None = None
    sequence_axis_name: str = "sp"
    mesh: Mesh | None = None
    platform: str | None = None
    backend: str | None = None
    partition_axis: Any = None
    softmax_scale: float | None = None
    dropout_prob: float = 0.0
    blocksize_q: int | None = None
    blocksize_k: int | None = None
    blocksize_b: int | None = None

    def __post_init__(self) -> None:
        if self.backend not in (None, *BACKENDS):
            raise ValueError(f"backend {self.backend!r} is unknown; use one of {', '.join(BACKENDS)}")
        if self.platform not in (None, "auto", *PLATFORMS):
            raise ValueError(f"platform {self.platform!r} is unknown; use auto, {', '.join(PLATFORMS)}")
        for name in ("runtime_dtype", "runtime_softmax_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and jnp.dtype(dtype).name not in FLOATS:
                raise ValueError(f"{name} {jnp.dtype(dtype).name} is not supported; use one of {', '.join(FLOATS)}")
        if not 0.0 <= number("dropout_prob", self.dropout_prob) < 1.0:
            raise ValueError(f"dropout_prob={self.dropout_prob} must be at least 0 and below 1")
        for name in ("blocksize_q", "blocksize_k", "blocksize_b"):
            if getattr(self, name) is not None:
                static_int(name, getattr(self, name), 1)
        if self.blocksize_b not in (None, 1):
            raise ValueError(f"blocksize_b={self.blocksize_b}: kernels take one row of the batch per tile, use 1")

    @classmethod
    def from_config(
        cls, config: Any, softmax_scale: float | None = None, dropout_prob: float = 0.0
    ) -> "AttentionMetadata":
        """The settings that a model's config has; its dtypes are `attn_dtype` and `attn_softmax_dtype`.

        Args:
            config: any object; of the settings it has as attributes, those that are not None are taken.
            softmax_scale: None is that of the config, or `head_dim ** -0.5` where it has none.
            dropout_prob: as in the settings.

        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(attn_dtype="bfloat16", blocksize_q=128)
        >>> metadata = AttentionMetadata.from_config(config, softmax_scale=0.125)
        >>> metadata.runtime_dtype, metadata.blocksize_q, metadata.sequence_axis_name
        ('bfloat16', 128, 'sp')
        """
        config_names = {"runtime_dtype": "attn_dtype", "runtime_softmax_dtype": "attn_softmax_dtype"}
        names = [field.name for field in fields(cls)]
        settings = {name: getattr(config, config_names.get(name, name), None) for name in names}
        settings["dropout_prob"] = dropout_prob
        if softmax_scale is not None:
            settings["softmax_scale"] = softmax_scale
        return cls(**{name: setting for name, setting in settings.items() if setting is not None})

    def specs(
        self, mode: Mode, query: tuple[int, ...], key: tuple[int, ...], *, split_length: bool = False
    ) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec] | None:
        """How query, key and value, (B, T, H, D) of these shapes, are split over the mesh; None without one.

        Axes that do not divide a dimension do not split it. Lengths are split with `split_length` alone, and the one
        query of decoding never.
        """
        if self.mesh is None:
            return None
        axes = PartitionAxis() if self.partition_axis is None else self.partition_axis
        (B, T, H, _), (S, Hkv) = query, key[1:3]
        batch = self._fitting(axes.batch_axis, B)
        heads = self._fitting(axes.head_axis, H if Hkv == 1 else math.gcd(H, Hkv))
        T_axes = self._fitting(axes.query_sequence_axis, T) if split_length and mode == "prefill" else None
        S_axes = self._fitting(axes.key_sequence_axis, S) if split_length else None
        keys = PartitionSpec(batch, S_axes, None if Hkv == 1 else heads, None)
        return PartitionSpec(batch, T_axes, heads, None), keys, keys

    def _fitting(self, axes: Axis, size: int) -> Axis:
        """Those axes of the mesh, in order, that divide a dimension of this size."""
        assert self.mesh is not None
        chosen: list[str] = []
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            if axis in self.mesh.shape and size % math.prod(self.mesh.shape[name] for name in (*chosen, axis)) == 0:
                chosen.append(axis)
        return tuple(chosen) or None

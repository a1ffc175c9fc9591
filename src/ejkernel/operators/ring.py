"""The operator over sequences that are split over devices."""

from typing import Any

import jax

from ejkernel.modules import ring_attention
from ejkernel.operators.impl import AttentionOutput
from ejkernel.operators.registry import AttentionRegistry
from ejkernel.operators.softmax import FlashAttn, InitBias
from ejkernel.ops.target import ambient_mesh


@AttentionRegistry.register
class RingAttn(FlashAttn):
    """`ejkernel.modules.ring_attention` along the sequence axis of the settings; what is not split is `FlashAttn`'s.

    >>> import jax, jax.numpy as jnp
    >>> from ejkernel.operators import AttentionMetadata, RingAttn
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("sp",))
    >>> q = jnp.ones((1, 128, 4, 16))
    >>> RingAttn(AttentionMetadata(mesh=mesh))(q, q, q).attention_outputs.shape
    (1, 128, 4, 16)
    """

    @classmethod
    def get_impl_name(cls) -> str:
        return "ring"

    def forward_native(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any = None,
        bias: jax.Array | None = None,
        init_bias: InitBias | None = None,
        deterministic: bool = False,
        dropout_rng: Any = None,
        causal: bool = True,
        *,
        cache_view: Any = None,
        cache_metadata: Any = None,
        **ignore: Any,
    ) -> AttentionOutput:
        """As in `FlashAttn`. Keys travel where the mesh has the sequence axis and it divides both lengths."""
        dropout = {"deterministic": deterministic, "dropout_rng": dropout_rng}
        caches = {"cache_view": cache_view, "cache_metadata": cache_metadata}
        return super().forward_native(q, k, v, mask, bias, init_bias, causal, **dropout, **caches, **ignore)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        if not self._splits_lengths(q, k):
            return super().attend(q, k, v, **options)
        return ring_attention(q, k, v, axis_name=self.metadata.sequence_axis_name, **options)

    def _splits_lengths(self, q: jax.Array, k: jax.Array) -> bool:
        """Whether the sequence axis of the mesh, given or around the call, splits these lengths."""
        mesh, axis = self.metadata.mesh, self.metadata.sequence_axis_name
        try:
            return jax.lax.axis_size(axis) > 1  # inside a shard_map over it
        except NameError:
            pass
        mesh = ambient_mesh() if mesh is None else mesh
        shards = 1 if mesh is None else mesh.shape.get(axis, 1)
        return shards > 1 and q.shape[1] % shards == 0 and k.shape[1] % shards == 0

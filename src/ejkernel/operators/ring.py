"""The operator over sequences that are split over devices."""

from typing import Any

import jax

from ejkernel.kernels.softmax.spec import initial_bias
from ejkernel.modules import ring_attention
from ejkernel.operators.impl import AttentionOutput, mask_of
from ejkernel.operators.registry import AttentionRegistry
from ejkernel.operators.softmax import PAGED, FlashAttn, InitBias
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
        self.warn_of_ignored(ignore)
        self.refuse(PAGED, cache_metadata=cache_metadata)
        q, k, v = self.cast(q=q, k=k, v=v)
        if not self._splits_lengths(q, k):
            dropout = {"deterministic": deterministic, "dropout_rng": dropout_rng}
            return super().forward_native(q, k, v, mask, bias, init_bias, causal, **dropout, cache_view=cache_view)
        dropout = self.dropout(deterministic)
        out = ring_attention(
            q,
            k,
            v,
            initial_bias(bias, init_bias, mask),
            axis_name=self.metadata.sequence_axis_name,
            mask_info=mask_of(q, k, mask if bias is None else None, cache_view),
            causal=causal,
            softmax_scale=self.metadata.softmax_scale,
            dropout_prob=dropout,
            dropout_seed=dropout_rng if dropout else None,
            logits_dtype=self.metadata.runtime_softmax_dtype,
            platform=self.metadata.platform,
            mesh=self.metadata.mesh,
        )
        return AttentionOutput(attention_outputs=out)

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

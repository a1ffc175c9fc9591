"""One small call of every public operation and of each way of calling it: what any use of JAX must leave alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import modules
from ejkernel.kernels.paged import ragged
from ejkernel.types import BlockPattern, MaskInfo
from harness.checks import normal

B, T, H, Hkv, D, L = 1, 6, 2, 1, 4, 2
IDS = np.array([[0, 0, 1, 1, 0, -1]])
CU, CU_KEYS = np.array([0, 2, 5], np.int32), np.array([0, 3, 6], np.int32)
TABLES = np.array([[3, 1, 2], [3, 9, -9], [3, 0, 9]], np.int32)
LENS = np.array([6, 2, 3], np.int32)

ATTENTION = {"query": (B, T, H, D), "key": (B, T, Hkv, D), "value": (B, T, Hkv, D)}
PACKED = {name: shape[1:] for name, shape in ATTENTION.items()}
EXTRA = {"bias": (H, 1, T), "softmax_aux": (H, 2)}
QUERY = {"query": (3, H, D)}
CACHES = {"key_cache": (4, L, Hkv, D), "value_cache": (4, L, Hkv, D)}
INT8 = {name: np.ones(shape, np.int8) for name, shape in CACHES.items()}
SCALES = {"k_scale": np.ones(Hkv, np.float32), "v_scale": np.float32(0.5)}
PAGED = {**QUERY, **CACHES, "context_lens": LENS, "block_tables": TABLES}
RAGGED = {
    "queries": (7, H, D),
    "kv_pages": (4, L, 2 * Hkv, D),
    "context_lens": np.array([6, 0, 3], np.int32),
    "block_tables": TABLES,
    "query_start_loc": np.array([0, 2, 2, 5], np.int32),
    "num_seqs": np.int32(3),
}
PREFILL = {**QUERY, **CACHES, "context_len": np.int32(5), "page_indices": TABLES[0]}
BUFFERS = {"key_buffer": (8, Hkv, D), "value_buffer": (8, Hkv, D), "req_to_tokens": TABLES, "seq_lens": LENS}
CONTIGUOUS = {"key": (3, T, Hkv, D), "value": (3, T, Hkv, D), "sequence_start": LENS // 2, "sequence_end": LENS}
PARTS = {
    "q": (3, H, D),
    "k": (3, T, D),
    "v": (3, T, D),
    "lengths": LENS,
    "starts": LENS - np.array([4, 0, 1], np.int32),
}
TOKENS = {"key": (3, Hkv, D), "value": (3, Hkv, D), "slots": np.array([5, -1, 0], np.int32)}


LINEAR = {"query": (B, T, H, D), "key": (B, T, H, D), "value": (B, T, H, Hkv)}
DECAYS = {"g": (B, T, H), "gv": (B, T, H, Hkv)}
STATES = {"initial_state": (len(CU) - 1, H, D, Hkv), "g_gamma": -np.ones(H, np.float32), "cu_seqlens": CU}
DELTA = {"query": (B, T, Hkv, D), "key": (B, T, Hkv, D), "value": (B, T, H, D), "g": (B, T, H), "beta": (B, T, H)}
DELTA_STATES = {"initial_state": (len(CU) - 1, H, D, D), "erase_key": (B, T, H, D), "cu_seqlens": CU}
PRODUCT = {"query": (B, T, Hkv, D), "key": (B, T, 2, Hkv, D), "value": (B, T, 2, H, D), "beta": (B, T, 2, H)}
RWKV = dict.fromkeys(("r", "k", "v", "a", "b"), (B, T, H, D)) | {"w": -np.ones((B, T, H, D), np.float32)}
MAMBA = {"x": (B, T, H, Hkv), "dt": (B, T, H), "A": -np.ones(H, np.float32), "D": (H,)}
MAMBA |= dict.fromkeys(("B", "C"), (B, T, Hkv, D))
GATES = dict.fromkeys(("g_cmp", "g_slc", "g_swa"), (B, T, H))
PACKED_SPARSE = ATTENTION | {"g_slc": (B, T, H), "cu_seqlens": CU}
NATIVE = {"block_size": 1, "block_counts": 4, "window_size": 2}
SELECTED = ATTENTION | {"block_indices": np.arange(B * T * Hkv * 2).reshape(B, T, Hkv, 2) % 3, "softmax_aux": (H,)}


class Sample(NamedTuple):
    """A call of a public function.

    Attributes:
        arrays: by name; a shape stands for random numbers.
        options: given by keyword; what is callable is called first, where the sample runs.
        train: whether there are gradients.
        dtype: of the random numbers.
    """

    function: Callable[..., Any]
    arrays: dict[str, Any]
    options: dict[str, Any]
    train: bool = True
    dtype: str = "float32"

    def given(self) -> dict[str, jax.Array]:
        drawn = {name: normal(name, x, self.dtype) for name, x in self.arrays.items() if isinstance(x, tuple)}
        return {name: drawn[name] if name in drawn else jnp.asarray(x) for name, x in self.arrays.items()}

    def made(self) -> dict[str, Any]:
        """The options."""
        return {name: x() if callable(x) else x for name, x in self.options.items()}

    def run(self, arrays: dict[str, jax.Array], **where: Any) -> list[jax.Array]:
        """Outputs, and the gradients of all floats."""
        options = self.made() | where
        if not self.train:
            return jax.tree.leaves(self.function(**arrays, **options))
        floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        outputs, pull = jax.vjp(lambda floats: self.function(**{**arrays, **floats}, **options), floats)
        return jax.tree.leaves((outputs, pull(outputs)))


def trained(function: Callable[..., Any], arrays: dict[str, Any] = ATTENTION, **options: Any) -> Sample:
    return Sample(function, arrays, options)


def flash(arrays: dict[str, Any] = ATTENTION, dtype: str = "float32", **options: Any) -> Sample:
    tiles = {"block_q": 4, "block_k": 4}
    return Sample(modules.flash_attention, arrays, {"cfg": tiles, **options}, dtype=dtype)


def served(function: Callable[..., Any], arrays: dict[str, Any], dtype: str = "float32", **options: Any) -> Sample:
    return Sample(function, arrays, options, train=False, dtype=dtype)


def attention_mask(mask: MaskInfo) -> jax.Array:
    return mask.attention_mask


def mask(make: Callable[[], MaskInfo]) -> Sample:
    return Sample(attention_mask, {}, {"mask": make}, train=False)


def _segments() -> MaskInfo:
    lengths = MaskInfo(T, T).apply_kv_lengths([4])
    return MaskInfo.from_segments(IDS) & MaskInfo.from_segments(np.arange(T) // 5) & lengths


def _positions() -> MaskInfo:
    return MaskInfo.from_segments(IDS, None, np.arange(T)[None] // 2).apply_causal().apply_chunked(2)


def _union() -> MaskInfo:
    return MaskInfo(T, T).apply_causal() | MaskInfo.from_segments(IDS)


def _mask_and_pattern() -> MaskInfo:
    pattern = BlockPattern.from_dense(np.tri(3, dtype=bool), block_size=2)
    return MaskInfo.from_random(B, T, T, sparsity=0.2) & MaskInfo.from_block_pattern(pattern, q_len=T)


def _mesh() -> jax.sharding.Mesh:
    """Of one device: tests/ring has many."""
    return jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:1]), ("sp",))


# one line for an operation, and one for each way of calling it that takes another path
SAMPLES = {
    "plain": flash(),
    "window-bfloat16": flash(dtype="bfloat16", cfg=None, causal=True, sliding_window=(2, 0), return_lse=True),
    "segments": flash(mask_info=_segments),
    "positions": flash(mask_info=_positions),
    "union": flash(mask_info=_union),
    "mask-and-pattern": flash(mask_info=_mask_and_pattern),
    "bias-sinks-cap": flash(ATTENTION | EXTRA, logits_soft_cap=3.0, return_lse=True),
    "dropout": flash(dropout_prob=0.3, dropout_seed=lambda: jnp.uint32(7)),
    "unnormalised": flash(ATTENTION | EXTRA, normalize_output=False, logits_dtype="bfloat16"),
    "packed": flash(PACKED | {"cum_seqlens_q": CU, "cum_seqlens_k": CU_KEYS}, causal=True),
    "sdpa": trained(modules.scaled_dot_product_attention, causal=True),
    "dot-product": trained(modules.dot_product_attention, ATTENTION | {"mask": IDS[:, None, :, None] >= 0}),
    "blocksparse": trained(modules.blocksparse_attention, block_mask=np.tri(3, dtype=bool), block_size=2),
    "weights": trained(modules.attention, mask_info=_segments),
    "weights-dropout": trained(
        modules.attention, dropout_prob=0.3, dropout_rng=lambda: jax.random.key(0), deterministic=False
    ),
    "packed-recurrent": trained(modules.recurrent_attention, LINEAR | STATES, return_state=True),
    "recurrent": trained(modules.recurrent_attention, LINEAR | DECAYS, reverse=True),
    "gla": trained(modules.gla_attention, LINEAR | {"g": (B, T, H, D)}, return_state=True),
    "lightning": trained(modules.lightning_attention, LINEAR, layer_idx=1, num_layers=3),
    "delta": trained(modules.gated_delta_rule, DELTA | {"segment_ids": IDS}),
    "packed-delta": trained(modules.gated_delta_rule, DELTA | DELTA_STATES, return_state=True, qk_norm=True),
    "kimi": trained(modules.kimi_delta_attention, DELTA | {"g": (B, T, H, D)}, return_state=True),
    "delta-product": trained(modules.gated_delta_product, PRODUCT | {"cu_seqlens": CU}, return_state=True),
    "rwkv7": trained(modules.rwkv7_attention, RWKV | {"segment_ids": IDS}),
    "mamba2": trained(modules.mamba2_attention, MAMBA | {"cu_seqlens": CU}, return_state=True),
    "ring": trained(modules.ring_attention, ATTENTION, causal=True, mesh=_mesh),
    "zigzag": served(modules.to_zigzag, {"x": (B, T, H)}, devices=3),
    "zigzag-back": served(modules.from_zigzag, {"x": (B, T, H)}, devices=1),
    "mean-pooling": trained(modules.mean_pooling, {"x": (B, T, H, D)}, chunk_size=4),
    "mean-pooling-packed": trained(modules.mean_pooling, {"x": (1, T, H, D)}, chunk_size=2, cu_seqlens=CU),
    "native-sparse": trained(modules.native_sparse_attention, ATTENTION | GATES, **NATIVE),
    "packed-native-sparse": trained(modules.native_sparse_attention, PACKED_SPARSE, block_size=1, block_counts=4),
    "selected": trained(modules.selected_attention, SELECTED, block_size=2, return_lse=True),
    "select-blocks": served(
        modules.select_blocks, {"query": (B, T, H, D), "compressed_key": (B, T, Hkv, D)}, block_counts=4, block_size=1
    ),
    "page": served(modules.page_attention, PAGED, "bfloat16", num_splits=2, return_lse=True),
    "page-tokens": served(modules.page_attention, PAGED | SCALES | {"query": (3, 2, H, D), "softmax_aux": (H, 2)}),
    "page-int8": served(modules.page_attention, PAGED | INT8, sliding_window=2, logits_soft_cap=3.0),
    "ragged-page": served(modules.ragged_page_attention, RAGGED),
    "prefill-page": served(modules.prefill_page_attention, PREFILL, return_lse=True),
    "decode": served(modules.decode_attention, QUERY | BUFFERS, page_size=L, return_lse=True),
    "ragged-decode": served(modules.ragged_decode_attention, QUERY | CONTIGUOUS, return_lse=True),
    "parts": served(ragged.ragged_mqa, PARTS),
    "parts-defined": served(ragged.reference_mqa, PARTS),
    "cascade": served(modules.cascade_attention, PAGED | {"prefix_len": np.int32(2)}, return_lse=True),
    "write": served(modules.write_kv_pages, CACHES | TOKENS | {"k_scale": np.float32(2.0)}),
    "write-interleaved": served(modules.write_interleaved_kv_pages, {"kv_pages": RAGGED["kv_pages"], **TOKENS}),
    "mask-of-lengths": mask(lambda: MaskInfo.from_lengths([4], [3], q_len=T, kv_len=T)),
    "mask-of-padding": mask(lambda: MaskInfo.from_attention_mask(IDS >= 0)),
    "mask-of-cu-seqlens": mask(lambda: MaskInfo.from_cu_seqlens(CU, CU_KEYS, max_q_len=T)),
    "mask-of-token-types": mask(lambda: MaskInfo(T, T).apply_causal().apply_token_type_ids(IDS)),
    "mask-of-chunks": mask(lambda: MaskInfo(T, T).apply_chunked(4).apply_chunked(3)),
}

"""All that this package uses of JAX beyond its documented names: nothing else imports `jax._src`.

Seen in JAX 0.10.2, 0.11.2 and 0.12. What is used:

- the mesh that `jax.set_mesh` or `with mesh:` entered, with its devices. `jax.sharding.get_mesh`, where it works under
  a trace too, would replace it.
- cuDNN's attention as an operation with a forward and a backward of its own, and with packed sequences:
  `jax._src.cudnn.fused_attention_stablehlo`. `jax.nn.dot_product_attention` with offsets, an lse in the output and a
  backward that can be called alone would replace it.
- `set_global` of what `jax.make_user_context` gives. It is not in the documentation of that function.

Mosaic GPU's are in `kernels/softmax/mosaic_gpu`, Triton's and jax-triton's in `bridge`.
"""

from collections.abc import Iterator
from typing import Any


def entered_meshes() -> Iterator[Any]:
    """The meshes that surround a call, the innermost kind first; not all of them have devices."""
    from jax._src import mesh

    yield mesh.get_concrete_mesh()
    yield mesh.thread_resources.env.physical_mesh


def cudnn_attention() -> Any:
    """The module of cuDNN's attention."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def cudnn_takes_offsets() -> bool:
    """Whether its packed sequences are there: from JAX 0.5 on."""
    module = cudnn_attention()
    return hasattr(module, "_fix_seqlen_offsets") and hasattr(module, "_dot_product_attention_bwd_p_wrapper")


def count_up(context: Any) -> None:
    """Give a user context of numbers its next one, in all threads: programs are traced again."""
    context.set_global(context.get_global() + 1)

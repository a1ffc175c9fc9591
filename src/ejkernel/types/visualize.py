"""Pictures of a mask: text, or a matplotlib figure."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.types.parts import MaskParts

NONE, SOME, ALL = "·", "▒", "█"


def visibility(mask: MaskParts, batch: int, head: int, max_cells: int) -> np.ndarray:
    """The visible fraction per cell, at most (max_cells, max_cells); made in strips, never all of T x S at once."""
    B, H, T, S = mask.shape
    if not (0 <= batch < B and 0 <= head < H):
        raise ValueError(f"{batch=}, {head=} must lie within the mask's {B} rows and {H} heads")
    per_q, per_k = -(-T // max_cells), -(-S // max_cells)
    strips = []
    for start in range(0, T, per_q):
        index = jnp.arange(start, min(start + per_q, T))
        strip = np.asarray(mask.element_mask(index, jnp.arange(S)))  # (B|1, H|1, rows, S)
        strip = strip[min(batch, strip.shape[0] - 1), min(head, strip.shape[1] - 1)]
        edges = np.arange(0, S, per_k)
        seen = np.add.reduceat(strip.sum(axis=0), edges)
        strips.append(seen / (len(index) * np.diff(np.append(edges, S))))
    return np.stack(strips)


def text_picture(mask: MaskParts, *, batch: int = 0, head: int = 0, max_cells: int = 64) -> str:
    """One line per query (or group of queries), one character per key (or group): all, some or nothing visible."""
    cells = visibility(mask, batch, head, max_cells)
    lines = ["".join(ALL if x == 1 else NONE if x == 0 else SOME for x in row) for row in cells]
    return "\n".join([f"{mask!r}  batch {batch}, head {head}; rows: queries, columns: keys", *lines])


def figure(mask: MaskParts, *, batch: int = 0, head: int = 0, max_cells: int = 512) -> Any:
    """The same as a `matplotlib.figure.Figure`; needs matplotlib, opens no window."""
    from matplotlib.figure import Figure  # optional and slow to import

    cells = visibility(mask, batch, head, max_cells)
    picture = Figure(figsize=(5, 5))
    axes = picture.add_subplot()
    _, _, T, S = mask.shape
    axes.imshow(cells, cmap="Greys", vmin=0, vmax=1, extent=(-0.5, S - 0.5, T - 0.5, -0.5), interpolation="nearest")
    axes.set(xlabel="key", ylabel="query", title=repr(mask))
    return picture

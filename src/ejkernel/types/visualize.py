"""Pictures of masks and block patterns: text, SVG, or a matplotlib figure."""

from html import escape
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import concrete
from ejkernel.checks.options import static_int
from ejkernel.types.mask_fields import MaskFields

Kind = Literal["text", "svg", "figure"]

NONE, SOME, ALL = "·", "▒", "█"
SVG_SIZE = 240  # pixels of the longer side
MOST_DRAWN = 2**26  # pairs of a mask that a notebook draws unasked: a second's work


def visibility(mask: MaskFields, batch: int, head: int, max_cells: int) -> np.ndarray:
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
        strips.append(_visible_fractions(strip, len(index), per_k))
    return np.concatenate(strips)


def block_visibility(blocks: Any, batch: int, head: int, max_cells: int) -> np.ndarray:
    """The same of the blocks (B|1, H|1, nq, nk) of a pattern."""
    values = concrete(blocks)
    if values is None:
        raise ValueError("a picture needs concrete blocks, these are traced")
    B, H, nq, nk = values.shape
    if not (0 <= batch < B and 0 <= head < H):
        raise ValueError(f"{batch=}, {head=} must lie within the pattern's {B} rows and {H} heads")
    return _visible_fractions(values[batch, head], -(-nq // max_cells), -(-nk // max_cells))


def _visible_fractions(seen: np.ndarray, per_q: int, per_k: int) -> np.ndarray:
    """The fraction of pairs that is visible in each cell of so many rows and columns."""
    T, S = seen.shape
    rows, columns = np.arange(0, T, per_q), np.arange(0, S, per_k)
    sums = np.add.reduceat(np.add.reduceat(seen.astype(np.int64), rows, axis=0), columns, axis=1)
    tall, wide = np.minimum(per_q, T - rows), np.minimum(per_k, S - columns)
    return sums / (tall[:, None] * wide)


def drawn(kind: Kind, cells: np.ndarray, title: str, sizes: tuple[int, int], unit: str = "") -> Any:
    """A picture of visible fractions (q, k) that stand for `sizes` queries and keys."""
    if kind == "text":
        lines = ["".join(ALL if x == 1 else NONE if x == 0 else SOME for x in row) for row in cells]
        return "\n".join([f"{title}; rows: queries, columns: keys", *lines])
    if kind == "svg":
        return _svg(cells, title)
    if kind == "figure":
        return _figure(cells, title, sizes, unit)
    raise ValueError(f"kind must be 'text', 'svg' or 'figure', got {kind!r}")


def checked_cells(max_cells: Any) -> int:
    return static_int("max_cells", max_cells, 1)


def has_values(*leaves: Any) -> bool:
    """Whether these are arrays (tree maps put other things into masks) whose values are known."""
    return all(isinstance(x, jax.Array | np.ndarray) and concrete(x) is not None for x in leaves)


def html(title: str, svg: str) -> str:
    """What a notebook shows: the picture under its description."""
    return f"<div><code>{escape(title)}</code><br>{svg}</div>"


def _svg(cells: np.ndarray, title: str) -> str:
    """One rectangle for every run of cells of one fraction; in the colour of the text around it, dark or light."""
    rows, columns = cells.shape
    side = SVG_SIZE / max(rows, columns)
    shapes = []
    for row, shares in enumerate(cells):
        ends = [*np.flatnonzero(np.diff(shares)) + 1, columns]
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            if shares[start] > 0:
                opacity = f' fill-opacity="{0.15 + 0.85 * shares[start]:.2f}"' if shares[start] < 1 else ""
                shapes.append(f'<rect x="{start}" y="{row}" width="{end - start}" height="1"{opacity}/>')
    frame = f'<rect width="{columns}" height="{rows}" fill="none" stroke="currentColor" stroke-width="{1 / side:.3f}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * side:.0f}" height="{rows * side:.0f}" '
        f'viewBox="0 0 {columns} {rows}" fill="currentColor" shape-rendering="crispEdges" role="img">'
        f"<title>{escape(title)}; rows: queries, columns: keys</title>{''.join(shapes)}{frame}</svg>"
    )


def _figure(cells: np.ndarray, title: str, sizes: tuple[int, int], unit: str) -> Any:
    """A `matplotlib.figure.Figure`; needs matplotlib, opens no window."""
    from matplotlib.figure import Figure  # optional and slow to import

    T, S = sizes
    picture = Figure(figsize=(5, 5))
    axes = picture.add_subplot()
    axes.imshow(cells, cmap="Greys", vmin=0, vmax=1, extent=(-0.5, S - 0.5, T - 0.5, -0.5), interpolation="nearest")
    axes.set(xlabel=f"key{unit}", ylabel=f"query{unit}", title=title)
    return picture

"""Draws the masks of `which.md` and `masks.md`.

`python docs/pictures.py` writes docs/images/masks/*.svg, which a test compares.
"""

from pathlib import Path
from typing import Any

import numpy as np

from ejkernel.types import BlockPattern, MaskInfo

FOLDER = Path(__file__).parent / "images" / "masks"
DOCUMENTS = np.repeat([[0, 1, 2, -1]], [12, 7, 9, 4], axis=1)
IMAGE = np.repeat([0, 1, 0], [6, 10, 16])
ROWS = np.arange(32)
# a prefix of 8 tokens and three rollouts of 8
TREE = np.repeat([32, 16, 24, 32], 8)


def _neighbours(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (abs(i // 8 - j // 8) <= 1) & (abs(i % 8 - j % 8) <= 1)


PICTURES = {
    "full": lambda: MaskInfo(32, 32),
    "causal": lambda: MaskInfo(32, 32).apply_causal(),
    "window": lambda: MaskInfo(32, 32).apply_causal().apply_sliding_window((7, 0)),
    "documents": lambda: MaskInfo.from_segments(DOCUMENTS).apply_causal(),
    "chunks": lambda: MaskInfo(32, 32).apply_causal().apply_chunked(8),
    "image": lambda: MaskInfo(32, 32).apply_causal().apply_token_type_ids(IMAGE),
    "padding": lambda: MaskInfo.from_lengths([25], q_len=32),
    "cache": lambda: MaskInfo(8, 32).apply_causal(),
    "prefix": lambda: MaskInfo.prefix_lm([10], q_len=32),
    "tree": lambda: MaskInfo.tree(TREE),
    "bounds": lambda: MaskInfo.from_bounds(
        np.maximum(ROWS - 6, 0) // 4 * 4, ROWS + 3, q_len=32
    ),
    "dilated": lambda: MaskInfo.from_function(
        lambda b, h, i, j: (j <= i) & ((i - j) % 3 == 0), q_len=32
    ),
    "neighbours": lambda: MaskInfo.from_function(_neighbours, q_len=32),
    "pattern": lambda: BlockPattern.local_stride(4, 32, local_blocks=4, vert_stride=8),
    "pattern-head-1": lambda: BlockPattern.local_stride(4, 32, local_blocks=4, vert_stride=8),
}


def drawn(name: str) -> str:
    """In a colour that is seen on light and on dark paper: an image does not know the colour of the text around it."""
    head = {"head": 1} if name.endswith("head-1") else {}
    return PICTURES[name]().visualize("svg", **head).replace("currentColor", "#5c6bc0") + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PICTURES:
        (FOLDER / f"{name}.svg").write_text(drawn(name))

"""Draws the masks of `which.md`: `python docs/pictures.py` writes docs/images/masks/*.svg, which a test compares."""

from pathlib import Path

import numpy as np

from ejkernel.types import BlockPattern, MaskInfo

FOLDER = Path(__file__).parent / "images" / "masks"
DOCUMENTS = np.repeat([[0, 1, 2, -1]], [12, 7, 9, 4], axis=1)
IMAGE = np.repeat([0, 1, 0], [6, 10, 16])

PICTURES = {
    "full": lambda: MaskInfo(32, 32),
    "causal": lambda: MaskInfo(32, 32).apply_causal(),
    "window": lambda: MaskInfo(32, 32).apply_causal().apply_sliding_window((7, 0)),
    "documents": lambda: MaskInfo.from_segments(DOCUMENTS).apply_causal(),
    "chunks": lambda: MaskInfo(32, 32).apply_causal().apply_chunked(8),
    "image": lambda: MaskInfo(32, 32).apply_causal().apply_token_type_ids(IMAGE),
    "padding": lambda: MaskInfo.from_lengths([25], q_len=32),
    "cache": lambda: MaskInfo(8, 32).apply_causal(),
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

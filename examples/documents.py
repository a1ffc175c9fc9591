"""Documents to learn from, packed into rows: the data of `train_flax.py`, `train_equinox.py`
and `train_torch.py`.

A document counts up in steps of its own, modulo the vocabulary. Which steps, only its earlier
tokens tell: a model that looks at other documents, or at none, cannot know.
"""

from typing import NamedTuple

import numpy as np

VOCAB = 16
STEPS = (1, 2, 3, 5)


class Batch(NamedTuple):
    """Rows of packed documents, each (B, T) int32."""

    tokens: np.ndarray
    documents: np.ndarray  # whose token it is, counted in each row; -1 is padding

    @property
    def targets(self) -> np.ndarray:
        """The next token of the same document, -1 where there is none."""
        following = np.roll(self.tokens, -1, axis=1)
        same = self.documents == np.roll(self.documents, -1, axis=1)
        same[:, -1] = False
        return np.where(same & (self.documents >= 0), following, -1)


def packed(seed: int, rows: int, length: int, sizes: tuple[int, int] = (8, 24)) -> Batch:
    """Rows filled with documents of some sizes, from the least to the most; what is left at the
    end is padding.
    """
    random = np.random.default_rng(seed)
    tokens, documents = (
        np.zeros((rows, length), np.int32),
        np.full((rows, length), -1, np.int32),
    )
    for row in range(rows):
        at = number = 0
        while length - at >= sizes[0]:
            size = min(int(random.integers(sizes[0], sizes[1] + 1)), length - at)
            first, step = random.integers(VOCAB), random.choice(STEPS)
            tokens[row, at : at + size] = (first + step * np.arange(size)) % VOCAB
            documents[row, at : at + size] = number
            at, number = at + size, number + 1
    return Batch(tokens, documents)


def floor(batch: Batch) -> float:
    """The loss of who knows everything there is to know: only the second token of a document is
    a guess.
    """
    predicted = batch.targets >= 0
    firsts = predicted & (
        batch.documents != np.pad(batch.documents, ((0, 0), (1, 0)), constant_values=-2)[:, :-1]
    )
    return float(firsts.sum() / predicted.sum() * np.log(len(STEPS)))

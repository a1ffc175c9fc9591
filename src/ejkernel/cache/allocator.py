"""Which pages of a cache belong to which sequence: bookkeeping on the host, without JAX."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ejkernel.checks.options import static_int


class OutOfPages(RuntimeError):
    """Fewer pages are free than an extension needs; nothing was changed."""


class Extension(NamedTuple):
    """What the device must do for the tokens a sequence was extended by: first the copy, if any, then the writes."""

    slots: np.ndarray  # (tokens,) int32, for write_kv_pages
    copy: tuple[int, int] | None  # (source, target): the page written into was shared, its tokens go along


@dataclass
class _Pages:
    """The pages of one sequence in order, and how many tokens they hold."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PageAllocator:
    """Gives pages of a paged cache to sequences as they grow, and takes them back.

    Sequences are numbers that are never given twice. A page may belong to several sequences that were forked from one
    another and share a prefix: a full page is only read, and a sequence that is to write into a shared page that is not
    full gets one of its own, with a copy to make. A page is free again when its last sequence has left it.

    Args:
        num_pages: pages of the cache.
        page_size: tokens per page.

    >>> from ejkernel.types import PageAllocator
    >>> allocator = PageAllocator(num_pages=8, page_size=4)
    >>> prompt = allocator.allocate()
    >>> allocator.extend(prompt, 6).slots.tolist()  # pages 0 and 1, which has room for two more
    [0, 1, 2, 3, 4, 5]
    >>> answer = allocator.fork(prompt)
    >>> slots, copy = allocator.extend(answer, 1)  # page 1 is shared
    >>> slots.tolist(), copy
    ([10], (1, 2))
    >>> allocator.block_tables([prompt, answer], width=3).tolist()
    [[0, 1, 0], [0, 2, 0]]
    >>> allocator.context_lens([prompt, answer]).tolist()
    [6, 7]
    >>> allocator.free(prompt)
    >>> allocator.free_pages
    6
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = static_int("num_pages", num_pages, 1)
        self.page_size = static_int("page_size", page_size, 1)
        if self.num_pages * self.page_size > np.iinfo(np.int32).max:
            raise ValueError(f"{num_pages=} of {page_size=} hold more tokens than an int32 slot can name")
        self._free = list(range(num_pages))[::-1]  # the next one last
        self._owners = [0] * num_pages  # sequences that have each page
        self._sequences: dict[int, _Pages] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """How many pages belong to no sequence."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences there are, oldest first."""
        return tuple(self._sequences)

    def allocate(self) -> int:
        """A new sequence, without tokens."""
        return self._add(_Pages())

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that shares the first `length` tokens of another, by default all. Takes no page.

        The tokens must be in the cache when the fork is extended: run the step that writes them first.
        """
        parent = self._find(sequence)
        length = parent.length if length is None else static_int("length", length, 0)
        if length > parent.length:
            raise ValueError(f"cannot share {length=} tokens of sequence {sequence}, which has {parent.length}")
        child = _Pages(parent.pages[: self._pages_for(length)], length)
        for page in child.pages:
            self._owners[page] += 1
        return self._add(child)

    def extend(self, sequence: int, tokens: int) -> Extension:
        """Room for `tokens` more at the end of a sequence, and where they go.

        Raises:
            OutOfPages: fewer pages are free than that takes; then nothing has changed.
        """
        needed = self.pages_needed(sequence, tokens)
        if needed > self.free_pages:
            raise OutOfPages(
                f"sequence {sequence} needs {needed} more pages for {tokens} tokens, {self.free_pages} of "
                f"{self.num_pages} are free"
            )
        entry, tokens = self._find(sequence), int(tokens)
        copy = None
        if tokens and self._shares_its_end(entry):
            copy = entry.pages[-1], self._take()
            self._give_back(copy[0])
            entry.pages[-1] = copy[1]
            needed -= 1
        entry.pages += [self._take() for _ in range(needed)]
        slots = self._slots(entry, entry.length, entry.length + tokens)
        entry.length += tokens
        return Extension(slots, copy)

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """How many free pages `extend` would take.

        >>> allocator = PageAllocator(num_pages=8, page_size=4)
        >>> allocator.pages_needed(allocator.allocate(), 9)
        3
        """
        entry, tokens = self._find(sequence), static_int("tokens", tokens, 0)
        copied = int(tokens > 0 and self._shares_its_end(entry))
        return self._pages_for(entry.length + tokens) - len(entry.pages) + copied

    def free(self, sequence: int) -> None:
        """End a sequence: its pages are free again, but for those that others share."""
        entry = self._find(sequence)
        del self._sequences[sequence]
        for page in reversed(entry.pages):
            self._give_back(page)

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return self._find(sequence).length

    def block_tables(self, sequences: Sequence[int], width: int, rows: int | None = None) -> np.ndarray:
        """(rows, width) int32: the pages of the given sequences in order, zeros behind them.

        Args:
            width: pages per row; every table of it has the same shape, so nothing is compiled again.
            rows: rows in all, default as many as sequences; those past them are zeros.
        """
        entries = [self._find(sequence) for sequence in sequences]
        table = np.zeros((self._rows(sequences, rows), static_int("width", width, 1)), np.int32)
        for sequence, row, entry in zip(sequences, table, entries, strict=False):
            if len(entry.pages) > width:
                raise ValueError(f"sequence {sequence} has {len(entry.pages)} pages, more than {width=}")
            row[: len(entry.pages)] = entry.pages
        return table

    def context_lens(self, sequences: Sequence[int], rows: int | None = None) -> np.ndarray:
        """(rows,) int32: the tokens of the given sequences, zeros behind them."""
        lens = np.zeros(self._rows(sequences, rows), np.int32)
        lens[: len(sequences)] = [self.length(sequence) for sequence in sequences]
        return lens

    def _rows(self, sequences: Sequence[int], rows: int | None) -> int:
        rows = len(sequences) if rows is None else static_int("rows", rows, 0)
        if rows < len(sequences):
            raise ValueError(f"{rows=} cannot hold {len(sequences)} sequences")
        return rows

    def _add(self, entry: _Pages) -> int:
        sequence, self._next = self._next, self._next + 1
        self._sequences[sequence] = entry
        return sequence

    def _find(self, sequence: int) -> _Pages:
        if sequence not in self._sequences:
            raise ValueError(f"there is no sequence {sequence}: it was never allocated, or it is freed")
        return self._sequences[sequence]

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _shares_its_end(self, entry: _Pages) -> bool:
        """Whether the next token would go into a page that another sequence has too."""
        return entry.length % self.page_size > 0 and self._owners[entry.pages[-1]] > 1

    def _slots(self, entry: _Pages, start: int, stop: int) -> np.ndarray:
        first = start // self.page_size  # a long sequence need not be looked at as a whole
        position = np.arange(start, stop)
        pages = np.asarray(entry.pages[first:], np.int64)
        slots = pages[position // self.page_size - first] * self.page_size + position % self.page_size
        return slots.astype(np.int32)

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _give_back(self, page: int) -> None:
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)

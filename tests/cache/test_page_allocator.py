"""The page allocator against a simple model, and its errors."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ejkernel.types import OutOfPages, PageAllocator

PAGES, SIZE = 7, 3


class Model(RuleBasedStateMachine):
    """Sequences are lists of tokens; the cache is simulated, and read back through the tables after every step."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(PAGES, SIZE)
        self.cache = np.full((PAGES, SIZE), -1)
        self.tokens: dict[int, list[int]] = {}
        self.written = 0

    def tables(self) -> dict[int, list[int]]:
        """The pages that each sequence needs, by the table."""
        table = self.allocator.block_tables(list(self.tokens), PAGES, len(self.tokens) + 1)
        assert not table[-1].any()
        return {s: row[: -(-len(self.tokens[s]) // SIZE)].tolist() for s, row in zip(self.tokens, table, strict=False)}

    @rule(target=sequences)
    def allocate(self):
        sequence = self.allocator.allocate()
        assert sequence not in self.tokens
        self.tokens[sequence] = []
        return sequence

    @rule(target=sequences, parent=sequences, share=st.floats(0, 1))
    def fork(self, parent: int, share: float):
        free = self.allocator.free_pages
        length = round(share * len(self.tokens[parent]))
        child = self.allocator.fork(parent, length)
        assert child not in self.tokens and self.allocator.free_pages == free
        self.tokens[child] = self.tokens[parent][:length]
        return child

    @rule(sequence=sequences, count=st.integers(0, 2 * SIZE + 1))
    def extend(self, sequence: int, count: int):
        before, free = self.tables(), self.allocator.free_pages
        used, own_pages = len(self.tokens[sequence]), before[sequence]
        others = {page for s, pages in before.items() if s != sequence for page in pages}
        copied = count > 0 and used % SIZE > 0 and own_pages[-1] in others
        needed = -(-(used + count) // SIZE) - len(own_pages) + copied
        if needed > free:
            with pytest.raises(OutOfPages, match=f"sequence {sequence} needs {needed} .* {free} of {PAGES} are free"):
                self.allocator.extend(sequence, count)
            assert self.tables() == before and self.allocator.free_pages == free
            return
        slots, copy = self.allocator.extend(sequence, count)
        assert (copy is not None) == copied and self.allocator.free_pages == free - needed
        if copy is not None:
            source, target = copy
            assert source == own_pages[-1] and target not in others
            self.cache[target] = self.cache[source]
        new = list(range(self.written, self.written + count))
        self.written += count
        assert slots.dtype == np.int32 and not others & set((slots // SIZE).tolist())
        self.cache.reshape(-1)[slots] = new
        self.tokens[sequence] += new

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int):
        self.allocator.free(sequence)
        del self.tokens[sequence]
        with pytest.raises(ValueError, match=f"no sequence {sequence}"):
            self.allocator.free(sequence)

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        assert self.allocator.sequences == tuple(self.tokens)
        lens = self.allocator.context_lens(list(self.tokens), len(self.tokens) + 2)
        assert lens.tolist() == [*map(len, self.tokens.values()), 0, 0]
        for sequence, pages in self.tables().items():
            expected = self.tokens[sequence]
            assert self.cache[pages].reshape(-1)[: len(expected)].tolist() == expected

    @invariant()
    def no_page_is_lost_or_given_twice(self):
        used = {page for pages in self.tables().values() for page in pages}
        assert self.allocator.free_pages == PAGES - len(used)

    def teardown(self):
        for sequence in list(self.tokens):
            self.allocator.free(sequence)
        assert self.allocator.free_pages == PAGES
        slots, _ = self.allocator.extend(self.allocator.allocate(), PAGES * SIZE)
        assert sorted(slots.tolist()) == list(range(PAGES * SIZE))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=40)


def test_several_forks_of_one_page_copy_it_until_the_last_has_it_alone():
    allocator = PageAllocator(4, 4)
    parent = allocator.allocate()
    allocator.extend(parent, 2)
    forks = [allocator.fork(parent) for _ in range(2)]
    copies = [allocator.extend(sequence, 1).copy for sequence in (*forks, parent)]
    assert copies == [(0, 1), (0, 2), None]


def test_a_full_shared_page_is_never_copied():
    allocator = PageAllocator(4, 2)
    parent = allocator.allocate()
    allocator.extend(parent, 2)
    child = allocator.fork(parent)
    assert allocator.extend(child, 1).copy is None and allocator.extend(parent, 1).copy is None
    assert allocator.block_tables([parent, child], 2).tolist() == [[0, 2], [0, 1]]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda a: PageAllocator(0, 4), "num_pages=0 must be at least 1"),
        (lambda a: PageAllocator(4, 0), "page_size=0 must be at least 1"),
        (lambda a: PageAllocator(2**20, 2**12), "more tokens than an int32 slot can name"),
        (lambda a: PageAllocator(np.int32(2**20), np.int32(2**12)), "more tokens than an int32 slot can name"),
        (lambda a: a.extend(0, -1), "tokens=-1 must be at least 0"),
        (lambda a: a.extend(5, 1), "no sequence 5"),
        (lambda a: a.fork(0, 10), "cannot share length=10 tokens of sequence 0, which has 9"),
        (lambda a: a.block_tables([0], 2), "sequence 0 has 3 pages, more than width=2"),
        (lambda a: a.block_tables([0, 0], 3, rows=1), "rows=1 cannot hold 2 sequences"),
        (lambda a: a.context_lens([0, 0], rows=1), "rows=1 cannot hold 2 sequences"),
    ],
)
def test_mistakes(call, message):
    allocator = PageAllocator(8, 4)
    allocator.extend(allocator.allocate(), 9)
    with pytest.raises(ValueError, match=message):
        call(allocator)

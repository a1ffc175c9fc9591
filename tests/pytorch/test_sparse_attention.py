"""Block-sparse attention of tensors against its definition: on CPUs, on GPUs, and GPUs' launches in the interpreter."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ejkernel.torch import SparseAttention
from harness.tensors import check, dense, placed, running


def pattern(heads: int, blocks: int, seed: int = 0, density: float = 0.5) -> np.ndarray:
    cells = np.random.default_rng(seed).random((heads, blocks, blocks)) < density
    return np.tril(cells | np.eye(blocks, dtype=bool))


@dataclass(frozen=True)
class Case:
    id: str
    B: int = 1
    T: int = 70
    S: int | None = None
    H: int = 2
    Hkv: int | None = None
    D: int = 16
    Dv: int | None = None
    block: int = 16
    blocks: int | None = None
    rows: int | None = None  # of a pattern that is not square
    heads: int | None = None  # of the pattern
    dtype: torch.dtype = torch.float32
    causal: bool = True
    seq_dim: int = 1
    left: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    cu_q: tuple[int, ...] | None = None
    cu_k: tuple[int, ...] | None = None
    tile: tuple[int, int] = (32, 16)
    scale: float | None = None

    @property
    def keys(self) -> int:
        return self.S or self.T

    def module(self) -> SparseAttention:
        cells = torch.from_numpy(self.cells())
        with warnings.catch_warnings(action="ignore"):  # of a cache that the pattern makes large
            return SparseAttention(
                self.block, cells, causal=self.causal, seq_dim=self.seq_dim, block_m=self.tile[0], block_n=self.tile[1]
            )

    def cells(self) -> np.ndarray:
        if self.rows is not None:
            random = np.random.default_rng(0)
            return random.random((self.heads or self.H, self.rows, -(-self.keys // self.block))) < 0.6
        longest = max(np.diff(self.cu_k)) if self.cu_k else max(self.T, self.keys)
        return pattern(self.heads or self.H, self.blocks or -(-int(longest) // self.block))

    def tensors(self) -> dict[str, torch.Tensor]:
        Hkv = self.Hkv or self.H
        Dv = self.Dv or self.D
        shapes = {"q": (self.T, self.H, self.D), "k": (self.keys, Hkv, self.D), "v": (self.keys, Hkv, Dv)}
        random = torch.Generator().manual_seed(1)
        return {n: torch.randn((self.B, *s), generator=random).to(self.dtype) for n, s in shapes.items()}

    def options(self) -> dict[str, Any]:
        named = {"left_paddings": self.left, "seqlens": self.lengths}
        named |= {"cu_seqlen_q": self.cu_q, "cu_seqlen_k": self.cu_k}
        return {name: torch.tensor(x) for name, x in named.items() if x is not None}

    def tokens(self) -> tuple[list[Any], list[Any]]:
        """Of each batch row, (sequence, position) of every query and every key; None for padding."""
        if self.cu_k is not None:
            cu_q = self.cu_q or self.cu_k
            q, k = [None] * self.T, [None] * self.keys
            for n in range(len(self.cu_k) - 1):
                lq, lk = cu_q[n + 1] - cu_q[n], self.cu_k[n + 1] - self.cu_k[n]
                for i in range(lk):
                    k[self.cu_k[n] + i] = (n, i)
                for i in range(lq):
                    q[cu_q[n] + i] = (n, i + lk - lq)
            return [q], [k]
        queries, keys = [], []
        for b in range(self.B):
            first = self.left[b] if self.left else 0
            end = first + self.lengths[b] if self.lengths else self.keys
            at = [(0, j - first) if first <= j < end else None for j in range(self.keys)]
            shift = 0 if self.keys == self.T else end - self.T
            keys.append(at)
            queries.append([at[i + shift] if 0 <= i + shift < self.keys else None for i in range(self.T)])
        return queries, keys

    def seen(self) -> np.ndarray:
        if self.rows is not None:
            q, k, cells = np.arange(self.T)[:, None], np.arange(self.keys), self.cells()
            seen = cells[np.arange(self.H) * len(cells) // self.H][:, q // self.block, k // self.block]
            return (seen & ((k <= q + self.keys - self.T) | (not self.causal)))[None]
        nowhere = (-1, 0)
        pairs = [np.array([[x or nowhere for x in row] for row in rows]) for rows in self.tokens()]
        (q_ids, q), (k_ids, k) = (np.moveaxis(x, -1, 0) for x in pairs)
        q, k, q_ids, k_ids = q[:, None, :, None], k[:, None, None, :], q_ids[:, None, :, None], k_ids[:, None, None, :]
        cells = self.cells()
        head = (np.arange(self.H) * len(cells) // self.H)[None, :, None, None]
        seen = (q_ids == k_ids) & (q_ids >= 0) & (q >= 0) & ((k <= q) | (not self.causal))
        return seen & cells[head, np.maximum(q, 0) // self.block, k // self.block]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """(B, T, H, D) in and out, whatever the layout of the call."""
        if self.cu_k is not None:
            out, lse = self.module()(q[0], k[0], v[0], self.scale, return_lse=True, **self.options())
            return out[None], lse[None]
        if self.seq_dim == 2:
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out, lse = self.module()(q, k, v, self.scale, return_lse=True, **self.options())
        return (out.transpose(1, 2) if self.seq_dim == 2 else out), lse


CASES = [
    Case("plain", B=2),
    Case("one-block", T=5),
    Case("one-token", T=1),
    Case("odd-length", T=63, tile=(16, 32)),
    Case("shared-pattern", heads=1, B=2),
    Case("not-causal", T=40, causal=False),
    Case("blocks-of-64-in-small-tiles", T=100, block=64),
    Case("blocks-of-16-in-large-tiles", T=100, H=4, Hkv=2, tile=(64, 64)),
    Case("tiles-across-blocks", T=100, H=1, block=32, tile=(64, 16)),
    Case("gqa-pattern-per-key-head", H=4, Hkv=2, heads=2),
    Case("gqa-pattern-per-query-head", H=4, Hkv=2),
    Case("Dv-wider", Dv=40, D=24),
    Case("scale", scale=0.7),
    Case("longer-pattern", blocks=9),
    Case("heads-first", B=2, seq_dim=2),
    Case("heads-first-gqa", B=2, H=4, Hkv=2, heads=2, seq_dim=2, T=40),
    Case("bfloat16", dtype=torch.bfloat16, H=4, Hkv=2),
    Case("float16", dtype=torch.float16, seq_dim=2),
    Case("decode", B=2, T=1, S=70, H=4, Hkv=2, heads=2),
    Case("decode-different-groups", T=1, S=70, H=4, Hkv=2),
    Case("decode-lengths", B=3, T=1, S=70, H=4, Hkv=1, heads=1, lengths=(70, 33, 0)),
    Case("decode-heads-first", B=2, T=1, S=70, H=4, Hkv=2, heads=1, seq_dim=2, lengths=(70, 3)),
    Case("chunk", T=20, S=70),
    Case("chunk-lengths", B=2, T=20, S=70, H=4, Hkv=2, lengths=(50, 11)),
    Case("more-queries-than-keys", T=70, S=40),
    Case("rectangular", B=2, T=20, S=70, rows=2),
    Case("rectangular-not-causal", T=70, S=40, rows=6, H=4, Hkv=2, heads=2, causal=False),
    Case("rectangular-decode", B=2, T=1, S=70, rows=1, H=4, Hkv=1, heads=1, seq_dim=2),
    Case("right-padding", B=2, lengths=(70, 37)),
    Case("left-padding", B=2, left=(0, 21)),
    Case("both-paddings", B=2, T=50, left=(5, 21), lengths=(40, 20)),
    Case("packed", T=100, cu_k=(0, 30, 31, 80, 100)),
    Case("packed-padding", T=70, cu_k=(0, 30, 50), H=4, Hkv=2, heads=2),
    Case("packed-empty-sequences", T=64, cu_k=(0, 0, 40, 40, 64, 64), block=32),
    Case("packed-mixed", T=24, S=100, cu_q=(0, 1, 20, 21), cu_k=(0, 30, 60, 99)),
    Case("packed-bfloat16", T=60, cu_k=(0, 30, 60), dtype=torch.bfloat16),
]  # fmt: skip


# what the interpreter, which takes long, is given: every way into the kernels once
CORE = (
    "odd-length", "not-causal", "blocks-of-16-in-large-tiles", "tiles-across-blocks", "gqa-pattern-per-key-head",
    "Dv-wider", "heads-first-gqa", "bfloat16", "decode", "decode-lengths", "decode-heads-first", "chunk-lengths",
    "more-queries-than-keys", "rectangular", "rectangular-not-causal", "both-paddings", "packed-padding",
    "packed-mixed",
)  # fmt: skip
RUNS = [
    *(pytest.param(case, "cpu", id=f"{case.id}-cpu") for case in CASES),
    *(pytest.param(case, "interpreted", id=f"{case.id}-interpreted") for case in CASES if case.id in CORE),
    *(pytest.param(case, "cuda", id=f"{case.id}-cuda", marks=pytest.mark.gpu) for case in CASES),
]


@pytest.mark.parametrize(("case", "implementation"), RUNS)
def test_outputs_and_gradients(case, implementation):
    tensors = case.tensors()
    seen = case.seen()
    random = torch.Generator().manual_seed(2)
    out = torch.randn((case.B, case.T, case.H, case.Dv or case.D), generator=random)
    lse = torch.randn((case.B, case.H, case.T), generator=random)
    with running(implementation):
        attend = placed(implementation, case.attend)
        check(attend, lambda q, k, v: dense(q, k, v, seen, case.scale), tensors, (out, lse))


def test_work_on_a_cpu_is_that_of_the_visited_tiles(monkeypatch):
    """Every product is one of tiles that hold a pair that is seen: two in the forward, five in the backward."""
    products = []
    bmm = torch.bmm

    def counted(a, b):
        products.append(len(a))
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", counted)
    q, k, v = (torch.randn(1, 512, 2, 16, requires_grad=True) for _ in range(3))
    for diagonals, tiles in ((16, 136), (1, 16)):  # blocks of 32, a row sees so many of the last
        cells = np.tri(16, dtype=bool) & ~np.tri(16, k=-diagonals, dtype=bool)
        out = SparseAttention(32, cells)(q, k, v)
        assert sum(products) == 2 * 2 * tiles  # logits and values of two heads
        products.clear()
        out.sum().backward()
        assert sum(products) == 5 * 2 * tiles
        products.clear()

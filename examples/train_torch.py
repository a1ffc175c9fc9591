"""Train a small PyTorch transformer with block-sparse attention on packed documents, on a CPU
or an NVIDIA GPU.

    pip install 'ejkernel-attention[torch]'
    python examples/train_torch.py

Every head sees its own two blocks of tokens and every third block before them, other ones than
its neighbours; the rest is neither read nor computed, forward and backward. Documents follow
one another without padding, and no document sees another.
"""

import time
from typing import NamedTuple

import numpy as np
import torch
from documents import VOCAB, floor, packed
from documents import Batch as Rows
from torch import Tensor, nn

from dkernel import LocalStrideSparseAttention

WIDTH, LAYERS, H, D = 64, 1, 4, 16
LONGEST, BLOCK, LOCAL, STRIDE = 96, 16, 2, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Batch(NamedTuple):
    """Documents one after another: (tokens,) each, and where they begin, (documents + 1,)."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    starts: Tensor


def flattened(rows: Rows) -> Batch:
    """The real tokens of all rows."""
    real = rows.documents >= 0
    names = (1000 * np.arange(len(real))[:, None] + rows.documents)[real]
    starts = np.append(np.flatnonzero(np.diff(names, prepend=-1)), len(names))
    positions = np.arange(len(names)) - np.repeat(starts[:-1], np.diff(starts))
    arrays = rows.tokens[real], rows.targets[real], positions, starts.astype(np.int32)
    return Batch(*(torch.as_tensor(x, device=DEVICE) for x in arrays))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * H * D, bias=False)
        self.out = nn.Linear(H * D, WIDTH, bias=False)
        self.attention = LocalStrideSparseAttention(H, LONGEST, BLOCK, LOCAL, STRIDE)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(-1, 3, H, D).unbind(1)  # (tokens, H, D)
        x = x + self.out(self.attention(q, k, v, cu_seqlen_k=starts).flatten(1))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))

    def forward(self, batch: Batch) -> Tensor:
        x = self.tokens(batch.tokens) + self.positions(batch.positions)
        for block in self.blocks:
            x = block(x, batch.starts)
        return self.head(x)


def loss_of(model: Transformer, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch), batch.targets.long(), ignore_index=-1)


def keeps_to_its_document(model: Transformer, batch: Batch) -> bool:
    """Whether other tokens in the other documents leave what a document predicts as it is."""
    ours = slice(int(batch.starts[1]), int(batch.starts[2]))
    tokens = (batch.tokens + 7) % VOCAB
    tokens[ours] = batch.tokens[ours]
    with torch.no_grad():
        one, other = (model(batch._replace(tokens=x))[ours] for x in (batch.tokens, tokens))
    return torch.allclose(one, other, atol=1e-5)


def main(steps: int = 100) -> tuple[float, float]:
    torch.manual_seed(0)
    model = Transformer().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    start, seen = time.perf_counter(), 0
    for number in range(steps):
        batch = flattened(packed(number, rows=2, length=192, sizes=(20, LONGEST)))
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(batch.tokens)
        if number % 20 == 0:
            print(f"step {number:3}: loss {loss.item():.3f}")
    rate = seen / (time.perf_counter() - start)
    rows = packed(10**6, rows=8, length=192, sizes=(20, LONGEST))
    unseen = flattened(rows)
    with torch.no_grad():
        final, best = loss_of(model, unseen).item(), floor(rows)
    print(f"on unseen documents {final:.3f}, the best there is {best:.3f}; {rate:.0f} tokens/s")
    if not keeps_to_its_document(model, unseen):
        raise SystemExit("a document saw another")
    print("no document sees another")
    return final, best


if __name__ == "__main__":
    main()

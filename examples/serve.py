"""Serve a small random transformer: continuous batching over a paged key-value cache, on any
device.

    python examples/serve.py

Requests come and go; each step feeds whatever tokens are due, prompts in chunks and answers one
by one, through one compiled function whose shapes never change. All requests share the pages of
a system prompt. When the pages run out, the newest request gives its own back and starts again
later. In the end every answer is compared with that of the whole sequence computed at once.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import print

from ejkernel.modules import flash_attention, ragged_page_attention, write_interleaved_kv_pages
from ejkernel.types import PageAllocator, PagedAttentionMetadata

VOCAB, WIDTH, LAYERS, H, HKV, D = 256, 64, 2, 8, 2, 16
PAGES, PAGE_SIZE, MAX_PAGES = 36, 8, 12  # in the cache, tokens of one, of one sequence
BUDGET, BATCH = 32, 8  # tokens and sequences per step


# The model: one definition, whatever attends --------------------------------------------------


def random_model(seed: int) -> dict[str, Any]:
    shapes = {
        "q": (WIDTH, H * D),
        "k": (WIDTH, HKV * D),
        "v": (WIDTH, HKV * D),
        "out": (H * D, WIDTH),
    }
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    random = np.random.default_rng(seed)

    def weights(
        shape: tuple[int, int],
    ) -> jax.Array:  # twice the usual, so that attention decides the answers
        return jnp.asarray(2 * shape[0] ** -0.5 * random.standard_normal(shape), jnp.float32)

    layers = [{name: weights(shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    return {"embed": weights((VOCAB, WIDTH)) * VOCAB**0.5, "layers": layers}


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of (..., heads, D)."""
    angles = positions[..., None, None] * 10_000.0 ** (-jnp.arange(0, D, 2) / D)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)],
        -1,
    )


def hidden_states(
    model: dict[str, Any], tokens: jax.Array, positions: jax.Array, attend: Any
) -> jax.Array:
    x = model["embed"][tokens]
    for number, layer in enumerate(model["layers"]):
        y = normalised(x)
        q, k, v = ((y @ layer[name]).reshape(*tokens.shape, -1, D) for name in "qkv")
        out = attend(number, rotated(q, positions), rotated(k, positions), v)
        x = x + out.reshape(*tokens.shape, H * D) @ layer["out"]
        x = x + jax.nn.gelu(normalised(x) @ layer["up"]) @ layer["down"]
    return normalised(x)


# The step: fixed shapes, the cache donated ----------------------------------------------------


class Batch(NamedTuple):
    """What one step computes, made on the host; what lies past the tokens and sequences there
    are is padding.
    """

    tokens: Any  # (BUDGET,)
    positions: Any  # (BUDGET,)
    slots: Any  # (BUDGET,) where their keys and values go; -1: nowhere
    copies: Any  # (2, BATCH) pages to copy from and to before that
    sequences: PagedAttentionMetadata


compilations: list[str] = []


@partial(jax.jit, donate_argnums=1)
def step(
    model: dict[str, Any], cache: list[jax.Array], batch: Batch
) -> tuple[list[jax.Array], jax.Array]:
    """The cache with the new tokens, and the next token of every sequence."""
    compilations.append("step")  # Python runs this line only when it is compiled
    where, (source, target) = batch.sequences, batch.copies
    cache = [pages.at[target].set(pages[source], mode="drop") for pages in cache]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        cache[layer] = write_interleaved_kv_pages(cache[layer], k, v, batch.slots)
        return ragged_page_attention(
            q,
            cache[layer],
            where.context_lens,
            where.block_tables,
            where.query_start_loc,
            where.num_seqs,
        )

    x = hidden_states(model, batch.tokens, batch.positions, attend)
    last = jnp.maximum(where.query_start_loc[1:] - 1, 0)
    return cache, jnp.argmax(x[last] @ model["embed"].T, axis=-1)


# The server: which tokens are due, and where they go ------------------------------------------


@dataclass(eq=False)
class Request:
    name: str
    prompt: list[int]
    limit: int = 0  # tokens to generate
    arrival: int = 0  # the step it comes at
    answer: list[int] = field(default_factory=list)
    sequence: int = -1  # its number in the allocator while it runs

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


class Server:
    def __init__(self, model: dict[str, Any], system_prompt: list[int]):
        self.model = model
        self.allocator = PageAllocator(PAGES, PAGE_SIZE)
        self.cache = [jnp.zeros((PAGES, PAGE_SIZE, 2 * HKV, D)) for _ in range(LAYERS)]
        self.waiting: deque[Request] = deque()
        self.steps = self.tokens = self.copies = self.put_off = 0
        self.system = Request("system", system_prompt, sequence=self.allocator.allocate())
        self.running = [self.system]
        while self.due(self.system):
            self.advance()
        self.running.remove(self.system)

    def due(self, request: Request) -> int:
        """Tokens of a request that are not in the cache yet: a prompt's, or the one generated
        last.
        """
        return len(request.tokens) - self.allocator.length(request.sequence)

    def admit(self) -> None:
        while self.waiting and len(self.running) < BATCH:
            request = self.waiting[0]
            request.sequence = self.allocator.fork(self.system.sequence)
            if (
                self.allocator.pages_needed(request.sequence, self.due(request))
                > self.allocator.free_pages
            ):
                return self.allocator.free(request.sequence)
            self.running.append(self.waiting.popleft())

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.allocator.free(request.sequence)

    def make_room(self, request: Request, count: int, others: deque[Request]) -> bool:
        """Put off others, and if need be the request itself, until its tokens fit."""
        while self.allocator.pages_needed(request.sequence, count) > self.allocator.free_pages:
            victim = others.pop() if others else request
            self.leave(victim)
            self.waiting.appendleft(victim)
            self.put_off += 1
            if victim is request:
                return False
        return True

    def schedule(self) -> tuple[list[Request], Batch]:
        """What to compute: answers first, then prompts, oldest first, within the budget and the
        pages.
        """
        chosen: list[Request] = []
        tokens, positions, slots = np.zeros((3, BUDGET), np.int32)
        starts, copies = np.zeros(BATCH + 1, np.int32), np.zeros((2, BATCH), np.int32)
        slots[:], copies[1] = -1, PAGES  # to nowhere
        queue = deque(sorted(self.running, key=lambda request: self.due(request) > 1))
        while queue and starts[-1] < BUDGET:
            request = queue.popleft()
            count = min(self.due(request), BUDGET - starts[-1])
            if not self.make_room(request, count, queue):
                break
            first, here = (
                self.allocator.length(request.sequence),
                slice(starts[-1], starts[-1] + count),
            )
            slots[here], copy = self.allocator.extend(request.sequence, count)
            if copy:
                copies[:, len(chosen)] = copy
                self.copies += 1
            tokens[here] = request.tokens[first : first + count]
            positions[here] = np.arange(first, first + count)
            chosen.append(request)
            starts[len(chosen) :] = here.stop
        sequences = [request.sequence for request in chosen]
        lens = self.allocator.context_lens(sequences, BATCH)
        tables = self.allocator.block_tables(sequences, MAX_PAGES, BATCH)
        where = PagedAttentionMetadata(lens, tables, starts, np.int32(len(chosen)))
        return chosen, Batch(tokens, positions, slots, copies, where)

    def advance(self) -> None:
        chosen, batch = self.schedule()
        self.cache, following = step(self.model, self.cache, batch)
        self.steps, self.tokens = (
            self.steps + 1,
            self.tokens + int(batch.sequences.query_start_loc[-1]),
        )
        done = []
        for request, token in zip(chosen, np.asarray(following).tolist(), strict=False):
            if self.due(request) == 0 and request is not self.system:
                request.answer.append(token)
                if len(request.answer) == request.limit:
                    self.leave(request)
                    done.append(request.name)
        if done:
            bar = f"[cyan]{'█' * (PAGES - self.allocator.free_pages):░<{PAGES}}[/]"
            print(
                f"step {self.steps:2}  {bar} pages  {len(self.waiting)} waiting  "
                f"[green]{' '.join(done)} done[/]"
            )

    def serve(self, requests: list[Request]) -> None:
        coming = deque(sorted(requests, key=lambda request: request.arrival))
        while coming or self.waiting or self.running:
            while coming and coming[0].arrival <= self.steps:
                self.waiting.append(coming.popleft())
            self.admit()
            self.advance()


# The check: the whole of every sequence at once -----------------------------------------------


@jax.jit
def greedy(model: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """The most likely next token after each one of (B, T), without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = hidden_states(
        model, tokens, positions, lambda _, q, k, v: flash_attention(q, k, v, causal=True)
    )
    return jnp.argmax(x @ model["embed"].T, axis=-1)


def equal_to_recompute(model: dict[str, Any], requests: list[Request]) -> bool:
    """Every token of every answer is the greedy one after all tokens before it, so the answers
    are equal.
    """
    tokens = np.zeros((len(requests), MAX_PAGES * PAGE_SIZE), np.int32)
    for row, request in zip(tokens, requests, strict=True):
        row[: len(request.tokens)] = request.tokens
    best = np.asarray(greedy(model, tokens))
    return all(
        request.answer == row[len(request.prompt) - 1 : len(request.tokens) - 1].tolist()
        for request, row in zip(requests, best, strict=True)
    )


def main() -> Server:
    random = np.random.default_rng(0)
    system_prompt = random.integers(
        VOCAB, size=21
    ).tolist()  # not whole pages: who writes on gets a copy of the last
    requests = []
    for name in "abcdefghijklmnop":
        prompt = random.integers(VOCAB, size=random.integers(1, 45)).tolist()
        limit, arrival = random.integers((3, 0), (30, 25)).tolist()
        requests.append(Request(name, system_prompt + prompt, limit, arrival))
    with jax.default_matmul_precision("highest"):
        server = Server(random_model(0), system_prompt)  # compiles
        start, before = time.perf_counter(), server.tokens
        server.serve(requests)
        rate = (server.tokens - before) / (time.perf_counter() - start)
        equal = equal_to_recompute(server.model, requests)
    print(
        f"{server.copies} shared pages copied when written into, "
        f"{server.put_off} times a request put off"
    )
    print(
        f"{server.tokens} tokens in {server.steps} steps, {rate:.0f} tokens/s, "
        f"{len(compilations)} compilation"
    )
    if not equal:
        raise SystemExit("the answers differ from those of the full recompute")
    print("[bold green]equal to the full recompute[/]")
    return server


if __name__ == "__main__":
    main()

"""Arrays that lie split over Auto mesh axes stay so through every operation of a plain jit, forward and backward.

The compiled program says so: it gathers nothing, and devices exchange at most sums of what they share.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import modules
from ejkernel.ops import implicit_sharding
from ejkernel.types import MaskInfo
from harness import normal
from tolerances import assert_close

B, T, H, Hkv, D = 4, 12, 8, 4, 8
TILES = {"block_q": 4, "block_k": 4}


def mesh_of(shape=(2, 4), names=("dp", "tp")):
    devices = np.asarray(jax.devices("cpu"))[: int(np.prod(shape))]
    return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def collectives(text: str) -> set[str]:
    return set(re.findall(r"\b(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(", text))


class Sample(NamedTuple):
    """A call, how its arrays lie, and whether it has gradients."""

    function: Any
    arrays: dict[str, Any]
    specs: dict[str, P]
    options: dict[str, Any] = {}  # noqa: RUF012
    train: bool = True

    def placed(self, mesh: Mesh) -> dict[str, jax.Array]:
        return {n: jax.device_put(x, NamedSharding(mesh, self.specs.get(n, P()))) for n, x in self.given().items()}

    def given(self) -> dict[str, jax.Array]:
        return {n: normal(n, x) if isinstance(x, tuple) else jnp.asarray(x) for n, x in self.arrays.items()}

    def run(self, arrays: dict[str, jax.Array]) -> dict[str, Any]:
        """Outputs and gradients by name."""
        floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

        def call(floats):
            found = self.function(**{**arrays, **floats}, **self.options)
            found = found if isinstance(found, tuple) else (found,)
            return {str(i): x for i, x in enumerate(found)}

        if not self.train:
            return call(floats)
        outputs, pull = jax.vjp(call, floats)
        cotangents = {n: jnp.cos(x) for n, x in outputs.items()}
        return outputs | {f"gradient of {n}": x for n, x in pull(cotangents)[0].items()}


BOTH = P("dp", None, "tp")
QKV = {"query": (B, T, H, D), "key": (B, T, Hkv, D), "value": (B, T, Hkv, D)}
ALL = dict.fromkeys(QKV, BOTH)
KV = ("key", "value")
LINEAR = {"query": (B, T, H, D), "key": (B, T, H, D), "value": (B, T, H, D), "g": -np.ones((B, T, H), np.float32)}
TABLES = np.arange(12, dtype=np.int32).reshape(4, 3) % 9
LENS = np.array([6, 2, 3, 5], np.int32)
PAGES = {"key_cache": (9, 2, Hkv, D), "value_cache": (9, 2, Hkv, D)}
HEADS = dict.fromkeys(PAGES, P(None, None, "tp"))
ROWS = {"query": P("dp", "tp"), "context_lens": P("dp"), "block_tables": P("dp")}
RAGGED = {
    "queries": (9, H, D), "kv_pages": (9, 2, 2 * Hkv, D), "context_lens": LENS, "block_tables": TABLES,
    "query_start_loc": np.array([0, 2, 3, 4, 9], np.int32), "num_seqs": np.int32(4),
}  # fmt: skip


def flash(arrays=QKV, specs=ALL, **options):
    return Sample(modules.flash_attention, arrays, specs, {"cfg": TILES, "causal": True, **options})


SEGMENTS = np.sort(np.random.default_rng(0).integers(-1, 3, (B, T)), axis=1)
SAMPLES = {
    "flash": flash(return_lse=True),
    "flash-shared": flash(
        QKV | {"bias": (1, H, T, T), "softmax_aux": (H,)}, mask_info=MaskInfo.from_segments(SEGMENTS)
    ),
    "flash-dropout": flash(dropout_prob=0.3, dropout_seed=1),
    "one-key-head": flash(QKV | dict.fromkeys(KV, (B, T, 1, D)), ALL | dict.fromkeys(KV, P("dp"))),
    # two devices share a key head
    "few-key-heads": flash(QKV | dict.fromkeys(KV, (B, T, 2, D)), ALL | dict.fromkeys(KV, P("dp"))),
    "blocksparse": Sample(
        modules.blocksparse_attention, QKV, ALL, {"block_mask": np.tri(3, dtype=bool), "block_size": 4}
    ),
    "native-sparse": Sample(
        modules.native_sparse_attention,
        QKV | {"g_cmp": (B, T, H), "g_slc": (B, T, H)},
        ALL | {"g_cmp": BOTH, "g_slc": BOTH},
        {"block_size": 2, "block_counts": 4},
    ),
    "recurrent": Sample(
        modules.recurrent_attention,
        LINEAR | {"g_gamma": -np.ones(H, np.float32)},
        dict.fromkeys(LINEAR, BOTH) | {"g_gamma": P("tp")},
        {"return_state": True},
    ),
    "mean-pooling": Sample(modules.mean_pooling, {"x": (B, T, H, D)}, {"x": BOTH}, {"chunk_size": 5}),
    "page": Sample(
        modules.page_attention, {"query": (4, H, D), **PAGES, "context_lens": LENS, "block_tables": TABLES},
        ROWS | HEADS, {"return_lse": True}, train=False,
    ),
    "page-tokens": Sample(
        modules.page_attention, {"query": (4, 2, H, D), **PAGES, "context_lens": LENS, "block_tables": TABLES},
        ROWS | HEADS | {"query": P("dp", None, "tp")}, train=False,
    ),
    "ragged-page": Sample(
        modules.ragged_page_attention, RAGGED, {"queries": P(None, "tp"), "kv_pages": P(None, None, "tp")}, train=False
    ),
    "ragged-decode": Sample(
        modules.ragged_decode_attention,
        {"query": (4, H, D), **dict.fromkeys(KV, (4, 6, Hkv, D)), "sequence_start": LENS // 2, "sequence_end": LENS},
        {"query": P("dp", "tp"), "key": BOTH, "value": BOTH, "sequence_start": P("dp"), "sequence_end": P("dp")},
        train=False,
    ),
}  # fmt: skip


def check(sample: Sample, mesh: Mesh, allowed: frozenset[str] = frozenset({"all-reduce"})) -> str:
    """That the program gives what one device gives and only exchanges what is allowed; its text."""
    placed = sample.placed(mesh)
    program = jax.jit(sample.run).lower(placed).compile()
    assert collectives(program.as_text()) <= allowed, collectives(program.as_text())
    got, expected = program(placed), jax.jit(sample.run)(sample.given())
    for kind in (False, True):
        of_kind = [{n: x for n, x in found.items() if n.startswith("gradient") == kind} for found in (got, expected)]
        assert_close(*of_kind)
    return program.as_text()


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_is_gathered(name):
    check(SAMPLES[name], mesh_of())


def test_vmap_remat_and_scan():
    """As in a model: mapped over something, checkpointed, layer after layer."""
    arrays = {n: x[:, None] for n, x in SAMPLES["flash"].given().items()}
    mesh = mesh_of()
    split = NamedSharding(mesh, P("dp", None, None, "tp"))

    def loss(arrays):
        def layer(query, _):
            attend = jax.vmap(lambda q, k, v: modules.flash_attention(q, k, v, causal=True, cfg=TILES))
            return attend(query, arrays["key"], arrays["value"]), None

        return jnp.square(jax.lax.scan(jax.checkpoint(layer), arrays["query"], None, length=2)[0]).sum()

    program = jax.jit(jax.grad(loss)).lower({n: jax.device_put(x, split) for n, x in arrays.items()}).compile()
    assert collectives(program.as_text()) <= {"all-reduce"}
    got = program({n: jax.device_put(x, split) for n, x in arrays.items()})
    assert_close(got, jax.jit(jax.grad(loss))(arrays))


def test_heads_that_do_not_divide_are_right():
    """Three devices and four heads: what cannot be split is whole."""
    sample = flash(QKV, dict.fromkeys(QKV, P()))
    mesh = mesh_of((2, 3), ("dp", "tp"))

    def run(arrays):
        query = jax.lax.with_sharding_constraint(arrays["query"], NamedSharding(mesh, P("dp", None, None, None)))
        return sample.run(arrays | {"query": query})

    got, expected = jax.jit(run)(sample.placed(mesh)), jax.jit(sample.run)(sample.given())
    assert_close(got, expected)


def test_it_can_be_switched_off():
    """For what custom partitioning cannot do: the program then has none."""
    mesh = mesh_of()
    sample = SAMPLES["flash"]
    with implicit_sharding(False):
        text = jax.jit(sample.run).lower(sample.placed(mesh)).as_text()
    assert "CustomSPMDPartitioning" not in text
    assert "CustomSPMDPartitioning" in jax.jit(lambda a: sample.run(a)).lower(sample.placed(mesh)).as_text()
    assert "CustomSPMDPartitioning" not in jax.jit(lambda a: sample.run(a)).lower(sample.given()).as_text()

"""Many devices give what one gives: `mesh=`, arrays with shardings, and inside a user's own shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import gla_attention, lightning_attention, recurrent_attention
from harness import evaluate, normal
from harness.linear import named
from tolerances import assert_close

B, T, H, D, DV = 4, 20, 4, 4, 6
SPEC = P("dp", None, "tp", None)
STATE = P("dp", "tp")


def mesh_of(kind):
    return Mesh(np.asarray(jax.devices("cpu")[:8]).reshape(2, 4), ("dp", "tp"), axis_types=(kind, kind))


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return mesh_of(request.param)


def floats(B=B, N=None):
    shapes = {"query": (B, T, H, D), "key": (B, T, H, D), "value": (B, T, H, DV)}
    results = {name: normal(name, shape) for name, shape in shapes.items()}
    gates = {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, D)}
    results |= {name: -jnp.abs(normal(name, shape)) / 4 for name, shape in gates.items()}
    return results | {"initial_state": normal("state", (N or B, H, D, DV))}


def attend(given, **options):
    return named(recurrent_attention(**given, return_state=True, cfg={"chunk": 8}, **options))


def cotangents(B=B, N=None):
    return {"out": normal("dout", (B, T, H, DV)), "state": normal("dstate", (N or B, H, D, DV))}


def agree(got, expected):
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1], kind="gradient of")


def test_batch_and_heads(mesh):
    """Specs of the first three; those of decays and states follow."""
    got = evaluate(lambda x: attend(x, mesh=mesh, in_specs=(SPEC,) * 3), floats(), cotangents())
    agree(got, evaluate(attend, floats(), cotangents()))


def test_specs_by_name(mesh):
    specs = {"query": SPEC, "key": SPEC, "value": SPEC, "g": P("dp", None, "tp"), "gk": SPEC}
    out = jax.jit(lambda x: attend(x, mesh=mesh, in_specs=specs, out_specs=SPEC))(floats())
    assert_close(out, attend(floats()))


def test_types_are_specs():
    """Arrays that are split over Explicit axes need no mesh= and no in_specs=."""
    explicit = mesh_of(AxisType.Explicit)
    specs = dict.fromkeys(("query", "key", "value", "gk"), SPEC) | {"g": P("dp", None, "tp"), "initial_state": STATE}
    placed = {n: jax.device_put(x, NamedSharding(explicit, specs.get(n, P()))) for n, x in floats().items()}
    got = evaluate(attend, placed, cotangents())
    agree(got, evaluate(attend, floats(), cotangents()))
    assert jax.typeof(got[0]["out"]).sharding.spec == SPEC


def test_packed_sequences_split_over_heads(mesh):
    cu = jnp.array([0, 7, 7, 18])
    given, back = floats(1, 3), cotangents(1, 3)
    expected = evaluate(lambda x: attend(x, cu_seqlens=cu), given, back)
    spec = P(None, None, "tp")
    got = evaluate(lambda x: attend(x, cu_seqlens=cu, mesh=mesh, in_specs=(spec,) * 3), given, back)
    agree(got, expected)


def test_lightning_counts_the_heads_of_all_devices(mesh):
    q, k, v = (floats()[name] for name in ("query", "key", "value"))
    layer = {"layer_idx": 1, "num_layers": 4}
    got = jax.jit(lambda *x: lightning_attention(*x, **layer, mesh=mesh, in_specs=(SPEC,) * 3))(q, k, v)
    assert_close({"out": got}, {"out": lightning_attention(q, k, v, **layer)})


def test_gla(mesh):
    q, k, v, g = (floats()[name] for name in ("query", "key", "value", "gk"))
    got = jax.jit(lambda *x: gla_attention(*x, mesh=mesh, in_specs=(SPEC,) * 4))(q, k, v, g)
    assert_close({"out": got}, {"out": gla_attention(q, k, v, g)})


@pytest.mark.parametrize("check_vma", [False, True], ids=["unchecked", "checked"])
def test_inside_a_users_own_shard_map(check_vma):
    mesh = mesh_of(AxisType.Auto)
    specs = dict.fromkeys(("query", "key", "value", "gk"), SPEC)
    specs |= {"g": P("dp", None, "tp"), "g_gamma": P("tp"), "initial_state": STATE}
    out_specs = {"out": SPEC, "state": STATE}
    split = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=check_vma)
    agree(evaluate(split, floats(), cotangents()), evaluate(attend, floats(), cotangents()))


def test_arrays_that_jit_splits():
    """No specs: the partitioner of jit finds its own way and the answer stays."""
    mesh = mesh_of(AxisType.Auto)
    placed = {n: jax.device_put(x, NamedSharding(mesh, P("dp" if x.ndim > 1 else None))) for n, x in floats().items()}
    agree(evaluate(attend, placed, cotangents()), evaluate(attend, floats(), cotangents()))


ALONG = P(None, "tp")


def test_along_the_length(mesh):
    """Every device has five tokens of each sequence, and the states pass on."""
    given = floats(2) | {"gv": -jnp.abs(normal("gv", (2, T, H, DV))) / 4}
    given["gk"] = given["gk"].at[:, 7].set(-jnp.inf)  # a reset
    with jax.numpy_dtype_promotion("strict"):
        got = evaluate(lambda x: attend(x, mesh=mesh, in_specs=(ALONG,) * 3), given, cotangents(2))
    agree(got, evaluate(attend, given, cotangents(2)))


@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
def test_packed_sequences_along_the_length(reverse):
    """One goes over three devices, one is empty, one begins and ends on a device; nan behind them is not read."""
    cu = jnp.array([0, 11, 11, 13, 18])
    given, back = floats(1, 4), cotangents(1, 4)
    options = {"cu_seqlens": cu, "reverse": reverse}
    expected = evaluate(lambda x: attend(x, **options), given, back)
    for name in ("key", "g", "gk"):
        given[name] = given[name].at[:, 18:].set(jnp.nan)
    options |= {"mesh": mesh_of(AxisType.Auto), "in_specs": (ALONG,) * 3}
    agree(evaluate(lambda x: attend(x, **options), given, back), expected)


def test_over_all_axes_at_once():
    """Batch, heads and, over two axes of the mesh, tokens."""
    mesh = Mesh(np.asarray(jax.devices("cpu")[:8]).reshape(1, 2, 2, 2), ("dp", "a", "b", "tp"))
    spec = P("dp", ("a", "b"), "tp")
    got = evaluate(lambda x: attend(x, mesh=mesh, in_specs=(spec,) * 3), floats(), cotangents())
    agree(got, evaluate(attend, floats(), cotangents()))


def test_tokens_are_never_gathered():
    mesh, given = mesh_of(AxisType.Auto), {name: x for name, x in floats(2).items() if name != "initial_state"}

    def step(given):
        return jax.grad(lambda x: (recurrent_attention(**x, mesh=mesh, in_specs=(ALONG,) * 3) ** 2).sum())(given)

    shardings = {n: NamedSharding(mesh, ALONG if x.ndim > 2 else P()) for n, x in given.items()}
    text = jax.jit(step, in_shardings=(shardings,)).lower(given).compile().as_text()
    assert "collective-permute" in text
    assert "all-gather" not in text and "all-to-all" not in text


def test_what_cannot_be_split():
    q, k, v = (floats()[name] for name in ("query", "key", "value"))
    with pytest.raises(ValueError, match=r"split dimension D of size .* can only be split over B, H, T"):
        recurrent_attention(q, k, v, mesh=mesh_of(AxisType.Auto), in_specs=(P(None, None, None, "tp"),) * 3)

"""Many devices give what one gives: `mesh=`, and inside a user's own shard_map."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import blocksparse_attention, flash_attention, scaled_dot_product_attention
from ejkernel.types import BlockPattern, MaskInfo
from harness import PLATFORMS, by_case, evaluate, normal
from tolerances import assert_close

B, T, H, D = 4, 20, 4, 8
TILES = {"block_q": 8, "block_k": 8}
BATCH_AND_HEADS = P("dp", None, "tp", None)


def mesh_of(kind):
    devices = np.asarray(jax.devices("cpu"))
    assert len(devices) >= 8, "conftest.py asks for 8 host devices"
    return Mesh(devices[:8].reshape(2, 4), ("dp", "tp"), axis_types=(kind, kind))


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return mesh_of(request.param)


@pytest.fixture(scope="module")
def explicit():
    return mesh_of(AxisType.Explicit)


def qkv(Hkv=H):
    shapes = {"query": (B, T, H, D), "key": (B, T, Hkv, D), "value": (B, T, Hkv, D)}
    return {name: normal(name, shape) for name, shape in shapes.items()}


def segments(rows=B):
    return MaskInfo.from_segments(jnp.asarray(np.sort(np.random.default_rng(0).integers(-1, 3, (rows, T)), axis=1)))


def pattern():
    blocks = np.random.default_rng(0).random((H, 4, 4)) < 0.6
    return MaskInfo.from_block_pattern(BlockPattern.from_dense(blocks, block_size=5), q_len=T)


def dense():
    return MaskInfo.from_attention_mask(np.random.default_rng(1).random((1, H, T, T)) < 0.6)


CALLS = {
    "causal": (qkv(), {"causal": True}),
    "segments": (qkv(), {"mask_info": segments(), "causal": True}),
    "segments-one-row": (qkv(), {"mask_info": segments(1)}),
    "mask-per-head": (qkv(), {"mask_info": dense()}),
    "pattern": (qkv(), {"mask_info": pattern(), "causal": True}),
    "bias-per-head": (qkv() | {"bias": normal("bias", (1, H, T, T))}, {}),
    "bias-per-batch": (qkv() | {"bias": normal("bias", (B, 1, T, 1))}, {"causal": True}),
    "bias-shared": (qkv() | {"bias": normal("bias", (T, T))}, {}),
    "sinks": (qkv() | {"softmax_aux": normal("sinks", (H, 2))}, {"causal": True}),
    "dropout": (qkv(), {"dropout_prob": 0.4, "dropout_seed": 3}),
    "unnormalised": (qkv() | {"softmax_aux": normal("sinks", (H,))}, {"normalize_output": False}),
    "one-key-head": (qkv(1), {"causal": True}),
}  # fmt: skip
SPLIT = [name for name in CALLS if name != "one-key-head"]


def by_call(names):
    """A parameter `name`; one worker takes all tests of a call, so that it is computed once on one device."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in names])


def computed(name, place=lambda floats: floats, **shards):
    """Outputs and gradients of a call."""
    floats, options = CALLS[name]

    def attend(floats):
        out, lse = flash_attention(**floats, **options, return_lse=True, cfg=TILES, **shards)
        return {"out": out, "lse": lse}

    cotangents = {"out": normal("dout", (B, T, H, D)), "lse": normal("dlse", (B, H, T))}
    return evaluate(attend, place(floats), cotangents)


# on one device
whole = cache(computed)


def agree(got, expected):
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1], kind="gradient of")


@by_call(["segments", "mask-per-head", "bias-per-batch", "sinks", "dropout", "unnormalised"])
def test_batch_and_heads(name):
    """An array of each kind; `test_types_are_specs` has them all."""
    specs = {"in_specs": (BATCH_AND_HEADS,) * 3, "out_specs": BATCH_AND_HEADS}
    agree(computed(name, mesh=mesh_of(AxisType.Auto), **specs), whole(name))


@by_call(["bias-per-head", "dropout"])
def test_batch_and_heads_over_explicit_axes(name, explicit):
    specs = {"in_specs": (BATCH_AND_HEADS,) * 3, "out_specs": BATCH_AND_HEADS}
    agree(computed(name, mesh=explicit, **specs), whole(name))


def placed(mesh, arrays, spec=BATCH_AND_HEADS):
    return {n: jax.device_put(x, NamedSharding(mesh, spec)) if n in qkv() else x for n, x in arrays.items()}


@by_call(SPLIT)
def test_types_are_specs(name, explicit):
    """Arrays that are split over Explicit axes need no mesh= and no in_specs=."""
    got = computed(name, lambda f: placed(explicit, f))
    agree(got, whole(name))
    assert jax.typeof(got[0]["out"]).sharding.spec == BATCH_AND_HEADS


def test_whole_keys_follow_split_queries(explicit):
    """And the other way round; gradients come back laid out like their arrays."""
    for split in (("query",), ("key", "value")):
        place = lambda f, split=split: placed(explicit, f, P()) | placed(explicit, {n: f[n] for n in split})  # noqa: E731
        got = computed("causal", place)
        agree(got, whole("causal"))
        specs = {name: jax.typeof(x).sharding.spec for name, x in got[1].items()}
        assert {name for name, spec in specs.items() if any(spec)} == set(split)


def test_whole_arrays_of_an_explicit_mesh(explicit):
    agree(computed("causal", lambda f: placed(explicit, f, P())), whole("causal"))


@pytest.mark.parametrize("inner", [None, "tp"], ids=["whole", "split-heads"])
def test_vmap_over_a_split_axis(explicit, inner):
    """The query alone is mapped, so that keys are shared by the devices and their gradients by the rows."""
    floats = qkv() | {"query": normal("query", (2, B, T, H, D))}
    spec = {"query": P("dp", None, None, inner)} | dict.fromkeys(("key", "value"), P(None, None, inner))
    split = {name: jax.device_put(x, NamedSharding(explicit, spec[name])) for name, x in floats.items()}

    def attend(floats):
        return {
            "out": jax.vmap(lambda q: flash_attention(q, floats["key"], floats["value"], cfg=TILES))(floats["query"])
        }

    cotangents = {"out": normal("dout", (2, B, T, H, D))}
    typed = {"out": jax.device_put(cotangents["out"], split["query"].sharding)}
    agree(evaluate(attend, split, typed), evaluate(attend, floats, cotangents))


def test_types_that_do_not_fit(explicit):
    q, k, v = placed(explicit, qkv(), P(None, "tp")).values()
    with pytest.raises(ValueError, match=r"shardings of the arrays split dimension T of size 20 over .*ring_attention"):
        flash_attention(q, k, v)
    q, k, v = (placed(explicit, qkv(), P("dp")) | placed(explicit, {"key": k}, P("tp"))).values()
    with pytest.raises(ValueError, match=r"shardings of the arrays disagree on dimension B: \('dp',\) and \('tp',\)"):
        flash_attention(q, k, v)


def test_an_axis_of_one_device_splits_nothing():
    mesh = jax.make_mesh((2, 1), ("dp", "sp"))
    floats = placed(mesh, qkv(), P("dp", "sp"))
    out = jax.jit(lambda f: flash_attention(**f))(floats)
    assert_close({"out": out}, {"out": jax.jit(lambda f: flash_attention(**f))(qkv())})


def test_one_key_head_is_not_split(mesh):
    specs = {"query": BATCH_AND_HEADS, "key": P("dp"), "value": P("dp")}
    agree(computed("one-key-head", mesh=mesh, in_specs=specs), whole("one-key-head"))


@pytest.mark.parametrize("heads", [4, 2], ids=["as-many", "two-devices-each"])
def test_whole_key_heads(heads):
    """Devices take those that their query heads need."""
    floats = (
        qkv()
        | {"query": normal("query", (B, T, 8, D))}
        | {n: x[:, :, :heads] for n, x in qkv().items() if n != "query"}
    )
    specs = {"query": BATCH_AND_HEADS, "key": P("dp"), "value": P("dp")}
    cotangents = {"out": normal("dout", (B, T, 8, D))}

    def attend(floats, **shards):
        return {"out": flash_attention(**floats, causal=True, cfg=TILES, **shards)}

    got = evaluate(lambda f: attend(f, mesh=mesh_of(AxisType.Auto), in_specs=specs), floats, cotangents)
    agree(got, evaluate(attend, floats, cotangents))


def test_specs_of_the_query_alone(mesh):
    """One key head: nothing else need be said."""
    agree(computed("one-key-head", mesh=mesh, in_specs=(P(None, None, "tp"),)), whole("one-key-head"))


def test_batch_over_both_axes():
    mesh = Mesh(np.asarray(jax.devices("cpu")[:4]).reshape(2, 2), ("a", "b"))
    spec = P(("a", "b"))
    agree(computed("dropout", mesh=mesh, in_specs=(spec,) * 3, out_specs=spec), whole("dropout"))


def test_specs_for_further_arrays(mesh):
    specs = (BATCH_AND_HEADS,) * 3 + (P(None, "tp"),)
    agree(computed("bias-per-head", mesh=mesh, in_specs=specs), whole("bias-per-head"))


def test_the_output_is_laid_out_as_asked(mesh):
    sharding = NamedSharding(mesh, BATCH_AND_HEADS)
    q, k, v = (jax.device_put(x, sharding) for x in qkv().values())
    out = jax.jit(lambda q, k, v: flash_attention(q, k, v, mesh=mesh, in_specs=(BATCH_AND_HEADS,) * 3))(q, k, v)
    assert out.sharding.is_equivalent_to(sharding, 4)


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.parametrize("enter", [lambda mesh: mesh, jax.set_mesh], ids=["with-mesh", "set_mesh"])
def test_an_ambient_mesh(mesh, enter):
    """Around a call with its specs, not compiled."""
    q, k, v = qkv().values()
    with enter(mesh):
        out = flash_attention(q, k, v, in_specs=(BATCH_AND_HEADS,) * 3, out_specs=BATCH_AND_HEADS)
    assert_close({"out": out}, {"out": jax.jit(flash_attention)(q, k, v)})


def test_a_mesh_without_specs_only_names_the_device(mesh):
    q, k, v = qkv().values()
    assert_close({"out": flash_attention(q, k, v, mesh=mesh)}, {"out": jax.jit(flash_attention)(q, k, v)})


@pytest.mark.parametrize(
    ("kind", "by_type"),
    [(AxisType.Auto, False), (AxisType.Explicit, False), (AxisType.Explicit, True)],
    ids=["auto", "explicit", "types"],
)
def test_packed_tokens_split_over_heads(kind, by_type):
    mesh = mesh_of(kind)
    floats = {name: x[0] for name, x in qkv().items()}
    cum = jnp.array([0, 7, 18])
    spec = P(None, "tp")
    shards = {"mesh": mesh, "out_specs": spec} | ({} if by_type else {"in_specs": (spec,) * 3})

    def attend(floats, **shards):
        return {"out": flash_attention(**floats, cum_seqlens_q=cum, causal=True, cfg=TILES, **shards)}

    cotangents = {"out": normal("dout", (T, H, D))}
    given = placed(mesh, floats, spec) if by_type else floats
    split = evaluate(lambda f: attend(f, **shards), given, cotangents)
    agree(split, evaluate(attend, floats, cotangents))


def test_scaled_dot_product_attention_and_blocksparse(mesh):
    q, k, v = qkv().values()
    shards = {"mesh": mesh, "in_specs": (BATCH_AND_HEADS,) * 3, "out_specs": BATCH_AND_HEADS}
    pattern = BlockPattern.local_stride(H, 4, 1, 2, block_size=5)
    functions = {
        "sdpa": lambda **s: scaled_dot_product_attention(q, k, v, causal=True, cfg=TILES, **s),
        "blocksparse": lambda **s: blocksparse_attention(q, k, v, block_mask=pattern, cfg=TILES, **s),
    }
    for name, function in functions.items():
        assert_close({name: jax.jit(lambda f=function: f(**shards))()}, {name: jax.jit(function)()})


@pytest.mark.parametrize("check_vma", [False, True], ids=["unchecked", "checked"])
def test_inside_a_users_own_shard_map(mesh, check_vma):
    floats = qkv()

    def local(floats):
        out, lse = flash_attention(**floats, causal=True, return_lse=True, cfg=TILES)
        return {"out": out, "lse": lse}

    out_specs = {"out": BATCH_AND_HEADS, "lse": P("dp", "tp", None)}
    split = jax.shard_map(local, mesh=mesh, in_specs=BATCH_AND_HEADS, out_specs=out_specs, check_vma=check_vma)
    cotangents = {"out": normal("dout", (B, T, H, D)), "lse": normal("dlse", (B, H, T))}
    agree(evaluate(split, placed(mesh, floats), cotangents), evaluate(local, floats, cotangents))


def test_what_devices_share_inside_a_checked_shard_map(mesh):
    """Its gradient is the sum of what all of them have."""
    sinks, floats = normal("sinks", (H,)), qkv()

    def local(floats):
        return {"out": flash_attention(**floats, causal=True, cfg=TILES)}

    specs = {name: P("dp") for name in floats} | {"softmax_aux": P()}
    split = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P("dp"), check_vma=True)
    cotangents = {"out": normal("dout", (B, T, H, D))}
    given = placed(mesh, floats, P("dp")) | {"softmax_aux": jax.device_put(sinks, NamedSharding(mesh, P()))}
    agree(evaluate(split, given, cotangents), evaluate(local, floats | {"softmax_aux": sinks}, cotangents))


@by_case([platform for platform in PLATFORMS if platform.interpreted])
def test_kernels_inside_a_checked_shard_map(case):
    """They do not say what their results vary over; gradients must, and that of what devices share is a sum."""
    floats = {name: x[:2, :, :2] for name, x in qkv().items()} | {"bias": normal("bias", (1, 2, 1, T))}
    mesh = Mesh(np.asarray(jax.devices("cpu"))[:2], ("dp",), axis_types=(AxisType.Auto,))

    def local(floats):
        return {"out": flash_attention(**floats, causal=True, **case.options((8, 8), "float32"))}

    specs = {name: P("dp") for name in floats} | {"bias": P()}
    split = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P("dp"))
    cotangents = {"out": normal("dout", (2, T, 2, D))}
    with case.context():
        agree(evaluate(split, floats, cotangents), evaluate(local, floats, cotangents))


def test_arrays_that_jit_splits(mesh):
    """No specs: the partitioner of jit finds its own way and the answer stays."""
    sharding = NamedSharding(mesh, P("dp"))
    q, k, v = (jax.device_put(x, sharding) for x in qkv().values())
    got = jax.jit(lambda *x: flash_attention(*x, causal=True, cfg=TILES))(q, k, v)
    expected = jax.jit(lambda *x: flash_attention(*x, causal=True, cfg=TILES))(*qkv().values())
    assert_close({"out": got}, {"out": expected})


ERRORS = {
    "length": ((P(None, "tp"),) * 3, ValueError, "split dimension T of size .* over .*ring_attention splits lengths"),
    "head-dim": ((P(None, None, None, "tp"),) * 3, ValueError, "split dimension D of size"),
    "heads-apart": ((P("dp"), BATCH_AND_HEADS, BATCH_AND_HEADS), ValueError, "would need parts of Hkv"),
    "disagree": ((P("dp"), P("tp"), P("dp")), ValueError, "in_specs disagree on dimension B"),
    "unknown-axis": ((P("pp"),) * 3, ValueError, "mesh axis 'pp'; the mesh has"),
    "too-many": ((P(),) * 4, ValueError, "in_specs has 4 entries for 3 arrays"),
    "too-long": ((P(None, None, None, None, "dp"),) * 3, ValueError, "in_specs of query is .* dimensions"),
    "unknown-array": ({"querry": P()}, ValueError, "unknown arrays .*'querry'.* known: .*'query'"),
    "callers-names": ({"sinks": P()}, ValueError, "unknown arrays .*'sinks'.* known: .*'softmax_aux'"),
    "no-spec": ((P("dp"), "dp", P("dp")), TypeError, "in_specs of key is 'dp': it must be one PartitionSpec"),
    "one-spec": (P("dp"), TypeError, "must be one PartitionSpec per leading array"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_specs_that_do_not_fit(name, mesh):
    specs, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        flash_attention(*qkv().values(), mesh=mesh, in_specs=specs)


def test_specs_by_the_callers_names(mesh):
    """Sinks are `softmax_aux` to who calls."""
    call = partial(flash_attention, *qkv().values(), softmax_aux=normal("sinks", (H,)), cfg=TILES)
    out = call(mesh=mesh, in_specs={"query": P("dp", None, "tp"), "softmax_aux": P(None, "tp")})
    assert_close({"out": out}, {"out": call()})


def test_sizes_that_do_not_divide(mesh):
    q = normal("q", (3, T, H, D))
    with pytest.raises(ValueError, match=r"dimension B of size 3 does not divide over \('dp',\) of 2 devices"):
        flash_attention(q, q, q, mesh=mesh, in_specs=(P("dp"),) * 3)


@pytest.mark.parametrize("name", ["in_specs", "out_specs"])
def test_specs_need_a_mesh(name):
    q = normal("q", (1, 4, 1, 4))
    with pytest.raises(ValueError, match="in_specs and out_specs need mesh=, or a mesh around the call"):
        flash_attention(q, q, q, **{name: (P(),) * 3})


def test_what_no_mesh_would_honour(mesh):
    q = normal("q", (2, T, H, D))
    with pytest.raises(TypeError, match=r"mesh='dp' must be a jax\.sharding\.Mesh"):
        flash_attention(q, q, q, mesh="dp")
    with pytest.raises(ValueError, match="out_specs needs in_specs, or arrays whose types say"):
        flash_attention(q, q, q, mesh=mesh_of(AxisType.Auto), out_specs=P("dp"))
    specs = {"mesh": mesh, "in_specs": (P("dp"),) * 3}
    with pytest.raises(ValueError, match=r"out_specs names unknown outputs \['outt'\]; known: \['out', 'lse'"):
        flash_attention(q, q, q, **specs, out_specs={"outt": P("dp")})
    with pytest.raises(ValueError, match="out_specs has 9 entries for"):
        flash_attention(q, q, q, **specs, out_specs=(P("dp"),) * 9)

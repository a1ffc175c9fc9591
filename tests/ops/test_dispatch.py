"""Which platform runs, and how that is explained."""

import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ejkernel import explain as explain_at_the_top
from ejkernel import ops
from ejkernel.kernels.softmax import xla
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.modules import (
    attention,
    blocksparse_attention,
    cascade_attention,
    flash_attention,
    scaled_dot_product_attention,
)
from ejkernel.ops import (
    PLATFORMS,
    Operation,
    Target,
    dispatch,
    explain,
    get_operation,
    interpret,
    interpreting,
    platforms,
)
from ejkernel.ops.dispatch import choose, refusals
from ejkernel.ops.target import NAMED

Q = jnp.ones((1, 32, 2, 16))
SHAPE = jax.ShapeDtypeStruct((1, 32, 2, 16), jnp.bfloat16)
H200 = Target("gpu", "nvidia_h200", "sm_90")
H100 = Target("gpu", "nvidia_h100_80gb_hbm3", "sm_90")
A100 = Target("gpu", "nvidia_a100", "sm_80")


def test_explain_names_platform_config_and_refusals():
    told = explain(flash_attention, Q, Q, Q, causal=True)
    assert told.operation == "flash_attention" and told.platform == "xla"
    assert told.config == xla.default_config(canonicalise(Q, Q, Q, causal=True)) and told.config_source == "default"
    assert set(told.refusals) == {"triton", "pallas", "cudnn", "cute"} and all(told.refusals.values())
    assert told.target.backend == "cpu"


def test_explain_reads_well():
    text = str(explain(flash_attention, Q, Q, Q))
    assert text.startswith("flash_attention on cpu: xla (first of xla that can)")
    assert "config: Config(block_q=" in text and "(from default)" in text
    for platform, need in {
        "triton": "an NVIDIA GPU",
        "pallas": "an NVIDIA GPU or a TPU",
        "cudnn": "an NVIDIA GPU",
    }.items():
        assert f"not {platform}: needs {need}, this call is for cpu" in text
    assert repr(explain(flash_attention, Q, Q, Q)) == text


def test_explain_takes_shapes_alone():
    assert explain(flash_attention, SHAPE, SHAPE, SHAPE, causal=True).platform == "xla"
    assert explain(flash_attention, Q, SHAPE.update(dtype=jnp.float32), Q).platform == "xla"


def test_explain_computes_nothing(monkeypatch):
    monkeypatch.setattr(xla.IMPLEMENTATION, "forward", None)
    assert explain(flash_attention, Q, Q, Q).platform == "xla"


@pytest.mark.parametrize("function", [flash_attention, scaled_dot_product_attention], ids=lambda f: f.__name__)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_explain_of_a_forced_platform(function, platform):
    told = explain(function, Q, Q, Q, platform=platform)
    assert told.platform == (platform if platform == "xla" else None)
    assert "forced by platform=" in told.reason
    if platform != "xla":
        assert "nothing can run this" in str(told)


def test_explain_of_blocksparse():
    told = explain(blocksparse_attention, Q, Q, Q, block_mask=jnp.ones((2, 2), bool), block_size=16)
    assert (told.operation, told.platform) == ("blocksparse_attention", "xla")


def test_explain_through_a_users_function():
    def layer(x):
        return flash_attention(x, x, x, causal=True) + 1

    assert explain(layer, Q).operation == "flash_attention"


def test_explain_of_something_else():
    with pytest.raises(TypeError, match="cos calls no operation of ejkernel"):
        explain(jnp.cos, Q)


def test_explain_raises_what_the_call_would():
    with pytest.raises(ValueError, match="must be a multiple of key heads"):
        explain(flash_attention, Q, jnp.ones((1, 32, 3, 16)), jnp.ones((1, 32, 3, 16)))


def test_explain_leaves_no_trace():
    explain(flash_attention, Q, Q, Q)
    assert flash_attention(Q, Q, Q).shape == Q.shape


def test_auto_is_none():
    assert explain(flash_attention, Q, Q, Q, platform="auto").platform == "xla"


def call_on(target, **options):
    return canonicalise(*(jnp.ones((1, 32, 2, 64), jnp.bfloat16),) * 3, **options).on(target)


def test_cudnn_on_a_gpu_gives_every_reason():
    call = call_on(H200, logits_soft_cap=3.0, bias=jnp.ones((32, 32)), dropout_prob=0.1, dropout_seed=0)
    _, told = choose(FLASH_ATTENTION, call, None, None)
    assert told.platform != "cudnn"
    reasons = " / ".join(told.refusals["cudnn"])
    assert "soft cap" in reasons and "bias" in reasons and "dropout" in reasons


@pytest.mark.parametrize(("target", "whose"), [(H200, "sm_90"), (A100, "gpu")], ids=["h200", "a100"])
def test_the_preference_of_the_device_decides(target, whose):
    plan, told = choose(FLASH_ATTENTION, call_on(target), None, None)
    assert told.platform == next(p for p in FLASH_ATTENTION.preference[whose] if p not in told.refusals)
    assert plan.target == target


def test_what_was_measured_on_an_h200_serves_another_hopper():
    x = jax.ShapeDtypeStruct((2, 8192, 16, 128), jnp.bfloat16)
    found = []
    jax.eval_shape(lambda *qkv: found.append(canonicalise(*qkv, causal=True)), x, x, x)
    here, there = (choose(FLASH_ATTENTION, found[0].on(on), None, None)[1] for on in (H200, H100))
    assert here.platform == there.platform and here.reason.startswith("fastest measured for B2-T8192")
    assert there.reason == here.reason.replace("-causal:", "-causal, on nvidia_h200:")


def test_interpret_lets_kernels_of_absent_hardware_through():
    before = explain(flash_attention, Q, Q, Q).refusals["triton"]
    assert "ejkernel.ops.interpret()" in before[0]
    with interpret():
        assert interpreting()
        during = explain(flash_attention, Q, Q, Q).refusals
    assert not interpreting()
    assert not any("needs an NVIDIA GPU" in reason for reason in during.get("triton", []))
    assert any("needs an NVIDIA GPU" in reason for reason in during["cudnn"])


def test_interpret_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), interpret():
        _ = 1 / 0
    assert not interpreting()


def test_interpret_does_not_change_what_auto_picks():
    with interpret():
        assert explain(flash_attention, Q, Q, Q).platform == "xla"


def test_operations_have_names():
    names = ops.list_operations()
    assert {"flash_attention", "scaled_dot_product_attention", "blocksparse_attention"} <= set(names)
    assert names == sorted(names)
    assert get_operation("flash_attention") is get_operation(flash_attention) is get_operation(FLASH_ATTENTION)


def test_an_unknown_operation():
    with pytest.raises(ValueError, match=r"unknown operation 'attend'; .*known: .*flash_attention"):
        get_operation("attend")


@pytest.mark.parametrize("name", ["flash_attention", "scaled_dot_product_attention", "blocksparse_attention"])
def test_the_support_table_asks_the_implementations(name):
    rows = ops.support_table(name).splitlines()
    header = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert header[:2] == ["feature", "xla"] and set(rows[1]) <= set("|- ")
    features = {row.split("|")[1].strip(): row for row in rows[2:]}
    assert {"plain", "causal", "bias", "sinks", "dropout", "segments", "block pattern"} <= set(features)
    for row in rows[2:]:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
        assert len(cells) == len(header) and cells[1] == "yes"
        assert all(cell == "yes" or cell.startswith("no: ") for cell in cells[1:])


def test_the_support_table_tells_why_cudnn_cannot():
    header, _, *rows = ops.support_table(flash_attention).splitlines()
    column = [cell.strip() for cell in header.split("|")].index("cudnn")
    cells = {row.split("|")[1].strip(): row.split("|")[column].strip() for row in rows}
    assert cells["causal"] == "yes" and "bias" in cells["bias"] and "soft cap" in cells["soft cap"]


def test_device_kind():
    assert ops.device_kind() == "cpu"


def test_a_mesh_decides_the_device():
    mesh = jax.make_mesh((1,), ("x",))
    assert explain(flash_attention, Q, Q, Q, mesh=mesh).target.backend == "cpu"


def test_public_names():
    for name in ("Operation", "Implementation", "explain", "use_config", "autotune", "interpret", "list_operations",
                 "support_table", "TunedConfigs", "device_kind"):  # fmt: skip
        assert hasattr(ops, name), name
    assert explain_at_the_top is explain


@pytest.mark.parametrize("name", ["xla", "cudnn"])
def test_an_implementation_has_six_names(name):
    implementation = FLASH_ATTENTION.load(name, "sm_90", "gpu")
    for wanted in ("Config", "unsupported", "default_config", "search_space", "forward", "backward"):
        assert hasattr(implementation, wanted), wanted
    call = call_on(H200)
    config = implementation.default_config(call)
    assert isinstance(config, implementation.Config) and hash(config) is not None
    assert all(isinstance(c, implementation.Config) for c in implementation.search_space(call))


def test_a_kernel_for_another_architecture_is_a_row():
    """The row of a device kind, else of its architecture, else of its backend."""
    path = FLASH_ATTENTION.implementations["xla"]
    rows = {"sm_100": path, "gfx942": path, "tpu_v5_lite": path}
    operation = replace(FLASH_ATTENTION, implementations={**FLASH_ATTENTION.implementations, "pallas": rows})
    b200, mi300 = NAMED["b200"], Target("gpu", "amd_instinct_mi300x", "gfx942")
    call = canonicalise(Q, Q, Q)
    for target in (b200, mi300, NAMED["v5e"]):
        assert not refusals(operation, "pallas", call.on(target))
    for target in (NAMED["h200"], NAMED["v6e"]):
        assert refusals(operation, "pallas", call.on(target)) == [
            f"needs sm_100 or gfx942 or tpu_v5_lite, not {target.arch}"
        ]
    (reason,) = refusals(FLASH_ATTENTION, "pallas", call.on(b200))
    assert reason == "needs sm_90, not sm_100"


def test_a_platform_that_does_not_import_is_a_refusal(monkeypatch):
    """A version of JAX that is not known here may break a module in any way; the other platforms go on."""

    def broken(self, platform, *runs_on):
        if platform == "pallas":
            raise KeyError("idx")
        return load(self, platform, *runs_on)

    load = Operation.load
    monkeypatch.setattr(Operation, "load", broken)
    monkeypatch.setattr(dispatch, "_WARNED", set())
    module = (
        r"ejkernel\.kernels\.softmax\.mosaic_gpu does not import and is passed over: KeyError: 'idx' \(.*\.py:\d+\)"
    )
    with pytest.warns(RuntimeWarning, match=module):
        _, told = choose(FLASH_ATTENTION, call_on(H200), None, None)
    assert told.platform not in (None, "pallas")
    assert told.refusals["pallas"] == ["it cannot be imported: KeyError: 'idx'"]
    assert choose(FLASH_ATTENTION, call_on(H200), None, None)[1].platform == told.platform  # warned once


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'triton'", name="triton"), "No module named 'triton'"),
        (AttributeError("gone"), "AttributeError: gone (with jax 0.99.1, which nobody has tried)"),
    ],
    ids=["package", "version"],
)
def test_a_missing_package_and_an_unknown_version_are_no_fault_of_ours(monkeypatch, error, reason):
    def broken(self, platform, *runs_on):
        if platform == "pallas":
            raise error
        return load(self, platform, *runs_on)

    load = Operation.load
    monkeypatch.setattr(Operation, "load", broken)
    monkeypatch.setattr(dispatch, "_WARNED", set())
    if isinstance(error, AttributeError):
        monkeypatch.setattr(platforms, "version", {"jax": "0.99.1"}.get)
    _, told = choose(FLASH_ATTENTION, call_on(H200), None, None)  # a warning would be an error
    assert told.platform not in (None, "pallas") and told.refusals["pallas"][0].endswith(reason)


def test_triton_alone_is_not_enough(monkeypatch):
    """PyTorch brings it, without jax-triton: what needs its kernels goes elsewhere."""
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    _, told = choose(FLASH_ATTENTION, call_on(H200, bias=jnp.ones((1, 2, 32, 32), jnp.bfloat16)), None, None)
    assert told.platform == "xla"
    for platform in ("triton", "pallas"):
        assert any("the package jax_triton is not installed" in reason for reason in told.refusals[platform])


def test_a_forced_platform_gives_every_reason():
    told = explain(flash_attention, Q, Q, Q, logits_soft_cap=3.0, dropout_prob=0.5, dropout_seed=0, platform="cudnn")
    device, *others = told.refusals["cudnn"]
    assert "needs an NVIDIA GPU" in device
    assert any("soft cap" in reason for reason in others) and any("dropout" in reason for reason in others)
    with pytest.raises(NotImplementedError, match=r"(?s)needs an NVIDIA GPU.*on an NVIDIA GPU: .*not float32"):
        flash_attention(Q, Q, Q, platform="pallas")


def test_a_forced_platform_whose_package_is_missing_gives_every_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "fa4_jax", None)
    device, package, *others = explain(flash_attention, Q, Q, Q, logits_soft_cap=3.0, platform="cute").refusals["cute"]
    assert "needs an NVIDIA GPU" in device and "the package fa4_jax is not installed" in package
    assert {"dtype float32: only bfloat16 and float16", "soft cap"} <= set(others)
    told = explain(flash_attention, Q, Q, Q, logits_soft_cap=3.0, platform="cute", device="h200").refusals["cute"]
    assert told == others  # another device has its packages


def test_explain_of_a_function_that_makes_two_calls():
    cache, lens, table = jnp.ones((8, 16, 2, 64)), jnp.array([40, 35]), jnp.array([[3, 1, 2], [3, 1, 7]])
    told = explain(cascade_attention, jnp.ones((2, 4, 64)), cache, cache, lens, table, 32)
    assert (told.operation, told.platform) == ("cascade_attention", "xla")
    assert [call.operation for call in told.calls] == ["prefill_page_attention", "page_attention"]
    assert all(call.platform == "xla" and call.config is not None for call in told.calls)
    text = str(told)
    assert "cascade_attention on cpu: xla (2 calls)" in text
    assert "cascade_attention > page_attention  " in text and "1x xla Config(" in text


def test_explain_of_attention():
    told = explain(attention, Q, Q, Q)
    first, *others = str(told).splitlines()
    assert first == "attention on cpu: xla (its definition: the matrix of weights is an output)"
    assert others == [f"  not {p}: attention has no {p} implementation" for p in PLATFORMS if p != "xla"]


def twelve_layers(x):
    def layer(x, _):
        return flash_attention(x, x, x, causal=True) + cascade(x[0, :2]).mean(), None

    return jax.lax.scan(layer, x, length=12)[0]


def cascade(x):
    cache, lens, table = jnp.ones((8, 16, 2, 16)), jnp.array([40, 35]), jnp.array([[3, 1, 2], [3, 1, 7]])
    return cascade_attention(jax.lax.stop_gradient(x), cache, cache, lens, table, 32)


def loss(x):
    return (twelve_layers(x) + flash_attention(x, x, x)).sum()


@pytest.mark.parametrize("ran_before", [False, True])
def test_explain_of_a_training_step_counts_calls_in_loops(ran_before):
    step = jax.jit(jax.value_and_grad(loss))
    if ran_before:
        step(Q)
    told = explain(step, Q)
    counted = {(c.part_of, c.operation, c.forward_calls, c.backward_calls) for c in told.calls}
    assert counted == {
        ("", "flash_attention", 12, 12),
        ("", "flash_attention", 1, 1),
        ("cascade_attention", "prefill_page_attention", 12, 0),
        ("cascade_attention", "page_attention", 12, 0),
    }
    assert all(call.arrays["query"].startswith("f32[") for call in told.calls)
    header, *rows = str(told).splitlines()[1:]
    assert header.split() == ["call", "arrays", "forward", "backward"] and len(rows) == 4
    assert jnp.isfinite(step(Q)[0])  # what it recorded stays in it


@pytest.mark.parametrize("linear", [False, True], ids=["out is squared", "out is summed"])
@pytest.mark.parametrize(
    ("kept", "forwards"), [((), 6), (("ejkernel_out", "ejkernel_lse"), 3)], ids=["nothing kept", "out and lse kept"]
)
def test_explain_of_a_rematerialised_loop_counts_what_runs_again(kept, forwards, linear):
    def layer(x, _):
        out = flash_attention(x, x, x)
        return out if linear else out**2, None

    def remat(x):
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, length=3)[0].sum()

    told = explain(jax.grad(remat), Q)
    assert (told.operation, told.forward_calls, told.backward_calls) == ("flash_attention", forwards, 3)
    assert f"runs: forward {forwards}x and backward 3x" in str(told)


def test_explain_where_jit_is_switched_off():
    with jax.disable_jit():
        assert explain(jax.jit(lambda x: flash_attention(x, x, x)), Q).forward_calls == 1


def test_explain_says_on_what_a_call_depends():
    def either(x):
        return jax.lax.cond(x.sum() > 0, lambda: flash_attention(x, x, x), lambda: x)

    assert explain(either, Q).conditions == ("where its branch is taken",)
    assert "runs: forward 1x, where its branch is taken" in str(explain(either, Q))
    endless = explain(lambda x: jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: flash_attention(x, x, x), x), Q)
    assert endless.conditions == ("in every iteration of a while loop",)


def test_explain_of_vmap_shows_the_folded_batch():
    told = explain(jax.vmap(lambda x: flash_attention(x, x, x)), jnp.ones((3, 2, 32, 2, 16)))
    assert told.arrays["query"] == "f32[6,32,2,16]"


def test_explain_goes_on_behind_what_nothing_can_run():
    told = explain(lambda x: flash_attention(flash_attention(x, x, x, platform="cudnn"), x, x).sum(), Q)
    assert [call.platform for call in told.calls] == [None, "xla"] and told.platform is None


@pytest.mark.parametrize("name", ["native_sparse_attention", "cascade_attention", "attention", "dot_product_attention"])
def test_functions_of_several_calls_are_operations(name):
    assert get_operation(name).name == name and name in ops.list_operations()
    assert "| feature |" in ops.support_table(name)

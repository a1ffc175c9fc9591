"""Which config a call runs with: cfg=, use_config, the user's file, the shipped one, the default."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels.softmax import cudnn, xla
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION, bucket
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.modules import blocksparse_attention, flash_attention, scaled_dot_product_attention
from ejkernel.ops import TunedConfigs, explain, interpret, use_config
from ejkernel.ops import config as configs
from ejkernel.ops.tuned_files import shipped_file, user_file
from ejkernel.types import MaskInfo

Q = jnp.ones((1, 32, 2, 16))
BUCKET = bucket(canonicalise(Q, Q, Q))
DEFAULT = xla.default_config(canonicalise(Q, Q, Q))


def chosen(**options):
    told = explain(flash_attention, Q, Q, Q, **options)
    return told.config, told.config_source


def tuned(block_q, block_k=16, operation="flash_attention", platform="xla"):
    return TunedConfigs().add(operation, BUCKET, platform, {"block_q": block_q, "block_k": block_k}, 10.0)


@pytest.fixture
def users(tmp_path, monkeypatch):
    """The user's tuned file, in a folder of its own."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    path = user_file("cpu")
    assert tmp_path in path.parents
    return path


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A shipped file for this device kind."""
    path = tmp_path / "shipped" / "tuned.json"
    monkeypatch.setattr(configs, "shipped_file", lambda kind: path if kind == "cpu" else path.with_name("none"))
    return path


def test_default():
    assert chosen() == (DEFAULT, "default")


def test_cfg_as_a_dict_and_as_a_config():
    assert chosen(cfg={"block_q": 8}) == (xla.Config(block_q=8), "cfg=")
    assert chosen(cfg=xla.Config(16, 8)) == (xla.Config(16, 8), "cfg=")


def test_cfg_is_used():
    """Tiles of one query by one key are slow, and so easily told apart in the program."""
    small, large = (
        jax.jit(lambda q, n=n: flash_attention(q, q, q, cfg={"block_q": n, "block_k": n})).lower(Q).as_text()
        for n in (4, 32)
    )
    assert "tensor<4x4xf32>" in small and "tensor<4x4xf32>" not in large and "tensor<32x32xf32>" in large


def test_a_config_of_another_platform_refuses():
    told = explain(flash_attention, Q, Q, Q, cfg=cudnn.Config())
    assert told.platform is None and "cudnn.Config, not its Config" in told.refusals["xla"][-1]
    with pytest.raises(NotImplementedError, match=r"cfg is a ejkernel.kernels.softmax.cudnn.Config, not its Config"):
        flash_attention(Q, Q, Q, cfg=cudnn.Config(), platform="xla")


@pytest.mark.parametrize("value", [0, -4, 2.5, "8", None], ids=repr)
def test_a_config_validates_itself(value):
    with pytest.raises(ValueError, match=r"block_q=.* must be an int from 1 on"):
        xla.Config(block_q=value)


@pytest.mark.parametrize(
    "operation", ["flash_attention", flash_attention, FLASH_ATTENTION], ids=["name", "function", "operation"]
)
def test_use_config(operation):
    with use_config(operation, {"block_q": 8}):
        assert chosen() == (xla.Config(block_q=8), "use_config")
    assert chosen() == (DEFAULT, "default")


def test_use_config_is_for_one_operation():
    with use_config("flash_attention", {"block_q": 8}):
        told = explain(scaled_dot_product_attention, Q, Q, Q)
    assert told.config_source == "default"


def test_use_config_of_another_platform_is_left_alone():
    with use_config("flash_attention", cudnn.Config()):
        assert chosen() == (DEFAULT, "default")


def test_use_config_nests_and_ends_with_an_error():
    with use_config("flash_attention", {"block_q": 8}):
        with pytest.raises(ZeroDivisionError), use_config("flash_attention", {"block_q": 4}):
            _ = 1 / (chosen()[0].block_q - 4)
        assert chosen()[0].block_q == 8
    assert chosen()[1] == "default"


@pytest.mark.parametrize("cfg", [64, "fast", xla.Config])
def test_use_config_of_what_is_no_config(cfg):
    expected = pytest.raises(TypeError, match="must be a platform's Config or a dict of its fields")
    with expected, use_config("flash_attention", cfg):
        pass


def test_use_config_with_unknown_fields():
    with use_config("flash_attention", {"num_warps": 4}), pytest.raises(ValueError, match=r"\['num_warps'\].*block_q"):
        flash_attention(Q, Q, Q)
    with pytest.raises(ValueError, match="unknown operation 'flash'"), use_config("flash", {}):
        pass


def test_the_users_file(users):
    tuned(8).save(users)
    assert chosen() == (xla.Config(8, 16), "the user's tuned file")


def test_the_users_file_is_read_again_when_it_changes(users):
    tuned(8).save(users)
    assert chosen()[0].block_q == 8
    tuned(4).save(users)
    assert chosen()[0].block_q == 4
    users.unlink()
    assert chosen()[1] == "default"


def test_the_shipped_file(users, shipped):
    tuned(4).save(shipped)
    assert chosen() == (xla.Config(4, 16), "shipped for cpu")


def test_precedence(users, shipped):
    tuned(1).save(shipped)
    assert chosen()[0].block_q == 1
    tuned(2).save(users)
    assert chosen()[0].block_q == 2
    with use_config("flash_attention", {"block_q": 3}):
        assert chosen()[0].block_q == 3
        assert chosen(cfg={"block_q": 4})[0].block_q == 4


def test_another_bucket_another_platform_another_operation(users):
    tuned(8, operation="scaled_dot_product_attention").save(users)
    tuned(8, platform="triton").save(users)
    assert chosen()[1] == "default"
    longer = jnp.ones((1, 64, 2, 16))
    tuned(8).save(users)
    assert explain(flash_attention, longer, longer, longer).config_source == "default"


def test_buckets_are_powers_of_two(users):
    """Lengths may vary without retuning: 17 to 32 are one bucket."""
    tuned(8).save(users)
    for length in (17, 25, 32):
        x = jnp.ones((1, length, 2, 16))
        assert explain(flash_attention, x, x, x).config == xla.Config(8, 16)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"sliding_window": 4},
        {"bias": jnp.ones((32, 32))},
        {"mask_info": MaskInfo(32, 32).apply_chunked(8)},
    ],
    ids=["causal", "window", "bias", "chunks"],
)
def test_what_changes_the_work_changes_the_bucket(options):
    assert bucket(canonicalise(Q, Q, Q, **options)) != BUCKET


@pytest.mark.parametrize(
    "fields", [{"blocks": 3}, {"block_q": 0}, {"block_q": "many"}], ids=["unknown", "zero", "text"]
)
def test_fields_of_another_version_fall_back(users, fields):
    TunedConfigs().add("flash_attention", BUCKET, "xla", fields, 1.0).save(users)
    with pytest.warns(UserWarning, match=f"the user's tuned file: the config of flash_attention, {BUCKET}, xla"):
        assert chosen() == (DEFAULT, "default")


def test_measured_times_order_the_platforms(users):
    """Where two platforms can, the faster one is tried first."""
    (tuned(8) | TunedConfigs().add("flash_attention", BUCKET, "cudnn", {}, 1.0)).save(users)
    told = explain(flash_attention, Q, Q, Q)
    assert told.platform == "xla"  # cudnn, though faster, cannot run here
    assert "fastest measured" in told.reason and "cudnn 1 us, xla 10 us" in told.reason


def compared(length, xla_time, cudnn_time, operation="flash_attention"):
    x = jnp.ones((1, length, 2, 16))
    where = operation, bucket(canonicalise(x, x, x))
    return TunedConfigs().add(*where, "xla", None, xla_time).add(*where, "cudnn", None, cudnn_time)


def test_the_nearest_measured_shape_orders_the_platforms(users, shipped):
    """Not measured at 32: the order comes from the nearest length, wherever it was measured."""
    compared(256, 3.0, 1.0).save(users)
    assert "cudnn 1 us, xla 3 us" in explain(flash_attention, Q, Q, Q).reason
    compared(64, 1.0, 2.0).save(shipped)
    told = explain(flash_attention, Q, Q, Q)
    near = BUCKET.replace("T32-S32", "T64-S64")
    assert told.reason == f"fastest measured at {near}, the nearest to {BUCKET}: xla 1 us, cudnn 2 us"
    compared(32, 4.0, 5.0).save(shipped)
    assert explain(flash_attention, Q, Q, Q).reason == f"fastest measured for {BUCKET}: xla 4 us, cudnn 5 us"


def test_a_backward_takes_no_less_than_its_forward():
    """Two times that are nearly the same would make a backward of next to nothing of a noisy forward."""
    where = "flash_attention", BUCKET
    found = TunedConfigs().add(*where, "xla", None, 109.0, 117.0).add(*where, "cudnn", None, 39.0, 111.0)
    found = found.add(*where, "triton", None, 1.0)  # of which no backward was measured
    assert found.times(*where, gradient=True) == {"xla": 109.0, "cudnn": 72.0}


def test_the_gradient_may_be_faster_elsewhere(users):
    """One platform's backward after another's forward; both are explained, and both run."""
    where = "flash_attention", BUCKET
    (TunedConfigs().add(*where, "xla", None, 1.0, 5.0).add(*where, "triton", None, 2.0, 4.0)).save(users)

    def launched(function):
        return set(re.findall(r"JITFunction\([\w.]+:(\w+)_kernel\)", str(jax.make_jaxpr(function)(Q))))

    with interpret():
        told = explain(flash_attention, Q, Q, Q)
        assert told.platform == "xla" and told.gradient.platform == "triton"
        assert "its gradient: triton (fastest measured" in str(told) and "triton 2 us, xla 4 us" in str(told)
        assert launched(lambda q: flash_attention(q, Q, Q)) == set()
        assert launched(jax.grad(lambda q: flash_attention(q, Q, Q).sum())) == {"dq", "dkv"}
        assert explain(flash_attention, Q, Q, Q, platform="xla").gradient is None
        assert explain(flash_attention, Q, Q, Q, cfg={"block_q": 8}).gradient is None
        with use_config("flash_attention", {"block_q": 8}):  # a config is for one platform
            assert explain(flash_attention, Q, Q, Q).gradient is None
    assert explain(flash_attention, Q, Q, Q).gradient is None  # no Triton without the interpreter


def test_a_gradient_faster_than_nothing_is_no_measurement(users):
    where = "flash_attention", BUCKET
    TunedConfigs().add(*where, "xla", None, 10.0, 5.0).add(*where, "triton", None, 1.0, 50.0).save(users)
    assert TunedConfigs.load(users).times(*where, gradient=True) == {"triton": 49.0}
    with interpret():
        told = explain(flash_attention, Q, Q, Q)
    assert told.platform == "triton" and told.gradient is None


def test_a_batch_that_vmap_makes_too_large_is_refused(monkeypatch):
    """The plan is chosen before vmap folds its axis into the batch, so the call is asked about once more."""
    too_many = lambda call, config: ["too many rows"] * (len(call["query"]) > 4)  # noqa: E731
    monkeypatch.setattr(xla.IMPLEMENTATION, "unsupported_config", too_many)
    many = jnp.ones((8, 1, 24, 2, 16))
    flash_attention(many[:4, 0], many[:4, 0], many[:4, 0])
    with pytest.raises(NotImplementedError, match=r"batch of 8 that vmap makes, too many rows.*lax\.map"):
        jax.vmap(flash_attention)(many, many, many)


def test_a_time_says_nothing_about_configs(users):
    compared(32, 1.0, 2.0).save(users)
    assert chosen() == (DEFAULT, "default")


def test_a_platform_of_another_version_is_passed_over(users):
    (compared(32, 3.0, 2.0) | TunedConfigs().add("flash_attention", BUCKET, "abacus", None, 1.0)).save(users)
    assert explain(flash_attention, Q, Q, Q).platform == "xla"


def test_a_damaged_users_file_warns_and_defaults_serve(users):
    users.parent.mkdir(parents=True)
    users.write_text("{")
    with pytest.warns(UserWarning, match="unreadable .*defaults are used"):
        assert chosen()[1] == "default"
    assert chosen()[1] == "default" and users.with_name("cpu.json.damaged").exists()


def test_where_files_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "")
    assert user_file("cpu").is_absolute()
    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    assert "ejkernel" in user_file("nvidia_h200").parts and user_file("nvidia_h200").name == "nvidia_h200.json"
    assert shipped_file("sm_90").parts[-4:] == ("data", "tuned", "sm_90", "tuned.json")
    assert shipped_file("cpu").is_relative_to(json_root())


def json_root():
    from pathlib import Path

    return Path(ejkernel.__file__).parent


def test_shipped_files_are_readable():
    for path in (json_root() / "data" / "tuned").glob("*/*.json"):
        assert json.loads(path.read_text())["schema"] == 1, path
        TunedConfigs.load(path)


def test_a_config_for_blocksparse():
    blocks = np.ones((2, 2), bool)
    told = explain(blocksparse_attention, Q, Q, Q, block_mask=blocks, block_size=16, cfg={"block_q": 16})
    assert told.config == xla.Config(block_q=16)


def test_a_platform_an_operation_never_has_says_so():
    q = jnp.ones((1, 1, 2, 8))
    told = explain(ejkernel.modules.page_attention, q, q, q, jnp.ones(1, jnp.int32), jnp.zeros((1, 1), jnp.int32))
    assert told.refusals["cudnn"] == ["page_attention has no cudnn implementation"]

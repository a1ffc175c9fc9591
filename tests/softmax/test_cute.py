"""FlashAttention-4 through fa4-jax, on a machine that has neither it nor a GPU: what it refuses, and what it is given.

Its numbers are checked on a GPU, by the cases that every platform runs.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax import cute
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Call, Target, deterministic
from ejkernel.ops.dispatch import choose, run_locally
from ejkernel.types import BlockPattern, MaskInfo

HOPPER = Target("gpu", "nvidia_h200", "sm_90")
T = 48


def call(B=1, T=T, S=None, H=4, Hkv=2, D=64, Dv=None, dtype="bfloat16", arch="sm_90", **options):
    S = T if S is None else S
    q, k, v = (jnp.ones(shape, dtype) for shape in ((B, T, H, D), (B, S, Hkv, D), (B, S, Hkv, Dv or D)))
    return canonicalise(q, k, v, **options).on(Target("gpu", arch, arch))


TAKEN = {
    "full": {},
    "causal": {"causal": True},
    "causal-T<S": {"T": 20, "S": 70, "causal": True},
    "full-T>S": {"T": 70, "S": 20},
    "window": {"sliding_window": (20, 3)},
    "window-open": {"sliding_window": (None, 3)},
    "head_dim-256": {"D": 256, "dtype": "float16"},
    "head_dim-of-values": {"D": 192, "Dv": 128},
    "packed": {"cum_seqlens_q": np.array([0, 10, 40]), "causal": True, "sliding_window": 9},
    "packed-cross": {"cum_seqlens_q": np.array([0, 10, 40]), "cum_seqlens_k": np.array([0, 20, 48]), "causal": True},
    "ampere": {"arch": "sm_80", "D": 256},
    "blackwell": {"arch": "sm_100", "D": 128},
}


@pytest.mark.parametrize("name", TAKEN)
def test_takes(name):
    assert cute.unsupported(call(**TAKEN[name])) == []


def segments():
    return MaskInfo.from_segments(jnp.zeros((1, T), jnp.int32))


REFUSED = {
    "dtype float32: only bfloat16 and float16": {"dtype": "float32"},
    "compute capability 7.5: only 8.x, 9.x, 10.x and 12.x": {"arch": "sm_75"},
    "head_dim 36: only multiples of 8 up to 256": {"D": 36, "Dv": 40},
    "value head_dim 264: only multiples of 8 up to 256": {"Dv": 264},
    "value head_dim 72 above twice 32 on 12.x": {"D": 32, "Dv": 72, "arch": "sm_120"},
    "band (None, -3): it must hold the query's own position": {
        "S": 60,
        "mask_info": lambda: MaskInfo(T, 60).apply_causal(-3),
    },
    "queries that see no key, T=48 S=20": {"S": 20, "causal": True},
    "keys that no query sees, T=48 S=90": {"S": 90, "sliding_window": (20, 3)},
    "softmax_scale -0.5: only above 0": {"softmax_scale": -0.5},
    "a gradient of lse": {"return_lse": True},
    "chunks": {"mask_info": lambda: MaskInfo(T, T).apply_chunked(16)},
    "soft cap": {"logits_soft_cap": 30.0},
    "dropout": {"dropout_prob": 0.1, "dropout_seed": 0},
    "logits_dtype bfloat16": {"logits_dtype": "bfloat16"},
    "bias": {"bias": jnp.ones((1, 4, T, T))},
    "sinks": {"softmax_aux": jnp.ones(4)},
    "segments and lengths, unless given as cum_seqlens": {"mask_info": segments},
    "dense masks": {"mask_info": lambda: MaskInfo.from_attention_mask(jnp.ones((1, 1, T, T), bool))},
    "block patterns": {
        "mask_info": lambda: MaskInfo.from_block_pattern(BlockPattern.sliding_blocks(3, 1, block_size=16), q_len=T)
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses(reason):
    options = {name: option() if callable(option) else option for name, option in REFUSED[reason].items()}
    assert cute.unsupported(call(**options)) == [reason]


def test_a_mask_beside_the_offsets_is_not_dropped():
    """They no longer say everything."""
    both = call(cum_seqlens_q=np.array([0, 10, 40]), mask_info=segments())
    assert "q_offsets" not in both and cute.unsupported(both)[0].startswith("segments and lengths")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "fa4_jax", None)
    told = r"cute: the package fa4_jax is not installed .*'ejkernel-attention\[fa4\]'"
    with pytest.raises(NotImplementedError, match=told):
        run_locally(FLASH_ATTENTION, call(), "cute", None)
    _, told = choose(FLASH_ATTENTION, call(), None, None)
    assert told.platform not in (None, "cute") and "ejkernel-attention[fa4]" in told.refusals["cute"][0]


@pytest.mark.parametrize("cum_k", [None, [0, 30, 30, 45]], ids=["self", "cross"])
def test_packed_sequences_of_all_rows(cum_k):
    """Past a row's last offset: queries of a sequence without keys, then keys of one without queries."""
    cum_q, S = [0, 10, 10, 40], 50 if cum_k else T
    keys = {} if cum_k is None else {"cum_seqlens_k": np.array(cum_k)}
    one = call(S=S, cum_seqlens_q=np.array(cum_q), **keys)
    tokens = ("query", "key", "value")
    two = Call(one.spec, {n: jnp.concatenate([x, x]) if n in tokens else x for n, x in one.arrays.items()}, one.target)
    starts_q, starts_k, sizes_q, sizes_k = (np.asarray(x) for x in cute._lengths(two))
    cum_k = cum_k or cum_q
    np.testing.assert_array_equal(starts_q, [*cum_q, T, *(T + np.array(cum_q)), 2 * T, 2 * T])
    np.testing.assert_array_equal(starts_k, [*cum_k, cum_k[-1], *(S + np.array(cum_k)), S + cum_k[-1], 2 * S])
    for starts, sizes in ((starts_q, sizes_q), (starts_k, sizes_k)):
        np.testing.assert_array_equal(sizes, np.diff(starts))
    beyond = [[8, 0, 8, 0], [0, S - cum_k[-1], 0, S - cum_k[-1]]]
    np.testing.assert_array_equal([sizes[[3, 4, 8, 9]] for sizes in (sizes_q, sizes_k)], beyond)


def test_an_example_of_packed_sequences_is_one_of_all_tokens():
    """Its offsets say what its segments say."""
    keys = np.array([0, 20, 48])
    arrays = FLASH_ATTENTION.example(call(cum_seqlens_q=np.array([0, 10, 40]), cum_seqlens_k=keys, S=60))
    np.testing.assert_array_equal(arrays["q_offsets"], [[0, T, T]])
    np.testing.assert_array_equal(arrays["kv_offsets"], [[0, 60, 60]])
    assert not arrays["q_segments"].any() and not arrays["kv_segments"].any()


def test_auto_trains_on_it_unless_the_same_bits_are_asked_for(monkeypatch):
    """Of two-sided windows, which cuDNN has not; it would load its package only to run."""
    monkeypatch.setitem(sys.modules, "fa4_jax", ModuleType("fa4_jax"))
    monkeypatch.setattr(sys.modules["fa4_jax"], "__spec__", ModuleSpec("fa4_jax", None))
    ampere = call(arch="sm_80", sliding_window=(20, 3))  # nothing is measured: the first that can
    plan, told = choose(FLASH_ATTENTION, ampere, None, None)
    assert plan is not None and plan.implementation is cute.IMPLEMENTATION and plan.gradient is None
    with deterministic():
        _, told = choose(FLASH_ATTENTION, ampere, None, None)
    assert told.platform == "cute" and told.gradient is not None and told.gradient.platform not in (None, "cute")
    assert "not cute for the gradient: its gradients differ between runs" in str(told)

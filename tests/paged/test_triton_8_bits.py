"""How the Triton decode kernel keeps up with a cache of 8 bits: numbers read in pairs, warps with their own keys."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ejkernel.kernels.paged.triton import Config, tiles
from harness.paged import MIXED, MIXED_LENGTHS, Case, check_case
from harness.platforms import Platform

INTERPRETED = Platform("triton", interpreted=True)
HALF = {"dtype": "bfloat16"}

CASES = (
    Case("e5m2-40-24", cache="float8_e5m2", D=40, Dv=24, scales=True, **HALF),
    Case("e4m3-33", cache="float8_e4m3fn", D=33, lengths=(20, 3), **HALF),
    Case("int8-40-17", cache="int8", D=40, Dv=17, lengths=(20, 3), options={"softmax_scale": 0.01}, **HALF),
    Case("e4m3-float32", cache="float8_e4m3fn", lengths=(20, 3), sinks=1, options={"sliding_window": 9}),
    Case("e5m2-tokens-splits", cache="float8_e5m2", queries=2, lengths=(40, 9), L=4, options={"num_splits": 3}, **HALF),
    Case("int8-ragged", cache="int8", kind="ragged", queries=MIXED, lengths=MIXED_LENGTHS, scales=True,
         options={"softmax_scale": 0.01}, **HALF),
    Case("e5m2-ragged-24-float32", cache="float8_e5m2", kind="ragged", queries=(9, 1), lengths=(20, 17), D=24),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case):
    check_case(case, INTERPRETED)


# sinks, windows, a first group without keys, rows that see different keys, splits, pages smaller than a group
APART = (
    Case("sinks-window", sinks=1, options={"sliding_window": 9}, **HALF),
    Case("tokens", queries=3, lengths=(70, 3, 64), options={"sliding_window": (40, 0)}, **HALF),
    Case("splits-40-24", D=40, Dv=24, lengths=(300, 5), L=4, options={"num_splits": 3, "logits_soft_cap": 3.0}),
    Case("contiguous", kind="contiguous", lengths=(37, 20, 64), starts=(33, 20, 63), **HALF),
)


@pytest.mark.parametrize("case", APART, ids=lambda case: case.id)
def test_independent_warps(case):
    check_case(case, INTERPRETED, cfg={"decode_keys": 64, "decode_warps": 4, "decode_independent_warps": True})


def test_independent_warps_need_keys():
    with pytest.raises(ValueError, match="decode_independent_warps needs 16 keys for each warp, not 32 for 4"):
        Config(decode_keys=32, decode_warps=4, decode_independent_warps=True)


class Ptx:
    """Registers of 32 bits, and the few instructions the conversions are made of, on arrays."""

    def __init__(self, word: np.ndarray):
        self.registers: dict[str, Any] = {"$2": word}

    def read(self, name: str) -> Any:
        return self.registers[name] if name in self.registers else np.uint32(int(name, 0))

    def run(self, code: str) -> tuple[Any, Any]:
        for line in re.findall(r"^\s*([a-z].*);", code, re.MULTILINE):
            name, operands = line.split(maxsplit=1)
            target, *sources = re.findall(r"\{.*\}|[^,\s]+", operands)
            result = getattr(self, name.split(".")[0])(name, *map(self.read, sources))
            names = re.findall(r"[$\w]+", target)
            self.registers |= dict(zip(names, np.atleast_2d(result), strict=True))
        return self.registers["$0"].view(np.float16), self.registers["$1"].view(np.float16)

    def mov(self, name, a):
        return (a & 0xFFFF, a >> 16) if np.ndim(a) else a

    def xor(self, name, a, b):
        return a ^ b

    def sub(self, name, a, b):
        return (a.view(np.float16) - np.resize(b.view(np.float16), 2 * len(a))).view(np.uint32)

    def prmt(self, name, a, b, selector):
        either = a.astype(np.uint64) | (np.uint64(b) << np.uint64(32))
        chosen = [(either >> np.uint64(8 * (int(selector) >> 4 * i & 7)) & np.uint64(255)) for i in range(4)]
        return np.sum([byte << np.uint64(8 * i) for i, byte in enumerate(chosen)], 0).astype(np.uint32)

    def cvt(self, name, a):
        assert name == "cvt.rn.f16x2.e4m3x2"
        return a.astype(np.uint16).view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint32)


setattr(Ptx, "and", lambda self, name, a, b: a & b)


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        (tiles.FROM_E4M3, ml_dtypes.float8_e4m3fn),
        (tiles.FROM_E5M2, ml_dtypes.float8_e5m2),
        (tiles.FROM_INT8, np.int8),
    ],
    ids=["e4m3", "e5m2", "int8"],
)
def test_conversions(code, dtype):
    """Every byte in every position of a register."""
    pairs = np.arange(1 << 16, dtype=np.uint16)
    pairs = np.stack([pairs, pairs[::-1] ^ 0x5A5A], 1).copy()
    numbers = pairs.view(dtype).reshape(-1, 2).astype(np.float16)
    low, high = Ptx(pairs.view(np.uint32)[:, 0]).run(code.value)
    np.testing.assert_array_equal(low, numbers[:, 0])
    np.testing.assert_array_equal(high, numbers[:, 1])

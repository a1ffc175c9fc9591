"""Mask and score functions of a call on tensors: as they are bound to it, and their values in PyTorch."""

import hashlib
import operator
import pickle
from collections.abc import Callable, Mapping
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ejkernel.expressions.binding import Binder, Rule, Sizes
from ejkernel.expressions.evaluation import Namespace
from ejkernel.expressions.nodes import BOOL, FLOAT, INT, LOOKUP, OPERAND, Expression, nodes
from ejkernel.kernels.common.rules import Rules
from ejkernel.kernels.common.triton_rules import NAMES, Layouts, flat_operands
from ejkernel.kernels.softmax.rules import bound_by
from ejkernel.kernels.softmax.spec import Band
from ejkernel.types.recognition import band_of, conditions

_DTYPES = {BOOL: torch.bool, INT: torch.int32, FLOAT: torch.float32}


def _not_zero(y: Tensor) -> Tensor:
    """A divisor: by 0 kernels give anything, and PyTorch raises."""
    return torch.where(y == 0, 1, y)


_TORCH: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in (
        "add", "sub", "mul", "div", "neg", "abs", "sign", "floor", "ceil", "exp", "exp2", "log", "log1p", "expm1",
        "tanh", "sigmoid", "sin", "cos", "sqrt", "rsqrt", "pow", "lt", "le", "gt", "ge", "eq", "ne",
    )
} | {
    "floordiv": lambda x, y: torch.floor_divide(x, _not_zero(y)),
    "mod": lambda x, y: torch.remainder(x, _not_zero(y)),
    "quotient": lambda x, y: torch.div(x, _not_zero(y), rounding_mode="trunc"),
    "rem": lambda x, y: torch.fmod(x, _not_zero(y)),
    "max": torch.maximum,
    "min": torch.minimum,
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "select": torch.where,
    "stop": Tensor.detach,
}  # fmt: skip
TORCH = Namespace(
    operations=_TORCH,
    constant=lambda x, node: torch.tensor(x, dtype=_DTYPES[node.dtype]),
    cast=lambda x, node: x.to(_DTYPES[node.dtype]),
    stop=Tensor.detach,
)


class _TensorBinder(Binder):
    """Hoists in PyTorch, whose autograd has the gradients of what is read."""

    xp = torch
    namespace = TORCH

    def __init__(self, sizes: Sizes, device: torch.device):
        super().__init__(sizes)
        self.device = device
        self._numbers: dict[int, Tensor] = {}

    def converted(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(_DTYPES[dtype])

    def numbers(self, n: int) -> Tensor:
        if n not in self._numbers:
            self._numbers[n] = torch.arange(n, dtype=torch.int32, device=self.device)
        return self._numbers[n]

    def leading(self, expression: Expression | None) -> tuple[bool, bool]:
        """Whether the operands of an expression differ from batch row to batch row, and from head to head."""
        read: list[Any] = []
        pools = {key: list(pool.values()) for key, pool in self.operands.items()}
        for node in nodes(expression):
            if node.name == OPERAND:
                kind, number = node.data
                read.append(pools[node.dtype, kind][number])
            elif node.name == LOOKUP:
                read += pools[node.dtype, "table"]
        return any(x.shape[0] > 1 for x in read), any(x.shape[1] > 1 for x in read)


class Functions(NamedTuple):
    """What is static about the functions of a call. An operation is told of them by a key: `Functions.known(key)`.

    Attributes:
        layouts: where operands lie in the tensors of them.
        by_batch, by_head: whether the mask differs between batch rows, and between heads.
    """

    rules: Rules = Rules()
    layouts: Layouts = Layouts()
    by_batch: bool = False
    by_head: bool = False

    @classmethod
    def known(cls, key: str) -> "Functions":
        try:
            return _KNOWN[key]
        except KeyError:
            raise ValueError(f"mask and score functions {key} are not known in this process") from None

    def operands(self, tensors: Mapping[str, Any], T: int, S: int) -> dict[str, Any]:
        """The operands among the tensors of a call as `OPERAND_ARRAYS` has them: views."""
        parts = {}
        for dtype, layout in zip(("int", "float"), self.layouts, strict=True):
            if (flat := tensors.get(f"{dtype}s")) is None:
                continue
            start: int = 0
            for kind, number, length in zip(NAMES, layout, (1, T, S), strict=False):
                if number:
                    part = flat[:, :, start : start + int(number) * int(length)]
                    parts[f"{dtype}_{kind}"] = part if kind == "scalars" else part.unflatten(2, (number, length))
                start += int(number) * int(length)
            if start < flat.shape[2]:
                parts[f"{dtype}_tables"] = flat[:, :, start:]
        return parts


_KNOWN: dict[str, Functions] = {"": Functions()}


@cache
def _key(functions: Functions) -> str:
    key = hashlib.sha256(pickle.dumps(functions)).hexdigest()[:16]
    _KNOWN[key] = functions
    return key


class Bound(NamedTuple):
    """The key of the functions of a call, and their operands (B|1, H|1, n)."""

    key: str = ""
    ints: Tensor | None = None
    floats: Tensor | None = None


def bound(mask: Rule | None, scores: Rule | None, sizes: Sizes, device: torch.device) -> Bound:
    """The functions of a call; floats have gradients."""
    binder = _TensorBinder(sizes, device)
    rules = bound_by(binder, mask, scores)
    if rules == Rules():
        return Bound()
    layouts, flat = flat_operands(binder.arrays(), torch)
    functions = Functions(rules, layouts, *binder.leading(rules.mask))
    return Bound(_key(functions), flat["p_ints"], flat["p_floats"])


def without_bands(rule: Rule | None, offset: int) -> tuple[Band, Rule | None]:
    """The band among the conditions of a mask rule, for ends `offset` apart, and what is left of it."""
    band, rest = Band(), []
    for term in conditions(rule.expression) if rule else []:
        limits = band_of(term)
        if limits is None:
            rest.append(term)
        else:
            band &= Band(*(None if x is None else x - offset for x in limits))
    return band, Rule(reduce(operator.and_, rest), rule.arrays) if rule and rest else None

"""What a call would run, and why the other platforms would not."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from ejkernel.ops.target import Target, assumed, named_target

_EXPLAINING: ContextVar[bool] = ContextVar("ejkernel_explaining", default=False)


@dataclass(frozen=True)
class Explanation:
    """What would run, with which config, and why the other platforms would not.

    `gradient` says the same of its gradient, where that is another platform's or one was passed over for it.
    `parts` are the explanations of the calls that a function makes, where it makes several.
    `remark` is what the implementation says of its config.
    """

    operation: str
    target: Target
    platform: str | None
    config: Any
    config_source: str | None
    reason: str
    refusals: dict[str, list[str]]
    gradient: "Explanation | None" = None
    parts: "tuple[Explanation, ...]" = ()
    remark: str = ""

    @property
    def avoided(self) -> dict[str, list[str]]:
        """Platforms that could do the call, and why they are not taken for its gradient."""
        refused = {} if self.gradient is None else self.gradient.refusals
        return {platform: reasons for platform, reasons in refused.items() if platform not in self.refusals}

    def __str__(self) -> str:
        lines = [f"{self.operation} on {self.target.kind}: {self.platform or 'nothing can run this'} ({self.reason})"]
        if self.parts:
            return "\n".join([*lines, *(f"  {line}" for part in self.parts for line in str(part).splitlines())])
        if self.config is not None:
            lines.append(f"  config: {self.config} (from {self.config_source})")
        if self.remark:
            lines.append(f"  {self.remark}")
        if (other := self.gradient) is not None:
            lines.append(f"  its gradient: {other.platform or 'none'} ({other.reason})")
            if other.platform is not None:
                lines.append(f"  config: {other.config} (from {other.config_source})")
        for platform, reasons in self.refusals.items():
            lines += [f"  not {platform}: {reason}" for reason in reasons]
        lines += [f"  not {p} for the gradient: {reason}" for p, reasons in self.avoided.items() for reason in reasons]
        return "\n".join(lines)

    __repr__ = __str__


def combined(operation: str, parts: list[Explanation]) -> Explanation:
    """The explanation of a function that makes several calls."""
    platforms = [part.platform for part in parts]
    able = None not in platforms
    names = " and ".join(dict.fromkeys(str(p) for p in platforms)) if able else None
    refused = {p: reasons for part in parts for p, reasons in part.refusals.items()}
    return Explanation(
        operation,
        parts[0].target,
        names,
        tuple(part.config for part in parts),
        " and ".join(dict.fromkeys(str(part.config_source) for part in parts)),
        f"{len(parts)} calls",
        refused,
        parts=tuple(parts),
    )


class Explained(Exception):
    """Ends the tracing of a function as soon as it is known what it would run."""

    def __init__(self, explanation: Explanation):
        self.explanation = explanation


def explaining() -> bool:
    """Whether calls are to be explained, not run."""
    return _EXPLAINING.get()


def answer(explanation: Explanation) -> NoReturn:
    raise Explained(explanation)


def explain(function: Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> Explanation:
    """What a call of a public function would run: platform, config, and every other platform's refusal.

    Nothing is computed; arrays may be `jax.ShapeDtypeStruct`s. `device`, such as "h200" or "v6e", asks about a device
    that need not be here; packages that its platforms need must be.

    >>> import jax
    >>> from ejkernel import explain
    >>> from ejkernel.modules import flash_attention
    >>> q = jax.ShapeDtypeStruct((1, 128, 8, 64), "float32")
    >>> explain(flash_attention, q, q, q, causal=True).platform
    'xla'
    >>> explain(flash_attention, q, q, q, causal=True, device="v6e").platform
    'pallas'
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]

    def traced(structs: list[Any]) -> None:
        given = iter(structs)
        merged = [next(given) if is_struct else leaf for leaf, is_struct in zip(leaves, dynamic, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, merged)
        function(*args, **kwargs)

    token = _EXPLAINING.set(True)
    try:
        with assumed(None if device is None else named_target(device)):
            jax.eval_shape(traced, [leaf for leaf, is_struct in zip(leaves, dynamic, strict=True) if is_struct])
    except Explained as found:
        return found.explanation
    finally:
        _EXPLAINING.reset(token)
    raise TypeError(f"{getattr(function, '__name__', function)} is not an operation of ejkernel")

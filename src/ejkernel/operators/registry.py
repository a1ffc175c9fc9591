"""Attention operators by name."""

from typing import TypeVar

from ejkernel.checks.names import unknown
from ejkernel.operators.impl import AttentionImpl
from ejkernel.operators.metadata import AttentionMetadata

Operator = TypeVar("Operator", bound=type[AttentionImpl])


class AttentionRegistry:
    """The operators there are. A class joins under every name that its `get_impl_name` gives.

    >>> from ejkernel.operators import AttentionMetadata, AttentionRegistry
    >>> AttentionRegistry.create("flash_attn2", AttentionMetadata(softmax_scale=0.125))
    FlashAttn('flash_attn2')
    >>> AttentionRegistry.get("flash_attn")
    Traceback (most recent call last):
        ...
    ValueError: unknown attention 'flash_attn'; did you mean 'flash_attn2'? known: ...
    """

    _operators: dict[str, type[AttentionImpl]] = {}  # noqa: RUF012

    @classmethod
    def register(cls, operator: Operator) -> Operator:
        """Make a class known, as its decorator."""
        for name in operator.impl_names():
            if cls._operators.get(name, operator) is not operator:
                raise ValueError(f"attention {name!r} is {cls._operators[name].__name__} already")
            cls._operators[name] = operator
        return operator

    @classmethod
    def get(cls, name: str) -> type[AttentionImpl]:
        """The class of that name."""
        if name not in cls._operators:
            raise ValueError(unknown("attention", name, cls.list_implementations()))
        return cls._operators[name]

    @classmethod
    def create(cls, name: str, metadata: AttentionMetadata) -> AttentionImpl:
        """An operator of the class of that name."""
        return cls.get(name)(metadata)

    @classmethod
    def list_implementations(cls) -> list[str]:
        """Every name, sorted."""
        return sorted(cls._operators)

"""How calls are described in words: the options of `ejkernel explain` and `tune`, and what families make of them."""

from typing import Annotated, Any, NamedTuple

import jax

DTYPES = ("float32", "bfloat16", "float16")


class Option(NamedTuple):
    """In the annotation of an argument of `Family.arguments`: its help on the command line, and its least value."""

    help: str = ""
    least: int | None = None


Size = Annotated[int, Option(least=1)]
Dtype = Annotated[str, Option(f"One of {', '.join(DTYPES)}.")]
Window = Annotated[str | None, Option("A number, or left,right.")]


def struct(dtype: str, *shape: int) -> Any:
    """An array on its shape alone, of a dtype that somebody typed."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    return jax.ShapeDtypeStruct(shape, dtype)


def check_documents(documents: int, length: int) -> None:
    """Each has a token at least."""
    if documents > length:
        raise ValueError(f"documents={documents} do not fit into length={length}: each has at least one token")


def parsed_window(text: str | None) -> int | tuple[int | None, int | None] | None:
    """`"64"`, or `"64,0"` for (left, right), where an empty side is unbounded.

    >>> parsed_window("64"), parsed_window("64,"), parsed_window("8,0")
    (64, (64, None), (8, 0))
    """
    if text is None:
        return None
    try:
        sides = [int(side) if side.strip() else None for side in text.split(",")]
    except ValueError:
        sides = []
    match sides:
        case [int(both)]:
            return both
        case [left, right]:
            return left, right
    raise ValueError(f"window {text!r} must be a number or left,right")

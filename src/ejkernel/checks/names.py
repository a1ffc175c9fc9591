"""Names in errors: unknown ones, and arguments under the names that a caller has for them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches

# argument names that are also English words: they are arguments where one of these follows
_ENGLISH = {"query", "key", "value"}
_FOLLOWS = r"(?= \(| has| have| must| is| heads| and)"


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The message of an error, with the nearest of the names there are.

    >>> unknown("operation", "flash_atention", ["flash_attention", "mean_pooling"])
    "unknown operation 'flash_atention'; did you mean 'flash_attention'? known: flash_attention, mean_pooling"
    """
    names = list(known)
    close = get_close_matches(str(name).lower(), names, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {what} {name!r}; {hint}known: {', '.join(names)}"


@contextmanager
def errors_as_called(names: Mapping[str, str], caller: str | None = None) -> Iterator[None]:
    """Errors raised inside call an argument what the outer function calls it, and begin with `caller`.

    For functions that hand their arguments to others which name them otherwise. `names` maps the inner names to the
    outer ones. Errors of JAX's own classes pass as they are.

    >>> with errors_as_called({"query": "q", "softmax_scale": "scale"}, "FlashAttn"):
    ...     raise ValueError("query (3, 4) must have 4 dimensions; a query has softmax_scale=2")
    Traceback (most recent call last):
        ...
    ValueError: FlashAttn: q (3, 4) must have 4 dimensions; a q has scale=2
    """
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        own = type(error) in (TypeError, ValueError, NotImplementedError)
        if own and len(error.args) == 1 and isinstance(error.args[0], str):
            message = renamed(error.args[0], names)
            error.args = (message if caller is None or caller in message else f"{caller}: {message}",)
        raise


def renamed(message: str, names: Mapping[str, str]) -> str:
    """The message of an error with other names of arguments in it."""
    if not names:
        return message
    words = "|".join(rf"{name}{_FOLLOWS if name in _ENGLISH else ''}" for name in names)
    return re.sub(rf"(?<![\w.])(?:{words})\b", lambda match: names[match.group()], message)

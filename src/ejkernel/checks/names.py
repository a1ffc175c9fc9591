"""What is said of a name that nobody knows."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The message of an error, with the nearest of the names there are.

    >>> unknown("operation", "flash_atention", ["flash_attention", "mean_pooling"])
    "unknown operation 'flash_atention'; did you mean 'flash_attention'? known: flash_attention, mean_pooling"
    """
    names = list(known)
    close = get_close_matches(str(name).lower(), names, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {what} {name!r}; {hint}known: {', '.join(names)}"

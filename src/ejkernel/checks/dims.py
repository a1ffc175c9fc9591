"""The dimension glossary: what the one-letter names in shapes mean, everywhere in the library."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

DIMS: Mapping[str, str] = MappingProxyType(
    {
        "B": "batch",
        "T": "query length (tokens)",
        "S": "key and value length (tokens)",
        "H": "query heads",
        "Hkv": "key and value heads",
        "G": "query heads per key head, H // Hkv",
        "D": "head dimension of query and key",
        "Dv": "head dimension of value and output",
        "N": "packed sequences",
        "P": "pages of a key-value cache",
    }
)


def format_shape(dims: str, shape: Sequence[int]) -> str:
    """Write a shape with its dimension names, for error messages.

    >>> format_shape("B T H D", (2, 128, 8, 64))
    '(B=2, T=128, H=8, D=64)'
    >>> format_shape("B T H D", (128, 8, 64))
    '(128, 8, 64), expected (B, T, H, D)'
    """
    names = dims.split()
    if len(names) != len(shape):
        return f"{tuple(shape)}, expected ({', '.join(names)})"
    return "(" + ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True)) + ")"

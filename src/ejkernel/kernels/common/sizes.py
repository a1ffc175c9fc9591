"""Sizes that kernels round to."""

from collections.abc import Iterable

from ejkernel.ops.tuned_files import EXACT_SIZES


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is neither below n nor below `least`, itself one."""
    return max(least, 1 << (n - 1).bit_length())


def ceil_div(n: int, size: int) -> int:
    """How many of a size hold n."""
    return -(-n // size)


def rounded_sizes(sizes: Iterable[tuple[str, int]]) -> str:
    """Sizes by letter, as a shape bucket names them: to powers of two, but for those that are compared exactly.

    >>> rounded_sizes([("T", 1000), ("D", 80), ("V", 96)])
    'T1024-D80-V96'
    """
    return "-".join(f"{name}{size if name in EXACT_SIZES else power_of_two(size)}" for name, size in sizes)

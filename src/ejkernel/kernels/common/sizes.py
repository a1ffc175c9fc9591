"""Sizes that kernels round to."""


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is neither below n nor below `least`, itself one."""
    return max(least, 1 << (n - 1).bit_length())

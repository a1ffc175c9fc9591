"""What a family of kernels says of itself to the command line and the benchmarks, which know no family by name.

The package of a family has a module `family` with a `FAMILY`; `ejkernel.kernels.FAMILIES` lists the packages.
"""

from ejkernel.family.accuracy import FLOOR, Error, Truth
from ejkernel.family.description import Arrays, Check, Family, PublicFunction, Roofline, TypicalCall, load_family
from ejkernel.family.options import DTYPES, Dtype, Option, Size, Window, check_documents, parsed_window, struct

__all__ = [
    "DTYPES",
    "FLOOR",
    "Arrays",
    "Check",
    "Dtype",
    "Error",
    "Family",
    "Option",
    "PublicFunction",
    "Roofline",
    "Size",
    "Truth",
    "TypicalCall",
    "Window",
    "check_documents",
    "load_family",
    "parsed_window",
    "struct",
]

"""What a family says about itself to the command line and the benchmarks, which know no family by name.

The package of a family has a module `about` with a `FAMILY`; `ejkernel.kernels.FAMILIES` lists the packages.
"""

"""The kernel families: one folder each, with the definition, the kernels and the limits of an idea."""

# one line here and a folder are all that a family needs; in the order they are shown
FAMILIES = (
    "ejkernel.kernels.softmax",
    "ejkernel.kernels.paged",
    "ejkernel.kernels.linear",
    "ejkernel.kernels.native_sparse",
    "ejkernel.kernels.pooling",
    "ejkernel.kernels.ring",
)

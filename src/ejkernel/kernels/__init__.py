"""The kernel families: one folder each, with the definition, the kernels and the limits of an idea."""

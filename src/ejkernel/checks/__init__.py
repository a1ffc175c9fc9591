"""Checks of what callers give: static options, arrays, and their values. They import no other package of ours."""

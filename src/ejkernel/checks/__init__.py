"""Checks of what callers give: static options, arrays, and the values in them. They need no other room."""

"""Masks, block patterns and the dimension glossary."""

from .dims import DIMS, format_shape
from .mask import MaskInfo
from .pattern import BlockPattern

__all__ = ["DIMS", "BlockPattern", "MaskInfo", "format_shape"]

"""Softmax attention: one tile loop over a block schedule."""

"""Ragged queries against pages of keys and values."""

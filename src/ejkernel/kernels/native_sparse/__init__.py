"""Attention over key blocks that each query selects, and what chooses them."""

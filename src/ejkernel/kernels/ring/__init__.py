"""Softmax attention over split sequences: keys travel, heads are exchanged for tokens, or keys are gathered."""

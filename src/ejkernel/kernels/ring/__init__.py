"""Softmax attention over split sequences: keys travel, heads change places with tokens, or keys are gathered."""

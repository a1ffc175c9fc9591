"""Masks and scores as expressions over batch, head, query and key: made from functions, bounded, differentiated."""

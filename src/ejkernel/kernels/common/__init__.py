"""Tiles shared by the families."""

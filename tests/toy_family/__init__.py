"""A family of its own folder: a decayed sum along a sequence, with a state in and out."""

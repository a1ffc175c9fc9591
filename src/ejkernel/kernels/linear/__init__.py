"""Linear attention: a state that decays and grows by one outer product a token."""

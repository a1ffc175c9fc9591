"""Mean pooling: means over chunks of tokens, of whole sequences or of packed ones."""

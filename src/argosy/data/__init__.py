"""Token shards from text, the order of samples, and the rows of a step. NumPy only: this room has no torch."""

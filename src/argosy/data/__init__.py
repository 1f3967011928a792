"""Text in, token shards out; which sample comes when; the rows of a step. NumPy only: no torch in this room."""

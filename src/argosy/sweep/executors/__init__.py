"""Places where trials run: a file for each."""

"""A sink whose package is broken."""

raise ImportError("a library of it is missing")

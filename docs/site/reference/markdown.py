"""Texts of the code as Markdown."""

from __future__ import annotations

import re


def keys_table(rows: list[str]) -> str:
    """Return a table, the first two rows its head, which a phone shows as a list; nothing if it has no other row."""
    return '<div class="keys" markdown>\n\n' + "\n".join(rows) + "\n\n</div>" if len(rows) > 2 else ""


def escaped(text: str) -> str:
    """Return a text of the code in one line, in which only backticks mean something to Markdown."""
    pieces = " ".join(text.split()).split("`")
    if len(pieces) % 2 == 0:
        pieces = [" ".join(pieces)]
    pieces[::2] = [re.sub(r"([*_\\[\]|])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)

"""TOML text with the line of each key.

`tomllib` reads values and tells no positions, and neither `tomli` nor `tomlkit` does: so the text is cut into
its statements (a header, or one key and its value), each read by `tomllib` itself.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argosy.config.keys import Key
from argosy.errors import UserError


def read_toml(path: Path) -> tuple[dict[str, Any], dict[Key, int]]:
    """What the file says, and the line (from 1) of each of its keys and tables.

    Raises: UserError if the file cannot be read, is not UTF-8 or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file (byte {error.start} is not UTF-8).") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    try:
        return tomllib.loads(text), key_lines(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(_syntax_error(path, text, str(error))) from None


def key_lines(text: str) -> dict[Key, int]:
    """The line (from 1) of each key and table in valid TOML; an element of a list is a key with an index."""
    found: dict[Key, int] = {}
    table: Key = ()
    elements: dict[Key, int] = {}
    for line, source, content in _statements(text):
        if source.startswith("["):
            name = next(iter(_keys_in(content, innermost=True)))
            if source.startswith("[["):
                elements[name] = elements.get(name, -1) + 1
            table = _with_indices(name, elements)
            found.setdefault(table, line)
        else:
            found |= {table + key: line for key in _keys_in(content)}
    return found


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line, text, meaning) of each statement: the fewest lines from there on that are TOML."""
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        for end in range(start + 1, len(lines) + 1):
            source = "\n".join(lines[start:end])
            try:
                content = tomllib.loads(source)
            except tomllib.TOMLDecodeError:
                continue
            if content:
                yield start + 1, source.strip(), content
            break
        start = end


def _keys_in(content: dict[str, Any], above: Key = (), innermost: bool = False) -> Iterator[Key]:
    for name, value in content.items():
        key = (*above, name)
        leaf = not isinstance(value, dict) or not value
        if leaf or not innermost:
            yield key
        if not leaf:
            yield from _keys_in(value, key, innermost)


def _with_indices(name: Key, elements: dict[Key, int]) -> Key:
    """A header's name speaks of the newest element of each list of tables on its way."""
    key: Key = ()
    for depth in range(1, len(name) + 1):
        key += (name[depth - 1],)
        if name[:depth] in elements:
            key += (elements[name[:depth]],)
    return key


def _syntax_error(path: Path, text: str, message: str) -> str:
    lines = text.split("\n")
    what, _, place = message.partition(" (at ")
    numbers = [int(n) for n in re.findall(r"\d+", place)]
    line, column = numbers if len(numbers) == 2 else (len(lines), len(lines[-1]) + 1)
    hint = "\n  Text needs quotes, and a list [brackets]." if what == "Invalid value" else ""
    return f"{path}:{line}:{column}: {what}.\n    {lines[line - 1]}\n    {' ' * (column - 1)}^{hint}"

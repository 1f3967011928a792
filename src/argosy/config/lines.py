"""TOML text with the line of each key.

`tomllib` reads values and tells no positions, and neither `tomli` nor `tomlkit` does: so the text is cut into
its statements (a header, or one key and its value), each read by `tomllib` itself.

A run file may be a stranger's (`argosy watch` reads it), so its size and depth are bounded: `tomllib` takes a time that
grows with the square of the names in one key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argosy.config.section import Key
from argosy.errors import UserError
from argosy.files import read_at_most

MOST_TOML_BYTES = 2**20
MOST_DEPTH = 32
"""Most brackets inside of each other, and most names in one key."""
_SHOWN = 100
"""Characters of a line that a message shows, at most."""

_BASIC, _LITERAL = r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"', r"'[^'\n]*+'"
_KEY_NAME = re.compile(rf"[\w-]++|{_BASIC}|{_LITERAL}")
_TOKEN = re.compile(
    r'(?P<text>"""[^\\]*?(?:\\.[^\\]*?)*?"{3,5}|\'\'\'.*?\'{3,5})|(?P<unclosed>"""|\'\'\')|(?P<comment>\#[^\n]*+)'
    rf"|(?P<names>(?:{_KEY_NAME.pattern})(?:[ \t]*+\.[ \t]*+(?:{_KEY_NAME.pattern}))*+)"
    r"|(?P<open>[\[{])|(?P<close>[\]}])|(?P<end>\n)|(?P<cut>[\"\'])",
    re.DOTALL,
)


def read_toml(path: Path) -> tuple[dict[str, Any], dict[Key, int]]:
    """Return the table in a file, and the line (from 1) of each of its keys and tables.

    Raises: UserError if the file cannot be read, is not UTF-8, is not TOML, or is larger than any run file.
    """
    try:
        text, table = _read(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    return table, key_lines(text)


def read_table(path: Path) -> dict[str, Any]:
    """Return the table in a file. Raises: OSError if it cannot be read; UserError as `read_toml`."""
    return _read(path)[1]


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = read_at_most(path, MOST_TOML_BYTES).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file (byte {error.start} is not UTF-8). Save it as UTF-8.") from None
    if line := _too_deep(text):
        raise UserError(f"{path}:{line}: more than {MOST_DEPTH} names in one key, or brackets inside of each other.")
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(_syntax_error(path, text, str(error))) from None
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{path}: not TOML: {error}.") from None


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
    """(line, text, meaning) of each statement of valid TOML: it ends where a line ends outside of all brackets."""
    line, start = 1, 0
    ends = [match.end() for match, depth in _tokens(text) if match.lastgroup == "end" and not depth]
    for end in [*ends, len(text)]:
        source = text[start:end].strip(" \t\n")
        if source and not source.startswith("#"):
            yield line, source, tomllib.loads(source)
        line, start = line + text.count("\n", start, end), end


def _tokens(text: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yield the tokens that say where statements end, with the brackets that are open after each.

    A text that is not closed is the last: what follows is not TOML.
    """
    depth = 0
    for match in _TOKEN.finditer(text):
        if match.lastgroup in ("cut", "unclosed"):
            return
        depth += (match.lastgroup == "open") - (match.lastgroup == "close")
        yield match, depth


def _too_deep(text: str) -> int:
    """Return the line with more names in one key, or brackets inside of each other, than a file of ours has; else 0."""
    for match, depth in _tokens(text):
        names = match["names"] or ""
        if depth > MOST_DEPTH or (names.count(".") >= MOST_DEPTH and len(_KEY_NAME.findall(names)) > MOST_DEPTH):
            return text.count("\n", 0, match.start()) + 1
    return 0


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
    first = max(0, column - _SHOWN)
    shown = lines[line - 1][first : first + _SHOWN]
    return f"{path}:{line}:{column}: {what[:_SHOWN]}.\n    {shown}\n    {' ' * (column - 1 - first)}^{hint}"

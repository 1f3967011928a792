"""tyro, as every command uses it: what it parses, the help under our text, and its errors as sentences."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import MISSING, field, fields, make_dataclass
from io import StringIO
from typing import Annotated, Any, get_type_hints

import tyro

from argosy.config.section import meanings
from argosy.errors import UserError

LOOKS = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
"""Show an optional option by its type alone: PATH, not {None}|PATH; and a flag without its opposite."""
TEXT = "@text@"
"""Stands for the text above the options while tyro writes its help: it would take out the breaks of its lines."""

HELP_OPTIONS = ("-h", "--help")
RUN_ARGUMENT = " [RUN]"
UNBROKEN = "\N{NO-BREAK SPACE}"
NUMBERS = {
    r"invalid literal for int\(\) with base 10": "a whole number",
    "could not convert string to float": "a number",
}
"""Python's words for text that is no number -> what it must be."""
NO_PAIRS = re.compile(r"Error parsing (\S+): Could not find valid parse for arguments:\s*\[(.*?)\]", re.DOTALL)
"""tyro's words for what is no table."""
REMARK = re.compile(r"^(  \S.*?)\s{2,}(\S.*)$")
"""A line of an example: the command, and what it does."""


def fitted(text: str, width: int | None = None) -> str:
    """Return the text in lines of at most `width` characters (default: the terminal's).

    Paragraphs are filled anew. Indented lines, the examples, keep their breaks: of one that is too long, what it does
    comes into a line of its own, and a command is never broken.
    """
    width = width or shutil.get_terminal_size().columns
    return "\n\n".join(_paragraph(part, width) for part in text.strip().split("\n\n"))


def _paragraph(text: str, width: int) -> str:
    lines = text.split("\n")
    if not any(line.startswith(" ") for line in lines):
        whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", UNBROKEN), " ".join(lines))
        return textwrap.fill(whole, width, break_long_words=False, break_on_hyphens=False).replace(UNBROKEN, " ")
    if max(map(len, lines)) <= width:
        return text
    return "\n".join(_example(line, width) for line in lines)


def _example(line: str, width: int) -> str:
    if len(line) <= width or not (parts := REMARK.match(line)):
        return line
    remark = textwrap.fill(parts[2], width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    return f"{parts[1]}\n{remark}"


class _Terminal(StringIO):
    """Text that is written as the terminal can show it: in colour, with lines around tables."""

    encoding = getattr(sys.__stdout__, "encoding", "utf-8")

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def described(options: type, prog: str, about: str, argv: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the parsed `options` and the words that they do not take. Raises: SystemExit after --help."""
    if not any(word in HELP_OPTIONS for word in argv):
        return _parsed(options, prog, argv)
    written = _Terminal()
    try:
        with redirect_stdout(written):
            return _parsed(options, prog, argv)
    finally:
        print(written.getvalue().replace(TEXT, fitted(about)), end="")


def explained(options: type) -> type:
    """Return a form like the dataclass `options`, to be shown: its texts are whole lines, and nothing is no default."""
    texts, types = meanings(options), get_type_hints(options, include_extras=True)
    parts: list[tuple[str, Any, Any]] = []
    for part in fields(options):
        text = " ".join(texts[part.name].split()) if part.name in texts else None  # its type has one: RunPath, ...
        about = tyro.conf.arg(help=text, help_behavior_hint=no_hint(part.default))
        default = {} if part.default is MISSING else {"default": part.default}
        parts.append((part.name, Annotated[types[part.name], about], field(**default)))
    return make_dataclass(options.__name__, parts, kw_only=True)


def no_hint(default: object) -> str | None:
    """Return an empty hint for a default that would tell nothing; None: the default is shown."""
    return "" if default in (None, False, (), {}, "") else None


def _parsed(options: type, prog: str, argv: Sequence[str]) -> tuple[Any, list[str]]:
    """Return what tyro parses. Raises: UserError for what it would print in a box; SystemExit after --help."""
    box = StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(options, prog=prog, description=TEXT, args=argv, return_unknown_args=True, config=LOOKS)
    except SystemExit as end:
        if not end.code:
            raise
    lines = re.findall(r"^│ (.*?) *│$", box.getvalue().partition("│ ──")[0], re.M)
    text = re.sub(r"\n {4}(\S.*)\n {8}", r"\n  \1: ", "\n".join(lines))  # an option, and what it means
    text = re.sub(r"\n {8}", " ", text).replace(" (required)", "")
    for said, wanted in NUMBERS.items():
        text = re.sub(rf"Error parsing (\S+): {said}: '(.*)'", rf"\1 \2: must be {wanted}.", text)
    text = NO_PAIRS.sub(r"\1 \2: must be pairs of a path and its weight, as in \1 data/mine 1.0.", text)
    raise UserError(f"{text or 'the options are wrong.'}\n  All options: {prog.removesuffix(RUN_ARGUMENT)} --help")


def unknown_options(options: type, prog: str, argv: Sequence[str]) -> list[str]:
    """Return the options that are none, in words that cannot be parsed as they lack the first positional one."""
    with suppress(UserError):
        return [word for word in _parsed(options, prog, ["_", *argv])[1] if word.startswith("-")]
    return []

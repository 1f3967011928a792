"""The page of the commands, from the help of each."""

from __future__ import annotations

import inspect
import os
import re
from contextlib import redirect_stdout, suppress
from io import StringIO
from unittest.mock import patch

from argosy.cli import COMMANDS
from argosy.cli import main as argosy_main
from argosy.errors import EXIT_CODES
from reference.markdown import escaped, keys_table


def page() -> str:
    """Return the page of the commands, from the `--help` of each."""
    codes = ["| code | meaning |", "|---|---|", *(f"| {code} | {text} |" for code, text in EXIT_CODES.items())]
    pages = [command(name) for name in COMMANDS]
    return "\n\n".join(
        [
            "# Commands",
            "What `argosy COMMAND --help` says, of every command. A command that takes a `[RUN]` (a run file, or the "
            "name of a preset; without one, the built-in demo) takes [every key of the run file](run-file.md) as an "
            "option too, here and in `--help` shown in part, in `--help-all` as a whole.",
            *pages,
            "## Exit codes",
            "\n".join(codes),
        ]
    )


def command(*words: str) -> str:
    """Return the section of one command, and those of its actions."""
    text = help_of(*words)
    actions = re.match(r"usage: argosy \w+ \{([\w,-]+)\} \.\.\.", text)
    parts = [_as_markdown(text, words)]
    parts += [command(*words, action) for action in actions[1].split(",")] if actions else []
    return "\n\n".join(parts)


def help_of(*words: str) -> str:
    """Return the help of a command as it is printed in a terminal so wide that every option stands in one line."""
    shown = StringIO()
    with patch.dict(os.environ, {"COLUMNS": "4000"}), redirect_stdout(shown), suppress(SystemExit):
        argosy_main([*words, "--help"])
    return _in_one_column(shown.getvalue())


def _in_one_column(text: str) -> str:
    """Return help whose boxes stand below each other: where there are several tables, it fills a wide terminal."""
    lines = text.splitlines()
    first = next((line for line in lines if line.count("╭") > 1), None)
    if first is None:
        return text
    begin, middle = lines.index(first), first.rindex("╭")
    boxes = lines[begin:]
    columns = [line[:middle].rstrip() for line in boxes], [line[middle:].rstrip() for line in boxes]
    return "\n".join([*lines[:begin], *(line for column in columns for line in column if line)]) + "\n"


def _as_markdown(text: str, words: tuple[str, ...]) -> str:
    about, *boxes = re.split(r"^╭─ ([\w ]+) ─*╮\n", text, flags=re.MULTILINE)
    usage, _, about = about.partition("\n")
    level, name = "#" * (1 + len(words)), " ".join(words)
    parts = [f"{level} argosy {name} {{#{'-'.join(words)}}}", f"```text\n{usage.removeprefix('usage: ')}\n```"]
    for block in re.split(r"\n\n", about.strip("\n")):
        lines = block.splitlines()
        first = next((i for i, line in enumerate(lines) if line.startswith("  ")), len(lines))
        parts.append(escaped(" ".join(lines[:first])))
        if first < len(lines):
            parts.append("```text\n" + inspect.cleandoc("\n" + "\n".join(lines[first:])) + "\n```")
    for title, box in zip(boxes[::2], boxes[1::2], strict=True):
        parts.append(_options(box, "argument" if title.startswith("positional") else "option"))
    return "\n\n".join(parts)


def _options(box: str, kind: str) -> str:
    """Return the options in a box of the help as a table."""
    rows = [f"| {kind} | meaning |", "|---|---|"]
    option = ""
    for line in (line.strip("│").rstrip() for line in box.splitlines() if line.startswith("│")):
        here = re.match(r" (\S.*?)(?:\s{2,}(.*))?$", line)
        if here:
            option = f"`{here[1].strip()}`"
        meaning = (here[2] or "") if here else line.strip()
        if meaning and "--help" not in option:
            rows.append(f"| {option} | {escaped(meaning)} |")
    return keys_table(rows)

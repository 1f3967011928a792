"""The reference pages of the site, written from the code at each build: run file, commands, Python API."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import argosy
from argosy.cli import COMMANDS
from argosy.cli import main as argosy_main
from argosy.config import keys
from argosy.config.meaning import meanings, texts_under_names
from argosy.config.schema import RunConfig
from argosy.config.section import Section
from argosy.errors import EXIT_CODES
from argosy.plan.plan import Plan

# The run file


def run_file() -> str:
    """Return the page of the run file: a table of keys for each of its tables."""
    tables = [_keys_of(section, name) for name, section in _sections(RunConfig())]
    return "\n\n".join(
        [
            "# Run file",
            "Every key of a run file (TOML), with its type, its default and its meaning. A key that is not here is "
            "refused, and the message names the one that was probably meant.",
            "Each key is also an option of every command that takes a run: `steps` of `[train]` is `--train.steps`. "
            "`argosy config show run.toml` prints a run with every key in force. "
            "[`run.schema.json`](run.schema.json) is the same for an editor that completes and checks run files.",
            *tables,
            "## plan",
            "The words of a plan: `plan` is `auto`, a text of these words such as `dp_replicate=2,microbatch=4`, "
            'both (`"auto,precision=fp32"`), or a table of them. [Parallelism](parallelism.md) explains them.',
            _table(Plan(), "plan"),
        ]
    )


def _sections(section: Section, name: str = "") -> Iterator[tuple[str, Section]]:
    """Yield each table of the run file: its name as TOML writes it, and its defaults, in the order of the schema."""
    yield name, section
    for key, info in type(section).model_fields.items():
        path = f"{name}.{key}".lstrip(".")
        if keys.section_of(info):
            yield from _sections(getattr(section, key), path)
        elif inner := keys.element_of(info):
            yield f"[{path}]", inner.model_construct()


def _keys_of(section: Section, name: str) -> str:
    """Return heading, meaning and table of keys of one table of the run file."""
    plain = name.strip("[]")
    heading = f"## `[{name}]` {{#{plain}}}" if name else "## At the top {#top}"
    return "\n\n".join([heading, _escaped(type(section).__doc__ or ""), _table(section, plain)])


def _table(section: Section, name: str) -> str:
    """Return the table of the keys of `section`, each with an anchor: train.steps."""
    schema, meaning = type(section).model_json_schema()["properties"], meanings(type(section))
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, info in type(section).model_fields.items():
        if keys.section_of(info):
            continue
        anchor = f"{name}.{key}".lstrip(".")
        shown = f'<a id="{anchor}" href="#{anchor}"><code>{key}</code></a>'
        default = _default(getattr(section, key, None))
        rows.append(f"| {shown} | {_type(schema[key])} | {default} | {_escaped(meaning.get(key, ''))} |")
    return _keys_table(rows)


def _keys_table(rows: list[str]) -> str:
    """Return a table, the first two rows its head, which a phone shows as a list; nothing if it has no other row."""
    return '<div class="keys" markdown>\n\n' + "\n".join(rows) + "\n\n</div>" if len(rows) > 2 else ""


def _type(schema: dict[str, Any]) -> str:
    """Return a key's JSON schema in words: `integer >= 0`."""
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(kind) for kind in schema["anyOf"] if kind.get("type") != "null")
    match schema.get("type"):
        case "array":
            return "list of tables" if "$ref" in schema["items"] else f"list of {_type(schema['items'])}"
        case "object" if isinstance(inner := schema.get("additionalProperties"), dict):
            return f"table of {_type(inner)}"
        case kind:
            words = {"object": "table", "string": schema.get("format", "text"), "boolean": "true, false"}
            return " ".join([words.get(str(kind), str(kind)), *_limits(schema)])


def _limits(schema: dict[str, Any]) -> Iterator[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {schema[word]:g}" for word, sign in signs.items() if word in schema]
    if found:
        yield ", ".join(found).replace("<", "&lt;")


def _default(value: object) -> str:
    return "" if value is None else f"`{json.dumps(str(value) if isinstance(value, Path) else value)}`"


# The commands


def commands() -> str:
    """Return the page of the commands, from the `--help` of each."""
    codes = ["| code | meaning |", "|---|---|", *(f"| {code} | {text} |" for code, text in EXIT_CODES.items())]
    pages = [_command(name) for name in COMMANDS]
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


def _command(*words: str) -> str:
    """Return the section of one command, and those of its actions."""
    text = help_of(*words)
    actions = re.match(r"usage: argosy \w+ \{([\w,-]+)\} \.\.\.", text)
    parts = [_as_markdown(text, words)]
    parts += [_command(*words, action) for action in actions[1].split(",")] if actions else []
    return "\n\n".join(parts)


def help_of(*words: str) -> str:
    """Return the help of a command as it is printed in a terminal so wide that every option stands in one line."""
    shown = StringIO()
    with patch.dict(os.environ, {"COLUMNS": "4000"}), redirect_stdout(shown), suppress(SystemExit):
        argosy_main([*words, "--help"])
    return shown.getvalue()


def _as_markdown(text: str, words: tuple[str, ...]) -> str:
    about, *boxes = re.split(r"^╭─ ([\w ]+) ─*╮\n", text, flags=re.MULTILINE)
    usage, _, about = about.partition("\n")
    level, name = "#" * (1 + len(words)), " ".join(words)
    parts = [f"{level} argosy {name} {{#{'-'.join(words)}}}", f"```text\n{usage.removeprefix('usage: ')}\n```"]
    for block in re.split(r"\n\n", about.strip("\n")):
        lines = block.splitlines()
        first = next((i for i, line in enumerate(lines) if line.startswith("  ")), len(lines))
        parts.append(_escaped(" ".join(lines[:first])))
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
            rows.append(f"| {option.replace('|', '&#124;')} | {_escaped(meaning)} |")
    return _keys_table(rows)


# The Python API


def python_api() -> str:
    """Return the page of `import argosy`: what each public name is, from its docstring."""
    parts = [
        "# Python API",
        "The names of `import argosy`. [Argosy from Python](python.md) shows them at work.",
        *(_public(name, home, name) for name, home in sorted(argosy._HOME.items(), key=_functions_first)),
    ]
    extensions = sorted(_imported(f"argosy.{argosy.EXTEND}").items(), key=_functions_first)
    parts += [_public(name, home, f"{argosy.EXTEND}.{name}") for name, home in extensions]
    return "\n\n".join(parts)


def _functions_first(name_and_home: tuple[str, str]) -> tuple[bool, str]:
    return name_and_home[0][0].isupper(), name_and_home[0]


def _source(module: str) -> list[ast.stmt]:
    """Return the statements of a module, which is not imported."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return ast.parse(Path(spec.origin).read_text()).body


def _imported(package: str) -> dict[str, str]:
    """Return name -> module of the names that the package takes from its modules to be used by others."""
    froms = [node for node in _source(package) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in froms for alias in node.names}


def _public(name: str, home: str, shown: str) -> str:
    """Return the section of one public name that the module `home` defines."""
    parts = [f"## {shown} {{#{shown}}}"]
    for node, following in pairwise([*_source(home), ast.Pass()]):
        match node:
            case ast.FunctionDef(name=found) if found == name:
                parts += [f"```python\n{_signature(node)}\n```", _docstring(node)]
            case ast.ClassDef(name=found) if found == name:
                parts += [_docstring(node), *_members(name, node, home)]
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                parts.append(f"```python\n{ast.unparse(node)}\n```")
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    parts.append(_escaped(str(following.value.value)))
    return "\n\n".join(parts)


def _signature(node: ast.FunctionDef) -> str:
    """Return `name(arguments) -> result`, an argument a line where they are many."""
    whole = f"{node.name}({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    if len(whole) <= 80:
        return whole
    # A comma parts arguments only outside of brackets.
    arguments = re.split(r", (?![^\[\](){}]*[\])}])", ast.unparse(node.args))
    return f"{node.name}(\n    " + ",\n    ".join(arguments) + ",\n)" + whole[whole.rfind(") ->") + 1 :]


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the docstring as Markdown: `name: meaning` becomes an entry of a list."""
    blocks = (ast.get_docstring(node) or "").replace("Args:\n", "").split("\n\n")
    # A line that ends in a full stop ends an entry, unless the next one is set in further.
    texts = [text for block in blocks for text in re.split(r"(?<=\.)\n(?! {5})", block)]
    parts: list[str] = []
    for text in (" ".join(text.split()) for text in texts):
        entries = re.split(r"(?:^|(?<=\. ))(?=(?:[a-z_]+|Raises): )", text)
        for entry in filter(None, map(str.strip, entries)):
            word = re.match(r"([a-z_]+): (.*)", entry)
            parts.append(f"- `{word[1]}`: {_escaped(word[2])}" if word else _escaped(entry))
    return "\n\n".join(parts)


def _members(name: str, node: ast.ClassDef, home: str) -> Iterator[str]:
    """Yield what a class of data has: its fields, or where these are documented."""
    if name in ("RunConfig", "PrepareConfig"):
        anchor = "" if name == "RunConfig" else "#data.prepare"
        yield f"Its fields are the keys of the [run file](run-file.md{anchor})."
        return
    if name == "Plan":
        yield "Its fields are the words of a [plan](run-file.md#plan)."
    else:
        said = texts_under_names(getattr(importlib.import_module(home), name))
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        rows = [
            f"| `{ast.unparse(f.target)}` | {_code(ast.unparse(f.annotation))} | "
            f"{_escaped(said.get(ast.unparse(f.target), ''))} |"
            for f in fields
        ]
        if rows:
            yield _keys_table(["| field | type | meaning |", "|---|---|---|", *rows])
    yield _keys_table(["| attribute, method | meaning |", "|---|---|", *map(_member, _public_methods(node))])


def _public_methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"))


def _member(method: ast.FunctionDef) -> str:
    """Return a property or a method as a row of a table."""
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(method.args))
    is_property = any(ast.unparse(mark) == "property" for mark in method.decorator_list)
    shown = method.name if is_property else f"{method.name}({arguments})"
    return f"| {_code(shown)} | {_escaped(ast.get_docstring(method) or '')} |"


def _code(text: str) -> str:
    return "`" + text.replace("|", "&#124;") + "`" if "|" not in text else f"<code>{text.replace('|', '&#124;')}</code>"


def _escaped(text: str) -> str:
    """Return a text of the code in one line, in which only backticks mean something to Markdown."""
    pieces = " ".join(text.split()).split("`")
    if len(pieces) % 2 == 0:
        pieces = [" ".join(pieces)]
    pieces[::2] = [re.sub(r"([*_\\[\]])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces).replace("|", "&#124;")

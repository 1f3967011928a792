"""Values with the place where they were written. Run file, model preset and overrides are a layer each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.config.keys import Key, fields, flatten, key_of, value_type
from argosy.config.lines import read_toml
from argosy.config.problems import KeyPlace
from argosy.config.renamed import is_removed, new_key
from argosy.config.schema import RunConfig
from argosy.config.section import Section


@dataclass(frozen=True)
class Source:
    """The origin of values, as messages name it: a file with the lines of its keys, or a mark before the key ("--")."""

    name: str
    lines: Mapping[Key, int] | None = None

    def place(self, key: Key) -> KeyPlace:
        """Where `key` is written: its own line, that of its first element, or of the nearest table around it."""
        if self.lines is None:
            return KeyPlace(self.name)
        for depth in range(len(key), 0, -1):
            if line := self.lines.get(key[:depth]) or self.lines.get((*key[:depth], 0)):
                return KeyPlace(f"{self.name}:{line}: ", line)
        return KeyPlace(f"{self.name}: ")


@dataclass(frozen=True)
class Setting:
    """One value and its origin."""

    value: object
    source: Source


Layer = dict[Key, Setting]


def file_layer(path: Path, name: str, folder: Path) -> Layer:
    """The values of a run file, called `name` in messages; paths start from `folder`. Raises: UserError."""
    table, lines = read_toml(path)
    return run_layer(flatten(table, RunConfig), Source(name, lines), folder)


def preset_layer(path: Path) -> Layer:
    """The values of a model preset, as keys of a run. Raises: UserError."""
    table, lines = read_toml(path)
    source = Source(path.name, {("model", *key): line for key, line in lines.items()})
    return run_layer(flatten({"model": table}, RunConfig), source, Path.cwd())


def table_layer(table: Mapping[str, Any], schema: type[Section], source: Source) -> Layer:
    """The values of a table of any `schema` (a device, a cluster), as they are."""
    return {key: Setting(value, source) for key, value in flatten(table, schema).items()}


def override_layer(overrides: Mapping[str, object], mark: str) -> Layer:
    """The values of {dotted key: value or table}; `mark` stands before them in messages."""
    values: dict[Key, object] = {}
    for name, value in overrides.items():
        key = key_of(name)
        if isinstance(value, Mapping) and key not in fields(RunConfig):
            values |= flatten(value, RunConfig, key)
        else:
            values[key] = value
    return run_layer(values, Source(mark), Path.cwd())


def run_layer(values: Mapping[Key, object], source: Source, folder: Path) -> Layer:
    """Return the values of a run under today's keys; paths become absolute, a plan's table becomes its string."""
    there = {key: value for key, value in values.items() if not is_removed(key, value, source.place(key).text)}
    named = {new_key(key, source.place(key).text, there): value for key, value in there.items()}
    return {key: Setting(_settled(key, value, folder), source) for key, value in named.items()}


def _settled(key: Key, value: object, folder: Path) -> object:
    match key, value:
        case ("plan",), dict():
            return _plan_text(value)
        case ("data", "sources"), dict():
            return {_absolute(path, folder): weight for path, weight in value.items()}
        case ("data", "stages"), list() | tuple():
            return [_settled_stage(stage, folder) for stage in value]
        case ((("data", "prepare", "input") | ("extend", "files")), list() | tuple()):
            return [_absolute(path, folder) for path in value]
    is_path = key in fields(RunConfig) and value_type(fields(RunConfig)[key]) is Path
    return _absolute(value, folder) if is_path else value


def _settled_stage(stage: object, folder: Path) -> object:
    if isinstance(stage, dict) and "sources" in stage:
        return stage | {"sources": _settled(("data", "sources"), stage["sources"], folder)}
    return stage


def _absolute(path: object, folder: Path) -> object:
    """`path` from `folder` on; URLs, builtin:NAME, source:NAME and what is no path at all stay as they are."""
    if not isinstance(path, str | Path) or "://" in str(path) or str(path).startswith(("builtin:", "source:")):
        return path
    return os.path.normpath(folder / Path(path).expanduser())


def _plan_text(table: dict[str, object]) -> object:
    """{auto = true, tp = 2} -> "auto,tp=2"; `argosy.plan` gives the words their meaning."""
    if any(isinstance(value, dict | list) for value in table.values()):
        return table
    words = {key: str(v).lower() if isinstance(v, bool) else str(v) for key, v in table.items()}
    auto = ["auto"] if words.pop("auto", "false") == "true" else []
    return ",".join(auto + [f"{key}={word}" for key, word in words.items()])

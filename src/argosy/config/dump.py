"""A run, or another section such as a cluster, as TOML: every key with its value and its meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.items import AoT, Item, Table

from argosy.config.schema import RunConfig
from argosy.config.section import Section, meanings
from argosy.files import atomic_write


def dump(config: Section) -> str:
    """Return a TOML text that reads back as the same `config` (paths of a run are absolute, as `load` makes them)."""
    return tomlkit.dumps(_document(config))


def _document(config: Section) -> tomlkit.TOMLDocument:
    document = tomlkit.document()
    _fill(document, config)
    return document


def _fill(table: Table | Container, section: Section, explained: bool = True) -> None:
    """Add the section's values, then its tables, in the order that TOML needs; a value of None is left out."""
    values = section.model_dump(mode="json", exclude_none=True)
    meaning = meanings(type(section)) if explained else {}
    for name in sorted(values, key=lambda name: _is_table(getattr(section, name), values[name])):
        inner = getattr(section, name)
        if isinstance(inner, Section) and _is_table(inner, values[name]):
            table.add(name, _table(inner))
        elif _is_table(inner, values[name]):
            table.add(name, _tables(inner))
        else:
            item = _value(values[name])
            table.add(name, _explained(item, meaning[name]) if name in meaning else item)


def _is_table(inner: object, value: object) -> bool:
    """True if it is written as a table or tables; a section may also be just a name (a device of the catalogue)."""
    if isinstance(inner, Section):
        return isinstance(value, dict)
    return isinstance(inner, tuple) and bool(inner) and all(isinstance(element, Section) for element in inner)


def _tables(sections: tuple[Section, ...]) -> AoT:
    tables = tomlkit.aot()
    for section in sections:
        tables.append(_table(section, explained=section is sections[0]))  # once is enough
    return tables


def _table(section: Section, explained: bool = True) -> Table:
    table = tomlkit.table()
    if explained:
        _explained(table, type(section).__doc__)
    _fill(table, section, explained)
    return table


def _explained(item: Item, meaning: str | None) -> Item:
    item.comment(" ".join((meaning or "").split()))
    item.trivia.comment_ws = "  "
    return item


def _value(value: Any) -> Item:
    """Tables inside values (data.sources) stand on one line."""
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        for key, inner in value.items():
            table.add(key, _value(inner))
        return table
    if isinstance(value, list):
        array = tomlkit.array()
        for inner in value:
            array.append(_value(inner))
        return array
    item: Item = tomlkit.item(value)
    return item


def save_run(config: RunConfig, path: Path) -> None:
    """Write the run file `path`, whole or not at all. Code that lies in its folder is named from there on."""
    document = _document(config)
    folder = path.absolute().parent
    for place, file in enumerate(config.extend.files):
        if file.is_relative_to(folder):
            document["extend"]["files"][place] = str(file.relative_to(folder))
    with atomic_write(path) as out:
        out.write(tomlkit.dumps(document).encode())

"""The resolved run as TOML: every key with its value and its meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.items import Item, Table

from argosy.config.keys import section_of
from argosy.config.schema import RunConfig, Section
from argosy.files import atomic_write


def dump(config: RunConfig) -> str:
    """A run file that `load` reads back as the same `config` (paths being absolute, as `load` makes them)."""
    document = tomlkit.document()
    _fill(document, config)
    return tomlkit.dumps(document)


def _fill(table: Table | Container, section: Section) -> None:
    """Add the section's values, then its tables, as TOML's order wants it; a value of None is left out."""
    values = section.model_dump(mode="json", exclude_none=True)
    fields = type(section).model_fields
    for name in sorted(values, key=lambda name: section_of(fields[name]) is not None):
        inner = getattr(section, name)
        if isinstance(inner, Section):
            table.add(name, _table(inner))
        else:
            table.add(name, _explained(_value(values[name]), fields[name].description))


def _table(section: Section) -> Table:
    table = tomlkit.table()
    _explained(table, type(section).__doc__)
    _fill(table, section)
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
    """Write the run file `path`, whole or not at all."""
    with atomic_write(path) as file:
        file.write(dump(config).encode())

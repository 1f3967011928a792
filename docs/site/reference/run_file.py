"""The page of the run file: every key, its type, its default and its meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argosy.config.schema import RunConfig
from argosy.config.section import Section, element_of, meanings, section_of
from argosy.plan.plan import Plan
from reference.markdown import escaped, keys_table


def page() -> str:
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
        if section_of(info):
            yield from _sections(getattr(section, key), path)
        elif inner := element_of(info):
            yield f"[{path}]", inner.model_construct()


def _keys_of(section: Section, name: str) -> str:
    """Return heading, meaning and table of keys of one table of the run file."""
    plain = name.strip("[]")
    heading = f"## `[{name}]` {{#{plain}}}" if name else "## At the top {#top}"
    return "\n\n".join([heading, escaped(type(section).__doc__ or ""), _table(section, plain)])


def _table(section: Section, name: str) -> str:
    """Return the table of the keys of `section`, each with an anchor: train.steps."""
    schema, meaning = type(section).model_json_schema()["properties"], meanings(type(section))
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, info in type(section).model_fields.items():
        if section_of(info):
            continue
        anchor = f"{name}.{key}".lstrip(".")
        shown = f'<a id="{anchor}" href="#{anchor}"><code>{key}</code></a>'
        default = _default(getattr(section, key, None))
        rows.append(f"| {shown} | {_type(schema[key])} | {default} | {escaped(meaning.get(key, ''))} |")
    return keys_table(rows)


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

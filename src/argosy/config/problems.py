"""Messages about wrong values: a sentence that says what is allowed and ends in what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from argosy.config.counts import DURATION, count_of, seconds_of
from argosy.config.keys import Key, dotted, element_of, fields, limits, sections, value_type
from argosy.config.section import Section, meanings
from argosy.config.suggest import suggestion


class KeyPlace(NamedTuple):
    """Where a key was written: `text` stands before the key in a message, `line` orders the messages."""

    text: str = ""
    line: int = 0


class Problem(NamedTuple):
    """One wrong key or value."""

    place: KeyPlace
    text: str
    is_rule: bool = False
    """True for a rule between keys: it may be broken only because of another problem, and is told after those."""

    def __str__(self) -> str:
        return self.place.text + self.text


def problem_of(
    error: ErrorDetails,
    schema: type[Section],
    place: Callable[[Key], KeyPlace],
    replaced: Mapping[Key, object] = MappingProxyType({}),
) -> Problem:
    """The problem that pydantic found in a `schema`; `place` says where a key was written.

    replaced: values that hold in place of the schema's defaults, if what replaces them is left out.
    """
    key: Key = error["loc"]
    if error["type"] == "value_error":
        return _broken_rule(key, str(error["ctx"]["error"]), schema, place)
    if error["type"] == "missing":
        return Problem(place(key), f"{dotted(key)} is missing.")
    value = f"{dotted(key)} = {shown(error['input'])}"
    inside, element = _element_around(key, schema)
    if error["type"] == "extra_forbidden":
        return Problem(place(key), f"{value}: unknown key; {suggestion(inside, fields(element), elsewhere={})}")
    table = dotted(name for name in key if isinstance(name, str))
    if inside in sections(element):
        return Problem(place(key), f"{value}: must be a table, [{table}], with keys of its own.")
    field = fields(element).get(inside)
    if field is None:  # inside a list or a table of values: data.sources."folder"
        return Problem(place(key), f"{value}: {_lower_first(error['msg'])}.")
    meaning = meanings(sections(element)[inside[:-1]]).get(str(inside[-1]), "")
    if element_of(field) and get_origin(value_type(field)) is tuple:
        wanted = f"a list of tables; write [[{table}]] before the keys of each"
    else:
        wanted = allowed(field)
    is_replaced = key in replaced and replaced[key] != error["input"]
    instead = replaced[key] if is_replaced else field.default
    return Problem(place(key), f"{value}: must be {wanted}.{_remedy(inside, field, instead, error['input'], meaning)}")


def _element_around(key: Key, schema: type[Section]) -> tuple[Key, type[Section]]:
    """The key inside the element of a list or table of sections that `key` points into, and that element's schema."""
    for depth in range(1, len(key) - 1):
        field = fields(schema).get(key[:depth])
        if field and (element := element_of(field)):
            return key[depth + 1 :], element
    return key, schema


def _broken_rule(key: Key, rule: str, schema: type[Section], place: Callable[[Key], KeyPlace]) -> Problem:
    """A rule between keys; its sentence begins with the key to blame, relative to its section."""
    blamed = key + tuple(rule.split(" ", 1)[0].split("."))
    rule += "" if rule.endswith("?") else "."
    if blamed in fields(schema):
        return Problem(place(blamed), f"{dotted(key)}{'.' * bool(key)}{rule}", is_rule=True)
    return Problem(place(key), f"{dotted(key)}: {rule}".removeprefix(": "), is_rule=True)


def allowed(field: FieldInfo) -> str:
    """What `field` takes: "a whole number above 0"."""
    bounds = [
        f"{word} {getattr(limit, attribute):g}"
        for limit in limits(field)
        for kind, attribute, word in _BOUNDS
        if isinstance(limit, kind)
    ]
    patterns = [f"that matches {m.pattern}" for m in limits(field) if getattr(m, "pattern", None)]
    return " ".join([_kind(value_type(field)), " and ".join(bounds + patterns)]).strip()


_BOUNDS: list[tuple[type, str, str]] = [
    (annotated_types.Gt, "gt", "above"),
    (annotated_types.Ge, "ge", "of at least"),
    (annotated_types.Lt, "lt", "below"),
    (annotated_types.Le, "le", "of at most"),
    (annotated_types.MultipleOf, "multiple_of", "a multiple of"),
]
_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    Path: "a path, as text",
    tuple: 'a list, such as ["a", "b"]',
    dict: 'a table, such as {"folder" = 1.0}',
}


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in get_args(annotation))
    return _KINDS[get_origin(annotation) or annotation]


def _remedy(key: Key, field: FieldInfo, default: object, value: object, meaning: str) -> str:
    """A second line: a value to try, and what the key means. default: the value without this one."""
    meaning = " ".join(["", *meaning.split()])
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if near := get_close_matches(str(value).lower(), choices, n=1):
        return f"\n  Try {shown(near[0])}.{meaning}"
    is_time = str(key[-1]).endswith("_s")
    if isinstance(value, str) and (unquoted := _unquoted(value, value_type(field), is_time)):
        return f"\n  Try {unquoted}, without the quotes.{meaning}"
    if default is PydanticUndefined or default in (None, (), {}):
        return f"\n {meaning}" if meaning else ""
    return f"\n  Try {shown(default)}, the default{'' if default == field.default else ' here'}.{meaning}"


def _unquoted(text: str, kind: Any, is_time: bool) -> str:
    """Return what `text` should be without its quotes to be of this kind; empty if that would not do either.

    is_time: the value is in seconds, so that "2m" means 120.
    """
    if kind is bool:
        return text.strip().lower() if text.strip().lower() in ("true", "false") else ""
    try:
        number = seconds_of(text) if is_time and DURATION.fullmatch(text) else float(count_of(text))
    except ValueError:
        return ""
    plain = text.strip() if not text.strip()[-1:].isalpha() else f"{number:g}"
    return plain if kind is float or (kind is int and number.is_integer()) else ""


def shown(value: object) -> str:
    """Return the value about as TOML writes it, cut if it is long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]

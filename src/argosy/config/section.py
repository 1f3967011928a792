"""The base of the run file's tables: their keys, and what each means.

A key is a tuple of names, as ("train", "steps"). Meanings are the texts under keys in the source of their section, read
when somebody asks: pydantic's `use_attribute_docstrings` reads all of it at import, an eighth of what a short command
takes.

Values may be written as people type them: counts (30k, 161B, 1.5T) and lengths of time (90m, 12h, 30d, 2w).
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import threading
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo

from argosy.credentials import CREDENTIALS_OF_STORES, CREDENTIALS_PROBLEM, has_credentials

_PARSES = threading.Lock()
"""Python 3.11 counts the depth of all threads' syntax trees in one place: SystemError (python/cpython#106905)."""
PARSE_TRIES = 5
"""Times that a module is parsed at most: a thread of a library may do so at the same moment."""


@cache
def meanings(section: type) -> dict[str, str]:
    """Return key -> the text under it, for the documented keys of a section or dataclass, inherited ones included."""
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if is_dataclass(owner) or (issubclass(owner, BaseModel) and owner is not BaseModel):
            found |= texts_under_names(owner)
    return found


def explain(schema: dict[str, Any], section: type[BaseModel]) -> None:
    """Add the meanings to the JSON schema of `section`; pydantic's `json_schema_extra`."""
    for key, meaning in meanings(section).items():
        schema["properties"][key]["description"] = meaning


def texts_under_names(owner: type) -> dict[str, str]:
    """Return name -> the text under it, of the annotated names in the body of a class."""
    with _PARSES:
        definition = _definitions(owner.__module__)[owner.__qualname__]
    found = {}
    for name, text in pairwise(definition.body):
        match name, text:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(meaning))):
                found[key] = inspect.cleandoc(meaning)
    return found


@cache
def _definitions(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by qualified name. (`inspect.getsource` reads the module anew for each.)"""
    found: dict[str, ast.ClassDef] = {}

    def look(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found[above + child.name] = child
                look(child, f"{above}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                look(child, f"{above}{child.name}.<locals>.")
            elif isinstance(child, ast.stmt):
                look(child, above)

    look(_parsed(inspect.getsource(sys.modules[module])), "")
    return found


def _parsed(source: str) -> ast.Module:
    for _ in range(PARSE_TRIES - 1):
        with suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


class Section(BaseModel):
    """A table of the run file: immutable, and closed (an unknown key is an error)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra=explain,
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    # How credentials of this table are given, as the words after "give".
    give_credentials: ClassVar[str] = CREDENTIALS_OF_STORES

    @field_validator("*")
    @classmethod
    def _refuse_credentials(cls, value: Any) -> Any:
        """A run file is written to the run's folder, and what it says to logs and manifests."""
        texts = value if isinstance(value, tuple | dict) else [value]
        if any(isinstance(text, str | Path) and has_credentials(str(text)) for text in texts):
            raise ValueError(f"{CREDENTIALS_PROBLEM}{cls.give_credentials}")
        return value

    def with_keys(self, **values: Any) -> Self:
        """Return a copy with these values, of keys or of keys of tables: with_keys(plan="auto", train={"steps": 3}).
        Nothing checks them.
        """
        for name, value in values.items():
            if isinstance(value, dict) and isinstance(held := getattr(self, name), Section):
                values[name] = held.with_keys(**value)
        return self.model_copy(update=values)


LONGEST_S = 1e9
"""Thirty years: clocks and timers of Python, torch and the kernel cannot count much longer times."""
Seconds = Annotated[float, Field(ge=0.0, le=LONGEST_S)]
PositiveSeconds = Annotated[float, Field(gt=0.0, le=LONGEST_S)]

Key = tuple[str | int, ...]
"""Names from the outermost table inwards; an index stands for an element of a list."""


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that `field` holds, or may hold; None if it holds a value."""
    kind = value_type(field)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def element_of(field: FieldInfo) -> type[Section] | None:
    """The section that each element of `field` is, a list or a table of sections; None if it is something else."""
    kind = value_type(field)
    inner = [a for a in get_args(kind) if a is not Ellipsis][-1:] if get_origin(kind) in (tuple, dict) else []
    return inner[0] if inner and isinstance(inner[0], type) and issubclass(inner[0], Section) else None


def value_type(field: FieldInfo) -> Any:
    """Return the type of `field`, without None and without limits: int for `PositiveInt | None`."""
    kind = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not types.NoneType)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def limits(field: FieldInfo) -> list[Any]:
    """The constraints on the value of `field`, whether or not it may also be None."""
    inner = [m for kind in get_args(field.annotation) for m in getattr(kind, "__metadata__", ())]
    within = [m for each in inner for m in (each.metadata if isinstance(each, FieldInfo) else [each])]
    return [*field.metadata, *(within if type(None) in get_args(field.annotation) else ())]


@cache
def key_fields(schema: type[Section]) -> dict[Key, FieldInfo]:
    """Every key of `schema` that holds a value, in the order of the schema."""
    found: dict[Key, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        inner = section_of(field)
        found |= {(name, *key): f for key, f in key_fields(inner).items()} if inner else {(name,): field}
    return found


@cache
def sections(schema: type[Section]) -> dict[Key, type[Section]]:
    """Every table of `schema`; `schema` itself is ()."""
    found: dict[Key, type[Section]] = {(): schema}
    for name, field in schema.model_fields.items():
        if inner := section_of(field):
            found |= {(name, *key): section for key, section in sections(inner).items()}
    return found


def flatten(table: Mapping[str, Any], schema: type[Section], above: Key = ()) -> dict[Key, object]:
    """Key -> value of a nested table; a value that is a table itself (data.sources) stays whole."""
    flat: dict[Key, object] = {}
    for name, value in table.items():
        key = (*above, name)
        if isinstance(value, Mapping) and value and key not in key_fields(schema):
            flat |= flatten(value, schema, key)
        elif value != {} or key not in sections(schema):
            flat[key] = value
    return flat


def nest(flat: Mapping[Key, object]) -> dict[str, Any]:
    """The nested table of `flat`; a value at the key of a table (model = 3) hides what is below it."""
    root: dict[str, Any] = {}
    for key in sorted(flat, key=len, reverse=True):
        table = root
        for name in key[:-1]:
            table = table.setdefault(str(name), {})
        table[str(key[-1])] = flat[key]
    return root


def key_of(text: str) -> Key:
    """The key that a user writes as checkpoint.every_steps, or with dashes."""
    return tuple(text.replace("-", "_").split("."))


def dotted(key: Iterable[str | int]) -> str:
    """The key as a user writes it: data.stages[0].sources."my folder"."""
    text = ""
    for name in key:
        if isinstance(name, int):
            text += f"[{name}]"
        else:
            text += "." * bool(text) + (name if re.fullmatch(r"[\w-]+", name) else f'"{name}"')
    return text


NUMBER_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
COUNT = re.compile(r"([+-]?[\d_]*\.?\d+(?:e[+-]?\d+)?)\s*([kmbgt]?)", re.IGNORECASE)


def count_of(word: str) -> int | float:
    """Return the number that `word` says: 1000, 1e6, 30k, 7.1M, 161B or 1T; whole if it can be.

    Raises: ValueError.
    """
    if word.lower() in ("nan", "inf", "-inf"):
        return float(word)  # a number, for the option to refuse
    if (parts := COUNT.fullmatch(word.strip())) is None:
        raise ValueError(f"{word!r} is no number; try 30000, 30k, 7.1M, 161B or 1T")
    value = float(parts[1]) * NUMBER_SUFFIXES[parts[2].lower()]
    if not math.isfinite(value):
        raise ValueError(f"{word!r} is too large")
    if parts[2]:
        value = round(value, 3)  # 4.1M must not be 4,099,999.9999999995
    return int(value) if value.is_integer() else value


class Mark(Enum):
    """Stands in a key's type for what the command line is to know of it."""

    COUNT = "a large number"
    NO_OPTION = "in the run file only"
    REPEATED = "given once for each value"


Count = Annotated[float, Mark.COUNT]
WholeCount = Annotated[int, Mark.COUNT]


TIME_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
DURATION = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([smhdw])\s*", re.IGNORECASE)


def seconds_of(word: str) -> float:
    """Return the seconds that `word` says. Raises: ValueError."""
    parts = DURATION.fullmatch(word)
    found = float(parts[1]) * TIME_UNITS[parts[2].lower()] if parts else 0.0
    if not found:
        raise ValueError(f"{word!r} is no length of time; try 90m, 12h, 30d or 2w")
    return found

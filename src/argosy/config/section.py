"""The base of the run file's tables, and what their keys mean.

Meanings are the texts under keys in the source of their section, read when somebody asks: pydantic's
`use_attribute_docstrings` reads all of it at import, an eighth of what a short command takes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from argosy.credentials import REMEDY, has_credentials

_PARSES = threading.Lock()
"""Python 3.11 counts the depth of all threads' syntax trees in one place: SystemError (python/cpython#106905)."""


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
    with _PARSES:  # `getsource` parses too
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for name, text in pairwise(body.body):
        match name, text:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(meaning))):
                found[key] = inspect.cleandoc(meaning)
    return found


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

    @field_validator("*")
    @classmethod
    def _refuse_credentials(cls, value: Any) -> Any:
        """A run file is written to the run's folder, and what it says to logs and manifests."""
        texts = value if isinstance(value, tuple | dict) else [value]
        if any(isinstance(text, str | Path) and has_credentials(str(text)) for text in texts):
            raise ValueError(REMEDY)
        return value

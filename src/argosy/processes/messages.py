"""Messages between processes of different machines: one class for each, checked when it arrives.

They travel as JSON. Bytes, where a message has some, travel behind it, as its sender and its receiver frame them.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from argosy.errors import first_error

TEXT_CHARS = 20_000
"""Longer explanations, with what a program printed in them, are cut."""

Text = Annotated[str, BeforeValidator(lambda text: text[:TEXT_CHARS] if isinstance(text, str) else text)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
M = TypeVar("M")


class BadMessage(Exception):
    """A frame is no message, or one that nobody may send."""


class WireRecord(BaseModel):
    """Base of the messages and their parts."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def encoded(message: WireRecord) -> bytes:
    """Return a message as JSON, without a line break in it."""
    return message.model_dump_json().encode()


def decoded(data: bytes, kinds: TypeAdapter[M]) -> M:
    """Return the message that `encoded` made of one of `kinds`. Raises: BadMessage."""
    try:
        return kinds.validate_json(data)
    except ValidationError as problem:
        raise BadMessage(first_error(problem)) from None

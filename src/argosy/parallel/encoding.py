"""Messages between ranks, as bytes: values of a type that both sides name, in JSON, and never a pickle.

A pickle may run any code on the rank that reads it. Here the reader says what it expects (numbers, texts, tuples, the
dataclasses and models of this package, small tensors), and only that can come out. A frame around the JSON has its
length, its checksum and a hash of the type, so that ranks that are at different places in the program find that out.
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, GetPydanticSchema, PydanticSchemaGenerationError, TypeAdapter
from pydantic_core import PydanticSerializationError, core_schema
from torch import Tensor

from argosy import errors
from argosy.errors import ArgosyError

MOST_FRAME_BYTES = 256 * 2**20
"""No frame is longer: a length beyond it is not one that a rank has sent."""
FRAME_HEADER = struct.Struct("<4sIQI")
"""Mark, hash of the type, bytes of what follows, its CRC-32."""
FRAME_MARK = b"ARG1"
WIRE_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""The dtypes that a tensor in a message may have."""


class WrongMessage(ArgosyError):
    """A rank received something that is not what it expects from another at this place."""


class FailedElsewhere(Exception):
    """Another rank failed, with an error that is not one of Argosy's own; this has its class and its words."""


def to_text(value: Any, kind: Any) -> str:
    """Return `value`, of the type `kind`, in JSON. Raises: TypeError if it is not of that type."""
    return _to_json(value, kind).decode()


def from_text(text: str, kind: Any) -> Any:
    """Return the value of `to_text`. Raises: WrongMessage if `text` is anything else."""
    return _from_json(text, kind, "another rank")


def encode(value: Any, kind: Any) -> bytes:
    """Return `value`, of the type `kind`, as bytes. Raises: TypeError if it is not of that type, or is too long."""
    body = _to_json(value, kind)
    if len(body) > MOST_FRAME_BYTES:
        raise TypeError(
            f"a value of {_words(kind)} is {len(body):,} bytes, more than the {MOST_FRAME_BYTES:,} of a message"
        )
    return FRAME_HEADER.pack(FRAME_MARK, _hash(kind), len(body), zlib.crc32(body)) + body


def checked_length(length: int, sender: str) -> int:
    """Return the length that a sender gives of its message. Raises: WrongMessage if none is so long."""
    if not 0 <= length <= FRAME_HEADER.size + MOST_FRAME_BYTES:
        raise WrongMessage(
            f"{sender} says that its message has {length:,} bytes. It is not at the same place as this rank, or "
            "something else speaks to the run's ports."
        )
    return length


def decode(data: bytes | memoryview, kind: Any, sender: str = "another rank") -> Any:
    """Return the value of `encode`. Raises: WrongMessage, which names `sender`, if `data` are anything else."""
    body = memoryview(data)[FRAME_HEADER.size :]
    if len(data) < FRAME_HEADER.size:
        raise _wrong(sender, kind, f"it has {len(data)} bytes, fewer than any message")
    mark, found, size, crc = FRAME_HEADER.unpack_from(data)
    if mark != FRAME_MARK or size != len(body):
        raise _wrong(sender, kind, "it is no whole message")
    if crc != zlib.crc32(body):
        raise _wrong(sender, kind, "it does not match its checksum")
    if found != _hash(kind):
        raise _wrong(sender, kind, "it is of another type: the two ranks are not at the same place")
    return _from_json(bytes(body), kind, sender)


def _to_json(value: Any, kind: Any) -> bytes:
    try:
        return _adapter(kind).dump_json((value,), warnings="error")
    except PydanticSerializationError as problem:
        raise TypeError(f"{value!r:.100} cannot be sent as {_words(kind)}: {problem}") from None


def _from_json(text: str | bytes, kind: Any, sender: str) -> Any:
    try:
        return _adapter(kind).validate_json(text)[0]
    except ValueError as problem:
        raise _wrong(sender, kind, str(problem).replace("\n", " ")[:300]) from None


@dataclass(frozen=True)
class ErrorRecord:
    """An error, to be raised on other ranks too."""

    name: str
    """Its class; of an ArgosyError that `argosy.errors` does not have, the next class above that it has."""
    text: str
    exit_code: int | None
    """None if it is no ArgosyError."""

    @classmethod
    def of(cls, error: Exception) -> ErrorRecord:
        table = argosy_errors()
        if isinstance(error, ArgosyError):
            name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in table)
            return cls(name, str(error), error.exit_code)
        return cls(type(error).__name__, str(error), None)

    def error(self) -> Exception:
        """Return an error of that class, with the text; FailedElsewhere if it is not one of Argosy's."""
        kind = argosy_errors().get(self.name)
        if kind is None or self.exit_code is None:
            return FailedElsewhere(f"{self.name}: {self.text}")
        error = kind.__new__(kind)
        Exception.__init__(error, self.text)
        error.exit_code = self.exit_code
        return error


@cache
def argosy_errors() -> dict[str, type[ArgosyError]]:
    """Return the errors that travel by their name: those of `argosy.errors`."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ArgosyError)]
    return {kind.__name__: kind for kind in kinds}


def _tensor_schema(_: Any, __: Any) -> core_schema.CoreSchema:
    return core_schema.no_info_plain_validator_function(
        _tensor_of, serialization=core_schema.plain_serializer_function_ser_schema(_record_of)
    )


SentTensor = Annotated[Tensor, GetPydanticSchema(_tensor_schema)]
"""A small tensor in host memory, as the field of something that is sent."""


def _record_of(tensor: Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    name = str(tensor.dtype).removeprefix("torch.")
    return [name, list(tensor.shape), base64.b64encode(flat.numpy().tobytes()).decode()]


def _tensor_of(record: Any) -> Tensor:
    if isinstance(record, Tensor):
        return record
    try:
        name, shape, text = record
        data = bytearray(base64.b64decode(text, validate=True))
        assert name in WIRE_DTYPES and all(isinstance(length, int) and length >= 0 for length in shape)
        if not data:
            assert 0 in shape, "nothing was sent, so there is nothing in it"
            return torch.empty(shape, dtype=getattr(torch, name))
        return torch.frombuffer(data, dtype=getattr(torch, name)).view(shape)
    except (ValueError, TypeError, AssertionError, RuntimeError):
        raise ValueError("it is no tensor") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what checks values of `kind`. Of its plain dataclasses no field may be of a type that pickles."""
    try:
        return TypeAdapter(tuple[kind], config=ConfigDict(ser_json_inf_nan="constants"))
    except PydanticSchemaGenerationError as problem:
        raise TypeError(f"values of {_words(kind)} cannot be sent: {problem}") from None


@cache
def _hash(kind: Any) -> int:
    return zlib.crc32(_words(kind).encode())


def _words(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.__name__
    return re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", str(kind))  # addresses differ between processes


def _wrong(sender: str, kind: Any, why: str) -> WrongMessage:
    return WrongMessage(
        f"what {sender} sent is not the {_words(kind)} that is expected here: {why}. If all ranks run the same version "
        "of Argosy, a process from outside of the run may speak to its ports, or a machine changes data on the way."
    )

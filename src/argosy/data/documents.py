"""Read documents from input files: plain text, JSONL, Parquet. Unreadable input is counted and reported.

A document is a file of plain text (which is read at once), a JSONL record or a Parquet row.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from argosy.data.sources import InputFile
from argosy.errors import UserError, missing_extra

EMPTY = "empty document"
BROKEN_UTF8 = "broken UTF-8"
BROKEN_JSON = "broken JSON"
NOT_TEXT = "not text"


@dataclass
class Tally:
    """Counts of what was read so far."""

    text_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def copy(self) -> Tally:
        """Return an independent copy."""
        return Tally(self.text_bytes, Counter(self.skipped))


@dataclass(frozen=True)
class InputPosition:
    """The place of a document: the `number`-th document (from 0) of the `file`-th input file."""

    file: int = 0
    number: int = 0
    before: Tally = field(default_factory=Tally)
    """Counts at the start of the file, where a reader must start to resume from here."""


@dataclass(frozen=True)
class Document:
    """A text and its place."""

    text: str
    at: InputPosition


@dataclass(frozen=True)
class BadInput:
    """Input that is not text."""

    kind: str
    where: str


class DocumentReader:
    """Reads the documents of `files`, in order; empty ones are left out.

    Args:
        files: the input.
        field: the JSONL field or Parquet column that holds the text.
        on_bad_input: skip and count unreadable input, or raise UserError at the first.
        max_text_bytes: stop after this much UTF-8 text; the last document is cut there.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        field: str,
        on_bad_input: Literal["skip", "refuse"] = "skip",
        max_text_bytes: int | None = None,
    ):
        self._files, self._field, self._on_bad_input = files, field, on_bad_input
        self._max_text_bytes = max_text_bytes
        self.tally = Tally()
        """Counts up to the document that was read last."""

    def read(self, start: InputPosition) -> Iterator[Document]:
        """Yield the documents from `start` on."""
        self.tally = start.before.copy()
        for file in range(start.file, len(self._files)):
            before = self.tally.copy()
            for number, text in enumerate(self._texts(self._files[file])):
                if file > start.file or number >= start.number:
                    yield Document(text, InputPosition(file, number, before))
            if self._left() == 0:
                return

    def _texts(self, file: InputFile) -> Iterator[str]:
        """Yield the readable texts of a file; end where max_text_bytes is reached."""
        for found in read_file(file, self._field):
            data = self._or_skip(found)
            if not data:
                continue
            data = data[: self._left()]
            self.tally.text_bytes += len(data)
            if text := data.decode(errors="ignore"):  # a character that the limit cuts is dropped
                yield text
            if self._left() == 0:
                return

    def _or_skip(self, found: bytes | BadInput) -> bytes:
        """Return a text as UTF-8. Return b"" for one to skip, and count it."""
        if isinstance(found, BadInput):
            if self._on_bad_input == "refuse":
                raise UserError(f"{found.where}: {found.kind}. Mend it, or leave such input out: on_bad_input = skip")
            self.tally.skipped[found.kind] += 1
            return b""
        if not found:
            self.tally.skipped[EMPTY] += 1
        return found

    def _left(self) -> int | None:
        """Bytes left until max_text_bytes."""
        return None if self._max_text_bytes is None else self._max_text_bytes - self.tally.text_bytes


def read_file(file: InputFile, field: str) -> Iterator[bytes | BadInput]:
    """Yield the texts of one file as UTF-8, and a `BadInput` in place of what is not text.

    Raises: UserError if the file cannot be read or decompressed, or does not have `field`.
    """
    read: Callable[[BinaryIO, str, str], Iterator[bytes | BadInput]]
    read = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".parquet": _read_parquet}.get(file.suffix, _read_text)
    with _opened(file) as stream:
        yield from read(stream, file.name, field)


@contextmanager
def _opened(file: InputFile) -> Iterator[BinaryIO]:
    zstd_error = _zstandard().ZstdError if file.compression == ".zst" else zlib.error
    try:
        with ExitStack() as stack:
            yield _decompressed(stack.enter_context(file.fs.open(file.path, "rb")), file.compression)
    except (OSError, EOFError, zlib.error, zstd_error) as error:
        raise UserError(
            f"{file.name}: cannot be read ({error or type(error).__name__}). Check the file and your rights to it, or "
            "leave it out of `input`"
        ) from None


def _decompressed(stream: Any, compression: str) -> BinaryIO:
    if compression == ".gz":
        return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
    if compression == ".zst":
        return io.BufferedReader(_zstandard().ZstdDecompressor().stream_reader(stream, read_across_frames=True))
    return stream


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise missing_extra("zstandard", "zstd", "Reading .zst files") from None
    return zstandard


def _read_text(stream: BinaryIO, name: str, field: str) -> Iterator[bytes | BadInput]:
    data = stream.read().removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write before UTF-8
    try:
        data.decode()
    except UnicodeDecodeError as error:
        yield BadInput(BROKEN_UTF8, f"{name}, byte {error.start}")
    else:
        yield data


def _read_jsonl(stream: BinaryIO, name: str, field: str) -> Iterator[bytes | BadInput]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield _record_text(line, f"{name}, line {number}", field)


def _record_text(line: bytes, where: str, field: str) -> bytes | BadInput:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadInput(BROKEN_UTF8, f"{where}, byte {error.start} of the line")
    except (json.JSONDecodeError, RecursionError) as error:
        return BadInput(BROKEN_JSON, f"{where} ({error})")
    if not isinstance(record, dict):
        return BadInput(NOT_TEXT, f"{where} (a {type(record).__name__}, not a record)")
    if field not in record:
        raise UserError(
            f"{where}: no field {field!r}; the record has {', '.join(map(repr, record)) or 'none'}. Set `field` to the "
            "one that holds the text"
        )
    return _field_text(record[field], f"{where}, field {field!r}")


def _field_text(value: Any, where: str) -> bytes | BadInput:
    if not isinstance(value, str | None):
        return BadInput(NOT_TEXT, f"{where} (a {type(value).__name__})")
    try:
        return (value or "").encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which is no character
        return BadInput(BROKEN_UTF8, f"{where} (half of a surrogate pair)")


def _read_parquet(stream: BinaryIO, name: str, field: str) -> Iterator[bytes | BadInput]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing_extra("pyarrow", "parquet", f"Reading {name}") from None
    try:
        table = pq.ParquetFile(stream if stream.seekable() else io.BytesIO(stream.read()))
        _check_column(table.schema_arrow, name, field)
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            for data in batch.column(0).cast(pa.binary()).to_pylist():
                yield _checked(data or b"", f"{name}, row {row}")
                row += 1
    except pa.ArrowInvalid as error:
        raise UserError(f"{name}: not a Parquet file ({error}). Restore it, or leave it out of `input`") from None


def _check_column(schema: Any, name: str, field: str) -> None:
    import pyarrow.types as kinds

    if field not in schema.names:
        raise UserError(
            f"{name}: no column {field!r}; the file has {', '.join(map(repr, schema.names))}. Set `field` to the one "
            "that holds the text"
        )
    kind = schema.field(field).type
    if not (kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_binary(kind)):
        raise UserError(f"{name}: column {field!r} holds {kind}, not text. Set `field` to the one that holds the text")


def _checked(data: bytes, where: str) -> bytes | BadInput:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return BadInput(BROKEN_UTF8, f"{where}, byte {error.start} of the text")
    return data

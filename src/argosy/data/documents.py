"""Read documents from input files: plain text, JSONL, Parquet. Unreadable input is counted and reported.

A document is a file of plain text (which is read at once), a JSONL record or a Parquet row. Nothing is read into memory
whose size only shows once it is unpacked: `most_bytes` is the limit.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from argosy.config.schema import PrepareConfig
from argosy.data.sources import InputFile
from argosy.errors import UserError, missing_extra

EMPTY = "empty document"
BROKEN_UTF8 = "broken UTF-8"
BROKEN_JSON = "broken JSON"
NOT_TEXT = "not text"
NO_FIELD = "no such field"
MOST_WITHOUT_FIELD = 1000
"""A file whose first records, so many, all lack the field is not read to its end: the field's name is wrong."""
MAX_DOCUMENT_BYTES: int = PrepareConfig.model_fields["max_document_bytes"].default
CHUNK_BYTES = 2**20
"""Bytes that are read at once."""
ROWS_AT_ONCE = 1024
"""Most rows of a Parquet file that are unpacked at once."""
MOST_TIMES_SMALLER = 100
"""Text is hardly ever compressed to less than a hundredth."""


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
        max_document_bytes: longest document that is read; a longer one raises UserError.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        field: str,
        on_bad_input: Literal["skip", "refuse"] = "skip",
        max_text_bytes: int | None = None,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
    ):
        self._files, self._field, self._on_bad_input = files, field, on_bad_input
        self._max_text_bytes, self._max_document_bytes = max_text_bytes, max_document_bytes
        self.tally = Tally()
        """Counts up to the document that was read last."""
        self.files_read = 0
        """Files up to that document's; those after max_text_bytes are not read."""
        self.first_bad: BadInput | None = None
        """The first input that was skipped; None if it was empty, or all was good."""

    def read(self, start: InputPosition) -> Iterator[Document]:
        """Yield the documents from `start` on."""
        self.tally, self.files_read = start.before.copy(), start.file
        for file in range(start.file, len(self._files)):
            if self._left() == 0:
                return
            self.files_read = file + 1
            before = self.tally.copy()
            for number, text in enumerate(self._texts(self._files[file])):
                if file > start.file or number >= start.number:
                    yield Document(text, InputPosition(file, number, before))

    def _texts(self, file: InputFile) -> Iterator[str]:
        """Yield the readable texts of a file; end where max_text_bytes is reached."""
        for found in read_file(file, self._field, self._max_document_bytes):
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
                raise UserError(f"{found.where}: {found.kind}. Mend it, or leave such input out: on_bad_input = skip.")
            self.tally.skipped[found.kind] += 1
            self.first_bad = self.first_bad or found
            return b""
        if not found:
            self.tally.skipped[EMPTY] += 1
        return found

    def _left(self) -> int | None:
        """Bytes left until max_text_bytes."""
        return None if self._max_text_bytes is None else self._max_text_bytes - self.tally.text_bytes


def read_file(file: InputFile, field: str, most_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[bytes | BadInput]:
    """Yield the texts of one file as UTF-8, and a `BadInput` in place of what is not text.

    most_bytes: the longest document; a file of text that is not compressed may have the size that it shows.
    Raises: UserError if the file cannot be read or decompressed, has a longer document, or does not have `field` at all
    (a Parquet file without the column, the first MOST_WITHOUT_FIELD records without the field).
    """
    if file.texts is not None:
        yield from _own_texts(file, file.texts(), most_bytes)
        return
    with _opened(file) as stream:
        if file.suffix in (".jsonl", ".ndjson"):
            yield from _read_jsonl(stream, file.name, field, most_bytes)
        elif file.suffix == ".parquet":
            yield from _read_parquet(stream, file.name, field, most_bytes)
        else:
            shown = 0 if file.compression else file.size or 0
            yield from _read_text(stream, file.name, max(most_bytes, shown))


def _own_texts(file: InputFile, texts: Iterable[str], most_bytes: int) -> Iterator[bytes | BadInput]:
    for number, text in enumerate(texts):
        data = _field_text(text, f"{file.name}, document {number}")
        if not isinstance(data, BadInput) and len(data) > most_bytes:
            raise _too_long(f"{file.name}, document {number}", most_bytes)
        yield data


@contextmanager
def _opened(file: InputFile) -> Iterator[BinaryIO]:
    zstd_error = _zstandard().ZstdError if file.compression == ".zst" else zlib.error
    try:
        with ExitStack() as stack:
            yield _decompressed(stack.enter_context(file.fs.open(file.path, "rb")), file.compression)
    except (OSError, EOFError, zlib.error, zstd_error) as error:
        raise UserError(
            f"{file.name}: cannot be read ({error or type(error).__name__}). Check the file and your rights to it, or "
            "leave it out of `input`."
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


def _read_text(stream: BinaryIO, name: str, most_bytes: int) -> Iterator[bytes | BadInput]:
    data = _read_all(stream, name, most_bytes).removeprefix(
        b"\xef\xbb\xbf"
    )  # the byte order mark that some editors write before UTF-8
    try:
        data.decode()
    except UnicodeDecodeError as error:
        yield BadInput(BROKEN_UTF8, f"{name}, byte {error.start}")
    else:
        yield data


def _read_all(stream: BinaryIO, name: str, most_bytes: int) -> bytes:
    data = io.BytesIO()
    while chunk := stream.read(CHUNK_BYTES):
        if data.tell() + len(chunk) > most_bytes:
            raise _too_long(name, most_bytes)
        data.write(chunk)
    return data.getvalue()


def _too_long(where: str, most_bytes: int) -> UserError:
    return UserError(
        f"{where}: a document of more than max_document_bytes = {most_bytes} bytes. Cut it into documents, or raise "
        "max_document_bytes if the file is what it should be: a small file may unpack to any size."
    )


def _read_jsonl(stream: BinaryIO, name: str, field: str, most_bytes: int) -> Iterator[bytes | BadInput]:
    without: int | None = 0  # records without the field, as long as there was no other
    for number, line in enumerate(_lines(stream, name, most_bytes), 1):
        if not line.strip():
            continue
        found = _record_text(line, f"{name}, line {number}", field)
        if without is not None:
            without = without + 1 if isinstance(found, BadInput) and found.kind == NO_FIELD else None
        if without == MOST_WITHOUT_FIELD and isinstance(found, BadInput):
            raise UserError(
                f"{found.where}: {NO_FIELD}, nor in any record before. Set `field` to the one with the text"
            )
        yield found


def _lines(stream: BinaryIO, name: str, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines. Not the stream's own iterator: that reads a line without end until memory is full."""
    number, begun = 1, bytearray()
    while chunk := stream.read(CHUNK_BYTES):
        first, *others = chunk.split(b"\n")
        begun += first
        if others:
            yield bytes(begun)
            yield from others[:-1]
            number += len(others)
            begun = bytearray(others[-1])
        if len(begun) > most_bytes:
            raise _too_long(f"{name}, line {number}", most_bytes)
    if begun:
        yield bytes(begun)


def _record_text(line: bytes, where: str, field: str) -> bytes | BadInput:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadInput(BROKEN_UTF8, f"{where}, byte {error.start} of the line")
    except (ValueError, RecursionError) as error:  # Python reads no number of more than 4,300 digits
        return BadInput(BROKEN_JSON, f"{where} ({error})")
    if not isinstance(record, dict):
        return BadInput(NOT_TEXT, f"{where} (a {type(record).__name__}, not a record)")
    if field not in record:
        return BadInput(NO_FIELD, f"{where}, field {field!r} (the record has {_listed(record)})")
    return _field_text(record[field], f"{where}, field {field!r}")


def _listed(record: dict[str, Any]) -> str:
    """Return the names of a record's fields, a bounded part of them."""
    names = ", ".join(repr(name[:40]) for name in list(record)[:10]) or "none"
    return f"{names}, ..." if len(record) > 10 else names


def _field_text(value: Any, where: str) -> bytes | BadInput:
    if not isinstance(value, str | None):
        return BadInput(NOT_TEXT, f"{where} (a {type(value).__name__})")
    try:
        return (value or "").encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which is no character
        return BadInput(BROKEN_UTF8, f"{where} (half of a surrogate pair)")


def _read_parquet(stream: BinaryIO, name: str, field: str, most_bytes: int) -> Iterator[bytes | BadInput]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing_extra("pyarrow", "parquet", f"Reading {name}") from None
    try:
        table = pq.ParquetFile(stream if stream.seekable() else io.BytesIO(_read_all(stream, name, most_bytes)))
        _check_column(table.schema_arrow, name, field)
        row = 0
        for group in range(table.num_row_groups):
            rows = _rows_at_once(table.metadata.row_group(group), name, row, field, most_bytes)
            for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=[field]):
                for data in batch.column(0).cast(pa.binary()).to_pylist():
                    if data and len(data) > most_bytes:
                        raise _too_long(f"{name}, row {row}", most_bytes)
                    yield _checked(data or b"", f"{name}, row {row}")
                    row += 1
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{name}: not a Parquet file ({error}). Restore it, or leave it out of `input`.") from None


def _rows_at_once(group: Any, name: str, row: int, field: str, most_bytes: int) -> int:
    """Return how many rows of a row group, whose first is `row`, to unpack at once.

    Each value of a column may be as long as all that is stored of it, since a dictionary stores what is repeated once.
    Raises: UserError if a page of the group unpacks to more than `most_bytes`, out of far fewer bytes.
    """
    columns = [group.column(number) for number in range(group.num_columns)]
    unpacked = max((c.total_uncompressed_size for c in columns if c.path_in_schema == field), default=0)
    stored = max((c.total_compressed_size for c in columns if c.path_in_schema == field), default=0)
    if unpacked > most_bytes and unpacked > MOST_TIMES_SMALLER * stored:
        raise _too_long(f"{name}, row group from row {row}: {stored} bytes that unpack to {unpacked}", most_bytes)
    return int(min(ROWS_AT_ONCE, max(1, most_bytes // max(unpacked, 1))))


def _check_column(schema: Any, name: str, field: str) -> None:
    import pyarrow.types as kinds

    if field not in schema.names:
        raise UserError(
            f"{name}: no column {field!r}; the file has {', '.join(map(repr, schema.names))}. Set `field` to the one "
            "that holds the text."
        )
    kind = schema.field(field).type
    if not (kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_binary(kind)):
        raise UserError(f"{name}: column {field!r} holds {kind}, not text. Set `field` to the one that holds the text.")


def _checked(data: bytes, where: str) -> bytes | BadInput:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return BadInput(BROKEN_UTF8, f"{where}, byte {error.start} of the text")
    return data

"""The formats of input files: plain text, JSONL, Parquet.

A document is a file of plain text (which is read at once), a JSONL record or a Parquet row. Nothing is read into memory
whose size only shows once it is unpacked: `most_bytes` is the limit.
"""

from __future__ import annotations

import io
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, cast

from argosy.config.data import PrepareConfig
from argosy.data.compressed import DECOMPRESS_BYTES, decompressed, zstandard
from argosy.data.conversations import BadRecord, Record, names_in, without_nulls
from argosy.data.sources import OF_CONVERSATIONS, InputFile
from argosy.errors import UserError, a_kind, imported

EMPTY = "empty document"
BROKEN_UTF8 = "broken UTF-8"
BROKEN_JSON = "broken JSON"
NOT_TEXT = "not text"
NO_FIELD = "no such field"
MOST_WITHOUT_FIELD = 1000
"""A file whose first records, so many, all lack the field is not read to its end: the field's name is wrong."""
MAX_DOCUMENT_BYTES: int = PrepareConfig.model_fields["max_document_bytes"].default
FIRST_LINE_BYTES = 16 * 2**20
"""Bytes of a .json file in which its first line is looked for."""
UNPACKED_ROWS = 1024
"""Most rows of a Parquet file that are unpacked at once."""
MOST_COUNTED_BYTES = 64 * 2**20
"""Bytes before a part of a file in which lines are counted to say where something is wrong in the part."""
MOST_TIMES_SMALLER = 100
"""Text is hardly ever compressed to less than a hundredth."""
VALUE_BYTES = 8
"""Memory of a value of a list, at least; a Parquet file stores any number of equal ones in a few bytes."""


Span = tuple[int, int | None]
"""A part of a file: where it begins, and where it ends; None: at the end of the file."""
WHOLE_FILE: Span = (0, None)


class RecordFields(NamedTuple):
    """The fields or columns that are read."""

    text: str
    url: str = ""
    """"": none."""
    document_of: Callable[[Record], str] | None = None
    """The function that makes the document of a whole record, or raises BadRecord; None: it is the text field."""


class Text(NamedTuple):
    """A text as it was found."""

    data: bytes
    """UTF-8."""
    url: str = ""
    """The place that it is from, if its record names one."""


@dataclass(frozen=True)
class BadInput:
    """Input that is not text."""

    kind: str
    where: str


def read_file(
    file: InputFile, fields: RecordFields, most_bytes: int = MAX_DOCUMENT_BYTES, within: Span = WHOLE_FILE
) -> Iterator[Text | BadInput]:
    """Yield the texts of one file, and a `BadInput` in place of what is not text.

    most_bytes: the longest document; a file of text that is not compressed may have the size that it shows.
    within: the lines or row groups that begin at these of the file's bytes.
    With `fields.document_of`, only records are read.
    Raises: UserError if the file cannot be read or decompressed, has a longer document, or does not have `field` at all
    (a Parquet file without the column, the first MOST_WITHOUT_FIELD records without the field).
    """
    if fields.document_of is not None and (file.texts is not None or file.suffix not in OF_CONVERSATIONS):
        raise UserError(
            f"{file.name}: conversations are read from .jsonl, .json and .parquet. Leave it out of `input`."
        )
    if file.texts is not None:
        yield from _user_texts(file, file.texts(), most_bytes)
        return
    with _opened(file, is_whole=within == WHOLE_FILE and file.suffix != ".parquet") as stream:
        if file.suffix in (".jsonl", ".ndjson"):
            yield from _read_jsonl(stream, file.name, fields, most_bytes, within)
        elif file.suffix == ".parquet":
            is_seekable = file.is_seekable and stream.seekable()
            table = stream if is_seekable else io.BytesIO(_read_all(stream, file.name, most_bytes))
            yield from _read_parquet(table, file.name, fields, most_bytes, within)
        else:
            shown = 0 if file.compression else file.size or 0
            if fields.document_of is not None:
                yield from _read_json(stream, file.name, fields, max(most_bytes, shown))
                return
            begun, has_records = _begun(stream, fields) if file.suffix == ".json" else (stream, False)
            if has_records:
                yield from _read_jsonl(begun, file.name, fields, most_bytes, WHOLE_FILE)
            else:
                yield from _read_text(begun, file.name, max(most_bytes, shown))


def _user_texts(file: InputFile, texts: Iterable[str], most_bytes: int) -> Iterator[Text | BadInput]:
    for number, text in enumerate(texts):
        found = _field_text(text, f"{file.name}, document {number}")
        if isinstance(found, Text) and len(found.data) > most_bytes:
            raise _too_long(f"{file.name}, document {number}", most_bytes)
        yield found


@contextmanager
def _opened(file: InputFile, is_whole: bool) -> Iterator[BinaryIO]:
    """Open a file, unpacked; is_whole: to read it to its end, which must not come early."""
    zstd_error = zstandard().ZstdError if file.compression == ".zst" else zlib.error
    remote_error = zlib.error if "file" in file.fs.protocol else Exception  # each remote file system has its own
    options = {} if file.is_seekable else {"block_size": 0}  # fsspec would ask an http server for parts
    try:
        with ExitStack() as stack:
            stored = stack.enter_context(file.fs.open(file.path, "rb", **options))
            yield decompressed(stored, file.compression)
            if file.compression and file.size == 0:
                raise EOFError("it is empty, which no compressed file is")
            if is_whole and (read := stored.tell()) < (file.size or 0):
                raise EOFError(f"it ended after {read} of its {file.size} bytes")
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, zstd_error, remote_error) as error:
        raise UserError(
            f"{file.name}: cannot be read ({error or type(error).__name__}). Check the file and your rights to it, or "
            "leave it out of `input`."
        ) from None


def _begun(stream: BinaryIO, fields: RecordFields) -> tuple[BinaryIO, bool]:
    """Return a stream with all of `stream`, and whether its first line is a record with text: C4 and Dolma call files
    of records .json. The other files of that name are code."""
    pieces, size = list[bytes](), 0
    while size < FIRST_LINE_BYTES and (piece := stream.read(DECOMPRESS_BYTES)):
        pieces.append(piece)
        size += len(piece)
        if b"\n" in piece:
            break
    line = b"".join(pieces).partition(b"\n")[0].removeprefix(BOM_UTF8)
    all_of_it = chain(pieces, iter(lambda: stream.read(DECOMPRESS_BYTES), b""))
    again = SimpleNamespace(read=lambda count: next(all_of_it, b""))
    return cast("BinaryIO", again), isinstance(_record_text(line, fields), Text)


def _read_json(stream: BinaryIO, name: str, fields: RecordFields, most_bytes: int) -> Iterator[Text | BadInput]:
    """Yield the documents of a .json: of an array of records, as Alpaca's and ShareGPT's are, or of a record a line."""
    assert fields.document_of is not None
    data = _read_all(stream, name, most_bytes).removeprefix(BOM_UTF8)
    if not data.lstrip().startswith(b"["):
        yield from _read_jsonl(cast("BinaryIO", io.BytesIO(data)), name, fields, most_bytes, WHOLE_FILE)
        return
    records = _loaded(data, "file")
    if isinstance(records, BadInput):
        yield BadInput(records.kind, f"{name}{records.where}")
        return
    for number, record in enumerate(records, 1):
        where = f"{name}, record {number}"
        if isinstance(record, dict):
            yield _document(record, where, fields.document_of)
        else:
            yield BadInput(NOT_TEXT, f"{where} ({a_kind(record)}, not a record)")


def _read_text(stream: BinaryIO, name: str, most_bytes: int) -> Iterator[Text | BadInput]:
    data = _read_all(stream, name, most_bytes)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        yield BadInput(BROKEN_UTF8, f"{name}, byte {error.start}")
    else:
        yield Text(data.removeprefix(BOM_UTF8))


def _read_all(stream: BinaryIO, name: str, most_bytes: int) -> bytes:
    data = io.BytesIO()
    while chunk := stream.read(DECOMPRESS_BYTES):
        if data.tell() + len(chunk) > most_bytes:
            raise _too_long(name, most_bytes)
        data.write(chunk)
    return data.getvalue()


def _too_long(where: str, most_bytes: int) -> UserError:
    return UserError(
        f"{where}: a document of more than max_document_bytes = {most_bytes} bytes. Cut it into documents, or raise "
        "max_document_bytes if the file is what it should be: a small file may unpack to any size."
    )


def _read_jsonl(
    stream: BinaryIO, name: str, fields: RecordFields, most_bytes: int, within: Span
) -> Iterator[Text | BadInput]:
    without: int | None = 0 if within[0] == 0 else None  # records without the field, as long as there was no other
    line_name = _line_names(stream, name, within[0])
    for number, raw in enumerate(_lines_within(stream, line_name, most_bytes, within), 1):
        line = raw.removeprefix(BOM_UTF8)  # also amid a file that was put together of several
        if not line.strip():
            continue
        found = _record_text(line, fields)
        if isinstance(found, BadInput):
            found = BadInput(found.kind, f"{line_name(number)}{found.where}")
        if without is not None:
            without = without + 1 if isinstance(found, BadInput) and found.kind == NO_FIELD else None
        if without == MOST_WITHOUT_FIELD and isinstance(found, BadInput):
            raise UserError(
                f"{found.where}: {NO_FIELD}, nor in any record before. Set `field` to the one with the text"
            )
        yield found


LineName = Callable[[int], str]
"""Names a line for messages, given its number among those that begin in a part of a file; 0: the one before them."""


def _line_names(stream: BinaryIO, name: str, start: int) -> LineName:
    """Return what names the lines of the part from byte `start` on; the lines before it are counted once."""
    before = cache(partial(_lines_before, stream, start))

    def line_name(number: int) -> str:
        if start > MOST_COUNTED_BYTES:
            return f"{name}, line {number} after byte {start}"
        return f"{name}, line {before() + number if start else number}"

    return line_name


def _lines_before(stream: BinaryIO, end: int) -> int:
    """Count the lines that begin before this byte."""
    at, left, lines, last = stream.tell(), end, 0, b"\n"
    stream.seek(0)
    while left and (chunk := stream.read(min(left, DECOMPRESS_BYTES))):
        lines, left, last = lines + chunk.count(b"\n"), left - len(chunk), chunk[-1:]
    stream.seek(at)
    return lines + (last != b"\n")


def _lines_within(stream: BinaryIO, line_name: LineName, most_bytes: int, within: Span) -> Iterator[bytes]:
    """Yield the lines that begin at one of these bytes."""
    start, end = within
    at = max(start - 1, 0)
    if at:
        stream.seek(at)
    lines = text_lines(stream, line_name, most_bytes, 0 if start else 1)
    if start:
        at += len(next(lines, b"")) + 1  # the end of a line of the part before
    for line in lines:
        if end is not None and at >= end:
            return
        at += len(line) + 1
        yield line


def text_lines(stream: BinaryIO, line_name: LineName, most_bytes: int, number: int = 1) -> Iterator[bytes]:
    """Yield the lines; `number`: of the first one.

    Not the stream's own iterator: that reads a line without end until memory is full.
    """
    begun = bytearray()
    while chunk := stream.read(DECOMPRESS_BYTES):
        first, *others = chunk.split(b"\n")
        begun += first
        if others:
            yield bytes(begun)
            yield from others[:-1]
            number += len(others)
            begun = bytearray(others[-1])
        if len(begun) > most_bytes:
            raise _too_long(line_name(number), most_bytes)
    if begun:
        yield bytes(begun)


def _record_text(line: bytes, fields: RecordFields) -> Text | BadInput:
    """Return the text of a record; what is bad is said as it goes on after the line's name."""
    record = _parsed(line)
    if isinstance(record, BadInput):
        return record
    if fields.document_of is not None:
        return _document(record, "", fields.document_of)
    if fields.text not in record:
        return BadInput(NO_FIELD, f", field {fields.text!r} (the record has {names_in(record)})")
    url = record.get(fields.url) if fields.url else None
    return _field_text(record[fields.text], f", field {fields.text!r}", url if isinstance(url, str) else "")


def _parsed(line: bytes) -> Record | BadInput:
    record = _loaded(line, "line")
    if not isinstance(record, dict | BadInput):
        return BadInput(NOT_TEXT, f" ({a_kind(record)}, not a record)")
    return record


def _loaded(text: bytes, name: str) -> Any:
    """Return the value that JSON spells, or what is wrong with it. name: of what the text is, for messages."""
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError as error:
        return BadInput(BROKEN_UTF8, f", byte {error.start} of the {name}")
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        return BadInput(BROKEN_JSON, f"{line}, column {error.colno} ({error.msg})")
    except (ValueError, RecursionError) as error:  # Python reads no number of more than 4,300 digits
        return BadInput(BROKEN_JSON, f" ({error})")


def _document(record: Record, where: str, document_of: Callable[[Record], str]) -> Text | BadInput:
    try:
        return Text(document_of(record).encode())
    except BadRecord as bad:
        return BadInput(bad.kind, f"{where}: {bad.detail}")
    except UnicodeEncodeError:
        return BadInput(BROKEN_UTF8, f"{where} (half of a surrogate pair)")


def _field_text(value: Any, where: str, url: str = "") -> Text | BadInput:
    if not isinstance(value, str | None):
        return BadInput(NOT_TEXT, f"{where} ({a_kind(value)})")
    try:
        return Text((value or "").encode(), url)
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which is no character
        return BadInput(BROKEN_UTF8, f"{where} (half of a surrogate pair)")


def _read_parquet(
    stream: BinaryIO, name: str, fields: RecordFields, most_bytes: int, within: Span
) -> Iterator[Text | BadInput]:
    pa, pq = (imported(module, "parquet", f"Reading {name}") for module in ("pyarrow", "pyarrow.parquet"))
    columns = [column for column in (fields.text, fields.url) if column]
    try:
        table = pq.ParquetFile(stream, page_checksum_verification=True)
        field = fields.text if fields.document_of is None else ""
        groups = _groups_within(table.metadata, name, field, most_bytes, within)
        if fields.document_of is not None:
            yield from _read_rows(table, name, fields.document_of, groups)
            return
        for key, column in zip(("field", "filters.url_field"), columns, strict=False):
            _check_column(table.schema_arrow, name, key, column)
        for group, row, rows in groups:
            for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=columns):
                texts = batch.column(columns[0]).cast(pa.binary()).to_pylist()
                urls = batch.column(fields.url).cast(pa.string()).to_pylist() if fields.url else [""] * len(texts)
                for data, url in zip(texts, urls, strict=True):
                    if data and len(data) > most_bytes:
                        raise _too_long(f"{name}, row {row}", most_bytes)
                    yield _checked(data or b"", f"{name}, row {row}", url or "")
                    row += 1  # noqa: PLW2901  (counts within the group)
    except (pa.ArrowException, ValueError, OverflowError, LookupError) as error:  # dates that Python does not have
        raise UserError(
            f"{name}: cannot be read as Parquet ({error}). Restore it, or leave it out of `input`."
        ) from None


def _read_rows(
    table: Any, name: str, document_of: Callable[[Record], str], groups: Iterator[tuple[int, int, int]]
) -> Iterator[Text | BadInput]:
    for group, row, rows in groups:
        for batch in table.iter_batches(batch_size=rows, row_groups=[group]):
            for record in batch.to_pylist():
                yield _document(without_nulls(record), f"{name}, row {row}", document_of)
                row += 1  # noqa: PLW2901  (counts within the group)


def _groups_within(
    metadata: Any, name: str, field: str, most_bytes: int, within: Span
) -> Iterator[tuple[int, int, int]]:
    """Yield the row groups that begin at one of these bytes of the file, with their first row and `_rows_at_once`."""
    (start, end), row = within, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        column = group.column(0)
        at = column.dictionary_page_offset or column.data_page_offset
        if start <= at and (end is None or at < end):
            yield number, row, _rows_at_once(group, name, row, field, most_bytes)
        row += group.num_rows


def _rows_at_once(group: Any, name: str, row: int, field: str, most_bytes: int) -> int:
    """Return how many rows of a row group, whose first is `row`, to unpack at once. field: "" for all columns.

    Each value of a column may be as long as all that is stored of it, since a dictionary stores what is repeated once.
    The sizes are those that the file's index gives. A page may be larger than that, up to the 2 GB of its own header:
    pyarrow has no limit for it, and Python cannot give it a pool of memory that has one.

    Raises: UserError if a page, or the lists, of the group unpack to more than `most_bytes`, out of far fewer bytes.
    """
    columns = [group.column(number) for number in range(group.num_columns)]
    in_lists = max((c.num_values for c in columns if not field), default=0) - group.num_rows
    held, all_stored = VALUE_BYTES * in_lists, sum(c.total_compressed_size for c in columns)
    if held > most_bytes and held > MOST_TIMES_SMALLER * all_stored:
        raise _too_long(f"{name}, row group from row {row}: {all_stored} bytes with {in_lists} values", most_bytes)
    sizes = [(c.total_uncompressed_size, c.total_compressed_size) for c in columns if field in ("", c.path_in_schema)]
    unpacked, stored = max(sizes, default=(0, 0))
    if unpacked > most_bytes and unpacked > MOST_TIMES_SMALLER * stored:
        raise _too_long(f"{name}, row group from row {row}: {stored} bytes that unpack to {unpacked}", most_bytes)
    return int(min(UNPACKED_ROWS, max(1, most_bytes // max(unpacked, 1))))


def _check_column(schema: Any, name: str, key: str, field: str) -> None:
    import pyarrow.types as kinds

    if field not in schema.names:
        raise UserError(
            f"{name}: no column {field!r}; the file has {', '.join(map(repr, schema.names))}. Set `{key}` to the "
            "one that is meant."
        )
    kind = schema.field(field).type
    values = kind.value_type if kinds.is_dictionary(kind) else kind
    of_text = (kinds.is_string, kinds.is_large_string, kinds.is_string_view)
    if not any(is_kind(values) for is_kind in (*of_text, kinds.is_binary, kinds.is_large_binary, kinds.is_binary_view)):
        raise UserError(f"{name}: column {field!r} holds {kind}, not text. Set `{key}` to one that holds text.")


def _checked(data: bytes, where: str, url: str) -> Text | BadInput:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return BadInput(BROKEN_UTF8, f"{where}, byte {error.start} of the text")
    return Text(data, url)

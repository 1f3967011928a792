"""The documents of the input: its pieces, which are the tasks that workers share, and what is read of each.

The pieces follow from the list of files alone, so every machine and every repetition has the same. What is made of the
input does not depend on them: documents keep the order of the files.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from argosy.config.data import PrepareConfig
from argosy.data.conversations import Record
from argosy.data.filters import Filters
from argosy.data.formats import EMPTY, BadInput, RecordFields, Text, read_file
from argosy.data.sources import RECORDS, InputFile
from argosy.errors import UserError, encodable

DOCUMENTS_PIECE_BYTES = 16 * 2**20
"""Stored bytes of a piece at most: some ten seconds of one core's work, so that little is lost with a worker."""
LEAST_PIECE_BYTES = 2**20
"""Stored bytes of the first pieces: less would cost more to hand out than it is worth."""
MOST_OF_BEFORE = 1 / 16
"""The next ones grow with what is before them: at most this part of it. So workers share a small input evenly, and are
not far ahead of where `max_text_bytes` ends a large one."""
MOST_PIECE_FILES = 1000
"""Files of a piece at most: even empty ones take time to open."""
PLACES_KEPT = 3
"""Places of skipped input that are kept, of each kind."""
MOST_PLACE_CHARS = 300


@dataclass(frozen=True)
class InputPiece:
    """Consecutive files of the input, or a part of one file.

    A part holds the lines, or row groups, that begin at its bytes of the file.
    """

    first: int
    end: int
    """The files `first` to `end` - 1."""
    from_byte: int = 0
    to_byte: int | None = None
    """The bytes at which the part begins and ends; None: at the end of the file."""


def cut_input(files: Sequence[InputFile], most_bytes: int = DOCUMENTS_PIECE_BYTES) -> list[InputPiece]:
    """Return the pieces of `files`, in order, of `most_bytes` or less where files can be divided."""
    pieces: list[InputPiece] = []
    first, held, before = 0, 0, 0  # the files from `first` on, `held` bytes, are in no piece yet
    for number, file in enumerate(files):
        size = file.size
        room = _room(before, most_bytes)
        if number > first and (
            size is None or size >= room or held + size > room or number - first >= MOST_PIECE_FILES
        ):
            pieces.append(InputPiece(first, number))
            first, held, before = number, 0, before + held
            room = _room(before, most_bytes)
        if size is None or size >= room:
            pieces += _parts(number, file, before, most_bytes)
            first, before = number + 1, before + (size or most_bytes)
        else:
            held += size
    if first < len(files):
        pieces.append(InputPiece(first, len(files)))
    return pieces


def _room(before: int, most_bytes: int) -> int:
    """Return the bytes of a piece, given those before it."""
    return min(most_bytes, max(LEAST_PIECE_BYTES, int(before * MOST_OF_BEFORE)))


def _parts(number: int, file: InputFile, before: int, most_bytes: int) -> Iterator[InputPiece]:
    """Yield the pieces of a file that has one or more for itself."""
    at, size = 0, file.size if _is_splittable(file) else None
    while size is not None and (end := at + _room(before + at, most_bytes)) < size:
        yield InputPiece(number, number + 1, at, end)
        at = end
    yield InputPiece(number, number + 1, at)


def _is_splittable(file: InputFile) -> bool:
    """Return True if a worker can read a part of a file."""
    return file.suffix in RECORDS and not file.compression and file.is_seekable and file.texts is None


@dataclass
class Tally:
    """Counts of what was read so far."""

    text_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Input that is no text: kind -> count."""
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Kind -> file and line, or byte, of the first of them."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Text that a filter left out: why -> count."""
    truncated: int = 0
    """Conversations whose last turns were left out."""

    def skip(self, bad: BadInput) -> None:
        """Count input that is skipped."""
        self.skipped[bad.kind] += 1
        known = self.places.get(bad.kind, ())
        if len(known) < PLACES_KEPT:
            self.places[bad.kind] = (*known, encodable(bad.where[:MOST_PLACE_CHARS]))

    def __add__(self, other: Tally) -> Tally:
        kinds = self.places | other.places
        return Tally(
            self.text_bytes + other.text_bytes,
            self.skipped + other.skipped,
            {kind: (*self.places.get(kind, ()), *other.places.get(kind, ()))[:PLACES_KEPT] for kind in kinds},
            self.dropped + other.dropped,
            self.truncated + other.truncated,
        )


@dataclass(frozen=True)
class Document:
    """A text and its place."""

    text: str
    number: int
    """Its number in the piece that is read; what is skipped or dropped counts."""
    file: int
    """The number of its file in the input."""


Drops = Callable[[str, str, int], str]
"""Say why a document is left out, or "" if it is not: its text, its URL, its number in the piece."""


class DocumentReader:
    """Reads the documents of `files` as `config` says, in order; empty ones are left out.

    Args:
        drops: says which documents are left out.
        max_text_bytes: stop after this much UTF-8 text, whatever `config` says; the last document is cut there.
        document_of: makes the document of a record (`formats.RecordFields`).
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        config: PrepareConfig,
        drops: Drops | None,
        max_text_bytes: int | None,
        document_of: Callable[[Record], str] | None = None,
    ):
        self._files, self._config, self._drops = files, config, drops
        self._max_text_bytes, self._document_of = max_text_bytes, document_of
        self.tally = Tally()
        """Counts up to the document that was read last. A caller may replace it, to count anew."""
        self.files_read = 0
        """Files up to that document's; those after max_text_bytes are not read."""
        self.number = 0
        """Texts of the piece that were read, good or not."""

    def read(self, piece: InputPiece | None = None, start: int = 0) -> Iterator[Document]:
        """Yield the documents of a piece (all of the input if there is none), from number `start` on."""
        piece, config = piece or InputPiece(0, len(self._files)), self._config
        url_field = config.filters.url_field if config.filters.blocked_urls else ""
        self.number = 0
        for number_of_file in range(piece.first, piece.end):
            if self._left() == 0:
                return
            self.files_read = number_of_file + 1
            within, file = (piece.from_byte, piece.to_byte), self._files[number_of_file]
            fields = RecordFields(file.field, url_field, self._document_of)
            found = read_file(file, fields, config.max_document_bytes, within)
            for item in found:
                number, self.number = self.number, self.number + 1
                if number >= start and (text := self._text(item, number)):
                    yield Document(text, number, number_of_file)
                if self._left() == 0:
                    return

    def _text(self, found: Text | BadInput, number: int) -> str:
        """Return a text, cut where max_text_bytes is reached; "" for one to leave out, which is counted."""
        if isinstance(found, BadInput):
            if self._config.on_bad_input == "refuse":
                raise refused(found.kind, found.where)
            self.tally.skip(found)
            return ""
        if not found.data:
            self.tally.skipped[EMPTY] += 1
            return ""
        if self._drops is not None and (why := self._drops(found.data.decode(), found.url, number)):
            self.tally.dropped[why] += 1
            return ""
        data = found.data[: self._left()]
        self.tally.text_bytes += len(data)
        return data.decode(errors="ignore")  # a character that the limit cuts is dropped

    def _left(self) -> int | None:
        return None if self._max_text_bytes is None else self._max_text_bytes - self.tally.text_bytes


def refused(kind: str, where: str) -> UserError:
    """Return the error for bad input that is not to be skipped."""
    return UserError(f"{where}: {kind}. Mend it, or leave such input out: on_bad_input = skip.")


FILES = 2_000
"""Maximum number of files that a sample is taken from."""

PIECES = 16
"""Pieces that a sample takes from a long document."""


def sample_texts(files: Sequence[InputFile], config: PrepareConfig, max_chars: int) -> Iterator[str]:
    """Return about `max_chars` characters of the text that `config` prepares, or all of it if it is shorter.

    Each of at most FILES files, evenly chosen, gives the same share; the next files may use what one leaves.
    A file of many documents gives its first ones, a long document PIECES pieces.
    """
    within = _within_limit(files, config.max_text_bytes)
    chosen = within if len(within) <= FILES else [within[i * len(within) // FILES] for i in range(FILES)]
    left, filters = max_chars, Filters(config.filters)
    for number, file in enumerate(chosen):
        share = left // (len(chosen) - number)
        for text in _from_file(file, config, filters, share):
            left -= len(text)
            yield text


def _from_file(file: InputFile, config: PrepareConfig, filters: Filters, share: int) -> Iterator[str]:
    for document in DocumentReader([file], config, filters or None, config.max_text_bytes).read():
        if share <= 0:
            return
        for piece in _pieces(document.text, share):
            share -= len(piece)
            yield piece


def _pieces(text: str, max_chars: int) -> list[str]:
    if len(text) <= max_chars:
        return [text]
    size = max(max_chars // PIECES, 1)
    starts = [i * len(text) // PIECES for i in range(min(PIECES, max_chars))]
    return [text[start : start + size] for start in starts]


def _within_limit(files: Sequence[InputFile], max_bytes: int | None) -> Sequence[InputFile]:
    """Return the first files that hold `max_bytes` of text, as far as their sizes tell."""
    if max_bytes is None:
        return files
    before = itertools.accumulate((file.size or 0 for file in files), initial=0)
    return [file for file, start in zip(files, before, strict=False) if start < max_bytes]

"""Read documents from the pieces of the input. Unreadable input is counted and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from argosy.data.formats import EMPTY, MAX_DOCUMENT_BYTES, BadInput, Fields, Text, read_file
from argosy.data.pieces import InputPiece
from argosy.data.sources import InputFile
from argosy.errors import UserError


@dataclass
class Tally:
    """Counts of what was read so far."""

    text_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Input that is no text: kind -> count."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Text that a filter left out: why -> count."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.text_bytes + other.text_bytes, self.skipped + other.skipped, self.dropped + other.dropped)


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
    """Reads the documents of `files`, in order; empty ones are left out.

    Args:
        files: the input.
        on_bad_input: skip and count unreadable input, or raise UserError at the first.
        max_text_bytes: stop after this much UTF-8 text; the last document is cut there.
        max_document_bytes: longest document that is read; a longer one raises UserError.
        url_field: the field or column with a document's URL; "": none is read.
        drops: says which documents are left out.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        on_bad_input: Literal["skip", "refuse"] = "skip",
        max_text_bytes: int | None = None,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        url_field: str = "",
        drops: Drops | None = None,
    ):
        self._files, self._url_field, self._on_bad_input = files, url_field, on_bad_input
        self._max_text_bytes, self._max_document_bytes = max_text_bytes, max_document_bytes
        self._drops = drops
        self.tally = Tally()
        """Counts up to the document that was read last. A caller may replace it, to count anew."""
        self.files_read = 0
        """Files up to that document's; those after max_text_bytes are not read."""
        self.number = 0
        """Texts of the piece that were read, good or not."""
        self.first_bad: BadInput | None = None
        """The first input that was skipped; None if it was empty, or all was good."""

    def read(self, piece: InputPiece | None = None, start: int = 0) -> Iterator[Document]:
        """Yield the documents of a piece (all of the input if there is none), from number `start` on."""
        piece = piece or InputPiece(0, len(self._files))
        self.number = 0
        for number_of_file in range(piece.first, piece.end):
            if self._left() == 0:
                return
            self.files_read = number_of_file + 1
            within, file = (piece.from_byte, piece.to_byte), self._files[number_of_file]
            found = read_file(file, Fields(file.field, self._url_field), self._max_document_bytes, within)
            for item in found:
                number, self.number = self.number, self.number + 1
                if number >= start and (text := self._text(item, number)):
                    yield Document(text, number, number_of_file)
                if self._left() == 0:
                    return

    def _text(self, found: Text | BadInput, number: int) -> str:
        """Return a text, cut where max_text_bytes is reached; "" for one to leave out, which is counted."""
        if isinstance(found, BadInput):
            if self._on_bad_input == "refuse":
                raise UserError(f"{found.where}: {found.kind}. Mend it, or leave such input out: on_bad_input = skip.")
            self.tally.skipped[found.kind] += 1
            self.first_bad = self.first_bad or found
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
        """Bytes left until max_text_bytes."""
        return None if self._max_text_bytes is None else self._max_text_bytes - self.tally.text_bytes

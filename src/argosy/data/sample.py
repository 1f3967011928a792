"""A bounded sample of the input, spread over it: what a tokenizer is trained on and engines are compared on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from argosy.config.schema import PrepareConfig
from argosy.data.documents import DocumentReader, Position
from argosy.data.sources import InputFile

FILES = 2_000
"""Most files that a sample is taken from."""

PIECES = 16
"""Into how many places of a long document a sample looks."""


def sample_texts(files: Sequence[InputFile], config: PrepareConfig, max_chars: int) -> Iterator[str]:
    """About `max_chars` characters of the text that `config` prepares, or all of it if it is no more.

    Takes the same share from each of at most FILES files, evenly chosen; what one does not use, the next ones may.
    A file of many documents gives its first ones, a long document PIECES pieces.
    """
    chosen = _evenly(_within_limit(files, config.max_text_bytes), FILES)
    left = max_chars
    for number, file in enumerate(chosen):
        share = left // (len(chosen) - number)
        for text in _from_file(file, config, share):
            left -= len(text)
            yield text


def _from_file(file: InputFile, config: PrepareConfig, share: int) -> Iterator[str]:
    reader = DocumentReader([file], config.field, config.on_bad_input, config.max_text_bytes)
    for document in reader.read(Position()):
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
    """The files that `max_bytes` of text can reach into, as far as their sizes tell."""
    if max_bytes is None:
        return files
    before = itertools.accumulate((file.size or 0 for file in files), initial=0)
    return [file for file, start in zip(files, before, strict=False) if start < max_bytes]


def _evenly(files: Sequence[InputFile], n: int) -> Sequence[InputFile]:
    if len(files) <= n:
        return files
    return [files[i * len(files) // n] for i in range(n)]

"""A bounded sample, spread over the input, to train a tokenizer and to compare engines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from argosy.config.data import PrepareConfig
from argosy.data.documents import DocumentReader
from argosy.data.filters import Filters
from argosy.data.sources import InputFile

FILES = 2_000
"""Maximum number of files that a sample is taken from."""

PIECES = 16
"""Pieces that a sample takes from a long document."""


def sample_texts(files: Sequence[InputFile], config: PrepareConfig, max_chars: int) -> Iterator[str]:
    """Return about `max_chars` characters of the text that `config` prepares, or all of it if it is shorter.

    Each of at most FILES files, evenly chosen, gives the same share; the next files may use what one leaves.
    A file of many documents gives its first ones, a long document PIECES pieces.
    """
    chosen = _evenly(_within_limit(files, config.max_text_bytes), FILES)
    left, filters = max_chars, Filters(config.filters)
    for number, file in enumerate(chosen):
        share = left // (len(chosen) - number)
        for text in _from_file(file, config, filters, share):
            left -= len(text)
            yield text


def _from_file(file: InputFile, config: PrepareConfig, filters: Filters, share: int) -> Iterator[str]:
    url_field = config.filters.url_field if config.filters.blocked_urls else ""
    reader = DocumentReader(
        [file],
        config.on_bad_input,
        config.max_text_bytes,
        config.max_document_bytes,
        url_field,
        filters or None,
    )
    for document in reader.read():
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


def _evenly(files: Sequence[InputFile], n: int) -> Sequence[InputFile]:
    if len(files) <= n:
        return files
    return [files[i * len(files) // n] for i in range(n)]

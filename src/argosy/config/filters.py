"""The table `data.prepare.filters`: which documents of the input are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from argosy.config.section import Section

Threshold = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Few = Annotated[int, Field(ge=1, le=1000)]


class FiltersConfig(Section):
    """Documents that are left out, before any of them becomes tokens. All but the length needs argosy[filters]."""

    languages: tuple[str, ...] = ()
    """Languages to keep, by their ISO 639-1 codes (en, de); empty: all."""
    language_score: Threshold = 0.65
    """Least probability of the language that a document seems to be in."""
    min_chars: Count = 0
    """Least length of a document in characters."""
    max_chars: Count = 0
    """Largest length of a document in characters; 0: any."""
    repetition: bool = False
    """Leave out documents that repeat lines, paragraphs or n-grams (Rae et al. 2021, Gopher, table A1)."""
    quality: bool = False
    """Leave out what is not prose in English: word count and length, symbols, stop words (Gopher, appendix A)."""
    blocked_urls: str = ""
    """A file with a domain or a URL on each line, whose documents are left out; datatrove: the lists that it has."""
    url_field: str = "url"
    """Field of a JSONL record, or column of a Parquet file, with the document's URL; read if blocked_urls is given."""
    blocked_words: Path | None = None
    """A file with a word or phrase on each line; documents with one of them are left out."""
    duplicates: Literal["keep", "drop_exact", "drop_near"] = "keep"
    """Leave out a document if the same (drop_exact), or one much like it (drop_near, MinHash), came before it."""
    ngram: Few = 5
    """drop_near: words of an n-gram; documents are alike if they share n-grams."""
    buckets: Few = 14
    """drop_near: buckets of the signature; two documents are alike if one bucket is the same."""
    bucket_hashes: Few = 8
    """drop_near: hashes of a bucket. Of pairs with similarity s, the share 1 - (1 - s^bucket_hashes)^buckets is found:
    92 % at 0.8, 56 % at 0.7, as it is."""

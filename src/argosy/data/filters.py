"""Rules by which documents are left out: language, length, repetition, quality, lists of URLs and words, duplicates.

The rules are datatrove's, applied to one document at a time, without its pipelines; the language is py3langid's, whose
model is in its package. Both are deterministic.

Duplicates are documents that came before: the same text, or one much like it (MinHash; Broder 1997). A document has
keys: the hash of its text, and one for each bucket of its signature. It is left out if a document before it in the
input has one of its keys. So what stays does not depend on who compares what: keys are sorted, in parts that fit into
memory, and in each run of equal keys all but the first are marked.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.config.data import FiltersConfig
from argosy.data.gopher import (
    FILTERS_EXTRA,
    SINGLE_CHARACTER_WORDS,
    Rule,
    imported,
    of_datatrove,
    quality,
    repetition,
    word_tokenizer,
)
from argosy.data.languages import language_identifier
from argosy.errors import UserError, missing_extra
from argosy.files import read_at_most

OWN_LISTS = "datatrove"
"""The value of `blocked_urls` that means the lists in datatrove's package."""
MOST_LIST_BYTES = 256 * 2**20
"""No list of URLs or words is larger."""


class Filters:
    """The rules of a table, applied in the order of their cost; the first that leaves a document out is counted.

    Raises: UserError if a package is missing, a list cannot be read, or a language is unknown.
    """

    def __init__(self, config: FiltersConfig):
        self._rules: list[Rule] = []
        if config.min_chars or config.max_chars:
            self._rules.append(_length(config.min_chars, config.max_chars))
        if config.blocked_urls:
            self._rules.append(_urls(config.blocked_urls))
        if config.blocked_words:
            self._rules.append(_words(config.blocked_words))
        if config.languages:
            self._rules.append(_language(config.languages, config.language_score))
        if config.repetition:
            self._rules.append(repetition())
        if config.quality:
            self._rules.append(quality())

    def __bool__(self) -> bool:
        return bool(self._rules)

    def __call__(self, text: str, url: str, number: int = 0) -> str:
        """Return why a document is left out, or "". `number` does not matter."""
        return next((why for rule in self._rules if (why := rule(text, url))), "")


def absolute(config: FiltersConfig) -> FiltersConfig:
    """Return the table with paths that hold on every machine."""
    urls, words = config.blocked_urls, config.blocked_words
    return config.model_copy(
        update={
            "blocked_urls": urls if urls in ("", OWN_LISTS) else str(Path(urls).absolute()),
            "blocked_words": words and words.absolute(),
        }
    )


def list_checksums(config: FiltersConfig) -> dict[str, str]:
    """Return the SHA-256 of each list, since the result depends on what it holds. Raises: UserError."""
    lists = [("blocked_urls", config.blocked_urls), ("blocked_words", config.blocked_words)]
    return {
        key: hashlib.sha256(_read(key, Path(path))).hexdigest() for key, path in lists if path and path != OWN_LISTS
    }


def _length(least: int, most: int) -> Rule:
    def rule(text: str, url: str) -> str:
        if len(text) < least:
            return "too short"
        return "too long" if most and len(text) > most else ""

    return rule


def _language(languages: tuple[str, ...], least: float) -> Rule:
    identifier = language_identifier(imported("py3langid.langid"))
    known = sorted(str(label) for label in identifier.labels)
    if wrong := [language for language in languages if language not in known]:
        raise UserError(
            f"filters.languages = {wrong[0]!r}: not one of the codes that are told apart: {' '.join(known)}."
        )

    def rule(text: str, url: str) -> str:
        language, score = identifier.classify(text)
        if language not in languages:
            return "language"
        return "language: not sure" if score < least else ""

    return rule


def _urls(path: str) -> Rule:
    module = of_datatrove("filters.url_filter")
    tldextract = imported("tldextract")
    lines = [] if path == OWN_LISTS else [_with_lower_host(line) for line in _lines("blocked_urls", Path(path))]
    try:
        urls = module.URLFilter(
            extra_domains=[line for line in lines if "/" not in line],
            extra_urls=[line for line in lines if "/" in line],
            use_integrated_lists=path == OWN_LISTS,
        )
    except ImportError:
        raise missing_extra("tldextract, fasteners, pyahocorasick", FILTERS_EXTRA, "filters.blocked_urls") from None
    urls.tldextractor = tldextract.TLDExtract(suffix_list_urls=())  # the list in its package: no network
    document = imported("datatrove.data").Document

    def rule(text: str, url: str) -> str:
        if not url:
            return ""
        found = urls.filter(document(text="", id="", metadata={"url": _with_lower_host(url)}))
        return "" if found is True else f"URL: {found[1].replace('_', ' ')}"

    return rule


def _with_lower_host(url: str) -> str:
    """Return a URL, or a domain, as lists have it: names of hosts may be in upper case, paths differ by it."""
    return re.sub(r"^(\w+://)?[^/?#]*", lambda found: found[0].lower(), url)


def _words(path: Path) -> Rule:
    """Return the rule of a list. Phrases are looked for whose first word is in a document: a pattern of all of them
    would be tried one by one at each of its characters."""
    regex = imported("regex")
    words_in, phrases = regex.compile(r"\w+"), dict[str, list[str]]()
    for phrase in sorted(set(_lines("blocked_words", path))):
        first = words_in.search(_folded(phrase))
        phrases.setdefault(first[0] if first else "", []).append(regex.escape(phrase))

    @cache
    def pattern(first: str) -> Any:
        return regex.compile(rf"(?i)(?<!\w)(?:{'|'.join(phrases[first])})(?!\w)")

    def rule(text: str, url: str) -> str:
        found = phrases.keys() & {"", *words_in.findall(_folded(text))}
        return "word" if any(pattern(first).search(text) for first in found) else ""

    return rule


def _folded(text: str) -> str:
    """Return a text in which letters are the same that differ by their case, as `regex` has it."""
    return text.replace("İ", "i").replace("ı", "i").casefold()


def _lines(key: str, path: Path) -> Iterator[str]:
    """Yield the lines of a list that are not empty and no comments. Raises: UserError if there are none."""
    try:
        lines = [line.strip() for line in _read(key, path).decode().splitlines()]
    except UnicodeDecodeError as error:
        raise UserError(f"filters.{key} = {path}: not text in UTF-8 ({error}). Name a file with one a line.") from None
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise UserError(
            f"filters.{key} = {path}: the list is empty. Name a file with one a line, or leave the key out."
        )
    yield from found


def _read(key: str, path: Path) -> bytes:
    try:
        return read_at_most(path, MOST_LIST_BYTES)
    except OSError as error:
        raise UserError(f"filters.{key} = {path}: cannot be read ({error.strerror}). Check the path.") from None


SORTED_KEYS = 2**25
"""Keys that are sorted at once: about a gigabyte with what belongs to them."""
SHINGLES_AT_ONCE = 128
"""n-grams of a document that are hashed at once, times as many hashes as a signature has: two arrays of 115 kB, so that
they stay in a core's cache."""
MERSENNE_PRIME = np.uint64(2**61 - 1)

Numbers = npt.NDArray[Any]


def key_maker(config: FiltersConfig) -> Callable[[str], list[int]]:
    """Return the function that gives a document's keys: first that of its text, then those of the signature's buckets.

    A key has 64 bits: of a billion documents, the chance that any two unlike ones share the first is 3 %.

    Raises: UserError if a package is missing.
    """
    signature = _signature(config) if config.duplicates == "drop_near" else lambda text: []

    def keys(text: str) -> list[int]:
        return [_hash(b"text", text.encode()), *signature(text)]

    return keys


def _signature(config: FiltersConfig) -> Callable[[str], list[int]]:
    """Return the function that gives the keys of buckets: n-grams and hashes are those of datatrove, with SHA-1."""
    words_of = _simplified_words()
    draw = np.random.RandomState(1)
    shape = (1, config.buckets * config.bucket_hashes)
    factors_1H = draw.randint(1, MERSENNE_PRIME, dtype=np.uint64, size=shape)
    offsets_1H = draw.randint(0, MERSENNE_PRIME, dtype=np.uint64, size=shape)
    first_8_bytes = np.dtype({"names": ["hash"], "formats": ["<u8"], "offsets": [0], "itemsize": 20})

    def keys(text: str) -> list[int]:
        words = words_of(text)
        ngrams = map(b" ".join, zip(*(words[first:] for first in range(config.ngram)), strict=False))
        digests = b"".join([hashlib.sha1(ngram).digest() for ngram in ngrams])
        if not digests:
            return []  # fewer words than an n-gram has
        shingles_N1 = np.frombuffer(digests, first_8_bytes)["hash"][:, None]
        buckets = least_hashes(shingles_N1, factors_1H, offsets_1H).reshape(config.buckets, config.bucket_hashes)
        return [_hash(b"bucket%d" % number, bucket.tobytes()) for number, bucket in enumerate(buckets)]

    return keys


def _simplified_words() -> Callable[[str], list[bytes]]:
    """Return the function that gives the words of a text as datatrove simplifies it.

    In lower case, each number is 0, without punctuation and accents. datatrove looks at each character of the text in
    Python. Here that is done once for each that is in it: there are few different ones.
    """
    module, find = imported("datatrove.utils.text"), word_tokenizer().word_tokenize
    lower_case_and_numbers = module.TextNormConfig(
        remove_punctuation=False, norm_whitespace=False, norm_unicode_diacritics=False
    )
    punctuation = {chr(code) for code in module.PUNCTUATION_TRANS}
    ends_words = imported("regex").compile(rf"[{SINGLE_CHARACTER_WORDS}]|[^\w\s]", imported("regex").V1)

    def words(text: str) -> list[bytes]:
        text = module.simplify_text(text, lower_case_and_numbers)
        if text.isascii():
            return text.translate(module.PUNCTUATION_TRANS).encode().split()
        characters = set(text)
        for mark in characters & punctuation:
            text = text.replace(mark, " ")
        text = unicodedata.normalize("NFD", text)
        characters = set(unicodedata.normalize("NFD", "".join(characters - punctuation)))
        accents = {character for character in characters if unicodedata.category(character) == "Mn"}
        for accent in accents:
            text = text.replace(accent, "")
        found = find(text) if ends_words.search("".join(characters - accents)) else text.split()
        return [word.encode() for word in found]

    return words


def least_hashes(shingles_N1: Numbers, factors_1H: Numbers, offsets_1H: Numbers) -> Numbers:
    """Return the least of each of H hashes over N shingles: datatrove's, ((a s + b) mod 2^64) mod (2^61 - 1).

    All are uint64. Sums take the place of the remainder, as 2^61 = 1 modulo 2^61 - 1: processors need tens of cycles
    for a division, and two threads of a core share what divides.
    """
    hashes_count = factors_1H.shape[1]
    least_H = np.full(hashes_count, MERSENNE_PRIME)
    both = np.empty((2, min(SHINGLES_AT_ONCE, len(shingles_N1)), hashes_count), np.uint64)
    for at in range(0, len(shingles_N1), SHINGLES_AT_ONCE):
        shingles = shingles_N1[at : at + SHINGLES_AT_ONCE]
        hashes, others = both[:, : len(shingles)]
        np.multiply(shingles, factors_1H, out=hashes)
        hashes += offsets_1H
        np.right_shift(hashes, np.uint64(61), out=others)
        hashes &= MERSENNE_PRIME
        hashes += others
        # What is below the prime stays: its difference to the prime wraps, and is larger.
        np.subtract(hashes, MERSENNE_PRIME, out=others)
        np.minimum(hashes, others, out=hashes)
        np.minimum(least_H, hashes.min(axis=0), out=least_H)
    return least_H


def _hash(kind: bytes, data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=kind[:16]).digest(), "little")


def as_arrays(keys: list[tuple[int, list[int]]]) -> dict[str, Numbers]:
    """Return the keys of (number, keys) of documents, sorted by key, each with its document and whether it is exact."""
    flat = np.array([key for _, mine in keys for key in mine], np.uint64)
    counts = [len(mine) for _, mine in keys]
    numbers = np.repeat(np.array([number for number, _ in keys], np.int64), counts)
    firsts = np.cumsum([0, *counts[:-1]])[: len(counts)]
    exact = np.zeros(len(flat), np.bool_)
    exact[firsts] = True
    order = np.argsort(flat, kind="stable")
    return {"keys": flat[order], "numbers": numbers[order], "exact": exact[order]}


def parts_of(keys: int) -> int:
    """Return into how many parts so many keys are divided."""
    return max(1, -(-keys // SORTED_KEYS))


def bounds(part: int, parts: int) -> tuple[np.uint64, np.uint64]:
    """Return the least and the largest key of a part."""
    step = 2**64 // parts
    return np.uint64(part * step), np.uint64(2**64 - 1 if part + 1 == parts else (part + 1) * step - 1)


def within(arrays: Mapping[str, Numbers], least: np.uint64, most: np.uint64) -> tuple[Numbers, Numbers, Numbers]:
    """Return keys, documents and exactness of the keys between two, of what `as_arrays` has made.

    They are copies: views would keep each of thousands of files mapped, and open.
    """
    keys = arrays["keys"]
    first, end = np.searchsorted(keys, least, "left"), np.searchsorted(keys, most, "right")
    return keys[first:end].copy(), arrays["numbers"][first:end].copy(), arrays["exact"][first:end].copy()


def repeated(found: Iterable[tuple[int, tuple[Numbers, Numbers, Numbers]]]) -> dict[str, Numbers]:
    """Return the documents that share a key with one before, sorted: piece, number, and whether the text is the same.

    found: pieces in the input's order, each with what `within` returns.
    """
    found = list(found)
    pieces = np.concatenate([np.full(len(keys), piece) for piece, (keys, _, _) in found])
    keys, numbers, exact = (np.concatenate([part[at] for _, part in found]) for at in range(3))
    del found
    order = np.lexsort((numbers, pieces, keys))
    keys, pieces, numbers, exact = keys[order], pieces[order], numbers[order], exact[order]
    again = np.flatnonzero(keys[1:] == keys[:-1]) + 1
    pieces, numbers, exact = pieces[again], numbers[again], exact[again]
    order = np.lexsort((~exact.astype(np.bool_), numbers, pieces))  # of several marks of a document, "exact" is first
    pieces, numbers, exact = pieces[order], numbers[order], exact[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (pieces[1:] != pieces[:-1]) | (numbers[1:] != numbers[:-1])
    return {
        "pieces": pieces[is_new].astype(np.int64),
        "numbers": numbers[is_new].astype(np.int64),
        "exact": exact[is_new].astype(np.bool_),
    }

"""Which documents are left out: by language, length, repetition, quality, lists of URLs and words.

The rules are datatrove's, applied to one document at a time, without its pipelines; the language is py3langid's, whose
model is in its package. Both are deterministic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from argosy.config.data import FiltersConfig
from argosy.errors import UserError, missing_extra
from argosy.files import read_at_most

EXTRA = "filters"
OWN_LISTS = "datatrove"
"""The value of `blocked_urls` that means the lists in datatrove's package."""
MOST_BYTES = 256 * 2**20
"""No list of URLs or words is larger."""

Rule = Callable[[str, str], str]
"""Say why a document is left out, or "": its text, its URL."""


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
            kind = of_datatrove("filters.gopher_repetition_filter").GopherRepetitionFilter
            self._rules.append(_of_text("repetition", kind(language=word_tokenizer())))
        if config.quality:
            kind = of_datatrove("filters.gopher_quality_filter").GopherQualityFilter
            self._rules.append(_of_text("quality", kind(language=word_tokenizer())))

    def __bool__(self) -> bool:
        return bool(self._rules)

    def __call__(self, text: str, url: str, number: int = 0) -> str:
        """Return why a document is left out, or "". `number` does not matter."""
        return next((why for rule in self._rules if (why := rule(text, url))), "")


def list_checksums(config: FiltersConfig) -> dict[str, str]:
    """Return the SHA-256 of each list, since the result depends on what it holds. Raises: UserError."""
    lists = [("blocked_urls", config.blocked_urls), ("blocked_words", config.blocked_words)]
    return {
        key: hashlib.sha256(_read(key, Path(path))).hexdigest() for key, path in lists if path and path != OWN_LISTS
    }


@cache
def word_tokenizer() -> Any:
    """Return datatrove's interface of what finds words: runs of letters and digits, single punctuation marks.

    datatrove's own need spaCy, or a package for each language. In scripts without spaces each character is a word.
    """
    regex, base = imported("regex"), imported("datatrove.utils.word_tokenizers").WordTokenizer
    single = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
    pattern = regex.compile(rf"[{single}]|[\w--[{single}]]+|[^\w\s]", regex.V1)

    class Words(base):  # type: ignore[misc, valid-type]
        def word_tokenize(self, text: str) -> list[str]:
            return list(pattern.findall(text))

        def sent_tokenize(self, text: str) -> list[str]:
            raise NotImplementedError

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            raise NotImplementedError

    return Words("")


def _length(least: int, most: int) -> Rule:
    def rule(text: str, url: str) -> str:
        if len(text) < least:
            return "too short"
        return "too long" if most and len(text) > most else ""

    return rule


def _language(languages: tuple[str, ...], least: float) -> Rule:
    langid = imported("py3langid.langid")
    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
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
    lines = [] if path == OWN_LISTS else list(_lines("blocked_urls", Path(path)))
    try:
        urls = module.URLFilter(
            extra_domains=[line for line in lines if "/" not in line],
            extra_urls=[line for line in lines if "/" in line],
            use_integrated_lists=path == OWN_LISTS,
        )
    except ImportError:
        raise missing_extra("tldextract, fasteners, pyahocorasick", EXTRA, "filters.blocked_urls") from None
    urls.tldextractor = tldextract.TLDExtract(suffix_list_urls=())  # the list in its package: no network
    document = imported("datatrove.data").Document

    def rule(text: str, url: str) -> str:
        if not url:
            return ""
        found = urls.filter(document(text="", id="", metadata={"url": url}))
        return "" if found is True else f"URL: {found[1].replace('_', ' ')}"

    return rule


def _words(path: Path) -> Rule:
    regex = imported("regex")
    words = sorted(set(_lines("blocked_words", path)))
    pattern = r"(?i)(?<!\w)(?:" + "|".join(regex.escape(word) for word in words) + r")(?!\w)"
    return _of_text("word", of_datatrove("filters.regex_filter").RegexFilter(pattern))


def _of_text(name: str, rule: Any) -> Rule:
    """Return a filter of datatrove that looks at the text alone."""
    document = imported("datatrove.data").Document

    def apply(text: str, url: str) -> str:
        found = rule.filter(document(text=text, id=""))
        if isinstance(found, tuple):
            found, why = found
            return "" if found else f"{name}: {str(why).removeprefix('gopher_').replace('_', ' ')}"
        return "" if found else name

    return apply


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
        return read_at_most(path, MOST_BYTES)
    except OSError as error:
        raise UserError(f"filters.{key} = {path}: cannot be read ({error.strerror}). Check the path.") from None


def of_datatrove(module: str) -> Any:
    return imported(f"datatrove.pipeline.{module}")


def imported(module: str) -> Any:
    try:
        return __import__(module, fromlist=["*"])
    except ImportError:
        package = module.partition(".")[0]
        raise missing_extra(package, EXTRA, "Filtering documents") from None

"""Gopher's rules of repetition and quality (Rae et al. 2021) with datatrove's limits and verdicts, computed faster; the
words that they count."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

from argosy.errors import missing_extra

FILTERS_EXTRA = "filters"
SINGLE_CHARACTER_WORDS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts without spaces, each character of which is taken for a word."""

Rule = Callable[[str, str], str]
"""Say why a document is left out, or "": its text, its URL."""


def of_datatrove(module: str) -> Any:
    return imported(f"datatrove.pipeline.{module}")


def imported(module: str) -> Any:
    try:
        return __import__(module, fromlist=["*"])
    except ImportError:
        package = module.partition(".")[0]
        raise missing_extra(package, FILTERS_EXTRA, "Filtering documents") from None


@cache
def word_tokenizer() -> Any:
    """Return datatrove's interface of what finds words: runs of letters and digits, single punctuation marks.

    datatrove's own need spaCy, or a package for each language. In scripts without spaces each character is a word.
    """
    regex, base = imported("regex"), imported("datatrove.utils.word_tokenizers").WordTokenizer
    pattern = regex.compile(rf"[{SINGLE_CHARACTER_WORDS}]|[\w--[{SINGLE_CHARACTER_WORDS}]]+|[^\w\s]", regex.V1)

    in_ascii = re.compile(r"\w+|[^\w\s]", re.ASCII)  # the same there, in a third of the time

    class Words(base):  # type: ignore[misc, valid-type]  # of the interface's three, no filter calls the other two
        def word_tokenize(self, text: str) -> list[str]:
            return list((in_ascii if text.isascii() else pattern).findall(text))

        def sent_tokenize(self, text: str) -> list[str]:
            raise NotImplementedError

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            raise NotImplementedError

    return Words("")


def repetition() -> Rule:
    """Return the rule of repetition: datatrove's for lines and paragraphs; n-grams are cut out of the whole text here,
    not joined of words one by one."""
    kind, words = of_datatrove("filters.gopher_repetition_filter").GopherRepetitionFilter, word_tokenizer()
    in_lines = of_text("repetition", kind(top_n_grams=(), dup_n_grams=(), language=words))
    limits, split = kind(), imported("datatrove.utils.text").split_into_words

    def rule(text: str, url: str) -> str:
        if why := in_lines(text, url):
            return why
        found = split(text, words)
        joined, ends = "".join(found), [0, *accumulate(map(len, found))]
        spaced, starts = " ".join(found), [end + number for number, end in enumerate(ends)]
        for n, most in limits.top_n_grams:
            counts = Counter([spaced[start : end - 1] for start, end in zip(starts, starts[n:], strict=False)])
            if any(len(ngram) * count / len(text) > most for ngram, count in counts.most_common(1)):
                return f"repetition: top {n} gram"
        for n, most in limits.dup_n_grams:
            ngrams = [joined[start:end] for start, end in zip(ends, ends[n:], strict=False)]
            if _repeated_chars(ngrams, n) / len(text) > most:
                return f"repetition: duplicated {n} n grams"
        return ""

    return rule


def _repeated_chars(ngrams: list[str], n: int) -> int:
    """Return the characters of those of a text's n-grams that came before; after one, the next that it is not part of
    counts."""
    seen, chars, at = set[str](), 0, 0
    while at < len(ngrams):
        if ngrams[at] in seen:
            chars, at = chars + len(ngrams[at]), at + n
        else:
            seen.add(ngrams[at])
            at += 1
    return chars


def quality() -> Rule:
    """Return the rule of quality: each different word is looked at once."""
    module, words = of_datatrove("filters.gopher_quality_filter"), word_tokenizer()
    limits, split = module.GopherQualityFilter(), imported("datatrove.utils.text").split_into_words

    def rule(text: str, url: str) -> str:
        counts = Counter[str](split(text, words))
        total = counts.total()
        lengths = [(len(word), count) for word, count in counts.items() if not module.PUNCTUATION_SET.issuperset(word)]
        size = sum(count for _, count in lengths)
        if size < limits.min_doc_words:
            return "quality: short doc"
        if size > limits.max_doc_words:
            return "quality: long doc"
        mean, lines = sum(length * count for length, count in lengths) / size, text.splitlines()
        with_letters = sum(count for word, count in counts.items() if any(map(str.isalpha, word)))
        bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines)
        found = {
            "below avg threshold": mean < limits.min_avg_word_length,
            "above avg threshold": mean > limits.max_avg_word_length,
            "too many hashes": text.count("#") / total > limits.max_symbol_word_ratio,
            "too many ellipsis": (text.count("...") + text.count("…")) / total > limits.max_symbol_word_ratio,
            "too many bullets": bullets / len(lines) > limits.max_bullet_lines_ratio,
            "too many end ellipsis": ellipses / len(lines) > limits.max_ellipsis_lines_ratio,
            "below alpha threshold": with_letters / total < limits.max_non_alpha_words_ratio,
            "enough stop words": len(limits.stop_words & counts.keys()) < limits.min_stop_words,
        }
        return next((f"quality: {why}" for why, is_so in found.items() if is_so), "")

    return rule


def of_text(name: str, rule: Any) -> Rule:
    """Return a filter of datatrove that looks at the text alone."""
    document = imported("datatrove.data").Document

    def apply(text: str, url: str) -> str:
        found = rule.filter(document(text=text, id=""))
        if isinstance(found, tuple):
            found, why = found
            return "" if found else f"{name}: {str(why).removeprefix('gopher_').replace('_', ' ')}"
        return "" if found else name

    return apply

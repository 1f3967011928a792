"""Gopher's rules leave out what they leave out in datatrove, for the same reason."""

from __future__ import annotations

from random import Random

import pytest

from argosy.data.gopher import of_datatrove, of_text, quality, repetition, word_tokenizer

pytest.importorskip("datatrove", reason="pip install 'argosy[filters]'")


def test_repetition_is_judged_as_by_datatrove() -> None:
    kind, draw = of_datatrove("filters.gopher_repetition_filter").GopherRepetitionFilter, Random(1)
    theirs, mine = of_text("repetition", kind(language=word_tokenizer())), repetition()
    found = set()
    for _ in range(200):  # parts that are the same words only when joined
        parts = draw.sample(["a b", "the", "cat sat on", "ab", "c\n", "bc", *(f"w{n}" for n in range(200))], 200)
        text = " ".join(draw.choice(parts[: draw.choice([5, 20, 200])]) for _ in range(draw.randint(1, 90)))
        text = draw.choice([text, " ".join([text, *draw.sample(parts, 100), text])])
        found.add(mine(text, ""))
        assert mine(text, "") == theirs(text, "")
    assert "" in found and {f"repetition: top {n} gram" for n in (2, 3, 4)} <= found
    assert any(why.startswith("repetition: duplicated ") for why in found)


def test_quality_is_judged_as_by_datatrove() -> None:
    kind, draw = of_datatrove("filters.gopher_quality_filter").GopherQualityFilter, Random(2)
    theirs, mine = of_text("quality", kind(language=word_tokenizer())), quality()
    prose = ["the ", "garden ", "of ", "flowers ", "with ", "that "]
    others = ["abcdefghijklmnopq ", "# ", "... ", "…\n", "\n- ", "\n• ", "12 ", "日本", "é ", "", "?!"]
    found = set()
    for _ in range(600):
        parts = [*draw.sample(prose, 4), *draw.choices(others, k=draw.choice([0, 1, 2, 8]))]
        text = "".join(draw.choices(parts, k=draw.choice([30, 60, 300])))
        found.add(mine(text, ""))
        assert mine(text, "") == theirs(text, "")
    assert len(found) >= 8, found


def test_words_of_ascii_are_those_of_any_text() -> None:
    draw, words = Random(1), word_tokenizer().word_tokenize
    for _ in range(300):
        text = "".join(draw.choices([chr(code) for code in range(128)], k=40))
        assert [*words(text), "é"] == words(f"{text} é")


def test_words_of_scripts_with_and_without_spaces() -> None:
    found = word_tokenizer().word_tokenize("Ein Wort, naïve x1! 日本 ok")
    assert found == ["Ein", "Wort", ",", "naïve", "x1", "!", "日", "本", "ok"]

"""Which documents are left out, and why; nothing is asked of the network."""

from __future__ import annotations

import socket
from pathlib import Path
from random import Random
from typing import Any

import pytest

from argosy.config.data import FiltersConfig
from argosy.data.filters import Filters, list_checksums
from argosy.data.gopher import imported
from argosy.errors import UserError

pytest.importorskip("datatrove", reason="pip install 'argosy[filters]'")

PROSE = "The garden that we have behind the house is quiet, and in the early morning birds sing to be with us. "


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", None)


def why(text: str, url: str = "", **keys: Any) -> str:
    return Filters(FiltersConfig(**keys))(text, url)


def test_nothing_is_left_out_unless_asked() -> None:
    assert not Filters(FiltersConfig()) and why("x" * 5) == ""


@pytest.mark.parametrize(
    ("text", "keys", "expected"),
    [
        ("x", {"min_chars": 2}, "too short"),
        ("xx", {"min_chars": 2, "max_chars": 2}, ""),
        ("xxx", {"max_chars": 2}, "too long"),
        (PROSE, {"languages": ("en",)}, ""),
        ("Der Garten hinter dem Haus ist still, und die Vögel singen.", {"languages": ("en", "fr")}, "language"),
        ("Der Garten hinter dem Haus ist still, und die Vögel singen.", {"languages": ("de",)}, ""),
        ("a same line\n" * 30, {"repetition": True}, "repetition: dup para frac"),
        (" ".join(f"word{number}" for number in range(300)), {"repetition": True}, ""),
        (PROSE, {"quality": True}, "quality: short doc"),
        (PROSE * 4, {"quality": True}, ""),
    ],
)
def test_rules(text: str, keys: dict[str, Any], expected: str) -> None:
    found = why(text, **keys)
    assert found == expected or (expected.startswith("repetition") and found.startswith("repetition: dup"))


def test_urls_and_words_of_a_list(tmp_path: Path) -> None:
    urls, words = tmp_path / "urls", tmp_path / "words"
    urls.write_text("# a comment\n\nBad.org\nsub.good.org\nhttps://good.org/page\n")
    words.write_text("foo bar\nC++\n")
    blocked = {"blocked_urls": str(urls)}
    assert why("x", "https://www.bad.org/a", **blocked) == "URL: domain"
    assert why("x", "https://sub.good.org/a", **blocked) == "URL: subdomain"
    assert why("x", "https://GOOD.org/page", **blocked) == "URL: url"
    assert why("x", "https://good.org/Page", **blocked) == ""
    assert why("x", "https://good.org/other", **blocked) == why("x", "", **blocked) == ""
    assert why("of Foo bar, and", blocked_words=words) == why("C++ is", blocked_words=words) == "word"
    assert why("of foo bars", blocked_words=words) == ""
    before = list_checksums(FiltersConfig(blocked_words=words))
    words.write_text("foo\n")
    assert list_checksums(FiltersConfig(blocked_words=words)) != before


def test_words_are_found_as_by_one_pattern_of_all(tmp_path: Path) -> None:
    regex, path, draw = imported("regex"), tmp_path / "words", Random(3)

    def drawn(most: int) -> str:
        return "".join(draw.choices("aAıİiIſsS k+.-ßẞµμ\u0301é中1_", k=draw.randint(1, most)))

    for _ in range(100):
        path.write_text("a\n" + "\n".join(drawn(4) for _ in range(5)))
        words = {line.strip() for line in path.read_text().splitlines()} - {""}
        all_of_them = regex.compile(rf"(?i)(?<!\w)(?:{'|'.join(map(regex.escape, words))})(?!\w)")
        rule = Filters(FiltersConfig(blocked_words=path))
        assert all(bool(rule(text, "")) == bool(all_of_them.search(text)) for text in (drawn(30) for _ in range(10)))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"languages": ("english",)}, r"filters\.languages = 'english': not one of the codes .* en "),
        ({"blocked_urls": "nowhere"}, r"filters\.blocked_urls = nowhere: cannot be read \(No such file"),
        (
            {"blocked_words": Path("/dev/null")},
            r"filters\.blocked_words = /dev/null: cannot be read \(not a regular file\)",
        ),
    ],
)
def test_what_is_wrong_is_said(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Filters(FiltersConfig(**keys))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datatrove.pipeline.filters.gopher_quality_filter", None)
    with pytest.raises(UserError, match=r"needs the package `datatrove`. Install it: pip install 'argosy\[filters\]'"):
        Filters(FiltersConfig(quality=True))

"""The language of a text is what py3langid says, with the same score, however many bytes go through it at once."""

from __future__ import annotations

from random import Random

import pytest

from argosy.data import languages
from argosy.data.gopher import imported
from argosy.data.languages import language_identifier

langid = pytest.importorskip("py3langid.langid", reason="pip install 'argosy[filters]'")


def test_languages_and_scores_are_those_of_py3langid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(languages, "BLOCK_BYTES", 1000)
    mine = language_identifier(imported("py3langid.langid"))
    table = mine._full_model[0]  # as it was read: reading it takes seconds
    parts = (table, mine.nb_pc, mine.nb_classes, mine.tk_nextmove, mine.tk_output)
    theirs = langid.LanguageIdentifier(*parts, norm_probs=True, tk_row=mine.tk_row)
    draw = Random(1)
    words = ["the", "Garten", "détective", "сад", "庭園", "สวน", "حديقة", "\0", "\n", "🙂", "xyz", "zu", "et"]
    for size in (0, 1, 150, 400, 1500):
        text = " ".join(draw.choice(words) for _ in range(size))
        assert mine.classify(text) == theirs.classify(text)
        assert mine.rank(text) == theirs.rank(text)

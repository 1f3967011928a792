"""What is told of a text that grows never changes, and stops before the first stop word."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from argosy.data.tokenizer import Tokenizer
from argosy.inference import sampling
from argosy.inference.sampling import GrowingText


@pytest.mark.parametrize("most", [2, 64])
def test_a_text_grows_to_what_all_its_tokens_say(corpus: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(sampling, "MOST_AGAIN", most)
    tokenizer, draw = Tokenizer.load(corpus), random.Random(0)
    for _ in range(300):
        words = draw.choices(["Größe", "🙂", "self", " return", "\n    ", "日"], k=12)
        ids = [token for word in words for token in [*tokenizer.encode(word), draw.randrange(3, 250)]]
        stop = tuple(draw.choices(["🙂", "self re", "öß", "urn\n", "ell"], k=2))
        text, told = GrowingText(tokenizer, stop, tokenizer.encode(draw.choice(["", "def "]))), ""
        for token in ids:
            told += text.add(token)
            if text.is_stopped:
                break
        told += text.rest()
        whole = tokenizer.decode(ids)
        if text.is_stopped:
            assert any((told + word) in whole for word in stop) and not any(word in told for word in stop)
        else:
            assert told == whole

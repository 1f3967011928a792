from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argosy.data import engine as engines
from argosy.data.engine import Encoder, choose_engine, encode_function
from argosy.data.tokenizer import Tokenizer
from argosy.errors import ArgosyWarning, UserError
from data.conftest import TEXTS


def install_fastokens(monkeypatch: pytest.MonkeyPatch, change: int = 0) -> None:
    """A stand-in for the package, with the two calls that are used of it; `change` is added to every id."""

    class FakeTokenizer:
        def __init__(self, path: str):
            self._tokenizer = Tokenizer.load(Path(path))

        from_file = classmethod(lambda cls, path: cls(path))

        def encode_batch_flat(self, texts: list[str], **options: bool) -> tuple[bytes, bytes]:
            assert options == {"add_special_tokens": False, "split_special_tokens": True}
            ids = [np.array(self._tokenizer.encode(text), np.uint32) + change for text in texts]
            return np.concatenate(ids).tobytes(), np.cumsum([0, *map(len, ids)]).astype(np.uint64).tobytes()

    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=FakeTokenizer, __spec__=True))
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: True)


def test_documents_end_in_the_end_of_document_token(tokenizer_json: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_json)
    texts = ["def f", "x", "naïve"]
    batch = Encoder(tokenizer_json, "huggingface", np.dtype("<u2"), 0.0).encode(texts)
    assert batch.tokens.tolist() == [token for text in texts for token in (*tokenizer.encode(text), tokenizer.eod_id)]
    assert batch.lengths.tolist() == [len(tokenizer.encode(text)) + 1 for text in texts]
    assert batch.text_bytes.tolist() == [5, 1, 6] and batch.tokens.dtype == np.uint16


def test_held_out_share_is_the_one_asked_for_and_follows_the_text(tokenizer_json: Path) -> None:
    texts = [str(i) for i in range(2000)]
    held_out = Encoder(tokenizer_json, "huggingface", np.dtype("<u2"), 0.25).encode(texts).held_out
    backwards = Encoder(tokenizer_json, "huggingface", np.dtype("<u2"), 0.25).encode(texts[::-1]).held_out
    assert held_out.tolist() == backwards[::-1].tolist() and 400 < held_out.sum() < 600


def test_auto_takes_fastokens_where_it_agrees(tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fastokens(monkeypatch)
    assert choose_engine("auto", tokenizer_json, TEXTS) == "fastokens"
    assert choose_engine("huggingface", tokenizer_json, TEXTS) == "huggingface"
    for ids, reference in zip(
        *(encode_function(tokenizer_json, e)(TEXTS) for e in ("fastokens", "huggingface")), strict=True
    ):
        np.testing.assert_array_equal(ids, reference)


@pytest.mark.parametrize("wanted", ["auto", "fastokens"])
def test_one_different_id_falls_back_and_says_so(
    tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch, wanted: Any
) -> None:
    install_fastokens(monkeypatch, change=1)
    with pytest.warns(
        ArgosyWarning, match="fastokens gives other ids on a sample of 200 texts; going on with huggingface"
    ):
        assert choose_engine(wanted, tokenizer_json, TEXTS) == "huggingface"


def test_fastokens_that_is_not_installed(tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    assert choose_engine("auto", tokenizer_json, TEXTS) == "huggingface"
    with pytest.raises(UserError, match=r"pip install 'argosy\[fast-tokenizer\]'"):
        choose_engine("fastokens", tokenizer_json, TEXTS)


def test_real_fastokens_agrees_with_hugging_face(tokenizer_json: Path) -> None:
    pytest.importorskip("fastokens")
    texts = [*TEXTS, "", "\r\n \t", "<|endoftext|>", "日本語 🙂 1234567", "a" * 5000]
    assert choose_engine("fastokens", tokenizer_json, texts) == "fastokens"

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.data.tokenizer import END_OF_DOCUMENT, Tokenizer, train
from argosy.errors import UserError
from data.conftest import TEXTS


def test_training_twice_gives_the_same_file(tokenizer_json: Path, tmp_path: Path) -> None:
    train(TEXTS, 300, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == tokenizer_json.read_bytes()


def test_trained_tokenizer_has_the_size_asked_for_and_an_end(tokenizer_json: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_json)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (300, 0)
    assert tokenizer.sha256 == hashlib.sha256(tokenizer_json.read_bytes()).hexdigest()
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2


@given(st.text())
def test_any_text_comes_back(tokenizer_json: Path, text: str) -> None:
    tokenizer = Tokenizer.load(tokenizer_json)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_cannot_fake_the_end_of_a_document(tokenizer_json: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_json)
    ids = tokenizer.encode(f"a{END_OF_DOCUMENT}b")
    assert tokenizer.eod_id not in ids and tokenizer.encode_batch([f"a{END_OF_DOCUMENT}b"]) == [ids]


@pytest.mark.parametrize("name", ["<|end_of_text|>", "</s>", "<|im_end|>"])
def test_end_of_document_goes_by_many_names(tokenizer_json: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "renamed.json"
    path.write_text(tokenizer_json.read_text().replace(END_OF_DOCUMENT, name))
    assert Tokenizer.load(path).eod_id == 0


def test_ids_may_have_gaps(tokenizer_json: Path, tmp_path: Path) -> None:
    content = json.loads(tokenizer_json.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 999, "content": "<|late|>"})
    content["model"]["vocab"]["<|late|>"] = 999
    (tmp_path / "gap.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path / "gap.json").vocab_size == 1000


def test_tokenizer_without_an_end_is_refused(tokenizer_json: Path, tmp_path: Path) -> None:
    path = tmp_path / "endless.json"
    path.write_text(tokenizer_json.read_text().replace(END_OF_DOCUMENT, "<pad>"))
    with pytest.raises(UserError, match=r"endless\.json: no token ends a document .*Add <\|endoftext\|>"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), (b"{}", "not a Hugging Face"), (b"\xff", "cannot be read")]
)
def test_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"tokenizer = {path}: .*{message}"):
        Tokenizer.load(path)


def test_vocabulary_must_hold_every_byte(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size = 256: a byte-level BPE needs 257"):
        train(TEXTS, 256, tmp_path / "t.json")
    assert train(TEXTS, 257, tmp_path / "t.json").vocab_size == 257

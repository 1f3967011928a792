from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Model, Unigram, WordLevel, WordPiece
from transformers import PreTrainedTokenizerFast

from argosy.data import tokenizer as engines
from argosy.data.tokenizer import END_OF_DOCUMENT, Encoder, Tokenizer, choose_engine, encode_function, train
from argosy.errors import ArgosyWarning, UserError
from data.conftest import TEXTS
from tokenizers_with_marks import begun_tokenizer


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


def test_text_after_other_text_keeps_the_space_that_decoders_drop_at_a_beginning(tmp_path: Path) -> None:
    words = ["<unk>", "</s>", "▁a", "▁world", "▁."]
    engine = HuggingFaceTokenizer(WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    engine.add_special_tokens(words[:2])
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    engine.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    prompt = tokenizer.encode_prompt("a")
    assert (prompt, tokenizer.decode([3, 2], prompt)) == ([1, 2], " world a")
    assert [tokenizer.decode([3], before) for before in ((), [1], [2, 1])] == ["world"] * 3


def test_text_cannot_fake_the_end_of_a_document(tokenizer_json: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_json)
    ids = tokenizer.encode(f"a{END_OF_DOCUMENT}b")
    assert tokenizer.eod_id not in ids and tokenizer.encode_batch([f"a{END_OF_DOCUMENT}b"]) == [ids]


def test_text_cannot_fake_it_where_the_end_is_a_piece_of_the_vocabulary(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁a", -1.0), *((letter, -2.0) for letter in "▁a</s>")]
    engine = HuggingFaceTokenizer(Unigram(pieces, 0))
    engine.add_special_tokens(["<unk>", "</s>"])
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    spelled = [tokenizer.eod_id, *(engine.token_to_id(token) for token in ["▁a", *"</s>", "a"])]
    assert tokenizer.encode_prompt("a</s>a") == spelled
    assert tokenizer.encode("a a< s>") == engine.encode("a a< s>").ids


@pytest.mark.parametrize(
    "model",
    [
        WordLevel({"[UNK]": 0, "[EOS]": 1, "a": 2, "</s>": 3}, "[UNK]"),
        WordPiece({"[UNK]": 0, "[EOS]": 1, "a": 2, "</s>": 3}, unk_token="[UNK]"),
        BPE(
            {"[": 0, "E": 4, "</s>": 3, "[E": 2, "[EOS]": 1, "O": 5, "OS]": 6, "S]": 7, "S": 8, "]": 9},
            [("[", "E"), ("S", "]"), ("O", "S]"), ("[E", "OS]")],
        ),
    ],
    ids=["WordLevel", "WordPiece", "BPE"],
)
def test_words_of_text_are_no_end_of_a_document(tmp_path: Path, model: Model) -> None:
    """A tokenizer trained on text with tags of HTML, or with its own special tokens, has them as words."""
    engine = HuggingFaceTokenizer(model)
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(["[EOS]"])
    engine.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eod_id == 1 and 1 not in tokenizer.encode("a [EOS] </s>")


@pytest.mark.parametrize("name", ["<|end_of_text|>", "</s>", "<EOS_TOKEN>", "<seed:eos>", "[|endofturn|]"])
def test_end_of_document_goes_by_many_names(tokenizer_json: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "renamed.json"
    path.write_text(tokenizer_json.read_text().replace(END_OF_DOCUMENT, name))
    assert Tokenizer.load(path).eod_id == 0


def test_ids_may_have_gaps(tokenizer_json: Path, tmp_path: Path) -> None:
    content = json.loads(tokenizer_json.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 999, "content": "<|late|>"})
    content["model"]["vocab"]["<|late|>"] = 999
    (tmp_path / "gap.json").write_text(json.dumps(content))
    found = Tokenizer.load(tmp_path / "gap.json")
    assert found.vocab_size == 1000
    assert found.least_vocab_size == Tokenizer.load(tokenizer_json).vocab_size  # no text becomes a special token


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, r"not a .* \(Precompiled: "),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "it cannot encode a text "),
        ({"model": {"type": "WordLevel", "vocab": {END_OF_DOCUMENT: 0}, "unk_token": "<unk>"}}, "it cannot encode"),
    ],
)
def test_an_error_of_the_library_is_a_sentence(tokenizer_json: Path, change: dict[str, Any], message: str) -> None:
    text = json.dumps(json.loads(tokenizer_json.read_text()) | change)
    with pytest.raises(UserError, match=rf"tokenizer = mine: {message}"):
        Tokenizer(text, "mine")


def test_a_text_that_a_split_takes_too_long_for_is_named_so(tokenizer_json: Path) -> None:
    record = json.loads(tokenizer_json.read_text())
    record["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer(json.dumps(record), "mine")
    for encode in (tokenizer.encode, tokenizer.encode_template, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match=r"tokenizer = mine: it cannot encode a text .*retry-limit"):
            encode("a" * 30 + "b")


def test_vocabulary_must_hold_every_byte(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size = 256: a byte-level BPE needs 257"):
        train(TEXTS, 256, tmp_path / "t.json")
    assert train(TEXTS, 257, tmp_path / "t.json").vocab_size == 257


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


@pytest.mark.parametrize("prepends", [False, True])
def test_a_long_document_has_the_same_tokens_with_little_memory(
    tokenizer_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepends: bool
) -> None:
    path = tmp_path / "tokenizer.json"
    engine = HuggingFaceTokenizer.from_file(str(tokenizer_json))
    if prepends:  # as Llama 2's does: no part of a text has the ids that it has in the text
        engine.normalizer = normalizers.Prepend("_")
    engine.save(str(path))
    texts = ["", "x" * 3000, "".join(TEXTS), "a line\n" * 50, "ein Satz, 1 2  3 " * 200]
    whole = Encoder(path, "huggingface", np.dtype("<u2"), 0.0).encode(texts)
    for name, chars in (("PART_CHARS", 300), ("AROUND_CUT", 50)):
        monkeypatch.setattr(engines, name, chars)
    encoder, sizes = Encoder(path, "huggingface", np.dtype("<u2"), 0.0), list[int]()
    encode = encoder._encode
    monkeypatch.setattr(encoder, "_encode", lambda parts: (sizes.append(sum(map(len, parts))), encode(parts))[1])
    found = encoder.encode(texts)
    assert np.array_equal(found.tokens, whole.tokens) and np.array_equal(found.lengths, whole.lengths)
    assert max(sizes) == (len(texts[2]) if prepends else 3000)


def test_a_text_begins_as_its_tokenizer_has_texts_begin(tokenizer_json: Path, tmp_path: Path) -> None:
    begun = begun_tokenizer(tokenizer_json, tmp_path / "begun.json")
    tokenizer, plain = Tokenizer.load(begun), Tokenizer.load(tokenizer_json)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(begun))
    bos = tokenizer.special_tokens["<|begin|>"]
    assert tokenizer.begin_ids == [bos] and plain.begin_ids == []
    assert tokenizer.encode_prompt("def f") == theirs("def f").input_ids == [bos, *plain.encode("def f")]
    assert plain.encode_prompt("def f") == [plain.eod_id, *plain.encode("def f")]
    batch = Encoder(begun, "huggingface", np.dtype("<u2"), 0.0).encode(["def f", "", "x"])
    texts = [[bos, *plain.encode(text), plain.eod_id] for text in ("def f", "", "x")]
    assert batch.tokens.tolist() == [token for text in texts for token in text]
    assert batch.lengths.tolist() == [len(text) for text in texts]


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

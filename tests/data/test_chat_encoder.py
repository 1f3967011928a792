"""Documents of conversations become words whose marks say what is learned, and what begins where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from tokenizers.processors import ByteLevel as TrimmedOffsets

from argosy.data.chat_encoder import TOO_LONG, TRUNCATED, ChatEncoder, check_spelling
from argosy.data.conversations import BadRecord
from argosy.data.packing import ID_MASK, MISMATCHED_BIT, REJECTED_BIT, START_BIT, TRAINED

WORDS = ("user", "model", "hi", "you", "there", "bye", "now")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    engine = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, WORDS[0]))
    engine.pre_tokenizer = WhitespaceSplit()
    engine.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def part(text: str, *answers: str, is_rejected: bool = False) -> dict[str, Any]:
    found = [(text.index(answer), text.index(answer) + len(answer)) for answer in answers]
    return {
        "text": text,
        "answers": found,
        "cuts": [end for _, end in found],
        "marks": REJECTED_BIT if is_rejected else 0,
    }


def shown(words: np.ndarray) -> list[str]:
    """Return the words: those that are learned in capitals, and | before a start, ! before one that is rejected."""
    texts = []
    for word in words:
        text = WORDS[word & ID_MASK]
        text = text.upper() if word & TRAINED else text
        mark = "?" if word & MISMATCHED_BIT else "!" if word & REJECTED_BIT else "|" if word & START_BIT else ""
        texts.append(mark + text)
    return texts


PAIR = [part("user hi model you there", "you there"), part("user hi model bye", "bye", is_rejected=True)]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([part("user hi model you there", "you there")], "|user hi model YOU THERE"),
        ([part("hi you there bye", "you", "bye")], "|hi YOU there BYE"),
        (PAIR, "|user hi model YOU THERE !user hi model BYE"),
    ],
)
def test_answers_are_learned_and_starts_are_marked(tokenizer: Path, document: list[Any], expected: str) -> None:
    batch = ChatEncoder(tokenizer, 16, 0.0).encode([json.dumps(document)])
    assert shown(batch.tokens) == expected.split()
    assert batch.lengths.tolist() == [len(expected.split())]
    assert batch.held_out.tolist() == [False]


def test_blanks_of_an_answer_are_learned_whatever_the_tokenizer_takes_out_of_offsets(tmp_path: Path) -> None:
    engine = Tokenizer(BPE({symbol: n for n, symbol in enumerate(ByteLevel.alphabet())}, []))
    engine.pre_tokenizer, engine.post_processor = ByteLevel(add_prefix_space=False), TrimmedOffsets()
    engine.save(str(tmp_path / "tokenizer.json"))
    document = [part("a: b  c", " b  c")]
    words = ChatEncoder(tmp_path / "tokenizer.json", 16, 0.0).encode([json.dumps(document)]).tokens
    assert ((words & TRAINED) != 0).tolist() == [False] * 2 + [True] * 5


def test_the_bytes_of_a_document_are_those_of_its_answers(tokenizer: Path) -> None:
    assert ChatEncoder(tokenizer, 16, 0.0).encode([json.dumps(PAIR)]).text_bytes.tolist() == [len("you there" + "bye")]


def test_a_long_conversation_ends_with_the_last_answer_that_fits(tokenizer: Path) -> None:
    encoder = ChatEncoder(tokenizer, 5, 0.0)
    text = "user hi model you user bye model there"
    batch = encoder.encode([json.dumps([part(text, "you", "there")])])
    assert shown(batch.tokens) == ["|user", "hi", "model", "YOU"]
    assert batch.text_bytes.tolist() == [len("you")]
    assert encoder.counts == {TRUNCATED: 1}


NOT_LEARNED_FIRST = {**part("user hi you there bye", "you", "bye"), "answers": [(18, 21)]}


@pytest.mark.parametrize(
    "document", [[part("user hi hi hi model you", "you")], PAIR, [NOT_LEARNED_FIRST]], ids=["answer", "pair", "second"]
)
def test_what_fits_in_no_row_is_left_out_and_counted(tokenizer: Path, document: list[Any]) -> None:
    encoder = ChatEncoder(tokenizer, 4, 0.0)
    batch = encoder.encode([json.dumps(document), json.dumps([part("hi you", "you")])])
    assert shown(batch.tokens) == ["|hi", "YOU"]
    assert batch.lengths.tolist() == [2]
    assert encoder.counts == {TOO_LONG: 1}


def test_each_prompt_has_the_answer_of_the_next_document_too(tokenizer: Path) -> None:
    texts = [json.dumps([part("user hi model you", "you")]), json.dumps([part("user now model bye", "bye")])]
    batch = ChatEncoder(tokenizer, 16, 0.0, has_mismatched=True).encode(texts)
    expected = "|user hi model YOU ?user hi model BYE", "|user now model BYE ?user now model YOU"
    assert shown(batch.tokens) == " ".join(expected).split()
    alone = ChatEncoder(tokenizer, 16, 0.0, has_mismatched=True).encode(texts[:1])
    assert shown(alone.tokens) == ["|user", "hi", "model", "YOU"]  # its own answer is no other's


def test_a_message_that_spells_a_special_token_is_refused() -> None:
    check_spelling([{"content": "hi"}], ["<end>"])
    call = {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": "<end>"}}}]}
    for message in ({"content": "you <end> there"}, call):
        with pytest.raises(BadRecord, match="message 1 spells <end>"):
            check_spelling([{"content": "hi"}, message], ["<start>", "<end>"])
    with pytest.raises(BadRecord, match="a tool spells <end>"):
        check_spelling([{"content": "hi"}], ["<end>"], [{"function": {"description": "<end>"}}])

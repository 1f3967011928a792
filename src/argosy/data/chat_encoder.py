"""Conversations in `prepare`: from records to documents that are told apart and counted, from those to words, and from
words back to text that a person can check."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer as HuggingFaceTokenizer

from argosy.config.data import PrepareConfig
from argosy.data.chat_template import ChatTemplate, RenderedConversation
from argosy.data.conversations import BadRecord, Message, Record, conversations_of
from argosy.data.manifest import TOKENIZER
from argosy.data.packing import ID_MASK, MISMATCHED_BIT, REJECTED_BIT, START_BIT, TRAINED, Words
from argosy.data.shards import TokenSource
from argosy.data.tokenizer import EncodedBatch, is_held_out

SPECIAL_TOKEN = "special token in a message"
TRUNCATED = "truncated"
"""Conversations whose last turns were left out, as the rest fills a row."""
TOO_LONG = "longer than seq_len"
"""Conversations, or pairs, of which no row holds even the first answer."""


def check_spelling(messages: Sequence[Message], special: Collection[str], tools: list[Any] | None = None) -> None:
    """Raise BadRecord if a message, a call in it or a tool spells a special token."""
    said = {**{f"message {number}": message for number, message in enumerate(messages)}, "a tool": tools}
    for name, value in said.items():
        text = "\n".join(_strings(value))
        if token := next((token for token in special if token in text), None):
            raise BadRecord(SPECIAL_TOKEN, f"{name} spells {token}, which would end or begin a turn")


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in what JSON holds, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in itertools.chain(*value.items()) if isinstance(value, dict) else value:
            yield from _strings(each)


class ChatDocuments:
    """Makes the document of a record: its conversations as text, with the places of the answers, as JSON."""

    def __init__(self, folder: Path, config: PrepareConfig):
        """folder: prepared data, with tokenizer.json and the files beside it. Raises: UserError without a template."""
        self._template = ChatTemplate.load(folder, config.chat_template)
        self._objective = config.objective or ""
        engine = HuggingFaceTokenizer.from_file(str(folder / TOKENIZER))
        self._special = [t.content for t in engine.get_added_tokens_decoder().values() if t.special]

    def __call__(self, record: Record) -> str:
        """Return the document. Raises: BadRecord."""
        parts = [self._part(each) for each in conversations_of(record, self._objective)]
        return json.dumps(parts, ensure_ascii=False)  # half of a surrogate pair fails where it is encoded

    def _part(self, conversation: Any) -> dict[str, Any]:
        check_spelling(conversation.messages, self._special, conversation.tools)
        found: RenderedConversation = self._template.conversation(conversation, self._special)
        marks = REJECTED_BIT if conversation.is_rejected else 0
        return {"text": found.text, "answers": found.answers, "cuts": found.cuts, "marks": marks}


class ChatEncoder:
    """Encodes batches of such documents as words (`data.packing`); a document's are a unit, which stays in one row.

    The whole text is encoded at once, special tokens as what they are: messages spell none. A token that an answer has
    a part of is learned, as transformers' masks have it.
    """

    def __init__(self, tokenizer: Path, seq_len: int, validation_fraction: float, has_mismatched: bool = False):
        """has_mismatched: each unit has the answer of the batch's next document as well, which KTO needs."""
        self._has_mismatched = has_mismatched
        self._engine = HuggingFaceTokenizer.from_file(str(tokenizer))
        self._engine.no_truncation()
        self._engine.no_padding()
        self._engine.post_processor = None  # some take blanks out of offsets: then tokens of blanks are in no answer
        self._seq_len, self._validation_fraction = seq_len, validation_fraction
        self.counts = Counter[str]()
        """Counts of what was left out since a caller emptied it."""

    def encode(self, texts: Sequence[str]) -> EncodedBatch:
        documents = [json.loads(text) for text in texts]
        encoded = iter(
            self._engine.encode_batch(
                [part["text"] for document in documents for part in document], add_special_tokens=False
            )
        )
        units, sizes, held_out = [np.empty(0, np.int32)], [], []
        sides = [[(part, next(encoded)) for part in document] for document in documents]
        for number, (text, parts) in enumerate(zip(texts, sides, strict=True)):
            others = sides[(number + 1) % len(sides)] if self._has_mismatched and len(sides) > 1 else []
            unit, size = self._unit(parts, others)
            if unit is not None:
                units.append(unit)
                sizes.append(size)
                held_out.append(is_held_out(text.encode(), self._validation_fraction))
        return EncodedBatch(
            tokens=np.concatenate(units),
            lengths=np.array([len(unit) for unit in units[1:]], np.int64),
            text_bytes=np.array(sizes, np.int64),
            held_out=np.array(held_out, np.bool_),
        )

    def _unit(
        self, parts: Sequence[tuple[dict[str, Any], Any]], others: Sequence[tuple[dict[str, Any], Any]]
    ) -> tuple[Words | None, int]:
        """Return the words of one document, and the bytes of its answers; None if it is left out, which is counted.

        others: the document after it, whose answer is put after its prompt too.
        """
        sides = [self._words(part, encoding) for part, encoding in parts]
        if others:
            sides.append(_mismatched(sides[0], self._words(*others[0])))
        elif len(sides) == 1 and len(sides[0]) > self._seq_len:
            sides = [self._truncated(*parts[0], sides[0])]
        if sum(map(len, sides)) > self._seq_len or not all((side[1:] & TRAINED).any() for side in sides):
            self.counts[TOO_LONG] += 1
            return None, 0
        size = sum(len(part["text"][begin:end].encode()) for part, _ in parts for begin, end in part["answers"])
        return np.concatenate(sides), size

    def _words(self, part: dict[str, Any], encoding: Any) -> Words:
        ids, offsets = np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)
        is_answer = np.zeros(len(part["text"]) + 1, np.int64)
        for begin, end in part["answers"]:
            is_answer[begin + 1 : end + 1] = 1
        before = np.cumsum(is_answer)
        is_learned = before[offsets[:, 1]] > before[offsets[:, 0]]
        words: Words = ids | np.where(is_learned, TRAINED, 0).astype(np.int32)
        if len(words):
            words[0] = ids[0] | START_BIT | part["marks"]  # nothing predicts it
        return words

    def _truncated(self, part: dict[str, Any], encoding: Any, words: Words) -> Words:
        """Return the words up to the last answer that a row has room for, and drop the others of `part`; none if there
        is no such."""
        ends = np.array([end for _, end in encoding.offsets], np.int64)
        counts = [(int(np.searchsorted(ends, cut, side="right")), cut) for cut in part["cuts"]]
        kept, last = max((count for count in counts if count[0] <= self._seq_len), default=(0, 0))
        part["answers"] = [(begin, end) for begin, end in part["answers"] if end <= last]
        if part["answers"]:
            self.counts[TRUNCATED] += 1
        return words[:kept]


def _mismatched(words: Words, other: Words) -> Words:
    """Return the prompt of one conversation with the answer of another, which KTO's KL term is estimated from."""
    is_prompt, is_answer = (np.cumsum(some & TRAINED) == 0 for some in (words, other))
    joined = np.concatenate([words[is_prompt], other[~is_answer]])
    joined[0] = (joined[0] & ~REJECTED_BIT) | MISMATCHED_BIT
    return joined


class ShownConversation(NamedTuple):
    """A prepared conversation, or a side of a pair, as text."""

    is_rejected: bool
    pieces: list[tuple[str, bool]]
    """Parts of the text in order, and True for those that are learned."""


def conversations_in(folder: Path) -> Iterator[ShownConversation]:
    """Yield the conversations of prepared data in the order of their train split. Raises: UserError, BadShard."""
    source = TokenSource(folder, "train")
    rows = source.manifest.rows
    engine = HuggingFaceTokenizer.from_file(str(folder / TOKENIZER))
    length = 0 if rows is None else rows.seq_len
    for start in range(0, len(source) - length + 1 if length else 0, length):
        words = source.tokens(start, start + length)
        begins = [*np.flatnonzero(words & START_BIT), len(words)]
        for sequence in (words[begin:end] for begin, end in itertools.pairwise(begins)):
            if sequence[0] & MISMATCHED_BIT or not (sequence[1:] & TRAINED).any():
                continue
            yield ShownConversation(bool(sequence[0] & REJECTED_BIT), _pieces(engine, sequence))


def _pieces(engine: HuggingFaceTokenizer, words: Words) -> list[tuple[str, bool]]:
    is_learned = words & TRAINED != 0
    ends = [*(np.flatnonzero(is_learned[1:] != is_learned[:-1]) + 1), len(words)]
    pieces, before = [], ""
    for end in ends:  # decoded from the start each time: what decoders do at the start of a text is not between pieces
        text = engine.decode((words[:end] & ID_MASK).tolist(), skip_special_tokens=False)
        pieces.append((text.removeprefix(before), bool(is_learned[end - 1])))
        before = text
    return pieces

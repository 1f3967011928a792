from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.config.data import CacheConfig, PrepareConfig
from argosy.data import prepare as module
from argosy.data.manifest import TEMPLATE, Manifest, verify
from argosy.data.packing import ID_MASK, START_BIT, TRAINED, is_packed
from argosy.data.prepare import prepare
from argosy.data.shards import ShardIndex, TokenSource
from argosy.data.stores.cache import Cache
from argosy.data.stores.folder import StoreFolder
from argosy.data.stores.store import upload
from argosy.data.tokenizer import Tokenizer
from argosy.errors import UserError

SEQ_LEN = 96
GOOD = 120


def chat(number: int) -> dict[str, Any]:
    question, answer = f"What is {number} + {number}?", f"It is {2 * number}."
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def config(tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareConfig:
    monkeypatch.setattr(module, "RESULT_BYTES", 2000)
    monkeypatch.setattr(module, "DOCUMENTS_PIECE_BYTES", 3000)
    lines = [json.dumps(chat(number)) for number in range(GOOD)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return PrepareConfig(
        input=(str(tmp_path / "chats.jsonl"),),
        out=tmp_path / "out",
        tokenizer=tokenizer_json,
        objective="sft",
        seq_len=SEQ_LEN,
        chat_template="chatml",
        validation_fraction=0.1,
        shard_tokens=1500,
        processes=1,
    )


def texts(folder: Path, manifest: Manifest) -> list[str]:
    """The conversations of both splits, and after a | the part of each that is learned."""
    tokenizer, found = Tokenizer.load(folder / "tokenizer.json"), []
    for split in ("train", "validation"):
        source = TokenSource(folder, split)  # type: ignore[arg-type]
        rows = np.empty((source.windows(SEQ_LEN), SEQ_LEN + 1), np.int32)
        source.read_windows(np.arange(len(rows)), rows)
        assert is_packed(rows)
        for row in rows[:, :-1]:
            starts = [*np.flatnonzero(row & START_BIT), SEQ_LEN]
            for begin, end in itertools.pairwise(starts):
                words = row[begin:end]
                learned = words[words & TRAINED != 0] & ID_MASK
                if len(learned):
                    found.append(f"{tokenizer.decode(words & ID_MASK)}|{tokenizer.decode(learned)}")
    return found


def test_every_conversation_is_in_one_row_with_its_mask(config: PrepareConfig) -> None:
    manifest = prepare(config)
    assert len(manifest.splits["train"]) > 1
    expected = {
        f"<|im_start|>user\nWhat is {n} + {n}?<|im_end|>\n<|im_start|>assistant\nIt is {2 * n}.<|im_end|>\n"
        f"|It is {2 * n}.<|im_end|>"
        for n in range(GOOD)
    }
    found = texts(config.out, manifest)
    assert len(found) == GOOD
    assert set(found) == expected
    assert sum(manifest.documents(split) for split in manifest.splits) == GOOD
    assert manifest.rows is not None
    assert f"{GOOD} conversations from 1 file; packed into" in manifest.in_words()
    for split in manifest.splits.values():
        for shard in split:
            assert shard.tokens % SEQ_LEN == 0
            assert ShardIndex.read(config.out / f"{shard.name}.idx").tokens == shard.tokens
    verify(config.out)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_interrupted_prepare_comes_to_the_same(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    whole = prepare(config)
    other = config.model_copy(update={"out": tmp_path / "again", "processes": processes})
    journal_add, calls = module.Journal.add, []

    def dies(journal: Any, cut: Any) -> None:
        journal_add(journal, cut)
        calls.append(cut)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(module.Journal, "add", dies)
        with pytest.raises(KeyboardInterrupt):
            prepare(other)
    again = prepare(other)
    assert again.splits == whole.splits
    assert prepare(other) == again  # done already


def bad_lines(path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[10] = '{"messages": [{"role": "user", "content": "half'
    lines[20] = json.dumps({"messages": chat(1)["messages"][::-1]})
    lines[30] = json.dumps({"messages": [chat(1)["messages"][0], {"role": "assistant", "content": ""}]})
    lines[40] = json.dumps({"messages": [{"role": "user", "content": "<|endoftext|>"}, chat(1)["messages"][1]]})
    path.write_text("\n".join(lines))


def test_bad_lines_are_counted_or_refused_with_their_place(config: PrepareConfig, tmp_path: Path) -> None:
    bad_lines(tmp_path / "chats.jsonl")
    manifest = prepare(config)
    assert sum(manifest.documents(split) for split in manifest.splits) == GOOD - 4
    words = manifest.in_words()
    kinds = "1 x broken JSON, 1 x empty answer, 1 x roles in a wrong order, 1 x special token in a message"
    assert f"4 conversations skipped: {kinds}" in words
    chats = tmp_path / "chats.jsonl"
    _, *places = words.splitlines()
    assert f"  {chats}, line 11, column 43 (Unterminated string starting at): broken JSON" in places
    assert f"  {chats}, line 31: messages[1] says nothing: empty answer" in places
    assert [place for place in places if place.startswith(f"  {chats}, line 41: message 0 spells <|endoftext|>")]
    assert len(places) == 4
    strict = config.model_copy(update={"out": tmp_path / "strict", "on_bad_input": "refuse"})
    with pytest.raises(UserError, match=r"chats\.jsonl, line 11.*broken JSON"):
        prepare(strict)


def test_half_of_a_surrogate_pair_is_bad_input(config: PrepareConfig, tmp_path: Path) -> None:
    lines = [json.dumps(chat(1)), json.dumps(chat(2)).replace("It is 4", "It is \\ud83d")]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    manifest = prepare(config)
    assert manifest.skipped == {"broken UTF-8": 1}
    assert manifest.skipped_at["broken UTF-8"][0].endswith("chats.jsonl, line 2 (half of a surrogate pair)")


def test_the_first_places_of_many_bad_lines_are_kept(config: PrepareConfig, tmp_path: Path) -> None:
    lines = [json.dumps(chat(n)) if n % 20 else "{" for n in range(GOOD)]
    (tmp_path / "chats.jsonl").write_text("\n\n".join(lines))
    manifest = prepare(config)
    assert manifest.skipped == {"broken JSON": GOOD // 20}
    where = f"{tmp_path / 'chats.jsonl'}, line %d, column 2 (Expecting property name enclosed in double quotes)"
    assert manifest.skipped_at == {"broken JSON": tuple(where % line for line in (1, 41, 81))}
    assert prepare(config.model_copy(update={"out": tmp_path / "two", "processes": 2})) == manifest


def test_nothing_left_is_told_by_its_reasons(config: PrepareConfig, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": []}\n')
    with pytest.raises(
        UserError, match=rf"^{chats}: no conversation is left .*first {chats}, line 1: .*Mend the first"
    ):
        prepare(config)
    long = chat(1)["messages"]
    long[1]["content"] = "word " * 200
    chats.write_text(json.dumps({"messages": long}))
    with pytest.raises(UserError, match=r"\(1 x longer than seq_len\)\. Raise seq_len = 96, or shorten them\.$"):
        prepare(config)


def test_long_conversations_end_after_an_earlier_answer(config: PrepareConfig, tmp_path: Path) -> None:
    long, hopeless = chat(1)["messages"] * 10, chat(1)["messages"]
    hopeless = [{"role": "user", "content": "word " * 200}, hopeless[1]]
    lines = [json.dumps({"messages": messages}) for messages in (long, hopeless)]
    (tmp_path / "chats.jsonl").write_text("\n".join([*lines, json.dumps(chat(3)), json.dumps(chat(4))]))
    manifest = prepare(config)
    assert manifest.truncated == 1
    assert manifest.dropped == {"longer than seq_len": 1}
    assert "1 conversation cut after an earlier answer" in manifest.in_words()
    (cut,) = [text for text in texts(config.out, manifest) if "What is 1 + 1?" in text]
    assert cut.endswith("It is 2.<|im_end|>")
    assert 1 <= cut.count("user") < 10


def test_what_works_on_text_alone_is_refused(config: PrepareConfig, tmp_path: Path) -> None:
    for keys in ({"max_text_bytes": 100}, {"filters": {"min_chars": 3}}):
        with pytest.raises(ValueError, match="conversation"):
            PrepareConfig(**{**config.model_dump(), **keys})
    (tmp_path / "notes.txt").write_text("no record")
    with pytest.raises(UserError, match=r"notes\.txt: conversations are read from \.jsonl, \.json"):
        prepare(config.model_copy(update={"input": (str(tmp_path / "notes.txt"),)}))
    with pytest.raises(UserError, match=r"tokenizer = none.*takes conversations"):
        prepare(config.model_copy(update={"tokenizer": None}))
    assert not config.out.exists()


def test_rows_of_another_length_are_refused(config: PrepareConfig) -> None:
    prepare(config)
    with pytest.raises(UserError, match=f"were packed into rows of {SEQ_LEN} tokens. Set data.seq_len = {SEQ_LEN}"):
        TokenSource(config.out).windows(32)
    for other, said in (({"seq_len": 32}, "seq_len = 96 there"), ({"objective": None}, "rows = conversations there")):
        with pytest.raises(UserError, match=rf"prepared already, with other options \({said}"):
            prepare(config.model_copy(update=other))


def test_parquet_holds_conversations(config: PrepareConfig, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([chat(n) for n in range(GOOD)]), tmp_path / "chats.parquet")
    jsonl = prepare(config)
    found = prepare(config.model_copy(update={"input": (str(tmp_path / "chats.parquet"),), "out": tmp_path / "tables"}))
    assert found.splits == jsonl.splits


def test_a_folder_may_hold_other_files_beside_its_conversations(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "README.md").write_text("Where they are from.")
    (tmp_path / "chats" / "train.json").write_text(json.dumps([chat(number) for number in range(GOOD)]))
    found = prepare(config.model_copy(update={"input": (str(tmp_path / "chats"),)}))
    words = found.in_words()
    assert words.startswith(f"{GOOD} conversations from 1 file; ") and "; 1 file left out: README.md" in words
    assert "extensions" not in words  # no option reads it as a conversation


def test_messages_may_have_a_time_and_other_columns_that_json_lacks(config: PrepareConfig, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    extra = {"timestamp": datetime(2024, 7, 26, tzinfo=UTC), "price": Decimal("1.5"), "hash": b"\xff"}
    rows = [{"messages": [{**message, **extra} for message in chat(n)["messages"]]} for n in range(4)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "timed.parquet")
    manifest = prepare(config.model_copy(update={"input": (str(tmp_path / "timed.parquet"),)}))
    assert len(texts(config.out, manifest)) == 4


def test_a_copy_in_a_store_brings_the_template_too(config: PrepareConfig, tmp_path: Path) -> None:
    prepare(config)
    (tmp_path / "there").mkdir()
    upload(config.out, f"file://{tmp_path}/there")
    cache = Cache(CacheConfig(folder=str(tmp_path / "cache"), size_gb=0.01))
    brought = StoreFolder(f"file://{tmp_path}/there", cache).local
    assert (brought / TEMPLATE).read_bytes() == (config.out / TEMPLATE).read_bytes()


def test_the_command_that_prepares_them_again_says_for_which_objective(config: PrepareConfig) -> None:
    command = prepare(config).prepare_command(config.out)
    assert f"chats.jsonl --objective sft --validation-fraction 0.1 --shard-tokens 1500 --seq-len {SEQ_LEN}" in command

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.cutting import Cutter, DocumentPosition, Journal
from argosy.data.manifest import Shard, SplitName
from argosy.data.tokenizer import EncodedBatch

Cuts = dict[SplitName, tuple[Shard, ...]]
DOCUMENTS = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=40)


def batch(documents: list[tuple[int, bool]], first: int) -> tuple[Callable[[int], DocumentPosition], EncodedBatch]:
    """Documents of (length, held out); every token of a document is its number."""
    lengths = np.array([length for length, _ in documents])
    numbers = np.arange(first, first + len(documents))
    return lambda n: DocumentPosition(0, 0, 0, int(numbers[n])), EncodedBatch(
        tokens=np.repeat(numbers, lengths).astype(np.uint16),
        lengths=lengths,
        text_bytes=lengths * 2,
        held_out=np.array([held_out for _, held_out in documents]),
    )


def cut(folder: Path, documents: list[tuple[int, bool]], batch_size: int, wants_validation: bool = False) -> Cuts:
    with Cutter(folder, np.dtype("<u2"), 20, Journal(folder, "job")) as cutter:
        for first in range(0, len(documents), batch_size):
            cutter.add(*batch(documents[first : first + batch_size], first))
        return cutter.finish(DocumentPosition(1, 0), wants_validation)


def stored(folder: Path, shards: tuple[Shard, ...]) -> list[list[int]]:
    return [np.fromfile(folder / f"{shard.name}.bin", "<u2").tolist() for shard in shards]


@settings(max_examples=20)
@given(DOCUMENTS, st.integers(1, 40))
def test_every_document_is_stored_once_in_order_in_its_split(
    tmp_path_factory: pytest.TempPathFactory, documents: list[tuple[int, bool]], batch_size: int
) -> None:
    folder = tmp_path_factory.mktemp("out")
    splits = cut(folder, documents, batch_size)
    for split, held_out in (("train", False), ("validation", True)):
        expected = [n for n, (length, side) in enumerate(documents) for _ in range(length) if side == held_out]
        shards = stored(folder, splits[split])
        assert [token for tokens in shards for token in tokens] == expected
        assert all(len(tokens) <= 20 and tokens for tokens in shards)
        assert [shard.text_bytes for shard in splits[split]] == [2 * len(tokens) for tokens in shards]


@settings(max_examples=20)
@given(DOCUMENTS, st.integers(1, 40), st.integers(1, 40))
def test_shards_do_not_depend_on_batches(
    tmp_path_factory: pytest.TempPathFactory, documents: list[tuple[int, bool]], a: int, b: int
) -> None:
    assert cut(tmp_path_factory.mktemp("a"), documents, a) == cut(tmp_path_factory.mktemp("b"), documents, b)


def test_a_longer_document_gets_a_shard_for_itself(tmp_path: Path) -> None:
    splits = cut(tmp_path, [(5, False), (50, False), (5, False)], 10)
    assert [len(tokens) for tokens in stored(tmp_path, splits["train"])] == [5, 50, 5]


@pytest.mark.parametrize("held_out", [True, False])
def test_two_documents_are_enough_for_both_splits(tmp_path: Path, held_out: bool) -> None:
    splits = cut(tmp_path, [(5, held_out), (6, held_out)], 10, wants_validation=True)
    sizes = {split: [shard.tokens for shard in shards] for split, shards in splits.items()}
    assert sizes == ({"train": [6], "validation": [5]} if held_out else {"train": [5], "validation": [6]})


def test_one_document_stays_where_it_is(tmp_path: Path) -> None:
    splits = cut(tmp_path, [(5, False)], 10, wants_validation=True)
    assert [len(splits[split]) for split in ("train", "validation")] == [1, 0]


@settings(max_examples=20)
@given(DOCUMENTS, st.integers(1, 40), st.booleans())
def test_going_on_from_the_journal_gives_the_same_shards(
    tmp_path_factory: pytest.TempPathFactory, documents: list[tuple[int, bool]], killed_after: int, wants: bool
) -> None:
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    expected = cut(whole, documents, 7, wants)
    with Cutter(killed, np.dtype("<u2"), 20, Journal(killed, "job")) as cutter:
        cutter.add(*batch(documents[:killed_after], 0))
    with (killed / "prepare.journal").open("a") as file:
        file.write('{"shards": {"tra')  # killed while it wrote a line
    journal = Journal(killed, "job")
    with Cutter(killed, np.dtype("<u2"), 20, journal) as cutter:
        first = journal.next.document
        cutter.add(*batch(documents[first:], first))
        assert cutter.finish(DocumentPosition(1, 0), wants) == expected
    assert {p.name: p.read_bytes() for p in whole.iterdir()} == {p.name: p.read_bytes() for p in killed.iterdir()}

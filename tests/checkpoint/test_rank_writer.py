"""One rank's part of a checkpoint: what the first rank waits for, and what it does not take for it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

from argosy.checkpoint import fence, rank_writer, store
from argosy.checkpoint.checksums import shard_name
from argosy.checkpoint.fence import Fenced
from argosy.checkpoint.rank_writer import PartNote, SaveOrder, commit_part, leave_note
from checkpoint.saving import manifest
from waiting import wait_until

DATA = bytes(range(256)) * 100


@pytest.fixture
def snapshot() -> int:
    memory = os.memfd_create("test")
    os.write(memory, DATA)
    return memory


def order(run_dir: Path, rank: int = 0, size: int = 1, ticket: str = "this") -> SaveOrder:
    record = manifest(4).to_record()
    return SaveOrder(str(run_dir), ticket, 0, 4, rank, size, len(DATA), time.monotonic(), record)


def test_the_parts_of_all_ranks_become_a_checkpoint(tmp_path, snapshot):
    for rank in (2, 1):
        assert commit_part(order(tmp_path, rank, 3), snapshot) == len(DATA)
        assert store.committed(tmp_path) == []
    assert commit_part(order(tmp_path, 0, 3), snapshot) == 3 * len(DATA)
    (checkpoint,) = store.committed(tmp_path)
    checkpoint.verify()
    assert list(checkpoint.manifest.files) == [shard_name(rank) for rank in range(3)]
    assert (checkpoint.folder / shard_name(2)).read_bytes() == DATA


def test_the_first_rank_waits_for_the_others_notes_of_this_attempt(tmp_path, snapshot):
    commit_part(order(tmp_path, 1, 2, ticket="an attempt before"), snapshot)
    first = threading.Thread(target=commit_part, args=(order(tmp_path, 0, 2), snapshot))
    first.start()
    time.sleep(0.1)
    assert first.is_alive() and store.committed(tmp_path) == []
    commit_part(order(tmp_path, 1, 2), snapshot)
    first.join(10)
    assert len(store.committed(tmp_path)) == 1


def test_a_part_that_failed_is_the_end_of_the_attempt(tmp_path, snapshot):
    leave_note(order(tmp_path, 1, 2), PartNote("this", error="[Errno 5] Input/output error"))
    with pytest.raises(OSError, match=r"rank 1: \[Errno 5\] Input/output error"):
        commit_part(order(tmp_path, 0, 2), snapshot)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_ranks_whose_parts_do_not_come_are_named(tmp_path, snapshot, monkeypatch):
    monkeypatch.setattr(rank_writer, "STALL_S", 0.3)
    commit_part(order(tmp_path, 2, 4), snapshot)
    with pytest.raises(OSError, match="part of rank 1, 3 for 0 s"):
        commit_part(order(tmp_path, 0, 4), snapshot)


def save_in_groups(folder: Path, size: int, snapshot: int) -> None:
    """All ranks write at once, as their writers do; what rank 0 raises is raised here."""
    others = [threading.Thread(target=_quietly, args=(order(folder, rank, size), snapshot)) for rank in range(1, size)]
    for other in others:
        other.start()
    try:
        commit_part(order(folder, 0, size), snapshot)
    finally:
        for other in others:
            other.join()


def _quietly(mine: SaveOrder, snapshot: int) -> None:
    with suppress(OSError):
        commit_part(mine, snapshot)


@pytest.mark.parametrize("size", [3, 4, 7, 10])
def test_with_several_groups_their_heads_sum_them_up(tmp_path, snapshot, monkeypatch, size):
    monkeypatch.setattr(rank_writer, "RANKS_OF_A_HEAD", 3)
    save_in_groups(tmp_path, size, snapshot)
    (checkpoint,) = store.committed(tmp_path)
    checkpoint.verify()
    assert list(checkpoint.manifest.files) == [shard_name(rank) for rank in range(size)]


@pytest.mark.parametrize("failing", [1, 3, 4])
def test_a_part_that_fails_in_any_group_is_the_end_of_the_attempt_and_named(tmp_path, snapshot, monkeypatch, failing):
    monkeypatch.setattr(rank_writer, "RANKS_OF_A_HEAD", 3)
    order(tmp_path, failing, 6).file.mkdir(parents=True)  # where its file is to be
    with pytest.raises(OSError, match=r"rank [0-9 to]+: \[Errno 21\] Is a directory") as caught:
        save_in_groups(tmp_path, 6, snapshot)
    assert f"rank {failing}" in str(caught.value)
    assert store.committed(tmp_path) == []


def test_a_rank_that_does_not_come_is_named_by_its_head_and_a_head_by_the_first(tmp_path, snapshot, monkeypatch):
    monkeypatch.setattr(rank_writer, "RANKS_OF_A_HEAD", 2)
    monkeypatch.setattr(rank_writer, "STALL_S", 1.0)
    _quietly(order(tmp_path, 1, 6), snapshot)
    head = threading.Thread(target=_quietly, args=(order(tmp_path, 2, 6), snapshot))
    _quietly(order(tmp_path, 5, 6), snapshot)
    head.start()
    with pytest.raises(OSError, match=r"no progress on the part of rank (3 for|(2 to 3, )?4 to 5 for)"):
        commit_part(order(tmp_path, 0, 6), snapshot)
    head.join()


def test_a_head_waits_no_longer_once_the_first_rank_has_given_the_checkpoint_up(tmp_path, snapshot, monkeypatch):
    monkeypatch.setattr(rank_writer, "RANKS_OF_A_HEAD", 2)
    monkeypatch.setattr(rank_writer, "PROGRESS_S", 0.05)
    head, ended = order(tmp_path, 2, 4), []

    def lead() -> None:
        with pytest.raises(OSError, match="has given this checkpoint up"):
            commit_part(head, snapshot)
        ended.append(True)

    waiting = threading.Thread(target=lead)
    waiting.start()
    wait_until(lambda: head.note_of(2).exists() and head.summary_of(2).exists())
    store.discard(head.partial)
    waiting.join(rank_writer.STALL_S / 4)
    assert ended and not head.partial.exists()


def test_no_rank_looks_at_the_notes_of_all(tmp_path, snapshot, monkeypatch):
    monkeypatch.setattr(rank_writer, "RANKS_OF_A_HEAD", 4)
    looked: dict[int, set[Path]] = defaultdict(set)
    real = PartNote.read.__func__

    def read(cls: type[PartNote], path: Path, ticket: str) -> PartNote | None:
        looked[threading.get_ident()].add(path)
        return real(cls, path, ticket)

    monkeypatch.setattr(PartNote, "read", classmethod(read))
    save_in_groups(tmp_path, 16, snapshot)
    assert max(map(len, looked.values())) <= 3 + 3


def test_folders_above_a_checkpoint_are_on_the_disk_when_it_is_committed(tmp_path, snapshot, monkeypatch):
    synced: list[Path] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()) or fsync(file)
    )
    commit_part(order(tmp_path / "runs" / "mine"), snapshot)
    assert {tmp_path, tmp_path / "runs", tmp_path / "runs/mine", tmp_path / "runs/mine/checkpoints"} <= set(synced)


def test_whoever_waits_hears_that_it_goes_on(tmp_path, snapshot, monkeypatch):
    monkeypatch.setattr(rank_writer, "PROGRESS_S", 0.0)
    told: list[int] = []
    commit_part(order(tmp_path), snapshot, lambda: told.append(1))
    assert len(told) >= rank_writer.CHUNKS


def test_a_part_that_grows_is_waited_for(tmp_path, snapshot, monkeypatch):
    monkeypatch.setattr(rank_writer, "STALL_S", 0.5)
    slow = order(tmp_path, 1, 2)
    slow.partial.mkdir(parents=True)

    def write_slowly() -> None:
        for _ in range(10):
            with slow.file.open("ab") as file:
                file.write(b"a little")
            time.sleep(0.1)
        commit_part(slow, snapshot)

    other = threading.Thread(target=write_slowly)
    other.start()
    commit_part(order(tmp_path, 0, 2), snapshot)
    other.join()
    store.committed(tmp_path)[0].verify()


@pytest.mark.parametrize(
    "note",
    [
        "",
        "{",
        "[]",
        json.dumps({"ticket": "this", "what": 1}),
        json.dumps({"ticket": "this", "files": [[1]], "error": ""}),
        "null",
    ],
)
def test_a_note_that_makes_no_sense_is_none(tmp_path, snapshot, monkeypatch, note):
    monkeypatch.setattr(rank_writer, "STALL_S", 0.1)
    mine = order(tmp_path, 0, 2)
    mine.partial.mkdir(parents=True)
    mine.note_of(1).write_text(note)
    with pytest.raises(OSError, match="no progress"):
        commit_part(mine, snapshot)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_an_older_generation_writes_nothing(tmp_path, snapshot, rank):
    fence.begin_generation(tmp_path, 1)
    with pytest.raises(Fenced):
        commit_part(order(tmp_path, rank, 2), snapshot)
    assert not (tmp_path / "checkpoints").exists()


def test_a_generation_that_begins_during_a_long_write_ends_it(tmp_path, snapshot, monkeypatch):
    monkeypatch.setattr(rank_writer, "SYNC_BYTES", 1000)
    checks = []

    def begins_at_the_third_look(run_dir: Path, generation: int) -> None:
        checks.append(generation)
        if len(checks) == 3:
            raise Fenced("generation 1 has begun")

    monkeypatch.setattr(fence, "check_generation", begins_at_the_third_look)
    with pytest.raises(Fenced):
        commit_part(order(tmp_path), snapshot)
    assert store.committed(tmp_path) == []


def test_a_part_that_fails_leaves_a_note_of_why(tmp_path, snapshot):
    mine = order(tmp_path, 1, 2)
    mine.file.mkdir(parents=True)  # what cannot be replaced by a file
    with pytest.raises(OSError):
        commit_part(mine, snapshot)
    note = json.loads(mine.note_of(1).read_bytes())
    assert note["ticket"] == "this" and note["error"].startswith("[Errno ")

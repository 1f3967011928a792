"""The process that writes: it ends with its parent; every file is read back by another than its writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint import store, writer
from argosy.checkpoint.checksums import DamagedCheckpoint, shard_name
from argosy.checkpoint.rank_writer import SaveOrder, commit_part
from argosy.checkpoint.remote import Remote
from argosy.checkpoint.save import WRITER
from argosy.checkpoint.store import Checkpoint
from argosy.checkpoint.writer import Upkeep, Writer, verify_together, vouch
from argosy.processes.child import Child
from checkpoint.saving import flip_a_bit, manifest

SIZE = 3
CLOSING = threading.Event()
CLOSING.set()


def order(run_dir: Path, rank: int) -> SaveOrder:
    return SaveOrder(str(run_dir), "this", 0, 4, rank, SIZE, 1000, time.monotonic(), manifest(4).to_record())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A checkpoint of three ranks, committed and not read yet."""
    memory = os.memfd_create("test")
    os.write(memory, bytes(1000))
    for rank in reversed(range(SIZE)):
        commit_part(order(tmp_path, rank), memory)
    os.close(memory)
    return store.committed(tmp_path)[0]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read back, in order."""
    files: list[str] = []
    plain = Checkpoint.verify

    def verify(self: Checkpoint, names: list[str]) -> None:
        files.extend(names)
        plain(self, names)

    monkeypatch.setattr(Checkpoint, "verify", verify)
    return files


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FIRST_WRITER_S", 0.2)


def test_each_reads_what_another_wrote_and_all_of_it_is_read_once(checkpoint, tmp_path, read):
    for rank in (1, 2):
        vouch(order(tmp_path, rank), CLOSING)
    verify_together(checkpoint, SIZE)
    assert read == [shard_name(rank) for rank in (2, 0, 1)]
    assert not list(checkpoint.folder.glob("*.read"))


def test_the_first_reads_the_shares_that_have_no_note(checkpoint, tmp_path, read):
    vouch(order(tmp_path, 2), CLOSING)
    verify_together(checkpoint, SIZE)
    assert read == [shard_name(rank) for rank in (0, 1, 2)]


def test_the_first_waits_for_one_that_is_a_little_late(checkpoint, tmp_path, read, monkeypatch):
    monkeypatch.setattr(writer, "FIRST_WRITER_S", 10.0)
    vouch(order(tmp_path, 1), CLOSING)
    late = threading.Timer(0.3, vouch, (order(tmp_path, 2), CLOSING))
    late.start()
    verify_together(checkpoint, SIZE)
    late.join()
    assert sorted(read) == [shard_name(rank) for rank in range(SIZE)]


@pytest.mark.parametrize("damaged", range(SIZE))
@pytest.mark.parametrize("vouching", [(), (1, 2)])
def test_damage_is_found_by_any_reader(checkpoint, tmp_path, damaged, vouching):
    flip_a_bit(checkpoint.folder / shard_name(damaged), 4321)
    for rank in vouching:
        vouch(order(tmp_path, rank), CLOSING)
    with pytest.raises(DamagedCheckpoint, match=f"{shard_name(damaged)} does not match its checksum"):
        verify_together(checkpoint, SIZE)


@pytest.mark.parametrize("text", ["", "[]", '{"manifest_sha256": "of another", "problem": null}'])
def test_a_note_that_is_not_of_this_checkpoint_vouches_for_nothing(checkpoint, read, text):
    for rank in (1, 2):
        (checkpoint.folder / f"rank-{rank:05d}.read").write_text(text)
    verify_together(checkpoint, SIZE)
    assert len(read) == SIZE


def ended(work: Callable[[], None], after: Callable[[], None]) -> bool:
    """True if `work`, begun in a thread, waits until `after` was called, and ends then."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.3)
    waited = thread.is_alive()
    after()
    thread.join(10)
    return waited and not thread.is_alive()


def test_what_will_not_be_committed_is_not_waited_for(tmp_path):
    mine = order(tmp_path, 1)
    mine.partial.mkdir(parents=True)
    assert ended(lambda: vouch(mine, threading.Event()), lambda: store.discard(mine.partial))
    mine.partial.mkdir()
    closing = threading.Event()
    assert ended(lambda: vouch(mine, closing), closing.set)


def test_one_that_is_deleted_before_it_is_read_is_let_be(checkpoint, tmp_path):
    (checkpoint.folder / shard_name(2)).unlink()
    vouch(order(tmp_path, 1), CLOSING)
    (note,) = tmp_path.rglob("*.read")
    assert "rank-00002.safetensors" in note.read_text()
    store.remove(checkpoint.folder)
    vouch(order(tmp_path, 1), CLOSING)
    assert not list(tmp_path.rglob("*.read"))


@pytest.fixture
def process() -> Iterator[Child]:
    memory = os.memfd_create("test")
    child = Child(WRITER, str(memory), pass_fds=[memory])
    os.close(memory)
    yield child
    child.kill()


def test_a_rank_that_cannot_read_its_share_says_so_and_reads_that_of_the_next(checkpoint, tmp_path, monkeypatch):
    news, answers = list[str](), iter([RuntimeError("can't start new thread"), None])

    def problem(*_: object) -> None:
        if (answer := next(answers)) is not None:
            raise answer

    monkeypatch.setattr(Checkpoint, "problem", problem)
    saver = Writer(-1, lambda what, /, **facts: news.append(what))
    for _ in range(2):
        saver._upkeep.put(order(tmp_path, 1), Upkeep())
    saver._upkeep.finish()
    assert news == ["upkeep_failed"] and list(tmp_path.rglob("*.read"))


@pytest.mark.parametrize("failures", [1, 9])
def test_the_last_copy_is_tried_again_a_few_times(checkpoint, tmp_path, monkeypatch, failures):
    news, put, left = list[str](), Remote.put, [ConnectionResetError("reset")] * failures

    def put_later(remote: Remote, *what: Any) -> bool:
        if left:
            raise left.pop()
        return put(remote, *what)

    monkeypatch.setattr(Remote, "put", put_later)
    monkeypatch.setattr(writer, "LAST_COPY_PAUSES_S", (0.0, 0.0))
    checkpoint.mark_verified()
    saver = Writer(-1, lambda what, /, **facts: news.append(what))
    saver._copies.put(order(tmp_path, 0), Upkeep(remote=str(tmp_path / "there")))
    saver._finish()
    assert news == ["drain_failed", *(["drained"] if failures == 1 else ["drain_failed"] * 2), "closed"]


def test_a_place_that_lets_nobody_delete_has_the_copy_and_says_that_it_keeps_too_much(
    checkpoint, tmp_path, monkeypatch
):
    def refuse(*_: Any) -> None:
        raise PermissionError("AccessDenied")

    news = list[tuple[str, Any]]()
    monkeypatch.setattr(Remote, "prune", refuse)
    checkpoint.mark_verified()
    saver = Writer(-1, lambda what, /, **facts: news.append((what, facts.get("error"))))
    saver._copies.put(order(tmp_path, 0), Upkeep(remote=str(tmp_path / "there")))
    saver._finish()
    assert news == [("drained", None), ("upkeep_failed", f"{tmp_path / 'there'}: AccessDenied"), ("closed", None)]


def test_it_imports_nothing_heavy():
    heavy = "{'torch', 'numpy', 'pydantic', 'fsspec', 'safetensors'}"
    code = f"import sys, argosy.checkpoint.writer; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_it_ends_when_its_orders_end(process):
    process.channel.send("close")
    process.hear(20.0)
    assert process.reap() == "exit code 0"


def test_it_says_when_all_is_done(process):
    process.channel.send("close")
    assert process.hear(20.0) == [{"kind": "closed"}]


def test_signals_that_are_meant_for_training_do_not_end_it(process):
    process.channel.send("close")
    process.hear(20.0)
    assert os.getsid(process.pid) != os.getsid(0)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert process.hear(0.0) == [] and process.is_alive

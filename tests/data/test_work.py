"""The folder that `prepare` shares with its workers: whole results, one claim a task, nothing of another job."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from argosy.data.work import Chunk, DamagedResult, PrepareTask, WorkFolder, WorkState

TASK = PrepareTask("tokens", 7)
JOB = {"fingerprint": "a", "words": "b"}


@pytest.fixture
def folder(tmp_path: Path) -> WorkFolder:
    made = WorkFolder(tmp_path / "work")
    made.make(JOB, ["file"], [[0, 1]])
    return made


def chunk(is_last: bool = True, end: int = 3) -> Chunk:
    arrays = {"ids": np.arange(5, dtype=np.uint16), "none": np.empty(0, np.int64), "at": np.array([1, 2], np.int64)}
    return Chunk({"documents": 2}, arrays, end, is_last)


def test_a_result_comes_back_as_it_was_written(folder):
    folder.write(TASK, 0, chunk(), "worker")
    for found in (folder.read(TASK, 0), folder.mapped(TASK, 0)):
        assert (found.facts, found.end, found.is_last) == ({"documents": 2}, 3, True)
        for name, array in chunk().arrays.items():
            assert found.arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(found.arrays[name], array)
    assert folder.end(TASK, 0) == (3, True) and folder.end(TASK, 1) is None


def test_all_chunks_of_a_task_are_read_in_order(folder):
    for number in range(3):
        folder.write(TASK, number, chunk(is_last=number == 2, end=number), "worker")
    assert [each.end for each in folder.mapped_all(TASK)] == [0, 1, 2]
    folder.drop(TASK, 1)
    assert folder.end(TASK, 1) is None


@pytest.mark.parametrize("at", [-1, 0])
def test_a_damaged_result_is_noticed(folder, at):
    folder.write(TASK, 0, chunk(), "worker")
    (path,) = (folder.path / "results").iterdir()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedResult):
        folder.read(TASK, 0)


def test_a_task_is_claimed_once_until_it_is_given_back(folder):
    assert folder.claim(TASK, "one") and not folder.claim(TASK, "two")
    folder.release_all({"two"})
    assert not folder.claim(TASK, "two")
    folder.release_all({"one"})
    assert folder.claim(TASK, "two")
    folder.release(TASK)
    assert folder.claim(TASK, "one")
    (claim,) = folder.path.rglob("*.claim")
    claim.write_text("")  # its worker was killed before it wrote its name
    folder.release_all({"two"})
    assert folder.claim(TASK, "two")


def test_what_the_caller_wants_and_how_workers_are(folder):
    wanted = WorkState("caller", stage="tokens", tasks=3, ahead=2)
    folder.say(wanted)
    folder.beat("one", 4, 100)
    assert folder.state() == wanted and folder.beats() == {"one": (4, 100)}
    assert (folder.job(), folder.input()) == (JOB, (["file"], [[0, 1]]))
    assert folder.failure(TASK) is None
    folder.fail(TASK, "DataError", "no text", "one")
    assert folder.failure(TASK) == ("DataError", "no text")


@pytest.mark.parametrize(("fingerprint", "stays"), [("a", True), ("other", False)])
def test_results_of_the_same_job_alone_stay(folder, fingerprint, stays):
    folder.write(TASK, 0, chunk(), "worker")
    folder.claim(TASK, "worker")
    folder.fail(TASK, "DataError", "no text", "worker")
    folder.beat("worker", 1, 1)
    folder.make(JOB | {"fingerprint": fingerprint}, [], [])
    assert (folder.end(TASK, 0) is not None) is stays
    assert folder.claim(TASK, "another") and folder.failure(TASK) is None and folder.beats() == {}


def test_a_folder_that_is_gone_wants_nothing(folder):
    folder.remove()
    assert folder.state() is None and not folder.path.exists()

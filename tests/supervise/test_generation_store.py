"""On one node a world's members meet at a file of their agent's, which nobody can open once the world is over."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistError, FileStore

from argosy.supervise.generation_store import GenerationStore, store_file


def alone() -> GenerationStore:
    """That of an agent whose node is the run's only one."""
    return GenerationStore(lambda generation, port: None, is_file=True)


def test_each_generation_has_a_file_of_its_own(tmp_path):
    first, second = store_file(tmp_path, 1), store_file(tmp_path, 2)
    FileStore(str(first), -1).set("address", "of a dead rank")
    assert FileStore(str(second), -1).check(["address"]) is False


def test_who_waits_for_a_lost_member_is_told_at_once_and_who_comes_later_too(tmp_path):
    path = store_file(tmp_path, 1)
    store = FileStore(str(path), -1)
    store.set("here", "1")
    looked = threading.Event()

    def wait_for_the_lost() -> None:
        looked.set()
        store.wait(["address of a lost rank"], timedelta(minutes=5))

    with ThreadPoolExecutor(1) as pool:
        waiting: Future[None] = pool.submit(wait_for_the_lost)
        looked.wait()
        alone().end(1, tmp_path)
        with pytest.raises(DistError):
            waiting.result(60)
    with pytest.raises(DistError):
        store.get("here")
    with pytest.raises(DistError):
        FileStore(str(path), -1)


def test_a_store_that_nobody_opened_yet_can_be_closed_and_closed_again(tmp_path):
    path = store_file(tmp_path, 3)
    alone().end(3, tmp_path)
    alone().end(3, tmp_path)
    with pytest.raises(DistError):
        FileStore(str(path), -1)

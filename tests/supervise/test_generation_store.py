"""A store that is a file cannot be opened once its world is over; one that is a process is replaced if it must be."""

from __future__ import annotations

import selectors
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed import DistError, FileStore, TCPStore

from argosy.errors import RunFailed
from argosy.parallel import world
from argosy.processes.child import ChannelClosed, ForkEntry
from argosy.processes.fork_server import STORE_HOST, ForkServer
from argosy.supervise import generation_store
from argosy.supervise.coordinator_client import IPV6_INTERFACES, _interface_of
from argosy.supervise.generation_store import STORE, GenerationStore, store_file
from supervise import store_processes


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


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    with closing(ForkServer("colorsys")) as forks:
        yield forks


def keep_until_open(store: GenerationStore, forks: ForkServer, selector: selectors.BaseSelector) -> list[str]:
    """Do what an agent does. Returns why stores were replaced."""
    why = []
    while store.is_awaited:
        for key, _ in selector.select(0.05):
            key.data()
        for message in forks.take():
            if message["kind"] == "forked" and message["key"].startswith(STORE):
                store.forked(message["key"], message["pid"])
        why += [said] if (said := store.keep(forks)) else []
    return why


def test_a_process_that_stands_still_before_its_store_is_open_is_replaced(tmp_path, forks, monkeypatch):
    monkeypatch.setattr(generation_store, "RENDEZVOUS", ForkEntry.of(store_processes.stop_the_first_time))
    opened: list[tuple[int, int]] = []
    store = GenerationStore(lambda *of: opened.append(of), 60, 1)
    with selectors.DefaultSelector() as selector:
        store.open(3, str(tmp_path / "flag"), forks, selector)
        assert keep_until_open(store, forks, selector) == ["it was stopped for 1 s"]
    assert opened == [(3, 7)]
    store.close()


def test_a_store_that_cannot_be_opened_ends_the_run(forks, monkeypatch):
    monkeypatch.setattr(generation_store, "RENDEZVOUS", ForkEntry.of(store_processes.die))
    store = GenerationStore(lambda *_: None, 60, 1)
    with selectors.DefaultSelector() as selector:
        store.open(1, "10.0.0.1", forks, selector)
        with pytest.raises(RunFailed, match=r"could not be opened at 10.0.0.1, 3 times in a row \(it died\)"):
            keep_until_open(store, forks, selector)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_store_is_held_at_an_address_of_either_kind(host, monkeypatch):
    class Client:
        def send(self, kind: str, port: int) -> None:
            TCPStore(host, port, is_master=False, wait_for_workers=False).set("key", "value")

        def receive(self) -> None:
            raise ChannelClosed

    if ":" in host and not IPV6_INTERFACES.exists():
        pytest.skip("needs IPv6")
    monkeypatch.setattr(world, "channel_to_parent", Client)
    monkeypatch.setenv(STORE_HOST, host)
    world.hold_store()
    assert _interface_of(host) == "lo"

"""Asynchronous runs within a test: servers and workers as threads of one process; a part that a test speaks for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.config.sync import SiteConfig
from argosy.parallel.world import World
from argosy.processes.connection import WireRecord
from argosy.sync import messages as say
from argosy.sync.layout import ServerLayout
from argosy.sync.links import Links, keys_of
from argosy.sync.messages import FROM_PART, FromPart
from argosy.training.loop import train
from argosy.training.server.main import ParameterServer
from argosy.training.stop import StopSignal
from ports import free_port
from tiny import eager, run_config

T = TypeVar("T")
PLAN = eager("microbatch=4,sync=async")


def asynchronous(corpus: Path, servers: int = 1, workers: str = "AB", **sections: dict[str, Any]) -> RunConfig:
    """The tiny run with that many servers at free ports; what `sync` says is added."""
    sync = {"servers": [f"127.0.0.1:{free_port()}" for _ in range(servers)], **sections.pop("sync", {})}
    run = run_config(corpus, sync=sync, **sections)
    return run.model_copy(update={"plan": str(PLAN), "sites": tuple(SiteConfig(name=name) for name in workers)})


@contextmanager
def serving(run: RunConfig, run_dir: Path, late_s: float = 0.0) -> Iterator[list[ParameterServer]]:
    """Hold all servers of a run, in a thread each, until the run is over, and `late_s` if a worker has not come."""
    run_dir.mkdir(parents=True, exist_ok=True)
    save_run(run, run_dir / "run.toml")
    ending = threading.Event()
    servers = [ParameterServer(run, run_dir, number) for number in range(len(run.sync.servers))]
    threads = [threading.Thread(target=server.serve, args=(ending.is_set, late_s)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield servers
    except BaseException:
        ending.set()
        raise
    finally:
        for thread in threads:
            thread.join(60.0)
        for server in servers:
            server.close()
        assert not any(thread.is_alive() for thread in threads)


def work(run: RunConfig, run_dir: Path, site: str, stop: StopSignal | None = None) -> bool:
    """Be the worker `site`, in this thread."""
    run = run.model_copy(update={"site": site})
    return train(run, PLAN, World(), run_dir / "sites" / site, stop or StopSignal())


def together(*calls: Callable[[], Any]) -> None:
    """Call all at the same time; raises what any raises."""
    problems: list[BaseException] = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=attempt, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    if problems:
        raise problems[0]


class Peer:
    """Another part of the run, which knows its secret, connected to some servers; it says what the test wants."""

    def __init__(self, run: RunConfig, run_dir: Path, me: str, listener: socket.socket | None = None):
        layout, (secret, tls) = ServerLayout(run), keys_of(run, run_dir)
        self.hello = say.PartHello(version=say.VERSION, site=me, session="s", model=layout.model, run=layout.identity)
        addresses = {**layout.addresses, **dict.fromkeys(layout.workers)}
        self.links = Links(me, addresses, listener, secret, tls, FROM_PART, lambda: self.hello, self._refused)
        self.refusals: list[str] = []
        self.heard: list[FromPart] = []

    def _refused(self, _: str, why: str) -> None:
        self.refusals.append(why)

    def turn(self) -> None:
        self.heard += [message for _, message, _ in self.links.turn(0.02) if not isinstance(message, say.PartHello)]

    def meet(self, name: str) -> None:
        """Wait until a server is connected; at once, though it has refused this part before."""
        while name not in self.links.sites:
            self.turn()

    def answer(self, name: str, message: WireRecord, data: bytes = b"") -> FromPart | None:
        """Return what a server answers to a message; None if it ends the connection."""
        self.meet(name)
        self.heard.clear()
        self.links.tell(name, message, data)
        while not self.heard and name in self.links.sites:
            self.turn()
        return self.heard[0] if self.heard else None

    def hears(self, kind: type[T]) -> T:
        """Return the first message of a kind that has not been returned yet, and forget those before it."""
        while True:
            while self.heard:
                message = self.heard.pop(0)
                if isinstance(message, kind):
                    return message
            self.turn()

"""Asynchronous runs within a test: servers and workers as threads of one process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.config.sync import SiteConfig
from argosy.parallel.world import World
from argosy.training.loop import train
from argosy.training.server.main import ParameterServer
from argosy.training.stop import StopSignal
from tiny import eager, run_config

PLAN = eager("microbatch=4,sync=async")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def asynchronous(corpus: Path, servers: int = 1, workers: str = "AB", **sections: dict[str, Any]) -> RunConfig:
    """The tiny run with that many servers at free ports; what `sync` says is added."""
    sync = {"servers": [f"127.0.0.1:{free_port()}" for _ in range(servers)], **sections.pop("sync", {})}
    run = run_config(corpus, sync=sync, **sections)
    return run.model_copy(update={"plan": str(PLAN), "sites": tuple(SiteConfig(name=name) for name in workers)})


@contextmanager
def serving(
    run: RunConfig, run_dir: Path, serve: Callable[[ParameterServer], Any] | None = None
) -> Iterator[list[ParameterServer]]:
    """Hold all servers of a run, in a thread each, until the run is over."""
    run_dir.mkdir(parents=True, exist_ok=True)
    save_run(run, run_dir / "run.toml")
    ending = threading.Event()
    servers = [ParameterServer(run, run_dir, number) for number in range(len(run.sync.servers))]
    threads = [threading.Thread(target=server.serve, args=(ending.is_set,)) for server in servers]
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

"""Heartbeats of processes that another launcher started: there is no agent, so one process of each node reads them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.observe.heartbeat import UNREAD, Heartbeat, HeartbeatReading, heartbeat_path, read_heartbeat
from argosy.observe.node_metrics import NodeMetrics
from argosy.observe.sequences import sequence_numbers
from argosy.parallel.world import World, node_of_each_rank
from argosy.supervise.agent import node_name
from argosy.supervise.scratch import scratch_folder

LOOK_S = 0.5
"""How often the reader looks whether a line is due."""


@contextmanager
def read_heartbeats(run: RunConfig, run_dir: Path, world: World, generation: int) -> Iterator[Heartbeat]:
    """Give this process a heartbeat, which the first process of its node reads; all processes call it together.

    The first one writes `nodes/NODE.jsonl`. A node without a folder in memory goes without: the run does not.
    """
    nodes = node_of_each_rank(world)
    leaders = [nodes.index(node) for node in nodes]
    with _folder(world.rank == leaders[world.rank]) as own:
        mine = os.getpid(), "" if own is None else str(own), node_name(run.launch)
        told = world.gather(mine, tuple[int, str, str])
        heartbeat = _heartbeat(told[leaders[world.rank]][1])
        heartbeat.join(generation, world.rank, sequence_numbers)
        try:
            if own is None:
                yield heartbeat
            else:
                pids = [pid for (pid, _, _), leader in zip(told, leaders, strict=True) if leader == world.rank]
                names = [told[leader][2] for leader in sorted(set(leaders))]
                name = mine[2] if names.count(mine[2]) == 1 else f"{mine[2]}-{world.rank}"
                metrics = NodeMetrics.of_run(run, run_dir, name)
                with _reader(metrics, own, pids, world.size):
                    yield heartbeat
        finally:
            heartbeat.stop()  # the reader removes the file, with the folder, once it has read it for the last time


@contextmanager
def _folder(is_leader: bool) -> Iterator[Path | None]:
    if not is_leader:
        yield None
        return
    try:
        scratch = scratch_folder()
        folder = scratch.__enter__()
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        scratch.__exit__(None, None, None)


def _heartbeat(folder: str) -> Heartbeat:
    if folder:
        with suppress(OSError):  # another container's folder, or no room in memory
            return Heartbeat(Path(folder))
    return UNREAD


@contextmanager
def _reader(metrics: NodeMetrics, folder: Path, pids: list[int], world_size: int) -> Iterator[None]:
    """Write the node's lines while the block runs, in a thread, and the last one at its end."""
    is_over = threading.Event()

    def readings() -> list[HeartbeatReading]:
        found = [read_heartbeat(heartbeat_path(folder, pid)) for pid in pids]
        return [reading for reading in found if reading is not None]

    def keep_writing() -> None:
        while not is_over.wait(LOOK_S):
            metrics.tend(readings, world_size)

    thread = threading.Thread(target=keep_writing, name="argosy-node-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        metrics.write(readings, world_size)

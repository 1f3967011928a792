"""A run in processes that exist already: those of torchrun, or of any launcher that sets the same environment.

Heartbeats of processes that another launcher started: there is no agent, so one process of each node reads them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from argosy.checkpoint import fence
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyError, UserError
from argosy.extend.loading import approve
from argosy.launch import run_folder
from argosy.launch.devices import find_devices
from argosy.launch.local import report_if_finished, settle, told_if_finished
from argosy.launch.sites import settle_site
from argosy.observe.collectives import sequence_numbers
from argosy.observe.events import Events
from argosy.observe.heartbeat import UNREAD, Heartbeat, HeartbeatReading, heartbeat_path, read_heartbeat
from argosy.observe.node_metrics import NodeMetrics
from argosy.observe.report import Report
from argosy.observe.screen import Progress
from argosy.observe.terminal import lasting_output
from argosy.parallel.world import World, join_world, node_of_each_rank
from argosy.plan.plan import Plan
from argosy.processes.supervisor import repeated, supervised
from argosy.sinks.follower import follower_of
from argosy.sinks.table import check_sinks
from argosy.supervise.agent import node_name
from argosy.supervise.scratch import scratch_folder
from argosy.supervise.worker import work
from argosy.sync.layout import is_server
from argosy.sync.process import exchange_of
from argosy.training.stop import StopSignal
from argosy.watch.status import ending_in_words

LINE_LOOK_S = 0.5
"""Seconds between two looks of the reader for a line that is due."""


@contextmanager
def read_heartbeats(run: RunConfig, run_dir: Path, world: World, generation: int) -> Iterator[Heartbeat]:
    """Give this process a heartbeat, which the first process of its node reads; all processes call it together.

    The first one writes `nodes/NODE.jsonl`. A node without a folder in memory goes without: the run does not.
    """
    nodes = node_of_each_rank(world)
    leaders = [nodes.index(node) for node in nodes]
    with ExitStack() as held:
        own: Path | None = None
        if world.rank == leaders[world.rank]:
            with suppress(OSError):
                own = held.enter_context(scratch_folder())
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


def _heartbeat(folder: str) -> Heartbeat:
    if folder:
        with suppress(OSError):  # another container's folder, or no room in memory
            return Heartbeat(Path(folder))
    return UNREAD


@contextmanager
def _reader(metrics: NodeMetrics, folder: Path, pids: list[int], world_size: int) -> Iterator[None]:
    """Write the node's lines while the block runs, in a thread, and the last one at its end."""

    def readings() -> list[HeartbeatReading]:
        found = [read_heartbeat(heartbeat_path(folder, pid)) for pid in pids]
        return [reading for reading in found if reading is not None]

    try:
        with repeated(lambda: metrics.tend(readings, world_size), LINE_LOOK_S, "argosy-node-metrics"):
            yield
    finally:
        metrics.write(readings, world_size)


def check_world(environment: Mapping[str, str]) -> None:
    """Raise UserError if the variables of torchrun do not name a process of a world."""
    said = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank, size, port = (
        int(said[name]) if said[name].isdecimal() and len(said[name]) < 10 else -1
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if not (0 <= rank < size and said["MASTER_ADDR"] and 0 < port < 2**16):
        words = ", ".join(f"{name} = {value!r}" for name, value in said.items())
        raise UserError(
            f"{words}: they name no process of a world. Start it with torchrun, or unset RANK: then argosy starts the "
            "processes itself."
        )


def train_joined(run: RunConfig, run_dir: Path | None, *, accept_changes: bool) -> Report | None:
    """Train in the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    Rank 0 prepares the data and settles run and plan, while the others wait (at most launch.timeout_s: prepare large
    data beforehand). After a signal the run saves, and its processes exit with 128 + the signal's number. Return the
    report on rank 0, and None on the others.

    Raises: UserError, RunFailed, the same on every process.
    """
    if is_server(run):
        raise UserError(f'site = "{run.site}" is a parameter server, which is one process. Start it without torchrun.')
    check_world(os.environ)
    is_first = int(os.environ["RANK"]) == 0
    run_dir = (run_dir or Path("runs") / run.name).absolute()
    run_folder.check_parts(run_dir, run)
    approve(run.extend.code)
    if run.sites:
        run, run_dir = settle_site(run, run_dir, Progress(enabled=is_first).say)
    stop = StopSignal().listen()
    world = join_world(run.launch)
    with lasting_output(run_dir / "logs" / f"rank-{world.rank}.log"), ExitStack() as held:
        try:
            run, plan, generation = world.share_first(
                lambda: _settle(run, run_dir, world, accept_changes, held), tuple[RunConfig, Plan, int | None]
            )
        except ArgosyError as error:
            if not world.is_first:
                sys.exit(error.exit_code)  # rank 0 reports it
            raise
        if generation is None:
            if not is_first:
                return None
            return told_if_finished(run_dir, run, Progress(enabled=True), Events(run_dir, "launcher"))
        os.environ[fence.GENERATION_VARIABLE] = str(generation)
        if world.is_first:
            events = Events(run_dir, "launcher")
            for process in (follower_of(run_dir, run, events), exchange_of(run_dir, run, events)):
                if process is not None:
                    held.enter_context(supervised(process, "argosy-supervisor"))
        with read_heartbeats(run, run_dir, world, generation) as heartbeat:
            work(run, plan, world, run_dir, stop, heartbeat=heartbeat)
    if stop.number is not None:
        sys.exit(128 + stop.number)
    if not is_first:
        return None
    report = run_folder.load_report(run_dir, run)
    if run.launch.nodes == 1:
        Progress(enabled=True).say(ending_in_words(run_dir, report))
    return report


def _settle(
    run: RunConfig, run_dir: Path, world: World, accept_changes: bool, held: ExitStack
) -> tuple[RunConfig, Plan, int | None]:
    """Return run, plan and generation, which is None if the run is finished. `held` keeps the run's folder locked."""
    check_sinks(run.observe, run.extend)
    held.enter_context(run_folder.locked(run_dir))
    progress = Progress(enabled=True)
    devices = find_devices(run.launch, processes=world.size)
    run, plan = settle(run, run_dir, accept_changes, lambda _: devices, progress)
    progress.close()
    if report_if_finished(run_dir, run) is not None:
        return run, plan, None
    (run_dir / "report.json").unlink(missing_ok=True)  # of a run that was stopped: it goes on
    generation = fence.newest_generation(run_dir) + 1
    fence.begin_generation(run_dir, generation)
    return run, plan, generation

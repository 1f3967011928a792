"""Starts the processes of a probe on this machine, or joins those that are there."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from argosy.config.schema import LaunchConfig
from argosy.errors import Interrupted, RunFailed
from argosy.launch.devices import find_devices
from argosy.parallel.encoding import decode, encode
from argosy.parallel.world import World, WorldSeat, join_world, leave_world
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.search.auto import Devices
from argosy.probe.probe import ProbeRequest, measure
from argosy.processes.channel import Channel, Gone
from argosy.processes.child import ForkEntry, channel_to_parent, end_with_parent
from argosy.processes.fork_server import ForkServer
from argosy.processes.patience import Patience

MEMBER = ForkEntry("argosy.probe.start")
"""A process that measures."""
MOST_CPU_PROCESSES = 8
"""Processes if the user gives no number: ranks beyond the first few share the machine in the same way."""
LINGER_S = 1.0
"""Seconds to wait for more news after an error: a process may report a lost peer before the peer's death shows."""


def find_probed(launch: LaunchConfig) -> Devices:
    """Return the devices to measure: those of the world that the environment names; else as many as `launch` says, or
    each GPU, or a process for each core. Raises: UserError, as `find_devices`.
    """
    if "WORLD_SIZE" in os.environ:
        return find_devices(launch, processes=int(os.environ["WORLD_SIZE"]))
    found = find_devices(launch)
    if found.kind == "cuda" or launch.processes:
        return found
    return replace(found, count=min(len(os.sched_getaffinity(0)), MOST_CPU_PROCESSES))


def probe_here(asked: ProbeRequest, processes: int) -> Cluster:
    """Measure this machine with this many processes, which are started for it and end with it.

    Raises: RunFailed if one of them dies; Interrupted after SIGTERM or SIGINT.
    """
    with _interrupted_by_signals(), closing(ForkServer(__name__)) as fork_server, ExitStack() as held:

        def fork(key: str, entry: ForkEntry, environment: Mapping[str, str]) -> Channel:
            return held.enter_context(closing(fork_server.fork(key, entry, environment)))

        try:
            file = str(Path(held.enter_context(TemporaryDirectory(prefix="argosy-probe-"))) / "store")
            places = [WorldSeat(rank, processes, rank, processes, file=file) for rank in range(processes)]
            members = [fork(str(place.rank), MEMBER, place.environment()) for place in places]
            for channel in members:
                channel.send("measure", data=[encode(asked, ProbeRequest)])
            return _cluster_of(fork_server, members)
        except Gone as problem:
            raise RunFailed(f"a process of the probe is gone ({problem}). Nothing was written.") from None


def main() -> None:
    """Run in each process that `probe_here` starts: measure, send the result, and end with the process that asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the process that asked decides
    asker = channel_to_parent()
    asked: ProbeRequest = decode(asker.receive()["data"][0], ProbeRequest, "the probe")
    end_with_parent(asker)
    try:
        cluster = measure(asked, join_world(asked.run.launch))
    except Exception as error:  # told before the others can lose their connections to this process
        asker.send("failed", why=f"{type(error).__name__}: {error}", at_s=time.monotonic())
        sys.exit(1)
    asker.send("measured", cluster=cluster.model_dump_json())
    leave_world()


def probe_joined(asked: ProbeRequest) -> tuple[Cluster, World]:
    """Measure in the world that RANK, WORLD_SIZE, ... describe; every process gets the cluster, and its own world."""
    world = join_world(asked.run.launch)
    try:
        return measure(asked, world), world
    finally:
        leave_world()


@dataclass(frozen=True)
class _Failure:
    rank: int
    why: str
    at_s: float
    """Seconds of the machine's monotonic clock, which its processes share."""
    is_killed: bool = False


def _cluster_of(fork_server: ForkServer, members: list[Channel]) -> Cluster:
    """Return what the first member to finish has found; they all find the same. Raises: RunFailed, Gone."""
    speaking = dict(enumerate(members))
    rank_of: dict[int, int] = {}
    patience = [Patience(fork_server.pid)]
    failures: list[_Failure] = []
    while True:
        listened_to: list[ForkServer | Channel] = [fork_server, *speaking.values()]
        ready, _, _ = select.select(listened_to, [], [], LINGER_S)
        for one in patience:
            if why := one.end():
                os.kill(one.pid, signal.SIGKILL)
                raise RunFailed(f"a process of the probe ({one.pid}) was waited for, and {why}. Nothing was written.")
        if failures and not ready:
            failure = min(failures, key=lambda failure: (not failure.is_killed, failure.at_s))
            raise RunFailed(f"process {failure.rank} of the probe ended: {failure.why}. Nothing was written.")
        for rank, channel in list(speaking.items()):
            if channel not in ready:
                continue
            try:
                for message in channel.take():
                    if message["kind"] == "measured":
                        return Cluster.model_validate_json(message["cluster"])
                    failures.append(_Failure(rank, message["why"], message["at_s"]))
            except Gone:
                del speaking[rank]  # it is ending: the fork server tells how
        for message in fork_server.take() if fork_server in ready else []:
            if message["kind"] == "forked" and message["key"].isdigit():
                rank_of[message["pid"]] = int(message["key"])
                patience.append(Patience(message["pid"]))
            elif message["kind"] == "ended" and message["pid"] in rank_of:
                failures.append(_ended(rank_of[message["pid"]], message["exit_code"]))


def _ended(rank: int, exit_code: int) -> _Failure:
    if exit_code < 0:
        return _Failure(rank, f"killed by {signal.Signals(-exit_code).name}", time.monotonic(), is_killed=True)
    return _Failure(rank, f"exit code {exit_code}", time.monotonic())


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise Interrupted in this block."""

    def interrupt(number: int, _: FrameType | None) -> None:
        name = signal.Signals(number)
        raise Interrupted(f"stopped by {name.name}; nothing was written.", name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

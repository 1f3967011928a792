"""The worker processes of a node, as its agent supervises them: started, heard, killed when they hang.

What becomes of them is told to the coordinator.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from argosy.config.schema import ResilienceConfig, RunConfig
from argosy.errors import FINAL_BIT
from argosy.observe import stacks, terminal
from argosy.observe.events import Events
from argosy.observe.heartbeat import HeartbeatReading, heartbeat_path
from argosy.observe.node_metrics import NodeMetrics
from argosy.observe.screen import SCREEN
from argosy.observe.terminal import print_message
from argosy.processes.child import STOPPED, ChannelClosed, ForkEntry, process_state
from argosy.processes.fork_server import WORKER_MODULE, ForkServer
from argosy.resilience.detect.finding import Finding
from argosy.resilience.detect.hang import JoiningWatch, Newcomer
from argosy.resilience.detect.node import NodeWatch
from argosy.supervise import messages as say
from argosy.supervise.nodes import Cause, RankState, WorkerProcess
from argosy.supervise.scratch import MEMORY_FOLDER
from argosy.supervise.stack_gatherer import STACKS_FOLDER, StackGatherer, flight_environment
from argosy.supervise.stopping import Stopping

WORKER_ENTRY = ForkEntry(WORKER_MODULE)
"""A worker process."""
WORKERS_IMPORTS = ForkEntry("argosy.parallel.apply", "load")
"""Imports what the workers of a plan need beside `WORKER_ENTRY`."""
COMPILER = (ForkEntry("argosy.compiler", "load_tracer"), ForkEntry("argosy.compiler", "load"))
"""The part of that which takes as long as torch, and which nearly every plan needs: known before there is a plan. In
two halves, so that the node health check is forked between them."""
BREAK_S = 10.0
"""A worker that takes longer to leave a broken world is killed."""
EXIT_S = 60.0
"""A worker that takes longer to end once it is done is killed: it has nothing left to save."""
NEWCOMERS_EVERY_S = 0.5
"""Time between two looks at processes that are in no world yet."""


class NodeWorkers:
    """The workers of one node, by slot. Nothing here waits for one, but `stacks` for those that hang."""

    def __init__(
        self,
        run_dir: Path,
        run: RunConfig,
        node: str,
        fork_server: ForkServer,
        stopping: Stopping,
        events: Events,
        tell: Callable[[say.FromAgent], None],
        quiet: bool = False,
    ):
        """tell: sends the coordinator a message. quiet: what rank 0 prints goes to its log too."""
        self._run_dir, self._run, self._node, self._quiet = run_dir, run, node, quiet
        self._fork_server, self._stopping, self._events, self._tell = fork_server, stopping, events, tell
        self._processes: dict[int, WorkerProcess] = {}
        self._ended: dict[int, WorkerProcess] = {}
        """Those that were done and have ended: they are members of their world to its end."""
        self._watch = NodeWatch(run_dir)
        self._metrics = NodeMetrics.of_run(run, run_dir, node)
        self._newcomers = Newcomers(run.resilience)
        self._stacks = StackGatherer(run_dir, node)
        self._world_size = 0
        self._hang_of = 0
        """The generation whose end was looked at last for a hang."""

    def open(self, selector: selectors.BaseSelector, scratch: Path, world_size: int) -> None:
        """Use `selector`, which calls what its keys have as data, and the agent's folder in memory."""
        self._selector, self._scratch, self._world_size = selector, scratch, world_size

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def states(self) -> set[RankState]:
        return {process.state for process in self._processes.values()}

    @property
    def generation(self) -> int:
        """The newest that any worker has been in; 0 if none was in any."""
        return max((process.generation for process in self._processes.values()), default=0)

    @property
    def ranks(self) -> list[int]:
        """The ranks that the workers have or had."""
        return [process.rank for process in self._processes.values() if process.rank is not None]

    def known(self) -> tuple[say.KnownWorker, ...]:
        """Return the workers as the coordinator is told of them when it is reached."""
        return tuple(
            say.KnownWorker(slot=slot, state=p.state, rank=p.rank, generation=p.generation, pid=p.pid)
            for slot, p in (self._ended | self._processes).items()
        )

    def readings(self, only_in_worlds: bool = False) -> list[HeartbeatReading]:
        """Return what the workers show, or those of them that are in a world."""
        processes = [p for p in self._processes.values() if not only_in_worlds or p.state is RankState.RUNNING]
        return [reading for p in processes if (reading := p.reading(self._scratch)) is not None]

    # ---- from fork to end ---------------------------------------------------------------------------------------

    def start(self, slot: int, interface: str) -> None:
        """Ask for a worker, unless the run is to stop: no world will be formed for it. interface: the network interface
        that leads to the coordinator; empty if not known.
        """
        if self._stopping.number is not None:
            return
        if (before := self._processes.get(slot)) is not None and before.state is RankState.DONE:
            self._handle_exit(before, 0)  # its world broke after it had reached the end; it is still ending
        self._ended.pop(slot, None)
        environment = {
            "ARGOSY_RUN_DIR": str(self._run_dir),
            "ARGOSY_SCRATCH": str(self._scratch),
            "ARGOSY_MEMORY": str(self._scratch / MEMORY_FOLDER),
            "ARGOSY_NODE": self._node,
            "ARGOSY_SLOT": str(slot),
            "ARGOSY_QUIET": str(int(self._quiet)),
            SCREEN: str(int(terminal.owner is not None)),
        }
        if self._run.launch.device != "cpu":
            environment |= flight_environment(self._run_dir / STACKS_FOLDER, self._scratch)
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            # Else gloo takes the address that the host's name resolves to.
            environment["GLOO_SOCKET_IFNAME"] = interface
        process = WorkerProcess(slot, self._fork_server.fork(f"worker {slot}", WORKER_ENTRY, environment))
        self._processes[slot] = process
        self._selector.register(process.channel, selectors.EVENT_READ, partial(self._hear, process))

    def forked(self, slot: int, pid: int) -> None:
        """Note that the process that was asked for is there; one that `stop` gave up ends with its channel."""
        if (process := self._processes.get(slot)) is None:
            return
        process.pid = pid
        self._events.write("worker_started", slot=slot, pid=pid)
        self._tell(say.WorkerStarted(slot=slot, pid=pid))

    def ended(self, pid: int, exit_code: int) -> None:
        """Take in how a process ended, if it is a worker."""
        for process in [process for process in self._processes.values() if process.pid == pid]:
            self._handle_exit(process, exit_code)

    def lose_all(self) -> None:
        """Kill all: the fork server is gone, and nothing tells how they end any more. What it was asked for and did not
        fork counts as lost, too.
        """
        for process in list(self._processes.values()):
            if process.pid:
                self._kill(process, "the process that it was forked from was killed")
            self._handle_exit(process, -signal.SIGKILL)

    def end(self) -> None:
        """Kill all, and write down what they have done."""
        self._metrics.write(self.readings, self._world_size)
        for process in self._processes.values():
            if process.pid:
                process.signal(signal.SIGKILL)
            process.channel.close()
        self._processes.clear()

    def _hear(self, process: WorkerProcess) -> None:
        if process.channel.fileno() < 0:
            return  # its exit was handled a moment ago
        try:
            messages = process.channel.take()
        except ChannelClosed:
            process.is_ending = True  # the fork server will tell how
            self._selector.unregister(process.channel)
            return
        for message in messages:
            match message["kind"]:
                case "ready":
                    process.state, process.leave_by = RankState.READY, None
                    self._tell(say.WorkerReady(slot=process.slot, generation=message["generation"], why=message["why"]))
                case "done":
                    process.state, process.is_finished = RankState.DONE, message["finished"]
                    process.leave_by = time.monotonic() + EXIT_S
                    self._tell(say.WorkerDone(slot=process.slot))
                case "failed":
                    process.failure = message

    def _handle_exit(self, process: WorkerProcess, exit_code: int) -> None:
        with suppress(KeyError):
            self._hear(process)  # what it said last
            self._selector.unregister(process.channel)
        process.channel.close()
        del self._processes[process.slot]
        reading = process.reading(self._scratch)
        heartbeat_path(self._scratch, process.pid).unlink(missing_ok=True)
        if reading is not None:
            self._metrics.ended(reading)
        if process.state is RankState.DONE and (exit_code == 0 or process.killed):
            self._ended[process.slot] = process
            if not process.is_finished and self._stopping.number is None:
                self._stopping.begin(signal.SIGTERM)  # it was sent to the worker directly
            return
        if exit_code == -signal.SIGKILL and not process.killed:  # perhaps by the kernel, as memory ran out
            self._report(self._watch.look_at_memory())
            process.killed = self._watch.why_killed()
        cause = process.cause_of_death(exit_code, -1 if reading is None else reading.step)
        if cause.exit_code < FINAL_BIT and self._stopping.number is None:
            self._report_death(process, cause)
        self._tell(say.WorkerLost(slot=process.slot, **asdict(cause)))

    def _report_death(self, process: WorkerProcess, cause: Cause) -> None:
        self._events.write(
            "worker_died", rank=process.rank, pid=process.pid, exit_code=cause.exit_code, why=cause.why,
            step=cause.step, generation=process.generation,
        )  # fmt: skip
        name = "a worker" if process.rank is None else f"worker {process.rank}"
        print_message(f"argosy: {name} (process {process.pid}) died: {cause.why}")
        if process.failure is not None:
            print_message(process.failure["traceback"].rstrip())

    def _report(self, findings: list[Finding]) -> None:
        for finding in findings:
            self._events.write(finding.kind, **finding.to_event())
            print_message(f"argosy: {finding.why}")

    # ---- from turn to turn --------------------------------------------------------------------------------------

    def keep(self, now_s: float, is_owed: bool) -> None:
        """Do what is due: kill workers that are late or stand still, answer requests for stacks, look at the node.

        is_owed: the fork server owes an answer to a request that is no worker's.
        """
        for process in list(self._processes.values()):
            if process.leave_by is not None and now_s > process.leave_by:
                is_done = process.state is RankState.DONE
                late = "was done, and did not end in time" if is_done else "did not leave a broken world in time"
                self._kill(process, f"it {late}")
            if self._stopping.is_late(now_s):
                self._kill(process, self._stopping.kill_why)
        self._kill_what_stands_still(now_s, is_owed)
        self._stacks.keep(now_s, self._scratch, self._processes.values())
        self._metrics.tend(self.readings, self._world_size)
        self._report(self._watch.look([process.pid for process in self._processes.values() if process.pid]))

    def _kill(self, process: WorkerProcess, why: str) -> None:
        if process.killed or not process.pid:
            return
        process.killed = why
        has_state = process.generation and process.state is not RankState.DONE
        if self._stopping.number is not None and has_state and not self._stopping.is_at_once:
            self._stopping.killed(why, process.reading(self._scratch))
        self._events.write("killed", slot=process.slot, rank=process.rank, pid=process.pid, why=why)
        if process.state is RankState.RUNNING:
            stacks.ask(process.pid)  # it writes to its log where it hangs
        process.signal(signal.SIGKILL)

    def _kill_what_stands_still(self, now_s: float, is_owed: bool) -> None:
        """End what was stopped, or stands still, and is seen by nobody else."""
        workers = self._processes.values()
        for pid, why in self._newcomers.look(now_s, self._scratch, workers, self._fork_server, is_owed).items():
            if pid == self._fork_server.pid:
                self._events.write("killed", pid=pid, why=f"the process that workers are forked from: {why}")
                os.kill(pid, signal.SIGKILL)
            for process in workers:
                if process.pid == pid:
                    self._kill(process, why)

    # ---- what the coordinator says of worlds --------------------------------------------------------------------

    def join(self, world: say.JoinWorld, file: str) -> None:
        """Have the workers that it names join a world. file: at which its members meet, if there is no port."""
        self._metrics.write(self.readings, self._world_size)  # of the world that is over
        self._world_size = world.size
        for place in world.places:
            process = self._processes.get(place.slot)
            if process is None:
                continue
            process.state, process.rank, process.generation = RankState.RUNNING, place.rank, world.generation
            with suppress(ChannelClosed):
                process.channel.send(
                    "join", generation=world.generation, plan=world.plan, rank=place.rank, size=world.size,
                    local_rank=place.local_rank, local_size=len(world.places), host=world.host, port=world.port,
                    file=file,
                )  # fmt: skip

    def hold(self, generation: int, on_disk: bool) -> None:
        """Tell the members of the generation to hold."""
        for process in self._members(generation, {RankState.RUNNING}):
            with suppress(ChannelClosed):
                process.channel.send("hold", generation=generation, on_disk=on_disk)

    def leave(self, generation: int, why: str) -> None:
        """Have the members of the generation leave its world; one that does not is killed."""
        for process in self._members(generation, {RankState.RUNNING, RankState.DONE}):
            process.leave_by = time.monotonic() + BREAK_S
            with suppress(ChannelClosed):
                process.channel.send("break", generation=generation, why=why)

    def kill(self, slot: int, generation: int, why: str) -> None:
        """Kill a worker, if it is still in that generation."""
        process = self._processes.get(slot)
        if process is not None and process.generation == generation:
            self.write_down_a_hang(generation, why)
            self._kill(process, why)

    def write_down_a_hang(self, generation: int, why: str) -> None:
        """Keep where the workers of a world are that stood still, before it ends; once for each world."""
        if generation <= self._hang_of:
            return
        self._hang_of = generation
        members = self._members(generation, {RankState.RUNNING})
        if self._stacks.stand_still(self._scratch, members):
            name = f"hang-{generation:06d}"
            self._stacks.gather_now(name, why, self._scratch, members)
            self._events.write(
                "stacks", generation=generation, why=why, folder=str(self._run_dir / STACKS_FOLDER / name)
            )

    def stop(self) -> None:
        """Have all save their state and end. What the fork server was asked for and has not forked is given up."""
        for process in list(self._processes.values()):
            if not process.pid:
                with suppress(KeyError):  # its end is closed already
                    self._selector.unregister(process.channel)
                process.channel.close()
                del self._processes[process.slot]
            elif self._stopping.is_at_once or not process.generation:  # without one, no world will be formed for it
                self._kill(process, "the run is to stop, and it has nothing to save")
            else:
                process.signal(signal.SIGTERM)

    def _members(self, generation: int, states: Collection[RankState]) -> list[WorkerProcess]:
        return [p for p in self._processes.values() if p.generation == generation and p.state in states]


class Newcomers:
    """Watches what an agent must see by itself: processes of a node from their fork to their first step in a world, and
    a fork server that does not answer.
    """

    def __init__(self, settings: ResilienceConfig):
        self._watch = JoiningWatch(settings.heartbeat_timeout_s, settings.first_step_s)
        self._looked_s = 0.0

    def look(
        self,
        now_s: float,
        scratch: Path,
        processes: Iterable[WorkerProcess],
        fork_server: ForkServer,
        is_owed: bool = False,
    ) -> dict[int, str]:
        """Return why processes, by pid, will not go on by themselves: the caller kills them.

        The fork server is one of them if it owes an answer: a process that it was asked for, or how one ended.
        is_owed: it owes one beside those of `processes`.
        """
        if now_s - self._looked_s < NEWCOMERS_EVERY_S:
            return {}
        self._looked_s = now_s
        seen = {p.pid: _seen(p, scratch) for p in processes if p.pid and p.state is not RankState.DONE}
        owes = is_owed or any(not p.pid or p.is_ending for p in processes)
        state = process_state(fork_server.pid)
        if owes and (fork_server.has_forked or state in STOPPED):  # before it has, it imports, however long that takes
            seen[fork_server.pid] = Newcomer(state, 0, None)
        return self._watch.look(now_s, seen)


def _seen(process: WorkerProcess, scratch: Path) -> Newcomer:
    generation = process.generation if process.state is RankState.RUNNING else 0
    return Newcomer(process_state(process.pid), generation, process.reading(scratch))

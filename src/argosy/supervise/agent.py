"""The agent of a node: it holds the node's worker processes, and does what the coordinator says.

It starts workers, learns at once when one ends, kills one that hangs, keeps what must outlive them (the rendezvous
store, in-memory checkpoints), and passes their heartbeat on to the coordinator.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from argosy.checkpoint.fence import GENERATION
from argosy.checkpoint.owner import name_of
from argosy.checkpoint.store import how_to_go_on
from argosy.config.schema import LaunchConfig, RunConfig
from argosy.errors import FINAL, ArgosyError, RunFailed, error_of
from argosy.observe import stacks, terminal
from argosy.observe.events import Events
from argosy.observe.heartbeat import HeartbeatReading, heartbeat_path
from argosy.observe.node_metrics import NodeMetrics
from argosy.observe.screen import SCREEN, Progress
from argosy.observe.terminal import print_message
from argosy.plan.plan import Plan, is_asynchronous
from argosy.processes.channel import Gone
from argosy.processes.child import ForkEntry
from argosy.processes.fork_server import ForkServer
from argosy.resilience.detect.finding import Finding
from argosy.resilience.detect.node import NodeWatch
from argosy.resilience.node_health import Health, NodeCheck, NodeCheckRequest
from argosy.sinks.process import FollowerProcess
from argosy.supervise import flight_recorder
from argosy.supervise import messages as say
from argosy.supervise.coordinator_client import CoordinatorClient
from argosy.supervise.generation_store import STORE, GenerationStore, store_file
from argosy.supervise.newcomers import Newcomers
from argosy.supervise.node_report import NodeReporter
from argosy.supervise.nodes import Cause, RankState
from argosy.supervise.scratch import MEMORY, scratch_folder
from argosy.supervise.stack_gatherer import FOLDER, StackGatherer
from argosy.supervise.stopping import Stopping
from argosy.supervise.worker_process import WorkerProcess
from argosy.sync.sites.process import ExchangeProcess

WORKER = ForkEntry("argosy.supervise.worker")
"""A worker process; by name, as it imports torch, which an agent does without."""
TICK_S = 0.05
"""How often it looks at the clock; messages and ended processes wake it at once."""
MOST_FAILED_STARTS = 3
"""So many fork servers in a row that die before they have forked anything end the run."""
SPEAKERS = 3
"""Nodes that say in the log that the coordinator is lost: each of a thousand would."""
BREAK_S = 10.0
"""A worker that takes longer to leave a broken world is killed."""


class Agent:
    """Holds a run's processes on one node until the run has ended."""

    def __init__(self, run_dir: Path, run: RunConfig, plan: Plan, fork_server: ForkServer, quiet: bool = False):
        """`fork_server` has imported `WORKER`'s module. `quiet`: what rank 0 prints goes to its log too."""
        self._run_dir, self._run, self._plan, self._fork_server, self._quiet = run_dir, run, plan, fork_server, quiet
        self._launch = run.launch
        self._name, self._process = node_name(self._launch), uuid.uuid4().hex
        self._events = Events(run_dir, process_name(self._launch))
        self._slots = -(-plan.world_size // self._launch.nodes)
        self._processes: dict[int, WorkerProcess] = {}
        self._coordinator = CoordinatorClient(run_dir, run, plan, self._events)
        self._store = GenerationStore(
            lambda generation, port: self._coordinator.tell(say.StoreOpened(generation=generation, port=port)),
            run.resilience.first_step_s,
            run.resilience.heartbeat_timeout_s,
            is_file=run.launch.nodes == 1,
        )
        self._stopping = Stopping(run_dir, run.resilience.grace_s, is_asynchronous(run.plan))
        self._finish: say.EndRun | None = None
        self._progress = Progress(enabled=not quiet, by="agent")
        """What is waited for while no worker of this node is in a world: then none of them has the live line."""
        self._node = NodeWatch(run_dir)
        self._metrics = NodeMetrics.of_run(run, run_dir, self._name)
        self._world_size = plan.world_size
        self._newcomers = Newcomers(run.resilience)
        self._follower = FollowerProcess(run_dir, run, self._events)
        self._exchange = ExchangeProcess(run_dir, run, self._events)
        self._hang_of = 0
        """The generation whose end was looked at last for a hang."""
        self._stacks = StackGatherer(run_dir, self._name)
        self._failed_starts = 0
        self._node_check: NodeCheck | None = None
        self._health: Health | None = None
        self._reporter = NodeReporter()
        self._heard = say.Heard()
        """What the coordinator last asked of heartbeats."""

    def run(self) -> None:
        """Hold the workers until the run has ended.

        Raises: RunFailed, Interrupted, or the error that the workers themselves ended with.
        """
        with scratch_folder() as self._scratch:
            self._progress.heartbeats(self._scratch)
            try:
                with self._stopping.listening(), selectors.DefaultSelector() as self._selector:
                    self._selector.register(self._fork_server, selectors.EVENT_READ, self._hear_fork_server)
                    self._coordinator.open(self._selector, self._say_hello, self._obey, self._tell_of_nodes)
                    self._check_node()
                    while not self._is_over():
                        self._turn()
            finally:
                self._metrics.write(self._all_readings, self._world_size)
                self._end_all()
                self._progress.doing("")
        self._raise_if_not_done()

    def stop(self) -> None:
        """Have the run save its state and end, as after SIGTERM. Any thread may call this."""
        self._stopping.ask(signal.SIGTERM)

    def _is_over(self) -> bool:
        if self._finish is not None and self._finish.exit_code:
            return True
        if self._finish is not None:  # a spare worker would wait for a world for ever
            return not any(process.state is RankState.DONE for process in self._processes.values())
        return self._stopping.number is not None and not self._processes

    def _turn(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            key.data()
        if self._stopping.begins():
            self._stop()
        now = time.monotonic()
        for process in list(self._processes.values()):
            if process.leave_by is not None and now > process.leave_by:
                self._kill(process, f"it did not leave a broken world within {BREAK_S:.0f} s")
            if self._stopping.is_late(now):
                self._kill(process, self._stopping.kill_why)
        self._kill_what_stands_still(now)
        if why := self._store.keep(self._fork_server):
            self._events.write("store_replaced", why=why)
        if self._node_check is not None:
            self._node_check.end_if_late()
        self._show_what_is_waited_for()
        self._follower.keep()
        self._exchange.keep()
        self._stacks.keep(now, self._scratch, self._processes.values())
        if self._coordinator.keep(now):
            self._show_heartbeat(now)
        self._metrics.tend(self._all_readings, self._world_size)
        self._report(self._node.look([process.pid for process in self._processes.values() if process.pid]))

    # ---- workers ------------------------------------------------------------------------------------------------

    def _start(self, slot: int) -> None:
        environment = {
            "ARGOSY_RUN_DIR": str(self._run_dir),
            "ARGOSY_SCRATCH": str(self._scratch),
            "ARGOSY_MEMORY": str(self._scratch / MEMORY),
            "ARGOSY_NODE": self._name,
            "ARGOSY_SLOT": str(slot),
            "ARGOSY_QUIET": str(int(self._quiet)),
            SCREEN: str(int(terminal.owner is not None)),
        }
        if self._launch.device != "cpu":
            environment |= flight_recorder.environment(self._run_dir / FOLDER, self._scratch)
        if self._coordinator.interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            # Else gloo takes the address that the host's name resolves to.
            environment["GLOO_SOCKET_IFNAME"] = self._coordinator.interface
        process = WorkerProcess(slot, self._fork_server.fork(f"worker {slot}", WORKER, environment))
        self._processes[slot] = process
        self._selector.register(process.channel, selectors.EVENT_READ, partial(self._hear, process))

    def _hear_fork_server(self) -> None:
        try:
            messages = self._fork_server.take()
        except Gone:
            self._replace_fork_server()
            return
        for message in messages:
            if message["kind"] == "ended":
                process = next((p for p in self._processes.values() if p.pid == message["pid"]), None)
                if process is not None:
                    self._handle_exit(process, message["exit_code"])
                elif self._node_check is not None and self._node_check.pid == message["pid"]:
                    self._tell_health(self._node_check.ended(message["exit_code"]))
            elif message["key"] == "node_check" and self._node_check is not None:
                self._node_check.pid = message["pid"]
            elif message["key"].startswith(STORE):
                self._store.forked(message["key"], message["pid"])
            elif message["key"].startswith("worker"):
                process = self._processes[int(message["key"].split()[1])]
                process.pid = message["pid"]
                self._events.write("worker_started", slot=process.slot, pid=process.pid)
                self._coordinator.tell(say.WorkerStarted(slot=process.slot, pid=process.pid))

    def _replace_fork_server(self) -> None:
        """Start another fork server: this one was killed. Nothing tells how its processes end any more: kill them too.

        What it was asked for and did not fork any more counts as lost, too.

        Raises: RunFailed if several in a row never forked anything: another would fail in the same way.
        """
        self._failed_starts = 0 if self._fork_server.has_forked else self._failed_starts + 1
        if self._failed_starts == MOST_FAILED_STARTS:
            raise RunFailed("the process that workers are forked from died at once; what it printed says why")
        self._selector.unregister(self._fork_server)
        self._fork_server.replace()
        self._selector.register(self._fork_server, selectors.EVENT_READ, self._hear_fork_server)
        self._events.write("fork_server_replaced", pid=self._fork_server.pid)
        for process in list(self._processes.values()):
            if process.pid:
                self._kill(process, "the process that it was forked from was killed")
            self._handle_exit(process, -signal.SIGKILL)
        if self._node_check is not None:
            self._node_check.kill()
            self._check_node()

    def _hear(self, process: WorkerProcess) -> None:
        if process.channel.fileno() < 0:
            return  # its exit was handled a moment ago
        try:
            messages = process.channel.take()
        except Gone:
            process.is_ending = True  # the fork server will tell how
            self._selector.unregister(process.channel)
            return
        for message in messages:
            match message["kind"]:
                case "ready":
                    process.state, process.leave_by = RankState.READY, None
                    self._coordinator.tell(
                        say.WorkerReady(slot=process.slot, generation=message["generation"], why=message["why"])
                    )
                case "done":
                    process.state, process.is_finished = RankState.DONE, message["finished"]
                    self._coordinator.tell(say.WorkerDone(slot=process.slot))
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
        if process.state is RankState.DONE and exit_code == 0:
            if not process.is_finished and self._stopping.number is None:
                self._stopping.begin(signal.SIGTERM)  # it was sent to the worker directly
            return
        if exit_code == -signal.SIGKILL and not process.killed:
            self._look_for_memory_kill(process)
        cause = process.cause_of_death(exit_code, -1 if reading is None else reading.step)
        if cause.exit_code < FINAL and self._stopping.number is None:
            self._report_death(process, cause)
        self._coordinator.tell(say.WorkerLost(slot=process.slot, **asdict(cause)))

    def _look_for_memory_kill(self, process: WorkerProcess) -> None:
        """Find out whether the kernel killed the worker because memory ran out."""
        self._report(self._node.look_at_memory())
        process.killed = self._node.why_killed()

    def _report_death(self, process: WorkerProcess, cause: Cause) -> None:
        self._events.write(
            "worker_died", rank=process.rank, pid=process.pid, exit_code=cause.exit_code, why=cause.why,
            step=cause.step, generation=process.generation,
        )  # fmt: skip
        name = "a worker" if process.rank is None else f"worker {process.rank}"
        print_message(f"argosy: {name} (process {process.pid}) died: {cause.why}")
        if process.failure is not None:
            print_message(process.failure["traceback"].rstrip())

    def _kill(self, process: WorkerProcess, why: str) -> None:
        if process.killed or not process.pid:
            return
        process.killed = why
        if self._stopping.number is not None and process.generation:
            self._stopping.not_saved = why
        self._events.write("killed", slot=process.slot, rank=process.rank, pid=process.pid, why=why)
        if process.state is RankState.RUNNING:
            stacks.ask(process.pid)  # it writes to its log where it hangs
        process.signal(signal.SIGKILL)

    def _kill_what_stands_still(self, now: float) -> None:
        """End what was stopped, or stands still, and is seen by nobody else."""
        workers = self._processes.values()
        is_owed = self._store.is_awaited or self._node_check is not None
        for pid, why in self._newcomers.look(now, self._scratch, workers, self._fork_server, is_owed).items():
            if pid == self._fork_server.pid:
                self._events.write("killed", pid=pid, why=f"the process that workers are forked from: {why}")
                os.kill(pid, signal.SIGKILL)
            for process in workers:
                if process.pid == pid:
                    self._kill(process, why)

    def _report(self, findings: list[Finding]) -> None:
        for finding in findings:
            self._events.write(finding.kind, **finding.to_event())
            print_message(f"argosy: {finding.why}")

    def _show_heartbeat(self, now: float) -> None:
        readings = self._all_readings()
        report = self._reporter.report(readings, self._heard.wants_all, self._heard.most_steps)
        self._coordinator.ask(now, say.NodeHeartbeat(report=report))

    def _show_what_is_waited_for(self) -> None:
        states = {process.state for process in self._processes.values()}
        if self._finish is not None or states & {RankState.RUNNING, RankState.DONE}:
            self._progress.hand_over()
        elif self._stopping.number is not None:
            self._progress.doing("stopping")
        elif RankState.STARTING in states or not states:
            self._progress.doing("starting the processes" if self._node_check is None else "checking this machine")
        else:
            others = f"all {self._launch.nodes} nodes" if self._launch.nodes > 1 else "the other processes"
            was_in_world = any(process.generation for process in self._processes.values())
            self._progress.doing(f"{'recovering, ' if was_in_world else ''}waiting for {others}")

    def _end_all(self) -> None:
        if self._node_check is not None:
            self._node_check.kill()
        for process in self._processes.values():
            if process.pid:
                process.signal(signal.SIGKILL)
            process.channel.close()
        self._processes.clear()
        self._store.close()
        self._coordinator.close()
        self._exchange.finish()
        self._follower.finish()

    # ---- the node -----------------------------------------------------------------------------------------------

    def _check_node(self) -> None:
        """Start a node health check, in a process of its own. Until it ends, no worker of this node gets a rank."""
        seconds = self._run.resilience.node_check_s
        if not seconds:
            return
        gpus = 0 if self._launch.device == "cpu" else self._slots
        generation = max((process.generation for process in self._processes.values()), default=0)
        environment = {"ARGOSY_RUN_DIR": str(self._run_dir), GENERATION: str(generation)}
        self._node_check = NodeCheck(
            self._fork_server, NodeCheckRequest(seconds, self._plan.precision, gpus), environment
        )

    def _tell_health(self, health: Health) -> None:
        self._node_check, self._health = None, health
        self._events.write("node_checked", **health.to_record())
        if health.unknown:
            print_message(f"argosy: the health of this machine could not be checked: {health.unknown}")
        self._coordinator.tell(say.NodeChecked(health=health))

    # ---- the coordinator ----------------------------------------------------------------------------------------

    def _say_hello(self, host: str) -> None:
        self._reporter.start_over()
        workers = tuple(
            say.KnownWorker(slot=slot, state=p.state, rank=p.rank, generation=p.generation, pid=p.pid)
            for slot, p in self._processes.items()
        )
        self._coordinator.tell(
            say.AgentHello(
                folder=name_of(self._run_dir), name=self._name, host=host, slots=self._slots, workers=workers,
                health=self._health, is_checking=self._node_check is not None,
                process=self._process,
            )
        )  # fmt: skip
        if self._stopping.number is not None:
            self._coordinator.tell(say.RunStopping())

    def _obey(self, message: say.FromCoordinator) -> None:
        match message:
            case say.Heard():
                self._heard, self._coordinator.ask_s = message, message.every_s
            case say.StartWorker(slot=slot):
                self._start(slot)
            case say.OpenStore(generation=generation):
                self._store.open(generation, self._coordinator.host, self._fork_server, self._selector)
            case say.JoinWorld():
                self._join(message)
            case say.LeaveWorld(generation=generation, why=why):
                self._write_down_a_hang(generation, why)
                self._break(generation, why)
                self._tell_why_world_ends(why)
            case say.HoldWorld(generation=generation, on_disk=on_disk):
                self._hold(generation, on_disk)
            case say.KillWorker(slot=slot, generation=generation, why=why):
                process = self._processes.get(slot)
                if process is not None and process.generation == generation:
                    self._write_down_a_hang(generation, why)
                    self._kill(process, why)
            case say.RunNodeCheck():
                if self._node_check is None:
                    self._check_node()
            case say.EndRun():
                self._finish, self._coordinator.is_ending = message, True
                if message.exit_code:
                    self._stopping.not_saved = self._stopping.not_saved or message.why

    def _join(self, world: say.JoinWorld) -> None:
        self._world_size = world.size
        file = "" if world.port else str(store_file(self._scratch, world.generation))
        # Sinks are held where the first rank writes what they read, and the exchange where it looks for the ledger.
        self._follower.is_wanted = self._exchange.is_wanted = any(place.rank == 0 for place in world.places)
        for place in world.places:
            process = self._processes.get(place.slot)
            if process is None:
                continue
            process.state, process.rank, process.generation = RankState.RUNNING, place.rank, world.generation
            with suppress(Gone):
                process.channel.send(
                    "join", generation=world.generation, plan=world.plan, rank=place.rank, size=world.size,
                    local_rank=place.local_rank, local_size=len(world.places), host=world.host, port=world.port,
                    file=file,
                )  # fmt: skip

    def _hold(self, generation: int, on_disk: bool) -> None:
        """Tell the members of the generation to hold."""
        for process in self._processes.values():
            if process.generation == generation and process.state is RankState.RUNNING:
                with suppress(Gone):
                    process.channel.send("hold", generation=generation, on_disk=on_disk)

    def _tell_why_world_ends(self, why: str) -> None:
        """Say in the log of a run on several nodes why training pauses; the agent does that has the coordinator."""
        if self._launch.nodes > 1 and self._coordinator.is_ours:
            is_loss = why.startswith("node") and "lost" in why
            wait_s = self._run.resilience.wait_for_nodes_s
            print_message(f"argosy: {why}" + (f"; another is waited for, {wait_s:g} s at most" if is_loss else ""))

    def _tell_of_nodes(self, text: str) -> None:
        """Say it in the log of a run on several nodes; of many nodes only the first ones do, with their names."""
        ranks = [process.rank for process in self._processes.values() if process.rank is not None]
        if self._launch.nodes > 1 and any(rank < SPEAKERS * self._slots for rank in ranks):
            print_message(f"argosy: {self._name}: {text}")

    def _write_down_a_hang(self, generation: int, why: str) -> None:
        """Keep where the workers of a world are that stood still, before it ends; once for each world."""
        if generation <= self._hang_of:
            return
        self._hang_of = generation
        members = [p for p in self._processes.values() if p.generation == generation and p.state is RankState.RUNNING]
        if self._stacks.stand_still(self._scratch, members):
            name = f"hang-{generation:06d}"
            self._stacks.gather_now(name, why, self._scratch, members)
            self._events.write("stacks", generation=generation, why=why, folder=str(self._run_dir / FOLDER / name))

    def _break(self, generation: int, why: str) -> None:
        self._store.end(generation, self._scratch)
        for process in self._processes.values():
            if process.generation == generation and process.state in (RankState.RUNNING, RankState.DONE):
                process.leave_by = time.monotonic() + BREAK_S
                with suppress(Gone):
                    process.channel.send("break", generation=generation, why=why)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Have the workers save their state and end."""
        print_message(f"argosy: {self._stopping.in_words(self._readings_in_worlds())}")
        self._coordinator.is_ending = True
        self._events.write("signal", number=self._stopping.number)
        self._coordinator.tell(say.RunStopping())
        for process in self._processes.values():
            if not process.generation:  # no world will be formed for it
                self._kill(process, "the run is to stop, and it has nothing to save")
            elif process.pid:
                process.signal(signal.SIGTERM)

    def _readings_in_worlds(self) -> list[HeartbeatReading]:
        """Return what the workers show that are in a world."""
        return self._readings(process for process in self._processes.values() if process.state is RankState.RUNNING)

    def _all_readings(self) -> list[HeartbeatReading]:
        return self._readings(self._processes.values())

    def _readings(self, processes: Iterable[WorkerProcess]) -> list[HeartbeatReading]:
        return [reading for process in processes if (reading := process.reading(self._scratch)) is not None]

    def _raise_if_not_done(self) -> None:
        if (error := self._stopping.error()) is not None:
            raise error
        if self._finish is not None and self._finish.exit_code:
            raise _as_error(self._finish, how_to_go_on(self._run_dir))


def node_name(launch: LaunchConfig) -> str:
    """Return this machine's name among the nodes of a run."""
    return launch.node or socket.gethostname()


def process_name(launch: LaunchConfig) -> str:
    """Return the agent's name among the processes that write events."""
    return "launcher" if launch.nodes == 1 else f"launcher-{node_name(launch)}"


def _as_error(finish: say.EndRun, how_to_go_on: str) -> ArgosyError:
    """Return the exception for the way in which the run ended."""
    return error_of(finish.exit_code, finish.why if finish.error else f"{finish.why}. {how_to_go_on}")

"""The agent of a node: it does what the coordinator says with the node's workers and the processes beside them.

It keeps what must outlive workers (the rendezvous store, in-memory checkpoints), replaces the fork server, has the node
checked, passes the workers' heartbeat on to the coordinator, and ends the run after a signal.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from argosy.checkpoint.fence import GENERATION_VARIABLE, name_of
from argosy.checkpoint.store import how_to_go_on
from argosy.config.launch import LaunchConfig
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyError, RunFailed, error_of
from argosy.observe.events import Events
from argosy.observe.screen import Progress
from argosy.observe.terminal import print_message
from argosy.plan.plan import Plan, is_asynchronous
from argosy.processes.child import ChannelClosed
from argosy.processes.fork_server import ForkServer
from argosy.processes.supervisor import RestartPolicy, Restarts, Supervisor
from argosy.resilience.node_health import Health, NodeCheck, NodeCheckRequest
from argosy.sinks.follower import follower_of
from argosy.supervise import messages as say
from argosy.supervise.coordinator_client import CoordinatorClient
from argosy.supervise.generation_store import STORE, GenerationStore, store_file
from argosy.supervise.node_report import NodeReporter
from argosy.supervise.node_workers import NodeWorkers
from argosy.supervise.nodes import RankState
from argosy.supervise.place import place_of
from argosy.supervise.scratch import scratch_folder
from argosy.supervise.stopping import Stopping
from argosy.sync.process import exchange_of

AGENT_TICK_S = 0.05
"""Time between two looks at the clock; messages and ended processes wake it at once."""
FORK_SERVER_RESTARTS = RestartPolicy(most_failures=3)
"""After three fork servers in a row that die before they have forked anything the run ends."""
SPEAKERS = 3
"""Nodes that say in the log that the coordinator is lost: each of a thousand would."""


STARTING_PROCESSES = "starting the processes"


def waiting_in_words(states: set[RankState], generation: int, nodes: int) -> str:
    """Return what an agent with workers in these states waits for; "" once one of them trains or has trained.

    generation: that of the workers' last world; 0: there was none. nodes: those of the run.
    """
    if states & {RankState.RUNNING, RankState.DONE}:
        return ""
    if RankState.STARTING in states or not states:
        return STARTING_PROCESSES
    others = f"all {nodes} nodes" if nodes > 1 else "the other processes"
    return f"{'recovering, ' if generation else ''}waiting for {others}"


class Agent:
    """Holds a run's processes on one node until the run has ended."""

    def __init__(self, run_dir: Path, run: RunConfig, plan: Plan, fork_server: ForkServer, quiet: bool = False):
        """`fork_server` has imported `WORKERS_IMPORTS`. `quiet`: what rank 0 prints goes to its log too."""
        self._run_dir, self._run, self._plan, self._fork_server = run_dir, run, plan, fork_server
        self._launch = run.launch
        self._name, self._process = node_name(self._launch), uuid.uuid4().hex
        self._events = Events(run_dir, process_name(self._launch))
        self._slots = -(-plan.world_size // self._launch.nodes)
        place = place_of(run_dir, run.launch, plan, self._events)
        self._coordinator = CoordinatorClient(run_dir, run, place, self._events)
        self._store = GenerationStore(
            lambda generation, port: self._coordinator.tell(say.StoreOpened(generation=generation, port=port)),
            run.resilience.first_step_s,
            run.resilience.heartbeat_timeout_s,
            is_file=run.launch.nodes == 1,
        )
        self._stopping = Stopping(run_dir, run.resilience.grace_s, is_asynchronous(run.plan))
        self._workers = NodeWorkers(
            run_dir, run, self._name, fork_server, self._stopping, self._events, self._coordinator.tell, quiet
        )
        beside = exchange_of(run_dir, run, self._events), follower_of(run_dir, run, self._events)
        self._beside: list[Supervisor] = [process for process in beside if process is not None]
        """Processes that the node of rank 0 has beside the workers."""
        self._finish: say.EndRun | None = None
        self._progress = Progress(enabled=not quiet, by="agent")
        """The live line while no worker of this node is in a world."""
        self._restarts = Restarts(FORK_SERVER_RESTARTS)
        self._node_check: NodeCheck | None = None
        self._health: Health | None = None
        self._reporter = NodeReporter()
        self._heard = say.HeartbeatReply()
        """The coordinator's last request for heartbeats."""

    def run(self) -> None:
        """Hold the workers until the run has ended.

        Raises: RunFailed, Interrupted, or the error that the workers themselves ended with.
        """
        # To the very end: a second signal of the same stop must not keep what is in memory from being removed.
        with self._stopping.listening(), scratch_folder() as self._scratch:
            self._progress.heartbeats(self._scratch)
            try:
                with selectors.DefaultSelector() as self._selector:
                    self._workers.open(self._selector, self._scratch, self._plan.world_size)
                    self._selector.register(self._fork_server, selectors.EVENT_READ, self._hear_fork_server)
                    self._coordinator.open(self._selector, self._say_hello, self._obey, self._tell_of_nodes)
                    self._check_node()
                    while not self._is_over():
                        self._turn()
            finally:
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
            return RankState.DONE not in self._workers.states
        return self._stopping.number is not None and not len(self._workers)

    def _turn(self) -> None:
        for key, _ in self._selector.select(AGENT_TICK_S):
            key.data()
        if self._stopping.begins():
            self._stop()
        now = time.monotonic()
        self._workers.keep(now, is_owed=self._store.is_awaited or self._node_check is not None)
        if why := self._store.keep(self._fork_server):
            self._events.write("store_replaced", why=why)
        if self._node_check is not None:
            self._node_check.end_if_late()
        self._show_what_is_waited_for()
        for beside in self._beside:
            beside.keep()
        if self._coordinator.keep(now):
            readings = self._workers.readings()
            report = self._reporter.report(readings, self._heard.wants_all, self._heard.most_steps)
            self._coordinator.ask(now, say.NodeHeartbeat(report=report))

    def _show_what_is_waited_for(self) -> None:
        words = waiting_in_words(self._workers.states, self._workers.generation, self._launch.nodes)
        if self._finish is not None or not words:
            self._progress.hand_over()
        elif self._stopping.number is not None:
            self._progress.doing("stopping")
        else:
            checks = words == STARTING_PROCESSES and self._node_check is not None
            self._progress.doing("checking this machine" if checks else words)

    def _stop(self) -> None:
        """Have the workers save their state and end."""
        readings = self._workers.readings(only_in_worlds=True)
        if self._launch.nodes == 1:  # workers of other nodes would form a last world without those that are killed
            self._stopping.end_at_once_if_nothing_is_lost(readings)
        print_message(f"argosy: {self._stopping.in_words(readings)}")
        self._coordinator.is_ending = True
        self._events.write("signal", number=self._stopping.number)
        self._coordinator.tell(say.RunStopping())
        self._workers.stop()

    def _end_all(self) -> None:
        if self._node_check is not None:
            self._node_check.kill()
        self._workers.end()
        self._store.close()
        self._coordinator.close()
        for beside in self._beside:
            beside.finish(self._stopping.is_urgent)

    def _raise_if_not_done(self) -> None:
        if (error := self._stopping.error()) is not None:
            raise error
        if self._finish is not None and self._finish.exit_code:
            raise _as_error(self._finish, how_to_go_on(self._run_dir))

    # ---- the fork server, and the check of the node ---------------------------------------------------------------

    def _hear_fork_server(self) -> None:
        try:
            messages = self._fork_server.take()
        except ChannelClosed:
            self._replace_fork_server()
            return
        for message in messages:
            pid = message["pid"]
            if message["kind"] == "ended":
                self._workers.ended(pid, message["exit_code"])
                if self._node_check is not None and self._node_check.pid == pid:
                    self._tell_health(self._node_check.ended(message["exit_code"]))
            elif message["key"] == "node_check" and self._node_check is not None:
                self._node_check.pid = pid
            elif message["key"].startswith(STORE):
                self._store.forked(message["key"], pid)
            elif message["key"].startswith("worker"):
                self._workers.forked(int(message["key"].split()[1]), pid)

    def _replace_fork_server(self) -> None:
        """Start another fork server: this one was killed, and its processes must go too.

        Raises: RunFailed if several in a row never forked anything: another would fail in the same way.
        """
        if self._restarts.ended(made_progress=self._fork_server.has_forked) is None:
            raise RunFailed("the process that workers are forked from died at once; what it printed says why")
        self._selector.unregister(self._fork_server)
        self._fork_server.replace()
        self._selector.register(self._fork_server, selectors.EVENT_READ, self._hear_fork_server)
        self._events.write("fork_server_replaced", pid=self._fork_server.pid)
        self._workers.lose_all()
        if self._node_check is not None:
            self._node_check.kill()
            self._check_node()

    def _check_node(self) -> None:
        """Start a node health check, in a process of its own. Until it ends, no worker of this node gets a rank."""
        seconds = self._run.resilience.node_check_s
        if not seconds:
            return
        gpus = 0 if self._launch.device == "cpu" else self._slots
        environment = {"ARGOSY_RUN_DIR": str(self._run_dir), GENERATION_VARIABLE: str(self._workers.generation)}
        self._node_check = NodeCheck(
            self._fork_server, NodeCheckRequest(seconds, self._plan.precision, gpus), environment
        )

    def _tell_health(self, health: Health) -> None:
        self._node_check, self._health = None, health
        self._events.write("node_checked", **asdict(health))
        if health.unknown:
            print_message(f"argosy: the health of this machine could not be checked: {health.unknown}")
        self._coordinator.tell(say.NodeChecked(health=health))

    # ---- the coordinator ----------------------------------------------------------------------------------------

    def _say_hello(self, host: str) -> None:
        self._reporter.start_over()
        self._coordinator.tell(
            say.AgentHello(
                folder=name_of(self._run_dir), name=self._name, host=host, slots=self._slots,
                workers=self._workers.known(), health=self._health, is_checking=self._node_check is not None,
                process=self._process,
            )
        )  # fmt: skip
        if self._stopping.number is not None:
            self._coordinator.tell(say.RunStopping())

    def _obey(self, message: say.FromCoordinator) -> None:
        match message:
            case say.HeartbeatReply():
                self._heard, self._coordinator.ask_s = message, message.every_s
            case say.StartWorker(slot=slot):
                self._workers.start(slot, self._coordinator.interface)
            case say.OpenStore(generation=generation):
                self._store.open(generation, self._coordinator.host, self._fork_server, self._selector)
            case say.JoinWorld():
                # Sinks are held where the first rank writes what they read, and the exchange where it looks for the
                # ledger.
                for beside in self._beside:
                    beside.is_wanted = any(place.rank == 0 for place in message.places)
                self._workers.join(message, "" if message.port else str(store_file(self._scratch, message.generation)))
            case say.LeaveWorld(generation=generation, why=why):
                self._workers.write_down_a_hang(generation, why)
                self._store.end(generation, self._scratch)
                self._workers.leave(generation, why)
                self._tell_why_world_ends(why)
            case say.HoldWorld(generation=generation, on_disk=on_disk):
                self._workers.hold(generation, on_disk)
            case say.KillWorker(slot=slot, generation=generation, why=why):
                self._workers.kill(slot, generation, why)
            case say.RunNodeCheck():
                if self._node_check is None:
                    self._check_node()
            case say.EndRun():
                self._finish, self._coordinator.is_ending = message, True
                if message.exit_code:
                    self._stopping.not_saved = self._stopping.not_saved or message.why

    def _tell_why_world_ends(self, why: str) -> None:
        """Say in the log of a run on several nodes why training pauses; the agent does that has the coordinator."""
        if self._launch.nodes > 1 and self._coordinator.is_ours:
            is_loss = why.startswith("node") and "lost" in why
            wait_s = self._run.resilience.wait_for_nodes_s
            print_message(f"argosy: {why}" + (f"; another is waited for, {wait_s:g} s at most" if is_loss else ""))

    def _tell_of_nodes(self, text: str) -> None:
        """Say it in the log of a run on several nodes; of many nodes only the first ones do, with their names."""
        if self._launch.nodes > 1 and any(rank < SPEAKERS * self._slots for rank in self._workers.ranks):
            print_message(f"argosy: {self._name}: {text}")


def node_name(launch: LaunchConfig) -> str:
    """Return this machine's name among the nodes of a run."""
    return launch.node or socket.gethostname()


def process_name(launch: LaunchConfig) -> str:
    """Return the agent's name among the processes that write events."""
    return "launcher" if launch.nodes == 1 else f"launcher-{node_name(launch)}"


def _as_error(finish: say.EndRun, how_to_go_on: str) -> ArgosyError:
    return error_of(finish.exit_code, finish.why if finish.error else f"{finish.why}. {how_to_go_on}")

"""The coordinator: a small process that holds the membership of a run, and no state that training needs.

Agents connect to it and report what happened; it answers with what to do. It may die: training goes on without it. The
coordinator that takes its place learns from the agents which nodes and workers there are, and the rest from the
handover file (`nodes.Handover`). It imports no torch, so that it starts in a moment.
"""

from __future__ import annotations

import gc
import signal
import socket
import ssl
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from argosy.checkpoint.fence import Fenced, begin_generation, name_of, newest_generation
from argosy.config.launch import read_rank_map
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import STOP_SIGNALS, UnfitNode, UserError, some_of
from argosy.observe.events import Events
from argosy.observe.heartbeat import LAST_STEPS
from argosy.plan.plan import Plan
from argosy.processes.connection import raise_limit
from argosy.processes.secret import secret_of, server_context
from argosy.resilience.node_health import Health, NodeRates
from argosy.resilience.replanner import Replanner
from argosy.supervise import messages as say
from argosy.supervise.agent_connections import LEASE_S, AgentConnection, AgentConnections
from argosy.supervise.lease.lease import HeldLease, LeaseLost
from argosy.supervise.membership import MOST_NAMED, Membership, Settings
from argosy.supervise.migration import Migrator
from argosy.supervise.nodes import (
    Break,
    Cause,
    CheckNode,
    FinishRun,
    Handover,
    Join,
    Order,
    RankProcess,
    RankState,
    Start,
)
from argosy.supervise.place import open_lease
from argosy.supervise.watch import RunWatch

COORDINATOR_TICK_S = 0.02
DETECT_EVERY_S = 0.25
"""Time between two looks of the detectors at what agents have shown."""
WAITS_S = 30.0
"""If a world that was begun is not together after so long, an event says what is missing."""
NO_AGENT_S = 10.0
"""Without any agent for this long there is no run to coordinate, and it ends."""
HEARTBEATS_PER_S = 1024
STEP_TIMES_PER_S = 65_536
"""A large run is looked at less often, so that this process takes in no more heartbeats, and times of ranks' steps."""
HEARTBEATS_A_LEASE = 4
"""But no agent is heard less often than this."""
REPORT_S = 10.0
"""Time between two events about refused connections."""


class Coordinator:
    """Listen to agents, keep a `Membership`, and tell agents what to do."""

    def __init__(
        self,
        run_dir: Path,
        listener: socket.socket,
        run: RunConfig,
        plan: Plan,
        secret: bytes,
        tls: ssl.SSLContext | None = None,
        owner: str = "",
        lease: HeldLease | None = None,
    ):
        """`plan`: the one in force whenever there are enough processes. `tls`: what encrypts its connections.

        owner: the name under which it begins generations. lease: that of its place; None if that is fixed.
        """
        self._run_dir, self._folder = run_dir, name_of(run_dir)
        self._owner, self._lease = owner or uuid.uuid4().hex, lease
        settings = Settings(
            plan.world_size,
            str(plan),
            run.launch.max_restarts,
            run.resilience.wait_for_nodes_s,
            run.resilience.coordinator_timeout_s,
            checks_nodes=run.resilience.node_check_s > 0,
            rank_map=read_rank_map(run.launch.rank_map),
        )
        handover = Handover.load(run_dir, newest_generation(run_dir))
        self._membership = Membership(settings, handover, Replanner(run_dir, run, plan))
        self._watch = RunWatch(run.resilience, run_dir / "metrics.jsonl", run)
        self._migrator = Migrator(run_dir, self._membership, self._watch, self._hold, run.resilience)
        self._events = Events(run_dir, "coordinator")
        self._agents = AgentConnections(listener, secret, tls, self._on_left)
        self._reported, self._reported_s = 0, 0.0
        self._pending: Join | None = None
        self._begun_s: float | None = None
        """Begin of the newest generation, until all its ranks have shown themselves or an event has said why."""
        self._rates = NodeRates()
        self._slow: set[str] = set()
        self._looked_s = 0.0
        self._heard = say.HeartbeatReply()
        """Request for heartbeats that agents were told last."""
        self._finish: FinishRun | None = None
        self._processes: dict[str, tuple[str, float]] = {}
        """Node -> the agent's process that speaks for it (`AgentHello.process`), and since when."""
        self._replaced: set[tuple[str, str]] = set()
        """Nodes and processes in whose place another has come; and below, those that are not to have the name."""
        self._refused: set[tuple[str, str]] = set()
        self._alone_since, self._alone_s = time.monotonic(), NO_AGENT_S
        self._is_of_one_agent = not run.launch.coordinator and not run.launch.lease
        self._is_stopping, self._leaving = False, set[str]()
        """The run was asked to end; nodes that were, and go alone."""

    def run(self) -> None:
        """Serve until the run has ended and all agents have left, or no agent has come for `NO_AGENT_S`.

        With a lease, also until that is lost: another coordinator goes on.
        """
        try:
            self._serve()
        except LeaseLost as problem:
            self._events.write("lease_lost", why=str(problem))

    def _serve(self) -> None:
        while not self._is_over():
            self._check_lease()
            for agent, message in self._agents.turn(COORDINATOR_TICK_S):
                self._obey(agent, message)
            self._report_refused()
            self._look()
            if self._agents:
                for order in self._membership.orders(time.monotonic()):
                    self._check_lease()
                    self._carry_out(order)

    def _check_lease(self) -> None:
        """Raises: LeaseLost, before another can have the lease."""
        if self._lease is not None and not self._lease.is_held:
            raise LeaseLost(self._lease.problem or "this process stood still for too long to renew it")

    def _is_over(self) -> bool:
        if self._agents:
            self._alone_since = time.monotonic()
            return False
        is_done = self._finish is not None or self._is_stopping
        return is_done or time.monotonic() - self._alone_since > self._alone_s

    def _on_left(self, name: str, why: str) -> None:
        if name in self._leaving:
            self._leaving.remove(name)
            self._is_stopping |= not self._agents  # it was the last one: nobody is waited for
        elif self._finish is None and not self._is_stopping:  # else it leaves because the run ends
            self._events.write("agent_left", node=name, why=why)
        self._rates.remove(name)
        self._membership.left(name, why)

    def _report_refused(self) -> None:
        """Write down that connections were refused, however many there are."""
        now_s, refused = time.monotonic(), self._agents.refused
        if refused > self._reported and now_s - self._reported_s > REPORT_S:
            self._events.write("connections_refused", count=refused - self._reported, last=self._agents.last_refusal)
            self._reported, self._reported_s = refused, now_s

    def _look(self) -> None:
        """Let the detectors look at the ranks, and act on what they find."""
        now_s = time.monotonic()
        if now_s - self._looked_s < DETECT_EVERY_S:
            return
        self._looked_s = now_s
        membership = self._membership
        self._heard = heartbeats_of(len(self._agents), membership.size, self._watch.wants_all)
        if not membership.in_force:
            return
        self._write_what_is_missing(now_s)
        for finding in self._watch.findings(now_s, membership.plan, self._heard.every_s):
            if finding.kind == "uneven_stages":  # nothing is wrong, and it is told of where something is done
                self._migrator.uneven_stages(finding)
                continue
            self._events.write(finding.kind, generation=membership.generation, **finding.to_event())
            for name, slot in membership.places_of(finding.ranks):
                if finding.action == "kill":
                    kill = say.KillWorker(slot=slot, generation=membership.generation, why=finding.why)
                    self._agents.tell(name, kill)
                elif finding.action == "check_node":
                    membership.check_node(name, finding.why)
                elif finding.action == "avoid":
                    self._migrator.slow_node(name, finding)
            if finding.kind == "slow_link":
                self._migrator.slow_link(finding)
        self._migrator.look(now_s)

    def _write_what_is_missing(self, now_s: float) -> None:
        """Write down, once, why the world that was begun a while ago is not together."""
        if self._begun_s is None or now_s - self._begun_s < WAITS_S:
            return
        self._begun_s = None
        members, generation = self._membership.handover().members, self._membership.generation
        if generation == self._watch.generation and self._watch.has_made_a_step:
            return  # it was together: ranks that have ended show themselves no more
        shown = self._watch.shown_by(generation)
        missing = sorted(name for name, count in members.items() if shown.get(name, 0) < count)
        if self._pending is not None:
            why = f"node {_opener(self._pending)} has not opened the rendezvous store"
        elif missing:
            why = f"not all workers have shown themselves of {some_of(missing, MOST_NAMED, 'other nodes')}"
        else:
            return
        self._events.write("world_waits", generation=generation, seconds=WAITS_S, why=why)

    def _hold(self, generation: int, on_disk: bool) -> None:
        self._agents.tell_all(say.HoldWorld(generation=generation, on_disk=on_disk))

    # ---- messages from agents ----------------------------------------------------------------------------------------

    def _obey(self, agent: AgentConnection, message: say.FromAgent) -> None:
        if isinstance(message, say.AgentHello):
            self._on_hello(agent, message)
            return
        membership, name = self._membership, agent.name
        node = membership.nodes.get(name)
        if node is None:
            return  # it was refused, and told so
        if getattr(message, "slot", 0) >= node.slots:
            self._agents.drop(agent, f"it sent {message.kind} for a slot that it does not have")
            return
        match message:
            case say.WorkerStarted(slot=slot, pid=pid):
                membership.started(name, slot, pid)
            case say.WorkerReady(slot=slot, generation=generation, why=why):
                membership.ready(name, slot, generation, why)
            case say.WorkerDone(slot=slot):
                membership.done(name, slot)
            case say.WorkerLost(slot=slot, why=why, error=error, exit_code=exit_code, step=step):
                membership.lost(name, slot, Cause(why, error, exit_code, step))
            case say.RunStopping():
                self._on_stopping(name)
            case say.NodeHeartbeat(report=report):
                self._agents.answer(agent, self._heard)  # so that it knows that it is not cut off
                self._watch.shown(membership.generation, membership.size, name, report)
                if report.generation == membership.generation:
                    membership.made_step(report.step, report.safe_step)
            case say.StoreOpened(generation=generation, port=port):
                self._on_store(name, generation, port)
            case say.NodeChecked(health=health):
                self._on_node_checked(name, health)

    def _on_stopping(self, name: str) -> None:
        self._is_stopping = self._membership.stop(name)
        if not self._is_stopping:
            self._leaving.add(name)
            self._agents.tell(name, say.EndRun(exit_code=0, why="the run goes on without it"))

    def _on_hello(self, agent: AgentConnection, hello: say.AgentHello) -> None:
        if hello.folder != self._folder:
            self._send_away(
                agent,
                f"launch.coordinator: another run is coordinated there, {self._run_dir}. Give this one a port of its "
                "own; if it is to be the same run, its --run-dir has to be on storage that all machines see.",
            )
            return
        if not self._is_the_node(hello):
            self._send_away(
                agent,
                f"launch.node: this machine is called {hello.name}, and so is another of the run. Give each a name of "
                "its own; without the key it is the host name.",
            )
            return
        self._leaving.discard(hello.name)
        name, workers = hello.name, {w.slot: RankProcess(w.state, w.rank, w.generation, w.pid) for w in hello.workers}
        self._agents.admit(agent, name)
        if self._is_of_one_agent:
            self._alone_s = 0.0  # the next run's agent starts another, perhaps at the same port
        self._events.write("agent_came", node=name, host=hello.host, slots=hello.slots)
        self._membership.arrived(name, hello.host, hello.slots, workers, hello.is_checking)
        if hello.health is not None and not hello.is_checking:
            self._on_node_checked(name, hello.health)
        self._tell_what_was_missed(name, workers)
        self._agents.tell(name, self._heard)

    def _is_the_node(self, hello: say.AgentHello) -> bool:
        """Return False for the agent of a machine that has the name of another.

        An agent may be started again, and then its earlier process does not come back. If it does, both live. If it is
        back at once, the one that came in between is not to have the name; if that has had it for long, it keeps it.
        """
        now_s, me = time.monotonic(), (hello.name, hello.process)
        process, since_s = self._processes.get(hello.name, (hello.process, now_s))
        if process != hello.process and me not in self._refused:
            if me not in self._replaced:
                self._replaced.add((hello.name, process))
            else:
                self._refused.add((hello.name, process) if now_s - since_s < LEASE_S else me)
        if me in self._refused:
            return False
        if process != hello.process or hello.name not in self._processes:
            self._processes[hello.name] = hello.process, now_s
        return True

    def _send_away(self, agent: AgentConnection, why: str) -> None:
        self._agents.answer(agent, say.EndRun(exit_code=UserError.exit_code, why=why, error=UserError.__name__))

    def _tell_what_was_missed(self, name: str, workers: Mapping[int, RankProcess]) -> None:
        """Tell an agent if its workers' generation, or the run, ended while the node was cut off."""
        generations = {worker.generation for worker in workers.values() if worker.state is RankState.RUNNING}
        for generation in filter(self._membership.is_over, generations):
            self._agents.tell(
                name, say.LeaveWorld(generation=generation, why=f"it ended while node {name} was cut off")
            )
        if generations and self._membership.in_force and name not in dict(self._membership.places_of([0])):
            self._tell_places(name, self._membership.nodes[name].host, None, ())
        if self._finish is not None:
            self._agents.tell(name, say.EndRun(**asdict(self._finish)))

    def _on_node_checked(self, name: str, found: Health) -> None:
        if found.wrong:
            why = f"node {name} computes wrong results: {found.wrong[0]}"
            self._events.write("node_refused", node=name, why=why, evidence=[asdict(wrong) for wrong in found.wrong])
            self._membership.refuse(name, why)
            self._rates.remove(name)
            remedy = "Take it out of service, or have it repaired. The run goes on without it if other nodes are left."
            end = say.EndRun(exit_code=UnfitNode.exit_code, why=f"{why}. {remedy}", error=UnfitNode.__name__)
            self._agents.tell(name, end)
            return
        self._rates.put(name, found.rates)
        for slow, why in self._rates.slow().items():
            if slow not in self._slow:
                self._slow.add(slow)
                self._events.write("node_slow", node=slow, why=why)
                self._membership.put_last(slow)
        self._membership.node_checked(name)

    def _on_store(self, node: str, generation: int, port: int | None) -> None:
        """The rendezvous store of the generation being formed is open: let its members join."""
        join = self._pending
        if join is None or (join.generation, _opener(join)) != (generation, node) or not self._membership.in_force:
            return
        self._pending = None
        places: dict[str, list[say.WorldPlace]] = {name: [] for name in self._membership.nodes}
        for (name, slot), rank in sorted(join.places.items(), key=lambda item: item[1]):
            local = places[name]
            local.append(say.WorldPlace(slot=slot, rank=rank, local_rank=len(local)))
        for name, local in places.items():
            self._tell_places(name, self._membership.nodes[node].host, port, local)

    def _tell_places(self, name: str, host: str, port: int | None, places: Sequence[say.WorldPlace]) -> None:
        """Tell a node its places in the world in force. A node without any may have had the first rank before."""
        generation, size, plan = self._membership.generation, self._membership.size, self._membership.plan
        self._agents.tell(
            name,
            say.JoinWorld(generation=generation, size=size, plan=plan, host=host, port=port, places=tuple(places)),
        )

    # ---- messages to agents -------------------------------------------------------------------------------------

    def _carry_out(self, order: Order) -> None:
        match order:
            case Start(node, slot):
                self._agents.tell(node, say.StartWorker(slot=slot))
            case Join(generation, plan, places):
                if not self._begin(generation):
                    return
                self._pending, self._begun_s = order, time.monotonic()
                self._membership.handover().save(self._run_dir)
                ranks = {f"{name}/{slot}": rank for (name, slot), rank in places.items()}
                self._events.write("generation", generation=generation, size=len(places), plan=plan, ranks=ranks)
                self._migrator.joined(time.monotonic())
                self._agents.tell(_opener(order), say.OpenStore(generation=generation))
            case Break(generation, why):
                self._pending = None
                self._membership.handover().save(self._run_dir)
                self._events.write("break", generation=generation, why=why)
                self._agents.tell_all(say.LeaveWorld(generation=generation, why=why))
            case CheckNode(node):
                self._agents.tell(node, say.RunNodeCheck())
            case FinishRun(exit_code, why):
                self._finish = order
                self._events.write("finish", exit_code=exit_code, why=why)
                self._agents.tell_all(say.EndRun(**asdict(order)))

    def _begin(self, generation: int) -> bool:
        """Begin a generation, as the only coordinator that does. Return False if another has: the run ends here then.

        Raises: LeaseLost if another has the lease, or has begun this generation just before this one got the lease.
        """
        if self._lease is not None:
            self._lease.check(generation)
        try:
            begin_generation(self._run_dir, generation, self._owner)
        except Fenced as problem:
            if self._lease is not None:  # the one that is started next knows of it
                raise LeaseLost(str(problem)) from None
            self._membership.fail(f"another coordinator has taken the run over: {problem}")
            return False
        return True


def _opener(join: Join) -> str:
    """Return the node that opens the rendezvous store: that of rank 0."""
    return next(name for (name, _), rank in join.places.items() if rank == 0)


def heartbeats_of(nodes: int, ranks: int, wants_all: bool) -> say.HeartbeatReply:
    """Return what to ask of the heartbeats of so many nodes and ranks."""
    every_s = min(max(say.AGENT_BEAT_S, nodes / HEARTBEATS_PER_S), LEASE_S / HEARTBEATS_A_LEASE)
    most_steps = min(LAST_STEPS, max(1, round(STEP_TIMES_PER_S * every_s / max(1, ranks))))
    return say.HeartbeatReply(every_s=every_s, most_steps=most_steps, wants_all=wants_all)


def main() -> None:
    """`python -m argosy.supervise.coordinator RUN_DIR DESCRIPTOR PLAN OWNER LEASE`: serve until the run has ended.

    DESCRIPTOR: a socket that listens already. PLAN: the one in force whenever there are enough processes. OWNER: the
    agent's name for what its coordinators claim. LEASE: the token of the lease that it has acquired; empty: none.
    """
    gc.freeze()  # what was imported stays: to look for garbage in it takes long, and most of all at the end
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # SLURM sends them to all processes of a job; the agents stop the run
    raise_limit()
    run_dir, listener = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    run, plan, owner, token = load(run_dir / "run.toml"), Plan.parse(sys.argv[3]), *sys.argv[4:]
    lease = HeldLease(open_lease(run.launch.lease, run_dir, token)) if token else None
    try:
        Coordinator(
            run_dir, listener, run, plan, secret_of(run_dir), server_context(run_dir, run.launch), owner, lease
        ).run()
    finally:
        if lease is not None:
            lease.end()


if __name__ == "__main__":
    main()

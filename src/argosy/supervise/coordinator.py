"""The coordinator: a small process that holds the membership of a run, and no state that training needs.

Agents connect to it and report what happened; it answers with what to do. It may die: training goes on without it. The
coordinator that takes its place learns from the agents which nodes and workers there are, and the rest from the
handover file (`handover`). It imports no torch, so that it starts in a moment.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from argosy.checkpoint.fence import begin_generation, newest_generation
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UnfitNode, UserError
from argosy.observe.events import Events
from argosy.plan.plan import Plan
from argosy.processes.channel import Channel, Gone, tcp
from argosy.resilience.node_health import Health, slow_nodes
from argosy.resilience.replanner import Replanner
from argosy.supervise.folder import name_of
from argosy.supervise.handover import Handover
from argosy.supervise.membership import Membership, Settings
from argosy.supervise.migration import Migrator
from argosy.supervise.nodes import Cause, State, Worker
from argosy.supervise.orders import Break, CheckNode, Finish, Join, Order, Start
from argosy.supervise.watch import RunWatch

TICK_S = 0.02
LOOK_S = 0.25
"""How often the detectors look at what agents have shown."""
LEASE_S = 10.0
"""An agent that says nothing for this long counts as unreachable."""
ALONE_S = 10.0
"""Without any agent for this long there is no run to coordinate, and it ends."""


class AgentConnection:
    """The connection to one agent."""

    def __init__(self, channel: Channel):
        self.channel, self.name, self.heard_s = channel, "", time.monotonic()
        self.is_dropped = False


class Coordinator:
    """Listen to agents, keep a `Membership`, and tell agents what to do."""

    def __init__(self, run_dir: Path, listener: socket.socket, run: RunConfig, plan: Plan):
        """`plan`: the one in force whenever there are enough processes."""
        self._run_dir, self._listener, self._folder = run_dir, listener, name_of(run_dir)
        settings = Settings(
            plan.world_size,
            str(plan),
            run.launch.max_restarts,
            run.resilience.wait_for_nodes_s,
            run.resilience.coordinator_timeout_s,
            checks_nodes=run.resilience.node_check_s > 0,
        )
        handover = Handover.load(run_dir, newest_generation(run_dir))
        self._membership = Membership(settings, handover, Replanner(run_dir, run, plan))
        self._watch = RunWatch(run.resilience, run_dir / "metrics.jsonl")
        self._migrator = Migrator(run_dir, self._membership, self._watch, self._hold, run.resilience.migrate)
        self._events = Events(run_dir, "coordinator")
        self._agents: dict[str, AgentConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._pending: Join | None = None
        self._rates: dict[str, Mapping[str, float]] = {}
        self._slow: set[str] = set()
        self._looked_s = 0.0
        self._finish: Finish | None = None
        self._alone_since, self._alone_s = time.monotonic(), ALONE_S
        self._is_of_one_agent = not run.launch.coordinator

    def run(self) -> None:
        """Serve until the run has ended and all agents have left, or no agent has come for `ALONE_S`."""
        while not self._is_over():
            for key, _ in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._welcome()
                else:
                    self._hear(key.data)
            self._check_leases()
            self._look()
            if self._agents:
                for order in self._membership.orders(time.monotonic()):
                    self._carry_out(order)

    def _is_over(self) -> bool:
        if self._agents:
            self._alone_since = time.monotonic()
            return False
        return self._finish is not None or time.monotonic() - self._alone_since > self._alone_s

    def _welcome(self) -> None:
        connection, _ = self._listener.accept()
        agent = AgentConnection(Channel(tcp(connection)))
        self._selector.register(agent.channel, selectors.EVENT_READ, agent)

    def _hear(self, agent: AgentConnection) -> None:
        if agent.is_dropped:
            return  # since this event was reported
        try:
            messages = agent.channel.take()
        except Gone as problem:
            self._drop(agent, str(problem))
            return
        agent.heard_s = time.monotonic()
        for message in messages:
            is_known = bool(agent.name) or message["kind"] == "hello"
            if is_known and not agent.is_dropped:
                getattr(self, f"_on_{message.pop('kind')}")(agent, **message)

    def _drop(self, agent: AgentConnection, why: str) -> None:
        agent.is_dropped = True
        self._selector.unregister(agent.channel)
        agent.channel.close()
        if self._agents.get(agent.name) is agent:
            del self._agents[agent.name]
            self._events.write("agent_left", node=agent.name, why=why)
            self._membership.left(agent.name, why)

    def _check_leases(self) -> None:
        for agent in list(self._agents.values()):
            if time.monotonic() - agent.heard_s > LEASE_S:
                self._drop(agent, f"nothing was heard of it for {LEASE_S:.0f} s")

    def _look(self) -> None:
        """Let the detectors look at the ranks, and act on what they find."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        membership = self._membership
        if not membership.in_force:
            return
        for finding in self._watch.findings(now_s, membership.size, membership.plan):
            self._events.write(finding.kind, generation=membership.generation, **finding.to_event())
            for name, slot in membership.places_of(finding.ranks):
                if finding.action == "kill":
                    self._tell(name, "kill", slot=slot, generation=membership.generation, why=finding.why)
                elif finding.action == "check_node":
                    membership.check_node(name, finding.why)
                elif finding.action == "avoid":
                    self._migrator.slow_node(name, finding)
            if finding.kind == "slow_link":
                self._migrator.slow_link(finding)
        self._migrator.look(now_s)

    def _hold(self, generation: int) -> None:
        for name in list(self._agents):
            self._tell(name, "hold", generation=generation)

    # ---- messages from agents ----------------------------------------------------------------------------------------

    def _on_hello(
        self,
        agent: AgentConnection,
        name: str,
        host: str,
        slots: int,
        workers: dict[str, dict[str, Any]],
        health: dict[str, Any] | None = None,
        is_checking: bool = False,
        folder: str = "",
    ) -> None:
        if folder != self._folder:
            self._send_away(agent)
            return
        if (old := self._agents.get(name)) is not None:
            self._drop(old, "its agent came back")
        agent.name = name
        self._agents[name] = agent
        if self._is_of_one_agent:
            self._alone_s = 0.0  # the next run's agent starts another, perhaps at the same port
        self._events.write("agent_came", node=name, host=host, slots=slots)
        known = {int(slot): Worker(State(w.pop("state")), **w) for slot, w in workers.items()}
        self._membership.arrived(name, host, slots, known, is_checking)
        if health is not None and not is_checking:
            self._on_node_checked(agent, health)
        self._tell_what_was_missed(name, known)
        self._tell(name, "heard")

    def _send_away(self, agent: AgentConnection) -> None:
        why = (
            f"launch.coordinator: another run is coordinated there, {self._run_dir}. Give this one a port of its own; "
            "if it is to be the same run, its --run-dir has to be on storage that all machines see."
        )
        with suppress(Gone):
            agent.channel.send("finish", **asdict(Finish(UserError.exit_code, why, UserError.__name__)))

    def _tell_what_was_missed(self, name: str, workers: dict[int, Worker]) -> None:
        """Tell an agent if its workers' generation, or the run, ended while the node was cut off."""
        generations = {worker.generation for worker in workers.values() if worker.state is State.RUNNING}
        for generation in filter(self._membership.is_over, generations):
            self._tell(name, "break", generation=generation, why=f"it ended while node {name} was cut off")
        if self._finish is not None:
            self._tell(name, "finish", **asdict(self._finish))

    def _on_node_checked(self, agent: AgentConnection, health: dict[str, Any]) -> None:
        found, name = Health.from_record(health), agent.name
        if found.wrong:
            why = f"node {name} computes wrong results: {found.wrong[0]}"
            self._events.write("node_refused", node=name, why=why, evidence=health["wrong"])
            self._membership.refuse(name, why)
            self._rates.pop(name, None)
            remedy = "Take it out of service, or have it repaired. The run goes on without it if other nodes are left."
            self._tell(name, "finish", exit_code=UnfitNode.exit_code, why=f"{why}. {remedy}", error=UnfitNode.__name__)
            return
        self._rates[name] = found.rates
        for slow, why in slow_nodes({node: self._rates.get(node, {}) for node in self._agents}).items():
            if slow not in self._slow:
                self._slow.add(slow)
                self._events.write("node_slow", node=slow, why=why)
                self._membership.put_last(slow)
        self._membership.node_checked(name)

    def _on_started(self, agent: AgentConnection, slot: int, pid: int) -> None:
        self._membership.started(agent.name, slot, pid)

    def _on_ready(self, agent: AgentConnection, slot: int, generation: int, why: str) -> None:
        self._membership.ready(agent.name, slot, generation, why)

    def _on_done(self, agent: AgentConnection, slot: int) -> None:
        self._membership.done(agent.name, slot)

    def _on_lost(self, agent: AgentConnection, slot: int, **cause: Any) -> None:
        self._membership.lost(agent.name, slot, Cause(**cause))

    def _on_stopping(self, agent: AgentConnection) -> None:
        self._membership.stop()

    def _on_heartbeat(self, agent: AgentConnection, workers: list[dict[str, Any]]) -> None:
        self._tell(agent.name, "heard")  # so that it knows that it is not cut off
        membership = self._membership
        if membership.in_force:
            membership.made_step(*self._watch.shown(membership.generation, agent.name, workers))

    def _on_store(self, agent: AgentConnection, generation: int, port: int) -> None:
        """The rendezvous store of the generation being formed is open: let its members join."""
        join = self._pending
        if join is None or join.generation != generation or not self._membership.in_force:
            return
        self._pending = None
        host = self._membership.nodes[agent.name].host
        local: dict[str, int] = {}
        places = sorted(join.places.items(), key=lambda item: item[1])
        counts = {name: sum(n == name for (n, _), _ in places) for (name, _), _ in places}
        for (name, slot), rank in places:
            local_rank = local[name] = local.get(name, -1) + 1
            self._tell(
                name,
                "join",
                slot=slot,
                generation=generation,
                rank=rank,
                size=len(places),
                local_rank=local_rank,
                local_size=counts[name],
                host=host,
                port=port,
                plan=join.plan,
            )

    # ---- messages to agents -------------------------------------------------------------------------------------

    def _carry_out(self, order: Order) -> None:
        match order:
            case Start(node, slot):
                self._tell(node, "start", slot=slot)
            case Join(generation, plan, places):
                if (newest := newest_generation(self._run_dir)) >= generation:
                    self._membership.fail(f"another coordinator has taken the run over: generation {newest} has begun")
                    return
                self._pending = order
                begin_generation(self._run_dir, generation)
                self._membership.handover().save(self._run_dir)
                ranks = {f"{name}/{slot}": rank for (name, slot), rank in places.items()}
                self._events.write("generation", generation=generation, size=len(places), plan=plan, ranks=ranks)
                self._migrator.joined(time.monotonic())
                first = next(name for (name, _), rank in places.items() if rank == 0)
                self._tell(first, "open_store", generation=generation)
            case Break(generation, why):
                self._pending = None
                self._membership.handover().save(self._run_dir)
                self._events.write("break", generation=generation, why=why)
                for name in list(self._agents):
                    self._tell(name, "break", generation=generation, why=why)
            case CheckNode(node):
                self._tell(node, "check_node")
            case Finish(exit_code, why):
                self._finish = order
                self._events.write("finish", exit_code=exit_code, why=why)
                for name in list(self._agents):
                    self._tell(name, "finish", **asdict(order))

    def _tell(self, name: str, kind: str, **facts: Any) -> None:
        agent = self._agents.get(name)
        if agent is None:
            return
        try:
            agent.channel.send(kind, **facts)
        except Gone as problem:
            self._drop(agent, str(problem))


def main() -> None:
    """`python -m argosy.supervise.coordinator RUN_DIR DESCRIPTOR PLAN`: serve until the run has ended.

    DESCRIPTOR: a socket that listens already. PLAN: the one in force whenever there are enough processes.
    """
    run_dir, descriptor, plan = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    Coordinator(Path(run_dir), listener, load(Path(run_dir) / "run.toml"), Plan.parse(plan)).run()


if __name__ == "__main__":
    main()

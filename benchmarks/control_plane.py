"""What one coordinator can hold: the real process, and N agents that speak the real protocol, many in this process.

    python benchmarks/control_plane.py [--nodes 64 512 2048] [--json]

Each agent has 8 workers, of which only the heartbeats are there: they make a step every `--step-s`. One agent more than
the run needs is a spare. In this order:

connected_s   from the first call to the last hello: the handshakes of all agents, most of it this process's own work
formed_s      from the last hello to the last agent that was told to join the world, through node health checks, starts
              and workers that are ready
steady_cpu    of the coordinator, as a share of a core, over `--steady-s` of training
rss_mb        of the coordinator then, MB
beat_s        from a heartbeat to its answer: the median, and in `beat_p99_s` the 99th percentile
beats_per_s   heartbeats that it took in a second
lost_seen_s   from the moment that a node falls silent, its connection open, to the first agent that is told that the
              world is over: at best the lease
reformed_s    from then, with all agents told and their workers ready again, to the last agent that was told to join the
              next world
end_s         from the last "done" to the last agent that was told that the run is over
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import resource
import selectors
import shutil
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from argosy.checkpoint.fence import name_of
from argosy.config.dump import save_run
from argosy.config.launch import LaunchConfig
from argosy.config.schema import ResilienceConfig, RunConfig
from argosy.observe.events import read_lines
from argosy.observe.heartbeat import LAST_STEPS, HeartbeatReading
from argosy.processes.child import Child
from argosy.processes.connection import Connection, decoded, encoded
from argosy.processes.secret import call, secret_of
from argosy.resilience.node_health import Health
from argosy.supervise import messages as say
from argosy.supervise.agent_connections import LEASE_S
from argosy.supervise.coordinator_client import COORDINATOR
from argosy.supervise.messages import FROM_COORDINATOR, FromCoordinator
from argosy.supervise.node_report import NodeReporter

SLOTS = 8
CALLS = 64
"""Agents that are in the handshake at one time."""
HEALTH = Health(rates={"core fp32 product": 1e11, "core memory": 5e9, "cuda bf16 product": 6e14}, seconds=0.5)
GROUPS = ("default_pg", "mesh_dp", "mesh_tp", "mesh_cp")
LIMIT_S = 300.0
"""No part takes longer."""


class Agent:
    """A node whose workers do at once what they are told."""

    def __init__(self, number: int, swarm: Swarm):
        self.name, self._number, self._swarm = f"node{number:05d}", number, swarm
        connected = socket.create_connection(swarm.address)
        self.connection = Connection(connected, call(swarm.secret), swarm.selector, self)
        self._reporter, self._heard = NodeReporter(lambda pid: "S"), say.HeartbeatReply()
        self.is_silent = self._was_proven = False
        self.ranks: dict[int, int] = {}
        """Slot -> rank in the newest world."""
        self.generation = self.broken = 0
        self.is_told_of_the_end = False
        self._asked_s = 0.0

    def hear(self) -> None:
        """Take what has come, and answer."""
        if self.is_silent:
            return
        frames = self.connection.take()
        if self.connection.is_proven and not self._was_proven:
            self._was_proven = True
            self._swarm.said_hello(self)
            self._hello()
        for frame in frames:
            self.obey(decoded(frame, FROM_COORDINATOR))
        if self.connection.problem and not self.is_told_of_the_end:
            raise SystemExit(f"{self.name}: {self.connection.problem}")

    def say(self, message: say.FromAgent) -> None:
        """Send the coordinator a message."""
        self.connection.send(encoded(message))

    def beat(self, now_s: float) -> None:
        """Send a heartbeat."""
        self._asked_s = now_s
        readings = [self._reading(slot, rank) for slot, rank in self.ranks.items()]
        report = self._reporter.report(readings, self._heard.wants_all, self._heard.most_steps)
        self.say(say.NodeHeartbeat(report=report))

    def _hello(self) -> None:
        folder, address = self._swarm.folder, "127.0.0.1"
        self.say(say.AgentHello(folder=folder, name=self.name, host=address, slots=SLOTS, is_checking=True))
        self.say(say.NodeChecked(health=HEALTH))

    def obey(self, message: FromCoordinator) -> None:
        match message:
            case say.HeartbeatReply():
                now_s = time.monotonic()
                if self._asked_s:
                    self._swarm.answered_s.append(now_s - self._asked_s)
                self._heard = message
                self._swarm.at(max(now_s, self._asked_s + message.every_s), self)
            case say.StartWorker(slot=slot):
                self.say(say.WorkerStarted(slot=slot, pid=self._number * SLOTS + slot + 1))
                self.say(say.WorkerReady(slot=slot, generation=0))
            case say.OpenStore(generation=generation):
                self.say(say.StoreOpened(generation=generation, port=1))
            case say.JoinWorld(generation=generation, places=places):
                self.generation, self.ranks = generation, {place.slot: place.rank for place in places}
            case say.LeaveWorld(generation=generation):
                self.broken = generation
                for slot in self.ranks if generation == self.generation else ():
                    self.say(say.WorkerReady(slot=slot, generation=generation, why="the world broke"))
            case say.EndRun():
                self.is_told_of_the_end = True

    def _reading(self, slot: int, rank: int) -> HeartbeatReading:
        swarm = self._swarm
        step, busy_s = swarm.steps()
        return HeartbeatReading(
            pid=self._number * SLOTS + slot + 1, generation=self.generation, rank=rank, step=step, phase="backward",
            phase_since_ns=step, busy_s=busy_s, beats=time.monotonic_ns(), peak_memory_bytes=1 << 30,
            sequences=dict.fromkeys(GROUPS, step),
        )  # fmt: skip


class Swarm:
    """All agents, and the coordinator's process."""

    def __init__(self, folder: Path, nodes: int, step_s: float):
        self.nodes, self._step_s, self._folder = nodes, step_s, folder
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        launch = LaunchConfig(nodes=nodes, coordinator=f"127.0.0.1:{self.address[1]}")
        save_run(RunConfig(launch=launch, resilience=ResilienceConfig(node_check_s=0.5)), folder / "run.toml")
        self.secret, self.folder = secret_of(folder), name_of(folder)
        plan = f"dp_replicate={SLOTS * nodes}"
        self._log = (folder / "coordinator.log").open("wb")
        arguments = (str(folder), str(listener.fileno()), plan, "benchmark", "")
        self.coordinator = Child(
            COORDINATOR, *arguments, pass_fds=[listener.fileno()], stdout=self._log, stderr=self._log
        )
        listener.close()
        self.selector = selectors.DefaultSelector()
        self.agents: list[Agent] = []
        self.answered_s: list[float] = []
        self._due: list[tuple[float, int, Agent]] = []
        self._hellos, self.last_hello_s = 0, 0.0
        self._began_s: float | None = None
        self._steps = (-1, dict[int, float]())

    def said_hello(self, agent: Agent) -> None:
        """An agent has proven that it knows the secret, and says hello now."""
        self._hellos, self.last_hello_s = self._hellos + 1, time.monotonic()

    def at(self, when_s: float, agent: Agent) -> None:
        """Have `agent` send a heartbeat at that time."""
        heapq.heappush(self._due, (when_s, id(agent), agent))

    def are_in(self, generation: int) -> bool:
        """Whether all the nodes that a world needs have their ranks in that one; the spare is told of it too."""
        return sum(agent.generation == generation and bool(agent.ranks) for agent in self.agents) == self.nodes

    def train(self) -> None:
        """Begin to make steps."""
        self._began_s = time.monotonic()

    def steps(self) -> tuple[int, dict[int, float]]:
        """The step that all ranks are in, and how long the last ones took."""
        if self._began_s is None:
            return -1, {}
        step = int((time.monotonic() - self._began_s) / self._step_s)
        if step != self._steps[0]:
            last = range(max(0, step - LAST_STEPS), step)
            self._steps = step, {each: self._step_s * (0.9 + each % 7 / 100) for each in last}
        return self._steps

    def connect(self) -> None:
        """Connect all agents, and the spare."""
        while len(self.agents) <= self.nodes:
            if len(self.agents) - self._hellos < CALLS:
                self.agents.append(Agent(len(self.agents), self))
            else:
                self._turn()
        self.until(lambda: self._hellos == len(self.agents), "hello of all agents")

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Go on until it holds; return when that was. `what`: in words, for the message if it never does."""
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > end_s or not self.coordinator.is_alive:
                raise SystemExit(self._stands_still(what))
            self._turn()
        return time.monotonic()

    def _stands_still(self, what: str) -> str:
        """Say what agents have seen, and where the rest stands."""
        seen = Counter((agent.generation, len(agent.ranks), agent.broken) for agent in self.agents)
        agents = ", ".join(
            f"{count} with {ranks} ranks in generation {generation} (told that {broken} is over)"
            for (generation, ranks, broken), count in sorted(seen.items())
        )
        events = read_lines(self._folder / "events" / "coordinator.jsonl")
        told = [str({k: v for k, v in e.items() if k != "ranks"}) for e in events if e["event"] != "agent_came"]
        is_alive = "lives" if self.coordinator.is_alive else "has died"
        return "\n".join(
            [
                f"no {what} within {LIMIT_S:.0f} s. Agents: {agents}.",
                f"The coordinator {is_alive}; of {self._folder}, which is kept, its log and its last events:",
                Path(self._log.name).read_text(errors="replace")[-2000:] or "(nothing printed)",
                *told[-10:],
            ]
        )

    def pass_s(self, seconds: float) -> None:
        """Go on for so long."""
        end_s = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end_s, "end of a pause")

    def _turn(self) -> None:
        for key, _ in self.selector.select(0.005):
            key.data.hear()
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            _, _, agent = heapq.heappop(self._due)
            if not agent.is_silent and not agent.is_told_of_the_end:
                agent.beat(now_s)

    def cpu_s(self) -> float:
        """Seconds of CPU that the coordinator has used."""
        fields = Path(f"/proc/{self.coordinator.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        """Resident memory of the coordinator, MB."""
        pages = int(Path(f"/proc/{self.coordinator.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6

    def close(self) -> None:
        """End everything."""
        for agent in self.agents:
            agent.connection.close()
        self.selector.close()
        self.coordinator.kill()
        self._log.close()


def measure(
    folder: Path, nodes: int, steady_s: float = 30.0, step_s: float = 1.0, hangs_up: bool = False
) -> dict[str, float]:
    """Run a coordinator with so many nodes, and return the figures that the top of this file names.

    hangs_up: the node that is lost closes its connection, which needs no lease.
    """
    swarm = Swarm(folder, nodes, step_s)
    try:
        return _measured(swarm, steady_s, hangs_up)
    finally:
        swarm.close()


def _measured(swarm: Swarm, steady_s: float, hangs_up: bool) -> dict[str, float]:
    began_s = time.monotonic()
    swarm.connect()
    formed_s = swarm.until(lambda: swarm.are_in(1), f"world of {swarm.nodes} nodes") - swarm.last_hello_s
    forming_cpu_s = swarm.cpu_s()
    swarm.train()
    swarm.pass_s(steady_s / 4)
    swarm.answered_s.clear()
    before_s, since_s = swarm.cpu_s(), time.monotonic()
    swarm.pass_s(steady_s)
    watched_s = time.monotonic() - since_s
    steady_cpu = (swarm.cpu_s() - before_s) / watched_s
    rss_mb, beats = swarm.rss_mb(), sorted(swarm.answered_s)

    lost = next(agent for agent in swarm.agents if 0 not in agent.ranks.values() and agent.ranks)
    lost.is_silent, silent_s = True, time.monotonic()
    if hangs_up:
        lost.connection.close()
    others = [agent for agent in swarm.agents if agent is not lost]
    seen_s = swarm.until(lambda: any(agent.broken == 1 for agent in others), "agent told of the loss")
    reformed_s = swarm.until(lambda: swarm.are_in(2), f"second world of {swarm.nodes} nodes")
    swarm.pass_s(2.0)

    for agent in others:
        for slot in agent.ranks if agent.generation == 2 else ():
            agent.say(say.WorkerDone(slot=slot))
    done_s = time.monotonic()
    ended_s = swarm.until(lambda: all(agent.is_told_of_the_end for agent in others), "end told to all")
    return {
        "nodes": swarm.nodes,
        "connected_s": swarm.last_hello_s - began_s,
        "formed_s": formed_s,
        "forming_cpu_s": forming_cpu_s,
        "steady_cpu": steady_cpu,
        "rss_mb": rss_mb,
        "beats_per_s": len(beats) / watched_s,
        "beat_s": statistics.median(beats),
        "beat_p99_s": beats[int(0.99 * len(beats))],
        "lost_seen_s": seen_s - silent_s,
        "reformed_s": reformed_s - seen_s,
        "end_s": ended_s - done_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--steady-s", type=float, default=30.0, help="how long training is watched")
    parser.add_argument("--step-s", type=float, default=1.0, help="how long a step takes")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each number of nodes")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < max(options.nodes) + 64:
        raise SystemExit(f"{max(options.nodes)} agents need more descriptors than {most} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for nodes in options.nodes:
        folder = Path(tempfile.mkdtemp(prefix="argosy-control-plane-"))
        figures = measure(folder, nodes, options.steady_s, options.step_s)
        shutil.rmtree(folder)  # else its log and events say what went wrong
        if options.json:
            print(json.dumps(figures), flush=True)
        else:
            print("  ".join(f"{name} {value:.3g}" for name, value in figures.items()), flush=True)
    print(f"(the lease is {LEASE_S:.0f} s)") if not options.json else None


if __name__ == "__main__":
    main()

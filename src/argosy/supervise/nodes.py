"""Nodes and workers as the coordinator knows them: its orders, when it gives up, what it leaves to the next one; and
the counts of them that decisions are made by.

Counts are kept, not taken: whoever changes a node calls `Roster.changed`, which counts that node alone again. So an
event costs as much as the node that it is about has slots, however many nodes there are.
"""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from pydantic import NonNegativeInt, TypeAdapter

from argosy.checkpoint.fence import OLD_NAME
from argosy.errors import FINAL_BIT, Poisoned, Retryable
from argosy.files import atomic_write, json_of
from argosy.observe.heartbeat import HeartbeatReading, heartbeat_path, read_heartbeat
from argosy.processes.child import Channel, Message, end_in_words


class RankState(Enum):
    """State of a worker process."""

    STARTING = "starting"
    """The worker imports what it needs."""
    READY = "ready"
    """The worker waits for a world."""
    RUNNING = "running"
    """The worker was told to join the generation's world."""
    DONE = "done"
    """The worker has reached the end of the run."""


@dataclass
class RankProcess:
    """A process that can have a rank."""

    state: RankState = RankState.STARTING
    rank: int | None = None
    """Its rank in its world, or in the last world it was in."""
    generation: int = 0
    """The generation of that world; 0 if it has been in none."""
    pid: int = 0


@dataclass
class Node:
    """An agent and its workers, by slot."""

    host: str
    slots: int
    """Number of workers that the node has room for, spare ones included."""
    workers: dict[int, RankProcess] = field(default_factory=dict)
    is_avoided: bool = False
    """True if it is used only when there are not enough processes without it."""
    is_last: bool = False
    """True if it is slow, or was suspected too often: where more are ready than needed, the others come first."""
    is_being_checked: bool = False
    """True while its workers wait for a node health check."""


@dataclass(frozen=True)
class Cause:
    """Why a worker was lost."""

    why: str
    error: str = ""
    """Class of the error that the worker reported, if it could."""
    exit_code: int = 0
    """Negative: a signal. From FINAL_BIT on: an error that a restart would only meet again."""
    step: int = -1
    """The step it was in, if known."""

    @property
    def failed_by_itself(self) -> bool:
        """True if the worker itself failed, rather than was killed from outside."""
        return self.exit_code not in (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True)
class Start:
    """Start a worker in a slot."""

    node: str
    slot: int


@dataclass(frozen=True)
class Join:
    """Form a world: the agent of rank 0 opens a rendezvous store, then each member is told its place."""

    generation: int
    plan: str
    places: dict[tuple[str, int], int]
    """(node, slot) -> rank."""


@dataclass(frozen=True)
class Break:
    """The generation is over: its members leave its world and wait."""

    generation: int
    why: str


@dataclass(frozen=True)
class FinishRun:
    """End the run."""

    exit_code: int
    why: str
    error: str = ""
    """Class of the error that the user sees; empty if no worker raised it."""


@dataclass(frozen=True)
class CheckNode:
    """Run a node health check; the agent reports when it is done."""

    node: str


Order = Start | Join | Break | FinishRun | CheckNode


class Failures:
    """The failures of a run since it last made progress."""

    def __init__(self, max_restarts: int):
        self._max_restarts, self._failures = max_restarts, 0
        self._step = self._safe_step = -1
        self._last_crash: tuple[str, int] | None = None
        self._last_crash_generation = 0

    def made_step(self, step: int, safe_step: int) -> None:
        """The run is in `step`, and would go back to `safe_step` at most; -1: not known.

        It makes progress if either is further than ever: steps that are repeated do not count, unless the next failure
        costs fewer of them.
        """
        is_first = self._step < 0  # that this coordinator hears of: it does not know what was before
        if not is_first and (step > self._step or safe_step > self._safe_step):
            self._failures = 0
        self._step, self._safe_step = max(step, self._step), max(safe_step, self._safe_step)

    def count(self, cause: Cause, generation: int, is_same: bool = False) -> FinishRun | None:
        """Count a failure. Return how the run ends if going on would only repeat it, else None.

        is_same: it is a part of the failure that was counted last; it may still be a crash that was seen before.
        """
        crash, is_repeated = (cause.why, cause.step), generation > self._last_crash_generation
        if cause.failed_by_itself and cause.step >= 0 and crash == self._last_crash and is_repeated:
            return FinishRun(Poisoned.exit_code, f"the same crash twice at step {cause.step}: {cause.why}")
        self._last_crash, self._last_crash_generation = crash, generation
        self._failures += not is_same
        if self._failures <= self._max_restarts:
            return None
        times = f"{self._failures} times (launch.max_restarts = {self._max_restarts})"
        why = f"the workers died {times} without making progress; the last time: {cause.why}"
        return FinishRun(Retryable.exit_code, why)


HANDOVER_FILE = "membership.json"
OLD_NAMES = {"generation": OLD_NAME, "suspicions": "doubts"}
"""Names of keys in the folders of older runs, which go on."""


@dataclass(frozen=True)
class Handover:
    """The generation in force, and the nodes that are to be avoided."""

    generation: int = 0
    """The newest that was formed; 0 if none was."""
    plan: str = ""
    size: NonNegativeInt = 0
    members: dict[str, NonNegativeInt] = field(default_factory=dict)
    """Node -> how many of its workers are members."""
    is_instead: bool = False
    """True if its plan replaces the run's own as long as there is room for it."""
    avoided: tuple[str, ...] = ()
    """Nodes to use only if there are not enough processes without them."""
    last: tuple[str, ...] = ()
    """Nodes to use after all others."""
    suspicions: dict[str, NonNegativeInt] = field(default_factory=dict)
    """Node -> how often it was suspected."""

    def save(self, run_dir: Path) -> None:
        """Write it, in place of an older one."""
        with atomic_write(run_dir / HANDOVER_FILE) as file:
            file.write(json.dumps(asdict(self), indent=1).encode() + b"\n")

    @classmethod
    def load(cls, run_dir: Path, generation: int) -> Handover:
        """Read the handover of `generation`; one without members if there is none, or it cannot be read."""
        try:
            record = json_of((run_dir / HANDOVER_FILE).read_bytes())
            for new, old in OLD_NAMES.items():
                if old in record:
                    record[new] = record.pop(old)
            found = TypeAdapter(cls).validate_json(json.dumps(record), strict=True)
        except (OSError, ValueError, TypeError, AttributeError):  # pydantic's is a ValueError
            return cls(generation)
        return found if found.generation == generation else cls(generation)


@dataclass
class WorkerProcess:
    """A process that the agent's fork server forked."""

    slot: int
    channel: Channel
    pid: int = 0
    """0 until it is forked."""
    state: RankState = RankState.STARTING
    rank: int | None = None
    generation: int = 0
    failure: Message | None = None
    """Its message about the error that it ended with."""
    killed: str = ""
    """Why its agent killed it; empty if it did not."""
    leave_by: float | None = None
    """The time by which it must have left the broken world."""
    is_ending: bool = False
    """True once it has closed its end of the channel."""
    is_finished: bool = False
    """With state DONE: True if the run's last step was made."""

    def reading(self, scratch: Path) -> HeartbeatReading | None:
        """Return what it shows in its agent's folder `scratch`; None if it shows nothing (yet)."""
        return read_heartbeat(heartbeat_path(scratch, self.pid))

    def signal(self, number: int) -> None:
        """Send it a signal, unless it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def cause_of_death(self, exit_code: int, step: int) -> Cause:
        """Return why it was lost, from its exit code (negative: a signal), its last message and why it was killed.

        `step`: the one it was in; -1 if that is not known.
        """
        if self.failure is not None:
            text = self.failure["text"]
            why = text if exit_code >= FINAL_BIT else f"exit code {exit_code}, {(text.splitlines() or [''])[0]}"
            return Cause(why, self.failure["error"], exit_code, step)
        if exit_code < 0:
            return Cause(self.killed or end_in_words(exit_code), "", exit_code, step)
        return Cause(end_in_words(exit_code), "", exit_code or 1, step)


Place = tuple[str, int]
"""Node and slot."""


class NodeCounts(NamedTuple):
    """Counts of one node, and of all together."""

    room: int = 0
    """Slots."""
    unavoided_room: int = 0
    """Slots of nodes that are not avoided."""
    unused_room: int = 0
    """Slots of nodes that have no member."""
    ready: int = 0
    """Workers that can join a world (`_ready_slots`)."""
    unavoided_ready: int = 0
    members: int = 0
    """Workers in the generation's world."""
    done: int = 0
    """Members that have reached the end of the run."""


class Roster:
    """All nodes that are there."""

    def __init__(self, generation: int, rank_map: Mapping[str, int] | None = None):
        """`generation`: the newest; its members are workers of it that run or have reached the end.

        rank_map: node -> its place in the order of ranks.
        """
        self._generation, self._rank_map = generation, rank_map or {}
        self.nodes: dict[str, Node] = {}
        self.counts = NodeCounts()
        self._of: dict[str, NodeCounts] = {}
        self._places: dict[int, Place] = {}
        """Rank -> where its member is, or was."""
        self.vacant: dict[str, None] = {}
        """Nodes with a slot that has no worker."""
        self.finished: dict[str, None] = {}
        """Nodes with a worker that has reached the end."""

    def put(self, name: str, node: Node) -> None:
        """Add a node, in place of the one that had its name."""
        self.nodes[name] = node
        self.changed(name)

    def remove(self, name: str) -> None:
        if self.nodes.pop(name, None) is not None:
            self.changed(name)

    def changed(self, name: str) -> None:
        """Count a node again, after it or one of its workers was changed."""
        node = self.nodes.get(name)
        before, now = self._of.pop(name, NodeCounts()), NodeCounts() if node is None else self._count(node)
        self.counts = NodeCounts(*(total - b + n for total, b, n in zip(self.counts, before, now, strict=True)))
        self.vacant.pop(name, None)
        self.finished.pop(name, None)
        if node is None:
            return
        self._of[name] = now
        if len(node.workers) < node.slots:
            self.vacant[name] = None
        for slot, worker in node.workers.items():
            if worker.state is RankState.DONE:
                self.finished[name] = None
            if worker.rank is not None and self.is_member(worker):
                self._places[worker.rank] = (name, slot)

    def begin(self, generation: int, places: dict[Place, int]) -> None:
        """Let the workers in these places, which have these ranks, be the members of `generation`."""
        self._generation, self._places = generation, {}
        for (name, slot), rank in places.items():
            worker = self.nodes[name].workers[slot]
            worker.state, worker.rank, worker.generation = RankState.RUNNING, rank, generation
        for name in self.nodes:
            self.changed(name)

    def is_member(self, worker: RankProcess) -> bool:
        """Return True if a worker is in the generation's world."""
        return 0 < self._generation == worker.generation and worker.state in (RankState.RUNNING, RankState.DONE)

    def members_of(self, name: str) -> int:
        """Return how many members a node has; 0 if it is not there."""
        return self._of.get(name, NodeCounts()).members

    def ranks_of(self, name: str) -> set[int]:
        node = self.nodes.get(name)
        workers = [] if node is None else node.workers.values()
        return {worker.rank for worker in workers if worker.rank is not None and self.is_member(worker)}

    def place_of(self, rank: int) -> Place | None:
        """Return where the member with this rank is; None if there is none."""
        place = self._places.get(rank)
        worker = None if place is None else self.worker(*place)
        return place if worker is not None and worker.rank == rank and self.is_member(worker) else None

    def worker(self, name: str, slot: int) -> RankProcess | None:
        node = self.nodes.get(name)
        return None if node is None else node.workers.get(slot)

    def ready(self) -> list[Place]:
        """Return the places of the workers that can join a world, in the order of preference."""
        names = sorted(self._of, key=self._preference)
        return [
            (name, slot) for name in names if self._of[name].ready for slot in sorted(_ready_slots(self.nodes[name]))
        ]

    def _preference(self, name: str) -> tuple[bool, bool, int, str]:
        node = self.nodes[name]
        return node.is_avoided, node.is_last, self._rank_map.get(name, len(self._rank_map)), name

    def survivors(self) -> list[Place]:
        """Return the places of the workers that can join a world and have been in one, in the order of preference."""
        return [place for place in self.ready() if self._worker_at(place).generation]

    def has_reserve(self, places: list[Place]) -> bool:
        """Return True if any of the places is on a node that is to be used after others."""
        return any(self.nodes[name].is_avoided or self.nodes[name].is_last for name, _ in places)

    def assign(self, ready: list[Place], size: int) -> dict[Place, int]:
        """Assign ranks 0 to size - 1 to `ready` workers: survivors of the last world keep theirs, others fill the rest.

        With several nodes, ranks of one node are consecutive where nothing was lost; a free rank goes to its own node
        first, so that ranks which were near each other stay so.
        """
        by_rank: dict[int, tuple[int, Place]] = {}
        """Rank -> when it was assigned, and the place."""
        for place in sorted(ready, key=lambda place: -self._worker_at(place).generation):
            worker = self._worker_at(place)
            if worker.generation and worker.rank is not None and worker.rank < size and worker.rank not in by_rank:
                by_rank[worker.rank] = len(by_rank), place
        taken = {place for _, place in by_rank.values()}
        others = _Queue([place for place in ready if place not in taken])
        for rank in range(size):
            if rank not in by_rank:
                near = min((by_rank[r] for r in (rank - 1, rank + 1) if r in by_rank), default=None)
                by_rank[rank] = len(by_rank), others.take(None if near is None else near[1][0])
        return {place: rank for rank, (_, place) in by_rank.items()}

    def _worker_at(self, place: Place) -> RankProcess:
        name, slot = place
        return self.nodes[name].workers[slot]

    def _count(self, node: Node) -> NodeCounts:
        ready = 0 if node.is_being_checked else len(_ready_slots(node))
        members = [worker for worker in node.workers.values() if self.is_member(worker)]
        return NodeCounts(
            room=node.slots,
            unavoided_room=0 if node.is_avoided else node.slots,
            unused_room=0 if members else node.slots,
            ready=ready,
            unavoided_ready=0 if node.is_avoided else ready,
            members=len(members),
            done=sum(worker.state is RankState.DONE for worker in members),
        )


def _ready_slots(node: Node) -> list[int]:
    """Return the slots whose workers can join a world.

    Workers that were in none can once all of their node's are ready. Else the world of a run with spare nodes would
    take a part of each node that is still starting, and ranks that are to be on one node would be on two for good.
    """
    ready = [slot for slot, worker in node.workers.items() if worker.state is RankState.READY]
    return ready if len(ready) == node.slots else [slot for slot in ready if node.workers[slot].generation]


class _Queue:
    """Places in an order, of which the next of a certain node can be taken too."""

    def __init__(self, places: list[Place]):
        self._all, self._of, self._taken = deque(places), dict[str, deque[Place]](), set[Place]()
        for place in places:
            self._of.setdefault(place[0], deque()).append(place)

    def take(self, node: str | None) -> Place:
        """Take the next place of `node`, or the next of all if it has none left."""
        queue = self._of.get(node or "") or self._all
        while (place := queue.popleft()) in self._taken:
            pass
        self._taken.add(place)
        if queue is self._all:
            self._of[place[0]].remove(place)
        return place

"""Who trains: the decisions of the coordinator, as a state machine that touches no socket, file or clock.

An *epoch* is one world of processes: a number, a size, and who has which rank. It ends when one of its members is
lost, or when its membership is to change; the next one is formed of the survivors, who keep their ranks, and of those
who are ready to take the places of the lost. What happens in an epoch that is over is not heard any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum

from argosy.errors import FINAL, Poisoned, Retryable


class State(Enum):
    """What a worker process is doing, as its agent and it tell it."""

    STARTING = "starting"
    """It imports what it needs."""
    READY = "ready"
    """It waits for a world."""
    RUNNING = "running"
    """It was told to join the epoch's world."""
    DONE = "done"
    """Its run is at its end."""


@dataclass
class Worker:
    """A process that can have a rank."""

    state: State = State.STARTING
    rank: int | None = None
    """That it has, or had in the world that it comes from."""
    epoch: int = 0
    """Of that world; 0 for a process that has been in none."""
    pid: int = 0


@dataclass
class Node:
    """An agent and its workers, by slot."""

    host: str
    slots: int
    """How many workers the node has room for, those that nobody needs at the moment included."""
    workers: dict[int, Worker] = field(default_factory=dict)
    is_avoided: bool = False
    """It is taken only if there are not processes enough without it."""


@dataclass(frozen=True)
class Cause:
    """Why a worker was lost."""

    why: str
    error: str = ""
    """Class of the error that the worker recorded, if it could."""
    exit_code: int = 0
    """Negative: a signal. From FINAL on: an error that a restart would only meet again."""
    step: int = -1
    """The step it was in, if known."""

    @property
    def is_own(self) -> bool:
        """Whether the worker itself went wrong, rather than was killed from outside."""
        return self.exit_code not in (-9, -15)


@dataclass(frozen=True)
class Start:
    """Start a worker in a slot."""

    node: str
    slot: int


@dataclass(frozen=True)
class Join:
    """Form a world: the agent of rank 0 opens a store, then each member is told its place."""

    epoch: int
    plan: str
    places: dict[tuple[str, int], int]
    """(node, slot) -> rank."""


@dataclass(frozen=True)
class Break:
    """The epoch is over: its members are to leave its world and wait."""

    epoch: int
    why: str


@dataclass(frozen=True)
class Finish:
    """The run ends here."""

    exit_code: int
    why: str
    error: str = ""
    """Class of the error that the user is to see; empty if it is none of the workers' own."""


Order = Start | Join | Break | Finish
Replan = Callable[[int], tuple[str, int] | None]
"""Workers at hand -> the plan for them and its size; None if they cannot do it."""


@dataclass(frozen=True)
class Settings:
    """What the run file says of membership."""

    size: int
    """Of the plan."""
    plan: str
    max_restarts: int = 3
    wait_for_nodes_s: float = 60.0
    first_wait_s: float = 600.0
    """How long the run waits for all its nodes before its first step."""


class Membership:
    """Nodes, workers and the epoch in force. Callers tell what happened; `orders` is what to do about it."""

    def __init__(self, settings: Settings, epoch: int = 0, replan: Replan | None = None):
        self._settings, self._replan = settings, replan
        self.epoch = epoch
        """The newest that was formed, by this coordinator or by one before it."""
        self.nodes: dict[str, Node] = {}
        self.size, self.plan = settings.size, settings.plan
        self._is_inherited = epoch > 0
        self._heard_since: float | None = None
        self.in_force = False
        """Whether the epoch's world is formed and whole, as far as is known."""
        self._short_since: float | None = None
        self._failures = 0
        self._progress = -1
        self._last_crash: tuple[str, int] | None = None
        self._is_counted = True
        self._ended = self._stopping = False
        self._queue: list[Order] = []

    # ---- what happened ------------------------------------------------------------------------------------------

    def arrived(self, name: str, host: str, slots: int, workers: dict[int, Worker]) -> None:
        """An agent says hello, for the first time or again, with the workers that it has."""
        self.nodes[name] = Node(host, slots, workers)
        if self._is_inherited and len(self._members()) == self.size:
            self.in_force, self._is_inherited = True, False
        elif self.in_force and self.size < self._settings.size and self._room() >= self._settings.size:
            self._break(f"node {name} came")

    def left(self, name: str, why: str) -> None:
        """An agent and all its workers are gone, or cannot be reached."""
        node = self.nodes.pop(name, None)
        if node is not None and any(self._is_member(w) for w in node.workers.values()):
            self._break(f"node {name} is lost: {why}")

    def started(self, name: str, slot: int, pid: int) -> None:
        """A worker process was started; it may have said before that it is ready."""
        self.nodes[name].workers.setdefault(slot, Worker()).pid = pid

    def ready(self, name: str, slot: int, epoch: int, why: str = "") -> None:
        """A worker waits for a world; `epoch` is that of the world that broke for it, with `why`, or 0."""
        worker = self._worker(name, slot)
        if worker is None:
            return
        was_member = self._is_member(worker)
        worker.state = State.READY
        if was_member and epoch == self.epoch:
            self._break(why)

    def done(self, name: str, slot: int) -> None:
        """A worker has come to the end of the run."""
        worker = self._worker(name, slot)
        if worker is None:
            return
        worker.state = State.DONE
        if self.in_force and all(w.state is State.DONE for w in self._members()):
            self._end(Finish(0, "done"))

    def lost(self, name: str, slot: int, cause: Cause) -> None:
        """A worker process has ended, and not because the run did."""
        worker = self._worker(name, slot)
        if worker is None:
            return
        was_member = self._is_member(worker)
        del self.nodes[name].workers[slot]
        if cause.exit_code >= FINAL:
            self._end(Finish(cause.exit_code - FINAL, cause.why, cause.error))
        if was_member:
            self._break(f"rank {worker.rank} is lost: {cause.why}")
        if self._stopping:
            self._end(Finish(Retryable.exit_code, f"a worker was lost while the run was stopping: {cause.why}"))
        self._count(cause)

    def made_step(self, step: int) -> None:
        """The run has come as far as `step`."""
        if self.in_force and step > self._progress:
            if self._progress >= 0:
                self._failures = 0
            self._progress = step

    def stop(self) -> None:
        """A signal asked the run to end: its workers save and are done, and nobody is started any more."""
        self._stopping = True

    def avoid(self, name: str, why: str) -> None:
        """Go on without a node that slows the others down, if there are processes enough without it."""
        node = self.nodes.get(name)
        if node is not None and not node.is_avoided and self._room() - node.slots >= self.size:
            node.is_avoided = True
            self._break(f"node {name} is avoided: {why}")

    def places_of(self, ranks: Collection[int]) -> list[tuple[str, int]]:
        """(node, slot) of those members of the epoch that have these ranks."""
        return [
            (name, slot)
            for name, node in self.nodes.items()
            for slot, worker in node.workers.items()
            if self._is_member(worker) and worker.rank in ranks
        ]

    # ---- what to do ---------------------------------------------------------------------------------------------

    def orders(self, now_s: float) -> list[Order]:
        """What has to be done; `now_s` is any clock that only goes forward."""
        if not self._ended and not self._stopping:
            self._queue += self._start_missing()
            if self._is_inherited:
                self._give_up_inheritance(now_s)
            if not self.in_force:
                self._form(now_s)
        orders, self._queue = self._queue, []
        return orders

    def _give_up_inheritance(self, now_s: float) -> None:
        """End the epoch of the coordinator before this one, if its members are not all there and none is to come."""
        self._heard_since = now_s if self._heard_since is None else self._heard_since
        if self._room() >= self._settings.size or now_s - self._heard_since > self._settings.wait_for_nodes_s:
            self._is_inherited = False
            if self._members():
                self._queue.append(Break(self.epoch, "not all of its members are left"))

    def _start_missing(self) -> Iterator[Start]:
        for name, node in self.nodes.items():
            for slot in range(node.slots):
                worker = node.workers.get(slot)
                if worker is None or (worker.state is State.DONE and not self.in_force):
                    node.workers[slot] = Worker()
                    yield Start(name, slot)

    def _form(self, now_s: float) -> None:
        if any(self._is_member(w) for node in self.nodes.values() for w in node.workers.values()):
            return  # some have not left the world that broke
        ready = [
            (name, slot)
            for name, node in sorted(self.nodes.items())
            for slot, w in sorted(node.workers.items())
            if w.state is State.READY
        ]
        ready.sort(key=lambda place: self.nodes[place[0]].is_avoided)
        if not ready:
            return
        plan, size = self._settings.plan, self._settings.size
        if self._room() < size:
            self._short_since = now_s if self._short_since is None else self._short_since
            waited_s = now_s - self._short_since
            if not self.epoch and waited_s > self._settings.first_wait_s:
                self._end(Finish(Retryable.exit_code, self._who_is_missing()))
            if not self.epoch or waited_s < self._settings.wait_for_nodes_s or self._replan is None:
                return
            smaller = self._replan(self._room())
            if smaller is None:
                self._end(Finish(Retryable.exit_code, f"{self._room()} workers are left, and no plan fits them"))
                return
            plan, size = smaller
        if len(ready) < size:
            return
        if not self._is_counted:
            self._count(Cause("a connection between the workers broke", exit_code=-9))
        if self._ended:
            return
        self._short_since, self._is_counted = None, False
        self.epoch += 1
        self.plan, self.size, self.in_force = plan, size, True
        places = self._places(ready[:size] if self._has_avoided(ready) else ready)
        for (name, slot), rank in places.items():
            worker = self.nodes[name].workers[slot]
            worker.state, worker.rank, worker.epoch = State.RUNNING, rank, self.epoch
        self._queue.append(Join(self.epoch, plan, places))

    def _has_avoided(self, places: list[tuple[str, int]]) -> bool:
        return any(self.nodes[name].is_avoided for name, _ in places)

    def _places(self, ready: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Ranks 0 to size - 1 for members: survivors of the last world keep theirs, others fill what is free.

        With several nodes, ranks of one node are consecutive where nothing was lost; a place that fell free is given
        to its own node first, so that what used to be near stays near.
        """
        free = dict.fromkeys(range(self.size))
        places: dict[tuple[str, int], int] = {}
        keepers = sorted(ready, key=lambda place: -self.nodes[place[0]].workers[place[1]].epoch)
        for name, slot in keepers:
            worker = self.nodes[name].workers[slot]
            if worker.epoch and worker.rank in free:
                places[name, slot] = worker.rank
                del free[worker.rank]
        others = [place for place in ready if place not in places]
        for rank in list(free):
            neighbour = next((n for (n, _), r in places.items() if abs(r - rank) == 1), None)
            place = next((p for p in others if p[0] == neighbour), others[0])
            others.remove(place)
            places[place] = rank
        return places

    # ---- parts --------------------------------------------------------------------------------------------------

    def _who_is_missing(self) -> str:
        here = ", ".join(f"{name} ({node.slots} workers)" for name, node in sorted(self.nodes.items()))
        came = f"{self._room()} of {self._settings.size} workers came within {self._settings.first_wait_s:.0f} s"
        return f"{came}, from {here}"

    def _worker(self, name: str, slot: int) -> Worker | None:
        node = self.nodes.get(name)
        return None if node is None else node.workers.get(slot)

    def _is_member(self, worker: Worker) -> bool:
        return worker.epoch == self.epoch and worker.state in (State.RUNNING, State.DONE) and self.epoch > 0

    def _members(self) -> list[Worker]:
        return [w for node in self.nodes.values() for w in node.workers.values() if self._is_member(w)]

    def _room(self) -> int:
        return sum(node.slots for node in self.nodes.values())

    def _break(self, why: str) -> None:
        if self.in_force and not self._ended:
            self.in_force = False
            self._queue.append(Break(self.epoch, why))

    def _count(self, cause: Cause) -> None:
        """Give up where going on would only repeat what happened."""
        if self._ended:
            return
        self._is_counted = True
        crash = (cause.why, cause.step)
        if cause.is_own and cause.step >= 0 and crash == self._last_crash:
            self._end(Finish(Poisoned.exit_code, f"the same crash twice at step {cause.step}: {cause.why}"))
            return
        self._last_crash = crash
        self._failures += 1
        if self._failures > self._settings.max_restarts:
            times = f"{self._failures} times (launch.max_restarts = {self._settings.max_restarts})"
            self._end(
                Finish(
                    Retryable.exit_code,
                    f"the workers died {times} without getting any further, the last time of: {cause.why}",
                )
            )

    def _end(self, finish: Finish) -> None:
        if not self._ended:
            self._ended = True
            self._queue.append(finish)

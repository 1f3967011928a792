"""Who trains: the decisions of the coordinator, as a state machine that touches no socket, file or clock.

An *generation* is one world of processes: a number, a size, and who has which rank. It ends when one of its members is
lost, or when its membership is to change; the next one is formed of the survivors, who keep their ranks, and of those
who are ready to take the places of the lost. What happens in a generation that is over is not heard any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from argosy.errors import FINAL, Poisoned, Retryable
from argosy.supervise.handover import Handover
from argosy.supervise.nodes import Cause, Node, State, Worker
from argosy.supervise.orders import Break, CheckNode, Finish, Join, Order, Start

MOST_DOUBTS = 3
"""A node of which a rank was blamed, or that was refused, so often is last in line for the rest of the run."""

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
    checks_nodes: bool = True
    """Whether nodes are examined."""


class Membership:
    """Nodes, workers and the generation in force. Callers tell what happened; `orders` is what to do about it."""

    def __init__(self, settings: Settings, handover: Handover | None = None, replan: Replan | None = None):
        """`handover`: of the coordinator before; its generation stays in force if its members are all there."""
        handover = handover or Handover()
        self._settings, self._replan = settings, replan
        self.generation = handover.generation
        """The newest that was formed, by this coordinator or by one before it."""
        self.nodes: dict[str, Node] = {}
        self._inherited = handover if handover.members else None
        of: Settings | Handover = self._inherited or settings
        self.size, self.plan = of.size, of.plan
        self._heard_since: float | None = None
        self.in_force = False
        """Whether the generation's world is formed and whole, as far as is known."""
        self._short_since: float | None = None
        self._instead = (of.plan, of.size) if self._inherited and handover.is_instead else None
        """Plan and size in place of the run's own, as long as there is room for them."""
        self._newcomer, self._came_s = "", 0.0
        """A node that the generation may make use of, and since when none came after it."""
        self._avoided, self._last = set(handover.avoided), set(handover.last)
        self._doubts = Counter(handover.doubts)
        self._failures = 0
        self._progress = self._safe = -1
        self._last_crash: tuple[str, int] | None = None
        self._last_crash_generation = 0
        self._is_counted = True
        self._ended = self._stopping = False
        self._queue: list[Order] = []

    # ---- what happened ------------------------------------------------------------------------------------------

    def arrived(
        self, name: str, host: str, slots: int, workers: dict[int, Worker], is_being_checked: bool = False
    ) -> None:
        """An agent says hello, for the first time or again, with the workers that it has.

        A node that is avoided is so until it is started anew: that its connection broke has not made it well.
        """
        if not workers:
            self._avoided.discard(name)
        self.nodes[name] = Node(host, slots, workers, name in self._avoided, name in self._last, is_being_checked)
        if self._inherited is not None:
            self._claim(name, self._inherited)
        elif not is_being_checked:
            self._grow(name)

    def node_checked(self, name: str) -> None:
        """An examination found a node well: its workers may join a world."""
        if (node := self.nodes.get(name)) is not None and node.is_being_checked:
            node.is_being_checked = False
            self._grow(name)

    def refuse(self, name: str, why: str) -> None:
        """An examination found that a node computes wrongly: the run goes on without it."""
        self._doubt(name)
        self.left(name, why)

    def left(self, name: str, why: str) -> None:
        """An agent and all its workers are gone, or cannot be reached."""
        had_members = name in self.nodes and self._members_of(name)
        self.nodes.pop(name, None)
        if had_members:
            self._break(f"node {name} is lost: {why}")

    def started(self, name: str, slot: int, pid: int) -> None:
        """A worker process was started; it may have said before that it is ready."""
        self.nodes[name].workers.setdefault(slot, Worker()).pid = pid

    def ready(self, name: str, slot: int, generation: int, why: str = "") -> None:
        """A worker waits for a world; `generation` is that of the world that broke for it, with `why`, or 0."""
        worker = self._worker(name, slot)
        if worker is None:
            return
        was_member = self._is_member(worker)
        worker.state = State.READY
        if was_member and generation == self.generation:
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
            self.made_step(cause.step)  # which nobody may have shown yet
            self._break(f"rank {worker.rank} is lost: {cause.why}")
        if self._stopping:
            self._end(Finish(Retryable.exit_code, f"a worker was lost while the run was stopping: {cause.why}"))
        self._count(cause)

    def made_step(self, step: int, safe_step: int = -1) -> None:
        """The run is in `step`, and would go back to `safe_step` at most; -1: it is in none, or that is not known.

        It gets further if either is further than ever: steps that are made again after going back count for nothing,
        unless the next loss costs fewer of them.
        """
        if not self.in_force or step < 0:
            return
        is_first = self._progress < 0  # that a coordinator hears of: it does not know what was before
        if not is_first and (step > self._progress or safe_step > self._safe):
            self._failures = 0
        self._progress, self._safe = max(step, self._progress), max(safe_step, self._safe)

    def stop(self) -> None:
        """A signal asked the run to end: its workers save and are done, and nobody is started any more."""
        self._stopping = True

    def fail(self, why: str) -> None:
        """The run cannot go on here; the same command may."""
        self._end(Finish(Retryable.exit_code, why))

    def room_without(self, *names: str) -> int:
        """Workers that there is room for on nodes that are well, if these are not."""
        return sum(n.slots for name, n in self.nodes.items() if not n.is_avoided and name not in names)

    def migrate(self, plan: str, size: int, leave_out: Collection[str], why: str) -> None:
        """Go on with this plan and so many workers, without these nodes, as long as there are so many on others.

        Nodes that were left out are taken again once they are started anew, or if others are lost.
        """
        self._avoided |= set(leave_out)
        for name in self.nodes.keys() & leave_out:
            self.nodes[name].is_avoided = True
        self._instead = (plan, size)
        self._break(why, is_planned=True)
        for name in sorted(self.nodes.keys() & leave_out):  # what is slow may be about to fail; nobody waits for it now
            self._begin_node_check(name)

    def check_node(self, name: str, why: str) -> None:
        """A rank of a node is in doubt: examine it before it goes on, unless that was done often enough."""
        node = self.nodes.get(name)
        is_ending = self._stopping or any(worker.state is State.DONE for worker in self._members())
        if node is None or node.is_being_checked or is_ending or self._doubts[name] >= MOST_DOUBTS:
            return
        if self._settings.checks_nodes:
            self._doubt(name)
            self._break(f"node {name} is examined: {why}", is_planned=True)
            self._begin_node_check(name)

    def put_last(self, name: str) -> None:
        """From the next world on a node is taken only if there are not enough others, for the rest of the run."""
        self._last.add(name)
        if (node := self.nodes.get(name)) is not None:
            node.is_last = True

    def is_over(self, generation: int) -> bool:
        """Whether a generation that was begun has ended."""
        return generation < self.generation or not (self.in_force or self._inherited is not None)

    def handover(self) -> Handover:
        """What a coordinator that takes this one's place has to know."""
        members = {name: len(self._members_of(name)) for name in self.nodes} if self.in_force else {}
        return Handover(
            self.generation,
            self.plan,
            self.size,
            members=members,
            is_instead=self._instead is not None,
            avoided=tuple(sorted(self._avoided)),
            last=tuple(sorted(self._last)),
            doubts=dict(self._doubts),
        )

    def places_of(self, ranks: Collection[int]) -> list[tuple[str, int]]:
        """(node, slot) of those members of the generation that have these ranks."""
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
            if self._inherited is not None:
                self._wait_for_the_inherited(now_s)
            if not self.in_force:
                self._form(now_s)
            elif self._newcomer:
                self._grow_partly(now_s)
        orders, self._queue = self._queue, []
        return orders

    def _wait_for_the_inherited(self, now_s: float) -> None:
        """Give the generation of the coordinator before this one up if its members do not come, or others would do."""
        self._heard_since = now_s if self._heard_since is None else self._heard_since
        others = sum(node.slots for name, node in self.nodes.items() if not self._members_of(name))
        if others >= self._settings.size or now_s - self._heard_since > self._settings.wait_for_nodes_s:
            self._forfeit("not all of its members are left")

    def _start_missing(self) -> Iterator[Start]:
        for name, node in self.nodes.items():
            for slot in range(node.slots):
                worker = node.workers.get(slot)
                if worker is None or (worker.state is State.DONE and not self.in_force):
                    node.workers[slot] = Worker()
                    yield Start(name, slot)

    def _form(self, now_s: float) -> None:
        """Begin the next generation, if there are workers enough for one."""
        if self._members():
            return  # some have not left the world that broke
        ready = self._ready()
        chosen = self._plan_and_size(now_s) if ready else None
        if chosen is None:
            return
        plan, size = chosen
        if self.room_without() >= size:
            ready = [place for place in ready if not self.nodes[place[0]].is_avoided]
        if len(ready) < size:
            return
        if not self._is_counted:
            self._count(Cause("a connection between the workers broke", exit_code=-9))
        if self._ended:
            return
        self._short_since, self._is_counted, self._newcomer = None, False, ""
        self._instead = self._instead if self._instead == (plan, size) else None
        self.generation += 1
        self.plan, self.size, self.in_force = plan, size, True
        places = self._places(ready[:size] if self._has_avoided(ready) else ready)
        for (name, slot), rank in places.items():
            worker = self.nodes[name].workers[slot]
            worker.state, worker.rank, worker.generation = State.RUNNING, rank, self.generation
        self._queue.append(Join(self.generation, plan, places))

    def _ready(self) -> list[tuple[str, int]]:
        """(node, slot) of the workers that can join a world, those first that are to be taken first."""
        ready = [
            (name, slot)
            for name, node in sorted(self.nodes.items())
            for slot, w in sorted(node.workers.items())
            if w.state is State.READY and not node.is_being_checked
        ]
        return sorted(ready, key=lambda place: (self.nodes[place[0]].is_avoided, self.nodes[place[0]].is_last))

    def _plan_and_size(self, now_s: float) -> tuple[str, int] | None:
        """To go on with; None while nodes are waited for, or if this is the end."""
        if self._instead is not None and self.room_without() >= self._instead[1]:
            return self._instead
        settings, room = self._settings, self._room()
        if room >= settings.size:
            return settings.plan, settings.size
        self._short_since = now_s if self._short_since is None else self._short_since
        waited_s = now_s - self._short_since
        if not self.generation and waited_s > settings.first_wait_s:
            self._end(Finish(Retryable.exit_code, self._who_is_missing()))
        if not self.generation or waited_s < settings.wait_for_nodes_s or self._replan is None:
            return None
        smaller = self._replan(room)
        if smaller is None:
            self._end(Finish(Retryable.exit_code, f"{room} workers are left, and no plan fits them"))
        return smaller

    def _has_avoided(self, places: list[tuple[str, int]]) -> bool:
        return any(self.nodes[name].is_avoided or self.nodes[name].is_last for name, _ in places)

    def _places(self, ready: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Ranks 0 to size - 1 for members: survivors of the last world keep theirs, others fill what is free.

        With several nodes, ranks of one node are consecutive where nothing was lost; a place that fell free is given
        to its own node first, so that what used to be near stays near.
        """
        free = dict.fromkeys(range(self.size))
        places: dict[tuple[str, int], int] = {}
        keepers = sorted(ready, key=lambda place: -self.nodes[place[0]].workers[place[1]].generation)
        for name, slot in keepers:
            worker = self.nodes[name].workers[slot]
            if worker.generation and worker.rank in free:
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

    def _claim(self, name: str, inherited: Handover) -> None:
        """A node came, while it is not known whether the inherited generation's members are all there."""
        if len(self._members()) == self.size:
            self.in_force, self._inherited = True, None
            for other, node in self.nodes.items():
                if not node.is_being_checked and not self._members_of(other):
                    self._grow(other)
        elif len(self._members_of(name)) < inherited.members.get(name, 0):
            self._forfeit(f"node {name} has not all of its members left")

    def _forfeit(self, why: str) -> None:
        """The inherited generation is over."""
        self._inherited = self._instead = None
        self.plan, self.size = self._settings.plan, self._settings.size
        if self._members():
            self._queue.append(Break(self.generation, why))

    def _grow(self, name: str) -> None:
        """A node came: a run that was laid out on fewer goes on under its own plan, if there is room again."""
        if not self.in_force or self.size >= self._settings.size:
            return
        if self.room_without() >= self._settings.size:
            self._instead = None
            self._break(f"node {name} came", is_planned=True)
        else:
            self._newcomer, self._came_s = name, math.inf

    def _grow_partly(self, now_s: float) -> None:
        """No more nodes have come for a while: go on with those that have, if a plan makes use of them."""
        self._came_s = min(self._came_s, now_s)
        if now_s - self._came_s < self._settings.wait_for_nodes_s:
            return
        name, self._newcomer = self._newcomer, ""
        larger = None if self._replan is None else self._replan(self.room_without())
        if larger is not None and larger[1] > self.size:
            self._instead = larger
            self._break(f"node {name} came", is_planned=True)

    def _begin_node_check(self, name: str) -> None:
        if self._settings.checks_nodes and not self.nodes[name].is_being_checked:
            self.nodes[name].is_being_checked = True
            self._queue.append(CheckNode(name))

    def _doubt(self, name: str) -> None:
        self._doubts[name] += 1
        if self._doubts[name] >= MOST_DOUBTS:
            self.put_last(name)

    def _who_is_missing(self) -> str:
        here = ", ".join(f"{name} ({node.slots} workers)" for name, node in sorted(self.nodes.items()))
        came = f"{self._room()} of {self._settings.size} workers came within {self._settings.first_wait_s:.0f} s"
        return f"{came}, from {here}"

    def _worker(self, name: str, slot: int) -> Worker | None:
        node = self.nodes.get(name)
        return None if node is None else node.workers.get(slot)

    def _is_member(self, worker: Worker) -> bool:
        return (
            worker.generation == self.generation and worker.state in (State.RUNNING, State.DONE) and self.generation > 0
        )

    def _members(self) -> list[Worker]:
        return [worker for name in self.nodes for worker in self._members_of(name)]

    def _members_of(self, name: str) -> list[Worker]:
        return [worker for worker in self.nodes[name].workers.values() if self._is_member(worker)]

    def _room(self) -> int:
        return sum(node.slots for node in self.nodes.values())

    def _break(self, why: str, is_planned: bool = False) -> None:
        """`is_planned`: nothing went wrong that `launch.max_restarts` would count."""
        if self._inherited is not None and not self._ended:
            self._forfeit(why)
        if self.in_force and not self._ended:
            self.in_force = False
            self._is_counted |= is_planned
            self._queue.append(Break(self.generation, why))

    def _count(self, cause: Cause) -> None:
        """Give up where going on would only repeat what happened."""
        if self._ended:
            return
        self._is_counted = True
        crash = (cause.why, cause.step)
        if (
            cause.is_own
            and cause.step >= 0
            and crash == self._last_crash
            and self.generation > self._last_crash_generation
        ):
            self._end(Finish(Poisoned.exit_code, f"the same crash twice at step {cause.step}: {cause.why}"))
            return
        self._last_crash, self._last_crash_generation = crash, self.generation
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

"""The membership of a run: the coordinator's decisions, as a state machine that touches no socket, file or clock.

A *generation* is one world of processes: a number, a size, and which worker has which rank. It ends when a member is
lost, or when the membership has to change. The next one is formed of the survivors, which keep their ranks, and of
workers that are ready to replace the lost ones. Messages about a generation that is over are ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from argosy.errors import FINAL_BIT, Retryable, counted, some_of
from argosy.supervise.nodes import (
    Break,
    Cause,
    CheckNode,
    Failures,
    FinishRun,
    Handover,
    Join,
    Node,
    Order,
    Place,
    RankProcess,
    RankState,
    Roster,
    Start,
)

MOST_SUSPICIONS = 3
"""A node that was suspected or refused this often is used after all others for the rest of the run."""
STOP_WAIT_S = 5.0
"""Time that a new coordinator of a stopping run waits for agents of the world before: they call within two seconds."""
MOST_NAMED = 16
"""A message names this many nodes at most."""

Replan = Callable[[int], tuple[str, int] | None]
"""Number of workers -> the plan for them and its size; None if no plan fits them."""


@dataclass(frozen=True)
class Settings:
    """Settings from the run file."""

    size: int
    """Processes of the plan."""
    plan: str
    max_restarts: int = 3
    wait_for_nodes_s: float = 60.0
    first_wait_s: float = 600.0
    """Time that the run waits for all its nodes before its first step."""
    checks_nodes: bool = True
    """True if node health checks are on."""
    rank_map: Mapping[str, int] = field(default_factory=dict)
    """Node -> its place in the order of ranks; the others follow in alphabetical order."""


class Membership:
    """Nodes, workers and the generation in force. Callers report events; `orders` returns what to do about them."""

    def __init__(self, settings: Settings, handover: Handover | None = None, replan: Replan | None = None):
        """`handover`: from the coordinator before this one; its generation stays in force if its members are there."""
        handover = handover or Handover()
        self._settings, self._replan = settings, replan
        self.generation = handover.generation
        """The newest that was formed, by this coordinator or an earlier one."""
        self._roster = Roster(self.generation, settings.rank_map)
        self._inherited = handover if handover.members else None
        of: Settings | Handover = self._inherited or settings
        self.size, self.plan = of.size, of.plan
        self._heard_since: float | None = None
        self.in_force = False
        """True while the generation's world is formed and, as far as is known, whole."""
        self._broke = "the coordinator was lost"
        """Why the last world ended."""
        self._short_since: float | None = None
        self._instead = (of.plan, of.size) if self._inherited and handover.is_instead else None
        """Plan and size that replace the run's own, as long as there is room for them."""
        self._planned: dict[int, tuple[str, int] | None] = {}
        """Room -> the plan for it: the planner's last answer, until a world is formed."""
        self._newcomer, self._came_s = "", 0.0
        """A node that a larger generation could use, and the time since which no other came."""
        self._avoided, self._last = set(handover.avoided), set(handover.last)
        self._suspicions = Counter(handover.suspicions)
        self._failures = Failures(settings.max_restarts)
        self._is_counted = True
        self._ended = self._stopping = False
        self._queue: list[Order] = []

    @property
    def nodes(self) -> Mapping[str, Node]:
        return self._roster.nodes

    # ---- events -------------------------------------------------------------------------------------------------

    def arrived(
        self, name: str, host: str, slots: int, workers: dict[int, RankProcess], is_being_checked: bool = False
    ) -> None:
        """An agent has connected, for the first time or again, with the workers that it has.

        A node that comes again with all of its members has missed nothing, and the generation goes on. A node that is
        avoided stays so until it is started anew: a broken connection has not repaired it.
        """
        if not workers:
            self._avoided.discard(name)
        node = Node(host, slots, workers, name in self._avoided, name in self._last, is_being_checked)
        members = self._roster.ranks_of(name)
        self._roster.put(name, node)
        if members - self._roster.ranks_of(name):
            self._break(f"node {name} came back without some of its members")
        self._end_if_done()
        if self._inherited is not None:
            self._claim(name, self._inherited)
        elif not is_being_checked:
            self._grow(name)

    def node_checked(self, name: str) -> None:
        """A node passed its health check: its workers may join a world."""
        if (node := self.nodes.get(name)) is not None and node.is_being_checked:
            node.is_being_checked = False
            self._roster.changed(name)
            self._grow(name)

    def refuse(self, name: str, why: str) -> None:
        """A node failed its health check: the run goes on without it."""
        self._suspect(name)
        self.left(name, why)

    def left(self, name: str, why: str) -> None:
        """An agent and all its workers are gone or unreachable."""
        had_members = self._roster.members_of(name)
        self._roster.remove(name)
        if had_members:
            self._break(f"node {name} is lost: {why}")

    def started(self, name: str, slot: int, pid: int) -> None:
        """A worker process was started; its message that it is ready may have come before."""
        self.nodes[name].workers.setdefault(slot, RankProcess()).pid = pid
        self._roster.changed(name)

    def ready(self, name: str, slot: int, generation: int, why: str = "") -> None:
        """A worker waits for a world; `generation` is that of the world that it left because of `why`, or 0."""
        worker = self._roster.worker(name, slot)
        if worker is None:
            return
        was_member = self._roster.is_member(worker)
        if was_member and generation != self.generation:
            return
        worker.state = RankState.READY
        self._roster.changed(name)
        if was_member:
            self._break(why)

    def done(self, name: str, slot: int) -> None:
        """A worker has reached the end of the run."""
        worker = self._roster.worker(name, slot)
        if worker is None:
            return
        worker.state = RankState.DONE
        self._roster.changed(name)
        self._end_if_done()

    def lost(self, name: str, slot: int, cause: Cause) -> None:
        """A worker process has ended before the run did."""
        worker = self._roster.worker(name, slot)
        if worker is None:
            return
        was_member, was_broken = self._roster.is_member(worker), not self.in_force
        del self.nodes[name].workers[slot]
        self._roster.changed(name)
        if cause.exit_code >= FINAL_BIT:
            self._end(FinishRun(cause.exit_code - FINAL_BIT, cause.why, cause.error))
        if was_member:
            self.made_step(cause.step)  # no heartbeat may have shown it yet
            self._break(f"rank {worker.rank} is lost: {cause.why}")
        if not self._stopping:  # a machine that dies, or is out of memory, takes many workers with it: one failure
            self._count(cause, is_same=was_member and was_broken and self._is_counted)

    def made_step(self, step: int, safe_step: int = -1) -> None:
        """The run is in `step`, and would go back to `safe_step` at most; -1: in none, or not known."""
        if self.in_force and step >= 0:
            self._failures.made_step(step, safe_step)

    def stop(self, name: str) -> bool:
        """A signal asked a node to end. Return True if the run ends: its workers save and end, and none is started any
        more; where the world is broken, those that were in it form a last one, which saves what they have. A node that
        has no part in the state goes alone.
        """
        having = [n for n, node in self.nodes.items() if any(w.generation for w in node.workers.values())]
        if self._roster.members_of(name) if self.in_force else self.generation and name in (having or self.nodes):
            self._stopping = True
        else:
            self.left(name, "it was stopped")
        return self._stopping

    def fail(self, why: str) -> None:
        """The run cannot go on now; the same command may go on later."""
        self._end(FinishRun(Retryable.exit_code, why))

    def room_without(self, *names: str) -> int:
        """Return how many workers there is room for without these nodes and those that are avoided."""
        left_out = (node for name in set(names) if (node := self.nodes.get(name)) is not None and not node.is_avoided)
        return self._roster.counts.unavoided_room - sum(node.slots for node in left_out)

    def migrate(self, plan: str, size: int, leave_out: Collection[str], why: str) -> None:
        """Go on with this plan and `size` workers, without these nodes, as long as there are enough on others.

        Nodes that were left out are used again once they are started anew, or if others are lost.
        """
        self._avoided |= set(leave_out)
        for name in self.nodes.keys() & leave_out:
            self.nodes[name].is_avoided = True
            self._roster.changed(name)
        self._instead = (plan, size)
        self._break(why, is_planned=True)
        for name in sorted(self.nodes.keys() & leave_out):  # slow may mean about to fail, and nothing waits for it now
            self._begin_node_check(name)

    def check_node(self, name: str, why: str) -> None:
        """A rank of a node is suspected: check the node before it goes on, unless that was done often enough."""
        node = self.nodes.get(name)
        is_ending = self._stopping or self._roster.counts.done > 0
        if node is None or node.is_being_checked or is_ending or self._suspicions[name] >= MOST_SUSPICIONS:
            return
        if self._settings.checks_nodes:
            self._suspect(name)
            self._break(f"the health of node {name} is checked: {why}", is_planned=True)
            self._begin_node_check(name)

    def put_last(self, name: str) -> None:
        """Use a node only if there are not enough others, from the next world on, for the rest of the run."""
        self._last.add(name)
        if (node := self.nodes.get(name)) is not None:
            node.is_last = True

    def is_over(self, generation: int) -> bool:
        """Return True if a generation that was begun has ended."""
        return generation < self.generation or not (self.in_force or self._inherited is not None)

    def handover(self) -> Handover:
        """Return what a coordinator that replaces this one has to know."""
        members = {name: self._roster.members_of(name) for name in self.nodes} if self.in_force else {}
        return Handover(
            self.generation,
            self.plan,
            self.size,
            members=members,
            is_instead=self._instead is not None,
            avoided=tuple(sorted(self._avoided)),
            last=tuple(sorted(self._last)),
            suspicions=dict(self._suspicions),
        )

    def places_of(self, ranks: Collection[int]) -> list[Place]:
        """Return the (node, slot) of the members of the generation that have these ranks."""
        return [place for rank in ranks if (place := self._roster.place_of(rank)) is not None]

    # ---- orders -------------------------------------------------------------------------------------------------

    def orders(self, now_s: float) -> list[Order]:
        """Return what has to be done; `now_s` is any clock that only goes forward."""
        if self._ended:
            pass
        elif self._stopping:
            if self._inherited is not None:
                self._wait_for_the_inherited(now_s, min(STOP_WAIT_S, self._settings.wait_for_nodes_s))
            if not self.in_force and self.generation:
                self._form_the_last()
        else:
            self._queue += self._start_missing()
            if self._inherited is not None:
                self._wait_for_the_inherited(now_s, self._settings.wait_for_nodes_s)
            if not self.in_force:
                self._form(now_s)
            elif self._newcomer:
                self._grow_partly(now_s)
        orders, self._queue = self._queue, []
        return orders

    def _wait_for_the_inherited(self, now_s: float, patience_s: float) -> None:
        """Give up the inherited generation if its members do not come, or there are enough others."""
        self._heard_since = now_s if self._heard_since is None else self._heard_since
        if self._roster.counts.unused_room >= self._settings.size or now_s - self._heard_since > patience_s:
            self._forfeit("some of its members are lost")

    def _start_missing(self) -> Iterator[Start]:
        """Start workers where there is none, and anew where one reached the end of a world that has broken."""
        for name in [*self._roster.vacant, *(() if self.in_force else self._roster.finished)]:
            node = self.nodes[name]
            for slot in range(node.slots):
                worker = node.workers.get(slot)
                if worker is None or (worker.state is RankState.DONE and not self.in_force):
                    node.workers[slot] = RankProcess()
                    yield Start(name, slot)
            self._roster.changed(name)

    def _form(self, now_s: float) -> None:
        """Begin the next generation, if there are workers enough for one."""
        counts = self._roster.counts
        if counts.members:
            return  # some have not left the broken world
        chosen = self._plan_and_size(now_s) if counts.ready else None
        if chosen is None:
            return
        plan, size = chosen
        needs_avoided = counts.unavoided_room < size
        if (counts.ready if needs_avoided else counts.unavoided_ready) < size:
            return
        if not self._is_counted:
            self._count(Cause("a connection between the workers broke", exit_code=-9))
        if self._ended:
            return
        self._short_since, self._is_counted, self._newcomer = None, False, ""
        self._instead = self._instead if self._instead == (plan, size) else None
        ready = [place for place in self._roster.ready() if needs_avoided or not self.nodes[place[0]].is_avoided]
        self._begin(plan, size, ready[:size] if self._roster.has_reserve(ready) else ready)

    def _form_the_last(self) -> None:
        """Begin a world of those that have the state, for them to save it; end the run if there can be none."""
        counts = self._roster.counts
        if self._inherited is not None or counts.members > counts.done:
            return  # some have not come, or have not left the broken world
        if counts.done:
            self._end(FinishRun(0, "done"))  # none is done before the state of all is saved
            return
        left = self._roster.survivors()
        chosen = (self.plan, self.size) if len(left) >= self.size else self._plan_for(len(left)) if left else None
        if chosen is None:
            what = f"no plan fits the {len(left)} that are left" if left else "no process is left that has the state"
            self._end(FinishRun(Retryable.exit_code, f"{self._broke}, and {what}"))
            return
        self._begin(*chosen, left)

    def _begin(self, plan: str, size: int, ready: list[Place]) -> None:
        """Begin the next generation, of workers that are ready."""
        self.generation += 1
        self.plan, self.size, self.in_force, self._planned = plan, size, True, {}
        places = self._roster.assign(ready, size)
        self._roster.begin(self.generation, places)
        self._queue.append(Join(self.generation, plan, places))

    def _plan_and_size(self, now_s: float) -> tuple[str, int] | None:
        """Return the plan and size to go on with; None while waiting for nodes, or if the run ends here."""
        if self._instead is not None and self.room_without() >= self._instead[1]:
            return self._instead
        settings, room = self._settings, self._roster.counts.room
        if room >= settings.size:
            return settings.plan, settings.size
        self._short_since = now_s if self._short_since is None else self._short_since
        waited_s = now_s - self._short_since
        if not self.generation and waited_s > settings.first_wait_s:
            self._end(FinishRun(Retryable.exit_code, self._missing_workers()))
        if not self.generation or waited_s < settings.wait_for_nodes_s or self._replan is None:
            return None
        smaller = self._plan_for(room)
        if smaller is None:
            self._end(FinishRun(Retryable.exit_code, f"no plan fits the {counted(room, 'worker')} left"))
        return smaller

    # ---- parts --------------------------------------------------------------------------------------------------

    def _claim(self, name: str, inherited: Handover) -> None:
        """A node came while some members of the inherited generation may be missing."""
        if self._roster.counts.members == self.size:
            self.in_force, self._inherited = True, None
            for other, node in self.nodes.items():
                if not node.is_being_checked and not self._roster.members_of(other):
                    self._grow(other)
        elif self._roster.members_of(name) < inherited.members.get(name, 0):
            self._forfeit(f"node {name} has lost some of its members")

    def _forfeit(self, why: str) -> None:
        self._inherited = self._instead = None
        self.plan, self.size = self._settings.plan, self._settings.size
        if self._roster.counts.members:
            self._queue.append(Break(self.generation, why))

    def _grow(self, name: str) -> None:
        """A node came: a run under a smaller plan goes back to its own plan, if there is room again."""
        if not self.in_force or self.size >= self._settings.size:
            return
        if self.room_without() >= self._settings.size:
            self._instead = None
            self._break(f"node {name} came", is_planned=True)
        else:
            self._newcomer, self._came_s = name, math.inf

    def _plan_for(self, room: int) -> tuple[str, int] | None:
        """Return the plan for so many workers. The planner may take seconds, so it is asked once, not at each turn."""
        if self._replan is not None and room not in self._planned:
            self._planned = {room: self._replan(room)}
        return self._planned.get(room)

    def _grow_partly(self, now_s: float) -> None:
        """Once no more nodes have come for a while, go on with those that have, if a plan makes use of them."""
        self._came_s = min(self._came_s, now_s)
        if now_s - self._came_s < self._settings.wait_for_nodes_s:
            return
        name, self._newcomer = self._newcomer, ""
        larger = self._plan_for(self.room_without())
        if larger is not None and larger[1] > self.size:
            self._instead = larger
            self._break(f"node {name} came", is_planned=True)

    def _begin_node_check(self, name: str) -> None:
        if self._settings.checks_nodes and not self.nodes[name].is_being_checked:
            self.nodes[name].is_being_checked = True
            self._roster.changed(name)
            self._queue.append(CheckNode(name))

    def _suspect(self, name: str) -> None:
        self._suspicions[name] += 1
        if self._suspicions[name] >= MOST_SUSPICIONS:
            self.put_last(name)

    def _missing_workers(self) -> str:
        nodes = [f"{name} ({node.slots} workers)" for name, node in sorted(self.nodes.items())]
        room, settings = self._roster.counts.room, self._settings
        came = f"{room} of {settings.size} workers came within {settings.first_wait_s:.0f} s"
        return f"{came}, from {some_of(nodes, MOST_NAMED, 'other nodes')}"

    def _break(self, why: str, is_planned: bool = False) -> None:
        """End the generation. `is_planned`: this is no failure that `launch.max_restarts` counts."""
        if self._inherited is not None and not self._ended:
            self._forfeit(why)
        if self.in_force and not self._ended:
            self.in_force, self._broke = False, why
            self._is_counted |= is_planned
            self._queue.append(Break(self.generation, why))

    def _end_if_done(self) -> None:
        if self.in_force and self._roster.counts.done == self.size:
            self._end(FinishRun(0, "done"))

    def _count(self, cause: Cause, is_same: bool = False) -> None:
        """Count a failure, and end the run where going on would only repeat it. is_same: as of `Failures.count`."""
        if self._ended:
            return
        self._is_counted = True
        finish = self._failures.count(cause, self.generation, is_same)
        if finish is not None:
            self._end(finish)

    def _end(self, finish: FinishRun) -> None:
        if not self._ended:
            self._ended = True
            self._queue.append(finish)

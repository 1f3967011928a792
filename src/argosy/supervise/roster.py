"""The nodes and workers of a run, with the counts that decisions are made by.

The counts are kept, not taken: whoever changes a node calls `changed`, which counts that node alone again. So an event
costs as much as the node that it is about has slots, however many nodes there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from argosy.supervise.nodes import Node, RankProcess, RankState

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
        """Remove a node, if it is there."""
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
        """Return the ranks of a node's members."""
        node = self.nodes.get(name)
        workers = [] if node is None else node.workers.values()
        return {worker.rank for worker in workers if worker.rank is not None and self.is_member(worker)}

    def place_of(self, rank: int) -> Place | None:
        """Return where the member with this rank is; None if there is none."""
        place = self._places.get(rank)
        worker = None if place is None else self.worker(*place)
        return place if worker is not None and worker.rank == rank and self.is_member(worker) else None

    def worker(self, name: str, slot: int) -> RankProcess | None:
        """Return the worker in a slot; None if there is none."""
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

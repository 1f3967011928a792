"""A run gives up once restarts do not help, and not before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from argosy.errors import FINAL_BIT, Poisoned, Retryable
from argosy.processes.child import Channel
from argosy.supervise.nodes import (
    HANDOVER_FILE,
    OLD_NAMES,
    Cause,
    Failures,
    Handover,
    Node,
    NodeCounts,
    Place,
    RankProcess,
    RankState,
    Roster,
    WorkerProcess,
)

KILLED = Cause("signal SIGKILL", exit_code=-9)


def crash(step: int) -> Cause:
    return Cause("exit code 1, ValueError", "ValueError", 1, step)


def test_failures_are_counted_until_there_is_progress():
    failures = Failures(max_restarts=1)
    failures.made_step(3, -1)
    assert failures.count(KILLED, 1) is None
    failures.made_step(3, -1)
    end = failures.count(KILLED, 2)
    assert end is not None and end.exit_code == Retryable.exit_code and "died 2 times" in end.why
    failures.made_step(4, -1)
    assert failures.count(KILLED, 3) is None
    failures.made_step(4, 2)
    assert failures.count(KILLED, 4) is None


def test_the_first_step_that_is_heard_of_is_no_progress():
    failures = Failures(max_restarts=1)
    assert failures.count(KILLED, 1) is None
    failures.made_step(100, 90)
    assert failures.count(KILLED, 2) is not None


def test_the_same_crash_of_another_generation_ends_the_run():
    failures = Failures(max_restarts=9)
    assert failures.count(crash(5), 1) is None
    assert failures.count(crash(5), 1) is None, "two ranks of one world"
    end = failures.count(crash(5), 2)
    assert end is not None and end.exit_code == Poisoned.exit_code and "at step 5" in end.why
    assert failures.count(crash(6), 3) is None


LEFT = Handover(
    3, "dp_replicate=2", 2, {"a": 1, "b": 1}, is_instead=True, avoided=("c",), last=("c",), suspicions={"c": 3}
)


def test_a_handover_is_read_as_it_was_written(tmp_path):
    LEFT.save(tmp_path)
    assert Handover.load(tmp_path, 3) == LEFT


def test_a_handover_of_another_generation_is_ignored(tmp_path):
    LEFT.save(tmp_path)
    assert Handover.load(tmp_path, 4) == Handover(4)


@pytest.mark.parametrize(
    "text",
    [
        *(None, b"", b"{}", b"[]", b'{"generation": 3}', b"\xff", b"[" * 100_000),
        b'{"generation": 3, "members": {"a": "1"}}',
        b'{"generation": 3, "members": {"a": 1}, "size": -1}',
        b'{"generation": 3, "members": {"a": 1}, "suspicions": {"a": null}}',
        b'{"generation": 3, "members": {"a": 1}, "avoided": [["a"]]}',
    ],
)
def test_a_missing_or_damaged_handover_keeps_only_the_generation(tmp_path, text):
    if text is not None:
        (tmp_path / HANDOVER_FILE).write_bytes(text)
    assert Handover.load(tmp_path, 3) == Handover(3)


def test_what_an_older_version_left_is_understood(tmp_path):
    record = json.loads((LEFT.save(tmp_path), (tmp_path / HANDOVER_FILE).read_text())[1])
    for new, old in OLD_NAMES.items():
        record[old] = record.pop(new)
    (tmp_path / HANDOVER_FILE).write_text(json.dumps(record))
    assert Handover.load(tmp_path, LEFT.generation) == LEFT


SAID = {"kind": "failed", "text": "no room left\nin any place", "error": "StorageError", "traceback": "..."}


def process(**facts) -> WorkerProcess:
    return WorkerProcess(0, Mock(spec=Channel), **facts)


@pytest.mark.parametrize(
    ("facts", "exit_code", "cause"),
    [
        ({}, -9, Cause("signal SIGKILL", "", -9, 3)),
        ({"killed": "it hung"}, -9, Cause("it hung", "", -9, 3)),
        ({}, 7, Cause("exit code 7", "", 7, 3)),
        ({}, 0, Cause("exit code 0", "", 1, 3)),  # it was not done: it is lost, whatever it says
        ({"failure": SAID}, 1, Cause("exit code 1, no room left", "StorageError", 1, 3)),
        ({"failure": SAID}, FINAL_BIT, Cause("no room left\nin any place", "StorageError", FINAL_BIT, 3)),
        ({"failure": SAID | {"text": ""}}, 1, Cause("exit code 1, ", "StorageError", 1, 3)),
    ],
)
def test_the_cause_is_its_last_message_or_why_it_was_killed(facts, exit_code, cause):
    assert process(**facts).cause_of_death(exit_code, step=3) == cause


def test_a_signal_reaches_it_and_one_to_the_dead_is_no_error():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        held = process(pid=child.pid)
        held.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(held.pid, 0)
    held.signal(signal.SIGKILL)


SLOTS = 3
NAMES = "abcd"


def counted(roster: Roster, generation: int) -> NodeCounts:
    """All counts, taken from the nodes."""
    is_member = lambda w: 0 < generation == w.generation and w.state in (RankState.RUNNING, RankState.DONE)  # noqa: E731
    nodes = list(roster.nodes.values())
    free = [node for node in nodes if not node.is_avoided]

    def ready(node: Node) -> list[RankProcess]:
        waiting = [w for w in node.workers.values() if w.state is RankState.READY and not node.is_being_checked]
        return [w for w in waiting if w.generation or len(waiting) == node.slots]

    members = [worker for node in nodes for worker in node.workers.values() if is_member(worker)]
    return NodeCounts(
        room=sum(node.slots for node in nodes),
        unavoided_room=sum(node.slots for node in free),
        unused_room=sum(node.slots for node in nodes if not any(map(is_member, node.workers.values()))),
        ready=sum(len(ready(node)) for node in nodes),
        unavoided_ready=sum(len(ready(node)) for node in free),
        members=len(members),
        done=sum(worker.state is RankState.DONE for worker in members),
    )


def assigned(roster: Roster, ready: list[Place], size: int) -> dict[Place, int]:
    """What `assign` returns, by looking through everything for each rank."""
    free = dict.fromkeys(range(size))
    places: dict[Place, int] = {}
    worker_at = lambda place: roster.nodes[place[0]].workers[place[1]]  # noqa: E731
    for place in sorted(ready, key=lambda place: -worker_at(place).generation):
        worker = worker_at(place)
        if worker.generation and worker.rank in free:
            places[place] = worker.rank
            del free[worker.rank]
    others = [place for place in ready if place not in places]
    for rank in list(free):
        neighbour = next((n for (n, _), r in places.items() if abs(r - rank) == 1), None)
        place = next((p for p in others if p[0] == neighbour), others[0])
        others.remove(place)
        places[place] = rank
    return places


def check(roster: Roster, generation: int) -> None:
    """Compare all that is kept with what is there."""
    assert roster.counts == counted(roster, generation)
    assert set(roster.vacant) == {name for name, node in roster.nodes.items() if len(node.workers) < node.slots}
    of_done = {n for n, node in roster.nodes.items() if any(w.state is RankState.DONE for w in node.workers.values())}
    assert set(roster.finished) == of_done
    for rank in range(SLOTS * len(NAMES)):
        places = [
            (name, slot)
            for name, node in roster.nodes.items()
            for slot, worker in node.workers.items()
            if worker.rank == rank and roster.is_member(worker)
        ]
        assert roster.place_of(rank) == (places[0] if places else None)
    for name, node in roster.nodes.items():
        ranks = {worker.rank for worker in node.workers.values() if roster.is_member(worker)}
        assert roster.ranks_of(name) == ranks and roster.members_of(name) == len(ranks)


class Walk:
    """A roster to which one thing after the other happens."""

    def __init__(self, draw: Callable[[st.SearchStrategy], object]):
        self.draw, self.roster, self.generation = draw, Roster(0), 0

    def node(self) -> Node | None:
        self.name = self.draw(st.sampled_from(NAMES))
        return self.roster.nodes.get(self.name)

    def comes(self) -> None:
        self.node()
        flags = {flag: self.draw(st.booleans()) for flag in ("is_avoided", "is_last", "is_being_checked")}
        self.roster.put(self.name, Node("host", SLOTS, {}, **flags))

    def goes(self) -> None:
        self.node()
        self.roster.remove(self.name)

    def turns(self) -> None:
        if (node := self.node()) is not None:
            flag = self.draw(st.sampled_from(["is_avoided", "is_last", "is_being_checked"]))
            setattr(node, flag, not getattr(node, flag))
            self.roster.changed(self.name)

    def works(self) -> None:
        if (node := self.node()) is not None:
            for worker in node.workers.values():
                worker.state = self.draw(st.sampled_from(RankState))
            self.roster.changed(self.name)

    def starts(self) -> None:
        if (node := self.node()) is not None:
            for slot in range(SLOTS):
                node.workers.setdefault(slot, RankProcess(RankState.READY))
            self.roster.changed(self.name)

    def loses(self) -> None:
        if (node := self.node()) is not None:
            node.workers.pop(self.draw(st.integers(0, SLOTS - 1)), None)
            self.roster.changed(self.name)

    def forms(self) -> None:
        ready = self.roster.ready()
        preferred = sorted(
            ready, key=lambda p: (self.roster.nodes[p[0]].is_avoided, self.roster.nodes[p[0]].is_last, p)
        )
        assert ready == preferred and len(ready) == self.roster.counts.ready
        if ready and not self.roster.counts.members:
            size = self.draw(st.integers(1, len(ready)))
            chosen = ready[:size] if self.roster.has_reserve(ready) else ready
            places = self.roster.assign(chosen, size)
            assert places == assigned(self.roster, chosen, size)
            self.generation += 1
            self.roster.begin(self.generation, places)


HAPPENS = [Walk.comes, Walk.goes, Walk.turns, Walk.works, Walk.starts, Walk.loses, Walk.forms]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.sampled_from(HAPPENS), max_size=40))
def test_what_is_kept_is_what_is_there(data, happens):
    walk = Walk(data.draw)
    for name in NAMES:
        walk.roster.put(name, Node("host", SLOTS, {slot: RankProcess(RankState.READY) for slot in range(SLOTS)}))
    for happen in happens:
        happen(walk)
        check(walk.roster, walk.generation)


def test_an_event_counts_one_node_again_and_not_all():
    roster = Roster(0)
    for number in range(100):
        roster.put(f"node{number}", Node("host", 8))
    looked_at = set[str]()

    class Watched(dict[int, RankProcess]):
        def values(self) -> Any:
            looked_at.add(self.name)
            return super().values()

    for name, node in roster.nodes.items():
        node.workers = Watched(node.workers)
        node.workers.name = name
    roster.changed("node7")
    assert looked_at == {"node7"}


def test_nodes_get_ranks_in_the_order_of_the_rank_map_and_others_follow():
    roster = Roster(0, {"c": 0, "a": 1})
    for name in "abcd":
        roster.put(name, Node(name, 1, {0: RankProcess(RankState.READY)}))
    assert roster.ready() == [("c", 0), ("a", 0), ("b", 0), ("d", 0)]
    assert roster.assign(roster.ready(), 3) == {("c", 0): 0, ("a", 0): 1, ("b", 0): 2}

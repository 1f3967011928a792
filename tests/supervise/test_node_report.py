"""What agents tell of heartbeats: little while all goes well, and together as much as a look at every page shows."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from argosy.observe.heartbeat import HeartbeatReading
from argosy.processes.connection import decoded, encoded
from argosy.resilience.detect.finding import Sample, WorkerSeen
from argosy.supervise.messages import FROM_AGENT, NodeHeartbeat
from argosy.supervise.node_report import NodeReport, NodeReporter
from argosy.supervise.watch import WorldView
from resilience.detect.samples import READING, World


def report(world: World, reporter: NodeReporter, *ranks: int, **asked: int) -> NodeReport:
    for rank in range(world.size):
        if rank not in world.stopped:
            world.change(rank, beats=world.ranks[rank].beats + 1)
    return reporter.report([world.ranks[rank] for rank in ranks or range(world.size)], **asked)


def test_while_all_goes_well_a_report_is_short():
    world, reporter = World(8), NodeReporter(lambda pid: "S")
    for _ in range(3):
        world.step()
        told = report(world, reporter)
    assert told == NodeReport(generation=1, step=3, took=[(2, [0.1] * 8)])
    assert len(encoded(NodeHeartbeat(report=told))) < 400


def test_microbatches_are_told_where_they_are_not_as_before():
    world, reporter, view = World(2), NodeReporter(lambda pid: "S"), WorldView(1, 2)
    many: list[list[int] | None] = []
    took: list[list[float]] = []
    for shares in ([1, 1], [3, 1], [3, 1], [2, 2]):
        world.step(microbatches=dict(enumerate(shares)))
        told = report(world, reporter)
        view.take("a", decoded(encoded(NodeHeartbeat(report=told)), FROM_AGENT).report)  # type: ignore[union-attr]
        sample = view.sample(0.0, 0.5)
        many.append(told.microbatches)
        took += [times.microbatches.tolist() for times in sample.took] if sample is not None else []
    assert many == [None, [3, 1], None, [2, 2]]
    assert took == [[1, 1], [3, 1], [3, 1], [2, 2]]
    for shares in ([2, 2], [3, 1]):
        world.step(microbatches=dict(enumerate(shares)))
    told = report(world, reporter)
    assert [step for step, _ in told.took] == [5], "one report is of one deal"
    reporter.start_over()
    world.step(microbatches={0: 3, 1: 1})
    assert report(world, reporter).microbatches == [3, 1]


def test_all_is_told_again_after_starting_over_and_in_another_world():
    world, reporter = World(2), NodeReporter(lambda pid: "S")
    world.step()
    world.change(1, suspicions=2)
    first = report(world, reporter)
    assert (first.workers, first.took, first.suspicions) == ([(0, 100), (1, 101)], [(0, [0.1, 0.1])], {1: 2})
    assert report(world, reporter).workers is None
    reporter.start_over()
    assert report(world, reporter).workers == first.workers and report(world, reporter).suspicions == {}
    world.change([0, 1], generation=2)
    again = report(world, reporter)
    assert again.generation == 2 and again.workers == first.workers and again.suspicions == {1: 2}


def test_what_a_rank_without_a_beat_shows_is_told_once_and_when_its_process_is_stopped():
    world, reporter = World(2), NodeReporter(lambda pid: world.states.get(pid, "S"))
    report(world, reporter)
    world.stopped = {1}
    told = report(world, reporter)
    assert told.silent == [1] and told.seen == {1: WorkerSeen(101, 0, "forward", {"default_pg#0": 0}, "S", False)}
    assert report(world, reporter).seen == {}
    world.states[101] = "T"
    assert report(world, reporter).seen[1].state == "T"


@pytest.mark.parametrize("slower", [0, 1])
def test_nodes_that_tell_fewer_step_times_than_there_were_tell_the_same_ones(slower):
    """One node reports less often, so that it has more to leave out."""
    world, view = World(2), WorldView(1, 2)
    reporters = [NodeReporter(lambda pid: "S") for _ in range(2)]
    steps: list[int] = []
    for tick in range(400):
        world.step()
        for rank, every in ((slower, 40), (1 - slower, 20)):
            if tick % every == 0:
                view.take(f"node{rank}", report(world, reporters[rank], rank, most_steps=8))
        if (sample := view.sample(float(tick), 0.5)) is not None:
            steps += [times.step for times in sample.took]
    assert len(steps) >= 20 and steps == sorted(set(steps))


class Nodes:
    """Three agents with six ranks, what happens to these, and the coordinator's view of them."""

    def __init__(self) -> None:
        self.world, self.view, self.asks = World(6), WorldView(1, 6), False
        self.ranks = {"a": [0, 1, 2], "b": [3, 4], "c": [5]}
        self.reporters = {name: NodeReporter(lambda pid: "S") for name in self.ranks}
        self.before: dict[int, HeartbeatReading] = {}
        self.steps: list[int] = []

    def steps_on(self, rank: int) -> None:
        self.world.step(busy_s={each: 0.1 * (each + 1) for each in range(6)})

    def counts(self, rank: int) -> None:
        self.world.count([rank])

    def stops_or_wakes(self, rank: int) -> None:
        self.world.stopped ^= {rank}

    def asks_or_does_not(self, rank: int) -> None:
        self.asks = not self.asks

    def starts_over(self, rank: int) -> None:
        next(self.reporters[name] for name, ranks in self.ranks.items() if rank in ranks).start_over()

    def enters_another_phase(self, rank: int) -> None:
        self.world.change(rank, phase="evaluate" if self.world.ranks[rank].phase == "forward" else "forward")

    def is_replaced(self, rank: int) -> None:
        self.world.change(rank, pid=self.world.ranks[rank].pid + 100)

    def reports(self, rank: int = 0) -> None:
        world = self.world
        for each in set(range(6)) - world.stopped:
            world.change(each, beats=world.ranks[each].beats + 1)
        for name, ranks in self.ranks.items():
            told = self.reporters[name].report([world.ranks[each] for each in ranks], wants_all=self.asks)
            self.view.take(name, decoded(encoded(NodeHeartbeat(report=told)), FROM_AGENT).report)
        sample = self.view.sample(0.0, 0.5)
        assert sample is not None
        for times in sample.took:
            assert times.busy_s == pytest.approx(0.1 * np.arange(1, 7))
            self.steps.append(times.step)
        for each, now in world.ranks.items():
            self._check(sample, each, self.before.get(each, replace(READING, pid=-1)), now)
        self.before = dict(world.ranks)

    def _check(self, sample: Sample, rank: int, before: HeartbeatReading, now: HeartbeatReading) -> None:
        assert sample.moved[rank] or before.progress == now.progress
        assert sample.beaten[rank] or before.beats == now.beats
        assert rank in sample.seen or (sample.beaten[rank] and not self.asks)
        if rank in sample.seen:  # nothing that is old
            shown = sample.seen[rank]
            assert (shown.pid, shown.step, shown.phase) == (now.pid, now.step, now.phase)
            assert (shown.sequences, shown.has_made_a_step) == (now.sequences, bool(now.busy_s))


HAPPENS = [
    Nodes.steps_on, Nodes.counts, Nodes.stops_or_wakes, Nodes.asks_or_does_not, Nodes.starts_over,
    Nodes.enters_another_phase, Nodes.is_replaced, Nodes.reports,
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(HAPPENS), st.integers(0, 5)), max_size=60))
@example([(Nodes.asks_or_does_not, 0), (Nodes.reports, 0), (Nodes.asks_or_does_not, 0), (Nodes.steps_on, 0)])
def test_the_reports_of_all_nodes_add_up_to_what_all_pages_show(happens):
    nodes = Nodes()
    for happen, rank in happens:
        happen(nodes, rank)
    nodes.reports()
    assert nodes.steps == sorted(set(nodes.steps))


def test_the_times_of_a_step_are_whole_once_all_nodes_told_them_however_often_one_did():
    world, view = World(4), WorldView(1, 4)
    reporters = [NodeReporter(lambda pid: "S") for _ in range(2)]
    world.step()
    for _ in range(3):
        reporters[0].start_over()
        view.take("a", report(world, reporters[0], 0, 1))
    view.take("b", reporters[1].report([replace(world.ranks[rank], busy_s={}) for rank in (2, 3)]))
    sample = view.sample(0.0, 0.5)
    assert sample is not None and not sample.took
    view.take("a", report(world, reporters[0], 0, 1))
    view.take("b", report(world, reporters[1], 2, 3))
    sample = view.sample(0.5, 0.5)
    assert sample is not None and [times.step for times in sample.took] == [0]


def test_ranks_that_stand_still_are_told_from_those_that_move():
    nodes = Nodes()
    nodes.reports()
    nodes.counts(1)
    nodes.stops_or_wakes(4)
    told = [nodes.reporters[name].report([nodes.world.ranks[r] for r in nodes.ranks[name]]) for name in "ab"]
    assert [(report.still, report.silent) for report in told] == [([0, 2], [0, 1, 2]), ([3, 4], [3, 4])]
    assert nodes.reporters["c"].report([nodes.world.ranks[5]]).still == [5]

"""What agents show comes together, of the generation in force only; who has ended is not taken for one that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.config.schema import ResilienceConfig
from argosy.observe.events import forget_from
from argosy.resilience.detect.finding import Finding, WorkerSeen
from argosy.supervise.node_report import NodeReport, NodeReporter
from argosy.supervise.watch import RunWatch
from resilience.detect.samples import World
from tiny import run_config

TICK_S = 0.5


@pytest.fixture
def watch() -> RunWatch:
    return RunWatch(ResilienceConfig(heartbeat_timeout_s=3.0, hang_s=5.0))


class Nodes:
    """Agents that report to a watch, each with some ranks of a world."""

    def __init__(self, watch: RunWatch, world: World, ranks: dict[str, list[int]], generation: int = 1):
        self.watch, self.world, self.ranks, self.generation = watch, world, ranks, generation
        self.reporters = {name: NodeReporter(lambda pid: "S") for name in ranks}

    def report(self, *names: str) -> None:
        for name in names or self.ranks:
            report = self.reporters[name].report(
                [self.world.ranks[rank] for rank in self.ranks[name]], self.watch.wants_all
            )
            self.watch.shown(self.generation, self.world.size, name, report)

    def tick(self, *names: str, plan: str = "") -> list[Finding]:
        """Time passes, these nodes report, and the detectors look."""
        self.world.sample()
        self.report(*names)
        return self.watch.findings(self.world.at_s, plan)


def test_a_process_that_hangs_on_one_of_two_nodes_is_found(watch):
    nodes = Nodes(watch, World(4, tick_s=TICK_S), {"a": [0, 1], "b": [2, 3]})
    found = []
    for tick in range(20):
        nodes.world.stopped = {3} if tick >= 8 else set()
        found += nodes.tick()
    assert [(finding.kind, finding.ranks) for finding in found] == [("frozen", (3,))]


def test_a_rank_that_others_wait_for_is_found_though_nodes_tell_little_until_they_are_asked(watch):
    nodes = Nodes(watch, World(4, tick_s=TICK_S), {"a": [0, 1], "b": [2, 3]})
    for _ in range(30):
        nodes.world.step()
        assert not nodes.tick() and not watch.wants_all
    nodes.world.count([0, 1, 2])
    found = [finding for _ in range(20) for finding in nodes.tick()]
    assert [(finding.kind, finding.ranks) for finding in found] == [("hang", (3,))]
    assert "default_pg#0" in found[0].why and watch.wants_all
    nodes.world.step()
    nodes.tick()
    assert not watch.wants_all


@pytest.mark.parametrize("rebalances", [True, False])
def test_stages_are_watched_where_layers_may_be_dealt_anew(rebalances):
    keys = {"rebalance": rebalances, "straggler_s": 1.0}
    run = run_config(Path("no data"), model={"layers": 8, "vocab_size": 40}, resilience=keys)
    nodes = Nodes(RunWatch(run.resilience, run=run), World(2, tick_s=TICK_S), {"a": [0], "b": [1]})
    kinds = set()
    for _ in range(40):
        nodes.world.step(busy_s={0: 0.4, 1: 1.2}, microbatches={0: 4, 1: 4})
        kinds |= {finding.kind for finding in nodes.tick(plan="pp=2,layers=4:4")}
    assert kinds == ({"uneven_stages", "straggler"} if rebalances else {"straggler"})


def test_what_a_node_says_of_ranks_that_it_does_not_have_is_nothing(watch):
    """Not even if it looks like a world that hangs."""
    seen = WorkerSeen(7, 3, "forward", {}, "S", has_made_a_step=True)
    for tick in range(30):
        workers = [(0, 7)] if tick == 0 else None
        watch.shown(1, 1, "a", NodeReport(1, workers, step=3, still=[0], seen={5: seen}))
        assert not watch.findings(tick * TICK_S)


def test_a_node_that_is_cut_off_does_not_make_its_ranks_look_hung(watch):
    """Nothing is heard of one of two nodes: whether it comes back is for the coordinator to wait for."""
    nodes = Nodes(watch, World(2, tick_s=TICK_S), {"a": [0], "b": [1]})
    for tick in range(40):
        assert not nodes.tick(*(["a"] if 8 <= tick < 32 else ["a", "b"]))


def test_a_spare_node_that_is_gone_does_not_stop_detection(watch):
    nodes = Nodes(watch, World(1, tick_s=TICK_S), {"a": [0], "spare": []})
    found = []
    nodes.report("spare")
    for tick in range(20):
        nodes.world.stopped = {0} if tick > 8 else set()
        found += nodes.tick("a")
    assert [finding.kind for finding in found] == ["frozen"]


def test_ranks_of_an_older_generation_and_incomplete_worlds_are_not_judged(watch):
    nodes = Nodes(watch, World(2, tick_s=TICK_S), {"a": [0, 1]}, generation=2)
    nodes.world.stopped = {0, 1}
    nodes.world.change(1, generation=2)
    for _ in range(20):
        assert not nodes.tick()


def test_steps_that_are_made_again_are_not_compared_with_their_old_times(tmp_path):
    metrics, world = tmp_path / "metrics.jsonl", World(2)
    watch = RunWatch(ResilienceConfig(), metrics)

    def write(*steps: int) -> None:
        with metrics.open("a") as file:
            file.writelines(f'{{"step": {step}, "loss": 1.0, "step_time_s": 0.5}}\n' for step in steps)

    def known(nodes: Nodes) -> set[int]:
        for _ in range(4):
            nodes.tick()
        return set(watch._took_s)

    write(0, 1, 2)
    nodes = Nodes(watch, world, {"a": [0, 1]})
    assert known(nodes) == {0, 1, 2}
    forget_from(metrics, 1)  # the run went back
    assert known(nodes) == set()
    write(1, 2)
    assert known(nodes) == {1, 2}
    world.change(range(2), generation=2)
    assert known(Nodes(watch, world, {"a": [0, 1]}, generation=2)) == set()


def test_a_worker_that_has_ended_is_not_found_to_hang(watch):
    nodes = Nodes(watch, World(2, tick_s=TICK_S), {"a": [0, 1]})
    for tick in range(40):
        nodes.ranks["a"] = [0, 1] if tick < 10 else [0]
        assert not nodes.tick()


def test_ranks_all_wait_once_each_node_says_so(watch):
    nodes = Nodes(watch, World(3), {"a": [0, 1], "b": [2]})
    nodes.world.change([0, 1], phase="waiting")
    nodes.report()
    assert not watch.do_all_wait(3)
    nodes.world.change(2, phase="waiting")
    nodes.report()
    assert watch.do_all_wait(3) and not watch.do_all_wait(4)


def test_a_larger_run_that_reports_less_often_is_watched_as_closely(watch):
    """Time between two reports that is usual is no time in which nobody looked."""
    nodes = Nodes(watch, World(2, tick_s=2.0), {"a": [0], "b": [1]})
    for _ in range(5):
        nodes.world.step()
        nodes.tick()
    nodes.world.stopped, began = {1}, nodes.world.at_s
    while not (found := (nodes.world.sample(), nodes.report(), watch.findings(nodes.world.at_s, every_s=2.0))[2]):
        assert nodes.world.at_s - began < 10
    assert [finding.kind for finding in found] == ["frozen"]

"""When a run migrates because of measured speed, what it waits for first, and what it does not try again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from argosy.config.schema import ResilienceConfig
from argosy.observe.events import read_lines
from argosy.processes.child import ChannelClosed, Message
from argosy.resilience.detect.finding import Finding
from argosy.resilience.replanner import MigrationAnswer, MigrationQuestion
from argosy.supervise import migration
from argosy.supervise.membership import Membership, Settings
from argosy.supervise.migration import APART_S, MIGRATION_S, Migrator
from argosy.supervise.nodes import Break, Cause, Join, Start

PAYS = MigrationAnswer(True, "dp_replicate=2", 2, 2, 0.6, 0.3, steps_left=1000)
SLOW = Finding("straggler", "avoid", "rank 2 is slow", (2,), {"factor": 6.0, "last_step": 40})
LINK = Finding("slow_link", "alarm", "links are slow", (), {"factor": 3.0, "last_step": 40})


STAGES = Finding(
    "uneven_stages", "alarm", "rank 2 is slow", (),
    {"factor": 2.0, "stage_s": [0.1, 0.2], "microbatches": 4, "last_step": 40},
)  # fmt: skip


class Watch:
    """What is seen of the ranks, as the test says."""

    def __init__(self) -> None:
        self.generation, self.step_s, self.has_made_a_step, self.stand, self.step = 1, 1.0, False, False, 40

    def do_all_wait(self, size: int) -> bool:
        return self.stand


class Planner:
    """In place of the process that asks the planner."""

    answer, fails, asked = PAYS, False, list[MigrationQuestion]()

    def __init__(self, module: str, run_dir: str):
        self.channel = self

    def send(self, kind: str, question: dict[str, Any]) -> None:
        self.asked.append(MigrationQuestion(**question))

    def hear(self, timeout_s: float) -> list[Message]:
        if self.fails:
            raise ChannelClosed
        return [{"kind": "answer", "answer": asdict(self.answer)}]

    def reap(self) -> str:
        return "exit code 1"

    def kill(self) -> None:
        pass


class Run:
    """Three nodes, `slots` workers each, the clock of the test, and what the coordinator does."""

    def __init__(self, folder: Path, slots: int = 1, spare: bool = False, plan: str = "", **options: Any):
        self.folder, self.watch, self.now_s = folder, Watch(), 1000.0
        self.held: list[tuple[int, bool]] = []
        """Generations that were told to hold, and whether to save on disk before."""
        size = 3 * slots
        self.of = Membership(Settings(size, plan or f"dp_replicate={size}"))
        for name in "abcd" if spare else "abc":
            self.of.arrived(name, f"host-{name}", slots, {})
        self.migrator = Migrator(
            folder,
            self.of,
            self.watch,
            lambda *order: self.held.append(order),
            ResilienceConfig(**options),
        )
        self.orders()

    def orders(self) -> list[Any]:
        """Agents do at once what they are told."""
        said: list[Any] = []
        while orders := self.of.orders(self.now_s):
            said += orders
            for order in orders:
                if isinstance(order, Start):
                    self.of.ready(order.node, order.slot, 0)
                if isinstance(order, Join):
                    self.migrator.joined(self.now_s)
                if isinstance(order, Break):
                    for name, node in self.of.nodes.items():
                        for slot in node.workers:
                            self.of.ready(name, slot, order.generation)
        return said

    def look(self, seconds: float = 0.25) -> None:
        self.now_s += seconds
        self.migrator.look(self.now_s)

    def migrate(self) -> list[Any]:
        """Ask, hear, hold, and go."""
        for _ in range(3):
            self.look()
        self.watch.stand = True
        self.look()
        said = self.orders()
        self.watch.stand, self.watch.generation, self.watch.has_made_a_step = False, self.of.generation, False
        return said

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(self.folder / "events" / "coordinator.jsonl") if e["event"] in kinds]


@pytest.fixture(autouse=True)
def planner(monkeypatch: pytest.MonkeyPatch) -> type[Planner]:
    monkeypatch.setattr(migration, "Child", Planner)
    monkeypatch.setattr(Planner, "asked", [])
    return Planner


def test_a_slow_node_is_left_out_once_all_ranks_hold(tmp_path, planner):
    run = Run(tmp_path)
    run.migrator.slow_node("c", SLOW)
    run.look()
    assert planner.asked == [MigrationQuestion("slow_node", "dp_replicate=3", 6.0, (2,), 40, 1.0, MIGRATION_S)]
    run.look()
    assert run.held == [(1, False)]
    run.look()
    assert run.orders() == [], "not before they stand"
    run.watch.stand = True
    run.look()
    joins = [order for order in run.orders() if isinstance(order, Join)]
    assert joins == [Join(2, "dp_replicate=2", {("a", 0): 0, ("b", 0): 1})]
    (migrated,) = run.events("migrated")
    assert (
        migrated["left_out"] == ["c"] and migrated["evidence"]["factor"] == 6.0 and migrated["because"] == "slow_node"
    )
    assert (migrated["predicted_now_s"], migrated["predicted_new_s"], migrated["step_s"]) == (0.6, 0.3, 1.0)


@pytest.mark.parametrize(("plan", "size", "every", "on_disk"), [
    ("dp_shard=3,zero=1", 2, "auto", False), ("dp_shard=3,zero=1", 1, "auto", True),
    ("dp_replicate=3", 1, "auto", False), ("dp_replicate=3,sync=int8", 1, "auto", True), ("pp=3", 1, "auto", True),
    ("dp_shard=3,zero=1", 2, 0, True), ("dp_replicate=3", 2, 0, False),
])  # fmt: skip
def test_the_state_is_saved_on_disk_if_nodes_leave_that_alone_have_parts_of_it(
    tmp_path, monkeypatch, plan, size, every, on_disk
):
    monkeypatch.setattr(Planner, "answer", MigrationAnswer(True, f"dp_shard={size},zero=1", size, 2, 0.6, 0.3, 1000))
    run = Run(tmp_path, plan=plan, memory_checkpoint_every_steps=every)
    run.migrator.slow_node("c", SLOW)
    run.migrate()
    assert run.held == [(1, on_disk)]


def test_a_spare_takes_its_place_and_the_planner_is_not_asked(tmp_path, planner):
    run = Run(tmp_path, spare=True)
    run.migrator.slow_node("c", SLOW)
    (join,) = [order for order in run.migrate() if isinstance(order, Join)]
    assert join.plan == "dp_replicate=3" and set(join.places) == {("a", 0), ("b", 0), ("d", 0)}
    assert not planner.asked


def test_there_is_no_migration_that_does_not_pay_or_is_off(tmp_path, planner, monkeypatch):
    monkeypatch.setattr(Planner, "answer", MigrationAnswer(False, "dp_replicate=2", 2, 2, 0.6, 0.55, 1000))
    run = Run(tmp_path)
    run.migrator.slow_node("c", SLOW)
    assert not run.migrate() and not run.held
    assert run.events("stayed")[0]["predicted_new_s"] == 0.55
    off = Run(tmp_path, migrate=False)
    off.migrator.slow_node("c", SLOW)
    assert not off.migrate() and len(planner.asked) == 1


def test_a_planner_that_cannot_be_started_is_none_either(tmp_path, monkeypatch):
    def refused(module: str, run_dir: str) -> Planner:
        raise BlockingIOError("no more processes")

    run = Run(tmp_path)
    monkeypatch.setattr(migration, "Child", refused)
    run.migrator.slow_node("c", SLOW)
    run.look()
    assert [e["why"] for e in run.events("stayed")] == ["the planner cannot be started: no more processes"]


def test_a_planner_that_fails_is_no_reason_to_migrate(tmp_path, monkeypatch):
    monkeypatch.setattr(Planner, "fails", True)
    run = Run(tmp_path)
    run.migrator.slow_node("c", SLOW)
    assert not run.migrate() and run.events("stayed")[0]["why"] == "the planner failed: exit code 1"


def test_a_generation_that_ends_meanwhile_ends_the_case(tmp_path):
    run = Run(tmp_path)
    run.migrator.slow_node("c", SLOW)
    run.look()
    run.of.ready("a", 0, 1, "a connection broke")
    run.orders()
    assert not run.migrate() and not run.events("migrated")


def test_ranks_that_do_not_hold_are_not_waited_for_for_ever(tmp_path):
    run = Run(tmp_path)
    run.migrator.slow_node("c", SLOW)
    for _ in range(3):
        run.look()
    run.look(seconds=migration.HOLD_WITHIN_S)
    run.watch.step += 2
    assert not run.migrate() and "not all ranks held" in run.events("stayed")[0]["why"]


def test_ranks_that_wait_for_another_site_are_waited_for(tmp_path):
    run = Run(tmp_path)
    run.migrator.slow_node("c", SLOW)
    for _ in range(3):
        run.look()
    run.look(seconds=migration.HOLD_WITHIN_S)
    run.watch.step += 1  # the others' round is there
    assert run.migrate() and run.events("migrated") and not run.events("stayed")


def test_migrations_are_apart_and_their_cost_is_measured(tmp_path, planner, monkeypatch):
    run = Run(tmp_path)
    run.migrator.slow_node("c", SLOW)
    run.migrate()
    run.watch.has_made_a_step = True
    run.look(seconds=7.0)
    monkeypatch.setattr(Planner, "answer", MigrationAnswer(True, "", 1, 1, 0.6, 0.3, 1000))
    run.migrator.slow_node("b", SLOW)
    run.look(seconds=1.0)
    assert len(planner.asked) == 1
    run.look(seconds=APART_S)
    assert len(planner.asked) == 2 and planner.asked[1].migration_s == pytest.approx(7.0)


@pytest.mark.parametrize(("after_s", "again"), [(0.99, False), (0.5, True)])
def test_a_migration_that_did_not_gain_is_not_tried_again(tmp_path, planner, after_s, again):
    run = Run(tmp_path)
    run.migrator.slow_node("c", SLOW)
    run.migrate()
    run.watch.step_s = after_s
    run.look()
    assert [e["gained"] for e in run.events("migration_measured")] == [again]
    run.of.left("c", "gone")
    run.of.arrived("c", "host-c", 1, {})
    run.orders()
    run.watch.generation = run.of.generation
    assert run.of.size == 3
    run.migrator.slow_node("c", SLOW)
    run.look(seconds=2 * APART_S)
    assert len(planner.asked) == 1 + again


def test_the_planner_is_asked_once_it_is_known_how_long_a_step_takes(tmp_path, planner, monkeypatch):
    run = Run(tmp_path)
    monkeypatch.setattr(Planner, "answer", MigrationAnswer(True, "pp=3,layers=3:3:2", 3, 3, 1.0, 0.8, 1000))
    run.watch.step_s = None
    run.migrator.uneven_stages(STAGES)
    for _ in range(4):
        run.look()
    assert planner.asked == []
    run.watch.step_s = 1.0
    run.migrate()
    assert [question.step_s for question in planner.asked] == [1.0]
    run.watch.step_s = 0.8
    run.look()
    assert [(e["before_s"], e["gained"]) for e in run.events("migration_measured")] == [(1.0, True)]


def test_a_slow_link_is_priced_for_all_nodes_and_for_one(tmp_path, planner, monkeypatch):
    run = Run(tmp_path, slots=2)
    monkeypatch.setattr(Planner, "answer", MigrationAnswer(True, "dp_replicate=2", 2, 2, 0.6, 0.3, 1000))
    run.migrator.slow_link(LINK)
    (join,) = [order for order in run.migrate() if isinstance(order, Join)]
    assert planner.asked[0].on == (6, 2) and planner.asked[0].kind == "slow_link"
    assert join.places == {("a", 0): 0, ("a", 1): 1}


def test_layers_are_dealt_anew_and_all_nodes_stay_though_nothing_migrates_for_slowness(tmp_path, planner, monkeypatch):
    run = Run(tmp_path, migrate=False)
    answer = MigrationAnswer(True, "pp=3,layers=3:3:2", 3, 3, 1.0, 0.8, 1000)
    monkeypatch.setattr(Planner, "answer", answer)
    run.migrator.uneven_stages(STAGES)
    (join,) = [order for order in run.migrate() if isinstance(order, Join)]
    (asked,) = planner.asked
    assert (asked.kind, asked.stage_s, asked.microbatches, asked.times) == ("uneven_stages", (0.1, 0.2), 4, 2.0)
    assert join.plan == answer.plan and set(join.places) == {("a", 0), ("b", 0), ("c", 0)}
    (migrated,) = run.events("migrated")
    assert migrated["because"] == "uneven_stages" and migrated["left_out"] == []
    assert run.of.handover().is_instead, "a coordinator that takes over keeps it"


def test_a_node_is_left_out_for_how_long_it_is_waited_for_not_for_its_speed(tmp_path, planner):
    run = Run(tmp_path)
    slow = Finding("straggler", "avoid", "rank 2 is slow", (2,), {"factor": 3.0, "step_factor": 1.2, "last_step": 40})
    run.migrator.slow_node("c", slow)
    run.look()
    assert planner.asked[0].times == 1.2


def test_a_slow_link_of_a_world_that_rank_0_has_just_left_is_nobodys_affair(tmp_path, planner):
    run = Run(tmp_path)
    run.of.lost("a", 0, Cause("signal SIGKILL", exit_code=-9))
    run.migrator.slow_link(LINK)
    run.look()
    assert not planner.asked


def test_around_a_slow_link_all_nodes_may_go_on_under_another_plan(tmp_path, monkeypatch):
    run = Run(tmp_path, slots=2)
    monkeypatch.setattr(Planner, "answer", MigrationAnswer(True, "pp=6", 6, 6, 0.6, 0.3, 1000))
    run.migrator.slow_link(LINK)
    (join,) = [order for order in run.migrate() if isinstance(order, Join)]
    assert join.plan == "pp=6" and len(join.places) == 6 and run.events("migrated")[0]["left_out"] == []

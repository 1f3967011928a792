"""The coordinator decides which processes train when processes and nodes come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from argosy.errors import FINAL_BIT
from argosy.supervise.membership import STOP_WAIT_S, Membership, Replan, Settings
from argosy.supervise.nodes import Break, Cause, CheckNode, FinishRun, Join, Order, RankState, Start

KILLED = Cause("signal SIGKILL", exit_code=-9)


class Run:
    """A membership, and agents that do at once what they are told."""

    def __init__(self, nodes: dict[str, int], size: int = 0, **settings: object):
        replan: Callable[[int], tuple[str, int] | None] = settings.pop("replan", None)  # type: ignore[assignment]
        size = size or sum(nodes.values())
        self.settings = Settings(size, f"dp_replicate={size}", **settings)  # type: ignore[arg-type]
        self.of = Membership(self.settings, replan=replan)
        self.now = 0.0
        self.said: list[Order] = []
        self.is_checked_at_once = True
        for name, slots in nodes.items():
            self.of.arrived(name, f"host-{name}", slots, {})

    def go(self) -> Run:
        """Until nothing is left to do: what is started becomes ready, whose world breaks leaves it."""
        while orders := self.of.orders(self.now):
            for order in orders:
                self.said.append(order)
                if isinstance(order, Start):
                    self.of.started(order.node, order.slot, pid=len(self.said))
                    self.of.ready(order.node, order.slot, generation=0)
                if isinstance(order, CheckNode) and self.is_checked_at_once:
                    self.of.node_checked(order.node)
                if isinstance(order, Break):
                    for name, node in self.of.nodes.items():
                        for slot, worker in node.workers.items():
                            if worker.generation == order.generation and worker.state is RankState.RUNNING:
                                self.of.ready(name, slot, order.generation, "the world broke")
        return self

    def take(self, kind: type[Order]) -> list[Order]:
        """The orders of one kind since the last time."""
        self.said, mine = [], [order for order in self.said if isinstance(order, kind)]
        return mine


def test_a_world_is_formed_once_all_are_ready():
    run = Run({"a": 2, "b": 2}).go()
    starts = [order for order in run.said if isinstance(order, Start)]
    assert {(s.node, s.slot) for s in starts} == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}
    (join,) = run.take(Join)
    assert join == Join(1, "dp_replicate=4", {("a", 0): 0, ("a", 1): 1, ("b", 0): 2, ("b", 1): 3})


def test_a_worker_may_be_ready_before_its_start_is_reported():
    of = Membership(Settings(1, ""))
    of.arrived("a", "host-a", 1, {})
    assert of.orders(0.0) == [Start("a", 0)]
    of.ready("a", 0, generation=0)
    of.started("a", 0, pid=7)
    assert of.orders(0.0) == [Join(1, "", {("a", 0): 0})]


def test_survivors_keep_their_ranks_and_a_new_process_takes_the_place_of_the_lost():
    run = Run({"a": 2, "b": 2}).go()
    run.take(Join)
    run.of.lost("a", 1, KILLED)
    run.go()
    assert [o for o in run.said if isinstance(o, Break)] == [Break(1, "rank 1 is lost: signal SIGKILL")]
    assert [o for o in run.said if isinstance(o, Start)] == [Start("a", 1)]
    (join,) = run.take(Join)
    assert join.generation == 2 and join.places == {("a", 0): 0, ("a", 1): 1, ("b", 0): 2, ("b", 1): 3}


def test_messages_about_a_generation_that_is_over_are_ignored():
    run = Run({"a": 2}).go()
    run.of.lost("a", 1, KILLED)
    run.go()
    run.take(Join)
    run.of.ready("a", 0, generation=1, why="late")
    assert run.of.in_force and run.of.generation == 2
    run.of.done("a", 1)
    assert not [order for order in run.of.orders(0.0) if isinstance(order, FinishRun)], "rank 0 is still at work"


def test_no_world_is_formed_before_all_have_left_the_broken_one():
    run = Run({"a": 2}).go()
    run.take(Join)
    run.of.lost("a", 1, KILLED)
    orders = run.of.orders(0.0)
    assert orders == [Break(1, "rank 1 is lost: signal SIGKILL"), Start("a", 1)]
    run.of.started("a", 1, pid=7)
    run.of.ready("a", 1, generation=0)
    assert run.of.orders(0.0) == []
    run.of.ready("a", 0, generation=1, why="Connection closed by peer")
    (join,) = run.of.orders(0.0)
    assert isinstance(join, Join) and join.generation == 2


def test_a_broken_connection_makes_a_new_generation_of_the_same_members():
    run = Run({"a": 2}).go()
    run.take(Join)
    run.of.ready("a", 0, generation=1, why="Connection reset by peer")
    run.go()
    assert [o for o in run.said if isinstance(o, Start)] == []
    (join,) = run.take(Join)
    assert join.places == {("a", 0): 0, ("a", 1): 1}


def test_all_done_is_the_end():
    run = Run({"a": 2}).go()
    run.of.done("a", 0)
    assert run.of.orders(0.0) == []
    run.of.done("a", 1)
    assert run.of.orders(0.0) == [FinishRun(0, "done")]


def test_one_that_is_done_is_started_again_if_another_dies_before_its_end():
    run = Run({"a": 2}).go()
    run.of.done("a", 0)
    run.of.lost("a", 1, KILLED)
    run.take(Join)
    run.go()
    assert {(o.node, o.slot) for o in run.said if isinstance(o, Start)} == {("a", 0), ("a", 1)}
    assert run.take(Join)


def test_an_error_that_a_restart_would_only_meet_again_ends_the_run():
    run = Run({"a": 2}).go()
    run.of.lost("a", 1, Cause("the loss is NaN", "RunFailed", FINAL_BIT + 1))
    assert FinishRun(1, "the loss is NaN", "RunFailed") in run.of.orders(0.0)
    run.of.lost("a", 0, KILLED)
    assert not any(isinstance(order, Start | Join | FinishRun) for order in run.of.orders(0.0))


def test_lost_workers_are_replaced_as_long_as_steps_are_made():
    run = Run({"a": 1}, max_restarts=2).go()
    for step in range(10):
        run.of.made_step(step)
        run.of.lost("a", 0, KILLED)
        run.go()
    assert not run.take(FinishRun)
    run.of.lost("a", 0, KILLED)
    run.go()
    run.of.lost("a", 0, KILLED)
    run.go()
    (finish,) = run.take(FinishRun)
    assert finish.exit_code == 75 and "launch.max_restarts = 2" in finish.why


def test_workers_that_die_together_are_one_failure():
    run = Run({"a": 8}, max_restarts=2).go()
    for many in (8, 5):
        for slot in range(many):
            run.of.lost("a", slot, KILLED)
        run.go()
    assert not run.take(FinishRun)
    run.of.lost("a", 3, KILLED)
    run.go()
    (finish,) = run.take(FinishRun)
    assert finish.exit_code == 75 and "died 3 times" in finish.why


def test_a_worker_that_dies_again_before_it_has_a_world_is_a_failure_each_time():
    run = Run({"a": 2}, max_restarts=2).go()
    run.of.lost("a", 0, KILLED)
    for order in run.of.orders(0.0):
        if isinstance(order, Start):
            run.of.started("a", 0, pid=1)
    for pid in (2, 3):
        run.of.lost("a", 0, KILLED)
        for order in run.of.orders(0.0):
            run.said.append(order)
            if isinstance(order, Start):
                run.of.started("a", 0, pid=pid)
    assert run.take(FinishRun)


def ended_by(reached: list[tuple[int, int]]) -> bool:
    """Return True if a run that was in step 100 gives up; reached: (step, safe step) between its losses."""
    run = Run({"a": 1}, max_restarts=2).go()
    run.of.made_step(99, 80)
    run.of.made_step(100, 80)
    for step, safe in reached:
        run.of.lost("a", 0, KILLED)
        run.go()
        for each in range(max(0, safe), step + 1):
            run.of.made_step(each, safe)
    return bool(run.take(FinishRun))


def test_the_last_step_of_a_dead_worker_counts_as_progress():
    run = Run({"a": 2}, max_restarts=2).go()
    for step in (3, 5, 7, 9, 11):
        run.of.lost("a", 1, Cause("signal SIGKILL", exit_code=-9, step=step))
        run.go()
    assert not run.take(FinishRun)
    for _ in range(2):
        run.of.lost("a", 1, Cause("signal SIGKILL", exit_code=-9, step=11))
        run.go()
    assert run.take(FinishRun)


def test_steps_that_are_made_again_are_no_progress():
    assert ended_by([(90, 80)] * 3)
    assert ended_by([(100, 80)] * 3)


def test_a_newer_safe_step_is_progress_and_so_is_a_further_step():
    assert not ended_by([(90, 80), (90, 82), (90, 84), (90, 86), (90, 88)])
    assert not ended_by([(100, 80), (101, 80), (101, 80), (102, 80), (102, 80)])
    assert ended_by([(90, 84), (90, 82), (90, 84), (90, 83)]), "back to where it was before is none"


def test_the_same_crash_at_the_same_step_again_ends_the_run():
    run = Run({"a": 2}).go()
    crash = Cause("exit code 1, ZeroDivisionError", "ZeroDivisionError", 1, step=7)
    for _ in range(2):
        run.of.made_step(7)
        run.of.lost("a", 1, crash)
        run.go()
    (finish,) = run.take(FinishRun)
    assert finish.exit_code == 70 and "step 7" in finish.why and "ZeroDivisionError" in finish.why


@pytest.mark.parametrize("cause", [KILLED, Cause("exit code 1, another error", "ValueError", 1, step=7)])
def test_other_crashes_at_that_step_do_not(cause):
    run = Run({"a": 2}, max_restarts=5).go()
    for one in (Cause("exit code 1, ZeroDivisionError", "ZeroDivisionError", 1, step=7), cause):
        run.of.lost("a", 1, one)
        run.go()
    assert not run.take(FinishRun)


def test_the_same_crash_on_two_ranks_of_one_world_is_one():
    run = Run({"a": 2}, max_restarts=5).go()
    for slot in range(2):
        run.of.lost("a", slot, Cause("exit code 1, ZeroDivisionError", "ZeroDivisionError", 1, step=7))
    run.go()
    assert not run.take(FinishRun)


def test_a_lost_node_is_waited_for_and_then_replanned_without():
    run = Run({"a": 2, "b": 2}, wait_for_nodes_s=30, replan=lambda n: (f"dp_replicate={n}", n)).go()
    run.take(Join)
    run.of.left("b", "its connection closed")
    run.go()
    assert [o for o in run.said if isinstance(o, Break)] and not run.take(Join)
    run.now = 29
    assert not run.go().take(Join)
    run.now = 31
    (join,) = run.go().take(Join)
    assert join == Join(2, "dp_replicate=2", {("a", 0): 0, ("a", 1): 1})


def test_the_planner_is_asked_once_while_workers_of_a_smaller_world_are_waited_for():
    asked: list[int] = []
    run = Run({"a": 2, "b": 2}, wait_for_nodes_s=0, replan=lambda n: asked.append(n) or (f"dp_replicate={n}", n)).go()
    run.of.left("b", "gone")
    run.of.lost("a", 1, KILLED)
    run.of.ready("a", 0, generation=1, why="the world broke")
    for run.now in (1, 2, 3):
        run.of.orders(run.now)
    assert asked == [2]
    run.of.ready("a", 1, generation=0)
    assert any(isinstance(order, Join) for order in run.of.orders(4))


def test_a_node_that_comes_back_in_time_changes_no_plan():
    run = Run({"a": 2, "b": 2}, wait_for_nodes_s=30, replan=lambda n: (f"dp_replicate={n}", n)).go()
    run.take(Join)
    run.of.left("b", "its connection closed")
    run.go()
    run.now = 20
    run.of.arrived("b", "host-b", 2, {})
    (join,) = run.go().take(Join)
    assert join.plan == "dp_replicate=4" and join.places[("a", 1)] == 1


def test_a_run_begins_with_all_its_nodes_or_names_those_that_came():
    run = Run({"a": 2}, size=4, wait_for_nodes_s=1, first_wait_s=100, replan=lambda n: (f"dp_replicate={n}", n)).go()
    run.now = 99
    assert not run.go().take(Join)
    run.now = 101
    (finish,) = run.go().take(FinishRun)
    assert finish.exit_code == 75 and "2 of 4 workers came within 100 s, from a (2 workers)" in finish.why


def test_a_run_that_had_to_shrink_grows_again():
    run = Run({"a": 2, "b": 2}, wait_for_nodes_s=0, replan=lambda n: (f"dp_replicate={n}", n)).go()
    run.of.left("b", "gone")
    run.go()
    assert run.of.size == 2
    run.take(Join)
    run.of.arrived("b", "host-b", 2, {})
    (join,) = run.go().take(Join)
    assert join.plan == "dp_replicate=4" and len(join.places) == 4 and join.places[("a", 0)] == 0


def shrunk(replan: Callable[[int], tuple[str, int] | None]) -> Run:
    """A run on four nodes of which one is left."""
    run = Run({"a": 1, "b": 1, "c": 1, "d": 1}, wait_for_nodes_s=30, replan=replan).go()
    for name in "bcd":
        run.of.left(name, "gone")
    run.go()
    run.now = 31
    run.go()
    assert run.of.size == 1 and run.of.in_force
    run.take(Join)
    return run


def test_a_run_that_had_to_shrink_grows_with_those_that_come_when_no_more_do():
    run = shrunk(lambda n: (f"dp_replicate={n}", n))
    for name, at in (("b", 100), ("c", 120)):
        run.of.arrived(name, f"host-{name}", 1, {})
        run.now = at
        run.go()
    run.now = 149
    assert not run.go().take(Join), "more may come"
    run.now = 150
    (join,) = run.go().take(Join)
    assert join.plan == "dp_replicate=3" and join.places["a", 0] == 0
    run.of.lost("c", 0, KILLED)
    (join,) = run.go().take(Join)
    assert join.plan == "dp_replicate=3", "nobody is waited for"
    run.of.arrived("d", "host-d", 1, {})
    (join,) = run.go().take(Join)
    assert join.plan == "dp_replicate=4"


def test_nodes_that_no_plan_makes_use_of_wait():
    run = shrunk(lambda n: ("dp_replicate=1", 1))
    run.of.arrived("b", "host-b", 1, {})
    for run.now in (100, 131, 200):
        assert not run.go().take(Join)
    assert run.of.in_force and not [order for order in run.said if isinstance(order, Break) and order.generation == 2]


def test_a_spare_node_takes_the_place_of_a_lost_one():
    run = Run({"a": 2, "b": 2, "spare": 2}, size=4, wait_for_nodes_s=1000).go()
    (join,) = run.take(Join)
    assert {name for name, _ in join.places} == {"a", "b"}
    run.of.left("b", "gone")
    (join,) = run.go().take(Join)
    assert join.places == {("a", 0): 0, ("a", 1): 1, ("spare", 0): 2, ("spare", 1): 3}


def migrated() -> Run:
    """A run on three nodes whose third is left out."""
    run = Run({"a": 2, "b": 2, "c": 2}, wait_for_nodes_s=30, replan=lambda n: (f"dp_replicate={n}", n)).go()
    run.take(Join)
    run.of.migrate("dp_replicate=4", 4, ["c"], "node c is slow")
    run.go()
    return run


def test_a_migration_leaves_the_slow_node_out_and_others_keep_their_ranks():
    run = migrated()
    assert [o for o in run.said if isinstance(o, Break)] == [Break(1, "node c is slow")]
    (join,) = run.take(Join)
    assert join == Join(2, "dp_replicate=4", {("a", 0): 0, ("a", 1): 1, ("b", 0): 2, ("b", 1): 3})
    run.of.lost("a", 1, KILLED)
    (join,) = run.go().take(Join)
    assert join.plan == "dp_replicate=4" and {name for name, _ in join.places} == {"a", "b"}, "also after a loss"


def test_a_spare_takes_the_place_of_the_slow_node_once_it_is_ready():
    run = Run({"a": 1, "b": 1, "spare": 1}, size=2).go()
    run.take(Join)
    run.of.lost("spare", 0, KILLED)
    run.of.migrate("dp_replicate=2", 2, ["b"], "node b is slow")
    assert run.of.orders(0.0) == [Break(1, "node b is slow"), CheckNode("b"), Start("spare", 0)]
    run.of.ready("a", 0, generation=1)
    run.of.ready("b", 0, generation=1)
    assert run.of.orders(0.0) == [], "node b is ready, and not wanted"
    run.of.ready("spare", 0, generation=0)
    (join,) = run.of.orders(0.0)
    assert isinstance(join, Join) and join.places == {("a", 0): 0, ("spare", 0): 1}


def test_a_node_that_is_left_out_comes_back_when_it_is_started_anew_and_not_when_its_connection_was_lost():
    run = migrated()
    run.take(Join)
    workers = run.of.nodes["c"].workers
    run.of.left("c", "its connection closed")
    run.of.arrived("c", "host-c", 2, workers)
    assert not run.go().take(Join) and run.of.in_force
    run.of.left("c", "its connection closed")
    run.of.arrived("c", "host-c", 2, {})
    (join,) = run.go().take(Join)
    assert join.plan == "dp_replicate=6" and len(join.places) == 6


def test_a_node_that_is_left_out_is_taken_if_another_is_lost_for_good():
    run = migrated()
    run.take(Join)
    run.of.left("b", "gone")
    run.go()
    run.now = 31
    (join,) = run.go().take(Join)
    assert join.plan == "dp_replicate=4" and {name for name, _ in join.places} == {"a", "c"}


def test_what_is_planned_is_no_failure():
    run = Run({"a": 1, "b": 1}, max_restarts=1).go()
    run.of.migrate("dp_replicate=1", 1, ["b"], "node b is slow")
    assert not run.go().take(FinishRun)
    run.of.arrived("b", "host-b", 1, {})
    assert not run.go().take(FinishRun) and run.of.size == 2


def come_back(run: Run, name: str, without: set[int] = frozenset(), **changes: object) -> None:
    """The agent of a node has called again: its connection was lost, or nobody answered."""
    node = run.of.nodes[name]
    workers = {slot: replace(worker, **changes) for slot, worker in node.workers.items() if slot not in without}
    run.of.arrived(name, node.host, node.slots, workers)


def test_a_node_that_comes_again_with_all_of_its_members_has_missed_nothing():
    run = Run({"a": 2, "b": 2}).go()
    run.take(Join)
    for name in ("a", "b", "b"):
        come_back(run, name)
    assert run.of.orders(0.0) == [] and run.of.in_force
    run.of.lost("b", 1, KILLED)
    assert run.of.orders(0.0)[0] == Break(1, "rank 3 is lost: signal SIGKILL"), "it is watched as before"


@pytest.mark.parametrize("changes", [{"without": {1}}, {"state": RankState.READY}, {"generation": 0}])
def test_a_node_that_comes_again_without_all_of_its_members_breaks_the_generation(changes):
    run = Run({"a": 2, "b": 2}).go()
    come_back(run, "b", **changes)
    assert Break(1, "node b came back without some of its members") in run.of.orders(0.0)


def test_members_whose_end_was_not_heard_of_end_the_run_when_their_node_comes_again():
    run = Run({"a": 1, "b": 1}).go()
    run.of.done("a", 0)
    come_back(run, "b", state=RankState.DONE)
    assert run.of.orders(0.0) == [FinishRun(0, "done")]


# ---- one coordinator after another --------------------------------------------------------------------------------


def come_again(run: Run, *names: str, replan: Replan | None = None) -> Membership:
    """The run's next coordinator, to which these nodes come with the workers that they have."""
    after = Membership(run.settings, run.of.handover(), replan)
    for name in names:
        node = run.of.nodes[name]
        after.arrived(name, node.host, node.slots, {slot: replace(worker) for slot, worker in node.workers.items()})
    return after


def test_the_next_coordinator_keeps_a_generation_whose_members_are_all_there():
    run = Run({"a": 1, "b": 1, "spare": 1}, size=2).go()
    after = come_again(run, "spare", "a")
    assert not after.in_force and after.orders(0.0) == []
    after = come_again(run, "spare", "a", "b")
    assert after.in_force and after.orders(0.0) == []
    after.lost("b", 0, KILLED)
    assert after.orders(0.0)[0] == Break(1, "rank 1 is lost: signal SIGKILL")


def test_a_node_that_comes_back_to_a_new_coordinator_without_its_workers_breaks_the_generation():
    after = come_again(Run({"a": 1, "b": 1}).go(), "a")
    after.arrived("b", "host-b", 1, {})
    orders = after.orders(0.0)
    assert Break(1, "node b has lost some of its members") in orders and Start("b", 0) in orders


def test_an_inherited_generation_is_over_when_one_of_its_members_dies_though_not_all_were_heard_of():
    after = come_again(Run({"a": 1, "b": 1}).go(), "a")
    after.lost("a", 0, KILLED)
    assert after.is_over(1)


def test_members_of_an_inherited_generation_are_not_waited_for_for_ever():
    after = come_again(Run({"a": 1, "b": 1}).go(), "a")
    assert after.orders(0.0) == [] == after.orders(60.0)
    assert after.orders(61.0) == [Break(1, "some of its members are lost")]


def test_the_next_coordinator_knows_of_a_migration():
    run = migrated()
    after = come_again(run, "a", "b", "c")
    assert after.in_force and (after.plan, after.size) == (run.of.plan, run.of.size)
    assert after.nodes["c"].is_avoided
    assert after.handover() == run.of.handover()


def test_a_run_that_had_to_shrink_and_lost_its_coordinator_grows_when_nodes_come():
    run = Run({"a": 1, "b": 1}, wait_for_nodes_s=10, replan=lambda _: ("dp_replicate=1", 1)).go()
    run.of.left("b", "it sent nothing")
    run.go()
    run.now = 11.0
    run.go()
    assert run.of.size == 1 and run.of.in_force
    after = come_again(run, "a")
    assert after.in_force and after.size == 1
    after.arrived("b", "host-b", 1, {})
    assert Break(2, "node b came") in after.orders(0.0)


def test_what_is_left_of_a_generation_that_broke_is_not_waited_for():
    run = Run({"a": 1, "b": 1}).go()
    run.of.lost("b", 0, KILLED)
    assert run.of.handover().members == {} and come_again(run).is_over(1)


def test_no_worker_is_started_for_a_run_that_was_asked_to_stop():
    run = Run({"a": 2}).go()
    run.of.stop("a")
    run.of.done("a", 0)
    run.of.done("a", 1)
    assert run.go().take(FinishRun) == [FinishRun(0, "done")]
    run = Run({"a": 2}).go()
    run.take(Start)
    run.of.stop("a")
    run.of.lost("a", 1, KILLED)
    assert not run.go().take(Start)


def test_a_world_takes_no_part_of_a_node_that_is_still_starting():
    """Else a run with a spare node may have ranks of one node on two, and more nodes than it needs, for good."""
    of = Membership(Settings(4, "dp_replicate=4"))
    for name in "abc":
        of.arrived(name, f"host-{name}", 2, {})
    of.orders(0.0)
    for name, slot in (("a", 0), ("b", 0), ("b", 1), ("c", 0)):
        of.ready(name, slot, generation=0)
    assert of.orders(0.0) == [], "four are ready, of which two have neighbours that are not"
    of.ready("c", 1, generation=0)
    (join,) = of.orders(0.0)
    assert isinstance(join, Join) and {name for name, _ in join.places} == {"b", "c"}


def test_survivors_do_not_wait_for_a_neighbour_that_starts_again_where_a_spare_is_ready():
    run = Run({"a": 2, "b": 2, "spare": 2}, size=4).go()
    run.take(Join)
    run.of.lost("a", 0, KILLED)
    for name, slot in (("a", 1), ("b", 0), ("b", 1)):
        run.of.ready(name, slot, 1, "the world broke")
    (join,) = [order for order in run.of.orders(0.0) if isinstance(order, Join)]
    assert join.places == {("a", 1): 1, ("b", 0): 2, ("b", 1): 3, ("spare", 0): 0}


@pytest.mark.parametrize("stops_first", [True, False])
def test_survivors_of_a_run_that_stops_form_one_last_world(stops_first):
    run = Run({"a": 2, "b": 2, "spare": 2}, size=4, replan=lambda room: (f"dp_replicate={room}", room)).go()
    run.take(Join)
    for happens in (lambda: run.of.stop("a"), lambda: run.of.left("b", "it is gone"))[:: 1 if stops_first else -1]:
        happens()
    assert run.go().take(Join) == [Join(2, "dp_replicate=2", {("a", 0): 0, ("a", 1): 1})]
    run.of.done("a", 0)
    run.of.done("a", 1)
    assert run.go().take(FinishRun) == [FinishRun(0, "done")]


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        ([("a", 0), ("a", 1)], "no process is left that has the state"),
        ([("a", 1)], "no plan fits the 1 that are left"),
    ],
)
def test_a_run_that_stops_says_if_nothing_could_be_saved(lost, why):
    run = Run({"a": 2}, replan=lambda room: None).go()
    run.of.stop("a")
    for place in lost:
        run.of.lost(*place, KILLED)
    (finish,) = run.go().take(FinishRun)
    assert finish.exit_code == 75 and finish.why.endswith(f"signal SIGKILL, and {why}")


def test_survivors_save_if_the_coordinator_was_lost_with_a_node():
    """The next coordinator waits for that node, but not for as long as it takes until the survivors are killed."""
    run = Run({"a": 1, "b": 1}, wait_for_nodes_s=300, replan=lambda room: (f"dp_replicate={room}", room)).go()
    after = come_again(run, "b", replan=lambda room: (f"dp_replicate={room}", room))
    assert after.stop("b") and after.orders(0.0) == []
    assert after.orders(STOP_WAIT_S + 1) == [Break(1, "some of its members are lost")]
    after.ready("b", 0, 1, "some of its members are lost")
    (join,) = after.orders(STOP_WAIT_S + 1)
    assert isinstance(join, Join) and join.places == {("b", 0): 0}


def test_a_world_that_stops_is_left_alone_if_all_of_it_comes_to_the_next_coordinator():
    run = Run({"a": 1, "b": 1}, wait_for_nodes_s=300).go()
    after = come_again(run, "a")
    after.stop("a")
    assert after.orders(0.0) == []
    after.arrived("b", "host-b", 1, {0: replace(run.of.nodes["b"].workers[0])})
    assert after.orders(STOP_WAIT_S + 1) == [] and after.in_force


def test_what_some_have_saved_need_not_be_saved_again():
    run = Run({"a": 2}).go()
    run.of.stop("a")
    run.of.done("a", 0)
    run.of.lost("a", 1, KILLED)
    assert run.go().take(FinishRun) == [FinishRun(0, "done")]


def test_a_spare_worker_that_ends_does_not_end_a_run_that_stops():
    run = Run({"a": 2, "spare": 1}, size=2).go()
    run.of.stop("a")
    run.of.lost("spare", 0, KILLED)
    assert not run.go().take(FinishRun)


def test_a_spare_node_that_is_asked_to_stop_goes_alone():
    run = Run({"a": 1, "b": 1, "spare": 1}, size=2).go()
    assert not run.of.stop("spare") and "spare" not in run.of.nodes
    run.take(Join)
    run.of.lost("b", 0, KILLED)
    (join,) = run.go().take(Join)
    assert join.places == {("a", 0): 0, ("b", 0): 1}, "a lost worker is replaced as before"
    assert run.of.stop("b")
    run.of.lost("b", 0, KILLED)
    assert not run.go().take(Start)


def test_a_node_that_is_asked_to_stop_before_the_first_world_may_come_again():
    run = Run({"a": 1}, size=2).go()
    assert not run.of.stop("a")
    for name in "ab":
        run.of.arrived(name, f"host-{name}", 1, {})
    (join,) = run.go().take(Join)
    assert join.places == {("a", 0): 0, ("b", 0): 1}


# ---- nodes that are checked --------------------------------------------------------------------------------------


def test_no_world_is_formed_of_a_node_before_it_is_checked():
    run = Run({"a": 1}, size=2)
    run.of.arrived("b", "host-b", 1, {}, is_being_checked=True)
    assert not run.go().take(Join), "its worker is there, but waits"
    run.of.node_checked("b")
    (join,) = run.go().take(Join)
    assert join.places == {("a", 0): 0, ("b", 0): 1}


def test_a_node_that_is_refused_is_replaced_by_a_spare():
    run = Run({"a": 1}, size=2)
    run.of.arrived("b", "host-b", 1, {}, is_being_checked=True)
    run.of.refuse("b", "it computes wrongly")
    run.of.arrived("c", "host-c", 1, {})
    (join,) = run.go().take(Join)
    assert join.places == {("a", 0): 0, ("c", 0): 1}


def test_a_suspected_node_is_checked_with_its_workers_alive_and_keeps_its_ranks():
    run = Run({"a": 1, "b": 1}).go()
    run.is_checked_at_once = False
    run.take(Join)
    run.of.check_node("b", "rank 1 is suspected")
    run.go()
    assert [o for o in run.said if isinstance(o, CheckNode)] == [CheckNode("b")]
    assert not [o for o in run.said if isinstance(o, Start | Join)]
    run.take(Join)
    run.of.node_checked("b")
    (join,) = run.go().take(Join)
    assert join.places == {("a", 0): 0, ("b", 0): 1}


def test_a_suspected_node_is_not_waited_for_where_a_spare_is_ready():
    run = Run({"a": 1, "b": 1, "c": 1}, size=2).go()
    run.is_checked_at_once = False
    run.take(Join)
    run.of.check_node("b", "rank 1 is suspected")
    (join,) = run.go().take(Join)
    assert set(join.places) == {("a", 0), ("c", 0)}
    run.of.node_checked("b")
    assert not run.go().take(Join), "it is a spare now"


def test_a_node_that_is_suspected_again_and_again_is_used_last():
    run = Run({"a": 1, "b": 1}, max_restarts=1).go()
    for _ in range(3):
        run.of.check_node("b", "rank 1 is suspected")
        run.go()
    assert len(run.take(Join)) == 4 and run.of.in_force, "no restart is counted for it"
    run.of.check_node("b", "rank 1 is suspected")
    assert not run.of.orders(0.0)
    run.of.arrived("c", "host-c", 1, {})
    run.go()
    run.of.lost("a", 0, KILLED)
    (join,) = run.go().take(Join)
    assert set(join.places) == {("a", 0), ("c", 0)}


def test_of_more_nodes_than_are_needed_the_one_that_is_last_is_left():
    run = Run({"a": 1, "b": 1, "c": 1}, size=2)
    run.of.put_last("a")
    (join,) = run.go().take(Join)
    assert set(join.places) == {("b", 0), ("c", 0)}
    run.of.left("b", "its agent died")
    (join,) = run.go().take(Join)
    assert set(join.places) == {("a", 0), ("c", 0)}


def test_a_node_that_is_left_out_because_it_is_slow_is_checked_meanwhile():
    run = Run({"a": 1, "b": 1, "c": 1}, size=2).go()
    run.is_checked_at_once = False
    run.take(Join)
    run.of.migrate("dp_replicate=2", 2, {"b"}, "node b is slow")
    run.go()
    assert [o for o in run.said if isinstance(o, CheckNode)] == [CheckNode("b")]
    (join,) = run.take(Join)
    assert set(join.places) == {("a", 0), ("c", 0)}, "nobody waits for what is found"
    run.of.refuse("b", "it computes wrongly")
    assert run.of.in_force


def test_no_node_is_checked_if_checks_are_off():
    run = Run({"a": 1, "b": 1}, checks_nodes=False).go()
    run.of.check_node("b", "rank 1 is suspected")
    assert not run.of.orders(0.0) and run.of.in_force

"""Collectives are measured in groups of each size, alone and at once, by all ranks alike."""

from __future__ import annotations

from argosy.parallel.world import World
from argosy.plan.hardware.measurements import CollectiveRate
from argosy.probe.collectives import OPERATIONS, layouts, measure_collectives
from workers import WorkerPool


def test_groups_inside_a_node_alone_and_at_once() -> None:
    found = {(layout.tier, layout.groups_in_node, len(layout.ranks[0])): layout.ranks for layout in layouts(["a"] * 4)}
    assert found == {
        ("node", 1, 2): ((0, 1),),
        ("node", 2, 2): ((0, 1), (2, 3)),
        ("node", 1, 4): ((0, 1, 2, 3),),
    }


def test_groups_between_nodes_are_of_like_ranks() -> None:
    found = [layout for layout in layouts(["a", "a", "b", "b"]) if layout.tier == "network"]
    assert [layout.ranks for layout in found] == [((0, 2),), ((0, 2), (1, 3))]
    inside = [layout for layout in layouts(["a", "a", "b", "b"]) if layout.tier == "node"]
    assert [layout.ranks for layout in inside] == [((0, 1), (2, 3))]  # one in every node, at once


def test_nodes_that_differ_are_measured_with_what_all_have() -> None:
    assert {len(layout.ranks[0]) for layout in layouts(["a", "a", "a", "b", "b"])} == {2}
    assert [layout.ranks for layout in layouts(["a", "b"])] == [((0, 1),)]


def measured(world: World) -> list[CollectiveRate]:
    return measure_collectives(world, ["here"] * world.size, [2**14], budget_s=0.1)


def test_all_operations_are_measured_and_all_ranks_find_the_same(workers: WorkerPool) -> None:
    first, *others = workers.run(4, measured)
    assert all(other == first for other in others)
    rows = {(row.operation, row.ranks, row.groups) for row in first}
    assert rows == {(name, *group) for name in OPERATIONS for group in ((2, 1), (2, 2), (4, 1))}
    assert all(1e-6 < row.latency_s + (1e6 / row.bytes_per_s if row.bytes_per_s else 0) < 1 for row in first)

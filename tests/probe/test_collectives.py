"""Collectives are measured in groups of each size, alone and at once, by all ranks alike."""

from __future__ import annotations

import numpy as np
import pytest
from pytest import approx

from argosy.parallel.world import World
from argosy.plan.hardware.measurements import CollectiveRate
from argosy.probe.collectives import PROBED_COLLECTIVES, TimeSegment, layouts, measure_collectives, segments
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


BYTES = 2**14


def measured(world: World) -> list[CollectiveRate]:
    return measure_collectives(world, ["here"] * world.size, [BYTES], budget_s=0.1)


def test_all_operations_are_measured_and_all_ranks_find_the_same(workers: WorkerPool) -> None:
    first, *others = workers.run(4, measured)
    assert all(other == first for other in others)
    rows = {(row.operation, row.ranks, row.groups) for row in first}
    assert rows == {(name, *group) for name in PROBED_COLLECTIVES for group in ((2, 1), (2, 2), (4, 1))}
    # No upper bound: on a busy machine the measured message itself may take as long as it likes.
    assert all(row.latency_s + (BYTES / row.bytes_per_s if row.bytes_per_s else 0) > 1e-6 for row in first)


SIZES = [2**p for p in range(10, 27, 2)]
ALPHA, BETA = 1e-4, 1e-9


def line(size: float) -> float:
    return ALPHA + BETA * size


def test_one_line_is_one_piece() -> None:
    (segment,) = segments([(size, line(size)) for size in SIZES])
    assert (segment.from_bytes, segment.latency_s, segment.s_per_byte) == (1024, approx(ALPHA), approx(BETA))


def test_another_algorithm_for_large_messages_is_another_piece() -> None:
    switch = 2**18
    points = [(size, line(size) if size < switch else 1e-3 + BETA / 8 * size) for size in SIZES]
    first, second = segments(points)
    assert (first.from_bytes, first.latency_s, first.s_per_byte) == (1024, approx(ALPHA), approx(BETA))
    assert (second.from_bytes, second.latency_s, second.s_per_byte) == (switch, approx(1e-3), approx(BETA / 8))


def test_scatter_alone_makes_no_piece() -> None:
    scatter = np.random.default_rng(0).lognormal(0, 0.03, len(SIZES))
    (segment,) = segments([(size, line(size) * factor) for size, factor in zip(SIZES, scatter, strict=True)])
    assert (segment.latency_s, segment.s_per_byte) == (approx(ALPHA, rel=0.05), approx(BETA, rel=0.05))


@pytest.mark.parametrize("times", [[3e-3, 2e-3, 1e-3], [1e-6, 1e-3, 2.0], [1e-3, 1e-3, 1e-3]])
def test_whatever_the_times_no_latency_is_negative_and_the_largest_messages_have_a_rate(times: list[float]) -> None:
    found = segments(list(zip(SIZES[:3], times, strict=True)))
    assert all(segment.latency_s >= 0 and segment.s_per_byte >= 0 for segment in found)
    assert found[-1].s_per_byte > 0


def test_a_single_message_is_all_bandwidth() -> None:
    assert segments([(1000, 1e-3)]) == [TimeSegment(1000, 0.0, approx(1e-6))]

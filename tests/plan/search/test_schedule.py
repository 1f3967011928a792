"""Jobs are placed without overlap, in order, elastic where it pays, and as well as trying all orders does."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from argosy.plan.search.schedule import (
    Decisions,
    FreeDevices,
    JobPlacement,
    JobSize,
    PlannedJob,
    Stint,
    again,
    cost,
    placed,
    schedule,
)

H = 3600.0


def sizes(hours: float, *counts: int, power: float = 0.9) -> list[JobSize]:
    """A job that takes so many device-hours on one device, and less than n times less on n."""
    return [JobSize(n, hours * H / n**power) for n in counts or (8, 16, 32, 64)]


def job(name: str, hours: float, *counts: int, on: tuple[str, ...] = ("c",), **facts: object) -> PlannedJob:
    return PlannedJob(name, {place: sizes(hours, *counts) for place in on}, **facts)  # type: ignore[arg-type]


def by_name(found: list[JobPlacement]) -> dict[str, JobPlacement]:
    return {each.job: each for each in found}


def check(jobs: list[PlannedJob], clusters: dict[str, int], found: list[JobPlacement]) -> None:
    """No device is used twice, no job begins too early, and each does all of its work."""
    of = by_name(found)
    assert set(of) == {each.name for each in jobs}
    for name, devices in clusters.items():
        stints = [stint for each in found if each.cluster == name for stint in each.stints]
        for at_s in {stint.begin_s for stint in stints}:
            assert sum(s.devices for s in stints if s.begin_s <= at_s < s.end_s) <= devices
    for each in jobs:
        mine = of[each.name]
        assert mine.begin_s >= max([each.ready_s, *(of[name].end_s for name in each.after)]) - 1e-6
        took = {size.devices: size.time_s for size in each.sizes[mine.cluster]}
        done = sum((stint.end_s - stint.begin_s) / took[stint.devices] for stint in mine.stints)
        restarts = len(mine.stints) - 1
        assert 1 - 1e-6 <= done <= 1 + restarts * 300 / min(took.values()) + 1e-6


JOBS = [
    job("a", 800, deadline_s=30 * H),
    job("b", 400, deadline_s=20 * H, late_per_day=100.0),
    job("c", 1200, priority=3.0, on=("c", "d")),
    job("d", 100, after=("b",)),
    job("e", 300, ready_s=5 * H, on=("d",)),
    job("f", 200, 8, 16, elastic=False, on=("c", "d")),
]


@pytest.mark.parametrize("clusters", [{"c": 64, "d": 64}, {"c": 128, "d": 64}])
def test_a_schedule_holds_together(clusters):
    found = schedule(JOBS, clusters)
    check(JOBS, clusters, found)
    assert schedule(JOBS, clusters) == found, "the same question has the same answer"


def test_it_is_as_good_as_the_best_of_all_orders_and_shares():
    jobs = [
        job("a", 500, deadline_s=14 * H, late_per_day=50.0),
        job("b", 300, deadline_s=9 * H, late_per_day=200.0),
        job("c", 150, priority=4.0),
        job("d", 80, ready_s=2 * H),
    ]
    names, shares = {each.name: each for each in jobs}, (1.0, 0.5, 0.25)
    best = min(
        cost(names, placed(jobs, {"c": 64}, Decisions(order, most)))
        for order in permutations(range(4))
        for most in product(shares, repeat=4)
    )
    assert cost(names, schedule(jobs, {"c": 64})) <= best


def test_what_costs_most_by_being_late_goes_first():
    rich, poor = (job(name, 640, deadline_s=15 * H, late_per_day=pay) for name, pay in (("rich", 900.0), ("poor", 9.0)))
    found = by_name(schedule([poor, rich], {"c": 64}))
    assert found["rich"].end_s <= 15.2 * H < found["poor"].end_s


@pytest.mark.parametrize("ready_s", [0.0, 1000 * H])
def test_an_elastic_job_takes_what_becomes_free_and_a_rigid_one_does_not(ready_s):
    held = job("held", 400, 32, elastic=False, priority=100.0, ready_s=ready_s)
    for elastic in (True, False):
        jobs = [held, job("mine", 2000, elastic=elastic, ready_s=ready_s)]
        found = by_name(placed(jobs, {"c": 64}, Decisions((0, 1), (1.0, 1.0))))
        assert [stint.devices for stint in found["mine"].stints] == ([32, 64] if elastic else [64])
        check(jobs, {"c": 64}, list(found.values()))


def test_a_change_of_devices_that_is_not_worth_its_restart_is_left_out():
    free = FreeDevices(64)
    free.take(Stint(0.0, 2700.0, 48))  # five minutes before it is done on 16: a restart takes as long
    (only,) = free.elastic(sizes(10, 16, 64), 0.0)
    assert only.devices == 16
    assert only.begin_s == 0.0


def test_holes_are_filled_without_delaying_who_was_placed_before():
    jobs = [
        job("long", 640, 48, elastic=False),
        job("big", 640, 64, elastic=False),
        job("little", 20, 8, elastic=False),
    ]
    found = by_name(placed(jobs, {"c": 64}, Decisions((0, 1, 2), (1.0,) * 3)))
    assert found["little"].begin_s == 0.0
    assert found["big"].begin_s == found["long"].end_s


def test_the_same_decisions_with_longer_jobs_end_later():
    clusters, names = {"c": 64, "d": 64}, {each.name: each for each in JOBS}
    found = schedule(JOBS, clusters)
    same = again(names, clusters, found, dict.fromkeys(names, 1.0))
    assert [each.end_s for each in same] == pytest.approx([each.end_s for each in found])
    slow = again(names, clusters, found, dict.fromkeys(names, 1.5))
    assert max(each.end_s for each in slow) > 1.2 * max(each.end_s for each in found)

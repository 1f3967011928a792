"""How often the state is copied to host memory: as theory has it, by what copies are measured to take."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.plan.cost.goodput import MEMORY_CHECKPOINTS_MAY_COST, memory_checkpoint_interval_s
from argosy.training.memory_checkpoints import MemoryCheckpointPace

HOUR = 3600.0


class Told(list[dict[str, Any]]):
    def __call__(self, kind: str, /, **facts: Any) -> None:
        self.append({"event": kind, **facts})


def made(pace: MemoryCheckpointPace, steps: int, step_s: float, copy_s: float | None) -> list[int]:
    """After which steps copies are made."""
    found = []
    for done in range(1, steps + 1):
        if pace.is_due(done, step_s, copy_s if found else None):
            pace.saved(done)
            found.append(done)
    return found


def test_a_number_of_steps_is_taken_as_it_is():
    told = Told()
    assert made(MemoryCheckpointPace(4, HOUR, 1.0, told), 12, 1.0, 5.0) == [4, 8, 12] and not told


def test_the_first_copy_is_made_at_once_and_the_others_as_its_measure_says():
    told = Told()
    found = made(MemoryCheckpointPace("auto", 3 * HOUR, 1.0, told), 1000, 2.0, 0.5)
    every = round(memory_checkpoint_interval_s(0.5, 3 * HOUR) / 2.0)
    assert every == pytest.approx((2 * 0.5 * 3 * HOUR) ** 0.5 / 2.0, abs=1), "Young's"
    assert found == list(range(1, 1001, every))
    (event,) = told
    assert event["event"] == "memory_checkpoint_interval" and event["steps"] == every and event["copy_s"] == 0.5


def test_where_failures_are_rare_copies_still_cost_a_thousandth_at_most():
    assert memory_checkpoint_interval_s(0.001, 1e9) == pytest.approx(0.001 / MEMORY_CHECKPOINTS_MAY_COST)
    found = made(MemoryCheckpointPace("auto", 1e9, 1.0, Told()), 500, 0.02, 0.001)
    assert found == list(range(1, 501, 50))


def test_until_a_copy_is_measured_the_prediction_counts():
    pace = MemoryCheckpointPace("auto", 3 * HOUR, 2.0, Told())
    pace.saved(1)
    every = round(memory_checkpoint_interval_s(2.0, 3 * HOUR))
    assert not pace.is_due(every, 1.0, None) and pace.is_due(1 + every, 1.0, None)


def test_the_interval_is_told_of_again_when_it_has_changed_much():
    told = Told()
    pace = MemoryCheckpointPace("auto", HOUR, 1.0, told)
    pace.saved(1)
    for copy_s in (1.0, 1.2, 0.9, 9.0, 9.5):
        pace.is_due(2, 1.0, copy_s)
    assert [event["copy_s"] for event in told] == [1.0, 9.0]

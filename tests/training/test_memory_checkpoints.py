"""In-memory checkpoints are saved as often as theory says, given how long they are measured to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint.memory import FOLDER, NODE, memory_checkpoints_in
from argosy.config.schema import RunConfig
from argosy.observe.events import read_lines
from argosy.parallel.world import World
from argosy.plan.cost.economy import MEMORY_CHECKPOINTS_MAY_COST, memory_checkpoint_interval_s
from argosy.training.loop import train
from argosy.training.memory_checkpoints import MemoryCheckpointPace
from argosy.training.stop import StopSignal
from tiny import eager, run_config

HOUR = 3600.0


class Told(list[dict[str, Any]]):
    def __call__(self, kind: str, /, **facts: Any) -> None:
        self.append({"event": kind, **facts})


def saves(pace: MemoryCheckpointPace, steps: int, step_s: float, copy_s: float | None) -> list[int]:
    """After which steps checkpoints are saved."""
    found = []
    for done in range(1, steps + 1):
        if pace.is_due(done, step_s, copy_s if found else None):
            pace.saved(done)
            found.append(done)
    return found


def test_a_number_of_steps_is_taken_as_it_is():
    told = Told()
    assert saves(MemoryCheckpointPace(4, HOUR, 1.0, told), 12, 1.0, 5.0) == [4, 8, 12] and not told


def test_the_first_is_saved_at_once_and_the_others_as_its_measure_says():
    told = Told()
    found = saves(MemoryCheckpointPace("auto", 3 * HOUR, 1.0, told), 1000, 2.0, 0.5)
    every = round(memory_checkpoint_interval_s(0.5, 3 * HOUR) / 2.0)
    assert every == pytest.approx((2 * 0.5 * 3 * HOUR) ** 0.5 / 2.0, abs=1), "Young's"
    assert found == list(range(1, 1001, every))
    (event,) = told
    assert event["event"] == "memory_checkpoint_interval" and event["steps"] == every and event["copy_s"] == 0.5


def test_where_failures_are_rare_they_still_cost_a_thousandth_at_most():
    assert memory_checkpoint_interval_s(0.001, 1e9) == pytest.approx(0.001 / MEMORY_CHECKPOINTS_MAY_COST)
    found = saves(MemoryCheckpointPace("auto", 1e9, 1.0, Told()), 500, 0.02, 0.001)
    assert found == list(range(1, 501, 50))


def test_until_one_is_measured_the_prediction_counts():
    pace = MemoryCheckpointPace("auto", 3 * HOUR, 2.0, Told())
    pace.saved(1)
    every = round(memory_checkpoint_interval_s(2.0, 3 * HOUR))
    assert not pace.is_due(every, 1.0, None) and pace.is_due(1 + every, 1.0, None)


def test_the_interval_is_reported_again_when_it_has_changed_much():
    told = Told()
    pace = MemoryCheckpointPace("auto", HOUR, 1.0, told)
    pace.saved(1)
    for copy_s in (1.0, 1.2, 0.9, 9.0, 9.5):
        pace.is_due(2, 1.0, copy_s)
    assert [event["copy_s"] for event in told] == [1.0, 9.0]


def trained(world: World, run: RunConfig, folder: Path) -> list[int]:
    """Steps of the in-memory checkpoints of this rank's node when the run has ended."""
    memory = folder / f"memory-{world.rank}"
    memory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NODE, f"node-{world.rank}")
        patch.setenv(FOLDER, str(memory))
        train(run, eager("dp_shard=2,zero=1"), world, folder / "run", StopSignal())
    return [saved.step for saved in memory_checkpoints_in(memory)]


def test_all_ranks_save_at_the_steps_that_one_of_them_picks_and_records(workers, corpus, tmp_path):
    run = run_config(corpus, evaluate={"every_steps": 0, "tokens": 600}, train={"steps": 20})
    assert run.resilience.memory_checkpoint_every_steps == "auto"
    first, second = workers.run(2, trained, run, tmp_path)
    assert first and sorted(first) == sorted(second)
    told: list[dict[str, Any]] = read_lines(tmp_path / "run" / "events" / "rank-0.jsonl")
    chosen = [e for e in told if e["event"] == "memory_checkpoint_interval"]
    assert chosen and all(e["steps"] >= 1 and e["copy_s"] > 0 and e["mtbf_s"] > 0 for e in chosen)

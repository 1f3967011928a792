"""A run goes on in another world of processes as if nothing had happened, whoever is in it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint import store
from argosy.checkpoint.memory import FOLDER, NODE
from argosy.config.schema import RunConfig
from argosy.observe.events import read_lines
from argosy.observe.metrics import Metrics
from argosy.parallel.world import World
from argosy.training.loop import train
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal, WorldIsOver
from tiny import eager, run_config, train_in, weights
from workers import next_world


class OverAfter(StopSignal):
    """The world is over once so many steps are made in it."""

    def __init__(self, steps: int):
        super().__init__()
        self._left = steps

    def check(self) -> None:
        if self._left == 0:
            raise WorldIsOver
        self._left -= 1  # it is asked before the first step, and after each


def interrupted(
    world: World, run: RunConfig, plan: str, folder: Path, lost: int, last_line_missing: bool
) -> list[dict[str, Any]]:
    """A run whose world is over after 5 steps; in the next, rank `lost` is a process that knows nothing."""
    memory = folder / f"memory-{world.rank}"
    memory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NODE, f"node-{world.rank}")
        patch.setenv(FOLDER, str(memory))
        survivor = Survivor()
        with suppress(WorldIsOver):
            train(run, eager(plan), world, folder / "run", OverAfter(5), survivor)
        world = next_world(world, folder / "store")
        if last_line_missing and world.is_first:
            lines = (folder / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
            (folder / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))
        train(run, eager(plan), world, folder / "run", StopSignal(), Survivor() if world.rank == lost else survivor)
    return Metrics(folder / "run").read()


@pytest.mark.parametrize(
    ("plan", "lost", "tier", "from_step"),
    [("dp_replicate=2", 0, "live", 5), ("dp_shard=2,zero=1", 1, "memory", 4)],
)
def test_a_run_goes_on_bit_for_bit_in_a_world_in_which_a_process_is_new(
    workers, corpus, tmp_path, plan, lost, tier, from_step
):
    run = run_config(corpus, evaluate={"every_steps": 0, "tokens": 600}, resilience={"memory_every_steps": 2})
    records = workers.run(2, interrupted, run, plan, tmp_path, lost, tier == "live")[0]
    expected = workers.run(2, train_in, run, eager(plan), tmp_path / "undisturbed")[0]
    for key in ("step", "tokens", "loss", "grad_norm", "lr", "validation_loss"):
        assert column(records, key) == column(expected, key), key
    found, wanted = weights(tmp_path / "run"), weights(tmp_path / "undisturbed")
    assert all((found[name] == wanted[name]).all() for name in found.keys() | wanted.keys())
    events = [e for e in read_lines(tmp_path / "run" / "events" / "rank-0.jsonl") if e["event"] == "recovered"]
    assert [(e["source"], e["step"], e["steps_lost"]) for e in events] == [(tier, from_step, 5 - from_step)]
    assert [c.step for c in store.committed(tmp_path / "run")] == [8]


def column(records: list[dict[str, Any]], key: str) -> list[Any]:
    return [record[key] for record in records if key in record]

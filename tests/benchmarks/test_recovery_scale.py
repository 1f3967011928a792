"""`benchmarks/recovery_scale.py`: its ranks hold what the trainer's hold, and recover."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from argosy.checkpoint.boxes import Box
from argosy.parallel.apply import apply
from argosy.parallel.peers import Peers, together
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.state import TrainState
from tiny import eager, run_config


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import recovery_scale

    yield recovery_scale
    sys.modules.pop("recovery_scale")


def held(world: World, plan: str) -> set[Box]:
    layout, run = eager(plan), run_config(Path("no data"), model={"layers": 2, "vocab_size": 403})
    return set(TrainState.begin(apply(layout, run, world), layout, run).boxes())


@pytest.mark.parametrize("plan", ["dp_shard=2,tp=2,zero=3", "pp=2,dp_shard=2,zero=1", "dp_replicate=2,tp=2"])
def test_ranks_hold_what_the_trainer_s_hold(workers, benchmark, plan):
    run = run_config(Path("no data"), model={"layers": 2, "vocab_size": 403})
    for rank, boxes in enumerate(workers.run(4, held, plan)):
        found = set(benchmark.state_boxes(Plan.parse(plan), run, rank))
        assert found == {box for box in boxes if not box.name.startswith("scaler.")}


def test_all_ranks_of_a_small_world_recover(benchmark):
    run = run_config(Path("no data"), model={"layers": 4})
    scenario = benchmark.Scenario("pp=2,dp_replicate=2,dp_shard=4,zero=3", "dp_shard=16,zero=3", range(8, 10))
    transfers = together([benchmark.recovery(Peers(rank, 16), scenario, run) for rank in range(16)])
    assert all(transfers)

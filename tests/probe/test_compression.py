"""The work of compressing is measured for each word, by processes that send nothing to each other."""

from __future__ import annotations

from pathlib import Path

from argosy.parallel.world import World
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.measurements import Measurements
from argosy.plan.sync import COMPRESSED
from argosy.probe.compression import measure_compression
from tiny import run_config
from workers import WorkerPool


def measured(world: World) -> list[tuple[str, float]]:
    return [(rate.sync, rate.number_s) for rate in measure_compression(world, slice_s=0.01)]


def test_each_word_is_measured_the_same_on_all_processes(workers: WorkerPool) -> None:
    first, second = workers.run(2, measured)
    assert first == second
    assert [word for word, _ in first] == list(COMPRESSED)
    assert all(1e-12 < number_s < 1e-4 for _, number_s in first)


def test_the_planner_takes_what_was_measured(tmp_path: Path) -> None:
    cluster = Cluster.parse("8xh100")
    found = Measurements.model_validate({"compression": [{"sync": "int8", "number_s": 3e-9}]})
    cluster.model_copy(update={"measured": found}).save(tmp_path / "cluster.toml")
    costs = CostModel.of(run_config(tmp_path), Cluster.load(tmp_path / "cluster.toml"))
    assert costs.compression.measured_s == {"int8": 3e-9}

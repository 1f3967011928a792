"""MLflow's client reads what was logged into a file of the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy.sinks.worker import SinkSession
from run_folder import RunFolder


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient  # here: each of the processes that run tests collects this module

    return MlflowClient(uri)


def client_of(folder: Path) -> Any:
    return client(f"sqlite:///{folder / 'mlflow/mlflow.db'}")


def runs(folder: Path) -> list[Any]:
    found = client_of(folder)
    experiment = found.get_experiment_by_name("argosy")
    return list(found.search_runs([experiment.experiment_id]))


def points(folder: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    (run,) = runs(folder)
    return [(point.step, point.value) for point in client_of(folder).get_metric_history(run.info.run_id, name)]


def test_a_run_is_written_to_the_tracking_server_of_the_run_file(tmp_path, monkeypatch):
    """A folder in place of a server: it takes no seconds to make."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "elsewhere").as_uri()
    run = RunFolder(tmp_path / "run", mlflow={"tracking_uri": uri, "experiment": "mine"})
    told = SinkSession(run.path, "mlflow")
    run.step(0, 1, user={"a//../b/": 2.0, "x" * 300: 3.0})
    told.catch_up()
    run.evaluation(1, 3.5)
    told.catch_up()
    told.close()
    found = client(uri)
    (one,) = found.search_runs([found.get_experiment_by_name("mine").experiment_id])
    assert one.info.run_name == "tiny"
    assert [point.value for point in found.get_metric_history(one.info.run_id, "train/loss")] == [0, 1]
    (evaluated,) = found.get_metric_history(one.info.run_id, "validation/loss")
    assert evaluated.timestamp == 1000 * (1.8e9 + 1), "its line has no time of its own"
    assert one.data.metrics["user/a/_/_/b/_"] == 2.0
    assert one.data.params["optimizer.kind"] == "adamw"
    assert one.info.status == "KILLED"  # the run left no report


@pytest.mark.slow  # to make the file takes seconds
def test_a_run_is_one_mlflow_run_whatever_stops_it(tmp_path):
    run = RunFolder(tmp_path)
    told = SinkSession(tmp_path, "mlflow")
    run.step(0, 1, user={"my loss!": 2.0})
    run.evaluation(1, 3.5)
    run.sample(1, " upon")
    run.event("recovered", step=2)
    told.catch_up()
    kept = (tmp_path / "sinks/mlflow.json").read_text()
    run.step(2)
    told.catch_up()
    (tmp_path / "sinks/mlflow.json").write_text(kept)  # it was killed before it could note that
    told = SinkSession(tmp_path, "mlflow")
    run.step(3)
    told.catch_up()
    assert points(tmp_path) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert points(tmp_path, "validation/loss") == [(1, 3.5)]
    assert points(tmp_path, "user/my loss_") == [(0, 2), (1, 2)]
    (before,) = runs(tmp_path)
    assert before.data.params["model.width"] == "256"
    assert before.info.status == "RUNNING"
    assert any("recovered" in value for value in before.data.tags.values())
    text = tmp_path.glob(f"mlflow/{before.info.run_id}/artifacts/samples/step-00000001.txt")
    assert [path.read_text() for path in text] == ["once upon"]

    run.lose_from(1)
    run.step(1, loss=9.0)
    (tmp_path / "report.json").write_text('{"status": "finished"}')
    told.catch_up()
    told.close()
    assert points(tmp_path) == [(0, 0), (1, 9)]
    (after,) = runs(tmp_path)
    assert after.data.tags["argosy.replaces"] == before.info.run_id
    assert after.info.status == "FINISHED"

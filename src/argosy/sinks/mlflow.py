"""MLflow: a run of an experiment, on a server or in a file of the run's folder.

MLflow keeps every point of a metric and can take none back. A line that comes twice is one point, since its time is
that of the line. If steps are lost and run again, the MLflow run is deleted (MLflow can restore it) and another is
written from the first line.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from argosy.sinks.sink import About, Record, Sink, flat_config, is_noteworthy

MOST_METRICS, MOST_PARAMS, LONGEST_PARAM, LONGEST_METRIC_NAME = 1000, 100, 500, 250
"""Limits of MLflow's REST API in one request, of a value, and of a name."""
NOT_ALLOWED = re.compile(r"[^\w\-. /]")


class Mlflow(Sink):
    """Logs a run to MLflow. State: `run_id`, and `time_s` of the last line that had one."""

    can_rewind = False

    def __init__(self, about: About):
        super().__init__(about)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        settings = about.config["observe"]["mlflow"]
        local = about.folder / "mlflow"
        uri = settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            local.mkdir(exist_ok=True)
            uri = f"sqlite:///{local / 'mlflow.db'}"
        artifacts = None if "://" in uri and not uri.startswith("sqlite:") else local.as_uri()
        self._client = MlflowClient(uri)
        found = self._client.get_experiment_by_name(settings["experiment"])
        self._experiment = found.experiment_id if found else self._client.create_experiment(
            settings["experiment"], artifact_location=artifacts
        )  # fmt: skip
        if "run_id" in self.state:
            self._client.update_run(self.state["run_id"], status="RUNNING")
        else:
            self._begin()

    def numbers(self, lines: Sequence[tuple[Record, dict[str, float]]]) -> None:
        points: list[Metric] = []
        for record, values in lines:
            self.state["time_s"] = record.get("time_s", self.state.get("time_s", 0.0))  # an evaluation has none
            at_ms, step = int(1000 * self.state["time_s"]), record["step"]
            points += [Metric(_allowed(name), value, at_ms, step) for name, value in values.items()]
        for start in range(0, len(points), MOST_METRICS):
            self._client.log_batch(self.state["run_id"], metrics=points[start : start + MOST_METRICS])

    def events(self, records: Sequence[Record]) -> None:
        for record in filter(is_noteworthy, records):
            key = f"argosy.event.{record['time_s']:.3f}.{record['event']}"
            self._client.set_tag(self.state["run_id"], key, json.dumps(record)[:LONGEST_PARAM])

    def samples(self, records: Sequence[Record]) -> None:
        for record in records:
            text, name = record["prompt"] + record["text"], f"samples/step-{record['step']:08d}.txt"
            self._client.log_text(self.state["run_id"], text, name)

    def start_over(self) -> None:
        before = self.state["run_id"]
        self._begin({"argosy.replaces": before})
        self._client.delete_run(before)

    def close(self, report: Record | None) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED"}.get((report or {}).get("status", ""), "KILLED")
        if report is not None:
            self._client.log_dict(self.state["run_id"], report, "report.json")
        self._client.set_terminated(self.state["run_id"], status)

    def _begin(self, tags: dict[str, str] | None = None) -> None:
        tags = {"argosy.folder": str(self.about.folder), "argosy.plan": self.about.plan_text, **(tags or {})}
        run = self._client.create_run(self._experiment, run_name=self.about.name, tags=tags)
        self.state["run_id"] = run.info.run_id
        params = [
            Param(_allowed(key), str(value)[:LONGEST_PARAM]) for key, value in flat_config(self.about.config).items()
        ]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self.state["run_id"], params=params[start : start + MOST_PARAMS])


def _allowed(name: str) -> str:
    """Return a name that MLflow takes: it may be used as a path."""
    parts = NOT_ALLOWED.sub("_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:LONGEST_METRIC_NAME].rstrip("/")

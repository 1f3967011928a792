"""A run's folder as those who look at it find it, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.observe.events import Events, JsonLines, read_lines
from argosy.plan.plan import Plan


class RunFolder:
    """Writes what a run would write."""

    def __init__(self, path: Path, **observe: Any):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        run = RunConfig.model_validate({"name": "tiny", "observe": observe})
        save_run(run, path / "run.toml")
        Plan(compile=False).save(path / "plan.toml")
        self._metrics, self._events = JsonLines(path / "metrics.jsonl"), Events(path, "rank-0")

    def step(self, *steps: int, loss: float | None = None, **more: Any) -> None:
        """Append lines of steps; the loss is the step's number unless it is given."""
        for step in steps:
            self._metrics.write(
                {
                    "step": step, "tokens": 256 * (step + 1), "loss": float(step) if loss is None else loss,
                    "grad_norm": 1.0, "lr": 0.01, "step_time_s": 0.5, "tokens_per_s": 512.0, "mfu": 0.25,
                    "memory_bytes": 1000, "seconds": {"forward": 0.2, "backward": 0.3}, "time_s": 1.8e9 + step, **more,
                }
            )  # fmt: skip

    def evaluation(self, step: int, loss: float, **more: float) -> None:
        """Append the line of an evaluation."""
        self._metrics.write({"step": step, "validation_loss": loss, "bits_per_byte": loss / 2, **more})

    def event(self, kind: str, **facts: Any) -> None:
        """Append an event of rank 0."""
        self._events.write(kind, **facts)

    def sample(self, step: int, text: str) -> None:
        """Append a text that the model wrote."""
        JsonLines(self.path / "samples.jsonl").write({"step": step, "time_s": 1.8e9, "prompt": "once", "text": text})

    def lose_from(self, step: int) -> None:
        """Forget the lines of `step` and later, as a recovery does."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.path / name
            if path.exists():
                lines = path.read_text().splitlines(keepends=True)
                path.write_text("".join(line for line in lines if json.loads(line)["step"] < step))

    def events_of(self, process: str) -> list[dict[str, Any]]:
        """The events of a process."""
        path = self.path / "events" / f"{process}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events(run_dir: Path, kind: str, process: str = "rank-0") -> list[dict[str, Any]]:
    """The events of a kind that a process of a run has written; with "*" those of all."""
    paths = sorted((run_dir / "events").glob(f"{process}.jsonl"))
    return [event for path in paths for event in read_lines(path) if event["event"] == kind]

"""What became of a trial, told by its run folder."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from argosy.checkpoint.store import committed
from argosy.errors import Retryable, RunFailed, UserError
from argosy.observe.events import from_the_end
from argosy.watch.reader import RunReader, is_run

SHARE_OF_STEPS = 0.1
"""The metric of steps is the mean over so many of the last ones."""
OF_EVALUATIONS = ("validation_loss", "bits_per_byte")
DIVERGED = "diverged"
"""Begins the reason of a trial whose numbers are no longer finite."""
LOG_BYTES = 4096


@dataclass(frozen=True)
class Outcome:
    """What is to be done with a trial that does not run."""

    kind: Literal["reached", "again", "failed"]
    """reached: it has come to the rung, or its end; again: it was interrupted and goes on from its checkpoint."""
    why: str = ""


def outcome(run_dir: Path, until: int, code: int | None, log: str) -> Outcome:
    """Return what became of a trial whose job has ended.

    until: the step at which it was to pause; 0: at its end. code: exit code of its command, None if nobody knows.
    log: the file that it printed to.
    """
    if has_reached(run_dir, until):
        return Outcome("reached")
    if code == UserError.exit_code or (code == RunFailed.exit_code and not is_run(run_dir)):
        return Outcome("failed", last_words(log) or f"it ended with exit code {code}")
    if not is_run(run_dir):
        return Outcome("again", last_words(log))
    reader = RunReader(run_dir)
    reader.refresh()
    codes = [event["exit_code"] for event in reader.events if event["event"] == "finish"]
    if reader.state == "failed" and codes[-1:] != [Retryable.exit_code]:
        bad = next((event for event in reversed(reader.events) if event["event"] == "bad_step"), {})
        if bad.get("outcome") == "stop":
            return Outcome("failed", f"{DIVERGED} at step {bad.get('step')}: {bad.get('reason')}")
        return Outcome("failed", reader.why)
    return Outcome("again", "" if reader.state == "training" else reader.why)


def has_reached(run_dir: Path, until: int) -> bool:
    """Return True if the trial is finished, or has paused with its state saved at step `until`."""
    if not is_run(run_dir):
        return False
    if until:
        checkpoints = committed(run_dir)
        return bool(checkpoints) and checkpoints[-1].step >= until
    reader = RunReader(run_dir)
    reader.refresh()
    return reader.state == "finished"


def last_words(log: str) -> str:
    """Return the last message of a command that ended: what stands behind the last `argosy:` of its log."""
    try:
        with Path(log).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            text = file.read().decode(errors="replace").strip()
    except OSError:
        return ""
    message = re.split(r"(?m)^argosy: ", text)[-1].strip() if "argosy: " in text else text.rpartition("\n")[2]
    return message.partition("\n")[0] if len(message) > 300 else " ".join(message.split())


def metric_of(run_dir: Path, key: str, until: int = 0) -> float | None:
    """Return a metric of metrics.jsonl after `until` steps (0: at the end); None if it is not there.

    Of an evaluation the last one counts, of steps the mean over the last tenth. NaN stands for what was no number.
    """
    values: list[float] = []
    last = 0
    for record in from_the_end(run_dir / "metrics.jsonl"):
        step = int(record["step"]) + 1
        if (until and step > until) or not _has(record, key):
            continue
        last = last or step
        if key in OF_EVALUATIONS:
            return _number(record, key) if not until or step == until else None
        if step <= last * (1 - SHARE_OF_STEPS) and values:
            break
        values.append(_number(record, key))
    return math.fsum(values) / len(values) if values else None


def steps_of(run_dir: Path) -> int:
    """Return the steps that a trial has made."""
    return next((int(record["step"]) + 1 for record in from_the_end(run_dir / "metrics.jsonl")), 0)


def _has(record: dict[str, Any], key: str) -> bool:
    return _inner(record, key) is not _MISSING


def _number(record: dict[str, Any], key: str) -> float:
    value = _inner(record, key)
    return float(value) if isinstance(value, int | float) else math.nan


def _inner(record: dict[str, Any], key: str) -> Any:
    value: Any = record
    for name in key.split("."):
        value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
    return value


_MISSING = object()

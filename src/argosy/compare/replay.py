"""Replay: run steps again from the checkpoint before them, under the same plan, and compare the numbers bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import computed_field
from pydantic.dataclasses import dataclass as documented

from argosy.checkpoint import store
from argosy.checkpoint.checksums import DamagedCheckpoint
from argosy.checkpoint.store import Checkpoint
from argosy.compare.parity import train_quietly
from argosy.config.identity import REPETITION, check_repeatable
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.extend.loading import check_approved
from argosy.launch import run_folder
from argosy.observe.events import Metrics, each_line
from argosy.plan.plan import Plan
from argosy.training.rows import REFERENCES
from argosy.training.schedule import learning_rate

COMPARED = ("loss", "grad_norm", "first_sample")


@dataclass(frozen=True)
class Replayed:
    """One step: its numbers in the run, and its numbers now."""

    step: int
    before: dict[str, float]
    """loss, grad_norm and first_sample."""
    now: dict[str, float]
    """The same; empty if the step was not reached."""

    @property
    def is_equal(self) -> bool:
        """True if all numbers are the same bits."""
        return self.before == self.now


@documented(frozen=True)
class Replay:
    """The result of `replay`."""

    start: int
    """The step of the checkpoint that the replay began with; 0 is the initial weights."""
    plan: str
    steps: tuple[Replayed, ...]

    @computed_field(alias="equal")  # type: ignore[prop-decorator]
    @property
    def is_equal(self) -> bool:
        """True if every step gave the same numbers as before."""
        return all(step.is_equal for step in self.steps)


def replay(run_dir: Path, step: int, *, trust_code: bool = False, say: Callable[[str], None] | None = None) -> Replay:
    """Run the steps of the run in `run_dir` up to `step` (0-based) again, from the newest checkpoint before them.

    Processes of this machine run them, under the plan that the steps had, in a temporary folder beside the run's;
    nothing is written to the run's folder. The bits can only be equal on the same kind of device, with the same
    versions and the same number of threads in each process. trust_code: approve and run code that the run brings along.
    say: called with a line when the steps begin.

    Raises: UserError if the run has no such step, or the step cannot be run here; RunFailed if a process dies;
    Interrupted after SIGTERM or SIGINT.
    """
    if not (run_dir / "run.toml").is_file():
        raise UserError(f"{run_dir}: no run there (run.toml is missing). Give a run's folder, such as runs/NAME.")
    run = load(run_dir / "run.toml")
    check_repeatable(run, run_dir)
    check_approved(run.extend.code, trust_code)
    last = next((record["step"] for record in Metrics(run_dir).last(1)), -1)
    if not 0 <= step <= last:
        counted = f"counted from 0, it has 0 to {last} (training shows the last as step {last + 1})"
        raise UserError(f"--step {step}: {run_dir} has no such step; {counted if last >= 0 else 'it has none'}.")
    checkpoint = _newest_before(run_dir, step)
    start = 0 if checkpoint is None else checkpoint.step
    before, steps = _recorded(run_dir, start, step, most=4 * run.resilience.spike_window)
    _check_settings(run_dir, run, start, steps)
    plan = _plan_of(run_dir, start, step)
    run = _until(run, plan, step)
    if say:
        begin = "the initial weights" if checkpoint is None else checkpoint.folder.name
        say(f"steps {start} to {step} again, from {begin}: {plan}")
    with tempfile.TemporaryDirectory(prefix=".argosy-replay-", dir=_writable(run_dir.absolute().parent)) as folder:
        copy = Path(folder)
        run_folder.write(copy, run, plan, [run_dir])
        if checkpoint is not None:
            _link(checkpoint.folder.iterdir(), store.step_folder(copy, checkpoint.step))
            _link(run_dir.glob(REFERENCES), copy)
        Metrics(copy).path.write_text("".join(before))  # the bad-step policy compares with them
        train_quietly(run, copy, "replay")
        now = {record["step"]: record for record in Metrics(copy).read() if "loss" in record}
    found = [Replayed(i, _compared(steps[i]), _compared(now.get(i, {}))) for i in range(start, step + 1) if i in steps]
    return Replay(start, str(plan), tuple(found))


def _recorded(run_dir: Path, first: int, last: int, most: int) -> tuple[deque[str], dict[int, dict[str, Any]]]:
    """Return the last lines before step `first`, at most `most`, and the records of steps `first` to `last`."""
    before: deque[str] = deque(maxlen=most)
    steps = {}
    for record in Metrics(run_dir).each():
        if record["step"] < first:
            before.append(json.dumps(record) + "\n")
        elif record["step"] <= last and "loss" in record:
            steps[record["step"]] = record
    return before, steps


def _compared(record: dict[str, Any]) -> dict[str, float]:
    return {key: record[key] for key in COMPARED if key in record}


def _newest_before(run_dir: Path, step: int) -> Checkpoint | None:
    """Return the newest whole checkpoint at or before `step`; None if there is none."""
    for checkpoint in reversed(store.committed(run_dir)):
        if checkpoint.step > step or not checkpoint.manifest.has_optimizer:
            continue
        try:
            checkpoint.verify()
        except DamagedCheckpoint:
            continue
        return checkpoint
    return None


def _check_settings(run_dir: Path, run: RunConfig, start: int, steps: dict[int, dict[str, Any]]) -> None:
    """Refuse steps from `start` on, with their records, that had other settings or data. Raises: UserError."""
    resumed = [event for event in each_line(run_dir / "events" / "rank-0.jsonl") if event["event"] == "resume"]
    changed = next((event["step"] for event in reversed(resumed) if event.get("config_changed")), 0)
    if start < changed:
        raise UserError(
            f"--step {max(steps, default=start)}: settings or data of the run changed at step {changed}, and its "
            f"newest checkpoint before that step is of step {start}. Give a step after a checkpoint of step {changed} "
            "or later."
        )
    for step, record in steps.items() if run.train.steps else ():
        now = learning_rate(run, step, run.train.steps)
        if (then := record.get("lr", now)) != now:
            raise UserError(
                f"--step {max(steps)}: step {step} had a learning rate of {then:g}, and run.toml now gives it "
                f"{now:g}: the run is longer than it was then, or settings changed. Give a later step."
            )


def _plan_of(run_dir: Path, first: int, last: int) -> Plan:
    """Return the plan that all these steps had. Raises: UserError if there were several."""
    events = each_line(run_dir / "events" / "rank-0.jsonl")
    starts = [e for e in events if e["event"] in ("start", "rebalanced") and e["step"] <= last]
    kept: list[dict[str, Any]] = []
    for start in starts:  # a start replaces all that an earlier one did from its step on
        kept = [other for other in kept if other["step"] < start["step"]] + [start]
    of_steps = [start for start in kept if start["step"] <= first][-1:] + [s for s in kept if s["step"] > first]
    if not of_steps:
        return Plan.load(run_dir / "plan.toml")
    changed = next((start["step"] for start in of_steps if start["plan"] != of_steps[0]["plan"]), None)
    if changed is not None:
        raise UserError(
            f"--step {last}: the plan changed at step {changed}, the newest checkpoint before step {last} is of step "
            f"{first}, and other layouts round differently. Try --step {changed - 1}."
        )
    return Plan.parse(of_steps[0]["plan"])


def _until(run: RunConfig, plan: Plan, step: int) -> RunConfig:
    """Return `run` set to stop after `step`, without whatever does not affect the steps' numbers."""
    return run.with_keys(**REPETITION).with_keys(
        plan=str(plan),
        train={"pause_at": step + 1},
        data={"prepare": {"input": ()}},
        launch={"processes": plan.world_size, "cluster": ""},
    )


def _writable(folder: Path) -> Path | None:
    """Return `folder`, where files can be linked rather than copied; None (the system's) if it cannot be written."""
    return folder if os.access(folder, os.W_OK) else None


def _link(files: Iterable[Path], folder: Path) -> None:
    """Put files into another folder, without copying where the file system can do that."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        try:
            os.link(path, folder / path.name)
        except OSError:
            shutil.copy(path, folder / path.name)

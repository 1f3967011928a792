"""report.json: the totals of a run."""

from __future__ import annotations

import statistics
import textwrap
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from argosy.errors import UserError, counted, first_error
from argosy.files import atomic_write, read_at_most
from argosy.observe.energy import Energy
from argosy.observe.heartbeat import BESIDE
from argosy.observe.panel import duration, mfu_in_words
from argosy.plan.calibration import MOST_REPORT_BYTES, Reconciled
from argosy.plan.cost.estimate import gib, table_in_html

REPORT_COLUMNS = 80
_wrapped = partial(textwrap.wrap, width=REPORT_COLUMNS, subsequent_indent="      ")
SLOW_STEP = 3.0
"""A step that took so many times the median compiled, evaluated or was disturbed."""
DIGITS = {"step_time_s": 6, "tokens_per_s": 1, "mfu": 4}
"""Digits behind the point, as in metrics.jsonl: the median of an even number of steps lies between two of them."""


class SyncSavings(BaseModel):
    """The traffic of replicas, or sites, that agree in fewer bytes than those of exact fp32 sums."""

    model_config = ConfigDict(frozen=True)

    sent_bytes: int
    """Bytes that the first rank, or the site, sent."""
    ratio: float | None
    """These over the bytes of exact fp32 sums in each step."""
    seconds: float
    """Seconds that it waited for them."""
    staleness: float | None = None
    """Steps since values were agreed on, mean."""
    distance: float | None = None
    """Mean distance between replicas before they agreed."""

    def in_words(self) -> str:
        """Return e.g. 12.3 MB sent, 0.26 of fp32's; waited 4.1 s."""
        share = "" if self.ratio is None else f", {self.ratio:.2g} of the bytes of exact fp32 sums"
        far = "" if self.distance is None else f"; replicas {self.distance:.2g} apart"
        return f"{self.sent_bytes / 1e6:,.1f} MB sent{share}; waited {self.seconds:.1f} s{far}"


class Report(BaseModel):
    """The totals of a run, over all its restarts."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    name: str
    run_dir: Path
    status: Literal["finished", "stopped"]
    """stopped: a signal ended the run early, with its state saved."""
    plan: str
    steps: int
    tokens: int
    loss: float | None
    """Training loss of the last step, nats per token, or the mean over pairs or answers where preferences are learned;
    None if it was not finite."""
    step_time_s: float
    """Median, as the next two, of the steps under this plan; of a batch-size ramp, at its largest batch."""
    tokens_per_s: float
    """Tokens a second at the median step."""
    mfu: float | None
    """Model FLOPs over the measured matmul peak, at the median step; None if that is more than 1: the machine was busy
    when the peak was measured, which is too low then. metrics.jsonl keeps the quotient as it is."""
    peak_flops: float
    """The measured matmul peak of all processes together, FLOP/s."""
    time_to_first_step_s: float | None
    """Seconds from the start of the run's last processes to the end of their first step; None if no step was left."""
    memory_bytes: int
    """Peak memory of rank 0."""
    memory_before_bytes: int = 0
    """The part that rank 0 held before it made the model: Python, torch and its libraries; 0 on a GPU."""
    device: str = ""
    """cpu, or the GPU as its driver calls it."""
    software: str = ""
    """Versions that speed depends on."""
    predicted: Reconciled | None = None
    """Measured next to predicted, part by part; None without a prediction."""
    not_deterministic: tuple[str, ...] = ()
    """Code of the user's that is declared not to repeat itself: no replay gives these numbers again."""
    seconds: dict[str, float]
    """Time of the steps by category; they add up to `step`."""
    sync: SyncSavings | None = None
    """None if replicas summed exactly, or there are none."""
    wall_s: float
    """Seconds from the first start to the end, restarts and pauses included."""
    goodput: float
    """Share spent in steps that count, of the time in which the run held its devices: pauses are left out."""
    validation: dict[str, int | float] | None
    """Held-out loss, perplexity and bits per byte; `unigram_bits_per_byte` is the trivial baseline's. Of a reward
    model, loss and accuracy of pairs."""
    tasks: dict[str, dict[str, float]] | None = None
    """The last scores of tasks: metrics of each."""
    energy: Energy | None = None
    """Energy, carbon and money; None if nothing was measured and the devices are unknown."""
    sample: str | None
    """Text that the model wrote."""

    def in_words(self) -> str:
        """Return the lines that a person reads when the run ends."""
        if self.status == "stopped":
            return f"stopped after step {self.steps}; the state is saved in {self.run_dir}/checkpoints"
        seconds = {k: v for k, v in self.seconds.items() if k != "step"}
        shares = sorted(seconds.items(), key=lambda kv: -kv[1])
        where = ", ".join(
            f"{name} {value / self.seconds['step']:.0%}"
            for name, value in shares
            if value >= 0.005 * self.seconds["step"]
        )
        first_s = self.time_to_first_step_s
        first_step = "" if first_s is None else f"   first step after {first_s:.0f} s"
        done = f"{counted(self.steps, 'step')}, {self.tokens / 1e6:.2f}M tokens in {duration(self.seconds['step'])}"
        lines = [
            f"done: {done} of steps ({duration(self.wall_s)} since the first start)",
            f"      {self.tokens_per_s:.0f} tok/s   {mfu_in_words(self.mfu)}{first_step}",
            *_wrapped(f"time: {where}"),
        ]
        if self.sync is not None:
            lines += _wrapped(f"between replicas: {self.sync.in_words()}")
        if self.validation and "accuracy" in self.validation:
            loss, accuracy = self.validation["loss"], self.validation["accuracy"]
            lines.append(f"validation: {accuracy:.1%} of pairs told apart (loss {loss:.3f})")
        elif self.validation:
            lines.append(
                f"validation: {self.validation['bits_per_byte']:.3f} bits per byte "
                f"(loss {self.validation['loss']:.3f}); a unigram model: "
                f"{self.validation['unigram_bits_per_byte']:.3f}"
            )
        for task, metrics in (self.tasks or {}).items():
            lines += _wrapped(task_in_words(task, metrics))
        if self.energy is not None:
            lines += _wrapped(self.energy.in_words())
        if self.predicted is not None:
            lines.append(self.predicted.in_words())
        lines += [f"not deterministic: {what}; no replay gives these numbers again" for what in self.not_deterministic]
        if self.sample is not None:
            lines += ["a sample:", *("  | " + line for line in self.sample.splitlines())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the totals as a table: how a notebook shows the report."""
        accuracy = (self.validation or {}).get("accuracy")
        rows = {
            "run": f"{self.name}, {self.status} after {counted(self.steps, 'step')}",
            "folder": str(self.run_dir),
            "plan": self.plan,
            "tokens": f"{self.tokens:,}",
            "loss": "not finite" if self.loss is None else f"{self.loss:.4f}",
            "validation loss": f"{self.validation['loss']:.4f}" if self.validation else "",
            "accuracy": "" if accuracy is None else f"{accuracy:.1%} of pairs",
            "step": f"{self.step_time_s:.4g} s, {self.tokens_per_s:,.0f} tokens/s, {mfu_in_words(self.mfu)}",
            "time": f"{duration(self.seconds['step'])} of steps, {duration(self.wall_s)} since the first start",
            "memory": f"{gib(self.memory_bytes)} GiB on rank 0",
            "energy": self.energy.in_words().removeprefix("energy: ") if self.energy else "",
            "sample": self.sample or "",
        }
        return table_in_html((name, value) for name, value in rows.items() if value)

    def save(self, run_dir: Path) -> None:
        with atomic_write(run_dir / "report.json") as file:
            file.write(self.model_dump_json(indent=1).encode() + b"\n")

    @classmethod
    def load(cls, run_dir: Path) -> Report:
        """Return the report in a run's folder. Raises: UserError if it is damaged or another version's; OSError."""
        path = run_dir / "report.json"
        try:
            return cls.model_validate_json(read_at_most(path, MOST_REPORT_BYTES))
        except ValidationError as problem:
            raise UserError(
                f"{path}: {first_error(problem)}. Remove it: the next `argosy train` writes it again."
            ) from None


def totals(
    steps: Iterable[dict[str, Any]], batch_of: Callable[[int], int] = lambda step: 1, plan_since: int = 0
) -> dict[str, Any] | None:
    """Return the fields of a report that follow from the lines of metrics.jsonl (those of steps); None without any.

    batch_of: the batch of each step. plan_since: the step from which on the last plan has been in force. Speeds are of
    steps under this plan, if there are any, with the largest batch. Of a line 24 bytes are kept: there may be millions.
    """
    seconds: dict[str, float] = {}
    rates = {key: array("d") for key in DIGITS}
    agreement = _Agreements()
    last: dict[str, Any] | None = None
    memory_bytes = 0
    alike = False, 0
    for last in steps:
        if (now := (last["step"] >= plan_since, batch_of(last["step"]))) > alike:
            alike = now
            rates = {key: array("d") for key in DIGITS}
        for category, value in last["seconds"].items():
            seconds[category] = seconds.get(category, 0.0) + value
        for key, values in rates.items():
            values.append(last[key])
        memory_bytes = max(memory_bytes, last["memory_bytes"])
        agreement.add(last.get("sync"))
    if last is None:
        return None
    middle = {key: round(statistics.median(values), DIGITS[key]) for key, values in rates.items()}
    return {
        "steps": last["step"] + 1,  # a folder that was lost, or a site that was left out, lacks lines
        "tokens": last["tokens"],
        "loss": last["loss"],
        **middle,
        "mfu": middle["mfu"] if middle["mfu"] <= 1 else None,
        "memory_bytes": memory_bytes,
        "seconds": {category: round(value, 4) for category, value in seconds.items()},
        "sync": agreement.total(),
    }


class _Agreements:
    """Adds up the tables `sync` of lines."""

    def __init__(self) -> None:
        self._lines = 0
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, table: Mapping[str, float] | None) -> None:
        if not table:
            return
        self._lines += 1
        exact = {"exact": table["bytes"] / table["ratio"]} if table.get("ratio") else {}
        for key, value in (*table.items(), *exact.items()):
            self._sums[key] = self._sums.get(key, 0.0) + value
            self._counts[key] = self._counts.get(key, 0) + 1

    def total(self) -> SyncSavings | None:
        if not self._lines:
            return None
        sums, sent = self._sums, round(self._sums["bytes"])
        means = {key: sums[key] / self._counts[key] for key in ("staleness", "distance") if key in sums}
        return SyncSavings(
            sent_bytes=sent,
            ratio=round(sent / sums["exact"], 6) if sums.get("exact") else None,
            seconds=round(sums["seconds"], 3),
            **means,
        )


def typical(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of a step by category: the mean over the middle half of the steps' lines, by duration.

    So the categories add up, and what disturbs single steps is left out: compiling, a pause of the machine. Checks,
    evaluation and checkpoints are not part of it.
    """
    ordered = sorted(steps[1:] or steps, key=lambda record: float(record["step_time_s"]))
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    names = {name for record in middle for name in record["seconds"]} - {"step", *BESIDE}
    return {name: statistics.mean(record["seconds"].get(name, 0.0) for record in middle) for name in sorted(names)}


def typical_update_s(steps: list[dict[str, Any]]) -> float | None:
    """Return the seconds of an update of a worker of asynchronous training: the mean of the middle half, by duration.

    The first one does not count if there are others. None: there is none.
    """
    updates, so_far_s = [], 0.0
    for record in steps:
        so_far_s += float(record["step_time_s"])
        if "sites" in record:
            updates.append(so_far_s)
            so_far_s = 0.0
    ordered = sorted(updates[1:] or updates)
    return statistics.mean(ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]) if ordered else None


def typical_bytes(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the bytes that the first rank sends in a step, by axis: the median, so that checkpoints do not count.

    Those of its site (axis `sites`) are the mean over the steps: they come once in many steps.
    """
    sent: dict[str, list[float]] = {}
    of_rounds = [record["sites"] for record in steps if "sites" in record]
    for record in steps[1:] or steps:
        for axis, tiers in record.get("communication", {}).items():
            sent.setdefault(axis, []).append(sum(both[1] for both in tiers.values()))
    found = {axis: statistics.median(values) for axis, values in sent.items()}
    in_rounds = sum(told.get("steps", told.get("staleness_steps", 1)) for told in of_rounds)
    return found | ({"sites": sum(told.get("sent_bytes", 0) for told in of_rounds) / in_rounds} if in_rounds else {})


def typical_round_wait_s(steps: list[dict[str, Any]]) -> float | None:
    """Return the seconds that a site waits in a round, in the middle of all rounds; None if there was none."""
    waits = [float(record["sites"]["seconds"]) for record in steps if "seconds" in record.get("sites", {})]
    return statistics.median(waits) if waits else None


def task_in_words(task: str, metrics: Mapping[str, float]) -> str:
    """Return "arc_easy: acc 0.254 ± 0.009, ..." of a task's metrics; METRIC_stderr is the standard error of METRIC."""
    stated = []
    for name, value in metrics.items():
        if not name.endswith("_stderr"):
            error = metrics.get(f"{name}_stderr")
            stated.append(f"{name} {value:.3f}" + (f" ± {error:.3f}" if error is not None else ""))
    return f"{task}: {', '.join(stated)}"

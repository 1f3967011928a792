"""The summary of a run: the headline at its start, the report and the result at its end."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from argosy.accelerator import CPU, free_bytes, is_accelerator
from argosy.checkpoint import store
from argosy.checkpoint.adapter import load_decoder
from argosy.checkpoint.load import problem_of
from argosy.config.load import model_name
from argosy.config.schema import RunConfig
from argosy.data.loader import OpenData
from argosy.errors import StorageError, counted
from argosy.models.generate import sample_tokens
from argosy.observe.energy import RunSoFar, energy_of_run, price_of
from argosy.observe.events import Metrics, each_line, plan_since
from argosy.observe.report import (
    REPORT_COLUMNS,
    Report,
    totals,
    typical,
    typical_bytes,
    typical_round_wait_s,
    typical_update_s,
)
from argosy.observe.screen import Progress
from argosy.plan.calibration import Reconciled, reconcile
from argosy.plan.cost.prediction import Prediction
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.parameters import parameters
from argosy.plan.plan import Plan
from argosy.training.evaluation import HeldOut, Score, unigram_score
from argosy.watch.linefile import EventLog
from argosy.watch.timeline import timeline

SAMPLE_LENGTH = 200
SAMPLE_ROOM = 6
"""Free bytes of a device for each parameter with which it writes the sample: fp32 weights, and what it works in."""
ASYNCHRONOUS = "the order in which gradients come (plan.sync = async)"
BAD_STEPS = {
    "skip": "is skipped (resilience.on_bad_step)",
    "rewind": "is skipped; several rewind the run",
    "stop": "ends the run",
}
"""resilience.on_bad_step -> what becomes of such a step."""
TYPICAL_OF = 20_000
"""The typical step, which a prediction is compared with, is that of so many last steps."""


def headline(run: RunConfig, plan: Plan, peak_flops: float, prediction: Prediction | None) -> str:
    """Return what is trained on what, and its prediction, in lines that fit a terminal of 80 columns."""
    processes = counted(plan.world_size, "process", "es")
    lines = [
        f"argosy train  {run.name}  {model_name(run.model)} ({parameters(run.model) / 1e6:.1f}M parameters)",
        *_wrapped_plan(f" on {processes}: ", str(plan)),
        f" matmul peak {peak_flops / 1e9:.0f} GFLOP/s",
        f" a step that is not finite or an outlier {BAD_STEPS[run.resilience.on_bad_step]}",
        *_user_code(run),
    ]
    if plan.has_servers:
        lines.append(f" not deterministic: {ASYNCHRONOUS}; no run repeats its numbers")
    if prediction:
        lines.append(f" predicted: {prediction.in_words()}")
    return "\n".join(lines)


def _user_code(run: RunConfig) -> Iterator[str]:
    """Yield a line for each file of the user's code: what it declares."""
    for code in run.extend.code:
        kinds = Counter(declaration.kind for declaration in code.declarations)
        declared = ", ".join(counted(count, kind) for kind, count in kinds.items())
        yield f" {code.name} ({code.sha256[:8]}): {declared}"
    for declaration in run.not_deterministic:
        yield f" not deterministic: {declaration}. No replay or resumed run repeats its numbers bit for bit"


def _wrapped_plan(head: str, plan: str) -> Iterator[str]:
    """Yield `plan` after `head` in lines of at most COLUMNS, which end at its commas."""
    for part in plan.split(","):
        if len(head) + len(part) + 1 > REPORT_COLUMNS:
            yield head
            head = "   "
        head += part + ","
    yield head.removesuffix(",")


def write_report(
    run: RunConfig,
    run_dir: Path,
    data: OpenData,
    held_out: HeldOut,
    score: Score | None,
    progress: Progress,
    plan: Plan,
    prediction: Prediction | None,
    machine: Cluster | None,
    device: torch.device,
    facts: dict[str, Any],
) -> None:
    """Write report.json and print the run's result (rank 0 only).

    machine: what the run's devices are, if known; device: the one that writes the sample, if it has the room.
    """
    finished = facts["status"] == "finished"
    validation, sample = None, None
    if score is not None and finished:
        known = asdict(score)
        if score.accuracy is None:
            known["unigram_bits_per_byte"] = unigram_score(data.sources, held_out, run.model.vocab_size).bits_per_byte
        validation = {name: value for name, value in known.items() if value is not None}
    is_worker = plan.has_servers
    if run.evaluate.sample_prompt and finished and not is_worker:  # the servers have the checkpoints
        sample = _sample(run, run_dir, data, device)
    starts = _starts(run_dir)
    since = plan_since(starts)
    measured = StepFigures(since, [(start["step"], start.get("world_size", 1)) for start in starts])
    found = totals(measured.steps(Metrics(run_dir)), run.train.batches.at, since)
    if found is None:
        return  # stopped before the first step: there is nothing to report
    if is_worker:  # its lines count the steps and tokens of all workers
        found["steps"], found["tokens"] = measured.count, measured.count * run.tokens_per_step
    events = EventLog(run_dir / "events")
    events.refresh()
    so_far = timeline(events.events, time.time(), None)
    since_s = time.time() - _first_start(run_dir), so_far.running_s
    wall_s, running_s = (max(each, found["seconds"]["step"]) for each in since_s)  # the clock may have been set back
    price = price_of(machine, run.observe.energy)
    report = Report(
        name=run.name,
        run_dir=run_dir,
        wall_s=round(wall_s, 3),
        goodput=round(measured.counted_s / running_s, 4),
        validation=validation,
        sample=sample,
        plan=str(plan),
        predicted=predicted_beside_measured(run, plan, prediction, measured, facts),
        energy=energy_of_run(
            run_dir,
            run.observe.energy,
            machine,
            RunSoFar(
                found["tokens"],
                _full_steps(run, found),
                measured.device_s,
                plan.world_size,
                None if price is None else so_far.money(price),
            ),
            None if prediction is None else prediction.step_s,
        ),
        not_deterministic=(
            *(f"{declaration} ({declaration.place})" for declaration in run.not_deterministic),
            *((ASYNCHRONOUS,) if is_worker else ()),
        ),
        **found,
        **facts,
    )
    try:
        report.save(run_dir)
    except OSError as problem:
        raise StorageError(
            f"{run_dir}: the report could not be written ({problem}). The state is saved: free some space, and run the "
            "same command again."
        ) from None
    progress.close()
    if report.status == "stopped" or run.launch.nodes > 1:  # else who started this process says more (launch.ending)
        progress.say(report.in_words())


class StepFigures:
    """Values of the lines of steps beside their totals."""

    def __init__(self, since: int, sizes: Sequence[tuple[int, int]] = ()):
        """`since`: the step from which on the plan is the one that the run ended with. `sizes`: first step and ranks of
        each world, in order."""
        self._since, self._sizes = since, sizes
        self.count = self.memory_bytes = 0
        self.counted_s = self.device_s = 0.0
        self.newest: deque[dict[str, Any]] = deque(maxlen=TYPICAL_OF)
        """The last steps under that plan."""

    def steps(self, metrics: Metrics) -> Iterator[dict[str, Any]]:
        """Yield the lines of steps, and take note of them."""
        for record in metrics.each():
            if "loss" not in record:
                continue
            self.count += 1
            self.counted_s += record["step_time_s"]
            self.device_s += record["seconds"]["step"] * self._size_at(record["step"])
            if record["step"] >= self._since and not record.get("profiled"):
                self.newest.append(record)
                self.memory_bytes = max(self.memory_bytes, record["memory_bytes"])
            yield record

    def _size_at(self, step: int) -> int:
        """Return the ranks of the world that made `step`: a later world makes steps of earlier ones again."""
        return next((size for first, size in reversed(self._sizes) if first <= step), 1)


def predicted_beside_measured(
    run: RunConfig, plan: Plan, prediction: Prediction | None, measured: StepFigures, facts: dict[str, Any]
) -> Reconciled | None:
    """Return the measured steps under `plan` beside their prediction, which is for the whole batch; None without."""
    batches = run.train.batches
    steps = [record for record in measured.newest if batches.at(record["step"]) == batches.largest]
    if prediction is None or not steps:
        return None
    memory_bytes = measured.memory_bytes - facts["memory_before_bytes"]
    sent = typical_bytes(steps)
    steps = [record for record in steps if record["step"] >= run.sync.from_step] or steps
    update_s = typical_update_s(steps) if plan.has_servers else None
    waits_s = typical_round_wait_s(steps) if run.sites and update_s is None else None
    return reconcile(prediction, plan, typical(steps), memory_bytes, facts["device"] == "cpu", sent, update_s, waits_s)


def _full_steps(run: RunConfig, found: dict[str, Any]) -> float:
    """Return the steps made, those of a batch-size ramp counted by their share of the largest batch."""
    return found["tokens"] / run.tokens_per_step if run.train.batch_ramp else float(found["steps"])


def _sample(run: RunConfig, run_dir: Path, data: OpenData, device: torch.device) -> str:
    """Return text that the model of the checkpoint just saved writes, whole on this process under any layout."""
    choice = store.newest_whole(run_dir, check=problem_of)
    assert choice is not None
    if is_accelerator(device) and free_bytes(device) < SAMPLE_ROOM * parameters(run.model):
        device = CPU
    model = load_decoder(run, choice.checkpoint, device, torch.float32)
    prompt = run.evaluate.sample_prompt or ""
    ids = data.tokenizer.encode_prompt(prompt)
    room = min(SAMPLE_LENGTH, run.model.max_seq_len - len(ids))
    written = sample_tokens(model, ids, room, temperature=0.8, top_p=0.95, seed=run.seed, stop=(data.eod_id,))
    return prompt + data.tokenizer.decode(list(written), ids)


def _first_start(run_dir: Path) -> float:
    """Return when an agent, or without agents rank 0, was started first, in seconds since 1970."""
    events = run_dir / "events"
    begun = (next(each_line(path), None) for path in (*events.glob("launcher*.jsonl"), events / "rank-0.jsonl"))
    return min(float(event["time_s"]) for event in begun if event is not None)


def _starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of rank 0's starts, in order."""
    return [event for event in each_line(run_dir / "events" / "rank-0.jsonl") if event["event"] == "start"]

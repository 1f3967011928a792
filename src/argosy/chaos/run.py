"""Chaos: train a run twice, undisturbed and while its processes are killed, and compare losses and weights.

Which faults come, and when, follows from a seed: times are those of a Poisson process, so that some faults meet a run
that has not yet recovered from the last. Most come from outside (`campaign`), some are fault points inside
(`argosy.faults`). The times to notice a fault and to train again are read from the event log and from heartbeats. The
ledger of samples, read from a run's metrics, tells which were trained on or skipped: each of them once.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from argosy.chaos.campaign import KINDS, Campaign, InjectedFault, PlannedFault, command_of, is_alive
from argosy.checkpoint.boxes import PLACES
from argosy.checkpoint.store import committed
from argosy.errors import UserError
from argosy.faults import FAULTS_VARIABLE
from argosy.observe.events import each_line
from argosy.processes.child import wait_until
from argosy.supervise.scratch import SCRATCH

Range = tuple[int, int]
"""The first sample, and the one after the last."""


@dataclass(frozen=True)
class Ledger:
    """The samples of a run, taken or skipped. `data.order` numbers them 0, 1, 2, ..."""

    committed: int
    """The number of samples that updates were made from."""
    skipped: tuple[Range, ...]
    """Samples of bad steps."""
    problems: tuple[str, ...]
    """A sentence for each range that was taken twice, or left out but not listed as skipped; there should be none."""


def read_ledger(records: Iterable[dict[str, Any]]) -> Ledger:
    """Return the ledger that the lines of metrics.jsonl make up (as `Metrics.each` gives them).

    A step's line says at which sample it begins (`first_sample`), how many it has (`samples`), and which were skipped
    before or among them (`samples_skipped`).
    """
    skipped: list[Range] = []
    taken: list[Range] = []
    for record in records:
        if "first_sample" in record:
            skipped += [(first, stop) for first, stop in record.get("samples_skipped", [])]
            taken += _taken(record)
    problems = []
    for (_, end), (start, stop) in pairwise(sorted([(0, 0), *skipped, *taken])):
        if start > end:
            problems.append(f"samples {end} to {start - 1} are missing")
        elif start < end:
            problems.append(f"samples {start} to {min(end, stop) - 1} appear twice")
    return Ledger(sum(stop - first for first, stop in taken), tuple(skipped), tuple(problems))


def _taken(record: dict[str, Any]) -> Iterator[Range]:
    """Yield the ranges that a step's samples are in."""
    start, left = record["first_sample"], record["samples"]
    for first, stop in sorted(record.get("samples_skipped", [])):
        if first < start:
            continue
        end = min(first, start + left)
        if end > start:
            yield start, end
        start, left = stop, left - max(0, end - start)
    if left:
        yield start, start + left


STEP_POINTS = ("forward", "bucket", "exchange", "commit", "optimizer")
SAVE_POINTS = ("snapshot", "save", "rename", "renamed")
FIRST_ONLY = ("rename", "renamed")
"""Points that only rank 0's processes reach."""
OF_A_PROCESS = ("worker_died", "killed", "writer_died")
"""Events that name the process that was killed."""
LIMIT, LEAST_LIMIT_S = 20, 900.0
"""A disturbed run may take this many times as long as an undisturbed one, and at least this long."""
SCATTER_S = 5.0
"""Time that a run's processes may take to end after it."""


def draw(seed: int, seconds: float, every_s: float, kinds: Sequence[str] = tuple(KINDS)) -> list[PlannedFault]:
    """Draw faults of a Poisson process, one in `every_s` on average, none in the first second; the same for a seed."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise UserError(f"--kinds {unknown[0]}: there are {', '.join(KINDS)}.")
    chance, faults, at_s = random.Random(seed), [], 1.0
    while (at_s := at_s + chance.expovariate(1 / every_s)) < seconds:
        (kind,) = chance.choices(kinds, [KINDS[kind].weight for kind in kinds])
        faults.append(PlannedFault(round(at_s, 3), kind, chance.random()))
    return faults


def fault_points_of(faults: Sequence[PlannedFault], steps: int, ranks: int) -> str:
    """Return the faults of kind "point" as a text for ARGOSY_FAULTS, each at a step, a rank and a fault point."""
    points = []
    for fault in faults:
        if fault.kind == "point":
            chance = random.Random(fault.pick)
            step, point = 1 + int(chance.random() * max(1, steps - 2)), chance.choice(STEP_POINTS + SAVE_POINTS)
            when = "after" if point in SAVE_POINTS else "step"
            rank = 0 if point in FIRST_ONLY else chance.randrange(ranks)
            points.append(f"kill@{point}:{when}={step},rank={rank}")
    return ";".join(points)


class FaultOutcome(BaseModel):
    """A fault that was injected, and what followed."""

    model_config = ConfigDict(frozen=True)

    kind: str
    what: str
    at_s: float
    """Seconds after the first step."""
    pid: int
    step: int
    """The step at that time."""
    seen_s: float | None
    """Seconds until the event log shows it; None if it never did."""
    again_s: float | None
    """Seconds until a step was finished in a new generation; None if none was, or none was needed."""
    steps_lost: int | None
    """Steps that had to be repeated."""


class ChaosReport(BaseModel):
    """A disturbed run compared with an undisturbed one."""

    model_config = ConfigDict(frozen=True)

    seed: int
    finished: bool
    """True if the disturbed run made its last step."""
    steps: int
    reference_s: float
    """Seconds that the undisturbed run's steps took."""
    chaos_s: float
    """Seconds from the disturbed run's first step to its end."""
    goodput: float
    """Undisturbed over disturbed seconds for the same steps: the share of useful time (ETTR)."""
    generations: int
    """Worlds that were formed."""
    starts: int
    """Number of times that the command was given."""
    same_losses: bool
    same_weights: bool
    """True if the last checkpoints of both are the same, bit for bit."""
    differences: tuple[str, ...]
    """The first few weights and losses that differ."""
    ledger: tuple[str, ...]
    """Samples that were used twice or skipped."""
    left_behind: tuple[str, ...]
    """Processes and shared memory that outlived the run."""
    faults: tuple[FaultOutcome, ...]
    missed: int
    """Faults for which there was no process when they were due, or that would have come after the run's end."""

    @property
    def is_passed(self) -> bool:
        """True if the run had the same losses and weights, and left nothing behind."""
        return self.finished and self.same_weights and self.same_losses and not (self.ledger or self.left_behind)

    def in_words(self) -> str:
        lines = [
            f"chaos, seed {self.seed}: {len(self.faults)} faults in {self.chaos_s:.0f} s, {self.steps} steps; goodput "
            f"{self.goodput:.0%} (undisturbed, all take {self.reference_s:.0f} s)",
            f"generations {self.generations}, starts of the command {self.starts}, faults that met no process "
            f"{self.missed}",
            "  fault         times   seen after s (median, worst)   training after s   steps lost",
        ]
        for kind in dict.fromkeys(fault.kind for fault in self.faults):
            faults = [fault for fault in self.faults if fault.kind == kind]
            lines.append(
                f"  {kind:12} {len(faults):6}   {_both([b.seen_s for b in faults]):>28}   "
                f"{_both([b.again_s for b in faults]):>16}   {_both([b.steps_lost for b in faults]):>10}"
            )
        same = {True: "the same, bit for bit", False: "NOT the same"}
        lines.append(f"final weights {same[self.same_weights]}; losses {same[self.same_losses]}")
        lines += [f"  {problem}" for problem in (*self.differences, *self.ledger, *self.left_behind)]
        nothing = "no fault met it, so it shows nothing: try a smaller --every-s, or a longer run"
        passed = "passed" if self.faults else nothing
        lines.append(passed if self.is_passed else "FAILED" + ("" if self.finished else ": the run did not end"))
        return "\n".join(lines)


def _both(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.2f}, {max(known):.2f}" if known else "-"


def run_chaos(
    run_file: Path, folder: Path, *, seed: int, every_s: float, kinds: Sequence[str], say: Callable[[str], None] = print
) -> ChaosReport:
    """Train `run_file` in folder/reference, unless that is done already, and disturbed in folder/seed-SEED; compare.

    Raises: UserError if the reference fails, a kind is unknown, or folder/seed-SEED exists.
    """
    reference, chaos = folder / "reference", check_chaos(folder, seed, kinds)
    say(f"training undisturbed in {reference}")
    _train_undisturbed(run_file, reference)
    took_s = [record["seconds"]["step"] for record in each_line(reference / "metrics.jsonl") if "loss" in record]
    reference_s = sum(took_s)
    ranks = next(e["world_size"] for e in events_of(reference) if e["event"] == "start")
    # Twice the time, since a disturbed run takes longer; faults after its end are left out.
    faults = draw(seed, 2 * reference_s, every_s, kinds)
    command = [sys.executable, "-m", "argosy", "train", str(reference / "run.toml"), "--run-dir", str(chaos)]
    points = fault_points_of([fault for fault in faults if fault.at_s < reference_s], len(took_s), ranks)
    limit_s = max(LEAST_LIMIT_S, LIMIT * reference_s)
    campaign = Campaign(command, chaos, faults, {FAULTS_VARIABLE: points} if points else {}, limit_s)
    say(f"training again in {chaos}, with up to {len(faults)} faults")
    campaign.run()
    return _report(campaign, reference, reference_s, seed)


def check_chaos(folder: Path, seed: int, kinds: Sequence[str]) -> Path:
    """Return the folder of the disturbed training. Raises: UserError if it is there, or a kind is unknown."""
    draw(seed, 1.0, 1.0, kinds or tuple(KINDS))
    chaos = folder / f"seed-{seed}"
    if chaos.exists():
        raise UserError(f"{chaos} is there already. Remove it, or try another --fault-seed or --folder.")
    return chaos


def _train_undisturbed(run_file: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "argosy", "train", str(run_file), "--run-dir", str(folder)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"{run_file} does not train without faults:\n{done.stderr.strip()}")


def _report(campaign: Campaign, reference: Path, reference_s: float, seed: int) -> ChaosReport:
    began_s = campaign.began_s or campaign.ended_s
    events = events_of(campaign.run_dir)
    injected = sorted([*campaign.injected, *_injected_inside(events, campaign)], key=lambda d: d.time_s)
    losses, wanted = _losses(campaign.run_dir), _losses(reference)
    weights = list(weight_differences(reference, campaign.run_dir)) if campaign.exit_code == 0 else ["no weights"]
    chaos_s = campaign.ended_s - began_s
    differing = [step for step in sorted(wanted | losses) if wanted.get(step) != losses.get(step)]
    return ChaosReport(
        seed=seed,
        finished=campaign.exit_code == 0,
        steps=len(losses),
        reference_s=round(reference_s, 2),
        chaos_s=round(chaos_s, 2),
        goodput=round(reference_s * len(losses) / max(1, len(wanted)) / chaos_s, 4) if chaos_s > 0 else 0.0,
        generations=sum(event["event"] == "generation" for event in events),
        starts=campaign.starts,
        same_losses=not differing,
        same_weights=not weights,
        differences=(*weights[:5], *(f"loss of step {step}" for step in differing[:5])),
        ledger=read_ledger(each_line(campaign.run_dir / "metrics.jsonl")).problems[:5],
        left_behind=tuple(left_behind(campaign.pids | campaign.workers_seen)),
        faults=tuple(outcome_of(d, events, campaign, began_s) for d in injected),
        missed=len(campaign.faults) - len(injected),
    )


def _injected_inside(events: Sequence[dict[str, Any]], campaign: Campaign) -> Iterator[InjectedFault]:
    """Yield the faults at fault points, as they recorded themselves."""
    for event in events:
        if event["event"] == "fault":
            fault = PlannedFault(event["time_s"] - (campaign.began_s or 0.0), "point", 0.0)
            what = f"{event['fault']} (rank {event['rank']})"
            yield InjectedFault(fault, what, event["pid"], event["time_s"], event["generation"], event["step"] or 0)


def outcome_of(
    injected: InjectedFault, events: Sequence[dict[str, Any]], campaign: Campaign, began_s: float
) -> FaultOutcome:
    """Return what came of a fault: after how many seconds it was seen and steps were made again, and steps lost."""
    kind = KINDS[injected.fault.kind]
    seen = (
        event["time_s"]
        for event in events
        if event["event"] in kind.seen_as
        and event["time_s"] >= injected.time_s - 0.002  # events round to a millisecond
        and (event["event"] not in OF_A_PROCESS or event["pid"] == injected.pid)
    )
    seen_s = min(seen, default=None)
    again = None
    if kind.breaks_world and (injected.fault.kind != "point" or injected.pid in campaign.workers_seen):
        again = next(
            (made for made in campaign.made if made.generation > injected.generation and made.time_s > injected.time_s),
            None,
        )
    return FaultOutcome(
        kind=injected.fault.kind,
        what=injected.what,
        at_s=round(injected.time_s - began_s, 3),
        pid=injected.pid,
        step=injected.step,
        seen_s=None if seen_s is None else round(max(0.0, seen_s - injected.time_s), 3),
        again_s=None if again is None else round(again.time_s - injected.time_s, 3),
        steps_lost=None if again is None else max(0, injected.step - again.step),
    )


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of all the run's processes, by time."""
    found = [event for path in (run_dir / "events").glob("*.jsonl") for event in each_line(path)]
    return sorted(found, key=lambda event: event["time_s"])


def _losses(run_dir: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in each_line(run_dir / "metrics.jsonl") if "loss" in record}


def left_behind(pids: set[int]) -> Iterator[str]:
    """Yield processes of the run that still live some seconds after its end, and their shared memory."""
    wait_until(lambda: not any(map(is_alive, pids)), SCATTER_S, every_s=0.1)
    for pid in sorted(pids):
        if is_alive(pid):
            yield f"process {pid} is still alive: {' '.join(command_of(pid))[:80]}"
        for path in SCRATCH.glob(f"argosy-{pid}-*"):
            yield f"{path} was left"


Bytes = npt.NDArray[np.uint8]


def weight_differences(one: Path, other: Path) -> Iterator[str]:
    """Yield what differs, in any bit, between the newest checkpoints of two runs, whatever their layouts."""
    newest = [saved[-1] for saved in map(committed, (one, other)) if saved]
    if len(newest) < 2:
        yield "a checkpoint is missing"
        return
    if newest[0].step != newest[1].step:
        yield f"the last checkpoints are of steps {newest[0].step} and {newest[1].step}"
        return
    ours, theirs = (_tensors(checkpoint.folder) for checkpoint in newest)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs or not np.array_equal(ours[name], theirs[name]):
            yield name


def _tensors(folder: Path) -> dict[str, Bytes]:
    """Return the tensors of a checkpoint by name, put together from its shard files; shape [*tensor, bytes of one]."""
    wholes: dict[str, Bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, whole, offset, part in _parts(path):
            if name not in wholes:
                wholes[name] = np.zeros((*whole, part.shape[-1]), np.uint8)
            places = tuple(slice(start, start + size) for start, size in zip(offset, part.shape[:-1], strict=True))
            wholes[name][places] = part
    return wholes


def _parts(path: Path) -> Iterator[tuple[str, list[int], list[int], Bytes]]:
    """Yield the name, whole shape, offset and bytes of each box of a shard file.

    The format: 8 bytes of length, a JSON header, the numbers (huggingface/safetensors, Format).
    """
    data = np.memmap(path, np.uint8, mode="r")
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:begin].tobytes())
    places = json.loads(header.pop("__metadata__", {}).get(PLACES, "{}"))
    for key, entry in header.items():
        shape, (start, end) = entry["shape"], entry["data_offsets"]
        name, whole, offset = places.get(key) or (key, shape, [0] * len(shape))
        elements = int(np.prod(shape, dtype=np.int64))
        width = (end - start) // elements if elements else 1
        yield name, whole, offset, data[begin + start : begin + end].reshape(*shape, width)

"""Steps that are recorded with torch's profiler, on some ranks, and summed up when the last of them is done."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function

from argosy.accelerator import allocations, profiler_activities
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyWarning
from argosy.files import atomic_write
from argosy.observe.clock import StepClock
from argosy.observe.collectives import CollectiveMarks
from argosy.observe.heartbeat import Heartbeat
from argosy.observe.trace_summary import PART_MARK, STEP_MARK, profile_in_words, summary
from argosy.parallel.world import World
from argosy.plan.calibration import CALIBRATED_PARTS, part_of
from argosy.plan.plan import Plan
from argosy.processes.supervisor import repeated
from argosy.training.parts import Parts
from argosy.training.records import Records
from argosy.training.services.service import Service

PROFILES_FOLDER = "profiles"
COMPRESSION = 3
"""Level of gzip: a trace shrinks to a tenth at any level, and this one is fast."""
ADVANCE_S = 1.0
"""Interval of progress signals of a rank that writes its trace: the others wait for it in a collective meanwhile."""
OF_AXIS = {"tp": "tensor", "cp": "context", "ep": "experts", "pp": "pipeline"}
"""Axis -> the prediction's category of its time; gradients and updated values go along the others."""


class Profiling(Service):
    """One process's part in the profile of a run.

    Nothing of it changes what is computed, and nothing that fails in it ends the run.
    """

    @classmethod
    def of(cls, parts: Parts) -> Profiling:
        axes = parts.state.model.meshes.axis_of_groups()
        return cls(parts.run, parts.plan, parts.world, parts.run_dir, parts.records, parts.clock, parts.heartbeat, axes)

    def __init__(
        self,
        run: RunConfig,
        plan: Plan,
        world: World,
        run_dir: Path,
        records: Records,
        clock: StepClock,
        heartbeat: Heartbeat,
        axes: Mapping[str, str],
    ):
        """axes: name of a process group -> the axis that it is along (`Meshes.axis_of_groups`)."""
        self._settings, self._plan, self._world, self._records = run.observe.profile, plan, world, records
        self._clock, self._heartbeat, self._axes = clock, heartbeat, axes
        asked = self._settings.range
        self._folder = run_dir / PROFILES_FOLDER / f"step-{asked.start:08d}-{asked.stop:08d}" if asked else run_dir
        self._steps: list[int] = []
        self._seconds: list[Mapping[str, float]] = []
        self._profile: profile | None = None
        self._held = ExitStack()
        self._step = ExitStack()

    def before_step(self, step: int, steps: int | None) -> None:
        """Begin to record this step, if it is one of those asked for."""
        if step not in self._settings.range:
            if self._steps:  # the run went back from there: they are recorded when they are made again
                self.abandon()
            return
        if not self._steps and self._is_chosen:
            with self._clock.time("check"):
                self._start()
        if step not in self._steps:
            self._steps.append(step)
        self._step.close()  # a step that is repeated
        if self._profile is not None:
            self._step.enter_context(record_function(f"{STEP_MARK}{step}"))

    def line(self, step: int) -> Mapping[str, Any]:
        """Mark the line of a step that is recorded on any rank: its times are not those of other steps."""
        return {"profiled": True} if self._steps else {}

    def end_step(self, step: int, seconds: Mapping[str, float]) -> None:
        """End a step that was applied. After the last one write what was recorded."""
        if not self._steps:
            return
        self._step.close()
        self._seconds.append(seconds)
        if step + 1 not in self._settings.range:
            self.finish()

    def finish(self) -> Mapping[str, Any]:
        """Write what was recorded so far, if anything was, and record no more."""
        if not self._steps:
            return {}
        with self._clock.time("check"), self._records.progress.during("writing the profile"):
            mine = self._write() if self._profile is not None else ""
            everyone = self._world.gather(mine, str)
            if self._world.is_first:
                self._sum_up({rank: json.loads(text) for rank, text in enumerate(everyone) if text})
        self._steps, self._seconds = [], []
        return {}

    def abandon(self) -> None:
        """Write nothing of what was recorded so far: this world is over, or the run went back."""
        with suppress(Exception):
            self._stop()
        self._steps, self._seconds = [], []

    @property
    def _is_chosen(self) -> bool:
        if (chosen := self._settings.chosen) is not None:
            return self._world.rank in chosen
        return self._settings.ranks == "all" or os.environ.get("LOCAL_RANK", "0") == "0"

    def _start(self) -> None:
        activities = profiler_activities(self._world.device)
        # Kineto announces each start and end on the terminal, at its level 5.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        made = profile(activities=activities, profile_memory=self._settings.memory, with_stack=self._settings.stacks)
        try:
            made.start()
        except RuntimeError as problem:  # the user's own code records already
            self._warn(f"cannot be recorded: {problem}")
            return
        self._profile = made
        self._held.enter_context(CollectiveMarks(self._axes))
        self._clock.mark = lambda category: record_function(f"{PART_MARK}{category}")

    def _stop(self) -> profile | None:
        """End the recording. Return it; None if there was none."""
        done, self._profile = self._profile, None
        self._step.close()
        self._held.close()
        self._clock.mark = nullcontext
        if done is not None:
            done.stop()
        return done

    def _write(self) -> str:
        """Write this rank's files. Return what the summary says of it, as JSON."""
        rank = self._world.rank
        try:
            with repeated(self._heartbeat.advance, ADVANCE_S, "argosy-profile"):  # one call takes long
                done = self._stop()
                assert done is not None
                self._folder.mkdir(parents=True, exist_ok=True)
                found = summary(self._trace(done, self._folder / f"rank-{rank}.json.gz"))
                if self._settings.memory and (segments := allocations(self._world.device)) is not None:
                    self._write_memory(self._folder / f"rank-{rank}.memory.pickle", segments)
        except (OSError, RuntimeError, ValueError, KeyError) as problem:
            self._warn(f"could not be written: {problem}")
            return json.dumps({"problem": str(problem)})
        clocks = self._seconds or [{}]
        measured = {
            name: sum(seconds.get(c, 0.0) for seconds in clocks for c in part.measured) / len(clocks)
            for name, part in CALIBRATED_PARTS.items()
        }
        return json.dumps({**found, "parts": {name: {"measured": value} for name, value in measured.items()}})

    @staticmethod
    def _trace(done: profile, path: Path) -> list[dict[str, Any]]:
        """Write the trace, compressed, and return its events."""
        plain = path.with_suffix(".partial")
        try:
            done.export_chrome_trace(str(plain))
            with (
                plain.open("rb") as file,
                atomic_write(path) as kept,
                gzip.open(kept, "wb", compresslevel=COMPRESSION) as packed,
            ):
                shutil.copyfileobj(file, packed, 1 << 20)
            events = json.loads(plain.read_bytes())["traceEvents"]
        finally:
            plain.unlink(missing_ok=True)
        assert isinstance(events, list)
        return events

    @staticmethod
    def _write_memory(path: Path, segments: list[Any]) -> None:
        """Write what the allocator holds (`accelerator.allocations`)."""
        with atomic_write(path) as file:
            pickle.dump({"segments": segments, "device_traces": []}, file)

    def _sum_up(self, ranks: dict[int, dict[str, Any]]) -> None:
        """Write summary.json beside the traces, an event, and what a person reads. Only rank 0 calls it."""
        prediction = self._records.prediction
        predicted = dict(prediction.seconds) if prediction else {}
        for found in ranks.values():
            _put_beside(found, predicted, self._plan)
        steps = [self._steps[0], self._steps[-1]]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._folder / "summary.json") as file:
                record = {"steps": steps, "plan": str(self._plan), "ranks": {str(rank): ranks[rank] for rank in ranks}}
                file.write(json.dumps(record, indent=1).encode() + b"\n")
        except OSError as problem:
            self._warn(f"could not be summed up: {problem}")
        self._records.tell("profile", steps=steps, ranks=sorted(ranks), folder=str(self._folder))
        self._records.progress.say(profile_in_words(steps, ranks, self._folder), "cyan")

    def _warn(self, what: str) -> None:
        warnings.warn(f"the profile of rank {self._world.rank} {what}. The run goes on.", ArgosyWarning, stacklevel=2)


def _put_beside(found: dict[str, Any], predicted: Mapping[str, float], plan: Plan) -> None:
    """Put the planner's figures beside what one rank recorded, part by part and axis by axis."""
    if not predicted or "parts" not in found:
        return
    of_part = dict.fromkeys(CALIBRATED_PARTS, 0.0)
    for category, value in predicted.items():
        of_part[part_of(category, plan)] += value
    for name, figures in found["parts"].items():
        figures["predicted"] = round(of_part[name], 9)
    for axis, figures in found["communication"].items():
        figures["predicted_exposed_seconds"] = round(predicted.get(OF_AXIS.get(axis, "gradients"), 0.0), 9)

"""The facts that conclusions about a run are drawn from: its figures as columns, and what follows directly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from argosy.config.schema import RunConfig
from argosy.observe.events import plan_since
from argosy.observe.heartbeat import BESIDE
from argosy.plan.cost.prediction import Prediction
from argosy.plan.plan import Plan
from argosy.watch.columns import Floats, middle_half
from argosy.watch.timeline import ENDED_RUN_STATES, PhaseSpan, RunTimeline, State, timeline


class Table(Protocol):
    """Columns by key: of a reader, or a dictionary of arrays."""

    def __getitem__(self, key: str, /) -> Floats:
        """Return the column; KeyError or NaN where there is none."""
        ...

    def keys(self) -> Iterable[str]:
        """Return the names of columns."""
        ...


Event = Mapping[str, Any]

RECENT = 200
"""Conclusions about the present are drawn from so many last steps: seconds of small runs, an hour of large ones."""
WARMING_STEPS = 3
"""First steps of a world, which compile, warm up and fill caches."""


@dataclass(frozen=True)
class RankTable:
    """The last steps of all ranks, by the nodes' lines; R ranks, S steps."""

    numbers: NDArray[np.int64]
    """Shape: (R,), ascending."""
    nodes: tuple[str, ...]
    """Each rank's node."""
    steps: NDArray[np.int64]
    """The steps that own_s tells of. Shape: (S,), ascending."""
    own_s: Floats
    """Seconds of own work, without waits for others; NaN where nobody said. Shape: (S, R)."""
    seconds: Mapping[str, Floats] = field(default_factory=dict)
    """Category of the clock -> mean seconds a step. Shape: (R,)."""
    memory_bytes: Floats | None = None
    """Peak memory. Shape: (R,)."""
    microbatches: Floats | None = None
    """Microbatches of each rank in a step; None: all ran as many. Shape: (S, R)."""


@dataclass(frozen=True)
class DeviceSeen:
    """The newest figures of a device, means over the last minutes; None where nobody measures them."""

    node: str
    ranks: tuple[int, ...]
    name: str = ""
    utilisation: float | None = None
    """0 to 1."""
    temperature_c: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class DiskSeen:
    """The free space of a node's disk over the last lines, at most an hour; by time."""

    node: str
    time_s: Floats
    free_bytes: Floats


@dataclass(frozen=True)
class RunFacts:
    """A run as its folder shows it at one moment."""

    now_s: float
    """Seconds since 1970; of a run that has ended, any later time."""
    state: State = "training"
    run: RunConfig | None = None
    plan: Plan | None = None
    prediction: Prediction | None = None
    report: Mapping[str, Any] | None = None
    steps: Table = field(default_factory=dict[str, Floats])
    """Key of metrics.jsonl, nested ones with dots -> its value in each line of a step; NaN where it is missing."""
    evaluations: Table = field(default_factory=dict[str, Floats])
    """The same of the lines of evaluations."""
    events: Sequence[Event] = ()
    """The events of all processes, by time."""
    ranks: RankTable | None = None
    devices: Sequence[DeviceSeen] = ()
    disks: Sequence[DiskSeen] = ()
    power_w: float | None = None
    """Mean power of all nodes over their last lines; None if they do not tell."""
    power_source: str = ""
    """nvml, rapl, or estimate."""
    folder: str = "runs/NAME"
    """The run's folder, as a user types it."""

    def __len__(self) -> int:
        return len(_column(self.steps, "step"))

    def column(self, key: str, part: slice | None = None) -> Floats:
        """Return the values of a key in these steps, default all; NaN if nobody wrote it."""
        values, part = _column(self.steps, key), slice(None) if part is None else part
        return values[part] if len(values) else np.full(len(range(*part.indices(len(self)))), np.nan)

    def evaluated(self, key: str) -> Floats:
        return _column(self.evaluations, key)

    def keys(self, beginning: str) -> list[str]:
        """Return the keys of steps that begin so."""
        _column(self.steps, beginning)  # a reader reads a group of keys when one of them is asked for
        return [key for key in self.steps.keys() if key.startswith(beginning)]  # noqa: SIM118 (not always a dict)

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds, by time."""
        found = [event for kind in kinds for event in self._by_kind.get(kind, ())]
        return found if len(kinds) == 1 else sorted(found, key=lambda event: float(event["time_s"]))

    @cached_property
    def _by_kind(self) -> dict[str, list[Event]]:
        kinds: dict[str, list[Event]] = {}
        for event in self.events:
            kinds.setdefault(str(event.get("event")), []).append(event)
        return kinds

    @cached_property
    def starts(self) -> list[Event]:
        """The starts of rank 0, by time."""
        return [event for event in self.of("start") if event.get("process", "rank-0") == "rank-0"]

    @cached_property
    def plan_since(self) -> int:
        """The step from which on the plan in force has been in force."""
        return plan_since(self.starts)

    @cached_property
    def warm(self) -> NDArray[np.bool_]:
        """True for each step that is not among the first of a world. Shape: (steps,)."""
        steps = self.column("step")
        warm = np.ones(len(steps), dtype=bool)
        for start in self.starts or [{"step": 0}]:
            first = int(np.searchsorted(steps, int(start["step"])))
            warm[first : first + WARMING_STEPS] = False
        return warm

    @cached_property
    def recent(self) -> slice:
        """The last `RECENT` steps under the plan in force and of one batch, without the first of the newest world."""
        newest = max([int(start["step"]) for start in self.starts[-1:]], default=0)
        from_step = max(newest + WARMING_STEPS, self.plan_since, *self._ramp_ends(is_over=True))
        first = int(np.searchsorted(self.column("step"), from_step))
        return slice(max(first, len(self) - RECENT), len(self))

    @property
    def has_whole_batch(self) -> bool:
        """True if the recent steps have the largest batch, for which steps are predicted."""
        return not self._ramp_ends(is_over=False)

    def _ramp_ends(self, is_over: bool) -> list[int]:
        """Return where stages of the batch-size ramp end: those that are over, or the others."""
        ramp = self.run.train.batch_ramp if self.run is not None else ()
        newest = float(self.column("step", slice(-1, None)).max(initial=-1.0))
        return [stage.until_step for stage in ramp if (stage.until_step <= newest) == is_over]

    @property
    def recent_count(self) -> int:
        return self.recent.stop - self.recent.start

    @cached_property
    def over(self) -> tuple[int, int]:
        """The first and the last recent step."""
        steps = self.column("step", self.recent)
        return (int(steps[0]), int(steps[-1])) if len(steps) else (0, 0)

    @cached_property
    def step_s(self) -> float:
        """Median of the recent steps, without evaluations, checkpoints and checks; NaN without any."""
        return median(self.column("step_time_s", self.recent))

    @cached_property
    def wall_s(self) -> float:
        """Seconds from the first process to the newest line, without those in which nobody ran it."""
        return self._timeline.running_s if self.starts else float("nan")

    def running_s(self, begin_s: float, end_s: float) -> float:
        """Return the seconds between two times in which the run was not stopped."""
        pauses = ((max(begin_s, pause.begin_s), min(end_s, pause.end_s)) for pause in self._pauses)
        return max(0.0, end_s - begin_s) - sum(max(0.0, end - begin) for begin, end in pauses)

    @cached_property
    def continued_s(self) -> float:
        """Time at which the run last began to train after a stop; NaN if it has not begun."""
        began_s = max((pause.end_s for pause in self._pauses), default=-math.inf)
        since = [float(start["time_s"]) for start in self.starts if float(start["time_s"]) >= began_s]
        return since[0] if since else float("nan")

    @cached_property
    def device_hours(self) -> float:
        """Devices times hours in which the run held them, to the newest line, each world with as many as it had."""
        return self._timeline.device_hours

    def cost_so_far(self, price: float, currency: str) -> float:
        """Return the cost of these, each world's at its own price; at this one if it has none in this currency."""
        return self._timeline.money((price, currency))

    @cached_property
    def _pauses(self) -> list[PhaseSpan]:
        return [stretch for stretch in self._timeline.stretches if stretch.phase == "stopped"]

    @cached_property
    def _timeline(self) -> RunTimeline:
        times = self.column("time_s")
        return timeline(self.events, self.last_line_s, None, times[np.isfinite(times)])

    @cached_property
    def last_line_s(self) -> float:
        """Time of the newest line of a step, seconds since 1970; NaN if nobody knows."""
        times = self.column("time_s", slice(-1, None))
        if len(times) and np.isfinite(times[0]):
            return float(times[0])
        last = [float(event["time_s"]) for event in self.events[-1:]]
        return last[0] if last else float("nan")

    def mean_s(self, category: str, part: slice | None = None) -> float:
        """Return the mean seconds a step of a category of the clock, over the steps that tell; 0 if it is in none."""
        part = self.recent if part is None else part
        known = np.isfinite(self.column("seconds.step", part)).sum()
        return float(np.nansum(self.column(f"seconds.{category}", part)) / known) if known else 0.0

    @cached_property
    def known(self) -> tuple[int, int]:
        """The first and the last step of which all keys are known: of a long run these are the last ones."""
        known = np.flatnonzero(np.isfinite(self.column("seconds.step")))
        steps = self.column("step")
        return (int(steps[known[0]]), int(steps[known[-1]])) if len(known) else (0, 0)

    def share(self, *categories: str) -> float:
        """Return the share of categories in the recent steps, without what comes beside a step."""
        whole = self.mean_s("step") - sum(self.mean_s(name) for name in BESIDE)
        return sum(self.mean_s(name) for name in categories) / whole if whole > 0 else 0.0

    @cached_property
    def typical(self) -> dict[str, float]:
        """Seconds of a step by category: the mean over the middle half of the recent steps, as in a report."""
        names = [key.removeprefix("seconds.") for key in self.keys("seconds.")]
        return {name: self.typical_mean(f"seconds.{name}") for name in names if name not in ("step", *BESIDE)}

    def typical_mean(self, key: str) -> float:
        """Return the mean of a key over the middle half of the recent steps by their time; 0 where nobody wrote it."""
        return float(np.nansum(self.column(key, self.recent)[self._middle]) / max(1, len(self._middle)))

    @cached_property
    def _middle(self) -> NDArray[np.intp]:
        return middle_half(self.column("step_time_s", self.recent))

    @cached_property
    def steps_in_all(self) -> int | None:
        """The length of the run; None while a run in minutes does not know it."""
        lengths = [int(event["steps"]) for event in self.of("length")]
        planned = self.run.train.steps if self.run is not None else 0
        return planned or (lengths[-1] if lengths else None)

    @property
    def steps_left(self) -> int | None:
        """Steps that are still to be made; None if nobody knows."""
        if self.steps_in_all is None:
            return None
        done = int(self.column("step", slice(-1, None))[0]) + 1 if len(self) else 0
        return max(0, self.steps_in_all - done)

    @property
    def has_ended(self) -> bool:
        """True if nothing is trained any more."""
        return self.state in ENDED_RUN_STATES


def _column(table: Table, key: str) -> Floats:
    try:
        return np.asarray(table[key], dtype=float)
    except KeyError:
        return np.empty(0)


def batches_of(run: RunConfig | None, steps: Floats) -> Floats:
    """Return the batch of each of these steps; 1 without a run file."""
    if run is None:
        return np.ones(len(steps))
    batches = run.train.batches
    ends = [end for end, _ in batches.stages]
    return np.array(batches.all, dtype=float)[np.searchsorted(ends, steps, side="right")]


def median(values: Floats | Iterable[float]) -> float:
    """Return the median of the finite values; NaN without any."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    finite = array[np.isfinite(array)]
    return float(np.median(finite)) if len(finite) else float("nan")

"""Numbers by step as the page draws them: any keys, summed up in as many points as there is room for; where the time of
steps goes and what memory holds, beside what the plan predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.errors import UserError
from argosy.observe.heartbeat import BESIDE
from argosy.plan.calibration import CALIBRATED_PARTS
from argosy.plan.cost.estimate import seconds as in_words
from argosy.plan.hardware.devices import find_device
from argosy.plan.hardware.local_machine import device_named
from argosy.watch.columns import STEP_COLUMN, Columns, Floats, channels_in, finite_mean, middle_half
from argosy.watch.facts import batches_of
from argosy.watch.metrics_table import Preview
from argosy.watch.nodes import in_newest_world
from argosy.watch.reader import RunReader

MOST_SERIES_POINTS = 5000
MOST_SERIES = 64
STEP_SERIES_POINTS = 1000
"""Points of a series, by default."""
MOST_BAD = 1000
SHOWN_AS_BAD = ("loss", "grad_norm")
"""Numbers that each step has: where they are missing, they were not finite."""
NORMS_PREFIX = "norms."


@dataclass(frozen=True)
class Buckets:
    """Rows of a table in groups of neighbours."""

    rows: slice
    begins: npt.NDArray[np.intp]
    """First row of each group, counted from the first of `rows`."""

    @classmethod
    def of(cls, table: Columns, first: float | None, last: float | None, points: int) -> Buckets:
        """Return at most `points` groups of the rows of these steps, each of an equal stretch of steps."""
        rows = table.between(first, last)
        steps = table[STEP_COLUMN][rows]
        if len(steps) <= points:
            return cls(rows, np.arange(len(steps)))
        edges = np.linspace(steps[0], steps[-1] + 1, points + 1)[:-1]
        return cls(rows, np.unique(np.searchsorted(steps, edges)))

    def mean(self, values: Floats) -> Floats:
        """Return the mean of each group's numbers that are there; NaN if none is."""
        here = values[self.rows]
        if len(self.begins) == len(here):
            return here
        known = np.isfinite(here)
        sums = np.add.reduceat(np.where(known, here, 0.0), self.begins)
        counts = np.add.reduceat(known.astype(float), self.begins)
        return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)

    def least(self, values: Floats) -> Floats:
        return self._of(np.fmin, values)

    def most(self, values: Floats) -> Floats:
        return self._of(np.fmax, values)

    def _of(self, function: np.ufunc, values: Floats) -> Floats:
        here = values[self.rows]
        return here if len(self.begins) == len(here) else function.reduceat(here, self.begins)


def series(
    reader: RunReader | Preview,
    keys: Sequence[str],
    first: float | None = None,
    last: float | None = None,
    points: int = STEP_SERIES_POINTS,
) -> dict[str, Any]:
    """Return mean, least and most of the steps behind each of at most `points` points, for these keys.

    A key that the run does not have is left out. `is_preview`: the points are made of some steps, not of all. `bad`:
    steps whose loss or gradient norm was not finite, if asked for.
    """
    known = set(reader.keys())
    asked = [key for key in keys[:MOST_SERIES] if key in known]
    steps = reader.steps
    for key in asked:
        steps[key]  # what is not in memory yet is read, before rows are counted
    buckets = Buckets.of(steps, first, last, points)
    answer: dict[str, Any] = {
        "step": np.round(buckets.mean(steps[STEP_COLUMN])),
        "keys": {key: _summed_up(buckets, steps[key]) for key in asked if not key.startswith(NORMS_PREFIX)},
        "first": steps[STEP_COLUMN][0] if len(steps) else None,
        "last": steps[STEP_COLUMN][-1] if len(steps) else None,
        "is_preview": isinstance(reader, Preview),
        "bad": _bad_steps(steps, [key for key in asked if key in SHOWN_AS_BAD], buckets.rows),
    }
    if norms := [key for key in asked if key.startswith(NORMS_PREFIX)]:
        answer["norms"] = _norms(reader.norms, norms, first, last, points)
    return answer


def _summed_up(buckets: Buckets, values: Floats) -> dict[str, Floats]:
    return {"mean": buckets.mean(values), "min": buckets.least(values), "max": buckets.most(values)}


def _norms(table: Columns, keys: list[str], first: float | None, last: float | None, points: int) -> dict[str, Any]:
    """Sum up norms, which have steps of their own: only those that are due have them."""
    buckets = Buckets.of(table, first, last, points)
    found = {key: _summed_up(buckets, table[key.removeprefix(NORMS_PREFIX)]) for key in keys}
    return {"step": np.round(buckets.mean(table[STEP_COLUMN])), "keys": found}


def _bad_steps(steps: Columns, keys: list[str], rows: slice) -> Floats:
    bad = np.zeros(rows.stop - rows.start, bool)
    for key in keys:
        bad |= ~np.isfinite(steps[key][rows])
    return steps[STEP_COLUMN][rows][bad][:MOST_BAD]


SECONDS_PREFIX, SYNC_PREFIX = "seconds.", "sync."
NORM_OF, SPREAD_OF = "sites.norms.", "sites.spread."
"""Keys of a site's figures in the line of a round begin so; its name follows."""
PART_NAMES = {
    "forward_backward": "forward and backward",
    "communication": "communication that backward does not hide",
    "optimizer": "the optimizer",
    "rest": "data and the time between the parts",
}
"""A part that is both predicted and measured -> its name in a sentence."""


def step_parts(
    reader: RunReader, first: float | None = None, last: float | None = None, points: int = STEP_SERIES_POINTS
) -> dict[str, Any]:
    """Return the seconds of each category by step, and of a usual step of this stretch beside the prediction.

    parts: category -> mean seconds of the steps behind each point; they add up to the step. predicted and measured:
    the four parts that both sides can tell (`plan.calibration.CALIBRATED_PARTS`); measured is the mean over the middle
    half, by duration, of the steps that are predicted: those under the plan in force with the largest batch. Without
    any in this stretch nothing is predicted, and all count. communication: by axis and tier, seconds and bytes of a
    step, mean of that half.
    sync: means of what lines say of the agreement of replicas or sites (docs/metrics.md), and its ratio by step.
    sites: each site's part in the rounds of this stretch.
    """
    steps = reader.steps
    for group in ("seconds", "communication", "sync", "sites"):
        steps.load(group)
    known = reader.keys()
    categories = [key for key in known if key.startswith(SECONDS_PREFIX) and key != "seconds.step"]
    buckets = Buckets.of(steps, first, last, points)
    usual, is_predicted = _usual(reader, buckets.rows)
    typical = {key.removeprefix(SECONDS_PREFIX): finite_mean(steps[key][buckets.rows][usual]) for key in categories}
    measured = {
        part: sum(typical.get(name, 0.0) for name in sides.measured) for part, sides in CALIBRATED_PARTS.items()
    }
    predicted = _predicted(reader) if is_predicted else {}
    return {
        "step": np.round(buckets.mean(steps[STEP_COLUMN])),
        "parts": {key.removeprefix(SECONDS_PREFIX): buckets.mean(steps[key]) for key in categories},
        "step_s": buckets.mean(steps["step_time_s"]),
        "beside": list(BESIDE),
        "predicted": predicted,
        "measured": measured if categories else {},
        "words": _largest_disagreement(predicted, measured) if categories else "",
        "communication": _communication(reader, buckets.rows, usual, is_predicted),
        "sync": _sync(reader, buckets.rows),
        "sites": _sites(reader, buckets.rows),
    }


def _usual(reader: RunReader, rows: slice) -> tuple[npt.NDArray[np.intp], bool]:
    """Return the middle half of the predicted steps, and True; of all, and False, if none of these is predicted."""
    steps, took = reader.steps[STEP_COLUMN][rows], reader.steps["step_time_s"][rows]
    alike = steps >= reader.plan_since
    if reader.run is not None:
        alike &= batches_of(reader.run, steps) == reader.run.train.batches.largest
    places = np.flatnonzero(alike if alike.any() else np.ones(len(steps), bool))
    return places[middle_half(took[places])], bool(alike.any()) or not len(steps)


def _predicted(reader: RunReader) -> dict[str, float]:
    if reader.prediction is None:
        return {}
    seconds = reader.prediction.seconds
    return {part: sum(seconds.get(name, 0.0) for name in sides.predicted) for part, sides in CALIBRATED_PARTS.items()}


def _largest_disagreement(predicted: dict[str, float], measured: dict[str, float]) -> str:
    """Return a sentence on the part that is farthest from its prediction, in seconds."""
    if not predicted or not any(measured.values()):
        return ""
    step_s, planned_s = sum(measured.values()), sum(predicted.values())
    part = max(CALIBRATED_PARTS, key=lambda part: abs(measured[part] - predicted[part]))
    far = measured[part] - predicted[part]
    if abs(far) < 0.05 * planned_s:
        return (
            f"Each part is within 5 % of the planned step: {in_words(step_s)} measured, {in_words(planned_s)} planned."
        )
    more = "longer" if far > 0 else "shorter"
    times = f"{measured[part] / predicted[part]:.1f} times the plan's" if predicted[part] else "nothing was planned"
    return (
        f"The largest disagreement: {PART_NAMES[part]} takes {in_words(measured[part])} "
        f"of a step, {in_words(abs(far))} {more} than planned ({times})."
    )


def _communication(reader: RunReader, rows: slice, usual: Any, is_predicted: bool) -> list[dict[str, Any]]:
    """Return seconds and bytes of a step by axis and tier, of rank 0, the longest first."""
    traffic = reader.prediction.traffic if reader.prediction and is_predicted else {}
    found = []
    for axis, tier, key in channels_in(reader.keys()):
        values = [finite_mean(reader.steps[f"{key[:-1]}{n}"][rows][usual]) for n in (0, 1)]
        found.append({"axis": axis, "tier": tier, "seconds": values[0], "bytes": values[1]})
    for entry in found:
        if entry["axis"] in traffic and sum(other["axis"] == entry["axis"] for other in found) == 1:
            entry["predicted_bytes"] = traffic[entry["axis"]]
    return sorted(found, key=lambda entry: -float(entry["seconds"]))


def _sync(reader: RunReader, rows: slice) -> dict[str, float]:
    """Return the mean of each figure of `sync` over the lines that have one; empty if replicas sum exactly."""
    known = [key for key in reader.keys() if key.startswith(SYNC_PREFIX)]  # noqa: SIM118 (not a dict)
    there = {key.removeprefix(SYNC_PREFIX): reader.steps[key][rows] for key in known}
    return {name: finite_mean(values) for name, values in there.items() if np.isfinite(values).any()}


def _sites(reader: RunReader, rows: slice) -> list[dict[str, Any]]:
    """Return for each site in how many of these lines' rounds it took part, and the means of what is told of it.

    norm: of its difference to the weights that were agreed on before; spread: to the mean of all sites. Rounds in which
    sites sum gradients have neither, and do not count.
    """
    names = sorted(key.removeprefix(NORM_OF) for key in reader.keys() if key.startswith(NORM_OF))  # noqa: SIM118
    norms = {name: reader.steps[NORM_OF + name][rows] for name in names}
    rounds = int(np.any([np.isfinite(norm) for norm in norms.values()], axis=0).sum()) if names else 0
    return [
        {
            "site": name,
            "rounds": int(np.isfinite(norm).sum()),
            "of_rounds": rounds,
            "norm": finite_mean(norm),
            "spread": finite_mean(reader.steps[SPREAD_OF + name][rows]),
        }
        for name, norm in norms.items()
        if rounds
    ]


def memory(reader: RunReader, points: int = STEP_SERIES_POINTS) -> dict[str, Any]:
    """Return the memory of rank 0 by category beside the prediction, in bytes, and the peak of each rank.

    What the process held before it made the model (`before`) is in no prediction, and in no total here.
    """
    steps, predicted = reader.steps, reader.prediction
    steps.load("memory")
    known = reader.keys()
    newest = {key.removeprefix("memory."): _newest(steps[key]) for key in known if key.startswith("memory.")}
    before, used = newest.pop("before", None), _newest(steps["memory_bytes"])
    buckets = Buckets.of(steps, None, None, points)
    return {
        "predicted": predicted.memory if predicted else {},
        "predicted_total": ends(predicted.memory_bytes) if predicted else None,
        "measured": newest,
        "measured_total": None if used is None else used - (before or 0.0),
        "before": before,
        "by_rank": _by_rank(reader),
        "series": {
            "step": np.round(buckets.mean(steps[STEP_COLUMN])),
            "memory_bytes": buckets.most(steps["memory_bytes"]),
        },
    }


def _newest(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


def _by_rank(reader: RunReader) -> dict[str, list[Any]]:
    rows = []
    lines = {node: series.last for node, series in reader.nodes.items()}
    for node in in_newest_world(lines):
        both = zip(lines[node].get("ranks", ()), lines[node].get("memory_bytes", ()), strict=False)
        limit = _limit_bytes(lines[node])
        rows += [(rank, node, used, limit) for rank, used in both]
    rows.sort(key=lambda row: row[0])
    names = ("ranks", "nodes", "bytes", "limit_bytes")
    return {name: [row[n] for row in rows] for n, name in enumerate(names)}


def _limit_bytes(record: dict[str, Any]) -> float | None:
    """Return what a rank of this node can use: its device's memory by the catalogue, else its share of the host's."""
    if devices := record.get("devices"):
        with suppress(UserError):
            return float(find_device(device_named(str(devices[0].get("name")))).memory_bytes)
    whole, ranks = record.get("host", {}).get("memory_bytes"), record.get("ranks")
    return whole / len(ranks) if isinstance(whole, int | float) and ranks else None


def ends(estimate: Any) -> list[float]:
    """Return low, middle and high of an estimate or interval."""
    return [float(estimate.low), float(estimate.mid), float(estimate.high)]

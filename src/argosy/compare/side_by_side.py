"""Two runs side by side: the settings that differ, and their losses at equal tokens, equal time and equal cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from pydantic import BaseModel
from rich.text import Text

from argosy.observe.panel import LineChart
from argosy.observe.records import finite
from argosy.plan.cost.economy import price_per_device_h
from argosy.plan.cost.estimate import count, seconds
from argosy.watch.columns import Floats
from argosy.watch.overview import line, machine_of
from argosy.watch.reader import RunReader

COMPARED_POINTS = 8
"""Points at which the losses are compared."""
SMOOTHED = 0.02
"""The loss at a point is the mean over the steps before it, so large a share of the common range."""
CHART_WIDTH, CHART_HEIGHT = 64, 12
SAME_FOR_ALL = ("name", "run_dir")
"""Keys that always differ and say nothing."""
Measure = Literal["tokens", "time", "cost"]


class SettingDifference(BaseModel):
    """A key of the run file that has two values."""

    key: str
    a: Any
    b: Any


class ComparedRun(BaseModel):
    """One of the runs."""

    run: str
    folder: str
    state: str
    step: int | None
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    validation_accuracy: float | None = None
    """The share of pairs that a reward model tells apart."""
    time_s: float
    """Seconds of all its steps: without starts and stops."""
    cost: float | None
    """Money for the devices in that time; null if no price is known."""
    currency: str = ""
    tokens_per_s: float | None
    plan: str | None


class LossesAt(BaseModel):
    """The losses of both at equal tokens, time (seconds) or cost."""

    of: Measure
    at: list[float]
    a: list[float]
    b: list[float]


class Comparison(BaseModel):
    """`argosy compare A B --json`."""

    a: ComparedRun
    b: ComparedRun
    settings: list[SettingDifference]
    curves: list[LossesAt]
    """Curves by tokens, time and, if both have a price in one currency, cost; empty without a common range."""


def compare(a: RunReader, b: RunReader) -> Comparison:
    """Return the comparison of two runs as of their readers' last `refresh`."""
    runs = [_run(a), _run(b)]
    kinds = [kind for kind in get_args(Measure) if kind != "cost" or _share_a_price(*runs)]
    found = ((kind, _losses(_measure(a, runs[0], kind), _measure(b, runs[1], kind))) for kind in kinds)
    curves = [LossesAt(of=kind, at=at, a=of_a, b=of_b) for kind, (at, of_a, of_b) in found if at]
    return Comparison(a=runs[0], b=runs[1], settings=differences(a, b), curves=curves)


def differences(a: RunReader, b: RunReader) -> list[SettingDifference]:
    """Return the keys of two resolved run files that have other values, in the order of the file.

    A path in a run's own folder is one relative to it, so that it does not differ.
    """
    of_a, of_b = (dict(_settings(each)) for each in (a, b))
    keys = [key for key in dict.fromkeys([*of_a, *of_b]) if key not in SAME_FOR_ALL]
    return [
        SettingDifference(key=key, a=of_a.get(key), b=of_b.get(key)) for key in keys if of_a.get(key) != of_b.get(key)
    ]


def _settings(reader: RunReader) -> Iterator[tuple[str, Any]]:
    own = f"{reader.folder.resolve()}/"

    def relative(value: Any) -> Any:
        if isinstance(value, list):
            return [relative(each) for each in value]
        return value.removeprefix(own) if isinstance(value, str) else value

    for key, value in _flat(reader.run.model_dump(mode="json") if reader.run else {}):
        yield key, relative(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _run(reader: RunReader) -> ComparedRun:
    told, machine = line(reader.folder.name, reader), machine_of(reader)
    took_s = float(np.nansum(reader.steps["step_time_s"]))
    price = price_per_device_h(machine) if machine is not None else None
    known = machine is not None and price is not None and told["devices"] is not None
    return ComparedRun(
        run=told["name"],
        folder=str(reader.folder),
        time_s=took_s,
        cost=float(_device_s(reader).sum()) / 3600 * float(price.mid) if known and price is not None else None,
        currency=machine.currency if known and machine is not None else "",
        **{key: told[key] for key in ("state", "step", "tokens", "plan", "tokens_per_s")},
        **{key: finite(told[key]) for key in ("loss", "validation_loss", "validation_accuracy")},
    )


def _device_s(reader: RunReader) -> Floats:
    """Return the seconds of each step, times the devices that it was made on: a run may have been resized."""
    steps, starts = reader.steps["step"], [event for event in reader.events if event["event"] == "start"]
    sizes = [(event["step"], event["world_size"]) for event in starts if "world_size" in event]
    devices = np.full(len(steps), float(sizes[0][1] if sizes else line(reader.folder.name, reader)["devices"] or 0))
    for step, size in sizes:  # by time: a start replaces what an earlier one did from its step on
        devices[steps >= step] = size
    return np.nan_to_num(reader.steps["step_time_s"]) * devices


def _share_a_price(a: ComparedRun, b: ComparedRun) -> bool:
    return bool(a.cost and b.cost and a.currency == b.currency)


def _measure(reader: RunReader, run: ComparedRun, kind: Measure) -> tuple[Floats, Floats]:
    """Return what was spent up to each step, and the step's loss, for steps whose loss is finite."""
    steps = reader.steps
    if kind == "tokens":
        spent = steps["tokens"]
    else:
        spent = np.nancumsum(_device_s(reader) if kind == "cost" else steps["step_time_s"])
        spent = spent * ((run.cost or 0.0) / spent[-1]) if kind == "cost" and spent[-1:] > 0 else spent
    loss = steps["loss"]
    known = np.isfinite(loss) & np.isfinite(spent)
    return spent[known], loss[known]


def _losses(a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> tuple[list[float], list[float], list[float]]:
    """Return points of the range that both have, and the loss of each there; nothing if there is no such range."""
    if not len(a[0]) or not len(b[0]):
        return [], [], []
    first, last = max(float(a[0][0]), float(b[0][0])), min(float(a[0][-1]), float(b[0][-1]))
    if not last > first:
        return [], [], []
    at = np.linspace(first, last, COMPARED_POINTS)
    width = SMOOTHED * (last - first)
    of_a, of_b = ([_mean_before(*run, each, width) for each in at] for run in (a, b))
    return [float(f"{each:.6g}") for each in at], of_a, of_b


def _mean_before(spent: Floats, loss: Floats, at: float, width: float) -> float:
    """Return the mean loss of the steps that ended within `width` before `at`; at least of the last one."""
    end = max(1, int(np.searchsorted(spent, at, side="right")))
    begin = min(int(np.searchsorted(spent, at - width)), end - 1)
    return float(f"{loss[begin:end].mean():.5g}")


def in_text(found: Comparison) -> Iterator[str]:
    """Yield the lines that say a comparison to a person."""
    both = (found.a, found.b)
    rows: list[tuple[str, ...]] = [("", "A", "B"), ("run", found.a.folder, found.b.folder)]
    rows += [
        (name, *(f"{write(getattr(run, key))} {run.currency if key == 'cost' else ''}".rstrip() for run in both))
        for key, (name, write) in WRITTEN_FIELDS.items()
        if key != "validation_accuracy" or found.a.validation_accuracy or found.b.validation_accuracy
    ]
    yield from _aligned(rows)
    yield ""
    if found.settings:
        yield "settings that differ"
        yield from _aligned([(f"  {each.key}", _shown(each.a), _shown(each.b)) for each in found.settings])
    else:
        yield "no setting differs"
    for curve in found.curves:
        write = COMPARED_UNITS[curve.of]
        unit = f" ({found.a.currency})" if curve.of == "cost" else ""
        yield ""
        yield f"loss at equal {curve.of}{unit}"
        points = zip(curve.at, curve.a, curve.b, strict=True)
        losses = [(f"  {write(at)}", f"{a:.4g}", f"{b:.4g}", f"{b - a:+.3g}") for at, a, b in points]
        yield from _aligned([("", "A", "B", "B - A"), *losses])
    if not found.curves:
        yield "no loss can be compared: one of them has made no step, or both have no tokens in common"


def charts(a: RunReader, b: RunReader, found: Comparison) -> Iterator[Text]:
    """Yield charts of both losses for a terminal, by what both have a common range of; A in cyan, B in yellow."""
    for curve in found.curves:
        runs = [_measure(a, found.a, curve.of), _measure(b, found.b, curve.of)]
        seen = np.concatenate([loss for _, loss in runs])
        low, high = (float(end) for end in np.quantile(seen, [0.0, 0.98]))
        chart = LineChart(CHART_WIDTH, CHART_HEIGHT, (0.0, max(float(spent[-1]) for spent, _ in runs)), (low, high))
        for (spent, loss), style in zip(runs, ("cyan", "yellow"), strict=True):
            chart.line(list(zip(spent.tolist(), np.minimum(loss, high).tolist(), strict=True)), style)
        yield Text.assemble(
            f"\nloss by {curve.of}: ", ("A", "cyan"), ", ", ("B", "yellow"), f"  {low:.3g} to {high:.3g}"
        )
        yield from chart.rows()


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _shown(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _or_nothing(write: Any) -> Any:
    return lambda value: "-" if value is None else write(value)


def _four(value: float) -> str:
    return f"{value:.4g}"


WRITTEN_FIELDS: dict[str, tuple[str, Any]] = {
    "state": ("state", str),
    "step": ("step", _or_nothing(str)),
    "tokens": ("tokens", _or_nothing(count)),
    "loss": ("loss", _or_nothing(_four)),
    "validation_loss": ("validation", _or_nothing(_four)),
    "validation_accuracy": ("accuracy", _or_nothing("{:.1%}".format)),
    "time_s": ("time of steps", seconds),
    "cost": ("cost of steps", _or_nothing(_four)),
    "tokens_per_s": ("tokens a second", _or_nothing(count)),
    "plan": ("plan", _or_nothing(str)),
}
"""Field of a run -> its name, and how it is written."""
COMPARED_UNITS: dict[str, Any] = {"tokens": count, "time": seconds, "cost": lambda value: f"{value:.3g}"}

"""How true the planner's predictions are, on runs that others have published.

    python benchmarks/planner/score.py [FILE.csv] [--calibration-rows N] [--json]

Zero-shot (the default): first for strangers (`strangers.py`): each row is predicted with constants that were fitted
without any row of its lineage of publishers or of its generation of devices, and read without recipes; this is what to
expect. Then for publishers whose recipes were read: without any row of that publisher, whatever its releases and
tables. Few-shot: N rows of each source and device, drawn with a fixed seed, say what to expect of the others
(`kinship.py`), which are scored. By source and in all: median and mean absolute
percentage error of the time of a step (or of peak memory), bias, Kendall's tau (of the rate of one device, so that
larger jobs are no help), regret (how much slower than the best the plan is that the planner would have chosen, among
rows that differ in their layout only), and how many measurements are in the 90 % interval.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from constants_fit import fit_constants
from kinship import expected_errors
from numpy.typing import NDArray
from rows import Row, rates_of, read
from strangers import Strangers, lineage

from argosy.errors import UserError
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.constants import fitted as fitted_constants
from argosy.plan.cost.estimate import INTERVAL_Z
from argosy.plan.cost.memory_model import MemoryModel
from argosy.plan.cost.step_time import StepModel
from argosy.plan.layouts import Layouts
from argosy.plan.quantities import stack

Floats = NDArray[np.float64]
Figures = Mapping[str, Mapping[str, Any]]
"""Section -> name of a figure -> its value."""

PUBLISHED = Path(__file__).parent / "published.csv"
SECTIONS = ("dense_time", "moe_time", "memory")
OF_MEMORY = ("workspace_bytes", "fragmentation")
OF_TIME = tuple(f.name for f in fields(Constants) if f.name not in OF_MEMORY)
FIT_OUTLIER = 0.7
"""Rows further off than this factor's logarithm say that we misread them; they are scored, but not fitted to."""
CALIBRATED_SPREAD = 1.25
"""The factor by which a constant may be off on a machine whose rows are given."""
FEW = 8
"""Fewer rows of others say nothing of an interval."""
SEED = 0


class Model:
    """Rows, stacked so that one evaluation predicts all of them."""

    def __init__(self, rows: Sequence[Row]):
        self.rows = rows
        self.plans = Layouts.of([row.plan for row in rows])
        self.work, self.system, self.rates = (
            stack([row.work for row in rows]),
            stack([row.system for row in rows]),
            stack([rates_of(row) for row in rows]),
        )
        self.measured = np.array([row.value for row in rows])
        self.is_memory = np.array([row.metric == "memory" for row in rows])
        self.fits: dict[tuple[str, bytes], Mapping[str, float]] = {}
        """Metric and a mask of its rows -> the constants that were fitted to them."""

    def predict(self, constants: Constants) -> Floats:
        """Return the seconds of a step, or bytes, of each row."""
        if self.is_memory.all():
            return self.memory(constants)
        time = np.asarray(StepModel(self.plans, self.work, self.rates, self.system, constants).predict().total)
        return np.where(self.is_memory, self.memory(constants), time) if self.is_memory.any() else time

    def memory(self, constants: Constants) -> Floats:
        """Return the bytes at the peak. For computed figures, leave out what only real runs have."""
        model = MemoryModel(self.plans, self.work, self.system, constants)
        found = model.predict()
        computed = np.array(["ANALYTIC" in row.notes for row in self.rows])
        only_in_runs = found.workspace + found.reserve + model.working
        return np.where(computed, found.total - only_in_runs, found.total)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path, nargs="?", default=PUBLISHED)
    options.add_argument("--calibration-rows", type=int, default=0, metavar="N")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args(argv)
    try:
        if chosen.calibration_rows < 0:
            raise UserError(f"--calibration-rows {chosen.calibration_rows}: must be 0 or more. Try 5.")
        scored, skipped = read(chosen.file)
        published, _ = read(PUBLISHED)
        result = score(scored, published, chosen.calibration_rows)
        if not chosen.calibration_rows:
            told, published_told = read(chosen.file, recipes=False)[0], read(PUBLISHED, recipes=False)[0]
            result = {"strangers": score_strangers(told, published, published_told), **result}
    except UserError as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    result["skipped"] = [{"id": name, "why": why} for name, why in skipped]
    print(json.dumps(result, indent=1) if chosen.json else in_words(result))
    return 0


def score_strangers(rows: list[Row], published: list[Row], told: list[Row]) -> dict[str, object]:
    """Return the figures for `rows`, in all and by lineage.

    published: what to fit to, read with recipes; told: the same rows without, to find the widths of intervals.
    """
    strangers = strangers_to(published)
    log_error, margins = strangers.errors(rows), np.zeros(len(rows))
    lineages, sections = np.array([lineage(row) for row in rows]), np.array([row.section for row in rows])
    for family in dict.fromkeys(lineages.tolist()):
        for section in dict.fromkeys(sections[lineages == family].tolist()):
            others = [row for row in told if row.section == section and lineage(row) != family]
            few = not strangers.knows(family) or len(others) < FEW
            margins[(lineages == family) & (sections == section)] = (
                _shipped_margin(section) if few else strangers.width(others, without=family)
            )

    def figures(chosen: NDArray[np.bool_]) -> dict[str, dict[str, float | int | None]]:
        found = {}
        for section in SECTIONS:
            if (here := chosen & (sections == section)).any():
                some = [rows[i] for i in np.flatnonzero(here)]
                apart = _median_over_publishers(some, log_error[here])
                found[section] = {**_figures(some, log_error[here], margins[here]), "median_over_publishers": apart}
        return found

    return {
        "all": figures(np.ones(len(rows), bool)),
        "by_lineage": {name: figures(lineages == name) for name in dict.fromkeys(lineages.tolist())},
    }


def strangers_to(published: list[Row]) -> Strangers:
    """Return what predicts rows as if nobody like their publishers and devices had been learnt from."""
    base = Model(published)
    everything, _ = fitted_constants()

    def log_error(rows: Sequence[Row], constants: Constants) -> Floats:
        model = Model(rows)
        return np.asarray(np.log(model.predict(constants) / model.measured))

    return Strangers(published, lambda chosen: fitted(base, chosen, begin=everything), log_error)


def _median_over_publishers(rows: list[Row], log_error: Floats) -> float:
    """Return the median over publishers of their median errors, in percent: large tables do not outvote others."""
    families = np.array([row.family for row in rows])
    medians = [np.median(np.abs(np.expm1(log_error[families == name]))) for name in dict.fromkeys(families.tolist())]
    return round(float(100 * np.median(medians)), 2)


def _shipped_margin(section: str) -> float:
    """Return half the 90 % interval that the planner shows, in logarithms."""
    _, spread = fitted_constants()
    return float(INTERVAL_Z * getattr(spread, section))


def score(rows: list[Row], published: list[Row], calibration_rows: int = 0) -> dict[str, object]:
    """Return all figures."""
    log_error, is_scored = errors(rows, published, calibration_rows)
    families, sections = np.array([row.family for row in rows]), np.array([row.section for row in rows])
    margins = _margins(log_error, sections, families, is_scored)

    def figures(chosen: NDArray[np.bool_]) -> dict[str, dict[str, float | int | None]]:
        return {
            section: _figures([rows[i] for i in np.flatnonzero(here)], log_error[here], margins[here])
            for section in SECTIONS
            if (here := chosen & (sections == section) & is_scored).any()
        }

    sources = np.array([row.source for row in rows])
    return {
        "all": figures(np.ones(len(rows), bool)),
        "by_source": {source: figures(sources == source) for source in dict.fromkeys(sources.tolist())},
    }


def errors(rows: list[Row], published: list[Row], calibration_rows: int = 0) -> tuple[Floats, NDArray[np.bool_]]:
    """Return log(predicted / measured) of each row, and a mask of the rows that count (they did not calibrate)."""
    base = Model(published)
    everything, _ = fitted_constants()
    families, known = np.array([row.family for row in rows]), np.array([row.family for row in published])
    log_error, is_scored = np.zeros(len(rows)), np.ones(len(rows), bool)
    for family in dict.fromkeys(families.tolist()):
        mine = families == family
        model = Model([row for row in rows if row.family == family])
        constants = everything if family not in known else fitted(base, known != family, begin=everything)
        predicted = np.log(model.predict(constants))
        if calibration_rows:
            drawn = _drawn(rows, mine, calibration_rows)
            predicted = calibrated(model, constants, predicted, drawn[mine])
            is_scored &= ~drawn
        log_error[mine] = predicted - np.log(model.measured)
    return log_error, is_scored


def fitted(model: Model, chosen: NDArray[np.bool_], begin: Constants | None = None) -> Constants:
    """Return the constants that fit the chosen rows best."""
    values = dict(vars(begin or Constants()))
    for metric, free in (("time", OF_TIME), ("memory", OF_MEMORY)):
        mine = chosen & (model.is_memory == (metric == "memory"))
        if not mine.any():
            continue
        key = metric, mine.tobytes()  # many choices of rows have the same few of memory
        if key not in model.fits:
            model.fits[key] = _fit(model, mine, free, begin)
        values |= model.fits[key]
    return Constants(**values)


def _fit(model: Model, chosen: NDArray[np.bool_], free: Sequence[str], begin: Constants | None) -> Mapping[str, float]:
    rows = [row for row, take in zip(model.rows, chosen, strict=True) if take]
    part = Model(rows)
    near = np.abs(np.log(part.predict(Constants()) / part.measured)) < FIT_OUTLIER
    part = Model([row for row, take in zip(rows, near, strict=True) if take])
    shared = [row.shared for row in part.rows]
    fit_of = fit_constants(part.predict, part.measured, shared, free=free, begin=begin)
    return {name: getattr(fit_of.constants, name) for name in free}


def calibrated(model: Model, constants: Constants, predicted: Floats, drawn: NDArray[np.bool_]) -> Floats:
    """Return the logarithms of predictions, adjusted to the `drawn` rows."""
    adjusted = predicted.copy()
    for metric, free in (("time", OF_TIME), ("memory", OF_MEMORY)):
        here = np.array([row.metric == metric for row in model.rows])
        if not (drawn & here).any():
            continue
        part = Model([row for row in model.rows if row.metric == metric])
        errors = np.log(part.measured) - predicted[here]
        adjusted[here] += expected_errors(part.rows, _slopes(part, constants, free), errors, drawn[here])
    return adjusted


def _slopes(model: Model, constants: Constants, free: Sequence[str]) -> Floats:
    """Return the change by a factor of CALIBRATED_SPREAD to each constant, in logarithms: rows x constants."""
    before = np.log(model.predict(constants))
    moved = [replace(constants, **{name: getattr(constants, name) * CALIBRATED_SPREAD}) for name in free]
    return np.column_stack([np.log(model.predict(each)) - before for each in moved])


def _drawn(rows: list[Row], mine: NDArray[np.bool_], many: int) -> NDArray[np.bool_]:
    """Draw so many rows of each source, device and metric, and leave at least one over."""
    random = np.random.default_rng(SEED)
    keys = np.array([f"{row.source}|{row.device}|{row.metric}" for row in rows])
    drawn = np.zeros(len(rows), bool)
    for key in dict.fromkeys(keys[mine].tolist()):
        members = np.flatnonzero((keys == key) & mine)
        drawn[random.permutation(members)[: min(many, len(members) - 1)]] = True
    return drawn


def _margins(
    log_error: Floats, sections: NDArray[np.str_], families: NDArray[np.str_], counts: NDArray[np.bool_]
) -> Floats:
    """Return half the 90 % interval of each row, in logarithms, from the errors on all other publishers.

    If there are few others, it is the planner's.
    """
    margins = np.zeros(len(log_error))
    for section in dict.fromkeys(sections.tolist()):
        for family in dict.fromkeys(families.tolist()):
            others = (sections == section) & (families != family) & counts
            here = (sections == section) & (families == family)
            few = others.sum() < FEW
            margins[here] = _shipped_margin(section) if few else np.quantile(np.abs(log_error[others]), 0.9)
    return margins


def _figures(rows: list[Row], log_error: Floats, margins: Floats) -> dict[str, float | int | None]:
    percent = 100 * np.expm1(log_error)
    measured = np.array([_rate(row, row.value) for row in rows])
    predicted = np.array([_rate(row, row.value * np.exp(e)) for row, e in zip(rows, log_error, strict=True)])
    return {
        "n": len(rows),
        "median_abs_pct_error": round(float(np.median(np.abs(percent))), 2),
        "mean_abs_pct_error": round(float(np.mean(np.abs(percent))), 2),
        "bias_pct": round(float(100 * np.expm1(np.mean(log_error))), 2),
        "kendall_tau": _tau(predicted, measured),
        "regret_pct": _regret(rows, log_error),
        "coverage_90": round(float(100 * np.mean(np.abs(log_error) <= margins)), 1),
    }


def _rate(row: Row, value: float) -> float:
    """Return the FLOP/s of one device; for memory, the bytes."""
    if row.metric == "memory":
        return value
    work = row.work
    return float(work.train_flops_per_token * work.seq_len * row.batch / value / row.gpus)


def _tau(predicted: Floats, measured: Floats) -> float | None:
    """Return Kendall's tau-b."""
    if len(measured) < 3:
        return None
    upper = np.triu_indices(len(measured), 1)
    a = np.sign(predicted[:, None] - predicted[None])[upper]
    b = np.sign(measured[:, None] - measured[None])[upper]
    ties = np.sqrt(float((a != 0).sum()) * float((b != 0).sum()))
    return round(float((a * b).sum()) / ties, 3) if ties else None


def _regret(rows: list[Row], log_error: Floats) -> float | None:
    """Return the mean over comparable rows of the measured value where the predicted one is best, over the best."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    losses = []
    for members in groups.values():
        if len(members) < 2:
            continue
        values = np.array([rows[i].value for i in members])
        predicted = values * np.exp(log_error[members])
        chosen = values[predicted <= predicted.min() * (1 + 1e-9)].mean()
        losses.append(chosen / values.min() - 1)
    return round(float(100 * np.mean(losses)), 2) if losses else None


def in_words(result: dict[str, object]) -> str:
    """Return the tables."""
    lines = []
    if isinstance(told := result.get("strangers"), dict):
        lines += ["STRANGERS: neither lineage nor generation known, no recipes read"]
        lines += _table(told["all"], told["by_lineage"])
        lines += ["", "", "PUBLISHERS WHOSE RECIPES WERE READ, each left out in turn"]
    lines += _table(result["all"], result["by_source"])  # type: ignore[arg-type]
    lines += ["", f"{len(result['skipped'])} rows skipped (--json says why)"]  # type: ignore[arg-type]
    return "\n".join(lines)


def _table(everything: Figures, parts: Mapping[str, Figures]) -> list[str]:
    head = f"{'':68} {'n':>4} {'median':>7} {'mean':>7} {'bias':>7} {'tau':>6} {'regret':>7} {'in 90%':>7}"
    lines = []
    for section in SECTIONS:
        lines += ["", section, head]
        for name, found in {"ALL": everything, **parts}.items():
            if section in found:
                f = found[section]
                cells = [f["median_abs_pct_error"], f["mean_abs_pct_error"], f["bias_pct"]]
                tau = "" if f["kendall_tau"] is None else f"{f['kendall_tau']:.2f}"
                regret = "" if f["regret_pct"] is None else f"{f['regret_pct']:.1f} %"
                percents = " ".join(f"{cell:6.1f}%" for cell in cells)
                apart = f.get("median_over_publishers")
                more = "" if apart is None else f"   {apart:.1f}% over publishers"
                figures = f"{percents} {tau:>6} {regret:>7} {f['coverage_90']:6.0f}%"
                lines.append(f"{name[:68]:68} {f['n']:4} {figures}{more}")
    return lines


if __name__ == "__main__":
    sys.exit(main())

"""How true predictions of serving are, on measurements that others have published.

    python benchmarks/planner/score_serving.py [FILE.csv] [--calibration-rows N [--chosen]] [--json]

FILE has the columns of inference.csv; only model, device, batch_or_concurrency, input_len, metric and value are
needed. Rows that cannot be predicted are counted ("skipped").

Nothing is predicted by constants that were fitted to it. A row of the file that is among the published ones is
predicted by a fit without any row of its publisher ("all"); another one by the constants that Argosy has. For published
rows it also says how far predictions are off without the row's engine, and without its generation of devices, and of
the fifth that nothing is ever fitted to ("held_out"). With --calibration-rows, N rows of each publisher, engine and
device, drawn with a fixed seed, correct the predictions of the others, which are scored; with --chosen they are those
that would narrow predictions of all most, whatever their measurements are.

Errors are of seconds, or of tokens/s ("throughput"): n rows, the median absolute error in percent, the bias (median of
predicted over measured, less 1, in percent), and the share of measurements in the 90 % interval. "regret" is how much
slower than the best the tp is that the planner would have chosen, among rows that differ in it alone.
"width_of_others" has intervals as wide as errors on other publishers make them: nothing of the row's own is known.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from serving_fit import fit, row_weights
from serving_rows import COLUMNS, TIMES, ServingRow, ServingTable, held_out, read
from strangers import GENERATIONS, weighted_quantile

from argosy.errors import UserError
from argosy.plan.cost.estimate import INTERVAL_Z
from argosy.plan.cost.serving_constants import (
    ServingConstants,
    fitted_serving,
    spread_of,
)
from argosy.plan.serving_calibration import ROW_STD, SHIFTED, learn_serving, shifted

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Strings = NDArray[np.str_]
Key = Callable[[ServingRow], str]

PUBLISHED = Path(__file__).parent / "inference.csv"
METRICS = (*TIMES, "throughput")
KNOWN_WIDTH = 0.4
"""Share of what engines differ by that an engine of a known publisher may be off."""
SEED = 0
SLOPE = 0.01
"""Change of a logarithm by which slopes are measured."""
NARROWEST = 0.02
"""Least standard deviation of a prediction's logarithm."""


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path, nargs="?", default=PUBLISHED)
    options.add_argument("--calibration-rows", type=int, default=0, metavar="N")
    options.add_argument("--chosen", action="store_true", help="choose those rows by what they would tell")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args(argv)
    try:
        if chosen.calibration_rows < 0:
            raise UserError(f"--calibration-rows {chosen.calibration_rows}: must be 0 or more. Try 5.")
        rows, skipped = read(chosen.file)
        result = score(rows, chosen.calibration_rows, chosen.chosen)
    except UserError as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    result["skipped"] = {"n": len(skipped), "why": dict(Counter(why for _, why in skipped).most_common())}
    print(json.dumps(result, indent=1) if chosen.json else in_words(result))
    return 0


def score(rows: Sequence[ServingRow], few: int, by_design: bool = False) -> dict[str, Any]:
    """Return the figures; few: rows of each publisher, engine and device that calibrate; by_design: not drawn."""
    table = ServingTable(rows)
    published = {row.cells for row in _published()}
    known = np.array([row.cells in published for row in table.rows], bool)
    constants, std = shipped(table)
    if known.any():
        constants = without_publishers(table, constants, known)
        std = np.where(known, _std(table, "strangers"), std)
    if few:
        strange = known | ~learnt_from(table)
        widths = np.where(strange, 1.0, KNOWN_WIDTH)
        errors, left = calibrated_errors(table, constants, few, widths, None if by_design else SEED)
        std = np.where(strange, _std(table, "calibrated"), _std(table, "calibrated_known"))
        return {"all": figures(table.metric[left], errors[left], std[left])}
    errors = np.log(table.predict(constants) / table.measured)
    result: dict[str, Any] = {"all": figures(table.metric, errors, std), "regret": regret(table, errors)}
    makers = np.array([maker(row) for row in table.rows])
    for name in sorted(set(makers)) if len(set(makers)) > 1 else ():
        result[name] = figures(table.metric[makers == name], errors[makers == name], std[makers == name])
    if known.any():
        here, learnt = table.take(known), _learnt()
        for name, key in (("without_engine", _engine), ("without_generation", generation)):
            result[name] = figures(here.metric, errors_without(here, key, learnt), _std(here, "strangers"))
        kept = np.array([held_out(row) for row in table.rows]) & known
        if kept.any():
            scored = table.take(kept)
            of_shipped, width_of = shipped(scored)
            result["held_out"] = figures(scored.metric, np.log(scored.predict(of_shipped) / scored.measured), width_of)
    if known.all():
        of_others = widths_of_others(table, errors)
        result["width_of_others"] = figures(table.metric, errors, of_others)
        for name in sorted(set(makers)):
            here = makers == name
            result[f"width_of_others, {name}"] = figures(table.metric[here], errors[here], of_others[here])
    for name in sorted({row.publisher for row in table.rows}):
        chosen = table.publisher == name
        result[f"publisher {name}"] = figures(table.metric[chosen], errors[chosen], std[chosen])
    return result


def shipped(table: ServingTable) -> tuple[ServingConstants, Floats]:
    """Return the constants that Argosy has for each row, and the standard deviation of the logarithm of its error.

    Of a publisher that was learnt from, its own offset is taken into account.
    """
    found = fitted_serving()
    parts = [found.of(row.engine, row.vendor, row.device.name) for row in table.rows]
    names = vars(found.constants)
    constants = ServingConstants(**{name: np.array([getattr(part, name) for part in parts]) for name in names})
    offsets = np.array([found.publishers.get(row.publisher, 0.0) for row in table.rows])
    constants = shifted(constants, {"compute": np.exp(offsets), "overhead": np.exp(offsets)})
    return constants, np.where(learnt_from(table), _std(table, "known"), _std(table, "strangers"))


def learnt_from(table: ServingTable) -> Mask:
    """Return the rows whose publisher others were learnt from."""
    publishers = fitted_serving().publishers
    return np.array([row.publisher in publishers for row in table.rows], bool)


def without_publishers(table: ServingTable, constants: ServingConstants, known: Mask) -> ServingConstants:
    """Return the constants, those of the known rows from a fit without their publisher."""
    published = _learnt()
    for name in sorted(set(table.publisher[known])):
        chosen = known & (table.publisher == name)
        found = fit(published.take(published.publisher != name)).of([table.rows[i] for i in np.flatnonzero(chosen)])
        columns = {}
        for key, column in vars(constants).items():
            columns[key] = np.array(column)
            columns[key][chosen] = getattr(found, key)
        constants = replace(constants, **columns)
    return constants


def _learnt() -> ServingTable:
    """Return the published rows that constants are fitted to."""
    return ServingTable([row for row in _published() if not held_out(row)])


@cache
def _published() -> Sequence[ServingRow]:
    return read(PUBLISHED)[0]


def errors_without(table: ServingTable, key: Key, learnt: ServingTable, offsets: bool = False) -> Floats:
    """Return log(predicted / measured) of each row, by a fit to those of `learnt` that have not its key.

    offsets: a publisher's own offset, learnt from its other rows, is taken into account.
    """
    keys, errors = np.array([key(row) for row in table.rows]), np.zeros(len(table))
    of_learnt = np.array([key(row) for row in learnt.rows])
    for name in sorted(set(keys)):
        out = keys == name
        found, scored = fit(learnt.take(of_learnt != name)), table.take(out)
        constants = found.of(scored.rows)
        if offsets:
            shift = np.exp([found.publishers.get(row.publisher, 0.0) for row in scored.rows])
            constants = shifted(constants, {"compute": shift, "overhead": shift})
        errors[out] = np.log(scored.predict(constants) / scored.measured)
    return errors


def calibrated_errors(
    table: ServingTable, constants: ServingConstants, few: int, widths: Floats, seed: int | None = SEED
) -> tuple[Floats, Mask]:
    """Return log(predicted / measured), and the rows that were not among the `few` of their group that calibrate.

    widths: for each row, how much of what engines differ by its engine may be off; seed: None if the rows are chosen.
    """
    groups = defaultdict(list)
    for index, row in enumerate(table.rows):
        groups[row.publisher, row.engine.label, row.device.name].append(index)
    errors, scored = np.zeros(len(table)), np.zeros(len(table), bool)
    draw = np.random.default_rng(seed)
    slopes = _slopes(table, constants) if seed is None else None
    for members in groups.values():
        if len(members) <= few:
            continue
        order = draw.permutation(members) if slopes is None else _telling_first(np.array(members), slopes, few)
        given, others = table.take(order[:few]), table.take(order[few:])
        at_given, at_others = (_rows_of(constants, places) for places in (order[:few], order[few:]))
        factors = learn_serving(given.predict, given.measured, at_given, float(widths[order[0]]))
        errors[order[few:]] = np.log(others.predict(shifted(at_others, factors)) / others.measured)
        scored[order[few:]] = True
    return errors, scored


def _slopes(table: ServingTable, constants: ServingConstants) -> Floats:
    """Return the change of each prediction's logarithm by a standard deviation of what an engine may differ in."""
    base = np.log(table.predict(constants))
    moves = [np.log(table.predict(shifted(constants, {name: np.exp(SLOPE)}))) - base for name in SHIFTED]
    return np.column_stack(moves) / SLOPE * list(SHIFTED.values())


def _telling_first(members: NDArray[np.int64], slopes: Floats, few: int) -> NDArray[np.int64]:
    """Return the members, first those that narrow the predictions of all most, one by one (A-optimal design)."""
    own, known = slopes[members], np.eye(slopes.shape[1])
    first: list[int] = []
    for _ in range(few):
        shared = own @ known @ own.T
        gains = (shared**2).mean(axis=0) / (np.diag(shared) + ROW_STD**2)
        gains[first] = -1
        first.append(best := int(np.argmax(gains)))
        towards = known @ own[best]
        known = known - np.outer(towards, towards) / (own[best] @ towards + ROW_STD**2)
    return np.concatenate([members[first], np.delete(members, first)])


def _rows_of(constants: ServingConstants, places: NDArray[np.int64]) -> ServingConstants:
    return replace(constants, **{name: np.asarray(column)[places] for name, column in vars(constants).items()})


def _std(table: ServingTable, kind: str) -> Floats:
    return np.array([spread_of(row.metric, row.vendor, kind) for row in table.rows])


def maker(row: ServingRow) -> str:
    """Return whose devices the row is from, as far as spreads differ."""
    return "nvidia" if row.vendor == "NVIDIA" else "others"


def generation(row: ServingRow) -> str:
    """Return the generation of the row's device."""
    name = row.device.name
    return next((known for known, starts in GENERATIONS.items() if name.startswith(starts)), name)


def _publisher(row: ServingRow) -> str:
    return row.publisher


def _engine(row: ServingRow) -> str:
    return row.engine.name


def width(errors: Floats, rows: Sequence[ServingRow]) -> float:
    """Return the standard deviation with which intervals hold nine of ten errors."""
    return max(NARROWEST, weighted_quantile(np.abs(errors), row_weights(list(rows)), 0.9) / INTERVAL_Z)


def widths_of_others(table: ServingTable, errors: Floats) -> Floats:
    """Return `width` for each row, of the errors of other publishers alone."""
    found = np.zeros(len(table))
    for metric in METRICS:
        for name in set(table.publisher):
            others = (table.metric == metric) & (table.publisher != name)
            here = (table.metric == metric) & (table.publisher == name)
            found[here] = width(errors[others], table.take(others).rows) if others.any() else NARROWEST
    return found


def figures(metrics: Strings, errors: Floats, std: Floats) -> dict[str, dict[str, Any]]:
    """Return n, error, bias and coverage of each metric; those of times are there even if the file has no such rows."""
    found: dict[str, dict[str, Any]] = {}
    for metric in METRICS:
        here = metrics == metric
        if not here.any():
            if metric in TIMES:
                found[metric] = {"n": 0, "median_abs_pct_error": None, "bias": None, "coverage_pct": None}
            continue
        miss = errors[here]
        found[metric] = {
            "n": int(here.sum()),
            "median_abs_pct_error": round(100 * float(np.median(np.abs(np.expm1(miss)))), 2),
            "bias": round(100 * float(np.expm1(np.median(miss))), 2),
            "coverage_pct": round(100 * float(np.mean(np.abs(miss) <= INTERVAL_Z * std[here])), 1),
        }
    return found


def regret(table: ServingTable, errors: Floats) -> dict[str, Any]:
    """Return by how much the tp that is predicted to be fastest is slower than the fastest, on average."""
    sign = np.where(table.metric == "throughput", -1.0, 1.0)
    measured = table.measured**sign
    predicted = measured * np.exp(sign * errors)
    alike = defaultdict(list)
    for index, row in enumerate(table.rows):
        cells = dict(zip(COLUMNS, row.cells, strict=True))
        key = tuple(value for name, value in cells.items() if name not in ("tp", "devices", "value"))
        alike[key].append(index)
    losses = []
    for members in alike.values():
        if len({float(table.rows[i].cut.tp) for i in members}) > 1:
            places = np.array(members)
            losses.append(measured[places[np.argmin(predicted[places])]] / measured[places].min() - 1)
    mean = round(100 * float(np.mean(losses)), 2) if losses else None
    return {"choices": len(losses), "mean_pct": mean}


def in_words(result: Mapping[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [f"{'':52}{'n':>6}{'error':>9}{'bias':>9}{'in 90 % interval':>18}"]
    for section, of_section in result.items():
        if section == "regret":
            continue
        if section == "skipped":
            lines += [
                f"{of_section['n']} rows cannot be predicted",
                *(f"  {n}: {why}" for why, n in of_section["why"].items()),
            ]
            continue
        for metric, each in of_section.items():
            if each["n"]:
                lines.append(
                    f"{section + ', ' + metric:52}{each['n']:>6}{each['median_abs_pct_error']:>7.1f} %"
                    f"{each['bias']:>+7.1f} %{each['coverage_pct']:>16.1f} %"
                )
    if result.get("regret", {}).get("choices"):
        chosen = result["regret"]
        lines.append(f"regret of the chosen tp: {chosen['mean_pct']:.1f} % on average of {chosen['choices']} choices")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

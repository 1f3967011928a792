"""Fit the constants of serving to published rows: the most probable ones, given what was assumed beforehand.

The logarithm of a constant is normal around its guess. The years before 2025, an engine, its old releases, a maker of
devices, and an engine on a maker's devices each shift some of them (`EFFECTS`) by effects that are normal around 0, so
that few rows move one little; a publisher shifts all of its rows alike, and has a server of its own. Errors of rows
have heavy tails (Student's t). Gauss-Newton on reweighted residuals finds the maximum (Marquardt 1963).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray
from serving_rows import ServingRow, ServingTable

from argosy.plan.cost.serving_constants import ServingConstants

Floats = NDArray[np.float64]

NAMES = tuple(f.name for f in fields(ServingConstants) if f.name not in ("compute", "overhead"))
"""Constants of the population."""
EFFECTS = {
    "compute": 0.15, "overhead": 0.4, "matmul": 0.15, "cache": 0.25, "sequence_s": 0.5, "eager_layer_s": 1.0,
    "request_s": 0.7,
}  # fmt: skip
"""Constants that groups of measurements shift, and the standard deviation of a shift's logarithm; assumed."""
ON_VENDOR = 3.0
"""Factor on it for an engine on a maker's devices: ports differ more than engines do."""
PUBLISHER_STD = 0.15
SERVER_STD = 0.7
"""Standard deviation of the logarithm of a publisher's own `request_s`: its server, its network, its client."""
ROW_STD = 0.12
ALIKE = 0.03
"""Correlation of the errors of two rows of a publisher, beside its offset: assumed."""
FREEDOM, ROUNDS, DIFFERENCE, ENOUGH = 4, 100, 1e-4, 3e-3


@dataclass(frozen=True)
class ServingFit:
    """The result of a fit, in logarithms."""

    constants: dict[str, float]
    shifts: dict[tuple[str, str], float]
    """(Group, constant) -> shift."""
    publishers: dict[str, float]

    def of(self, rows: list[ServingRow]) -> ServingConstants:
        """Return the constants of each row, a column each, without what is its publisher's own of them."""
        found = {name: np.full(len(rows), log) for name, log in self.constants.items()}
        found |= {name: found.get(name, np.zeros(len(rows))).copy() for name in EFFECTS}
        for index, row in enumerate(rows):
            for group in row.groups:
                for name in EFFECTS:
                    found[name][index] += self.shifts.get((group, name), 0.0)
        return ServingConstants(**{name: np.exp(column) for name, column in found.items()})


def fit(table: ServingTable) -> ServingFit:
    """Return the most probable constants and effects.

    The search begins at the guesses: what is left out of the table leaves no trace in the result.
    """
    rows = table.rows
    declared = {f.name: f for f in fields(ServingConstants)}
    publishers = sorted(set(table.publisher))
    effects = _Effects(table, publishers)
    keys = effects.keys
    center = np.log([float(declared[name].default) for name in NAMES])  # type: ignore[arg-type]
    scale = np.concatenate(
        [
            np.log([declared[name].metadata["spread"] for name in NAMES]),
            [_std(group, name) for group, name in keys],
            np.full(len(publishers), PUBLISHER_STD),
        ]
    )
    origin = np.concatenate([center, np.zeros(len(keys) + len(publishers))])
    member = np.array([table.publisher == name for name in publishers], float).T
    # One publisher's rows share what its constants leave over; throughputs are inverse to times.
    sign = np.where(table.metric == "throughput", -1.0, 1.0)
    member = member * sign[:, None]
    counts = row_weights(rows)
    logs = np.log(table.measured)

    def unpack(point: Floats) -> ServingFit:
        numbers = point.tolist()
        k, e = len(NAMES), len(keys)
        return ServingFit(
            dict(zip(NAMES, numbers[:k], strict=True)),
            dict(zip(keys, numbers[k : k + e], strict=True)),
            dict(zip(publishers, numbers[k + e :], strict=True)),
        )

    def miss_of(constants: ServingConstants, point: Floats) -> Floats:
        return np.asarray(np.log(table.predict(constants)) + member @ point[-len(publishers) :] - logs)

    def columns(constants: ServingConstants) -> dict[str, Floats]:
        base, found = np.log(table.predict(constants)), {}
        for name in dict.fromkeys((*NAMES, *EFFECTS)):
            moved = replace(constants, **{name: getattr(constants, name) * np.exp(DIFFERENCE)})
            found[name] = (np.log(table.predict(moved)) - base) / DIFFERENCE
        return found

    def cost(miss: Floats, point: Floats) -> float:
        tail = (FREEDOM + 1) * np.log1p((miss / ROW_STD) ** 2 / FREEDOM)
        return float((counts * tail).sum() + (((point - origin) / scale) ** 2).sum()) / 2

    point, damping = origin.copy(), 1e-2
    constants = effects.constants_at(point)
    miss = miss_of(constants, point)
    best = cost(miss, point)
    for _ in range(ROUNDS):
        slopes = columns(constants)
        whole = np.column_stack([*effects.slopes(slopes), member])
        weight = counts * (FREEDOM + 1) / (FREEDOM + (miss / ROW_STD) ** 2) / ROW_STD**2
        curvature = whole.T * weight @ whole + np.diag(scale**-2)
        gradient = whole.T @ (weight * miss) + (point - origin) / scale**2
        while damping < 1e6:
            trial = point - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            tried = effects.constants_at(trial)
            missed = miss_of(tried, trial)
            found = cost(missed, trial)
            if found < best:
                break
            damping *= 4
        else:
            break
        gained, damping = best - found, damping / 4
        point, miss, best, constants = trial, missed, found, tried
        if gained < ENOUGH:
            break
    return unpack(point)


class _Effects:
    """What groups and publishers' servers shift; a point of the search has the constants, then the shifts."""

    def __init__(self, table: ServingTable, publishers: list[str]):
        of_row = [row.groups for row in table.rows]
        groups = sorted({group for each in of_row for group in each})
        self._masks = {group: np.array([group in each for each in of_row], float) for group in groups}
        self._masks |= {_server(name): np.array(table.publisher == name, float) for name in publishers}
        self.keys = [(group, name) for group in groups for name in EFFECTS]
        self.keys += [(_server(name), "request_s") for name in publishers]
        self._of: dict[str, tuple[Floats, list[int]]] = {}
        for name in EFFECTS:
            places = [i for i, (_, of) in enumerate(self.keys) if of == name]
            masks = np.array([self._masks[self.keys[i][0]] for i in places]).T
            self._of[name] = masks, [len(NAMES) + i for i in places]

    def constants_at(self, point: Floats) -> ServingConstants:
        """Return the constants of each row, with what is its publisher's own of them."""
        found = dict(zip(NAMES, point[: len(NAMES)].tolist(), strict=True))
        shifted = {name: found.get(name, 0.0) + masks @ point[places] for name, (masks, places) in self._of.items()}
        return ServingConstants(**{name: np.exp(log) for name, log in (found | shifted).items()})

    def slopes(self, of_constants: dict[str, Floats]) -> list[Floats]:
        """Return the slopes of all but the publishers' offsets, given those of the constants."""
        shifts = [self._masks[group] * of_constants[name] for group, name in self.keys]
        return [*(of_constants[name] for name in NAMES), *shifts]


def _server(publisher: str) -> str:
    return f"server of {publisher}"


def _std(group: str, name: str) -> float:
    if group.startswith(_server("")):
        return SERVER_STD
    return EFFECTS[name] * (ON_VENDOR if " on " in group else 1.0)


def row_weights(rows: list[ServingRow]) -> Floats:
    """Return a weight for each row: n rows of one source, engine, device and model count as the square root of n.

    They are neither independent (n would count) nor one measurement (1 would). What a publisher's rows have in common
    bounds what all of them count for: sum / (1 + `ALIKE` sum) (the design effect of clusters; Kish 1965).
    """
    keys = [(row.publisher, row.engine.label, row.device.name, row.model, row.metric) for row in rows]
    counts = Counter(keys)
    weights = np.array([counts[key] ** -0.5 for key in keys])
    publishers = np.array([row.publisher for row in rows])
    for name in set(publishers):
        here = publishers == name
        weights[here] /= 1 + ALIKE * weights[here].sum()
    return weights

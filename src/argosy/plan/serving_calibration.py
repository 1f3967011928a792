"""Learn an engine's constants on one's own devices from a few measurements of serving.

Before any row is seen, the logarithm of each of `SHIFTED` is normal around the constant of the engine, or of all. That
of a measurement is normal around the prediction, with heavy tails (Student's t). Gauss-Newton finds the most probable
shifts; few rows move them less.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argosy.config.load import load
from argosy.errors import UserError
from argosy.plan.cost.estimate import gib
from argosy.plan.cost.inference import (
    BYTES_OF_WEIGHT,
    CACHES,
    ReplicaCut,
    ServingLoad,
    ServingModel,
    ServingOptions,
    ServingSoftware,
    formats_of,
)
from argosy.plan.cost.rates import Rates
from argosy.plan.cost.serving_constants import ServingConstants, ServingEngine
from argosy.plan.hardware.clusters import Cluster, Factor
from argosy.plan.workload import Workload

Floats = NDArray[np.float64]

SHIFTED = {
    "compute": 0.4, "overhead": 0.5, "bandwidth": 0.1, "cache": 0.4, "matmul": 0.4, "half_tokens": 0.5,
    "experts": 0.4, "attention": 0.4, "link": 0.3, "sum_s": 0.4, "sequence_s": 0.7, "eager_layer_s": 0.7,
    "request_s": 0.7, "burst": 0.7,
}  # fmt: skip
"""Constants that an engine on a device may have of its own, and the standard deviations of their logarithms."""
ROW_STD, ROW_STD_WEIGHT = 0.1, 4
"""Standard deviation of a measurement around a calibrated prediction, and degrees of freedom of the t distribution."""
NEWTON_ROUNDS, DIFFERENCE, SERVING_LONGEST_MOVE = 12, 1e-4, 0.7
UNINFORMED_SHARE = 0.97
"""A factor with a standard deviation above this share of the assumed one is left out: the rows tell too little."""
MEASURED_COLUMNS = (
    "model", "tp", "pp", "precision", "batch_or_concurrency", "input_len", "output_len", "metric", "value"
)  # fmt: skip
SERVING_METRICS = ("ttft", "tpot", "e2e_latency")
MOST_OFF = 50.0
"""A value that is so many times the prediction, or the other way round, is in another unit: ms are 1000 times."""


def learn_serving(
    predict: Callable[[ServingConstants], Floats], measured: Floats, start: ServingConstants, width: float = 1.0
) -> dict[str, Factor]:
    """Return the factor on each constant of `SHIFTED` with which predictions are nearest to the measurements.

    predict: constants -> a positive figure for each of `measured`; start: the constants to shift; width: how much of
    `SHIFTED` these may be off.
    """
    names, std = tuple(SHIFTED), width * np.array(list(SHIFTED.values()))
    logs, wanted = np.zeros(len(names)), np.log(measured)
    for _ in range(NEWTON_ROUNDS):
        constants = shifted(start, dict(zip(names, np.exp(logs).tolist(), strict=True)))
        base = np.log(predict(constants))
        slopes = np.column_stack(
            [(np.log(predict(shifted(constants, {name: np.exp(DIFFERENCE)}))) - base) / DIFFERENCE for name in names]
        )
        miss = wanted - base
        weight = (ROW_STD_WEIGHT + 1) / (ROW_STD_WEIGHT + (miss / ROW_STD) ** 2) / ROW_STD**2
        curvature = slopes.T * weight @ slopes + np.diag(std**-2)
        move = np.linalg.solve(curvature, slopes.T @ (weight * miss) - logs / std**2)
        logs = logs + np.clip(move, -SERVING_LONGEST_MOVE, SERVING_LONGEST_MOVE)
        if np.abs(move).max() < 1e-3:
            break
    spread = np.sqrt(np.diag(np.linalg.inv(curvature)))
    return {
        name: Factor(value=float(f"{np.exp(log):.4g}"), std=float(f"{np.exp(log) * each:.4g}"))
        for name, log, each, before in zip(names, logs, spread, std, strict=True)
        if each < UNINFORMED_SHARE * before
    }


def shifted(constants: ServingConstants, factors: Mapping[str, float | Floats | Factor]) -> ServingConstants:
    """Return the constants, some of them multiplied by factors."""
    values = {name: each.value if isinstance(each, Factor) else each for name, each in factors.items()}
    return replace(constants, **{name: getattr(constants, name) * value for name, value in values.items()})


def learn_from_file(path: Path, cluster: Cluster, engine: str) -> tuple[Cluster, int]:
    """Return the cluster with the factors that the file's rows tell, in place of those that it had, and their number.

    The columns are `MEASURED_COLUMNS`; a model is a preset's name, times are in seconds, requests come as others end.
    Raises: UserError that names the line, the cell and what to do.
    """
    if not ServingEngine.of(engine).name:
        raise UserError(f"--learn {path}: say what was measured: --engine vLLM, SGLang or TensorRT-LLM, with release.")
    rates = Rates.of(cluster)
    _, start, options = ServingSoftware.of(engine, cluster.device, "--engine")
    rows = [_Measured(path, line, cells, cluster, rates, options) for line, cells in enumerate(_cells(path), start=2)]
    for line, row in enumerate(rows, start=2):
        expected_s = row.predict(start)
        if not 1 / MOST_OFF < row.value / expected_s < MOST_OFF:
            raise UserError(
                f"--learn {path}: line {line}: value = {row.value:g} is {row.value / expected_s:,.4g} times the "
                f"predicted {expected_s:.3g} s. Values are in seconds. Correct it, or leave the row out."
            )
    measured = np.array([row.value for row in rows])
    factors = learn_serving(lambda constants: np.array([row.predict(constants) for row in rows]), measured, start)
    return cluster.model_copy(update={"serving": factors, "serving_engine": engine}), len(rows)


def in_words(cluster: Cluster, rows: int) -> str:
    """Describe the factors, a line each."""
    lines = [f"factors on serving with {cluster.serving_engine} from {rows} row{'s' if rows > 1 else ''}:"]
    lines += [f"  {name:11} {each.value:.2f} +- {each.std:.2f}" for name, each in cluster.serving.items()]
    return "\n".join(lines)


def _cells(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            table = csv.DictReader(file)
            missing = [name for name in MEASURED_COLUMNS if name not in (table.fieldnames or [])]
            rows = list(table)
    except OSError as error:
        raise UserError(f"--learn {path}: cannot be read: {error.strerror}. Name a file of measurements.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--learn {path}: cannot be read as CSV: {error}. Save it as UTF-8.") from None
    if missing:
        raise UserError(
            f"--learn {path}: line 1: no column {', '.join(missing)}. Needed are {','.join(MEASURED_COLUMNS)}."
        )
    if not rows:
        raise UserError(f"--learn {path}: has no rows. Give five measurements or more.")
    return rows


class _Measured:
    """A row, and the model that predicts it."""

    def __init__(
        self, path: Path, line: int, cells: Mapping[str, str], cluster: Cluster, rates: Rates, options: ServingOptions
    ):
        def number(name: str, least: float = 1.0) -> float:
            try:
                found = float(cells[name])
            except (TypeError, ValueError):
                found = float("nan")
            if not least <= found < float("inf"):
                raise UserError(
                    f"--learn {path}: line {line}: {name} = {cells[name]!r} is not {least:g} or more. Correct it."
                )
            return found

        def one_of(name: str, known: Collection[str]) -> str:
            if (word := (cells[name] or "").strip()) not in known:
                raise UserError(f"--learn {path}: line {line}: {name} = {word!r} is none of {', '.join(known)}.")
            return word

        self.metric = one_of("metric", SERVING_METRICS)
        self.value = number("value", 1e-9)
        try:
            run = load(None, {"model.preset": cells["model"]}, overrides_mark="")
        except UserError as error:
            raise UserError(f"--learn {path}: line {line}: {error}") from None
        self._rates, self._cut = rates, ReplicaCut(number("tp"), number("pp"))
        self._formats = formats_of(cluster.device, rates, one_of("precision", BYTES_OF_WEIGHT), next(iter(CACHES)))
        self._options = options
        self._traffic = ServingLoad(number("batch_or_concurrency"), number("input_len"), number("output_len"))
        self._work = Workload.of_model(run.model, int(self._traffic.prompt + self._traffic.output), 1)
        taken, where = float(self._cut.tp) * float(self._cut.pp), f"--learn {path}: line {line}"
        if taken > cluster.devices:
            raise UserError(
                f"{where}: tp x pp = {taken:g} is more than the cluster's {cluster.devices} devices. Give the cluster "
                "that it was measured on."
            )
        model = self._model(ServingConstants())
        if model.room(self._traffic.prompt) < 1:
            raise UserError(
                f"{where}: {cells['model']} in {cells['precision']} needs {gib(model.weights_bytes)} GiB for weights "
                f"on a device with tp x pp = {taken:g}, and {cluster.device.name} has {gib(rates.memory_bytes)}. "
                "Correct tp, pp, precision or input_len."
            )

    def predict(self, constants: ServingConstants) -> float:
        found = self._model(constants).latencies(self._traffic)
        return float({"ttft": found.ttft_s, "tpot": found.tpot_s, "e2e_latency": found.e2e_s}[self.metric])

    def _model(self, constants: ServingConstants) -> ServingModel:
        return ServingModel(self._work, self._rates, self._cut, self._formats, constants, options=self._options)

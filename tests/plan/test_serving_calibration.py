"""Factors on serving: found again from rows that were made with them, and clear words for files that cannot be read."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from argosy.errors import UserError
from argosy.plan.cost.inference import ReplicaCut, ServingLoad, ServingModel, formats_of
from argosy.plan.cost.rates import Rates
from argosy.plan.cost.serving_constants import ServingConstants, ServingEngine, fitted_serving
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.serving_calibration import MEASURED_COLUMNS, learn_from_file, learn_serving, shifted
from argosy.plan.workload import Workload

CLUSTER = Cluster.parse("8xh100")
POPULATION = fitted_serving().of(ServingEngine.of("vLLM 0.10"), "NVIDIA", "H100-SXM")


def latencies_of(constants: ServingConstants, tp: int, sequences: int, prompt: int, output: int) -> tuple[float, float]:
    from argosy.config.load import load

    run = load(None, {"model.preset": "llama3-8b"})
    rates = Rates.of(CLUSTER)
    model = ServingModel(
        Workload.of_model(run.model, 1, 1),
        rates,
        ReplicaCut(tp),
        formats_of(CLUSTER.device, rates, "bf16", "16"),
        constants,
    )
    found = model.latencies(ServingLoad(sequences, prompt, output))
    return float(found.ttft_s), float(found.tpot_s)


LOADS = [(1, 1, 512, 256), (1, 16, 2048, 128), (2, 64, 1024, 512), (4, 8, 4096, 128), (8, 128, 512, 512)]


def written(path: Path, constants: ServingConstants) -> Path:
    rows = []
    for tp, sequences, prompt, output in LOADS:
        for metric, value in zip(("ttft", "tpot"), latencies_of(constants, tp, sequences, prompt, output), strict=True):
            rows.append(("llama3-8b", tp, 1, "bf16", sequences, prompt, output, metric, value))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([MEASURED_COLUMNS, *rows])
    return path


def test_five_loads_correct_the_others(tmp_path: Path) -> None:
    truth = replace(POPULATION, compute=POPULATION.compute * 1.5, overhead=POPULATION.overhead * 0.6)
    learnt, rows = learn_from_file(written(tmp_path / "rows.csv", truth), CLUSTER, "vLLM 0.10")
    assert (rows, learnt.serving_engine) == (10, "vLLM 0.10")
    found = shifted(POPULATION, learnt.serving)
    other = (2, 32, 1500, 300)
    before, after, true = (latencies_of(each, *other)[1] for each in (POPULATION, found, truth))
    assert abs(np.log(after / true)) < 0.05 < abs(np.log(before / true))
    assert 0 < learnt.serving["compute"].std < 0.4


def test_factors_are_kept_in_the_clusters_file(tmp_path: Path) -> None:
    truth = replace(POPULATION, compute=POPULATION.compute * 1.3)
    learnt, _ = learn_from_file(written(tmp_path / "rows.csv", truth), CLUSTER, "vLLM")
    learnt.save(tmp_path / "cluster.toml")
    assert Cluster.load(tmp_path / "cluster.toml").serving == learnt.serving


def test_predictions_that_were_right_are_left_alone() -> None:
    def predict(constants: ServingConstants) -> np.ndarray:
        return np.array([latencies_of(constants, *load)[1] for load in LOADS])

    factors = learn_serving(predict, predict(POPULATION), POPULATION)
    assert all(each.value == pytest.approx(1, abs=0.01) for each in factors.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("llama3-8b", "llama9"), "line 2: .*llama9"),
        (("ttft", "speed"), "metric = 'speed' is none of ttft, tpot, e2e_latency"),
        (("bf16", "q5"), "precision = 'q5' is none of"),
        (("512,256", "512,-1"), "output_len = '-1' is not 1 or more"),
        ((",value", ",seconds"), "no column value"),
        (("llama3-8b,1,1", "llama3-8b,16,1"), "line 2: tp x pp = 16 is more than the cluster's [0-9]+ devices"),
        (("llama3-8b,1,1", "llama3-70b,1,1"), "line 2: llama3-70b in bf16 needs 131.4 GiB for weights on a device"),
    ],
)
def test_files_that_cannot_be_read_say_where(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = written(tmp_path / "rows.csv", POPULATION)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(UserError, match=message):
        learn_from_file(path, CLUSTER, "vLLM")


def test_a_cache_of_windows_fits_however_long_the_prompt(tmp_path: Path) -> None:
    """50 GB of 100,000 tokens beside 54 GB of weights would not: 52 of 62 layers keep 1024 tokens."""
    path = tmp_path / "rows.csv"
    path.write_text(f"{','.join(MEASURED_COLUMNS)}\ngemma3-27b,1,1,bf16,1,100000,512,tpot,0.03\n")
    assert learn_from_file(path, CLUSTER, "vLLM")[1] == 1


def test_milliseconds_are_not_taken_for_seconds(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.csv", POPULATION)
    head, first, *rest = path.read_text().splitlines()
    cells = first.split(",")
    path.write_text("\n".join([head, ",".join([*cells[:-1], str(1000 * float(cells[-1]))]), *rest]))
    with pytest.raises(UserError, match=r"line 2: value = .* is 1,000 times the predicted .* in seconds"):
        learn_from_file(path, CLUSTER, "vLLM")


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.csv: cannot be read: No such file or directory\. Name a file"):
        learn_from_file(tmp_path / "none.csv", CLUSTER, "vLLM")
    (tmp_path / "bytes.csv").write_bytes(b"model\xff")
    with pytest.raises(UserError, match=r"bytes\.csv: cannot be read as CSV: .*Save it as UTF-8"):
        learn_from_file(tmp_path / "bytes.csv", CLUSTER, "vLLM")


def test_the_engine_has_to_be_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="say what was measured: --engine"):
        learn_from_file(written(tmp_path / "rows.csv", POPULATION), CLUSTER, "")

"""Training and serving on columns of devices: the planner's own predictions, and fronts that nothing beats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pytest import approx
from tests.plan.design.conftest import SERVE, TRAIN, Load

from argosy.config.layers import preset_path
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.design.bottlenecks import effects, rows_along, serving_along, training_along, where_it_stops
from argosy.plan.design.points import Points
from argosy.plan.design.speedup import speedups
from argosy.plan.design.sweep import ServingSweep, TrainingSweep, front
from argosy.plan.report.request import Question, of_model
from argosy.plan.report.serving_report import serving_report
from argosy.plan.search.search import search
from argosy.plan.search.serving import ServingQuestion


def test_a_catalogue_s_device_trains_as_the_planner_says(load: Load) -> None:
    space = load(TRAIN.replace("= 64", "= 16"))
    assert space.train is not None
    trained = TrainingSweep(space.train, Points.of(space), 1.2).swept()
    request = of_model("llama3-8b", "16xh100", Question(256, 8192, 1e12))
    found = search(CostModel.of(request.run, request.cluster), {"precision": ("bf16",)})
    assert trained.step_s[0] == approx(found.step_s.min(), rel=1e-6)


@pytest.mark.parametrize(("asked", "known"), [('["fp8", "bf16"]', ["bf16"]), ('"fp8"', ["bf16"])])
def test_a_device_trains_in_no_format_that_it_lacks(load: Load, asked: str, known: list[str]) -> None:
    space = load(f"{TRAIN}precision = {asked}", base='"a100"')
    assert space.train is not None
    assert TrainingSweep(space.train, Points.of(space), 1.2).formats == known


def test_a_catalogue_s_device_serves_as_the_planner_says(load: Load) -> None:
    space = load(SERVE.replace("[1, 2]", "[2]").replace("[1, 16]", "[16]"))
    assert space.serve is not None
    served = ServingSweep(space.serve, Points.of(space), 1.2).swept()
    request = of_model("llama3-8b", "2xh100", Question(seq_len=2560, serving=True, fix="tp=2,pp=1"))
    curve = serving_report(request, ServingQuestion()).curve
    (alike,) = [way for way in curve if (way.tp, way.sequences, way.prefill_devices) == (2, 16, 0)]
    assert served.tpot_s[0] == approx(float(alike.tpot_s.mid), rel=1e-6)
    assert served.tokens_per_s_device[0] == approx(alike.tokens_per_s_device, rel=1e-6)


def test_columns_give_what_each_device_gives_alone(load: Load) -> None:
    memory = {"memory_bytes_per_s": "[2e12, 8e12]", "nic_bytes_per_s": "[10e9, 100e9]"}
    work = TRAIN.replace("= 64", "= 16") + SERVE
    space = load(work, **memory)
    assert space.train is not None and space.serve is not None
    points = Points.of(space)
    trained, served = (
        TrainingSweep(space.train, points, 1.2).swept(),
        ServingSweep(space.serve, points, 1.2).swept(),
    )
    last = load(work, memory_bytes_per_s="8e12", nic_bytes_per_s="100e9")
    assert last.train is not None and last.serve is not None
    alone = Points.of(last)
    assert served.tpot_s[3] == approx(ServingSweep(last.serve, alone, 1.2).swept().tpot_s[0])
    assert trained.step_s[3] == approx(TrainingSweep(last.train, alone, 1.2).swept().step_s[0], rel=0.03)
    assert trained.step_s[3] < trained.step_s[0] and trained.regret < 0.05


def test_a_device_s_file_is_a_base_and_one_of_a_pair(load: Load, tmp_path: Path) -> None:
    """As the catalogue's device that it is; its path is relative to the space's file."""
    own, speedup = tmp_path / "mine.toml", '[speedup]\nbefore = "a100"\nafter = "{}"\n'
    own.write_text(preset_path("devices", "h100-sxm").read_text().replace('"H100-SXM"', '"Mine"'))
    small = TRAIN.replace("= 64", "= 2").replace("llama3-8b", "llama3.2-1b")
    work = small + SERVE.replace("[1, 16]", "[1]") + speedup
    named, filed = (load(work.format(name), base=f'"{name}"') for name in ("h100", own.name))
    assert named.train is not None and filed.train is not None and filed.serve is not None
    trained = [TrainingSweep(space.train, Points.of(space), 1.2).swept().step_s for space in (named, filed)]
    assert trained[1] == approx(trained[0])
    assert ServingSweep(filed.serve, Points.of(filed), 1.2).swept().tpot_s[0] > 0
    assert [each.whole for each in speedups(filed)] == approx([each.whole for each in speedups(named)])


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (
            "tpot_ms = 0.01",
            r"serve\.tpot_ms = 0\.01: no device of the space keeps it\. The nearest found has [1-9]\.?\d* ms with mem",
        ),
        (
            "tpot_ms = 1e4\nttft_ms = 0.1",
            r"serve\.ttft_ms = 0\.1: .* The nearest found has [\d.]+ ms with memory_bytes_per_s 8e\+12",
        ),
        (
            "output = 90_000",
            r"serve\.prompt and serve\.output: 92048 tokens together are more than the model's longest",
        ),
    ],
)
def test_a_service_that_no_device_gives_names_the_nearest(load: Load, limit: str, message: str) -> None:
    space = load(SERVE + limit, memory_bytes_per_s="[2e12, 8e12]")
    assert space.serve is not None
    with pytest.raises(UserError, match=message):
        ServingSweep(space.serve, Points.of(space), 1.2).swept()


def test_requests_that_fit_on_no_device_are_refused(load: Load) -> None:
    space = load(SERVE.replace("[1, 16]", "[100_000]"))
    assert space.serve is not None
    with pytest.raises(UserError, match=r"serve\.sequences = \[100000\]: llama3-8b .* fits on no device"):
        ServingSweep(space.serve, Points.of(space), 1.2).swept()


def test_weights_that_memory_does_not_hold_serve_no_single_request(load: Load) -> None:
    space = load(SERVE.replace("llama3-8b", "llama3.1-405b").replace("[1, 16]", "[1]"))
    assert space.serve is not None
    with pytest.raises(UserError, match=r"serve\.sequences = \[1\]: llama3\.1-405b .* fits on no device"):
        ServingSweep(space.serve, Points.of(space), 1.2).swept()


def test_a_model_that_fits_nowhere_is_refused(load: Load) -> None:
    space = load(TRAIN.replace("llama3-8b", "llama3.1-405b").replace("= 64", "= 8"))
    assert space.train is not None
    with pytest.raises(UserError, match=r"train\.devices = 8: llama3\.1-405b fits on no device"):
        TrainingSweep(space.train, Points.of(space), 1.2).swept()


def test_no_row_of_a_front_is_beaten_and_every_other_is() -> None:
    values = np.random.default_rng(0).uniform(size=(300, 3))
    values[7] = np.nan
    kept = set(front(values).tolist())
    for row in range(len(values)):
        beaten = ((values <= values[row]).all(axis=1) & (values < values[row]).any(axis=1)).any()
        assert (row in kept) == (not beaten and row != 7)


def test_the_time_per_token_stops_following_the_bandwidth_of_memory(load: Load) -> None:
    memory = '["GDDR6", "HBM2", "HBM3", "HBM4", "HBM6"]'
    space = load(SERVE.replace("[1, 2]", "[1]"), memory=memory, stacks="5", memory_bytes="80e9")
    assert space.serve is not None
    points = Points.of(space)
    serving = ServingSweep(space.serve.model_copy(update={"objective": "latency", "sequences": (1,)}), points, 1.2)
    stops = serving_along(serving, serving.swept(), "memory")
    follows = [stop.elasticity["memory bandwidth"] for stop in stops]
    assert follows[0] > 0.8 and follows[-1] < 0.3 and follows == sorted(follows, reverse=True)
    assert stops[0].binds == "memory bandwidth" and where_it_stops(stops) in stops[2:]
    assert sum(stops[0].parts.values()) == approx(1.0)


def test_bottlenecks_along_a_figure_hold_the_others_at_the_base(load: Load) -> None:
    space = load(TRAIN.replace("= 64", "= 16"), nic_bytes_per_s="[1e9, 50e9]", devices_per_node="[2, 8]")
    assert space.train is not None
    points = Points.of(space)
    rows = rows_along(points, "nic_bytes_per_s")
    assert [points.values(row)["devices_per_node"] for row in rows] == [8, 8]
    training = TrainingSweep(space.train, points, 1.2)
    trained = training.swept()
    thin, usual = training_along(training, trained, "nic_bytes_per_s")
    assert thin.elasticity["network"] > usual.elasticity["network"] and sum(thin.parts.values()) == approx(1.0)
    slower = effects(points, {"step_s": trained.step_s})["step_s"]["nic_bytes_per_s"]
    assert slower[0] == 1.0 and slower[1] < 1.0

"""What a list of runs and the head of a page show of one: figures that follow from the folder, and none that do not."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.plan.plan import Plan
from argosy.watch.nodes import EnergySoFar
from argosy.watch.overview import (
    MOST_PROFILES,
    details,
    energy,
    goodput,
    line,
    logs,
    model,
    profiles,
    row_of,
    run_timeline,
    unreadable,
)
from argosy.watch.reader import RunReader, RunTail
from run_folder import RunFolder
from run_folders import START_S, Made, Trouble, append
from watched import CPU

MADE = Made(steps=60, total_steps=100, ranks=4, step_s=0.5, evaluate_every=20, norms_every=10, is_finished=False)


def read(made: Made, folder: Path) -> RunReader:
    return RunReader.read(made.write(folder / "demo"))


def test_a_row_has_the_last_line_of_the_run(tmp_path: Path) -> None:
    reader = read(MADE, tmp_path)
    row, written = row_of("team/demo", reader), (reader.folder / "metrics.jsonl").read_text().splitlines()
    last = [step for step in map(json.loads, written) if "loss" in step][-1]
    assert (row.id, row.name, row.step, row.steps) == ("team/demo", "demo", 60, 100)
    assert (row.loss, row.tokens) == (last["loss"], last["tokens"])
    assert (row.devices, row.model) == (4, "llama-5m") and row.plan is not None and "dp_replicate=4" in row.plan
    assert row.validation_loss is not None and row.started_s is not None and row.started_s >= START_S


def test_a_row_costs_what_the_run_file_says_of_its_devices(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, energy={"price_per_device_h": 3.0, "currency": "EUR"})
    run.event("start", step=0, world_size=2, hardware=vars(CPU))
    run.event("end", step=0)
    row = row_of("demo", RunReader.read(tmp_path))
    assert row.cost is not None and row.currency == "EUR"


def test_a_run_that_has_ended_has_nothing_left_and_its_report_s_figures(tmp_path: Path) -> None:
    reader = read(replace(MADE, total_steps=60, is_finished=True), tmp_path)
    path = tmp_path / "demo/report.json"
    told = {"goodput": 0.7, "tokens_per_s": 12.0, "mfu": 0.5, "energy": {"money": 3.0, "currency": "EUR"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **told}))
    reader.refresh()
    row = row_of("demo", reader)
    assert (row.state, row.eta_s, row.goodput, row.tokens_per_s, row.mfu) == ("finished", None, 0.7, 12.0, 0.5)
    assert (row.cost, row.currency) == (3.0, "EUR")


def test_a_run_at_work_has_the_median_speed_of_its_last_steps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.event("start", step=0, world_size=2)
    run.step(*range(20))
    run.step(20, tokens_per_s=1.0, mfu=0.001)
    row = row_of("demo", RunReader.read(tmp_path))
    assert (row.tokens_per_s, row.mfu, row.cost) == (512.0, 0.25, None)


def test_a_run_in_minutes_that_goes_on_to_a_number_of_steps_makes_that_many(tmp_path: Path) -> None:
    reader = read(MADE, tmp_path)
    append(reader.folder / "events/rank-0.jsonl", {"time_s": START_S + 1, "event": "length", "steps": 80})
    reader.refresh()
    assert row_of("demo", reader).steps == 100


@pytest.mark.parametrize(("plan", "step_s"), [("tp=1", 4.0), ("tp=2", 8.0)])
def test_the_pace_is_that_of_the_last_step_s_batch_and_plan(tmp_path: Path, plan: str, step_s: float) -> None:
    run = RunFolder(tmp_path)
    ramp = {"steps": 200, "global_batch": 8, "batch_ramp": [{"until_step": 100, "global_batch": 2}]}
    save_run(RunConfig.model_validate({"name": "tiny", "train": ramp}), tmp_path / "run.toml")
    run.event("start", step=0, plan="tp=1")
    run.event("start", step=105, plan=plan)
    took_s = [*[1.0] * 100, *[4.0] * 5, *[step_s] * 5]
    for step in range(110):
        run.step(step, time_s=time.time() - sum(took_s[step + 1 :]))
    tail = RunTail(tmp_path)
    tail.refresh()
    for each in (RunReader.read(tmp_path), tail):
        assert row_of("tiny", each).eta_s == pytest.approx(90 * step_s, rel=0.01)


def test_a_worker_s_energy_is_over_its_own_tokens(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    Plan.parse("sync=async,compile=false").save(tmp_path / "plan.toml")
    run.step(0, 1, tokens=10**9)  # those of all workers
    append(tmp_path / "nodes/one.jsonl", {"time_s": 1.0, "energy": {"joules": 50.0, "source": "nvml"}})
    reader = RunReader.read(tmp_path)
    assert reader.run is not None
    assert energy(reader, EnergySoFar(tmp_path))["per_token"] == {"joules": 25.0 / reader.run.tokens_per_step}


def test_a_folder_that_tells_nothing_has_no_figures(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/metrics.jsonl").touch()
    row = row_of("bare", RunReader.read(tmp_path / "bare"))
    known = {key for key, value in vars(row).items() if value not in (None, "")}
    assert known <= {"id", "name", "state", "updated_s", "why"} and row.name == "bare"
    assert unreadable("x", "no rights") == {"id": "x", "name": "x", "state": "unreadable", "problems": ["no rights"]}


def test_a_list_of_runs_shows_the_last_losses_and_a_page_the_settings(tmp_path: Path) -> None:
    reader = read(MADE, tmp_path)
    tail = RunTail(reader.folder)
    tail.refresh()
    assert len(line("demo", tail)["spark"]) > 1 and "spark" not in line("demo", reader)
    shown = details("demo", reader)
    assert shown["config"]["run"] == {"name": "demo", "seed": 0, "plan": "auto"}
    assert (
        shown["config"]["train"]["steps"] == 100 and shown["predicted"]["cluster"] == "2 x h100-80gb, by the catalogue"
    )
    assert shown["predicted"]["seconds"]["gradients"] == 0.04 and shown["problems"] == []


def test_the_wall_time_is_split_into_parts_that_add_up(tmp_path: Path) -> None:
    reader = read(replace(MADE, trouble=Trouble(killed=(1, 40)), save_every=20), tmp_path)
    found = goodput(reader, run_timeline(reader))
    assert sum(found["parts"].values()) == pytest.approx(found["wall_s"], abs=0.01)
    assert all(seconds >= 0 for seconds in found["parts"].values())
    assert found["parts"]["recovery"] > 0 and found["parts"]["lost"] > 0
    assert found["goodput"] == pytest.approx(found["parts"]["useful"] / found["wall_s"], rel=1e-3)
    whole = read(MADE, tmp_path / "other")
    assert goodput(whole, run_timeline(whole))["parts"]["lost"] == 0


def test_norms_loads_and_samples_of_the_model(tmp_path: Path) -> None:
    reader = read(replace(MADE, experts=4, layers=3), tmp_path)
    found = model(reader)
    last = reader.last_line
    assert found["experts"]["step"] == 59
    assert found["experts"]["load"] == [last["experts"][layer]["tokens"] for layer in found["experts"]["layers"]]
    assert len(found["norms"]["layers"]) == len(found["norms"]["weight"]) and np.all(
        np.diff(found["norms"]["step"]) > 0
    )
    assert found["samples"] and found["samples"][-1]["prompt"] == "def"
    assert model(read(MADE, tmp_path / "dense"))["experts"] == {"layers": [], "step": None, "load": []}


def test_logs_are_the_last_lines_without_secrets_and_links_are_not_followed(tmp_path: Path) -> None:
    reader = read(MADE, tmp_path)
    append(reader.folder / "logs/worker-1.log", b"one\nGET https://me:secret@host/x\n")
    (reader.folder / "logs/worker-2.log").symlink_to("/etc/passwd")
    found = logs(reader)
    assert found == {
        "lines": [{"process": "worker-1", "text": text} for text in ("one", "GET https://***@host/x")], "more": 0,
    }  # fmt: skip


def test_profiles_are_listed_with_what_is_wrong_with_them(tmp_path: Path) -> None:
    reader = read(MADE, tmp_path)
    for name, summary in (("step-1", '{"wall_s": 2.0}'), ("step-2", None), ("step-3", "{")):
        (reader.folder / "profiles" / name).mkdir(parents=True)
        if summary is not None:
            (reader.folder / "profiles" / name / "summary.json").write_text(summary)
    first, second, third = profiles(reader)
    assert (first["name"], first["wall_s"], first["files"]) == ("step-1", 2.0, [{"name": "summary.json", "bytes": 15}])
    assert second == {"name": "step-2", "problem": "it has no summary.json yet", "files": []}
    assert third["problem"] == "summary.json cannot be read"


def test_of_many_profiles_the_newest_are_listed(tmp_path: Path) -> None:
    reader = read(MADE, tmp_path)
    names = [f"step-{step:08d}-{step + 2:08d}" for step in range(0, 10 * MOST_PROFILES + 20, 10)]
    for name in names:
        (reader.folder / "profiles" / name).mkdir(parents=True)
    assert [profile["name"] for profile in profiles(reader)] == names[2:]

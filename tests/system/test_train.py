"""Training as a user does it: the same numbers whatever stops it, and a folder that says all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import run_folder
from argosy.config.load import load
from commands import Folder
from waiting import PATIENT_S, wait_until

events = partial(run_folder.events, process="*")


def records(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(run_dir: Path) -> list[float]:
    return [r["loss"] for r in records(run_dir) if "loss" in r]


def of_nodes(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of all nodes that have steps, in the order of time."""
    lines = [json.loads(line) for path in run_dir.glob("nodes/*.jsonl") for line in path.read_text().splitlines()]
    return sorted((line for line in lines if "steps" in line), key=lambda line: float(line["time_s"]))


def workers(run_dir: Path) -> list[int]:
    """The worker processes of a run that has just been started."""
    return [event["pid"] for event in events(run_dir, "worker_started")]


@dataclass(frozen=True)
class Finished:
    """A run that is done."""

    folder: Folder
    said: str
    """All that the command printed."""

    @property
    def run_dir(self) -> Path:
        return self.folder.path / "runs/tiny"


@pytest.fixture
def folder(folder: Folder) -> Folder:
    """One in which commands are started as a user's shell does it."""
    folder.starts_anew = True
    return folder


@pytest.mark.slow
def test_a_run_goes_on_when_the_reader_of_its_output_does_not(folder):
    folder.write_run(processes=1)
    with folder.start("train", "run.toml") as process:
        process.stdout.close()
        process.stderr.close()
    run_dir = folder.path / "runs/tiny"
    assert process.returncode == 0
    assert len(losses(run_dir)) == 10
    assert not events(run_dir, "worker_died")
    logs = [path.read_text() for path in (run_dir / "logs").glob("worker-*.log")]
    assert [text.count("nobody reads") for text in logs if "10/10" in text] == [1]


@pytest.mark.slow
def test_a_run_without_standard_streams_trains(folder):
    folder.write_run(processes=1)
    command = f"{sys.executable} -m argosy train run.toml <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", command], cwd=folder.path, check=False)
    assert done.returncode == 0
    assert len(losses(folder.path / "runs/tiny")) == 10


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of ten steps that nothing stopped; tests may read it, not change it."""
    folder = Folder(tmp_path_factory.mktemp("finished"), corpus, starts_anew=True)
    folder.write_run()
    return Finished(folder, folder.argosy("train", "run.toml", "--json"))


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run that nothing stopped."""
    folder = Folder(tmp_path_factory.mktemp("undisturbed"), corpus)
    folder.write_run(steps=40)
    folder.argosy("train", "run.toml")
    return losses(folder.path / "runs/tiny")


def test_a_run_leaves_a_folder_that_says_all(finished: Finished) -> None:
    folder, run_dir = finished.folder, finished.run_dir
    report = json.loads(next(line for line in finished.said.splitlines() if line.startswith("{")))
    names = {p.name for p in run_dir.iterdir()}
    assert {"run.toml", "plan.toml", "tokenizer.json", "metrics.jsonl", "events", "checkpoints", "report.json"} <= names
    assert report["status"] == "finished" and report["steps"] == 10
    assert report["validation"]["bits_per_byte"] > 0 and report["validation"]["unigram_bits_per_byte"] > 0
    assert abs(sum(v for k, v in report["seconds"].items() if k != "step") - report["seconds"]["step"]) < 0.05
    assert [c["step"] for c in folder.documents("checkpoint", "list", run_dir)] == [8, 10]
    assert "whole" in folder.argosy_here("checkpoint", "verify", run_dir)
    assert folder.documents("evaluate", run_dir, "--max-tokens", 2000)[0]["loss"] == pytest.approx(
        report["validation"]["loss"], rel=1e-5
    )
    assert folder.argosy_here("generate", run_dir, "--prompt", "def ", "--max-tokens", 5).startswith("def ")


def check_that_lines_tell_of_all_ranks(run_dir: Path) -> None:
    lines = of_nodes(run_dir)
    assert lines[0]["steps"][0] == 0 and lines[-1]["steps"][1] == 9
    for line in lines:
        assert line["ranks"] == [0, 1]
        values = [line["step_s"], line["memory_bytes"], *line["seconds"].values()]
        values += line["communication"]["replicate"]["node"].values()
        assert all(len(of_ranks) == 2 for of_ranks in values)
    assert sum(line.get("checkpoint_bytes", 0) for line in lines) > 0


def test_all_ranks_are_in_the_lines_of_their_node_and_the_first_one_in_those_of_the_steps(finished: Finished) -> None:
    check_that_lines_tell_of_all_ranks(finished.run_dir)
    for step in (record for record in records(finished.run_dir) if "loss" in record):
        assert sum(s for name, s in step["seconds"].items() if name != "step") == pytest.approx(
            step["seconds"]["step"], abs=1e-4
        )
        waited_s, sent = step["communication"]["replicate"]["node"]
        assert 0 < waited_s < step["seconds"]["step"] and sent > 2 * step["memory"]["gradients"] / 2
        assert sum(step["memory"].values()) == step["memory_bytes"] and step["time_s"] > 1.6e9


@pytest.mark.slow
def test_the_resolved_run_file_repeats_the_run(folder: Folder) -> None:
    folder.write_run()
    folder.argosy("train", "run.toml")
    folder.argosy("train", "runs/tiny/run.toml", "--run-dir", "runs/again")
    assert losses(folder.path / "runs/again") == losses(folder.path / "runs/tiny")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "everything"])
@pytest.mark.parametrize("after_steps", [3, pytest.param(17, marks=pytest.mark.slow)])
def test_kill_9_at_any_moment_changes_no_loss(
    folder: Folder, undisturbed: list[float], victim: str, after_steps: int
) -> None:
    folder.write_run(steps=40)
    run_dir = folder.path / "runs/tiny"
    process = folder.start("train", "run.toml")
    wait_until(lambda: len(losses(run_dir)) >= after_steps)
    pids = workers(run_dir)
    if victim == "worker":
        os.kill(pids[-1], signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENT_S)
        assert process.returncode == 0, err
        assert "SIGKILL" in err and events(run_dir, "worker_died")
        assert {line["generation"] for line in of_nodes(run_dir)} == {1, 2}
    else:
        process.kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        folder.argosy("train", "run.toml")
    assert losses(run_dir) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_was(
    folder: Folder, undisturbed: list[float], number: signal.Signals
) -> None:
    folder.write_run(steps=40, every_steps=0)
    run_dir = folder.path / "runs/tiny"
    process = folder.start("train", "run.toml")
    wait_until(lambda: len(losses(run_dir)) >= 5)
    for _ in range(2):  # as `timeout` and SLURM do
        process.send_signal(number)
    _, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 128 + number, err
    assert "stopping after this" in err
    saved = folder.documents("checkpoint", "list", run_dir)
    assert len(saved) == 1 and saved[0]["step"] == len(losses(run_dir))
    folder.argosy("train", "run.toml")
    assert losses(run_dir) == undisturbed


@pytest.mark.slow
def test_a_signal_in_the_first_step_which_may_compile_ends_the_run_at_once(folder: Folder) -> None:
    """Of a new run, and of one that goes on: there is nothing to save, and nobody is waited for."""
    folder.write_run(steps=40, every_steps=0)
    run_dir = folder.path / "runs/tiny"

    def stopped(faults: str, condition: Callable[[], bool]) -> str:
        process = folder.start("train", "run.toml", ARGOSY_FAULTS=faults)
        wait_until(condition)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENT_S)
        assert process.returncode == 128 + signal.SIGTERM, err
        return err

    first = stopped("sleep@forward:seconds=600", lambda: len(events(run_dir, "fault")) == 2)
    assert "there is nothing to save" in first and "from the start" in first
    stopped("", lambda: len(losses(run_dir)) >= 5)
    made = len(losses(run_dir))
    again = stopped("sleep@forward:seconds=601", lambda: len(events(run_dir, "fault")) == 4)
    assert "there is nothing to save" in again and f"from step {made}" in again
    assert len(losses(run_dir)) == made


@pytest.mark.slow
def test_ctrl_c_in_a_long_evaluation_waits_for_one_batch_and_the_run_evaluates_when_it_goes_on(folder: Folder) -> None:
    """Meanwhile a second run in the same folder is refused."""
    run_file = folder.write_run(steps=6, every_steps=0)
    run_file.write_text(run_file.read_text().replace("tokens = 2000", "tokens = 20_000"))
    process = folder.start("train", "run.toml", ARGOSY_FAULTS="slow@evaluate:seconds=0.2")
    run_dir = folder.path / "runs/tiny"
    wait_until(lambda: len(losses(run_dir)) == 4)  # the fifth step's line comes after its evaluation
    began = time.monotonic()
    refused = folder.argosy_here("train", "run.toml", code=2)
    assert "in use by process" in refused and "--run-dir" in refused
    time.sleep(max(0, 2 - (time.monotonic() - began)))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 130 and "evaluation batch" in err, err
    assert len(losses(run_dir)) == 5
    folder.argosy("train", "run.toml")
    assert [record["step"] for record in records(run_dir) if "validation_loss" in record] == [4, 5]


@pytest.mark.slow
def test_an_evaluation_that_gets_on_is_never_taken_for_a_hang(folder: Folder) -> None:
    folder.write_run(steps=10, every_steps=0)  # it evaluates twice, and the first in a world is given more time
    run_dir, slow = folder.path / "runs/tiny", "slow@evaluate:seconds=0.1"
    process = folder.start("train", "run.toml", "--resilience.hang_s", "1", ARGOSY_FAULTS=slow)
    _, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 0 and not events(run_dir, "hang"), err


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_launcher(folder: Folder) -> None:
    folder.write_run(steps=100_000)
    process = folder.start("train", "run.toml")
    wait_until(lambda: len(losses(folder.path / "runs/tiny")) >= 1)
    pids = workers(folder.path / "runs/tiny")
    process.kill()
    process.communicate()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds=10)


@pytest.mark.slow
def test_a_changed_model_or_data_is_refused_and_says_what_differs(folder: Folder) -> None:
    folder.write_run()
    folder.argosy("train", "run.toml")
    text = folder.argosy("train", "run.toml", "--model.layers", 3, code=2)
    assert "model.layers: 2 in the folder, 3 now" in text and "--run-dir" in text
    text = folder.argosy("train", "run.toml", "--optimizer.lr", 1e-3, "--train.steps", 12, code=2)
    assert "optimizer.lr: 0.01 in the folder, 0.001 now" in text and "--accept-changes" in text
    folder.argosy("train", "run.toml", "--optimizer.lr", 1e-3, "--train.steps", 12, "--accept-changes")
    assert len(losses(folder.path / "runs/tiny")) == 12


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(folder: Folder, undisturbed: list[float]) -> None:
    run = folder.write_run(steps=40)
    folder.argosy("train", "run.toml", "--train.steps", 10)
    run_dir = folder.path / "runs/tiny"
    file = run_dir / "checkpoints/step-00000010/rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)
    assert file.name in folder.argosy("checkpoint", "verify", run_dir, code=1)
    text = folder.argosy("train", run)
    assert file.name in text and "Using step-00000008" in text


def test_a_full_disk_leaves_the_checkpoint_before_as_the_newest(folder: Folder) -> None:
    """The run's folder lies on a file system with room for little more than one checkpoint."""
    disk = folder.path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1000k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs the rights of root")
    folder.starts_anew = False  # how it is started makes no difference to its disk
    try:
        folder.write_run(steps=10, every_steps=2)
        text = folder.argosy("train", "run.toml", "--run-dir", disk / "run", "--checkpoint.keep_last", 5, code=74)
        assert "No space left on device" in text
        kept = folder.documents("checkpoint", "list", disk / "run")
        assert kept and kept[-1]["step"] < 10
        assert "whole" in folder.argosy_here("checkpoint", "verify", disk / "run")
        written = [record["step"] for record in records(disk / "run") if "loss" in record]
        assert written == sorted(set(written)) and " 10/10 " in text  # lines are lost whole, and training goes on
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
def test_a_finished_run_is_not_run_again(folder: Folder) -> None:
    folder.write_run()
    folder.argosy("train", "run.toml")
    before = losses(folder.path / "runs/tiny")
    folder.argosy("train", "run.toml")
    assert losses(folder.path / "runs/tiny") == before


def test_it_joins_the_processes_of_torchrun(folder: Folder, finished: Finished) -> None:
    folder.write_run()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, "-m", "argosy", "train", "run.toml"], cwd=folder.path, check=True, timeout=PATIENT_S)
    assert losses(folder.path / "runs/tiny") == losses(finished.run_dir)
    check_that_lines_tell_of_all_ranks(folder.path / "runs/tiny")


@pytest.mark.slow
def test_a_budget_of_minutes_ends_on_time(folder: Folder) -> None:
    run = folder.write_run(every_steps=0)
    run.write_text(run.read_text().replace("steps = 10", "steps = 0\nminutes = 0.15", 1))
    began = time.monotonic()
    folder.argosy("train", "run.toml")
    assert time.monotonic() - began < 30
    steps = load(folder.path / "runs/tiny/run.toml").train.steps
    assert steps == len(losses(folder.path / "runs/tiny")) > 2
